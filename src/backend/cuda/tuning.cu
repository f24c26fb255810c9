/* tuning.cu - the algorithms that cuBLASLt uses in training, as bytes of a checkpoint: a header
 * that says where they were chosen, then one entry each.
 *
 * Bits of results depend on algorithms, library and device. The bytes come from a file: every
 * length is checked here, and what an algorithm holds by cuBLASLt before it runs. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cublaslt.cuh"

#define MAGIC     "NBTUNE1\n"
#define GPU_BYTES 64

struct tuning_header {
    char magic[8];
    char gpu[GPU_BYTES];   /* its name, with a NUL after it */
    uint64_t library;      /* version of cuBLASLt; 0: it was not used */
    uint32_t cc, ptx, sms; /* as in struct cuda */
    uint32_t count;        /* of entries */
};

struct tuning_entry {
    int64_t M, N, K;
    uint32_t kind, zero;
    uint64_t algo[8];
};

static_assert(sizeof(struct tuning_header) == 8 + GPU_BYTES + 8 + 16, "no padding");
static_assert(sizeof(struct tuning_entry) == 3 * 8 + 8 + 64, "no padding");
static_assert(sizeof(struct tuning_header) + NBI_ALGORITHMS_MAX * sizeof(struct tuning_entry) <=
                  NBI_TUNING_MAX,
              "a buffer holds all");

static struct tuning_header header_of(const struct cuda *cuda)
{
    struct tuning_header h = {};
    memcpy(h.magic, MAGIC, sizeof h.magic);
    snprintf(h.gpu, sizeof h.gpu, "%s", cuda->gpu);
    h.cc = (uint32_t)cuda->cc;
    h.ptx = (uint32_t)cuda->ptx_version;
    h.sms = (uint32_t)cuda->sms;
    return h;
}

/* Any fixed order will do: the order in which shapes were met depends on where a run was resumed.
 */
static int by_shape(const void *x, const void *y)
{
    const struct tuning_entry *a = (const struct tuning_entry *)x,
                              *b = (const struct tuning_entry *)y;
    const int64_t left[] = {a->kind, a->M, a->N, a->K}, right[] = {b->kind, b->M, b->N, b->K};
    for (int i = 0; i < 4; i++)
        if (left[i] != right[i])
            return left[i] < right[i] ? -1 : 1;
    return 0;
}

int64_t nbi_cuda_tuning_save(struct nbi_backend *be, uint8_t out[NBI_TUNING_MAX])
{
    struct cuda *cuda = (struct cuda *)be;
    struct cublaslt_algorithm found[NBI_ALGORITHMS_MAX];
    struct tuning_entry e[NBI_ALGORITHMS_MAX];
    struct tuning_header h = header_of(cuda);
    int count = nbi_cuda_cublaslt_algorithms(cuda, found, NBI_ALGORITHMS_MAX);
    h.count = (uint32_t)count;
    h.library = count > 0 ? nbi_cuda_cublaslt_version(cuda) : 0;
    for (int i = 0; i < count; i++) {
        e[i] = {found[i].M, found[i].N, found[i].K, found[i].kind, 0, {}};
        memcpy(e[i].algo, found[i].algo, sizeof e[i].algo);
    }
    qsort(e, (size_t)count, sizeof *e, by_shape);
    memcpy(out, &h, sizeof h);
    memcpy(out + sizeof h, e, (size_t)count * sizeof *e);
    return (int64_t)(sizeof h + (size_t)count * sizeof *e);
}

static bool is_text(const char *s, int64_t size)
{
    int64_t n = 0;
    while (n < size && s[n] >= ' ' && s[n] <= '~')
        n++;
    return n < size && s[n] == 0;
}

static enum nb_status read_header(const void *bytes, int64_t n, struct tuning_header *h)
{
    if (n < (int64_t)sizeof *h)
        return nbi_fail(NB_EFORMAT, "tuning of a GPU is cut off");
    memcpy(h, bytes, sizeof *h);
    if (memcmp(h->magic, MAGIC, sizeof h->magic) != 0 || !is_text(h->gpu, sizeof h->gpu))
        return nbi_fail(NB_EFORMAT, "tuning of a GPU begins with something else");
    if (h->count > NBI_ALGORITHMS_MAX ||
        n != (int64_t)(sizeof *h + h->count * sizeof(struct tuning_entry)))
        return nbi_fail(NB_EFORMAT, "tuning of a GPU is %lld bytes for %u algorithms", (long long)n,
                        h->count);
    return NB_OK;
}

/* Why results may have other bits here; empty if they may not. */
static void compare_devices(const struct tuning_header *was, const struct tuning_header *is,
                            char why[NBI_TUNING_WHY])
{
    if (strcmp(was->gpu, is->gpu) != 0 || was->sms != is->sms || was->cc != is->cc)
        snprintf(why, NBI_TUNING_WHY,
                 "it was on %s (%u multiprocessors) before, and is on %s (%u) now", was->gpu,
                 was->sms, is->gpu, is->sms);
    else if (was->ptx != is->ptx)
        snprintf(why, NBI_TUNING_WHY, "kernels were those of sm_%u before, and are of sm_%u now",
                 was->ptx, is->ptx);
}

static enum nb_status use_algorithms(struct cuda *cuda, const struct tuning_header *h,
                                     const uint8_t *entries, char why[NBI_TUNING_WHY])
{
    struct cublaslt_algorithm all[NBI_ALGORITHMS_MAX] = {};
    NBI_TRY(nbi_cuda_cublaslt_load(cuda));
    uint64_t version = nbi_cuda_cublaslt_version(cuda);
    if (version != h->library) {
        snprintf(why, NBI_TUNING_WHY, "it used cuBLASLt %llu before, and uses %llu now",
                 (unsigned long long)h->library, (unsigned long long)version);
        return NB_OK;
    }
    for (uint32_t i = 0; i < h->count; i++) {
        struct tuning_entry e;
        memcpy(&e, entries + i * sizeof e, sizeof e);
        all[i] = {e.M, e.N, e.K, e.kind, {}};
        memcpy(all[i].algo, e.algo, sizeof e.algo);
    }
    nbi_cuda_cublaslt_set_algorithms(cuda, all, (int)h->count);
    return NB_OK;
}

enum nb_status nbi_cuda_tuning_load(struct nbi_backend *be, const void *bytes, int64_t n,
                                    char why[NBI_TUNING_WHY])
{
    struct cuda *cuda = (struct cuda *)be;
    const struct tuning_header is = header_of(cuda);
    struct tuning_header was;
    why[0] = 0;
    NBI_TRY(read_header(bytes, n, &was));
    compare_devices(&was, &is, why);
    if (why[0] || was.count == 0)
        return NB_OK;
    return use_algorithms(cuda, &was, (const uint8_t *)bytes + sizeof was, why);
}
