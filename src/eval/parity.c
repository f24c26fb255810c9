/* parity.c - runs the same tokens through every inference path and compares the results.
 *
 * All exact paths of the CPU perform the same operations in the same order for each row, so they
 * agree to the last bits. A GPU sums in another order, and the layers amplify the difference. Its
 * fast products also round activations to f16 or bf16, or, in prefill, to the sum of two NVFP4
 * values. The last is the coarsest: the logits of a trained model of 8.4 M parameters deviate by
 * 0.6 to 1.2 %, those of two random layers by 1.7 %. */
#include <math.h>
#include <string.h>

#include "eval/perplexity.h"
#include "infer/session.h"
#include "nibble/eval.h"

/* What one path computed for all tokens. */
struct trace {
    float *layers; /* [L, n, C] residual stream after each layer */
    float *logits; /* [n, V] */
    int64_t L, n, C, V;
};

static void trace_release(struct trace *t)
{
    free(t->layers);
    free(t->logits);
}

static enum nb_status trace_init(struct trace *t, const struct nbi_config *c, int64_t n)
{
    *t = (struct trace){.L = c->layers, .n = n, .C = c->hidden_size, .V = c->vocab_size};
    t->layers = malloc((size_t)(t->L * n * t->C) * sizeof *t->layers);
    t->logits = malloc((size_t)(n * t->V) * sizeof *t->logits);
    if (t->layers && t->logits)
        return NB_OK;
    trace_release(t);
    return nbi_fail_memory("logits", (size_t)(n * t->V) * sizeof *t->logits);
}

static enum nb_status keep_layer(void *ctx, int64_t layer, int64_t from, int64_t rows,
                                 const float *x)
{
    struct trace *t = ctx;
    memcpy(t->layers + (layer * t->n + from) * t->C, x, (size_t)(rows * t->C) * sizeof *x);
    return NB_OK;
}

struct path {
    const char *name;
    int64_t chunk; /* tokens per pass; 0: all at once */
    double bound;  /* on the relative error of the logits; 0: none, report only */
    enum nb_kv_mode mode;
    enum nbi_dtype kv;
    bool one_by_one, exact, gpu;
    bool no_hook; /* a layer hook would select other kernels, so layers are not compared */
};

/* The first path is the reference. */
static const struct path paths[] = {
    {"training forward", 0, 0, NB_KV_PROMPT, NBI_F32, false, true, false, false},
    {"whole prompt", 5, 1e-5, NB_KV_PROMPT, NBI_F32, false, true, false, false},
    {"token by token", 1, 1e-5, NB_KV_TOKEN, NBI_F32, true, true, false, false},
    {"no cache", 0, 1e-5, NB_KV_NONE, NBI_F32, true, true, false, false},
    {"integer activations", 0, 1e-2, NB_KV_PROMPT, NBI_F32, false, false, false, false},
    {"integers, decode", 1, 1e-2, NB_KV_TOKEN, NBI_F16, true, false, false, false},
    {"cache in f16", 5, 0, NB_KV_PROMPT, NBI_F16, false, true, false, false},
    {"cache in bf16", 5, 0, NB_KV_PROMPT, NBI_BF16, false, true, false, false},
    {"cache in f8", 5, 0, NB_KV_PROMPT, NBI_E4M3, false, true, false, false},
    {"cuda, exact", 0, 1e-4, NB_KV_PROMPT, NBI_F32, false, true, true, false},
    {"cuda, exact decode", 1, 1e-4, NB_KV_TOKEN, NBI_F32, true, true, true, false},
    {"cuda", 0, 5e-2, NB_KV_PROMPT, NBI_F32, false, false, true, false},
    {"cuda, decode", 1, 5e-2, NB_KV_TOKEN, NBI_F16, true, false, true, true},
};

/* Without a cache every token recomputes all tokens before it, so only the first 64 are compared.
 */
static int64_t positions_of(const struct path *p, const struct trace *t)
{
    return p->mode == NB_KV_NONE && t->n > 64 ? 64 : t->n;
}

static enum nb_status run_path(const struct nb_engine *e, const struct path *p, const int32_t *ids,
                               struct trace *t)
{
    const struct nbi_session_opts opts = {.context = t->n,
                                          .chunk = p->chunk ? p->chunk : t->n,
                                          .logits = t->n,
                                          .kv = p->kv,
                                          .mode = p->mode,
                                          .exact = p->exact};
    struct nb_session *s = NULL;
    int64_t n = positions_of(p, t);
    NBI_TRY(nbi_session_new(&s, e, &opts));
    enum nb_status rc = p->no_hook ? NB_OK : nbi_session_layer_hook(s, keep_layer, t);
    if (rc == NB_OK && !p->one_by_one)
        rc = nbi_session_append(s, ids, n, t->logits, n);
    for (int64_t i = 0; p->one_by_one && i < n && rc == NB_OK; i++)
        rc = nbi_session_append(s, ids + i, 1, t->logits + i * t->V, 1);
    nb_session_close(s);
    return rc;
}

/* Errors of b relative to a. */
static struct nb_parity_error compare(const float *a, const float *b, int64_t n)
{
    double aa = 0, bb = 0, ab = 0, dd = 0, sum = 0, max = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
        ab += (double)a[i] * b[i];
        dd += d * d;
        sum += d;
        max = d > max ? d : max;
    }
    return (struct nb_parity_error){.max = max,
                                    .mean = sum / (double)n,
                                    .relative = aa > 0 ? sqrt(dd / aa) : sqrt(dd),
                                    .cosine = aa > 0 && bb > 0 ? ab / sqrt(aa * bb) : 1};
}

/* Whether the highest logit of x leads by more than twice the largest error of y at this position;
 * then y must have the same most likely token. A NaN in y does not raise the error, so it is found
 * as a different token. */
static bool is_decided(const float *x, const float *y, int64_t n, int64_t best)
{
    double second = -INFINITY, error = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)x[i] - y[i]);
        error = d > error ? d : error;
        second = i != best && x[i] > second ? x[i] : second;
    }
    return x[best] - second > 2 * error;
}

static enum nb_status report(const struct path *p, const struct trace *a, const struct trace *b,
                             nb_parity_fn fn, void *ctx)
{
    int64_t n = positions_of(p, a);
    struct nb_parity_path out = {
        .name = p->name, .layers = p->no_hook ? 0 : a->L, .bound = p->bound, .positions = n};
    struct nb_parity_error *layers = malloc((size_t)a->L * sizeof *layers);
    if (!layers)
        return nbi_fail_memory("layers", (size_t)a->L * sizeof *layers);
    for (int64_t l = 0; l < out.layers; l++)
        layers[l] = compare(a->layers + l * a->n * a->C, b->layers + l * a->n * a->C, n * a->C);
    out.layer = layers;
    out.logits = compare(a->logits, b->logits, n * a->V);
    for (int64_t i = 0; i < n; i++) {
        const float *x = a->logits + i * a->V, *y = b->logits + i * a->V;
        int64_t best = nbi_argmax(x, a->V);
        bool same = best == nbi_argmax(y, a->V), decided = is_decided(x, y, a->V, best);
        out.same_top += same;
        out.decided += decided;
        out.same_decided += decided && same;
        out.kl += nbi_token_kl(x, y, a->V) / (double)n;
    }
    bool exact = p->bound > 0 && p->bound <= 1e-5;
    out.passed =
        p->bound == 0 || (out.logits.relative <= p->bound && out.same_decided == out.decided &&
                          (!exact || out.same_top == out.positions));
    enum nb_status rc = fn(ctx, &out);
    free(layers);
    return rc;
}

enum nb_status nb_eval_parity(const struct nb_engine *e, const struct nb_engine *gpu,
                              const int32_t *ids, int64_t count, nb_parity_fn fn, void *ctx,
                              struct nb_cancel *cancel)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(cancel);
    struct trace a, b;
    NBI_TRY(trace_init(&a, &e->config, count));
    enum nb_status rc = trace_init(&b, &e->config, count);
    if (rc != NB_OK) {
        trace_release(&a);
        return rc;
    }
    rc = run_path(e, &paths[0], ids, &a);
    for (size_t i = 1; i < sizeof paths / sizeof *paths && rc == NB_OK; i++) {
        if (paths[i].gpu && !gpu)
            continue;
        rc = run_path(paths[i].gpu ? gpu : e, &paths[i], ids, &b);
        if (rc == NB_OK)
            rc = report(&paths[i], &a, &b, fn, ctx);
    }
    trace_release(&a);
    trace_release(&b);
    return rc;
}
