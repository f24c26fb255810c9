/* dtype.c - the table of element types. */
#include "tensor/dtype.h"

#include "tensor/nvfp4.h"

const struct nbi_dtype_info nbi_dtypes[NBI_DTYPES] = {
#define X(id, name, bytes, st, dat, gguf) [id] = {name, bytes, st, dat, gguf},
    NBI_DTYPE_LIST(X)
#undef X
};

bool nbi_dtype_is_float(enum nbi_dtype dtype)
{
    return dtype == NBI_F32 || dtype == NBI_F16 || dtype == NBI_BF16;
}

enum nb_status nbi_count(const int64_t *shape, int ndim, int64_t *count)
{
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return nbi_fail(NB_EFORMAT, "dimension %d is negative", i);
        if (__builtin_mul_overflow(n, shape[i], &n) || n > INT64_MAX / 16)
            return nbi_fail(NB_EFORMAT, "the shape has too many elements");
    }
    *count = n;
    return NB_OK;
}

uint64_t nbi_dtype_bytes(enum nbi_dtype dtype, int64_t count)
{
    if (dtype == NBI_NVFP4)
        return (uint64_t)count / NBI_NVFP4_BLOCK * (NBI_NVFP4_BLOCK / 2 + 1);
    return (uint64_t)count * (uint64_t)nbi_dtypes[dtype].bytes;
}
