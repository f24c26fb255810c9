/* chat_template.c - recognises chat templates and renders conversations with them.
 *
 * The rendering functions follow the Jinja templates statement by statement and reproduce their
 * quirks; a comment marks each one. */
#include "tokenizer/chat_template.h"

#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "tokenizer/python_json.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocab.h"

const struct nbi_chat_token nbi_chat_tokens[NBI_CHAT_TOKENS] = {
    {NBI_END_OF_TEXT, true},        {NBI_IM_START, true},         {NBI_IM_END, true},
    {"<|object_ref_start|>", true}, {"<|object_ref_end|>", true}, {"<|box_start|>", true},
    {"<|box_end|>", true},          {"<|quad_start|>", true},     {"<|quad_end|>", true},
    {"<|vision_start|>", true},     {"<|vision_end|>", true},     {"<|vision_pad|>", true},
    {"<|image_pad|>", true},        {"<|video_pad|>", true},      {"<tool_call>", false},
    {"</tool_call>", false},        {"<|fim_prefix|>", false},    {"<|fim_middle|>", false},
    {"<|fim_suffix|>", false},      {"<|fim_pad|>", false},       {"<|repo_name|>", false},
    {"<|file_sep|>", false},        {"<tool_response>", false},   {"</tool_response>", false},
    {NB_THINK_START, false},        {NB_THINK_END, false},
};

const char nbi_chatml_template[] =
    "{%- if not messages %}\n"
    "    {{- raise_exception('there are no messages') }}\n"
    "{%- endif %}\n"
    "{%- if tools %}\n"
    "    {{- raise_exception('this template has no tools') }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.tool_calls %}\n"
    "        {{- raise_exception('this template has no tool calls') }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n";

/* ---- recognising ---- */

/* Length and FNV-1a hash of published templates without trailing white space. */
static const struct {
    enum nbi_chat_kind kind;
    size_t len;
    uint64_t hash;
} known[] = {
    {NBI_CHAT_QWEN3_2507, 2630, 0x3751FE8EA48448ABu},
    {NBI_CHAT_QWEN3, 4168, 0x959A4551391A6549u},
};

static size_t trimmed_length(const char *text)
{
    size_t n = strlen(text);
    while (n > 0 && strchr(" \t\n\v\f\r", text[n - 1]))
        n--;
    return n;
}

bool nbi_chat_recognise(enum nbi_chat_kind *kind, const char *template)
{
    size_t len = trimmed_length(template);
    uint64_t hash = nbi_fnv1a(template, len);
    *kind = NBI_CHAT_CHATML;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].len == len && known[i].hash == hash) {
            *kind = known[i].kind;
            return true;
        }
    return len == trimmed_length(nbi_chatml_template) &&
           memcmp(template, nbi_chatml_template, len) == 0;
}

/* ---- pieces of text ---- */

struct piece {
    const char *p;
    size_t len;
};

static struct piece piece_of(const struct nbi_str *s)
{
    return (struct piece){nbi_str_text(s), s->len};
}

/* Python's lstrip('\n') and rstrip('\n'). */
static struct piece lstrip(struct piece s)
{
    for (; s.len > 0 && *s.p == '\n'; s.p++)
        s.len--;
    return s;
}

static struct piece rstrip(struct piece s)
{
    while (s.len > 0 && s.p[s.len - 1] == '\n')
        s.len--;
    return s;
}

/* Python's s.split(separator)[0] and s.split(separator)[-1]. */
static struct piece before_first(struct piece s, const char *separator)
{
    const char *at = memmem(s.p, s.len, separator, strlen(separator));
    return at ? (struct piece){s.p, (size_t)(at - s.p)} : s;
}

static struct piece after_last(struct piece s, const char *separator)
{
    const char *at, *end = s.p + s.len;
    while ((at = memmem(s.p, s.len, separator, strlen(separator)))) {
        s.p = at + strlen(separator);
        s.len = (size_t)(end - s.p);
    }
    return s;
}

static bool is_wrapped(struct piece s, const char *front, const char *back)
{
    size_t n = strlen(front), m = strlen(back);
    return s.len >= n && s.len >= m && memcmp(s.p, front, n) == 0 &&
           memcmp(s.p + s.len - m, back, m) == 0;
}

/* ---- the messages ---- */

enum role { ROLE_OTHER, ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL };

struct message {
    struct nbi_jspan value; /* may be of any type */
    struct nbi_jspan content;
    enum role role;
};

struct render {
    struct nbi_jspan messages_json;
    enum nbi_chat_kind kind;
    struct message *messages;
    size_t count;
    size_t last_query; /* the user's last question; only answers after it keep their reasoning */
    struct nbi_str content, reasoning; /* of the current message */
    struct nbi_rendered *out;
};

static enum role role_of(struct nbi_jspan role)
{
    static const char *const names[] = {
        [ROLE_SYSTEM] = "system",
        [ROLE_USER] = "user",
        [ROLE_ASSISTANT] = "assistant",
        [ROLE_TOOL] = "tool",
    };
    for (int i = ROLE_SYSTEM; i <= ROLE_TOOL; i++)
        if (nbi_jequals(role, names[i]))
            return (enum role)i;
    return ROLE_OTHER;
}

static enum nb_status read_messages(struct render *r)
{
    struct nbi_jspan list = nbi_jget(r->messages_json, "messages"), key, value;
    /* Jinja iterates over a string character by character; each is a message without a role. */
    bool text = nbi_jtype(list) == NBI_JSTRING && r->kind != NBI_CHAT_CHATML;
    if (nbi_jtype(list) != NBI_JARRAY && !text)
        return nbi_fail(NB_EFORMAT, "'messages' is %s, a list is expected", nbi_jtype_text(list));
    if (!nbi_py_truth(list))
        return nbi_fail(NB_EFORMAT, "'messages' is empty");
    size_t n = nbi_jcount(list);
    r->messages = calloc(n + 1, sizeof *r->messages);
    r->out->ranges = calloc(n + 1, sizeof *r->out->ranges);
    if (!r->messages || !r->out->ranges)
        return nbi_fail_memory("messages", n * sizeof *r->messages);
    struct nbi_jiter it;
    nbi_jiter_init(&it, list);
    while (nbi_jiter_next(&it, &key, &value))
        r->messages[r->count++] = (struct message){
            .value = value,
            .content = nbi_jget(value, "content"),
            .role = role_of(nbi_jget(value, "role")),
        };
    return NB_OK;
}

/* ---- shared by all templates ---- */

static void put(struct render *r, const char *text)
{
    nbi_str_puts(&r->out->text, text);
}

static void put_piece(struct render *r, struct piece s)
{
    nbi_str_append(&r->out->text, s.p, s.len);
}

static void load(struct nbi_str *s, struct nbi_jspan string)
{
    s->len = 0;
    nbi_jstring(string, s);
}

static void add_range(struct render *r, size_t start)
{
    struct nbi_rendered *out = r->out;
    out->ranges[out->range_count++] = (struct nbi_range){start, out->text.len};
}

static enum nb_status expect_string(struct nbi_jspan v, size_t i, const char *what)
{
    if (nbi_jtype(v) == NBI_JSTRING)
        return NB_OK;
    return nbi_fail(NB_EFORMAT, "messages[%zu]: '%s' is %s, a string is expected", i, what,
                    nbi_jtype_text(v));
}

static bool wants_prompt(const struct render *r)
{
    return nbi_py_truth(nbi_jget(r->messages_json, "add_generation_prompt"));
}

/* ---- ChatML ---- */

static enum nb_status put_chatml(struct render *r)
{
    if (nbi_py_truth(nbi_jget(r->messages_json, "tools")))
        return nbi_fail(NB_EUNSUPPORTED, "the chat template of this model has no tools");
    for (size_t i = 0; i < r->count; i++) {
        const struct message *m = &r->messages[i];
        struct nbi_jspan role = nbi_jget(m->value, "role");
        if (nbi_py_truth(nbi_jget(m->value, "tool_calls")))
            return nbi_fail(NB_EUNSUPPORTED,
                            "messages[%zu]: the chat template of this model has no tool calls", i);
        NBI_TRY(expect_string(role, i, "role"));
        NBI_TRY(expect_string(m->content, i, "content"));
        put(r, NBI_IM_START);
        nbi_jstring(role, &r->out->text);
        put(r, "\n");
        size_t start = r->out->text.len;
        nbi_jstring(m->content, &r->out->text);
        put(r, NBI_IM_END);
        if (m->role == ROLE_ASSISTANT)
            add_range(r, start);
        put(r, "\n");
    }
    if (wants_prompt(r))
        put(r, NBI_IM_START "assistant\n");
    return NB_OK;
}

/* ---- Qwen3: the system message and the tools ---- */

static const char tools_head[] =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>";

static const char tools_tail[] =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" NBI_IM_END "\n";

static enum nb_status put_system(struct render *r)
{
    struct nbi_jspan tools = nbi_jget(r->messages_json, "tools");
    bool with_tools = nbi_py_truth(tools);
    bool system = r->count > 0 && r->messages[0].role == ROLE_SYSTEM;
    if (system)
        NBI_TRY(expect_string(r->messages[0].content, 0, "content"));
    if (system || with_tools)
        put(r, NBI_IM_START "system\n");
    if (system) {
        nbi_jstring(r->messages[0].content, &r->out->text);
        put(r, with_tools ? "\n\n" : NBI_IM_END "\n");
    }
    if (!with_tools)
        return NB_OK;
    put(r, tools_head);
    if (!nbi_py_json_each(&r->out->text, tools, "\n"))
        return nbi_fail(NB_EFORMAT, "'tools' is %s, a list is expected", nbi_jtype_text(tools));
    put(r, tools_tail);
    return NB_OK;
}

/* ---- Qwen3: messages ---- */

static enum nb_status put_tool_call(struct render *r, struct nbi_jspan call, size_t i, size_t n)
{
    struct nbi_str *text = &r->out->text;
    struct nbi_jspan function = nbi_jget(call, "function");
    if (nbi_py_truth(function))
        call = function;
    struct nbi_jspan arguments = nbi_jget(call, "arguments");
    put(r, "<tool_call>\n{\"name\": \"");
    nbi_py_str(text, nbi_jget(call, "name")); /* quirk: not escaped, so this may be invalid JSON */
    put(r, "\", \"arguments\": ");
    if (nbi_jtype(arguments) == NBI_JNONE)
        return nbi_fail(NB_EFORMAT, "messages[%zu]: tool_calls[%zu] has no 'arguments'", i, n);
    if (nbi_jtype(arguments) == NBI_JSTRING)
        nbi_jstring(arguments, text);
    else
        nbi_py_json(text, arguments);
    put(r, "}\n</tool_call>");
    return NB_OK;
}

static enum nb_status put_tool_calls(struct render *r, size_t i, bool has_content)
{
    struct nbi_jspan calls = nbi_jget(r->messages[i].value, "tool_calls"), key, call;
    struct nbi_jiter it;
    if (!nbi_py_truth(calls))
        return NB_OK;
    if (nbi_jtype(calls) != NBI_JARRAY)
        return nbi_fail(NB_EFORMAT, "messages[%zu]: 'tool_calls' is %s, a list is expected", i,
                        nbi_jtype_text(calls));
    nbi_jiter_init(&it, calls);
    for (size_t n = 0; nbi_jiter_next(&it, &key, &call); n++) {
        if (n > 0 || has_content)
            put(r, "\n");
        NBI_TRY(put_tool_call(r, call, i, n));
    }
    return NB_OK;
}

/* Returns the reasoning of an assistant's message: its "reasoning_content", else what the content
 * has between the tags. In the second case *content becomes the text after the last "</think>". */
static struct piece take_reasoning(struct render *r, const struct message *m, struct piece *content)
{
    static const char open[] = NB_THINK_START, close[] = NB_THINK_END;
    struct nbi_jspan own = nbi_jget(m->value, "reasoning_content");
    if (nbi_jtype(own) == NBI_JSTRING) {
        load(&r->reasoning, own);
        return piece_of(&r->reasoning);
    }
    struct piece head = before_first(*content, close);
    if (head.len == content->len)
        return (struct piece){"", 0};
    *content = lstrip(after_last(*content, close));
    return lstrip(after_last(rstrip(head), open));
}

static enum nb_status put_assistant(struct render *r, size_t i)
{
    struct piece content = piece_of(&r->content), reasoning = {"", 0}, shown;
    bool thinks = false;
    if (r->kind == NBI_CHAT_QWEN3) {
        reasoning = take_reasoning(r, &r->messages[i], &content);
        thinks = i > r->last_query && (i + 1 == r->count || reasoning.len > 0);
    }
    shown = content;
    put(r, NBI_IM_START "assistant\n");
    size_t start = r->out->text.len;
    if (thinks) {
        reasoning = rstrip(lstrip(reasoning));
        put(r, NB_THINK_START "\n");
        put_piece(r, reasoning);
        put(r, "\n" NB_THINK_END "\n\n");
        if (reasoning.len == 0)
            start = r->out->text.len;
        shown = lstrip(content);
    }
    put_piece(r, shown);
    /* Quirk: newlines stripped from the output still count as content here. */
    NBI_TRY(put_tool_calls(r, i, content.len > 0));
    put(r, NBI_IM_END);
    add_range(r, start);
    put(r, "\n");
    return NB_OK;
}

static bool is_tool(const struct render *r, size_t i)
{
    return i < r->count && r->messages[i].role == ROLE_TOOL;
}

/* Consecutive tool responses form one message of the user. */
static void put_tool_response(struct render *r, size_t i)
{
    if (i == 0 || !is_tool(r, i - 1))
        put(r, NBI_IM_START "user");
    put(r, "\n<tool_response>\n");
    put_piece(r, piece_of(&r->content));
    put(r, "\n</tool_response>");
    if (!is_tool(r, i + 1))
        put(r, NBI_IM_END "\n");
}

static enum nb_status put_message(struct render *r, size_t i)
{
    const struct message *m = &r->messages[i];
    load(&r->content, m->content); /* empty unless it is a string */
    switch (m->role) {
    case ROLE_SYSTEM:
    case ROLE_USER:
        if (m->role == ROLE_SYSTEM && i == 0)
            break; /* put_system() wrote it */
        put(r, m->role == ROLE_USER ? NBI_IM_START "user\n" : NBI_IM_START "system\n");
        put_piece(r, piece_of(&r->content));
        put(r, NBI_IM_END "\n");
        break;
    case ROLE_ASSISTANT:
        return put_assistant(r, i);
    case ROLE_TOOL:
        put_tool_response(r, i);
        break;
    case ROLE_OTHER:
        break; /* quirk: the template ignores other roles */
    }
    return NB_OK;
}

/* Index of the user's last message that does not consist of a tool response; r->count if there is
 * none, so that no answer keeps its reasoning. */
static size_t find_last_query(struct render *r)
{
    for (size_t i = r->count; i-- > 0;) {
        const struct message *m = &r->messages[i];
        if (m->role != ROLE_USER || nbi_jtype(m->content) != NBI_JSTRING)
            continue;
        load(&r->content, m->content);
        if (!is_wrapped(piece_of(&r->content), "<tool_response>", "</tool_response>"))
            return i;
    }
    return r->count;
}

static enum nb_status put_qwen3(struct render *r)
{
    NBI_TRY(put_system(r));
    r->last_query = find_last_query(r);
    for (size_t i = 0; i < r->count; i++)
        NBI_TRY(put_message(r, i));
    if (!wants_prompt(r))
        return NB_OK;
    put(r, NBI_IM_START "assistant\n");
    if (r->kind == NBI_CHAT_QWEN3 &&
        nbi_jtype(nbi_jget(r->messages_json, "enable_thinking")) == NBI_JFALSE)
        put(r, NB_THINK_START "\n\n" NB_THINK_END "\n\n");
    return NB_OK;
}

/* ---- rendering ---- */

void nbi_rendered_release(struct nbi_rendered *r)
{
    if (!r)
        return;
    nbi_str_release(&r->text);
    free(r->ranges);
    *r = (struct nbi_rendered){0};
}

static enum nb_status render_messages(struct render *r)
{
    if (nbi_jtype(r->messages_json) != NBI_JOBJECT)
        return nbi_fail(NB_EFORMAT, "the request is %s, an object is expected",
                        nbi_jtype_text(r->messages_json));
    NBI_TRY(read_messages(r));
    NBI_TRY(r->kind == NBI_CHAT_CHATML ? put_chatml(r) : put_qwen3(r));
    r->out->text.failed = r->out->text.failed || r->content.failed || r->reasoning.failed;
    return nbi_str_status(&r->out->text);
}

enum nb_status nbi_chat_render(enum nbi_chat_kind kind, struct nbi_jspan messages_json,
                               struct nbi_rendered *out)
{
    struct render r = {.messages_json = messages_json, .kind = kind, .out = out};
    *out = (struct nbi_rendered){0};
    enum nb_status rc = render_messages(&r);
    if (rc != NB_OK)
        nbi_rendered_release(out);
    nbi_str_release(&r.content);
    nbi_str_release(&r.reasoning);
    free(r.messages);
    return rc;
}

/* ---- the template of a model ---- */

struct nb_chat {
    enum nbi_chat_kind kind;
};

static void choose(struct nb_chat *chat, const char *template, const char *model)
{
    chat->kind = NBI_CHAT_CHATML;
    if (!template)
        nbi_log(NB_LOG_INFO, "'%s' has no chat template; plain ChatML is used", model);
    else if (!nbi_chat_recognise(&chat->kind, template))
        nbi_log(NB_LOG_WARN, "the chat template of '%s' is not known; plain ChatML is used", model);
}

static enum nb_status open_gguf(struct nb_chat *chat, const char *path)
{
    struct nbi_store *store;
    char *template = NULL;
    NBI_TRY(nbi_store_open(&store, path));
    enum nb_status rc = nbi_gguf_string(store, "tokenizer.chat_template", &template);
    if (rc == NB_OK || rc == NB_ENOTFOUND) {
        rc = NB_OK;
        choose(chat, template, path);
    }
    free(template);
    nbi_store_close(store);
    return nbi_context(rc, "chat template of '%s'", path);
}

static enum nb_status open_dir(struct nb_chat *chat, const char *dir, const char *model)
{
    struct nbi_vocab v;
    nbi_vocab_init(&v);
    enum nb_status rc = nbi_vocab_read_config(&v, dir);
    if (rc == NB_OK)
        choose(chat, v.chat_template, model);
    nbi_vocab_release(&v);
    return rc;
}

static enum nb_status open_model(struct nb_chat *chat, const char *model, const char *model_dir)
{
    struct nbi_tokenizer_source source;
    NBI_TRY(nbi_tokenizer_source(model, model_dir, &source));
    char *dir = source.kind == NBI_TOKENIZER_JSON ? nbi_path_dir(source.path) : NULL;
    enum nb_status rc = source.kind == NBI_TOKENIZER_GGUF
                            ? open_gguf(chat, source.path)
                            : open_dir(chat, dir ? dir : source.path, source.path);
    free(dir);
    free(source.path);
    return rc;
}

enum nb_status nb_chat_open(struct nb_chat **out, const char *model, const char *model_dir)
{
    *out = NULL;
    struct nb_chat *chat = calloc(1, sizeof *chat);
    if (!chat)
        return nbi_fail_memory("chat template", sizeof *chat);
    enum nb_status rc = open_model(chat, model, model_dir);
    if (rc != NB_OK) {
        free(chat);
        return rc;
    }
    *out = chat;
    return NB_OK;
}

void nb_chat_close(struct nb_chat *chat)
{
    free(chat);
}

enum nbi_chat_kind nbi_chat_kind(const struct nb_chat *chat)
{
    return chat->kind;
}

const char *nb_chat_name(const struct nb_chat *chat)
{
    static const char *const names[] = {
        [NBI_CHAT_CHATML] = "chatml",
        [NBI_CHAT_QWEN3_2507] = "qwen3-2507",
        [NBI_CHAT_QWEN3] = "qwen3",
    };
    return names[chat->kind];
}

enum nb_status nb_chat_render(const struct nb_chat *chat, const char *messages_json, size_t len,
                              char **text, size_t *text_len)
{
    struct nbi_jspan json;
    struct nbi_rendered r;
    *text = NULL;
    *text_len = 0;
    NBI_TRY(nbi_jscan(&json, messages_json, len));
    NBI_TRY(nbi_chat_render(chat->kind, json, &r));
    nbi_str_append(&r.text, "", 0); /* allocates even for an empty text */
    enum nb_status rc = nbi_str_status(&r.text);
    if (rc == NB_OK) {
        *text = r.text.p;
        *text_len = r.text.len;
        r.text = (struct nbi_str){0};
    }
    nbi_rendered_release(&r);
    return rc;
}

/* ---- prompts ---- */

const char *nb_role_name(enum nb_role role)
{
    static const char *const names[] = {"system", "user", "assistant"};
    return names[role];
}

void nbi_chat_put_message(struct nbi_str *json, enum nb_role role, const char *text, size_t len)
{
    nbi_str_printf(json, "{\"role\":\"%s\",\"content\":", nb_role_name(role));
    nbi_jquote(json, text, len);
    nbi_str_puts(json, "}");
}

void nbi_chat_put_messages(struct nbi_str *json, const struct nb_message *messages, size_t count)
{
    nbi_str_puts(json, "[");
    for (size_t i = 0; i < count; i++) {
        nbi_str_puts(json, i ? "," : "");
        nbi_chat_put_message(json, messages[i].role, messages[i].text, messages[i].len);
    }
    nbi_str_puts(json, "]");
}

enum nb_status nbi_chat_prompt(const struct nb_chat *chat, const char *messages, const char *tools,
                               bool think, char **text, size_t *text_len)
{
    struct nbi_str messages_json = {0};
    *text = NULL;
    *text_len = 0;
    nbi_str_printf(&messages_json, "{\"messages\":%s", messages);
    if (tools)
        nbi_str_printf(&messages_json, ",\"tools\":%s", tools);
    nbi_str_puts(&messages_json, ",\"add_generation_prompt\":true");
    nbi_str_puts(&messages_json, think ? "}" : ",\"enable_thinking\":false}");
    enum nb_status rc = nbi_str_status(&messages_json);
    if (rc == NB_OK)
        rc = nb_chat_render(chat, messages_json.p, messages_json.len, text, text_len);
    nbi_str_release(&messages_json);
    return rc;
}

enum nb_status nb_chat_prompt(const struct nb_chat *chat, const struct nb_message *messages,
                              size_t count, bool think, char **text, size_t *text_len)
{
    struct nbi_str json = {0};
    *text = NULL;
    *text_len = 0;
    nbi_chat_put_messages(&json, messages, count);
    enum nb_status rc = nbi_str_status(&json);
    if (rc == NB_OK)
        rc = nbi_chat_prompt(chat, json.p, NULL, think, text, text_len);
    nbi_str_release(&json);
    return rc;
}
