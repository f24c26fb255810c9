/* bandwidth.c - how fast memory can be read here. */
#include "bench/bandwidth.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

#define READ_BYTES ((size_t)256 << 20)
#define ROUNDS     5

double nbi_read_bandwidth(int threads)
{
    uint64_t *buf = malloc(READ_BYTES);
    if (!buf)
        return 0;
    size_t words = READ_BYTES / sizeof *buf;
    memset(buf, 1, READ_BYTES);
    double best = 0;
    uint64_t sum = 0;
    for (int r = 0; r < ROUNDS; r++) {
        double start = nbi_now();
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
        for (size_t i = 0; i < words; i += 8) /* one cache line; eight sums keep loads flowing */
            sum += buf[i] + buf[i + 1] + buf[i + 2] + buf[i + 3] + buf[i + 4] + buf[i + 5] +
                   buf[i + 6] + buf[i + 7];
        double rate = (double)READ_BYTES / (nbi_now() - start);
        best = rate > best ? rate : best;
    }
    volatile uint64_t keep = sum; /* or the loop could go */
    (void)keep;
    free(buf);
    return best;
}
