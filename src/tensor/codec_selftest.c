/* codec_selftest.c - compares every codec path of this CPU with the scalar one, in milliseconds. */
#include <string.h>

#include "base/rng.h"
#include "nibble/tools.h"
#include "tensor/codec.h"
#include "tensor/nvfp4.h"

#define BLOCKS 331 /* odd, so that every path has a tail */

static enum nb_status compare(const struct nbi_codec_table *k, const float *x)
{
    uint8_t q[2][BLOCKS * NBI_NVFP4_BLOCK / 2], s[2][BLOCKS];
    static const enum nb_quant_method methods[] = {NB_QUANT_RTN, NB_QUANT_4OVER6, NB_QUANT_SWEEP};
    for (int m = 0; m < 3; m++) {
        nbi_codec_scalar.quantize(q[0], s[0], x, BLOCKS, 1, BLOCKS, methods[m]);
        k->quantize(q[1], s[1], x, BLOCKS, 1, BLOCKS, methods[m]);
        if (memcmp(q[0], q[1], sizeof q[0]) != 0 || memcmp(s[0], s[1], sizeof s[0]) != 0)
            return nbi_fail(NB_EDEVICE, "codec path '%s' does not agree with the scalar one",
                            k->name);
    }
    float y[2][BLOCKS * NBI_NVFP4_BLOCK];
    nbi_codec_scalar.dequantize_f32(y[0], q[0], s[0], BLOCKS, 0.5f);
    k->dequantize_f32(y[1], q[0], s[0], BLOCKS, 0.5f);
    if (memcmp(y[0], y[1], sizeof y[0]) != 0)
        return nbi_fail(NB_EDEVICE, "codec path '%s' does not dequantise as the scalar one",
                        k->name);
    return NB_OK;
}

enum nb_status nb_codec_selftest(void)
{
    float x[BLOCKS * NBI_NVFP4_BLOCK];
    for (uint64_t i = 0; i < BLOCKS * NBI_NVFP4_BLOCK; i += 4) {
        nbi_philox_normal4(x + i, 1, i, 0);
        for (int k = 0; k < 4; k++)
            x[i + (uint64_t)k] *= 0.02f;
    }
    for (int level = NBI_SIMD_AVX2; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = nbi_codec_table_at((enum nbi_simd)level);
        if (k)
            NBI_TRY(compare(k, x));
    }
    return NB_OK;
}
