/* test_infer_batch.c - sequences in a batch get the logits of sessions of their own; pages are
 * taken and returned; a step that fails changes nothing. */
#include "unit/allocations.h"

#include <math.h>

#include "unit/batch_lab.h"

static uint64_t drawn;

static int64_t dice(int64_t n)
{
    return nbi_philox(7, drawn++, 0).v[0] % n;
}

/* ---- against sessions ---- */

/* A sequence of a batch, and a session that gets the same tokens. */
struct pair {
    int64_t sequence; /* -1: none */
    struct nb_session *session;
    int32_t ids[CONTEXT];
    int64_t length;
    float logits[VOCAB];
};

static void pair_begin(struct pair *p, struct nb_batch *b, const struct nb_batch_opts *o,
                       int64_t name)
{
    const struct nb_session_opts opts = {.context = CONTEXT, .kv = o->kv, .exact = o->exact};
    ids_of(p->ids, name);
    p->sequence = added(b);
    p->length = 0;
    assert_ok(nb_session_open(&p->session, engine, &opts));
}

static void pair_end(struct pair *p, struct nb_batch *b)
{
    nb_session_close(p->session);
    assert_ok(nb_batch_drop(b, p->sequence));
    p->sequence = -1;
}

/* One step with random inputs for some of the sequences. Logits must equal those of the sessions.
 */
static void random_step(struct nb_batch *b, struct pair *pairs, int64_t budget)
{
    static float expected[VOCAB];
    struct nb_batch_input inputs[SEQUENCES];
    struct pair *of[SEQUENCES];
    int64_t count = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        struct pair *p = &pairs[i];
        int64_t n = dice(3) ? 1 : 1 + dice(budget / 2);
        if (p->sequence < 0 || dice(4) == 0 || n > budget || p->length + n > CONTEXT)
            continue;
        of[count] = p;
        inputs[count++] = (struct nb_batch_input){.sequence = p->sequence,
                                                  .ids = p->ids + p->length,
                                                  .count = n,
                                                  .logits = dice(5) ? p->logits : NULL};
        budget -= n;
    }
    if (count == 0)
        return;
    run_step(b, inputs, count);
    for (int64_t i = 0; i < count; i++) {
        struct pair *p = of[i];
        assert_ok(nb_session_append(p->session, p->ids + p->length, inputs[i].count, expected));
        p->length += inputs[i].count;
        assert_int_equal(nb_batch_length(b, p->sequence), p->length);
        if (inputs[i].logits)
            assert_memory_equal(p->logits, expected, ROW);
    }
}

/* Random steps, while sequences of different lengths come and go. */
static void compare_with_sessions(const struct nb_batch_opts *o, int steps)
{
    static struct pair pairs[SEQUENCES];
    struct nb_batch *b = open_batch(o);
    int64_t name = 0, pages = free_pages(b);
    for (int i = 0; i < SEQUENCES; i++)
        pairs[i].sequence = -1;
    for (int step = 0; step < steps; step++) {
        struct pair *p = &pairs[dice(SEQUENCES)];
        if (p->sequence < 0)
            pair_begin(p, b, o, name++);
        else if (dice(6) == 0)
            pair_end(p, b);
        random_step(b, pairs, 128);
    }
    for (int i = 0; i < SEQUENCES; i++)
        if (pairs[i].sequence >= 0)
            pair_end(&pairs[i], b);
    assert_int_equal(free_pages(b), pages);
    nb_batch_close(b);
}

static void test_batch__logits_equal_those_of_sessions(void **state)
{
    (void)state;
    for (int kv = NB_KV_F32; kv <= NB_KV_F8; kv++)
        for (int exact = 0; exact < 2; exact++) {
            struct nb_batch_opts o = usual;
            o.kv = (enum nb_kv_dtype)kv;
            o.exact = exact;
            compare_with_sessions(&o, 30);
        }
}

static void test_batch__logits_equal_on_every_instruction_set_and_two_threads(void **state)
{
    struct nb_engine *was = engine;
    (void)state;
    for (int level = NBI_SIMD_SCALAR; level <= (int)nbi_simd_level(); level++) {
        const struct nb_engine_opts opts = {
            .synthetic = "tiny", .threads = 2, .simd = nbi_simd_name((enum nbi_simd)level)};
        assert_ok(nb_engine_open(&engine, &opts));
        compare_with_sessions(&usual, level == NBI_SIMD_SCALAR ? 6 : 20);
        nb_engine_close(engine);
    }
    engine = was;
}

/* Several passes in a step, as on a GPU whose batch is deterministic. */
static void test_batch__logits_equal_in_several_passes(void **state)
{
    struct nb_batch_opts o = usual;
    int64_t rows = engine->be->batch_invariant_rows;
    (void)state;
    o.deterministic = true;
    o.chunk = 9;
    compare_with_sessions(&o, 30); /* a step may then exceed the chunk, also on the CPU */
    engine->be->caps &= ~(unsigned)NBI_CAP_BATCH_INVARIANT;
    engine->be->batch_invariant_rows = 5;
    compare_with_sessions(&o, 30);
    engine->be->caps |= NBI_CAP_BATCH_INVARIANT;
    engine->be->batch_invariant_rows = rows;
}

/* ---- candidates ---- */

static void test_candidates__are_the_largest_logits(void **state)
{
    static float logits[3][VOCAB];
    struct nb_candidate candidates[2][NBI_TOPK_MAX];
    struct nb_batch *b = open_batch(&usual);
    int32_t ids[CONTEXT];
    (void)state;
    ids_of(ids, 0);
    for (int i = 0; i < 3; i++)
        added(b);
    struct nb_batch_input inputs[] = {
        {.sequence = 2, .ids = ids, .count = 20, .logits = logits[0], .candidates = candidates[0]},
        {.sequence = 0, .ids = ids + 3, .count = 1},
        {.sequence = 1,
         .ids = ids + 5,
         .count = 2,
         .logits = logits[1],
         .candidates = candidates[1]}};
    inputs[0].topk = NBI_TOPK_MAX;
    inputs[2].topk = 3;
    memset(candidates[1], 0xAB, sizeof candidates[1]);
    run_step(b, inputs, 3);
    for (int k = 0; k < 2; k++)
        for (int64_t j = 0; j < inputs[2 * k].topk; j++) {
            int top = best_of(logits[k]);
            assert_int_equal(candidates[k][j].id, top);
            assert_memory_equal(&candidates[k][j].logit, &logits[k][top], sizeof(float));
            logits[k][top] = -INFINITY;
        }
    assert_int_equal(((const uint8_t *)&candidates[1][3])[0],
                     0xAB); /* no more than topk are written */
    nb_batch_close(b);
}

/* ---- instrumented operations ---- */

static int64_t calls_left;

static enum nb_status expect_batch_invariant(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    assert_true(a->batch_invariant && a->pages.at && a->N > 0);
    assert_true(a->kv_unshared == (a->N <= 8));
    return real.attention(s, a);
}

/* A step of new sequences with tokens[i] tokens each must have passes of these many rows. */
static void expect_passes(struct nb_batch *b, const int64_t *tokens, int64_t count,
                          const int64_t *wanted, int64_t wanted_count)
{
    static const int32_t ids[CONTEXT] = {1, 2, 3};
    struct nb_batch_input inputs[SEQUENCES];
    for (int64_t i = 0; i < count; i++)
        inputs[i] = (struct nb_batch_input){.sequence = added(b), .ids = ids, .count = tokens[i]};
    pass_count = 0;
    run_step(b, inputs, count);
    assert_int_equal(pass_count, wanted_count);
    for (int64_t i = 0; i < wanted_count; i++)
        assert_int_equal(passes[i], wanted[i]);
    for (int64_t i = 0; i < count; i++)
        assert_ok(nb_batch_drop(b, inputs[i].sequence));
}

#define EXPECT(tokens, rows)                                                                       \
    expect_passes(b, (const int64_t[])UNPACK tokens, COUNT(((const int64_t[])UNPACK tokens)),      \
                  (const int64_t[])UNPACK rows, COUNT(((const int64_t[])UNPACK rows)))
#define UNPACK(...)                                                                                \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

/* A backend that is batch-invariant for up to 6 rows: the passes of a long input depend on that
 * sequence alone. */
static void test_deterministic__long_inputs_have_passes_of_their_own(void **state)
{
    struct nb_batch_opts o = usual;
    int32_t ids[CONTEXT];
    (void)state;
    ids_of(ids, 1);
    real = *engine->be;
    engine->be->caps &= ~(unsigned)NBI_CAP_BATCH_INVARIANT;
    engine->be->batch_invariant_rows = 6;
    engine->be->rope_table = count_pass;
    o.deterministic = true;
    o.chunk = 10;
    struct nb_batch *b = open_batch(&o);
    EXPECT((1, 1, 1, 1, 1, 1), (6));
    EXPECT((1, 6, 1), (1, 6, 1));
    EXPECT((1, 25, 5, 7), (10, 10, 5, 7, 6));
    /* They end at multiples of 10 from the start of the sequence. */
    int64_t sequence = added(b);
    struct nb_batch_input input = {.sequence = sequence, .ids = ids, .count = 7};
    run_step(b, &input, 1);
    input.count = 24;
    pass_count = 0;
    run_step(b, &input, 1);
    assert_int_equal(pass_count, 4);
    assert_memory_equal(passes, ((const int64_t[]){3, 10, 10, 1}), 4 * sizeof *passes);
    assert_ok(nb_batch_drop(b, sequence));
    engine->be->attention = expect_batch_invariant;
    EXPECT((1, 8, 12), (8, 10, 2, 1));
    nb_batch_close(b);
    /* With a matrix of floats no pass is shared. */
    engine->weights.layers[2].up.dtype = NBI_BF16;
    b = open_batch(&o);
    engine->weights.layers[2].up.dtype = NBI_NVFP4;
    EXPECT((1, 1, 3, 1), (3, 1, 1, 1));
    nb_batch_close(b);
    *engine->be = real;
}

static void test_step__is_one_pass_unless_deterministic(void **state)
{
    (void)state;
    real = *engine->be;
    engine->be->rope_table = count_pass;
    struct nb_batch *b = open_batch(&usual);
    EXPECT((1, 70, 1, 9, 1, 46), (128));
    /* On a GPU only one input of more than eight tokens shares the pass of the short ones. */
    engine->be->caps &= ~(unsigned)NBI_CAP_BATCH_INVARIANT;
    EXPECT((1, 70, 1, 9, 8, 39), (80, 9, 39));
    nb_batch_close(b);
    *engine->be = real;
}

static enum nb_status fail_later(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    return calls_left-- == 0 ? nbi_fail(NB_EDEVICE, "the device is gone") : real.linear(s, a);
}

/* Sequences keep their length and their pages, whichever operation fails. */
static void test_step__that_fails_changes_nothing(void **state)
{
    static float wanted[VOCAB], got[VOCAB];
    struct nb_cancel stop = {0};
    struct nb_batch_opts stoppable = usual;
    stoppable.cancel = &stop;
    struct nb_batch *b = open_batch(&stoppable), *fresh = open_batch(&usual);
    int32_t ids[CONTEXT];
    (void)state;
    ids_of(ids, 2);
    struct nb_batch_input inputs[] = {{.sequence = added(b), .ids = ids, .count = 60},
                                      {.sequence = added(b), .ids = ids, .count = 10}};
    added(fresh);
    run_step(b, inputs, 2);
    int64_t pages = free_pages(b);
    inputs[0] = (struct nb_batch_input){0, ids + 60, 8, .logits = got};
    inputs[1] = (struct nb_batch_input){1, ids + 10, 100, .logits = NULL};
    real = *engine->be;
    for (int call = 0; call < 17; call += 4) {
        engine->be->linear = fail_later;
        calls_left = call;
        enum nb_status rc = nb_batch_step(b, inputs, 2);
        *engine->be = real;
        assert_fails(rc, NB_EDEVICE, "the device is gone");
        for (int i = 0; i < 2; i++)
            assert_int_equal(inputs[i].status, NB_EDEVICE);
        assert_int_equal(free_pages(b), pages);
        assert_int_equal(nb_batch_length(b, 0), 60);
        assert_int_equal(nb_batch_length(b, 1), 10);
    }
    /* A refused input keeps its own status. */
    struct nb_batch_input mixed[] = {inputs[0], {.sequence = 7, .ids = ids, .count = 1}, inputs[1]};
    nb_cancel_set(&stop);
    enum nb_status rc = nb_batch_step(b, mixed, 3);
    nb_cancel_clear(&stop);
    assert_int_equal(rc, NB_EINTERRUPTED);
    assert_int_equal(mixed[0].status, NB_EINTERRUPTED);
    assert_int_equal(mixed[1].status, NB_EINVAL);
    assert_int_equal(mixed[2].status, NB_EINTERRUPTED);
    assert_int_equal(free_pages(b), pages);
    run_step(b, inputs, 2);
    struct nb_batch_input all_tokens = {.sequence = 0, .ids = ids, .count = 68, .logits = wanted};
    run_step(fresh, &all_tokens, 1);
    assert_memory_equal(got, wanted, ROW);
    nb_batch_close(b);
    nb_batch_close(fresh);
}

/* ---- pages ---- */

/* Two sequences share a pool of three pages. */
static void test_pages__are_reused_after_the_pool_was_empty(void **state)
{
    static float wanted[VOCAB], got[VOCAB];
    struct nb_batch_opts o = usual;
    int32_t ids[CONTEXT];
    (void)state;
    ids_of(ids, 3);
    o.tokens = 130; /* rounded up to pages */
    struct nb_batch *b = open_batch(&o);
    struct nb_batch_info info;
    nb_batch_info(b, &info);
    assert_int_equal(info.page_tokens, NBI_PAGE);
    assert_int_equal(info.pages, 3);
    assert_int_equal(info.open, 0);
    int64_t x = added(b), y = added(b);
    struct nb_batch_input inputs[] = {{.sequence = x, .ids = ids, .count = 64},
                                      {.sequence = y, .ids = ids, .count = 64}};
    run_step(b, inputs, 2);
    assert_int_equal(free_pages(b), 1);
    inputs[0].count = inputs[1].count = 1; /* each needs a page, and the first one gets it */
    assert_ok(nb_batch_step(b, inputs, 2));
    assert_int_equal(inputs[0].status, NB_OK);
    assert_fails(inputs[1].status, NB_ENOMEM, "sequence 1 needs 1 more pages of 64 tokens");
    assert_int_equal(free_pages(b), 0);
    assert_int_equal(nb_batch_length(b, x), 65);
    assert_int_equal(nb_batch_length(b, y), 64);
    assert_ok(nb_batch_step(b, inputs + 1, 1));
    assert_fails(inputs[1].status, NB_ENOMEM, "of 3 there are 0 left");
    inputs[0].ids = ids + 65;
    inputs[0].count = 63; /* fits its page */
    run_step(b, inputs, 1);
    assert_ok(nb_batch_drop(b, x));
    assert_int_equal(free_pages(b), 2);
    assert_int_equal(nb_batch_length(b, x), -1);
    /* Neither old contents of the pages nor their order matter. */
    inputs[1] = (struct nb_batch_input){y, ids + 64, 128, .logits = got};
    run_step(b, inputs + 1, 1);
    assert_int_equal(free_pages(b), 0);
    struct nb_session *s;
    assert_ok(nb_session_open(&s, engine, &(struct nb_session_opts){.context = 192, .kv = o.kv}));
    assert_ok(nb_session_append(s, ids, 192, wanted));
    assert_memory_equal(got, wanted, ROW);
    nb_session_close(s);
    nb_batch_close(b);
}

static void test_truncate__returns_pages(void **state)
{
    static float wanted[VOCAB], got[VOCAB];
    struct nb_batch *b = open_batch(&usual);
    int32_t ids[CONTEXT];
    int64_t all = free_pages(b), x = added(b);
    struct nb_batch_input input = {x, ids, 128, .logits = wanted};
    (void)state;
    ids_of(ids, 4);
    run_step(b, &input, 1);
    assert_int_equal(free_pages(b), all - 2);
    assert_ok(nb_batch_truncate(b, x, 65));
    assert_int_equal(free_pages(b), all - 2);
    assert_ok(nb_batch_truncate(b, x, 64));
    assert_int_equal(free_pages(b), all - 1);
    assert_int_equal(nb_batch_length(b, x), 64);
    input = (struct nb_batch_input){x, ids + 64, 64, .logits = got};
    run_step(b, &input, 1);
    assert_memory_equal(got, wanted, ROW);
    assert_fails(nb_batch_truncate(b, x, 129), NB_EINVAL, "129 tokens of sequence 0");
    assert_fails(nb_batch_truncate(b, x, -1), NB_EINVAL, "-1 tokens");
    assert_fails(nb_batch_truncate(b, 1, 0), NB_EINVAL, "no sequence 1");
    assert_ok(nb_batch_truncate(b, x, 0));
    assert_int_equal(free_pages(b), all);
    nb_batch_close(b);
}

/* ---- bad arguments ---- */

static void test_open__refuses_bad_options(void **state)
{
    static const struct {
        struct nb_batch_opts o;
        enum nb_status status;
        const char *words;
    } cases[] = {
        {{.sequences = 0}, NB_EINVAL, "0 sequences"},
        {{.sequences = -1}, NB_EINVAL, "-1 sequences"},
        {{.sequences = INT64_MAX}, NB_EINVAL, "sequences"},
        {{.sequences = 1, .context = -1}, NB_EINVAL, "context of -1"},
        {{.sequences = 1, .context = INT64_MAX}, NB_EVALUE, "the model was made for"},
        {{.sequences = 1, .tokens = -5}, NB_EINVAL, "-5 in all"},
        {{.sequences = 1, .tokens = INT64_MAX}, NB_EVALUE, "tokens in all"},
        {{.sequences = 65535, .context = 40960}, NB_EVALUE, "tokens in all"},
        {{.sequences = 65536, .context = 16}, NB_EINVAL, "65536 sequences"},
        {{.sequences = 1, .chunk = -1}, NB_EINVAL, "-1 a step"},
        {{.sequences = 4, .chunk = 3}, NB_EINVAL, "no room for 4 sequences"},
        {{.sequences = 1, .kv = (enum nb_kv_dtype)9}, NB_EINVAL, "kind of cache"},
    };
    (void)state;
    for (int64_t i = 0; i < COUNT(cases); i++) {
        struct nb_batch *b = (void *)1;
        struct nbi_memory_plan plan;
        assert_fails(nb_batch_open(&b, engine, &cases[i].o), cases[i].status, cases[i].words);
        assert_null(b);
        assert_int_equal(nbi_batch_plan(engine, &cases[i].o, &plan), cases[i].status);
    }
    nb_batch_close(NULL);
}

static void test_sequences__lowest_free_number_is_taken(void **state)
{
    struct nb_batch *b = open_batch(&usual);
    int64_t sequence = 99;
    (void)state;
    for (int i = 0; i < SEQUENCES; i++)
        assert_int_equal(added(b), i);
    assert_fails(nb_batch_add(b, &sequence), NB_EVALUE, "all 6 sequences are in use");
    assert_int_equal(sequence, 99);
    assert_ok(nb_batch_drop(b, 3));
    assert_fails(nb_batch_drop(b, 3), NB_EINVAL, "no sequence 3");
    assert_fails(nb_batch_drop(b, -1), NB_EINVAL, "no sequence -1");
    assert_fails(nb_batch_drop(b, SEQUENCES), NB_EINVAL, "no sequence 6");
    assert_int_equal(nb_batch_length(b, 3), -1);
    assert_int_equal(nb_batch_length(b, -1), -1);
    assert_int_equal(nb_batch_length(b, INT64_MAX), -1);
    assert_int_equal(added(b), 3);
    assert_int_equal(nb_batch_length(b, 3), 0);
    nb_batch_close(b);
}

/* ---- memory ---- */

static int64_t cache_bytes, other_bytes;

static enum nb_status spy(struct nbi_backend *be, const char *what, int64_t bytes,
                          struct nbi_ptr *out)
{
    *(strcmp(what, "key/value cache") == 0 ? &cache_bytes : &other_bytes) += bytes;
    return real.alloc(be, what, bytes, out);
}

/* The model "tiny" has 4 layers and 2 key heads of 64. */
static void test_plan__equals_what_is_allocated(void **state)
{
    static const struct {
        struct nb_batch_opts o;
        int64_t kv;
    } cases[] = {{{.sequences = 1, .context = 64, .kv = NB_KV_F32}, 2 * 4 * 64 * 128 * 4},
                 {{.sequences = 7, .context = 65, .kv = NB_KV_F16}, 2 * 4 * 7 * 128 * 128 * 2},
                 {{.sequences = 7, .tokens = 100, .kv = NB_KV_BF16}, 2 * 4 * 128 * 128 * 2},
                 {{.sequences = 3, .kv = NB_KV_F8}, 2 * 4 * 3 * 4096 * 128}};
    (void)state;
    real = *engine->be;
    for (int64_t i = 0; i < COUNT(cases); i++) {
        struct nbi_memory_plan plan;
        struct nb_batch *b = NULL;
        assert_ok(nbi_batch_plan(engine, &cases[i].o, &plan));
        cache_bytes = other_bytes = 0;
        engine->be->alloc = spy;
        enum nb_status rc = nb_batch_open(&b, engine, &cases[i].o);
        *engine->be = real;
        assert_ok(rc);
        nb_batch_close(b);
        assert_int_equal(plan.kv, cases[i].kv);
        assert_int_equal(cache_bytes, plan.kv);
        assert_int_equal(other_bytes, plan.activations);
        assert_true(plan.host > 0 && plan.scratch > 0);
    }
}

static void test_steps__allocate_nothing(void **state)
{
    struct nb_candidate candidates[SEQUENCES];
    struct nb_batch_input inputs[SEQUENCES];
    int32_t ids[CONTEXT];
    enum nb_status rc = NB_OK;
    (void)state;
    if (SANITIZED)
        skip("sanitizers allocate memory of their own");
    ids_of(ids, 5);
    struct nb_batch *b = open_batch(&usual);
    for (int i = 0; i < SEQUENCES; i++)
        inputs[i] = (struct nb_batch_input){
            .sequence = added(b), .ids = ids, .count = 10, .candidates = &candidates[i], .topk = 1};
    run_step(b, inputs, SEQUENCES); /* threads may start here */
    long before = allocations;
    assert_true(before > 0); /* counting works */
    for (int step = 0; step < 100 && rc == NB_OK; step++) {
        for (int i = 0; i < SEQUENCES; i++)
            inputs[i].count = 1 + (step + i) % 3;
        if (step % 20 == 0)
            rc = nb_batch_truncate(b, 0, 3);
        if (rc == NB_OK)
            rc = nb_batch_step(b, inputs, SEQUENCES);
    }
    long made = allocations - before;
    assert_ok(rc);
    assert_int_equal(made, 0);
    nb_batch_close(b);
}

/* ---- on a GPU ---- */

#define GPU_SEQUENCES 8
#define GPU_CONTEXT   800
#define GPU_CHUNK     (EMULATED ? 80 : 256)
#define GPU_STEPS     (EMULATED ? 3 : 12)

static struct nb_engine *open_gpu(void)
{
    struct nb_engine *gpu;
    need_gpu();
    assert_ok(
        nb_engine_open(&gpu, &(struct nb_engine_opts){.synthetic = "tiny", .device = "cuda"}));
    return gpu;
}

/* Lengths of prompts: one token, a few, more than share a deterministic pass, several chunks. */
#if EMULATED
static const int64_t prompts[GPU_SEQUENCES] = {1, 5, 64, 65, 2, 9, 20, 100};
#else
static const int64_t prompts[GPU_SEQUENCES] = {1, 5, 64, 65, 200, 256, 300, 700};
#endif

static int32_t *gpu_ids(int64_t sequence)
{
    static int32_t ids[GPU_SEQUENCES][GPU_CONTEXT];
    for (int64_t i = 0; i < GPU_CONTEXT; i++)
        ids[sequence][i] =
            (int32_t)(nbi_philox(13, (uint64_t)(sequence * GPU_CONTEXT + i), 0).v[0] % VOCAB);
    return ids[sequence];
}

/* Feeds prompts in inputs that end at multiples of the chunk, as many in a step as fit, then tokens
 * one by one. Returns the logits after the last. */
static void run_gpu(const struct nb_engine *gpu, const struct nb_batch_opts *o, const int *which,
                    int count, float (*logits)[VOCAB])
{
    struct nb_batch_input inputs[GPU_SEQUENCES];
    int64_t at[GPU_SEQUENCES] = {0}, sequence[GPU_SEQUENCES];
    struct nb_batch *b;
    assert_ok(nb_batch_open(&b, gpu, o));
    for (int i = 0; i < count; i++)
        assert_ok(nb_batch_add(b, &sequence[i]));
    for (bool more = true; more;) {
        int64_t budget = GPU_CHUNK, n = 0;
        for (int i = 0; i < count; i++) {
            int64_t total = prompts[which[i]], left = total - at[i];
            int64_t take = left < GPU_CHUNK ? left : GPU_CHUNK;
            if (left == 0 || take > budget)
                continue;
            inputs[n++] = (struct nb_batch_input){
                .sequence = sequence[i], .ids = gpu_ids(which[i]) + at[i], .count = take};
            at[i] += take;
            budget -= take;
        }
        more = n > 0;
        if (more)
            run_step(b, inputs, n);
    }
    for (int step = 0; step < GPU_STEPS; step++) {
        for (int i = 0; i < count; i++)
            inputs[i] = (struct nb_batch_input){.sequence = sequence[i],
                                                .ids = gpu_ids(which[i]) + at[i]++,
                                                .count = 1,
                                                .logits = logits[which[i]]};
        run_step(b, inputs, count);
    }
    nb_batch_close(b);
}

/* The error as test_backend.c measures it: for exact results relative to the norm, otherwise the
 * largest difference relative to the largest value. */
static double off_by(const float *is, const float *want, bool exact)
{
    double off = 0, all = 0, off2 = 0, all2 = 0;
    for (int i = 0; i < VOCAB; i++) {
        double d = fabs((double)is[i] - (double)want[i]), w = fabs((double)want[i]);
        off = isnan(d) || d > off ? d : off;
        all = w > all ? w : all;
        off2 += d * d;
        all2 += w * w;
    }
    return exact ? sqrt(off2 / all2) : off / all;
}

/* The bound for prompts on FP4 tensor cores. Computed on the CPU, two NVFP4 terms have errors of up
 * to 1.9 % here, bf16 0.7 %, and a single NVFP4 term 17 % and more. */
#define FP4_BOUND 5e-2

/* The bounds are those of test_backend.c. */
static void test_gpu__logits_are_close_to_those_of_sessions(void **state)
{
    static const struct {
        bool exact;
        enum nb_kv_dtype kv;
        double bound;
    } cases[] = {{true, NB_KV_F32, 2e-5},  {true, NB_KV_F16, 2e-3},   {false, NB_KV_F32, 2e-2},
                 {false, NB_KV_F16, 2e-2}, {false, NB_KV_BF16, 3e-2}, {false, NB_KV_F8, 2e-1}};
    static const int all[GPU_SEQUENCES] = {3, 0, 7, 1, 5, 2, 4, 6};
    static float got[GPU_SEQUENCES][VOCAB], wanted[VOCAB];
    struct nb_engine *gpu = open_gpu();
    (void)state;
    for (int64_t c = 0; c < COUNT(cases); c += EMULATED ? 3 : 1)
        for (int deterministic = EMULATED && c > 0; deterministic < 2; deterministic++) {
            const struct nb_batch_opts o = {.sequences = GPU_SEQUENCES,
                                            .context = GPU_CONTEXT,
                                            .chunk = GPU_CHUNK,
                                            .kv = cases[c].kv,
                                            .exact = cases[c].exact,
                                            .deterministic = deterministic};
            run_gpu(gpu, &o, all, GPU_SEQUENCES, got);
            for (int i = 0; i < GPU_SEQUENCES; i += EMULATED ? 3 : 1) {
                const struct nb_session_opts opts = {
                    .context = GPU_CONTEXT, .kv = cases[c].kv, .exact = true};
                struct nb_session *s;
                assert_ok(nb_session_open(&s, gpu, &opts));
                assert_ok(nb_session_append(s, gpu_ids(i), prompts[i] + GPU_STEPS, wanted));
                nb_session_close(s);
                double off = off_by(got[i], wanted, cases[c].exact);
                bool fp4 = nbi_backend_has(gpu->be, NBI_CAP_FP4) && !cases[c].exact;
                double bound = fp4 ? fmax(FP4_BOUND, cases[c].bound) : cases[c].bound;
                if (!(off <= bound))
                    fail_msg("case %d, sequence %d: off by %.3g", (int)c, i, off);
            }
        }
    nb_engine_close(gpu);
}

/* ---- up to 64 sequences ---- */

#define MAX_SEQUENCES 64
#define MAX_CONTEXT   128
#define MAX_STEPS     (EMULATED ? 2 : 4)

/* Their lengths lie on both sides of a page boundary; each is compared with a session. */
static void check_sequences(const struct nb_engine *e, int count, enum nb_kv_dtype kv,
                            bool deterministic, double bound)
{
    static float got[MAX_SEQUENCES][VOCAB], want[VOCAB];
    const struct nb_batch_opts o = {.sequences = count,
                                    .context = MAX_CONTEXT,
                                    .chunk = 256,
                                    .kv = kv,
                                    .deterministic = deterministic};
    const struct nb_session_opts session_opts = {.context = MAX_CONTEXT, .kv = kv, .exact = true};
    struct nb_batch_input inputs[MAX_SEQUENCES];
    int64_t at[MAX_SEQUENCES];
    struct nb_batch *b;
    assert_ok(nb_batch_open(&b, e, &o));
    for (int i = 0; i < count; i++) {
        at[i] = 1 + i * 11 % (EMULATED && i % 8 > 0 ? 10 : 90);
        inputs[i] = (struct nb_batch_input){.ids = gpu_ids(i % GPU_SEQUENCES) + i, .count = at[i]};
        assert_ok(nb_batch_add(b, &inputs[i].sequence));
        run_step(b, &inputs[i], 1);
    }
    for (int step = 0; step < MAX_STEPS; step++) {
        for (int i = 0; i < count; i++) {
            inputs[i].ids = gpu_ids(i % GPU_SEQUENCES) + i + at[i]++;
            inputs[i].count = 1;
            inputs[i].logits = got[i];
        }
        run_step(b, inputs, count);
    }
    nb_batch_close(b);
    for (int i = 0; i < count; i += EMULATED ? 6 : 1) {
        struct nb_session *s;
        assert_ok(nb_session_open(&s, e, &session_opts));
        assert_ok(nb_session_append(s, gpu_ids(i % GPU_SEQUENCES) + i, at[i], want));
        nb_session_close(s);
        double off = off_by(got[i], want, false);
        if (!(off <= bound))
            fail_msg("%d sequences, cache %d: number %d is off by %.3g", count, kv, i, off);
    }
}

static void test_batch__of_64_sequences(void **state)
{
    (void)state;
    check_sequences(engine, 20, NB_KV_F16, false, 2e-2);
}

/* A test of its own, small enough for compute-sanitizer (tests/gpu/run.sh). */
static void test_gpu__twenty_sequences(void **state)
{
    struct nb_engine *gpu = open_gpu();
    (void)state;
    check_sequences(gpu, 20, NB_KV_F16, false, 2e-2);
    nb_engine_close(gpu);
}

static void test_gpu__up_to_64_sequences(void **state)
{
    static const int counts[] = {9, 17, 33, MAX_SEQUENCES};
    struct nb_engine *gpu = open_gpu();
    (void)state;
    for (int64_t i = EMULATED ? 2 : 0; i < COUNT(counts); i += EMULATED ? 2 : 1)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            if (!EMULATED || deterministic)
                check_sequences(gpu, counts[i], NB_KV_F16, deterministic, 2e-2);
            if (!EMULATED || !deterministic)
                check_sequences(gpu, counts[i], NB_KV_F8, deterministic, 2e-1);
        }
    nb_engine_close(gpu);
}

static void test_gpu__deterministic_logits_do_not_depend_on_other_sequences(void **state)
{
    static const int all[2][GPU_SEQUENCES] = {{0, 1, 2, 3, 4, 5, 6, 7}, {6, 2, 7, 0, 3, 5, 1, 4}};
    static float single[GPU_SEQUENCES][VOCAB], batched[GPU_SEQUENCES][VOCAB];
    struct nb_engine *gpu = open_gpu();
    (void)state;
    for (int kv = NB_KV_F32; kv <= NB_KV_F8; kv++)
        for (int exact = 0; exact < 2; exact++) {
            if (EMULATED && kv != (exact ? NB_KV_F16 : NB_KV_F8))
                continue;
            const struct nb_batch_opts o = {.sequences = GPU_SEQUENCES,
                                            .context = GPU_CONTEXT,
                                            .chunk = GPU_CHUNK,
                                            .kv = (enum nb_kv_dtype)kv,
                                            .exact = exact,
                                            .deterministic = true};
            for (int i = 0; i < GPU_SEQUENCES; i++)
                run_gpu(gpu, &o, &i, 1, single);
            for (int order = EMULATED; order < 2; order++) {
                run_gpu(gpu, &o, all[order], GPU_SEQUENCES, batched);
                for (int i = 0; i < GPU_SEQUENCES; i++)
                    if (memcmp(batched[i], single[i], ROW) != 0)
                        fail_msg("cache %d, exact %d: sequence %d differs", kv, exact, i);
            }
        }
    nb_engine_close(gpu);
}

#define GRAPH_STEPS (EMULATED ? 12 : 40)

/* Steps of all sequences, then of some of them, in turn. Lengths pass 128 and 256, where the graph
 * key changes. Returns the logits of every step. */
static void run_graph_steps(const struct nb_engine *gpu, const struct nb_batch_opts *o,
                            float (*logits)[4][VOCAB])
{
    const int64_t starts[4] = {EMULATED ? 126 : 120, 3, 64, EMULATED ? 254 : 250};
    struct nb_batch_input inputs[4];
    int64_t at[4] = {0};
    struct nb_batch *b;
    assert_ok(nb_batch_open(&b, gpu, o));
    memset(logits, 0, GRAPH_STEPS * sizeof *logits);
    for (int i = 0; i < 4; i++) {
        int64_t sequence;
        assert_ok(nb_batch_add(b, &sequence));
        inputs[0] = (struct nb_batch_input){
            .sequence = sequence, .ids = gpu_ids(i), .count = at[i] = starts[i]};
        run_step(b, inputs, 1);
    }
    for (int step = 0; step < GRAPH_STEPS; step++) {
        int count = 0; /* the longest takes part only in every fourth step */
        for (int i = 0; i < 4 - (step % 4 != 0) - step % 2; i++)
            inputs[count++] = (struct nb_batch_input){
                .sequence = i, .ids = gpu_ids(i) + at[i]++, .count = 1, .logits = logits[step][i]};
        run_step(b, inputs, count);
    }
    nb_batch_close(b);
}

/* A replayed CUDA graph must give the bits of the operations themselves. */
static void test_gpu__graphs_give_the_bits_of_the_operations(void **state)
{
    static float again[GRAPH_STEPS][4][VOCAB], direct[GRAPH_STEPS][4][VOCAB];
    struct nb_engine *gpu = open_gpu();
    (void)state;
    for (int c = 0; c < 16; c += EMULATED ? 9 : 1) {
        const struct nb_batch_opts o = {.sequences = 4,
                                        .context = GPU_CONTEXT,
                                        .chunk = 256,
                                        .kv = (enum nb_kv_dtype)(c % 4),
                                        .exact = c / 4 % 2,
                                        .deterministic = c / 8};
        real = *gpu->be;
        gpu->be->rope_table = count_pass;
        pass_count = 0;
        run_graph_steps(gpu, &o, again);
        assert_true(pass_count < 24); /* prompts, and two passes for each key */
        pass_count = 0;
        gpu->be->rope_table = real.rope_table;
        gpu->be->caps &= ~(unsigned)NBI_CAP_GRAPHS;
        run_graph_steps(gpu, &o, direct);
        *gpu->be = real;
        for (int step = 0; step < GRAPH_STEPS; step++)
            if (memcmp(again[step], direct[step], sizeof *again) != 0)
                fail_msg("case %d: step %d differs", c, step);
    }
    nb_engine_close(gpu);
}

static enum nb_status fail_layers(struct nbi_stream *s, const struct nbi_op_layers *a)
{
    NBI_TRY(real.layers(s, a));
    return nbi_fail(NB_EDEVICE, "the device is gone");
}

/* An error while a graph is captured fails that step only; the next one succeeds. */
static void test_gpu__failed_capture_fails_one_step(void **state)
{
    static float logits[6][VOCAB];
    struct nb_engine *gpu = open_gpu();
    const struct nb_batch_opts o = {.sequences = 1, .context = GPU_CONTEXT, .kv = NB_KV_F16};
    struct nb_batch *b;
    int64_t sequence;
    (void)state;
    assert_ok(nb_batch_open(&b, gpu, &o));
    assert_ok(nb_batch_add(b, &sequence));
    real = *gpu->be;
    for (int step = 0; step < 6; step++) {
        struct nb_batch_input input = {
            .sequence = sequence, .ids = gpu_ids(0), .count = 1, .logits = logits[step]};
        gpu->be->layers = step == 1 ? fail_layers : real.layers;
        enum nb_status rc = nb_batch_step(b, &input, 1);
        if (step == 1)
            assert_fails(rc, NB_EDEVICE, "the device is gone");
        else
            assert_ok(rc);
        assert_ok(nb_batch_truncate(b, sequence, 0));
        if (step != 1)
            assert_memory_equal(logits[step], logits[0], ROW);
    }
    *gpu->be = real;
    nb_batch_close(b);
    nb_engine_close(gpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batch__logits_equal_those_of_sessions),
        cmocka_unit_test(test_batch__logits_equal_on_every_instruction_set_and_two_threads),
        cmocka_unit_test(test_batch__logits_equal_in_several_passes),
        cmocka_unit_test(test_candidates__are_the_largest_logits),
        cmocka_unit_test(test_deterministic__long_inputs_have_passes_of_their_own),
        cmocka_unit_test(test_step__is_one_pass_unless_deterministic),
        cmocka_unit_test(test_step__that_fails_changes_nothing),
        cmocka_unit_test(test_pages__are_reused_after_the_pool_was_empty),
        cmocka_unit_test(test_truncate__returns_pages),
        cmocka_unit_test(test_open__refuses_bad_options),
        cmocka_unit_test(test_sequences__lowest_free_number_is_taken),
        cmocka_unit_test(test_plan__equals_what_is_allocated),
        cmocka_unit_test(test_steps__allocate_nothing),
        cmocka_unit_test(test_batch__of_64_sequences),
        cmocka_unit_test(test_gpu__logits_are_close_to_those_of_sessions),
        cmocka_unit_test(test_gpu__twenty_sequences),
        cmocka_unit_test(test_gpu__up_to_64_sequences),
        cmocka_unit_test(test_gpu__deterministic_logits_do_not_depend_on_other_sequences),
        cmocka_unit_test(test_gpu__graphs_give_the_bits_of_the_operations),
        cmocka_unit_test(test_gpu__failed_capture_fails_one_step),
    };
    return cmocka_run_group_tests(tests, open_engine, close_engine);
}
