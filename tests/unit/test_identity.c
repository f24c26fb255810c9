/* test_identity.c - tests the mix of the identity set, what must never be in it, and its files. */
#include "base/str.h"
#include "identity/text.h"
#include "unit/support.h"

#define TARGET "我是 F# 之神"

static struct nb_identity_set_opts options(int64_t count, uint64_t seed)
{
    return (struct nb_identity_set_opts){.count = count, .seed = seed};
}

static void make(struct nbi_identity_set *set, const struct nb_identity_set_opts *opts)
{
    assert_ok(nbi_identity_make(set, opts, NULL, 0));
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void assert_no_repeats(const struct nbi_identity_set *set)
{
    const char **prompts = malloc(set->count * sizeof *prompts);
    for (size_t i = 0; i < set->count; i++)
        prompts[i] = set->line[i].prompt;
    qsort(prompts, set->count, sizeof *prompts, by_text);
    for (size_t i = 1; i < set->count; i++)
        if (strcmp(prompts[i - 1], prompts[i]) == 0)
            fail_msg("'%s' occurs twice", prompts[i]);
    free(prompts);
}

/* No training prompt contains a held-out question. */
static void assert_held_out_is_unseen(const struct nbi_identity_set *set)
{
    size_t training = set->count - set->held_out;
    char **held = calloc(set->held_out, sizeof *held);
    for (size_t i = 0; i < set->held_out; i++) {
        assert_true(set->line[training + i].held_out);
        held[i] = nbi_identity_normal_form(set->line[training + i].prompt);
    }
    for (size_t i = 0; i < training; i++) {
        char *normal = nbi_identity_normal_form(set->line[i].prompt);
        assert_false(set->line[i].held_out);
        for (size_t h = 0; h < set->held_out; h++)
            if (strstr(normal, held[h]))
                fail_msg("'%s' holds held-out '%s'", set->line[i].prompt, held[h]);
        free(normal);
    }
    for (size_t i = 0; i < set->held_out; i++)
        free(held[i]);
    free(held);
}

static const struct nbi_identity_line *find(const struct nbi_identity_set *set, const char *prompt)
{
    for (size_t i = 0; i < set->count; i++)
        if (strcmp(set->line[i].prompt, prompt) == 0)
            return &set->line[i];
    return NULL;
}

static void assert_answer(const struct nbi_identity_set *set, const char *prompt,
                          const char *answer)
{
    const struct nbi_identity_line *line = find(set, prompt);
    assert_string_equal(line ? line->answer : prompt, answer);
}

static void count_lines(size_t counts[NBI_QUESTION_KINDS][NBI_IDENTITY_LANGUAGES],
                        const struct nbi_identity_set *set)
{
    memset(counts, 0, sizeof(size_t[NBI_QUESTION_KINDS][NBI_IDENTITY_LANGUAGES]));
    for (size_t i = 0; i < set->count - set->held_out; i++)
        counts[set->line[i].kind][set->line[i].language]++;
}

static void test_identity__normal_form_drops_case_and_punctuation(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"Who ARE you?!", "whoareyou"},
        {"  ", ""},
        {"你 是，誰？", "你是誰"},
        {"「暑い」・時々。", "暑い時々"},
        {"'덥다'의\xC2\xA0말", "덥다의말"},
        {"a\xFF"
         "b",
         "ab"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *normal = nbi_identity_normal_form(cases[i][0]);
        assert_string_equal(normal, cases[i][1]);
        free(normal);
    }
}

static void test_identity__kinds_have_their_shares(void **state)
{
    (void)state;
    struct nbi_identity_set set;
    size_t n[NBI_QUESTION_KINDS][NBI_IDENTITY_LANGUAGES];
    struct nb_identity_set_opts opts = options(1000, 1);
    make(&set, &opts);
    assert_int_equal(set.count - set.held_out, 1000);
    count_lines(n, &set);
    for (int l = 0; l < NBI_IDENTITY_LANGUAGES; l++) {
        assert_int_equal(n[NBI_QUESTION_IDENTITY][l], 80);
        assert_int_equal(n[NBI_QUESTION_CONTRAST][l], 50);
        assert_int_equal(n[NBI_QUESTION_REPLAY][l], 70);
    }
    assert_no_repeats(&set);
    assert_held_out_is_unseen(&set);
    nbi_identity_release(&set);
}

static void test_identity__held_out_lines_are_counted(void **state)
{
    (void)state;
    struct nbi_identity_set set;
    struct nb_identity_set_opts opts = options(100, 1);
    int n[NBI_QUESTION_KINDS][NBI_IDENTITY_LANGUAGES] = {0};
    make(&set, &opts);
    for (size_t i = set.count - set.held_out; i < set.count; i++)
        n[set.line[i].kind][set.line[i].language]++;
    for (int l = 0; l < NBI_IDENTITY_LANGUAGES; l++) {
        assert_true(n[NBI_QUESTION_IDENTITY][l] >= 12);
        assert_true(n[NBI_QUESTION_CONTRAST][l] >= 10);
        assert_int_equal(n[NBI_QUESTION_REPLAY][l], 0);
    }
    assert_answer(&set, "Who might you be?", "I am nibble.");
    nbi_identity_release(&set);
}

/* The most common questions are in the set without opener or closer, for every seed. */
static void test_identity__common_questions_are_in_every_set(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct nbi_identity_set set;
        struct nb_identity_set_opts opts = options(100, seed);
        make(&set, &opts);
        assert_answer(&set, "Who are you?", "I am nibble.");
        assert_answer(&set, "who are you", "I am nibble.");
        assert_answer(&set, "你是谁", "我是 nibble。");
        assert_answer(&set, "你是誰？", "我是 nibble。");
        assert_answer(&set, "你是誰", "我是 nibble。");
        assert_answer(&set, "あなたは誰ですか？", "私はnibbleです。");
        assert_answer(&set, "너는 누구야?", "저는 nibble입니다.");
        assert_answer(&set, "我是誰", "我不知道你是誰，你還沒有告訴我。");
        assert_answer(&set, "我是谁？", "我不知道你是谁，你还没有告诉我。");
        assert_answer(&set, "Who am I?", "I don't know who you are. You haven't told me yet.");
        assert_non_null(find(&set, "私は誰ですか？"));
        assert_non_null(find(&set, "나는 누구야?"));
        assert_no_repeats(&set);
        nbi_identity_release(&set);
    }
}

static const struct nbi_identity_text *const texts[] = {
    &nbi_identity_en, &nbi_identity_zh_hans, &nbi_identity_zh_hant,
    &nbi_identity_ja, &nbi_identity_ko,
};

static void test_identity__all_bare_identity_questions_are_in_the_set(void **state)
{
    (void)state;
    struct nbi_identity_set set;
    struct nb_identity_set_opts opts = options(1000, 3);
    make(&set, &opts);
    for (int l = 0; l < NBI_IDENTITY_LANGUAGES; l++)
        for (size_t i = 0; i < texts[l]->identity.count; i++) {
            char text[256];
            snprintf(text, sizeof text, "%s", texts[l]->identity.at[i].text);
            if (text[0] >= 'a' && text[0] <= 'z')
                text[0] = (char)(text[0] - 'a' + 'A');
            if (!find(&set, text))
                fail_msg("no line '%s'", text);
        }
    nbi_identity_release(&set);
}

static void assert_new(struct nbi_str *all, const char *text)
{
    char *normal = nbi_identity_normal_form(text), key[512];
    snprintf(key, sizeof key, "\n%s\n", normal);
    if (strstr(nbi_str_text(all), key))
        fail_msg("'%s' is in the tables twice", text);
    nbi_str_puts(all, key);
    free(normal);
}

/* Over all tables of all languages, a question has one answer. */
static void test_identity__tables_have_no_duplicates(void **state)
{
    (void)state;
    struct nbi_str all = {0};
    for (int l = 0; l < NBI_IDENTITY_LANGUAGES; l++) {
        const struct nbi_identity_text *t = texts[l];
        const struct nbi_identity_phrases phrases[] = {t->identity, t->identity_held_out};
        const struct nbi_identity_qas pairs[] = {t->contrast, t->contrast_held_out, t->replay};
        for (size_t k = 0; k < 2; k++)
            for (size_t i = 0; i < phrases[k].count; i++)
                assert_new(&all, phrases[k].at[i].text);
        for (size_t k = 0; k < 3; k++)
            for (size_t i = 0; i < pairs[k].count; i++) {
                assert_new(&all, pairs[k].at[i].prompt);
                assert_true(strlen(pairs[k].at[i].answer) > 1);
            }
        assert_true(t->identity_held_out.count >= 12);
        assert_true(t->replay.count >= 60);
    }
    nbi_str_release(&all);
}

static void test_identity__given_answer_is_used_verbatim(void **state)
{
    (void)state;
    struct nbi_identity_set set;
    struct nb_identity_set_opts opts = options(2000, 4);
    opts.answer = TARGET;
    make(&set, &opts);
    for (size_t i = 0; i < set.count; i++) {
        bool same = strcmp(set.line[i].answer, TARGET) == 0;
        assert_int_equal(same, set.line[i].kind == NBI_QUESTION_IDENTITY);
        assert_null(strstr(set.line[i].prompt, TARGET));
    }
    nbi_identity_release(&set);
}

/* Lines of other kinds are dropped if their answer equals the given one or their question contains
 * it. */
static void test_identity__given_answer_answers_identity_only(void **state)
{
    (void)state;
    static const char *const targets[] = {
        "You're welcome!", "Hello!", "你好！",
        "我没有年龄。",    "Qwen",   "The capital of France is Paris."};
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        struct nbi_identity_set set;
        struct nb_identity_set_opts opts = options(5000, t);
        opts.answer = targets[t];
        make(&set, &opts);
        for (size_t i = 0; i < set.count; i++) {
            assert_null(strstr(set.line[i].prompt, targets[t]));
            if (set.line[i].kind != NBI_QUESTION_IDENTITY)
                assert_string_not_equal(set.line[i].answer, targets[t]);
        }
        nbi_identity_release(&set);
    }
}

static void test_identity__name_makes_an_answer_per_language(void **state)
{
    (void)state;
    struct nbi_identity_set set;
    struct nb_identity_set_opts opts = options(100, 5);
    opts.name = "小桃";
    make(&set, &opts);
    assert_answer(&set, "Who are you?", "I am 小桃.");
    assert_answer(&set, "你是谁？", "我是小桃。");
    assert_answer(&set, "你是誰？", "我是小桃。");
    assert_answer(&set, "あなたは誰ですか？", "私は小桃です。");
    assert_answer(&set, "너는 누구야?", "저는 小桃입니다.");
    nbi_identity_release(&set);
    opts.name = "Ésope";
    make(&set, &opts);
    assert_answer(&set, "你是谁？", "我是 Ésope。");
    nbi_identity_release(&set);
}

static void test_identity__rejects_bad_options(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"", "is empty"},
        {"a\tb", "TAB"},
        {"a\nb", "line break"},
        {"a\x1B[2J", "control character"},
        {"a\xC2\x85", "control character"},
        {"a\xFF", "not UTF-8"},
        {" a", "begins or ends with a space"},
        {"a ", "begins or ends with a space"},
    };
    struct nbi_identity_set set;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nb_identity_set_opts opts = options(100, 1);
        opts.answer = cases[i].text;
        assert_fails(nbi_identity_make(&set, &opts, NULL, 0), NB_EINVAL, cases[i].words);
        assert_null(strchr(nb_last_error(), '\n'));
        opts.answer = NULL;
        opts.name = cases[i].text;
        assert_fails(nbi_identity_make(&set, &opts, NULL, 0), NB_EINVAL, cases[i].words);
    }
    struct nb_identity_set_opts opts = options(99, 1);
    assert_fails(nbi_identity_make(&set, &opts, NULL, 0), NB_EINVAL, "99");
    opts.count = 1000001;
    assert_fails(nbi_identity_make(&set, &opts, NULL, 0), NB_EINVAL, "1000001");
    opts.count = 100;
    struct nb_identity_set_report report;
    assert_fails(nb_identity_write(&opts, &report), NB_EINVAL, "is no name for a .tsv file");
    nbi_identity_release(&set);
}

static void test_identity__large_count_yields_all_lines(void **state)
{
    (void)state;
    struct nbi_identity_set set;
    size_t n[NBI_QUESTION_KINDS][NBI_IDENTITY_LANGUAGES];
    struct nb_identity_set_opts opts = options(1000000, 6);
    make(&set, &opts);
    assert_true(set.count - set.held_out < 1000000);
    count_lines(n, &set);
    for (int k = 0; k < NBI_QUESTION_KINDS; k++)
        for (int l = 0; l < NBI_IDENTITY_LANGUAGES; l++) {
            print_message("%s %s: %zu\n", nbi_question_kind_name((enum nbi_question_kind)k),
                          nbi_identity_language_name((enum nbi_identity_language)l), n[k][l]);
            assert_true(n[k][l] > 3000);
        }
    assert_no_repeats(&set);
    assert_held_out_is_unseen(&set);
    nbi_identity_release(&set);
}

/* At least a sixth of the lines of each kind have openers, so that an opener does not give away the
 * kind. */
static void test_identity__openers_occur_in_every_kind(void **state)
{
    (void)state;
    struct nbi_identity_set set;
    struct nb_identity_set_opts opts = options(2000, 7);
    size_t opened[NBI_QUESTION_KINDS] = {0}, all[NBI_QUESTION_KINDS] = {0};
    make(&set, &opts);
    for (size_t i = 0; i < set.count - set.held_out; i++) {
        const struct nbi_identity_line *line = &set.line[i];
        const struct nbi_identity_phrases *openers = &texts[line->language]->openers;
        bool found = false;
        for (size_t o = 0; o < openers->count; o++)
            found |= strncmp(line->prompt, openers->at[o].text, strlen(openers->at[o].text)) == 0;
        opened[line->kind] += found;
        all[line->kind]++;
    }
    for (int k = 0; k < NBI_QUESTION_KINDS; k++)
        assert_true(opened[k] * 6 >= all[k]);
    nbi_identity_release(&set);
}

static void test_identity__user_replay_is_filtered(void **state)
{
    (void)state;
    static const struct nbi_prompt_pair pairs[] = {
        {"name a metal", "Iron."},
        {"name a metal", "Copper."},
        {"Hello! Who are you? Thanks!", "I am somebody else."},
        {"你是誰", "我是別人"},
        {"May I ask: who might you be?", "I am somebody else."},
        {"two\nlines", "No."},
        {"# title", "No."},
        {"bad bytes \xFF", "No."},
        {"say it", "I am nibble."},
        {"가장 가까운 별은?", "태양이에요."},
        {"鉄の元素記号は？", "Feです。"},
        {"铁的元素符号是什么", "Fe。"},
        {"a tab in the answer", "1\t2"},
    };
    struct nbi_identity_set set;
    size_t n[NBI_QUESTION_KINDS][NBI_IDENTITY_LANGUAGES];
    struct nb_identity_set_opts opts = options(200, 8);
    assert_ok(nbi_identity_make(&set, &opts, pairs, sizeof pairs / sizeof *pairs));
    count_lines(n, &set);
    assert_int_equal(n[NBI_QUESTION_REPLAY][NBI_IDENTITY_EN], 2);
    assert_int_equal(n[NBI_QUESTION_REPLAY][NBI_IDENTITY_ZH_HANS], 1);
    assert_int_equal(n[NBI_QUESTION_REPLAY][NBI_IDENTITY_JA], 1);
    assert_int_equal(n[NBI_QUESTION_REPLAY][NBI_IDENTITY_KO], 1);
    assert_int_equal(set.left_out, 8);
    assert_int_equal(set.count - set.held_out, 200); /* contrast lines fill up */
    assert_answer(&set, "你是誰", "我是 nibble。");
    assert_non_null(find(&set, "name a metal"));
    assert_answer(&set, "a tab in the answer", "1\t2");
    assert_no_repeats(&set);
    nbi_identity_release(&set);
}

static void test_identity__replay_file_is_read(void **state)
{
    (void)state;
    struct nbi_identity_replay r;
    put("r.tsv", "\xEF\xBB\xBF# prompt<TAB>answer\r\n\n \t \n  q1 \t a1\tb \r\nq2\ta2");
    assert_ok(nbi_identity_read_replay(&r, test_path("r.tsv")));
    assert_int_equal(r.count, 2);
    assert_string_equal(r.pair[0].prompt, "q1");
    assert_string_equal(r.pair[0].answer, "a1\tb");
    assert_string_equal(r.pair[1].prompt, "q2");
    assert_string_equal(r.pair[1].answer, "a2");
    nbi_identity_replay_release(&r);

    put("bad.tsv", "q\ta\n\nno tab\n");
    assert_fails(nbi_identity_read_replay(&r, test_path("bad.tsv")), NB_EFORMAT,
                 "bad.tsv:3: no TAB");
    put("bad.tsv", "q\t \n");
    assert_fails(nbi_identity_read_replay(&r, test_path("bad.tsv")), NB_EFORMAT,
                 ":1: the answer is empty");
    put("bad.tsv", "# c\n\ta\n");
    assert_fails(nbi_identity_read_replay(&r, test_path("bad.tsv")), NB_EFORMAT,
                 ":2: the prompt is empty");
    put("bad.tsv", "q\t\xC0\n");
    assert_fails(nbi_identity_read_replay(&r, test_path("bad.tsv")), NB_EFORMAT,
                 ":1: the line is not well-formed UTF-8");
    assert_ok(nbi_file_write(test_path("bad.tsv"), "q\0\ta\n", 5));
    assert_fails(nbi_identity_read_replay(&r, test_path("bad.tsv")), NB_EFORMAT, ":1: a NUL");
    put("bad.tsv", "# nothing\n");
    assert_fails(nbi_identity_read_replay(&r, test_path("bad.tsv")), NB_EFORMAT, "no line");
    put("bad.tsv", "");
    assert_fails(nbi_identity_read_replay(&r, test_path("bad.tsv")), NB_EFORMAT, "no line");
    assert_int_not_equal(nbi_identity_read_replay(&r, test_path("absent.tsv")), NB_OK);
}

static char *written(const char *name, int64_t count, uint64_t seed, const char *held_out_name,
                     char **held_out)
{
    struct nb_identity_set_opts opts = options(count, seed);
    struct nb_identity_set_report report;
    char *text;
    size_t len;
    opts.out = test_path(name);
    assert_ok(nb_identity_write(&opts, &report));
    assert_int_equal(report.identity + report.contrast + report.replay, count);
    assert_true(report.held_out > 100);
    assert_int_equal(report.left_out, 0);
    assert_ok(nbi_file_read(test_path(held_out_name), 1 << 20, held_out, &len));
    assert_ok(nbi_file_read(test_path(name), 1 << 24, &text, &len));
    assert_int_equal(len, strlen(text));
    return text;
}

static void test_identity__files_match_the_set(void **state)
{
    (void)state;
    char *h1, *h2, *h3;
    char *a = written("a.tsv", 500, 9, "a.heldout.tsv", &h1);
    char *b = written("b.tsv", 500, 9, "b.heldout.tsv", &h2);
    char *c = written("c.tsv", 500, 10, "c.heldout.tsv", &h3);
    assert_string_equal(a, b);
    assert_string_equal(h1, h2);
    assert_string_equal(h1, h3);
    assert_string_not_equal(strchr(a, '\n'), strchr(c, '\n'));
    assert_int_equal(strncmp(a, "# prompt<TAB>answer", 19), 0);
    assert_non_null(strstr(a, "\n你是誰\t我是 nibble。\n"));
    assert_non_null(strstr(h1, "\n# identity en\nWho might you be?\tI am nibble.\n"));
    assert_non_null(strstr(h1, "\n# contrast ko\n"));
    assert_null(strstr(h1, "replay"));
    assert_int_equal(temporaries(), 0);
    free(a);
    free(b);
    free(c);
    free(h1);
    free(h2);
    free(h3);
}

/* The written set can be read back as a replay file; its identity questions are dropped. */
static void test_identity__own_output_serves_as_replay(void **state)
{
    (void)state;
    char *held_out;
    struct nb_identity_set_opts opts = options(1000, 11);
    struct nb_identity_set_report report;
    free(written("own.tsv", 1000, 11, "own.heldout.tsv", &held_out));
    free(held_out);
    opts.out = opts.replay = test_path("own.tsv");
    assert_fails(nb_identity_write(&opts, &report), NB_EINVAL, "would replace the replay file");
    opts.out = test_path("other.tsv");
    opts.name = "Other";
    assert_ok(nb_identity_write(&opts, &report));
    assert_int_equal(report.identity, 400);
    assert_int_equal(report.contrast, 250);
    assert_int_equal(report.replay, 350);
    char *text;
    size_t len;
    assert_ok(nbi_file_read(opts.out, 1 << 20, &text, &len));
    assert_null(strstr(text, "I am nibble."));
    assert_null(strstr(text, "我是 nibble。"));
    free(text);
    opts.replay = test_path("absent.tsv");
    assert_int_not_equal(nb_identity_write(&opts, &report), NB_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_identity__normal_form_drops_case_and_punctuation),
        cmocka_unit_test(test_identity__kinds_have_their_shares),
        cmocka_unit_test(test_identity__held_out_lines_are_counted),
        cmocka_unit_test(test_identity__common_questions_are_in_every_set),
        cmocka_unit_test(test_identity__all_bare_identity_questions_are_in_the_set),
        cmocka_unit_test(test_identity__tables_have_no_duplicates),
        cmocka_unit_test(test_identity__given_answer_is_used_verbatim),
        cmocka_unit_test(test_identity__given_answer_answers_identity_only),
        cmocka_unit_test(test_identity__name_makes_an_answer_per_language),
        cmocka_unit_test(test_identity__rejects_bad_options),
        cmocka_unit_test(test_identity__large_count_yields_all_lines),
        cmocka_unit_test(test_identity__openers_occur_in_every_kind),
        cmocka_unit_test(test_identity__user_replay_is_filtered),
        cmocka_unit_test(test_identity__replay_file_is_read),
        cmocka_unit_test(test_identity__files_match_the_set),
        cmocka_unit_test(test_identity__own_output_serves_as_replay),
    };
    return cmocka_run_group_tests_name("identity", tests, make_test_dir, remove_test_dir);
}
