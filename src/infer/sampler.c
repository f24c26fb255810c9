/* sampler.c - penalties, truncation, the draw. */
#include "infer/sampler.h"

#include <math.h>
#include <string.h>

#include "base/rng.h"

static enum nb_status check(const struct nb_sampling *o, int64_t vocab)
{
    if (!(o->temperature >= 0 && o->temperature <= 100))
        return nbi_fail(NB_EINVAL, "a temperature of %g; 0 to 100 is possible", o->temperature);
    if (!(o->top_p > 0 && o->top_p <= 1) || !(o->min_p >= 0 && o->min_p <= 1))
        return nbi_fail(NB_EINVAL, "top-p %g, min-p %g: shares of 1", o->top_p, o->min_p);
    if (!(o->repeat_penalty > 0) || !isfinite(o->repeat_penalty) ||
        !isfinite(o->presence_penalty) || !isfinite(o->frequency_penalty) || o->top_k < 0)
        return nbi_fail(NB_EINVAL, "a penalty or top-k that makes no sense");
    for (int i = 0; i < o->bias_count; i++) {
        if (o->bias[i].id < 0 || o->bias[i].id >= vocab)
            return nbi_fail(NB_EINVAL, "a bias for token %d, which is not in the vocabulary",
                            o->bias[i].id);
        if (!isfinite(o->bias[i].value))
            return nbi_fail(NB_EINVAL, "the bias of token %d is not finite", o->bias[i].id);
    }
    return NB_OK;
}

enum nb_status nbi_token_sampler_init(struct nbi_token_sampler *s, const struct nb_sampling *opts,
                                      int64_t vocab)
{
    memset(s, 0, sizeof *s);
    NBI_TRY(check(opts, vocab));
    s->opts = *opts;
    s->vocab = vocab;
    s->penalties =
        opts->repeat_penalty != 1 || opts->presence_penalty != 0 || opts->frequency_penalty != 0;
    s->candidates = malloc((size_t)vocab * sizeof *s->candidates);
    s->counts = calloc((size_t)vocab, sizeof *s->counts);
    s->seen = malloc((size_t)vocab * sizeof *s->seen);
    if (s->candidates && s->counts && s->seen)
        return NB_OK;
    nbi_token_sampler_release(s);
    return nbi_fail_memory("sampler", (size_t)vocab * sizeof *s->candidates);
}

void nbi_token_sampler_release(struct nbi_token_sampler *s)
{
    free(s->candidates);
    free(s->counts);
    free(s->seen);
    memset(s, 0, sizeof *s);
}

void nbi_token_sampler_accept(struct nbi_token_sampler *s, int32_t id)
{
    if (id < 0 || id >= s->vocab)
        return;
    if (s->counts[id]++ == 0)
        s->seen[s->seen_count++] = id;
}

/* Repetition divides positive logits and multiplies negative ones, as Hugging Face has it; presence
 * and frequency subtract, as OpenAI's interface has it. */
static void penalise(const struct nbi_token_sampler *s, float *logits)
{
    const struct nb_sampling *o = &s->opts;
    for (int64_t i = 0; s->penalties && i < s->seen_count; i++) {
        float *x = &logits[s->seen[i]];
        *x = (float)(*x > 0 ? *x / o->repeat_penalty : *x * o->repeat_penalty);
        *x -= (float)(o->presence_penalty + o->frequency_penalty * s->counts[s->seen[i]]);
    }
    for (int i = 0; i < o->bias_count; i++)
        logits[o->bias[i].id] += o->bias[i].value;
}

/* Largest first; of equals the lower id. */
static bool better(struct nbi_candidate a, struct nbi_candidate b)
{
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

/* A heap with the worst of the best k on top. */
static void sink(struct nbi_candidate *heap, int64_t n, int64_t i)
{
    struct nbi_candidate c = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && better(heap[child], heap[child + 1]))
            child++;
        if (!better(c, heap[child]))
            break;
        heap[i] = heap[child];
    }
    heap[i] = c;
}

/* The best k of all, best first. */
static int64_t select_best(struct nbi_token_sampler *s, const float *logits, int64_t k)
{
    struct nbi_candidate *heap = s->candidates;
    int64_t n = k < s->vocab ? k : s->vocab;
    for (int64_t i = 0; i < n; i++)
        heap[i] = (struct nbi_candidate){logits[i], (int32_t)i};
    for (int64_t i = n / 2; i-- > 0;)
        sink(heap, n, i);
    for (int64_t i = n; i < s->vocab; i++) {
        struct nbi_candidate c = {logits[i], (int32_t)i};
        if (c.logit > heap[0].logit) { /* an equal one has the higher id */
            heap[0] = c;
            sink(heap, n, 0);
        }
    }
    for (int64_t last = n - 1; last > 0; last--) {
        struct nbi_candidate worst = heap[0];
        heap[0] = heap[last];
        sink(heap, last, 0);
        heap[last] = worst;
    }
    return n;
}

static enum nb_status check_finite(const float *logits, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(logits[i]))
            return nbi_fail(NB_EVALUE, "the model gave a logit that is not finite (token %lld)",
                            (long long)i);
    return NB_OK;
}

/* Probabilities, unnormalised, of sorted candidates; how many top-p and min-p leave. The token that
 * crosses top-p is kept. */
static int64_t truncate(const struct nbi_token_sampler *s, int64_t n, double *total)
{
    const struct nb_sampling *o = &s->opts;
    double top = s->candidates[0].logit, all = 0, sum = 0;
    for (int64_t i = 0; i < n; i++)
        all += exp((s->candidates[i].logit - top) / o->temperature);
    int64_t kept = 0;
    while (kept < n) {
        double p = exp((s->candidates[kept].logit - top) / o->temperature);
        if (kept > 0 && (sum >= o->top_p * all || p < o->min_p))
            break;
        sum += p;
        kept++;
    }
    *total = sum;
    return kept;
}

enum nb_status nbi_token_sampler_next(struct nbi_token_sampler *s, float *logits, int32_t *id)
{
    NBI_TRY(check_finite(logits, s->vocab));
    penalise(s, logits);
    if (s->penalties || s->opts.bias_count > 0)
        NBI_TRY(nbi_context(check_finite(logits, s->vocab), "after penalties"));
    bool greedy = s->opts.temperature == 0;
    int64_t k = greedy ? 1 : s->opts.top_k > 0 ? s->opts.top_k : s->vocab;
    int64_t n = select_best(s, logits, k);
    uint64_t draw = s->draws++;
    *id = s->candidates[0].id;
    if (greedy || n == 1)
        return NB_OK;
    double total, top = s->candidates[0].logit;
    n = truncate(s, n, &total);
    struct nbi_philox r = nbi_philox(s->opts.seed, draw, 0x73616D70);
    double left = total * (((double)r.v[0] * 0x1p32 + r.v[1] + 0.5) * 0x1p-64);
    for (int64_t i = 0; i < n; i++) {
        left -= exp((s->candidates[i].logit - top) / s->opts.temperature);
        *id = s->candidates[i].id;
        if (left <= 0)
            break;
    }
    return NB_OK;
}
