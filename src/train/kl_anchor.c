/* kl_anchor.c - runs the reference model over a data set and keeps its most likely ids.
 *
 * A record belongs to one labelled token: ref_k ids, then ref_k probabilities. Records stand in the
 * order of examples and of labels within them, so a micro-batch finds them again by example_of. */
#include "train/kl_anchor.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/dirs.h"
#include "base/syscall.h"
#include "tensor/half.h"

int64_t nbi_kl_anchor_bytes(int64_t N)
{
    return NBI_KL_ANCHOR_MEMORY + N * NBI_REF_IDS * (int64_t)(sizeof(int32_t) + sizeof(float));
}

/* ---- records ---- */

static size_t record_bytes(const struct nbi_kl_anchor *a)
{
    return (size_t)a->ref_k * (sizeof(int32_t) + sizeof(float));
}

/* Makes a temporary file in the directory of spill_next_to and unlinks it at once. */
static enum nb_status make_file(struct nbi_kl_anchor *a)
{
    size_t len = strlen(a->opts.spill_next_to);
    while (len > 1 && a->opts.spill_next_to[len - 1] == '/')
        len--;
    char *target = strndup(a->opts.spill_next_to, len), *name = NULL;
    if (!target)
        return nbi_fail_memory("file name", len);
    enum nb_status rc = nbi_temp_create(target, false, &name, &a->fd);
    if (rc == NB_OK)
        nbi_sys_unlink(name);
    free(target);
    free(name);
    return nbi_context(rc, "base probabilities");
}

static enum nb_status reserve_records(struct nbi_kl_anchor *a, int64_t records)
{
    int64_t size = (int64_t)record_bytes(a), bytes;
    if (__builtin_mul_overflow(records, size, &bytes))
        return nbi_fail(NB_EUNSUPPORTED, "%lld tokens are too many for --kl-base",
                        (long long)records);
    if (bytes <= a->opts.memory_limit) {
        a->memory = malloc((size_t)bytes);
        return a->memory ? NB_OK : nbi_fail_memory("base probabilities", (size_t)bytes);
    }
    NBI_TRY(make_file(a));
    int error;
    do
        error = posix_fallocate(a->fd, 0, bytes);
    while (error == EINTR);
    if (error != 0 && error != EOPNOTSUPP && error != EINVAL)
        return nbi_fail(NB_EIO, "no room for %lld bytes of base probabilities beside '%s': %s",
                        (long long)bytes, a->opts.spill_next_to, strerror(error));
    return NB_OK;
}

/* Reads or writes one record. */
static enum nb_status transfer(const struct nbi_kl_anchor *a, int64_t record, char *bytes,
                               bool write)
{
    size_t size = record_bytes(a), done = 0;
    int64_t at = record * (int64_t)size;
    if (a->fd < 0) {
        memcpy(write ? a->memory + at : bytes, write ? bytes : a->memory + at, size);
        return NB_OK;
    }
    while (done < size) {
        ssize_t n = write ? pwrite(a->fd, bytes + done, size - done, at + (int64_t)done)
                          : pread(a->fd, bytes + done, size - done, at + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return nbi_fail(NB_EIO, "the file of base probabilities: %s",
                            n < 0 ? strerror(errno) : "it has been cut");
        done += (size_t)n;
    }
    return NB_OK;
}

/* ---- the record of a label ---- */

/* Walks over the labels of a micro-batch. */
struct walk {
    const struct nbi_kl_anchor *anchor;
    const struct nbi_microbatch *batch;
    int64_t n;    /* next position */
    int64_t rank; /* labels of its example before it */
};

/* The record of the next label; -1: it has none. */
static int64_t next_record(struct walk *w)
{
    const struct nbi_microbatch *batch = w->batch;
    while (batch->targets[w->n] < 0)
        w->rank = batch->positions[w->n++] == 0 ? 0 : w->rank;
    int64_t n = w->n++, example = batch->example_of[n] - w->anchor->opts.first_example;
    w->rank = batch->positions[n] == 0 ? 0 : w->rank;
    if (example < 0 || example >= nbi_dataset_stats(w->anchor->opts.data)->examples ||
        w->anchor->first[example] == w->anchor->first[example + 1])
        return -1;
    NBI_BUG_IF(w->anchor->first[example] + w->rank >= w->anchor->first[example + 1]);
    return w->anchor->first[example] + w->rank++;
}

enum nb_status nbi_kl_anchor_set(const struct nbi_kl_anchor *a, const struct nbi_microbatch *batch,
                                 struct nbi_labels *l, int64_t *count)
{
    struct walk w = {.anchor = a, .batch = batch};
    size_t half = (size_t)a->ref_k * sizeof *a->ref_ids;
    char bytes[NBI_REF_IDS * (sizeof(int32_t) + sizeof(float))];
    *count = 0;
    for (int64_t i = 0; i < l->count; i++) {
        int64_t record = next_record(&w);
        int32_t *ids = a->ref_ids + i * a->ref_k;
        ids[0] = -1;
        if (record < 0)
            continue;
        NBI_TRY(transfer(a, record, bytes, false));
        memcpy(ids, bytes, half);
        memcpy(a->ref_p + i * a->ref_k, bytes + half, half);
        ++*count;
    }
    l->ref_k = a->ref_k;
    l->ref_ids = a->ref_ids;
    l->ref_p = a->ref_p;
    return NB_OK;
}

/* ---- running the reference ---- */

/* Restores a heap whose smallest value is on top, from entry i down. */
static void sift(const float *logits, int32_t *heap, int64_t n, int64_t i)
{
    int32_t moved = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && logits[heap[child + 1]] < logits[heap[child]])
            child++;
        if (logits[moved] <= logits[heap[child]])
            break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

enum nb_status nbi_kl_anchor_topk(const float *logits, int64_t V, int64_t k, int32_t *ids, float *p)
{
    double sum = 0;
    NBI_BUG_IF(k < 1 || k > V);
    for (int64_t j = 0; j < k; j++)
        ids[j] = (int32_t)j;
    for (int64_t j = k / 2; j-- > 0;)
        sift(logits, ids, k, j);
    for (int64_t v = k; v < V; v++)
        if (logits[v] > logits[ids[0]]) {
            ids[0] = (int32_t)v;
            sift(logits, ids, k, 0);
        }
    for (int64_t n = k - 1; n > 0; n--) { /* sort: the smallest moves to the end */
        int32_t least = ids[0];
        ids[0] = ids[n];
        ids[n] = least;
        sift(logits, ids, n, 0);
    }
    double top = (double)logits[ids[0]];
    for (int64_t v = 0; v < V; v++)
        sum += exp((double)logits[v] - top);
    if (!isfinite(sum))
        return nbi_fail(NB_EVALUE, "the base model's logits are not finite");
    for (int64_t j = 0; j < k; j++)
        p[j] = (float)(exp((double)logits[ids[j]] - top) / sum);
    return NB_OK;
}

/* Counts the labels of each example that fits into a row of T, and sets a->first. */
static enum nb_status count_tokens(struct nbi_kl_anchor *a, int64_t T)
{
    int64_t n = nbi_dataset_stats(a->opts.data)->examples;
    struct nbi_example x = {0};
    enum nb_status rc = NB_OK;
    a->first = calloc((size_t)n + 1, sizeof *a->first);
    if (!a->first)
        return nbi_fail_memory("base probabilities", ((size_t)n + 1) * sizeof *a->first);
    for (int64_t i = 0; i < n && rc == NB_OK; i++) {
        a->first[i + 1] = a->first[i];
        if (nbi_dataset_is_document(a->opts.data, i) && nbi_dataset_tokens(a->opts.data, i) > T + 1)
            continue;
        rc = nbi_dataset_get(a->opts.data, i, &x);
        if (rc == NB_OK)
            nbi_example_truncate(&x, (size_t)T + 1);
        for (size_t k = 1; rc == NB_OK && k < x.ids.count; k++)
            a->first[i + 1] += x.trained[k];
    }
    nbi_example_release(&x);
    NBI_TRY(rc);
    if (a->first[n] == 0)
        return nbi_fail(NB_EINVAL,
                        "--kl-base is about samples that fit into a row, and none has "
                        "a label within %lld tokens",
                        (long long)T);
    return NB_OK;
}

struct collection {
    float *logits;  /* [V] */
    uint16_t *half; /* [V] as bf16, if the activations are */
    int64_t records;
    double sum_logp;
};

/* Downloads row i of the logits to c->logits. */
static enum nb_status fetch_logits(const struct nbi_kl_anchor_pass *x, int64_t i,
                                   struct collection *c)
{
    struct nbi_backend *be = x->weights->be;
    bool bf16 = x->acts->dtype == NBI_BF16;
    int64_t V = x->weights->config->vocab_size, row = nbi_acts_size(x->acts, V);
    NBI_TRY(be->download(x->stream, bf16 ? (void *)c->half : c->logits,
                         nbi_ptr_add(x->acts->logits, i * row), row));
    NBI_TRY(be->sync(x->stream));
    for (int64_t v = 0; v < V && bf16; v++)
        c->logits[v] = nbi_bf16_to_f32(c->half[v]);
    return NB_OK;
}

/* Keeps the records of the next M labels, whose logits are in acts. */
static enum nb_status keep_rows(struct nbi_kl_anchor *a, const struct nbi_kl_anchor_pass *x,
                                struct walk *w, int64_t M, struct collection *c)
{
    int64_t V = x->weights->config->vocab_size;
    int32_t record[2 * NBI_REF_IDS]; /* ids, then floats of the same size */
    for (int64_t i = 0; i < M; i++) {
        int64_t at = next_record(w);
        if (at < 0)
            continue;
        float p[NBI_REF_IDS];
        NBI_TRY(fetch_logits(x, i, c));
        NBI_TRY(nbi_kl_anchor_topk(c->logits, V, a->ref_k, record, p));
        memcpy(record + a->ref_k, p, (size_t)a->ref_k * sizeof *p);
        NBI_TRY(transfer(a, at, (char *)record, true));
        c->sum_logp += log((double)p[0]);
        c->records++;
    }
    return NB_OK;
}

static enum nb_status keep_batch(struct nbi_kl_anchor *a, const struct nbi_kl_anchor_pass *x,
                                 struct collection *c)
{
    struct nbi_train_pass *f = x->pass;
    struct walk w = {.anchor = a, .batch = x->batch};
    for (int64_t i = 0; i < x->batch->B * x->batch->T; i++)
        x->batch->example_of[i] += x->batch->example_of[i] >= 0 ? a->opts.first_example : 0;
    NBI_TRY(nbi_check_interrupt());
    NBI_TRY(nbi_train_pass_set(f, x->batch));
    NBI_TRY(nbi_execute(x->weights, x->acts, x->stream, &f->pass));
    for (int64_t i = 0; i < f->labels.count; i += x->acts->M) {
        struct nbi_pass pass = f->pass;
        int64_t left = f->labels.count - i;
        pass.M = left < x->acts->M ? left : x->acts->M;
        pass.rows = f->labels.rows + i;
        NBI_TRY(nbi_execute_head(x->weights, x->acts, x->stream, &pass));
        NBI_TRY(keep_rows(a, x, &w, pass.M, c));
    }
    return NB_OK;
}

static enum nb_status keep_all(struct nbi_kl_anchor *a, const struct nbi_kl_anchor_pass *x)
{
    int64_t n = nbi_dataset_stats(a->opts.data)->examples;
    const struct nbi_loader_opts opts = {
        .data = a->opts.data, .pack = true, .keep_documents = true, .epochs = 1};
    struct nbi_loader loader = {0};
    size_t V = (size_t)x->weights->config->vocab_size;
    struct collection c = {.logits = calloc(V, sizeof *c.logits),
                           .half = calloc(V, sizeof *c.half)};
    bool more = true;
    enum nb_status rc = c.logits && c.half ? nbi_loader_init(&loader, &opts)
                                           : nbi_fail_memory("logits", V * sizeof *c.logits);
    while (rc == NB_OK) {
        rc = nbi_loader_next(&loader, x->batch, &more);
        if (rc != NB_OK || !more)
            break;
        rc = keep_batch(a, x, &c);
        if (a->opts.progress)
            a->opts.progress(a->opts.progress_ctx, (uint64_t)c.records, (uint64_t)a->first[n]);
    }
    NBI_BUG_IF(rc == NB_OK && c.records != a->first[n]);
    a->mean_top_logp = c.records ? c.sum_logp / (double)c.records : 0;
    nbi_loader_release(&loader);
    free(c.logits);
    free(c.half);
    return rc;
}

enum nb_status nbi_kl_anchor_init(struct nbi_kl_anchor *a, const struct nbi_kl_anchor_opts *opts,
                                  const struct nbi_kl_anchor_pass *x)
{
    int64_t V = x->weights->config->vocab_size;
    size_t entries = (size_t)(x->batch->B * x->batch->T) * NBI_REF_IDS;
    *a =
        (struct nbi_kl_anchor){.opts = *opts, .ref_k = V < NBI_REF_IDS ? V : NBI_REF_IDS, .fd = -1};
    a->ref_ids = malloc(entries * sizeof *a->ref_ids);
    a->ref_p = calloc(entries, sizeof *a->ref_p);
    if (!a->ref_ids || !a->ref_p)
        return nbi_fail_memory("base probabilities", entries * sizeof *a->ref_p);
    NBI_TRY(count_tokens(a, x->batch->T));
    NBI_TRY(reserve_records(a, a->first[nbi_dataset_stats(opts->data)->examples]));
    return nbi_context(keep_all(a, x), "the base model");
}

void nbi_kl_anchor_release(struct nbi_kl_anchor *a)
{
    if (a->first && a->fd >= 0)
        close(a->fd);
    free(a->first);
    free(a->memory);
    free(a->ref_ids);
    free(a->ref_p);
    *a = (struct nbi_kl_anchor){.fd = -1};
}
