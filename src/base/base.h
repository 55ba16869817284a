/* base.h - what every layer stands on: errors, memory, strings, JSON, files, log,
 * clock, random numbers, worker pool, counters, test hooks.
 *
 * base.c is the only file that calls malloc or reads the environment of the
 * process (cgroup, cpuset, memory). Nothing here prints or exits. */
#ifndef HX_BASE_H
#define HX_BASE_H

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#include "hoist.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors ---------------------------------------------------------- */

#if defined(__GNUC__)
#define HX_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define HX_PRINTF(a, b)
#endif

/* Fills *err (which may be NULL) and returns code. */
int hx_fail(hx_err *err, int code, const char *fmt, ...) HX_PRINTF(3, 4);

/* For our own bugs only: logs and traps. */
void hx_panic(const char *file, int line, const char *what);
#define hx_assert(c) ((c) ? (void)0 : hx_panic(__FILE__, __LINE__, #c))

#define HX_LEN(a)    (sizeof(a) / sizeof((a)[0]))
#define HX_MIN(a, b) ((a) < (b) ? (a) : (b))
#define HX_MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- memory ---------------------------------------------------------- */

/* Zeroed; NULL when there is none. Freed with hx_free(). 64-byte aligned. */
void *hx_alloc(size_t bytes);
/* Grows or shrinks; new bytes are not zeroed; on failure p stays valid. p from
 * hx_realloc() or NULL only; freed with hx_free(). */
void *hx_realloc(void *p, size_t bytes);
/* Zeroed; NULL when n * size overflows. */
void *hx_calloc(size_t n, size_t size);
#define hx_new(T, n) ((T *)hx_calloc((size_t)(n), sizeof(T)))
/* *out = a * b; false on overflow. */
bool hx_mul(size_t a, size_t b, size_t *out);

/* Large zeroed memory straight from the system, backed as it is touched.
 * huge asks for 2 MiB pages where the system has them. */
void *hx_map(size_t bytes, bool huge);
void hx_unmap(void *p, size_t bytes);
/* Gives back the whole pages within bytes at p, of a mapping: what lay in hx_map()'s is lost,
 * a file's is read again when it is touched. evict: out of the system's cache of files too. */
void hx_map_drop(const void *p, size_t bytes, bool evict);

/* Bump allocator; everything goes at once. cap_bytes bounds the total. One thread. */
typedef struct hx_arena {
    struct hx_chunk *head;
    size_t used_bytes, cap_bytes;
} hx_arena;

void hx_arena_init(hx_arena *a, size_t cap_bytes);
void *hx_arena_alloc(hx_arena *a, size_t bytes); /* zeroed, 16-byte aligned, or NULL */
char *hx_arena_dup(hx_arena *a, const void *p, size_t n); /* copy plus a final NUL */
void hx_arena_reset(hx_arena *a);                         /* frees all */

/* Growable bytes. A failed append sets bad and keeps what was there; check once
 * at the end. max bounds n (0: no bound). p is NUL-terminated when not NULL. */
typedef struct {
    char *p;
    size_t n, cap, max;
    bool bad;
} hx_sb;

void hx_sb_add(hx_sb *b, const void *p, size_t n);
void hx_sb_str(hx_sb *b, const char *s);
void hx_sb_char(hx_sb *b, char c);
void hx_sb_printf(hx_sb *b, const char *fmt, ...) HX_PRINTF(2, 3);
void hx_sb_free(hx_sb *b);

/* ---- strings --------------------------------------------------------- */

#define HX_STR(lit) ((hx_str) { (lit), sizeof(lit) - 1 })
hx_str hx_str_c(const char *s); /* NULL gives {NULL, 0} */
bool hx_str_eq(hx_str a, hx_str b);
bool hx_str_is(hx_str a, const char *b);
int hx_hex_digit(int c); /* its value, or -1 */

/* Decodes one code point at p[0..n); returns its length 1..4, or 0 when the bytes are
 * not UTF-8 (overlong, surrogate, past U+10FFFF), or -1 when they are a valid
 * beginning that n cuts short. */
int hx_utf8_next(const char *p, size_t n, uint32_t *cp);
int hx_utf8_put(uint32_t cp, char out[4]); /* length */
bool hx_utf8_ok(const char *p, size_t n);
/* How many bytes of a maximal invalid part start at p (Unicode 3.9, U+FFFD practice). */
size_t hx_utf8_bad(const char *p, size_t n);

/* "24GiB", "900MB", "64k" (KiB), "1.5G"; plain digits are bytes, from 1,024 on. Errors:
 * HX_EARG. */
int hx_parse_size(const char *s, uint64_t *out, hx_err *err);

/* ---- JSON ------------------------------------------------------------ */

typedef struct hx_json hx_json; /* a tree; children are borrowed from the root */

typedef enum {
    HX_JSON_NULL,
    HX_JSON_BOOL,
    HX_JSON_INT,
    HX_JSON_DOUBLE,
    HX_JSON_STRING,
    HX_JSON_ARRAY,
    HX_JSON_OBJECT
} hx_json_type;

/* Strict JSON (no comments, no trailing text, valid UTF-8, nesting up to max_depth,
 * 0: 64). Errors: HX_EFORMAT with the byte offset, HX_ENOMEM. Freed with hx_json_free().
 */
int hx_json_parse(hx_json **out, hx_str text, int max_depth, hx_err *err);
/* The same of a file of at most max bytes; every error begins with its path. Errors: also
 * HX_EIO, HX_ELIMIT. */
int hx_json_read(hx_json **out, const char *path, size_t max, hx_err *err);
void hx_json_free(hx_json *j);

/* All accept NULL (type NULL, no members). */
hx_json_type hx_json_kind(const hx_json *j);
const char *hx_json_kind_name(const hx_json *j); /* "string", "integer", … */
const hx_json *hx_json_get(const hx_json *obj, const char *key); /* NULL: absent */
bool hx_json_has(const hx_json *obj, const char *key);           /* also when null */
size_t hx_json_len(const hx_json *j);                            /* members, elements */
const hx_json *hx_json_at(const hx_json *arr, size_t i);
/* Member i of an object in document order. */
const hx_json *hx_json_member(const hx_json *obj, size_t i, hx_str *key);
hx_str hx_json_str(const hx_json *j);                /* {NULL,0} unless a string */
int64_t hx_json_int(const hx_json *j, int64_t dflt); /* and doubles that are whole */
double hx_json_num(const hx_json *j, double dflt);
bool hx_json_bool(const hx_json *j, bool dflt);

/* Writers. compact: no spaces, UTF-8 as it is. python: json.dumps with separators
 * ", " and ": " (insertion order, floats as repr), ensure_ascii as asked. */
void hx_json_write(hx_sb *b, const hx_json *j);
void hx_json_write_python(hx_sb *b, const hx_json *j, bool ensure_ascii, int indent);
/* A quoted, escaped string; invalid UTF-8 becomes U+FFFD. */
void hx_json_put_str(hx_sb *b, hx_str s);
void hx_json_put_double(hx_sb *b, double v); /* shortest that reads back; as repr() */

/* ---- files ----------------------------------------------------------- */

typedef struct {
    const uint8_t *p;
    size_t n;
} hx_file; /* a read-only mapping */

/* Errors: HX_EIO, HX_EFORMAT: it is empty. */
int hx_file_map(hx_file *out, const char *path, hx_err *err);
void hx_file_unmap(hx_file *f);
/* The whole file as bytes and a final NUL; *out is freed with hx_free(). Errors: HX_EIO,
 * HX_ELIMIT: more than max bytes, HX_ENOMEM. */
int hx_file_read(const char *path, size_t max, char **out, size_t *n, hx_err *err);
bool hx_file_exists(const char *path);

/* ---- log, clock ------------------------------------------------------ */

enum { HX_LOG_ERROR, HX_LOG_WARN, HX_LOG_INFO, HX_LOG_DEBUG };
void hx_log(int level, const char *fmt, ...) HX_PRINTF(2, 3);

/* A condition whose timed waits end by the clock of hx_now_us(). */
void hx_cond_init(pthread_cond_t *c);
/* As pthread_cond_wait(), but no longer than to that time: false once it has come. */
bool hx_cond_until(pthread_cond_t *c, pthread_mutex_t *lock, int64_t us);

/* ---- random ---------------------------------------------------------- */

/* Counter-based: the same (seed, counter) gives the same 64 bits anywhere. */
uint64_t hx_rng_at(uint64_t seed, uint64_t counter);
double hx_rng_unit(uint64_t seed, uint64_t counter);   /* [0, 1) */
double hx_rng_normal(uint64_t seed, uint64_t counter); /* mean 0, deviation 1 */

/* ---- this machine ---------------------------------------------------- */

/* Memory this process may use: physical, or the cgroup's limit if lower; and what is left of
 * it, files that the system keeps in memory counted as left. */
uint64_t hx_sys_mem_bytes(void);
uint64_t hx_sys_mem_free_bytes(void);
uint64_t hx_sys_rss_bytes(void);
/* CPUs this process may run on (cpuset, cgroup quota rounded up), at least 1. */
int hx_sys_n_cpu(void);

/* ---- worker pool ----------------------------------------------------- */

typedef struct hx_pool hx_pool;
/* fn(ud, begin, end, worker): items [begin, end), worker 0..n-1. */
typedef void hx_pool_fn(void *ud, int64_t begin, int64_t end, int worker);

/* n_threads threads in all, the caller's among them (1: no thread is made); 0: one for each
 * CPU. cpus: NULL, or a list like "0-3,8" to pin them to. */
int hx_pool_open(hx_pool **out, int n_threads, const char *cpus, hx_err *err);
void hx_pool_close(hx_pool *p);
int hx_pool_size(const hx_pool *p); /* 1 for NULL */
/* Splits [0, n) in parts of at least grain items and waits for all. Which worker runs
 * which part varies; results must not depend on it. One caller at a time. NULL pool:
 * runs here. Workers spin shortly before they sleep. */
void hx_pool_run(hx_pool *p, int64_t n, int64_t grain, hx_pool_fn *fn, void *ud);
/* How long workers spin for the next run before they sleep, where each has a CPU to
 * itself; before the first run. Default: as between the operations of a step. */
void hx_pool_set_spin(hx_pool *p, int64_t spin_us);

/* ---- counters -------------------------------------------------------- */

/* One line per metric: X(name, type, help). Names get the prefix "hoist_". */
#define HX_COUNTERS(X)                                                                   \
    X(prompt_tokens_total, "counter", "Prompt tokens read.")                             \
    X(generation_tokens_total, "counter", "Tokens generated.")                           \
    X(requests_total, "counter", "Requests taken.")                                      \
    X(requests_failed_total, "counter", "Requests that ended in an error.")              \
    X(requests_cancelled_total, "counter", "Requests cancelled before their end.")       \
    X(steps_total, "counter", "Engine steps.")                                           \
    X(step_busy_us_total, "counter", "Microseconds the engine thread worked.")           \
    X(requests_stop_total, "counter", "Answers that ended by themselves.")               \
    X(requests_length_total, "counter", "Answers that ended at their limit.")            \
    X(canaries_total, "counter", "Checks of the known answer.")                          \
    X(canaries_failed_total, "counter", "Checks that found another answer.")             \
    X(stalls_total, "counter", "Times that work made no progress.")                      \
    X(degenerate_total, "counter",                                                       \
      "Answers stopped for logits that were no numbers or "                              \
      "did not change.")                                                                 \
    X(memory_verified_bytes_total, "counter",                                            \
      "Bytes of weights compared with their checksums.")                                 \
    X(memory_passes_total, "counter", "Times that all weights were compared.")           \
    X(memory_faults_total, "counter", "Weights found to have changed in memory.")        \
    X(prefix_queries_total, "counter", "Prompt tokens looked up among kept prefixes.")   \
    X(prefix_hits_total, "counter", "Of these, tokens that needed no computing.")        \
    X(pages_parked_total, "counter", "Pages moved to host memory.")                      \
    X(pages_restored_total, "counter", "Pages moved back from host memory or disk.")     \
    X(pages_evicted_total, "counter", "Kept pages given up.")                            \
    X(park_written_bytes_total, "counter", "Bytes of states and pages written to disk.") \
    X(park_disk_bytes, "gauge", "Bytes that kept states and pages take on disk.")        \
    X(preemptions_total, "counter", "Running requests parked for others.")               \
    X(expert_rows_total, "counter", "Rows computed by routed experts.")                  \
    X(experts_here_total, "counter", "Experts of decode steps read in GPU memory.")      \
    X(experts_link_total, "counter", "Experts of decode steps read over the link.")      \
    X(experts_lane_total, "counter", "Experts of decode steps computed on the CPU.")     \
    X(experts_ahead_total, "counter", "Experts of decode steps fetched before picked.")  \
    X(experts_moved_total, "counter", "Experts moved into GPU memory.")                  \
    X(experts_evicted_total, "counter", "Experts that lost their place there.")          \
    X(http_requests_total, "counter", "HTTP requests read.")                             \
    X(http_errors_total, "counter", "HTTP answers with a status of 400 and above.")      \
    X(http_connections, "gauge", "Open HTTP connections.")

typedef enum {
#define X(name, type, help) HX_C_##name,
    HX_COUNTERS(X)
#undef X
        HX_N_COUNTER
} hx_counter;

void hx_count(hx_counter c, int64_t add);
int64_t hx_counted(hx_counter c);
void hx_counters_write(hx_sb *b); /* Prometheus text */

/* ---- histograms ------------------------------------------------------ */

/* One line per series: X(name, help). All have the same buckets. */
#define HX_HISTOGRAMS(X)                                                                 \
    X(time_to_first_token_seconds, "From the request to its first token.")               \
    X(inter_token_latency_seconds, "Between two tokens of an answer.")                   \
    X(time_per_output_token_seconds, "The same under its older name.")                   \
    X(request_time_per_output_token_seconds,                                             \
      "Mean time of an answer's tokens after its first.")                                \
    X(e2e_request_latency_seconds, "From the request to its last token.")                \
    X(request_queue_time_seconds, "From the request to its start.")                      \
    X(request_prefill_time_seconds, "From its start to its first token.")                \
    X(request_decode_time_seconds, "From its first token to its last.")                  \
    X(request_inference_time_seconds, "From its start to its last token.")               \
    X(iteration_tokens_total, "Tokens read or made by an engine step.")                  \
    X(request_params_max_tokens, "Most tokens that an answer may have.")                 \
    X(request_prompt_tokens, "Tokens of a prompt.")                                      \
    X(request_generation_tokens, "Tokens of an answer.")

typedef enum {
#define X(name, help) HX_H_##name,
    HX_HISTOGRAMS(X)
#undef X
        HX_N_HISTOGRAM
} hx_histogram;

void hx_observe(hx_histogram h, double v);
/* Prometheus text; prefix goes before the names, labels ("a=\"b\"") into their braces. */
void hx_histograms_write(hx_sb *b, const char *prefix, const char *labels);

/* ---- test hooks ------------------------------------------------------ */

/* Makes the k-th (from 1) allocation or file read from now on fail, once; 0 is off.
 * Returns how many there were since the last call. Atomic, all threads. */
int64_t hx_test_fail_at(int64_t k);
int64_t hx_test_live_allocs(void); /* allocations not yet freed */
/* Between these, on this thread, an allocation is a panic. */
void hx_noalloc_begin(const char *what);
void hx_noalloc_end(void);

#ifdef __cplusplus
}
#endif
#endif
