#!/usr/bin/env python3
"""Guard rails of a server of our own: keys, admin key, key file, TLS, unix socket, hostile bytes.

    python3 tests/guard.py BUILD

Standard library only; certificates come from the openssl command. Prints "ok NAME", "not ok NAME:
why" or "SKIP NAME: why".
"""
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import warnings

warnings.simplefilter('ignore', DeprecationWarning)      # of TLS 1.1, which must be refused
BUILD = sys.argv[1]
DIR = tempfile.mkdtemp(prefix='hoist-guard-')
MODEL = 'models/demo-exl3'
SECRET = 'zebra-umbrella-31337'         # must never be in a log
failed = 0


class Skip(Exception):
    pass


@contextlib.contextmanager
def serve(*options, port=True):
    """A server with these options; yields (port or None, process, log file)."""
    log = open(os.path.join(DIR, 'log'), 'w+')
    p = subprocess.Popen([f'{BUILD}/hoist', 'serve', MODEL, '--port', '0', *options], stdout=log,
                         stderr=subprocess.STDOUT)
    try:
        for _ in range(300):
            text = open(log.name).read()
            m = re.search(r'^serving on (.*)$', text, re.M)
            if m or p.poll() is not None:
                break
            time.sleep(0.1)
        assert m, f'did not start: {text[-200:]}'
        yield (int(m[1].rsplit(':', 1)[1]) if port else None), p, log.name
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 0, f'ended with {p.returncode}: {open(log.name).read()[-500:]}'
    finally:
        if p.poll() is None:
            p.kill()
            p.wait()
        log.close()


def refuses(*options, status=1):
    """Its one sentence on standard error."""
    p = subprocess.run([f'{BUILD}/hoist', 'serve', MODEL, '--port', '0', *options],
                       capture_output=True, text=True, timeout=60)
    assert p.returncode == status, p
    return p.stderr


def connect(port, context=None):
    if context is None:
        return http.client.HTTPConnection('127.0.0.1', port, timeout=30)
    return http.client.HTTPSConnection('localhost', port, timeout=30, context=context)


def ask(c, method, path, body=None, **headers):
    data = None if body is None else json.dumps(body)
    c.request(method, path, data, {'content-type': 'application/json', **headers})
    r = c.getresponse()
    return r.status, r.read()


def bearer(key):
    return {'Authorization': f'Bearer {key}'}


HELLO = {'messages': [{'role': 'user', 'content': 'Hello!'}], 'temperature': 0,
         'reasoning_effort': 'low'}
ANSWER = 'Hello! How can I help you today?'


def content(body):
    return json.loads(body)['choices'][0]['message']['content']


def test_keys():
    path = os.path.join(DIR, 'keys')
    with open(path, 'w') as f:
        f.write('# the team\ncarol=sk-carol\n\n  sk-nameless  \n')
    with serve('--api-key', 'sk-one', '--api-key', 'bob=sk-bob', '--api-key-file', path,
               '--admin-key', 'sk-root') as (port, _, _):
        c = connect(port)
        assert ask(c, 'GET', '/health')[0] == 200
        for key in ('sk-one', 'sk-bob', 'sk-carol', 'sk-nameless', 'sk-root'):
            assert ask(c, 'GET', '/v1/models', **bearer(key))[0] == 200, key
            assert ask(c, 'GET', '/v1/models', **{'x-api-key': key})[0] == 200, key
        for key in ('bob=sk-bob', 'sk-on', 'sk-onee', 'SK-ONE', '', '# the team', 'carol'):
            assert ask(c, 'GET', '/v1/models', **bearer(key))[0] == 401, key
        for path in ('/v1/models', '/api/tags', '/props', '/openapi.json', '/nothing', '/'):
            status, body = ask(c, 'GET', path)
            assert status == 401 and b'error' in body, path
        for method, path in (('GET', '/metrics'), ('GET', '/flush_cache'), ('POST', '/flush_cache')):
            assert ask(c, method, path)[0] == 401, path
            status, body = ask(c, method, path, **bearer('sk-one'))
            assert status == 403 and json.loads(body)['error']['code'] == 'forbidden', path
            assert ask(c, method, path, **bearer('sk-root'))[0] == 200, path


def test_key_before_body():
    """Without a key nobody makes the server read a body."""
    with serve('--api-key', 'sk-one') as (port, _, _):
        for extra in ('', 'Expect: 100-continue\r\n'):
            with socket.create_connection(('127.0.0.1', port), 10) as s:
                s.sendall(f'POST /v1/completions HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: 30000000\r\n\r\n'.encode())
                answer = b''
                while piece := s.recv(4096):
                    answer += piece
                assert answer.startswith(b'HTTP/1.1 401 '), answer
                error = json.loads(answer.split(b'\r\n\r\n')[1])['error']
                assert error['code'] == 'invalid_api_key' and error['type'] == 'authentication_error'
        with socket.create_connection(('127.0.0.1', port), 10) as s:
            s.sendall(b'POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-one\r\n'
                      b'Expect: 100-continue\r\nContent-Length: 15\r\n\r\n')
            assert s.recv(4096) == b'HTTP/1.1 100 Continue\r\n\r\n'
            s.sendall(b'{"content":"a"}')
            assert s.recv(12) == b'HTTP/1.1 200'


def test_key_options():
    empty = os.path.join(DIR, 'empty')
    open(empty, 'w').write('# nothing\n')
    assert 'empty' in refuses('--api-key', '', status=2)
    assert 'empty' in refuses('--api-key-file', empty)
    assert 'empty' in refuses('--admin-key', '', status=2)
    assert '/nothing' in refuses('--api-key-file', '/nothing')
    assert 'printable' in refuses('--api-key', 'a b')


def test_no_prompt_in_log():
    with serve('--api-key', 'dora=sk-dora') as (port, _, log):
        c = connect(port)
        for path, body in (
                ('/v1/chat/completions', {'messages': [{'role': 'user', 'content': SECRET}]}),
                ('/v1/chat/completions', {'messages': [{'role': SECRET, 'content': 'a'}]}),
                ('/v1/completions', {'prompt': SECRET, 'max_tokens': 2}),
                ('/generate', {'text': SECRET, 'sampling_params': {'max_new_tokens': 2}}),
                ('/api/generate', {'prompt': SECRET, 'stream': False, 'options': {'num_predict': 2}}),
                ('/v1/embeddings', {'input': SECRET}), ('/tokenize', {'content': SECRET}),
                ('/apply-template', {'messages': [{'role': 'user', 'content': SECRET}]})):
            ask(c, 'POST', path, body, **bearer('sk-dora'))
        text = open(log).read()
        assert SECRET not in text and 'sk-dora' not in text, text


def certificate():
    if shutil.which('openssl') is None:
        raise Skip('no openssl command')
    cert, key = os.path.join(DIR, 'cert.pem'), os.path.join(DIR, 'key.pem')
    if not os.path.exists(cert):
        subprocess.run(['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt',
                        'ec_paramgen_curve:prime256v1', '-nodes', '-days', '2', '-subj', '/CN=localhost',
                        '-addext', 'subjectAltName=DNS:localhost', '-keyout', key, '-out', cert],
                       check=True, capture_output=True)
    if 'TLS: this build has none' in refuses('--tls-cert', cert, '--tls-key', '/nothing'):
        raise Skip('a build without TLS')
    return cert, key


def test_tls():
    cert, key = certificate()
    with serve('--tls-cert', cert, '--tls-key', key) as (port, _, _):
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context(cafile=cert)
            context.minimum_version = context.maximum_version = version
            context.set_alpn_protocols(['h2', 'http/1.1'])
            c = connect(port, context)
            for _ in range(3):                          # one connection, several requests
                status, body = ask(c, 'POST', '/v1/chat/completions', HELLO)
                assert status == 200 and content(body) == ANSWER
            assert c.sock.selected_alpn_protocol() == 'http/1.1'
            status, body = ask(c, 'POST', '/v1/chat/completions', {**HELLO, 'stream': True})
            assert status == 200 and body.endswith(b'data: [DONE]\n\n')
        # Large bodies both ways: many records, and more than one write.
        text = 'word ' * 20000
        ids = json.loads(ask(c, 'POST', '/tokenize', {'content': text})[1])['tokens']
        status, body = ask(c, 'POST', '/detokenize', {'tokens': ids * 10})
        assert status == 200 and json.loads(body)['content'] == text * 10
        # A client that reads slowly, of an answer larger than all buffers.
        big = json.dumps({'tokens': ids * 60})
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        raw.connect(('127.0.0.1', port))
        with context.wrap_socket(raw, server_hostname='localhost') as s:
            s.sendall(f'POST /detokenize HTTP/1.0\r\nContent-Length: {len(big)}\r\n\r\n{big}'.encode())
            got = b''
            while piece := s.recv(100000):
                got += piece
                time.sleep(0.001)
        assert json.loads(got.split(b'\r\n\r\n', 1)[1])['content'] == text * 60
        # Several at once.
        answers = []
        def one():
            answers.append(content(ask(connect(port, context), 'POST', '/v1/chat/completions', HELLO)[1]))
        threads = [threading.Thread(target=one) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert answers == [ANSWER] * 8


def test_tls_hostile():
    cert, key = certificate()
    context = ssl.create_default_context(cafile=cert)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with serve('--tls-cert', cert, '--tls-key', key) as (port, _, _):
        for junk in (b'GET / HTTP/1.1\r\nHost: x\r\n\r\n', b'\x00' * 100, b'\x16\x03\x01\xff\xff' + b'a' * 70000,
                     os.urandom(3000)):
            with socket.create_connection(('127.0.0.1', port), 10) as s:
                s.sendall(junk)
                s.settimeout(10)
                got = b''
                with contextlib.suppress(ConnectionResetError):
                    while piece := s.recv(4096):
                        got += piece
                assert (b'ask with https://' in got) == junk.startswith(b'GET'), got
        try:
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.set_ciphers('ALL:@SECLEVEL=0')
            with socket.create_connection(('127.0.0.1', port), 10) as s:
                old.wrap_socket(s)
            raise AssertionError('TLS 1.1 was spoken')
        except (ssl.SSLError, ConnectionResetError, ValueError):
            pass
        # A client that leaves in the middle of an answer, with and without a goodbye.
        for polite in (True, False):
            s = context.wrap_socket(socket.create_connection(('127.0.0.1', port), 10),
                                    server_hostname='localhost')
            data = json.dumps({'prompt': 'Once', 'ignore_eos': True, 'max_tokens': 20000, 'stream': True})
            s.sendall(f'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n{data}'.encode())
            assert s.recv(1000)
            if polite:
                with contextlib.suppress(ssl.SSLError, OSError):
                    s.unwrap()
            s.close()
        c = connect(port, context)
        for _ in range(50):
            running = re.search(rb'^hoist_requests_running (\d+)', ask(c, 'GET', '/metrics')[1], re.M)[1]
            if running == b'0':
                break
            time.sleep(0.05)
        assert running == b'0', 'a request of a client that left still runs'
        assert ask(c, 'GET', '/health')[0] == 200


def test_tls_options():
    cert, key = certificate()
    other = os.path.join(DIR, 'other.pem')
    subprocess.run(['openssl', 'genpkey', '-algorithm', 'EC', '-pkeyopt', 'ec_paramgen_curve:prime256v1',
                    '-out', other], check=True, capture_output=True)
    assert 'certificate /nothing' in refuses('--tls-cert', '/nothing', '--tls-key', key)
    assert 'key /nothing' in refuses('--tls-cert', cert, '--tls-key', '/nothing')
    assert 'TLS' in refuses('--tls-cert', cert, '--tls-key', other)
    assert 'needs' in refuses('--tls-cert', cert)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__('localhost', timeout=30)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.path)


def test_unix():
    path = os.path.join(DIR, 'sock')
    stale = socket.socket(socket.AF_UNIX)           # left behind by a program that ended
    stale.bind(path)
    stale.close()
    with serve('--unix', path, port=False):
        c = UnixConnection(path)
        status, body = ask(c, 'POST', '/v1/chat/completions', HELLO)
        assert status == 200 and content(body) == ANSWER
        status, body = ask(c, 'POST', '/v1/chat/completions', {**HELLO, 'stream': True})
        assert body.endswith(b'data: [DONE]\n\n')
        assert 'in use' in refuses('--unix', path)
    assert not os.path.exists(path), 'the socket stays behind'
    assert 'path' in refuses('--unix', 'x' * 200)
    plain = os.path.join(DIR, 'plain')
    open(plain, 'w').close()
    assert 'in use' in refuses('--unix', plain) and os.path.exists(plain)


# Valid requests, mutated: the process answers or closes, never dies, never mixes answers up.
def mutations(seed, n):
    rng = random.Random(seed)
    body = json.dumps({**HELLO, 'max_tokens': 2}).encode()
    whole = [b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (len(body), body),
             b'POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n'
             % (len(body), body),
             b'GET /v1/models?a=b HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\nX-A: b\r\n\r\n']
    words = [b'\r\n', b'\n', b'\r', b'\0', b':', b' ', b'Transfer-Encoding: chunked\r\n', b'Content-Length: 5\r\n',
             b'HTTP/1.0', b'0\r\n\r\n', b'ffffffff', b'\xff', b'{', b'"', b'[' * 200, b'A' * 9000]
    for _ in range(n):
        b = bytearray(b''.join(rng.choices(whole, k=rng.randint(1, 3))))
        for _ in range(rng.randint(1, 4)):
            i, kind = rng.randrange(len(b)), rng.randrange(4)
            if kind == 0:
                b[i] = rng.randrange(256)
            elif kind == 1:
                b[i:i] = rng.choice(words)
            elif kind == 2:
                del b[i:i + rng.randint(1, 20)]
            else:
                b[i:i + 4] = rng.choice(words)
        yield bytes(b), rng


def test_mutated_requests():
    with serve('--queue', '64') as (port, p, _):
        statuses = {}
        for data, rng in mutations(20261129, 400):
            with socket.create_connection(('127.0.0.1', port), 20) as s:
                cut = rng.randrange(len(data))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    s.sendall(data[:cut])
                    s.sendall(data[cut:])
                    s.shutdown(socket.SHUT_WR)          # half closed counts as leaving
                    answer = b''
                    while piece := s.recv(65536):
                        answer += piece
                    for m in re.finditer(rb'HTTP/1\.1 (\d{3}) ', answer):
                        statuses[int(m[1])] = statuses.get(int(m[1]), 0) + 1
            assert p.poll() is None, f'the server died of {data[:200]}'
        assert 200 in statuses and 400 in statuses and 500 not in statuses, statuses
        assert ask(connect(port), 'POST', '/v1/chat/completions', HELLO)[0] == 200


def test_slow_clients():
    """Requests that trickle in, beside one who is served meanwhile."""
    with serve() as (port, _, _):
        body = json.dumps({**HELLO, 'max_tokens': 1}).encode()
        data = b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (len(body), body)
        slow = [socket.create_connection(('127.0.0.1', port), 30) for _ in range(30)]
        start, longest = time.time(), 0
        for i in range(0, len(data), 4):
            for s in slow:
                s.sendall(data[i:i + 4])
            if i % 40 == 0:
                t = time.time()
                assert ask(connect(port), 'GET', '/v1/models')[0] == 200
                longest = max(longest, time.time() - t)
        for s in slow:
            assert s.recv(12) == b'HTTP/1.1 200'
            s.close()
        assert longest < 2, f'{longest:.1f} s for a model list'


for name, test in [(n, f) for n, f in globals().copy().items() if n.startswith('test_')]:
    try:
        test()
        print(f'ok guard/{name[5:]}', flush=True)
    except Skip as e:
        print(f'SKIP guard/{name[5:]}: {e}', flush=True)
    except Exception as e:
        failed += 1
        print(f'not ok guard/{name[5:]}: {type(e).__name__} {str(e)[:300]}', flush=True)
shutil.rmtree(DIR, ignore_errors=True)
sys.exit(1 if failed else 0)
