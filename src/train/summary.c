/* summary.c - the reports of a run: its log, report.html and the memory report. */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/dirs.h"
#include "base/file.h"
#include "base/str.h"
#include "base/sys.h"
#include "convert/model_writer.h"
#include "train/report.h"
#include "train/run.h"

#define SETTINGS 48

/* ---- history ---- */

/* A log that cannot be written is closed, and the run continues without it. */
static void check_log(struct nbi_run *r, enum nb_status rc)
{
    if (rc == NB_OK)
        return;
    nbi_run_warn(r, "training goes on without a log");
    nbi_train_log_close(r->log);
    r->log = NULL;
    r->log_failed = true;
}

enum nb_status nbi_run_note_step(struct nbi_run *r, const struct nbi_log_step *line, double kl)
{
    NBI_TRY(nbi_history_add_step(&r->history, line));
    const struct nbi_log_extra extra[] = {{"skipped", (double)r->state.skipped}, {"kl", kl}};
    if (r->log)
        check_log(r, nbi_train_log_step(r->log, line, extra, r->opts->kl_base > 0 ? 2 : 1));
    return NB_OK;
}

enum nb_status nbi_run_note_eval(struct nbi_run *r, const struct nbi_log_eval *line)
{
    NBI_TRY(nbi_history_add_eval(&r->history, line));
    if (r->log)
        check_log(r, nbi_train_log_eval(r->log, line));
    return NB_OK;
}

/* ---- the report ---- */

struct settings {
    struct nbi_report_pair pairs[SETTINGS];
    char *values[SETTINGS];
    size_t count;
    bool failed; /* out of memory */
};

static void release_settings(struct settings *s)
{
    for (size_t i = 0; i < s->count; i++)
        free(s->values[i]);
}

static void add(struct settings *s, const char *key, const char *value)
{
    NBI_BUG_IF(s->count == SETTINGS);
    s->values[s->count] = strdup(value);
    s->failed = s->failed || !s->values[s->count];
    s->pairs[s->count] = (struct nbi_report_pair){key, s->values[s->count]};
    s->count++;
}

static void add_number(struct settings *s, const char *key, double value)
{
    char text[64];
    snprintf(text, sizeof text, "%.10g", value);
    add(s, key, text);
}

/* A limit whose 0 means something else. */
static void add_limit(struct settings *s, const char *key, double value, const char *none)
{
    if (value > 0)
        add_number(s, key, value);
    else
        add(s, key, none);
}

static void add_list(struct settings *s, const char *key, const char *const *values,
                     const char *none)
{
    struct nbi_str all = {0};
    for (const char *const *v = values; v && *v; v++)
        nbi_str_printf(&all, "%s%s", v == values ? "" : "\n", *v);
    add(s, key, all.len > 0 ? nbi_str_text(&all) : none);
    s->failed = s->failed || all.failed;
    nbi_str_release(&all);
}

static void list_task(struct settings *s, const struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    static const char *const losses[] = {NB_LOSS_LIST(NB_ENUM_NAME)};
    const char *const replay[] = {o->replay, NULL};
    add(s, "model", o->model ? o->model : o->config ? o->config : o->synthetic);
    add(s, "begins with", nbi_run_random_weights(o) ? "random weights" : "its weights");
    add_list(s, "data", o->data, "random tokens");
    add_list(s, "replay", replay, "none");
    if (o->replay)
        add_number(s, "share of replay", o->replay_share);
    add_list(s, "held-out data", o->eval_data, "none");
    add(s, "loss", losses[o->loss]);
    add_number(s, "weight of KL to the base model", o->kl_base);
    add_number(s, "steps", (double)r->steps);
    add_limit(s, "epochs at most", (double)o->epochs, "any");
    add(s, "order of the data", o->sequential ? "sequential" : "random");
    add_number(s, "seed", (double)o->seed);
    add_limit(s, "layers that are trained", (double)o->train_last_layers, "all");
    add_limit(s, "steps between evaluations", (double)o->eval_every, "at the end only");
    add_limit(s, "stop if perplexity rises (%)", o->stop_if_ppl_rises, "no");
    add(s, "checkpoints", o->checkpoint_dir ? o->checkpoint_dir : "none");
    add_limit(s, "steps between checkpoints", (double)o->save_every, "any");
    add_limit(s, "minutes between checkpoints", o->save_minutes, "any");
}

static void list_arithmetic(struct settings *s, const struct nbi_run *r)
{
    static const char *const precisions[] = {NB_PRECISION_LIST(NB_ENUM_NAME)};
    static const char *const moment_types[] = {NB_MOMENT_TYPE_LIST(NB_ENUM_NAME)};
    static const char *const schedules[] = {NB_LR_SCHEDULE_LIST(NB_ENUM_NAME)};
    static const char *const stores[] = {NB_WEIGHT_STORE_LIST(NB_ENUM_NAME)};
    const struct nb_train_opts *o = r->opts;
    add(s, "precision", precisions[o->precision]);
    add(s, "device", r->be->name);
    add(s, "activations", nbi_run_computes_in_bf16(r) ? "bf16" : "f32");
    add(s, "kept of NVFP4 weights", stores[o->weight_store]);
    add(s, "master weights", o->bf16_master ? "bf16, stochastically rounded" : "f32");
    add(s, "gradients of matrices in layers", o->bf16_gradients ? "bf16" : "f32");
    add(s, "moments", moment_types[o->moment_type]);
    add(s, "schedule", schedules[o->schedule]);
    add_number(s, "learning rate", o->lr);
    add_number(s, "of it at the end", o->final_lr_frac);
    add_number(s, "warm-up steps", (double)r->lr_schedule.warmup);
    add_number(s, "tokens of a row", (double)o->seq_len);
    add_number(s, "rows of a pass", (double)o->batch_size);
    add_number(s, "passes of an update", (double)o->grad_accum);
    add_number(s, "beta1", o->beta1);
    add_number(s, "beta2", o->beta2);
    add_number(s, "eps", o->eps);
    add_number(s, "weight decay", o->weight_decay);
    add_limit(s, "largest gradient norm", o->grad_clip, "any");
    add(s, "clipped", o->clip_by_layer || o->fused_step ? "by layer" : "as a whole");
    add_limit(s, "rows updated at a time", (double)o->step_chunk_rows, "all");
    add(s, "recompute", o->recompute ? "block" : "none");
    add(s, "update inside the backward pass", o->fused_step ? "yes" : "no");
    add(s, "embedding and head in slices", o->head_slices ? "yes" : "no");
    add_limit(s, "threads", (double)o->threads, "all");
    add(s, "instruction set", o->simd ? o->simd : "auto");
    add(s, "version", nb_version());
}

/* In the result's directory, or next to a result that is a file. NULL: out of memory. */
static char *report_path(const char *out, bool directory)
{
    if (directory)
        return nbi_path_join(out, "report.html");
    struct nbi_str s = {0};
    nbi_str_puts(&s, out);
    nbi_str_puts(&s, ".report.html");
    return nbi_str_take(&s);
}

/* Notes steps that are missing from the report: earlier processes are known only from a log. */
static bool note_gap(const struct nbi_run *r, const struct nbi_history *h, char *note, size_t size)
{
    int64_t first = h->step_count > 0 ? h->steps[0].step : r->first_step + 1;
    snprintf(note, size,
             "The run was resumed, and steps before %lld are not shown: only a log (--log) keeps "
             "those of earlier processes.",
             (long long)first);
    return first > 1;
}

static enum nb_status write_report(struct nbi_run *r, const char *path)
{
    struct settings s = {0};
    struct nbi_history h = {0};
    char note[256];
    const char *const notes[] = {note};
    struct nbi_report_sample *samples = calloc((size_t)r->test_prompts.count + 1, sizeof *samples);
    if (!samples)
        return nbi_fail_memory("report", sizeof *samples);
    for (int64_t i = 0; i < r->test_prompts.count; i++) {
        const struct nb_train_answer a = nbi_test_prompts_at(&r->test_prompts, i);
        samples[i] = (struct nbi_report_sample){a.prompt, a.before, a.after};
    }
    list_task(&s, r);
    list_arithmetic(&s, r);
    bool logged = r->opts->log && !r->log_failed;
    enum nb_status rc = s.failed ? nbi_fail_memory("report", sizeof s)
                        : logged ? nbi_history_read(&h, r->opts->log)
                                 : NB_OK;
    const struct nbi_history *all =
        logged ? &h : &r->history; /* the log also has earlier processes */
    const struct nbi_report report = {.title = "Training",
                                      .steps = all->steps,
                                      .step_count = all->step_count,
                                      .evals = all->evals,
                                      .eval_count = all->eval_count,
                                      .settings = s.pairs,
                                      .setting_count = s.count,
                                      .samples = samples,
                                      .sample_count = (size_t)r->test_prompts.count,
                                      .notes = notes,
                                      .note_count = note_gap(r, all, note, sizeof note)};
    if (rc == NB_OK)
        rc = nbi_report_write(path, &report);
    nbi_history_release(&h);
    release_settings(&s);
    free(samples);
    return rc;
}

/* Whether the run reads path, or it is part of the source model. */
static bool is_used(const struct nbi_run *r, const char *path)
{
    const struct nb_train_opts *o = r->opts;
    const char *const single[] = {o->replay, o->test_prompts, o->model};
    const char *const *const lists[] = {o->data, o->eval_data};
    bool used = false;
    for (size_t i = 0; i < sizeof single / sizeof *single; i++)
        used = used || (single[i] && nbi_path_same(path, single[i]));
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const char *const *p = lists[i]; p && *p && !used; p++)
            used = nbi_path_same(path, *p);
    return used || (r->model.dir && nbi_path_in(path, r->model.dir) &&
                    nbi_is_model_file(nbi_path_base(path)));
}

/* Refuses paths at which one output would overwrite another, or an input. */
static enum nb_status check_distinct(const struct nbi_run *r, const char *const paths[4])
{
    const char *out = r->opts->out;
    for (int i = 1; i < 4; i++) {
        if (!paths[i])
            continue;
        if (is_used(r, paths[i]))
            return nbi_fail(NB_EINVAL, "writing '%s' would destroy what this run reads", paths[i]);
        if (out && nbi_path_is_dir(out) && nbi_path_in(paths[i], out) &&
            nbi_is_model_file(nbi_path_base(paths[i])))
            return nbi_fail(NB_EINVAL, "'%s' has the name of a file of the model in '%s'", paths[i],
                            out);
        for (int k = 0; k < i; k++)
            if (paths[k] && nbi_path_same_target(paths[k], paths[i]))
                return nbi_fail(NB_EINVAL, "'%s' is the name of two files to be written", paths[i]);
    }
    return NB_OK;
}

/* Whether a file can be written at path. An existing log is appended to, not replaced. */
static enum nb_status try_to_write(const char *path, bool log)
{
    struct nbi_outfile *file = NULL;
    if (log && nbi_path_exists(path))
        return nbi_temp_clean_for(path);
    NBI_TRY(nbi_outfile_open(&file, path));
    nbi_outfile_abort(file);
    return NB_OK;
}

enum nb_status nbi_run_check_reports(const struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    struct nbi_output target = {0};
    if (o->out)
        NBI_TRY(nbi_output_of(o->out, &target));
    char *report = o->out ? report_path(o->out, target.directory) : NULL;
    if (o->out && !report)
        return NB_ENOMEM;
    const char *const paths[] = {o->out, report, o->memory_report, o->log};
    enum nb_status rc = check_distinct(r, paths);
    for (int i = target.directory ? 2 : 1; i < 4 && rc == NB_OK; i++)
        if (paths[i])
            rc = try_to_write(paths[i], paths[i] == o->log);
    free(report);
    return rc;
}

enum nb_status nbi_run_report(struct nbi_run *r)
{
    struct nbi_output target;
    NBI_TRY(nbi_output_of(r->opts->out, &target));
    char *path = report_path(r->opts->out, target.directory);
    if (!path)
        return NB_ENOMEM;
    enum nb_status rc = write_report(r, path);
    free(path);
    return rc;
}

/* ---- memory ---- */

/* What this process takes of a GPU: as the driver says, or, if it does not, all that is taken. */
static uint64_t taken_of(const struct nbi_run *r, const struct nbi_memory *m)
{
    const int pid = (int)getpid();
    uint64_t bytes = r->gpu_watch ? nb_gpu_watch_bytes(r->gpu_watch, &pid, 1) : 0;
    return bytes > (uint64_t)m->allocated ? bytes : (uint64_t)(m->total - m->unused);
}

void nbi_run_phase(struct nbi_run *r, const char *phase)
{
    for (int i = 0; i < r->phase_count; i++)
        if (strcmp(r->phases[i].name, phase) == 0)
            return;
    if (r->phase_count == NBI_PHASES)
        return;
    struct nbi_phase *p = &r->phases[r->phase_count++];
    *p = (struct nbi_phase){.name = phase, .when = time(NULL), .resident = nbi_current_rss()};
    if (!nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY) || r->be->memory(r->be, &p->device) != NB_OK)
        return;
    p->taken = taken_of(r, &p->device);
    r->device_bytes = (uint64_t)(p->device.allocated + r->be->context_bytes);
}

static void add_time(char out[32], time_t t)
{
    struct tm tm;
    gmtime_r(&t, &tm);
    strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", &tm);
}

static double mib(uint64_t bytes)
{
    return (double)bytes / (1 << 20);
}

/* Parts of a GPU's memory. What the process takes and did not allocate is context, kernels and
 * libraries. */
static json_t *parts_of(const struct nbi_phase *p, bool *ok)
{
    json_t *all = json_object();
    uint64_t allocated = (uint64_t)p->device.allocated;
    for (int i = 0; i < p->device.count; i++)
        nbi_json_set(all, p->device.parts[i].what,
                     json_real(mib((uint64_t)p->device.parts[i].bytes)), ok);
    nbi_json_set(all, "context", json_real(mib(p->taken > allocated ? p->taken - allocated : 0)),
                 ok);
    return all;
}

static json_t *sample_of(const struct nbi_phase *p, bool *ok)
{
    const struct nbi_memory *m = &p->device;
    bool gpu = m->total > 0;
    char when[32];
    add_time(when, p->when);
    json_t *sample = json_pack("{s:s,s:s,s:f,s:f}", "TimestampUtc", when, "Phase", p->name,
                               "PidMemoryMiB", mib(gpu ? p->taken : p->resident), "TotalMemoryMiB",
                               mib(gpu ? (uint64_t)(m->total - m->unused) : p->resident));
    if (!gpu)
        return sample;
    nbi_json_set(sample, "HostMemoryMiB", json_real(mib(p->resident)), ok);
    nbi_json_set(sample, "Parts", parts_of(p, ok), ok);
    return sample;
}

enum nb_status nbi_run_memory_report(struct nbi_run *r, const char *path)
{
    char now[32];
    json_t *samples = json_array();
    bool ok = true;
    for (int i = 0; i < r->phase_count; i++)
        nbi_json_append(samples, sample_of(&r->phases[i], &ok), &ok);
    add_time(now, time(NULL));
    json_t *all =
        json_pack("{s:i,s:s,s:o}", "Pid", (int)getpid(), "CreatedUtc", now, "Samples", samples);
    char *text;
    enum nb_status rc = nbi_json_dump(ok ? all : NULL, JSON_INDENT(2), &text);
    if (rc == NB_OK)
        rc = nbi_file_write(path, text, strlen(text));
    free(text);
    json_decref(all);
    return rc;
}
