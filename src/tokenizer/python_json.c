/* python_json.c - Python's bool(), json.dumps() and str() of a JSON value. */
#include "tokenizer/python_json.h"

#include <math.h>
#include <string.h>

#include <utf8proc.h>

#include "base/utf8.h"

/* ---- numbers ---- */

/* At most 767 digits decide which double is nearest; one more digit represents all that follow. */
#define DIGITS_MAX 800

/* Beyond the range of doubles, and far from integer overflow. */
#define EXPONENT_MAX 100000

static bool is_float(struct nbi_jspan number)
{
    for (size_t i = 0; i < number.len; i++)
        if (number.p[i] == '.' || (number.p[i] | 0x20) == 'e')
            return true;
    return false;
}

static bool is_minus_zero(struct nbi_jspan whole)
{
    return whole.len == 2 && memcmp(whole.p, "-0", 2) == 0;
}

/* The value of digits * 10^exponent. No decimal point is used, because strtod's depends on the
 * locale. */
static double scaled(const char *digits, size_t count, int64_t exponent)
{
    char text[DIGITS_MAX + 32];
    if (exponent > EXPONENT_MAX)
        exponent = EXPONENT_MAX;
    if (exponent < -EXPONENT_MAX)
        exponent = -EXPONENT_MAX;
    snprintf(text, sizeof text, "%.*se%d", (int)count, digits, (int)exponent);
    return strtod(text, NULL);
}

static int64_t read_exponent(const char *p, const char *end)
{
    int64_t e = 0;
    bool negative = *p == '-';
    for (p += *p == '-' || *p == '+'; p < end; p++)
        e = e < INT64_MAX / 100 ? e * 10 + (*p - '0') : e;
    return negative ? -e : e;
}

/* Python's float(text): the nearest double, infinity beyond the largest. */
static double read_float(struct nbi_jspan number)
{
    char digits[DIGITS_MAX + 1];
    size_t n = 0;
    int64_t exponent = 0; /* of the last digit kept */
    bool negative = *number.p == '-', point = false, more = false;
    const char *p = number.p + negative, *end = number.p + number.len;
    for (; p < end && (*p | 0x20) != 'e'; p++) {
        if (*p == '.') {
            point = true;
        } else if (n == DIGITS_MAX) {
            more = more || *p != '0';
            exponent += !point;
        } else {
            if (n > 0 || *p != '0')
                digits[n++] = *p;
            exponent -= point;
        }
    }
    if (more) {
        digits[n++] = '1';
        exponent--;
    }
    int64_t written = p < end ? read_exponent(p + 1, end) : 0;
    double v = n ? scaled(digits, n, exponent + written) : 0.0;
    return negative ? -v : v;
}

/* A positive double v in decimal, 0.DIGITS * 10^point: the fewest digits that read back as v, and
 * among those the value nearest to v. */
struct decimal {
    char digits[24];
    int count, point;
};

/* Adds one unit in the last place; false if that changes the number of digits. */
static bool next_up(struct decimal *d)
{
    int i = d->count - 1;
    while (i >= 0 && d->digits[i] == '9')
        d->digits[i--] = '0';
    if (i >= 0)
        d->digits[i]++;
    return i >= 0;
}

static bool reads_back(const struct decimal *d, double v)
{
    return scaled(d->digits, (size_t)d->count, d->point - d->count) == v;
}

static void shortest(struct decimal *d, double v)
{
    for (int n = 1; n <= 17; n++) {
        char text[48];
        snprintf(text, sizeof text, "%.*e", n - 1, v);
        const char *e = strchr(text, 'e');
        d->count = 0;
        for (const char *p = text; p < e; p++)
            if (*p >= '0' && *p <= '9')
                d->digits[d->count++] = *p;
        d->point = (int)strtol(e + 1, NULL, 10) + 1;
        /* Doubles are twice as dense below a power of two as above it. There, the nearest decimal
         * of n digits may lie too far below v while the next one above still reads back as v. */
        if (reads_back(d, v) || (next_up(d) && reads_back(d, v)))
            return;
    }
}

/* Python's repr(v); `infinite` is the name of infinity. */
static void put_float(struct nbi_str *out, double v, const char *infinite)
{
    if (signbit(v))
        nbi_str_puts(out, "-");
    v = fabs(v);
    if (isinf(v)) {
        nbi_str_puts(out, infinite);
        return;
    }
    struct decimal d = {.digits = "0", .count = 1, .point = 1};
    if (v > 0)
        shortest(&d, v);
    if (d.point > 16 || d.point < -3) {
        nbi_str_append(out, d.digits, 1);
        if (d.count > 1)
            nbi_str_printf(out, ".%.*s", d.count - 1, d.digits + 1);
        nbi_str_printf(out, "e%+03d", d.point - 1);
    } else if (d.point <= 0) {
        nbi_str_printf(out, "0.%.*s%.*s", -d.point, "000", d.count, d.digits);
    } else if (d.point >= d.count) {
        nbi_str_printf(out, "%.*s%.*s.0", d.count, d.digits, d.point - d.count, "0000000000000000");
    } else {
        nbi_str_printf(out, "%.*s.%.*s", d.point, d.digits, d.count - d.point, d.digits + d.point);
    }
}

static void put_number(struct nbi_str *out, struct nbi_jspan v, const char *infinite)
{
    if (is_float(v))
        put_float(out, read_float(v), infinite);
    else if (is_minus_zero(v))
        nbi_str_puts(out, "0");
    else
        nbi_str_append(out, v.p, v.len);
}

/* ---- strings ---- */

static bool is_printable(uint32_t c)
{
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    case UTF8PROC_CATEGORY_ZS:
        return c == ' ';
    default:
        return true;
    }
}

static void put_repr_char(struct nbi_str *out, uint32_t c, char quote)
{
    static const char plain[] = "\n\r\t\\", names[] = "nrt\\";
    const char *at = c && c < 128 ? strchr(plain, (int)c) : NULL;
    if (at)
        nbi_str_printf(out, "\\%c", names[at - plain]);
    else if (c == (unsigned char)quote)
        nbi_str_printf(out, "\\%c", quote);
    else if (is_printable(c))
        nbi_str_put_char(out, c);
    else if (c < 0x100)
        nbi_str_printf(out, "\\x%02x", (unsigned)c);
    else if (c < 0x10000)
        nbi_str_printf(out, "\\u%04x", (unsigned)c);
    else
        nbi_str_printf(out, "\\U%08x", (unsigned)c);
}

/* Python's repr() of a string: in single quotes, unless it contains those and no double quotes. */
static void put_repr(struct nbi_str *out, const char *text, size_t len)
{
    bool single = memchr(text, '\'', len), twofold = memchr(text, '"', len);
    char quote = single && !twofold ? '"' : '\'';
    nbi_str_append(out, &quote, 1);
    const char *end = text + len;
    for (const char *p = text; p < end; p += nbi_utf8_length(p, end))
        put_repr_char(out, nbi_utf8_decode(p), quote);
    nbi_str_append(out, &quote, 1);
}

/* ---- objects ---- */

struct member {
    struct nbi_jspan value;
    const char *text; /* the key's characters */
    size_t len, at;   /* at: index among the members */
};

struct dict {
    struct member *member;
    size_t count;
    struct nbi_str text;
};

static int by_key(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);
    if (order)
        return order;
    if (x->len != y->len)
        return x->len < y->len ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

static int by_index(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    return x->at < y->at ? -1 : x->at > y->at;
}

static bool same_key(const struct member *x, const struct member *y)
{
    return x->len == y->len && memcmp(x->text, y->text, x->len) == 0;
}

/* Merges members with the same key: position of the first, value of the last. */
static void merge_duplicates(struct dict *d)
{
    if (d->count < 2)
        return;
    size_t kept = 0;
    qsort(d->member, d->count, sizeof *d->member, by_key);
    for (size_t i = 1; i < d->count; i++) {
        if (same_key(&d->member[kept], &d->member[i]))
            d->member[kept].value = d->member[i].value;
        else
            d->member[++kept] = d->member[i];
    }
    d->count = kept + 1;
    qsort(d->member, d->count, sizeof *d->member, by_index);
}

static void dict_release(struct dict *d)
{
    free(d->member);
    nbi_str_release(&d->text);
    *d = (struct dict){0};
}

/* Returns false when out of memory; the dict is then empty. */
static bool dict_init(struct dict *d, struct nbi_jspan object)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    size_t n = nbi_jcount(object);
    *d = (struct dict){.member = calloc(n + 1, sizeof *d->member)};
    if (!d->member)
        return false;
    nbi_jiter_init(&it, object);
    while (nbi_jiter_next(&it, &key, &value)) {
        size_t start = d->text.len;
        nbi_jstring(key, &d->text);
        d->member[d->count] = (struct member){.value = value, .at = d->count};
        d->member[d->count++].len = d->text.len - start;
    }
    if (d->text.failed) {
        dict_release(d);
        return false;
    }
    const char *text = nbi_str_text(&d->text);
    for (size_t i = 0; i < d->count; text += d->member[i++].len)
        d->member[i].text = text;
    merge_duplicates(d);
    return true;
}

/* ---- values ---- */

/* json.dumps and repr differ only in keywords, strings and the name of infinity. */
static void put_value(struct nbi_str *out, struct nbi_jspan v, bool json);

static void put_text(struct nbi_str *out, const char *text, size_t len, bool json)
{
    if (json)
        nbi_jquote(out, text, len);
    else
        put_repr(out, text, len);
}

static void put_string(struct nbi_str *out, struct nbi_jspan string, bool json)
{
    struct nbi_str text = {0};
    nbi_jstring(string, &text);
    put_text(out, nbi_str_text(&text), text.len, json);
    out->failed = out->failed || text.failed;
    nbi_str_release(&text);
}

static void put_list(struct nbi_str *out, struct nbi_jspan array, bool json)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    const char *between = "";
    nbi_str_puts(out, "[");
    nbi_jiter_init(&it, array);
    while (nbi_jiter_next(&it, &key, &value)) {
        nbi_str_puts(out, between);
        put_value(out, value, json);
        between = ", ";
    }
    nbi_str_puts(out, "]");
}

static void put_dict(struct nbi_str *out, struct nbi_jspan object, bool json)
{
    struct dict d;
    if (!dict_init(&d, object)) {
        out->failed = true;
        return;
    }
    nbi_str_puts(out, "{");
    for (size_t i = 0; i < d.count; i++) {
        nbi_str_puts(out, i ? ", " : "");
        put_text(out, d.member[i].text, d.member[i].len, json);
        nbi_str_puts(out, ": ");
        put_value(out, d.member[i].value, json);
    }
    nbi_str_puts(out, "}");
    dict_release(&d);
}

static void put_value(struct nbi_str *out, struct nbi_jspan v, bool json)
{
    switch (nbi_jtype(v)) {
    case NBI_JNONE:
        break;
    case NBI_JNULL:
        nbi_str_puts(out, json ? "null" : "None");
        break;
    case NBI_JFALSE:
        nbi_str_puts(out, json ? "false" : "False");
        break;
    case NBI_JTRUE:
        nbi_str_puts(out, json ? "true" : "True");
        break;
    case NBI_JNUMBER:
        put_number(out, v, json ? "Infinity" : "inf");
        break;
    case NBI_JSTRING:
        put_string(out, v, json);
        break;
    case NBI_JARRAY:
        put_list(out, v, json);
        break;
    case NBI_JOBJECT:
        put_dict(out, v, json);
        break;
    }
}

void nbi_py_json(struct nbi_str *out, struct nbi_jspan v)
{
    put_value(out, v, true);
}

void nbi_py_str(struct nbi_str *out, struct nbi_jspan v)
{
    if (nbi_jtype(v) == NBI_JSTRING)
        nbi_jstring(v, out);
    else
        put_value(out, v, false);
}

bool nbi_py_truth(struct nbi_jspan v)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    switch (nbi_jtype(v)) {
    case NBI_JNONE:
    case NBI_JNULL:
    case NBI_JFALSE:
        return false;
    case NBI_JTRUE:
        return true;
    case NBI_JNUMBER:
        return is_float(v) ? read_float(v) != 0 : !(v.len == 1 && *v.p == '0') && !is_minus_zero(v);
    case NBI_JSTRING:
        return v.len > 2;
    default:
        nbi_jiter_init(&it, v);
        return nbi_jiter_next(&it, &key, &value);
    }
}

/* ---- iteration ---- */

static void each_character(struct nbi_str *out, struct nbi_jspan string, const char *before)
{
    struct nbi_str text = {0};
    nbi_jstring(string, &text);
    const char *p = nbi_str_text(&text), *end = p + text.len;
    while (p < end) {
        int n = nbi_utf8_length(p, end);
        nbi_str_puts(out, before);
        nbi_jquote(out, p, (size_t)n);
        p += n;
    }
    out->failed = out->failed || text.failed;
    nbi_str_release(&text);
}

static void each_key(struct nbi_str *out, struct nbi_jspan object, const char *before)
{
    struct dict d;
    if (!dict_init(&d, object)) {
        out->failed = true;
        return;
    }
    for (size_t i = 0; i < d.count; i++) {
        nbi_str_puts(out, before);
        nbi_jquote(out, d.member[i].text, d.member[i].len);
    }
    dict_release(&d);
}

bool nbi_py_json_each(struct nbi_str *out, struct nbi_jspan v, const char *before)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    switch (nbi_jtype(v)) {
    case NBI_JSTRING:
        each_character(out, v, before);
        return true;
    case NBI_JOBJECT:
        each_key(out, v, before);
        return true;
    case NBI_JARRAY:
        nbi_jiter_init(&it, v);
        while (nbi_jiter_next(&it, &key, &value)) {
            nbi_str_puts(out, before);
            nbi_py_json(out, value);
        }
        return true;
    default:
        return false;
    }
}
