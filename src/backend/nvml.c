/* nvml.c - the management library, loaded at run time; which memory processes have on GPUs. */
#include "backend/nvml.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nibble.h"

#define PROCESSES_MAX 1024

bool nbi_nvml_open(struct nbi_nvml *n)
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
        memcpy(symbols[i].slot, &p, sizeof p); /* ISO C has no cast from object to function */
        ok = ok && (p || !symbols[i].needed);
    }
    if (ok && n->init() == 0)
        return true;
    dlclose(n->library);
    return false;
}

void nbi_nvml_close(struct nbi_nvml *n)
{
    n->shutdown();
    dlclose(n->library);
}

/* ---- watching ---- */

struct nb_gpu_watch {
    struct nbi_nvml nvml;
    unsigned devices;
    bool by_process;     /* the driver's process ids are ours */
    uint64_t used_first; /* on all devices, by whomever */
    struct nvml_process list[PROCESSES_MAX];
};

/* The driver counts processes as the first namespace does, whose number the kernel fixes. */
static bool in_first_namespace(void)
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
    if (!w || !nbi_nvml_open(&w->nvml)) {
        free(w);
        return NULL;
    }
    if (w->nvml.count(&w->devices) != 0)
        w->devices = 0;
    w->by_process = w->nvml.processes && in_first_namespace();
    w->used_first = used_by_all(w);
    return w;
}

static bool contains(const int *pids, size_t count, unsigned pid)
{
    for (size_t i = 0; i < count; i++)
        if (pids[i] == (int)pid)
            return true;
    return false;
}

/* False where the driver does not tell. */
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
    return sum > w->used_first ? sum - w->used_first : 0;
}

void nb_gpu_watch_close(struct nb_gpu_watch *w)
{
    if (w)
        nbi_nvml_close(&w->nvml);
    free(w);
}
