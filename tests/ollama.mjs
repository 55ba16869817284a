// ollama.mjs - the npm client `ollama` against a running server with the demo model.
//
//   node tests/ollama.mjs http://127.0.0.1:PORT
//
// What the model says comes from the demo model's own reference (greedy answers). Prints
// "ok NAME" or "not ok NAME: why". Installs nothing.
import assert from 'node:assert/strict';
import { Ollama } from 'ollama';

const host = process.argv[2];
const client = new Ollama({ host });
let model, failed = 0;

async function test(name, f) {
    try {
        await f();
        console.log(`ok ollama/${name}`);
    } catch (e) {
        failed++;
        console.log(`not ok ollama/${name}: ${String(e.stack ?? e).split('\n').slice(0, 4).join(' ')}`);
    }
}

const chat = (content, more = {}) => client.chat({
    model, messages: [{ role: 'user', content }], ...more, options: { temperature: 0, ...more.options } });

async function refused(request, status, about) {
    await assert.rejects(request, e => {
        assert.equal(e.status_code, status);
        assert.equal(typeof e.error, 'string');
        assert.match(e.error, about);
        return true;
    });
}

function isFinal(r, reason = 'stop') {
    assert.equal(r.done, true);
    assert.equal(r.done_reason, reason);
    for (const f of ['total_duration', 'load_duration', 'prompt_eval_count', 'prompt_eval_duration', 'eval_count',
                     'eval_duration'])
        assert.ok(Number.isInteger(r[f]) && r[f] >= 0, `${f}: ${r[f]}`);
    assert.ok(r.total_duration >= r.prompt_eval_duration + r.eval_duration);
    assert.ok(r.total_duration > 1e5 && r.total_duration < 1e11);       // nanoseconds
    assert.ok(Math.abs(Date.parse(r.created_at) - Date.now()) < 60000);
}

await test('list', async () => {
    const { models } = await client.list();
    assert.equal(models.length, 1);
    model = models[0].name;
    assert.equal(models[0].model, model);
    assert.match(models[0].digest, /^[0-9a-f]{64}$/);
    assert.ok(models[0].size > 1e6 && models[0].details.family.length > 0);
});

await test('version', async () => {
    const { version } = await client.version();
    assert.match(version, /^\d+\.\d+\.\d+$/);
});

await test('show', async () => {
    const r = await client.show({ model });
    const arch = r.model_info['general.architecture'];
    assert.ok(r.model_info[`${arch}.context_length`] >= 1024);
    assert.ok(r.capabilities.includes('completion') && r.capabilities.includes('tools') &&
              r.capabilities.includes('thinking'));
    assert.deepEqual(await client.show({ model: `${model}:latest` }), r);
    await refused(client.show({ model: 'nothing' }), 404, /not found/);
});

await test('ps', async () => {
    const { models } = await client.ps();
    assert.equal(models[0].name, model);
    assert.ok(Date.parse(models[0].expires_at) > Date.now());
});

await test('chat', async () => {
    const r = await chat('What is 47 + 38?');
    assert.equal(r.message.content, '47 + 38 = 85.');
    assert.match(r.message.thinking, /So 85\.$/);
    assert.equal(r.message.role, 'assistant');
    assert.equal(r.model, model);
    isFinal(r);
    assert.ok(r.eval_count > 10 && r.prompt_eval_count > 10);
});

await test('chat streamed', async () => {
    let content = '', thinking = '', last, n = 0;
    for await (const part of await chat('What is 47 + 38?', { stream: true })) {
        assert.equal(part.message.role, 'assistant');
        assert.equal(part.model, model);
        content += part.message.content;
        thinking += part.message.thinking ?? '';
        last = part;
        n++;
    }
    assert.equal(content, '47 + 38 = 85.');
    assert.match(thinking, /So 85\.$/);
    isFinal(last);
    assert.ok(n > 10);
});

await test('lines', async () => {
    const r = await fetch(`${host}/api/chat`, { method: 'POST', body: JSON.stringify({ model,
        messages: [{ role: 'user', content: 'Hello!' }], think: false, options: { temperature: 0 } }) });
    assert.equal(r.headers.get('content-type'), 'application/x-ndjson');
    const lines = (await r.text()).split('\n');
    assert.equal(lines.pop(), '');
    const parts = lines.map(l => JSON.parse(l));
    assert.deepEqual(parts.map(p => p.done), [...Array(parts.length - 1).fill(false), true]);
    assert.equal(parts.map(p => p.message.content).join(''), 'Hello! How can I help you today?');
});

await test('think', async () => {
    const off = await chat('Hello!', { think: false });
    assert.equal(off.message.thinking, undefined);
    assert.equal(off.message.content, 'Hello! How can I help you today?');
    for (const think of [true, 'low', 'medium', 'high'])
        assert.ok((await chat('Hello!', { think })).message.content.length > 0);
    await refused(chat('Hello!', { think: 5 }), 400, /think/);
    await refused(chat('Hello!', { think: 'hugely' }), 400, /reasoning_effort/);
});

const tools = [{ type: 'function', function: { name: 'get_weather', description: 'Get the current weather of a city.',
    parameters: { type: 'object', properties: { city: { type: 'string', description: 'Name of the city' } },
                  required: ['city'] } } },
    { type: 'function', function: { name: 'search', description: 'Search the document store.',
      parameters: { type: 'object', properties: { query: { type: 'string', description: 'Search text' },
                    limit: { type: 'integer', description: 'Number of results' } }, required: ['query', 'limit'] } } }];

await test('tools', async () => {
    const ask = 'What is the weather in Paris?';
    const r = await chat(ask, { tools, think: 'high' });
    assert.equal(r.message.tool_calls.length, 1);
    assert.equal(r.message.tool_calls[0].function.name, 'get_weather');
    assert.deepEqual(r.message.tool_calls[0].function.arguments, { city: 'Paris' });
    const calls = [];
    for await (const part of await chat(ask, { tools, think: 'high', stream: true }))
        calls.push(...part.message.tool_calls ?? []);
    assert.deepEqual(calls.map(c => [c.function.name, c.function.arguments]), [['get_weather', { city: 'Paris' }]]);
    const after = await client.chat({ model, tools, think: 'high', options: { temperature: 0 }, messages: [
        { role: 'user', content: ask }, r.message, { role: 'tool', tool_name: 'get_weather', content: '18 degrees' } ] });
    assert.ok(after.message.content.length + (after.message.thinking ?? '').length > 0);
});

await test('format', async () => {
    const schema = { type: 'object', properties: { name: { type: 'string', maxLength: 20 },
                     age: { type: 'integer', minimum: 0, maximum: 150 } },
                     required: ['name', 'age'] };
    const r = JSON.parse((await chat('Make up a person.', { format: schema, options: { num_predict: 300 } }))
        .message.content);
    assert.deepEqual(Object.keys(r), ['name', 'age']);
    JSON.parse((await chat('Hello!', { format: 'json', options: { num_predict: 400 } })).message.content);
    await refused(chat('x', { format: 'xml' }), 400, /format/);
    await refused(chat('x', { format: { not: {} } }), 400, /not/);
});

await test('options', async () => {
    const r = await chat('What is 47 + 38?', { options: { num_predict: 5, num_ctx: 4096 } });
    assert.equal(r.eval_count, 5);
    isFinal(r, 'length');
    const stop = await chat('Hello!', { think: false, options: { stop: [' help'] } });
    assert.equal(stop.message.content, 'Hello! How can I');
    const drawn = () => chat('Tell me a story.', { options: { temperature: 1, seed: 5, num_predict: 12 } });
    assert.equal((await drawn()).message.thinking, (await drawn()).message.thinking);
    await refused(chat('x', { options: { temperature: 'hot' } }), 400, /temperature/);
    await refused(chat('x', { options: { num_predict: 'many' } }), 400, /num_predict/);
    await refused(client.chat({ model, messages: [{ role: 'user', content: 'x' }], options: [] }), 400, /options/);
});

await test('generate', async () => {
    const r = await client.generate({ model, prompt: 'Hello!', think: false, options: { temperature: 0 } });
    assert.equal(r.response, 'Hello! How can I help you today?');
    isFinal(r);
    const thinks = await client.generate({ model, prompt: 'What is 47 + 38?', options: { temperature: 0 } });
    assert.equal(thinks.response, '47 + 38 = 85.');
    assert.match(thinks.thinking, /So 85\.$/);
    let text = '';
    for await (const part of await client.generate({ model, prompt: 'Hello!', think: false, stream: true,
                                                     options: { temperature: 0 } }))
        text += part.response;
    assert.equal(text, r.response);
    const raw = await client.generate({ model, prompt: 'Once upon a time', raw: true,
                                        options: { temperature: 0, num_predict: 6 } });
    assert.equal(raw.response, ' there was a quiet writer named');
});

await test('embed', async () => {
    const r = await client.embed({ model, input: ['a king', 'a queen'] });
    assert.equal(r.embeddings.length, 2);
    assert.ok(Math.abs(r.embeddings[0].reduce((s, x) => s + x * x, 0) - 1) < 1e-5);
    assert.ok(r.prompt_eval_count >= 4);
    const one = await client.embeddings({ model, prompt: 'a queen' });
    assert.deepEqual(one.embedding, r.embeddings[1]);
    await refused(client.embed({ model, input: 5 }), 400, /input/);
    await refused(client.embed({ model, input: 'x', dimensions: 8 }), 400, /dimensions/);
});

await test('load', async () => {
    const r = await client.generate({ model, prompt: '' });
    assert.equal(r.done_reason, 'load');
    assert.equal((await client.chat({ model, messages: [] })).done_reason, 'load');
});

await test('errors', async () => {
    await refused(client.chat({ model, messages: [5] }), 400, /messages/);
    await refused(client.chat({ model, messages: [{ role: 'king', content: 'x' }] }), 400, /role/);
    await refused(chat('word '.repeat(40000)), 400, /context/);
    await refused(client.generate({ model, prompt: 'x', template: '{{ x }}' }), 400, /template/);
    await refused(client.pull({ model: 'x' }), 404, /no such path/);
    const bad = await fetch(`${host}/api/chat`, { method: 'POST', body: '{' });
    assert.equal(bad.status, 400);
    assert.equal(typeof (await bad.json()).error, 'string');
});

await test('abort', async () => {
    const stream = await client.generate({ model, prompt: 'Once upon a time', raw: true, stream: true,
                                           options: { num_predict: 20000, ignore_eos: true } });
    let n = 0;
    await assert.rejects(async () => {
        for await (const _ of stream)
            if (++n === 5)
                stream.abort();
    }, { name: 'AbortError' });
    for (let i = 0; i < 40; i++, await new Promise(r => setTimeout(r, 25)))
        if (/^hoist_requests_running 0$/m.test(await (await fetch(`${host}/metrics`)).text()))
            return;
    assert.fail('a request still runs after a second');
});

process.exitCode = failed > 0 ? 1 : 0;
