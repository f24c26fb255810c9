/* linear_train.cu - products of training: y = x W^T with activations in bf16, and the gradients of
 * products.
 *
 *   bf16, shapes of multiples of 8   cuBLASLt in bf16 with f32 accumulation
 *   f32, and other shapes            CUDA cores, gemm_f32.cu
 *
 * cuBLASLt reads weights as bf16. Those that are not are converted, or made from their masters,
 * into nbi_stream.weights_bf16, as many rows (forward) or columns (dx) at a time as fit. Every
 * NVFP4 value is exact in bf16; the tensor scale becomes the factor of the product.
 *
 * Matrices whose outputs are neighbouring columns of the same rows, such as q, k and v, are treated
 * as one, which saves time where one matrix alone does not fill the device, and roundings of dx. */
#include <math.h>

#include "backend/cuda/cublaslt.cuh"
#include "backend/cuda/train.cuh"

/* ---- groups of matrices ---- */

/* Consecutive matrices of an operation that are multiplied as one [rows, K]. */
struct group {
    const struct nbi_weight *w;
    int count;
    int64_t rows, K;
};

static float scale_of(const struct nbi_weight *w)
{
    return w->dtype == NBI_NVFP4 ? w->tensor_scale : 1;
}

/* The rows of a matrix in bf16, without its tensor scale; NULL if there are none. */
static const __nv_bfloat16 *rows_in_bf16(const struct nbi_weight *w)
{
    return at<__nv_bfloat16>(w->dtype == NBI_BF16 ? w->data : w->bf16);
}

/* Whether a group of w may go on with next: both matrices are converted, and the ratio of their
 * scales is a power of two, so that the conversion can multiply by it; or both are in bf16, one
 * after the other, and have one scale. */
static bool can_join(const struct nbi_weight *w, const struct nbi_weight *last,
                     const struct nbi_weight *next)
{
    const __nv_bfloat16 *a = rows_in_bf16(last), *b = rows_in_bf16(next);
    int exponent;
    if (a || b)
        return a && b && b == a + last->rows * last->cols && scale_of(w) == scale_of(next);
    return frexpf(scale_of(next) / scale_of(w), &exponent) == 0.5f;
}

/* The group that begins with matrix i of n. y[i] are where the outputs lie, with row strides ld. */
static struct group group_at(const struct nbi_weight *w, int i, int n, const struct nbi_ptr *y,
                             const int64_t *ld, int64_t K)
{
    struct group g = {w + i, 1, w[i].rows, K};
    while (i + g.count < n) {
        int next = i + g.count;
        if (ld[i] == 0 || ld[next] != ld[i] || y[next].at != nbi_ptr_add(y[i], 2 * g.rows).at ||
            !can_join(&w[i], &w[next - 1], &w[next]))
            break;
        g.rows += w[next].rows;
        g.count++;
    }
    return g;
}

/* ---- weights in bf16 ---- */

struct to_bf16_args {
    __nv_bfloat16 *out; /* [rows, columns] */
    const void *w;
    enum nbi_dtype dtype;
    float factor;
    int64_t first_row, first_column, rows, columns;
    int64_t K; /* columns of w */
};

/* A piece of a matrix; eight values a thread, so that a warp stores consecutive bytes. */
__global__ static void k_weight_to_bf16(struct to_bf16_args a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = a.columns / 8;
    if (i >= a.rows * per_row)
        return;
    int64_t row = a.first_row + i / per_row, k = a.first_column + i % per_row * 8;
    float v[8];
    if (a.dtype == NBI_NVFP4) {
        load_tile4(v, (const uint8_t *)a.w, row, k, a.K);
        load_tile4(v + 4, (const uint8_t *)a.w, row, k + 4, a.K);
    } else {
        for (int j = 0; j < 8; j++)
            v[j] = load_f32(a.w, row * a.K + k + j, a.dtype);
    }
    for (int j = 0; j < 8; j++)
        v[j] *= a.factor;
    store_n<8>(a.out + i * 8, v);
}

/* The same of an NVFP4 matrix without codes. */
__global__ static void k_master_to_bf16(struct to_bf16_args a, struct coded_master m)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = a.columns / 8;
    if (i >= a.rows * per_row)
        return;
    float v[8];
    uint32_t codes[8];
    load_coded<8>(v, codes, m, a.first_row + i / per_row, a.first_column + i % per_row * 8);
    for (int j = 0; j < 8; j++)
        v[j] *= a.factor;
    store_n<8>(a.out + i * 8, v);
}

/* Rows [row, row + rows) and columns [column, column + columns) of a group. */
struct piece {
    int64_t row, rows, column, columns;
};

/* Memory for a piece of weights: all of s->weights_bf16 or a part. */
struct room {
    uint8_t *at;
    int64_t bytes;
};

static struct room all_room(const struct nbi_stream *s)
{
    return {s->weights_bf16, nbi_cuda_train_weights_bytes(&s->limits)};
}

static enum nb_status convert(struct nbi_stream *s, const struct group *g, const struct piece *p,
                              const struct room *to)
{
    __nv_bfloat16 *out = (__nv_bfloat16 *)to->at;
    int64_t first = 0; /* row of the group where matrix i begins */
    for (int i = 0; i < g->count; first += g->w[i++].rows) {
        const struct nbi_weight *w = &g->w[i];
        int64_t from = p->row > first ? p->row : first, end = first + w->rows;
        end = p->row + p->rows < end ? p->row + p->rows : end;
        if (from >= end)
            continue;
        const struct to_bf16_args a = {
            out,          at<void>(w->data), w->dtype,   scale_of(w) / scale_of(g->w),
            from - first, p->column,         end - from, p->columns,
            g->K};
        unsigned ctas = (unsigned)ceil_div(a.rows * (a.columns / 8), 256);
        if (w->layout == NBI_WEIGHT_SCALES)
            CU_LAUNCH(k_master_to_bf16, ctas, 256, 0, s->queue, a, coded_master_of(w));
        else
            CU_LAUNCH(k_weight_to_bf16, ctas, 256, 0, s->queue, a);
        CU_LAUNCHED();
        out += a.rows * a.columns;
    }
    return NB_OK;
}

/* How many of `total` rows or columns fit, if each takes `values`. */
static int64_t piece_size(const struct room *room, int64_t total, int64_t values)
{
    int64_t fit = room->bytes / (2 * values), whole = fit < CUDA_TILE_COLS ? 8 : CUDA_TILE_COLS;
    NBI_BUG_IF(fit < 8 && fit < total);
    return fit >= total ? total : fit / whole * whole;
}

/* ---- forward ---- */

static int64_t stride(int64_t ld, int64_t columns)
{
    return ld > 0 ? ld : columns;
}

static bool multiples_of_8(uintptr_t address, int64_t columns, int64_t ld)
{
    return is_vectorizable<__nv_bfloat16>(address, columns, ld);
}

/* y_i of a group, which begins with matrix i. */
static enum nb_status forward_group(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                    const struct group *group)
{
    const __nv_bfloat16 *rows = rows_in_bf16(group->w);
    const struct room room = all_room(s);
    struct cublaslt_gemm g = {};
    g.a = at<void>(a->x);
    g.M = a->N;
    g.K = g.lda = g.ldb = a->K;
    g.ldd = stride(a->ldy[i], group->rows);
    g.ldc = a->r.at ? group->rows : g.ldd;
    g.scale = scale_of(group->w);
    g.b_transposed = g.d_bf16 = g.training = true;
    int64_t step = rows ? group->rows : piece_size(&room, group->rows, a->K);
    for (int64_t first = 0; first < group->rows; first += step) {
        g.N = group->rows - first < step ? group->rows - first : step;
        g.d = at<__nv_bfloat16>(a->y[i]) + first;
        g.c = a->r.at ? at<__nv_bfloat16>(a->r) + first : a->add ? g.d : NULL;
        g.b = rows ? (const void *)rows : s->weights_bf16;
        const struct piece piece = {first, g.N, 0, a->K};
        if (!rows)
            NBI_TRY(convert(s, group, &piece, &room));
        NBI_TRY(nbi_cuda_cublaslt_gemm(s, &g));
    }
    return NB_OK;
}

enum nb_status nbi_cuda_linear_f32(struct nbi_stream *s, const struct nbi_op_linear *a, int i)
{
    const struct nbi_weight *w = &a->w[i];
    struct gemm_f32 g = {};
    g.d = at<void>(a->y[i]);
    g.ldd = stride(a->ldy[i], w->rows);
    g.c = a->r.at ? at<void>(a->r) : a->add ? g.d : NULL;
    g.ldc = a->r.at ? w->rows : g.ldd;
    g.a = at<void>(a->x);
    g.b = at<void>(w->data);
    g.b_type = w->dtype;
    g.coded = coded_master_of(w);
    g.M = a->N;
    g.N = w->rows;
    g.K = g.lda = g.ldb = a->K;
    g.scale = scale_of(w);
    g.b_transposed = true;
    g.a_bf16 = g.d_bf16 = a->bf16;
    return nbi_cuda_gemm_f32(s, &g);
}

static bool forward_by_cublaslt(const struct nbi_op_linear *a)
{
    bool ok = multiples_of_8(a->x.at | a->r.at, a->K, a->K);
    for (int i = 0; i < a->count; i++)
        ok = ok && multiples_of_8(a->y[i].at, a->w[i].rows, a->ldy[i]);
    return ok;
}

enum nb_status nbi_cuda_linear_train(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    bool cublaslt = a->bf16 && forward_by_cublaslt(a);
    NBI_BUG_IF((a->bf16 && !s->limits.bf16) || (a->r.at && a->count > 1));
    for (int i = 0; i < a->count;) {
        const struct group group = group_at(a->w, i, a->count, a->y, a->ldy, a->K);
        NBI_TRY(cublaslt ? forward_group(s, a, i, &group) : nbi_cuda_linear_f32(s, a, i));
        i += cublaslt ? group.count : 1;
    }
    return NB_OK;
}

/* ---- dx = sum of dy_i W_i ---- */

/* Rows [first, first + count) of dx, and where they are written or added to. */
struct dx_rows {
    int64_t first, count;
    void *to;
    bool bf16, add;
};

/* The row of dy_i that is the first of r. */
static const void *dy_row(const struct nbi_op_linear_bwd *a, int i, const struct dx_rows *r)
{
    int64_t ld = stride(a->ldy[i], a->w[i].rows);
    return at<void>(nbi_ptr_add(a->dy[i], r->first * ld * (a->bf16 ? 2 : 4)));
}

/* The part of a group, which begins with matrix i. */
static enum nb_status dx_group(struct nbi_stream *s, const struct nbi_op_linear_bwd *a, int i,
                               const struct group *group, const struct dx_rows *r,
                               const struct room *room)
{
    const __nv_bfloat16 *rows = rows_in_bf16(group->w);
    struct cublaslt_gemm g = {};
    g.a = dy_row(a, i, r);
    g.lda = stride(a->ldy[i], group->rows);
    g.M = r->count;
    g.K = group->rows;
    g.ldc = g.ldd = a->K;
    g.scale = scale_of(group->w);
    g.d_bf16 = r->bf16;
    g.training = true;
    int64_t step = rows ? a->K : piece_size(room, a->K, group->rows);
    for (int64_t first = 0; first < a->K; first += step) {
        g.N = a->K - first < step ? a->K - first : step;
        g.d = (uint8_t *)r->to + first * (r->bf16 ? 2 : 4);
        g.c = r->add ? g.d : NULL;
        g.b = rows ? (const void *)rows : room->at;
        g.ldb = rows ? a->K : g.N;
        const struct piece piece = {0, group->rows, first, g.N};
        if (!rows)
            NBI_TRY(convert(s, group, &piece, room));
        NBI_TRY(nbi_cuda_cublaslt_gemm(s, &g));
    }
    return NB_OK;
}

static enum nb_status dx_f32(struct nbi_stream *s, const struct nbi_op_linear_bwd *a, int i,
                             const struct dx_rows *r)
{
    const struct nbi_weight *w = &a->w[i];
    struct gemm_f32 g = {};
    g.d = r->to;
    g.c = r->add ? g.d : NULL;
    g.a = dy_row(a, i, r);
    g.lda = stride(a->ldy[i], w->rows);
    g.b = at<void>(w->data);
    g.b_type = w->dtype;
    g.coded = coded_master_of(w);
    g.M = r->count;
    g.N = g.ldb = g.ldc = g.ldd = a->K;
    g.K = w->rows;
    g.scale = scale_of(w);
    g.a_bf16 = a->bf16;
    g.d_bf16 = r->bf16;
    return nbi_cuda_gemm_f32(s, &g);
}

/* All matrices, one group after the other. */
static enum nb_status dx_sum(struct nbi_stream *s, const struct nbi_op_linear_bwd *a,
                             const struct dx_rows *rows, const struct room *room, bool cublaslt)
{
    struct dx_rows r = *rows;
    for (int i = 0; i < a->count; r.add = true) {
        const struct group group = group_at(a->w, i, a->count, a->dy, a->ldy, a->K);
        NBI_TRY(cublaslt ? dx_group(s, a, i, &group, &r, room) : dx_f32(s, a, i, &r));
        i += cublaslt ? group.count : 1;
    }
    return NB_OK;
}

__global__ static void k_round_dx(__nv_bfloat16 *dx, const float *sum, int64_t n, bool add)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        dx[i] = from_f32<__nv_bfloat16>(add ? to_f32(dx[i]) + sum[i] : sum[i]);
}

/* dx in bf16 of several groups: summed in f32, in a half of s->weights_bf16, and rounded once. */
static enum nb_status dx_rounded_once(struct nbi_stream *s, const struct nbi_op_linear_bwd *a,
                                      bool cublaslt)
{
    struct room room = all_room(s);
    int64_t limit = room.bytes / 2 / (a->K * (int64_t)sizeof(float));
    float *sum = (float *)(room.at + room.bytes / 2);
    room.bytes /= 2;
    NBI_BUG_IF(limit == 0);
    for (int64_t first = 0; first < a->N; first += limit) {
        const struct dx_rows r = {first, a->N - first < limit ? a->N - first : limit, sum, false,
                                  false};
        int64_t n = r.count * a->K;
        NBI_TRY(dx_sum(s, a, &r, &room, cublaslt));
        CU_LAUNCH(k_round_dx, (unsigned)ceil_div(n, 256), 256, 0, s->queue,
                  at<__nv_bfloat16>(a->dx) + first * a->K, sum, n, a->add);
        CU_LAUNCHED();
    }
    return NB_OK;
}

static enum nb_status backward_dx(struct nbi_stream *s, const struct nbi_op_linear_bwd *a)
{
    const struct group group = group_at(a->w, 0, a->count, a->dy, a->ldy, a->K);
    const struct dx_rows all = {0, a->N, at<void>(a->dx), a->bf16, a->add};
    const struct room room = all_room(s);
    bool cublaslt = a->bf16 && multiples_of_8(a->dx.at, a->K, a->K);
    for (int i = 0; i < a->count; i++)
        cublaslt = cublaslt && multiples_of_8(a->dy[i].at, a->w[i].rows, a->ldy[i]);
    if (a->bf16 && (cublaslt ? group.count : 1) < a->count)
        return dx_rounded_once(s, a, cublaslt);
    return dx_sum(s, a, &all, &room, cublaslt);
}

/* ---- dW_i = dy_i^T x ---- */

/* Rows of dW from matrix i on that are one block of memory, as their dy are one of columns. */
static int64_t joined_dw_rows(const struct nbi_op_linear_bwd *a, int i, int *count)
{
    int64_t rows = a->w[i].rows, ld = a->ldy[i], bytes = a->dw_bf16 ? 2 : 4;
    for (*count = 1; i + *count < a->count; ++*count) {
        int next = i + *count;
        if (ld == 0 || a->ldy[next] != ld || a->dy[next].at != nbi_ptr_add(a->dy[i], 2 * rows).at ||
            a->dw[next].at != nbi_ptr_add(a->dw[i], rows * a->K * bytes).at)
            break;
        rows += a->w[next].rows;
    }
    return rows;
}

static enum nb_status dw_group(struct nbi_stream *s, const struct nbi_op_linear_bwd *a, int i,
                               int64_t rows)
{
    struct cublaslt_gemm g = {};
    g.d = at<void>(a->dw[i]);
    g.c = a->fresh ? NULL : g.d;
    g.a = at<void>(a->dy[i]);
    g.lda = stride(a->ldy[i], a->w[i].rows);
    g.b = at<void>(a->x);
    g.M = rows;
    g.N = g.ldb = g.ldc = g.ldd = a->K;
    g.K = a->N;
    g.scale = 1;
    g.a_transposed = g.training = true;
    g.d_bf16 = a->dw_bf16;
    return nbi_cuda_cublaslt_gemm(s, &g);
}

static enum nb_status dw_f32(struct nbi_stream *s, const struct nbi_op_linear_bwd *a, int i)
{
    struct gemm_f32 g = {};
    g.d = at<void>(a->dw[i]);
    g.c = a->fresh ? NULL : g.d;
    g.a = at<void>(a->dy[i]);
    g.lda = stride(a->ldy[i], a->w[i].rows);
    g.b = at<void>(a->x);
    g.b_type = a->bf16 ? NBI_BF16 : NBI_F32;
    g.M = a->w[i].rows;
    g.N = g.ldb = g.ldc = g.ldd = a->K;
    g.K = a->N;
    g.scale = 1;
    g.a_transposed = true;
    g.a_bf16 = a->bf16;
    g.d_bf16 = a->dw_bf16;
    return nbi_cuda_gemm_f32(s, &g);
}

static enum nb_status backward_dw(struct nbi_stream *s, const struct nbi_op_linear_bwd *a)
{
    for (int i = 0, count = 1; i < a->count; i += count) {
        int64_t rows = joined_dw_rows(a, i, &count);
        bool cublaslt = a->bf16 && multiples_of_8(a->x.at, a->K, a->K);
        for (int j = i; j < i + count; j++)
            cublaslt =
                cublaslt && multiples_of_8(a->dy[j].at | a->dw[j].at, a->w[j].rows, a->ldy[j]);
        if (!cublaslt)
            count = 1;
        if (a->dw[i].at)
            NBI_TRY(cublaslt ? dw_group(s, a, i, rows) : dw_f32(s, a, i));
    }
    return NB_OK;
}

enum nb_status nbi_cuda_linear_bwd(struct nbi_stream *s, const struct nbi_op_linear_bwd *a)
{
    CU_HERE(s);
    NBI_BUG_IF((a->bf16 && !s->limits.bf16) || (a->dw_bf16 && !(a->bf16 && a->fresh)));
    if (a->dx.at)
        NBI_TRY(backward_dx(s, a));
    return backward_dw(s, a);
}
