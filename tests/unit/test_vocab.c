/* test_vocab.c - reads tokenizer.json and tokenizer_config.json, rejects what is unsupported, and
 * writes JSON and GGUF. */
#include "base/jscan.h"
#include "base/log.h"
#include "tokenizer/tokenizer.h"
#include "unit/support.h"

#define GOLDEN NB_TEST_SOURCE "/golden/tokenizer/"

/* ---- building a tokenizer.json ---- */

#define BYTE_LEVEL                                                                                 \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "              \
    "\"use_regex\": false}"
#define SPLIT(pattern, behavior)                                                                   \
    "{\"type\": \"Split\", \"pattern\": " pattern ", \"behavior\": \"" behavior                    \
    "\", \"invert\": false}"
#define PRE(list) "{\"type\": \"Sequence\", \"pretokenizers\": [" list "]}"
#define REGEX     "{\"Regex\": \"[ab]+|c\"}"
#define ADDED(id, content, more)                                                                   \
    "{\"id\": " id ", \"content\": \"" content "\", \"single_word\": false, \"lstrip\": false, "   \
    "\"rstrip\": false, \"normalized\": false, \"special\": true" more "}"

struct member {
    const char *name, *value;
};

static const struct member outside[] = {
    {"version", "\"1.0\""},     {"truncation", "null"},
    {"padding", "null"},        {"added_tokens", "[" ADDED("5", "<x>", "") "]"},
    {"normalizer", "null"},     {"pre_tokenizer", PRE(SPLIT(REGEX, "Isolated") ", " BYTE_LEVEL)},
    {"post_processor", "null"}, {"decoder", BYTE_LEVEL},
};

static const struct member inside[] = {
    {"type", "\"BPE\""},
    {"dropout", "null"},
    {"unk_token", "null"},
    {"continuing_subword_prefix", "\"\""},
    {"end_of_word_suffix", "null"},
    {"fuse_unk", "false"},
    {"byte_fallback", "false"},
    {"ignore_merges", "false"},
    {"vocab", "{\"a\": 0, \"b\": 1, \"ab\": 2, \"\\u0120\": 3, \"aab\": 4}"},
    {"merges", "[[\"a\", \"b\"], [\"a\", \"ab\"]]"},
};

/* Appends the members of a list with one of them replaced, or omitted (value NULL). */
static void put_members(struct nbi_str *s, const struct member *list, size_t count,
                        const char *name, const char *value)
{
    for (size_t i = 0; i < count; i++) {
        bool other = strcmp(list[i].name, name) == 0;
        if (!other || value)
            nbi_str_printf(s, "\"%s\": %s, ", list[i].name, other ? value : list[i].value);
    }
}

/* Writes t.json with one member replaced; name "" replaces none. The model comes last. */
static void put_tokenizer(const char *name, const char *value)
{
    struct nbi_str s = {0};
    nbi_str_puts(&s, "{");
    put_members(&s, outside, sizeof outside / sizeof *outside, name, value);
    if (strcmp(name, "model") == 0) {
        nbi_str_printf(&s, "%s%s", value ? "\"model\": " : "\"x\": 0", value ? value : "");
    } else {
        nbi_str_puts(&s, "\"model\": {");
        put_members(&s, inside, sizeof inside / sizeof *inside, name, value);
        nbi_str_puts(&s, "\"extra\": 0}");
    }
    nbi_str_puts(&s, "}");
    put("t.json", nbi_str_text(&s));
    nbi_str_release(&s);
}

/* ---- reading ---- */

static void assert_token(const struct nbi_vocab *v, int64_t id, const char *text, int type,
                         int flags)
{
    assert_true(id < v->count);
    assert_string_equal(v->tokens[id].text, text);
    assert_int_equal(v->tokens[id].len, strlen(text));
    assert_int_equal(v->tokens[id].type, type);
    assert_int_equal(v->tokens[id].flags, flags);
}

static void test_vocab__reads_tokenizer_json(void **state)
{
    (void)state;
    struct nbi_vocab v;
    put_tokenizer("", NULL);
    assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
    assert_int_equal(v.count, 6);
    assert_token(&v, 0, "a", NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL);
    assert_token(&v, 3, "\xC4\xA0", NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL);
    assert_token(&v, 4, "aab", NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL);
    assert_token(&v, 5, "<x>", NBI_TOKEN_CONTROL, 0);
    assert_int_equal(v.merge_count, 2);
    assert_string_equal(v.merges[0], "a b");
    assert_string_equal(v.merges[1], "a ab");
    assert_false(v.nfc || v.ignore_merges || v.split.prefix_space || v.add_bos);
    assert_int_equal(v.split.count, 1);
    assert_string_equal(v.split.stage[0].pattern, "[ab]+|c");
    assert_int_equal(v.split.stage[0].keep, NBI_SPLIT_ALL);
    assert_null(v.chat_template);
    assert_true(v.bos == -1 && v.eos == -1 && v.pad == -1);
    assert_false(nbi_vocab_is_qwen(&v));
    nbi_vocab_release(&v);
    assert_int_equal(v.count, 0);
    nbi_vocab_release(&v); /* releasing twice is allowed */
}

static void test_vocab__reads_both_forms_of_merges(void **state)
{
    (void)state;
    static const char *const forms[] = {"[\"a b\", \"a ab\"]", "[[\"a\",\"b\"],[\"a\",\"ab\"]]",
                                        "[ [ \"\\u0061\" , \"b\" ] , \"a ab\" ]"};
    for (int i = 0; i < 3; i++) {
        struct nbi_vocab v;
        put_tokenizer("merges", forms[i]);
        assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
        assert_int_equal(v.merge_count, 2);
        assert_string_equal(v.merges[0], "a b");
        assert_string_equal(v.merges[1], "a ab");
        nbi_vocab_release(&v);
    }
}

/* The model comes first, and in it the merges before the vocabulary. */
static void test_vocab__member_order_does_not_matter(void **state)
{
    (void)state;
    struct nbi_vocab v;
    put("t.json", "{\"model\": {\"merges\": [[\"a\", \"b\"]], \"ignore_merges\": true, \"vocab\": "
                  "{\"a\": 0, \"b\": 7, \"ab\": 3}, \"type\": \"BPE\"}, \"decoder\": " BYTE_LEVEL
                  ", \"pre_tokenizer\": " BYTE_LEVEL ", \"added_tokens\": []}");
    assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
    assert_int_equal(v.count, 8);
    assert_null(v.tokens[1].text);
    assert_token(&v, 7, "b", NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL);
    assert_true(v.ignore_merges);
    assert_int_equal(v.split.count, 0);
    nbi_vocab_release(&v);
}

static void test_vocab__reads_flags_of_added_tokens(void **state)
{
    (void)state;
    struct nbi_vocab v;
    static const char *const tokens[] = {
        ADDED("5", "<l>", ", \"lstrip\": true"),
        ADDED("6", "<r>", ", \"rstrip\": true, \"special\": false"),
        ADDED("7", "<w>", ", \"single_word\": true"),
        ADDED("8", "<n>", ", \"normalized\": true"),
        ADDED("2", "ab", ""),
        "{\"id\": 10, \"content\": \"bare\"}",
    };
    struct nbi_str list = {0};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        nbi_str_printf(&list, "%c%s", i ? ',' : '[', tokens[i]);
    nbi_str_puts(&list, "]");
    put_tokenizer("added_tokens", list.p);
    nbi_str_release(&list);
    assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
    assert_int_equal(v.count, 11);
    assert_token(&v, 5, "<l>", NBI_TOKEN_CONTROL, NBI_TOKEN_LSTRIP);
    assert_token(&v, 6, "<r>", NBI_TOKEN_USER, NBI_TOKEN_RSTRIP);
    assert_token(&v, 7, "<w>", NBI_TOKEN_CONTROL, NBI_TOKEN_SINGLE_WORD);
    assert_token(&v, 8, "<n>", NBI_TOKEN_CONTROL, NBI_TOKEN_NORMALIZED);
    assert_token(&v, 2, "ab", NBI_TOKEN_CONTROL, NBI_TOKEN_MODEL); /* merges still produce it */
    assert_null(v.tokens[9].text);
    assert_token(&v, 10, "bare", NBI_TOKEN_USER, 0);
    nbi_vocab_release(&v);
}

struct read_case {
    const char *name, *value;
};

/* Each variant is read, and a tokenizer can be made from it. */
static void test_vocab__accepts_harmless_variants(void **state)
{
    (void)state;
    static const struct read_case rows[] = {
        {"normalizer", "{\"type\": \"NFC\"}"},
        {"normalizer", NULL},
        {"normalizer", "{\"type\": \"Sequence\", \"normalizers\": []}"},
        {"normalizer", "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}]}"},
        {"decoder", "{\"type\": \"Sequence\", \"decoders\": [" BYTE_LEVEL "]}"},
        {"pre_tokenizer", "{\"type\": \"ByteLevel\", \"add_prefix_space\": true}"},
        {"pre_tokenizer", PRE(SPLIT("{\"String\": \"a|b\"}", "Removed") "," BYTE_LEVEL)},
        {"pre_tokenizer", PRE("{\"type\": \"Digits\", \"individual_digits\": true}," BYTE_LEVEL)},
        {"pre_tokenizer", PRE("{\"type\": \"Digits\", \"individual_digits\": false}," BYTE_LEVEL)},
        {"added_tokens", NULL},
        {"added_tokens", "[]"},
        {"dropout", NULL},
        {"dropout", "0.0"},
        {"unk_token", "\"\""},
        {"end_of_word_suffix", "\"\""},
        {"continuing_subword_prefix", "null"},
        {"merges", "[]"},
        {"vocab", "{\"a\": 4194303, \"b\": 1, \"ab\": 2, \"aab\": 3}"},
        {"post_processor", "{\"type\": \"TemplateProcessing\"}"},
        {"version", NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct nb_tokenizer *t;
        put_tokenizer(rows[i].name, rows[i].value);
        enum nb_status rc = nb_tokenizer_open(&t, test_path("t.json"), NULL);
        if (rc != NB_OK)
            fail_msg("%s = %s: %s", rows[i].name, rows[i].value, nb_last_error());
        nb_tokenizer_close(t);
    }
}

struct refusal {
    const char *name, *value, *words;
    enum nb_status status;
};

static void check_refusals(const struct refusal *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct nb_tokenizer *t;
        put_tokenizer(rows[i].name, rows[i].value);
        enum nb_status rc = nb_tokenizer_open(&t, test_path("t.json"), NULL);
        const char *shown = rows[i].value ? rows[i].value : "nothing";
        if (rc == NB_OK)
            fail_msg("%s = %s is accepted", rows[i].name, shown);
        if (rc != rows[i].status || !strstr(nb_last_error(), rows[i].words))
            fail_msg("%s = %s: status %d, %s", rows[i].name, shown, (int)rc, nb_last_error());
        if (!strstr(nb_last_error(), "t.json'"))
            fail_msg("%s = %s: the file is not named: %s", rows[i].name, shown, nb_last_error());
        assert_null(t);
    }
}

#define NOT_DONE NB_EUNSUPPORTED
#define BROKEN   NB_EFORMAT

static void test_vocab__errors_name_what_is_unsupported(void **state)
{
    (void)state;
    static const struct refusal rows[] = {
        {"type", "\"WordPiece\"", "model 'WordPiece' is not supported", NOT_DONE},
        {"type", "\"Unigram\"", "model 'Unigram' is not supported", NOT_DONE},
        {"type", "\"WordLevel\"", "model 'WordLevel' is not supported", NOT_DONE},
        {"type", "\"a\\nb\\u001b[2J\"", "model 'a?b?[2J' is not supported", NOT_DONE},
        {"normalizer", "{\"type\": \"Lowercase\"}", "normalizer 'Lowercase'", NOT_DONE},
        {"normalizer", "{\"type\": \"NFKC\"}", "normalizer 'NFKC' is not supported", NOT_DONE},
        {"normalizer",
         "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}, {\"type\": \"Strip\"}]}",
         "normalizer 'Strip'", NOT_DONE},
        {"normalizer", "{}", "there is no normalizer", NOT_DONE},
        {"pre_tokenizer", "{\"type\": \"Metaspace\"}", "pre-tokenizer 'Metaspace'", NOT_DONE},
        {"pre_tokenizer", PRE("{\"type\": \"Whitespace\"}, " BYTE_LEVEL),
         "pre-tokenizer 'Whitespace'", NOT_DONE},
        {"pre_tokenizer", PRE("{\"type\": \"Punctuation\"}, " BYTE_LEVEL),
         "pre-tokenizer 'Punctuation'", NOT_DONE},
        {"pre_tokenizer", "null", "there is no pre-tokenizer", NOT_DONE},
        {"pre_tokenizer", NULL, "there is no pre-tokenizer", NOT_DONE},
        {"pre_tokenizer", PRE(""), "not a byte-level", NOT_DONE},
        {"pre_tokenizer", SPLIT(REGEX, "Isolated"), "not a byte-level", NOT_DONE},
        {"pre_tokenizer", PRE(BYTE_LEVEL ", " SPLIT(REGEX, "Isolated")), "after ByteLevel",
         NOT_DONE},
        {"pre_tokenizer",
         PRE(SPLIT(REGEX, "Isolated") ", {\"type\": \"ByteLevel\", \"add_prefix_space\": true}"),
         "add_prefix_space after another pre-tokenizer", NOT_DONE},
        {"pre_tokenizer", PRE(SPLIT(REGEX, "MergedWithPrevious") "," BYTE_LEVEL),
         "behavior of a Split pre-tokenizer 'MergedWithPrevious' is not supported", NOT_DONE},
        {"pre_tokenizer", PRE(SPLIT(REGEX, "MergedWithNext") "," BYTE_LEVEL),
         "'MergedWithNext' is not supported", NOT_DONE},
        {"pre_tokenizer", PRE(SPLIT(REGEX, "Contiguous") "," BYTE_LEVEL), "'Contiguous'", NOT_DONE},
        {"pre_tokenizer", PRE(SPLIT("{\"Regex\": \"\\\\bx\"}", "Isolated") "," BYTE_LEVEL),
         "'\\b' in a split pattern", NOT_DONE},
        {"pre_tokenizer", PRE(SPLIT("{\"Regex\": \"(\"}", "Isolated") "," BYTE_LEVEL),
         "the split pattern: ", NOT_DONE},
        {"decoder", "{\"type\": \"WordPiece\"}", "decoder 'WordPiece' is not supported", NOT_DONE},
        {"decoder", "{\"type\": \"Sequence\", \"decoders\": [{\"type\": \"Fuse\"}]}",
         "decoder 'Fuse'", NOT_DONE},
        {"decoder", "null", "there is no decoder", NOT_DONE},
        {"dropout", "0.1", "'dropout' is not supported", NOT_DONE},
        {"end_of_word_suffix", "\"</w>\"", "'end_of_word_suffix' is not supported", NOT_DONE},
        {"continuing_subword_prefix", "\"##\"", "'continuing_subword_prefix' is not", NOT_DONE},
        {"unk_token", "\"a\"", "'unk_token' or 'byte_fallback'", NOT_DONE},
        {"byte_fallback", "true", "'unk_token' or 'byte_fallback'", NOT_DONE},
    };
    check_refusals(rows, sizeof rows / sizeof *rows);
}

static void test_vocab__rejects_malformed_files(void **state)
{
    (void)state;
    static const struct refusal rows[] = {
        {"model", NULL, "'model' is missing", BROKEN},
        {"model", "[]", "'model' is not an object", BROKEN},
        {"model", "null", "'model' is not an object", BROKEN},
        {"model", "{}", "'vocab' or 'merges' is missing", BROKEN},
        {"vocab", NULL, "'vocab' or 'merges' is missing", BROKEN},
        {"merges", NULL, "'vocab' or 'merges' is missing", BROKEN},
        {"vocab", "[]", "is not one list", BROKEN},
        {"vocab", "null", "is not one list", BROKEN},
        {"merges", "{}", "is not one list", BROKEN},
        {"merges", "\"a b\"", "is not one list", BROKEN},
        {"merges", "[], \"merges\": []", "is not one list", BROKEN},
        {"vocab", "{}, \"vocab\": {}", "is not one list", BROKEN},
        {"vocab", "{\"a\": -1}", "the id of token 'a' is out of range", BROKEN},
        {"vocab", "{\"a\": 4194304}", "the id of token 'a' is out of range", BROKEN},
        {"vocab", "{\"a\": 1.0}", "the id of token 'a' is out of range", BROKEN},
        {"vocab", "{\"a\": \"1\"}", "the id of token 'a' is out of range", BROKEN},
        {"vocab", "{\"a\": 18446744073709551616}", "is out of range", BROKEN},
        {"vocab", "{\"a\\u0007\": null}", "the id of token 'a?' is out of range", BROKEN},
        {"vocab", "{\"a\": 0, \"b\": 0}", "token id 0 has two texts", BROKEN},
        {"vocab", "{\"\": 0}", "a token is empty", BROKEN},
        {"vocab", "{\"a\\u0000b\": 0}", "NUL", BROKEN},
        {"vocab", "{\"a\": 0, \"b\": 1, \"ab\": 2, \"aab\": 4, \"a\": 3}",
         "tokens 0 and 3 have the same text", BROKEN},
        {"vocab", "{\"a\": 0, \"b\": 1, \"ab\": 2}", "merge 1 has a part, or a result", BROKEN},
        {"vocab", "{\"a\": 0, \"ab\": 2, \"aab\": 4}", "merge 0 has a part, or a result", BROKEN},
        {"merges", "[[\"a\", \"zz\"]]", "merge 0 has a part", BROKEN},
        {"merges", "[[\"b\", \"a\"]]", "merge 0 has a part, or a result", BROKEN},
        {"merges", "[[\"a\", \"b\"], [\"a\"]]", "merge 1 is not a pair", BROKEN},
        {"merges", "[[\"a\", \"b\", \"c\"]]", "merge 0 is not a pair", BROKEN},
        {"merges", "[[\"a\", 1]]", "merge 0 is not a pair", BROKEN},
        {"merges", "[{\"a\": \"b\"}]", "merge 0 is not a pair", BROKEN},
        {"merges", "[\"ab\"]", "merge 0 is not a pair", BROKEN},
        {"merges", "[\"a b c\"]", "merge 0 is not a pair", BROKEN},
        {"merges", "[\" b\"]", "merge 0 is not a pair", BROKEN},
        {"merges", "[\"a \"]", "merge 0 is not a pair", BROKEN},
        {"merges", "[[\"a b\", \"c\"]]", "merge 0 is not a pair", BROKEN},
        {"merges", "[[\"\", \"b\"]]", "merge 0 is not a pair", BROKEN},
        {"merges", "[\"\"]", "a merge is empty", BROKEN},
        {"merges", "[5]", "a merge is empty", BROKEN},
        {"merges", "[[]]", "a merge is empty", BROKEN},
        {"merges", "[\"a\\u0000 b\"]", "NUL", BROKEN},
        {"added_tokens", "[" ADDED("-1", "<y>", "") "]", "the id of an added token", BROKEN},
        {"added_tokens", "[" ADDED("4194304", "<y>", "") "]", "the id of an added token", BROKEN},
        {"added_tokens", "[" ADDED("5", "", "") "]", "added token 5 is empty", BROKEN},
        {"added_tokens", "[" ADDED("5", "a\\u0000", "") "]", "not a plain string", BROKEN},
        {"added_tokens", "[{\"id\": 5}]", "an added token is not a plain string", BROKEN},
        {"added_tokens", "[1]", "the id of an added token", BROKEN},
        {"added_tokens", "[" ADDED("1", "<y>", "") "]", "token id 1 has two texts", BROKEN},
        {"added_tokens", "[" ADDED("5", "<y>", "") "," ADDED("5", "<z>", "") "]",
         "token id 5 has two texts", BROKEN},
        {"pre_tokenizer", PRE(SPLIT("{}", "Isolated") "," BYTE_LEVEL), "a split pattern is not",
         BROKEN},
        {"pre_tokenizer", PRE(SPLIT("{\"Regex\": 1}", "Isolated") "," BYTE_LEVEL),
         "a split pattern is not", BROKEN},
        {"pre_tokenizer", PRE(SPLIT("{\"Regex\": \"a\\u0000\"}", "Isolated") "," BYTE_LEVEL),
         "a split pattern is not", BROKEN},
        {"version", "\"1.0\", x", "invalid JSON at byte", BROKEN},
    };
    check_refusals(rows, sizeof rows / sizeof *rows);
}

static void test_vocab__rejects_unusable_files(void **state)
{
    (void)state;
    struct nbi_vocab v;
    struct nbi_str s = {0};
    assert_fails(nbi_vocab_read_json(&v, test_path("none.json")), NB_ENOTFOUND, "none.json");
    put("t.json", "[]");
    assert_fails(nbi_vocab_read_json(&v, test_path("t.json")), NB_EFORMAT, "'model' is missing");
    put("t.json", "");
    assert_fails(nbi_vocab_read_json(&v, test_path("t.json")), NB_EFORMAT, "invalid JSON");
    for (int i = 0; i <= NBI_SPLIT_STAGES; i++)
        nbi_str_puts(&s, SPLIT(REGEX, "Isolated") ", ");
    nbi_str_puts(&s, BYTE_LEVEL);
    struct nbi_str pre = {0};
    nbi_str_printf(&pre, "{\"type\": \"Sequence\", \"pretokenizers\": [%s]}", nbi_str_text(&s));
    put_tokenizer("pre_tokenizer", nbi_str_text(&pre));
    assert_fails(nbi_vocab_read_json(&v, test_path("t.json")), NB_EUNSUPPORTED,
                 "more than 8 pre-tokenizers in a row");
    nbi_str_release(&s);
    nbi_str_release(&pre);
    /* Two models: an error, or one of them wins; they must not be mixed. */
    put_tokenizer("version", "0, \"model\": {\"vocab\": {}, \"merges\": []}");
    if (nbi_vocab_read_json(&v, test_path("t.json")) == NB_OK) {
        assert_int_equal(v.merge_count, v.tokens[0].text ? 2 : 0);
        nbi_vocab_release(&v);
    }
}

static void count_warnings(void *ctx, enum nb_log_level level, const char *line)
{
    if (level == NB_LOG_WARN && strstr(line, "'truncation' and 'padding' are not applied"))
        ++*(int *)ctx;
}

static void test_vocab__warns_of_truncation(void **state)
{
    (void)state;
    struct nbi_vocab v;
    int warnings = 0;
    nb_log_set_sink(count_warnings, &warnings);
    put_tokenizer("truncation", "{\"max_length\": 5}");
    assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
    nbi_vocab_release(&v);
    put_tokenizer("padding", "{}");
    assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
    nbi_vocab_release(&v);
    put_tokenizer("", NULL);
    assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
    nbi_vocab_release(&v);
    nb_log_set_sink(NULL, NULL);
    assert_int_equal(warnings, 2);
}

/* ---- agreement with the tokenizers library ---- */

static void assert_ids(const char *text, const int32_t *wanted, size_t n)
{
    struct nb_tokenizer *t;
    int32_t *ids;
    size_t count;
    assert_ok(nb_tokenizer_open(&t, test_path("t.json"), NULL));
    assert_ok(nb_tokenizer_encode(t, text, strlen(text), true, &ids, &count));
    assert_int_equal(count, n);
    assert_memory_equal(ids, wanted, n * sizeof *ids);
    free(ids);
    nb_tokenizer_close(t);
}

#define assert_encodes(text, ...)                                                                  \
    assert_ids(text, (const int32_t[]){__VA_ARGS__},                                               \
               sizeof(const int32_t[]){__VA_ARGS__} / sizeof(int32_t))

static void test_vocab__string_patterns_are_literal(void **state)
{
    (void)state;
    put_tokenizer("pre_tokenizer", PRE(SPLIT("{\"String\": \"a|b\"}", "Isolated") "," BYTE_LEVEL));
    assert_encodes("ab", 2); /* literal text, not a pattern */
    put_tokenizer("pre_tokenizer", PRE(SPLIT("{\"String\": \" \"}", "Removed") "," BYTE_LEVEL));
    assert_encodes("a b ab", 0, 1, 2);
    put_tokenizer("pre_tokenizer", PRE(SPLIT("{\"String\": \" \"}", "Isolated") "," BYTE_LEVEL));
    assert_encodes("a b ab", 0, 3, 1, 3, 2);
    put_tokenizer("pre_tokenizer",
                  PRE("{\"type\": \"Split\", \"pattern\": {\"Regex\": \"[^ ]+\"}, \"behavior\": "
                      "\"Removed\", \"invert\": true}," BYTE_LEVEL));
    assert_encodes("a b ab", 0, 1, 2);
}

static void test_vocab__ignore_merges_skips_merging(void **state)
{
    (void)state;
    put_tokenizer("merges", "[]");
    assert_encodes("aab", 0, 0, 1);
    put_tokenizer("ignore_merges", "true");
    assert_encodes("aab<x>ab", 4, 5, 2);
}

/* A token with a character outside the byte-level alphabet is not the text of any word. tokenizers
 * 0.23.3 gives [0, 3, 1]. */
static void test_vocab__ignore_merges_needs_byte_level_text(void **state)
{
    (void)state;
    put("t.json",
        "{\"model\": {\"type\": \"BPE\", \"ignore_merges\": true, \"merges\": [], "
        "\"vocab\": {\"a\": 0, \"b\": 1, \"a b\": 2, \"\\u0120\": 3}}, \"decoder\": " BYTE_LEVEL
        ", \"pre_tokenizer\": " BYTE_LEVEL "}");
    assert_encodes("a b", 0, 3, 1);
}

/* A repeated pair has the later rank. tokenizers 0.23.3 gives [0, 4] for "abc". */
static void test_vocab__repeated_merge_has_the_later_rank(void **state)
{
    (void)state;
    put("t.json",
        "{\"model\": {\"type\": \"BPE\", \"merges\": [\"a b\", \"b c\", \"a b\"], "
        "\"vocab\": {\"a\": 0, \"b\": 1, \"c\": 2, \"ab\": 3, \"bc\": 4}}, \"decoder\": " BYTE_LEVEL
        ", \"pre_tokenizer\": " BYTE_LEVEL "}");
    assert_encodes("abc", 0, 4);
}

/* ---- tokenizer_config.json ---- */

static void read_settings(struct nbi_vocab *v, const char *config)
{
    put("tokenizer_config.json", config);
    assert_ok(nbi_vocab_read_dir(v, test_dir));
}

static void test_vocab__reads_tokenizer_config(void **state)
{
    (void)state;
    struct nbi_vocab v;
    put_tokenizer("", NULL);
    assert_int_equal(rename(test_path("t.json"), test_path("tokenizer.json")), 0);
    read_settings(&v, "{\"chat_template\": \"one\", \"eos_token\": \"<x>\", \"pad_token\": "
                      "{\"content\": \"ab\"}, \"bos_token\": null, \"add_bos_token\": true}");
    assert_string_equal(v.chat_template, "one");
    assert_true(v.eos == 5 && v.pad == 2 && v.bos == -1 && v.add_bos);
    nbi_vocab_release(&v);
    read_settings(&v, "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"t\"}, "
                      "{\"name\": \"default\", \"template\": \"d\"}], \"eos_token\": \"<y>\"}");
    assert_string_equal(v.chat_template, "d");
    assert_true(v.eos == -1 && !v.add_bos);
    nbi_vocab_release(&v);
    read_settings(&v, "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"t\"}]}");
    assert_null(v.chat_template);
    nbi_vocab_release(&v);
    put("chat_template.jinja", "from a file");
    read_settings(&v, "{\"chat_template\": \"one\"}");
    assert_string_equal(v.chat_template, "from a file");
    nbi_vocab_release(&v);
    assert_ok(nbi_file_write(test_path("chat_template.jinja"), "a\0b", 3));
    assert_fails(nbi_vocab_read_dir(&v, test_dir), NB_EFORMAT, "is not text");
    put("chat_template.jinja", "\xFF");
    assert_fails(nbi_vocab_read_dir(&v, test_dir), NB_EFORMAT, "is not text");
    remove(test_path("chat_template.jinja"));
    put("tokenizer_config.json", "{");
    assert_fails(nbi_vocab_read_dir(&v, test_dir), NB_EFORMAT, "tokenizer_config.json");
    remove(test_path("tokenizer_config.json"));
    assert_ok(nbi_vocab_read_dir(&v, test_dir));
    assert_null(v.chat_template);
    nbi_vocab_release(&v);
    remove(test_path("tokenizer.json"));
    assert_fails(nbi_vocab_read_dir(&v, test_dir), NB_ENOTFOUND, "tokenizer.json");
}

/* ---- the byte-level alphabet ---- */

static void test_vocab__byte_alphabet_is_a_bijection(void **state)
{
    (void)state;
    static const struct {
        uint8_t byte;
        uint32_t character;
    } known[] = {{'!', '!'},    {'~', '~'},    {' ', 0x120}, {'\n', 0x10A}, {0, 0x100},
                 {0x7F, 0x121}, {0xA0, 0x142}, {0xA1, 0xA1}, {0xAC, 0xAC},  {0xAD, 0x143},
                 {0xAE, 0xAE},  {0xFF, 0xFF},  {0x80, 0x122}};
    uint8_t seen[0x144] = {0};
    for (int b = 0; b < 256; b++) {
        uint32_t c = nbi_byte_character((uint8_t)b);
        assert_true(c < 0x144 && !seen[c]);
        seen[c] = 1;
        assert_int_equal(nbi_byte_of(c), b);
    }
    for (uint32_t c = 0; c < 0x144; c++)
        assert_int_equal(nbi_byte_of(c) >= 0, seen[c]);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        assert_int_equal(nbi_byte_character(known[i].byte), known[i].character);
    assert_int_equal(nbi_byte_of(0x144), -1);
    assert_int_equal(nbi_byte_of(0x10FFFF), -1);
}

static void test_vocab__set_grows_and_rejects_conflicts(void **state)
{
    (void)state;
    struct nbi_vocab v;
    const struct nbi_token a = {"a", 1, NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL};
    const struct nbi_token b = {"b", 1, NBI_TOKEN_CONTROL, 0}, again = {"a", 1, NBI_TOKEN_USER, 0};
    nbi_vocab_init(&v);
    assert_true(nbi_vocab_is_qwen(&v));
    assert_fails(nbi_vocab_set(&v, -1, a), NB_EFORMAT, "out of range");
    assert_fails(nbi_vocab_set(&v, NBI_VOCAB_MAX, a), NB_EFORMAT, "out of range");
    assert_ok(nbi_vocab_set(&v, 1500, a));
    assert_fails(nbi_vocab_set(&v, 1500, b), NB_EFORMAT, "token id 1500 has two texts");
    assert_ok(nbi_vocab_set(&v, 1500, again));
    assert_int_equal(v.tokens[1500].type, NBI_TOKEN_USER);
    assert_int_equal(v.tokens[1500].flags, NBI_TOKEN_MODEL);
    nbi_vocab_finish(&v);
    assert_int_equal(v.count, 1501);
    static const char *const bad[] = {"", "a", " ", "a ", " a", "ab", "a b c", "a  b"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_fails(nbi_vocab_add_merge(&v, bad[i], strlen(bad[i])), NB_EFORMAT, "merge 0");
    assert_fails(nbi_vocab_add_merge(&v, "a\0 b", 4), NB_EFORMAT, "merge 0");
    for (int i = 0; i < 1000; i++)
        assert_ok(nbi_vocab_add_merge(&v, "a b", 3));
    assert_int_equal(v.merge_count, 1000);
    nbi_vocab_release(&v);
    assert_true(v.count == 0 && v.merge_count == 0);
}

/* ---- writing ---- */

static void assert_same_vocab(const struct nbi_vocab *a, const struct nbi_vocab *b)
{
    assert_int_equal(a->count, b->count);
    for (int64_t i = 0; i < a->count; i++) {
        assert_int_equal(!a->tokens[i].text, !b->tokens[i].text);
        if (!a->tokens[i].text)
            continue;
        assert_string_equal(a->tokens[i].text, b->tokens[i].text);
        assert_int_equal(a->tokens[i].len, b->tokens[i].len);
        assert_int_equal(a->tokens[i].type, b->tokens[i].type);
    }
    assert_int_equal(a->merge_count, b->merge_count);
    for (int64_t i = 0; i < a->merge_count; i++)
        assert_string_equal(a->merges[i], b->merges[i]);
    assert_int_equal(a->nfc, b->nfc);
    assert_int_equal(nbi_vocab_is_qwen(a), nbi_vocab_is_qwen(b));
    assert_true(a->bos == b->bos && a->eos == b->eos && a->pad == b->pad);
    assert_int_equal(a->add_bos, b->add_bos);
    assert_int_equal(!a->chat_template, !b->chat_template);
    if (a->chat_template)
        assert_string_equal(a->chat_template, b->chat_template);
}

static void read_golden(struct nbi_vocab *v)
{
    assert_ok(nbi_vocab_read_json(v, GOLDEN "qwen/tokenizer.json"));
    assert_true(nbi_vocab_is_qwen(v));
    v->eos = 602;
    v->pad = 600;
    v->add_bos = true;
    v->chat_template = "{{ \"\\n\xC3\xA9\" }}";
}

static void test_vocab__written_directory_reads_back(void **state)
{
    (void)state;
    struct nbi_vocab v, back;
    read_golden(&v);
    assert_ok(nbi_vocab_write_dir(&v, test_dir));
    assert_ok(nbi_vocab_read_dir(&back, test_dir));
    assert_same_vocab(&v, &back);
    for (int64_t i = 0; i < v.count; i++)
        assert_int_equal(v.tokens[i].flags, back.tokens[i].flags);
    nbi_vocab_release(&back);
    /* Writing it again gives the same bytes. */
    char *first, *second;
    size_t len, len2;
    assert_ok(nbi_file_read(test_path("tokenizer.json"), 1 << 20, &first, &len));
    assert_ok(nbi_vocab_write_json(&v, test_path("again.json")));
    assert_ok(nbi_file_read(test_path("again.json"), 1 << 20, &second, &len2));
    assert_int_equal(len, len2);
    assert_memory_equal(first, second, len);
    free(first);
    free(second);
    nbi_vocab_release(&v);
}

static void test_vocab__write_rejects_duplicate_text(void **state)
{
    (void)state;
    struct nbi_vocab v;
    nbi_vocab_init(&v);
    for (int i = 0; i < 2; i++)
        assert_ok(
            nbi_vocab_set(&v, i, (struct nbi_token){"a", 1, NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL}));
    nbi_vocab_finish(&v);
    assert_fails(nbi_vocab_write_json(&v, test_path("x.json")), NB_EFORMAT, "the same text");
    nbi_vocab_release(&v);
}

static void write_gguf(const struct nbi_vocab *v, int64_t size)
{
    struct nbi_gguf_meta *meta;
    struct nbi_writer *w;
    const struct nbi_tensor_spec tensor = {
        .name = "model.norm.weight", .dtype = NBI_F32, .ndim = 1, .shape = {4}};
    const float values[4] = {1, 2, 3, 4};
    assert_ok(nbi_gguf_meta_new(&meta));
    nbi_gguf_meta_string(meta, "general.architecture", "qwen3");
    assert_ok(nbi_vocab_write_gguf(v, meta, size));
    nbi_vocab_write_ids(v, meta);
    const struct nbi_writer_opts opts = {
        .format = NBI_FORMAT_GGUF, .path = test_path("t.gguf"), .meta = meta};
    assert_ok(nbi_writer_begin(&w, &opts, &tensor, 1));
    assert_ok(nbi_writer_put(w, 0, 0, 4, values));
    assert_ok(nbi_writer_commit(w));
    nbi_gguf_meta_free(meta);
}

/* Both tokenizers give the same ids for the texts of the golden cases. */
static void compare_tokenizers(struct nb_tokenizer *a, struct nb_tokenizer *b)
{
    char *file;
    size_t size;
    assert_ok(nbi_file_read(GOLDEN "qwen/cases.jsonl", 1 << 20, &file, &size));
    for (char *line = file, *end; *line; line = end + 1) {
        struct nbi_jspan row;
        struct nbi_str text = {0};
        int32_t *x, *y;
        size_t n, m;
        end = strchr(line, '\n');
        assert_ok(nbi_jscan(&row, line, (size_t)(end - line)));
        nbi_jstring(nbi_jget(row, "text"), &text);
        for (int special = 0; special < 2; special++) {
            assert_ok(nb_tokenizer_encode(a, nbi_str_text(&text), text.len, special, &x, &n));
            assert_ok(nb_tokenizer_encode(b, nbi_str_text(&text), text.len, special, &y, &m));
            assert_int_equal(n, m);
            assert_memory_equal(x, y, n * sizeof *x);
            free(x);
            free(y);
        }
        nbi_str_release(&text);
    }
    free(file);
}

/* GGUF has no flags for added tokens. Tokens with flags become ordinary ones, or are removed if
 * merges cannot produce them. */
static void drop_flags(struct nbi_vocab *v)
{
    for (int64_t i = 0; i < v->count; i++) {
        struct nbi_token *t = &v->tokens[i];
        if (t->flags & NBI_TOKEN_MODEL)
            *t = (struct nbi_token){t->text, t->len, NBI_TOKEN_NORMAL, NBI_TOKEN_MODEL};
        else if (t->flags)
            *t = (struct nbi_token){0};
    }
    nbi_vocab_finish(v);
}

static void test_vocab__gguf_reads_back(void **state)
{
    (void)state;
    struct nbi_vocab v, back;
    struct nbi_store *store;
    struct nb_tokenizer *a, *b;
    read_golden(&v);
    drop_flags(&v);
    write_gguf(&v, 700);
    assert_ok(nbi_store_open(&store, test_path("t.gguf")));
    assert_ok(nbi_vocab_read_gguf(&back, store));
    nbi_store_close(store);
    assert_same_vocab(&v, &back);
    assert_ok(nbi_tokenizer_new(&a, &v));
    assert_ok(nb_tokenizer_open(&b, test_path("t.gguf"), NULL));
    compare_tokenizers(a, b);
    nb_tokenizer_close(a);
    nb_tokenizer_close(b);
    nbi_vocab_release(&v);
    nbi_vocab_release(&back);
}

static void test_vocab__gguf_requires_qwen_rules(void **state)
{
    (void)state;
    struct nbi_vocab v;
    struct nbi_gguf_meta *meta;
    assert_ok(nbi_gguf_meta_new(&meta));
    put_tokenizer("", NULL);
    assert_ok(nbi_vocab_read_json(&v, test_path("t.json")));
    assert_fails(nbi_vocab_write_gguf(&v, meta, 6), NB_EUNSUPPORTED, "as Qwen's do");
    nbi_vocab_release(&v);
    nbi_gguf_meta_free(meta);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vocab__reads_tokenizer_json),
        cmocka_unit_test(test_vocab__reads_both_forms_of_merges),
        cmocka_unit_test(test_vocab__member_order_does_not_matter),
        cmocka_unit_test(test_vocab__reads_flags_of_added_tokens),
        cmocka_unit_test(test_vocab__accepts_harmless_variants),
        cmocka_unit_test(test_vocab__errors_name_what_is_unsupported),
        cmocka_unit_test(test_vocab__rejects_malformed_files),
        cmocka_unit_test(test_vocab__rejects_unusable_files),
        cmocka_unit_test(test_vocab__warns_of_truncation),
        cmocka_unit_test(test_vocab__string_patterns_are_literal),
        cmocka_unit_test(test_vocab__ignore_merges_skips_merging),
        cmocka_unit_test(test_vocab__ignore_merges_needs_byte_level_text),
        cmocka_unit_test(test_vocab__repeated_merge_has_the_later_rank),
        cmocka_unit_test(test_vocab__reads_tokenizer_config),
        cmocka_unit_test(test_vocab__byte_alphabet_is_a_bijection),
        cmocka_unit_test(test_vocab__set_grows_and_rejects_conflicts),
        cmocka_unit_test(test_vocab__written_directory_reads_back),
        cmocka_unit_test(test_vocab__write_rejects_duplicate_text),
        cmocka_unit_test(test_vocab__gguf_reads_back),
        cmocka_unit_test(test_vocab__gguf_requires_qwen_rules),
    };
    return cmocka_run_group_tests_name("vocab", tests, make_test_dir, remove_test_dir);
}
