/* test_text_similarity.c - compares F1 scores and common prefixes with values counted by hand. */
#include "eval/text_similarity.h"

#include "unit/support.h"

static struct nbi_strview piece(const char *text)
{
    return (struct nbi_strview){text, strlen(text)};
}

/* Text a has x words, b has y, and `common` of them are the same. */
static void expect_f1(const char *a, const char *b, int common, int x, int y)
{
    double f1 = -1, back = -1;
    assert_ok(nbi_word_f1(piece(a), piece(b), &f1));
    assert_ok(nbi_word_f1(piece(b), piece(a), &back));
    assert_true(f1 == back);
    assert_true(f1 == (x + y ? 2.0 * common / (x + y) : 1));
}

static void test_f1__counts_words_with_multiplicity(void **state)
{
    (void)state;
    expect_f1("", "", 0, 0, 0);
    expect_f1(" \n\t", "", 0, 0, 0);
    expect_f1("a", "", 0, 1, 0);
    expect_f1("the cat sat", "the cat ran", 2, 3, 3);
    expect_f1("a a a b", "a b b", 2, 4, 3); /* counted with multiplicity */
    expect_f1("ab", "abc", 0, 1, 1);
    expect_f1("Cat", "cat", 0, 1, 1);
    expect_f1("x_1 = 2;", "x_1=2", 3, 4, 3);
    expect_f1("It's", "Its", 0, 3, 1);
}

static void test_f1__splits_words_in_all_scripts(void **state)
{
    (void)state;
    expect_f1("caf\xC3\xA9 noir", "caf\xC3\xA9", 1, 2, 1);
    expect_f1("\xE4\xBD\xA0\xE5\xA5\xBD", "\xE4\xBD\xA0", 1, 2, 1); /* a word per character */
    expect_f1("a\xC2\xA0z", "a z", 2, 2, 2);                        /* no-break space */
    expect_f1("\xFF\xFE", "\xFF", 1, 2, 1);                         /* malformed bytes */
}

static void test_prefix__is_a_share_of_whole_characters(void **state)
{
    (void)state;
    assert_true(nbi_common_prefix(piece(""), piece("")) == 1);
    assert_true(nbi_common_prefix(piece("abcd"), piece("abcd")) == 1);
    assert_true(nbi_common_prefix(piece("abcd"), piece("ab")) == 0.5);
    assert_true(nbi_common_prefix(piece("ab"), piece("abxy")) == 0.5);
    assert_true(nbi_common_prefix(piece("abcd"), piece("")) == 0);
    /* The second characters differ but share their first byte, which must not count. */
    assert_true(nbi_common_prefix(piece("a\xC3\xA9z"), piece("a\xC3\xA8z")) == 0.25);
}

static void expect_plain(const char *text, const char *wanted)
{
    struct nbi_strview p = nbi_strip_thinking(text, strlen(text));
    assert_true(nbi_strview_equal(p, piece(wanted)));
}

static void test_strip_thinking__leaves_the_answer(void **state)
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
        cmocka_unit_test(test_f1__counts_words_with_multiplicity),
        cmocka_unit_test(test_f1__splits_words_in_all_scripts),
        cmocka_unit_test(test_prefix__is_a_share_of_whole_characters),
        cmocka_unit_test(test_strip_thinking__leaves_the_answer),
    };
    return cmocka_run_group_tests_name("text_similarity", tests, NULL, NULL);
}
