/* json.c - jansson trees, built from text by base/jscan.h. */
#include "base/json.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/jscan.h"
#include "base/str.h"

/* ---- from text to a tree ---- */

struct reader {
    bool nul_allowed;    /* in strings */
    struct nbi_str text; /* the current key or string, decoded */
};

static enum nb_status out_of_memory(void)
{
    return nbi_fail_memory("JSON", sizeof(json_t));
}

static enum nb_status read_text(struct reader *r, struct nbi_jspan string)
{
    r->text.len = 0;
    nbi_str_puts(&r->text, "");
    nbi_jstring(string, &r->text);
    NBI_TRY(nbi_str_status(&r->text));
    if (!r->nul_allowed && r->text.len > 0 && memchr(r->text.p, 0, r->text.len))
        return nbi_fail(NB_EFORMAT, "invalid JSON: a NUL (\\u0000) in a string");
    return NB_OK;
}

/* The text is validated, so strtoll() and strtod() stop at the character after the number. */
static enum nb_status read_number(struct nbi_jspan number, json_t **out)
{
    bool integer = true;
    for (size_t i = 0; i < number.len; i++)
        integer = integer && number.p[i] != '.' && number.p[i] != 'e' && number.p[i] != 'E';
    errno = 0;
    long long n = integer ? strtoll(number.p, NULL, 10) : 0;
    double x = integer ? 0 : strtod(number.p, NULL);
    if ((integer && errno == ERANGE) || !isfinite(x))
        return nbi_fail(NB_EFORMAT, "invalid JSON: the number %.*s is too large",
                        number.len < 40 ? (int)number.len : 40, number.p);
    *out = integer ? json_integer(n) : json_real(x);
    return *out ? NB_OK : out_of_memory();
}

static enum nb_status read_scalar(struct reader *r, struct nbi_jspan v, json_t **out)
{
    enum nbi_jtype type = nbi_jtype(v);
    if (type == NBI_JNUMBER)
        return read_number(v, out);
    if (type == NBI_JSTRING)
        NBI_TRY(read_text(r, v));
    *out = type == NBI_JSTRING ? json_stringn(nbi_str_text(&r->text), r->text.len)
           : type == NBI_JNULL ? json_null()
                               : json_boolean(type == NBI_JTRUE);
    return *out ? NB_OK : out_of_memory();
}

/* Takes ownership of value. */
static enum nb_status add_member(struct reader *r, json_t *to, struct nbi_jspan key, json_t *value)
{
    if (json_is_array(to))
        return json_array_append_new(to, value) == 0 ? NB_OK : out_of_memory();
    enum nb_status rc = read_text(r, key);
    const char *name = nbi_str_text(&r->text);
    if (rc == NB_OK && memchr(name, 0, r->text.len))
        rc = nbi_fail(NB_EFORMAT, "invalid JSON: a NUL (\\u0000) in a key");
    if (rc == NB_OK && json_object_get(to, name))
        rc = nbi_fail(NB_EFORMAT, "invalid JSON: duplicate object key '%s'", name);
    if (rc != NB_OK)
        json_decref(value);
    else if (json_object_set_new(to, name, value) != 0)
        rc = out_of_memory();
    return rc;
}

static enum nb_status read_members(struct reader *r, struct nbi_jiter *it, json_t **out)
{
    struct nbi_jspan key;
    json_t *tree = it->object ? json_object() : json_array();
    enum nb_status rc = tree ? NB_OK : out_of_memory();
    while (rc == NB_OK && nbi_jiter_key(it, &key)) {
        struct nbi_jiter inner;
        json_t *value = NULL;
        bool scalar = !nbi_jiter_enter(it, &inner);
        rc = scalar ? read_scalar(r, nbi_jiter_value(it), &value) : read_members(r, &inner, &value);
        if (rc == NB_OK && !scalar)
            nbi_jiter_leave(it, &inner);
        if (rc == NB_OK)
            rc = add_member(r, tree, key, value);
    }
    if (rc != NB_OK)
        json_decref(tree);
    else
        *out = tree;
    return rc;
}

/* Does not use jansson's parser, which takes a failed allocation for the end of a string, or stops
 * in an assertion. */
static enum nb_status read_tree(json_t **out, struct nbi_jspan span, bool nul_allowed)
{
    struct reader r = {.nul_allowed = nul_allowed};
    struct nbi_jiter it;
    nbi_jiter_init(&it, span);
    enum nb_status rc = it.p ? read_members(&r, &it, out) : read_scalar(&r, span, out);
    nbi_str_release(&r.text);
    return rc;
}

enum nb_status nbi_json_parse(json_t **out, const char *text, size_t len)
{
    struct nbi_jspan span;
    *out = NULL;
    NBI_TRY(nbi_jscan(&span, text, len));
    if (nbi_jtype(span) != NBI_JOBJECT && nbi_jtype(span) != NBI_JARRAY)
        return nbi_fail(NB_EFORMAT, "invalid JSON: %s where an object or array is expected",
                        nbi_jtype_text(span));
    return read_tree(out, span, false);
}

enum nb_status nbi_json_read_file(json_t **out, const char *path, size_t max_bytes)
{
    char *text = NULL;
    size_t len = 0;
    *out = NULL;
    NBI_TRY(nbi_file_read(path, max_bytes, &text, &len));
    enum nb_status rc = nbi_json_parse(out, text, len);
    free(text);
    return nbi_context(rc, "reading '%s'", path);
}

/* *v is NULL, with NB_OK, for an optional value that is absent. */
static enum nb_status find(const json_t *obj, const char *key, bool required, const json_t **v)
{
    *v = json_object_get(obj, key);
    if (json_is_null(*v))
        *v = NULL;
    if (!*v && required)
        return nbi_fail(NB_EFORMAT, "'%s' is missing", key);
    return NB_OK;
}

enum nb_status nbi_json_int(const json_t *obj, const char *key, bool required, int64_t min,
                            int64_t max, int64_t *v)
{
    const json_t *j;
    NBI_TRY(find(obj, key, required, &j));
    if (!j)
        return NB_OK;
    if (!json_is_integer(j))
        return nbi_fail(NB_EFORMAT, "'%s' must be a whole number", key);
    int64_t n = json_integer_value(j);
    if (n < min || n > max)
        return nbi_fail(NB_EFORMAT, "'%s' is %lld, outside %lld to %lld", key, (long long)n,
                        (long long)min, (long long)max);
    *v = n;
    return NB_OK;
}

enum nb_status nbi_json_number(const json_t *obj, const char *key, bool required, double min,
                               double max, double *v)
{
    const json_t *j;
    NBI_TRY(find(obj, key, required, &j));
    if (!j)
        return NB_OK;
    if (!json_is_number(j))
        return nbi_fail(NB_EFORMAT, "'%s' must be a number", key);
    double n = json_number_value(j);
    if (!(n >= min && n <= max))
        return nbi_fail(NB_EFORMAT, "'%s' is %g, outside %g to %g", key, n, min, max);
    *v = n;
    return NB_OK;
}

enum nb_status nbi_json_bool(const json_t *obj, const char *key, bool required, bool *v)
{
    const json_t *j;
    NBI_TRY(find(obj, key, required, &j));
    if (!j)
        return NB_OK;
    if (!json_is_boolean(j))
        return nbi_fail(NB_EFORMAT, "'%s' must be true or false", key);
    *v = json_is_true(j);
    return NB_OK;
}

enum nb_status nbi_json_string(const json_t *obj, const char *key, bool required, const char **v)
{
    const json_t *j;
    NBI_TRY(find(obj, key, required, &j));
    if (!j)
        return NB_OK;
    if (!json_is_string(j))
        return nbi_fail(NB_EFORMAT, "'%s' must be a string", key);
    *v = json_string_value(j);
    return NB_OK;
}

static int append_text(const char *bytes, size_t len, void *text)
{
    nbi_str_append(text, bytes, len);
    return 0; /* the buffer remembers a failure; jansson ignores some */
}

enum nb_status nbi_json_dump(const json_t *value, size_t flags, char **text)
{
    struct nbi_str buf = {0};
    bool ok = value && json_dump_callback(value, append_text, &buf, flags | JSON_ENCODE_ANY) == 0;
    *text = nbi_str_take(&buf);
    if (ok && *text)
        return NB_OK;
    free(*text);
    *text = NULL;
    return out_of_memory();
}

/* Whether text, just written by jansson, parses to value again. */
static enum nb_status same_value(const char *text, const json_t *value, bool *same)
{
    struct nbi_jspan span;
    json_t *again = NULL;
    NBI_TRY(nbi_jscan(&span, text, strlen(text)));
    NBI_TRY(read_tree(&again, span, true));
    *same = json_equal(again, value);
    json_decref(again);
    return NB_OK;
}

enum nb_status nbi_json_copy(json_t **out, const json_t *value)
{
    *out = json_deep_copy(value);
    if (*out && json_equal(*out, value))
        return NB_OK;
    json_decref(*out);
    *out = NULL;
    return out_of_memory();
}

enum nb_status nbi_json_text(const json_t *value, char **text)
{
    bool same = false;
    enum nb_status rc = NB_OK;
    *text = NULL;
    /* 15 digits print 1e-06 and not 9.9999999999999995e-7; some numbers need 17. */
    for (size_t precision = 15; precision <= 17 && rc == NB_OK && !same; precision++) {
        free(*text);
        rc = nbi_json_dump(value, JSON_INDENT(2) | JSON_REAL_PRECISION(precision), text);
        if (rc == NB_OK)
            rc = same_value(*text, value, &same);
    }
    if (rc != NB_OK) {
        free(*text);
        *text = NULL;
    }
    return nbi_context(rc, "cannot write JSON");
}

enum nb_status nbi_json_write_file(const json_t *value, const char *path)
{
    char *text;
    struct nbi_str line = {0};
    NBI_TRY(nbi_json_text(value, &text));
    nbi_str_puts(&line, text);
    nbi_str_puts(&line, "\n");
    free(text);
    enum nb_status rc = nbi_str_status(&line);
    if (rc == NB_OK)
        rc = nbi_file_write(path, line.p, line.len);
    nbi_str_release(&line);
    return rc;
}

void nbi_json_set(json_t *object, const char *key, json_t *value, bool *ok)
{
    *ok = json_object_set_new(object, key, value) == 0 && *ok;
}

void nbi_json_append(json_t *array, json_t *value, bool *ok)
{
    *ok = json_array_append_new(array, value) == 0 && *ok;
}
