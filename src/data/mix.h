/* mix.h - batches of two data sets: some rows of one, the others of the other. */
#pragma once

#include "data/loader.h"

struct nbi_mix {
    struct nbi_loader *main;
    struct nbi_loader *other; /* without an end; NULL: none */
    double share;             /* of the rows that are of the other; over 0 and less than 1 */
};

/* Rows of the other set in batch `number` of B rows. Of the first n batches together, it is the
 * share to within one row. */
int64_t nbi_mix_rows(double share, int64_t B, int64_t number);

/* Batch `number`, 0 at the start of a run: rows of the main set, then those of the other, whose
 * samples are numbered behind the main's in owners. *more false: the main set is over, and out is
 * empty. With the number and both cursors, all that follows is decided. */
enum nb_status nbi_mix_next(struct nbi_mix *m, int64_t number, struct nbi_microbatch *out,
                            bool *more);

/* How many batches of B x T there are from the start to the end of the main set, at most `limit`.
 * The cursor of the main set is at the start before and after. */
enum nb_status nbi_mix_count(const struct nbi_mix *m, int64_t B, int64_t T, int64_t limit,
                             int64_t *count);
