/* requests.h - shared by tests of schedulers: a small random model, requests of many kinds, and
 * what becomes of them. */
#pragma once

#include <stdatomic.h>

#include "base/rng.h"
#include "unit/by_hand.h"

#define LONGEST 300 /* tokens of a prompt */

static struct nb_engine *engine;

static inline int open_tiny(void **state)
{
    (void)state;
    return nb_engine_open(
        &engine, &(struct nb_engine_opts){.synthetic = "tiny", .device = "cpu", .threads = 2});
}

static inline int close_tiny(void **state)
{
    (void)state;
    nb_engine_close(engine);
    return 0;
}

/* ---- requests, and what becomes of them ---- */

struct outcome {
    struct nb_request request;
    int32_t *prompt;
    int64_t id;
    _Atomic int ended; /* how often done was called */
    enum nb_status status;
    struct nb_generate_result result;
    char error[200];
    char text[1024]; /* as it grew */
    size_t len;
    struct nb_scheduler *cancels; /* cancels itself after some text */
    struct nb_cancel stop;        /* its own, if a test wants one */
    _Atomic int grown, stopped;   /* some text has come; stop was set */
};

static inline void keep(void *ctx, int64_t id, enum nb_status status,
                        struct nb_generate_result *result)
{
    struct outcome *o = ctx;
    assert_int_equal(id, o->id);
    o->status = status;
    o->result = *result;
    *result = (struct nb_generate_result){0};
    snprintf(o->error, sizeof o->error, "%s", status == NB_OK ? "" : nb_last_error());
    o->ended++;
}

/* Request i: a prompt of 1 to LONGEST tokens, greedy or random sampling, penalties. */
static inline void make(struct outcome *o, int i)
{
    struct nb_generate_opts *g = &o->request.opts;
    *o = (struct outcome){.request = {.done = keep, .ctx = o}};
    o->request.count = (size_t)(i % 7 == 6 ? LONGEST - i % 50 : 1 + 3 * (i % 40));
    o->prompt = calloc(LONGEST, sizeof *o->prompt); /* a test may change the count */
    assert_non_null(o->prompt);
    for (size_t k = 0; k < LONGEST; k++)
        o->prompt[k] = (int32_t)(nbi_philox(7, (uint64_t)i * LONGEST + k, 0).v[0] % 500);
    o->request.ids = o->prompt;
    g->max_tokens = 1 + i * 5 % 40;
    g->ignore_eos = i % 2;
    g->sampling = (struct nb_sampling){
        .temperature = i % 3 * 0.6, .top_p = 1, .repeat_penalty = 1, .seed = (uint64_t)i};
    if (i % 4 == 3) {
        g->sampling.top_k = 20;
        g->sampling.top_p = 0.8;
        g->sampling.repeat_penalty = 1.3;
    }
}

static inline void release(struct outcome *o)
{
    free(o->prompt);
    nb_generate_result_release(&o->result);
}

static inline void submit(struct nb_scheduler *s, struct outcome *o)
{
    assert_ok(nb_scheduler_submit(s, &o->request, &o->id));
    assert_true(o->id > 0);
}

static inline struct nb_scheduler *open_scheduler(int64_t sequences, int64_t context,
                                                  int64_t tokens)
{
    struct nb_scheduler *s;
    const struct nb_scheduler_opts opts = {
        .batch = {.sequences = sequences, .context = context, .tokens = tokens, .kv = NB_KV_F16}};
    assert_ok(nb_scheduler_open(&s, engine, &opts));
    return s;
}

static inline void run_all(struct nb_scheduler *s)
{
    int64_t active;
    assert_ok(nb_scheduler_run(s, 0, &active));
    assert_int_equal(active, 0);
}

/* The answer is what it is by hand; of a cancelled request its beginning. */
static inline void check_alone(const struct outcome *o, int64_t context)
{
    static struct by_hand alone;
    answer_by_hand(engine, context, o->request.ids, o->request.count, &o->request.opts, &alone);
    if (o->status == NB_OK) {
        assert_int_equal(o->result.count, alone.count);
        assert_int_equal(o->result.finish, alone.finish);
    }
    assert_int_equal(o->result.prompt_tokens, (int64_t)o->request.count);
    assert_true((int64_t)o->result.count <= alone.count);
    assert_memory_equal(o->result.ids, alone.ids, o->result.count * sizeof *alone.ids);
}
