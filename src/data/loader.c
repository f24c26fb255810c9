/* loader.c - shuffles examples and packs them into rows.
 *
 * Packing depends on the lengths of the examples alone, so nbi_loader_skip and the count of steps
 * need not read them. */
#include "data/loader.h"

#include <string.h>

#include "base/array.h"
#include "base/rng.h"

/* A document is not cut to fill fewer positions than this. */
#define SLIVER 16

enum nb_status nbi_microbatch_init(struct nbi_microbatch *b, int64_t B, int64_t T)
{
    *b = (struct nbi_microbatch){.B = B, .T = T};
    if (B < 1 || T < 1 || B > (int64_t)1 << 32 || T > ((int64_t)1 << 40) / B)
        return nbi_fail(NB_EINVAL, "a batch of %lld x %lld tokens", (long long)B, (long long)T);
    size_t bytes = (size_t)(B * T) * sizeof(int32_t);
    b->ids = malloc(bytes);
    b->targets = malloc(bytes);
    b->positions = malloc(bytes);
    b->example_of = malloc(2 * bytes);
    if (!b->ids || !b->targets || !b->positions || !b->example_of) {
        nbi_microbatch_release(b);
        return nbi_fail_memory("batch", 5 * bytes);
    }
    return NB_OK;
}

void nbi_microbatch_release(struct nbi_microbatch *b)
{
    free(b->ids);
    free(b->targets);
    free(b->positions);
    free(b->example_of);
    *b = (struct nbi_microbatch){0};
}

enum nb_status nbi_loader_init(struct nbi_loader *l, const struct nbi_loader_opts *opts)
{
    *l = (struct nbi_loader){.opts = *opts, .order_epoch = -1, .example_index = -1};
    int64_t n = nbi_dataset_stats(opts->data)->examples;
    if (n > UINT32_MAX)
        return nbi_fail(NB_EUNSUPPORTED, "more than 4,294,967,295 samples");
    l->order = malloc((size_t)n * sizeof *l->order);
    return l->order ? NB_OK : nbi_fail_memory("sample order", (size_t)n * sizeof *l->order);
}

void nbi_loader_release(struct nbi_loader *l)
{
    free(l->order);
    free(l->used);
    nbi_example_release(&l->example);
    *l = (struct nbi_loader){0};
}

/* Fisher-Yates; the permutation depends on seed and epoch alone. */
void nbi_loader_order(struct nbi_loader *l, int64_t epoch)
{
    uint32_t n = (uint32_t)nbi_dataset_stats(l->opts.data)->examples;
    if (l->order_epoch == epoch)
        return;
    l->order_epoch = epoch;
    for (uint32_t i = 0; i < n; i++)
        l->order[i] = i;
    for (uint32_t i = n; l->opts.shuffle && i > 1; i--) {
        struct nbi_philox r = nbi_philox(l->opts.seed, i, (uint64_t)epoch);
        uint32_t j = (uint32_t)((uint64_t)r.v[0] * i >> 32), kept = l->order[i - 1];
        l->order[i - 1] = l->order[j];
        l->order[j] = kept;
    }
}

/* ---- filling a batch ---- */

/* Puts positions [from, from + count) of the example into a row, with positions from 0. Without
 * arrays they are only counted. */
static void put(struct nbi_loader *l, struct nbi_microbatch *out, int64_t row, int64_t from,
                int64_t count)
{
    const struct nbi_example *x = &l->example;
    int64_t at = row * out->T + l->used[row];
    for (int64_t i = 0; i < count && out->ids; i++) {
        bool trained = x->trained[from + i + 1];
        out->ids[at + i] = x->ids.p[from + i];
        out->targets[at + i] = trained ? x->ids.p[from + i + 1] : NBI_IGNORE;
        out->positions[at + i] = (int32_t)i;
        out->example_of[at + i] = l->example_index;
        out->trained += trained;
    }
    l->used[row] += count;
    out->tokens += count;
}

static int64_t free_positions(const struct nbi_loader *l, const struct nbi_microbatch *out,
                              int64_t row)
{
    if (!l->opts.pack && l->used[row] > 0)
        return 0;
    return out->T - l->used[row];
}

/* Puts an example of `need` positions into the first row that can hold it; false: none can. */
static bool place_uncut(struct nbi_loader *l, struct nbi_microbatch *out, int64_t need)
{
    for (int64_t row = 0; row < out->B; row++)
        if (free_positions(l, out, row) >= need) {
            put(l, out, row, 0, need);
            return true;
        }
    return false;
}

/* Puts the rest of a document, up to position `end`, into whatever rows have space; false: some of
 * it is left. */
static bool place_document(struct nbi_loader *l, struct nbi_microbatch *out, int64_t end)
{
    int64_t *from = &l->state.token;
    for (int64_t row = 0; row < out->B && *from < end; row++) {
        int64_t unused = free_positions(l, out, row), left = end - *from;
        if (unused < left && unused < SLIVER && l->used[row] > 0)
            continue;
        int64_t count = unused < left ? unused : left;
        if (count > 0)
            put(l, out, row, *from, count);
        *from += count;
    }
    return *from >= end;
}

static void clear(struct nbi_loader *l, struct nbi_microbatch *out)
{
    out->tokens = out->trained = out->examples = out->truncated = 0;
    memset(l->used, 0, (size_t)l->rows * sizeof *l->used);
    for (int64_t i = 0; i < out->B * out->T && out->ids; i++) {
        out->ids[i] = l->opts.padding;
        out->targets[i] = NBI_IGNORE;
        out->example_of[i] = -1;
    }
}

/* The unused positions of a row form a sequence of their own. */
static void pad(const struct nbi_loader *l, struct nbi_microbatch *out)
{
    for (int64_t row = 0; row < out->B; row++)
        for (int64_t t = l->used[row]; t < out->T; t++)
            out->positions[row * out->T + t] = (int32_t)(t - l->used[row]);
}

static enum nb_status reserve_rows(struct nbi_loader *l, int64_t rows)
{
    NBI_TRY(NBI_ARRAY_RESERVE(l->used, l->capacity, (size_t)rows, "batch rows"));
    l->rows = rows;
    return NB_OK;
}

bool nbi_loader_is_done(const struct nbi_loader *l)
{
    return l->opts.epochs > 0 && l->state.epoch >= l->opts.epochs;
}

/* A document that continues from the previous batch is already loaded. */
static enum nb_status get_example(struct nbi_loader *l, int64_t index)
{
    if (l->state.token > 0 && l->example_index == index)
        return NB_OK;
    l->example_index = -1;
    NBI_TRY(nbi_dataset_get(l->opts.data, index, &l->example));
    l->example_index = index;
    return NB_OK;
}

/* Places the next example; *done false: some of it is left for the next batch. */
static enum nb_status place_next(struct nbi_loader *l, struct nbi_microbatch *out, bool *done)
{
    int64_t index = l->order[l->state.next], positions = nbi_dataset_tokens(l->opts.data, index);
    bool document = nbi_dataset_is_document(l->opts.data, index) &&
                    !(l->opts.keep_documents && positions <= out->T + 1);
    bool starts = l->state.token == 0, longer = !document && positions > out->T + 1;
    int64_t before = out->tokens;
    positions = (longer ? out->T + 1 : positions) - 1;
    if (out->ids) {
        NBI_TRY(get_example(l, index));
        if (longer)
            nbi_example_truncate(&l->example, (size_t)out->T + 1);
    }
    *done = document ? place_document(l, out, positions) : place_uncut(l, out, positions);
    out->examples += starts && out->tokens > before;
    out->truncated += longer && *done;
    return NB_OK;
}

/* Fills rows until an example does not fit, or an epoch ends that is counted. */
static enum nb_status fill(struct nbi_loader *l, struct nbi_microbatch *out)
{
    int64_t n = nbi_dataset_stats(l->opts.data)->examples;
    bool done = true, ended = false;
    NBI_TRY(reserve_rows(l, out->B));
    clear(l, out);
    while (!nbi_loader_is_done(l) && !ended) {
        nbi_loader_order(l, l->state.epoch);
        NBI_TRY(place_next(l, out, &done));
        if (!done)
            break;
        l->state.token = 0;
        if (++l->state.next == n) {
            l->state.next = 0;
            l->state.epoch++;
            ended = l->opts.epochs > 0;
        }
    }
    return NB_OK;
}

enum nb_status nbi_loader_next(struct nbi_loader *l, struct nbi_microbatch *out, bool *more)
{
    NBI_TRY(fill(l, out));
    pad(l, out);
    *more = out->tokens > 0;
    return NB_OK;
}

enum nb_status nbi_loader_skip(struct nbi_loader *l, int64_t B, int64_t T)
{
    struct nbi_microbatch out = {.B = B, .T = T};
    return fill(l, &out);
}
