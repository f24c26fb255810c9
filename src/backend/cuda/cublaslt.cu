/* cublaslt.cu - products of matrices of bf16, or of NVFP4 where the device has tensor cores for it,
 * by cuBLASLt, which is loaded when it is first needed: it is large, and decoding does without. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>

#include "backend/cuda/cublaslt.cuh"

/* Headers of older toolkits lack these; the library that is found may have them. */
#if CUDART_VERSION < 12080
#define CUDA_R_4F_E2M1                           ((cudaDataType_t)33)
#define CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 1
#define CUBLASLT_MATMUL_DESC_A_SCALE_MODE        ((cublasLtMatmulDescAttributes_t)31)
#define CUBLASLT_MATMUL_DESC_B_SCALE_MODE        ((cublasLtMatmulDescAttributes_t)32)
#endif

/* name here, name there */
#define LT_LIST(X)                                                                                 \
    X(create, cublasLtCreate)                                                                      \
    X(destroy, cublasLtDestroy)                                                                    \
    X(matmul, cublasLtMatmul)                                                                      \
    X(heuristic, cublasLtMatmulAlgoGetHeuristic)                                                   \
    X(desc_create, cublasLtMatmulDescCreate)                                                       \
    X(desc_destroy, cublasLtMatmulDescDestroy)                                                     \
    X(desc_set, cublasLtMatmulDescSetAttribute)                                                    \
    X(layout_create, cublasLtMatrixLayoutCreate)                                                   \
    X(layout_destroy, cublasLtMatrixLayoutDestroy)                                                 \
    X(preference_create, cublasLtMatmulPreferenceCreate)                                           \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy)                                         \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute)

struct functions {
#define X(name, symbol) decltype(&symbol) name;
    LT_LIST(X)
#undef X
};

/* What cuBLASLt chose for a shape. */
struct plan {
    struct plan *next;
    int64_t N, K, rows, ldy;
    bool add, fp4;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
};

struct blas {
    void *library;
    struct functions f;
    cublasLtHandle_t handle;
    struct plan *plans; /* the latest first */
    int count;
};

#define PLANS_MAX 256

static enum nb_status blas_fail(cublasStatus_t rc, const char *what)
{
    return nbi_fail(NB_EDEVICE, "cuBLASLt failed with status %d (%s)", (int)rc, what);
}

#define LT_TRY(expr)                                                                               \
    do {                                                                                           \
        cublasStatus_t lt_try_rc = (expr);                                                         \
        if (lt_try_rc != CUBLAS_STATUS_SUCCESS)                                                    \
            return blas_fail(lt_try_rc, #expr);                                                    \
    } while (0)

static enum nb_status find_functions(struct blas *b)
{
    static const char *const names[] = {"libcublasLt.so." NB_CUBLAS_MAJOR, "libcublasLt.so"};
    for (int i = 0; i < 2 && !b->library; i++)
        b->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!b->library)
        return nbi_fail(
            NB_EDEVICE,
            "%s of the CUDA toolkit is needed for prompts and was not found; install it "
            "or put its folder into LD_LIBRARY_PATH",
            names[0]);
#define X(name, symbol)                                                                            \
    b->f.name = (decltype(&symbol))dlsym(b->library, #symbol);                                     \
    if (!b->f.name)                                                                                \
        return nbi_fail(NB_EDEVICE, "%s has no %s", names[0], #symbol);
    LT_LIST(X)
#undef X
    LT_TRY(b->f.create(&b->handle));
    return NB_OK;
}

enum nb_status nbi_cuda_blas_open(struct cuda *cuda)
{
    if (cuda->blas)
        return NB_OK;
    cuda->blas = (struct blas *)calloc(1, sizeof *cuda->blas);
    if (!cuda->blas)
        return nbi_fail_memory("cuBLASLt", sizeof *cuda->blas);
    enum nb_status rc = find_functions(cuda->blas);
    if (rc != NB_OK)
        nbi_cuda_blas_close(cuda);
    return rc;
}

static void plan_free(struct blas *b, struct plan *p)
{
    if (p->w)
        b->f.layout_destroy(p->w);
    if (p->x)
        b->f.layout_destroy(p->x);
    if (p->y)
        b->f.layout_destroy(p->y);
    if (p->op)
        b->f.desc_destroy(p->op);
    free(p);
}

static void forget_plans(struct blas *b)
{
    while (b->plans) {
        struct plan *p = b->plans;
        b->plans = p->next;
        plan_free(b, p);
    }
    b->count = 0;
}

void nbi_cuda_blas_close(struct cuda *cuda)
{
    struct blas *b = cuda->blas;
    if (!b)
        return;
    forget_plans(b);
    if (b->handle)
        b->f.destroy(b->handle);
    if (b->library)
        dlclose(b->library);
    free(b);
    cuda->blas = NULL;
}

static enum nb_status choose(struct blas *b, struct plan *p)
{
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found;
    size_t most = NBI_WORKSPACE_BYTES;
    uint32_t alignment = 64; /* of y; w and x have the 256 that are expected */
    int count = 0;
    LT_TRY(b->f.preference_create(&preference));
    cublasStatus_t rc = b->f.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                            &most, sizeof most);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc = b->f.preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment,
                                 sizeof alignment);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc = b->f.preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment,
                                 sizeof alignment);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc =
            b->f.heuristic(b->handle, p->op, p->w, p->x, p->y, p->y, preference, 1, &found, &count);
    b->f.preference_destroy(preference);
    LT_TRY(rc);
    if (count == 0)
        return nbi_fail(NB_EDEVICE, "cuBLASLt has no product of %lld x %lld x %lld",
                        (long long)p->N, (long long)p->rows, (long long)p->K);
    p->algo = found.algo;
    return NB_OK;
}

/* Where the scales of blocks are: a matter of the call, since streams share plans. */
static enum nb_status set_scales(struct blas *b, cublasLtMatmulDesc_t op,
                                 const struct nbi_gemm_four *fp4)
{
    LT_TRY(b->f.desc_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &fp4->w_scales,
                         sizeof fp4->w_scales));
    LT_TRY(b->f.desc_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &fp4->x_scales,
                         sizeof fp4->x_scales));
    return NB_OK;
}

/* Blocks of 16 with a scale each. Which algorithms there are is asked with the pointers set. */
static enum nb_status set_four(struct blas *b, cublasLtMatmulDesc_t op,
                               const struct nbi_gemm_four *fp4)
{
    int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    int32_t pointers = CUBLASLT_POINTER_MODE_DEVICE;
    LT_TRY(b->f.desc_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode));
    LT_TRY(b->f.desc_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode));
    LT_TRY(b->f.desc_set(op, CUBLASLT_MATMUL_DESC_POINTER_MODE, &pointers, sizeof pointers));
    return set_scales(b, op, fp4);
}

static enum nb_status plan_fill(struct blas *b, struct plan *p, const struct nbi_gemm *g)
{
    cublasOperation_t transpose = CUBLAS_OP_T;
    cudaDataType_t type = g->fp4 ? CUDA_R_4F_E2M1 : CUDA_R_16BF;
    p->N = g->N;
    p->K = g->K;
    p->rows = g->rows;
    p->ldy = g->ldy;
    p->add = g->add;
    p->fp4 = g->fp4 != NULL;
    LT_TRY(b->f.desc_create(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_TRY(b->f.desc_set(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose));
    if (g->fp4)
        NBI_TRY(set_four(b, p->op, g->fp4));
    LT_TRY(b->f.layout_create(&p->w, type, (uint64_t)g->K, (uint64_t)g->rows, g->K));
    LT_TRY(b->f.layout_create(&p->x, type, (uint64_t)g->K, (uint64_t)g->N, g->K));
    LT_TRY(b->f.layout_create(&p->y, CUDA_R_32F, (uint64_t)g->rows, (uint64_t)g->N, g->ldy));
    return choose(b, p);
}

/* Made once for each shape. */
static enum nb_status plan_for(struct blas *b, const struct nbi_gemm *g, struct plan **out)
{
    struct plan *p = b->plans;
    while (p && (p->N != g->N || p->K != g->K || p->rows != g->rows || p->ldy != g->ldy ||
                 p->add != g->add || p->fp4 != (g->fp4 != NULL)))
        p = p->next;
    if (!p) {
        if (b->count == PLANS_MAX)
            forget_plans(b);
        p = (struct plan *)calloc(1, sizeof *p);
        if (!p)
            return nbi_fail_memory("product", sizeof *p);
        enum nb_status rc = plan_fill(b, p, g);
        if (rc != NB_OK) {
            plan_free(b, p);
            return rc;
        }
        p->next = b->plans;
        b->plans = p;
        b->count++;
    }
    *out = p;
    return NB_OK;
}

static enum nb_status run_gemm(struct nbi_stream *s, const struct nbi_gemm *g)
{
    const float beta = g->add ? 1.0f : 0.0f;
    const float *by[2] = {g->fp4 ? g->fp4->scale : &g->scale, g->fp4 ? g->fp4->add : &beta};
    struct plan *p = NULL;
    NBI_TRY(nbi_cuda_blas_open(s->cuda));
    struct blas *b = s->cuda->blas;
    NBI_TRY(plan_for(b, g, &p));
    if (g->fp4)
        NBI_TRY(set_scales(b, p->op, g->fp4));
    LT_TRY(b->f.matmul(b->handle, p->op, by[0], g->w, p->w, g->x, p->x, by[1], g->y, p->y, g->y,
                       p->y, &p->algo, s->workspace, NBI_WORKSPACE_BYTES, s->queue));
    return NB_OK;
}

enum nb_status nbi_cuda_gemm(struct nbi_stream *s, const struct nbi_gemm *g)
{
    pthread_mutex_lock(&s->cuda->lock);
    enum nb_status rc = run_gemm(s, g);
    pthread_mutex_unlock(&s->cuda->lock);
    return rc;
}
