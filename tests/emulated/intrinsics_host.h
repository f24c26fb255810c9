/* intrinsics_host.h - part of cuda_host.h: atomics and arithmetic. */
#pragma once

/* ---- atomics ----
 *
 * One thread runs at a time. The accesses are atomic for ThreadSanitizer, and relaxed as theirs. */

#define NB_ATOMIC(name, new_value)                                                                 \
    template <typename T> static inline T name(T *at, typename std::common_type<T>::type v)        \
    {                                                                                              \
        T old, next;                                                                               \
        __atomic_load(at, &old, __ATOMIC_RELAXED);                                                 \
        next = new_value;                                                                          \
        __atomic_store(at, &next, __ATOMIC_RELAXED);                                               \
        emulated::progress();                                                                      \
        return old;                                                                                \
    }
NB_ATOMIC(atomicAdd, (T)(old + v))
NB_ATOMIC(atomicSub, (T)(old - v))
NB_ATOMIC(atomicMax, v > old ? v : old)
NB_ATOMIC(atomicMin, v < old ? v : old)
NB_ATOMIC(atomicOr, old | v)
NB_ATOMIC(atomicAnd, old &v)
NB_ATOMIC(atomicXor, old ^ v)
NB_ATOMIC(atomicExch, v)
#undef NB_ATOMIC

template <typename T>
static inline T atomicCAS(T *at, typename std::common_type<T>::type expected,
                          typename std::common_type<T>::type v)
{
    T old, next = v;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    if (old == expected)
        __atomic_store(at, &next, __ATOMIC_RELAXED);
    emulated::progress();
    return old;
}

static inline void __threadfence(void)
{
}

static inline void __threadfence_block(void)
{
}

static inline void __threadfence_system(void)
{
}

static inline void __nanosleep(unsigned, const char *file = __builtin_FILE(),
                               int line = __builtin_LINE())
{
    emulated::poll({"__nanosleep", file, line});
}

[[noreturn]] static inline void __trap(const char *file = __builtin_FILE(),
                                       int line = __builtin_LINE())
{
    emulated::fail("__trap at %s:%d", file, line);
}

/* ---- loads ---- */

#define NB_LOAD(name)                                                                              \
    template <typename T> static inline T name(const T *p)                                         \
    {                                                                                              \
        return *p;                                                                                 \
    }
NB_LOAD(__ldg)
NB_LOAD(__ldcg)
NB_LOAD(__ldcs)
NB_LOAD(__ldca)
NB_LOAD(__ldcv)
#undef NB_LOAD

#define NB_STORE(name)                                                                             \
    template <typename T> static inline void name(T *p, T v)                                       \
    {                                                                                              \
        *p = v;                                                                                    \
    }
NB_STORE(__stcg)
NB_STORE(__stcs)
NB_STORE(__stwt)
#undef NB_STORE

static inline size_t __cvta_generic_to_shared(const void *p)
{
    return emulated::shared_address(p);
}

/* ---- arithmetic ---- */

template <typename A, typename B>
static inline constexpr typename std::common_type<A, B>::type min(A a, B b)
{
    typedef typename std::common_type<A, B>::type T;
    return (T)b < (T)a ? (T)b : (T)a;
}

template <typename A, typename B>
static inline constexpr typename std::common_type<A, B>::type max(A a, B b)
{
    typedef typename std::common_type<A, B>::type T;
    return (T)a < (T)b ? (T)b : (T)a;
}

template <typename TO, typename FROM> static inline TO nb_bits(FROM from)
{
    static_assert(sizeof(TO) == sizeof(FROM), "the same size");
    TO to;
    memcpy(&to, &from, sizeof to);
    return to;
}

#define NB_FUNCTION(type, name, parameters, result)                                                \
    static inline type name parameters                                                             \
    {                                                                                              \
        return result;                                                                             \
    }
NB_FUNCTION(uint32_t, __float_as_uint, (float x), nb_bits<uint32_t>(x))
NB_FUNCTION(int, __float_as_int, (float x), nb_bits<int>(x))
NB_FUNCTION(float, __uint_as_float, (uint32_t x), nb_bits<float>(x))
NB_FUNCTION(float, __int_as_float, (int x), nb_bits<float>(x))
NB_FUNCTION(long long, __double_as_longlong, (double x), nb_bits<long long>(x))
NB_FUNCTION(double, __longlong_as_double, (long long x), nb_bits<double>(x))
NB_FUNCTION(float, __fadd_rn, (float a, float b), a + b)
NB_FUNCTION(float, __fsub_rn, (float a, float b), a - b)
NB_FUNCTION(float, __fmul_rn, (float a, float b), a *b)
NB_FUNCTION(float, __fdiv_rn, (float a, float b), a / b)
NB_FUNCTION(float, __frcp_rn, (float a), 1 / a)
NB_FUNCTION(float, __fsqrt_rn, (float a), sqrtf(a))
NB_FUNCTION(float, __frsqrt_rn, (float a), (float)(1 / sqrt((double)a)))
NB_FUNCTION(float, __fmaf_rn, (float a, float b, float c), fmaf(a, b, c))
NB_FUNCTION(double, __dadd_rn, (double a, double b), a + b)
NB_FUNCTION(double, __dmul_rn, (double a, double b), a *b)
NB_FUNCTION(double, __fma_rn, (double a, double b, double c), fma(a, b, c))
NB_FUNCTION(float, __fdividef, (float a, float b), a / b)
NB_FUNCTION(float, rsqrtf, (float x), (float)(1 / sqrt((double)x)))
NB_FUNCTION(float, __double2float_rn, (double x), (float)x)
NB_FUNCTION(float, __int2float_rn, (int x), (float)x)
NB_FUNCTION(float, __uint2float_rn, (uint32_t x), (float)x)
NB_FUNCTION(int, __float2int_rn, (float x), (int)lrintf(x))
NB_FUNCTION(uint32_t, __float2uint_rn, (float x), (uint32_t)llrintf(x))
NB_FUNCTION(long long, __float2ll_rn, (float x), llrintf(x))
NB_FUNCTION(int, __popc, (uint32_t x), __builtin_popcount(x))
NB_FUNCTION(int, __popcll, (uint64_t x), __builtin_popcountll(x))
NB_FUNCTION(int, __clz, (uint32_t x), x ? __builtin_clz(x) : 32)
NB_FUNCTION(int, __clzll, (uint64_t x), x ? __builtin_clzll(x) : 64)
NB_FUNCTION(int, __ffs, (uint32_t x), __builtin_ffs((int)x))
NB_FUNCTION(int, __ffsll, (uint64_t x), __builtin_ffsll((long long)x))
NB_FUNCTION(uint32_t, __umulhi, (uint32_t a, uint32_t b), (uint32_t)((uint64_t)a *b >> 32))
NB_FUNCTION(uint64_t, __umul64hi, (uint64_t a, uint64_t b),
            (uint64_t)((unsigned __int128)a *b >> 64))
#undef NB_FUNCTION

/* glibc declares functions of these names. */
#define __expf  expf
#define __logf  logf
#define __log2f log2f

/* Bytes of x (0 to 3) and y (4 to 7), one for each hexadecimal digit of the selector. */
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector)
{
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t digit = selector >> 4 * i, byte = (uint32_t)(both >> 8 * (digit & 7)) & 0xFF;
        if (digit & 8)
            byte = byte & 0x80 ? 0xFF : 0;
        out |= byte << 8 * i;
    }
    return out;
}
