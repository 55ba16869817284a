// schemas.mjs - masks of JSON schemas judged by ajv, both ways.
//
//   node tests/schemas.mjs build/test/grammar_driver
//
// Some hundred schemas as clients send them. Forth: documents walked at random over our
// masks must satisfy the schema. Back: documents made from the schema by the generator
// below, which knows nothing of our grammars, and found valid by ajv, must be accepted.
// Schemas of objects are also parameters of tools: calls in the model's markup, both ways.
// Prints "ok NAME" or "not ok NAME: why".
import { spawnSync } from 'node:child_process';
import Ajv2020 from 'ajv/dist/2020.js';
import addFormats from 'ajv-formats';

const ajv = new Ajv2020({ strict: false, multipleOfPrecision: 6 });
addFormats(ajv);
let state = 12345;
const random = () => { state = (Math.imul(state, 1664525) + 1013904223) >>> 0; return state / 2 ** 32; };
const below = n => Math.floor(random() * n);
const pick = a => a[below(a.length)];

// ---- schemas -----------------------------------------------------------------

const all = [];
const add = (name, schema) => all.push({ name, schema });
const object = (properties, required = Object.keys(properties), more = {}) =>
    ({ type: 'object', properties, required, additionalProperties: false, ...more });
const s = (more = {}) => ({ type: 'string', ...more });
const i = (more = {}) => ({ type: 'integer', ...more });
const n = (more = {}) => ({ type: 'number', ...more });
const b = { type: 'boolean' };
const list = (items, more = {}) => ({ type: 'array', items, ...more });
const orNull = x => ({ anyOf: [x, { type: 'null' }] });

// Leaves: each kind of value with each kind of bound.
const leaves = {
    string: s(), 'string min': s({ minLength: 1 }), 'string bounds': s({ minLength: 2, maxLength: 12 }),
    'string max': s({ maxLength: 5 }), 'string long': s({ minLength: 40, maxLength: 90 }),
    'pattern id': s({ pattern: '^[a-z][a-z0-9_]{2,15}$' }), 'pattern free': s({ pattern: '[0-9]{3}' }),
    'pattern phone': s({ pattern: '^\\+?[1-9]\\d{6,13}$' }), 'pattern hex': s({ pattern: '^#([0-9a-fA-F]{3}){1,2}$' }),
    'pattern semver': s({ pattern: '^(0|[1-9]\\d*)\\.(0|[1-9]\\d*)\\.(0|[1-9]\\d*)$' }),
    'pattern sku': s({ pattern: '^(SKU|ART)-[A-Z]{2}\\d{4}$' }), 'pattern arn': s({ pattern: '^arn:aws:[a-z0-9]+:[a-z0-9-]*:\\d{12}:.+$' }),
    'pattern length': s({ pattern: '^[A-Z]+$', minLength: 2, maxLength: 4 }),
    'pattern words': s({ pattern: '^\\w+( \\w+)*$' }), 'pattern not': s({ pattern: '^[^\\s@]+@[^\\s@]+$' }),
    date: s({ format: 'date' }), time: s({ format: 'time' }), 'date-time': s({ format: 'date-time' }),
    uuid: s({ format: 'uuid' }), email: s({ format: 'email' }), ipv4: s({ format: 'ipv4' }), uri: s({ format: 'uri' }),
    hostname: s({ format: 'hostname', maxLength: 60 }),
    integer: i(), 'integer 0..100': i({ minimum: 0, maximum: 100 }), 'integer year': i({ minimum: 1900, maximum: 2100 }),
    'integer negative': i({ minimum: -40, maximum: -3 }), 'integer exclusive': i({ exclusiveMinimum: 0, exclusiveMaximum: 10 }),
    'integer above': i({ minimum: 1 }), 'integer below': i({ maximum: -7 }), 'integer port': i({ minimum: 1, maximum: 65535 }),
    'integer multiple': i({ multipleOf: 5 }), 'integer multiple bound': i({ multipleOf: 4, minimum: 10, maximum: 90 }),
    number: n(), 'number unit': n({ minimum: 0, maximum: 1 }), 'number price': n({ minimum: 0, multipleOf: 0.01, maximum: 1e6 }),
    'number latitude': n({ minimum: -90, maximum: 90 }), 'number open': n({ exclusiveMinimum: -1.5, exclusiveMaximum: 2.25 }),
    'number above': n({ exclusiveMinimum: 0 }), boolean: b, null: { type: 'null' },
    'enum strings': { enum: ['red', 'green', 'blue'] }, 'enum typed': s({ enum: ['celsius', 'fahrenheit'] }),
    'enum odd': { enum: ['a"b', 'c\\d', 'é', '', ' x', 'tab\t', '</arg_value>'] }, 'enum mixed': { enum: ['auto', 1, 2.5, true, null] },
    'enum numbers': { enum: [1, 2, 3, 5, 8] }, 'enum like json': { enum: ['1', 'true', 'null', '[]'] },
    'enum typed like json': s({ enum: ['1', 'true', 'None', '{}'] }), const: { const: 'v1' }, 'const number': { const: 42 },
    'const object': { const: { a: [1, 'x'] } }, 'string or null': { type: ['string', 'null'] },
    'integer or string': { type: ['integer', 'string'] }, 'number or null': { type: ['number', 'null'] },
    'optional string': orNull(s()), 'optional bounded': orNull(s({ minLength: 1, maxLength: 8 })),
    'optional integer': orNull(i({ minimum: 0 })), 'optional enum': orNull(s({ enum: ['asc', 'desc'] })),
    'bounded integer or string': { anyOf: [i({ minimum: 5, maximum: 9 }), s()] },
    'list or string': { anyOf: [list(s(), { maxItems: 2 }), s()] }, 'object or string': { oneOf: [object({ id: i() }), s()] },
    'string filled or null': orNull(s({ minLength: 1 })), any: {}, 'any described': { description: 'whatever' },
    'list of strings': list(s()), 'list bounds': list(i({ minimum: 0, maximum: 9 }), { minItems: 2, maxItems: 4 }),
    'list one': list(b, { minItems: 1, maxItems: 1 }), 'list empty': list(s(), { maxItems: 0 }), 'list any': { type: 'array' },
    'list of lists': list(list(i({ minimum: 0, maximum: 9 }), { maxItems: 3 }), { maxItems: 3 }),
    'list many': list(i({ minimum: 0, maximum: 1 }), { minItems: 10, maxItems: 40 }),
    tuple: { type: 'array', prefixItems: [s(), i(), b], items: false, minItems: 3 },
    'tuple rest': { type: 'array', prefixItems: [s({ maxLength: 3 })], items: i({ minimum: 0 }) },
    point: object({ x: n(), y: n() }), 'object free': { type: 'object' },
    'object map': { type: 'object', additionalProperties: i({ minimum: 0, maximum: 9 }) },
    'object map min': { type: 'object', additionalProperties: s({ maxLength: 3 }), minProperties: 1, maxProperties: 3 },
    'object names': { type: 'object', propertyNames: { pattern: '^[a-z]{1,8}$' }, additionalProperties: b },
    'object patterns': { type: 'object', patternProperties: { '^x-': s({ maxLength: 4 }) }, additionalProperties: false },
};
for (const [name, schema] of Object.entries(leaves)) {
    add(`leaf ${name}`, schema);
    add(`member ${name}`, object({ before: s({ maxLength: 4 }), value: schema, after: b }, ['value']));
}
for (const [name, schema] of Object.entries(leaves))
    add(`items ${name}`, object({ values: list(schema, { minItems: 1, maxItems: 3 }) }));

// Required and optional members in every pattern.
for (let mask = 0; mask < 16; mask++) {
    const properties = { a: i({ minimum: 0, maximum: 9 }), b: s({ maxLength: 3 }), c: b, d: orNull(n()) };
    add(`required ${mask}`, object(properties, Object.keys(properties).filter((_, k) => mask >> k & 1)));
}
add('members many', object(Object.fromEntries(Array.from({ length: 40 }, (_, k) => [`field_${k}`, k % 3 ? s({ maxLength: 2 }) : i({ minimum: 0, maximum: 9 })])),
                           ['field_0', 'field_7', 'field_39']));
add('members 31', object(Object.fromEntries(Array.from({ length: 31 }, (_, k) => [`f${k}`, b])), ['f30']));
add('members odd', object({ 'a b': i(), 'q"uote': s({ maxLength: 2 }), 'ünïcode': b, '$ref-like': b, 'x.y/z~': b }, ['a b']));
add('open', { type: 'object', properties: { a: i() }, required: ['a'], additionalProperties: true });
add('open typed', { type: 'object', properties: { kind: { enum: ['k'] } }, required: ['kind'], additionalProperties: s({ maxLength: 3 }) });
add('no members', object({}));

// What people extract, plan and call.
const address = object({ street: s({ minLength: 1 }), city: s({ minLength: 1 }), zip: s({ pattern: '^\\d{5}$' }), country: s({ minLength: 2, maxLength: 2, pattern: '^[A-Z]{2}$' }) });
const person = object({ name: s({ minLength: 1 }), age: i({ minimum: 0, maximum: 150 }), email: s({ format: 'email' }), address }, ['name', 'age']);
const message = object({ role: { enum: ['system', 'user', 'assistant'] }, content: s() });
add('address', address);
add('person', person);
add('people', object({ people: list(person, { minItems: 1, maxItems: 2 }) }));
add('weather', object({ location: s({ description: 'City and country' }), unit: s({ enum: ['celsius', 'fahrenheit'] }) }, ['location']));
add('search', object({ query: s(), limit: i({ minimum: 1, maximum: 50, default: 10 }), filters: object({ site: s(), after: s({ format: 'date' }) }, []) }, ['query']));
add('read file', object({ path: s(), offset: i({ minimum: 0 }), limit: i({ minimum: 1 }) }, ['path']));
add('edit file', object({ path: s(), edits: list(object({ old: s(), new: s(), all: b }, ['old', 'new']), { minItems: 1, maxItems: 3 }) }));
add('write file', object({ path: s(), content: s() }));
add('bash', object({ command: s(), timeout: n({ minimum: 0, maximum: 600000 }), description: s() }, ['command']));
add('todo', object({ todos: list(object({ id: s(), content: s({ minLength: 1 }), status: s({ enum: ['pending', 'in_progress', 'completed'] }), priority: s({ enum: ['high', 'medium', 'low'] }) }), { maxItems: 3 }) }));
add('email', object({ to: list(s({ format: 'email' }), { minItems: 1, maxItems: 2 }), subject: s({ maxLength: 40 }), body: s(), cc: orNull(list(s({ format: 'email' }), { maxItems: 2 })) }, ['to', 'subject', 'body']));
add('calendar', object({ title: s(), start: s({ format: 'date-time' }), end: s({ format: 'date-time' }), attendees: list(s(), { maxItems: 3 }), remind: orNull(i({ minimum: 0, maximum: 1440 })) }, ['title', 'start']));
add('invoice', object({ number: s({ pattern: '^INV-\\d{6}$' }), date: s({ format: 'date' }), lines: list(object({ sku: s({ maxLength: 8 }), quantity: i({ minimum: 1, maximum: 999 }), price: n({ minimum: 0, multipleOf: 0.01, maximum: 9999 }) }), { minItems: 1, maxItems: 3 }), currency: { enum: ['EUR', 'USD'] }, paid: b }));
add('classification', object({ label: { enum: ['spam', 'ham', 'unsure'] }, confidence: n({ minimum: 0, maximum: 1 }), reasons: list(s({ maxLength: 20 }), { maxItems: 3 }) }));
add('steps', object({ steps: list(object({ explanation: s(), output: s() }), { maxItems: 3 }), final_answer: s() }));
add('chat', object({ model: s(), messages: list(message, { minItems: 1, maxItems: 3 }), temperature: n({ minimum: 0, maximum: 2 }), stop: { anyOf: [s(), list(s(), { maxItems: 4 })] } }, ['model', 'messages']));
add('geo', { type: 'object', properties: { type: { const: 'Point' }, coordinates: { type: 'array', prefixItems: [n({ minimum: -180, maximum: 180 }), n({ minimum: -90, maximum: 90 })], items: false, minItems: 2 } }, required: ['type', 'coordinates'], additionalProperties: false });
add('union by kind', { anyOf: [object({ kind: { const: 'circle' }, r: n({ minimum: 0 }) }), object({ kind: { const: 'square' }, side: n({ minimum: 0 }) }), object({ kind: { const: 'none' } })] });
add('shapes', object({ shapes: list({ oneOf: [object({ kind: { const: 'circle' }, r: n() }), object({ kind: { const: 'line' }, to: list(n(), { minItems: 2, maxItems: 2 }) })] }, { maxItems: 3 }) }));
add('defs', { $defs: { id: s({ pattern: '^[a-f0-9]{8}$' }), ref: object({ id: { $ref: '#/$defs/id' } }) }, ...object({ head: { $ref: '#/$defs/ref' }, tail: list({ $ref: '#/$defs/ref' }, { maxItems: 2 }) }) });
add('tree', { $defs: { node: object({ value: i({ minimum: 0, maximum: 9 }), children: list({ $ref: '#/$defs/node' }, { maxItems: 2 }) }, ['value']) }, $ref: '#/$defs/node' });
add('linked list', { $defs: { link: object({ v: b, next: orNull({ $ref: '#/$defs/link' }) }) }, $ref: '#/$defs/link' });
add('expression', { $defs: { e: { anyOf: [n({ minimum: 0, maximum: 9 }), object({ op: { enum: ['+', '*'] }, args: list({ $ref: '#/$defs/e' }, { minItems: 1, maxItems: 2 }) })] } }, ...object({ e: { $ref: '#/$defs/e' } }) });
add('ui', { $defs: { ui: object({ type: { enum: ['div', 'button'] }, label: s({ maxLength: 5 }), children: list({ $ref: '#' }, { maxItems: 2 }) }) }, ...object({ type: { enum: ['div', 'button'] }, label: s({ maxLength: 5 }), children: list({ $ref: '#' }, { maxItems: 2 }) }) });
add('allOf', { allOf: [{ type: 'object', properties: { a: i() }, required: ['a'] }, { properties: { b: s({ maxLength: 2 }) }, required: ['b'] }] });
add('allOf bounds', object({ v: { allOf: [i({ minimum: 0 }), i({ maximum: 20 }), { multipleOf: 2 }] } }));
add('pydantic', { $defs: { Color: { enum: ['r', 'g'], title: 'Color', type: 'string' }, Item: { properties: { name: s({ title: 'Name' }), color: { $ref: '#/$defs/Color' }, tags: { default: [], items: s(), title: 'Tags', type: 'array', maxItems: 2 } }, required: ['name', 'color'], title: 'Item', type: 'object' } }, properties: { items: list({ $ref: '#/$defs/Item' }, { maxItems: 2, title: 'Items' }), note: { anyOf: [s(), { type: 'null' }], default: null, title: 'Note' } }, required: ['items'], title: 'Model', type: 'object' });
add('zod', { $schema: 'http://json-schema.org/draft-07/schema#', definitions: { r: object({ ok: b, value: { $ref: '#/definitions/v' } }), v: orNull(s()) }, ...object({ r: { $ref: '#/definitions/r' } }) });
add('sql', object({ table: s({ pattern: '^[a-z_]{1,20}$' }), where: list({ type: 'array', prefixItems: [s({ maxLength: 6 }), { enum: ['=', '<', '>'] }, { type: ['string', 'number', 'boolean', 'null'] }], items: false, minItems: 3 }, { maxItems: 2 }), limit: orNull(i({ minimum: 1 })) }, ['table']));
add('k8s', object({ apiVersion: { const: 'v1' }, kind: { enum: ['Pod', 'Service'] }, metadata: { type: 'object', properties: { name: s({ pattern: '^[a-z0-9]([-a-z0-9]{0,10}[a-z0-9])?$' }), labels: { type: 'object', additionalProperties: s({ maxLength: 5 }), maxProperties: 2 } }, required: ['name'], additionalProperties: false }, spec: object({ ports: list(object({ port: i({ minimum: 1, maximum: 65535 }), protocol: { enum: ['TCP', 'UDP'] } }, ['port']), { maxItems: 2 }) }) }));
// Combinations of leaves, three by three.
const names = Object.keys(leaves);
for (let k = 0; k < 60; k++) {
    const three = [pick(names), pick(names), pick(names)];
    const properties = Object.fromEntries(three.map((x, j) => [`p${j}`, leaves[x]]));
    add(`mix ${k}: ${three.join(', ')}`, object(properties, Object.keys(properties).filter(() => below(2))));
}

// ---- documents of a schema ---------------------------------------------------

const texts = ['', 'a', 'Hello', 'two words', 'x"y', 'back\\slash', 'tab\tnew\nline', 'é中🙂', '<b>tag</b>', '{"a":1}', "it's", '12', 'null'];
const formats = { date: ['2024-02-29', '1999-12-31'], time: ['23:59:59Z', '01:02:03.5+02:00'], 'date-time': ['2024-02-29T12:00:00Z', '2000-01-01T00:00:00.123-05:30'],
    uuid: ['12345678-a89b-12d3-a456-42661417400f'], email: ['a@example.com', 'first.last+tag@sub.example.org'], ipv4: ['127.0.0.1', '255.250.9.10'],
    uri: ['https://example.com/a?b=c#d', 'http://localhost:8080/'], hostname: ['example.com', 'a-b.c'] };
const samples = ['abc', 'id_1', '123', '+491761234567', '4915112345678', '#fff', '#A1b2C3', '1.2.3', '0.10.0', 'SKU-AB1234', 'ART-ZZ0000',
    'arn:aws:s3:eu-west-1:123456789012:bucket/x', 'AB', 'ABCD', 'one two', 'me@host', 'INV-000123', '12345', 'DE', 'a1b2c3d4', 'users', 'web-1', 'k8s'];

function follow(ref, root) {
    return ref === '#' ? root : ref.slice(2).split('/').reduce((at, k) => at[k], root);
}

function make(schema, root, depth = 0) {
    if (schema === true || depth > 8)
        return depth % 2 ? 1 : 'x';
    if (schema.$ref)
        return make(follow(schema.$ref, root), root, depth + 1);
    if (schema.allOf)
        return make({ ...schema, ...Object.assign({}, ...schema.allOf), allOf: undefined,
                      properties: Object.assign({}, ...schema.allOf.map(x => x.properties ?? {})) }, root, depth + 1);
    for (const word of ['anyOf', 'oneOf'])
        if (schema[word])
            return make(pick(depth > 4 ? [schema[word].at(-1)] : schema[word]), root, depth + 1);
    if ('const' in schema)
        return schema.const;
    if (schema.enum)
        return pick(schema.enum);
    const type = Array.isArray(schema.type) ? pick(schema.type) : schema.type ?? (schema.properties ? 'object' : pick(['string', 'integer', 'boolean', 'array', 'object', 'null']));
    if (type === 'string') {
        if (schema.format)
            return pick(formats[schema.format]);
        if (schema.pattern)
            return pick(samples.filter(x => new RegExp(schema.pattern, 'u').test(x)).concat('none'));
        return Array.from(pick(texts).padEnd(schema.minLength ?? 0, 'z')).slice(0, schema.maxLength ?? 1000).join('');
    }
    if (type === 'integer' || type === 'number') {
        const lo = schema.minimum ?? schema.exclusiveMinimum ?? (schema.maximum ?? schema.exclusiveMaximum ?? 100) - 200;
        const hi = schema.maximum ?? schema.exclusiveMaximum ?? lo + 400;
        let v = lo + random() * (hi - lo);
        if (type === 'integer' || below(3) === 0)
            v = Math.round(v);
        else
            v = Math.round(v * 100) / 100;
        return schema.multipleOf ? Number((Math.round(v / schema.multipleOf) * schema.multipleOf).toFixed(2)) : v === 0 ? 0 : v;
    }
    if (type === 'boolean')
        return below(2) === 1;
    if (type === 'null')
        return null;
    if (type === 'array') {
        const out = (schema.prefixItems ?? []).map(x => make(x, root, depth + 1));
        const min = schema.minItems ?? 0, max = Math.min(schema.maxItems ?? min + 3, min + 3);
        const want = min + below(max - min + 1);
        while (out.length < want && schema.items !== false)
            out.push(make(schema.items ?? true, root, depth + 1));
        return out;
    }
    const out = {};
    for (const [key, sub] of Object.entries(schema.properties ?? {}))
        if (schema.required?.includes(key) || (depth < 5 && below(2)))
            out[key] = make(sub, root, depth + 1);
    if (schema.additionalProperties !== false && !schema.patternProperties && (schema.additionalProperties || !schema.properties))
        for (let k = below(2) + (schema.minProperties ?? 0); k > 0; k--)
            out[`k${'abc'[k]}`.replace(/[^a-z]/g, '')] = make(schema.additionalProperties ?? true, root, depth + 1);
    if (schema.patternProperties)
        out['x-a'] = 'v';
    return out;
}

// Numbers as people write them: no exponent.
const plain = v => !/[0-9]e[+-]?[0-9]/.test(JSON.stringify(v));

// With a space behind each comma and colon, as Python writes it.
function spaced(v) {
    if (Array.isArray(v))
        return `[${v.map(spaced).join(', ')}]`;
    if (v === null || typeof v !== 'object')
        return JSON.stringify(v);
    return `{${Object.entries(v).map(([k, x]) => `${JSON.stringify(k)}: ${spaced(x)}`).join(', ')}}`;
}

// ---- tools ---------------------------------------------------------------------

// The markup of the model's chat template.
function call(name, args, schema) {
    let out = `<tool_call>${name}`;
    for (const [k, v] of Object.entries(args))
        out += `<arg_key>${k}</arg_key><arg_value>${typeof v === 'string' ? v : JSON.stringify(v)}</arg_value>`;
    return out + '</tool_call>';
}

// Strings that the markup cannot tell from other JSON are quoted by careful models only;
// those that would be read as another type are no fair test of acceptance.
function unambiguous(args) {
    return !JSON.stringify(args).includes('</arg_value>') && Object.values(args).every(v => typeof v !== 'string' || (!/^[\s\d+\-.[{(tfnTFN"']/.test(v) && v !== ''));
}

// ---- both ways -------------------------------------------------------------------

let failed = 0, walked = 0, accepted = 0, calls = 0, unfinished = 0;
const report = (name, why) => { failed += why ? 1 : 0; console.log(why ? `not ok schemas/${name}: ${why}` : `ok schemas/${name}`); };

function run(lines) {
    const p = spawnSync(process.argv[2], { input: lines.map(l => JSON.stringify(l)).join('\n') + '\n', maxBuffer: 1 << 28 });
    if (p.status !== 0 || p.stderr.length > 0)
        throw new Error(`driver: ${p.status} ${p.stderr.toString().slice(0, 400)}`);
    return p.stdout.toString().trim().split('\n').map(l => JSON.parse(l));
}

const lines = [], judges = new Map();
for (const { name, schema } of all) {
    const valid = ajv.compile({ ...schema, $schema: undefined }), good = [];
    for (let k = 0; k < 40 && good.length < 8; k++) {
        const v = make(schema, schema);
        if (valid(v) && plain(v))
            good.push(v);
    }
    judges.set(name, { schema, valid, good });
    lines.push({ name, schema, walks: 6, accept: good.flatMap(v => [JSON.stringify(v), spaced(v)]) });
}
for (const { name, error, docs, accepted: taken } of run(lines)) {
    const { valid, good } = judges.get(name);
    let why = error;
    for (const d of docs ?? []) {
        let v;
        if (d.startsWith('UNFINISHED')) {
            unfinished++;
            continue;
        }
        walked++;
        try { v = JSON.parse(d); } catch { why ??= `no JSON: ${d}`; continue; }
        if (!valid(v))
            why ??= `${d}: ${ajv.errorsText(valid.errors)}`;
    }
    if (good.length === 0)
        why ??= 'the generator of the test makes no valid document';
    (taken ?? []).forEach((ok, k) => { accepted++; if (!ok) why ??= `refused: ${lines.find(l => l.name === name).accept[k]}`; });
    report(name, why);
}

const toolLines = [];
for (const { name, schema } of all) {
    if (schema.type !== 'object' || schema.patternProperties || schema.propertyNames || schema.minProperties)
        continue;
    const tools = [{ type: 'function', function: { name: 'first', strict: true, parameters: schema } },
                   { name: 'other', parameters: object({ n: i() }) }];
    const good = judges.get(name).good.filter(unambiguous);
    toolLines.push({ name, tools, spec: { format: 'glm', choice: 'required', tools }, walks: 6,
                     accept: good.map(v => call('first', v)) });
}
for (const { name, error, docs, accepted: taken } of run(toolLines)) {
    const { valid } = judges.get(name);
    const line = toolLines.find(l => l.name === name);
    let why = error;
    for (const d of docs ?? []) {
        let v;
        if (d.startsWith('UNFINISHED')) {
            unfinished++;
            continue;
        }
        try { v = JSON.parse(d); } catch { why ??= `no JSON: ${d}`; continue; }
        for (const c of v) {
            calls++;
            if (c.name === 'first' ? !valid(c.arguments) : c.name !== 'other' || !Number.isInteger(c.arguments.n))
                why ??= `${JSON.stringify(c)}: ${ajv.errorsText(valid.errors)}`;
        }
        if (v.length === 0)
            why ??= 'no call';
    }
    (taken ?? []).forEach((ok, k) => { accepted++; if (!ok) why ??= `refused: ${line.accept[k]}`; });
    report(`tool ${name}`, why);
}
if (unfinished * 50 > walked + calls)
    report('walks end', `${unfinished} of ${walked + calls} do not`);
console.log(`${all.length} schemas, ${toolLines.length} tools: ${walked} documents and ${calls} calls walked, ${unfinished} unfinished, ${accepted} documents accepted`);
process.exitCode = failed > 0 ? 1 : 0;
