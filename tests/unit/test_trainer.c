/* test_trainer.c - a training run that is stepped by hand ends with the bytes of nb_train(), also
 * when it is interrupted and resumed. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#include "unit/tiny_model.h"

#define STEPS 6

static char model[512], data[512];
static const char *files[] = {data, NULL};

static int make_model(void **state)
{
    if (make_test_dir(state))
        return -1;
    make_tiny_model();
    snprintf(model, sizeof model, "%s", test_path("model"));
    put("data.txt", "The cat sees seven dogs over the hill, and rain falls gently on all of them. "
                    "What did she say when the door of the old house would not open again? "
                    "Nobody answered, and the clock went on as it always had, tick after tick.");
    snprintf(data, sizeof data, "%s", test_path("data.txt"));
    return 0;
}

static struct nb_train_opts options(const char *out)
{
    struct nb_train_opts o;
    nb_train_defaults(&o);
    o.model = model;
    o.data = files;
    o.out = out;
    o.steps = STEPS;
    o.seq_len = 16;
    o.batch_size = 2;
    o.grad_accum = 1;
    o.lr = 1e-2;
    o.schedule = NB_SCHEDULE_CONSTANT;
    o.precision = NB_PRECISION_NVFP4;
    o.bf16_master = true;
    o.moment_type = NB_MOMENT_INT8;
    o.threads = 2;
    return o;
}

static struct nb_trainer *open_trainer(const struct nb_train_opts *o)
{
    struct nb_trainer *t;
    assert_ok(nb_trainer_open(&t, o));
    return t;
}

/* Steps until it is done, or `limit` times; returns how often. */
static int steps(struct nb_trainer *t, int limit)
{
    bool done = false;
    int n = 0;
    for (; n < limit && !done; n++)
        assert_ok(nb_trainer_step(t, &done));
    assert_true(done == (n == STEPS));
    return n;
}

/* The two results are equal, byte for byte. */
static void check_same(const char *a, const char *b)
{
    char *x, *y;
    size_t m, n;
    assert_ok(nbi_file_read(a, 1 << 24, &x, &m));
    assert_ok(nbi_file_read(b, 1 << 24, &y, &n));
    assert_int_equal(m, n);
    assert_memory_equal(x, y, m);
    free(x);
    free(y);
}

static const char *train_at_once(char path[512], int64_t count)
{
    struct nb_train_result result;
    snprintf(path, 512, "%s", test_path("at_once.dat"));
    struct nb_train_opts o = options(path);
    o.steps = count;
    assert_ok(nb_train(&o, &result));
    assert_true(result.exported && result.last.step == count);
    return path;
}

/* ---- tests ---- */

static struct nb_trainer *watched;
static atomic_bool watching;

/* Reads the status while another thread steps. */
static void *watch(void *ctx)
{
    int64_t last = 0;
    while (watching) {
        struct nb_train_result r;
        nb_trainer_status(watched, &r);
        if (r.last.step < last || r.last.step > STEPS)
            abort();
        last = r.last.step;
    }
    *(int64_t *)ctx = last;
    return NULL;
}

static void test_trainer__steps_give_the_bytes_of_train(void **state)
{
    char path[512], out[512];
    struct nb_train_result result;
    pthread_t thread;
    int64_t seen;
    bool done;
    (void)state;
    snprintf(out, sizeof out, "%s", test_path("stepped.dat"));
    const struct nb_train_opts o = options(out);
    watched = open_trainer(&o);
    nb_trainer_status(watched, &result);
    assert_int_equal(result.last.step, 0);
    assert_int_equal(result.last.steps, STEPS);
    assert_true(result.plan.total > 0 && isnan(result.last.loss));
    watching = true;
    assert_int_equal(pthread_create(&thread, NULL, watch, &seen), 0);
    assert_int_equal(steps(watched, 100), STEPS);
    assert_ok(nb_trainer_finish(watched, &result));
    watching = false;
    pthread_join(thread, NULL);
    assert_true(result.exported && !result.interrupted);
    assert_int_equal(result.last.step, STEPS);
    assert_true(result.last.loss > 0 && seen <= STEPS);
    assert_fails(nb_trainer_step(watched, &done), NB_EINVAL, "has ended");
    assert_fails(nb_trainer_finish(watched, &result), NB_EINVAL, "has ended");
    assert_fails(nb_trainer_save(watched), NB_EINVAL, "has ended");
    nb_trainer_close(watched);
    check_same(train_at_once(path, STEPS), out);
}

/* The caller may end a run before its last step. */
static void test_trainer__may_be_finished_early(void **state)
{
    char path[512], out[512];
    struct nb_train_result result;
    (void)state;
    snprintf(out, sizeof out, "%s", test_path("early.dat"));
    const struct nb_train_opts o = options(out);
    struct nb_trainer *t = open_trainer(&o);
    assert_fails(nb_trainer_save(t), NB_EINVAL, "no directory");
    assert_int_equal(steps(t, 4), 4);
    assert_ok(nb_trainer_finish(t, &result));
    assert_int_equal(result.result_step, 4);
    nb_trainer_close(t);
    check_same(train_at_once(path, 4), out);
    nb_trainer_close(NULL);
}

static struct nb_cancel stop;

static void interrupt_at(void *ctx, const struct nb_train_progress *p)
{
    if (p->step == *(const int64_t *)ctx)
        nb_cancel_set(&stop);
}

/* Interrupted after any step, and resumed: the same bytes. */
static void test_trainer__resumes_after_an_interruption(void **state)
{
    char path[512], out[512], dir[512];
    struct nb_train_result result;
    (void)state;
    train_at_once(path, STEPS);
    for (int64_t at = 1; at < STEPS; at++) {
        char name[32];
        snprintf(name, sizeof name, "ck%d", (int)at);
        snprintf(dir, sizeof dir, "%s", test_path(name));
        snprintf(out, sizeof out, "%s", test_path("resumed.dat"));
        struct nb_train_opts o = options(out);
        o.checkpoint_dir = dir;
        o.cancel = &stop;
        o.progress = interrupt_at;
        o.ctx = &at;
        struct nb_trainer *t = open_trainer(&o);
        enum nb_status rc = NB_OK;
        for (bool done = false; rc == NB_OK && !done;)
            rc = nb_trainer_step(t, &done);
        assert_int_equal(rc, NB_EINTERRUPTED);
        nb_trainer_status(t, &result);
        assert_true(result.interrupted && !result.exported);
        nb_trainer_close(t);

        nb_cancel_clear(&stop);
        o.progress = NULL;
        o.resume = true;
        t = open_trainer(&o);
        nb_trainer_status(t, &result);
        assert_int_equal(result.last.step, at);
        bool done = false;
        while (!done)
            assert_ok(nb_trainer_step(t, &done));
        assert_ok(nb_trainer_save(t));
        assert_ok(nb_trainer_finish(t, &result));
        nb_trainer_close(t);
        check_same(path, out);
    }
}

static void test_trainer__opening_fails(void **state)
{
    struct nb_train_opts o = options(NULL);
    struct nb_trainer *t;
    (void)state;
    o.model = "/no/such/model";
    assert_fails(nb_trainer_open(&t, &o), NB_ENOTFOUND, "/no/such/model");
    assert_null(t);
    o = options(NULL);
    o.steps = 0;
    assert_fails(nb_trainer_open(&t, &o), NB_EINVAL, "how long");
    assert_null(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trainer__steps_give_the_bytes_of_train),
        cmocka_unit_test(test_trainer__may_be_finished_early),
        cmocka_unit_test(test_trainer__resumes_after_an_interruption),
        cmocka_unit_test(test_trainer__opening_fails),
    };
    return cmocka_run_group_tests(tests, make_model, remove_test_dir);
}
