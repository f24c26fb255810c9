/* test_jscan.c - JSON read in place, against golden/tokenizer/json.txt, which records the results
 * of Python's json module, and against texts written by hand. */
#include "base/jscan.h"
#include "base/json.h"
#include "base/utf8.h"
#include "unit/support.h"

/* Copies into a block of exactly len bytes, so that the sanitizer detects reads past the end. */
static char *exact(const char *bytes, size_t len)
{
    char *copy = malloc(len ? len : 1);
    assert_non_null(copy);
    if (len)
        memcpy(copy, bytes, len);
    return copy;
}

static enum nb_status scan_exact(const char *bytes, size_t len)
{
    struct nbi_jspan json;
    char *copy = exact(bytes, len);
    enum nb_status rc = nbi_jscan(&json, copy, len);
    if (rc == NB_OK) {
        assert_true(json.p >= copy && json.p + json.len <= copy + len && json.len > 0);
    } else {
        assert_null(json.p);
        assert_int_equal(json.len, 0);
    }
    free(copy);
    return rc;
}

static struct nbi_jspan scan(const char *text)
{
    struct nbi_jspan json;
    assert_ok(nbi_jscan(&json, text, strlen(text)));
    return json;
}

static void put_string(struct nbi_str *out, struct nbi_jspan string)
{
    struct nbi_str text = {0};
    nbi_jstring(string, &text);
    assert_ok(nbi_str_status(&text));
    nbi_jquote(out, nbi_str_text(&text), text.len);
    nbi_str_release(&text);
}

/* The value without white space, strings decoded and quoted again. */
static void put_value(struct nbi_str *out, struct nbi_jspan v)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    enum nbi_jtype type = nbi_jtype(v);
    if (type == NBI_JSTRING) {
        put_string(out, v);
    } else if (type != NBI_JOBJECT && type != NBI_JARRAY) {
        nbi_str_append(out, v.p, v.len);
    } else {
        size_t n = 0;
        nbi_str_puts(out, type == NBI_JOBJECT ? "{" : "[");
        nbi_jiter_init(&it, v);
        for (; nbi_jiter_next(&it, &key, &value); n++) {
            nbi_str_puts(out, n ? "," : "");
            if (type == NBI_JOBJECT) {
                put_string(out, key);
                nbi_str_puts(out, ":");
            } else {
                assert_int_equal(nbi_jtype(key), NBI_JNONE);
            }
            put_value(out, value);
        }
        nbi_str_puts(out, type == NBI_JOBJECT ? "}" : "]");
        assert_int_equal(nbi_jcount(v), n);
    }
}

/* The same through key, enter, leave and value. */
static void put_inside(struct nbi_str *out, struct nbi_jiter *it)
{
    struct nbi_jiter inner;
    struct nbi_jspan key;
    for (size_t n = 0; nbi_jiter_key(it, &key); n++) {
        nbi_str_puts(out, n ? "," : "");
        if (it->object) {
            put_string(out, key);
            nbi_str_puts(out, ":");
        }
        if (!nbi_jiter_enter(it, &inner)) {
            put_value(out, nbi_jiter_value(it));
            continue;
        }
        nbi_str_puts(out, inner.object ? "{" : "[");
        put_inside(out, &inner);
        nbi_str_puts(out, inner.object ? "}" : "]");
        nbi_jiter_leave(it, &inner);
    }
}

/* ---- against Python ---- */

static size_t unhex(const char *hex, size_t len, char *out)
{
    for (size_t i = 0; i < len / 2; i++) {
        char digits[3] = {hex[2 * i], hex[2 * i + 1], 0};
        out[i] = (char)strtol(digits, NULL, 16);
    }
    return len / 2;
}

typedef void (*row_fn)(const char *text, size_t len, const char *value, size_t value_len);

/* Calls fn for each row of json.txt. value is NULL if Python refuses the text. */
static int each_row(row_fn fn)
{
    char *table;
    size_t size;
    int rows = 0;
    assert_ok(nbi_file_read(NB_TEST_SOURCE "/golden/tokenizer/json.txt", 1 << 20, &table, &size));
    for (char *p = table; *p; rows++) {
        char *tab = strchr(p, '\t'), *end = strchr(tab, '\n');
        char *text = malloc((size_t)(end - p)), *value = malloc((size_t)(end - p));
        size_t len = unhex(p, (size_t)(tab - p), text);
        size_t value_len = unhex(tab + 1, (size_t)(end - tab - 1), value);
        fn(text, len, tab[1] == '-' ? NULL : value, value_len);
        free(text);
        free(value);
        p = end + 1;
    }
    free(table);
    return rows;
}

static void compare_row(const char *text, size_t len, const char *value, size_t value_len)
{
    struct nbi_jspan json;
    struct nbi_str got = {0};
    char *copy = exact(text, len);
    enum nb_status rc = nbi_jscan(&json, copy, len);
    if ((rc == NB_OK) != (value != NULL))
        fail_msg("'%.*s': %s", (int)len, text, rc == NB_OK ? "accepted" : nb_last_error());
    if (rc == NB_OK) {
        put_value(&got, json);
        assert_int_equal(got.len, value_len);
        assert_memory_equal(nbi_str_text(&got), value, value_len);
        if (*json.p == '[' || *json.p == '{') {
            struct nbi_jiter it;
            nbi_jiter_init(&it, json);
            got.len = 0;
            nbi_str_append(&got, json.p, 1);
            put_inside(&got, &it);
            nbi_str_puts(&got, it.object ? "}" : "]");
            assert_int_equal(got.len, value_len);
            assert_memory_equal(nbi_str_text(&got), value, value_len);
            assert_ptr_equal(it.p, json.p + json.len - 1);
        }
    } else {
        assert_int_equal(rc, NB_EFORMAT);
        assert_non_null(strstr(nb_last_error(), "invalid JSON "));
    }
    nbi_str_release(&got);
    free(copy);
}

static void test_jscan__agrees_with_python(void **state)
{
    (void)state;
    assert_true(each_row(compare_row) >= 300);
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t trimmed(const char *text, size_t len)
{
    while (len > 0 && is_space(text[len - 1]))
        len--;
    return len;
}

/* A truncated text is invalid, unless it is a number or lost only white space. */
static void cut_row(const char *text, size_t len, const char *value, size_t value_len)
{
    (void)value_len;
    if (!value)
        return;
    bool closed = strchr("[{\"", *value) != NULL;
    for (size_t n = 0; n < len; n++) {
        enum nb_status rc = scan_exact(text, n);
        if (closed && (rc == NB_OK) != (trimmed(text, n) == trimmed(text, len)))
            fail_msg("'%.*s': %s", (int)n, text, rc == NB_OK ? "accepted" : nb_last_error());
    }
}

static void test_jscan__refuses_every_truncation(void **state)
{
    (void)state;
    each_row(cut_row);
}

/* One byte changed to any other: if the text is accepted, iteration works and a copy reads the
 * same. */
static void damage_row(const char *text, size_t len, const char *value, size_t value_len)
{
    static const char bytes[] = "\"\\[]{}:,0-u \n\x80\xC3\xFF";
    (void)value_len;
    if (!value || len > 60)
        return;
    for (size_t i = 0; i < len * (sizeof bytes - 1); i++) {
        struct nbi_jspan json, again;
        struct nbi_str once = {0}, twice = {0};
        char *copy = exact(text, len);
        copy[i / (sizeof bytes - 1)] = bytes[i % (sizeof bytes - 1)];
        if (nbi_jscan(&json, copy, len) == NB_OK) {
            put_value(&once, json);
            assert_ok(nbi_jscan(&again, once.p, once.len));
            put_value(&twice, again);
            assert_string_equal(nbi_str_text(&once), nbi_str_text(&twice));
        }
        nbi_str_release(&once);
        nbi_str_release(&twice);
        free(copy);
    }
}

static void test_jscan__survives_every_damaged_byte(void **state)
{
    (void)state;
    each_row(damage_row);
}

/* ---- messages ---- */

static void test_jscan__messages_name_the_mistake(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } rows[] = {
        {"", ": a value is expected"},
        {"\n\n x", "line 3: a value is expected"},
        {"[1,\n2\n3]", "line 3: ',' or ']' is expected"},
        {"{\"a\": 1\n\"b\"", "line 2: ',' or '}' is expected"},
        {"{\n1}", "line 2: a name in quotes is expected"},
        {"{\"a\"\n\n,", "line 3: ':' is expected"},
        {"[1]\n\n]", "line 3: something follows the value"},
        {"\"a", "a string does not end"},
        {"\"\\x\"", "unknown escape in a string"},
        {"\"\\u12\"", "\\u wants four hexadecimal digits"},
        {"\"\\udc00\"", "a lone surrogate is no character"},
        {"\"\\ud800\\u0020\"", "a lone surrogate is no character"},
        {"\"\xC3(\"", "not well-formed UTF-8"},
        {"\"\x01\"", "a control character in a string"},
        {"-a", "malformed number"},
        {"1.x", "malformed number"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_fails(scan_exact(rows[i].text, strlen(rows[i].text)), NB_EFORMAT, rows[i].words);
    char deep[200];
    memset(deep, '[', sizeof deep);
    assert_fails(scan_exact(deep, sizeof deep), NB_EFORMAT, "nested deeper than");
    assert_fails(scan_exact(deep, NBI_JSON_DEPTH), NB_EFORMAT, "a value is expected");
}

/* An invalid newline is reported in the line that it ends. */
static void test_jscan__a_newline_counts_to_the_line_it_ends(void **state)
{
    (void)state;
    assert_fails(scan_exact("[\n\"a\n\"]", 7), NB_EFORMAT, "line 2: a control character");
    assert_fails(scan_exact("[\n\"\\\n\"]", 7), NB_EFORMAT, "line 2: unknown escape");
}

/* ---- values ---- */

static void test_jscan__values_have_types(void **state)
{
    (void)state;
    static const struct {
        const char *text, *name;
        enum nbi_jtype type;
        size_t count;
    } rows[] = {
        {"null", "null", NBI_JNULL, 0},
        {" true ", "true", NBI_JTRUE, 0},
        {"false", "false", NBI_JFALSE, 0},
        {"-1.5e9", "a number", NBI_JNUMBER, 0},
        {"0", "a number", NBI_JNUMBER, 0},
        {"\"[1]\"", "a string", NBI_JSTRING, 0},
        {" [ 1 , 2 ] ", "an array", NBI_JARRAY, 2},
        {"{\"a\":{\"b\":[]}}", "an object", NBI_JOBJECT, 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct nbi_jspan v = scan(rows[i].text);
        assert_int_equal(nbi_jtype(v), rows[i].type);
        assert_string_equal(nbi_jtype_text(v), rows[i].name);
        assert_int_equal(nbi_jcount(v), rows[i].count);
        assert_false(is_space(v.p[0]) || is_space(v.p[v.len - 1]));
    }
    struct nbi_jspan none = {0};
    assert_int_equal(nbi_jtype(none), NBI_JNONE);
    assert_string_equal(nbi_jtype_text(none), "missing");
    assert_int_equal(nbi_jcount(none), 0);
    assert_null(nbi_jget(none, "a").p);
    assert_null(nbi_jget(scan("[1]"), "a").p);
    assert_null(nbi_jget(scan("\"a\""), "a").p);
}

static void assert_string(const char *json, const char *text, size_t len)
{
    struct nbi_str got = {0};
    struct nbi_jspan v = scan(json);
    nbi_str_puts(&got, ">"); /* appends */
    nbi_jstring(v, &got);
    assert_ok(nbi_str_status(&got));
    assert_int_equal(got.len, len + 1);
    assert_memory_equal(got.p + 1, text, len);
    if (strlen(text) == len)
        assert_true(nbi_jequals(v, text));
    nbi_str_release(&got);
}

static void test_jscan__strings_are_decoded(void **state)
{
    (void)state;
    assert_string("\"\"", "", 0);
    assert_string("\"a b\"", "a b", 3);
    assert_string("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 8);
    assert_string("\"a\\u0000b\"", "a\0b", 3);
    assert_string("\"\\u00e9\\u4E2d\\ufffd\"", "\xC3\xA9\xE4\xB8\xAD\xEF\xBF\xBD", 8);
    assert_string("\"\\ud83d\\ude00x\"", "\xF0\x9F\x98\x80x", 5);
    assert_string("\"\\uD800\\uDC00\\uDBFF\\uDFFF\"", "\xF0\x90\x80\x80\xF4\x8F\xBF\xBF", 8);
    assert_string("\"\\\\u0041\"", "\\u0041", 6);
    struct nbi_str none = {0};
    nbi_jstring(scan("12"), &none);
    nbi_jstring((struct nbi_jspan){0}, &none);
    assert_int_equal(none.len, 0);
    nbi_str_release(&none);
    assert_false(nbi_jequals(scan("\"a\\u0000\""), "a"));
    assert_false(nbi_jequals(scan("\"ab\""), "a"));
    assert_false(nbi_jequals(scan("\"a\""), "ab"));
    assert_true(nbi_jequals(scan("\"\\u0061b\""), "ab"));
    assert_false(nbi_jequals(scan("null"), "null"));
    assert_false(nbi_jequals((struct nbi_jspan){0}, ""));
}

static void test_jscan__members_are_found(void **state)
{
    (void)state;
    struct nbi_jspan v =
        scan("{ \"a\" : 1 , \"b\\\"}\" : [ {\"a\": 9} ] , \"a\" : \"z\", \"\": {} }");
    assert_true(nbi_jequals(nbi_jget(v, "a"), "z")); /* the last one counts */
    assert_int_equal(nbi_jtype(nbi_jget(v, "b\"}")), NBI_JARRAY);
    assert_int_equal(nbi_jtype(nbi_jget(v, "")), NBI_JOBJECT);
    assert_null(nbi_jget(v, "c").p);
    assert_null(nbi_jget(v, "A").p);
    assert_true(nbi_jequals(nbi_jget(scan("{\"\\u0061\": \"x\"}"), "a"), "x"));
    static const char *const keys[] = {"a", "b\"}", "a", ""};
    static const char *const values[] = {"1", "[ {\"a\": 9} ]", "\"z\"", "{}"};
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    nbi_jiter_init(&it, v);
    for (int i = 0; i < 4; i++) {
        assert_true(nbi_jiter_next(&it, &key, &value));
        assert_true(nbi_jequals(key, keys[i]));
        assert_int_equal(value.len, strlen(values[i]));
        assert_memory_equal(value.p, values[i], value.len);
    }
    for (int i = 0; i < 2; i++) {
        assert_false(nbi_jiter_next(&it, &key, &value));
        assert_null(key.p);
        assert_null(value.p);
    }
    nbi_jiter_init(&it, scan("12"));
    assert_false(nbi_jiter_next(&it, &key, &value));
    nbi_jiter_init(&it, (struct nbi_jspan){0});
    assert_false(nbi_jiter_key(&it, &key));
}

static void test_jscan__enter_and_leave_visit_each_value_once(void **state)
{
    (void)state;
    struct nbi_jiter it, list, pair;
    struct nbi_jspan key, part;
    nbi_jiter_init(&it,
                   scan("{\"n\": 5, \"m\": [[\"]\", 1], [ ], 7], \"o\": {\"x\": {}}, \"l\": 0}"));
    assert_true(nbi_jiter_key(&it, &key) && nbi_jequals(key, "n"));
    assert_false(nbi_jiter_enter(&it, &list));
    assert_int_equal(nbi_jtype(nbi_jiter_value(&it)), NBI_JNUMBER);
    assert_true(nbi_jiter_key(&it, &key) && nbi_jequals(key, "m"));
    assert_true(nbi_jiter_enter(&it, &list) && !list.object);
    assert_true(nbi_jiter_key(&list, &key) && nbi_jiter_enter(&list, &pair));
    assert_true(nbi_jiter_next(&pair, &key, &part) && nbi_jequals(part, "]"));
    assert_true(nbi_jiter_next(&pair, &key, &part) && part.len == 1);
    assert_false(nbi_jiter_next(&pair, &key, &part));
    nbi_jiter_leave(&list, &pair);
    assert_true(nbi_jiter_key(&list, &key) && nbi_jiter_enter(&list, &pair));
    assert_false(nbi_jiter_key(&pair, &key));
    nbi_jiter_leave(&list, &pair);
    assert_true(nbi_jiter_key(&list, &key) && !nbi_jiter_enter(&list, &pair));
    assert_int_equal(*nbi_jiter_value(&list).p, '7');
    assert_false(nbi_jiter_key(&list, &key));
    nbi_jiter_leave(&it, &list);
    assert_true(nbi_jiter_key(&it, &key) && nbi_jequals(key, "o"));
    assert_true(nbi_jiter_enter(&it, &list) && list.object);
    assert_true(nbi_jiter_next(&list, &key, &part) && nbi_jequals(key, "x"));
    assert_false(nbi_jiter_key(&list, &key));
    nbi_jiter_leave(&it, &list);
    assert_true(nbi_jiter_next(&it, &key, &part) && nbi_jequals(key, "l"));
    assert_false(nbi_jiter_key(&it, &key));
}

static void test_jscan__reads_integers_in_range(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t min, max, value;
        bool good;
    } rows[] = {
        {"0", 0, 0, 0, true},
        {"-0", 0, 0, 0, true},
        {"17", 0, 16, 0, false},
        {"17", 17, 17, 17, true},
        {"-5", -5, -5, -5, true},
        {"-5", 0, 9, 0, false},
        {"1.0", 0, 9, 0, false},
        {"1e1", 0, 99, 0, false},
        {"9223372036854775807", INT64_MIN, INT64_MAX, INT64_MAX, true},
        {"9223372036854775808", INT64_MIN, INT64_MAX, 0, false},
        {"-9223372036854775807", INT64_MIN, INT64_MAX, -INT64_MAX, true},
        {"-9223372036854775809", INT64_MIN, INT64_MAX, 0, false},
        {"18446744073709551616", INT64_MIN, INT64_MAX, 0, false},
        {"18446744073709551617", INT64_MIN, INT64_MAX, 0, false},
        {"92233720368547758070", INT64_MIN, INT64_MAX, 0, false},
        {"36893488147419103233", INT64_MIN, INT64_MAX, 0, false},
        {"100000000000000000000000000000000001", INT64_MIN, INT64_MAX, 0, false},
        {"\"1\"", 0, 9, 0, false},
        {"true", 0, 9, 0, false},
        {"[1]", 0, 9, 0, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int64_t v = 77;
        bool good = nbi_jint(scan(rows[i].text), rows[i].min, rows[i].max, &v);
        if (good != rows[i].good || v != (good ? rows[i].value : 77))
            fail_msg("%s: %d %lld", rows[i].text, good, (long long)v);
    }
    int64_t v = 77;
    assert_false(nbi_jint((struct nbi_jspan){0}, INT64_MIN, INT64_MAX, &v));
}

static void test_jscan__reads_the_smallest_integer(void **state)
{
    (void)state;
    int64_t v = 0;
    assert_true(nbi_jint(scan("-9223372036854775808"), INT64_MIN, INT64_MAX, &v));
    assert_true(v == INT64_MIN);
}

/* ---- writing ---- */

static void assert_quoted(const char *text, size_t len, const char *json)
{
    struct nbi_str got = {0};
    nbi_jquote(&got, text, len);
    assert_ok(nbi_str_status(&got));
    assert_string_equal(got.p, json);
    nbi_str_release(&got);
}

static void test_jquote__escapes_only_what_it_must(void **state)
{
    (void)state;
    assert_quoted("", 0, "\"\"");
    assert_quoted("a/b'\x7F", 5, "\"a/b'\x7F\"");
    assert_quoted("\"\\\b\f\n\r\t\0\x01\x1F", 10,
                  "\"\\\"\\\\\\b\\f\\n\\r\\t\\u0000\\u0001\\u001f\"");
    assert_quoted("\xE4\xB8\xAD\xE2\x80\xA8", 6, "\"\xE4\xB8\xAD\xE2\x80\xA8\"");
    assert_quoted("\xE4\xB8", 2, "\"\xEF\xBF\xBD\"");
    assert_quoted("\xE4\n\xB8", 3, "\"\xEF\xBF\xBD\\n\xEF\xBF\xBD\"");
}

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static void test_jquote__round_trips(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int i = 0; i < 20000; i++) {
        char bytes[24];
        size_t len = next_random(&seed) % sizeof bytes;
        for (size_t k = 0; k < len; k++) {
            uint32_t r = next_random(&seed);
            bytes[k] = (char)(r & 0x700 ? r % 0x80 : r);
        }
        struct nbi_str json = {0}, decoded = {0}, wanted = {0};
        struct nbi_jspan v;
        nbi_jquote(&json, bytes, len);
        assert_ok(nbi_jscan(&v, nbi_str_text(&json), json.len));
        nbi_jstring(v, &decoded);
        nbi_utf8_repair(&wanted, bytes, len);
        assert_int_equal(decoded.len, wanted.len);
        assert_memory_equal(nbi_str_text(&decoded), nbi_str_text(&wanted), wanted.len);
        nbi_str_release(&json);
        nbi_str_release(&decoded);
        nbi_str_release(&wanted);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_jscan__agrees_with_python),
        cmocka_unit_test(test_jscan__refuses_every_truncation),
        cmocka_unit_test(test_jscan__survives_every_damaged_byte),
        cmocka_unit_test(test_jscan__messages_name_the_mistake),
        cmocka_unit_test(test_jscan__a_newline_counts_to_the_line_it_ends),
        cmocka_unit_test(test_jscan__values_have_types),
        cmocka_unit_test(test_jscan__strings_are_decoded),
        cmocka_unit_test(test_jscan__members_are_found),
        cmocka_unit_test(test_jscan__enter_and_leave_visit_each_value_once),
        cmocka_unit_test(test_jscan__reads_integers_in_range),
        cmocka_unit_test(test_jscan__reads_the_smallest_integer),
        cmocka_unit_test(test_jquote__escapes_only_what_it_must),
        cmocka_unit_test(test_jquote__round_trips),
    };
    return cmocka_run_group_tests_name("jscan", tests, NULL, NULL);
}
