/* vocab_json.c - reads tokenizer.json and tokenizer_config.json.
 *
 * The vocabulary and the merges are scanned in place (base/jscan.h); building a tree of them would
 * take a quarter of a second and 100 MB. */
#include <string.h>

#include "base/jscan.h"
#include "base/json.h"
#include "base/log.h"
#include "base/utf8.h"
#include "tokenizer/vocab.h"

#define TOKENIZER_MAX ((size_t)256 << 20)
#define TEMPLATE_MAX  ((size_t)16 << 20)

/* ---- normalizer, pre-tokenizer, decoder ---- */

static bool has_type(struct nbi_jspan v, const char *type)
{
    return nbi_jequals(nbi_jget(v, "type"), type);
}

static bool is_set(struct nbi_jspan v)
{
    return nbi_jtype(v) > NBI_JNULL;
}

static bool is_true(struct nbi_jspan object, const char *key)
{
    return nbi_jtype(nbi_jget(object, key)) == NBI_JTRUE;
}

/* Fails with "WHAT 'TYPE' is not supported". */
static enum nb_status refuse(const char *what, struct nbi_jspan type_name)
{
    struct nbi_str type = {0};
    char name[64];
    nbi_jstring(type_name, &type);
    nbi_printable_copy(name, sizeof name, nbi_str_text(&type), type.len);
    nbi_str_release(&type);
    if (!is_set(type_name))
        return nbi_fail(NB_EUNSUPPORTED, "there is no %s, or it has no type", what);
    return nbi_fail(NB_EUNSUPPORTED, "%s '%s' is not supported", what, name);
}

static enum nb_status add_stage(struct nbi_vocab *v, const char *pattern, enum nbi_split_keep keep)
{
    if (v->split.count == NBI_SPLIT_STAGES)
        return nbi_fail(NB_EUNSUPPORTED, "more than %d pre-tokenizers in a row", NBI_SPLIT_STAGES);
    v->split.stage[v->split.count++] = (struct nbi_split_stage){pattern, keep};
    return NB_OK;
}

/* Copies a string into v's arena; it must not contain NUL. */
static enum nb_status keep_string(struct nbi_vocab *v, struct nbi_jspan s, const char *what,
                                  const char **out)
{
    struct nbi_str text = {0};
    char *copy = NULL;
    nbi_jstring(s, &text);
    enum nb_status rc = nbi_str_status(&text);
    if (rc == NB_OK && (nbi_jtype(s) != NBI_JSTRING || memchr(nbi_str_text(&text), 0, text.len)))
        rc = nbi_fail(NB_EFORMAT, "%s is not a plain string", what);
    if (rc == NB_OK)
        rc = nbi_arena_string(&v->arena, "settings", nbi_str_text(&text), text.len, &copy);
    nbi_str_release(&text);
    *out = copy;
    return rc;
}

/* Makes a pattern that matches `text` literally. */
static enum nb_status quote_pattern(struct nbi_vocab *v, const char *text, const char **out)
{
    struct nbi_str s = {0};
    char *copy = NULL;
    for (; *text; text++)
        nbi_str_printf(&s, strchr("\\^$.|?*+()[]{}#&-", *text) ? "\\%c" : "%c", *text);
    enum nb_status rc = nbi_str_status(&s);
    if (rc == NB_OK)
        rc = nbi_arena_string(&v->arena, "settings", nbi_str_text(&s), s.len, &copy);
    nbi_str_release(&s);
    *out = copy;
    return rc;
}

static enum nb_status read_split(struct nbi_vocab *v, struct nbi_jspan split)
{
    struct nbi_jspan pattern = nbi_jget(split, "pattern"), regex = nbi_jget(pattern, "Regex");
    struct nbi_jspan behavior = nbi_jget(split, "behavior");
    bool invert = is_true(split, "invert");
    const char *text;
    enum nbi_split_keep keep = NBI_SPLIT_ALL;
    if (nbi_jequals(behavior, "Removed"))
        keep = invert ? NBI_SPLIT_MATCHES : NBI_SPLIT_REST;
    else if (!nbi_jequals(behavior, "Isolated"))
        return refuse("behavior of a Split pre-tokenizer", behavior);
    if (is_set(regex))
        NBI_TRY(keep_string(v, regex, "a split pattern", &text));
    else {
        NBI_TRY(keep_string(v, nbi_jget(pattern, "String"), "a split pattern", &text));
        NBI_TRY(quote_pattern(v, text, &text));
    }
    return add_stage(v, text, keep);
}

static enum nb_status read_byte_level(struct nbi_vocab *v, struct nbi_jspan pre)
{
    v->split.prefix_space = is_true(pre, "add_prefix_space");
    if (v->split.prefix_space && v->split.count > 0)
        return nbi_fail(NB_EUNSUPPORTED, "add_prefix_space after another pre-tokenizer");
    if (nbi_jtype(nbi_jget(pre, "use_regex")) == NBI_JFALSE)
        return NB_OK;
    return add_stage(v, nbi_gpt2_pattern, NBI_SPLIT_ALL);
}

static enum nb_status read_pre_tokenizer(struct nbi_vocab *v, struct nbi_jspan pre, bool *bytes)
{
    struct nbi_jiter it;
    struct nbi_jspan key, part;
    if (has_type(pre, "Sequence")) {
        nbi_jiter_init(&it, nbi_jget(pre, "pretokenizers"));
        while (nbi_jiter_next(&it, &key, &part))
            NBI_TRY(read_pre_tokenizer(v, part, bytes));
        return NB_OK;
    }
    if (*bytes)
        return nbi_fail(NB_EUNSUPPORTED, "a pre-tokenizer after ByteLevel");
    if (has_type(pre, "Split"))
        return read_split(v, pre);
    if (has_type(pre, "Digits"))
        return add_stage(v, is_true(pre, "individual_digits") ? "\\p{N}" : "\\p{N}+",
                         NBI_SPLIT_ALL);
    if (!has_type(pre, "ByteLevel"))
        return refuse("pre-tokenizer", nbi_jget(pre, "type"));
    *bytes = true;
    return read_byte_level(v, pre);
}

static enum nb_status read_pre_tokenizers(struct nbi_vocab *v, struct nbi_jspan pre)
{
    bool bytes = false;
    v->split.count = 0;
    NBI_TRY(read_pre_tokenizer(v, pre, &bytes));
    return bytes ? NB_OK : nbi_fail(NB_EUNSUPPORTED, "the tokenizer is not a byte-level one");
}

static enum nb_status read_normalizer(struct nbi_vocab *v, struct nbi_jspan n)
{
    if (has_type(n, "Sequence")) {
        struct nbi_jiter it;
        struct nbi_jspan key, part;
        nbi_jiter_init(&it, nbi_jget(n, "normalizers"));
        while (nbi_jiter_next(&it, &key, &part))
            NBI_TRY(read_normalizer(v, part));
        return NB_OK;
    }
    if (is_set(n) && !has_type(n, "NFC"))
        return refuse("normalizer", nbi_jget(n, "type"));
    v->nfc = v->nfc || is_set(n);
    return NB_OK;
}

static enum nb_status check_decoder(struct nbi_jspan d)
{
    if (has_type(d, "Sequence")) {
        struct nbi_jiter it;
        struct nbi_jspan key, part;
        nbi_jiter_init(&it, nbi_jget(d, "decoders"));
        while (nbi_jiter_next(&it, &key, &part))
            NBI_TRY(check_decoder(part));
        return NB_OK;
    }
    return has_type(d, "ByteLevel") ? NB_OK : refuse("decoder", nbi_jget(d, "type"));
}

/* "" and null both mean "not set". */
static bool is_text(struct nbi_jspan v)
{
    return is_set(v) && !nbi_jequals(v, "");
}

static bool is_zero(struct nbi_jspan v)
{
    return nbi_jtype(v) == NBI_JNUMBER && strspn(v.p, "-0.") >= v.len;
}

/* Checks one setting of the model other than its lists. *fallback is set if the setting matters
 * only for bytes without a token (check_fallback). */
static enum nb_status read_setting(struct nbi_vocab *v, struct nbi_jspan key,
                                   struct nbi_jspan value, bool *fallback)
{
    static const char *const unsupported[] = {"continuing_subword_prefix", "end_of_word_suffix",
                                              "dropout"};
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++)
        if (nbi_jequals(key, unsupported[i]) && is_text(value) && !is_zero(value))
            return nbi_fail(NB_EUNSUPPORTED, "'%s' is not supported", unsupported[i]);
    if (nbi_jequals(key, "type") && !nbi_jequals(value, "BPE"))
        return refuse("model", value);
    if (nbi_jequals(key, "unk_token") || nbi_jequals(key, "byte_fallback"))
        *fallback |= is_text(value) && nbi_jtype(value) != NBI_JFALSE;
    if (nbi_jequals(key, "ignore_merges"))
        v->ignore_merges = nbi_jtype(value) == NBI_JTRUE;
    return NB_OK;
}

/* unk_token and byte_fallback are supported only if they have no effect: every byte is a token. */
static enum nb_status check_fallback(const struct nbi_vocab *v)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < v->count; i++) {
        const struct nbi_token *t = &v->tokens[i];
        bytes += t->text && (t->flags & NBI_TOKEN_MODEL) && t->len <= 2 &&
                 nbi_utf8_length(t->text, t->text + t->len) == (int)t->len &&
                 nbi_byte_of(nbi_utf8_decode(t->text)) >= 0;
    }
    if (bytes < 256)
        return nbi_fail(NB_EUNSUPPORTED,
                        "'unk_token' or 'byte_fallback' with a vocabulary that lacks bytes");
    return NB_OK;
}

/* ---- vocabulary and merges ---- */

/* A block for decoded strings, one after the other. It is as large as the file, which always
 * suffices: a decoded string with its NUL is shorter than the quoted string. */
struct pool {
    char *p;
    struct nbi_str text;
};

static enum nb_status pool_put(struct pool *pool, const char *what, const char **out)
{
    NBI_TRY(nbi_str_status(&pool->text));
    if (pool->text.len == 0 || memchr(pool->text.p, 0, pool->text.len))
        return nbi_fail(NB_EFORMAT, "%s is empty or has NUL in it", what);
    memcpy(pool->p, pool->text.p, pool->text.len + 1);
    *out = pool->p;
    pool->p += pool->text.len + 1;
    return NB_OK;
}

static enum nb_status read_entries(struct nbi_vocab *v, struct nbi_jiter *it, struct pool *pool)
{
    struct nbi_jspan key, value;
    while (nbi_jiter_next(it, &key, &value)) {
        struct nbi_token t = {.type = NBI_TOKEN_NORMAL, .flags = NBI_TOKEN_MODEL};
        int64_t id;
        pool->text.len = 0;
        nbi_jstring(key, &pool->text);
        NBI_TRY(pool_put(pool, "a token", &t.text));
        if (!nbi_jint(value, 0, NBI_VOCAB_MAX - 1, &id)) {
            char name[64];
            nbi_printable_copy(name, sizeof name, t.text, pool->text.len);
            return nbi_fail(NB_EFORMAT, "the id of token '%s' is out of range", name);
        }
        t.len = (uint32_t)pool->text.len;
        NBI_TRY(nbi_vocab_set(v, id, t));
    }
    return NB_OK;
}

/* Reads both forms of a merge: ["left", "right"] and "left right". */
static enum nb_status read_merges(struct nbi_vocab *v, struct nbi_jiter *it, struct pool *pool)
{
    struct nbi_jiter pair;
    struct nbi_jspan key, part;
    while (nbi_jiter_key(it, &key)) {
        const char *text;
        pool->text.len = 0;
        if (nbi_jiter_enter(it, &pair)) {
            for (int n = 0; nbi_jiter_next(&pair, &key, &part); n++) {
                if (n > 1 || pair.object || nbi_jtype(part) != NBI_JSTRING)
                    return nbi_fail(NB_EFORMAT, "merge %lld is not a pair of tokens",
                                    (long long)v->merge_count);
                nbi_str_append(&pool->text, " ", n > 0);
                nbi_jstring(part, &pool->text);
            }
            nbi_jiter_leave(it, &pair);
        } else {
            nbi_jstring(nbi_jiter_value(it), &pool->text);
        }
        NBI_TRY(pool_put(pool, "a merge", &text));
        NBI_TRY(nbi_vocab_add_merge(v, text, pool->text.len));
    }
    return NB_OK;
}

/* The list must be an array or absent. */
static enum nb_status check_list(struct nbi_jspan list, const char *name)
{
    if (!is_set(list) || nbi_jtype(list) == NBI_JARRAY)
        return NB_OK;
    return nbi_fail(NB_EFORMAT, "'%s' must be an array, it is %s", name, nbi_jtype_text(list));
}

static enum nb_status read_added(struct nbi_vocab *v, struct nbi_jspan added)
{
    static const struct {
        const char *key;
        uint8_t flag;
    } flags[] = {{"lstrip", NBI_TOKEN_LSTRIP},
                 {"rstrip", NBI_TOKEN_RSTRIP},
                 {"single_word", NBI_TOKEN_SINGLE_WORD},
                 {"normalized", NBI_TOKEN_NORMALIZED}};
    struct nbi_jiter it;
    struct nbi_jspan key, token;
    NBI_TRY(check_list(added, "added_tokens"));
    nbi_jiter_init(&it, added);
    while (nbi_jiter_next(&it, &key, &token)) {
        struct nbi_token t = {.type =
                                  is_true(token, "special") ? NBI_TOKEN_CONTROL : NBI_TOKEN_USER};
        int64_t id;
        if (!nbi_jint(nbi_jget(token, "id"), 0, NBI_VOCAB_MAX - 1, &id))
            return nbi_fail(NB_EFORMAT, "the id of an added token is out of range");
        NBI_TRY(keep_string(v, nbi_jget(token, "content"), "an added token", &t.text));
        t.len = (uint32_t)strlen(t.text);
        if (t.len == 0)
            return nbi_fail(NB_EFORMAT, "added token %lld is empty", (long long)id);
        for (int i = 0; i < 4; i++)
            t.flags |= is_true(token, flags[i].key) ? flags[i].flag : 0;
        NBI_TRY(nbi_vocab_set(v, id, t));
    }
    return NB_OK;
}

static enum nb_status read_members(struct nbi_vocab *v, struct nbi_jiter *it, struct pool *pool)
{
    struct nbi_jiter list;
    struct nbi_jspan key;
    bool entries = false, merges = false, fallback = false;
    while (nbi_jiter_key(it, &key)) {
        bool is_vocab = nbi_jequals(key, "vocab"), is_merges = nbi_jequals(key, "merges");
        if (!is_vocab && !is_merges) {
            NBI_TRY(read_setting(v, key, nbi_jiter_value(it), &fallback));
            continue;
        }
        if (!nbi_jiter_enter(it, &list) || list.object != is_vocab || (is_vocab ? entries : merges))
            return nbi_fail(NB_EFORMAT, "'vocab' or 'merges' is not one list");
        entries = entries || is_vocab;
        merges = merges || is_merges;
        NBI_TRY(is_vocab ? read_entries(v, &list, pool) : read_merges(v, &list, pool));
        nbi_jiter_leave(it, &list);
    }
    if (!entries || !merges)
        return nbi_fail(NB_EFORMAT, "'vocab' or 'merges' is missing");
    return fallback ? check_fallback(v) : NB_OK;
}

/* text_len is the length of the file, an upper bound for all of its strings. */
static enum nb_status read_model(struct nbi_vocab *v, struct nbi_jiter *it, size_t text_len)
{
    struct nbi_jiter members;
    struct pool pool = {0};
    void *block;
    if (!nbi_jiter_enter(it, &members) || !members.object)
        return nbi_fail(NB_EFORMAT, "'model' is not an object");
    NBI_TRY(nbi_arena_alloc(&v->arena, "tokens", text_len, &block));
    pool.p = block;
    enum nb_status rc = read_members(v, &members, &pool);
    nbi_str_release(&pool.text);
    if (rc == NB_OK)
        nbi_jiter_leave(it, &members);
    return rc;
}

/* The small parts of the file are located first and read after the model. */
enum part { NORMALIZER, PRE_TOKENIZER, DECODER, TRUNCATION, PADDING, ADDED, PARTS };

static enum nb_status read_tokenizer(struct nbi_vocab *v, struct nbi_jspan json)
{
    static const char *const names[PARTS] = {"normalizer", "pre_tokenizer", "decoder",
                                             "truncation", "padding",       "added_tokens"};
    struct nbi_jspan part[PARTS] = {0}, key;
    struct nbi_jiter it;
    bool model = false;
    nbi_jiter_init(&it, json);
    while (nbi_jiter_key(&it, &key)) {
        if (nbi_jequals(key, "model") && !model) {
            NBI_TRY(read_model(v, &it, json.len));
            model = true;
            continue;
        }
        struct nbi_jspan value = nbi_jiter_value(&it);
        for (int i = 0; i < PARTS; i++)
            if (nbi_jequals(key, names[i]))
                part[i] = value;
    }
    if (!model)
        return nbi_fail(NB_EFORMAT, "'model' is missing");
    v->nfc = false;
    NBI_TRY(read_normalizer(v, part[NORMALIZER]));
    NBI_TRY(read_pre_tokenizers(v, part[PRE_TOKENIZER]));
    NBI_TRY(check_decoder(part[DECODER]));
    if (is_set(part[TRUNCATION]) || is_set(part[PADDING]))
        nbi_log(NB_LOG_WARN, "the tokenizer's own 'truncation' and 'padding' are not applied");
    NBI_TRY(read_added(v, part[ADDED]));
    nbi_vocab_finish(v);
    return NB_OK;
}

enum nb_status nbi_vocab_read_json(struct nbi_vocab *v, const char *path)
{
    char *text = NULL;
    size_t len = 0;
    struct nbi_jspan json;
    nbi_vocab_init(v);
    NBI_TRY(nbi_file_read(path, TOKENIZER_MAX, &text, &len));
    enum nb_status rc = nbi_jscan(&json, text, len);
    if (rc == NB_OK)
        rc = read_tokenizer(v, json);
    free(text);
    if (rc != NB_OK)
        nbi_vocab_release(v);
    return nbi_context(rc, "reading '%s'", path);
}

/* ---- tokenizer_config.json ---- */

/* The id of a special token given as text or as {"content": text}; -1: none. */
static int64_t special_id(const struct nbi_vocab *v, const json_t *config, const char *key)
{
    const json_t *value = json_object_get(config, key);
    if (json_is_object(value))
        value = json_object_get(value, "content");
    const char *text = json_string_value(value);
    for (int64_t i = v->count - 1; text && i >= 0; i--)
        if (v->tokens[i].text && strcmp(v->tokens[i].text, text) == 0)
            return i;
    return -1;
}

/* The chat template: a string, or the entry named "default" of a list. */
static const char *template_text(const json_t *config)
{
    const json_t *value = json_object_get(config, "chat_template"), *entry;
    size_t i;
    if (value && !json_is_string(value) && !json_is_array(value) && !json_is_null(value))
        nbi_log(NB_LOG_WARN, "'chat_template' is neither text nor a list of templates");
    json_array_foreach (value, i, entry) {
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(entry, "template"));
    }
    return json_string_value(value);
}

static enum nb_status read_settings(struct nbi_vocab *v, const char *dir)
{
    char *path = nbi_path_join(dir, "tokenizer_config.json"), *copy = NULL;
    json_t *config = NULL;
    enum nb_status rc = path ? nbi_json_read_file(&config, path, TEMPLATE_MAX) : NB_ENOMEM;
    free(path);
    NBI_TRY(rc);
    const char *template = template_text(config);
    v->bos = special_id(v, config, "bos_token");
    v->eos = special_id(v, config, "eos_token");
    v->pad = special_id(v, config, "pad_token");
    v->add_bos = json_is_true(json_object_get(config, "add_bos_token"));
    if (template)
        rc = nbi_arena_string(&v->arena, "template", template, strlen(template), &copy);
    v->chat_template = copy;
    json_decref(config);
    return rc;
}

/* Newer models have the template in chat_template.jinja, which takes precedence. */
static enum nb_status read_template(struct nbi_vocab *v, const char *dir)
{
    char *path = nbi_path_join(dir, "chat_template.jinja"), *text = NULL, *copy = NULL;
    size_t len = 0;
    enum nb_status rc = path ? nbi_file_read(path, TEMPLATE_MAX, &text, &len) : NB_ENOMEM;
    if (rc == NB_OK && (strlen(text) != len || !nbi_utf8_valid(text, len)))
        rc = nbi_fail(NB_EFORMAT, "'%s' is not text", path);
    if (rc == NB_OK)
        rc = nbi_arena_string(&v->arena, "template", text, len, &copy);
    if (rc == NB_OK)
        v->chat_template = copy;
    free(path);
    free(text);
    return rc;
}

enum nb_status nbi_vocab_read_config(struct nbi_vocab *v, const char *dir)
{
    NBI_TRY(nbi_unless_absent(read_settings(v, dir)));
    return nbi_unless_absent(read_template(v, dir));
}

enum nb_status nbi_vocab_read_dir(struct nbi_vocab *v, const char *dir)
{
    nbi_vocab_init(v);
    char *path = nbi_path_join(dir, "tokenizer.json");
    enum nb_status rc = path ? nbi_vocab_read_json(v, path) : NB_ENOMEM;
    free(path);
    if (rc == NB_OK)
        rc = nbi_vocab_read_config(v, dir);
    if (rc != NB_OK)
        nbi_vocab_release(v);
    return rc;
}
