/* test_long.c - a context of 65,536 tokens (4,096 with sanitizers): the same bits however the input
 * is split, no more memory than planned, and an error at the end of the context. */
#include <dlfcn.h>

#include "infer/session.h"
#include "unit/support.h"

#if SANITIZED
#define TOKENS 4096
#else
#define TOKENS 65536
#endif

#define VOCAB 64
#define ROW   (VOCAB * sizeof(float))

#define TEXT(x)  TEXT_(x)
#define TEXT_(x) #x

/* ---- counting what malloc gives ---- */

static bool counting;
static int64_t counted;

#if !SANITIZED
static void find_real(void *slot, const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);
    memcpy(slot, &p, sizeof p); /* ISO C cannot cast this pointer to a function */
}

void *malloc(size_t size)
{
    static void *(*real)(size_t);
    if (!real)
        find_real((void *)&real, "malloc");
    counted += counting ? (int64_t)size : 0;
    return real(size);
}

void *calloc(size_t count, size_t size)
{
    static void *(*real)(size_t, size_t);
    if (!real)
        find_real((void *)&real, "calloc");
    counted += counting ? (int64_t)(count * size) : 0;
    return real(count, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    static void *(*real)(size_t, size_t);
    if (!real)
        find_real((void *)&real, "aligned_alloc");
    counted += counting ? (int64_t)size : 0;
    return real(alignment, size);
}
#endif

/* ---- the model: one layer, one small head, which AVX2 does fastest ---- */

static struct nb_engine *engine;
static int32_t *ids;

static int open_engine(void **state)
{
    static const char config[] =
        "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"head_dim\": 32,"
        "\"hidden_act\": \"silu\", \"hidden_size\": 16, \"intermediate_size\": 16,"
        "\"max_position_embeddings\": " TEXT(
            TOKENS) ", \"num_attention_heads\": 1,"
                    "\"num_hidden_layers\": 1, \"num_key_value_heads\": 1, \"rms_norm_eps\": 1e-6,"
                    "\"rope_theta\": 1000000.0, \"tie_word_embeddings\": true, \"torch_dtype\": "
                    "\"bfloat16\","
                    "\"eos_token_id\": 1, \"vocab_size\": " TEXT(VOCAB) "}";
    if (make_test_dir(state) != 0)
        return -1;
    put("config.json", config);
    const struct nb_synth_opts synth = {
        .config = test_path("config.json"), .dst = test_path("model"), .sigma = 0.3F, .threads = 1};
    const struct nb_engine_opts opts = {.model = test_path("model"),
                                        .threads = 1,
                                        .simd = nbi_simd_level() > NBI_SIMD_AVX2 ? "avx2" : NULL};
    ids = malloc(TOKENS * sizeof *ids);
    if (!ids || nb_synth(&synth) != NB_OK || nb_engine_open(&engine, &opts) != NB_OK)
        return -1;
    uint32_t x = 1;
    for (int i = 0; i < TOKENS; i++) {
        x = x * 1664525 + 1013904223;
        ids[i] = (int32_t)(x >> 26);
    }
    return 0;
}

static int close_engine(void **state)
{
    nb_engine_close(engine);
    free(ids);
    return remove_test_dir(state);
}

static struct nb_session *open_session(const struct nbi_session_opts *opts)
{
    struct nb_session *s;
    assert_ok(nbi_session_new(&s, engine, opts));
    return s;
}

/* ---- tests ---- */

static const struct nbi_session_opts whole = {.context = TOKENS, .kv = NBI_F32, .exact = true};

/* Resident memory once all tokens are in: the cache, and no more than planned, huge pages aside. */
static void expect_resident(int64_t grown)
{
    struct nbi_memory_plan plan;
    nbi_session_plan(engine, &whole, &plan);
    assert_int_equal(plan.kv, (int64_t)2 * TOKENS * 32 * 4);
    int64_t all = plan.kv + plan.activations + plan.scratch + plan.host;
    if (!SANITIZED && (grown < plan.kv || grown > all + (2 << 20)))
        fail_msg("%lld bytes became resident, %lld were planned", (long long)grown, (long long)all);
}

static void test_long__bits_do_not_depend_on_chunks_and_the_context_ends(void **state)
{
    static float chunks[VOCAB], single[VOCAB], other[VOCAB], again[VOCAB];
    int64_t before = (int64_t)nbi_current_rss();
    struct nb_session *a = open_session(&whole);
    (void)state;
    assert_ok(nbi_session_append(a, ids, TOKENS, chunks, 1));
    expect_resident((int64_t)nbi_current_rss() - before);
    struct nb_session *b = open_session(&whole);
    for (int i = 0; i < TOKENS; i++)
        assert_ok(nbi_session_append(b, ids + i, 1, i + 1 < TOKENS ? NULL : single, 1));
    assert_memory_equal(chunks, single, ROW);
    nb_session_close(b);
    nb_session_truncate(a, TOKENS - 1);
    int32_t last = ids[TOKENS - 1] ^ 1;
    assert_ok(nbi_session_append(a, &last, 1, other, 1));
    assert_memory_not_equal(chunks, other, ROW);
    nb_session_truncate(a, TOKENS - 1);
    assert_ok(nbi_session_append(a, ids + TOKENS - 1, 1, again, 1));
    assert_memory_equal(chunks, again, ROW);
    /* One token too many is refused and changes nothing. */
    assert_fails(nbi_session_append(a, ids, 1, other, 1), NB_EVALUE,
                 "1 tokens after " TEXT(TOKENS) " do not fit the context of " TEXT(TOKENS));
    assert_int_equal(nbi_session_length(a), TOKENS);
    assert_memory_equal(nb_session_tokens(a, NULL), ids, TOKENS * sizeof *ids);
    nb_session_truncate(a, TOKENS - 1);
    assert_fails(nbi_session_append(a, ids, 2, other, 1), NB_EVALUE, "2 tokens after");
    assert_int_equal(nbi_session_length(a), TOKENS - 1);
    assert_ok(nbi_session_append(a, ids + TOKENS - 1, 1, again, 1));
    assert_memory_equal(chunks, again, ROW);
    nb_session_close(a);
}

static void test_long__a_context_beyond_the_model_is_refused(void **state)
{
    struct nbi_session_opts o = whole;
    struct nb_session *s;
    (void)state;
    o.context = TOKENS + 1;
    assert_fails(nbi_session_new(&s, engine, &o), NB_EVALUE,
                 "the model was made for " TEXT(TOKENS));
    assert_null(s);
}

static struct nbi_backend real;
static int64_t device_bytes;

static enum nb_status counting_alloc(struct nbi_backend *be, const char *what, int64_t bytes,
                                     struct nbi_ptr *out)
{
    device_bytes += bytes;
    return real.alloc(be, what, bytes, out);
}

/* Every byte that a session allocates is in its plan. */
static void test_long__memory_is_planned(void **state)
{
    (void)state;
    if (SANITIZED)
        skip("sanitizers allocate memory of their own");
    real = *engine->be;
    engine->be->alloc = counting_alloc;
    for (int mode = NB_KV_PROMPT; mode <= NB_KV_NONE; mode++)
        for (int64_t context = 1; context <= TOKENS; context *= 16) {
            struct nbi_session_opts o = {
                .context = context, .mode = (enum nb_kv_mode)mode, .kv = NBI_BF16, .logits = 3};
            struct nbi_memory_plan plan;
            struct nb_session *s = NULL;
            nbi_session_plan(engine, &o, &plan);
            counted = device_bytes = 0;
            counting = true;
            enum nb_status rc = nbi_session_new(&s, engine, &o);
            counting = false;
            nb_session_close(s);
            if (rc != NB_OK || counted != plan.host + plan.scratch ||
                device_bytes != plan.kv + plan.activations)
                fail_msg("mode %d, context %d: %lld of malloc, %lld planned; %lld of the backend, "
                         "%lld planned",
                         mode, (int)context, (long long)counted,
                         (long long)(plan.host + plan.scratch), (long long)device_bytes,
                         (long long)(plan.kv + plan.activations));
        }
    engine->be->alloc = real.alloc;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long__memory_is_planned),
        cmocka_unit_test(test_long__bits_do_not_depend_on_chunks_and_the_context_ends),
        cmocka_unit_test(test_long__a_context_beyond_the_model_is_refused),
    };
    return cmocka_run_group_tests_name("long", tests, open_engine, close_engine);
}
