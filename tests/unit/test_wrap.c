/* test_wrap.c - text that is wrapped between words, and status lines that fit. */
#include <string.h>

#include "cli/status_line.h"
#include "cli/wrap.h"
#include "unit/support.h"

/* Where the next so many characters end. */
static size_t after(const char *text, size_t at, size_t count)
{
    for (; text[at] && count > 0; count--)
        for (at++; ((unsigned char)text[at] & 0xC0) == 0x80;)
            at++;
    return at;
}

/* What is printed of a text that comes in pieces of so many characters. */
static char *wrapped(const char *text, size_t columns, size_t piece)
{
    static char out[8192];
    char *printed = NULL;
    size_t size = 0, len = strlen(text);
    struct cli_wrap w;
    FILE *stream = open_memstream(&printed, &size);
    assert_non_null(stream);
    cli_wrap_begin(&w, stream);
    cli_wrap_resize(&w, columns);
    for (size_t at = 0, end; at < len; at = end) {
        end = after(text, at, piece);
        cli_wrap_text(&w, text + at, end - at);
    }
    cli_wrap_end(&w);
    assert_int_equal(fclose(stream), 0);
    assert_true(size < sizeof out);
    memcpy(out, printed, size + 1);
    free(printed);
    return out;
}

static void check(const char *text, size_t columns, const char *expected)
{
    for (size_t piece = 1; piece < 12; piece++)
        assert_string_equal(wrapped(text, columns, piece), expected);
}

static void test_wrap__breaks_between_words(void **state)
{
    (void)state;
    check("one two three four", 9, "one two\nthree\nfour");
    check("one two three four", 8, "one two\nthree\nfour");
    check("one two three four", 7, "one two\nthree\nfour"); /* full rows */
    check("one two three four", 18, "one two three four");
    check("one two three four", 0, "one two three four"); /* no terminal */
    check("one  two   three", 8, "one  two\nthree");
    check("a\n\n  b c d e\n", 5, "a\n\n  b c\nd e\n");
    check("ends with blanks   ", 10, "ends with\nblanks");
    check("a\tb\tc", 12, "a       b\nc");
    check("a b", 1, "a\nb");
}

static void test_wrap__leaves_long_words_to_the_terminal(void **state)
{
    (void)state;
    check("see http://a.very/long/address or not", 10, "see\nhttp://a.very/long/address or\nnot");
    check("abcdefghij", 3, "abcdefghij");
    check("abcdefghi jk", 3, "abcdefghi\njk");
    check("abcdefgh i jk", 3, "abcdefgh\ni\njk");
    check("abcdefg i jk", 3,
          "abcdefg i\njk"); /* one letter in the last row, so one fits after it */
}

#define NI    "\xe4\xbd\xa0" /* two columns each */
#define HAO   "\xe5\xa5\xbd"
#define ACUTE "\xcc\x81" /* none */

static void test_wrap__counts_columns(void **state)
{
    (void)state;
    check(NI HAO NI HAO NI, 6, NI HAO NI "\n" HAO NI);
    check(NI HAO NI HAO NI, 7, NI HAO NI "\n" HAO NI);
    check("ab" NI "cd " HAO, 4, "ab" NI "\ncd\n" HAO);
    check("ab" NI "cde", 5, "ab" NI "\ncde");
    check("e" ACUTE "e" ACUTE " e" ACUTE "e", 4, "e" ACUTE "e" ACUTE "\ne" ACUTE "e");
    check(NI ACUTE HAO, 2, NI ACUTE "\n" HAO);
}

static void test_wrap__replaces_what_could_move_the_cursor(void **state)
{
    (void)state;
    check("a\033[31mb\r c", 20, "a?[31mb? c");
    check("\xe2\x80\xa8", 20, "\xef\xbf\xbd"); /* U+2028, a line separator */
    check("a\xcd\xb8z", 20, "a\xef\xbf\xbdz"); /* U+0378 is not assigned */
}

static void test_wrap__sequences_take_no_columns(void **state)
{
    (void)state;
    char *printed = NULL;
    size_t size = 0;
    struct cli_wrap w;
    FILE *stream = open_memstream(&printed, &size);
    cli_wrap_begin(&w, stream);
    cli_wrap_resize(&w, 7);
    cli_wrap_sequence(&w, "\033[2m");
    cli_wrap_text(&w, "one two", 7);
    cli_wrap_sequence(&w, "\033[0m");
    cli_wrap_text(&w, " three", 6);
    cli_wrap_end(&w);
    fclose(stream);
    assert_string_equal(printed, "\033[2mone two\033[0m\nthree");
    free(printed);
}

static void test_wrap__follows_the_window(void **state)
{
    (void)state;
    char *printed = NULL;
    size_t size = 0;
    struct cli_wrap w;
    FILE *stream = open_memstream(&printed, &size);
    cli_wrap_begin(&w, stream);
    cli_wrap_resize(&w, 20);
    cli_wrap_text(&w, "one two three ", 14);
    cli_wrap_resize(&w, 8);
    cli_wrap_text(&w, "four five six ", 14);
    cli_wrap_resize(&w, 100);
    cli_wrap_text(&w, "seven", 5);
    cli_wrap_end(&w);
    fclose(stream);
    assert_string_equal(printed, "one two three\nfour\nfive six seven");
    free(printed);
}

static void test_wrap__survives_endless_words(void **state)
{
    (void)state;
    char text[3 * CLI_WRAP_WORD], *out;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    out = wrapped(text, 0, 7); /* nothing is lost */
    assert_string_equal(out, text);
    text[0] = 'e';
    for (size_t i = 1; i + 1 < sizeof text; i += 2)
        memcpy(text + i, ACUTE, 2);
    out = wrapped(text, 10, 5);
    assert_string_equal(out, text);
}

/* ---- status lines ---- */

static void test_status__leaves_out_what_does_not_fit(void **state)
{
    (void)state;
    const struct cli_status_part parts[] = {
        {"[###..]", 3}, {"step 3/5", 0}, {"", 0}, {"loss 1.5", 2}, {"0:07 left", 1}};
    static const struct {
        size_t columns;
        const char *text;
    } rows[] = {{100, "[###..]  step 3/5  loss 1.5  0:07 left"},
                {38, "[###..]  step 3/5  loss 1.5  0:07 left"},
                {37, "step 3/5  loss 1.5  0:07 left"},
                {29, "step 3/5  loss 1.5  0:07 left"},
                {28, "step 3/5  0:07 left"},
                {18, "step 3/5"},
                {5, "step "},
                {1, "s"}};
    char text[64];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        cli_status_join(text, sizeof text, parts, 5, rows[i].columns);
        assert_string_equal(text, rows[i].text);
    }
    char small[8]; /* the buffer is the limit */
    cli_status_join(small, sizeof small, parts, 5, 100);
    assert_string_equal(small, "step 3/");
}

static void test_status__bar(void **state)
{
    (void)state;
    char bar[CLI_BAR + 3];
    assert_string_equal(cli_bar(bar, 0), "[....................]");
    assert_string_equal(cli_bar(bar, 0.5), "[##########..........]");
    assert_string_equal(cli_bar(bar, 0.999), "[###################.]");
    assert_string_equal(cli_bar(bar, 1), "[####################]");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrap__breaks_between_words),
        cmocka_unit_test(test_wrap__leaves_long_words_to_the_terminal),
        cmocka_unit_test(test_wrap__counts_columns),
        cmocka_unit_test(test_wrap__replaces_what_could_move_the_cursor),
        cmocka_unit_test(test_wrap__sequences_take_no_columns),
        cmocka_unit_test(test_wrap__follows_the_window),
        cmocka_unit_test(test_wrap__survives_endless_words),
        cmocka_unit_test(test_status__leaves_out_what_does_not_fit),
        cmocka_unit_test(test_status__bar),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
