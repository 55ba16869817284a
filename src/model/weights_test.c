/* weights_test.c - checkpoints: real ones against counts and sums made by Python, and
 * every lie a file can tell. Works in a folder of its own under /tmp. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/weights.c"

#define TINY "tests/data/safetensors"
#define GLM  "tests/data/glm_tiny"

/* ---- files of a test ------------------------------------------------- */

static char work[] = "/tmp/hoist-weights-XXXXXX";

static const char *const leftovers[] = {
    ONE_NAME,        INDEX_NAME,      MTP_NAME,
    "a.safetensors", "b.safetensors", "snapshots/r1/model.safetensors",
    "blobs/x",       "snapshots/r1",  "snapshots",
    "blobs",         "outside",
};

static const char *path_of(const char *name)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/%s", work, name);
    return path;
}

static int clean(void **state)
{
    (void)state;
    for (size_t i = 0; i < HX_LEN(leftovers); i++)
        remove(path_of(leftovers[i]));
    return 0;
}

static int setup(void **state)
{
    (void)state;
    return mkdtemp(work) != NULL ? 0 : -1;
}

static int teardown(void **state)
{
    clean(state);
    return rmdir(work);
}

static void put(const char *name, const void *p, size_t n)
{
    FILE *f = fopen(path_of(name), "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

/* A safetensors file of this header and n bytes of data counting 0, 1, 2, … */
static void put_header(const char *name, const char *header, size_t n)
{
    const uint64_t len = strlen(header);
    hx_sb b = { 0 };

    hx_sb_add(&b, &len, sizeof(len));
    hx_sb_str(&b, header);
    for (size_t i = 0; i < n; i++)
        hx_sb_char(&b, (char)i);
    assert_false(b.bad);
    put(name, b.p, b.n);
    hx_sb_free(&b);
}

static hx_weights *must_open(const char *dir)
{
    hx_err err = { 0 };
    hx_weights *w;

    if (hx_weights_open(&w, dir, &err) != 0)
        fail_msg("%s", err.msg);
    return w;
}

/* The open must fail with this code, and its sentence must hold text. */
static void must_fail(const char *what, int code, const char *text)
{
    const int64_t live = hx_test_live_allocs();
    hx_err err = { 0 };
    hx_weights *w = (void *)1;
    const int rc = hx_weights_open(&w, work, &err);

    if (rc != code || w != NULL || err.code != code || strstr(err.msg, text) == NULL)
        fail_msg("%s: %d, \"%s\", expected %d with \"%s\"", what, rc, err.msg, code,
                 text);
    assert_int_equal(hx_test_live_allocs(), live);
}

/* ---- real checkpoints ------------------------------------------------ */

static uint32_t crc32_of(uint32_t crc, const void *data, size_t n)
{
    static uint32_t table[256];
    const uint8_t *p = data;

    for (uint32_t i = 0; i < 256 && table[255] == 0; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++)
            table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320 : 0);
    }
    crc = ~crc;
    for (size_t i = 0; i < n; i++)
        crc = crc >> 8 ^ table[(crc ^ p[i]) & 255];
    return ~crc;
}

/* Independent figures: json and zlib of Python; the sum is over "NAME DTYPE [SHAPE]\n"
 * and the bytes of each tensor by data_offsets, model.safetensors before mtp.safetensors.
 */
static void check_real(const char *dir, int64_t count, uint64_t bytes, uint32_t sum)
{
    uint32_t crc = 0;
    hx_weights *w;

    if (strncmp(dir, "../", 3) == 0 && !hx_file_exists(dir)) {
        printf("SKIP %s: ../shared not beside the checkout\n", dir);
        skip();
    }
    w = must_open(dir);
    assert_int_equal(hx_weights_count(w), count);
    assert_int_equal(hx_weights_bytes(w), bytes);
    for (int64_t i = 0; i < count; i++) {
        const hx_tensor *t = hx_weights_at(w, i);
        char shape[192], line[512];

        assert_ptr_equal(hx_weights_find(w, t->name), t);
        snprintf(line, sizeof(line), "%s %s %s\n", t->name, hx_dtype_name(t->dtype),
                 shape_text(shape, t->dim, t->n_dim));
        crc = crc32_of(crc, line, strlen(line));
        crc = crc32_of(crc, t->p, t->bytes);
    }
    assert_int_equal(crc, sum);
    assert_null(hx_weights_find(w, "model"));
    assert_null(hx_weights_find(w, ""));
    hx_weights_close(w);
}

#define REAL(X)                                                                          \
    X(glm_tiny, "tests/data/glm_tiny", 306, 129232, 0x730aa56c)                          \
    X(odd_offset, "tests/data/safetensors", 49, 175152, 0xcc2bb927)                      \
    X(demo_exl3, "models/demo-exl3", 1579, 21885952, 0x0c5c0dce)                         \
    X(demo_mixed, "../shared/models/demo-exl3-mixed", 1582, 21533668, 0xe8cdaf08)        \
    X(demo_bf16, "../shared/models/demo", 571, 45706912, 0xfb33eb26)                     \
    X(stories260K, "../shared/testdata/stories260K-hf", 47, 1040128, 0xc1200c6e)

#define X(name, dir, count, bytes, sum)                                                  \
    static void real_##name(void **state)                                                \
    {                                                                                    \
        (void)state;                                                                     \
        check_real(dir, count, bytes, sum);                                              \
    }
REAL(X)
#undef X

/* Data at an odd offset is used where it lies, and mtp.safetensors comes by itself. */
static void borrows(void **state)
{
    hx_weights *w = must_open(TINY);
    const hx_tensor *t = hx_weights_at(w, 0);

    (void)state;
    assert_int_equal((uintptr_t)t->p % 2, 1);
    assert_string_equal(hx_weights_file(w, t), ONE_NAME);
    hx_weights_close(w);
    w = must_open("models/demo-exl3");
    assert_string_equal(hx_weights_file(w, hx_weights_at(w, 1334)), ONE_NAME);
    assert_string_equal(hx_weights_file(w, hx_weights_at(w, 1335)), MTP_NAME);
    hx_weights_close(w);
}

static void progress(void *ud, uint64_t done, uint64_t total)
{
    uint64_t *seen = ud;

    assert_true(done > seen[0] && done <= total);
    seen[0] = done;
    seen[1] = total;
}

static void reads_in(void **state)
{
    hx_weights *w = must_open("models/demo-exl3");
    uint64_t seen[2] = { 0 };
    hx_err err = { 0 };

    (void)state;
    assert_int_equal(hx_weights_advise(w, progress, seen, &err), 0);
    assert_int_equal(seen[0], 19405084 + 2674308); /* sizes of the two files */
    assert_int_equal(seen[1], seen[0]);
    assert_int_equal(hx_weights_advise(w, NULL, NULL, &err), 0);
    hx_weights_close(w);
}

/* A file that shrinks under us is an error, not a signal (kernels from 5.14 on). */
static void shrinks(void **state)
{
    const size_t n = 1 << 20;
    hx_weights *w;
    hx_err err = { 0 };
    char page[4096];
    int rc;

    (void)state;
    put_header(
        ONE_NAME,
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[1048576],\"data_offsets\":[0,1048576]}}", n);
    w = must_open(work);
    if (madvise((void *)((uintptr_t)page & ~4095ul), 1, MADV_POPULATE_READ) != 0 &&
        errno == EINVAL) {
        hx_weights_close(w);
        skip();
    }
    assert_int_equal(truncate(path_of(ONE_NAME), 8192), 0);
    rc = hx_weights_advise(w, NULL, NULL, &err);
    assert_int_equal(rc, HX_EIO);
    assert_non_null(strstr(err.msg, "model.safetensors: cannot read"));
    hx_weights_close(w);
}

/* ---- lies in a header ------------------------------------------------ */

/* The header of a tensor and what follows inside the outer braces. */
#define T(name, dtype, shape, offsets)                                                   \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape                             \
    ",\"data_offsets\":" offsets "}"
#define A T("a", "U8", "[4]", "[0,4]")

static const struct {
    const char *what, *header;
    size_t data;
    int code;
    const char *text;
} lies[] = {
    { "end past the data", "{" T("a", "F32", "[2]", "[0,8]") "}", 7, HX_EFORMAT,
      "model.safetensors: a: ends at byte 8 of the data, the file has 7" },
    { "offset past the data", "{" A "," T("b", "F32", "[1]", "[1000,1004]") "}", 8,
      HX_EFORMAT, "b: ends at byte 1004" },
    { "reversed offsets", "{" T("a", "F32", "[1]", "[8,4]") "}", 8, HX_EFORMAT,
      "do not fit" },
    { "wrapped offsets", "{" T("a", "U8", "[2]", "[18446744073709551615,1]") "}", 8,
      HX_EFORMAT, "do not fit" },
    { "overlap", "{" A "," T("b", "U8", "[4]", "[2,6]") "}", 6, HX_EFORMAT,
      "b: starts at byte 2 of the data, expected 4: tensors overlap" },
    { "two over the same bytes", "{" A "," T("b", "I8", "[4]", "[0,4]") "}", 4,
      HX_EFORMAT, "overlap" },
    { "hole", "{" A "," T("b", "U8", "[4]", "[5,9]") "}", 9, HX_EFORMAT,
      "b: starts at byte 5 of the data, expected 4: a hole" },
    { "hole in front", "{" T("a", "U8", "[4]", "[1,5]") "}", 5, HX_EFORMAT, "a hole" },
    { "data left over", "{" A "}", 5, HX_EFORMAT,
      "5 bytes of data, but tensors end at 4" },
    { "data without tensors", "{}", 1, HX_EFORMAT, "1 bytes of data" },
    { "size and shape differ", "{" T("a", "F32", "[3]", "[0,8]") "}", 8, HX_EFORMAT,
      "model.safetensors: a: data_offsets 0 to 8 do not fit F32 [3]" },
    { "product of 2^64", "{" T("a", "U8", "[4294967296,4294967296]", "[0,0]") "}", 0,
      HX_EFORMAT, "do not fit U8 [4294967296, 4294967296]" },
    { "product of 2^64, times 1",
      "{" T("a", "U8", "[4294967296,4294967296,1]", "[0,0]") "}", 1, HX_EFORMAT,
      "do not fit" },
    { "elements fit, bytes overflow",
      "{" T("a", "F64", "[2305843009213693952]", "[0,0]") "}", 0, HX_EFORMAT,
      "do not fit" },
    { "dimension 2^63", "{" T("a", "U8", "[9223372036854775808,0]", "[0,0]") "}", 0,
      HX_EFORMAT, "dimensions below 2^63" },
    { "dimension 2^64", "{" T("a", "U8", "[18446744073709551616]", "[0,0]") "}", 0,
      HX_EFORMAT, "a number below 2^64" },
    { "dimension 2^64 + 4", "{" T("a", "U8", "[18446744073709551620]", "[0,4]") "}", 4,
      HX_EFORMAT, "a number below 2^64" },
    { "offset 2^63",
      "{" T("a", "U8", "[0]", "[9223372036854775808,9223372036854775808]") "}", 0,
      HX_EFORMAT, "ends at byte 9223372036854775808" },
    { "negative dimension", "{" T("a", "U8", "[-4]", "[0,4]") "}", 4, HX_EFORMAT,
      "a whole number" },
    { "two negative dimensions", "{" T("a", "U8", "[-2,-2]", "[0,4]") "}", 4, HX_EFORMAT,
      "a whole number" },
    { "broken dimension", "{" T("a", "U8", "[4.0]", "[0,4]") "}", 4, HX_EFORMAT,
      "expected ',' or ]" },
    { "exponent", "{" T("a", "U8", "[4e0]", "[0,4]") "}", 4, HX_EFORMAT,
      "expected ',' or ]" },
    { "leading zero", "{" T("a", "U8", "[04]", "[0,4]") "}", 4, HX_EFORMAT,
      "a whole number" },
    { "text as dimension", "{" T("a", "U8", "[\"4\"]", "[0,4]") "}", 4, HX_EFORMAT,
      "a whole number" },
    { "nine dimensions", "{" T("a", "U8", "[1,1,1,1,1,1,1,1,4]", "[0,4]") "}", 4,
      HX_EFORMAT, "fewer numbers" },
    { "nested shape", "{" T("a", "U8", "[[4]]", "[0,4]") "}", 4, HX_EFORMAT,
      "a whole number" },
    { "shape null", "{" T("a", "U8", "null", "[0,4]") "}", 4, HX_EFORMAT, "expected [" },
    { "one offset", "{" T("a", "U8", "[4]", "[0]") "}", 4, HX_EFORMAT,
      "two data_offsets" },
    { "no offset", "{" T("a", "U8", "[4]", "[]") "}", 4, HX_EFORMAT, "two data_offsets" },
    { "three offsets", "{" T("a", "U8", "[4]", "[0,4,4]") "}", 4, HX_EFORMAT,
      "fewer numbers" },
    { "unknown dtype", "{" T("a", "F33", "[1]", "[0,4]") "}", 4, HX_EUNSUP,
      "model.safetensors: a: dtype \"F33\" is not known" },
    { "lower case dtype", "{" T("a", "f32", "[1]", "[0,4]") "}", 4, HX_EUNSUP,
      "\"f32\"" },
    { "long dtype", "{" T("a", "F32222222222222222222222222", "[1]", "[0,4]") "}", 4,
      HX_EUNSUP, "dtype \"\"" },
    { "dtype that begins right", "{" T("a", "U8x", "[4]", "[0,4]") "}", 4, HX_EUNSUP,
      "\"U8x\"" },
    { "dtype number", "{\"a\":{\"dtype\":3,\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
      HX_EFORMAT, "a string" },
    { "no dtype", "{\"a\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, HX_EFORMAT,
      "dtype, shape and data_offsets" },
    { "no shape", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, HX_EFORMAT,
      "dtype, shape" },
    { "no offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, HX_EFORMAT,
      "dtype, shape" },
    { "nothing said", "{\"a\":{}}", 4, HX_EFORMAT, "dtype, shape" },
    { "dtype twice",
      "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
      4, HX_EFORMAT, "each once" },
    { "unknown member",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"x\":1}}", 4,
      HX_EFORMAT, "each once" },
    { "name twice", "{" A "," T("a", "U8", "[4]", "[4,8]") "}", 8, HX_EFORMAT,
      "model.safetensors: a: occurs twice" },
    { "same tensor twice, empty",
      "{" T("a", "U8", "[0]", "[0,0]") "," T("a", "U8", "[0]", "[0,0]") "}", 0,
      HX_EFORMAT, "occurs twice" },
    { "escaped name twice", "{" A "," T("\\u0061", "U8", "[4]", "[4,8]") "}", 8,
      HX_EFORMAT, "a: occurs twice" },
    { "control character in a name", "{" T("a\\u001b[2J", "U8", "[4]", "[0,4]") "}", 4,
      HX_EFORMAT, "control characters" },
    { "NUL in a name", "{" T("a\\u0000b", "U8", "[4]", "[0,4]") "}", 4, HX_EFORMAT, "" },
    { "bare line feed in a name", "{" T("a\n", "U8", "[4]", "[0,4]") "}", 4, HX_EFORMAT,
      "bare control character" },
    { "broken escape", "{" T("a\\q", "U8", "[4]", "[0,4]") "}", 4, HX_EFORMAT,
      "valid escapes" },
    { "bytes that are not UTF-8", "{" T("a\xff", "U8", "[4]", "[0,4]") "}", 4, HX_EFORMAT,
      "UTF-8" },
    { "cut UTF-8", "{" T("a\xe2\x82", "U8", "[4]", "[0,4]") "}", 4, HX_EFORMAT, "UTF-8" },
    { "overlong UTF-8", "{" T("a\xc0\x80", "U8", "[4]", "[0,4]") "}", 4, HX_EFORMAT,
      "UTF-8" },
    { "UTF-16 surrogate as UTF-8", "{" T("a\xed\xa0\x80", "U8", "[4]", "[0,4]") "}", 4,
      HX_EFORMAT, "UTF-8" },
    { "trailing comma", "{" A ",}", 4, HX_EFORMAT, "a string" },
    { "no comma", "{" A A "}", 4, HX_EFORMAT, "',' or }" },
    { "no colon", "{\"a\"{\"dtype\":\"U8\"}}", 4, HX_EFORMAT, "expected :" },
    { "name without quotes", "{a:1}", 4, HX_EFORMAT, "a string" },
    { "not closed", "{" A, 4, HX_EFORMAT, "',' or }" },
    { "string not closed", "{\"a", 4, HX_EFORMAT, "end of a string" },
    { "escape at the end", "{\"a\\", 4, HX_EFORMAT, "end of a string" },
    { "text behind", "{" A "} x", 4, HX_EFORMAT, "nothing after" },
    { "two objects", "{" A "}{}", 4, HX_EFORMAT, "nothing after" },
    { "comment", "{/**/" A "}", 4, HX_EFORMAT, "a string" },
    { "an array", "[" A "]", 4, HX_EFORMAT, "no safetensors header" },
    { "space before", " {" A "}", 4, HX_EFORMAT, "no safetensors header" },
    { "tensor is a list", "{\"a\":[]}", 4, HX_EFORMAT, "expected {" },
    { "deep metadata",
      "{\"__metadata__\":[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]," A "}", 4,
      HX_EFORMAT, "nested" },
    { "unbalanced metadata", "{\"__metadata__\":{\"a\":[}," A "}", 4, HX_EFORMAT, "" },
    { "no metadata value", "{\"__metadata__\":," A "}", 4, HX_EFORMAT, "valid value" },
    { "metadata not closed", "{\"__metadata__\":{\"a\":\"b\\", 4, HX_EFORMAT,
      "valid value" },
};

static void header_lies(void **state)
{
    (void)state;
    for (size_t i = 0; i < HX_LEN(lies); i++) {
        put_header(ONE_NAME, lies[i].header, lies[i].data);
        must_fail(lies[i].what, lies[i].code, lies[i].text);
    }
}

static const struct {
    const char *what, *header;
    size_t data;
    int64_t count;
} truths[] = {
    { "nothing", "{}", 0, 0 },
    { "padded", "{" A "}      \n", 4, 1 },
    { "metadata", "{\"__metadata__\":{\"format\":\"pt\",\"x\":\"},{\\\"\"}," A "}", 4,
      1 },
    { "metadata last", "{" A ",\"__metadata__\" : {\"a\":[1,{\"b\":null}]} }", 4, 1 },
    { "out of order", "{" T("b", "U8", "[4]", "[4,8]") "," A "}", 8, 2 },
    { "members in any order, spaces",
      "{ \"a\" : { \"data_offsets\" : [ 0 , 4 ] ,\t\"shape\" : [ ] , \"dtype\" : \"F32\" "
      "} }",
      4, 1 },
    { "empty tensors between others",
      "{" A "," T("e", "F32", "[0,9223372036854775807,5]", "[4,4]") "," T(
          "b", "U8", "[1]", "[4,5]") "," T("f", "U8", "[0]",
                                           "[5,5]") "," T("g", "U8", "[0]", "[0,0]") "}",
      5, 5 },
    { "any UTF-8", "{" T("\xe2\x82\xac\xf0\x9f\x98\x80", "U8", "[4]", "[0,4]") "}", 4,
      1 },
    { "eight dimensions", "{" T("a", "U8", "[1,2,1,1,2,1,1,1]", "[0,4]") "}", 4, 1 },
};

static void header_truths(void **state)
{
    hx_weights *w;

    (void)state;
    for (size_t i = 0; i < HX_LEN(truths); i++) {
        put_header(ONE_NAME, truths[i].header, truths[i].data);
        w = must_open(work);
        assert_int_equal(hx_weights_count(w), truths[i].count);
        assert_int_equal(hx_weights_bytes(w), truths[i].data);
        for (int64_t k = 0; k < hx_weights_count(w); k++)
            assert_ptr_equal(hx_weights_find(w, hx_weights_at(w, k)->name),
                             hx_weights_at(w, k));
        hx_weights_close(w);
    }
    put_header(
        ONE_NAME,
        "{" T("b", "U8", "[4]", "[4,8]") "," T("a\\u20ac", "I16", "[2,1]", "[0,4]") "}",
        8);
    w = must_open(work);
    assert_string_equal(hx_weights_at(w, 0)->name, "a\xe2\x82\xac");
    assert_int_equal(hx_weights_at(w, 0)->p[3], 3);
    assert_int_equal(hx_weights_at(w, 1)->p[3], 7);
    assert_int_equal(hx_weights_at(w, 0)->dtype, HX_DT_I16);
    assert_int_equal(hx_weights_at(w, 0)->n_dim, 2);
    assert_int_equal(hx_weights_at(w, 0)->dim[0], 2);
    hx_weights_close(w);
}

static void header_length(void **state)
{
    static const uint64_t length[] = {
        0,          1, 3, 5, 9, 100000001, UINT32_MAX, (uint64_t)1 << 63, UINT64_MAX - 7,
        UINT64_MAX,
    };
    uint8_t file[8 + 2 + 4] = { [8] = '{', [9] = '}' };

    (void)state;
    for (size_t i = 0; i < HX_LEN(length); i++) {
        memcpy(file, &length[i], 8);
        put(ONE_NAME, file, sizeof(file));
        must_fail("header length", HX_EFORMAT, ONE_NAME);
    }
    put(ONE_NAME, "", 0);
    must_fail("empty file", HX_EFORMAT, "empty");
    put_text(ONE_NAME, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
    must_fail("pointer file", HX_EFORMAT, "a pointer to the real file?");
}

/* A real file cut at every byte of its header, and at some of its data. */
static void truncated(void **state)
{
    hx_file f;
    hx_err err;
    uint64_t len;

    (void)state;
    assert_int_equal(hx_file_map(&f, TINY "/" ONE_NAME, &err), 0);
    memcpy(&len, f.p, 8);
    put(ONE_NAME, f.p, f.n);
    for (size_t n = f.n - 1; n > 0; n = n > len + 8 + 1000 ? n - 997 : n - 1) {
        assert_int_equal(truncate(path_of(ONE_NAME), (off_t)n), 0);
        must_fail("cut", HX_EFORMAT,
                  n < len + 8 ? "no safetensors header" : "is it cut short?");
    }
    hx_file_unmap(&f);
}

/* Every byte of a real header replaced: it opens as something else or fails, no more. */
static void flipped(void **state)
{
    static const char with[] = { '"', '}', '0', '9', '\\', ' ', '\xff' };
    hx_file f;
    hx_err err;
    hx_weights *w;
    uint64_t len;
    char *copy;
    int fails = 0;

    (void)state;
    assert_int_equal(hx_file_map(&f, TINY "/" ONE_NAME, &err), 0);
    memcpy(&len, f.p, 8);
    copy = hx_alloc(f.n);
    assert_non_null(copy);
    memcpy(copy, f.p, f.n);
    put(ONE_NAME, f.p, f.n);
    for (size_t i = 0; i < 8 + 600; i++)
        for (size_t k = 0; k < sizeof(with); k++) {
            FILE *file = fopen(path_of(ONE_NAME), "r+b");

            copy[i] = with[k];
            assert_int_equal(fwrite(copy, 1, 8 + 600, file), 8 + 600);
            fclose(file);
            copy[i] = (char)f.p[i];
            fails += hx_weights_open(&w, work, &err) != 0;
            hx_weights_close(w);
        }
    assert_true(fails > 2000); /* the rest are letters of names, mostly */
    hx_free(copy);
    hx_file_unmap(&f);
}

/* ---- index and files ------------------------------------------------- */

#define B T("b", "U8", "[4]", "[0,4]")

static const struct {
    const char *what, *index;
    int code;
    const char *text;
} index_lies[] = {
    { "parent", "{\"weight_map\":{\"a\":\"../a.safetensors\"}}", HX_EFORMAT,
      "../a.safetensors\": expected a plain file name" },
    { "absolute", "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", HX_EFORMAT,
      "expected a plain file name" },
    { "below", "{\"weight_map\":{\"a\":\"x/a.safetensors\"}}", HX_EFORMAT,
      "expected a plain file name" },
    { "escaped parent", "{\"weight_map\":{\"a\":\"\\u002e\\u002e\\u002fa\"}}", HX_EFORMAT,
      "plain" },
    { "dots", "{\"weight_map\":{\"a\":\"..\"}}", HX_EFORMAT,
      "expected a plain file name" },
    { "dot", "{\"weight_map\":{\"a\":\".\"}}", HX_EFORMAT, "expected a plain file name" },
    { "no name", "{\"weight_map\":{\"a\":\"\"}}", HX_EFORMAT,
      "expected a plain file name" },
    { "NUL", "{\"weight_map\":{\"a\":\"a.safetensors\\u0000\"}}", HX_EFORMAT, "" },
    { "shard absent",
      "{\"weight_map\":{\"a\":\"a.safetensors\",\"c\":\"c.safetensors\"}}", HX_EIO,
      "c.safetensors: cannot open this file of the checkpoint: No such file" },
    { "tensor absent",
      "{\"weight_map\":{\"a\":\"a.safetensors\",\"c\":\"a.safetensors\"}}", HX_EFORMAT,
      "index.json: c: not in a.safetensors" },
    { "tensor elsewhere",
      "{\"weight_map\":{\"a\":\"b.safetensors\",\"b\":\"a.safetensors\"}}", HX_EFORMAT,
      "a: not in b.safetensors" },
    { "link out", "{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"outside\"}}",
      HX_EFORMAT, "outside: a link that leads out of the model folder" },
    { "no map", "{\"metadata\":{}}", HX_EFORMAT, "no weight_map" },
    { "empty map", "{\"weight_map\":{}}", HX_EFORMAT, "no weight_map" },
    { "two maps", "{\"weight_map\":{\"a\":\"a.safetensors\"},\"weight_map\":{}}",
      HX_EFORMAT, "one weight_map" },
    { "list", "{\"weight_map\":[\"a\"]}", HX_EFORMAT, "expected {" },
    { "number", "{\"weight_map\":{\"a\":1}}", HX_EFORMAT, "a string" },
    { "not JSON", "weights", HX_EFORMAT, "expected {" },
    { "deep", "{\"metadata\":[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]}", HX_EFORMAT,
      "nested" },
    { "text behind", "{\"weight_map\":{\"a\":\"a.safetensors\"}}}", HX_EFORMAT,
      "nothing after" },
    { "empty", "", HX_EFORMAT, "empty" },
};

static void index_files(void **state)
{
    hx_weights *w;

    (void)state;
    must_fail("empty folder", HX_EIO, "neither model.safetensors nor");
    put_header("a.safetensors", "{" A "}", 4);
    put_header("b.safetensors", "{" B "}", 4);
    assert_int_equal(symlink("/bin/sh", path_of("outside")), 0);
    for (size_t i = 0; i < HX_LEN(index_lies); i++) {
        put_text(INDEX_NAME, index_lies[i].index);
        must_fail(index_lies[i].what, index_lies[i].code, index_lies[i].text);
    }
    /* A single file beside an index is not read. */
    put_text(ONE_NAME, "no checkpoint");
    put_text(INDEX_NAME,
             "{\"metadata\":{\"total_size\":8},\"weight_map\":{\"b\":\"b.safetensors\","
             "\"a\":\"a.safetensors\"},\"more\":[]}");
    w = must_open(work);
    assert_int_equal(hx_weights_count(w), 2);
    assert_string_equal(hx_weights_file(w, hx_weights_find(w, "a")), "a.safetensors");
    assert_string_equal(hx_weights_file(w, hx_weights_find(w, "b")), "b.safetensors");
    hx_weights_close(w);

    put_header("b.safetensors", "{" A "}", 4);
    put_text(INDEX_NAME,
             "{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"b.safetensors\"}}");
    must_fail("twice in two shards", HX_EFORMAT,
              "b.safetensors: a: occurs twice; also in a.safetensors");
}

static void mtp_file(void **state)
{
    hx_weights *w;

    (void)state;
    put_header("a.safetensors", "{" A "}", 4);
    put_header(MTP_NAME, "{" B "}", 4);
    put_text(INDEX_NAME, "{\"weight_map\":{\"a\":\"a.safetensors\"}}");
    w = must_open(work);
    assert_int_equal(hx_weights_count(w), 2);
    hx_weights_close(w);
    put_text(INDEX_NAME,
             "{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"mtp.safetensors\"}}");
    w = must_open(work);
    assert_int_equal(hx_weights_count(w), 2);
    assert_string_equal(hx_weights_file(w, hx_weights_find(w, "b")), MTP_NAME);
    hx_weights_close(w);
    put_header(MTP_NAME, "{" A "}", 4);
    put_text(INDEX_NAME, "{\"weight_map\":{\"a\":\"a.safetensors\"}}");
    must_fail("twice", HX_EFORMAT,
              "mtp.safetensors: a: occurs twice; also in a.safetensors");
}

/* Links inside the folder are fine, and so are those of a Hugging Face cache snapshot. */
static void links(void **state)
{
    hx_err err;
    hx_weights *w;
    char dir[256];

    (void)state;
    put_header("a.safetensors", "{" A "}", 4);
    assert_int_equal(symlink("a.safetensors", path_of(ONE_NAME)), 0);
    w = must_open(work);
    assert_int_equal(hx_weights_count(w), 1);
    hx_weights_close(w);

    assert_int_equal(mkdir(path_of("blobs"), 0700), 0);
    assert_int_equal(mkdir(path_of("snapshots"), 0700), 0);
    assert_int_equal(mkdir(path_of("snapshots/r1"), 0700), 0);
    put_header("blobs/x", "{" A "}", 4);
    assert_int_equal(symlink("../../blobs/x", path_of("snapshots/r1/" ONE_NAME)), 0);
    snprintf(dir, sizeof(dir), "%s/snapshots/r1/", work);
    w = must_open(dir);
    assert_int_equal(hx_weights_count(w), 1);
    assert_string_equal(hx_weights_file(w, hx_weights_at(w, 0)), ONE_NAME);
    hx_weights_close(w);
    assert_int_equal(remove(path_of("snapshots/r1/" ONE_NAME)), 0);
    assert_int_equal(symlink("../../a.safetensors", path_of("snapshots/r1/" ONE_NAME)),
                     0);
    assert_int_equal(hx_weights_open(&w, dir, &err), HX_EFORMAT);
    assert_non_null(strstr(err.msg, "leads out of the model folder"));

    assert_int_equal(hx_weights_open(&w, "/nonexistent", &err), HX_EIO);
    assert_int_equal(hx_weights_open(&w, NULL, &err), HX_EIO);
    assert_int_equal(hx_weights_open(&w, TINY "/" ONE_NAME, &err), HX_EIO);
}

/* More names than a table of small size, all found and nothing else. */
static void many_names(void **state)
{
    const int n = 30000;
    hx_sb b = { 0 };
    hx_weights *w;
    char name[64];

    (void)state;
    for (int i = 0; i < n; i++)
        hx_sb_printf(&b,
                     "%c\"model.layers.%d.%x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_"
                     "offsets\":[%d,%d]}",
                     i > 0 ? ',' : '{', i % 91, i, i, i + 1);
    hx_sb_char(&b, '}');
    put_header(ONE_NAME, b.p, (size_t)n);
    hx_sb_free(&b);
    w = must_open(work);
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "model.layers.%d.%x", i % 91, i);
        assert_int_equal(hx_weights_find(w, name)->p[0], i & 255);
        assert_ptr_equal(hx_weights_find(w, name), hx_weights_at(w, i));
        snprintf(name, sizeof(name), "model.layers.%d.%x", i % 91 + 1, i);
        assert_null(hx_weights_find(w, name));
    }
    hx_weights_close(w);
}

/* ---- vectors --------------------------------------------------------- */

static void vectors(void **state)
{
    /* The first values of the file, by struct.unpack of Python. */
    static const float norm[] = { 0x1.64p+0f, 0x1.56p-1f, 0x1.2ep+0f, 0x1.9ep-1f };
    hx_weights *w = must_open(GLM);
    const hx_tensor *t;
    hx_err err = { 0 };
    hx_buf buf;
    float conv[64];

    (void)state;
    assert_int_equal(
        hx_weights_vec(w, &(hx_vec_want) { "model.language_model.norm.weight", { 32 } },
                       &buf, &err),
        0);
    assert_int_equal(buf.n, 32 * sizeof(float));
    assert_int_equal((uintptr_t)buf.p % 16, 0);
    assert_memory_equal(buf.p, norm, sizeof(norm));

    t = hx_weights_find(w, "model.language_model.layers.0.self_attn.q_conv1d.weight");
    assert_int_equal(
        hx_weights_copy(w, &(hx_vec_want) { t->name, { 16, 1, 4 } }, conv, &err), 0);
    for (int i = 0; i < 64; i++) {
        uint32_t word;

        memcpy(&word, &conv[i], sizeof(word));
        assert_int_equal(word, (uint32_t)(t->p[2 * i] | t->p[2 * i + 1] << 8) << 16);
    }
    assert_int_equal(
        hx_weights_copy(w, &(hx_vec_want) { t->name, { 16, 4 } }, conv, &err),
        HX_EFORMAT);
    assert_string_equal(
        err.msg, "model.safetensors: model.language_model.layers.0.self_attn.q_conv1d."
                 "weight: shape [16, 1, 4], expected [16, 4]");
    assert_int_equal(hx_weights_vec(w, &(hx_vec_want) { "none", { 16, 4 } }, &buf, &err),
                     HX_EFORMAT);
    assert_null(buf.p);
    assert_string_equal(err.msg, "checkpoint: tensor none is missing");
    hx_weights_close(w);

    /* Bytes 0, 1, 2, …: F32 0x03020100, F16 0x0504, and dtypes that are no vector. */
    put_header(ONE_NAME,
               "{" T("f", "F32", "[]", "[0,4]") "," T("h", "F16", "[1]", "[4,6]") "," T(
                   "i", "I32", "[2]",
                   "[6,14]") "," T("z", "F16", "[57]",
                                   "[14,128]") "," T("g", "BF16", "[1]", "[128,130]") "}",
               130);
    w = must_open(work);
    assert_int_equal(hx_weights_copy(w, &(hx_vec_want) { "f", { 0 } }, conv, &err), 0);
    assert_memory_equal(conv, "\0\1\2\3", 4);
    assert_int_equal(hx_weights_copy(w, &(hx_vec_want) { "h", { 1 } }, conv, &err), 0);
    assert_true(conv[0] == 0x1.41p-14f); /* 0x0504 = (1 + 260/1024) 2^-14 */
    assert_int_equal(hx_weights_copy(w, &(hx_vec_want) { "i", { 2 } }, conv, &err),
                     HX_EFORMAT);
    assert_string_equal(err.msg,
                        "model.safetensors: i: dtype I32, expected F32, F16 or BF16");
    assert_int_equal(hx_weights_vec(w, &(hx_vec_want) { "z", { 57 } }, &buf, &err),
                     HX_EFORMAT);
    assert_string_equal(err.msg, "model.safetensors: z: value 55 is not finite");
    hx_weights_close(w);
}

/* ---- matrices -------------------------------------------------------- */

static int mat(hx_weights *w, const char *key, int64_t n, int64_t k, hx_mat *m,
               hx_err *err)
{
    return hx_weights_mat(w, &(hx_mat_want) { key, n, k, 4, 4 }, m, err);
}

#define EXPERT  "model.language_model.layers.1.mlp.experts.0."
#define INDEXER "model.language_model.layers.2.self_attn.indexer."

static void plain_matrices(void **state)
{
    hx_weights *w = must_open(GLM);
    hx_err err = { 0 };
    hx_mat m;

    (void)state;
    assert_int_equal(mat(w, EXPERT "gate_proj", 8, 32, &m, &err), 0);
    assert_int_equal(m.fmt, HX_FMT_FP8);
    assert_ptr_equal(m.w, hx_weights_find(w, EXPERT "gate_proj.weight")->p);
    assert_ptr_equal(m.scale, hx_weights_find(w, EXPERT "gate_proj.weight_scale_inv")->p);
    assert_int_equal(m.block_n * 16 + m.block_k, 4 * 16 + 4);
    assert_true(m.n == 8 && m.k == 32 && m.bias == NULL && m.suh == NULL);
    assert_int_equal(mat(w, "lm_head", 64, 32, &m, &err), 0);
    assert_int_equal(m.fmt, HX_FMT_BF16);
    assert_ptr_equal(m.w, hx_weights_find(w, "lm_head.weight")->p);
    /* a name without .weight, and a vector that is no bias of it */
    assert_int_equal(mat(w, INDEXER "index_kpool_compress_gate", 8, 32, &m, &err), 0);
    assert_ptr_equal(m.w, hx_weights_find(w, INDEXER "index_kpool_compress_gate")->p);
    /* a convolution as a matrix */
    assert_int_equal(
        mat(w, "model.language_model.layers.0.self_attn.q_conv1d", 16, 4, &m, &err), 0);

    assert_int_equal(mat(w, "lm_head", 32, 64, &m, &err), HX_EFORMAT);
    assert_string_equal(
        err.msg, "model.safetensors: lm_head.weight: shape [64, 32], expected [32, 64]");
    assert_true(m.w == NULL && m.n == 0);
    assert_int_equal(mat(w, "lm_head", 64, 31, &m, &err), HX_EFORMAT);
    assert_int_equal(mat(w, "model.language_model.norm", 32, 1, &m, &err), HX_EFORMAT);
    assert_int_equal(mat(w, "lm", 64, 32, &m, &err), HX_EFORMAT);
    assert_string_equal(err.msg, "checkpoint: neither lm.weight nor .trellis");
    assert_int_equal(mat(w, "lm_head", 0, 32, &m, &err), HX_EARG);
    assert_int_equal(
        hx_weights_mat(w, &(hx_mat_want) { EXPERT "gate_proj", 8, 32, 0, 0 }, &m, &err),
        HX_EFORMAT);
    assert_non_null(strstr(err.msg, "weight_block_size"));
    assert_int_equal(
        hx_weights_mat(w, &(hx_mat_want) { EXPERT "gate_proj", 8, 32, 4, 8 }, &m, &err),
        HX_EFORMAT);
    assert_string_equal(err.msg,
                        "model.safetensors: " EXPERT
                        "gate_proj.weight_scale_inv: shape [2, 8], expected [2, 4]");
    assert_true(hx_weights_has(w, "lm_head") &&
                hx_weights_has(w, INDEXER "index_kpool_compress_gate"));
    assert_false(hx_weights_has(w, "lm"));
    hx_weights_close(w);
}

/* Blocks that do not divide the matrix: the grid is rounded up. */
static void fp8_edges(void **state)
{
    hx_weights *w;
    hx_err err;
    hx_mat m;

    (void)state;
    put_header(ONE_NAME,
               "{" T("x.weight", "F8_E4M3", "[9,6]",
                     "[0,54]") "," T("x.weight_scale_inv", "F32", "[3,2]", "[54,78]") "}",
               78);
    w = must_open(work);
    assert_int_equal(mat(w, "x", 9, 6, &m, &err), 0);
    assert_ptr_equal(m.scale, (const uint8_t *)m.w + 54);
    assert_int_equal(hx_weights_mat(w, &(hx_mat_want) { "x", 9, 6, 3, 3 }, &m, &err), 0);
    assert_int_equal(hx_weights_mat(w, &(hx_mat_want) { "x", 9, 6, 2, 3 }, &m, &err),
                     HX_EFORMAT);
    assert_int_equal(hx_weights_mat(w, &(hx_mat_want) { "x", 9, 6, 3, 2 }, &m, &err),
                     HX_EFORMAT);
    hx_weights_close(w);
}

static void exl3_matrices(void **state)
{
    hx_weights *w = must_open(TINY);
    hx_err err = { 0 };
    hx_mat m;
    char key[128], name[160];

    (void)state;
    for (int e = 0; e < 4; e++)
        for (int p = 0; p < 3; p++) {
            static const char *const proj[] = { "gate", "up", "down" };
            const int64_t n = p < 2 ? 128 : 256, k = p < 2 ? 256 : 128;

            snprintf(key, sizeof(key), "model.layers.3.mlp.experts.%d.%s_proj", e,
                     proj[p]);
            assert_true(hx_weights_has(w, key));
            assert_int_equal(mat(w, key, n, k, &m, &err), 0);
            assert_int_equal(m.fmt, HX_FMT_EXL3);
            assert_int_equal(m.codebook, HX_CB_MUL1);
            assert_int_equal(m.k2, p < 2 ? 6 : 8); /* K 3, 3, 4 */
            assert_true(m.n == n && m.k == k && m.n_pad == n && m.k_pad == k &&
                        m.bias == NULL);
            snprintf(name, sizeof(name), "%s.trellis", key);
            assert_ptr_equal(m.w, hx_weights_find(w, name)->p);
            snprintf(name, sizeof(name), "%s.suh", key);
            assert_ptr_equal(m.suh, hx_weights_find(w, name)->p);
            snprintf(name, sizeof(name), "%s.svh", key);
            assert_ptr_equal(m.svh, hx_weights_find(w, name)->p);
            /* 100 is padded to 128, 300 is not 256 */
            assert_int_equal(mat(w, key, n - 28, k - 28, &m, &err), 0);
            assert_true(m.n == n - 28 && m.n_pad == n && m.k == k - 28 && m.k_pad == k);
            assert_int_equal(mat(w, key, 300, k, &m, &err), HX_EFORMAT);
        }
    assert_string_equal(
        err.msg, "model.safetensors: model.layers.3.mlp.experts.3.down_proj.trellis: "
                 "shape [8, 16, 64], expected [8, 24, 16 bits]");
    hx_weights_close(w);
}

/* Matrix "x" of these parts: bytes of each are word repeated. */
typedef struct {
    const char *suffix, *dtype;
    int64_t dim[4]; /* ends at the first 0 */
    uint32_t word;
} xpart;

static void put_parts(const xpart *p, size_t n)
{
    hx_sb head = { 0 }, data = { 0 }, file = { 0 };
    uint64_t len;

    for (size_t i = 0; i < n && p[i].suffix != NULL; i++) {
        int64_t count = 1;
        int32_t n_dim = 0, d = 0;
        const size_t begin = data.n;
        char shape[192];

        while (n_dim < 4 && p[i].dim[n_dim] != 0)
            count *= p[i].dim[n_dim++];
        while (strcmp(dtypes[d].name, p[i].dtype) != 0)
            d++;
        for (int64_t b = 0; b < count * dtypes[d].bytes; b++)
            hx_sb_char(&data, (char)(p[i].word >> b % 4 * 8));
        hx_sb_printf(
            &head, "%s\"x%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
            i > 0 ? "," : "{", p[i].suffix, p[i].dtype,
            shape_text(shape, p[i].dim, n_dim), begin, data.n);
    }
    hx_sb_char(&head, '}');
    len = head.n;
    hx_sb_add(&file, &len, sizeof(len));
    hx_sb_add(&file, head.p, head.n);
    hx_sb_add(&file, data.p, data.n);
    assert_false(file.bad || head.bad || data.bad);
    put(ONE_NAME, file.p, file.n);
    hx_sb_free(&head);
    hx_sb_free(&data);
    hx_sb_free(&file);
}

#define ONES 0x3c003c00 /* two f16 1.0 */
#define TRELLIS(w)                                                                       \
    {                                                                                    \
        ".trellis", "I16", { 8, 16, w }, 0x12345678                                      \
    }
#define SUH                                                                              \
    {                                                                                    \
        ".suh", "F16", { 128 }, ONES                                                     \
    }
#define SVH                                                                              \
    {                                                                                    \
        ".svh", "F16", { 256 }, ONES                                                     \
    }
#define MUL1                                                                             \
    {                                                                                    \
        ".mul1", "I32", { 0 }, 0x83dcd12d                                                \
    }
#define MCG                                                                              \
    {                                                                                    \
        ".mcg", "I32", { 0 }, 0xcbac1fed                                                 \
    }

/* n = 256 outputs, k = 128 inputs, but for the FP8 ones: 4 x 4 blocks as well. code 0:
 * opens, with k2 and codebook as given (a plain matrix: k2 0). */
static const struct {
    const char *what;
    xpart part[6];
    int code;
    const char *text;
    int k2;
    hx_codebook codebook;
} matrices[] = {
    { "K 1, 3inst", { TRELLIS(16), SUH, SVH }, 0, "", 2, HX_CB_3INST },
    { "K 8, mcg", { TRELLIS(128), SUH, SVH, MCG }, 0, "", 16, HX_CB_MCG },
    { "K 5, mul1", { TRELLIS(80), SUH, SVH, MUL1 }, 0, "", 10, HX_CB_MUL1 },
    { "K 1.5", { TRELLIS(24), SUH, SVH, MUL1 }, 0, "", 3, HX_CB_MUL1 },
    { "K 2.5", { TRELLIS(40), SUH, SVH, MUL1 }, 0, "", 5, HX_CB_MUL1 },
    { "K 3.5", { TRELLIS(56), SUH, SVH, MUL1 }, 0, "", 7, HX_CB_MUL1 },
    { "U16 trellis",
      { { ".trellis", "U16", { 8, 16, 48 }, 0 }, SUH, SVH },
      0,
      "",
      6,
      HX_CB_3INST },
    { "wins over .weight",
      { TRELLIS(48), SUH, SVH, { ".weight", "F32", { 9 }, 0 } },
      0,
      "",
      6,
      HX_CB_3INST },
    { "K 0",
      { TRELLIS(8), SUH, SVH, MUL1 },
      HX_EFORMAT,
      "x.trellis: shape [8, 16, 8]",
      0,
      0 },
    { "K 4.5",
      { TRELLIS(72), SUH, SVH, MUL1 },
      HX_EFORMAT,
      "x.trellis: shape [8, 16, 72]",
      0,
      0 },
    { "K 8.5", { TRELLIS(136), SUH, SVH, MUL1 }, HX_EFORMAT, "shape [8, 16, 136]", 0, 0 },
    { "K 9", { TRELLIS(144), SUH, SVH, MUL1 }, HX_EFORMAT, "shape [8, 16, 144]", 0, 0 },
    { "no whole half",
      { TRELLIS(52), SUH, SVH, MUL1 },
      HX_EFORMAT,
      "shape [8, 16, 52]",
      0,
      0 },
    { "K 2.5 mcg",
      { TRELLIS(40), SUH, SVH, MCG },
      HX_EFORMAT,
      "codebook is not mul1",
      0,
      0 },
    { "K 2.5 3inst",
      { TRELLIS(40), SUH, SVH },
      HX_EFORMAT,
      "codebook is not mul1",
      0,
      0 },
    { "I32 trellis",
      { { ".trellis", "I32", { 8, 16, 24 }, 0 }, SUH, SVH },
      HX_EFORMAT,
      "x.trellis: dtype I32, expected I16",
      0,
      0 },
    { "2-D trellis",
      { { ".trellis", "I16", { 8, 768 }, 0 }, SUH, SVH },
      HX_EFORMAT,
      "x.trellis: shape [8, 768], expected [8, 16, 16 bits]",
      0,
      0 },
    { "4-D trellis",
      { { ".trellis", "I16", { 8, 16, 48, 1 }, 0 }, SUH, SVH },
      HX_EFORMAT,
      "shape [8, 16, 48, 1]",
      0,
      0 },
    { "turned trellis",
      { { ".trellis", "I16", { 16, 8, 48 }, 0 }, SUH, SVH },
      HX_EFORMAT,
      "shape [16, 8, 48], expected [8, 16, 16 bits]",
      0,
      0 },
    { "trellis of more inputs",
      { { ".trellis", "I16", { 9, 16, 48 }, 0 }, SUH, SVH },
      HX_EFORMAT,
      "shape [9, 16, 48], expected [8, 16, 16 bits]",
      0,
      0 },
    { "no suh", { TRELLIS(48), SVH }, HX_EFORMAT, "x.suh is missing", 0, 0 },
    { "no svh", { TRELLIS(48), SUH }, HX_EFORMAT, "x.svh is missing", 0, 0 },
    { "short suh",
      { TRELLIS(48), { ".suh", "F16", { 127 }, ONES }, SVH },
      HX_EFORMAT,
      "x.suh: shape [127], expected [128]",
      0,
      0 },
    { "long svh",
      { TRELLIS(48), SUH, { ".svh", "F16", { 257 }, ONES } },
      HX_EFORMAT,
      "x.svh: shape [257], expected [256]",
      0,
      0 },
    { "BF16 suh",
      { TRELLIS(48), { ".suh", "BF16", { 128 }, ONES }, SVH },
      HX_EFORMAT,
      "x.suh: dtype BF16, expected F16",
      0,
      0 },
    { "infinite suh",
      { TRELLIS(48), { ".suh", "F16", { 128 }, 0x7c003c00 }, SVH },
      HX_EFORMAT,
      "x.suh: value 1 is not finite",
      0,
      0 },
    { "NaN in svh",
      { TRELLIS(48), SUH, { ".svh", "F16", { 256 }, 0x3c00fe00 } },
      HX_EFORMAT,
      "x.svh: value 0 is not finite",
      0,
      0 },
    { "both markers",
      { TRELLIS(48), SUH, SVH, MUL1, MCG },
      HX_EFORMAT,
      "both mcg and mul1",
      0,
      0 },
    { "wrong multiplier",
      { TRELLIS(48), SUH, SVH, { ".mul1", "I32", { 0 }, 0xcbac1fed } },
      HX_EUNSUP,
      "x.mul1: multiplier 0xCBAC1FED, only 0x83DCD12D",
      0,
      0 },
    { "marker of two",
      { TRELLIS(48), SUH, SVH, { ".mcg", "I32", { 2 }, 0xcbac1fed } },
      HX_EFORMAT,
      "x.mcg: shape [2], expected []",
      0,
      0 },
    { "wide marker",
      { TRELLIS(48), SUH, SVH, { ".mcg", "I64", { 0 }, 0xcbac1fed } },
      HX_EFORMAT,
      "x.mcg: dtype I64",
      0,
      0 },
    { "very old",
      { TRELLIS(48), SUH, SVH, { ".scale", "F16", { 1 }, 0 } },
      HX_EUNSUP,
      "too old",
      0,
      0 },
    { "short su",
      { TRELLIS(48), { ".su", "I16", { 7 }, 0 }, SVH },
      HX_EFORMAT,
      "x.su: shape [7], expected [8]",
      0,
      0 },
    { "F16 su",
      { TRELLIS(48), { ".su", "F16", { 8 }, 0 }, SVH },
      HX_EFORMAT,
      "x.su: dtype F16",
      0,
      0 },
    { "bias of another length",
      { TRELLIS(48), SUH, SVH, { ".bias", "F16", { 255 }, 0 } },
      HX_EFORMAT,
      "x.bias: shape [255], expected [256]",
      0,
      0 },
    { "bias of 2 dimensions",
      { TRELLIS(48), SUH, SVH, { ".bias", "F16", { 256, 1 }, 0 } },
      HX_EFORMAT,
      "x.bias: shape [256, 1]",
      0,
      0 },
    { "integer bias",
      { TRELLIS(48), SUH, SVH, { ".bias", "I16", { 256 }, 0 } },
      HX_EFORMAT,
      "x.bias: dtype I16",
      0,
      0 },
    { "NaN bias",
      { TRELLIS(48), SUH, SVH, { ".bias", "F32", { 256 }, 0x7fc00000 } },
      HX_EFORMAT,
      "x.bias: value 0 is not finite",
      0,
      0 },
    { "large bias",
      { TRELLIS(48), SUH, SVH, { ".bias", "F32", { 256 }, 0x47c35000 } },
      HX_EFORMAT,
      "x.bias: value 0, 100000, exceeds f16",
      0,
      0 },
    { "plain f16", { { ".weight", "F16", { 256, 128 }, ONES } }, 0, "", 0, 0 },
    { "plain f32",
      { { ".weight", "F32", { 256, 128 }, 0 }, { ".bias", "BF16", { 256 }, 0 } },
      0,
      "",
      0,
      0 },
    { "image patches", { { ".weight", "F32", { 256, 2, 8, 8 }, 0 } }, 0, "", 0, 0 },
    { "integer weight",
      { { ".weight", "I8", { 256, 128 }, 0 } },
      HX_EFORMAT,
      "x.weight: dtype I8",
      0,
      0 },
    { "F8_E5M2",
      { { ".weight", "F8_E5M2", { 256, 128 }, 0 } },
      HX_EFORMAT,
      "dtype F8_E5M2",
      0,
      0 },
    { "1-D weight",
      { { ".weight", "F16", { 256 }, 0 } },
      HX_EFORMAT,
      "x.weight: shape [256], expected [256, 128]",
      0,
      0 },
    { "patches that do not fit",
      { { ".weight", "F32", { 256, 2, 8, 9 }, 0 } },
      HX_EFORMAT,
      "shape [256, 2, 8, 9], expected [256, 128]",
      0,
      0 },
    { "right product, wrong rows",
      { { ".weight", "F32", { 128, 256 }, 0 } },
      HX_EFORMAT,
      "shape [128, 256]",
      0,
      0 },
    { "empty bias",
      { { ".weight", "F16", { 256, 128 }, 0 }, { ".bias", "F16", { 128 }, 0 } },
      HX_EFORMAT,
      "x.bias: shape [128], expected [256]",
      0,
      0 },
    { "FP8",
      { { ".weight", "F8_E4M3", { 256, 128 }, 0 },
        { ".weight_scale_inv", "F32", { 64, 32 }, 0 } },
      0,
      "",
      0,
      0 },
    { "FP8 without grid",
      { { ".weight", "F8_E4M3", { 256, 128 }, 0 } },
      HX_EFORMAT,
      "x.weight: F8_E4M3 without its _scale_inv",
      0,
      0 },
    { "FP8 turned grid",
      { { ".weight", "F8_E4M3", { 256, 128 }, 0 },
        { ".weight_scale_inv", "F32", { 32, 64 }, 0 } },
      HX_EFORMAT,
      "shape [32, 64], expected [64, 32]",
      0,
      0 },
    { "FP8 half grid",
      { { ".weight", "F8_E4M3", { 256, 128 }, 0 },
        { ".weight_scale_inv", "F16", { 64, 32 }, 0 } },
      HX_EFORMAT,
      "dtype F16, expected F32",
      0,
      0 },
    { "FP8 NaN grid",
      { { ".weight", "F8_E4M3", { 256, 128 }, 0 },
        { ".weight_scale_inv", "F32", { 64, 32 }, 0xffc00000 } },
      HX_EFORMAT,
      "not finite",
      0,
      0 },
};

static void matrix_lies(void **state)
{
    hx_err err;
    hx_mat m;

    (void)state;
    for (size_t i = 0; i < HX_LEN(matrices); i++) {
        hx_weights *w;
        int rc;

        put_parts(matrices[i].part, HX_LEN(matrices[i].part));
        w = must_open(work);
        err = (hx_err) { 0 };
        rc = mat(w, "x", 256, 128, &m, &err);
        if (rc != matrices[i].code || strstr(err.msg, matrices[i].text) == NULL)
            fail_msg("%s: %d \"%s\", expected %d \"%s\"", matrices[i].what, rc, err.msg,
                     matrices[i].code, matrices[i].text);
        if (rc != 0)
            assert_true(m.w == NULL && m.n == 0);
        else if (m.k2 != matrices[i].k2 || m.codebook != matrices[i].codebook ||
                 m.w == NULL)
            fail_msg("%s: k2 %d, codebook %d", matrices[i].what, m.k2, (int)m.codebook);
        hx_weights_close(w);
    }
}

/* Old files: bit i of word j is the sign of channel 16 j + i (exl3.md 2.1). */
static void packed_signs(void **state)
{
    static const xpart parts[] = { TRELLIS(48),
                                   { ".su", "I16", { 8 }, 0x8001fffe },
                                   { ".sv", "U16", { 16 }, 0x00ff0000 },
                                   { ".bias", "F32", { 256 }, 0x3f802000 } };
    static const uint16_t su[2] = { 0xfffe, 0x8001 }, sv[2] = { 0x0000, 0x00ff };
    hx_err err;
    hx_weights *w;
    hx_mat m;

    (void)state;
    put_parts(parts, HX_LEN(parts));
    w = must_open(work);
    assert_int_equal(mat(w, "x", 256, 128, &m, &err), 0);
    for (int i = 0; i < 128; i++)
        assert_int_equal(((const uint16_t *)m.suh)[i],
                         su[i / 16 % 2] >> i % 16 & 1 ? 0xbc00 : 0x3c00);
    for (int i = 0; i < 256; i++)
        assert_int_equal(((const uint16_t *)m.svh)[i],
                         sv[i / 16 % 2] >> i % 16 & 1 ? 0xbc00 : 0x3c00);
    for (int i = 0; i < 256; i++) /* 1 + 2^-10 */
        assert_int_equal(((const uint16_t *)m.bias)[i], 0x3c01);
    hx_weights_close(w);
}

/* Bias: as long as the outputs, or as the padded outputs; f16 is borrowed. */
static void bias_lengths(void **state)
{
    static const xpart padded[] = {
        TRELLIS(48), SUH, SVH, { ".bias", "F16", { 256 }, ONES }
    };
    static const xpart exact[] = {
        TRELLIS(48), SUH, SVH, { ".bias", "BF16", { 200 }, 0x40004000 }
    };
    hx_err err;
    hx_weights *w;
    hx_mat m;

    (void)state;
    put_parts(padded, HX_LEN(padded));
    w = must_open(work);
    assert_int_equal(mat(w, "x", 200, 100, &m, &err), 0);
    assert_ptr_equal(m.bias, hx_weights_find(w, "x.bias")->p);
    hx_weights_close(w);
    put_parts(exact, HX_LEN(exact));
    w = must_open(work);
    assert_int_equal(mat(w, "x", 200, 100, &m, &err), 0);
    assert_int_equal(((const uint16_t *)m.bias)[199], 0x4000);
    assert_int_equal(mat(w, "x", 201, 100, &m, &err), HX_EFORMAT);
    hx_weights_close(w);

    put_header(ONE_NAME,
               "{" T("x.weight", "U8", "[0]",
                     "[0,0]") "," T("x.bias", "F16", "[0]",
                                    "[4,4]") "," T("x", "BF16", "[1,2]", "[0,4]") "}",
               4);
    w = must_open(work);
    assert_int_equal(mat(w, "x", 1, 2, &m, &err), HX_EFORMAT);
    assert_string_equal(
        err.msg,
        "model.safetensors: x.weight: dtype U8, expected F32, F16, BF16 or F8_E4M3");
    hx_weights_close(w);
    put_header(ONE_NAME,
               "{" T("x.weight", "BF16", "[1,2]", "[0,4]") "," T("x.bias", "F16", "[0]",
                                                                 "[4,4]") "}",
               4);
    w = must_open(work);
    assert_int_equal(mat(w, "x", 1, 2, &m, &err), HX_EFORMAT);
    assert_string_equal(err.msg, "model.safetensors: x.bias: shape [0], expected [1]");
    hx_weights_close(w);
}

/* ---- failures -------------------------------------------------------- */

static int load_all(hx_err *err)
{
    hx_weights *w;
    hx_buf buf;
    hx_mat m;
    int rc;

    if ((rc = hx_weights_open(&w, work, err)) != 0) {
        assert_null(w);
        return rc;
    }
    if ((rc = mat(w, "x", 256, 128, &m, err)) == 0)
        rc = hx_weights_vec(w, &(hx_vec_want) { "x.suh2", { 4000 } }, &buf, err);
    hx_weights_close(w);
    return rc;
}

/* The k-th allocation or read fails, for every k; an index, escapes and conversions take
 * part. */
static void every_failure(void **state)
{
    static const xpart parts[] = { TRELLIS(48),
                                   { ".su", "I16", { 8 }, 0 },
                                   { ".sv", "I16", { 16 }, 0 },
                                   { ".bias", "F32", { 256 }, 0 },
                                   { ".suh2", "F32", { 4000 }, 0 } };
    const int64_t live = hx_test_live_allocs();
    hx_err err;
    int64_t k;
    int rc;

    (void)state;
    put_parts(parts, HX_LEN(parts));
    put_text(INDEX_NAME, "{\"metadata\":{\"a\":[1]},\"weight_map\":{\"x.tr\\u0065llis\":"
                         "\"model.safetensors\"}}");
    for (k = 1;; k++) {
        hx_test_fail_at(k);
        err = (hx_err) { 0 };
        rc = load_all(&err);
        hx_test_fail_at(0);
        assert_int_equal(hx_test_live_allocs(), live);
        if (rc == 0)
            break;
        assert_true(rc == HX_ENOMEM || rc == HX_EIO);
        assert_int_equal(err.code, rc);
        assert_true(err.msg[0] != '\0');
    }
    assert_true(k > 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define X(name, dir, count, bytes, sum) cmocka_unit_test(real_##name),
        REAL(X)
#undef X
            cmocka_unit_test(borrows),
        cmocka_unit_test(reads_in),
        cmocka_unit_test_teardown(shrinks, clean),
        cmocka_unit_test_teardown(header_lies, clean),
        cmocka_unit_test_teardown(header_truths, clean),
        cmocka_unit_test_teardown(header_length, clean),
        cmocka_unit_test_teardown(truncated, clean),
        cmocka_unit_test_teardown(flipped, clean),
        cmocka_unit_test_teardown(index_files, clean),
        cmocka_unit_test_teardown(mtp_file, clean),
        cmocka_unit_test_teardown(links, clean),
        cmocka_unit_test_teardown(many_names, clean),
        cmocka_unit_test_teardown(vectors, clean),
        cmocka_unit_test(plain_matrices),
        cmocka_unit_test_teardown(fp8_edges, clean),
        cmocka_unit_test(exl3_matrices),
        cmocka_unit_test_teardown(matrix_lies, clean),
        cmocka_unit_test_teardown(packed_signs, clean),
        cmocka_unit_test_teardown(bias_lengths, clean),
        cmocka_unit_test_teardown(every_failure, clean),
    };

    return cmocka_run_group_tests_name("weights", tests, setup, teardown);
}
