/* cases_attention.c - attention over a KV cache and over the documents of a training batch, and its
 * gradients. */
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "check/kernel_cases.h"

#define ROWS_MAX  256
#define PAGES_MAX 64
#define HEADS_MAX 8

/* Queries and probabilities with 8 bits of mantissa: their errors are 2^-9 at most, those of a
 * result add up as squares, and the largest of some ten thousand results is ten times 2^-9. */
#define ROUNDED_SCORES (10 * 0x1p-9)

/* In bf16, tensor cores take probabilities and ds rounded, and then the result is: three times a
 * rounding, whose squares add up, and twice that. */
#define THREE_ROUNDINGS 3.5

/* ---- over a KV cache ---- */

/* `past` tokens come before the N rows of a sequence; the rows alternate between the sequences. */
static const char cache_shapes_letters[] = "N NH NKV D past sequences";
static const int64_t cache_shapes[][NBI_CASE_DIMS] = {{1, 4, 2, 128, 0, 1},
                                                      {1, 8, 2, 64, 700, 1},
                                                      {5, 3, 1, 128, 61, 2},
                                                      {33, 8, 2, 64, 7, 3},
                                                      {70, 4, 4, 128, 3, 2}};
static const char odd_heads_letters[] = "N NH NKV D past sequences";
static const int64_t odd_heads[][NBI_CASE_DIMS] = {
    {1, 3, 1, 24, 900, 1}, {9, 4, 4, 80, 65, 2}, {70, 2, 1, 40, 3, 2}};

struct cache_rows {
    int32_t first[ROWS_MAX], last[ROWS_MAX], tables[ROWS_MAX], pages[PAGES_MAX];
    int64_t page_count, rows, max_keys;
};

/* Each sequence has whole pages; the pages of a paged cache are in reverse order. */
static void lay_out(const struct nbi_kernel_run *r, struct cache_rows *c)
{
    int64_t N = r->shape[0], past = r->shape[4], sequences = r->shape[5],
            each = (past + (N + sequences - 1) / sequences + NBI_PAGE - 1) / NBI_PAGE;
    c->page_count = each * sequences;
    c->rows = c->page_count * NBI_PAGE;
    c->max_keys = past + (N + sequences - 1) / sequences;
    NBI_BUG_IF(N > ROWS_MAX || c->page_count > PAGES_MAX);
    for (int64_t i = 0; i < c->page_count; i++)
        c->pages[i] = (int32_t)(c->page_count - 1 - i);
    for (int64_t n = 0; n < N; n++) {
        int64_t start = n % sequences * each, last = past + n / sequences;
        c->tables[n] = (int32_t)start;
        c->first[n] = r->c->paged ? 0 : (int32_t)(start * NBI_PAGE);
        c->last[n] = c->first[n] + (int32_t)last;
    }
}

static enum nb_status attention(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], NH = r->shape[1], NKV = r->shape[2], D = r->shape[3];
    struct cache_rows c;
    lay_out(r, &c);
    struct nbi_op_attention op = {.y = nbi_run_out_rows(r, "y", N, NH * D, 0),
                                  .lse = nbi_run_out_floats(r, "lse", N * NH),
                                  .q = nbi_run_rows(r, N, NH * D, 0, 2),
                                  .kv = {nbi_run_values(r, c.rows * NKV * D, 2),
                                         nbi_run_values(r, c.rows * NKV * D, 2), nbi_run_dtype(r)},
                                  .first = nbi_run_ints(r, c.first, N),
                                  .last = nbi_run_ints(r, c.last, N),
                                  .max_keys = c.max_keys,
                                  .N = N,
                                  .NH = NH,
                                  .NKV = NKV,
                                  .D = D,
                                  .matmul = r->reference ? NBI_MATMUL_F32 : r->c->matmul,
                                  .kv_unshared = r->c->strided,
                                  .batch_invariant = r->c->invariant};
    if (r->c->paged) {
        op.pages = nbi_run_ints(r, c.pages, c.page_count);
        op.tables = nbi_run_ints(r, c.tables, N);
    }
    NBI_TRY(r->rc);
    return r->be->attention(r->s, &op);
}

/* ---- over documents ---- */

/* Documents of one token, of a few, and one of all the rest. */
static const char document_shapes_letters[] = "N NH NKV D";
static const int64_t document_shapes[][NBI_CASE_DIMS] = {
    {1, 2, 1, 64}, {37, 4, 2, 64}, {70, 2, 2, 128}, {21, 3, 1, 24}};

struct documents {
    int32_t first[ROWS_MAX], last[ROWS_MAX], end[ROWS_MAX];
};

static void divide(int64_t N, struct documents *d)
{
    static const int64_t lengths[] = {1, 5, 1, 2};
    int64_t n = 0;
    NBI_BUG_IF(N > ROWS_MAX);
    for (int i = 0; n < N; i++) {
        int64_t length = i < 4 ? lengths[i] : N - n, begin = n;
        for (; n < N && n < begin + length; n++) {
            d->first[n] = (int32_t)begin;
            d->last[n] = (int32_t)n;
            d->end[n] = (int32_t)((begin + length < N ? begin + length : N) - 1);
        }
    }
}

static enum nb_status attention_train(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], NH = r->shape[1], NKV = r->shape[2], D = r->shape[3];
    struct documents d;
    divide(N, &d);
    const struct nbi_op_attention op = {.y = nbi_run_out_rows(r, "y", N, NH * D, 0),
                                        .lse = nbi_run_out_floats(r, "lse", N * NH),
                                        .q = nbi_run_rows(r, N, NH * D, 0, 2),
                                        .kv = {nbi_run_rows(r, N, NKV * D, 0, 2),
                                               nbi_run_rows(r, N, NKV * D, 0, 1), nbi_run_acts(r)},
                                        .first = nbi_run_ints(r, d.first, N),
                                        .last = nbi_run_ints(r, d.last, N),
                                        .max_keys = N,
                                        .N = N,
                                        .NH = NH,
                                        .NKV = NKV,
                                        .D = D,
                                        .matmul = r->c->bf16 && !r->reference ? NBI_MATMUL_FAST
                                                                              : NBI_MATMUL_F32,
                                        .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->attention(r->s, &op);
}

/* y and lse are random: the gradients are defined for any. */
static enum nb_status attention_bwd(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], NH = r->shape[1], NKV = r->shape[2], D = r->shape[3],
            ld = r->c->strided ? (NH + 2 * NKV) * D + 8 : 0;
    struct documents d;
    float lse[ROWS_MAX * HEADS_MAX];
    divide(N, &d);
    for (int64_t i = 0; i < N * NH; i++)
        lse[i] = 4 + nbi_run_uniform(r);
    const struct nbi_op_attention_bwd op = {
        .dq = nbi_run_out_rows(r, "dq", N, NH * D, ld),
        .dk = nbi_run_out_rows(r, "dk", N, NKV * D, ld),
        .dv = nbi_run_out_rows(r, "dv", N, NKV * D, ld),
        .dy = nbi_run_rows(r, N, NH * D, 0, 1),
        .y = nbi_run_rows(r, N, NH * D, 0, 1),
        .lse = nbi_run_bytes(r, lse, N * NH * (int64_t)sizeof *lse),
        .q = nbi_run_rows(r, N, NH * D, 0, 2),
        .kv = {nbi_run_rows(r, N, NKV * D, 0, 2), nbi_run_rows(r, N, NKV * D, 0, 1),
               nbi_run_acts(r)},
        .first = nbi_run_ints(r, d.first, N),
        .end = nbi_run_ints(r, d.end, N),
        .N = N,
        .NH = NH,
        .NKV = NKV,
        .D = D,
        .ld = ld,
        .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->attention_bwd(r->s, &op);
}

/* ---- the table ---- */

#define FAST  .matmul = NBI_MATMUL_FAST, .bound = ROUNDED_SCORES
#define EXACT .matmul = NBI_MATMUL_F32

static const struct nbi_kernel_case cases[] = {
    {"attention", "kv f32, f32", attention, NBI_SHAPES(cache_shapes), .dtype = NBI_F32, EXACT},
    {"attention", "kv f16, f32, pages", attention, NBI_SHAPES(cache_shapes), .dtype = NBI_F16,
     EXACT, .paged = true},
    {"attention", "kv f32, fast", attention, NBI_SHAPES(cache_shapes), .dtype = NBI_F32, FAST},
    {"attention", "kv f16, fast", attention, NBI_SHAPES(cache_shapes), .dtype = NBI_F16, FAST},
    {"attention", "kv f16, fast, pages", attention, NBI_SHAPES(cache_shapes), .dtype = NBI_F16,
     FAST, .paged = true},
    {"attention", "kv bf16, fast", attention, NBI_SHAPES(cache_shapes), .dtype = NBI_BF16, FAST},
    {"attention", "kv f8, fast", attention, NBI_SHAPES(cache_shapes), .dtype = NBI_E4M3, FAST},
    {"attention", "kv f8, fast, pages, unshared", attention, NBI_SHAPES(cache_shapes),
     .dtype = NBI_E4M3, FAST, .paged = true, .strided = true},
    {"attention", "kv f16, fast, batch-invariant", attention, NBI_SHAPES(cache_shapes),
     .dtype = NBI_F16, FAST, .invariant = true, .paged = true},
    {"attention", "kv f8, odd heads", attention, NBI_SHAPES(odd_heads), .dtype = NBI_E4M3, EXACT},
    {"attention", "kv bf16, odd heads, fast", attention, NBI_SHAPES(odd_heads), .dtype = NBI_BF16,
     FAST},
    {"attention", "f32, documents", attention_train, NBI_SHAPES(document_shapes), EXACT,
     NBI_TRAINING},
    {"attention", "bf16, documents", attention_train, NBI_SHAPES(document_shapes),
     .roundings = THREE_ROUNDINGS, NBI_TRAIN_BF16},
    {"attention_bwd", "f32", attention_bwd, NBI_SHAPES(document_shapes), .by_norm = true,
     NBI_TRAINING},
    {"attention_bwd", "bf16", attention_bwd, NBI_SHAPES(document_shapes),
     .roundings = THREE_ROUNDINGS, NBI_TRAIN_BF16},
    {"attention_bwd", "bf16, rows apart", attention_bwd, NBI_SHAPES(document_shapes),
     .strided = true, .roundings = THREE_ROUNDINGS, NBI_TRAIN_BF16},
};

const struct nbi_kernel_cases nbi_cases_attention = {cases, NBI_COUNT_OF(cases)};
