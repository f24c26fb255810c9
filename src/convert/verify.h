/* verify.h - the checks of nb_file_verify. */
#pragma once

#include "model/model.h"

/* Checks that the tensors are exactly those of the config, with the same shapes. */
enum nb_status nbi_check_names(const struct nbi_store *store, const struct nbi_config *config);

/* Checks names, shapes, then every value. threads 0: all CPUs of this process. */
enum nb_status nbi_verify(const struct nbi_model *m, int threads, nb_progress_fn progress,
                          void *progress_ctx);
