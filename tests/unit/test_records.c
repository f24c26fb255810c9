/* test_records.c - line ends, buffer borders and lines that are too long; documents, separators on
 * borders, and pieces that tokenize like the whole document. */
#include <fcntl.h>
#include <unistd.h>

#include "data/records.h"
#include "unit/data_support.h"

struct wanted {
    uint64_t line;
    const char *text;
    bool continues; /* the document does not end here */
};

/* Checks the records of a file, and that offset and length lead back to each text. */
static void expect(enum nbi_data_kind kind, const char *bytes, size_t size, const struct wanted *w,
                   size_t count)
{
    struct nbi_source *src;
    struct nbi_records r;
    assert_ok(nbi_source_memory(&src, bytes, size));
    nbi_records_init(&r, src, kind);
    for (size_t i = 0; i <= count; i++) {
        struct nbi_record record;
        const char *text;
        bool more;
        assert_ok(nbi_records_next(&r, &record, &text, &more));
        assert_int_equal(more, i < count);
        if (!more)
            break;
        assert_int_equal(record.len, strlen(w[i].text));
        assert_memory_equal(text, w[i].text, record.len);
        assert_memory_equal(bytes + record.offset, w[i].text, record.len);
        assert_int_equal(record.line, w[i].line);
        assert_int_equal(record.ends, !w[i].continues);
    }
    nbi_records_release(&r);
    nbi_source_close(src);
}

#define EXPECT(kind, bytes, ...)                                                                   \
    do {                                                                                           \
        static const struct wanted wanted_list[] = {__VA_ARGS__};                                  \
        expect(kind, bytes, sizeof bytes - 1, wanted_list,                                         \
               sizeof wanted_list / sizeof *wanted_list);                                          \
    } while (0)
#define EXPECT_NONE(kind, bytes) expect(kind, bytes, sizeof bytes - 1, NULL, 0)

/* ---- kinds ---- */

static void test_records__kinds(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        enum nbi_data_kind kind;
    } known[] = {{"a.tsv", NBI_DATA_TSV},      {"d.x/a.TSV", NBI_DATA_TSV},
                 {"a.jsonl", NBI_DATA_JSONL},  {"a.ndjson", NBI_DATA_JSONL},
                 {"a.txt", NBI_DATA_TEXT},     {"a.text", NBI_DATA_TEXT},
                 {"README.md", NBI_DATA_TEXT}, {"a.tsv.txt", NBI_DATA_TEXT}};
    static const char *const unknown[] = {"a.json", "a", "tsv", "a.tsv.gz", "a.csv", "", "txt/a"};
    enum nbi_data_kind kind;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_ok(nbi_data_kind_of(known[i].path, &kind));
        assert_int_equal(kind, known[i].kind);
    }
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        assert_fails(nbi_data_kind_of(unknown[i], &kind), NB_EUNSUPPORTED, ".tsv, .jsonl or .txt");
}

/* ---- lines ---- */

static void test_lines__ends(void **state)
{
    (void)state;
    EXPECT(NBI_DATA_TSV, "a\tb\nc\td\n", {1, "a\tb", 0}, {2, "c\td", 0});
    EXPECT(NBI_DATA_TSV, "a\tb\nc\td", {1, "a\tb", 0}, {2, "c\td", 0});
    EXPECT(NBI_DATA_TSV, "a\tb\r\nc\td\r\n", {1, "a\tb\r", 0}, {2, "c\td\r", 0});
    EXPECT(NBI_DATA_TSV,
           "\xEF\xBB\xBF"
           "a\tb\n\xEF\xBB\xBF\tx",
           {1, "a\tb", 0}, {2, "\xEF\xBB\xBF\tx", 0});
    EXPECT(NBI_DATA_JSONL, "\xEF\xBB\xBF{}", {1, "{}", 0});
    EXPECT(NBI_DATA_JSONL, "\xEF\xBB", {1, "\xEF\xBB", 0});
}

static void test_lines__blank_and_comment_lines_are_skipped(void **state)
{
    (void)state;
    EXPECT(NBI_DATA_TSV, "\n\r\n# a\tb\n \t \r\nc\n\n#\nd", {5, "c", 0}, {8, "d", 0});
    EXPECT(NBI_DATA_TSV, " # a\tb\n\t#\n", {1, " # a\tb", 0}, {2, "\t#", 0});
    EXPECT(NBI_DATA_JSONL, "# a\n\n{}\n  \n", {1, "# a", 0}, {3, "{}", 0});
    EXPECT_NONE(NBI_DATA_TSV, "");
    EXPECT_NONE(NBI_DATA_TSV, "\n");
    EXPECT_NONE(NBI_DATA_TSV, "\n\n\r\n \n#");
    EXPECT_NONE(NBI_DATA_TSV, "\xEF\xBB\xBF");
    EXPECT_NONE(NBI_DATA_TSV, "\xEF\xBB\xBF# mark and comment\n");
    EXPECT_NONE(NBI_DATA_JSONL, "\r");
}

/* Lines that end near the sizes of the buffer. */
static void test_lines__ends_on_buffer_borders(void **state)
{
    (void)state;
    enum { KIB = 1 << 10, MIB = 1 << 20 };
    static const size_t lengths[] = {MIB - 1,     1,           MIB,     2,          MIB + 1,
                                     MIB / 2,     MIB / 2 - 1, 1,       2 * MIB,    2 * MIB - 1,
                                     MIB - 2,     MIB / 2 + 1, KIB,     3 * MIB,    1,
                                     4 * MIB + 1, 7,           MIB - 3, 2 * MIB + 1};
    size_t n = sizeof lengths / sizeof *lengths, size = 0, at = 0;
    for (size_t i = 0; i < n; i++)
        size += lengths[i] + 1;
    char *bytes = malloc(size);
    for (size_t i = 0; i < n; i++) {
        memset(bytes + at, 'a' + (int)i, lengths[i]);
        bytes[at + lengths[i]] = '\n';
        at += lengths[i] + 1;
    }
    for (int final = 0; final < 2; final++) { /* with and without the last line end */
        struct nbi_source *src;
        struct nbi_records r;
        assert_ok(nbi_source_memory(&src, bytes, size - (size_t) final));
        nbi_records_init(&r, src, NBI_DATA_TSV);
        at = 0;
        for (size_t i = 0; i <= n; i++) {
            struct nbi_record record;
            const char *text;
            bool more;
            assert_ok(nbi_records_next(&r, &record, &text, &more));
            assert_int_equal(more, i < n);
            if (!more)
                break;
            assert_int_equal(record.line, i + 1);
            assert_int_equal(record.offset, at);
            assert_int_equal(record.len, lengths[i]);
            assert_true(memcmp(text, bytes + at, lengths[i]) == 0);
            at += lengths[i] + 1;
        }
        nbi_records_release(&r);
        nbi_source_close(src);
    }
    free(bytes);
}

/* A sparse file: front, `hole` NULs, back. */
static void put_hole(const char *name, const char *front, size_t hole, const char *back)
{
    int fd = open(test_path(name), O_RDWR | O_CREAT | O_TRUNC, 0600);
    size_t n = strlen(front), m = strlen(back);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, front, n, 0), n);
    assert_int_equal(ftruncate(fd, (off_t)(n + hole)), 0);
    assert_int_equal(pwrite(fd, back, m, (off_t)(n + hole)), m);
    close(fd);
}

static void test_lines__too_long(void **state)
{
    (void)state;
    struct nbi_source *src;
    struct nbi_records r;
    struct nbi_record record;
    const char *text;
    bool more;
    put_hole("long.tsv", "a\tb\n", NBI_RECORD_MAX + 1, "\nc\td");
    assert_ok(nbi_source_open(&src, test_path("long.tsv")));
    nbi_records_init(&r, src, NBI_DATA_TSV);
    assert_ok(nbi_records_next(&r, &record, &text, &more));
    assert_int_equal(record.line, 1);
    assert_fails(nbi_records_next(&r, &record, &text, &more), NB_EFORMAT,
                 "the line is longer than 64 MiB");
    assert_ok(nbi_records_next(&r, &record, &text, &more));
    assert_true(more && record.line == 3 && record.len == 3);
    assert_memory_equal(text, "c\td", 3);
    assert_ok(nbi_records_next(&r, &record, &text, &more));
    assert_false(more);
    nbi_records_release(&r);
    nbi_source_close(src);
}

/* The longest allowed line, and a file without line ends. */
static void test_lines__longest(void **state)
{
    (void)state;
    struct nbi_source *src;
    struct nbi_records r;
    struct nbi_record record;
    const char *text;
    bool more;
    put_hole("longest.tsv", "", NBI_RECORD_MAX, "\n");
    assert_ok(nbi_source_open(&src, test_path("longest.tsv")));
    nbi_records_init(&r, src, NBI_DATA_TSV);
    assert_ok(nbi_records_next(&r, &record, &text, &more));
    assert_true(more);
    assert_int_equal(record.len, NBI_RECORD_MAX);
    nbi_records_release(&r);
    nbi_source_close(src);
    put_hole("endless.tsv", "x", NBI_RECORD_MAX, "");
    assert_ok(nbi_source_open(&src, test_path("endless.tsv")));
    nbi_records_init(&r, src, NBI_DATA_TSV);
    assert_fails(nbi_records_next(&r, &record, &text, &more), NB_EFORMAT, "longer than 64 MiB");
    assert_ok(nbi_records_next(&r, &record, &text, &more));
    assert_false(more);
    nbi_records_release(&r);
    nbi_source_close(src);
}

/* ---- documents ---- */

static void test_text__documents(void **state)
{
    (void)state;
    EXPECT(NBI_DATA_TEXT, "one", {1, "one", 0});
    EXPECT(NBI_DATA_TEXT, "\n\r\none\ntwo\n\n", {3, "one\ntwo", 0});
    EXPECT(NBI_DATA_TEXT, "one<|endoftext|>two<|endoftext|>", {1, "one", 0}, {1, "two", 0});
    EXPECT(NBI_DATA_TEXT, "\xEF\xBB\xBF\none\n<|endoftext|>\n\n \ntwo\r\n<|endoftext|>\n",
           {2, "one", 0}, {5, " \ntwo", 0});
    EXPECT(NBI_DATA_TEXT, "<|endoftext|><|endoftext|>\n<|endoftext|>a", {2, "a", 0});
    EXPECT(NBI_DATA_TEXT, "# not a comment\n<|endoftext|", {1, "# not a comment\n<|endoftext|", 0});
    EXPECT_NONE(NBI_DATA_TEXT, "");
    EXPECT_NONE(NBI_DATA_TEXT, "\n\n\r\n");
    EXPECT_NONE(NBI_DATA_TEXT, "\xEF\xBB\xBF");
    EXPECT_NONE(NBI_DATA_TEXT, "<|endoftext|>\n<|endoftext|>");
}

/* Joins pieces into documents, and checks that there are no gaps between pieces. */
struct document {
    struct nbi_str text;
    size_t pieces, empty, broken; /* broken: cut inside a character */
};

static size_t read_documents(const char *bytes, size_t size, struct document *documents, size_t max)
{
    struct nbi_source *src;
    struct nbi_records r;
    struct nbi_record record;
    const char *text;
    bool more = true, inside = false;
    size_t count = 0;
    uint64_t behind = 0;
    memset(documents, 0, max * sizeof *documents);
    assert_ok(nbi_source_memory(&src, bytes, size));
    nbi_records_init(&r, src, NBI_DATA_TEXT);
    for (;;) {
        assert_ok(nbi_records_next(&r, &record, &text, &more));
        if (!more)
            break;
        assert_true(count < max);
        assert_true(!inside || record.offset == behind);
        assert_true(record.len <= NBI_PIECE_MAX);
        assert_memory_equal(text, bytes + record.offset, record.len);
        nbi_str_append(&documents[count].text, text, record.len);
        documents[count].pieces++;
        documents[count].empty += record.len == 0;
        documents[count].broken += !nbi_utf8_valid(text, record.len);
        behind = record.offset + record.len;
        inside = !record.ends;
        count += record.ends;
    }
    assert_false(inside);
    nbi_records_release(&r);
    nbi_source_close(src);
    return count;
}

static void release_documents(struct document *documents, size_t count)
{
    for (size_t i = 0; i < count; i++)
        nbi_str_release(&documents[i].text);
}

/* Puts a separator at every offset around the end of the first piece. */
static void straddle(const char *before, const char *unit)
{
    static const char separator[] = "<|endoftext|>";
    for (int shift = -32; shift <= 16; shift++) {
        struct nbi_str s = {0};
        struct document d[3];
        size_t len = (size_t)((int)NBI_PIECE_MAX + shift);
        while (s.len + strlen(unit) + strlen(before) <= len)
            nbi_str_puts(&s, unit);
        while (s.len + strlen(before) < len)
            nbi_str_puts(&s, "x");
        size_t text = s.len;
        while (s.p[text - 1] == '\n')
            text--;
        nbi_str_puts(&s, before);
        nbi_str_puts(&s, separator);
        nbi_str_puts(&s, "\nsecond");
        assert_int_equal(read_documents(s.p, s.len, d, 3), 2);
        assert_int_equal(d[0].text.len, text);
        assert_memory_equal(d[0].text.p, s.p, text);
        assert_string_equal(nbi_str_text(&d[1].text), "second");
        assert_int_equal(d[0].empty, 0); /* an empty document is no record */
        release_documents(d, 3);
        nbi_str_release(&s);
    }
}

static void test_text__separator_on_a_piece_border(void **state)
{
    (void)state;
    straddle("", "x");
    straddle("", "word ");
}

static void test_text__line_end_on_a_piece_border(void **state)
{
    (void)state;
    straddle("\n", "x");
    straddle("\n", "word ");
    straddle("", "a line\n");
    straddle("\r\n\n", "a line\n");
}

static void test_text__long_lines(void **state)
{
    (void)state;
    struct nbi_str s = {0};
    struct document d[1];
    for (int shift = 0; shift < 3; shift++) { /* may only be cut between characters */
        s.len = 0;
        nbi_str_append(&s, "xx", (size_t)shift);
        for (int i = 0; i < 100000; i++)
            nbi_str_puts(&s, "\xE4\xBD\xA0");
        assert_int_equal(read_documents(s.p, s.len, d, 1), 1);
        assert_int_equal(d[0].text.len, s.len);
        assert_memory_equal(d[0].text.p, s.p, s.len);
        assert_true(d[0].pieces == 5 && d[0].broken == 0);
        release_documents(d, 1);
    }
    s.len = 0;
    for (int i = 0; i < 200000; i++) /* no characters either */
        nbi_str_append(&s, "\x80", 1);
    assert_int_equal(read_documents(s.p, s.len, d, 1), 1);
    assert_int_equal(d[0].text.len, s.len);
    release_documents(d, 1);
    nbi_str_release(&s);
}

/* ---- tokens of pieces ---- */

static void english(struct nbi_str *s, uint64_t *seed)
{
    static const char *const words[] = {
        "the",  "quick", "fox's", "don't", "1984", "3.14", "(see", "below)", "\"quoted\"",
        "end.", "well",  "--",    "a",     "I'll", "x",    "C++",  "&",      "na\xC3\xAFve"};
    static const char *const between[] = {" ",  " ",    " ",  " ",    " ",      " ",     "  ",
                                          "\n", "\r\n", "\t", "\n\n", "\n    ", " \n\t", ", "};
    nbi_str_puts(s, words[draw(seed, sizeof words / sizeof *words)]);
    nbi_str_puts(s, between[draw(seed, sizeof between / sizeof *between)]);
}

/* Without line ends. */
static void one_line(struct nbi_str *s, uint64_t *seed)
{
    size_t from = s->len;
    english(s, seed);
    for (; from < s->len; from++)
        if (s->p[from] == '\n' || s->p[from] == '\r')
            s->p[from] = ' ';
}

static void chinese(struct nbi_str *s, uint64_t *seed)
{
    static const char *const marks[] = {"\xEF\xBC\x8C",
                                        "\xE3\x80\x82",
                                        "\xE3\x80\x82\n",
                                        "\xEF\xBC\x9F\n\n\xE3\x80\x80\xE3\x80\x80",
                                        "\xE3\x80\x8D\n\xE3\x80\x8C",
                                        " 42 ",
                                        "\n"};
    for (uint32_t n = 1 + draw(seed, 12); n > 0; n--)
        nbi_str_put_char(s, 0x4E00 + draw(seed, 0x200));
    nbi_str_puts(s, marks[draw(seed, sizeof marks / sizeof *marks)]);
}

static void check_pieces(struct nb_tokenizer *t, const char *text, size_t len)
{
    struct nbi_source *src;
    struct nbi_records r;
    struct nbi_record record;
    const char *piece;
    struct nbi_ids whole = {0}, parts = {0};
    size_t pieces = 0;
    bool more = true;
    assert_ok(nbi_source_memory(&src, text, len));
    nbi_records_init(&r, src, NBI_DATA_TEXT);
    for (;; pieces++) {
        assert_ok(nbi_records_next(&r, &record, &piece, &more));
        if (!more)
            break;
        assert_ok(nbi_tokenizer_encode(t, piece, record.len, true, &parts));
    }
    assert_ok(nbi_tokenizer_encode(t, text, len, true, &whole));
    assert_true(pieces > len / NBI_PIECE_MAX);
    assert_int_equal(parts.count, whole.count);
    assert_true(memcmp(parts.p, whole.p, whole.count * sizeof *whole.p) == 0);
    nbi_ids_release(&whole);
    nbi_ids_release(&parts);
    nbi_records_release(&r);
    nbi_source_close(src);
}

static void test_pieces__tokenize_like_the_whole(void **state)
{
    (void)state;
    struct nbi_str s = {0};
    uint64_t seed = 1;
    for (int i = 0; i < 4000; i++)
        english(&s, &seed);
    for (int i = 0; i < 1000; i++)
        chinese(&s, &seed);
    struct nb_tokenizer *t = new_tokenizer(s.p, 600);
    static void (*const write[])(struct nbi_str *, uint64_t *) = {english, chinese, one_line};
    for (int round = 0; round < 12; round++) {
        s.len = 0;
        while (s.len < 5 * NBI_PIECE_MAX) /* one kind of text; every fourth time all kinds */
            write[round % 4 < 3 ? (uint32_t)round % 4 : draw(&seed, 3)](&s, &seed);
        nbi_str_puts(&s, "end");
        check_pieces(t, s.p, s.len);
    }
    nb_tokenizer_close(t);
    nbi_str_release(&s);
}

/* A line of nothing but a Unicode space is tokenized with the line ends around it. */
static void test_pieces__unicode_space_between_lines(void **state)
{
    (void)state;
    static const char line[] = "\xE4\xBD\xA0\xE5\xA5\xBD\n\xE3\x80\x80\n";
    struct nbi_str s = {0};
    while (s.len < 2 * NBI_PIECE_MAX)
        nbi_str_puts(&s, line);
    nbi_str_puts(&s, "end");
    struct nb_tokenizer *t = new_tokenizer(s.p, 20);
    check_pieces(t, s.p, s.len);
    nb_tokenizer_close(t);
    nbi_str_release(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records__kinds),
        cmocka_unit_test(test_lines__ends),
        cmocka_unit_test(test_lines__blank_and_comment_lines_are_skipped),
        cmocka_unit_test(test_lines__ends_on_buffer_borders),
        cmocka_unit_test(test_lines__too_long),
        cmocka_unit_test(test_lines__longest),
        cmocka_unit_test(test_text__documents),
        cmocka_unit_test(test_text__separator_on_a_piece_border),
        cmocka_unit_test(test_text__line_end_on_a_piece_border),
        cmocka_unit_test(test_text__long_lines),
        cmocka_unit_test(test_pieces__tokenize_like_the_whole),
        cmocka_unit_test(test_pieces__unicode_space_between_lines),
    };
    return cmocka_run_group_tests(tests, make_test_dir, remove_test_dir);
}
