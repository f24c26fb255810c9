/* gguf.h - constants of the GGUF container, for reader and writer. Private to formats/. */
#pragma once

#include <stdint.h>

#define NBI_GGUF_MAGIC     0x46554747u /* "GGUF" */
#define NBI_GGUF_VERSION   3
#define NBI_GGUF_ALIGNMENT 32
#define NBI_GGUF_MAX_DIMS  4
#define NBI_GGUF_NAME_MAX  63 /* ggml stores 64 bytes with the NUL */

enum nbi_gguf_type {
    NBI_GGUF_U8,
    NBI_GGUF_I8,
    NBI_GGUF_U16,
    NBI_GGUF_I16,
    NBI_GGUF_U32,
    NBI_GGUF_I32,
    NBI_GGUF_F32,
    NBI_GGUF_BOOL,
    NBI_GGUF_STRING,
    NBI_GGUF_ARRAY,
    NBI_GGUF_U64,
    NBI_GGUF_I64,
    NBI_GGUF_F64,
    NBI_GGUF_TYPES
};

/* Two keys that nibble's writer adds to every file. A reader that finds one of them requires both.
 * The CRC covers everything before the tensor data, with its own four bytes taken as zero, so it
 * detects any damaged byte, those of the two keys included. */
#define NBI_GGUF_KEY_VERSION "nibble.version"
#define NBI_GGUF_KEY_CRC     "nibble.header_crc32c"

static inline uint64_t nbi_gguf_pad(uint64_t n, uint64_t alignment)
{
    return (n + alignment - 1) / alignment * alignment; /* callers keep n far from 2^64 */
}
