/* test_example.c - records become tokens and loss masks as written here by hand; truncation follows
 * the rule in data/example.h. */
#include "data/example.h"
#include "unit/data_support.h"

static struct nb_tokenizer *bytes_only;

static int make_tokenizer(void **state)
{
    (void)state;
    bytes_only = new_tokenizer("", 0);
    return 0;
}

static int close_tokenizer(void **state)
{
    (void)state;
    nb_tokenizer_close(bytes_only);
    return 0;
}

#define U           "<|im_start|>user\n"
#define A           "<|im_start|>assistant\n"
#define S           "<|im_start|>system\n"
#define E           "<|im_end|>"
#define N           "<|im_end|>\n"
#define EMPTY_THINK "<think>\n\n</think>\n\n"

/* Checks a record's example; [[ ]] marks what is trained on. */
static void expect(enum nbi_chat_kind chat, enum nbi_data_kind kind, const char *record,
                   const char *wanted)
{
    struct nbi_example_encoder s = {.tokenizer = bytes_only, .chat = chat};
    struct nbi_example sample = {0};
    for (int twice = 0; twice < 2; twice++) { /* the second replaces the first */
        assert_ok(nbi_example_make(&s, kind, record, strlen(record), true, &sample));
        assert_example(&sample, wanted);
        assert_int_equal(sample.document, strncmp(wanted, "[[", 2) == 0);
    }
    nbi_example_release(&sample);
    nbi_example_encoder_release(&s);
}

static void expect_all(enum nbi_data_kind kind, const char *record, const char *plain,
                       const char *hybrid)
{
    expect(NBI_CHAT_CHATML, kind, record, plain);
    expect(NBI_CHAT_QWEN3_2507, kind, record, plain);
    expect(NBI_CHAT_QWEN3, kind, record, hybrid);
}

/* Checks that a record is refused alike whether examples are tokenized or only checked. */
static void refuse(enum nbi_data_kind kind, const char *record, const char *words)
{
    struct nbi_example sample = {0};
    for (int check = 0; check < 2; check++) {
        struct nbi_example_encoder s = {.tokenizer = check ? NULL : bytes_only,
                                        .chat = NBI_CHAT_QWEN3};
        assert_fails(nbi_example_make(&s, kind, record, strlen(record), true, &sample), NB_EFORMAT,
                     words);
        nbi_example_encoder_release(&s);
    }
    nbi_example_release(&sample);
}

/* ---- TSV ---- */

static void test_tsv__pairs(void **state)
{
    (void)state;
    expect_all(NBI_DATA_TSV, "hi\thello", U "hi" N A "[[hello" E "]]",
               U "hi" N A EMPTY_THINK "[[hello" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_TSV, " a \t b\tc \r", U "a" N A "[[b\tc" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_TSV, "q \\n \"x\"\t\t\xE4\xBD\xA0",
           U "q \\n \"x\"" N A "[[\xE4\xBD\xA0" E "]]");
    expect(NBI_CHAT_QWEN3, NBI_DATA_TSV, "a\t<think>b</think>c",
           U "a" N A "[[<think>\nb\n</think>\n\nc" E "]]");
}

static void test_tsv__errors(void **state)
{
    (void)state;
    refuse(NBI_DATA_TSV, "no tab", "no TAB between prompt and answer");
    refuse(NBI_DATA_TSV, "\tx", "the prompt is empty");
    refuse(NBI_DATA_TSV, " \t x", "the prompt is empty");
    refuse(NBI_DATA_TSV, "x\t \t\r", "the answer is empty");
    refuse(NBI_DATA_TSV, "x\ty\xFF", "not well-formed UTF-8");
    refuse(NBI_DATA_TSV, "x\xE4\xBD\ty", "not well-formed UTF-8");
    refuse(NBI_DATA_TSV, "x\t\xED\xA0\x80", "not well-formed UTF-8");
}

static void test_tsv__headers(void **state)
{
    (void)state;
    static const char *const headers[] = {"prompt\tresponse",        "Question\tANSWER\r",
                                          " instruction \t output ", "prompt\tcompletion",
                                          "prompt\ttarget\tnotes",   "question\tresponse\t"};
    static const char *const others[] = {
        "prompt",          "prompt\t",      "response\tprompt", "the prompt\tanswer",
        "prompt\tanswers", "input\toutput", "\tanswer",         "",
        "prompt answer"};
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        if (!nbi_example_is_header(headers[i], strlen(headers[i])))
            fail_msg("'%s' is a header", headers[i]);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (nbi_example_is_header(others[i], strlen(others[i])))
            fail_msg("'%s' is no header", others[i]);
}

/* ---- JSONL: prompt and response ---- */

static void test_json__aliases(void **state)
{
    (void)state;
    static const char *const prompts[] = {"prompt", "instruction", "question"};
    static const char *const answers[] = {"response", "completion", "output", "answer", "target"};
    static const char *const contexts[] = {"input", "context"};
    char line[200];
    for (int p = 0; p < 3; p++)
        for (int a = 0; a < 5; a++) {
            snprintf(line, sizeof line, "{\"%s\": \"q\", \"id\": 7, \"%s\": \"a\"}", prompts[p],
                     answers[a]);
            expect_all(NBI_DATA_JSONL, line, U "q" N A "[[a" E "]]",
                       U "q" N A EMPTY_THINK "[[a" E "]]");
        }
    for (int c = 0; c < 2; c++) {
        snprintf(line, sizeof line,
                 "{\"output\": \"a\", \"%s\": \"below\\n\", \"instruction\": \"q\"}", contexts[c]);
        expect(NBI_CHAT_CHATML, NBI_DATA_JSONL, line, U "q\n\nbelow\n" N A "[[a" E "]]");
    }
}

static void test_json__pairs(void **state)
{
    (void)state;
    expect_all(
        NBI_DATA_JSONL, " {\"system\": \"be brief\", \"prompt\": \"q\", \"answer\": \"a\"}\r",
        S "be brief" N U "q" N A "[[a" E "]]", S "be brief" N U "q" N A EMPTY_THINK "[[a" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL,
           "{\"prompt\": \" q\\t\", \"response\": \" a\\n\", \"input\": \"\", \"system\": null}",
           U " q\t" N A "[[ a\n" E "]]"); /* JSON strings are not trimmed */
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL,
           "{\"prompt\": \"\\u00e9\\ud83d\\ude00\\u2028\", \"response\": \"\\\"\\\\\"}",
           U "\xC3\xA9\xF0\x9F\x98\x80\xE2\x80\xA8" N A "[[\"\\" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL,
           "{\"prompt\": \"p\", \"question\": \"q\", \"target\": \"t\", \"output\": \"o\"}",
           U "p" N A "[[o" E "]]"); /* the first name in the list wins */
}

static void test_json__nul(void **state)
{
    (void)state;
    static const char line[] = "{\"prompt\": \"a\\u0000\", \"response\": \"\\u0000b\"}";
    struct nbi_example_encoder s = {.tokenizer = bytes_only, .chat = NBI_CHAT_CHATML};
    struct nbi_example sample = {0}, wanted;
    assert_ok(nbi_example_make(&s, NBI_DATA_JSONL, line, strlen(line), true, &sample));
    write_example(&wanted, U "a?" N A "[[?b" E "]]");
    for (size_t i = 0; i < wanted.ids.count; i++)
        if (wanted.ids.p[i] == byte_id('?'))
            wanted.ids.p[i] = byte_id(0);
    assert_int_equal(sample.ids.count, wanted.ids.count);
    assert_memory_equal(sample.ids.p, wanted.ids.p, wanted.ids.count * sizeof *wanted.ids.p);
    assert_memory_equal(sample.trained, wanted.trained, wanted.ids.count);
    nbi_example_release(&wanted);
    nbi_example_release(&sample);
    nbi_example_encoder_release(&s);
}

/* ---- JSONL: messages ---- */

#define M(role, content) "{\"role\": \"" role "\", \"content\": \"" content "\"}"

static void test_messages__turns(void **state)
{
    (void)state;
    expect_all(NBI_DATA_JSONL,
               "{\"messages\": [" M("system", "s") ", " M("user", "u1") ", " M(
                   "assistant", "a1") ", " M("user", "u2") ", " M("assistant", "a2") "]}",
               S "s" N U "u1" N A "[[a1" E "]]\n" U "u2" N A "[[a2" E "]]",
               S "s" N U "u1" N A "[[a1" E "]]\n" U "u2" N A EMPTY_THINK "[[a2" E "]]");
    /* messages after the last answer are dropped */
    expect_all(NBI_DATA_JSONL,
               "{\"messages\": [" M("user", "u1") ", " M("assistant", "a1") ", " M(
                   "user", "u2") "], \"add_generation_prompt\": true}",
               U "u1" N A "[[a1" E "]]", U "u1" N A "[[a1" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL, "{\"messages\": [" M("assistant", "hello") "]}",
           A "[[hello" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL, /* messages take precedence */
           "{\"text\": 1, \"prompt\": 2, \"messages\": [" M("assistant", "x") "]}", A "[[x" E "]]");
}

static void test_messages__reasoning(void **state)
{
    (void)state;
    expect(NBI_CHAT_QWEN3, NBI_DATA_JSONL,
           "{\"messages\": [" M("user", "u1") ", " M("assistant", "<think>old</think>a1") ", " M(
               "user", "u2") ", {\"role\": \"assistant\", \"content\": \"a2\", "
                             "\"reasoning_content\": \"\\nbecause\\n\"}]}",
           U "u1" N A "[[a1" E "]]\n" U "u2" N A "[[<think>\nbecause\n</think>\n\na2" E "]]");
    expect(
        NBI_CHAT_QWEN3, NBI_DATA_JSONL,
        "{\"messages\": [" M("user", "u") ", " M("assistant", "<think>\\n\\n</think>\\n\\nx") "]}",
        U "u" N A EMPTY_THINK "[[x" E "]]");
    expect(NBI_CHAT_QWEN3_2507, NBI_DATA_JSONL, /* a model without thinking: ordinary text */
           "{\"messages\": [" M("user", "u") ", " M("assistant", "<think>r</think>x") "]}",
           U "u" N A "[[<think>r</think>x" E "]]");
}

static void test_messages__tools(void **state)
{
    (void)state;
    static const char line[] = "{\"messages\": [" M(
        "user",
        "u") ", {\"role\": \"assistant\", \"content\": \"\", "
             "\"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": {\"x\": 1}}}]}, " M(
                 "tool", "7") ", " M("assistant", "it is 7") "], \"tools\": [{\"name\": \"f\"}]}";
#define TOOLS                                                                                      \
    S "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "   \
      "provided with function signatures within <tools></tools> XML tags:\n<tools>\n"              \
      "{\"name\": \"f\"}\n</tools>\n\nFor each function call, return a json object with function " \
      "name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": "      \
      "<function-name>, \"arguments\": <args-json-object>}\n</tool_call>" N
#define CALL   "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>"
#define ANSWER U "<tool_response>\n7\n</tool_response>" N
    expect(NBI_CHAT_QWEN3_2507, NBI_DATA_JSONL, line,
           TOOLS U "u" N A "[[" CALL E "]]\n" ANSWER A "[[it is 7" E "]]");
    /* After the last question, only the last message and those with reasoning get a think block. */
    expect(NBI_CHAT_QWEN3, NBI_DATA_JSONL, line,
           TOOLS U "u" N A "[[" CALL E "]]\n" ANSWER A EMPTY_THINK "[[it is 7" E "]]");
    struct nbi_example_encoder s = {.tokenizer = bytes_only, .chat = NBI_CHAT_CHATML};
    struct nbi_example sample = {0};
    assert_fails(nbi_example_make(&s, NBI_DATA_JSONL, line, strlen(line), true, &sample),
                 NB_EUNSUPPORTED, "the chat template of this model has no tools");
    nbi_example_release(&sample);
    nbi_example_encoder_release(&s);
}

/* ---- JSONL: conversations of ShareGPT ---- */

#define T(from, value) "{\"from\": \"" from "\", \"value\": \"" value "\"}"

static void test_conversations__turns(void **state)
{
    (void)state;
    expect_all(
        NBI_DATA_JSONL,
        "{\"id\": \"x_0\", \"conversations\": [" T("system", "s") ", " T("human", "u1") ", " T(
            "gpt", "a1") ", " T("human", "u2") ", " T("gpt", "a2") "]}",
        S "s" N U "u1" N A "[[a1" E "]]\n" U "u2" N A "[[a2" E "]]",
        S "s" N U "u1" N A "[[a1" E "]]\n" U "u2" N A EMPTY_THINK "[[a2" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL,
           "{\"conversations\": [" T("user", "\\u00e9\\n") "," T("assistant", "\\\"\\\\") "]}",
           U "\xC3\xA9\n" N A "[[\"\\" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL,
           "{\"conversations\": [" T("human", "u") "," T("chatgpt", "a") "], \"system\": \"s\"}",
           S "s" N U "u" N A "[[a" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL,
           "{\"system\": \"\", \"tools\": null, \"conversations\": [" T("gpt", "a") "]}",
           A "[[a" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL, /* messages take precedence */
           "{\"conversations\": 1, \"messages\": [" M("assistant", "x") "]}", A "[[x" E "]]");
    expect(NBI_CHAT_CHATML, NBI_DATA_JSONL, "{\"conversations\": null, \"text\": \"t\"}",
           "[[t"
           "<|endoftext|>"
           "]]");
}

static void test_conversations__errors(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{\"conversations\": {}}", "'conversations' must be an array, it is an object"},
        {"{\"conversations\": []}", "'conversations' is empty"},
        {"{\"conversations\": [1]}", "'from' of turn 1 is none of human, gpt and system"},
        {"{\"conversations\": [" T("human", "u") "," T("bard", "a") "]}",
         "'from' of turn 2 is none of human, gpt and system"},
        {"{\"conversations\": [{\"from\": \"human\"}]}",
         "'value' of turn 1 must be text, it is missing"},
        {"{\"conversations\": [{\"from\": \"gpt\", \"value\": [\"a\"]}]}",
         "'value' of turn 1 must be text, it is an array"},
        {"{\"conversations\": [" T("human", "u") "]}",
         "there is no assistant message to learn from"},
        {"{\"conversations\": [" T("human", "u") "," T("gpt", "") "]}",
         "message 2, the assistant's, is empty"},
        {"{\"conversations\": [" T("gpt", "a") "], \"tools\": []}",
         "'tools' go with 'messages', not with 'conversations'"},
        {"{\"conversations\": [" T("gpt", "a") "], \"system\": 1}",
         "'system' must be a string, it is a number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refuse(NBI_DATA_JSONL, cases[i][0], cases[i][1]);
}

static void test_json__errors(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{\"prompt\": \"a\"", "invalid JSON at byte"},
        {"{\"prompt\": \"\xFF\"}", "invalid JSON at byte"},
        {"{} {}", "invalid JSON at byte"},
        {"[1]", "the line is an array and not an object"},
        {"\"text\"", "the line is a string and not an object"},
        {"{}", "there is neither 'messages', nor 'prompt' and 'response', nor 'text' in it"},
        {"{\"prompt\": \"a\"}", "there is neither"},
        {"{\"response\": \"a\", \"input\": \"b\"}", "there is neither"},
        {"{\"prompt\": 1, \"response\": \"a\"}", "'prompt' must be a string, it is a number"},
        {"{\"question\": \"q\", \"target\": null}", "there is neither"},
        {"{\"prompt\": \"a\", \"completion\": [\"b\"]}", "'completion' must be a string, it is an"},
        {"{\"prompt\": \"a\", \"response\": \"b\", \"input\": 1}", "'input' must be a string"},
        {"{\"prompt\": \"a\", \"response\": \"b\", \"system\": {}}", "'system' must be a string"},
        {"{\"instruction\": \"\", \"output\": \"b\"}", "'instruction' is empty"},
        {"{\"prompt\": \"a\", \"answer\": \"\"}", "'answer' is empty"},
        {"{\"text\": \"\"}", "'text' is empty"},
        {"{\"text\": [\"a\"]}", "'text' must be a string, it is an array"},
        {"{\"text\": \"a\", \"ends\": 0}", "'ends' is a number and not true or false"},
        {"{\"messages\": []}", "'messages' is empty"},
        {"{\"messages\": {}}", "'messages' must be an array, it is an object"},
        {"{\"messages\": [" M("human", "a") ", " M("assistant", "b") "]}",
         "the role of message 1 is none of"},
        {"{\"messages\": [" M("user", "a") ", " M("assistant", "") "]}",
         "message 2, the assistant's, is empty"},
        {"{\"messages\": [" M("user", "a") ", {\"role\": \"assistant\", \"contnt\": \"b\"}]}",
         "the content of message 2 must be text, it is missing"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\"}]}]}",
         "the content of message 1 must be text, it is an array"},
        {"{\"messages\": [" M("user", "a") "]}", "there is no assistant message to learn from"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refuse(NBI_DATA_JSONL, cases[i][0], cases[i][1]);
}

/* ---- documents ---- */

static void test_document__end(void **state)
{
    (void)state;
    struct nbi_example_encoder s = {.tokenizer = bytes_only};
    struct nbi_example sample = {0};
    expect(NBI_CHAT_CHATML, NBI_DATA_TEXT, "a\tb\n", "[[a\tb\n<|endoftext|>]]");
    expect(NBI_CHAT_QWEN3, NBI_DATA_TEXT, "a<|im_end|>b", "[[a<|im_end|>b<|endoftext|>]]");
    expect(NBI_CHAT_QWEN3, NBI_DATA_TEXT, "\xFF", "[[\xEF\xBF\xBD<|endoftext|>]]");
    expect(NBI_CHAT_QWEN3, NBI_DATA_JSONL, "{\"text\": \"a\", \"ends\": false}", "[[a]]");
    expect(NBI_CHAT_QWEN3, NBI_DATA_JSONL, "{\"text\": \"a\", \"ends\": true}",
           "[[a<|endoftext|>]]");
    expect(NBI_CHAT_QWEN3, NBI_DATA_JSONL, "{\"text\": \"\\na\\n\", \"prompt\": 1}",
           "[[\na\n<|endoftext|>]]");
    assert_ok(nbi_example_make(&s, NBI_DATA_TEXT, "goes on", 7, false, &sample));
    assert_example(&sample, "[[goes on]]");
    assert_true(sample.document);
    assert_ok(nbi_example_make(&s, NBI_DATA_TEXT, "", 0, true, &sample));
    assert_example(&sample, "[[<|endoftext|>]]");
    s.tokenizer = NULL; /* examples are only checked */
    assert_ok(nbi_example_make(&s, NBI_DATA_TEXT, "goes on", 7, true, &sample));
    assert_int_equal(sample.ids.count, 0);
    nbi_example_release(&sample);
    nbi_example_encoder_release(&s);
}

/* ---- tokenization at the border of prompt and answer ---- */

static void add_ids(struct nb_tokenizer *t, struct nbi_ids *ids, const char *text)
{
    assert_ok(nbi_tokenizer_encode(t, text, strlen(text), true, ids));
}

static void test_example__prompt_and_answer_are_tokenized_separately(void **state)
{
    (void)state;
    static const char line[] = "{\"prompt\": \"u\", \"response\": \"\\nanswer\"}";
    struct nb_tokenizer *t = new_tokenizer("a\n\nanswer\n\nuser\n\nassistant answer", 40);
    struct nbi_example_encoder s = {.tokenizer = t, .chat = NBI_CHAT_CHATML};
    struct nbi_example sample = {0};
    struct nbi_ids apart = {0}, whole = {0};
    add_ids(t, &apart, U "u" N A);
    size_t prompt = apart.count;
    add_ids(t, &apart, "\nanswer" E);
    add_ids(t, &whole, U "u" N A "\nanswer" E);
    assert_true(whole.count < apart.count); /* across the border, two newlines would be one token */
    assert_ok(nbi_example_make(&s, NBI_DATA_JSONL, line, strlen(line), true, &sample));
    assert_int_equal(sample.ids.count, apart.count);
    assert_memory_equal(sample.ids.p, apart.p, apart.count * sizeof *apart.p);
    for (size_t i = 0; i < apart.count; i++)
        assert_int_equal(sample.trained[i], i >= prompt);
    nbi_ids_release(&apart);
    nbi_ids_release(&whole);
    nbi_example_release(&sample);
    nbi_example_encoder_release(&s);
    nb_tokenizer_close(t);
}

/* ---- pairs and texts ---- */

static void test_example__pair(void **state)
{
    (void)state;
    static const struct {
        enum nbi_data_kind kind;
        const char *line, *prompt, *answer; /* prompt NULL: refused, answer is the message */
    } cases[] = {
        {NBI_DATA_TSV, " a \tb\tc\r", "a", "b\tc"},
        {NBI_DATA_JSONL, "{\"question\": \"q\", \"output\": \"o\"}", "q", "o"},
        {NBI_DATA_JSONL, "{\"prompt\": \"q\", \"context\": \"c\", \"target\": \"o\"}", "q\n\nc",
         "o"},
        {NBI_DATA_JSONL, "{\"messages\": [" M("user", "u") "," M("assistant", "a") "]}", "u", "a"},
        {NBI_DATA_JSONL, "{\"conversations\": [" T("human", "u") "," T("gpt", "a") "]}", "u", "a"},
        {NBI_DATA_JSONL, "{\"conversations\": [" T("human", "u") "," T("me", "a") "]}", NULL,
         "'from' of turn 2"},
        {NBI_DATA_JSONL, "{\"messages\": [" M("user", "u") "," M("user", "a") "]}", NULL,
         "not one question and one answer"},
        {NBI_DATA_JSONL,
         "{\"messages\": [" M("system", "s") "," M("user", "u") "," M("assistant", "a") "]}", NULL,
         "not one question and one answer"},
        {NBI_DATA_JSONL, "{\"messages\": [" M("user", "u") "," M("assistant", "") "]}", NULL,
         "'content' is empty"},
        {NBI_DATA_JSONL, "{\"messages\": \"u\"}", NULL, "not one question and one answer"},
        {NBI_DATA_JSONL, "{\"text\": \"t\"}", NULL, "there is neither"},
        {NBI_DATA_JSONL, "7", NULL, "there is neither"},
        {NBI_DATA_JSONL, "{", NULL, "invalid JSON"},
        {NBI_DATA_TSV, "a", NULL, "no TAB"},
        {NBI_DATA_TEXT, "a\tb", NULL, "a plain text has no questions and answers"},
    };
    struct nbi_str prompt = {0}, answer = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum nb_status rc =
            nbi_example_pair(cases[i].kind, cases[i].line, strlen(cases[i].line), &prompt, &answer);
        if (!cases[i].prompt) {
            assert_fails(rc, NB_EFORMAT, cases[i].answer);
            continue;
        }
        assert_ok(rc);
        assert_string_equal(nbi_str_text(&prompt), cases[i].prompt);
        assert_string_equal(nbi_str_text(&answer), cases[i].answer);
    }
    nbi_str_release(&prompt);
    nbi_str_release(&answer);
}

static enum nb_status join_text(void *ctx, const char *text, size_t len)
{
    nbi_str_append(ctx, text, len);
    nbi_str_puts(ctx, len > 0 ? "~" : "");
    return NB_OK;
}

static void test_example__texts(void **state)
{
    (void)state;
    static const struct {
        enum nbi_data_kind kind;
        const char *line, *texts;
    } cases[] = {
        {NBI_DATA_TEXT, "a\tb", "a\tb~"},
        {NBI_DATA_TSV, " a\tb ", "a~b~"},
        {NBI_DATA_JSONL, "{\"text\": \"t\"}", "t~"},
        {NBI_DATA_JSONL, "{\"output\": \"o\", \"input\": \"i\", \"question\": \"q\"}", "q~i~o~"},
        {NBI_DATA_JSONL,
         "{\"messages\": [" M("user", "u") ", {\"role\": \"assistant\", \"content\": null}, " M(
             "assistant", "a") "], \"id\": \"x\"}",
         "u~a~"},
        {NBI_DATA_JSONL, "{\"conversations\": [" T("human", "u") "," T("gpt", "a") ", 1]}", "u~a~"},
    };
    struct nbi_str s = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        s.len = 0;
        assert_ok(
            nbi_example_texts(cases[i].kind, cases[i].line, strlen(cases[i].line), join_text, &s));
        assert_string_equal(nbi_str_text(&s), cases[i].texts);
    }
    assert_fails(nbi_example_texts(NBI_DATA_TSV, "a", 1, join_text, &s), NB_EFORMAT, "no TAB");
    assert_fails(nbi_example_texts(NBI_DATA_JSONL, "[", 1, join_text, &s), NB_EFORMAT, "JSON");
    nbi_str_release(&s);
}

/* ---- truncation ---- */

static void shorten(const char *text, bool document, size_t max, const char *wanted)
{
    struct nbi_example s;
    write_example(&s, text);
    s.document = document;
    assert_int_equal(nbi_example_truncate(&s, max), strcmp(text, wanted) != 0);
    assert_example(&s, wanted);
    nbi_example_release(&s);
}

static void test_truncate__rule(void **state)
{
    (void)state;
    shorten("[[abcdef]]", true, 6, "[[abcdef]]");
    shorten("[[abcdef]]", true, 5, "[[abcde]]");
    shorten("[[abcdef]]", true, 2, "[[ab]]");
    shorten("abcd[[efgh]]", false, 8, "abcd[[efgh]]");
    shorten("abcd[[efgh]]", false, 6, "cd[[efgh]]"); /* the prompt loses its beginning */
    shorten("abcd[[efgh]]", false, 5, "d[[efgh]]");  /* keep max / 8, at least 1 */
    shorten("abcd[[efgh]]", false, 4, "d[[efg]]");   /* then the answer loses its end */
    shorten("abcd[[efgh]]", false, 2, "d[[e]]");
    shorten("ab[[cd]]ef[[gh]]", false, 5, "[[d]]ef[[gh]]"); /* early turns go first */
    shorten("ab[[cd]]ef[[gh]]", false, 3, "f[[gh]]");
    shorten("ab[[cd]]ef[[gh]]", false, 2, "f[[g]]");
    shorten("[[abcdef]]", false, 4, "[[abcd]]"); /* there is no prompt */
    shorten("a[[bcdefghijklmnopqrstuvwxyz]]", false, 24, "a[[bcdefghijklmnopqrstuvwx]]");
    shorten("0123456[[bcdefghijklmnopqrstuvwxyz]]", false, 24, "456[[bcdefghijklmnopqrstuv]]");
}

/* A random example: turns of random lengths. */
static void random_sample(struct nbi_example *s, uint64_t *seed)
{
    char text[2000];
    size_t n = 0;
    for (uint32_t turns = 1 + draw(seed, 4); turns > 0; turns--) {
        for (uint32_t k = draw(seed, 3) ? draw(seed, 120) : 0; k > 0; k--)
            text[n++] = (char)('a' + draw(seed, 26));
        n += (size_t)snprintf(text + n, 3, "[[");
        for (uint32_t k = 1 + draw(seed, 200); k > 0; k--)
            text[n++] = (char)('A' + draw(seed, 26));
        n += (size_t)snprintf(text + n, 3, "]]");
    }
    text[n] = 0;
    write_example(s, text);
}

static size_t last_answer(const struct nbi_example *s)
{
    size_t at = s->ids.count;
    while (at > 0 && s->trained[at - 1])
        at--;
    return at;
}

static void test_truncate__properties(void **state)
{
    (void)state;
    uint64_t seed = 3;
    for (int round = 0; round < 3000; round++) {
        struct nbi_example s;
        random_sample(&s, &seed);
        size_t n = s.ids.count, max = 2 + draw(&seed, (uint32_t)n + 10), answer = last_answer(&s);
        struct nbi_example whole = s;
        whole.ids.p = malloc(n * sizeof *whole.ids.p);
        whole.trained = malloc(n);
        memcpy(whole.ids.p, s.ids.p, n * sizeof *whole.ids.p);
        memcpy(whole.trained, s.trained, n);
        assert_int_equal(nbi_example_truncate(&s, max), n > max);
        assert_int_equal(s.ids.count, n < max ? n : max);
        /* the kept part starts as late as the answer's end or the minimal prompt allows */
        size_t least = max / 8 > 0 ? max / 8 : 1, start = n > max ? n - max : 0;
        if (start + least > answer)
            start = answer > least ? answer - least : 0;
        assert_memory_equal(s.ids.p, whole.ids.p + start, s.ids.count * sizeof *s.ids.p);
        assert_memory_equal(s.trained, whole.trained + start, s.ids.count);
        assert_true(s.ids.count > answer - start); /* some of the answer is kept */
        assert_true(answer - start >= (answer < least ? answer : least) || n <= max);
        nbi_example_release(&whole);
        nbi_example_release(&s);
    }
}

/* ---- prompts ---- */

static void expect_prompt(enum nbi_data_kind kind, const char *record, const char *text,
                          const char *messages, const char *expected)
{
    struct nbi_prompt p = {0};
    for (int twice = 0; twice < 2; twice++) { /* the second replaces the first */
        assert_ok(nbi_example_prompt(kind, record, strlen(record), &p));
        assert_string_equal(nbi_str_text(&p.text), text);
        assert_string_equal(nbi_str_text(&p.messages), messages);
        assert_string_equal(p.expected.len ? p.expected.p : "", expected);
    }
    nbi_prompt_release(&p);
}

#define MESSAGE(role, text) "{\"role\":\"" role "\",\"content\":\"" text "\"}"

static void test_prompt__kinds(void **state)
{
    (void)state;
    expect_prompt(NBI_DATA_TEXT, " a\tb ", "a\tb", "[" MESSAGE("user", "a\\tb") "]", "");
    expect_prompt(NBI_DATA_TSV, "a", "a", "[" MESSAGE("user", "a") "]", "");
    expect_prompt(NBI_DATA_TSV, "a\tb\tc", "a", "[" MESSAGE("user", "a") "]", "b\tc");
    expect_prompt(NBI_DATA_JSONL, "{\"question\":\"a\",\"input\":\"b\",\"answer\":null}", "a\n\nb",
                  "[" MESSAGE("user", "a\\n\\nb") "]", "");
    expect_prompt(NBI_DATA_JSONL, "{\"prompt\":\"a\",\"system\":\"s\",\"response\":\"r\"}", "a",
                  "[" MESSAGE("system", "s") "," MESSAGE("user", "a") "]", "r");
    expect_prompt(NBI_DATA_JSONL,
                  "{\"messages\":[" MESSAGE("user", "a") "," MESSAGE("assistant", "b") "]}", "a",
                  "[" MESSAGE("user", "a") "]", "b");
    expect_prompt(NBI_DATA_JSONL, "{\"conversations\":[" T("human", "a") "," T("gpt", "b") "]}",
                  "a", "[" MESSAGE("user", "a") "]", "b");
    expect_prompt(
        NBI_DATA_JSONL,
        "{\"messages\":[" MESSAGE("user", "a") "," MESSAGE("assistant", "b") ", " MESSAGE("user",
                                                                                          "c") "]}",
        "c", "[" MESSAGE("user", "a") "," MESSAGE("assistant", "b") "," MESSAGE("user", "c") "]",
        "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tsv__pairs),
        cmocka_unit_test(test_tsv__errors),
        cmocka_unit_test(test_tsv__headers),
        cmocka_unit_test(test_json__aliases),
        cmocka_unit_test(test_json__pairs),
        cmocka_unit_test(test_json__nul),
        cmocka_unit_test(test_json__errors),
        cmocka_unit_test(test_messages__turns),
        cmocka_unit_test(test_messages__reasoning),
        cmocka_unit_test(test_messages__tools),
        cmocka_unit_test(test_conversations__turns),
        cmocka_unit_test(test_conversations__errors),
        cmocka_unit_test(test_document__end),
        cmocka_unit_test(test_example__prompt_and_answer_are_tokenized_separately),
        cmocka_unit_test(test_example__pair),
        cmocka_unit_test(test_example__texts),
        cmocka_unit_test(test_prompt__kinds),
        cmocka_unit_test(test_truncate__rule),
        cmocka_unit_test(test_truncate__properties),
    };
    return cmocka_run_group_tests(tests, make_tokenizer, close_tokenizer);
}
