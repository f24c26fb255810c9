/* memory.cu - device memory by name: every block is in a list, so that reports can say what it is
 * for. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/internal.cuh"

struct allocation {
    struct allocation *next;
    const char *what; /* a literal */
    const void *block;
    int64_t bytes;
};

enum nb_status nbi_cuda_alloc(struct cuda *cuda, const char *what, int64_t bytes,
                              struct nbi_ptr *out)
{
    struct allocation *a = (struct allocation *)malloc(sizeof *a);
    void *p = NULL;
    out->at = 0;
    if (!a)
        return nbi_fail_memory(what, sizeof *a);
    cudaError_t rc = cudaSetDevice(cuda->index);
    if (rc == cudaSuccess)
        rc = cudaMalloc(&p, (size_t)(bytes > 0 ? bytes : 1));
    if (rc != cudaSuccess)
        free(a);
    if (rc == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return nbi_fail(NB_ENOMEM, "the GPU has no %lld MB for %s", (long long)(bytes >> 20), what);
    }
    CU_TRY(rc);
    pthread_mutex_lock(&cuda->allocations_lock);
    *a = {cuda->allocations, what, p, bytes};
    cuda->allocations = a;
    pthread_mutex_unlock(&cuda->allocations_lock);
    out->at = (uintptr_t)p;
    return NB_OK;
}

void nbi_cuda_free(struct cuda *cuda, void *block)
{
    pthread_mutex_lock(&cuda->allocations_lock);
    struct allocation **link = &cuda->allocations;
    while (*link && (*link)->block != block)
        link = &(*link)->next;
    struct allocation *a = *link;
    if (a)
        *link = a->next;
    pthread_mutex_unlock(&cuda->allocations_lock);
    free(a);
    cudaFree(block);
}

/* Adds to the part of that name. Once there are NBI_MEMORY_PARTS, the last one takes the rest. */
static void add_part(struct nbi_memory *m, const char *what, int64_t bytes)
{
    int i = 0;
    while (i < m->count && strcmp(m->parts[i].what, what) != 0)
        i++;
    if (i == NBI_MEMORY_PARTS)
        m->parts[--i].what = "others";
    else if (i == m->count)
        m->parts[m->count++] = {what, 0};
    m->parts[i].bytes += bytes;
}

enum nb_status nbi_cuda_memory(struct nbi_backend *be, struct nbi_memory *out)
{
    struct cuda *cuda = (struct cuda *)be;
    size_t unused = 0, total = 0;
    *out = {};
    CU_TRY(cudaSetDevice(cuda->index));
    CU_TRY(cudaMemGetInfo(&unused, &total));
    out->total = (int64_t)total;
    out->unused = (int64_t)unused;
    pthread_mutex_lock(&cuda->allocations_lock);
    for (const struct allocation *a = cuda->allocations; a; a = a->next) {
        out->allocated += a->bytes;
        add_part(out, a->what, a->bytes);
    }
    pthread_mutex_unlock(&cuda->allocations_lock);
    return NB_OK;
}
