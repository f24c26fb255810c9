/* rowwise.c - operations on each row by itself: embedding, norms, rotation, SwiGLU, moving rows,
 * top-k. */
#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"

enum nb_status nbi_cpu_embed(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    const int32_t *ids = host(a->ids);
    const uint8_t *table = host(a->table.data);
    float *x = host(a->x);
    int64_t row = (int64_t)nbi_dtype_bytes(a->table.dtype, a->C);
    for (int64_t n = 0; n < a->N; n++)
        s->cpu->k->to_f32(x + n * a->C, table + ids[n] * row, a->table.dtype, a->C);
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
    const struct nbi_op_rmsnorm *a = op->args;
    float *y = host(a->y), *rstd = host(a->rstd);
    const float *x = host(a->x), *w = host(a->w.data);
    (void)thread;
    for (int64_t n = first; n < first + count; n++)
        op->s->cpu->k->rmsnorm(y + n * a->C, rstd ? rstd + n : NULL, x + n * a->C, w, a->eps, a->C);
}

enum nb_status nbi_cpu_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a)
{
    parallel_for(s, a->N, a->C, rmsnorm_rows, a);
    return NB_OK;
}

static void qkv_rope_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_qkv_rope *a = op->args;
    const struct nbi_microkernels *k = op->s->cpu->k;
    const int32_t *kv_rows = host(a->kv_rows);
    const float *q = host(a->q), *key = host(a->k), *value = host(a->v);
    const float *qw = host(a->q_norm.data), *kw = host(a->k_norm.data);
    const float *c = host(a->cos), *sn = host(a->sin);
    float *q_out = host(a->q_out), *rq = host(a->rstd_q), *rk = host(a->rstd_k);
    uint8_t *ks = host(a->kv.k), *vs = host(a->kv.v);
    int64_t D = a->D, row = (int64_t)nbi_dtype_bytes(a->kv.dtype, a->NKV * D);
    int64_t head = (int64_t)nbi_dtype_bytes(a->kv.dtype, D);
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        const struct nbi_rope_row rope = {c + n * D / 2, sn + n * D / 2};
        float rotated[NBI_HEAD_MAX];
        for (int64_t h = 0; h < a->NH; h++)
            k->norm_rope(q_out + (n * a->NH + h) * D, rq ? rq + n * a->NH + h : NULL,
                         q + (n * a->NH + h) * D, qw, rope, a->eps, D);
        for (int64_t h = 0; h < a->NKV; h++) {
            k->norm_rope(rotated, rk ? rk + n * a->NKV + h : NULL, key + (n * a->NKV + h) * D, kw,
                         rope, a->eps, D);
            k->from_f32(ks + kv_rows[n] * row + h * head, a->kv.dtype, rotated, D);
        }
        k->from_f32(vs + kv_rows[n] * row, a->kv.dtype, value + n * a->NKV * D, a->NKV * D);
    }
}

enum nb_status nbi_cpu_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    parallel_for(s, a->N, (a->NH + 2 * a->NKV) * a->D, qkv_rope_rows, a);
    return NB_OK;
}

/* One call per row: where a row's last partial vector begins must not depend on how rows are
 * divided over threads. */
static void swiglu_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_swiglu *a = op->args;
    (void)thread;
    for (int64_t at = first * a->F; at < (first + count) * a->F; at += a->F)
        op->s->cpu->k->swiglu((float *)host(a->y) + at, (const float *)host(a->gate) + at,
                              (const float *)host(a->up) + at, a->F);
}

enum nb_status nbi_cpu_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    parallel_for(s, a->N, a->F * 8, swiglu_rows, a);
    return NB_OK;
}

enum nb_status nbi_cpu_gather(struct nbi_stream *s, const struct nbi_op_gather *a)
{
    (void)s;
    const int32_t *rows = host(a->rows);
    for (int64_t i = 0; i < a->M; i++)
        memcpy((float *)host(a->y) + i * a->C, (const float *)host(a->x) + rows[i] * a->C,
               (size_t)a->C * sizeof(float));
    return NB_OK;
}

enum nb_status nbi_cpu_scatter(struct nbi_stream *s, const struct nbi_op_scatter *a)
{
    (void)s;
    const int32_t *rows = host(a->rows);
    for (int64_t i = 0; i < a->M; i++)
        memcpy((float *)host(a->y) + rows[i] * a->C, (const float *)host(a->x) + i * a->C,
               (size_t)a->C * sizeof(float));
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
