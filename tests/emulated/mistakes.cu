/* mistakes.cu - kernels with mistakes that the emulator, or a sanitizer, must report.
 * usage: mistakes NAME */
#include <stdio.h>
#include <string.h>

#define THREADS 32

/* Each thread reads what the next one wrote. */
__global__ static void k_right(int *out)
{
    __shared__ int values[THREADS];
    values[threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = values[(threadIdx.x + 1) % THREADS];
}

/* Values come by asynchronous copies, which an mbarrier counts. */
__device__ static void pass_by_mbarrier(int *out, bool waits)
{
    __shared__ uint64_t bar;
    __shared__ int values[THREADS];
    uint32_t at = (uint32_t)__cvta_generic_to_shared(&bar);
    if (threadIdx.x == 0)
        mbarrier_init(at, THREADS);
    __syncthreads();
    out[threadIdx.x] = (int)threadIdx.x;
    cp_async_4((uint32_t)__cvta_generic_to_shared(values + threadIdx.x), out + threadIdx.x);
    cp_async_mbarrier_arrive(at);
    while (waits && !mbarrier_try_wait(at, 0))
        ;
    int right = values[(threadIdx.x + 1) % THREADS];
    __syncthreads();
    out[threadIdx.x] = right;
}

__global__ static void k_mbarrier(int *out)
{
    pass_by_mbarrier(out, true);
}

__global__ static void k_no_wait(int *out)
{
    pass_by_mbarrier(out, threadIdx.x != 1);
}

__global__ static void k_no_barrier(int *out)
{
    __shared__ int values[THREADS];
    values[threadIdx.x] = (int)threadIdx.x;
    out[threadIdx.x] = values[(threadIdx.x + 1) % THREADS];
}

__global__ static void k_static_too_short(int *out)
{
    __shared__ int values[THREADS - 1];
    int *to = values + threadIdx.x;
    *to = (int)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x % (THREADS - 1)];
}

__global__ static void k_dynamic_too_short(int *out)
{
    CU_DYNAMIC_SMEM(bytes, 16);
    int *values = (int *)bytes;
    values[threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x % (THREADS - 1)];
}

/* Half of the threads wait for the others, which have another barrier. */
__global__ static void k_two_barriers(int *out)
{
    out[threadIdx.x] = 0;
    if (threadIdx.x % 2)
        __syncthreads();
    else
        __syncthreads();
}

__global__ static void k_lane_outside_its_mask(int *out)
{
    out[threadIdx.x] = __shfl_sync(0xFFFF, (int)threadIdx.x, 0);
}

static const struct {
    const char *name;
    void (*kernel)(int *out);
    size_t smem;
} mistakes[] = {
    {"none", k_right, 0},
    {"mbarrier", k_mbarrier, 0},
    {"no_wait", k_no_wait, 0},
    {"no_barrier", k_no_barrier, 0},
    {"static", k_static_too_short, 0},
    {"dynamic", k_dynamic_too_short, (THREADS - 1) * sizeof(int)},
    {"barriers", k_two_barriers, 0},
    {"mask", k_lane_outside_its_mask, 0},
};

int main(int argc, char **argv)
{
    int *out;
    if (argc != 2 || cudaMalloc((void **)&out, THREADS * sizeof *out) != cudaSuccess)
        return 2;
    for (const auto &m : mistakes) {
        if (strcmp(m.name, argv[1]) != 0)
            continue;
        CU_LAUNCH(m.kernel, 1, THREADS, m.smem, NULL, out);
        for (int i = 0; i < THREADS; i++)
            printf("%d%c", out[i], i < THREADS - 1 ? ' ' : '\n');
        cudaFree(out);
        return 0;
    }
    return 2;
}
