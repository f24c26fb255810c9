/* linear_lab.h - the operation linear on a tested backend against the scalar CPU code, and how far
 * results may differ. */
#pragma once

#include "ops_lab.h"

#include "tensor/nvfp4.h"

struct linear_case {
    int count;
    int64_t N, K, outs; /* outs: of all matrices together */
    bool add;
    struct host_weight w[NBI_LINEAR_MAX];
    float *x, *y; /* y: what the results are added to */
};

static inline void linear_new(struct linear_case *c, int64_t N, int64_t K, const int64_t *O)
{
    c->N = N;
    c->K = K;
    c->outs = 0;
    for (int i = 0; i < c->count; i++)
        c->outs += O[i];
    c->x = random_floats(N * K, 2);
    c->y = random_floats(N * c->outs, 1);
}

static inline void linear_free(struct linear_case *c)
{
    for (int i = 0; i < c->count; i++)
        host_weight_free(&c->w[i]);
    free(c->x);
    free(c->y);
}

/* out: [N, O] of each matrix, one after another. */
static inline void run_linear(struct nbi_backend *be, struct linear_case *c, bool exact, float *out)
{
    struct lab l;
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = c->N, .K = c->K, .D = 2, .heads = 1});
    struct nbi_op_linear op = {.count = c->count,
                               .x = block(&l, c->x, c->N * c->K * 4),
                               .N = c->N,
                               .K = c->K,
                               .add = c->add,
                               .matmul = exact ? NBI_MATMUL_F32 : NBI_MATMUL_FAST};
    int64_t at = 0;
    for (int i = 0; i < c->count; i++) {
        op.w[i] = weight(&l, &c->w[i]);
        op.y[i] = block(&l, c->add ? c->y + at : NULL, c->N * c->w[i].rows * 4);
        at += c->N * c->w[i].rows;
    }
    assert_ok(be->linear(l.s, &op));
    at = 0;
    for (int i = 0; i < c->count; i++) {
        fetch(&l, out + at, op.y[i], c->N * c->w[i].rows * 4);
        at += c->N * c->w[i].rows;
    }
    lab_end(&l);
}

/* Relative errors of single products. Exact: none, only the order of the f32 sum differs. BF16: x,
 * and a matrix of floats, may be rounded to bf16, by up to 2^-9 each; errors are independent, so
 * they add up as squares do. FP4: x as the sum of two NVFP4 values is multiplied without further
 * rounding, in about f32; a tenth of x is in the second. */
#define ERROR_EXACT 0.0
#define ERROR_BF16  (6 * 0x1p-9)
#define ERROR_FP4   1e-3

static inline void linear_bounds(const struct linear_case *c, double error, double *bound)
{
    for (int i = 0; i < c->count; i++)
        for (int64_t n = 0; n < c->N; n++)
            for (int64_t o = 0; o < c->w[i].rows; o++) {
                const float *x = c->x + n * c->K;
                const double *w = c->w[i].values + o * c->K;
                *bound++ = dot_bound(x, w, c->K, error) + (c->add ? 1e-6 : 0);
            }
}

/* x as FP4 tensor cores multiply it: the sum of two NVFP4 values, scaled by the amax of its finite
 * values. Values that are not finite become NaN. */
static inline float *x_as_fp4(const struct linear_case *c)
{
    int64_t n = c->N * c->K;
    float *x = zeros(n, 4), amax = 0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = isfinite(c->x[i]) ? c->x[i] : 0;
        amax = fmaxf(amax, fabsf(x[i]));
    }
    nbi_nvfp4_split_hi_lo(x, x, n / 16, nbi_nvfp4_tensor_scale(amax));
    for (int64_t i = 0; i < n; i++)
        x[i] = isfinite(c->x[i]) ? x[i] : NAN;
    return x;
}

/* Replaces `want` and `bound` for the matrices that FP4 tensor cores multiply. */
static inline void expect_fp4(const struct linear_case *c, float *want, double *bound)
{
    int64_t n = c->N * c->outs, at = 0;
    struct linear_case fp4 = *c;
    float *y = zeros(n, 4);
    double *fp4_bound = zeros(n, 8);
    fp4.x = x_as_fp4(c);
    run_linear(scalar, &fp4, true, y);
    linear_bounds(&fp4, ERROR_FP4, fp4_bound);
    for (int i = 0; i < c->count; i++) {
        int64_t results = c->N * c->w[i].rows;
        if (c->w[i].dtype == NBI_NVFP4 && c->w[i].rows % 4 == 0) {
            memcpy(want + at, y + at, (size_t)results * 4);
            memcpy(bound + at, fp4_bound + at, (size_t)results * 8);
        }
        at += results;
    }
    free(fp4.x);
    free(y);
    free(fp4_bound);
}

static inline void check_product(struct linear_case *c)
{
    int64_t n = c->N * c->outs;
    float *want = zeros(n, 4), *is = zeros(n, 4);
    double *bound = zeros(n, 8);
    run_linear(scalar, c, true, want);
    for (int exact = 1; exact >= 0; exact--) {
        run_linear(tested, c, exact, is);
        linear_bounds(c, exact ? ERROR_EXACT : ERROR_BF16, bound);
        if (!exact && nbi_backend_has(tested, NBI_CAP_FP4) && c->N > 64)
            expect_fp4(c, want, bound);
        within(exact ? "exact y" : "y", is, want, bound, n);
    }
    free(want);
    free(is);
    free(bound);
}

/* Random block scales over the whole range of E4M3, up to 448. */
static inline void spread_scales(struct host_weight *w)
{
    for (int64_t i = 0; i < w->rows * w->cols / 16; i++)
        w->scales[i] = (uint8_t)(bits32() % 0x7F);
    for (int64_t i = 0; i < w->rows * w->cols; i++) {
        uint8_t code = i & 1 ? w->data[i / 2] >> 4 : w->data[i / 2] & 15;
        w->values[i] = (double)nbi_e2m1_to_f32(code) * (double)nbi_e4m3_to_f32(w->scales[i / 16]) *
                       (double)w->tensor_scale;
    }
}
