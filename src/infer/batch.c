/* batch.c - sequences that share passes, and the pages of their keys and values.
 *
 * A page has room for NBI_PAGE tokens of one sequence, in every layer at the same place. Each
 * sequence has a table of its pages in the order of its tokens; free pages are on a stack. A step
 * first checks its inputs: those that it accepts take their pages. Then it computes, and lengths
 * grow last. So an input that fails, or all of them, only have to return their pages. */
#include "infer/batch.h"

#include <math.h>
#include <string.h>

#include "backend/ops.h"
#include "infer/sampler.h"

#define SEQUENCES_MAX 65535

/* Rows of inputs up to this long share too few keys for tiled attention to gain from it. */
#define SHORT_INPUT_TOKENS 8

struct sequence {
    bool open;
    int64_t length;
    int64_t pages;  /* entries of table */
    int32_t *table; /* [pages of a context] */
    int64_t step;   /* the last step that it had an input in */
};

/* Tokens [from, from + count) of an input, as far as they are in one pass. */
struct slice {
    struct nb_batch_input *input;
    int64_t from, count;
};

struct nb_batch {
    const struct nb_engine *engine;
    struct nb_batch_opts opts; /* with all defaults filled in */
    int64_t pages;             /* of the pool */
    int64_t invariant_rows;    /* if deterministic: rows that sequences may share in a pass */
    struct nbi_stream *stream;
    struct nbi_acts acts;
    struct nbi_kv_cache kv;
    struct sequence *sequences;
    int32_t *tables;     /* of all sequences */
    int32_t *free_pages; /* [pages] a stack */
    int64_t free_count;
    int64_t steps;
    struct nb_batch_input **accepted; /* [sequences], inputs of the current step */
    int64_t accepted_count;
    struct slice *slices;            /* [sequences], of the current pass */
    struct nb_batch_input **outputs; /* [sequences], the input that each row of logits is for */
    int32_t *indices;                /* one block for the arrays of a pass: */
    int32_t *ids, *positions, *kv_rows, *first, *last, *table_at; /* [chunk] */
    int32_t *rows;                                                /* [sequences] */
    int32_t *page_list;                                           /* [pages] */
    int32_t *topk; /* for all sequences, as nbi_execute_topk() leaves it */
};

/* ---- sizes ---- */

static struct nbi_acts_opts acts_opts(const struct nb_batch_opts *o)
{
    return (struct nbi_acts_opts){.N = o->chunk,
                                  .M = o->sequences,
                                  .page_count = nbi_kv_pages(o->tokens),
                                  .topk_rows = o->sequences};
}

/* Elements of b->indices. */
static int64_t index_count(const struct nb_batch_opts *o)
{
    return 6 * o->chunk + o->sequences + nbi_kv_pages(o->tokens);
}

static enum nb_status check_opts(const struct nbi_config *c, const struct nb_batch_opts *o)
{
    enum nbi_dtype kv;
    NBI_TRY(nbi_kv_dtype(o->kv, &kv));
    if (o->sequences < 1 || o->sequences > SEQUENCES_MAX)
        return nbi_fail(NB_EINVAL, "%lld sequences; 1 to %d are possible", (long long)o->sequences,
                        SEQUENCES_MAX);
    if (o->context < 0 || o->tokens < 0 || o->chunk < 0)
        return nbi_fail(NB_EINVAL, "a context of %lld tokens, %lld in all, %lld a step",
                        (long long)o->context, (long long)o->tokens, (long long)o->chunk);
    NBI_TRY(nbi_check_context(c, o->context));
    if (o->chunk > 0 && o->chunk < o->sequences)
        return nbi_fail(NB_EINVAL, "a step of %lld tokens has no room for %lld sequences",
                        (long long)o->chunk, (long long)o->sequences);
    return NB_OK;
}

/* Rows of the cache must fit 32 bits. */
enum nb_status nbi_batch_defaults(const struct nb_engine *engine, const struct nb_batch_opts *opts,
                                  struct nb_batch_opts *o)
{
    const struct nbi_config *c = &engine->config;
    NBI_TRY(check_opts(c, opts));
    *o = *opts;
    o->context = nbi_context_or_default(c, o->context);
    if (o->tokens == 0)
        o->tokens = o->sequences * nbi_kv_pages(o->context) * NBI_PAGE;
    if (o->tokens > INT32_MAX - NBI_PAGE)
        return nbi_fail(NB_EVALUE, "%lld tokens in all; %d are possible", (long long)o->tokens,
                        INT32_MAX - NBI_PAGE);
    if (o->chunk == 0)
        o->chunk = engine->be->chunk;
    if (o->chunk > o->tokens)
        o->chunk = o->tokens;
    if (o->chunk < o->sequences)
        o->chunk = o->sequences;
    return NB_OK;
}

enum nb_status nbi_batch_plan(const struct nb_engine *engine, const struct nb_batch_opts *opts,
                              struct nbi_memory_plan *plan)
{
    struct nb_batch_opts o;
    NBI_TRY(nbi_batch_defaults(engine, opts, &o));
    const struct nbi_acts_opts acts = acts_opts(&o);
    int64_t pages = nbi_kv_pages(o.tokens);
    int64_t tables = o.sequences * nbi_kv_pages(o.context) + pages;
    int64_t per_sequence = (int64_t)(sizeof(struct sequence) + sizeof(struct slice) +
                                     2 * sizeof(struct nb_batch_input *));
    int64_t host = (int64_t)sizeof(struct nb_batch) + o.sequences * per_sequence +
                   (tables + index_count(&o)) * (int64_t)sizeof(int32_t) +
                   nbi_topk_bytes(o.sequences, NBI_TOPK_MAX);
    nbi_memory_plan(engine, &acts, nbi_kv_types[o.kv].dtype, pages * NBI_PAGE, host, plan);
    return NB_OK;
}

/* ---- open and close ---- */

static enum nb_status init(struct nb_batch *b)
{
    struct nbi_backend *be = b->engine->be;
    const struct nbi_config *c = &b->engine->config;
    const struct nb_batch_opts *o = &b->opts;
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, o->chunk, false);
    const struct nbi_acts_opts acts = acts_opts(o);
    size_t n = (size_t)o->sequences, chunk = (size_t)o->chunk;
    size_t table_pages = (size_t)nbi_kv_pages(o->context);
    b->sequences = calloc(n, sizeof *b->sequences);
    b->accepted = calloc(n, sizeof(struct nb_batch_input *));
    b->slices = calloc(n, sizeof *b->slices);
    b->outputs = calloc(n, sizeof *b->outputs);
    b->tables = malloc(n * table_pages * sizeof *b->tables);
    b->free_pages = malloc((size_t)b->pages * sizeof *b->free_pages);
    b->indices = malloc((size_t)index_count(o) * sizeof *b->indices);
    b->topk = malloc((size_t)nbi_topk_bytes(o->sequences, NBI_TOPK_MAX));
    if (!b->sequences || !b->accepted || !b->slices || !b->outputs || !b->tables ||
        !b->free_pages || !b->indices || !b->topk)
        return nbi_fail_memory("batch", n * table_pages * sizeof *b->tables);
    int32_t **const arrays[] = {&b->ids,  &b->positions, &b->kv_rows, &b->first,
                                &b->last, &b->table_at,  &b->rows};
    for (size_t i = 0; i < 7; i++)
        *arrays[i] = b->indices + i * chunk;
    b->page_list = b->rows + n;
    for (size_t i = 0; i < n; i++)
        b->sequences[i].table = b->tables + i * table_pages;
    for (int64_t i = 0; i < b->pages; i++) /* page 0 on top */
        b->free_pages[i] = (int32_t)(b->pages - 1 - i);
    b->free_count = b->pages;
    NBI_TRY(be->stream_new(be, &limits, &b->stream));
    NBI_TRY(nbi_acts_init(&b->acts, be, c, &acts));
    return nbi_kv_cache_init(&b->kv, be, c, nbi_kv_types[o->kv].dtype, b->pages * NBI_PAGE);
}

static bool all_nvfp4(const struct nbi_weights *w)
{
    bool all = w->head.dtype == NBI_NVFP4;
    for (int64_t i = 0; i < nbi_param_count(w->config) && all; i++) {
        struct nbi_param p;
        nbi_param_at(w->config, i, &p);
        all = !(p.def->flags & NBI_QUANT) || nbi_param_weight(w, &p)->dtype == NBI_NVFP4;
    }
    return all;
}

/* A backend whose products depend on the number of rows guarantees the same bits only up to
 * batch_invariant_rows, and only for exact products or NVFP4 weights. */
bool nbi_batch_shares_passes(const struct nb_engine *e, bool exact)
{
    return nbi_backend_has(e->be, NBI_CAP_BATCH_INVARIANT) || exact || all_nvfp4(&e->weights);
}

/* How many rows the sequences of a batch-invariant pass may share. */
static int64_t invariant_rows(const struct nb_engine *e, const struct nb_batch_opts *o)
{
    if (nbi_backend_has(e->be, NBI_CAP_BATCH_INVARIANT))
        return o->chunk;
    return nbi_batch_shares_passes(e, o->exact) ? e->be->batch_invariant_rows : 1;
}

enum nb_status nb_batch_open(struct nb_batch **out, const struct nb_engine *engine,
                             const struct nb_batch_opts *opts)
{
    struct nb_batch_opts o;
    *out = NULL;
    NBI_TRY(nbi_batch_defaults(engine, opts, &o));
    struct nb_batch *b = calloc(1, sizeof *b);
    if (!b)
        return nbi_fail_memory("batch", sizeof *b);
    b->engine = engine;
    b->opts = o;
    b->pages = nbi_kv_pages(o.tokens);
    b->invariant_rows = invariant_rows(engine, &o);
    enum nb_status rc = init(b);
    if (rc == NB_OK)
        *out = b;
    else
        nb_batch_close(b);
    return rc;
}

void nb_batch_close(struct nb_batch *b)
{
    if (!b)
        return;
    nbi_kv_cache_release(&b->kv);
    nbi_acts_release(&b->acts);
    b->engine->be->stream_free(b->stream);
    free(b->sequences);
    free(b->accepted);
    free(b->slices);
    free(b->outputs);
    free(b->tables);
    free(b->free_pages);
    free(b->indices);
    free(b->topk);
    free(b);
}

/* ---- sequences ---- */

void nb_batch_info(const struct nb_batch *b, struct nb_batch_info *info)
{
    *info = (struct nb_batch_info){.sequences = b->opts.sequences,
                                   .context = b->opts.context,
                                   .chunk = b->opts.chunk,
                                   .page_tokens = NBI_PAGE,
                                   .pages = b->pages,
                                   .free = b->free_count};
    for (int64_t i = 0; i < b->opts.sequences; i++)
        info->open += b->sequences[i].open;
}

static struct sequence *find(const struct nb_batch *b, int64_t sequence)
{
    if (sequence < 0 || sequence >= b->opts.sequences || !b->sequences[sequence].open)
        return NULL;
    return &b->sequences[sequence];
}

static enum nb_status no_sequence(int64_t sequence)
{
    return nbi_fail(NB_EINVAL, "there is no sequence %lld", (long long)sequence);
}

/* Returns the pages that the first `tokens` tokens do not need. */
static void trim_pages(struct nb_batch *b, struct sequence *s, int64_t tokens)
{
    while (s->pages > nbi_kv_pages(tokens))
        b->free_pages[b->free_count++] = s->table[--s->pages];
}

enum nb_status nb_batch_add(struct nb_batch *b, int64_t *sequence)
{
    int64_t i = 0;
    while (i < b->opts.sequences && b->sequences[i].open)
        i++;
    if (i == b->opts.sequences)
        return nbi_fail(NB_EVALUE, "all %lld sequences are in use", (long long)b->opts.sequences);
    b->sequences[i].open = true;
    b->sequences[i].length = 0;
    *sequence = i;
    return NB_OK;
}

enum nb_status nb_batch_drop(struct nb_batch *b, int64_t sequence)
{
    struct sequence *s = find(b, sequence);
    if (!s)
        return no_sequence(sequence);
    trim_pages(b, s, 0);
    s->open = false;
    return NB_OK;
}

enum nb_status nb_batch_truncate(struct nb_batch *b, int64_t sequence, int64_t length)
{
    struct sequence *s = find(b, sequence);
    if (!s)
        return no_sequence(sequence);
    if (length < 0 || length > s->length)
        return nbi_fail(NB_EINVAL, "%lld tokens of sequence %lld, which has %lld",
                        (long long)length, (long long)sequence, (long long)s->length);
    s->length = length;
    trim_pages(b, s, length);
    return NB_OK;
}

int64_t nb_batch_length(const struct nb_batch *b, int64_t sequence)
{
    const struct sequence *s = find(b, sequence);
    return s ? s->length : -1;
}

/* ---- passes ---- */

/* Writes the tokens of a slice to rows n on, and its page table to b->page_list[pages] on. Returns
 * the number of pages. */
static int64_t put_slice(struct nb_batch *b, const struct slice *slice, int64_t n, int64_t pages)
{
    const struct sequence *s = &b->sequences[slice->input->sequence];
    int64_t start = s->length + slice->from, used = nbi_kv_pages(start + slice->count);
    memcpy(b->ids + n, slice->input->ids + slice->from, (size_t)slice->count * sizeof *b->ids);
    memcpy(b->page_list + pages, s->table, (size_t)used * sizeof *b->page_list);
    for (int64_t i = 0; i < slice->count; i++, n++) {
        b->positions[n] = b->last[n] = (int32_t)(start + i);
        b->first[n] = 0;
        b->kv_rows[n] = nbi_kv_paged_row(s->table, start + i);
        b->table_at[n] = (int32_t)pages;
    }
    return used;
}

/* The pass over the first `count` slices, short ones first: they are its decode rows. A slice that
 * ends its input gives a row of logits if the input wants any. */
static struct nbi_pass pass_of(struct nb_batch *b, int64_t count)
{
    struct nbi_pass p = {.ids = b->ids,
                         .positions = b->positions,
                         .kv_rows = b->kv_rows,
                         .first = b->first,
                         .last = b->last,
                         .pages = b->page_list,
                         .tables = b->table_at,
                         .rows = b->rows,
                         .kv = b->kv.views,
                         .matmul = b->opts.exact ? NBI_MATMUL_F32 : NBI_MATMUL_FAST,
                         .batch_invariant = b->opts.deterministic,
                         .one_row_per_sequence = true};
    for (int want_long = 0; want_long < 2; want_long++) {
        for (int64_t i = 0; i < count; i++) {
            const struct slice *slice = &b->slices[i];
            if ((slice->count > SHORT_INPUT_TOKENS) != want_long)
                continue;
            p.page_count += put_slice(b, slice, p.N, p.page_count);
            p.N += slice->count;
            p.one_row_per_sequence = p.one_row_per_sequence && slice->count == 1;
            struct nb_batch_input *input = slice->input;
            bool ends = slice->from + slice->count == input->count;
            if (ends && (input->logits || input->topk > 0)) {
                b->outputs[p.M] = input;
                b->rows[p.M++] = (int32_t)(p.N - 1);
            }
        }
        if (!want_long)
            p.decode_rows = p.N;
    }
    return p;
}

/* Hands row i of M rows of logits, or their k candidates, to the input that wants them. */
static enum nb_status give_output(struct nb_batch *b, int64_t i, int64_t M, int64_t k)
{
    struct nb_batch_input *input = b->outputs[i];
    struct nb_candidate candidates[NBI_TOPK_MAX];
    if (input->topk == 0)
        return nbi_check_logits(input->logits, b->engine->config.vocab_size);
    bool finite = nbi_topk_row(candidates, b->topk, i, M, k);
    for (int64_t j = 0; j < input->topk; j++)
        input->candidates[j] = finite ? candidates[j] : (struct nb_candidate){NAN, -1};
    return finite ? NB_OK : nbi_fail(NB_EVALUE, "the model gave a logit that is not finite");
}

/* Waits for the pass, and copies its M rows of logits, or their candidates, to the inputs that
 * want them. A row that is not finite fails its own input. */
static enum nb_status fetch_outputs(struct nb_batch *b, int64_t M)
{
    struct nbi_backend *be = b->engine->be;
    int64_t k = 0, row = b->engine->config.vocab_size * (int64_t)sizeof(float);
    for (int64_t i = 0; i < M; i++)
        k = b->outputs[i]->topk > k ? b->outputs[i]->topk : k;
    if (k > 0) {
        NBI_TRY(nbi_execute_topk(&b->engine->weights, &b->acts, b->stream, M, k));
        NBI_TRY(be->download(b->stream, b->topk, b->acts.topk, nbi_topk_bytes(M, k)));
    }
    for (int64_t i = 0; i < M; i++)
        if (b->outputs[i]->logits)
            NBI_TRY(be->download(b->stream, b->outputs[i]->logits,
                                 nbi_ptr_add(b->acts.logits, i * row), row));
    NBI_TRY(be->sync(b->stream));
    for (int64_t i = 0; i < M; i++)
        b->outputs[i]->status = nbi_context(give_output(b, i, M, k), "sequence %lld",
                                            (long long)b->outputs[i]->sequence);
    return NB_OK;
}

static enum nb_status run_pass(struct nb_batch *b, int64_t slices)
{
    const struct nbi_pass p = pass_of(b, slices);
    NBI_TRY(nbi_check_interrupt());
    NBI_TRY(nbi_execute(&b->engine->weights, &b->acts, b->stream, &p));
    return fetch_outputs(b, p.M);
}

static struct slice all_of(struct nb_batch_input *input)
{
    return (struct slice){input, 0, input->count};
}

/* An input in passes of its own, which end at multiples of the chunk counted from the start of the
 * sequence. So they are the same however its tokens were divided into inputs. */
static enum nb_status run_chunks(struct nb_batch *b, struct nb_batch_input *input)
{
    int64_t length = b->sequences[input->sequence].length, chunk = b->opts.chunk;
    for (int64_t from = 0, n; from < input->count; from += n) {
        int64_t left = chunk - (length + from) % chunk;
        n = input->count - from < left ? input->count - from : left;
        b->slices[0] = (struct slice){input, from, n};
        NBI_TRY(run_pass(b, 1));
    }
    return NB_OK;
}

/* Passes in which the bits of a sequence do not depend on the others: short inputs share passes of
 * up to b->invariant_rows, long ones have their own. */
static enum nb_status run_batch_invariant(struct nb_batch *b)
{
    int64_t slices = 0, rows = 0;
    int64_t limit = b->invariant_rows < b->opts.chunk ? b->invariant_rows : b->opts.chunk;
    for (int64_t i = 0; i < b->accepted_count; i++)
        if (b->accepted[i]->count > limit)
            NBI_TRY(run_chunks(b, b->accepted[i]));
    for (int64_t i = 0; i < b->accepted_count; i++) {
        struct nb_batch_input *input = b->accepted[i];
        if (input->count > limit)
            continue;
        if (rows + input->count > limit) {
            NBI_TRY(run_pass(b, slices));
            slices = rows = 0;
        }
        b->slices[slices++] = all_of(input);
        rows += input->count;
    }
    return slices > 0 ? run_pass(b, slices) : NB_OK;
}

/* Whether an input must not be in the pass of the others. Tiled attention on a GPU computes rows of
 * neighbouring long inputs together, so a non-finite value of one could reach another. Hence at
 * most one long input shares that pass: *first. */
static bool needs_own_pass(const struct nb_batch *b, const struct nb_batch_input *input,
                           const struct nb_batch_input **first)
{
    if (nbi_backend_has(b->engine->be, NBI_CAP_BATCH_INVARIANT) ||
        input->count <= SHORT_INPUT_TOKENS)
        return false;
    if (!*first)
        *first = input;
    return input != *first;
}

/* Computes all accepted inputs. */
static enum nb_status run(struct nb_batch *b)
{
    if (b->opts.deterministic)
        return run_batch_invariant(b);
    int64_t slices = 0;
    const struct nb_batch_input *first = NULL;
    for (int64_t i = 0; i < b->accepted_count; i++)
        if (!needs_own_pass(b, b->accepted[i], &first))
            b->slices[slices++] = all_of(b->accepted[i]);
    NBI_TRY(run_pass(b, slices));
    for (int64_t i = 0; i < b->accepted_count; i++)
        if (needs_own_pass(b, b->accepted[i], &first)) {
            b->slices[0] = all_of(b->accepted[i]);
            NBI_TRY(run_pass(b, 1));
        }
    return NB_OK;
}

/* ---- steps ---- */

static enum nb_status check_input(struct nb_batch *b, const struct nb_batch_input *input)
{
    int64_t V = b->engine->config.vocab_size;
    struct sequence *s = find(b, input->sequence);
    if (!s)
        return no_sequence(input->sequence);
    if (s->step == b->steps)
        return nbi_fail(NB_EINVAL, "sequence %lld has two inputs in a step",
                        (long long)input->sequence);
    s->step = b->steps;
    if (input->count < 1 || !input->ids)
        return nbi_fail(NB_EINVAL, "%lld tokens for sequence %lld", (long long)input->count,
                        (long long)input->sequence);
    if (input->topk < 0 || input->topk > NBI_TOPK_MAX || input->topk > V ||
        (input->topk > 0 && !input->candidates))
        return nbi_fail(NB_EINVAL, "the %lld best logits for sequence %lld", (long long)input->topk,
                        (long long)input->sequence);
    if (input->count > b->opts.context - s->length)
        return nbi_fail(NB_EVALUE,
                        "%lld tokens after %lld of sequence %lld do not fit the context of %lld",
                        (long long)input->count, (long long)s->length, (long long)input->sequence,
                        (long long)b->opts.context);
    return nbi_context(nbi_engine_check_ids(b->engine, input->ids, input->count), "sequence %lld",
                       (long long)input->sequence);
}

/* Accepts a good input, whose sequence then has all its pages. room: tokens that the step can still
 * take. */
static enum nb_status accept_input(struct nb_batch *b, struct nb_batch_input *input, int64_t room)
{
    NBI_TRY(check_input(b, input));
    struct sequence *s = &b->sequences[input->sequence];
    int64_t pages = nbi_kv_pages(s->length + input->count);
    if (input->count > room)
        return nbi_fail(NB_EVALUE,
                        "%lld tokens for sequence %lld in a step of %lld, which has room for %lld",
                        (long long)input->count, (long long)input->sequence,
                        (long long)b->opts.chunk, (long long)room);
    if (pages - s->pages > b->free_count)
        return nbi_fail(NB_ENOMEM,
                        "sequence %lld needs %lld more pages of %d tokens, and of %lld there are "
                        "%lld left; another sequence can be dropped",
                        (long long)input->sequence, (long long)(pages - s->pages), NBI_PAGE,
                        (long long)b->pages, (long long)b->free_count);
    while (s->pages < pages)
        s->table[s->pages++] = b->free_pages[--b->free_count];
    b->accepted[b->accepted_count++] = input;
    return NB_OK;
}

enum nb_status nb_batch_step(struct nb_batch *b, struct nb_batch_input *inputs, int64_t count)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(b->opts.cancel);
    int64_t room = b->opts.deterministic ? INT64_MAX : b->opts.chunk;
    if (!inputs || count < 1)
        return nbi_fail(NB_EINVAL, "a step of %lld inputs", (long long)count);
    b->steps++;
    b->accepted_count = 0;
    for (int64_t i = 0; i < count; i++) {
        inputs[i].status = accept_input(b, &inputs[i], room);
        if (inputs[i].status == NB_OK)
            room -= inputs[i].count;
    }
    enum nb_status rc = b->accepted_count > 0 ? run(b) : NB_OK;
    for (int64_t i = 0; i < b->accepted_count; i++) {
        struct nb_batch_input *input = b->accepted[i];
        struct sequence *s = &b->sequences[input->sequence];
        if (rc != NB_OK)
            input->status = rc;
        if (input->status == NB_OK)
            s->length += input->count;
        else
            trim_pages(b, s, s->length);
    }
    return rc;
}
