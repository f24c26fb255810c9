/* report.c - the page of a training run: summary, charts, answers, settings. */
#include "train/report.h"

#include <math.h>

#include "base/file.h"
#include "base/html.h"
#include "train/chart.h"

/* CSS of the charts; base/html.c has the rest. */
static const char style[] =
    "svg { width: 100%; height: auto; } .axis { fill: var(--soft); font-size: 11px; }\n"
    ".axis.y { text-anchor: end; } .axis.x { text-anchor: middle; }\n"
    ".grid { stroke: var(--grid); fill: none; } polyline { fill: none; stroke-width: 1.5; }\n"
    ".raw { stroke: var(--raw); } .line { stroke: var(--line); stroke-width: 2; }\n"
    ".eval { fill: var(--eval); } .hover { fill: transparent; }\n"
    ".hover:hover { fill: var(--line); fill-opacity: .12; }\n"
    ".key { color: var(--soft); } .key b { font-weight: 600; }\n"
    ".key .raw { color: var(--raw); } .key .line { color: var(--line); }\n"
    ".key .eval { color: var(--eval); }\n"
    ".log { display: none; } #log:checked ~ .log { display: block; }\n"
    "#log:checked ~ .linear { display: none; }\n";

/* ---- columns ---- */

/* The log by columns, as the charts need it; all in one block. */
struct columns {
    size_t count;
    double *step, *loss, *smooth, *lr, *grad_norm, *speed, *memory;
    double *eval_step, *eval_loss;
    double *block;
};

static enum nb_status make_columns(struct columns *c, const struct nbi_report *r)
{
    size_t n = r->step_count, m = r->eval_count;
    if (n > SIZE_MAX / 256 || m > SIZE_MAX / 256)
        return nbi_fail(NB_EINVAL, "too many steps for a report");
    *c = (struct columns){.count = n, .block = malloc((7 * n + 2 * m + 1) * sizeof(double))};
    if (!c->block)
        return nbi_fail_memory("report", (7 * n + 2 * m) * sizeof(double));
    double **parts[] = {&c->step,      &c->loss,  &c->smooth, &c->lr,
                        &c->grad_norm, &c->speed, &c->memory};
    for (size_t k = 0; k < 7; k++)
        *parts[k] = c->block + k * n;
    c->eval_step = c->block + 7 * n;
    c->eval_loss = c->eval_step + m;
    for (size_t i = 0; i < n; i++) {
        const struct nbi_log_step *s = &r->steps[i];
        c->step[i] = (double)s->step;
        c->loss[i] = s->loss;
        c->lr[i] = s->lr;
        c->grad_norm[i] = s->grad_norm;
        c->speed[i] = s->tokens_per_s;
        c->memory[i] = (double)(s->device_bytes ? s->device_bytes : s->resident_bytes) * 0x1p-30;
    }
    for (size_t i = 0; i < m; i++) {
        c->eval_step[i] = (double)r->evals[i].step;
        c->eval_loss[i] = r->evals[i].loss;
    }
    return NB_OK;
}

/* An exponential moving average over about a fortieth of the run, corrected for the bias of its
 * start. Non-finite losses are left out. */
static void smooth(const struct columns *c)
{
    double keep = 1 - 1 / fmax(1, (double)c->count / 40), sum = 0, weight = 0;
    for (size_t i = 0; i < c->count; i++) {
        if (isfinite(c->loss[i])) {
            sum = keep * sum + (1 - keep) * c->loss[i];
            weight = keep * weight + (1 - keep);
        }
        c->smooth[i] = weight > 0 ? sum / weight : NAN;
    }
}

/* ---- the page ---- */

static void put_count(struct nbi_str *out, const char *key, int64_t v)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)v);
    nbi_html_row(out, key, text);
}

static void put_number(struct nbi_str *out, const char *key, double v)
{
    char text[64];
    snprintf(text, sizeof text, "%.4g", v);
    nbi_html_row(out, key, isfinite(v) ? text : "not finite");
}

static void put_summary(struct nbi_str *out, const struct nbi_report *r, const struct columns *c)
{
    size_t bad = 0;
    double memory = 0;
    for (size_t i = 0; i < c->count; i++) {
        bad += !isfinite(c->loss[i]) || !isfinite(c->grad_norm[i]);
        memory = fmax(memory, c->memory[i]);
    }
    nbi_str_puts(out, "<table id=\"summary\">\n");
    put_count(out, "steps", (int64_t)c->count);
    if (c->count > 0) {
        const struct nbi_log_step *last = &r->steps[c->count - 1];
        put_count(out, "tokens", last->tokens);
        put_number(out, "seconds", last->seconds);
        put_number(out, "loss, first step", c->loss[0]);
        put_number(out, "loss, last step", last->loss);
        put_number(out, "loss, smoothed, last step", c->smooth[c->count - 1]);
        put_number(out, "memory, most (GiB)", memory);
    }
    if (r->eval_count > 0) {
        put_number(out, "held-out perplexity, first", r->evals[0].ppl);
        put_number(out, "held-out perplexity, last", r->evals[r->eval_count - 1].ppl);
    }
    if (bad)
        put_count(out, "steps with loss or gradient not finite", (int64_t)bad);
    nbi_str_puts(out, "</table>\n");
}

static void put_loss(struct nbi_str *out, const struct nbi_report *r, const struct columns *c)
{
    const struct nbi_chart_series series[] = {
        {"raw", "loss", c->step, c->loss, c->count, false},
        {"line", "smoothed", c->step, c->smooth, c->count, false},
        {"eval", "held-out loss", c->eval_step, c->eval_loss, r->eval_count, true}};
    struct nbi_chart chart = {
        .title = "loss by step", .x_name = "step", .series = series, .series_count = 3};
    const char *const names[] = {"each step", "smoothed", "held-out"};
    nbi_str_puts(out, "<section id=\"loss\"><h2>Loss</h2>\n<p class=\"key\">");
    for (size_t k = 0, shown = 0; k < 3; k++)
        if (series[k].count > 0)
            nbi_str_printf(out, "%s<b class=\"%s\">%s</b>", shown++ ? ", " : "", series[k].style,
                           names[k]);
    nbi_str_puts(out, "</p>\n<input type=\"checkbox\" id=\"log\"/> "
                      "<label for=\"log\">logarithmic</label>\n<div class=\"linear\">\n");
    nbi_chart_svg(out, &chart);
    chart.log_scale = true;
    nbi_str_puts(out, "</div>\n<div class=\"log\">\n");
    nbi_chart_svg(out, &chart);
    nbi_str_puts(out, "</div></section>\n");
}

static void put_chart(struct nbi_str *out, const struct columns *c, const char *id,
                      const char *title, const double *y)
{
    const struct nbi_chart_series series = {"line", title, c->step, y, c->count, false};
    const struct nbi_chart chart = {
        .title = title, .x_name = "step", .from_zero = true, .series = &series, .series_count = 1};
    nbi_str_printf(out, "<section id=\"%s\"><h2>%s</h2>\n", id, title);
    nbi_chart_svg(out, &chart);
    nbi_str_puts(out, "</section>\n");
}

static void put_samples(struct nbi_str *out, const struct nbi_report *r)
{
    nbi_str_puts(out, "<h2>Answers</h2>\n<table id=\"samples\">\n"
                      "<tr><th>prompt</th><th>before</th><th>after</th></tr>\n");
    for (size_t i = 0; i < r->sample_count; i++) {
        const struct nbi_report_sample *s = &r->samples[i];
        const char *const cells[] = {s->prompt, s->before, s->after};
        nbi_str_puts(out, "<tr>");
        for (size_t k = 0; k < 3; k++)
            nbi_html_cell(out, cells[k] ? cells[k] : "");
        nbi_str_puts(out, "</tr>\n");
    }
    nbi_str_puts(out, "</table>\n");
}

static void put_lists(struct nbi_str *out, const struct nbi_report *r)
{
    if (r->sample_count)
        put_samples(out, r);
    if (r->note_count)
        nbi_str_puts(out, "<h2>Notes</h2>\n<ul id=\"notes\">\n");
    for (size_t i = 0; i < r->note_count; i++) {
        nbi_str_puts(out, "<li>");
        nbi_html_text(out, r->notes[i]);
        nbi_str_puts(out, "</li>\n");
    }
    if (r->note_count)
        nbi_str_puts(out, "</ul>\n");
    if (r->setting_count)
        nbi_str_puts(out, "<h2>Settings</h2>\n<table id=\"settings\">\n");
    for (size_t i = 0; i < r->setting_count; i++)
        nbi_html_row(out, r->settings[i].key, r->settings[i].value);
    if (r->setting_count)
        nbi_str_puts(out, "</table>\n");
}

enum nb_status nbi_report_html(struct nbi_str *out, const struct nbi_report *r)
{
    struct columns c;
    NBI_TRY(make_columns(&c, r));
    smooth(&c);
    nbi_html_begin(out, r->title, style);
    put_summary(out, r, &c);
    put_loss(out, r, &c);
    put_chart(out, &c, "lr", "Learning rate", c.lr);
    put_chart(out, &c, "grad-norm", "Gradient norm", c.grad_norm);
    put_chart(out, &c, "speed", "Tokens per second", c.speed);
    put_chart(out, &c, "memory", "Memory of the device (GiB)", c.memory);
    put_lists(out, r);
    nbi_html_end(out);
    free(c.block);
    return nbi_str_status(out);
}

enum nb_status nbi_report_write(const char *path, const struct nbi_report *r)
{
    struct nbi_str page = {0};
    enum nb_status rc = nbi_report_html(&page, r);
    if (rc == NB_OK)
        rc = nbi_file_write(path, page.p, page.len);
    nbi_str_release(&page);
    return rc;
}
