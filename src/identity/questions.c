/* questions.c - selects questions from the identity set and detects identity answers. */
#include "identity/questions.h"

#include <string.h>

const char *nb_identity_kind_name(enum nb_identity_kind kind)
{
    static const char *const names[] = {"trained", "held-out", "contrast", "unrelated"};
    return names[kind];
}

static enum nb_identity_kind kind_of(const struct nbi_identity_line *line)
{
    if (line->kind == NBI_QUESTION_IDENTITY)
        return line->held_out ? NB_IDENTITY_HELD_OUT : NB_IDENTITY_TRAINED;
    return line->kind == NBI_QUESTION_CONTRAST ? NB_IDENTITY_CONTRAST : NB_IDENTITY_UNRELATED;
}

static enum nb_status choose(struct nbi_questions *q, int64_t each)
{
    int64_t taken[NB_IDENTITY_KINDS] = {0};
    q->lines = calloc(q->set.count, sizeof *q->lines);
    q->kinds = calloc(q->set.count, sizeof *q->kinds);
    if (!q->lines || !q->kinds)
        return nbi_fail_memory("questions", q->set.count * sizeof *q->lines);
    for (size_t i = 0; i < q->set.count; i++) {
        const struct nbi_identity_line *line = &q->set.line[i];
        enum nb_identity_kind kind = kind_of(line);
        if (each > 0 && taken[kind] >= each && !line->held_out)
            continue;
        taken[kind] += !line->held_out;
        q->lines[q->count] = line;
        q->kinds[q->count++] = kind;
    }
    return NB_OK;
}

static enum nb_status make_forms(struct nbi_questions *q)
{
    for (size_t i = 0; i < q->count; i++) {
        const struct nbi_identity_line *line = q->lines[i];
        if (line->kind != NBI_QUESTION_IDENTITY || q->forms[line->language])
            continue;
        q->forms[line->language] = nbi_identity_normal_form(line->answer);
        if (!q->forms[line->language])
            return NB_ENOMEM;
    }
    return NB_OK;
}

enum nb_status nbi_questions_make(struct nbi_questions *q, const struct nb_identity_set_opts *set,
                                  int64_t each)
{
    struct nbi_identity_replay replay = {0};
    *q = (struct nbi_questions){0};
    enum nb_status rc = set->replay ? nbi_identity_read_replay(&replay, set->replay) : NB_OK;
    if (rc == NB_OK)
        rc = nbi_identity_make(&q->set, set, replay.pair, replay.count);
    nbi_identity_replay_release(&replay);
    if (rc == NB_OK)
        rc = choose(q, each);
    if (rc == NB_OK)
        rc = make_forms(q);
    if (rc != NB_OK)
        nbi_questions_release(q);
    return rc;
}

void nbi_questions_release(struct nbi_questions *q)
{
    for (int i = 0; i < NBI_IDENTITY_LANGUAGES; i++)
        free(q->forms[i]);
    free(q->lines);
    free(q->kinds);
    nbi_identity_release(&q->set);
    *q = (struct nbi_questions){0};
}

enum nb_status nbi_says_identity(const struct nbi_questions *q, const char *text, size_t len,
                                 bool *yes)
{
    char *copy = strndup(text, len);
    char *normal = copy ? nbi_identity_normal_form(copy) : NULL;
    *yes = false;
    for (int i = 0; i < NBI_IDENTITY_LANGUAGES && normal; i++)
        *yes = *yes || (q->forms[i] && q->forms[i][0] && strstr(normal, q->forms[i]));
    free(copy);
    if (!normal)
        return nbi_fail_memory("an answer", len);
    free(normal);
    return NB_OK;
}
