/* ab_text.c - encodes prompts, answers and expected answers in the tokens of each model. */
#include <string.h>

#include "base/crc.h"
#include "base/jscan.h"
#include "base/str.h"
#include "eval/ab.h"
#include "eval/text_similarity.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/tokenizer.h"

enum nb_status nbi_ab_vocabulary(struct nbi_ab_side *side)
{
    const struct nb_tokenizer *t = side->engine->tokenizer;
    side->V = side->engine->config.vocab_size;
    side->tokens = nb_tokenizer_size(t);
    side->vocabulary = 0;
    for (int32_t id = 0; id < side->tokens; id++) {
        char *text;
        size_t len, unknown;
        NBI_TRY(nb_tokenizer_decode(t, &id, 1, &text, &len, &unknown));
        uint64_t header = (uint64_t)len << 1 | unknown;
        side->vocabulary = nbi_crc32c(side->vocabulary, &header, sizeof header);
        side->vocabulary = nbi_crc32c(side->vocabulary, text, len);
        free(text);
    }
    return NB_OK;
}

void nbi_ab_release_items(struct nbi_ab_side *side, int64_t count)
{
    for (int64_t i = 0; side->items && i < count; i++) {
        struct nbi_ab_item *item = &side->items[i];
        free(item->prompt.p);
        free(item->no_think.p);
        for (int t = 0; t < NB_AB_TEXTS; t++)
            free(item->text[t].p);
    }
    free(side->items);
    side->items = NULL;
}

/* ---- prompts ---- */

/* The tokens of a prompt. system: a message for prompts that have none; may be NULL. */
static enum nb_status chat_prompt(const struct nb_engine *e, const struct nb_prompt *p,
                                  const char *system, bool think, struct nbi_ab_ids *out)
{
    struct nbi_str messages = {0};
    char *text = NULL;
    size_t len = 0;
    if (system && !p->system) {
        nbi_str_puts(&messages, "[");
        nbi_chat_put_message(&messages, NB_ROLE_SYSTEM, system, strlen(system));
        nbi_str_puts(&messages, ",");
        nbi_str_puts(&messages, p->messages + 1); /* without its bracket */
    } else {
        nbi_str_puts(&messages, p->messages);
    }
    enum nb_status rc = nbi_str_status(&messages);
    if (rc == NB_OK)
        rc = nbi_chat_prompt(e->chat, messages.p, p->tools, think, &text, &len);
    if (rc == NB_OK)
        rc = nb_tokenizer_encode(e->tokenizer, text, len, true, &out->p, &out->count);
    free(text);
    nbi_str_release(&messages);
    return rc;
}

/* Encodes a text as an answer; one that has ended is followed by the end-of-message token. */
static enum nb_status encode_text(const struct nbi_ab *ab, const struct nb_engine *e,
                                  struct nbi_strview text, bool ended, struct nbi_ab_ids *out)
{
    struct nbi_str all = {0};
    nbi_str_append(&all, text.p, text.len);
    if (ended && !ab->opts->raw && nbi_bpe_added(nbi_tokenizer_bpe(e->tokenizer), NBI_IM_END) >= 0)
        nbi_str_puts(&all, NBI_IM_END);
    enum nb_status rc = nbi_str_status(&all);
    if (rc == NB_OK)
        rc = nb_tokenizer_encode(e->tokenizer, nbi_str_text(&all), all.len, true, &out->p,
                                 &out->count);
    nbi_str_release(&all);
    return rc;
}

static enum nb_status make_item(const struct nbi_ab *ab, const struct nb_engine *e,
                                const struct nb_prompt *p, struct nbi_ab_item *item)
{
    const struct nb_ab_opts *o = ab->opts;
    if (o->raw && p->count > 1)
        return nbi_fail(NB_EVALUE, "%lld messages make no text without the chat template",
                        (long long)p->count);
    NBI_TRY(o->raw ? nb_tokenizer_encode(e->tokenizer, p->text, strlen(p->text), true,
                                         &item->prompt.p, &item->prompt.count)
                   : chat_prompt(e, p, o->system, !o->no_think, &item->prompt));
    if (item->prompt.count < 1 || (int64_t)item->prompt.count >= e->config.max_position)
        return nbi_fail(NB_EVALUE, "the prompt has %zu tokens, and the model takes %lld",
                        item->prompt.count, (long long)e->config.max_position);
    if (!p->expected)
        return NB_OK;
    /* As in training, an expected answer without reasoning follows an empty think block. */
    if (!o->raw && !o->no_think && !nbi_starts_with(p->expected, NB_THINK_START))
        NBI_TRY(chat_prompt(e, p, o->system, false, &item->no_think));
    const struct nbi_strview expected = {p->expected, strlen(p->expected)};
    return encode_text(ab, e, expected, true, &item->text[NB_AB_EXPECTED]);
}

enum nb_status nbi_ab_prompts(struct nbi_ab *ab, int s)
{
    struct nbi_ab_side *side = &ab->side[s];
    int64_t count = ab->result->count;
    side->items = calloc((size_t)count, sizeof *side->items);
    if (!side->items)
        return nbi_fail_memory("prompts", (size_t)count * sizeof *side->items);
    for (int64_t i = 0; i < count; i++) {
        const struct nb_prompt *p = &ab->result->rows[i].prompt;
        NBI_TRY(nbi_context(make_item(ab, side->engine, p, &side->items[i]), "%s", p->place));
    }
    return NB_OK;
}

/* ---- the other side's answers ---- */

static enum nb_status copy_ids(struct nbi_ab_ids *out, const struct nbi_ab_ids *from)
{
    out->p = malloc((from->count + 1) * sizeof *out->p);
    if (!out->p)
        return nbi_fail_memory("tokens", from->count * sizeof *out->p);
    memcpy(out->p, from->p, from->count * sizeof *out->p);
    out->count = from->count;
    return NB_OK;
}

enum nb_status nbi_ab_encode_other(struct nbi_ab *ab, int s)
{
    struct nbi_ab_side *side = &ab->side[s], *other = &ab->side[!s];
    for (int64_t i = 0; i < ab->result->count; i++) {
        const struct nb_ab_answer *answer = &ab->result->rows[i].answer[!s];
        struct nbi_ab_ids *out = &side->items[i].text[!s];
        if (ab->result->same_vocabulary)
            NBI_TRY(copy_ids(out, &other->items[i].text[!s]));
        else
            NBI_TRY(encode_text(ab, side->engine, (struct nbi_strview){answer->text, answer->len},
                                answer->finish == NB_FINISH_STOP, out));
    }
    return NB_OK;
}
