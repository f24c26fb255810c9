/* progress.h - the progress of a long operation, on a stream.
 *
 * The status line on a terminal, a plain line every half minute elsewhere; both with rate and time
 * left. cli_progress_update is an nb_progress_fn. */
#pragma once

#include <stdio.h>

#include "base/status.h"

enum cli_progress_unit { CLI_UNIT_BYTES, CLI_UNIT_ITEMS };

struct cli_progress {
    FILE *out; /* stderr; NULL: silent */
    const char *label;
    enum cli_progress_unit unit;
    bool terminal;
    double start, last; /* seconds on the monotonic clock */
};

void cli_progress_begin(struct cli_progress *p, FILE *out, const char *label,
                        enum cli_progress_unit unit);

/* ctx is a struct cli_progress. */
void cli_progress_update(void *ctx, uint64_t done, uint64_t total);

/* Clears the bar; prints the time taken if the operation lasted long enough to show progress. */
void cli_progress_end(struct cli_progress *p);

/* The text of a plain line for a state: exposed for tests. */
void cli_progress_format(char *buf, size_t size, const struct cli_progress *p, double now,
                         uint64_t done, uint64_t total);
