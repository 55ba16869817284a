#!/usr/bin/env python3
"""Raw HTTP against a running server with the demo model and the key "secret".

    python3 tests/raw_http.py PORT PROCESS

Standard library only. Prints "ok NAME" or "not ok NAME: why". Ends the server: the last test
is that SIGTERM drains.
"""
import json
import os
import signal
import socket
import sys
import time

PORT, PROCESS = int(sys.argv[1]), int(sys.argv[2])
KEY = 'Authorization: Bearer secret\r\n'
failed = 0


def dial():
    s = socket.create_connection(('127.0.0.1', PORT), timeout=30)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def head(method, path, n=None, extra=KEY):
    length = '' if n is None else f'Content-Length: {n}\r\n'
    return f'{method} {path} HTTP/1.1\r\nHost: x\r\n{extra}{length}\r\n'.encode()


class Reader:
    """Responses of one connection, one after the other."""

    def __init__(self, s):
        self.f = s.makefile('rb')

    def next(self, has_body=True):
        status = int(self.f.readline().split()[1])
        headers = {}
        while (line := self.f.readline()) not in (b'\r\n', b''):
            name, value = line.decode().split(':', 1)
            headers[name.strip().lower()] = value.strip()
        body = b''
        if headers.get('transfer-encoding') == 'chunked':
            while (n := int(self.f.readline(), 16)) > 0:
                body += self.f.read(n)
                self.f.readline()
            self.f.readline()
        elif has_body:
            body = self.f.read(int(headers.get('content-length', 0)))
        return status, headers, body


def ask(method, path, body=None, extra=KEY):
    with dial() as s:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        s.sendall(head(method, path, None if data is None else len(data), extra) + (data or b''))
        return Reader(s).next(method != 'HEAD')


def chat(**more):
    return {'messages': [{'role': 'user', 'content': 'Hello!'}], 'temperature': 0,
            'reasoning_effort': 'low', **more}


def active():
    text = ask('GET', '/metrics')[2].decode()
    return sum(int(line.split()[1]) for line in text.splitlines()
               if line.startswith(('hoist_requests_running ', 'hoist_requests_waiting ')))


def becomes_idle():
    end = time.time() + 1
    while active() > 0:
        assert time.time() < end, 'a request still runs after a second'
        time.sleep(0.02)


def test_key():
    assert ask('GET', '/health', extra='')[0] == 200
    status, headers, body = ask('GET', '/v1/models', extra='')
    assert status == 401 and json.loads(body)['error']['code'] == 'invalid_api_key'
    assert ask('GET', '/v1/models', extra='x-api-key: secret\r\n')[0] == 200
    assert ask('POST', '/v1/chat/completions', chat(), extra='x-api-key: wrong\r\n')[0] == 401


def test_preflight():
    status, headers, _ = ask('OPTIONS', '/v1/chat/completions', extra=(
        'Origin: http://a.example\r\nAccess-Control-Request-Method: POST\r\n'
        'Access-Control-Request-Headers: authorization, x-stainless-os\r\n'))
    assert status == 204 and headers['access-control-allow-origin'] == '*'
    assert 'x-stainless-os' in headers['access-control-allow-headers']


def test_keep_alive_and_pipeline():
    body = json.dumps(chat()).encode()
    with dial() as s:
        s.sendall((head('POST', '/v1/chat/completions', len(body)) + body) * 2 + head('GET', '/health'))
        r = Reader(s)
        texts = [json.loads(r.next()[2])['choices'][0]['message']['content'] for _ in range(2)]
        assert texts == ['Hello! How can I help you today?'] * 2, texts
        assert r.next()[0] == 200


def test_head_and_slash():
    assert ask('HEAD', '/')[0] == 200
    assert ask('GET', '/v1/models/')[0] == 200
    status, headers, _ = ask('GET', '/v1/completions')
    assert status == 405 and 'POST' in headers['allow']


def test_chunked_request():
    body = json.dumps(chat()).encode()
    with dial() as s:
        s.sendall(head('POST', '/v1/chat/completions', extra=KEY + 'Transfer-Encoding: chunked\r\n'))
        for i in range(0, len(body), 7):
            s.sendall(b'%x\r\n%s\r\n' % (len(body[i:i + 7]), body[i:i + 7]))
        s.sendall(b'0\r\n\r\n')
        assert Reader(s).next()[0] == 200


def test_bad_bodies():
    for body in (b'', b'{', b'\xff\xfe', b'{"messages":"\xff"}', b'[' * 100000, b'{"a":' * 5000,
                 b'null', b'{"prompt":"x"} x'):
        status, _, answer = ask('POST', '/v1/chat/completions', body)
        assert status == 400, (body[:40], status)
        assert json.loads(answer)['error']['type'] == 'invalid_request_error'


def test_too_large():
    with dial() as s:
        s.sendall(head('POST', '/v1/completions', 1 << 31))
        assert Reader(s).next()[0] == 413


def test_events():
    status, headers, body = ask('POST', '/v1/chat/completions', chat(stream=True))
    assert status == 200 and headers['content-type'] == 'text/event-stream; charset=utf-8'
    assert headers['cache-control'] == 'no-cache' and headers['x-accel-buffering'] == 'no'
    assert body.endswith(b'data: [DONE]\n\n')
    events = [json.loads(e[6:]) for e in body.decode().split('\n\n') if e[:7] == 'data: {']
    assert events[0]['choices'][0]['delta'] == {'role': 'assistant', 'content': ''}
    assert ''.join(e['choices'][0]['delta'].get('content', '') for e in events) == \
        'Hello! How can I help you today?'
    assert [e['choices'][0]['finish_reason'] for e in events][-2:] == [None, 'stop']
    assert not any('usage' in e for e in events) and 'timings' in events[-1]


def test_close_frees():
    endless = {'prompt': 'Once upon a time', 'ignore_eos': True, 'max_tokens': 20000}
    long_prompt = {'prompt': 'the king said ' * 6000, 'max_tokens': 5}
    for body in ({**endless, 'stream': True}, endless, long_prompt, {**long_prompt, 'stream': True}):
        data = json.dumps(body).encode()
        for _ in range(3):
            with dial() as s:
                s.sendall(head('POST', '/v1/completions', len(data)) + data)
                time.sleep(0.15)
                assert active() > 0, 'it ended before the client left'
            becomes_idle()
    assert ask('POST', '/v1/chat/completions', chat())[0] == 200


def test_user_special_tokens_stay_text():
    def count(text):
        body = {'messages': [{'role': 'user', 'content': text}]}
        return json.loads(ask('POST', '/tokenize', body)[2])

    marker = json.loads(ask('POST', '/tokenize', {'content': '<|user|>'})[2])['tokens']
    assert len(marker) == 1
    assert count('<|user|>')['tokens'].count(marker[0]) == 1     # the template's own


def test_drain():
    data = json.dumps({'prompt': 'Once upon a time', 'ignore_eos': True, 'max_tokens': 150,
                       'stream': True}).encode()
    with dial() as s, dial() as idle:
        s.sendall(head('POST', '/v1/completions', len(data)) + data)
        while active() == 0:
            pass
        os.kill(PROCESS, signal.SIGTERM)
        body = Reader(s).next()[2]
        assert body.endswith(b'data: [DONE]\n\n') and body.count(b'"text"') >= 150
        assert idle.recv(1) == b''
    for _ in range(100):
        try:
            dial().close()
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError('still takes connections')


for name, test in [(n, f) for n, f in globals().copy().items() if n.startswith('test_')]:
    try:
        test()
        print(f'ok http/{name[5:]}', flush=True)
    except Exception as e:
        failed += 1
        print(f'not ok http/{name[5:]}: {type(e).__name__} {e}', flush=True)
sys.exit(1 if failed else 0)
