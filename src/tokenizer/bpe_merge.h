/* bpe_merge.h - the merges of one word.
 *
 * A word starts as its bytes; the pair of neighbours with the lowest rank is joined, the leftmost
 * first, until no pair has a rank. */
#pragma once

#include "base/status.h"

#define NBI_NO_RANK UINT32_MAX

struct nbi_pair {
    uint32_t left, right, rank, id;
};

/* What becomes of two neighbours. */
struct nbi_join {
    uint32_t rank, id;
};

/* Most lookups find nothing, and a table of all pairs is too large for the nearer caches. So pairs
 * of low ids (bytes, as a rule) have a table of their own, and of the others a filter of one bit
 * per hash says for most of those that are absent that they are. */
struct nbi_merges {
    struct nbi_pair *slots; /* open addressing, at most two thirds full; an empty one has no rank */
    uint32_t mask;
    struct nbi_join *low; /* [256][256] */
    uint64_t *filter;     /* 8 bits for each slot */
    int filter_shift;
};

enum nb_status nbi_merges_init(struct nbi_merges *m, size_t count);
void nbi_merges_release(struct nbi_merges *m);

/* The last of two equal pairs counts. */
void nbi_merges_add(struct nbi_merges *m, struct nbi_pair pair);

/* Without a rank if the pair does not join. */
struct nbi_join nbi_merges_find(const struct nbi_merges *m, uint32_t left, uint32_t right);

/* Room for one word; zeroed to begin with. */
struct nbi_merge_scratch {
    uint32_t *rank, *joined, *next, *before;
    uint64_t *heap;
    size_t cap;
};

void nbi_merge_scratch_release(struct nbi_merge_scratch *s);

/* Joins what can be joined in ids[n]; the number that is left. Time n log n. */
enum nb_status nbi_merge(const struct nbi_merges *m, struct nbi_merge_scratch *s, int32_t *ids,
                         size_t n, size_t *left);
