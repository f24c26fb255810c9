/* teach.c - fine-tunes a model to give a chosen answer when asked who it is.
 *
 * Writes the data sets, trains with a KL term that keeps the model near its former self, and checks
 * the result against the criteria (criteria.c). */
#include <math.h>
#include <string.h>

#include "base/dirs.h"
#include "base/file.h"
#include "base/str.h"
#include "identity/replay.h"

/* Default learning rate: 5e-4 for a model of 8 M parameters, less for larger ones, in proportion to
 * 1 / sqrt(parameters). */
#define LR_SMALL   5e-4
#define SIZE_SMALL 8e6
#define STEPS      150

struct teach_run {
    const struct nb_identity_teach_opts *opts;
    struct nb_identity_teach_result *result;
    struct nbi_questions questions;
    char *identity, *replay, *log; /* paths */
    const char *data[2];           /* NULL-terminated */
    struct nb_train_opts train;
    char *config_dir; /* for a result that is a single file: directory of the base's config.json */
};

static void report_stage(const struct teach_run *t, const char *what)
{
    const struct nb_train_opts *o = &t->opts->train;
    if (o->stage)
        o->stage(o->ctx, what);
}

static enum nb_status name_files(struct teach_run *t)
{
    const char *dir = t->opts->dir;
    NBI_TRY(nbi_dir_make(dir));
    t->identity = nbi_path_join(dir, "identity.tsv");
    t->replay = nbi_path_join(dir, "replay.jsonl");
    t->log = nbi_path_join(dir, "train.jsonl");
    return t->identity && t->replay && t->log ? NB_OK : NB_ENOMEM;
}

static struct nb_engine_opts engine_of(const struct teach_run *t, const char *model)
{
    const struct nb_train_opts *o = &t->opts->train;
    return (struct nb_engine_opts){.model = model,
                                   .model_dir = o->model_dir,
                                   .device = o->device,
                                   .simd = o->simd,
                                   .threads = o->threads};
}

static enum nb_status write_identity(struct teach_run *t)
{
    struct nbi_str s = {0};
    const struct nbi_questions *q = &t->questions;
    nbi_str_puts(&s, "# prompt<TAB>answer\n");
    for (size_t i = 0; i < q->count; i++) {
        if (q->kinds[i] != NB_IDENTITY_TRAINED)
            continue;
        nbi_str_printf(&s, "%s\t%s\n", q->lines[i]->prompt, q->lines[i]->answer);
        t->result->identity++;
    }
    enum nb_status rc = nbi_str_status(&s);
    if (rc == NB_OK)
        rc = nbi_file_write(t->identity, s.p, s.len);
    nbi_str_release(&s);
    return rc;
}

static enum nb_status write_replay(struct teach_run *t)
{
    const struct nb_identity_teach_opts *o = t->opts;
    struct nbi_replay_report report;
    const struct nbi_replay_opts opts = {.model = engine_of(t, o->train.model),
                                         .out = t->replay,
                                         .samples = o->samples,
                                         .max_tokens = o->max_tokens,
                                         .seed = o->set.seed,
                                         .progress = o->progress,
                                         .progress_ctx = o->train.ctx};
    NBI_TRY(nbi_replay_write(&t->questions, &opts, &report));
    t->result->answers = report.answers;
    t->result->samples = report.samples;
    t->result->texts = report.texts;
    return NB_OK;
}

/* Fills in the settings of the run that the caller left open. */
static enum nb_status choose_settings(struct teach_run *t)
{
    struct nb_train_opts *o = &t->train;
    struct nb_train_plan plan;
    *o = t->opts->train;
    NBI_TRY(nb_train_plan(o, &plan));
    if (!(o->lr > 0))
        o->lr = LR_SMALL * sqrt(fmin(1, SIZE_SMALL / (double)plan.parameters));
    if (o->steps <= 0)
        o->steps = STEPS;
    t->data[0] = t->identity;
    o->data = t->data;
    o->replay = t->replay;
    o->log = t->log;
    return nb_train_check(o);
}

static enum nb_status evaluate(struct teach_run *t)
{
    const struct nb_identity_teach_opts *o = t->opts;
    struct nb_engine_opts model = engine_of(t, o->train.out);
    if (!nbi_path_is_dir(o->train.out) && !model.model_dir) {
        const char *from = o->train.model;
        t->config_dir = nbi_path_is_dir(from) ? strdup(from) : nbi_path_dir(from);
        if (!t->config_dir)
            return nbi_fail_memory("a path", strlen(from));
        model.model_dir = t->config_dir;
    }
    const struct nb_identity_opts opts = {.model = model,
                                          .base = engine_of(t, o->train.model),
                                          .set = o->set,
                                          .questions = o->questions,
                                          .text = o->text,
                                          .max_tokens = o->max_tokens,
                                          .progress = o->progress,
                                          .progress_ctx = o->train.ctx};
    return nb_identity_eval(&opts, &t->result->eval);
}

static enum nb_status run(struct teach_run *t)
{
    NBI_TRY(nbi_questions_make(&t->questions, &t->opts->set, 0));
    NBI_TRY(name_files(t));
    NBI_TRY(choose_settings(t));
    NBI_TRY(write_identity(t));
    report_stage(t, "asking the model what it says now");
    NBI_TRY(write_replay(t));
    NBI_TRY(nb_train(&t->train, &t->result->train));
    if (t->result->train.interrupted)
        return NB_EINTERRUPTED;
    report_stage(t, "asking the result");
    return nbi_in_place(evaluate(t), t->train.out);
}

enum nb_status nb_identity_teach(const struct nb_identity_teach_opts *opts,
                                 struct nb_identity_teach_result *result)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct teach_run t = {.opts = opts, .result = result};
    *result = (struct nb_identity_teach_result){0};
    enum nb_status rc = run(&t);
    if (rc == NB_EINTERRUPTED) /* the data sets in opts->dir may have been replaced already */
        rc = nbi_fail(rc, "interrupted; '%s' %s", opts->train.out,
                      result->train.exported ? "is in place" : "was not written");
    nbi_questions_release(&t.questions);
    free(t.identity);
    free(t.replay);
    free(t.log);
    free(t.config_dir);
    return rc;
}
