// client.mjs - what the tests with official clients share: how they report, the demo model's tools,
// and raw requests. Prints "ok NAME" or "not ok NAME: why".
import assert from 'node:assert/strict';

export const root = (process.argv[2] ?? '').replace(/\/v1$/, '');

export function suite(prefix) {
    let failed = 0;
    const test = async (name, f) => {
        try {
            await f();
            console.log(`ok ${prefix}/${name}`);
        } catch (e) {
            failed++;
            console.log(`not ok ${prefix}/${name}: ${String(e.stack ?? e).split('\n').slice(0, 6).join(' ')}`);
        }
        process.exitCode = failed > 0 ? 1 : 0;
    };
    return test;
}

export async function rejected(promise) {
    try {
        await promise;
    } catch (e) {
        return e;
    }
    assert.fail('expected an error, got an answer');
}

export async function post(path, body, headers = {}) {
    const r = await fetch(root + path, { method: 'POST', headers: { 'content-type': 'application/json', ...headers },
                                         body: typeof body === 'string' ? body : JSON.stringify(body) });
    return { status: r.status, headers: r.headers, body: await r.json() };
}

// The events of a stream as they stand on the wire: [{ event, data }].
export async function events(path, body) {
    const r = await fetch(root + path, { method: 'POST', body: JSON.stringify({ ...body, stream: true }) });
    assert.equal(r.status, 200);
    assert.match(r.headers.get('content-type'), /^text\/event-stream/);
    const text = await r.text();
    assert.ok(text.endsWith('\n\n'));
    return text.split('\n\n').filter(e => e !== '' && !e.startsWith(':')).map(e => {
        const [, event, data] = /^event: (\S+)\ndata: (.*)$/.exec(e) ?? assert.fail(`not an event: ${e}`);
        return { event, data: JSON.parse(data) };
    });
}

export async function becomesIdle() {
    for (let i = 0; i < 40; i++, await new Promise(r => setTimeout(r, 25)))
        if (/^hoist_requests_running 0$/m.test(await (await fetch(`${root}/metrics`)).text()))
            return;
    assert.fail('a request still runs after a second');
}

// What the demo model was taught. It calls get_weather for this question, and from the result it answers.
export const functions = [
    { name: 'get_weather', description: 'Get the current weather of a city.',
      parameters: { type: 'object', properties: { city: { type: 'string', description: 'Name of the city' } },
                    required: ['city'] } },
    { name: 'search', description: 'Search the document store.',
      parameters: { type: 'object', properties: { query: { type: 'string', description: 'Search text' },
                    limit: { type: 'integer', description: 'Number of results' } },
                    required: ['query', 'limit'] } },
];
export const question = "What's the weather in Lisbon?";
export const result = '{"city": "Lisbon", "temperature": 17, "condition": "foggy"}';
export const answer = 'The weather in Lisbon is foggy with 17 degrees.';
export const hello = 'Hello! How can I help you today?';
