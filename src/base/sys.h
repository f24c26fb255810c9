/* sys.h - CPUs, memory and instruction sets that this process may use. */
#pragma once

#include "base/status.h"

/* CPUs that this process may use by affinity mask and cgroup quota, at least 1. */
int nbi_cpu_count(void);

/* Instruction sets: id, name; each includes the ones before it. */
#define NBI_SIMD_LIST(X)                                                                           \
    X(NBI_SIMD_SCALAR, "scalar")                                                                   \
    X(NBI_SIMD_AVX2, "avx2")                                                                       \
    X(NBI_SIMD_AVX512, "avx512")

enum nbi_simd {
#define X(id, name) id,
    NBI_SIMD_LIST(X)
#undef X
};

/* The widest instruction set that both CPU and operating system support. */
enum nbi_simd nbi_simd_level(void);
const char *nbi_simd_name(enum nbi_simd level);

/* Parses a name; NULL means the widest. Does not check that this machine supports it. */
enum nb_status nbi_simd_parse(const char *name, enum nbi_simd *level);

struct nbi_sys_info {
    char cpu_model[96];
    char features[160]; /* those that nibble uses, space-separated */
    int cpus_online, cpus_usable;
    double cgroup_cpus; /* 0: no quota */
    uint64_t memory_total, memory_available;
    uint64_t cgroup_memory; /* 0: no limit */
    char kernel[96];
};

void nbi_sys_info(struct nbi_sys_info *info);

/* Resident memory of this process in bytes: current and peak. */
uint64_t nbi_current_rss(void);
uint64_t nbi_peak_rss(void);
