/* test_core_train.c - the functions of core.h for training runs: what they give, and what they
 * leave after a failure. test_trainer.c compares runs with each other. */
#include "unit/outputs.h"
#include "unit/tiny_model.h"

#define MISSING "/no/such/model"
#define STEPS   3

static char model[512], data[512];
static const char *files[] = {data, NULL};

static int make_model(void **state)
{
    if (make_test_dir(state))
        return -1;
    make_tiny_model();
    snprintf(model, sizeof model, "%s", test_path("model"));
    put("data.txt", "The cat sees seven dogs over the hill, and rain falls gently on all of them. "
                    "What did she say when the door of the old house would not open again?");
    snprintf(data, sizeof data, "%s", test_path("data.txt"));
    return 0;
}

static struct nb_train_opts options(void)
{
    struct nb_train_opts o;
    nb_train_defaults(&o);
    o.model = model;
    o.data = files;
    o.steps = STEPS;
    o.seq_len = 16;
    o.batch_size = o.grad_accum = 1;
    o.threads = 1;
    return o;
}

static struct nb_trainer *open_trainer(const struct nb_train_opts *o)
{
    struct nb_trainer *t;
    assert_ok(nb_trainer_open(&t, o));
    return t;
}

/* ---- settings ---- */

static void test_defaults__are_adamw_and_zeros(void **state)
{
    struct nb_train_opts o;
    (void)state;
    FILL(o);
    nb_train_defaults(&o);
    assert_true(o.lr == NB_TRAIN_LR && o.beta1 == NB_TRAIN_BETA1 && o.beta2 == NB_TRAIN_BETA2 &&
                o.eps == NB_TRAIN_EPS && o.grad_clip == NB_TRAIN_GRAD_CLIP);
    assert_true(!o.model && !o.data && !o.out && !o.progress && !o.cancel && o.steps == 0);
}

static void test_check__refuses_what_makes_no_sense(void **state)
{
    struct nb_train_opts o = options();
    (void)state;
    assert_ok(nb_train_check(&o));
    o.model = MISSING; /* it looks at no file */
    assert_ok(nb_train_check(&o));
    o.steps = 0;
    assert_fails(nb_train_check(&o), NB_EINVAL, "how long");
    o = options();
    o.resume = true;
    assert_fails(nb_train_check(&o), NB_EINVAL, "--checkpoint-dir");
    o = options();
    o.data = NULL;
    assert_fails(nb_train_check(&o), NB_EINVAL, "data is missing");
    o = options();
    o.seq_len = 1;
    assert_fails(nb_train_check(&o), NB_EINVAL, "at least 2 tokens");
}

static void test_plan__that_fails_is_untouched(void **state)
{
    struct nb_train_opts o = options();
    struct nb_train_plan plan;
    (void)state;
    o.model = MISSING;
    FILL(plan);
    assert_fails(nb_train_plan(&o, &plan), NB_ENOTFOUND, MISSING);
    assert_kept(plan);
    o = options();
    o.seq_len = 513;
    assert_fails(nb_train_plan(&o, &plan), NB_EINVAL, "512 positions");
    assert_kept(plan);
    o.seq_len = 16;
    assert_ok(nb_train_plan(&o, &plan));
    assert_true(plan.masters == 4 * plan.parameters && plan.moments == 8 * plan.parameters);
    assert_true(plan.total > plan.masters + plan.moments + plan.gradients && !plan.gpu);
}

/* ---- a run that is stepped ---- */

static void test_trainer__open_fails_with_null(void **state)
{
    struct nb_train_opts o = options();
    struct nb_trainer *t = (void *)1;
    struct nb_cancel set = {1};
    (void)state;
    o.model = MISSING;
    assert_fails(nb_trainer_open(&t, &o), NB_ENOTFOUND, MISSING);
    assert_null(t);
    o = options();
    o.epochs = o.steps = 0;
    t = (void *)1;
    assert_fails(nb_trainer_open(&t, &o), NB_EINVAL, "how long");
    assert_null(t);
    o = options();
    o.cancel = &set;
    t = (void *)1;
    assert_fails(nb_trainer_open(&t, &o), NB_EINTERRUPTED, "interrupted");
    assert_null(t);
    o.cancel = NULL;
    FOR_EACH_FAILED_ALLOCATION(t = (void *)1, nb_trainer_open(&t, &o), assert_null(t));
    nb_trainer_close(t);
    nb_trainer_close(NULL);
}

static void test_trainer__runs_to_its_end(void **state)
{
    struct nb_train_opts o = options();
    struct nb_train_result result;
    bool done = false;
    (void)state;
    o.out = test_path("tuned.dat");
    o.checkpoint_dir = test_path("checkpoints");
    o.keep = 1;
    struct nb_trainer *t = open_trainer(&o);
    for (int64_t i = 1; i <= STEPS; i++) {
        assert_ok(nb_trainer_step(t, &done));
        assert_int_equal(done, i == STEPS);
        nb_trainer_status(t, &result);
        assert_int_equal(result.last.step, i);
    }
    assert_ok(nb_trainer_save(t));
    FILL(result);
    assert_ok(nb_trainer_finish(t, &result));
    assert_true(result.exported && !result.interrupted && !result.stopped);
    assert_int_equal(result.result_step, STEPS);
    assert_string_equal(result.device, "cpu");
    assert_true(nbi_path_exists(o.out));

    /* It has ended, and says what it came to. */
    done = true;
    assert_fails(nb_trainer_step(t, &done), NB_EINVAL, "has ended");
    assert_false(done);
    assert_fails(nb_trainer_save(t), NB_EINVAL, "has ended");
    FILL(result);
    assert_fails(nb_trainer_finish(t, &result), NB_EINVAL, "has ended");
    assert_true(result.exported && result.result_step == STEPS);
    nb_trainer_close(t);
}

/* A checkpoint that cannot be written is no end. */
static void test_trainer__goes_on_after_a_save_that_failed(void **state)
{
    struct nb_train_opts o = options();
    struct nb_train_result result;
    bool done;
    (void)state;
    struct nb_trainer *t = open_trainer(&o);
    assert_fails(nb_trainer_save(t), NB_EINVAL, "no directory for checkpoints");
    assert_ok(nb_trainer_step(t, &done));
    nb_trainer_close(t);

    o.checkpoint_dir = test_path("lost");
    t = open_trainer(&o);
    assert_ok(nb_trainer_step(t, &done));
    nbi_remove_tree(o.checkpoint_dir);
    put("lost", "a file in the place of the directory");
    assert_fails(nb_trainer_save(t), NB_EIO, "lost");
    assert_ok(nb_trainer_step(t, &done));
    nb_trainer_status(t, &result);
    assert_int_equal(result.last.step, 2);
    nb_trainer_close(t);
}

static void test_trainer__interrupted_step_ends_the_run(void **state)
{
    struct nb_cancel stop = {0};
    struct nb_train_opts o = options();
    struct nb_train_result result;
    bool done;
    (void)state;
    o.cancel = &stop;
    struct nb_trainer *t = open_trainer(&o);
    assert_ok(nb_trainer_step(t, &done));
    nb_cancel_set(&stop);
    done = true;
    assert_fails(nb_trainer_step(t, &done), NB_EINTERRUPTED, "interrupted after step 1");
    assert_false(done);
    nb_trainer_status(t, &result);
    assert_true(result.interrupted && result.last.step == 1);
    nb_cancel_clear(&stop);
    assert_fails(nb_trainer_step(t, &done), NB_EINVAL, "has ended");
    nb_trainer_close(t);
}

/* Before the result only the evaluation that decides about it can be interrupted. */
static void test_trainer__interrupted_finish(void **state)
{
    struct nb_cancel stop = {0};
    struct nb_train_opts o = options();
    struct nb_train_result result;
    bool done;
    (void)state;
    o.cancel = &stop;
    o.out = test_path("written.dat");
    o.eval_data = files;
    struct nb_trainer *t = open_trainer(&o);
    assert_ok(nb_trainer_step(t, &done)); /* evaluates the model as it was read */
    assert_ok(nb_trainer_step(t, &done));
    nb_cancel_set(&stop);
    assert_ok(nb_trainer_finish(t, &result));
    assert_true(result.interrupted && result.exported && result.result_step == 1);
    assert_true(nbi_path_exists(o.out));
    nb_trainer_close(t);

    nb_cancel_clear(&stop);
    o.out = test_path("never.dat");
    o.stop_if_ppl_rises = 50;
    o.eval_every = 2;
    t = open_trainer(&o);
    assert_ok(nb_trainer_step(t, &done));
    assert_ok(nb_trainer_step(t, &done));
    nb_cancel_set(&stop);
    FILL(result);
    assert_fails(nb_trainer_finish(t, &result), NB_EINTERRUPTED, "interrupted after step 1");
    assert_true(result.interrupted && !result.exported && result.last.step == 1);
    assert_false(nbi_path_exists(o.out));
    nb_trainer_close(t);
}

/* ---- a whole run ---- */

static void test_train__says_how_far_it_came(void **state)
{
    struct nb_train_opts o = options();
    struct nb_train_result result;
    struct nb_cancel set = {1};
    (void)state;
    o.model = MISSING;
    FILL(result);
    assert_fails(nb_train(&o, &result), NB_ENOTFOUND, MISSING);
    assert_empty(result);
    o = options();
    FILL(result);
    allocations_left = 0; /* not even for the run itself */
    enum nb_status rc = nb_train(&o, &result);
    allocations_left = -1;
    assert_fails(rc, NB_ENOMEM, "training run");
    assert_empty(result);
    o.out = model;
    FILL(result);
    assert_fails(nb_train(&o, &result), NB_EINVAL, "is the model that is read");
    assert_true(result.plan.total > 0 && !result.exported);
    o.out = NULL;
    o.cancel = &set;
    FILL(result);
    assert_fails(nb_train(&o, &result), NB_EINTERRUPTED, "interrupted"); /* while it was opened */
    assert_false(result.exported || result.interrupted);
    o.cancel = NULL;
    assert_ok(nb_train(&o, &result));
    assert_int_equal(result.last.step, STEPS);
    assert_false(result.exported || result.interrupted);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults__are_adamw_and_zeros),
        cmocka_unit_test(test_check__refuses_what_makes_no_sense),
        cmocka_unit_test(test_plan__that_fails_is_untouched),
        cmocka_unit_test(test_trainer__open_fails_with_null),
        cmocka_unit_test(test_trainer__runs_to_its_end),
        cmocka_unit_test(test_trainer__goes_on_after_a_save_that_failed),
        cmocka_unit_test(test_trainer__interrupted_step_ends_the_run),
        cmocka_unit_test(test_trainer__interrupted_finish),
        cmocka_unit_test(test_train__says_how_far_it_came),
    };
    return cmocka_run_group_tests(tests, make_model, remove_test_dir);
}
