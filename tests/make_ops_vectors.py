#!/usr/bin/env python3
"""Makes tests/data/ops/*.json: small cases of every operation, computed with numpy in float64
straight from the formulas of the model description, not from ref.c. ops_test.c holds the
arguments of each case in the same order (VECTORS) and takes the arrays from here by name;
"name>" is what the array "name" must hold afterwards. Run it again after a change:

    /usr/bin/python3 tests/make_ops_vectors.py
"""
import json
import os

import numpy as np

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "ops")
PEND, PAGE, RING = 8, 64, 16
FILES = {}


class Rand:
    """float32 inputs, so that the stored decimals are the very values computed with."""

    def __init__(self, seed):
        self.r = np.random.RandomState(seed)

    def n(self, *shape, scale=1.0):
        return (self.r.randn(*shape) * scale).astype(np.float32)

    def bits(self, dtype, *shape):
        return self.r.randint(0, np.iinfo(dtype).max + 1, shape).astype(dtype)


def case(op, **arrays):
    FILES.setdefault(op, []).append({k.replace("__", "."): v for k, v in arrays.items()})


def f64(a):
    return np.asarray(a, np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-f64(x)))


def silu(x):
    return f64(x) * sigmoid(x)


def bf16_bits(x):
    """float32 -> bfloat16, nearest even"""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16(bits):
    return f64((np.asarray(bits, np.uint32) << 16).view(np.float32))


def f16(bits):
    return f64(np.asarray(bits, np.uint16).view(np.float16))


def bf16_weights(r, *shape, scale=1.0):
    bits = bf16_bits(r.n(*shape, scale=scale))
    return bits, bf16(bits)


# ---- rows on their own

def embed(r):
    bits, w = bf16_weights(r, 5, 4)
    ids = np.array([4, 0, 2], np.int32)
    case("embed", table__w=bits, id=ids, y=np.repeat(w[ids][:, None], 2, 1))


def norms(r):
    for w in (r.n(5), None):
        x = r.n(2, 5)
        y = f64(x) / np.sqrt((f64(x) ** 2).mean(1, keepdims=True) + np.float32(1e-5))
        case("rmsnorm", x=x, y=y if w is None else y * w, **({} if w is None else {"w": w}))
    x, w, b = r.n(2, 5), r.n(5), r.n(5)
    d = f64(x) - f64(x).mean(1, keepdims=True)
    case("layernorm", x=x, w=w, b=b,
         y=d / np.sqrt((d ** 2).mean(1, keepdims=True) + np.float32(1e-6)) * w + b)


def clamped(gate, up, limit):
    if limit:
        gate, up = np.minimum(f64(gate), limit), np.clip(f64(up), -limit, limit)
    return silu(gate) * up


def swiglu(r):
    for limit in (10, 0):
        gate, up = r.n(2, 7, scale=9), r.n(2, 7, scale=9)
        case("swiglu", gate=gate, up=up, y=clamped(gate, up, limit))


# ---- products

def e4m3(code):
    code = np.asarray(code, np.int64)
    sign, e, m = np.where(code & 128, -1.0, 1.0), (code >> 3) & 15, code & 7
    return sign * np.where(e == 0, m / 8 * 2.0 ** -6, (1 + m / 8) * 2.0 ** (f64(e) - 7))


def exl3_values(words, k2, codebook):
    """What [k, n] from trellis words [k/16, n/16, 8 k2]: exl3.md 3 and 4"""
    kt, nt, _ = words.shape
    w = np.zeros((16 * kt, 16 * nt))
    for p in range(256):
        end = (p + 1) * (k2 // 2) + ((p + 1) // 2 if k2 % 2 else 0)
        state = np.zeros((kt, nt), np.int64)
        for b in range(end - 16, end):
            b %= 128 * k2
            word = words[:, :, 2 * (b // 32)].astype(np.int64)
            word |= words[:, :, 2 * (b // 32) + 1].astype(np.int64) << 16
            state = 2 * state + ((word >> (31 - b % 32)) & 1)
        if codebook == "mul1":
            x = state * 0x83DCD12D % 2 ** 32
            total = sum((x >> s) & 255 for s in (0, 8, 16, 24))
            value = (1024 + total) * f16(0x1EEE) + f16(0xC931)
        else:
            x = state * 0xCBAC1FED if codebook == "mcg" else state * 89226354 + 64248484
            x = ((x % 2 ** 32) & 0x8FFF8FFF) ^ 0x3B603B60
            value = f16(x & 0xFFFF) + f16(x >> 16)
        lane, j = p >> 3, p & 7
        row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
        col = (lane >> 2) + 8 * (j >> 2)
        w[row::16, col::16] = value.astype(np.float16)
    return w


def hadamard():
    i = np.arange(128)
    odd = np.array([[bin(a & b).count("1") & 1 for b in i] for a in i])
    return (1.0 - 2 * odd) / np.sqrt(128)


def matmul(r):
    x = r.n(2, 6)
    w = r.n(3, 6)
    case("matmul", x=x, w__w=w, y=f64(x) @ f64(w).T)
    half = r.n(3, 6).astype(np.float16).view(np.uint16)
    bias = r.n(3).astype(np.float16).view(np.uint16)
    case("matmul", x=x, w__w=half, w__bias=bias, y=f64(x) @ f16(half).T + f16(bias))
    bits, w = bf16_weights(r, 3, 6)
    case("matmul", x=x, w__w=bits, y=f64(x) @ w.T)
    code, scale = r.bits(np.uint8, 5, 6), r.n(3, 2) ** 2
    code[code & 127 == 127] = 0         # the two NaN codes
    full = np.kron(f64(scale), np.ones((2, 4)))[:5, :6]
    case("matmul", x=x, w__w=code, w__scale=scale, y=f64(x) @ (e4m3(code) * full).T)
    for k2, codebook, n, k, has_bias in ((3, "mul1", 128, 128, 0), (4, "mcg", 70, 100, 1),
                                         (2, "3inst", 100, 128, 0)):
        words = r.bits(np.uint16, 8, 8, 8 * k2)
        suh, svh = (r.n(128).astype(np.float16).view(np.uint16) for _ in range(2))
        x, p = r.n(2, k), hadamard()
        pad = np.zeros((2, 128))
        pad[:, :k] = x
        y = (pad * f16(suh)) @ p @ exl3_values(words, k2, codebook) @ p * f16(svh)
        y = y[:, :n]
        extra = {}
        if has_bias:
            extra["w__bias"] = r.n(n).astype(np.float16).view(np.uint16)
            y = y + f16(extra["w__bias"])
        case("matmul", x=x, w__w=words, w__suh=suh, w__svh=svh, y=y, **extra)


def head_matmul(r):
    bits, w = bf16_weights(r, 11, 4)
    heads = [w[2 + 5 * h:2 + 5 * h + 3] for h in range(2)]
    x = r.n(2, 2, 4)
    case("head_matmul", x=x, w__w=bits,
         y=np.stack([f64(x[:, h]) @ heads[h].T for h in range(2)], 1))
    x = r.n(2, 2, 3)
    case("head_matmul", x=x, w__w=bits,
         y=np.stack([f64(x[:, h]) @ heads[h] for h in range(2)], 1))


def moe(r):
    arrays, experts = {}, []
    for e in range(3):
        mats = {}
        for name, shape in (("gate", (3, 4)), ("up", (3, 4)), ("down", (4, 3))):
            arrays["%d.%s.w" % (e, name)], mats[name] = bf16_weights(r, *shape, scale=2)
        experts.append(mats)
    x, ids = r.n(3, 4, scale=2), np.array([[2, 0], [-1, 2], [0, 1]], np.int32)
    before = r.n(3, 2, 4)
    y = f64(before).copy()
    for t in range(3):
        for a in range(2):
            if ids[t, a] >= 0:
                m = experts[ids[t, a]]
                y[t, a] = m["down"] @ clamped(m["gate"] @ f64(x[t]), m["up"] @ f64(x[t]), 2.5)
    case("moe", x=x, id=ids, y=before, **{"y>": y}, **arrays)


def router(r):
    bits, w = bf16_weights(r, 6, 5)
    bits[4], w[4] = bits[1], w[1]       # experts 1 and 4 tie
    bias = r.n(6, scale=0.1)
    bias[1] = bias[4] = 1
    x = r.n(3, 5)
    sc = sigmoid(f64(x) @ w.T)
    ids = np.array([sorted(range(6), key=lambda e: (-(sc[t, e] + bias[e]), e))[:3] for t in range(3)])
    picked = np.take_along_axis(sc, ids, 1)
    case("router", x=x, w__w=bits, bias=bias, id=ids, score=sc,
         weight=picked / (picked.sum(1, keepdims=True) + 1e-20) * 2.5)


def plan(r):
    """All splits are tried: the lane takes the first k of the missing experts."""
    shapes = [(1, 4, 9, (2, 190, 240, 60, 20)), (5, 4, 9, (2, 190, 240, 60, 20)),
              (5, 4, 9, (2, 190, 0, 60, 20)), (6, 3, 30, (8, 10, 4, 2, 1))]
    for rows, active, n, (here_us, link_us, lane_us, row_us, post_us) in shapes:
        ids = np.array([r.r.permutation(n)[:active] for _ in range(rows)], np.int32)
        resident = np.where(r.r.rand(n) < 0.3, np.arange(n), -1).astype(np.int32)
        count = np.bincount(ids.ravel(), minlength=n)
        missing = sorted((count[e], e) for e in range(n) if count[e] and resident[e] < 0)
        held = sum(1 for e in range(n) if count[e] and resident[e] >= 0)
        cost = [(max(held * here_us + (len(missing) - k) * link_us,
                     post_us + sum(lane_us + (c - 1) * row_us for c, _ in missing[:k]) if k else 0), k)
                for k in range(len(missing) + 1 if lane_us else 1)]
        lane = {e for _, e in missing[:min(cost)[1]]}
        side = np.array([[2 if e in lane else 1 if resident[e] < 0 else 0 for e in row] for row in ids])
        case("plan", id=ids, resident=resident, x=r.n(rows, 2),
             here=np.where(side == 2, -1, ids), there=np.where(side == 2, ids, -1), log=ids + (side << 24))


def combine(r):
    base, part, weight = r.n(2, 5), r.n(2, 3, 5), r.n(2, 3)
    case("combine", base=base, part=part, weight=weight,
         y=f64(base) + np.einsum("ra,rad->rd", f64(weight), f64(part)))


# ---- streams

def hc(r):
    for s, d in ((4, 3), (2, 5)):
        streams = r.n(2, s, d)
        bits, fn = bf16_weights(r, s * (2 + s), s * d)
        base, scale = r.n(s * (2 + s)), r.n(3)
        x, post, comb = [], [], []
        for t in range(2):
            f = f64(streams[t]).reshape(-1)
            m = fn @ (f / np.sqrt((f ** 2).mean() + np.float32(1e-5)))
            pre = sigmoid(m[:s] * scale[0] + base[:s]) + np.float32(1e-6)
            post.append(2 * sigmoid(m[s:2 * s] * scale[1] + base[s:2 * s]))
            z = (m[2 * s:] * scale[2] + base[2 * s:]).reshape(s, s)
            c = np.exp(z - z.max(1, keepdims=True))
            c = c / c.sum(1, keepdims=True) + np.float32(1e-6)
            c = c / (c.sum(0, keepdims=True) + np.float32(1e-6))
            for _ in range(19):
                c = c / (c.sum(1, keepdims=True) + np.float32(1e-6))
                c = c / (c.sum(0, keepdims=True) + np.float32(1e-6))
            comb.append(c)
            x.append(pre @ f64(streams[t]))
        case("hc_mix", streams=streams, fn__w=bits, base=base, scale=scale, x=x, post=post, comb=comb)
    streams, y, post, comb = r.n(2, 4, 3), r.n(2, 3), r.n(2, 4), r.n(2, 4, 4)
    new = [[f64(post[t, j]) * y[t] + sum(f64(comb[t, i, j]) * streams[t, i] for i in range(4))
            for j in range(4)] for t in range(2)]
    case("hc_merge", streams=streams, y=y, post=post, comb=comb, **{"streams>": new})
    case("hc_mean", streams=streams, y=f64(streams).mean(1))


# ---- KDA. Spans are (slot, first row, rows, position, pending rows to fold).

def conv_short(r):
    for spans, hold in (([(2, 0, 2, 7, 2), (0, 2, 3, 0, 0), (1, 5, 0, 9, 1)], True),
                        ([(2, 0, 2, 7, 1), (0, 2, 5, 0, 0)], False)):
        n = sum(s[2] for s in spans)
        u, w, state, pend = r.n(n, 3), r.n(3, 4), r.n(3, 3, 3), r.n(3, PEND, 3)
        y, new_state, new_pend = np.zeros((n, 3)), state.copy(), pend.copy()
        for slot, row0, rows, pos0, commit in spans:
            past = state[slot] if pos0 else np.zeros((3, 3), np.float32)
            past = np.concatenate([past, pend[slot, :commit]])[-3:]
            line = np.concatenate([past, u[row0:row0 + rows]])
            for t in range(rows):
                y[row0 + t] = silu((f64(line[t:t + 4]) * w.T).sum(0))
            new_state[slot] = past if hold else line[-3:]
            if hold:
                new_pend[slot, :rows] = u[row0:row0 + rows]
        case("conv_short", u=u, w=w, state=state, pend=pend, y=y,
             **{"state>": new_state, "pend>": new_pend})


def kda_gate(r):
    f, b, a_log, dt = r.n(2, 2, 3), r.n(2, 2), r.n(2), r.n(2, 3)
    case("kda_gate", f=f, b=b, a_log=a_log, dt_bias=dt, beta=sigmoid(b),
         g=-5 * sigmoid(np.exp(f64(a_log))[None, :, None] * (f64(f) + dt)))


def unit(x):
    return f64(x) / np.sqrt((f64(x) ** 2).sum(-1, keepdims=True) + 1e-6)


def delta_row(s, k, v, g, beta):
    """k is normalised already"""
    s = np.exp(f64(g))[:, None] * s
    return s + np.outer(k, beta * (f64(v) - s.T @ k))


def kda_inputs(r, n, heads, width):
    q, k, v = (r.n(n, heads, width) for _ in range(3))
    g = (-5 * sigmoid(r.n(n, heads, width, scale=2))).astype(np.float32)
    return q, k, v, g, sigmoid(r.n(n, heads)).astype(np.float32)


def kda_step(r):
    heads, w, slots = 2, 4, 3
    spans = [(1, 0, 3, 9, 2), (2, 3, 1, 0, 0), (0, 4, 0, 5, 1)]
    q, k, v, g, beta = kda_inputs(r, 4, heads, w)
    state = r.n(slots, heads, w, w)
    pend = np.zeros((slots, PEND, heads, 3 * w + 1), np.float32)
    pq, pk, pv, pg, pb = kda_inputs(r, slots * PEND, heads, w)
    pend[..., :w] = unit(pk).reshape(slots, PEND, heads, w)
    pend[..., w:2 * w] = pv.reshape(slots, PEND, heads, w)
    pend[..., 2 * w:3 * w] = pg.reshape(slots, PEND, heads, w)
    pend[..., 3 * w] = pb.reshape(slots, PEND, heads)
    o, new_state, new_pend = np.zeros((4, heads, w)), f64(state).copy(), f64(pend).copy()
    for slot, row0, rows, pos0, commit in spans:
        for h in range(heads):
            s = f64(state[slot, h]) * (pos0 > 0)
            for i in range(commit):
                p = f64(pend[slot, i, h])
                s = delta_row(s, p[:w], p[w:2 * w], p[2 * w:3 * w], p[3 * w])
            new_state[slot, h] = s
            for i in range(rows):
                t = row0 + i
                kn = unit(k[t, h])
                s = delta_row(s, kn, v[t, h], g[t, h], beta[t, h])
                o[t, h] = s.T @ (unit(q[t, h]) * w ** -0.5)
                new_pend[slot, i, h] = np.concatenate([kn, v[t, h], g[t, h], [beta[t, h]]])
    case("kda_step", q=q, k=k, v=v, g=g, beta=beta, state=state, pend=pend, o=o,
         **{"state>": new_state, "pend>": new_pend})


def chunk(s0, q, k, v, g, beta):
    """One block of one head in chunked form: outputs and the next state."""
    n = len(q)
    big_g = np.cumsum(f64(g), 0)
    decay = np.exp(np.minimum(big_g[:, None] - big_g[None], 0))      # [i, j, d], used for j <= i
    a = np.tril(f64(beta)[:, None] * np.einsum("id,jd,ijd->ij", k, k, decay), -1)
    m = np.tril(np.einsum("id,jd,ijd->ij", q, k, decay))
    t = np.linalg.inv(np.eye(n) + a)
    wc = t @ (f64(beta)[:, None] * k * np.exp(big_g))
    vn = t @ (f64(beta)[:, None] * f64(v)) - wc @ s0
    o = (q * np.exp(big_g)) @ s0 + m @ vn
    s1 = np.exp(big_g[-1])[:, None] * s0 + (k * np.exp(big_g[-1] - big_g)).T @ vn
    return o, s1


def kda_chunk(r):
    heads, w = 1, 3
    spans = [(1, 0, 30, 50, 1), (0, 30, 9, 0, 0)]        # the first is cut at position 64
    q, k, v, g, beta = kda_inputs(r, 39, heads, w)
    state = r.n(2, heads, w, w)
    pend = r.n(2, PEND, heads, 3 * w + 1, scale=0.4)
    pend[..., 2 * w:3 * w] = -np.abs(pend[..., 2 * w:3 * w])
    o, new_state = np.zeros((39, heads, w)), f64(state).copy()
    for slot, row0, rows, pos0, commit in spans:
        s = f64(state[slot, 0]) * (pos0 > 0)
        for i in range(commit):
            p = f64(pend[slot, i, 0])
            s = delta_row(s, p[:w], p[w:2 * w], p[2 * w:3 * w], p[3 * w])
        done = 0
        while done < rows:
            n = min(rows - done, PAGE - (pos0 + done) % PAGE)
            i = slice(row0 + done, row0 + done + n)
            o[i, 0], s = chunk(s, unit(q[i, 0]) * w ** -0.5, unit(k[i, 0]), v[i, 0], g[i, 0], beta[i, 0])
            done += n
        new_state[slot, 0] = s
    case("kda_chunk", q=q, k=k, v=v, g=g, beta=beta, state=state, pend=pend, o=o,
         **{"state>": new_state})


def kda_out(r):
    o, z, w = r.n(2, 2, 5), r.n(2, 2, 5), r.n(5)
    y = w * f64(o) / np.sqrt((f64(o) ** 2).mean(-1, keepdims=True) + np.float32(1e-5)) * sigmoid(z)
    case("kda_out", o=o, z=z, w=w, y=y)


# ---- paged memory

def latent_append(r):
    spans = [(1, 0, 3, 62, 0), (0, 3, 2, 0, 0)]
    table = np.array([[3, -1, -1], [0, 2, -1]], np.int32)
    for as_bf16 in (True, False):
        c = r.n(5, 2)
        data = bf16_bits(r.n(4 * PAGE, 2)) if as_bf16 else r.n(4 * PAGE, 2)
        new = data.copy()
        for slot, row0, rows, pos0, _ in spans:
            for t in range(rows):
                page = table[slot, (pos0 + t) // PAGE]
                new[page * PAGE + (pos0 + t) % PAGE] = bf16_bits(c[row0 + t]) if as_bf16 else c[row0 + t]
        case("latent_append", c=c, cache=data, cache__table=table, **{"cache>": new})
    w = 6
    c = r.n(5, w)
    c[1] = 0, 464, -17, 26, 0.0009765625, -1.5             # 464 and 17 and 26 lie half way
    c[2] = 465, 464, 1, 2.0 ** -10, 3 * 2.0 ** -9, -2.0 ** -30
    c[3] = 0
    data = r.bits(np.uint8, 4, PAGE * (w + 1))
    new = data.copy()
    for slot, row0, rows, pos0, _ in spans:
        for t in range(rows):
            page, at = table[slot, (pos0 + t) // PAGE], (pos0 + t) % PAGE
            new[page, at * w:at * w + w], new[page, PAGE * w + at] = fp8_item(c[row0 + t])
    case("latent_append", c=c, cache=data, cache__table=table, **{"cache>": new})


def fp8_item(x):
    """Codes and scale byte: the least power of two, 2^-117 or more, with which the largest
    value rounds to no more than 448; nearest codes, ties to the even one."""
    known = e4m3(np.arange(127))
    k = -117
    while abs(f64(x)).max() * 2.0 ** -k > 464:
        k += 1
    codes = []
    for v in f64(x) * 2.0 ** -k:
        far = abs(known - abs(v))
        best = np.flatnonzero(far == far.min())
        code = best[0] if len(best) == 1 else best[best % 2 == 0][0]
        codes.append(code | (128 if np.signbit(v) else 0))
    return np.array(codes, np.uint8), k + 127


def index_append(r):
    spans, size, w = [(1, 0, 7, 58, 0), (0, 7, 3, 2, 0)], 4, 2
    table = np.array([[1, -1, -1], [2, 0, -1]], np.int32)
    for as_bf16 in (True, False):
        key, gate, ape = r.n(10, w), r.n(10, w), r.n(size, w)
        ring = r.n(2, RING, 2, w)
        pools = r.n(4 * PAGE // size, w)
        if as_bf16:
            pools = bf16_bits(pools)
        new, new_ring = pools.copy(), ring.copy()
        for slot, row0, rows, pos0, _ in spans:
            for t in range(rows):
                pos = pos0 + t
                new_ring[slot, pos % RING] = key[row0 + t], gate[row0 + t]
                if pos % size == size - 1:
                    own = new_ring[slot, (pos - size + 1 + np.arange(size)) % RING]
                    a = np.exp(f64(own[:, 1]) + ape)
                    pooled = (a / a.sum(0) * own[:, 0]).sum(0)
                    at = table[slot, pos // PAGE] * (PAGE // size) + pos % PAGE // size
                    new[at] = bf16_bits(pooled) if as_bf16 else pooled
        case("index_append", key=key, gate=gate, ape=ape, ring=ring, pool=pools, pool__table=table,
             **{"ring>": new_ring, "pool>": new})


def index_score(r):
    spans, size, w, heads = [(1, 0, 2, 70, 0), (0, 2, 3, 1, 0)], 4, 3, 2
    table = np.array([[1, -1, -1], [2, 0, -1]], np.int32)
    pools = r.n(4 * PAGE // size, w)
    q, weight = r.n(5, heads, w), r.n(5, heads)
    score = np.full((5, 18), np.nan)
    for slot, row0, rows, pos0, _ in spans:
        for t in range(rows):
            for p in range((pos0 + t + 1) // size):
                key = pools[table[slot, p * size // PAGE] * (PAGE // size) + p % (PAGE // size)]
                dots = np.maximum(0, f64(q[row0 + t]) @ f64(key) * 0.5)
                score[row0 + t, p] = (f64(weight[row0 + t]) * 0.25 * dots).sum()
    case("index_score", q=q, w=weight, pool=pools, pool__table=table, score=score)


def topk(r):
    spans, size = [(0, 0, 4, 18, 0)], 2
    score = r.n(4, 11).round(0)                             # many ties
    pick, n_pick = np.full((4, 5), np.nan), []
    for t in range(4):
        seen = (18 + t + 1) // size
        best = sorted(range(seen), key=lambda p: (-score[t, p], p))[:5]
        pick[t, :len(best)] = sorted(best)
        n_pick.append(len(best))
    case("topk", score=score, pick=pick, n_pick=n_pick)


def mla_attend(r):
    w, heads, size = 3, 2, 4
    table = np.array([[1, -1, -1], [2, 0, -1]], np.int32)
    spans = [(1, 0, 2, 66, 0), (0, 2, 1, 0, 0)]
    picks = [[0, 3, 15], [1, 2, 16], [0, 0, 0]]
    n_pick = [3, 3, 0]
    for fmt, sparse in (("f32", False), ("bf16", True), ("fp8", True)):
        data, q = r.n(4 * PAGE, w), r.n(3, heads, w)
        cache, value = data, f64(data)
        if fmt == "bf16":
            cache = bf16_bits(data)
            value = bf16(cache)
        elif fmt == "fp8":
            items = [fp8_item(x) for x in data]
            cache = np.concatenate([np.concatenate([c for c, _ in page] + [[s for _, s in page]])
                                    for page in (items[i:i + PAGE] for i in range(0, 4 * PAGE, PAGE))])
            value = np.array([e4m3(c) * 2.0 ** (s - 127) for c, s in items])
        z = np.zeros((3, heads, w))
        for slot, row0, rows, pos0, _ in spans:
            for t in range(rows):
                row, pos = row0 + t, pos0 + t
                if sparse:
                    seen = [c for p in picks[row][:n_pick[row]] for c in range(size * p, size * p + size)]
                    seen += range(pos - (pos + 1) % size + 1, pos + 1)
                else:
                    seen = range(pos + 1)
                c = value[[table[slot, i // PAGE] * PAGE + i % PAGE for i in seen]]
                s = f64(q[row]) @ c.T * 0.7
                p = np.exp(s - s.max(1, keepdims=True))
                z[row] = p / p.sum(1, keepdims=True) @ c
        extra = {"pick": picks, "n_pick": n_pick} if sparse else {}
        case("mla_attend", q=q, cache=cache, cache__table=table, z=z, **extra)


# ---- sampling: greedy choice, log-probabilities and alternatives of adjusted logits

def sample(r):
    n, n_token, allowed = 12, 10, 0b1110111111
    logits = r.n(3, n, scale=3)
    logits[1, 4] = logits[1, 7] = 9                         # a tie: the lower id
    logits[:, 11] = 50                                      # no token
    ids, logprob, top = [], [], np.full((3, 20, 2), np.nan)
    for row in range(3):
        l = f64(logits[row]).copy()
        if row == 0:                                        # all adjustments at once
            for i, count in ((2, 3), (5, 1), (8, 0)):
                l[i] = l[i] / np.float32(1.3) if l[i] > 0 else l[i] * np.float32(1.3)
                if count:
                    l[i] -= np.float32(0.2) * count + np.float32(0.4)
            l[1] += 2.5
            l[3] = -np.inf                                  # bias of -100
            l[6] = -np.inf                                  # mask
            l[9] = -np.inf                                  # ban
        l[n_token:] = -np.inf
        p = l - np.log(np.exp(l).sum())
        order = sorted(range(n_token), key=lambda i: (-l[i], i))
        ids.append(order[0])
        logprob.append(p[order[0]])
        for i in range(3):
            top[row, i] = order[i], p[order[i]]
    assert allowed >> 6 & 1 == 0
    case("sample", logits=logits, id=ids, logprob=logprob, top=top)


def number(x):
    if isinstance(x, (int, np.integer)):
        return str(int(x))
    return "null" if np.isnan(x) else "%.9g" % x


def main():
    makers = [embed, norms, matmul, head_matmul, swiglu, hc, conv_short, kda_gate, kda_step, kda_chunk,
              kda_out, latent_append, index_append, index_score, topk, mla_attend, router, moe,
              combine, sample, plan]
    for i, make in enumerate(makers):
        make(Rand(1000 + i))
    os.makedirs(OUT, exist_ok=True)
    for op, cases in FILES.items():
        text = ",\n".join(
            "{" + ",\n ".join(
                json.dumps(name) + ":[" + ",".join(number(x) for x in np.asarray(a).reshape(-1)) + "]"
                for name, a in c.items()) + "}"
            for c in cases)
        with open(os.path.join(OUT, op + ".json"), "w") as f:
            f.write("[" + text + "]\n")


if __name__ == "__main__":
    main()
