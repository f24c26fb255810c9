/* test_conversation.c - turns over one session, the tokens that are reused, and files, with a
 * random model. */
#include "base/jscan.h"
#include "infer/session.h"
#include "tokenizer/chat_template.h"
#include "unit/failing.h"
#include "unit/support.h"

#define TOKENIZER NB_TEST_SOURCE "/golden/tokenizer/qwen/tokenizer.json"

static const char *const config =
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"head_dim\": 16,"
    " \"hidden_act\": \"silu\", \"hidden_size\": 64, \"intermediate_size\": 64,"
    " \"max_position_embeddings\": 512, \"num_attention_heads\": 4, \"num_hidden_layers\": 2,"
    " \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0,"
    " \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", \"eos_token_id\": 602,"
    " \"vocab_size\": 648}";

static struct nb_engine *engine, *mute; /* mute: without a tokenizer */

static int open_engine(void **state)
{
    char *bytes;
    size_t len;
    if (make_test_dir(state))
        return -1;
    put("config.json", config);
    const struct nb_synth_opts synth = {.config = test_path("config.json"),
                                        .dst = test_path("model"),
                                        .seed = 3,
                                        .sigma = 0.05F,
                                        .threads = 1};
    const struct nb_engine_opts opts = {.model = test_path("model"), .threads = 1};
    assert_ok(nb_synth(&synth));
    assert_ok(nb_engine_open(&mute, &opts));
    assert_ok(nbi_file_read(TOKENIZER, 1 << 20, &bytes, &len));
    assert_ok(nbi_file_write(test_path("model/tokenizer.json"), bytes, len));
    free(bytes);
    assert_ok(nb_engine_open(&engine, &opts));
    return 0;
}

static int close_engine(void **state)
{
    nb_engine_close(engine);
    nb_engine_close(mute);
    return remove_test_dir(state);
}

/* ---- fixture ---- */

struct fixture {
    struct nb_session *session;
    struct nb_conversation *c;
};

static struct fixture begin(int64_t context, bool think)
{
    const struct nb_session_opts opts = {.context = context, .kv = NB_KV_F16};
    struct fixture f;
    assert_ok(nb_session_open(&f.session, engine, &opts));
    assert_ok(nb_conversation_open(&f.c, f.session, think));
    return f;
}

static void end(struct fixture *f)
{
    nb_conversation_close(f->c);
    nb_session_close(f->session);
}

static struct nb_generate_opts sampled(uint64_t seed, int64_t max_tokens)
{
    return (struct nb_generate_opts){
        .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = seed},
        .max_tokens = max_tokens};
}

static struct nb_generate_result ask(struct fixture *f, const char *text,
                                     const struct nb_generate_opts *o)
{
    struct nb_generate_result r;
    assert_ok(nb_conversation_answer(f->c, text, strlen(text), o, &r));
    return r;
}

static int64_t messages(const struct fixture *f)
{
    struct nb_conversation_info info;
    nb_conversation_info(f->c, &info);
    return info.messages;
}

static void assert_message(const struct fixture *f, int64_t i, enum nb_role role, const char *text,
                           size_t len)
{
    struct nb_message m;
    nb_conversation_message(f->c, i, &m);
    assert_int_equal(m.role, role);
    assert_int_equal(m.len, len);
    assert_memory_equal(m.text, text, len);
}

/* A new session must give the same answer to the same prompt tokens. */
static void assert_as_fresh(const struct fixture *f, const struct nb_generate_result *r,
                            const struct nb_generate_opts *o)
{
    struct fixture other = begin(512, true);
    struct nb_generate_result fresh;
    assert_ok(nb_generate(other.session, nb_session_tokens(f->session, NULL),
                          (size_t)r->prompt_tokens, o, &fresh));
    assert_int_equal(fresh.count, r->count);
    assert_memory_equal(fresh.ids, r->ids, r->count * sizeof *r->ids);
    nb_generate_result_release(&fresh);
    end(&other);
}

/* The prompt tokens must be those of its whole text, tokenized at once. */
static void assert_prompt(const struct fixture *f, const struct nb_generate_result *r,
                          const char *request)
{
    char *text;
    int32_t *ids;
    size_t len, count;
    assert_ok(nb_chat_render(nb_engine_chat(engine), request, strlen(request), &text, &len));
    assert_ok(nb_tokenizer_encode(nb_engine_tokenizer(engine), text, len, true, &ids, &count));
    assert_int_equal(count, r->prompt_tokens);
    assert_memory_equal(ids, nb_session_tokens(f->session, NULL), count * sizeof *ids);
    free(ids);
    free(text);
}

/* ---- turns ---- */

static void test_first_turn__is_what_the_template_renders(void **state)
{
    struct fixture f = begin(256, true);
    struct nb_generate_opts o = sampled(1, 5);
    const struct nb_message system = {NB_ROLE_SYSTEM, "be brief", 8};
    (void)state;
    assert_ok(nb_conversation_add(f.c, &system));
    struct nb_generate_result r = ask(&f, "hi \"there\"\n", &o);
    assert_prompt(&f, &r,
                  "{\"messages\":[{\"role\":\"system\",\"content\":\"be brief\"},"
                  "{\"role\":\"user\",\"content\":\"hi \\\"there\\\"\\n\"}],"
                  "\"add_generation_prompt\":true}");
    assert_int_equal(messages(&f), 3);
    assert_message(&f, 1, NB_ROLE_USER, "hi \"there\"\n", 11);
    assert_message(&f, 2, NB_ROLE_ASSISTANT, r.text, r.len);
    nb_generate_result_release(&r);
    end(&f);
}

/* The tokens of a random model are not those that their text would be tokenized to. All of them are
 * reused nevertheless. */
static void test_turns__reuse_all_tokens(void **state)
{
    struct fixture f = begin(512, true);
    struct nb_conversation_info info;
    int64_t before = 0;
    (void)state;
    for (uint64_t i = 0; i < 5; i++) {
        struct nb_generate_opts o = sampled(i, 20);
        o.ignore_eos = true;
        struct nb_generate_result r = ask(&f, "and \xC3\xA9 \xF0\x9F\x98\x80 more", &o);
        assert_int_equal(r.finish, NB_FINISH_LENGTH);
        assert_int_equal(r.reused_tokens, before);
        assert_as_fresh(&f, &r, &o);
        before = r.prompt_tokens + (int64_t)r.count;
        assert_int_equal(nbi_session_length(f.session), before);
        nb_generate_result_release(&r);
        nb_conversation_info(f.c, &info);
        assert_int_equal(info.tokens, before);
        assert_int_equal(info.context, 512);
    }
    assert_int_equal(messages(&f), 10);
    nb_conversation_reset(f.c);
    nb_conversation_info(f.c, &info);
    assert_int_equal(info.tokens, 0);
    end(&f);
}

static void test_turns__reuse_the_end_of_the_turn(void **state)
{
    struct fixture f = begin(256, true);
    const struct nb_bias bias = {602, 1000};
    struct nb_generate_opts o = sampled(0, 20);
    int32_t *ids;
    size_t count;
    (void)state;
    assert_ok(
        nb_tokenizer_encode(nb_engine_tokenizer(engine), "<|im_end|>", 10, true, &ids, &count));
    assert_true(count == 1 && ids[0] == 602);
    free(ids);
    o.sampling.bias = &bias;
    o.sampling.bias_count = 1;
    struct nb_generate_result a = ask(&f, "one", &o), b = ask(&f, "two", &o);
    assert_int_equal(a.count, 1);
    assert_int_equal(b.reused_tokens, a.prompt_tokens + 1);
    assert_message(&f, 1, NB_ROLE_ASSISTANT, "", 0);
    nb_generate_result_release(&a);
    nb_generate_result_release(&b);
    end(&f);
}

/* With thinking off the prompt ends in an empty thought, which the template leaves out of earlier
 * turns. The repository does not hold that template, so the test sets its kind. */
static void test_turns__template_that_changes_earlier_text(void **state)
{
    enum nbi_chat_kind *kind = (enum nbi_chat_kind *)engine->chat;
    struct fixture f = begin(512, false);
    struct nb_generate_opts o = sampled(4, 8);
    struct nbi_str request = {0};
    (void)state;
    *kind = NBI_CHAT_QWEN3;
    assert_int_equal(nbi_chat_kind(engine->chat), NBI_CHAT_QWEN3);
    struct nb_generate_result a = ask(&f, "one", &o), b = ask(&f, "two", &o);
    nbi_str_puts(&request, "{\"messages\":[{\"role\":\"user\",\"content\":\"one\"},"
                           "{\"role\":\"assistant\",\"content\":");
    nbi_jquote(&request, a.text, a.len);
    nbi_str_puts(&request, "},{\"role\":\"user\",\"content\":\"two\"}],"
                           "\"add_generation_prompt\":true,\"enable_thinking\":false}");
    assert_prompt(&f, &b, request.p);
    assert_true(b.reused_tokens > 5 && b.reused_tokens < a.prompt_tokens);
    assert_as_fresh(&f, &b, &o);
    *kind = NBI_CHAT_CHATML;
    nbi_str_release(&request);
    nb_generate_result_release(&a);
    nb_generate_result_release(&b);
    end(&f);
}

static void test_turns__after_a_stop_text(void **state)
{
    struct fixture f = begin(512, true);
    struct nb_generate_opts o = sampled(2, 40);
    o.ignore_eos = true;
    (void)state;
    struct nb_generate_result all = ask(&f, "one", &o);
    char stop[] = "?";
    for (size_t i = 4; i < all.len && stop[0] == '?'; i++)
        stop[0] = all.text[i] > ' ' && all.text[i] < 127 ? all.text[i] : '?';
    const char *const stops[] = {stop, NULL};
    o.stop = stops;
    nb_conversation_reset(f.c);
    struct nb_generate_result a = ask(&f, "one", &o);
    assert_int_equal(a.finish, NB_FINISH_STOP);
    assert_true(a.len < all.len);
    assert_message(&f, 1, NB_ROLE_ASSISTANT, a.text, a.len);
    struct nb_generate_result b = ask(&f, "two", &o);
    assert_true(b.reused_tokens >= a.prompt_tokens - 1);
    assert_as_fresh(&f, &b, &o);
    nb_generate_result_release(&all);
    nb_generate_result_release(&a);
    nb_generate_result_release(&b);
    end(&f);
}

/* ---- interruptions and limits ---- */

static struct nb_cancel stop;

struct stopper {
    int pieces, stop_at;
    struct nbi_str text;
};

static enum nb_status stop_after(void *ctx, const char *text, size_t len)
{
    struct stopper *s = ctx;
    nbi_str_append(&s->text, text, len);
    if (++s->pieces == s->stop_at)
        nb_cancel_set(&stop);
    return NB_OK;
}

static void test_interrupted__keeps_the_answer_so_far(void **state)
{
    struct fixture f = begin(512, true);
    struct stopper s = {.stop_at = 6};
    struct nb_generate_opts o = sampled(5, 200);
    struct nb_generate_result r;
    (void)state;
    o.ignore_eos = true;
    o.text = stop_after;
    o.ctx = &s;
    o.cancel = &stop;
    assert_int_equal(nb_conversation_answer(f.c, "go", 2, &o, &r), NB_EINTERRUPTED);
    nb_cancel_clear(&stop);
    assert_true(r.count >= 6 && r.count < 200);
    assert_true(r.seconds > 0);
    assert_int_equal(messages(&f), 2);
    assert_message(&f, 1, NB_ROLE_ASSISTANT, s.text.p, s.text.len);
    int64_t before = r.prompt_tokens + (int64_t)r.count - 1; /* the last token was not computed */
    nb_generate_result_release(&r);
    o = sampled(6, 10);
    r = ask(&f, "on", &o);
    assert_true(r.reused_tokens >= before);
    assert_as_fresh(&f, &r, &o);
    nb_generate_result_release(&r);
    nbi_str_release(&s.text);
    end(&f);
}

static void test_interrupted__before_the_first_token_changes_nothing(void **state)
{
    struct fixture f = begin(512, true);
    struct nb_generate_opts o = sampled(5, 20);
    struct nb_generate_result r;
    (void)state;
    o.ignore_eos = true;
    r = ask(&f, "one", &o);
    int64_t before = r.prompt_tokens + 20;
    nb_generate_result_release(&r);
    nb_cancel_set(&stop);
    o.cancel = &stop;
    assert_int_equal(nb_conversation_answer(f.c, "two", 3, &o, &r), NB_EINTERRUPTED);
    assert_int_equal(stop.set, 1); /* the library never clears it */
    nb_cancel_clear(&stop);
    assert_int_equal(r.count, 0);
    nb_generate_result_release(&r);
    assert_int_equal(messages(&f), 2);
    r = ask(&f, "two", &o);
    assert_int_equal(r.reused_tokens, before);
    nb_generate_result_release(&r);
    end(&f);
}

static void test_context__full_is_an_error(void **state)
{
    struct fixture f = begin(80, true);
    struct nb_generate_opts o = sampled(5, 12);
    struct nb_generate_result r;
    char long_text[400];
    (void)state;
    o.ignore_eos = true;
    memset(long_text, 'x', sizeof long_text);
    r = ask(&f, "one", &o);
    int64_t before = nbi_session_length(f.session);
    nb_generate_result_release(&r);
    assert_fails(nb_conversation_answer(f.c, long_text, sizeof long_text, &o, &r), NB_EVALUE,
                 "the context only 80");
    assert_true(r.prompt_tokens > 80);
    assert_null(r.text);
    assert_int_equal(messages(&f), 2);
    r = ask(&f, "two", &o);
    assert_int_equal(r.reused_tokens, before);
    nb_generate_result_release(&r);
    end(&f);
}

static void test_open__needs_a_tokenizer(void **state)
{
    const struct nb_session_opts opts = {.context = 16, .kv = NB_KV_F16};
    struct nb_session *s;
    struct nb_conversation *c;
    (void)state;
    assert_ok(nb_session_open(&s, mute, &opts));
    assert_fails(nb_conversation_open(&c, s, true), NB_ENOTFOUND, "no tokenizer");
    assert_null(c);
    nb_session_close(s);
}

/* ---- messages ---- */

static void test_system__message_is_unique_and_first(void **state)
{
    struct fixture f = begin(64, true);
    const struct nb_message user = {NB_ROLE_USER, "u", 1}, assistant = {NB_ROLE_ASSISTANT, "a", 1},
                            one = {NB_ROLE_SYSTEM, "one", 3}, two = {NB_ROLE_SYSTEM, "two", 3},
                            none = {NB_ROLE_SYSTEM, "", 0};
    (void)state;
    assert_ok(nb_conversation_add(f.c, &none));
    assert_int_equal(messages(&f), 0);
    assert_ok(nb_conversation_add(f.c, &user));
    assert_ok(nb_conversation_add(f.c, &assistant));
    assert_ok(nb_conversation_add(f.c, &one));
    assert_ok(nb_conversation_add(f.c, &two));
    assert_int_equal(messages(&f), 3);
    assert_message(&f, 0, NB_ROLE_SYSTEM, "two", 3);
    assert_message(&f, 1, NB_ROLE_USER, "u", 1);
    nb_conversation_reset(f.c);
    assert_int_equal(messages(&f), 1);
    assert_message(&f, 0, NB_ROLE_SYSTEM, "two", 3);
    assert_ok(nb_conversation_add(f.c, &user));
    assert_ok(nb_conversation_add(f.c, &none));
    assert_int_equal(messages(&f), 1);
    assert_message(&f, 0, NB_ROLE_USER, "u", 1);
    for (int i = 0; i < 100; i++)
        assert_ok(nb_conversation_add(f.c, i % 2 ? &user : &assistant));
    assert_int_equal(messages(&f), 101);
    nb_conversation_reset(f.c);
    assert_int_equal(messages(&f), 0);
    end(&f);
}

/* ---- files ---- */

static void test_save__then_load_gives_the_same_messages(void **state)
{
    struct fixture f = begin(64, true), g = begin(64, true);
    const struct nb_message all[] = {{NB_ROLE_SYSTEM, "s\n", 2},
                                     {NB_ROLE_USER, "a\0\"\\\t\x1b", 6},
                                     {NB_ROLE_ASSISTANT, "\xC3\xA9\xFF", 3}};
    (void)state;
    for (int i = 0; i < 3; i++)
        assert_ok(nb_conversation_add(f.c, &all[i]));
    assert_ok(nb_conversation_save(f.c, test_path("saved.jsonl")));
    assert_content("saved.jsonl",
                   "{\"messages\":[{\"role\":\"system\",\"content\":\"s\\n\"},"
                   "{\"role\":\"user\",\"content\":\"a\\u0000\\\"\\\\\\t\\u001b\"},"
                   "{\"role\":\"assistant\",\"content\":\"\xC3\xA9\xEF\xBF\xBD\"}]}\n");
    assert_ok(nb_conversation_add(g.c, &all[1]));
    assert_ok(nb_conversation_load(g.c, test_path("saved.jsonl")));
    assert_int_equal(messages(&g), 3);
    assert_message(&g, 0, NB_ROLE_SYSTEM, "s\n", 2);
    assert_message(&g, 1, NB_ROLE_USER, all[1].text, 6);
    assert_message(&g, 2, NB_ROLE_ASSISTANT, "\xC3\xA9\xEF\xBF\xBD", 5);
    put("bad.jsonl", "{\"role\":\"user\",\"content\":\"x\"}\n{\"role\":\"user\"}\n");
    assert_fails(nb_conversation_load(g.c, test_path("bad.jsonl")), NB_EFORMAT, "line 2");
    assert_fails(nb_conversation_load(g.c, test_path("none.jsonl")), NB_ENOTFOUND, "none.jsonl");
    assert_int_equal(messages(&g), 3);
    end(&f);
    end(&g);
}

/* A conversation may have no message. */
static void test_save__of_an_empty_conversation(void **state)
{
    struct fixture f = begin(64, true);
    const struct nb_message m = {NB_ROLE_USER, "x", 1};
    (void)state;
    assert_ok(nb_conversation_save(f.c, test_path("empty.jsonl")));
    assert_content("empty.jsonl", "{\"messages\":[]}\n");
    assert_ok(nb_conversation_add(f.c, &m));
    assert_ok(nb_conversation_load(f.c, test_path("empty.jsonl")));
    assert_int_equal(messages(&f), 0);
    assert_ok(nb_conversation_add(f.c, &m));
    put("log.jsonl",
        "{\"role\":\"user\",\"content\":\"x\"}\n{\"event\":\"load\",\"messages\":[]}\n");
    assert_ok(nb_conversation_load(f.c, test_path("log.jsonl")));
    assert_int_equal(messages(&f), 0);
    assert_ok(nb_conversation_add(f.c, &m));
    assert_message(&f, 0, NB_ROLE_USER, "x", 1);
    end(&f);
}

/* Loading a log gives the conversation at its end. */
static void test_load__of_a_chat_log(void **state)
{
    struct fixture f = begin(64, true);
    (void)state;
    put("log.jsonl", "{\"event\":\"start\"}\n"
                     "{\"role\":\"system\",\"content\":\"s\"}\n"
                     "{\"role\":\"user\",\"content\":\"gone\"}\n"
                     "{\"event\":\"reset\"}\n\n"
                     "{\"role\":\"user\",\"content\":\"kept\"}");
    assert_ok(nb_conversation_load(f.c, test_path("log.jsonl")));
    assert_int_equal(messages(&f), 2);
    assert_message(&f, 0, NB_ROLE_SYSTEM, "s", 1);
    assert_message(&f, 1, NB_ROLE_USER, "kept", 4);
    put("log.jsonl", "{\"role\":\"system\",\"content\":\"s\"}\n"
                     "{\"event\":\"load\",\"messages\":[{\"role\":\"user\",\"content\":\"l\"}]}\r\n"
                     "  \n");
    assert_ok(nb_conversation_load(f.c, test_path("log.jsonl")));
    assert_int_equal(messages(&f), 1);
    assert_message(&f, 0, NB_ROLE_USER, "l", 1);
    end(&f);
}

static enum nb_status note_item(void *ctx, const struct nb_transcript_item *item)
{
    struct nbi_str *out = ctx;
    nbi_str_printf(out, "%c%d:%.*s:%d ", "SRML"[item->kind], item -> message.role,
                   (int)item->message.len, item->message.len ? item->message.text : "",
                   (int)item->cut);
    return NB_OK;
}

static void test_transcript__gives_all_items(void **state)
{
    struct nbi_str out = {0};
    (void)state;
    put("t.jsonl", "{\"event\":\"start\",\"settings\":{}}\n"
                   "{\"time\":\"now\",\"role\":\"user\",\"content\":\"q\"}\n"
                   "{\"role\":\"assistant\",\"content\":\"a\",\"interrupted\":true,"
                   "\"completion_tokens\":7}\n"
                   "{\"role\":\"assistant\",\"content\":\"b\",\"interrupted\":false,"
                   "\"completion_tokens\":7}\n"
                   "{\"event\":\"load\",\"messages\":[{\"role\":\"user\",\"content\":\"l\"}]}\n"
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"m\"}],\"tools\":null}\n");
    assert_ok(nb_transcript_read(test_path("t.jsonl"), note_item, &out));
    assert_string_equal(out.p, "S0::0 M1:q:0 M2:a:7 M2:b:0 R0::0 L0::0 L1:l:0 S0::0 M1:m:0 ");
    nbi_str_release(&out);
}

static void test_transcript__refuses_malformed_files(void **state)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"", "holds no messages"},
        {"\n\n", "holds no messages"},
        {"{\"event\":\"start\"}\n", "holds no messages"},
        {"\n{\n", "line 2: invalid JSON"},
        {"[]\n", "line 1: it is an array, not an object"},
        {"{}\n", "none of 'messages', 'role' and 'event'"},
        {"{\"messages\":{}}\n", "'messages' is an object"},
        {"{\"messages\":[1]}\n", "a message is a number"},
        {"{\"messages\":[{}]}\n", "'role' is missing"},
        {"{\"event\":1}\n", "'event' is none of"},
        {"{\"event\":\"stop\"}\n", "'event' is none of"},
        {"{\"event\":\"load\"}\n", "'messages' is missing"},
        {"{\"role\":\"tool\",\"content\":\"\"}\n", "the role \"tool\""},
        {"{\"role\":null,\"content\":\"\"}\n", "'role' is null"},
        {"{\"role\":\"user\",\"content\":[]}\n", "'content' is an array"},
        {"{\"role\":\"user\",\"content\":\"\xFF\"}\n", "line 1: invalid JSON"},
        {"{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[]}\n", "tool calls"},
        {"{\"role\":\"assistant\",\"content\":\"\",\"interrupted\":true}\n", "completion_tokens"},
        {"{\"role\":\"assistant\",\"content\":\"\",\"interrupted\":true,"
         "\"completion_tokens\":1e99}\n",
         "completion_tokens"},
    };
    struct nbi_str out = {0};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put("t.jsonl", cases[i].text);
        enum nb_status rc = nb_transcript_read(test_path("t.jsonl"), note_item, &out);
        if (rc == NB_OK || !strstr(nb_last_error(), cases[i].words) ||
            !strstr(nb_last_error(), "t.jsonl'"))
            fail_msg("'%s': '%s' lacks '%s'", cases[i].text, nb_last_error(), cases[i].words);
    }
    assert_ok(nbi_file_write(test_path("t.jsonl"), "{\"role\":\0\"user\"}\n", 17));
    assert_fails(nb_transcript_read(test_path("t.jsonl"), note_item, &out), NB_EFORMAT, "line 1");
    assert_int_equal(nb_transcript_read(test_dir, note_item, &out) == NB_OK, 0);
    nbi_str_release(&out);
}

/* ---- failures ---- */

/* Each allocation of an answer fails in turn. The conversation must be unchanged: the next question
 * gets the answer that it gets without a failure. */
static void test_answer__failure_leaves_the_conversation_unchanged(void **state)
{
    const struct nb_generate_opts o = sampled(5, 3);
    struct fixture plain = begin(256, false);
    struct nb_generate_result first = ask(&plain, "hello", &o), wanted = ask(&plain, "again", &o);
    long failures = 0;
    (void)state;
    for (bool failed = true; failed; failures++) {
        struct fixture f = begin(256, false);
        struct nb_generate_result r = ask(&f, "hello", &o);
        nb_generate_result_release(&r);
        allocations_left = failures;
        enum nb_status rc = nb_conversation_answer(f.c, "again", 5, &o, &r);
        failed = allocations_left < 0;
        allocations_left = -1;
        if (rc != NB_OK) {
            assert_int_equal(rc, NB_ENOMEM);
            assert_null(r.text);
            assert_null(r.ids);
            assert_int_equal(messages(&f), 2);
            r = ask(&f, "again", &o);
        }
        assert_int_equal(messages(&f), 4);
        assert_int_equal(r.count, wanted.count);
        assert_memory_equal(r.ids, wanted.ids, r.count * sizeof *r.ids);
        nb_generate_result_release(&r);
        end(&f);
    }
    assert_true(failures > 10);
    nb_generate_result_release(&first);
    nb_generate_result_release(&wanted);
    end(&plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_turn__is_what_the_template_renders),
        cmocka_unit_test(test_turns__reuse_all_tokens),
        cmocka_unit_test(test_turns__reuse_the_end_of_the_turn),
        cmocka_unit_test(test_turns__template_that_changes_earlier_text),
        cmocka_unit_test(test_turns__after_a_stop_text),
        cmocka_unit_test(test_interrupted__keeps_the_answer_so_far),
        cmocka_unit_test(test_interrupted__before_the_first_token_changes_nothing),
        cmocka_unit_test(test_context__full_is_an_error),
        cmocka_unit_test(test_open__needs_a_tokenizer),
        cmocka_unit_test(test_system__message_is_unique_and_first),
        cmocka_unit_test(test_save__then_load_gives_the_same_messages),
        cmocka_unit_test(test_save__of_an_empty_conversation),
        cmocka_unit_test(test_load__of_a_chat_log),
        cmocka_unit_test(test_transcript__gives_all_items),
        cmocka_unit_test(test_transcript__refuses_malformed_files),
        cmocka_unit_test(test_answer__failure_leaves_the_conversation_unchanged),
    };
    return cmocka_run_group_tests_name("conversation", tests, open_engine, close_engine);
}
