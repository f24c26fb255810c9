/* test_scheduler.c - requests that run together, over a batch, or one after another, over a
 * session, get the answers that each would get by itself, and one that is bad, cancelled or broken
 * leaves the others alone. */
#include "infer/scheduler.h"

#include <pthread.h>

#include "unit/requests.h"

#define PLENTY 1 << 20 /* more than any vocabulary here has */

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
            assert_int_equal(nbi_session_length(session),
                             (int64_t)(last->request.count + last->result.count));
            assert_memory_equal(nb_session_tokens(session, NULL) + last->request.count,
                                last->result.ids, last->result.count * sizeof *last->result.ids);
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
    assert_int_equal(nbi_session_length(session), 0);
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
            if ((o->status == NB_OK && !SANITIZED) || i % 4 == 0)
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

/* ---- on a GPU ---- */

#define GPU_REQUESTS (EMULATED ? 4 : 12)

static struct nb_engine *on_cpu; /* while the GPU's is in use */

static void use_gpu(void)
{
    need_gpu();
    on_cpu = engine;
    assert_ok(
        nb_engine_open(&engine, &(struct nb_engine_opts){.synthetic = "tiny", .device = "cuda"}));
}

static void leave_gpu(void)
{
    nb_engine_close(engine);
    engine = on_cpu;
}

/* Prompts of 1, 16, 70, 85, 139, ... tokens. Closes the scheduler. */
static void answer_on_gpu(struct nb_scheduler *s, struct outcome *all)
{
    for (int i = 0; i < GPU_REQUESTS; i++) {
        make(&all[i], 5 * i + 1);
        all[i].request.count = (size_t)(1 + i % 2 * 15 + i / 2 * 69) % LONGEST;
        if (EMULATED)
            all[i].request.opts.max_tokens = 4;
        submit(s, &all[i]);
    }
    run_all(s);
    nb_scheduler_close(s);
    for (int i = 0; i < GPU_REQUESTS; i++)
        assert_int_equal(all[i].status, NB_OK);
}

static void release_all(struct outcome *all)
{
    for (int i = 0; i < GPU_REQUESTS; i++)
        release(&all[i]);
}

/* Steps that run ahead, with tokens drawn on the device. */
static void test_gpu__one_slot_gives_the_tokens_of_a_session(void **state)
{
    static struct outcome all[GPU_REQUESTS];
    (void)state;
    use_gpu();
    answer_on_gpu(open_scheduler(1, 512, 0), all);
    for (int i = 0; i < GPU_REQUESTS; i++)
        check_alone(&all[i], 512);
    release_all(all);
    leave_gpu();
}

static void test_gpu__deterministic_answers_do_not_depend_on_others(void **state)
{
    static struct outcome alone[GPU_REQUESTS], all[GPU_REQUESTS];
    struct nb_scheduler_opts opts = {
        .batch = {.context = 512, .chunk = 96, .kv = NB_KV_F16, .deterministic = true}};
    (void)state;
    use_gpu();
    for (int64_t slots = 1; slots <= 5; slots += 4) {
        struct nb_scheduler *s;
        opts.batch.sequences = slots;
        assert_ok(nb_scheduler_open(&s, engine, &opts));
        answer_on_gpu(s, slots == 1 ? alone : all);
    }
    for (int i = 0; i < GPU_REQUESTS; i++) {
        assert_int_equal(all[i].result.reused_tokens + alone[i].result.reused_tokens, 0);
        assert_int_equal(all[i].result.count, alone[i].result.count);
        assert_memory_equal(all[i].result.ids, alone[i].result.ids,
                            all[i].result.count * sizeof(int32_t));
    }
    release_all(alone);
    release_all(all);
    leave_gpu();
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
        cmocka_unit_test(test_one_slot__reuses_the_common_prefix),
        cmocka_unit_test(test_one_slot__over_a_session_of_any_mode),
        cmocka_unit_test(test_one_slot__has_the_pages_of_its_context),
        cmocka_unit_test(test_scheduler__goes_on_after_a_failed_step),
        cmocka_unit_test(test_generate__on_a_device_that_fails),
        cmocka_unit_test(test_deterministic__prompts_are_divided_as_alone),
        cmocka_unit_test(test_threads__eight_submit_and_cancel),
        cmocka_unit_test(test_gpu__one_slot_gives_the_tokens_of_a_session),
        cmocka_unit_test(test_gpu__deterministic_answers_do_not_depend_on_others),
    };
    return cmocka_run_group_tests(tests, open_tiny, close_tiny);
}
