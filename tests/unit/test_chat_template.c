/* test_chat_template.c - tests chat templates and JSON values printed as in Python. Expected texts
 * were derived by hand from the templates; tests/cli/render.sh compares with Jinja itself. */
#include "tokenizer/chat_template.h"
#include "tokenizer/python_json.h"
#include "unit/support.h"

#define CHATML      NBI_CHAT_CHATML
#define NO_THINKING NBI_CHAT_QWEN3_2507
#define HYBRID      NBI_CHAT_QWEN3

#define USER(text)        "{\"role\": \"user\", \"content\": \"" text "\"}"
#define ASSISTANT(text)   "{\"role\": \"assistant\", \"content\": \"" text "\"}"
#define TOOL(text)        "{\"role\": \"tool\", \"content\": \"" text "\"}"
#define SYSTEM(text)      "{\"role\": \"system\", \"content\": \"" text "\"}"
#define CHAT(a)           "{\"messages\": [" a "]}"
#define CHAT2(a, b)       CHAT(a ", " b)
#define CHAT3(a, b, c)    CHAT(a ", " b ", " c)
#define CHAT4(a, b, c, d) CHAT(a ", " b ", " c ", " d)

static enum nb_status render(enum nbi_chat_kind kind, const char *request, struct nbi_rendered *out)
{
    struct nbi_jspan json;
    assert_ok(nbi_jscan(&json, request, strlen(request)));
    return nbi_chat_render(kind, json, out);
}

/* Renders messages and compares the text and the assistant's ranges, joined by '~'. */
static void expect(enum nbi_chat_kind kind, const char *request, const char *text,
                   const char *written)
{
    struct nbi_rendered r;
    struct nbi_str ranges = {0};
    assert_ok(render(kind, request, &r));
    assert_string_equal(nbi_str_text(&r.text), text);
    assert_int_equal(r.text.len, strlen(text));
    size_t last = 0;
    for (size_t i = 0; i < r.range_count; i++) {
        assert_true(r.ranges[i].start >= last && r.ranges[i].start <= r.ranges[i].end);
        assert_true(r.ranges[i].end <= r.text.len);
        last = r.ranges[i].end;
        nbi_str_puts(&ranges, i ? "~" : "");
        nbi_str_append(&ranges, r.text.p + r.ranges[i].start, r.ranges[i].end - r.ranges[i].start);
    }
    assert_string_equal(nbi_str_text(&ranges), written);
    nbi_str_release(&ranges);
    nbi_rendered_release(&r);
}

#define expect_error(kind, request, words)                                                         \
    do {                                                                                           \
        struct nbi_rendered refused;                                                               \
        assert_fails(render(kind, request, &refused), NB_EFORMAT, words);                          \
        assert_null(refused.text.p);                                                               \
        assert_null(refused.ranges);                                                               \
    } while (0)

/* ---- JSON values in Python ---- */

static void assert_python(const char *json, const char *dumps, const char *str)
{
    struct nbi_jspan v;
    struct nbi_str text = {0};
    assert_ok(nbi_jscan(&v, json, strlen(json)));
    nbi_py_json(&text, v);
    assert_string_equal(nbi_str_text(&text), dumps);
    text.len = 0;
    nbi_py_str(&text, v);
    assert_string_equal(nbi_str_text(&text), str);
    nbi_str_release(&text);
}

static void test_python_json__prints_numbers_as_python(void **state)
{
    (void)state;
    static const char *const same[][2] = {
        {"0", "0"},
        {"-0", "0"},
        {"-17", "-17"},
        {"123456789012345678901234567890", "123456789012345678901234567890"},
        {"0.0", "0.0"},
        {"-0.0", "-0.0"},
        {"-0e7", "-0.0"},
        {"0.10", "0.1"},
        {"1e5", "100000.0"},
        {"1E+5", "100000.0"},
        {"12.5e1", "125.0"},
        {"0.0001", "0.0001"},
        {"0.00001", "1e-05"},
        {"1.25e-7", "1.25e-07"},
        {"1e15", "1000000000000000.0"},
        {"1e16", "1e+16"},
        {"1e22", "1e+22"},
        {"1.5e300", "1.5e+300"},
        {"1e-400", "0.0"},
        {"-1e-400", "-0.0"},
        {"5e-324", "5e-324"},
        {"2.5e-324", "5e-324"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"},
        {"0.1000000000000000055511151231257827", "0.1"},
        {"0.30000000000000004", "0.30000000000000004"},
        {"9007199254740993.0", "9007199254740992.0"},
        {"9007199254740993.00000000000000000000000000000001", "9007199254740994.0"},
        {"5.6843418860808015e-14", "5.684341886080802e-14"}, /* 2^-44: rounded up, not to nearest */
        {"9999999999999999.0", "1e+16"},
        {"1e-99999999999999999999", "0.0"},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        assert_python(same[i][0], same[i][1], same[i][1]);
    assert_python("1e400", "Infinity", "inf");
    assert_python("[-1e99999999999999999999]", "[-Infinity]", "[-inf]");
}

static void test_python_json__digits_beyond_double_precision_count(void **state)
{
    (void)state;
    struct nbi_str number = {0};
    /* Halfway between 1 and the next double, then 900 zeros and a last digit that decides. */
    nbi_str_puts(&number, "1.00000000000000011102230246251565404236316680908203125");
    for (int i = 0; i < 900; i++)
        nbi_str_puts(&number, "0");
    assert_python(number.p, "1.0", "1.0");
    nbi_str_puts(&number, "1");
    assert_python(number.p, "1.0000000000000002", "1.0000000000000002");
    number.len = 0;
    nbi_str_puts(&number, "1");
    for (int i = 0; i < 2000; i++)
        nbi_str_puts(&number, "0");
    nbi_str_puts(&number, "e-2000");
    assert_python(number.p, "1.0", "1.0");
    nbi_str_release(&number);
}

static void test_python_json__prints_values_as_python(void **state)
{
    (void)state;
    assert_python("null", "null", "None");
    assert_python("true", "true", "True");
    assert_python("[]", "[]", "[]");
    assert_python("{ }", "{}", "{}");
    assert_python("[1,null,[true,{}],{\"a\":[]}]", "[1, null, [true, {}], {\"a\": []}]",
                  "[1, None, [True, {}], {'a': []}]");
    assert_python("{\"b\":1,\"a\":2,\"b\":{\"c\":3}}", "{\"b\": {\"c\": 3}, \"a\": 2}",
                  "{'b': {'c': 3}, 'a': 2}");
    assert_python("{\"\\u0061\":1,\"\":2,\"a\":3,\"\":4}", "{\"a\": 3, \"\": 4}",
                  "{'a': 3, '': 4}");
}

static void test_python_json__escapes_strings_as_python(void **state)
{
    (void)state;
    assert_python("\"it's\"", "\"it's\"", "it's");
    assert_python("[\"it's\"]", "[\"it's\"]", "[\"it's\"]");
    assert_python("[\"'\\\"\"]", "[\"'\\\"\"]", "['\\'\"']");
    assert_python("[\"\\\"\"]", "[\"\\\"\"]", "['\"']");
    assert_python("[\"\\u0000\\b\\f\\n\\r\\t\\u001b\\u007f\\/\\\\\"]",
                  "[\"\\u0000\\b\\f\\n\\r\\t\\u001b\x7f/\\\\\"]",
                  "['\\x00\\x08\\x0c\\n\\r\\t\\x1b\\x7f/\\\\']");
    /* no-break space, line separator, byte order mark, a private character, an emoji, e acute */
    assert_python("[\"\\u00a0\\u2028\\ufeff\\udbc0\\udc00\\ud83d\\ude42\\u00e9\"]",
                  "[\"\xc2\xa0\xe2\x80\xa8\xef\xbb\xbf\xf4\x80\x80\x80\xf0\x9f\x99\x82\xc3\xa9\"]",
                  "['\\xa0\\u2028\\ufeff\\U00100000\xf0\x9f\x99\x82\xc3\xa9']");
}

static void test_python_json__truth_is_pythons(void **state)
{
    (void)state;
    static const char *const no[] = {"null", "false",  "0",    "-0",  "0.0",
                                     "-0e9", "1e-400", "\"\"", "[ ]", "{ }"};
    static const char *const yes[] = {"true",  "1",      "-1",    "1e-300",       "1e999",
                                      "\"0\"", "[null]", "[0.0]", "{\"\": false}"};
    struct nbi_jspan v;
    for (size_t i = 0; i < sizeof no / sizeof *no; i++) {
        assert_ok(nbi_jscan(&v, no[i], strlen(no[i])));
        assert_false(nbi_py_truth(v));
    }
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++) {
        assert_ok(nbi_jscan(&v, yes[i], strlen(yes[i])));
        assert_true(nbi_py_truth(v));
    }
    assert_false(nbi_py_truth((struct nbi_jspan){0}));
}

/* ---- ChatML ---- */

static void test_chatml__renders_text_and_ranges(void **state)
{
    (void)state;
    expect(CHATML, CHAT4(SYSTEM("Be brief."), USER("Hi"), ASSISTANT("Hello\\n"), USER("Bye")),
           "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
           "<|im_start|>assistant\nHello\n<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n",
           "Hello\n<|im_end|>");
    expect(CHATML,
           "{\"add_generation_prompt\": 1, \"messages\": [{\"content\": \"\", "
           "\"role\": \"narrator\"}], \"tools\": [], \"enable_thinking\": false}",
           "<|im_start|>narrator\n<|im_end|>\n<|im_start|>assistant\n", "");
}

static void test_chatml__rejects_tools(void **state)
{
    (void)state;
    struct nbi_rendered r;
    assert_fails(render(CHATML, "{\"messages\": [" USER("x") "], \"tools\": [{}]}", &r),
                 NB_EUNSUPPORTED, "has no tools");
    assert_fails(render(CHATML,
                        CHAT("{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [1]}"),
                        &r),
                 NB_EUNSUPPORTED, "messages[0]: the chat template of this model has no tool calls");
    expect_error(CHATML, CHAT2(USER("x"), "{\"role\": \"user\"}"),
                 "messages[1]: 'content' is missing, a string is expected");
    expect_error(CHATML, CHAT("{\"role\": null, \"content\": \"\"}"), "'role' is null");
    expect_error(CHATML, CHAT(), "'messages' is empty");
    expect_error(CHATML, "{\"messages\": \"x\"}", "'messages' is a string");
}

/* ---- Qwen3 ---- */

#define TOOLS_HEAD                                                                                 \
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "     \
    "provided with function signatures within <tools></tools> XML tags:\n<tools>"
#define TOOLS_TAIL                                                                                 \
    "\n</tools>\n\nFor each function call, return a json object with function name and "           \
    "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": "                 \
    "<function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n"

static void test_qwen3__renders_system_and_tools(void **state)
{
    (void)state;
    expect(NO_THINKING, CHAT2(SYSTEM("A"), SYSTEM("B")),
           "<|im_start|>system\nA<|im_end|>\n<|im_start|>system\nB<|im_end|>\n", "");
    expect(HYBRID, "{\"messages\": [" SYSTEM("A") "], \"tools\": [{\"x\":1}, \"\\u00e9\"]}",
           "<|im_start|>system\nA\n\n" TOOLS_HEAD "\n{\"x\": 1}\n\"\xc3\xa9\"" TOOLS_TAIL, "");
    /* Python iterates over the keys of a dict and the characters of a string. */
    expect(NO_THINKING, "{\"messages\": [{}], \"tools\": {\"a\": 1, \"b\": 2, \"a\": 3}}",
           "<|im_start|>system\n" TOOLS_HEAD "\n\"a\"\n\"b\"" TOOLS_TAIL, "");
    expect(NO_THINKING, "{\"messages\": \"?\", \"tools\": \"\\u00e9\\n\"}",
           "<|im_start|>system\n" TOOLS_HEAD "\n\"\xc3\xa9\"\n\"\\n\"" TOOLS_TAIL, "");
    expect(HYBRID, "{\"messages\": [7], \"tools\": 0}", "", "");
}

static void test_qwen3__tolerates_messages_without_role_or_text(void **state)
{
    (void)state;
    expect(NO_THINKING,
           CHAT("null, [], \"user\", {\"role\": \"User\"}, {\"role\": \"user\", \"content\": [1]}, "
                "{\"content\": \"lost\", \"role\": 1}, {\"role\": \"assistant\"}"),
           "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n", "<|im_end|>");
    expect(HYBRID, CHAT4(TOOL("1"), TOOL("2"), USER("x"), TOOL("3")),
           "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
           "</tool_response><|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>user\n"
           "<tool_response>\n3\n</tool_response><|im_end|>\n",
           "");
}

static void test_qwen3__renders_tool_calls(void **state)
{
    (void)state;
#define CALLS(content, ...)                                                                        \
    CHAT("{\"role\": \"assistant\", \"content\": " content ", \"tool_calls\": [" __VA_ARGS__ "]}")
    expect(NO_THINKING,
           CALLS("\"ok\"", "{\"function\": {\"name\": \"f\", \"arguments\": {\"a\":[1,2.50]}}},"
                           "{\"function\": {}, \"name\": \"g\", \"arguments\": \"as it is\"}"),
           "<|im_start|>assistant\nok\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, "
           "2.5]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": as it is}\n"
           "</tool_call><|im_end|>\n",
           "ok\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, 2.5]}}\n</tool_call>\n"
           "<tool_call>\n{\"name\": \"g\", \"arguments\": as it is}\n</tool_call><|im_end|>");
    expect(NO_THINKING,
           CALLS("null", "{\"arguments\": null}, {\"name\": [true, \"x\"], \"arguments\": 1e400}"),
           "<|im_start|>assistant\n<tool_call>\n{\"name\": \"\", \"arguments\": null}\n"
           "</tool_call>\n<tool_call>\n{\"name\": \"[True, 'x']\", \"arguments\": Infinity}\n"
           "</tool_call><|im_end|>\n",
           "<tool_call>\n{\"name\": \"\", \"arguments\": null}\n</tool_call>\n<tool_call>\n"
           "{\"name\": \"[True, 'x']\", \"arguments\": Infinity}\n</tool_call><|im_end|>");
    expect_error(HYBRID, CALLS("\"\"", "{\"arguments\": 1}, {\"name\": \"f\"}"),
                 "messages[0]: tool_calls[1] has no 'arguments'");
    expect_error(HYBRID, CALLS("\"\"", "{\"arguments\": 1, \"function\": [0]}"),
                 "has no 'arguments'");
}

static void test_qwen3__errors_name_the_message(void **state)
{
    (void)state;
    for (int k = NBI_CHAT_QWEN3_2507; k <= NBI_CHAT_QWEN3; k++) {
        enum nbi_chat_kind kind = (enum nbi_chat_kind)k;
        expect_error(kind, "[]", "the request is an array, an object is expected");
        expect_error(kind, "{}", "'messages' is missing, a list is expected");
        expect_error(kind, "{\"messages\": {\"0\": 1}}", "'messages' is an object");
        expect_error(kind, CHAT(), "'messages' is empty");
        expect_error(kind, "{\"messages\": \"\"}", "'messages' is empty");
        expect_error(kind, CHAT("{\"role\": \"system\", \"content\": [\"x\"]}"),
                     "messages[0]: 'content' is an array, a string is expected");
        expect_error(kind, "{\"messages\": [{}], \"tools\": true}", "'tools' is true");
        expect_error(kind, CHAT("{\"role\": \"assistant\", \"tool_calls\": {\"a\": 1}}"),
                     "messages[0]: 'tool_calls' is an object, a list is expected");
    }
}

/* ---- thinking ---- */

#define THINK  "<think>\\nwhy\\n</think>\\n\\n"
#define ANSWER "<|im_start|>assistant\n"

static void test_thinking__is_kept_only_after_the_last_question(void **state)
{
    (void)state;
    const char *request = CHAT4(USER("1"), ASSISTANT(THINK "a"), USER("2"), ASSISTANT(THINK "b"));
    expect(HYBRID, request,
           "<|im_start|>user\n1<|im_end|>\n" ANSWER
           "a<|im_end|>\n<|im_start|>user\n2<|im_end|>\n" ANSWER
           "<think>\nwhy\n</think>\n\nb<|im_end|>\n",
           "a<|im_end|>~<think>\nwhy\n</think>\n\nb<|im_end|>");
    expect(NO_THINKING, request,
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "<think>\nwhy\n</think>\n\na<|im_end|>\n"
           "<|im_start|>user\n2<|im_end|>\n" ANSWER "<think>\nwhy\n</think>\n\nb<|im_end|>\n",
           "<think>\nwhy\n</think>\n\na<|im_end|>~<think>\nwhy\n</think>\n\nb<|im_end|>");
    /* Without a question no answer keeps its reasoning. */
    expect(HYBRID, CHAT(ASSISTANT(THINK "a")), ANSWER "a<|im_end|>\n", "a<|im_end|>");
}

static void test_thinking__empty_block_belongs_to_the_prompt(void **state)
{
    (void)state;
    expect(HYBRID, CHAT2(USER("1"), ASSISTANT("\\n\\na\\n")),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "<think>\n\n</think>\n\na\n<|im_end|>\n",
           "a\n<|im_end|>");
    /* Before the last message a block appears only if there is reasoning; newlines count. */
    expect(HYBRID,
           CHAT4(USER("1"), ASSISTANT("a"),
                 "{\"role\": \"assistant\", \"content\": \"b\", \"reasoning_content\": \"\\n\"}",
                 TOOL("x")),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "a<|im_end|>\n" ANSWER
           "<think>\n\n</think>\n\nb<|im_end|>\n<|im_start|>user\n<tool_response>\nx\n"
           "</tool_response><|im_end|>\n",
           "a<|im_end|>~b<|im_end|>");
    /* A think block in the content that the template did not write belongs to the answer. */
    expect(NO_THINKING, CHAT2(USER("1"), ASSISTANT("<think>\\n\\n</think>\\n\\na")),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "<think>\n\n</think>\n\na<|im_end|>\n",
           "<think>\n\n</think>\n\na<|im_end|>");
}

static void test_thinking__reasoning_is_found_in_content_or_member(void **state)
{
    (void)state;
    expect(HYBRID, CHAT2(USER("1"), ASSISTANT("x<think>y<think>\\nz\\n\\n</think>p</think>\\nq ")),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "<think>\nz\n</think>\n\nq <|im_end|>\n",
           "<think>\nz\n</think>\n\nq <|im_end|>");
    expect(HYBRID,
           CHAT2(USER("1"), "{\"role\": \"assistant\", \"reasoning_content\": \"\\nr\\n\", "
                            "\"content\": \"\\n<think>s</think>t\"}"),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER
           "<think>\nr\n</think>\n\n<think>s</think>t<|im_end|>\n",
           "<think>\nr\n</think>\n\n<think>s</think>t<|im_end|>");
    /* Newlines that are stripped after the block still cause one before a tool call. */
    expect(HYBRID,
           CHAT2(USER("1"), "{\"role\": \"assistant\", \"reasoning_content\": \"r\", \"content\": "
                            "\"\\n\", \"tool_calls\": [{\"name\": \"f\", \"arguments\": {}}]}"),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "<think>\nr\n</think>\n\n\n<tool_call>\n"
           "{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n",
           "<think>\nr\n</think>\n\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n"
           "</tool_call><|im_end|>");
}

static void test_thinking__tool_responses_are_not_questions(void **state)
{
    (void)state;
    expect(HYBRID,
           CHAT4(USER("1"), ASSISTANT(THINK "a"), USER("<tool_response>r</tool_response>"),
                 ASSISTANT("b")),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "<think>\nwhy\n</think>\n\na<|im_end|>\n"
           "<|im_start|>user\n<tool_response>r</tool_response><|im_end|>\n" ANSWER
           "<think>\n\n</think>\n\nb<|im_end|>\n",
           "<think>\nwhy\n</think>\n\na<|im_end|>~b<|im_end|>");
    expect(HYBRID,
           CHAT4(USER("1"), ASSISTANT(THINK "a"), USER("<tool_response>r</tool_response> "),
                 ASSISTANT("b")),
           "<|im_start|>user\n1<|im_end|>\n" ANSWER "a<|im_end|>\n<|im_start|>user\n"
           "<tool_response>r</tool_response> <|im_end|>\n" ANSWER
           "<think>\n\n</think>\n\nb<|im_end|>\n",
           "a<|im_end|>~b<|im_end|>");
}

static void test_thinking__prompt_depends_on_enable_thinking(void **state)
{
    (void)state;
#define PROMPT(add, think)                                                                         \
    "{\"messages\": [{}], \"add_generation_prompt\": " add ", \"enable_thinking\": " think "}"
    expect(HYBRID, PROMPT("true", "false"), ANSWER "<think>\n\n</think>\n\n", "");
    expect(HYBRID, PROMPT("true", "true"), ANSWER, "");
    expect(HYBRID, PROMPT("[0]", "0"), ANSWER, "");
    expect(HYBRID, PROMPT("\"no\"", "null"), ANSWER, "");
    expect(HYBRID, PROMPT("{}", "false"), "", "");
    expect(HYBRID, PROMPT("0.0", "false"), "", "");
    expect(NO_THINKING, PROMPT("true", "false"), ANSWER, "");
}

/* ---- models ---- */

static char logged[512];

static void keep_log(void *ctx, enum nb_log_level level, const char *line)
{
    (void)ctx;
    snprintf(logged, sizeof logged, "%d %s", (int)level, line);
}

/* Opens a model of the test directory and checks the log line about its template: none (level
 * NULL), or its level and the words after the path. */
static void assert_opens(const char *model, const char *model_dir, const char *level,
                         const char *words)
{
    struct nb_chat *chat;
    logged[0] = 0;
    nb_log_set_sink(keep_log, NULL);
    assert_ok(nb_chat_open(&chat, model, model_dir));
    nb_log_set_sink(NULL, NULL);
    assert_string_equal(nb_chat_name(chat), "chatml");
    assert_int_equal(nbi_chat_kind(chat), NBI_CHAT_CHATML);
    nb_chat_close(chat);
    assert_int_equal(strncmp(logged, level, strlen(level)), 0);
    assert_non_null(strstr(logged, words));
    if (!*level)
        assert_string_equal(logged, "");
}

static void test_open__finds_templates_of_all_model_forms(void **state)
{
    (void)state;
    const char *dir = test_path("");
    assert_opens(dir, NULL, "2 '", "' has no chat template; plain ChatML is used");
    put("tokenizer_config.json", "{\"chat_template\": \"{{ messages }}\"}");
    assert_opens(dir, NULL, "1 the chat template of '", "' is not known; plain ChatML is used");
    put("chat_template.jinja", nbi_chatml_template);
    assert_opens(dir, NULL, "", "");
    put("w.dat", "");
    assert_opens(test_path("w.dat"), NULL, "", "");
    assert_opens(NB_TEST_SOURCE "/golden/harmless/chat_template_code.gguf", NULL, "1 ",
                 "not known");
    assert_opens(NB_TEST_SOURCE "/golden/harmless/vocab_byte_token.gguf", NULL, "2 ",
                 "has no chat");
    assert_opens(NB_TEST_SOURCE "/golden/harmless/vocab_byte_token.gguf", dir, "", "");
}

static void test_open__errors_name_the_file(void **state)
{
    (void)state;
    struct nb_chat *chat;
    assert_fails(nb_chat_open(&chat, test_path("none"), NULL), NB_ENOTFOUND, "cannot open");
    assert_null(chat);
    put("notes.txt", "");
    assert_fails(nb_chat_open(&chat, test_path("notes.txt"), NULL), NB_EUNSUPPORTED,
                 "cannot tell what");
    assert_fails(nb_chat_open(&chat, test_path(""), test_path("notes.txt")), NB_ENOTFOUND,
                 "is not a directory");
    put("tokenizer_config.json", "{");
    assert_fails(nb_chat_open(&chat, test_path(""), NULL), NB_EFORMAT, "tokenizer_config.json");
    put("broken.gguf", "GGUX");
    assert_fails(nb_chat_open(&chat, test_path("broken.gguf"), NULL), NB_EFORMAT, "broken.gguf");
    nb_chat_close(NULL);
}

static void test_open__recognises_our_chatml_template(void **state)
{
    (void)state;
    char text[2048];
    enum nbi_chat_kind kind = NBI_CHAT_QWEN3;
    assert_true(nbi_chat_recognise(&kind, nbi_chatml_template));
    assert_int_equal(kind, NBI_CHAT_CHATML);
    snprintf(text, sizeof text, "%s \r\n\n", nbi_chatml_template);
    assert_true(nbi_chat_recognise(&kind, text));
    text[0] = ' ';
    assert_false(nbi_chat_recognise(&kind, text));
    assert_false(nbi_chat_recognise(&kind, ""));
}

static void test_render__caller_owns_the_text(void **state)
{
    (void)state;
    struct nb_chat *chat;
    char *text;
    size_t len;
    put("chat_template.jinja", nbi_chatml_template);
    put("tokenizer_config.json", "{}");
    assert_ok(nb_chat_open(&chat, test_path(""), NULL));
    const char request[] = " {\"messages\": [" USER("a\\u0000b") "]}\n";
    assert_ok(nb_chat_render(chat, request, sizeof request - 1, &text, &len));
    assert_int_equal(len, 31);
    assert_memory_equal(text, "<|im_start|>user\na\0b<|im_end|>\n", 32);
    free(text);
    assert_fails(nb_chat_render(chat, "{\"messages\": [\n", 15, &text, &len), NB_EFORMAT,
                 "invalid JSON in line 2");
    assert_null(text);
    nb_chat_close(chat);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_python_json__prints_numbers_as_python),
        cmocka_unit_test(test_python_json__digits_beyond_double_precision_count),
        cmocka_unit_test(test_python_json__prints_values_as_python),
        cmocka_unit_test(test_python_json__escapes_strings_as_python),
        cmocka_unit_test(test_python_json__truth_is_pythons),
        cmocka_unit_test(test_chatml__renders_text_and_ranges),
        cmocka_unit_test(test_chatml__rejects_tools),
        cmocka_unit_test(test_qwen3__renders_system_and_tools),
        cmocka_unit_test(test_qwen3__tolerates_messages_without_role_or_text),
        cmocka_unit_test(test_qwen3__renders_tool_calls),
        cmocka_unit_test(test_qwen3__errors_name_the_message),
        cmocka_unit_test(test_thinking__is_kept_only_after_the_last_question),
        cmocka_unit_test(test_thinking__empty_block_belongs_to_the_prompt),
        cmocka_unit_test(test_thinking__reasoning_is_found_in_content_or_member),
        cmocka_unit_test(test_thinking__tool_responses_are_not_questions),
        cmocka_unit_test(test_thinking__prompt_depends_on_enable_thinking),
        cmocka_unit_test_setup_teardown(test_open__finds_templates_of_all_model_forms,
                                        make_test_dir, remove_test_dir),
        cmocka_unit_test_setup_teardown(test_open__errors_name_the_file, make_test_dir,
                                        remove_test_dir),
        cmocka_unit_test(test_open__recognises_our_chatml_template),
        cmocka_unit_test_setup_teardown(test_render__caller_owns_the_text, make_test_dir,
                                        remove_test_dir),
    };
    return cmocka_run_group_tests_name("chat_template", tests, NULL, NULL);
}
