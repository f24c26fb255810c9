/* nvml.c - which GPUs the machine has and how much of their memory processes use, asked of
 * NVIDIA's management library (NVML).
 *
 * The driver brings the library, and it is loaded at run time; without it no GPU is usable. What is
 * used of its interface is declared here, so that no NVIDIA header is needed. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nibble/tools.h"

/* ---- the library ---- */

#define PROCESSES_MAX 1024

#define NVML_UNKNOWN (~0ull) /* a number of bytes that the driver does not know */

typedef struct nvml_device *nvml_device;

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml_process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* The library's functions, which return 0 on success. */
struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *);
    int (*handle)(unsigned, nvml_device *);
    int (*name)(nvml_device, char *, unsigned);
    int (*memory)(nvml_device, struct nvml_memory *);
    int (*capability)(nvml_device, int *, int *);
    int (*driver)(char *, unsigned);
    int (*processes)(nvml_device, unsigned *, struct nvml_process *); /* NULL: library too old */
};

/* False if the library is missing or does not work. */
static bool nvml_open(struct nvml *n)
{
    memset(n, 0, sizeof *n);
    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!n->library)
        return false;
    const struct {
        const char *symbol;
        void *slot;
        bool needed;
    } symbols[] = {
        {"nvmlInit_v2", &n->init, true},
        {"nvmlShutdown", &n->shutdown, true},
        {"nvmlDeviceGetCount_v2", &n->count, true},
        {"nvmlDeviceGetHandleByIndex_v2", &n->handle, true},
        {"nvmlDeviceGetName", &n->name, true},
        {"nvmlDeviceGetMemoryInfo", &n->memory, true},
        {"nvmlDeviceGetCudaComputeCapability", &n->capability, true},
        {"nvmlSystemGetDriverVersion", &n->driver, true},
        {"nvmlDeviceGetComputeRunningProcesses_v3", &n->processes, false},
    };
    bool ok = true;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *p = dlsym(n->library, symbols[i].symbol);
        memcpy(symbols[i].slot, &p, sizeof p); /* ISO C cannot cast this pointer to a function */
        ok = ok && (p || !symbols[i].needed);
    }
    if (ok && n->init() == 0)
        return true;
    dlclose(n->library);
    return false;
}

static void nvml_close(struct nvml *n)
{
    n->shutdown();
    dlclose(n->library);
}

/* ---- the devices ---- */

int nb_gpu_list(struct nb_gpu_info *gpus, int max)
{
    struct nvml n;
    unsigned count = 0;
    int found = 0;
    if (!nvml_open(&n))
        return 0;
    if (n.count(&count) != 0)
        count = 0;
    for (unsigned i = 0; i < count && found < max; i++) {
        nvml_device device;
        struct nvml_memory memory = {0};
        struct nb_gpu_info *g = &gpus[found];
        memset(g, 0, sizeof *g);
        if (n.handle(i, &device) != 0)
            continue;
        if (n.name(device, g->name, sizeof g->name) != 0)
            snprintf(g->name, sizeof g->name, "GPU %u", i);
        if (n.memory(device, &memory) == 0) { /* fails on devices with unified memory */
            g->memory_bytes = memory.total;
            g->memory_free = memory.free;
        }
        n.capability(device, &g->cc_major, &g->cc_minor);
        n.driver(g->driver, sizeof g->driver);
        found++;
    }
    nvml_close(&n);
    return found;
}

/* ---- watching memory ---- */

struct nb_gpu_watch {
    struct nvml nvml;
    unsigned devices;
    bool by_process;      /* the driver's process ids are those of this process */
    uint64_t used_before; /* bytes on all devices, by all processes, when the watch was opened */
    struct nvml_process list[PROCESSES_MAX];
};

/* The driver reports process ids of the initial PID namespace, whose inode number the kernel fixes.
 */
static bool in_initial_pid_namespace(void)
{
    char target[64] = "";
    ssize_t n = readlink("/proc/self/ns/pid", target, sizeof target - 1);
    return n > 0 && strcmp(target, "pid:[4026531836]") == 0;
}

static uint64_t used_by_all(struct nb_gpu_watch *w)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < w->devices; i++) {
        nvml_device device;
        struct nvml_memory memory = {0};
        if (w->nvml.handle(i, &device) == 0 && w->nvml.memory(device, &memory) == 0)
            sum += memory.used;
    }
    return sum;
}

struct nb_gpu_watch *nb_gpu_watch_open(void)
{
    struct nb_gpu_watch *w = calloc(1, sizeof *w);
    if (!w || !nvml_open(&w->nvml)) {
        free(w);
        return NULL;
    }
    if (w->nvml.count(&w->devices) != 0)
        w->devices = 0;
    w->by_process = w->nvml.processes && in_initial_pid_namespace();
    w->used_before = used_by_all(w);
    return w;
}

static bool contains(const int *pids, size_t count, unsigned pid)
{
    for (size_t i = 0; i < count; i++)
        if (pids[i] == (int)pid)
            return true;
    return false;
}

/* The memory of these processes; false if the driver does not report it. */
static bool used_by_processes(struct nb_gpu_watch *w, const int *pids, size_t count, uint64_t *sum)
{
    *sum = 0;
    for (unsigned i = 0; i < w->devices; i++) {
        nvml_device device;
        unsigned n = PROCESSES_MAX;
        if (w->nvml.handle(i, &device) != 0 || w->nvml.processes(device, &n, w->list) != 0)
            return false;
        for (unsigned k = 0; k < n && k < PROCESSES_MAX; k++) {
            if (!contains(pids, count, w->list[k].pid))
                continue;
            if (w->list[k].used == NVML_UNKNOWN)
                return false;
            *sum += w->list[k].used;
        }
    }
    return true;
}

uint64_t nb_gpu_watch_bytes(struct nb_gpu_watch *w, const int *pids, size_t count)
{
    uint64_t sum;
    if (w->by_process && used_by_processes(w, pids, count, &sum))
        return sum;
    sum = used_by_all(w);
    return sum > w->used_before ? sum - w->used_before : 0;
}

void nb_gpu_watch_close(struct nb_gpu_watch *w)
{
    if (w)
        nvml_close(&w->nvml);
    free(w);
}
