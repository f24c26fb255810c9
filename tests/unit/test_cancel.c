/* test_cancel.c - every operation that takes long ends with NB_EINTERRUPTED when the wish to stop
 * that it was given is set, and obeys no other. */
#include "unit/tiny_model.h"

static char model[512], text[512];
static const char *files[] = {text, NULL};
static struct nb_cancel set = {1}, clear;
static struct nb_engine *engine;

static int make_model(void **state)
{
    if (make_test_dir(state))
        return -1;
    make_tiny_model();
    snprintf(model, sizeof model, "%s", test_path("model"));
    put("text.txt", "The cat sees seven dogs over the hill, and rain falls gently on all of them.");
    snprintf(text, sizeof text, "%s", test_path("text.txt"));
    assert_ok(nb_engine_open(&engine, &(struct nb_engine_opts){.model = model, .cancel = &clear}));
    return 0;
}

static int drop_model(void **state)
{
    nb_engine_close(engine);
    return remove_test_dir(state);
}

/* ---- one call of each, with the wish that it is given ---- */

static enum nb_status synth(struct nb_cancel *c)
{
    static int calls; /* each needs a new directory */
    char name[32];
    snprintf(name, sizeof name, "synth%d", calls++);
    return nb_synth(&(struct nb_synth_opts){
        .config = test_path("config.json"), .dst = test_path(name), .cancel = c});
}

static enum nb_status convert(struct nb_cancel *c)
{
    return nb_convert(
        &(struct nb_convert_opts){.src = model, .dst = test_path("x.dat"), .cancel = c});
}

static enum nb_status quantize(struct nb_cancel *c)
{
    struct nb_quantize_report report;
    return nb_quantize(
        &(struct nb_quantize_opts){.to = {.src = model, .dst = test_path("q.dat"), .cancel = c}},
        &report);
}

static enum nb_status verify(struct nb_cancel *c)
{
    struct nb_file *f;
    assert_ok(nb_file_open(&f, model, NULL));
    enum nb_status rc = nb_file_verify(f, 2, NULL, NULL, c);
    nb_file_close(f);
    return rc;
}

static enum nb_status open_engine(struct nb_cancel *c)
{
    struct nb_engine *e;
    enum nb_status rc =
        nb_engine_open(&e, &(struct nb_engine_opts){.model = model, .threads = 2, .cancel = c});
    if (rc != NB_OK)
        assert_null(e);
    nb_engine_close(e);
    return rc;
}

static enum nb_status append(struct nb_cancel *c)
{
    struct nb_session *s;
    const int32_t ids[] = {1, 2, 3};
    assert_ok(nb_session_open(&s, engine, &(struct nb_session_opts){.cancel = c}));
    enum nb_status rc = nb_session_append(s, ids, 3, NULL);
    nb_session_close(s);
    return rc;
}

static enum nb_status generate_with(struct nb_cancel *of_session, struct nb_cancel *c)
{
    struct nb_session *s;
    struct nb_generate_result r;
    const int32_t ids[] = {1, 2, 3};
    assert_ok(nb_session_open(&s, engine, &(struct nb_session_opts){.cancel = of_session}));
    const struct nb_generate_opts o = {
        .sampling = {.top_p = 1, .repeat_penalty = 1}, .max_tokens = 3, .cancel = c};
    enum nb_status rc = nb_generate(s, ids, 3, &o, &r);
    nb_generate_result_release(&r);
    nb_session_close(s);
    return rc;
}

static enum nb_status generate(struct nb_cancel *c)
{
    return generate_with(&clear, c);
}

static enum nb_status schedule(struct nb_cancel *c)
{
    struct nb_scheduler *s;
    const int32_t ids[] = {1, 2, 3};
    const struct nb_request request = {
        .ids = ids,
        .count = 3,
        .opts = {.sampling = {.top_p = 1, .repeat_penalty = 1}, .max_tokens = 3}};
    int64_t id;
    assert_ok(nb_scheduler_open(
        &s, engine, &(struct nb_scheduler_opts){.batch = {.sequences = 2, .cancel = c}}));
    assert_ok(nb_scheduler_submit(s, &request, &id));
    enum nb_status rc = nb_scheduler_run(s, 0, NULL);
    nb_scheduler_close(s);
    return rc;
}

static enum nb_status perplexity(struct nb_cancel *c)
{
    int32_t ids[64];
    struct nb_ppl_result r;
    for (int i = 0; i < 64; i++)
        ids[i] = i;
    return nb_eval_ppl(engine, ids, 64, &(struct nb_ppl_opts){.context = 32, .cancel = c}, &r);
}

static enum nb_status see_path(void *ctx, const struct nb_parity_path *path)
{
    (void)ctx;
    return path->passed ? NB_OK : nbi_fail(NB_EVALUE, "%s", path->name);
}

static enum nb_status parity(struct nb_cancel *c)
{
    const int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8};
    return nb_eval_parity(engine, NULL, ids, 8, see_path, NULL, c);
}

static enum nb_status train_tokenizer(struct nb_cancel *c)
{
    return nb_tokenizer_train(&(struct nb_tokenizer_train_opts){
        .files = files, .out = test_path("t.json"), .vocab = 300, .min_count = 2, .cancel = c});
}

static struct nb_train_opts training(struct nb_cancel *c)
{
    struct nb_train_opts o;
    nb_train_defaults(&o);
    o.model = model;
    o.data = files;
    o.steps = 2;
    o.seq_len = 16;
    o.batch_size = o.grad_accum = 1;
    o.cancel = c;
    return o;
}

/* Stopped before its first step, it has nothing to save, and ends. */
static enum nb_status train(struct nb_cancel *c)
{
    struct nb_train_result r;
    const struct nb_train_opts o = training(c);
    enum nb_status rc = nb_train(&o, &r);
    return rc == NB_OK && r.interrupted ? NB_EINTERRUPTED : rc;
}

static enum nb_status write_questions(struct nb_cancel *c)
{
    struct nb_identity_set_report report;
    return nb_identity_write(
        &(struct nb_identity_set_opts){
            .out = test_path("who.tsv"), .name = "Ada", .count = 100, .cancel = c},
        &report);
}

#define CALLS(X)                                                                                   \
    X(synth)                                                                                       \
    X(convert)                                                                                     \
    X(quantize)                                                                                    \
    X(verify)                                                                                      \
    X(open_engine)                                                                                 \
    X(append)                                                                                      \
    X(generate)                                                                                    \
    X(schedule)                                                                                    \
    X(perplexity)                                                                                  \
    X(parity)                                                                                      \
    X(train_tokenizer)                                                                             \
    X(train)                                                                                       \
    X(write_questions)

#define X(name)                                                                                    \
    static void test_cancel__##name(void **state)                                                  \
    {                                                                                              \
        (void)state;                                                                               \
        assert_int_equal(name(&set), NB_EINTERRUPTED);                                             \
        assert_int_equal(set.set, 1); /* the library never clears it */                            \
        assert_ok(name(&clear));                                                                   \
        assert_ok(name(NULL));                                                                     \
    }
CALLS(X)
#undef X

/* A call within a call obeys the wish of the outer one, unless it has its own. */
static void test_cancel__is_inherited(void **state)
{
    struct nb_cancel stop = {0};
    (void)state;
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(&stop);
    assert_ok(append(NULL));
    nb_cancel_set(&stop);
    assert_int_equal(append(NULL), NB_EINTERRUPTED);
    assert_ok(append(&clear));
    assert_ok(schedule(&clear));
    assert_int_equal(generate_with(NULL, NULL), NB_EINTERRUPTED);
    assert_ok(generate_with(NULL, &clear));
    assert_ok(generate_with(&stop, &clear)); /* its own, not the session's */
    nb_cancel_clear(&stop);
    assert_ok(append(NULL));
}

int main(void)
{
#define X(name) cmocka_unit_test(test_cancel__##name),
    const struct CMUnitTest tests[] = {CALLS(X) cmocka_unit_test(test_cancel__is_inherited)};
#undef X
    return cmocka_run_group_tests(tests, make_model, drop_model);
}
