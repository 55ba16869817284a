// anthropic.mjs - the official Anthropic client against a running server with the demo model.
//
//   node tests/anthropic.mjs http://127.0.0.1:PORT
//
// What the model says comes from the demo model's own reference (greedy answers).
import assert from 'node:assert/strict';
import Anthropic, { APIError } from '@anthropic-ai/sdk';
import { answer, becomesIdle, events, functions, hello, post, question, rejected, result, root, suite } from './client.mjs';

const client = new Anthropic({ baseURL: root, apiKey: 'any', maxRetries: 0, timeout: 60000 });
const test = suite('anthropic');
const listed = [];
for await (const m of client.models.list({ limit: 1 }))
    listed.push(m);
const model = listed[0].id;
const tools = functions.map(({ parameters, ...f }) => ({ ...f, input_schema: parameters }));
const thinking = { thinking: { type: 'adaptive' } };
const high = { ...thinking, output_config: { effort: 'high' } };
const create = (content, more = {}) => client.messages.create({ model, max_tokens: 200, temperature: 0,
    messages: typeof content === 'string' ? [{ role: 'user', content }] : content, ...more });
const count = async (messages, more = {}) => (await client.messages.countTokens({ model, messages, ...more })).input_tokens;
const all = usage => usage.input_tokens + usage.cache_read_input_tokens;

async function refused(request, status, type, message) {
    const e = await rejected(request);
    assert.ok(e instanceof APIError, `expected an APIError, got ${e}`);
    assert.equal(e.status, status);
    assert.equal(e.error.type, 'error');
    assert.equal(e.error.error.type, type);
    assert.match(e.error.error.message, message);
    assert.match(e.requestID, /^req_/);
}

// Replays events; blocks come one after the other, and what the deltas add up to is returned.
function check(list) {
    const names = list.map(e => e.event).filter(e => e !== 'ping');
    let message, block, json, ended = false;
    assert.ok(list.some(e => e.event === 'ping'));
    assert.equal(names[0], 'message_start');
    assert.equal(names.at(-2), 'message_delta');
    assert.equal(names.at(-1), 'message_stop');
    for (const { event, data: d } of list) {
        assert.equal(event, d.type);
        switch (event) {
        case 'ping':
            break;
        case 'message_start':
            message = structuredClone(d.message);
            assert.deepEqual(message.content, []);
            assert.equal(message.stop_reason, null);
            assert.ok(message.usage.input_tokens > 0);
            break;
        case 'content_block_start':
            assert.equal(block, undefined);
            assert.equal(d.index, message.content.length);
            block = structuredClone(d.content_block);
            message.content.push(block);
            json = '';
            break;
        case 'content_block_delta':
            assert.equal(d.index, message.content.length - 1);
            switch (d.delta.type) {
            case 'text_delta': block.text += d.delta.text; break;
            case 'thinking_delta': assert.equal(block.signature, ''); block.thinking += d.delta.thinking; break;
            case 'signature_delta': block.signature += d.delta.signature; break;
            case 'input_json_delta': assert.deepEqual(block.input, {}); json += d.delta.partial_json; break;
            default: assert.fail(d.delta.type);
            }
            break;
        case 'content_block_stop':
            assert.equal(d.index, message.content.length - 1);
            if (block.type === 'tool_use')
                block.input = JSON.parse(json);
            block = undefined;
            break;
        case 'message_delta':
            assert.equal(all(d.usage), all(message.usage));
            Object.assign(message, d.delta, { usage: d.usage });
            break;
        case 'message_stop':
            ended = true;
            break;
        default:
            assert.fail(`unexpected event ${event}`);
        }
    }
    assert.ok(ended);
    return message;
}

const shape = m => JSON.parse(JSON.stringify(m), (k, v) =>
    ['id', 'cache_read_input_tokens', 'input_tokens'].includes(k) ? undefined : v);
async function both(body) {
    const ask = { model, max_tokens: 200, temperature: 0, ...body };
    const whole = (await post('/v1/messages', ask)).body, streamed = check(await events('/v1/messages', ask));
    assert.deepEqual(shape(streamed), shape(whole));
    assert.equal(all(streamed.usage), all(whole.usage));
    return whole;
}
const user = content => [{ role: 'user', content }];

await test('models', async () => {
    assert.equal(listed.length, 1);
    assert.equal(listed[0].type, 'model');
    assert.equal(listed[0].display_name, model);
    assert.ok(Math.abs(Date.parse(listed[0].created_at) - Date.now()) < 3600e3, listed[0].created_at);
    assert.equal((await client.models.retrieve(model)).id, model);
});

await test('create', async () => {
    const r = await create('Hello!');
    assert.deepEqual(r.content, [{ type: 'text', text: hello }]);
    assert.equal(r.stop_reason, 'end_turn');
    assert.equal(r.stop_sequence, null);
    assert.equal(r.role, 'assistant');
    assert.equal(r.model, model);
    assert.match(r.id, /^msg_/);
    assert.match(r._request_id, /^req_/);
    assert.equal(all(r.usage), await count(user('Hello!')));
    const key = new Anthropic({ baseURL: root, apiKey: null, authToken: 'any', maxRetries: 0 });
    assert.equal((await key.beta.messages.create({ model, max_tokens: 100, temperature: 0, messages: user('Hello!'),
        betas: ['interleaved-thinking-2025-05-14'] })).content[0].text, hello);
});

await test('thinking', async () => {
    const r = await create('What is 47 + 38?', thinking);
    assert.deepEqual(r.content.map(b => b.type), ['thinking', 'text']);
    assert.match(r.content[0].thinking, /So 85\.$/);
    assert.equal(r.content[1].text, '47 + 38 = 85.');
    assert.ok(r.usage.output_tokens_details.thinking_tokens > 10);
    const messages = [...user('What is 47 + 38?'), { role: 'assistant', content: r.content }, ...user('Hello!')];
    const n = await count(messages, thinking);
    assert.ok(n > await count([messages[0], { role: 'assistant', content: r.content.slice(1) }, messages[2]], thinking));
    const altered = structuredClone(messages);
    altered[1].content[0].thinking += ' Or 86.';
    await refused(create(altered, thinking), 400, 'invalid_request_error', /^messages\[1\]\.content\[0\]\.signature: /);
    altered[1].content[0].signature = 'EqoBCkgIARABGAIiQL';               // another server's
    assert.ok(await count(altered, thinking) > n);
    altered[1].content[0] = { type: 'redacted_thinking', data: 'x' };
    assert.ok(await count(altered, thinking) < n);
    assert.equal((await create('Hello!', { thinking: { type: 'disabled' } })).content[0].text, hello);
    assert.ok((await create('What is 47 + 38?', { thinking: { type: 'enabled', budget_tokens: 150 } })).content.length > 1);
});

await test('events', async () => {
    assert.equal((await both({ messages: user('Hello!') })).stop_reason, 'end_turn');
    await both({ messages: user('What is 47 + 38?'), ...thinking });
    assert.equal((await both({ messages: user('What is 47 + 38?'), ...thinking, max_tokens: 6 })).stop_reason, 'max_tokens');
    const stopped = await both({ messages: user('Hello!'), stop_sequences: ['\n\n', 'help you'] });
    assert.equal(stopped.stop_reason, 'stop_sequence');
    assert.equal(stopped.stop_sequence, 'help you');
    assert.equal(stopped.content[0].text, 'Hello! How can I ');
    const call = await both({ messages: user(question), ...high, tools });
    assert.equal(call.stop_reason, 'tool_use');
    assert.deepEqual(call.content.at(-1).input, { city: 'Lisbon' });
});

await test('stream', async () => {
    let text = '', usage;
    for await (const event of await create('Hello!', { stream: true })) {
        if (event.type === 'message_start')
            assert.equal(all(event.message.usage), await count(user('Hello!')));
        if (event.type === 'content_block_delta')
            text += event.delta.text;
        if (event.type === 'message_delta')
            usage = event.usage;
    }
    assert.equal(text, hello);
    assert.equal(usage.output_tokens, 10);
});

await test('stream helper', async () => {
    let thoughts = '', said = '';
    const stream = client.messages.stream({ model, max_tokens: 200, temperature: 0, messages: user('What is 47 + 38?'), ...thinking })
        .on('thinking', d => { thoughts += d; }).on('text', d => { said += d; });
    const r = await stream.finalMessage();
    assert.equal(thoughts, r.content[0].thinking);
    assert.equal(said, r.content[1].text);
    assert.match(r.content[0].signature, /^hoist\./);
    assert.equal(await stream.finalText(), '47 + 38 = 85.');
});

await test('tools round trip', async () => {
    for (const ask of [m => create(m, { ...high, tools }),
                       m => client.messages.stream({ model, max_tokens: 200, temperature: 0, messages: m, ...high, tools }).finalMessage()]) {
        const messages = user(question);
        const r = await ask(messages);
        assert.equal(r.stop_reason, 'tool_use');
        assert.deepEqual(r.content.map(b => b.type), ['thinking', 'tool_use']);
        const call = r.content[1];
        assert.match(call.id, /^toolu_/);
        assert.equal(call.name, 'get_weather');
        assert.deepEqual(call.input, { city: 'Lisbon' });
        messages.push({ role: 'assistant', content: r.content },
                      { role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: result }] });
        const last = await ask(messages);
        assert.equal(last.content.at(-1).text, answer);
        assert.equal(all(last.usage), 277);             // the reference's own prompt
        assert.equal(await count(messages, { ...high, tools }), 277);
        messages[2].content[0].content = [{ type: 'text', text: result }];
        assert.equal(await count(messages, { ...high, tools }), 277);
    }
});

await test('tool runner', async () => {
    const seen = [];
    const runner = client.beta.messages.toolRunner({ model, max_tokens: 200, temperature: 0, messages: user(question), ...high,
        tools: tools.map(t => ({ ...t, type: 'custom', parse: x => x, run: async input => { seen.push(input); return result; } })) });
    const r = await runner;
    assert.deepEqual(seen, [{ city: 'Lisbon' }]);
    assert.equal(r.content.at(-1).text, answer);
});

await test('count tokens', async () => {
    for (const [messages, more] of [[user('Hello!'), {}], [user('Hello!'), thinking],
                                    [user([{ type: 'text', text: 'a' }, { type: 'text', text: 'b' }]), { system: 'Be brief.' }],
                                    [user(question), { ...high, tools }]]) {
        const r = await create(messages, { ...more, max_tokens: 1 });
        assert.equal(all(r.usage), await count(messages, more));
    }
    const n = await count(user('Hello!'), { system: 'Be brief.' });
    assert.equal(await count(user('Hello!'), { system: [{ type: 'text', text: 'Be brief.', cache_control: { type: 'ephemeral' } }] }), n);
    assert.equal(await count([{ role: 'system', content: 'Be brief.' }, ...user('Hello!')]), n);
});

await test('a turn as Claude Code sends it', async () => {
    const system = cch => [{ type: 'text', text: `x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=${cch};` },
                           { type: 'text', text: 'You are a CLI for software engineering. '.repeat(40), cache_control: { type: 'ephemeral' } }];
    const ask = (messages, cch) => client.beta.messages.create({ model, max_tokens: 60, temperature: 0, system: system(cch), messages,
        tools: [...tools, { type: 'web_search_20250305', name: 'web_search' }], metadata: { user_id: 'user_x' },
        thinking: { type: 'enabled', budget_tokens: 50 }, betas: ['claude-code-20250219', 'interleaved-thinking-2025-05-14'],
        context_management: { edits: [{ type: 'clear_thinking_20251015', keep: 'all' }] } });
    const messages = [{ role: 'user', content: [{ type: 'text', text: '<system-reminder>x</system-reminder>' },
                                                { type: 'text', text: 'Hello!', cache_control: { type: 'ephemeral' } }] }];
    const first = await ask(messages, 'a1b2c');
    messages.push({ role: 'assistant', content: first.content.length ? first.content : 'Hi.' }, { role: 'user', content: 'And now?' });
    const a = await ask(messages, 'd3e4f'), b = await ask(messages, '00000');
    assert.equal(all(a.usage), all(b.usage));
    assert.equal(await count(messages, { system: system('1'), tools }), await count(messages, { system: system('another, longer one'), tools }));
    // one string that begins with the line
    assert.equal(await count(user('x'), { system: 'x-anthropic-billing-header: cch=1;\nBe brief.' }), await count(user('x'), { system: 'Be brief.' }));
});

await test('structured output', async () => {
    const schema = { type: 'object', required: ['name', 'age'], additionalProperties: false,
                     properties: { name: { type: 'string', maxLength: 20 }, age: { type: 'integer', minimum: 0, maximum: 150 } } };
    const ask = 'Extract name, age, city as JSON: Alice is 34 years old and lives in Paris.';
    for (const more of [{ output_config: { format: { type: 'json_schema', schema } } }, { output_format: { type: 'json_schema', schema } }]) {
        const got = JSON.parse((await create(ask, more)).content[0].text);
        assert.deepEqual(Object.keys(got), ['name', 'age']);
        assert.ok(Number.isInteger(got.age));
    }
});

await test('abort frees the place', async () => {
    for (let i = 0; i < 3; i++) {
        let n = 0;
        for await (const _ of await create('Once upon a time', { stream: true, ignore_eos: true, max_tokens: 20000 }))
            if (++n === 6)
                break;
        await becomesIdle();
    }
});

await test('errors', async () => {
    const bad = 'invalid_request_error';
    await refused(create([]), 400, bad, /^messages: found an empty list/);
    await refused(create([{ role: 'robot', content: 'x' }]), 400, bad, /^messages\[0\]\.role/);
    await refused(create('x', { temperature: 'hot' }), 400, bad, /^temperature: found string/);
    await refused(create('x', { max_tokens: 0 }), 400, bad, /^max_tokens/);
    await refused(create('x', { stop_sequences: [''] }), 400, bad, /^stop_sequences\[0\]/);
    await refused(create('x', { thinking: { type: 'perhaps' } }), 400, bad, /^thinking\.type/);
    await refused(create('x', { thinking: { type: 'enabled', budget_tokens: 4000 }, max_tokens: 2000 }), 400, bad, /^max_tokens: 2000/);
    await refused(create('x', { output_config: { effort: 'heroic' } }), 400, bad, /^output_config\.effort/);
    await refused(create('x', { tools: [{ name: 'f' }] }), 400, bad, /^tools\[0\]\.input_schema/);
    await refused(create('x', { tools, tool_choice: { type: 'tool', name: 'other' } }), 400, bad, /^tool_choice\.name/);
    await refused(create([...user('x'), { role: 'assistant', content: 'Y' }, ...user([{ type: 'text', text: 'z' },
        { type: 'image', source: { type: 'base64', media_type: 'image/png', data: '' } }])]), 400, bad, /^messages\[2\]\.content\[1\]: blocks of type "image"/);
    await refused(create([...user('x'), { role: 'assistant', content: 'Y' }]), 400, bad, /^messages\[1\]: the last message/);
    await refused(create('word '.repeat(40000)), 400, bad, /^prompt is too long: \d+ tokens > \d+ maximum$/);
    await refused(create('word '.repeat(40000), { stream: true }), 400, bad, /^prompt is too long/);
    const raw = await post('/v1/messages', '{"messages":');
    assert.equal(raw.status, 400);
    assert.equal(raw.body.error.type, bad);
    const get = await fetch(`${root}/v1/messages`);
    assert.equal(get.status, 405);
    assert.equal((await get.json()).type, 'error');
});

await test('at once', async () => {
    const list = await Promise.all(Array.from({ length: 16 }, (_, i) => i % 2 ? create('Hello!') :
        client.messages.stream({ model, max_tokens: 50, temperature: 0, messages: user('Hello!') }).finalMessage()));
    for (const r of list)
        assert.equal(r.content[0].text, hello);
});

await test('tool choice', async () => {
    for (const [choice, names] of [[{ type: 'any' }, ['get_weather', 'search']], [{ type: 'tool', name: 'search' }, ['search']],
                                   [{ type: 'any', disable_parallel_tool_use: true }, ['get_weather', 'search']]]) {
        const r = await create('Hello!', { tools, tool_choice: choice });
        const calls = r.content.filter(b => b.type === 'tool_use');
        assert.equal(r.stop_reason, 'tool_use');
        assert.ok(calls.length > 0);
        assert.ok(calls.every(c => names.includes(c.name)));
        if (choice.disable_parallel_tool_use)
            assert.equal(calls.length, 1);
    }
    assert.ok((await create(question, { ...high, tools, tool_choice: { type: 'none' }, max_tokens: 60 })).content.every(b => b.type !== 'tool_use'));
});

await test('thinking budget', async () => {
    const r = await create('What is 47 + 38?', { thinking: { type: 'enabled', budget_tokens: 6 } });
    assert.deepEqual(r.content.map(b => b.type), ['thinking', 'text']);
    assert.ok(r.usage.output_tokens_details.thinking_tokens <= 7);
});
