/* test_threads.c - eight threads use one engine at once. Sessions, batches, conversations and
 * tokenizers give each the bits that a single thread gets. */
#include <pthread.h>

#include "base/rng.h"
#include "base/str.h"
#include "unit/tiny_model.h"

#define GOLDEN  NB_TEST_SOURCE "/golden/tokenizer/"
#define THREADS 8
#define SEEDS   3
#define CONTEXT 256

static struct nb_engine *engine;     /* operations on two threads */
static struct nb_engine *single;     /* operations on the calling thread only */
static struct nb_tokenizer *foreign; /* its pretokenizer is a PCRE2 pattern */

static int open_all(void **state)
{
    if (make_test_dir(state))
        return -1;
    struct nb_engine_opts opts = {.model = test_path("model"), .threads = 2};
    make_tiny_model();
    assert_ok(nb_engine_open(&engine, &opts));
    opts.threads = 1;
    assert_ok(nb_engine_open(&single, &opts));
    assert_ok(nb_tokenizer_open(&foreign, GOLDEN "gpt2/tokenizer.json", NULL));
    return 0;
}

static int close_all(void **state)
{
    nb_engine_close(engine);
    nb_engine_close(single);
    nb_tokenizer_close(foreign);
    return remove_test_dir(state);
}

/* ---- tasks: each appends all its results to out ---- */

typedef enum nb_status (*task_fn)(const struct nb_engine *e, uint64_t seed, struct nbi_str *out);

/* Words, long ones as well, chat tokens, text that is not in NFC, and bytes that are not UTF-8. */
static void make_text(struct nbi_str *text, uint64_t seed, uint64_t number)
{
    static const char *const pieces[] = {"the ",
                                         "it's ",
                                         "\n",
                                         "<|im_start|>",
                                         "  ",
                                         "w3w",
                                         "e\xCC\x81",
                                         "12",
                                         "xyz ",
                                         "\xE4\xB8\xAD",
                                         "[5]",
                                         "\xFF",
                                         "\xE1\x84\x92\xE1\x85\xA1",
                                         "incomprehensibilities "};
    text->len = 0;
    for (uint64_t i = 0; i < 40; i++) {
        struct nbi_philox r = nbi_philox(seed, number * 40 + i, 1);
        for (uint32_t n = r.v[1] % 8 ? 1 : 20; n > 0; n--)
            nbi_str_puts(text, pieces[r.v[0] % (sizeof pieces / sizeof *pieces)]);
    }
}

static enum nb_status encode_texts(struct nb_tokenizer *t, uint64_t seed, struct nbi_str *out)
{
    struct nbi_str text = {0};
    enum nb_status rc = NB_OK;
    for (uint64_t i = 0; i < 100 && rc == NB_OK; i++) {
        int32_t *ids = NULL;
        char *back = NULL;
        size_t count, len = 0;
        make_text(&text, seed, i);
        rc = nb_tokenizer_encode(t, text.p, text.len, i % 2, &ids, &count);
        if (rc == NB_OK)
            rc = nb_tokenizer_decode(t, ids, count, &back, &len, NULL);
        nbi_str_append(out, ids, count * sizeof *ids);
        nbi_str_append(out, back, len);
        free(ids);
        free(back);
    }
    nbi_str_release(&text);
    return rc;
}

static enum nb_status use_tokenizer(const struct nb_engine *e, uint64_t seed, struct nbi_str *out)
{
    return encode_texts(nb_engine_tokenizer(e), seed, out);
}

static enum nb_status use_foreign(const struct nb_engine *e, uint64_t seed, struct nbi_str *out)
{
    (void)e;
    return encode_texts(foreign, seed, out);
}

static void make_ids(int32_t *ids, int64_t count, uint64_t seed)
{
    for (int64_t i = 0; i < count; i++)
        ids[i] = (int32_t)(nbi_philox(seed, (uint64_t)i, 2).v[0] % TINY_VOCAB);
}

static enum nb_status use_session(const struct nb_engine *e, uint64_t seed, struct nbi_str *out)
{
    const struct nb_session_opts opts = {.context = CONTEXT, .kv = (enum nb_kv_dtype)(seed % 4)};
    struct nb_session *s = NULL;
    float logits[TINY_VOCAB];
    int32_t ids[100];
    make_ids(ids, 100, seed);
    enum nb_status rc = nb_session_open(&s, e, &opts);
    for (int64_t at = 0, n; at < 100 && rc == NB_OK; at += n) {
        n = at < 60 ? 60 : 8;
        rc = nb_session_append(s, ids + at, n, logits);
        nbi_str_append(out, logits, sizeof logits);
    }
    nb_session_close(s);
    return rc;
}

static enum nb_status use_batch(const struct nb_engine *e, uint64_t seed, struct nbi_str *out)
{
    const struct nb_batch_opts opts = {.sequences = 3, .context = CONTEXT, .chunk = 64};
    struct nb_batch *b = NULL;
    float logits[3][TINY_VOCAB];
    int32_t ids[120];
    make_ids(ids, 120, seed);
    enum nb_status rc = nb_batch_open(&b, e, &opts);
    for (int64_t i = 0, sequence; i < 3 && rc == NB_OK; i++)
        rc = nb_batch_add(b, &sequence);
    for (int64_t step = 0; step < 6 && rc == NB_OK; step++) {
        struct nb_candidate candidates[4] = {0};
        struct nb_batch_input inputs[3];
        for (int64_t i = 0; i < 3; i++)
            inputs[i] = (struct nb_batch_input){.sequence = i,
                                                .ids = ids + step * 20 + i * 6,
                                                .count = step % 2 ? 1 : 6,
                                                .logits = logits[i],
                                                .candidates = i == 1 ? candidates : NULL,
                                                .topk = i == 1 ? 4 : 0};
        rc = nb_batch_step(b, inputs, 3);
        for (int64_t i = 0; i < 3 && rc == NB_OK; i++)
            rc = inputs[i].status;
        nbi_str_append(out, logits, sizeof logits);
        nbi_str_append(out, candidates, sizeof candidates);
    }
    nb_batch_close(b);
    return rc;
}

static enum nb_status ask(struct nb_conversation *c, const char *text, size_t len, uint64_t seed,
                          struct nbi_str *out)
{
    const struct nb_generate_opts o = {
        .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = seed},
        .max_tokens = 10,
        .ignore_eos = true};
    struct nb_generate_result r;
    enum nb_status rc = nb_conversation_answer(c, text, len, &o, &r);
    if (rc == NB_OK) {
        nbi_str_append(out, r.ids, r.count * sizeof *r.ids);
        nbi_str_append(out, r.text, r.len);
        nb_generate_result_release(&r);
    }
    return rc;
}

static enum nb_status use_conversation(const struct nb_engine *e, uint64_t seed,
                                       struct nbi_str *out)
{
    static const char *const questions[] = {"what is the sky?", "e\xCC\x81t\xC3\xA9, 12 xyz",
                                            "it's\n\nincomprehensible"};
    const struct nb_session_opts opts = {.context = CONTEXT, .kv = NB_KV_F16};
    struct nb_session *s = NULL;
    struct nb_conversation *c = NULL;
    enum nb_status rc = nb_session_open(&s, e, &opts);
    if (rc == NB_OK)
        rc = nb_conversation_open(&c, s, seed % 2);
    for (size_t i = 0; i < 3 && rc == NB_OK; i++)
        rc = ask(c, questions[i], strlen(questions[i]), seed + i, out);
    nb_conversation_close(c);
    nb_session_close(s);
    return rc;
}

/* The error message of this thread must not be replaced by another thread's. */
static enum nb_status use_errors(const struct nb_engine *e, uint64_t seed, struct nbi_str *out)
{
    char path[64];
    (void)e;
    for (int i = 0; i < 50; i++) {
        struct nb_file *file;
        snprintf(path, sizeof path, "/nowhere/%d/%llu.dat", i, (unsigned long long)seed);
        if (nb_file_open(&file, path, NULL) == NB_OK)
            return NB_EINVAL;
        nbi_str_puts(out, nb_last_error());
    }
    return strstr(nb_last_error(), path) ? NB_OK : NB_EINVAL;
}

static const task_fn tasks[] = {use_tokenizer, use_conversation, use_session,
                                use_batch,     use_foreign,      use_errors};

#define TASKS (sizeof tasks / sizeof *tasks)

/* ---- all tasks at once ---- */

static struct nbi_str expected[TASKS][SEEDS];

struct worker {
    size_t number;
    pthread_barrier_t *start;
    char failure[512]; /* "": none */
};

/* Runs all tasks with all seeds, in an order that differs between threads. */
static void *work(void *arg)
{
    struct worker *w = arg;
    pthread_barrier_wait(w->start);
    for (size_t i = 0; i < TASKS * SEEDS && !w->failure[0]; i++) {
        size_t at = w->number % 2 ? TASKS * SEEDS - 1 - i : (i + w->number) % (TASKS * SEEDS);
        size_t task = at % TASKS, seed = at / TASKS;
        struct nbi_str out = {0};
        const struct nbi_str *want = &expected[task][seed];
        enum nb_status rc = tasks[task](engine, seed, &out);
        if (rc != NB_OK)
            snprintf(w->failure, sizeof w->failure, "task %zu, seed %zu: %s", task, seed,
                     nb_last_error());
        else if (out.len != want->len || memcmp(out.p, want->p, out.len) != 0)
            snprintf(w->failure, sizeof w->failure, "task %zu, seed %zu differs", task, seed);
        nbi_str_release(&out);
    }
    return NULL;
}

static void run_threads(void *(*fn)(void *))
{
    struct worker workers[THREADS] = {0};
    pthread_t threads[THREADS];
    pthread_barrier_t start;
    assert_int_equal(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (size_t i = 0; i < THREADS; i++) {
        workers[i].number = i;
        workers[i].start = &start;
        assert_int_equal(pthread_create(&threads[i], NULL, fn, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start);
    for (int i = 0; i < THREADS; i++)
        if (workers[i].failure[0])
            fail_msg("thread %d: %s", i, workers[i].failure);
}

static void test_engine__threads_give_the_bits_of_one_thread(void **state)
{
    (void)state;
    for (size_t task = 0; task < TASKS; task++)
        for (size_t seed = 0; seed < SEEDS; seed++) {
            assert_ok(tasks[task](single, seed, &expected[task][seed]));
            assert_ok(nbi_str_status(&expected[task][seed]));
            assert_true(expected[task][seed].len > 100);
        }
    for (int round = 0; round < (SANITIZED ? 1 : 10); round++)
        run_threads(work);
    for (size_t task = 0; task < TASKS; task++)
        for (size_t seed = 0; seed < SEEDS; seed++)
            nbi_str_release(&expected[task][seed]);
}

/* ---- interruption ---- */

static struct nb_cancel stop; /* shared by all threads */

static enum nb_status stop_at_third(void *ctx, const char *text, size_t len)
{
    int *shown = ctx;
    (void)text;
    if (len > 0 && ++*shown == 3)
        nb_cancel_set(&stop);
    return NB_OK;
}

/* Generates until it is interrupted; one of the threads does that. */
static void *answer_until_stopped(void *arg)
{
    struct worker *w = arg;
    const struct nb_session_opts opts = {.context = 512, .cancel = &stop};
    int shown = 0;
    const struct nb_generate_opts o = {
        .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = w->number},
        .ignore_eos = true,
        .text = w->number == 5 ? stop_at_third : NULL,
        .ctx = &shown};
    struct nb_generate_result r = {0};
    struct nb_session *s = NULL;
    const int32_t prompt[] = {5, 6, 7};
    enum nb_status rc = nb_session_open(&s, engine, &opts);
    pthread_barrier_wait(w->start);
    for (int i = 0; i < 1000 && rc == NB_OK; i++) { /* again, if an answer ended */
        nb_generate_result_release(&r);
        rc = nb_generate(s, prompt, 3, &o, &r);
    }
    if (rc != NB_EINTERRUPTED || strcmp(nb_last_error(), "interrupted") != 0)
        snprintf(w->failure, sizeof w->failure, "status %d: %s", rc, nb_last_error());
    nb_generate_result_release(&r);
    nb_session_close(s);
    return NULL;
}

static void test_interrupt__stops_all_threads(void **state)
{
    struct nbi_str out = {0};
    (void)state;
    run_threads(answer_until_stopped);
    nb_cancel_clear(&stop);
    assert_ok(use_conversation(engine, 1, &out)); /* the engine is still usable */
    nbi_str_release(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine__threads_give_the_bits_of_one_thread),
        cmocka_unit_test(test_interrupt__stops_all_threads),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
