/* str.c - text buffer, matching, UTF-8 check. */
#include "base/str.h"

#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

void nbi_str_release(struct nbi_str *s)
{
    if (!s)
        return;
    free(s->p);
    memset(s, 0, sizeof *s);
}

const char *nbi_str_text(const struct nbi_str *s)
{
    return s->p ? s->p : "";
}

enum nb_status nbi_str_status(const struct nbi_str *s)
{
    return s->failed ? nbi_fail(NB_ENOMEM, "out of memory: text of %zu bytes", s->len) : NB_OK;
}

static bool reserve(struct nbi_str *s, size_t extra)
{
    if (s->failed || extra > NBI_STR_MAX - s->len) {
        s->failed = true;
        return false;
    }
    size_t need = s->len + extra + 1;
    if (need <= s->cap)
        return true;
    size_t cap = s->cap ? s->cap : 64;
    while (cap < need)
        cap *= 2;
    char *p = realloc(s->p, cap);
    if (!p) {
        s->failed = true;
        return false;
    }
    s->p = p;
    s->cap = cap;
    return true;
}

void nbi_str_append(struct nbi_str *s, const void *bytes, size_t len)
{
    if (!reserve(s, len))
        return;
    if (len)
        memcpy(s->p + s->len, bytes, len);
    s->len += len;
    s->p[s->len] = 0;
}

void nbi_str_puts(struct nbi_str *s, const char *text)
{
    nbi_str_append(s, text, strlen(text));
}

void nbi_str_printf(struct nbi_str *s, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0 || !reserve(s, (size_t)n)) {
        s->failed = true;
        return;
    }
    va_start(args, fmt);
    vsnprintf(s->p + s->len, (size_t)n + 1, fmt, args);
    va_end(args);
    s->len += (size_t)n;
}

bool nbi_ends_with(const char *text, const char *ending)
{
    size_t n = strlen(text), m = strlen(ending);
    return n >= m && memcmp(text + n - m, ending, m) == 0;
}

bool nbi_has_extension(const char *path, const char *extension)
{
    size_t n = strlen(path), m = strlen(extension);
    return n >= m && strcasecmp(path + n - m, extension) == 0;
}

bool nbi_starts_with(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

bool nbi_wildcard_match(const char *pattern, const char *text)
{
    /* On a mismatch go back to the last '*' and let it take one character more. Earlier stars need
     * no second look: the last one can absorb whatever they would have. */
    const char *star = NULL, *resume = NULL;
    while (*text) {
        if (*pattern == '*') {
            star = ++pattern;
            resume = text;
        } else if (*pattern == '?' || *pattern == *text) {
            pattern++;
            text++;
        } else if (star) {
            pattern = star;
            text = ++resume;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == 0;
}

/* Length of the well-formed character at p, 0 if there is none. */
static int character(const uint8_t *p, const uint8_t *end)
{
    uint8_t b = *p;
    if (b < 0x80)
        return 1;
    int n = b >= 0xC2 && b <= 0xDF   ? 2
            : b >= 0xE0 && b <= 0xEF ? 3
            : b >= 0xF0 && b <= 0xF4 ? 4
                                     : 0;
    if (n == 0 || end - p < n)
        return 0;
    /* The second byte alone tells overlong forms, surrogates and the top end. */
    uint8_t lo = b == 0xE0 ? 0xA0 : b == 0xF0 ? 0x90 : 0x80;
    uint8_t hi = b == 0xED ? 0x9F : b == 0xF4 ? 0x8F : 0xBF;
    if (p[1] < lo || p[1] > hi)
        return 0;
    for (int i = 2; i < n; i++)
        if (p[i] < 0x80 || p[i] > 0xBF)
            return 0;
    return n;
}

static bool is_control(const uint8_t *p)
{
    return p[0] < 0x20 || p[0] == 0x7F || (p[0] == 0xC2 && p[1] < 0xA0);
}

bool nbi_utf8_valid(const char *bytes, size_t len)
{
    const uint8_t *p = (const uint8_t *)bytes, *end = p + len;
    for (int n; p < end; p += n)
        if ((n = character(p, end)) == 0)
            return false;
    return true;
}

bool nbi_utf8_printable(const char *bytes, size_t len)
{
    const uint8_t *p = (const uint8_t *)bytes, *end = p + len;
    for (int n; p < end; p += n)
        if ((n = character(p, end)) == 0 || is_control(p))
            return false;
    return true;
}

void nbi_printable_copy(char *out, size_t size, const char *text, size_t len)
{
    const uint8_t *p = (const uint8_t *)text, *end = p + len;
    size_t used = 0;
    while (p < end) {
        int n = character(p, end);
        bool good = n > 0 && !is_control(p);
        size_t need = good ? (size_t)n : 1;
        bool rest_fits = (size_t)(end - p) < size - used; /* the copy is never longer */
        if (!rest_fits && used + need + 3 >= size) {
            used += (size_t)snprintf(out + used, size - used, "...");
            break;
        }
        if (good)
            memcpy(out + used, p, need);
        else
            out[used] = '?';
        used += need;
        p += n > 0 ? n : 1;
    }
    out[used < size ? used : size - 1] = 0;
}

char *nbi_format_bytes(char buf[32], double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int u = 0;
    while (bytes >= 1024 && u < 4) {
        bytes /= 1024;
        u++;
    }
    snprintf(buf, 32, u == 0 ? "%.0f %s" : "%.2f %s", bytes, units[u]);
    return buf;
}
