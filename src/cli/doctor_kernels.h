/* doctor_kernels.h - `nibble doctor --kernels`. */
#pragma once

#include "cli/cli.h"

struct cli_kernel_opts {
    const struct cli_common *common;
    const char *only;
    int64_t elements;
    const char *simd;
};

/* Checks the operations of a device, a line each; returns the exit code. */
int cli_doctor_kernels(const struct cli_kernel_opts *opts);
