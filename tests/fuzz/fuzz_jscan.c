/* fuzz_jscan.c - reads arbitrary bytes as JSON in place and with jansson: both must accept the same
 * texts and give the same values. Quoted as a JSON string, the bytes must read back. */
#include "base/jscan.h"

#include "base/json.h"
#include "fuzz/text_target.h"

static void same(struct nbi_jspan v, const json_t *json, struct nbi_str *s);

static void same_string(struct nbi_jspan v, const char *text, size_t len, struct nbi_str *s)
{
    s->len = 0;
    nbi_jstring(v, s);
    MUST(s->len == len && memcmp(nbi_str_text(s), text, len) == 0);
    MUST(strlen(text) != len || nbi_jequals(v, text));
}

static void same_number(struct nbi_jspan v, const json_t *json)
{
    int64_t whole = 0;
    char text[400];
    if (json_is_integer(json)) {
        bool fits = nbi_jint(v, INT64_MIN, INT64_MAX, &whole);
        MUST(fits ? whole == json_integer_value(json) : json_integer_value(json) == INT64_MIN);
        MUST(!fits || !nbi_jint(v, whole + (whole < INT64_MAX), INT64_MAX, &whole) ||
             whole == INT64_MAX);
    } else if (v.len < sizeof text) {
        memcpy(text, v.p, v.len);
        text[v.len] = 0;
        MUST(strtod(text, NULL) == json_real_value(json));
        MUST(!nbi_jint(v, INT64_MIN, INT64_MAX, &whole));
    }
}

/* Among members with the same name, both readers return the last. */
static void same_members(struct nbi_jspan v, const json_t *json, struct nbi_str *s)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    size_t count = 0;
    const char *name;
    json_t *member;
    nbi_jiter_init(&it, v);
    while (nbi_jiter_next(&it, &key, &value)) {
        s->len = 0;
        nbi_jstring(key, s);
        nbi_str_append(s, "", 0); /* NUL-terminates even an empty string */
        MUST(json_object_get(json, nbi_str_text(s)) && strlen(nbi_str_text(s)) == s->len);
        count++;
    }
    MUST(count == nbi_jcount(v) && count >= json_object_size(json));
    json_object_foreach ((json_t *)(uintptr_t)json, name, member)
        same(nbi_jget(v, name), member, s);
}

static void same_elements(struct nbi_jspan v, const json_t *json, struct nbi_str *s)
{
    struct nbi_jiter it, inner;
    struct nbi_jspan key, value;
    size_t n = 0;
    nbi_jiter_init(&it, v);
    for (; nbi_jiter_key(&it, &key); n++) {
        if (n % 2 && nbi_jiter_enter(&it, &inner)) { /* the iterator for large values */
            while (nbi_jiter_next(&inner, &key, &value))
                ;
            nbi_jiter_leave(&it, &inner);
            continue;
        }
        same(nbi_jiter_value(&it), json_array_get(json, n), s);
    }
    MUST(n == json_array_size(json) && n == nbi_jcount(v));
}

static void same(struct nbi_jspan v, const json_t *json, struct nbi_str *s)
{
    static const enum nbi_jtype types[] = {
        [JSON_OBJECT] = NBI_JOBJECT,  [JSON_ARRAY] = NBI_JARRAY, [JSON_STRING] = NBI_JSTRING,
        [JSON_INTEGER] = NBI_JNUMBER, [JSON_REAL] = NBI_JNUMBER, [JSON_TRUE] = NBI_JTRUE,
        [JSON_FALSE] = NBI_JFALSE,    [JSON_NULL] = NBI_JNULL,
    };
    MUST(json && nbi_jtype(v) == types[json_typeof(json)]);
    if (json_is_string(json))
        same_string(v, json_string_value(json), json_string_length(json), s);
    else if (json_is_number(json))
        same_number(v, json);
    else if (json_is_object(json))
        same_members(v, json, s);
    else if (json_is_array(json))
        same_elements(v, json, s);
}

static void check_quoting(const char *text, size_t len)
{
    struct nbi_str quoted = {0}, wanted = {0}, back = {0};
    struct nbi_jspan v;
    nbi_jquote(&quoted, text, len);
    MUST(nbi_jscan(&v, quoted.p, quoted.len) == NB_OK && nbi_jtype(v) == NBI_JSTRING);
    nbi_jstring(v, &back);
    nbi_utf8_repair(&wanted, text, len);
    MUST(back.len == wanted.len);
    MUST(memcmp(nbi_str_text(&back), nbi_str_text(&wanted), back.len) == 0);
    nbi_str_release(&quoted);
    nbi_str_release(&wanted);
    nbi_str_release(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    struct nbi_jspan v;
    struct nbi_str s = {0};
    json_error_t error;
    json_t *json = json_loadb(text, size, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    enum nb_status rc = nbi_jscan(&v, text, size);
    if (rc == NB_OK && json)
        same(v, json, &s);
    else if (rc == NB_OK) /* jansson rejects large numbers and NUL in keys */
        MUST(json_error_code(&error) == json_error_numeric_overflow ||
             json_error_code(&error) == json_error_null_byte_in_key);
    else /* jansson ignores a NUL after the value */
        MUST(!json || strstr(nb_last_error(), "nested too deeply") || memchr(text, 0, size));
    json_decref(json);
    nbi_str_release(&s);
    check_quoting(text, size);
    return 0;
}
