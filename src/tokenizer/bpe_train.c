/* bpe_train.c - learns merges: counts words, then joins the most frequent pair repeatedly.
 *
 * Each pair has its count and a list of the words that contain it; a word may stay in the list
 * after it lost the pair. A heap orders pairs by count. Counts change without touching the heap; an
 * entry that turns out to be outdated when popped is pushed again with the current count. */
#include "tokenizer/bpe_train.h"

#include <string.h>

#include "base/array.h"
#include "base/hash.h"
#include "base/utf8.h"
#include "tokenizer/added.h"
#include "tokenizer/chat_template.h"

/* ---- lists of indices ---- */

struct u32_list {
    uint32_t *p;
    size_t count, cap;
};

static enum nb_status push(struct u32_list *l, uint32_t v)
{
    NBI_TRY(NBI_ARRAY_RESERVE(l->p, l->cap, l->count + 1, "tokenizer training"));
    l->p[l->count++] = v;
    return NB_OK;
}

/* ---- hash tables of indices ---- */

/* An open-addressing table whose slots hold index + 1. The caller owns the indexed array and
 * supplies the hash of an element. */
struct table {
    uint32_t *slots;
    uint32_t mask;
    size_t count;
};

typedef uint64_t (*hash_fn)(const void *ctx, uint32_t index);

/* Ensures a free slot for one more element. */
static enum nb_status table_reserve(struct table *t, hash_fn hash, const void *ctx)
{
    if (t->slots && 2 * (t->count + 1) <= (size_t)t->mask + 1)
        return NB_OK;
    size_t n = t->slots ? 2 * ((size_t)t->mask + 1) : 1024;
    if (n > (size_t)1 << 31)
        return nbi_fail(NB_EUNSUPPORTED, "too much text to train a tokenizer on");
    uint32_t *slots = calloc(n, sizeof *slots);
    if (!slots)
        return nbi_fail_memory("tokenizer training", n * sizeof *slots);
    for (size_t i = 0; t->slots && i <= t->mask; i++)
        if (t->slots[i]) {
            size_t at = hash(ctx, t->slots[i] - 1) & (n - 1);
            while (slots[at])
                at = (at + 1) & (n - 1);
            slots[at] = t->slots[i];
        }
    free(t->slots);
    t->slots = slots;
    t->mask = (uint32_t)(n - 1);
    return NB_OK;
}

static uint64_t hash_bytes(const char *p, size_t len)
{
    uint64_t h = nbi_fnv1a(p, len);
    return h ^ h >> 32;
}

/* ---- interned texts: words while counting, tokens while merging ---- */

struct text {
    size_t at;
    uint32_t len;
    int64_t count;
};

struct texts {
    struct nbi_str bytes;
    struct text *list;
    size_t count, cap;
    struct table table;
};

static uint64_t hash_text(const void *ctx, uint32_t i)
{
    const struct texts *t = ctx;
    return hash_bytes(t->bytes.p + t->list[i].at, t->list[i].len);
}

/* Finds or adds a text; *index is its number. */
static enum nb_status intern(struct texts *t, const char *text, size_t len, uint32_t *index)
{
    NBI_TRY(table_reserve(&t->table, hash_text, t));
    size_t at = hash_bytes(text, len) & t->table.mask;
    for (; t->table.slots[at]; at = (at + 1) & t->table.mask) {
        const struct text *known = &t->list[t->table.slots[at] - 1];
        if (known->len == len && memcmp(nbi_str_text(&t->bytes) + known->at, text, len) == 0) {
            *index = t->table.slots[at] - 1;
            return NB_OK;
        }
    }
    NBI_TRY(NBI_ARRAY_RESERVE(t->list, t->cap, t->count + 1, "tokenizer training"));
    t->list[t->count] = (struct text){t->bytes.len, (uint32_t)len, 0};
    nbi_str_append(&t->bytes, text, len);
    NBI_TRY(nbi_str_status(&t->bytes));
    *index = (uint32_t)t->count++;
    t->table.slots[at] = *index + 1;
    t->table.count++;
    return NB_OK;
}

static void texts_release(struct texts *t)
{
    nbi_str_release(&t->bytes);
    free(t->list);
    free(t->table.slots);
    *t = (struct texts){0};
}

/* ---- the chat tokens ---- */

static enum nb_status make_separators(struct nbi_added *a, const uint8_t *classes)
{
    struct nbi_added_token *list = calloc(NBI_CHAT_TOKENS, sizeof *list);
    if (!list)
        return nbi_fail_memory("chat tokens", sizeof *list);
    for (int i = 0; i < NBI_CHAT_TOKENS; i++)
        list[i] = (struct nbi_added_token){nbi_chat_tokens[i].text, strlen(nbi_chat_tokens[i].text),
                                           i, 0, nbi_chat_tokens[i].special};
    nbi_added_init(a, list, NBI_CHAT_TOKENS, classes);
    return NB_OK;
}

/* ---- counting ---- */

struct nbi_bpe_trainer {
    uint8_t *classes;
    struct nbi_splitter *splitter;
    struct nbi_split_scratch scratch;
    struct nbi_added separators;
    struct nbi_str repaired, normal;
    struct texts words;
};

enum nb_status nbi_bpe_trainer_new(struct nbi_bpe_trainer **out)
{
    struct nbi_bpe_trainer *t = calloc(1, sizeof *t);
    const struct nbi_split_rules rules = {.count = 1, .stage = {{nbi_qwen_pattern, NBI_SPLIT_ALL}}};
    *out = NULL;
    if (!t)
        return nbi_fail_memory("trainer", sizeof *t);
    t->classes = malloc(NBI_CHAR_COUNT);
    enum nb_status rc = t->classes ? NB_OK : nbi_fail_memory("character classes", NBI_CHAR_COUNT);
    if (rc == NB_OK) {
        nbi_char_table(t->classes);
        rc = nbi_splitter_new(&t->splitter, &rules, t->classes);
    }
    if (rc == NB_OK)
        rc = make_separators(&t->separators, t->classes);
    if (rc == NB_OK)
        *out = t;
    else
        nbi_bpe_trainer_free(t);
    return rc;
}

void nbi_bpe_trainer_free(struct nbi_bpe_trainer *t)
{
    if (!t)
        return;
    free(t->classes);
    nbi_splitter_free(t->splitter);
    nbi_split_scratch_release(&t->scratch);
    nbi_added_release(&t->separators);
    nbi_str_release(&t->repaired);
    nbi_str_release(&t->normal);
    texts_release(&t->words);
    free(t);
}

static enum nb_status count_word(void *ctx, const char *word, size_t len)
{
    struct nbi_bpe_trainer *t = ctx;
    uint32_t i;
    if (len > UINT32_MAX)
        return nbi_fail(NB_EUNSUPPORTED, "a word of more than 4 GiB");
    NBI_TRY(intern(&t->words, word, len, &i));
    t->words.list[i].count++;
    return NB_OK;
}

enum nb_status nbi_bpe_trainer_add(struct nbi_bpe_trainer *t, const char *text, size_t len)
{
    struct nbi_added_iter it;
    struct nbi_added_part part;
    t->repaired.len = 0;
    nbi_utf8_repair(&t->repaired, text, len);
    NBI_TRY(nbi_str_status(&t->repaired));
    nbi_added_iter_init(&it, &t->separators, nbi_str_text(&t->repaired), t->repaired.len, true);
    while (nbi_added_next(&it, &part)) {
        if (part.token)
            continue;
        t->normal.len = 0;
        NBI_TRY(nbi_nfc(t->classes, t->repaired.p + part.start, part.end - part.start, &t->normal));
        NBI_TRY(nbi_split(t->splitter, &t->scratch, nbi_str_text(&t->normal), t->normal.len,
                          count_word, t));
    }
    return NB_OK;
}

/* ---- merging ---- */

struct pair {
    uint32_t left, right;
    int64_t count;
    struct u32_list words; /* that contain it, or did */
    bool touched;          /* listed in merging.touched */
};

/* A heap entry; outdated if count differs from the pair's. */
struct entry {
    int64_t count;
    uint32_t pair;
};

struct merging {
    struct texts tokens;     /* byte strings; the first 256 are single bytes in alphabet order */
    struct u32_list symbols; /* current tokens of all words */
    size_t *starts;          /* [word_count] first symbol of each word */
    uint32_t *lengths;       /* [word_count] symbols of each word */
    const struct text *words;
    size_t word_count;
    struct pair *pairs;
    size_t pair_count, pair_cap;
    struct table table;
    struct entry *heap;
    size_t heap_count, heap_cap;
    struct u32_list touched; /* pairs that the current merge made more frequent */
};

static uint64_t hash_ids(uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;
}

static uint64_t hash_pair(const void *ctx, uint32_t i)
{
    const struct merging *m = ctx;
    return hash_ids(m->pairs[i].left, m->pairs[i].right);
}

static enum nb_status find_pair(struct merging *m, uint32_t left, uint32_t right, uint32_t *index)
{
    NBI_TRY(table_reserve(&m->table, hash_pair, m));
    size_t at = hash_ids(left, right) & m->table.mask;
    for (; m->table.slots[at]; at = (at + 1) & m->table.mask) {
        *index = m->table.slots[at] - 1;
        if (m->pairs[*index].left == left && m->pairs[*index].right == right)
            return NB_OK;
    }
    NBI_TRY(NBI_ARRAY_RESERVE(m->pairs, m->pair_cap, m->pair_count + 1, "tokenizer training"));
    m->pairs[m->pair_count] = (struct pair){.left = left, .right = right};
    *index = (uint32_t)m->pair_count++;
    m->table.slots[at] = *index + 1;
    m->table.count++;
    return NB_OK;
}

/* Heap order: higher counts first, then lower ids. */
static bool before(const struct merging *m, struct entry a, struct entry b)
{
    const struct pair *x = &m->pairs[a.pair], *y = &m->pairs[b.pair];
    if (a.count != b.count)
        return a.count > b.count;
    return x->left != y->left ? x->left < y->left : x->right < y->right;
}

static enum nb_status heap_push(struct merging *m, struct entry e)
{
    NBI_TRY(NBI_ARRAY_RESERVE(m->heap, m->heap_cap, m->heap_count + 1, "tokenizer training"));
    size_t i = m->heap_count++;
    for (; i > 0 && before(m, e, m->heap[(i - 1) / 2]); i = (i - 1) / 2)
        m->heap[i] = m->heap[(i - 1) / 2];
    m->heap[i] = e;
    return NB_OK;
}

static struct entry heap_pop(struct merging *m)
{
    struct entry top = m->heap[0], e = m->heap[--m->heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < m->heap_count; i = child) {
        if (child + 1 < m->heap_count && before(m, m->heap[child + 1], m->heap[child]))
            child++;
        if (!before(m, m->heap[child], e))
            break;
        m->heap[i] = m->heap[child];
    }
    m->heap[i] = e;
    return top;
}

/* Records that a pair appeared in a word (sign 1) or disappeared from it (sign -1). */
static enum nb_status change(struct merging *m, uint32_t left, uint32_t right, uint32_t word,
                             int sign)
{
    uint32_t i;
    NBI_TRY(find_pair(m, left, right, &i));
    struct pair *p = &m->pairs[i];
    p->count += sign * m->words[word].count;
    if (sign < 0)
        return NB_OK;
    if (p->words.count == 0 || p->words.p[p->words.count - 1] != word)
        NBI_TRY(push(&p->words, word));
    if (p->touched)
        return NB_OK;
    p->touched = true;
    return push(&m->touched, i);
}

static enum nb_status push_touched(struct merging *m)
{
    for (size_t i = 0; i < m->touched.count; i++) {
        struct pair *p = &m->pairs[m->touched.p[i]];
        p->touched = false;
        if (p->count > 0)
            NBI_TRY(heap_push(m, (struct entry){p->count, m->touched.p[i]}));
    }
    m->touched.count = 0;
    return NB_OK;
}

/* Replaces each (left, right) in a word by id, scanning from the left. */
static enum nb_status merge_in_word(struct merging *m, uint32_t word, uint32_t left, uint32_t right,
                                    uint32_t id)
{
    uint32_t *s = m->symbols.p + m->starts[word];
    uint32_t n = m->lengths[word], out = 0;
    for (uint32_t i = 0; i < n;) {
        if (s[i] != left || i + 1 == n || s[i + 1] != right) {
            s[out++] = s[i++];
            continue;
        }
        if (out > 0) {
            NBI_TRY(change(m, s[out - 1], left, word, -1));
            NBI_TRY(change(m, s[out - 1], id, word, 1));
        }
        s[out++] = id;
        i += 2;
        if (i < n) {
            NBI_TRY(change(m, right, s[i], word, -1));
            NBI_TRY(change(m, id, s[i], word, 1));
        }
    }
    m->lengths[word] = out;
    return NB_OK;
}

static enum nb_status merge_everywhere(struct merging *m, uint32_t pair, uint32_t id)
{
    uint32_t left = m->pairs[pair].left, right = m->pairs[pair].right;
    struct u32_list where = m->pairs[pair].words;
    m->pairs[pair].words = (struct u32_list){0};
    enum nb_status rc = NB_OK;
    for (size_t i = 0; i < where.count && rc == NB_OK; i++) {
        rc = merge_in_word(m, where.p[i], left, right, id);
        if (rc == NB_OK && i % 1024 == 0)
            rc = nbi_check_interrupt();
    }
    free(where.p);
    return rc == NB_OK ? push_touched(m) : rc;
}

/* Adds the 256 bytes as tokens, ordered by the characters that represent them. */
static enum nb_status make_alphabet(struct merging *m, uint32_t id_of[256])
{
    for (uint32_t c = 0; c < 0x144; c++) {
        int byte = nbi_byte_of(c);
        char b = (char)byte;
        if (byte >= 0)
            NBI_TRY(intern(&m->tokens, &b, 1, &id_of[byte]));
    }
    return NB_OK;
}

static enum nb_status begin(struct merging *m, const struct texts *words)
{
    uint32_t id_of[256];
    m->words = words->list;
    m->word_count = words->count;
    m->starts = malloc((words->count + 1) * sizeof *m->starts);
    m->lengths = malloc((words->count + 1) * sizeof *m->lengths);
    if (!m->starts || !m->lengths)
        return nbi_fail_memory("tokenizer training", words->count);
    NBI_TRY(make_alphabet(m, id_of));
    for (uint32_t w = 0; w < words->count; w++) {
        const struct text *t = &words->list[w];
        m->starts[w] = m->symbols.count;
        m->lengths[w] = t->len;
        for (uint32_t i = 0; i < t->len; i++)
            NBI_TRY(push(&m->symbols, id_of[(uint8_t)words->bytes.p[t->at + i]]));
    }
    for (uint32_t w = 0; w < words->count; w++)
        for (uint32_t i = 0; i + 1 < m->lengths[w]; i++) {
            const uint32_t *s = m->symbols.p + m->starts[w] + i;
            NBI_TRY(change(m, s[0], s[1], w, 1));
        }
    return push_touched(m);
}

static void merging_release(struct merging *m)
{
    texts_release(&m->tokens);
    for (size_t i = 0; i < m->pair_count; i++)
        free(m->pairs[i].words.p);
    free(m->pairs);
    free(m->symbols.p);
    free(m->starts);
    free(m->lengths);
    free(m->table.slots);
    free(m->heap);
    free(m->touched.p);
}

/* ---- the result ---- */

/* Appends a token, written in the byte-level alphabet. */
static void put_token(struct nbi_str *s, const struct texts *tokens, uint32_t id)
{
    for (uint32_t i = 0; i < tokens->list[id].len; i++)
        nbi_str_put_char(s, nbi_byte_character((uint8_t)tokens->bytes.p[tokens->list[id].at + i]));
}

static enum nb_status keep(struct nbi_vocab *v, struct nbi_str *s, const char **out)
{
    char *copy;
    NBI_TRY(nbi_str_status(s));
    NBI_TRY(nbi_arena_string(&v->arena, "tokens", s->p, s->len, &copy));
    *out = copy;
    return NB_OK;
}

static enum nb_status add_merge(struct nbi_vocab *v, const struct merging *m, uint32_t left,
                                uint32_t right, struct nbi_str *s)
{
    const char *text;
    s->len = 0;
    put_token(s, &m->tokens, left);
    nbi_str_append(s, " ", 1);
    put_token(s, &m->tokens, right);
    NBI_TRY(keep(v, s, &text));
    return nbi_vocab_add_merge(v, text, s->len);
}

/* Finds or adds the token that joins two others. */
static enum nb_status join_tokens(struct merging *m, uint32_t left, uint32_t right,
                                  struct nbi_str *s, uint32_t *id)
{
    const struct text *a = &m->tokens.list[left], *b = &m->tokens.list[right];
    s->len = 0;
    nbi_str_append(s, m->tokens.bytes.p + a->at, a->len);
    nbi_str_append(s, m->tokens.bytes.p + b->at, b->len);
    NBI_TRY(nbi_str_status(s));
    return intern(&m->tokens, s->p, s->len, id);
}

static enum nb_status learn(struct merging *m, const struct nbi_bpe_trainer_opts *opts,
                            struct nbi_vocab *v, struct nbi_str *s)
{
    size_t wanted = (size_t)(opts->vocab - NBI_CHAT_TOKENS);
    while (m->tokens.count < wanted && m->heap_count > 0) {
        struct entry top = heap_pop(m);
        const struct pair *p = &m->pairs[top.pair];
        if (top.count != p->count) {
            if (p->count > 0)
                NBI_TRY(heap_push(m, (struct entry){p->count, top.pair}));
            continue;
        }
        if (top.count < opts->min_count)
            break;
        uint32_t id, left = p->left, right = p->right;
        NBI_TRY(join_tokens(m, left, right, s, &id));
        NBI_TRY(add_merge(v, m, left, right, s));
        NBI_TRY(merge_everywhere(m, top.pair, id));
        NBI_TRY(nbi_check_interrupt());
        if (opts->progress && m->tokens.count % 64 == 0)
            opts->progress(opts->progress_ctx, m->tokens.count, wanted);
    }
    return NB_OK;
}

static enum nb_status finish(const struct merging *m, struct nbi_vocab *v, struct nbi_str *s)
{
    int64_t id = 0;
    for (; id < (int64_t)m->tokens.count; id++) {
        struct nbi_token t = {.type = NBI_TOKEN_NORMAL, .flags = NBI_TOKEN_MODEL};
        s->len = 0;
        put_token(s, &m->tokens, (uint32_t)id);
        NBI_TRY(keep(v, s, &t.text));
        t.len = (uint32_t)s->len;
        NBI_TRY(nbi_vocab_set(v, id, t));
    }
    v->pad = id;
    v->eos = id + 2;
    for (int i = 0; i < NBI_CHAT_TOKENS; i++, id++)
        NBI_TRY(nbi_vocab_set(
            v, id,
            (struct nbi_token){nbi_chat_tokens[i].text, (uint32_t)strlen(nbi_chat_tokens[i].text),
                               nbi_chat_tokens[i].special ? NBI_TOKEN_CONTROL : NBI_TOKEN_USER,
                               0}));
    nbi_vocab_finish(v);
    return NB_OK;
}

size_t nbi_bpe_trainer_words(const struct nbi_bpe_trainer *t)
{
    return t->words.count;
}

enum nb_status nbi_bpe_trainer_check(int64_t vocab)
{
    if (vocab >= NBI_BPE_TRAINER_MIN && vocab < NBI_VOCAB_MAX)
        return NB_OK;
    return nbi_fail(NB_EINVAL, "a vocabulary has %d to %d entries, not %lld", NBI_BPE_TRAINER_MIN,
                    NBI_VOCAB_MAX - 1, (long long)vocab);
}

enum nb_status nbi_bpe_trainer_run(struct nbi_bpe_trainer *t,
                                   const struct nbi_bpe_trainer_opts *opts, struct nbi_vocab *v)
{
    struct merging m = {0};
    struct nbi_str s = {0};
    nbi_vocab_init(v);
    NBI_TRY(nbi_bpe_trainer_check(opts->vocab));
    enum nb_status rc = begin(&m, &t->words);
    if (rc == NB_OK)
        rc = learn(&m, opts, v, &s);
    if (rc == NB_OK)
        rc = finish(&m, v, &s);
    merging_release(&m);
    texts_release(&t->words);
    nbi_str_release(&s);
    return rc;
}
