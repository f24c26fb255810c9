/* stored.h - reads and writes single values in the types of weights and caches. */
#pragma once

#include <string.h>

#include "tensor/dtype.h"
#include "tensor/half.h"

static inline void put_as(uint8_t *p, enum nbi_dtype dtype, int64_t i, float v)
{
    uint16_t half = dtype == NBI_BF16 ? nbi_f32_to_bf16(v) : nbi_f32_to_f16(v);
    if (dtype == NBI_F32)
        memcpy(p + 4 * i, &v, 4);
    else if (dtype == NBI_E4M3)
        p[i] = nbi_f32_to_e4m3(v);
    else
        memcpy(p + 2 * i, &half, 2);
}

static inline double get_as(const uint8_t *p, enum nbi_dtype dtype, int64_t i)
{
    uint16_t half;
    float f;
    if (dtype == NBI_E4M3)
        return (double)nbi_e4m3_to_f32(p[i]);
    if (dtype == NBI_F32) {
        memcpy(&f, p + 4 * i, 4);
        return (double)f;
    }
    memcpy(&half, p + 2 * i, 2);
    return (double)(dtype == NBI_BF16 ? nbi_bf16_to_f32(half) : nbi_f16_to_f32(half));
}
