/* codec.h - the inner loops that have several versions, as one table of pointers per
 * instruction set. kernels_scalar.c is the definition; the others must give the same bytes
 * (tests/unit/test_nvfp4.c compares every table the CPU can run). */
#pragma once

#include "base/sys.h"
#include "nibble.h"

struct nbi_codec_table {
    const char *name;

    /* Columns of `rows` blocks share a scale: block (r, j) is at x + (r * stride + j) * 16, its
     * codes at q + (r * stride + j) * 8, its scale at s + r * stride + j, for r < rows <= 16 and
     * j < blocks. rows = 1 is the ordinary case. Values are finite. */
    void (*quantize)(uint8_t *q, uint8_t *s, const float *x, int64_t blocks, int rows,
                     int64_t stride, enum nb_quant_method method);

    /* y[i] = (e2m1 * e4m3) * tensor_scale, rounded once per step. */
    void (*dequantize_f32)(float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                           float tensor_scale);

    /* Plain conversions of n values, as in half.h. */
    void (*bf16_to_f32)(float *y, const uint16_t *x, int64_t n);
    void (*f16_to_f32)(float *y, const uint16_t *x, int64_t n);
    void (*f32_to_bf16)(uint16_t *y, const float *x, int64_t n);
    void (*f32_to_f16)(uint16_t *y, const float *x, int64_t n);

    /* Largest absolute value, by bit pattern: NaN and infinity come out as such (0 for n = 0). */
    float (*amax)(const float *x, int64_t n);

    /* Adds the squared error of y against x, the squares of x, and the count of y == 0. */
    void (*error)(const float *x, const float *y, int64_t n, double sums[3]);
};

extern const struct nbi_codec_table nbi_codec_scalar;
#if defined(__x86_64__)
extern const struct nbi_codec_table nbi_codec_avx2, nbi_codec_avx512;
#endif

/* The fastest table this CPU runs. */
const struct nbi_codec_table *nbi_codec_table(void);

/* A given one, or NULL if this CPU or this build lacks it. */
const struct nbi_codec_table *nbi_codec_table_at(enum nbi_simd level);
