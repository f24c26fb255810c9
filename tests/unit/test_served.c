/* test_served.c - the trainer's own forward pass and the file that it wrote, loaded again, give
 * bit-identical logits. */
#include "infer/session.h"
#include "train/checkpoint.h"
#include "train/run.h"
#include "unit/support.h"

enum { ROWS = 2, LENGTH = 24 };

static struct nb_train_opts settings(enum nb_precision precision, const char *out)
{
    return (struct nb_train_opts){.model = test_path("model"),
                                  .random_tokens = true,
                                  .out = out,
                                  .checkpoint_dir = test_path("checkpoints"),
                                  .keep = 1,
                                  .steps = 3,
                                  .seq_len = LENGTH,
                                  .batch_size = ROWS,
                                  .grad_accum = 1,
                                  .lr = 1e-2,
                                  .schedule = NB_SCHEDULE_CONSTANT,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-8,
                                  .grad_clip = 1,
                                  .precision = precision,
                                  .bf16_master = precision != NB_PRECISION_F32,
                                  .moment_type = NB_MOMENT_INT8,
                                  .threads = 2};
}

/* Logits of the trainer's next batch after its last step. */
static void trainer_logits(const struct nb_train_opts *o, int32_t *ids, float **logits)
{
    struct nbi_run r;
    struct nb_train_opts opts = *o;
    bool more = true;
    int32_t rows[ROWS * LENGTH];
    opts.resume = true;
    assert_ok(nbi_run_open(&r, &opts));
    assert_ok(nbi_run_open_checkpoint(&r));
    assert_ok(nbi_run_fingerprint(&r));
    assert_ok(nbi_run_resume(&r));
    assert_int_equal(r.state.step, o->steps);
    assert_ok(nbi_run_next_batches(&r, &more));
    assert_true(more);
    assert_ok(nbi_train_pass_set(&r.train_pass, &r.microbatches[0]));
    assert_ok(nbi_execute(&r.params.weights, &r.acts, r.stream, &r.train_pass.pass));
    struct nbi_pass pass = r.train_pass.pass;
    int64_t n = ROWS * LENGTH, V = r.config.vocab_size;
    for (int32_t i = 0; i < n; i++)
        rows[i] = i;
    pass.M = n;
    pass.rows = rows;
    assert_int_equal(r.acts.M, n);
    assert_ok(nbi_execute_head(&r.params.weights, &r.acts, r.stream, &pass));
    *logits = malloc((size_t)(n * V) * sizeof **logits);
    assert_non_null(*logits);
    assert_ok(r.be->download(r.stream, *logits, r.acts.logits, n * V * (int64_t)sizeof **logits));
    assert_ok(r.be->sync(r.stream));
    memcpy(ids, r.microbatches[0].ids, sizeof rows);
    nbi_run_close(&r);
}

/* Logits of the same ids from the file, each row in a session of its own. */
static void assert_serves(const char *file, const char *dir, const int32_t *ids,
                          const float *expected)
{
    struct nb_engine *engine;
    const struct nb_engine_opts opts = {.model = file, .model_dir = dir, .threads = 2};
    assert_ok(nb_engine_open(&engine, &opts));
    int64_t V = engine->config.vocab_size;
    float *logits = malloc((size_t)(LENGTH * V) * sizeof *logits);
    assert_non_null(logits);
    for (int row = 0; row < ROWS; row++) {
        const struct nbi_session_opts session = {
            .context = LENGTH, .chunk = 7, .logits = LENGTH, .kv = NBI_F32, .exact = true};
        struct nb_session *s;
        assert_ok(nbi_session_new(&s, engine, &session));
        assert_ok(nbi_session_append(s, ids + row * LENGTH, LENGTH, logits, LENGTH));
        assert_memory_equal(logits, expected + row * LENGTH * V,
                            (size_t)(LENGTH * V) * sizeof *logits);
        nb_session_close(s);
    }
    free(logits);
    nb_engine_close(engine);
}

static void check(enum nb_precision precision, const char *out, const char *dir)
{
    struct nb_train_result result;
    int32_t ids[ROWS * LENGTH];
    float *logits = NULL;
    struct nb_train_opts o = settings(precision, test_path(out));
    nbi_remove_tree(o.checkpoint_dir);
    assert_ok(nb_train(&o, &result));
    trainer_logits(&o, ids, &logits);
    assert_serves(o.out, dir, ids, logits);
    free(logits);
}

static void test_served__logits_are_bit_identical(void **state)
{
    (void)state;
    const struct nb_synth_opts synth = {.preset = "tiny", .dst = test_path("model"), .seed = 3};
    assert_ok(nb_synth(&synth));
    check(NB_PRECISION_NVFP4, "four.dat", synth.dst);
    check(NB_PRECISION_NVFP4, "four", NULL);
    check(NB_PRECISION_BF16, "half", NULL);
    check(NB_PRECISION_F32, "whole", NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_served__logits_are_bit_identical, make_test_dir,
                                        remove_test_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
