/* by_hand.h - an answer generated the plain way: all logits of a session, one token after another,
 * no scheduler. */
#pragma once

#include "infer/sampler.h"
#include "infer/session.h"
#include "unit/support.h"

struct by_hand {
    int32_t ids[4096];
    int64_t count;
    enum nb_finish finish;
};

static inline bool ends_turn(const struct nb_engine *e, int32_t id)
{
    for (int i = 0; i < e->eos_count; i++)
        if (e->eos[i] == id)
            return true;
    return false;
}

static inline void answer_by_hand(const struct nb_engine *e, int64_t context, const int32_t *ids,
                                  size_t count, const struct nb_generate_opts *o,
                                  struct by_hand *out)
{
    struct nb_session *s;
    struct nbi_sampler sampler;
    float *logits = malloc((size_t)e->config.vocab_size * sizeof *logits);
    const struct nb_session_opts opts = {.kv = NB_KV_F16, .context = context};
    assert_non_null(logits);
    assert_ok(nb_session_open(&s, e, &opts));
    assert_ok(nbi_sampler_init(&sampler, &o->sampling, e->config.vocab_size));
    for (size_t i = 0; i < count; i++)
        nbi_sampler_accept(&sampler, ids[i]);
    assert_ok(nb_session_append(s, ids, (int64_t)count, logits));
    out->count = 0;
    for (bool done = false; !done;) {
        int32_t id;
        assert_true(out->count < 4096);
        assert_ok(nbi_sampler_pick(&sampler, logits, &id));
        nbi_sampler_accept(&sampler, id);
        out->ids[out->count++] = id;
        done = true;
        if (!o->ignore_eos && ends_turn(e, id))
            out->finish = NB_FINISH_STOP;
        else if (out->count == o->max_tokens)
            out->finish = NB_FINISH_LENGTH;
        else if (nbi_session_length(s) == context)
            out->finish = NB_FINISH_CONTEXT;
        else
            done = false;
        if (!done)
            assert_ok(nb_session_append(s, &id, 1, logits));
    }
    nbi_sampler_release(&sampler);
    nb_session_close(s);
    free(logits);
}
