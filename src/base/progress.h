/* progress.h - how far a long operation is, on a stream.
 *
 * A bar that redraws itself on a terminal, a plain line now and then elsewhere; rate and time left
 * in both. Only the program above the library uses it; the library reports through
 * nb_progress_fn, and nbi_progress_update has that shape. */
#pragma once

#include <stdio.h>

#include "base/status.h"

enum nbi_progress_unit { NBI_UNIT_BYTES, NBI_UNIT_ITEMS };

struct nbi_progress {
    FILE *out; /* NULL: silent */
    const char *label;
    enum nbi_progress_unit unit;
    bool terminal;
    double start, last; /* seconds on the monotonic clock */
    int width;          /* of the line drawn last */
};

void nbi_progress_begin(struct nbi_progress *p, FILE *out, const char *label,
                        enum nbi_progress_unit unit);

/* ctx is a struct nbi_progress. */
void nbi_progress_update(void *ctx, uint64_t done, uint64_t total);

/* Clears the bar; says how long it took if the operation was long enough to have shown anything. */
void nbi_progress_end(struct nbi_progress *p);

/* The text of one line, without colour or cursor movement, for a state: exposed for tests. */
void nbi_progress_format(char *buf, size_t size, const struct nbi_progress *p, double now,
                         uint64_t done, uint64_t total);
