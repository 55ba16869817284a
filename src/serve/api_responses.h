/* api_responses.h - what the two files of /v1/responses share: api_responses.c (requests)
 * and api_responses_events.c (answers). */
#ifndef HX_SERVE_API_RESPONSES_H
#define HX_SERVE_API_RESPONSES_H

#include "serve/serve.h"

/* A tool that is not a plain function, though it is one to the model. */
typedef struct {
    hx_str shown, name, space; /* space: the namespace that name is in, or {NULL, 0} */
    bool custom;               /* takes plain text: the one argument called input */
} hx_responses_tool;

/* One request; in the call's arena. The pump owns it once it is started. */
typedef struct {
    hx_call *c;
    hx_generate req;
    hx_gen *gen;
    char id[40];
    int64_t created_s, done_s;
    hx_str echo;             /* members of the object that repeat the request, ",…" */
    hx_str previous;         /* id of the response it goes on from, or {NULL, 0} */
    hx_responses_tool *tool; /* [n_tool] */
    size_t n_tool;
    bool store;     /* kept for later */
    bool summary;   /* reasoning goes out as its summary */
    bool encrypted; /* reasoning items carry their text as encrypted_content too */

    hx_blocks blocks;
    hx_sb *out;     /* of the event in hand */
    hx_sb logprobs; /* entries not yet handed out, "{…},{…}" */
    int64_t seq;
    hx_openai_sum sum;
    hx_stop stop;
    bool ended; /* sum and stop are there */
} hx_responder;

/* What encrypted_content begins with; the reasoning follows as it is. Nothing is secret
 * in it, for it came from this client: the field makes clients that drop the text of
 * reasoning give it back. */
#define HX_RESPONSES_SEALED "hoist:"

/* Takes over the call with r->gen opened. Returns what a route does. */
int hx_responses_start(hx_responder *r, const hx_item *input, size_t n_input);

#endif
