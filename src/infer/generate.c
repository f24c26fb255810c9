/* generate.c - one answer over a session: a scheduler of one slot with one request. */
#include <stdlib.h>

#include "infer/scheduler.h"

/* How the request ended. */
struct outcome {
    enum nb_status status;
    struct nb_generate_result *result;
};

static void keep(void *ctx, int64_t id, enum nb_status status, struct nb_generate_result *result)
{
    struct outcome *o = ctx;
    (void)id;
    o->status = status;
    *o->result = *result;
    *result = (struct nb_generate_result){0};
}

enum nb_status nb_generate(struct nb_session *session, const int32_t *prompt, size_t count,
                           const struct nb_generate_opts *opts, struct nb_generate_result *result)
{
    NBI_SCOPED struct nb_cancel *before =
        nbi_cancel_enter(opts->cancel ? opts->cancel : nbi_session_cancel(session));
    struct outcome o = {.result = result};
    const struct nb_request request = {
        .ids = prompt, .count = count, .opts = *opts, .done = keep, .ctx = &o};
    struct nb_scheduler *s;
    int64_t id;
    *result = (struct nb_generate_result){0};
    NBI_TRY(nbi_scheduler_open_over(&s, session));
    enum nb_status rc = nb_scheduler_submit(s, &request, &id);
    if (rc == NB_OK) {
        rc = nb_scheduler_run(s, 0, NULL);
        if (rc == NB_OK)
            rc = o.status;
        else
            nbi_scheduler_end(s, rc);
    }
    nb_scheduler_close(s);
    return rc;
}

void nb_generate_result_release(struct nb_generate_result *result)
{
    free(result->text);
    free(result->ids);
    *result = (struct nb_generate_result){0};
}
