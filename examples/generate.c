/* generate.c - one answer, printed as it grows.
 * Run it with models/nib 'Tell me a story.'; examples/README.md says how to build it. */
#include <nibble.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum nb_status show(void *ctx, const char *text, size_t len)
{
    (void)ctx;
    fwrite(text, 1, len, stdout);
    return fflush(stdout) == 0 ? NB_OK : NB_EIO; /* which would end the answer */
}

/* The ids of a user's message, as the model's chat template writes it. */
static enum nb_status encode(const struct nb_engine *engine, const char *text, int32_t **ids,
                             size_t *count)
{
    const struct nb_message message = {NB_ROLE_USER, text, strlen(text)};
    char *prompt;
    size_t len;
    enum nb_status rc = nb_chat_prompt(nb_engine_chat(engine), &message, 1, false, &prompt, &len);
    if (rc == NB_OK)
        rc = nb_tokenizer_encode(nb_engine_tokenizer(engine), prompt, len, true, ids, count);
    free(prompt); /* NULL after a failure */
    return rc;
}

int main(int argc, char **argv)
{
    struct nb_engine *engine = NULL;
    struct nb_engine_info info;
    struct nb_session *session = NULL;
    struct nb_generate_opts opts = {.max_tokens = 100, .text = show};
    struct nb_generate_result result = {0};
    int32_t *ids = NULL;
    size_t count = 0;
    if (argc != 3)
        return fprintf(stderr, "usage: generate MODEL TEXT\n"), 2;
    enum nb_status rc = nb_engine_open(&engine, &(struct nb_engine_opts){.model = argv[1]});
    if (rc == NB_OK)
        rc = nb_session_open(&session, engine, &(struct nb_session_opts){0});
    if (rc == NB_OK)
        rc = encode(engine, argv[2], &ids, &count);
    if (rc == NB_OK) {
        nb_engine_info(engine, &info);
        opts.sampling = info.sampling; /* as the model asks for */
        rc = nb_generate(session, ids, count, &opts, &result);
    }
    if (rc == NB_OK)
        printf("\n");
    else
        fprintf(stderr, "%s\n", nb_last_error());
    nb_generate_result_release(&result);
    free(ids);
    nb_session_close(session);
    nb_engine_close(engine);
    return rc != NB_OK;
}
