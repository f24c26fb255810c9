/* summary.c - what is left of a run for people: report.html and the memory report. */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/str.h"
#include "base/sys.h"
#include "train/report.h"
#include "train/run.h"

#define SETTINGS 24

/* ---- history ---- */

/* Room for one element more; capacities are powers of two. */
static void *one_more(void *p, size_t count, size_t size)
{
    return count == 0 || (count & (count - 1)) == 0 ? realloc(p, (count ? 2 * count : 1) * size)
                                                    : p;
}

enum nb_status nbi_run_note_step(struct nbi_run *r, const struct nbi_log_step *line, double kl)
{
    struct nbi_history *h = &r->history;
    struct nbi_log_step *p = one_more(h->steps, h->step_count, sizeof *p);
    if (!p)
        return nbi_fail_memory("history", h->step_count * sizeof *p);
    h->steps = p;
    h->steps[h->step_count++] = *line;
    const struct nbi_log_extra extra[] = {{"skipped", (double)r->state.skipped}, {"kl", kl}};
    return r->log ? nbi_trainlog_step(r->log, line, extra, r->opts->kl_base > 0 ? 2 : 1) : NB_OK;
}

enum nb_status nbi_run_note_eval(struct nbi_run *r, const struct nbi_log_eval *line)
{
    struct nbi_history *h = &r->history;
    struct nbi_log_eval *p = one_more(h->evals, h->eval_count, sizeof *p);
    if (!p)
        return nbi_fail_memory("history", h->eval_count * sizeof *p);
    h->evals = p;
    h->evals[h->eval_count++] = *line;
    return r->log ? nbi_trainlog_eval(r->log, line) : NB_OK;
}

/* ---- the report ---- */

struct settings {
    struct nbi_report_pair pairs[SETTINGS];
    char text[SETTINGS][64];
    size_t count;
};

static void add(struct settings *s, const char *key, const char *value)
{
    if (s->count < SETTINGS)
        s->pairs[s->count++] = (struct nbi_report_pair){key, value};
}

static void add_number(struct settings *s, const char *key, double value)
{
    if (s->count == SETTINGS)
        return;
    snprintf(s->text[s->count], sizeof s->text[0], "%.10g", value);
    add(s, key, s->text[s->count]);
}

static void list_settings(struct settings *s, const struct nbi_run *r)
{
    static const char *const precisions[] = {"bf16", "f32", "nvfp4"};
    static const char *const states[] = {"f32", "bf16", "int8", "nvfp4"};
    static const char *const schedules[] = {"constant", "linear", "cosine", "wsd"};
    const struct nb_train_opts *o = r->opts;
    add(s, "model", o->model ? o->model : o->synthetic);
    add(s, "data", o->data && o->data[0] ? o->data[0] : "random tokens");
    add(s, "precision", precisions[o->precision]);
    add(s, "master weights", o->bf16_master ? "bf16, stochastically rounded" : "f32");
    add(s, "moments", states[o->state]);
    add(s, "schedule", schedules[o->schedule]);
    add_number(s, "learning rate", o->lr);
    add_number(s, "warm-up steps", (double)o->warmup);
    add_number(s, "steps", (double)r->steps);
    add_number(s, "tokens of a row", (double)o->seq_len);
    add_number(s, "rows of a pass", (double)o->batch_size);
    add_number(s, "passes of an update", (double)o->grad_accum);
    add_number(s, "beta1", o->beta1);
    add_number(s, "beta2", o->beta2);
    add_number(s, "weight decay", o->weight_decay);
    add_number(s, "largest gradient norm", o->grad_clip);
    add_number(s, "seed", (double)o->seed);
    add(s, "version", nb_version());
}

/* In the directory of the result; beside it, if it is a file. */
static char *report_path(const struct nbi_run *r)
{
    const char *out = r->opts->out;
    if (nbi_path_is_dir(out))
        return nbi_path_join(out, "report.html");
    struct nbi_str s = {0};
    nbi_str_puts(&s, out);
    nbi_str_puts(&s, ".report.html");
    return s.p;
}

static enum nb_status write_report(struct nbi_run *r, const char *path)
{
    struct settings s = {0};
    struct nbi_history h = {0};
    struct nbi_report_sample *samples = calloc((size_t)r->prompts.count + 1, sizeof *samples);
    if (!samples)
        return nbi_fail_memory("report", sizeof *samples);
    for (int64_t i = 0; i < r->prompts.count; i++)
        samples[i] = (struct nbi_report_sample){r->prompts.prompts[i], r->prompts.before[i],
                                                r->prompts.after[i]};
    list_settings(&s, r);
    enum nb_status rc = r->opts->log ? nbi_history_read(&h, r->opts->log) : NB_OK;
    const struct nbi_history *all = r->opts->log ? &h : &r->history; /* the log has it all */
    const struct nbi_report report = {.title = "Training",
                                      .steps = all->steps,
                                      .step_count = all->step_count,
                                      .evals = all->evals,
                                      .eval_count = all->eval_count,
                                      .settings = s.pairs,
                                      .setting_count = s.count,
                                      .samples = samples,
                                      .sample_count = (size_t)r->prompts.count};
    if (rc == NB_OK)
        rc = nbi_report_write(path, &report);
    nbi_history_release(&h);
    free(samples);
    return rc;
}

enum nb_status nbi_run_report(struct nbi_run *r)
{
    char *path = r->opts->out ? report_path(r) : NULL;
    if (!path)
        return NB_OK;
    enum nb_status rc = write_report(r, path);
    free(path);
    return rc;
}

/* ---- memory ---- */

void nbi_run_phase(struct nbi_run *r, const char *phase)
{
    if (r->phase_count < NBI_PHASES)
        r->phases[r->phase_count++] = (struct nbi_phase){phase, time(NULL), nbi_resident()};
}

static void add_time(char out[32], time_t t)
{
    struct tm tm;
    gmtime_r(&t, &tm);
    strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", &tm);
}

enum nb_status nbi_run_memory_report(struct nbi_run *r, const char *path)
{
    char now[32];
    json_t *samples = json_array();
    bool ok = true;
    for (int i = 0; i < r->phase_count; i++) {
        double mib = (double)r->phases[i].bytes / (1 << 20);
        add_time(now, r->phases[i].when);
        nbi_json_append(samples,
                        json_pack("{s:s,s:s,s:f,s:f}", "TimestampUtc", now, "Phase",
                                  r->phases[i].name, "PidMemoryMiB", mib, "TotalMemoryMiB", mib),
                        &ok);
    }
    add_time(now, time(NULL));
    json_t *all =
        json_pack("{s:i,s:s,s:o}", "Pid", (int)getpid(), "CreatedUtc", now, "Samples", samples);
    char *text = all && ok ? json_dumps(all, JSON_INDENT(2)) : NULL;
    enum nb_status rc =
        text ? nbi_file_write(path, text, strlen(text)) : nbi_fail_memory("report", 1);
    free(text);
    json_decref(all);
    return rc;
}
