/* microkernels_scalar.c - the inner loops as they are defined, written to be read. Sums of floats
 * are taken in double precision. */
#include <math.h>
#include <string.h>

#include "backend/cpu/microkernels.h"
#include "backend/cpu/optimizer_loops.h"
#include "tensor/half.h"

/* ---- types ---- */

static float load(const void *p, enum nbi_dtype dtype, int64_t i)
{
    const uint8_t *bytes = p;
    uint16_t half;
    float f;
    switch (dtype) {
    case NBI_F32:
        memcpy(&f, bytes + i * 4, 4);
        return f;
    case NBI_E4M3:
        return nbi_e4m3_to_f32(bytes[i]);
    default:
        memcpy(&half, bytes + i * 2, 2);
        return dtype == NBI_BF16 ? nbi_bf16_to_f32(half) : nbi_f16_to_f32(half);
    }
}

static void to_f32(float *y, const void *x, enum nbi_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = load(x, dtype, i);
}

static void from_f32(void *y, enum nbi_dtype dtype, const float *x, int64_t n)
{
    uint8_t *bytes = y;
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = dtype == NBI_BF16 ? nbi_f32_to_bf16(x[i]) : nbi_f32_to_f16(x[i]);
        if (dtype == NBI_F32)
            memcpy(bytes + i * 4, x + i, 4);
        else if (dtype == NBI_E4M3)
            bytes[i] = nbi_f32_to_e4m3(x[i]);
        else
            memcpy(bytes + i * 2, &half, 2);
    }
}

/* ---- products ---- */

static uint8_t code_at(const uint8_t *tile, int row, int k)
{
    uint8_t byte = tile[32 + k / 8 * 64 + row * 4 + k % 8 / 2];
    return k & 1 ? byte >> 4 : byte & 15;
}

static void store_row(const struct nbi_dot_tile *p, int c, int r, float sum)
{
    float *y = p->y + c * p->ldy + r;
    *y = p->add ? *y + sum : sum;
}

static void tiles_exact(const struct nbi_dot_tile *p)
{
    for (int c = 0; c < p->n; c++)
        for (int r = 0; r < p->rows; r++) {
            double sum = 0;
            for (int64_t g = 0; g < p->K / 16; g++) {
                const uint8_t *tile = (const uint8_t *)p->w + g / 2 * CPU_TILE_BYTES;
                int high = (int)(g & 1);
                double group_sum = 0;
                for (int k = 0; k < 16; k++)
                    group_sum += (double)nbi_e2m1_to_f32(code_at(tile, r, high * 16 + k)) *
                                 (double)p->x[c * p->ldx + g * 16 + k];
                sum += (double)nbi_e4m3_to_f32(tile[high * 16 + r]) * group_sum;
            }
            store_row(p, c, r, (float)(sum * (double)p->scale));
        }
}

/* The integer at column k of row c of a panel. */
static int32_t x_i16_get(const struct nbi_dot_tile *p, int64_t k, int c)
{
    const int8_t *bytes = (const int8_t *)p->x_i16 + nbi_x_i16_hi_lo_at(k);
    return p->n > 1 ? p->x_i16[nbi_x_i16_at(k, p->n) + 2 * c] : 256 * bytes[0] + bytes[8];
}

/* The product of one group of 16: an exact integer sum times the scale of the group. As in the SIMD
 * kernels, the scale is read times 2^-8. */
static float group_x_i16(const struct nbi_dot_tile *p, int64_t g, int r, int c)
{
    const uint8_t *tile = (const uint8_t *)p->w + g / 2 * CPU_TILE_BYTES;
    int high = (int)(g & 1);
    int32_t dot = 0;
    for (int k = 0; k < 16; k++)
        dot += (int32_t)(2 * nbi_e2m1_to_f32(code_at(tile, r, high * 16 + k))) *
               x_i16_get(p, g * 16 + k, c);
    return (float)dot * (nbi_e4m3_to_f32(tile[high * 16 + r]) * 0x1p-8f);
}

static void tiles_x_i16(const struct nbi_dot_tile *p)
{
    const int64_t step = NBI_X_I16_BLOCK / 16;
    for (int c = 0; c < p->n; c++)
        for (int r = 0; r < p->rows; r++) {
            float sum = 0;
            for (int64_t b = 0; b < nbi_x_i16_blocks(p->K); b++) {
                float group_sum = 0;
                for (int64_t g = b * step; g < (b + 1) * step && g < p->K / 16; g++)
                    group_sum += group_x_i16(p, g, r, c);
                sum += group_sum * p->x_i16_scale[b * p->n + c];
            }
            store_row(p, c, r, sum * p->scale);
        }
}

static void rows_float(const struct nbi_dot_tile *p)
{
    for (int c = 0; c < p->n; c++)
        for (int r = 0; r < p->rows; r++) {
            double sum = 0;
            for (int64_t k = 0; k < p->K; k++)
                sum += (double)load(p->w, p->dtype, r * p->ldw + k) * (double)p->x[c * p->ldx + k];
            store_row(p, c, r, (float)sum);
        }
}

static void x_i16_put(int16_t *q, int n, int64_t k, int32_t value)
{
    if (n > 1) {
        q[nbi_x_i16_at(k, n)] = (int16_t)value;
        return;
    }
    int8_t *bytes = (int8_t *)q + nbi_x_i16_hi_lo_at(k);
    bytes[0] = (int8_t)((value + 128) >> 8);
    bytes[8] = (int8_t)(value - 256 * bytes[0]);
    uint8_t *sum_at = (uint8_t *)q + k / 32 * (2 * NBI_X_I16_HI_LO) + 64 + k % 32 / 16 * 4;
    int32_t sum = 0;
    if (k % 16 > 0)
        memcpy(&sum, sum_at, sizeof sum);
    sum -= 12 * value;
    memcpy(sum_at, &sum, sizeof sum);
}

static void quantize_x_i16(int16_t *q, float *scale, int n, const float *x, int64_t K)
{
    for (int64_t b = 0; b * NBI_X_I16_BLOCK < K; b++) {
        int64_t first = b * NBI_X_I16_BLOCK, left = nbi_x_i16_values(K) - first;
        int64_t end = first + (left < NBI_X_I16_BLOCK ? left : NBI_X_I16_BLOCK);
        float amax = 0;
        bool nonfinite = false;
        for (int64_t k = first; k < end && k < K; k++) {
            amax = fmaxf(amax, fabsf(x[k]));
            nonfinite = nonfinite || !isfinite(x[k]);
        }
        float inverse = amax >= NBI_X_I16_TINY && !nonfinite ? NBI_X_I16_MAX / amax : 0;
        for (int64_t k = first; k < end; k++)
            x_i16_put(q, n, k, k < K && !nonfinite ? (int32_t)rintf(x[k] * inverse) : 0);
        /* times 1/2 because weights are doubled, times 2^8 because kernels read scales times 2^-8.
         * A non-finite value must show in the result. */
        scale[b * n] = nonfinite ? NAN : amax / NBI_X_I16_MAX * 0x1p7f;
    }
}

/* ---- rows ---- */

static float inverse_norm(const float *x, float eps, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return (float)(1 / sqrt(sum / (double)n + (double)eps));
}

static void rmsnorm(float *y, float *rstd, const float *x, const float *w, float eps, int64_t C)
{
    float f = inverse_norm(x, eps, C);
    if (rstd)
        *rstd = f;
    for (int64_t i = 0; i < C; i++)
        y[i] = x[i] * f * w[i];
}

static void norm_rope(float *y, float *rstd, const float *x, const float *w,
                      struct nbi_rope_row rope, float eps, int64_t D)
{
    float f = inverse_norm(x, eps, D);
    if (rstd)
        *rstd = f;
    for (int64_t i = 0; i < D / 2; i++) {
        float a = x[i] * f * w[i], b = x[i + D / 2] * f * w[i + D / 2];
        y[i] = a * rope.cos[i] - b * rope.sin[i];
        y[i + D / 2] = b * rope.cos[i] + a * rope.sin[i];
    }
}

static void swiglu(float *y, const float *gate, const float *up, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

static int64_t argmax(const float *x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

/* ---- attention ---- */

/* Online softmax: blocks of keys are added in turn, and what was summed so far is rescaled when the
 * maximum grows. Returns lse. */
static float attention_one_head(const struct nbi_attention_tile *a, float *y, const float *q,
                                int64_t count)
{
    double scale = 1 / sqrt((double)a->D), max = -INFINITY, sum = 0, out[NBI_HEAD_MAX] = {0};
    for (int64_t start = 0; start < count; start += NBI_KEY_BLOCK) {
        int64_t n = count - start < NBI_KEY_BLOCK ? count - start : NBI_KEY_BLOCK;
        const uint8_t *k = nbi_attention_kv_block(a, a->k, start),
                      *v = nbi_attention_kv_block(a, a->v, start);
        double score[NBI_KEY_BLOCK], block_max = max;
        for (int64_t i = 0; i < n; i++) {
            score[i] = 0;
            for (int64_t d = 0; d < a->D; d++)
                score[i] += (double)q[d] * (double)load(k + i * a->stride, a->dtype, d);
            score[i] *= scale;
            block_max = fmax(block_max, score[i]);
        }
        double keep = exp(max - block_max);
        sum *= keep;
        for (int64_t d = 0; d < a->D; d++)
            out[d] *= keep;
        for (int64_t i = 0; i < n; i++) {
            double p = exp(score[i] - block_max);
            sum += p;
            for (int64_t d = 0; d < a->D; d++)
                out[d] += p * (double)load(v + i * a->stride, a->dtype, d);
        }
        max = block_max;
    }
    for (int64_t d = 0; d < a->D; d++)
        y[d] = (float)(out[d] / sum);
    return (float)(max + log(sum));
}

static void attention(const struct nbi_attention_tile *a)
{
    for (int r = 0; r < a->rows; r++)
        for (int h = 0; h < a->heads; h++) {
            int64_t at = r * a->ldq + h * a->D;
            float lse = attention_one_head(a, a->y + at, a->q + at, a->last[r] - a->first + 1);
            if (a->lse)
                a->lse[r * a->ld_lse + h] = lse;
        }
}

/* ---- backward ---- */

#define MR 4
#define NR 16

static float exp_sum(float *y, const float *x, float max, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)(y[i] = expf(x[i] - max));
    return (float)sum;
}

static void gemm_tile(const struct nbi_gemm_tile *t)
{
    double sum[MR][NR] = {0};
    for (int64_t k = 0; k < t->k; k++)
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++)
                sum[m][n] +=
                    (double)t->a[m * t->a_row + k * t->a_col] * (double)t->b[k * t->ldb + n];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++)
            t->c[m * t->ldc + n] = (t->add ? t->c[m * t->ldc + n] : 0) + (float)sum[m][n];
}

static void pack(float *y, int64_t ldy, const float *x, struct nbi_strided at, float by)
{
    for (int64_t c = 0; c < at.cols; c++)
        for (int64_t r = 0; r < at.rows; r++)
            y[c * ldy + r] = by * x[r * at.row + c * at.col];
}

static void tile_to_f32(float *low, float *high, int64_t ld, const uint8_t *tile)
{
    for (int r = 0; r < CPU_TILE_ROWS; r++)
        for (int k = 0; k < 16; k++) {
            low[r * ld + k] = nbi_e2m1_to_f32(code_at(tile, r, k)) * nbi_e4m3_to_f32(tile[r]);
            high[r * ld + k] =
                nbi_e2m1_to_f32(code_at(tile, r, 16 + k)) * nbi_e4m3_to_f32(tile[16 + r]);
        }
}

/* y = x r w with r = (mean(x^2) + eps)^-1/2, so dr/dx = -r^3 x / C. */
static void rmsnorm_bwd(float *dx, const float *dy, const float *x, const float *w, float rstd,
                        int64_t C)
{
    double sum = 0;
    for (int64_t i = 0; i < C; i++)
        sum += (double)dy[i] * (double)w[i] * (double)x[i];
    float f = (float)(sum / (double)C) * rstd * rstd * rstd;
    for (int64_t i = 0; i < C; i++)
        dx[i] += dy[i] * w[i] * rstd - x[i] * f;
}

/* Rotates d back, then goes through the norm as rmsnorm_bwd. */
static void norm_rope_bwd(float *d, float *dw, const float *x, const float *w,
                          struct nbi_rope_row rope, float rstd, int64_t D)
{
    double sum = 0;
    for (int64_t i = 0, j = D / 2; i < D / 2; i++, j++) {
        float a = d[i] * rope.cos[i] + d[j] * rope.sin[i];
        float b = d[j] * rope.cos[i] - d[i] * rope.sin[i];
        dw[i] += a * x[i] * rstd;
        dw[j] += b * x[j] * rstd;
        d[i] = a * w[i];
        d[j] = b * w[j];
        sum += (double)d[i] * (double)x[i] + (double)d[j] * (double)x[j];
    }
    float f = (float)(sum / (double)D) * rstd * rstd * rstd;
    for (int64_t i = 0; i < D; i++)
        d[i] = d[i] * rstd - x[i] * f;
}

static void swiglu_bwd(float *dgate, float *dup, const float *dy, const float *gate,
                       const float *up, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float g = gate[i], u = up[i], s = 1 / (1 + expf(-g));
        dgate[i] = dy[i] * u * s * (1 + g * (1 - s));
        dup[i] = dy[i] * g * s;
    }
}

static void softmax_bwd(const struct nbi_softmax_bwd *a)
{
    for (int64_t i = 0; i < a->n; i++) {
        int64_t of = a->each ? i : 0;
        a->p[i] = expf(a->p[i] * a->scale - a->lse[of]);
        a->ds[i] = a->p[i] * (a->ds[i] - a->delta[of]) * a->scale;
    }
}

const struct nbi_microkernels nbi_microkernels_scalar = {
    .name = "scalar",
    .mr = MR,
    .nr = NR,
    .tiles_exact = tiles_exact,
    .tiles_x_i16 = tiles_x_i16,
    .rows_float = rows_float,
    .quantize_x_i16 = quantize_x_i16,
    .rmsnorm = rmsnorm,
    .norm_rope = norm_rope,
    .attention = attention,
    .swiglu = swiglu,
    .from_f32 = from_f32,
    .to_f32 = to_f32,
    .argmax = argmax,
    .grad_stats = grad_stats,
    .adamw = adamw,
    .exp_sum = exp_sum,
    .gemm_tile = gemm_tile,
    .pack = pack,
    .tile_to_f32 = tile_to_f32,
    .rmsnorm_bwd = rmsnorm_bwd,
    .norm_rope_bwd = norm_rope_bwd,
    .swiglu_bwd = swiglu_bwd,
    .softmax_bwd = softmax_bwd,
};
