/* execute.c - carries out forward passes: index upload, CUDA graphs, the megakernel, top-k.
 *
 * A pass runs in one of three ways. A decode step of one sequence goes to the backend's megakernel,
 * if it has one. A short pass that may come again with other values is queued as a CUDA graph.
 * Any other pass queues the operations of forward.c. */
#include "model/execute.h"

#include <string.h>

#include "backend/decode.h"

/* An upper bound on the keys that a token of [from, to) sees. It is a power of two, at most twice
 * what is needed, so that the graph key of a decode step seldom changes while sequences grow. */
static int64_t max_keys(const struct nbi_pass *p, int64_t from, int64_t to)
{
    int64_t limit = from < to ? 128 : 0;
    for (int64_t n = from; n < to; n++)
        while (p->last[n] - p->first[n] >= limit)
            limit *= 2;
    return limit;
}

static void pack(struct nbi_acts *a, struct nbi_ptr *address, const int32_t *from, int64_t count,
                 int64_t at)
{
    *address = nbi_ptr_add(a->indices, at * (int64_t)sizeof *from);
    if (count > 0)
        memcpy(a->packed + at, from, (size_t)count * sizeof *from);
}

/* Packs all index arrays of a pass and uploads them in one copy. Their addresses depend only on N,
 * on a->M and on whether there are pages, as graph_for() requires, and on whether it trains. */
static enum nb_status upload_indices(struct nbi_acts *a, struct nbi_stream *s,
                                     const struct nbi_pass *p)
{
    int64_t N = p->N, at = 5 * N, end;
    pack(a, &a->ids, p->ids, N, 0);
    pack(a, &a->positions, p->positions, N, N);
    pack(a, &a->kv_rows, p->kv_rows, N, 2 * N);
    pack(a, &a->first, p->first, N, 3 * N);
    pack(a, &a->last, p->last, N, 4 * N);
    if (p->training) {
        pack(a, &a->end, p->end, N, at);
        pack(a, &a->order, p->order, N, at + N);
        at += 2 * N;
    }
    a->tables = a->pages = (struct nbi_ptr){0};
    if (p->pages) {
        pack(a, &a->tables, p->tables, N, at);
        at += N;
    }
    pack(a, &a->rows, p->rows, p->M, at);
    end = at + p->M;
    if (p->pages) {
        pack(a, &a->pages, p->pages, p->page_count, at + a->M);
        end = at + a->M + p->page_count;
    }
    a->max_keys[0] = max_keys(p, 0, p->decode_rows);
    a->max_keys[1] = max_keys(p, p->decode_rows, N);
    return a->be->upload(s, a->indices, a->packed, end * (int64_t)sizeof *a->packed);
}

/* ---- CUDA graphs ---- */

/* A pass whose indices are on the device. */
struct uploaded_pass {
    const struct nbi_weights *w;
    const struct nbi_acts *a;
    struct nbi_stream *s;
    const struct nbi_pass *p;
};

static enum nb_status queue(void *ctx)
{
    const struct uploaded_pass *u = ctx;
    return nbi_forward(u->w, u->a, u->s, u->p);
}

/* The key holds everything that decides which operations nbi_forward() queues, and with which
 * arguments. Different weights, activations or KV caches have different addresses. */
static struct nbi_graph graph_for(struct uploaded_pass *u)
{
    const struct nbi_acts *a = u->a;
    const struct nbi_pass *p = u->p;
    return (struct nbi_graph){
        .key = {p->N, p->M, p->decode_rows, a->max_keys[0], a->max_keys[1], p->matmul,
                p->batch_invariant + 2 * p->one_row_per_sequence + 4 * nbi_pass_wants_all_rows(p),
                p->pages != NULL, (int64_t)(uintptr_t)u->w->layers, (int64_t)a->block.at,
                (int64_t)p->kv[0].k.at, p->kv[0].dtype},
        .queue = queue,
        .ctx = u};
}

/* Whether a pass is short enough for a graph to pay, and its operations may come again. Training
 * is left out: an optimizer step may replace a weight's tensor scale, which is an argument. */
static bool suits_graph(const struct nbi_backend *be, const struct nbi_pass *p)
{
    return nbi_backend_has(be, NBI_CAP_GRAPHS) && p->N <= be->graph_rows && !p->after_layer &&
           !p->training;
}

/* ---- the megakernel ---- */

enum nb_status nbi_execute_use_megakernel(struct nbi_acts *a, const struct nbi_weights *w,
                                          struct nbi_stream *s, const struct nbi_kv_view *kv)
{
    const struct nbi_config *c = w->config;
    const struct nbi_megakernel_model m = {.layers = c->layers,
                                           .C = c->hidden_size,
                                           .F = c->intermediate_size,
                                           .NH = c->heads,
                                           .NKV = c->kv_heads,
                                           .D = c->head_dim,
                                           .V = c->vocab_size,
                                           .layer = w->layers,
                                           .kv = kv,
                                           .embed = w->embed,
                                           .norm = w->norm,
                                           .head = w->head,
                                           .frequency = w->frequency,
                                           .rope_scale = w->rope_scale,
                                           .eps = (float)c->rms_eps};
    if (!nbi_backend_has(a->be, NBI_CAP_MEGAKERNEL))
        return NB_OK;
    enum nb_status rc = a->be->megakernel_new(s, &m, &a->megakernel);
    return rc == NB_EUNSUPPORTED ? NB_OK : rc;
}

static bool suits_megakernel(const struct nbi_acts *a, const struct nbi_pass *p)
{
    return a->megakernel && p->N == 1 && p->matmul == NBI_MATMUL_FAST && !p->after_layer &&
           !p->pages;
}

static struct nbi_megakernel_step step_of(const struct nbi_acts *a, const struct nbi_pass *p,
                                          int32_t id)
{
    return (struct nbi_megakernel_step){.id = id,
                                        .position = p->positions[0],
                                        .kv_row = p->kv_rows[0],
                                        .first = p->first[0],
                                        .last = p->last[0],
                                        .logits = a->logits};
}

bool nbi_execute_can_run_ahead(const struct nbi_acts *a, const struct nbi_pass *p)
{
    return suits_megakernel(a, p) && nbi_backend_has(a->be, NBI_CAP_RUN_AHEAD);
}

enum nb_status nbi_execute_run_ahead(const struct nbi_weights *w, const struct nbi_acts *a,
                                     struct nbi_stream *s, const struct nbi_pass *p,
                                     struct nbi_run_ahead *r)
{
    NBI_BUG_IF(!nbi_execute_can_run_ahead(a, p));
    const struct nbi_megakernel_step step = step_of(a, p, 0);
    if (r->k > 1)
        NBI_TRY(nbi_execute_topk(w, a, s, 1, r->k));
    r->topk = a->topk;
    return a->be->megakernel_run_ahead(a->megakernel, &step, r);
}

/* ---- passes ---- */

enum nb_status nbi_execute(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                           const struct nbi_pass *p)
{
    struct nbi_backend *be = w->be;
    NBI_BUG_IF(p->N > a->N || p->M > a->M || p->decode_rows > p->N);
    NBI_BUG_IF(p->training && !a->training);
    NBI_BUG_IF(p->pages && p->page_count > a->page_count);
    if (suits_megakernel(a, p)) {
        const struct nbi_megakernel_step step = step_of(a, p, p->ids[0]);
        return be->megakernel_run(a->megakernel, &step);
    }
    NBI_TRY(upload_indices(a, s, p));
    if (!suits_graph(be, p))
        return nbi_forward(w, a, s, p);
    struct uploaded_pass u = {w, a, s, p};
    const struct nbi_graph graph = graph_for(&u);
    return be->graph_run(s, &graph);
}

enum nb_status nbi_execute_head(const struct nbi_weights *w, struct nbi_acts *a,
                                struct nbi_stream *s, const struct nbi_pass *p)
{
    NBI_BUG_IF(p->M > a->M);
    NBI_TRY(w->be->upload(s, a->rows, p->rows, p->M * (int64_t)sizeof(int32_t)));
    return nbi_forward_head(w, a, s, p);
}

/* ---- top-k ---- */

enum nb_status nbi_execute_topk(const struct nbi_weights *w, const struct nbi_acts *a,
                                struct nbi_stream *s, int64_t M, int64_t k)
{
    int64_t ids = M * (int64_t)sizeof(int32_t), values = ids + M * k * (int64_t)sizeof(int32_t);
    NBI_BUG_IF(M > a->topk_rows);
    return w->be->topk(s, &(struct nbi_op_topk){.ids = nbi_ptr_add(a->topk, ids),
                                                .values = nbi_ptr_add(a->topk, values),
                                                .nonfinite = a->topk,
                                                .logits = a->logits,
                                                .scratch = a->topk_scratch,
                                                .k = k,
                                                .N = M,
                                                .V = w->config->vocab_size});
}

bool nbi_topk_row(struct nb_candidate *out, const int32_t *topk, int64_t row, int64_t M, int64_t k)
{
    const int32_t *ids = topk + M + row * k, *values = topk + M + M * k + row * k;
    for (int64_t i = 0; i < k; i++) {
        out[i].id = ids[i];
        memcpy(&out[i].logit, &values[i], sizeof out[i].logit);
    }
    return topk[row] == 0;
}
