/* test_attention.c - attention over a contiguous and a paged KV cache, on the CPU's fastest path
 * and on a GPU, against the scalar CPU code, which defines it. */
#include "ops_lab.h"
#include "stored.h"

static const enum nbi_dtype kv_types[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};

/* ---- rows of a KV cache ---- */

#define MAX_ROWS  200
#define MAX_PAGES 1100

struct attention_case {
    int64_t N, NH, NKV, D, rows, max_keys;
    enum nbi_dtype dtype;
    bool lse, kv_unshared, batch_invariant;
    float *q;
    uint8_t *k, *v;
    int32_t first[MAX_ROWS], last[MAX_ROWS], tables[MAX_ROWS];
    int32_t pages[MAX_PAGES];
    int64_t page_count; /* 0: not paged */
};

/* Fills rows [first, first + count) of the cache. */
static void fill_rows(struct attention_case *c, int64_t first, int64_t count)
{
    int64_t row = c->NKV * c->D;
    for (int64_t i = first * row; i < (first + count) * row; i++) {
        put_as(c->k, c->dtype, i, 2 * uniform());
        put_as(c->v, c->dtype, i, 2 * uniform());
    }
}

/* N tokens after `past` tokens of the same sequence, of one sequence or alternating between two;
 * the second has half of the past. Rows before, between and after the sequences are NaN. */
static void attention_new(struct attention_case *c, int sequences, int64_t past)
{
    int64_t pasts[2] = {past, past / 2}, tokens[2] = {c->N, 0}, at[2] = {0, 0}, start[2];
    if (sequences == 2) {
        tokens[1] = c->N / 2;
        tokens[0] = c->N - tokens[1];
    }
    start[0] = 3;
    start[1] = start[0] + pasts[0] + tokens[0] + 4;
    c->rows = start[1] + pasts[1] + tokens[1] + 5;
    c->max_keys = 0;
    int64_t bytes = (int64_t)nbi_dtype_bytes(c->dtype, c->rows * c->NKV * c->D);
    c->q = random_floats(c->N * c->NH * c->D, 2);
    c->k = zeros(bytes, 1);
    c->v = zeros(bytes, 1);
    memset(c->k, 0xFF, (size_t)bytes);
    memset(c->v, 0xFF, (size_t)bytes);
    for (int i = 0; i < sequences; i++)
        fill_rows(c, start[i], pasts[i] + tokens[i]);
    for (int64_t n = 0; n < c->N; n++) {
        int which = sequences == 2 && n % 2;
        int64_t last = start[which] + pasts[which] + at[which]++, seen = last - start[which] + 1;
        c->first[n] = (int32_t)start[which];
        c->last[n] = (int32_t)last;
        c->max_keys = seen > c->max_keys ? seen : c->max_keys;
    }
}

static void attention_free(struct attention_case *c)
{
    free(c->q);
    free(c->k);
    free(c->v);
}

static void run_attention(struct nbi_backend *be, const struct attention_case *c, bool exact,
                          float *y, float *lse)
{
    struct lab l;
    int64_t q = c->N * c->NH * c->D * 4;
    int64_t bytes = (int64_t)nbi_dtype_bytes(c->dtype, c->rows * c->NKV * c->D);
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = c->N, .K = 16, .D = c->D, .heads = c->NH});
    struct nbi_op_attention op = {.y = block(&l, NULL, q),
                                  .q = block(&l, c->q, q),
                                  .kv = {block(&l, c->k, bytes), block(&l, c->v, bytes), c->dtype},
                                  .first = block(&l, c->first, c->N * 4),
                                  .last = block(&l, c->last, c->N * 4),
                                  .max_keys = c->max_keys,
                                  .N = c->N,
                                  .NH = c->NH,
                                  .NKV = c->NKV,
                                  .D = c->D,
                                  .matmul = exact ? NBI_MATMUL_F32 : NBI_MATMUL_FAST,
                                  .kv_unshared = c->kv_unshared,
                                  .batch_invariant = c->batch_invariant};
    if (c->page_count > 0) {
        op.pages = block(&l, c->pages, c->page_count * 4);
        op.tables = block(&l, c->tables, c->N * 4);
    }
    if (c->lse)
        op.lse = block(&l, NULL, c->N * c->NH * 4);
    assert_ok(be->attention(l.s, &op));
    if (!nbi_backend_has(
            be,
            NBI_CAP_BATCH_INVARIANT)) { /* a second run must not depend on what the first left */
        assert_ok(be->clear(l.s, op.y, q));
        assert_ok(be->attention(l.s, &op));
    }
    fetch(&l, y, op.y, q);
    if (c->lse)
        fetch(&l, lse, op.lse, c->N * c->NH * 4);
    lab_end(&l);
}

static bool always_invariant(void)
{
    return nbi_backend_has(tested, NBI_CAP_BATCH_INVARIANT);
}

/* Against the definition; values are at most 2. Exact, and always on a CPU: f32 rounding. Otherwise
 * q and probabilities have 8 bits of mantissa. */
static void compare_attended(const struct attention_case *c, const float *want,
                             const float *want_lse)
{
    int64_t n = c->N * c->NH * c->D, heads = c->N * c->NH;
    float *is = zeros(n, 4), *is_lse = zeros(heads, 4);
    for (int exact = 1; exact >= always_invariant(); exact--) {
        run_attention(tested, c, exact, is, is_lse);
        close_to(exact ? "exact y" : "y", is, want, n, 0, exact ? 2e-5 : 2e-2);
        close_to(exact ? "exact lse" : "lse", is_lse, want_lse, heads, 0, exact ? 2e-5 : 3e-2);
    }
    free(is);
    free(is_lse);
}

static void check_attended(const struct attention_case *c)
{
    float *want = zeros(c->N * c->NH * c->D, 4), *want_lse = zeros(c->N * c->NH, 4);
    run_attention(scalar, c, true, want, want_lse);
    compare_attended(c, want, want_lse);
    free(want);
    free(want_lse);
}

static void attend(struct attention_case *c, int sequences, int64_t past)
{
    snprintf(where, sizeof where, "%s, N %lld of %d, %lld before, D %lld, %lld and %lld heads",
             nbi_dtypes[c->dtype].name, (long long)c->N, sequences, (long long)past,
             (long long)c->D, (long long)c->NH, (long long)c->NKV);
    attention_new(c, sequences, past);
    check_attended(c);
    attention_free(c);
}

/* All cases, or with sanitizers every third, which still covers each size and each type. */
#define STRIDE (EMULATED ? 17 : SANITIZED ? 3 : 1)

static void check_short(void)
{
    static const int64_t sizes[] = {2, 24, 64, 80, 128}, groups[] = {1, 2, 3, 4, 8};
    static const int64_t counts[] = {1, 3, 17, 64, EMULATED ? 70 : 200},
                         pasts[] = {0, 5, 63, 100, EMULATED ? 130 : 300};
    for (int i = 0; i < 5 * 5 * 5 * 4; i += STRIDE) {
        struct attention_case c = {
            .N = counts[i % 5], .D = sizes[i / 5 % 5], .dtype = kv_types[i / 125]};
        uint32_t dice = bits32();
        int sequences = c.N > 1 && dice % 2 ? 2 : 1;
        int64_t past = pasts[dice / 2 % (c.N > 64 ? 2 : c.N > 17 ? 3 : 5)];
        c.NKV = EMULATED && c.N > 17 ? 1 : 1 + dice / 16 % 2;
        c.NH = c.NKV * groups[EMULATED && c.N > 17 ? i / 25 % 3 : i / 25 % 5];
        c.lse = dice / 64 % 2;
        attend(&c, sequences, past);
    }
}

/* Contexts long enough to be split over CTAs. */
static void check_long(void)
{
    static const struct {
        int64_t N, NH, NKV, D, past;
        int sequences;
    } cases[] = {{1, 16, 8, 128, 4096, 1}, {2, 8, 2, 128, 3001, 2}, {8, 32, 8, 128, 1500, 2},
                 {1, 3, 1, 24, 9000, 1},   {5, 4, 4, 80, 1025, 1},  {33, 8, 2, 64, 700, 2}};
    for (int64_t i = 0; i < COUNT(cases) * 4; i += STRIDE) {
        struct attention_case c = {.N = cases[i / 4].N,
                                   .NH = cases[i / 4].NH,
                                   .NKV = cases[i / 4].NKV,
                                   .D = cases[i / 4].D,
                                   .dtype = kv_types[i % 4],
                                   .lse = i % 2};
        attend(&c, cases[i / 4].sequences, cases[i / 4].past / (EMULATED ? 6 : 1));
    }
}

/* ---- attention over pages ---- */

/* Sequences with a past each; their tokens one sequence after another, or alternating. In `c` each
 * sequence begins at a page boundary; in `p` the same pages are permuted. */
static void paged_new(struct attention_case *c, struct attention_case *p, int64_t sequences,
                      bool alternate)
{
    const int64_t pasts[] = {0, 1, 63, 64, 65, 127, 600, c->N > 7 ? 200 : EMULATED ? 1100 : 9000};
    int64_t start[MAX_ROWS], each[MAX_ROWS] = {0}, at[MAX_ROWS] = {0}, pages = 2,
                             page[MAX_PAGES] = {0};
    for (int64_t n = 0; n < c->N; n++)
        each[alternate ? n % sequences : n * sequences / c->N]++;
    for (int64_t i = 0; i < sequences; i++) {
        at[i] = pasts[bits32() % 8];
        start[i] = pages;
        pages += (at[i] + each[i] + NBI_PAGE - 1) / NBI_PAGE;
    }
    assert_true(pages <= MAX_PAGES);
    c->rows = pages * NBI_PAGE;
    int64_t bytes = (int64_t)nbi_dtype_bytes(c->dtype, c->rows * c->NKV * c->D),
            one = bytes / pages;
    c->q = random_floats(c->N * c->NH * c->D, 2);
    c->k = memset(zeros(bytes, 1), 0xFF, (size_t)bytes);
    c->v = memset(zeros(bytes, 1), 0xFF, (size_t)bytes);
    *p = *c;
    for (int64_t i = 0; i < sequences; i++)
        fill_rows(c, start[i] * NBI_PAGE, at[i] + each[i]);
    for (int64_t i = 0; i < pages; i++) { /* a permutation */
        int64_t j = bits32() % (i + 1);
        page[i] = page[j];
        page[j] = i;
    }
    p->page_count = pages;
    p->k = zeros(bytes, 1);
    p->v = zeros(bytes, 1);
    for (int64_t i = 0; i < pages; i++) {
        p->pages[i] = (int32_t)page[i];
        memcpy(p->k + page[i] * one, c->k + i * one, (size_t)one);
        memcpy(p->v + page[i] * one, c->v + i * one, (size_t)one);
    }
    for (int64_t n = 0; n < c->N; n++) {
        int64_t i = alternate ? n % sequences : n * sequences / c->N;
        p->first[n] = 0;
        p->last[n] = (int32_t)at[i]++;
        p->tables[n] = (int32_t)start[i];
        c->first[n] = (int32_t)(start[i] * NBI_PAGE);
        c->last[n] = c->first[n] + p->last[n];
        c->max_keys = at[i] > c->max_keys ? at[i] : c->max_keys;
    }
    p->max_keys = c->max_keys;
}

/* Paging must not change a bit on the CPU. A row must not depend on the other rows; on a GPU, if
 * batch_invariant is set and N is small enough. */
static void check_pages(struct attention_case *c, int64_t sequences, bool alternate)
{
    struct attention_case p, *one = zeros(1, sizeof *one);
    int64_t row = c->NH * c->D, n = c->N * row;
    float *a = zeros(n, 4), *b = zeros(n, 4), *lse = zeros(c->N * c->NH, 4);
    paged_new(c, &p, sequences, alternate);
    p.q = c->q;
    run_attention(scalar, c, true, a, lse);
    run_attention(scalar, &p, true, b, lse);
    same_bytes("the definition's y", b, a, n * 4);
    compare_attended(&p, b, lse);
    for (int exact = always_invariant(); exact < 2; exact++) {
        run_attention(tested, c, exact, a, lse);
        run_attention(tested, &p, exact, b, lse);
        if (always_invariant())
            same_bytes("y", b, a, n * 4);
        if (!always_invariant() && c->N > tested->batch_invariant_rows)
            continue;
        p.batch_invariant = true;
        run_attention(tested, &p, exact, b, lse);
        for (int64_t i = 0; i < c->N; i += 1 + c->N / (EMULATED ? 2 : 7)) {
            *one = p;
            one->N = 1;
            one->q = p.q + i * row;
            one->last[0] = p.last[i];
            one->tables[0] = p.tables[i];
            one->max_keys = p.last[i] + 1;
            run_attention(tested, one, exact, a, lse);
            same_bytes("y of one alone", b + i * row, a, row * 4);
        }
        p.batch_invariant = false;
    }
    p.q = NULL;
    attention_free(c);
    attention_free(&p);
    void *all[] = {one, a, b, lse};
    for (int64_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void check_paged(void)
{
    static const int64_t sizes[] = {64, 128, 80}, counts[] = {1, 7, 64, 100},
                         groups[] = {2, 8, 1, 4};
    for (int i = 0; i < 3 * 4 * 4; i += STRIDE) {
        uint32_t dice = bits32();
        struct attention_case c = {.N = counts[i % 4],
                                   .D = sizes[i / 4 % 3],
                                   .dtype = kv_types[i / 12],
                                   .NKV = 1 + dice % 2,
                                   .lse = dice / 2 % 2};
        int64_t sequences = 1 + dice / 4 % (c.N < 20 ? c.N : 20);
        c.NH = c.NKV * groups[dice / 128 % 4];
        c.kv_unshared = sequences > 5;
        snprintf(where, sizeof where, "%s, N %lld of %lld, D %lld, %lld and %lld heads, pages",
                 nbi_dtypes[c.dtype].name, (long long)c.N, (long long)sequences, (long long)c.D,
                 (long long)c.NH, (long long)c.NKV);
        check_pages(&c, sequences, c.kv_unshared || dice / 512 % 2);
    }
}

/* ---- all of them, on both ---- */

#define CHECKS(X)                                                                                  \
    X(short)                                                                                       \
    X(long)                                                                                        \
    X(paged)

#define X(check) TEST_ON_BOTH(attention, check)
CHECKS(X)
#undef X

int main(void)
{
    const struct CMUnitTest tests[] = {
#define X(check) ON_BOTH(attention, check)
        CHECKS(X)
#undef X
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
