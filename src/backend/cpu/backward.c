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
    const struct nbi_stream *s;
    const struct nbi_microkernels *k;
    int64_t first; /* the row's first element of logits and dlogits */
    int64_t id;    /* of that */
    bool gradient;
    float scale, kl_scale; /* of the gradient, with the row's weight */
    int32_t at;            /* target id, or negative */
    int64_t ref_k;         /* 0: the row has no reference */
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
 * kl_scale times their reference probability; multiplies all other ids by by[0]. Then subtracts
 * what the target loses. */
static void scale_block(const struct xent_row *r, float *d, int64_t i, int64_t n,
                        const double by[2])
{
    float fixed[LOGIT_BLOCK], factor = (float)by[0];
    int32_t at[LOGIT_BLOCK];
    int64_t from = r->id + i;
    int count = 0;
    for (int64_t j = 0; j < r->ref_k; j++)
        if (r->ids[j] >= from && r->ids[j] < from + n) {
            at[count] = (int32_t)(r->ids[j] - from);
            fixed[count] =
                (float)((double)d[at[count]] * by[1] - (double)r->kl_scale * (double)r->ref_p[j]);
            count++;
        }
    for (int64_t c = 0; c < n; c++)
        d[c] *= factor;
    for (int c = 0; c < count; c++)
        d[at[c]] = fixed[c];
    if (r->at >= from && r->at < from + n)
        d[r->at - from] -= r->scale;
}

static int64_t block_size(const struct xent_row *r, int64_t i)
{
    return min(r->a->V - i, LOGIT_BLOCK);
}

/* Logits i to i + n of the row as f32. */
static const float *logits_at(const struct xent_row *r, float *buf, int64_t i, int64_t n)
{
    return act_load(r->s, buf, r->a->logits, r->a->bf16, r->first + i, n);
}

static double logit(const struct xent_row *r, int64_t i)
{
    float buf;
    return (double)*logits_at(r, &buf, i, 1);
}

static float max_logit(const struct xent_row *r)
{
    float buf[LOGIT_BLOCK], max = -INFINITY;
    if (!r->a->bf16) {
        const float *logits = logits_at(r, NULL, 0, r->a->V);
        return logits[r->k->argmax(logits, r->a->V)];
    }
    for (int64_t i = 0; i < r->a->V; i += LOGIT_BLOCK) {
        int64_t n = block_size(r, i);
        const float *logits = logits_at(r, buf, i, n);
        float of_block = logits[r->k->argmax(logits, n)];
        max = of_block > max ? of_block : max;
    }
    return max;
}

/* The gradient from the exponentials, which are in place if `made`. */
static void xent_gradient(const struct xent_row *r, bool made, float max, const double by[2])
{
    float buf[LOGIT_BLOCK];
    for (int64_t i = 0; i < r->a->V; i += LOGIT_BLOCK) {
        int64_t n = block_size(r, i);
        float *d = act_out(buf, r->a->dlogits, r->a->bf16, r->first + i);
        if (!made)
            r->k->exp_sum(d, logits_at(r, buf, i, n), max, n);
        scale_block(r, d, i, n, by);
        act_store(r->s, r->a->dlogits, r->a->bf16, r->first + i, d, n);
    }
}

/* With reference probabilities b, their remainder q = 1 - sum b, and the sums S over all ids and R
 * over those not listed:
 *   KL = sum b log(b / p) + q log(q S / R)
 * Its gradient is p - b for listed ids and p - q p S / R for the others. R is at least FLT_MIN: e^x
 * of everything smaller has underflowed. */
static void xent_row(struct xent_row *r, float *loss, float *kl, struct nbi_xent_kept *kept)
{
    const struct nbi_op_xent *a = r->a;
    float max = max_logit(r), e[LOGIT_BLOCK], buf[LOGIT_BLOCK];
    double target = r->at >= 0 ? logit(r, r->at) : 0, cross = 0, ref_sum = 0;
    for (int64_t j = 0; j < r->ref_k; j++) {
        double b = (double)r->ref_p[j];
        cross += b > 0 ? b * (log(b) - (logit(r, r->ids[j]) - (double)max)) : 0;
        ref_sum += b;
    }
    for (int64_t i = 0; i < a->V; i += LOGIT_BLOCK) {
        int64_t n = block_size(r, i);
        float *y = r->gradient ? act_out(e, a->dlogits, a->bf16, r->first + i) : e;
        float sum = r->k->exp_sum(y, logits_at(r, buf, i, n), max, n);
        r->others += sum_others(r, y, i, n, sum);
    }
    double S = r->listed + r->others, R = r->others < (double)FLT_MIN ? (double)FLT_MIN : r->others;
    double q = ref_sum < 1 ? 1 - ref_sum : 0, of_kl = r->ref_k > 0 ? (double)r->kl_scale : 0;
    double of_loss = r->at >= 0 ? (double)r->scale : 0;
    *loss = r->at >= 0 ? (float)(log(S) + (double)max - target) : 0;
    if (r->ref_k > 0)
        *kl = (float)(cross + ref_sum * log(S) + (q > 0 ? q * log(q * S / R) : 0));
    const double by[2] = {of_loss / S + of_kl * ((ref_sum + q) / S - q / R),
                          (of_loss + of_kl * (ref_sum + q)) / S};
    if (kept)
        *kept = (struct nbi_xent_kept){.listed = by[1], .others = (float)by[0], .max = max};
    if (r->gradient)
        xent_gradient(r, !a->bf16, max, by);
}

/* Row n, whose logits begin with that of `id`. *known: it has a target or a reference. */
static struct xent_row xent_row_at(const struct op *op, int64_t n, int64_t id, bool *known)
{
    const struct nbi_op_xent *a = op->args;
    const int32_t *targets = host(a->targets), *ids = host(a->ref_ids);
    const float *weight = host(a->weight);
    bool has_ref = a->ref_k > 0 && ids[n * a->ref_k] >= 0;
    *known = targets[n] >= 0 || has_ref;
    return (struct xent_row){.a = a,
                             .s = op->s,
                             .k = op->s->cpu->k,
                             .first = n * a->V,
                             .id = id,
                             .gradient = a->dlogits.at != 0,
                             .scale = weight ? a->scale * weight[n] : a->scale,
                             .kl_scale = weight ? a->kl_scale * weight[n] : a->kl_scale,
                             .at = targets[n],
                             .ref_k = has_ref ? a->ref_k : 0,
                             .ids = has_ref ? ids + n * a->ref_k : NULL,
                             .ref_p =
                                 has_ref ? (const float *)host(a->ref_p) + n * a->ref_k : NULL};
}

static void clear_row(const struct xent_row *r)
{
    memset(act_at(r->a->dlogits, r->a->bf16, r->first), 0,
           (size_t)nbi_act_bytes(r->a->bf16, r->a->V));
}

static void xent_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_xent *a = op->args;
    float *loss = host(a->loss), *kl = host(a->kl);
    struct nbi_xent_kept *kept = host(a->kept);
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        float unused, *of_kl = kl ? kl + n : &unused;
        bool known;
        struct xent_row row = xent_row_at(op, n, 0, &known);
        loss[n] = *of_kl = 0;
        if (known)
            xent_row(&row, loss + n, of_kl, kept ? kept + n : NULL);
        else if (row.gradient)
            clear_row(&row);
    }
}

enum nb_status nbi_cpu_xent(struct nbi_stream *s, const struct nbi_op_xent *a)
{
    parallel_for(s, a->N, a->V * 8, xent_rows, a);
    return NB_OK;
}

static void xent_slice_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_xent_slice *a = op->args;
    const struct nbi_op_xent x = {.dlogits = a->dlogits,
                                  .logits = a->logits,
                                  .targets = a->targets,
                                  .scale = a->scale,
                                  .ref_ids = a->ref_ids,
                                  .ref_p = a->ref_p,
                                  .kl_scale = a->kl_scale,
                                  .weight = a->weight,
                                  .ref_k = a->ref_k,
                                  .N = a->N,
                                  .V = a->count,
                                  .bf16 = a->bf16};
    const struct op slice = {op->s, &x};
    const struct nbi_xent_kept *kept = host(a->kept);
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        const double by[2] = {(double)kept[n].others, kept[n].listed};
        bool known;
        const struct xent_row row = xent_row_at(&slice, n, a->first, &known);
        if (known)
            xent_gradient(&row, false, kept[n].max, by);
        else
            clear_row(&row);
    }
}

enum nb_status nbi_cpu_xent_slice(struct nbi_stream *s, const struct nbi_op_xent_slice *a)
{
    parallel_for(s, a->N, a->count * 8, xent_slice_rows, a);
    return NB_OK;
}

/* ---- distance ---- */

#define ROW_BLOCK 1024 /* elements of a row that are converted at a time */

static void l1_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_l1 *a = op->args;
    const float *weight = host(a->weight);
    float *loss = host(a->loss), step = a->scale / (float)a->C, buf[3][ROW_BLOCK];
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        double sum = 0;
        for (int64_t i = 0; i < a->C; i += ROW_BLOCK) {
            int64_t at = n * a->C + i, size = min(a->C - i, ROW_BLOCK);
            const float *x = act_load(op->s, buf[0], a->x, a->bf16, at, size);
            const float *target = act_load(op->s, buf[1], a->target, a->bf16, at, size);
            float *dx = a->dx.at ? act_out(buf[2], a->dx, a->bf16, at) : NULL;
            for (int64_t c = 0; c < size; c++) {
                float off = weight[n] == 0 ? 0 : x[c] - target[c];
                sum += (double)fabsf(off);
                if (dx)
                    dx[c] = off > 0 ? step : off < 0 ? -step : 0 * off;
            }
            if (dx)
                act_store(op->s, a->dx, a->bf16, at, dx, size);
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
    const struct op *op = ctx;
    const struct nbi_op_embed_bwd *a = op->args;
    const int32_t *ids = host(a->ids);
    float buf[STRIP];
    (void)thread;
    for (int64_t n = 0; n < a->N; n++)
        for (int64_t from = first * STRIP; from < min((first + count) * STRIP, a->C);
             from += STRIP) {
            int64_t size = min(a->C - from, STRIP), at = ids[n] - a->first;
            if (a->count > 0 && (at < 0 || at >= a->count))
                continue;
            float *row = (float *)host(a->dtable) + at * a->C + from;
            const float *dx = act_load(op->s, buf, a->dx, a->bf16, n * a->C + from, size);
            for (int64_t c = 0; c < size; c++)
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
    const struct nbi_stream *s = op->s;
    const struct nbi_op_rmsnorm_bwd *a = op->args;
    const float *rstd = host(a->rstd);
    for (int64_t n = first; n < first + count; n++) {
        int64_t at = n * a->C;
        const float *dy = act_load(s, row_buffer(s, thread, 0), a->dy, a->bf16, at, a->C);
        const float *x = act_load(s, row_buffer(s, thread, 1), a->x, a->bf16, at, a->C);
        float *dx = act_out(row_buffer(s, thread, 2), a->dx, a->bf16, at);
        act_load(s, dx, a->dx, a->bf16, at, a->C);
        s->cpu->k->rmsnorm_bwd(dx, dy, x, host(a->w.data), rstd[n], a->C);
        act_store(s, a->dx, a->bf16, at, dx, a->C);
    }
}

static void rmsnorm_bwd_strips(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_rmsnorm_bwd *a = op->args;
    const float *rstd = host(a->rstd);
    float buf[2][STRIP];
    (void)thread;
    for (int64_t n = 0; n < a->N; n++)
        for (int64_t from = first * STRIP; from < min((first + count) * STRIP, a->C);
             from += STRIP) {
            int64_t size = min(a->C - from, STRIP), at = n * a->C + from;
            float *dw = (float *)host(a->dw) + from;
            const float *dy = act_load(op->s, buf[0], a->dy, a->bf16, at, size);
            const float *x = act_load(op->s, buf[1], a->x, a->bf16, at, size);
            for (int64_t c = 0; c < size; c++)
                dw[c] += dy[c] * x[c] * rstd[n];
        }
}

enum nb_status nbi_cpu_rmsnorm_bwd(struct nbi_stream *s, const struct nbi_op_rmsnorm_bwd *a)
{
    NBI_BUG_IF(!act_fits(s, a->bf16, a->C));
    parallel_for(s, ceil_div(a->C, STRIP), STRIP * a->N, rmsnorm_bwd_strips, a);
    parallel_for(s, a->N, 2 * a->C, rmsnorm_bwd_rows, a);
    return NB_OK;
}

/* All heads of q, or of k. */
struct head_set {
    struct nbi_ptr d, x;
    float *dw;
    const float *w, *rstd;
    int64_t count, ld;
};

/* Head h of row n. */
static void head_bwd(const struct op *op, const struct head_set *set, struct nbi_rope_row rope,
                     int64_t n, int64_t h)
{
    const struct nbi_op_qkv_rope_bwd *a = op->args;
    int64_t at = n * set->ld + h * a->D;
    float buf[2][NBI_HEAD_MAX], *d = act_out(buf[0], set->d, a->bf16, at);
    const float *x = act_load(op->s, buf[1], set->x, a->bf16, at, a->D);
    act_load(op->s, d, set->d, a->bf16, at, a->D);
    op->s->cpu->k->norm_rope_bwd(d, set->dw, x, set->w, rope, set->rstd[n * set->count + h], a->D);
    act_store(op->s, set->d, a->bf16, at, d, a->D);
}

/* Tasks are blocks of NBI_SUM_ROWS rows; each sums dw of its rows by itself. */
static void qkv_rope_bwd_blocks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_qkv_rope_bwd *a = op->args;
    const float *c = host(a->cos), *sn = host(a->sin);
    int64_t D = a->D, ldq = stride(a->ld, a->NH * D), ldk = stride(a->ld, a->NKV * D);
    (void)thread;
    for (int64_t u = first; u < first + count; u++) {
        float *sums = op->s->norm_partials + u * 2 * D;
        const struct head_set both[2] = {
            {a->dq, a->q, sums, host(a->q_norm.data), host(a->rstd_q), a->NH, ldq},
            {a->dk, a->k, sums + D, host(a->k_norm.data), host(a->rstd_k), a->NKV, ldk}};
        int64_t end = (u + 1) * NBI_SUM_ROWS < a->N ? (u + 1) * NBI_SUM_ROWS : a->N;
        memset(sums, 0, (size_t)(2 * D) * sizeof *sums);
        for (int64_t n = u * NBI_SUM_ROWS; n < end; n++) {
            const struct nbi_rope_row rope = {c + n * D / 2, sn + n * D / 2};
            for (int i = 0; i < 2; i++)
                for (int64_t h = 0; h < both[i].count; h++)
                    head_bwd(op, &both[i], rope, n, h);
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

/* Rows of n values in f32 that become bf16, or the reverse. */
struct conversion {
    struct nbi_ptr bf16;
    float *f32;
    int64_t n;
    bool to_bf16;
};

static void convert_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct conversion *c = op->args;
    int64_t at = first * c->n;
    (void)thread;
    if (c->to_bf16)
        op->s->cpu->k->from_f32(act_at(c->bf16, true, at), NBI_BF16, c->f32 + at, count * c->n);
    else
        op->s->cpu->k->to_f32(c->f32 + at, act_at(c->bf16, true, at), NBI_BF16, count * c->n);
}

static void convert(struct nbi_stream *s, const struct conversion *c, int64_t rows)
{
    parallel_for(s, rows, c->n, convert_rows, c);
}

/* dx of rows [first, first + rows) from matrix i, to c. */
static void product_dx(struct nbi_stream *s, const struct nbi_op_linear_bwd *a, int i, float *c,
                       int64_t first, int64_t rows)
{
    const struct nbi_weight *w = &a->w[i];
    int64_t ldy = stride(a->ldy[i], w->rows);
    const struct nbi_gemm_f32 g = {.c = c,
                                   .a = act_at(a->dy[i], a->bf16, first * ldy),
                                   .a_bf16 = a->bf16,
                                   .a_row = ldy,
                                   .a_col = 1,
                                   .alpha = w->dtype == NBI_NVFP4 ? w->tensor_scale : 1,
                                   .b = host(w->data),
                                   .dtype = w->dtype,
                                   .scales = w->layout == NBI_WEIGHT_SCALES ? w : NULL,
                                   .M = rows,
                                   .N = a->K,
                                   .K = w->rows,
                                   .add = a->add || i > 0};
    NBI_BUG_IF(w->dtype == NBI_NVFP4 && w->layout == NBI_WEIGHT_ROWS);
    nbi_cpu_gemm(s, &g);
}

/* Rows [first, first + rows) of dW_i, to c. */
static void product_dw(struct nbi_stream *s, const struct nbi_op_linear_bwd *a, int i, float *c,
                       int64_t first, int64_t rows)
{
    const struct nbi_gemm_f32 g = {.c = c,
                                   .a = act_at(a->dy[i], a->bf16, first),
                                   .a_bf16 = a->bf16,
                                   .a_row = 1,
                                   .a_col = stride(a->ldy[i], a->w[i].rows),
                                   .alpha = 1,
                                   .b = host(a->x),
                                   .dtype = a->bf16 ? NBI_BF16 : NBI_F32,
                                   .M = rows,
                                   .N = a->K,
                                   .K = a->N,
                                   .add = !a->fresh};
    nbi_cpu_gemm(s, &g);
}

/* dx in bf16: sums over all matrices are taken in f32 and rounded once. */
static void products_dx_bf16(struct nbi_stream *s, const struct nbi_op_linear_bwd *a)
{
    for (int64_t first = 0; first < a->N; first += NBI_BF16_ROWS) {
        int64_t rows = min(a->N - first, NBI_BF16_ROWS);
        const struct nbi_ptr dx = device(act_at(a->dx, true, first * a->K));
        if (a->add)
            convert(s, &(struct conversion){dx, s->rows_f32, a->K, false}, rows);
        for (int i = 0; i < a->count; i++)
            product_dx(s, a, i, s->rows_f32, first, rows);
        convert(s, &(struct conversion){dx, s->rows_f32, a->K, true}, rows);
    }
}

static void product_dw_bf16(struct nbi_stream *s, const struct nbi_op_linear_bwd *a, int i)
{
    for (int64_t first = 0; first < a->w[i].rows; first += NBI_BF16_ROWS) {
        int64_t rows = min(a->w[i].rows - first, NBI_BF16_ROWS);
        const struct nbi_ptr dw = device(act_at(a->dw[i], true, first * a->K));
        product_dw(s, a, i, s->rows_f32, first, rows);
        convert(s, &(struct conversion){dw, s->rows_f32, a->K, true}, rows);
    }
}

enum nb_status nbi_cpu_linear_bwd(struct nbi_stream *s, const struct nbi_op_linear_bwd *a)
{
    NBI_BUG_IF(!act_fits(s, a->bf16, a->K) || (a->dw_bf16 && !(a->bf16 && a->fresh)));
    if (a->bf16 && a->dx.at)
        products_dx_bf16(s, a);
    for (int i = 0; i < a->count; i++) {
        if (a->dx.at && !a->bf16)
            product_dx(s, a, i, host(a->dx), 0, a->N);
        if (a->dw[i].at && a->dw_bf16)
            product_dw_bf16(s, a, i);
        else if (a->dw[i].at)
            product_dw(s, a, i, host(a->dw[i]), 0, a->w[i].rows);
    }
    return NB_OK;
}

/* ---- swiglu ---- */

static void swiglu_bwd_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_stream *s = op->s;
    const struct nbi_op_swiglu_bwd *a = op->args;
    int64_t F = a->F, ld = stride(a->ld, F);
    float *buf[5];
    for (int i = 0; i < 5; i++)
        buf[i] = row_buffer(s, thread, i);
    for (int64_t n = first; n < first + count; n++) {
        const float *dy = act_load(s, buf[0], a->dy, a->bf16, n * F, F);
        const float *gate = act_load(s, buf[1], a->gate, a->bf16, n * ld, F);
        const float *up = act_load(s, buf[2], a->up, a->bf16, n * ld, F);
        float *dgate = act_out(buf[3], a->dgate, a->bf16, n * ld);
        float *dup = act_out(buf[4], a->dup, a->bf16, n * ld);
        s->cpu->k->swiglu_bwd(dgate, dup, dy, gate, up, F);
        act_store(s, a->dgate, a->bf16, n * ld, dgate, F);
        act_store(s, a->dup, a->bf16, n * ld, dup, F);
    }
}

enum nb_status nbi_cpu_swiglu_bwd(struct nbi_stream *s, const struct nbi_op_swiglu_bwd *a)
{
    NBI_BUG_IF(!act_fits(s, a->bf16, a->F));
    parallel_for(s, a->N, a->F * 8, swiglu_bwd_rows, a);
    return NB_OK;
}
