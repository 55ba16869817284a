// ai_sdk.mjs - Vercel's AI SDK through its three providers, and LangChain, against a running server with the
// demo model.
//
//   node tests/ai_sdk.mjs http://127.0.0.1:PORT
//
// Each provider checks every chunk against its own schema. Answers come from the demo model's own reference.
import assert from 'node:assert/strict';
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from 'ai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { ChatOpenAI } from '@langchain/openai';
import { AIMessage, HumanMessage, ToolMessage } from '@langchain/core/messages';
import { z } from 'zod';
import { answer, functions, hello, question, rejected, result, root, suite } from './client.mjs';

const test = suite('ai_sdk');
const model = (await (await fetch(`${root}/v1/models`)).json()).data[0].id;
const asked = [];                               // bodies of requests through the compatible provider

// Some providers leave out the temperature where they think that the model has none.
const greedy = (url, init) => {
    const body = { ...JSON.parse(init.body), temperature: 0 };
    return fetch(url, { ...init, body: JSON.stringify(body) });
};
const at = { baseURL: `${root}/v1`, apiKey: 'any', fetch: greedy };
const openai = createOpenAI(at);
globalThis.AI_SDK_LOG_WARNINGS = false;

const providers = {
    compatible: {
        model: createOpenAICompatible({ ...at, name: 'hoist', supportsStructuredOutputs: true, includeUsage: true,
            fetch: (url, init) => (asked.push(JSON.parse(init.body)), greedy(url, init)) })(model),
        low: { hoist: { reasoningEffort: 'low' } }, high: { hoist: { reasoningEffort: 'high' } }, max: {},
    },
    chat: {
        model: openai.chat(model),
        low: { openai: { reasoningEffort: 'low' } }, high: { openai: { reasoningEffort: 'high' } }, max: {}, silent: true,
    },
    responses: {
        model: openai.responses(model),
        low: { openai: { reasoningEffort: 'low', forceReasoning: true } },
        high: { openai: { reasoningEffort: 'high', reasoningSummary: 'auto', forceReasoning: true } },
        max: { openai: { reasoningSummary: 'auto', forceReasoning: true } },
    },
    'responses, not kept': {
        model: openai.responses(model),
        low: { openai: { reasoningEffort: 'low', forceReasoning: true, store: false } },
        high: { openai: { reasoningEffort: 'high', reasoningSummary: 'auto', forceReasoning: true, store: false, include: ['reasoning.encrypted_content'] } },
        max: { openai: { reasoningSummary: 'auto', forceReasoning: true, store: false } },
    },
    anthropic: {
        model: createAnthropic(at)(model),
        low: { anthropic: { thinking: { type: 'disabled' } } },
        high: { anthropic: { thinking: { type: 'adaptive' }, effort: 'high' } },
        max: { anthropic: { thinking: { type: 'adaptive' } } },
    },
};

const run = { get_weather: async ({ city }) => { assert.equal(city, 'Lisbon'); return result; }, search: async () => 'nothing' };
const tools = Object.fromEntries(functions.map(f => [f.name,
    tool({ description: f.description, inputSchema: jsonSchema(f.parameters), execute: run[f.name] })]));
const person = z.object({ name: z.string(), age: z.number() });

for (const [name, p] of Object.entries(providers)) {
    const base = { model: p.model, temperature: 0, maxOutputTokens: 300, maxRetries: 0 };
    const streamed = async options => {
        const parts = [];
        const r = streamText({ ...base, ...options, onError: () => {} });
        for await (const part of r.fullStream) {
            if (part.type === 'error')
                throw part.error;
            parts.push(part);
        }
        return { parts, text: await r.text, reasoningText: await r.reasoningText, steps: await r.steps, usage: await r.usage,
                 finishReason: await r.finishReason };
    };

    await test(`${name}: generateText, streamText`, async () => {
        for (const go of [generateText, streamed]) {
            const r = await go({ ...base, prompt: 'Hello!', providerOptions: p.low });
            assert.equal(r.text, hello);
            assert.equal(r.finishReason, 'stop');
            assert.ok([12, 13].includes(r.usage.inputTokens));
            assert.ok(r.usage.outputTokens >= 10);
        }
    });

    await test(`${name}: reasoning`, async () => {
        for (const go of [generateText, streamed]) {
            const r = await go({ ...base, prompt: 'What is 47 + 38?', providerOptions: p.max });
            assert.equal(r.text, '47 + 38 = 85.');
            if (!p.silent)                      // the provider for OpenAI's own chat drops reasoning
                assert.match(r.reasoningText, /So 85\.$/);
        }
    });

    await test(`${name}: deltas`, async () => {
        const r = await streamed({ prompt: 'What is 47 + 38?', providerOptions: p.max });
        assert.equal(r.parts.filter(x => x.type === 'text-delta').map(x => x.text).join(''), r.text);
        assert.ok(r.parts.filter(x => x.type === 'text-delta').length > 3);
    });

    await test(`${name}: tool loop`, async () => {
        for (const go of [generateText, streamed]) {
            const r = await go({ ...base, prompt: question, tools, stopWhen: stepCountIs(3), providerOptions: p.high });
            assert.equal(r.text, answer);
            assert.equal(r.steps.length, 2);
            assert.equal(r.steps[0].finishReason, 'tool-calls');
            assert.equal(r.steps[0].toolCalls[0].toolName, 'get_weather');
            assert.deepEqual(r.steps[0].toolCalls[0].input, { city: 'Lisbon' });
        }
    });

    await test(`${name}: structured output`, async () => {
        const modes = name === 'anthropic' ? ['outputFormat', 'jsonTool'].map(structuredOutputMode =>
            ({ anthropic: { ...p.low.anthropic, structuredOutputMode } })) : [p.low];
        for (const providerOptions of modes)
            for (const go of [generateText, streamed]) {
                const r = await go({ ...base, prompt: 'Extract name, age, city as JSON: Alice is 34 years old and lives in Paris.',
                                     output: Output.object({ schema: person }), providerOptions });
                person.parse(JSON.parse(r.text));
            }
    });

    await test(`${name}: errors`, async () => {
        const e = await rejected(generateText({ ...base, prompt: 'word '.repeat(40000) }));
        assert.equal(e.statusCode, 400);
        assert.match(e.message, name === 'anthropic' ? /prompt is too long/ : /the context/);
    });
}

// The provider that sends reasoning back sends it in the field that answers have it in.
await test('compatible: reasoning is sent back', () => {
    const back = asked.flatMap(b => b.messages).filter(m => m.role === 'assistant' && m.tool_calls);
    assert.ok(back.length > 0);
    for (const m of back)
        assert.equal(m.reasoning_content, 'I call get_weather.');
});

const chat = more => new ChatOpenAI({ model, temperature: 0, apiKey: 'any', maxRetries: 0, configuration: { baseURL: `${root}/v1` }, ...more });

for (const useResponsesApi of [false, true]) {
    const name = useResponsesApi ? 'langchain, responses' : 'langchain, chat';
    const high = useResponsesApi ? { reasoning: { effort: 'high' } } : { modelKwargs: { reasoning_effort: 'high' } };
    const low = useResponsesApi ? { reasoning: { effort: 'low' } } : { modelKwargs: { reasoning_effort: 'low' } };

    await test(`${name}: invoke, stream`, async () => {
        const llm = chat({ useResponsesApi, ...low });
        assert.equal((await llm.invoke('Hello!')).text, hello);
        let all;
        for await (const chunk of await llm.stream('Hello!'))
            all = all === undefined ? chunk : all.concat(chunk);
        assert.equal(all.text, hello);
        assert.equal(all.usage_metadata.input_tokens, 12);
    });

    await test(`${name}: tools`, async () => {
        const llm = chat({ useResponsesApi, ...high }).bindTools(functions.map(f => ({ type: 'function', function: f })));
        const messages = [new HumanMessage(question)];
        const r = await llm.invoke(messages);
        assert.deepEqual(r.tool_calls.map(c => [c.name, c.args]), [['get_weather', { city: 'Lisbon' }]]);
        let all;
        for await (const chunk of await llm.stream(messages))
            all = all === undefined ? chunk : all.concat(chunk);
        assert.deepEqual(all.tool_calls.map(c => [c.name, c.args]), [['get_weather', { city: 'Lisbon' }]]);
        messages.push(new AIMessage({ content: '', tool_calls: r.tool_calls }),
                      new ToolMessage({ content: result, tool_call_id: r.tool_calls[0].id }));
        assert.equal((await llm.invoke(messages)).text, answer);
    });

    await test(`${name}: structured output`, async () => {
        const llm = chat({ useResponsesApi, ...low }).withStructuredOutput(person, { method: 'jsonSchema' });
        person.parse(await llm.invoke('Extract name, age, city as JSON: Alice is 34 years old and lives in Paris.'));
    });
}
