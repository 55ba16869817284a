// openai.mjs - the official OpenAI client against a running server with the demo model.
//
//   node tests/openai.mjs http://127.0.0.1:PORT/v1
//
// What the model says comes from the demo model's own reference (greedy answers). Prints
// "ok NAME" or "not ok NAME: why". Installs nothing.
import assert from 'node:assert/strict';
import OpenAI, { APIError } from 'openai';

const baseURL = process.argv[2];
const client = new OpenAI({ baseURL, apiKey: 'any', maxRetries: 0, timeout: 60000 });
const root = baseURL.replace(/\/v1$/, '');
let model, failed = 0;

async function test(name, f) {
    try {
        await f();
        console.log(`ok openai/${name}`);
    } catch (e) {
        failed++;
        console.log(`not ok openai/${name}: ${String(e.stack ?? e).split('\n').slice(0, 4).join(' ')}`);
    }
}

const chat = (content, more = {}) => client.chat.completions.create({
    model, temperature: 0, messages: [{ role: 'user', content }], ...more });

// The content of an answer, streamed or not.
async function text(content, more = {}) {
    const answer = await chat(content, more);
    if (!more.stream)
        return answer.choices[0].message.content;
    let all = '';
    for await (const chunk of answer)
        all += chunk.choices[0]?.delta?.content ?? '';
    return all;
}

async function refused(request, status, code, param) {
    let error;
    try {
        await request;
    } catch (e) {
        error = e;
    }
    assert.ok(error instanceof APIError, `expected an APIError, got ${error}`);
    assert.equal(error.status, status);
    if (code !== undefined)
        assert.equal(error.code, code);
    if (param !== undefined)
        assert.equal(error.param, param);
    return error;
}

async function gather(stream) {
    const all = { content: '', reasoning: '', calls: [], finish: null, usage: null, chunks: 0 };
    for await (const chunk of stream) {
        all.chunks++;
        all.usage = chunk.usage ?? all.usage;
        const choice = chunk.choices[0];
        if (choice === undefined)
            continue;
        all.content += choice.delta.content ?? '';
        all.reasoning += choice.delta.reasoning_content ?? '';
        all.finish = choice.finish_reason ?? all.finish;
        for (const c of choice.delta.tool_calls ?? []) {
            all.calls[c.index] ??= { id: c.id, name: c.function.name, args: '' };
            all.calls[c.index].args += c.function.arguments ?? '';
        }
    }
    return all;
}

async function running() {
    const text = await (await fetch(`${root}/metrics`)).text();
    return Number(/^hoist_requests_running (\d+)/m.exec(text)[1]) +
        Number(/^hoist_requests_waiting (\d+)/m.exec(text)[1]);
}

async function becomesIdle() {
    for (let i = 0; i < 40; i++, await new Promise(r => setTimeout(r, 25)))
        if (await running() === 0)
            return;
    assert.fail('a request still runs after a second');
}

const functions = [
    { name: 'get_weather', description: 'Get the current weather of a city.',
      parameters: { type: 'object', properties: { city: { type: 'string', description: 'Name of the city' } },
                    required: ['city'] } },
    { name: 'search', description: 'Search the document store.',
      parameters: { type: 'object', properties: { query: { type: 'string', description: 'Search text' },
                    limit: { type: 'integer', description: 'Number of results' } },
                    required: ['query', 'limit'] } },
];
const tools = functions.map(f => ({ type: 'function', function: f }));
const weather = { tools, reasoning_effort: 'high' };

await test('models.list', async () => {
    const list = await client.models.list();
    model = list.data[0].id;
    assert.equal(list.data[0].object, 'model');
    assert.ok(list.data[0].max_model_len > 1000);
    assert.equal((await client.models.retrieve(model)).id, model);
    await refused(client.models.retrieve('nothing'), 404, 'model_not_found');
});

await test('chat', async () => {
    const r = await chat('Hello!', { reasoning_effort: 'low' });
    assert.equal(r.choices[0].message.content, 'Hello! How can I help you today?');
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.equal(r.usage.prompt_tokens, 12);
    assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
});

await test('chat reasoning', async () => {
    const r = await chat('What is 47 + 38?');
    assert.equal(r.choices[0].message.content, '47 + 38 = 85.');
    assert.match(r.choices[0].message.reasoning_content, /So 85\.$/);
    assert.ok(r.usage.completion_tokens_details.reasoning_tokens > 10);
    assert.ok(r.usage.completion_tokens_details.reasoning_tokens < r.usage.completion_tokens);
});

await test('chat without reasoning', async () => {
    const r = await chat('Hello!', { reasoning_effort: 'none' });
    assert.equal(r.choices[0].message.content, 'Hello! How can I help you today?');
    assert.equal(r.choices[0].message.reasoning_content, undefined);
    assert.equal(r.usage.prompt_tokens, 13);
});

await test('chat stream', async () => {
    const whole = await chat('What is 47 + 38?');
    const all = await gather(await chat('What is 47 + 38?', { stream: true, stream_options: { include_usage: true } }));
    assert.equal(all.content, whole.choices[0].message.content);
    assert.equal(all.reasoning, whole.choices[0].message.reasoning_content);
    assert.equal(all.finish, 'stop');
    assert.deepEqual(all.usage, whole.usage);
    assert.ok(all.chunks > 20);
});

await test('chat stream helper', async () => {
    const stream = client.chat.completions.stream({ model, temperature: 0, reasoning_effort: 'low',
        messages: [{ role: 'user', content: 'Hello!' }] });
    const r = await stream.finalChatCompletion();
    assert.equal(r.choices[0].message.content, 'Hello! How can I help you today?');
});

await test('tools round trip', async () => {
    const question = { role: 'user', content: "What's the weather in Lisbon?" };
    const r = await chat(null, { ...weather, messages: [question] });
    const message = r.choices[0].message;
    assert.equal(r.choices[0].finish_reason, 'tool_calls');
    assert.equal(message.content, null);
    assert.equal(message.tool_calls.length, 1);
    assert.equal(message.tool_calls[0].function.name, 'get_weather');
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: 'Lisbon' });
    const answer = await chat(null, { ...weather, messages: [question, message,
        { role: 'tool', tool_call_id: message.tool_calls[0].id,
          content: '{"city": "Lisbon", "temperature": 17, "condition": "foggy"}' }] });
    assert.equal(answer.choices[0].message.content, 'The weather in Lisbon is foggy with 17 degrees.');
    assert.equal(answer.usage.prompt_tokens, 277);
});

await test('tools stream', async () => {
    const all = await gather(await chat("What's the weather in Lisbon?", { ...weather, stream: true }));
    assert.equal(all.finish, 'tool_calls');
    assert.equal(all.calls.length, 1);
    assert.match(all.calls[0].id, /^call_\w+$/);
    assert.equal(all.calls[0].name, 'get_weather');
    assert.deepEqual(JSON.parse(all.calls[0].args), { city: 'Lisbon' });
    assert.equal(all.reasoning, 'I call get_weather.');
});

await test('completions list', async () => {
    const r = await client.completions.create({ model, temperature: 0, max_tokens: 4,
        prompt: ['Once upon a time there was a brave', 'In the beginning God created the heaven and'] });
    assert.deepEqual(r.choices.map(c => c.index), [0, 1]);
    assert.equal(r.choices[1].text, ' the earth, and');
    assert.equal(r.choices[0].finish_reason, 'length');
    assert.equal(r.usage.completion_tokens, 8);
    const ids = await (await fetch(`${root}/tokenize`, { method: 'POST',
        body: JSON.stringify({ content: 'In the beginning God created the heaven and' }) })).json();
    assert.deepEqual(ids.tokens, [925, 262, 2320, 3151, 795, 2040, 691, 262, 2085, 296]);
    const same = await client.completions.create({ model, temperature: 0, max_tokens: 4, prompt: [ids.tokens] });
    assert.equal(same.choices[0].text, r.choices[1].text);
});

await test('completions stream', async () => {
    let text = '';
    for await (const chunk of await client.completions.create({ model, temperature: 0, max_tokens: 4,
        prompt: 'In the beginning God created the heaven and', stream: true }))
        text += chunk.choices[0].text;
    assert.equal(text, ' the earth, and');
});

await test('logprobs', async () => {
    const r = await chat('Hello!', { reasoning_effort: 'low', logprobs: true, top_logprobs: 3 });
    const content = r.choices[0].logprobs.content;
    assert.equal(content.map(t => t.token).join(''), r.choices[0].message.content);
    for (const t of content) {
        assert.ok(t.logprob <= 0);
        assert.equal(t.top_logprobs.length, 3);
        assert.equal(t.top_logprobs[0].token, t.token);
        assert.equal(Buffer.from(t.bytes).toString(), t.token);
    }
    const c = await client.completions.create({ model, temperature: 0, max_tokens: 4, logprobs: 2,
        prompt: 'In the beginning God created the heaven and' });
    const lp = c.choices[0].logprobs;
    assert.equal(lp.tokens.join(''), c.choices[0].text);
    assert.deepEqual(lp.text_offset, [0, 4, 10, 11]);
    assert.equal(lp.top_logprobs[0][lp.tokens[0]], lp.token_logprobs[0]);
    const echo = await client.completions.create({ model, max_tokens: 0, echo: true, logprobs: 1,
        prompt: 'In the beginning God created the heaven and the earth, and' });
    const scored = echo.choices[0].logprobs;
    assert.equal(scored.token_logprobs[0], null);
    for (let i = 0; i < 4; i++)                 // the same tokens, scored and generated
        assert.ok(Math.abs(scored.token_logprobs.at(i - 4) - lp.token_logprobs[i]) < 0.01);
});

await test('stop', async () => {
    const r = await chat('Hello!', { reasoning_effort: 'low', stop: ['help you'] });
    assert.equal(r.choices[0].message.content, 'Hello! How can I ');
    assert.equal(r.choices[0].finish_reason, 'stop');
});

await test('n and seed', async () => {
    const ask = { n: 3, seed: 5, temperature: 1, max_tokens: 8, prompt: 'Once upon a time' };
    const a = await client.completions.create({ model, ...ask });
    const b = await client.completions.create({ model, ...ask });
    assert.deepEqual(a.choices.map(c => c.text), b.choices.map(c => c.text));
    const one = await client.completions.create({ model, ...ask, n: 1, seed: 6 });
    assert.equal(one.choices[0].text, a.choices[1].text);
});

await test('structured output', async () => {
    const schema = { type: 'object', required: ['name', 'age', 'tags'], additionalProperties: false,
                     properties: { name: { type: 'string', maxLength: 20 }, age: { type: 'integer', minimum: 0, maximum: 150 },
                                   tags: { type: 'array', items: { enum: ['a', 'b'] }, minItems: 1, maxItems: 3 } } };
    for (const stream of [false, true]) {
        const answer = await text('Extract name, age, city as JSON: Alice is 34 years old and lives in Paris.',
                                  { stream, response_format: { type: 'json_schema', json_schema: { name: 'p', schema } } });
        const got = JSON.parse(answer);
        assert.deepEqual(Object.keys(got), ['name', 'age', 'tags']);
        assert.ok(Number.isInteger(got.age) && got.age >= 0 && got.age <= 150);
        assert.ok(got.tags.length >= 1 && got.tags.length <= 3 && got.tags.every(t => ['a', 'b'].includes(t)));
    }
    JSON.parse(await text('Hello!', { response_format: { type: 'json_object' }, max_tokens: 400 }));
    assert.match(await text('Hello!', { guided_regex: '[A-C]{4}' }), /^[A-C]{4}$/);
    assert.ok(['red', 'blue'].includes(await text('Hello!', { guided_choice: ['red', 'blue'] })));
});

await test('embeddings', async () => {
    const r = await client.embeddings.create({ model, input: ['a king', 'a queen'] });     // asks for base64
    assert.equal(r.data.length, 2);
    for (const d of r.data)
        assert.ok(Math.abs(d.embedding.reduce((s, x) => s + x * x, 0) - 1) < 1e-5);
    const plain = await client.embeddings.create({ model, input: 'a queen', encoding_format: 'float' });
    assert.deepEqual(plain.data[0].embedding.map(Math.fround), [...r.data[1].embedding]);
});

await test('completions in the middle', async () => {
    const r = await client.completions.create({ model, prompt: 'def add(a, b):', suffix: 'return c', max_tokens: 8,
                                                temperature: 0 });
    assert.ok(r.choices[0].text.length > 0 && r.usage.prompt_tokens > 8);
    const best = await client.completions.create({ model, prompt: 'Once', best_of: 3, n: 2, max_tokens: 4 });
    assert.equal(best.choices.length, 2);
});

await test('errors', async () => {
    await refused(chat('x', { temperature: 'hot' }), 400, 'invalid_type', 'temperature');
    await refused(chat('x', { messages: [] }), 400, 'invalid_type', 'messages');
    await refused(chat('x', { response_format: { type: 'json_schema', json_schema: { name: 'a', schema: { not: {} } } } }),
                  400, 'unsupported_value', 'response_format');
    await refused(client.embeddings.create({ model, input: 'x', dimensions: 8 }), 400, 'unsupported_value', 'dimensions');
    const long = await refused(chat('word '.repeat(40000), { stream: true }), 400, 'context_length_exceeded');
    assert.ok(long.error.n_prompt_tokens > long.error.n_ctx);
    assert.ok(long.message.includes(String(long.error.n_ctx)));
});

await test('abort frees the place', async () => {
    for (let i = 0; i < 5; i++) {
        const stream = await client.completions.create({ model, prompt: 'Once upon a time', stream: true,
            ignore_eos: true, max_tokens: 20000 });
        let n = 0;
        for await (const _ of stream)
            if (++n === 5)
                break;              // the client closes the connection
        await becomesIdle();
    }
    const slow = new AbortController();
    const whole = client.completions.create({ model, prompt: 'Once upon a time', ignore_eos: true,
        max_tokens: 20000 }, { signal: slow.signal });
    setTimeout(() => slow.abort(), 200);
    await assert.rejects(whole);
    await becomesIdle();
});

await test('at once', async () => {
    const all = await Promise.all(Array.from({ length: 24 }, () => chat('Hello!', { reasoning_effort: 'low' })));
    for (const r of all)
        assert.equal(r.choices[0].message.content, 'Hello! How can I help you today?');
});

process.exitCode = failed > 0 ? 1 : 0;
