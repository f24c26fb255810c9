/* cmd_eval_ab.c - the same prompts through two models: a table, JSON, a page. */
#include "cli/cmd_eval_ab.h"

#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/utf8.h"
#include "cli/two_columns.h"

/* ---- JSON ---- */

static json_t *score_json(const struct nb_ab_score *s)
{
    if (s->tokens == 0)
        return json_null();
    return json_pack("{s:f,s:o,s:I}", "nll", s->nll, "ppl", cli_json_number(exp(s->nll)), "tokens",
                     (json_int_t)s->tokens);
}

/* {"a": {"under_a": ..., "under_b": ...}, "b": ..., "expected": ...} */
static json_t *scores_json(const struct nb_ab_score score[2][NB_AB_TEXTS])
{
    static const char *const texts[] = {"a", "b", "expected"};
    bool ok = true;
    json_t *all = json_object();
    for (int t = 0; t < NB_AB_TEXTS; t++)
        nbi_json_set(all, texts[t],
                     json_pack("{s:o,s:o}", "under_a", score_json(&score[0][t]), "under_b",
                               score_json(&score[1][t])),
                     &ok);
    if (!ok) {
        json_decref(all);
        return NULL;
    }
    return all;
}

static json_t *answer_json(const struct nb_ab_answer *a, bool expected)
{
    return json_pack("{s:s%,s:I,s:s,s:o,s:o}", "text", a->text, a->len, "tokens",
                     (json_int_t)a->tokens, "finish_reason", cli_finish_reason(a->finish), "match",
                     expected ? json_boolean(a->match) : json_null(), "f1", cli_json_number(a->f1));
}

static json_t *row_json(const struct nb_ab_row *r)
{
    bool expected = r->prompt.expected != NULL;
    return json_pack("{s:o,s:s,s:s?,s:o,s:o,s:b,s:f,s:f,s:o,s:o}", "place",
                     cli_json_path(r->prompt.place), "prompt", r->prompt.text, "expected",
                     r->prompt.expected, "a", answer_json(&r->answer[0], expected), "b",
                     answer_json(&r->answer[1], expected), "identical", r->identical, "f1", r->f1,
                     "prefix", r->prefix, "kl", cli_json_number(r->kl), "scores",
                     scores_json(r->score));
}

static json_t *totals_json(const struct nb_ab_totals *t)
{
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:o,s:o,s:o,s:o}", "prompts",
                     (json_int_t)t->prompts, "expected", (json_int_t)t->expected, "identical",
                     (json_int_t)t->identical, "match_a", (json_int_t)t->match[0], "match_b",
                     (json_int_t)t->match[1], "f1", t->f1, "prefix", t->prefix, "expected_f1_a",
                     cli_json_number(t->expected_f1[0]), "expected_f1_b",
                     cli_json_number(t->expected_f1[1]), "kl", cli_json_number(t->kl), "scores",
                     scores_json(t->score));
}

static int print_json(const struct cli_ab_opts *o, const struct nb_ab_result *r)
{
    bool ok = true;
    json_t *rows = json_array();
    for (int64_t i = 0; i < r->count; i++)
        nbi_json_append(rows, row_json(&r->rows[i]), &ok);
    return cli_print_json(json_pack("{s:o,s:o,s:b,s:o,s:o}", "a", cli_json_path(o->a), "b",
                                    cli_json_path(o->b), "same_vocabulary", r->same_vocabulary,
                                    "rows", rows, "totals", totals_json(&r->totals)),
                          ok);
}

/* ---- text ---- */

#define PROMPT_WIDTH 24

static void print_ppl(const struct nb_ab_score *s)
{
    if (s->tokens > 0)
        printf("  %10.4g", exp(s->nll));
    else
        printf("  %10s", "-");
}

static void print_kl(double kl)
{
    if (isfinite(kl))
        printf("  %9.3g", kl);
    else
        printf("  %9s", "-");
}

/* Prints a prompt, shortened to its column. */
static void print_prompt(const char *prompt)
{
    char shown[PROMPT_WIDTH + 1];
    int width = 0;
    nbi_printable_copy(shown, sizeof shown, prompt, strlen(prompt));
    for (const char *p = shown; *p; p++)
        width += ((unsigned char)*p & 0xC0) != 0x80;
    printf("%s%*s", shown, PROMPT_WIDTH - width, "");
}

static void print_line(const struct nb_ab_row *r)
{
    print_prompt(r->prompt.text);
    printf("  %4s  %6.3f  %6.3f", r->identical ? "yes" : "no", r->f1, r->prefix);
    print_kl(r->kl);
    for (int t = 0; t < NB_AB_TEXTS; t++)
        for (int s = 0; s < 2; s++)
            print_ppl(&r->score[s][t]);
    putchar('\n');
}

static void print_totals(const struct nb_ab_totals *t)
{
    printf("\n%lld of %lld answers identical; F1 %.4f, common beginning %.4f\n",
           (long long)t->identical, (long long)t->prompts, t->f1, t->prefix);
    if (t->expected > 0)
        printf("expected answers: A gives %lld of %lld (F1 %.4f), B %lld (F1 %.4f)\n",
               (long long)t->match[0], (long long)t->expected, t->expected_f1[0],
               (long long)t->match[1], t->expected_f1[1]);
    static const char *const names[] = {"A's answers", "B's answers", "expected answers"};
    for (int k = 0; k < NB_AB_TEXTS; k++)
        if (t->score[0][k].tokens > 0 && t->score[1][k].tokens > 0)
            printf("perplexity of %s: %.6g under A, %.6g under B\n", names[k],
                   exp(t->score[0][k].nll), exp(t->score[1][k].nll));
    if (isfinite(t->kl))
        printf("KL(A || B) on A's answers: %.6g nats a token\n", t->kl);
}

static void print_text(const struct nb_ab_result *r)
{
    printf("%-*s  %4s  %6s  %6s  %9s  %22s  %22s  %22s\n%-*s  %4s  %6s  %6s  %9s", PROMPT_WIDTH, "",
           "", "", "", "", "ppl of A's answer", "ppl of B's answer", "ppl of the expected",
           PROMPT_WIDTH, "prompt", "same", "F1", "begin", "KL(A||B)");
    for (int t = 0; t < NB_AB_TEXTS; t++)
        printf("  %10s  %10s", "under A", "under B");
    putchar('\n');
    for (int64_t i = 0; i < r->count; i++)
        print_line(&r->rows[i]);
    print_totals(&r->totals);
}

static void print_answers(const struct cli_ab_opts *o, const struct nb_ab_result *r)
{
    int width = cli_terminal_width();
    cli_print_beside_names(o->a, o->b, width);
    for (int64_t i = 0; i < r->count; i++)
        cli_print_beside(&r->rows[i], width);
    print_totals(&r->totals);
}

/* ---- running ---- */

static int check(const struct cli_ab_opts *o, const struct cli_run_opts *run)
{
    const char *missing = !o->a         ? "-a MODEL"
                          : !o->b       ? "-b MODEL"
                          : !o->prompts ? "--prompts FILE"
                                        : NULL;
    if (missing)
        fprintf(stderr, "nibble eval ab: %s is missing; see 'nibble help eval'\n", missing);
    else if (run->model)
        fprintf(stderr, "nibble eval ab: give the models as -a MODEL and -b MODEL, not -m\n");
    else if (o->raw && (o->system || o->no_think))
        fprintf(stderr, "nibble eval ab: --%s has no effect with --raw\n",
                o->system ? "system" : "no-think");
    else
        return 0;
    return CLI_EXIT_USAGE;
}

/* Checks before a long run that the page can be written. */
static enum nb_status check_out(const char *path)
{
    if (!path)
        return NB_OK;
    if (nbi_path_is_dir(path))
        return nbi_fail(NB_EINVAL, "'%s' is a directory", path);
    char *dir = nbi_path_dir(path);
    if (!dir)
        return NB_ENOMEM;
    enum nb_status rc =
        nbi_path_is_dir(dir) ? NB_OK : nbi_fail(NB_ENOTFOUND, "there is no directory '%s'", dir);
    free(dir);
    return rc;
}

static enum nb_status compare(struct nb_ab_opts *ab, const struct cli_common *common,
                              struct nb_ab_result *result)
{
    struct cli_progress progress;
    cli_progress_begin(&progress, common->quiet ? NULL : stderr, "answers and scores",
                       CLI_UNIT_ITEMS);
    ab->progress = cli_progress_update;
    ab->progress_ctx = &progress;
    enum nb_status rc = nb_eval_ab(ab, result);
    cli_progress_end(&progress);
    return rc;
}

int cli_eval_ab(const struct cli_ab_opts *o, const struct cli_run_opts *run,
                const struct cli_common *common)
{
    struct nb_prompts *prompts = NULL;
    struct nb_ab_result result = {0};
    char device[NB_DEVICE_NAME];
    int code = check(o, run);
    if (code)
        return code;
    enum nb_status rc = check_out(o->out);
    if (rc == NB_OK)
        rc = nb_prompts_open(&prompts, o->prompts);
    struct nb_ab_opts ab = {.one_at_a_time = o->one_at_a_time,
                            .prompts = prompts,
                            .system = o->system,
                            .raw = o->raw,
                            .no_think = o->no_think,
                            .max_tokens = o->max_tokens,
                            .temperature = o->temp,
                            .seed = (uint64_t)o->seed};
    if (rc == NB_OK)
        cli_device(device, common);
    for (int s = 0; s < 2; s++)
        ab.model[s] = (struct nb_engine_opts){.model = s ? o->b : o->a,
                                              .model_dir = run->model_dir,
                                              .device = device,
                                              .simd = cli_simd(run->simd),
                                              .threads = (int)common->threads};
    if (rc == NB_OK)
        rc = compare(&ab, common, &result);
    if (rc == NB_OK && o->out)
        rc = nb_ab_write_html(&result, &ab, o->out);
    cli_in_place(rc == NB_OK ? o->out : NULL);
    if (rc != NB_OK)
        code = cli_status(rc);
    else if (common->json)
        code = print_json(o, &result);
    else if (o->answers)
        print_answers(o, &result);
    else
        print_text(&result);
    nb_ab_result_release(&result);
    nb_prompts_close(prompts);
    return code;
}
