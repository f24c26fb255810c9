/* cublaslt.cu - matrix products through cuBLASLt. The library is loaded when it is first needed: it
 * is large, and decoding does without. Algorithms are chosen once per shape and kept as plans. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>

#include "backend/cuda/cublaslt.cuh"

/* Toolkits before 12.8 do not declare these, but the library found at run time may know them. */
#if CUDART_VERSION < 12080
#define CUDA_R_4F_E2M1                           ((cudaDataType_t)33)
#define CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 1
#define CUBLASLT_MATMUL_DESC_A_SCALE_MODE        ((cublasLtMatmulDescAttributes_t)31)
#define CUBLASLT_MATMUL_DESC_B_SCALE_MODE        ((cublasLtMatmulDescAttributes_t)32)
#endif

/* Name of the pointer, name of the symbol. */
#define CUBLASLT_LIST(X)                                                                           \
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
    CUBLASLT_LIST(X)
#undef X
};

/* The algorithm for a shape. */
struct plan {
    struct plan *next;
    int64_t N, K, rows, ldy;
    bool add, fp4;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
};

struct cublaslt {
    void *library;
    struct functions f;
    cublasLtHandle_t handle;
    struct plan *plans; /* newest first */
    int count;
};

#define PLANS_MAX 256

static enum nb_status cublaslt_fail(cublasStatus_t rc, const char *what)
{
    return nbi_fail(NB_EDEVICE, "cuBLASLt failed with status %d (%s)", (int)rc, what);
}

#define CUBLASLT_TRY(expr)                                                                         \
    do {                                                                                           \
        cublasStatus_t cublaslt_rc = (expr);                                                       \
        if (cublaslt_rc != CUBLAS_STATUS_SUCCESS)                                                  \
            return cublaslt_fail(cublaslt_rc, #expr);                                              \
    } while (0)

static enum nb_status load_library(struct cublaslt *lt)
{
    static const char *const names[] = {"libcublasLt.so." NB_CUBLAS_MAJOR, "libcublasLt.so"};
    for (int i = 0; i < 2 && !lt->library; i++)
        lt->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!lt->library)
        return nbi_fail(
            NB_EDEVICE,
            "%s of the CUDA toolkit is needed for prompts and was not found; install it "
            "or put its folder into LD_LIBRARY_PATH",
            names[0]);
#define X(name, symbol)                                                                            \
    lt->f.name = (decltype(&symbol))dlsym(lt->library, #symbol);                                   \
    if (!lt->f.name)                                                                               \
        return nbi_fail(NB_EDEVICE, "%s has no %s", names[0], #symbol);
    CUBLASLT_LIST(X)
#undef X
    CUBLASLT_TRY(lt->f.create(&lt->handle));
    return NB_OK;
}

enum nb_status nbi_cuda_cublaslt_open(struct cuda *cuda)
{
    if (cuda->cublaslt)
        return NB_OK;
    cuda->cublaslt = (struct cublaslt *)calloc(1, sizeof *cuda->cublaslt);
    if (!cuda->cublaslt)
        return nbi_fail_memory("cuBLASLt", sizeof *cuda->cublaslt);
    enum nb_status rc = load_library(cuda->cublaslt);
    if (rc != NB_OK)
        nbi_cuda_cublaslt_close(cuda);
    return rc;
}

static void plan_free(struct cublaslt *lt, struct plan *p)
{
    if (p->w)
        lt->f.layout_destroy(p->w);
    if (p->x)
        lt->f.layout_destroy(p->x);
    if (p->y)
        lt->f.layout_destroy(p->y);
    if (p->op)
        lt->f.desc_destroy(p->op);
    free(p);
}

static void free_plans(struct cublaslt *lt)
{
    while (lt->plans) {
        struct plan *p = lt->plans;
        lt->plans = p->next;
        plan_free(lt, p);
    }
    lt->count = 0;
}

void nbi_cuda_cublaslt_close(struct cuda *cuda)
{
    struct cublaslt *lt = cuda->cublaslt;
    if (!lt)
        return;
    free_plans(lt);
    if (lt->handle)
        lt->f.destroy(lt->handle);
    if (lt->library)
        dlclose(lt->library);
    free(lt);
    cuda->cublaslt = NULL;
}

static enum nb_status choose_algorithm(struct cublaslt *lt, struct plan *p)
{
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found;
    size_t workspace = NBI_WORKSPACE_BYTES;
    uint32_t alignment = 64; /* of y; w and x have the 256 bytes that are the default */
    int count = 0;
    CUBLASLT_TRY(lt->f.preference_create(&preference));
    cublasStatus_t rc = lt->f.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &workspace, sizeof workspace);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc = lt->f.preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                  &alignment, sizeof alignment);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc = lt->f.preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                                  &alignment, sizeof alignment);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc = lt->f.heuristic(lt->handle, p->op, p->w, p->x, p->y, p->y, preference, 1, &found,
                             &count);
    lt->f.preference_destroy(preference);
    CUBLASLT_TRY(rc);
    if (count == 0)
        return nbi_fail(NB_EDEVICE, "cuBLASLt has no product of %lld x %lld x %lld",
                        (long long)p->N, (long long)p->rows, (long long)p->K);
    p->algo = found.algo;
    return NB_OK;
}

/* Streams share plans, so these pointers are set before each product. */
static enum nb_status set_scale_pointers(struct cublaslt *lt, cublasLtMatmulDesc_t op,
                                         const struct cublaslt_fp4 *fp4)
{
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &fp4->w_scales,
                                sizeof fp4->w_scales));
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &fp4->x_scales,
                                sizeof fp4->x_scales));
    return NB_OK;
}

/* Blocks of 16 with an E4M3 scale each. The heuristic needs the pointers, too. */
static enum nb_status set_fp4(struct cublaslt *lt, cublasLtMatmulDesc_t op,
                              const struct cublaslt_fp4 *fp4)
{
    int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    int32_t pointers = CUBLASLT_POINTER_MODE_DEVICE;
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode));
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode));
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_POINTER_MODE, &pointers, sizeof pointers));
    return set_scale_pointers(lt, op, fp4);
}

static enum nb_status plan_fill(struct cublaslt *lt, struct plan *p, const struct cublaslt_gemm *g)
{
    cublasOperation_t transpose = CUBLAS_OP_T;
    cudaDataType_t type = g->fp4 ? CUDA_R_4F_E2M1 : CUDA_R_16BF;
    p->N = g->N;
    p->K = g->K;
    p->rows = g->rows;
    p->ldy = g->ldy;
    p->add = g->add;
    p->fp4 = g->fp4 != NULL;
    CUBLASLT_TRY(lt->f.desc_create(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLASLT_TRY(lt->f.desc_set(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose));
    if (g->fp4)
        NBI_TRY(set_fp4(lt, p->op, g->fp4));
    CUBLASLT_TRY(lt->f.layout_create(&p->w, type, (uint64_t)g->K, (uint64_t)g->rows, g->K));
    CUBLASLT_TRY(lt->f.layout_create(&p->x, type, (uint64_t)g->K, (uint64_t)g->N, g->K));
    CUBLASLT_TRY(lt->f.layout_create(&p->y, CUDA_R_32F, (uint64_t)g->rows, (uint64_t)g->N, g->ldy));
    return choose_algorithm(lt, p);
}

/* Finds or makes the plan of a shape. When there are PLANS_MAX, all are dropped. */
static enum nb_status plan_for(struct cublaslt *lt, const struct cublaslt_gemm *g,
                               struct plan **out)
{
    struct plan *p = lt->plans;
    while (p && (p->N != g->N || p->K != g->K || p->rows != g->rows || p->ldy != g->ldy ||
                 p->add != g->add || p->fp4 != (g->fp4 != NULL)))
        p = p->next;
    if (!p) {
        if (lt->count == PLANS_MAX)
            free_plans(lt);
        p = (struct plan *)calloc(1, sizeof *p);
        if (!p)
            return nbi_fail_memory("product", sizeof *p);
        enum nb_status rc = plan_fill(lt, p, g);
        if (rc != NB_OK) {
            plan_free(lt, p);
            return rc;
        }
        p->next = lt->plans;
        lt->plans = p;
        lt->count++;
    }
    *out = p;
    return NB_OK;
}

static enum nb_status run_gemm(struct nbi_stream *s, const struct cublaslt_gemm *g)
{
    const float beta = g->add ? 1.0f : 0.0f;
    const float *factors[2] = {g->fp4 ? g->fp4->scale : &g->scale, g->fp4 ? g->fp4->add : &beta};
    struct plan *p = NULL;
    NBI_TRY(nbi_cuda_cublaslt_open(s->cuda));
    struct cublaslt *lt = s->cuda->cublaslt;
    NBI_TRY(plan_for(lt, g, &p));
    if (g->fp4)
        NBI_TRY(set_scale_pointers(lt, p->op, g->fp4));
    CUBLASLT_TRY(lt->f.matmul(lt->handle, p->op, factors[0], g->w, p->w, g->x, p->x, factors[1],
                              g->y, p->y, g->y, p->y, &p->algo, s->workspace, NBI_WORKSPACE_BYTES,
                              s->queue));
    return NB_OK;
}

enum nb_status nbi_cuda_cublaslt_gemm(struct nbi_stream *s, const struct cublaslt_gemm *g)
{
    pthread_mutex_lock(&s->cuda->lock);
    enum nb_status rc = run_gemm(s, g);
    pthread_mutex_unlock(&s->cuda->lock);
    return rc;
}
