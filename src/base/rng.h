/* rng.h - Philox4x32-10, a counter-based random generator (Salmon et al., SC 2011).
 *
 * The same key and counter give the same 128 bits on every device and in any order, so results do
 * not depend on thread counts, and a resumed run needs no generator state. */
#pragma once

#include <math.h>
#include <stdint.h>

struct nbi_philox {
    uint32_t v[4];
};

static inline struct nbi_philox nbi_philox(uint64_t key, uint64_t counter_lo, uint64_t counter_hi)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter_lo, c1 = (uint32_t)(counter_lo >> 32);
    uint32_t c2 = (uint32_t)counter_hi, c3 = (uint32_t)(counter_hi >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (uint32_t)p1;
        c2 = n2;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (struct nbi_philox){{c0, c1, c2, c3}};
}

/* Uniform in (0, 1); never 0, so that its logarithm is finite. */
static inline float nbi_uniform(uint32_t bits)
{
    return ((float)(bits >> 8) + 0.5f) * 0x1p-24f;
}

/* Four independent normal values per counter (Box-Muller). */
static inline void nbi_philox_normal4(float out[4], uint64_t key, uint64_t lo, uint64_t hi)
{
    struct nbi_philox r = nbi_philox(key, lo, hi);
    for (int i = 0; i < 4; i += 2) {
        float radius = sqrtf(-2.0f * logf(nbi_uniform(r.v[i])));
        float angle = 6.28318530717958648f * nbi_uniform(r.v[i + 1]);
        out[i] = radius * cosf(angle);
        out[i + 1] = radius * sinf(angle);
    }
}
