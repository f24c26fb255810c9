/* unicode.c - expands the table of classes, and normalises text to NFC where needed.
 *
 * Nearly all text is in NFC already. What is not forms short runs: a base character and the active
 * characters after it. Only those runs go through utf8proc. The tokenizers library treats
 * characters newer than its tables as inert, so they end a run even if utf8proc knows them; for the
 * same reason a run does not start with a base character that the library would not compose. */
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

#define DECOMPOSED 4 /* most characters that one decomposes into */

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

static bool has(const uint8_t *classes, const char *p, uint8_t bit)
{
    return classes[nbi_utf8_decode(p)] & bit;
}

/* The first active character; end if there is none. */
static const char *find_active(const uint8_t *classes, const char *p, const char *end)
{
    while ((p = skip_ascii(p, end)) < end && !has(classes, p, NBI_CHAR_ACTIVE))
        p += nbi_char_length(p);
    return p;
}

/* Start of the run that contains an active character. */
static const char *run_start(const uint8_t *classes, const char *active, const char *start)
{
    if (active == start)
        return active;
    const char *before = nbi_char_before(active);
    return has(classes, before, NBI_CHAR_BASE) ? before : active;
}

size_t nbi_nfc_prefix(const uint8_t *classes, const char *text, size_t len)
{
    const char *active = find_active(classes, text, text + len);
    if (active == text + len)
        return len;
    return (size_t)(run_start(classes, active, text) - text);
}

static int class_of(utf8proc_int32_t c)
{
    return utf8proc_get_property(c)->combining_class;
}

/* Sorts marks by combining class; stable. A counting sort, because utf8proc's takes quadratic
 * time. */
static enum nb_status order_marks(utf8proc_int32_t *p, size_t n)
{
    size_t at[256] = {0};
    utf8proc_int32_t local[32], *sorted = n <= 32 ? local : malloc(n * sizeof *sorted);
    if (!sorted)
        return nbi_fail_memory("NFC", n * sizeof *sorted);
    for (size_t i = 0; i < n; i++)
        at[class_of(p[i])]++;
    for (size_t c = 0, sum = 0; c < 256; c++) {
        size_t count = at[c];
        at[c] = sum;
        sum += count;
    }
    for (size_t i = 0; i < n; i++)
        sorted[at[class_of(p[i])]++] = p[i];
    memcpy(p, sorted, n * sizeof *p);
    if (sorted != local)
        free(sorted);
    return NB_OK;
}

/* Sorts each run of marks between two base characters. */
static enum nb_status reorder(utf8proc_int32_t *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t end = i;
        bool sorted = true;
        for (; end < n && class_of(p[end]) > 0; end++)
            sorted = sorted && (end == i || class_of(p[end - 1]) <= class_of(p[end]));
        if (!sorted)
            NBI_TRY(order_marks(p + i, end - i));
        i = end > i ? end : i + 1;
    }
    return NB_OK;
}

/* Decomposes the characters [p, end) into out, which holds DECOMPOSED of each. */
static size_t decompose(const char *p, const char *end, utf8proc_int32_t *out)
{
    size_t n = 0;
    for (; p < end; p += nbi_char_length(p)) {
        int unused = 0;
        utf8proc_ssize_t more =
            utf8proc_decompose_char((utf8proc_int32_t)nbi_utf8_decode(p), out + n, DECOMPOSED,
                                    UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &unused);
        NBI_BUG_IF(more < 1 || more > DECOMPOSED);
        n += (size_t)more;
    }
    return n;
}

/* Appends the NFC form of a run. */
static enum nb_status compose(const char *p, size_t len, struct nbi_str *out)
{
    utf8proc_int32_t local[64], *text = len <= 16 ? local : malloc(DECOMPOSED * len * sizeof *text);
    if (!text)
        return nbi_fail_memory("NFC", DECOMPOSED * len * sizeof *text);
    size_t n = decompose(p, p + len, text);
    enum nb_status rc = reorder(text, n);
    if (rc == NB_OK)
        n = (size_t)utf8proc_normalize_utf32(text, (utf8proc_ssize_t)n,
                                             UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    for (size_t i = 0; i < n && rc == NB_OK; i++)
        nbi_str_put_char(out, (uint32_t)text[i]);
    if (text != local)
        free(text);
    return rc;
}

enum nb_status nbi_nfc(const uint8_t *classes, const char *text, size_t len, struct nbi_str *out)
{
    const char *p = text, *end = text + len;
    while (p < end) {
        const char *active = find_active(classes, p, end);
        const char *start = active < end ? run_start(classes, active, p) : end;
        nbi_str_append(out, p, (size_t)(start - p));
        for (p = active; p < end && has(classes, p, NBI_CHAR_ACTIVE); p += nbi_char_length(p))
            ;
        if (p > start)
            NBI_TRY(compose(start, (size_t)(p - start), out));
    }
    return nbi_str_status(out);
}
