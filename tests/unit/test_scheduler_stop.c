/* test_scheduler_stop.c - what ends requests before they are complete: a scheduler that closes, a
 * wish to stop, their text and who receives it. */
#include <pthread.h>
#include <sched.h>

#include "unit/requests.h"

/* ---- closing ---- */

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

static void test_closing__ends_requests(void **state)
{
    (void)state;
    check_closing(1);
    check_closing(2);
    nb_scheduler_close(NULL);
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

static void run_until_interrupted(struct nb_scheduler *s)
{
    assert_fails(nb_scheduler_run(s, 0, NULL), NB_EINTERRUPTED, "interrupted");
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_closing__ends_requests),
        cmocka_unit_test(test_cancel__of_a_request),
        cmocka_unit_test(test_cancel__of_a_request_among_others),
        cmocka_unit_test(test_cancel__of_the_scheduler),
        cmocka_unit_test_setup_teardown(test_text__comes_as_it_grows, open_nib, close_nib),
        cmocka_unit_test_setup_teardown(test_text__stopped_by_another_thread, open_nib, close_nib),
    };
    return cmocka_run_group_tests(tests, open_tiny, close_tiny);
}
