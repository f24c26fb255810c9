/* test_bpe_train.c - training a vocabulary, against the tokenizers library's BpeTrainer
 * (golden/tokenizer/train.jsonl) and against a trainer that recounts all pairs for every merge. */
#include "base/jscan.h"
#include "tokenizer/bpe_train.h"
#include "tokenizer/tokenizer.h"
#include "unit/chat_tokens.h"
#include "unit/support.h"

static uint64_t seed = 1;

static uint32_t next_random(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

static void train(struct nbi_vocab *v, const char *const *texts, size_t count, int64_t vocab,
                  int64_t min_count)
{
    struct nbi_bpe_trainer *t;
    const struct nbi_bpe_trainer_opts opts = {.vocab = vocab, .min_count = min_count};
    assert_ok(nbi_bpe_trainer_new(&t));
    for (size_t i = 0; i < count; i++)
        assert_ok(nbi_bpe_trainer_add(t, texts[i], strlen(texts[i])));
    assert_ok(nbi_bpe_trainer_run(t, &opts, v));
    nbi_bpe_trainer_free(t);
}

static void train_one(struct nbi_vocab *v, const char *text, int64_t vocab, int64_t min_count)
{
    train(v, &text, 1, vocab, min_count);
}

static void assert_same(const struct nbi_vocab *a, const struct nbi_vocab *b)
{
    assert_int_equal(a->count, b->count);
    assert_int_equal(a->merge_count, b->merge_count);
    for (int64_t i = 0; i < a->count; i++) {
        assert_string_equal(a->tokens[i].text, b->tokens[i].text);
        assert_int_equal(a->tokens[i].type, b->tokens[i].type);
        assert_int_equal(a->tokens[i].flags, b->tokens[i].flags);
    }
    for (int64_t i = 0; i < a->merge_count; i++)
        assert_string_equal(a->merges[i], b->merges[i]);
}

/* ---- against BpeTrainer ---- */

/* Whether a later merge has the same pair: the library keeps only that one. */
static bool comes_again(const struct nbi_vocab *v, int64_t i)
{
    for (int64_t k = i + 1; k < v->merge_count; k++)
        if (strcmp(v->merges[k], v->merges[i]) == 0)
            return true;
    return false;
}

static void check_row(struct nbi_jspan row, int number)
{
    struct nbi_bpe_trainer *t;
    struct nbi_vocab v;
    struct nbi_jiter it;
    struct nbi_jspan key, value;
    struct nbi_str text = {0};
    struct nbi_bpe_trainer_opts opts;
    assert_true(nbi_jint(nbi_jget(row, "vocab"), 0, 100000, &opts.vocab));
    assert_true(nbi_jint(nbi_jget(row, "min_count"), 0, 1000, &opts.min_count));
    opts = (struct nbi_bpe_trainer_opts){.vocab = opts.vocab + 26, .min_count = opts.min_count};
    assert_ok(nbi_bpe_trainer_new(&t));
    nbi_jiter_init(&it, nbi_jget(row, "texts"));
    while (nbi_jiter_next(&it, &key, &value)) {
        text.len = 0;
        nbi_jstring(value, &text);
        assert_ok(nbi_bpe_trainer_add(t, nbi_str_text(&text), text.len));
    }
    assert_ok(nbi_bpe_trainer_run(t, &opts, &v));
    nbi_bpe_trainer_free(t);
    int64_t id = 256, rank = 0;
    nbi_jiter_init(&it, nbi_jget(row, "tokens"));
    for (; nbi_jiter_next(&it, &key, &value); id++)
        if (id >= v.count || !nbi_jequals(value, v.tokens[id].text))
            fail_msg("row %d: token %lld is '%s', %.*s expected", number, (long long)id,
                     id < v.count ? v.tokens[id].text : "", (int)value.len, value.p);
    assert_int_equal(v.count, id + 26);
    nbi_jiter_init(&it, nbi_jget(row, "merges"));
    while (nbi_jiter_next(&it, &key, &value)) {
        while (rank < v.merge_count && comes_again(&v, rank))
            rank++;
        if (rank >= v.merge_count || !nbi_jequals(value, v.merges[rank]))
            fail_msg("row %d: merge %lld", number, (long long)rank);
        rank++;
    }
    assert_int_equal(rank, v.merge_count);
    nbi_vocab_release(&v);
    nbi_str_release(&text);
}

static void test_bpe_train__matches_bpe_trainer(void **state)
{
    (void)state;
    char *file;
    size_t size;
    int rows = 0;
    assert_ok(nbi_file_read(NB_TEST_SOURCE "/golden/tokenizer/train.jsonl", 1 << 20, &file, &size));
    for (char *line = file, *end; *line; line = end + 1) {
        struct nbi_jspan row;
        end = strchr(line, '\n');
        assert_ok(nbi_jscan(&row, line, (size_t)(end - line)));
        check_row(row, ++rows);
    }
    assert_true(rows >= 40);
    free(file);
}

/* ---- against recounting ---- */

#define WORDS  40
#define LENGTH 16
#define TOKENS 160

struct slow {
    int words[WORDS][LENGTH]; /* symbols */
    int lengths[WORDS];
    int word_count;
    char tokens[TOKENS][LENGTH + 1]; /* the letters a to z first, with ids in that order */
    int token_count;
    bool merged[TOKENS][TOKENS];
};

static int slow_token(struct slow *s, const char *text)
{
    for (int i = 0; i < s->token_count; i++)
        if (strcmp(s->tokens[i], text) == 0)
            return i;
    assert_true(s->token_count < TOKENS && strlen(text) <= LENGTH);
    memcpy(s->tokens[s->token_count], text, strlen(text) + 1);
    return s->token_count++;
}

/* The most frequent pair, with the lowest ids among equals; returns its count. */
static int slow_best(const struct slow *s, int *left, int *right)
{
    static int counts[TOKENS][TOKENS];
    int best = 0;
    memset(counts, 0, sizeof counts);
    for (int w = 0; w < s->word_count; w++)
        for (int i = 0; i + 1 < s->lengths[w]; i++)
            counts[s->words[w][i]][s->words[w][i + 1]]++;
    for (int a = 0; a < s->token_count; a++)
        for (int b = 0; b < s->token_count; b++)
            if (counts[a][b] > best) {
                best = counts[a][b];
                *left = a;
                *right = b;
            }
    return best;
}

/* Whether a pair that was merged before occurs again, since another merge made the same token. The
 * order of merges is then particular to the library, and the golden rows cover it. */
static bool slow_returns(const struct slow *s)
{
    for (int w = 0; w < s->word_count; w++)
        for (int i = 0; i + 1 < s->lengths[w]; i++)
            if (s->merged[s->words[w][i]][s->words[w][i + 1]])
                return true;
    return false;
}

static void slow_merge(struct slow *s, int left, int right, int id)
{
    s->merged[left][right] = true;
    for (int w = 0; w < s->word_count; w++) {
        int n = 0;
        for (int i = 0; i < s->lengths[w]; i++, n++) {
            bool join =
                i + 1 < s->lengths[w] && s->words[w][i] == left && s->words[w][i + 1] == right;
            s->words[w][n] = join ? id : s->words[w][i];
            i += join;
        }
        s->lengths[w] = n;
    }
}

static void random_words(struct slow *s, struct nbi_str *text)
{
    uint32_t letters = 1 + next_random(4), run = 1 + next_random(3);
    memset(s, 0, sizeof *s);
    for (char c[2] = "a"; *c <= 'z'; ++*c)
        slow_token(s, c);
    s->word_count = 1 + (int)next_random(WORDS - 1);
    text->len = 0;
    for (int w = 0; w < s->word_count; w++) {
        s->lengths[w] = 1 + (int)next_random(LENGTH - 1);
        for (int i = 0; i < s->lengths[w]; i++) {
            s->words[w][i] =
                i > 0 && next_random(run) ? s->words[w][i - 1] : (int)next_random(letters);
            nbi_str_puts(text, s->tokens[s->words[w][i]]);
        }
        nbi_str_puts(text, "\n"); /* a word of one byte */
    }
}

/* Compares merge by merge; true if all were compared. */
static bool compare_slow(struct slow *s, const struct nbi_str *text, int64_t wanted, int least)
{
    struct nbi_vocab v;
    int64_t rank = 0;
    train_one(&v, text->p, 256 + 26 + wanted, least);
    for (; s->token_count < 26 + wanted; rank++) {
        int left = 0, right = 0, count = slow_best(s, &left, &right);
        if (slow_returns(s)) {
            nbi_vocab_release(&v);
            return false;
        }
        if (count < least || count == 0)
            break;
        char merge[80], whole[80];
        snprintf(merge, sizeof merge, "%s %s", s->tokens[left], s->tokens[right]);
        snprintf(whole, sizeof whole, "%s%s", s->tokens[left], s->tokens[right]);
        if (rank >= v.merge_count || strcmp(v.merges[rank], merge) != 0)
            fail_msg("merge %lld is '%s', '%s' (%d times) expected; text '%s'", (long long)rank,
                     rank < v.merge_count ? v.merges[rank] : "none", merge, count, text->p);
        int id = slow_token(s, whole);
        assert_string_equal(v.tokens[256 + id - 26].text, whole);
        slow_merge(s, left, right, id);
    }
    assert_int_equal(v.merge_count, rank);
    assert_int_equal(v.count, 256 + s->token_count - 26 + 26);
    nbi_vocab_release(&v);
    return true;
}

static void test_bpe_train__matches_recounting(void **state)
{
    (void)state;
    static struct slow s;
    struct nbi_str text = {0};
    int whole = 0;
    for (int round = 0; round < 300; round++) {
        random_words(&s, &text);
        whole += compare_slow(&s, &text, next_random(100), 1 + (int)next_random(4));
    }
    assert_true(whole > 290);
    nbi_str_release(&text);
}

static void test_bpe_train__runs_of_one_letter(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t least;
        const char *merges; /* all of them, each followed by '|' */
    } rows[] = {
        {"aa", 1, "a a|"},
        {"aaa", 1, "a a|aa a|"},
        {"aaaa", 1, "a a|aa aa|"},
        {"aaaaa", 1, "a a|aa a|aa aaa|"}, /* equally frequent: lower ids first */
        {"aaaaaaaa", 1, "a a|aa aa|aaaa aaaa|"},
        {"aaaa", 2, "a a|"}, /* three places before the merge, one after it */
        {"aaaa", 3, "a a|"},
        {"aaaa", 4, ""},
        {"abab", 2, "a b|"},
        {"abab\nabab", 2, "a b|ab ab|"},
        {"ab\nab\ncd\ncd", 2, "a b|c d|"}, /* equally frequent: lower ids first */
        {"cd\ncd\nab\nab", 2, "a b|c d|"},
        {"x\ny", 1, ""},
        {"", 1, ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct nbi_vocab v;
        struct nbi_str got = {0};
        train_one(&v, rows[i].text, 1000, rows[i].least);
        for (int64_t k = 0; k < v.merge_count; k++)
            nbi_str_printf(&got, "%s|", v.merges[k]);
        if (strcmp(nbi_str_text(&got), rows[i].merges) != 0)
            fail_msg("'%s': %s, %s expected", rows[i].text, nbi_str_text(&got), rows[i].merges);
        nbi_str_release(&got);
        nbi_vocab_release(&v);
    }
}

/* ---- order, pieces, special tokens ---- */

static void test_bpe_train__order_does_not_matter(void **state)
{
    (void)state;
    const char *texts[] = {"the cat sat on the mat", "a cat and a hat", "that hat is the cat's",
                           "12 cats, 12 hats!", "\n\n  caf\xC3\xA9 cafe\xCC\x81"};
    struct nbi_vocab first;
    train(&first, texts, 5, 340, 1);
    assert_true(first.merge_count > 20);
    for (int round = 0; round < 20; round++) {
        struct nbi_vocab v;
        uint32_t a = next_random(5), b = next_random(5);
        const char *t = texts[a];
        texts[a] = texts[b];
        texts[b] = t;
        train(&v, texts, 5, 340, 1);
        assert_same(&first, &v);
        nbi_vocab_release(&v);
    }
    nbi_vocab_release(&first);
}

static void test_bpe_train__special_tokens_are_not_learnt(void **state)
{
    (void)state;
    struct nbi_vocab a, b;
    const char *const parts[] = {"hello hello", "hello there", " there hello", "x"};
    train_one(&a,
              "hello hello<|im_start|>hello there<think> there hello<|endoftext|><|im_end|>"
              "</tool_call>x",
              400, 1);
    train(&b, parts, 4, 400, 1);
    assert_same(&a, &b);
    for (int64_t i = 0; i < a.count - 26; i++)
        assert_null(strstr(a.tokens[i].text, "im_"));
    nbi_vocab_release(&a);
    nbi_vocab_release(&b);
}

static void test_bpe_train__text_is_repaired_and_normalised(void **state)
{
    (void)state;
    struct nbi_vocab a, b;
    train_one(&a, "cafe\xCC\x81 cafe\xCC\x81 \xFF\xFF", 400, 1);
    train_one(&b, "caf\xC3\xA9 caf\xC3\xA9 \xEF\xBF\xBD\xEF\xBF\xBD", 400, 1);
    assert_same(&a, &b);
    nbi_vocab_release(&a);
    nbi_vocab_release(&b);
}

/* ---- the vocabulary ---- */

static void test_bpe_train__vocabulary_sizes(void **state)
{
    (void)state;
    struct nbi_vocab v;
    train_one(&v, "aaaa bbbb aaaa bbbb", NBI_BPE_TRAINER_MIN, 1);
    assert_int_equal(v.count, 282); /* no merges fit */
    assert_int_equal(v.merge_count, 0);
    assert_true(nbi_vocab_is_qwen(&v));
    for (int i = 0; i < 26; i++) {
        assert_string_equal(v.tokens[256 + i].text, chat_tokens[i]);
        assert_int_equal(v.tokens[256 + i].type, i < 14 ? NBI_TOKEN_CONTROL : NBI_TOKEN_USER);
    }
    assert_true(v.pad == 256 && v.eos == 258 && v.bos == -1);
    assert_string_equal(v.tokens[0].text, "!");
    assert_string_equal(v.tokens[255].text, "\xC5\x83"); /* U+0143, the last of the alphabet */
    nbi_vocab_release(&v);
    train_one(&v, "aaaa bbbb aaaa bbbb", NBI_BPE_TRAINER_MIN + 1, 1);
    assert_int_equal(v.count, 283);
    assert_string_equal(v.tokens[256].text, "aa");
    assert_string_equal(v.tokens[257].text, "<|endoftext|>");
    nbi_vocab_release(&v);
    train_one(&v, "ab", 5000, 1); /* few pairs give few entries */
    assert_int_equal(v.count, 283);
    nbi_vocab_release(&v);
    assert_ok(nbi_bpe_trainer_check(NBI_BPE_TRAINER_MIN));
    assert_ok(nbi_bpe_trainer_check(NBI_VOCAB_MAX - 1));
    static const int64_t bad[] = {INT64_MIN,     -1,       0, NBI_BPE_TRAINER_MIN - 1,
                                  NBI_VOCAB_MAX, INT64_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct nbi_bpe_trainer *t;
        const struct nbi_bpe_trainer_opts opts = {.vocab = bad[i], .min_count = 1};
        assert_fails(nbi_bpe_trainer_check(bad[i]), NB_EINVAL, "a vocabulary has 282 to 4194303");
        assert_ok(nbi_bpe_trainer_new(&t));
        assert_fails(nbi_bpe_trainer_run(t, &opts, &v), NB_EINVAL, "entries");
        nbi_vocab_release(&v);
        nbi_bpe_trainer_free(t);
    }
}

static void test_bpe_train__trainer_is_used_up(void **state)
{
    (void)state;
    struct nbi_bpe_trainer *t;
    struct nbi_vocab v;
    const struct nbi_bpe_trainer_opts opts = {.vocab = 300, .min_count = 1};
    assert_ok(nbi_bpe_trainer_new(&t));
    assert_ok(nbi_bpe_trainer_add(t, "abab", 4));
    assert_ok(nbi_bpe_trainer_run(t, &opts, &v));
    assert_int_equal(v.merge_count, 2);
    nbi_vocab_release(&v);
    assert_ok(nbi_bpe_trainer_run(t, &opts, &v)); /* the counts are used up */
    assert_int_equal(v.merge_count, 0);
    nbi_vocab_release(&v);
    assert_ok(nbi_bpe_trainer_add(t, "cd", 2));
    assert_ok(nbi_bpe_trainer_run(t, &opts, &v));
    assert_int_equal(v.merge_count, 1);
    assert_string_equal(v.merges[0], "c d");
    nbi_vocab_release(&v);
    nbi_bpe_trainer_free(t);
    nbi_bpe_trainer_free(NULL);
}

struct calls {
    int count;
    uint64_t last, total;
};

static void note_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct calls *c = ctx;
    assert_true(done >= c->last && done <= total);
    *c = (struct calls){c->count + 1, done, total};
}

static void test_bpe_train__progress(void **state)
{
    (void)state;
    struct nbi_bpe_trainer *t;
    struct nbi_vocab v;
    struct calls calls = {0};
    const struct nbi_bpe_trainer_opts opts = {
        .vocab = 600, .min_count = 1, .progress = note_progress, .progress_ctx = &calls};
    assert_ok(nbi_bpe_trainer_new(&t));
    for (int i = 0; i < 3000; i++) {
        char text[24];
        int n = snprintf(text, sizeof text, "%c%c%c%c%c\n", 'a' + (int)next_random(26),
                         'a' + (int)next_random(26), 'a' + (int)next_random(26),
                         'a' + (int)next_random(26), 'a' + (int)next_random(26));
        assert_ok(nbi_bpe_trainer_add(t, text, (size_t)n));
    }
    assert_ok(nbi_bpe_trainer_run(t, &opts, &v));
    assert_int_equal(v.count, 600);
    assert_true(calls.count >= 4);
    assert_int_equal(calls.total, 600 - 26);
    nbi_vocab_release(&v);
    nbi_bpe_trainer_free(t);
}

static void test_bpe_train__round_trip(void **state)
{
    (void)state;
    struct nbi_vocab v, back;
    struct nb_tokenizer *a, *b;
    int32_t *x, *y;
    size_t n, m;
    static const char text[] = "<|im_start|>the cat's hat, 12 cats <think>\n\n caf\xC3\xA9\t\\\"";
    train_one(&v, "the cat sat on the mat \" \\ \t the hat of the cat caf\xC3\xA9\n\n\n", 350, 1);
    assert_ok(nbi_vocab_write_json(&v, test_path("tokenizer.json")));
    assert_ok(nbi_vocab_read_json(&back, test_path("tokenizer.json")));
    assert_same(&v, &back);
    assert_true(nbi_vocab_is_qwen(&back));
    assert_ok(nbi_tokenizer_new(&a, &v));
    assert_ok(nbi_tokenizer_new(&b, &back));
    assert_ok(nb_tokenizer_encode(a, text, strlen(text), true, &x, &n));
    assert_ok(nb_tokenizer_encode(b, text, strlen(text), true, &y, &m));
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n * sizeof *x);
    assert_true(n < strlen(text) / 2);
    free(x);
    free(y);
    nb_tokenizer_close(a);
    nb_tokenizer_close(b);
    nbi_vocab_release(&v);
    nbi_vocab_release(&back);
}

/* Readers disagree on which rank counts if a pair is listed twice. */
static void test_bpe_train__no_merge_is_listed_twice(void **state)
{
    (void)state;
    static struct slow s;
    struct nbi_str text = {0};
    for (int round = 0; round < 300; round++) {
        struct nbi_vocab v;
        random_words(&s, &text);
        train_one(&v, text.p, 256 + 26 + 100, 1);
        for (int64_t i = 0; i < v.merge_count; i++)
            if (comes_again(&v, i))
                fail_msg("'%s' is merged twice; text '%s'", v.merges[i], text.p);
        nbi_vocab_release(&v);
    }
    nbi_str_release(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe_train__matches_bpe_trainer),
        cmocka_unit_test(test_bpe_train__matches_recounting),
        cmocka_unit_test(test_bpe_train__runs_of_one_letter),
        cmocka_unit_test(test_bpe_train__order_does_not_matter),
        cmocka_unit_test(test_bpe_train__special_tokens_are_not_learnt),
        cmocka_unit_test(test_bpe_train__text_is_repaired_and_normalised),
        cmocka_unit_test(test_bpe_train__vocabulary_sizes),
        cmocka_unit_test(test_bpe_train__trainer_is_used_up),
        cmocka_unit_test(test_bpe_train__progress),
        cmocka_unit_test(test_bpe_train__round_trip),
        cmocka_unit_test(test_bpe_train__no_merge_is_listed_twice),
    };
    return cmocka_run_group_tests_name("train", tests, make_test_dir, remove_test_dir);
}
