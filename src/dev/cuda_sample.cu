/* cuda_sample.cu - sampling on the GPU. Called through hx_cuda_ops once ops.c has checked
 * the arguments. The parameters and lists of the rows are packed into pinned memory and
 * copied on the stream; nothing is read back. A row that cannot be sampled gets the id
 * HX_SAMPLE_BAD_LOGIT or HX_SAMPLE_ALL_BANNED, for the host to see with the ids.
 *
 * Nothing is sorted. Ids stand in falling order of value, equal ones by lower id; every
 * question (the k best, the smallest set with some mass, the one that a draw meets) is a
 * beginning of that order. It is found digit by digit of the value's bits, most
 * significant first, with a histogram of counts and masses each. Masses are integers,
 * units of 2^-40 of the best id's weight: their sums are exact, so the order of atomics
 * does not matter. */
#include "dev/cuda.h"
#include "dev/cuda_dev.h"

enum {
    THREADS = 256,
    CHUNK = 2048, /* ids of a block */
    LEVELS = 3,   /* digits of 11, 11 and 10 bits */
    BINS = 2048,
    MAX_TOP = 20,  /* ops.c: same bound */
    MAX_ROWS = 64, /* of a turn: what the scratch holds */
    BAD_LOGIT = 1, /* bits of a status */
};

#define UNIT    0x1p40f /* of a mass: at most 2^22 ids */
#define NO_MASS UINT64_MAX

enum query { TOP_K, TOP_P, DRAW, TOP_N };

/* One row as the kernels see it; lists are byte offsets into the stage. */
struct row_param {
    float temperature, inv_t, top_p, min_p;
    float repeat, presence, frequency;
    int32_t top_k, n_hist, n_bias, n_ban, n_top;
    uint32_t hist_id, hist_count, bias, ban, mask;
    bool adjust, has_mask, want_logprob, weigh;
    double u;
};

/* A beginning of the order that is looked for, before digit `level`: what lies before all
 * values that start with key. */
struct search {
    uint64_t want_count, want_mass; /* the first with this count, or at least this mass */
    uint64_t count, mass;
    uint32_t key;
};

struct row_state {
    uint64_t peak;               /* order of the best value, ~id */
    uint64_t count, mass, mass1; /* of all that is allowed; mass1: at temperature 1 */
    uint64_t likely_count, likely_mass; /* of those that min_p keeps */
    uint64_t kept_count, kept_mass;
    search at[LEVELS];
    uint32_t draw_key, draw_tie, top_key, top_tie; /* the tie-th of value key */
    uint32_t status, n_better;
    hx_choice better[MAX_TOP]; /* above top_key, in no order */
};

struct histogram {
    uint64_t mass[BINS];
    uint32_t count[BINS];
};

struct call {
    const row_param *row;
    const char *stage;
    const float *logits;
    float *scratch, *logprob;
    hx_choice *top;
    int32_t *id;
    row_state *state; /* [R] */
    histogram *hist;  /* [R, LEVELS] */
    uint2 *tie; /* [R, 2, chunks]: how many ids have value draw_key, top_key; the first */
    int64_t n_vocab, n_token;
    int chunks;
};

/* ---- small parts ----------------------------------------------------- */

/* Smaller is better: the bits of x in falling order, both zeros alike. */
HX_DEVICE uint32_t order_of(float x)
{
    const uint32_t u = hx_bits_of(x == 0 ? 0.0f : x);

    return (u & 0x80000000u) != 0 ? u : ~u & 0x7FFFFFFFu;
}

HX_DEVICE float value_of(uint32_t order)
{
    return hx_float_of((order & 0x80000000u) != 0 ? order : ~order & 0x7FFFFFFFu);
}

HX_DEVICE float *own_of(const call &c, int64_t r)
{
    return c.scratch + r * 2 * c.n_vocab;
}

HX_DEVICE const float *values_of(const call &c, int64_t r)
{
    return c.row[r].adjust ? own_of(c, r) : c.logits + r * c.n_vocab;
}

HX_DEVICE float best_of(const row_state *s)
{
    return value_of(~(uint32_t)(s->peak >> 32));
}

/* Whether there is anything to choose from. */
HX_DEVICE bool is_good(const row_state *s)
{
    return s->status == 0 && s->peak != 0 && best_of(s) < INFINITY;
}

HX_DEVICE uint64_t units_of(float weight)
{
    return (uint64_t)(weight * UNIT);
}

HX_DEVICE uint64_t warp_sum(uint64_t v)
{
    for (int w = 16; w > 0; w /= 2)
        v += __shfl_xor_sync(~0u, v, w);
    return v;
}

template <class T> HX_DEVICE const T *list(const call &c, uint32_t at)
{
    return (const T *)(c.stage + at);
}

/* ---- adjusted logits ------------------------------------------------- */

/* Copies the logits of a row that is adjusted, masked ids as -infinity. Grid (chunks, R).
 * Moves 8 N bytes. */
__global__ void sample_copy(const __grid_constant__ call c)
{
    hx_cuda_in_turn();
    const int64_t r = blockIdx.y;
    const row_param *p = &c.row[r];
    const float *from = c.logits + r * c.n_vocab;
    float *to = own_of(c, r);
    bool bad = false;

    if (!p->adjust)
        return;
    for (int64_t i = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
         i < min((int64_t)(blockIdx.x + 1) * CHUNK, c.n_token); i += THREADS) {
        const bool ok =
            !p->has_mask || (list<uint32_t>(c, p->mask)[i / 32] >> (i % 32) & 1) != 0;
        const float x = from[i];

        bad |= x != x;
        to[i] = ok ? x : -INFINITY;
    }
    if (bad)
        atomicOr(&c.state[r].status, BAD_LOGIT);
}

/* Penalties, then biases, then bans. A block for each row. */
__global__ void sample_adjust(const __grid_constant__ call c)
{
    hx_cuda_in_turn();
    const int64_t r = blockIdx.x;
    const row_param *p = &c.row[r];
    const int32_t *hist = list<int32_t>(c, p->hist_id), *ban = list<int32_t>(c, p->ban);
    const hx_bias *bias = list<hx_bias>(c, p->bias);
    float *x = own_of(c, r);

    if (!p->adjust)
        return;
    for (int i = threadIdx.x; i < p->n_hist; i += THREADS) {
        const int32_t id = hist[i], count = list<int32_t>(c, p->hist_count)[i];

        if (id >= c.n_token)
            continue;
        if (p->repeat > 0)
            x[id] = x[id] > 0 ? x[id] / p->repeat : x[id] * p->repeat;
        if (count > 0)
            x[id] -= p->frequency * (float)count + p->presence;
    }
    __syncthreads();
    /* An id may have several biases: its first entry adds them all, in order. */
    for (int i = threadIdx.x; i < p->n_bias; i += THREADS) {
        const int32_t id = bias[i].token;
        bool first = id < c.n_token;

        for (int j = 0; j < i && first; j++)
            first = bias[j].token != id;
        for (int j = i; j < p->n_bias && first; j++)
            if (bias[j].token == id)
                x[id] += bias[j].bias <= -100 ? -INFINITY : bias[j].bias;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p->n_ban; i += THREADS)
        if (ban[i] < c.n_token)
            x[ban[i]] = -INFINITY;
}

/* ---- the best, and the weights --------------------------------------- */

/* The best id of a chunk, the lowest of equals; notices NaN. Grid (chunks, R). Moves 4 N
 * bytes a row. */
__global__ void sample_peak(const __grid_constant__ call c)
{
    hx_cuda_in_turn();
    const int64_t r = blockIdx.y;
    const float *x = values_of(c, r);
    uint64_t best = 0;
    bool bad = false;

    for (int64_t i = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
         i < min((int64_t)(blockIdx.x + 1) * CHUNK, c.n_token); i += THREADS) {
        const float v = x[i];

        bad |= v != v;
        if (v > -INFINITY)
            best = max(best, (uint64_t)~order_of(v) << 32 | (uint32_t)~i);
    }
    for (int w = 16; w > 0; w /= 2)
        best = max(best, __shfl_xor_sync(~0u, best, w));
    if ((threadIdx.x & 31) == 0 && best != 0)
        atomicMax((unsigned long long *)&c.state[r].peak, best);
    if (bad)
        atomicOr(&c.state[r].status, BAD_LOGIT);
}

HX_DEVICE void add_to(uint64_t *total, uint64_t v)
{
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0 && v != 0)
        atomicAdd((unsigned long long *)total, v);
}

/* Weights exp((x - best) / temperature) and their sums. Grid (chunks, R). Moves 8 N bytes
 * a row. */
__global__ void sample_weigh(const __grid_constant__ call c)
{
    hx_cuda_in_turn();
    const int64_t r = blockIdx.y;
    const row_param *p = &c.row[r];
    row_state *s = &c.state[r];
    const float *x = values_of(c, r);
    float *weight = own_of(c, r) + c.n_vocab;
    uint64_t count = 0, mass = 0, mass1 = 0, likely_count = 0, likely_mass = 0;

    if (!p->weigh || !is_good(s))
        return;
    const float best = best_of(s);
    for (int64_t i = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
         i < min((int64_t)(blockIdx.x + 1) * CHUNK, c.n_token); i += THREADS) {
        const float d = x[i] - best;

        if (x[i] == -INFINITY)
            continue;
        count++;
        mass1 += units_of(hx_canon_exp(d));
        if (p->temperature <= 0)
            continue;
        const float w = hx_canon_exp(d * p->inv_t);
        const uint64_t u = units_of(w);
        weight[i] = w;
        mass += u;
        if (w >= p->min_p) {
            likely_count++;
            likely_mass += u;
        }
    }
    add_to(&s->count, count);
    add_to(&s->mass1, mass1);
    if (p->temperature <= 0)
        return;
    add_to(&s->mass, mass);
    add_to(&s->likely_count, likely_count);
    add_to(&s->likely_mass, likely_mass);
}

/* ---- the search ------------------------------------------------------ */

HX_DEVICE bool asks(const row_param *p, query q)
{
    return q == TOP_K   ? p->temperature > 0 && p->top_k > 0
           : q == TOP_P ? p->temperature > 0 && p->top_p > 0 && p->top_p < 1
           : q == DRAW  ? p->temperature > 0
                        : p->n_top > 0;
}

/* What is kept before a query; min_p comes last, before the draw. */
HX_DEVICE void kept_before(const row_param *p, const row_state *s, query q,
                           uint64_t *count, uint64_t *mass)
{
    const bool none = s->kept_count == 0;

    *count = none ? s->count : s->kept_count;
    *mass = none ? s->mass : s->kept_mass;
    if (q == DRAW && p->min_p > 0 && s->likely_count < *count) {
        *count = s->likely_count;
        *mass = s->likely_mass;
    }
}

HX_DEVICE search begin(const row_param *p, const row_state *s, query q)
{
    search a = { 0, NO_MASS, 0, 0, 0 };
    uint64_t count, mass;

    kept_before(p, s, q, &count, &mass);
    a.want_count = max(count, (uint64_t)1);
    if (q == TOP_K)
        a.want_count = min((uint64_t)p->top_k, a.want_count);
    else if (q == TOP_N)
        a.want_count = min((uint64_t)p->n_top, s->count);
    else if (q == TOP_P)
        a.want_mass = max((uint64_t)ceil((double)p->top_p * (double)mass), (uint64_t)1);
    else
        a.want_mass = (uint64_t)floor(p->u * (double)mass) + 1;
    return a;
}

HX_DEVICE bool reached(const search &a, uint64_t count, uint64_t mass)
{
    return count >= a.want_count || mass >= a.want_mass;
}

/* Where digits start, and how many bits they have. */
HX_DEVICE int digit_shift(int level)
{
    return level == 0 ? 21 : level == 1 ? 10 : 0;
}

/* The bin of a histogram where the search ends: its digit is added to a.key, what lies
 * before it to the sums. Returns the bin's count and mass. Whole block. */
HX_DEVICE void narrow(search *a, const histogram *h, int level, uint64_t *count,
                      uint64_t *mass)
{
    constexpr int per = BINS / THREADS;
    __shared__ uint64_t sums[2][THREADS / 32];
    __shared__ search found;
    __shared__ uint64_t bin[2];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint64_t n[per], m[per], cn = 0, cm = 0;

    for (int i = 0; i < per; i++) {
        n[i] = h->count[threadIdx.x * per + i];
        m[i] = h->mass[threadIdx.x * per + i];
        cn += n[i];
        cm += m[i];
    }
    const uint64_t own_n = cn, own_m = cm;
    for (int w = 1; w < 32; w *= 2) {
        const uint64_t on = __shfl_up_sync(~0u, cn, w), om = __shfl_up_sync(~0u, cm, w);

        cn += lane >= w ? on : 0;
        cm += lane >= w ? om : 0;
    }
    __syncthreads();
    if (lane == 31) {
        sums[0][warp] = cn;
        sums[1][warp] = cm;
    }
    __syncthreads();
    cn += a->count - own_n;
    cm += a->mass - own_m;
    for (int w = 0; w < warp; w++) {
        cn += sums[0][w];
        cm += sums[1][w];
    }
    for (int i = 0; i < per; i++) {
        if (!reached(*a, cn, cm) && reached(*a, cn + n[i], cm + m[i])) {
            found = *a;
            found.count = cn;
            found.mass = cm;
            found.key |= (uint32_t)(threadIdx.x * per + i) << digit_shift(level);
            bin[0] = n[i];
            bin[1] = m[i];
        }
        cn += n[i];
        cm += m[i];
    }
    __syncthreads();
    *a = found;
    *count = bin[0];
    *mass = bin[1];
}

/* One digit: takes the one before from its histogram, and counts the ids that share all
 * digits so far. Grid (chunks, R), 24 KiB shared. Moves 8 N bytes a row. */
__global__ void __launch_bounds__(THREADS)
    sample_digit(const __grid_constant__ call c, query q, int level)
{
    hx_cuda_in_turn();
    __shared__ uint32_t count[BINS], low[BINS], high[BINS]; /* mass: 20 bits in low */
    const int64_t r = blockIdx.y;
    const row_param *p = &c.row[r];
    row_state *s = &c.state[r];
    histogram *h = &c.hist[r * LEVELS + level];
    const float *x = values_of(c, r), *weight = own_of(c, r) + c.n_vocab;
    uint64_t unused;
    search a;

    if (!asks(p, q) || !is_good(s))
        return;
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        count[i] = low[i] = high[i] = 0;
    if (level == 0) {
        a = begin(p, s, q);
    } else {
        a = s->at[level - 1];
        narrow(&a, h - 1, level - 1, &unused, &unused);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        s->at[level] = a;
    __syncthreads();
    const int shift = digit_shift(level), done = level == 0 ? 32 : digit_shift(level - 1);
    const bool heavy = a.want_mass != NO_MASS || q == TOP_K;
    for (int64_t i = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
         i < min((int64_t)(blockIdx.x + 1) * CHUNK, c.n_token); i += THREADS) {
        const uint32_t key = order_of(x[i]);
        const int bin = (int)(key >> shift & (level == 2 ? 1023 : 2047));

        if (x[i] == -INFINITY || (level > 0 && key >> done != a.key >> done))
            continue;
        atomicAdd(&count[bin], 1u);
        if (!heavy)
            continue;
        const uint64_t u = units_of(weight[i]);
        if (u != 0) {
            atomicAdd(&low[bin], (uint32_t)(u & 0xFFFFF));
            atomicAdd(&high[bin], (uint32_t)(u >> 20));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (count[i] != 0) {
            atomicAdd(&h->count[i], count[i]);
            atomicAdd((unsigned long long *)&h->mass[i],
                      ((unsigned long long)high[i] << 20) + low[i]);
        }
}

/* The end of a search: all ids of the last bin have one value and one weight. Clears the
 * histograms for the next. A block for each row. */
__global__ void __launch_bounds__(THREADS)
    sample_found(const __grid_constant__ call c, query q)
{
    hx_cuda_in_turn();
    const int64_t r = blockIdx.x;
    const row_param *p = &c.row[r];
    row_state *s = &c.state[r];
    histogram *h = &c.hist[r * LEVELS];
    uint64_t count, mass;

    if (!asks(p, q) || !is_good(s))
        return;
    search a = s->at[LEVELS - 1];
    narrow(&a, h + LEVELS - 1, LEVELS - 1, &count, &mass);
    __syncthreads();
    for (int i = threadIdx.x; i < (int)(LEVELS * sizeof(histogram) / 4); i += THREADS)
        ((uint32_t *)h)[i] = 0;
    if (threadIdx.x != 0)
        return;
    const uint64_t each = mass / count;
    uint64_t tie = min(a.want_count - a.count, count);
    if (a.want_mass != NO_MASS && each > 0)
        tie = min(tie, (a.want_mass - a.mass + each - 1) / each);
    if (q == DRAW) {
        s->draw_key = a.key;
        s->draw_tie = (uint32_t)tie;
    } else if (q == TOP_N) {
        s->top_key = a.key;
        s->top_tie = (uint32_t)tie;
    } else {
        s->kept_count = a.count + tie;
        s->kept_mass = a.mass + tie * each;
    }
}

/* ---- the answer ------------------------------------------------------ */

/* Counts the ids of the two values in each chunk and lists those above top_key. Grid
 * (chunks, R). Moves 4 N bytes a row. */
__global__ void sample_ties(const __grid_constant__ call c)
{
    hx_cuda_in_turn();
    const int64_t r = blockIdx.y;
    const row_param *p = &c.row[r];
    row_state *s = &c.state[r];
    const float *x = values_of(c, r);
    const bool draw = asks(p, DRAW), top = asks(p, TOP_N);
    __shared__ uint32_t n[2], first[2];

    if (!is_good(s) || (!draw && !top))
        return;
    if (threadIdx.x < 2) {
        n[threadIdx.x] = 0;
        first[threadIdx.x] = UINT32_MAX;
    }
    __syncthreads();
    for (int64_t i = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
         i < min((int64_t)(blockIdx.x + 1) * CHUNK, c.n_token); i += THREADS) {
        const uint32_t key = order_of(x[i]);

        if (x[i] == -INFINITY)
            continue;
        if (draw && key == s->draw_key) {
            atomicAdd(&n[0], 1u);
            atomicMin(&first[0], (uint32_t)i);
        }
        if (top && key == s->top_key) {
            atomicAdd(&n[1], 1u);
            atomicMin(&first[1], (uint32_t)i);
        }
        if (top && key < s->top_key)
            s->better[atomicAdd(&s->n_better, 1u)] = hx_choice { (int32_t)i, x[i] };
    }
    __syncthreads();
    if (threadIdx.x < 2)
        c.tie[(r * 2 + threadIdx.x) * c.chunks + blockIdx.x] =
            make_uint2(n[threadIdx.x], first[threadIdx.x]);
}

/* The tie-th id of value key, from 1 on; one warp. which: 0 draw, 1 top. */
HX_DEVICE int32_t find_tie(const call &c, int64_t r, int which, uint32_t key,
                           uint32_t tie)
{
    const float *x = values_of(c, r);
    const uint2 *at = c.tie + (r * 2 + which) * c.chunks;
    const int lane = threadIdx.x & 31;
    int chunk = 0;

    for (;; chunk += 32) {
        const uint2 mine = chunk + lane < c.chunks ? at[chunk + lane] : make_uint2(0, 0);
        uint32_t sum = mine.x;

        for (int w = 1; w < 32; w *= 2) {
            const uint32_t o = __shfl_up_sync(~0u, sum, w);

            sum += lane >= w ? o : 0;
        }
        const uint32_t here = __ballot_sync(~0u, sum >= tie);
        if (here != 0) {
            const int l = __ffs((int)here) - 1;
            const uint32_t before = __shfl_sync(~0u, sum - mine.x, l);
            const uint32_t first = __shfl_sync(~0u, mine.y, l);

            tie -= before;
            if (tie == 1)
                return (int32_t)first;
            chunk += l;
            break;
        }
        tie -= __shfl_sync(~0u, sum, 31);
        if (chunk + 32 >= c.chunks)
            return -1;
    }
    for (int64_t i = (int64_t)chunk * CHUNK; i < c.n_token; i += 32) {
        const bool hit = i + lane < c.n_token && x[i + lane] > -INFINITY &&
                         order_of(x[i + lane]) == key;
        uint32_t hits = __ballot_sync(~0u, hit);
        const uint32_t n = (uint32_t)__popc(hits);

        if (n < tie) {
            tie -= n;
            continue;
        }
        for (; tie > 1; tie--)
            hits &= hits - 1;
        return (int32_t)i + __ffs((int)hits) - 1;
    }
    return -1;
}

/* Log-softmax of the best ids, in order; one warp, after find_tie. */
HX_DEVICE void report_top(const call &c, int64_t r, double norm, hx_choice *list)
{
    const row_param *p = &c.row[r];
    const row_state *s = &c.state[r];
    const int lane = threadIdx.x & 31, n_better = (int)s->n_better;
    const int n = n_better + (int)s->top_tie;

    for (int t = 1; t <= (int)s->top_tie; t++) {
        const int32_t id = find_tie(c, r, 1, s->top_key, (uint32_t)t);

        if (lane == 0)
            list[n_better + t - 1] = hx_choice { id, values_of(c, r)[id] };
    }
    if (lane < n_better)
        list[lane] = s->better[lane];
    __syncwarp();
    if (lane >= p->n_top)
        return;
    hx_choice *out = c.top + r * MAX_TOP;
    if (lane >= n) {
        out[lane] = hx_choice { -1, -INFINITY };
        return;
    }
    const hx_choice me = list[lane];
    int rank = 0;
    for (int i = 0; i < n; i++)
        rank += list[i].logprob > me.logprob ||
                (list[i].logprob == me.logprob && list[i].token < me.token);
    out[rank] = hx_choice { me.token, (float)((double)me.logprob - norm) };
}

/* One warp for each row. */
__global__ void sample_answer(const __grid_constant__ call c)
{
    hx_cuda_in_turn();
    __shared__ hx_choice list[MAX_TOP];
    const int64_t r = blockIdx.x;
    const row_param *p = &c.row[r];
    const row_state *s = &c.state[r];
    const bool good = is_good(s);
    int32_t id =
        s->status != 0 || s->peak != 0 ? HX_SAMPLE_BAD_LOGIT : HX_SAMPLE_ALL_BANNED;

    if (good)
        id = p->temperature > 0 ? find_tie(c, r, 0, s->draw_key, s->draw_tie)
                                : (int32_t) ~(uint32_t)s->peak;
    if (threadIdx.x == 0)
        c.id[r] = id;
    if (!good || !p->weigh)
        return;
    const double norm = (double)best_of(s) + log((double)s->mass1 * 0x1p-40);
    if (p->want_logprob && threadIdx.x == 0)
        c.logprob[r] = (float)((double)values_of(c, r)[id] - norm);
    if (p->n_top > 0)
        report_top(c, r, norm, list);
}

/* ---- launching ------------------------------------------------------- */

/* Appends n bytes to the stage; where they are. */
static uint32_t pack(char *stage, size_t *used, const void *from, size_t n)
{
    const size_t at = *used;

    if (n > 0)
        memcpy(stage + at, from, n);
    *used = at + (n + 7) / 8 * 8;
    return (uint32_t)at;
}

static size_t packed_bytes(const hx_sample_row *s, int64_t n_token)
{
    return sizeof(row_param) + (size_t)s->n_hist * 8 +
           (size_t)s->n_bias * sizeof(hx_bias) + (size_t)s->n_ban * 4 +
           (s->mask != NULL ? (size_t)hx_ceil_div(n_token, 32) * 4 : 0) + 5 * 8;
}

static row_param pack_row(const hx_sample_row *s, int64_t n_token, char *stage,
                          size_t *used)
{
    const size_t words = s->mask != NULL ? (size_t)hx_ceil_div(n_token, 32) : 0;
    row_param p = {};

    p.temperature = s->temperature;
    p.inv_t = s->temperature > 0 ? fminf(1 / s->temperature, 1e30f) : 0;
    p.top_p = s->top_p;
    p.min_p = s->min_p;
    p.repeat = s->repeat;
    p.presence = s->presence;
    p.frequency = s->frequency;
    p.top_k = s->top_k;
    p.n_hist = s->n_hist;
    p.n_bias = s->n_bias;
    p.n_ban = s->n_ban;
    p.n_top = s->n_top;
    p.hist_id = pack(stage, used, s->hist_id, (size_t)s->n_hist * 4);
    p.hist_count = pack(stage, used, s->hist_count, (size_t)s->n_hist * 4);
    p.bias = pack(stage, used, s->bias, (size_t)s->n_bias * sizeof(hx_bias));
    p.ban = pack(stage, used, s->ban, (size_t)s->n_ban * 4);
    p.mask = pack(stage, used, s->mask, words * 4);
    p.has_mask = s->mask != NULL;
    p.adjust = s->n_hist > 0 || s->n_bias > 0 || s->n_ban > 0 || s->mask != NULL;
    p.want_logprob = s->want_logprob;
    p.weigh = s->temperature > 0 || s->want_logprob || s->n_top > 0;
    p.u = hx_rng_unit(s->seed, s->counter);
    return p;
}

/* Which kernels some row of a call needs. */
typedef struct {
    bool adjust, weigh, query[4];
} needs;

static void note(needs *n, const row_param *p)
{
    const bool draws = p->temperature > 0;

    n->adjust |= p->adjust;
    n->weigh |= p->weigh;
    n->query[TOP_K] |= draws && p->top_k > 0;
    n->query[TOP_P] |= draws && p->top_p > 0 && p->top_p < 1;
    n->query[DRAW] |= draws;
    n->query[TOP_N] |= p->n_top > 0;
}

static int launch(hx_cuda *d, const call &c, int64_t rows, const needs &n, hx_err *err)
{
    static const query order[] = { TOP_K, TOP_P, DRAW, TOP_N };
    const dim3 grid((unsigned)c.chunks, (unsigned)rows), each((unsigned)rows);

    if (n.adjust) {
        HX_LAUNCH_NEXT(d, "sample", err, sample_copy, grid, THREADS, 0, c);
        HX_LAUNCH_NEXT(d, "sample", err, sample_adjust, each, THREADS, 0, c);
    }
    HX_LAUNCH_NEXT(d, "sample", err, sample_peak, grid, THREADS, 0, c);
    if (n.weigh)
        HX_LAUNCH_NEXT(d, "sample", err, sample_weigh, grid, THREADS, 0, c);
    for (size_t i = 0; i < HX_LEN(order); i++) {
        if (!n.query[order[i]])
            continue;
        for (int level = 0; level < LEVELS; level++)
            HX_LAUNCH_NEXT(d, "sample", err, sample_digit, grid, THREADS, 0, c, order[i],
                           level);
        HX_LAUNCH_NEXT(d, "sample", err, sample_found, each, THREADS, 0, c, order[i]);
    }
    if (n.query[DRAW] || n.query[TOP_N])
        HX_LAUNCH_NEXT(d, "sample", err, sample_ties, grid, THREADS, 0, c);
    HX_LAUNCH_NEXT(d, "sample", err, sample_answer, each, 32, 0, c);
    return 0;
}

static size_t state_bytes(int64_t chunks)
{
    return sizeof(row_state) + LEVELS * sizeof(histogram) +
           (size_t)chunks * 2 * sizeof(uint2);
}

/* Some rows: those that the scratch and a stage hold. */
static int sample_some(hx_cuda *d, const hx_sample_args *a, int64_t r0, int64_t rows,
                       hx_err *err)
{
    hx_cuda_stage *stage = hx_cuda_stage_take(d);
    size_t used = (size_t)rows * sizeof(row_param);
    row_param *p = (row_param *)stage->host;
    needs n = {};
    call c = {};
    cudaError_t rc;

    for (int64_t r = 0; r < rows; r++) {
        p[r] = pack_row(&a->row[r0 + r], a->n_token, stage->host, &used);
        note(&n, &p[r]);
    }
    c.row = (const row_param *)stage->dev;
    c.stage = stage->dev;
    c.logits = (const float *)a->logits.p + r0 * a->n_vocab;
    c.scratch = (float *)a->scratch.p + r0 * 2 * a->n_vocab;
    c.logprob = (float *)a->logprob.p + r0;
    c.top = (hx_choice *)a->top.p + r0 * MAX_TOP;
    c.id = (int32_t *)a->id.p + r0;
    c.n_vocab = a->n_vocab;
    c.n_token = a->n_token;
    c.chunks = (int)hx_ceil_div(a->n_token, CHUNK);
    c.state = (row_state *)d->scratch;
    c.hist = (histogram *)(c.state + rows);
    c.tie = (uint2 *)(c.hist + rows * LEVELS);
    rc = hx_cuda_stage_put(d, stage, used);
    if (rc == cudaSuccess)
        rc = cudaMemsetAsync(d->scratch, 0, (size_t)((char *)c.tie - d->scratch),
                             d->stream);
    if (rc != cudaSuccess)
        return hx_cuda_fail(err, "sample", rc);
    const int done = launch(d, c, rows, n, err);
    if (done == 0 && (rc = hx_cuda_stage_done(d, stage)) != cudaSuccess)
        return hx_cuda_fail(err, "sample", rc);
    return done;
}

extern "C" int hx_cuda_sample(hx_dev *d, const hx_sample_args *a, hx_err *err)
{
    hx_cuda *c = hx_cuda_of(d);
    const size_t each = state_bytes(hx_ceil_div(a->n_token, CHUNK));
    const int64_t most = HX_MIN((int64_t)(c->scratch_bytes / each), (int64_t)MAX_ROWS);

    if (a->n_token > 1 << 22 || most < 1)
        return hx_fail(err, HX_EARG,
                       "sample: %lld ids are more than the device was opened for",
                       (long long)a->n_token);
    for (int64_t r = 0; r < a->rows;) {
        int64_t n = 0;
        size_t bytes = 0;

        while (r + n < a->rows && n < most &&
               bytes + packed_bytes(&a->row[r + n], a->n_token) <= c->stage_bytes)
            bytes += packed_bytes(&a->row[r + n++], a->n_token);
        if (n == 0)
            return hx_fail(
                err, HX_EARG,
                "sample: row %lld: its lists take %zu bytes, at most %zu go with a "
                "call",
                (long long)r, packed_bytes(&a->row[r], a->n_token), c->stage_bytes);
        const int rc = sample_some(c, a, r, n, err);
        if (rc != 0)
            return rc;
        r += n;
    }
    return 0;
}

size_t hx_cuda_sample_scratch_bytes(const hx_dev_limits *l)
{
    const int64_t rows = HX_MAX(HX_MIN(l->max_rows, (int64_t)MAX_ROWS), 1);

    return (size_t)rows * state_bytes(hx_ceil_div(HX_MAX(l->max_n, 1), CHUNK));
}
