/* test_scheduler.c - requests that run together get the answers that each would get by itself. */
#include "infer/scheduler.h"

#include "base/rng.h"
#include "infer/session.h"
#include "unit/support.h"

#define REQUESTS 23
#define VOCAB    512
#define LONGEST  300

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

/* Prompts of 1 to LONGEST tokens, with greedy and random sampling and with penalties. */
static struct nbi_request *make_requests(void)
{
    struct nbi_request *requests = calloc(REQUESTS, sizeof *requests);
    assert_non_null(requests);
    for (int i = 0; i < REQUESTS; i++) {
        struct nbi_request *r = &requests[i];
        r->count = (size_t)(i % 7 == 6 ? LONGEST - i : 1 + 3 * i);
        r->prompt = calloc(r->count, sizeof *r->prompt);
        assert_non_null(r->prompt);
        for (size_t k = 0; k < r->count; k++)
            r->prompt[k] = (int32_t)(nbi_philox(7, (uint64_t)i * LONGEST + k, 0).v[0] % VOCAB);
        r->opts = (struct nb_generate_opts){.max_tokens = 1 + i * 5 % 40, .ignore_eos = i % 2};
        r->opts.sampling = (struct nb_sampling){
            .temperature = i % 3 * 0.6, .top_p = 1, .repeat_penalty = 1, .seed = (uint64_t)i};
        if (i % 4 == 3) {
            r->opts.sampling.top_k = 20;
            r->opts.sampling.top_p = 0.8;
            r->opts.sampling.repeat_penalty = 1.3;
        }
    }
    return requests;
}

static void count_done(void *ctx)
{
    (*(int *)ctx)++;
}

static void test_scheduler__answers_equal_those_of_generate(void **state)
{
    static const int64_t slots[] = {1, 4, 16, 64};
    (void)state;
    for (int run = 0; run < 4; run++) {
        struct nbi_request *requests = make_requests();
        int done = 0;
        const struct nbi_scheduler_opts opts = {
            .parallel = slots[run], .kv = NB_KV_F16, .done = count_done, .ctx = &done};
        assert_ok(nbi_scheduler_run(engine, requests, REQUESTS, &opts));
        assert_int_equal(done, REQUESTS);
        for (int i = 0; i < REQUESTS; i++) {
            struct nb_generate_result single, *r = &requests[i].result;
            struct nb_session *s;
            assert_ok(nb_session_open(&s, engine, &(struct nb_session_opts){.kv = NB_KV_F16}));
            assert_ok(
                nb_generate(s, requests[i].prompt, requests[i].count, &requests[i].opts, &single));
            assert_int_equal(r->count, single.count);
            assert_memory_equal(r->ids, single.ids, single.count * sizeof *single.ids);
            assert_int_equal(r->finish, single.finish);
            assert_int_equal(r->prompt_tokens, (int64_t)requests[i].count);
            nb_generate_result_release(&single);
            nb_session_close(s);
        }
        nbi_requests_free(requests, REQUESTS);
    }
}

/* An answer may use all positions of the model, and no more. */
static void test_scheduler__answers_end_with_the_context(void **state)
{
    int64_t positions = engine->config.max_position, limit = 90;
    struct nbi_request *requests = calloc(2, sizeof *requests);
    (void)state;
    assert_non_null(requests);
    const struct nbi_scheduler_opts opts = {.parallel = 2, .kv = NB_KV_F16};
    engine->config.max_position = limit;
    for (int i = 0; i < 2; i++) {
        requests[i].count = (size_t)limit - (i ? 3 : 40);
        requests[i].prompt = calloc(requests[i].count + 8, sizeof *requests[i].prompt);
        assert_non_null(requests[i].prompt);
        requests[i].opts = (struct nb_generate_opts){.max_tokens = 10, .ignore_eos = true};
        requests[i].opts.sampling.top_p = requests[i].opts.sampling.repeat_penalty = 1;
    }
    assert_ok(nbi_scheduler_run(engine, requests, 2, &opts));
    assert_int_equal(requests[0].result.finish, NB_FINISH_LENGTH);
    assert_int_equal(requests[0].result.count, 10);
    assert_int_equal(requests[1].result.finish, NB_FINISH_CONTEXT);
    assert_int_equal(requests[1].result.count, 4);
    nb_generate_result_release(&requests[0].result);
    nb_generate_result_release(&requests[1].result);
    requests[1].count = (size_t)limit + 1;
    assert_fails(nbi_scheduler_run(engine, requests, 2, &opts), NB_EVALUE, "context");
    requests[1].count = 0;
    assert_fails(nbi_scheduler_run(engine, requests, 2, &opts), NB_EINVAL, "empty");
    nbi_requests_free(requests, 2);
    engine->config.max_position = positions;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scheduler__answers_equal_those_of_generate),
        cmocka_unit_test(test_scheduler__answers_end_with_the_context),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
