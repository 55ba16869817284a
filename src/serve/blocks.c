/* blocks.c - an answer as a list of blocks: reasoning, text and calls, one after the
 * other and one open at a time, as the dialects with typed streams want it.
 *
 * Called by those dialects on the pump. Keeps what the blocks hold, so that an answer is
 * the same whether it is streamed or not. Knows no dialect and writes no JSON. */
#include "serve/serve.h"

static void close_last(hx_blocks *b, const hx_blocks_sink *sink)
{
    const bool open = b->open;

    b->open = false;
    if (open)
        sink->close(sink->ud, b->n - 1);
}

static void open_block(hx_blocks *b, hx_block_kind kind, hx_str name,
                       const hx_blocks_sink *sink)
{
    hx_block *grown;

    close_last(b, sink);
    grown = hx_realloc(b->block, (size_t)(b->n + 1) * sizeof *grown);
    if (grown == NULL) {
        b->bad = true;
        return;
    }
    b->block = grown;
    grown[b->n] = (hx_block) { .kind = kind };
    hx_sb_add(&grown[b->n].name, name.p, name.n);
    b->bad = b->bad || grown[b->n].name.bad;
    b->open = true;
    sink->open(sink->ud, b->n++);
}

void hx_blocks_take(hx_blocks *b, const hx_reply_event *ev, const hx_blocks_sink *sink)
{
    static const hx_block_kind kinds[] = { [HX_REPLY_REASONING] = HX_BLOCK_REASONING,
                                           [HX_REPLY_CONTENT] = HX_BLOCK_TEXT,
                                           [HX_REPLY_CALL] = HX_BLOCK_CALL,
                                           [HX_REPLY_ARGS] = HX_BLOCK_CALL };

    if (ev->kind == HX_REPLY_CALL_END || b->bad)
        return;
    if (ev->kind == HX_REPLY_CALL) {
        open_block(b, HX_BLOCK_CALL, ev->text, sink);
        return;
    }
    if (!b->open || b->block[b->n - 1].kind != kinds[ev->kind])
        open_block(b, kinds[ev->kind], (hx_str) { NULL, 0 }, sink);
    if (b->bad)
        return;
    hx_sb_add(&b->block[b->n - 1].text, ev->text.p, ev->text.n);
    b->bad = b->block[b->n - 1].text.bad;
    sink->piece(sink->ud, b->n - 1, ev->text);
}

void hx_blocks_end(hx_blocks *b, const hx_blocks_sink *sink)
{
    close_last(b, sink);
}

void hx_blocks_free(hx_blocks *b)
{
    for (int32_t i = 0; i < b->n; i++) {
        hx_sb_free(&b->block[i].name);
        hx_sb_free(&b->block[i].text);
        hx_sb_free(&b->block[i].logprobs);
    }
    hx_free(b->block);
    *b = (hx_blocks) { 0 };
}
