/* loader.c - shuffling and packing. */
#include "data/loader.h"

#include <string.h>

#include "base/array.h"
#include "base/rng.h"

/* A document is not cut for the sake of fewer positions than this. */
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

enum nb_status nbi_loader_init(struct nbi_loader *b, const struct nbi_loader_opts *opts)
{
    *b = (struct nbi_loader){.opts = *opts, .order_epoch = -1, .example_index = -1};
    int64_t n = nbi_dataset_stats(opts->data)->samples;
    if (n > UINT32_MAX)
        return nbi_fail(NB_EUNSUPPORTED, "more than 4,294,967,295 samples");
    b->order = malloc((size_t)n * sizeof *b->order);
    return b->order ? NB_OK : nbi_fail_memory("sample order", (size_t)n * sizeof *b->order);
}

void nbi_loader_release(struct nbi_loader *b)
{
    free(b->order);
    free(b->used);
    nbi_example_release(&b->example);
    *b = (struct nbi_loader){0};
}

/* Another permutation for every epoch, the same ones for the same seed. */
void nbi_loader_order(struct nbi_loader *b, int64_t epoch)
{
    uint32_t n = (uint32_t)nbi_dataset_stats(b->opts.data)->samples;
    if (b->order_epoch == epoch)
        return;
    b->order_epoch = epoch;
    for (uint32_t i = 0; i < n; i++)
        b->order[i] = i;
    for (uint32_t i = n; b->opts.shuffle && i > 1; i--) {
        struct nbi_philox r = nbi_philox(b->opts.seed, i, (uint64_t)epoch);
        uint32_t j = (uint32_t)((uint64_t)r.v[0] * i >> 32), kept = b->order[i - 1];
        b->order[i - 1] = b->order[j];
        b->order[j] = kept;
    }
}

/* ---- filling a batch ---- */

/* Puts positions [from, from + count) of the sample into a row, as one of their own; without
 * arrays they are only counted. */
static void put(struct nbi_loader *b, struct nbi_microbatch *out, int64_t row, int64_t from,
                int64_t count)
{
    const struct nbi_example *s = &b->example;
    int64_t at = row * out->T + b->used[row];
    for (int64_t i = 0; i < count && out->ids; i++) {
        bool trained = s->trained[from + i + 1];
        out->ids[at + i] = s->ids.p[from + i];
        out->targets[at + i] = trained ? s->ids.p[from + i + 1] : NBI_IGNORE;
        out->positions[at + i] = (int32_t)i;
        out->example_of[at + i] = b->example_index;
        out->trained += trained;
    }
    b->used[row] += count;
    out->tokens += count;
}

static int64_t space(const struct nbi_loader *b, const struct nbi_microbatch *out, int64_t row)
{
    if (!b->opts.pack && b->used[row] > 0)
        return 0;
    return out->T - b->used[row];
}

/* Puts all of a sample into one row, `need` positions; false: none has room. */
static bool place_whole(struct nbi_loader *b, struct nbi_microbatch *out, int64_t need)
{
    for (int64_t row = 0; row < out->B; row++)
        if (space(b, out, row) >= need) {
            put(b, out, row, 0, need);
            return true;
        }
    return false;
}

/* Puts what is left of a document of `end` positions wherever there is room; false: some of it
 * remains. */
static bool place_document(struct nbi_loader *b, struct nbi_microbatch *out, int64_t end)
{
    int64_t *from = &b->state.token;
    for (int64_t row = 0; row < out->B && *from < end; row++) {
        int64_t room = space(b, out, row), left = end - *from;
        if (room < left && room < SLIVER && b->used[row] > 0)
            continue;
        int64_t count = room < left ? room : left;
        if (count > 0)
            put(b, out, row, *from, count);
        *from += count;
    }
    return *from >= end;
}

static void clear(struct nbi_loader *b, struct nbi_microbatch *out)
{
    out->tokens = out->trained = out->samples = out->truncated = 0;
    memset(b->used, 0, (size_t)b->rows * sizeof *b->used);
    for (int64_t i = 0; i < out->B * out->T && out->ids; i++) {
        out->ids[i] = b->opts.padding;
        out->targets[i] = NBI_IGNORE;
        out->example_of[i] = -1;
    }
}

/* Unused positions see each other and nothing else. */
static void pad(const struct nbi_loader *b, struct nbi_microbatch *out)
{
    for (int64_t row = 0; row < out->B; row++)
        for (int64_t t = b->used[row]; t < out->T; t++)
            out->positions[row * out->T + t] = (int32_t)(t - b->used[row]);
}

static enum nb_status reserve_rows(struct nbi_loader *b, int64_t rows)
{
    NBI_TRY(NBI_ARRAY_RESERVE(b->used, b->capacity, (size_t)rows, "batch rows"));
    b->rows = rows;
    return NB_OK;
}

bool nbi_loader_is_done(const struct nbi_loader *b)
{
    return b->opts.epochs > 0 && b->state.epoch >= b->opts.epochs;
}

/* A document that goes on in this batch is there already. */
static enum nb_status get_sample(struct nbi_loader *b, int64_t index)
{
    if (b->state.token > 0 && b->example_index == index)
        return NB_OK;
    b->example_index = -1;
    NBI_TRY(nbi_dataset_get(b->opts.data, index, &b->example));
    b->example_index = index;
    return NB_OK;
}

/* Places the sample that is next; *done false: it, or some of it, is left for another batch. */
static enum nb_status place_next(struct nbi_loader *b, struct nbi_microbatch *out, bool *done)
{
    int64_t index = b->order[b->state.next], positions = nbi_dataset_tokens(b->opts.data, index);
    bool document = nbi_dataset_is_document(b->opts.data, index) &&
                    !(b->opts.keep_documents && positions <= out->T + 1);
    bool fresh = b->state.token == 0, longer = !document && positions > out->T + 1;
    int64_t before = out->tokens;
    positions = (longer ? out->T + 1 : positions) - 1;
    if (out->ids) {
        NBI_TRY(get_sample(b, index));
        if (longer)
            nbi_example_truncate(&b->example, (size_t)out->T + 1);
    }
    *done = document ? place_document(b, out, positions) : place_whole(b, out, positions);
    out->samples += fresh && out->tokens > before;
    out->truncated += longer && *done;
    return NB_OK;
}

/* Fills rows until one sample has no room, or the border of an epoch that counts. */
static enum nb_status fill(struct nbi_loader *b, struct nbi_microbatch *out)
{
    int64_t n = nbi_dataset_stats(b->opts.data)->samples;
    bool done = true, border = false;
    NBI_TRY(reserve_rows(b, out->B));
    clear(b, out);
    while (!nbi_loader_is_done(b) && !border) {
        nbi_loader_order(b, b->state.epoch);
        NBI_TRY(place_next(b, out, &done));
        if (!done)
            break;
        b->state.token = 0;
        if (++b->state.next == n) {
            b->state.next = 0;
            b->state.epoch++;
            border = b->opts.epochs > 0;
        }
    }
    return NB_OK;
}

enum nb_status nbi_loader_next(struct nbi_loader *b, struct nbi_microbatch *out, bool *more)
{
    NBI_TRY(fill(b, out));
    pad(b, out);
    *more = out->tokens > 0;
    return NB_OK;
}

enum nb_status nbi_loader_skip(struct nbi_loader *b, int64_t B, int64_t T)
{
    struct nbi_microbatch out = {.B = B, .T = T};
    return fill(b, &out);
}
