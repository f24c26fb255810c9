/* test_json.c - JSON trees, with each allocation failing in turn. */
#include <string.h>

#include "base/json.h"
#include "unit/support.h"

/* Allocations of jansson until one fails; 0: none fails. */
static long until_failure;

static void *failing_malloc(size_t size)
{
    return until_failure > 0 && --until_failure == 0 ? NULL : malloc(size);
}

static int install(void **state)
{
    (void)state;
    json_set_alloc_funcs(failing_malloc, free);
    return 0;
}

/* Long enough for buffers and tables to grow; the escape splits a string into pieces. */
static const char *text(void)
{
    static char s[4096];
    size_t n = (size_t)snprintf(s, sizeof s, "{\"template\":\"");
    for (int i = 0; i < 40; i++)
        n += (size_t)snprintf(s + n, sizeof s - n, "{%% if %d %%}\\n\\u00e9\\\"", i);
    n += (size_t)snprintf(s + n, sizeof s - n, "\",\"many\":{");
    for (int i = 0; i < 40; i++)
        n += (size_t)snprintf(s + n, sizeof s - n, "%s\"k%d\":[%d,%d.5,null,true]", i ? "," : "", i,
                              i, i);
    snprintf(s + n, sizeof s - n, "}}");
    return s;
}

static void test_json__parses_values(void **state)
{
    (void)state;
    static const char t[] = " {\"a\": [ 1 ,-0, 9223372036854775807, -9223372036854775808, 1e2, 0.1,"
                            " -2.5E-3 , \"\\ud83d\\ude00\\/\\t\", \"\", {}, [ ] ], \"\": false } ";
    json_t *j;
    assert_ok(nbi_json_parse(&j, t, strlen(t)));
    assert_int_equal(json_object_size(j), 2);
    assert_true(json_is_false(json_object_get(j, "")));
    const json_t *a = json_object_get(j, "a");
    assert_int_equal(json_array_size(a), 11);
    static const int64_t integers[] = {1, 0, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < 4; i++) {
        assert_true(json_is_integer(json_array_get(a, i)));
        assert_true(json_integer_value(json_array_get(a, i)) == integers[i]);
    }
    static const double real[] = {1e2, 0.1, -2.5e-3};
    for (size_t i = 0; i < 3; i++)
        assert_true(json_real_value(json_array_get(a, 4 + i)) == real[i]);
    assert_string_equal(json_string_value(json_array_get(a, 7)), "\xF0\x9F\x98\x80/\t");
    assert_string_equal(json_string_value(json_array_get(a, 8)), "");
    assert_int_equal(json_object_size(json_array_get(a, 9)), 0);
    assert_int_equal(json_array_size(json_array_get(a, 10)), 0);
    json_decref(j);
}

static void test_json__refuses_numbers_that_do_not_fit(void **state)
{
    (void)state;
    static const char *const bad[] = {"[9223372036854775808]", "[-9223372036854775809]", "[1e400]"};
    json_t *j;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(nbi_json_parse(&j, bad[i], strlen(bad[i])), NB_EFORMAT, "too large");
        assert_null(j);
    }
    assert_fails(nbi_json_parse(&j, "17", 2), NB_EFORMAT, "a number where an object");
}

/* Fails each allocation in turn; either the tree or the error must be right. */
static void test_json__parsing_survives_failed_allocations(void **state)
{
    (void)state;
    json_t *tree, *j;
    assert_ok(nbi_json_parse(&tree, text(), strlen(text())));
    long n = 0;
    for (bool done = false; !done;) {
        until_failure = ++n;
        enum nb_status rc = nbi_json_parse(&j, text(), strlen(text()));
        done = until_failure > 0;
        until_failure = 0;
        assert_int_equal(rc, done ? NB_OK : NB_ENOMEM);
        assert_true(done ? json_equal(j, tree) : !j);
        json_decref(j);
    }
    assert_true(n > 200); /* several for each value */
    json_decref(tree);
}

static void test_json__writing_survives_failed_allocations(void **state)
{
    (void)state;
    json_t *tree, *copy;
    char *expected, *s;
    assert_ok(nbi_json_parse(&tree, text(), strlen(text())));
    assert_ok(nbi_json_text(tree, &expected));
    long n = 0;
    for (bool done = false; !done;) {
        until_failure = ++n;
        enum nb_status rc = nbi_json_copy(&copy, tree);
        if (rc == NB_OK)
            rc = nbi_json_text(copy, &s);
        done = until_failure > 0;
        until_failure = 0;
        assert_int_equal(rc, done ? NB_OK : NB_ENOMEM);
        if (done) {
            assert_string_equal(s, expected);
            free(s);
        }
        json_decref(copy);
    }
    assert_true(n > 500);
    free(expected);
    json_decref(tree);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json__parses_values),
        cmocka_unit_test(test_json__refuses_numbers_that_do_not_fit),
        cmocka_unit_test(test_json__parsing_survives_failed_allocations),
        cmocka_unit_test(test_json__writing_survives_failed_allocations),
    };
    return cmocka_run_group_tests(tests, install, NULL);
}
