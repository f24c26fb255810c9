/* test_pretokenizer.c - compares Qwen's matcher with PCRE2 on the same pattern, and other patterns
 * with words written by hand; checks that time is linear. */
#include <time.h>

#include "base/utf8.h"
#include "tokenizer/pretokenizer.h"
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

static struct nbi_splitter *make(const char *pattern, enum nbi_split_keep keep, bool prefix_space)
{
    const struct nbi_split_rules rules = {
        .count = 1, .stage = {{pattern, keep}}, .prefix_space = prefix_space};
    struct nbi_splitter *s;
    assert_ok(nbi_splitter_new(&s, &rules, classes));
    return s;
}

static enum nb_status put_word(void *ctx, const char *word, size_t len)
{
    assert_true(len > 0);
    nbi_str_append(ctx, word, len);
    nbi_str_append(ctx, "|", 1);
    return NB_OK;
}

/* Splits the text; `words` has '|' after each word. */
static void assert_words(const struct nbi_splitter *s, const char *text, const char *words)
{
    struct nbi_split_scratch scratch = {0};
    struct nbi_str got = {0};
    size_t len = strlen(text);
    char *copy = malloc(len ? len : 1); /* exact size, so that ASan sees overruns */
    memcpy(copy, text, len);
    assert_ok(nbi_split(s, &scratch, copy, len, put_word, &got));
    assert_string_equal(nbi_str_text(&got), words);
    nbi_str_release(&got);
    nbi_split_scratch_release(&scratch);
    free(copy);
}

static void check(const char *pattern, const char *text, const char *words)
{
    struct nbi_splitter *s = make(pattern, NBI_SPLIT_ALL, false);
    assert_words(s, text, words);
    nbi_splitter_free(s);
}

/* ---- Qwen's pattern ---- */

static const char *const qwen_rows[][2] = {
    {"", ""},
    {"Hello, world!", "Hello|,| world|!|"},
    {"a  b   c", "a| | b|  | c|"},
    {"x  ", "x|  |"},
    {"   ", "   |"},
    {" \n \n  y", " \n \n| | y|"},
    {"a\n\n b", "a|\n\n| b|"},
    {"a \r\nb", "a| \r\n|b|"},
    {"a\tb\t\tc", "a|\tb|\t|\tc|"},
    {"\nword", "\n|word|"},
    {"12345", "1|2|3|4|5|"},
    {" 1 22", " |1| |2|2|"},
    {"it's IT'S we'LL I'm You'Re they'vE he'D can'T",
     "it|'s| IT|'S| we|'LL| I|'m| You|'Re| they|'vE| he|'D| can|'T|"},
    {"'\xC5\xBFt", "'\xC5\xBF|t|"},
    {"it'\xC5\xBF", "it|'\xC5\xBF|"},
    {"'stop 'llama 'reel", "'s|top| '|llama| '|reel|"},
    {"x'llama x'reel", "x|'ll|ama| x|'re|el|"},
    {"''s", "''|s|"},
    {"'x '1 '", "'x| '|1| '|"},
    {"'l 'r 'v", "'l| '|r| '|v|"},
    {"!?\n\nx", "!?\n\n|x|"},
    {" ... \n", " ...| \n|"},
    {"a,b;c", "a|,b|;c|"},
    {"((x", "((|x|"},
    {"(\r\n(", "(\r\n|(|"},
    {"\xE4\xB8\xAD\xE6\x96\x87 \xE4\xB8\xAD", "\xE4\xB8\xAD\xE6\x96\x87| \xE4\xB8\xAD|"},
    {"\xC2\xA0x", "\xC2\xA0x|"},
    {"\xC2\xA0\xC2\xA0.", "\xC2\xA0|\xC2\xA0|.|"},
    {" \xCC\x81\xCC\x81x", " \xCC\x81\xCC\x81|x|"},
    {"e\xCC\x81x", "e|\xCC\x81x|"},
    {"\xE1\xA0\x8E x", "\xE1\xA0\x8E| x|"},
    {"\xF0\x90\xB5\x8Aq", "\xF0\x90\xB5\x8Aq|"}, /* U+10D4A, a letter since Unicode 16 */
    {"<|im_start|>", "<||im|_start||>|"},
    {"\v\f x", "\v\f| x|"},
    {"\xE2\x80\xA8\xE2\x80\xA8x", "\xE2\x80\xA8|\xE2\x80\xA8x|"},
};

static void test_split__qwen_pattern_splits_as_listed(void **state)
{
    (void)state;
    struct nbi_splitter *s = make(nbi_qwen_pattern, NBI_SPLIT_ALL, false);
    for (size_t i = 0; i < sizeof qwen_rows / sizeof *qwen_rows; i++)
        assert_words(s, qwen_rows[i][0], qwen_rows[i][1]);
    nbi_splitter_free(s);
}

static void test_split__is_qwen_compares_the_rules(void **state)
{
    (void)state;
    struct nbi_split_rules rules = {.count = 1, .stage = {{nbi_qwen_pattern, NBI_SPLIT_ALL}}};
    char copy[400];
    assert_true(nbi_split_is_qwen(&rules));
    snprintf(copy, sizeof copy, "%s", nbi_qwen_pattern);
    rules.stage[0].pattern = copy;
    assert_true(nbi_split_is_qwen(&rules)); /* compares the text, not the pointer */
    rules.stage[0].keep = NBI_SPLIT_MATCHES;
    assert_false(nbi_split_is_qwen(&rules));
    rules.stage[0].keep = NBI_SPLIT_ALL;
    rules.prefix_space = true;
    assert_false(nbi_split_is_qwen(&rules));
    rules.prefix_space = false;
    rules.count = 2;
    assert_false(nbi_split_is_qwen(&rules));
    rules.count = 0;
    assert_false(nbi_split_is_qwen(&rules));
    rules.count = 1;
    snprintf(copy, sizeof copy, "(?:%s)", nbi_qwen_pattern);
    assert_false(nbi_split_is_qwen(&rules));
}

/* ---- against PCRE2 ---- */

static uint64_t seed = 1;

static uint32_t next_random(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

/* Characters whose class is the same in all versions of Unicode. */
static uint32_t random_character(int flavour)
{
    static const char special[] = "''''stremvlldSTREMVLD \n\r\t  ..,!<|>0123";
    static const uint32_t spaces[] = {' ',  ' ',  ' ',    '\n',   '\n',   '\r',   '\t',   '\v',
                                      0x85, 0xA0, 0x1680, 0x2003, 0x2028, 0x2029, 0x3000, '\f'};
    switch (next_random((uint32_t)flavour)) {
    case 0:
        return (uint32_t)special[next_random(sizeof special - 1)];
    case 1:
        return spaces[next_random(sizeof spaces / sizeof *spaces)];
    case 2:
        return next_random(0x80);
    case 3:
        return 0xC0 + next_random(0x180 - 0xC0);
    case 4:
        return 0x4E00 + next_random(0x5000);
    case 5:
        return 0x300 + next_random(0x40);
    case 6:
        return 0x17F;
    default:
        return 'a' + next_random(26);
    }
}

/* The ends of all words of a text. */
struct ends {
    const char *text;
    size_t *p, count;
};

static enum nb_status put_end(void *ctx, const char *word, size_t len)
{
    struct ends *e = ctx;
    size_t start = e->count ? e->p[e->count - 1] : 0;
    assert_ptr_equal(word, e->text + start); /* words are contiguous */
    e->p[e->count++] = start + len;
    return NB_OK;
}

static void compare(const struct nbi_splitter *a, const struct nbi_splitter *b,
                    struct nbi_split_scratch *scratch, const struct nbi_str *text)
{
    struct ends x = {.text = text->p, .p = malloc((text->len + 1) * sizeof *x.p)};
    struct ends y = {.text = text->p, .p = malloc((text->len + 1) * sizeof *y.p)};
    assert_ok(nbi_split(a, scratch, text->p, text->len, put_end, &x));
    assert_ok(nbi_split(b, scratch, text->p, text->len, put_end, &y));
    for (size_t i = 0; i < x.count && i < y.count; i++)
        if (x.p[i] != y.p[i]) {
            size_t from = i ? x.p[i - 1] : 0;
            fail_msg("at byte %zu of '%.30s': a word of %zu or of %zu bytes", from, text->p + from,
                     x.p[i] - from, y.p[i] - from);
        }
    assert_int_equal(x.count, y.count);
    assert_int_equal(x.p[x.count - 1], text->len);
    free(x.p);
    free(y.p);
}

static void test_split__qwen_code_matches_pcre2(void **state)
{
    (void)state;
    char pattern[400];
    struct nbi_split_scratch scratch = {0};
    struct nbi_str text = {0};
    snprintf(pattern, sizeof pattern, "(?:%s)", nbi_qwen_pattern);
    struct nbi_splitter *ours = make(nbi_qwen_pattern, NBI_SPLIT_ALL, false);
    struct nbi_splitter *theirs = make(pattern, NBI_SPLIT_ALL, false);
    for (size_t i = 0; i < sizeof qwen_rows / sizeof *qwen_rows; i++)
        if (!strstr(qwen_rows[i][0], "\xB5\x8A")) /* unless it needs a new Unicode version */
            assert_words(theirs, qwen_rows[i][0], qwen_rows[i][1]);
    for (int round = 0; round < 120000; round++) {
        /* Short texts test the ends of text, long ones many combinations of characters. */
        int n = round % 500 ? 1 + (int)next_random(40) : 4000;
        int flavour = 1 + (int)next_random(12);
        text.len = 0;
        while (n--)
            nbi_str_put_char(&text, random_character(flavour));
        compare(ours, theirs, &scratch, &text);
    }
    nbi_str_release(&text);
    nbi_split_scratch_release(&scratch);
    nbi_splitter_free(ours);
    nbi_splitter_free(theirs);
}

/* ---- other patterns ---- */

static void test_split__gpt2_pattern_splits_as_listed(void **state)
{
    (void)state;
    struct nbi_splitter *s = make(nbi_gpt2_pattern, NBI_SPLIT_ALL, false);
    assert_words(s, "It's IT'S  1234 a_b!\n\n x", "It|'s| IT|'|S| | 1234| a|_|b|!|\n\n| x|");
    assert_words(s, "\xE1\xA0\x8E x", "\xE1\xA0\x8E| x|"); /* U+180E is no space */
    nbi_splitter_free(s);
    s = make(nbi_gpt2_pattern, NBI_SPLIT_ALL, true);
    assert_words(s, "a b", " a| b|");
    assert_words(s, " a b", " a| b|");
    assert_words(s, "\na", " |\n|a|");
    assert_words(s, "", "");
    nbi_splitter_free(s);
}

static void test_split__patterns_are_translated(void **state)
{
    (void)state;
    check("\\p{L}+", "ab1cd", "ab|1|cd|");
    check("[\\p{L}\\p{M}]+", "e\xCC\x81x1", "e\xCC\x81x|1|");
    check("\\p{N}{1,3}", "1234567 89", "123|456|7| |89|");
    check("\\s+",
          "a \xC2\x85\xE3\x80\x80"
          "b\xE1\xA0\x8E",
          "a| \xC2\x85\xE3\x80\x80|b\xE1\xA0\x8E|");
    check("\\S+", "a\xE1\xA0\x8E b", "a\xE1\xA0\x8E| |b|");
    check("[^\\s]+", "a\xE1\xA0\x8E b", "a\xE1\xA0\x8E| |b|");
    check("[\\S]+", "ab c", "ab| |c|");
    check("\\w+", "e\xCC\x81_1-x", "e\xCC\x81_1|-|x|");
    check("\\W+", "ab, c", "ab|, |c|");
    check("[\\w']+", "don't do", "don't| |do|");
    check("\\d+", "a12b", "a|12|b|");
    check("^b|b$", "bab\nbb", "b|a|b|\n|b|b|");
    check(".", "a\nb", "a|\n|b|");
    check("(?i:KS)", "xksKS\xE2\x84\xAAs", "x|ks|KS|\xE2\x84\xAAs|");
    check("a|\\|", "ba|b", "b|a|||b|");
    check("\\x{4e2d}|\\x41",
          "xA\xE4\xB8\xAD"
          "A",
          "x|A|\xE4\xB8\xAD|A|");
    check("x*", "axxb", "a|xx|b|");
    check("nothing", "some text", "some text|");
    check("(?!x)", "axb", "ax|b|");
}

static void test_split__keep_selects_the_pieces(void **state)
{
    (void)state;
    static const char *const words[] = {"a|, |b|,|c|", ", |,|", "a|b|c|"};
    for (int keep = 0; keep < 3; keep++) {
        struct nbi_splitter *s = make(", ?", (enum nbi_split_keep)keep, false);
        assert_words(s, "a, b,c", words[keep]);
        assert_words(s, "", "");
        nbi_splitter_free(s);
    }
    struct nbi_splitter *s = make(",", NBI_SPLIT_REST, false);
    assert_words(s, ",,", "");
    nbi_splitter_free(s);
    /* Qwen's pattern with another `keep` goes through PCRE2. */
    s = make(nbi_qwen_pattern, NBI_SPLIT_REST, false);
    assert_words(s, "a b", "");
    nbi_splitter_free(s);
}

static void test_split__stages_split_further(void **state)
{
    (void)state;
    const struct nbi_split_rules rules = {.count = 3,
                                          .stage = {{"\\s", NBI_SPLIT_REST},
                                                    {nbi_qwen_pattern, NBI_SPLIT_ALL},
                                                    {"[aeiou]", NBI_SPLIT_ALL}}};
    struct nbi_splitter *s;
    assert_ok(nbi_splitter_new(&s, &rules, classes));
    assert_words(s, "It's bad, 12 beans", "It|'s|b|a|d|,|1|2|b|e|a|ns|");
    nbi_splitter_free(s);
    const struct nbi_split_rules none = {.count = 0};
    assert_ok(nbi_splitter_new(&s, &none, classes));
    assert_words(s, "all of it", "all of it|");
    nbi_splitter_free(s);
    nbi_splitter_free(NULL);
}

static enum nb_status stop_at_b(void *ctx, const char *word, size_t len)
{
    (void)len;
    ++*(int *)ctx;
    return *word == 'b' ? NB_EINTERRUPTED : NB_OK;
}

static void test_split__stops_when_the_callback_fails(void **state)
{
    (void)state;
    static const char *const patterns[] = {nbi_qwen_pattern, "[abc]"};
    for (int i = 0; i < 2; i++) {
        struct nbi_split_scratch scratch = {0};
        struct nbi_splitter *s = make(patterns[i], NBI_SPLIT_ALL, false);
        int calls = 0;
        assert_int_equal(nbi_split(s, &scratch, "a\nb\nc", 5, stop_at_b, &calls), NB_EINTERRUPTED);
        assert_int_equal(calls, 3);
        nbi_split_scratch_release(&scratch);
        nbi_splitter_free(s);
    }
}

static void test_split__unsupported_syntax_is_an_error(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *words;
    } rows[] = {
        {"\\bx", "'\\b' in a split pattern"},
        {"\\Bx", "'\\B'"},
        {"\\Kx", "'\\K'"},
        {"\\h+", "'\\h'"},
        {"\\H", "'\\H'"},
        {"\\v", "'\\v'"},
        {"\\R", "'\\R'"},
        {"\\X", "'\\X'"},
        {"\\Gx", "'\\G'"},
        {"(x)\\k<1>", "'\\k'"},
        {"\\g<0>", "'\\g'"},
        {"\\y", "'\\y'"},
        {"\\O", "'\\O'"},
        {"[\\W]", "'\\W'"},
        {"[a[b]]", "a set inside a set"},
        {"[[:alpha:]]", "a set inside a set"},
        {"[a-z&&[aeiou]]", "a set inside a set"},
        {"[a&&b]", "a set inside a set"},
        {"\\p{N}{1,3}+", "'}+'"},
        {"a{2}+", "'}+'"},
        {"(", "the split pattern: "},
        {"[a", "the split pattern: "},
        {"a)", "the split pattern: "},
        {"*", "the split pattern: "},
        {"\\p{Nonsense}", "the split pattern: "},
        {"\\C", "'\\C' in a split pattern"},
        {"(?<=a+)b", "the split pattern: "},
        {"a{3,2}", "the split pattern: "},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct nbi_split_rules rules = {
            .count = 2, .stage = {{.pattern = "a"}, {rows[i].pattern, NBI_SPLIT_ALL}}};
        struct nbi_splitter *s;
        enum nb_status rc = nbi_splitter_new(&s, &rules, classes);
        if (rc != NB_EUNSUPPORTED || !strstr(nb_last_error(), rows[i].words))
            fail_msg("'%s': %d, '%s'", rows[i].pattern, (int)rc, rc ? nb_last_error() : "");
        assert_null(s);
    }
}

/* The message is complete although the pattern ends in a backslash. */
static void test_split__trailing_backslash_is_an_error(void **state)
{
    (void)state;
    const struct nbi_split_rules rules = {.count = 1, .stage = {{"a\\", NBI_SPLIT_ALL}}};
    struct nbi_splitter *s;
    assert_fails(nbi_splitter_new(&s, &rules, classes), NB_EUNSUPPORTED, "split pattern");
}

/* The tokenizers library uses Ruby's syntax, which gives these another meaning than PCRE2: (?m)
 * lets the dot match line breaks, {,n} counts from 0, \Q is a Q. They must be read as in Ruby, or
 * be errors. */
static void test_split__reads_patterns_as_ruby_or_not_at_all(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"(?m:.+)", "a\nb", "a\nb|"},
        {"(?m).+", "a\nb", "a\nb|"},
        {"a{,3}b", "aaaab", "a|aaab|"},
        {"\\Qa", "bQa", "b|Qa|"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct nbi_split_rules rules = {.count = 1, .stage = {{rows[i][0], NBI_SPLIT_ALL}}};
        struct nbi_splitter *s;
        if (nbi_splitter_new(&s, &rules, classes) != NB_OK)
            continue;
        assert_words(s, rows[i][1], rows[i][2]);
        nbi_splitter_free(s);
    }
}

static enum nb_status ignore_word(void *ctx, const char *word, size_t len)
{
    (void)word;
    *(size_t *)ctx += len;
    return NB_OK;
}

/* A pattern that takes exponential time ends with an error. */
static void test_split__exponential_pattern_is_an_error(void **state)
{
    (void)state;
    struct nbi_split_scratch scratch = {0};
    struct nbi_splitter *s = make("(?:a+a+)+[bc]", NBI_SPLIT_ALL, false);
    char text[64];
    size_t done = 0;
    memset(text, 'a', sizeof text);
    assert_fails(nbi_split(s, &scratch, text, sizeof text, ignore_word, &done), NB_EUNSUPPORTED,
                 "takes too long");
    nbi_split_scratch_release(&scratch);
    nbi_splitter_free(s);
}

/* ---- time ---- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void test_split__takes_linear_time(void **state)
{
    (void)state;
    static const char *const units[] = {" ",          "a",  "<",    "\xCC\x81",     "\n", "'",
                                        " \n",        "1",  "\t\n", "\xE3\x80\x80", "'s", "a ",
                                        "  \xC2\xA0", " <", "\r\n", "\xE4\xB8\xAD"};
    static const char *const patterns[] = {nbi_qwen_pattern, nbi_gpt2_pattern};
    struct nbi_split_scratch scratch = {0};
    const size_t size = 1 << 20;
    for (size_t p = 0; p < 2; p++) {
        struct nbi_splitter *s = make(patterns[p], NBI_SPLIT_ALL, false);
        for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
            struct nbi_str text = {0};
            size_t done = 0;
            while (text.len < size)
                nbi_str_puts(&text, units[i]);
            double start = seconds();
            assert_ok(nbi_split(s, &scratch, text.p, text.len, ignore_word, &done));
            if (seconds() - start > 2)
                fail_msg("1 MB of '%s': %.1f s", units[i], seconds() - start);
            assert_int_equal(done, text.len);
            nbi_str_release(&text);
        }
        nbi_splitter_free(s);
    }
    nbi_split_scratch_release(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split__qwen_pattern_splits_as_listed),
        cmocka_unit_test(test_split__is_qwen_compares_the_rules),
        cmocka_unit_test(test_split__qwen_code_matches_pcre2),
        cmocka_unit_test(test_split__gpt2_pattern_splits_as_listed),
        cmocka_unit_test(test_split__patterns_are_translated),
        cmocka_unit_test(test_split__keep_selects_the_pieces),
        cmocka_unit_test(test_split__stages_split_further),
        cmocka_unit_test(test_split__stops_when_the_callback_fails),
        cmocka_unit_test(test_split__unsupported_syntax_is_an_error),
        cmocka_unit_test(test_split__trailing_backslash_is_an_error),
        cmocka_unit_test(test_split__reads_patterns_as_ruby_or_not_at_all),
        cmocka_unit_test(test_split__exponential_pattern_is_an_error),
        cmocka_unit_test(test_split__takes_linear_time),
    };
    return cmocka_run_group_tests_name("pretokenizer", tests, make_classes, free_classes);
}
