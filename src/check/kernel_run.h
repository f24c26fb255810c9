/* kernel_run.h - one operation on one backend: its random inputs, its results, and how those of two
 * runs are compared.
 *
 * An operation runs on the scalar CPU code, which defines it, and on the backend under test. The
 * same function queues both: what it draws and allocates comes from struct nbi_kernel_run, which
 * gives both the same inputs. In a case with activations in bf16 or keys and values in a small type
 * the inputs are values of that type, and the reference computes with the same values in f32. */
#pragma once

#include "backend/backend.h"
#include "nibble/tools.h"
#include "tensor/half.h"

#define NBI_CASE_DIMS   8
#define NBI_RUN_BLOCKS  64
#define NBI_RUN_WEIGHTS 8
#define NBI_RUN_RESULTS 40

struct nbi_kernel_run;

/* An operation with the types and settings that choose its kernels. */
struct nbi_kernel_case {
    const char *operation, *variant;
    enum nb_status (*queue)(struct nbi_kernel_run *r);
    const char *letters; /* of the dimensions, as "N C" */
    const int64_t (*shapes)[NBI_CASE_DIMS];
    int shape_count;
    unsigned caps;        /* that it needs; without, it is left out */
    enum nbi_dtype dtype; /* of weights, or of keys and values */
    enum nbi_matmul matmul;
    bool bf16;     /* activations; else f32 */
    bool training; /* runs on a stream for training */
    bool exact;    /* bits equal those of the reference, which then takes the same types */
    bool add, fresh, strided, invariant;
    bool paged;                 /* pages of a KV cache */
    bool dw_rounded;            /* gradients of weights in bf16 */
    enum nb_weight_store store; /* of NVFP4 weights that are made from masters */
    enum nb_moment_type moment;
    enum nbi_dtype master, grad;
    bool by_norm;     /* results in f32 are measured by NB_KERNEL_NORM */
    double bound;     /* of NB_KERNEL_RELATIVE or _NORM; 0: 1e-5 */
    double fp4_bound; /* the same where FP4 tensor cores compute it; 0: bound */
    double roundings; /* bound of NB_KERNEL_ROUNDING; 0: 2 */
};

/* A result of a run. */
struct nbi_kernel_result {
    const char *name;
    struct nbi_ptr at;
    enum nbi_dtype dtype;   /* NBI_U8: bytes */
    int64_t rows, cols, ld; /* ld 0: contiguous */
    void *host;             /* what was fetched, with what stands between the rows and a guard */
};

struct nbi_kernel_run {
    struct nbi_backend *be;
    struct nbi_stream *s;
    const struct nbi_kernel_case *c;
    const int64_t *shape;
    int64_t elements; /* of the optimizer's tensors; 0: as the case says */
    bool reference;
    uint64_t drawn; /* random numbers */
    struct nbi_ptr blocks[NBI_RUN_BLOCKS];
    struct nbi_weight weights[NBI_RUN_WEIGHTS];
    struct nbi_kernel_result results[NBI_RUN_RESULTS];
    int block_count, weight_count, result_count;
    enum nb_status rc; /* of the first of the functions below that failed */
    /* What `queue` made besides; freed with the run. */
    void *extra;
    void (*extra_free)(void *extra);
};

/* ---- random numbers ---- */

uint32_t nbi_run_bits(struct nbi_kernel_run *r);
/* In (-1, 1). */
float nbi_run_uniform(struct nbi_kernel_run *r);

/* ---- types ---- */

/* Of activations in this run. */
static inline enum nbi_dtype nbi_run_acts(const struct nbi_kernel_run *r)
{
    return r->c->bf16 && (!r->reference || r->c->exact) ? NBI_BF16 : NBI_F32;
}

/* Of what has the case's `dtype` on the backend under test. */
static inline enum nbi_dtype nbi_run_dtype(const struct nbi_kernel_run *r)
{
    return r->reference && !r->c->exact ? NBI_F32 : r->c->dtype;
}

/* Stores or loads element i of an array of f32, bf16, f16 or E4M3. */
void nbi_run_store(void *array, enum nbi_dtype dtype, int64_t i, float x);
float nbi_run_load(const void *array, enum nbi_dtype dtype, int64_t i);

/* ---- memory ---- */

/* A copy of bytes. As all that follow it returns none after a failure, which r->rc then has. */
struct nbi_ptr nbi_run_bytes(struct nbi_kernel_run *r, const void *bytes, int64_t n);
struct nbi_ptr nbi_run_ints(struct nbi_kernel_run *r, const int32_t *x, int64_t n);
struct nbi_ptr nbi_run_zeros(struct nbi_kernel_run *r, int64_t bytes);
/* Random values of up to `scale` in f32. */
struct nbi_ptr nbi_run_floats(struct nbi_kernel_run *r, int64_t n, float scale);
/* The same for rows of activations, `ld` apart (0: contiguous). */
struct nbi_ptr nbi_run_rows(struct nbi_kernel_run *r, int64_t rows, int64_t cols, int64_t ld,
                            float scale);
/* The same as values of `dtype`, stored in nbi_run_dtype(r). */
struct nbi_ptr nbi_run_values(struct nbi_kernel_run *r, int64_t n, float scale);

/* A random weight; cols 0: a vector of about 1. Products with it keep magnitudes. */
struct nbi_weight nbi_run_weight(struct nbi_kernel_run *r, enum nbi_dtype dtype, int64_t rows,
                                 int64_t cols);
/* One to fill, as weight_alloc makes it for the case's `store`. The type of the master: the case's.
 */
struct nbi_weight nbi_run_weight_alloc(struct nbi_kernel_run *r, enum nbi_dtype dtype, int64_t rows,
                                       int64_t cols);

/* ---- results ---- */

/* Declares memory that was put above, and that the operation changes, as a result. */
void nbi_run_result(struct nbi_kernel_run *r, const char *name, struct nbi_ptr at,
                    enum nbi_dtype dtype, int64_t rows, int64_t cols, int64_t ld);
/* Rows of activations, f32 or bytes for the operation to write, filled with NaN. */
struct nbi_ptr nbi_run_out_rows(struct nbi_kernel_run *r, const char *name, int64_t rows,
                                int64_t cols, int64_t ld);
struct nbi_ptr nbi_run_out_floats(struct nbi_kernel_run *r, const char *name, int64_t n);
struct nbi_ptr nbi_run_out_bytes(struct nbi_kernel_run *r, const char *name, int64_t n);
/* Bytes on the host that are a result too; the run frees them. */
void nbi_run_host_result(struct nbi_kernel_run *r, const char *name, void *bytes, int64_t n);

/* ---- runs ---- */

/* Queues the case and fetches the results. The run is ended by nbi_run_end() in any case. */
enum nb_status nbi_run_case(struct nbi_kernel_run *r);
void nbi_run_end(struct nbi_kernel_run *r);

/* What two runs differ by: of all results, the one nearest to its bound, or farthest beyond. */
struct nbi_difference {
    const char *result;
    enum nb_kernel_measure measure;
    double error, bound;
};

void nbi_run_compare(const struct nbi_kernel_run *is, const struct nbi_kernel_run *want,
                     struct nbi_difference *worst);
/* Whether two runs on the same backend left the same bits. */
bool nbi_run_same_bits(const struct nbi_kernel_run *a, const struct nbi_kernel_run *b);
