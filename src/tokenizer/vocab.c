/* vocab.c - tokenizer.json and GGUF metadata, read and written. */
#include "tokenizer/vocab.h"

#include <string.h>

#include "base/json.h"
#include "base/str.h"
#include "base/utf8.h"

#define TOKENIZER_MAX ((size_t)256 << 20)
#define TEMPLATE_MAX  ((size_t)16 << 20)
#define MAX_TOKENS    (1 << 22)

/* How the Qwen family splits text before merging; llama.cpp knows it as "qwen2". */
static const char split_pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

void nbi_vocab_init(struct nbi_vocab *v)
{
    memset(v, 0, sizeof *v);
    v->bos = v->eos = v->pad = -1;
}

void nbi_vocab_release(struct nbi_vocab *v)
{
    free(v->tokens);
    free(v->merges);
    nbi_arena_release(&v->arena);
    nbi_vocab_init(v);
}

/* Gives id its text; ids grow the table, a second text for one id is an error. */
static enum nb_status set_token(struct nbi_vocab *v, int64_t id, const char *text, size_t len,
                                enum nbi_token_type type)
{
    if (id < 0 || id >= MAX_TOKENS)
        return nbi_fail(NB_EFORMAT, "token id %lld is out of range", (long long)id);
    if (id >= v->count) {
        int64_t cap = v->count ? v->count : 1024;
        while (cap <= id)
            cap *= 2;
        struct nbi_token *p = realloc(v->tokens, (size_t)cap * sizeof *p);
        if (!p)
            return nbi_fail_memory("vocabulary", (size_t)cap * sizeof *p);
        memset(p + v->count, 0, (size_t)(cap - v->count) * sizeof *p);
        v->tokens = p;
        v->count = cap; /* trimmed by finish */
    }
    if (v->tokens[id].text && strcmp(v->tokens[id].text, text) != 0)
        return nbi_fail(NB_EFORMAT, "token id %lld has two texts", (long long)id);
    char *copy;
    NBI_TRY(nbi_arena_string(&v->arena, "tokens", text, len, &copy));
    v->tokens[id] = (struct nbi_token){copy, type};
    return NB_OK;
}

static void finish(struct nbi_vocab *v)
{
    while (v->count > 0 && !v->tokens[v->count - 1].text)
        v->count--;
}

static enum nb_status add_merge(struct nbi_vocab *v, const char *text, size_t len)
{
    const char *space = len > 2 ? memchr(text, ' ', len) : NULL;
    if (!space || space == text || space == text + len - 1 || memchr(text, 0, len) ||
        memchr(space + 1, ' ', (size_t)(text + len - space) - 1))
        return nbi_fail(NB_EFORMAT, "merge %lld is not a pair of tokens",
                        (long long)v->merge_count);
    if ((v->merge_count & (v->merge_count - 1)) == 0) { /* room doubles at powers of two */
        size_t cap = v->merge_count ? 2 * (size_t)v->merge_count : 1;
        const char **p = realloc(v->merges, cap * sizeof *p);
        if (!p)
            return nbi_fail_memory("merges", cap * sizeof *p);
        v->merges = p;
    }
    char *copy;
    NBI_TRY(nbi_arena_string(&v->arena, "merges", text, len, &copy));
    v->merges[v->merge_count++] = copy;
    return NB_OK;
}

/* ---- tokenizer.json ---- */

static bool has_type(const json_t *obj, const char *type)
{
    const char *t = json_string_value(json_object_get(obj, "type"));
    return t && strcmp(t, type) == 0;
}

/* The parts around the vocabulary must be the ones that "qwen2" stands for. */
static enum nb_status check_kind(const json_t *json, const json_t *model)
{
    const json_t *pre = json_object_get(json, "pre_tokenizer");
    const json_t *split = json_array_get(json_object_get(pre, "pretokenizers"), 0);
    const char *regex =
        json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    if (!has_type(model, "BPE"))
        return nbi_fail(NB_EUNSUPPORTED, "the tokenizer is not of type BPE");
    if (!has_type(json_object_get(json, "decoder"), "ByteLevel"))
        return nbi_fail(NB_EUNSUPPORTED, "the tokenizer is not a byte-level one");
    if (!regex || strcmp(regex, split_pattern) != 0)
        return nbi_fail(NB_EUNSUPPORTED, "the tokenizer does not split text as Qwen's do");
    return NB_OK;
}

static enum nb_status read_merges(struct nbi_vocab *v, const json_t *merges)
{
    size_t i;
    json_t *m;
    struct nbi_str s = {0};
    enum nb_status rc = NB_OK;
    json_array_foreach (merges, i, m) {
        const char *a = json_string_value(json_array_get(m, 0));
        const char *b = json_string_value(json_array_get(m, 1));
        s.len = 0;
        if (json_is_string(m))
            nbi_str_puts(&s, json_string_value(m));
        else if (a && b && json_array_size(m) == 2)
            nbi_str_printf(&s, "%s %s", a, b);
        rc = nbi_str_status(&s);
        if (rc == NB_OK)
            rc = add_merge(v, nbi_str_text(&s), s.len);
        if (rc != NB_OK)
            break;
    }
    nbi_str_release(&s);
    return rc;
}

static enum nb_status read_added(struct nbi_vocab *v, const json_t *added)
{
    size_t i;
    json_t *t;
    json_array_foreach (added, i, t) {
        int64_t id = -1;
        const char *text = NULL;
        bool special = false;
        NBI_TRY(nbi_json_int(t, "id", true, 0, MAX_TOKENS - 1, &id));
        NBI_TRY(nbi_json_string(t, "content", true, &text));
        NBI_TRY(nbi_json_bool(t, "special", false, &special));
        NBI_TRY(set_token(v, id, text, strlen(text), special ? NBI_TOKEN_CONTROL : NBI_TOKEN_USER));
    }
    return NB_OK;
}

static enum nb_status read_tokenizer(struct nbi_vocab *v, const json_t *json)
{
    const json_t *model = json_object_get(json, "model"), *vocab = json_object_get(model, "vocab");
    const char *text;
    json_t *id;
    NBI_TRY(check_kind(json, model));
    if (!json_is_object(vocab) || !json_is_array(json_object_get(model, "merges")))
        return nbi_fail(NB_EFORMAT, "'vocab' or 'merges' is missing");
    json_object_foreach ((json_t *)vocab, text, id) {
        if (!json_is_integer(id))
            return nbi_fail(NB_EFORMAT, "the id of token '%s' is not a whole number", text);
        NBI_TRY(set_token(v, json_integer_value(id), text, strlen(text), NBI_TOKEN_NORMAL));
    }
    NBI_TRY(read_merges(v, json_object_get(model, "merges")));
    NBI_TRY(read_added(v, json_object_get(json, "added_tokens")));
    finish(v);
    return NB_OK;
}

/* ---- tokenizer_config.json ---- */

/* The id of a special token given as text or as {"content": text}; -1 if there is none. */
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

static enum nb_status read_settings(struct nbi_vocab *v, const json_t *config)
{
    const char *template = json_string_value(json_object_get(config, "chat_template"));
    v->bos = special_id(v, config, "bos_token");
    v->eos = special_id(v, config, "eos_token");
    v->pad = special_id(v, config, "pad_token");
    v->add_bos = json_is_true(json_object_get(config, "add_bos_token"));
    if (!template)
        return NB_OK;
    char *copy;
    NBI_TRY(nbi_arena_string(&v->arena, "template", template, strlen(template), &copy));
    v->chat_template = copy;
    return NB_OK;
}

typedef enum nb_status (*json_reader)(struct nbi_vocab *, const json_t *);

static enum nb_status read_json(struct nbi_vocab *v, const char *dir, const char *name,
                                json_reader read)
{
    char *path = nbi_path_join(dir, name);
    json_t *json = NULL;
    if (!path)
        return NB_ENOMEM;
    enum nb_status rc = nbi_json_read_file(&json, path, TOKENIZER_MAX);
    if (rc == NB_OK)
        rc = nbi_context(read(v, json), "reading '%s'", path);
    json_decref(json);
    free(path);
    return rc;
}

/* Newer models keep the template in a file of its own, which then counts. */
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

static enum nb_status unless_absent(enum nb_status rc)
{
    return rc == NB_ENOTFOUND ? NB_OK : rc;
}

enum nb_status nbi_vocab_read_config(struct nbi_vocab *v, const char *dir)
{
    NBI_TRY(unless_absent(read_json(v, dir, "tokenizer_config.json", read_settings)));
    return unless_absent(read_template(v, dir));
}

enum nb_status nbi_vocab_read_dir(struct nbi_vocab *v, const char *dir)
{
    nbi_vocab_init(v);
    enum nb_status rc = read_json(v, dir, "tokenizer.json", read_tokenizer);
    if (rc == NB_OK)
        rc = nbi_vocab_read_config(v, dir);
    if (rc != NB_OK)
        nbi_vocab_release(v);
    return rc;
}

static json_t *added_json(const struct nbi_token *t)
{
    return json_pack("{s:s,s:b,s:b,s:b,s:b,s:b}", "content", t->text, "single_word", 0, "lstrip", 0,
                     "rstrip", 0, "normalized", 0, "special", t->type == NBI_TOKEN_CONTROL);
}

static int64_t last_normal(const struct nbi_vocab *v)
{
    int64_t last = v->count - 1;
    while (last >= 0 && !(v->tokens[last].text && v->tokens[last].type == NBI_TOKEN_NORMAL))
        last--;
    return last;
}

static json_t *tokenizer_json(const struct nbi_vocab *v, bool *ok)
{
    json_t *vocab = json_object(), *merges = json_array(), *added = json_array();
    int64_t last = last_normal(v);
    for (int64_t i = 0; i < v->count; i++) {
        const struct nbi_token *t = &v->tokens[i];
        /* Readers give added tokens the ids behind the vocabulary unless that names them. */
        if (t->text && i <= last)
            nbi_json_set(vocab, t->text, json_integer(i), ok);
        if (t->text && (t->type == NBI_TOKEN_CONTROL || t->type == NBI_TOKEN_USER)) {
            json_t *a = json_pack("{s:I}", "id", (json_int_t)i), *rest = added_json(t);
            *ok = json_object_update(a, rest) == 0 && *ok;
            json_decref(rest);
            nbi_json_append(added, a, ok);
        }
    }
    for (int64_t i = 0; i < v->merge_count; i++) {
        const char *space = strchr(v->merges[i] + 1, ' ');
        json_array_append_new(
            merges, json_pack("[s#,s]", v->merges[i], (int)(space - v->merges[i]), space + 1));
    }
#define BYTE_LEVEL "{s:s,s:b,s:b,s:b}"
#define BYTE_LEVEL_ARGS                                                                            \
    "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0, "use_regex", 0
    return json_pack(
        "{s:s,s:n,s:n,s:o,s:{s:s},s:{s:s,s:[{s:s,s:{s:s},s:s,s:b}," BYTE_LEVEL "]},s:" BYTE_LEVEL
        ",s:" BYTE_LEVEL ",s:{s:s,s:n,s:n,s:s,s:s,s:b,s:b,s:b,s:o,s:o}}",
        "version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer", "type",
        "NFC", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split", "pattern",
        "Regex", split_pattern, "behavior", "Isolated", "invert", 0, BYTE_LEVEL_ARGS,
        "post_processor", BYTE_LEVEL_ARGS, "decoder", BYTE_LEVEL_ARGS, "model", "type", "BPE",
        "dropout", "unk_token", "continuing_subword_prefix", "", "end_of_word_suffix", "",
        "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab, "merges", merges);
}

static void set_special(json_t *config, const struct nbi_vocab *v, const char *key, int64_t id,
                        bool *ok)
{
    bool there = id >= 0 && id < v->count && v->tokens[id].text;
    nbi_json_set(config, key, there ? json_string(v->tokens[id].text) : json_null(), ok);
}

static json_t *settings_json(const struct nbi_vocab *v, bool *ok)
{
    json_t *added = json_object();
    for (int64_t i = 0; i < v->count; i++)
        if (v->tokens[i].text &&
            (v->tokens[i].type == NBI_TOKEN_CONTROL || v->tokens[i].type == NBI_TOKEN_USER)) {
            char id[24];
            snprintf(id, sizeof id, "%lld", (long long)i);
            nbi_json_set(added, id, added_json(&v->tokens[i]), ok);
        }
    json_t *config =
        json_pack("{s:b,s:b,s:o,s:b,s:s,s:s,s:n}", "add_bos_token", v->add_bos, "add_prefix_space",
                  0, "added_tokens_decoder", added, "clean_up_tokenization_spaces", 0, "errors",
                  "replace", "tokenizer_class", "Qwen2Tokenizer", "unk_token");
    set_special(config, v, "bos_token", v->bos, ok);
    set_special(config, v, "eos_token", v->eos, ok);
    set_special(config, v, "pad_token", v->pad, ok);
    if (v->chat_template)
        nbi_json_set(config, "chat_template", json_string(v->chat_template), ok);
    return config;
}

static enum nb_status write_json(json_t *json, bool ok, const char *dir, const char *name)
{
    char *path = nbi_path_join(dir, name);
    enum nb_status rc =
        path && json && ok ? nbi_json_write_file(json, path) : nbi_fail_memory("tokenizer", 0);
    free(path);
    json_decref(json);
    return rc;
}

enum nb_status nbi_vocab_write_dir(const struct nbi_vocab *v, const char *dir)
{
    bool ok = true;
    json_t *json = tokenizer_json(v, &ok);
    json_t *vocab = json_object_get(json_object_get(json, "model"), "vocab");
    int64_t texts = 0;
    for (int64_t i = 0; i <= last_normal(v); i++)
        texts += v->tokens[i].text != NULL;
    if (json && (int64_t)json_object_size(vocab) != texts) {
        json_decref(json);
        return nbi_fail(NB_EFORMAT, "two tokens of the vocabulary have the same text");
    }
    NBI_TRY(write_json(json, ok, dir, "tokenizer.json"));
    json = settings_json(v, &ok);
    return write_json(json, ok, dir, "tokenizer_config.json");
}

/* ---- GGUF ---- */

struct gguf_tokens {
    struct nbi_vocab *v;
    const int32_t *types;
    uint64_t type_count;
};

static enum nb_status gguf_token(void *ctx, uint64_t i, const char *text, size_t len)
{
    struct gguf_tokens *t = ctx;
    if (t->types && i >= t->type_count)
        return nbi_fail(NB_EFORMAT, "token %llu has no type", (unsigned long long)i);
    int32_t type = t->types ? t->types[i] : NBI_TOKEN_NORMAL;
    if (!nbi_utf8_valid(text, len) || memchr(text, 0, len))
        return nbi_fail(NB_EFORMAT, "token %llu is not text", (unsigned long long)i);
    if (type == NBI_TOKEN_UNUSED)
        return NB_OK;
    if (type != NBI_TOKEN_NORMAL && type != NBI_TOKEN_CONTROL && type != NBI_TOKEN_USER)
        return nbi_fail(NB_EUNSUPPORTED, "token %llu has type %d", (unsigned long long)i,
                        (int)type);
    char *copy = strndup(text, len);
    if (!copy)
        return nbi_fail_memory("token", len);
    enum nb_status rc = set_token(t->v, (int64_t)i, copy, len, (enum nbi_token_type)type);
    free(copy);
    return rc;
}

static enum nb_status gguf_merge(void *ctx, uint64_t i, const char *text, size_t len)
{
    (void)i;
    return nbi_utf8_valid(text, len) ? add_merge(ctx, text, len)
                                     : nbi_fail(NB_EFORMAT, "a merge is not text");
}

static enum nb_status expect_string(const struct nbi_store *store, const char *key,
                                    const char *wanted)
{
    char *text = NULL;
    NBI_TRY(nbi_kv_string(store, key, &text));
    bool same = strcmp(text, wanted) == 0;
    enum nb_status rc =
        same ? NB_OK
             : nbi_fail(NB_EUNSUPPORTED, "'%s' is '%s'; '%s' is supported", key, text, wanted);
    free(text);
    return rc;
}

static enum nb_status optional_id(const struct nbi_store *store, const char *key, int64_t *id)
{
    return unless_absent(nbi_kv_int(store, key, 0, MAX_TOKENS - 1, id));
}

static enum nb_status read_gguf(struct nbi_vocab *v, const struct nbi_store *store)
{
    NBI_TRY(expect_string(store, "tokenizer.ggml.model", "gpt2"));
    NBI_TRY(expect_string(store, "tokenizer.ggml.pre", "qwen2"));
    int32_t *types = NULL;
    struct gguf_tokens tokens = {.v = v};
    enum nb_status rc =
        nbi_kv_int_array(store, "tokenizer.ggml.token_type", &types, &tokens.type_count);
    tokens.types = types;
    if (rc == NB_OK || rc == NB_ENOTFOUND)
        rc = nbi_kv_each_string(store, "tokenizer.ggml.tokens", gguf_token, &tokens);
    free(types);
    NBI_TRY(rc);
    NBI_TRY(nbi_kv_each_string(store, "tokenizer.ggml.merges", gguf_merge, v));
    finish(v);
    NBI_TRY(optional_id(store, "tokenizer.ggml.bos_token_id", &v->bos));
    NBI_TRY(optional_id(store, "tokenizer.ggml.eos_token_id", &v->eos));
    NBI_TRY(optional_id(store, "tokenizer.ggml.padding_token_id", &v->pad));
    NBI_TRY(unless_absent(nbi_kv_bool(store, "tokenizer.ggml.add_bos_token", &v->add_bos)));
    char *template = NULL, *copy = NULL;
    rc = nbi_kv_string(store, "tokenizer.chat_template", &template);
    if (rc == NB_OK)
        rc = nbi_arena_string(&v->arena, "template", template, strlen(template), &copy);
    v->chat_template = copy;
    free(template);
    return unless_absent(rc);
}

enum nb_status nbi_vocab_read_gguf(struct nbi_vocab *v, const struct nbi_store *store)
{
    nbi_vocab_init(v);
    if (!nbi_store_kv(store, "tokenizer.ggml.tokens"))
        return nbi_fail(NB_ENOTFOUND, "the file holds no tokenizer");
    enum nb_status rc = nbi_context(read_gguf(v, store), "tokenizer");
    if (rc != NB_OK)
        nbi_vocab_release(v);
    return rc;
}

enum nb_status nbi_vocab_write_gguf(const struct nbi_vocab *v, struct nbi_gguf_meta *meta,
                                    int64_t vocab_size)
{
    NBI_BUG_IF(v->count > vocab_size);
    int32_t *types = malloc((size_t)vocab_size * sizeof *types);
    if (!types)
        return nbi_fail_memory("token types", (size_t)vocab_size * sizeof *types);
    nbi_gguf_meta_string(meta, "tokenizer.ggml.model", "gpt2");
    nbi_gguf_meta_string(meta, "tokenizer.ggml.pre", "qwen2");
    nbi_gguf_meta_strings(meta, "tokenizer.ggml.tokens", (uint64_t)vocab_size);
    for (int64_t i = 0; i < vocab_size; i++) {
        const struct nbi_token *t = i < v->count && v->tokens[i].text ? &v->tokens[i] : NULL;
        char pad[32];
        snprintf(pad, sizeof pad, "[PAD%lld]", (long long)i);
        nbi_gguf_meta_next_string(meta, t ? t->text : pad, strlen(t ? t->text : pad));
        types[i] = t ? (int32_t)t->type : NBI_TOKEN_UNUSED;
    }
    nbi_gguf_meta_ints(meta, "tokenizer.ggml.token_type", types, (uint64_t)vocab_size);
    free(types);
    nbi_gguf_meta_strings(meta, "tokenizer.ggml.merges", (uint64_t)v->merge_count);
    for (int64_t i = 0; i < v->merge_count; i++)
        nbi_gguf_meta_next_string(meta, v->merges[i], strlen(v->merges[i]));
    nbi_gguf_meta_bool(meta, "tokenizer.ggml.add_bos_token", v->add_bos);
    if (v->chat_template)
        nbi_gguf_meta_string(meta, "tokenizer.chat_template", v->chat_template);
    return NB_OK;
}

void nbi_vocab_write_ids(const struct nbi_vocab *v, struct nbi_gguf_meta *meta)
{
    const struct {
        const char *key;
        int64_t id;
    } ids[] = {{"tokenizer.ggml.bos_token_id", v->bos},
               {"tokenizer.ggml.eos_token_id", v->eos},
               {"tokenizer.ggml.padding_token_id", v->pad}};
    for (int i = 0; i < 3; i++)
        if (ids[i].id >= 0)
            nbi_gguf_meta_u32(meta, ids[i].key, (uint32_t)ids[i].id);
}
