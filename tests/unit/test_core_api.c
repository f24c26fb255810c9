/* test_core_api.c - every function of core.h as its comment says: what it gives, and what it leaves
 * after a failure. Training runs are in test_core_train.c, and what the numbers are worth is in the
 * tests of each part. */
#include "unit/outputs.h"
#include "unit/tiny_model.h"

#define MISSING "/no/such/model"
#define CONTEXT 64

static char model[512];
static struct nb_engine *engine;
static const int32_t ids[] = {72, 101, 108, 300, 111, 400, 5, 33};
static const int32_t outside[] = {1, TINY_VOCAB};

#define IDS ((int64_t)(sizeof ids / sizeof *ids))

static int make_model(void **state)
{
    if (make_test_dir(state))
        return -1;
    make_tiny_model();
    put("model/generation_config.json",
        "{\"do_sample\": true, \"temperature\": 0.5, \"top_k\": 9}");
    snprintf(model, sizeof model, "%s", test_path("model"));
    assert_ok(nb_engine_open(&engine, &(struct nb_engine_opts){.model = model, .threads = 1}));
    return 0;
}

static int drop_model(void **state)
{
    nb_engine_close(engine);
    return remove_test_dir(state);
}

/* ---- errors, log, cancelling ---- */

static void test_status__has_a_name_and_a_message(void **state)
{
    struct nb_engine *e;
    (void)state;
#define X(status, text) assert_string_equal(nb_status_text(status), text);
    NB_STATUS_LIST(X)
#undef X
    assert_string_equal(nb_status_text((enum nb_status)77), "unknown status");
    assert_fails(nb_engine_open(&e, &(struct nb_engine_opts){.model = MISSING}), NB_ENOTFOUND,
                 "cannot open '" MISSING "'");
    assert_null(strchr(nb_last_error(), '\n'));
}

static void test_version__begins_with_three_numbers(void **state)
{
    const char *version = nb_version();
    size_t numbers = strspn(version, "0123456789."), len = strlen(version);
    (void)state;
    assert_true(numbers >= strlen("0.0.0") && version[numbers - 1] != '.');
    assert_memory_equal(version + numbers, " (", 2);
    assert_int_equal(version[len - 1], ')');
}

struct logged {
    int lines;
    enum nb_log_level level;
    char text[200];
};

static void keep_line(void *ctx, enum nb_log_level level, const char *line)
{
    struct logged *l = ctx;
    l->lines++;
    l->level = level;
    snprintf(l->text, sizeof l->text, "%s", line);
}

/* A warning, whose words do not matter here. */
static void quantize_nothing(const char *to)
{
    static const char *const all[] = {"*", NULL};
    struct nb_quantize_report report;
    const struct nb_quantize_opts opts = {.to = {.src = model, .dst = test_path(to)}, .skip = all};
    assert_ok(nb_quantize(&opts, &report));
}

static void test_log__goes_to_the_sink(void **state)
{
    struct logged l = {0};
    (void)state;
    quantize_nothing("a.dat"); /* there is none at first */
    nb_log_set_sink(keep_line, &l);
    quantize_nothing("b.dat");
    assert_int_equal(l.lines, 1);
    assert_int_equal(l.level, NB_LOG_WARN);
    assert_non_null(strstr(l.text, "nothing was quantised"));
    nb_log_set_sink(NULL, NULL);
    quantize_nothing("c.dat");
    assert_int_equal(l.lines, 1);
}

static void test_cancel__is_set_and_cleared_by_its_owner(void **state)
{
    struct nb_cancel c = {0};
    struct nb_engine *e = (void *)1;
    const struct nb_engine_opts opts = {.model = model, .cancel = &c};
    (void)state;
    nb_cancel_set(&c);
    assert_fails(nb_engine_open(&e, &opts), NB_EINTERRUPTED, "interrupted");
    assert_null(e);
    assert_fails(nb_engine_open(&e, &opts), NB_EINTERRUPTED, "interrupted"); /* still */
    nb_cancel_clear(&c);
    assert_ok(nb_engine_open(&e, &opts));
    nb_engine_close(e);
}

/* ---- engines ---- */

static void test_engine__open_fails_with_null(void **state)
{
    static const struct {
        struct nb_engine_opts opts;
        enum nb_status status;
        const char *words;
    } cases[] = {
        {{.model = MISSING}, NB_ENOTFOUND, MISSING},
        {{.model = model, .device = "tpu"}, NB_EUNSUPPORTED, "unknown device 'tpu'"},
        {{.model = model, .simd = "mmx"}, NB_EINVAL, "mmx"},
        {{.synthetic = "900b"}, NB_EINVAL, "900b"},
        {{.config = MISSING}, NB_ENOTFOUND, MISSING},
        {{.model = model, .device = "cuda:1000"}, NB_EDEVICE, "GPU"},
    };
    struct nb_engine *e;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        e = (void *)1;
        assert_fails(nb_engine_open(&e, &cases[i].opts), cases[i].status, cases[i].words);
        assert_null(e);
    }
    put("broken.json", "{");
    e = (void *)1;
    assert_fails(nb_engine_open(&e, &(struct nb_engine_opts){.config = test_path("broken.json")}),
                 NB_EFORMAT, "broken.json");
    assert_null(e);
    FOR_EACH_FAILED_ALLOCATION(
        e = (void *)1,
        nb_engine_open(&e, &(struct nb_engine_opts){.synthetic = "tiny", .threads = 1}),
        assert_null(e));
    assert_null(nb_engine_tokenizer(e)); /* random weights have neither */
    assert_null(nb_engine_chat(e));
    nb_engine_close(e);
    nb_engine_close(NULL);
}

static void test_engine__info(void **state)
{
    struct nb_engine_info info;
    (void)state;
    FILL(info);
    nb_engine_info(engine, &info);
    assert_int_equal(info.vocab, TINY_VOCAB);
    assert_int_equal(info.context, 512);
    assert_int_equal(info.layers, 2);
    assert_int_equal(info.threads, 1);
    assert_string_equal(info.device, "cpu");
    assert_non_null(info.simd);
    assert_int_equal(info.weight_bytes, 2 * info.parameters); /* bf16 */
    assert_true(info.sampling.temperature == 0.5 && info.sampling.top_k == 9);
    assert_true(info.sampling.top_p == 1 && info.sampling.repeat_penalty == 1);
    assert_true(nb_tokenizer_size(nb_engine_tokenizer(engine)) <= TINY_VOCAB);
    assert_string_equal(nb_chat_name(nb_engine_chat(engine)), "chatml");
}

/* ---- sessions ---- */

static struct nb_session *open_session(struct nb_cancel *cancel)
{
    const struct nb_session_opts opts = {.context = CONTEXT, .cancel = cancel};
    struct nb_session *s;
    assert_ok(nb_session_open(&s, engine, &opts));
    return s;
}

/* The session holds the first `count` of ids. */
static void assert_holds(const struct nb_session *s, int64_t count)
{
    int64_t have = -1;
    const int32_t *tokens = nb_session_tokens(s, &have);
    assert_int_equal(have, count);
    assert_memory_equal(tokens, ids, (size_t)count * sizeof *ids);
    assert_ptr_equal(nb_session_tokens(s, NULL), tokens);
}

static void test_session__open_fails_with_null(void **state)
{
    static const struct {
        struct nb_session_opts opts;
        enum nb_status status;
        const char *words;
    } cases[] = {
        {{.kv = (enum nb_kv_dtype)4}, NB_EINVAL, "unknown kind"},
        {{.mode = (enum nb_kv_mode)3}, NB_EINVAL, "unknown kind of cache"},
        {{.context = 513}, NB_EVALUE, "the model was made for 512"},
        {{.context = INT64_MAX}, NB_EINVAL, "a context of"},
    };
    const struct nb_session_opts good = {.context = CONTEXT};
    struct nb_session *s;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        s = (void *)1;
        assert_fails(nb_session_open(&s, engine, &cases[i].opts), cases[i].status, cases[i].words);
        assert_null(s);
    }
    FOR_EACH_FAILED_ALLOCATION(s = (void *)1, nb_session_open(&s, engine, &good), assert_null(s));
    assert_holds(s, 0);
    nb_session_close(s);
    nb_session_close(NULL);
}

static void test_session__keeps_its_tokens_when_appending_fails(void **state)
{
    static float logits[TINY_VOCAB], again[TINY_VOCAB];
    static const int32_t many[CONTEXT];
    struct nb_cancel stop = {0};
    struct nb_session *s = open_session(&stop);
    (void)state;
    assert_ok(nb_session_append(s, ids, 5, NULL));
    assert_fails(nb_session_append(s, many, CONTEXT - 4, logits), NB_EVALUE, "context of 64");
    assert_holds(s, 5);
    assert_fails(nb_session_append(s, outside, 2, logits), NB_EVALUE, "outside the vocabulary");
    assert_holds(s, 5);
    assert_fails(nb_session_append(s, ids, -1, NULL), NB_EINVAL, "-1 tokens");
    assert_fails(nb_session_append(s, ids, 0, logits), NB_EINVAL, "0 tokens");
    nb_cancel_set(&stop);
    assert_fails(nb_session_append(s, many, 9, NULL), NB_EINTERRUPTED, "interrupted");
    nb_cancel_clear(&stop);
    assert_holds(s, 5);
    assert_ok(nb_session_append(s, ids + 5, IDS - 5, logits));
    assert_holds(s, IDS);
    nb_session_truncate(s, IDS + 1);
    assert_holds(s, IDS);
    nb_session_truncate(s, 2);
    assert_holds(s, 2);
    assert_ok(nb_session_append(s, ids + 2, IDS - 2, again));
    assert_memory_equal(logits, again, sizeof logits);
    nb_session_truncate(s, -1);
    assert_holds(s, 0);
    nb_session_close(s);
}

/* ---- answers ---- */

static const struct nb_sampling greedy = {.top_p = 1, .repeat_penalty = 1};

static void test_generate__fails_with_an_empty_result(void **state)
{
    static const int32_t many[CONTEXT + 1];
    struct nb_session *s = open_session(NULL);
    struct nb_generate_opts o = {.sampling = greedy, .max_tokens = 4};
    struct nb_generate_result r;
    (void)state;
    FILL(r);
    assert_fails(nb_generate(s, ids, 0, &o, &r), NB_EINVAL, "prompt is empty");
    assert_empty(r);
    FILL(r);
    assert_fails(nb_generate(s, many, CONTEXT + 1, &o, &r), NB_EVALUE, "context of 64");
    assert_empty(r);
    FILL(r);
    assert_fails(nb_generate(s, outside, 2, &o, &r), NB_EVALUE, "outside the vocabulary");
    assert_empty(r);
    o.sampling.top_p = 0;
    FILL(r);
    assert_fails(nb_generate(s, ids, IDS, &o, &r), NB_EINVAL, "top-p");
    assert_empty(r);
    o.sampling = greedy;
    FOR_EACH_FAILED_ALLOCATION(FILL(r), nb_generate(s, ids, IDS, &o, &r), assert_empty(r));
    assert_int_equal(r.prompt_tokens, IDS);
    assert_true(r.count > 0 && r.count <= 4);
    assert_int_equal(r.text[r.len], 0);
    nb_generate_result_release(&r);
    assert_empty(r);
    nb_generate_result_release(&r);
    nb_session_close(s);
}

static enum nb_status refuse(void *ctx, const char *text, size_t len)
{
    (void)text;
    (void)len;
    return *(const enum nb_status *)ctx;
}

static enum nb_status stop_now(void *ctx, const char *text, size_t len)
{
    (void)text;
    (void)len;
    nb_cancel_set(ctx);
    return NB_OK;
}

/* A callback's status comes back; an interruption comes with the answer so far. */
static void test_generate__is_ended_by_its_callback(void **state)
{
    enum nb_status full = NB_EIO;
    struct nb_cancel stop = {0};
    struct nb_session *s = open_session(NULL);
    struct nb_generate_opts o = {
        .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 1},
        .ignore_eos = true,
        .text = refuse,
        .ctx = &full,
        .cancel = &stop};
    struct nb_generate_result r;
    int64_t count;
    (void)state;
    FILL(r);
    assert_int_equal(nb_generate(s, ids, IDS, &o, &r), NB_EIO);
    assert_empty(r);
    o.text = stop_now;
    o.ctx = &stop;
    assert_fails(nb_generate(s, ids, IDS, &o, &r), NB_EINTERRUPTED, "interrupted");
    assert_true(r.count > 0 && r.len > 0);
    const int32_t *tokens = nb_session_tokens(s, &count); /* a beginning of prompt and answer */
    assert_true(count >= IDS && count <= IDS + (int64_t)r.count);
    assert_memory_equal(tokens, ids, sizeof ids);
    assert_memory_equal(tokens + IDS, r.ids, (size_t)(count - IDS) * sizeof *r.ids);
    nb_generate_result_release(&r);
    nb_session_close(s);
}

/* ---- batches ---- */

static struct nb_batch *open_batch(const struct nb_batch_opts *opts)
{
    struct nb_batch *b;
    assert_ok(nb_batch_open(&b, engine, opts));
    return b;
}

static void test_batch__open_fails_with_null(void **state)
{
    static const struct {
        struct nb_batch_opts opts;
        enum nb_status status;
        const char *words;
    } cases[] = {
        {{0}, NB_EINVAL, "0 sequences"},
        {{.sequences = 2, .kv = (enum nb_kv_dtype)9}, NB_EINVAL, "unknown kind"},
        {{.sequences = 2, .context = -1}, NB_EINVAL, "a context of -1"},
        {{.sequences = 2, .context = 513}, NB_EVALUE, "the model was made for 512"},
        {{.sequences = 2, .chunk = 1}, NB_EINVAL, "no room for 2"},
        {{.sequences = 2, .tokens = INT64_C(1) << 40}, NB_EVALUE, "tokens in all"},
    };
    const struct nb_batch_opts good = {.sequences = 2, .context = CONTEXT};
    struct nb_batch_info info;
    struct nb_batch *b;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        b = (void *)1;
        assert_fails(nb_batch_open(&b, engine, &cases[i].opts), cases[i].status, cases[i].words);
        assert_null(b);
    }
    FOR_EACH_FAILED_ALLOCATION(b = (void *)1, nb_batch_open(&b, engine, &good), assert_null(b));
    nb_batch_info(b, &info);
    assert_int_equal(info.sequences, 2);
    assert_int_equal(info.context, CONTEXT);
    assert_int_equal(info.open, 0);
    assert_int_equal(info.pages, 2); /* of 64 tokens */
    assert_int_equal(info.free, 2);
    nb_batch_close(b);
    nb_batch_close(NULL);
}

static void test_batch__sequences_come_and_go(void **state)
{
    struct nb_batch *b = open_batch(&(struct nb_batch_opts){.sequences = 2, .context = CONTEXT});
    int64_t sequence;
    (void)state;
    for (int64_t i = 0; i < 2; i++) {
        assert_ok(nb_batch_add(b, &sequence));
        assert_int_equal(sequence, i);
    }
    sequence = 77;
    assert_fails(nb_batch_add(b, &sequence), NB_EVALUE, "all 2 sequences");
    assert_int_equal(sequence, 77);
    struct nb_batch_input in = {.sequence = 0, .ids = ids, .count = IDS};
    assert_ok(nb_batch_step(b, &in, 1));
    assert_int_equal(nb_batch_length(b, 0), IDS);
    assert_fails(nb_batch_truncate(b, 0, IDS + 1), NB_EINVAL, "which has 8");
    assert_fails(nb_batch_truncate(b, 0, -1), NB_EINVAL, "-1 tokens");
    assert_fails(nb_batch_truncate(b, 2, 0), NB_EINVAL, "no sequence 2");
    assert_int_equal(nb_batch_length(b, 0), IDS);
    assert_ok(nb_batch_truncate(b, 0, 3));
    assert_int_equal(nb_batch_length(b, 0), 3);
    assert_ok(nb_batch_drop(b, 0));
    assert_fails(nb_batch_drop(b, 0), NB_EINVAL, "no sequence 0");
    assert_int_equal(nb_batch_length(b, 0), -1);
    assert_ok(nb_batch_add(b, &sequence));
    assert_int_equal(sequence, 0);
    assert_int_equal(nb_batch_length(b, 0), 0);
    nb_batch_close(b);
}

/* Whatever is wrong with a step, the sequences keep their tokens. */
static void assert_refused(struct nb_batch *b, struct nb_batch_input input, enum nb_status status,
                           const char *text)
{
    assert_ok(nb_batch_step(b, &input, 1));
    assert_int_equal(input.status, status);
    assert_non_null(strstr(nb_last_error(), text));
}

static void test_batch__step_that_fails_changes_nothing(void **state)
{
    static const int32_t many[CONTEXT];
    static float logits[TINY_VOCAB], wanted[TINY_VOCAB];
    struct nb_cancel stop = {0};
    struct nb_candidate candidates[65];
    struct nb_batch *b = open_batch(&(struct nb_batch_opts){
        .sequences = 2, .context = CONTEXT, .tokens = 64, .chunk = 70, .cancel = &stop});
    struct nb_session *s = open_session(NULL);
    int64_t sequence;
    (void)state;
    assert_ok(nb_batch_add(b, &sequence));
    assert_ok(nb_batch_add(b, &sequence));
    struct nb_batch_input in[2] = {{.sequence = 0, .ids = ids, .count = 4},
                                   {.sequence = 1, .ids = ids, .count = 1}};
    assert_ok(nb_batch_step(b, in, 1));
    assert_fails(nb_batch_step(b, in, 0), NB_EINVAL, "a step of 0");
    assert_refused(b, (struct nb_batch_input){.sequence = 2, .ids = ids, .count = 1}, NB_EINVAL,
                   "sequence 2");
    assert_refused(b, in[1], NB_ENOMEM, "0 left");
    assert_refused(b, (struct nb_batch_input){.ids = ids, .count = 0}, NB_EINVAL, "0 tokens");
    assert_refused(b, (struct nb_batch_input){.ids = outside, .count = 2}, NB_EVALUE,
                   "outside the vocabulary");
    assert_refused(b, (struct nb_batch_input){.ids = many, .count = CONTEXT}, NB_EVALUE,
                   "context of 64");
    assert_refused(
        b, (struct nb_batch_input){.ids = ids, .count = 1, .candidates = candidates, .topk = 65},
        NB_EINVAL, "65");
    in[0] = (struct nb_batch_input){.sequence = 0, .ids = ids + 4, .count = 4, .logits = logits};
    nb_cancel_set(&stop);
    assert_fails(nb_batch_step(b, in, 1), NB_EINTERRUPTED, "interrupted");
    nb_cancel_clear(&stop);
    assert_int_equal(nb_batch_length(b, 0), 4);
    assert_int_equal(nb_batch_length(b, 1), 0);
    assert_ok(nb_batch_step(b, in, 1));
    assert_int_equal(in[0].status, NB_OK);
    assert_ok(nb_session_append(s, ids, 8, wanted));
    assert_memory_equal(logits, wanted, sizeof logits);
    nb_session_close(s);
    nb_batch_close(b);
}

/* ---- schedulers ---- */

struct ended {
    int times;
    enum nb_status status;
    size_t count;
};

static void keep_status(void *ctx, int64_t id, enum nb_status status,
                        struct nb_generate_result *result)
{
    struct ended *e = ctx;
    (void)id;
    e->times++;
    e->status = status;
    e->count = result->count;
}

static struct nb_request request_of(struct ended *e)
{
    return (struct nb_request){.ids = ids,
                               .count = IDS,
                               .opts = {.sampling = greedy, .max_tokens = 3, .ignore_eos = true},
                               .done = keep_status,
                               .ctx = e};
}

static void test_scheduler__open_fails_with_null(void **state)
{
    const struct nb_scheduler_opts good = {.batch = {.sequences = 2, .context = CONTEXT}};
    struct nb_scheduler *s = (void *)1;
    struct nb_scheduler_info info;
    (void)state;
    assert_fails(nb_scheduler_open(&s, engine, &(struct nb_scheduler_opts){0}), NB_EINVAL,
                 "0 sequences");
    assert_null(s);
    FOR_EACH_FAILED_ALLOCATION(s = (void *)1, nb_scheduler_open(&s, engine, &good), assert_null(s));
    nb_scheduler_info(s, &info);
    assert_int_equal(info.running + info.waiting + info.reserved, 0);
    assert_int_equal(info.pages, 2);
    nb_scheduler_close(s);
    nb_scheduler_close(NULL);
}

static void test_scheduler__submit_that_fails_leaves_no_request(void **state)
{
    struct nb_scheduler *s;
    struct nb_scheduler_info info;
    struct ended ended = {0};
    struct nb_request request = request_of(&ended);
    int64_t id = 77;
    (void)state;
    assert_ok(nb_scheduler_open(
        &s, engine, &(struct nb_scheduler_opts){.batch = {.sequences = 2, .context = CONTEXT}}));
    request.count = 0;
    assert_fails(nb_scheduler_submit(s, &request, &id), NB_EINVAL, "prompt is empty");
    request.ids = outside;
    request.count = 2;
    assert_fails(nb_scheduler_submit(s, &request, &id), NB_EVALUE, "outside the vocabulary");
    request = request_of(&ended);
    request.opts.sampling.temperature = -1;
    assert_fails(nb_scheduler_submit(s, &request, &id), NB_EINVAL, "temperature");
    assert_int_equal(id, 77);
    nb_scheduler_info(s, &info);
    assert_int_equal(info.waiting, 0);
    request = request_of(&ended);
    FOR_EACH_FAILED_ALLOCATION(id = 77, nb_scheduler_submit(s, &request, &id),
                               assert_int_equal(id, 77));
    assert_int_equal(id, 1);
    assert_int_equal(ended.times, 0);
    nb_scheduler_close(s);
    assert_int_equal(ended.times, 1);
    assert_int_equal(ended.status, NB_EINTERRUPTED);
}

static void test_scheduler__runs_and_cancels(void **state)
{
    struct nb_cancel stop = {1};
    struct nb_scheduler *s;
    struct nb_scheduler_info info;
    struct ended first = {0}, second = {0};
    const struct nb_request requests[] = {request_of(&first), request_of(&second)};
    int64_t ids_of[2], active = 77;
    (void)state;
    assert_ok(
        nb_scheduler_open(&s, engine,
                          &(struct nb_scheduler_opts){
                              .batch = {.sequences = 1, .context = CONTEXT, .cancel = &stop}}));
    for (int i = 0; i < 2; i++)
        assert_ok(nb_scheduler_submit(s, &requests[i], &ids_of[i]));
    assert_true(ids_of[0] > 0 && ids_of[1] != ids_of[0]);
    assert_fails(nb_scheduler_run(s, 0, &active), NB_EINTERRUPTED, "interrupted");
    assert_int_equal(active, 2);
    assert_int_equal(first.times + second.times, 0);
    nb_cancel_clear(&stop);
    assert_ok(nb_scheduler_run(s, 1, &active));
    nb_scheduler_info(s, &info);
    assert_int_equal(info.running, 1);
    assert_int_equal(info.waiting, 1);
    assert_int_equal(info.reserved, 1);
    nb_scheduler_cancel(s, ids_of[1]);
    assert_ok(nb_scheduler_run(s, 0, &active));
    assert_int_equal(active, 0);
    assert_int_equal(first.status, NB_OK);
    assert_int_equal(first.count, 3);
    assert_int_equal(second.status, NB_EINTERRUPTED);
    assert_int_equal(second.count, 0);
    nb_scheduler_cancel(s, ids_of[0]); /* it has ended: nothing happens */
    assert_ok(nb_scheduler_run(s, 0, NULL));
    nb_scheduler_close(s);
    assert_int_equal(first.times, 1);
    assert_int_equal(second.times, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status__has_a_name_and_a_message),
        cmocka_unit_test(test_version__begins_with_three_numbers),
        cmocka_unit_test(test_log__goes_to_the_sink),
        cmocka_unit_test(test_cancel__is_set_and_cleared_by_its_owner),
        cmocka_unit_test(test_engine__open_fails_with_null),
        cmocka_unit_test(test_engine__info),
        cmocka_unit_test(test_session__open_fails_with_null),
        cmocka_unit_test(test_session__keeps_its_tokens_when_appending_fails),
        cmocka_unit_test(test_generate__fails_with_an_empty_result),
        cmocka_unit_test(test_generate__is_ended_by_its_callback),
        cmocka_unit_test(test_batch__open_fails_with_null),
        cmocka_unit_test(test_batch__sequences_come_and_go),
        cmocka_unit_test(test_batch__step_that_fails_changes_nothing),
        cmocka_unit_test(test_scheduler__open_fails_with_null),
        cmocka_unit_test(test_scheduler__submit_that_fails_leaves_no_request),
        cmocka_unit_test(test_scheduler__runs_and_cancels),
    };
    return cmocka_run_group_tests(tests, make_model, drop_model);
}
