/* cuda_host.h - makes a .cu file C++ for the host. The build includes it before each of them.
 *
 * Types, conversions and prototypes are those of the CUDA headers. Here is what nvcc adds: the
 * variables that tell a thread its position, __shared__, barriers, warp functions, atomics,
 * intrinsics, launches. NB_EMULATED_UNIT, the name of the file, names the section of its static
 * shared variables. */
#pragma once

#define NB_EMULATED 1

#include "emulator.h"
#include "system_headers.h"

/* ---- the language ---- */

#if NB_EMULATED_ARCH >= 90
#define __CUDA_ARCH__             900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#else
#define __CUDA_ARCH__ (10 * NB_EMULATED_ARCH)
#endif

#undef __maxnreg__
#undef __launch_bounds__
#define __maxnreg__(n)
#define __launch_bounds__(...)

/* ASan protects the ends of variables only if they are in no section of their own. */
#undef __shared__
#ifdef NB_EMULATED_ASAN
#define __shared__ static
#define NB_SHARED_RANGE                                                                            \
    {                                                                                              \
    }
#else
#define NB_JOIN_(a, b)  a##b
#define NB_JOIN(a, b)   NB_JOIN_(a, b)
#define NB_STRING_(a)   #a
#define NB_STRING(a)    NB_STRING_(a)
#define NB_SHARED       NB_JOIN(nb_shared_, NB_EMULATED_UNIT)
#define __shared__      static __attribute__((section(NB_STRING(NB_SHARED))))
#define NB_SHARED_BEGIN NB_JOIN(__start_, NB_SHARED)
#define NB_SHARED_END   NB_JOIN(__stop_, NB_SHARED)
extern "C" char NB_SHARED_BEGIN[] __attribute__((weak)), NB_SHARED_END[] __attribute__((weak));
#define NB_SHARED_RANGE                                                                            \
    {                                                                                              \
        NB_SHARED_BEGIN, NB_SHARED_END                                                             \
    }
#endif

#define CU_DYNAMIC_SMEM(name, alignment)                                                           \
    static uint8_t *const name __attribute__((unused)) = (uint8_t *)emulated::dynamic_smem

/* ---- launches ---- */

namespace emulated
{
cudaError_t launch(const grid &g, cudaStream_t stream); /* runtime.cpp */
grid grid_of(const cudaLaunchConfig_t &c);
} // namespace emulated

template <typename... P> static std::function<void()> nb_thread(void (*kernel)(P...), P... args)
{
    return [=] { kernel(args...); };
}

template <typename... P, typename... A>
static cudaError_t nb_launch(emulated::grid g, cudaStream_t stream, void (*kernel)(P...), A... args)
{
    g.kernel = (const void *)kernel;
    g.statics = NB_SHARED_RANGE;
    g.thread = nb_thread<P...>(kernel, P(args)...);
    return emulated::launch(g, stream);
}

#define CU_LAUNCH(kernel, grid, block, smem, stream, ...)                                          \
    (void)nb_launch({grid, block, (size_t)(smem), 1, false, nullptr, {}, {}}, stream, kernel,      \
                    __VA_ARGS__)

template <typename... P, typename... A>
static cudaError_t nb_launch_config(const cudaLaunchConfig_t *c, void (*kernel)(P...), A... args)
{
    return nb_launch(emulated::grid_of(*c), c->stream, kernel, args...);
}

#define cudaLaunchKernelEx nb_launch_config

template <typename... P>
static cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute what, int value)
{
    return cudaFuncSetAttribute((const void *)kernel, what, value);
}

template <typename... P>
static cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, void (*kernel)(P...))
{
    return cudaFuncGetAttributes(out, (const void *)kernel);
}

/* cuBLASLt is loaded by dlopen; here it is cublaslt.cpp. */
namespace emulated
{
void *open_library(const char *name, int mode);
void *find_symbol(void *library, const char *name);
int close_library(void *library);
} // namespace emulated
#define dlopen  emulated::open_library
#define dlsym   emulated::find_symbol
#define dlclose emulated::close_library

/* ---- barriers and warps ---- */

#define NB_FILE_LINE   const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NB_PLACE(what) (emulated::place{what, file, line})

static inline void __syncthreads(NB_FILE_LINE)
{
    emulated::cta_barrier(false, NB_PLACE("__syncthreads"));
}

static inline int __syncthreads_count(bool v, NB_FILE_LINE)
{
    return emulated::cta_barrier(v, NB_PLACE("__syncthreads_count"));
}

static inline bool __syncthreads_or(bool v, NB_FILE_LINE)
{
    return emulated::cta_barrier(v, NB_PLACE("__syncthreads_or")) > 0;
}

static inline bool __syncthreads_and(bool v, NB_FILE_LINE)
{
    return emulated::cta_barrier(!v, NB_PLACE("__syncthreads_and")) == 0;
}

static inline void __syncwarp(uint32_t mask = 0xFFFFFFFF, NB_FILE_LINE)
{
    emulated::meet(
        mask, nullptr, [](void *const *, uint32_t) {}, NB_PLACE("__syncwarp"));
}

/* What a lane brings to a shuffle and takes from it. */
template <typename T> struct nb_shuffle {
    T value, result;
    int from; /* lane */
};

template <typename T> static T nb_shuffle_from(uint32_t mask, T value, int from, emulated::place at)
{
    nb_shuffle<T> mine = {value, value, from};
    emulated::meet(
        mask, &mine,
        [](void *const *lanes, uint32_t arrived) {
            for (int i = 0; i < 32; i++) {
                if (!(arrived >> i & 1))
                    continue;
                nb_shuffle<T> *to = (nb_shuffle<T> *)lanes[i];
                if (arrived >> to->from & 1)
                    to->result = ((nb_shuffle<T> *)lanes[to->from])->value;
                else /* undefined */
                    memset((void *)&to->result, 0xFF, sizeof(T));
            }
        },
        at);
    return mine.result;
}

template <typename T>
static T __shfl_sync(uint32_t mask, T v, int from, int width = 32, NB_FILE_LINE)
{
    int lane = emulated::lane_index();
    return nb_shuffle_from(mask, v, (lane & -width) + (from & (width - 1)),
                           NB_PLACE("__shfl_sync"));
}

template <typename T>
static T __shfl_xor_sync(uint32_t mask, T v, int by, int width = 32, NB_FILE_LINE)
{
    int lane = emulated::lane_index(), from = lane ^ by;
    return nb_shuffle_from(mask, v, from < (lane & -width) + width ? from : lane,
                           NB_PLACE("__shfl_xor_sync"));
}

template <typename T>
static T __shfl_up_sync(uint32_t mask, T v, unsigned by, int width = 32, NB_FILE_LINE)
{
    int lane = emulated::lane_index(), from = lane - (int)by;
    return nb_shuffle_from(mask, v, from >= (lane & -width) ? from : lane,
                           NB_PLACE("__shfl_up_sync"));
}

template <typename T>
static T __shfl_down_sync(uint32_t mask, T v, unsigned by, int width = 32, NB_FILE_LINE)
{
    int lane = emulated::lane_index(), from = lane + (int)by;
    return nb_shuffle_from(mask, v, from < (lane & -width) + width ? from : lane,
                           NB_PLACE("__shfl_down_sync"));
}

/* A result of all lanes that is the same for all of them. */
template <typename T, T (*JOIN)(T, T)>
static T nb_reduce(uint32_t mask, T value, emulated::place at)
{
    T mine = value;
    emulated::meet(
        mask, &mine,
        [](void *const *lanes, uint32_t arrived) {
            T all = *(T *)lanes[__builtin_ctz(arrived)];
            for (uint32_t left = arrived & (arrived - 1); left; left &= left - 1)
                all = JOIN(all, *(T *)lanes[__builtin_ctz(left)]);
            for (uint32_t left = arrived; left; left &= left - 1)
                *(T *)lanes[__builtin_ctz(left)] = all;
        },
        at);
    return mine;
}

template <typename T> static inline T nb_or(T a, T b)
{
    return a | b;
}

template <typename T> static inline T nb_and(T a, T b)
{
    return a & b;
}

template <typename T> static inline T nb_add(T a, T b)
{
    return a + b;
}

template <typename T> static inline T nb_max(T a, T b)
{
    return a > b ? a : b;
}

template <typename T> static inline T nb_min(T a, T b)
{
    return a < b ? a : b;
}

static inline uint32_t __ballot_sync(uint32_t mask, bool v, NB_FILE_LINE)
{
    uint32_t bit = v ? 1u << emulated::lane_index() : 0;
    return nb_reduce<uint32_t, nb_or<uint32_t>>(mask, bit, NB_PLACE("__ballot_sync"));
}

static inline bool __any_sync(uint32_t mask, bool v, NB_FILE_LINE)
{
    return nb_reduce<uint32_t, nb_or<uint32_t>>(mask, v, NB_PLACE("__any_sync"));
}

static inline bool __all_sync(uint32_t mask, bool v, NB_FILE_LINE)
{
    return nb_reduce<uint32_t, nb_and<uint32_t>>(mask, v, NB_PLACE("__all_sync"));
}

template <typename T> static inline T __reduce_add_sync(uint32_t mask, T v, NB_FILE_LINE)
{
    return nb_reduce<T, nb_add<T>>(mask, v, NB_PLACE("__reduce_add_sync"));
}

template <typename T> static inline T __reduce_max_sync(uint32_t mask, T v, NB_FILE_LINE)
{
    return nb_reduce<T, nb_max<T>>(mask, v, NB_PLACE("__reduce_max_sync"));
}

template <typename T> static inline T __reduce_min_sync(uint32_t mask, T v, NB_FILE_LINE)
{
    return nb_reduce<T, nb_min<T>>(mask, v, NB_PLACE("__reduce_min_sync"));
}

#include "intrinsics_host.h"
#include "mma_host.h"
#include "ptx_host.h"
