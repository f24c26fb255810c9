/* str.c - the text buffer, matching, formatting. */
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

void nbi_str_cut(struct nbi_str *s, size_t len)
{
    NBI_BUG_IF(len > s->len);
    s->len = len;
    s->failed = false;
    if (s->p)
        s->p[len] = 0;
}

char *nbi_str_take(struct nbi_str *s)
{
    nbi_str_puts(s, "");
    char *text = nbi_str_status(s) == NB_OK ? s->p : NULL;
    if (!text)
        free(s->p);
    *s = (struct nbi_str){0};
    return text;
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
    /* On a mismatch, go back to the last '*' and let it match one more character. Earlier stars
     * need no second try: the last one can match whatever they would have. */
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

const char *nbi_plural(int64_t n)
{
    return n == 1 ? "" : "s";
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
