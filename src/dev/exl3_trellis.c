/* exl3_trellis.c - the search for the states of EXL3 tiles: Viterbi over a closed walk, in
 * pairs of tiles that share every read of the codebook. Called by exl3_encode.c. Knows
 * tiles only, no matrix and no scale. Source: exl3.md 10.5, after QTIP (arXiv:2406.11235).
 */
#include "dev/enc_kern.h"
#include "dev/exl3_encode.h"
#include "dev/fmt_exl3.h"

#define N_STATE 65536
#define HALF    128 /* where the first pass starts, far from where it must be right */

/* One worker's memory: costs before and after a position, and the picks of all 256. */
typedef struct {
    float *cost[2][2]; /* [tile][turn], [n_overlap + HX_ENC_GROUP] */
    uint8_t *pick[2];  /* [256, n_overlap] */
} bench;

struct hx_trellis {
    const hx_enc_kern *kern;
    float *value; /* [N_STATE] */
    bench *bench; /* [n_worker] */
    int n_worker, k2;
    int64_t n_overlap; /* the most that a position has */
};

bool hx_trellis_takes(hx_codebook codebook, int k2)
{
    return k2 >= 2 && k2 <= 16 && (k2 % 2 == 0 || (k2 <= 7 && codebook == HX_CB_MUL1));
}

/* Bits that position p owns; p may be 256. */
static int own_bits(int k2, int p)
{
    return k2 / 2 + (k2 & p & 1);
}

int hx_trellis_open(hx_trellis **out, hx_codebook codebook, int k2, int n_worker,
                    hx_err *err)
{
    hx_trellis *t;

    *out = NULL;
    if (!hx_trellis_takes(codebook, k2))
        return hx_fail(err, HX_EARG,
                       "EXL3: no rate of %g bits; there are 1 to 8, and 1.5, 2.5, 3.5 "
                       "with mul1",
                       k2 / 2.0);
    if ((t = hx_new(hx_trellis, 1)) == NULL)
        goto no_memory;
    t->kern = hx_enc_best();
    t->k2 = k2;
    t->n_worker = n_worker;
    t->n_overlap = N_STATE >> (k2 / 2);
    t->value = hx_new(float, N_STATE);
    t->bench = hx_new(bench, n_worker);
    if (t->value == NULL || t->bench == NULL)
        goto no_memory;
    for (int w = 0; w < n_worker; w++)
        for (int i = 0; i < 2; i++) {
            bench *b = &t->bench[w];

            b->cost[i][0] = hx_new(float, t->n_overlap + HX_ENC_GROUP);
            b->cost[i][1] = hx_new(float, t->n_overlap + HX_ENC_GROUP);
            b->pick[i] = hx_new(uint8_t, 256 * t->n_overlap);
            if (b->cost[i][0] == NULL || b->cost[i][1] == NULL || b->pick[i] == NULL)
                goto no_memory;
        }
    for (uint32_t s = 0; s < N_STATE; s++)
        t->value[s] = hx_exl3_value(s, codebook);
    *out = t;
    return 0;
no_memory:
    hx_trellis_close(t);
    return hx_fail(err, HX_ENOMEM, "EXL3: no memory for %d searches", n_worker);
}

void hx_trellis_close(hx_trellis *t)
{
    if (t == NULL)
        return;
    for (int w = 0; t->bench != NULL && w < t->n_worker; w++)
        for (int i = 0; i < 2; i++) {
            hx_free(t->bench[w].cost[i][0]);
            hx_free(t->bench[w].cost[i][1]);
            hx_free(t->bench[w].pick[i]);
        }
    hx_free(t->bench);
    hx_free(t->value);
    hx_free(t);
}

static uint8_t *picks_at(const hx_trellis *t, const bench *b, int tile, int p)
{
    return b->pick[tile] + (p & 255) * t->n_overlap;
}

/* Positions first .. first + 255 around the ring from the costs in turn 0; picks are kept
 * from position keep on. The costs after the last end in turn 0 again. */
static void walk(const hx_trellis *t, bench *b, const float target[2][256], int first,
                 int keep)
{
    for (int i = 0; i < 256; i++) {
        const int p = (first + i) & 255;
        const bool track = first + i >= keep;
        const hx_enc_step s = {
            .value = t->value,
            .prev = { b->cost[0][i & 1], b->cost[1][i & 1] },
            .next = { b->cost[0][~i & 1], b->cost[1][~i & 1] },
            .pick = { track ? picks_at(t, b, 0, p) : NULL,
                      track ? picks_at(t, b, 1, p) : NULL },
            .target = { target[0][p], target[1][p] },
            .in = own_bits(t->k2, p),
            .out = own_bits(t->k2, p + 1),
        };

        t->kern->step(&s);
    }
}

/* The states from position last back to 0 of the walk that ends in overlap o. Returns the
 * overlap before position 0. */
static uint32_t trace(const hx_trellis *t, const bench *b, int tile, int last, uint32_t o,
                      uint16_t state[256])
{
    for (int p = last; p >= 0; p--) {
        const uint32_t pick = picks_at(t, b, tile, p)[o];

        state[p] = (uint16_t)(pick << (16 - own_bits(t->k2, p + 1)) | o);
        o = (uint32_t)state[p] >> own_bits(t->k2, p);
    }
    return o;
}

void hx_trellis_search(hx_trellis *t, int worker, const float target[2][256],
                       uint16_t state[2][256], float value[2][256])
{
    bench *b = &t->bench[worker];
    const int64_t n = N_STATE >> own_bits(t->k2, 256); /* overlaps between 255 and 0 */
    uint32_t seam[2];

    for (int i = 0; i < 2; i++)
        memset(b->cost[i][0], 0, (size_t)t->n_overlap * sizeof(float));
    /* From the middle once round to the middle; positions 0 to 127, the second half of
     * it, are traced back to the seam. */
    walk(t, b, target, HALF, 256);
    for (int i = 0; i < 2; i++) {
        const int64_t n_end = N_STATE >> own_bits(t->k2, HALF);
        int64_t best = 0;

        for (int64_t o = 1; o < n_end; o++)
            if (b->cost[i][0][o] < b->cost[i][0][best])
                best = o;
        seam[i] = trace(t, b, i, HALF - 1, (uint32_t)best, state[i]);
        for (int64_t o = 0; o < n; o++)
            b->cost[i][0][o] = HX_ENC_FAR;
        b->cost[i][0][seam[i]] = 0;
    }
    walk(t, b, target, 0, 0);
    for (int i = 0; i < 2; i++) {
        trace(t, b, i, 255, seam[i], state[i]);
        for (int p = 0; p < 256; p++)
            value[i][p] = t->value[state[i][p]];
    }
}

void hx_trellis_pack(int k2, const uint16_t state[256], uint8_t *tile)
{
    int bit = 0;

    memset(tile, 0, (size_t)hx_exl3_tile_bytes(k2));
    for (int p = 0; p < 256; p++)
        for (int i = own_bits(k2, p) - 1; i >= 0; i--, bit++)
            tile[(bit >> 3) ^ 3] |= (uint8_t)((state[p] >> i & 1) << (7 - (bit & 7)));
}
