/* sampler.c - penalties, truncation, the draw.
 *
 * draw_sorted() defines the draw from sorted candidates. draw_unsorted() gives the same token from
 * all logits without sorting them, and a backend may repeat the draw from nbi_draw. They agree
 * exactly because the weights of tokens are integers, whose sums do not depend on the order. */
#include "infer/sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/rng.h"

enum nb_status nbi_sampler_check(const struct nb_sampling *o, int64_t vocab)
{
    if (!(o->temperature >= 0 && o->temperature <= 100))
        return nbi_fail(NB_EINVAL, "a temperature of %g; 0 to 100 is possible", o->temperature);
    if (!(o->top_p > 0 && o->top_p <= 1) || !(o->min_p >= 0 && o->min_p <= 1))
        return nbi_fail(NB_EINVAL, "top-p %g, min-p %g: shares of 1", o->top_p, o->min_p);
    if (!(o->repeat_penalty > 0) || !isfinite(o->repeat_penalty) ||
        !isfinite(o->presence_penalty) || !isfinite(o->frequency_penalty) || o->top_k < 0)
        return nbi_fail(NB_EINVAL, "a penalty or top-k out of range");
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
    NBI_TRY(nbi_sampler_check(opts, vocab));
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

/* The repetition penalty divides positive logits and multiplies negative ones, as in Hugging Face.
 * Presence and frequency penalties are subtracted, as in OpenAI's interface. */
static void apply_penalties(const struct nbi_sampler *s, float *logits)
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

/* The order of tokens: largest logit first, of equal ones the lower id. */
static bool ranks_before(struct nb_candidate a, struct nb_candidate b)
{
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

/* Restores a heap with the last-ranked candidate on top, from entry i down. */
static void sift_down(struct nb_candidate *heap, int64_t n, int64_t i)
{
    struct nb_candidate c = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && ranks_before(heap[child], heap[child + 1]))
            child++;
        if (!ranks_before(c, heap[child]))
            break;
        heap[i] = heap[child];
    }
    heap[i] = c;
}

/* Leaves the k most likely tokens in s->candidates, in order. Returns their number. */
static int64_t select_topk(struct nbi_sampler *s, const float *logits, int64_t k)
{
    struct nb_candidate *heap = s->candidates;
    int64_t n = k < s->vocab ? k : s->vocab;
    for (int64_t i = 0; i < n; i++)
        heap[i] = (struct nb_candidate){logits[i], (int32_t)i};
    for (int64_t i = n / 2; i-- > 0;)
        sift_down(heap, n, i);
    for (int64_t i = n; i < s->vocab; i++) {
        struct nb_candidate c = {logits[i], (int32_t)i};
        if (c.logit > heap[0].logit) { /* an equal one has a higher id, and ranks after */
            heap[0] = c;
            sift_down(heap, n, 0);
        }
    }
    for (int64_t last = n - 1; last > 0; last--) {
        struct nb_candidate c = heap[0];
        heap[0] = heap[last];
        sift_down(heap, last, 0);
        heap[last] = c;
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

enum nb_status nbi_check_logits(const float *logits, int64_t n)
{
    int nonfinite = 0;
#pragma omp simd reduction(| : nonfinite)
    for (int64_t i = 0; i < n; i++)
        nonfinite |= !(fabsf(logits[i]) <= FLT_MAX);
    for (int64_t i = 0; nonfinite && i < n; i++)
        if (!isfinite(logits[i]))
            return nbi_fail(NB_EVALUE, "the model gave a logit that is not finite (token %lld)",
                            (long long)i);
    return NB_OK;
}

/* ---- weights ---- */

/* A token's probability is an integer weight: exp((logit - max_logit) / temperature) * unit. So
 * sums are exact in any order, and `unit` is small enough for the sum of all to fit 63 bits. */
struct weights {
    double max_logit;
    double inv_temperature;
    double unit;
};

static struct weights weights_for(const struct nbi_sampler *s, float max_logit)
{
    double inv_temperature = 1 / s->opts.temperature; /* may be infinite; 1e30 does the same */
    int bits = 62;
    for (int64_t n = s->vocab; n > 1; n = (n + 1) / 2)
        bits--;
    return (struct weights){max_logit, inv_temperature < 1e30 ? inv_temperature : 1e30,
                            ldexp(1, bits)};
}

static inline double log_weight(const struct weights *w, float logit)
{
    return ((double)logit - w->max_logit) * w->inv_temperature;
}

static inline int64_t weight_of(const struct weights *w, float logit)
{
    double x = log_weight(w, logit);
    return x < -50 ? 0 : (int64_t)(expf((float)x) * w->unit); /* exp(-50) is below 1 / 2^62 */
}

/* ---- truncation and draw ---- */

/* The weight that top-p keeps: that of the fewest tokens, most likely first, that reach it. */
static int64_t top_p_weight(const struct nbi_sampler *s, int64_t total)
{
    double wanted = ceil(s->opts.top_p * (double)total);
    if (s->opts.top_p == 1 || wanted >= (double)total)
        return total;
    return wanted < 1 ? 1 : (int64_t)wanted;
}

/* Whether min-p keeps a token: it is at least min_p times as likely as the most likely one. */
static inline bool passes_min_p(const struct weights *w, float logit, double log_min_p)
{
    return log_weight(w, logit) >= log_min_p;
}

static uint64_t uniform_bits(const struct nbi_sampler *s, uint64_t draw)
{
    struct nbi_philox r = nbi_philox(s->opts.seed, draw, 0x73616D70);
    return (uint64_t)r.v[0] << 32 | r.v[1];
}

/* A uniform position in [0, total). */
static int64_t draw_position(const struct nbi_sampler *s, uint64_t draw, int64_t total)
{
    return (int64_t)(((unsigned __int128)uniform_bits(s, draw) * (uint64_t)total) >> 64);
}

/* Lay the tokens end to end in order, each as long as its weight. Returns the one that covers
 * position `at`; *end: where it ends. */
static int32_t find_sorted(const struct weights *w, const struct nb_candidate *sorted, int64_t at,
                           int64_t *end)
{
    for (*end = 0;; sorted++) {
        *end += weight_of(w, sorted->logit);
        if (at < *end)
            return sorted->id;
    }
}

/* Draws from the n candidates in s->candidates, most likely first. */
static int32_t draw_sorted(const struct nbi_sampler *s, int64_t n, uint64_t draw)
{
    const struct nb_candidate *c = s->candidates;
    struct weights w = weights_for(s, c[0].logit);
    double log_min_p = log(s->opts.min_p);
    int64_t total = 0, min_p_end = 0, end;
    for (int64_t i = 0; i < n; i++) {
        int64_t x = weight_of(&w, c[i].logit);
        total += x;
        min_p_end += passes_min_p(&w, c[i].logit, log_min_p) ? x : 0;
    }
    find_sorted(&w, c, top_p_weight(s, total) - 1, &end); /* where the tokens of top-p end */
    return find_sorted(&w, c, draw_position(s, draw, end < min_p_end ? end : min_p_end), &end);
}

/* ---- the same without sorting ---- */

#define BUCKETS            1024
#define INSERTION_SORT_MAX 32

/* The weight of the logits from `high` down, in buckets of equal width. */
struct histogram {
    double high, buckets_per_logit;
    int64_t weight[BUCKETS];
};

static void histogram_init(struct histogram *h, double high, double low)
{
    *h = (struct histogram){.high = high,
                            .buckets_per_logit = high > low ? (BUCKETS - 1) / (high - low) : 0};
}

static inline int bucket_of(const struct histogram *h, float logit)
{
    return (int)((h->high - (double)logit) * h->buckets_per_logit);
}

/* The bucket that covers position `at`; *from: where it begins. */
static int find_bucket(const struct histogram *h, int64_t at, int64_t *from)
{
    int b = 0;
    for (*from = 0; at >= *from + h->weight[b]; b++)
        *from += h->weight[b];
    return b;
}

static void insertion_sort(struct nb_candidate *c, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        struct nb_candidate x = c[i];
        int64_t j = i;
        for (; j > 0 && ranks_before(x, c[j - 1]); j--)
            c[j] = c[j - 1];
        c[j] = x;
    }
}

/* find_sorted() for n candidates in the order of their ids. Each round keeps the candidates of one
 * bucket; it loses at least the first or the last of them, so this ends. */
static int32_t find_unsorted(const struct weights *w, struct nb_candidate *c, int64_t n, int64_t at,
                             int64_t *end)
{
    struct histogram h;
    int64_t before = 0, from;
    while (n > INSERTION_SORT_MAX) {
        float high = c[0].logit, low = high;
        for (int64_t i = 1; i < n; i++) {
            high = c[i].logit > high ? c[i].logit : high;
            low = c[i].logit < low ? c[i].logit : low;
        }
        if (high == low) { /* equal logits: already in order, by id */
            int64_t x = weight_of(w, high), i = (at - before) / x;
            *end = before + (i + 1) * x;
            return c[i].id;
        }
        histogram_init(&h, high, low);
        for (int64_t i = 0; i < n; i++)
            h.weight[bucket_of(&h, c[i].logit)] += weight_of(w, c[i].logit);
        int b = find_bucket(&h, at - before, &from);
        before += from;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++)
            if (bucket_of(&h, c[i].logit) == b)
                c[kept++] = c[i];
        n = kept;
    }
    insertion_sort(c, n);
    int32_t id = find_sorted(w, c, at - before, &from);
    *end = before + from;
    return id;
}

/* find_sorted() for all tokens; h: their histogram. */
static int32_t find_in_all(struct nbi_sampler *s, const float *logits, const struct weights *w,
                           const struct histogram *h, int64_t at, int64_t *end)
{
    int64_t from, n = 0;
    int b = find_bucket(h, at, &from);
    double middle = h->high - (h->buckets_per_logit > 0 ? (b + 0.5) / h->buckets_per_logit : 0);
    /* |logit - centre| <= radius holds for the whole bucket and little else. It vectorises, so that
     * blocks of 64 logits without a hit are skipped before bucket_of() decides. */
    float centre = (float)middle, radius = INFINITY;
    if (h->buckets_per_logit > 0)
        radius = (float)(1 / h->buckets_per_logit + 0x1p-22 * fabs(middle));
    for (int64_t start = 0; start < s->vocab; start += 64) {
        int64_t stop = start + 64 < s->vocab ? start + 64 : s->vocab;
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = start; i < stop; i++)
            any |= fabsf(logits[i] - centre) <= radius;
        for (int64_t i = start; any && i < stop; i++)
            if (fabsf(logits[i] - centre) <= radius && bucket_of(h, logits[i]) == b)
                s->candidates[n++] = (struct nb_candidate){logits[i], (int32_t)i};
    }
    int32_t id = find_unsorted(w, s->candidates, n, at - from, end);
    *end += from;
    return id;
}

/* What draw_sorted() would give for all tokens. */
static int32_t draw_unsorted(struct nbi_sampler *s, const float *logits, uint64_t draw)
{
    struct histogram h;
    float high = logits[0], low = high;
#pragma omp simd reduction(max : high) reduction(min : low)
    for (int64_t i = 0; i < s->vocab; i++) {
        high = logits[i] > high ? logits[i] : high;
        low = logits[i] < low ? logits[i] : low;
    }
    struct weights w = weights_for(s, high);
    double log_min_p = log(s->opts.min_p), zero = high + log(0.5 / w.unit) / w.inv_temperature;
    int64_t total = 0, min_p_end = 0, end;
    histogram_init(&h, high, low > zero ? low : zero);
    for (int64_t i = 0; i < s->vocab; i++) {
        if (logits[i] < zero) /* its weight rounds to 0 */
            continue;
        int64_t x = weight_of(&w, logits[i]);
        total += x;
        min_p_end += passes_min_p(&w, logits[i], log_min_p) ? x : 0;
        h.weight[bucket_of(&h, logits[i])] += x;
    }
    end = total;
    if (s->opts.top_p < 1)
        find_in_all(s, logits, &w, &h, top_p_weight(s, total) - 1, &end);
    int64_t at = draw_position(s, draw, end < min_p_end ? end : min_p_end);
    return find_in_all(s, logits, &w, &h, at, &end);
}

/* ---- picking a token ---- */

int64_t nbi_sampler_topk(const struct nbi_sampler *s)
{
    bool plain = !s->penalties && s->opts.bias_count == 0;
    int64_t k = s->opts.temperature == 0 ? 1 : s->opts.top_k;
    k = k < s->vocab ? k : s->vocab;
    return plain && k <= NBI_TOPK_MAX ? k : 0;
}

struct nbi_draw nbi_sampler_draw(const struct nbi_sampler *s)
{
    struct weights w = weights_for(s, 0);
    return (struct nbi_draw){w.inv_temperature, w.unit, s->opts.top_p, log(s->opts.min_p),
                             uniform_bits(s, s->draws)};
}

int32_t nbi_sampler_from_topk(struct nbi_sampler *s, const struct nb_candidate *topk)
{
    int64_t n = nbi_sampler_topk(s);
    uint64_t draw = s->draws++;
    memcpy(s->candidates, topk, (size_t)n * sizeof *topk);
    return n == 1 ? topk[0].id : draw_sorted(s, n, draw);
}

enum nb_status nbi_sampler_pick(struct nbi_sampler *s, float *logits, int32_t *id)
{
    NBI_TRY(nbi_check_logits(logits, s->vocab));
    apply_penalties(s, logits);
    if (s->penalties || s->opts.bias_count > 0)
        NBI_TRY(nbi_context(nbi_check_logits(logits, s->vocab), "after penalties"));
    uint64_t draw = s->draws++;
    if (s->opts.temperature > 0 && s->opts.top_k == 0) {
        *id = draw_unsorted(s, logits, draw);
        return NB_OK;
    }
    int64_t n = select_topk(s, logits, s->opts.temperature == 0 ? 1 : s->opts.top_k);
    *id = n == 1 ? s->candidates[0].id : draw_sorted(s, n, draw);
    return NB_OK;
}
