// responses.mjs - the official OpenAI client's Responses API against a running server with the demo model.
//
//   node tests/responses.mjs http://127.0.0.1:PORT
//
// What the model says comes from the demo model's own reference (greedy answers).
import assert from 'node:assert/strict';
import OpenAI, { APIError } from 'openai';
import { zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { answer, becomesIdle, events, functions, hello, post, question, rejected, result, root, suite } from './client.mjs';

const client = new OpenAI({ baseURL: `${root}/v1`, apiKey: 'any', maxRetries: 0, timeout: 60000 });
const test = suite('responses');
const model = (await client.models.list()).data[0].id;
const tools = functions.map(f => ({ type: 'function', ...f, strict: false }));
const low = { reasoning: { effort: 'low' } }, high = { reasoning: { effort: 'high' } };
const create = (input, more = {}) => client.responses.create({ model, temperature: 0, input, ...more });
const of = (r, type) => r.output.filter(item => item.type === type);
const textOf = r => of(r, 'message')[0].content[0].text;
const reasoningOf = item => (item.content?.length ? item.content : item.summary).map(p => p.text).join('');

async function refused(request, status, code, param) {
    const e = await rejected(request);
    assert.ok(e instanceof APIError, `expected an APIError, got ${e}`);
    assert.deepEqual([e.status, e.code, e.param], [status, code, param]);
}

// Replays events as a client must be able to: every event may only add to what was announced, and what
// the deltas add up to must be what the done events and the final object say.
function check(list) {
    const output = [], open = {};
    let last;
    const part = (d, added) => {
        const summary = d.summary_index !== undefined, item = output[d.output_index];
        assert.equal(d.item_id, item.id);
        const parts = summary ? item.summary : item.content;
        const i = summary ? d.summary_index : d.content_index;
        assert.equal(added ? parts.length : parts.length - 1, i);
        return { parts, i };
    };
    for (const [i, { event, data: d }] of list.entries()) {
        assert.equal(event, d.type);
        assert.equal(d.sequence_number, i);
        assert.ok(last === undefined, `${event} after the last event`);
        if (i < 2) {
            assert.equal(event, ['response.created', 'response.in_progress'][i]);
            assert.equal(d.response.status, 'in_progress');
            assert.deepEqual(d.response.output, []);
            assert.equal(d.response.usage, null);
            continue;
        }
        switch (event) {
        case 'response.output_item.added':
            assert.equal(open.item, undefined);
            assert.equal(d.output_index, output.length);
            assert.equal(d.item.status, 'in_progress');
            output.push(structuredClone(d.item));
            open.item = d.item.id;
            break;
        case 'response.content_part.added':
        case 'response.reasoning_summary_part.added':
            assert.equal(d.part.text, '');
            part(d, true).parts.push(structuredClone(d.part));
            break;
        case 'response.output_text.delta':
        case 'response.reasoning_text.delta':
        case 'response.reasoning_summary_text.delta': {
            const { parts, i } = part(d);
            assert.ok(d.delta.length > 0);
            parts[i].text += d.delta;
            if (d.logprobs)
                parts[i].logprobs.push(...d.logprobs);
            break;
        }
        case 'response.output_text.done':
        case 'response.reasoning_text.done':
        case 'response.reasoning_summary_text.done': {
            const { parts, i } = part(d);
            assert.equal(parts[i].text, d.text);
            if (d.logprobs)
                assert.deepEqual(parts[i].logprobs, d.logprobs);
            break;
        }
        case 'response.content_part.done':
        case 'response.reasoning_summary_part.done': {
            const { parts, i } = part(d);
            assert.deepEqual(parts[i], d.part);
            break;
        }
        case 'response.function_call_arguments.delta':
        case 'response.custom_tool_call_input.delta': {
            const item = output[d.output_index], field = item.type === 'function_call' ? 'arguments' : 'input';
            assert.equal(d.item_id, item.id);
            item[field] += d.delta;
            break;
        }
        case 'response.function_call_arguments.done':
            assert.equal(output[d.output_index].arguments, d.arguments);
            assert.equal(output[d.output_index].name, d.name);
            JSON.parse(d.arguments);
            break;
        case 'response.custom_tool_call_input.done':
            assert.equal(output[d.output_index].input, d.input);
            break;
        case 'response.output_item.done': {
            const item = output[d.output_index];
            assert.equal(open.item, d.item.id);
            open.item = undefined;
            item.status = d.item.status;
            if (d.item.encrypted_content !== undefined)
                item.encrypted_content = d.item.encrypted_content;
            assert.deepEqual(item, d.item);
            break;
        }
        case 'response.completed':
        case 'response.incomplete':
            assert.equal(open.item, undefined);
            assert.deepEqual(d.response.output, output);
            last = d.response;
            break;
        default:
            assert.fail(`unexpected event ${event}`);
        }
    }
    assert.ok(last, 'no last event');
    return last;
}

// The same request, streamed and not, but for what differs between any two answers.
const shape = r => JSON.parse(JSON.stringify(r), (k, v) =>
    ['id', 'call_id', 'created_at', 'completed_at', 'timings', 'output_text', 'cached_tokens'].includes(k) ? undefined : v);
async function both(body) {
    const whole = (await post('/v1/responses', { model, temperature: 0, ...body })).body;
    const streamed = check(await events('/v1/responses', { model, temperature: 0, ...body }));
    assert.deepEqual(shape(streamed), shape(whole));
    return whole;
}

await test('create', async () => {
    const r = await create('Hello!', { ...low, instructions: '', metadata: { a: 'b' } });
    assert.equal(r.output_text, hello);
    assert.equal(r.status, 'completed');
    assert.equal(r.object, 'response');
    assert.match(r.id, /^resp_\w{24}$/);
    assert.match(r.output[0].id, /^msg_/);
    assert.equal(r.usage.input_tokens, 12);
    assert.equal(r.usage.total_tokens, r.usage.input_tokens + r.usage.output_tokens);
    assert.ok(r.usage.input_tokens_details.cached_tokens >= 0);
    assert.deepEqual(r.metadata, { a: 'b' });
    assert.equal(r.model, model);
    assert.ok(Math.abs(r.created_at - Date.now() / 1000) < 60);
    assert.ok(r.completed_at >= r.created_at);
    assert.ok(r._request_id.startsWith('req_'));
});

await test('reasoning', async () => {
    const r = await create('What is 47 + 38?');
    assert.deepEqual(r.output.map(item => item.type), ['reasoning', 'message']);
    assert.equal(r.output_text, '47 + 38 = 85.');
    assert.match(r.output[0].content[0].text, /So 85\.$/);
    assert.deepEqual(r.output[0].summary, []);
    assert.equal(r.output[0].encrypted_content, undefined);
    assert.ok(r.usage.output_tokens_details.reasoning_tokens > 10);
    const s = await create('What is 47 + 38?', { reasoning: { summary: 'auto' }, include: ['reasoning.encrypted_content'] });
    assert.equal(s.output[0].summary[0].text, r.output[0].content[0].text);
    assert.equal(s.output[0].content, undefined);
    assert.ok(s.output[0].encrypted_content.length > 10);
    const none = await create('Hello!', { reasoning: { effort: 'none' } });
    assert.deepEqual(none.output.map(item => item.type), ['message']);
    assert.equal(none.output_text, hello);
});

await test('events', async () => {
    for (const more of [{}, { reasoning: { summary: 'detailed' } }, { include: ['reasoning.encrypted_content'] },
                        { reasoning: { effort: 'none' } }, { max_output_tokens: 8 }, { max_output_tokens: 38 },
                        { top_logprobs: 2 }])
        await both({ input: 'What is 47 + 38?', ...more });
    const cut = await both({ input: 'What is 47 + 38?', max_output_tokens: 8 });
    assert.equal(cut.status, 'incomplete');
    assert.deepEqual(cut.incomplete_details, { reason: 'max_output_tokens' });
    assert.equal(cut.output.at(-1).status, 'incomplete');
    assert.equal(cut.usage.output_tokens, 8);
    const call = await both({ input: question, ...high, tools });
    assert.equal(of(call, 'function_call')[0].arguments, '{"city":"Lisbon"}');
});

await test('stream', async () => {
    const stream = await create('Hello!', { ...low, stream: true });
    let text = '', id;
    for await (const event of stream) {
        if (event.type === 'response.created')
            id = event.response.id;
        if (event.type === 'response.output_text.delta')
            text += event.delta;
        if (event.type === 'response.completed')
            assert.equal(event.response.id, id);
    }
    assert.equal(text, hello);
});

await test('stream helper', async () => {
    const deltas = [];
    const stream = client.responses.stream({ model, temperature: 0, input: 'What is 47 + 38?' })
        .on('response.output_text.delta', d => deltas.push(d.snapshot));
    const r = await stream.finalResponse();
    assert.equal(textOf(r), '47 + 38 = 85.');
    assert.equal(deltas.at(-1), textOf(r));
    assert.match(reasoningOf(r.output[0]), /So 85\.$/);
});

await test('tool loop', async () => {
    const input = [{ role: 'user', content: question }];
    const r = await create(input, { ...high, tools });
    const [call] = of(r, 'function_call');
    assert.equal(call.name, 'get_weather');
    assert.match(call.call_id, /^call_/);
    assert.deepEqual(JSON.parse(call.arguments), { city: 'Lisbon' });
    assert.equal(reasoningOf(of(r, 'reasoning')[0]), 'I call get_weather.');
    input.push(...r.output, { type: 'function_call_output', call_id: call.call_id, output: result });
    const last = await create(input, { ...high, tools });
    assert.equal(last.output_text, answer);
    assert.equal(last.usage.input_tokens, 277);         // the reference's own prompt
    const parts = await create([...input.slice(0, -1), { type: 'function_call_output', call_id: call.call_id,
        output: [{ type: 'input_text', text: result }] }], { ...high, tools });
    assert.equal(parts.usage.input_tokens, 277);
});

await test('tool loop by previous_response_id', async () => {
    const r = await create(question, { ...high, tools });
    const [call] = of(r, 'function_call');
    const last = await create([{ type: 'function_call_output', call_id: call.call_id, output: result }],
                              { ...high, tools, previous_response_id: r.id });
    assert.equal(last.output_text, answer);
    assert.equal(last.usage.input_tokens, 277);
    assert.equal(last.previous_response_id, r.id);
    const items = await client.responses.inputItems.list(last.id, { order: 'asc' });
    assert.deepEqual(items.data.map(i => i.type), ['message', 'reasoning', 'function_call', 'function_call_output']);
    assert.equal(items.data[0].content[0].text, question);
    const ids = [];
    for await (const item of client.responses.inputItems.list(last.id, { limit: 1, order: 'desc' }))
        ids.push(item.id);
    assert.deepEqual(ids, items.data.map(i => i.id).reverse());
    await client.responses.delete(r.id);                // the child still has it
    const again = await create('Hello!', { ...high, tools, previous_response_id: last.id });
    assert.ok(again.usage.input_tokens > 277);
    await refused(create('x', { previous_response_id: r.id }), 404, 'previous_response_not_found', 'previous_response_id');
});

await test('reasoning comes back as clients keep it', async () => {
    const count = async input => (await client.responses.inputTokens.count({ model, input, ...high, tools })).input_tokens;
    const call = { type: 'function_call', call_id: 'c', name: 'get_weather', arguments: '{"city":"Quito"}' };
    const out = { type: 'function_call_output', call_id: 'c', output: result };
    const text = 'I call get_weather.', user = { type: 'message', role: 'user', content: [{ type: 'input_text', text: 'Weather?' }] };
    const plain = await count([user, call, out]);
    const full = await count([user, { type: 'reasoning', content: [{ type: 'reasoning_text', text }], summary: [] }, call, out]);
    assert.ok(full > plain);
    for (const reasoning of [{ summary: [{ type: 'summary_text', text }] }, { summary: [], content: null, encrypted_content: `hoist:${text}` }])
        assert.equal(await count([user, { type: 'reasoning', id: 'rs_1', ...reasoning }, call, out]), full);
    // kinds of items that only run elsewhere, and unknown ones, are left out
    assert.equal(await count([user, { type: 'web_search_call', id: 'ws', status: 'completed', action: {} }, { type: 'agent_thing', x: 1 }, call, out]), plain);
});

await test('references', async () => {
    const r = await create(question, { ...high, tools });
    const [call] = of(r, 'function_call');
    const last = await create([{ role: 'user', content: question },
        ...r.output.map(item => ({ type: 'item_reference', id: item.id })),
        { type: 'function_call_output', call_id: call.call_id, output: result }], { ...high, tools });
    assert.equal(last.output_text, answer);
    await refused(create([{ type: 'item_reference', id: 'msg_none' }]), 404, 'item_not_found', 'input[0]');
});

await test('kept', async () => {
    const r = await create('Hello!', low);
    const kept = await client.responses.retrieve(r.id);
    assert.deepEqual(shape(kept), shape(r));
    assert.deepEqual(kept.output, r.output);
    await client.responses.delete(r.id);
    await refused(client.responses.retrieve(r.id), 404, 'response_not_found', 'response_id');
    await refused(client.responses.delete(r.id), 404, 'response_not_found', 'response_id');
    const not = await create('Hello!', { ...low, store: false });
    await refused(client.responses.retrieve(not.id), 404, 'response_not_found', 'response_id');
    const streamed = check(await events('/v1/responses', { input: 'Hello!', ...low }));
    assert.deepEqual((await client.responses.retrieve(streamed.id)).output, streamed.output);
});

await test('cancel', async () => {
    const stream = await create('Once upon a time', { stream: true, ignore_eos: true, max_output_tokens: 20000 });
    let id, n = 0, last, cancelled;
    for await (const event of stream) {
        id ??= event.response.id;
        if (++n === 10) {
            assert.equal((await client.responses.retrieve(id)).status, 'in_progress');
            await refused(create('x', { previous_response_id: id }), 400, 'invalid_value', 'previous_response_id');
            cancelled = client.responses.cancel(id);
        }
        last = event;
    }
    assert.equal((await cancelled).status, 'cancelled');
    assert.equal(last.type, 'response.incomplete');
    assert.equal(last.response.status, 'cancelled');
    await becomesIdle();
    const done = await create('Hello!', low);
    assert.equal((await client.responses.cancel(done.id)).status, 'completed');
    await refused(client.responses.cancel('resp_none'), 404, 'response_not_found', 'response_id');
});

await test('abort frees the place', async () => {
    for (let i = 0; i < 3; i++) {
        let n = 0;
        for await (const _ of await create('Once upon a time', { stream: true, ignore_eos: true, max_output_tokens: 20000 }))
            if (++n === 6)
                break;
        await becomesIdle();
    }
});

await test('structured output', async () => {
    const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150), tags: z.array(z.enum(['a', 'b'])).max(3) });
    const ask = { model, temperature: 0, input: 'Extract name, age, city as JSON: Alice is 34 years old and lives in Paris.',
                  text: { format: zodTextFormat(schema, 'person') } };
    const r = await client.responses.parse(ask);
    schema.parse(r.output_parsed);
    const streamed = await client.responses.stream(ask).finalResponse();
    schema.parse(streamed.output_parsed);
    JSON.parse((await create('Hello!', { text: { format: { type: 'json_object' } }, max_output_tokens: 400 })).output_text);
    assert.equal((await create('Hello!', { ...low, text: { format: { type: 'text' }, verbosity: 'low' } })).output_text, hello);
});

await test('logprobs', async () => {
    const r = await create('Hello!', { ...low, top_logprobs: 3, include: ['message.output_text.logprobs'] });
    const { text, logprobs } = r.output[0].content[0];
    assert.equal(logprobs.map(t => t.token).join(''), text);
    for (const t of logprobs) {
        assert.equal(t.top_logprobs.length, 3);
        assert.equal(t.top_logprobs[0].logprob, t.logprob);
    }
});

await test('custom tools', async () => {
    // To the model a custom tool is a function of one string; this one stands in for get_weather.
    const custom = [{ type: 'custom', name: 'get_weather', description: 'Get the current weather of a city.',
                      format: { type: 'grammar', syntax: 'lark', definition: 'start: WORD' } },
                    { type: 'web_search' }, { type: 'local_shell' }];
    const list = await events('/v1/responses', { temperature: 0, input: question, ...high, tools: custom, max_output_tokens: 60 });
    const r = check(list);
    const [call] = of(r, 'custom_tool_call');
    assert.ok(call, `no call in ${JSON.stringify(r.output)}`);
    assert.equal(call.name, 'get_weather');
    assert.match(call.id, /^ctc_/);
    const n = await client.responses.inputTokens.count({ model, tools: custom, input: [{ role: 'user', content: question },
        { type: 'custom_tool_call', call_id: 'c', name: 'get_weather', input: 'Lisbon' },
        { type: 'custom_tool_call_output', call_id: 'c', output: 'foggy' }] });
    assert.ok(n.input_tokens > 100);
});

await test('a turn as Codex sends it', async () => {
    const r = await create([
        { type: 'message', role: 'developer', content: [{ type: 'input_text', text: '<permissions>none</permissions>' }] },
        { type: 'message', role: 'user', content: [{ type: 'input_text', text: '<environment_context/>' }] },
        { type: 'message', role: 'user', content: [{ type: 'input_text', text: 'Hello!' }] }],
        { instructions: 'You are a coding agent.', stream: false, store: false, parallel_tool_calls: false, tool_choice: 'auto',
          include: ['reasoning.encrypted_content'], prompt_cache_key: '0199', reasoning: { effort: 'medium', summary: 'auto' },
          text: { verbosity: 'low' }, max_output_tokens: 50, tools: [...tools,
          { type: 'custom', name: 'apply_patch', description: 'Edits files.', format: { type: 'grammar', syntax: 'lark', definition: 'start: "x"' } },
          { type: 'web_search', external_web_access: false }, { type: 'namespace', name: 'mcp', description: 'd', tools: [] }] });
    assert.ok(['completed', 'incomplete'].includes(r.status));
    assert.equal(r.prompt_cache_key, '0199');
    assert.equal(r.store, false);
});

await test('roles and prefixes', async () => {
    const count = async input => (await client.responses.inputTokens.count({ model, input })).input_tokens;
    const a = await count([{ role: 'system', content: 'Be brief.' }, { role: 'user', content: 'Hi' }]);
    assert.equal(await count([{ role: 'developer', content: 'Be brief.' }, { role: 'user', content: 'Hi' }]), a);
    assert.equal((await client.responses.inputTokens.count({ model, instructions: 'Be brief.', input: 'Hi' })).input_tokens, a);
    await count([{ role: 'user', content: 'Hi' }, { role: 'assistant', content: 'Ho' }, { role: 'system', content: 'Now' }, { role: 'user', content: 'Hi' }]);
});

await test('errors', async () => {
    await refused(create(undefined), 400, 'missing_required_parameter', 'input');
    await refused(create([]), 400, 'invalid_value', 'input');
    await refused(create(5), 400, 'invalid_type', 'input');
    await refused(create('x', { temperature: 'hot' }), 400, 'invalid_type', 'temperature');
    await refused(create('x', { max_output_tokens: 'many' }), 400, 'invalid_type', 'max_output_tokens');
    await refused(create('x', { max_output_tokens: 0 }), 400, 'invalid_value', 'max_output_tokens');
    await refused(create('x', { reasoning: { effort: 'heroic' } }), 400, 'invalid_value', 'reasoning.effort');
    await refused(create('x', { text: { format: { type: 'yaml' } } }), 400, 'invalid_value', 'text.format.type');
    await refused(create('x', { text: { format: { type: 'json_schema', name: 'a', schema: { not: {} } } } }), 400, 'unsupported_value', 'text.format');
    await refused(create('x', { background: true }), 400, 'unsupported_value', 'background');
    await refused(create('x', { conversation: 'conv_1' }), 400, 'unsupported_value', 'conversation');
    await refused(create('x', { truncation: 'middle' }), 400, 'invalid_value', 'truncation');
    await refused(create('x', { tools: 'all' }), 400, 'invalid_type', 'tools');
    await refused(create('x', { tools, tool_choice: 'perhaps' }), 400, 'invalid_value', 'tool_choice');
    await refused(create('x', { tools, tool_choice: { type: 'function', name: 'other' } }), 400, 'invalid_value', 'tool_choice');
    await refused(create([{ role: 'user', content: [{ type: 'input_image', image_url: 'data:,' }] }]), 400, 'invalid_value', 'input[0].content[0]');
    await refused(create([{ role: 'user', content: 'x' }, { type: 'function_call', call_id: 'c', name: 'f', arguments: '{' }]),
                  400, 'invalid_value', 'input[1].arguments');
    await refused(create([{ role: 'robot', content: 'x' }]), 400, 'invalid_value', 'input[0].role');
    await refused(create('word '.repeat(40000), { stream: true }), 400, 'context_length_exceeded', 'input');
    await refused(client.responses.retrieve('resp_none'), 404, 'response_not_found', 'response_id');
    assert.equal((await post('/v1/responses', '{"input":"\xff')).status, 400);
    assert.equal((await fetch(`${root}/v1/responses/x/y/z`)).status, 404);
});

await test('at once', async () => {
    const all = await Promise.all(Array.from({ length: 16 }, (_, i) => i % 2 ? create('Hello!', low) :
        client.responses.stream({ model, temperature: 0, input: 'Hello!', ...low }).finalResponse()));
    for (const r of all)
        assert.equal(textOf(r), hello);
    assert.equal(new Set(all.map(r => r.id)).size, 16);
});

await test('tool choice', async () => {
    const ask = tool_choice => create('Hello!', { ...low, tools, tool_choice });
    for (const [choice, names] of [['required', ['get_weather', 'search']], [{ type: 'function', name: 'search' }, ['search']],
                                   [{ type: 'allowed_tools', mode: 'required', tools: [{ type: 'function', name: 'search' }] }, ['search']]]) {
        const calls = of(await ask(choice), 'function_call');
        assert.ok(calls.length > 0);
        for (const c of calls) {
            assert.ok(names.includes(c.name));
            JSON.parse(c.arguments);
        }
    }
    assert.equal(of(await create(question, { ...high, tools, tool_choice: 'none', max_output_tokens: 60 }), 'function_call').length, 0);
    assert.equal(of(await create('Hello!', { ...low, tools, tool_choice: 'required', parallel_tool_calls: false }), 'function_call').length, 1);
});
