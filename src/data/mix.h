/* mix.h - micro-batches of two data sets: some rows from the main one, the others from replay. */
#pragma once

#include "data/loader.h"

struct nbi_mix {
    struct nbi_loader *main;
    struct nbi_loader *replay; /* repeats forever; NULL: none */
    double share;              /* of the rows that are replay; over 0 and less than 1 */
};

/* Replay rows in micro-batch `number` of B rows. Over the first n micro-batches their share is
 * exact to within one row. */
int64_t nbi_mix_rows(double share, int64_t B, int64_t number);

/* Fills micro-batch `number`, counted from 0: first rows of the main set, then replay rows, whose
 * example_of continues after the main set's numbers. *more false: the main set has ended, and out
 * is empty. number and both loaders' states determine all that follows. */
enum nb_status nbi_mix_next(struct nbi_mix *m, int64_t number, struct nbi_microbatch *out,
                            bool *more);

/* Counts the micro-batches of B x T until the main set ends, at most `limit`. Resets the main
 * loader to its start. */
enum nb_status nbi_mix_count(const struct nbi_mix *m, int64_t B, int64_t T, int64_t limit,
                             int64_t *count);
