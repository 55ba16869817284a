#!/usr/bin/env python3
"""A checkpoint small enough to convert in seconds, and a reader of what comes out.

    quantize_mini.py make OUT            two layers and a bit of an MTP block of tests/data/glm_tiny,
                                         in FP8, BF16, F16 and F32, and OUT/calib.json
    quantize_mini.py check SOURCE OUT    reads OUT as a stranger would: index, configs, storage map;
                                         decodes every EXL3 matrix (from the format's text, not from
                                         the program's code) and compares it with the source

Prints "ok NAME" or "not ok NAME: why" for check. Needs numpy."""
import json
import os
import struct
import sys

import numpy as np

P = 'model.language_model.'
NP = {'F32': '<f4', 'F16': '<f2', 'I16': '<i2', 'I32': '<i4', 'BF16': '<u2', 'F8_E4M3': 'u1'}


def read(path):
    raw = open(path, 'rb').read()
    n = struct.unpack('<Q', raw[:8])[0]
    head = json.loads(raw[8:8 + n])
    head.pop('__metadata__', None)
    end = max(v['data_offsets'][1] for v in head.values())
    assert end == len(raw) - 8 - n, path
    return {k: (v['dtype'], v['shape'], raw[8 + n + v['data_offsets'][0]:8 + n + v['data_offsets'][1]])
            for k, v in head.items()}


def write(path, tensors):
    head, data = {'__metadata__': {'format': 'pt'}}, b''
    for k, (dtype, shape, raw) in tensors.items():
        head[k] = {'dtype': dtype, 'shape': shape, 'data_offsets': [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    open(path, 'wb').write(struct.pack('<Q', len(text)) + text + data)


def plain(t, name, block=None):
    """A plain tensor as float32, FP8 with its scales."""
    dtype, shape, raw = t[name]
    a = np.frombuffer(raw, NP[dtype])
    if dtype == 'BF16':
        a = (a.astype(np.uint32) << 16).view(np.float32)
    elif dtype == 'F8_E4M3':
        b = a.astype(np.int32)
        e, m = b >> 3 & 15, b & 7
        a = np.where(e == 0, m / 8 * 2.0 ** -6, (1 + m / 8) * 2.0 ** (e - 7.0)) * np.where(b & 128, -1, 1)
        s = plain(t, name + '_scale_inv')
        n, k = shape
        a = a.reshape(n, k) * np.repeat(np.repeat(s, block[0], 0), block[1], 1)[:n, :k]
    return a.astype(np.float32).reshape(shape)


def bf16(a):
    u = np.ascontiguousarray(a, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype('<u2').tobytes()


def make(out):
    os.makedirs(out)
    src, dst = read('tests/data/glm_tiny/model.safetensors'), {}
    config = json.load(open('tests/data/glm_tiny/config.json'))
    text = config['text_config']
    for name, t in src.items():
        at = name.split('.')
        layer = int(at[3]) if name.startswith(P + 'layers.') else None
        if layer not in (None, 0, 2) or 'experts' in at and int(at[at.index('experts') + 1]) > 1:
            continue
        if layer == 2:
            at[3] = '1'
        dtype, shape, raw = t
        if name.endswith(('mlp.gate.weight', 'e_score_correction_bias')):
            raw, shape = raw[:len(raw) // shape[0] * 2], [2] + shape[1:]
        dst['.'.join(at)] = (dtype, shape, raw)
    w = plain(dst, 'lm_head.weight')
    dst['lm_head.weight'] = ('F16', list(w.shape), w.astype('<f2').tobytes())
    w = plain(dst, P + 'layers.0.self_attn.o_proj.weight')
    dst[P + 'layers.0.self_attn.o_proj.weight'] = ('F32', list(w.shape), w.astype('<f4').tobytes())
    w = np.random.default_rng(1).normal(0, .05, (32, 64))
    dst[P + 'layers.2.eh_proj.weight'] = ('BF16', [32, 64], bf16(w))
    dst[P + 'layers.2.enorm.weight'] = ('BF16', [32], bf16(np.ones(32)))
    # A plain linear in FP8 that stays one: it must come out as BF16.
    dst[P + 'layers.1.self_attn.kv_b_proj.weight'] = ('F8_E4M3', [32, 8], bytes(range(32, 96)) * 4)
    dst[P + 'layers.1.self_attn.kv_b_proj.weight_scale_inv'] = \
        ('F32', [8, 2], np.linspace(.01, .02, 16).astype('<f4').tobytes())
    text.update(num_hidden_layers=2, n_routed_experts=2, num_experts_per_tok=1, num_nextn_predict_layers=1,
                layer_types=[text['layer_types'][0], text['layer_types'][2]],
                mlp_layer_types=['dense', 'sparse'], indexer_types=['full', 'full'])
    for key in ('kda_layers', 'full_attn_layers'):
        text['linear_attn_config'].pop(key, None)
    text.pop('first_k_dense_replace', None)
    write(out + '/model.safetensors', dst)
    json.dump(config, open(out + '/config.json', 'w'), indent=1)
    open(out + '/tokenizer_config.json', 'w').write('{"kept": true}\n')
    rng = np.random.default_rng(2)
    json.dump(rng.integers(0, 64, (4, 48)).tolist(), open(out + '/calib.json', 'w'))


def decode(t, key):
    """exl3.md 3 to 5: the matrix [out, in] in double."""
    words = np.frombuffer(t[key + '.trellis'][2], '<u2').reshape(t[key + '.trellis'][1]).astype(np.uint64)
    kt, nt, w = words.shape
    ring = words[..., 0::2] | words[..., 1::2] << np.uint64(16)
    n32 = w // 2
    p = np.arange(256)
    end = (p + 1) * (w // 8) // 2          # w / 8 is twice the bits; the same at half rates
    i = (end - 1) >> 5
    shift = (31 - ((end - 1) & 31)).astype(np.uint64)
    s = ((ring[..., (i - 1) % n32] << np.uint64(32) | ring[..., i]) >> shift & np.uint64(0xFFFF)).astype(np.uint64)
    if key + '.mul1' in t:
        x = s * np.uint64(0x83DCD12D) & np.uint64(0xFFFFFFFF)
        total = sum((x >> np.uint64(b) & np.uint64(255)).astype(np.float64) for b in (0, 8, 16, 24))
        v = ((1024 + total) * 0.00676727294921875 - 10.3828125).astype(np.float16)
    else:
        x = s * np.uint64(0xCBAC1FED) if key + '.mcg' in t else s * np.uint64(89226354) + np.uint64(64248484)
        x = x & np.uint64(0x8FFF8FFF) ^ np.uint64(0x3B603B60)
        half = [(x >> np.uint64(b) & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float64)
                for b in (0, 16)]
        v = (half[0] + half[1]).astype(np.float16)
    lane, j = p >> 3, p & 7
    tile = np.zeros((kt, nt, 16, 16))
    tile[:, :, 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1), (lane >> 2) + 8 * (j >> 2)] = v
    m = tile.transpose(0, 2, 1, 3).reshape(16 * kt, 16 * nt)
    h = np.ones((1, 1))
    for _ in range(7):
        h = np.block([[h, h], [h, -h]])
    h /= 128 ** .5
    m = np.einsum('ij,bjn->bin', h, m.reshape(kt // 8, 128, -1)).reshape(16 * kt, -1)
    m = np.einsum('kbj,ji->kbi', m.reshape(16 * kt, nt // 8, 128), h).reshape(16 * kt, -1)
    suh, svh = (np.frombuffer(t[key + x][2], '<f2').astype(np.float64) for x in ('.suh', '.svh'))
    return (suh[:, None] * m * svh).T


bad = 0


def say(name, ok, why=''):
    global bad
    bad += not ok
    print('ok quantize_' + name if ok else 'not ok quantize_%s: %s' % (name, why))


def check(source, out):
    src, t = read(source + '/model.safetensors'), {}
    config, index = (json.load(open(out + '/' + f)) for f in ('config.json', 'model.safetensors.index.json'))
    block = json.load(open(source + '/config.json')).get('quantization_config', {}).get('weight_block_size')
    for f in sorted(set(index['weight_map'].values())):
        t.update(read(out + '/' + f))
    say('index', set(t) == set(index['weight_map']), 'names differ')
    mtp = read(out + '/mtp.safetensors')
    say('mtp', all('layers.2.' in k for k in mtp) and P + 'layers.2.eh_proj.trellis' in mtp, str(list(mtp)))
    t.update(mtp)
    q = config['quantization_config']
    say('config', q['quant_method'] == 'exl3' and q['codebook'] == 'mul1' and
        q.get('original_quantization_config', {}).get('weight_block_size') == block and
        {k: v for k, v in config.items() if k != 'quantization_config'} ==
        {k: v for k, v in json.load(open(source + '/config.json')).items() if k != 'quantization_config'}, str(q))
    keys = [k[:-8] for k in t if k.endswith('.trellis')]
    store = json.load(open(out + '/quantization_config.json'),
                      object_pairs_hook=lambda p: dict(p) if len(dict(p)) == len(p) else {'twice': p})
    tensors = {n: d for m in store['tensor_storage'].values() for n, d in m['stored_tensors'].items()}
    say('storage', set(tensors) == set(t) and 'twice' not in store['tensor_storage'] and
        all(tensors[n]['n_bytes'] == len(t[n][2]) and tensors[n]['shape'] == t[n][1] for n in t) and
        all(store['tensor_storage'][k]['bits_per_weight'] == t[k + '.trellis'][1][2] / 16 for k in keys), 'differs')
    say('names', P + 'layers.0.self_attn.qkv_proj.trellis' in t and P + 'layers.0.self_attn.conv1d.weight' in t and
        P + 'layers.0.self_attn.q_proj.weight' not in t and not any('scale_inv' in k for k in t) and len(keys) == 21,
        '%d matrices' % len(keys))
    worst = 0
    for key in keys:
        names = [key.replace('qkv', c) for c in 'qkv'] if key.endswith('qkv_proj') else [key]
        w = np.concatenate([plain(src, n + '.weight', block) for n in names]).astype(np.float64)
        got = decode(t, key)[:w.shape[0], :w.shape[1]]
        k = t[key + '.trellis'][1][2] / 16
        # With so few inputs the Hessian says little: the error stays near that of white noise.
        worst = max(worst, ((got - w) ** 2).sum() / (w ** 2).sum() / (1.15 * 4 ** -k))
    say('decode', worst < 1.3, 'error %.2f times what the rates allow' % worst)
    same = [n for n in t if n in src and not n.endswith('kv_b_proj.weight')]
    say('plain', all(t[n] == src[n] for n in same) and len(same) > 30, 'copied tensors differ')
    conv = b''.join(src[P + 'layers.0.self_attn.%s_conv1d.weight' % c][2] for c in 'qkv')
    say('conv', t[P + 'layers.0.self_attn.conv1d.weight'] == ('BF16', [48, 1, 4], conv), 'differs')
    name = P + 'layers.1.self_attn.kv_b_proj.weight'
    say('fp8_to_bf16', t[name] == ('BF16', [32, 8], bf16(plain(src, name, block))), 'differs')
    say('other_files', open(out + '/tokenizer_config.json').read() == '{"kept": true}\n' and
        not os.path.exists(out + '/.quantize'), 'files')
    total = count = 0
    for k in keys:
        if 'layers.2.' not in k and k != 'lm_head':
            parts = [k.replace('qkv', c) for c in 'qkv'] if k.endswith('qkv_proj') else [k]
            n = sum(np.prod(src[x + '.weight'][1]) for x in parts)
            total, count = total + n * t[k + '.trellis'][1][2] / 16, count + n
    say('bits', abs(total / count - q['bits']) < 2e-3 and q['bits'] <= 5, '%g, said %g' % (total / count, q['bits']))


if sys.argv[1] == 'make':
    make(sys.argv[2])
else:
    check(sys.argv[2], sys.argv[3])
    sys.exit(bad != 0)
