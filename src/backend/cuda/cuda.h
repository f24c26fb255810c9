/* cuda.h - what the CUDA part offers to C. */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Runs a kernel on the device and checks what it wrote. NULL if that went well, else why not (a
 * string that stays valid). */
const char *nbi_cuda_check(int device);

/* The device as a backend. Weights that stay on the host are read by so many threads (0: what this
 * process may use). */
enum nb_status nbi_cuda_open(struct nbi_backend **out, int device, int threads);

#ifdef __cplusplus
}
#endif
