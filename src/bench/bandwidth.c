/* bandwidth.c - measures how fast all threads together read host memory. */
#include "bench/bandwidth.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/parallel.h"

#define READ_BYTES ((size_t)256 << 20)
#define CHUNK      ((size_t)1 << 20)
#define ROUNDS     5

struct reading {
    const uint64_t *buf;
    atomic_ullong sum; /* keeps the compiler from removing the loop */
};

static void read_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct reading *r = ctx;
    uint64_t sum = 0;
    (void)thread;
    for (int64_t i = first; i < first + count; i += 8) { /* one cache line */
        const uint64_t *p = r->buf + i;
        sum += p[0] + p[1] + p[2] + p[3] + p[4] + p[5] + p[6] + p[7];
    }
    atomic_fetch_add(&r->sum, sum);
}

void *nbi_bandwidth_new(void)
{
    void *buf = aligned_alloc((size_t)2 << 20, READ_BYTES);
    if (!buf)
        return NULL;
    madvise(buf, READ_BYTES, MADV_HUGEPAGE); /* as for weights */
    memset(buf, 1, READ_BYTES);
    return buf;
}

double nbi_bandwidth_now(const void *buf, int threads)
{
    struct reading r = {.buf = buf};
    double best = 0;
    for (int i = 0; i < ROUNDS && buf; i++) {
        double start = nbi_now();
        nbi_for_range(READ_BYTES / sizeof *r.buf, CHUNK / sizeof *r.buf, threads, read_chunk, &r);
        double rate = (double)READ_BYTES / (nbi_now() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

double nbi_read_bandwidth(int threads)
{
    void *buf = nbi_bandwidth_new();
    double rate = nbi_bandwidth_now(buf, threads);
    free(buf);
    return rate;
}
