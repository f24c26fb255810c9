/* prompts.c - what a model says before and after training. */
#include <string.h>

#include "base/file.h"
#include "base/jscan.h"
#include "base/str.h"
#include "infer/session.h"
#include "train/run.h"

#define FILE_MAX   ((size_t)1 << 20)
#define MOST       256
#define MAX_TOKENS 64
#define CONTEXT    1024

enum nb_status nbi_prompts_open(struct nbi_prompts *p, const char *path)
{
    char *text = NULL, *line, *rest;
    size_t len;
    NBI_TRY(nbi_file_read(path, FILE_MAX, &text, &len));
    p->prompts = calloc(MOST, sizeof *p->prompts);
    p->before = calloc(MOST, sizeof *p->before);
    p->after = calloc(MOST, sizeof *p->after);
    enum nb_status rc = p->prompts && p->before && p->after
                            ? NB_OK
                            : nbi_fail_memory("prompts", MOST * sizeof *p->prompts);
    rest = text;
    while (rc == NB_OK && (line = strsep(&rest, "\n"))) {
        line[strcspn(line, "\r")] = 0;
        if (!*line)
            continue;
        if (p->count == MOST)
            rc = nbi_fail(NB_EVALUE, "'%s' has more than %d prompts", path, MOST);
        else if (!(p->prompts[p->count++] = strdup(line)))
            rc = nbi_fail_memory("prompts", strlen(line));
    }
    free(text);
    return rc;
}

void nbi_prompts_close(struct nbi_prompts *p)
{
    for (int64_t i = 0; i < p->count; i++) {
        free(p->prompts[i]);
        free(p->before[i]);
        free(p->after[i]);
    }
    free(p->prompts);
    free(p->before);
    free(p->after);
    *p = (struct nbi_prompts){0};
}

static enum nb_status render(const struct nbi_run *r, const char *prompt, int32_t **ids,
                             size_t *count)
{
    struct nbi_str q = {0};
    char *text = NULL;
    size_t len = 0;
    nbi_str_puts(&q, "{\"messages\":[{\"role\":\"user\",\"content\":");
    nbi_jquote(&q, prompt, strlen(prompt));
    nbi_str_puts(&q, "}],\"add_generation_prompt\":true,\"enable_thinking\":false}");
    enum nb_status rc = nbi_str_status(&q);
    if (rc == NB_OK)
        rc = nb_chat_render(r->chat, q.p, q.len, &text, &len);
    if (rc == NB_OK)
        rc = nb_tokenizer_encode(r->tokenizer, text, len, true, ids, count);
    nbi_str_release(&q);
    free(text);
    return rc;
}

static enum nb_status answer(struct nb_session *s, const struct nbi_run *r, const char *prompt,
                             char **out)
{
    const struct nb_generate_opts opts = {.sampling = {.top_p = 1, .repeat_penalty = 1},
                                          .max_tokens = MAX_TOKENS};
    struct nb_generate_result result = {0};
    int32_t *ids = NULL;
    size_t count = 0;
    NBI_TRY(render(r, prompt, &ids, &count));
    nbi_session_truncate(s, 0);
    enum nb_status rc = nb_generate(s, ids, count, &opts, &result);
    free(ids);
    if (rc == NB_OK) {
        *out = result.text;
        result.text = NULL;
    }
    nb_generate_result_release(&result);
    return rc;
}

enum nb_status nbi_prompts_run(struct nbi_prompts *p, struct nbi_run *r, char **answers)
{
    struct nb_engine engine;
    struct nb_session *s = NULL;
    int64_t most = r->config.max_position;
    const struct nbi_session_opts opts = {
        .context = most < CONTEXT ? most : CONTEXT, .kv = NBI_F32, .exact = true};
    const struct nbi_engine_parts parts = {.be = r->be,
                                           .config = &r->config,
                                           .weights = &r->t.weights,
                                           .dir = r->files.dir,
                                           .tokenizer = r->tokenizer,
                                           .chat = r->chat,
                                           .threads = 1};
    if (p->count == 0)
        return NB_OK;
    NBI_TRY(nbi_engine_wrap(&engine, &parts));
    enum nb_status rc = nbi_session_new(&s, &engine, &opts);
    for (int64_t i = 0; i < p->count && rc == NB_OK; i++)
        rc = answer(s, r, p->prompts[i], &answers[i]);
    nbi_session_free(s);
    return rc;
}
