#!/usr/bin/env python3
"""Writes literals.json: texts a model may give for an argument without a type, and what
Python makes of them: json.loads() without NaN, Infinity and overflow, then
ast.literal_eval(), then the text itself. Run: python3 make_literals.py > literals.json"""
import ast
import json
import math
import random
import warnings

warnings.simplefilter("ignore")
FIXED = r"""
True|False|None|true|null|TRUE|none|Truex|True False|'a'|"a"|''|""|'a"b'|"a'b"|'it\'s'|'a\nb'|'\\'|'\d\q'|'\x41\u00e9\U0001F600'
'\101\0x'|'tab	in'|'unclosed|'a\|'\x4'|'\u12'|'\N{DEGREE SIGN}'|[]|[,]|[1,]|[1,,2]|[1 2]|[1|]|()|(1)|(1,)|(1, 2)|((1), ((2,)))|(,)
{}|{'a':1}|{"a":1,}|{'a':1,'a':2}|{'a'}|{'a':}|{:1}|{'a' 1}|{'a': {'b': (None, True)}}|{1: 2}|[True, 'x', None, 1.5, -2]|[true]
1|-1|+1|- 1|--1|1.|.5|-.5|1.5e3|1e5|1e|1e+|1.e2|.|-|+|00|01|1e400|-1e400|[1e400]|1x|1 2|nan|inf|NaN|-Infinity|[NaN]|{'a': Infinity}
  True  |  [ 1 , 2 ]  |  'x'  |plain text|a=1|x(1)|[x]|{x: 1}|lambda: 1|1+2|1+2j|[1]+[2]|"a" if 1 else 2|'a'.upper()|__import__('os')
"""


def finite(v):
    if isinstance(v, float) and not math.isfinite(v):
        raise ValueError
    for x in v.values() if isinstance(v, dict) else v if isinstance(v, (list, tuple)) else ():
        finite(x)
    return v


def refuse(name):
    raise ValueError(name)


def keys_are_strings(v):
    if isinstance(v, (complex, set, bytes)) or v is ...:
        raise ValueError
    if isinstance(v, dict) and not all(isinstance(k, str) for k in v):
        raise ValueError
    for x in v.values() if isinstance(v, dict) else v if isinstance(v, (list, tuple)) else ():
        keys_are_strings(x)


def meaning(text):
    try:
        return finite(json.loads(text.strip(), parse_constant=refuse))
    except ValueError:
        pass
    try:
        v = finite(ast.literal_eval(text.strip()))
        keys_are_strings(v)
        return v
    except (ValueError, SyntaxError):
        return text


def value(rng, depth):
    kind = rng.randrange(9 if depth else 6)
    if kind < 3:
        return rng.choice([None, True, False, 0, -7, 2.5, 1e-9, 10**15])
    if kind < 6:
        return "".join(rng.choice("ab'\"\\\n\t{}[](),: é東😀\x01") for _ in range(rng.randrange(9)))
    items = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return items if kind == 6 else tuple(items) if kind == 7 else {str(i) + "'\""[i % 2]: x for i, x in enumerate(items)}


# Read by ast.literal_eval(), kept as strings by choice: see reply.c.
OURS = ["0x1f", "1_000", "2024_01_02", "b'a'", "r'a'", "u'a'", "'''a'''", "'a' 'b'", "00", "01.5", "- 1",
        "'\\N{DEGREE SIGN}'"]

rng = random.Random(7)
texts = [t for line in FIXED.strip("\n").split("\n") for t in line.split("|")]
texts += [repr(value(rng, 3)) for _ in range(300)]
pairs = [[t, t if t in OURS else meaning(t)] for t in dict.fromkeys(texts + OURS)]
print("[\n" + ",\n".join(json.dumps(p, ensure_ascii=False) for p in pairs) + "\n]")
