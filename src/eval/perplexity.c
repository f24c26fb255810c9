/* perplexity.c - measures the perplexity of a model on a text.
 *
 * The text is divided into windows. Each window is a sequence of its own that starts at position 0;
 * nothing carries over from one window to the next. */
#include "eval/perplexity.h"

#include <math.h>

#include "base/clock.h"
#include "base/parallel.h"
#include "data/windows.h"
#include "infer/session.h"

#define DEFAULT_CONTEXT 2048
#define LOGITS_ROWS_MAX 512 /* of logits at a time */

double nbi_token_nll(const float *logits, int64_t V, int32_t target)
{
    double top = logits[0], all = 0;
    for (int64_t v = 1; v < V; v++)
        top = logits[v] > top ? logits[v] : top;
    for (int64_t v = 0; v < V; v++)
        all += exp(logits[v] - top);
    return log(all) + top - logits[target];
}

static double log_sum(const float *x, int64_t V)
{
    return nbi_token_nll(x, V, 0) + x[0];
}

double nbi_token_kl(const float *a, const float *b, int64_t V)
{
    double la = log_sum(a, V), lb = log_sum(b, V), sum = 0;
    for (int64_t v = 0; v < V; v++)
        sum += exp(a[v] - la) * ((a[v] - la) - (b[v] - lb));
    return sum > 0 || isnan(sum) ? sum : 0; /* rounding can make it slightly negative */
}

struct eval {
    const struct nb_engine *engine;
    const struct nb_ppl_opts *opts;
    struct nb_ppl_result sums;
    const int32_t *ids;
    int64_t count, context, stride;
    int64_t chunk; /* tokens per scoring pass; each yields a row of logits */
    struct nb_session *session;
    float *logits;          /* [chunk, V] */
    double *nll;            /* [chunk] */
    const int32_t *targets; /* [chunk] token that follows each row */
};

static enum nb_status score_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    struct eval *e = ctx;
    int64_t V = e->engine->config.vocab_size;
    (void)thread;
    for (int64_t i = first; i < first + count; i++)
        e->nll[i] = nbi_token_nll(e->logits + i * V, V, e->targets[i]);
    return NB_OK;
}

/* Feeds tokens [from, from + n) of the text and scores the token after each of them. */
static enum nb_status score(struct eval *e, int64_t from, int64_t n)
{
    NBI_TRY(nbi_session_append(e->session, e->ids + from, n, e->logits, n));
    e->targets = e->ids + from + 1;
    NBI_TRY(nbi_for_chunks(n, 1, e->engine->threads, score_rows, e));
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(e->nll[i]))
            return nbi_fail(NB_EVALUE,
                            "the model gave a logit that is not finite (after token %lld)",
                            (long long)(from + i));
        e->sums.nll += e->nll[i];
    }
    e->sums.tokens += n;
    return NB_OK;
}

/* Runs a window and scores the tokens that it predicts. */
static enum nb_status score_window(struct eval *e, const struct nbi_window *w)
{
    int64_t at = w->predicted - 1; /* first token whose logits are needed */
    nb_session_truncate(e->session, 0);
    if (at > w->begin)
        NBI_TRY(nbi_session_append(e->session, e->ids + w->begin, at - w->begin, NULL, 0));
    for (int64_t n; at < w->end - 1; at += n) {
        n = w->end - 1 - at < e->chunk ? w->end - 1 - at : e->chunk;
        NBI_TRY(score(e, at, n));
        if (e->opts->progress)
            e->opts->progress(e->opts->progress_ctx, (uint64_t)(at + n), (uint64_t)(e->count - 1));
    }
    e->sums.windows++;
    return NB_OK;
}

static enum nb_status score_all(struct eval *e)
{
    struct nbi_windows windows = {.count = e->count, .context = e->context, .stride = e->stride};
    struct nbi_window w;
    while (nbi_windows_next(&windows, &w))
        NBI_TRY(score_window(e, &w));
    return NB_OK;
}

static enum nb_status check(struct eval *e)
{
    int64_t limit = e->engine->config.max_position;
    if (e->count < 2)
        return nbi_fail(NB_EVALUE,
                        "a text of %lld tokens; the first is not predicted, so it takes two",
                        (long long)e->count);
    e->context = e->opts->context > 0      ? e->opts->context
                 : limit < DEFAULT_CONTEXT ? limit
                                           : DEFAULT_CONTEXT;
    e->stride = e->opts->stride > 0 ? e->opts->stride : e->context;
    if (e->context < 2 || e->context > limit)
        return nbi_fail(NB_EVALUE, "windows of %lld tokens; 2 to %lld are possible with this model",
                        (long long)e->context, (long long)limit);
    if (e->stride > e->context)
        return nbi_fail(NB_EINVAL, "a stride of %lld over windows of %lld tokens leaves some out",
                        (long long)e->stride, (long long)e->context);
    /* Sessions check ids too, but never see the last one of a window. */
    return nbi_engine_check_ids(e->engine, e->ids, e->count);
}

static enum nb_status prepare(struct eval *e)
{
    enum nbi_dtype kv;
    int64_t V = e->engine->config.vocab_size, row = V * (int64_t)sizeof *e->logits;
    NBI_TRY(check(e));
    NBI_TRY(nbi_kv_dtype(e->opts->kv, &kv));
    int64_t context = e->context < e->count ? e->context : e->count;
    e->chunk = nbi_logits_rows(V, 1, context < LOGITS_ROWS_MAX ? context : LOGITS_ROWS_MAX);
    const struct nbi_session_opts opts = {
        .context = context, .logits = e->chunk, .kv = kv, .exact = !e->opts->fast};
    e->logits = malloc((size_t)(e->chunk * row));
    e->nll = malloc((size_t)e->chunk * sizeof *e->nll);
    if (!e->logits || !e->nll)
        return nbi_fail_memory("logits", (size_t)(e->chunk * row));
    return nbi_session_new(&e->session, e->engine, &opts);
}

enum nb_status nb_eval_ppl(const struct nb_engine *engine, const int32_t *ids, int64_t count,
                           const struct nb_ppl_opts *opts, struct nb_ppl_result *result)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct eval e = {.engine = engine, .opts = opts, .ids = ids, .count = count};
    double start = nbi_now();
    enum nb_status rc = prepare(&e);
    if (rc == NB_OK)
        rc = score_all(&e);
    nb_session_close(e.session);
    free(e.logits);
    free(e.nll);
    if (rc != NB_OK)
        return rc;
    double nll = e.sums.nll / (double)e.sums.tokens;
    *result = (struct nb_ppl_result){.nll = nll,
                                     .ppl = exp(nll),
                                     .tokens = e.sums.tokens,
                                     .windows = e.sums.windows,
                                     .context = e.context,
                                     .stride = e.stride,
                                     .seconds = nbi_now() - start};
    return NB_OK;
}
