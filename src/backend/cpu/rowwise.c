/* rowwise.c - operations on each row by itself: embedding, norms, rotation, SwiGLU, moving rows,
 * top-k. */
#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"

enum nb_status nbi_cpu_embed(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    const int32_t *ids = host(a->ids);
    const uint8_t *table = host(a->table.data);
    int64_t row = (int64_t)nbi_dtype_bytes(a->table.dtype, a->C);
    NBI_BUG_IF(!act_fits(s, a->bf16, a->C));
    for (int64_t n = 0; n < a->N; n++) {
        float *x = act_out(row_buffer(s, 0, 0), a->x, a->bf16, n * a->C);
        s->cpu->k->to_f32(x, table + ids[n] * row, a->table.dtype, a->C);
        act_store(s, a->x, a->bf16, n * a->C, x, a->C);
    }
    return NB_OK;
}

static void rope_table_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct nbi_op_rope_table *a = ((const struct op *)ctx)->args;
    const int32_t *positions = host(a->positions);
    const float *frequency = host(a->frequency);
    float *c = host(a->cos), *sn = host(a->sin);
    int64_t half = a->D / 2;
    (void)thread;
    for (int64_t n = first; n < first + count; n++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)positions[n] * frequency[i];
            c[n * half + i] = cosf(angle) * a->scale;
            sn[n * half + i] = sinf(angle) * a->scale;
        }
}

enum nb_status nbi_cpu_rope_table(struct nbi_stream *s, const struct nbi_op_rope_table *a)
{
    parallel_for(s, a->N, a->D * 10, rope_table_rows, a);
    return NB_OK;
}

static void rmsnorm_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_stream *s = op->s;
    const struct nbi_op_rmsnorm *a = op->args;
    float *rstd = host(a->rstd);
    const float *w = host(a->w.data);
    for (int64_t n = first; n < first + count; n++) {
        const float *x = act_load(s, row_buffer(s, thread, 0), a->x, a->bf16, n * a->C, a->C);
        float *y = act_out(row_buffer(s, thread, 1), a->y, a->bf16, n * a->C);
        s->cpu->k->rmsnorm(y, rstd ? rstd + n : NULL, x, w, a->eps, a->C);
        act_store(s, a->y, a->bf16, n * a->C, y, a->C);
    }
}

enum nb_status nbi_cpu_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a)
{
    NBI_BUG_IF(!act_fits(s, a->bf16, a->C));
    parallel_for(s, a->N, a->C, rmsnorm_rows, a);
    return NB_OK;
}

/* y = rope(rmsnorm(head `at` of x)), as f32. */
static void rotate_head(const struct op *op, float *y, float *rstd, struct nbi_ptr x, int64_t at,
                        const float *w, struct nbi_rope_row rope)
{
    const struct nbi_op_qkv_rope *a = op->args;
    float head[NBI_HEAD_MAX];
    op->s->cpu->k->norm_rope(y, rstd, act_load(op->s, head, x, a->bf16, at, a->D), w, rope, a->eps,
                             a->D);
}

/* Row n of v goes to row `to` of the cache. */
static void store_value(const struct op *op, uint8_t *to, int64_t n)
{
    const struct nbi_op_qkv_rope *a = op->args;
    int64_t D = a->D, row = n * stride(a->ld, a->NKV * D);
    int64_t head = (int64_t)nbi_dtype_bytes(a->kv.dtype, D);
    float value[NBI_HEAD_MAX];
    for (int64_t h = 0; h < a->NKV; h++)
        op->s->cpu->k->from_f32(to + h * head, a->kv.dtype,
                                act_load(op->s, value, a->v, a->bf16, row + h * D, D), D);
}

static void qkv_rope_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_microkernels *k = op->s->cpu->k;
    const struct nbi_op_qkv_rope *a = op->args;
    const float *c = host(a->cos), *sn = host(a->sin);
    const float *qw = host(a->q_norm.data), *kw = host(a->k_norm.data);
    float *rq = host(a->rstd_q), *rk = host(a->rstd_k);
    const int32_t *kv_rows = host(a->kv_rows);
    uint8_t *ks = host(a->kv.k), *vs = host(a->kv.v);
    int64_t D = a->D, row = (int64_t)nbi_dtype_bytes(a->kv.dtype, a->NKV * D);
    int64_t head = (int64_t)nbi_dtype_bytes(a->kv.dtype, D);
    int64_t ldq = stride(a->ld, a->NH * D), ldk = stride(a->ld, a->NKV * D);
    float rotated[NBI_HEAD_MAX];
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        const struct nbi_rope_row rope = {c + n * D / 2, sn + n * D / 2};
        for (int64_t h = 0; h < a->NH; h++) {
            int64_t at = (n * a->NH + h) * D;
            float *y = act_out(rotated, a->q_out, a->bf16, at);
            rotate_head(op, y, rq ? rq + n * a->NH + h : NULL, a->q, n * ldq + h * D, qw, rope);
            act_store(op->s, a->q_out, a->bf16, at, y, D);
        }
        for (int64_t h = 0; h < a->NKV; h++) {
            rotate_head(op, rotated, rk ? rk + n * a->NKV + h : NULL, a->k, n * ldk + h * D, kw,
                        rope);
            k->from_f32(ks + kv_rows[n] * row + h * head, a->kv.dtype, rotated, D);
        }
        store_value(op, vs + kv_rows[n] * row, n);
    }
}

enum nb_status nbi_cpu_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    NBI_BUG_IF(a->q_out.at == a->q.at && stride(a->ld, a->NH * a->D) != a->NH * a->D);
    parallel_for(s, a->N, (a->NH + 2 * a->NKV) * a->D, qkv_rope_rows, a);
    return NB_OK;
}

/* One call per row: where a row's last partial vector begins must not depend on how rows are
 * divided over threads. */
static void swiglu_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_stream *s = op->s;
    const struct nbi_op_swiglu *a = op->args;
    int64_t F = a->F, ld = stride(a->ld, F);
    for (int64_t n = first; n < first + count; n++) {
        const float *gate = act_load(s, row_buffer(s, thread, 0), a->gate, a->bf16, n * ld, F);
        const float *up = act_load(s, row_buffer(s, thread, 1), a->up, a->bf16, n * ld, F);
        float *y = act_out(row_buffer(s, thread, 2), a->y, a->bf16, n * F);
        s->cpu->k->swiglu(y, gate, up, F);
        act_store(s, a->y, a->bf16, n * F, y, F);
    }
}

enum nb_status nbi_cpu_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    NBI_BUG_IF(!act_fits(s, a->bf16, a->F));
    NBI_BUG_IF(a->y.at == a->gate.at && stride(a->ld, a->F) != a->F);
    parallel_for(s, a->N, a->F * 8, swiglu_rows, a);
    return NB_OK;
}

enum nb_status nbi_cpu_gather(struct nbi_stream *s, const struct nbi_op_gather *a)
{
    (void)s;
    const int32_t *rows = host(a->rows);
    for (int64_t i = 0; i < a->M; i++)
        memcpy(act_at(a->y, a->bf16, i * a->C), act_at(a->x, a->bf16, rows[i] * a->C),
               (size_t)nbi_act_bytes(a->bf16, a->C));
    return NB_OK;
}

enum nb_status nbi_cpu_scatter(struct nbi_stream *s, const struct nbi_op_scatter *a)
{
    (void)s;
    const int32_t *rows = host(a->rows);
    for (int64_t i = 0; i < a->M; i++)
        memcpy(act_at(a->y, a->bf16, rows[i] * a->C), act_at(a->x, a->bf16, i * a->C),
               (size_t)nbi_act_bytes(a->bf16, a->C));
    return NB_OK;
}

/* Insertion into a sorted list of the k largest so far, which few values enter. Returns whether a
 * value is non-finite. */
static bool topk_row(int32_t *ids, float *values, const float *x, const struct nbi_op_topk *a)
{
    int64_t n = 0;
    bool nonfinite = false;
    for (int64_t i = 0; i < a->V; i++) {
        nonfinite = nonfinite || !isfinite(x[i]);
        if (n == a->k && !(x[i] > values[n - 1]))
            continue;
        int64_t j = n < a->k ? n++ : n - 1;
        for (; j > 0 && x[i] > values[j - 1]; j--) {
            values[j] = values[j - 1];
            ids[j] = ids[j - 1];
        }
        values[j] = x[i] + 0.0f; /* -0 becomes +0 */
        ids[j] = (int32_t)i;
    }
    return nonfinite;
}

enum nb_status nbi_cpu_topk(struct nbi_stream *s, const struct nbi_op_topk *a)
{
    int32_t *nonfinite = host(a->nonfinite);
    (void)s;
    NBI_BUG_IF(a->k < 1 || a->k > NBI_TOPK_MAX || a->k > a->V);
    for (int64_t n = 0; n < a->N; n++)
        nonfinite[n] =
            topk_row((int32_t *)host(a->ids) + n * a->k, (float *)host(a->values) + n * a->k,
                     (const float *)host(a->logits) + n * a->V, a);
    return NB_OK;
}
