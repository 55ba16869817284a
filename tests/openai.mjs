// openai.mjs - the official OpenAI client against a running server with the demo model.
//
//   node tests/openai.mjs http://127.0.0.1:PORT/v1
//
// What the model says comes from the demo model's own reference (greedy answers). Prints
// "ok NAME" or "not ok NAME: why". Installs nothing.
import assert from 'node:assert/strict';
import OpenAI, { APIError } from 'openai';
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

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
    await assert.rejects(chat('x', { extra: 1, response_format: { type: 'json_schema', json_schema: { name: 'a', schema: { type: 5 } } } }),
                         /response_format: schema: "type": found integer, expected string or array/);
    await refused(chat('x', { messages: [] }), 400, 'invalid_value', 'messages');
    await refused(chat('x', { response_format: { type: 'json_schema', json_schema: { name: 'a', schema: { not: {} } } } }),
                  400, 'unsupported_value', 'response_format');
    await refused(client.embeddings.create({ model, input: 'x', dimensions: 8 }), 400, 'unsupported_value', 'dimensions');
    const long = await refused(chat('word '.repeat(40000), { stream: true }), 400, 'context_length_exceeded');
    assert.ok(long.error.n_prompt_tokens > long.error.n_ctx);
    assert.ok(long.message.includes(String(long.error.n_ctx)));
});

// What a model that would rather chat is made to call.
const wide = [...tools, { type: 'function', function: { name: 'plan', strict: true, parameters: {
    type: 'object', additionalProperties: false, required: ['steps', 'when', 'draft'],
    properties: { steps: { type: 'array', minItems: 1, maxItems: 3, items: { type: 'object', additionalProperties: false,
                      required: ['do', 'minutes'], properties: { do: { type: 'string', maxLength: 20 },
                      minutes: { type: 'integer', minimum: 1, maximum: 90 } } } },
                  when: { enum: ['now', 'later'] }, draft: { type: 'boolean' }, note: { type: ['string', 'null'], maxLength: 30 } } } } }];

function checkPlan(args) {
    assert.ok(args.steps.length >= 1 && args.steps.length <= 3);
    assert.ok(args.steps.every(x => typeof x.do === 'string' && Number.isInteger(x.minutes) && x.minutes >= 1 && x.minutes <= 90));
    assert.ok(['now', 'later'].includes(args.when));
    assert.equal(typeof args.draft, 'boolean');
}

await test('tool_choice required', async () => {
    for (let seed = 1; seed <= 6; seed++) {
        const r = await chat('Hello!', { tools: wide, tool_choice: 'required', temperature: seed > 1 ? 1.3 : 0, seed, thinking_budget: 20,
                                         max_tokens: 700, parallel_tool_calls: seed % 2 === 0 });
        const { tool_calls: calls, content } = r.choices[0].message;
        assert.equal(content, null);
        assert.ok(calls.length >= 1);
        if (r.choices[0].finish_reason === 'length')    // it went on calling
            continue;
        assert.equal(r.choices[0].finish_reason, 'tool_calls');
        if (seed % 2 === 1)
            assert.equal(calls.length, 1);
        for (const c of calls) {
            const args = JSON.parse(c.function.arguments);
            if (c.function.name === 'plan')
                checkPlan(args);
            else if (c.function.name === 'search')
                assert.ok(typeof args.query === 'string' && Number.isInteger(args.limit));
            else
                assert.ok(c.function.name === 'get_weather' && typeof args.city === 'string');
        }
    }
});

await test('tool_choice named', async () => {
    for (const stream of [false, true])
        for (let seed = 1; seed <= 3; seed++) {
            const answer = await chat('Hello!', { tools: wide, temperature: 1.2, seed, stream, max_tokens: 700, reasoning_effort: 'none',
                                                  tool_choice: { type: 'function', function: { name: 'plan' } } });
            const all = stream ? await gather(answer) : null;
            const call = stream ? all.calls[0] : answer.choices[0].message.tool_calls[0];
            assert.equal(stream ? all.calls.length : answer.choices[0].message.tool_calls.length, 1);
            assert.equal(stream ? call.name : call.function.name, 'plan');
            assert.equal(stream ? all.finish : answer.choices[0].finish_reason, 'tool_calls');
            checkPlan(JSON.parse(stream ? call.args : call.function.arguments));
        }
    await refused(chat('Hello!', { tools, tool_choice: { type: 'function', function: { name: 'nothing' } } }), 400, 'invalid_value', 'tool_choice');
    await refused(chat('Hello!', { tool_choice: 'required' }), 400, 'invalid_value', 'tool_choice');
});

await test('tool_choice none', async () => {
    const r = await chat("What's the weather in Lisbon?", { ...weather, tool_choice: 'none', max_tokens: 60 });
    assert.equal(r.choices[0].message.tool_calls, undefined);
    assert.doesNotMatch(JSON.stringify(r.choices[0].message), /tool_call>/);
});

await test('tools or a schema', async () => {
    const format = { response_format: { type: 'json_schema', json_schema: { name: 'a', schema: {
        type: 'object', properties: { sum: { type: 'integer' } }, required: ['sum'], additionalProperties: false } } } };
    const called = await chat("What's the weather in Lisbon?", { ...weather, ...format });
    assert.equal(called.choices[0].message.tool_calls[0].function.name, 'get_weather');
    const said = await chat('What is 47 + 38?', { ...weather, ...format });
    assert.ok(said.choices[0].message.tool_calls?.length > 0 || Number.isInteger(JSON.parse(said.choices[0].message.content).sum));
});

await test('tools the server cannot constrain', async () => {
    const odd = { type: 'function', function: { name: 'get_weather', parameters: { ...functions[0].parameters, not: { required: ['x'] } } } };
    const r = await chat("What's the weather in Lisbon?", { tools: [odd], reasoning_effort: 'high' });
    assert.deepEqual(JSON.parse(r.choices[0].message.tool_calls[0].function.arguments), { city: 'Lisbon' });
    await refused(chat('x', { tools: [{ ...odd, function: { ...odd.function, strict: true } }] }), 400, 'unsupported_value', 'tools');
});

await test('tools stream helper', async () => {
    const stream = client.chat.completions.stream({ model, temperature: 0, ...weather,
        messages: [{ role: 'user', content: "What's the weather in Lisbon?" }] });
    let deltas = '', done;
    stream.on('tool_calls.function.arguments.delta', e => { deltas += e.arguments_delta; });
    stream.on('tool_calls.function.arguments.done', e => { done = e; });
    const r = await stream.finalChatCompletion();
    assert.equal(deltas, '{"city":"Lisbon"}');
    assert.equal(done.name, 'get_weather');
    assert.equal(done.arguments, deltas);
    assert.equal(r.choices[0].message.tool_calls[0].function.arguments, deltas);
});

await test('tools runner', async () => {
    for (const stream of [false, true]) {
        const asked = [];
        const runner = client.chat.completions.runTools({ model, temperature: 0, reasoning_effort: 'high', stream,
            messages: [{ role: 'user', content: "What's the weather in Lisbon?" }],
            tools: [{ type: 'function', function: { ...functions[0], parse: JSON.parse, function: ({ city }) => {
                asked.push(city);
                return '{"city": "Lisbon", "temperature": 17, "condition": "foggy"}';
            } } }] });
        assert.equal(await runner.finalContent(), 'The weather in Lisbon is foggy with 17 degrees.');
        assert.deepEqual(asked, ['Lisbon']);
    }
});

await test('structured parse with zod', async () => {
    const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150), city: z.string().max(20).nullable(),
                              kind: z.enum(['adult', 'child']) });
    const r = await client.chat.completions.parse({ model, temperature: 0, response_format: zodResponseFormat(Person, 'person'),
        messages: [{ role: 'user', content: 'Extract name, age, city as JSON: Alice is 34 years old and lives in Paris.' }] });
    assert.ok(Person.safeParse(r.choices[0].message.parsed).success);
    const Search = z.object({ query: z.string().max(20), tags: z.array(z.enum(['a', 'b'])).max(3), deep: z.boolean() });
    const t = await client.chat.completions.parse({ model, temperature: 0, tool_choice: 'required', max_tokens: 600, parallel_tool_calls: false,
        tools: [zodFunction({ name: 'find', parameters: Search })], messages: [{ role: 'user', content: 'Hello!' }] });
    assert.ok(Search.safeParse(t.choices[0].message.tool_calls[0].function.parsed_arguments).success);
});

// The turn with the call comes back as it was sampled, whatever the client kept of it.
await test('earlier calls as sampled', async () => {
    const question = { role: 'user', content: "What's the weather in Lisbon?" };
    const r = await chat(null, { ...weather, messages: [question] });
    const call = r.choices[0].message.tool_calls[0];
    const ask = async (turn, more = {}) => (await chat(null, { ...weather, ...more, max_tokens: 4, messages: [question, turn,
        { role: 'tool', tool_call_id: turn.tool_calls[0].id, content: 'foggy' }] })).usage.prompt_tokens;
    const whole = await ask(r.choices[0].message);
    assert.equal(await ask({ role: 'assistant', content: null, tool_calls: [call] }), whole);
    assert.equal(await ask({ role: 'assistant', content: '', tool_calls: [{ ...call, id: null,
        function: { name: 'get_weather', arguments: { city: 'Lisbon' } } }] }), whole);
    assert.ok(await ask({ role: 'assistant', tool_calls: [{ ...call, function: { name: 'get_weather', arguments: '{"city":"Porto"}' } }] }) < whole);
    assert.ok(await ask({ role: 'assistant', tool_calls: [call] }, { chat_template_kwargs: { clear_thinking: true } }) < whole);
    assert.ok(whole >= r.usage.total_tokens);
});

await test('history in every shape', async () => {
    const call = (args, id) => ({ id, type: 'function', function: { name: 'get_weather', arguments: args } });
    const histories = [
        [{ role: 'assistant', tool_calls: [call('{"city":"Rome"}', null)] }, { role: 'tool', tool_call_id: null, content: 'sun' }],
        [{ role: 'assistant', content: null, tool_calls: [call({ city: 'Rome' })] }, { role: 'tool', content: [{ type: 'text', text: 'sun' }] }],
        [{ role: 'assistant', content: [{ type: 'text', text: 'Let me see.' }], reasoning: 'I call.', tool_calls: [call('', 'a'), call('{}', 'b')] },
         { role: 'tool', tool_call_id: 'b', content: 'sun' }, { role: 'tool', tool_call_id: 'a', content: 'rain' }],
        [{ role: 'assistant', content: 'ok', reasoning_content: 'hm', tool_calls: null, function_call: null, refusal: null, audio: null }, { role: 'system', content: 'Be brief.' }],
        [{ role: 'assistant', content: [{ type: 'thinking', thinking: 'hm' }, { type: 'text', text: 'ok' }] }, { role: 'developer', content: 'Be brief.' }],
        [{ role: 'assistant', content: null, function_call: { name: 'get_weather', arguments: '{"city":"Rome"}' } }, { role: 'function', name: 'get_weather', content: 'sun' }],
        [{ role: 'assistant', content: [{ type: 'refusal', refusal: 'No.' }] }, { role: 'user', content: [{ type: 'input_text', text: 'Why?' }] }],
    ];
    for (const h of histories) {
        const r = await chat(null, { ...weather, max_tokens: 4, messages: [{ role: 'developer', content: 'You help.' },
            { role: 'user', content: 'Weather?' }, ...h, { role: 'user', content: 'And now?' }] });
        assert.ok(r.usage.prompt_tokens > 100);
    }
    await refused(chat(null, { messages: [{ role: 'user', content: 'x' }, { role: 'assistant', tool_calls: [call('{')] }] }),
                  400, 'invalid_value', 'messages[1].tool_calls[0].function');
});

await test('thinking budget', async () => {
    const free = await chat('What is 47 + 38?');
    const r = await chat('What is 47 + 38?', { thinking_budget: 5, max_tokens: 100 });
    assert.equal(r.usage.completion_tokens_details.reasoning_tokens, 6);        // with the id that ends it
    assert.ok(free.choices[0].message.reasoning_content.startsWith(r.choices[0].message.reasoning_content));
    assert.ok(r.choices[0].message.content.length > 0);
    const { choices: [short] } = await chat('What is 47 + 38?', { thinking_budget: 1000, max_tokens: 12 });
    assert.ok(short.message.content.length > 0);        // a part of max_tokens was left
});

await test('end thinking', async () => {
    const end = (await (await fetch(`${root}/tokenize`, { method: 'POST', body: JSON.stringify({ content: '</think>' }) })).json()).tokens;
    assert.equal(end.length, 1);
    const stream = await chat('What is 47 + 38?', { stream: true, logit_bias: { [end[0]]: -100 }, ignore_eos: true, temperature: 1, max_tokens: 20000 });
    let content = '', asked = false;
    for await (const chunk of stream) {
        if (!asked && chunk.choices[0].delta.reasoning_content) {
            const r = await fetch(`${baseURL}/chat/completions/${chunk.id}/end_thinking`, { method: 'POST' });
            assert.equal(r.status, 200);
            asked = true;
        }
        content += chunk.choices[0].delta.content ?? '';
        if (content.length > 0)
            break;
    }
    assert.ok(asked && content.length > 0);
    await becomesIdle();
});

await test('loop guard', async () => {
    const ids = (await (await fetch(`${root}/tokenize`, { method: 'POST', body: JSON.stringify({ content: 'a' }) })).json()).tokens;
    const r = await chat('Hello!', { reasoning_effort: 'none', logit_bias: { [ids[0]]: 100 }, ignore_eos: true, loop_guard: true, max_tokens: 2000 });
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.equal(r.choices[0].hoist.loop.tokens, 1);
    assert.ok(r.usage.completion_tokens < 1000);
});

await test('grammars beyond the limits', async () => {
    const deep = n => n === 0 ? { type: 'string' } : { type: 'array', items: deep(n - 1) };
    const bad = [
        { guided_regex: '('.repeat(60000) }, { guided_regex: '((a{1,999}){1,999}){1,999}' }, { guided_json: deep(200) },
        { guided_json: { enum: Array.from({ length: 200000 }, (_, i) => `v${i}`) } }, { guided_grammar: 'root ::= root "a" | "b"' },
        { guided_json: { $defs: { a: { anyOf: [{ $ref: '#/$defs/a' }] } }, $ref: '#/$defs/a' } }, { guided_regex: '(?=x)y' },
        { guided_json: { type: 'object', properties: Object.fromEntries(Array.from({ length: 60000 }, (_, i) => [`p${i}`, {}])) } },
    ];
    const other = chat('Hello!', { reasoning_effort: 'low', ignore_eos: true, max_tokens: 400 });
    for (const b of bad) {
        let best = Infinity;
        for (let k = 0; k < 5 && best > 100; k++) {
            const start = performance.now();
            const error = await refused(chat('Hello!', b), 400);
            assert.ok([Object.keys(b)[0], null].includes(error.param));      // null: too deep for a body
            best = Math.min(best, performance.now() - start);
        }
        assert.ok(best < 100 || JSON.stringify(b).length > 5e5, `${JSON.stringify(b).slice(0, 60)}: ${best} ms`);
    }
    assert.equal((await other).choices[0].finish_reason, 'length');
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
