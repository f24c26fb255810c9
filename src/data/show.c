/* show.c - nb_data_show: examples as training will see them, and statistics of the data. */
#include <string.h>

#include "data/loader.h"
#include "nibble/data.h"

static void report_stats(struct nb_data_report *report, const struct nbi_dataset *d,
                         int64_t seq_len)
{
    const struct nbi_dataset_stats *s = nbi_dataset_stats(d);
    *report = (struct nb_data_report){.samples = s->examples,
                                      .documents = s->documents,
                                      .tokens = s->tokens,
                                      .trained = s->trained,
                                      .longest = s->longest,
                                      .bad = s->bad};
    if (seq_len > 0)
        report->too_long = nbi_dataset_longer(d, seq_len);
}

/* Counts the rows of one epoch when packed. */
static enum nb_status count_rows(struct nbi_loader *l, int64_t seq_len,
                                 struct nb_data_report *report)
{
    struct nbi_microbatch batch;
    bool more = true;
    enum nb_status rc = nbi_microbatch_init(&batch, 8, seq_len);
    while (rc == NB_OK && more) {
        rc = nbi_loader_next(l, &batch, &more);
        for (int64_t row = 0; rc == NB_OK && row < batch.B; row++)
            report->rows += l->used[row] > 0;
        report->row_tokens += batch.tokens;
        if (rc == NB_OK)
            rc = nbi_check_interrupt();
    }
    nbi_microbatch_release(&batch);
    return rc;
}

static enum nb_status show_examples(struct nbi_dataset *d, const struct nbi_loader *l,
                                    const struct nb_data_opts *opts, nb_data_fn fn, void *ctx)
{
    struct nbi_example x = {0};
    enum nb_status rc = NB_OK;
    int64_t n = nbi_dataset_stats(d)->examples;
    for (int64_t i = 0; i < n && i < opts->show && rc == NB_OK; i++) {
        char place[NBI_PLACE_MAX];
        int64_t at = opts->shuffle ? l->order[i] : i;
        rc = nbi_dataset_get(d, at, &x);
        if (rc != NB_OK)
            break;
        bool cut = opts->seq_len > 0 && nbi_example_truncate(&x, (size_t)opts->seq_len + 1) &&
                   !x.document; /* a document continues in the next row */
        const struct nb_data_sample shown = {nbi_dataset_place(d, at, place, sizeof place), x.ids.p,
                                             x.trained, x.ids.count, cut};
        rc = fn(ctx, &shown);
    }
    nbi_example_release(&x);
    return rc;
}

enum nb_status nb_data_show(struct nb_tokenizer *tokenizer, const struct nb_chat *chat,
                            const struct nb_data_opts *opts, nb_data_fn fn, void *ctx,
                            struct nb_data_report *report)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nbi_dataset *d = NULL;
    struct nbi_loader loader = {0};
    const struct nbi_dataset_opts open = {.files = opts->files,
                                          .tokenizer = tokenizer,
                                          .chat = nbi_chat_kind(chat),
                                          .skip_bad = opts->skip_bad,
                                          .progress = opts->progress,
                                          .progress_ctx = opts->progress_ctx};
    struct nb_data_report counted;
    NBI_TRY(nbi_dataset_open(&d, &open));
    report_stats(&counted, d, opts->seq_len);
    const struct nbi_loader_opts order = {
        .data = d, .seed = opts->seed, .shuffle = opts->shuffle, .pack = true, .epochs = 1};
    enum nb_status rc = nbi_loader_init(&loader, &order);
    if (rc == NB_OK)
        nbi_loader_order(&loader, 0);
    if (rc == NB_OK)
        rc = show_examples(d, &loader, opts, fn, ctx);
    if (rc == NB_OK && opts->seq_len > 0)
        rc = count_rows(&loader, opts->seq_len, &counted);
    if (rc == NB_OK)
        *report = counted;
    nbi_loader_release(&loader);
    nbi_dataset_close(d);
    return rc;
}
