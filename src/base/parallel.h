/* parallel.h - a range cut into chunks, worked on by several threads. */
#pragma once

#include "base/status.h"

/* Works on [first, first + count); thread is in [0, threads). */
typedef enum nb_status (*nbi_chunk_fn)(void *ctx, int thread, int64_t first, int64_t count);

/* Calls fn for every chunk of [0, total), in any order, on up to `threads` threads. Stops early at
 * the first failure, whose message becomes the caller's, or at an interruption. */
enum nb_status nbi_for_chunks(int64_t total, int64_t chunk, int threads, nbi_chunk_fn fn,
                              void *ctx);
