/* evaluate.c - the cross entropy of held-out data, summed over all predicted tokens.
 *
 * It runs the training forward pass with the micro-batch of training, so it needs no memory of its
 * own. */
#include <string.h>

#include "base/file.h"
#include "data/records.h"
#include "data/windows.h"
#include "train/run.h"

#define TEXT_MAX ((size_t)4 << 30)

/* ---- the set ---- */

static enum nb_status add_text(struct nbi_run *r, const char *path)
{
    struct nbi_eval_set *set = &r->eval;
    char *text = NULL;
    size_t len = 0, count = 0;
    if (set->text_count == NBI_EVAL_TEXTS)
        return nbi_fail(NB_EINVAL, "at most %d texts to measure on", NBI_EVAL_TEXTS);
    NBI_TRY(nbi_file_read(path, TEXT_MAX, &text, &len));
    enum nb_status rc = nb_tokenizer_encode(r->tokenizer, text, len, false,
                                            &set->texts[set->text_count].ids, &count);
    free(text);
    NBI_TRY(rc);
    set->texts[set->text_count++].count = (int64_t)count;
    if (count < 2)
        return nbi_fail(NB_EVALUE, "'%s' has %zu tokens; measuring takes two", path, count);
    return NB_OK;
}

enum nb_status nbi_eval_open(struct nbi_run *r)
{
    const char *others[NBI_EVAL_TEXTS + 1] = {0};
    int count = 0;
    for (const char *const *f = r->opts->eval_data; f && *f; f++) {
        enum nbi_data_kind kind;
        NBI_TRY(nbi_data_kind_of(*f, &kind));
        if (kind == NBI_DATA_TEXT)
            NBI_TRY(add_text(r, *f));
        else if (count < NBI_EVAL_TEXTS)
            others[count++] = *f;
    }
    if (count == 0)
        return NB_OK;
    const struct nbi_dataset_opts opts = {.files = others,
                                          .tokenizer = r->tokenizer,
                                          .chat = nbi_chat_kind(r->chat),
                                          .progress = r->opts->stage_progress,
                                          .progress_ctx = r->opts->ctx};
    return nbi_dataset_open(&r->eval.data, &opts);
}

void nbi_eval_close(struct nbi_eval_set *set)
{
    nbi_dataset_close(set->data);
    for (int i = 0; i < set->text_count; i++)
        free(set->texts[i].ids);
    *set = (struct nbi_eval_set){0};
}

bool nbi_eval_any(const struct nbi_eval_set *set)
{
    return set->data || set->text_count > 0;
}

/* ---- measuring ---- */

struct sum {
    double loss;
    int64_t count;
    int64_t done, total; /* tokens, whether they count or not */
};

static enum nb_status measure(struct nbi_run *r, const struct nbi_weights *w,
                              const struct nbi_microbatch *batch, int64_t tokens, struct sum *sum)
{
    NBI_TRY(nbi_check_interrupt());
    NBI_TRY(nbi_train_pass_set(&r->train_pass, batch));
    NBI_TRY(nbi_execute(w, &r->acts, r->stream, &r->train_pass.pass));
    NBI_TRY(nbi_loss(w, &r->acts, r->stream, &r->train_pass.pass, &r->train_pass.labels, NULL));
    NBI_TRY(r->be->sync(r->stream));
    sum->loss += nbi_loss_sums(&r->train_pass.labels).loss;
    sum->count += r->train_pass.labels.count;
    sum->done += tokens;
    nbi_run_stage_progress(r, sum->done, sum->total);
    return NB_OK;
}

static enum nb_status measure_samples(struct nbi_run *r, const struct nbi_weights *w,
                                      struct sum *sum)
{
    struct nbi_loader b = {0};
    const struct nbi_loader_opts opts = {
        .data = r->eval.data, .pack = true, .epochs = 1, .padding = r->loader.opts.padding};
    bool more = true;
    enum nb_status rc = nbi_loader_init(&b, &opts);
    while (rc == NB_OK) {
        rc = nbi_loader_next(&b, &r->microbatches[0], &more);
        if (rc != NB_OK || !more)
            break;
        rc = measure(r, w, &r->microbatches[0], r->microbatches[0].tokens, sum);
    }
    nbi_loader_release(&b);
    return rc;
}

/* Puts a window into a row and pads the rest. NULL: the row is all padding. */
static void set_row(struct nbi_microbatch *b, int64_t row, const int32_t *ids,
                    const struct nbi_window *w)
{
    int64_t count = w ? w->end - w->begin : 0;
    for (int64_t i = 0; i < b->T; i++) {
        int64_t at = row * b->T + i;
        b->ids[at] = i < count ? ids[w->begin + i] : 0;
        b->positions[at] = (int32_t)i;
        b->targets[at] = i + 1 < count ? ids[w->begin + i + 1] : NBI_IGNORE;
    }
}

static enum nb_status measure_text(struct nbi_run *r, const struct nbi_weights *w,
                                   const int32_t *ids, int64_t count, struct sum *sum)
{
    struct nbi_microbatch *b = &r->microbatches[0];
    struct nbi_windows windows = {.count = count, .context = b->T, .stride = b->T};
    struct nbi_window window;
    bool more = nbi_windows_next(&windows, &window);
    while (more) {
        int64_t tokens = 0;
        for (int64_t row = 0; row < b->B; row++) {
            set_row(b, row, ids, more ? &window : NULL);
            tokens += more ? window.end - window.begin : 0;
            more = more && nbi_windows_next(&windows, &window);
        }
        NBI_TRY(measure(r, w, b, tokens, sum));
    }
    return NB_OK;
}

enum nb_status nbi_run_evaluate(struct nbi_run *r, const struct nbi_weights *w, double *loss,
                                int64_t *count)
{
    struct sum sum = {0};
    nbi_run_stage(r, "evaluating");
    if (r->eval.data)
        sum.total = nbi_dataset_stats(r->eval.data)->tokens;
    for (int i = 0; i < r->eval.text_count; i++)
        sum.total += r->eval.texts[i].count;
    if (r->eval.data)
        NBI_TRY(measure_samples(r, w, &sum));
    for (int i = 0; i < r->eval.text_count; i++)
        NBI_TRY(measure_text(r, w, r->eval.texts[i].ids, r->eval.texts[i].count, &sum));
    *loss = sum.loss;
    *count = sum.count;
    return NB_OK;
}
