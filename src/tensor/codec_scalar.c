/* codec_scalar.c - the reference for every inner loop, written to be read.
 *
 * Arithmetic is plain f32 in the order written here. The build forbids contraction into fused
 * multiply-add, because the vector versions must reproduce each rounding. */
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

#define BLOCK          NBI_NVFP4_BLOCK
#define MAX_CANDIDATES 9

static uint8_t clamp_code(int code)
{
    return (uint8_t)(code < 0x01 ? 0x01 : code > 0x7E ? 0x7E : code);
}

/* Lists the scales that a method tries, best guess first. */
static int candidates(uint8_t codes[MAX_CANDIDATES], float amax, enum nb_quant_method method)
{
    float base = amax / 6.0f;
    uint8_t rtn = clamp_code(nbi_f32_to_e4m3(base));
    int n = 0;
    codes[n++] = rtn;
    if (method == NB_QUANT_4OVER6) {
        codes[n++] = clamp_code(nbi_f32_to_e4m3(base * 1.5f));
    } else if (method == NB_QUANT_SWEEP) {
        for (int d = -2; d <= 6; d++)
            if (d != 0)
                codes[n++] = clamp_code(rtn + d);
    }
    return n;
}

/* Returns sum plus the squared error of one block under a scale, value by value. The quotient may
 * be one rounding off the exact one (it multiplies by 1 / scale); near a tie both codes have about
 * the same error. */
static float add_error(float sum, const float *x, float scale)
{
    float inverse = 1.0f / scale;
    for (int i = 0; i < BLOCK; i++) {
        float a = fabsf(x[i]);
        float d = a - nbi_e2m1_to_f32(nbi_f32_to_e2m1(a * inverse)) * scale;
        sum += d * d;
    }
    return sum;
}

static void encode(uint8_t *q, const float *x, float scale)
{
    for (int i = 0; i < BLOCK; i += 2)
        q[i / 2] =
            (uint8_t)(nbi_f32_to_e2m1(x[i] / scale) | nbi_f32_to_e2m1(x[i + 1] / scale) << 4);
}

static uint8_t choose(const float *x, int rows, int64_t stride, enum nb_quant_method method)
{
    float amax = 0;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++)
            amax = fmaxf(amax, fabsf(x[r * stride * BLOCK + i]));
    if (amax == 0)
        return 0x38;
    uint8_t codes[MAX_CANDIDATES];
    int n = candidates(codes, amax, method), best = 0;
    float best_error = INFINITY;
    for (int c = 0; n > 1 && c < n; c++) {
        float sum = 0, scale = nbi_e4m3_to_f32(codes[c]);
        for (int r = 0; r < rows; r++)
            sum = add_error(sum, x + r * stride * BLOCK, scale);
        if (sum < best_error) {
            best_error = sum;
            best = c;
        }
    }
    return codes[best];
}

static void quantize(uint8_t *q, uint8_t *s, const float *x, int64_t blocks, int rows,
                     int64_t stride, enum nb_quant_method method)
{
    for (int64_t j = 0; j < blocks; j++) {
        uint8_t code = choose(x + j * BLOCK, rows, stride, method);
        for (int r = 0; r < rows; r++) {
            int64_t at = r * stride + j;
            s[at] = code;
            encode(q + at * BLOCK / 2, x + at * BLOCK, nbi_e4m3_to_f32(code));
        }
    }
}

static void dequantize_f32(float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                           float tensor_scale)
{
    for (int64_t b = 0; b < blocks; b++, y += BLOCK, q += BLOCK / 2) {
        float scale = nbi_e4m3_to_f32(s[b]);
        for (int i = 0; i < BLOCK; i++)
            y[i] = nbi_e2m1_to_f32(q[i / 2] >> 4 * (i & 1) & 15) * scale * tensor_scale;
    }
}

static void bf16_to_f32(float *y, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = nbi_bf16_to_f32(x[i]);
}

static void f16_to_f32(float *y, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = nbi_f16_to_f32(x[i]);
}

static void f32_to_bf16(uint16_t *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = nbi_f32_to_bf16(x[i]);
}

static void f32_to_f16(uint16_t *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = nbi_f32_to_f16(x[i]);
}

static float amax(const float *x, int64_t n)
{
    uint32_t max = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t a = nbi_f32_bits(x[i]) & 0x7FFFFFFF;
        max = a > max ? a : max;
    }
    return nbi_f32_from_bits(max);
}

static void error(const float *x, const float *y, int64_t n, double sums[3])
{
    for (int64_t i = 0; i < n; i++) {
        double d = (double)x[i] - (double)y[i];
        sums[0] += d * d;
        sums[1] += (double)x[i] * (double)x[i];
        sums[2] += y[i] == 0;
    }
}

const struct nbi_codec_table nbi_codec_scalar = {
    .name = "scalar",
    .quantize = quantize,
    .dequantize_f32 = dequantize_f32,
    .bf16_to_f32 = bf16_to_f32,
    .f16_to_f32 = f16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .f32_to_f16 = f32_to_f16,
    .amax = amax,
    .error = error,
};
