// openapi.mjs - a running server against the description that it serves.
//
//   node tests/openapi.mjs http://127.0.0.1:PORT
//
// Every answer and every chunk of a set of exchanges is validated with ajv; every described
// field is sent with every wrong type; the route table and the description name the same
// paths. Run from the repository's root. Prints "ok NAME" or "not ok NAME: why".
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import Ajv2020 from 'ajv/dist/2020.js';
import addFormats from 'ajv-formats';

const url = process.argv[2];
const spec = process.argv[3] ? JSON.parse(readFileSync(process.argv[3])) : await (await fetch(`${url}/openapi.json`)).json();
const ajv = new Ajv2020({ strict: true, strictTypes: false, strictRequired: false, allErrors: true });
addFormats(ajv);
const compiled = new Map();
let failed = 0, checked = 0;

async function test(name, f) {
    try {
        await f();
        console.log(`ok openapi/${name}`);
    } catch (e) {
        failed++;
        console.log(`not ok openapi/${name}: ${String(e.stack ?? e).split('\n').slice(0, 4).join(' ')}`);
    }
}

// References point into the document; ajv wants them to name it.
const absolute = schema => JSON.parse(JSON.stringify(schema).replaceAll('"#/components/schemas', '"spec#/$defs'));
ajv.addSchema({ $id: 'spec', $defs: absolute(spec.components.schemas) });

function validate(schema, value, what) {
    const key = JSON.stringify(schema);
    if (!compiled.has(key))
        compiled.set(key, ajv.compile(absolute(schema)));
    const check = compiled.get(key);
    checked++;
    assert.ok(check(value), `${what}: ${JSON.stringify(check.errors?.slice(0, 3))} in ${JSON.stringify(value).slice(0, 300)}`);
}

// Dialects whose events have names, and no [DONE] at their end.
const named = /^\/v1\/(responses|messages)/;
const bare = path => path.replace(/^\/v1(?=\/)/, '');
function operation(method, path) {
    const known = Object.keys(spec.paths).find(p => p === path) ??
        Object.keys(spec.paths).find(p => new RegExp(`^${p.replace(/\{\w+\}/g, '[^/]+')}$`).test(path));
    assert.ok(known, `${path} is not described`);
    return spec.paths[known][method.toLowerCase()];
}

// Sends, and validates what comes; returns status and value (a list, for a stream).
async function exchange(method, path, body, { status = 200, valid = true } = {}) {
    const op = operation(method, path), what = `${method} ${path} ${JSON.stringify(body)?.slice(0, 120)}`;
    const text = typeof body === 'string' ? body : body && JSON.stringify(body);
    if (valid && body !== undefined)
        validate(op.requestBody.content['application/json'].schema, body, `request of ${what}`);
    const r = await fetch(url + path, { method, body: text, headers: { 'content-type': 'application/json' } });
    const answer = await r.text();
    assert.equal(r.status, status, `${what}: ${answer.slice(0, 300)}`);
    const type = r.headers.get('content-type').split(';')[0];
    const described = (op.responses[r.status] ?? op.responses.default).content[type];
    assert.ok(described, `${what}: ${type} is not described`);
    if (type === 'text/plain')
        return answer;
    if (type === 'application/json') {
        validate(described.schema, JSON.parse(answer), what);
        return JSON.parse(answer);
    }
    const parts = type === 'text/event-stream' ? answer.split('\n\n') : answer.split('\n');
    assert.equal(parts.pop(), '', `${what}: the last event has no end`);
    if (type === 'text/event-stream') {
        if (!named.test(path))
            assert.equal(parts.pop(), 'data: [DONE]');
        for (const p of parts)
            assert.match(p, named.test(path) ? /^(: \w+|event: [\w.]+\ndata: \{.*\})$/ : /^(: \w+|data: \{.*\})$/);
    }
    const values = parts.filter(p => !p.startsWith(':')).map(p => JSON.parse(p.replace(/^(event: .*\n)?data: /, '')));
    for (const v of values)
        validate(described.schema, v, `chunk of ${what}`);
    return values;
}

const user = content => [{ role: 'user', content }];
const tools = [{ type: 'function', function: { name: 'get_weather', description: 'Get the current weather of a city.',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] } } }];
const model = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;

await test('description', async () => {
    assert.equal(spec.openapi, '3.1.0');
    assert.match(await (await fetch(url)).text(), new RegExp(`^Hoist ${spec.info.version}\\.`));
    const ids = new Set();
    for (const [path, item] of Object.entries(spec.paths))
        for (const [method, op] of Object.entries(item)) {
            assert.ok(op.summary && op.responses['200'] && !ids.has(op.operationId), `${method} ${path}`);
            ids.add(op.operationId);
            for (const r of Object.values(op.responses))
                for (const c of Object.values(r.content))
                    ajv.compile(absolute(c.schema));
        }
    const used = JSON.stringify(spec);
    for (const name of Object.keys(spec.components.schemas))
        assert.ok(used.includes(`"#/components/schemas/${name}"`), `${name} is not used`);
});

await test('routes', async () => {
    const table = readFileSync('src/serve/server.c', 'utf8').match(/static const route routes\[\] = \{([^]*?)\n\};/)[1];
    const rows = [...table.matchAll(/\.method = "(\w+)",\s*\.path = "([^"]+)"/g)].map(m => [m[1], m[2]]);
    assert.ok(rows.length > 20);
    const described = Object.entries(spec.paths).flatMap(([p, item]) => Object.keys(item).map(m =>
        `${m.toUpperCase()} ${bare(p).replace(/\{.*/, '*')}`));
    const served = rows.map(([m, p]) => `${m} ${p.length > 1 && p.endsWith('/') ? `${p}*` : p}`);
    assert.deepEqual([...new Set(served)].sort(), [...new Set(described)].sort());
});

await test('chat', async () => {
    for (const stream of [false, true]) {
        await exchange('POST', '/v1/chat/completions', { messages: user('What is 47 + 38?'), temperature: 0, stream });
        await exchange('POST', '/v1/chat/completions', { messages: user('Hello!'), temperature: 0, stream, n: 2,
            reasoning_effort: 'low', logprobs: true, top_logprobs: 3, seed: 5, stop: ['help'], user: 'unknown field' });
        await exchange('POST', '/v1/chat/completions', { messages: user('What is the weather in Paris?'), tools, stream,
            temperature: 0, reasoning_effort: 'high' });
        await exchange('POST', '/v1/chat/completions', { messages: user('Make up a person.'), temperature: 0, stream,
            max_tokens: 200, response_format: { type: 'json_object' }, chat_template_kwargs: { enable_thinking: false } });
    }
    const usage = await exchange('POST', '/v1/chat/completions', { messages: user('Hello!'), stream: true,
        max_completion_tokens: 4, stream_options: { include_usage: true }, temperature: null });
    assert.ok(usage.at(-1).usage.completion_tokens === 4 && usage.at(-1).choices.length === 0);
    await exchange('POST', '/v1/chat/completions', { temperature: 0, max_tokens: 3, messages: [
        { role: 'developer', content: 'Be brief.' }, { role: 'user', content: [{ type: 'text', text: 'a' }, 'b'] },
        { role: 'assistant', content: null, reasoning_content: 'r', tool_calls: [{ id: null, function: { name: 'f', arguments: '{"a":1}' } }] },
        { role: 'tool', tool_call_id: null, content: 'x' }, { role: 'assistant', content: 'y' }, { role: 'user', content: 'z' }] });
});

await test('completions', async () => {
    for (const stream of [false, true]) {
        await exchange('POST', '/v1/completions', { prompt: 'Once upon', temperature: 0, max_tokens: 5, stream });
        await exchange('POST', '/v1/completions', { prompt: ['Once', 'The'], max_tokens: 5, stream, logprobs: 2, echo: true });
        await exchange('POST', '/v1/completions', { prompt: [[5, 6], [7]], max_tokens: 2, n: 2, stream });
        await exchange('POST', '/v1/completions', { prompt: 'def f', suffix: 'return', max_tokens: 5, stream });
        await exchange('POST', '/v1/completions', { prompt: 'abc', max_tokens: 0, echo: true, logprobs: 0, stream });
    }
    await exchange('POST', '/v1/completions', { prompt: 'Once', best_of: 3, n: 2, max_tokens: 3 });
    await exchange('POST', '/v1/completions', { prompt: [5, 6], max_tokens: 3, stream: true, stream_options: { include_usage: true } });
});

await test('generate', async () => {
    const sampling_params = { temperature: 0, max_new_tokens: 4 };
    for (const stream of [false, true]) {
        await exchange('POST', '/generate', { text: 'Once upon', sampling_params, stream });
        await exchange('POST', '/generate', { text: ['a', 'b'], sampling_params: { ...sampling_params, n: 2 }, stream, rid: 'x' });
        await exchange('POST', '/generate', { input_ids: [[5, 6, 7], [8]], sampling_params, stream, return_logprob: true,
            logprob_start_len: 0, top_logprobs_num: 2, return_text_in_logprobs: true });
        await exchange('POST', '/generate', { input_ids: [5, 6, 7], stream, return_logprob: true, logprob_start_len: 1,
            token_ids_logprob: [1, 2], sampling_params: { max_new_tokens: 1 } });
        await exchange('POST', '/generate', { text: 'Once upon', stream, return_logprob: true, sampling_params: { max_new_tokens: 0 } });
        await exchange('POST', '/generate', { text: 'Once upon a time', stream, sampling_params: { temperature: 0, stop: [' the', ' a'], max_new_tokens: 40 } });
    }
});

await test('embeddings and text', async () => {
    await exchange('POST', '/v1/embeddings', { input: ['a', 'b'], model });
    await exchange('POST', '/v1/embeddings', { input: [5, 6], encoding_format: 'base64' });
    await exchange('POST', '/tokenize', { content: 'a b' });
    await exchange('POST', '/tokenize', { messages: user('x') });
    await exchange('POST', '/detokenize', { tokens: [5, 6] });
    await exchange('POST', '/apply-template', { messages: user('x'), tools });
});

if (spec.paths['/v1/responses'])
    await test('responses', async () => {
        const functions = tools.map(t => ({ type: 'function', ...t.function }));
        for (const stream of [false, true]) {
            await exchange('POST', '/v1/responses', { input: 'What is 47 + 38?', temperature: 0, stream });
            await exchange('POST', '/v1/responses', { input: 'What is the weather in Paris?', temperature: 0, stream,
                tools: functions, reasoning: { effort: 'high', summary: 'auto' } });
            await exchange('POST', '/v1/responses', { input: 'Hello!', stream, max_output_tokens: 4, top_logprobs: 2,
                include: ['message.output_text.logprobs', 'reasoning.encrypted_content'], store: false });
            await exchange('POST', '/v1/responses', { input: [{ role: 'user', content: 'Say it.' }], stream,
                max_output_tokens: 20, tools: [{ type: 'custom', name: 'say', description: 'Says a text.' }] });
        }
        const { id } = await exchange('POST', '/v1/responses', { input: 'Hello!', reasoning: { effort: 'none' } });
        await exchange('POST', '/v1/responses', { input: 'And now?', previous_response_id: id, max_output_tokens: 2 });
        await exchange('POST', '/v1/responses/input_tokens', { input: 'x' });
        await exchange('GET', `/v1/responses/${id}`);
        await exchange('GET', `/v1/responses/${id}/input_items`);
        await exchange('POST', `/v1/responses/${id}/cancel`);
        await exchange('DELETE', `/v1/responses/${id}`);
        await exchange('GET', `/v1/responses/${id}`, undefined, { status: 404 });
    });

if (spec.paths['/v1/messages'])
    await test('messages', async () => {
        const own = tools.map(t => ({ name: t.function.name, description: t.function.description, input_schema: t.function.parameters }));
        for (const stream of [false, true]) {
            await exchange('POST', '/v1/messages', { model, max_tokens: 100, messages: user('What is 47 + 38?'), stream,
                temperature: 0, thinking: { type: 'enabled', budget_tokens: 50 } });
            await exchange('POST', '/v1/messages', { model, max_tokens: 80, messages: user('What is the weather in Paris?'),
                stream, tools: own, temperature: 0, thinking: { type: 'adaptive' } });
            await exchange('POST', '/v1/messages', { model, max_tokens: 3, system: 'Be brief.', messages: user('x'), stream });
        }
        await exchange('POST', '/v1/messages/count_tokens', { model, messages: user('x') });
        await exchange('POST', '/v1/messages', { messages: 5 }, { status: 400, valid: false });
    });

await test('ollama', async () => {
    const options = { temperature: 0, num_predict: 12, num_ctx: 2048, num_gpu: 99 };
    for (const stream of [false, true]) {
        await exchange('POST', '/api/chat', { model, messages: user('Hello!'), think: false, stream, options });
        await exchange('POST', '/api/chat', { model, messages: user('What is the weather in Paris?'), tools, think: 'high', stream, options: { temperature: 0 } });
        await exchange('POST', '/api/generate', { model, prompt: 'What is 47 + 38?', stream, options });
        await exchange('POST', '/api/generate', { model, prompt: 'Once', raw: true, stream, options });
        await exchange('POST', '/api/generate', { model, stream });
        await exchange('POST', '/api/chat', { model, messages: [], stream });
    }
    await exchange('POST', '/api/embed', { model, input: ['a', 'b'] });
    await exchange('POST', '/api/embeddings', { model, prompt: 'a' });
    await exchange('POST', '/api/show', { model });
    await exchange('POST', '/api/show', { model: 'nothing' }, { status: 404 });
});

await test('get', async () => {
    for (const [path, item] of Object.entries(spec.paths))
        if (item.get && !path.includes('_id}'))
            await exchange('GET', path.replace('{model}', model));
    await exchange('POST', '/flush_cache');
    await exchange('GET', '/v1/models/nothing', undefined, { status: 404 });
});

await test('errors', async () => {
    for (const [path, item] of Object.entries(spec.paths)) {
        if (!item.post?.requestBody)
            continue;
        for (const body of ['', '{', '[]', '"x"', '{"a":1}}', '\u0000'])
            await exchange('POST', path, body, { status: 400, valid: false });
    }
    const long = await exchange('POST', '/v1/chat/completions', { messages: user('word '.repeat(40000)) }, { status: 400 });
    assert.equal(long.error.code, 'context_length_exceeded');
    await exchange('POST', '/api/chat', { messages: user('word '.repeat(40000)) }, { status: 400 });
});

// ---- wrong types ------------------------------------------------------------

const wrong = [5, 1.5, 'x', true, {}, [], [5], ['x'], [{}], null];
const base = { '/v1/chat/completions': { messages: user('x'), max_tokens: 1 },
               '/v1/completions': { prompt: 'x', max_tokens: 1 }, '/v1/embeddings': { input: 'x' },
               '/tokenize': { content: 'x' }, '/detokenize': { tokens: [5] }, '/apply-template': { messages: user('x') },
               '/generate': { text: 'x', sampling_params: { max_new_tokens: 1 } },
               '/api/chat': { messages: user('x'), options: { num_predict: 1 } },
               '/v1/responses': { input: 'x', max_output_tokens: 1 }, '/v1/responses/input_tokens': { input: 'x' },
               '/v1/messages': { messages: user('x'), max_tokens: 1 },
               '/v1/messages/count_tokens': { messages: user('x') },
               '/api/embed': { input: 'x' }, '/api/embeddings': { prompt: 'x' },
               '/api/generate': { prompt: 'x', options: { num_predict: 1 } }, '/api/show': { model } };

function resolve(schema) {
    while (schema.$ref || schema.anyOf?.[0]?.$ref)
        schema = spec.components.schemas[(schema.$ref ?? schema.anyOf[0].$ref).split('/').at(-1)];
    return schema;
}

// Sends each value that the schema forbids in the field at path; counts those refused.
async function sendWrong(path, name, schema, place, top = name) {
    const check = ajv.compile(absolute(schema));
    let n = 0;
    for (const value of wrong) {
        if (check(value))
            continue;
        const body = place(value);
        const r = await fetch(url + path, { method: 'POST', body: JSON.stringify(body) });
        const answer = await r.text();
        const what = `${path} ${name} = ${JSON.stringify(value)}: ${r.status} ${answer.slice(0, 200)}`;
        assert.equal(r.status, 400, what);
        const error = JSON.parse(answer).error;
        if (typeof error === 'string' || error.param === undefined)
            assert.ok(answer.includes(name) || answer.includes(top) || name === 'think', what);
        else
            assert.ok(error.param?.includes(name) || error.param?.startsWith(top), what);
        n++;
    }
    return n;
}

await test('wrong types', async () => {
    let n = 0;
    for (const [path, item] of Object.entries(spec.paths)) {
        if (!item.post?.requestBody)
            continue;
        const fields = resolve(item.post.requestBody.content['application/json'].schema).properties;
        for (const [name, schema] of Object.entries(fields)) {
            n += await sendWrong(path, name, schema, v => ({ ...base[path], [name]: v }));
            if (['sampling_params', 'options'].includes(name))
                for (const [inner, s] of Object.entries(resolve(schema).properties))
                    n += await sendWrong(path, inner, s, v => ({ ...base[path], [name]: { ...base[path][name], [inner]: v } }), name);
        }
    }
    assert.ok(n > 500, `${n} requests only`);
});

await test('count', async () => assert.ok(checked > 300, `${checked} answers and chunks only`));

process.exitCode = failed > 0 ? 1 : 0;
