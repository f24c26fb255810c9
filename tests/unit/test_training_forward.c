/* test_training_forward.c - operations of the forward pass as training uses them, against the
 * equations in double: activations in bf16 or f32, row strides, residuals added by the product.
 * test_ops.c has them as inference does. */
#include "gradients.h"
#include "matrices.h"

/* All four combinations of type and stride. */
static void set_way(int way)
{
    bf16 = way % 2;
    gap = way / 2 * 8;
}

/* ---- embed, gather, scatter ---- */

struct moves {
    int64_t N, C, V;
    int32_t *ids;
    struct matrix table;
    double *x;
};

static void run_moves(struct rig *r, const void *ctx, float *out)
{
    const struct moves *c = ctx;
    struct nbi_ptr ids = put_bytes(r, c->ids, c->N * 4);
    struct nbi_op_embed embed = {.x = alloc_acts(r, c->N * c->C),
                                 .ids = ids,
                                 .table = put_matrix(r, &c->table),
                                 .N = c->N,
                                 .C = c->C,
                                 .bf16 = bf16};
    const struct nbi_op_gather gather = {.y = alloc_acts(r, c->N * c->C),
                                         .x = put_acts(r, c->x, c->V * c->C),
                                         .rows = ids,
                                         .M = c->N,
                                         .C = c->C,
                                         .bf16 = bf16};
    const struct nbi_op_scatter scatter = {.y = alloc_acts(r, c->V * c->C),
                                           .x = put_acts(r, c->x, c->N * c->C),
                                           .rows = ids,
                                           .M = c->N,
                                           .C = c->C,
                                           .bf16 = bf16};
    assert_ok(r->be->embed(r->s, &embed));
    assert_ok(r->be->gather(r->s, &gather));
    assert_ok(r->be->clear(r->s, scatter.y, c->V * c->C * (bf16 ? 2 : 4)));
    assert_ok(r->be->scatter(r->s, &scatter));
    out = get_acts(r, out, embed.x, c->N * c->C);
    get_acts(r, get_acts(r, out, gather.y, c->N * c->C), scatter.y, c->V * c->C);
    r->be->weight_free(r->be, &embed.table);
}

/* Rows are rounded to bf16, if the table is not, and otherwise moved. */
static void check_moves_case(int64_t N, int64_t C, enum nbi_dtype dtype)
{
    struct moves c = {.N = N, .C = C, .V = 2 * N + 3, .ids = zeros(N, 4)};
    const struct nbi_stream_limits limits = limits_of(c.V, C);
    struct expected e = expect((2 * N + c.V) * C);
    matrix_new(&c.table, dtype, c.V, C);
    c.x = random_acts(c.V * C, 1);
    for (int64_t n = 0; n < N; n++) {
        c.ids[n] = (int32_t)(c.V - 1 - 2 * n);
        for (int64_t i = 0; i < C; i++) {
            double value = c.table.values[c.ids[n] * C + i];
            e.want[n * C + i] = bf16 ? to_bf16(value) : value;
            e.want[(N + n) * C + i] = c.x[c.ids[n] * C + i];
            e.want[(2 * N + c.ids[n]) * C + i] = c.x[n * C + i];
        }
    }
    check("embed, gather, scatter", run_moves, &c, &limits, &e);
    matrix_free(&c.table);
    free(c.x);
    free(c.ids);
    expected_free(&e);
}

static void check_moves(void)
{
    for (int way = 0; way < 2; way++) {
        set_way(way);
        check_moves_case(1, 1, NBI_BF16);
        check_moves_case(5, 37, NBI_F32);
        check_moves_case(127, 48, NBI_F16);
        check_moves_case(3, 2560, NBI_BF16);
    }
}

/* ---- rmsnorm ---- */

struct norm {
    int64_t N, C;
    double *x, *w;
    bool in_place;
};

static void run_rmsnorm(struct rig *r, const void *ctx, float *out)
{
    const struct norm *c = ctx;
    struct nbi_op_rmsnorm a = {.x = put_acts(r, c->x, c->N * c->C),
                               .rstd = alloc_nan(r, c->N),
                               .w = put_vector(r, c->w, c->C),
                               .eps = 1e-6f,
                               .N = c->N,
                               .C = c->C,
                               .bf16 = bf16};
    a.y = c->in_place ? a.x : alloc_acts(r, c->N * c->C);
    assert_ok(r->be->rmsnorm(r->s, &a));
    get(r, get_acts(r, out, a.y, c->N * c->C), a.rstd, c->N);
    r->be->weight_free(r->be, &a.w);
}

static double rstd_of(const double *x, int64_t n)
{
    double squares = 0;
    for (int64_t i = 0; i < n; i++)
        squares += x[i] * x[i];
    return 1 / sqrt(squares / (double)n + (double)1e-6f);
}

static void check_rmsnorm_case(int64_t N, int64_t C)
{
    const struct nbi_stream_limits limits = limits_of(N, C);
    struct norm c = {.N = N, .C = C, .x = random_acts(N * C, 3), .w = random_floats(C, 2)};
    struct expected e = expect(N * C + N);
    for (int64_t n = 0; n < N; n++) {
        double rstd = rstd_of(c.x + n * C, C), off = ((double)C / 2 + 8) * U;
        e.want[N * C + n] = rstd;
        e.bound[N * C + n] = rstd * off;
        for (int64_t i = 0; i < C; i++) {
            e.want[n * C + i] = c.x[n * C + i] * rstd * c.w[i];
            e.bound[n * C + i] = fabs(e.want[n * C + i]) * off;
        }
    }
    for (int in_place = 0; in_place < 2; in_place++) {
        c.in_place = in_place;
        check("rmsnorm", run_rmsnorm, &c, &limits, &e);
    }
    free(c.x);
    free(c.w);
    expected_free(&e);
}

static void check_rmsnorm(void)
{
    for (int way = 0; way < 2; way++) {
        set_way(way);
        check_rmsnorm_case(1, 1);
        check_rmsnorm_case(3, 37);
        check_rmsnorm_case(127, 272);
        check_rmsnorm_case(9, 2560);
    }
}

/* ---- qkv_rope ---- */

struct rope {
    int64_t N, heads[2], D;
    double *x[2], *v, *w[2], *cos, *sin; /* of q, of k */
    int32_t *rows;
};

static void run_rope(struct rig *r, const void *ctx, float *out)
{
    const struct rope *c = ctx;
    int64_t N = c->N, D = c->D, of_q = c->heads[0] * D, of_k = c->heads[1] * D, ld = ld_of(of_q);
    struct nbi_op_qkv_rope a = {
        .q_out = alloc_acts(r, N * of_q),
        .kv = {alloc_acts(r, N * of_k), alloc_acts(r, N * of_k), bf16 ? NBI_BF16 : NBI_F32},
        .kv_rows = put_bytes(r, c->rows, N * 4),
        .q = put_rows(r, c->x[0], N, of_q, ld),
        .k = put_rows(r, c->x[1], N, of_k, ld),
        .v = put_rows(r, c->v, N, of_k, ld),
        .rstd_q = alloc_nan(r, N * c->heads[0]),
        .rstd_k = alloc_nan(r, N * c->heads[1]),
        .q_norm = put_vector(r, c->w[0], D),
        .k_norm = put_vector(r, c->w[1], D),
        .cos = put_in(r, c->cos, N * D / 2),
        .sin = put_in(r, c->sin, N * D / 2),
        .eps = 1e-6f,
        .N = N,
        .NH = c->heads[0],
        .NKV = c->heads[1],
        .D = D,
        .ld = ld,
        .bf16 = bf16};
    assert_ok(r->be->qkv_rope(r->s, &a));
    out = get(r, get_acts(r, out, a.q_out, N * of_q), a.rstd_q, N * c->heads[0]);
    out = get(r, get_acts(r, out, a.kv.k, N * of_k), a.rstd_k, N * c->heads[1]);
    get_acts(r, out, a.kv.v, N * of_k);
    r->be->weight_free(r->be, &a.q_norm);
    r->be->weight_free(r->be, &a.k_norm);
}

/* Head h of row n of q or k, with its rstd. */
static double rope_head(const struct rope *c, int which, int64_t n, int64_t h, double *want,
                        double *bound)
{
    int64_t D = c->D, half = D / 2;
    const double *x = c->x[which] + (n * c->heads[which] + h) * D, *w = c->w[which];
    double rstd = rstd_of(x, D);
    for (int64_t i = 0; i < D; i++) {
        int64_t pair = i < half ? i + half : i - half, at = n * half + i % half;
        double turned = i < half ? -c->sin[at] : c->sin[at];
        want[i] = rstd * (x[i] * w[i] * c->cos[at] + x[pair] * w[pair] * turned);
        bound[i] = rstd * (fabs(x[i] * w[i] * c->cos[at]) + fabs(x[pair] * w[pair] * turned)) *
                   ((double)D / 2 + 12) * U;
    }
    return rstd;
}

static void check_rope_case(int64_t N, int64_t NH, int64_t NKV, int64_t D)
{
    struct nbi_stream_limits limits = limits_of(N, NH * D);
    struct rope c = {.N = N, .heads = {NH, NKV}, .D = D, .rows = zeros(N, 4)};
    struct expected e = expect(N * (NH + NKV) * (D + 1) + N * NKV * D);
    int64_t at = 0;
    limits.D = D;
    limits.heads = NH;
    c.cos = random_floats(N * D / 2, 1);
    c.sin = random_floats(N * D / 2, 1);
    c.v = random_acts(N * NKV * D, 2);
    for (int64_t n = 0; n < N; n++)
        c.rows[n] = (int32_t)(N - 1 - n);
    for (int i = 0; i < 2; i++) {
        int64_t heads = c.heads[i], rstd = at + N * heads * D;
        c.x[i] = random_acts(N * heads * D, 2);
        c.w[i] = random_floats(D, 2);
        for (int64_t h = 0; h < N * heads; h++) {
            /* k goes to rows in reverse, rstd does not */
            int64_t row = i == 1 ? N - 1 - h / heads : h / heads;
            int64_t to = at + (row * heads + h % heads) * D;
            e.want[rstd + h] = rope_head(&c, i, h / heads, h % heads, e.want + to, e.bound + to);
            e.bound[rstd + h] = e.want[rstd + h] * ((double)D / 2 + 8) * U;
        }
        at = rstd + N * heads;
    }
    for (int64_t i = 0; i < N * NKV * D; i++)
        e.want[at + (N - 1 - i / (NKV * D)) * NKV * D + i % (NKV * D)] = c.v[i];
    check("qkv_rope", run_rope, &c, &limits, &e);
    double *all[] = {c.x[0], c.x[1], c.w[0], c.w[1], c.v, c.cos, c.sin};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    free(c.rows);
    expected_free(&e);
}

static void check_qkv_rope(void)
{
    for (int way = 0; way < 4; way++) {
        set_way(way);
        check_rope_case(1, 1, 1, 2);
        check_rope_case(3, 2, 1, 24);
        check_rope_case(65, 8, 1, 48);
        check_rope_case(127, 4, 2, 128);
        check_rope_case(33, 2, 2, 250);
    }
}

/* ---- swiglu ---- */

struct swiglu {
    int64_t N, F;
    double *gate, *up;
};

static void run_swiglu(struct rig *r, const void *ctx, float *out)
{
    const struct swiglu *c = ctx;
    int64_t N = c->N, F = c->F, ld = ld_of(F);
    const struct nbi_op_swiglu a = {.y = alloc_acts(r, N * F),
                                    .gate = put_rows(r, c->gate, N, F, ld),
                                    .up = put_rows(r, c->up, N, F, ld),
                                    .N = N,
                                    .F = F,
                                    .ld = ld,
                                    .bf16 = bf16};
    assert_ok(r->be->swiglu(r->s, &a));
    get_acts(r, out, a.y, N * F);
}

static void check_swiglu_case(int64_t N, int64_t F, double spread)
{
    const struct nbi_stream_limits limits = limits_of(N, F);
    struct swiglu c = {N, F, random_acts(N * F, spread), random_acts(N * F, 2)};
    struct expected e = expect(N * F);
    for (int64_t i = 0; i < N * F; i++) {
        double g = c.gate[i], product = g * c.up[i];
        e.want[i] = product / (1 + exp(-g));
        e.bound[i] = fabs(e.want[i]) * U * (12 + 4 * fabs(g)) + fabs(product) * 0x1p-116;
    }
    check("swiglu", run_swiglu, &c, &limits, &e);
    free(c.gate);
    free(c.up);
    expected_free(&e);
}

static void check_swiglu(void)
{
    for (int way = 0; way < 4; way++) {
        set_way(way);
        check_swiglu_case(1, 1, 3);
        check_swiglu_case(3, 37, 8);
        check_swiglu_case(127, 272, 8);
        check_swiglu_case(7, 1001, 120);
    }
}

/* ---- linear ---- */

struct linear {
    int64_t N, K;
    int count;
    struct matrix w[NBI_LINEAR_MAX];
    double *x, *before[NBI_LINEAR_MAX]; /* before: what is added to */
    enum { WRITTEN, ADDED, RESIDUAL } kind;
    bool neighbours; /* y are columns of the same rows */
    bool copies;     /* of the weights, in bf16 */
};

static int64_t outputs_of(const struct linear *c)
{
    int64_t O = 0;
    for (int i = 0; i < c->count; i++)
        O += c->w[i].O;
    return O;
}

static void set_outputs(struct rig *r, const struct linear *c, struct nbi_op_linear *a)
{
    int64_t O = outputs_of(c), at = 0;
    struct nbi_ptr all = {0};
    if (c->neighbours)
        all = alloc_acts(r, c->N * O);
    if (c->kind == RESIDUAL)
        a->r = put_acts(r, c->before[0], c->N * c->w[0].O);
    for (int i = 0; i < c->count; at += c->w[i++].O) {
        a->ldy[i] = c->neighbours ? O : ld_of(c->w[i].O);
        a->y[i] = c->neighbours      ? nbi_ptr_add(all, at * (bf16 ? 2 : 4))
                  : c->kind == ADDED ? put_rows(r, c->before[i], c->N, c->w[i].O, a->ldy[i])
                                     : alloc_rows(r, c->N, c->w[i].O, a->ldy[i]);
    }
}

static float *get_neighbours(struct rig *r, const struct linear *c, struct nbi_ptr y, float *out)
{
    int64_t O = outputs_of(c), at = 0;
    float *all = zeros(c->N * O, sizeof *all), *to = out;
    int before = rounded_count;
    get_acts(r, all, y, c->N * O);
    rounded_count = before;
    for (int i = 0; i < c->count; at += c->w[i++].O)
        for (int64_t n = 0; n < c->N; n++, to += c->w[i].O)
            memcpy(to, all + n * O + at, (size_t)c->w[i].O * sizeof *to);
    if (bf16)
        is_rounded(out, c->N * O);
    free(all);
    return to;
}

static void run_linear(struct rig *r, const void *ctx, float *out)
{
    const struct linear *c = ctx;
    struct nbi_op_linear a = {.count = c->count,
                              .x = put_acts(r, c->x, c->N * c->K),
                              .N = c->N,
                              .K = c->K,
                              .add = c->kind != WRITTEN,
                              .matmul = bf16 ? NBI_MATMUL_FAST : NBI_MATMUL_F32,
                              .bf16 = bf16};
    for (int i = 0; i < c->count; i++)
        a.w[i] = put_matrix(r, &c->w[i]);
    if (c->copies)
        put_copies(r, a.w, c->w, c->count);
    set_outputs(r, c, &a);
    assert_ok(r->be->linear(r->s, &a));
    drop_copies(a.w, c->count);
    if (c->neighbours)
        out = get_neighbours(r, c, a.y[0], out);
    for (int i = 0; i < c->count && !c->neighbours; i++)
        out = get_rows(r, out, a.y[i], c->N, c->w[i].O, a.ldy[i]);
    for (int i = 0; i < c->count; i++)
        r->be->weight_free(r->be, &a.w[i]);
}

static void expect_linear(const struct linear *c, struct expected *e)
{
    int64_t at = 0;
    for (int i = 0; i < c->count; i++)
        for (int64_t j = 0; j < c->N * c->w[i].O; j++, at++) {
            const double *x = c->x + j / c->w[i].O * c->K;
            const double *w = c->w[i].values + j % c->w[i].O * c->K;
            double sum = c->kind == WRITTEN ? 0 : c->before[i][j], all = fabs(sum);
            for (int64_t k = 0; k < c->K; k++) {
                sum += x[k] * w[k];
                all += fabs(x[k] * w[k]);
            }
            e->want[at] = sum;
            e->bound[at] = all * (double)(c->K + 6) * U;
        }
}

struct linear_shape {
    int64_t N, K;
    int count;
    int64_t O[NBI_LINEAR_MAX];
    enum nbi_dtype dtype[NBI_LINEAR_MAX];
};

static void check_linear_shape(const struct linear_shape *s)
{
    const struct nbi_stream_limits limits = limits_of(s->N, s->K);
    struct linear c = {.N = s->N, .K = s->K, .count = s->count, .x = random_acts(s->N * s->K, 1)};
    for (int i = 0; i < s->count; i++) {
        matrix_new(&c.w[i], s->dtype[i], s->O[i], s->K);
        c.before[i] = random_acts(s->N * s->O[i], 1);
    }
    struct expected e = expect(s->N * outputs_of(&c));
    for (int way = 0; way < 6; way++) {
        c.kind = way / 2;
        c.neighbours = way % 2;
        if ((c.kind == RESIDUAL && c.count > 1) || (c.kind == ADDED && c.neighbours))
            continue;
        expect_linear(&c, &e);
        for (int copies = 0; copies <= bf16; copies++) {
            c.copies = copies;
            check("linear", run_linear, &c, &limits, &e);
        }
    }
    for (int i = 0; i < s->count; i++) {
        matrix_free(&c.w[i]);
        free(c.before[i]);
    }
    free(c.x);
    expected_free(&e);
}

static void check_linear(void)
{
    static const struct linear_shape shapes[] = {
        {1, 1, 1, {1}, {NBI_F32}},
        {3, 37, 3, {5, 1, 40}, {NBI_BF16, NBI_F16, NBI_F32}},
        {1, 48, 2, {17, 30}, {NBI_NVFP4, NBI_BF16}},
        {65, 80, 3, {33, 16, 7}, {NBI_NVFP4, NBI_NVFP4, NBI_NVFP4}},
        {127, 64, 3, {64, 32, 32}, {NBI_NVFP4, NBI_NVFP4, NBI_NVFP4}},
        {127, 272, 1, {48}, {NBI_BF16}},
        {600, 48, 1, {20}, {NBI_NVFP4}}}; /* more rows than are converted at a time */
    /* more weights than a GPU converts at a time */
    static const struct linear_shape large = {3, 128, 1, {16500}, {NBI_NVFP4}};
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (int way = SANITIZED ? (int)i % 2 : 0; way < 4; way += SANITIZED ? 2 : 1) {
            set_way(way);
            check_linear_shape(&shapes[i]);
        }
    set_way(1);
    if (gpu)
        check_linear_shape(&large);
}

/* ---- attention ---- */

struct attention {
    int64_t N, NH, NKV, D;
    double *q, *k, *v;
    int32_t *first, *last;
};

static void run_attention(struct rig *r, const void *ctx, float *out)
{
    const struct attention *c = ctx;
    int64_t q = c->N * c->NH * c->D, k = c->N * c->NKV * c->D;
    const struct nbi_op_attention a = {
        .y = alloc_acts(r, q),
        .lse = alloc_nan(r, c->N * c->NH),
        .q = put_acts(r, c->q, q),
        .kv = {put_acts(r, c->k, k), put_acts(r, c->v, k), bf16 ? NBI_BF16 : NBI_F32},
        .first = put_bytes(r, c->first, c->N * 4),
        .last = put_bytes(r, c->last, c->N * 4),
        .max_keys = c->N,
        .N = c->N,
        .NH = c->NH,
        .NKV = c->NKV,
        .D = c->D,
        .matmul = bf16 ? NBI_MATMUL_FAST : NBI_MATMUL_F32,
        .bf16 = bf16};
    assert_ok(r->be->attention(r->s, &a));
    get(r, get_acts(r, out, a.y, q), a.lse, c->N * c->NH);
}

/* A score, and a bound of the relative error of its exponential. */
static double score(const struct attention *c, int64_t n, int64_t h, int64_t j, double *off)
{
    const double *q = c->q + (n * c->NH + h) * c->D;
    const double *k = c->k + (j * c->NKV + h / (c->NH / c->NKV)) * c->D;
    double sum = 0, all = 0;
    for (int64_t d = 0; d < c->D; d++) {
        sum += q[d] * k[d];
        all += fabs(q[d] * k[d]);
    }
    *off = U * ((double)(c->D + 8) * all / sqrt((double)c->D) + 16);
    return sum / sqrt((double)c->D);
}

/* Row n and head h. */
static void expect_attention(const struct attention *c, struct expected *e, int64_t n, int64_t h)
{
    int64_t D = c->D, at = (n * c->NH + h) * D, of_lse = c->N * c->NH * D + n * c->NH + h;
    double top = -INFINITY, sum = 0, worst = 0, off, keys = (double)(n - c->first[n] + 1);
    for (int64_t j = c->first[n]; j <= n; j++) {
        top = fmax(top, score(c, n, h, j, &off));
        worst = fmax(worst, off);
    }
    for (int64_t j = c->first[n]; j <= n; j++) {
        const double *v = c->v + (j * c->NKV + h / (c->NH / c->NKV)) * D;
        double p = exp(score(c, n, h, j, &off) - top);
        worst = fmax(worst, off + 4 * U * fabs(log(fmax(p, 1e-300))));
        sum += p;
        for (int64_t d = 0; d < D; d++) {
            e->want[at + d] += p * v[d];
            e->bound[at + d] += p * fabs(v[d]);
        }
    }
    for (int64_t d = 0; d < D; d++) {
        e->want[at + d] /= sum;
        e->bound[at + d] *= (2 * worst + 2 * (keys + 4) * U) / sum;
    }
    e->want[of_lse] = top + log(sum);
    e->bound[of_lse] = worst + (keys + 8) * U + 2 * U * fabs(e->want[of_lse]);
}

/* Sequences of `longest` tokens at most, the first of one token. */
static void check_attention_case(const int64_t s[5])
{
    struct attention c = {.N = s[0], .NH = s[1], .NKV = s[2], .D = s[3]};
    struct nbi_stream_limits limits = limits_of(c.N, c.NH * c.D);
    int64_t q = c.N * c.NH * c.D, k = c.N * c.NKV * c.D, longest = s[4], start = 0;
    struct expected e = expect(q + c.N * c.NH);
    limits.D = c.D;
    limits.heads = c.NH;
    c.q = random_acts(q, 2);
    c.k = random_acts(k, 2);
    c.v = random_acts(k, 1);
    c.first = zeros(c.N, 4);
    c.last = zeros(c.N, 4);
    for (int64_t n = 0; n < c.N; n++) {
        if (n - start == longest || (n > 0 && start == 0))
            start = n;
        c.first[n] = (int32_t)start;
        c.last[n] = (int32_t)n;
    }
    for (int64_t i = 0; i < c.N * c.NH; i++)
        expect_attention(&c, &e, i / c.NH, i % c.NH);
    check("attention", run_attention, &c, &limits, &e);
    double *all[] = {c.q, c.k, c.v};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    free(c.first);
    free(c.last);
    expected_free(&e);
}

static void check_attention(void)
{
    static const int64_t shapes[][5] = {
        {1, 1, 1, 2, 1},    {3, 2, 1, 24, 2},    {65, 8, 1, 48, 64},   {127, 4, 2, 128, 127},
        {127, 2, 2, 64, 1}, {250, 4, 2, 32, 90}, {100, 2, 1, 256, 100}};
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (int way = 0; way < 2; way++) {
            set_way(way);
            check_attention_case(shapes[i]);
        }
}

/* ---- all of them, on both ---- */

#define CHECKS(X)                                                                                  \
    X(moves)                                                                                       \
    X(rmsnorm)                                                                                     \
    X(qkv_rope)                                                                                    \
    X(swiglu)                                                                                      \
    X(linear)                                                                                      \
    X(attention)

#define X(check) TEST_ON_BOTH(training_forward, check)
CHECKS(X)
#undef X

int main(void)
{
#define X(check) ON_BOTH(training_forward, check)
    const struct CMUnitTest tests[] = {CHECKS(X)};
#undef X
    return cmocka_run_group_tests(tests, NULL, NULL);
}
