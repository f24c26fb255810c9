/* dataset.c - the index of the examples in data files. */
#include "data/dataset.h"

#include <string.h>

#include "base/array.h"
#include "base/crc.h"
#include "base/log.h"

/* Bad lines that are logged one by one. */
#define LOGGED 5

/* ---- one file ---- */

static bool is_bad_line(enum nb_status rc)
{
    return rc == NB_EFORMAT || rc == NB_EVALUE || rc == NB_EUNSUPPORTED;
}

/* Turns a failure at a line into a skipped line if that is allowed. */
static enum nb_status judge(struct nbi_walk *w, const struct nbi_source *src, uint64_t line,
                            enum nb_status rc)
{
    if (rc == NB_OK || rc == NB_EINTERRUPTED)
        return rc;
    nbi_context(rc, "%s:%llu", nbi_source_path(src), (unsigned long long)line);
    if (!is_bad_line(rc) || !w->skip_bad)
        return rc;
    if (w->bad++ < LOGGED)
        nbi_log(NB_LOG_WARN, "skipped %s", nb_last_error());
    return NB_OK;
}

enum nb_status nbi_walk(struct nbi_walk *w, const struct nbi_source *src)
{
    struct nbi_records r;
    enum nbi_data_kind kind;
    NBI_TRY(nbi_data_kind_of(nbi_source_path(src), &kind));
    nbi_records_init(&r, src, kind);
    enum nb_status rc = NB_OK;
    bool more = true, first = true;
    while (rc == NB_OK && more) {
        struct nbi_record record = {0};
        const char *text = "";
        rc = nbi_records_next(&r, &record, &text, &more);
        if (rc != NB_OK) { /* reading may continue after a line that is too long */
            rc = judge(w, src, record.line, rc);
            more = true;
            continue;
        }
        bool header =
            first && kind == NBI_DATA_TSV && more && nbi_example_is_header(text, record.len);
        first = false;
        if (more && !header)
            rc = judge(w, src, record.line, w->fn(w->ctx, kind, &record, text));
        if (rc == NB_OK)
            rc = nbi_check_interrupt();
        if (w->progress)
            w->progress(w->progress_ctx, r.offset, nbi_source_size(src));
    }
    nbi_records_release(&r);
    return rc;
}

/* ---- the set ---- */

/* Where an example is, and what is known without reading it; 40 bytes. */
struct place {
    uint64_t offset, line;
    uint32_t len, tokens, crc; /* crc: of the text, to notice changed files */
    uint16_t file;
    uint8_t kind;
    bool ends, document;
};

struct nbi_dataset {
    struct nbi_example_encoder encoder;
    struct nbi_source **files;
    size_t file_count;
    struct place *places;
    size_t count, capacity;
    struct nbi_dataset_stats stats;
    struct nbi_example example; /* scratch of indexing */
    char *text;                 /* of the example that is read */
    size_t text_capacity;
    /* Progress of indexing: */
    nb_progress_fn progress;
    void *progress_ctx;
    uint64_t bytes_before, bytes;
};

static enum nb_status index_record(void *ctx, enum nbi_data_kind kind,
                                   const struct nbi_record *record, const char *text)
{
    struct nbi_dataset *d = ctx;
    NBI_TRY(nbi_example_make(&d->encoder, kind, text, record->len, record->ends, &d->example));
    size_t n = d->example.ids.count;
    if (n > UINT32_MAX)
        return nbi_fail(NB_EFORMAT, "the sample is too long");
    if (n < 2) /* nothing to predict */
        return NB_OK;
    NBI_TRY(NBI_ARRAY_RESERVE(d->places, d->capacity, d->count + 1, "data index"));
    d->places[d->count++] = (struct place){.offset = record->offset,
                                           .line = record->line,
                                           .len = record->len,
                                           .tokens = (uint32_t)n,
                                           .crc = nbi_crc32c(0, text, record->len),
                                           .file = (uint16_t)(d->file_count - 1),
                                           .kind = (uint8_t)kind,
                                           .ends = record->ends,
                                           .document = d->example.document};
    d->stats.examples++;
    d->stats.crc = nbi_crc32c(d->stats.crc, &n, sizeof n);
    d->stats.crc = nbi_crc32c(d->stats.crc, d->example.ids.p, n * sizeof *d->example.ids.p);
    d->stats.crc = nbi_crc32c(d->stats.crc, d->example.trained, n);
    d->stats.documents += d->example.document;
    d->stats.tokens += (int64_t)n;
    for (size_t i = 0; i < n; i++)
        d->stats.trained += d->example.trained[i];
    if ((int64_t)n > d->stats.longest)
        d->stats.longest = (int64_t)n;
    return NB_OK;
}

static void file_progress(void *ctx, uint64_t done, uint64_t total)
{
    (void)total;
    struct nbi_dataset *d = ctx;
    d->progress(d->progress_ctx, d->bytes_before + done, d->bytes);
}

static enum nb_status open_files(struct nbi_dataset *d, const char *const *files)
{
    size_t n = 0;
    while (files[n])
        n++;
    if (n == 0 || n > UINT16_MAX)
        return nbi_fail(NB_EINVAL, "a data set has 1 to %d files", UINT16_MAX);
    d->files = calloc(n, sizeof *d->files);
    if (!d->files)
        return nbi_fail_memory("data files", n * sizeof *d->files);
    for (; d->file_count < n; d->file_count++) {
        enum nbi_data_kind kind;
        NBI_TRY(nbi_data_kind_of(files[d->file_count], &kind));
        NBI_TRY(nbi_source_open(&d->files[d->file_count], files[d->file_count]));
        d->bytes += nbi_source_size(d->files[d->file_count]);
    }
    return NB_OK;
}

static enum nb_status index_files(struct nbi_dataset *d, bool skip_bad)
{
    size_t n = d->file_count;
    struct nbi_walk w = {.fn = index_record,
                         .ctx = d,
                         .skip_bad = skip_bad,
                         .progress = d->progress ? file_progress : NULL,
                         .progress_ctx = d};
    for (d->file_count = 1; d->file_count <= n; d->file_count++) {
        const struct nbi_source *src = d->files[d->file_count - 1];
        enum nb_status rc = nbi_walk(&w, src);
        if (rc != NB_OK) {
            d->file_count = n;
            return rc;
        }
        d->bytes_before += nbi_source_size(src);
    }
    d->file_count = n;
    d->stats.bad = w.bad;
    if (w.bad > LOGGED)
        nbi_log(NB_LOG_WARN, "skipped %lld bad lines in all", (long long)w.bad);
    if (d->count == 0)
        return nbi_fail(NB_EFORMAT, "there is no sample in '%s'%s", nbi_source_path(d->files[0]),
                        n > 1 ? " and the other files" : "");
    return NB_OK;
}

enum nb_status nbi_dataset_open(struct nbi_dataset **out, const struct nbi_dataset_opts *opts)
{
    struct nbi_dataset *d = calloc(1, sizeof *d);
    *out = NULL;
    if (!d)
        return nbi_fail_memory("data set", sizeof *d);
    d->encoder.tokenizer = opts->tokenizer;
    d->encoder.chat = opts->chat;
    d->progress = opts->progress;
    d->progress_ctx = opts->progress_ctx;
    enum nb_status rc = open_files(d, opts->files);
    if (rc == NB_OK)
        rc = index_files(d, opts->skip_bad);
    nbi_example_release(&d->example);
    if (rc == NB_OK)
        *out = d;
    else
        nbi_dataset_close(d);
    return rc;
}

void nbi_dataset_close(struct nbi_dataset *d)
{
    if (!d)
        return;
    for (size_t i = 0; i < d->file_count; i++)
        nbi_source_close(d->files[i]);
    free(d->files);
    free(d->places);
    free(d->text);
    nbi_example_encoder_release(&d->encoder);
    free(d);
}

const struct nbi_dataset_stats *nbi_dataset_stats(const struct nbi_dataset *d)
{
    return &d->stats;
}

int64_t nbi_dataset_tokens(const struct nbi_dataset *d, int64_t i)
{
    return d->places[i].tokens;
}

bool nbi_dataset_is_document(const struct nbi_dataset *d, int64_t i)
{
    return d->places[i].document;
}

int64_t nbi_dataset_longer(const struct nbi_dataset *d, int64_t T)
{
    int64_t count = 0;
    for (size_t i = 0; i < d->count; i++)
        count += !d->places[i].document && d->places[i].tokens > T + 1;
    return count;
}

const char *nbi_dataset_place(const struct nbi_dataset *d, int64_t i, char *buf, size_t size)
{
    const struct place *p = &d->places[i];
    snprintf(buf, size, "%s:%llu", nbi_source_path(d->files[p->file]), (unsigned long long)p->line);
    return buf;
}

enum nb_status nbi_dataset_get(struct nbi_dataset *d, int64_t i, struct nbi_example *out)
{
    const struct place *p = &d->places[i];
    NBI_TRY(NBI_ARRAY_RESERVE(d->text, d->text_capacity, p->len, "sample"));
    NBI_TRY(nbi_source_read(d->files[p->file], p->offset, d->text, p->len));
    const char *text = p->len ? d->text : "";
    enum nb_status rc =
        nbi_crc32c(0, text, p->len) == p->crc
            ? nbi_example_make(&d->encoder, (enum nbi_data_kind)p->kind, text, p->len, p->ends, out)
            : nbi_fail(NB_EFORMAT, "the file has changed since it was opened");
    char place[NBI_PLACE_MAX];
    return nbi_context(rc, "%s", nbi_dataset_place(d, i, place, sizeof place));
}
