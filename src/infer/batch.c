/* batch.c - sequences that share passes, and the pages of their keys and values.
 *
 * A page holds the keys and values of NBI_PAGE tokens of one sequence, in all layers at the same
 * place. A sequence has a table of its pages, in the order of its tokens; those that nobody has are
 * on a stack. A step takes all pages it needs before it computes anything, and lengths grow after
 * everything went well: so a failure needs only its pages back. */
#include "infer/batch.h"

#include <math.h>
#include <string.h>

#define SEQUENCES_MAX 65535

/* Parts of up to so many tokens do not gain by being looked at together. */
#define SHORT_INPUT_TOKENS 8

struct sequence {
    bool open;
    int64_t length;
    int64_t pages;  /* that it has */
    int32_t *table; /* [of a sequence at most] */
    int64_t step;   /* the last one that it had a part in */
};

/* Tokens [from, from + count) of a part: what a pass has of it. */
struct share {
    struct nb_batch_input *part;
    int64_t from, count;
};

struct nb_batch {
    const struct nb_engine *engine;
    struct nb_batch_opts opts; /* with nothing left to choose */
    int64_t pages;             /* of the pool */
    bool batch_invariant;      /* the device has to be asked for the same bits */
    int64_t together;          /* rows of a pass that sequences may share then */
    struct nbi_stream *stream;
    struct nbi_acts acts;
    struct nbi_ptr cache;   /* all layers' keys and values */
    struct nbi_kv_view *kv; /* [layers] */
    struct sequence *sequences;
    int32_t *tables; /* of all sequences */
    int32_t *unused; /* [pages], the pool */
    int64_t unused_count;
    int64_t steps;
    struct share *shares;            /* [sequences] of the pass at hand */
    struct nb_batch_input **wanting; /* [sequences], by row of logits */
    int32_t *numbers;                /* of a pass: */
    int32_t *ids, *positions, *kv_rows, *first, *last, *table_at; /* [chunk] */
    int32_t *rows;                                                /* [sequences] */
    int32_t *table;                                               /* [pages] */
    int32_t *topk; /* [sequences]: what nbi_execute_topk leaves */
};

/* ---- sizes ---- */

static int64_t pages_for(int64_t tokens)
{
    return (tokens + NBI_PAGE - 1) / NBI_PAGE;
}

static enum nbi_dtype type_of(enum nb_kv_dtype kv)
{
    static const enum nbi_dtype types[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};
    return types[kv];
}

/* Bytes of one layer's keys. */
static int64_t layer_bytes(const struct nbi_config *c, const struct nb_batch_opts *o)
{
    int64_t values = pages_for(o->tokens) * NBI_PAGE * c->kv_heads * c->head_dim;
    return (int64_t)nbi_dtype_bytes(type_of(o->kv), values);
}

static struct nbi_acts_opts acts_for(const struct nb_batch_opts *o)
{
    return (struct nbi_acts_opts){.N = o->chunk,
                                  .M = o->sequences,
                                  .page_count = pages_for(o->tokens),
                                  .topk_rows = o->sequences};
}

/* int32 of b->numbers. */
static int64_t numbers_for(const struct nb_batch_opts *o)
{
    return 6 * o->chunk + o->sequences + pages_for(o->tokens);
}

static enum nb_status check_opts(const struct nbi_config *c, const struct nb_batch_opts *o)
{
    if ((unsigned)o->kv > NB_KV_F8)
        return nbi_fail(NB_EINVAL, "an unknown kind of cache");
    if (o->sequences < 1 || o->sequences > SEQUENCES_MAX)
        return nbi_fail(NB_EINVAL, "%lld sequences; 1 to %d are possible", (long long)o->sequences,
                        SEQUENCES_MAX);
    if (o->context < 0 || o->tokens < 0 || o->chunk < 0)
        return nbi_fail(NB_EINVAL, "a context of %lld tokens, %lld in all, %lld a step",
                        (long long)o->context, (long long)o->tokens, (long long)o->chunk);
    if (o->context > c->max_position)
        return nbi_fail(NB_EVALUE, "a context of %lld tokens; the model was made for %lld",
                        (long long)o->context, (long long)c->max_position);
    if (o->chunk > 0 && o->chunk < o->sequences)
        return nbi_fail(NB_EINVAL, "a step of %lld tokens has no room for %lld sequences",
                        (long long)o->chunk, (long long)o->sequences);
    return NB_OK;
}

/* The options with all choices made. Rows of the stores are numbers of 32 bits. */
static enum nb_status complete(const struct nb_engine *engine, const struct nb_batch_opts *opts,
                               struct nb_batch_opts *o)
{
    const struct nbi_config *c = &engine->config;
    NBI_TRY(check_opts(c, opts));
    *o = *opts;
    if (o->context == 0)
        o->context = c->max_position < 4096 ? c->max_position : 4096;
    if (o->tokens == 0)
        o->tokens = o->sequences * pages_for(o->context) * NBI_PAGE;
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
                              struct nbi_session_plan *plan)
{
    const struct nbi_config *c = &engine->config;
    struct nb_batch_opts o;
    NBI_TRY(complete(engine, opts, &o));
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, o.chunk, false);
    const struct nbi_acts_opts room = acts_for(&o);
    int64_t tables = o.sequences * pages_for(o.context) + pages_for(o.tokens);
    plan->scratch = engine->be->stream_bytes(engine->be, &limits);
    plan->kv = 2 * c->layers * layer_bytes(c, &o);
    plan->activations = nbi_acts_bytes(c, &room);
    plan->host = (int64_t)sizeof(struct nb_batch) +
                 o.sequences * (int64_t)(sizeof(struct sequence) + sizeof(struct share) +
                                         sizeof(struct nb_batch_input *)) +
                 (tables + numbers_for(&o)) * (int64_t)sizeof(int32_t) +
                 nbi_topk_bytes(o.sequences, NBI_TOPK_MAX) +
                 c->layers * (int64_t)sizeof(struct nbi_kv_view) + nbi_acts_host_bytes(c, &room);
    return NB_OK;
}

/* ---- open and close ---- */

static enum nb_status make_host(struct nb_batch *b)
{
    const struct nb_batch_opts *o = &b->opts;
    size_t n = (size_t)o->sequences, chunk = (size_t)o->chunk;
    int64_t each = pages_for(o->context);
    b->sequences = calloc(n, sizeof *b->sequences);
    b->shares = calloc(n, sizeof *b->shares);
    b->wanting = calloc(n, sizeof *b->wanting);
    b->tables = malloc(n * (size_t)each * sizeof *b->tables);
    b->unused = malloc((size_t)b->pages * sizeof *b->unused);
    b->numbers = malloc((size_t)numbers_for(o) * sizeof *b->numbers);
    b->topk = malloc((size_t)nbi_topk_bytes(o->sequences, NBI_TOPK_MAX));
    b->kv = calloc((size_t)b->engine->config.layers, sizeof *b->kv);
    if (!b->sequences || !b->shares || !b->wanting || !b->tables || !b->unused || !b->numbers ||
        !b->topk || !b->kv)
        return nbi_fail_memory("batch", n * (size_t)each * sizeof *b->tables);
    int32_t **const parts[] = {&b->ids,  &b->positions, &b->kv_rows, &b->first,
                               &b->last, &b->table_at,  &b->rows};
    for (size_t i = 0; i < 7; i++)
        *parts[i] = b->numbers + i * chunk;
    b->table = b->rows + n;
    for (size_t i = 0; i < n; i++)
        b->sequences[i].table = b->tables + i * (size_t)each;
    for (int64_t i = 0; i < b->pages; i++) /* the first is taken first */
        b->unused[i] = (int32_t)(b->pages - 1 - i);
    b->unused_count = b->pages;
    return NB_OK;
}

static enum nb_status make_device(struct nb_batch *b)
{
    struct nbi_backend *be = b->engine->be;
    const struct nbi_config *c = &b->engine->config;
    int64_t bytes = layer_bytes(c, &b->opts);
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, b->opts.chunk, false);
    const struct nbi_acts_opts room = acts_for(&b->opts);
    NBI_TRY(be->stream_new(be, &limits, &b->stream));
    NBI_TRY(nbi_acts_init(&b->acts, be, c, &room));
    NBI_TRY(be->alloc(be, "key/value cache", 2 * c->layers * bytes, &b->cache));
    for (int64_t i = 0; i < c->layers; i++)
        b->kv[i] =
            (struct nbi_kv_view){nbi_ptr_add(b->cache, 2 * i * bytes),
                                 nbi_ptr_add(b->cache, (2 * i + 1) * bytes), type_of(b->opts.kv)};
    return NB_OK;
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

enum nb_status nb_batch_open(struct nb_batch **out, const struct nb_engine *engine,
                             const struct nb_batch_opts *opts)
{
    struct nb_batch_opts o;
    *out = NULL;
    NBI_TRY(complete(engine, opts, &o));
    struct nb_batch *b = calloc(1, sizeof *b);
    if (!b)
        return nbi_fail_memory("batch", sizeof *b);
    b->engine = engine;
    b->opts = o;
    b->pages = pages_for(o.tokens);
    b->batch_invariant = o.deterministic;
    b->together = o.chunk;
    if (engine->be->batch_variant)
        b->together = o.exact || all_nvfp4(&engine->weights) ? engine->be->batch_invariant_rows : 1;
    enum nb_status rc = make_host(b);
    if (rc == NB_OK)
        rc = make_device(b);
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
    struct nbi_backend *be = b->engine->be;
    be->free(be, b->cache);
    nbi_acts_release(&b->acts);
    be->stream_free(b->stream);
    free(b->kv);
    free(b->sequences);
    free(b->shares);
    free(b->wanting);
    free(b->tables);
    free(b->unused);
    free(b->numbers);
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
                                   .free = b->unused_count};
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

/* Gives back what is behind the first `tokens` tokens. */
static void give_pages(struct nb_batch *b, struct sequence *s, int64_t tokens)
{
    while (s->pages > pages_for(tokens))
        b->unused[b->unused_count++] = s->table[--s->pages];
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
    give_pages(b, s, 0);
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
    give_pages(b, s, length);
    return NB_OK;
}

int64_t nb_batch_length(const struct nb_batch *b, int64_t sequence)
{
    const struct sequence *s = find(b, sequence);
    return s ? s->length : -1;
}

/* ---- passes ---- */

static bool wants(const struct nb_batch_input *part)
{
    return part->logits || part->topk > 0;
}

/* The tokens of a share from n on; its table at `pages`. How many page numbers that are. */
static int64_t put_share(struct nb_batch *b, const struct share *share, int64_t n, int64_t pages)
{
    const struct sequence *s = &b->sequences[share->part->sequence];
    int64_t start = s->length + share->from, numbers = pages_for(start + share->count);
    memcpy(b->ids + n, share->part->ids + share->from, (size_t)share->count * sizeof *b->ids);
    memcpy(b->table + pages, s->table, (size_t)numbers * sizeof *b->table);
    for (int64_t i = 0; i < share->count; i++, n++) {
        int64_t at = start + i;
        b->positions[n] = b->last[n] = (int32_t)at;
        b->first[n] = 0;
        b->kv_rows[n] = (int32_t)(s->table[at / NBI_PAGE] * NBI_PAGE + at % NBI_PAGE);
        b->table_at[n] = (int32_t)pages;
    }
    return numbers;
}

/* The pass over b->shares, the short ones first. A share that ends a part gives a row of logits if
 * those are wanted. */
static struct nbi_pass lay_out(struct nb_batch *b, int64_t count)
{
    struct nbi_pass p = {.ids = b->ids,
                         .positions = b->positions,
                         .kv_rows = b->kv_rows,
                         .first = b->first,
                         .last = b->last,
                         .pages = b->table,
                         .tables = b->table_at,
                         .rows = b->rows,
                         .kv = b->kv,
                         .exact = b->opts.exact,
                         .batch_invariant = b->batch_invariant,
                         .one_row_per_sequence = true};
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < count; i++) {
            const struct share *share = &b->shares[i];
            if ((share->count > SHORT_INPUT_TOKENS) != pass)
                continue;
            p.page_count += put_share(b, share, p.N, p.page_count);
            p.N += share->count;
            p.one_row_per_sequence = p.one_row_per_sequence && share->count == 1;
            if (wants(share->part) && share->from + share->count == share->part->count) {
                b->wanting[p.M] = share->part;
                b->rows[p.M++] = (int32_t)(p.N - 1);
            }
        }
        if (pass == 0)
            p.decode_rows = p.N;
    }
    return p;
}

/* What the M rows of logits on the device are wanted for. */
static enum nb_status fetch(struct nb_batch *b, int64_t M)
{
    struct nbi_backend *be = b->engine->be;
    int64_t J = 0, row = b->engine->config.vocab_size * (int64_t)sizeof(float);
    for (int64_t i = 0; i < M; i++)
        J = b->wanting[i]->topk > J ? b->wanting[i]->topk : J;
    if (J > 0) {
        NBI_TRY(nbi_execute_topk(&b->engine->weights, &b->acts, b->stream, M, J));
        NBI_TRY(be->download(b->stream, b->topk, b->acts.topk, nbi_topk_bytes(M, J)));
    }
    for (int64_t i = 0; i < M; i++)
        if (b->wanting[i]->logits)
            NBI_TRY(be->download(b->stream, b->wanting[i]->logits,
                                 nbi_ptr_add(b->acts.logits, i * row), row));
    NBI_TRY(be->sync(b->stream));
    for (int64_t i = 0; i < M; i++) {
        struct nb_batch_input *part = b->wanting[i];
        struct nb_candidate best[NBI_TOPK_MAX];
        if (part->topk == 0)
            continue;
        part->nonfinite = !nbi_topk_row(best, b->topk, i, M, J);
        for (int64_t j = 0; j < part->topk; j++)
            part->candidates[j] = part->nonfinite ? (struct nb_candidate){NAN, -1} : best[j];
    }
    return NB_OK;
}

/* Over the first `count` of b->shares. */
static enum nb_status run_pass(struct nb_batch *b, int64_t count)
{
    const struct nbi_pass p = lay_out(b, count);
    NBI_TRY(nbi_check_interrupt());
    NBI_TRY(nbi_execute(&b->engine->weights, &b->acts, b->stream, &p));
    return fetch(b, p.M);
}

/* A part by itself, in pieces that end at multiples of the chunk. */
static enum nb_status run_alone(struct nb_batch *b, struct nb_batch_input *part)
{
    int64_t length = b->sequences[part->sequence].length, chunk = b->opts.chunk;
    for (int64_t from = 0, n; from < part->count; from += n) {
        int64_t left = chunk - (length + from) % chunk;
        n = part->count - from < left ? part->count - from : left;
        b->shares[0] = (struct share){part, from, n};
        NBI_TRY(run_pass(b, 1));
    }
    return NB_OK;
}

/* Passes in which no sequence can tell whether there are others. */
static enum nb_status run_steady(struct nb_batch *b, struct nb_batch_input *parts, int64_t count)
{
    int64_t shares = 0, rows = 0;
    for (int64_t i = 0; i < count; i++)
        if (parts[i].count > b->together || parts[i].count > b->opts.chunk)
            NBI_TRY(run_alone(b, &parts[i]));
    for (int64_t i = 0; i < count; i++) {
        if (parts[i].count > b->together || parts[i].count > b->opts.chunk)
            continue;
        if (rows + parts[i].count > b->together || rows + parts[i].count > b->opts.chunk) {
            NBI_TRY(run_pass(b, shares));
            shares = rows = 0;
        }
        b->shares[shares++] = (struct share){&parts[i], 0, parts[i].count};
        rows += parts[i].count;
    }
    return shares > 0 ? run_pass(b, shares) : NB_OK;
}

/* A GPU looks at tokens of large parts side by side, and what is not finite in one sequence is to
 * stay there: a pass has one of them, *first. */
static bool goes_alone(const struct nb_batch *b, const struct nb_batch_input *part,
                       const struct nb_batch_input **first)
{
    if (!b->engine->be->batch_variant || part->count <= SHORT_INPUT_TOKENS)
        return false;
    if (!*first)
        *first = part;
    return part != *first;
}

static enum nb_status run(struct nb_batch *b, struct nb_batch_input *parts, int64_t count)
{
    if (b->batch_invariant)
        return run_steady(b, parts, count);
    int64_t shares = 0;
    const struct nb_batch_input *whole = NULL;
    for (int64_t i = 0; i < count; i++)
        if (!goes_alone(b, &parts[i], &whole))
            b->shares[shares++] = (struct share){&parts[i], 0, parts[i].count};
    NBI_TRY(run_pass(b, shares));
    for (int64_t i = 0; i < count; i++)
        if (goes_alone(b, &parts[i], &whole)) {
            b->shares[0] = (struct share){&parts[i], 0, parts[i].count};
            NBI_TRY(run_pass(b, 1));
        }
    return NB_OK;
}

/* ---- steps ---- */

static enum nb_status check_part(struct nb_batch *b, const struct nb_batch_input *part)
{
    int64_t V = b->engine->config.vocab_size;
    struct sequence *s = find(b, part->sequence);
    if (!s)
        return no_sequence(part->sequence);
    if (s->step == b->steps)
        return nbi_fail(NB_EINVAL, "sequence %lld has two parts in a step",
                        (long long)part->sequence);
    s->step = b->steps;
    if (part->count < 1 || !part->ids)
        return nbi_fail(NB_EINVAL, "%lld tokens for sequence %lld", (long long)part->count,
                        (long long)part->sequence);
    if (part->topk < 0 || part->topk > NBI_TOPK_MAX || part->topk > V ||
        (part->topk > 0 && !part->candidates))
        return nbi_fail(NB_EINVAL, "the %lld best logits for sequence %lld", (long long)part->topk,
                        (long long)part->sequence);
    if (part->count > b->opts.context - s->length)
        return nbi_fail(NB_EVALUE,
                        "%lld tokens after %lld of sequence %lld do not fit the context of %lld",
                        (long long)part->count, (long long)s->length, (long long)part->sequence,
                        (long long)b->opts.context);
    for (int64_t i = 0; i < part->count; i++)
        if (part->ids[i] < 0 || part->ids[i] >= V)
            return nbi_fail(NB_EVALUE, "token id %d is outside the vocabulary of %lld",
                            part->ids[i], (long long)V);
    return NB_OK;
}

/* How many pages the parts need that their sequences do not have. */
static enum nb_status check_parts(struct nb_batch *b, const struct nb_batch_input *parts,
                                  int64_t count, int64_t *pages)
{
    int64_t tokens = 0;
    if (!parts || count < 1 || count > b->opts.sequences)
        return nbi_fail(NB_EINVAL, "a step of %lld parts", (long long)count);
    *pages = 0;
    b->steps++;
    for (int64_t i = 0; i < count; i++) {
        NBI_TRY(check_part(b, &parts[i]));
        const struct sequence *s = &b->sequences[parts[i].sequence];
        *pages += pages_for(s->length + parts[i].count) - s->pages;
        tokens += parts[i].count;
    }
    if (tokens > b->opts.chunk && !b->batch_invariant)
        return nbi_fail(NB_EVALUE, "%lld tokens for a step, which has room for %lld",
                        (long long)tokens, (long long)b->opts.chunk);
    if (*pages > b->unused_count)
        return nbi_fail(NB_ENOMEM,
                        "%lld more pages of %d tokens are needed, and of %lld there are %lld left; "
                        "a sequence can be dropped",
                        (long long)*pages, NBI_PAGE, (long long)b->pages,
                        (long long)b->unused_count);
    return NB_OK;
}

enum nb_status nb_batch_step(struct nb_batch *b, struct nb_batch_input *parts, int64_t count)
{
    int64_t pages;
    NBI_TRY(check_parts(b, parts, count, &pages));
    for (int64_t i = 0; i < count; i++) {
        struct sequence *s = &b->sequences[parts[i].sequence];
        parts[i].nonfinite = false;
        while (s->pages < pages_for(s->length + parts[i].count))
            s->table[s->pages++] = b->unused[--b->unused_count];
    }
    enum nb_status rc = run(b, parts, count);
    for (int64_t i = 0; i < count; i++) {
        struct sequence *s = &b->sequences[parts[i].sequence];
        if (rc == NB_OK)
            s->length += parts[i].count;
        else
            give_pages(b, s, s->length);
    }
    return rc;
}
