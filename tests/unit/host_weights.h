/* host_weights.h - random weights on the host, both as stored and as doubles, and random numbers.
 */
#pragma once

#include <math.h>

#include "backend/backend.h"
#include "base/rng.h"
#include "support.h"
#include "tensor/half.h"

/* ---- random numbers ---- */

static uint64_t drawn;

static inline uint32_t bits32(void)
{
    return nbi_philox(40, drawn++, 0).v[0];
}

static inline float uniform(void)
{
    return 2 * nbi_uniform(bits32()) - 1;
}

static inline void *zeros(int64_t n, size_t size)
{
    void *p = calloc((size_t)(n > 0 ? n : 1), size);
    assert_non_null(p);
    return p;
}

/* ---- weights ---- */

/* A parameter as it is stored, and its values. */
struct host_weight {
    enum nbi_dtype dtype;
    int64_t rows, cols; /* cols 0: a vector */
    float tensor_scale;
    uint8_t *data, *scales;
    double *values;
};

/* Scaled so that activations keep a magnitude of about 1. */
static inline void fill_nvfp4(struct host_weight *w)
{
    int64_t n = w->rows * w->cols;
    w->data = zeros(n / 2, 1);
    w->scales = zeros(n / 16, 1);
    w->tensor_scale = 0.01f / sqrtf((float)w->cols);
    for (int64_t i = 0; i < n / 2; i++)
        w->data[i] = (uint8_t)bits32();
    for (int64_t i = 0; i < n / 16; i++)
        w->scales[i] = (uint8_t)(0x68 + bits32() % 16);
    for (int64_t i = 0; i < n; i++) {
        uint8_t code = i & 1 ? w->data[i / 2] >> 4 : w->data[i / 2] & 15;
        w->values[i] = (double)nbi_e2m1_to_f32(code) * (double)nbi_e4m3_to_f32(w->scales[i / 16]) *
                       (double)w->tensor_scale;
    }
}

static inline void fill_floats(struct host_weight *w)
{
    int64_t n = w->rows * (w->cols > 0 ? w->cols : 1);
    int size = nbi_dtypes[w->dtype].bytes;
    w->data = zeros(n, (size_t)size);
    w->tensor_scale = 1;
    for (int64_t i = 0; i < n; i++) {
        float v = w->cols > 0 ? 1.7f * uniform() / sqrtf((float)w->cols) : 1 + 0.5f * uniform();
        uint16_t half = w->dtype == NBI_BF16 ? nbi_f32_to_bf16(v) : nbi_f32_to_f16(v);
        if (w->dtype == NBI_F32)
            memcpy(w->data + 4 * i, &v, 4);
        else
            memcpy(w->data + 2 * i, &half, 2);
        w->values[i] = (double)(w->dtype == NBI_F32    ? v
                                : w->dtype == NBI_BF16 ? nbi_bf16_to_f32(half)
                                                       : nbi_f16_to_f32(half));
    }
}

/* cols 0: a vector. */
static inline void host_weight_new(struct host_weight *w, enum nbi_dtype dtype, int64_t rows,
                                   int64_t cols)
{
    *w = (struct host_weight){.dtype = dtype, .rows = rows, .cols = cols};
    w->values = zeros(rows * (cols > 0 ? cols : 1), sizeof(double));
    if (dtype == NBI_NVFP4)
        fill_nvfp4(w);
    else
        fill_floats(w);
}

static inline void host_weight_free(struct host_weight *w)
{
    free(w->data);
    free(w->scales);
    free(w->values);
}

static inline enum nb_status read_host(void *ctx, int64_t first, int64_t count, void *data,
                                       void *scales)
{
    const struct host_weight *w = ctx;
    int64_t cols = w->cols > 0 ? w->cols : 1;
    if (w->dtype == NBI_NVFP4) {
        memcpy(data, w->data + first * cols / 2, (size_t)(count * cols / 2));
        memcpy(scales, w->scales + first * cols / 16, (size_t)(count * cols / 16));
        return NB_OK;
    }
    int64_t row = cols * nbi_dtypes[w->dtype].bytes;
    memcpy(data, w->data + first * row, (size_t)(count * row));
    return NB_OK;
}

static inline struct nbi_weight_source source_of(struct host_weight *w)
{
    return (struct nbi_weight_source){.dtype = w->dtype,
                                      .rows = w->rows,
                                      .cols = w->cols,
                                      .tensor_scale = w->tensor_scale,
                                      .read = read_host,
                                      .ctx = w};
}
