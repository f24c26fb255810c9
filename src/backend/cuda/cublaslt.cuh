/* cublaslt.cuh - matrix products through cuBLASLt, in bf16 and, from compute capability 10.0 on, in
 * FP4. */
#pragma once

#include "backend/cuda/internal.cuh"

/* ---- cublaslt.cu ---- */

/* Operands in E2M1 instead of bf16, both with K contiguous. K is a multiple of 32, N and ldd of 4.
 */
struct cublaslt_fp4 {
    const void *a_scales, *b_scales; /* of blocks of 16, swizzled (tensor/nvfp4.h) */
    const float *scale, *add;        /* factors of the product and of c, on the device; they replace
                                      * those of cublaslt_gemm */
};

/* d [M, N] = scale A B + c in row-major order, accumulated in f32. A [M, K] is a, or the transpose
 * of a [K, M]; B [K, N] is b, or the transpose of b [N, K]. Numbers of columns and row strides are
 * multiples of 8, addresses of 16 bytes; M need not be, nor K if a is transposed and b is not. */
struct cublaslt_gemm {
    void *d;
    const void *c; /* like d, which it may be; NULL: none */
    const void *a, *b;
    int64_t M, N, K;
    int64_t lda, ldb, ldc, ldd;
    float scale;
    bool a_transposed, b_transposed;
    bool d_bf16;                    /* c and d; else f32 */
    bool training;                  /* choose the algorithm by measuring, reproducibly */
    const struct cublaslt_fp4 *fp4; /* NULL: a and b are bf16 */
};

/* The algorithm measured for products of training of one kind: the number of rows of activations
 * counts as its next power of two. With the same algorithms, library and device, results have the
 * same bits, so checkpoints keep them. */
#define NBI_ALGORITHMS_MAX 256 /* that are kept */

struct cublaslt_algorithm {
    int64_t M, N, K;
    uint32_t kind;    /* types and transposes */
    uint64_t algo[8]; /* cublasLtMatmulAlgo_t */
};

/* Copies up to `limit` of them to `out` and returns how many there are. */
int nbi_cuda_cublaslt_algorithms(struct cuda *cuda, struct cublaslt_algorithm *out, int limit);
/* Uses these instead of measuring, where the library takes them. It must be loaded. */
void nbi_cuda_cublaslt_set_algorithms(struct cuda *cuda, const struct cublaslt_algorithm *in,
                                      int count);
/* Loads the library, and says which version it is; 0: it is not loaded. */
enum nb_status nbi_cuda_cublaslt_load(struct cuda *cuda);
uint64_t nbi_cuda_cublaslt_version(struct cuda *cuda);

/* Loads the library; no-op if it is loaded. A stream for more than NBI_DECODE_LINEAR_ROWS rows does
 * so when it is opened, since loading takes long and may fail. The caller holds cuda->lock. */
enum nb_status nbi_cuda_cublaslt_open(struct cuda *cuda);
void nbi_cuda_cublaslt_close(struct cuda *cuda);
enum nb_status nbi_cuda_cublaslt_gemm(struct nbi_stream *s, const struct cublaslt_gemm *g);

/* ---- tuning.cu ---- */

int64_t nbi_cuda_tuning_save(struct nbi_backend *be, uint8_t out[NBI_TUNING_MAX]);
enum nb_status nbi_cuda_tuning_load(struct nbi_backend *be, const void *bytes, int64_t n,
                                    char why[NBI_TUNING_WHY]);

/* ---- linear_prefill_fp4.cu ---- */

/* First compute capability with FP4 tensor cores. */
#define NBI_FP4_MIN_CC 100

/* NVFP4 values whose sum is x; each has a product of its own (nbi_nvfp4_split_hi_lo). */
#define NBI_FP4_TERMS 2

/* Describes the prefill path in be.prefill_path, before the self-test. */
void nbi_cuda_fp4_init(struct cuda *cuda);

/* On a device with FP4 tensor cores the first stream for more than NBI_DECODE_LINEAR_ROWS rows
 * compares products with the host's and sets NBI_CAP_FP4. A failure is a warning, and prefill goes
 * on in bf16. */
void nbi_cuda_fp4_selftest(struct nbi_stream *s);

/* Whether matrix i is multiplied in FP4. */
bool nbi_cuda_fp4_can_run(const struct nbi_stream *s, const struct nbi_op_linear *a, int i);

/* Bytes of x in s->x_f16. With more than NBI_DECODE_LINEAR_ROWS rows that is less than for
 * bf16. */
int64_t nbi_cuda_fp4_x_bytes(int64_t N, int64_t K);

/* x to s->x_f16. */
enum nb_status nbi_cuda_fp4_quantize_x(struct nbi_stream *s, const struct nbi_op_linear *a);

/* Matrix i with that x, up to row *done. If cuBLASLt refuses, *done is less than all rows: the
 * caller does the rest in bf16, the user is warned, and NBI_CAP_FP4 is lost. */
enum nb_status nbi_cuda_fp4_linear(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                   int64_t *done);
