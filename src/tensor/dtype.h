/* dtype.h - the table of element types in model files. */
#pragma once

#include "base/status.h"

/* id, name, bytes per element (0: blocks), safetensors name, `.dat` code, GGUF type; NULL and -1
 * where a format lacks the type. */
#define NBI_DTYPE_LIST(X)                                                                          \
    X(NBI_U8, "u8", 1, "U8", 0, -1)                                                                \
    X(NBI_I8, "i8", 1, "I8", 1, 24)                                                                \
    X(NBI_I16, "i16", 2, "I16", 2, 25)                                                             \
    X(NBI_I32, "i32", 4, "I32", 3, 26)                                                             \
    X(NBI_I64, "i64", 8, "I64", 4, 27)                                                             \
    X(NBI_F16, "f16", 2, "F16", 5, 1)                                                              \
    X(NBI_F32, "f32", 4, "F32", 6, 0)                                                              \
    X(NBI_F64, "f64", 8, "F64", 7, 28)                                                             \
    X(NBI_BOOL, "bool", 1, "BOOL", 11, -1)                                                         \
    X(NBI_BF16, "bf16", 2, "BF16", 15, 30)                                                         \
    X(NBI_U16, "u16", 2, "U16", -1, -1)                                                            \
    X(NBI_U32, "u32", 4, "U32", -1, -1)                                                            \
    X(NBI_U64, "u64", 8, "U64", -1, -1)                                                            \
    X(NBI_E5M2, "e5m2", 1, "F8_E5M2", -1, -1)                                                      \
    X(NBI_E2M1X2, "e2m1x2", 1, NULL, 100, -1)                                                      \
    X(NBI_E4M3, "e4m3", 1, "F8_E4M3", 101, -1)                                                     \
    X(NBI_NVFP4, "nvfp4", 0, NULL, -1, 40)

enum nbi_dtype {
#define X(id, name, bytes, st, dat, gguf) id,
    NBI_DTYPE_LIST(X)
#undef X
        NBI_DTYPES
};

struct nbi_dtype_info {
    const char *name;
    int bytes;
    const char *safetensors;
    int dat, gguf;
};

extern const struct nbi_dtype_info nbi_dtypes[NBI_DTYPES];

/* f32, f16 or bf16: the types of unquantised weights, all of which every backend loads. */
bool nbi_dtype_is_float(enum nbi_dtype dtype);

/* Product of the dimensions. Fails on a negative dimension, and above INT64_MAX / 16, so that a
 * caller may multiply the result by any element size. */
enum nb_status nbi_count(const int64_t *shape, int ndim, int64_t *count);

/* Bytes of `count` elements; for NVFP4, codes and block scales together. */
uint64_t nbi_dtype_bytes(enum nbi_dtype dtype, int64_t count);
