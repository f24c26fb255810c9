/* teach.c - from a model and a sentence to a model that answers with it, and is else as it was. */
#include <math.h>
#include <string.h>

#include "base/dirs.h"
#include "base/file.h"
#include "base/str.h"
#include "identity/replay.h"

/* A model of 8 M parameters learns this at 5e-4; larger ones want less. */
#define LR_SMALL   5e-4
#define SIZE_SMALL 8e6
#define STEPS      150

struct teaching {
    const struct nb_identity_teach_opts *opts;
    struct nb_identity_teach_result *result;
    struct nbi_questions questions;
    char *identity, *replay, *log; /* files */
    const char *data[2];
    struct nb_train_opts train;
    char *beside; /* where the config of a bare result is */
};

static void tell(const struct teaching *t, const char *what)
{
    const struct nb_train_opts *o = &t->opts->train;
    if (o->stage)
        o->stage(o->ctx, what);
}

static enum nb_status name_files(struct teaching *t)
{
    const char *dir = t->opts->dir;
    NBI_TRY(nbi_dir_make(dir));
    t->identity = nbi_path_join(dir, "identity.tsv");
    t->replay = nbi_path_join(dir, "replay.jsonl");
    t->log = nbi_path_join(dir, "train.jsonl");
    return t->identity && t->replay && t->log ? NB_OK : NB_ENOMEM;
}

static struct nb_engine_opts engine_of(const struct teaching *t, const char *model)
{
    const struct nb_train_opts *o = &t->opts->train;
    return (struct nb_engine_opts){
        .model = model, .model_dir = o->model_dir, .simd = o->simd, .threads = o->threads};
}

static enum nb_status write_identity(struct teaching *t)
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

static enum nb_status write_replay(struct teaching *t)
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

/* What a run takes that the caller does not say. */
static enum nb_status settle(struct teaching *t)
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

static enum nb_status judge(struct teaching *t)
{
    const struct nb_identity_teach_opts *o = t->opts;
    struct nb_engine_opts model = engine_of(t, o->train.out);
    if (!nbi_path_is_dir(o->train.out) && !model.model_dir) {
        const char *from = o->train.model;
        t->beside = nbi_path_is_dir(from) ? strdup(from) : nbi_path_dir(from);
        if (!t->beside)
            return nbi_fail_memory("a path", strlen(from));
        model.model_dir = t->beside;
    }
    const struct nb_identity_opts opts = {.model = model,
                                          .base = engine_of(t, o->train.model),
                                          .set = o->set,
                                          .questions = o->questions,
                                          .text = o->text,
                                          .max_tokens = o->max_tokens,
                                          .progress = o->progress,
                                          .progress_ctx = o->train.ctx};
    return nb_eval_identity(&opts, &t->result->eval);
}

static enum nb_status run(struct teaching *t)
{
    NBI_TRY(nbi_questions_make(&t->questions, &t->opts->set, 0));
    NBI_TRY(name_files(t));
    NBI_TRY(settle(t));
    NBI_TRY(write_identity(t));
    tell(t, "asking the model what it says now");
    NBI_TRY(write_replay(t));
    NBI_TRY(nb_train(&t->train, &t->result->train));
    if (t->result->train.interrupted)
        return NB_EINTERRUPTED;
    tell(t, "asking the result");
    return nbi_in_place(judge(t), t->train.out);
}

enum nb_status nb_identity_teach(const struct nb_identity_teach_opts *opts,
                                 struct nb_identity_teach_result *result)
{
    struct teaching t = {.opts = opts, .result = result};
    *result = (struct nb_identity_teach_result){0};
    enum nb_status rc = run(&t);
    if (rc == NB_EINTERRUPTED) /* questions and answers in opts->dir may be new */
        rc = nbi_fail(rc, "interrupted; '%s' %s", opts->train.out,
                      result->train.exported ? "is in place" : "was not written");
    nbi_questions_release(&t.questions);
    free(t.identity);
    free(t.replay);
    free(t.log);
    free(t.beside);
    return rc;
}
