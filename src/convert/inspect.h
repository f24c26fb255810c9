/* inspect.h - the checks behind nb_file_verify. */
#pragma once

#include "convert/model.h"

enum nb_status nbi_verify(const struct nbi_model *m, nb_progress_fn progress, void *progress_ctx);
