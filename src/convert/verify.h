/* verify.h - the checks behind nb_file_verify. */
#pragma once

#include "model/model.h"

/* Every tensor is one of the config's, with its shape, and none is missing. */
enum nb_status nbi_check_names(const struct nbi_store *store, const struct nbi_config *config);

/* Names, shapes, then every value; threads 0: what this process may use. */
enum nb_status nbi_verify(const struct nbi_model *m, int threads, nb_progress_fn progress,
                          void *progress_ctx);
