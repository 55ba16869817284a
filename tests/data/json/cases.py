"""Documents and Python's answers for json_test.c, one case a line, fields in hex.

T text A U I    text is JSON; json.dumps of it with ensure_ascii True, False, and with
                ensure_ascii False and indent 2
R text          Python refuses text
D bits repr     a double by its bit pattern
S bytes A U     a string of any bytes (invalid UTF-8 replaced), quoted
"""
import json
import math
import random
import struct

rnd = random.Random(20260101)
SPACE = ["", "", "", " ", "\n", "\t", "\r\n  "]
CHARS = ["a", "Z", "0", " ", "\x7f", "\u00e9", "\u4e2d", "\u2028", "\ufffd", "\U0001f600",
         "\U0010ffff", "\ue000", "/", "'"]
ESCAPES = ['\\"', "\\\\", "\\/", "\\b", "\\f", "\\n", "\\r", "\\t", "\\u0000", "\\u001f",
           "\\u00E9", "\\u4e2d", "\\ud83d\\ude00", "\\uD800", "\\udc00", "\\ud800\\ud800",
           "\\ud800\\u0041", "\\uFFFF"]
NUMBERS = ["0", "-0", "-0.0", "0.0", "1", "-1", "1.0", "1.50", "1e5", "1E+5", "1e-5", "1e16",
           "1e15", "123456789012345678", "0.0001", "0.00001", "9007199254740993",
           "9223372036854775807", "9223372036854775808", "18446744073709551615",
           "18446744073709551616", "-9223372036854775808", "-9223372036854775809",
           "123456789012345678901234567890", "-1" + "0" * 300, "1" + "0" * 308, "5e-324",
           "1.7976931348623157e308", "2.2250738585072014e-308", "0e0", "0E-0", "1e-400",
           "3.141592653589793238462643383279"]


class Refused(Exception):
    pass


def refuse(_):
    raise Refused


def finite(text):
    value = float(text)
    if math.isinf(value):
        raise Refused
    return value


def whole(text):
    """An integer no double can hold is refused by us, by design."""
    value = int(text)
    if abs(value) >= 2**64 and math.isinf(float(text)):
        raise Refused
    return value


def clean(value):
    """Half a surrogate pair is no character; UTF-8 cannot hold it."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [clean(v) for v in value]
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    return value


def members(pairs):
    out = {}
    for key, value in pairs:
        if "\0" in key:
            raise Refused
        out[clean(key)] = value
    return out


def loads(data):
    return clean(json.loads(data.decode("utf-8"), object_pairs_hook=members,
                            parse_constant=refuse, parse_float=finite, parse_int=whole))


def space():
    return rnd.choice(SPACE)


def number():
    if rnd.random() < 0.4:
        return rnd.choice(NUMBERS)
    if rnd.random() < 0.5:
        return str(rnd.randrange(-2**70, 2**70) >> rnd.randrange(70))
    return repr(rnd.uniform(-1, 1) * 10.0 ** rnd.randrange(-320, 300))


def string(escapes=ESCAPES):
    parts = (rnd.choice(CHARS if rnd.random() < 0.7 else escapes)
             for _ in range(rnd.randrange(9)))
    return '"' + "".join(parts) + '"'


def document(depth):
    kind = rnd.randrange(9 if depth > 0 else 5)
    if kind < 2:
        return number()
    if kind < 4:
        return string()
    if kind == 4:
        return rnd.choice(["true", "false", "null"])
    if kind == 5:
        return rnd.choice(["[" + space() + "]", "{" + space() + "}"])
    n = rnd.choice([1, 2, 3, 5, 40])
    depth -= 1 if n < 40 else 4
    items = []
    for _ in range(n):
        value = space() + document(depth) + space()
        if kind == 6:
            keys = [e for e in ESCAPES if e != "\\u0000"]
            value = space() + string(keys) + space() + ":" + value
        items.append(value)
    both = "{}" if kind == 6 else "[]"
    return both[0] + ",".join(items) + both[1]


def mutate(data):
    data = bytearray(data)
    for _ in range(rnd.randrange(1, 4)):
        at = rnd.randrange(len(data) + 1)
        with_ = rnd.choice([bytes([rnd.randrange(256)]), rnd.choice(list("[]{},:\"\\-+.eE01 "
                            "tfn/'")).encode(), b"NaN", b"Infinity", b"null", b"\\u12",
                            b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0", b"1e999"])
        data[at:at + rnd.randrange(3)] = with_
    return bytes(data)


def hexed(*fields):
    return " ".join(f.hex() or "-" for f in fields)


def dumps(value, **options):
    return json.dumps(value, **options).encode()


def put_text(data):
    try:
        value = loads(data)
    except (Refused, ValueError):
        print("R", hexed(data))
        return
    print("T", hexed(data, dumps(value), dumps(value, ensure_ascii=False),
                     dumps(value, ensure_ascii=False, indent=2)))


def put_double(value):
    if math.isfinite(value):
        print("D", hexed(struct.pack(">d", value), repr(value).encode()))


for spelled in NUMBERS:
    put_text(spelled.encode())
for _ in range(1500):
    text = (space() + document(5) + space()).encode()
    put_text(text)
    for _ in range(3):
        put_text(mutate(text))
for e in range(-1074, 1024):
    for near in (-1, 0, 1):
        put_double(struct.unpack(">d", struct.pack(">q", struct.unpack(
            ">q", struct.pack(">d", 2.0**e))[0] + near))[0])
for e in range(-323, 309):
    put_double(float("1e%d" % e))
    put_double(-float("%de%d" % (rnd.randrange(1, 10**rnd.randrange(1, 18)), e - 17)))
for _ in range(20000):
    put_double(struct.unpack(">d", rnd.randbytes(8))[0])
    put_double(rnd.randrange(10**9) / 1000)
for _ in range(2000):
    raw = b"".join(rnd.choice([rnd.randbytes(1), "\u4e2d".encode(), "\U0001f600".encode(),
                               b"\xe4\xb8", b"\xf0\x9f\x98", b"\xed\xa0", b"\n", b"\"", b"\\"])
                   for _ in range(rnd.randrange(12)))
    fixed = raw.decode("utf-8", "replace")
    print("S", hexed(raw, dumps(fixed), dumps(fixed, ensure_ascii=False)))
