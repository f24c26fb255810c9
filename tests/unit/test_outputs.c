/* test_outputs.c - what calls that fail leave in their outputs: NULL or zeros where the caller
 * would own something, otherwise what was there before. test_core_api.c has the functions of
 * core.h. */
#include "unit/outputs.h"
#include "unit/tiny_model.h"

#define MISSING "/no/such/file"

static char model[512];
static struct nb_engine *engine;
static struct nb_cancel set = {1};

static int make_model(void **state)
{
    if (make_test_dir(state))
        return -1;
    make_tiny_model();
    snprintf(model, sizeof model, "%s", test_path("model"));
    assert_ok(nb_engine_open(&engine, &(struct nb_engine_opts){.model = model, .threads = 1}));
    return 0;
}

static int drop_model(void **state)
{
    nb_engine_close(engine);
    return remove_test_dir(state);
}

/* ---- files ---- */

static void test_outputs__of_files(void **state)
{
    struct nb_file *f = (void *)1;
    struct nb_quantize_report report;
    struct nb_quantize_opts q = {.to = {.src = MISSING, .dst = test_path("q.dat")}};
    (void)state;
    assert_fails(nb_file_open(&f, MISSING, NULL), NB_ENOTFOUND, MISSING);
    assert_null(f);
    FILL(report);
    assert_fails(nb_quantize(&q, &report), NB_ENOTFOUND, MISSING);
    assert_kept(report);
    q.to.src = model;
    q.to.cancel = &set;
    assert_fails(nb_quantize(&q, &report), NB_EINTERRUPTED, "interrupted");
    assert_kept(report);
    assert_false(nbi_path_exists(q.to.dst));
    q.to.cancel = NULL;
    assert_ok(nb_quantize(&q, &report));
    assert_string_equal(report.total.name, "all");
    assert_true(report.families > 0 && report.seconds > 0);
}

/* ---- text ---- */

static void test_outputs__of_tokenizers(void **state)
{
    struct nb_tokenizer *t = (void *)1;
    int32_t *ids;
    char *text;
    size_t count, len, unknown;
    (void)state;
    assert_fails(nb_tokenizer_open(&t, MISSING, NULL), NB_ENOTFOUND, MISSING);
    assert_null(t);
    assert_ok(nb_tokenizer_open(&t, model, NULL));
    FOR_EACH_FAILED_ALLOCATION((ids = (void *)1, count = 7),
                               nb_tokenizer_encode(t, "the cat", 7, true, &ids, &count),
                               (assert_null(ids), assert_int_equal(count, 0)));
    FOR_EACH_FAILED_ALLOCATION(
        (text = (void *)1, len = unknown = 7),
        nb_tokenizer_decode(t, ids, count, &text, &len, &unknown),
        (assert_null(text), assert_int_equal(len, 0), assert_int_equal(unknown, 7)));
    assert_string_equal(text, "the cat");
    assert_int_equal(unknown, 0);
    free(ids);
    free(text);
    nb_tokenizer_close(t);
}

/* A decoder that had no memory still holds the beginning of the character. */
static void test_outputs__of_decoders(void **state)
{
    struct nb_tokenizer *t = nb_engine_tokenizer(engine);
    struct nb_decoder d = {0};
    const char *text;
    int32_t *ids;
    size_t count, len;
    (void)state;
    assert_ok(nb_tokenizer_encode(t, "\xE2\x96\x88", 3, true, &ids, &count)); /* a full block */
    assert_true(count > 1);
    FOR_EACH_FAILED_ALLOCATION((text = NULL, len = 7), nb_decoder_next(&d, t, ids[0], &text, &len),
                               (assert_string_equal(text, ""), assert_int_equal(len, 0)));
    for (size_t i = 1; i < count; i++)
        assert_ok(nb_decoder_next(&d, t, ids[i], &text, &len));
    assert_int_equal(len, 3);
    assert_memory_equal(text, "\xE2\x96\x88", 3);
    nb_decoder_release(&d);
    free(ids);
}

static void test_outputs__of_chat_templates(void **state)
{
    const struct nb_message message = {NB_ROLE_USER, "hi", 2};
    struct nb_chat *chat = (void *)1;
    char *text = (void *)1;
    size_t len = 7;
    (void)state;
    assert_fails(nb_chat_open(&chat, MISSING, NULL), NB_ENOTFOUND, MISSING);
    assert_null(chat);
    assert_ok(nb_chat_open(&chat, model, NULL));
    assert_fails(nb_chat_render(chat, "{", 1, &text, &len), NB_EFORMAT, "JSON");
    assert_null(text);
    assert_int_equal(len, 0);
    FOR_EACH_FAILED_ALLOCATION((text = (void *)1, len = 7),
                               nb_chat_prompt(chat, &message, 1, false, &text, &len),
                               (assert_null(text), assert_int_equal(len, 0)));
    assert_non_null(strstr(text, "hi"));
    free(text);
    nb_chat_close(chat);
}

/* ---- data ---- */

static enum nb_status see_sample(void *ctx, const struct nb_data_sample *sample)
{
    (void)ctx;
    (void)sample;
    return NB_OK;
}

static void test_outputs__of_data(void **state)
{
    struct nb_prompts *prompts = (void *)1;
    struct nb_data_report report;
    const char *files[] = {test_path("bad.jsonl"), NULL};
    struct nb_data_opts opts = {.files = files, .seq_len = 16};
    (void)state;
    assert_fails(nb_prompts_open(&prompts, MISSING), NB_ENOTFOUND, MISSING);
    assert_null(prompts);
    put("bad.jsonl", "{\"text\": \"the cat and the dog\"}\n{\n");
    FILL(report);
    assert_fails(nb_data_show(nb_engine_tokenizer(engine), nb_engine_chat(engine), &opts,
                              see_sample, NULL, &report),
                 NB_EFORMAT, "bad.jsonl:2");
    assert_kept(report);
    opts.skip_bad = true;
    assert_ok(nb_data_show(nb_engine_tokenizer(engine), nb_engine_chat(engine), &opts, see_sample,
                           NULL, &report));
    assert_int_equal(report.bad, 1);
    assert_true(report.tokens > 0 && report.rows > 0);
}

/* ---- measurements ---- */

static void test_outputs__of_perplexity_and_stress(void **state)
{
    const int32_t ids[] = {1, 2, 3, 4};
    struct nb_ppl_opts ppl = {.cancel = &set};
    struct nb_stress_opts stress = {.iterations = 1, .cancel = &set};
    struct nb_ppl_result result;
    struct nb_stress_report report;
    (void)state;
    FILL(result);
    assert_fails(nb_eval_ppl(engine, ids, 1, &ppl, &result), NB_EVALUE, "takes two");
    assert_kept(result);
    assert_fails(nb_eval_ppl(engine, ids, 4, &ppl, &result), NB_EINTERRUPTED, "interrupted");
    assert_kept(result);
    ppl.cancel = NULL;
    assert_ok(nb_eval_ppl(engine, ids, 4, &ppl, &result));
    assert_int_equal(result.tokens, 3);
    FILL(report);
    assert_fails(nb_eval_stress(engine, &stress, &report), NB_EINTERRUPTED, "interrupted");
    assert_kept(report);
    stress.iterations = 0;
    assert_fails(nb_eval_stress(engine, &stress, &report), NB_EINVAL, "0 iterations");
    assert_kept(report);
}

static void test_outputs__of_comparisons(void **state)
{
    struct nb_prompts *prompts;
    struct nb_ab_result result;
    (void)state;
    put("prompts.txt", "hello\n");
    assert_ok(nb_prompts_open(&prompts, test_path("prompts.txt")));
    const struct nb_ab_opts opts = {
        .model = {{.model = model}, {.model = MISSING}}, .prompts = prompts, .max_tokens = 3};
    FILL(result);
    assert_fails(nb_eval_ab(&opts, &result), NB_ENOTFOUND, MISSING);
    assert_empty(result);
    nb_ab_result_release(&result);
    nb_prompts_close(prompts);
}

static void test_outputs__of_identity(void **state)
{
    struct nb_identity_set_report report;
    struct nb_identity_result result;
    struct nb_identity_teach_result taught;
    const struct nb_identity_set_opts questions = {.out = test_path("who.txt"), .count = 100};
    const struct nb_identity_opts opts = {
        .model = {.model = model}, .base = {.model = MISSING}, .set = questions, .max_tokens = 3};
    const struct nb_identity_teach_opts teach = {
        .train = {.model = MISSING, .out = test_path("taught.dat")},
        .set = questions,
        .dir = test_path("work")};
    (void)state;
    FILL(report);
    assert_fails(nb_identity_write(&questions, &report), NB_EINVAL, "who.txt");
    assert_kept(report);
    FILL(result);
    assert_fails(nb_identity_eval(&opts, &result), NB_ENOTFOUND, MISSING);
    assert_empty(result);
    nb_identity_result_release(&result);
    FILL(taught);
    assert_int_not_equal(nb_identity_teach(&teach, &taught), NB_OK);
    assert_empty(taught.eval);
    assert_false(taught.train.exported);
}

/* ---- tools ---- */

static void test_outputs__of_fit(void **state)
{
    struct nb_train_fit fits[4], smallest;
    struct nb_train_opts o;
    int count = 4;
    (void)state;
    nb_train_defaults(&o);
    o.model = MISSING;
    o.seq_len = o.batch_size = 16;
    o.grad_accum = 1;
    FILL(fits);
    FILL(smallest);
    assert_fails(nb_train_fit(&o, 1, 0, fits, &count, &smallest), NB_ENOTFOUND, MISSING);
    assert_int_equal(count, 4);
    assert_kept(fits);
    assert_kept(smallest);
}

static void test_outputs__of_devices(void **state)
{
    struct nb_gpu_products products;
    char words[NB_DEVICE_CAPS];
    int gpu = 77;
    (void)state;
    assert_fails(nb_device_parse("tpu", &gpu), NB_EUNSUPPORTED, "tpu");
    assert_int_equal(gpu, 77);
    FILL(words);
    assert_fails(nb_device_caps("tpu", words), NB_EUNSUPPORTED, "tpu");
    assert_kept(words);
    FILL(products);
    assert_fails(nb_gpu_products(1000, &products), NB_EDEVICE, "GPU");
    assert_kept(products);
}

static void test_outputs__of_benches(void **state)
{
    struct nb_bench_run run;
    struct nb_bench_train train;
    struct nb_bench_ops ops;
    struct nb_train_opts o;
    (void)state;
    nb_train_defaults(&o);
    o.model = MISSING;
    FILL(run);
    assert_fails(nb_bench_run(engine, &(struct nb_bench_run_opts){.context = 3}, &run), NB_EINVAL,
                 "0 tokens after 3");
    assert_kept(run);
    assert_fails(
        nb_bench_run(engine, &(struct nb_bench_run_opts){.tokens = 3, .cancel = &set}, &run),
        NB_EINTERRUPTED, "interrupted");
    assert_kept(run);
    FILL(train);
    assert_fails(nb_bench_train(&o, 0, &train), NB_EINVAL, "0 steps");
    assert_int_not_equal(nb_bench_train(&o, 1, &train), NB_OK);
    assert_kept(train);
    FILL(ops);
    assert_fails(nb_bench_codec(&ops, 1, &set), NB_EINTERRUPTED, "interrupted");
    assert_kept(ops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_outputs__of_files),
        cmocka_unit_test(test_outputs__of_tokenizers),
        cmocka_unit_test(test_outputs__of_decoders),
        cmocka_unit_test(test_outputs__of_chat_templates),
        cmocka_unit_test(test_outputs__of_data),
        cmocka_unit_test(test_outputs__of_perplexity_and_stress),
        cmocka_unit_test(test_outputs__of_comparisons),
        cmocka_unit_test(test_outputs__of_identity),
        cmocka_unit_test(test_outputs__of_fit),
        cmocka_unit_test(test_outputs__of_devices),
        cmocka_unit_test(test_outputs__of_benches),
    };
    return cmocka_run_group_tests(tests, make_model, drop_model);
}
