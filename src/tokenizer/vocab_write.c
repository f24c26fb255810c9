/* vocab_write.c - writes tokenizer.json and tokenizer_config.json. */
#include <string.h>

#include "base/json.h"
#include "tokenizer/vocab.h"

static json_t *added_json(const struct nbi_token *t)
{
    return json_pack("{s:s,s:b,s:b,s:b,s:b,s:b}", "content", t->text, "single_word",
                     t->flags & NBI_TOKEN_SINGLE_WORD, "lstrip", t->flags & NBI_TOKEN_LSTRIP,
                     "rstrip", t->flags & NBI_TOKEN_RSTRIP, "normalized",
                     t->flags & NBI_TOKEN_NORMALIZED, "special", t->type == NBI_TOKEN_CONTROL);
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
        /* Hugging Face numbers added tokens after the vocabulary, unless the vocabulary lists
         * them. */
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
        nbi_json_append(
            merges, json_pack("[s#,s]", v->merges[i], (int)(space - v->merges[i]), space + 1), ok);
    }
#define BYTE_LEVEL "{s:s,s:b,s:b,s:b}"
#define BYTE_LEVEL_ARGS                                                                            \
    "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0, "use_regex", 0
    return json_pack(
        "{s:s,s:n,s:n,s:o,s:{s:s},s:{s:s,s:[{s:s,s:{s:s},s:s,s:b}," BYTE_LEVEL "]},s:" BYTE_LEVEL
        ",s:" BYTE_LEVEL ",s:{s:s,s:n,s:n,s:s,s:s,s:b,s:b,s:b,s:o,s:o}}",
        "version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer", "type",
        "NFC", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split", "pattern",
        "Regex", nbi_qwen_pattern, "behavior", "Isolated", "invert", 0, BYTE_LEVEL_ARGS,
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

static enum nb_status write_file(json_t *json, bool ok, const char *path)
{
    enum nb_status rc =
        json && ok ? nbi_json_write_file(json, path) : nbi_fail_memory("tokenizer", 0);
    json_decref(json);
    return rc;
}

enum nb_status nbi_vocab_write_json(const struct nbi_vocab *v, const char *path)
{
    bool ok = true;
    NBI_BUG_IF(!nbi_vocab_is_qwen(v)); /* tokenizer_json() writes these rules only */
    json_t *json = tokenizer_json(v, &ok);
    json_t *vocab = json_object_get(json_object_get(json, "model"), "vocab");
    int64_t texts = 0;
    for (int64_t i = 0; i <= last_normal(v); i++)
        texts += v->tokens[i].text != NULL;
    if (json && (int64_t)json_object_size(vocab) != texts) {
        json_decref(json);
        return nbi_fail(NB_EFORMAT, "two tokens of the vocabulary have the same text");
    }
    return write_file(json, ok, path);
}

enum nb_status nbi_vocab_write_config(const struct nbi_vocab *v, const char *path)
{
    bool ok = true;
    json_t *json = settings_json(v, &ok);
    return write_file(json, ok, path);
}

enum nb_status nbi_vocab_write_dir(const struct nbi_vocab *v, const char *dir)
{
    char *json = nbi_path_join(dir, "tokenizer.json");
    char *config = nbi_path_join(dir, "tokenizer_config.json");
    enum nb_status rc = json && config ? nbi_vocab_write_json(v, json) : NB_ENOMEM;
    if (rc == NB_OK)
        rc = nbi_vocab_write_config(v, config);
    free(json);
    free(config);
    return rc;
}
