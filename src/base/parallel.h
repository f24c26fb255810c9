/* parallel.h - parallel loops on one team of threads.
 *
 * The process has one team. Waiting threads first spin, since the next call mostly comes within
 * microseconds, then sleep, to leave the CPUs to other processes. A call from inside the team, or
 * while another thread uses the team, runs on the calling thread only. */
#pragma once

#include "base/status.h"

/* Calls fn(ctx, i, n) for each i in [0, n), concurrently on n <= threads threads; i = 0 is the
 * caller. Returns when all have returned. */
typedef void (*nbi_team_fn)(void *ctx, int thread, int threads);

void nbi_team_run(int threads, nbi_team_fn fn, void *ctx);

/* Calls fn for chunks [first, first + count) of [0, total) with count <= chunk, each chunk once, in
 * any order; idle threads take the next one. thread is in [0, threads). */
typedef void (*nbi_range_fn)(void *ctx, int thread, int64_t first, int64_t count);

void nbi_for_range(int64_t total, int64_t chunk, int threads, nbi_range_fn fn, void *ctx);

/* The same for work that can fail. Stops early at the first failure, whose message becomes the
 * caller's, or at an interruption. */
typedef enum nb_status (*nbi_chunk_fn)(void *ctx, int thread, int64_t first, int64_t count);

enum nb_status nbi_for_chunks(int64_t total, int64_t chunk, int threads, nbi_chunk_fn fn,
                              void *ctx);
