/* backward.c - losses and gradients on the CPU, except that of attention.
 *
 * Threads share outputs, never sums: each sum is taken by one thread, in an order that the shapes
 * alone decide. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"

#define STRIP 16 /* columns of a task, where tasks are strips of columns */

/* ---- cross entropy ---- */

#define LOGIT_BLOCK 1024 /* logits per call of exp_sum, whose result is one float */

/* The state of one row. Sums are of e^(logit - max). */
struct xent_row {
    const struct nbi_op_xent *a;
    const struct nbi_microkernels *k;
    const float *logits;
    float *d;      /* gradient, or NULL */
    int32_t at;    /* target id, or negative */
    int64_t ref_k; /* 0: the row has no reference */
    const int32_t *ids;
    const float *ref_p;
    double listed, others; /* sums over the reference's ids, and over all other ids */
};

/* The sum of a block's n values e, which start at logit i, without the ids of the reference; those
 * are added to r->listed. */
static double sum_others(struct xent_row *r, const float *e, int64_t i, int64_t n, float sum)
{
    float other[LOGIT_BLOCK];
    bool any = false;
    for (int64_t j = 0; j < r->ref_k; j++) {
        int64_t at = r->ids[j] - i;
        if (at < 0 || at >= n)
            continue;
        if (!any)
            memcpy(other, e, (size_t)n * sizeof *e);
        any = true;
        other[at] = 0;
        r->listed += (double)e[at];
    }
    double left = 0;
    for (int64_t at = 0; any && at < n; at++)
        left += (double)other[at];
    return any ? left : (double)sum;
}

/* In a block of d = e^(logit - max): multiplies the ids of the reference by by[1] and subtracts
 * kl_scale times their reference probability; multiplies all other ids by by[0]. */
static void scale_block(const struct xent_row *r, int64_t i, int64_t n, const double by[2])
{
    float *d = r->d + i, fixed[LOGIT_BLOCK], factor = (float)by[0];
    int32_t at[LOGIT_BLOCK];
    int count = 0;
    for (int64_t j = 0; j < r->ref_k; j++)
        if (r->ids[j] >= i && r->ids[j] < i + n) {
            at[count] = (int32_t)(r->ids[j] - i);
            fixed[count] = (float)((double)d[at[count]] * by[1] -
                                   (double)r->a->kl_scale * (double)r->ref_p[j]);
            count++;
        }
    for (int64_t c = 0; c < n; c++)
        d[c] *= factor;
    for (int c = 0; c < count; c++)
        d[at[c]] = fixed[c];
}

static int64_t block_size(const struct xent_row *r, int64_t i)
{
    return min(r->a->V - i, LOGIT_BLOCK);
}

/* With reference probabilities b, their remainder q = 1 - sum b, and the sums S over all ids and R
 * over those not listed:
 *   KL = sum b log(b / p) + q log(q S / R)
 * Its gradient is p - b for listed ids and p - q p S / R for the others. R is at least FLT_MIN: e^x
 * of everything smaller has underflowed. */
static void xent_row(struct xent_row *r, float *loss, float *kl)
{
    const struct nbi_op_xent *a = r->a;
    float max = r->logits[r->k->argmax(r->logits, a->V)], e[LOGIT_BLOCK];
    double target = r->at >= 0 ? (double)r->logits[r->at] : 0, cross = 0, ref_sum = 0;
    for (int64_t j = 0; j < r->ref_k; j++) {
        double b = (double)r->ref_p[j];
        cross += b > 0 ? b * (log(b) - ((double)r->logits[r->ids[j]] - (double)max)) : 0;
        ref_sum += b;
    }
    for (int64_t i = 0; i < a->V; i += LOGIT_BLOCK) {
        float *y = r->d ? r->d + i : e;
        float sum = r->k->exp_sum(y, r->logits + i, max, block_size(r, i));
        r->others += sum_others(r, y, i, block_size(r, i), sum);
    }
    double S = r->listed + r->others, R = r->others < (double)FLT_MIN ? (double)FLT_MIN : r->others;
    double q = ref_sum < 1 ? 1 - ref_sum : 0, of_kl = r->ref_k > 0 ? (double)a->kl_scale : 0;
    double of_loss = r->at >= 0 ? (double)a->scale : 0;
    *loss = r->at >= 0 ? (float)(log(S) + (double)max - target) : 0;
    if (r->ref_k > 0)
        *kl = (float)(cross + ref_sum * log(S) + (q > 0 ? q * log(q * S / R) : 0));
    if (!r->d)
        return;
    const double by[2] = {of_loss / S + of_kl * ((ref_sum + q) / S - q / R),
                          (of_loss + of_kl * (ref_sum + q)) / S};
    for (int64_t i = 0; i < a->V; i += LOGIT_BLOCK)
        scale_block(r, i, block_size(r, i), by);
    if (r->at >= 0)
        r->d[r->at] -= a->scale;
}

static void xent_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_xent *a = op->args;
    const int32_t *targets = host(a->targets), *ids = host(a->ref_ids);
    float *loss = host(a->loss), *kl = host(a->kl), *d = host(a->dlogits);
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        float unused, *of_kl = kl ? kl + n : &unused;
        bool has_ref = a->ref_k > 0 && ids[n * a->ref_k] >= 0;
        struct xent_row row = {.a = a,
                               .k = op->s->cpu->k,
                               .logits = (const float *)host(a->logits) + n * a->V,
                               .d = d ? d + n * a->V : NULL,
                               .at = targets[n],
                               .ref_k = has_ref ? a->ref_k : 0,
                               .ids = has_ref ? ids + n * a->ref_k : NULL,
                               .ref_p =
                                   has_ref ? (const float *)host(a->ref_p) + n * a->ref_k : NULL};
        loss[n] = *of_kl = 0;
        if (row.at >= 0 || has_ref)
            xent_row(&row, loss + n, of_kl);
        else if (d)
            memset(row.d, 0, (size_t)a->V * sizeof *d);
    }
}

enum nb_status nbi_cpu_xent(struct nbi_stream *s, const struct nbi_op_xent *a)
{
    parallel_for(s, a->N, a->V * 8, xent_rows, a);
    return NB_OK;
}

/* ---- distance ---- */

static void l1_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct nbi_op_l1 *a = ((const struct op *)ctx)->args;
    const float *weight = host(a->weight);
    float *loss = host(a->loss), *dx = host(a->dx), step = a->scale / (float)a->C;
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        const float *x = (const float *)host(a->x) + n * a->C;
        const float *target = (const float *)host(a->target) + n * a->C;
        double sum = 0;
        for (int64_t c = 0; c < a->C; c++) {
            float off = weight[n] == 0 ? 0 : x[c] - target[c];
            sum += (double)fabsf(off);
            if (dx)
                dx[n * a->C + c] = off > 0 ? step : off < 0 ? -step : 0 * off;
        }
        loss[n] = (float)(sum / (double)a->C);
    }
}

enum nb_status nbi_cpu_l1(struct nbi_stream *s, const struct nbi_op_l1 *a)
{
    parallel_for(s, a->N, a->C, l1_rows, a);
    return NB_OK;
}

/* ---- embedding ---- */

/* Tasks are strips of columns, so that no two threads add to the same element. */
static void embed_bwd_strips(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct nbi_op_embed_bwd *a = ((const struct op *)ctx)->args;
    const int32_t *ids = host(a->ids);
    int64_t from = first * STRIP, end = min((first + count) * STRIP, a->C);
    (void)thread;
    for (int64_t n = 0; n < a->N; n++) {
        float *row = (float *)host(a->dtable) + ids[n] * a->C;
        const float *dx = (const float *)host(a->dx) + n * a->C;
        for (int64_t c = from; c < end; c++)
            row[c] += dx[c];
    }
}

enum nb_status nbi_cpu_embed_bwd(struct nbi_stream *s, const struct nbi_op_embed_bwd *a)
{
    parallel_for(s, ceil_div(a->C, STRIP), STRIP * a->N, embed_bwd_strips, a);
    return NB_OK;
}

/* ---- norms ---- */

static void rmsnorm_bwd_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_rmsnorm_bwd *a = op->args;
    const float *rstd = host(a->rstd);
    (void)thread;
    for (int64_t n = first; n < first + count; n++)
        op->s->cpu->k->rmsnorm_bwd(
            (float *)host(a->dx) + n * a->C, (const float *)host(a->dy) + n * a->C,
            (const float *)host(a->x) + n * a->C, host(a->w.data), rstd[n], a->C);
}

static void rmsnorm_bwd_strips(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct nbi_op_rmsnorm_bwd *a = ((const struct op *)ctx)->args;
    const float *rstd = host(a->rstd);
    float *dw = host(a->dw);
    int64_t from = first * STRIP, end = min((first + count) * STRIP, a->C);
    (void)thread;
    for (int64_t n = 0; n < a->N; n++) {
        const float *dy = (const float *)host(a->dy) + n * a->C;
        const float *x = (const float *)host(a->x) + n * a->C;
        for (int64_t c = from; c < end; c++)
            dw[c] += dy[c] * x[c] * rstd[n];
    }
}

enum nb_status nbi_cpu_rmsnorm_bwd(struct nbi_stream *s, const struct nbi_op_rmsnorm_bwd *a)
{
    parallel_for(s, ceil_div(a->C, STRIP), STRIP * a->N, rmsnorm_bwd_strips, a);
    parallel_for(s, a->N, 2 * a->C, rmsnorm_bwd_rows, a);
    return NB_OK;
}

/* All heads of one row of q, or of k. */
struct head_set {
    float *d, *dw;
    const float *x, *w, *rstd;
    int64_t count;
};

/* Tasks are blocks of NBI_SUM_ROWS rows; each sums dw of its rows by itself. */
static void qkv_rope_bwd_blocks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_qkv_rope_bwd *a = op->args;
    const float *c = host(a->cos), *sn = host(a->sin);
    int64_t D = a->D;
    (void)thread;
    for (int64_t u = first; u < first + count; u++) {
        float *sums = op->s->norm_partials + u * 2 * D;
        const struct head_set both[2] = {
            {host(a->dq), sums, host(a->q), host(a->q_norm.data), host(a->rstd_q), a->NH},
            {host(a->dk), sums + D, host(a->k), host(a->k_norm.data), host(a->rstd_k), a->NKV}};
        int64_t end = (u + 1) * NBI_SUM_ROWS < a->N ? (u + 1) * NBI_SUM_ROWS : a->N;
        memset(sums, 0, (size_t)(2 * D) * sizeof *sums);
        for (int64_t n = u * NBI_SUM_ROWS; n < end; n++) {
            const struct nbi_rope_row rope = {c + n * D / 2, sn + n * D / 2};
            for (int i = 0; i < 2; i++)
                for (int64_t h = n * both[i].count; h < (n + 1) * both[i].count; h++)
                    op->s->cpu->k->norm_rope_bwd(both[i].d + h * D, both[i].dw, both[i].x + h * D,
                                                 both[i].w, rope, both[i].rstd[h], D);
        }
    }
}

enum nb_status nbi_cpu_qkv_rope_bwd(struct nbi_stream *s, const struct nbi_op_qkv_rope_bwd *a)
{
    int64_t blocks = ceil_div(a->N, NBI_SUM_ROWS), D = a->D;
    float *dq_norm = host(a->dq_norm), *dk_norm = host(a->dk_norm);
    NBI_BUG_IF(!s->backward || a->N > s->limits.N || D > s->limits.D);
    parallel_for(s, blocks, NBI_SUM_ROWS * (a->NH + a->NKV) * D * 4, qkv_rope_bwd_blocks, a);
    for (int64_t u = 0; u < blocks; u++)
        for (int64_t i = 0; i < D; i++) {
            dq_norm[i] += s->norm_partials[u * 2 * D + i];
            dk_norm[i] += s->norm_partials[u * 2 * D + D + i];
        }
    return NB_OK;
}

/* ---- products ---- */

enum nb_status nbi_cpu_linear_bwd(struct nbi_stream *s, const struct nbi_op_linear_bwd *a)
{
    for (int i = 0; i < a->count; i++) {
        const struct nbi_weight *w = &a->w[i];
        const float *dy = host(a->dy[i]);
        const struct nbi_gemm_f32 dx = {.c = host(a->dx),
                                        .a = dy,
                                        .a_row = w->rows,
                                        .a_col = 1,
                                        .alpha = w->dtype == NBI_NVFP4 ? w->tensor_scale : 1,
                                        .b = host(w->data),
                                        .dtype = w->dtype,
                                        .M = a->N,
                                        .N = a->K,
                                        .K = w->rows,
                                        .add = a->add || i > 0};
        const struct nbi_gemm_f32 dw = {.c = host(a->dw[i]),
                                        .a = dy,
                                        .a_row = 1,
                                        .a_col = w->rows,
                                        .alpha = 1,
                                        .b = host(a->x),
                                        .dtype = NBI_F32,
                                        .M = w->rows,
                                        .N = a->K,
                                        .K = a->N,
                                        .add = true};
        NBI_BUG_IF(w->dtype == NBI_NVFP4 && w->layout != NBI_WEIGHT_TILES);
        if (dx.c)
            nbi_cpu_gemm(s, &dx);
        if (dw.c)
            nbi_cpu_gemm(s, &dw);
    }
    return NB_OK;
}

/* ---- swiglu ---- */

static void swiglu_bwd_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_swiglu_bwd *a = op->args;
    (void)thread;
    for (int64_t at = first * a->F; at < (first + count) * a->F; at += a->F)
        op->s->cpu->k->swiglu_bwd((float *)host(a->dgate) + at, (float *)host(a->dup) + at,
                                  (const float *)host(a->dy) + at,
                                  (const float *)host(a->gate) + at,
                                  (const float *)host(a->up) + at, a->F);
}

enum nb_status nbi_cpu_swiglu_bwd(struct nbi_stream *s, const struct nbi_op_swiglu_bwd *a)
{
    parallel_for(s, a->N, a->F * 8, swiglu_bwd_rows, a);
    return NB_OK;
}
