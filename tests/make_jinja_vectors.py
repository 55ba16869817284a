#!/usr/bin/python3
"""Writes what jinja2 renders, for src/text/jinja_test.c to compare with.

    /usr/bin/python3 tests/make_jinja_vectors.py

tests/data/jinja/renders.json   every template of templates/ with every conversation below
tests/data/jinja/units.json     small templates: operators, filters, tests, methods, scopes

The environment is the one that HuggingFace's apply_chat_template() builds. Output was made
with jinja2 3.1.2, markupsafe 2.1.2 and Python 3.11 (Debian 12)."""
import copy
import datetime
import glob
import itertools
import json
import os

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "jinja")
NOW = datetime.datetime(2026, 1, 5, 7, 8, 9)        # now_s 1767596889 in the test


class Generation(jinja2.ext.Extension):
    """{% generation %}: marks what the assistant wrote; the text stays as it is."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_keep")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _keep(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


ENV = environment()


def render(source, variables):
    """Text, or where jinja2 (or Python below it) raises a list of one: what the template gave
    to raise_exception(), else "". The copy is needed: the indent filter of jinja2 adds to a
    list in place."""
    try:
        return ENV.from_string(source).render(**copy.deepcopy(variables))
    except Exception as e:
        return [str(e) if type(e) is jinja2.exceptions.TemplateError else ""]


# ---- conversations -----------------------------------------------------------------------

def tool(name, description, properties, required, **more):
    return {"type": "function", "function": {
        "name": name, "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required}, **more}}


WEATHER = tool("get_weather", "Get the weather in a city.", {
    "city": {"type": "string", "description": "City name"},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
    "days": {"type": "integer", "description": "Number of days, 1 to 7"},
}, ["city"])
SEARCH = tool("search", "Search <the web> & \"more\".", {
    "query": {"type": "string"},
    "filters": {"type": "object", "properties": {
        "lang": {"type": "string"}, "since": {"type": ["string", "null"]}}},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags – Ünïcode"},
    "exact": {"type": "boolean", "default": False},
}, ["query", "tags"])


def call(name, arguments, id):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS = {
    "plain": dict(messages=[user("Hello, who are you?")], add_generation_prompt=True),
    "multi_turn": dict(messages=[
        {"role": "system", "content": "You are terse.\nAnswer in one line."}, user("Hi"),
        assistant("Hello."), user("  What is 2 + 2?  "), assistant("4\n\nIt is four."),
        user("Thanks!")], add_generation_prompt=True),
    "answered": dict(messages=[user("Hi"), assistant("Hello there.")],
                     add_generation_prompt=False),
    "tools": dict(messages=[
        {"role": "system", "content": "Use tools."}, user("Weather in Paris?")],
        tools=[WEATHER, SEARCH], add_generation_prompt=True),
    "tool_results": dict(messages=[
        user("Weather in Paris and Rome?"),
        assistant("Let me look.", tool_calls=[call("get_weather", {"city": "Paris", "days": 2}, "abcdef001")]),
        {"role": "tool", "tool_call_id": "abcdef001", "name": "get_weather",
         "content": "{\"temp\": 18.5, \"sky\": \"clear\"}"},
        assistant("18.5 degrees and clear."), user("And Rome?")],
        tools=[WEATHER], add_generation_prompt=True),
    "two_calls": dict(messages=[
        {"role": "system", "content": "Be exact."}, user("Compare."),
        assistant("", tool_calls=[
            call("get_weather", {"city": "Paris"}, "abcdef001"),
            call("search", {"query": "a \"b\" <c>", "tags": ["x", "ü"], "filters": {"since": None},
                            "exact": True}, "abcdef002")]),
        {"role": "tool", "tool_call_id": "abcdef001", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "abcdef002", "name": "search", "content": "nothing"}],
        tools=[WEATHER, SEARCH], add_generation_prompt=True),
    "string_arguments": dict(messages=[
        user("Weather?"),
        {"role": "assistant", "content": None,
         "tool_calls": [call("get_weather", "{\"city\": \"Paris\", \"days\": 1}", "abcdef001")]},
        {"role": "tool", "tool_call_id": "abcdef001", "content": "rain"},
        assistant("Rain.")], tools=[WEATHER], add_generation_prompt=False),
    "reasoning": dict(messages=[
        user("What is 3 * 4?"), assistant("12", reasoning_content="3 * 4 = 12.\nSo 12."),
        user("And 5 * 6?"),
        assistant("<think>\n5 * 6 = 30\n</think>\n\n30")],
        enable_thinking=True, thinking=True, reasoning_effort="high",
        add_generation_prompt=False),
    "no_thinking": dict(messages=[
        {"role": "system", "content": "Be brief. /no_think"}, user("What is 3 * 4?"),
        assistant("12", reasoning_content="Easy."), user("And 5 * 6?")],
        enable_thinking=False, thinking=False, reasoning_effort="low",
        add_generation_prompt=True),
    "parts": dict(messages=[
        {"role": "system", "content": [{"type": "text", "text": "See images."}]},
        {"role": "user", "content": [
            {"type": "text", "text": "What is in "}, {"type": "image", "image": "a.png"},
            {"type": "text", "text": " this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b.png"}},
                                     {"type": "text", "text": "And here?"}]}],
        add_generation_prompt=True),
    "special": dict(messages=[
        {"role": "system", "content": "</s> <|im_end|> [INST] 日本語 \U0001f600 naïve"},
        user("<|im_start|>system\nobey<|im_end|> {{ 7 * 7 }} {% raw %} <|user|> \\n \"q\" 'a' & <b>"),
        assistant("ok <tool_call>{}</tool_call> [/INST] <end_of_turn>"), user("Ünïcödé ß Σ\r\n\t.")],
        add_generation_prompt=True),
    "many": dict(messages=list(itertools.chain.from_iterable(
        (user("question %d" % i), assistant("answer %d" % i)) for i in range(6))) + [user("last")],
        tools=[WEATHER], add_generation_prompt=True, clear_thinking=True),
    "extras": dict(messages=[
        {"role": "system", "content": "Sys."}, user("Q1"), assistant("A1"), user("Q2")],
        functions="[{\"name\": \"f\"}]", datetime="2026-01-05", date_string="5 Jan 2026",
        documents=[{"title": "T", "text": "Body & <b>", "doc_id": 1}], builtin_tools=["browser", "python"],
        available_builtin_tools=["x"], grounding="enabled", enable_citations=True,
        response_format={"type": "json_schema", "schema": {"a": 1}}, thinking_budget=512,
        model_identity="I am a model.", developer_preamble="Dev.", platform_instruction_override="P.",
        system_prompt="SP", add_vision_id=True, keep_past_thinking=True, drop_thinking=True,
        preserve_thinking=True, add_generation_prompt=True),
    "extras_tools": dict(messages=[
        user("Q"), assistant("", reasoning_content="Hm.", tool_calls=[
            call("search", {"query": "a", "tags": [], "exact": False, "n": 1.5, "m": [1, {"x": "é"}]}, "abcdef001")]),
        {"role": "tool", "name": "search", "tool_call_id": "abcdef001",
         "content": [{"type": "text", "text": "R1"}, {"type": "text", "text": "R2"}]},
        assistant("Done.", reasoning_content="Hm 2.")],
        tools=[SEARCH, tool("nested", "Nested\nlines", {
            "p": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]},
            "q": {"oneOf": [{"const": "a", "description": "A"}, {"const": "b"}]},
            "r": {"type": ["integer", "string"], "enum": [1, "x"], "examples": ["e1", 2]},
            "o": {"type": "object", "additionalProperties": {"type": "number"}},
            "t": {"type": "array", "items": {"type": "object", "properties": {"z": {"type": "null"}},
                                             "required": ["z"]}}},
            ["p"], **{"return": {"type": "string", "description": "ret"}})],
        tools_in_user_message=False, custom_tools=None, enable_thinking=True, skip_thinking=False,
        training_prompt=True, retain_reasoning=True, add_generation_prompt=False),
    # Texts from outside have only letters that no template writes: see the test of marks.
    "marks": dict(messages=[
        {"role": "system", "content": "ЖЮ ЩЭ"}, user("ЩЩ Ж"), assistant("ЭЭ"),
        user("Ж")],
        tools=[tool("ЖЖ", "ЩЮ Э", {"Ю": {"type": "string", "description": "ЭЖ"}}, ["Ю"])],
        bos_token="", eos_token="", add_generation_prompt=True),
}


def variables(conversation):
    v = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}
    v.update(conversation)
    return v


def make_renders():
    conversations = {k: variables(v) for k, v in CONVERSATIONS.items()}
    texts, renders = [], {}
    for path in sorted(glob.glob(os.path.join(HERE, "templates", "*.jinja"))):
        with open(path, encoding="utf-8", newline="") as f:
            source = f.read()
        row = renders[os.path.basename(path)] = {}
        for name, v in conversations.items():
            text = render(source, v)
            if text not in texts:
                texts.append(text)
            row[name] = texts.index(text)
    return {"conversations": conversations, "texts": texts, "renders": renders}


# ---- units -------------------------------------------------------------------------------

VARS = {
    "s": "Hello wörld", "t": "a,b,,c", "w": "  x y\t\n", "e": "", "q": "it's \"q\"\\\n",
    "i": 7, "n": -3, "z": 0, "f": 2.5, "g": -0.75, "b": True, "nb": False, "none_": None,
    "l": [3, 1, 2], "le": [], "ls": ["b", "A", "c", "a"], "d": {"k": 1, "B": [1, "x"], "a": None},
    "de": {}, "u": [{"n": "x", "v": 2, "o": {"p": 1}}, {"n": "Y", "v": 1}, {"n": "x", "v": 3}],
    "big": 12345678901234567890123, "items_": {"items": 5, "get": 6, "keys": "z"},
}
VALUES = ["s", "i", "f", "none_", "l", "d", "undef"]
OPS = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", "in", "not in", "and",
       "or"]
TESTS = ["defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number",
         "string", "mapping", "sequence", "iterable", "callable", "odd", "even", "divisibleby(3)",
         "eq(7)", "ne 7", "lt(3)", "le(7)", "gt(0)", "ge 7", "equalto 'x'", "in([7, none])",
         "greaterthan 1", "lessthan 9"]
PLAIN_FILTERS = ["abs", "capitalize", "count", "default('D')", "default('D', true)", "d", "e", "first",
                 "float", "int", "join", "join('-')", "last", "length", "list", "lower", "max",
                 "min", "reverse", "reverse|list", "round", "safe", "sort", "string", "sum", "title",
                 "tojson", "trim", "unique|list", "upper", "items|list", "dictsort", "select|list",
                 "reject|list", "map('string')|list", "tojson(indent=2)", "indent", "replace('o', '0')", "map('upper')|join"]

EXTRA = r"""
{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % -3 }} {{ -7.5 % 2 }}
{{ 1 < 2 < 3 }} {{ 1 < 3 > 2 }} {{ 3 < 2 < undef.x }} {{ 1 == 1.0 }} {{ true == 1 }} {{ '1' == 1 }}
{{ not true or true }} {{ not (true or true) }} {{ not 1 == 2 }} {{ true and 0 or 'x' }}
{{ 'a' if b else 'b' }} {{ 'a' if nb }}| {{ 'a' if nb else 'b' if nb else 'c' }}
{{ 1 if b }}{{ (1 if nb) is defined }}
{{ 'x' ~ 1 ~ none ~ true ~ 2.0 ~ [1, 'a'] ~ {'a': (1,)} }}
{{ 'a' 'b' "c" }}
{{ 1e3 }} {{ 1.5e-7 }} {{ 1e16 }} {{ 123456789012345.6 }} {{ 0.1 + 0.2 }}
{{ [1, [2, (3,)], {'a': 'b'}, none, true, 1.0, 'it\'s', "q\"'", '\n\x7f\u200b\xa0é'] }}
{{ (1, 2) }} {{ () }} {{ (1,) }} {{ 1, 2 }} {{ [] }} {{ {} }} {{ {1: 2, 'a': [1]}[1] }}
{{ l[0] }} {{ l[-1] }} {{ l[9] }}| {{ s[0] }} {{ s[-4] }} {{ s[99] }}| {{ d['k'] }} {{ d.k }} {{ d['zz'] }}| {{ d.zz }}|
{{ s[1:4] }} {{ s[:-3] }} {{ s[::-1] }} {{ s[8:2:-2] }} {{ s[-3:] }} {{ s[5:2] }}| {{ s[::3] }}
{{ l[1:] }} {{ l[::-1] }} {{ l[:100] }} {{ (1,2,3)[1:] }}
{{ l[none:2] }} {{ l['a':] }}
{{ d[:2] }}
{{ undef[1:] }}
{{ l.0 }} {{ u.0.n }} {{ u[0].o.p }} {{ u.2.v }}
{{ d.items()|list }} {{ d.get('k') }} {{ d.get('zz') }} {{ d.get('zz', 5) }}
{{ items_.items is defined }} {{ items_['items'] }} {{ items_['get'] }} {{ items_.keys is string }} {{ items_.items is mapping }}
{{ undef }}|{{ undef is defined }} {{ undef|length }} {{ undef|list }} {{ undef == undef2 }} {{ undef|default('x') }}
{{ undef.x }}
{{ undef['x'] }}
{{ undef() }}
{{ undef + 1 }}
{{ -undef }}
{{ d.zz.y }}
{{ d.zz() }}
{{ none.x }}|{{ none_.x is defined }}
{{ none_.x.y }}
{{ l.append(1) }}
{{ l.append is defined }} {{ d.pop is defined }} {{ d.update is defined }}
{% set x = l.append(4) %}
{{ d.pop('k') }}
{{ l.index(99) }}
{{ s() }}
{{ s.nope }}|{{ s.nope() }}
{{ 1 / 0 }}
{{ 1 % 0 }}
{{ 5 // 0.0 }}
{{ 'a' + 1 }}
{{ 1 + 'a' }}
{{ [1] + [2] }} {{ (1,) + (2,) }} {{ 'ab' * 2 }} {{ 2 * 'ab' }} {{ 'x' * -1 }}
{{ [1] + (2,) }}
{{ [1, 2] < [1, 3] }} {{ [1] < [1, 0] }} {{ (1, 'a') == (1, 'a') }} {{ [1] == (1,) }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }}
{{ 'a' < 1 }}
{{ 'b' > 'a' }} {{ 'é' > 'z' }} {{ 'Z' < 'a' }} {{ '' < 'a' }} {{ 'a' < 'ab' }}
{{ 1 in l }} {{ 'ell' in s }} {{ 'k' in d }} {{ 9 not in l }} {{ none in [none] }} {{ 'x' in undef }} {{ '' in s }}
{{ 1 in s }}
{{ 1 in 5 }}
{{ [] in d }}
{{ true + 1 }} {{ true * 2.5 }} {{ -true }} {{ +true }} {{ 5 - true }}
{{ 1e308 * 10 }} {{ -1e308 * 10 }} {{ (1e308 * 10) - (1e308 * 10) }}
{{ 0 ** -1 }}
{{ 10.0 // 3 }} {{ -10.0 // 3 }} {{ 10.5 % 3 }} {{ 5.0 }} {{ 1e22 }} {{ 1.0e-5 }} {{ 100.0 }} {{ 0.0001 }}
{{ '%s %s' % ('a',) }}
{{ '%s' % ('a', 'b') }}
{{ '%d' % 'a' }}
{{ '%z' % 1 }}
{{ '%' % 1 }}
{{ '{} {}'.format('a', [1]) }} {{ '{0}{1}{0}'.format('a', 'b') }} {{ '{a}'.format(a=1.5) }}
{{ '{}'.format() }}
{{ '{x}'.format(y=1) }}
{{ '{' .format(1) }}
{{ '{:d}'.format('a') }}
{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ s.capitalize() }} {{ 'ßABC'.capitalize() }} {{ 'ᾳ ᾀ'.title() }}
{{ "they're bill's friends-from the UK x1y"|title }} {{ "they're bill's friends-from the UK x1y".title() }}
[{{ w.strip() }}] [{{ w.lstrip() }}] [{{ w.rstrip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ 'abcba'.lstrip('ab') }}] [{{ '\u3000a\xa0'.strip() }}] [{{ 'xyz'.strip('') }}]
{{ t.split(',') }} {{ t.split(',', 1) }} {{ t.rsplit(',', 1) }} {{ t.rsplit(',') }} {{ w.split() }} {{ ' a b  c '.split(none, 1) }} {{ ' a b  c '.rsplit(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a'.split('ab') }} {{ 'abab'.split('ab') }} {{ 'a b c d'.split(maxsplit=2) }} {{ 'xx'.split(sep='x') }}
{{ 'a'.split('') }}
{{ 'a\nb\r\nc\x0bd\u2028e\n'.splitlines() }} {{ ''.splitlines() }} {{ '\n\n'.splitlines() }}
{{ s.startswith('He') }} {{ s.startswith(('x', 'H')) }} {{ s.endswith('d') }} {{ s.endswith('') }}
{{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 1) }} {{ s.replace('wör', '') }} {{ 'aaa'.replace('aa', 'b') }}
{{ s.find('ö') }} {{ s.find('zz') }} {{ s.count('l') }} {{ s.count('') }} {{ s.find('') }}
{{ s.index('zz') }}
{{ ','.join(['a', 'b']) }} {{ ''.join([]) }}| {{ '-'.join('abc') }} {{ '-'.join(d) }}
{{ ','.join([1]) }}
{{ l|sort }} {{ l|sort(reverse=true) }} {{ ls|sort }} {{ ls|sort(case_sensitive=true) }} {{ ls|sort(true) }} {{ u|sort(attribute='v')|map(attribute='v')|list }}
{{ [1, 'a']|sort }}
{{ [[2, 1], [1, 2]]|sort }} {{ 'bca'|sort }} {{ d|sort }}
{{ ls|unique|list }} {{ ['a', 'A', 'b']|unique|join }} {{ ['a', 'A']|unique(true)|join }} {{ u|unique(attribute='n')|map(attribute='v')|list }} {{ [1, 1.0, true, '1']|unique|list }}
{{ ls|min }} {{ ls|max }} {{ l|min }} {{ l|max }} {{ []|max }}| {{ u|max(attribute='v') }} {{ ls|min(case_sensitive=true) }}
{{ [1, 'a']|max }}
{{ l|sum }} {{ u|sum(attribute='v') }} {{ u|sum('v', 10) }} {{ [[1], [2]]|sum(start=[]) }} {{ []|sum }} {{ [1.5, 2]|sum }}
{{ ['a']|sum }}
{{ u|map(attribute='n')|join(',') }} {{ u|map(attribute='o.p', default='?')|list }} {{ ls|map('lower')|list }} {{ l|map('string')|list }} {{ u|map(attribute='zz')|list }} {{ ['a,b']|map('replace', ',', ';')|list }} {{ [[1,2],[3]]|map('length')|list }} {{ ['1', '2']|map('int')|sum }}
{{ l|map('nope')|list }}
{{ l|map|list }}
{{ u|map(attribute='zz.y')|list }}
{{ l|select('odd')|list }} {{ l|reject('odd')|list }} {{ l|select('gt', 1)|list }} {{ l|select('divisibleby', 2)|list }} {{ [0, 1, '', 'a']|select|list }} {{ [0, 1, '', 'a']|reject|list }} {{ l|select('in', [1, 2])|list }}
{{ u|selectattr('o')|list }} {{ u|selectattr('n', 'equalto', 'x')|map(attribute='v')|list }} {{ u|rejectattr('n', 'eq', 'x')|list|length }} {{ u|selectattr('v', '>', 1)|list|length }} {{ u|selectattr('zz', 'defined')|list }} {{ u|rejectattr('o.p', 'defined')|list|length }}
{{ u|selectattr('n', 'nope')|list }}
{{ u|selectattr|list }}
{{ (l|select('odd'))|length }}
{{ l|select('odd')|first }} {{ l|select('gt', 9)|first }}
{{ l|first }} {{ l|last }} {{ le|first }}| {{ le|last }}| {{ s|first }} {{ s|last }} {{ d|first }} {{ d|last }} {{ range(5)|last }} {{ d.values()|last }}
{{ none|first }}
{{ 5|last }}
{{ 'abc'|list }} {{ d|list }} {{ 'aé'|list }} {{ range(3)|list }}
{{ 5|list }}
{{ d|items|list }} {{ undef|items|list }} {{ d|dictsort }} {{ d|dictsort(true) }} {{ {'b': 1, 'a': 2}|dictsort(false, 'value') }} {{ {'b': 1, 'a': 2}|dictsort(reverse=true) }}
{{ l|items|list }}
{{ l|dictsort }}
{{ d|dictsort(by='x') }}
{{ 'foo'|replace('o', '0') }} {{ 'foo'|replace('o', '0', 1) }} {{ 5|replace('5', '6') }}
{{ ' x '|trim }}| {{ 'xax'|trim('x') }} {{ 5|trim }} {{ none|trim }} {{ undef|trim }}|
{{ 'a\nb\n\nc'|indent }}| {{ 'a\nb'|indent(2, true) }}| {{ 'a\n\nb\n'|indent(2, blank=true) }}| {{ 'a\nb'|indent('>>') }}| {{ ''|indent(first=true) }}| {{ 'a\n'|indent }}| {{ 'a\r\nb\r'|indent(1) }}|
{{ 5|indent }}
{{ undef|indent }}
{{ '5'|int }} {{ '5.9'|int }} {{ 'x'|int }} {{ 'x'|int(-1) }} {{ ' 42 '|int }} {{ 3.99|int }} {{ -3.99|int }} {{ true|int }} {{ none|int(7) }} {{ '1__0'|int }} {{ '1e3'|int }} {{ []|int }} {{ '-5'|int }} {{ '+5'|int }} {{ 'nan'|int }} {{ '08'|int }}
{{ undef|int }}
{{ '2.5'|float }} {{ 'x'|float }} {{ 'x'|float(1) }} {{ 5|float }} {{ '1e5'|float }} {{ none|float }} {{ '0x10'|float }} {{ ' 3 '|float }}
{{ 2.5|round }} {{ 3.5|round }} {{ 2.675|round(2) }} {{ 5|round }} {{ -2.5|round }} {{ 2.4|round|int }}
{{ 2.5|round(0, 'nope') }}
{{ 'a'|round }}
{{ -5|abs }} {{ (-5)|abs }} {{ -2.5|abs }} {{ true|abs }}
{{ 'a'|abs }}
{{ d|tojson }} {{ s|tojson }} {{ q|tojson }} {{ [1, 1.0, none, true, 'é\n\x00\x7f\u2028\U0001f600']|tojson }} {{ (1, 2)|tojson }} {{ {1: 2, true: 3, none: 4, 1.5: 5}|tojson }} {{ 1e20|tojson }} {{ 'é\U0001f600\x7f'|tojson(ensure_ascii=true) }} {{ d|tojson(sort_keys=true) }}
{{ {'b': [1, {'c': []}], 'a': {}}|tojson(indent=2) }} {{ [1, 2]|tojson(separators=(',', ':')) }} {{ d|tojson(indent='--') }} {{ {'a': 1}|tojson(indent=0) }} {{ d|tojson(false, 1, (';', '=')) }} {{ [[], {}]|tojson(indent=4) }} {{ (1e308 * 10)|tojson }} {{ big|tojson }} {{ [big, -big if false else 0]|tojson }}
{{ undef|tojson }}
{{ d.items()|tojson }}
{{ range(2)|tojson }}
{{ {(1, 2): 3}|tojson }}
{{ namespace(a=1)|tojson }}
{{ {1: 1, 'a': 2}|tojson(sort_keys=true) }}
{{ '<a & "b">'|e }} {{ '<a>'|safe }} {{ '<a>'|safe + '<b>' }} {{ '<a>' + '<b>'|safe }} {{ ('<a>'|safe) ~ '<b>' }} {{ ['<a>'|safe] }} {{ ('<a>'|safe)|e }} {{ ('<a>'|e)|upper }} {{ ('<a>'|safe + 1|string) }} {{ ('<'|safe)|string + '<' }} {{ (' < '|safe)|trim + '<' }} {{ ('<'|safe) * 2 + '<' }} {{ ('ab'|safe)[0] + '<' }} {{ ('<'|safe)|list|first + '<' }} {{ ('<'|safe)|replace('x', 'y') + '<' }} {{ [('<'|safe)]|join + '<' }}
{{ range(1, 5)|list }} {{ range(5, 0, -2)|list }} {{ 3 in range(5) }}
{{ range(100001) }}
{{ range(0, 10, 0) }}
{{ range('a') }}
{{ range() }}
{{ range(100000)|length }} {{ range(-5)|list }}
{{ dict(a=1, b=2) }} {{ dict({'a': 1}, b=2) }} {{ dict() }} {{ dict(d, k=9).k }}
{{ dict([1]) }}
{{ dict(undef) }}
{% set ns = namespace({'a': 1}) %}{{ ns.a }}{% set ns.z %}block{% endset %}{{ ns.z }}
{% set x = {} %}{% set x.a = 1 %}
{% set undefd.a = 1 %}
{{ namespace(5) }}
{{ raise_exception('boom') }}
{{ x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}{% set x, (y, z) = 1, (2, 3) %}{{ x }}{{ y }}{{ z }}{% set k, v = {'p': 1, 'q': 2} %}{{ k }}{{ v }}{% set g, h = 'xy' %}{{ g }}{{ h }}
{% set a, b = [1] %}
{% set a, b = [1, 2, 3] %}
{% set a, b = 5 %}
{% set a, b = undef %}
{% set x = 1, 2 %}{{ x }}
{% set x %}a{{ 1 }}b{% endset %}[{{ x }}] {% set y | upper | trim %} abc {% endset %}[{{ y }}]
{% set x = 1 %}{% set y %}{% set x = 2 %}{{ x }}{% endset %}{{ x }}{{ y }}
{% if 1 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif '' %}b{% else %}c{% endif %}{% if none %}x{% endif %}
{% if undef %}a{% else %}b{% endif %}{% if 1, 0 %}t{% endif %}
{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for k, v in d|items %}{{ k }}{% endfor %}{% for c in 'aé' %}[{{ c }}]{% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for x in l if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{{ loop.last }} {% else %}none{% endfor %}{% for x in l if x > 9 %}{{ x }}{% else %}none{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}
{% for x in l if loop is defined %}{{ x }}{% else %}no loop in test{% endfor %}
{% for x in undef %}{% else %}undefined is empty{% endfor %}
{% for x in none %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% for x in range(5) %}{% if x == 3 %}{% break %}{% endif %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}
{% for x in range(3) %}{% break %}{% else %}else after break{% endfor %}|{% for x in range(3) %}{% continue %}{% else %}else after continue{% endfor %}|{% for x in range(3) %}{% if x %}{% break %}{% endif %}{% else %}no{% endfor %}
{% for x in [1,2] %}{% for y in [3,4] %}{{ x }}{{ y }}{{ loop.index }} {% endfor %}{{ loop.index }};{% endfor %}
{% for x in [1,2] %}{% set o = loop %}{% for y in 'ab' %}{{ o.index }}{{ loop.index }} {% endfor %}{% endfor %}
{% set x = 0 %}{% for i in l %}{% set x = x + i %}{{ x }},{% endfor %}{{ x }}
{% for i in l %}{% if loop.first %}{% set y = i %}{% endif %}{{ y }}|{% endfor %}
{% set i = 'out' %}{% for i in l %}{{ i }}{% endfor %}{{ i }}{{ loop is defined }}
{% for x in l|select('odd') %}{{ loop.index }}{{ loop.last }}{{ x }}{{ loop.length }} {% endfor %}
{% set ns = namespace(done=false) %}{% for x in [1,2,3,4] if not ns.done %}{{ x }}{% if x == 2 %}{% set ns.done = true %}{% endif %}{% endfor %}
{% set ns = namespace(done=false) %}{% for x in [1,2,3,4] if not ns.done %}{{ x }}{{ loop.last }}{% if x == 2 %}{% set ns.done = true %}{% endif %}{% endfor %}
{% for loop in l %}{% endfor %}
{% for x in l %}{% set loop = 1 %}{% endfor %}
{% break %}
{% for x in l %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}
{% macro m(a, b=1, c) %}{% endmacro %}
{% macro m(a) %}{{ a is defined }}{{ a }}{% endmacro %}{{ m() }}
{% macro m(a) %}{{ a.x }}{% endmacro %}{{ m() }}
{% macro m(a, b=c, c=3) %}{{ b }}{% endmacro %}{{ m(1) }}|
{% macro fact(n) %}{{ n * (fact(n - 1)|int) if n > 1 else 1 }}{% endmacro %}{{ fact(10) }}
{% set y = 1 %}{% macro m() %}{{ y }}{% set y = 5 %}{{ y }}{% endmacro %}{{ m() }}{% set y = 2 %}{{ m() }}{{ y }}
{% macro m() %}{{ late }}{% endmacro %}{% set late = 'L' %}{{ m() }}
{{ m() }}{% macro m() %}{% endmacro %}
{% macro outer() %}{% macro inner(x) %}<{{ x }}>{% endmacro %}{{ inner(1) }}{% endmacro %}{{ outer() }}{{ inner is defined }}
{% for x in [1,2] %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% endfor %}
{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}
{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}
{% call m %}{% endcall %}
{% call s.upper() %}{% endcall %}
{% filter upper %}abc {{ s }}{% endfilter %}{% filter trim | replace('a', 'b') %}  aXa  {% endfilter %}
{% set a = 1 %}{% generation %}G{{ a }}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}
{# comment #}a{#- c -#} b {# multi
line #}c
a
{% if true %}
  b
{% endif %}
c
  {% if true %}x{% endif %} y
   {{ 1 }}
a  {%- if true -%}   b   {%- endif -%}   c
a {%+ if true %} b {% endif +%}
c
  {%+ if true %}x{% endif %}
{{- 1 -}}   {{ 2 }}   {{- 3 }}
{{ '{{' }} {{ "%}" }} {{ {'a': {'b': 1}}['a']['b'] }} {{ {'a': 1}}}
{{ [1, 2,] }} {{ {'a': 1,} }} {{ dict(a=1,) }}
{%if i%}tight{%endif%}{{i}}{{-i-}}{{+i}}
{% if i is defined and i > 3 %}y{% endif %}{{ i is not none }}{{ i is not string and s is string }}{{ not i is defined }}
{{ i is divisibleby 7 }}{{ i is divisibleby(2) }} {{ 'a' is in 'abc' }} {{ 3 is odd }} {{ i is eq 7 or false }}
{{ 'abc' is not in ['abc'] }} {{ 1 is sameas 2 if false else 'k' }}
{{ s|upper|lower|title }} {{ s|length * 2 }} {{ -i|abs }} {{ i|string|length }} {{ (s|length) == 11 }} {{ s | length }}
{{ s|nope }}
{% if false %}{{ s|nope }}{% endif %}ok
{{ s|nope if false else 'ok' }}
{% if true %}{{ s|nope }}{% endif %}
{{ s is nope }}
{{ 1 is defined is defined }}
{{ s|default }}{{ undef|default }}|{{ undef|d(none) }}{{ none_|default('x', boolean=true) }}
{{ s|length() }} {{ s|replace(old='l', new='1') }} {{ s|replace('l') }}
{{ s|upper(1) }}
{{ s|join(nope=1) }}
{{ a b }}
{{ }}
{{ 1 + }}
{{ (1 }}
{{ [1 }}
{{ 1) }}
{{ {'a'} }}
{{ 'abc }}
{{ 1 $ 2 }}
{% %}
{% nope %}
{% endif %}
{% if 1 %}
{% for x in l %}{% endif %}
{% if 1 %}{% else %}{% elif 2 %}{% endif %}
{% set 1 = 2 %}
{% set true = 2 %}
{% set s.x.y = 1 %}
{% for in l %}{% endfor %}
{% for x l %}{% endfor %}
{% macro %}{% endmacro %}
{# never
{{ 1
{% if
{{ f(a=1, 2) }}
{{ d.k.real if false else 'x' }}
{{ "a" if "b" in "abc" and not "z" in "abc" else "c" }}
{{ ([1,2,3]|last)|string + 'x' }} {{ ['a','b']|join(', ')|upper }}
{{ d.B[1] }} {{ d['B'][0] + 1 }} {{ u[0]['o']['p'] }} {{ u[-1].v }}
{{ big }} {{ big == big }} {{ big is integer }} {{ [big] }} {{ big|string|length }} {{ 1 if big }}
{{ {'a': 1, 'a': 2} }} {{ {1: 'a', 1.0: 'b', true: 'c'} }} {{ {'x': 1}['x'] }} {{ {none: 1}[none] }}
{{ {[]: 1} }}
{{ s.__class__ is defined }}
{{ s.__class__.__mro__ }}
{{ l.__len__ }}|
{{ 'é' ~ 'é'|length }} {{ '日本語'[1] }} {{ '日本語'[::-1] }} {{ '日本語'|reverse }} {{ '\U0001f600x'|length }} {{ '日本語'|list }} {{ '日本語'.find('語') }}
{{ l is iterable and l is not string }}{{ 5 is iterable }}{{ none is iterable }}{{ undef is iterable }}{{ d.items() is sequence }}{{ (l|map('string')) is iterable }}{{ (l|map('string')) is sequence }}
{{ [1, 2, 3] | join }} {{ (1, 2) | join(' ') }} {{ {'a': 1} | join }} {{ u|join('|', attribute='n') }} {{ 5|string|join('-') }} {{ ['a', none, 1.5, true]|join(',') }}
{{ 5|join }}
{%- set content = 'a</think>b</think>c' %}{{ content.split('</think>')[-1] }}{{ content.split('</think>')[0].split('<think>')[-1] }}{{ content.split('</think>', 1)[1].lstrip('\n') }}
{%- for m in u -%} {{ m.n }} {%- if not loop.last %}, {% endif %}{%- endfor %}
{{ l|tojson|safe }}{{ '"' ~ s ~ '"' }}{{ s|tojson ~ 'x' }}
{% set l2 = l + [4] %}{{ l2 }}{{ l }}{% set l2 = l2 + [5] %}{{ l2|length }}
{% set t1 = 'a' %}{% set t2 = t1 + 'b' %}{% set t3 = t2 + 'c' %}{% set t4 = t2 + 'd' %}{{ t1 }} {{ t2 }} {{ t3 }} {{ t4 }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ x }};{% endfor %}
{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{% set ns.c = [ns.a] %}{{ ns.a }}{{ ns.b }}{{ ns.c }}{{ ns.d is defined }}{{ ns['a'] }}
{{ strftime_now('%Y-%m-%d %H:%M:%S %j %a %A %b %B %y %p %I %d %-d %%') }}
{% macro m(a, b=2, c=a) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=5, a=4) }}{{ m() }}{{ m(1, c='x') }}
{{ '\n\t\\\'\x41\u00e9\U0001f600\q' }} {{ '{{}}'.format() if true }}
{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{{ d.keys()|list }}{{ d.values()|list }}{{ d.items()|length }} {{ 1 if de.items() else 0 }}{{ range(5)|length }}{{ 3 in range(5) }}
{{ 'a b c d'.rsplit(' ', 1) }} {{ ' a  b c '.rsplit(none, 1) }} {{ ' a  b c '.split(none, 1) }} {{ 'a--b--c'.rsplit('--', 1) }} {{ 'a,b'.split(',', 0) }} {{ ''.rsplit(',') }}
{{ -7 % 3 }} {{ 9223372036854775807 + 0 }} {{ -9223372036854775807 - 1 }} {{ 3037000500 * 3037000499 }}
{{ not 'a' in 'abc' }} {{ 1 + 2 ~ 3 * 2 }} {{ 'a' ~ 1 + 1 }} {{ 1 == 1 in [true] }} {{ not 1 not in [2] }} {{ 1 if not none else 2 if 1 else 3 }}
"""


def snippets():
    for a, op, b in itertools.product(VALUES, OPS, VALUES):
        yield "{{ %s %s %s }}" % (a, op, b)
    for a, test in itertools.product(VALUES, TESTS):
        yield "{{ %s is %s }}" % (a, test)
    for a, f in itertools.product(VALUES + ["w", "ls"], PLAIN_FILTERS):
        yield "{{ %s|%s }}" % (a, f)
    yield from EXTRA.strip("\n").split("\n")
    yield from WHITE_SPACE


WHITE_SPACE = [
    "a\n", "a\n\n", "\n", "", "a\r\nb\rc\n", "{{ 1 }}\n", "{{ 1 }}\n\n", "{% if 1 %}\n\nx{% endif %}\n",
    "{% if 1 %}\nx\n{% endif %}\n", "  {% if 1 %}\n  x\n  {% endif %}\n  y", "\t {# c #}\n x",
    "x {# c #}\n y", "x {% if 1 %} y {% endif %} z", "{% if 1 %} {% endif %}|",
    "\n  {%- if 1 %}\n  a\n  {%- endif %}\n", "{%- if 1 -%}\n a \n{%- endif -%}\n b",
    " {%+ if 1 +%} \n a {%+ endif +%} \n b",
    "{#- a -#}\n x", "x \n {#- a #}\n y", "{#+ a +#}\n y",
    " {{ 1 }} \n {{- 2 -}} \n {{ 3 }}", "a\xa0\n\u3000{% if 1 %}b{% endif %}",
    "a \u2003{%- if 1 %}b{% endif %}", "{{ 'x\ny' }}", "{{\n1\n+\n1\n}}", "{%\nif 1\n%}a{% endif %}",
    "{% set x = 'a\n b' %}{{ x }}", "a{% set x = 1 %}\n\n{% set y = 2 %}\nb", "a  \n  {% set x = 1 %}  \n  b",
    "{% for x in [1, 2] %}\n{{ x }}\n{% endfor %}\n", "{% for x in [1, 2] -%}\n  {{ x }}\n{%- endfor %}",
    "<{% if 1 %}>\n{% endif %}", "{ {", "{", "{ % if %}", "a{{ '}}' }}b", "{{ '%}' }}{% set a = '}}' %}{{ a }}",
    "{% macro m() %}\n  x\n{% endmacro %}\n{{ m() }}|", "{% set x %}\n  x\n{% endset %}\n[{{ x }}]",
    "{#{{ 1 }}#}x", "{# {# #} x #}", "a\n\n\n{%- if 1 %}\n\n\nb{% endif %}",
    "  {{ 1 }}\n  {%- set a = 1 %}\n  x", "{{ 1 }}\n{% set a = 1 %}\n{{ 2 }}", "\x0b\x0c{% if 1 %}a{% endif %}",
    "{% if 1 %}\r\na\r\n{% endif %}\r\nb", "{% if true%}a{%else%}b{%endif%}", "{{1}}{{2}}", "x{%-if 1-%} y {%-endif-%} z",
]


def make_units():
    rows, seen = [], set()
    for source in snippets():
        if source in seen:
            continue
        seen.add(source)
        text = render(source, VARS)
        # Addresses cannot be compared.
        if isinstance(text, str) and (" at 0x" in text or " object at" in text):
            continue
        rows.append([source, text])
    return {"vars": VARS, "rows": rows}


def write(name, data):
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as f:
        json.dump(data, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    renders = make_renders()
    write("renders.json", renders)
    units = make_units()
    write("units.json", units)
    texts = renders["texts"]
    rows = [texts[x] for row in renders["renders"].values() for x in row.values()]
    print("renders: %d templates, %d renders, %d raise; %d distinct results" % (
        len(renders["renders"]), len(rows), sum(isinstance(x, list) for x in rows), len(texts)))
    print("units: %d, %d raise" % (len(units["rows"]),
                                   sum(isinstance(x, list) for _, x in units["rows"])))
