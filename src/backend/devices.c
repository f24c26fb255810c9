/* devices.c - names of devices, and the backend for each. The only file that knows whether CUDA is
 * built in. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda_memory.h"
#include "backend/devices.h"
#include "base/status.h"
#include "nibble/tools.h"
#include "tensor/codec.h"

#define MAX_GPUS  64
#define MAX_INDEX 1023

enum nb_status nb_device_parse(const char *name, int *gpu)
{
    if (strcmp(name, "cpu") == 0) {
        *gpu = -1;
        return NB_OK;
    }
    if (strcmp(name, "cuda") == 0) {
        *gpu = 0;
        return NB_OK;
    }
    /* strtol would also accept signs and blanks. */
    bool number = strncmp(name, "cuda:", 5) == 0 && name[5] >= '0' && name[5] <= '9';
    char *end = NULL;
    long index = number ? strtol(name + 5, &end, 10) : 0;
    if (!number || *end || index > MAX_INDEX)
        return nbi_fail(NB_EUNSUPPORTED, "unknown device '%s'; there are cpu, cuda and cuda:N",
                        name);
    *gpu = (int)index;
    return NB_OK;
}

#if NB_CUDA

void nb_device_auto(char name[NB_DEVICE_NAME])
{
    /* NVML may be missing, and may list devices that this process does not see: check each, and
     * device 0 in any case. */
    struct nb_gpu_info gpus[MAX_GPUS];
    int count = nb_gpu_list(gpus, MAX_GPUS), i = 0;
    while (i < count || i == 0) {
        if (nb_gpu_check(i) == NB_OK) {
            snprintf(name, NB_DEVICE_NAME, "cuda:%d", i);
            return;
        }
        i++;
    }
    snprintf(name, NB_DEVICE_NAME, "cpu");
}

static enum nb_status open_gpu(struct nbi_backend **out, int gpu, int threads)
{
    return nbi_cuda_open(out, gpu, threads);
}

const char *nb_cuda_archs(void)
{
    return NIBBLE_ARCH;
}

enum nb_status nb_gpu_check(int index)
{
    const char *problem = nbi_cuda_check(index);
    return problem ? nbi_fail(NB_EDEVICE, "GPU %d is not usable: %s", index, problem) : NB_OK;
}

#else

void nb_device_auto(char name[NB_DEVICE_NAME])
{
    snprintf(name, NB_DEVICE_NAME, "cpu");
}

static enum nb_status open_gpu(struct nbi_backend **out, int gpu, int threads)
{
    (void)out;
    (void)threads;
    return nb_gpu_check(gpu);
}

const char *nb_cuda_archs(void)
{
    return NULL;
}

enum nb_status nb_gpu_check(int index)
{
    return nbi_fail(NB_EDEVICE,
                    "GPU %d is not usable: nibble was built without CUDA; build it with "
                    "'make CUDA=1'",
                    index);
}

#endif

/* The GPU that the options ask for; -1: the CPU. */
static enum nb_status choose(const struct nbi_backend_opts *opts, int *gpu)
{
    char device[NB_DEVICE_NAME] = "cpu";
    if (opts->device && strcmp(opts->device, "auto") == 0)
        nb_device_auto(device);
    else if (opts->device)
        snprintf(device, sizeof device, "%s", opts->device);
    return nb_device_parse(device, gpu);
}

enum nb_status nbi_backend_open(struct nbi_backend **out, const struct nbi_backend_opts *opts)
{
    int gpu;
    *out = NULL;
    NBI_TRY(choose(opts, &gpu));
    return gpu < 0 ? nbi_cpu_open(out, opts) : open_gpu(out, gpu, opts->threads);
}

static void close_description(struct nbi_backend *be)
{
    free(be);
}

enum nb_status nbi_backend_describe(struct nbi_backend **out, const struct nbi_backend_opts *opts)
{
    int gpu;
    *out = NULL;
    NBI_TRY(choose(opts, &gpu));
    if (gpu < 0)
        return nbi_cpu_open(out, opts);
    *out = calloc(1, sizeof **out);
    if (!*out)
        return nbi_fail_memory("backend", sizeof **out);
    nbi_cuda_describe(*out);
    (*out)->name = "cuda";
    (*out)->close = close_description;
    return NB_OK;
}

/* Opens a device as a session would: a stream for many rows decides which products a GPU uses. */
static enum nb_status open_for_prefill(struct nbi_backend **out, const char *device)
{
    const struct nbi_backend_opts opts = {.device = device, .level = nbi_simd_level()};
    struct nbi_stream *s;
    NBI_TRY(nbi_backend_open(out, &opts));
    struct nbi_backend *be = *out;
    NBI_BUG_IF(!be);
    const struct nbi_stream_limits limits = {.N = be->chunk, .K = 16, .D = 2, .heads = 1};
    enum nb_status rc = be->stream_new(be, &limits, &s);
    if (rc == NB_OK) {
        be->stream_free(s);
        return NB_OK;
    }
    be->close(be);
    *out = NULL;
    return nbi_context(rc, "%s cannot process prompts", device);
}

enum nb_status nb_gpu_products(int index, struct nb_gpu_products *out)
{
    struct nbi_backend *be;
    char device[NB_DEVICE_NAME];
    snprintf(device, sizeof device, "cuda:%d", index);
    NBI_TRY(open_for_prefill(&be, device));
    NBI_BUG_IF(!be);
    memset(out, 0, sizeof *out);
    out->native = nbi_backend_has(be, NBI_CAP_FP4);
    out->failed = be->fp4_selftest_failed;
    snprintf(out->words, sizeof out->words, "%s", be->prefill_path);
    be->close(be);
    return NB_OK;
}

enum nb_status nb_device_caps(const char *device, char words[NB_DEVICE_CAPS])
{
    static const struct {
        enum nbi_cap cap;
        const char *word;
    } caps[] = {
#define X(cap, word) {NBI_CAP_##cap, word},
        NBI_CAP_LIST(X)
#undef X
    };
    struct nbi_backend *be;
    size_t at = 0;
    NBI_TRY(open_for_prefill(&be, device));
    words[0] = 0;
    for (size_t i = 0; i < sizeof caps / sizeof *caps; i++)
        if (nbi_backend_has(be, caps[i].cap))
            at += (size_t)snprintf(words + at, NB_DEVICE_CAPS - at, "%s%s", at ? " " : "",
                                   caps[i].word);
    be->close(be);
    return NB_OK;
}

void nb_cpu_info(struct nb_cpu_info *info)
{
    const char *name = nbi_cpu_microkernels_name(nbi_simd_level());
    *info = (struct nb_cpu_info){.codec = nbi_codec_table()->name, .products = name};
    if (nbi_simd_level() >= NBI_SIMD_AVX512)
        info->products =
            strcmp(name, "avx512") == 0 ? "avx512 with VNNI" : "avx2 (AVX-512 here has no VNNI)";
}
