/* test_mix.c - micro-batches of two data sets: shares, rows, resuming, the end. */
#include "data/mix.h"

#include "unit/data_support.h"

enum { T = 48 };

static struct nb_tokenizer *bytes_only;

static int begin(void **state)
{
    bytes_only = new_tokenizer("", 0);
    return make_test_dir(state);
}

static int end(void **state)
{
    nb_tokenizer_close(bytes_only);
    return remove_test_dir(state);
}

/* Questions and answers whose letters identify the data set. */
static struct nbi_dataset *new_set(const char *name, int count, char letter)
{
    struct nbi_str s = {0};
    struct nbi_dataset *d;
    for (int i = 0; i < count; i++)
        nbi_str_printf(&s, "%d%.*s\t%c%.*s\n", i, i % 5, "?????", letter, 1 + i % 7, "zzzzzzz");
    put(name, nbi_str_text(&s));
    nbi_str_release(&s);
    const char *const files[] = {test_path(name), NULL};
    const struct nbi_dataset_opts opts = {
        .files = files, .tokenizer = bytes_only, .chat = NBI_CHAT_CHATML};
    assert_ok(nbi_dataset_open(&d, &opts));
    return d;
}

struct two {
    struct nbi_dataset *a, *b;
    struct nbi_loader main, other;
    struct nbi_mix mix;
};

static void two_open(struct two *t, double share, int64_t epochs)
{
    t->a = new_set("a.tsv", 37, 'a');
    t->b = new_set("b.tsv", 11, 'b');
    struct nbi_loader_opts opts = {
        .data = t->a, .seed = 3, .shuffle = true, .pack = true, .epochs = epochs};
    assert_ok(nbi_loader_init(&t->main, &opts));
    opts.data = t->b;
    opts.epochs = 0;
    assert_ok(nbi_loader_init(&t->other, &opts));
    t->mix = (struct nbi_mix){&t->main, &t->other, share};
}

static void two_close(struct two *t)
{
    nbi_loader_release(&t->main);
    nbi_loader_release(&t->other);
    nbi_dataset_close(t->a);
    nbi_dataset_close(t->b);
}

static bool has(const struct nbi_microbatch *b, int64_t row, char letter)
{
    for (int64_t t = 0; t < b->T; t++)
        if (b->ids[row * b->T + t] == byte_id((uint8_t)letter) && b->targets[row * b->T + t] >= 0)
            return true;
    return false;
}

/* Counts the replay rows of a micro-batch, and checks that they come last. */
static int64_t check_rows(const struct two *t, const struct nbi_microbatch *b, int64_t number)
{
    int64_t rows = nbi_mix_rows(t->mix.share, b->B, number), tokens = 0, trained = 0;
    int64_t main = nbi_dataset_stats(t->a)->examples,
            all = main + nbi_dataset_stats(t->b)->examples;
    for (int64_t row = 0; row < b->B; row++) {
        bool other = row >= b->B - rows;
        assert_int_equal(has(b, row, 'a'), !other);
        assert_int_equal(has(b, row, 'b'), other);
        for (int64_t i = row * T; i < (row + 1) * T; i++) {
            tokens += b->example_of[i] >= 0;
            trained += b->targets[i] >= 0;
            if (b->example_of[i] >= 0)
                assert_true(other ? b->example_of[i] >= main && b->example_of[i] < all
                                  : b->example_of[i] < main);
        }
    }
    assert_int_equal(b->tokens, tokens);
    assert_int_equal(b->trained, trained);
    return rows;
}

static void test_mix__share_is_met(void **state)
{
    static const double shares[] = {0.5, 0.1, 0.9, 1.0 / 3, 0.25, 0.01};
    static const int64_t sizes[] = {1, 2, 3, 8};
    (void)state;
    for (size_t i = 0; i < 6; i++)
        for (size_t k = 0; k < 4; k++) {
            struct two t;
            struct nbi_microbatch b;
            int64_t rows = 0;
            bool more;
            two_open(&t, shares[i], 0);
            assert_ok(nbi_microbatch_init(&b, sizes[k], T));
            for (int64_t n = 0; n < 100; n++) {
                assert_ok(nbi_mix_next(&t.mix, n, &b, &more));
                assert_true(more);
                rows += check_rows(&t, &b, n);
                double off = (double)rows - shares[i] * (double)((n + 1) * b.B);
                assert_true(off <= 1e-9 && off > -1);
            }
            nbi_microbatch_release(&b);
            two_close(&t);
        }
}

/* The ids at a position are those of the example in example_of. */
static void test_mix__example_of_numbers_both_sets(void **state)
{
    struct two t;
    struct nbi_microbatch b;
    struct nbi_example s = {0};
    bool more;
    (void)state;
    two_open(&t, 0.5, 0);
    assert_ok(nbi_microbatch_init(&b, 4, T));
    for (int64_t n = 0; n < 20; n++) {
        assert_ok(nbi_mix_next(&t.mix, n, &b, &more));
        for (int64_t i = 0; i < b.B * T; i++) {
            if (b.example_of[i] < 0)
                continue;
            bool other = b.example_of[i] >= 37;
            assert_ok(nbi_dataset_get(other ? t.b : t.a, b.example_of[i] - (other ? 37 : 0), &s));
            assert_int_equal(b.ids[i], s.ids.p[b.positions[i]]);
        }
    }
    nbi_example_release(&s);
    nbi_microbatch_release(&b);
    two_close(&t);
}

/* Both loaders' states and the number of the micro-batch determine all that follow. */
static void test_mix__resumes(void **state)
{
    struct two t, again;
    struct nbi_microbatch b[2];
    bool more;
    (void)state;
    two_open(&t, 0.4, 3);
    assert_ok(nbi_microbatch_init(&b[0], 3, T));
    assert_ok(nbi_microbatch_init(&b[1], 3, T));
    for (int64_t n = 0; n < 9; n++)
        assert_ok(nbi_mix_next(&t.mix, n, &b[0], &more));
    two_open(&again, 0.4, 3);
    again.main.state = t.main.state;
    again.other.state = t.other.state;
    for (int64_t n = 9; more; n++) {
        bool still;
        assert_ok(nbi_mix_next(&t.mix, n, &b[0], &more));
        assert_ok(nbi_mix_next(&again.mix, n, &b[1], &still));
        assert_int_equal(more, still);
        assert_int_equal(b[0].trained, b[1].trained);
        if (!more)
            break;
        assert_memory_equal(b[0].ids, b[1].ids, 3 * T * sizeof *b[0].ids);
        assert_memory_equal(b[0].targets, b[1].targets, 3 * T * sizeof *b[0].targets);
        assert_memory_equal(b[0].example_of, b[1].example_of, 3 * T * sizeof *b[0].example_of);
    }
    assert_true(b[0].tokens == 0 && b[0].trained == 0 && b[0].examples == 0);
    assert_int_equal(t.main.state.epoch, 3); /* epochs of the main set */
    nbi_microbatch_release(&b[0]);
    nbi_microbatch_release(&b[1]);
    two_close(&t);
    two_close(&again);
}

/* Without replay, the result is that of the loader. */
static void test_mix__without_replay_is_the_loader(void **state)
{
    struct two t, plain;
    struct nbi_microbatch b[2];
    bool more[2] = {true, true};
    (void)state;
    two_open(&t, 0.5, 2);
    two_open(&plain, 0.5, 2);
    t.mix.replay = NULL;
    assert_ok(nbi_microbatch_init(&b[0], 2, T));
    assert_ok(nbi_microbatch_init(&b[1], 2, T));
    for (int64_t n = 0; more[0]; n++) {
        assert_ok(nbi_mix_next(&t.mix, n, &b[0], &more[0]));
        assert_ok(nbi_loader_next(&plain.main, &b[1], &more[1]));
        assert_int_equal(more[0], more[1]);
        assert_int_equal(b[0].tokens, b[1].tokens);
        if (more[0])
            assert_memory_equal(b[0].ids, b[1].ids, 2 * T * sizeof *b[0].ids);
    }
    nbi_microbatch_release(&b[0]);
    nbi_microbatch_release(&b[1]);
    two_close(&t);
    two_close(&plain);
}

/* nbi_mix_count predicts the number of micro-batches, with and without replay. */
static void test_mix__count_is_exact(void **state)
{
    static const double shares[] = {0, 0.5, 0.9, 1.0 / 3, 0.01};
    (void)state;
    for (size_t i = 0; i < 5; i++)
        for (int64_t B = 1; B <= 4; B++) {
            struct two t;
            struct nbi_microbatch b;
            int64_t count, few, n = 0;
            bool more = true;
            two_open(&t, shares[i], 7);
            if (shares[i] == 0)
                t.mix.replay = NULL;
            assert_ok(nbi_microbatch_init(&b, B, T));
            assert_ok(nbi_mix_count(&t.mix, B, T, INT64_MAX, &count));
            assert_ok(nbi_mix_count(&t.mix, B, T, 3, &few));
            for (; more; n += more)
                assert_ok(nbi_mix_next(&t.mix, n, &b, &more));
            assert_int_equal(n, count);
            assert_int_equal(few, 3);
            nbi_microbatch_release(&b);
            two_close(&t);
        }
}

static void test_mix__rows(void **state)
{
    (void)state;
    assert_int_equal(nbi_mix_rows(0.5, 1, 0), 0);
    assert_int_equal(nbi_mix_rows(0.5, 1, 1), 1);
    assert_int_equal(nbi_mix_rows(0.25, 4, 7), 1);
    for (int64_t n = 0; n < 1000; n++) {
        int64_t far = INT64_MAX / 2 - n, rows = nbi_mix_rows(0.3, 1000, far);
        assert_true(rows >= 0 && rows <= 1000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mix__share_is_met),
        cmocka_unit_test(test_mix__example_of_numbers_both_sets),
        cmocka_unit_test(test_mix__resumes),
        cmocka_unit_test(test_mix__without_replay_is_the_loader),
        cmocka_unit_test(test_mix__count_is_exact),
        cmocka_unit_test(test_mix__rows),
    };
    return cmocka_run_group_tests_name("mix", tests, begin, end);
}
