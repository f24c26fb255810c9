/* bpe.c - builds the tables of a byte-level BPE tokenizer and encodes with them.
 *
 * Text is split at added tokens, normalised to NFC and split into words, and each word is merged.
 * Words repeat, so an encoder caches the ids of short ones. */
#include "tokenizer/bpe.h"

#include <string.h>

#include "base/array.h"
#include "base/utf8.h"
#include "tokenizer/added.h"
#include "tokenizer/bpe_merge.h"

struct nbi_bpe {
    uint8_t *classes;
    struct nbi_splitter *splitter;
    bool nfc;
    int64_t count;
    uint32_t *offsets; /* [count + 1] into bytes */
    uint8_t *present;  /* [count] 0: unused id, 1: token, 2: special token */
    char *bytes;
    int32_t byte_ids[256]; /* -1: the vocabulary has no token for this byte */
    struct nbi_merges merges;
    struct nbi_added added, added_normalized;
    uint32_t *words; /* for ignore_merges: hash table by bytes of id + 1; else NULL */
    uint32_t words_mask;
};

/* ---- building the tables ---- */

static uint64_t hash_bytes(const char *p, size_t len)
{
    uint64_t h = len * 0x9E3779B97F4A7C15u, part;
    for (; len >= 8; p += 8, len -= 8) {
        memcpy(&part, p, 8);
        h = (h ^ part) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    part = 0;
    memcpy(&part, p, len);
    h = (h ^ part) * 0xD6E8FEB86659FD93u;
    return h ^ h >> 32;
}

/* Hash table from token text to id, used while merges are resolved. */
struct index {
    const struct nbi_token *tokens;
    uint32_t *slots; /* id + 1 */
    uint32_t mask;
};

static uint32_t *index_slot(const struct index *ix, const char *text, size_t len)
{
    uint32_t i = (uint32_t)hash_bytes(text, len) & ix->mask;
    for (;; i = (i + 1) & ix->mask) {
        uint32_t id = ix->slots[i];
        if (id == 0 ||
            (ix->tokens[id - 1].len == len && memcmp(ix->tokens[id - 1].text, text, len) == 0))
            return &ix->slots[i];
    }
}

static enum nb_status new_slots(uint32_t **slots, uint32_t *mask, int64_t count)
{
    size_t n = 256;
    while (n / 2 < (size_t)count)
        n *= 2;
    *mask = (uint32_t)(n - 1);
    *slots = calloc(n, sizeof **slots);
    return *slots ? NB_OK : nbi_fail_memory("vocabulary", n * sizeof **slots);
}

static enum nb_status index_tokens(struct index *ix, const struct nbi_vocab *v)
{
    ix->tokens = v->tokens;
    NBI_TRY(new_slots(&ix->slots, &ix->mask, v->count));
    for (int64_t i = 0; i < v->count; i++) {
        const struct nbi_token *t = &v->tokens[i];
        if (!t->text || !(t->flags & NBI_TOKEN_MODEL))
            continue;
        uint32_t *slot = index_slot(ix, t->text, t->len);
        if (*slot)
            return nbi_fail(NB_EFORMAT, "tokens %u and %lld have the same text", *slot - 1,
                            (long long)i);
        *slot = (uint32_t)i + 1;
    }
    return NB_OK;
}

/* Refuses an added token that the vocabulary has under another id: the tokenizers library would use
 * the vocabulary's id, whatever the file says. */
static enum nb_status check_added(const struct index *ix, const struct nbi_vocab *v)
{
    for (int64_t i = 0; i < v->count; i++) {
        const struct nbi_token *t = &v->tokens[i];
        uint32_t *slot =
            t->text && !(t->flags & NBI_TOKEN_MODEL) ? index_slot(ix, t->text, t->len) : NULL;
        if (slot && *slot)
            return nbi_fail(NB_EUNSUPPORTED, "added token %lld is in the vocabulary as %u",
                            (long long)i, *slot - 1);
    }
    return NB_OK;
}

/* Translates a merge of texts into a merge of ids; `joined` is scratch for the joined text. */
static enum nb_status add_merge(struct nbi_bpe *b, const struct index *ix, const char *merge,
                                uint32_t rank, struct nbi_str *joined)
{
    const char *space = strchr(merge, ' ');
    size_t left = (size_t)(space - merge), right = strlen(space + 1);
    joined->len = 0;
    nbi_str_append(joined, merge, left);
    nbi_str_append(joined, space + 1, right);
    NBI_TRY(nbi_str_status(joined));
    struct nbi_pair pair = {*index_slot(ix, merge, left), *index_slot(ix, space + 1, right), rank,
                            *index_slot(ix, joined->p, joined->len)};
    if (!pair.left || !pair.right || !pair.id)
        return nbi_fail(NB_EFORMAT,
                        "merge %u has a part, or a result, that is not in the "
                        "vocabulary",
                        rank);
    pair.left--;
    pair.right--;
    pair.id--;
    nbi_merges_add(&b->merges, pair);
    return NB_OK;
}

static enum nb_status make_merges(struct nbi_bpe *b, const struct nbi_vocab *v)
{
    struct index ix = {0};
    struct nbi_str joined = {0};
    enum nb_status rc = index_tokens(&ix, v);
    if (rc == NB_OK)
        rc = nbi_merges_init(&b->merges, (size_t)v->merge_count);
    if (rc == NB_OK)
        rc = check_added(&ix, v);
    for (int64_t i = 0; i < v->merge_count && rc == NB_OK; i++)
        rc = add_merge(b, &ix, v->merges[i], (uint32_t)i, &joined);
    for (int c = 0; c < 256 && rc == NB_OK; c++) {
        char text[4];
        size_t len = (size_t)nbi_utf8_encode(text, nbi_byte_character((uint8_t)c));
        b->byte_ids[c] = (int32_t)*index_slot(&ix, text, len) - 1;
    }
    nbi_str_release(&joined);
    free(ix.slots);
    return rc;
}

#define NFC_GROWTH 3 /* NFC makes UTF-8 at most three times as long (Unicode, UAX #15) */

/* Sets *out to the NFC form of an added token. */
static enum nb_status normal_text(const struct nbi_bpe *b, const struct nbi_token *t,
                                  struct nbi_str *out)
{
    out->len = 0;
    NBI_TRY(nbi_nfc(b->classes, t->text, t->len, out));
    return out->len <= NFC_GROWTH * (size_t)t->len ? NB_OK
                                                   : nbi_fail(NB_EUNSUPPORTED, "NFC of a token");
}

/* Writes the bytes that a token stands for, at most `len`: decoded if all its characters belong to
 * the byte-level alphabet, else its text unchanged. */
static size_t token_bytes(const int16_t *byte_of, const char *text, size_t len, char *out)
{
    size_t n = 0;
    for (const char *p = text, *end = p + len; p < end;) {
        uint32_t c = nbi_utf8_decode(p);
        int byte = c < 0x144 ? byte_of[c] : -1;
        if (byte < 0) {
            memcpy(out, text, len);
            return len;
        }
        out[n++] = (char)byte;
        p += c < 0x80 ? 1 : 2;
    }
    return n;
}

static enum nb_status make_texts(struct nbi_bpe *b, const struct nbi_vocab *v)
{
    struct nbi_str nfc = {0};
    int16_t byte_of[0x144];
    size_t capacity = 1, used = 0;
    for (uint32_t c = 0; c < 0x144; c++)
        byte_of[c] = (int16_t)nbi_byte_of(c);
    for (int64_t i = 0; i < b->count; i++)
        capacity += NFC_GROWTH * v->tokens[i].len;
    b->offsets = malloc(((size_t)b->count + 1) * sizeof *b->offsets);
    b->present = calloc((size_t)b->count + 1, 1);
    b->bytes = malloc(capacity);
    if (!b->offsets || !b->present || !b->bytes)
        return nbi_fail_memory("vocabulary", capacity + (size_t)b->count * 5);
    enum nb_status rc = NB_OK;
    for (int64_t i = 0; i < b->count && rc == NB_OK; i++) {
        const struct nbi_token *t = &v->tokens[i];
        const char *text = t->text;
        size_t len = t->len;
        b->offsets[i] = (uint32_t)used;
        if (!text)
            continue;
        if (b->nfc && (t->flags & NBI_TOKEN_NORMALIZED)) {
            rc = normal_text(b, t, &nfc);
            if (rc != NB_OK)
                break;
            text = nbi_str_text(&nfc);
            len = nfc.len;
        }
        used += token_bytes(byte_of, text, len, b->bytes + used);
        b->present[i] = t->type == NBI_TOKEN_CONTROL ? 2 : 1;
    }
    b->offsets[b->count] = (uint32_t)used;
    nbi_str_release(&nfc);
    char *fitted = realloc(b->bytes, used + 1);
    b->bytes = fitted ? fitted : b->bytes;
    return used <= UINT32_MAX ? rc : nbi_fail(NB_EUNSUPPORTED, "a vocabulary of over 4 GiB");
}

static bool is_added(const struct nbi_token *t, bool normalized)
{
    return t->text && (t->type == NBI_TOKEN_CONTROL || t->type == NBI_TOKEN_USER) &&
           !(t->flags & NBI_TOKEN_NORMALIZED) == !normalized;
}

/* Allocates the added tokens and their texts in one block. Texts of normalised tokens are stored in
 * NFC. */
static enum nb_status make_added(struct nbi_bpe *b, const struct nbi_vocab *v, bool normalized,
                                 struct nbi_added *out)
{
    size_t count = 0, bytes = 0, n = 0;
    for (int64_t i = 0; i < v->count; i++)
        if (is_added(&v->tokens[i], normalized)) {
            count++;
            bytes += NFC_GROWTH * v->tokens[i].len + 1;
        }
    struct nbi_added_token *list = calloc(1, count * sizeof *list + bytes + 1);
    if (!list)
        return nbi_fail_memory("added tokens", count * sizeof *list);
    char *text = (char *)(list + count);
    struct nbi_str nfc = {0};
    enum nb_status rc = NB_OK;
    for (int64_t i = 0; i < v->count && rc == NB_OK; i++) {
        const struct nbi_token *t = &v->tokens[i];
        if (!is_added(t, normalized))
            continue;
        size_t len = t->len;
        if (normalized && b->nfc) {
            rc = normal_text(b, t, &nfc);
            if (rc != NB_OK)
                break;
            len = nfc.len;
        }
        memcpy(text, normalized && b->nfc ? nbi_str_text(&nfc) : t->text, len);
        list[n++] =
            (struct nbi_added_token){text, len, (int32_t)i, t->flags, t->type == NBI_TOKEN_CONTROL};
        text += len + 1;
    }
    nbi_str_release(&nfc);
    nbi_added_init(out, list, n, b->classes);
    return rc;
}

/* Whether all characters of a token belong to the byte-level alphabet. */
static bool is_byte_level(const struct nbi_token *t)
{
    for (const char *p = t->text, *end = p + t->len; p < end;) {
        uint32_t c = nbi_utf8_decode(p);
        if (nbi_byte_of(c) < 0)
            return false;
        p += c < 0x80 ? 1 : 2;
    }
    return true;
}

/* Builds the hash table of words that are tokens. */
static enum nb_status make_words(struct nbi_bpe *b, const struct nbi_vocab *v)
{
    NBI_TRY(new_slots(&b->words, &b->words_mask, b->count));
    for (int64_t id = 0; id < b->count; id++) {
        if (!b->present[id] || !(v->tokens[id].flags & NBI_TOKEN_MODEL) ||
            !is_byte_level(&v->tokens[id]))
            continue;
        size_t len = b->offsets[id + 1] - b->offsets[id];
        uint32_t i = (uint32_t)hash_bytes(b->bytes + b->offsets[id], len) & b->words_mask;
        while (b->words[i])
            i = (i + 1) & b->words_mask;
        b->words[i] = (uint32_t)id + 1;
    }
    return NB_OK;
}

static enum nb_status make(struct nbi_bpe *b, const struct nbi_vocab *v)
{
    b->classes = malloc(NBI_CHAR_COUNT);
    if (!b->classes)
        return nbi_fail_memory("character classes", NBI_CHAR_COUNT);
    nbi_char_table(b->classes);
    b->nfc = v->nfc;
    b->count = v->count;
    NBI_TRY(nbi_splitter_new(&b->splitter, &v->split, b->classes));
    NBI_TRY(make_merges(b, v));
    NBI_TRY(make_texts(b, v));
    NBI_TRY(make_added(b, v, false, &b->added));
    NBI_TRY(make_added(b, v, true, &b->added_normalized));
    return v->ignore_merges ? make_words(b, v) : NB_OK;
}

enum nb_status nbi_bpe_new(struct nbi_bpe **out, const struct nbi_vocab *v)
{
    struct nbi_bpe *b = calloc(1, sizeof *b);
    *out = NULL;
    if (!b)
        return nbi_fail_memory("tokenizer", sizeof *b);
    enum nb_status rc = make(b, v);
    if (rc == NB_OK)
        *out = b;
    else
        nbi_bpe_free(b);
    return rc;
}

void nbi_bpe_free(struct nbi_bpe *b)
{
    if (!b)
        return;
    nbi_splitter_free(b->splitter);
    nbi_merges_release(&b->merges);
    nbi_added_release(&b->added);
    nbi_added_release(&b->added_normalized);
    free(b->classes);
    free(b->offsets);
    free(b->present);
    free(b->bytes);
    free(b->words);
    free(b);
}

int64_t nbi_bpe_size(const struct nbi_bpe *b)
{
    return b->count;
}

const char *nbi_bpe_token(const struct nbi_bpe *b, int64_t id, size_t *len)
{
    *len = 0;
    if (id < 0 || id >= b->count || !b->present[id])
        return NULL;
    *len = b->offsets[id + 1] - b->offsets[id];
    return b->bytes + b->offsets[id];
}

int64_t nbi_bpe_added(const struct nbi_bpe *b, const char *text)
{
    const struct nbi_added *lists[] = {&b->added, &b->added_normalized};
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < lists[k]->count; i++)
            if (strcmp(lists[k]->tokens[i].text, text) == 0)
                return lists[k]->tokens[i].id;
    return -1;
}

bool nbi_bpe_special(const struct nbi_bpe *b, int64_t id)
{
    return id >= 0 && id < b->count && b->present[id] == 2;
}

/* ---- ids ---- */

enum nb_status nbi_ids_reserve(struct nbi_ids *ids, size_t more)
{
    return NBI_ARRAY_RESERVE(ids->p, ids->cap, ids->count + more, "token ids");
}

void nbi_ids_release(struct nbi_ids *ids)
{
    free(ids->p);
    *ids = (struct nbi_ids){0};
}

/* ---- the cache of words ---- */

#define CACHE_SLOTS 32768
#define CACHE_WORD  24 /* longest cached word, in bytes */
#define CACHE_IDS   9  /* most ids of a cached word */

/* An entry is exactly one cache line. */
struct cached {
    uint64_t key[3];
    uint16_t len, count; /* len 0: empty */
    int32_t ids[CACHE_IDS];
};

_Static_assert(sizeof(struct cached) == 64, "a cache line");

static uint64_t load(const char *p, size_t n)
{
    uint64_t v = 0;
    memcpy(&v, p, n);
    return v;
}

/* Packs a word of 1 to CACHE_WORD bytes into three integers. Together with the length they identify
 * the word. The loads may overlap, which avoids a loop. */
static void make_key(uint64_t key[3], const char *w, size_t len)
{
    key[1] = key[2] = 0;
    if (len >= 8) {
        key[0] = load(w, 8);
        key[1] = load(w + len - 8, 8);
        if (len > 16)
            key[2] = load(w + 8, 8);
    } else if (len >= 4) {
        key[0] = load(w, 4) | load(w + len - 4, 4) << 32;
    } else {
        key[0] = (uint64_t)(uint8_t)w[0] | (uint64_t)(uint8_t)w[len / 2] << 8 |
                 (uint64_t)(uint8_t)w[len - 1] << 16;
    }
}

static size_t key_slot(const uint64_t key[3], size_t len)
{
    uint64_t h = (key[0] ^ len) * 0x9E3779B97F4A7C15u;
    h = (h ^ h >> 29 ^ key[1]) * 0xD6E8FEB86659FD93u;
    h = (h ^ h >> 32 ^ key[2]) * 0x9E3779B97F4A7C15u;
    return (size_t)(h >> 40) % CACHE_SLOTS;
}

/* ---- encoding ---- */

struct nbi_encoder {
    const struct nbi_bpe *bpe;
    struct cached *cache;
    struct nbi_split_scratch split;
    struct nbi_merge_scratch merge;
    struct nbi_str repaired, normal;
    struct nbi_ids *out; /* output of the current call */
};

enum nb_status nbi_encoder_new(struct nbi_encoder **out, const struct nbi_bpe *bpe)
{
    struct nbi_encoder *e = calloc(1, sizeof *e);
    *out = e;
    if (e)
        e->cache = calloc(CACHE_SLOTS, sizeof *e->cache);
    if (!e || !e->cache) {
        nbi_encoder_free(e);
        *out = NULL;
        return nbi_fail_memory("encoder", CACHE_SLOTS * sizeof *e->cache);
    }
    e->bpe = bpe;
    return NB_OK;
}

void nbi_encoder_free(struct nbi_encoder *e)
{
    if (!e)
        return;
    free(e->cache);
    nbi_split_scratch_release(&e->split);
    nbi_merge_scratch_release(&e->merge);
    nbi_str_release(&e->repaired);
    nbi_str_release(&e->normal);
    free(e);
}

/* The id of a word that is itself a token (ignore_merges), or -1. */
static int64_t find_word_token(const struct nbi_bpe *b, const char *w, size_t len)
{
    if (!b->words)
        return -1;
    uint32_t i = (uint32_t)hash_bytes(w, len) & b->words_mask;
    for (; b->words[i]; i = (i + 1) & b->words_mask) {
        uint32_t id = b->words[i] - 1;
        if (b->offsets[id + 1] - b->offsets[id] == len &&
            memcmp(b->bytes + b->offsets[id], w, len) == 0)
            return id;
    }
    return -1;
}

/* Encodes one word into ids[len]; *count is the number of ids. */
static enum nb_status merge_word(struct nbi_encoder *e, const char *w, size_t len, int32_t *ids,
                                 size_t *count)
{
    const struct nbi_bpe *b = e->bpe;
    int64_t token = find_word_token(b, w, len);
    if (token >= 0) {
        ids[0] = (int32_t)token;
        *count = 1;
        return NB_OK;
    }
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        int32_t id = b->byte_ids[(uint8_t)w[i]];
        ids[n] = id;
        n += id >= 0;
    }
    return nbi_merge(&b->merges, &e->merge, ids, n, count);
}

static enum nb_status put_word(void *ctx, const char *w, size_t len)
{
    struct nbi_encoder *e = ctx;
    struct nbi_ids *out = e->out;
    size_t count;
    NBI_TRY(nbi_ids_reserve(out, len + CACHE_IDS));
    int32_t *ids = out->p + out->count;
    if (len > CACHE_WORD) {
        NBI_TRY(merge_word(e, w, len, ids, &count));
        out->count += count;
        return NB_OK;
    }
    uint64_t key[3];
    make_key(key, w, len);
    struct cached *c = &e->cache[key_slot(key, len)];
    if (c->len == len && c->key[0] == key[0] && c->key[1] == key[1] && c->key[2] == key[2]) {
        memcpy(ids, c->ids, sizeof c->ids); /* a copy of constant size is faster */
        out->count += c->count;
        return NB_OK;
    }
    NBI_TRY(merge_word(e, w, len, ids, &count));
    out->count += count;
    if (count <= CACHE_IDS) {
        memcpy(c->key, key, sizeof key);
        memcpy(c->ids, ids, count * sizeof *ids);
        c->len = (uint16_t)len;
        c->count = (uint16_t)count;
    }
    return NB_OK;
}

static enum nb_status put_id(struct nbi_encoder *e, int32_t id)
{
    NBI_TRY(nbi_ids_reserve(e->out, 1));
    e->out->p[e->out->count++] = id;
    return NB_OK;
}

/* Encodes the text between added tokens. */
static enum nb_status encode_text(struct nbi_encoder *e, const char *text, size_t len, bool special)
{
    const struct nbi_bpe *b = e->bpe;
    size_t clean = b->nfc ? nbi_nfc_prefix(b->classes, text, len) : len;
    if (clean < len) {
        e->normal.len = 0;
        nbi_str_append(&e->normal, text, clean);
        NBI_TRY(nbi_nfc(b->classes, text + clean, len - clean, &e->normal));
        text = e->normal.p;
        len = e->normal.len;
    }
    if (b->added_normalized.count == 0)
        return nbi_split(b->splitter, &e->split, text, len, put_word, e);
    struct nbi_added_iter it;
    struct nbi_added_part part;
    nbi_added_iter_init(&it, &b->added_normalized, text, len, special);
    while (nbi_added_next(&it, &part))
        NBI_TRY(part.token ? put_id(e, part.token->id)
                           : nbi_split(b->splitter, &e->split, text + part.start,
                                       part.end - part.start, put_word, e));
    return NB_OK;
}

enum nb_status nbi_encode(struct nbi_encoder *e, const char *text, size_t len, bool special,
                          struct nbi_ids *ids)
{
    struct nbi_added_iter it;
    struct nbi_added_part part;
    if (!nbi_utf8_valid(text, len)) {
        e->repaired.len = 0;
        nbi_utf8_repair(&e->repaired, text, len);
        NBI_TRY(nbi_str_status(&e->repaired));
        text = e->repaired.p;
        len = e->repaired.len;
    }
    e->out = ids;
    nbi_added_iter_init(&it, &e->bpe->added, text, len, special);
    while (nbi_added_next(&it, &part))
        NBI_TRY(part.token ? put_id(e, part.token->id)
                           : encode_text(e, text + part.start, part.end - part.start, special));
    return NB_OK;
}
