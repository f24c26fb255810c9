/* nvml.h - what we use of NVIDIA's management library, declared here so that no NVIDIA header is
 * needed. The driver brings the library; without it there is no usable GPU either. */
#pragma once

#include <stdbool.h>

typedef struct nvml_device *nvml_device;

struct nvml_memory {
    unsigned long long total, free, used;
};

#define NVML_UNKNOWN (~0ull) /* in place of bytes */

struct nvml_process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* Functions return 0 if they succeed. */
struct nbi_nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *);
    int (*handle)(unsigned, nvml_device *);
    int (*name)(nvml_device, char *, unsigned);
    int (*memory)(nvml_device, struct nvml_memory *);
    int (*capability)(nvml_device, int *, int *);
    int (*driver)(char *, unsigned);
    int (*processes)(nvml_device, unsigned *, struct nvml_process *); /* NULL: too old for it */
};

/* False: it is not there, or does not work. */
bool nbi_nvml_open(struct nbi_nvml *n);
void nbi_nvml_close(struct nbi_nvml *n);
