/* batch_lab.h - shared by tests of batches: a small random model, steps, an operation that counts
 * passes. */
#pragma once

#include "backend/ops.h"
#include "base/rng.h"
#include "infer/batch.h"
#include "unit/support.h"

#define VOCAB     2048
#define ROW       (VOCAB * sizeof(float))
#define SEQUENCES 6
#define CONTEXT   300
#define COUNT(a)  ((int64_t)(sizeof(a) / sizeof *(a)))

static struct nb_engine *engine;

static inline int open_engine(void **state)
{
    const struct nb_engine_opts opts = {.synthetic = "tiny", .threads = 1};
    (void)state;
    return nb_engine_open(&engine, &opts) == NB_OK ? 0 : -1;
}

static inline int close_engine(void **state)
{
    (void)state;
    nb_engine_close(engine);
    return 0;
}

static const struct nb_batch_opts usual = {
    .sequences = SEQUENCES, .context = CONTEXT, .chunk = 128, .kv = NB_KV_F16};

static inline struct nb_batch *open_batch(const struct nb_batch_opts *opts)
{
    struct nb_batch *b;
    assert_ok(nb_batch_open(&b, engine, opts));
    return b;
}

static inline int64_t added(struct nb_batch *b)
{
    int64_t sequence = -1;
    assert_ok(nb_batch_add(b, &sequence));
    return sequence;
}

static inline int64_t free_pages(const struct nb_batch *b)
{
    struct nb_batch_info info;
    nb_batch_info(b, &info);
    return info.free;
}

/* A step in which every input succeeds. */
static inline void run_step(struct nb_batch *b, struct nb_batch_input *inputs, int64_t count)
{
    assert_ok(nb_batch_step(b, inputs, count));
    for (int64_t i = 0; i < count; i++)
        if (inputs[i].status != NB_OK)
            fail_msg("input %d: %s", (int)i, nb_last_error());
}

/* The ids of a sequence; `name` seeds them. */
static inline void ids_of(int32_t *ids, int64_t name)
{
    for (int64_t i = 0; i < CONTEXT; i++)
        ids[i] = (int32_t)(nbi_philox(11, (uint64_t)(name * CONTEXT + i), 0).v[0] % VOCAB);
}

/* The index of the largest. */
static inline int best_of(const float *logits)
{
    int best = 0;
    for (int v = 1; v < VOCAB; v++)
        best = logits[v] > logits[best] ? v : best;
    return best;
}

/* ---- instrumented operations ---- */

static struct nbi_backend real; /* the engine's, before it was changed */
static int64_t passes[64], pass_count;

static inline enum nb_status count_pass(struct nbi_stream *s, const struct nbi_op_rope_table *a)
{
    assert_true(pass_count < COUNT(passes));
    passes[pass_count++] = a->N;
    return real.rope_table(s, a);
}
