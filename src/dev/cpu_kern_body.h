/* cpu_kern_body.h - the text of the vector kernels, compiled once per instruction set by
 * cpu_kern_*.c, which define:
 *
 *   W       floats in a vector register: 4, 8 or 16
 *   TARGET  function attributes that allow the instruction set
 *   TABLE   name of the table
 *   mad, larger, smaller, any: a b + c fused, a > b ? a : b, a < b ? a : b, any lane true
 *
 * What each kernel computes stands in cpu_kern.h. A step function x_at(i, w, …) does
 * elements i .. i + w - 1 and is inlined twice: for a whole vector (w is the constant W)
 * and for the rest of a row. */
#include <math.h>

#define P    (HX_KERN_LANES / W)
#define FULL HX_KERN_LANES

#if defined(__clang__)
#define UNROLL /* clang does at -O2 */
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The vector x stays in a register: gcc 12 would rather read it from memory at every use,
 * and the loads become the limit (64 x 64 x 512 products: 62 us, now 48; EPYC 7003). */
#if defined(__x86_64__)
#define KEEP(x) __asm__("" : "+v"(x))
#else
#define KEEP(x) ((void)0)
#endif

/* Calls at(i, width, …) for all of n elements, step at a time. */
#define EACH(n, step, at, ...)                                                           \
    do {                                                                                 \
        int64_t at_ = 0;                                                                 \
        for (; at_ + (step) <= (n); at_ += (step))                                       \
            at(at_, step, __VA_ARGS__);                                                  \
        if (at_ < (n))                                                                   \
            at(at_, (n)-at_, __VA_ARGS__);                                               \
    } while (0)

/* ---- vectors --------------------------------------------------------- */

INLINE vf all(float x)
{
    return x - (vf) { 0 }; /* the compiler's way to say broadcast; -0 stays -0 */
}

/* The first w lanes from p, 0 in the others. */
INLINE vf load(const float *p, int64_t w)
{
    vf x = { 0 };

    if (w >= W)
        memcpy(&x, p, sizeof(x));
    else
        for (int64_t l = 0; l < w; l++)
            x[l] = p[l];
    return x;
}

INLINE void store(float *p, vf x, int64_t w)
{
    if (w >= W)
        memcpy(p, &x, sizeof(x));
    else
        for (int64_t l = 0; l < w; l++)
            p[l] = x[l];
}

INLINE vf choose(vi mask, vf a, vf b)
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

/* The lanes below w. */
INLINE vi below(int64_t w)
{
    vi lane;

    for (int l = 0; l < W; l++)
        lane[l] = l;
    return lane < (vi) { 0 } + (int32_t)w;
}

/* hx_canon_exp() of canon.h, so that dense and routed experts agree. */
INLINE vf exp_of(vf x)
{
    const vf shift = all(12582912.0f);

    x = larger(smaller(x, all(88)), all(-87));
    const vf z = mad(x, all(1.44269504f), shift), n = z - shift;
    const vf r = mad(n, all(-1.428606820e-06f), mad(n, all(-0x1.62e4p-1f), x));
    vf p = all(1.386375749e-3f);

    p = mad(p, r, all(8.367509581e-3f));
    p = mad(p, r, all(4.166723788e-2f));
    p = mad(p, r, all(1.666653454e-1f));
    p = mad(p, r, all(0.5f));
    p = mad(p, r, all(1));
    p = mad(p, r, all(1));
    return (vf)((vi)p + ((vi)z << 23));
}

INLINE vf sigmoid(vf x)
{
    return 1 / (1 + exp_of(-x));
}

INLINE vf silu(vf x)
{
    return x / (1 + exp_of(-x));
}

/* The 16 lanes of s, in the order that cpu_kern.h names. */
INLINE float join(const vf *s)
{
#if W == 4
    const v4 t = (s[0] + s[2]) + (s[1] + s[3]);
#elif W == 8
    const vf h = s[0] + s[1];
    const v4 t = __builtin_shufflevector(h, h, 0, 1, 2, 3) +
                 __builtin_shufflevector(h, h, 4, 5, 6, 7);
#else
    const v8 h = __builtin_shufflevector(s[0], s[0], 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(s[0], s[0], 8, 9, 10, 11, 12, 13, 14, 15);
    const v4 t = __builtin_shufflevector(h, h, 0, 1, 2, 3) +
                 __builtin_shufflevector(h, h, 4, 5, 6, 7);
#endif
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* ---- sums ------------------------------------------------------------ */

/* What is added: x, x y, or (x - mean)^2. */
enum { SUM, DOT, SPREAD };

INLINE void sum_at(int64_t i, int64_t w, vf *s, const float *x, const float *y,
                   float mean, int what)
{
    UNROLL
    for (int p = 0; p < P; p++) {
        const vf a = load(x + i + p * W, w - p * W);

        if (what == SUM)
            s[p] += a;
        else if (what == DOT)
            s[p] = mad(a, load(y + i + p * W, w - p * W), s[p]);
        else {
            const vf d =
                w == FULL ? a - mean : choose(below(w - p * W), a - mean, all(0));

            s[p] = mad(d, d, s[p]);
        }
    }
}

INLINE double sum_of(const float *x, const float *y, float mean, int64_t n, int what)
{
    double total = 0;

    for (int64_t b = 0; b < n; b += HX_KERN_BLOCK) {
        const int64_t m = HX_MIN(HX_KERN_BLOCK, n - b);
        vf s[P] = { 0 };

        EACH(m, FULL, sum_at, s, x + b, y + b, mean, what);
        total += (double)join(s);
    }
    return total;
}

KERNEL double sum(const float *x, int64_t n)
{
    return sum_of(x, x, 0, n, SUM);
}

KERNEL double dot(const float *x, const float *y, int64_t n)
{
    return sum_of(x, y, 0, n, DOT);
}

KERNEL double spread(const float *x, float mean, int64_t n)
{
    return sum_of(x, x, mean, n, SPREAD);
}

/* ---- element by element ---------------------------------------------- */

INLINE void norm_at(int64_t i, int64_t n, float *y, const float *x, float mean,
                    float scale, const float *w, const float *b)
{
    vf v = (load(x + i, n) - mean) * scale;

    if (w != NULL)
        v *= load(w + i, n);
    if (b != NULL)
        v += load(b + i, n);
    store(y + i, v, n);
}

KERNEL void norm(float *y, const float *x, float mean, float scale, const float *w,
                 const float *b, int64_t n)
{
    EACH(n, W, norm_at, y, x, mean, scale, w, b);
}

INLINE void mix_at(int64_t i, int64_t w, float *y, const float *base, const float *coef,
                   const float *x, int64_t ldx, int64_t n_x)
{
    vf v = base != NULL ? load(base + i, w) : all(0);

    for (int64_t j = 0; j < n_x; j++)
        v = mad(all(coef[j]), load(x + j * ldx + i, w), v);
    store(y + i, v, w);
}

KERNEL void mix(float *y, const float *base, const float *coef, const float *x,
                int64_t ldx, int64_t n_x, int64_t n)
{
    EACH(n, W, mix_at, y, base, coef, x, ldx, n_x);
}

INLINE void merge_at(int64_t i, int64_t w, float *s, const float *y, const float *post,
                     const float *comb, int64_t ns, int64_t n)
{
    const vf v = load(y + i, w);
    vf old[8] = { 0 };

    UNROLL
    for (int64_t a = 0; a < ns; a++)
        old[a] = load(s + a * n + i, w);
    UNROLL
    for (int64_t j = 0; j < ns; j++) {
        vf t = post[j] * v;

        UNROLL
        for (int64_t a = 0; a < ns; a++)
            t = mad(all(comb[a * ns + j]), old[a], t);
        store(s + j * n + i, t, w);
    }
}

KERNEL void merge(float *s, const float *y, const float *post, const float *comb,
                  int64_t ns, int64_t n)
{
    if (ns == 4)
        EACH(n, W, merge_at, s, y, post, comb, 4, n);
    else
        EACH(n, W, merge_at, s, y, post, comb, ns, n);
}

INLINE void swiglu_at(int64_t i, int64_t w, float *y, const float *gate, const float *up,
                      float limit)
{
    vf g = load(gate + i, w), u = load(up + i, w);

    if (limit > 0) {
        g = smaller(all(limit), g); /* a NaN stays */
        u = larger(all(-limit), smaller(all(limit), u));
    }
    store(y + i, silu(g) * u, w);
}

KERNEL void swiglu(float *y, const float *g, const float *u, float limit, int64_t n)
{
    EACH(n, W, swiglu_at, y, g, u, limit);
}

INLINE void gate_at(int64_t i, int64_t w, float *y, const float *x, const float *b,
                    float a, float bound)
{
    vf v = load(x + i, w);

    if (b != NULL)
        v += load(b + i, w);
    store(y + i, bound * sigmoid(a * v), w);
}

KERNEL void gate(float *y, const float *x, const float *b, float a, float bound,
                 int64_t n)
{
    EACH(n, W, gate_at, y, x, b, a, bound);
}

INLINE void gated_at(int64_t i, int64_t n, float *y, const float *x, float scale,
                     const float *w, const float *z)
{
    store(y + i, load(x + i, n) * scale * load(w + i, n) * sigmoid(load(z + i, n)), n);
}

KERNEL void gated(float *y, const float *x, float scale, const float *w, const float *z,
                  int64_t n)
{
    EACH(n, W, gated_at, y, x, scale, w, z);
}

INLINE v4 load4(const float *p)
{
    v4 x;

    memcpy(&x, p, sizeof(x));
    return x;
}

/* Four channels of four taps. */
INLINE void taps_4x4(float *wt, int64_t ldw, const float *w)
{
    const v4 a = load4(w), b = load4(w + 4), c = load4(w + 8), d = load4(w + 12);
    const v4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    const v4 ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const v4 cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const v4 cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const v4 t[4] = {
        __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5),
        __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7),
        __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5),
        __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7),
    };

    UNROLL
    for (int j = 0; j < 4; j++)
        memcpy(wt + j * ldw, &t[j], sizeof(t[j]));
}

KERNEL void taps_of(float *wt, int64_t ldw, const float *w, int64_t taps, int64_t n)
{
    int64_t i = 0;

    for (; taps == 4 && i + 4 <= n; i += 4)
        taps_4x4(wt + i, ldw, w + i * taps);
    for (; i < n; i++)
        for (int64_t j = 0; j < taps; j++)
            wt[j * ldw + i] = w[i * taps + j];
}

INLINE void conv_at(int64_t i, int64_t n, float *y, const float *const *u, const float *w,
                    int64_t ldw, int64_t taps)
{
    vf s = load(w + i, n) * load(u[0] + i, n);

    for (int64_t j = 1; j < taps; j++)
        s = mad(load(w + j * ldw + i, n), load(u[j] + i, n), s);
    store(y + i, silu(s), n);
}

KERNEL void conv(float *y, const float *const *u, const float *w, int64_t ldw,
                 int64_t taps, int64_t n)
{
    EACH(n, W, conv_at, y, u, w, ldw, taps);
}

/* ---- mHC maps -------------------------------------------------------- */

/* Lanes are rows. One line of comb, n entries step apart, is divided by its sum + eps. */
INLINE void balance(vf *c, int64_t step, int64_t n, float eps)
{
    vf s = c[0];

    UNROLL
    for (int64_t i = 1; i < n; i++)
        s += c[i * step];
    const vf inv = 1 / (s + eps);
    UNROLL
    for (int64_t i = 0; i < n; i++)
        c[i * step] *= inv;
}

INLINE void softmax_line(vf *c, int64_t n, float eps)
{
    vf top = c[0], s = all(0);

    for (int64_t j = 1; j < n; j++)
        top = larger(top, c[j]);
    for (int64_t j = 0; j < n; j++)
        s += c[j] = exp_of(c[j] - top);
    for (int64_t j = 0; j < n; j++)
        c[j] = c[j] / s + eps;
}

INLINE void hc_lanes(float *m, const float *scale, const float *base, int64_t n,
                     float eps, int32_t iters)
{
    vf c[64];

    for (int64_t i = 0; i < 2 * n; i++) {
        float *at = m + i * FULL;
        const vf s = sigmoid(load(at, W) * scale[i >= n] + base[i]);

        store(at, i < n ? s + eps : 2 * s, W);
    }
    m += 2 * n * FULL;
    for (int64_t i = 0; i < n * n; i++)
        c[i] = load(m + i * FULL, W) * scale[2] + base[2 * n + i];
    for (int64_t i = 0; i < n; i++)
        softmax_line(c + i * n, n, eps);
    for (int32_t turn = 0; turn < iters; turn++) {
        for (int64_t i = 0; i < n && turn > 0; i++)
            balance(c + i * n, 1, n, eps);
        for (int64_t j = 0; j < n; j++)
            balance(c + j, n, n, eps);
    }
    for (int64_t i = 0; i < n * n; i++)
        store(m + i * FULL, c[i], W);
}

KERNEL void hc_maps(float *m, int64_t rows, const float *scale, const float *base,
                    int64_t n, float eps, int32_t iters)
{
    for (int64_t r = 0; r < rows; r += W)
        if (n == 4)
            hc_lanes(m + r, scale, base, 4, eps, iters);
        else
            hc_lanes(m + r, scale, base, n, eps, iters);
}

/* ---- KDA ------------------------------------------------------------- */

INLINE void kda_terms_at(int64_t i, int64_t w, float *decay, float *dk, float *dq,
                         const float *g, const float *k, const float *q)
{
    const vf e = exp_of(load(g + i, w));

    store(decay + i, e, w);
    store(dk + i, e * load(k + i, w), w);
    if (dq != NULL)
        store(dq + i, e * load(q + i, w), w);
}

KERNEL void kda_terms(float *decay, float *dk, float *dq, const float *g, const float *k,
                      const float *q, int64_t n)
{
    EACH(n, W, kda_terms_at, decay, dk, dq, g, k, q);
}

#define NV (HX_KERN_COLS / W)

/* u = S^T (decay k') and the output (decay S + k' w^T)^T q' = S^T (decay q') + (k' . q')
 * w need only the state before the row, so one pass serves two neighbouring rows. */
INLINE void kda_body(const float *src, int64_t lds, float *dst, int64_t ldd, int64_t n,
                     int64_t j0, const hx_kern_kda *done, const hx_kern_kda *next,
                     bool out, float *wp)
{
    vf w[NV] = { 0 }, u[NV] = { 0 }, o[NV] = { 0 };

    if (done != NULL) {
        UNROLL
        for (int v = 0; v < NV; v++)
            w[v] = load(wp + v * W, W);
    }
    for (int64_t d = 0; d < n; d++) {
        const vf k = all(done != NULL ? done->k[d] : 0),
                 e = all(done != NULL ? done->decay[d] : 0);
        const vf dk = all(next != NULL ? next->dk[d] : 0),
                 dq = all(out ? next->dq[d] : 0);

        UNROLL
        for (int v = 0; v < NV; v++) {
            vf s = load(src + d * lds + v * W, W);

            if (done != NULL) {
                s = mad(k, w[v], e * s);
                store(dst + d * ldd + v * W, s, W);
            }
            u[v] = next != NULL ? mad(dk, s, u[v]) : u[v];
            o[v] = out ? mad(dq, s, o[v]) : o[v];
        }
    }
    if (next == NULL)
        return;
    UNROLL
    for (int v = 0; v < NV; v++) {
        const int64_t at = j0 + v * W, left = n - at;
        const vf wn = next->beta * (load(next->v + at, left) - u[v]);

        store(wp + v * W, wn, W);
        if (out)
            store(next->o + at, mad(all(next->kq), wn, o[v]), left);
    }
}

KERNEL void kda_pass(const float *src, int64_t lds, float *dst, int64_t ldd, int64_t n,
                     int64_t j0, const hx_kern_kda *done, const hx_kern_kda *next,
                     float *w)
{
    if (next == NULL)
        kda_body(src, lds, dst, ldd, n, j0, done, NULL, false, w);
    else if (done == NULL && next->o == NULL)
        kda_body(src, lds, dst, ldd, n, j0, NULL, next, false, w);
    else if (done == NULL)
        kda_body(src, lds, dst, ldd, n, j0, NULL, next, true, w);
    else if (next->o == NULL)
        kda_body(src, lds, dst, ldd, n, j0, done, next, false, w);
    else
        kda_body(src, lds, dst, ldd, n, j0, done, next, true, w);
}

/* ---- small dense products -------------------------------------------- */

/* Rows of a and of b whose products are summed in registers together: 2 * 3 * 2 of 16
 * registers with AVX2, 4 * 4 of 32 with AVX-512. */
#if W == 16
enum { TM = 4, TN = 4 };
#else
enum { TM = 2, TN = 3 };
#endif

INLINE void dots_at(int64_t i, int64_t w, vf (*s)[TN][P], const float *a, int64_t lda,
                    int m, const float *b, int64_t ldb, int n)
{
    UNROLL
    for (int p = 0; p < P; p++) {
        vf av[TM];

        UNROLL
        for (int r = 0; r < m; r++)
            av[r] = load(a + r * lda + i + p * W, w - p * W);
        UNROLL
        for (int j = 0; j < n; j++) {
            vf bv = load(b + j * ldb + i + p * W, w - p * W);

            KEEP(bv);
            UNROLL
            for (int r = 0; r < m; r++)
                s[r][j][p] = mad(av[r], bv, s[r][j][p]);
        }
    }
}

INLINE void dots_tile(float *c, int64_t ldc, const float *a, int64_t lda, int m,
                      const float *b, int64_t ldb, int n, int64_t k)
{
    vf s[TM][TN][P] = { 0 };

    EACH(k, FULL, dots_at, s, a, lda, m, b, ldb, n);
    UNROLL
    for (int r = 0; r < m; r++) {
        UNROLL
        for (int j = 0; j < n; j++)
            c[r * ldc + j] = join(s[r][j]);
    }
}

/* Some rows of b are kept in the first cache while all of a passes. */
enum { PANEL_FLOATS = 5120 };

KERNEL void dots(float *c, int64_t ldc, const float *a, int64_t lda, int64_t m,
                 const float *b, int64_t ldb, int64_t n, int64_t k)
{
    const int64_t panel = HX_MAX(PANEL_FLOATS / k / TN, 1) * TN;

    for (int64_t j0 = 0; j0 < n; j0 += panel)
        for (int64_t r = 0, g; r < m; r += g) {
            const int64_t end = HX_MIN(j0 + panel, n);
            const float *ar = a + r * lda;
            int64_t j = j0;

            g = r + TM <= m ? TM : 1;
            for (; j + TN <= end; j += TN)
                if (g == TM)
                    dots_tile(c + r * ldc + j, ldc, ar, lda, TM, b + j * ldb, ldb, TN, k);
                else
                    dots_tile(c + r * ldc + j, ldc, ar, lda, 1, b + j * ldb, ldb, TN, k);
            for (; j < end; j++)
                if (g == TM)
                    dots_tile(c + r * ldc + j, ldc, ar, lda, TM, b + j * ldb, ldb, 1, k);
                else
                    dots_tile(c + r * ldc + j, ldc, ar, lda, 1, b + j * ldb, ldb, 1, k);
        }
}

/* Rows and vectors of z that are summed in registers together: 8 of 16. */
#define BLEND_MAX (4 * 8)

INLINE void blend_tile(float *z, int64_t ldz, const float *keep, const float *p,
                       int64_t ldp, int m, const float *c, int64_t ldc, int64_t n, int nv,
                       int64_t w)
{
    vf s[BLEND_MAX] = { 0 };

    for (int64_t j = 0; j < n; j++) {
        UNROLL
        for (int v = 0; v < nv; v++) {
            const vf cv = load(c + j * ldc + v * W, w);

            UNROLL
            for (int r = 0; r < m; r++)
                s[r * nv + v] = mad(all(p[r * ldp + j]), cv, s[r * nv + v]);
        }
    }
    UNROLL
    for (int r = 0; r < m; r++) {
        UNROLL
        for (int v = 0; v < nv; v++) {
            float *at = z + r * ldz + v * W;

            if (keep != NULL)
                s[r * nv + v] = mad(all(keep[r]), load(at, w), s[r * nv + v]);
            store(at, s[r * nv + v], w);
        }
    }
}

/* All m rows of z, in groups of g, nv vectors at a time; the columns of c that these need
 * stay in the first cache while the rows pass. */
INLINE void blend_rows(float *z, int64_t ldz, const float *keep, const float *p,
                       int64_t ldp, int64_t m, int g, const float *c, int64_t ldc,
                       int64_t n, int64_t width, int nv)
{
    for (int64_t i = 0; i < width; i += nv * W)
        for (int64_t r = 0; r < m; r += g) {
            const float *kr = keep != NULL ? keep + r : NULL;

            if (i + nv * W <= width)
                blend_tile(z + r * ldz + i, ldz, kr, p + r * ldp, ldp, g, c + i, ldc, n,
                           nv, W);
            else
                for (int64_t j = i; j < width; j += W)
                    blend_tile(z + r * ldz + j, ldz, kr, p + r * ldp, ldp, g, c + j, ldc,
                               n, 1, width - j);
        }
}

KERNEL void blend(float *z, int64_t ldz, const float *keep, const float *p, int64_t ldp,
                  int64_t m, const float *c, int64_t ldc, int64_t n, int64_t width)
{
    const int64_t m4 = m / 4 * 4, m2 = m / 2 * 2;

#define FROM(r) z + (r)*ldz, ldz, keep != NULL ? keep + (r) : NULL, p + (r)*ldp, ldp
    blend_rows(FROM(0), m4, 4, c, ldc, n, width, 2);
    blend_rows(FROM(m4), m2 - m4, 2, c, ldc, n, width, 4);
    blend_rows(FROM(m2), m - m2, 1, c, ldc, n, width, 8);
#undef FROM
}

/* ---- attention ------------------------------------------------------- */

INLINE void top_at(int64_t i, int64_t w, vf *top, const float *s, float scale)
{
    const vf v = load(s + i, w) * scale;

    *top = larger(w == W ? v : choose(below(w), v, *top), *top);
}

INLINE void soften_at(int64_t i, int64_t w, vf *sum16, float *s, float scale, float top)
{
    UNROLL
    for (int p = 0; p < P; p++) {
        const vf x = load(s + i + p * W, w - p * W) * scale - top;
        vf e = exp_of(x) + (x - x); /* which makes infinities and NaN a NaN */

        if (w != FULL)
            e = choose(below(w - p * W), e, all(0));
        store(s + i + p * W, e, w - p * W);
        sum16[p] += e;
    }
}

KERNEL float soften(float *s, float scale, float *top, int64_t n)
{
    vf t = all(*top), sum16[P] = { 0 };
    float best = *top;

    EACH(n, W, top_at, &t, s, scale);
    for (int l = 0; l < W; l++)
        best = t[l] > best ? t[l] : best;
    *top = best;
    EACH(n, FULL, soften_at, sum16, s, scale, best);
    return join(sum16);
}

KERNEL float exp_one(float x)
{
    return exp_of(all(x))[0];
}

INLINE void relu_mix_at(int64_t i, int64_t n, float *y, const float *s, int64_t lds,
                        const float *w, int64_t n_w, float scale, float w_scale)
{
    vf t = all(0);

    for (int64_t h = 0; h < n_w; h++)
        t = mad(all(w[h] * w_scale), larger(load(s + h * lds + i, n) * scale, all(0)), t);
    store(y + i, t, n);
}

KERNEL void relu_mix(float *y, const float *s, int64_t lds, const float *w, int64_t n_w,
                     float scale, float w_scale, int64_t n)
{
    EACH(n, W, relu_mix_at, y, s, lds, w, n_w, scale, w_scale);
}

INLINE void pool_at(int64_t i, int64_t w, float *out, const float *const *key,
                    const float *const *gate_row, const float *ape, int64_t ns, int64_t n)
{
    vf a[8], top = all(-INFINITY), mass = all(0), v = all(0);

    for (int64_t s = 0; s < ns; s++) {
        a[s] = load(gate_row[s] + i, w) + load(ape + s * n + i, w);
        top = larger(a[s], top);
    }
    for (int64_t s = 0; s < ns; s++) {
        const vf e = exp_of(a[s] - top);

        mass += e;
        v = mad(e, load(key[s] + i, w), v);
    }
    store(out + i, v / mass, w);
}

KERNEL void pool(float *out, const float *const *key, const float *const *gate_row,
                 const float *ape, int64_t ns, int64_t n)
{
    EACH(n, W, pool_at, out, key, gate_row, ape, ns, n);
}

/* ---- formats --------------------------------------------------------- */

INLINE vi load_u16(const uint16_t *p, int64_t w)
{
    uint16_t __attribute__((vector_size(2 * W))) h = { 0 };

    memcpy(&h, p, (size_t)HX_MIN(w, W) * sizeof(*p));
    return __builtin_convertvector(h, vi);
}

INLINE void bf16_at(int64_t i, int64_t w, float *out, const uint16_t *in)
{
    store(out + i, (vf)(load_u16(in + i, w) << 16), w);
}

/* Exponent and mantissa moved in place are the value over 2^112, subnormals too. */
INLINE void f16_at(int64_t i, int64_t w, float *out, const uint16_t *in)
{
    const vi h = load_u16(in + i, w), size = h & 0x7fff;
    const vi big = size >= 0x7c00; /* infinities and NaN */
    const vi v = (vi)((vf)(size << 13) * 0x1p112f);

    store(out + i, (vf)(v | (big & 0x7f800000) | (h & 0x8000) << 16), w);
}

/* E4M3 without infinities: likewise over 2^120; 0x7f is NaN. */
INLINE void fp8_at(int64_t i, int64_t w, float *out, const uint8_t *in, float scale)
{
    uint8_t __attribute__((vector_size(W))) c = { 0 };

    memcpy(&c, in + i, (size_t)HX_MIN(w, W));
    const uint16_t __attribute__((vector_size(2 * W))) two = __builtin_convertvector(
        c, __typeof__(two)); /* in one step gcc 12 goes bytewise */
    const vi h = __builtin_convertvector(two, vi), size = h & 0x7f;
    const vi nan = (size == 0x7f) & 0x7fc00000;
    const vi v = (vi)((vf)(size << 20) * 0x1p120f);

    store(out + i, (vf)(v | nan | (h & 0x80) << 24) * scale, w);
}

KERNEL void widen(float *out, const void *in, hx_fmt fmt, float scale, int64_t n)
{
    if (fmt == HX_FMT_BF16)
        EACH(n, W, bf16_at, out, in);
    else if (fmt == HX_FMT_F16)
        EACH(n, W, f16_at, out, in);
    else if (fmt == HX_FMT_FP8)
        EACH(n, W, fp8_at, out, in, scale);
    else
        memcpy(out, in, (size_t)n * sizeof(float));
}

/* Round to nearest even; NaN keeps its upper half and stays quiet. */
INLINE void narrow_at(int64_t i, int64_t w, uint16_t *out, const float *in)
{
    const vf x = load(in + i, w);
    const vi b = (vi)x, nan = x != x, odd = b >> 16 & 1;
    const vi r = (~nan & (b + 0x7fff + odd)) | (nan & (b | 0x400000));
    const uint16_t __attribute__((vector_size(2 * W))) h =
        __builtin_convertvector(r >> 16 & 0xffff, __typeof__(h));

    memcpy(out + i, &h, (size_t)w * sizeof(*out));
}

KERNEL void narrow(uint16_t *out, const float *in, int64_t n)
{
    EACH(n, W, narrow_at, out, in);
}

/* ---- ranking --------------------------------------------------------- */

INLINE void peak_at(int64_t i, int64_t w, vf *top, vi *bad, const float *x)
{
    const vf v =
        w == W ? load(x + i, w) : choose(below(w), load(x + i, w), all(-INFINITY));

    *top = larger(v, *top);
    *bad |= v != v;
}

KERNEL float peak(const float *x, int64_t n, bool *nan)
{
    vf t[4] = { all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY) };
    vi bad = { 0 };
    float best = -INFINITY;
    int64_t i = 0;

    for (; i + 4 * W <= n; i += 4 * W) {
        UNROLL
        for (int p = 0; p < 4; p++)
            peak_at(i + p * W, W, &t[p], &bad, x);
    }
    EACH(n - i, W, peak_at, &t[0], &bad, x + i);
    for (int p = 0; p < 4; p++)
        for (int l = 0; l < W; l++)
            best = t[p][l] > best ? t[p][l] : best;
    *nan = any(bad);
    return best;
}

KERNEL int64_t find(const float *x, int64_t n, float lo, float hi)
{
    int64_t i = 0;

    for (; i + W <= n; i += W) {
        const vf v = load(x + i, W);

        if (any((v >= lo) & (v <= hi)))
            break;
    }
    while (i < n && !(x[i] >= lo && x[i] <= hi))
        i++;
    return i;
}

INLINE void weigh_at(int64_t i, int64_t w, vf *sum16, float *p, const float *x, float top,
                     float inv)
{
    UNROLL
    for (int q = 0; q < P; q++) {
        const vf t = (load(x + i + q * W, w - q * W) - top) * inv;
        vf e = choose(t > -85, exp_of(t), all(0));

        if (w != FULL)
            e = choose(below(w - q * W), e, all(0));
        if (p != NULL)
            store(p + i + q * W, e, w - q * W);
        sum16[q] += e;
    }
}

KERNEL double weigh(float *p, const float *x, float top, float inv, int64_t n)
{
    double total = 0;

    for (int64_t b = 0; b < n; b += HX_KERN_BLOCK) {
        const int64_t m = HX_MIN(HX_KERN_BLOCK, n - b);
        vf s[P] = { 0 };

        EACH(m, FULL, weigh_at, s, p != NULL ? p + b : NULL, x + b, top, inv);
        total += (double)join(s);
    }
    return total;
}

INLINE void tally_at(int64_t i, int64_t w, vi *count, vf *sum16, const float *x,
                     const float *p, float lo)
{
    UNROLL
    for (int q = 0; q < P; q++) {
        vi in = load(x + i + q * W, w - q * W) >= lo;

        if (w != FULL)
            in &= below(w - q * W);
        count[q] -= in;
        if (p != NULL)
            sum16[q] += (vf)(in & (vi)load(p + i + q * W, w - q * W));
    }
}

KERNEL int64_t tally(const float *x, const float *p, float lo, int64_t n, double *mass)
{
    int64_t count = 0;

    *mass = 0;
    for (int64_t b = 0; b < n; b += HX_KERN_BLOCK) {
        const int64_t m = HX_MIN(HX_KERN_BLOCK, n - b);
        vi c[P] = { 0 };
        vf s[P] = { 0 };

        if (p != NULL)
            EACH(m, FULL, tally_at, c, s, x + b, p + b, lo);
        else
            EACH(m, FULL, tally_at, c, s, x + b, NULL, lo);
        for (int q = 0; q < P; q++)
            for (int l = 0; l < W; l++)
                count += c[q][l];
        *mass += (double)join(s);
    }
    return count;
}

const hx_kern TABLE = {
    .sum = sum,
    .dot = dot,
    .spread = spread,
    .norm = norm,
    .mix = mix,
    .merge = merge,
    .hc_maps = hc_maps,
    .swiglu = swiglu,
    .gate = gate,
    .gated = gated,
    .taps = taps_of,
    .conv = conv,
    .kda_terms = kda_terms,
    .kda_pass = kda_pass,
    .dots = dots,
    .blend = blend,
    .soften = soften,
    .exp = exp_one,
    .relu_mix = relu_mix,
    .pool = pool,
    .widen = widen,
    .narrow = narrow,
    .peak = peak,
    .find = find,
    .weigh = weigh,
    .tally = tally,
};
