/* bandwidth.c - how fast memory can be read here. */
#include "bench/bandwidth.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/parallel.h"

#define READ_BYTES ((size_t)256 << 20)
#define PIECE      ((size_t)1 << 20)
#define ROUNDS     5

struct reading {
    const uint64_t *buf;
    atomic_ullong sum; /* or the loop could go */
};

static void read_piece(void *ctx, int thread, int64_t first, int64_t count)
{
    struct reading *r = ctx;
    uint64_t sum = 0;
    (void)thread;
    for (int64_t i = first; i < first + count; i += 8) { /* a cache line, in eight sums */
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
    madvise(buf, READ_BYTES, MADV_HUGEPAGE); /* as weights are */
    memset(buf, 1, READ_BYTES);
    return buf;
}

double nbi_bandwidth_now(const void *buf, int threads)
{
    struct reading r = {.buf = buf};
    double best = 0;
    for (int i = 0; i < ROUNDS && buf; i++) {
        double start = nbi_now();
        nbi_for_range(READ_BYTES / sizeof *r.buf, PIECE / sizeof *r.buf, threads, read_piece, &r);
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
