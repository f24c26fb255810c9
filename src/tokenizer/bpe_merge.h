/* bpe_merge.h - applies BPE merges to one word.
 *
 * A word starts as one token per byte. The adjacent pair with the lowest rank is joined, the
 * leftmost first among equals, until no pair has a rank. */
#pragma once

#include "base/status.h"

#define NBI_NO_RANK UINT32_MAX

/* A merge: tokens left and right become token id. Lower ranks are applied first. */
struct nbi_pair {
    uint32_t left, right, rank, id;
};

/* Result of looking up two adjacent tokens; rank NBI_NO_RANK: they do not join. */
struct nbi_join {
    uint32_t rank, id;
};

/* A hash table of merges. Most lookups find nothing, and the full table does not fit into the L1 or
 * L2 cache. So pairs of ids below 256, which are usually bytes, have a direct table, and a Bloom
 * filter with one hash rejects most absent pairs before the full table is touched. */
struct nbi_merges {
    struct nbi_pair *slots; /* open addressing, at most 2/3 full; empty: rank NBI_NO_RANK */
    uint32_t mask;
    struct nbi_join *low; /* [256][256] */
    uint64_t *filter;     /* 8 bits per slot */
    int filter_shift;
};

enum nb_status nbi_merges_init(struct nbi_merges *m, size_t count); /* count: of pairs to add */
void nbi_merges_release(struct nbi_merges *m);

/* Adding a pair again replaces it. */
void nbi_merges_add(struct nbi_merges *m, struct nbi_pair pair);

struct nbi_join nbi_merges_find(const struct nbi_merges *m, uint32_t left, uint32_t right);

/* Scratch memory for long words; start with {0}. Grows as needed and is reused between calls. */
struct nbi_merge_scratch {
    uint32_t *rank, *joined, *next, *before;
    uint64_t *heap;
    size_t cap;
};

void nbi_merge_scratch_release(struct nbi_merge_scratch *s);

/* Applies all merges to ids[n] in place; *left is the number of ids that remain. O(n log n). */
enum nb_status nbi_merge(const struct nbi_merges *m, struct nbi_merge_scratch *s, int32_t *ids,
                         size_t n, size_t *left);
