/* parallel.c - chunks over OpenMP threads; a worker's message is copied before it is lost. */
#include "base/parallel.h"

#include <omp.h>
#include <string.h>

enum nb_status nbi_for_chunks(int64_t total, int64_t chunk, int threads, nbi_chunk_fn fn, void *ctx)
{
    int64_t chunks = (total + chunk - 1) / chunk;
    enum nb_status failed = NB_OK;
    char message[1024] = "";
    if (chunks < threads)
        threads = chunks > 1 ? (int)chunks : 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < chunks; i++) {
        enum nb_status seen, rc;
#pragma omp atomic read
        seen = failed;
        if (seen != NB_OK)
            continue;
        int64_t first = i * chunk, left = total - first;
        rc = nbi_check_interrupt();
        if (rc == NB_OK)
            rc = fn(ctx, omp_get_thread_num(), first, left < chunk ? left : chunk);
        if (rc == NB_OK)
            continue;
#pragma omp critical(nbi_chunk_failure)
        if (failed == NB_OK) {
            snprintf(message, sizeof message, "%s", nb_last_error());
#pragma omp atomic write
            failed = rc;
        }
    }
    return failed == NB_OK ? NB_OK : nbi_fail(failed, "%s", message);
}
