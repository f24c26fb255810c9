/* session.c - tokens, the passes that append them, and the step computed ahead.
 *
 * Where the backend can, it starts the next decode step with the token that it sampled itself,
 * while the host samples the same token. If the two agree, the step is already under way when the
 * token is appended; if not, it is computed again and overwrites the row. `length` is the only
 * truth: rows of the cache beyond it are free to be overwritten. */
#include "infer/session.h"

#include <string.h>

struct nb_session {
    const struct nb_engine *engine;
    struct nb_cancel *cancel;
    struct nbi_session_opts opts; /* with all defaults filled in */
    struct nbi_stream *stream;
    struct nbi_acts acts;
    struct nbi_kv_cache kv;
    int64_t length;
    int32_t *tokens;        /* [context] */
    bool can_run_ahead;     /* after the last pass */
    int64_t ahead_position; /* of the step computed ahead; -1: none */
    int32_t ahead_id;
    int32_t *positions, *kv_rows, *first, *last, *rows; /* [chunk], the arrays of a pass */
    nbi_layer_fn hook;
    void *hook_ctx;
    float *hook_x; /* [chunk, C] */
    int64_t pass_from, pass_rows;
};

struct nbi_snapshot {
    int64_t length, row_bytes, layers;
    enum nbi_dtype kv;
    int32_t *tokens;
    uint8_t *rows; /* as nbi_kv_cache_copy() gives them */
};

/* ---- open and close ---- */

static struct nbi_session_opts with_defaults(const struct nb_engine *engine,
                                             const struct nbi_session_opts *opts)
{
    struct nbi_session_opts o = *opts;
    if (o.chunk <= 0)
        o.chunk = engine->be->chunk;
    if (o.mode == NB_KV_TOKEN)
        o.chunk = 1;
    if (o.mode == NB_KV_NONE || o.chunk > o.context)
        o.chunk = o.context;
    if (o.logits <= 0)
        o.logits = 1;
    if (o.logits > o.chunk)
        o.logits = o.chunk;
    return o;
}

void nbi_session_plan(const struct nb_engine *engine, const struct nbi_session_opts *opts,
                      struct nbi_memory_plan *plan)
{
    const struct nbi_session_opts o = with_defaults(engine, opts);
    const struct nbi_acts_opts acts = {.N = o.chunk, .M = o.logits};
    int64_t ints = o.context + 5 * o.chunk;
    nbi_memory_plan(engine, &acts, o.kv, o.context,
                    (int64_t)sizeof(struct nb_session) + ints * (int64_t)sizeof(int32_t), plan);
}

static enum nb_status init(struct nb_session *s)
{
    struct nbi_backend *be = s->engine->be;
    const struct nbi_config *c = &s->engine->config;
    const struct nbi_session_opts *o = &s->opts;
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, o->chunk, false);
    const struct nbi_acts_opts acts = {.N = o->chunk, .M = o->logits};
    s->tokens = malloc((size_t)o->context * sizeof *s->tokens);
    s->positions = malloc(5 * (size_t)o->chunk * sizeof *s->positions);
    if (!s->tokens || !s->positions)
        return nbi_fail_memory("session", (size_t)o->context * sizeof *s->tokens);
    s->kv_rows = s->positions + o->chunk;
    s->first = s->kv_rows + o->chunk;
    s->last = s->first + o->chunk;
    s->rows = s->last + o->chunk;
    NBI_TRY(be->stream_new(be, &limits, &s->stream));
    NBI_TRY(nbi_acts_init(&s->acts, be, c, &acts));
    NBI_TRY(nbi_kv_cache_init(&s->kv, be, c, o->kv, o->context));
    if (o->exact)
        return NB_OK;
    return nbi_execute_use_megakernel(&s->acts, &s->engine->weights, s->stream, s->kv.views);
}

enum nb_status nbi_session_new(struct nb_session **out, const struct nb_engine *engine,
                               const struct nbi_session_opts *opts)
{
    *out = NULL;
    if (opts->context < 1 || opts->context > INT32_MAX)
        return nbi_fail(NB_EINVAL, "a context of %lld tokens", (long long)opts->context);
    NBI_TRY(nbi_check_context(&engine->config, opts->context));
    struct nb_session *s = calloc(1, sizeof *s);
    if (!s)
        return nbi_fail_memory("session", sizeof *s);
    s->engine = engine;
    s->ahead_position = -1;
    s->opts = with_defaults(engine, opts);
    enum nb_status rc = init(s);
    if (rc == NB_OK)
        *out = s;
    else
        nb_session_close(s);
    return rc;
}

void nb_session_close(struct nb_session *s)
{
    if (!s)
        return;
    s->engine->be->stream_free(s->stream); /* first: a step computed ahead may still be running */
    nbi_acts_release(&s->acts);
    nbi_kv_cache_release(&s->kv);
    free(s->tokens);
    free(s->positions);
    free(s->hook_x);
    free(s);
}

const struct nb_engine *nbi_session_engine(const struct nb_session *s)
{
    return s->engine;
}

int64_t nbi_session_length(const struct nb_session *s)
{
    return s->length;
}

struct nb_cancel *nbi_session_cancel(const struct nb_session *s)
{
    return s->cancel;
}

int64_t nbi_session_context(const struct nb_session *s)
{
    return s->opts.context;
}

const int32_t *nb_session_tokens(const struct nb_session *s, int64_t *count)
{
    if (count)
        *count = s->length;
    return s->tokens;
}

int64_t nbi_session_chunk(const struct nb_session *s)
{
    return s->opts.chunk;
}

void nb_session_truncate(struct nb_session *s, int64_t length)
{
    if (length < s->length)
        s->length = length < 0 ? 0 : length;
}

int64_t nbi_session_reuse(struct nb_session *s, const int32_t *ids, int64_t count)
{
    int64_t same = 0;
    while (same < s->length && same < count - 1 && s->tokens[same] == ids[same])
        same++;
    nb_session_truncate(s, same);
    return same;
}

/* ---- passes ---- */

static enum nb_status call_hook(void *ctx, int64_t layer, struct nbi_ptr x)
{
    struct nb_session *s = ctx;
    struct nbi_backend *be = s->engine->be;
    int64_t bytes = s->pass_rows * s->engine->config.hidden_size * (int64_t)sizeof(float);
    NBI_TRY(be->download(s->stream, s->hook_x, x, bytes));
    NBI_TRY(be->sync(s->stream));
    return s->hook(s->hook_ctx, layer, s->pass_from, s->pass_rows, s->hook_x);
}

/* A pass over s->tokens[from, from + count), the last `rows` of which give logits. */
static struct nbi_pass pass_of(struct nb_session *s, int64_t from, int64_t count, int64_t rows)
{
    for (int64_t i = 0; i < count; i++) {
        s->positions[i] = s->kv_rows[i] = s->last[i] = (int32_t)(from + i);
        s->first[i] = 0;
    }
    for (int64_t i = 0; i < rows; i++)
        s->rows[i] = (int32_t)(count - rows + i);
    return (struct nbi_pass){.N = count,
                             .ids = s->tokens + from,
                             .positions = s->positions,
                             .kv_rows = s->kv_rows,
                             .first = s->first,
                             .last = s->last,
                             .M = rows,
                             .rows = s->rows,
                             .kv = s->kv.views,
                             .matmul = s->opts.exact ? NBI_MATMUL_F32 : NBI_MATMUL_FAST,
                             .one_row_per_sequence = count == 1,
                             .after_layer = s->hook ? call_hook : NULL,
                             .ctx = s};
}

/* Runs that pass, unless it was computed ahead. With logits NULL they stay on the device, and the
 * pass may still be running on return. */
static enum nb_status run_pass(struct nb_session *s, int64_t from, int64_t count, float *logits,
                               int64_t rows)
{
    const struct nbi_config *c = &s->engine->config;
    struct nbi_backend *be = s->engine->be;
    const struct nbi_pass p = pass_of(s, from, count, rows);
    bool computed_ahead =
        s->ahead_position == from && count == 1 && s->ahead_id == s->tokens[from] && !s->hook;
    s->pass_from = from;
    s->pass_rows = count;
    s->ahead_position = -1;
    s->can_run_ahead = s->opts.mode != NB_KV_NONE && nbi_execute_can_run_ahead(&s->acts, &p);
    if (!computed_ahead)
        NBI_TRY(nbi_execute(&s->engine->weights, &s->acts, s->stream, &p));
    if (rows > 0 && !logits)
        return NB_OK;
    if (rows > 0)
        NBI_TRY(be->download(s->stream, logits, s->acts.logits,
                             rows * c->vocab_size * (int64_t)sizeof(float)));
    return be->sync(s->stream);
}

static enum nb_status check_ids(const struct nb_session *s, const int32_t *ids, int64_t count)
{
    NBI_TRY(nbi_engine_check_ids(s->engine, ids, count));
    if (count > s->opts.context - s->length)
        return nbi_fail(
            NB_EVALUE,
            "%lld tokens after %lld do not fit the context of %lld; a longer one can be requested",
            (long long)count, (long long)s->length, (long long)s->opts.context);
    return NB_OK;
}

static enum nb_status append(struct nb_session *s, const int32_t *ids, int64_t count, float *logits,
                             int64_t rows)
{
    if (count < 0 || (count == 0 && rows > 0))
        return nbi_fail(NB_EINVAL, "%lld tokens to append", (long long)count);
    NBI_TRY(check_ids(s, ids, count));
    NBI_BUG_IF(rows > count);
    memmove(s->tokens + s->length, ids, (size_t)count * sizeof *ids);
    int64_t from = s->opts.mode == NB_KV_NONE ? 0 : s->length, end = s->length + count;
    int64_t V = s->engine->config.vocab_size;
    for (int64_t n; from < end; from += n) {
        n = end - from < s->opts.chunk ? end - from : s->opts.chunk;
        /* Logits are wanted from token end - rows on. If this pass would have more rows of them
         * than it may, it is made shorter. */
        int64_t wanted = from + n - (end - rows);
        wanted = wanted > n ? n : wanted;
        if (wanted > s->opts.logits) {
            n -= wanted - s->opts.logits;
            wanted = s->opts.logits;
        }
        wanted = wanted < 0 ? 0 : wanted;
        NBI_TRY(run_pass(s, from, n,
                         logits ? logits + (rows - (end - from - n) - wanted) * V : NULL, wanted));
        NBI_TRY(nbi_check_interrupt());
    }
    s->length = end;
    return NB_OK;
}

enum nb_status nbi_session_append(struct nb_session *s, const int32_t *ids, int64_t count,
                                  float *logits, int64_t rows)
{
    return append(s, ids, count, logits, logits ? rows : 0);
}

/* ---- candidates ---- */

static enum nb_status fail_nonfinite(void)
{
    return nbi_fail(NB_EVALUE, "the model gave a logit that is not finite");
}

/* The candidates of the last pass, while the device starts the step of the one that it draws. */
static enum nb_status fetch_and_run_ahead(struct nb_session *s, struct nbi_logits_spec *spec)
{
    const struct nbi_pass p = pass_of(s, s->length, 1, 1);
    struct nbi_run_ahead r = {.k = spec->k, .draw = spec->draw};
    NBI_TRY(nbi_execute_run_ahead(&s->engine->weights, &s->acts, s->stream, &p, &r));
    if (r.nonfinite)
        return fail_nonfinite();
    memcpy(spec->candidates, r.candidates, (size_t)r.k * sizeof *r.candidates);
    spec->draw.unit = 0;
    s->ahead_position = s->length;
    s->ahead_id = r.id;
    return NB_OK;
}

/* The candidates of the last pass, whose logits are on the device. */
static enum nb_status fetch_candidates(struct nb_session *s, struct nbi_logits_spec *spec)
{
    struct nbi_backend *be = s->engine->be;
    int32_t topk[1 + 2 * NBI_TOPK_MAX];
    bool draw_known = spec->k == 1 || spec->draw.unit > 0;
    if (s->can_run_ahead && draw_known && s->length < s->opts.context)
        return fetch_and_run_ahead(s, spec);
    NBI_TRY(nbi_execute_topk(&s->engine->weights, &s->acts, s->stream, 1, spec->k));
    NBI_TRY(be->download(s->stream, topk, s->acts.topk, nbi_topk_bytes(1, spec->k)));
    NBI_TRY(be->sync(s->stream));
    return nbi_topk_row(spec->candidates, topk, 0, 1, spec->k) ? NB_OK : fail_nonfinite();
}

enum nb_status nbi_session_append_next(struct nb_session *s, const int32_t *ids, int64_t count,
                                       struct nbi_logits_spec *spec)
{
    NBI_TRY(append(s, ids, count, spec->logits, 1));
    return spec->logits ? NB_OK : fetch_candidates(s, spec);
}

/* ---- snapshots ---- */

void nbi_snapshot_free(struct nbi_snapshot *snapshot)
{
    if (!snapshot)
        return;
    free(snapshot->tokens);
    free(snapshot->rows);
    free(snapshot);
}

enum nb_status nbi_session_save(const struct nb_session *s, struct nbi_snapshot **out)
{
    size_t ids = (size_t)s->length * sizeof *s->tokens;
    size_t bytes = (size_t)(2 * s->kv.layers * s->kv.row_bytes * s->length);
    struct nbi_snapshot *p = calloc(1, sizeof *p);
    *out = NULL;
    if (!p)
        return nbi_fail_memory("snapshot", sizeof *p);
    *p = (struct nbi_snapshot){s->length,   s->kv.row_bytes, s->kv.layers,
                               s->kv.dtype, malloc(ids + 1), malloc(bytes + 1)};
    enum nb_status rc = p->tokens && p->rows ? NB_OK : nbi_fail_memory("snapshot", bytes);
    if (rc == NB_OK)
        rc = nbi_kv_cache_copy(&s->kv, s->stream, s->length, p->rows, true);
    if (rc == NB_OK)
        rc = s->engine->be->sync(s->stream);
    if (rc != NB_OK) {
        nbi_snapshot_free(p);
        return rc;
    }
    memcpy(p->tokens, s->tokens, ids);
    *out = p;
    return NB_OK;
}

enum nb_status nbi_session_restore(struct nb_session *s, const struct nbi_snapshot *p)
{
    if (p->row_bytes != s->kv.row_bytes || p->kv != s->kv.dtype || p->layers != s->kv.layers)
        return nbi_fail(NB_EINVAL, "the snapshot is of another kind of session");
    if (p->length > s->opts.context)
        return nbi_fail(NB_EVALUE, "the snapshot has %lld tokens, the context is %lld",
                        (long long)p->length, (long long)s->opts.context);
    s->length = 0;
    s->ahead_position = -1;
    NBI_TRY(nbi_kv_cache_copy(&s->kv, s->stream, p->length, p->rows, false));
    memcpy(s->tokens, p->tokens, (size_t)p->length * sizeof *p->tokens);
    NBI_TRY(s->engine->be->sync(s->stream));
    s->length = p->length;
    return NB_OK;
}

enum nb_status nbi_session_layer_hook(struct nb_session *s, nbi_layer_fn fn, void *ctx)
{
    size_t bytes = (size_t)(s->opts.chunk * s->engine->config.hidden_size) * sizeof *s->hook_x;
    if (fn && !s->hook_x && !(s->hook_x = malloc(bytes)))
        return nbi_fail_memory("watching", bytes);
    s->hook = fn;
    s->hook_ctx = ctx;
    return NB_OK;
}

/* ---- the public interface ---- */

enum nb_status nb_session_open(struct nb_session **out, const struct nb_engine *engine,
                               const struct nb_session_opts *opts)
{
    enum nbi_dtype kv;
    *out = NULL;
    NBI_TRY(nbi_kv_dtype(opts->kv, &kv));
    if ((unsigned)opts->mode > NB_KV_NONE)
        return nbi_fail(NB_EINVAL, "an unknown kind of cache");
    const struct nbi_session_opts o = {.context =
                                           nbi_context_or_default(&engine->config, opts->context),
                                       .chunk = opts->chunk,
                                       .kv = kv,
                                       .mode = opts->mode,
                                       .exact = opts->exact};
    NBI_TRY(nbi_session_new(out, engine, &o));
    (*out)->cancel = opts->cancel;
    return NB_OK;
}

enum nb_status nb_session_append(struct nb_session *session, const int32_t *ids, int64_t count,
                                 float *logits)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(session->cancel);
    return nbi_session_append(session, ids, count, logits, 1);
}
