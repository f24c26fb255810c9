/* session.c - the key/value cache, and passes over it. */
#include "infer/session.h"

#include <string.h>

struct nb_session {
    const struct nb_engine *engine;
    struct nbi_session_opts opts;
    struct nbi_stream *stream;
    struct nbi_acts acts;
    struct nbi_ptr cache;   /* all layers' keys and values */
    struct nbi_kv_view *kv; /* [layers] */
    int64_t row_bytes;      /* of one layer's keys of one token */
    int64_t length;
    int32_t *tokens; /* [context] */
    /* Behind a token that is alone the one that is likely to follow is computed before anyone asks
     * for it: where that is, -1 if nowhere, and its id. */
    int64_t ahead;
    int32_t guess;
    bool leads;                                         /* the last pass was of such a token */
    int32_t *positions, *kv_rows, *first, *last, *rows; /* [chunk] */
    nbi_layer_fn watch;
    void *watch_ctx;
    float *watched; /* [chunk, C] */
    int64_t pass_from, pass_rows;
};

struct nbi_snapshot {
    int64_t length, row_bytes, layers;
    enum nbi_dtype kv;
    int32_t *tokens;
    uint8_t *rows; /* [layers][k, v][length] */
};

static int64_t row_bytes(const struct nbi_config *c, enum nbi_dtype kv)
{
    return (int64_t)nbi_dtype_bytes(kv, c->kv_heads * c->head_dim);
}

/* Bytes of one layer's keys, at a distance that keeps rows aligned. */
static int64_t layer_bytes(const struct nbi_config *c, const struct nbi_session_opts *o)
{
    return (row_bytes(c, o->kv) * o->context + 63) / 64 * 64;
}

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
                      struct nbi_session_plan *plan)
{
    const struct nbi_config *c = &engine->config;
    struct nbi_session_opts o = with_defaults(engine, opts);
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, o.chunk, false);
    plan->scratch = engine->be->stream_bytes(engine->be, &limits);
    plan->kv = 2 * c->layers * layer_bytes(c, &o);
    const struct nbi_acts_opts room = {.N = o.chunk, .M = o.logits};
    plan->activations = nbi_acts_bytes(c, &room);
    plan->host = (int64_t)sizeof(struct nb_session) +
                 (o.context + 5 * o.chunk) * (int64_t)sizeof(int32_t) +
                 c->layers * (int64_t)sizeof(struct nbi_kv_view) + nbi_acts_host_bytes(c, &room);
}

static enum nb_status make_host(struct nb_session *s)
{
    size_t chunk = (size_t)s->opts.chunk;
    s->tokens = malloc((size_t)s->opts.context * sizeof *s->tokens);
    s->positions = malloc(5 * chunk * sizeof *s->positions);
    s->kv = calloc((size_t)s->engine->config.layers, sizeof *s->kv);
    if (!s->tokens || !s->positions || !s->kv)
        return nbi_fail_memory("session", (size_t)s->opts.context * sizeof *s->tokens);
    s->kv_rows = s->positions + chunk;
    s->first = s->kv_rows + chunk;
    s->last = s->first + chunk;
    s->rows = s->last + chunk;
    return NB_OK;
}

static enum nb_status make_device(struct nb_session *s)
{
    struct nbi_backend *be = s->engine->be;
    const struct nbi_config *c = &s->engine->config;
    int64_t per_layer = layer_bytes(c, &s->opts);
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, s->opts.chunk, false);
    NBI_TRY(be->stream_new(be, &limits, &s->stream));
    const struct nbi_acts_opts room = {.N = s->opts.chunk, .M = s->opts.logits};
    NBI_TRY(nbi_acts_init(&s->acts, be, c, &room));
    NBI_TRY(be->alloc(be, "key/value cache", 2 * c->layers * per_layer, &s->cache));
    for (int64_t i = 0; i < c->layers; i++)
        s->kv[i] = (struct nbi_kv_view){nbi_ptr_add(s->cache, 2 * i * per_layer),
                                        nbi_ptr_add(s->cache, (2 * i + 1) * per_layer), s->opts.kv};
    if (!s->opts.exact)
        NBI_TRY(nbi_acts_use_megakernel(&s->acts, &s->engine->weights, s->stream, s->kv));
    return NB_OK;
}

static enum nb_status check_opts(const struct nbi_config *c, const struct nbi_session_opts *o)
{
    if (o->context < 1 || o->context > INT32_MAX)
        return nbi_fail(NB_EINVAL, "a context of %lld tokens", (long long)o->context);
    if (o->context > c->max_position)
        return nbi_fail(NB_EVALUE, "a context of %lld tokens; the model was made for %lld",
                        (long long)o->context, (long long)c->max_position);
    return NB_OK;
}

enum nb_status nbi_session_new(struct nb_session **out, const struct nb_engine *engine,
                               const struct nbi_session_opts *opts)
{
    *out = NULL;
    NBI_TRY(check_opts(&engine->config, opts));
    struct nb_session *s = calloc(1, sizeof *s);
    if (!s)
        return nbi_fail_memory("session", sizeof *s);
    s->engine = engine;
    s->ahead = -1;
    s->opts = with_defaults(engine, opts);
    s->row_bytes = row_bytes(&engine->config, opts->kv);
    enum nb_status rc = make_host(s);
    if (rc == NB_OK)
        rc = make_device(s);
    if (rc == NB_OK)
        *out = s;
    else
        nbi_session_free(s);
    return rc;
}

void nbi_session_free(struct nb_session *s)
{
    if (!s)
        return;
    struct nbi_backend *be = s->engine->be;
    be->stream_free(s->stream); /* first: a token may still be on its way to the others */
    nbi_acts_release(&s->acts);
    be->free(be, s->cache);
    free(s->tokens);
    free(s->positions);
    free(s->kv);
    free(s->watched);
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

int64_t nbi_session_context(const struct nb_session *s)
{
    return s->opts.context;
}

const int32_t *nbi_session_tokens(const struct nb_session *s)
{
    return s->tokens;
}

void nbi_session_truncate(struct nb_session *s, int64_t length)
{
    if (length < s->length)
        s->length = length < 0 ? 0 : length;
}

/* ---- passes ---- */

static enum nb_status show_layer(void *ctx, int64_t layer, struct nbi_ptr x)
{
    struct nb_session *s = ctx;
    struct nbi_backend *be = s->engine->be;
    int64_t bytes = s->pass_rows * s->engine->config.hidden_size * (int64_t)sizeof(float);
    NBI_TRY(be->download(s->stream, s->watched, x, bytes));
    NBI_TRY(be->sync(s->stream));
    return s->watch(s->watch_ctx, layer, s->pass_from, s->pass_rows, s->watched);
}

/* Tokens [from, from + count) of s->tokens, of which the last `rows` give logits. */
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
                             .kv = s->kv,
                             .exact = s->opts.exact,
                             .one_row_per_sequence = count == 1,
                             .after_layer = s->watch ? show_layer : NULL,
                             .ctx = s};
}

/* Those tokens; without a place for the logits they stay on the device. */
static enum nb_status pass(struct nb_session *s, int64_t from, int64_t count, float *logits,
                           int64_t rows)
{
    const struct nbi_config *c = &s->engine->config;
    struct nbi_backend *be = s->engine->be;
    const struct nbi_pass p = pass_of(s, from, count, rows);
    bool done = s->ahead == from && count == 1 && s->guess == s->tokens[from] && !s->watch;
    s->pass_from = from;
    s->pass_rows = count;
    s->ahead = -1;
    s->leads = s->opts.mode != NB_KV_NONE && nbi_execute_can_run_ahead(&s->acts, &p);
    if (!done)
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
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= s->engine->config.vocab_size)
            return nbi_fail(NB_EVALUE, "token id %d is outside the vocabulary of %lld", ids[i],
                            (long long)s->engine->config.vocab_size);
    if (count > s->opts.context - s->length)
        return nbi_fail(NB_EVALUE,
                        "%lld tokens after %lld do not fit the context of %lld; a longer one can "
                        "be asked for",
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
        /* Logits are wanted from end - rows on; a pass may hold only so many of them. */
        int64_t wanted = from + n - (end - rows);
        wanted = wanted > n ? n : wanted;
        if (wanted > s->opts.logits) {
            n -= wanted - s->opts.logits;
            wanted = s->opts.logits;
        }
        wanted = wanted < 0 ? 0 : wanted;
        NBI_TRY(pass(s, from, n, logits ? logits + (rows - (end - from - n) - wanted) * V : NULL,
                     wanted));
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

static enum nb_status fail_odd(void)
{
    return nbi_fail(NB_EVALUE, "the model gave a logit that is not finite");
}

/* The best, while the device goes on with one of them. */
static enum nb_status fetch_and_follow(struct nb_session *s, struct nbi_logits_spec *next)
{
    const struct nbi_pass p = pass_of(s, s->length, 1, 1);
    struct nbi_run_ahead f = {.k = next->k, .draw = next->draw};
    NBI_TRY(nbi_execute_run_ahead(&s->engine->weights, &s->acts, s->stream, &p, &f));
    if (f.nonfinite)
        return fail_odd();
    memcpy(next->candidates, f.candidates, (size_t)f.k * sizeof *f.candidates);
    next->draw.unit = 0;
    s->ahead = s->length;
    s->guess = f.id;
    return NB_OK;
}

/* Of the logits that a pass has left on the device. */
static enum nb_status fetch_best(struct nb_session *s, struct nbi_logits_spec *next)
{
    struct nbi_backend *be = s->engine->be;
    int32_t top[1 + 2 * NBI_TOPK_MAX];
    if (s->leads && (next->k == 1 || next->draw.unit > 0) && s->length < s->opts.context)
        return fetch_and_follow(s, next);
    NBI_TRY(nbi_execute_topk(&s->engine->weights, &s->acts, s->stream, 1, next->k));
    NBI_TRY(be->download(s->stream, top, s->acts.topk, nbi_topk_bytes(1, next->k)));
    NBI_TRY(be->sync(s->stream));
    return nbi_topk_row(next->candidates, top, 0, 1, next->k) ? NB_OK : fail_odd();
}

enum nb_status nbi_session_append_next(struct nb_session *s, const int32_t *ids, int64_t count,
                                       struct nbi_logits_spec *next)
{
    NBI_TRY(append(s, ids, count, next->logits, 1));
    return next->logits ? NB_OK : fetch_best(s, next);
}

enum nb_status nbi_session_set_prompt(struct nb_session *s, const int32_t *ids, int64_t count,
                                      struct nbi_logits_spec *next, int64_t *reused)
{
    int64_t same = 0;
    if (count < 1 || count > s->opts.context)
        return nbi_fail(NB_EVALUE,
                        "%lld tokens do not fit the context of %lld; a longer one can be "
                        "asked for",
                        (long long)count, (long long)s->opts.context);
    while (same < s->length && same < count - 1 && s->tokens[same] == ids[same])
        same++;
    *reused = same;
    nbi_session_truncate(s, same);
    return nbi_session_append_next(s, ids + same, count - same, next);
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
    const struct nbi_config *c = &s->engine->config;
    struct nbi_backend *be = s->engine->be;
    int64_t bytes = s->row_bytes * s->length;
    struct nbi_snapshot *p = calloc(1, sizeof *p);
    *out = NULL;
    if (!p)
        return nbi_fail_memory("snapshot", sizeof *p);
    *p = (struct nbi_snapshot){s->length, s->row_bytes, c->layers, s->opts.kv, NULL, NULL};
    p->tokens = malloc((size_t)s->length * sizeof *p->tokens + 1);
    p->rows = malloc((size_t)(2 * c->layers * bytes) + 1);
    enum nb_status rc = p->tokens && p->rows ? NB_OK : nbi_fail_memory("snapshot", (size_t)bytes);
    if (rc == NB_OK)
        memcpy(p->tokens, s->tokens, (size_t)s->length * sizeof *p->tokens);
    for (int64_t i = 0; i < c->layers && rc == NB_OK; i++) {
        rc = be->download(s->stream, p->rows + 2 * i * bytes, s->kv[i].k, bytes);
        if (rc == NB_OK)
            rc = be->download(s->stream, p->rows + (2 * i + 1) * bytes, s->kv[i].v, bytes);
    }
    if (rc == NB_OK)
        rc = be->sync(s->stream);
    if (rc == NB_OK)
        *out = p;
    else
        nbi_snapshot_free(p);
    return rc;
}

enum nb_status nbi_session_restore(struct nb_session *s, const struct nbi_snapshot *p)
{
    struct nbi_backend *be = s->engine->be;
    int64_t bytes = p->row_bytes * p->length;
    if (p->row_bytes != s->row_bytes || p->kv != s->opts.kv ||
        p->layers != s->engine->config.layers)
        return nbi_fail(NB_EINVAL, "the snapshot is of another kind of session");
    if (p->length > s->opts.context)
        return nbi_fail(NB_EVALUE, "the snapshot has %lld tokens, the context is %lld",
                        (long long)p->length, (long long)s->opts.context);
    s->length = 0;
    s->ahead = -1;
    for (int64_t i = 0; i < p->layers; i++) {
        NBI_TRY(be->upload(s->stream, s->kv[i].k, p->rows + 2 * i * bytes, bytes));
        NBI_TRY(be->upload(s->stream, s->kv[i].v, p->rows + (2 * i + 1) * bytes, bytes));
    }
    memcpy(s->tokens, p->tokens, (size_t)p->length * sizeof *p->tokens);
    NBI_TRY(be->sync(s->stream));
    s->length = p->length;
    return NB_OK;
}

enum nb_status nbi_session_layer_hook(struct nb_session *s, nbi_layer_fn fn, void *ctx)
{
    size_t bytes = (size_t)(s->opts.chunk * s->engine->config.hidden_size) * sizeof *s->watched;
    if (fn && !s->watched && !(s->watched = malloc(bytes)))
        return nbi_fail_memory("watching", bytes);
    s->watch = fn;
    s->watch_ctx = ctx;
    return NB_OK;
}

/* ---- as nibble.h has it ---- */

enum nb_status nb_session_open(struct nb_session **out, const struct nb_engine *engine,
                               const struct nb_session_opts *opts)
{
    static const enum nbi_dtype types[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};
    if ((unsigned)opts->kv > NB_KV_F8 || (unsigned)opts->mode > NB_KV_NONE)
        return nbi_fail(NB_EINVAL, "an unknown kind of cache");
    int64_t most = engine->config.max_position;
    const struct nbi_session_opts o = {.context = opts->context > 0 ? opts->context
                                                  : most < 4096     ? most
                                                                    : 4096,
                                       .chunk = opts->chunk,
                                       .kv = types[opts->kv],
                                       .mode = opts->mode,
                                       .exact = opts->exact};
    return nbi_session_new(out, engine, &o);
}

void nb_session_close(struct nb_session *session)
{
    nbi_session_free(session);
}

int64_t nb_session_length(const struct nb_session *session)
{
    return session->length;
}

const int32_t *nb_session_tokens(const struct nb_session *session)
{
    return session->tokens;
}

enum nb_status nb_session_append(struct nb_session *session, const int32_t *ids, int64_t count,
                                 float *logits)
{
    return nbi_session_append(session, ids, count, logits, 1);
}

void nb_session_truncate(struct nb_session *session, int64_t length)
{
    nbi_session_truncate(session, length);
}
