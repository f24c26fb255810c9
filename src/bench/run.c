/* run.c - how fast a model runs, against what memory and arithmetic allow. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/stats.h"
#include "bench/bandwidth.h"
#include "infer/session.h"

#define ROUNDS        5
#define DECODE_ROUNDS 9

/* Tokens that are no text; speed does not depend on them. */
static int32_t *some_tokens(int64_t count, int64_t vocab)
{
    int32_t *ids = malloc((size_t)count * sizeof *ids);
    for (int64_t i = 0; ids && i < count; i++)
        ids[i] = (int32_t)(i * 7919 % vocab);
    return ids;
}

/* Fills the session to `context` tokens, then times `tokens` more, again and again; in between, how
 * fast memory is, which others use too. */
static enum nb_status time_decode(struct nb_session *s, const struct nb_bench_run_opts *o,
                                  const int32_t *ids, float *logits, struct nb_bench_run *out)
{
    double seconds[DECODE_ROUNDS], read[DECODE_ROUNDS];
    struct nbi_next next = {.J = 1}; /* the best token, as a greedy answer wants it */
    struct nbi_backend *be = nbi_session_engine(s)->be;
    void *buf = be->bandwidth ? NULL : nbi_bandwidth_new();
    enum nb_status rc = buf || be->bandwidth ? nb_session_append(s, ids, o->context, logits)
                                             : nbi_fail_memory("measuring", 0);
    for (int r = -1; r < DECODE_ROUNDS && rc == NB_OK; r++) { /* the first warms up */
        int at = r < 0 ? 0 : r;
        read[at] = be->bandwidth ? be->bandwidth(be) : nbi_bandwidth_now(buf, out->threads);
        double start = nbi_now();
        for (int64_t i = 0; i < o->tokens && rc == NB_OK; i++)
            rc = nbi_session_append_next(s, ids + o->context + i, 1, &next);
        seconds[at] = (nbi_now() - start) / (double)o->tokens;
        nb_session_truncate(s, o->context);
    }
    free(buf);
    out->read_gb_per_s = nbi_median(read, DECODE_ROUNDS) / 1e9;
    out->tokens_per_s = 1 / nbi_median(seconds, DECODE_ROUNDS);
    return rc;
}

static enum nb_status time_prefill(struct nb_session *s, const struct nb_bench_run_opts *o,
                                   const int32_t *ids, float *logits, struct nb_bench_run *out)
{
    double round[ROUNDS];
    for (int r = -1; r < ROUNDS; r++) { /* the first warms up */
        nb_session_truncate(s, 0);
        double start = nbi_now();
        NBI_TRY(nb_session_append(s, ids, o->tokens, logits));
        round[r < 0 ? 0 : r] = nbi_now() - start;
    }
    out->tokens_per_s = (double)o->tokens / nbi_median(round, ROUNDS);
    return NB_OK;
}

/* Multiplications of one token in the matrices, the head not counted. */
static double macs_per_token(const struct nb_engine *e)
{
    double macs = 0;
    for (int64_t i = 0; i < e->config.layers; i++) {
        const struct nbi_layer_weights *l = &e->weights.layers[i];
        const struct nbi_weight *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (int j = 0; j < 7; j++)
            macs += (double)all[j]->rows * (double)all[j]->cols;
    }
    return macs;
}

/* Keys and values that a token sees, about the middle of a round. */
static int64_t kv_bytes(const struct nb_engine *e, const struct nb_bench_run_opts *o)
{
    static const int64_t sizes[] = {4, 2, 2, 1}; /* of enum nb_kv_dtype */
    return 2 * e->config.layers * e->config.kv_heads * e->config.head_dim * sizes[o->kv] *
           (o->context + (o->tokens + 1) / 2);
}

enum nb_status nb_bench_run(const struct nb_engine *e, const struct nb_bench_run_opts *o,
                            struct nb_bench_run *out)
{
    const struct nb_session_opts opts = {.context = o->context + o->tokens,
                                         .chunk = o->prefill ? o->tokens : 0,
                                         .kv = o->kv,
                                         .exact = o->exact};
    struct nb_session *s = NULL;
    int32_t *ids = some_tokens(o->context + o->tokens, e->config.vocab_size);
    float *logits = malloc((size_t)e->config.vocab_size * sizeof *logits);
    memset(out, 0, sizeof *out);
    enum nb_status rc = ids && logits ? nb_session_open(&s, e, &opts)
                                      : nbi_fail_memory("tokens", (size_t)o->tokens);
    out->threads = e->threads;
    out->cores = e->be->bandwidth ? 1 : e->threads;
    snprintf(out->device, sizeof out->device, "%s", e->be->name);
    if (rc == NB_OK)
        rc =
            o->prefill ? time_prefill(s, o, ids, logits, out) : time_decode(s, o, ids, logits, out);
    nb_session_close(s);
    free(ids);
    free(logits);
    if (rc != NB_OK)
        return rc;
    out->peak_gmac_per_s = e->be->peak ? e->be->peak(e->be) / 1e9 : NAN;
    out->bytes_per_token = e->weights.bytes_per_token;
    out->kv_bytes_per_token = o->prefill ? 0 : kv_bytes(e, o);
    out->gb_per_s = (double)out->bytes_per_token * out->tokens_per_s / 1e9;
    out->gmac_per_s = macs_per_token(e) * out->tokens_per_s / 1e9;
    return NB_OK;
}
