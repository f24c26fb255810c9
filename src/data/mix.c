/* mix.c - rows of two data sets in one micro-batch. */
#include "data/mix.h"

#include <math.h>

int64_t nbi_mix_rows(double share, int64_t B, int64_t number)
{
    double before = floor((double)number * (double)B * share);
    double rows = floor(((double)number + 1) * (double)B * share) - before;
    return rows < 0 ? 0 : rows > (double)B ? B : (int64_t)rows; /* inexact beyond 2^53 rows */
}

/* Fills rows [first, first + rows) of a micro-batch and adds to its counts. */
static enum nb_status fill(struct nbi_loader *l, struct nbi_microbatch *all, int64_t first,
                           int64_t rows)
{
    int64_t at = first * all->T;
    bool more;
    struct nbi_microbatch part = {.B = rows,
                                  .T = all->T,
                                  .ids = all->ids + at,
                                  .targets = all->targets + at,
                                  .positions = all->positions + at,
                                  .example_of = all->example_of + at};
    if (rows == 0)
        return NB_OK;
    NBI_TRY(nbi_loader_next(l, &part, &more));
    all->tokens += part.tokens;
    all->trained += part.trained;
    all->examples += part.examples;
    all->truncated += part.truncated;
    return NB_OK;
}

enum nb_status nbi_mix_next(struct nbi_mix *m, int64_t number, struct nbi_microbatch *out,
                            bool *more)
{
    int64_t rows = m->replay ? nbi_mix_rows(m->share, out->B, number) : 0, first = out->B - rows;
    out->tokens = out->trained = out->examples = out->truncated = 0;
    *more = !nbi_loader_is_done(m->main);
    if (!*more)
        return NB_OK;
    NBI_TRY(fill(m->main, out, 0, first));
    if (rows == 0)
        return NB_OK;
    NBI_TRY(fill(m->replay, out, first, rows));
    int64_t offset = nbi_dataset_stats(m->main->opts.data)->examples;
    for (int64_t i = first * out->T; i < out->B * out->T; i++)
        out->example_of[i] += out->example_of[i] >= 0 ? offset : 0;
    return NB_OK;
}

enum nb_status nbi_mix_count(const struct nbi_mix *m, int64_t B, int64_t T, int64_t limit,
                             int64_t *count)
{
    m->main->state = (struct nbi_loader_state){0};
    for (*count = 0; *count < limit && !nbi_loader_is_done(m->main); ++*count) {
        int64_t rows = B - (m->replay ? nbi_mix_rows(m->share, B, *count) : 0);
        NBI_TRY(nbi_check_interrupt());
        if (rows > 0)
            NBI_TRY(nbi_loader_skip(m->main, rows, T));
    }
    m->main->state = (struct nbi_loader_state){0};
    return NB_OK;
}
