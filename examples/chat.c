/* chat.c - a conversation on standard input and output: a line, an answer, a line, ...
 * Run it with models/nib; examples/README.md says how to build it. */
#include <nibble.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum nb_status show(void *ctx, const char *text, size_t len)
{
    (void)ctx;
    fwrite(text, 1, len, stdout);
    fflush(stdout);
    return NB_OK;
}

/* Answers each line. What was said before stays in the session, and is not computed again. */
static enum nb_status talk(struct nb_conversation *c, const struct nb_generate_opts *opts)
{
    char *line = NULL;
    size_t size = 0;
    enum nb_status rc = NB_OK;
    for (ssize_t len; rc == NB_OK && (len = getline(&line, &size, stdin)) > 0;) {
        struct nb_generate_result result = {0};
        rc = nb_conversation_answer(c, line, strcspn(line, "\n"), opts, &result);
        printf("\n");
        nb_generate_result_release(&result);
    }
    free(line);
    return rc;
}

int main(int argc, char **argv)
{
    struct nb_engine *engine = NULL;
    struct nb_engine_info info;
    struct nb_session *session = NULL;
    struct nb_conversation *conversation = NULL;
    struct nb_generate_opts opts = {.text = show};
    if (argc != 2)
        return fprintf(stderr, "usage: chat MODEL\n"), 2;
    enum nb_status rc = nb_engine_open(&engine, &(struct nb_engine_opts){.model = argv[1]});
    if (rc == NB_OK)
        rc = nb_session_open(&session, engine, &(struct nb_session_opts){0});
    if (rc == NB_OK)
        rc = nb_conversation_open(&conversation, session, false);
    if (rc == NB_OK) {
        nb_engine_info(engine, &info);
        opts.sampling = info.sampling;
        rc = talk(conversation, &opts);
    }
    if (rc != NB_OK)
        fprintf(stderr, "%s\n", nb_last_error());
    nb_conversation_close(conversation);
    nb_session_close(session);
    nb_engine_close(engine);
    return rc != NB_OK;
}
