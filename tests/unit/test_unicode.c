/* test_unicode.c - compares character classes and NFC with the tokenizers library
 * (golden/tokenizer/classes.txt, nfc.txt). */
#include <time.h>

#include "base/utf8.h"
#include "tokenizer/unicode.h"
#include "unit/support.h"

static uint8_t *classes;

static int make_classes(void **state)
{
    (void)state;
    classes = malloc(NBI_CHAR_COUNT);
    if (classes)
        nbi_char_table(classes);
    return classes ? 0 : -1;
}

static int free_classes(void **state)
{
    (void)state;
    free(classes);
    return 0;
}

/* Reads code points up to a tab or line end and returns the position after it. */
static char *read_points(char *p, struct nbi_str *out)
{
    out->len = 0;
    nbi_str_append(out, "", 0);
    while (*p != '\t' && *p != '\n')
        nbi_str_put_char(out, (uint32_t)strtoul(p, &p, 16));
    return p + 1;
}

/* ---- classes ---- */

static void test_unicode__ranges_are_sorted_and_disjoint(void **state)
{
    (void)state;
    uint32_t next = 0;
    for (int i = 0; i < nbi_char_range_count; i++) {
        const struct nbi_char_range *r = &nbi_char_ranges[i];
        assert_true(r->first >= next && r->last >= r->first && r->last < NBI_CHAR_COUNT);
        assert_true(r->bits != 0 && r->bits < 16);
        next = r->last + 1;
    }
    for (uint32_t c = 0xD800; c <= 0xDFFF; c++)
        assert_int_equal(classes[c], 0);
}

static void test_unicode__classes_match_the_golden_file(void **state)
{
    (void)state;
    char *table;
    size_t size;
    int rows = 0;
    assert_ok(
        nbi_file_read(NB_TEST_SOURCE "/golden/tokenizer/classes.txt", 1 << 20, &table, &size));
    for (char *p = table; *p; rows++) {
        uint32_t c = (uint32_t)strtoul(p, &p, 16);
        char got = "OLNS"[classes[c] & NBI_CHAR_KIND];
        if (got != p[1])
            fail_msg("U+%04X is %c, %c expected", (unsigned)c, got, p[1]);
        p += 3;
    }
    assert_int_equal(rows, 1000);
    free(table);
}

static void test_unicode__known_characters_have_their_class(void **state)
{
    (void)state;
    static const struct {
        uint32_t c;
        uint8_t kind;
    } rows[] = {
        {'a', NBI_CHAR_LETTER},     {'5', NBI_CHAR_NUMBER},     {'\'', NBI_CHAR_OTHER},
        {' ', NBI_CHAR_SPACE},      {'\v', NBI_CHAR_SPACE},     {0x1C, NBI_CHAR_OTHER},
        {0x85, NBI_CHAR_SPACE},     {0xA0, NBI_CHAR_SPACE},     {0xAA, NBI_CHAR_LETTER},
        {0xB2, NBI_CHAR_NUMBER},    {0xBD, NBI_CHAR_NUMBER},    {0x17F, NBI_CHAR_LETTER},
        {0x301, NBI_CHAR_OTHER},    {0x660, NBI_CHAR_NUMBER},   {0x180E, NBI_CHAR_OTHER},
        {0x200B, NBI_CHAR_OTHER},   {0x2028, NBI_CHAR_SPACE},   {0x2163, NBI_CHAR_NUMBER},
        {0x24B6, NBI_CHAR_OTHER},   {0x3000, NBI_CHAR_SPACE},   {0x3007, NBI_CHAR_NUMBER},
        {0x4E2D, NBI_CHAR_LETTER},  {0xFEFF, NBI_CHAR_OTHER},   {0x10D4A, NBI_CHAR_LETTER},
        {0x10D40, NBI_CHAR_NUMBER}, {0x1F600, NBI_CHAR_OTHER},  {0x1D7CE, NBI_CHAR_NUMBER},
        {0x10FFFF, NBI_CHAR_OTHER}, {0x323AF, NBI_CHAR_LETTER}, {0x323B0, NBI_CHAR_OTHER},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if ((classes[rows[i].c] & NBI_CHAR_KIND) != rows[i].kind)
            fail_msg("U+%04X is %d", (unsigned)rows[i].c, classes[rows[i].c] & NBI_CHAR_KIND);
}

/* ---- NFC ---- */

static void assert_nfc(const char *text, size_t len, const char *wanted, size_t wanted_len,
                       const char *what)
{
    char *copy = malloc(len + 1); /* unaligned text that ends the block, so ASan sees overruns */
    memcpy(copy + 1, text, len);
    struct nbi_str got = {0};
    assert_ok(nbi_nfc(classes, copy + 1, len, &got));
    if (got.len != wanted_len || memcmp(nbi_str_text(&got), wanted, wanted_len) != 0)
        fail_msg("NFC of %s", what);
    /* NFC leaves the certain prefix alone, and the rest normalises on its own. */
    size_t prefix = nbi_nfc_prefix(classes, copy + 1, len);
    assert_true(prefix <= len && prefix <= wanted_len);
    assert_memory_equal(text, wanted, prefix);
    if (prefix == len)
        assert_int_equal(len, wanted_len);
    got.len = 0;
    assert_ok(nbi_nfc(classes, copy + 1 + prefix, len - prefix, &got));
    assert_int_equal(got.len, wanted_len - prefix);
    assert_memory_equal(nbi_str_text(&got), wanted + prefix, got.len);
    nbi_str_release(&got);
    free(copy);
}

typedef void (*pair_fn)(const struct nbi_str *text, const struct nbi_str *nfc, const char *row);

static int each_pair(pair_fn fn)
{
    char *table;
    size_t size;
    int rows = 0;
    struct nbi_str text = {0}, nfc = {0};
    assert_ok(nbi_file_read(NB_TEST_SOURCE "/golden/tokenizer/nfc.txt", 1 << 20, &table, &size));
    for (char *p = table; *p; rows++) {
        char *tab = strchr(p, '\t'), name[400];
        snprintf(name, sizeof name, "%.*s", (int)(tab - p), p);
        p = read_points(read_points(p, &text), &nfc);
        p = strchr(p - 1, '\n') + 1;
        fn(&text, &nfc, name);
    }
    nbi_str_release(&text);
    nbi_str_release(&nfc);
    free(table);
    return rows;
}

static void check_pair(const struct nbi_str *text, const struct nbi_str *nfc, const char *row)
{
    assert_nfc(text->p, text->len, nfc->p, nfc->len, row);
    assert_nfc(nfc->p, nfc->len, nfc->p, nfc->len, row); /* NFC is idempotent */
}

static void test_nfc__matches_tokenizers(void **state)
{
    (void)state;
    assert_true(each_pair(check_pair) >= 400);
}

/* Surrounds the text with inert text of all lengths modulo 8, the step of the search. */
static void check_embedded(const struct nbi_str *text, const struct nbi_str *nfc, const char *row)
{
    static const char inert[] = "0123456789\xE4\xB8\xAD.......";
    struct nbi_str a = {0}, b = {0};
    for (size_t n = 13; n < sizeof inert; n++) {
        a.len = b.len = 0;
        nbi_str_append(&a, inert, n);
        nbi_str_append(&a, text->p, text->len);
        nbi_str_append(&a, inert, n);
        nbi_str_append(&b, inert, n);
        nbi_str_append(&b, nfc->p, nfc->len);
        nbi_str_append(&b, inert, n);
        assert_nfc(a.p, a.len, b.p, b.len, row);
    }
    nbi_str_release(&a);
    nbi_str_release(&b);
}

static void test_nfc__leaves_surrounding_text_alone(void **state)
{
    (void)state;
    each_pair(check_embedded);
}

static void test_nfc__known_cases(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"", ""},
        {"plain", "plain"},
        {"e\xCC\x81", "\xC3\xA9"},
        {"\xE2\x84\xAB", "\xC3\x85"},                                             /* Angstrom */
        {"\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xEA\xB0\x81"},                 /* Hangul */
        {"\xEA\xB0\x80\xE1\x86\xA8", "\xEA\xB0\x81"},                             /* LV + T */
        {"a\xCC\xA3\xCC\x87", "\xE1\xBA\xA1\xCC\x87"},                            /* order kept */
        {"a\xCC\x87\xCC\xA3", "\xE1\xBA\xA1\xCC\x87"},                            /* reordered */
        {"\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC"},                             /* excluded */
        {"x\xE2\x84\xA6", "x\xCE\xA9"},                                           /* Ohm */
        {"\xF0\x9D\x85\x9E", "\xF0\x9D\x85\x97\xF0\x9D\x85\xA5"},                 /* musical note */
        {"\xF0\x91\xA4\xB5\xF0\x91\xA4\xB0", "\xF0\x91\xA4\xB5\xF0\x91\xA4\xB0"}, /* Unicode 13 */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_nfc(rows[i][0], strlen(rows[i][0]), rows[i][1], strlen(rows[i][1]), rows[i][0]);
    struct nbi_str s = {0};
    nbi_str_puts(&s, "e");
    assert_ok(
        nbi_nfc(classes, "\xCC\x81", 2, &s)); /* appends without composing with what is there */
    assert_string_equal(s.p, "e\xCC\x81");
    nbi_str_release(&s);
}

/* Long runs of marks, sorted and unsorted, take linear time, and NFC stays idempotent. */
static void test_nfc__takes_linear_time(void **state)
{
    (void)state;
    static const char *const units[] = {
        "\xCC\x81",                                 /* one class */
        "\xCC\x95\xCC\x80",                         /* 232 before 230 */
        "a\xCC\x81",                                /* composes */
        "\xCC\x80\xCC\xB4\xCC\xA1\xCC\x95\xD6\xB0", /* five classes */
        "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8",     /* Hangul */
        "\xCD\x84",                                 /* decomposes */
    };
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        struct nbi_str text = {0}, nfc = {0}, again = {0};
        struct timespec start, end;
        nbi_str_puts(&text, "x");
        while (text.len < 1 << 20)
            nbi_str_puts(&text, units[i]);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
        assert_ok(nbi_nfc(classes, text.p, text.len, &nfc));
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
        double s =
            (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
        if (s > 2)
            fail_msg("1 MB of unit %zu: %.1f s", i, s);
        assert_ok(nbi_nfc(classes, nfc.p, nfc.len, &again));
        assert_int_equal(again.len, nfc.len);
        assert_memory_equal(again.p, nfc.p, nfc.len);
        nbi_str_release(&text);
        nbi_str_release(&nfc);
        nbi_str_release(&again);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unicode__ranges_are_sorted_and_disjoint),
        cmocka_unit_test(test_unicode__classes_match_the_golden_file),
        cmocka_unit_test(test_unicode__known_characters_have_their_class),
        cmocka_unit_test(test_nfc__matches_tokenizers),
        cmocka_unit_test(test_nfc__leaves_surrounding_text_alone),
        cmocka_unit_test(test_nfc__known_cases),
        cmocka_unit_test(test_nfc__takes_linear_time),
    };
    return cmocka_run_group_tests_name("unicode", tests, make_classes, free_classes);
}
