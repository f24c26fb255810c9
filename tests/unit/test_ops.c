/* test_ops.c - every operation of the forward pass on the CPU's fastest path and on a GPU, against
 * the scalar CPU code, which defines it: unusual shapes, all types, outputs that held NaN before
 * and whose surroundings must keep their values. */
#include "linear_lab.h"
#include "stored.h"

static const enum nbi_dtype floats[] = {NBI_F32, NBI_F16, NBI_BF16};
static const enum nbi_dtype matrices[] = {NBI_NVFP4, NBI_F32, NBI_F16, NBI_BF16};
static const enum nbi_dtype kv[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};

/* ---- embed ---- */

struct embed_case {
    int64_t N, C;
    int32_t ids[80];
    struct host_weight table;
};

static void run_embed(struct nbi_backend *be, struct embed_case *c, bool lookup, float *out)
{
    struct lab l;
    struct nbi_weight_source table = source_of(&c->table);
    table.lookup = lookup;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = c->N, .K = c->C, .D = 2, .heads = 1});
    const struct nbi_op_embed op = {.x = block(&l, NULL, c->N * c->C * 4),
                                    .ids = block(&l, c->ids, c->N * 4),
                                    .table = weight_from(&l, &table),
                                    .N = c->N,
                                    .C = c->C};
    assert_ok(be->embed(l.s, &op));
    fetch(&l, out, op.x, c->N * c->C * 4);
    lab_end(&l);
}

static void check_embed(void)
{
    static const int64_t widths[] = {1, 7, 48, 203, 2560}, counts[] = {1, 2, 65};
    for (int64_t i = 0; i < COUNT(widths) * COUNT(counts) * COUNT(floats); i++) {
        struct embed_case c = {.N = counts[i % 3], .C = widths[i / 3 % 5]};
        enum nbi_dtype dtype = floats[i / 15];
        snprintf(where, sizeof where, "%s, N %lld, C %lld", nbi_dtypes[dtype].name, (long long)c.N,
                 (long long)c.C);
        host_weight_new(&c.table, dtype, 37, c.C);
        for (int n = 0; n < 80; n++)
            c.ids[n] = n == 0 ? 36 : (int32_t)(bits32() % 37);
        float *want = zeros(c.N * c.C, 4), *is = zeros(c.N * c.C, 4);
        run_embed(scalar, &c, false, want);
        for (int lookup = 0; lookup < 2; lookup++) {
            run_embed(tested, &c, lookup, is);
            same_bytes(lookup ? "x by lookup" : "x", is, want, c.N * c.C * 4);
        }
        host_weight_free(&c.table);
        free(want);
        free(is);
    }
}

/* ---- rope_table ---- */

struct rope_case {
    int64_t N, D;
    float scale;
    int32_t positions[80];
    float frequency[64];
};

static void run_rope_table(struct nbi_backend *be, const struct rope_case *c, float *out)
{
    struct lab l;
    int64_t bytes = c->N * c->D / 2 * 4;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = c->N, .K = 16, .D = c->D, .heads = 1});
    const struct nbi_op_rope_table op = {.cos = block(&l, NULL, bytes),
                                         .sin = block(&l, NULL, bytes),
                                         .positions = block(&l, c->positions, c->N * 4),
                                         .frequency = block(&l, c->frequency, c->D / 2 * 4),
                                         .scale = c->scale,
                                         .N = c->N,
                                         .D = c->D};
    assert_ok(be->rope_table(l.s, &op));
    fetch(&l, out, op.cos, bytes);
    fetch(&l, out + c->N * c->D / 2, op.sin, bytes);
    lab_end(&l);
}

/* The angles have the same bits; only sine and cosine may differ, in their last bits. */
static void check_rope_table(void)
{
    static const int64_t sizes[] = {2, 24, 80, 128}, counts[] = {1, 3, 70};
    for (int i = 0; i < 4 * 3 * 2; i++) {
        struct rope_case c = {
            .N = counts[i % 3], .D = sizes[i / 3 % 4], .scale = i / 12 ? 1.1386294f : 1};
        snprintf(where, sizeof where, "N %lld, D %lld, scale %g", (long long)c.N, (long long)c.D,
                 (double)c.scale);
        for (int n = 0; n < 80; n++)
            c.positions[n] = n == 0 ? 40959 : (int32_t)(bits32() % 40960);
        for (int64_t d = 0; d < c.D / 2; d++)
            c.frequency[d] = (float)pow(1e6, -2.0 * (double)d / (double)c.D);
        float *want = zeros(c.N * c.D, 4), *is = zeros(c.N * c.D, 4);
        run_rope_table(scalar, &c, want);
        run_rope_table(tested, &c, is);
        close_to("cos and sin", is, want, c.N * c.D, 0, 5e-7);
        free(want);
        free(is);
    }
}

/* ---- rmsnorm ---- */

struct norm_case {
    int64_t N, C;
    bool in_place, rstd;
    float *x;
    struct host_weight w;
};

static void run_rmsnorm(struct nbi_backend *be, struct norm_case *c, float *y, float *rstd)
{
    struct lab l;
    int64_t bytes = c->N * c->C * 4;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = c->N, .K = c->C, .D = 2, .heads = 1});
    struct nbi_op_rmsnorm op = {
        .x = block(&l, c->x, bytes), .w = weight(&l, &c->w), .eps = 1e-6f, .N = c->N, .C = c->C};
    op.y = c->in_place ? op.x : block(&l, NULL, bytes);
    if (c->rstd)
        op.rstd = block(&l, NULL, c->N * 4);
    assert_ok(be->rmsnorm(l.s, &op));
    fetch(&l, y, op.y, bytes);
    if (c->rstd)
        fetch(&l, rstd, op.rstd, c->N * 4);
    lab_end(&l);
}

static void check_rmsnorm(void)
{
    static const int64_t widths[] = {1, 7, 48, 203, 1024, 2560, 12289}, counts[] = {1, 2, 9, 65};
    for (int i = 0; i < 7 * 4 * 3; i++) {
        struct norm_case c = {
            .N = counts[i % 4], .C = widths[i / 4 % 7], .in_place = i % 3 == 1, .rstd = i % 5 > 1};
        snprintf(where, sizeof where, "N %lld, C %lld%s", (long long)c.N, (long long)c.C,
                 c.in_place ? ", in place" : "");
        host_weight_new(&c.w, floats[i / 28], c.C, 0);
        c.x = random_floats(c.N * c.C, i % 2 ? 30 : 1e-3f);
        float *want = zeros(c.N * c.C, 4), *is = zeros(c.N * c.C, 4);
        float want_rstd[80] = {0}, is_rstd[80] = {0};
        run_rmsnorm(scalar, &c, want, want_rstd);
        run_rmsnorm(tested, &c, is, is_rstd);
        close_to("y", is, want, c.N * c.C, 5e-6, 0);
        close_to("rstd", is_rstd, want_rstd, c.N, 5e-6, 0);
        host_weight_free(&c.w);
        free(c.x);
        free(want);
        free(is);
    }
}

/* ---- linear ---- */

/* K is a multiple of 16 for NVFP4, and arbitrary for floats. */
static void check_linear(void)
{
    static const int64_t counts[] = {1, 2, 7, 8, 9, 33, 64, 65, 130, 300};
    static const int64_t outs[][3] = {{1, 7, 40}, {33, 129, 5}, {203, 48, 17}};
    static const int64_t nvfp4_widths[] = {16, 80, 144, 1008}, float_widths[] = {1, 7, 203, 514};
    int64_t at = 0;
    for (int64_t t = 0; t <= COUNT(matrices); t++) /* the last one mixes types */
        for (int64_t i = SANITIZED ? t % 2 : 0; i < COUNT(counts); i += SANITIZED ? 2 : 1)
            for (int k = 0; k < 4; k++, at++) {
                struct linear_case c = {.count = 1 + (int)(at % 3), .add = at / 3 % 2};
                bool nvfp4 = t == 0 || t == COUNT(matrices);
                int64_t K = nvfp4 ? nvfp4_widths[k] : float_widths[k];
                linear_new(&c, counts[i], K, outs[at % 3]);
                for (int j = 0; j < c.count; j++)
                    host_weight_new(&c.w[j], matrices[(nvfp4 && t > 0 ? at + j : t) % 4],
                                    outs[at % 3][j], K);
                snprintf(where, sizeof where, "%s, %d matrices, N %lld, K %lld%s",
                         t == COUNT(matrices) ? "mixed" : nbi_dtypes[matrices[t]].name, c.count,
                         (long long)c.N, (long long)K, c.add ? ", added" : "");
                check_product(&c);
                linear_free(&c);
            }
}

/* Shapes of real models. */
static void check_linear_large(void)
{
    static const int64_t counts[] = {1, 5, 16, 66};
    for (int64_t t = 0; t < COUNT(matrices); t++)
        for (int64_t i = SANITIZED ? t % 4 : 0; i < COUNT(counts); i += SANITIZED ? 4 : 1) {
            struct linear_case c = {.count = 1};
            int64_t O = 517, K = 2560;
            linear_new(&c, counts[i], K, &O);
            host_weight_new(&c.w[0], matrices[t], O, K);
            snprintf(where, sizeof where, "%s, N %lld, O 517, K 2560", nbi_dtypes[matrices[t]].name,
                     (long long)c.N);
            check_product(&c);
            linear_free(&c);
        }
}

/* Rows of x that are large, tiny or zero, and block scales of every size. */
static void check_linear_range(void)
{
    static const float sizes[] = {1, 1e6f, 1e-6f, 0, 3e4f};
    static const int64_t counts[] = {5, 80};
    for (int64_t t = 0; t < COUNT(matrices); t++)
        for (int i = 0; i < 2; i++) {
            struct linear_case c = {.count = 1};
            int64_t O = 37, K = 272;
            linear_new(&c, counts[i], K, &O);
            host_weight_new(&c.w[0], matrices[t], O, K);
            if (matrices[t] == NBI_NVFP4)
                spread_scales(&c.w[0]);
            for (int64_t j = 0; j < c.N * K; j++)
                c.x[j] *= sizes[j / K % 5];
            snprintf(where, sizeof where, "%s, N %lld, rows of all sizes",
                     nbi_dtypes[matrices[t]].name, (long long)c.N);
            check_product(&c);
            linear_free(&c);
        }
}

/* ---- qkv_rope ---- */

struct qkv_case {
    int64_t N, NH, NKV, D, rows; /* rows: of the cache */
    enum nbi_dtype dtype;
    bool in_place, rstd;
    float *q, *k, *v, *cos, *sin;
    int32_t kv_rows[80];
    struct host_weight q_norm, k_norm;
};

struct qkv_result {
    float *q, *rstd_q, *rstd_k;
    uint8_t *k, *v;
    int64_t bytes; /* bytes of k, and of v */
};

static void qkv_new(struct qkv_case *c)
{
    int64_t half = c->N * c->D / 2;
    c->rows = c->N + 9;
    c->q = random_floats(c->N * c->NH * c->D, 3);
    c->k = random_floats(c->N * c->NKV * c->D, 3);
    c->v = random_floats(c->N * c->NKV * c->D, 3);
    c->cos = zeros(half, 4);
    c->sin = zeros(half, 4);
    for (int64_t i = 0; i < half; i++) {
        float angle = 4 * uniform();
        c->cos[i] = cosf(angle);
        c->sin[i] = sinf(angle);
    }
    for (int64_t n = 0; n < c->N; n++) /* no row twice: 5 and c->rows are coprime here */
        c->kv_rows[n] = (int32_t)((n * 5 + 2) % c->rows);
    host_weight_new(&c->q_norm, NBI_BF16, c->D, 0);
    host_weight_new(&c->k_norm, NBI_F32, c->D, 0);
}

static void qkv_free(struct qkv_case *c)
{
    float *all[] = {c->q, c->k, c->v, c->cos, c->sin};
    for (int64_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    host_weight_free(&c->q_norm);
    host_weight_free(&c->k_norm);
}

static void run_qkv_rope(struct nbi_backend *be, struct qkv_case *c, struct qkv_result *r)
{
    struct lab l;
    int64_t q = c->N * c->NH * c->D * 4, k = c->N * c->NKV * c->D * 4, half = c->N * c->D / 2 * 4;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = c->N, .K = 16, .D = c->D, .heads = c->NH});
    r->bytes = (int64_t)nbi_dtype_bytes(c->dtype, c->rows * c->NKV * c->D);
    *r = (struct qkv_result){zeros(q, 1),        zeros(c->N * c->NH, 4), zeros(c->N * c->NKV, 4),
                             zeros(r->bytes, 1), zeros(r->bytes, 1),     r->bytes};
    struct nbi_op_qkv_rope op = {
        .kv = {block(&l, NULL, r->bytes), block(&l, NULL, r->bytes), c->dtype},
        .kv_rows = block(&l, c->kv_rows, c->N * 4),
        .q = block(&l, c->q, q),
        .k = block(&l, c->k, k),
        .v = block(&l, c->v, k),
        .q_norm = weight(&l, &c->q_norm),
        .k_norm = weight(&l, &c->k_norm),
        .cos = block(&l, c->cos, half),
        .sin = block(&l, c->sin, half),
        .eps = 1e-6f,
        .N = c->N,
        .NH = c->NH,
        .NKV = c->NKV,
        .D = c->D};
    op.q_out = c->in_place ? op.q : block(&l, NULL, q);
    if (c->rstd) {
        op.rstd_q = block(&l, NULL, c->N * c->NH * 4);
        op.rstd_k = block(&l, NULL, c->N * c->NKV * 4);
    }
    assert_ok(be->qkv_rope(l.s, &op));
    fetch(&l, r->q, op.q_out, q);
    fetch(&l, r->k, op.kv.k, r->bytes);
    fetch(&l, r->v, op.kv.v, r->bytes);
    if (c->rstd) {
        fetch(&l, r->rstd_q, op.rstd_q, c->N * c->NH * 4);
        fetch(&l, r->rstd_k, op.rstd_k, c->N * c->NKV * 4);
    }
    lab_end(&l);
}

static void qkv_result_free(struct qkv_result *r)
{
    free(r->q);
    free(r->rstd_q);
    free(r->rstd_k);
    free(r->k);
    free(r->v);
}

/* A difference in the last bits may round to a neighbouring value of the cache's type. */
static void compare_keys(const struct qkv_case *c, const struct qkv_result *is,
                         const struct qkv_result *want)
{
    double step = c->dtype == NBI_F32    ? 5e-6
                  : c->dtype == NBI_F16  ? 0x1p-10
                  : c->dtype == NBI_BF16 ? 0x1p-7
                                         : 0x1p-3;
    int64_t n = c->rows * c->NKV * c->D;
    float *a = zeros(n, 4), *b = zeros(n, 4);
    for (int64_t i = 0; i < n; i++) {
        a[i] = (float)get_as(is->k, c->dtype, i);
        b[i] = (float)get_as(want->k, c->dtype, i);
    }
    close_to("key", a, b, n, step, c->dtype == NBI_E4M3 ? 0x1p-9 : 5e-6);
    free(a);
    free(b);
}

static void check_qkv_rope(void)
{
    static const int64_t sizes[] = {2, 24, 64, 80, 128}, counts[] = {1, 3, 65};
    static const int64_t heads[][2] = {{4, 4}, {4, 2}, {3, 1}, {8, 1}, {16, 8}};
    for (int i = 0; i < 5 * 3 * 5 * 4; i++) {
        struct qkv_case c = {.N = counts[i % 3],
                             .D = sizes[i / 3 % 5],
                             .NH = heads[i / 15 % 5][0],
                             .NKV = heads[i / 15 % 5][1],
                             .dtype = kv[i / 75],
                             .in_place = i % 2,
                             .rstd = i % 4 > 1};
        struct qkv_result want, is;
        snprintf(where, sizeof where, "%s, N %lld, D %lld, %lld and %lld heads%s",
                 nbi_dtypes[c.dtype].name, (long long)c.N, (long long)c.D, (long long)c.NH,
                 (long long)c.NKV, c.in_place ? ", in place" : "");
        qkv_new(&c);
        run_qkv_rope(scalar, &c, &want);
        run_qkv_rope(tested, &c, &is);
        close_to("q", is.q, want.q, c.N * c.NH * c.D, 5e-6, 5e-6);
        close_to("rstd of q", is.rstd_q, want.rstd_q, c.N * c.NH, 5e-6, 0);
        close_to("rstd of k", is.rstd_k, want.rstd_k, c.N * c.NKV, 5e-6, 0);
        compare_keys(&c, &is, &want);
        same_bytes("values", is.v, want.v, want.bytes);
        qkv_result_free(&want);
        qkv_result_free(&is);
        qkv_free(&c);
    }
}

/* ---- swiglu ---- */

static void run_swiglu(struct nbi_backend *be, const float *gate, const float *up, int64_t N,
                       int64_t F, bool in_place, float *out)
{
    struct lab l;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = N, .K = F, .D = 2, .heads = 1});
    struct nbi_op_swiglu op = {
        .gate = block(&l, gate, N * F * 4), .up = block(&l, up, N * F * 4), .N = N, .F = F};
    op.y = in_place ? op.gate : block(&l, NULL, N * F * 4);
    assert_ok(be->swiglu(l.s, &op));
    fetch(&l, out, op.y, N * F * 4);
    lab_end(&l);
}

static void check_swiglu(void)
{
    static const int64_t counts[] = {1, 3, 70}, widths[] = {1, 7, 203, 4096};
    static const float extreme[] = {100, -100, 1e4f, -1e4f, 0, -0.0f, 1e-30f, -17};
    for (int i = 0; i < 3 * 4 * 2; i++) {
        int64_t N = counts[i % 3], F = widths[i / 3 % 4], n = N * F;
        float *gate = random_floats(n, 8), *up = random_floats(n, 8);
        float *want = zeros(n, 4), *is = zeros(n, 4);
        for (int64_t j = 0; j < n; j += 5)
            gate[j] = extreme[j / 5 % 8];
        snprintf(where, sizeof where, "N %lld, F %lld", (long long)N, (long long)F);
        run_swiglu(scalar, gate, up, N, F, false, want);
        run_swiglu(tested, gate, up, N, F, i / 12, is);
        close_to("y", is, want, n, 5e-6, 1e-20);
        float *all[] = {gate, up, want, is};
        for (int64_t j = 0; j < COUNT(all); j++)
            free(all[j]);
    }
}

/* ---- gather, scatter ---- */

static void run_moves(struct nbi_backend *be, const float *x, const int32_t *rows, int64_t M,
                      int64_t C, float *out)
{
    struct lab l;
    int64_t n = 2 * M + 3;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = n, .K = C, .D = 2, .heads = 1});
    struct nbi_ptr at = block(&l, rows, M * 4);
    const struct nbi_op_gather gather = {
        .y = block(&l, NULL, M * C * 4), .x = block(&l, x, n * C * 4), .rows = at, .M = M, .C = C};
    const struct nbi_op_scatter scatter = {
        .y = block(&l, NULL, n * C * 4), .x = block(&l, x, M * C * 4), .rows = at, .M = M, .C = C};
    assert_ok(be->gather(l.s, &gather));
    assert_ok(be->scatter(l.s, &scatter));
    fetch(&l, out, gather.y, M * C * 4);
    fetch(&l, out + M * C, scatter.y, n * C * 4);
    lab_end(&l);
}

static void check_gather_and_scatter(void)
{
    static const int64_t counts[] = {1, 2, 33}, widths[] = {1, 7, 48, 203, 2560};
    for (int i = 0; i < 3 * 5; i++) {
        int64_t M = counts[i % 3], C = widths[i / 3], n = 2 * M + 3;
        int32_t rows[33];
        float *x = random_floats(n * C, 1), *want = zeros((M + n) * C, 4);
        float *is = zeros((M + n) * C, 4);
        for (int64_t j = 0; j < M; j++)
            rows[j] = (int32_t)(n - 1 - 2 * j);
        snprintf(where, sizeof where, "M %lld, C %lld", (long long)M, (long long)C);
        run_moves(scalar, x, rows, M, C, want);
        run_moves(tested, x, rows, M, C, is);
        same_bytes("rows", is, want, (M + n) * C * 4);
        assert_memory_equal(is, x + rows[0] * C, C * 4);
        free(x);
        free(want);
        free(is);
    }
}

/* ---- topk ---- */

#define TOPK_ROWS 7

struct topk_result {
    int32_t ids[TOPK_ROWS * NBI_TOPK_MAX], nonfinite[TOPK_ROWS];
    float values[TOPK_ROWS * NBI_TOPK_MAX];
};

static void run_topk(struct nbi_backend *be, const float *logits, int64_t V, int64_t k,
                     struct topk_result *out)
{
    const int64_t N = TOPK_ROWS;
    struct lab l;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = N, .K = 16, .D = 2, .heads = 1});
    const struct nbi_op_topk op = {.ids = block(&l, NULL, N * k * 4),
                                   .values = block(&l, NULL, N * k * 4),
                                   .nonfinite = block(&l, NULL, N * 4),
                                   .logits = block(&l, logits, N * V * 4),
                                   .scratch = block(&l, NULL, N * nbi_topk_scratch_bytes(V)),
                                   .k = k,
                                   .N = N,
                                   .V = V};
    assert_ok(be->topk(l.s, &op));
    fetch(&l, out->ids, op.ids, N * k * 4);
    fetch(&l, out->values, op.values, N * k * 4);
    fetch(&l, out->nonfinite, op.nonfinite, N * 4);
    lab_end(&l);
}

/* By the definition: repeatedly the largest of what remains. */
static void topk_reference(const float *x, int64_t V, int64_t k, int32_t *ids)
{
    for (int64_t j = 0; j < k; j++) {
        ids[j] = -1;
        for (int32_t i = 0; i < V; i++) {
            bool used = false;
            for (int64_t earlier = 0; earlier < j; earlier++)
                used = used || ids[earlier] == i;
            if (!used && (ids[j] < 0 || x[i] > x[ids[j]]))
                ids[j] = i;
        }
    }
}

/* Few distinct values, so that there are ties; rows that are constant, descending or ascending. */
static void check_topk(void)
{
    static const int64_t sizes[] = {1, 2, 33, 64, 2048, 2049, 5000, 151936};
    static const int64_t wanted[] = {1, 2, 20, 64};
    for (int64_t i = 0; i < COUNT(sizes); i++)
        for (int64_t i_k = 0; i_k < COUNT(wanted); i_k++) {
            int64_t V = sizes[i], k = wanted[i_k];
            struct topk_result want, is;
            float *x = zeros(TOPK_ROWS * V, 4);
            if (k > V)
                k = V;
            for (int64_t j = 0; j < TOPK_ROWS * V; j++)
                x[j] = j < V       ? -3
                       : j < 2 * V ? -(float)(j % V)
                       : j < 3 * V ? (float)(j % V)
                                   : (float)(bits32() % 50) - 25;
            x[6 * V - 1] = NAN;
            for (int64_t j = 6 * V; j < 7 * V; j++)
                x[j] = -INFINITY;
            snprintf(where, sizeof where, "V %lld k %lld", (long long)V, (long long)k);
            run_topk(scalar, x, V, k, &want);
            run_topk(tested, x, V, k, &is);
            same_bytes("nonfinite", is.nonfinite, want.nonfinite, sizeof is.nonfinite);
            same_bytes("nonfinite", is.nonfinite, (const int32_t[TOPK_ROWS]){0, 0, 0, 0, 0, 1, 1},
                       sizeof is.nonfinite);
            same_bytes("ids", is.ids, want.ids, 5 * k * 4);
            same_bytes("values", is.values, want.values, 5 * k * 4);
            for (int64_t n = 0; n < 5 && V <= 5000; n++) {
                int32_t ids[NBI_TOPK_MAX];
                topk_reference(x + n * V, V, k, ids);
                same_bytes("the reference", is.ids + n * k, ids, k * 4);
            }
            free(x);
        }
}

/* ---- weights ---- */

/* Rows [first, first + count) are read back unchanged. */
static void read_back(const struct host_weight *w, const struct nbi_weight *on, int64_t first,
                      int64_t count)
{
    int64_t cols = w->cols > 0 ? w->cols : 1;
    int64_t row = w->dtype == NBI_NVFP4 ? cols / 2 : cols * nbi_dtypes[w->dtype].bytes;
    uint8_t *data = zeros(count * row, 1), *scales = zeros(count * cols / 16, 1);
    bool four = w->dtype == NBI_NVFP4;
    assert_ok(tested->weight_read(tested, on, first, count, data, four ? scales : NULL));
    same_bytes("data", data, w->data + first * row, count * row);
    if (four)
        same_bytes("scales", scales, w->scales + first * cols / 16, count * cols / 16);
    free(data);
    free(scales);
}

static void check_weight(struct host_weight *w, bool lookup)
{
    struct nbi_weight_source src = source_of(w);
    struct nbi_weight on;
    src.lookup = lookup;
    assert_ok(tested->weight_new(tested, &src, &on));
    assert_int_equal(on.rows, w->rows);
    assert_int_equal(on.cols, w->cols);
    assert_true(on.tensor_scale == w->tensor_scale);
    read_back(w, &on, 0, w->rows);
    read_back(w, &on, w->rows - 1, 1);
    read_back(w, &on, w->rows / 3, w->rows - w->rows / 3);
    tested->weight_free(tested, &on);
}

static void check_weights(void)
{
    static const int64_t rows[] = {1, 7, 16, 33, 300}, cols[] = {16, 80, 128, 1040};
    for (int64_t i = 0; i < 4 * 5 * 4; i++) {
        struct host_weight w;
        enum nbi_dtype dtype = matrices[i % 4];
        int64_t K = cols[i / 20] - (dtype == NBI_NVFP4 ? 0 : 3);
        snprintf(where, sizeof where, "%s [%lld, %lld]", nbi_dtypes[dtype].name,
                 (long long)rows[i / 4 % 5], (long long)K);
        host_weight_new(&w, dtype, rows[i / 4 % 5], K);
        if (dtype == NBI_NVFP4)
            spread_scales(&w);
        check_weight(&w, false);
        if (dtype != NBI_NVFP4)
            check_weight(&w, true);
        host_weight_free(&w);
    }
}

static enum nb_status (*plain_alloc)(struct nbi_backend *be, const char *what, int64_t bytes,
                                     struct nbi_ptr *out);
static int64_t allocs;

static enum nb_status counting_alloc(struct nbi_backend *be, const char *what, int64_t bytes,
                                     struct nbi_ptr *out)
{
    allocs++;
    return plain_alloc(be, what, bytes, out);
}

static enum nb_status read_half(void *ctx, int64_t first, int64_t count, void *data, void *scales)
{
    const struct host_weight *w = ctx;
    return first + count > w->rows / 2 ? nbi_fail(NB_EIO, "no such row")
                                       : read_host(ctx, first, count, data, scales);
}

/* Lookup tables of several chunks take no GPU memory, even if reading one fails halfway; freeing
 * one leaves the others alone. */
static void check_lookups(void)
{
    struct host_weight w;
    struct nbi_weight on[2], none = {0};
    host_weight_new(&w, NBI_BF16, 5001, 1037);
    struct nbi_weight_source src = source_of(&w);
    src.lookup = true;
    snprintf(where, sizeof where, "a table of %lld rows", (long long)w.rows);
    allocs = 0;
    plain_alloc = tested->alloc;
    tested->alloc = counting_alloc;
    assert_ok(tested->weight_new(tested, &src, &on[0]));
    assert_ok(tested->weight_new(tested, &src, &on[1]));
    src.read = read_half;
    assert_fails(tested->weight_new(tested, &src, &none), NB_EIO, "no such row");
    if (strncmp(tested->name, "cuda", 4) == 0)
        assert_int_equal(allocs, 0);
    tested->alloc = plain_alloc;
    read_back(&w, &on[0], 0, w.rows);
    tested->weight_free(tested, &on[0]);
    read_back(&w, &on[1], 4095, 906);
    tested->weight_free(tested, &on[1]);
    tested->weight_free(tested, &on[1]);
    host_weight_free(&w);
}

/* ---- copies ---- */

static void run_copies(struct nbi_backend *be, const uint8_t *in, uint8_t *out)
{
    struct lab l;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = 1, .K = 16, .D = 2, .heads = 1});
    struct nbi_ptr a = block(&l, in, 5000), b = block(&l, NULL, 5000), none = {0};
    assert_int_equal(a.at % 64, 0);
    assert_ok(be->copy(l.s, nbi_ptr_add(b, 7), nbi_ptr_add(a, 3), 4001));
    assert_ok(be->clear(l.s, nbi_ptr_add(b, 101), 77));
    assert_ok(be->upload(l.s, nbi_ptr_add(b, 1003), in, 13));
    assert_ok(be->copy(l.s, b, a, 0));
    assert_ok(be->clear(l.s, b, 0));
    assert_ok(be->upload(l.s, b, in, 0));
    fetch(&l, out, b, 5000);
    be->free(be, none);
    lab_end(&l);
    be->stream_free(NULL);
}

static void check_copies(void)
{
    uint8_t in[5000], want[5000], is[5000];
    for (int i = 0; i < 5000; i++)
        in[i] = (uint8_t)bits32();
    snprintf(where, sizeof where, "copies");
    run_copies(scalar, in, want);
    run_copies(tested, in, is);
    same_bytes("b", is, want, 5000);
}

/* ---- graphs ---- */

#define CHAIN_ROWS 9
#define CHAIN_C    160

/* y = y + rmsnorm(x) w^T for N rows. */
struct chain {
    struct lab l;
    struct nbi_op_rmsnorm norm;
    struct nbi_op_linear product;
    bool fails;
    int queued; /* how often its operations were queued */
};

static enum nb_status queue_chain(void *ctx)
{
    struct chain *c = ctx;
    c->queued++;
    NBI_TRY(c->l.be->rmsnorm(c->l.s, &c->norm));
    if (c->fails)
        return nbi_fail(NB_EVALUE, "no product today");
    return c->l.be->linear(c->l.s, &c->product);
}

static void chain_begin(struct chain *c, struct host_weight *w, struct host_weight *norm)
{
    const struct nbi_stream_limits limits = {.N = CHAIN_ROWS, .K = CHAIN_C, .D = 2, .heads = 1};
    int64_t bytes = CHAIN_ROWS * CHAIN_C * 4;
    *c = (struct chain){0};
    lab_begin(&c->l, tested, &limits);
    c->norm = (struct nbi_op_rmsnorm){.x = block(&c->l, NULL, bytes),
                                      .y = block(&c->l, NULL, bytes),
                                      .w = weight(&c->l, norm),
                                      .eps = 1e-6f,
                                      .C = CHAIN_C};
    c->product = (struct nbi_op_linear){.count = 1,
                                        .x = c->norm.y,
                                        .y = {block(&c->l, NULL, bytes)},
                                        .w = {weight(&c->l, w)},
                                        .K = CHAIN_C,
                                        .add = true};
}

/* Runs with new values at the same addresses, through graph_run with that key and directly; the
 * results must be equal. */
static void check_chain(struct chain *c, int64_t key, int64_t N)
{
    float x[CHAIN_ROWS * CHAIN_C], is[2][CHAIN_ROWS * CHAIN_C];
    for (int i = 0; i < CHAIN_ROWS * CHAIN_C; i++)
        x[i] = 3 * uniform();
    c->norm.N = c->product.N = N;
    const struct nbi_graph graph = {.key = {key, N}, .queue = queue_chain, .ctx = c};
    for (int direct = 0; direct < 2; direct++) {
        assert_ok(tested->upload(c->l.s, c->norm.x, x, sizeof x));
        assert_ok(tested->clear(c->l.s, c->product.y[0], sizeof x));
        assert_ok(direct ? queue_chain(c) : tested->graph_run(c->l.s, &graph));
        fetch(&c->l, is[direct], c->product.y[0], (int64_t)sizeof x);
    }
    c->queued--; /* for the direct run */
    snprintf(where, sizeof where, "key %lld, N %lld", (long long)key, (long long)N);
    same_bytes("y", is[0], is[1], (int64_t)sizeof x);
}

/* Two graphs alternating, then more than are kept, then the first again; and one that fails. */
static void check_graph_run(void)
{
    struct host_weight w, norm;
    struct chain c;
    assert_true(nbi_backend_has(tested, NBI_CAP_GRAPHS));
    host_weight_new(&w, NBI_NVFP4, CHAIN_C, CHAIN_C);
    host_weight_new(&norm, NBI_F32, CHAIN_C, 0);
    chain_begin(&c, &w, &norm);
    for (int round = 0; round < 12; round++)
        check_chain(&c, 0, round % 2 ? 3 : CHAIN_ROWS);
    assert_int_equal(c.queued, 4); /* each was queued once and recorded once */
    for (int key = 1; key < (EMULATED ? 20 : 100); key++)
        for (int round = 0; round < 3; round++)
            check_chain(&c, key, 1 + key % CHAIN_ROWS);
    c.queued = 0;
    check_chain(&c, 0, 3);
    assert_int_equal(c.queued, 1);
    const struct nbi_graph graph = {.key = {100, 3}, .queue = queue_chain, .ctx = &c};
    c.fails = true;
    for (int round = 0; round < 3; round++)
        assert_fails(tested->graph_run(c.l.s, &graph), NB_EVALUE, "no product today");
    c.fails = false;
    for (int round = 0; round < 3; round++)
        check_chain(&c, 100, 3);
    lab_end(&c.l);
    host_weight_free(&w);
    host_weight_free(&norm);
}

/* ---- all of them, on both where both can ---- */

#define OPS(X)                                                                                     \
    X(embed)                                                                                       \
    X(rope_table)                                                                                  \
    X(rmsnorm)                                                                                     \
    X(linear)                                                                                      \
    X(linear_large)                                                                                \
    X(linear_range)                                                                                \
    X(qkv_rope)                                                                                    \
    X(swiglu)                                                                                      \
    X(gather_and_scatter)                                                                          \
    X(topk)                                                                                        \
    X(weights)                                                                                     \
    X(lookups)                                                                                     \
    X(copies)

#define X(op) TEST_ON_BOTH(ops, op)
OPS(X)
#undef X
TEST_ON_CUDA(ops, graph_run)

int main(void)
{
    const struct CMUnitTest tests[] = {
#define X(op) ON_BOTH(ops, op)
        OPS(X)
#undef X
            ON_CUDA(ops, graph_run)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
