/* batch.h - several sequences over one engine, one stream and one pool of pages; nibble/core.h
 * says how they are used. */
#pragma once

#include "infer/kv_cache.h"

/* All that nb_batch_open() allocates. */
enum nb_status nbi_batch_plan(const struct nb_engine *engine, const struct nb_batch_opts *opts,
                              struct nbi_memory_plan *plan);
