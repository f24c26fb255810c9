/* cases_linear.c - products and their gradients. */
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "check/kernel_cases.h"

/* Rounding both factors to bf16 makes a product wrong by up to 2^-8, half of that on average; the
 * errors of a sum are independent, so the largest of some thousand results is six times 2^-9. */
#define ROUNDED_FACTORS (6 * 0x1p-9)

/* FP4 tensor cores take x as the sum of two NVFP4 values: 0.9 % RMS (tensor/nvfp4.h), and six times
 * that for the largest of all. Only where the backend has them, for many rows. */
#define FP4_FACTORS 6e-2

/* ---- linear ---- */

/* Up to 16 rows, up to 64, and more; columns with and without a remainder; one to three matrices.
 */
static const char linear_shapes_letters[] = "N K O0 O1 O2";
static const int64_t linear_shapes[][NBI_CASE_DIMS] = {
    {1, 256, 64, 16, 16}, {5, 336, 33, 7, 0}, {17, 544, 130, 0, 0}, {33, 64, 48, 48, 0}};
static const char many_rows_letters[] = "N K O0 O1 O2";
static const int64_t many_rows[][NBI_CASE_DIMS] = {{65, 256, 144, 16, 16}, {100, 336, 52, 0, 0}};
/* Few outputs of long rows: K is split over CTAs. */
static const char long_rows_letters[] = "N K O0";
static const int64_t long_rows[][NBI_CASE_DIMS] = {{3, 2048, 40}, {40, 1600, 24}};
static const char odd_columns_letters[] = "N K O0 O1 O2";
static const int64_t odd_columns[][NBI_CASE_DIMS] = {{1, 33, 5, 0, 0}, {67, 100, 70, 3, 0}};

/* Outputs of one row side by side if the case says `strided`. */
static int64_t row_stride(const struct nbi_kernel_run *r)
{
    return r->c->strided ? r->shape[2] + r->shape[3] + r->shape[4] : 0;
}

static int matrices(const struct nbi_kernel_run *r)
{
    return r->shape[3] == 0 ? 1 : r->shape[4] == 0 ? 2 : 3;
}

static int64_t size_of(const struct nbi_kernel_run *r)
{
    return nbi_run_acts(r) == NBI_BF16 ? 2 : 4;
}

/* A random matrix, or with a `store` of scales one that is made from a random master. */
static struct nbi_weight new_matrix(struct nbi_kernel_run *r, enum nbi_dtype dtype, int64_t O,
                                    int64_t K)
{
    if (r->c->store != NB_WEIGHT_STORE_SCALES || dtype != NBI_NVFP4)
        return nbi_run_weight(r, dtype, O, K);
    struct nbi_op_requantize op = {.w = nbi_run_weight_alloc(r, NBI_NVFP4, O, K),
                                   .master = nbi_run_floats(r, O * K, 0.1f),
                                   .dtype = NBI_F32,
                                   .round_to = NBI_BF16};
    op.w.tensor_scale = 0x1p-12f;
    op.w.master = op.master;
    op.w.master_dtype = op.dtype;
    if (r->rc == NB_OK)
        r->rc = r->be->requantize(r->s, &op);
    return op.w;
}

static enum nb_status linear(struct nbi_kernel_run *r)
{
    const int64_t N = r->shape[0], K = r->shape[1], *O = r->shape + 2, ld = row_stride(r);
    struct nbi_op_linear op = {.count = matrices(r),
                               .x = nbi_run_rows(r, N, K, 0, 2),
                               .N = N,
                               .K = K,
                               .matmul = r->reference ? NBI_MATMUL_F32 : r->c->matmul,
                               .add = r->c->add,
                               .batch_invariant = r->c->invariant,
                               .bf16 = nbi_run_acts(r) == NBI_BF16};
    struct nbi_ptr all = {0};
    if (ld > 0) {
        all = nbi_run_rows(r, N, ld, 0, 1);
        nbi_run_result(r, "y", all, nbi_run_acts(r), N, ld, 0);
    }
    for (int i = 0; i < op.count; i++) {
        op.w[i] = new_matrix(r, r->c->dtype, O[i], K);
        op.ldy[i] = ld;
        op.y[i] = all;
        all = nbi_ptr_add(all, O[i] * size_of(r));
        if (ld > 0)
            continue;
        op.y[i] = nbi_run_rows(r, N, O[i], 0, 1);
        nbi_run_result(r, "y", op.y[i], nbi_run_acts(r), N, O[i], 0);
    }
    if (r->c->training && r->c->add && op.count == 1)
        op.r = nbi_run_rows(r, N, O[0], 0, 1);
    NBI_TRY(r->rc);
    return r->be->linear(r->s, &op);
}

/* ---- linear_bwd ---- */

static const char train_shapes_letters[] = "N K O0 O1 O2";
static const int64_t train_shapes[][NBI_CASE_DIMS] = {
    {5, 64, 16, 16, 16}, {33, 144, 72, 0, 0}, {70, 80, 40, 24, 0}, {3, 33, 5, 9, 0}};

/* The values of NVFP4 weights in bf16, one matrix after the other, as weight_alloc makes them. */
static enum nb_status put_copies(struct nbi_kernel_run *r, struct nbi_weight *w, int count)
{
    for (int i = 0; i < count && w[i].dtype == NBI_NVFP4 && !r->reference; i++) {
        int64_t n = w[i].rows * w[i].cols;
        uint8_t *codes = malloc((size_t)n), *scales = malloc((size_t)n);
        uint16_t *values = malloc((size_t)n * sizeof *values);
        enum nb_status rc = NB_OK;
        if (codes && scales && values)
            rc = r->be->weight_read(r->be, &w[i], 0, w[i].rows, codes, scales);
        else
            rc = nbi_fail_memory("checking kernels", (size_t)n * 4);
        for (int64_t k = 0; rc == NB_OK && k < n; k++)
            values[k] = nbi_f32_to_bf16(nbi_e2m1_to_f32(codes[k / 2] >> (k % 2 * 4) & 15) *
                                        nbi_e4m3_to_f32(scales[k / 16]));
        if (rc == NB_OK)
            w[i].bf16 = nbi_run_bytes(r, values, n * (int64_t)sizeof *values);
        free(codes);
        free(scales);
        free(values);
        NBI_TRY(rc);
    }
    return NB_OK;
}

/* dW of matrix i; with dw_bf16 it has the type of activations. */
static struct nbi_ptr new_dw(struct nbi_kernel_run *r, int64_t O, int64_t K, bool rounded)
{
    if (rounded && r->c->fresh)
        return nbi_run_out_rows(r, "dw", O, K, 0);
    struct nbi_ptr p = nbi_run_floats(r, O * K, 1);
    nbi_run_result(r, "dw", p, NBI_F32, O, K, 0);
    return p;
}

static enum nb_status linear_bwd(struct nbi_kernel_run *r)
{
    const int64_t N = r->shape[0], K = r->shape[1], *O = r->shape + 2, ld = row_stride(r);
    bool dtype_fits = r->c->dtype != NBI_NVFP4 || K % 16 == 0, bf16 = nbi_run_acts(r) == NBI_BF16;
    struct nbi_op_linear_bwd op = {.count = matrices(r),
                                   .dx = nbi_run_rows(r, N, K, 0, 1),
                                   .x = nbi_run_rows(r, N, K, 0, 2),
                                   .N = N,
                                   .K = K,
                                   .add = r->c->add,
                                   .fresh = r->c->fresh,
                                   .bf16 = bf16,
                                   .dw_bf16 = bf16 && r->c->dw_rounded};
    struct nbi_ptr all = ld > 0 ? nbi_run_rows(r, N, ld, 0, 1) : (struct nbi_ptr){0};
    nbi_run_result(r, "dx", op.dx, nbi_run_acts(r), N, K, 0);
    for (int i = 0; i < op.count; i++) {
        op.w[i] = new_matrix(r, dtype_fits ? r->c->dtype : NBI_F32, O[i], K);
        op.dw[i] = new_dw(r, O[i], K, r->c->dw_rounded);
        op.ldy[i] = ld;
        op.dy[i] = ld > 0 ? all : nbi_run_rows(r, N, O[i], 0, 1);
        all = nbi_ptr_add(all, O[i] * size_of(r));
    }
    NBI_TRY(r->rc);
    if (r->c->store == NB_WEIGHT_STORE_BF16)
        NBI_TRY(put_copies(r, op.w, op.count));
    NBI_TRY(r->rc);
    return r->be->linear_bwd(r->s, &op);
}

/* ---- the table ---- */

#define FAST  .matmul = NBI_MATMUL_FAST, .bound = ROUNDED_FACTORS
#define EXACT .matmul = NBI_MATMUL_F32

static const struct nbi_kernel_case cases[] = {
    {"linear", "nvfp4, fast", linear, NBI_SHAPES(linear_shapes), .dtype = NBI_NVFP4, FAST},
    {"linear", "nvfp4, fast, added", linear, NBI_SHAPES(linear_shapes), .dtype = NBI_NVFP4, FAST,
     .add = true},
    {"linear", "nvfp4, fast, added, long rows", linear, NBI_SHAPES(long_rows), .dtype = NBI_NVFP4,
     FAST, .add = true},
    {"linear", "nvfp4, fast, batch-invariant", linear, NBI_SHAPES(linear_shapes),
     .dtype = NBI_NVFP4, FAST, .invariant = true},
    {"linear", "nvfp4, fast, many rows", linear, NBI_SHAPES(many_rows), .dtype = NBI_NVFP4, FAST,
     .fp4_bound = FP4_FACTORS},
    {"linear", "nvfp4, f32", linear, NBI_SHAPES(linear_shapes), .dtype = NBI_NVFP4, EXACT},
    {"linear", "nvfp4, f32, many rows", linear, NBI_SHAPES(many_rows), .dtype = NBI_NVFP4, EXACT,
     .add = true},
    {"linear", "bf16, fast", linear, NBI_SHAPES(linear_shapes), .dtype = NBI_BF16, FAST},
    {"linear", "bf16, fast, many rows", linear, NBI_SHAPES(many_rows), .dtype = NBI_BF16, FAST,
     .add = true},
    {"linear", "bf16, f32, odd columns", linear, NBI_SHAPES(odd_columns), .dtype = NBI_BF16, EXACT},
    {"linear", "f16, fast", linear, NBI_SHAPES(many_rows), .dtype = NBI_F16, FAST},
    {"linear", "f32, fast, odd columns", linear, NBI_SHAPES(odd_columns), .dtype = NBI_F32, FAST,
     .add = true},
    {"linear", "f32, training", linear, NBI_SHAPES(train_shapes), .dtype = NBI_F32, EXACT,
     .strided = true, NBI_TRAINING},
    {"linear", "nvfp4, training, added", linear, NBI_SHAPES(many_rows), .dtype = NBI_NVFP4, EXACT,
     .add = true, NBI_TRAINING},
    {"linear", "nvfp4, bf16", linear, NBI_SHAPES(many_rows), .dtype = NBI_NVFP4, NBI_TRAIN_BF16},
    {"linear", "nvfp4, bf16, one product", linear, NBI_SHAPES(many_rows), .dtype = NBI_NVFP4,
     .strided = true, NBI_TRAIN_BF16},
    {"linear", "f32 weight, bf16", linear, NBI_SHAPES(train_shapes), .dtype = NBI_F32,
     NBI_TRAIN_BF16},
    {"linear", "bf16 weight, bf16, added", linear, NBI_SHAPES(train_shapes), .dtype = NBI_BF16,
     .add = true, NBI_TRAIN_BF16},
    {"linear", "nvfp4 scales, f32, training", linear, NBI_SHAPES(many_rows), .dtype = NBI_NVFP4,
     EXACT, .store = NB_WEIGHT_STORE_SCALES, NBI_TRAINING},
    {"linear", "nvfp4 scales, bf16, one product", linear, NBI_SHAPES(many_rows), .dtype = NBI_NVFP4,
     .store = NB_WEIGHT_STORE_SCALES, .strided = true, NBI_TRAIN_BF16},
    {"linear_bwd", "f32", linear_bwd, NBI_SHAPES(train_shapes), .dtype = NBI_F32, NBI_TRAINING},
    {"linear_bwd", "f32, nvfp4, one product", linear_bwd, NBI_SHAPES(train_shapes),
     .dtype = NBI_NVFP4, .strided = true, .add = true, .fresh = true, NBI_TRAINING},
    {"linear_bwd", "bf16", linear_bwd, NBI_SHAPES(train_shapes), .dtype = NBI_BF16, NBI_TRAIN_BF16},
    {"linear_bwd", "bf16, f16 weight, added", linear_bwd, NBI_SHAPES(train_shapes),
     .dtype = NBI_F16, .add = true, NBI_TRAIN_BF16},
    {"linear_bwd", "bf16, nvfp4, one product", linear_bwd, NBI_SHAPES(train_shapes),
     .dtype = NBI_NVFP4, .strided = true, .fresh = true, NBI_TRAIN_BF16},
    {"linear_bwd", "bf16, nvfp4 and copy, bf16 dw", linear_bwd, NBI_SHAPES(train_shapes),
     .dtype = NBI_NVFP4, .store = NB_WEIGHT_STORE_BF16, .dw_rounded = true, .fresh = true,
     NBI_TRAIN_BF16},
    {"linear_bwd", "f32, nvfp4 scales", linear_bwd, NBI_SHAPES(train_shapes), .dtype = NBI_NVFP4,
     .store = NB_WEIGHT_STORE_SCALES, NBI_TRAINING},
    {"linear_bwd", "bf16, nvfp4 scales, one product", linear_bwd, NBI_SHAPES(train_shapes),
     .dtype = NBI_NVFP4, .store = NB_WEIGHT_STORE_SCALES, .strided = true, .fresh = true,
     NBI_TRAIN_BF16},
};

const struct nbi_kernel_cases nbi_cases_linear = {cases, NBI_COUNT_OF(cases)};
