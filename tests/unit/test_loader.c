/* test_loader.c - unpacking the rows gives back the examples, each prediction exactly once; order,
 * epochs, resuming, padding. */
#include "data/loader.h"

#include "unit/data_support.h"

#define PADDING 9999

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

static struct nbi_dataset *open_files(const char *a, const char *b)
{
    struct nbi_dataset *d;
    const char *const files[] = {test_path(a), b ? test_path(b) : NULL, NULL};
    const struct nbi_dataset_opts opts = {
        .files = files, .tokenizer = bytes_only, .chat = NBI_CHAT_CHATML};
    assert_ok(nbi_dataset_open(&d, &opts));
    return d;
}

/* Writes distinct questions and answers of 1 to `longest` bytes. */
static void put_pairs(const char *name, int count, uint32_t longest, uint64_t seed)
{
    struct nbi_str s = {0};
    for (int i = 0; i < count; i++) {
        nbi_str_printf(&s, "%d ", i);
        for (uint32_t n = 1 + draw(&seed, longest); n > 0; n--)
            nbi_str_printf(&s, "%c", 'a' + (int)draw(&seed, 26));
        nbi_str_puts(&s, "\t");
        for (uint32_t n = 1 + draw(&seed, longest); n > 0; n--)
            nbi_str_printf(&s, "%c", 'A' + (int)draw(&seed, 26));
        nbi_str_puts(&s, "\n");
    }
    put(name, nbi_str_text(&s));
    nbi_str_release(&s);
}

static void put_documents(const char *name, int count, uint32_t longest, uint64_t seed)
{
    struct nbi_str s = {0};
    for (int i = 0; i < count; i++) {
        for (uint32_t n = 1 + draw(&seed, longest); n > 0; n--)
            nbi_str_printf(&s, "%c", '!' + (int)draw(&seed, 90));
        nbi_str_puts(&s, "<|endoftext|>");
    }
    put(name, nbi_str_text(&s));
    nbi_str_release(&s);
}

static struct nbi_loader_opts options(struct nbi_dataset *d, int64_t epochs)
{
    return (struct nbi_loader_opts){
        .data = d, .seed = 5, .shuffle = true, .pack = true, .epochs = epochs, .padding = PADDING};
}

/* ---- unpacking batches ---- */

struct check {
    struct nbi_dataset *data;
    int64_t count, T;
    struct nbi_example *examples; /* shortened to the length of a row */
    bool *shortened;
    int64_t *done; /* [count] predictions found so far */
    int64_t tokens, trained, begun, truncated, rows;
};

static void check_init(struct check *c, struct nbi_dataset *d, int64_t T)
{
    *c = (struct check){.data = d, .count = nbi_dataset_stats(d)->examples, .T = T};
    c->examples = calloc((size_t)c->count, sizeof *c->examples);
    c->done = calloc((size_t)c->count, sizeof *c->done);
    c->shortened = calloc((size_t)c->count, sizeof *c->shortened);
    for (int64_t i = 0; i < c->count; i++) {
        assert_ok(nbi_dataset_get(d, i, &c->examples[i]));
        if (!c->examples[i].document)
            c->shortened[i] = nbi_example_truncate(&c->examples[i], (size_t)T + 1);
    }
}

static void check_release(struct check *c)
{
    for (int64_t i = 0; i < c->count; i++)
        nbi_example_release(&c->examples[i]);
    free(c->examples);
    free(c->done);
    free(c->shortened);
}

/* Whether positions [0, n) of a segment are the next ones of an example. */
static bool continues(const struct check *c, int64_t i, const int32_t *ids, const int32_t *targets,
                      int64_t n)
{
    const struct nbi_example *s = &c->examples[i];
    int64_t from = c->done[i], left = (int64_t)s->ids.count - 1 - from;
    if (n > left || (!s->document && n < left))
        return false;
    for (int64_t t = 0; t < n; t++) {
        int32_t target = s->trained[from + t + 1] ? s->ids.p[from + t + 1] : NBI_IGNORE;
        if (ids[t] != s->ids.p[from + t] || targets[t] != target)
            return false;
    }
    return true;
}

/* Checks a range of a row in which positions count from 0: an example, or part of a document. */
static void take_segment(struct check *c, const int32_t *ids, const int32_t *targets, int64_t n)
{
    for (int64_t i = 0; i < c->count; i++)
        if (continues(c, i, ids, targets, n)) {
            if (c->done[i] == 0) {
                c->begun++;
                c->truncated += c->shortened[i];
            }
            c->done[i] += n;
            c->tokens += n;
            for (int64_t t = 0; t < n; t++)
                c->trained += targets[t] != NBI_IGNORE;
            return;
        }
    fail_msg("%lld positions that are no sample, or one for the second time", (long long)n);
}

static int64_t take_row(struct check *c, const int32_t *ids, const int32_t *targets,
                        const int32_t *positions)
{
    int64_t segments = 0;
    for (int64_t t = 0, stop; t < c->T; t = stop) {
        assert_int_equal(positions[t], 0);
        for (stop = t + 1; stop < c->T && positions[stop] != 0; stop++)
            assert_int_equal(positions[stop], positions[stop - 1] + 1);
        if (ids[t] != PADDING) {
            take_segment(c, ids + t, targets + t, stop - t);
            segments++;
            continue;
        }
        assert_int_equal(stop, c->T); /* padding is one range at the end */
        for (; t < stop; t++) {
            assert_int_equal(ids[t], PADDING);
            assert_int_equal(targets[t], NBI_IGNORE);
        }
    }
    c->rows += segments > 0;
    return segments;
}

/* Unpacks a batch and checks its counters. */
static void take_batch(struct check *c, const struct nbi_microbatch *b, bool pack)
{
    int64_t tokens = c->tokens, trained = c->trained, begun = c->begun, truncated = c->truncated;
    for (int64_t row = 0; row < b->B; row++) {
        int64_t at = row * b->T;
        int64_t segments = take_row(c, b->ids + at, b->targets + at, b->positions + at);
        assert_true(pack || segments <= 1);
    }
    assert_int_equal(b->tokens, c->tokens - tokens);
    assert_int_equal(b->trained, c->trained - trained);
    assert_int_equal(b->examples, c->begun - begun);
    assert_int_equal(b->truncated, c->truncated - truncated);
}

/* Every prediction of the data set was made. */
static void check_epoch(struct check *c)
{
    for (int64_t i = 0; i < c->count; i++) {
        assert_int_equal(c->done[i], c->examples[i].ids.count - 1);
        c->done[i] = 0;
    }
    assert_int_equal(c->begun, c->count);
}

/* Checks one epoch in batches of B x T; returns the fraction of positions that are used. */
static double run_epoch(struct nbi_dataset *d, int64_t B, int64_t T, bool pack, bool shuffle)
{
    struct nbi_loader_opts opts = options(d, 1);
    struct nbi_loader b;
    struct nbi_microbatch batch;
    struct check c;
    bool more = true;
    opts.pack = pack;
    opts.shuffle = shuffle;
    check_init(&c, d, T);
    assert_ok(nbi_loader_init(&b, &opts));
    assert_ok(nbi_microbatch_init(&batch, B, T));
    while (more) {
        assert_ok(nbi_loader_next(&b, &batch, &more));
        assert_true(batch.B == B && batch.T == T);
        assert_int_equal(more, batch.tokens > 0);
        take_batch(&c, &batch, pack);
    }
    check_epoch(&c);
    assert_true(b.state.epoch == 1 && b.state.next == 0 && b.state.token == 0);
    assert_ok(nbi_loader_next(&b, &batch, &more)); /* the end stays the end */
    assert_true(!more && batch.tokens == 0 && batch.examples == 0);
    double full = (double)c.tokens / (double)(c.rows * T);
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
    check_release(&c);
    return full;
}

/* ---- tests ---- */

static void test_loader__packs_a_batch_by_hand(void **state)
{
    (void)state;
    struct nbi_loader b;
    struct nbi_microbatch batch;
    bool more;
    put("hand.txt", "ab<|endoftext|>c");
    struct nbi_dataset *d = open_files("hand.txt", NULL);
    struct nbi_loader_opts opts = options(d, 1);
    opts.shuffle = false;
    assert_ok(nbi_loader_init(&b, &opts));
    assert_ok(nbi_microbatch_init(&batch, 2, 4));
    assert_ok(nbi_loader_next(&b, &batch, &more));
    const int32_t ids[] = {byte_id('a'), byte_id('b'), byte_id('c'), PADDING,
                           PADDING,      PADDING,      PADDING,      PADDING};
    const int32_t targets[] = {byte_id('b'), 256,        256,        NBI_IGNORE,
                               NBI_IGNORE,   NBI_IGNORE, NBI_IGNORE, NBI_IGNORE};
    const int32_t positions[] = {0, 1, 0, 0, 0, 1, 2, 3};
    assert_true(more);
    assert_memory_equal(batch.ids, ids, sizeof ids);
    assert_memory_equal(batch.targets, targets, sizeof targets);
    assert_memory_equal(batch.positions, positions, sizeof positions);
    assert_true(batch.tokens == 3 && batch.trained == 3 && batch.examples == 2);
    assert_int_equal(batch.truncated, 0);
    assert_ok(nbi_loader_next(&b, &batch, &more));
    assert_false(more);
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
    nbi_dataset_close(d);
}

/* The last target of a part of a document is the first token of the next part. */
static void test_loader__document_continues_in_next_row(void **state)
{
    (void)state;
    static const char text[] = "0123456789abcdefghijklmnopqrstuvwxyz";
    struct nbi_loader b;
    struct nbi_microbatch batch;
    bool more = true;
    put("on.txt", text);
    struct nbi_dataset *d = open_files("on.txt", NULL);
    const struct nbi_loader_opts opts = options(d, 1);
    assert_ok(nbi_loader_init(&b, &opts));
    assert_ok(nbi_microbatch_init(&batch, 2, 8));
    for (int64_t n = 0; n < 3; n++) {
        assert_ok(nbi_loader_next(&b, &batch, &more));
        assert_int_equal(batch.tokens, n < 2 ? 16 : 4);
        assert_int_equal(batch.examples, n == 0);
        for (int64_t t = 0; t < batch.tokens; t++) {
            char next = text[n * 16 + t + 1];
            assert_int_equal(batch.ids[t], byte_id((uint8_t)text[n * 16 + t]));
            assert_int_equal(batch.targets[t], next ? byte_id((uint8_t)next) : 256);
            assert_int_equal(batch.positions[t], t % 8);
        }
        assert_int_equal(b.state.token, n == 0 ? 16 : n == 1 ? 32 : 0);
    }
    assert_ok(nbi_loader_next(&b, &batch, &more));
    assert_false(more);
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
    nbi_dataset_close(d);
}

/* Documents of 21, 31 and 51 tokens in rows of 40: the second fits and is cut only without
 * keep_documents; the third is always cut. */
static void test_loader__keep_documents_cuts_only_long_ones(void **state)
{
    (void)state;
    static const int64_t tokens[2][3] = {{40, 40, 20}, {20, 30, 40}};
    static const int64_t last[2][3] = {{1, 2, 2}, {0, 1, 2}};
    put("whole.txt", "01234567890123456789<|endoftext|>abcdefghijklmnopqrstuvwxyzabcd<|endoftext|>"
                     "ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHIJKLMNOPQRSTUVWX");
    struct nbi_dataset *d = open_files("whole.txt", NULL);
    for (int whole = 0; whole < 2; whole++) {
        struct nbi_loader b;
        struct nbi_microbatch batch;
        bool more = true;
        struct nbi_loader_opts opts = options(d, 1);
        opts.keep_documents = whole;
        assert_ok(nbi_loader_init(&b, &opts));
        assert_ok(nbi_microbatch_init(&batch, 1, 40));
        for (int64_t n = 0; n < 3; n++) {
            assert_ok(nbi_loader_next(&b, &batch, &more));
            assert_true(more);
            assert_int_equal(batch.tokens, tokens[whole][n]);
            assert_int_equal(batch.example_of[batch.tokens - 1], last[whole][n]);
        }
        nbi_microbatch_release(&batch);
        nbi_loader_release(&b);
    }
    nbi_dataset_close(d);
}

static void test_loader__every_prediction_once(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {1, 64}, {2, 17}, {4, 33}, {8, 128}, {3, 1000}};
    put_pairs("mix.tsv", 60, 60, 1);
    put_documents("mix.txt", 12, 400, 2);
    struct nbi_dataset *d = open_files("mix.tsv", "mix.txt");
    assert_int_equal(nbi_dataset_stats(d)->examples, 72);
    for (size_t i = 1; i < sizeof shapes / sizeof *shapes; i++)
        for (int mode = 0; mode < 4; mode++)
            run_epoch(d, shapes[i][0], shapes[i][1], mode & 1, mode & 2);
    nbi_dataset_close(d);
    put_documents("one.txt", 3, 40, 3); /* one token per row */
    d = open_files("one.txt", NULL);
    run_epoch(d, shapes[0][0], shapes[0][1], true, true);
    nbi_dataset_close(d);
}

static void test_loader__long_conversations_are_truncated(void **state)
{
    (void)state;
    struct nbi_loader b;
    struct nbi_microbatch batch;
    bool more = true;
    int64_t truncated = 0;
    put("short.tsv", "a\tb\nquestion\tanswer that is longer than the row\nc\td\n");
    struct nbi_dataset *d = open_files("short.tsv", NULL);
    const struct nbi_loader_opts opts = options(d, 1);
    assert_ok(nbi_loader_init(&b, &opts));
    assert_ok(nbi_microbatch_init(&batch, 1, 32));
    while (more) {
        assert_ok(nbi_loader_next(&b, &batch, &more));
        truncated += batch.truncated;
        if (batch.truncated) /* the example fills the row: 33 tokens, 32 predictions */
            assert_true(batch.tokens == 32 && batch.examples == 1 && batch.trained == 33 - 4);
    }
    assert_int_equal(truncated, 1);
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
    nbi_dataset_close(d);
}

/* Few positions are padding with conversations of ordinary lengths, and with documents. */
static void test_loader__rows_are_full(void **state)
{
    (void)state;
    put_pairs("full.tsv", 1500, 150, 7);
    put_documents("full.txt", 60, 3000, 8);
    struct nbi_dataset *pairs = open_files("full.tsv", NULL);
    struct nbi_dataset *documents = open_files("full.txt", NULL);
    struct nbi_dataset *both = open_files("full.tsv", "full.txt");
    double a = run_epoch(pairs, 8, 1024, true, true);
    double b = run_epoch(documents, 4, 1024, true, true);
    double c = run_epoch(both, 8, 1024, true, true);
    if (a < 0.9 || b < 0.9 || c < 0.9)
        fail_msg("rows are %.3f, %.3f and %.3f full", a, b, c);
    nbi_dataset_close(pairs);
    nbi_dataset_close(documents);
    nbi_dataset_close(both);
}

/* ---- order and epochs ---- */

static void assert_permutation(const uint32_t *order, uint32_t n)
{
    uint8_t *seen = calloc(n, 1);
    for (uint32_t i = 0; i < n; i++) {
        assert_true(order[i] < n && !seen[order[i]]);
        seen[order[i]] = 1;
    }
    free(seen);
}

static void test_loader__order_depends_on_seed_and_epoch(void **state)
{
    (void)state;
    enum { COUNT = 200 };
    uint32_t kept[4][COUNT];
    put_pairs("order.tsv", COUNT, 5, 1);
    struct nbi_dataset *d = open_files("order.tsv", NULL);
    for (int k = 0; k < 4; k++) { /* seeds 5 and 6, epochs 0 and 1 */
        struct nbi_loader_opts opts = options(d, 0);
        struct nbi_loader b;
        opts.seed += (uint64_t)(k / 2);
        assert_ok(nbi_loader_init(&b, &opts));
        nbi_loader_order(&b, 7); /* the previous order does not matter */
        nbi_loader_order(&b, k % 2);
        assert_permutation(b.order, COUNT);
        memcpy(kept[k], b.order, sizeof kept[k]);
        for (int other = 0; other < k; other++) {
            int same = 0;
            for (int i = 0; i < COUNT; i++)
                same += kept[other][i] == kept[k][i];
            assert_true(same < 10); /* 1 is expected */
        }
        nbi_loader_release(&b);
    }
    struct nbi_loader_opts opts = options(d, 0);
    struct nbi_loader b;
    assert_ok(nbi_loader_init(&b, &opts));
    nbi_loader_order(&b, 0);
    assert_memory_equal(b.order, kept[0], sizeof kept[0]); /* same seed, same order */
    nbi_loader_release(&b);
    opts.shuffle = false;
    assert_ok(nbi_loader_init(&b, &opts));
    for (int64_t epoch = 0; epoch < 2; epoch++) {
        nbi_loader_order(&b, epoch);
        for (uint32_t i = 0; i < COUNT; i++)
            assert_int_equal(b.order[i], i);
    }
    nbi_loader_release(&b);
    nbi_dataset_close(d);
}

/* Over many epochs every example is at every place about equally often. */
static void test_loader__order_is_uniform(void **state)
{
    (void)state;
    enum { COUNT = 8, EPOCHS = 8000 };
    int seen[COUNT][COUNT] = {0};
    put_pairs("fair.tsv", COUNT, 5, 1);
    struct nbi_dataset *d = open_files("fair.tsv", NULL);
    const struct nbi_loader_opts opts = options(d, 0);
    struct nbi_loader b;
    assert_ok(nbi_loader_init(&b, &opts));
    for (int64_t epoch = 0; epoch < EPOCHS; epoch++) {
        nbi_loader_order(&b, epoch);
        for (int i = 0; i < COUNT; i++)
            seen[i][b.order[i]]++;
    }
    for (int i = 0; i < COUNT * COUNT; i++) /* 1000 each, with a deviation of 30 */
        assert_true(abs(seen[i / COUNT][i % COUNT] - EPOCHS / COUNT) < 150);
    nbi_loader_release(&b);
    nbi_dataset_close(d);
}

static void test_loader__epochs_follow_each_other(void **state)
{
    (void)state;
    put_pairs("epochs.tsv", 10, 20, 1);
    struct nbi_dataset *d = open_files("epochs.tsv", NULL);
    for (int64_t epochs = 1; epochs <= 3; epochs++) {
        const struct nbi_loader_opts opts = options(d, epochs);
        struct nbi_loader b;
        struct nbi_microbatch batch;
        bool more = true;
        int64_t samples = 0;
        assert_ok(nbi_loader_init(&b, &opts));
        assert_ok(nbi_microbatch_init(&batch, 2, 100));
        while (more) {
            assert_ok(nbi_loader_next(&b, &batch, &more));
            samples += batch.examples;
        }
        assert_int_equal(samples, 10 * epochs);
        nbi_microbatch_release(&batch);
        nbi_loader_release(&b);
    }
    const struct nbi_loader_opts forever = options(d, 0);
    struct nbi_loader b;
    struct nbi_microbatch batch;
    bool more;
    assert_ok(nbi_loader_init(&b, &forever));
    assert_ok(nbi_microbatch_init(&batch, 2, 100));
    while (b.state.epoch < 50) { /* all rows are used: the next epoch fills them */
        assert_ok(nbi_loader_next(&b, &batch, &more));
        assert_true(more && batch.examples > 1);
    }
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
    nbi_dataset_close(d);
}

/* Each epoch starts a batch and has every prediction once. nbi_loader_skip counts the same
 * batches. */
static void check_borders(struct nbi_dataset *d, int64_t B, int64_t T, int64_t epochs)
{
    const struct nbi_loader_opts opts = options(d, epochs);
    struct nbi_loader b, lengths;
    struct nbi_microbatch batch;
    struct check c;
    bool more = true;
    check_init(&c, d, T);
    assert_ok(nbi_loader_init(&b, &opts));
    assert_ok(nbi_loader_init(&lengths, &opts));
    assert_ok(nbi_microbatch_init(&batch, B, T));
    while (more) {
        int64_t epoch = b.state.epoch;
        assert_ok(nbi_loader_next(&b, &batch, &more));
        assert_int_equal(more, !nbi_loader_is_done(&lengths));
        assert_ok(nbi_loader_skip(&lengths, B, T));
        assert_memory_equal(&b.state, &lengths.state, sizeof b.state);
        take_batch(&c, &batch, true);
        if (b.state.epoch == epoch)
            continue;
        assert_true(b.state.epoch == epoch + 1 && b.state.next == 0 && b.state.token == 0);
        check_epoch(&c);
        c.begun = 0;
    }
    assert_int_equal(b.state.epoch, epochs);
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
    nbi_loader_release(&lengths);
    check_release(&c);
}

static void test_loader__counted_epochs_start_a_batch(void **state)
{
    static const int64_t shapes[][2] = {{4, 512}, {1, 64}, {2, 17}, {4, 33}, {3, 1000}};
    (void)state;
    put_pairs("few.tsv", 6, 10, 1);
    put_pairs("mix.tsv", 60, 60, 1);
    put_documents("mix.txt", 12, 400, 2);
    struct nbi_dataset *few = open_files("few.tsv", NULL), *mix = open_files("mix.tsv", "mix.txt");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_borders(few, shapes[i][0], shapes[i][1], 10);
        check_borders(mix, shapes[i][0], shapes[i][1], 3);
    }
    nbi_dataset_close(few);
    nbi_dataset_close(mix);
}

/* ---- resuming ---- */

static void assert_same_batch(const struct nbi_microbatch *a, const struct nbi_microbatch *b)
{
    size_t bytes = (size_t)(a->B * a->T) * sizeof *a->ids;
    assert_memory_equal(a->ids, b->ids, bytes);
    assert_memory_equal(a->targets, b->targets, bytes);
    assert_memory_equal(a->positions, b->positions, bytes);
    assert_true(a->tokens == b->tokens && a->trained == b->trained);
    assert_true(a->examples == b->examples && a->truncated == b->truncated);
}

/* Stopping after any of 40 batches does not change the next 5. */
static void test_loader__resumes_anywhere(void **state)
{
    (void)state;
    enum { BATCHES = 40, MORE = 5 };
    put_pairs("resume.tsv", 30, 60, 1);
    put_documents("resume.txt", 8, 500, 2);
    struct nbi_dataset *d = open_files("resume.tsv", "resume.txt");
    const struct nbi_loader_opts opts = options(d, 0);
    struct nbi_loader straight, resumed;
    struct nbi_microbatch batch[BATCHES + MORE], again;
    struct nbi_loader_state cursor[BATCHES + 1];
    bool more, in_document = false;
    assert_ok(nbi_loader_init(&straight, &opts));
    for (int i = 0; i < BATCHES + MORE; i++) {
        if (i <= BATCHES)
            cursor[i] = straight.state;
        in_document |= straight.state.token > 0;
        assert_ok(nbi_microbatch_init(&batch[i], 3, 70));
        assert_ok(nbi_loader_next(&straight, &batch[i], &more));
    }
    assert_true(in_document && straight.state.epoch > 0); /* some stops are inside documents */
    assert_ok(nbi_microbatch_init(&again, 3, 70));
    for (int i = 0; i <= BATCHES; i++) {
        assert_ok(nbi_loader_init(&resumed, &opts));
        resumed.state = cursor[i];
        for (int k = i; k < i + MORE; k++) {
            assert_ok(nbi_loader_next(&resumed, &again, &more));
            assert_same_batch(&again, &batch[k]);
        }
        nbi_loader_release(&resumed);
    }
    for (int i = 0; i < BATCHES + MORE; i++)
        nbi_microbatch_release(&batch[i]);
    nbi_microbatch_release(&again);
    nbi_loader_release(&straight);
    nbi_dataset_close(d);
}

static void test_loader__impossible_sizes_are_refused(void **state)
{
    (void)state;
    struct nbi_microbatch b;
    assert_fails(nbi_microbatch_init(&b, 0, 8), NB_EINVAL, "a batch of 0 x 8 tokens");
    assert_fails(nbi_microbatch_init(&b, 8, -1), NB_EINVAL, "a batch of 8 x -1 tokens");
    assert_fails(nbi_microbatch_init(&b, (int64_t)1 << 33, 1), NB_EINVAL, "a batch of");
    assert_fails(nbi_microbatch_init(&b, (int64_t)1 << 32, (int64_t)1 << 32), NB_EINVAL,
                 "a batch of");
    assert_null(b.ids);
    nbi_microbatch_release(&b);
}

static void test_loader__changed_file_is_an_error(void **state)
{
    (void)state;
    struct nbi_loader b;
    struct nbi_microbatch batch;
    bool more;
    put_pairs("changed.tsv", 4, 10, 1);
    struct nbi_dataset *d = open_files("changed.tsv", NULL);
    const struct nbi_loader_opts opts = options(d, 0);
    assert_ok(nbi_loader_init(&b, &opts));
    assert_ok(nbi_microbatch_init(&batch, 2, 64));
    FILE *f = fopen(test_path("changed.tsv"), "r+");
    for (int i = 0; i < 80; i++)
        fputc('x', f);
    fclose(f);
    assert_fails(nbi_loader_next(&b, &batch, &more), NB_EFORMAT, "changed.tsv:");
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
    nbi_dataset_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loader__packs_a_batch_by_hand),
        cmocka_unit_test(test_loader__document_continues_in_next_row),
        cmocka_unit_test(test_loader__keep_documents_cuts_only_long_ones),
        cmocka_unit_test(test_loader__every_prediction_once),
        cmocka_unit_test(test_loader__long_conversations_are_truncated),
        cmocka_unit_test(test_loader__rows_are_full),
        cmocka_unit_test(test_loader__order_depends_on_seed_and_epoch),
        cmocka_unit_test(test_loader__order_is_uniform),
        cmocka_unit_test(test_loader__epochs_follow_each_other),
        cmocka_unit_test(test_loader__counted_epochs_start_a_batch),
        cmocka_unit_test(test_loader__resumes_anywhere),
        cmocka_unit_test(test_loader__impossible_sizes_are_refused),
        cmocka_unit_test(test_loader__changed_file_is_an_error),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
