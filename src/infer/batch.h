/* batch.h - several sequences over one engine, one stream and one pool of pages; nibble.h has how
 * they are used. */
#pragma once

#include "infer/session.h"

/* What nb_batch_open will allocate. */
enum nb_status nbi_batch_plan(const struct nb_engine *engine, const struct nb_batch_opts *opts,
                              struct nbi_session_plan *plan);
