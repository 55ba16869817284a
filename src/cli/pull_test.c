/* pull_test.c - libcurl's numbers against its header, names that must not be written, headers of
 * answers, files that go on. The network is tests/suite_pull.sh. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<curl/curl.h>)
#include <curl/curl.h>
#define HAVE_CURL_H
#endif
#endif

#include "cli/pull.c"
#include "cli/pull_file.c"
#include "cli/pull_net.c"

static void test_abi(void **state)
{
    (void)state;
#ifdef HAVE_CURL_H
#define SAME(ours, theirs) assert_int_equal(CURL_##ours, theirs)
    SAME(OPT_WRITEDATA, CURLOPT_WRITEDATA);
    SAME(OPT_URL, CURLOPT_URL);
    SAME(OPT_RANGE, CURLOPT_RANGE);
    SAME(OPT_ERRORBUFFER, CURLOPT_ERRORBUFFER);
    SAME(OPT_USERAGENT, CURLOPT_USERAGENT);
    SAME(OPT_HTTPHEADER, CURLOPT_HTTPHEADER);
    SAME(OPT_HEADERDATA, CURLOPT_HEADERDATA);
    SAME(OPT_XFERINFODATA, CURLOPT_XFERINFODATA);
    SAME(OPT_WRITEFUNCTION, CURLOPT_WRITEFUNCTION);
    SAME(OPT_HEADERFUNCTION, CURLOPT_HEADERFUNCTION);
    SAME(OPT_XFERINFOFUNCTION, CURLOPT_XFERINFOFUNCTION);
    SAME(OPT_LOW_SPEED_LIMIT, CURLOPT_LOW_SPEED_LIMIT);
    SAME(OPT_LOW_SPEED_TIME, CURLOPT_LOW_SPEED_TIME);
    SAME(OPT_NOPROGRESS, CURLOPT_NOPROGRESS);
    SAME(OPT_FOLLOWLOCATION, CURLOPT_FOLLOWLOCATION);
    SAME(OPT_MAXREDIRS, CURLOPT_MAXREDIRS);
    SAME(OPT_CONNECTTIMEOUT, CURLOPT_CONNECTTIMEOUT);
    SAME(OPT_NOSIGNAL, CURLOPT_NOSIGNAL);
    SAME(OPT_PROTOCOLS, 181); /* deprecated by name, not by number */
    SAME(OPT_REDIR_PROTOCOLS, 182);
    SAME(INFO_RESPONSE_CODE, CURLINFO_RESPONSE_CODE);
    SAME(INFO_RETRY_AFTER, CURLINFO_RETRY_AFTER);
    SAME(PROTO_HTTP, CURLPROTO_HTTP);
    SAME(PROTO_HTTPS, CURLPROTO_HTTPS);
    assert_true(CURL_ERROR_BYTES >= CURL_ERROR_SIZE);
    assert_int_equal(sizeof(curl_off_t), sizeof(int64_t));
#else
    printf("SKIP pull_abi: no curl/curl.h\n");
    skip();
#endif
}

static void test_names(void **state)
{
    static const char *const bad[] = { "",     "/etc/passwd", "../x",    "a/../b",
                                       "a//b", "a/",          "a\\b",    "a\nb",
                                       "a/.x", ".x",          "\xff.bin" },
                             *const good[] = { "config.json", "a/b c.bin", "x..y",
                                               "\xc3\xa4.txt" };

    (void)state;
    for (size_t i = 0; i < HX_LEN(bad); i++)
        if (safe_name(hx_str_c(bad[i])))
            fail_msg("\"%s\" passes", bad[i]);
    for (size_t i = 0; i < HX_LEN(good); i++)
        if (!safe_name(hx_str_c(good[i])))
            fail_msg("\"%s\" does not pass", good[i]);
}

static void test_repo_names(void **state)
{
    static const char *const bad[] = { "name",  "a/b/c", "/a",     "a/",
                                       "a b/c", "a/b@",  "a/b?x=1" };
    hx_err err;

    (void)state;
    for (size_t i = 0; i < HX_LEN(bad); i++) {
        const hx_pull p = { .repo = bad[i] };
        puller q = { .p = &p };

        assert_int_equal(read_names(&q, NULL, &err), HX_EARG);
    }
    const hx_pull p = { .repo = "own-er/na.me@refs/pr/1" };
    puller q = { .p = &p };

    assert_int_equal(read_names(&q, "http://h/", &err), 0);
    assert_string_equal(q.repo, "own-er/na.me");
    assert_string_equal(q.rev, "refs/pr/1");
    assert_string_equal(q.endpoint, "http://h");
}

static void header(pull_request *r, const char *line)
{
    transfer t = { NULL, NULL, r };
    char copy[512];

    snprintf(copy, sizeof copy, "%s", line);
    assert_int_equal(on_header(copy, 1, strlen(copy), &t), strlen(line));
}

static void test_headers(void **state)
{
    pull_request r = { 0 };

    (void)state;
    header(&r, "HTTP/1.1 302 Found\r\n");
    header(&r, "Content-Range: bytes 1-2/3\r\n");
    header(&r, "HTTP/2 206\r\n");
    assert_int_equal(r.range_from, -1); /* that was the redirect's */
    header(&r, "content-RANGE:  bytes 100-199/12345678901 \r\n");
    assert_int_equal(r.range_from, 100);
    assert_int_equal(r.range_total, 12345678901);
    header(
        &r,
        "Link: <http://h/a?page=1>; rel=\"prev\", <http://h/b?page=3>; rel=\"next\"\r\n");
    assert_string_equal(r.next, "http://h/b?page=3");
    header(&r, "HTTP/1.1 200 OK\r\n");
    assert_string_equal(r.next, "");
    header(&r, "Link: <http://h/b>; rel=\"prev\"\r\n");
    assert_string_equal(r.next, "");
}

/* sha256("abc") and git's blob hash of "abc\n", both published. */
static void test_hashes(void **state)
{
    char dir[] = "/tmp/hoist-pull-XXXXXX", path[64], got[65];
    hx_err err = { 0 };
    pull_file f = { .name = (char *)(uintptr_t) "f", .size = 3, .there = true };
    FILE *o;

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/f", dir);
    o = fopen(path, "w");
    fputs("abc", o);
    fclose(o);
    snprintf(f.hash, sizeof f.hash,
             "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_int_equal(pull_file_check(&f, dir, NULL, got, &err), 1);
    f.hash[5] ^= 1;
    assert_int_equal(pull_file_check(&f, dir, NULL, got, &err), 0);
    o = fopen(path, "w");
    fputs("abc\n", o);
    fclose(o);
    f.size = 4;
    snprintf(f.hash, sizeof f.hash, "8baef1b4abc478178b004d62031cf7fe6db6f903");
    assert_int_equal(pull_file_check(&f, dir, NULL, got, &err), 1);
    unlink(path);
    rmdir(dir);
}

/* Counters of another file, or impossible ones, count for nothing. */
static void test_maps(void **state)
{
    char dir[] = "/tmp/hoist-pull-XXXXXX", path[64];
    const uint64_t size = PULL_PART_BYTES + 10;
    hx_err err = { 0 };
    pull_file a = { .name = (char *)(uintptr_t) "f", .size = size }, b, c;

    (void)state;
    assert_non_null(mkdtemp(dir));
    memset(a.hash, '1', 64);
    b = c = a;
    c.hash[0] = '2';
    assert_int_equal(pull_file_look(&a, dir, &err), 0);
    assert_int_equal(a.n_part, 2);
    assert_int_equal(pull_file_begin(&a, dir, &err), 0);
    assert_int_equal(pull_file_put(&a, PULL_PART_BYTES, "0123456", 7, &err), 0);
    a.done[1] = 7;
    pull_file_note(&a, 1);
    assert_int_equal(pull_file_look(&b, dir, &err), 0);
    assert_int_equal(pull_file_have(&b), 7);
    assert_int_equal(pull_file_look(&c, dir, &err), 0);
    assert_int_equal(pull_file_have(&c), 0);
    hx_free(b.done);
    hx_free(b.busy);
    a.done[1] = 11; /* more than the part has */
    pull_file_note(&a, 1);
    assert_int_equal(pull_file_look(&b, dir, &err), 0);
    assert_int_equal(pull_file_have(&b), 0);
    pull_file_close(&a);
    snprintf(path, sizeof path, "%s/f.partial", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/f.partial.map", dir);
    unlink(path);
    rmdir(dir);
    for (int i = 0; i < 3; i++) {
        hx_free((i == 0 ? &a : i == 1 ? &b : &c)->done);
        hx_free((i == 0 ? &a : i == 1 ? &b : &c)->busy);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abi),        cmocka_unit_test(test_names),
        cmocka_unit_test(test_repo_names), cmocka_unit_test(test_headers),
        cmocka_unit_test(test_hashes),     cmocka_unit_test(test_maps),
    };

    return cmocka_run_group_tests_name("pull", tests, NULL, NULL);
}
