/* vocab.c - builds a vocabulary, reads it from GGUF metadata and writes it there. */
#include "tokenizer/vocab.h"

#include <string.h>

#include "base/array.h"
#include "base/utf8.h"

void nbi_vocab_init(struct nbi_vocab *v)
{
    memset(v, 0, sizeof *v);
    v->bos = v->eos = v->pad = -1;
    v->nfc = true;
    v->split.count = 1;
    v->split.stage[0].pattern = nbi_qwen_pattern;
}

void nbi_vocab_release(struct nbi_vocab *v)
{
    free(v->tokens);
    free(v->merges);
    nbi_arena_release(&v->arena);
    nbi_vocab_init(v);
}

enum nb_status nbi_vocab_set(struct nbi_vocab *v, int64_t id, struct nbi_token token)
{
    if (id < 0 || id >= NBI_VOCAB_MAX)
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
        v->count = cap; /* nbi_vocab_finish trims it */
    }
    struct nbi_token *t = &v->tokens[id];
    if (t->text && (t->len != token.len || memcmp(t->text, token.text, t->len) != 0))
        return nbi_fail(NB_EFORMAT, "token id %lld has two texts", (long long)id);
    token.flags |= t->flags & NBI_TOKEN_MODEL;
    *t = token;
    return NB_OK;
}

void nbi_vocab_finish(struct nbi_vocab *v)
{
    while (v->count > 0 && !v->tokens[v->count - 1].text)
        v->count--;
}

enum nb_status nbi_vocab_add_merge(struct nbi_vocab *v, const char *text, size_t len)
{
    const char *space = len > 2 ? memchr(text, ' ', len) : NULL;
    if (!space || space == text || space == text + len - 1 || memchr(text, 0, len) ||
        memchr(space + 1, ' ', (size_t)(text + len - space) - 1))
        return nbi_fail(NB_EFORMAT, "merge %lld is not a pair of tokens",
                        (long long)v->merge_count);
    NBI_TRY(NBI_ARRAY_RESERVE(v->merges, v->merge_capacity, (size_t)v->merge_count + 1, "merges"));
    v->merges[v->merge_count++] = text;
    return NB_OK;
}

/* The byte-level alphabet: a printable byte is the character with the same number; the others are
 * mapped, in order, to the characters from U+0100 on. */
static bool prints(uint32_t c)
{
    return (c >= '!' && c <= '~') || (c >= 0xA1 && c <= 0xFF && c != 0xAD);
}

uint32_t nbi_byte_character(uint8_t byte)
{
    uint32_t c = 0x100;
    if (prints(byte))
        return byte;
    for (uint32_t b = 0; b < byte; b++)
        c += !prints(b);
    return c;
}

int nbi_byte_of(uint32_t character)
{
    if (character < 0x100)
        return prints(character) ? (int)character : -1;
    for (int b = 0; character < 0x144 && b < 256; b++)
        if (!prints((uint32_t)b) && character-- == 0x100)
            return b;
    return -1;
}

bool nbi_vocab_is_qwen(const struct nbi_vocab *v)
{
    return v->nfc && !v->ignore_merges && nbi_split_is_qwen(&v->split);
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
    char *copy;
    NBI_TRY(nbi_arena_string(&t->v->arena, "tokens", text, len, &copy));
    return nbi_vocab_set(t->v, (int64_t)i,
                         (struct nbi_token){copy, (uint32_t)len, (uint8_t)type, NBI_TOKEN_MODEL});
}

static enum nb_status gguf_merge(void *ctx, uint64_t i, const char *text, size_t len)
{
    (void)i;
    struct nbi_vocab *v = ctx;
    char *copy;
    if (!nbi_utf8_valid(text, len))
        return nbi_fail(NB_EFORMAT, "a merge is not text");
    NBI_TRY(nbi_arena_string(&v->arena, "merges", text, len, &copy));
    return nbi_vocab_add_merge(v, copy, len);
}

static enum nb_status expect_string(const struct nbi_store *store, const char *key,
                                    const char *wanted)
{
    char *text = NULL;
    NBI_TRY(nbi_gguf_string(store, key, &text));
    bool same = strcmp(text, wanted) == 0;
    enum nb_status rc =
        same ? NB_OK
             : nbi_fail(NB_EUNSUPPORTED, "'%s' is '%s'; '%s' is supported", key, text, wanted);
    free(text);
    return rc;
}

static enum nb_status optional_id(const struct nbi_store *store, const char *key, int64_t *id)
{
    return nbi_unless_absent(nbi_gguf_int(store, key, 0, NBI_VOCAB_MAX - 1, id));
}

static enum nb_status read_gguf(struct nbi_vocab *v, const struct nbi_store *store)
{
    NBI_TRY(expect_string(store, "tokenizer.ggml.model", "gpt2"));
    NBI_TRY(expect_string(store, "tokenizer.ggml.pre", "qwen2"));
    int32_t *types = NULL;
    struct gguf_tokens tokens = {.v = v};
    enum nb_status rc =
        nbi_gguf_int_array(store, "tokenizer.ggml.token_type", &types, &tokens.type_count);
    tokens.types = types;
    if (rc == NB_OK || rc == NB_ENOTFOUND)
        rc = nbi_gguf_each_string(store, "tokenizer.ggml.tokens", gguf_token, &tokens);
    free(types);
    NBI_TRY(rc);
    NBI_TRY(nbi_gguf_each_string(store, "tokenizer.ggml.merges", gguf_merge, v));
    nbi_vocab_finish(v);
    NBI_TRY(optional_id(store, "tokenizer.ggml.bos_token_id", &v->bos));
    NBI_TRY(optional_id(store, "tokenizer.ggml.eos_token_id", &v->eos));
    NBI_TRY(optional_id(store, "tokenizer.ggml.padding_token_id", &v->pad));
    NBI_TRY(nbi_unless_absent(nbi_gguf_bool(store, "tokenizer.ggml.add_bos_token", &v->add_bos)));
    char *template = NULL, *copy = NULL;
    rc = nbi_gguf_string(store, "tokenizer.chat_template", &template);
    if (rc == NB_OK)
        rc = nbi_arena_string(&v->arena, "template", template, strlen(template), &copy);
    v->chat_template = copy;
    free(template);
    return nbi_unless_absent(rc);
}

enum nb_status nbi_vocab_read_gguf(struct nbi_vocab *v, const struct nbi_store *store)
{
    nbi_vocab_init(v);
    if (!nbi_gguf_find(store, "tokenizer.ggml.tokens"))
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
    if (!nbi_vocab_is_qwen(v))
        return nbi_fail(NB_EUNSUPPORTED, "the tokenizer does not treat text as Qwen's do, which is "
                                         "the only way a GGUF can say");
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
        nbi_gguf_meta_next_string(meta, t ? t->text : pad, t ? t->len : strlen(pad));
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
