/* test_base.c - status, arena, text, JSON, checksum, random numbers, threads. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/array.h"
#include "base/crc.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/rng.h"
#include "base/str.h"
#include "base/sys.h"
#include "base/utf8.h"
#include "unit/support.h"

static void test_status__context_goes_in_front(void **state)
{
    (void)state;
    enum nb_status rc = nbi_fail(NB_EFORMAT, "header claims %d bytes", 7);
    assert_int_equal(nbi_context(rc, "reading '%s'", "x.dat"), NB_EFORMAT);
    assert_string_equal(nb_last_error(), "reading 'x.dat': header claims 7 bytes");
    assert_int_equal(nbi_context(NB_OK, "not used"), NB_OK);
    assert_string_equal(nb_last_error(), "reading 'x.dat': header claims 7 bytes");
}

static void test_status__messages_are_one_printable_line(void **state)
{
    (void)state;
    nbi_fail(NB_EFORMAT, "name 'a\nb\x1b[31mc\x7f'");
    assert_string_equal(nb_last_error(), "name 'a?b?[31mc?'");
    char huge[4096];
    memset(huge, 'x', sizeof huge - 1);
    huge[sizeof huge - 1] = 0;
    nbi_fail(NB_EIO, "%s", huge);
    nbi_context(NB_EIO, "%s", huge);
    assert_true(strlen(nb_last_error()) < 1024);
}

static void test_status__every_code_has_words(void **state)
{
    (void)state;
    for (int s = NB_OK; s <= NB_EINTERRUPTED; s++)
        assert_string_not_equal(nb_status_text((enum nb_status)s), "unknown status");
}

static void test_arena__blocks_are_zeroed_aligned_and_accounted(void **state)
{
    (void)state;
    struct nbi_arena a = {0};
    size_t sum = 0;
    for (size_t n = 0; n < 200; n++) {
        unsigned char *p;
        assert_ok(nbi_arena_alloc(&a, n & 1 ? "odd" : "even", n * 37, (void **)&p));
        assert_int_equal((uintptr_t)p % 16, 0);
        for (size_t i = 0; i < n * 37; i++)
            assert_int_equal(p[i], 0);
        memset(p, 0xFF, n * 37);
        sum += n * 37;
    }
    assert_int_equal(a.bytes, sum);
    assert_int_equal(a.names, 2);
    assert_string_equal(a.use[0].name, "even");
    assert_int_equal(a.use[0].bytes + a.use[1].bytes, sum);
    assert_int_equal(a.use[1].blocks, 100);
    nbi_arena_release(&a);
    assert_null(a.chunks);
}

static void test_arena__products_and_sizes_cannot_wrap(void **state)
{
    (void)state;
    struct nbi_arena a = {0};
    void *p;
    assert_fails(nbi_arena_array(&a, "x", SIZE_MAX / 2, 4, &p), NB_ENOMEM, "out of memory");
    assert_fails(nbi_arena_alloc(&a, "x", SIZE_MAX - 3, &p), NB_ENOMEM, "out of memory");
    assert_null(p);
    nbi_arena_release(&a);
}

static void test_array__grows_and_keeps_its_elements(void **state)
{
    (void)state;
    int32_t *array = NULL;
    size_t capacity = 0, moves = 0;
    for (int32_t i = 0; i < 100000; i++) {
        size_t before = capacity;
        assert_ok(NBI_ARRAY_RESERVE(array, capacity, (size_t)i + 1, "numbers"));
        assert_true(capacity > (size_t)i);
        moves += capacity != before;
        array[i] = i;
    }
    for (int32_t i = 0; i < 100000; i++)
        assert_int_equal(array[i], i);
    assert_true(moves < 20);
    assert_ok(NBI_ARRAY_RESERVE(array, capacity, 300001, "numbers"));
    assert_true(capacity >= 300001);
    free(array);
}

static void test_array__is_unchanged_after_a_failure(void **state)
{
    (void)state;
    int64_t *array = NULL;
    size_t capacity = 0;
    assert_ok(NBI_ARRAY_RESERVE(array, capacity, 3, "numbers"));
    int64_t *before = array;
    size_t had = capacity;
    assert_int_equal(NBI_ARRAY_RESERVE(array, capacity, SIZE_MAX / 8 + 1, "numbers"), NB_ENOMEM);
    assert_non_null(strstr(nb_last_error(), "numbers"));
    assert_ptr_equal(array, before);
    assert_int_equal(capacity, had);
    free(array);
}

static void test_str__failure_sticks_and_growth_keeps_text(void **state)
{
    (void)state;
    struct nbi_str s = {0};
    assert_string_equal(nbi_str_text(&s), "");
    for (int i = 0; i < 1000; i++)
        nbi_str_printf(&s, "%d,", i);
    assert_int_equal(s.len, 3890);
    assert_string_equal(nbi_str_text(&s) + 3886, "999,");
    assert_ok(nbi_str_status(&s));
    nbi_str_append(&s, "", NBI_STR_MAX);
    nbi_str_puts(&s, "more");
    assert_int_equal(s.len, 3890);
    assert_int_equal(nbi_str_status(&s), NB_ENOMEM);
    nbi_str_release(&s);
}

static void test_str__wildcards_match_like_a_shell(void **state)
{
    (void)state;
    assert_true(nbi_wildcard_match("lm_head*", "lm_head.weight"));
    assert_true(nbi_wildcard_match("*.layers.0.*", "model.layers.0.mlp.up_proj.weight"));
    assert_false(nbi_wildcard_match("*.layers.0.*", "model.layers.10.mlp.up_proj.weight"));
    assert_true(nbi_wildcard_match("?_proj", "q_proj"));
    assert_false(nbi_wildcard_match("?_proj", "_proj"));
    assert_true(nbi_wildcard_match("*", ""));
    assert_false(nbi_wildcard_match("", "x"));
    assert_true(nbi_wildcard_match("a*b*c", "a-b-b-c"));
    char text[2001], pattern[41];
    memset(text, 'a', 2000);
    text[2000] = 0;
    for (int i = 0; i < 20; i++)
        memcpy(pattern + 2 * i, "a*", 2);
    memcpy(pattern + 39, "b", 2); /* exponential in a naive matcher */
    assert_false(nbi_wildcard_match(pattern, text));
}

static void test_str__utf8_must_be_well_formed(void **state)
{
    (void)state;
    static const char *const good[] = {"",
                                       "abc",
                                       "\xC3\xA4",
                                       "\xE4\xBD\xA0",
                                       "\xF0\x9F\x99\x82",
                                       "\xED\x9F\xBF",
                                       "\xF4\x8F\xBF\xBF"};
    static const char *const bad[] = {"\x80",
                                      "\xC0\x80",
                                      "\xC3",
                                      "\xE0\x9F\xBF",
                                      "\xED\xA0\x80",
                                      "\xF0\x8F\xBF\xBF",
                                      "\xF4\x90\x80\x80",
                                      "\xFF",
                                      "\xE4\xBD"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_true(nbi_utf8_valid(good[i], strlen(good[i])));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(nbi_utf8_valid(bad[i], strlen(bad[i])));
}

static void test_str__copies_for_display_are_printable(void **state)
{
    (void)state;
    char out[12];
    static const struct {
        const char *in, *out;
    } rows[] = {{"plain", "plain"},
                {"a\x1b[31mb", "a?[31mb"},
                {"\xC2\x9B\x7F\xFFz", "???z"},
                {"12345678901", "12345678901"},
                {"123456789012", "12345678..."},
                {"1234567\xE4\xBD\xA0\xE4\xBD\xA0", "1234567..."}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        nbi_printable_copy(out, sizeof out, rows[i].in, strlen(rows[i].in));
        assert_string_equal(out, rows[i].out);
        assert_true(nbi_utf8_printable(out, strlen(out)));
    }
    assert_false(nbi_utf8_printable("\xC2\x85", 2));
    assert_true(nbi_utf8_printable("\xC2\xA0", 2));
}

static void test_json__parser_is_strict(void **state)
{
    (void)state;
    json_t *j;
    assert_fails(nbi_json_parse(&j, "{\"a\":1,\"a\":2}", 13), NB_EFORMAT, "duplicate");
    assert_fails(nbi_json_parse(&j, "{} x", 4), NB_EFORMAT, "invalid JSON");
    assert_fails(nbi_json_parse(&j, "{\"a\":\"\\u0000\"}", 14), NB_EFORMAT, "invalid JSON");
    char deep[512];
    memset(deep, '[', 200);
    memset(deep + 200, ']', 200);
    assert_fails(nbi_json_parse(&j, deep, 400), NB_EFORMAT, "nested deeper");
    assert_null(j);
    const char *brackets = "{\"a\":\"[[[[[[[[\\\"[[[\"}"; /* brackets in strings do not nest */
    assert_ok(nbi_json_parse(&j, brackets, strlen(brackets)));
    json_decref(j);
}

static void test_json__refuses_nul_in_text(void **state)
{
    (void)state;
    char *text;
    json_t *j = json_stringn("a\0b", 3);
    assert_ok(nbi_json_text(j, &text));
    assert_string_equal(text, "\"a\\u0000b\"");
    free(text);
    json_decref(j);
}

static void test_json__getters_check_type_and_range(void **state)
{
    (void)state;
    const char *text = "{\"i\":5,\"f\":0.5,\"s\":\"x\",\"b\":true,\"n\":null}";
    json_t *j;
    int64_t i = -1;
    double f = 0;
    bool b = false;
    const char *s = NULL;
    assert_ok(nbi_json_parse(&j, text, strlen(text)));
    assert_ok(nbi_json_int(j, "i", true, 0, 5, &i));
    assert_int_equal(i, 5);
    assert_fails(nbi_json_int(j, "i", true, 0, 4, &i), NB_EFORMAT, "outside 0 to 4");
    assert_fails(nbi_json_int(j, "f", true, 0, 4, &i), NB_EFORMAT, "whole number");
    assert_fails(nbi_json_int(j, "zz", true, 0, 4, &i), NB_EFORMAT, "'zz' is missing");
    assert_ok(nbi_json_int(j, "n", false, 0, 4, &i));
    assert_int_equal(i, 5);
    assert_ok(nbi_json_number(j, "f", true, 0, 1, &f));
    assert_true(f == 0.5);
    assert_fails(nbi_json_number(j, "s", true, 0, 1, &f), NB_EFORMAT, "must be a number");
    assert_ok(nbi_json_bool(j, "b", true, &b));
    assert_true(b);
    assert_fails(nbi_json_bool(j, "i", true, &b), NB_EFORMAT, "true or false");
    assert_ok(nbi_json_string(j, "s", true, &s));
    assert_string_equal(s, "x");
    json_decref(j);
}

static void test_crc__gives_known_values(void **state)
{
    (void)state;
    /* RFC 3720, appendix B.4. */
    uint8_t zeros[32] = {0}, ones[32], up[32];
    memset(ones, 0xFF, sizeof ones);
    for (int i = 0; i < 32; i++)
        up[i] = (uint8_t)i;
    assert_int_equal(nbi_crc32c(0, zeros, 32), 0x8A9136AAu);
    assert_int_equal(nbi_crc32c(0, ones, 32), 0x62A8AB43u);
    assert_int_equal(nbi_crc32c(0, up, 32), 0x46DD794Eu);
    assert_int_equal(nbi_crc32c(nbi_crc32c(0, up, 5), up + 5, 27), 0x46DD794Eu);
    assert_int_equal(nbi_crc32c_scalar(0, up, 32), 0x46DD794Eu);
}

static void test_crc__every_length_equals_the_table(void **state)
{
    (void)state;
    enum { N = 20000 };
    uint8_t *bytes = malloc(N);
    assert_non_null(bytes);
    for (uint32_t i = 0; i < N; i++)
        bytes[i] = (uint8_t)(i * 2654435761u >> 24);
    for (size_t len = 0; len < 3200; len++) {
        const uint8_t *p = bytes + len % 17;
        assert_int_equal(nbi_crc32c(7, p, len), nbi_crc32c_scalar(7, p, len));
    }
    for (size_t len = 3200; len < N; len += 97)
        assert_int_equal(nbi_crc32c(0, bytes, len), nbi_crc32c_scalar(0, bytes, len));
    free(bytes);
}

/* Values of the reference implementation. */
static void test_hash__fnv1a_gives_known_values(void **state)
{
    (void)state;
    assert_true(nbi_fnv1a("", 0) == 0xCBF29CE484222325u);
    assert_true(nbi_fnv1a("a", 1) == 0xAF63DC4C8601EC8Cu);
    assert_true(nbi_fnv1a("foobar", 6) == 0x85944171F73967E8u);
}

static void test_rng__philox_gives_known_answers(void **state)
{
    (void)state;
    /* Known-answer vectors of the authors' Random123 for philox4x32-10. */
    struct nbi_philox a = nbi_philox(0, 0, 0);
    struct nbi_philox b = nbi_philox(UINT64_MAX, UINT64_MAX, UINT64_MAX);
    struct nbi_philox c =
        nbi_philox(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull);
    static const uint32_t ka[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t kb[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    static const uint32_t kc[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    assert_memory_equal(a.v, ka, sizeof ka);
    assert_memory_equal(b.v, kb, sizeof kb);
    assert_memory_equal(c.v, kc, sizeof kc);
}

static void test_rng__normal_has_its_moments(void **state)
{
    (void)state;
    double sum = 0, square = 0, fourth = 0;
    enum { N = 400000 };
    for (uint64_t i = 0; i < N / 4; i++) {
        float v[4];
        nbi_philox_normal4(v, 3, i, 1);
        for (int k = 0; k < 4; k++) {
            assert_true(isfinite(v[k]));
            sum += (double)v[k];
            square += (double)v[k] * (double)v[k];
            fourth += pow((double)v[k], 4);
        }
    }
    assert_true(fabs(sum / N) < 5 / sqrt(N));
    assert_true(fabs(square / N - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(fourth / N - 3) < 5 * sqrt(96.0 / N));
}

static enum nb_status fill(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    for (int64_t i = 0; i < count; i++)
        ((int *)ctx)[first + i]++;
    return NB_OK;
}

static enum nb_status fail_at_700(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)ctx, (void)thread;
    return first <= 700 && 700 < first + count ? nbi_fail(NB_EVALUE, "element 700 is bad") : NB_OK;
}

static void test_parallel__covers_the_range_once_and_passes_the_message_on(void **state)
{
    (void)state;
    int hits[1000] = {0};
    for (int threads = 1; threads <= 4; threads++)
        assert_ok(nbi_for_chunks(1000, 64, threads, fill, hits));
    for (int i = 0; i < 1000; i++)
        assert_int_equal(hits[i], 4);
    assert_ok(nbi_for_chunks(0, 64, 4, fill, hits));
    assert_fails(nbi_for_chunks(1000, 64, 4, fail_at_700, NULL), NB_EVALUE, "element 700 is bad");
}

static void count_call(void *ctx, int thread, int threads)
{
    assert_in_range(thread, 0, threads - 1);
    atomic_fetch_add((atomic_int *)ctx + thread, 1);
}

static void add_range(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    for (int64_t i = first; i < first + count; i++)
        atomic_fetch_add((atomic_llong *)ctx, i);
}

/* A nested call runs on its caller's thread. */
static void nest(void *ctx, int thread, int threads)
{
    atomic_int inner[1] = {0};
    (void)thread, (void)threads;
    nbi_team_run(4, count_call, inner);
    assert_int_equal(inner[0], 1);
    nbi_for_range(100, 7, 4, add_range, ctx);
}

static void *use_the_team(void *sum)
{
    for (int i = 0; i < 2000; i++)
        nbi_for_range(100, 1 + i % 9, 1 + i % 4, add_range, sum);
    return NULL;
}

static void test_parallel__team_runs_each_thread_once(void **state)
{
    (void)state;
    atomic_int calls[4] = {0};
    atomic_llong sum = 0;
    /* Each thread runs once per call, with more and with fewer threads, spinning and asleep. */
    for (int i = 0; i < 300; i++) {
        nbi_team_run(1 + i % 4, count_call, calls);
        if (i % 100 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    for (int t = 0; t < 4; t++)
        assert_int_equal(calls[t], 75 * (4 - t));
    nbi_team_run(3, nest, &sum);
    assert_int_equal(sum, 3 * 4950);
    /* Three concurrent callers: one gets the team, the others run alone. */
    pthread_t other[2];
    sum = 0;
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&other[i], NULL, use_the_team, &sum), 0);
    use_the_team(&sum);
    for (int i = 0; i < 2; i++)
        pthread_join(other[i], NULL);
    assert_int_equal(sum, 3 * 2000 * 4950ll);
    /* A forked child starts its own team. */
    pid_t child = fork();
    if (child == 0) {
        sum = 0;
        use_the_team(&sum);
        _exit(sum == 2000 * 4950ll ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static char logged[128];

static void keep_log(void *ctx, enum nb_log_level level, const char *line)
{
    (void)ctx;
    snprintf(logged, sizeof logged, "%d %s", (int)level, line);
}

static void test_log__goes_to_the_sink(void **state)
{
    (void)state;
    nbi_log(NB_LOG_INFO, "dropped");
    nb_log_set_sink(keep_log, NULL);
    nbi_log(NB_LOG_WARN, "odd\nthing %d", 3);
    nb_log_set_sink(NULL, NULL);
    assert_string_equal(logged, "1 odd?thing 3");
}

static void test_sys__facts_are_plausible(void **state)
{
    (void)state;
    struct nbi_sys_info info;
    nbi_sys_info(&info);
    assert_in_range(info.cpus_usable, 1, 4096);
    assert_true(info.cpus_usable <= info.cpus_online);
    assert_true(info.memory_total >= info.memory_available);
    assert_true(nbi_peak_rss() > 100000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status__context_goes_in_front),
        cmocka_unit_test(test_status__messages_are_one_printable_line),
        cmocka_unit_test(test_status__every_code_has_words),
        cmocka_unit_test(test_arena__blocks_are_zeroed_aligned_and_accounted),
        cmocka_unit_test(test_arena__products_and_sizes_cannot_wrap),
        cmocka_unit_test(test_array__grows_and_keeps_its_elements),
        cmocka_unit_test(test_array__is_unchanged_after_a_failure),
        cmocka_unit_test(test_str__failure_sticks_and_growth_keeps_text),
        cmocka_unit_test(test_str__wildcards_match_like_a_shell),
        cmocka_unit_test(test_str__utf8_must_be_well_formed),
        cmocka_unit_test(test_str__copies_for_display_are_printable),
        cmocka_unit_test(test_json__parser_is_strict),
        cmocka_unit_test(test_json__refuses_nul_in_text),
        cmocka_unit_test(test_json__getters_check_type_and_range),
        cmocka_unit_test(test_crc__gives_known_values),
        cmocka_unit_test(test_crc__every_length_equals_the_table),
        cmocka_unit_test(test_hash__fnv1a_gives_known_values),
        cmocka_unit_test(test_rng__philox_gives_known_answers),
        cmocka_unit_test(test_rng__normal_has_its_moments),
        cmocka_unit_test(test_parallel__covers_the_range_once_and_passes_the_message_on),
        cmocka_unit_test(test_parallel__team_runs_each_thread_once),
        cmocka_unit_test(test_log__goes_to_the_sink),
        cmocka_unit_test(test_sys__facts_are_plausible),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
