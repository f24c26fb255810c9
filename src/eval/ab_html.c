/* ab_html.c - writes the result of nb_eval_ab as one HTML page. */
#include <math.h>

#include "base/file.h"
#include "base/html.h"
#include "nibble/eval.h"

static const char style[] =
    "body { max-width: 80rem; } h2 { overflow-wrap: anywhere; white-space: pre-wrap; }\n"
    "td.number, th.number { text-align: right; white-space: nowrap; }\n"
    "table.answers { table-layout: fixed; } .same { color: var(--soft); }\n"
    ".differs { color: var(--eval); font-weight: 600; }\n";

/* ---- numbers ---- */

static void put_number(struct nbi_str *out, double v, const char *missing)
{
    nbi_str_puts(out, "<td class=\"number\">");
    if (isfinite(v))
        nbi_str_printf(out, "%.4g", v);
    else
        nbi_str_puts(out, missing);
    nbi_str_puts(out, "</td>");
}

static void put_ppl(struct nbi_str *out, const struct nb_ab_score *s)
{
    put_number(out, s->tokens > 0 ? exp(s->nll) : NAN, "-");
}

/* A table of perplexities: a row per text, a column per model. */
static void put_scores(struct nbi_str *out, const struct nb_ab_score score[2][NB_AB_TEXTS])
{
    static const char *const names[] = {"answer of A", "answer of B", "expected answer"};
    nbi_str_puts(out, "<table class=\"scores\">\n<tr><th>perplexity</th><th class=\"number\">"
                      "under A</th><th class=\"number\">under B</th><th class=\"number\">tokens"
                      "</th></tr>\n");
    for (int t = 0; t < NB_AB_TEXTS; t++) {
        if (score[0][t].tokens == 0 && score[1][t].tokens == 0)
            continue;
        nbi_str_printf(out, "<tr><th>%s</th>", names[t]);
        put_ppl(out, &score[0][t]);
        put_ppl(out, &score[1][t]);
        nbi_str_printf(out, "<td class=\"number\">%lld</td></tr>\n",
                       (long long)(score[t == NB_AB_B][t].tokens));
    }
    nbi_str_puts(out, "</table>\n");
}

/* ---- summary and answers ---- */

static void put_share(struct nbi_str *out, const char *key, int64_t part, int64_t all)
{
    char text[64];
    snprintf(text, sizeof text, "%lld of %lld", (long long)part, (long long)all);
    nbi_html_row(out, key, text);
}

static void put_value(struct nbi_str *out, const char *key, double v)
{
    char text[64];
    snprintf(text, sizeof text, "%.4g", v);
    if (isfinite(v))
        nbi_html_row(out, key, text);
}

static void put_summary(struct nbi_str *out, const struct nb_ab_result *r,
                        const struct nb_ab_opts *o)
{
    const struct nb_ab_totals *t = &r->totals;
    nbi_str_puts(out, "<table id=\"summary\">\n");
    nbi_html_row(out, "model A", o->model[0].model);
    nbi_html_row(out, "model B", o->model[1].model);
    put_share(out, "identical answers", t->identical, t->prompts);
    put_value(out, "F1 of words between answers", t->f1);
    put_value(out, "share of the common beginning", t->prefix);
    put_value(out, "KL(A || B) on A's answers, nats a token", t->kl);
    if (t->expected > 0) {
        put_share(out, "A gives the expected answer", t->match[0], t->expected);
        put_share(out, "B gives the expected answer", t->match[1], t->expected);
        put_value(out, "F1 of A with the expected answer", t->expected_f1[0]);
        put_value(out, "F1 of B with the expected answer", t->expected_f1[1]);
    }
    nbi_str_puts(out, "</table>\n");
    put_scores(out, t->score);
}

static void put_answers(struct nbi_str *out, const struct nb_ab_row *row)
{
    nbi_str_puts(out, "<table class=\"answers\">\n<tr><th>A</th><th>B</th></tr>\n<tr>");
    for (int s = 0; s < 2; s++) {
        nbi_str_puts(out, "<td class=\"text\">");
        nbi_html_bytes(out, row->answer[s].text, row->answer[s].len);
        nbi_str_puts(out, "</td>");
    }
    nbi_str_puts(out, "</tr>\n");
    if (row->prompt.expected) {
        nbi_str_puts(out, "<tr>");
        for (int s = 0; s < 2; s++)
            nbi_str_printf(out, "<td>%s, F1 %.4g</td>",
                           row->answer[s].match ? "as expected" : "not as expected",
                           row->answer[s].f1);
        nbi_str_puts(out, "</tr>\n");
    }
    nbi_str_puts(out, "</table>\n");
}

static void put_row(struct nbi_str *out, const struct nb_ab_row *row)
{
    nbi_str_puts(out, "<section>\n<h2>");
    nbi_html_text(out, row->prompt.text);
    nbi_str_puts(out, "</h2>\n<p class=\"same\">");
    nbi_html_text(out, row->prompt.place);
    nbi_str_puts(out, "</p>\n");
    put_answers(out, row);
    if (row->prompt.expected) {
        nbi_str_puts(out, "<table>\n");
        nbi_html_row(out, "expected", row->prompt.expected);
        nbi_str_puts(out, "</table>\n");
    }
    nbi_str_printf(out, "<p class=\"%s\">%s; F1 %.4g, common beginning %.4g",
                   row->identical ? "same" : "differs", row->identical ? "identical" : "different",
                   row->f1, row->prefix);
    if (isfinite(row->kl))
        nbi_str_printf(out, ", KL %.4g", row->kl);
    nbi_str_puts(out, "</p>\n");
    put_scores(out, row->score);
    nbi_str_puts(out, "</section>\n");
}

enum nb_status nb_ab_write_html(const struct nb_ab_result *result, const struct nb_ab_opts *opts,
                                const char *path)
{
    struct nbi_str page = {0};
    nbi_html_begin(&page, "Two models, side by side", style);
    put_summary(&page, result, opts);
    for (int64_t i = 0; i < result->count; i++)
        put_row(&page, &result->rows[i]);
    nbi_html_end(&page);
    enum nb_status rc = nbi_str_status(&page);
    if (rc == NB_OK)
        rc = nbi_file_write(path, page.p, page.len);
    nbi_str_release(&page);
    return rc;
}
