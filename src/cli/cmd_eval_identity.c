/* cmd_eval_identity.c - whether a model learnt who it is, and forgot nothing. */
#include "cli/cmd_eval_identity.h"

#include <math.h>
#include <string.h>

#include "base/str.h"
#include "base/utf8.h"
#include "cli/progress.h"
#include "cli/two_columns.h"

#define EXAMPLES 2 /* of a kind of questions */

/* ---- JSON ---- */

static json_t *count_json(const struct nb_identity_count *c)
{
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "asked", (json_int_t)c->asked, "identity",
                     (json_int_t)c->identity, "identity_before", (json_int_t)c->identity_before,
                     "same", (json_int_t)c->same, "kept", (json_int_t)c->kept, "ended",
                     (json_int_t)c->ended, "repeated", (json_int_t)c->repeated);
}

static json_t *row_json(const struct nb_identity_result *r, int64_t i)
{
    const struct nb_ab_row *row = &r->ab.rows[i];
    return json_pack("{s:s,s:s,s:s%,s:s%}", "kind", nb_identity_kind_name(r->kinds[i]), "prompt",
                     row->prompt.text, "before", row->answer[0].text, row->answer[0].len, "after",
                     row->answer[1].text, row->answer[1].len);
}

json_t *cli_identity_json(const struct nb_identity_result *r, bool *ok)
{
    json_t *kinds = json_object(), *languages = json_object(), *gates = json_array(),
           *rows = json_array();
    for (int i = 0; i < NB_IDENTITY_KINDS; i++)
        nbi_json_set(kinds, nb_identity_kind_name((enum nb_identity_kind)i),
                     count_json(&r->kind[i]), ok);
    for (int i = 0; i < NB_IDENTITY_LANGUAGES; i++)
        nbi_json_set(languages, r->language[i], count_json(&r->held_out[i]), ok);
    for (int i = 0; i < r->criteria_count; i++)
        nbi_json_append(gates,
                        json_pack("{s:s,s:o,s:f,s:b,s:b}", "gate", r->criteria[i].name, "value",
                                  cli_json_number(r->criteria[i].value), "limit",
                                  r->criteria[i].limit, "at_least", r->criteria[i].at_least,
                                  "passed", r->criteria[i].passed),
                        ok);
    for (int64_t i = 0; i < r->ab.count; i++)
        nbi_json_append(rows, row_json(r, i), ok);
    return json_pack("{s:b,s:o,s:o,s:o,s:o,s:o,s:o,s:o}", "passed", r->passed, "gates", gates,
                     "kinds", kinds, "held_out", languages, "ppl_before",
                     cli_json_number(r->ppl_before), "ppl_after", cli_json_number(r->ppl_after),
                     "kl", cli_json_number(r->kl), "rows", rows);
}

/* ---- text ---- */

static void print_share(int64_t part, int64_t of)
{
    if (of > 0)
        printf("  %7.1f %%", 100 * (double)part / (double)of);
    else
        printf("  %9s", "-");
}

static void print_count(const char *name, const struct nb_identity_count *c)
{
    printf("%-12s  %5lld", name, (long long)c->asked);
    print_share(c->identity_before, c->asked);
    print_share(c->identity, c->asked);
    print_share(c->same, c->asked);
    print_share(c->kept, c->asked);
    print_share(c->ended, c->asked);
    print_share(c->repeated, c->asked);
    putchar('\n');
}

static void print_answer(const char *what, const char *text, size_t len)
{
    char shown[160];
    nbi_printable_copy(shown, sizeof shown, text, len);
    printf("    %s %s\n", what, shown);
}

static void print_rows(const struct nb_identity_result *r)
{
    putchar('\n');
    for (int64_t i = 0; i < r->ab.count; i++) {
        const struct nb_ab_row *row = &r->ab.rows[i];
        printf("%s: %s\n", nb_identity_kind_name(r->kinds[i]), row->prompt.text);
        print_answer("before", row->answer[0].text, row->answer[0].len);
        if (!row->identical)
            print_answer("after ", row->answer[1].text, row->answer[1].len);
    }
}

void cli_print_identity_examples(const struct nb_identity_result *r)
{
    int width = cli_terminal_width(), shown[NB_IDENTITY_KINDS] = {0};
    cli_print_beside_names("before", "after", width);
    for (int64_t i = 0; i < r->ab.count; i++)
        if (shown[r->kinds[i]]++ < EXAMPLES)
            cli_print_beside(&r->ab.rows[i], width);
    putchar('\n');
}

void cli_print_identity(const struct nb_identity_result *r, bool verbose)
{
    char name[32];
    if (verbose)
        print_rows(r);
    printf("%-12s  %5s  %9s  %9s  %9s  %9s  %9s  %9s\n", "questions", "asked", "said so", "says so",
           "same", "kept", "ends", "repeats");
    for (int i = 0; i < NB_IDENTITY_KINDS; i++) {
        print_count(nb_identity_kind_name((enum nb_identity_kind)i), &r->kind[i]);
        for (int l = 0; l < NB_IDENTITY_LANGUAGES && i == NB_IDENTITY_HELD_OUT; l++) {
            if (r->held_out[l].asked == 0)
                continue;
            snprintf(name, sizeof name, "  %s", r->language[l]);
            print_count(name, &r->held_out[l]);
        }
    }
    if (isfinite(r->ppl_before))
        printf("perplexity of the text: %.4f before, %.4f after\n", r->ppl_before, r->ppl_after);
    if (isfinite(r->kl))
        printf("KL on ordinary answers: %.4f nats a token\n", r->kl);
    putchar('\n');
    for (int i = 0; i < r->criteria_count; i++)
        printf("%-6s  %-40s  %8.4f  (at %s %g)\n", r->criteria[i].passed ? "passed" : "FAILED",
               r->criteria[i].name, r->criteria[i].value,
               r->criteria[i].at_least ? "least" : "most", r->criteria[i].limit);
}

/* ---- running ---- */

static struct nb_engine_opts engine_of(const char *model, const char *device,
                                       const struct cli_run_opts *run,
                                       const struct cli_common *common)
{
    return (struct nb_engine_opts){.model = model,
                                   .model_dir = run->model_dir,
                                   .device = device,
                                   .simd = cli_simd(run->simd),
                                   .threads = (int)common->threads};
}

int cli_eval_identity(const struct cli_identity_opts *o, const struct cli_run_opts *run,
                      const struct cli_common *common)
{
    const char *missing = !run->model              ? "-m MODEL"
                          : !o->base               ? "--base MODEL"
                          : !o->target && !o->name ? "--target TEXT, or --name NAME,"
                                                   : NULL;
    if (missing) {
        fprintf(stderr, "nibble eval identity: %s is missing; see 'nibble help eval'\n", missing);
        return CLI_EXIT_USAGE;
    }
    struct cli_progress progress;
    struct nb_identity_result r;
    char device[NB_DEVICE_NAME];
    cli_device(device, common);
    const struct nb_identity_opts opts = {.model = engine_of(run->model, device, run, common),
                                          .base = engine_of(o->base, device, run, common),
                                          .one_at_a_time = o->one_at_a_time,
                                          .set = {.answer = o->target,
                                                  .name = o->name,
                                                  .replay = o->replay,
                                                  .languages = o->languages,
                                                  .count = o->count,
                                                  .seed = (uint64_t)o->seed},
                                          .questions = o->questions,
                                          .text = o->text,
                                          .max_tokens = o->max_tokens,
                                          .progress = cli_progress_update,
                                          .progress_ctx = &progress};
    cli_progress_begin(&progress, common->quiet ? NULL : stderr, "answers and scores",
                       CLI_UNIT_ITEMS);
    enum nb_status rc = nb_identity_eval(&opts, &r);
    cli_progress_end(&progress);
    if (rc != NB_OK)
        return cli_status(rc);
    int code = 0;
    if (common->json) {
        bool ok = true;
        json_t *all = cli_identity_json(&r, &ok);
        code = cli_print_json(all, ok);
    } else {
        cli_print_identity(&r, common->verbose);
    }
    if (code == 0 && !r.passed)
        code = CLI_EXIT_FAILED;
    nb_identity_result_release(&r);
    return code;
}
