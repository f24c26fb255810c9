/* kernels.h - every operation of a backend against the scalar CPU code. */
#pragma once

#include "backend/backend.h"
#include "nibble/tools.h"

/* nb_check_kernels() for backends that are open; opts->device, simd and threads are ignored. */
enum nb_status nbi_check_kernels_of(struct nbi_backend *tested, struct nbi_backend *scalar,
                                    const struct nb_kernel_opts *opts, nb_kernel_fn fn, void *ctx);
