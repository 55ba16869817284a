/* text.h - bytes in, bytes out: tokenizer, chat template, reply parser.
 *
 * Knows nothing of tensors, requests or HTTP. Everything here is deterministic and
 * has no global state; objects are read-only after opening unless said otherwise,
 * so threads may share them. */
#ifndef HX_TEXT_H
#define HX_TEXT_H

#include "base/base.h"
#include "text/grammar.h"

/* ---- tokenizer ------------------------------------------------------- */

typedef struct hx_tok hx_tok;

typedef struct {
    int32_t *p;
    int64_t n, cap;
} hx_ids; /* growable; p by hx_realloc */
int hx_ids_add(hx_ids *v, const int32_t *p, int64_t n, hx_err *err);
void hx_ids_free(hx_ids *v);

/* From the text of a tokenizer.json: byte-level BPE (GLM, Qwen, Llama 3 style).
 * name is used in messages. Errors: HX_EFORMAT (broken merges, ids that clash),
 * HX_EUNSUP (another model, normaliser or pre-tokenizer: which one), HX_ENOMEM. */
int hx_tok_open(hx_tok **out, hx_str json, const char *name, hx_err *err);
void hx_tok_close(hx_tok *t);

/* One more than the largest id that names a token. */
int32_t hx_tok_count(const hx_tok *t);

typedef struct {
    bool special;        /* spelled-out added tokens become ids */
    const uint8_t *user; /* NULL, or [text.n]: nonzero marks bytes that came from a
                          * user. An added token is taken only where all its bytes are
                          * zero; the mark changes nothing else */
    int64_t max_ids;     /* 0: no bound; more is HX_ELIMIT */
} hx_tok_opt;

/* Appends the ids of text to *out. Text that is not UTF-8 is an error (HX_EFORMAT with
 * the byte offset). opt may be NULL: special on, nothing marked. Thread: any. */
int hx_tok_encode(const hx_tok *t, hx_str text, const hx_tok_opt *opt, hx_ids *out,
                  hx_err *err);

/* The bytes of a token, borrowed; {NULL, 0} for ids without one. */
hx_str hx_tok_bytes(const hx_tok *t, int32_t id);
bool hx_tok_is_special(const hx_tok *t, int32_t id); /* dropped by plain decoding */
int32_t hx_tok_find(const hx_tok *t, hx_str text);   /* id of an added token, or -1 */

/* Incremental decoding: never hands out part of a character; each maximal invalid part
 * becomes U+FFFD. One per stream, zero-initialised. */
typedef struct {
    char held[4];
    int n_held;
} hx_utf8_stream;
void hx_utf8_feed(hx_utf8_stream *s, hx_str bytes, hx_sb *out);
void hx_utf8_end(hx_utf8_stream *s, hx_sb *out); /* flushes what was cut short */

/* ---- chat template (Jinja subset) ------------------------------------ */

typedef struct hx_jinja hx_jinja;

/* Compiles. name is used in messages ("chat_template.jinja:31: …"). Errors: HX_EFORMAT
 * (syntax), HX_EUNSUP (a construct outside the subset, with its line), HX_ENOMEM. */
int hx_jinja_open(hx_jinja **out, hx_str source, const char *name, hx_err *err);
void hx_jinja_close(hx_jinja *t);

typedef struct {
    size_t max_bytes;  /* output; 0: 64 MiB */
    int64_t max_steps; /* loop turns and calls; 0: 50 million */
    int64_t now_s;     /* for strftime_now: seconds since 1970, UTC */
} hx_jinja_opt;

/* Runs the template with the members of the object vars as its variables.
 * text gets the output; user, when not NULL, gets one byte per byte of text: 1 where
 * the byte came from a string in vars (through whatever filters), 0 where the template
 * itself wrote it. Errors: HX_EFORMAT (raise_exception's text; type errors, with the
 * line), HX_ELIMIT, HX_ENOMEM. Thread: any. opt may be NULL. */
int hx_jinja_run(const hx_jinja *t, const hx_json *vars, const hx_jinja_opt *opt,
                 hx_sb *text, hx_sb *user, hx_err *err);

/* ---- reply parser ---------------------------------------------------- */

/* Formats, one row each of the table in reply.c: "glm" (GLM-4.5 to 5.3), "hermes" (calls as
 * JSON objects: Qwen and others), "plain" (no markup). */
typedef struct hx_reply_format hx_reply_format;
const hx_reply_format *hx_reply_find(const char *name); /* NULL: no such format */

typedef enum {
    HX_MARK_THINK,
    HX_MARK_THINK_END,
    HX_MARK_CALL,
    HX_MARK_CALL_END,
    HX_MARK_KEY,
    HX_MARK_KEY_END,
    HX_MARK_VALUE,
    HX_MARK_VALUE_END
} hx_reply_mark;
/* How the format spells a marker; NULL where it has none. Calls without HX_MARK_KEY are a
 * JSON object with "name" and "arguments". */
const char *hx_reply_marker(const hx_reply_format *f, hx_reply_mark m);

/* Types of an argument, after JSON Schema. ANY: its schema names none. */
enum {
    HX_TYPE_NULL = 1,
    HX_TYPE_BOOLEAN = 2,
    HX_TYPE_INTEGER = 4,
    HX_TYPE_NUMBER = 8,
    HX_TYPE_STRING = 16,
    HX_TYPE_ARRAY = 32,
    HX_TYPE_OBJECT = 64,
    HX_TYPE_ANY = 128
};
/* As what the parser reads the argument key of a tool with these "parameters": STRING
 * alone is the text as it stands; else JSON, where that is of one of the types, and text
 * where STRING or ANY is among them. */
unsigned hx_reply_types(const hx_json *parameters, const char *key);

typedef struct {
    const hx_reply_format *format;
    int32_t (*find)(void *ud, hx_str text); /* id of an added token or -1; text matching
                                             * is used for markers that have no id */
    void *ud;
    const hx_json *tools; /* the request's tools array or NULL: types of arguments;
                           * borrowed for the life of the parser */
    bool in_reasoning;    /* the prompt ended in an opened <think> */
    bool reasoning_off;   /* hand reasoning out as content, markers included */
    bool tools_off;       /* tool-call markup stays content */
} hx_reply_opt;

typedef enum {
    HX_REPLY_REASONING, /* text */
    HX_REPLY_CONTENT,   /* text */
    HX_REPLY_CALL,      /* a call opens: call, text = its whole name */
    HX_REPLY_ARGS,      /* text = a piece of the call's JSON arguments; the pieces of
                         * a call concatenate to one valid JSON object */
    HX_REPLY_CALL_END   /* the call is closed; a call cut short by the end of the
                         * stream gets its completed pairs, a closing brace, this */
} hx_reply_kind;

typedef struct {
    hx_reply_kind kind;
    hx_str text;  /* valid during the call of the sink */
    int32_t call; /* index from 0; -1 for text */
} hx_reply_event;

typedef struct hx_reply hx_reply; /* one per answer, one thread */
typedef void hx_reply_sink(void *ud, const hx_reply_event *ev);

int hx_reply_open(hx_reply **out, const hx_reply_opt *opt, hx_err *err);
void hx_reply_close(hx_reply *r);
/* Feeds one token: its id (or -1: bytes only) and its bytes. Events reach the sink as
 * soon as they are certain, whole characters only. Errors: HX_ENOMEM, HX_ELIMIT (over
 * 16 MiB held). */
int hx_reply_feed(hx_reply *r, int32_t id, hx_str bytes, hx_reply_sink *sink, void *ud,
                  hx_err *err);
/* The stream ended: flushes. n_call, when not NULL, gets the number of calls handed out.
 */
int hx_reply_end(hx_reply *r, hx_reply_sink *sink, void *ud, int32_t *n_call,
                 hx_err *err);

#endif
