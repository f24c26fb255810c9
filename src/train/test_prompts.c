/* test_prompts.c - greedy answers to the test prompts, from the model in training. */
#include "infer/session.h"
#include "tokenizer/chat_template.h"
#include "train/run.h"

#define MAX_TOKENS 64
#define CONTEXT    1024

enum nb_status nbi_test_prompts_open(struct nbi_test_prompts *p, const char *path)
{
    NBI_TRY(nb_prompts_open(&p->list, path));
    p->count = nb_prompts_count(p->list);
    p->before = calloc((size_t)p->count, sizeof *p->before);
    p->after = calloc((size_t)p->count, sizeof *p->after);
    if (!p->before || !p->after)
        return nbi_fail_memory("prompts", (size_t)p->count * sizeof *p->after);
    return NB_OK;
}

static void close_session(struct nbi_test_prompts *p)
{
    nb_session_close(p->session);
    free(p->engine);
    p->session = NULL;
    p->engine = NULL;
}

void nbi_test_prompts_close(struct nbi_test_prompts *p)
{
    close_session(p);
    for (int64_t i = 0; i < p->count; i++) {
        if (p->before)
            free(p->before[i]);
        if (p->after)
            free(p->after[i]);
    }
    free(p->before);
    free(p->after);
    nb_prompts_close(p->list);
    *p = (struct nbi_test_prompts){0};
}

struct nb_train_answer nbi_test_prompts_at(const struct nbi_test_prompts *p, int64_t i)
{
    struct nb_prompt prompt;
    nb_prompts_at(p->list, i, &prompt);
    return (struct nb_train_answer){prompt.text, p->before[i], p->after[i]};
}

static enum nb_status render(const struct nbi_run *r, const struct nb_prompt *p, int32_t **ids,
                             size_t *count)
{
    char *text = NULL;
    size_t len = 0;
    enum nb_status rc = nbi_chat_prompt(r->chat, p->messages, p->tools, false, &text, &len);
    if (rc == NB_OK)
        rc = nb_tokenizer_encode(r->tokenizer, text, len, true, ids, count);
    free(text);
    return rc;
}

static enum nb_status answer(struct nb_session *s, const struct nbi_run *r,
                             const struct nb_prompt *prompt, char **out)
{
    const struct nb_generate_opts opts = {.sampling = {.top_p = 1, .repeat_penalty = 1},
                                          .max_tokens = MAX_TOKENS};
    struct nb_generate_result result = {0};
    int32_t *ids = NULL;
    size_t count = 0;
    NBI_TRY(render(r, prompt, &ids, &count));
    nb_session_truncate(s, 0);
    enum nb_status rc = nb_generate(s, ids, count, &opts, &result);
    free(ids);
    if (rc == NB_OK) {
        *out = result.text;
        result.text = NULL;
    }
    nb_generate_result_release(&result);
    return rc;
}

/* ---- the session ---- */

static struct nbi_session_opts session_opts(const struct nbi_config *c)
{
    int64_t limit = c->max_position;
    return (struct nbi_session_opts){
        .context = limit < CONTEXT ? limit : CONTEXT, .kv = NBI_F32, .exact = true};
}

enum nb_status nbi_test_prompts_plan(const struct nbi_run *r, struct nbi_memory_plan *plan)
{
    const struct nbi_session_opts opts = session_opts(&r->config);
    struct nb_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return nbi_fail_memory("engine", sizeof *engine);
    engine->be = r->be;
    engine->config = r->config;
    nbi_session_plan(engine, &opts, plan);
    free(engine);
    return NB_OK;
}

/* Opens the session, or shows it what has become of the weights. */
static enum nb_status open_session(struct nbi_test_prompts *p, struct nbi_run *r)
{
    const struct nbi_session_opts opts = session_opts(&r->config);
    const struct nbi_engine_parts parts = {.be = r->be,
                                           .config = &r->config,
                                           .weights = &r->params.weights,
                                           .dir = r->model.dir,
                                           .tokenizer = r->tokenizer,
                                           .chat = r->chat,
                                           .threads = 1};
    if (!p->engine)
        p->engine = calloc(1, sizeof *p->engine);
    if (!p->engine)
        return nbi_fail_memory("engine", sizeof *p->engine);
    NBI_TRY(nbi_engine_borrow(p->engine, &parts));
    return p->session ? NB_OK : nbi_session_new(&p->session, p->engine, &opts);
}

enum nb_status nbi_test_prompts_run(struct nbi_test_prompts *p, struct nbi_run *r, char **answers)
{
    if (p->count == 0)
        return NB_OK;
    nbi_run_stage(r, "answering the test prompts");
    enum nb_status rc = open_session(p, r);
    for (int64_t i = 0; i < p->count && rc == NB_OK; i++) {
        struct nb_prompt prompt;
        nb_prompts_at(p->list, i, &prompt);
        rc = answer(p->session, r, &prompt, &answers[i]);
        if (rc != NB_EINTERRUPTED)
            rc = nbi_context(rc, "%s", prompt.place);
        nbi_run_stage_progress(r, i + 1, p->count);
    }
    if (!nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY))
        close_session(p);
    return rc;
}
