/* records.c - reads lines and pieces of text from a file of any size. */
#include "data/records.h"

#include <string.h>

#include "base/array.h"
#include "base/str.h"
#include "base/utf8.h"
#include "tokenizer/chat_template.h"

static const char separator[] = NBI_END_OF_TEXT;
#define SEPARATOR (sizeof separator - 1)

enum nb_status nbi_data_kind_of(const char *path, enum nbi_data_kind *kind)
{
    static const struct {
        const char *ending;
        enum nbi_data_kind kind;
    } endings[] = {{".tsv", NBI_DATA_TSV},  {".jsonl", NBI_DATA_JSONL}, {".ndjson", NBI_DATA_JSONL},
                   {".txt", NBI_DATA_TEXT}, {".text", NBI_DATA_TEXT},   {".md", NBI_DATA_TEXT}};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (nbi_has_extension(path, endings[i].ending)) {
            *kind = endings[i].kind;
            return NB_OK;
        }
    return nbi_fail(NB_EUNSUPPORTED,
                    "'%s': what kind of data this is shows in a file's ending, which must be .tsv, "
                    ".jsonl or .txt",
                    path);
}

void nbi_records_init(struct nbi_records *r, const struct nbi_source *src, enum nbi_data_kind kind)
{
    *r = (struct nbi_records){.src = src, .kind = kind, .line = 1};
}

void nbi_records_release(struct nbi_records *r)
{
    free(r->buffer);
    r->buffer = NULL;
    r->capacity = r->buffered = 0;
}

/* Makes the buffer hold `want` bytes from r->offset, or all up to the end of the file. */
static enum nb_status fill(struct nbi_records *r, size_t want)
{
    uint64_t left = nbi_source_size(r->src) - r->offset;
    if (left < want)
        want = (size_t)left;
    if (r->buffered_at <= r->offset && r->offset + want <= r->buffered_at + r->buffered)
        return NB_OK;
    NBI_TRY(NBI_ARRAY_RESERVE(r->buffer, r->capacity, want, "line"));
    r->buffered = 0;
    NBI_TRY(nbi_source_read(r->src, r->offset, r->buffer, want));
    r->buffered_at = r->offset;
    r->buffered = want;
    return NB_OK;
}

/* The buffered bytes from r->offset on. */
static const char *view(const struct nbi_records *r, size_t *len)
{
    *len = (size_t)(r->buffered_at + r->buffered - r->offset);
    return r->buffer + (r->offset - r->buffered_at);
}

static bool at_end(const struct nbi_records *r)
{
    return r->offset >= nbi_source_size(r->src);
}

static bool holds_file_end(const struct nbi_records *r)
{
    return r->buffered_at + r->buffered == nbi_source_size(r->src);
}

/* Skips a UTF-8 byte order mark at the start of the file. */
static enum nb_status skip_byte_order_mark(struct nbi_records *r)
{
    size_t len;
    if (r->offset > 0 || at_end(r))
        return NB_OK;
    NBI_TRY(fill(r, 3));
    const char *p = view(r, &len);
    if (len >= 3 && memcmp(p, "\xEF\xBB\xBF", 3) == 0)
        r->offset = 3;
    return NB_OK;
}

/* ---- lines ---- */

/* Skips a line that is too long, and fails. */
static enum nb_status skip_line(struct nbi_records *r)
{
    while (!at_end(r)) {
        size_t len;
        NBI_TRY(fill(r, (size_t)1 << 20));
        const char *p = view(r, &len), *newline = memchr(p, '\n', len);
        r->offset += newline ? (size_t)(newline - p) + 1 : len;
        if (newline)
            break;
        NBI_TRY(nbi_check_interrupt());
    }
    r->line++;
    return nbi_fail(NB_EFORMAT, "the line is longer than %zu MiB", NBI_RECORD_MAX >> 20);
}

/* The next line, without its line end. */
static enum nb_status next_line(struct nbi_records *r, const char **text, size_t *len)
{
    NBI_TRY(fill(r, 1)); /* a no-op if the buffer has more */
    for (;;) {
        size_t have;
        const char *p = view(r, &have), *newline = memchr(p, '\n', have);
        *text = p;
        *len = newline ? (size_t)(newline - p) : have;
        if (*len > NBI_RECORD_MAX)
            return skip_line(r);
        if (newline || holds_file_end(r))
            return NB_OK;
        size_t want = have < (size_t)1 << 19 ? (size_t)1 << 20 : 2 * have;
        NBI_TRY(fill(r, want < NBI_RECORD_MAX ? want : NBI_RECORD_MAX + 1));
    }
}

static bool is_skipped(enum nbi_data_kind kind, const char *p, size_t len)
{
    if (kind == NBI_DATA_TSV && len > 0 && *p == '#')
        return true;
    for (size_t i = 0; i < len; i++)
        if (p[i] != ' ' && p[i] != '\t' && p[i] != '\r')
            return false;
    return true;
}

static enum nb_status next_of_lines(struct nbi_records *r, struct nbi_record *record,
                                    const char **text, bool *more)
{
    for (*more = false; !*more && !at_end(r);) {
        size_t len = 0;
        record->line = r->line;
        NBI_TRY(next_line(r, text, &len));
        *record = (struct nbi_record){r->offset, (uint32_t)len, true, r->line};
        *more = !is_skipped(r->kind, *text, len);
        r->offset += len + 1;
        if (r->offset > nbi_source_size(r->src)) /* the last line has no line end */
            r->offset = nbi_source_size(r->src);
        r->line++;
    }
    return NB_OK;
}

/* ---- text ---- */

static bool is_line_end(char c)
{
    return c == '\n' || c == '\r';
}

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_unicode_space(const char *p)
{
    return memcmp(p, "\xC2\x85", 2) == 0 || memcmp(p, "\xC2\xA0", 2) == 0 ||
           memcmp(p, "\xE1\x9A\x80", 3) == 0 || memcmp(p, "\xE2\x80", 2) == 0 ||
           memcmp(p, "\xE2\x81\x9F", 3) == 0 || memcmp(p, "\xE3\x80\x80", 3) == 0;
}

/* Where to cut p[0, len), if the document continues after it. */
static size_t cut(const char *p, size_t len)
{
    size_t low = len / 2, i;
    for (i = len - SEPARATOR; i > low; i--)
        if (p[i - 1] == '\n' && (p[i] > ' ' || p[i] & 0x80) && !is_unicode_space(p + i))
            return i;
    for (i = len - 2; i > low; i--)
        if (p[i] == ' ' && p[i - 1] > ' ' && is_letter(p[i + 1]))
            return i;
    for (i = len - SEPARATOR; ((p[i] & 0xC0) == 0x80 || is_line_end(p[i])) && i > low;)
        i--;
    return i;
}

static uint64_t count_lines(const char *p, size_t len)
{
    uint64_t n = 0;
    for (const char *end = p + len; (p = memchr(p, '\n', (size_t)(end - p))); p++)
        n++;
    return n;
}

static void advance(struct nbi_records *r, const char *p, size_t bytes)
{
    r->line += count_lines(p, bytes);
    r->offset += bytes;
}

/* Skips line ends at the start of a document. */
static enum nb_status skip_line_ends(struct nbi_records *r)
{
    while (!r->in_document && !at_end(r)) {
        size_t len, n = 0;
        NBI_TRY(fill(r, NBI_PIECE_MAX));
        const char *p = view(r, &len);
        while (n < len && is_line_end(p[n]))
            n++;
        advance(r, p, n);
        if (n < len)
            break;
    }
    return NB_OK;
}

static enum nb_status next_piece(struct nbi_records *r, struct nbi_record *record,
                                 const char **text, bool *more)
{
    for (*more = false; !*more;) {
        size_t len, size;
        NBI_TRY(skip_line_ends(r));
        if (at_end(r))
            return NB_OK;
        NBI_TRY(fill(r, NBI_PIECE_MAX));
        const char *p = view(r, &len);
        if (len > NBI_PIECE_MAX)
            len = NBI_PIECE_MAX;
        const char *end = memmem(p, len, separator, SEPARATOR);
        bool last = r->offset + len == nbi_source_size(r->src);
        size_t after = end ? (size_t)(end - p) + SEPARATOR : last ? len : cut(p, len);
        size = end ? (size_t)(end - p) : after;
        bool ends = end || last;
        while (ends && size > 0 && is_line_end(p[size - 1]))
            size--;
        *record = (struct nbi_record){r->offset, (uint32_t)size, ends, r->line};
        *text = p;
        /* A record without text only counts as the end of a document. */
        *more = size > 0 || (ends && r->in_document);
        r->in_document = !ends;
        advance(r, p, after);
    }
    return NB_OK;
}

enum nb_status nbi_records_next(struct nbi_records *r, struct nbi_record *record, const char **text,
                                bool *more)
{
    *more = false;
    NBI_TRY(skip_byte_order_mark(r));
    return r->kind == NBI_DATA_TEXT ? next_piece(r, record, text, more)
                                    : next_of_lines(r, record, text, more);
}
