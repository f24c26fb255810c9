/* test_utf8.c - UTF-8: every relevant sequence against the definition, repairs against
 * golden/tokenizer/utf8.txt, which Python wrote. */
#include "base/utf8.h"
#include "unit/support.h"

/* ---- the definition, from the bits ---- */

/* Length of the well-formed character in p[len], following the text of the standard; 0: none. */
static int defined_length(const uint8_t *p, size_t len, uint32_t *c)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    int n = 0;
    while (n < 5 && p[0] & 0x80 >> n)
        n++;
    if (n == 0) {
        *c = p[0];
        return 1;
    }
    if (n == 1 || n > 4 || len < (size_t)n)
        return 0;
    *c = p[0] & (0x7Fu >> n);
    for (int i = 1; i < n; i++) {
        if (p[i] >> 6 != 2)
            return 0;
        *c = *c * 64 + (p[i] & 63);
    }
    return *c >= least[n] && *c <= 0x10FFFF && (*c < 0xD800 || *c > 0xDFFF) ? n : 0;
}

static void check_sequence(const uint8_t *p, size_t len)
{
    uint32_t c = 0;
    int wanted = defined_length(p, len, &c);
    const char *text = (const char *)p;
    int got = nbi_utf8_length(text, text + len);
    if (got != wanted)
        fail_msg("%02x %02x (%zu): %d, %d expected", p[0], len > 1 ? p[1] : 0, len, got, wanted);
    if (wanted && nbi_utf8_decode(text) != c)
        fail_msg("U+%04X decodes to U+%04X", (unsigned)c, (unsigned)nbi_utf8_decode(text));
    if (nbi_utf8_valid(text, len) != (wanted == (int)len) && wanted == 0)
        fail_msg("%02x is valid", p[0]);
}

static void test_utf8__short_sequences_follow_the_definition(void **state)
{
    (void)state;
    uint8_t *p = malloc(2);
    for (unsigned i = 0; i < 0x10000; i++) {
        p[0] = (uint8_t)(i >> 8);
        p[1] = (uint8_t)i;
        check_sequence(p, 2);
    }
    free(p);
    p = malloc(1);
    for (unsigned i = 0; i < 256; i++) {
        p[0] = (uint8_t)i;
        check_sequence(p, 1);
    }
    free(p);
}

static void test_utf8__long_sequences_follow_the_definition(void **state)
{
    (void)state;
    static const uint8_t edges[] = {0x00, 0x41, 0x7F, 0x80, 0x81, 0x8F, 0x90, 0x9F,
                                    0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xF0, 0xFF};
    uint8_t *p = malloc(4), *q = malloc(3);
    for (unsigned a = 0xC0; a < 0x100; a++)
        for (unsigned b = 0; b < 0x100; b++)
            for (size_t c = 0; c < sizeof edges; c++) {
                q[0] = p[0] = (uint8_t)a;
                q[1] = p[1] = (uint8_t)b;
                q[2] = p[2] = edges[c];
                check_sequence(q, 3);
                for (size_t d = 0; d < sizeof edges; d++) {
                    p[3] = edges[d];
                    check_sequence(p, 4);
                }
            }
    free(p);
    free(q);
}

static void test_utf8__every_code_point_round_trips(void **state)
{
    (void)state;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c <= 0xDFFF)
            continue;
        char bytes[4];
        uint32_t back = 0;
        int n = nbi_utf8_encode(bytes, c);
        if (defined_length((const uint8_t *)bytes, (size_t)n, &back) != n || back != c ||
            nbi_utf8_decode(bytes) != c || nbi_utf8_length(bytes, bytes + n) != n)
            fail_msg("U+%04X", (unsigned)c);
    }
    struct nbi_str s = {0};
    nbi_str_put_char(&s, 'a');
    nbi_str_put_char(&s, 0);
    nbi_str_put_char(&s, 0x1F600);
    assert_int_equal(s.len, 6);
    assert_memory_equal(s.p, "a\0\xF0\x9F\x98\x80", 7);
    nbi_str_release(&s);
}

static void test_utf8__validates_whole_texts(void **state)
{
    (void)state;
    assert_true(nbi_utf8_valid("", 0));
    assert_true(nbi_utf8_valid("a\0b", 3));
    assert_true(nbi_utf8_valid("\xEF\xBB\xBF\xF4\x8F\xBF\xBF", 7));
    assert_false(nbi_utf8_valid("aaaaaaaaaaaaaaaa\xC3", 17));
    assert_false(nbi_utf8_valid("\x80zzzzzzzzzzzzzzzz", 17));
    assert_false(nbi_utf8_valid("abc\xED\xBF\xBF", 6));
}

/* ---- repairs ---- */

static size_t unhex(const char *hex, size_t len, char *out)
{
    for (size_t i = 0; i < len / 2; i++) {
        char digits[3] = {hex[2 * i], hex[2 * i + 1], 0};
        out[i] = (char)strtol(digits, NULL, 16);
    }
    return len / 2;
}

/* The remainder at the end is truncated if and only if some continuation makes it well-formed.
 * These bytes include all limits of continuation bytes. */
static bool can_go_on(const char *p, size_t len)
{
    static const uint8_t edges[] = {0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF};
    uint8_t whole[7];
    uint32_t c;
    memcpy(whole, p, len);
    for (unsigned i = 0; i < 6 * 6 * 6; i++) {
        whole[len] = edges[i % 6];
        whole[len + 1] = edges[i / 6 % 6];
        whole[len + 2] = edges[i / 36];
        for (size_t n = len + 1; n <= 4; n++)
            if (defined_length(whole, n, &c) == (int)n)
                return true;
    }
    return false;
}

/* Steps through a text and reassembles it from the result of each step. */
static void check_steps(const char *bytes, size_t len, const char *wanted, size_t wanted_len)
{
    struct nbi_str got = {0};
    for (const char *p = bytes, *end = bytes + len; p < end;) {
        int n = nbi_utf8_length(p, end);
        if (n > 0) {
            nbi_str_append(&got, p, (size_t)n);
        } else {
            bool cut;
            n = nbi_utf8_bad_length(p, end, &cut);
            assert_true(n >= 1 && n <= 3 && n <= end - p);
            assert_int_equal(cut, p + n == end && can_go_on(p, (size_t)n));
            nbi_str_puts(&got, "\xEF\xBF\xBD");
        }
        p += n;
    }
    assert_int_equal(got.len, wanted_len);
    assert_memory_equal(nbi_str_text(&got), wanted, wanted_len);
    nbi_str_release(&got);
}

static void test_utf8__repairs_like_python(void **state)
{
    (void)state;
    char *table;
    size_t size;
    int rows = 0;
    assert_ok(nbi_file_read(NB_TEST_SOURCE "/golden/tokenizer/utf8.txt", 1 << 20, &table, &size));
    for (char *p = table; *p; rows++) {
        char *tab = strchr(p, '\t'), *end = strchr(tab, '\n'), wanted[64];
        size_t len = (size_t)(tab - p) / 2;
        char *bytes = malloc(len); /* exact size, for the sanitizer */
        struct nbi_str got = {0};
        unhex(p, (size_t)(tab - p), bytes);
        size_t wanted_len = unhex(tab + 1, (size_t)(end - tab - 1), wanted);
        nbi_utf8_repair(&got, bytes, len);
        if (got.len != wanted_len || memcmp(nbi_str_text(&got), wanted, wanted_len) != 0)
            fail_msg("row %d: %.*s", rows + 1, (int)(tab - p), p);
        assert_int_equal(nbi_utf8_valid(bytes, len),
                         len == wanted_len && memcmp(bytes, wanted, len) == 0);
        assert_true(nbi_utf8_valid(nbi_str_text(&got), got.len));
        check_steps(bytes, len, wanted, wanted_len);
        nbi_str_release(&got);
        free(bytes);
        p = end + 1;
    }
    assert_true(rows >= 900);
    free(table);
}

/* ---- text for display ---- */

static void test_utf8__control_characters_are_not_printable(void **state)
{
    (void)state;
    assert_true(nbi_utf8_printable("", 0));
    assert_true(nbi_utf8_printable("a b~\xC2\xA0\xC3\xA9\xF0\x9F\x98\x80", 12));
    static const char *const bad[] = {"a\n",      "\t",    "\x1B[2J", "\x7F",        "\xC2\x80",
                                      "\xC2\x9F", "a\xC3", "\xFF",    "\xED\xA0\x80"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(nbi_utf8_printable(bad[i], strlen(bad[i])));
    assert_false(nbi_utf8_printable("a\0b", 3));
}

static void assert_shown(size_t size, const char *text, size_t len, const char *wanted)
{
    char *out = malloc(size); /* exact size, for the sanitizer */
    nbi_printable_copy(out, size, text, len);
    assert_string_equal(out, wanted);
    free(out);
}

static void test_utf8__display_copies_fit_and_keep_characters(void **state)
{
    (void)state;
    assert_shown(16, "", 0, "");
    assert_shown(16, "abc", 3, "abc");
    assert_shown(16, "a\nb\0c\x7F\xFF", 7, "a?b?c??");
    assert_shown(16, "\xC3\xA9\xC2\x85", 4, "\xC3\xA9?");
    assert_shown(8, "abcdefg", 7, "abcdefg"); /* fits exactly */
    assert_shown(8, "abcdefgh", 8, "abcd...");
    assert_shown(8, "abc\xE4\xB8\xAD\xE4\xB8\xAD", 9, "abc..."); /* only complete characters */
    assert_shown(8, "a\xE4\xB8\xAD\xE4\xB8\xAD", 7, "a\xE4\xB8\xAD\xE4\xB8\xAD");
    assert_shown(4, "abcdef", 6, "...");
    assert_shown(1, "abc", 3, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8__short_sequences_follow_the_definition),
        cmocka_unit_test(test_utf8__long_sequences_follow_the_definition),
        cmocka_unit_test(test_utf8__every_code_point_round_trips),
        cmocka_unit_test(test_utf8__validates_whole_texts),
        cmocka_unit_test(test_utf8__repairs_like_python),
        cmocka_unit_test(test_utf8__control_characters_are_not_printable),
        cmocka_unit_test(test_utf8__display_copies_fit_and_keep_characters),
    };
    return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
