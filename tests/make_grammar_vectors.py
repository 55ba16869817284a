#!/usr/bin/python3
"""Checks JSON documents against JSON schemas with python3-jsonschema, an implementation that
knows nothing of ours. Two uses:

  make_grammar_vectors.py            verifies tests/data/grammar/schemas.jsonl: that each document
                                     listed as valid or invalid is what the line says
  make_grammar_vectors.py --check F  F has lines {"schema": line number from 0, "doc": text}; prints
                                     each document that its schema does not accept, then a count

Numbers are read as decimals, so multipleOf 0.01 means what it says. Written differently in
2020-12, and translated here: nullable, boolean exclusiveMinimum, items as an array."""
import sys

sys.path.pop(0)         # tests/http.py must not stand for Python's own http

import datetime
import decimal
import ipaddress
import json
import re

import jsonschema

DATA = "tests/data/grammar/schemas.jsonl"
JSON = {"parse_float": decimal.Decimal}
FORMATS = jsonschema.FormatChecker(formats=())


def matches(expression):
    return lambda text: re.fullmatch(expression, text) is not None


def is_date_time(text):
    datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))
    return "T" in text and (text[-1] == "Z" or text[-6] in "+-")


def is_time(text):
    return is_date_time("2000-01-01T" + text)


LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
CHECKS = {
    "date": lambda t: bool(datetime.date.fromisoformat(t)),
    "time": is_time,
    "date-time": is_date_time,
    "uuid": matches(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "email": matches(r"[^@\s]+@(%s\.)+[a-zA-Z]+" % LABEL),
    "ipv4": lambda t: bool(ipaddress.IPv4Address(t)),
    "hostname": matches(r"%s(\.%s)*" % (LABEL, LABEL)),
    "uri": matches(r"[a-zA-Z][a-zA-Z0-9+.-]*:([^\s<>\"{}|\\^`%]|%[0-9a-fA-F]{2})*"),
}
for name, check in CHECKS.items():
    FORMATS.checks(name, raises=ValueError)(
        lambda value, check=check: not isinstance(value, str) or check(value))


def modern(schema):
    """The same schema as draft 2020-12 writes it."""
    if isinstance(schema, list):
        return [modern(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: v if k in ("const", "enum", "default", "examples") else modern(v)
           for k, v in schema.items()}
    if out.get("nullable") is True and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    for strict, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(out.get(strict), bool):
            if out.pop(strict):
                out[strict] = out.pop(bound)
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in out:
            out["items"] = out.pop("additionalItems")
    return out


def validator(schema, formats):
    schema = modern(schema)
    jsonschema.Draft202012Validator.check_schema(json.loads(json.dumps(schema, default=float)))
    return jsonschema.Draft202012Validator(schema, format_checker=FORMATS if formats else None)


def load():
    with open(DATA, encoding="utf-8") as f:
        return [json.loads(line, **JSON) for line in f]


def verify():
    wrong, docs = 0, 0
    for case in load():
        strict, plain = validator(case["schema"], True), validator(case["schema"], False)
        lists = (("valid", strict, True), ("invalid", plain, False),
                 ("grammar_invalid", strict, False))
        for name, check, want in lists:
            for doc in case.get(name, []):
                docs += 1
                if check.is_valid(doc) != want:
                    wrong += 1
                    print(f"{case['name']}: not {name}: {json.dumps(doc, default=float)}")
    print(f"{docs} documents, {wrong} wrong")
    return wrong


def check(path):
    schemas = [validator(case["schema"], True) for case in load()]
    wrong, docs = 0, 0
    with open(path, encoding="utf-8") as f:
        for line in f:
            item = json.loads(line)
            docs += 1
            try:
                error = next(schemas[item["schema"]].iter_errors(json.loads(item["doc"], **JSON)), None)
            except ValueError as e:
                error = e
            if error is not None:
                wrong += 1
                print(f"schema {item['schema']}: {item['doc'][:300]}: {str(error)[:200]}")
    print(f"{docs} documents, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, check(sys.argv[2]) if sys.argv[1:2] == ["--check"] else verify()))
