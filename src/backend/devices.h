/* devices.h - what cpu/ and cuda/ offer to devices.c, which alone knows whether CUDA is built in.
 */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum nb_status nbi_cpu_open(struct nbi_backend **out, const struct nbi_backend_opts *opts);

/* The microkernels that the CPU backend runs at this level: "scalar", "avx2" or "avx512". NULL if
 * this CPU or this build lacks the level. */
const char *nbi_cpu_microkernels_name(enum nbi_simd level);

/* Opens device `device`. `threads` host threads read weights; 0: as many as this process may use.
 */
enum nb_status nbi_cuda_open(struct nbi_backend **out, int device, int threads);

/* Runs a kernel on the device and checks what it wrote. NULL if the device works, else why not (a
 * string that stays valid). */
const char *nbi_cuda_check(int device);

#ifdef __cplusplus
}
#endif
