/* runtime.cpp - the functions of the CUDA runtime that the backend calls.
 *
 * A stream does its work at once, in the calling thread, so every wait has happened already. While
 * a stream is captured its work is recorded as closures instead, which a graph runs. */
#include "emulator.h"

#include <algorithm>
#include <chrono>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef std::vector<std::function<void()>> work_list;

struct CUstream_st {
    bool capturing = false;
    work_list recorded;
};

struct CUevent_st {
    std::chrono::steady_clock::time_point time;
};

struct CUgraph_st {
    work_list work;
};

struct CUgraphExec_st {
    work_list work;
};

static thread_local cudaError_t last_error;

static cudaError_t result(cudaError_t rc)
{
    if (rc != cudaSuccess)
        last_error = rc;
    return rc;
}

extern "C" cudaError_t cudaGetLastError(void)
{
    cudaError_t rc = last_error;
    last_error = cudaSuccess;
    return rc;
}

extern "C" cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

extern "C" const char *cudaGetErrorString(cudaError_t rc)
{
    switch (rc) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    default:
        return "error of the emulated GPU";
    }
}

/* ---- the device ---- */

extern "C" cudaError_t cudaSetDevice(int device)
{
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

extern "C" cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

extern "C" cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int device)
{
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    switch (what) {
    case cudaDevAttrMultiProcessorCount:
        *value = emulated::SM_COUNT;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = NB_EMULATED_ARCH / 10;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = NB_EMULATED_ARCH % 10;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = emulated::SMEM_MAX;
        return cudaSuccess;
    default:
        return result(cudaErrorInvalidValue);
    }
}

/* NB_EMULATED_GPU is its name, "emulated" without it. */
extern "C" cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    const char *name = getenv("NB_EMULATED_GPU");
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    *out = {};
    snprintf(out->name, sizeof out->name, "%s", name ? name : "emulated");
    return cudaSuccess;
}

/* For tests that count: waits of the host, copies to the host, and copies in either direction for
 * which the host would wait since its memory is not pinned. */
extern "C" int64_t nb_emulated_waits, nb_emulated_downloads, nb_emulated_pageable;
int64_t nb_emulated_waits, nb_emulated_downloads, nb_emulated_pageable;

extern "C" cudaError_t cudaDeviceSynchronize(void)
{
    nb_emulated_waits++;
    return cudaSuccess;
}

/* A driver without the functions that the backend asks it for: the decode megakernel, which needs
 * tensor copies, is not emulated and says that it is not supported. */
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult *got)
{
    *function = nullptr;
    *got = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- device memory ----
 *
 * New memory is filled with 0xFF, so that floats are NaN. Large blocks are copy-on-write views of
 * one page of that, and clearing one maps zero pages: streams have tens of MB of scratch, of which
 * a small test touches little. */

static constexpr size_t LARGE = 1 << 20, VIEW = 2 << 20, DEVICE_BYTES = (size_t)16 << 30;
static std::map<char *, size_t> blocks; /* device memory, by address */
static size_t used_bytes;
static std::mutex memory_lock;

static size_t rounded(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static int filled_file(void)
{
    static int fd = [] {
        std::vector<char> ones(VIEW, (char)0xFF);
        int made = memfd_create("emulated", MFD_CLOEXEC);
        if (made < 0 || write(made, ones.data(), VIEW) != (ssize_t)VIEW)
            emulated::fail("no memory");
        return made;
    }();
    return fd;
}

/* A page after the block stays inaccessible. */
static char *large_block(size_t bytes)
{
    size_t size = rounded(bytes, 4096);
    char *p = (char *)mmap(nullptr, size + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; p != MAP_FAILED && at < size; at += VIEW)
        if (mmap(p + at, std::min(VIEW, size - at), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                 filled_file(), 0) == MAP_FAILED)
            return nullptr;
    return p == MAP_FAILED ? nullptr : p;
}

extern "C" cudaError_t cudaMalloc(void **out, size_t bytes)
{
    void *p = nullptr;
    std::lock_guard<std::mutex> lock(memory_lock);
    *out = nullptr;
    if (bytes > DEVICE_BYTES - used_bytes)
        return result(cudaErrorMemoryAllocation);
    if (bytes >= LARGE)
        p = large_block(bytes);
    else if (posix_memalign(&p, 256, bytes) == 0)
        memset(p, 0xFF, bytes);
    if (!p)
        return result(cudaErrorMemoryAllocation);
    blocks[(char *)p] = bytes;
    used_bytes += bytes;
    *out = p;
    return cudaSuccess;
}

extern "C" cudaError_t cudaFree(void *p)
{
    std::lock_guard<std::mutex> lock(memory_lock);
    auto found = blocks.find((char *)p);
    if (!p)
        return cudaSuccess;
    if (found == blocks.end())
        return result(cudaErrorInvalidValue);
    if (found->second >= LARGE)
        munmap(p, rounded(found->second, 4096) + 4096);
    else
        free(p);
    used_bytes -= found->second;
    blocks.erase(found);
    return cudaSuccess;
}

extern "C" cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    std::lock_guard<std::mutex> lock(memory_lock);
    *total = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES - used_bytes;
    return cudaSuccess;
}

/* Whether all bytes are in one block of device memory. */
static bool on_device(const void *p, size_t bytes)
{
    std::lock_guard<std::mutex> lock(memory_lock);
    auto next = blocks.upper_bound((char *)p);
    if (next == blocks.begin())
        return false;
    --next;
    return (char *)p + bytes <= next->first + next->second;
}

static std::map<const char *, size_t> pinned; /* host memory, by address */

static void set_pinned(const void *p, size_t bytes)
{
    std::lock_guard<std::mutex> lock(memory_lock);
    if (bytes > 0)
        pinned[(const char *)p] = bytes;
    else
        pinned.erase((const char *)p);
}

static bool is_pinned(const void *p)
{
    std::lock_guard<std::mutex> lock(memory_lock);
    auto next = pinned.upper_bound((const char *)p);
    if (next == pinned.begin())
        return false;
    --next;
    return (const char *)p < next->first + next->second;
}

extern "C" cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    if (posix_memalign(out, 4096, bytes) != 0)
        return result(cudaErrorMemoryAllocation);
    set_pinned(*out, bytes);
    return cudaSuccess;
}

/* What cudaMallocHost with a typed pointer calls. */
extern "C" cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned)
{
    return cudaMallocHost(out, bytes);
}

extern "C" cudaError_t cudaFreeHost(void *p)
{
    set_pinned(p, 0);
    free(p);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned)
{
    set_pinned(p, bytes);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostUnregister(void *p)
{
    set_pinned(p, 0);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned)
{
    *device = host;
    return cudaSuccess;
}

/* ---- streams, events, graphs ---- */

/* Does work in the order of the stream: now, or in each launch of the graph being captured. */
static cudaError_t queue(cudaStream_t s, std::function<void()> work)
{
    if (s && s->capturing)
        s->recorded.push_back(std::move(work));
    else
        work();
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    *out = new CUstream_st;
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    delete s;
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    nb_emulated_waits++;
    return result(s && s->capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

extern "C" cudaError_t cudaStreamQuery(cudaStream_t s)
{
    return result(s && s->capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned)
{
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    *out = new CUevent_st;
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    return cudaEventCreate(out);
}

extern "C" cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    return queue(s, [=] { e->time = std::chrono::steady_clock::now(); });
}

extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    nb_emulated_waits++;
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    *ms = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
    if (!s || s->capturing)
        return result(cudaErrorStreamCaptureUnsupported);
    s->capturing = true;
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *out)
{
    *out = s && s->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    *out = new CUgraph_st{std::move(s->recorded)};
    s->recorded.clear();
    s->capturing = false;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                                     unsigned long long)
{
    *out = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}

extern "C" cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    work_list work = exec->work; /* it may be destroyed while it runs */
    return queue(s, [=] {
        for (auto &w : work)
            w();
    });
}

extern "C" cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return cudaSuccess;
}

/* ---- copies ---- */

extern "C" cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                       cudaMemcpyKind kind, cudaStream_t s)
{
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if ((to_device && !on_device(to, bytes)) || (from_device && !on_device(from, bytes)))
        return result(cudaErrorInvalidValue);
    nb_emulated_downloads += from_device && !to_device;
    nb_emulated_pageable += from_device != to_device && !is_pinned(from_device ? to : from);
    return queue(s, [=] { memmove(to, from, bytes); });
}

extern "C" cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

/* Whole pages of a large block become zero pages when they are cleared. */
static void fill(char *p, int value, size_t bytes)
{
    char *first = (char *)rounded((size_t)p, 4096);
    if (value == 0 && bytes >= LARGE) {
        size_t whole = (size_t)(p + bytes - first) / 4096 * 4096;
        memset(p, 0, (size_t)(first - p));
        memset(first + whole, 0, (size_t)(p + bytes - first) - whole);
        if (mmap(first, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                 0) == MAP_FAILED)
            emulated::fail("no memory");
    } else {
        memset(p, value, bytes);
    }
}

extern "C" cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    if (bytes > 0 && !on_device(p, bytes))
        return result(cudaErrorInvalidValue);
    return queue(s, [=] { fill((char *)p, value, bytes); });
}

extern "C" cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
    return cudaMemsetAsync(p, value, bytes, nullptr);
}

/* ---- kernels ---- */

/* Not destroyed: it is read after the destructors of static variables have run. */
static std::set<const void *> &kernels_run = *new std::set<const void *>;
static std::map<const void *, int> smem_allowed;
static std::mutex kernels_lock;

/* With NB_EMULATED_KERNELS, a file, the kernels that ran are appended at the end, as distances from
 * the start of the program; check_kernels.py finds their names. */
extern "C" const char __executable_start;

__attribute__((destructor)) static void write_kernels(void)
{
    const char *path = getenv("NB_EMULATED_KERNELS");
    FILE *f = path && !kernels_run.empty() ? fopen(path, "a") : nullptr;
    char program[4096];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (!f)
        return;
    for (const void *k : kernels_run)
        fprintf(f, "%.*s %zx\n", (int)length, program,
                (size_t)((const char *)k - &__executable_start));
    fclose(f);
}

extern "C" cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute what, int value)
{
    std::lock_guard<std::mutex> lock(kernels_lock);
    if (what != cudaFuncAttributeMaxDynamicSharedMemorySize || value > emulated::SMEM_MAX)
        return result(cudaErrorInvalidValue);
    smem_allowed[kernel] = value;
    return cudaSuccess;
}

extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *)
{
    *out = {};
    out->ptxVersion = out->binaryVersion = NB_EMULATED_ARCH;
    out->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

extern "C" cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *ctas, const void *, int,
                                                                     size_t)
{
    *ctas = 1;
    return cudaSuccess;
}

extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **)
{
    return result(cudaErrorNotSupported); /* it cannot know the types of the arguments */
}

namespace emulated
{

grid grid_of(const cudaLaunchConfig_t &c)
{
    grid g = {c.gridDim, c.blockDim, c.dynamicSmemBytes, 1, false, nullptr, {}, {}};
    for (unsigned i = 0; i < c.numAttrs; i++) {
        if (c.attrs[i].id == cudaLaunchAttributeClusterDimension)
            g.cluster = c.attrs[i].val.clusterDim.x;
        if (c.attrs[i].id == cudaLaunchAttributeCooperative)
            g.cooperative = c.attrs[i].val.cooperative;
    }
    return g;
}

/* Notes that a kernel runs; returns how much dynamic shared memory it may have. */
static size_t note_kernel(const void *kernel)
{
    std::lock_guard<std::mutex> lock(kernels_lock);
    kernels_run.insert(kernel);
    auto found = smem_allowed.find(kernel);
    return (size_t)std::max(SMEM_DEFAULT, found == smem_allowed.end() ? 0 : found->second);
}

cudaError_t launch(const grid &g, cudaStream_t stream)
{
    uint64_t threads = (uint64_t)g.threads.x * g.threads.y * g.threads.z;
    uint64_t ctas = (uint64_t)g.ctas.x * g.ctas.y * g.ctas.z;
    if (threads < 1 || threads > 1024 || ctas < 1 || g.ctas.y > 65535 || g.ctas.z > 65535)
        return result(cudaErrorInvalidConfiguration);
    if (g.smem > note_kernel(g.kernel) || g.cluster > 8 || g.ctas.x % g.cluster != 0 ||
        (g.cluster > 1 && NB_EMULATED_ARCH < 90))
        return result(cudaErrorInvalidValue);
    return queue(stream, [g] { run_grid(g); });
}

/* For work that is no kernel, such as cuBLASLt's. */
void enqueue(cudaStream_t stream, std::function<void()> work)
{
    queue(stream, std::move(work));
}

} // namespace emulated
