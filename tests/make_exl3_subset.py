#!/usr/bin/env python3
"""Makes tests/data/exl3 from the full EXL3 test data.

    make_exl3_subset.py ../shared/spec/data tests/data/exl3

Keeps the file formats of exl3_vectors and exl3_golden (their manifests describe them) and drops
cases and arrays, so that fmt_test.c reads both with the same code. Standard library only.
"""
import json, os, sys

VECTORS = ['k1_3inst', 'k1h5_mul1', 'k2_mcg', 'k2h5_mul1', 'k3_mul1', 'k3h5_mul1', 'k4_mcg', 'k5_mul1',
           'k6_3inst', 'k7_mcg', 'k8_mul1']
ARRAYS = ['trellis', 'suh', 'svh', 'x', 'What', 'y']
LINEARS = ['b_k3_mul1', 'b_k4_mcg', 'b_k6_3inst']
MOES = ['moe_k3_mul1', 'moe_k4_mcg']
KEYS = ['name', 'file', 'codebook', 'in', 'out', 'x', 'K', 'experts', 'hidden', 'inter', 'topk', 'tokens']
SIZE = {'<u2': 2, '<f2': 2, '<f4': 4, '<i4': 4}


def dump(path, obj):
    with open(path, 'w') as f:
        json.dump(obj, f, indent=1)
        f.write('\n')


def copy(src, dst):
    with open(src, 'rb') as a, open(dst, 'wb') as b:
        b.write(a.read())


def vectors(src, dst):
    man = json.load(open(os.path.join(src, 'manifest.json')))
    cases = []
    for c in man['cases']:
        if c['name'] not in VECTORS:
            continue
        raw, out, arrays = open(os.path.join(src, c['file']), 'rb').read(), b'', {}
        for name in ARRAYS:
            a = c['arrays'][name]
            n = SIZE[a['dtype']]
            for d in a['shape']:
                n *= d
            arrays[name] = dict(a, offset=len(out))
            out += raw[a['offset']:a['offset'] + n]
        open(os.path.join(dst, c['file']), 'wb').write(out)
        cases.append(dict(c, arrays=arrays))
    moe = man['moe'][0]
    os.makedirs(os.path.join(dst, os.path.dirname(moe['checkpoint'])), exist_ok=True)
    for f in (moe['file'], moe['checkpoint']):
        copy(os.path.join(src, f), os.path.join(dst, f))
    dump(os.path.join(dst, 'manifest.json'), {'format': man['format'], 'cases': cases, 'moe': man['moe']})


def safetensors(src, dst, keep):
    raw = open(src, 'rb').read()
    n = int.from_bytes(raw[:8], 'little')
    head, data, out = json.loads(raw[8:8 + n]), b'', {}
    for name, t in head.items():
        if name != '__metadata__' and keep(name):
            a, b = t['data_offsets']
            out[name] = dict(t, data_offsets=[len(data), len(data) + b - a])
            data += raw[8 + n + a:8 + n + b]
    text = json.dumps(out).encode()
    open(dst, 'wb').write(len(text).to_bytes(8, 'little') + text + data)


def golden(src, dst):
    man = json.load(open(os.path.join(src, 'MANIFEST.json')))
    strip = lambda c: {k: v for k, v in c.items() if k in KEYS}
    cases = [c for c in man['cases'] if c['name'] in LINEARS]
    moes = [c for c in man['moe'] if c['name'] in MOES]
    inputs = {c['x'] for c in cases}
    for c in cases:
        safetensors(os.path.join(src, c['file']), os.path.join(dst, c['file']),
                    lambda n: n.startswith('linear.') or n in ('expect.w_inner', 'expect.y_f64'))
    for c in moes:
        safetensors(os.path.join(src, c['file']), os.path.join(dst, c['file']),
                    lambda n: not n.startswith('expect.') or
                    (n.startswith('expect.out_f64') and not n.endswith('after_silu')))
    safetensors(os.path.join(src, 'inputs.safetensors'), os.path.join(dst, 'inputs.safetensors'),
                lambda n: n in inputs)
    dump(os.path.join(dst, 'MANIFEST.json'), {'format': man['format'], 'cases': [strip(c) for c in cases],
                                              'moe': [strip(c) for c in moes]})


def main():
    src, dst = sys.argv[1:]
    for part in ('exl3_vectors', 'exl3_golden'):
        os.makedirs(os.path.join(dst, part), exist_ok=True)
    vectors(os.path.join(src, 'exl3_vectors'), os.path.join(dst, 'exl3_vectors'))
    golden(os.path.join(src, 'exl3_golden'), os.path.join(dst, 'exl3_golden'))


if __name__ == '__main__':
    main()
