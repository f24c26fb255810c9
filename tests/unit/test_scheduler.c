/* test_scheduler.c - requests that run together get the answers that each would get by itself, and
 * one that is bad, cancelled or broken leaves the others alone. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/rng.h"
#include "infer/session.h"
#include "unit/support.h"

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
    struct nb_scheduler *cancels; /* cancels itself after two tokens */
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

/* The answer is the one that nb_generate gives; of a cancelled request its beginning. */
static void check_alone(const struct outcome *o, int64_t context)
{
    struct nb_generate_result alone;
    struct nb_session *s;
    struct nb_generate_opts opts = o->request.opts;
    opts.text = NULL;
    assert_ok(nb_session_open(&s, engine,
                              &(struct nb_session_opts){.kv = NB_KV_F16, .context = context}));
    assert_ok(nb_generate(s, o->request.ids, o->request.count, &opts, &alone));
    if (o->status == NB_OK) {
        assert_int_equal(o->result.count, alone.count);
        assert_int_equal(o->result.finish, alone.finish);
        assert_int_equal(o->result.prompt_tokens, (int64_t)o->request.count);
    }
    assert_true(o->result.count <= alone.count);
    assert_memory_equal(o->result.ids, alone.ids, o->result.count * sizeof *alone.ids);
    nb_generate_result_release(&alone);
    nb_session_close(s);
}

/* ---- tests ---- */

static void test_scheduler__answers_equal_those_of_generate(void **state)
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
    struct nb_scheduler *s = open_scheduler(2, 90, 0);
    struct outcome all[2];
    (void)state;
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
    release(&all[0]);
    release(&all[1]);
    nb_scheduler_close(s);
}

static void test_scheduler__refuses_bad_requests(void **state)
{
    struct nb_scheduler *s = open_scheduler(4, 200, 256);
    struct outcome o;
    int64_t id, active;
    (void)state;
    make(&o, 6);
    o.request.count = 201;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EVALUE, "201 tokens");
    o.request.count = 0;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EINVAL, "empty");
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

    s = open_scheduler(4, 200, 64); /* a pool of one page */
    make(&o, 6);
    o.request.count = 60;
    o.request.opts.max_tokens = 5;
    assert_fails(nb_scheduler_submit(s, &o.request, &id), NB_EVALUE, "65 tokens");
    o.request.opts.max_tokens = 4;
    submit(s, &o);
    run_all(s);
    assert_int_equal(o.status, NB_OK);
    release(&o);
    nb_scheduler_close(s);
}

/* A logit that is not finite ends its own request. */
static void test_scheduler__a_nan_ends_its_own_request(void **state)
{
    enum { REQUESTS = 9, BROKEN = 505 };
    static struct outcome all[REQUESTS];
    static const struct nb_bias never = {BROKEN, -1e6F};
    struct nb_scheduler *s = open_scheduler(REQUESTS, 512, 0);
    const struct nbi_weight *embed = &engine->weights.embed;
    uint16_t *row = (uint16_t *)embed->data.at + BROKEN * embed->cols, kept = *row;
    (void)state;
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
            assert_non_null(strstr(all[i].error, "not finite"));
            assert_null(all[i].result.ids);
        } else {
            assert_int_equal(all[i].status, NB_OK);
            check_alone(&all[i], 512);
        }
        release(&all[i]);
    }
    *row = kept;
    nb_scheduler_close(s);
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

static void test_scheduler__closing_ends_requests(void **state)
{
    struct nb_scheduler *s = open_scheduler(1, 512, 0);
    struct outcome all[3];
    int64_t active;
    (void)state;
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
    }
    assert_int_equal(all[0].result.count, 6); /* what it has so far */
    check_alone(&all[0], 512);
    for (int i = 0; i < 3; i++)
        release(&all[i]);
    nb_scheduler_close(NULL);
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

/* Text comes as it grows; a stop text ends an answer; a callback that fails, and one that cancels,
 * end their own. */
static void test_scheduler__text_as_it_grows(void **state)
{
    enum { PLAIN, STOPS, REFUSES, CANCELS, REQUESTS };
    static struct outcome all[REQUESTS];
    struct nb_engine *nib, *before = engine;
    const char *story = "Once upon a time";
    char stop[8] = "";
    const char *const stops[] = {"never said", stop, NULL};
    (void)state;
    assert_ok(nb_engine_open(
        &nib, &(struct nb_engine_opts){
                  .model = NB_TEST_SOURCE "/../models/nib", .device = "cpu", .threads = 2}));
    engine = nib;
    struct nb_scheduler *s = open_scheduler(REQUESTS, 256, 0);
    for (int i = 0; i < REQUESTS; i++) {
        struct nb_generate_opts *g = &all[i].request.opts;
        all[i] = (struct outcome){.request = {.done = keep, .ctx = &all[i]},
                                  .cancels = i == CANCELS ? s : NULL};
        assert_ok(nb_tokenizer_encode(nb_engine_tokenizer(nib), story, strlen(story), true,
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
    nb_engine_close(nib);
    engine = before;
}

/* ---- many threads ---- */

#define THREADS    8
#define PER_THREAD 25

static struct outcome shared[THREADS][PER_THREAD];
static struct nb_scheduler *common;
static _Atomic int submitting;

/* Submits requests, cancels every fifth, and hands in bad ones in between. */
static void *client(void *ctx)
{
    struct outcome *mine = ctx;
    int thread = (int)((struct outcome(*)[PER_THREAD])ctx - shared);
    for (int i = 0; i < PER_THREAD; i++) {
        struct nb_request bad = {.ids = (const int32_t[]){1, PLENTY}, .count = 2};
        int64_t id = 0;
        make(&mine[i], thread * PER_THREAD + i);
        if (nb_scheduler_submit(common, &bad, &id) != NB_EVALUE || id != 0)
            abort();
        if (nb_scheduler_submit(common, &mine[i].request, &mine[i].id) != NB_OK)
            abort();
        if (i % 5 == 4)
            nb_scheduler_cancel(common, mine[i - i % 3].id);
    }
    submitting--;
    return NULL;
}

static void test_scheduler__eight_threads_submit_and_cancel(void **state)
{
    pthread_t threads[THREADS];
    int cancelled = 0;
    int64_t active = 1;
    (void)state;
    common = open_scheduler(16, 512, 20 * 64);
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
    assert_true(cancelled <= THREADS * PER_THREAD / 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler__answers_equal_those_of_generate),
        cmocka_unit_test(test_scheduler__answers_end_with_the_context),
        cmocka_unit_test(test_scheduler__refuses_bad_requests),
        cmocka_unit_test(test_scheduler__a_nan_ends_its_own_request),
        cmocka_unit_test(test_scheduler__pages_are_reserved),
        cmocka_unit_test(test_scheduler__closing_ends_requests),
        cmocka_unit_test(test_scheduler__text_as_it_grows),
        cmocka_unit_test(test_scheduler__eight_threads_submit_and_cancel),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
