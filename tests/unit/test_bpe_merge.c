/* test_bpe_merge.c - compares the merges of one word with the definition: search a plain list for
 * the pair with the lowest rank, join it, repeat. */
#include "tokenizer/bpe_merge.h"
#include "unit/support.h"

static uint64_t seed = 1;

static uint32_t next_random(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

/* ---- the reference ---- */

struct rules {
    struct nbi_pair pair[400];
    int count;
    int32_t symbols[8]; /* alphabet of the words */
    uint32_t symbol_count;
};

static const struct nbi_pair *rule_for(const struct rules *r, int32_t left, int32_t right)
{
    for (int i = 0; i < r->count; i++)
        if (r->pair[i].left == (uint32_t)left && r->pair[i].right == (uint32_t)right)
            return &r->pair[i];
    return NULL;
}

static size_t merge_slowly(const struct rules *r, int32_t *ids, size_t n)
{
    for (;;) {
        const struct nbi_pair *best = NULL;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            const struct nbi_pair *p = rule_for(r, ids[i], ids[i + 1]);
            if (p && (!best || p->rank < best->rank)) {
                best = p;
                at = i;
            }
        }
        if (!best)
            return n;
        ids[at] = (int32_t)best->id;
        for (size_t i = at + 1; i + 1 < n; i++)
            ids[i] = ids[i + 1];
        n--;
    }
}

/* Makes random pairs of symbols and of results of other pairs, with ranks in any order. Callers
 * choose ids below and above 256, the limit of the direct table. */
static void random_rules(struct rules *r, int count, uint32_t symbol_count, int32_t first,
                         int32_t stride)
{
    int32_t known[408];
    uint32_t ranks[400];
    r->count = 0;
    r->symbol_count = symbol_count;
    for (uint32_t i = 0; i < symbol_count; i++)
        known[i] = r->symbols[i] = first + (int32_t)i * stride;
    for (int i = 0; i < count; i++)
        ranks[i] = (uint32_t)i;
    for (uint32_t i = (uint32_t)count; i > 1 && next_random(2);
         i--) { /* shuffles half of the time */
        uint32_t k = next_random(i), t = ranks[i - 1];
        ranks[i - 1] = ranks[k];
        ranks[k] = t;
    }
    uint32_t n = symbol_count;
    for (int i = 0; i < count; i++) {
        int32_t left = known[next_random(n)], right = known[next_random(n)];
        if (rule_for(r, left, right))
            continue;
        int32_t id = next_random(8) ? first + (int32_t)n * stride : known[next_random(n)];
        r->pair[r->count++] =
            (struct nbi_pair){(uint32_t)left, (uint32_t)right, ranks[i], (uint32_t)id};
        if (id == first + (int32_t)n * stride)
            known[n++] = id;
    }
}

static void make_table(struct nbi_merges *m, const struct rules *r)
{
    assert_ok(nbi_merges_init(m, (size_t)r->count));
    for (int i = 0; i < r->count; i++)
        nbi_merges_add(m, r->pair[i]);
}

static void compare_word(const struct nbi_merges *m, struct nbi_merge_scratch *s,
                         const struct rules *r, size_t n)
{
    int32_t *ours = malloc((n ? n : 1) * sizeof *ours), *theirs = malloc((n + 1) * sizeof *theirs);
    size_t left = 99;
    uint32_t run = 1 + next_random(4); /* runs of one symbol: overlapping pairs */
    for (size_t i = 0; i < n; i++)
        ours[i] =
            i > 0 && next_random(run) ? ours[i - 1] : r->symbols[next_random(r->symbol_count)];
    memcpy(theirs, ours, n * sizeof *ours);
    assert_ok(nbi_merge(m, s, ours, n, &left));
    size_t wanted = merge_slowly(r, theirs, n);
    if (left != wanted || memcmp(ours, theirs, left * sizeof *ours) != 0)
        fail_msg("a word of %zu: %zu ids, %zu expected", n, left, wanted);
    free(ours);
    free(theirs);
}

/* ---- words ---- */

static void compare_rules(const struct rules *r, const size_t *lengths, size_t count, int repeats)
{
    struct nbi_merges m;
    struct nbi_merge_scratch scratch = {0};
    make_table(&m, r);
    for (size_t i = 0; i < count; i++)
        for (int k = 0; k < repeats; k++)
            compare_word(&m, &scratch, r, lengths[i]);
    nbi_merge_scratch_release(&scratch);
    nbi_merges_release(&m);
}

static void test_merge__matches_the_definition(void **state)
{
    (void)state;
    size_t lengths[80];
    for (size_t i = 0; i < 80; i++)
        lengths[i] = i;
    static const int32_t first[][2] = {{0, 1}, {250, 1}, {1000, 7}, {4000000, 131}, {255, 0x10000}};
    for (int round = 0; round < 40; round++) {
        struct rules r;
        random_rules(&r, 1 + (int)next_random(60), 1 + next_random(4), first[round % 5][0],
                     first[round % 5][1]);
        compare_rules(&r, lengths, 80, 2);
    }
}

static void test_merge__words_of_the_threshold_length_match_the_definition(void **state)
{
    (void)state;
    static const size_t lengths[] = {62, 63, 64, 65, 66, 67, 127, 128, 129};
    for (int round = 0; round < 60; round++) {
        struct rules r;
        random_rules(&r, 40, 1 + next_random(3), round % 2 ? 0 : 300, 1);
        compare_rules(&r, lengths, sizeof lengths / sizeof *lengths, 2);
    }
}

static void test_merge__long_words_match_the_definition(void **state)
{
    (void)state;
    static const size_t lengths[] = {1000, 300, 1001, 64, 700}; /* the scratch memory grows and
                                                                   is reused */
    for (int round = 0; round < 6; round++) {
        struct rules r;
        random_rules(&r, 30, 1 + next_random(3), 250, 1);
        compare_rules(&r, lengths, sizeof lengths / sizeof *lengths, 1);
    }
}

/* Merges a a -> b, b b -> c, ...: a run of n becomes the binary digits of n, highest first. */
static void test_merge__runs_become_powers_of_two(void **state)
{
    (void)state;
    struct rules r = {.symbols = {10}, .symbol_count = 1};
    struct nbi_merges m;
    struct nbi_merge_scratch scratch = {0};
    for (uint32_t i = 0; i < 20; i++)
        r.pair[r.count++] = (struct nbi_pair){10 + i, 10 + i, i, 11 + i};
    make_table(&m, &r);
    static const size_t lengths[] = {1, 2, 3, 31, 64, 65, 1023, 100000};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        size_t n = lengths[i], left, at = 0;
        int32_t *ids = malloc(n * sizeof *ids);
        for (size_t k = 0; k < n; k++)
            ids[k] = 10;
        assert_ok(nbi_merge(&m, &scratch, ids, n, &left));
        for (int bit = 19; bit >= 0; bit--)
            if (n >> bit & 1) {
                assert_true(at < left);
                assert_int_equal(ids[at++], 10 + bit);
            }
        assert_int_equal(left, at);
        free(ids);
    }
    nbi_merge_scratch_release(&scratch);
    nbi_merges_release(&m);
}

/* ---- the table ---- */

static void test_merges__find_what_was_added(void **state)
{
    (void)state;
    enum { COUNT = 100000 };
    struct nbi_merges m;
    struct nbi_pair *pairs = malloc(COUNT * sizeof *pairs);
    assert_ok(nbi_merges_init(&m, COUNT));
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t width = i % 3 == 0 ? 256 : i % 3 == 1 ? 5000 : 4000000;
        pairs[i] = (struct nbi_pair){next_random(width), next_random(width), i, i + 7};
        nbi_merges_add(&m, pairs[i]);
    }
    for (uint32_t i = 0; i < COUNT;
         i++) { /* ranks are indices in the list; of equal pairs the last wins */
        struct nbi_join j = nbi_merges_find(&m, pairs[i].left, pairs[i].right);
        assert_true(j.rank >= i && j.rank < COUNT);
        assert_int_equal(j.id, j.rank + 7);
        assert_int_equal(pairs[j.rank].left, pairs[i].left);
        assert_int_equal(pairs[j.rank].right, pairs[i].right);
    }
    /* Absent pairs: the two ids swapped, unless that pair was added too. */
    int absent = 0;
    for (uint32_t i = 0; i < COUNT; i++)
        if (pairs[i].left > 4096)
            absent += nbi_merges_find(&m, pairs[i].right, pairs[i].left).rank == NBI_NO_RANK;
    assert_true(absent > 30000);
    nbi_merges_release(&m);
    nbi_merges_release(&m); /* releasing twice is allowed */
    free(pairs);
}

static void test_merges__may_be_empty(void **state)
{
    (void)state;
    struct nbi_merges m;
    struct nbi_merge_scratch scratch = {0};
    size_t left;
    int32_t ids[100] = {0};
    assert_ok(nbi_merges_init(&m, 0));
    for (int i = 0; i < 100; i++)
        ids[i] = i * 1000;
    assert_int_equal(nbi_merges_find(&m, 0, 0).rank, NBI_NO_RANK);
    assert_int_equal(nbi_merges_find(&m, 5000, 1).rank, NBI_NO_RANK);
    static const size_t lengths[] = {0, 1, 2, 64, 65, 100};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        assert_ok(nbi_merge(&m, &scratch, ids, lengths[i], &left));
        assert_int_equal(left, lengths[i]);
    }
    for (int i = 0; i < 100; i++)
        assert_int_equal(ids[i], i * 1000);
    nbi_merge_scratch_release(&scratch);
    nbi_merges_release(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge__matches_the_definition),
        cmocka_unit_test(test_merge__words_of_the_threshold_length_match_the_definition),
        cmocka_unit_test(test_merge__long_words_match_the_definition),
        cmocka_unit_test(test_merge__runs_become_powers_of_two),
        cmocka_unit_test(test_merges__find_what_was_added),
        cmocka_unit_test(test_merges__may_be_empty),
    };
    return cmocka_run_group_tests_name("bpe_merge", tests, NULL, NULL);
}
