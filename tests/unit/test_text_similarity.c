/* test_text_similarity.c - words and beginnings in common, against counts by hand. */
#include "eval/text_similarity.h"

#include "unit/support.h"

static struct nbi_strview piece(const char *text)
{
    return (struct nbi_strview){text, strlen(text)};
}

/* common of x words of a and y of b. */
static void expect_f1(const char *a, const char *b, int common, int x, int y)
{
    double f1 = -1, back = -1;
    assert_ok(nbi_word_f1(piece(a), piece(b), &f1));
    assert_ok(nbi_word_f1(piece(b), piece(a), &back));
    assert_true(f1 == back);
    assert_true(f1 == (x + y ? 2.0 * common / (x + y) : 1));
}

static void test_f1__words(void **state)
{
    (void)state;
    expect_f1("", "", 0, 0, 0);
    expect_f1(" \n\t", "", 0, 0, 0);
    expect_f1("a", "", 0, 1, 0);
    expect_f1("the cat sat", "the cat ran", 2, 3, 3);
    expect_f1("a a a b", "a b b", 2, 4, 3); /* each as often as it is there */
    expect_f1("ab", "abc", 0, 1, 1);
    expect_f1("Cat", "cat", 0, 1, 1);
    expect_f1("x_1 = 2;", "x_1=2", 3, 4, 3);
    expect_f1("It's", "Its", 0, 3, 1);
}

static void test_f1__scripts(void **state)
{
    (void)state;
    expect_f1("caf\xC3\xA9 noir", "caf\xC3\xA9", 1, 2, 1);
    expect_f1("\xE4\xBD\xA0\xE5\xA5\xBD", "\xE4\xBD\xA0", 1, 2, 1); /* two characters, one */
    expect_f1("a\xC2\xA0z", "a z", 2, 2, 2); /* a space that does not break */
    expect_f1("\xFF\xFE", "\xFF", 1, 2, 1);  /* bytes alone */
}

static void test_prefix__share(void **state)
{
    (void)state;
    assert_true(nbi_common_prefix(piece(""), piece("")) == 1);
    assert_true(nbi_common_prefix(piece("abcd"), piece("abcd")) == 1);
    assert_true(nbi_common_prefix(piece("abcd"), piece("ab")) == 0.5);
    assert_true(nbi_common_prefix(piece("ab"), piece("abxy")) == 0.5);
    assert_true(nbi_common_prefix(piece("abcd"), piece("")) == 0);
    /* The first byte of the second character is the same, and does not count. */
    assert_true(nbi_common_prefix(piece("a\xC3\xA9z"), piece("a\xC3\xA8z")) == 0.25);
}

static void expect_plain(const char *text, const char *wanted)
{
    struct nbi_strview p = nbi_strip_thinking(text, strlen(text));
    assert_true(nbi_strview_equal(p, piece(wanted)));
}

static void test_plain__answer(void **state)
{
    (void)state;
    expect_plain("", "");
    expect_plain(" \n", "");
    expect_plain(" a b\n", "a b");
    expect_plain("<think>\nwell\n</think>\n\nyes", "yes");
    expect_plain("<think>\n\n</think>\n\n", "");
    expect_plain("<think> no end", "<think> no end");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f1__words),
        cmocka_unit_test(test_f1__scripts),
        cmocka_unit_test(test_prefix__share),
        cmocka_unit_test(test_plain__answer),
    };
    return cmocka_run_group_tests_name("likeness", tests, NULL, NULL);
}
