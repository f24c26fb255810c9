/* jscan.c - the validator, and iteration over validated text. */
#include "base/jscan.h"

#include <string.h>

#include "base/json.h"
#include "base/utf8.h"

/* ---- validation ---- */

struct scan {
    const char *p, *end, *start;
    const char *why;  /* first problem; NULL: none */
    uint64_t objects; /* one bit per open level: 1 object, 0 array */
    int depth;
};

_Static_assert(NBI_JSON_DEPTH == 64, "a bit of struct scan for each level; a message says it");

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void skip_space(struct scan *s)
{
    while (s->p < s->end && is_space(*s->p))
        s->p++;
}

static bool fail(struct scan *s, const char *why)
{
    s->why = why;
    return false;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads four digits at p; -1 if they are not there. */
static int hex4(const char *p, const char *end)
{
    int v = 0;
    if (end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        int d = hex_digit(p[i]);
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

static bool is_surrogate(int unit, int first)
{
    return (unit & 0xFC00) == first;
}

/* s->p is past the backslash. */
static bool check_escape(struct scan *s)
{
    if (s->p == s->end)
        return fail(s, "a string does not end");
    char c = *s->p++;
    if (c != 'u') {
        if (c && strchr("\"\\/bfnrt", c))
            return true;
        s->p--; /* it may be a newline, which counts to this line */
        return fail(s, "unknown escape in a string");
    }
    int unit = hex4(s->p, s->end);
    if (unit < 0)
        return fail(s, "\\u wants four hexadecimal digits");
    s->p += 4;
    if (is_surrogate(unit, 0xDC00))
        return fail(s, "a lone surrogate is no character");
    if (!is_surrogate(unit, 0xD800))
        return true;
    if (s->end - s->p < 6 || s->p[0] != '\\' || s->p[1] != 'u' ||
        !is_surrogate(hex4(s->p + 2, s->end), 0xDC00))
        return fail(s, "a lone surrogate is no character");
    s->p += 6;
    return true;
}

/* Everything in a string other than quote, backslash and control characters. */
static bool is_plain(unsigned char c)
{
    return c >= 0x20 && c != '"' && c != '\\';
}

static bool check_string(struct scan *s)
{
    s->p++;
    for (;;) {
        const char *run = s->p;
        unsigned char any = 0;
        while (s->p < s->end && is_plain((unsigned char)*s->p))
            any |= (unsigned char)*s->p++;
        if ((any & 0x80) && !nbi_utf8_valid(run, (size_t)(s->p - run)))
            return fail(s, "a string is not well-formed UTF-8");
        if (s->p == s->end)
            return fail(s, "a string does not end");
        char c = *s->p++;
        if (c == '"')
            return true;
        if (c != '\\') {
            s->p--; /* it may be a newline, which counts to this line */
            return fail(s, "a control character in a string");
        }
        if (!check_escape(s))
            return false;
    }
}

static bool is_digit(const struct scan *s)
{
    return s->p < s->end && *s->p >= '0' && *s->p <= '9';
}

static bool digits(struct scan *s)
{
    if (!is_digit(s))
        return fail(s, "malformed number");
    while (is_digit(s))
        s->p++;
    return true;
}

static bool check_number(struct scan *s)
{
    if (*s->p == '-')
        s->p++;
    if (s->p < s->end && *s->p == '0')
        s->p++;
    else if (!digits(s))
        return false;
    if (s->p < s->end && *s->p == '.') {
        s->p++;
        if (!digits(s))
            return false;
    }
    if (s->p < s->end && (*s->p | 0x20) == 'e') {
        s->p++;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-'))
            s->p++;
        return digits(s);
    }
    return true;
}

static bool check_word(struct scan *s, const char *word)
{
    size_t n = strlen(word);
    if ((size_t)(s->end - s->p) < n || memcmp(s->p, word, n) != 0)
        return fail(s, "a value is expected");
    s->p += n;
    return true;
}

static bool check_scalar(struct scan *s)
{
    char c = s->p < s->end ? *s->p : 0;
    switch (c) {
    case '"':
        return check_string(s);
    case 't':
        return check_word(s, "true");
    case 'f':
        return check_word(s, "false");
    case 'n':
        return check_word(s, "null");
    default:
        return c == '-' || is_digit(s) ? check_number(s) : fail(s, "a value is expected");
    }
}

static bool in_object(const struct scan *s)
{
    return s->objects >> (s->depth - 1) & 1;
}

static bool check_key(struct scan *s)
{
    skip_space(s);
    if (s->p == s->end || *s->p != '"')
        return fail(s, "a name in quotes is expected");
    if (!check_string(s))
        return false;
    skip_space(s);
    if (s->p == s->end || *s->p++ != ':')
        return fail(s, "':' is expected");
    return true;
}

/* At '[' or '{': opens a level. *closed: it was empty and is closed again. */
static bool open_level(struct scan *s, bool *closed)
{
    bool object = *s->p++ == '{';
    if (s->depth == NBI_JSON_DEPTH)
        return fail(s, "nested deeper than 64 levels");
    s->objects &= ~((uint64_t)1 << s->depth);
    s->objects |= (uint64_t)object << s->depth;
    s->depth++;
    skip_space(s);
    *closed = s->p < s->end && *s->p == (object ? '}' : ']');
    if (*closed) {
        s->p++;
        s->depth--;
        return true;
    }
    return !object || check_key(s);
}

/* After a value: a comma (and the next key), or the ends of levels. *more: a value follows. */
static bool after_value(struct scan *s, bool *more)
{
    while (s->depth > 0) {
        skip_space(s);
        char c = s->p < s->end ? *s->p++ : 0;
        if (c == ',') {
            *more = true;
            return !in_object(s) || check_key(s);
        }
        if (c != (in_object(s) ? '}' : ']'))
            return fail(s, in_object(s) ? "',' or '}' is expected" : "',' or ']' is expected");
        s->depth--;
    }
    *more = false;
    return true;
}

static bool check_value(struct scan *s)
{
    for (bool more = true; more;) {
        bool closed = false;
        skip_space(s);
        if (s->p < s->end && (*s->p == '{' || *s->p == '[')) {
            if (!open_level(s, &closed))
                return false;
            if (!closed)
                continue;
        } else if (!check_scalar(s)) {
            return false;
        }
        if (!after_value(s, &more))
            return false;
    }
    return true;
}

enum nb_status nbi_jscan(struct nbi_jspan *out, const char *text, size_t len)
{
    struct scan s = {.p = text, .end = text + len, .start = text};
    *out = (struct nbi_jspan){0};
    skip_space(&s);
    const char *first = s.p;
    bool good = check_value(&s);
    const char *last = s.p;
    if (good)
        skip_space(&s);
    if (good && s.p != s.end)
        good = fail(&s, "something follows the value");
    if (!good) {
        int line = 1;
        for (const char *p = text; p < s.p && p < s.end; p++)
            line += *p == '\n';
        if (!memchr(text, '\n', len))
            return nbi_fail(NB_EFORMAT, "invalid JSON at byte %zu: %s", (size_t)(s.p - text),
                            s.why);
        return nbi_fail(NB_EFORMAT, "invalid JSON in line %d: %s", line, s.why);
    }
    *out = (struct nbi_jspan){first, (size_t)(last - first)};
    return NB_OK;
}

/* ---- iteration; everything below trusts the text ---- */

enum nbi_jtype nbi_jtype(struct nbi_jspan v)
{
    switch (v.len ? *v.p : 0) {
    case 0:
        return NBI_JNONE;
    case '{':
        return NBI_JOBJECT;
    case '[':
        return NBI_JARRAY;
    case '"':
        return NBI_JSTRING;
    case 't':
        return NBI_JTRUE;
    case 'f':
        return NBI_JFALSE;
    case 'n':
        return NBI_JNULL;
    default:
        return NBI_JNUMBER;
    }
}

const char *nbi_jtype_text(struct nbi_jspan v)
{
    static const char *const text[] = {"missing",  "null",     "false",    "true",
                                       "a number", "a string", "an array", "an object"};
    return text[nbi_jtype(v)];
}

static const char *past_string(const char *p)
{
    for (p++; *p != '"'; p++)
        if (*p == '\\')
            p++;
    return p + 1;
}

static const char *past_space(const char *p)
{
    while (is_space(*p))
        p++;
    return p;
}

/* Inside an array or object only quotes and brackets matter. */
static bool is_structure(char c)
{
    return c == '"' || (c | 0x20) == '{' || (c | 0x20) == '}';
}

static const char *past_value(const char *p)
{
    if (*p == '"')
        return past_string(p);
    if (*p != '{' && *p != '[')
        return p + strcspn(p, ",]} \n\r\t");
    for (int depth = 0;;) {
        while (!is_structure(*p))
            p++;
        if (*p == '"') {
            p = past_string(p);
            continue;
        }
        depth += (*p | 0x20) == '{' ? 1 : -1;
        p++;
        if (depth == 0)
            return p;
    }
}

void nbi_jiter_init(struct nbi_jiter *it, struct nbi_jspan v)
{
    enum nbi_jtype type = nbi_jtype(v);
    it->object = type == NBI_JOBJECT;
    it->p = it->object || type == NBI_JARRAY ? past_space(v.p + 1) : NULL;
}

bool nbi_jiter_key(struct nbi_jiter *it, struct nbi_jspan *key)
{
    const char *p = it->p;
    *key = (struct nbi_jspan){0};
    if (!p || *p == '}' || *p == ']')
        return false;
    if (it->object) {
        const char *end = past_string(p);
        *key = (struct nbi_jspan){p, (size_t)(end - p)};
        it->p = past_space(past_space(end) + 1);
    }
    return true;
}

/* Moves from the end of a value to the next member or to the end. */
static void step(struct nbi_jiter *it, const char *end)
{
    const char *p = past_space(end);
    it->p = *p == ',' ? past_space(p + 1) : p;
}

struct nbi_jspan nbi_jiter_value(struct nbi_jiter *it)
{
    const char *end = past_value(it->p);
    struct nbi_jspan value = {it->p, (size_t)(end - it->p)};
    step(it, end);
    return value;
}

bool nbi_jiter_next(struct nbi_jiter *it, struct nbi_jspan *key, struct nbi_jspan *value)
{
    *value = (struct nbi_jspan){0};
    if (!nbi_jiter_key(it, key))
        return false;
    *value = nbi_jiter_value(it);
    return true;
}

bool nbi_jiter_enter(struct nbi_jiter *it, struct nbi_jiter *inner)
{
    nbi_jiter_init(inner, (struct nbi_jspan){it->p, 1});
    return inner->p != NULL;
}

void nbi_jiter_leave(struct nbi_jiter *it, const struct nbi_jiter *inner)
{
    step(it, inner->p + 1);
}

size_t nbi_jcount(struct nbi_jspan v)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    size_t n = 0;
    nbi_jiter_init(&it, v);
    while (nbi_jiter_next(&it, &key, &value))
        n++;
    return n;
}

struct nbi_jspan nbi_jget(struct nbi_jspan object, const char *key)
{
    struct nbi_jiter it;
    struct nbi_jspan k, v, found = {0};
    if (nbi_jtype(object) != NBI_JOBJECT)
        return found;
    nbi_jiter_init(&it, object);
    while (nbi_jiter_next(&it, &k, &v))
        if (nbi_jequals(k, key))
            found = v;
    return found;
}

/* Decodes the escape after a backslash; *p is moved past it. */
static uint32_t unescape(const char **p)
{
    static const char names[] = "bfnrt", values[] = "\b\f\n\r\t";
    char c = *(*p)++;
    if (c != 'u') {
        const char *at = strchr(names, c);
        return at ? (uint32_t)values[at - names] : (uint32_t)c;
    }
    uint32_t unit = (uint32_t)hex4(*p, *p + 4);
    *p += 4;
    if (is_surrogate((int)unit, 0xD800)) {
        uint32_t low = (uint32_t)hex4(*p + 2, *p + 6);
        *p += 6;
        unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
    }
    return unit;
}

void nbi_jstring(struct nbi_jspan string, struct nbi_str *out)
{
    if (nbi_jtype(string) != NBI_JSTRING)
        return;
    const char *p = string.p + 1, *end = string.p + string.len - 1;
    while (p < end) {
        const char *stop = memchr(p, '\\', (size_t)(end - p));
        nbi_str_append(out, p, (size_t)((stop ? stop : end) - p));
        if (!stop)
            return;
        p = stop + 1;
        nbi_str_put_char(out, unescape(&p));
    }
}

bool nbi_jequals(struct nbi_jspan string, const char *text)
{
    if (nbi_jtype(string) != NBI_JSTRING)
        return false;
    const char *p = string.p + 1, *end = string.p + string.len - 1;
    size_t left = strlen(text);
    while (p < end) {
        char c[4] = {*p++};
        size_t n = c[0] == '\\' ? (size_t)nbi_utf8_encode(c, unescape(&p)) : 1;
        if (n > left || memcmp(c, text, n) != 0)
            return false;
        text += n;
        left -= n;
    }
    return left == 0;
}

bool nbi_jint(struct nbi_jspan number, int64_t min, int64_t max, int64_t *out)
{
    if (nbi_jtype(number) != NBI_JNUMBER || number.len > 20)
        return false;
    bool negative = *number.p == '-';
    uint64_t v = 0;
    for (size_t i = negative; i < number.len; i++) {
        if (number.p[i] < '0' || number.p[i] > '9' || v > UINT64_MAX / 20)
            return false;
        v = v * 10 + (uint64_t)(number.p[i] - '0');
    }
    if (v > (uint64_t)INT64_MAX + negative)
        return false;
    int64_t n = negative ? (int64_t)(0 - v) : (int64_t)v;
    if (n < min || n > max)
        return false;
    *out = n;
    return true;
}

/* ---- writing ---- */

static void put_escaped(struct nbi_str *out, unsigned char c)
{
    static const char plain[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
    const char *at = c ? strchr(plain, c) : NULL;
    if (at)
        nbi_str_printf(out, "\\%c", names[at - plain]);
    else
        nbi_str_printf(out, "\\u%04x", c);
}

void nbi_jquote(struct nbi_str *out, const char *text, size_t len)
{
    nbi_str_append(out, "\"", 1);
    size_t i = 0;
    while (i < len) {
        size_t run = i;
        while (run < len && is_plain((unsigned char)text[run]))
            run++;
        nbi_utf8_repair(out, text + i, run - i);
        if (run < len)
            put_escaped(out, (unsigned char)text[run++]);
        i = run;
    }
    nbi_str_append(out, "\"", 1);
}
