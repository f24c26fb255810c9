/* test_scheduler.c - answers to many prompts at a time are those that each gets alone. */
#include "infer/scheduler.h"

#include "base/rng.h"
#include "infer/session.h"
#include "unit/support.h"

#define JOBS    23
#define VOCAB   512
#define LONGEST 300

static struct nb_engine *engine;

static int setup(void **state)
{
    (void)state;
    return nb_engine_open(&engine, &(struct nb_engine_opts){.synthetic = "tiny", .device = "cpu"});
}

static int teardown(void **state)
{
    (void)state;
    nb_engine_close(engine);
    return 0;
}

/* Prompts of 1 to LONGEST tokens; the most likely tokens, drawn ones, and with all options. */
static struct nbi_request *make_jobs(void)
{
    struct nbi_request *jobs = calloc(JOBS, sizeof *jobs);
    assert_non_null(jobs);
    for (int i = 0; i < JOBS; i++) {
        struct nbi_request *j = &jobs[i];
        j->count = (size_t)(i % 7 == 6 ? LONGEST - i : 1 + 3 * i);
        j->prompt = calloc(j->count, sizeof *j->prompt);
        assert_non_null(j->prompt);
        for (size_t k = 0; k < j->count; k++)
            j->prompt[k] = (int32_t)(nbi_philox(7, (uint64_t)i * LONGEST + k, 0).v[0] % VOCAB);
        j->opts = (struct nb_generate_opts){.max_tokens = 1 + i * 5 % 40, .ignore_eos = i % 2};
        j->opts.sampling = (struct nb_sampling){
            .temperature = i % 3 * 0.6, .top_p = 1, .repeat_penalty = 1, .seed = (uint64_t)i};
        if (i % 4 == 3) {
            j->opts.sampling.top_k = 20;
            j->opts.sampling.top_p = 0.8;
            j->opts.sampling.repeat_penalty = 1.3;
        }
    }
    return jobs;
}

static void count_up(void *ctx)
{
    (*(int *)ctx)++;
}

static void test_scheduler__are_what_each_is_alone(void **state)
{
    static const int64_t lanes[] = {1, 4, 16, 64};
    (void)state;
    for (int way = 0; way < 4; way++) {
        struct nbi_request *jobs = make_jobs();
        int done = 0;
        const struct nbi_scheduler_opts many = {
            .parallel = lanes[way], .kv = NB_KV_F16, .done = count_up, .ctx = &done};
        assert_ok(nbi_scheduler_run(engine, jobs, JOBS, &many));
        assert_int_equal(done, JOBS);
        for (int i = 0; i < JOBS; i++) {
            struct nb_generate_result alone, *r = &jobs[i].result;
            struct nb_session *s;
            assert_ok(nb_session_open(&s, engine, &(struct nb_session_opts){.kv = NB_KV_F16}));
            assert_ok(nb_generate(s, jobs[i].prompt, jobs[i].count, &jobs[i].opts, &alone));
            assert_int_equal(r->count, alone.count);
            assert_memory_equal(r->ids, alone.ids, alone.count * sizeof *alone.ids);
            assert_int_equal(r->finish, alone.finish);
            assert_int_equal(r->prompt_tokens, (int64_t)jobs[i].count);
            nb_generate_result_release(&alone);
            nb_session_close(s);
        }
        nbi_requests_free(jobs, JOBS);
    }
}

/* As long as the model has positions, and not longer. */
static void test_scheduler__end_with_the_context(void **state)
{
    int64_t positions = engine->config.max_position, most = 90;
    struct nbi_request *jobs = calloc(2, sizeof *jobs);
    (void)state;
    assert_non_null(jobs);
    const struct nbi_scheduler_opts many = {.parallel = 2, .kv = NB_KV_F16};
    engine->config.max_position = most;
    for (int i = 0; i < 2; i++) {
        jobs[i].count = (size_t)most - (i ? 3 : 40);
        jobs[i].prompt = calloc(jobs[i].count + 8, sizeof *jobs[i].prompt);
        assert_non_null(jobs[i].prompt);
        jobs[i].opts = (struct nb_generate_opts){.max_tokens = 10, .ignore_eos = true};
        jobs[i].opts.sampling.top_p = jobs[i].opts.sampling.repeat_penalty = 1;
    }
    assert_ok(nbi_scheduler_run(engine, jobs, 2, &many));
    assert_int_equal(jobs[0].result.finish, NB_FINISH_LENGTH);
    assert_int_equal(jobs[0].result.count, 10);
    assert_int_equal(jobs[1].result.finish, NB_FINISH_CONTEXT);
    assert_int_equal(jobs[1].result.count, 4);
    nb_generate_result_release(&jobs[0].result);
    nb_generate_result_release(&jobs[1].result);
    jobs[1].count = (size_t)most + 1;
    assert_fails(nbi_scheduler_run(engine, jobs, 2, &many), NB_EVALUE, "context");
    jobs[1].count = 0;
    assert_fails(nbi_scheduler_run(engine, jobs, 2, &many), NB_EINVAL, "empty");
    nbi_requests_free(jobs, 2);
    engine->config.max_position = positions;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler__are_what_each_is_alone),
        cmocka_unit_test(test_scheduler__end_with_the_context),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
