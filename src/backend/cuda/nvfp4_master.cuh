/* nvfp4_master.cuh - NVFP4 matrices without codes: makes values and codes from masters and block
 * scales, the ones that train_optimizer.cu made when it chose the scales.
 *
 * No product here is followed by a sum, so it does not matter whether a file is compiled with
 * contraction. */
#pragma once

#include "backend/cuda/nvfp4_sweep.cuh"

/* A matrix of layout NBI_WEIGHT_SCALES; scales NULL: none. */
struct coded_master {
    const uint8_t *scales; /* [rows, cols / 16] */
    const void *master;    /* [rows, cols] */
    bool bf16;             /* master; else f32 */
    int64_t cols;
    struct tensor_scale tensor_scale;
};

static inline struct coded_master coded_master_of(const struct nbi_weight *w)
{
    if (w->layout != NBI_WEIGHT_SCALES)
        return {};
    return {at<uint8_t>(w->scales), at<void>(w->master), w->master_dtype == NBI_BF16, w->cols,
            tensor_scale_of(w->tensor_scale)};
}

/* V values from column k of a row on, without the tensor scale, and their codes. V is 4 or 8, and k
 * a multiple of it. */
template <int V>
__device__ static inline void load_coded(float value[V], uint32_t code[V],
                                         const struct coded_master &m, int64_t row, int64_t k)
{
    const float2 entry = sweep_entry(m.scales[(row * m.cols + k) / 16]);
    uint32_t words[V];
#pragma unroll
    for (int i = 0; i < V; i += 4) {
        int64_t first = row * m.cols + k + i;
        if (m.bf16) {
            const uint2 two = *(const uint2 *)((const uint16_t *)m.master + first);
            words[i] = two.x << 16;
            words[i + 1] = two.x & 0xFFFF0000;
            words[i + 2] = two.y << 16;
            words[i + 3] = two.y & 0xFFFF0000;
        } else {
            const uint4 four = *(const uint4 *)((const uint32_t *)m.master + first);
            words[i] = four.x;
            words[i + 1] = four.y;
            words[i + 2] = four.z;
            words[i + 3] = four.w;
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        float q = divide(float_of(words[i]), m.tensor_scale), magnitude;
        uint32_t minus = bits_of(q) >> 31;
        code[i] = minus << 3 | encode_e2m1(fabsf(q), entry, &magnitude);
        value[i] = float_of(bits_of(magnitude * entry.x) | minus << 31);
    }
}
