/* batch.h - several sequences over one engine, one stream and one pool of pages; nibble/core.h
 * says how they are used. */
#pragma once

#include "infer/kv_cache.h"

/* The options as nb_batch_open() takes them, with all defaults filled in. Fails if one is out of
 * range. */
enum nb_status nbi_batch_defaults(const struct nb_engine *engine, const struct nb_batch_opts *opts,
                                  struct nb_batch_opts *out);

/* Whether sequences of a deterministic batch share passes; otherwise each has its own. */
bool nbi_batch_shares_passes(const struct nb_engine *engine, bool exact);

/* All that nb_batch_open() allocates. */
enum nb_status nbi_batch_plan(const struct nb_engine *engine, const struct nb_batch_opts *opts,
                              struct nbi_memory_plan *plan);
