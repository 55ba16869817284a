/* api_responses_events.c - answers of /v1/responses: the typed events of a stream, and
 * the response object that they begin and end with, or that is the answer as it is.
 *
 * generate.c calls on the pump; api_responses.c hands the request over with
 * hx_responses_start(). Never reads a request's body. */
#include "serve/api_responses.h"

#include <stdio.h>
#include <time.h>

/* ---- items ------------------------------------------------------------------ */

/* One that nobody closed was in the making when the answer broke. */
static bool is_cut(const hx_responder *r, int32_t i)
{
    return i == r->blocks.n - 1 &&
           (r->blocks.open ||
            (r->ended && (r->stop == HX_STOP_LENGTH || r->stop == HX_STOP_CANCEL)));
}

/* Whether a call was complete when the answer was cut is not known here; who runs tools
 * must not take one that may lack an argument for whole. */
static const char *item_status(const hx_responder *r, int32_t i)
{
    return is_cut(r, i) ? "incomplete" : "completed";
}

static void put_text(hx_sb *b, const char *type, hx_str text)
{
    hx_sb_printf(b, "{\"type\":\"%s\",\"text\":", type);
    hx_json_put_str(b, text);
    hx_sb_char(b, '}');
}

static void put_output_text(hx_sb *b, hx_str text, const hx_sb *logprobs)
{
    hx_sb_str(b, "{\"type\":\"output_text\",\"text\":");
    hx_json_put_str(b, text);
    hx_sb_str(b, ",\"annotations\":[],\"logprobs\":[");
    hx_sb_add(b, logprobs->p, logprobs->n);
    hx_sb_str(b, "]}");
}

static const hx_responses_tool *tool_of(const hx_block *k)
{
    return k->tool;
}

static bool is_custom(const hx_block *k)
{
    return k->tool != NULL && tool_of(k)->custom;
}

/* The text that a custom tool is called with, as far as its arguments are there, still
 * escaped: it becomes a JSON string again. {NULL, 0}: they do not hold it. */
static hx_str custom_input(const hx_block *k)
{
    static const char before[] = "{\"input\":\"";
    const size_t from = sizeof before - 1, n = k->text.n;
    const char *p = k->text.p;
    size_t i = from;

    if (n < from || memcmp(p, before, from) != 0)
        return (hx_str) { NULL, 0 };
    while (i < n && p[i] != '"') {
        const size_t step = p[i] != '\\' ? 1 : i + 1 < n && p[i + 1] == 'u' ? 6 : 2;

        if (i + step > n)
            break;
        i += step;
    }
    return (hx_str) { p + from, i - from };
}

/* What a custom tool's arguments do not hold is handed over as it is. */
static void put_custom_input(hx_sb *b, const hx_block *k, size_t from)
{
    const hx_str input = custom_input(k);

    if (input.p == NULL) {
        hx_json_put_str(b, (hx_str) { k->text.p, k->text.n });
        return;
    }
    hx_sb_char(b, '"');
    hx_sb_add(b, input.p + from, input.n - from);
    hx_sb_char(b, '"');
}

static void put_reasoning(hx_sb *b, const hx_responder *r, hx_str text)
{
    hx_sb sealed = { 0 };

    hx_sb_str(b, ",\"type\":\"reasoning\",\"summary\":[");
    if (r->summary && text.n > 0)
        put_text(b, "summary_text", text);
    hx_sb_char(b, ']');
    if (!r->summary) {
        hx_sb_str(b, ",\"content\":[");
        if (text.n > 0)
            put_text(b, "reasoning_text", text);
        hx_sb_char(b, ']');
    }
    if (!r->encrypted)
        return;
    hx_sb_str(&sealed, HX_RESPONSES_SEALED);
    hx_sb_add(&sealed, text.p, text.n);
    hx_sb_str(b, ",\"encrypted_content\":");
    hx_json_put_str(b, (hx_str) { sealed.p, sealed.n });
    b->bad = b->bad || sealed.bad;
    hx_sb_free(&sealed);
}

static void put_name(hx_sb *b, const hx_block *k)
{
    const hx_responses_tool *t = tool_of(k);

    hx_sb_str(b, ",\"name\":");
    hx_json_put_str(b, t != NULL ? t->name : (hx_str) { k->name.p, k->name.n });
    if (t == NULL || t->space.n == 0)
        return;
    hx_sb_str(b, ",\"namespace\":");
    hx_json_put_str(b, t->space);
}

static void put_call(hx_sb *b, const hx_block *k, bool whole)
{
    const bool custom = is_custom(k);

    hx_sb_printf(b, ",\"type\":\"%s\",\"call_id\":\"%s\"",
                 custom ? "custom_tool_call" : "function_call", k->call_id);
    put_name(b, k);
    hx_sb_str(b, custom ? ",\"input\":" : ",\"arguments\":");
    if (!whole)
        hx_sb_str(b, "\"\"");
    else if (custom)
        put_custom_input(b, k, 0);
    else
        hx_json_put_str(b, (hx_str) { k->text.p, k->text.n });
}

/* whole false: as it is when it is added, without its content. */
static void put_item(hx_sb *b, const hx_responder *r, int32_t i, bool whole)
{
    const hx_block *k = &r->blocks.block[i];
    const hx_str text = whole ? (hx_str) { k->text.p, k->text.n } : (hx_str) { "", 0 };

    hx_sb_printf(b, "{\"id\":\"%s\"", k->id);
    switch (k->kind) {
    case HX_BLOCK_REASONING:
        put_reasoning(b, r, text);
        break;
    case HX_BLOCK_TEXT:
        hx_sb_str(b, ",\"type\":\"message\",\"role\":\"assistant\",\"content\":[");
        if (whole)
            put_output_text(b, text, &k->logprobs);
        hx_sb_char(b, ']');
        break;
    case HX_BLOCK_CALL:
        put_call(b, k, whole);
        break;
    }
    hx_sb_printf(b, ",\"status\":\"%s\"}", whole ? item_status(r, i) : "in_progress");
}

/* ---- the object --------------------------------------------------------------- */

static const char *status_of(const hx_responder *r, bool failed)
{
    return failed                      ? "failed"
           : !r->ended                 ? "in_progress"
           : r->stop == HX_STOP_CANCEL ? "cancelled"
           : r->stop == HX_STOP_LENGTH ? "incomplete"
                                       : "completed";
}

/* Up to its output. problem: why it failed, or NULL. */
static void put_head(hx_sb *b, const hx_responder *r, const hx_problem *problem)
{
    const char *status = status_of(r, problem != NULL);

    hx_sb_printf(b,
                 "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%lld,"
                 "\"status\":\"%s\",\"background\":false",
                 r->id, (long long)r->created_s, status);
    if (strcmp(status, "completed") == 0)
        hx_sb_printf(b, ",\"completed_at\":%lld", (long long)r->done_s);
    else
        hx_sb_str(b, ",\"completed_at\":null");
    if (problem != NULL) {
        hx_sb_printf(b, ",\"error\":{\"code\":\"%s\",\"message\":",
                     problem->code != NULL ? problem->code : "server_error");
        hx_json_put_str(b, hx_str_c(problem->msg));
        hx_sb_char(b, '}');
    } else {
        hx_sb_str(b, ",\"error\":null");
    }
    hx_sb_str(b, strcmp(status, "incomplete") == 0
                     ? ",\"incomplete_details\":{\"reason\":\"max_output_tokens\"}"
                     : ",\"incomplete_details\":null");
    hx_sb_add(b, r->echo.p, r->echo.n);
    hx_sb_str(b, ",\"output\":[");
}

static void put_tail(hx_sb *b, const hx_responder *r)
{
    const hx_openai_sum *s = &r->sum;

    hx_sb_str(b, "],\"usage\":");
    if (!r->ended) {
        hx_sb_str(b, "null}");
        return;
    }
    hx_sb_printf(b,
                 "{\"input_tokens\":%lld,\"input_tokens_details\":{\"cached_tokens\":"
                 "%lld},\"output_tokens\":%lld,\"output_tokens_details\":{"
                 "\"reasoning_tokens\":%lld},\"total_tokens\":%lld},",
                 (long long)s->n_prompt, (long long)s->n_cached, (long long)s->n_answer,
                 (long long)s->n_reasoning, (long long)(s->n_prompt + s->n_answer));
    hx_openai_write_timings(b, s);
    hx_sb_char(b, '}');
}

static void put_response(hx_sb *b, const hx_responder *r, const hx_problem *problem)
{
    put_head(b, r, problem);
    for (int32_t i = 0; i < r->blocks.n; i++) {
        if (i > 0)
            hx_sb_char(b, ',');
        put_item(b, r, i, true);
    }
    put_tail(b, r);
}

/* ---- events -------------------------------------------------------------------- */

static void begin_event(hx_responder *r, const char *type)
{
    hx_sb_printf(r->out, "event: %s\ndata: {\"type\":\"%s\",\"sequence_number\":%lld",
                 type, type, (long long)r->seq++);
}

static void end_event(hx_responder *r)
{
    hx_sb_str(r->out, "}\n\n");
}

static void send_response(hx_responder *r, const char *type, const hx_problem *problem)
{
    begin_event(r, type);
    hx_sb_str(r->out, ",\"response\":");
    put_response(r->out, r, problem);
    end_event(r);
}

static void send_item(hx_responder *r, const char *type, int32_t i, bool whole)
{
    begin_event(r, type);
    hx_sb_printf(r->out, ",\"output_index\":%d,\"item\":", i);
    put_item(r->out, r, i, whole);
    end_event(r);
}

/* An event about a block; the caller adds its own members and ends it. */
static void begin_of(hx_responder *r, const char *type, int32_t i)
{
    begin_event(r, type);
    hx_sb_printf(r->out, ",\"item_id\":\"%s\",\"output_index\":%d", r->blocks.block[i].id,
                 i);
}

/* Reasoning and text have one part each; it comes and goes with these. */
typedef struct {
    const char *part, *delta, *done, *part_added, *part_done, *index;
} part_kind;

static const part_kind reasoning_part = {
    "reasoning_text",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.added",
    "response.content_part.done",
    "content_index",
};
static const part_kind summary_part = {
    "summary_text",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_part.done",
    "summary_index",
};
static const part_kind text_part = {
    "output_text",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.added",
    "response.content_part.done",
    "content_index",
};

static const part_kind *part_of(const hx_responder *r, int32_t i)
{
    return r->blocks.block[i].kind == HX_BLOCK_TEXT ? &text_part
           : r->summary                             ? &summary_part
                                                    : &reasoning_part;
}

static void put_part(hx_responder *r, int32_t i, hx_str text, const hx_sb *logprobs)
{
    const part_kind *p = part_of(r, i);

    hx_sb_printf(r->out, ",\"%s\":0,\"part\":", p->index);
    if (p == &text_part)
        put_output_text(r->out, text, logprobs);
    else
        put_text(r->out, p->part, text);
}

static void on_open(void *ud, int32_t i)
{
    hx_responder *r = ud;
    hx_block *k = &r->blocks.block[i];
    const hx_str name = { k->name.p, k->name.n };
    const hx_sb none = { 0 };

    for (size_t j = 0; k->kind == HX_BLOCK_CALL && j < r->n_tool; j++)
        if (hx_str_eq(name, r->tool[j].shown))
            k->tool = &r->tool[j];
    hx_server_new_id(r->c->server,
                     k->kind == HX_BLOCK_REASONING ? "rs_"
                     : k->kind == HX_BLOCK_TEXT    ? "msg_"
                     : is_custom(k)                ? "ctc_"
                                                   : "fc_",
                     k->id);
    if (k->kind == HX_BLOCK_CALL)
        hx_server_new_id(r->c->server, "call_", k->call_id);
    if (!r->req.stream)
        return;
    send_item(r, "response.output_item.added", i, false);
    if (k->kind == HX_BLOCK_CALL)
        return;
    begin_of(r, part_of(r, i)->part_added, i);
    put_part(r, i, (hx_str) { "", 0 }, &none);
    end_event(r);
}

static void send_custom_input(hx_responder *r, int32_t i)
{
    hx_block *k = &r->blocks.block[i];
    const size_t n = custom_input(k).n;

    if (n == k->n_sent)
        return;
    begin_of(r, "response.custom_tool_call_input.delta", i);
    hx_sb_str(r->out, ",\"delta\":");
    put_custom_input(r->out, k, k->n_sent);
    end_event(r);
    k->n_sent = n;
}

static void on_piece(void *ud, int32_t i, hx_str text)
{
    hx_responder *r = ud;
    hx_block *k = &r->blocks.block[i];

    if (k->kind == HX_BLOCK_TEXT && r->logprobs.n > 0) {
        if (k->logprobs.n > 0)
            hx_sb_char(&k->logprobs, ',');
        hx_sb_add(&k->logprobs, r->logprobs.p, r->logprobs.n);
    }
    if (r->req.stream && is_custom(k)) {
        send_custom_input(r, i);
    } else if (r->req.stream) {
        const part_kind *p = k->kind != HX_BLOCK_CALL ? part_of(r, i) : NULL;

        begin_of(r, p != NULL ? p->delta : "response.function_call_arguments.delta", i);
        if (p != NULL)
            hx_sb_printf(r->out, ",\"%s\":0", p->index);
        hx_sb_str(r->out, ",\"delta\":");
        hx_json_put_str(r->out, text);
        if (p == &text_part) {
            hx_sb_str(r->out, ",\"logprobs\":[");
            hx_sb_add(r->out, r->logprobs.p, r->logprobs.n);
            hx_sb_char(r->out, ']');
        }
        end_event(r);
    }
    if (k->kind == HX_BLOCK_TEXT)
        r->logprobs.n = 0;
}

static void send_call_done(hx_responder *r, int32_t i)
{
    const hx_block *k = &r->blocks.block[i];

    if (is_custom(k) && custom_input(k).p == NULL) {
        begin_of(r, "response.custom_tool_call_input.delta", i);
        hx_sb_str(r->out, ",\"delta\":");
        put_custom_input(r->out, k, 0);
        end_event(r);
    }
    if (is_custom(k)) {
        begin_of(r, "response.custom_tool_call_input.done", i);
        hx_sb_str(r->out, ",\"input\":");
        put_custom_input(r->out, k, 0);
    } else {
        begin_of(r, "response.function_call_arguments.done", i);
        put_name(r->out, k);
        hx_sb_str(r->out, ",\"arguments\":");
        hx_json_put_str(r->out, (hx_str) { k->text.p, k->text.n });
    }
    end_event(r);
}

static void on_close(void *ud, int32_t i)
{
    hx_responder *r = ud;
    const hx_block *k = &r->blocks.block[i];
    const hx_str text = { k->text.p, k->text.n };

    if (!r->req.stream)
        return;
    if (k->kind == HX_BLOCK_CALL) {
        send_call_done(r, i);
    } else {
        const part_kind *p = part_of(r, i);

        begin_of(r, p->done, i);
        hx_sb_printf(r->out, ",\"%s\":0,\"text\":", p->index);
        hx_json_put_str(r->out, text);
        if (p == &text_part) {
            hx_sb_str(r->out, ",\"logprobs\":[");
            hx_sb_add(r->out, k->logprobs.p, k->logprobs.n);
            hx_sb_char(r->out, ']');
        }
        end_event(r);
        begin_of(r, p->part_done, i);
        put_part(r, i, text, &k->logprobs);
        end_event(r);
    }
    send_item(r, "response.output_item.done", i, true);
}

/* ---- one request ----------------------------------------------------------------- */

static void on_event(void *ud, const hx_gen_event *ev, hx_sb *out)
{
    hx_responder *r = ud;
    const hx_blocks_sink sink = {
        .open = on_open, .piece = on_piece, .close = on_close, .ud = r
    };

    r->out = out;
    switch (ev->kind) {
    case HX_GEN_TOKEN:
        hx_openai_add_logprob(&r->logprobs, r->c->engine, ev, r->req.sampling.n_top);
        break;
    case HX_GEN_REPLY:
        hx_blocks_take(&r->blocks, ev->reply, &sink);
        break;
    case HX_GEN_END:
        r->stop = ev->stop;
        r->ended = true;
        r->done_s = (int64_t)time(NULL);
        hx_openai_add(&r->sum, ev, true);
        hx_blocks_end(&r->blocks, &sink);
        if (r->req.stream)
            send_response(r,
                          ev->stop == HX_STOP_LENGTH || ev->stop == HX_STOP_CANCEL
                              ? "response.incomplete"
                              : "response.completed",
                          NULL);
        break;
    default: /* raw answers' */
        break;
    }
    out->bad = out->bad || r->blocks.bad || r->logprobs.bad;
}

static void keep(hx_responder *r, const hx_problem *problem)
{
    hx_responses *store = hx_server_responses(r->c->server);
    const size_t n = (size_t)r->blocks.n;
    hx_item *item = hx_new(hx_item, n + 1);
    hx_sb text = { 0 }, head = { 0 }, tail = { 0 };
    size_t at = 0;

    put_head(&head, r, problem);
    put_tail(&tail, r);
    for (size_t i = 0; item != NULL && i < n; i++) {
        put_item(&text, r, (int32_t)i, true);
        item[i] = (hx_item) { hx_str_c(r->blocks.block[i].id), { NULL, text.n - at } };
        at = text.n;
    }
    for (size_t i = n; item != NULL && i-- > 0;)
        item[i].json.p = text.p + (at -= item[i].json.n);
    if (item == NULL || text.bad || head.bad || tail.bad)
        hx_response_store_remove(store, hx_str_c(r->id));
    else
        hx_response_store_finish(store, hx_str_c(r->id), item, n,
                                 (hx_str) { head.p, head.n },
                                 (hx_str) { tail.p, tail.n });
    hx_sb_free(&text);
    hx_sb_free(&head);
    hx_sb_free(&tail);
    hx_free(item);
}

static void write_failure(const hx_call *c, hx_sb *out)
{
    const hx_problem *p = &c->problem;
    hx_responder none = { .created_s = (int64_t)time(NULL) };
    hx_responder *r = c->state != NULL ? c->state : &none;

    if (r == &none) /* the request was not even read */
        hx_server_new_id(c->server, "resp_", none.id);
    r->out = out;
    begin_event(r, "error");
    hx_sb_printf(
        out, ",\"code\":\"%s\",\"message\":", p->code != NULL ? p->code : "server_error");
    hx_json_put_str(out, hx_str_c(p->msg));
    hx_sb_str(out, ",\"param\":");
    if (p->param[0] != '\0')
        hx_json_put_str(out, hx_str_c(p->param));
    else
        hx_sb_str(out, "null");
    end_event(r);
    send_response(r, "response.failed", p);
}

const hx_stream_form hx_responses_stream = {
    .type = "text/event-stream; charset=utf-8",
    .idle = { ": keepalive\n\n", 13 },
    .problem = write_failure,
};

static void reply_whole(void *ud)
{
    hx_responder *r = ud;
    hx_sb b = { 0 };

    put_response(&b, r, NULL);
    hx_server_reply_json(r->c, &b);
    hx_sb_free(&b);
}

/* rc as for hx_gen_sink.end. What a client that has gone left is kept as it is. */
static int on_end(void *ud, int rc)
{
    hx_responder *r = ud;
    hx_call *c = r->c;
    const bool gone = rc == HX_ECANCEL;

    if (gone) {
        r->ended = true;
        r->stop = HX_STOP_CANCEL;
    }
    if (r->store)
        keep(r, rc != 0 && !gone ? &c->problem : NULL);
    if (hx_server_end(c, rc, HX_STR(""), reply_whole, r) != 0)
        hx_server_reply_problem(c); /* which shows the blocks so far */
    hx_blocks_free(&r->blocks);
    hx_sb_free(&r->logprobs);
    return 0;
}

/* Under its id before the first event shows it to anybody. */
static int begin_keeping(hx_responder *r, const hx_item *input, size_t n_input)
{
    hx_sb b = { 0 };
    int rc = HX_ENOMEM;

    put_response(&b, r, NULL);
    if (!b.bad)
        rc = hx_response_store_begin(hx_server_responses(r->c->server), hx_str_c(r->id),
                                     r->previous, input, n_input, (hx_str) { b.p, b.n },
                                     r->gen);
    hx_sb_free(&b);
    if (rc == HX_EARG)
        return hx_server_problem(r->c, 404, "previous_response_id",
                                 "previous_response_not_found",
                                 "previous_response_id: that response is gone");
    return rc == 0 ? 0 : hx_server_no_memory(r->c);
}

/* Some clients count events, not bytes, before they give up: in silence the second one is
 * repeated. */
static int begin_stream(hx_responder *r, hx_str *waiting)
{
    hx_call *c = r->c;
    hx_sb out = { 0 };
    size_t first;
    const char *again;

    r->out = &out;
    send_response(r, "response.created", NULL);
    first = out.n;
    send_response(r, "response.in_progress", NULL);
    again = out.bad ? NULL : hx_arena_dup(&c->arena, out.p + first, out.n - first);
    if (again != NULL) {
        *waiting = (hx_str) { again, out.n - first };
        hx_server_begin_stream(c, *waiting);
        hx_http_send(c->x, (hx_str) { out.p, out.n });
    } else if (r->store) {
        hx_response_store_remove(hx_server_responses(c->server), hx_str_c(r->id));
    }
    hx_sb_free(&out);
    return again != NULL ? 0 : hx_server_no_memory(c);
}

int hx_responses_start(hx_responder *r, const hx_item *input, size_t n_input)
{
    hx_str waiting = { NULL, 0 };
    int rc;

    if (r->store && (rc = begin_keeping(r, input, n_input)) != 0) {
        hx_gen_close(r->gen);
        return rc;
    }
    if (r->req.stream && (rc = begin_stream(r, &waiting)) != 0) {
        hx_gen_close(r->gen);
        return rc;
    }
    hx_gen_set_id(r->gen, r->id);
    return hx_gen_start(r->gen, &(hx_gen_sink) { .event = on_event,
                                                 .end = on_end,
                                                 .ud = r,
                                                 .stream = r->req.stream,
                                                 .waiting = waiting });
}
