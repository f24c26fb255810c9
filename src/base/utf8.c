/* utf8.c - UTF-8. */
#include "base/utf8.h"

#include <string.h>

/* What the lead byte determines: the character's length and the range of its second byte, which
 * excludes overlong forms, surrogates and values beyond U+10FFFF. */
struct lead {
    int length;
    uint8_t low, high;
};

static struct lead read_lead(uint8_t b)
{
    int n = b >= 0xC2 && b <= 0xDF   ? 2
            : b >= 0xE0 && b <= 0xEF ? 3
            : b >= 0xF0 && b <= 0xF4 ? 4
                                     : 0;
    return (struct lead){n,
                         b == 0xE0   ? 0xA0
                         : b == 0xF0 ? 0x90
                                     : 0x80,
                         b == 0xED   ? 0x9F
                         : b == 0xF4 ? 0x8F
                                     : 0xBF};
}

static int character(const uint8_t *p, const uint8_t *end)
{
    if (*p < 0x80)
        return 1;
    struct lead l = read_lead(*p);
    if (l.length == 0 || end - p < l.length || p[1] < l.low || p[1] > l.high)
        return 0;
    for (int i = 2; i < l.length; i++)
        if (p[i] < 0x80 || p[i] > 0xBF)
            return 0;
    return l.length;
}

int nbi_utf8_length(const char *p, const char *end)
{
    return character((const uint8_t *)p, (const uint8_t *)end);
}

uint32_t nbi_utf8_decode(const char *text)
{
    const uint8_t *p = (const uint8_t *)text;
    if (p[0] < 0x80)
        return p[0];
    if (p[0] < 0xE0)
        return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    if (p[0] < 0xF0)
        return (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    return (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

int nbi_utf8_encode(char out[4], uint32_t c)
{
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead_bits[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (int i = n - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (c & 0x3F));
        c >>= 6;
    }
    out[0] = (char)(lead_bits[n] | c);
    return n;
}

void nbi_str_put_char(struct nbi_str *s, uint32_t c)
{
    char bytes[4];
    nbi_str_append(s, bytes, (size_t)nbi_utf8_encode(bytes, c));
}

int nbi_utf8_bad_length(const char *text, const char *limit, bool *cut)
{
    const uint8_t *p = (const uint8_t *)text, *end = (const uint8_t *)limit;
    struct lead l = read_lead(*p);
    *cut = l.length > 0 && end - p == 1;
    if (l.length == 0 || end - p < 2 || p[1] < l.low || p[1] > l.high)
        return 1;
    int n = 2;
    while (n < l.length && p + n < end && p[n] >= 0x80 && p[n] <= 0xBF)
        n++;
    *cut = p + n == end;
    return n;
}

void nbi_utf8_repair(struct nbi_str *out, const char *bytes, size_t len)
{
    const char *p = bytes, *end = bytes + len;
    while (p < end) {
        const char *good = p;
        int n = 0;
        while (p < end && (n = nbi_utf8_length(p, end)) > 0)
            p += n;
        nbi_str_append(out, good, (size_t)(p - good));
        if (p < end) {
            bool cut;
            p += nbi_utf8_bad_length(p, end, &cut);
            nbi_str_put_char(out, 0xFFFD);
        }
    }
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
