/* codec.c - selects the table of inner loops, once. */
#include "tensor/codec.h"

#include <stdatomic.h>

const struct nbi_codec_table *nbi_codec_table_at(enum nbi_simd level)
{
    if (level > nbi_simd_level())
        return NULL;
    switch (level) {
#if defined(__x86_64__)
    case NBI_SIMD_AVX512:
        return &nbi_codec_avx512;
    case NBI_SIMD_AVX2:
        return &nbi_codec_avx2;
#endif
    case NBI_SIMD_SCALAR:
        return &nbi_codec_scalar;
    default:
        return NULL;
    }
}

const struct nbi_codec_table *nbi_codec_table(void)
{
    /* Every thread computes the same result, so a race only repeats the work. */
    static _Atomic(const struct nbi_codec_table *) chosen;
    const struct nbi_codec_table *k = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!k) {
        k = nbi_codec_table_at(nbi_simd_level());
        atomic_store_explicit(&chosen, k, memory_order_release);
    }
    return k;
}
