/* hash.h - FNV-1a, for hash tables, random streams and recognising known texts. Not
 * collision-resistant: where it matters, compare the bytes too. */
#pragma once

#include <stddef.h>
#include <stdint.h>

static inline uint64_t nbi_fnv1a(const char *bytes, size_t len)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (uint8_t)bytes[i]) * 0x100000001B3u;
    return h;
}
