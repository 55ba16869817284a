#!/usr/bin/env python3
"""hoist connect: what it prints and writes is what the clients' formats allow.

    python3 tests/connect.py BUILD URL

URL is a running server. TOML is read with tomllib (Python 3.11), YAML with PyYAML where it is.
Prints "ok NAME", "not ok NAME: why" or "SKIP NAME: why".
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

BUILD, URL = sys.argv[1:3]
DIR = tempfile.mkdtemp(prefix='hoist-connect-')
MODEL = json.load(urllib.request.urlopen(URL + '/v1/models'))['data'][0]
failed = 0


class Skip(Exception):
    pass


def connect(*args, answer='', url=URL, rc=0):
    p = subprocess.run([f'{BUILD}/hoist', 'connect', *args, *(['--url', url] if url else [])], input=answer,
                       capture_output=True, text=True, timeout=60)
    assert p.returncode == rc, (args, p)
    return p.stdout, p.stderr


def sections(text):
    """{heading: text} of what is printed."""
    found = re.split(r'^# (.*)$', text, flags=re.M)
    return {h.rstrip(':'): t.strip('\n') for h, t in zip(found[1::2], found[2::2])}


def yaml(text):
    try:
        import yaml as y
    except ImportError:
        raise Skip('no PyYAML')
    return y.safe_load(text)


def toml(text):
    try:
        import tomllib
    except ImportError:
        raise Skip('no tomllib')
    return tomllib.loads(text)


CLIENTS = connect('?', rc=2)[1].split('there are')[1].split()


def test_list():
    assert {'opencode', 'codex', 'claude-code', 'cline', 'roo', 'zed', 'aider', 'continue', 'open-webui', 'litellm',
            'openai', 'anthropic'} == set(CLIENTS)
    assert 'CLIENT' in connect(rc=2, url=None)[1]


def test_documented():
    text = open('docs/clients.md').read()
    for c in CLIENTS:
        assert f'hoist connect {c}' in text, c


def test_filled():
    for c in CLIENTS:
        out, err = connect(c, '--api-key', 'sk-5')
        assert '@' not in out.replace('@ai-sdk/', '') and err == '', (c, out, err)
        assert URL in out and (MODEL['id'] in out or c == 'open-webui') and 'sk-5' in out, c


def test_json():
    for c, path in (('opencode', '~/.config/opencode/opencode.json'), ('claude-code', '~/.claude/settings.json'),
                    ('zed', '~/.config/zed/settings.json'), ('aider', '~/.aider.model.metadata.json')):
        j = json.loads(sections(connect(c)[0])[path])
        if c == 'opencode':
            p = j['provider']['hoist']
            assert p['npm'] == '@ai-sdk/openai-compatible' and p['options']['baseURL'] == URL + '/v1'
            assert p['models'][MODEL['id']]['limit']['context'] == MODEL['max_model_len']
        elif c == 'claude-code':
            assert j['env']['ANTHROPIC_BASE_URL'] == URL and all(isinstance(v, str) for v in j['env'].values())
        elif c == 'zed':
            m = j['language_models']['openai_compatible']['Hoist']['available_models'][0]
            assert m['max_tokens'] == MODEL['max_model_len'] and m['capabilities']['tools'] is True


def test_toml():
    j = toml(sections(connect('codex', '--api-key', 'k')[0])['~/.codex/config.toml'])
    assert j['model_providers']['hoist']['wire_api'] == 'responses'
    assert j['model_providers']['hoist']['http_headers']['Authorization'] == 'Bearer k'
    assert j['profiles']['hoist']['model_provider'] == 'hoist' and j['profiles']['hoist']['model'] == MODEL['id']


def test_yaml():
    a = yaml(sections(connect('aider')[0])['~/.aider.conf.yml'])
    assert a['model'] == f"openai/{MODEL['id']}" and a['openai-api-base'] == URL + '/v1'
    l = yaml(sections(connect('litellm')[0])['~/litellm.yaml'])
    assert l['model_list'][0]['litellm_params']['api_base'] == URL + '/v1'
    c = yaml(sections(connect('continue')[0])['~/.continue/config.yaml'])
    assert [m['roles'] for m in c['models']] == [['chat', 'edit', 'apply'], ['autocomplete']]


def test_urls():
    for given, want in (('http://h:1/', 'http://h:1/v1'), ('http://h:1/v1', 'http://h:1/v1'),
                        ('https://h/x/v1/', 'https://h/x/v1'), ('http://[::1]:5', 'http://[::1]:5/v1')):
        out, err = connect('litellm', url=given)
        assert f'api_base: {want}\n' in out and 'guesses' in err, (given, out, err)
    for bad in ('h:1', 'ftp://h', 'http://', 'http://h "x"', 'http://[::1', ''):
        assert '--url' in connect('litellm', url=bad or 'x', rc=1)[1], bad
    assert 'characters' in connect('litellm', '--served-name', 'a"b', rc=1)[1]
    out = connect('litellm', '--served-name', 'mine', '--ctx', '1234', url='http://127.0.0.1:9')[0]
    assert 'model_name: mine' in out and 'max_input_tokens: 1234' in out


def home(name):
    path = os.path.join(DIR, name)
    os.makedirs(path, exist_ok=True)
    return path


def test_write_asks():
    h = home('asks')
    for answer in ('', 'n\n', 'no\n', '\n'):
        assert '[y/N]' in connect('opencode', '--write', '--home', h, answer=answer)[1]
        assert not os.path.exists(f'{h}/.config/opencode/opencode.json')
    connect('opencode', '--home', h, answer='y\n')
    assert os.listdir(h) == []
    out, err = connect('cline', '--write', '--home', h, answer='y\n')
    assert '[y/N]' not in err and os.listdir(h) == []


def test_write_new():
    h = home('new')
    for c, path in (('opencode', '.config/opencode/opencode.json'), ('codex', '.codex/config.toml'),
                    ('claude-code', '.claude/settings.json'), ('continue', '.continue/config.yaml')):
        out = connect(c, '--write', '--home', h, answer='y\n')[0]
        assert open(f'{h}/{path}').read().strip('\n') == sections(out)['~/' + path]
        assert os.stat(f'{h}/{path}').st_mode & 0o777 == 0o600
        assert 'has it already' in connect(c, '--write', '--home', h, answer='y\n')[1]
        assert not os.path.exists(f'{h}/{path}.bak')
    connect('aider', '--write', '--home', h, answer='y\ny\n')
    assert os.path.exists(f'{h}/.aider.conf.yml') and os.path.exists(f'{h}/.aider.model.metadata.json')


def test_write_far():
    h = home('x' * 250)
    connect('opencode', '--write', '--home', h, answer='y\n')
    assert os.path.exists(f'{h}/.config/opencode/opencode.json')
    assert 'at most' in connect('opencode', '--write', '--home', h + '/y' * 200, answer='y\n', rc=1)[1]


def test_write_merges():
    h = home('merges')
    path = f'{h}/.config/opencode/opencode.json'
    os.makedirs(os.path.dirname(path))
    theirs = {'theme': 'tokyo "night" ü', 'model': 'other/x', 'provider': {'other': {'a': [1, {'b': None}]},
              'hoist': {'options': {'timeout': 5, 'apiKey': 'old'}}}, 'empty': {}}
    json.dump(theirs, open(path, 'w'))
    connect('opencode', '--write', '--home', h, '--api-key', 'new', answer='y\n')
    j = json.load(open(path))
    assert j['theme'] == theirs['theme'] and j['provider']['other'] == theirs['provider']['other'] and j['empty'] == {}
    assert j['provider']['hoist']['options'] == {'timeout': 5, 'apiKey': 'new', 'baseURL': URL + '/v1'}
    assert j['model'] == 'hoist/' + MODEL['id'] and json.load(open(path + '.bak')) == theirs
    assert 'has it already' in connect('opencode', '--write', '--home', h, '--api-key', 'new', answer='y\n')[1]
    assert json.load(open(path)) == j and json.load(open(path + '.bak')) == theirs


def test_write_keeps():
    h = home('keeps')
    zed = f'{h}/.config/zed/settings.json'
    os.makedirs(os.path.dirname(zed))
    for text in ('// mine\n{"a": 1}', '[1]', '{"a": 1,}'):
        open(zed, 'w').write(text)
        out, err = connect('zed', '--write', '--home', h, answer='y\n', rc=1)
        assert 'by hand' in err and '# then' not in out
        assert open(zed).read() == text
    open(f'{h}/.aider.conf.yml', 'w').write('dark-mode: true\n')
    assert 'by hand' in connect('aider', '--write', '--home', h, answer='y\n', rc=1)[1]
    os.makedirs(f'{h}/.codex')
    open(f'{h}/.codex/config.toml', 'w').write('model = "gpt"\n[tui]\nx = 1\n')
    connect('codex', '--write', '--home', h, answer='y\n')
    text = open(f'{h}/.codex/config.toml').read()
    assert text.startswith('model = "gpt"\n[tui]\n') and '[profiles.hoist]' in text
    try:
        assert toml(text)['tui']['x'] == 1
    except Skip:
        pass
    assert 'by hand' in connect('codex', '--write', '--home', h, '--ctx', '999', answer='y\n', rc=1)[1]
    assert open(f'{h}/.codex/config.toml').read() == text


def test_sdk_environment():
    """The official client finds the server by what is printed."""
    if shutil.which('node') is None or not os.path.exists('tests/node_modules/openai'):
        raise Skip('no node or no openai package')
    env = dict(re.findall(r'^export (\w+)=(.*)$', connect('openai')[0], re.M))
    code = ("import OpenAI from 'openai'; const c = new OpenAI(); const m = (await c.models.list()).data[0].id;"
            "console.log((await c.completions.create({ model: m, prompt: 'Once upon', max_tokens: 2 })).object)")
    p = subprocess.run(['node', '--input-type=module', '-e', code], cwd='tests', env={**os.environ, **env},
                       capture_output=True, text=True, timeout=60)
    assert p.stdout == 'text_completion\n', p


for name, test in [(n, f) for n, f in globals().copy().items() if n.startswith('test_')]:
    try:
        test()
        print(f'ok connect/{name[5:]}', flush=True)
    except Skip as e:
        print(f'SKIP connect/{name[5:]}: {e}', flush=True)
    except Exception as e:
        failed += 1
        tb = e.__traceback__
        while tb.tb_next:
            tb = tb.tb_next
        print(f'not ok connect/{name[5:]}: line {tb.tb_lineno}: {type(e).__name__} {str(e)[:300]}', flush=True)
shutil.rmtree(DIR, ignore_errors=True)
sys.exit(1 if failed else 0)
