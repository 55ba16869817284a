/* enc_kern_body.h - the text of the encoder's kernels, compiled once per instruction set
 * by enc_kern_*.c, which define:
 *
 *   W        floats in a vector register: 4, 8 or 16
 *   TABLE    name of the table
 *   KERNEL, INLINE   how functions are declared
 *   TALL     rows of a product that are carried together; TALL * 16 / W registers
 *   mad(a, b, c)     a b + c, fused
 *   spread(p, bits)  lane l is p[l >> bits]; may read W floats
 *   keep_less(c, best, which, t)   lanes where c < best: best = c, which = t
 *   put_picks(p, which)   HX_ENC_GROUP lanes as bytes */

#define P (HX_ENC_GROUP / W) /* vectors in a group */

#if defined(__clang__)
#define UNROLL /* clang does at -O2 */
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE vf all(float x)
{
    return x - (vf) { 0 };
}

INLINE vf load(const float *p)
{
    vf x;

    memcpy(&x, p, sizeof x);
    return x;
}

/* Sixteen overlaps of both tiles: each value is read once for the two. */
INLINE void step_group(const hx_enc_step *s, int64_t o, int in, int out, bool track)
{
    const vf ta = all(s->target[0]), tb = all(s->target[1]);
    vf best[2][P];
    vi which[2][P], vt = { 0 };

    UNROLL
    for (int v = 0; v < P; v++) {
        best[0][v] = best[1][v] = all(HX_ENC_FAR);
        which[0][v] = which[1][v] = (vi) { 0 };
    }
    for (int t = 0; t < 1 << out; t++, vt += 1) {
        const int64_t state = ((int64_t)t << (16 - out)) + o;

        UNROLL
        for (int v = 0; v < P; v++) {
            const int64_t from = (state + v * W) >> in;
            const vf x = load(s->value + state + v * W), da = x - ta, db = x - tb;
            const vf ca = mad(da, da, spread(s->prev[0] + from, in));
            const vf cb = mad(db, db, spread(s->prev[1] + from, in));

            if (track) {
                keep_less(ca, best[0][v], which[0][v], vt);
                keep_less(cb, best[1][v], which[1][v], vt);
            } else {
                best[0][v] = smaller(ca, best[0][v]);
                best[1][v] = smaller(cb, best[1][v]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        UNROLL
        for (int v = 0; v < P; v++)
            memcpy(s->next[i] + o + v * W, &best[i][v], sizeof best[i][v]);
        if (track)
            put_picks(s->pick[i] + o, which[i]);
    }
}

#define STEP(in, out)                                                                    \
    KERNEL void step_##in##_##out(const hx_enc_step *s)                                  \
    {                                                                                    \
        for (int64_t o = 0; o < 65536 >> (out); o += HX_ENC_GROUP)                       \
            if (s->pick[0] != NULL)                                                      \
                step_group(s, o, in, out, true);                                         \
            else                                                                         \
                step_group(s, o, in, out, false);                                        \
    }

/* Whole rates, and the half ones between, whose positions alternate. */
/* clang-format off */
#define RATES(X)                                                                         \
    X(1, 1) X(2, 2) X(3, 3) X(4, 4) X(5, 5) X(6, 6) X(7, 7) X(8, 8)                      \
    X(1, 2) X(2, 1) X(2, 3) X(3, 2) X(3, 4) X(4, 3)
/* clang-format on */

RATES(STEP)

KERNEL void step(const hx_enc_step *s)
{
    switch (s->in * 16 + s->out) {
#define CASE(in, out)                                                                    \
    case (in)*16 + (out):                                                                \
        step_##in##_##out(s);                                                            \
        return;
        RATES(CASE)
#undef CASE
    }
}

/* TALL rows by 16 columns stay in registers. */
INLINE void product_tile(float *c, int64_t ldc, const float *a, int64_t ars, int64_t acs,
                         const float *b, int64_t ldb, int64_t k, float sign)
{
    vf acc[TALL][P];

    UNROLL
    for (int i = 0; i < TALL; i++)
        UNROLL
    for (int v = 0; v < P; v++)
        acc[i][v] = (vf) { 0 };
    for (int64_t l = 0; l < k; l++, a += acs, b += ldb) {
        vf x[P];

        UNROLL
        for (int v = 0; v < P; v++)
            x[v] = load(b + v * W);
        UNROLL
        for (int i = 0; i < TALL; i++) {
            const vf y = all(a[i * ars]);

            UNROLL
            for (int v = 0; v < P; v++)
                acc[i][v] = mad(y, x[v], acc[i][v]);
        }
    }
    UNROLL
    for (int i = 0; i < TALL; i++)
        UNROLL
    for (int v = 0; v < P; v++) {
        const vf sum = mad(acc[i][v], all(sign), load(c + i * ldc + v * W));

        memcpy(c + i * ldc + v * W, &sum, sizeof sum);
    }
}

KERNEL void product(float *c, int64_t ldc, const float *a, int64_t ars, int64_t acs,
                    const float *b, int64_t ldb, int64_t m, int64_t n, int64_t k,
                    float sign)
{
    for (int64_t j = 0; j < n; j += HX_ENC_GROUP)
        for (int64_t i = 0; i < m; i += TALL)
            product_tile(c + i * ldc + j, ldc, a + i * ars, ars, acs, b + j, ldb, k,
                         sign);
}

const hx_enc_kern TABLE = { step, product };
