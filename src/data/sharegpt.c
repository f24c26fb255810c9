/* sharegpt.c - turns "conversations" into "messages". */
#include "data/sharegpt.h"

/* The role of a speaker, or NULL. Some exports keep the roles' own names. */
static const char *role_of(struct nbi_jspan from)
{
    static const char *const names[][2] = {{"human", "user"},          {"user", "user"},
                                           {"gpt", "assistant"},       {"chatgpt", "assistant"},
                                           {"assistant", "assistant"}, {"system", "system"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (nbi_jequals(from, names[i][0]))
            return names[i][1];
    return NULL;
}

static void put_message(struct nbi_str *out, const char *role, struct nbi_jspan text, bool first)
{
    nbi_str_printf(out, "%s{\"role\":\"%s\",\"content\":", first ? "" : ",", role);
    nbi_str_append(out, text.p, text.len); /* JSON already */
    nbi_str_puts(out, "}");
}

static enum nb_status put_turn(struct nbi_str *out, struct nbi_jspan turn, size_t number,
                               bool first)
{
    const char *role = role_of(nbi_jget(turn, "from"));
    struct nbi_jspan value = nbi_jget(turn, "value");
    if (!role)
        return nbi_fail(NB_EFORMAT, "'from' of turn %zu is none of human, gpt and system", number);
    if (nbi_jtype(value) != NBI_JSTRING)
        return nbi_fail(NB_EFORMAT, "'value' of turn %zu must be text, it is %s", number,
                        nbi_jtype_text(value));
    put_message(out, role, value, first);
    return NB_OK;
}

static enum nb_status put_turns(struct nbi_str *out, struct nbi_jspan line, struct nbi_jspan turns)
{
    struct nbi_jspan key, turn, system = nbi_jget(line, "system");
    struct nbi_jiter it;
    bool first = true;
    if (nbi_jtype(turns) != NBI_JARRAY)
        return nbi_fail(NB_EFORMAT, "'conversations' must be an array, it is %s",
                        nbi_jtype_text(turns));
    if (nbi_jcount(turns) == 0)
        return nbi_fail(NB_EFORMAT, "'conversations' is empty");
    if (nbi_jtype(nbi_jget(line, "tools")) > NBI_JNULL)
        return nbi_fail(NB_EFORMAT, "'tools' go with 'messages', not with 'conversations'");
    if (nbi_jtype(system) > NBI_JNULL && nbi_jtype(system) != NBI_JSTRING)
        return nbi_fail(NB_EFORMAT, "'system' must be a string, it is %s", nbi_jtype_text(system));
    nbi_str_puts(out, "{\"messages\":[");
    if (nbi_jtype(system) == NBI_JSTRING && system.len > 2) { /* more than its quotes */
        put_message(out, "system", system, first);
        first = false;
    }
    nbi_jiter_init(&it, turns);
    for (size_t n = 1; nbi_jiter_next(&it, &key, &turn); n++, first = false)
        NBI_TRY(put_turn(out, turn, n, first));
    nbi_str_puts(out, "]}");
    return nbi_str_status(out);
}

enum nb_status nbi_sharegpt_messages(struct nbi_jspan line, struct nbi_str *scratch,
                                     struct nbi_jspan *object)
{
    struct nbi_jspan turns = nbi_jget(line, "conversations");
    *object = (struct nbi_jspan){0};
    if (nbi_jtype(nbi_jget(line, "messages")) > NBI_JNULL) {
        *object = line;
        return NB_OK;
    }
    if (nbi_jtype(turns) <= NBI_JNULL)
        return NB_OK;
    scratch->len = 0;
    NBI_TRY(put_turns(scratch, line, turns));
    return nbi_jscan(object, scratch->p, scratch->len);
}
