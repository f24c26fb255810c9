/* test_scheduler.c - requests that run together, over a batch, or one after another, over a
 * session, get the answers that each would get by itself, and one that is bad, cancelled or broken
 * leaves the others alone. */
#include "infer/scheduler.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "base/rng.h"
#include "unit/by_hand.h"

#define LONGEST 300
#define PLENTY  1 << 20 /* more than any vocabulary here has */

static struct nb_engine *engine;

static int setup(void **state)
{
    (void)state;
    return nb_engine_open(
        &engine, &(struct nb_engine_opts){.synthetic = "tiny", .device = "cpu", .threads = 2});
}

static int teardown(void **state)
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

static void keep(void *ctx, int64_t id, enum nb_status status, struct nb_generate_result *result)
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
static void make(struct outcome *o, int i)
{
    struct nb_generate_opts *g = &o->request.opts;
    *o = (struct outcome){.request = {.done = keep, .ctx = o}};
    o->request.count = (size_t)(i % 7 == 6 ? LONGEST - i % 50 : 1 + 3 * (i % 40));
    o->prompt = calloc(o->request.count, sizeof *o->prompt);
    assert_non_null(o->prompt);
    for (size_t k = 0; k < o->request.count; k++)
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

static void release(struct outcome *o)
{
    free(o->prompt);
    nb_generate_result_release(&o->result);
}

static void submit(struct nb_scheduler *s, struct outcome *o)
{
    assert_ok(nb_scheduler_submit(s, &o->request, &o->id));
    assert_true(o->id > 0);
}

static struct nb_scheduler *open_scheduler(int64_t sequences, int64_t context, int64_t tokens)
{
    struct nb_scheduler *s;
    const struct nb_scheduler_opts opts = {
        .batch = {.sequences = sequences, .context = context, .tokens = tokens, .kv = NB_KV_F16}};
    assert_ok(nb_scheduler_open(&s, engine, &opts));
    return s;
}

static void run_all(struct nb_scheduler *s)
{
    int64_t active;
    assert_ok(nb_scheduler_run(s, 0, &active));
    assert_int_equal(active, 0);
}

static void run_until_interrupted(struct nb_scheduler *s)
{
    assert_fails(nb_scheduler_run(s, 0, NULL), NB_EINTERRUPTED, "interrupted");
}

/* The answer is what it is by hand; of a cancelled request its beginning. */
static void check_alone(const struct outcome *o, int64_t context)
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

/* ---- tests ---- */

static void test_scheduler__answers_do_not_depend_on_others(void **state)
{
    static const int64_t slots[] = {1, 4, 16, 64};
    enum { REQUESTS = 23 };
    static struct outcome all[REQUESTS];
    (void)state;
    for (int run = 0; run < 4; run++) {
        struct nb_scheduler *s = open_scheduler(slots[run], 512, 0);
        for (int i = 0; i < REQUESTS; i++) {
            make(&all[i], i);
            submit(s, &all[i]);
        }
        run_all(s);
        for (int i = 0; i < REQUESTS; i++) {
            assert_int_equal(all[i].ended, 1);
            assert_int_equal(all[i].status, NB_OK);
            check_alone(&all[i], 512);
            release(&all[i]);
        }
        nb_scheduler_close(s);
    }
}

static void test_scheduler__answers_end_with_the_context(void **state)
{
    (void)state;
    for (int slots = 1; slots <= 2; slots++) {
        struct nb_scheduler *s = open_scheduler(slots, 90, 0);
        struct outcome all[2];
        for (int i = 0; i < 2; i++) {
            make(&all[i], 6); /* a long one */
            all[i].request.count = 90 - (i ? 3 : 40);
            all[i].request.opts.max_tokens = 10;
            all[i].request.opts.ignore_eos = true;
            submit(s, &all[i]);
        }
        run_all(s);
        assert_int_equal(all[0].result.finish, NB_FINISH_LENGTH);
        assert_int_equal(all[0].result.count, 10);
        assert_int_equal(all[1].result.finish, NB_FINISH_CONTEXT);
        assert_int_equal(all[1].result.count, 4);
        check_alone(&all[1], 90);
        release(&all[0]);
        release(&all[1]);
        nb_scheduler_close(s);
    }
}

static void check_refusals(int64_t slots)
{
    struct nb_scheduler *s = open_scheduler(slots, 200, 256);
    struct outcome o;
    int64_t id, active;
    make(&o, 6);
    o.request.count = 201;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EVALUE,
                 "201 tokens do not fit the context of 200");
    o.request.count = 0;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EINVAL, "the prompt is empty");
    o.request.count = 20;
    o.prompt[19] = (int32_t)engine->config.vocab_size;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EVALUE, "outside the vocabulary");
    o.prompt[19] = -1;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EVALUE, "outside the vocabulary");
    o.prompt[19] = 1;
    o.request.opts.sampling.top_p = 2;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EINVAL, "top-p");
    o.request.opts.sampling.top_p = 1;
    submit(s, &o);
    run_all(s);
    assert_int_equal(o.status, NB_OK);
    assert_int_equal(o.ended, 1);
    release(&o);
    assert_ok(nb_scheduler_run(s, 0, &active)); /* nothing to do */
    assert_int_equal(active, 0);
    nb_scheduler_close(s);

    s = open_scheduler(slots, 200, 64); /* a pool of one page */
    make(&o, 6);
    o.request.count = 60;
    o.request.opts.max_tokens = 5;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EVALUE, "65 tokens");
    o.request.opts.max_tokens = 4;
    submit(s, &o);
    run_all(s);
    assert_int_equal(o.status, NB_OK);
    check_alone(&o, 200);
    release(&o);
    nb_scheduler_close(s);
}

static void test_scheduler__refuses_bad_requests(void **state)
{
    (void)state;
    check_refusals(1);
    check_refusals(4);
}

static void test_scheduler__refuses_bad_options(void **state)
{
    static const struct {
        struct nb_batch_opts batch;
        const char *words;
    } cases[] = {
        {{.sequences = 0}, "0 sequences"},
        {{.sequences = 1, .context = -1}, "context of -1"},
        {{.sequences = 1, .context = 1 << 30}, "the model was made for"},
        {{.sequences = 1, .tokens = -5}, "-5 in all"},
        {{.sequences = 1, .chunk = -1}, "-1 a step"},
        {{.sequences = 1, .kv = (enum nb_kv_dtype)9}, "kind of cache"},
        {{.sequences = 2, .kv = (enum nb_kv_dtype)9}, "kind of cache"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nb_scheduler *s = (void *)1;
        const struct nb_scheduler_opts opts = {cases[i].batch};
        assert_int_not_equal(nb_scheduler_open(&s, engine, &opts), NB_OK);
        assert_non_null(strstr(nb_last_error(), cases[i].words));
        assert_null(s);
    }
}

/* A logit that is not finite ends its own request, and leaves nothing for later ones. */
static void check_nan(int64_t slots)
{
    enum { REQUESTS = 9, BROKEN = 505 };
    static struct outcome all[REQUESTS];
    static const struct nb_bias never = {BROKEN, -1e6F};
    struct nb_scheduler *s = open_scheduler(slots, 512, 0);
    const struct nbi_weight *embed = &engine->weights.embed;
    uint16_t *row = (uint16_t *)embed->data.at + BROKEN * embed->cols, kept = *row;
    assert_int_equal(embed->dtype, NBI_BF16);
    *row = 0x7FC0; /* NaN */
    for (int i = 0; i < REQUESTS; i++) {
        make(&all[i], i);
        all[i].request.opts.sampling.bias = &never;
        all[i].request.opts.sampling.bias_count = 1;
        if (i % 3 == 1)
            all[i].prompt[all[i].request.count / 2] = BROKEN;
        submit(s, &all[i]);
    }
    run_all(s);
    for (int i = 0; i < REQUESTS; i++) {
        assert_int_equal(all[i].ended, 1);
        if (i % 3 == 1) {
            assert_int_equal(all[i].status, NB_EVALUE);
            assert_non_null(strstr(all[i].error, "the model gave a logit that is not finite"));
            assert_null(all[i].result.ids);
        } else {
            assert_int_equal(all[i].status, NB_OK);
        }
    }
    submit(s, &all[7]); /* fails once more, and now nothing comes after it */
    run_all(s);
    assert_int_equal(all[7].status, NB_EVALUE);
    *row = kept;
    submit(s, &all[7]);
    run_all(s);
    assert_int_equal(all[7].status, NB_OK);
    assert_int_equal(all[7].ended, 3);
    for (int i = 0; i < REQUESTS; i++) {
        if (all[i].status == NB_OK)
            check_alone(&all[i], 512);
        release(&all[i]);
    }
    nb_scheduler_close(s);
}

static void test_scheduler__a_nan_ends_its_own_request(void **state)
{
    (void)state;
    check_nan(1);
    check_nan(9);
}

/* Requests wait until the pool has room for the longest answer that they may give, and begin in the
 * order in which they came. */
static void test_scheduler__pages_are_reserved(void **state)
{
    enum { REQUESTS = 5 };
    static struct outcome all[REQUESTS];
    struct nb_scheduler *s = open_scheduler(REQUESTS, 256, 4 * 64);
    struct nb_scheduler_info info;
    int64_t active;
    (void)state;
    for (int i = 0; i < REQUESTS; i++) { /* two pages each */
        make(&all[i], 6);
        all[i].request.count = 60;
        all[i].request.opts.max_tokens = 10;
        all[i].request.opts.ignore_eos = true;
        submit(s, &all[i]);
    }
    for (int round = 0; round < 10; round++) {
        assert_ok(nb_scheduler_run(s, 1, &active));
        nb_scheduler_info(s, &info);
        assert_int_equal(info.pages, 4);
        assert_true(info.reserved <= info.pages && info.reserved == 2 * info.running);
    }
    assert_int_equal(info.running, 2); /* the first pair has ended */
    assert_int_equal(info.waiting, 1);
    assert_int_equal(active, 3);
    assert_int_equal(all[0].ended + all[1].ended, 2);
    run_all(s);
    for (int i = 0; i < REQUESTS; i++) {
        assert_int_equal(all[i].status, NB_OK);
        assert_int_equal(all[i].result.count, 10);
        release(&all[i]);
    }
    nb_scheduler_close(s);
}

static void check_closing(int64_t slots)
{
    struct nb_scheduler *s = open_scheduler(slots, 512, 0);
    struct outcome all[3];
    int64_t active;
    for (int i = 0; i < 3; i++) {
        make(&all[i], i);
        all[i].request.opts.max_tokens = 50;
        all[i].request.opts.ignore_eos = true;
        submit(s, &all[i]);
    }
    assert_ok(nb_scheduler_run(s, 5, &active));
    assert_int_equal(active, 3);
    nb_scheduler_cancel(s, 12345); /* no such request */
    nb_scheduler_cancel(s, all[2].id);
    assert_ok(nb_scheduler_run(s, 1, &active));
    assert_int_equal(active, 2);
    assert_int_equal(all[2].status, NB_EINTERRUPTED);
    nb_scheduler_close(s);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(all[i].ended, 1);
        assert_int_equal(all[i].status, NB_EINTERRUPTED);
        assert_non_null(strstr(all[i].error, "cancelled"));
        assert_int_equal(all[i].result.prompt_tokens, (int64_t)all[i].request.count);
        assert_string_equal(all[i].result.text, "");
    }
    assert_int_equal(all[0].result.count, 6); /* what it has so far */
    check_alone(&all[0], 512);
    for (int i = 0; i < 3; i++)
        release(&all[i]);
}

static void test_scheduler__closing_ends_requests(void **state)
{
    (void)state;
    check_closing(1);
    check_closing(2);
    nb_scheduler_close(NULL);
}

/* ---- one slot, over a session ---- */

/* Asks once more with all that was said and `more` tokens after it. */
static void follow_up(struct outcome *o, const struct outcome *before, int64_t more)
{
    size_t count = before->request.count, answer = before->result.count;
    make(o, 6);
    o->prompt = realloc(o->prompt, (count + answer + (size_t)more) * sizeof *o->prompt);
    assert_non_null(o->prompt);
    memcpy(o->prompt, before->prompt, count * sizeof *o->prompt);
    memcpy(o->prompt + count, before->result.ids, answer * sizeof *o->prompt);
    for (int64_t i = 0; i < more; i++)
        o->prompt[count + answer + (size_t)i] = (int32_t)(3 * i + 1);
    o->request.ids = o->prompt;
    o->request.count = count + answer + (size_t)more;
    o->request.opts.max_tokens = 10;
    o->request.opts.ignore_eos = true;
}

/* What a prompt has in common with the request before it is computed once, if there is one slot. */
static void test_one_slot__reuses_the_common_prefix(void **state)
{
    enum { FIRST, FURTHER, AGAIN, OTHER, REQUESTS };
    /* 290 tokens and 10 of the answer; all but the last token; up to where the prompts differ */
    static const int64_t wanted[REQUESTS] = {0, 300, 289, 20};
    (void)state;
    for (int slots = 1; slots <= 2; slots++) {
        struct nb_scheduler *s = open_scheduler(slots, 512, 0);
        struct outcome all[REQUESTS];
        for (int i = 0; i < REQUESTS; i++) {
            if (i == FURTHER)
                follow_up(&all[i], &all[FIRST], 3);
            else
                make(&all[i], 6);
            if (i != FURTHER)
                all[i].request.count = 290 - (i == OTHER ? 100 : 0);
            all[i].request.opts.max_tokens = 10;
            all[i].request.opts.ignore_eos = true;
            if (i == OTHER)
                all[i].prompt[20] ^= 1;
            submit(s, &all[i]);
            run_all(s);
            assert_int_equal(all[i].status, NB_OK);
            assert_int_equal(all[i].result.reused_tokens, slots == 1 ? wanted[i] : 0);
            check_alone(&all[i], 512);
        }
        for (int i = 0; i < REQUESTS; i++)
            release(&all[i]);
        nb_scheduler_close(s);
    }
}

/* Over a session that the caller has, in every way in which one computes. */
static void test_one_slot__over_a_session_of_any_mode(void **state)
{
    enum { REQUESTS = 6 };
    static struct outcome all[REQUESTS];
    (void)state;
    for (int mode = NB_KV_PROMPT; mode <= NB_KV_NONE; mode++)
        for (int64_t chunk = 0; chunk <= 7; chunk += 7) {
            struct nb_session *session;
            struct nb_scheduler *s;
            const struct nb_session_opts opts = {
                .context = 128, .chunk = chunk, .kv = NB_KV_F16, .mode = (enum nb_kv_mode)mode};
            assert_ok(nb_session_open(&session, engine, &opts));
            assert_ok(nbi_scheduler_open_over(&s, session));
            for (int i = 0; i < REQUESTS; i++) {
                make(&all[i], i);
                submit(s, &all[i]);
            }
            run_all(s);
            nb_scheduler_close(s);
            /* The last answer stays in the session. */
            const struct outcome *last = &all[REQUESTS - 1];
            assert_int_equal(nb_session_length(session),
                             (int64_t)(last->request.count + last->result.count));
            assert_memory_equal(nb_session_tokens(session) + last->request.count, last->result.ids,
                                last->result.count * sizeof *last->result.ids);
            nb_session_close(session);
            for (int i = 0; i < REQUESTS; i++) {
                assert_int_equal(all[i].status, NB_OK);
                check_alone(&all[i], 128);
                release(&all[i]);
            }
        }
}

static void test_one_slot__has_the_pages_of_its_context(void **state)
{
    static const struct {
        int64_t context, tokens, pages;
    } cases[] = {{200, 0, 4}, {200, 128, 2}, {200, 100, 2}, {200, 10000, 4}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nb_scheduler *s = open_scheduler(1, cases[i].context, cases[i].tokens);
        struct nb_scheduler_info info;
        struct outcome o[2];
        int64_t active;
        for (int k = 0; k < 2; k++) {
            make(&o[k], 6);
            o[k].request.count = 60;
            o[k].request.opts.max_tokens = 10; /* two pages with it */
            o[k].request.opts.ignore_eos = true;
            submit(s, &o[k]);
        }
        assert_ok(nb_scheduler_run(s, 1, &active));
        nb_scheduler_info(s, &info);
        assert_int_equal(info.pages, cases[i].pages);
        assert_int_equal(info.reserved, 2);
        assert_int_equal(info.running, 1);
        assert_int_equal(info.waiting, 1);
        run_all(s);
        nb_scheduler_info(s, &info);
        assert_int_equal(info.reserved, 0);
        for (int k = 0; k < 2; k++) {
            check_alone(&o[k], cases[i].context);
            release(&o[k]);
        }
        nb_scheduler_close(s);
    }
}

/* ---- wishes to stop ---- */

/* A request of 290 tokens, which take five steps, and an answer of 20. */
static void make_long(struct outcome *o, int name)
{
    make(o, 6);
    o->request.count = 290;
    o->prompt[0] = name; /* so that prompts have nothing in common */
    o->request.opts.cancel = &o->stop;
    o->request.opts.max_tokens = 20;
    o->request.opts.ignore_eos = true;
}

static void check_stopped(const struct outcome *o, size_t tokens)
{
    assert_int_equal(o->ended, 1);
    assert_int_equal(o->status, NB_EINTERRUPTED);
    assert_string_equal(o->error, "interrupted");
    assert_int_equal(o->result.count, tokens);
    check_alone(o, 512);
}

/* A request obeys its own wish: in its answer, within its prompt, before it begins. */
static void test_cancel__of_a_request(void **state)
{
    enum { GOES_ON, IN_ANSWER, IN_PROMPT, WAITS, REQUESTS };
    static struct outcome all[REQUESTS];
    struct nb_scheduler *s;
    const struct nb_scheduler_opts opts = {
        .batch = {.sequences = 1, .context = 512, .chunk = 64, .kv = NB_KV_F16}};
    (void)state;
    assert_ok(nb_scheduler_open(&s, engine, &opts));
    for (int i = 0; i < REQUESTS; i++) {
        make_long(&all[i], i);
        submit(s, &all[i]);
    }
    assert_ok(nb_scheduler_run(s, 24, NULL)); /* the fifth step gives the first token */
    assert_int_equal(all[GOES_ON].ended, 1);
    assert_int_equal(all[GOES_ON].status, NB_OK);
    check_alone(&all[GOES_ON], 512);
    assert_ok(nb_scheduler_run(s, 8, NULL));
    nb_cancel_set(&all[IN_ANSWER].stop);
    assert_ok(nb_scheduler_run(s, 2, NULL)); /* of the next one */
    check_stopped(&all[IN_ANSWER], 4);
    nb_cancel_set(&all[IN_PROMPT].stop);
    nb_cancel_set(&all[WAITS].stop);
    run_all(s);
    check_stopped(&all[IN_PROMPT], 0);
    check_stopped(&all[WAITS], 0);
    nb_cancel_clear(&all[IN_PROMPT].stop);
    nb_generate_result_release(&all[IN_PROMPT].result);
    submit(s, &all[IN_PROMPT]); /* again */
    run_all(s);
    assert_int_equal(all[IN_PROMPT].status, NB_OK);
    assert_int_equal(all[IN_PROMPT].result.reused_tokens, 128); /* of the two steps */
    check_alone(&all[IN_PROMPT], 512);
    for (int i = 0; i < REQUESTS; i++)
        release(&all[i]);
    nb_scheduler_close(s);
}

static void test_cancel__of_a_request_among_others(void **state)
{
    struct outcome all[4];
    struct nb_scheduler *s = open_scheduler(3, 512, 0); /* one waits */
    (void)state;
    for (int i = 0; i < 4; i++) {
        make_long(&all[i], i);
        submit(s, &all[i]);
    }
    assert_ok(nb_scheduler_run(s, 7, NULL));
    nb_cancel_set(&all[1].stop);
    nb_cancel_set(&all[3].stop);
    run_all(s);
    check_stopped(&all[1], all[1].result.count);
    assert_true(all[1].result.count > 0);
    check_stopped(&all[3], 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(all[i].status, i % 2 ? NB_EINTERRUPTED : NB_OK);
        check_alone(&all[i], 512);
        release(&all[i]);
    }
    nb_scheduler_close(s);
}

/* The wish of the scheduler interrupts a run, and the next one goes on as if nothing had been. */
static void test_cancel__of_the_scheduler(void **state)
{
    enum { REQUESTS = 5 };
    static struct outcome all[REQUESTS];
    static const int64_t slots[] = {1, 3};
    (void)state;
    for (int run = 0; run < 2; run++) {
        struct nb_cancel stop = {0};
        struct nb_scheduler *s;
        const struct nb_scheduler_opts opts = {.batch = {.sequences = slots[run],
                                                         .context = 512,
                                                         .chunk = 32,
                                                         .kv = NB_KV_F16,
                                                         .cancel = &stop}};
        assert_ok(nb_scheduler_open(&s, engine, &opts));
        for (int i = 0; i < REQUESTS; i++) {
            make(&all[i], i + 4);
            submit(s, &all[i]);
        }
        for (int64_t active = 1; active > 0;) {
            assert_ok(nb_scheduler_run(s, 2, &active));
            nb_cancel_set(&stop);
            if (active > 0)
                run_until_interrupted(s);
            nb_cancel_clear(&stop);
        }
        nb_scheduler_close(s);
        for (int i = 0; i < REQUESTS; i++) {
            assert_int_equal(all[i].ended, 1);
            assert_int_equal(all[i].status, NB_OK);
            check_alone(&all[i], 512);
            release(&all[i]);
        }
    }
}

/* ---- a failing device ---- */

static struct nbi_backend real; /* the engine's, before it was changed */
static int calls_left;

static enum nb_status fail_later(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    return calls_left-- == 0 ? nbi_fail(NB_EDEVICE, "the device is gone") : real.linear(s, a);
}

/* Each step fails once. */
static void test_scheduler__goes_on_after_a_failed_step(void **state)
{
    enum { REQUESTS = 3 };
    static struct outcome all[REQUESTS];
    (void)state;
    real = *engine->be;
    for (int slots = 1; slots <= 2; slots++) {
        struct nb_scheduler *s = open_scheduler(slots, 512, 0);
        for (int i = 0; i < REQUESTS; i++) {
            make(&all[i], i + 4);
            submit(s, &all[i]);
        }
        for (int64_t active = 1; active > 0;) {
            engine->be->linear = fail_later;
            calls_left = 2;
            enum nb_status rc = nb_scheduler_run(s, 1, &active);
            *engine->be = real;
            assert_fails(rc, NB_EDEVICE, "the device is gone");
            assert_ok(nb_scheduler_run(s, 1, &active));
        }
        nb_scheduler_close(s);
        for (int i = 0; i < REQUESTS; i++) {
            assert_int_equal(all[i].status, NB_OK);
            check_alone(&all[i], 512);
            release(&all[i]);
        }
    }
}

static enum nb_status stop_and_fail(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    (void)s;
    (void)a;
    return nbi_fail(NB_EDEVICE, "the device is gone");
}

/* What nb_generate says of it, and what is left. */
static void test_generate__on_a_device_that_fails(void **state)
{
    struct nb_session *session;
    struct nb_generate_result r = {.count = 7};
    struct outcome o;
    (void)state;
    make(&o, 2);
    assert_ok(nb_session_open(&session, engine, &(struct nb_session_opts){.context = 64}));
    real = *engine->be;
    engine->be->linear = stop_and_fail;
    enum nb_status rc = nb_generate(session, o.prompt, 7, &o.request.opts, &r);
    *engine->be = real;
    assert_fails(rc, NB_EDEVICE, "the device is gone");
    assert_null(r.text);
    assert_null(r.ids);
    assert_int_equal(r.count, 0);
    assert_int_equal(nb_session_length(session), 0);
    release(&o);
    nb_session_close(session);
}

/* ---- divided prompts ---- */

static int64_t passes[64], pass_count;

static enum nb_status count_pass(struct nbi_stream *s, const struct nbi_op_rope_table *a)
{
    assert_true(pass_count < 64);
    passes[pass_count++] = a->N;
    return real.rope_table(s, a);
}

/* The passes of the prompts of `count` requests that begin at the same time, and of two tokens. */
static void expect_passes(int64_t slots, int count, const int64_t *wanted, int64_t wanted_count)
{
    struct outcome all[3];
    struct nb_scheduler *s;
    const struct nb_scheduler_opts opts = {.batch = {.sequences = slots,
                                                     .context = 512,
                                                     .chunk = 64,
                                                     .kv = NB_KV_F16,
                                                     .deterministic = true}};
    assert_ok(nb_scheduler_open(&s, engine, &opts));
    for (int i = 0; i < count; i++) {
        make(&all[i], 6);
        all[i].request.count = 100;
        all[i].request.opts.max_tokens = 3;
        all[i].request.opts.ignore_eos = true;
        submit(s, &all[i]);
    }
    engine->be->rope_table = count_pass;
    pass_count = 0;
    run_all(s);
    engine->be->rope_table = real.rope_table;
    nb_scheduler_close(s);
    assert_int_equal(pass_count, wanted_count);
    assert_memory_equal(passes, wanted, (size_t)wanted_count * sizeof *wanted);
    for (int i = 0; i < count; i++) {
        assert_int_equal(all[i].result.reused_tokens, 0);
        release(&all[i]);
    }
}

/* On a backend whose bits depend on the rows of a pass, a deterministic scheduler divides a prompt
 * as if it were alone, and one slot has a batch. */
static void test_deterministic__prompts_are_divided_as_alone(void **state)
{
    (void)state;
    real = *engine->be;
    engine->be->caps &= ~(unsigned)NBI_CAP_BATCH_INVARIANT;
    engine->be->batch_invariant_rows = 8;
    expect_passes(3, 1, (const int64_t[]){64, 36, 1, 1}, 4);
    expect_passes(3, 3, (const int64_t[]){64, 64, 64, 36, 36, 36, 3, 3}, 8);
    expect_passes(1, 2, (const int64_t[]){64, 36, 1, 1, 64, 36, 1, 1}, 8);
    *engine->be = real;
}

/* ---- text ---- */

static enum nb_status grow(void *ctx, const char *text, size_t len)
{
    struct outcome *o = ctx;
    assert_true(o->len + len < sizeof o->text);
    memcpy(o->text + o->len, text, len);
    o->len += len;
    if (o->cancels && o->len > 20)
        nb_scheduler_cancel(o->cancels, o->id);
    return NB_OK;
}

static enum nb_status refuse(void *ctx, const char *text, size_t len)
{
    (void)ctx;
    (void)text;
    return len > 0 ? nbi_fail(NB_EIO, "nobody listens") : NB_OK;
}

/* What the model "nib" says after "Once upon a time". */
static const char continuation[] =
    ", there was a little girl named Lily. She loved to play with her toys and eat yummy food. One "
    "day, she found a big, red ball in her room. She picked it up and";

static struct nb_engine *tiny; /* while another one is in use */

/* Text comes as it grows; a stop text ends an answer; a callback that fails, and one that cancels,
 * end their own. */
static void check_text(int64_t slots)
{
    enum { PLAIN, STOPS, REFUSES, CANCELS, REQUESTS };
    static struct outcome all[REQUESTS];
    const char *story = "Once upon a time";
    char stop[8] = "";
    const char *const stops[] = {"never said", stop, NULL};
    struct nb_scheduler *s = open_scheduler(slots, 256, 0);
    for (int i = 0; i < REQUESTS; i++) {
        struct nb_generate_opts *g = &all[i].request.opts;
        all[i] = (struct outcome){.request = {.done = keep, .ctx = &all[i]},
                                  .cancels = i == CANCELS ? s : NULL};
        assert_ok(nb_tokenizer_encode(nb_engine_tokenizer(engine), story, strlen(story), true,
                                      &all[i].prompt, &all[i].request.count));
        all[i].request.ids = all[i].prompt;
        *g = (struct nb_generate_opts){.sampling = {.top_p = 1, .repeat_penalty = 1},
                                       .max_tokens = 40,
                                       .ignore_eos = true,
                                       .text = i == REFUSES ? refuse : grow,
                                       .ctx = &all[i]};
        if (i == STOPS) { /* the text of the plain one from its 31st byte on */
            run_all(s);
            memcpy(stop, all[PLAIN].result.text + 30, 4);
            g->stop = stops;
        }
        submit(s, &all[i]);
        memset(stop, 0, sizeof stop); /* it was copied */
    }
    run_all(s);
    const struct nb_generate_result *plain = &all[PLAIN].result;
    assert_int_equal(all[PLAIN].status, NB_OK);
    assert_string_equal(plain->text, continuation);
    assert_int_equal(all[PLAIN].len, plain->len);
    assert_memory_equal(all[PLAIN].text, plain->text, plain->len);
    check_alone(&all[PLAIN], 256);

    assert_int_equal(all[STOPS].status, NB_OK);
    assert_int_equal(all[STOPS].result.finish, NB_FINISH_STOP);
    assert_true(all[STOPS].len <= 30);
    assert_int_equal(all[STOPS].len, all[STOPS].result.len);
    assert_memory_equal(all[STOPS].text, plain->text, all[STOPS].len);

    assert_int_equal(all[REFUSES].status, NB_EIO);
    assert_string_equal(all[REFUSES].error, "nobody listens");

    assert_int_equal(all[CANCELS].status, NB_EINTERRUPTED);
    assert_true(all[CANCELS].len > 20 && all[CANCELS].len < plain->len);
    assert_memory_equal(all[CANCELS].text, plain->text, all[CANCELS].len);
    for (int i = 0; i < REQUESTS; i++) {
        assert_int_equal(all[i].ended, 1);
        release(&all[i]);
    }
    nb_scheduler_close(s);
}

static void test_text__comes_as_it_grows(void **state)
{
    (void)state;
    check_text(1);
    check_text(4);
}

/* Another thread waits for some text, and stops the answer. */
static void *stop_after_text(void *ctx)
{
    struct outcome *o = ctx;
    while (!o->grown)
        sched_yield();
    nb_cancel_set(&o->stop);
    o->stopped = 1;
    return NULL;
}

static enum nb_status wait_for_stop(void *ctx, const char *text, size_t len)
{
    struct outcome *o = ctx;
    NBI_TRY(grow(ctx, text, len));
    if (o->len > 20 && !o->grown) {
        o->grown = 1;
        while (!o->stopped)
            sched_yield();
    }
    return NB_OK;
}

static void check_stop_by_a_thread(int64_t slots)
{
    static struct outcome all[3];
    pthread_t thread;
    struct nb_scheduler *s = open_scheduler(slots, 512, 0);
    for (int i = 0; i < 3; i++) {
        struct nb_generate_opts *g = &all[i].request.opts;
        make(&all[i], 6);
        all[i].request.count = 5;
        g->max_tokens = 100;
        g->ignore_eos = true;
        g->ctx = &all[i];
        g->cancel = &all[i].stop;
        if (i == 1)
            g->text = wait_for_stop;
        submit(s, &all[i]);
    }
    assert_int_equal(pthread_create(&thread, NULL, stop_after_text, &all[1]), 0);
    run_all(s);
    pthread_join(thread, NULL);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(all[i].status, i == 1 ? NB_EINTERRUPTED : NB_OK);
        check_alone(&all[i], 512);
    }
    assert_true(all[1].result.count > 1 && all[1].result.count < 100);
    assert_int_equal(all[1].result.len, all[1].len); /* what was held back came as well */
    assert_memory_equal(all[1].result.text, all[1].text, all[1].len);
    for (int i = 0; i < 3; i++)
        release(&all[i]);
    nb_scheduler_close(s);
}

static void test_text__stopped_by_another_thread(void **state)
{
    (void)state;
    check_stop_by_a_thread(1);
    check_stop_by_a_thread(3);
}

static int open_nib(void **state)
{
    const struct nb_engine_opts opts = {
        .model = NB_TEST_SOURCE "/../models/nib", .device = "cpu", .threads = 2};
    tiny = engine;
    (void)state;
    return nb_engine_open(&engine, &opts);
}

static int close_nib(void **state)
{
    (void)state;
    nb_engine_close(engine);
    engine = tiny;
    return 0;
}

/* ---- many threads ---- */

#define THREADS    8
#define PER_THREAD 25

static struct outcome shared[THREADS][PER_THREAD];
static struct nb_scheduler *common;
static _Atomic int submitting;

/* Submits requests, stops two of every five in one of two ways, and hands in bad ones in between.
 */
static void *client(void *ctx)
{
    struct outcome *mine = ctx;
    int thread = (int)((struct outcome(*)[PER_THREAD])ctx - shared);
    for (int i = 0; i < PER_THREAD; i++) {
        struct nb_request bad = {.ids = (const int32_t[]){1, PLENTY}, .count = 2};
        int64_t id = 0;
        make(&mine[i], thread * PER_THREAD + i);
        mine[i].request.opts.cancel = i % 2 ? &mine[i].stop : NULL;
        if (nb_scheduler_submit(common, &bad, &id) != NB_EVALUE || id != 0)
            abort();
        if (nb_scheduler_submit(common, &mine[i].request, &mine[i].id) != NB_OK)
            abort();
        if (i % 5 == 4)
            nb_scheduler_cancel(common, mine[i - i % 3].id);
        if (i % 5 == 3)
            nb_cancel_set(&mine[i - i % 2 - 1].stop);
    }
    submitting--;
    return NULL;
}

static void check_threads(int64_t slots)
{
    pthread_t threads[THREADS];
    int cancelled = 0;
    int64_t active = 1;
    common = open_scheduler(slots, 512, 20 * 64);
    submitting = THREADS;
    for (int t = 0; t < THREADS; t++)
        assert_int_equal(pthread_create(&threads[t], NULL, client, shared[t]), 0);
    while (submitting > 0 || active > 0)
        assert_ok(nb_scheduler_run(common, 3, &active));
    for (int t = 0; t < THREADS; t++)
        pthread_join(threads[t], NULL);
    run_all(common);
    nb_scheduler_close(common);
    for (int t = 0; t < THREADS; t++)
        for (int i = 0; i < PER_THREAD; i++) {
            struct outcome *o = &shared[t][i];
            assert_int_equal(o->ended, 1);
            assert_true(o->status == NB_OK || o->status == NB_EINTERRUPTED);
            cancelled += o->status == NB_EINTERRUPTED;
            if (o->status == NB_OK || i % 4 == 0)
                check_alone(o, 512);
            release(o);
        }
    assert_true(cancelled <= 2 * THREADS * PER_THREAD / 5);
}

static void test_threads__eight_submit_and_cancel(void **state)
{
    (void)state;
    check_threads(16);
    check_threads(1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler__answers_do_not_depend_on_others),
        cmocka_unit_test(test_scheduler__answers_end_with_the_context),
        cmocka_unit_test(test_scheduler__refuses_bad_requests),
        cmocka_unit_test(test_scheduler__refuses_bad_options),
        cmocka_unit_test(test_scheduler__a_nan_ends_its_own_request),
        cmocka_unit_test(test_scheduler__pages_are_reserved),
        cmocka_unit_test(test_scheduler__closing_ends_requests),
        cmocka_unit_test(test_one_slot__reuses_the_common_prefix),
        cmocka_unit_test(test_one_slot__over_a_session_of_any_mode),
        cmocka_unit_test(test_one_slot__has_the_pages_of_its_context),
        cmocka_unit_test(test_cancel__of_a_request),
        cmocka_unit_test(test_cancel__of_a_request_among_others),
        cmocka_unit_test(test_cancel__of_the_scheduler),
        cmocka_unit_test(test_scheduler__goes_on_after_a_failed_step),
        cmocka_unit_test(test_generate__on_a_device_that_fails),
        cmocka_unit_test(test_deterministic__prompts_are_divided_as_alone),
        cmocka_unit_test_setup_teardown(test_text__comes_as_it_grows, open_nib, close_nib),
        cmocka_unit_test_setup_teardown(test_text__stopped_by_another_thread, open_nib, close_nib),
        cmocka_unit_test(test_threads__eight_submit_and_cancel),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
