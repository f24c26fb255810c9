/* test_bpe.c - compares encoding and decoding with the tokenizers library (golden/tokenizer), and
 * with BPE written by its definition over lists of strings. */
#include <pthread.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/jscan.h"
#include "base/utf8.h"
#include "tokenizer/bpe.h"
#include "tokenizer/tokenizer.h"
#include "unit/support.h"

static uint64_t seed = 1;

static uint32_t next_random(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

/* ---- golden cases ---- */

#define GOLDEN NB_TEST_SOURCE "/golden/tokenizer/"

/* The text of a case: "text", or the bytes in "hex". */
static void case_text(struct nbi_jspan row, struct nbi_str *out)
{
    struct nbi_str hex = {0};
    out->len = 0;
    nbi_str_append(out, "", 0);
    nbi_jstring(nbi_jget(row, "text"), out);
    nbi_jstring(nbi_jget(row, "hex"), &hex);
    for (size_t i = 0; i + 1 < hex.len; i += 2) {
        char digits[3] = {hex.p[i], hex.p[i + 1], 0}, byte = (char)strtol(digits, NULL, 16);
        nbi_str_append(out, &byte, 1);
    }
    nbi_str_release(&hex);
}

static size_t read_ids(struct nbi_jspan list, int32_t *ids, size_t room)
{
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    size_t n = 0;
    nbi_jiter_init(&it, list);
    for (; nbi_jiter_next(&it, &key, &value); n++) {
        int64_t id = -1;
        assert_true(n < room && nbi_jint(value, 0, INT32_MAX, &id));
        ids[n] = (int32_t)id;
    }
    return n;
}

static int bad_rows; /* cases with wrong ids; all are printed before the test fails */

static void check_ids(struct nb_tokenizer *t, const struct nbi_str *text, bool special,
                      struct nbi_jspan list, const char *where)
{
    int32_t wanted[1024], *ids;
    size_t count, n = read_ids(list, wanted, 1024);
    char *copy = malloc(text->len ? text->len : 1); /* exact size, so that ASan sees overruns */
    memcpy(copy, text->p, text->len);
    assert_ok(nb_tokenizer_encode(t, copy, text->len, special, &ids, &count));
    if (count != n || (n && memcmp(ids, wanted, n * sizeof *ids) != 0)) {
        size_t at = 0;
        while (at < n && at < count && ids[at] == wanted[at])
            at++;
        print_error("%s: %zu ids, %zu expected; the first that differs is number %zu\n", where,
                    count, n, at);
        bad_rows++;
    }
    free(ids);
    free(copy);
}

/* Decoding, with malformed bytes as U+FFFD, must give `wanted`, at once and token by token. */
static void assert_text(const struct nb_tokenizer *t, const int32_t *ids, size_t n,
                        const char *wanted, const char *where)
{
    char *bytes;
    size_t len, unknown;
    struct nbi_str whole = {0}, stream = {0};
    struct nb_decoder d = {0};
    assert_ok(nb_tokenizer_decode(t, ids, n, &bytes, &len, &unknown));
    assert_int_equal(unknown, 0);
    assert_int_equal(bytes[len], 0);
    nbi_utf8_repair(&whole, bytes, len);
    for (size_t i = 0; i <= n; i++) {
        const char *part;
        size_t part_len;
        assert_ok(nb_decoder_next(&d, t, i < n ? ids[i] : -1, &part, &part_len));
        assert_true(nbi_utf8_valid(part, part_len));
        nbi_str_append(&stream, part, part_len);
    }
    if (strcmp(nbi_str_text(&whole), wanted) != 0)
        fail_msg("%s: decoded to '%s', '%s' expected", where, nbi_str_text(&whole), wanted);
    assert_int_equal(stream.len, whole.len);
    assert_memory_equal(nbi_str_text(&stream), nbi_str_text(&whole), whole.len);
    nb_decoder_release(&d);
    nbi_str_release(&whole);
    nbi_str_release(&stream);
    free(bytes);
}

static void check_case(struct nb_tokenizer *t, struct nbi_jspan row, const char *where)
{
    struct nbi_str text = {0}, decoded = {0};
    struct nbi_jspan plain = nbi_jget(row, "plain"), ids = nbi_jget(row, "ids");
    int32_t list[1024];
    case_text(row, &text);
    if (ids.p) {
        check_ids(t, &text, true, ids, where);
        check_ids(t, &text, false, plain.p ? plain : ids, where);
        check_ids(t, &text, true, ids, where); /* the second time from the cache */
    } else {
        ids = nbi_jget(row, "decode");
    }
    size_t n = read_ids(ids, list, 1024);
    if (nbi_jget(row, "decoded").p)
        nbi_jstring(nbi_jget(row, "decoded"), &decoded);
    else
        nbi_utf8_repair(&decoded, text.p, text.len);
    if (!memchr(nbi_str_text(&decoded), 0, decoded.len))
        assert_text(t, list, n, nbi_str_text(&decoded), where);
    nbi_str_release(&text);
    nbi_str_release(&decoded);
}

static int check_cases(struct nb_tokenizer *t, const char *path)
{
    char *file;
    size_t size;
    int rows = 0;
    assert_ok(nbi_file_read(path, 1 << 20, &file, &size));
    for (char *line = file, *end; *line; line = end + 1) {
        struct nbi_jspan row;
        char where[400];
        end = strchr(line, '\n');
        assert_ok(nbi_jscan(&row, line, (size_t)(end - line)));
        snprintf(where, sizeof where, "%s:%d %.*s", path, ++rows, (int)(end - line), line);
        check_case(t, row, where);
    }
    free(file);
    return rows;
}

static void check_golden(const char *name, int at_least)
{
    struct nb_tokenizer *t;
    char model[400], cases[400];
    bad_rows = 0;
    snprintf(model, sizeof model, GOLDEN "%s/tokenizer.json", name);
    snprintf(cases, sizeof cases, GOLDEN "%s/cases.jsonl", name);
    assert_ok(nb_tokenizer_open(&t, model, NULL));
    assert_true(check_cases(t, cases) >= at_least);
    if (bad_rows > 0) {
        nb_tokenizer_close(t);
        fail_msg("%d results of %s differ", bad_rows, name);
    }
    nb_tokenizer_close(t);
    snprintf(model, sizeof model, GOLDEN "%s", name); /* the directory */
    assert_ok(nb_tokenizer_open(&t, model, NULL));
    check_cases(t, cases);
    nb_tokenizer_close(t);
    assert_int_equal(bad_rows, 0);
}

static void test_golden__qwen_ids_match(void **state)
{
    (void)state;
    check_golden("qwen", 330);
}

static void test_golden__gpt2_ids_match(void **state)
{
    (void)state;
    check_golden("gpt2", 140);
}

static void test_golden__llama3_ids_match(void **state)
{
    (void)state;
    check_golden("llama3", 150);
}

/* ---- random vocabularies ---- */

/* A small vocabulary over a few letters. */
struct toy {
    char tokens[120][64];
    int count;
    int left[120], right[120], joined[120];
    int merges;
};

static int toy_find(const struct toy *toy, const char *text)
{
    for (int i = 0; i < toy->count; i++)
        if (strcmp(toy->tokens[i], text) == 0)
            return i;
    return -1;
}

static void make_toy(struct toy *toy, const char *letters, int merges)
{
    *toy = (struct toy){0};
    for (; *letters; letters++)
        snprintf(toy->tokens[toy->count++], 64, "%c", *letters);
    for (int i = 0; i < merges; i++) {
        int a = (int)next_random((uint32_t)toy->count), b = (int)next_random((uint32_t)toy->count);
        char text[128];
        bool known = false;
        for (int k = 0; k < toy->merges; k++)
            known = known || (toy->left[k] == a && toy->right[k] == b);
        if (known || snprintf(text, sizeof text, "%s%s", toy->tokens[a], toy->tokens[b]) > 60)
            continue;
        int id = toy_find(toy, text);
        if (id < 0) {
            id = toy->count++;
            snprintf(toy->tokens[id], 64, "%.63s", text);
        }
        toy->left[toy->merges] = a;
        toy->right[toy->merges] = b;
        toy->joined[toy->merges++] = id;
    }
}

/* Makes a vocabulary of the toy. Ids are xored with `scramble`, so that they do not follow ranks.
 */
static void toy_vocab(struct nbi_vocab *v, const struct toy *toy, int scramble)
{
    nbi_vocab_init(v);
    for (int i = 0; i < toy->count; i++)
        assert_ok(nbi_vocab_set(v, i ^ scramble,
                                (struct nbi_token){toy->tokens[i], (uint32_t)strlen(toy->tokens[i]),
                                                   NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL}));
    for (int i = 0; i < toy->merges; i++) {
        char text[160], *copy;
        int n = snprintf(text, sizeof text, "%s %s", toy->tokens[toy->left[i]],
                         toy->tokens[toy->right[i]]);
        assert_ok(nbi_arena_string(&v->arena, "merges", text, (size_t)n, &copy));
        assert_ok(nbi_vocab_add_merge(v, copy, (size_t)n));
    }
    nbi_vocab_finish(v);
}

/* The definition: apply the first merge of the list that matches anywhere, at its first position.
 */
static size_t toy_encode(const struct toy *toy, const char *word, size_t len, int32_t *ids)
{
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        char text[2] = {word[i], 0};
        ids[n++] = toy_find(toy, text);
    }
    for (int m = 0; m < toy->merges;) {
        size_t at = 0;
        while (at + 1 < n && (ids[at] != toy->left[m] || ids[at + 1] != toy->right[m]))
            at++;
        if (at + 1 >= n) {
            m++;
            continue;
        }
        ids[at] = toy->joined[m];
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        n--;
        m = 0;
    }
    return n;
}

static void compare_word(struct nbi_encoder *e, const struct toy *toy, int scramble,
                         const char *word, size_t len)
{
    int32_t wanted[4096];
    struct nbi_ids ids = {0};
    assert_ok(nbi_encode(e, word, len, true, &ids));
    size_t n = toy_encode(toy, word, len, wanted);
    for (size_t i = 0; i < n; i++)
        wanted[i] ^= scramble;
    if (ids.count != n || memcmp(ids.p, wanted, n * sizeof *wanted) != 0)
        fail_msg("'%.*s': %zu ids, %zu expected", (int)len, word, ids.count, n);
    nbi_ids_release(&ids);
}

static void random_word(char *word, size_t len, const char *letters)
{
    uint32_t run = 1 + next_random(3);
    for (size_t i = 0; i < len; i++)
        word[i] = i > 0 && next_random(run) ? word[i - 1]
                                            : letters[next_random((uint32_t)strlen(letters))];
}

static void test_bpe__matches_the_definition(void **state)
{
    (void)state;
    static const size_t more[] = {63, 64, 65, 66, 67, 100, 300};
    for (int round = 0; round < 30; round++) {
        struct toy toy;
        struct nbi_vocab v;
        struct nbi_bpe *bpe;
        struct nbi_encoder *e;
        char word[512];
        int scramble = round % 2 ? 0x1D : 0;
        const char *letters = round % 3 ? "abc" : "ab";
        make_toy(&toy, letters, 1 + (int)next_random(80));
        toy_vocab(&v, &toy, scramble);
        assert_ok(nbi_bpe_new(&bpe, &v));
        nbi_vocab_release(&v);
        assert_ok(nbi_encoder_new(&e, bpe));
        for (int i = 0; i < 400; i++) {
            size_t len = i < 360 ? 1 + (size_t)i % 30 : more[(size_t)i % 7];
            random_word(word, len, letters);
            compare_word(e, &toy, scramble, word, len); /* empty cache */
            compare_word(e, &toy, scramble, word, len); /* from the cache, if stored */
        }
        nbi_encoder_free(e);
        nbi_bpe_free(bpe);
    }
}

/* Encodes many more words than the cache has slots, then all of them again. */
static void test_bpe__cache_does_not_change_ids(void **state)
{
    (void)state;
    struct toy toy;
    struct nbi_vocab v;
    struct nbi_bpe *bpe;
    struct nbi_encoder *e, *cold = NULL;
    make_toy(&toy, "abcd", 0);
    for (int n = 1; n <= 8; n *= 2) { /* runs of 'a' become few tokens, so they are cached */
        char run[17] = "aaaaaaaaaaaaaaaa";
        toy.left[toy.merges] = toy.right[toy.merges] = n == 1 ? 0 : toy.count - 1;
        toy.joined[toy.merges++] = toy.count;
        snprintf(toy.tokens[toy.count++], 64, "%.*s", 2 * n, run);
    }
    toy_vocab(&v, &toy, 0);
    assert_ok(nbi_bpe_new(&bpe, &v));
    nbi_vocab_release(&v);
    assert_ok(nbi_encoder_new(&e, bpe));
    enum { WORDS = 40000 };
    char(*words)[26] = malloc(WORDS * sizeof *words);
    size_t *counts = malloc(WORDS * sizeof *counts);
    struct nbi_ids all = {0};
    for (int i = 0; i < WORDS; i++) { /* words of all lengths that differ in one byte */
        size_t len = 1 + (size_t)i % 25;
        memset(words[i], 0, sizeof *words);
        random_word(words[i], len, i % 2 ? "abcd" : "a");
        words[i][next_random((uint32_t)len)] = "abcd"[next_random(4)];
    }
    for (int pass = 0; pass < 2; pass++) {
        all.count = 0;
        for (int i = 0; i < WORDS; i++) {
            size_t before = all.count;
            assert_ok(nbi_encode(e, words[i], strlen(words[i]), true, &all));
            if (pass == 0)
                counts[i] = all.count - before;
            assert_int_equal(all.count - before, counts[i]);
        }
    }
    size_t at = 0;
    for (int i = 0; i < WORDS; at += counts[i++]) {
        struct nbi_ids fresh = {0};
        if (i % 250 == 0) { /* a new encoder, with an empty cache */
            nbi_encoder_free(cold);
            assert_ok(nbi_encoder_new(&cold, bpe));
        }
        assert_ok(nbi_encode(cold, words[i], strlen(words[i]), true, &fresh));
        assert_int_equal(fresh.count, counts[i]);
        assert_memory_equal(fresh.p, all.p + at, counts[i] * sizeof *fresh.p);
        nbi_ids_release(&fresh);
    }
    nbi_ids_release(&all);
    free(words);
    free(counts);
    nbi_encoder_free(cold);
    nbi_encoder_free(e);
    nbi_bpe_free(bpe);
}

/* ---- threads ---- */

struct worker {
    struct nb_tokenizer *t;
    int failures;
};

static void random_text(struct nbi_str *text, uint64_t *state)
{
    static const char *const parts[] = {"the ",      "it's ", "\n",   "<|im_start|>", "  ", "w3w",
                                        "e\xCC\x81", "12",    "xyz ", "\xE4\xB8\xAD", "[5]"};
    text->len = 0;
    for (int i = 0; i < 60; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        nbi_str_puts(text, parts[(*state >> 33) % (sizeof parts / sizeof *parts)]);
    }
}

static uint64_t hash_ids(const int32_t *ids, size_t count)
{
    uint64_t h = 1;
    for (size_t i = 0; i < count; i++)
        h = h * 31 + (uint32_t)ids[i];
    return h;
}

static uint64_t encode_all(struct nb_tokenizer *t)
{
    struct nbi_str text = {0};
    uint64_t state = 5, sum = 0;
    for (int i = 0; i < 2000; i++) {
        int32_t *ids;
        size_t count;
        random_text(&text, &state);
        if (nb_tokenizer_encode(t, text.p, text.len, true, &ids, &count) != NB_OK)
            return 0;
        sum = sum * 7 + hash_ids(ids, count);
        free(ids);
    }
    nbi_str_release(&text);
    return sum;
}

static uint64_t expected_sum;

static void *work(void *arg)
{
    struct worker *w = arg;
    w->failures = encode_all(w->t) != expected_sum;
    return NULL;
}

static void test_tokenizer__threads_may_share_it(void **state)
{
    (void)state;
    struct nb_tokenizer *t;
    struct worker workers[4];
    pthread_t threads[4];
    assert_ok(nb_tokenizer_open(&t, GOLDEN "qwen", NULL));
    expected_sum = encode_all(t);
    for (int i = 0; i < 4; i++) {
        workers[i].t = t;
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(workers[i].failures, 0);
    }
    nb_tokenizer_close(t);
}

/* ---- failures ---- */

/* Limits the address space to its current size plus `more` bytes; 0: no limit. */
static void limit_memory(size_t more)
{
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    assert_int_equal(getrlimit(RLIMIT_AS, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    if (more > 0) {
        unsigned long pages = 0;
        FILE *f = fopen("/proc/self/statm", "re");
        assert_non_null(f);
        assert_int_equal(fscanf(f, "%lu", &pages), 1);
        fclose(f);
        limit.rlim_cur = pages * (size_t)sysconf(_SC_PAGESIZE) + more;
    }
    assert_int_equal(setrlimit(RLIMIT_AS, &limit), 0);
}

/* A call that runs out of memory does not affect the next one. */
static void test_tokenizer__works_after_a_failure(void **state)
{
    (void)state;
    struct nb_tokenizer *t;
    const size_t len =
        (size_t)40 << 20; /* the ids fit into the limit, the repaired copy does not */
    int32_t *ids, *again;
    size_t count, count_again;
    if (SANITIZED)
        skip("sanitizers need the address space");
    char *text = malloc(len);
    assert_non_null(text);
    memset(text, 'a', len);
    text[len - 1] = '\xFF';
    assert_ok(nb_tokenizer_open(&t, GOLDEN "qwen", NULL));
    assert_ok(nb_tokenizer_encode(t, "a\xFF", 2, true, &ids, &count));
    limit_memory((size_t)100 << 20);
    enum nb_status rc = nb_tokenizer_encode(t, text, len, true, &again, &count_again);
    limit_memory(0);
    assert_int_equal(rc, NB_ENOMEM);
    assert_non_null(strstr(nb_last_error(), "text of"));
    assert_ok(nb_tokenizer_encode(t, "a\xFF", 2, true, &again, &count_again));
    assert_int_equal(count_again, count);
    assert_memory_equal(again, ids, count * sizeof *ids);
    free(ids);
    free(again);
    free(text);
    nb_tokenizer_close(t);
}

/* ---- decoding ---- */

static void test_decoder__streams_the_same_text(void **state)
{
    (void)state;
    struct nb_tokenizer *t;
    assert_ok(nb_tokenizer_open(&t, GOLDEN "qwen", NULL));
    int32_t size = (int32_t)nb_tokenizer_size(t);
    for (int round = 0; round < 20000; round++) {
        int32_t ids[24];
        size_t n = next_random(24), len, unknown, wanted_unknown = 0;
        char *bytes;
        struct nbi_str whole = {0}, stream = {0};
        struct nb_decoder d = {0};
        for (size_t i = 0; i < n; i++) {
            /* Mostly single bytes, so that characters span tokens and some are malformed. */
            ids[i] = (int32_t)next_random(next_random(4) ? 256 : (uint32_t)size + 9);
            wanted_unknown += ids[i] >= size;
        }
        assert_ok(nb_tokenizer_decode(t, ids, n, &bytes, &len, &unknown));
        assert_int_equal(unknown, wanted_unknown);
        nbi_utf8_repair(&whole, bytes, len);
        for (size_t i = 0; i <= n; i++) {
            const char *part;
            size_t part_len;
            assert_ok(nb_decoder_next(&d, t, i < n ? ids[i] : -1, &part, &part_len));
            if (!nbi_utf8_valid(part, part_len))
                fail_msg("part of a character in round %d", round);
            assert_true(d.count >= 0 && d.count <= 3);
            nbi_str_append(&stream, part, part_len);
        }
        assert_int_equal(d.count, 0);
        assert_int_equal(stream.len, whole.len);
        assert_memory_equal(nbi_str_text(&stream), nbi_str_text(&whole), whole.len);
        nb_decoder_release(&d);
        nbi_str_release(&whole);
        nbi_str_release(&stream);
        free(bytes);
    }
    nb_tokenizer_close(t);
}

static void test_tokenizer__decode_counts_unknown_ids(void **state)
{
    (void)state;
    struct nb_tokenizer *t;
    char *text;
    size_t len, unknown;
    assert_ok(nb_tokenizer_open(&t, GOLDEN "qwen", NULL));
    assert_ok(nb_tokenizer_decode(t, NULL, 0, &text, &len, &unknown));
    assert_string_equal(text, "");
    assert_int_equal(len + unknown, 0);
    free(text);
    const int32_t ids[] = {64, -1, 220, INT32_MAX, 65, INT32_MIN, (int32_t)nb_tokenizer_size(t)};
    assert_ok(nb_tokenizer_decode(t, ids, 7, &text, &len, &unknown));
    assert_string_equal(text, "a b");
    assert_int_equal(unknown, 4);
    free(text);
    assert_ok(nb_tokenizer_decode(t, ids, 3, &text, &len, NULL));
    assert_int_equal(len, 2);
    free(text);
    nb_tokenizer_close(t);
    nb_tokenizer_close(NULL);
}

/* ---- the tables ---- */

static void test_bpe__tables_hold_bytes_and_added_tokens(void **state)
{
    (void)state;
    struct nb_tokenizer *t;
    size_t len;
    assert_ok(nb_tokenizer_open(&t, GOLDEN "qwen", NULL));
    const struct nbi_bpe *b = nbi_tokenizer_bpe(t);
    assert_int_equal(nbi_bpe_size(b), nb_tokenizer_size(t));
    assert_int_equal(nbi_bpe_size(b), 647); /* 600 + 47; another added token is among the 600 */
    assert_int_equal(nbi_bpe_added(b, "<|endoftext|>"), 600);
    assert_int_equal(nbi_bpe_added(b, "<|im_end|>"), 602);
    assert_int_equal(nbi_bpe_added(b, "<think>"), 604);
    assert_int_equal(nbi_bpe_added(b, "hello"), -1);
    assert_int_equal(nbi_bpe_added(b, ""), -1);
    assert_true(nbi_bpe_special(b, 600));
    assert_false(nbi_bpe_special(b, 604));
    assert_false(nbi_bpe_special(b, 5));
    assert_false(nbi_bpe_special(b, -1));
    assert_false(nbi_bpe_special(b, 1000000));
    assert_memory_equal(nbi_bpe_token(b, 604, &len), "<think>", 7);
    assert_int_equal(len, 7);
    assert_memory_equal(nbi_bpe_token(b, 220, &len), " ",
                        1); /* decoded, not in the byte-level alphabet */
    assert_int_equal(len, 1);
    assert_null(nbi_bpe_token(b, -1, &len));
    assert_null(nbi_bpe_token(b, 647, &len));
    assert_int_equal(len, 0);
    nb_tokenizer_close(t);
}

static enum nb_status open_error(const char *model, const char *model_dir)
{
    struct nb_tokenizer *t;
    enum nb_status rc = nb_tokenizer_open(&t, model, model_dir);
    assert_null(t);
    return rc;
}

static void test_tokenizer__opens_files_and_directories(void **state)
{
    (void)state;
    struct nb_tokenizer *t;
    assert_fails(open_error(test_path("none"), NULL), NB_ENOTFOUND, "No such file");
    assert_fails(open_error(test_path("none.json"), NULL), NB_ENOTFOUND, "none.json");
    assert_fails(open_error(test_path("none.gguf"), NULL), NB_ENOTFOUND, "none.gguf");
    assert_fails(open_error(test_path(""), NULL), NB_ENOTFOUND, "tokenizer.json");
    put("weights.dat", "x"); /* never read */
    assert_fails(open_error(test_path("weights.dat"), NULL), NB_ENOTFOUND, "tokenizer.json");
    assert_ok(nb_tokenizer_open(&t, test_path("weights.dat"), GOLDEN "qwen"));
    assert_int_equal(nb_tokenizer_size(t), 647);
    nb_tokenizer_close(t);
}

/* A text of one kind of character takes linear time. */
static void test_bpe__takes_linear_time(void **state)
{
    (void)state;
    static const char *const units[] = {" ",     "a",         "<",    "\xCC\x81",
                                        "<|im_", "e\xCC\x81", "\xFF", "["};
    struct nb_tokenizer *t;
    assert_ok(nb_tokenizer_open(&t, GOLDEN "qwen", NULL));
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        struct nbi_str text = {0};
        struct timespec start, end;
        int32_t *ids;
        size_t count;
        while (text.len < 1 << 20)
            nbi_str_puts(&text, units[i]);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
        assert_ok(nb_tokenizer_encode(t, text.p, text.len, true, &ids, &count));
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
        double s =
            (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
        if (s > 2)
            fail_msg("1 MB of '%s': %.1f s", units[i], s);
        free(ids);
        nbi_str_release(&text);
    }
    nb_tokenizer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden__qwen_ids_match),
        cmocka_unit_test(test_golden__gpt2_ids_match),
        cmocka_unit_test(test_golden__llama3_ids_match),
        cmocka_unit_test(test_bpe__matches_the_definition),
        cmocka_unit_test(test_bpe__cache_does_not_change_ids),
        cmocka_unit_test(test_tokenizer__threads_may_share_it),
        cmocka_unit_test(test_tokenizer__works_after_a_failure),
        cmocka_unit_test(test_decoder__streams_the_same_text),
        cmocka_unit_test(test_tokenizer__decode_counts_unknown_ids),
        cmocka_unit_test(test_bpe__tables_hold_bytes_and_added_tokens),
        cmocka_unit_test(test_tokenizer__opens_files_and_directories),
        cmocka_unit_test(test_bpe__takes_linear_time),
    };
    return cmocka_run_group_tests_name("bpe", tests, make_test_dir, remove_test_dir);
}
