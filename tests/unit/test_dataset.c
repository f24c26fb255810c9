/* test_dataset.c - numbering and places of examples, bad lines, and files that change or are no
 * data files. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/dataset.h"
#include "unit/data_support.h"

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

#define U "<|im_start|>user\n"
#define A "<|im_start|>assistant\n"
#define E "<|im_end|>"
#define N "<|im_end|>\n"

/* Opens files in the test's directory; NULL ends the list. */
static enum nb_status open_set(struct nbi_dataset **d, bool skip_bad, const char *a, const char *b,
                               const char *c)
{
    const char *files[4] = {test_path(a), b ? test_path(b) : NULL, c ? test_path(c) : NULL};
    const struct nbi_dataset_opts opts = {
        .files = files, .tokenizer = bytes_only, .chat = NBI_CHAT_CHATML, .skip_bad = skip_bad};
    return nbi_dataset_open(d, &opts);
}

/* Checks that the message starts with FILE:LINE: of a file in the test's directory. */
#define assert_fails_at(expr, status, place, words)                                                \
    do {                                                                                           \
        assert_fails(expr, status, words);                                                         \
        assert_true(strncmp(nb_last_error(), test_path(place), strlen(test_path(place))) == 0);    \
    } while (0)

struct wanted {
    const char *place, *sample;
    bool document;
};

static void check_set(struct nbi_dataset *d, const struct wanted *wanted, int64_t count)
{
    const struct nbi_dataset_stats *stats = nbi_dataset_stats(d);
    struct nbi_example s = {0};
    int64_t tokens = 0, trained = 0, longest = 0, documents = 0;
    char place[512];
    assert_int_equal(stats->examples, count);
    for (int64_t k = 0; k < 2 * count; k++) { /* in random order */
        int64_t i = k < count ? k : 2 * count - 1 - k, n;
        struct nbi_example hand;
        write_example(&hand, wanted[i].sample);
        n = (int64_t)hand.ids.count;
        assert_ok(nbi_dataset_get(d, i, &s));
        assert_example(&s, wanted[i].sample);
        assert_int_equal(nbi_dataset_tokens(d, i), n);
        assert_int_equal(nbi_dataset_is_document(d, i), wanted[i].document);
        assert_string_equal(nbi_dataset_place(d, i, place, sizeof place),
                            test_path(wanted[i].place));
        tokens += n;
        longest = n > longest ? n : longest;
        documents += wanted[i].document;
        for (int64_t t = 0; t < n; t++)
            trained += hand.trained[t];
        nbi_example_release(&hand);
    }
    assert_int_equal(2 * stats->tokens, tokens);
    assert_int_equal(2 * stats->trained, trained);
    assert_int_equal(stats->longest, longest);
    assert_int_equal(2 * stats->documents, documents);
    nbi_example_release(&s);
}

static void test_dataset__files(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    static const struct wanted wanted[] = {
        {"a.tsv:3", U "q" N A "[[answer" E "]]", false},
        {"a.tsv:5", U "prompt" N A "[[answer" E "]]", false},
        {"b.jsonl:1", U "p" N A "[[r" E "]]", false},
        {"b.jsonl:3", "[[t\n<|endoftext|>]]", true},
        {"c.txt:3", "[[one\n\nstill one<|endoftext|>]]", true},
        {"c.txt:6", "[[two<|endoftext|>]]", true},
    };
    put("a.tsv", "\xEF\xBB\xBF# a set\nPrompt\tAnswer\nq\tanswer\n\nprompt\tanswer");
    put("b.jsonl", "{\"prompt\": \"p\", \"response\": \"r\"}\r\n\r\n{\"text\": \"t\\n\"}\r\n");
    put("c.txt", "\n\none\n\nstill one<|endoftext|>\ntwo\n");
    assert_ok(open_set(&d, false, "a.tsv", "b.jsonl", "c.txt"));
    check_set(d, wanted, 6);
    assert_int_equal(nbi_dataset_stats(d)->bad, 0);
    nbi_dataset_close(d);
    nbi_dataset_close(NULL);
}

/* A file given twice counts twice; an empty file adds nothing. */
static void test_dataset__repeats(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    static const struct wanted wanted[] = {{"x.txt:1", "[[x<|endoftext|>]]", true},
                                           {"x.txt:1", "[[x<|endoftext|>]]", true}};
    put("x.txt", "x");
    put("empty.tsv", "");
    assert_ok(open_set(&d, false, "x.txt", "empty.tsv", "x.txt"));
    check_set(d, wanted, 2);
    nbi_dataset_close(d);
}

static void test_dataset__long_document(void **state)
{
    (void)state;
    struct nbi_str s = {0};
    struct nbi_dataset *d;
    struct nbi_example sample = {0};
    size_t at = 0;
    static const char line[] = "one line\n";
    char place[512], wanted[32];
    while (s.len < 3 * NBI_PIECE_MAX)
        nbi_str_puts(&s, line);
    nbi_str_puts(&s, "end");
    put("long.txt", s.p);
    assert_ok(open_set(&d, false, "long.txt", NULL, NULL));
    const struct nbi_dataset_stats *stats = nbi_dataset_stats(d);
    assert_true(stats->examples == 4 && stats->documents == 4);
    assert_int_equal(stats->tokens, s.len + 1); /* one end-of-text token */
    assert_int_equal(stats->trained, stats->tokens);
    for (int64_t i = 0; i < 4; i++) {
        snprintf(wanted, sizeof wanted, "long.txt:%zu", at / strlen(line) + 1);
        assert_string_equal(nbi_dataset_place(d, i, place, sizeof place), test_path(wanted));
        assert_ok(nbi_dataset_get(d, i, &sample));
        size_t text = sample.ids.count - (i == 3);
        for (size_t t = 0; t < text; t++)
            assert_int_equal(sample.ids.p[t], byte_id((uint8_t)s.p[at + t]));
        at += text;
        assert_int_equal(sample.ids.p[sample.ids.count - 1] == 256, i == 3);
    }
    assert_int_equal(at, s.len);
    nbi_example_release(&sample);
    nbi_dataset_close(d);
    nbi_str_release(&s);
}

/* ---- bad lines ---- */

struct log {
    int lines;
    char text[8][300];
};

static void keep_line(void *ctx, enum nb_log_level level, const char *line)
{
    struct log *log = ctx;
    assert_int_equal(level, NB_LOG_WARN);
    assert_true(log->lines < 8);
    snprintf(log->text[log->lines++], sizeof log->text[0], "%s", line);
}

static void test_dataset__bad_lines(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    struct log log = {0};
    static const struct wanted wanted[] = {{"bad.tsv:3", U "a" N A "[[b" E "]]", false},
                                           {"bad.jsonl:2", "[[t<|endoftext|>]]", true}};
    static const char *const skipped[] = {
        "bad.tsv:2: no TAB between prompt and answer", "bad.tsv:4: the answer is empty",
        "bad.tsv:6: the line is not well-formed UTF-8",
        "bad.jsonl:1: invalid JSON at byte 1: a name in quotes is expected",
        "bad.jsonl:3: 'text' is empty"};
    put("bad.tsv", "# x\nno tab\na\tb\na\t\n\n\xFF\tb\n");
    put("bad.jsonl", "{\n{\"text\": \"t\"}\n{\"text\": \"\"}\n1\n{}\n");
    assert_fails_at(open_set(&d, false, "bad.tsv", NULL, NULL), NB_EFORMAT,
                    "bad.tsv:2: no TAB between prompt and answer", "no TAB");
    assert_null(d);
    assert_fails_at(open_set(&d, false, "bad.jsonl", "bad.tsv", NULL), NB_EFORMAT,
                    "bad.jsonl:1: invalid JSON", "invalid JSON");
    nb_log_set_sink(keep_line, &log);
    assert_ok(open_set(&d, true, "bad.tsv", "bad.jsonl", NULL));
    nb_log_set_sink(NULL, NULL);
    check_set(d, wanted, 2);
    assert_int_equal(nbi_dataset_stats(d)->bad, 7);
    assert_int_equal(log.lines, 6); /* the first five, and the total */
    for (int i = 0; i < 5; i++) {
        char line[600];
        snprintf(line, sizeof line, "skipped %s", test_path(skipped[i]));
        assert_string_equal(log.text[i], line);
    }
    assert_string_equal(log.text[5], "skipped 7 bad lines in all");
    nbi_dataset_close(d);
}

/* A line that is too long is a bad line with its number. */
static void test_dataset__too_long_a_line(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    static const struct wanted wanted[] = {{"long.tsv:1", U "a" N A "[[b" E "]]", false},
                                           {"long.tsv:5", U "c" N A "[[d" E "]]", false}};
    put("long.tsv", "a\tb\n# behind this comment\n\n");
    int fd = open(test_path("long.tsv"), O_WRONLY);
    off_t at = lseek(fd, 0, SEEK_END) + (off_t)NBI_RECORD_MAX + 1;
    assert_int_equal(pwrite(fd, "\nc\td", 4, at), 4);
    close(fd);
    assert_ok(open_set(&d, true, "long.tsv", NULL, NULL));
    check_set(d, wanted, 2);
    assert_int_equal(nbi_dataset_stats(d)->bad, 1);
    nbi_dataset_close(d);
    assert_fails_at(open_set(&d, false, "long.tsv", NULL, NULL), NB_EFORMAT,
                    "long.tsv:4: the line is longer than 64 MiB", "longer");
}

static void test_dataset__headers(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    static const struct wanted wanted[] = {{"h.tsv:2", U "question" N A "[[answer" E "]]", false}};
    put("h.tsv", "question\tanswer\nquestion\tanswer\n"); /* one header, not two */
    assert_ok(open_set(&d, false, "h.tsv", NULL, NULL));
    check_set(d, wanted, 1);
    nbi_dataset_close(d);
    put("h.tsv", "question\tanswer\n");
    assert_fails(open_set(&d, false, "h.tsv", NULL, NULL), NB_EFORMAT, "there is no sample in");
}

/* ---- files without data ---- */

static void test_dataset__no_samples(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    put("empty.tsv", "");
    put("blank.txt", "\n\r\n");
    put("bad.tsv", "x\ny\n");
    assert_fails(open_set(&d, false, "empty.tsv", NULL, NULL), NB_EFORMAT,
                 "there is no sample in '");
    assert_null(strstr(nb_last_error(), "other files"));
    assert_fails(open_set(&d, false, "empty.tsv", "blank.txt", NULL), NB_EFORMAT,
                 "empty.tsv' and the other files");
    assert_fails(open_set(&d, true, "bad.tsv", NULL, NULL), NB_EFORMAT, "there is no sample in");
    assert_null(d);
}

static void test_dataset__not_files(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    static const char *const none[] = {NULL};
    const struct nbi_dataset_opts opts = {.files = none, .tokenizer = bytes_only};
    put("good.tsv", "a\tb\n");
    put("a.csv", "a\tb\n");
    assert_int_equal(mkdir(test_path("dir.txt"), 0700), 0);
    assert_int_equal(mkfifo(test_path("pipe.tsv"), 0600), 0);
    assert_fails(open_set(&d, false, "a.csv", NULL, NULL), NB_EUNSUPPORTED, ".tsv, .jsonl or .txt");
    assert_fails(open_set(&d, true, "good.tsv", "a.csv", NULL), NB_EUNSUPPORTED, "a.csv'");
    assert_fails(open_set(&d, true, "dir.txt", NULL, NULL), NB_EIO, "not a regular file");
    assert_fails(open_set(&d, true, "good.tsv", "pipe.tsv", NULL), NB_EIO, "not a regular file");
    assert_fails(open_set(&d, true, "none.tsv", "good.tsv", NULL), NB_ENOTFOUND, "none.tsv'");
    assert_fails(nbi_dataset_open(&d, &opts), NB_EINVAL, "a data set has 1 to 65535 files");
    assert_null(d);
}

/* ---- files that change ---- */

/* Overwrites in place, as some editors do; nbi_file_write would make a new file. */
static void overwrite(const char *name, const char *text)
{
    int fd = open(test_path(name), O_WRONLY | O_TRUNC);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static void test_dataset__changed_file(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    struct nbi_example s = {0};
    put("c.tsv", "first\tanswer\nsecond\tanswer\n");
    assert_ok(open_set(&d, false, "c.tsv", NULL, NULL));
    overwrite("c.tsv", "first\tanswer\nse\tc<think>.\nx"); /* fewer tokens at the same offset */
    assert_ok(nbi_dataset_get(d, 0, &s));
    assert_fails_at(nbi_dataset_get(d, 1, &s), NB_EFORMAT, "c.tsv:2: the file has changed",
                    "the file has changed since it was opened");
    overwrite("c.tsv", "first answer\nsecond\tanswer\n"); /* a line that is no longer an example */
    assert_fails_at(nbi_dataset_get(d, 0, &s), NB_EFORMAT, "c.tsv:1: ", "");
    assert_ok(nbi_dataset_get(d, 1, &s));
    overwrite("c.tsv", "first\tans");
    assert_fails(nbi_dataset_get(d, 1, &s), NB_EIO, "became shorter");
    nbi_dataset_close(d);
    put("c.tsv", "first\tanswer\nsecond\tanswer\n");
    assert_ok(open_set(&d, false, "c.tsv", NULL, NULL));
    put("c.tsv", "x\ty\n"); /* a new file of that name: the data set still has the old one open */
    assert_ok(nbi_dataset_get(d, 1, &s));
    assert_example(&s, U "second" N A "[[answer" E "]]");
    nbi_example_release(&s);
    nbi_dataset_close(d);
}

/* ---- progress ---- */

struct progress {
    uint64_t done, total, calls;
};

static void note(void *ctx, uint64_t done, uint64_t total)
{
    struct progress *p = ctx;
    assert_true(done >= p->done && done <= total);
    assert_true(p->calls == 0 || total == p->total);
    *p = (struct progress){done, total, p->calls + 1};
}

static void test_dataset__progress(void **state)
{
    (void)state;
    struct nbi_dataset *d;
    struct progress p = {0};
    put("p1.tsv", "a\tb\nc\td\n");
    put("p2.tsv", "a\tb\nc\td"); /* no final line end */
    const char *const files[] = {test_path("p1.tsv"), test_path("p2.tsv"), NULL};
    const struct nbi_dataset_opts opts = {
        .files = files, .tokenizer = bytes_only, .progress = note, .progress_ctx = &p};
    assert_ok(nbi_dataset_open(&d, &opts));
    assert_true(p.done == 15 && p.total == 15 && p.calls >= 4);
    nbi_dataset_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dataset__files),           cmocka_unit_test(test_dataset__repeats),
        cmocka_unit_test(test_dataset__long_document),   cmocka_unit_test(test_dataset__bad_lines),
        cmocka_unit_test(test_dataset__too_long_a_line), cmocka_unit_test(test_dataset__headers),
        cmocka_unit_test(test_dataset__no_samples),      cmocka_unit_test(test_dataset__not_files),
        cmocka_unit_test(test_dataset__changed_file),    cmocka_unit_test(test_dataset__progress),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
