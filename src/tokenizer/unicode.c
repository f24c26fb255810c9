/* unicode.c - the table of classes, and NFC where a text needs it.
 *
 * Nearly all text is in NFC already. What is not hangs together in short stretches: a base
 * character and the active ones behind it. Only those go through utf8proc. Characters that the
 * reference does not know are inert to it and end a stretch, whatever utf8proc's newer tables say;
 * the stretch also begins without a base that the reference would not touch. */
#include "tokenizer/unicode.h"

#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"

void nbi_char_table(uint8_t *classes)
{
    memset(classes, 0, NBI_CHAR_COUNT);
    for (int i = 0; i < nbi_char_range_count; i++) {
        const struct nbi_char_range *r = &nbi_char_ranges[i];
        memset(classes + r->first, r->bits, r->last - r->first + 1);
    }
}

static const char *skip_ascii(const char *p, const char *end)
{
    uint64_t word;
    for (; end - p >= 8; p += 8) {
        memcpy(&word, p, 8);
        if (word & 0x8080808080808080u)
            break;
    }
    while (p < end && !(*p & 0x80))
        p++;
    return p;
}

static const char *character_before(const char *p)
{
    do
        p--;
    while ((*p & 0xC0) == 0x80);
    return p;
}

static int length_of(const char *p)
{
    unsigned char b = (unsigned char)*p;
    return b < 0x80 ? 1 : b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
}

static bool has(const uint8_t *classes, const char *p, uint8_t bit)
{
    return classes[nbi_utf8_decode(p)] & bit;
}

/* Where the first active character is; end if there is none. */
static const char *find_active(const uint8_t *classes, const char *p, const char *end)
{
    while ((p = skip_ascii(p, end)) < end && !has(classes, p, NBI_CHAR_ACTIVE))
        p += length_of(p);
    return p;
}

/* Where the stretch around it starts. */
static const char *stretch_start(const uint8_t *classes, const char *active, const char *start)
{
    if (active == start)
        return active;
    const char *before = character_before(active);
    return has(classes, before, NBI_CHAR_BASE) ? before : active;
}

size_t nbi_nfc_prefix(const uint8_t *classes, const char *text, size_t len)
{
    const char *active = find_active(classes, text, text + len);
    if (active == text + len)
        return len;
    return (size_t)(stretch_start(classes, active, text) - text);
}

static enum nb_status compose(const char *p, size_t len, struct nbi_str *out)
{
    utf8proc_uint8_t *text = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)len, &text,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0)
        return nbi_fail(NB_ENOMEM, "NFC: %s", utf8proc_errmsg(n));
    nbi_str_append(out, text, (size_t)n);
    free(text);
    return NB_OK;
}

enum nb_status nbi_nfc(const uint8_t *classes, const char *text, size_t len, struct nbi_str *out)
{
    const char *p = text, *end = text + len;
    while (p < end) {
        const char *active = find_active(classes, p, end);
        const char *start = active < end ? stretch_start(classes, active, p) : end;
        nbi_str_append(out, p, (size_t)(start - p));
        for (p = active; p < end && has(classes, p, NBI_CHAR_ACTIVE); p += length_of(p))
            ;
        if (p > start)
            NBI_TRY(compose(start, (size_t)(p - start), out));
    }
    return nbi_str_status(out);
}
