/* attention.c - attention and its gradients on the CPU.
 *
 * Backward, with s = q k / sqrt(D), p = e^(s - lse), dp = dy v and delta = dy y:
 *   ds = p (dp - delta) / sqrt(D);  dq = sum over keys of ds k;
 *   dk = sum over queries of ds q;  dv = sum over queries of p dy.
 * Two passes compute s and dp in blocks of queries by keys: the first owns blocks of queries and
 * sums dq, the second owns blocks of keys and sums dk and dv. That is 7 products where 5 would do,
 * but threads share no sum, so results do not depend on their number. The owned side is transposed
 * once for all products. */
#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"

/* ---- forward ---- */

/* Query rows per task, which read their keys once for all of them: as many as a kernel takes, but
 * few enough for four tasks per thread. */
static int64_t rows_per_block(const struct nbi_stream *s, const struct nbi_op_attention *a)
{
    int64_t limit = NBI_QUERY_BLOCK / (a->NH / a->NKV),
            fair = a->N * a->NKV / (s->cpu->threads * 4);
    return fair < 1 ? 1 : min(fair, limit);
}

/* The number of rows from n on, before end, that start at the same key and of which none sees fewer
 * keys than the row before. */
static int64_t shared_run(const struct nbi_op_attention *a, int64_t n, int64_t end)
{
    const int32_t *first = host(a->first), *last = host(a->last), *tables = host(a->tables);
    int64_t i = n + 1;
    while (i < end && first[i] == first[n] && last[i] >= last[i - 1] &&
           (!a->pages.at || tables[i] == tables[n]))
        i++;
    return i - n;
}

/* The kernel takes q and y as rows of f32; in bf16 they are converted on the way. `of` is the
 * element at which the tile's first row begins. */
static void attend(const struct op *op, int thread, struct nbi_attention_tile *tile, int64_t of)
{
    const struct nbi_op_attention *a = op->args;
    const struct nbi_stream *s = op->s;
    int64_t row = a->NH * a->D, n = tile->heads * a->D;
    float *scratch = s->attention_scratch + thread * s->attention_floats;
    float *q = scratch + nbi_attention_floats(a->D), *y = q + NBI_QUERY_BLOCK * a->D;
    tile->scratch = scratch;
    tile->q = act_out(q, a->q, a->bf16, of);
    tile->y = act_out(y, a->y, a->bf16, of);
    tile->ldq = a->bf16 ? n : row;
    for (int r = 0; r < tile->rows && a->bf16; r++)
        act_load(s, q + r * n, a->q, true, of + r * row, n);
    s->cpu->k->attention(tile);
    for (int r = 0; r < tile->rows && a->bf16; r++)
        act_store(s, a->y, true, of + r * row, y + r * n, n);
}

/* Task u: key/value head u % NKV for one group of rows. The last rows come first: in a causal pass
 * they see the most keys, and would otherwise be what the other threads wait for. */
static void attention_blocks(void *ctx, int thread, int64_t task, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_attention *a = op->args;
    struct nbi_stream *s = op->s;
    const int32_t *first = host(a->first), *last = host(a->last);
    const int32_t *pages = host(a->pages), *tables = host(a->tables);
    int64_t D = a->D, heads = a->NH / a->NKV, per_block = rows_per_block(s, a);
    int64_t row = (int64_t)nbi_dtype_bytes(a->kv.dtype, a->NKV * D);
    int64_t groups = ceil_div(a->N, per_block);
    for (int64_t u = task; u < task + count; u++) {
        int64_t n = (groups - 1 - u / a->NKV) * per_block, h = u % a->NKV, rows;
        int64_t end = min(a->N, n + per_block);
        for (; n < end; n += rows) {
            rows = shared_run(a, n, end);
            int64_t at =
                (pages ? 0 : first[n] * row) + h * (int64_t)nbi_dtype_bytes(a->kv.dtype, D);
            int64_t out = n * a->NH + h * heads;
            struct nbi_attention_tile tile = {
                .lse = a->lse.at ? (float *)host(a->lse) + out : NULL,
                .k = (const uint8_t *)host(a->kv.k) + at,
                .v = (const uint8_t *)host(a->kv.v) + at,
                .pages = pages ? pages + tables[n] + first[n] / NBI_PAGE : NULL,
                .last = last + n,
                .first = first[n],
                .stride = row,
                .ld_lse = a->NH,
                .dtype = a->kv.dtype,
                .rows = (int)rows,
                .heads = (int)heads,
                .D = D};
            attend(op, thread, &tile, out * D);
        }
    }
}

enum nb_status nbi_cpu_attention(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    const int32_t *first = host(a->first), *last = host(a->last);
    int64_t per_block = rows_per_block(s, a), work = 0;
    int64_t tasks = ceil_div(a->N, per_block) * a->NKV;
    NBI_BUG_IF(a->bf16 && !s->limits.bf16);
    for (int64_t n = 0; n < a->N; n++)
        work += (last[n] - first[n] + 1) * a->NH * a->D;
    parallel_for(s, tasks, work / tasks, attention_blocks, a);
    return NB_OK;
}

/* ---- backward ---- */

#define BLOCK 96 /* a multiple of mr and nr of every gemm_tile */

static int64_t padded(int64_t D)
{
    return (D + 31) / 32 * 32;
}

int64_t nbi_attention_bwd_floats(int64_t D)
{
    return BLOCK * (6 * padded(D) + 2 * BLOCK + 2);
}

/* The scratch of one thread. */
struct scratch {
    const struct nbi_op_attention_bwd *a;
    const struct nbi_microkernels *k;
    int64_t ld;                     /* columns of copies and sums: D, padded */
    float *transposed[2], *copy[2]; /* [D, BLOCK], [BLOCK, ld] */
    float *sum[2];                  /* [BLOCK, ld] */
    float *p, *ds;                  /* [BLOCK, BLOCK] */
    float *lse, *delta;             /* [BLOCK] */
};

static struct scratch thread_scratch(const struct op *op, int thread)
{
    struct scratch w = {.a = op->args, .k = op->s->cpu->k};
    float *at = op->s->attention_bwd_scratch + thread * nbi_attention_bwd_floats(op->s->limits.D);
    w.ld = padded(w.a->D);
    for (int i = 0; i < 2; i++) {
        w.transposed[i] = at + (3 * i) * BLOCK * w.ld;
        w.copy[i] = at + (3 * i + 1) * BLOCK * w.ld;
        w.sum[i] = at + (3 * i + 2) * BLOCK * w.ld;
    }
    w.p = at + 6 * BLOCK * w.ld;
    w.ds = w.p + BLOCK * BLOCK;
    w.lse = w.ds + BLOCK * BLOCK;
    w.delta = w.lse + BLOCK;
    return w;
}

/* Rows of one head, ld elements apart. */
struct rows {
    const void *p;
    int64_t ld;
    bool bf16; /* else f32 */
};

/* Copies n rows into a dense block, padded with zeros in both directions. Rows in place are a
 * multiple of NH * D floats apart, often of a page, and would evict each other from the cache. */
static const float *gather(const struct scratch *w, int which, struct rows x, int64_t n)
{
    float *y = w->copy[which];
    if (n < BLOCK || w->a->D < w->ld)
        memset(y, 0, (size_t)(BLOCK * w->ld) * sizeof *y);
    for (int64_t i = 0; i < n; i++)
        if (x.bf16)
            w->k->to_f32(y + i * w->ld, (const uint16_t *)x.p + i * x.ld, NBI_BF16, w->a->D);
        else
            memcpy(y + i * w->ld, (const float *)x.p + i * x.ld, (size_t)w->a->D * sizeof *y);
    return y;
}

/* Column i of transposed[which] becomes row i of x, for i < n; other columns become 0. Rows in bf16
 * go through copy[which]. */
static void transpose(const struct scratch *w, int which, struct rows x, int64_t n)
{
    float *y = w->transposed[which];
    if (n < BLOCK)
        memset(y, 0, (size_t)(BLOCK * w->a->D) * sizeof *y);
    if (x.bf16)
        x = (struct rows){gather(w, which, x, n), w->ld, false};
    w->k->pack(y, BLOCK, x.p, (struct nbi_strided){n, w->a->D, x.ld, 1}, 1);
}

/* Which part of a block of scores the causal mask leaves: all of it, or in a block on the diagonal
 * the part on and above it (rows are keys) or on and below it (rows are queries). */
enum triangle { ALL, UPPER, LOWER };

/* c [BLOCK, BLOCK] = x transposed[which]; tiles outside `tri` are skipped. */
static void scores(const struct scratch *w, float *c, const float *x, int which, enum triangle tri)
{
    int mr = w->k->mr, nr = w->k->nr;
    struct nbi_gemm_tile t = {.ldc = BLOCK, .a_row = w->ld, .a_col = 1, .ldb = BLOCK, .k = w->a->D};
    for (int64_t n = 0; n < BLOCK; n += nr)
        for (int64_t m = 0; m < BLOCK; m += mr) {
            if ((tri == UPPER && m >= n + nr) || (tri == LOWER && n >= m + mr))
                continue;
            t.c = c + m * BLOCK + n;
            t.a = x + m * w->ld;
            t.b = w->transposed[which] + n;
            w->k->gemm_tile(&t);
        }
}

/* sum[which] [BLOCK, ld] += c^T x, over `rows` rows of c and x. */
static void add_weighted(const struct scratch *w, int which, const float *c, const float *x,
                         int64_t rows, enum triangle tri)
{
    int mr = w->k->mr, nr = w->k->nr;
    struct nbi_gemm_tile t = {.ldc = w->ld, .a_row = 1, .a_col = BLOCK, .ldb = w->ld, .add = true};
    for (int64_t m = 0; m < BLOCK; m += mr) {
        int64_t from = tri == LOWER ? m : 0;
        int64_t to = tri == UPPER && m + mr < rows ? m + mr : rows;
        t.k = to - from;
        for (int64_t n = 0; n < w->ld && t.k > 0; n += nr) {
            t.c = w->sum[which] + m * w->ld + n;
            t.a = c + from * BLOCK + m;
            t.b = x + from * w->ld + n;
            w->k->gemm_tile(&t);
        }
    }
}

/* Writes n rows of sum[which], from row `row` of y on, to one of the `heads` heads. */
static void store_sum(const struct scratch *w, int which, struct nbi_ptr y, int64_t row, int64_t n,
                      int64_t heads, int64_t head)
{
    int64_t D = w->a->D, ld = stride(w->a->ld, heads * D);
    for (int64_t i = 0; i < n; i++)
        w->k->from_f32(act_at(y, w->a->bf16, (row + i) * ld + head * D),
                       w->a->bf16 ? NBI_BF16 : NBI_F32, w->sum[which] + i * w->ld, D);
}

static int64_t block_rows(const struct scratch *w, int64_t first)
{
    return min(w->a->N - first, BLOCK);
}

/* Rows from `row` on of one head of q or dy, or of k or v. */
static struct rows query_head(const struct nbi_op_attention_bwd *a, struct nbi_ptr p, int64_t row,
                              int64_t head)
{
    return (struct rows){act_at(p, a->bf16, (row * a->NH + head) * a->D), a->NH * a->D, a->bf16};
}

static struct rows key_head(const struct nbi_op_attention_bwd *a, struct nbi_ptr p, int64_t row,
                            int64_t head)
{
    bool bf16 = a->kv.dtype == NBI_BF16;
    return (struct rows){act_at(p, bf16, (row * a->NKV + head) * a->D), a->NKV * a->D, bf16};
}

/* ---- the first pass: dq ---- */

/* p and ds, both [key, query], for the queries from q0 on and the keys from k0 on; masked keys get
 * ds = 0. */
static void ds_by_key(const struct scratch *w, int64_t q0, int64_t k0)
{
    const int32_t *first = (const int32_t *)host(w->a->first) + q0;
    int64_t queries = block_rows(w, q0), keys = block_rows(w, k0);
    struct nbi_softmax_bwd softmax = {.lse = w->lse,
                                      .delta = w->delta,
                                      .each = true,
                                      .scale = 1 / sqrtf((float)w->a->D),
                                      .n = BLOCK};
    int64_t latest = 0;
    for (int64_t i = 0; i < queries; i++)
        latest = first[i] > latest ? first[i] : latest;
    for (int64_t j = 0; j < keys; j++) {
        softmax.p = w->p + j * BLOCK;
        softmax.ds = w->ds + j * BLOCK;
        w->k->softmax_bwd(&softmax);
        if (k0 == q0)
            memset(softmax.ds, 0, (size_t)j * sizeof(float));
        for (int64_t i = 0; i < queries && k0 + j < latest; i++)
            if (k0 + j < first[i])
                softmax.ds[i] = 0;
    }
}

/* Task u: query block u / NH, head u % NH. */
static void query_blocks(void *ctx, int thread, int64_t task, int64_t count)
{
    const struct scratch w = thread_scratch(ctx, thread);
    const struct nbi_op_attention_bwd *a = w.a;
    const float *delta = ((const struct op *)ctx)->s->delta, *lse = host(a->lse);
    const int32_t *first = host(a->first);
    for (int64_t u = task; u < task + count; u++) {
        int64_t q0 = u / a->NH * BLOCK, h = u % a->NH, queries = block_rows(&w, q0), low = q0;
        int64_t kv = h / (a->NH / a->NKV);
        transpose(&w, 0, query_head(a, a->q, q0, h), queries);
        transpose(&w, 1, query_head(a, a->dy, q0, h), queries);
        for (int64_t i = 0; i < BLOCK; i++) {
            w.lse[i] = i < queries ? lse[(q0 + i) * a->NH + h] : 0;
            w.delta[i] = i < queries ? delta[(q0 + i) * a->NH + h] : 0;
            low = i < queries && first[q0 + i] < low ? first[q0 + i] : low;
        }
        memset(w.sum[0], 0, (size_t)(BLOCK * w.ld) * sizeof(float));
        for (int64_t k0 = low / BLOCK * BLOCK; k0 <= q0; k0 += BLOCK) {
            int64_t keys = block_rows(&w, k0);
            const float *k = gather(&w, 0, key_head(a, a->kv.k, k0, kv), keys);
            const float *v = gather(&w, 1, key_head(a, a->kv.v, k0, kv), keys);
            enum triangle tri = k0 == q0 ? UPPER : ALL;
            scores(&w, w.p, k, 0, tri);
            scores(&w, w.ds, v, 1, tri);
            ds_by_key(&w, q0, k0);
            add_weighted(&w, 0, w.ds, k, keys, tri);
        }
        store_sum(&w, 0, a->dq, q0, queries, a->NH, h);
    }
}

/* ---- the second pass: dk and dv ---- */

/* p and ds, both [query, key], for the queries from q0 on and the keys from k0 on; masked keys get
 * 0. */
static void ds_by_query(const struct scratch *w, const float *delta, int64_t q0, int64_t k0,
                        int64_t h)
{
    const int32_t *first = host(w->a->first);
    int64_t queries = block_rows(w, q0);
    struct nbi_softmax_bwd softmax = {.scale = 1 / sqrtf((float)w->a->D), .n = BLOCK};
    for (int64_t i = 0; i < queries; i++) {
        int64_t q = q0 + i, low = first[q] - k0, high = q - k0 + 1;
        low = low < 0 ? 0 : min(low, BLOCK);
        high = min(high, BLOCK);
        softmax.lse = (const float *)host(w->a->lse) + q * w->a->NH + h;
        softmax.delta = delta + q * w->a->NH + h;
        softmax.p = w->p + i * BLOCK;
        softmax.ds = w->ds + i * BLOCK;
        w->k->softmax_bwd(&softmax);
        for (int64_t j = 0; j < low; j++)
            softmax.p[j] = softmax.ds[j] = 0;
        for (int64_t j = high; j < BLOCK; j++)
            softmax.p[j] = softmax.ds[j] = 0;
    }
}

/* Whether a query of the block at q0 sees a key before `end`. */
static bool sees(const struct scratch *w, int64_t q0, int64_t end)
{
    const int32_t *first = host(w->a->first);
    for (int64_t q = q0; q < q0 + block_rows(w, q0); q++)
        if (first[q] < end)
            return true;
    return false;
}

/* Task u: key block u / NKV, key/value head u % NKV. */
static void key_blocks(void *ctx, int thread, int64_t task, int64_t count)
{
    const struct scratch w = thread_scratch(ctx, thread);
    const struct nbi_op_attention_bwd *a = w.a;
    const float *delta = ((const struct op *)ctx)->s->delta;
    int64_t group = a->NH / a->NKV;
    for (int64_t u = task; u < task + count; u++) {
        int64_t k0 = u / a->NKV * BLOCK, kv = u % a->NKV, keys = block_rows(&w, k0);
        transpose(&w, 0, key_head(a, a->kv.k, k0, kv), keys);
        transpose(&w, 1, key_head(a, a->kv.v, k0, kv), keys);
        for (int i = 0; i < 2; i++)
            memset(w.sum[i], 0, (size_t)(BLOCK * w.ld) * sizeof(float));
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            for (int64_t q0 = k0; q0 < a->N; q0 += BLOCK) {
                int64_t queries = block_rows(&w, q0);
                if (!sees(&w, q0, k0 + keys))
                    continue;
                const float *q = gather(&w, 0, query_head(a, a->q, q0, h), queries);
                const float *dy = gather(&w, 1, query_head(a, a->dy, q0, h), queries);
                enum triangle tri = q0 == k0 ? LOWER : ALL;
                scores(&w, w.p, q, 0, tri);
                scores(&w, w.ds, dy, 1, tri);
                ds_by_query(&w, delta, q0, k0, h);
                add_weighted(&w, 0, w.ds, q, queries, tri);
                add_weighted(&w, 1, w.p, dy, queries, tri);
            }
        store_sum(&w, 0, a->dk, k0, keys, a->NKV, kv);
        store_sum(&w, 1, a->dv, k0, keys, a->NKV, kv);
    }
}

static void delta_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_attention_bwd *a = op->args;
    float buf[2][NBI_HEAD_MAX];
    (void)thread;
    for (int64_t i = first * a->NH; i < (first + count) * a->NH; i++) {
        const float *dy = act_load(op->s, buf[0], a->dy, a->bf16, i * a->D, a->D);
        const float *y = act_load(op->s, buf[1], a->y, a->bf16, i * a->D, a->D);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < a->D; d++)
            sum += dy[d] * y[d];
        op->s->delta[i] = sum;
    }
}

enum nb_status nbi_cpu_attention_bwd(struct nbi_stream *s, const struct nbi_op_attention_bwd *a)
{
    const int32_t *first = host(a->first);
    int64_t blocks = ceil_div(a->N, BLOCK), pairs = 0;
    NBI_BUG_IF(!s->backward || a->N > s->limits.N || a->NH > s->limits.heads ||
               a->D > s->limits.D ||
               !(a->kv.dtype == NBI_F32 || (a->kv.dtype == NBI_BF16 && a->bf16)));
    for (int64_t n = 0; n < a->N; n++)
        pairs += n - first[n] + 1;
    parallel_for(s, a->N, a->NH * a->D, delta_rows, a);
    parallel_for(s, blocks * a->NH, 3 * pairs * a->D / blocks, query_blocks, a);
    parallel_for(s, blocks * a->NKV, 4 * pairs * a->D / blocks * (a->NH / a->NKV), key_blocks, a);
    return NB_OK;
}
