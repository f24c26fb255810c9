/* test_generate.c - where answers end and which text is emitted, with a random model. */
#include "base/str.h"
#include "base/utf8.h"
#include "infer/session.h"
#include "unit/support.h"

#define TOKENIZER NB_TEST_SOURCE "/golden/tokenizer/qwen/tokenizer.json"
#define EOS       602

static const char *const config =
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"head_dim\": 16,"
    " \"hidden_act\": \"silu\", \"hidden_size\": 64, \"intermediate_size\": 64,"
    " \"max_position_embeddings\": 512, \"num_attention_heads\": 4, \"num_hidden_layers\": 2,"
    " \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0,"
    " \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", \"eos_token_id\": 602,"
    " \"vocab_size\": 648}";

static struct nb_engine *engine;
static const int32_t prompt[] = {72, 101, 108, 300, 111, 400, 5, 33};

#define PROMPT (sizeof prompt / sizeof *prompt)

static void copy(const char *from, const char *to)
{
    char *bytes;
    size_t len;
    assert_ok(nbi_file_read(from, 1 << 20, &bytes, &len));
    assert_ok(nbi_file_write(to, bytes, len));
    free(bytes);
}

/* A model without a tokenizer, in a folder of the test's directory. */
static const char *make_model(const char *name)
{
    const char *dir = test_path(name);
    put("config.json", config);
    const struct nb_synth_opts opts = {
        .config = test_path("config.json"), .dst = dir, .seed = 3, .sigma = 0.05F, .threads = 1};
    assert_ok(nb_synth(&opts));
    return dir;
}

static int open_engine(void **state)
{
    if (make_test_dir(state))
        return -1;
    const char *dir = make_model("model");
    copy(TOKENIZER, test_path("model/tokenizer.json"));
    put("model/generation_config.json",
        "{\"do_sample\": true, \"temperature\": 0.25, \"top_k\": 7, \"top_p\": 0.5,"
        " \"eos_token_id\": [602, 600]}");
    const struct nb_engine_opts opts = {.model = dir, .threads = 1};
    return nb_engine_open(&engine, &opts) == NB_OK ? 0 : -1;
}

static int close_engine(void **state)
{
    nb_engine_close(engine);
    return remove_test_dir(state);
}

static struct nb_session *open_session(const struct nb_engine *e, int64_t context)
{
    const struct nb_session_opts opts = {.context = context, .kv = NB_KV_F16};
    struct nb_session *s;
    assert_ok(nb_session_open(&s, e, &opts));
    return s;
}

static struct nb_generate_opts sampled(uint64_t seed)
{
    return (struct nb_generate_opts){
        .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = seed},
        .ignore_eos = true};
}

static struct nb_generate_opts greedy(int64_t max_tokens)
{
    struct nb_generate_opts o = sampled(0);
    o.sampling.temperature = 0;
    o.max_tokens = max_tokens;
    return o;
}

/* ---- collecting the text ---- */

struct shown {
    struct nbi_str text;
    int pieces;
    bool broken; /* a piece was empty or not UTF-8 */
    int fail_at; /* the piece to refuse; 0: none */
};

static enum nb_status take(void *ctx, const char *text, size_t len)
{
    struct shown *s = ctx;
    s->broken = s->broken || len == 0 || !nbi_utf8_valid(text, len);
    nbi_str_append(&s->text, text, len);
    return ++s->pieces == s->fail_at ? NB_EIO : NB_OK;
}

/* An answer of a new session. The pieces that were emitted must add up to its text. */
static struct nb_generate_result answer(const struct nb_engine *e, struct nb_generate_opts o,
                                        const int32_t *ids, size_t count)
{
    struct nb_session *s = open_session(e, 256);
    struct shown shown = {0};
    struct nb_generate_result r;
    o.text = take;
    o.ctx = &shown;
    assert_ok(nb_generate(s, ids, count, &o, &r));
    assert_false(shown.broken);
    assert_int_equal(r.len, shown.text.len);
    assert_int_equal(r.text[r.len], 0);
    assert_memory_equal(r.text, nbi_str_text(&shown.text), r.len);
    assert_int_equal(r.prompt_tokens, count);
    nbi_str_release(&shown.text);
    nb_session_close(s);
    return r;
}

/* ---- the text ---- */

/* Random tokens are mostly broken characters. Only complete characters are emitted nevertheless,
 * and together they are what decoding all tokens at once gives, with U+FFFD for malformed bytes. */
static void test_text__is_emitted_in_complete_characters(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct nb_generate_opts o = sampled(seed);
        struct nbi_str wanted = {0};
        char *bytes;
        size_t len;
        o.max_tokens = 60;
        struct nb_generate_result r = answer(engine, o, prompt, PROMPT);
        assert_int_equal(r.count, 60);
        assert_int_equal(r.finish, NB_FINISH_LENGTH);
        assert_ok(
            nb_tokenizer_decode(nb_engine_tokenizer(engine), r.ids, r.count, &bytes, &len, NULL));
        nbi_utf8_repair(&wanted, bytes, len);
        assert_int_equal(r.len, wanted.len);
        assert_memory_equal(r.text, nbi_str_text(&wanted), r.len);
        nbi_str_release(&wanted);
        free(bytes);
        nb_generate_result_release(&r);
    }
}

static void test_seed__determines_the_text(void **state)
{
    struct nb_generate_opts o = sampled(7), other = sampled(8);
    (void)state;
    o.max_tokens = other.max_tokens = 30;
    struct nb_generate_result a = answer(engine, o, prompt, PROMPT),
                              b = answer(engine, o, prompt, PROMPT),
                              c = answer(engine, other, prompt, PROMPT);
    assert_string_equal(a.text, b.text);
    assert_memory_equal(a.ids, b.ids, a.count * sizeof *a.ids);
    assert_memory_not_equal(a.ids, c.ids, a.count * sizeof *a.ids);
    nb_generate_result_release(&a);
    nb_generate_result_release(&b);
    nb_generate_result_release(&c);
}

/* Greedy tokens are the argmax of the logits of a session. */
static void test_greedy__is_the_argmax_of_the_logits(void **state)
{
    static float logits[648];
    struct nb_session *s = open_session(engine, 64);
    struct nb_generate_result r = answer(engine, greedy(20), prompt, PROMPT);
    (void)state;
    assert_ok(nb_session_append(s, prompt, PROMPT, logits));
    for (size_t i = 0; i < r.count; i++) {
        int32_t best = 0;
        for (int32_t v = 1; v < 648; v++)
            best = logits[v] > logits[best] ? v : best;
        assert_int_equal(r.ids[i], best);
        assert_ok(nb_session_append(s, &best, 1, logits));
    }
    nb_generate_result_release(&r);
    nb_session_close(s);
}

/* ---- stop texts ---- */

/* The offset of a text in an answer. */
static size_t find(const struct nb_generate_result *r, const char *text)
{
    const char *p = memmem(r->text, r->len, text, strlen(text));
    assert_non_null(p);
    return (size_t)(p - r->text);
}

/* Any part of an answer as the stop text: the answer ends before it, also within a token. */
static void test_stop__ends_the_answer_before_the_stop_text(void **state)
{
    int found = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        struct nb_generate_opts o = sampled(seed);
        o.max_tokens = 40;
        struct nb_generate_result all = answer(engine, o, prompt, PROMPT);
        for (size_t at = 0; at + 1 < all.len; at += 3)
            for (size_t len = 1; len <= 9 && at + len <= all.len; len += 2) {
                if (!nbi_utf8_valid(all.text + at, len) || memchr(all.text + at, 0, len))
                    continue;
                char *part = strndup(all.text + at, len);
                const char *const stop[] = {"this is nowhere", "", part, NULL};
                o.stop = stop;
                struct nb_generate_result r = answer(engine, o, prompt, PROMPT);
                size_t wanted = find(&all, part);
                if (r.len != wanted || memcmp(r.text, all.text, wanted) != 0)
                    fail_msg("seed %d, stop '%s': '%s' of '%s'", (int)seed, part, r.text, all.text);
                if (at + len < all.len) /* the last character may come only with the end */
                    assert_int_equal(r.finish, NB_FINISH_STOP);
                assert_true(r.count <= all.count);
                assert_memory_equal(r.ids, all.ids, r.count * sizeof *r.ids);
                nb_generate_result_release(&r);
                free(part);
                found++;
            }
        nb_generate_result_release(&all);
    }
    assert_true(found > 100);
}

/* Of several stop texts the first in the answer ends it. */
static void test_stop__the_first_of_several_ends_the_answer(void **state)
{
    struct nb_generate_opts o = sampled(1);
    const char *const *orders[2];
    (void)state;
    o.max_tokens = 40;
    struct nb_generate_result all = answer(engine, o, prompt, PROMPT);
    char early[] = "?", late[] = "?";
    for (size_t i = 0; i < all.len; i++) /* two ASCII characters of the answer */
        if (all.text[i] > 0) {
            late[0] = all.text[i];
            early[0] = early[0] == '?' ? late[0] : early[0];
        }
    assert_true(find(&all, early) < find(&all, late));
    const char *const one[] = {late, early, NULL}, *const other[] = {early, late, NULL};
    orders[0] = one;
    orders[1] = other;
    for (int i = 0; i < 2; i++) {
        o.stop = orders[i];
        struct nb_generate_result r = answer(engine, o, prompt, PROMPT);
        assert_int_equal(r.finish, NB_FINISH_STOP);
        assert_int_equal(r.len, find(&all, early));
        nb_generate_result_release(&r);
    }
    nb_generate_result_release(&all);
}

/* The beginning of a stop text that is not completed is emitted at the end. */
static void test_stop__incomplete_stop_text_is_emitted(void **state)
{
    struct nb_generate_opts o = sampled(2);
    char stop[512];
    (void)state;
    o.max_tokens = 40;
    struct nb_generate_result all = answer(engine, o, prompt, PROMPT);
    assert_true(all.len > 4 && all.len < 500);
    snprintf(stop, sizeof stop, "%s!", all.text); /* all of it, and a character more */
    const char *const stops[] = {stop, NULL};
    o.stop = stops;
    struct nb_generate_result r = answer(engine, o, prompt, PROMPT);
    assert_string_equal(r.text, all.text);
    assert_int_equal(r.finish, NB_FINISH_LENGTH);
    nb_generate_result_release(&r);
    nb_generate_result_release(&all);
}

/* A token with a complete character and the first byte of another: nothing of the other may follow
 * the stop text. */
static void test_stop__in_a_token_with_an_incomplete_character(void **state)
{
    static const char *const stop[] = {"\303\251", NULL}; /* e with acute */
    const char *const files[] = {test_path("words.txt"), NULL};
    struct nb_engine *e;
    int32_t *ids, both = -1;
    size_t count;
    (void)state;
    const char *dir = make_model("cut");
    put("words.txt", "\303\251 \303\251 \303\251 \303\251 \303\251\303\240\303\251\303\241"
                     "\303\251\303\242\303\251\303\243\303\251\303\244\303\251\303\245");
    const struct nb_tokenizer_train_opts train = {
        .files = files, .out = test_path("cut/tokenizer.json"), .vocab = 284};
    const struct nb_engine_opts opts = {.model = dir, .threads = 1};
    assert_ok(nb_tokenizer_train(&train));
    assert_ok(nb_engine_open(&e, &opts));
    assert_ok(
        nb_tokenizer_encode(nb_engine_tokenizer(e), "\303\251\303\240", 4, true, &ids, &count));
    for (size_t i = 0; i < count; i++) {
        char *bytes;
        size_t len;
        assert_ok(nb_tokenizer_decode(nb_engine_tokenizer(e), &ids[i], 1, &bytes, &len, NULL));
        if (len == 3)
            both = ids[i];
        free(bytes);
    }
    free(ids);
    assert_true(both >= 0); /* the tokenizer has such a token */
    const struct nb_bias bias = {both, 1000};
    struct nb_generate_opts o = greedy(5);
    o.sampling.bias = &bias;
    o.sampling.bias_count = 1;
    struct nb_generate_result r = answer(e, o, prompt, PROMPT);
    assert_int_equal(r.count, 5);
    assert_int_equal(r.ids[0], both);
    nb_generate_result_release(&r);
    o.stop = stop;
    r = answer(e, o, prompt, PROMPT);
    assert_int_equal(r.count, 1);
    assert_int_equal(r.finish, NB_FINISH_STOP);
    assert_string_equal(r.text, "");
    nb_generate_result_release(&r);
    nb_engine_close(e);
}

/* ---- other reasons to end ---- */

static void test_end__eos_ids_of_both_configs(void **state)
{
    static const int32_t ends[] = {EOS, 600};
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct nb_bias bias = {ends[i], 1000};
        struct nb_generate_opts o = greedy(6);
        o.sampling.bias = &bias;
        o.sampling.bias_count = 1;
        struct nb_generate_result r = answer(engine, o, prompt, PROMPT);
        assert_int_equal(r.count, 6);
        assert_int_equal(r.finish, NB_FINISH_LENGTH);
        nb_generate_result_release(&r);
        o.ignore_eos = false;
        r = answer(engine, o, prompt, PROMPT);
        assert_int_equal(r.finish, NB_FINISH_STOP);
        assert_int_equal(r.count, 1);
        assert_int_equal(r.ids[0], ends[i]);
        assert_string_equal(r.text, "");
        nb_generate_result_release(&r);
    }
}

static void test_end__at_max_tokens(void **state)
{
    (void)state;
    for (int n = 1; n <= 5; n += 4) {
        struct nb_generate_result r = answer(engine, greedy(n), prompt, PROMPT);
        assert_int_equal(r.count, n);
        assert_int_equal(r.finish, NB_FINISH_LENGTH);
        nb_generate_result_release(&r);
    }
}

/* An answer fills the context and has one token more, which needs no place in the cache. */
static void test_end__with_the_context(void **state)
{
    (void)state;
    for (int64_t length = 1; length <= (int64_t)PROMPT; length++)
        for (int64_t max = 0; max <= 100; max += 100) {
            struct nb_session *s = open_session(engine, PROMPT + 2);
            struct nb_generate_opts o = greedy(max);
            struct nb_generate_result r;
            assert_ok(nb_generate(s, prompt, (size_t)length, &o, &r));
            assert_int_equal(r.count, (int64_t)PROMPT + 3 - length);
            assert_int_equal(nbi_session_length(s), PROMPT + 2);
            if (r.finish != NB_FINISH_CONTEXT)
                fail_msg("prompt of %d, at most %d tokens: reason %d", (int)length, (int)max,
                         r.finish);
            nb_generate_result_release(&r);
            nb_session_close(s);
        }
}

/* ---- the session after an answer ---- */

static void test_second_call__gives_what_a_new_session_gives(void **state)
{
    struct nb_session *s = open_session(engine, 256);
    struct nb_generate_opts o = greedy(10);
    struct nb_generate_result a, b;
    int32_t next[64];
    (void)state;
    assert_ok(nb_generate(s, prompt, PROMPT, &o, &a));
    assert_int_equal(a.reused_tokens, 0);
    assert_int_equal(nbi_session_length(s), PROMPT + 10);
    memcpy(next, prompt, sizeof prompt);
    memcpy(next + PROMPT, a.ids, 10 * sizeof *next);
    memcpy(next + PROMPT + 10, prompt, 3 * sizeof *next);
    assert_ok(nb_generate(s, next, PROMPT + 13, &o, &b));
    assert_int_equal(b.reused_tokens, PROMPT + 10);
    struct nb_generate_result fresh = answer(engine, o, next, PROMPT + 13);
    assert_memory_equal(b.ids, fresh.ids, 10 * sizeof *b.ids);
    assert_string_equal(b.text, fresh.text);
    nb_generate_result_release(&b);
    nb_generate_result_release(&fresh);
    /* The first prompt again: all tokens but the last are reused. */
    assert_ok(nb_generate(s, prompt, PROMPT, &o, &b));
    assert_int_equal(b.reused_tokens, PROMPT - 1);
    assert_memory_equal(a.ids, b.ids, 10 * sizeof *a.ids);
    nb_generate_result_release(&a);
    nb_generate_result_release(&b);
    nb_session_close(s);
}

static void test_penalties__count_the_prompt(void **state)
{
    struct nb_generate_opts o = greedy(1);
    struct nb_generate_result r = answer(engine, o, prompt, PROMPT);
    int32_t with[PROMPT + 1];
    (void)state;
    memcpy(with, prompt, sizeof prompt);
    for (int i = 0; i < 8; i++) { /* until the most likely token is one of the prompt */
        with[i % 7] = r.ids[0];
        nb_generate_result_release(&r);
        r = answer(engine, o, with, PROMPT);
        bool there = false;
        for (size_t j = 0; j < PROMPT; j++)
            there = there || with[j] == r.ids[0];
        if (!there)
            continue;
        o.sampling.presence_penalty = 100;
        struct nb_generate_result other = answer(engine, o, with, PROMPT);
        for (size_t j = 0; j < PROMPT; j++)
            assert_int_not_equal(other.ids[0], with[j]);
        nb_generate_result_release(&other);
        nb_generate_result_release(&r);
        return;
    }
    nb_generate_result_release(&r);
    skip("no prompt repeats a token");
}

/* ---- errors ---- */

static void test_errors__release_the_result(void **state)
{
    struct nb_session *s = open_session(engine, PROMPT - 1);
    struct nb_generate_opts o = greedy(5);
    struct nb_generate_result r;
    static const int32_t outside[] = {1, 648};
    (void)state;
    assert_fails(nb_generate(s, prompt, 0, &o, &r), NB_EINVAL, "prompt is empty");
    assert_null(r.text);
    assert_fails(nb_generate(s, prompt, PROMPT, &o, &r), NB_EVALUE, "context of 7");
    assert_null(r.text);
    assert_null(r.ids);
    assert_fails(nb_generate(s, outside, 2, &o, &r), NB_EVALUE, "outside the vocabulary");
    o.sampling.temperature = -1;
    assert_fails(nb_generate(s, prompt, 2, &o, &r), NB_EINVAL, "temperature");
    nb_session_close(s);
}

static void test_errors__of_the_callback_end_the_answer(void **state)
{
    struct nb_session *s = open_session(engine, 256);
    struct shown shown = {.fail_at = 3};
    struct nb_generate_opts o = sampled(1);
    struct nb_generate_result r;
    (void)state;
    o.max_tokens = 100;
    o.text = take;
    o.ctx = &shown;
    assert_int_equal(nb_generate(s, prompt, PROMPT, &o, &r), NB_EIO);
    assert_int_equal(shown.pieces, 3);
    assert_null(r.text);
    nbi_str_release(&shown.text);
    nb_session_close(s);
}

static void test_engine__has_the_settings_of_the_model(void **state)
{
    struct nb_engine_info info;
    const struct nb_sampling *d = &info.sampling;
    (void)state;
    nb_engine_info(engine, &info);
    assert_true(d->temperature == 0.25 && d->top_p == 0.5 && d->top_k == 7 && d->min_p == 0 &&
                d->repeat_penalty == 1 && !d->bias);
    assert_int_equal(info.vocab, 648);
    assert_int_equal(info.context, 512);
    assert_int_equal(info.layers, 2);
    /* embedding and final norm; per layer q, k, v, o, the MLP's three matrices and four norms */
    assert_int_equal(info.parameters,
                     648 * 64 + 64 +
                         2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 64 + 2 * 64 + 2 * 16));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text__is_emitted_in_complete_characters),
        cmocka_unit_test(test_seed__determines_the_text),
        cmocka_unit_test(test_greedy__is_the_argmax_of_the_logits),
        cmocka_unit_test(test_stop__ends_the_answer_before_the_stop_text),
        cmocka_unit_test(test_stop__the_first_of_several_ends_the_answer),
        cmocka_unit_test(test_stop__incomplete_stop_text_is_emitted),
        cmocka_unit_test(test_stop__in_a_token_with_an_incomplete_character),
        cmocka_unit_test(test_end__eos_ids_of_both_configs),
        cmocka_unit_test(test_end__at_max_tokens),
        cmocka_unit_test(test_end__with_the_context),
        cmocka_unit_test(test_second_call__gives_what_a_new_session_gives),
        cmocka_unit_test(test_penalties__count_the_prompt),
        cmocka_unit_test(test_errors__release_the_result),
        cmocka_unit_test(test_errors__of_the_callback_end_the_answer),
        cmocka_unit_test(test_engine__has_the_settings_of_the_model),
    };
    return cmocka_run_group_tests_name("generate", tests, open_engine, close_engine);
}
