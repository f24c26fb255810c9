/* json.c - strict wrapper over jansson. */
#include "base/json.h"

#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/str.h"

/* Before jansson sees the text: it recurses by nesting depth and allows 2048 levels. */
static enum nb_status check_depth(const char *text, size_t len)
{
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            if (++depth > NBI_JSON_DEPTH)
                return nbi_fail(NB_EFORMAT, "JSON is nested deeper than %d levels", NBI_JSON_DEPTH);
        } else if (c == '}' || c == ']') {
            depth--;
        }
    }
    return NB_OK;
}

enum nb_status nbi_json_parse(json_t **out, const char *text, size_t len)
{
    *out = NULL;
    NBI_TRY(check_depth(text, len));
    json_error_t err;
    json_t *value = json_loadb(text, len, JSON_REJECT_DUPLICATES, &err);
    if (!value)
        return nbi_fail(NB_EFORMAT, "invalid JSON in line %d: %s", err.line, err.text);
    *out = value;
    return NB_OK;
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

/* Finds the value; *v NULL with NB_OK means an optional one that is not there. */
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

/* The text of value, with as few digits as give the same numbers back: 1e-06, not
 * 9.9999999999999995e-7. Reading it back also shows that no piece was lost on the way. */
static char *dump(const json_t *value)
{
    static const size_t precisions[] = {15, 16, 17};
    for (int i = 0; i < 3; i++) {
        char *text = json_dumps(value, JSON_INDENT(2) | JSON_ENCODE_ANY |
                                           JSON_REAL_PRECISION(precisions[i]));
        json_t *again = text ? json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL) : NULL;
        bool same = again && json_equal(again, value);
        json_decref(again);
        if (same)
            return text;
        free(text);
    }
    return NULL;
}

enum nb_status nbi_json_text(const json_t *value, char **text)
{
    *text = value ? dump(value) : NULL;
    return *text ? NB_OK : nbi_fail(NB_ENOMEM, "cannot write JSON: out of memory");
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
