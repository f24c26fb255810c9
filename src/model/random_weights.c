/* random_weights.c - random weights with the shapes of a model, for benches and tests without one.
 *
 * Each parameter has a random stream of its own, chosen by its name, and a position in it for each
 * value. So threads may make rows in any order. */
#include <string.h>

#include "base/hash.h"
#include "base/rng.h"
#include "model/weights.h"
#include "tensor/half.h"

struct random {
    uint64_t seed, stream;
    int64_t cols;
    enum nbi_dtype dtype;
};

static void fill_bytes(uint8_t *p, size_t bytes, uint64_t seed, uint64_t stream, uint64_t at)
{
    for (size_t i = 0; i < bytes; i += 16) {
        struct nbi_philox r = nbi_philox(seed, at + i / 16, stream);
        memcpy(p + i, r.v, bytes - i < 16 ? bytes - i : 16);
    }
}

/* Scales from 2^-7 to 1.75 * 2^-7 give weights of about the magnitude of a real model's. */
static void fill_nvfp4(const struct random *r, int64_t first, int64_t count, uint8_t *codes,
                       uint8_t *scales)
{
    size_t bytes = (size_t)(count * r->cols / 2), blocks = (size_t)(count * r->cols / 16);
    fill_bytes(codes, bytes, r->seed, r->stream, (uint64_t)(first * r->cols / 32));
    fill_bytes(scales, blocks, r->seed, r->stream + ((uint64_t)1 << 32),
               (uint64_t)(first * r->cols / 256));
    for (size_t i = 0; i < blocks; i++)
        scales[i] = (uint8_t)(4 + scales[i] % 4); /* E4M3 subnormals */
}

static void fill_bf16(const struct random *r, int64_t first, int64_t count, uint16_t *out)
{
    for (int64_t i = 0; i < count * r->cols; i += 4) {
        struct nbi_philox v = nbi_philox(r->seed, (uint64_t)(first * r->cols + i), r->stream);
        for (int64_t j = 0; j < 4 && i + j < count * r->cols; j++)
            out[i + j] = nbi_f32_to_bf16((nbi_uniform(v.v[j]) - 0.5f) * 0.07f);
    }
}

static enum nb_status read_random(void *ctx, int64_t first, int64_t count, void *data, void *scales)
{
    const struct random *r = ctx;
    NBI_TRY(nbi_check_interrupt());
    if (r->cols == 0) {
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)data)[i] = 0x3F80; /* 1 in bf16 */
    } else if (r->dtype == NBI_NVFP4) {
        fill_nvfp4(r, first, count, data, scales);
    } else {
        fill_bf16(r, first, count, data);
    }
    return NB_OK;
}

static enum nb_status load_random(void *ctx, struct nbi_backend *be, const struct nbi_param *p,
                                  struct nbi_weight *out)
{
    uint64_t hash = nbi_fnv1a(p->name, strlen(p->name));
    bool nvfp4 = p->def->flags & NBI_QUANT && p->shape[1] % 16 == 0;
    struct random r = {*(const uint64_t *)ctx, hash & 0xFFFFFFFF, p->shape[1],
                       nvfp4 ? NBI_NVFP4 : NBI_BF16};
    const struct nbi_weight_source src = {.dtype = r.dtype,
                                          .rows = p->shape[0],
                                          .cols = r.cols,
                                          .tensor_scale = 1,
                                          .read = read_random,
                                          .ctx = &r,
                                          .lookup = p->def->flags & NBI_GATHER};
    return be->weight_new(be, &src, out);
}

struct nbi_weight_provider nbi_weights_from_seed(uint64_t *seed)
{
    return (struct nbi_weight_provider){load_random, seed};
}
