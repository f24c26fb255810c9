/* microkernels.c - chooses the table of inner loops for this CPU. */
#include "backend/cpu/microkernels.h"

#include <stddef.h>

#include "backend/devices.h"

const struct nbi_microkernels *nbi_microkernels_at(enum nbi_simd level)
{
    if (level > nbi_simd_level())
        return NULL;
    switch (level) {
#if defined(__x86_64__)
    case NBI_SIMD_AVX512: /* the first CPUs with AVX-512 lack VNNI, which multiplies bytes and
                             16-bit integers */
        return __builtin_cpu_supports("avx512vnni") ? &nbi_microkernels_avx512
                                                    : &nbi_microkernels_avx2;
    case NBI_SIMD_AVX2:
        return &nbi_microkernels_avx2;
#endif
    default:
        return &nbi_microkernels_scalar;
    }
}

const char *nbi_cpu_microkernels_name(enum nbi_simd level)
{
    const struct nbi_microkernels *k = nbi_microkernels_at(level);
    return k ? k->name : NULL;
}
