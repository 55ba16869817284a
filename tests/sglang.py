#!/usr/bin/env python3
"""SGLang-shaped clients against a running server with the demo model.

    python3 tests/sglang.py http://127.0.0.1:PORT

Among them clients that speak as the known bench tools do: a speed sweep, a reference panel, a
delivery check, a decode bench. Log-probabilities are compared with the demo model's reference
logits (float64, models/demo-exl3/reference). Standard library only. Prints "ok NAME" or "not ok
NAME: why".
"""
import array
import base64
import http.client
import json
import math
import random
import re
import sys
import threading
import time
import urllib.parse
import urllib.request

URL = sys.argv[1]
HOST = urllib.parse.urlsplit(URL).netloc
REF = 'models/demo-exl3/reference'
failed = 0


def call(path, body=None, method=None):
    """Status and parsed answer."""
    c = http.client.HTTPConnection(HOST, timeout=300)
    c.request(method or ('GET' if body is None else 'POST'), path,
              None if body is None else json.dumps(body), {'Content-Type': 'application/json'})
    r = c.getresponse()
    data = r.read()
    c.close()
    return r.status, json.loads(data)


def good(path, body=None, method=None):
    status, answer = call(path, body, method)
    assert status == 200, (status, answer)
    return answer


def generate(prompt, params=None, **more):
    key = 'text' if isinstance(prompt, str) or isinstance(prompt, list) and isinstance(prompt[0], str) \
        else 'input_ids'
    return good('/generate', {key: prompt, 'sampling_params': {'temperature': 0, **(params or {})}, **more})


def events(path, body):
    """(time, parsed event) of a stream, as `requests` and its iter_lines() would see them."""
    request = urllib.request.Request(URL + path, json.dumps(body).encode(),
                                     {'Content-Type': 'application/json'})
    with urllib.request.urlopen(request, timeout=120) as r:
        for line in r:
            line = line.strip()
            if line.startswith(b'data:') and line != b'data: [DONE]':
                yield time.perf_counter(), json.loads(line[5:])
            assert not line or line.startswith((b'data:', b':')), line


def refused(path, body, param):
    status, answer = call(path, body)
    assert status == 400 and answer['error']['param'] == param, (body, status, answer)
    assert answer['error']['type'] == 'invalid_request_error' and answer['error']['message']


def reference():
    """[(name, ids, {position: logits}, prompt record)]"""
    for p in json.load(open(f'{REF}/prompts.json')):
        data = open(f"{REF}/{p['name']}.logits.npy", 'rb').read()
        n = int.from_bytes(data[8:10], 'little')
        rows, width = map(int, re.search(rb'\((\d+), (\d+)\)', data[10:10 + n]).groups())
        assert b"'<f4'" in data[:10 + n] and b"'fortran_order': False" in data[:10 + n]
        flat = array.array('f', data[10 + n:])
        yield p, {p['n'] - rows + i: flat[i * width:(i + 1) * width] for i in range(rows)}


def log_softmax(x):
    top = max(x)
    total = top + math.log(sum(math.exp(v - top) for v in x))
    return [v - total for v in x]


# ---- shapes ---------------------------------------------------------------

def test_generate():
    story = next(p for p, _ in reference() if p['name'] == 'raw_story')
    r = generate(story['ids'], {'max_new_tokens': 8})
    assert set(r) == {'text', 'output_ids', 'meta_info'}
    m = r['meta_info']
    assert m['prompt_tokens'] == story['n'] and m['completion_tokens'] == 8
    assert m['finish_reason'] == {'type': 'length', 'length': 8} and m['cached_tokens'] >= 0
    assert isinstance(m['id'], str) and m['e2e_latency'] > 0
    assert good('/detokenize', {'tokens': r['output_ids']})['content'] == r['text']
    assert generate(story['text'], {'max_new_tokens': 8})['text'] == r['text']
    assert generate(story['text'], {'max_new_tokens': 1}, rid='mine')['meta_info']['id'] == 'mine'


def test_reference_greedy():
    n = 0
    for p, _ in reference():
        if 'greedy_ids' not in p:
            continue
        got = generate(p['ids'], {'max_new_tokens': len(p['greedy_ids'])})['output_ids']
        for want, margin, have in zip(p['greedy_ids'], p['greedy_margin'], got):
            if margin < 0.3:
                break                       # near ties may fall either way
            assert want == have, (p['name'], want, have)
            n += 1
    assert n > 40


def test_stream():
    whole = generate('Once upon a time', {'max_new_tokens': 24})
    seen = [e for _, e in events('/generate', {'text': 'Once upon a time', 'stream': True,
                                               'sampling_params': {'temperature': 0, 'max_new_tokens': 24}})]
    for a, b in zip(seen, seen[1:]):
        assert b['text'].startswith(a['text'])
        assert b['output_ids'][:len(a['output_ids'])] == a['output_ids']
        assert b['meta_info']['completion_tokens'] >= a['meta_info']['completion_tokens']
        assert a['meta_info']['finish_reason'] is None and a['meta_info']['id'] == b['meta_info']['id']
    assert seen[-1]['text'] == whole['text'] and seen[-1]['output_ids'] == whole['output_ids']
    assert seen[-1]['meta_info']['finish_reason'] == {'type': 'length', 'length': 24}
    assert len(seen) == 25


def test_stream_bytes():
    """Nothing but comments before the first event; the end is [DONE]."""
    c = http.client.HTTPConnection(HOST, timeout=60)
    c.request('POST', '/generate', json.dumps({'input_ids': [random.Random(5).randrange(100, 4000)
                                                             for _ in range(3000)], 'stream': True,
                                               'sampling_params': {'max_new_tokens': 2}}))
    r = c.getresponse()
    assert r.getheader('content-type') == 'text/event-stream; charset=utf-8'
    parts = r.read().split(b'\n\n')
    assert parts[-1] == b'' and parts[-2] == b'data: [DONE]'
    first = next(i for i, p in enumerate(parts) if not p.startswith(b':'))
    assert parts[first].startswith(b'data: {"text":')
    assert json.loads(parts[first][6:])['meta_info']['completion_tokens'] == 1


def test_batch():
    prompts = ['Once upon a time', 'The king said', 'In the morning']
    alone = [generate(p, {'max_new_tokens': 6}) for p in prompts]
    batch = generate(prompts, {'max_new_tokens': 6})
    assert [r['text'] for r in batch] == [r['text'] for r in alone]
    assert len({r['meta_info']['id'] for r in batch}) == 3
    ids = [good('/tokenize', {'content': p})['tokens'] for p in prompts]
    assert [r['text'] for r in generate(ids, {'max_new_tokens': 6})] == [r['text'] for r in alone]
    several = generate(prompts[0], {'max_new_tokens': 4, 'n': 3, 'temperature': 1, 'sampling_seed': 7})
    assert len(several) == 3
    one = generate(prompts[0], {'max_new_tokens': 4, 'temperature': 1, 'sampling_seed': 8})
    assert several[1]['output_ids'] == one['output_ids']
    last = {}
    for _, e in events('/generate', {'text': prompts, 'stream': True,
                                     'sampling_params': {'temperature': 0, 'max_new_tokens': 6}}):
        last[e['index']] = e
    assert [last[i]['text'] for i in range(3)] == [r['text'] for r in alone]


def test_stops():
    full = generate('Once upon a time', {'max_new_tokens': 30})
    word = full['text'].split()[4]
    r = generate('Once upon a time', {'max_new_tokens': 30, 'stop': [word]})
    assert r['meta_info']['finish_reason'] == {'type': 'stop', 'matched': word}
    assert r['text'] == full['text'][:full['text'].index(word)]
    r = generate('Once upon a time', {'max_new_tokens': 30, 'stop_token_ids': [full['output_ids'][5]]})
    assert r['meta_info']['finish_reason'] == {'type': 'stop', 'matched': full['output_ids'][5]}
    assert r['output_ids'] == full['output_ids'][:full['output_ids'].index(full['output_ids'][5])]
    hello = next(p for p, _ in reference() if p['name'] == 'hello')
    r = generate(hello['ids'], {'max_new_tokens': 100})
    eos = r['meta_info']['finish_reason']['matched']
    assert r['meta_info']['finish_reason']['type'] == 'stop' and isinstance(eos, int)
    r = generate(hello['ids'], {'max_new_tokens': 40, 'ignore_eos': True})
    assert r['meta_info']['completion_tokens'] == 40 and eos not in r['output_ids']


def test_constraints():
    assert re.fullmatch('[A-C]{4}', generate('x', {'max_new_tokens': 20, 'regex': '[A-C]{4}'})['text'])
    schema = {'type': 'object', 'properties': {'age': {'type': 'integer', 'minimum': 0, 'maximum': 150}},
              'required': ['age']}
    for s in (schema, json.dumps(schema)):
        assert 0 <= json.loads(generate('x', {'max_new_tokens': 60, 'json_schema': s})['text'])['age'] <= 150
    assert generate('x', {'max_new_tokens': 20, 'ebnf': 'root ::= "yes" | "no"'})['text'] in ('yes', 'no')


def test_refused():
    P = {'text': 'x'}
    for body, param in (
            ({}, 'text'), ({'text': 'x', 'input_ids': [1]}, 'input_ids'), ({'text': 5}, 'text'),
            ({'text': ['a', 5]}, 'text[1]'), ({'text': ''}, 'text'), ({'input_ids': 'x'}, 'input_ids'),
            ({'input_ids': [1, -1]}, 'input_ids'), ({'input_ids': [[1], []]}, 'input_ids[1]'),
            ({**P, 'sampling_params': 5}, 'sampling_params'), ({**P, 'stream': 'yes'}, 'stream'),
            ({**P, 'sampling_params': {'temperature': 'hot'}}, 'sampling_params.temperature'),
            ({**P, 'sampling_params': {'max_new_tokens': -1}}, 'sampling_params.max_new_tokens'),
            ({**P, 'sampling_params': {'max_new_tokens': 1.5}}, 'sampling_params.max_new_tokens'),
            ({**P, 'sampling_params': {'n': 0}}, 'sampling_params.n'),
            ({**P, 'sampling_params': {'stop': 5}}, 'sampling_params.stop'),
            ({**P, 'sampling_params': {'stop_token_ids': ['a']}}, 'sampling_params.stop_token_ids'),
            ({**P, 'sampling_params': {'regex': 5}}, 'sampling_params.regex'),
            ({**P, 'sampling_params': {'regex': '('}}, 'sampling_params.regex'),
            ({**P, 'sampling_params': {'regex': 'a', 'ebnf': 'root ::= "a"'}}, 'sampling_params.ebnf'),
            ({**P, 'sampling_params': {'json_schema': '{"not":{}}'}}, 'sampling_params.json_schema'),
            ({**P, 'return_logprob': 1}, 'return_logprob'), ({**P, 'logprob_start_len': 'a'}, 'logprob_start_len'),
            ({**P, 'top_logprobs_num': 21}, 'top_logprobs_num'), ({**P, 'rid': 5}, 'rid'),
            ({**P, 'token_ids_logprob': [99999]}, 'token_ids_logprob'),
            ({**P, 'return_logprob': True, 'token_ids_logprob': [1]}, 'token_ids_logprob'),
            ({**P, 'sampling_params': {'stop_regex': 'a'}}, 'sampling_params.stop_regex'),
            ({**P, 'sampling_params': {'no_stop_trim': True}}, 'sampling_params.no_stop_trim'),
            ({**P, 'image_data': 'x'}, 'image_data'), ({**P, 'lora_path': 'x'}, 'lora_path')):
        refused('/generate', body, param)
    status, answer = call('/generate', {'input_ids': [5] * 40000})
    assert status == 400 and answer['error']['code'] == 'context_length_exceeded'
    assert answer['error']['n_prompt_tokens'] == 40000
    assert generate('x', {'max_new_tokens': 1, 'unknown': {}}, also_unknown=5)['text'] is not None


# ---- log-probabilities -----------------------------------------------------

def test_logprobs_reference():
    """The whole distribution at chosen ids, and the best, against the reference logits."""
    worst, n = 0, 0
    for p, rows in reference():
        start = min(rows)
        ids = sorted({i for x in rows.values() for i in sorted(range(len(x)), key=x.__getitem__)[-20:]})
        m = generate(p['ids'], {'max_new_tokens': 1}, return_logprob=True, logprob_start_len=start,
                     top_logprobs_num=20, token_ids_logprob=ids)['meta_info']
        assert m['input_top_logprobs'][0] is None and m['input_token_ids_logprobs'][0] is None
        assert m['input_token_logprobs'][0][0] is None
        assert [e[1] for e in m['input_token_logprobs']] == p['ids'][start:]
        tops = m['input_top_logprobs'][1:] + m['output_top_logprobs']
        picks = m['input_token_ids_logprobs'][1:] + m['output_token_ids_logprobs']
        assert len(tops) == len(picks) == len(rows), p['name']
        for i, (top, pick) in enumerate(zip(tops, picks)):
            want = log_softmax(rows[start + i])
            assert [e[1] for e in pick] == ids
            kl = sum(math.exp(want[t]) * (want[t] - lp) for lp, t, _ in pick)
            worst, n = max(worst, abs(kl)), n + 1
            if p['margin'][start + i] > 0.3:
                assert top[0][1] == p['argmax'][start + i], (p['name'], i)
            for lp, t, text in top:
                assert text is None and abs(lp - want[t]) < 0.5 or want[t] < -12, (p['name'], lp, want[t])
            if start + i + 1 < p['n']:
                assert abs(m['input_token_logprobs'][i + 1][0] - dict((t, lp) for lp, t, _ in top)
                           .get(p['ids'][start + i + 1], m['input_token_logprobs'][i + 1][0])) < 1e-6
    assert n > 60 and worst < 0.02, (n, worst)


def test_logprobs_output():
    """Chosen tokens, streamed and not, against a teacher-forced pass over prompt and answer."""
    prompt = good('/tokenize', {'content': 'Once upon a time'})['tokens']
    r = generate(prompt, {'max_new_tokens': 12}, return_logprob=True, top_logprobs_num=3)
    m = r['meta_info']
    assert m['input_token_logprobs'] == [] and len(m['output_token_logprobs']) == 12
    assert [e[1] for e in m['output_token_logprobs']] == r['output_ids']
    assert [t[0][1] for t in m['output_top_logprobs']] == r['output_ids']
    forced = generate(prompt + r['output_ids'], {'max_new_tokens': 0}, return_logprob=True,
                      logprob_start_len=len(prompt) - 1)['meta_info']
    assert forced['completion_tokens'] == 0 and forced['finish_reason']['type'] == 'length'
    for (a, t, _), (b, u, _) in zip(m['output_token_logprobs'], forced['input_token_logprobs'][1:]):
        assert t == u and abs(a - b) < 0.05, (a, b)
    body = {'input_ids': prompt, 'sampling_params': {'temperature': 0, 'max_new_tokens': 12}, 'stream': True,
            'return_logprob': True, 'top_logprobs_num': 3, 'return_text_in_logprobs': True, 'logprob_start_len': 0}
    last = [e for _, e in events('/generate', body)][-1]['meta_info']
    assert [e[:2] for e in last['output_token_logprobs']] == [e[:2] for e in m['output_token_logprobs']]
    assert ''.join(e[2] for e in last['output_token_logprobs']) == r['text']
    assert ''.join(e[2] for e in last['input_token_logprobs']) == 'Once upon a time'


def test_logprobs_end_first():
    """An answer that is over before it begins still tells what came after the prompt."""
    hello = next(p for p, _ in reference() if p['name'] == 'hello')
    r = generate(hello['ids'], {'max_new_tokens': 100})
    m = generate(hello['ids'] + r['output_ids'], {'max_new_tokens': 1}, return_logprob=True,
                 logprob_start_len=5, top_logprobs_num=20, token_ids_logprob=[1, 2])['meta_info']
    eos = m['finish_reason']['matched']
    assert m['output_top_logprobs'][0][0][1] == eos == m['output_token_logprobs'][0][1]
    assert abs(m['output_top_logprobs'][0][0][0] - m['output_token_logprobs'][0][0]) < 1e-5
    assert len(m['output_token_ids_logprobs']) == 1


# ---- clients as the bench tools speak --------------------------------------

def first_event_then_close(ids):
    """The sweep's prefill: no max_new_tokens; the client leaves after the first event."""
    c = http.client.HTTPConnection(HOST, timeout=120)
    c.request('POST', '/generate', json.dumps({'input_ids': ids, 'stream': True,
                                               'sampling_params': {'temperature': 0}}),
              {'Content-Type': 'application/json'})
    start = time.perf_counter()
    r = c.getresponse()
    for line in r:
        if line.startswith(b'data:'):
            break
    took = time.perf_counter() - start
    r.close()
    c.close()
    return took


def becomes_idle():
    for _ in range(100):
        text = urllib.request.urlopen(URL + '/metrics').read().decode()
        if re.search(r'^hoist_requests_running 0$', text, re.M) and \
                re.search(r'^hoist_requests_waiting 0$', text, re.M):
            return
        time.sleep(0.02)
    raise AssertionError('a request still runs after two seconds')


def test_client_sweep():
    info = good('/server_info')
    context = info['context_length']
    assert info['server_args']['max_running_requests'] >= 1
    rng = random.Random(1)
    first_event_then_close([rng.randrange(1000, 4000) for _ in range(512)])
    for n in (1024, 4096):
        assert first_event_then_close([rng.randrange(1000, 4000) for _ in range(n)]) > 0
    becomes_idle()
    for c in (1, 4):
        done = [None] * c

        def run(i):
            ids = good('/tokenize', {'prompt': f'Nonce {i}\nA detailed explanation of tides (variant {i})'})['tokens']
            first = last = None
            for t, e in events('/generate', {'input_ids': ids, 'stream': True, 'sampling_params': {
                    'temperature': 0, 'max_new_tokens': min(64, (context - len(ids)) // c - 64)}}):
                first, last, final = first or t, t, e
            done[i] = (first, last, final['meta_info']['completion_tokens'],
                       final['meta_info']['finish_reason']['type'])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(c)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        rate = sum(d[2] for d in done) / (max(d[1] for d in done) - min(d[0] for d in done))
        assert rate > 0 and all(d[2] > 1 and d[3] in ('stop', 'length') for d in done)


def test_client_panel():
    """score_ref_panel's way: one call per item, entry 0 dropped, the output entry appended."""
    top1, rows = 0, 0
    kls = []
    for p, logits in reference():
        start = max(min(logits), 1)
        want = {i: log_softmax(x) for i, x in logits.items()}
        top20 = {i: sorted(range(len(x)), key=x.__getitem__)[:-21:-1] for i, x in want.items()}
        union = sorted({t for i in top20 if i >= start for t in top20[i]})
        r = generate(p['ids'], {'max_new_tokens': 1}, return_logprob=True, logprob_start_len=start,
                     top_logprobs_num=20, token_ids_logprob=union)['meta_info']
        top = r['input_top_logprobs'][1:] + r['output_top_logprobs'][:1]
        picks = r['input_token_ids_logprobs'][1:] + r['output_token_ids_logprobs'][:1]
        for j, (t, pick) in enumerate(zip(top, picks)):
            q = {e[1]: math.exp(e[0]) for e in pick}
            ids = top20[start + j]
            p_sum, q_sum = sum(math.exp(want[start + j][i]) for i in ids), sum(q.get(i, 1e-30) for i in ids)
            kls.append(sum(math.exp(want[start + j][i]) / p_sum *
                           math.log(math.exp(want[start + j][i]) / p_sum / (q.get(i, 1e-30) / q_sum)) for i in ids))
            top1 += max(t, key=lambda e: e[0])[1] == ids[0]
            rows += 1
    assert rows > 60 and top1 / rows > 0.95 and sum(kls) / rows < 0.005, (rows, top1 / rows, sum(kls) / rows)


def test_client_stream_rate():
    """Content comes as it is made: by half the time about half of it is there."""
    question = 'Write a long essay about the sea.'
    streams = {
        'chat': ('/v1/chat/completions', {'messages': [{'role': 'user', 'content': question}], 'stream': True,
                                          'temperature': 0, 'max_tokens': 300, 'ignore_eos': True,
                                          'chat_template_kwargs': {'enable_thinking': False}}),
        'generate': ('/generate', {'text': question, 'stream': True, 'sampling_params': {
            'temperature': 0, 'max_new_tokens': 300, 'ignore_eos': True}})}
    def shares(name, path, body):
        seen, total = [], 0
        for t, e in events(path, body):
            if name == 'generate':
                total = len(e['text'])
            elif e['choices']:
                total += len(e['choices'][0]['delta'].get('content') or '')
            seen.append((t, total))
        start, end = seen[0][0], seen[-1][0]
        assert total > 200, (name, total)
        return [max((n for t, n in seen if t <= start + (end - start) * part), default=0) / total for part in (0.5, 0.9)]

    for name, (path, body) in streams.items():
        # The tool's bounds are 0.40 and 0.90 of an answer that takes a minute; this one takes a second
        # on a machine that may be busy: what is held back is so each time.
        tries = []
        while not tries or (len(tries) < 5 and (tries[-1][0] < 0.3 or tries[-1][1] < 0.7)):
            tries.append(shares(name, path, body))
        assert tries[-1][0] >= 0.3 and tries[-1][1] >= 0.7, (name, tries)


def test_client_bench_decode():
    """Prose and counting prompts through chat: usage at the end, no NaN, then health."""
    assert good('/health')['status'] == 'ok'
    for prompt in ('Explain how a hash map works.', 'Count from 1 to 200.'):
        body = {'model': 'any', 'messages': [{'role': 'user', 'content': prompt}], 'max_tokens': 60,
                'temperature': 0, 'top_p': 1, 'stream': True, 'stream_options': {'include_usage': True},
                'chat_template_kwargs': {'enable_thinking': False}}
        first, usage, text = None, None, ''
        for t, e in events('/v1/chat/completions', body):
            if e['choices'] and e['choices'][0]['delta'].get('content'):
                first, text = first or t, text + e['choices'][0]['delta']['content']
            usage = e.get('usage') or usage
        assert usage['completion_tokens'] > 1 and first and 'nan' not in text.lower()
    assert good('/health')['status'] == 'ok'


# ---- completions, embeddings, small routes ----------------------------------

def complete(prompt, **more):
    return good('/v1/completions', {'prompt': prompt, 'temperature': 0, 'max_tokens': 8, **more})


def test_echo_logprobs():
    r = complete('Once upon a time', echo=True, logprobs=2)['choices'][0]
    lp = r['logprobs']
    assert r['text'].startswith('Once upon a time') and ''.join(lp['tokens']) == r['text']
    assert lp['token_logprobs'][0] is None and lp['top_logprobs'][0] is None
    assert all(v <= 0 for v in lp['token_logprobs'][1:])
    for token, at in zip(lp['tokens'], lp['text_offset']):
        assert r['text'][at:at + len(token)] == token
    n = len(good('/tokenize', {'content': 'Once upon a time'})['tokens'])
    scored = generate('Once upon a time', {'max_new_tokens': 0}, return_logprob=True, logprob_start_len=0)
    for (want, _, _), have in list(zip(scored['meta_info']['input_token_logprobs'], lp['token_logprobs']))[1:n]:
        assert abs(want - have) < 1e-4
    alone = complete('Once upon a time', echo=True, logprobs=2, max_tokens=0)['choices'][0]
    assert alone['logprobs']['token_logprobs'] == lp['token_logprobs'][:n]
    assert complete('Once upon a time', logprobs=2)['choices'][0]['logprobs']['tokens'] == lp['tokens'][n:]


def test_suffix():
    ids = [good('/tokenize', {'content': t})['tokens'] for t in
           ('<|code_prefix|>', 'def add(a, b):', '<|code_suffix|>', 'return c', '<|code_middle|>')]
    assert [len(x) for x in ids[::2]] == [1, 1, 1]
    want = complete(sum(ids, []))['choices'][0]['text']
    r = complete('def add(a, b):', suffix='return c')
    assert r['choices'][0]['text'] == want and r['usage']['prompt_tokens'] == sum(map(len, ids))
    assert complete('Once', suffix='')['choices'][0]['text'] == complete('Once')['choices'][0]['text']
    refused('/v1/completions', {'prompt': 'a', 'suffix': 5}, 'suffix')
    refused('/v1/completions', {'prompt': 'a', 'suffix': 'b', 'echo': True}, 'echo')
    o = good('/api/generate', {'prompt': 'def add(a, b):', 'suffix': 'return c', 'stream': False,
                               'options': {'temperature': 0, 'num_predict': 8}})
    assert o['response'] == want


def test_best_of():
    def mean(seed):
        r = complete('The weather', temperature=1.5, top_p=1, top_k=0, seed=seed, logprobs=0, max_tokens=10)['choices'][0]
        lp = r['logprobs']['token_logprobs']
        return sum(lp) / len(lp), r['text']

    ranked = [t for _, t in sorted((mean(100 + i) for i in range(6)), key=lambda x: -x[0])]
    assert len(set(ranked)) > 1
    r = complete('The weather', temperature=1.5, top_p=1, top_k=0, seed=100, best_of=6, n=2, max_tokens=10)
    assert [c['text'] for c in r['choices']] == ranked[:2] and [c['index'] for c in r['choices']] == [0, 1]
    assert r['choices'][0]['logprobs'] is None and r['usage']['completion_tokens'] > 20
    refused('/v1/completions', {'prompt': 'a', 'best_of': 2, 'stream': True}, 'best_of')
    refused('/v1/completions', {'prompt': 'a', 'best_of': 1, 'n': 2}, 'best_of')


def test_embeddings():
    r = good('/v1/embeddings', {'model': 'm', 'input': ['The king said', 'The queen said', 'x = 5;']})
    v = [d['embedding'] for d in r['data']]
    assert [d['index'] for d in r['data']] == [0, 1, 2] and r['object'] == 'list' and r['model'] == 'm'
    for x in v:
        assert abs(sum(a * a for a in x) - 1) < 1e-5 and len(x) == len(v[0])
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert dot(v[0], v[1]) > dot(v[0], v[2])
    assert good('/v1/embeddings', {'input': 'The queen said'})['data'][0]['embedding'] == v[1]
    ids = good('/tokenize', {'content': 'x = 5;'})['tokens']
    assert good('/embeddings', {'input': [ids]})['data'][0]['embedding'] == v[2]
    assert r['usage']['prompt_tokens'] == r['usage']['total_tokens'] > len(ids)
    coded = good('/v1/embeddings', {'input': 'x = 5;', 'encoding_format': 'base64'})['data'][0]['embedding']
    assert array.array('f', base64.b64decode(coded)).tolist() == array.array('f', v[2]).tolist()
    refused('/v1/embeddings', {}, 'input')
    refused('/v1/embeddings', {'input': 5}, 'input')
    refused('/v1/embeddings', {'input': ['a', '']}, 'input[1]')
    refused('/v1/embeddings', {'input': 'a', 'dimensions': 64}, 'dimensions')
    refused('/v1/embeddings', {'input': 'a', 'encoding_format': 'int8'}, 'encoding_format')
    refused('/v1/embeddings', {'input': 'word ' * 40000}, 'input')


def test_small_routes():
    for path in ('/get_model_info', '/model_info'):
        assert good(path)['is_generation'] is True and good(path)['model_path']
    assert good('/get_server_info')['context_length'] == good('/server_info')['context_length']
    for method in ('GET', 'POST'):
        assert good('/flush_cache', method=method)['success'] is True
    p = good('/props')
    assert p['default_generation_settings']['n_ctx'] == good('/v1/models')['data'][0]['context_length']
    body = {'messages': [{'role': 'user', 'content': 'Hi'}]}
    text = good('/apply-template', body)['prompt']
    assert good('/tokenize', {'content': text})['tokens'] == good('/tokenize', body)['tokens']
    closed = good('/apply-template', {**body, 'chat_template_kwargs': {'enable_thinking': False}})['prompt']
    assert closed == text + '</think>'
    refused('/apply-template', {}, 'messages')
    assert good('/openapi.json')['openapi'].startswith('3.1')
    m = good('/v1/models')['data'][0]['id']
    assert good(f'/models/{m}') == good(f'/v1/models/{m}')


for name, test in [(n, f) for n, f in globals().copy().items() if n.startswith('test_')]:
    try:
        test()
        print(f'ok sglang/{name[5:]}', flush=True)
    except Exception as e:
        failed += 1
        tb = e.__traceback__
        while tb.tb_next:
            tb = tb.tb_next
        print(f'not ok sglang/{name[5:]}: line {tb.tb_lineno}: {type(e).__name__} {str(e)[:300]}', flush=True)
sys.exit(1 if failed else 0)
