/* progress.h - how far a long operation is, on a stream.
 *
 * A bar that redraws itself on a terminal, a plain line now and then elsewhere; rate and time left
 * in both. Only the program above the library uses it; the library reports through
 * nb_progress_fn, and cli_progress_update has that shape. */
#pragma once

#include <stdio.h>

#include "base/status.h"

enum cli_progress_unit { CLI_UNIT_BYTES, CLI_UNIT_ITEMS };

struct cli_progress {
    FILE *out; /* NULL: silent */
    const char *label;
    enum cli_progress_unit unit;
    bool terminal;
    double start, last; /* seconds on the monotonic clock */
    int width;          /* of the line drawn last */
};

void cli_progress_begin(struct cli_progress *p, FILE *out, const char *label,
                        enum cli_progress_unit unit);

/* ctx is a struct cli_progress. */
void cli_progress_update(void *ctx, uint64_t done, uint64_t total);

/* Clears the bar; says how long it took if the operation was long enough to have shown anything. */
void cli_progress_end(struct cli_progress *p);

/* The text of one line, without colour or cursor movement, for a state: exposed for tests. */
void cli_progress_format(char *buf, size_t size, const struct cli_progress *p, double now,
                         uint64_t done, uint64_t total);
