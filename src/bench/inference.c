/* inference.c - measures prefill and decode, next to the limits of memory and arithmetic. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/stats.h"
#include "bench/bandwidth.h"
#include "infer/session.h"
#include "nibble/tools.h"

#define ROUNDS        5
#define DECODE_ROUNDS 9

/* Arbitrary token ids; speed does not depend on them. */
static int32_t *some_tokens(int64_t count, int64_t vocab)
{
    int32_t *ids = malloc((size_t)count * sizeof *ids);
    for (int64_t i = 0; ids && i < count; i++)
        ids[i] = (int32_t)(i * 7919 % vocab);
    return ids;
}

/* One sequence in a session, or several in a batch. */
struct decoder {
    struct nb_session *session;
    struct nb_batch *batch;
    struct nb_batch_input *inputs;   /* [sequences] */
    struct nb_candidate *candidates; /* [sequences] */
    int64_t sequences;
    struct nbi_logits_spec next; /* of the session */
};

static void decoder_close(struct decoder *d)
{
    nb_session_close(d->session);
    nb_batch_close(d->batch);
    free(d->inputs);
    free(d->candidates);
}

static enum nb_status decoder_open(struct decoder *d, const struct nb_engine *e,
                                   const struct nb_bench_run_opts *o)
{
    *d = (struct decoder){.sequences = o->parallel, .next.k = 1};
    if (o->parallel == 0 || o->prefill)
        return nb_session_open(&d->session, e,
                               &(struct nb_session_opts){.context = o->context + o->tokens,
                                                         .chunk = o->prefill ? o->tokens : 0,
                                                         .kv = o->kv,
                                                         .exact = o->exact});
    size_t n = (size_t)o->parallel;
    d->inputs = calloc(n, sizeof *d->inputs);
    d->candidates = calloc(n, sizeof *d->candidates);
    if (!d->inputs || !d->candidates)
        return nbi_fail_memory("sequences", n * sizeof *d->inputs);
    NBI_TRY(nb_batch_open(&d->batch, e,
                          &(struct nb_batch_opts){.sequences = o->parallel,
                                                  .context = o->context + o->tokens,
                                                  .kv = o->kv,
                                                  .exact = o->exact,
                                                  .deterministic = o->deterministic}));
    for (int64_t i = 0, sequence; i < o->parallel; i++)
        NBI_TRY(nb_batch_add(d->batch, &sequence));
    return NB_OK;
}

/* A step in which no input may fail. */
static enum nb_status batch_step(struct decoder *d, int64_t count)
{
    NBI_TRY(nb_batch_step(d->batch, d->inputs, count));
    for (int64_t i = 0; i < count; i++)
        NBI_TRY(d->inputs[i].status);
    return NB_OK;
}

/* Appends the first `count` ids to each sequence, in batch steps of up to info.chunk tokens. */
static enum nb_status decoder_fill(struct decoder *d, const int32_t *ids, int64_t count)
{
    struct nb_batch_info info;
    if (d->session)
        return nb_session_append(d->session, ids, count, NULL);
    nb_batch_info(d->batch, &info);
    for (int64_t from = 0; count > 0 && from < d->sequences;) {
        int64_t free_tokens = info.chunk, inputs = 0;
        while (from < d->sequences && free_tokens > 0) {
            int64_t done = nb_batch_length(d->batch, from), left = count - done;
            int64_t n = left < free_tokens ? left : free_tokens;
            d->inputs[inputs++] =
                (struct nb_batch_input){.sequence = from, .ids = ids + done, .count = n};
            free_tokens -= n;
            from += n == left;
        }
        NBI_TRY(batch_step(d, inputs));
    }
    return NB_OK;
}

/* Appends one token to each sequence and asks for the most likely next one. A session continues
 * with that token, like greedy decoding, so the GPU may run ahead; a batch is given *id. */
static enum nb_status decoder_step(struct decoder *d, const int32_t *id)
{
    if (d->session)
        return nbi_session_append_next(d->session, &d->next.candidates[0].id, 1, &d->next);
    for (int64_t i = 0; i < d->sequences; i++)
        d->inputs[i] = (struct nb_batch_input){
            .sequence = i, .ids = id, .count = 1, .candidates = &d->candidates[i], .topk = 1};
    return batch_step(d, d->sequences);
}

static enum nb_status decoder_truncate(struct decoder *d, int64_t length)
{
    if (d->session)
        nb_session_truncate(d->session, length);
    for (int64_t i = 0; i < d->sequences; i++)
        NBI_TRY(nb_batch_truncate(d->batch, i, length));
    return NB_OK;
}

/* Fills the sequences to `context` tokens, then repeatedly times `tokens` more. Bandwidth is
 * measured before each round, because other processes use the same memory. */
static enum nb_status time_decode(struct decoder *d, const struct nb_engine *e,
                                  const struct nb_bench_run_opts *o, const int32_t *ids,
                                  struct nb_bench_run *out)
{
    double seconds[DECODE_ROUNDS], read[DECODE_ROUNDS];
    struct nbi_backend *be = e->be;
    bool own_memory = nbi_backend_has(be, NBI_CAP_OWN_MEMORY);
    void *buf = own_memory ? NULL : nbi_bandwidth_new();
    enum nb_status rc =
        buf || own_memory ? decoder_fill(d, ids, o->context) : nbi_fail_memory("measuring", 0);
    for (int r = -1; r < DECODE_ROUNDS && rc == NB_OK; r++) { /* the first warms up */
        int at = r < 0 ? 0 : r;
        read[at] = own_memory ? be->roofline_bandwidth(be) : nbi_bandwidth_now(buf, out->threads);
        double start = nbi_now();
        for (int64_t i = 0; i < o->tokens && rc == NB_OK; i++)
            rc = decoder_step(d, ids + o->context + i);
        seconds[at] = (nbi_now() - start) / (double)o->tokens;
        if (rc == NB_OK)
            rc = decoder_truncate(d, o->context);
    }
    free(buf);
    if (rc != NB_OK)
        return rc;
    out->read_gb_per_s = nbi_median(read, DECODE_ROUNDS) / 1e9;
    out->tokens_per_s =
        (double)(o->parallel > 0 ? o->parallel : 1) / nbi_median(seconds, DECODE_ROUNDS);
    return NB_OK;
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

/* Multiply-accumulates per token in the layers' matrices; without the head. */
static double macs_per_token(const struct nb_engine *e)
{
    double macs = 0;
    for (int64_t i = 0; i < nbi_param_count(&e->config); i++) {
        struct nbi_param p;
        nbi_param_at(&e->config, i, &p);
        if (p.layer >= 0 && p.ndim == 2)
            macs += (double)nbi_param_values(&p);
    }
    return macs;
}

/* Bytes of keys and values that a token attends to, in the middle of a round. */
static int64_t kv_bytes(const struct nb_engine *e, const struct nb_bench_run_opts *o)
{
    int64_t bytes = nbi_dtypes[nbi_kv_types[o->kv].dtype].bytes;
    return 2 * e->config.layers * e->config.kv_heads * e->config.head_dim * bytes *
           (o->context + (o->tokens + 1) / 2);
}

enum nb_status nb_bench_run(const struct nb_engine *e, const struct nb_bench_run_opts *o,
                            struct nb_bench_run *out)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(o->cancel);
    struct decoder d = {0};
    struct nb_bench_run found = {.threads = e->threads,
                                 .cores =
                                     nbi_backend_has(e->be, NBI_CAP_OWN_MEMORY) ? 1 : e->threads,
                                 .bytes_per_token = e->weights.bytes_per_token};
    if (o->tokens < 1 || o->context < 0 || o->parallel < 0)
        return nbi_fail(NB_EINVAL, "%lld tokens after %lld, of %lld sequences",
                        (long long)o->tokens, (long long)o->context, (long long)o->parallel);
    int32_t *ids = some_tokens(o->context + o->tokens, e->config.vocab_size);
    float *logits = malloc((size_t)e->config.vocab_size * sizeof *logits);
    enum nb_status rc =
        ids && logits ? decoder_open(&d, e, o) : nbi_fail_memory("tokens", (size_t)o->tokens);
    snprintf(found.device, sizeof found.device, "%s", e->be->name);
    if (rc == NB_OK)
        rc = o->prefill ? time_prefill(d.session, o, ids, logits, &found)
                        : time_decode(&d, e, o, ids, &found);
    decoder_close(&d);
    free(ids);
    free(logits);
    if (rc != NB_OK)
        return rc;
    double parallel = o->parallel > 0 ? (double)o->parallel : 1;
    found.peak_gmac_per_s = e->be->roofline(e->be) / 1e9;
    found.kv_bytes_per_token = o->prefill ? 0 : kv_bytes(e, o);
    double bytes = (double)found.bytes_per_token / parallel;
    if (o->parallel > 0)
        bytes += (double)found.kv_bytes_per_token;
    found.gb_per_s = bytes * found.tokens_per_s / 1e9;
    found.gmac_per_s = macs_per_token(e) * found.tokens_per_s / 1e9;
    *out = found;
    return NB_OK;
}
