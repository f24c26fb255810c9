/* bpe_merge.c - short words: scan for the lowest rank before each join; long words: a heap. */
#include "tokenizer/bpe_merge.h"

#include <string.h>

/* Up to this length, scanning all ranks is faster than maintaining a heap. */
#define SHORT_WORD 64

#define LOW 256

enum nb_status nbi_merges_init(struct nbi_merges *m, size_t count)
{
    size_t slots = 256;
    while (slots / 3 * 2 < count)
        slots *= 2;
    size_t bits = 8 * slots; /* 12 to 24 per pair */
    m->slots = malloc(slots * sizeof *m->slots);
    m->low = malloc((size_t)LOW * LOW * sizeof *m->low);
    m->filter = calloc(bits / 64, sizeof *m->filter);
    if (!m->slots || !m->low || !m->filter) {
        nbi_merges_release(m);
        return nbi_fail_memory("merges", slots * sizeof *m->slots);
    }
    memset(m->slots, 0xFF, slots * sizeof *m->slots);
    memset(m->low, 0xFF, (size_t)LOW * LOW * sizeof *m->low);
    m->mask = (uint32_t)(slots - 1);
    m->filter_shift = 64 - __builtin_ctzll(bits);
    return NB_OK;
}

void nbi_merges_release(struct nbi_merges *m)
{
    free(m->slots);
    free(m->low);
    free(m->filter);
    *m = (struct nbi_merges){0};
}

static uint64_t hash_pair(uint32_t left, uint32_t right)
{
    return ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
}

/* Uses the top bits of the product: those depend on every bit of both ids. */
static uint32_t filter_bit(const struct nbi_merges *m, uint64_t hash)
{
    return (uint32_t)(hash >> m->filter_shift);
}

static struct nbi_pair *find_slot(const struct nbi_merges *m, uint64_t hash, uint32_t left,
                                  uint32_t right)
{
    uint32_t i = (uint32_t)(hash >> 32) & m->mask;
    while (m->slots[i].rank != NBI_NO_RANK &&
           (m->slots[i].left != left || m->slots[i].right != right))
        i = (i + 1) & m->mask;
    return &m->slots[i];
}

void nbi_merges_add(struct nbi_merges *m, struct nbi_pair pair)
{
    if ((pair.left | pair.right) < LOW) {
        m->low[pair.left * LOW + pair.right] = (struct nbi_join){pair.rank, pair.id};
        return;
    }
    uint64_t hash = hash_pair(pair.left, pair.right);
    struct nbi_pair *slot = find_slot(m, hash, pair.left, pair.right);
    uint32_t bit = filter_bit(m, hash);
    m->filter[bit / 64] |= (uint64_t)1 << bit % 64;
    *slot = pair;
}

struct nbi_join nbi_merges_find(const struct nbi_merges *m, uint32_t left, uint32_t right)
{
    if ((left | right) < LOW)
        return m->low[left * LOW + right];
    uint64_t hash = hash_pair(left, right);
    uint32_t bit = filter_bit(m, hash);
    if (!(m->filter[bit / 64] >> bit % 64 & 1))
        return (struct nbi_join){NBI_NO_RANK, 0};
    const struct nbi_pair *slot = find_slot(m, hash, left, right);
    return (struct nbi_join){slot->rank, slot->id};
}

void nbi_merge_scratch_release(struct nbi_merge_scratch *s)
{
    free(s->rank);
    free(s->joined);
    free(s->next);
    free(s->before);
    free(s->heap);
    *s = (struct nbi_merge_scratch){0};
}

/* ---- short words ---- */

/* rank[i] and joined[i] describe the pair (ids[i], ids[i + 1]). */
static void rank_pair(const struct nbi_merges *m, const int32_t *ids, size_t i, uint32_t *rank,
                      uint32_t *joined)
{
    struct nbi_join j = nbi_merges_find(m, (uint32_t)ids[i], (uint32_t)ids[i + 1]);
    rank[i] = j.rank;
    joined[i] = j.id;
}

static size_t merge_short(const struct nbi_merges *m, int32_t *ids, size_t n)
{
    uint32_t rank[SHORT_WORD], joined[SHORT_WORD];
    for (size_t i = 0; i + 1 < n; i++)
        rank_pair(m, ids, i, rank, joined);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == NBI_NO_RANK)
            break;
        ids[best] = (int32_t)joined[best];
        n--;
        size_t tail = n - best - 1; /* ids after the joined pair */
        memmove(ids + best + 1, ids + best + 2, tail * sizeof *ids);
        memmove(rank + best, rank + best + 1, tail * sizeof *rank);
        memmove(joined + best, joined + best + 1, tail * sizeof *joined);
        if (best > 0)
            rank_pair(m, ids, best - 1, rank, joined);
        if (best + 1 < n)
            rank_pair(m, ids, best, rank, joined);
    }
    return n;
}

/* ---- long words ---- */

/* A min-heap of rank << 32 | position. A join does not remove outdated entries; they are skipped
 * when popped, because their rank differs from the current rank at that position. */
static void heap_push(uint64_t *heap, size_t *count, uint64_t entry)
{
    size_t i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > entry; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = entry;
}

static void heap_sink(uint64_t *heap, size_t count, size_t i, uint64_t entry)
{
    for (size_t child; (child = 2 * i + 1) < count; i = child) {
        if (child + 1 < count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= entry)
            break;
        heap[i] = heap[child];
    }
    heap[i] = entry;
}

static uint64_t heap_pop(uint64_t *heap, size_t *count)
{
    uint64_t top = heap[0];
    size_t n = --*count;
    if (n > 0)
        heap_sink(heap, n, 0, heap[n]);
    return top;
}

static enum nb_status grow(struct nbi_merge_scratch *s, size_t n)
{
    if (n <= s->cap)
        return NB_OK;
    if (n >= UINT32_MAX)
        return nbi_fail(NB_EUNSUPPORTED, "a word of more than 4 GiB");
    nbi_merge_scratch_release(s);
    s->rank = malloc(n * sizeof *s->rank);
    s->joined = malloc(n * sizeof *s->joined);
    s->next = malloc(n * sizeof *s->next);
    s->before = malloc(n * sizeof *s->before);
    s->heap = malloc(3 * n * sizeof *s->heap); /* n initially, two pushes for each of n - 1 joins */
    if (!s->rank || !s->joined || !s->next || !s->before || !s->heap) {
        nbi_merge_scratch_release(s);
        return nbi_fail_memory("merging a long word", 40 * n);
    }
    s->cap = n;
    return NB_OK;
}

/* The word as a doubly linked list of tokens; a token is identified by its start position. */
struct list {
    const struct nbi_merges *m;
    struct nbi_merge_scratch *s;
    int32_t *ids;
    uint32_t end; /* one past the last position */
    size_t heaped;
};

static void rank_symbol(struct list *l, uint32_t at)
{
    uint32_t next = l->s->next[at];
    l->s->rank[at] = NBI_NO_RANK;
    if (next == l->end)
        return;
    struct nbi_join j = nbi_merges_find(l->m, (uint32_t)l->ids[at], (uint32_t)l->ids[next]);
    l->s->rank[at] = j.rank;
    l->s->joined[at] = j.id;
}

static void push_symbol(struct list *l, uint32_t at)
{
    rank_symbol(l, at);
    if (l->s->rank[at] != NBI_NO_RANK)
        heap_push(l->s->heap, &l->heaped, (uint64_t)l->s->rank[at] << 32 | at);
}

static void join(struct list *l, uint32_t at)
{
    uint32_t gone = l->s->next[at], after = l->s->next[gone];
    l->ids[at] = (int32_t)l->s->joined[at];
    l->s->next[at] = after;
    if (after != l->end)
        l->s->before[after] = at;
    l->s->rank[gone] = NBI_NO_RANK;
    push_symbol(l, at);
    if (at > 0)
        push_symbol(l, l->s->before[at]);
}

static size_t merge_long(struct list *l)
{
    struct nbi_merge_scratch *s = l->s;
    for (uint32_t i = 0; i < l->end; i++) {
        s->next[i] = i + 1;
        s->before[i] = i - 1;
    }
    for (uint32_t i = 0; i < l->end; i++) {
        rank_symbol(l, i);
        if (s->rank[i] != NBI_NO_RANK)
            s->heap[l->heaped++] = (uint64_t)s->rank[i] << 32 | i;
    }
    for (size_t i = l->heaped / 2; i-- > 0;)
        heap_sink(s->heap, l->heaped, i, s->heap[i]);
    while (l->heaped > 0) {
        uint64_t top = heap_pop(s->heap, &l->heaped);
        if (s->rank[(uint32_t)top] == top >> 32)
            join(l, (uint32_t)top);
    }
    size_t n = 0;
    for (uint32_t i = 0; i < l->end; i = s->next[i])
        l->ids[n++] = l->ids[i];
    return n;
}

enum nb_status nbi_merge(const struct nbi_merges *m, struct nbi_merge_scratch *s, int32_t *ids,
                         size_t n, size_t *left)
{
    if (n <= SHORT_WORD) {
        *left = merge_short(m, ids, n);
        return NB_OK;
    }
    NBI_TRY(grow(s, n));
    struct list l = {m, s, ids, (uint32_t)n, 0};
    *left = merge_long(&l);
    return NB_OK;
}
