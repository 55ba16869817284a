#!/usr/bin/env python3
"""A server under many clients, and what it says of itself. The server has the demo model, 64
streams and a record.

    python3 tests/serving.py PORT SECONDS RECORD

Standard library only. Prints "ok NAME" or "not ok NAME: why". SECONDS: how long the soak lasts.
"""
import asyncio
import json
import random
import re
import sys
import time
import urllib.request

PORT, SECONDS, RECORD = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
URL = f'http://127.0.0.1:{PORT}'
WORDS = 'the river holds a light over every small stone and turns to sea'.split()


def get(path):
    with urllib.request.urlopen(URL + path, timeout=30) as r:
        body = r.read().decode()
        return json.loads(body) if 'json' in r.headers['content-type'] else body


def words(n, seed):
    rng = random.Random(seed)
    return ' '.join(rng.choice(WORDS) for _ in range(n))


def chat(n_word, n_new, seed=1, **more):
    return {'messages': [{'role': 'user', 'content': words(n_word, seed)}], 'stream': True,
            'max_tokens': n_new, 'ignore_eos': True, 'seed': seed, 'temperature': 1, **more}


async def send(path, body):
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection('127.0.0.1', PORT)
    writer.write(f'POST {path} HTTP/1.0\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n'.encode() + data)
    await writer.drain()
    return reader, writer


async def ask(body, path='/v1/chat/completions', leave=None):
    """(status, chunks, seconds to the head) of a streamed request; leave: closes after so many chunks."""
    start = time.monotonic()
    reader, writer = await send(path, body)
    try:
        status = int((await reader.readline()).split()[1])
        to_head = time.monotonic() - start
        while (await reader.readline()) not in (b'\r\n', b''):
            pass
        chunks, done = [], False
        while line := await reader.readline():
            if line.startswith(b'data: {'):
                chunks.append(json.loads(line[6:]))
                if leave is not None and len(chunks) > leave:
                    break
            done = done or line.startswith(b'data: [DONE]')
        return status, chunks, to_head, done
    finally:
        writer.close()


# ---- what the wire says -------------------------------------------------------

async def test_progress():
    status, chunks, to_head, done = await ask(
        chat(3000, 4, return_progress=True, stream_options={'include_usage': True}))
    seen = [c['prompt_progress'] for c in chunks if 'prompt_progress' in c]
    total = chunks[-1]['usage']['prompt_tokens']
    assert status == 200 and done, chunks
    assert to_head < 2, f'{to_head:.1f} s to the first byte'
    assert len(seen) >= 2 and all(p['total'] == total for p in seen), seen
    assert all(a['processed'] <= b['processed'] for a, b in zip(seen, seen[1:])), seen
    assert seen[-1]['processed'] == total and seen[-1]['time_ms'] > 0, seen[-1]
    assert any(p.get('eta_ms', 0) > 0 for p in seen), seen
    assert all(c['choices'] for c in chunks if 'prompt_progress' in c)
    first = next(i for i, c in enumerate(chunks) if c['choices'] and c['choices'][0]['delta'].get(
        'content', '') + c['choices'][0]['delta'].get('reasoning_content', ''))
    assert all('prompt_progress' not in c for c in chunks[first:])
    _, chunks, _, _ = await ask(chat(600, 4))
    assert not any('prompt_progress' in c for c in chunks)


async def test_slots():
    states, text, cached = set(), '', [set(), set()]
    for again in (0, 1):
        task = asyncio.ensure_future(ask(chat(3000, 300, seed=5)))
        while not task.done():
            slots = await asyncio.to_thread(get, '/slots')
            text += json.dumps(slots)
            states |= {s['state'] for s in slots}
            cached[again] |= {s['n_cached'] for s in slots if s['state'] == 'decode'}
            await asyncio.sleep(0.01)
    assert {'prefill', 'decode'} <= states, states
    assert cached[0] == {0} and len(cached[1]) == 1 and min(cached[1]) > 2000, cached
    assert 'river' not in text
    assert await asyncio.to_thread(get, '/slots') == []


async def test_metrics():
    before = float(re.search(r'^vllm:generation_tokens_total\{.*\} (\S+)$', get('/metrics'), re.M)[1])
    await ask(chat(20, 50))
    text = await asyncio.to_thread(get, '/metrics')
    line = re.compile(r'^[a-z0-9_:]+(\{[a-z_]+="[^"\\]*"(,[a-z_]+="[^"\\]*")*\})? -?[0-9.e+-]+$')
    assert all(s.startswith('# ') or line.match(s) for s in text.splitlines()), [
        s for s in text.splitlines() if not s.startswith('# ') and not line.match(s)][:3]
    after = float(re.search(r'^vllm:generation_tokens_total\{.*\} (\S+)$', text, re.M)[1])
    assert after == before + 50, (before, after)
    for name in ('time_to_first_token_seconds', 'inter_token_latency_seconds',
                 'e2e_request_latency_seconds', 'time_per_output_token_seconds'):
        n = [int(v) for v in re.findall(rf'^vllm:{name}_bucket\{{.*\}} (\d+)$', text, re.M)]
        count = int(re.search(rf'^vllm:{name}_count\{{.*\}} (\d+)$', text, re.M)[1])
        assert n == sorted(n) and n[-1] == count > 0, (name, n, count)
    # one for each gap between tokens, as inter_token_latency_seconds; one for each answer
    counts = [int(re.search(rf'^vllm:{name}_count\{{.*\}} (\d+)$', text, re.M)[1]) for name in (
        'time_per_output_token_seconds', 'inter_token_latency_seconds',
        'request_time_per_output_token_seconds', 'e2e_request_latency_seconds')]
    assert counts[0] == counts[1] > 20 * counts[2] and counts[2] == counts[3], counts
    assert 'vllm:kv_cache_usage_perc{model_name="demo-exl3"} 0' in text


async def test_stats():
    stats, health = get('/stats'), get('/health')
    assert stats['requests']['running'] == 0 and stats['fault'] is None, stats
    assert stats['rates']['prefill'] > 0 and stats['rates']['decode'] > 0, stats
    assert stats['memory']['pages_used'] == 0, stats
    assert health['status'] == 'ok' and health['steps'] > 0, health


async def test_end_thinking():
    """Reasoning that somebody ends from outside; its record can be run again all the same."""
    reader, writer = await send('/v1/chat/completions', chat(5, 60, seed=8))
    n = 0
    while line := await reader.readline():
        if line.startswith(b'data: {'):
            chunk, n = json.loads(line[6:]), n + 1
        if n == 5:
            request = urllib.request.Request(f"{URL}/v1/chat/completions/{chunk['id']}/end_thinking", b'')
            await asyncio.to_thread(urllib.request.urlopen, request)
    writer.close()
    with open(RECORD) as f:
        r = json.loads(f.readlines()[-1])
    assert r['thinking_ended'] and r['think_end'] in r['answer'][3:], r['answer']


async def test_record():
    """The lines of the requests so far: ids, settings, answers."""
    with open(RECORD) as f:
        lines = [json.loads(s) for s in f]
    assert len(lines) >= 4
    for r in lines:
        assert r['finish'] == 'length' and len(r['answer']) == r['max_new'], r['finish']
        assert 'river' not in json.dumps(r)


# ---- many ----------------------------------------------------------------------

class Crowd:
    n_done = n_left = n_token = 0
    errors = []


async def idle(n):
    """Connections that say nothing; opened again when the server ends them."""
    return [await asyncio.open_connection('127.0.0.1', PORT) for _ in range(n)]


TOOL = {'type': 'function', 'function': {'name': 'look', 'parameters': {
    'type': 'object', 'properties': {'at': {'enum': ['sea', 'town']}}, 'required': ['at']}}}
SHAPE = {'type': 'json_schema', 'json_schema': {'name': 'pair', 'schema': {
    'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'enum': ['x', 'y']}},
    'required': ['a', 'b'], 'additionalProperties': False}}}
KINDS = [{}, {}, {}, {'tools': [TOOL]}, {'tools': [TOOL], 'tool_choice': 'required'},
         {'response_format': SHAPE, 'ignore_eos': False}, {'thinking_budget': 5},
         {'repetition_penalty': 1.2, 'logit_bias': {'77': 3}, 'top_p': 0.9, 'stop': ['zz']}]


async def client(crowd, k, until):
    rng = random.Random(k)
    while time.monotonic() < until:
        leave = rng.randrange(20) if rng.random() < 0.3 else None
        body = chat(rng.choice([5, 30, 200]), rng.randrange(1, 60), seed=rng.randrange(1 << 30))
        body |= rng.choice(KINDS)
        try:
            status, chunks, _, done = await asyncio.wait_for(ask(body, leave=leave), 120)
        except Exception as e:                                  # noqa: BLE001
            crowd.errors.append(repr(e))
            continue
        if status != 200 or (leave is None and not done) or any('error' in c for c in chunks):
            crowd.errors.append(f'{status} {chunks[-1:]}')
        crowd.n_left += not done
        crowd.n_done += done
        crowd.n_token += len(chunks)


async def settle():
    for _ in range(200):
        stats = await asyncio.to_thread(get, '/stats')
        if stats['requests']['running'] + stats['requests']['waiting'] == 0:
            return stats
        await asyncio.sleep(0.05)
    raise AssertionError(f'still at work: {stats}')


async def test_soak():
    begun = time.monotonic()
    conns = await idle(2000)
    crowd = Crowd()
    warm = time.monotonic() + max(SECONDS / 4, 3)
    await asyncio.gather(*(client(crowd, k, warm) for k in range(64)))
    before = await settle()
    end = time.monotonic() + SECONDS
    await asyncio.gather(*(client(crowd, 1000 + k, end) for k in range(64)))
    after = await settle()
    grown = (after['memory']['resident'] - before['memory']['resident']) / 1e6
    print(f'# soak: {crowd.n_done} answers, {crowd.n_left} left early, {crowd.n_token} pieces, '
          f'{after["connections"]} connections, {after["memory"]["resident"] / 1e6:.0f} MB ({grown:+.1f})')
    assert not crowd.errors, crowd.errors[:3]
    assert crowd.n_done > 64 and crowd.n_left > 0
    assert after['memory']['pages_used'] == 0 and get('/slots') == []
    assert grown < 12 + 16, f'grew by {grown:.1f} MB, 16 of them for kept states'
    if time.monotonic() - begun < 60:                           # the server ends idle ones after 75 s
        assert after['connections'] >= 2000, after['connections']
        for reader, writer in conns[::97]:                      # they still work
            writer.write(b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
            assert b'200' in await reader.readline()
    for _, writer in conns:
        writer.close()


async def main():
    failed = 0
    for test in (test_progress, test_slots, test_metrics, test_stats, test_end_thinking, test_record,
                 test_soak):
        try:
            await test()
            print(f'ok serving_{test.__name__[5:]}', flush=True)
        except Exception as e:                                  # noqa: BLE001
            print(f'not ok serving_{test.__name__[5:]}: {type(e).__name__}: {e}'[:600], flush=True)
            failed = 1
    return failed

sys.exit(asyncio.run(main()))
