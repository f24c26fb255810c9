/* matrices.h - random matrices of any type, as stored and as doubles. */
#pragma once

#include "gradients.h"

struct matrix {
    enum nbi_dtype dtype;
    int64_t O, K;
    float tensor_scale;
    uint8_t *data, *scales;
    double *values;
};

static inline void matrix_new(struct matrix *w, enum nbi_dtype dtype, int64_t O, int64_t K)
{
    int64_t n = O * K;
    *w = (struct matrix){.dtype = dtype, .O = O, .K = K, .tensor_scale = 1};
    w->data = zeros(n, 4);
    w->scales = zeros(n, 1);
    w->values = random_floats(n, 1);
    for (int64_t i = 0; dtype == NBI_NVFP4 && i < n / 2; i++)
        w->data[i] = (uint8_t)bits32();
    for (int64_t i = 0; dtype == NBI_NVFP4 && i < n / 16; i++)
        w->scales[i] = (uint8_t)(bits32() % 0x7F);
    w->tensor_scale = dtype == NBI_NVFP4 ? ldexpf(0.00237f, (int)(O % 3)) : 1;
    for (int64_t i = 0; i < n; i++) {
        float f = (float)w->values[i];
        uint16_t half = dtype == NBI_BF16 ? nbi_f32_to_bf16(f) : nbi_f32_to_f16(f);
        uint8_t code = i & 1 ? w->data[i / 2] >> 4 : w->data[i / 2] & 15;
        if (dtype == NBI_F32)
            memcpy(w->data + 4 * i, &f, 4);
        else if (dtype == NBI_NVFP4)
            w->values[i] = (double)nbi_e2m1_to_f32(code) *
                           (double)nbi_e4m3_to_f32(w->scales[i / 16]) * (double)w->tensor_scale;
        else {
            memcpy(w->data + 2 * i, &half, 2);
            w->values[i] =
                (double)(dtype == NBI_BF16 ? nbi_bf16_to_f32(half) : nbi_f16_to_f32(half));
        }
    }
}

static inline enum nb_status read_matrix(void *ctx, int64_t first, int64_t count, void *data,
                                         void *scales)
{
    const struct matrix *w = ctx;
    size_t row = nbi_dtype_bytes(w->dtype, w->K);
    if (w->dtype == NBI_NVFP4) {
        memcpy(data, w->data + first * w->K / 2, (size_t)(count * w->K / 2));
        memcpy(scales, w->scales + first * w->K / 16, (size_t)(count * w->K / 16));
    } else
        memcpy(data, w->data + (size_t)first * row, (size_t)count * row);
    return NB_OK;
}

static inline struct nbi_weight put_matrix(struct rig *r, const struct matrix *w)
{
    struct nbi_weight out;
    const struct nbi_weight_source src = {.dtype = w->dtype,
                                          .rows = w->O,
                                          .cols = w->K,
                                          .tensor_scale = w->tensor_scale,
                                          .read = read_matrix,
                                          .ctx = (void *)w};
    assert_ok(r->be->weight_new(r->be, &src, &out));
    return out;
}

/* Gives the NVFP4 ones of `count` weights copies in bf16, one after the other. Their memory belongs
 * to the rig, so drop_copies comes before weight_free. */
static inline void put_copies(struct rig *r, struct nbi_weight *w, const struct matrix *m,
                              int count)
{
    int64_t n = 0, at = 0;
    for (int i = 0; i < count; i++)
        n += m[i].O * m[i].K;
    uint16_t *all = zeros(n, sizeof *all);
    for (int i = 0; i < count; i++)
        for (int64_t j = 0; j < m[i].O * m[i].K && m[i].dtype == NBI_NVFP4; j++)
            all[at++] = nbi_f32_to_bf16((float)(m[i].values[j] / (double)m[i].tensor_scale));
    struct nbi_ptr block = put_bytes(r, all, n * (int64_t)sizeof *all);
    at = 0;
    for (int i = 0; i < count; i++)
        if (m[i].dtype == NBI_NVFP4) {
            w[i].bf16 = nbi_ptr_add(block, at * (int64_t)sizeof *all);
            at += m[i].O * m[i].K;
        }
    free(all);
}

static inline void drop_copies(struct nbi_weight *w, int count)
{
    for (int i = 0; i < count; i++)
        w[i].bf16 = (struct nbi_ptr){0};
}

static inline void matrix_free(struct matrix *w)
{
    free(w->data);
    free(w->scales);
    free(w->values);
}
