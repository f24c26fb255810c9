/* cases_rowwise.c - operations of the forward pass that work row by row. */
#include "backend/ops.h"
#include "check/kernel_cases.h"

#define ROWS_MAX 512 /* of the index arrays below */

/* Distinct numbers below `limit` in a random order. */
static void draw_distinct(struct nbi_kernel_run *r, int32_t *out, int64_t count, int64_t limit)
{
    int64_t at = (int64_t)(nbi_run_bits(r) % (uint32_t)limit), step = limit > 2 ? limit - 1 : 1;
    NBI_BUG_IF(count > limit || count > ROWS_MAX);
    for (int64_t i = 0; i < count; i++)
        out[i] = (int32_t)((at + i * step) % limit);
}

/* ---- embed, gather, scatter: exact ---- */

static const char embed_shapes_letters[] = "N C V";
static const int64_t embed_shapes[][NBI_CASE_DIMS] = {{1, 64, 7}, {5, 333, 50}, {70, 1024, 300}};

static enum nb_status embed(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], C = r->shape[1], V = r->shape[2];
    int32_t ids[ROWS_MAX];
    for (int64_t i = 0; i < N; i++)
        ids[i] = (int32_t)(nbi_run_bits(r) % (uint32_t)V);
    const struct nbi_op_embed op = {.x = nbi_run_out_rows(r, "x", N, C, 0),
                                    .ids = nbi_run_ints(r, ids, N),
                                    .table = nbi_run_weight(r, r->c->dtype, V, C),
                                    .N = N,
                                    .C = C,
                                    .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->embed(r->s, &op);
}

static enum nb_status gather(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], C = r->shape[1], rows = r->shape[2];
    int32_t from[ROWS_MAX];
    draw_distinct(r, from, N < rows ? N : rows, rows);
    for (int64_t i = rows; i < N; i++)
        from[i] = from[i % rows];
    const struct nbi_op_gather op = {.y = nbi_run_out_rows(r, "y", N, C, 0),
                                     .x = nbi_run_rows(r, rows, C, 0, 2),
                                     .rows = nbi_run_ints(r, from, N),
                                     .M = N,
                                     .C = C,
                                     .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->gather(r->s, &op);
}

static enum nb_status scatter(struct nbi_kernel_run *r)
{
    int64_t rows = r->shape[0], C = r->shape[1], M = (rows + 1) / 2;
    int32_t to[ROWS_MAX];
    draw_distinct(r, to, M, rows);
    const struct nbi_op_scatter op = {.y = nbi_run_rows(r, rows, C, 0, 1),
                                      .x = nbi_run_rows(r, M, C, 0, 2),
                                      .rows = nbi_run_ints(r, to, M),
                                      .M = M,
                                      .C = C,
                                      .bf16 = nbi_run_acts(r) == NBI_BF16};
    nbi_run_result(r, "y", op.y, nbi_run_acts(r), rows, C, 0);
    NBI_TRY(r->rc);
    return r->be->scatter(r->s, &op);
}

/* ---- rmsnorm, rope ---- */

static const char norm_shapes_letters[] = "N C";
static const int64_t norm_shapes[][NBI_CASE_DIMS] = {{1, 64}, {5, 333}, {33, 1024}, {3, 5120}};

static enum nb_status rmsnorm(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], C = r->shape[1];
    const struct nbi_op_rmsnorm op = {.y = nbi_run_out_rows(r, "y", N, C, 0),
                                      .rstd = nbi_run_out_floats(r, "rstd", N),
                                      .x = nbi_run_rows(r, N, C, 0, 3),
                                      .w = nbi_run_weight(r, r->c->dtype, C, 0),
                                      .eps = 1e-6f,
                                      .N = N,
                                      .C = C,
                                      .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->rmsnorm(r->s, &op);
}

static const char table_shapes_letters[] = "N D";
static const int64_t table_shapes[][NBI_CASE_DIMS] = {{1, 128}, {37, 24}, {100, 64}};

static enum nb_status rope_table(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], D = r->shape[1];
    int32_t positions[ROWS_MAX];
    for (int64_t i = 0; i < N; i++)
        positions[i] = (int32_t)(nbi_run_bits(r) % 40000);
    const struct nbi_op_rope_table op = {.cos = nbi_run_out_floats(r, "cos", N * D / 2),
                                         .sin = nbi_run_out_floats(r, "sin", N * D / 2),
                                         .positions = nbi_run_ints(r, positions, N),
                                         .frequency = nbi_run_floats(r, D / 2, 1),
                                         .scale = 1.25f,
                                         .N = N,
                                         .D = D};
    NBI_TRY(r->rc);
    return r->be->rope_table(r->s, &op);
}

static const char heads_shapes_letters[] = "N NH NKV D";
static const int64_t heads_shapes[][NBI_CASE_DIMS] = {
    {1, 4, 2, 128}, {5, 3, 1, 24}, {33, 8, 2, 64}, {9, 2, 2, 80}};

static enum nb_status qkv_rope(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], NH = r->shape[1], NKV = r->shape[2], D = r->shape[3], rows = N + 3,
            ld = r->c->strided ? (NH + 2 * NKV) * D + 8 : 0;
    enum nbi_dtype type = nbi_run_dtype(r);
    int32_t kv_rows[ROWS_MAX];
    draw_distinct(r, kv_rows, N, rows);
    const struct nbi_op_qkv_rope op = {
        .q_out = nbi_run_out_rows(r, "q", N, NH * D, 0),
        .kv = {nbi_run_values(r, rows * NKV * D, 0), nbi_run_values(r, rows * NKV * D, 0), type},
        .kv_rows = nbi_run_ints(r, kv_rows, N),
        .q = nbi_run_rows(r, N, NH * D, ld, 3),
        .k = nbi_run_rows(r, N, NKV * D, ld, 3),
        .v = nbi_run_rows(r, N, NKV * D, ld, 3),
        .rstd_q = r->c->training ? nbi_run_out_floats(r, "rstd of q", N * NH) : (struct nbi_ptr){0},
        .rstd_k =
            r->c->training ? nbi_run_out_floats(r, "rstd of k", N * NKV) : (struct nbi_ptr){0},
        .q_norm = nbi_run_weight(r, NBI_BF16, D, 0),
        .k_norm = nbi_run_weight(r, NBI_F32, D, 0),
        .cos = nbi_run_floats(r, N * D / 2, 1),
        .sin = nbi_run_floats(r, N * D / 2, 1),
        .eps = 1e-6f,
        .N = N,
        .NH = NH,
        .NKV = NKV,
        .D = D,
        .ld = ld,
        .bf16 = nbi_run_acts(r) == NBI_BF16};
    nbi_run_result(r, "k", op.kv.k, type, rows, NKV * D, 0);
    nbi_run_result(r, "v", op.kv.v, type, rows, NKV * D, 0);
    NBI_TRY(r->rc);
    return r->be->qkv_rope(r->s, &op);
}

/* ---- swiglu ---- */

static const char swiglu_shapes_letters[] = "N F";
static const int64_t swiglu_shapes[][NBI_CASE_DIMS] = {{1, 96}, {5, 333}, {33, 544}};

static enum nb_status swiglu(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], F = r->shape[1], ld = r->c->strided ? 2 * F + 8 : 0;
    const struct nbi_op_swiglu op = {.y = nbi_run_out_rows(r, "y", N, F, 0),
                                     .gate = nbi_run_rows(r, N, F, ld, 6),
                                     .up = nbi_run_rows(r, N, F, ld, 2),
                                     .N = N,
                                     .F = F,
                                     .ld = ld,
                                     .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->swiglu(r->s, &op);
}

/* ---- topk: exact ---- */

static const char topk_shapes_letters[] = "N k V";
static const int64_t topk_shapes[][NBI_CASE_DIMS] = {{1, 1, 1}, {3, 7, 333}, {2, 64, 5000}};

/* Few values, so that there are ties. */
static enum nb_status topk(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], k = r->shape[1], V = r->shape[2];
    float *logits = malloc((size_t)(N * V) * sizeof *logits);
    if (!logits)
        return nbi_fail_memory("checking kernels", (size_t)(N * V) * sizeof *logits);
    for (int64_t i = 0; i < N * V; i++)
        logits[i] = (float)(int32_t)(nbi_run_bits(r) % 1000) - 500;
    const struct nbi_op_topk op = {.ids = nbi_run_out_bytes(r, "ids", N * k * 4),
                                   .values = nbi_run_out_bytes(r, "values", N * k * 4),
                                   .nonfinite = nbi_run_out_bytes(r, "nonfinite", N * 4),
                                   .logits =
                                       nbi_run_bytes(r, logits, N * V * (int64_t)sizeof *logits),
                                   .scratch = nbi_run_zeros(r, N * nbi_topk_scratch_bytes(V)),
                                   .k = k,
                                   .N = N,
                                   .V = V};
    free(logits);
    NBI_TRY(r->rc);
    return r->be->topk(r->s, &op);
}

/* ---- the table ---- */

static const struct nbi_kernel_case cases[] = {
    {"embed", "f32 table", embed, NBI_SHAPES(embed_shapes), .dtype = NBI_F32, .exact = true},
    {"embed", "f16 table", embed, NBI_SHAPES(embed_shapes), .dtype = NBI_F16, .exact = true},
    {"embed", "bf16 table", embed, NBI_SHAPES(embed_shapes), .dtype = NBI_BF16, .exact = true},
    {"embed", "f32 table, bf16", embed, NBI_SHAPES(embed_shapes), .dtype = NBI_F32, .exact = true,
     NBI_TRAIN_BF16},
    {"embed", "bf16 table, bf16", embed, NBI_SHAPES(embed_shapes), .dtype = NBI_BF16, .exact = true,
     NBI_TRAIN_BF16},
    {"rope_table", "f32", rope_table, NBI_SHAPES(table_shapes)},
    {"rmsnorm", "f32", rmsnorm, NBI_SHAPES(norm_shapes), .dtype = NBI_BF16},
    {"rmsnorm", "f32, f16 weight", rmsnorm, NBI_SHAPES(norm_shapes), .dtype = NBI_F16},
    {"rmsnorm", "bf16", rmsnorm, NBI_SHAPES(norm_shapes), .dtype = NBI_F32, NBI_TRAIN_BF16},
    {"qkv_rope", "f32, kv f32", qkv_rope, NBI_SHAPES(heads_shapes), .dtype = NBI_F32},
    {"qkv_rope", "f32, kv f16", qkv_rope, NBI_SHAPES(heads_shapes), .dtype = NBI_F16},
    {"qkv_rope", "f32, kv bf16", qkv_rope, NBI_SHAPES(heads_shapes), .dtype = NBI_BF16},
    {"qkv_rope", "f32, kv f8", qkv_rope, NBI_SHAPES(heads_shapes), .dtype = NBI_E4M3},
    {"qkv_rope", "f32, training", qkv_rope, NBI_SHAPES(heads_shapes), .dtype = NBI_F32,
     .training = true, .strided = true, .caps = NBI_CAP_TRAIN},
    {"qkv_rope", "bf16, training", qkv_rope, NBI_SHAPES(heads_shapes), .dtype = NBI_BF16,
     .strided = true, NBI_TRAIN_BF16},
    {"swiglu", "f32", swiglu, NBI_SHAPES(swiglu_shapes)},
    {"swiglu", "f32, rows apart", swiglu, NBI_SHAPES(swiglu_shapes), .strided = true},
    {"swiglu", "bf16", swiglu, NBI_SHAPES(swiglu_shapes), .strided = true, NBI_TRAIN_BF16},
    {"gather", "f32", gather, NBI_SHAPES(embed_shapes), .exact = true},
    {"gather", "bf16", gather, NBI_SHAPES(embed_shapes), .exact = true, NBI_TRAIN_BF16},
    {"scatter", "f32", scatter, NBI_SHAPES(norm_shapes), .exact = true},
    {"scatter", "bf16", scatter, NBI_SHAPES(norm_shapes), .exact = true, NBI_TRAIN_BF16},
    {"topk", "f32", topk, NBI_SHAPES(topk_shapes), .exact = true},
};

const struct nbi_kernel_cases nbi_cases_rowwise = {cases, NBI_COUNT_OF(cases)};
