/* fit.c - searches the settings of a run for those that fit into a given amount of memory.
 *
 * A row of the table below is a setting, its values ordered from the best; every combination is
 * planned. What is listed is sorted by speed, then by precision. */
#include <math.h>
#include <string.h>

#include "train/run.h"

#define CARD_RESERVE ((int64_t)1 << 29) /* of a GPU's size: a card of 16 GB has 15.5 GiB to use */
#define DIVISORS     64                 /* a batch size halves at most 63 times */

/* ---- the settings ---- */

static void set_recompute(struct nb_train_opts *o, int value)
{
    o->recompute = value;
}

static void set_moments(struct nb_train_opts *o, int value)
{
    o->moment_type = (enum nb_moment_type)value;
}

static void set_master(struct nb_train_opts *o, int value)
{
    o->bf16_master = value;
}

static void set_fused_step(struct nb_train_opts *o, int value)
{
    o->fused_step = value;
}

static void set_gradients(struct nb_train_opts *o, int value)
{
    o->bf16_gradients = value;
}

static void set_weight_store(struct nb_train_opts *o, int value)
{
    const enum nb_weight_store stores[] = {NB_WEIGHT_STORE_BF16, NB_WEIGHT_STORE_CODES,
                                           NB_WEIGHT_STORE_SCALES};
    if (o->precision == NB_PRECISION_NVFP4)
        o->weight_store = stores[value];
}

static void set_head_slices(struct nb_train_opts *o, int value)
{
    o->head_slices = value;
}

/* A setting that is varied. Value 0 is the best: the fastest or the most precise. */
struct setting {
    enum nb_fit_setting id;
    int values;
    bool gpu_only;
    void (*set)(struct nb_train_opts *o, int value);
};

static const struct setting settings[] = {
    {NB_FIT_RECOMPUTE, 2, false, set_recompute},   {NB_FIT_MOMENTS, 4, false, set_moments},
    {NB_FIT_MASTER, 2, false, set_master},         {NB_FIT_FUSED_STEP, 2, false, set_fused_step},
    {NB_FIT_GRADIENTS, 2, true, set_gradients},    {NB_FIT_WEIGHT_STORE, 3, true, set_weight_store},
    {NB_FIT_HEAD_SLICES, 2, true, set_head_slices}};

#define SETTINGS ((int)(sizeof settings / sizeof *settings))

struct candidate {
    struct nb_train_fit fit;
    int value[SETTINGS], halvings; /* of the batch size */
    int64_t slowness, loss;
};

/* ---- speed ---- */

/* Of an H200, roughly. Only their ratios matter, which differ less from card to card. */
#define FLOPS_PER_S         6.5e14
#define BYTES_PER_S         4.2e12
#define HALF_RATE_ROWS      512   /* products of so many rows reach half of the rate */
#define UPDATE_SECONDS      5e-12 /* of a parameter, in AdamW */
#define CONVERT_CODES_BYTES 2.56  /* of a weight, read and written to have it in bf16 */

/* Bytes to make a weight of the forward pass anew in bf16. */
static double convert_bytes(const struct nb_train_opts *o)
{
    if (o->precision != NB_PRECISION_NVFP4 || o->weight_store == NB_WEIGHT_STORE_BF16)
        return 0;
    if (o->weight_store != NB_WEIGHT_STORE_SCALES)
        return CONVERT_CODES_BYTES;
    return o->bf16_master ? 4.06 : 6.06;
}

/* Seconds a token on a GPU. What the optimizer moves is left out: a setting that is less precise is
 * never chosen for its speed. */
static double seconds_per_token(const struct nb_train_opts *o, const struct nb_train_plan *p)
{
    double N = (double)(o->batch_size * o->seq_len), passes = (double)o->grad_accum;
    double again = o->recompute ? p->layer_flops_per_token : 0;
    if (o->head_slices)
        again += p->head_flops_per_token;
    double flops = N * (p->flops_per_token + again);
    double pass = flops / (FLOPS_PER_S * N / (N + HALF_RATE_ROWS));
    double parameters = (double)p->parameters;
    pass += parameters * convert_bytes(o) * (o->recompute ? 3 : 2) / BYTES_PER_S;
    double update = parameters * UPDATE_SECONDS + parameters * 4 * (passes - 1) / BYTES_PER_S;
    return (pass * passes + update) / (N * passes);
}

/* Settings whose slowness is equal count as equally fast: on a GPU within 1 %. */
static int64_t slowness_of(const struct nbi_run *r, const struct candidate *c,
                           const struct nb_train_opts *o, const struct nb_train_plan *p)
{
    if (nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY))
        return llround(100 * log(seconds_per_token(o, p)));
    return (int64_t)o->recompute * DIVISORS + c->halvings;
}

/* ---- order ---- */

/* Fastest first, then most precise, then with clipping by one norm. */
static int compare(const void *x, const void *y)
{
    const struct candidate *a = x, *b = y;
    const int64_t keys[][2] = {{a->slowness, b->slowness},
                               {a->loss, b->loss},
                               {a->fit.fused_step, b->fit.fused_step},
                               {a->fit.head_slices, b->fit.head_slices},
                               {a->fit.moment_type, b->fit.moment_type},
                               {a->fit.total, b->fit.total}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (keys[i][0] != keys[i][1])
            return keys[i][0] < keys[i][1] ? -1 : 1;
    return 0;
}

/* Whether a is at least as good as b in every respect. */
static bool as_good(const struct candidate *a, const struct candidate *b)
{
    bool good = a->halvings <= b->halvings;
    for (int i = 0; i < SETTINGS; i++)
        good = good && a->value[i] <= b->value[i];
    return good;
}

/* ---- the search ---- */

struct search {
    const struct nbi_run *r;
    unsigned keep; /* settings that are not varied */
    int64_t limit;
    struct candidate *all; /* that fit */
    int count;
    struct nb_train_fit *smallest;
};

static bool varies(const struct search *s, int setting)
{
    bool gpu = nbi_backend_has(s->r->be, NBI_CAP_OWN_MEMORY);
    return !(s->keep >> settings[setting].id & 1) && (gpu || !settings[setting].gpu_only);
}

/* The values of combination k; false: there are no more. */
static bool combine(const struct search *s, int k, struct candidate *c)
{
    for (int i = 0; i < SETTINGS; i++) {
        int values = varies(s, i) ? settings[i].values : 1;
        c->value[i] = k % values;
        k /= values;
    }
    return k == 0;
}

/* The options of a candidate; false: they exclude each other. Smaller batches accumulate to the
 * same update; a fused step cannot accumulate. */
static bool apply(const struct search *s, const struct candidate *c, struct nb_train_opts *o)
{
    const struct nb_train_opts *given = s->r->opts;
    *o = *given;
    for (int i = 0; i < SETTINGS; i++)
        if (varies(s, i))
            settings[i].set(o, c->value[i]);
    o->batch_size = given->batch_size >> c->halvings;
    if (!o->fused_step)
        o->grad_accum = given->grad_accum << c->halvings;
    struct nbi_run varied = *s->r;
    varied.opts = o;
    return nbi_run_check_sizes(o) == NB_OK &&
           !(o->bf16_gradients && !nbi_run_computes_in_bf16(&varied));
}

static enum nb_status plan_candidate(const struct search *s, struct candidate *c,
                                     const struct nb_train_opts *o)
{
    struct nb_train_plan plan;
    struct nbi_run varied = *s->r;
    varied.opts = o;
    NBI_TRY(nbi_run_plan(&varied, &plan));
    c->fit = (struct nb_train_fit){.batch_size = o->batch_size,
                                   .grad_accum = o->grad_accum,
                                   .recompute = o->recompute,
                                   .fused_step = o->fused_step,
                                   .head_slices = o->head_slices,
                                   .bf16_master = o->bf16_master,
                                   .bf16_gradients = o->bf16_gradients,
                                   .weight_store = o->weight_store,
                                   .moment_type = o->moment_type,
                                   .total = plan.total};
    c->loss = (int64_t)o->moment_type + o->bf16_master + o->bf16_gradients;
    c->slowness = slowness_of(s->r, c, o, &plan);
    return NB_OK;
}

static enum nb_status plan_all(struct search *s)
{
    int64_t batch = s->r->opts->batch_size;
    bool halve = !(s->keep >> NB_FIT_BATCH & 1);
    struct candidate c = {0};
    for (c.halvings = 0; c.halvings == 0 || (halve && batch % ((int64_t)1 << c.halvings) == 0);
         c.halvings++)
        for (int k = 0; combine(s, k, &c); k++) {
            struct nb_train_opts o;
            if (!apply(s, &c, &o))
                continue;
            NBI_TRY(plan_candidate(s, &c, &o));
            if (s->smallest->total == 0 || c.fit.total < s->smallest->total)
                *s->smallest = c.fit;
            if (c.fit.total <= s->limit)
                s->all[s->count++] = c;
        }
    return NB_OK;
}

/* Sorts and drops every candidate that another one equals or beats in every respect. */
static void keep_best(struct search *s)
{
    int kept = 0;
    qsort(s->all, (size_t)s->count, sizeof *s->all, compare);
    for (int i = 0; i < s->count; i++) {
        bool best = true;
        for (int j = 0; j < kept && best; j++) /* better ones sort first */
            best = !as_good(&s->all[j], &s->all[i]);
        if (best)
            s->all[kept++] = s->all[i];
    }
    s->count = kept;
}

int64_t nbi_run_fit_limit(const struct nbi_run *r, double gib)
{
    bool gpu = nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY);
    return (int64_t)(gib * 0x1p30) - (gpu ? CARD_RESERVE : 0);
}

double nbi_run_fit_size(const struct nbi_run *r, int64_t bytes)
{
    bool gpu = nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY);
    return (double)(bytes + (gpu ? CARD_RESERVE : 0)) / 0x1p30;
}

static size_t combinations(void)
{
    size_t n = DIVISORS;
    for (int i = 0; i < SETTINGS; i++)
        n *= (size_t)settings[i].values;
    return n;
}

enum nb_status nb_train_fit(const struct nb_train_opts *opts, double gib, unsigned keep,
                            struct nb_train_fit *fits, int *count, struct nb_train_fit *smallest)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nbi_run r;
    struct nb_train_fit least = {0};
    struct search s = {.r = &r, .keep = keep, .smallest = &least};
    s.all = malloc(combinations() * sizeof *s.all);
    if (!s.all)
        return nbi_fail_memory("settings", combinations() * sizeof *s.all);
    enum nb_status rc = nbi_run_open_plan(&r, opts);
    if (rc == NB_OK) {
        s.limit = nbi_run_fit_limit(&r, gib);
        rc = plan_all(&s);
    }
    nbi_run_close(&r);
    if (rc == NB_OK) {
        keep_best(&s);
        *smallest = least;
        *count = s.count < *count ? s.count : *count;
        for (int i = 0; i < *count; i++)
            fits[i] = s.all[i].fit;
    }
    free(s.all);
    return rc;
}

void nb_train_fit_use(struct nb_train_opts *o, const struct nb_train_fit *f)
{
    o->batch_size = f->batch_size;
    o->grad_accum = f->grad_accum;
    o->recompute = f->recompute;
    o->fused_step = f->fused_step;
    o->head_slices = f->head_slices;
    o->bf16_master = f->bf16_master;
    o->bf16_gradients = f->bf16_gradients;
    o->weight_store = f->weight_store;
    o->moment_type = f->moment_type;
}
