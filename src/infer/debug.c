/* debug.c - a model's results on given tokens, in a file, for comparing with another
 * implementation. */
#include <string.h>

#include "formats/writer.h"
#include "infer/perplexity.h"
#include "infer/session.h"

#define GREEDY_PROMPT 8
#define GREEDY_TOKENS 48

struct results {
    int64_t B, T, V;
    int32_t *ids, *labels;
    float *logits; /* [B, T, V] */
    float loss;
    int32_t greedy[GREEDY_PROMPT + GREEDY_TOKENS];
};

static enum nb_status read_ints(const struct nbi_store *in, const char *name, int64_t shape[2],
                                int32_t **out)
{
    const struct nbi_entry *e = nbi_store_find(in, name);
    if (!e || e->ndim != 2 || e->dtype != NBI_I32 || e->count < 1)
        return nbi_fail(NB_EFORMAT, "'%s' must be there as int32 [B, T]", name);
    memcpy(shape, e->shape, 2 * sizeof *shape);
    *out = malloc((size_t)e->count * sizeof **out);
    if (!*out)
        return nbi_fail_memory(name, (size_t)e->count * sizeof **out);
    return nbi_store_read(in, e, 0, e->count, *out);
}

static enum nb_status read_input(struct results *r, const char *path)
{
    struct nbi_store *in = NULL;
    int64_t shape[2] = {0}, labels[2] = {0};
    NBI_TRY(nbi_store_open(&in, path));
    enum nb_status rc = read_ints(in, "input_ids", shape, &r->ids);
    if (rc == NB_OK)
        rc = read_ints(in, "labels", labels, &r->labels);
    if (rc == NB_OK && (shape[0] != labels[0] || shape[1] != labels[1]))
        rc = nbi_fail(NB_EFORMAT, "'input_ids' and 'labels' have different shapes");
    nbi_store_close(in);
    r->B = shape[0];
    r->T = shape[1];
    return nbi_context(rc, "'%s'", path);
}

/* Mean over labelled positions of -log p(label of the next position). */
static enum nb_status compute_loss(struct results *r)
{
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < r->B * r->T; i++) {
        int32_t label = (i + 1) % r->T && r->labels ? r->labels[i + 1] : -100;
        if (label == -100)
            continue;
        if (label < 0 || label >= r->V)
            return nbi_fail(NB_EVALUE, "label %d is outside the vocabulary", label);
        sum += nbi_token_nll(r->logits + i * r->V, r->V, label);
        count++;
    }
    r->loss = (float)(count ? sum / (double)count : 0);
    return NB_OK;
}

static enum nb_status compute_logits(const struct nb_engine *e, struct results *r)
{
    const struct nbi_session_opts opts = {
        .context = r->T, .chunk = r->T, .logits = r->T, .kv = NBI_F32, .exact = true};
    struct nb_session *s = NULL;
    NBI_TRY(nbi_session_new(&s, e, &opts));
    enum nb_status rc = NB_OK;
    for (int64_t b = 0; b < r->B && rc == NB_OK; b++) {
        nbi_session_truncate(s, 0);
        rc = nbi_session_append(s, r->ids + b * r->T, r->T, r->logits + b * r->T * r->V, r->T);
    }
    nbi_session_free(s);
    return rc;
}

static enum nb_status compute_greedy(const struct nb_engine *e, struct results *r)
{
    const struct nbi_session_opts opts = {
        .context = GREEDY_PROMPT + GREEDY_TOKENS, .kv = NBI_F32, .exact = true};
    struct nb_session *s = NULL;
    int64_t prompt = r->T < GREEDY_PROMPT ? r->T : GREEDY_PROMPT, n = prompt;
    float *logits = malloc((size_t)r->V * sizeof *logits);
    if (!logits)
        return nbi_fail_memory("logits", (size_t)r->V * sizeof *logits);
    enum nb_status rc = nbi_session_new(&s, e, &opts);
    memcpy(r->greedy, r->ids, (size_t)prompt * sizeof *r->greedy);
    if (rc == NB_OK)
        rc = nbi_session_append(s, r->greedy, prompt, logits, 1);
    while (rc == NB_OK && n < GREEDY_PROMPT + GREEDY_TOKENS) {
        int32_t best = 0;
        for (int32_t v = 1; v < r->V; v++)
            best = logits[v] > logits[best] ? v : best;
        r->greedy[n++] = best;
        if (n < GREEDY_PROMPT + GREEDY_TOKENS)
            rc = nbi_session_append(s, &best, 1, logits, 1);
    }
    nbi_session_free(s);
    free(logits);
    return rc;
}

static enum nb_status write_output(const struct results *r, const char *path)
{
    const struct nbi_out out[] = {
        {.name = "logits", .dtype = NBI_F32, .ndim = 3, .shape = {r->B, r->T, r->V}},
        {.name = "loss", .dtype = NBI_F32, .ndim = 1, .shape = {1}},
        {.name = "greedy.ids",
         .dtype = NBI_I32,
         .ndim = 1,
         .shape = {GREEDY_PROMPT + GREEDY_TOKENS}}};
    const struct nbi_writer_opts opts = {.format = NBI_FORMAT_SAFETENSORS, .path = path};
    struct nbi_writer *w = NULL;
    NBI_TRY(nbi_writer_begin(&w, &opts, out, 3));
    enum nb_status rc = nbi_writer_put(w, 0, 0, r->B * r->T * r->V, r->logits);
    if (rc == NB_OK)
        rc = nbi_writer_put(w, 1, 0, 1, &r->loss);
    if (rc == NB_OK)
        rc = nbi_writer_put(w, 2, 0, GREEDY_PROMPT + GREEDY_TOKENS, r->greedy);
    if (rc == NB_OK)
        return nbi_writer_commit(w);
    nbi_writer_abort(w);
    return rc;
}

enum nb_status nb_debug_hf(const struct nb_engine *e, const char *in, const char *out)
{
    struct results r = {.V = e->config.vocab_size};
    enum nb_status rc = read_input(&r, in);
    if (rc == NB_OK && r.B * r.T > INT64_MAX / (64 * r.V))
        rc = nbi_fail(NB_EVALUE, "too many tokens");
    if (rc == NB_OK) {
        r.logits = malloc((size_t)(r.B * r.T * r.V) * sizeof *r.logits + 1);
        if (!r.logits)
            rc = nbi_fail_memory("logits", (size_t)(r.B * r.T * r.V) * sizeof *r.logits);
    }
    if (rc == NB_OK)
        rc = compute_logits(e, &r);
    if (rc == NB_OK)
        rc = compute_loss(&r);
    if (rc == NB_OK)
        rc = compute_greedy(e, &r);
    if (rc == NB_OK)
        rc = write_output(&r, out);
    free(r.ids);
    free(r.labels);
    free(r.logits);
    return rc;
}
