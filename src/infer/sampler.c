/* sampler.c - penalties, truncation, the draw. */
#include "infer/sampler.h"

#include <float.h>
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

enum nb_status nbi_sampler_init(struct nbi_sampler *s, const struct nb_sampling *opts,
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
    nbi_sampler_release(s);
    return nbi_fail_memory("sampler", (size_t)vocab * sizeof *s->candidates);
}

void nbi_sampler_release(struct nbi_sampler *s)
{
    free(s->candidates);
    free(s->counts);
    free(s->seen);
    memset(s, 0, sizeof *s);
}

void nbi_sampler_accept(struct nbi_sampler *s, int32_t id)
{
    if (id < 0 || id >= s->vocab)
        return;
    if (s->counts[id]++ == 0)
        s->seen[s->seen_count++] = id;
}

/* Repetition divides positive logits and multiplies negative ones, as Hugging Face has it; presence
 * and frequency subtract, as OpenAI's interface has it. */
static void penalise(const struct nbi_sampler *s, float *logits)
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
static bool better(struct nb_candidate a, struct nb_candidate b)
{
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

/* A heap with the worst of the best k on top. */
static void sink(struct nb_candidate *heap, int64_t n, int64_t i)
{
    struct nb_candidate c = heap[i];
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
static int64_t select_best(struct nbi_sampler *s, const float *logits, int64_t k)
{
    struct nb_candidate *heap = s->candidates;
    int64_t n = k < s->vocab ? k : s->vocab;
    for (int64_t i = 0; i < n; i++)
        heap[i] = (struct nb_candidate){logits[i], (int32_t)i};
    for (int64_t i = n / 2; i-- > 0;)
        sink(heap, n, i);
    for (int64_t i = n; i < s->vocab; i++) {
        struct nb_candidate c = {logits[i], (int32_t)i};
        if (c.logit > heap[0].logit) { /* an equal one has the higher id */
            heap[0] = c;
            sink(heap, n, 0);
        }
    }
    for (int64_t last = n - 1; last > 0; last--) {
        struct nb_candidate worst = heap[0];
        heap[0] = heap[last];
        sink(heap, last, 0);
        heap[last] = worst;
    }
    return n;
}

int32_t nbi_argmax(const float *x, int64_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return best;
}

static enum nb_status check_finite(const float *logits, int64_t n)
{
    int wrong = 0;
#pragma omp simd reduction(| : wrong)
    for (int64_t i = 0; i < n; i++)
        wrong |= !(fabsf(logits[i]) <= FLT_MAX);
    for (int64_t i = 0; wrong && i < n; i++)
        if (!isfinite(logits[i]))
            return nbi_fail(NB_EVALUE, "the model gave a logit that is not finite (token %lld)",
                            (long long)i);
    return NB_OK;
}

/* ---- probabilities ---- */

/* Probabilities are whole numbers, as parts of `unit`, which the best token has. So sums are exact
 * and the same in any order, and all of them fit 63 bits. */
struct odds {
    double top;             /* the largest logit */
    double inv_temperature; /* 1 / temperature */
    double unit;
};

static struct odds make_odds(const struct nbi_sampler *s, float top)
{
    double inv_temperature = 1 / s->opts.temperature; /* may be infinite; 1e30 does as well */
    int bits = 62;
    for (int64_t n = s->vocab; n > 1; n = (n + 1) / 2)
        bits--;
    return (struct odds){top, inv_temperature < 1e30 ? inv_temperature : 1e30, ldexp(1, bits)};
}

static inline double log_odds(const struct odds *o, float logit)
{
    return ((double)logit - o->top) * o->inv_temperature;
}

static inline int64_t weight_of(const struct odds *o, float logit)
{
    double x = log_odds(o, logit);
    return x < -50 ? 0 : (int64_t)(expf((float)x) * o->unit); /* exp(-50) is below 1 / 2^62 */
}

/* ---- truncation ---- */

/* Top-p leaves the fewest tokens, best first, that together have this weight. */
static int64_t top_p_weight(const struct nbi_sampler *s, int64_t all)
{
    double wanted = ceil(s->opts.top_p * (double)all);
    return s->opts.top_p == 1 || wanted >= (double)all ? all : wanted < 1 ? 1 : (int64_t)wanted;
}

/* Whether min-p leaves a token: it is at least min_p times as likely as the best. */
static inline bool likely(const struct odds *o, float logit, double log_min_p)
{
    return log_odds(o, logit) >= log_min_p;
}

static uint64_t bits_of(const struct nbi_sampler *s, uint64_t draw)
{
    struct nbi_philox r = nbi_philox(s->opts.seed, draw, 0x73616D70);
    return (uint64_t)r.v[0] << 32 | r.v[1];
}

/* Where in [0, total) the draw falls. */
static int64_t spin(const struct nbi_sampler *s, uint64_t draw, int64_t total)
{
    return (int64_t)(((unsigned __int128)bits_of(s, draw) * (uint64_t)total) >> 64);
}

/* Tokens lie one behind the other, best first, each as long as its weight: which one covers `at`?
 * *end: where it ends. */
static int32_t covering(const struct odds *o, const struct nb_candidate *sorted, int64_t at,
                        int64_t *end)
{
    for (*end = 0;; sorted++) {
        *end += weight_of(o, sorted->logit);
        if (at < *end)
            return sorted->id;
    }
}

/* The definition: a draw from n candidates, best first. */
static int32_t draw_sorted(const struct nbi_sampler *s, int64_t n, uint64_t draw)
{
    const struct nb_candidate *c = s->candidates;
    struct odds o = make_odds(s, c[0].logit);
    double log_min_p = log(s->opts.min_p);
    int64_t all = 0, left = 0, end;
    for (int64_t i = 0; i < n; i++) {
        int64_t w = weight_of(&o, c[i].logit);
        all += w;
        left += likely(&o, c[i].logit, log_min_p) ? w : 0;
    }
    covering(&o, c, top_p_weight(s, all) - 1, &end); /* where the last that top-p leaves ends */
    return covering(&o, c, spin(s, draw, end < left ? end : left), &end);
}

/* ---- the same without sorting ---- */

#define SLICES 1024
#define FEW    32

/* Logits from `high` down, cut into slices of the same width: what weighs each? */
struct slices {
    double high, per_logit;
    int64_t weight[SLICES];
};

static void cut(struct slices *p, double high, double low)
{
    *p = (struct slices){.high = high, .per_logit = high > low ? (SLICES - 1) / (high - low) : 0};
}

static inline int slice_of(const struct slices *p, float logit)
{
    return (int)((p->high - (double)logit) * p->per_logit);
}

/* The slice that covers `at`; *from: where it begins. */
static int covering_slice(const struct slices *p, int64_t at, int64_t *from)
{
    int b = 0;
    for (*from = 0; at >= *from + p->weight[b]; b++)
        *from += p->weight[b];
    return b;
}

static void sort_few(struct nb_candidate *c, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        struct nb_candidate x = c[i];
        int64_t j = i;
        for (; j > 0 && better(x, c[j - 1]); j--)
            c[j] = c[j - 1];
        c[j] = x;
    }
}

/* As covering, of n candidates in the order of their ids. Each round leaves one slice of them: at
 * least the best or the worst is gone then. */
static int32_t covering_unsorted(const struct odds *o, struct nb_candidate *c, int64_t n,
                                 int64_t at, int64_t *end)
{
    struct slices p;
    int64_t before = 0, from;
    while (n > FEW) {
        float high = c[0].logit, low = high;
        for (int64_t i = 1; i < n; i++) {
            high = c[i].logit > high ? c[i].logit : high;
            low = c[i].logit < low ? c[i].logit : low;
        }
        if (high == low) { /* ids decide */
            int64_t w = weight_of(o, high), i = (at - before) / w;
            *end = before + (i + 1) * w;
            return c[i].id;
        }
        cut(&p, high, low);
        for (int64_t i = 0; i < n; i++)
            p.weight[slice_of(&p, c[i].logit)] += weight_of(o, c[i].logit);
        int b = covering_slice(&p, at - before, &from);
        before += from;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++)
            if (slice_of(&p, c[i].logit) == b)
                c[kept++] = c[i];
        n = kept;
    }
    sort_few(c, n);
    int32_t id = covering(o, c, at - before, &from);
    *end = before + from;
    return id;
}

/* As covering, of all tokens, which p has the slices of. */
static int32_t covering_of_all(struct nbi_sampler *s, const float *logits, const struct odds *o,
                               const struct slices *p, int64_t at, int64_t *end)
{
    int64_t from, n = 0;
    int b = covering_slice(p, at, &from);
    double middle = p->high - (p->per_logit > 0 ? (b + 0.5) / p->per_logit : 0);
    float near = (float)middle, reach = INFINITY; /* of the slice, generously: cheaper to ask for */
    if (p->per_logit > 0)
        reach = (float)(1 / p->per_logit + 0x1p-22 * fabs(middle));
    for (int64_t start = 0; start < s->vocab; start += 64) {
        int64_t stop = start + 64 < s->vocab ? start + 64 : s->vocab;
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = start; i < stop; i++)
            any |= fabsf(logits[i] - near) <= reach;
        for (int64_t i = start; any && i < stop; i++)
            if (fabsf(logits[i] - near) <= reach && slice_of(p, logits[i]) == b)
                s->candidates[n++] = (struct nb_candidate){logits[i], (int32_t)i};
    }
    int32_t id = covering_unsorted(o, s->candidates, n, at - from, end);
    *end += from;
    return id;
}

/* What draw_sorted gives for all tokens. */
static int32_t draw_unsorted(struct nbi_sampler *s, const float *logits, uint64_t draw)
{
    struct slices p;
    float high = logits[0], low = high;
#pragma omp simd reduction(max : high) reduction(min : low)
    for (int64_t i = 0; i < s->vocab; i++) {
        high = logits[i] > high ? logits[i] : high;
        low = logits[i] < low ? logits[i] : low;
    }
    struct odds o = make_odds(s, high);
    double log_min_p = log(s->opts.min_p), none = high + log(0.5 / o.unit) / o.inv_temperature;
    int64_t all = 0, left = 0, end;
    cut(&p, high, low > none ? low : none);
    for (int64_t i = 0; i < s->vocab; i++) {
        if (logits[i] < none) /* weighs nothing */
            continue;
        int64_t w = weight_of(&o, logits[i]);
        all += w;
        left += likely(&o, logits[i], log_min_p) ? w : 0;
        p.weight[slice_of(&p, logits[i])] += w;
    }
    end = all;
    if (s->opts.top_p < 1)
        covering_of_all(s, logits, &o, &p, top_p_weight(s, all) - 1, &end);
    return covering_of_all(s, logits, &o, &p, spin(s, draw, end < left ? end : left), &end);
}

int64_t nbi_sampler_topk(const struct nbi_sampler *s)
{
    bool plain = !s->penalties && s->opts.bias_count == 0;
    int64_t k = s->opts.temperature == 0 ? 1 : s->opts.top_k;
    k = k < s->vocab ? k : s->vocab;
    return plain && k <= NBI_TOPK_MAX ? k : 0;
}

struct nbi_draw nbi_sampler_draw(const struct nbi_sampler *s)
{
    struct odds o = make_odds(s, 0);
    return (struct nbi_draw){o.inv_temperature, o.unit, s->opts.top_p, log(s->opts.min_p),
                             bits_of(s, s->draws)};
}

int32_t nbi_sampler_from_topk(struct nbi_sampler *s, const struct nb_candidate *best)
{
    int64_t n = nbi_sampler_topk(s);
    uint64_t draw = s->draws++;
    memcpy(s->candidates, best, (size_t)n * sizeof *best);
    return n == 1 ? best[0].id : draw_sorted(s, n, draw);
}

enum nb_status nbi_sampler_pick(struct nbi_sampler *s, float *logits, int32_t *id)
{
    NBI_TRY(check_finite(logits, s->vocab));
    penalise(s, logits);
    if (s->penalties || s->opts.bias_count > 0)
        NBI_TRY(nbi_context(check_finite(logits, s->vocab), "after penalties"));
    uint64_t draw = s->draws++;
    if (s->opts.temperature > 0 && s->opts.top_k == 0) {
        *id = draw_unsorted(s, logits, draw);
        return NB_OK;
    }
    int64_t n = select_best(s, logits, s->opts.temperature == 0 ? 1 : s->opts.top_k);
    *id = n == 1 ? s->candidates[0].id : draw_sorted(s, n, draw);
    return NB_OK;
}
