/* requests.c - several prompts at once: they share a batch, and each ends when it ends.
 * Run it with models/nib 'One day' 'The cat'; examples/README.md says how to build it. */
#include <nibble.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void done(void *ctx, int64_t id, enum nb_status status, struct nb_generate_result *result)
{
    const char *prompt = ctx;
    if (status == NB_OK)
        printf("%lld: %s%.*s\n", (long long)id, prompt, (int)result->len, result->text);
    else
        fprintf(stderr, "%lld: %s: %s\n", (long long)id, prompt, nb_last_error());
}

/* Submits a text to go on with. The scheduler copies the ids. */
static enum nb_status submit(struct nb_scheduler *s, const struct nb_engine *engine, char *text)
{
    struct nb_engine_info info;
    struct nb_request request = {.opts = {.max_tokens = 20}, .done = done, .ctx = text};
    int32_t *ids;
    int64_t id;
    enum nb_status rc = nb_tokenizer_encode(nb_engine_tokenizer(engine), text, strlen(text), false,
                                            &ids, &request.count);
    if (rc != NB_OK)
        return rc;
    request.ids = ids;
    nb_engine_info(engine, &info);
    request.opts.sampling = info.sampling;
    rc = nb_scheduler_submit(s, &request, &id);
    free(ids);
    return rc;
}

int main(int argc, char **argv)
{
    struct nb_engine *engine = NULL;
    struct nb_scheduler *scheduler = NULL;
    const struct nb_scheduler_opts opts = {.batch = {.sequences = 4, .context = 512}};
    if (argc < 3)
        return fprintf(stderr, "usage: requests MODEL TEXT...\n"), 2;
    enum nb_status rc = nb_engine_open(&engine, &(struct nb_engine_opts){.model = argv[1]});
    if (rc == NB_OK)
        rc = nb_scheduler_open(&scheduler, engine, &opts);
    for (int i = 2; i < argc && rc == NB_OK; i++)
        rc = submit(scheduler, engine, argv[i]);
    if (rc == NB_OK)
        rc = nb_scheduler_run(scheduler, 0, NULL); /* until none is left */
    if (rc != NB_OK)
        fprintf(stderr, "%s\n", nb_last_error());
    nb_scheduler_close(scheduler);
    nb_engine_close(engine);
    return rc != NB_OK;
}
