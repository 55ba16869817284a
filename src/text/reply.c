/* reply.c - splits what a model says into reasoning, content and tool calls.
 *
 * One table of formats (markers and argument syntax) and one table of rules (state,
 * marker, next state) that all formats share. Called by whoever turns a stream of
 * tokens into a chat message; must never need to see the end of a stream to hand out
 * its beginning, and must never let the way a stream was cut change the message.
 *
 * Where the pieces of a call's arguments leave no choice:
 *   a key given twice is written twice: the last one wins when the object is parsed, as
 *   JSON.parse(), Python and json-c do (RFC 8259 section 4 leaves it open);
 *   a string value is on the wire before its end is known, so a stream that ends
 *   inside one closes it where it was cut. Unfinished keys and other unfinished values
 *   are dropped. CALL_END out of hx_reply_end() tells that a call was cut. */
#include <math.h>

#include "text/text.h"

enum {
    HELD_MAX_BYTES = 16 << 20, /* names, keys, values and blanks not yet handed out */
    SLICE_BYTES = 64 << 10,    /* input taken at once: bounds the output buffer */
    DEPTH_MAX = 63,            /* of a value; hx_json_parse() takes 64 by default, and
                                * the arguments are one object more */
    SCHEMA_MAX = 64            /* schemas looked at for the type of one parameter */
};

/* ---- formats --------------------------------------------------------- */

typedef enum { CONTENT, REASONING, NAME, ARGS, KEY, VALUE, BODY, N_STATE } state;

/* The markers by the names of text.h; none of a format may occur inside another: the
 * shorter would always win. */
enum {
    THINK = HX_MARK_THINK,
    THINK_END = HX_MARK_THINK_END,
    CALL = HX_MARK_CALL,
    CALL_END = HX_MARK_CALL_END,
    ARG_KEY = HX_MARK_KEY,
    ARG_KEY_END = HX_MARK_KEY_END,
    ARG_VALUE = HX_MARK_VALUE,
    ARG_VALUE_END = HX_MARK_VALUE_END,
    N_MARKER
};
typedef int marker;

struct hx_reply_format {
    const char *name;
    const char *text[N_MARKER]; /* NULL: the format has no such marker */
    state call;                 /* argument syntax: where CALL leads. NAME: tagged
                                 * pairs; BODY: a JSON object; CONTENT: there are no
                                 * calls, and blank content is kept */
};

static const hx_reply_format formats[] = {
    { "glm",
      { [THINK] = "<think>",
        [THINK_END] = "</think>",
        [CALL] = "<tool_call>",
        [CALL_END] = "</tool_call>",
        [ARG_KEY] = "<arg_key>",
        [ARG_KEY_END] = "</arg_key>",
        [ARG_VALUE] = "<arg_value>",
        [ARG_VALUE_END] = "</arg_value>" },
      NAME },
    { "hermes",
      { [THINK] = "<think>",
        [THINK_END] = "</think>",
        [CALL] = "<tool_call>",
        [CALL_END] = "</tool_call>" },
      BODY },
    { "plain", { NULL }, CONTENT },
};

const hx_reply_format *hx_reply_find(const char *name)
{
    for (size_t i = 0; i < HX_LEN(formats); i++)
        if (name != NULL && strcmp(formats[i].name, name) == 0)
            return &formats[i];
    return NULL;
}

const char *hx_reply_marker(const hx_reply_format *f, hx_reply_mark m)
{
    return f->text[m];
}

/* ---- parser ---------------------------------------------------------- */

struct hx_reply {
    const hx_reply_format *format;
    const hx_json *tools;
    hx_str text[N_MARKER]; /* {NULL, 0}: not looked for */
    int32_t id[N_MARKER];  /* -1: found by its text only */
    bool first[256];       /* bytes a marker begins with */

    hx_utf8_stream utf8;
    hx_sb held;    /* whole characters that may begin a marker */
    size_t n_anon; /* how many of its last bytes came without a token id */

    state at;
    hx_sb word;    /* text of a name, key, value or body so far */
    hx_sb blank;   /* white space that is content if more follows */
    bool is_blank; /* no content yet since the start or the last call */

    const hx_json *schema; /* "parameters" of the open call; NULL: unknown */
    int32_t n_call;
    bool in_call;   /* CALL was handed out, CALL_END not yet */
    bool in_string; /* a string value was begun on the wire */
    bool has_key;
    size_t n_pair;
    hx_sb key;      /* of the pair being read */
    unsigned types; /* of its value */

    hx_sb out, tmp; /* the next event's text; scratch */
    hx_reply_kind out_kind;
    hx_reply_sink *sink; /* both valid during a call only */
    void *ud;
    bool ended;
    hx_err err; /* sticky */
};

static void fault_memory(hx_reply *r)
{
    if (r->err.code == 0)
        hx_fail(&r->err, HX_ENOMEM, "reply: no memory for the text held");
}

/* Appends to a buffer that holds text back. */
static void keep(hx_reply *r, hx_sb *b, const char *p, size_t n)
{
    size_t held = r->word.n + r->blank.n + r->key.n;

    if (n == 0 || r->err.code != 0)
        return;
    if (n > HELD_MAX_BYTES - held) {
        hx_fail(&r->err, HX_ELIMIT,
                "reply: a name, argument or blank of more than %d MiB; lower max_tokens",
                HELD_MAX_BYTES >> 20);
        return;
    }
    hx_sb_add(b, p, n);
    if (b->bad)
        fault_memory(r);
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static hx_str strip(const hx_sb *b)
{
    hx_str s = { b->p, b->n };

    for (; s.n > 0 && is_space(s.p[0]); s.p++)
        s.n--;
    while (s.n > 0 && is_space(s.p[s.n - 1]))
        s.n--;
    return s;
}

/* ---- events ---------------------------------------------------------- */

static void emit(hx_reply *r, hx_reply_kind kind, hx_str text)
{
    const bool of_call = kind != HX_REPLY_REASONING && kind != HX_REPLY_CONTENT;
    const hx_reply_event ev = { kind, text, of_call ? r->n_call - 1 : -1 };

    if (r->err.code == 0)
        r->sink(r->ud, &ev);
}

static void flush(hx_reply *r)
{
    if (r->out.bad || r->tmp.bad)
        fault_memory(r);
    if (r->out.n > 0)
        emit(r, r->out_kind, (hx_str) { r->out.p, r->out.n });
    r->out.n = 0;
}

/* Neighbours of one kind within a feed become one event. */
static void put(hx_reply *r, hx_reply_kind kind, const char *p, size_t n)
{
    if (n == 0)
        return;
    if (r->out_kind != kind)
        flush(r);
    r->out_kind = kind;
    hx_sb_add(&r->out, p, n);
}

static void put_args(hx_reply *r, const char *s)
{
    put(r, HX_REPLY_ARGS, s, strlen(s));
}

/* The string as JSON; bare leaves out the quotes. */
static void put_string(hx_reply *r, hx_str s, bool bare)
{
    r->tmp.n = 0;
    hx_json_put_str(&r->tmp, s);
    if (!r->tmp.bad)
        put(r, HX_REPLY_ARGS, r->tmp.p + bare, r->tmp.n - 2 * (size_t)bare);
}

/* ---- types of arguments ---------------------------------------------- */

static unsigned type_bit(hx_str name)
{
    static const struct {
        const char *name;
        unsigned bit;
    } types[] = {
        { "null", HX_TYPE_NULL },       { "boolean", HX_TYPE_BOOLEAN },
        { "integer", HX_TYPE_INTEGER }, { "number", HX_TYPE_NUMBER },
        { "string", HX_TYPE_STRING },   { "array", HX_TYPE_ARRAY },
        { "object", HX_TYPE_OBJECT },
    };

    for (size_t i = 0; i < HX_LEN(types); i++)
        if (hx_str_is(name, types[i].name))
            return types[i].bit;
    return HX_TYPE_ANY;
}

/* Follows "#/$defs/Name"; NULL where it leads nowhere. */
static const hx_json *follow_ref(const hx_json *root, hx_str ref)
{
    const char *p = ref.p, *end = ref.p + ref.n;

    if (ref.n == 0 || *p++ != '#')
        return NULL;
    while (root != NULL && p < end && *p == '/') {
        const char *slash = memchr(p + 1, '/', (size_t)(end - p - 1));
        const size_t n = (size_t)((slash != NULL ? slash : end) - ++p);
        char name[128];

        if (n >= sizeof(name))
            return NULL;
        memcpy(name, p, n);
        name[n] = '\0';
        root = hx_json_get(root, name);
        p += n;
    }
    return p == end ? root : NULL;
}

/* Tools come from users: left bounds the schemas looked at, however they refer to
 * each other. */
static unsigned schema_types(const hx_json *root, const hx_json *s, int *left)
{
    static const char *const unions[] = { "anyOf", "oneOf" };
    const hx_json *type = hx_json_get(s, "type"), *ref = hx_json_get(s, "$ref");
    unsigned found = 0;

    if ((*left)-- <= 0)
        return HX_TYPE_ANY;
    if (hx_json_kind(ref) == HX_JSON_STRING)
        return schema_types(root, follow_ref(root, hx_json_str(ref)), left);
    if (hx_json_kind(type) == HX_JSON_STRING)
        return type_bit(hx_json_str(type));
    if (hx_json_kind(type) == HX_JSON_ARRAY)
        for (size_t i = 0; i < hx_json_len(type) && (*left)-- > 0; i++)
            found |= type_bit(hx_json_str(hx_json_at(type, i)));
    for (size_t u = 0; u < HX_LEN(unions) && found == 0; u++) {
        const hx_json *of = hx_json_get(s, unions[u]);

        if (hx_json_kind(of) != HX_JSON_ARRAY)
            continue;
        for (size_t i = 0; i < hx_json_len(of) && *left > 0; i++)
            found |= schema_types(root, hx_json_at(of, i), left);
    }
    return found != 0 ? found : HX_TYPE_ANY;
}

unsigned hx_reply_types(const hx_json *parameters, const char *key)
{
    const hx_json *props = hx_json_get(parameters, "properties");
    int left = SCHEMA_MAX;

    if (!hx_json_has(props, key))
        return HX_TYPE_ANY;
    return schema_types(parameters, hx_json_get(props, key), &left);
}

/* Entries are {"type": "function", "function": {…}} or the function itself. */
static const hx_json *tool_schema(const hx_json *tools, hx_str name)
{
    for (size_t i = 0; i < hx_json_len(tools); i++) {
        const hx_json *t = hx_json_at(tools, i);

        if (hx_json_has(t, "function"))
            t = hx_json_get(t, "function");
        if (hx_str_eq(hx_json_str(hx_json_get(t, "name")), name))
            return hx_json_get(t, "parameters");
    }
    return NULL;
}

static bool type_allowed(unsigned types, const hx_json *j)
{
    static const unsigned bit[] = {
        [HX_JSON_NULL] = HX_TYPE_NULL,
        [HX_JSON_BOOL] = HX_TYPE_BOOLEAN,
        [HX_JSON_INT] = HX_TYPE_INTEGER | HX_TYPE_NUMBER,
        [HX_JSON_DOUBLE] = HX_TYPE_NUMBER,
        [HX_JSON_STRING] = HX_TYPE_STRING,
        [HX_JSON_ARRAY] = HX_TYPE_ARRAY,
        [HX_JSON_OBJECT] = HX_TYPE_OBJECT,
    };
    unsigned is = bit[hx_json_kind(j)];
    const double v = hx_json_num(j, 0.5);

    if (hx_json_kind(j) == HX_JSON_DOUBLE && floor(v) == v)
        is |= HX_TYPE_INTEGER;
    return (types & (is | HX_TYPE_ANY)) != 0;
}

/* False: not JSON (NaN, Infinity and numbers past a double are none). The tree of null
 * is NULL. */
static bool parse_json(hx_reply *r, hx_str s, hx_json **out)
{
    const int rc = hx_json_parse(out, s, DEPTH_MAX, NULL);

    if (rc == HX_ENOMEM)
        fault_memory(r);
    return rc == 0;
}

/* ---- Python literals ------------------------------------------------- */

/* Rewrites a Python literal as JSON: True, False, None, strings in either quote, decimal
 * numbers, lists, tuples and dicts with string keys. What else ast.literal_eval() takes
 * (0x1f, 1_000, b'', r'', ''' ''', adjacent strings) looks more like a name or an id when
 * a model writes it, and stays a string. */
typedef struct {
    const char *p, *end;
    hx_sb *out;
    int depth;
} literal;

static bool lit_value(literal *l);

/* Takes c and the white space before it. */
static bool lit_take(literal *l, char c)
{
    while (l->p < l->end && is_space(*l->p))
        l->p++;
    if (l->p == l->end || *l->p != c)
        return false;
    l->p++;
    return true;
}

static void lit_char(literal *l, uint32_t cp)
{
    char utf8[4];

    if (cp < 0x20 || cp == '"' || cp == '\\' || (cp >= 0xD800 && cp < 0xE000))
        hx_sb_printf(l->out, "\\u%04x", (unsigned)cp);
    else
        hx_sb_add(l->out, utf8, (size_t)hx_utf8_put(cp, utf8));
}

/* Reads min to max digits of a base; false when there are fewer. */
static bool lit_digits(literal *l, unsigned base, int min, int max, uint32_t *out)
{
    static const char digits[] = "0123456789abcdef";
    int n = 0;

    for (*out = 0; n < max && l->p < l->end; n++, l->p++) {
        const char low = *l->p >= 'A' && *l->p <= 'F' ? (char)(*l->p + 32) : *l->p;
        const char *d = memchr(digits, low, base);

        if (d == NULL)
            break;
        *out = *out * base + (uint32_t)(d - digits);
    }
    return n >= min;
}

static bool lit_escape(literal *l)
{
    static const char simple[] = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";
    const char c = l->p < l->end ? *l->p : '\0';
    const int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    uint32_t cp;

    if (digits != 0) {
        l->p++;
        if (!lit_digits(l, 16, digits, digits, &cp) || cp > 0x10FFFF)
            return false;
        lit_char(l, cp);
        return true;
    }
    if (lit_digits(l, 8, 1, 3, &cp)) {
        lit_char(l, cp);
        return true;
    }
    if (l->p == l->end || c == 'N')
        return false;
    if (c == '\n') {
        l->p++;
        return true;
    }
    for (size_t i = 0; i + 1 < sizeof(simple); i += 2)
        if (simple[i] == c) {
            lit_char(l, (uint8_t)simple[i + 1]);
            l->p++;
            return true;
        }
    lit_char(l, '\\'); /* Python keeps the backslash of an escape it lacks */
    return true;
}

static bool lit_string(literal *l)
{
    const char quote = *l->p++;

    hx_sb_char(l->out, '"');
    while (l->p < l->end && *l->p != quote) {
        if (*l->p == '\n' || *l->p == '\r' || *l->p == '\0')
            return false;
        if (*l->p == '\\') {
            l->p++;
            if (!lit_escape(l))
                return false;
        } else if ((uint8_t)*l->p < 0x80) {
            lit_char(l, (uint8_t)*l->p++);
        } else {
            hx_sb_char(l->out, *l->p++);
        }
    }
    hx_sb_char(l->out, '"');
    return l->p < l->end && *l->p++ == quote;
}

static size_t lit_run(literal *l)
{
    const char *from = l->p;

    while (l->p < l->end && *l->p >= '0' && *l->p <= '9')
        hx_sb_char(l->out, *l->p++);
    return (size_t)(l->p - from);
}

/* Adds the digits that JSON wants around a point; the rest of JSON's rules for numbers
 * (no leading zeros, digits in an exponent) are checked with the whole text. */
static bool lit_number(literal *l)
{
    size_t whole, part = 0;

    if (*l->p == '-')
        hx_sb_char(l->out, '-');
    l->p += *l->p == '-' || *l->p == '+';
    whole = lit_run(l);
    if (whole == 0)
        hx_sb_char(l->out, '0');
    if (l->p < l->end && *l->p == '.') {
        hx_sb_char(l->out, *l->p++);
        part = lit_run(l);
        if (part == 0)
            hx_sb_char(l->out, '0');
    }
    if (whole + part == 0)
        return false;
    if (l->p < l->end && (*l->p == 'e' || *l->p == 'E')) {
        hx_sb_char(l->out, *l->p++);
        if (l->p < l->end && (*l->p == '+' || *l->p == '-'))
            hx_sb_char(l->out, *l->p++);
        lit_run(l);
    }
    return true;
}

static bool lit_word(literal *l)
{
    static const char *const words[][2] = { { "True", "true" },
                                            { "False", "false" },
                                            { "None", "null" } };

    for (size_t i = 0; i < HX_LEN(words); i++) {
        const size_t n = strlen(words[i][0]);

        if ((size_t)(l->end - l->p) >= n && memcmp(l->p, words[i][0], n) == 0) {
            l->p += n;
            hx_sb_str(l->out, words[i][1]);
            return true;
        }
    }
    return false;
}

static bool lit_key(literal *l)
{
    while (l->p < l->end && is_space(*l->p))
        l->p++;
    if (l->p == l->end || (*l->p != '"' && *l->p != '\'') || !lit_string(l))
        return false;
    hx_sb_char(l->out, ':');
    return lit_take(l, ':');
}

/* A list, tuple or dict. One value in parentheses without a comma is that value. */
static bool lit_items(literal *l)
{
    const char open = *l->p++, close = open == '(' ? ')' : (char)(open + 2);
    const size_t at = l->out->n;
    size_t n_item = 0, n_comma = 0;

    hx_sb_char(l->out, open == '{' ? '{' : '[');
    while (!lit_take(l, close)) {
        if (n_item++ > n_comma)
            return false;
        if (n_item > 1)
            hx_sb_char(l->out, ',');
        if ((open == '{' && !lit_key(l)) || !lit_value(l))
            return false;
        n_comma += lit_take(l, ',');
    }
    if (open != '(' || n_item != 1 || n_comma != 0)
        hx_sb_char(l->out, open == '{' ? '}' : ']');
    else if (!l->out->bad)
        l->out->p[at] = ' ';
    return true;
}

static bool lit_value(literal *l)
{
    bool ok;

    while (l->p < l->end && is_space(*l->p))
        l->p++;
    if (l->p == l->end || l->depth == 0)
        return false;
    l->depth--;
    if (strchr("[({", *l->p) != NULL && *l->p != '\0')
        ok = lit_items(l);
    else if (*l->p == '"' || *l->p == '\'')
        ok = lit_string(l);
    else
        ok = lit_word(l) || lit_number(l);
    l->depth++;
    return ok;
}

/* Leaves the JSON text in tmp. */
static bool parse_python(hx_reply *r, hx_str s)
{
    literal l = { s.p, s.p + s.n, &r->tmp, DEPTH_MAX };
    hx_json *j = NULL;
    bool ok;

    r->tmp.n = 0;
    ok = lit_value(&l) && l.p == l.end && !r->tmp.bad &&
         parse_json(r, (hx_str) { r->tmp.p, r->tmp.n }, &j);
    hx_json_free(j);
    return ok;
}

/* ---- calls ----------------------------------------------------------- */

/* A call without a name could not be answered: nothing of it is handed out. */
static void open_call(hx_reply *r, hx_str name)
{
    if (name.n == 0)
        return;
    flush(r);
    r->n_call++;
    r->in_call = true;
    r->n_pair = 0;
    r->schema = tool_schema(r->tools, name);
    emit(r, HX_REPLY_CALL, name);
}

static void close_call(hx_reply *r)
{
    if (!r->in_call)
        return;
    if (r->in_string)
        put_args(r, "\"");
    put_args(r, r->n_pair == 0 ? "{}" : "}");
    flush(r);
    emit(r, HX_REPLY_CALL_END, (hx_str) { "", 0 });
    r->in_call = r->in_string = r->has_key = false;
}

static void put_key(hx_reply *r)
{
    put_args(r, r->n_pair++ == 0 ? "{" : ",");
    put_string(r, (hx_str) { r->key.p, r->key.n }, false);
    put_args(r, ":");
}

/* Only once there is something to say, so that a cut before it drops the pair. */
static void begin_string(hx_reply *r)
{
    if (r->in_string)
        return;
    put_key(r);
    put_args(r, "\"");
    r->in_string = true;
}

/* Where a string is allowed beside other types, JSON is tried but Python is not: what
 * reads as Python only is more likely the string. */
static void put_value(hx_reply *r)
{
    const hx_str s = strip(&r->word);
    hx_json *j = NULL;
    const bool is_json = parse_json(r, s, &j);

    put_key(r);
    if (is_json && ((r->types & HX_TYPE_STRING) == 0 || type_allowed(r->types, j)))
        put(r, HX_REPLY_ARGS, s.p, s.n);
    else if ((r->types & HX_TYPE_STRING) == 0 && parse_python(r, s))
        put(r, HX_REPLY_ARGS, r->tmp.p, r->tmp.n);
    else
        put_string(r, (hx_str) { r->word.p, r->word.n }, false);
    hx_json_free(j);
}

/* {"name": …, "arguments": {…}}; arguments may be that object spelled in a string. */
static bool put_body(hx_reply *r)
{
    hx_json *call = NULL, *spelled = NULL;
    const hx_json *args;
    hx_str name;
    bool ok;

    if (!parse_json(r, strip(&r->word), &call))
        return false;
    name = hx_json_str(hx_json_get(call, "name"));
    args = hx_json_get(call, "arguments");
    if (hx_json_kind(args) == HX_JSON_STRING) {
        parse_json(r, hx_json_str(args), &spelled);
        args = spelled;
    }
    ok = name.n > 0 &&
         (hx_json_kind(args) == HX_JSON_OBJECT || !hx_json_has(call, "arguments"));
    if (ok) {
        open_call(r, name);
        r->tmp.n = 0;
        if (hx_json_len(args) > 0) {
            hx_json_write(&r->tmp, args);
            r->tmp.n -= r->tmp.n > 0; /* close_call() writes the brace */
            put(r, HX_REPLY_ARGS, r->tmp.p, r->tmp.n);
            r->n_pair = 1;
        }
        close_call(r);
    }
    hx_json_free(spelled);
    hx_json_free(call);
    return ok;
}

/* ---- rules ----------------------------------------------------------- */

/* What happens at a marker; word still has the text before it. */

static void on_call(hx_reply *r)
{
    r->blank.n = 0;
    r->is_blank = true;
}

static void on_name(hx_reply *r)
{
    open_call(r, strip(&r->word));
}

static void on_call_end(hx_reply *r)
{
    if (r->at == NAME)
        on_name(r);
    close_call(r);
}

/* A key with a NUL is no parameter of any tool, and json-c could not read it back. */
static void on_key(hx_reply *r)
{
    const hx_str key = strip(&r->word);

    r->key.n = 0;
    keep(r, &r->key, key.p, key.n);
    r->has_key = r->in_call && (key.n == 0 || memchr(key.p, '\0', key.n) == NULL);
    r->types = r->key.n > 0 ? hx_reply_types(r->schema, r->key.p) : HX_TYPE_ANY;
}

static void on_value(hx_reply *r)
{
    if (r->has_key && r->types == HX_TYPE_STRING) {
        begin_string(r);
        put_args(r, "\"");
        r->in_string = false;
    } else if (r->has_key) {
        put_value(r);
    }
    r->has_key = false;
}

/* A body that is no call is shown as it was written. */
static void on_body(hx_reply *r)
{
    const hx_str open = r->text[CALL], close = r->text[CALL_END];

    if (put_body(r))
        return;
    put(r, HX_REPLY_CONTENT, open.p, open.n);
    put(r, HX_REPLY_CONTENT, r->word.p, r->word.n);
    put(r, HX_REPLY_CONTENT, close.p, close.n);
    r->is_blank = false;
}

/* A marker without a row for the state is text there. Beyond what the GLM template
 * writes: any tag ends a name, so that none leaks into it, and CALL inside a call,
 * outside of keys and values, means that the model forgot to close the one before. */
typedef struct {
    state at;
    marker on;
    state next; /* NAME stands for the format's own state */
    void (*act)(hx_reply *r);
} rule;

static const rule rules[] = {
    { REASONING, THINK, REASONING, NULL },
    { REASONING, THINK_END, CONTENT, NULL },
    { REASONING, CALL, NAME, on_call },
    { CONTENT, THINK, REASONING, NULL },
    { CONTENT, THINK_END, CONTENT, NULL },
    { CONTENT, CALL, NAME, on_call },
    { NAME, ARG_KEY, KEY, on_name },
    { NAME, ARG_KEY_END, ARGS, on_name },
    { NAME, ARG_VALUE, VALUE, on_name },
    { NAME, ARG_VALUE_END, ARGS, on_name },
    { NAME, CALL_END, CONTENT, on_call_end },
    { NAME, CALL, NAME, on_call_end },
    { ARGS, ARG_KEY, KEY, NULL },
    { ARGS, ARG_VALUE, VALUE, NULL },
    { ARGS, CALL_END, CONTENT, on_call_end },
    { ARGS, CALL, NAME, on_call_end },
    { KEY, ARG_KEY_END, ARGS, on_key },
    { KEY, CALL_END, CONTENT, on_call_end },
    { VALUE, ARG_VALUE_END, ARGS, on_value },
    { BODY, CALL_END, CONTENT, on_body },
};

static void fire(hx_reply *r, const rule *u)
{
    if (u->act != NULL)
        u->act(r);
    r->at = u->next == NAME ? r->format->call : u->next;
    r->word.n = 0;
}

/* ---- text ------------------------------------------------------------ */

static void text_reasoning(hx_reply *r, const char *p, size_t n)
{
    put(r, HX_REPLY_REASONING, p, n);
}

static void text_content(hx_reply *r, const char *p, size_t n)
{
    size_t white = 0;

    while (r->is_blank && white < n && is_space(p[white]))
        white++;
    keep(r, &r->blank, p, white);
    if (white == n)
        return;
    put(r, HX_REPLY_CONTENT, r->blank.p, r->blank.n);
    put(r, HX_REPLY_CONTENT, p + white, n - white);
    r->blank.n = 0;
    r->is_blank = false;
}

static void text_word(hx_reply *r, const char *p, size_t n)
{
    keep(r, &r->word, p, n);
}

static void text_value(hx_reply *r, const char *p, size_t n)
{
    if (!r->has_key)
        return;
    if (r->types != HX_TYPE_STRING) {
        keep(r, &r->word, p, n);
        return;
    }
    begin_string(r);
    put_string(r, (hx_str) { p, n }, true);
}

/* NULL: dropped. */
static void (*const on_text[N_STATE])(hx_reply *r, const char *p, size_t n) = {
    [CONTENT] = text_content, [REASONING] = text_reasoning, [NAME] = text_word,
    [KEY] = text_word,        [VALUE] = text_value,         [BODY] = text_word,
};

static void hand_on(hx_reply *r, const char *p, size_t n)
{
    if (n > 0 && on_text[r->at] != NULL)
        on_text[r->at](r, p, n);
}

/* The rule whose marker the held text spells, wholly or as far as it goes, at i.
 * Tokens whose ids are known never spell a marker that has one: what a model quotes in
 * ordinary tokens stays text. */
static const rule *spelled_at(const hx_reply *r, size_t i, bool *whole)
{
    const size_t rest = r->held.n - i;

    if (!r->first[(uint8_t)r->held.p[i]])
        return NULL;
    for (size_t k = 0; k < HX_LEN(rules); k++) {
        const hx_str t = r->text[rules[k].on];

        if (rules[k].at != r->at || t.n == 0)
            continue;
        if (r->id[rules[k].on] >= 0 && rest > r->n_anon)
            continue;
        if (memcmp(r->held.p + i, t.p, HX_MIN(rest, t.n)) == 0) {
            *whole = rest >= t.n;
            return &rules[k];
        }
    }
    return NULL;
}

/* Hands on what is certain of the held text; all of it when nothing can follow. */
static void scan(hx_reply *r, bool last)
{
    size_t i = 0, from = 0;

    if (r->held.n == 0)
        return;
    while (i < r->held.n) {
        bool whole = false;
        const rule *u = spelled_at(r, i, &whole);

        if (u != NULL && whole) {
            hand_on(r, r->held.p + from, i - from);
            fire(r, u);
            from = i += r->text[u->on].n;
        } else if (u != NULL && !last) {
            break;
        } else {
            i++;
        }
    }
    hand_on(r, r->held.p + from, i - from);
    memmove(r->held.p, r->held.p + i, r->held.n - i);
    r->held.n -= i;
    r->n_anon = HX_MIN(r->n_anon, r->held.n);
}

static const rule *rule_of_id(const hx_reply *r, int32_t id)
{
    for (size_t k = 0; k < HX_LEN(rules); k++)
        if (rules[k].at == r->at && id >= 0 && r->id[rules[k].on] == id)
            return &rules[k];
    return NULL;
}

/* ---- interface ------------------------------------------------------- */

int hx_reply_open(hx_reply **out, const hx_reply_opt *opt, hx_err *err)
{
    hx_reply *r;

    *out = NULL;
    if (opt->format == NULL)
        return hx_fail(err, HX_EARG, "reply: no format; hx_reply_find() gives one");
    r = hx_new(hx_reply, 1);
    if (r == NULL)
        return hx_fail(err, HX_ENOMEM, "reply: no memory for %zu bytes", sizeof(*r));
    r->format = opt->format;
    r->tools = opt->tools;
    r->is_blank = opt->format->call != CONTENT;
    for (int m = 0; m < N_MARKER; m++) {
        const bool off = m <= THINK_END ? opt->reasoning_off : opt->tools_off;

        r->id[m] = -1;
        if (off || opt->format->text[m] == NULL)
            continue;
        r->text[m] = hx_str_c(opt->format->text[m]);
        r->first[(uint8_t)r->text[m].p[0]] = true;
        if (opt->find != NULL)
            r->id[m] = opt->find(opt->ud, r->text[m]);
    }
    r->at = opt->in_reasoning && r->text[THINK_END].n > 0 ? REASONING : CONTENT;
    *out = r;
    return 0;
}

void hx_reply_close(hx_reply *r)
{
    if (r == NULL)
        return;
    hx_sb_free(&r->held);
    hx_sb_free(&r->word);
    hx_sb_free(&r->blank);
    hx_sb_free(&r->key);
    hx_sb_free(&r->out);
    hx_sb_free(&r->tmp);
    hx_free(r);
}

static int begin(hx_reply *r, hx_reply_sink *sink, void *ud)
{
    r->sink = sink;
    r->ud = ud;
    if (r->ended && r->err.code == 0)
        hx_fail(&r->err, HX_EARG, "reply: used after its end");
    return r->err.code;
}

static int finish(hx_reply *r, hx_err *err)
{
    flush(r);
    if (r->held.bad)
        fault_memory(r);
    if (r->err.code != 0 && err != NULL)
        *err = r->err;
    return r->err.code;
}

/* Nothing that follows can belong to what is held. */
static void settle(hx_reply *r)
{
    hx_utf8_end(&r->utf8, &r->held);
    scan(r, true);
}

int hx_reply_feed(hx_reply *r, int32_t id, hx_str bytes, hx_reply_sink *sink, void *ud,
                  hx_err *err)
{
    const rule *u = rule_of_id(r, id);

    if (begin(r, sink, ud) != 0)
        return finish(r, err);
    if (u != NULL) {
        settle(r);
        fire(r, u);
        return finish(r, err);
    }
    while (bytes.n > 0 && r->err.code == 0 && !r->held.bad) {
        const size_t n = HX_MIN(bytes.n, (size_t)SLICE_BYTES), before = r->held.n;

        hx_utf8_feed(&r->utf8, (hx_str) { bytes.p, n }, &r->held);
        r->n_anon = id >= 0 ? 0 : r->n_anon + (r->held.n - before);
        scan(r, false);
        flush(r);
        bytes.p += n;
        bytes.n -= n;
    }
    return finish(r, err);
}

int hx_reply_end(hx_reply *r, hx_reply_sink *sink, void *ud, int32_t *n_call, hx_err *err)
{
    if (begin(r, sink, ud) == 0) {
        settle(r);
        close_call(r);
        r->ended = true;
    }
    if (n_call != NULL)
        *n_call = r->n_call;
    return finish(r, err);
}
