/* question_set_file.c - reads a replay file and writes the identity set as two TSV files. */
#include <string.h>

#include "data/dataset.h"
#include "identity/question_set.h"

/* ---- reading ---- */

struct reading {
    struct nbi_identity_replay *replay;
    size_t cap;
    struct nbi_str prompt, answer;
};

static enum nb_status keep(struct nbi_arena *arena, const struct nbi_str *s, const char **out)
{
    char *copy;
    if (memchr(nbi_str_text(s), 0, s->len))
        return nbi_fail(NB_EFORMAT, "a NUL character");
    NBI_TRY(nbi_arena_string(arena, "replay", nbi_str_text(s), s->len, &copy));
    *out = copy;
    return NB_OK;
}

static enum nb_status read_pair(void *ctx, enum nbi_data_kind kind, const struct nbi_record *record,
                                const char *text)
{
    struct reading *r = ctx;
    struct nbi_identity_replay *replay = r->replay;
    struct nbi_prompt_pair pair;
    NBI_TRY(nbi_example_pair(kind, text, record->len, &r->prompt, &r->answer));
    NBI_TRY(keep(&replay->arena, &r->prompt, &pair.prompt));
    NBI_TRY(keep(&replay->arena, &r->answer, &pair.answer));
    if (replay->count == r->cap) {
        size_t cap = r->cap ? 2 * r->cap : 256;
        struct nbi_prompt_pair *p = realloc(replay->pair, cap * sizeof *p);
        if (!p)
            return nbi_fail_memory("replay pairs", cap * sizeof *p);
        replay->pair = p;
        r->cap = cap;
    }
    replay->pair[replay->count++] = pair;
    return NB_OK;
}

enum nb_status nbi_identity_read_replay(struct nbi_identity_replay *replay, const char *path)
{
    struct reading r = {.replay = replay};
    struct nbi_walk walk = {.fn = read_pair, .ctx = &r};
    struct nbi_source *src = NULL;
    memset(replay, 0, sizeof *replay);
    NBI_TRY(nbi_source_open(&src, path));
    enum nb_status rc = nbi_walk(&walk, src);
    if (rc == NB_OK && replay->count == 0)
        rc = nbi_fail(NB_EFORMAT, "'%s' has no line with a prompt and an answer", path);
    nbi_source_close(src);
    nbi_str_release(&r.prompt);
    nbi_str_release(&r.answer);
    if (rc != NB_OK)
        nbi_identity_replay_release(replay);
    return rc;
}

void nbi_identity_replay_release(struct nbi_identity_replay *r)
{
    if (!r)
        return;
    free(r->pair);
    nbi_arena_release(&r->arena);
    memset(r, 0, sizeof *r);
}

/* ---- writing ---- */

static void put_line(struct nbi_str *s, const struct nbi_identity_line *line)
{
    nbi_str_printf(s, "%s\t%s\n", line->prompt, line->answer);
}

static enum nb_status write_training(const char *path, const struct nbi_identity_set *set,
                                     const struct nb_identity_set_opts *opts)
{
    struct nbi_str s = {0};
    nbi_str_printf(&s,
                   "# prompt<TAB>answer; identity set made by nibble: seed %llu, %lld lines "
                   "wanted, %s replay\n",
                   (unsigned long long)opts->seed, (long long)opts->count,
                   opts->replay ? "given" : "built-in");
    for (size_t i = 0; i < set->count; i++)
        if (!set->line[i].held_out)
            put_line(&s, &set->line[i]);
    enum nb_status rc = nbi_str_status(&s);
    if (rc == NB_OK)
        rc = nbi_file_write(path, s.p, s.len);
    nbi_str_release(&s);
    return rc;
}

static enum nb_status write_held_out(const char *path, const struct nbi_identity_set *set)
{
    struct nbi_str s = {0};
    const struct nbi_identity_line *last = NULL;
    nbi_str_puts(&s, "# prompt<TAB>answer; questions that the training set does not hold\n");
    for (size_t i = 0; i < set->count; i++) {
        const struct nbi_identity_line *line = &set->line[i];
        if (!line->held_out)
            continue;
        if (!last || last->kind != line->kind || last->language != line->language)
            nbi_str_printf(&s, "# %s %s\n", nbi_question_kind_name(line->kind),
                           nbi_identity_language_name(line->language));
        put_line(&s, line);
        last = line;
    }
    enum nb_status rc = nbi_str_status(&s);
    if (rc == NB_OK)
        rc = nbi_file_write(path, s.p, s.len);
    nbi_str_release(&s);
    return rc;
}

/* Writes the held-out file first: if that fails, an older training set still matches its own. */
static enum nb_status write_both(const struct nb_identity_set_opts *opts, const char *held_out,
                                 const struct nbi_identity_set *set)
{
    if (opts->replay &&
        (nbi_path_same(opts->replay, opts->out) || nbi_path_same(opts->replay, held_out)))
        return nbi_fail(NB_EINVAL, "the output would replace the replay file '%s'", opts->replay);
    NBI_TRY(write_held_out(held_out, set));
    return nbi_in_place(write_training(opts->out, set, opts), held_out);
}

static void count_lines(struct nb_identity_set_report *report, const struct nbi_identity_set *set)
{
    memset(report, 0, sizeof *report);
    for (size_t i = 0; i < set->count; i++) {
        const struct nbi_identity_line *line = &set->line[i];
        int64_t *counts[NBI_QUESTION_KINDS] = {&report->identity, &report->contrast,
                                               &report->replay};
        ++*(line->held_out ? &report->held_out : counts[line->kind]);
    }
    report->left_out = (int64_t)set->left_out;
}

enum nb_status nb_identity_write(const struct nb_identity_set_opts *opts,
                                 struct nb_identity_set_report *report)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nbi_identity_replay replay = {0};
    struct nbi_identity_set set = {0};
    struct nbi_str held_out = {0};
    if (!opts->out || !nbi_has_extension(opts->out, ".tsv") || nbi_path_is_dir(opts->out))
        return nbi_fail(NB_EINVAL, "'%s' is no name for a .tsv file", opts->out ? opts->out : "");
    size_t stem = strlen(opts->out) - strlen(".tsv");
    nbi_str_append(&held_out, opts->out, stem);
    nbi_str_puts(&held_out, ".heldout.tsv");
    enum nb_status rc = nbi_str_status(&held_out);
    if (rc == NB_OK && opts->replay)
        rc = nbi_identity_read_replay(&replay, opts->replay);
    if (rc == NB_OK)
        rc = nbi_identity_make(&set, opts, replay.pair, replay.count);
    if (rc == NB_OK)
        rc = write_both(opts, nbi_str_text(&held_out), &set);
    if (rc == NB_OK && report)
        count_lines(report, &set);
    nbi_str_release(&held_out);
    nbi_identity_replay_release(&replay);
    nbi_identity_release(&set);
    return rc;
}
