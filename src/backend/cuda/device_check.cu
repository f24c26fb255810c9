/* device_check.cu - whether this build can use that GPU.
 *
 * Driver, runtime and compiled architectures can each be the one that does not fit, so it runs a
 * kernel and looks at the result instead of comparing versions. */
#include "backend/cuda/launch.cuh"

#define CHECK_VALUES 256

__global__ static void k_check_squares(int *out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = i * i;
}

static cudaError_t run_check(int device, int host[CHECK_VALUES])
{
    int *out = nullptr;
    cudaError_t rc = cudaSetDevice(device);
    if (rc == cudaSuccess)
        rc = cudaMalloc(&out, CHECK_VALUES * sizeof *out);
    if (rc == cudaSuccess) {
        cudaGetLastError(); /* clears an error that another device left */
        CU_LAUNCH(k_check_squares, CHECK_VALUES / 64, 64, 0, 0, out);
        rc = cudaGetLastError();
    }
    if (rc == cudaSuccess)
        rc = cudaMemcpy(host, out, CHECK_VALUES * sizeof *out, cudaMemcpyDeviceToHost);
    cudaFree(out);
    return rc;
}

extern "C" const char *nbi_cuda_check(int device)
{
    int host[CHECK_VALUES];
    cudaError_t rc = run_check(device, host);
    if (rc == cudaErrorNoKernelImageForDevice)
        return "this build has no code for its architecture; build with 'make CUDA=1 ARCH=...'";
    if (rc != cudaSuccess)
        return cudaGetErrorString(rc);
    for (int i = 0; i < CHECK_VALUES; i++)
        if (host[i] != i * i)
            return "a test kernel gave wrong results";
    return nullptr;
}
