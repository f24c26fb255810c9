/* test_backward_products.c - gradients of products and of attention against the equations in
 * double, and those against finite differences. */
#include "gradients.h"
#include "matrices.h"

/* ---- products ---- */

struct linear {
    int count;
    int64_t N, K;
    struct matrix w[NBI_LINEAR_MAX];
    double *x, *dx0, *dy[NBI_LINEAR_MAX], *dw0[NBI_LINEAR_MAX];
    bool with_dx, with_dw, add, fresh, dw_bf16;
    bool neighbours; /* dy are columns of the same rows, dW one block */
    bool copies;     /* of the weights, in bf16 */
    int which;       /* which input to vary, for finite differences */
};

/* All dy as columns of one block, in order. */
static void put_neighbours(struct rig *r, const struct linear *c, struct nbi_op_linear_bwd *a)
{
    int64_t O = 0, at = 0;
    for (int i = 0; i < c->count; i++)
        O += c->w[i].O;
    double *all = zeros(c->N * O, sizeof *all);
    for (int i = 0; i < c->count; at += c->w[i++].O)
        for (int64_t n = 0; n < c->N; n++)
            memcpy(all + n * O + at, c->dy[i] + n * c->w[i].O, (size_t)c->w[i].O * sizeof *all);
    struct nbi_ptr block = put_acts(r, all, c->N * O);
    at = 0;
    for (int i = 0; i < c->count; at += c->w[i++].O) {
        a->dy[i] = nbi_ptr_add(block, at * (bf16 ? 2 : 4));
        a->ldy[i] = O;
    }
    free(all);
}

/* Room for n values of dW. */
static struct nbi_ptr alloc_dw(struct rig *r, const struct linear *c, int64_t n)
{
    return c->dw_bf16 ? alloc_acts(r, n) : alloc_nan(r, n);
}

/* Each dW, to be written or added to. Those of neighbours are one block. */
static void put_dw(struct rig *r, const struct linear *c, struct nbi_ptr dw[NBI_LINEAR_MAX])
{
    int64_t n = 0;
    for (int i = 0; i < c->count; i++)
        n += c->w[i].O * c->K;
    struct nbi_ptr all = c->neighbours ? alloc_dw(r, c, n) : (struct nbi_ptr){0};
    for (int i = 0; i < c->count; i++) {
        n = c->w[i].O * c->K;
        dw[i] = c->neighbours ? all : c->fresh ? alloc_dw(r, c, n) : put_in(r, c->dw0[i], n);
        if (c->neighbours)
            all = nbi_ptr_add(all, n * (c->dw_bf16 ? 2 : 4));
    }
}

static float *get_dw(struct rig *r, const struct linear *c, const struct nbi_ptr *dw, float *out)
{
    int64_t n = 0;
    for (int i = 0; i < c->count; i++) {
        n += c->w[i].O * c->K;
        if (c->neighbours && i + 1 < c->count)
            continue;
        out = (c->dw_bf16 ? get_acts : get)(r, out, dw[c->neighbours ? 0 : i], n);
        n = 0;
    }
    return out;
}

static void run_linear(struct rig *r, const void *ctx, float *out)
{
    const struct linear *c = ctx;
    struct nbi_op_linear_bwd a = {.count = c->count,
                                  .N = c->N,
                                  .K = c->K,
                                  .add = c->add,
                                  .fresh = c->fresh,
                                  .bf16 = bf16,
                                  .dw_bf16 = c->dw_bf16};
    if (c->with_dx)
        a.dx = c->add ? put_acts(r, c->dx0, c->N * c->K) : alloc_acts(r, c->N * c->K);
    if (c->with_dw)
        a.x = put_acts(r, c->x, c->N * c->K);
    if (c->neighbours)
        put_neighbours(r, c, &a);
    for (int i = 0; i < c->count; i++) {
        const struct matrix *w = &c->w[i];
        a.w[i] = put_matrix(r, w);
        if (!c->neighbours) {
            a.ldy[i] = ld_of(w->O);
            a.dy[i] = put_rows(r, c->dy[i], c->N, w->O, a.ldy[i]);
        }
    }
    if (c->with_dw)
        put_dw(r, c, a.dw);
    if (c->copies)
        put_copies(r, a.w, c->w, c->count);
    need_op(r->be, linear_bwd);
    assert_ok(r->be->linear_bwd(r->s, &a));
    drop_copies(a.w, c->count);
    if (c->with_dx)
        out = get_acts(r, out, a.dx, c->N * c->K);
    if (c->with_dw)
        get_dw(r, c, a.dw, out);
    for (int i = 0; i < c->count; i++)
        r->be->weight_free(r->be, &a.w[i]);
}

/* The objective sum dy (x W^T), as a function of x or of one matrix. */
static double linear_of(const struct linear *c, int i, const double *x, const double *w)
{
    double sum = 0;
    for (int64_t n = 0; n < c->N; n++)
        for (int64_t o = 0; o < c->w[i].O; o++)
            for (int64_t k = 0; k < c->K; k++)
                sum += c->dy[i][n * c->w[i].O + o] * x[n * c->K + k] * w[o * c->K + k];
    return sum;
}

static double linear_by_x(const void *ctx, const double *x)
{
    const struct linear *c = ctx;
    double sum = 0;
    for (int i = 0; i < c->count; i++)
        sum += linear_of(c, i, x, c->w[i].values);
    return sum;
}

static double linear_by_w(const void *ctx, const double *w)
{
    const struct linear *c = ctx;
    return linear_of(c, c->which, c->x, w);
}

/* dx, without what it is added to. */
static void expect_dx(const struct linear *c, double *want, double *magnitude)
{
    for (int i = 0; i < c->count; i++)
        for (int64_t n = 0; n < c->N; n++)
            for (int64_t o = 0; o < c->w[i].O; o++)
                for (int64_t k = 0; k < c->K; k++) {
                    double term = c->dy[i][n * c->w[i].O + o] * c->w[i].values[o * c->K + k];
                    want[n * c->K + k] += term;
                    magnitude[n * c->K + k] += fabs(term);
                }
}

static void expect_dw(const struct linear *c, int i, double *want, double *magnitude)
{
    for (int64_t n = 0; n < c->N; n++)
        for (int64_t o = 0; o < c->w[i].O; o++)
            for (int64_t k = 0; k < c->K; k++) {
                double term = c->dy[i][n * c->w[i].O + o] * c->x[n * c->K + k];
                want[o * c->K + k] += term;
                magnitude[o * c->K + k] += fabs(term);
            }
}

/* Checks one combination of flags. */
static void check_linear_flags(const struct linear *c, const struct expected *dx,
                               const struct expected *dw)
{
    const struct nbi_stream_limits limits = limits_of(c->N, c->K);
    int64_t terms = 0, n = c->N * c->K, at = 0;
    struct expected e = expect(n + dw->n);
    for (int i = 0; i < c->count; i++)
        terms += c->w[i].O;
    for (int64_t i = 0; c->with_dx && i < n; i++, at++) {
        double before = c->add ? c->dx0[i] : 0;
        e.want[at] = before + dx->want[i];
        e.bound[at] = (double)(terms + 6) * U * (dx->bound[i] + fabs(before));
    }
    for (int i = 0, j = 0; c->with_dw && i < c->count; i++)
        for (int64_t k = 0; k < c->w[i].O * c->K; k++, j++, at++) {
            double before = c->fresh ? 0 : c->dw0[i][k];
            e.want[at] = before + dw->want[j];
            e.bound[at] = (double)(c->N + 4) * U * (dw->bound[j] + fabs(before));
        }
    e.n = at;
    check("linear_bwd", run_linear, c, &limits, &e);
    expected_free(&e);
}

struct linear_shape {
    int64_t N, K;
    int count;
    int64_t O[NBI_LINEAR_MAX];
    enum nbi_dtype dtype[NBI_LINEAR_MAX];
    int flags; /* flags to try: bit 0 dx, bit 1 dw, bit 2 add */
};

/* All combinations of flags that the shape asks for. Gradients are written, and of which type, in
 * turn. */
static void check_linear_shape(struct linear *c, const struct linear_shape *s,
                               const struct expected *dx, const struct expected *dw)
{
    for (int flag_set = 1; flag_set < 8; flag_set++) {
        c->with_dx = flag_set & 1;
        c->with_dw = flag_set & 2;
        c->add = flag_set & 4;
        if (flag_set == 4 || (s->flags != 7 && flag_set != s->flags))
            continue;
        c->fresh = c->dw_bf16 = c->neighbours = c->copies = false;
        check_linear_flags(c, dx, dw);
        c->neighbours = s->count > 1;
        c->fresh = true;
        check_linear_flags(c, dx, dw);
        c->copies = bf16 && c->with_dx;
        if (c->copies)
            check_linear_flags(c, dx, dw);
        c->dw_bf16 = bf16;
        if (bf16 && c->with_dw)
            check_linear_flags(c, dx, dw);
    }
}

static void check_linear_case(const struct linear_shape *s)
{
    struct linear c = {.count = s->count, .N = s->N, .K = s->K};
    int64_t sizes = 0, at = 0;
    for (int i = 0; i < s->count; i++) {
        matrix_new(&c.w[i], s->dtype[i], s->O[i], s->K);
        c.dy[i] = random_acts(s->N * s->O[i], 1);
        c.dw0[i] = random_floats(s->O[i] * s->K, 1);
        sizes += s->O[i] * s->K;
    }
    c.x = random_acts(s->N * s->K, 1);
    c.dx0 = random_acts(s->N * s->K, 1);
    struct expected dx = expect(s->N * s->K), dw = expect(sizes);
    expect_dx(&c, dx.want, dx.bound);
    if (sizes * s->N < 50000)
        check_gradient("linear by x", linear_by_x, &c, c.x, dx.want, dx.n);
    for (int i = 0; i < s->count; i++, at += s->O[i - 1] * s->K) {
        expect_dw(&c, i, dw.want + at, dw.bound + at);
        c.which = i;
        if (sizes * s->N < 50000)
            check_gradient("linear by w", linear_by_w, &c, c.w[i].values, dw.want + at,
                           s->O[i] * s->K);
    }
    check_linear_shape(&c, s, &dx, &dw);
    for (int i = 0; i < s->count; i++) {
        matrix_free(&c.w[i]);
        free(c.dy[i]);
        free(c.dw0[i]);
    }
    free(c.x);
    free(c.dx0);
    expected_free(&dx);
    expected_free(&dw);
}

static void check_linear_bwd(void)
{
    static const struct linear_shape shapes[] = {
        {1, 1, 1, {1}, {NBI_F32}, 7},
        {3, 37, 3, {5, 1, 40}, {NBI_BF16, NBI_F16, NBI_F32}, 7},
        {1, 48, 2, {17, 30}, {NBI_NVFP4, NBI_BF16}, 7},
        {65, 80, 3, {33, 16, 7}, {NBI_NVFP4, NBI_NVFP4, NBI_NVFP4}, 7},
        {65, 600, 1, {300}, {NBI_BF16}, 3},
        {13, 272, 2, {520, 300}, {NBI_NVFP4, NBI_F32}, 3}, /* K longer than a gemm block */
        {300, 64, 1, {100}, {NBI_NVFP4}, 3},
        {3, 2100, 1, {20}, {NBI_F16}, 3}, /* more columns than a gemm block */
        {2, 2064, 1, {33}, {NBI_NVFP4}, 3},
        {2, 48, 1, {1000}, {NBI_F32}, 3}, /* dw has more rows than a gemm block */
        {127, 64, 2, {48, 48}, {NBI_NVFP4, NBI_NVFP4}, 7},
        {600, 48, 1, {20}, {NBI_BF16}, 7}}; /* more rows than are converted at a time */
    /* more weights than a GPU converts at a time */
    static const struct linear_shape large = {3, 128, 1, {16500}, {NBI_NVFP4}, 3};
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (size_t way = SANITIZED ? i / 2 % 2 : 0; way < 2; way += SANITIZED ? 2 : 1) {
            bf16 = way;
            gap = i % 2 * 8;
            check_linear_case(&shapes[i]);
        }
    if (gpu)
        check_linear_case(&large);
}

/* Products of one shape and what comes of them: dx, then dw. */
struct day {
    struct linear c;
    struct nbi_stream_limits limits;
    int64_t count;
    float *first, *again;
};

static struct day day_new(void)
{
    struct day d = {
        .c = {.count = 1, .N = 200, .K = 160, .with_dx = true, .with_dw = true, .fresh = true}};
    const int64_t O = 104;
    bf16 = true;
    d.limits = limits_of(d.c.N, d.c.K);
    d.count = d.c.N * d.c.K + O * d.c.K;
    d.first = zeros(d.count, sizeof *d.first);
    d.again = zeros(d.count, sizeof *d.again);
    matrix_new(&d.c.w[0], NBI_BF16, O, d.c.K);
    d.c.dy[0] = random_acts(d.c.N * O, 1);
    d.c.x = random_acts(d.c.N * d.c.K, 1);
    return d;
}

static void day_free(struct day *d)
{
    matrix_free(&d->c.w[0]);
    free(d->c.dy[0]);
    free(d->c.x);
    free(d->first);
    free(d->again);
}

static void day_run(struct day *d, float *out)
{
    struct rig r;
    rounded_count = 0;
    results = out;
    rig_begin(&r, NBI_SIMD_SCALAR, 1, &d->limits);
    run_linear(&r, &d->c, out);
    rig_end(&r);
}

static void open_gpu_again(void)
{
    gpu->close(gpu);
    assert_ok(nbi_backend_open(&gpu, &(struct nbi_backend_opts){.device = "cuda"}));
}

/* A GPU measures algorithms when it first sees a shape. Whichever is the fastest today, the bits
 * are those of the other days. */
static void check_bits_whatever_is_measured(void)
{
    struct day d = day_new();
    for (int i = 0; i < 4; i++) {
        setenv("NB_EMULATED_FASTEST", i % 2 ? "backwards" : "forwards", 1);
        open_gpu_again();
        day_run(&d, i == 0 ? d.first : d.again);
        if (i > 0)
            assert_memory_equal(d.first, d.again, (size_t)d.count * sizeof *d.first);
    }
    unsetenv("NB_EMULATED_FASTEST");
    day_free(&d);
}

#define HEADER 96 /* bytes of a tuning before its entries, which have as many */

static void refuse_tuning(const uint8_t *bytes, int64_t n)
{
    char why[NBI_TUNING_WHY];
    assert_int_equal(gpu->tuning_load(gpu, bytes, n, why), NB_EFORMAT);
}

/* Bytes that a device saved make another process's choices; damaged ones do no harm. */
static void check_tuning_of_another_day(void)
{
    struct day d = day_new();
    uint8_t saved[NBI_TUNING_MAX], again[NBI_TUNING_MAX];
    char why[NBI_TUNING_WHY];
    assert_true(nbi_backend_has(gpu, NBI_CAP_TUNING));
    assert_int_equal(gpu->tuning_save(gpu, saved), HEADER); /* nothing has been chosen */
    day_run(&d, d.first);
    const int64_t n = gpu->tuning_save(gpu, saved);
    assert_int_equal(n, HEADER + 2 * 96); /* of dx and of dw */
    open_gpu_again();
    assert_ok(gpu->tuning_load(gpu, saved, n, why));
    assert_string_equal(why, "");
    assert_int_equal(gpu->tuning_save(gpu, again), n);
    assert_memory_equal(saved, again, (size_t)n);
    for (int64_t cut = 0; cut < n; cut++)
        refuse_tuning(saved, cut);
    saved[HEADER - 4]++; /* the count */
    refuse_tuning(saved, n);
    memset(saved + HEADER - 4, 0xFF, 4);
    refuse_tuning(saved, n);
    memcpy(saved, again, (size_t)n);
    saved[8] = '\x1b'; /* the name would reach a terminal */
    refuse_tuning(saved, n);
    memcpy(saved, again, (size_t)n);
    saved[8] = saved[8] == 'x' ? 'y' : 'x';
    assert_ok(gpu->tuning_load(gpu, saved, n, why));
    assert_non_null(strstr(why, "multiprocessors) before, and is on "));
    memcpy(saved, again, (size_t)n);
    saved[72]++; /* the library's version */
    assert_ok(gpu->tuning_load(gpu, saved, n, why));
    assert_non_null(strstr(why, "it used cuBLASLt "));
    memcpy(saved, again, (size_t)n);
    for (int64_t entry = HEADER; entry < n; entry += 96)
        memset(saved + entry + 32, 0xA5, 64);
    assert_ok(gpu->tuning_load(gpu, saved, n, why)); /* no algorithms, for the shapes of this day */
    day_run(&d, d.again);
    assert_memory_equal(d.first, d.again, (size_t)d.count * sizeof *d.first);
    day_free(&d);
}

/* ---- attention ---- */

struct attention {
    int64_t N, NH, NKV, D;
    double *q, *k, *v, *dy; /* q, k and v in one array */
    double *y, *lse;
    int32_t *first, *end;
};

/* A score, and the sum of its magnitudes. */
static double score(const struct attention *c, const double *qkv, int64_t n, int64_t h, int64_t j,
                    double *magnitude)
{
    const double *q = qkv + (n * c->NH + h) * c->D;
    const double *k = qkv + (c->N * c->NH + j * c->NKV + h / (c->NH / c->NKV)) * c->D;
    double sum = 0, all = 0;
    for (int64_t d = 0; d < c->D; d++) {
        sum += q[d] * k[d];
        all += fabs(q[d] * k[d]);
    }
    if (magnitude)
        *magnitude = all / sqrt((double)c->D);
    return sum / sqrt((double)c->D);
}

/* y and lse of row n and head h. */
static void attend(const struct attention *c, const double *qkv, int64_t n, int64_t h, double *y,
                   double *lse)
{
    double top = -INFINITY, sum = 0;
    const double *v = qkv + (c->N * (c->NH + c->NKV) + h / (c->NH / c->NKV)) * c->D;
    memset(y, 0, (size_t)c->D * sizeof *y);
    for (int64_t j = c->first[n]; j <= n; j++)
        top = fmax(top, score(c, qkv, n, h, j, NULL));
    for (int64_t j = c->first[n]; j <= n; j++) {
        double p = exp(score(c, qkv, n, h, j, NULL) - top);
        sum += p;
        for (int64_t d = 0; d < c->D; d++)
            y[d] += p * v[j * c->NKV * c->D + d];
    }
    for (int64_t d = 0; d < c->D; d++)
        y[d] /= sum;
    *lse = top + log(sum);
}

static double attention_objective(const void *ctx, const double *qkv)
{
    const struct attention *c = ctx;
    double *y = zeros(c->D, sizeof *y), lse, sum = 0;
    for (int64_t n = 0; n < c->N; n++)
        for (int64_t h = 0; h < c->NH; h++) {
            attend(c, qkv, n, h, y, &lse);
            for (int64_t d = 0; d < c->D; d++)
                sum += c->dy[(n * c->NH + h) * c->D + d] * y[d];
        }
    free(y);
    return sum;
}

/* Adds the contribution of row n and head h through key j. The bounds of dq, dk and dv follow from
 * those of p (relative) and of dp - delta. */
static void attention_pair(const struct attention *c, struct expected *e, int64_t n, int64_t h,
                           int64_t j)
{
    int64_t D = c->D, kv = h / (c->NH / c->NKV), row = (n * c->NH + h) * D;
    int64_t key = (c->N * c->NH + j * c->NKV + kv) * D, value = key + c->N * c->NKV * D;
    const double *dy = c->dy + row, *y = c->y + row;
    double m, s = score(c, c->q, n, h, j, &m), lse = c->lse[n * c->NH + h], p = exp(s - lse);
    double dp = 0, of_dp = 0, terms = (double)(c->N * (c->NH / c->NKV) + 4);
    for (int64_t d = 0; d < D; d++) {
        dp += dy[d] * (c->q[value + d] - y[d]);
        of_dp += fabs(dy[d] * c->q[value + d]) + fabs(dy[d] * y[d]);
    }
    double of_p = U * ((double)(D + 4) * m + 2 * fabs(s) + 2 * (fabs(s) + fabs(lse)) + 6);
    double ds = p * dp / sqrt((double)D);
    double of_ds = p / sqrt((double)D) * (fabs(dp) * (of_p + 6 * U) + of_dp * (double)(D + 3) * U);
    for (int64_t d = 0; d < D; d++) {
        e->want[row + d] += ds * c->q[key + d];
        e->bound[row + d] += fabs(c->q[key + d]) * (of_ds + terms * U * fabs(ds));
        e->want[key + d] += ds * c->q[row + d];
        e->bound[key + d] += fabs(c->q[row + d]) * (of_ds + terms * U * fabs(ds));
        e->want[value + d] += p * dy[d];
        e->bound[value + d] += p * fabs(dy[d]) * (of_p + terms * U);
    }
}

static void attention_expected(const struct attention *c, struct expected *e)
{
    memset(e->want, 0, (size_t)e->n * sizeof(double));
    memset(e->bound, 0, (size_t)e->n * sizeof(double));
    for (int64_t n = 0; n < c->N; n++)
        for (int64_t h = 0; h < c->NH; h++)
            for (int64_t j = c->first[n]; j <= n; j++)
                attention_pair(c, e, n, h, j);
}

static void run_attention(struct rig *r, const void *ctx, float *out)
{
    const struct attention *c = ctx;
    int64_t N = c->N, of_q = c->NH * c->D, of_k = c->NKV * c->D, q = N * of_q, k = N * of_k;
    int64_t ld = ld_of(of_q);
    const struct nbi_op_attention_bwd a = {
        .dq = alloc_rows(r, N, of_q, ld),
        .dk = alloc_rows(r, N, of_k, ld),
        .dv = alloc_rows(r, N, of_k, ld),
        .dy = put_acts(r, c->dy, q),
        .y = put_acts(r, c->y, q),
        .lse = put_in(r, c->lse, c->N * c->NH),
        .q = put_acts(r, c->q, q),
        .kv = {put_acts(r, c->k, k), put_acts(r, c->v, k), bf16 ? NBI_BF16 : NBI_F32},
        .first = put_bytes(r, c->first, c->N * 4),
        .end = put_bytes(r, c->end, c->N * 4),
        .N = c->N,
        .NH = c->NH,
        .NKV = c->NKV,
        .D = c->D,
        .ld = ld,
        .bf16 = bf16};
    need_op(r->be, attention_bwd);
    assert_ok(r->be->attention_bwd(r->s, &a));
    out = get_rows(r, out, a.dq, N, of_q, ld);
    get_rows(r, get_rows(r, out, a.dk, N, of_k, ld), a.dv, N, of_k, ld);
}

enum batches { ONE, SEVERAL, WINDOW, SINGLE };

/* One sequence, several of any length, a sliding window of 50 rows, or sequences of one token. */
static void fill_first(int32_t *first, int64_t N, enum batches batches)
{
    int32_t start = 0;
    for (int32_t n = 0; n < N; n++) {
        if (batches == SINGLE || (batches == SEVERAL && (bits32() % 40 == 0 || n == 2)))
            start = n;
        first[n] = batches == WINDOW && n > 50 ? n - 50 : start;
    }
}

/* The last row that attends to each row. */
static void fill_end(int32_t *end, const int32_t *first, int64_t N)
{
    for (int64_t n = N - 1; n >= 0; n--) {
        end[n] = n + 1 < N ? end[n + 1] : (int32_t)n;
        while (first[end[n]] > n)
            end[n]--;
    }
}

static void check_attention_case(const int64_t s[5], enum batches batches)
{
    struct attention c = {.N = s[0], .NH = s[1], .NKV = s[2], .D = s[3]};
    struct nbi_stream_limits limits = limits_of(c.N, c.NH * c.D);
    limits.D = c.D;
    limits.heads = c.NH;
    int64_t q = c.N * c.NH * c.D, k = c.N * c.NKV * c.D;
    struct expected e = expect(q + 2 * k);
    c.q = random_acts(q + 2 * k, 1);
    for (int64_t i = 0; i < q; i++)
        c.q[i] *= (double)s[4]; /* a power of two */
    c.k = c.q + q;
    c.v = c.k + k;
    c.dy = random_acts(q, 1);
    c.y = zeros(q, sizeof *c.y);
    c.lse = zeros(c.N * c.NH, sizeof *c.lse);
    c.first = zeros(c.N, 4);
    c.end = zeros(c.N, 4);
    fill_first(c.first, c.N, batches);
    fill_end(c.end, c.first, c.N);
    for (int64_t i = 0; i < c.N * c.NH; i++)
        attend(&c, c.q, i / c.NH, i % c.NH, c.y + i * c.D, c.lse + i);
    if (c.N <= 65) {
        attention_expected(&c, &e);
        check_gradient("attention", attention_objective, &c, c.q, e.want, q + 2 * k);
    }
    for (int64_t i = 0; i < q; i++)
        c.y[i] = bf16 ? to_bf16(c.y[i]) : (double)(float)c.y[i];
    for (int64_t i = 0; i < c.N * c.NH; i++)
        c.lse[i] = (double)(float)c.lse[i];
    attention_expected(&c, &e);
    check("attention_bwd", run_attention, &c, &limits, &e);
    double *all[] = {c.q, c.dy, c.y, c.lse};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    free(c.first);
    free(c.end);
    expected_free(&e);
}

static void check_attention_bwd(void)
{
    /* N, NH, NKV, D, scale of q */
    static const int64_t shapes[][5] = {
        {1, 1, 1, 2, 1},     {3, 2, 1, 24, 4},   {65, 8, 1, 48, 1},  {96, 3, 3, 64, 1},
        {97, 2, 2, 32, 16},  {250, 4, 2, 32, 4}, {193, 3, 1, 80, 1}, {100, 2, 1, 256, 8},
        {288, 2, 1, 128, 1}, {127, 4, 2, 128, 2}};
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (size_t way = SANITIZED ? i / 2 % 2 : 0; way < 2; way += SANITIZED ? 2 : 1) {
            bf16 = way;
            gap = i % 2 * 8;
            if (!SANITIZED || i % 2)
                check_attention_case(shapes[i], SEVERAL);
            check_attention_case(shapes[i], i % 3 == 0 ? SINGLE : i % 3 == 1 ? ONE : WINDOW);
        }
}

/* ---- both, on both ---- */

TEST_ON_BOTH(backward_products, linear_bwd)
TEST_ON_CUDA(backward_products, bits_whatever_is_measured)
TEST_ON_CUDA(backward_products, tuning_of_another_day)
TEST_ON_BOTH(backward_products, attention_bwd)

int main(void)
{
    const struct CMUnitTest tests[] = {ON_BOTH(backward_products, linear_bwd)
                                           ON_CUDA(backward_products, bits_whatever_is_measured)
                                               ON_CUDA(backward_products, tuning_of_another_day)
                                                   ON_BOTH(backward_products, attention_bwd)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
