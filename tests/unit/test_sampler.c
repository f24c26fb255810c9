/* test_sampler.c - draws, against probabilities that are computed here or by hand. */
#include <math.h>

#include "base/rng.h"
#include "infer/sampler.h"
#include "unit/support.h"

#define DRAWS 20000

static const struct nb_sampling plain = {
    .temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 42};

static struct nbi_sampler make(const struct nb_sampling *opts, int64_t vocab)
{
    struct nbi_sampler s;
    assert_ok(nbi_sampler_init(&s, opts, vocab));
    return s;
}

static int32_t draw(struct nbi_sampler *s, const float *logits)
{
    float copy[64];
    int32_t id;
    assert_true(s->vocab <= 64);
    memcpy(copy, logits, (size_t)s->vocab * sizeof *copy);
    assert_ok(nbi_sampler_pick(s, copy, &id));
    assert_true(id >= 0 && id < s->vocab);
    return id;
}

/* The bound that chi-square exceeds in one of 100 000 cases (Wilson and Hilferty). */
static double chi_bound(int degrees)
{
    double k = degrees, a = 2 / (9 * k), z = 1 - a + 4.2649 * sqrt(a);
    return k * z * z * z;
}

/* Draws must have these probabilities: ids of 0 never occur, the others as often as expected. */
static void expect(const struct nb_sampling *opts, const float *logits, const double *p, int vocab)
{
    struct nbi_sampler s = make(opts, vocab);
    int counts[64] = {0}, degrees = -1;
    double chi = 0;
    for (int i = 0; i < DRAWS; i++)
        counts[draw(&s, logits)]++;
    for (int i = 0; i < vocab; i++) {
        double wanted = DRAWS * p[i];
        if (p[i] == 0) {
            if (counts[i] != 0)
                fail_msg("token %d came %d times; it must not", i, counts[i]);
            continue;
        }
        chi += (counts[i] - wanted) * (counts[i] - wanted) / wanted;
        degrees++;
    }
    if (degrees > 0 && chi > chi_bound(degrees))
        fail_msg("chi-square is %g with %d degrees of freedom", chi, degrees);
    nbi_sampler_release(&s);
}

/* ---- distributions ---- */

static void test_temperature__divides_the_logits(void **state)
{
    static const float logits[] = {0.5F, -1, 2, 1.25F, 0, -3, 2, 0.75F};
    static const double temperatures[] = {0.5, 1, 2, 100};
    (void)state;
    for (int t = 0; t < 4; t++) {
        struct nb_sampling o = plain;
        double p[8], all = 0;
        o.temperature = temperatures[t];
        o.seed = (uint64_t)t;
        for (int i = 0; i < 8; i++)
            all += p[i] = exp(logits[i] / temperatures[t]);
        for (int i = 0; i < 8; i++)
            p[i] /= all;
        expect(&o, logits, p, 8);
    }
}

static void test_temperature__close_to_zero_is_greedy(void **state)
{
    static const float logits[] = {1, 1.0001F, -5};
    struct nb_sampling o = plain;
    (void)state;
    o.temperature = 1e-9;
    expect(&o, logits, (const double[]){0, 1, 0}, 3);
}

static void test_top_k__keeps_the_most_likely(void **state)
{
    const float l2 = logf(2);
    const float logits[] = {0, 2 * l2, -1, l2, 0, -2}; /* weights 1 : 4 : . : 2 : 1 : . */
    struct nb_sampling o = plain;
    (void)state;
    o.top_k = 1;
    expect(&o, logits, (const double[]){0, 1, 0, 0, 0, 0}, 6);
    o.top_k = 2;
    expect(&o, logits, (const double[]){0, 2. / 3, 0, 1. / 3, 0, 0}, 6);
    o.top_k = 3; /* of equal logits the lower id */
    expect(&o, logits, (const double[]){1. / 7, 4. / 7, 0, 2. / 7, 0, 0}, 6);
    o.top_k = 4;
    expect(&o, logits, (const double[]){1. / 8, 4. / 8, 0, 2. / 8, 1. / 8, 0}, 6);
    o.top_k = 1000;
    const double all = 8 + exp(-1) + exp(-2);
    expect(&o, logits,
           (const double[]){1 / all, 4 / all, exp(-1) / all, 2 / all, 1 / all, exp(-2) / all}, 6);
}

/* The probabilities are 1/2, 1/4, 1/8 and 1/8. */
static void test_top_p__keeps_the_token_that_crosses(void **state)
{
    const float l2 = logf(2);
    const float logits[] = {l2, 0, 2 * l2, 0}, equal[] = {3, 3, 3, 3};
    struct nb_sampling o = plain;
    (void)state;
    o.top_p = 0.49;
    expect(&o, logits, (const double[]){0, 0, 1, 0}, 4);
    o.top_p = 0.51;
    expect(&o, logits, (const double[]){1. / 3, 0, 2. / 3, 0}, 4);
    o.top_p = 0.74;
    expect(&o, logits, (const double[]){1. / 3, 0, 2. / 3, 0}, 4);
    o.top_p = 0.76;
    expect(&o, logits, (const double[]){2. / 7, 1. / 7, 4. / 7, 0}, 4);
    o.top_p = 0.99;
    expect(&o, logits, (const double[]){2. / 8, 1. / 8, 4. / 8, 1. / 8}, 4);
    o.top_p = 1e-9;
    expect(&o, logits, (const double[]){0, 0, 1, 0}, 4);
    o.top_p = 0.5; /* reached, not crossed */
    expect(&o, equal, (const double[]){0.5, 0.5, 0, 0}, 4);
}

/* Top-p applies to the probabilities after temperature and top-k. */
static void test_top_p__comes_after_top_k(void **state)
{
    static const float equal[10] = {0};
    static const float two[] = {0, 0.69314718F}; /* at temperature 1/2 the weights are 1 : 4 */
    struct nb_sampling o = plain;
    (void)state;
    o.top_k = 4;
    o.top_p = 0.5;
    expect(&o, equal, (const double[]){0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0}, 10);
    o = plain;
    o.top_p = 0.75;
    expect(&o, two, (const double[]){1. / 3, 2. / 3}, 2);
    o.temperature = 0.5;
    expect(&o, two, (const double[]){0, 1}, 2);
}

static void test_min_p__is_relative_to_the_most_likely(void **state)
{
    const float l2 = logf(2);
    const float logits[] = {l2, 0, 2 * l2, -l2}; /* weights 2 : 1 : 4 : 1/2 */
    struct nb_sampling o = plain;
    (void)state;
    o.min_p = 0.6;
    expect(&o, logits, (const double[]){0, 0, 1, 0}, 4);
    o.min_p = 0.4;
    expect(&o, logits, (const double[]){1. / 3, 0, 2. / 3, 0}, 4);
    o.min_p = 0.2;
    expect(&o, logits, (const double[]){2. / 7, 1. / 7, 4. / 7, 0}, 4);
    o.min_p = 1;
    expect(&o, logits, (const double[]){0, 0, 1, 0}, 4);
    o.min_p = 0.4;
    o.temperature = 2; /* now 1/sqrt(2) : 1/2 : 1 : 1/sqrt(8) */
    const double all = 1 + sqrt(0.5) + 0.5;
    expect(&o, logits, (const double[]){sqrt(0.5) / all, 0.5 / all, 1 / all, 0}, 4);
}

/* ---- greedy and top-k ---- */

static void test_greedy__takes_the_lowest_id_of_equal_logits(void **state)
{
    struct nb_sampling o = plain;
    (void)state;
    o.temperature = 0;
    struct nbi_sampler s = make(&o, 5);
    assert_int_equal(draw(&s, (const float[]){1, 5, 3, 4, 2}), 1);
    assert_int_equal(draw(&s, (const float[]){1, 5, 3, 5, 2}), 1);
    assert_int_equal(draw(&s, (const float[]){-1, -1, -1, -1, -1}), 0);
    assert_int_equal(draw(&s, (const float[]){-4, -3, -3, -2, -2}), 3);
    assert_int_equal(draw(&s, (const float[]){-3e38F, 0, 0, 0, 3e38F}), 4);
    assert_int_equal(draw(&s, (const float[]){-0.0F, 0, 0, 0, 0}), 0);
    nbi_sampler_release(&s);
}

static int by_logit(const void *a, const void *b)
{
    const struct nb_candidate *x = a, *y = b;
    return x->logit != y->logit ? (x->logit < y->logit) - (x->logit > y->logit)
                                : (x->id > y->id) - (x->id < y->id);
}

/* Top-k of logits with many equal values, against qsort(). */
static void test_top_k__orders_equal_logits_by_id(void **state)
{
    static const int64_t ks[] = {1, 2, 3, 20, 100, 2999, 3000, 9999};
    static float logits[3000];
    static struct nb_candidate sorted[3000];
    uint32_t x = 1;
    (void)state;
    for (int i = 0; i < 3000; i++) {
        x = x * 1664525 + 1013904223;
        logits[i] = (float)(x >> 22) / 8;
        sorted[i] = (struct nb_candidate){logits[i], i};
    }
    qsort(sorted, 3000, sizeof *sorted, by_logit);
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
        struct nb_sampling o = plain;
        int32_t id;
        o.top_k = ks[i];
        struct nbi_sampler s = make(&o, 3000);
        assert_ok(nbi_sampler_pick(&s, logits, &id));
        for (int64_t j = 0; j < ks[i] && j < 3000; j++)
            if (s.candidates[j].id != sorted[j].id)
                fail_msg("top-k %d: candidate %d is %d", (int)ks[i], (int)j, s.candidates[j].id);
        nbi_sampler_release(&s);
    }
}

/* ---- draws from all logits, without sorting them ---- */

#define MANY 1500

/* Logits that are spread, nearly equal, in steps with many equal ones, or with a few far ahead. */
static void make_logits(float *logits, int n, uint32_t seed)
{
    for (int i = 0; i < n; i += 4) {
        float x[4];
        nbi_philox_normal4(x, seed, (uint64_t)i, 1);
        for (int j = 0; j < 4 && i + j < n; j++)
            logits[i + j] = seed % 5 == 0   ? 3 * x[j]
                            : seed % 5 == 1 ? 100 + 1e-4F * x[j]
                            : seed % 5 == 2 ? floorf(4 * x[j]) / 4
                            : seed % 5 == 3 ? -7
                                            : expf(2 * x[j]) * (j % 2 ? 1 : -1);
    }
    logits[seed * 7 % (uint32_t)n] += seed % 2 ? 0 : 9;
}

/* The draw as it is defined, in double: sort, truncate, walk. false: too close to an edge to
 * decide. */
static bool by_sorting(const struct nb_sampling *o, const float *logits, int n, uint64_t draw,
                       int32_t *id)
{
    static struct nb_candidate c[MANY];
    double all = 0, sum = 0, p = 1;
    int kept = 0;
    for (int i = 0; i < n; i++)
        c[i] = (struct nb_candidate){logits[i], i};
    qsort(c, (size_t)n, sizeof *c, by_logit);
    for (int i = 0; i < n; i++)
        all += exp(((double)c[i].logit - c[0].logit) / o->temperature);
    const double near = 1e-6 * all;
    for (; kept < n && (kept == 0 || sum < o->top_p * all - near); kept++) {
        p = exp(((double)c[kept].logit - c[0].logit) / o->temperature);
        if (kept > 0 && fabs(p - o->min_p) < 1e-6 * p)
            return false;
        if (p < o->min_p)
            break;
        sum += p;
    }
    if (fabs(sum - o->top_p * all) < near && o->top_p < 1)
        return false;
    struct nbi_philox r = nbi_philox(o->seed, draw, 0x73616D70);
    double at = sum * ((double)r.v[0] * 0x1p-32 + (double)r.v[1] * 0x1p-64);
    for (int i = 0; i < kept; i++) {
        at -= exp(((double)c[i].logit - c[0].logit) / o->temperature);
        *id = c[i].id;
        if (fabs(at) < near)
            return false;
        if (at < 0)
            break;
    }
    return true;
}

static void test_unsorted__draws_what_sorting_gives(void **state)
{
    static const double shares[] = {1, 0.9, 0.5, 0.999, 1e-6}, mins[] = {0, 0, 0.05, 1e-4, 1};
    static const double temperatures[] = {1, 0.6, 3, 100, 0.01, 1e-30, 1e-320};
    static float logits[MANY], copy[MANY];
    int told = 0, cases = 0;
    (void)state;
    for (uint32_t seed = 0; seed < 5000; seed++) {
        int n = seed % 7 ? 1 + (int)(seed * 131 % MANY) : 1 + (int)(seed % 70);
        int32_t fast, sorted, wanted = -1;
        struct nb_sampling o = {.temperature = temperatures[seed % 7],
                                .top_p = shares[seed / 7 % 5],
                                .min_p = mins[seed / 35 % 5],
                                .repeat_penalty = 1,
                                .seed = seed};
        make_logits(logits, n, seed);
        struct nbi_sampler a = make(&o, n);
        bool sure = by_sorting(&o, logits, n, 0, &wanted);
        o.top_k = n; /* all tokens are sorted then */
        struct nbi_sampler b = make(&o, n);
        memcpy(copy, logits, sizeof copy);
        assert_ok(nbi_sampler_pick(&a, copy, &fast));
        assert_ok(nbi_sampler_pick(&b, logits, &sorted));
        if (fast != sorted || (sure && fast != wanted))
            fail_msg("case %u of %d tokens: %d; sorted %d, in double %d", seed, n, fast, sorted,
                     wanted);
        cases++;
        told += sure;
        nbi_sampler_release(&a);
        nbi_sampler_release(&b);
    }
    assert_true(told > cases * 9 / 10);
}

/* ---- draws from candidates ---- */

static int better_first(const void *a, const void *b)
{
    const struct nb_candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

static void test_candidates__draw_what_all_logits_give(void **state)
{
    static float logits[MANY], copy[MANY];
    static struct nb_candidate sorted[MANY];
    (void)state;
    for (uint32_t seed = 0; seed < 2000; seed++) {
        int n = 1 + (int)(seed * 131 % MANY), k = seed % 5 ? 1 + (int)(seed % 64) : 0;
        const struct nb_sampling o = {.temperature = k ? 0.3 + seed % 7 : 0,
                                      .top_k = k,
                                      .top_p = seed % 3 ? 0.9 : 1,
                                      .min_p = seed % 4 ? 0.02 : 0,
                                      .repeat_penalty = 1,
                                      .seed = seed};
        struct nbi_sampler all = make(&o, n), topk = make(&o, n);
        make_logits(logits, n, seed);
        for (int i = 0; i < n; i++)
            sorted[i] = (struct nb_candidate){logits[i], i};
        qsort(sorted, (size_t)n, sizeof *sorted, better_first);
        int want = k == 0 ? 1 : k < n ? k : n;
        assert_int_equal(nbi_sampler_topk(&topk), want);
        for (int draw = 0; draw < 3; draw++) {
            int32_t id;
            memcpy(copy, logits, sizeof copy);
            assert_ok(nbi_sampler_pick(&all, copy, &id));
            assert_int_equal(nbi_sampler_from_topk(&topk, sorted), id);
        }
        nbi_sampler_release(&all);
        nbi_sampler_release(&topk);
    }
}

static void test_candidates__are_not_enough_with_penalties(void **state)
{
    static const struct nb_bias bias[] = {{3, 1}};
    const struct nb_sampling cases[] = {
        {.temperature = 1, .top_p = 1, .repeat_penalty = 1},
        {.temperature = 1, .top_k = 65, .top_p = 1, .repeat_penalty = 1},
        {.temperature = 0, .top_p = 1, .repeat_penalty = 1.1},
        {.temperature = 0, .top_p = 1, .repeat_penalty = 1, .presence_penalty = 1},
        {.temperature = 0, .top_p = 1, .repeat_penalty = 1, .bias = bias, .bias_count = 1}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nbi_sampler s = make(&cases[i], 1000);
        assert_int_equal(nbi_sampler_topk(&s), 0);
        nbi_sampler_release(&s);
    }
}

/* ---- penalties and bias ---- */

/* The logits 3, -3, 0, 1 and -1 after ids 0, 1 and 2 were seen three times, once and once. */
static void penalised(const struct nb_sampling *opts, const float wanted[5])
{
    static const int32_t seen[] = {0, 1, 0, 2, 0};
    float logits[] = {3, -3, 0, 1, -1};
    int32_t id;
    struct nbi_sampler s = make(opts, 5);
    for (int i = 0; i < 5; i++)
        nbi_sampler_accept(&s, seen[i]);
    nbi_sampler_accept(&s, -1);
    nbi_sampler_accept(&s, 5);
    assert_ok(nbi_sampler_pick(&s, logits, &id));
    for (int i = 0; i < 5; i++)
        assert_float_equal(logits[i], wanted[i], 1e-6F);
    int best = 0;
    for (int i = 1; i < 5; i++)
        best = wanted[i] > wanted[best] ? i : best;
    assert_int_equal(id, best);
    nbi_sampler_release(&s);
}

static void test_penalties__by_hand(void **state)
{
    static const struct nb_bias bias[] = {{4, 2.5F}, {0, -1}, {4, 0.25F}};
    struct nb_sampling greedy = plain;
    (void)state;
    greedy.temperature = 0;
    struct nb_sampling o = greedy;
    penalised(&o, (const float[]){3, -3, 0, 1, -1});
    o.repeat_penalty = 2;
    penalised(&o, (const float[]){1.5F, -6, 0, 1, -1});
    o.repeat_penalty = 0.5;
    penalised(&o, (const float[]){6, -1.5F, 0, 1, -1});
    o = greedy;
    o.presence_penalty = 2.25;
    penalised(&o, (const float[]){0.75F, -5.25F, -2.25F, 1, -1});
    o.presence_penalty = -1;
    penalised(&o, (const float[]){4, -2, 1, 1, -1});
    o = greedy;
    o.frequency_penalty = 0.75;
    penalised(&o, (const float[]){0.75F, -3.75F, -0.75F, 1, -1});
    o = greedy;
    o.repeat_penalty = 2;
    o.presence_penalty = 0.5;
    o.frequency_penalty = 0.25;
    penalised(&o, (const float[]){0.25F, -6.75F, -0.75F, 1, -1});
    o = greedy;
    o.bias = bias;
    o.bias_count = 3;
    penalised(&o, (const float[]){2, -3, 0, 1, 1.75F});
    o.bias_count = 1;
    penalised(&o, (const float[]){3, -3, 0, 1, 1.5F});
}

/* A bias of ln 2 doubles the weight at temperature 1, and squares that at 1/2. */
static void test_bias__comes_before_the_temperature(void **state)
{
    static const float logits[] = {0, 0};
    const struct nb_bias bias = {1, logf(2)};
    struct nb_sampling o = plain;
    (void)state;
    o.bias = &bias;
    o.bias_count = 1;
    expect(&o, logits, (const double[]){1. / 3, 2. / 3}, 2);
    o.temperature = 0.5;
    expect(&o, logits, (const double[]){1. / 5, 4. / 5}, 2);
}

/* ---- seeds ---- */

static void test_seed__determines_the_draws(void **state)
{
    static const float logits[32] = {0};
    struct nb_sampling o = plain;
    int same = 0;
    (void)state;
    struct nbi_sampler a = make(&o, 32), b = make(&o, 32);
    o.seed = 43;
    struct nbi_sampler c = make(&o, 32);
    o.seed = 42 + ((uint64_t)1 << 40);
    struct nbi_sampler d = make(&o, 32);
    for (int i = 0; i < 1000; i++) {
        int32_t id = draw(&a, logits);
        assert_int_equal(id, draw(&b, logits));
        same += id == draw(&c, logits);
        same += id == draw(&d, logits);
    }
    assert_true(same < 130); /* by chance one in 32 of 2000: 62, with a standard deviation of 8 */
    b.draws = 10;
    nbi_sampler_release(&a);
    a = make(&plain, 32);
    for (int i = 0; i < 10; i++)
        draw(&a, logits);
    assert_int_equal(draw(&a, logits), draw(&b, logits));
    nbi_sampler_release(&a);
    nbi_sampler_release(&b);
    nbi_sampler_release(&c);
    nbi_sampler_release(&d);
}

/* Consecutive draws are independent. */
static void test_seed__draws_are_independent(void **state)
{
    static const float logits[4] = {0};
    struct nbi_sampler s = make(&plain, 4);
    int counts[16] = {0};
    double chi = 0;
    (void)state;
    for (int i = 0; i < DRAWS; i++) {
        int32_t first = draw(&s, logits);
        counts[first * 4 + draw(&s, logits)]++;
    }
    for (int i = 0; i < 16; i++)
        chi += (counts[i] - DRAWS / 16.) * (counts[i] - DRAWS / 16.) / (DRAWS / 16.);
    assert_true(chi < chi_bound(15));
    nbi_sampler_release(&s);
}

/* ---- refusals ---- */

static void test_logits__nonfinite_is_refused(void **state)
{
    static const float wrong[] = {NAN, -NAN, INFINITY, -INFINITY};
    (void)state;
    for (int greedy = 0; greedy < 2; greedy++) {
        struct nb_sampling o = plain;
        o.temperature = !greedy;
        struct nbi_sampler s = make(&o, 5);
        for (int i = 0; i < 20; i++) {
            float logits[] = {1, 2, 3, 4, 5};
            int32_t id;
            logits[i % 5] = wrong[i / 5];
            assert_fails(nbi_sampler_pick(&s, logits, &id), NB_EVALUE, "not finite");
        }
        nbi_sampler_release(&s);
    }
}

static void refused(const struct nb_sampling *opts, const char *words)
{
    struct nbi_sampler s;
    assert_fails(nbi_sampler_init(&s, opts, 5), NB_EINVAL, words);
}

#define REFUSED(member, value, words)                                                              \
    do {                                                                                           \
        struct nb_sampling refused_opts = plain;                                                   \
        refused_opts.member = value;                                                               \
        refused(&refused_opts, words);                                                             \
    } while (0)

static void test_options__out_of_range_are_refused(void **state)
{
    static const struct nb_bias low = {-1, 1}, high = {5, 1};
    struct nb_sampling o = plain;
    (void)state;
    REFUSED(temperature, -0.1, "temperature of -0.1");
    REFUSED(temperature, 100.5, "temperature");
    REFUSED(temperature, NAN, "temperature");
    REFUSED(temperature, INFINITY, "temperature");
    REFUSED(top_p, 0, "top-p 0");
    REFUSED(top_p, 1.01, "top-p 1.01");
    REFUSED(top_p, NAN, "top-p");
    REFUSED(min_p, -0.01, "min-p -0.01");
    REFUSED(min_p, 1.5, "min-p 1.5");
    REFUSED(min_p, NAN, "min-p");
    REFUSED(top_k, -1, "top-k");
    REFUSED(repeat_penalty, 0, "penalty");
    REFUSED(repeat_penalty, -1, "penalty");
    REFUSED(repeat_penalty, NAN, "penalty");
    REFUSED(presence_penalty, NAN, "penalty");
    REFUSED(presence_penalty, INFINITY, "penalty");
    REFUSED(frequency_penalty, -INFINITY, "penalty");
    o.bias = &low;
    o.bias_count = 1;
    refused(&o, "bias for token -1");
    o.bias = &high;
    refused(&o, "bias for token 5");
}

/* Settings that would make logits infinite or NaN after the model's were checked. */
static void test_options__nonfinite_are_refused(void **state)
{
    static const struct nb_bias nan_bias = {1, NAN}, infinite = {1, INFINITY};
    struct nb_sampling o = plain;
    (void)state;
    REFUSED(repeat_penalty, INFINITY, "penalty");
    o.bias_count = 1;
    o.bias = &nan_bias;
    refused(&o, "bias");
    o.bias = &infinite;
    refused(&o, "bias");
}

/* Finite settings with an infinite result: an error or the most likely token, never another. */
static void test_penalties__overflow_is_an_error_or_greedy(void **state)
{
    struct nb_sampling o = plain;
    float logits[] = {1, 5, 2, 3};
    int32_t id = -1;
    (void)state;
    o.repeat_penalty = 1e-300;
    struct nbi_sampler s = make(&o, 4);
    nbi_sampler_accept(&s, 1);
    enum nb_status rc = nbi_sampler_pick(&s, logits, &id);
    if (rc == NB_OK)
        assert_int_equal(id, 1);
    nbi_sampler_release(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_temperature__divides_the_logits),
        cmocka_unit_test(test_temperature__close_to_zero_is_greedy),
        cmocka_unit_test(test_top_k__keeps_the_most_likely),
        cmocka_unit_test(test_top_p__keeps_the_token_that_crosses),
        cmocka_unit_test(test_top_p__comes_after_top_k),
        cmocka_unit_test(test_min_p__is_relative_to_the_most_likely),
        cmocka_unit_test(test_greedy__takes_the_lowest_id_of_equal_logits),
        cmocka_unit_test(test_top_k__orders_equal_logits_by_id),
        cmocka_unit_test(test_unsorted__draws_what_sorting_gives),
        cmocka_unit_test(test_candidates__draw_what_all_logits_give),
        cmocka_unit_test(test_candidates__are_not_enough_with_penalties),
        cmocka_unit_test(test_penalties__by_hand),
        cmocka_unit_test(test_bias__comes_before_the_temperature),
        cmocka_unit_test(test_seed__determines_the_draws),
        cmocka_unit_test(test_seed__draws_are_independent),
        cmocka_unit_test(test_logits__nonfinite_is_refused),
        cmocka_unit_test(test_options__out_of_range_are_refused),
        cmocka_unit_test(test_options__nonfinite_are_refused),
        cmocka_unit_test(test_penalties__overflow_is_an_error_or_greedy),
    };
    return cmocka_run_group_tests_name("sampler", tests, NULL, NULL);
}
