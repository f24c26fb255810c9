/* test_backward.c - losses and gradients against the equations in double, and those against finite
 * differences. Products and attention are in test_backward_products.c. */
#include <float.h>

#include "gradients.h"

/* ---- cross entropy ---- */

struct xent {
    int64_t N, V, ref_k;
    double scale, kl_scale, *logits, *ref_p, *weight;
    int32_t *targets, *ids;
    bool gradient, in_place, weighted;
    int64_t slice; /* columns of which the gradient is made at a time; 0: of all, by xent */
};

static void xent_new(struct xent *c, int64_t N, int64_t V, int64_t ref_k, double spread)
{
    *c = (struct xent){
        .N = N, .V = V, .ref_k = ref_k, .scale = 0.25, .kl_scale = ref_k > 0 ? 1.5 : 0};
    c->logits = random_acts(N * V, spread);
    c->weight = random_floats(N, 3);
    c->ref_p = zeros(N * ref_k, sizeof(double));
    c->targets = zeros(N, 4);
    c->ids = zeros(N * ref_k, 4);
    for (int64_t n = 0; n < N; n++) {
        c->targets[n] = n % 4 == 3 ? -1 : (int32_t)(bits32() % (uint32_t)V);
        double all = 0;
        for (int64_t j = 0; j < ref_k; j++) { /* distinct: steps of V / ref_k */
            c->ids[n * ref_k + j] = (int32_t)(j * (V / ref_k) + bits32() % (uint32_t)(V / ref_k));
            c->ref_p[n * ref_k + j] = j % 5 == 4 ? 0 : fabs(uniform());
            all += c->ref_p[n * ref_k + j];
        }
        for (int64_t j = 0; j < ref_k; j++)
            c->ref_p[n * ref_k + j] =
                (double)(float)(c->ref_p[n * ref_k + j] / all * (n % 3 && V > ref_k ? 0.9 : 1));
        if (ref_k > 0 && n % 2 == 0)
            c->targets[n] =
                n % 4 ? c->targets[n] : c->ids[n * ref_k]; /* in the reference's list too */
        if (ref_k > 0 && n % 7 == 6)
            c->ids[n * ref_k] = -1;
    }
}

static void xent_free(struct xent *c)
{
    free(c->logits);
    free(c->weight);
    free(c->ref_p);
    free(c->targets);
    free(c->ids);
}

/* Row n from its probabilities: loss and KL, and with `d` the gradient and its bound. */
static void xent_row(const struct xent *c, int64_t n, const double *z, double out[2], double *d,
                     double *bound)
{
    double max = -INFINITY, S = 0, R = 0, q = 1, range = 0;
    const int32_t *ids = c->ids + n * c->ref_k;
    const double *b = c->ref_p + n * c->ref_k;
    bool has_ref = c->ref_k > 0 && ids[0] >= 0, *listed = zeros(c->V, 1);
    double of_loss = c->targets[n] >= 0 ? c->scale : 0, of_kl = has_ref ? c->kl_scale : 0;
    for (int64_t v = 0; v < c->V; v++)
        max = fmax(max, z[v]);
    for (int64_t j = 0; has_ref && j < c->ref_k; j++) {
        listed[ids[j]] = true;
        q -= b[j];
    }
    q = fmax(q, 0);
    for (int64_t v = 0; v < c->V; v++) {
        S += exp(z[v] - max);
        R += listed[v] ? 0 : exp(z[v] - max);
        range = fmax(range, max - z[v]);
    }
    R = fmax(R, (double)FLT_MIN);
    out[0] = c->targets[n] >= 0 ? log(S) + max - z[c->targets[n]] : 0;
    out[1] = has_ref && q > 0 ? q * log(q * S / R) : 0;
    for (int64_t j = 0; has_ref && j < c->ref_k; j++)
        out[1] += b[j] > 0 ? b[j] * (log(b[j]) - (z[ids[j]] - max - log(S))) : 0;
    for (int64_t v = 0; d && v < c->V; v++) {
        /* An exponential is off by the rounding of its argument and its own; a sum by its terms. */
        double p = exp(z[v] - max) / S, off = (1024 + 10 + 2 * range) * U;
        d[v] = of_loss * p + of_kl * (listed[v] ? p : p - q * p * S / R);
        double factor = of_loss + of_kl * (1 + (listed[v] ? 0 : q * S / R));
        bound[v] = off * p * factor + 0x1p-124 / S * factor; /* e^x may be 0 from x = -87 down */
    }
    if (d && of_loss > 0) {
        d[c->targets[n]] -= of_loss;
        bound[c->targets[n]] += 4 * U * of_loss;
    }
    for (int64_t j = 0; d && has_ref && j < c->ref_k; j++) {
        d[ids[j]] -= of_kl * b[j];
        bound[ids[j]] += 4 * U * of_kl * b[j];
    }
    if (bound) {
        bound[c->V] = (1024 + 10 + 2 * range) * U + 2 * U * fabs(out[0]);
        bound[c->V + 1] = 2 * (1024 + 10 + 2 * range) * U + 2 * U * fabs(out[1]);
    }
    free(listed);
}

static double xent_objective(const void *ctx, const double *logits)
{
    const struct xent *c = ctx;
    double sum = 0, out[2];
    for (int64_t n = 0; n < c->N; n++) {
        xent_row(c, n, logits + n * c->V, out, NULL, NULL);
        sum += c->scale * out[0] + c->kl_scale * out[1];
    }
    return sum;
}

/* The gradient of `count` columns, to out [N, V]. */
static void run_slice(struct rig *r, const struct xent *c, const struct nbi_op_xent *x,
                      int64_t first, float *out)
{
    int64_t count = c->V - first < c->slice ? c->V - first : c->slice;
    double *logits = zeros(c->N * count, sizeof *logits);
    float *d = zeros(c->N * count, sizeof *d);
    for (int64_t i = 0; i < c->N * count; i++)
        logits[i] = c->logits[i / count * c->V + first + i % count];
    struct nbi_op_xent_slice a = {.logits = put_acts(r, logits, c->N * count),
                                  .targets = x->targets,
                                  .kept = x->kept,
                                  .scale = x->scale,
                                  .ref_ids = x->ref_ids,
                                  .ref_p = x->ref_p,
                                  .kl_scale = x->kl_scale,
                                  .weight = x->weight,
                                  .ref_k = x->ref_k,
                                  .N = c->N,
                                  .first = first,
                                  .count = count,
                                  .bf16 = bf16};
    a.dlogits = c->in_place ? a.logits : alloc_acts(r, c->N * count);
    need_op(r->be, xent_slice);
    assert_ok(r->be->xent_slice(r->s, &a));
    int parts = rounded_count;
    get_acts(r, d, a.dlogits, c->N * count);
    rounded_count = parts; /* the parts are put together here */
    for (int64_t i = 0; i < c->N * count; i++)
        out[i / count * c->V + first + i % count] = d[i];
    free(logits);
    free(d);
}

static void run_xent(struct rig *r, const void *ctx, float *out)
{
    const struct xent *c = ctx;
    struct nbi_op_xent a = {.loss = alloc_nan(r, c->N),
                            .logits = put_acts(r, c->logits, c->N * c->V),
                            .targets = put_bytes(r, c->targets, c->N * 4),
                            .scale = (float)c->scale,
                            .kl_scale = (float)c->kl_scale,
                            .ref_k = c->ref_k,
                            .N = c->N,
                            .V = c->V,
                            .bf16 = bf16};
    if (c->gradient && c->slice == 0)
        a.dlogits = c->in_place ? a.logits : alloc_acts(r, c->N * c->V);
    if (c->slice > 0)
        a.kept = alloc_nan(r, c->N * 4);
    if (c->weighted)
        a.weight = put_in(r, c->weight, c->N);
    if (c->ref_k > 0) {
        a.kl = alloc_nan(r, c->N);
        a.ref_ids = put_bytes(r, c->ids, c->N * c->ref_k * 4);
        a.ref_p = put_in(r, c->ref_p, c->N * c->ref_k);
    }
    need_op(r->be, xent);
    assert_ok(r->be->xent(r->s, &a));
    out = get(r, out, a.loss, c->N);
    if (c->ref_k > 0)
        out = get(r, out, a.kl, c->N);
    if (c->gradient && c->slice == 0)
        get_acts(r, out, a.dlogits, c->N * c->V);
    for (int64_t i = 0; i < c->V && c->slice > 0; i += c->slice)
        run_slice(r, c, &a, i, out);
    if (bf16 && c->slice > 0)
        is_rounded(out, c->N * c->V);
}

/* On the CPU the gradient of slices has the bits of xent's. */
static void check_slice_bits(struct xent *c, const struct nbi_stream_limits *limits)
{
    int64_t losses = c->N * (c->ref_k > 0 ? 2 : 1), n = losses + c->N * c->V, slice = c->slice;
    float *out[2] = {zeros(n, 4), zeros(n, 4)};
    for (int i = 0; i < 2; i++) {
        struct rig r;
        c->slice = i ? slice : 0;
        rounded_count = 0;
        results = out[i];
        rig_begin(&r, nbi_simd_level(), 2, limits);
        run_xent(&r, c, out[i]);
        rig_end(&r);
    }
    if (!gpu)
        assert_memory_equal(out[0], out[1], (size_t)n * 4);
    for (int i = 0; i < 2; i++)
        free(out[i]);
}

static void check_xent_case(struct xent *c)
{
    const struct nbi_stream_limits limits = limits_of(c->N, 16);
    int64_t losses = c->N * (c->ref_k > 0 ? 2 : 1);
    struct expected e = expect(losses + c->N * c->V);
    double *bound = zeros(c->V + 2, sizeof *bound), out[2];
    for (int64_t n = 0; n < c->N; n++) {
        int64_t at = losses + n * c->V;
        xent_row(c, n, c->logits + n * c->V, out, e.want + at, bound);
        memcpy(e.bound + at, bound, (size_t)c->V * sizeof *bound);
        for (int i = 0; i < (c->ref_k > 0 ? 2 : 1); i++) {
            e.want[i * c->N + n] = out[i];
            e.bound[i * c->N + n] = bound[c->V + i];
        }
    }
    if (c->V < 200)
        check_gradient("xent", xent_objective, c, c->logits, e.want + losses, c->N * c->V);
    for (int way = 0; way < 4; way++) {
        c->gradient = way > 0;
        c->in_place = way >= 2;
        c->weighted = way == 3;
        e.n = losses + (way > 0 ? c->N * c->V : 0);
        for (int64_t i = 0; i < c->N * c->V && c->weighted; i++) {
            e.want[losses + i] *= c->weight[i / c->V];
            e.bound[losses + i] *= fabs(c->weight[i / c->V]);
        }
        check("xent", run_xent, c, &limits, &e);
        c->slice = c->V / 3 / (way == 1 ? 8 : 1) * (way == 1 ? 8 : 1); /* some of whole vectors */
        c->slice = c->V / 9 >= c->slice ? c->V : c->slice;
        if (way > 0) {
            check("xent in slices", run_xent, c, &limits, &e);
            check_slice_bits(c, &limits);
        }
        c->slice = 0;
    }
    free(bound);
    expected_free(&e);
}

static void check_xent(void)
{
    static const int64_t shapes[][3] = {{1, 1, 0},      {3, 40, 0},    {9, 100, 7},
                                        {9, 33, 33},    {65, 17, 1},   {3, 5000, 0},
                                        {15, 3000, 20}, {8, 1024, 64}, {127, 290, 3}};
    for (size_t i = 0; i < COUNT(shapes) * 2; i++)
        for (int spread = SANITIZED && i / 2 % 2 ? 60 : 1; spread <= 60;
             spread += SANITIZED ? 60 : 59) {
            struct xent c;
            bf16 = i % 2;
            xent_new(&c, shapes[i / 2][0], shapes[i / 2][1], shapes[i / 2][2], spread);
            check_xent_case(&c);
            xent_free(&c);
        }
}

/* A non-finite logit must show in the loss, also in the last partial vector of a row. */
static void check_xent_shows_nan(void)
{
    for (int level = 0; level <= (gpu ? 0 : (int)nbi_simd_level()); level++)
        for (int64_t at = 0; at < 2 * 37; at += 4) {
            struct rig r;
            struct xent c;
            float loss;
            bf16 = at >= 37;
            const struct nbi_stream_limits limits = limits_of(1, 16);
            xent_new(&c, 1, 37, 0, 1);
            c.logits[at % 37] = NAN;
            rig_begin(&r, (enum nbi_simd)level, 1, &limits);
            run_xent(&r, &c, &loss);
            assert_true(isnan(loss));
            rig_end(&r);
            xent_free(&c);
        }
}

/* ---- swiglu ---- */

struct swiglu {
    int64_t N, F;
    double *dy, *gate, *up; /* gate and up in one array */
    bool in_place;
};

static double swiglu_objective(const void *ctx, const double *gate)
{
    const struct swiglu *c = ctx;
    double sum = 0;
    for (int64_t i = 0, n = c->N * c->F; i < n; i++)
        sum += c->dy[i] * gate[i] / (1 + exp(-gate[i])) * gate[n + i];
    return sum;
}

static void run_swiglu(struct rig *r, const void *ctx, float *out)
{
    const struct swiglu *c = ctx;
    int64_t N = c->N, F = c->F, ld = ld_of(F);
    struct nbi_op_swiglu_bwd a = {.dy = put_acts(r, c->dy, N * F),
                                  .gate = put_rows(r, c->gate, N, F, ld),
                                  .up = put_rows(r, c->up, N, F, ld),
                                  .N = N,
                                  .F = F,
                                  .ld = ld,
                                  .bf16 = bf16};
    a.dgate = c->in_place ? a.gate : alloc_rows(r, N, F, ld);
    a.dup = c->in_place ? a.up : alloc_rows(r, N, F, ld);
    need_op(r->be, swiglu_bwd);
    assert_ok(r->be->swiglu_bwd(r->s, &a));
    get_rows(r, get_rows(r, out, a.dgate, N, F, ld), a.dup, N, F, ld);
}

static void check_swiglu_case(int64_t N, int64_t F, double spread)
{
    const struct nbi_stream_limits limits = limits_of(N, F);
    int64_t n = N * F;
    struct swiglu c = {.N = N, .F = F, .dy = random_acts(n, 1)};
    struct expected e = expect(2 * n);
    c.gate = random_acts(2 * n, spread);
    c.up = c.gate + n;
    for (int64_t i = 0; i < n; i++) {
        double g = c.gate[i], s = 1 / (1 + exp(-g));
        e.want[i] = c.dy[i] * c.up[i] * s * (1 + g * (1 - s));
        e.want[n + i] = c.dy[i] * g * s;
        /* s is off by 6 U of itself, 1 - s by as much and U. */
        e.bound[i] = fabs(c.dy[i] * c.up[i]) * (U * s * (12 + 12 * fabs(g)) + 0x1p-116);
        e.bound[n + i] = fabs(c.dy[i] * g) * (9 * U * s + 0x1p-116);
    }
    if (spread < 10)
        check_gradient("swiglu", swiglu_objective, &c, c.gate, e.want, 2 * n);
    for (int way = 0; way < 2; way++) {
        c.in_place = way == 1;
        check("swiglu_bwd", run_swiglu, &c, &limits, &e);
    }
    free(c.dy);
    free(c.gate);
    expected_free(&e);
}

static void check_swiglu_bwd(void)
{
    for (int way = 0; way < 4; way++) {
        bf16 = way % 2;
        gap = way / 2 * 8;
        check_swiglu_case(1, 1, 3);
        check_swiglu_case(3, 37, 3);
        check_swiglu_case(65, 272, 5);
        check_swiglu_case(127, 64, 5);
        check_swiglu_case(7, 1001, 120);
    }
}

/* ---- norms ---- */

struct norm {
    int64_t N, C;
    double *x, *w, *dy, *rstd, *dx0, *dw0;
};

/* Of n numbers. */
static double inverse_norm(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return 1 / sqrt(sum / (double)n + 1e-6);
}

/* dx and its error bound for one row d = dy w whose terms have magnitudes m. Without what dx is
 * added to. */
static void norm_row_bwd(double *dx, double *bound, const double *d, const double *m,
                         const double *x, double rstd, int64_t n)
{
    double sum = 0, all = 0, f = rstd * rstd * rstd / (double)n;
    for (int64_t i = 0; i < n; i++) {
        sum += d[i] * x[i];
        all += m[i] * fabs(x[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        dx[i] = d[i] * rstd - x[i] * f * sum;
        bound[i] = 10 * U * m[i] * rstd + fabs(x[i]) * f * ((double)n + 12) * U * all;
    }
}

static double norm_objective(const void *ctx, const double *x)
{
    const struct norm *c = ctx; /* w follows x */
    double sum = 0;
    for (int64_t n = 0; n < c->N; n++)
        for (int64_t i = 0; i < c->C; i++)
            sum += c->dy[n * c->C + i] * x[n * c->C + i] * inverse_norm(x + n * c->C, c->C) *
                   x[c->N * c->C + i];
    return sum;
}

static void run_norm(struct rig *r, const void *ctx, float *out)
{
    const struct norm *c = ctx;
    int64_t n = c->N * c->C;
    struct nbi_op_rmsnorm_bwd a = {.dx = put_acts(r, c->dx0, n),
                                   .dw = put_in(r, c->dw0, c->C),
                                   .dy = put_acts(r, c->dy, n),
                                   .x = put_acts(r, c->x, n),
                                   .rstd = put_in(r, c->rstd, c->N),
                                   .w = put_vector(r, c->w, c->C),
                                   .N = c->N,
                                   .C = c->C,
                                   .bf16 = bf16};
    need_op(r->be, rmsnorm_bwd);
    assert_ok(r->be->rmsnorm_bwd(r->s, &a));
    get(r, get_acts(r, out, a.dx, n), a.dw, c->C);
    r->be->weight_free(r->be, &a.w);
}

/* The equations, with rstd as given. */
static void norm_expected(const struct norm *c, struct expected *e)
{
    int64_t C = c->C, all = c->N * C;
    double *d = zeros(C, sizeof *d), *m = zeros(C, sizeof *m);
    for (int64_t i = 0; i < C; i++) {
        e->want[all + i] = c->dw0[i];
        e->bound[all + i] = fabs(c->dw0[i]);
    }
    for (int64_t n = 0; n < c->N; n++) {
        const double *dy = c->dy + n * C, *x = c->x + n * C;
        for (int64_t i = 0; i < C; i++) {
            d[i] = dy[i] * c->w[i];
            m[i] = fabs(d[i]);
            e->want[all + i] += dy[i] * x[i] * c->rstd[n];
            e->bound[all + i] += fabs(dy[i] * x[i] * c->rstd[n]);
        }
        norm_row_bwd(e->want + n * C, e->bound + n * C, d, m, x, c->rstd[n], C);
        for (int64_t i = n * C; i < (n + 1) * C; i++) {
            e->want[i] += c->dx0[i];
            e->bound[i] += 2 * U * (fabs(c->dx0[i]) + fabs(e->want[i]));
        }
    }
    for (int64_t i = 0; i < C; i++)
        e->bound[all + i] *= (double)(c->N + 4) * U;
    free(d);
    free(m);
}

static void check_norm_case(int64_t N, int64_t C)
{
    const struct nbi_stream_limits limits = limits_of(N, C);
    struct norm c = {N,
                     C,
                     random_acts(N * C + C, 3),
                     NULL,
                     random_acts(N * C, 1),
                     zeros(N, sizeof(double)),
                     zeros(N * C, sizeof(double)),
                     zeros(C, sizeof(double))};
    struct expected e = expect(N * C + C);
    c.w = c.x + N * C;
    for (int64_t n = 0; n < N; n++)
        c.rstd[n] = inverse_norm(c.x + n * C, C);
    norm_expected(&c, &e);
    if (N * C < 2000)
        check_gradient("rmsnorm", norm_objective, &c, c.x, e.want, N * C + C);
    for (int64_t n = 0; n < N; n++)
        c.rstd[n] = (double)(float)c.rstd[n];
    free(c.dx0);
    free(c.dw0);
    c.dx0 = random_acts(N * C, 1);
    c.dw0 = random_floats(C, 1);
    norm_expected(&c, &e);
    check("rmsnorm_bwd", run_norm, &c, &limits, &e);
    double *all[] = {c.x, c.dy, c.rstd, c.dx0, c.dw0};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    expected_free(&e);
}

static void check_rmsnorm_bwd(void)
{
    for (int way = 0; way < 2; way++) {
        bf16 = way;
        check_norm_case(1, 1);
        check_norm_case(3, 37);
        check_norm_case(65, 272);
        check_norm_case(127, 1000);
        check_norm_case(600, 8);  /* many partial sums */
        check_norm_case(2, 3000); /* columns of 512 threads, several times */
        check_norm_case(2, 5000);
        check_norm_case(2, 1001);
    }
}

/* ---- norm and rotation of heads ---- */

struct rope {
    int64_t N, heads[2], D;
    double *x[2], *d[2], *rstd[2], *w[2], *dw0[2], *cos, *sin; /* of q, of k; w follows x */
    int which; /* which of the two, for finite differences */
};

static double rope_objective(const void *ctx, const double *x)
{
    const struct rope *c = ctx;
    int64_t D = c->D, half = D / 2, heads = c->heads[c->which], all = c->N * heads * D;
    double sum = 0;
    for (int64_t h = 0; h < c->N * heads; h++) {
        double f = inverse_norm(x + h * D, D);
        const double *d = c->d[c->which] + h * D;
        for (int64_t i = 0; i < half; i++) {
            double a = x[h * D + i] * f * x[all + i];
            double b = x[h * D + half + i] * f * x[all + half + i];
            double co = c->cos[h / heads * half + i], si = c->sin[h / heads * half + i];
            sum += d[i] * (a * co - b * si) + d[half + i] * (b * co + a * si);
        }
    }
    return sum;
}

static void run_rope(struct rig *r, const void *ctx, float *out)
{
    const struct rope *c = ctx;
    int64_t D = c->D, q = c->N * c->heads[0], k = c->N * c->heads[1];
    int64_t of_q = c->heads[0] * D, of_k = c->heads[1] * D, ld = ld_of(of_q);
    struct nbi_op_qkv_rope_bwd a = {.dq = put_rows(r, c->d[0], c->N, of_q, ld),
                                    .dk = put_rows(r, c->d[1], c->N, of_k, ld),
                                    .dq_norm = put_in(r, c->dw0[0], D),
                                    .dk_norm = put_in(r, c->dw0[1], D),
                                    .q = put_rows(r, c->x[0], c->N, of_q, ld),
                                    .k = put_rows(r, c->x[1], c->N, of_k, ld),
                                    .rstd_q = put_in(r, c->rstd[0], q),
                                    .rstd_k = put_in(r, c->rstd[1], k),
                                    .q_norm = put_vector(r, c->w[0], D),
                                    .k_norm = put_vector(r, c->w[1], D),
                                    .cos = put_in(r, c->cos, c->N * D / 2),
                                    .sin = put_in(r, c->sin, c->N * D / 2),
                                    .N = c->N,
                                    .NH = c->heads[0],
                                    .NKV = c->heads[1],
                                    .D = D,
                                    .ld = ld,
                                    .bf16 = bf16};
    need_op(r->be, qkv_rope_bwd);
    assert_ok(r->be->qkv_rope_bwd(r->s, &a));
    out = get(r, get_rows(r, out, a.dq, c->N, of_q, ld), a.dq_norm, D);
    get(r, get_rows(r, out, a.dk, c->N, of_k, ld), a.dk_norm, D);
    r->be->weight_free(r->be, &a.q_norm);
    r->be->weight_free(r->be, &a.k_norm);
}

/* Gradients of the inputs of q or of k, then of its norm's weights. */
static void rope_expected(const struct rope *c, int which, double *want, double *bound)
{
    int64_t D = c->D, half = D / 2, heads = c->heads[which], all = c->N * heads;
    double *d = zeros(D, sizeof *d), *m = zeros(D, sizeof *m), *dw = want + all * D;
    for (int64_t i = 0; i < D; i++) {
        dw[i] = c->dw0[which][i];
        bound[all * D + i] = fabs(dw[i]);
    }
    for (int64_t h = 0; h < all; h++) {
        const double *x = c->x[which] + h * D, *dy = c->d[which] + h * D;
        for (int64_t i = 0; i < D; i++) {
            int64_t pair = i < half ? i + half : i - half, at = h / heads * half + i % half;
            double turned = i < half ? c->sin[at] : -c->sin[at], r = c->rstd[which][h];
            d[i] = dy[i] * c->cos[at] + dy[pair] * turned;
            m[i] = fabs(dy[i] * c->cos[at]) + fabs(dy[pair] * turned);
            dw[i] += d[i] * x[i] * r;
            bound[all * D + i] += m[i] * fabs(x[i]) * r;
            d[i] *= c->w[which][i];
            m[i] *= fabs(c->w[which][i]);
        }
        norm_row_bwd(want + h * D, bound + h * D, d, m, x, c->rstd[which][h], D);
    }
    for (int64_t i = 0; i < D; i++)
        bound[all * D + i] *= (double)(all + 8) * U;
    free(d);
    free(m);
}

static void check_rope_case(int64_t N, int64_t NH, int64_t NKV, int64_t D)
{
    struct nbi_stream_limits limits = limits_of(N, NH * D);
    limits.D = D;
    limits.heads = NH;
    struct rope c = {.N = N, .heads = {NH, NKV}, .D = D};
    struct expected e = expect(N * (NH + NKV) * D + 2 * D);
    c.cos = random_floats(N * D / 2,
                          1); /* not cos and sin of one angle, since nothing depends on that */
    c.sin = random_floats(N * D / 2, 1);
    for (int i = 0; i < 2; i++) {
        int64_t heads = N * c.heads[i], at = i * (N * NH * D + D);
        c.x[i] = random_acts(heads * D + D, 2);
        c.w[i] = c.x[i] + heads * D;
        c.d[i] = random_acts(heads * D, 1);
        c.rstd[i] = zeros(heads, sizeof(double));
        c.dw0[i] = zeros(D, sizeof(double));
        for (int64_t h = 0; h < heads; h++)
            c.rstd[i][h] = inverse_norm(c.x[i] + h * D, D);
        c.which = i;
        rope_expected(&c, i, e.want + at, e.bound + at);
        check_gradient("qkv_rope", rope_objective, &c, c.x[i], e.want + at, heads * D + D);
        for (int64_t h = 0; h < heads; h++)
            c.rstd[i][h] = (double)(float)c.rstd[i][h];
        free(c.dw0[i]);
        c.dw0[i] = random_floats(D, 1);
        rope_expected(&c, i, e.want + at, e.bound + at);
    }
    check("qkv_rope_bwd", run_rope, &c, &limits, &e);
    for (int i = 0; i < 2; i++) {
        double *all[] = {c.x[i], c.d[i], c.rstd[i], c.dw0[i]};
        for (size_t k = 0; k < COUNT(all); k++)
            free(all[k]);
    }
    free(c.cos);
    free(c.sin);
    expected_free(&e);
}

static void check_qkv_rope_bwd(void)
{
    for (int way = 0; way < 4; way++) {
        bf16 = way % 2;
        gap = way / 2 * 8;
        check_rope_case(1, 1, 1, 2);
        check_rope_case(3, 2, 1, 24);
        check_rope_case(65, 8, 1, 48);
        check_rope_case(127, 4, 4, 128);
        check_rope_case(33, 2, 2, 250);
        check_rope_case(3, 2, 1, 256);
        check_rope_case(2, 1, 1, 1024);
        check_rope_case(300, 8, 1, 8); /* many partial sums */
    }
}

/* ---- embedding and distance ---- */

struct embed {
    int64_t N, C, V;
    int32_t *ids, *order;
    double *dx, *dtable;
    int64_t slice; /* ids at a time; 0: all */
};

static void run_embed(struct rig *r, const void *ctx, float *out)
{
    const struct embed *c = ctx;
    struct nbi_op_embed_bwd a = {.ids = put_bytes(r, c->ids, c->N * 4),
                                 .order = put_bytes(r, c->order, c->N * 4),
                                 .dx = put_acts(r, c->dx, c->N * c->C),
                                 .N = c->N,
                                 .C = c->C,
                                 .bf16 = bf16};
    need_op(r->be, embed_bwd);
    for (int64_t i = 0; i<c->V; i += c->slice> 0 ? c->slice : c->V) {
        int64_t rows = c->slice > 0 && c->V - i > c->slice ? c->slice : c->V - i;
        a.first = i;
        a.count = c->slice > 0 ? rows : 0;
        a.dtable = put_in(r, c->dtable + i * c->C, rows * c->C);
        assert_ok(r->be->embed_bwd(r->s, &a));
        out = get(r, out, a.dtable, rows * c->C);
    }
}

/* The numbers 0 to N - 1, sorted by id. */
static void sort_by_id(int32_t *order, const int32_t *ids, int64_t N)
{
    for (int64_t n = 0, at; n < N; n++) {
        for (at = n; at > 0 && ids[order[at - 1]] > ids[n]; at--)
            order[at] = order[at - 1];
        order[at] = (int32_t)n;
    }
}

/* Bit-exact: rows are added in the order of n. */
static void check_embed_bwd(void)
{
    static const int64_t shapes[][3] = {{1, 1, 1},
                                        {3, 37, 2},
                                        {65, 1000, 9},
                                        {127, 48, 500},
                                        {200, 40, 3}} /* more rows of an id than a warp looks at */;
    for (size_t i = 0; i < COUNT(shapes) * 2; i++) {
        const int64_t *shape = shapes[i / 2];
        struct embed c = {.N = shape[0], .C = shape[1], .V = shape[2]};
        bf16 = i % 2;
        const struct nbi_stream_limits limits = limits_of(c.N, c.C);
        struct expected e = expect(c.V * c.C);
        c.ids = zeros(c.N, 4);
        c.order = zeros(c.N, 4);
        c.dx = random_acts(c.N * c.C, 1);
        c.dtable = random_floats(c.V * c.C, 1000);
        memcpy(e.want, c.dtable, (size_t)e.n * sizeof *e.want);
        for (int64_t n = 0; n < c.N; n++) {
            c.ids[n] = (int32_t)(bits32() % (uint32_t)c.V);
            for (int64_t k = 0; k < c.C; k++) {
                double *to = &e.want[c.ids[n] * c.C + k];
                *to = (double)((float)*to + (float)c.dx[n * c.C + k]);
            }
        }
        sort_by_id(c.order, c.ids, c.N);
        check("embed_bwd", run_embed, &c, &limits, &e);
        c.slice = c.V / 4 + 1;
        check("embed_bwd of some ids", run_embed, &c, &limits, &e);
        free(c.ids);
        free(c.order);
        free(c.dx);
        free(c.dtable);
        expected_free(&e);
    }
}

struct distance {
    int64_t N, C;
    double *x, *target, *weight, scale;
    bool gradient;
};

static void run_distance(struct rig *r, const void *ctx, float *out)
{
    const struct distance *c = ctx;
    int64_t n = c->N * c->C;
    const struct nbi_op_l1 a = {.loss = alloc_nan(r, c->N),
                                .dx = c->gradient ? alloc_acts(r, n) : (struct nbi_ptr){0},
                                .x = put_acts(r, c->x, n),
                                .target = put_acts(r, c->target, n),
                                .weight = put_in(r, c->weight, c->N),
                                .scale = (float)c->scale,
                                .N = c->N,
                                .C = c->C,
                                .bf16 = bf16};
    need_op(r->be, l1);
    assert_ok(r->be->l1(r->s, &a));
    out = get(r, out, a.loss, c->N);
    if (c->gradient)
        get_acts(r, out, a.dx, n);
}

static double distance_objective(const void *ctx, const double *x)
{
    const struct distance *c = ctx;
    double sum = 0;
    for (int64_t i = 0; i < c->N * c->C; i++)
        sum += c->weight[i / c->C] * fabs(x[i] - c->target[i]);
    return sum * c->scale / (double)c->C;
}

static void check_l1_case(int64_t N, int64_t C)
{
    const struct nbi_stream_limits limits = limits_of(N, C);
    struct distance c = {
        N, C, random_acts(N * C, 1), random_acts(N * C, 1), zeros(N, sizeof(double)), 0.75, false};
    struct expected e = expect(N + N * C);
    for (int64_t n = 0; n < N; n++)
        c.weight[n] = n % 3 != 1;
    for (int64_t i = 0; i < N * C; i++) {
        double off = c.x[i] - c.target[i];
        if (fabs(off) < 1e-3) /* no finite difference may cross 0 */
            off = 0, c.x[i] = c.target[i];
        e.want[i / C] += c.weight[i / C] * fabs(off) / (double)C;
        e.want[N + i] = c.weight[i / C] * c.scale / (double)C * ((off > 0) - (off < 0));
        e.bound[N + i] = 2 * U * fabs(e.want[N + i]);
    }
    for (int64_t n = 0; n < N; n++)
        e.bound[n] = 4 * U * e.want[n];
    for (int way = 0; way < 2; way++) {
        c.gradient = way == 1;
        e.n = N + way * N * C;
        check("l1", run_distance, &c, &limits, &e);
    }
    for (int64_t i = 0; i < N * C; i++)
        c.x[i] += c.x[i] == c.target[i] ? 1 : 0, e.want[N + i] = 0;
    for (int64_t i = 0; i < N * C; i++)
        e.want[N + i] = c.weight[i / C] * c.scale / (double)C * (c.x[i] > c.target[i] ? 1 : -1);
    check_gradient("l1", distance_objective, &c, c.x, e.want + N, N * C);
    free(c.x);
    free(c.target);
    free(c.weight);
    expected_free(&e);
}

static void check_l1(void)
{
    for (int way = 0; way < 2; way++) {
        bf16 = way;
        check_l1_case(1, 1);
        check_l1_case(3, 37);
        check_l1_case(65, 700);
        check_l1_case(127, 1030);
    }
}

/* ---- all of them, on both ---- */

#define CHECKS(X)                                                                                  \
    X(xent)                                                                                        \
    X(xent_shows_nan)                                                                              \
    X(swiglu_bwd)                                                                                  \
    X(rmsnorm_bwd)                                                                                 \
    X(qkv_rope_bwd)                                                                                \
    X(embed_bwd)                                                                                   \
    X(l1)

#define X(check) TEST_ON_BOTH(backward, check)
CHECKS(X)
#undef X

int main(void)
{
#define X(check) ON_BOTH(backward, check)
    const struct CMUnitTest tests[] = {CHECKS(X)};
#undef X
    return cmocka_run_group_tests(tests, NULL, NULL);
}
