/* sys.c - CPU, memory and cgroup facts from /proc and /sys. What cannot be read counts as absent.
 */
#include "base/sys.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sched.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/str.h"

/* First line of a small file; false if it cannot be read. */
static bool read_line(const char *path, char *buf, size_t size)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool ok = fgets(buf, (int)size, f) != NULL;
    fclose(f);
    if (ok)
        buf[strcspn(buf, "\n")] = 0;
    return ok;
}

/* The value of "KEY ... : VALUE" in a file of such lines. */
static bool read_field(const char *path, const char *key, char *buf, size_t size)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    char line[512];
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (!nbi_starts_with(line, key) || !colon)
            continue;
        colon += 1 + strspn(colon + 1, " \t");
        colon[strcspn(colon, "\n")] = 0;
        snprintf(buf, size, "%s", colon);
        found = true;
    }
    fclose(f);
    return found;
}

/* Calls fn with the path of a control file in this process's cgroup (version 2) and in each of its
 * ancestors; the limits of all of them apply. */
static void for_each_cgroup(const char *file, void (*fn)(const char *path, double *limit),
                            double *limit)
{
    char group[512] = "", path[640];
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[512];
    while (f && fgets(line, sizeof line, f))
        if (nbi_starts_with(line, "0::")) {
            line[strcspn(line, "\n")] = 0;
            snprintf(group, sizeof group, "%s", line + 3);
        }
    if (f)
        fclose(f);
    for (;;) {
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/%s", group, file);
        fn(path, limit);
        char *slash = strrchr(group, '/');
        if (!slash)
            break;
        *slash = 0;
    }
}

static void lower_limit(double *limit, double v)
{
    if (v > 0 && (*limit == 0 || v < *limit))
        *limit = v;
}

/* "MAX PERIOD" in microseconds, or "max PERIOD". */
static void read_cpu_max(const char *path, double *limit)
{
    char line[128];
    double quota = 0, period = 0;
    if (read_line(path, line, sizeof line) && sscanf(line, "%lf %lf", &quota, &period) == 2 &&
        period > 0)
        lower_limit(limit, quota / period);
}

static void read_memory_max(const char *path, double *limit)
{
    char line[128];
    double bytes = 0;
    if (read_line(path, line, sizeof line) && sscanf(line, "%lf", &bytes) == 1 && bytes < 0x1p60)
        lower_limit(limit, bytes); /* version 1 writes a huge number for "none" */
}

static double cgroup_cpus(void)
{
    double limit = 0, quota = 0, period = 0;
    char line[128];
    for_each_cgroup("cpu.max", read_cpu_max, &limit);
    if (read_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", line, sizeof line) &&
        sscanf(line, "%lf", &quota) == 1 && quota > 0 &&
        read_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us", line, sizeof line) &&
        sscanf(line, "%lf", &period) == 1 && period > 0)
        lower_limit(&limit, quota / period);
    return limit;
}

static uint64_t cgroup_memory(void)
{
    double limit = 0;
    for_each_cgroup("memory.max", read_memory_max, &limit);
    read_memory_max("/sys/fs/cgroup/memory/memory.limit_in_bytes", &limit);
    return (uint64_t)limit;
}

static int affinity_cpus(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    return CPU_COUNT(&set);
}

int nbi_cpu_count(void)
{
    int n = affinity_cpus();
    double quota = cgroup_cpus();
    if (quota > 0 && quota < n)
        n = (int)(quota + 0.5); /* 1.5 CPUs run two threads better than one */
    return n > 1 ? n : 1;
}

enum nbi_simd nbi_simd_level(void)
{
#if defined(__x86_64__)
    unsigned a, b, c, d;
    __builtin_cpu_init();
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return NBI_SIMD_AVX512;
    if (avx2)
        return NBI_SIMD_AVX2;
#endif
    return NBI_SIMD_SCALAR;
}

static const char *const simd_names[] = {
#define X(id, name) [id] = name,
    NBI_SIMD_LIST(X)
#undef X
};

const char *nbi_simd_name(enum nbi_simd level)
{
    return simd_names[level];
}

enum nb_status nbi_simd_parse(const char *name, enum nbi_simd *level)
{
    *level = nbi_simd_level();
    for (size_t i = 0; name && i < sizeof simd_names / sizeof *simd_names; i++)
        if (strcmp(name, simd_names[i]) == 0) {
            *level = (enum nbi_simd)i;
            return NB_OK;
        }
    return name ? nbi_fail(NB_EINVAL, "instruction set '%s' is not available on this machine", name)
                : NB_OK;
}

static void list_features(char *buf, size_t size)
{
    static const char *const wanted[] = {"avx2",        "fma",         "f16c",     "avx_vnni",
                                         "avx512f",     "avx512bw",    "avx512vl", "avx512_vnni",
                                         "avx512_bf16", "avx512_fp16", "amx_int8", "asimd",
                                         "asimddp",     "i8mm",        "bf16"};
    char flags[4096];
    buf[0] = 0;
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f)
        return;
    bool found = false;
    while (!found && fgets(flags, sizeof flags, f))
        found = nbi_starts_with(flags, "flags") || nbi_starts_with(flags, "Features");
    fclose(f);
    if (!found)
        return;
    flags[strcspn(flags, "\n")] = ' ';
    size_t used = 0;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        char word[32];
        snprintf(word, sizeof word, " %s ", wanted[i]);
        if (strstr(flags, word) && used < size)
            used += (size_t)snprintf(buf + used, size - used, "%s%s", used ? " " : "", wanted[i]);
    }
}

void nbi_sys_info(struct nbi_sys_info *info)
{
    memset(info, 0, sizeof *info);
    if (!read_field("/proc/cpuinfo", "model name", info->cpu_model, sizeof info->cpu_model))
        snprintf(info->cpu_model, sizeof info->cpu_model, "unknown");
    list_features(info->features, sizeof info->features);
    info->cpus_online = (int)sysconf(_SC_NPROCESSORS_ONLN);
    info->cpus_usable = nbi_cpu_count();
    info->cgroup_cpus = cgroup_cpus();
    info->cgroup_memory = cgroup_memory();
    char field[64];
    unsigned long long kib;
    if (read_field("/proc/meminfo", "MemTotal", field, sizeof field) &&
        sscanf(field, "%llu", &kib) == 1)
        info->memory_total = kib * 1024;
    if (read_field("/proc/meminfo", "MemAvailable", field, sizeof field) &&
        sscanf(field, "%llu", &kib) == 1)
        info->memory_available = kib * 1024;
    struct utsname u;
    if (uname(&u) == 0)
        snprintf(info->kernel, sizeof info->kernel, "%.20s %.60s", u.sysname, u.release);
}

uint64_t nbi_current_rss(void)
{
    char line[128];
    unsigned long long size, resident;
    if (!read_line("/proc/self/statm", line, sizeof line) ||
        sscanf(line, "%llu %llu", &size, &resident) != 2)
        return 0;
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

uint64_t nbi_peak_rss(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_maxrss * 1024 : 0;
}
