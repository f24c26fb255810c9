/* slabs.c - slabs of weights. A slab lies at a multiple of its alignment SLAB, so that a weight's
 * address tells its slab. */
#include "backend/cpu/slabs.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#define SLAB   ((size_t)32 << 20)
#define HEADER ((size_t)4096) /* one page, since allocations are whole pages */

struct nbi_slab {
    size_t bytes, used;
    size_t live; /* weights in it */
};

static size_t round_up(size_t bytes, size_t of)
{
    return (bytes + of - 1) / of * of;
}

/* Maps SLAB bytes more than needed and unmaps what lies before and after the aligned part. */
static struct nbi_slab *slab_new(size_t bytes)
{
    size_t total = bytes + SLAB;
    char *p = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t front = round_up((uintptr_t)p, SLAB) - (uintptr_t)p;
    if (front > 0)
        munmap(p, front);
    if (SLAB - front > 0)
        munmap(p + front + bytes, SLAB - front);
    struct nbi_slab *slab = (struct nbi_slab *)(void *)(p + front);
    madvise(slab, bytes, MADV_HUGEPAGE); /* a hint; failure is harmless */
    *slab = (struct nbi_slab){.bytes = bytes, .used = HEADER};
    return slab;
}

/* Frees a slab without weights; the one being filled is reused instead. */
static void slab_empty(struct nbi_slab *slab, const struct nbi_slab *filling)
{
    if (slab == filling)
        slab->used = HEADER;
    else
        munmap(slab, slab->bytes);
}

void *nbi_slab_alloc(struct nbi_slab **slab, size_t bytes)
{
    struct nbi_slab *from = *slab;
    if (bytes > SIZE_MAX / 2)
        return NULL;
    bytes = round_up(bytes, HEADER);
    if (!from || from->bytes - from->used < bytes) {
        bool own = bytes > SLAB / 2; /* large weights get a slab of their own */
        from = slab_new(own ? round_up(HEADER + bytes, (size_t)2 << 20) : SLAB);
        if (!from)
            return NULL;
        if (!own) {
            struct nbi_slab *full = *slab;
            *slab = from;
            if (full && full->live == 0)
                slab_empty(full, from);
        }
    }
    void *p = (char *)from + from->used;
    from->used += bytes;
    from->live++;
    return p;
}

void nbi_slab_free(struct nbi_slab **slab, void *p)
{
    if (!p)
        return;
    struct nbi_slab *of =
        (struct nbi_slab *)((uintptr_t)p / SLAB * SLAB); // NOLINT(performance-no-int-to-ptr)
    if (--of->live == 0)
        slab_empty(of, *slab);
}

void nbi_slabs_close(struct nbi_slab **slab)
{
    if (*slab && (*slab)->live == 0)
        slab_empty(*slab, NULL);
    *slab = NULL;
}
