/* test_ahead.c - sessions that compute a token that is likely to follow before anyone asks for it:
 * what they say is what others say, whatever comes instead. */
#include <pthread.h>

#include "infer/session.h"

#include "host_model.h"

/* ---- a token by itself, on the CPU ---- */

/* A backend's own way for single tokens, made of its operations. */
struct nbi_megakernel {
    const struct nbi_weights *w;
    struct nbi_acts acts;
    struct nbi_stream *s;
    const struct nbi_kv_view *kv;
};

static const struct nbi_weights *stood_in; /* of the model that it is for */
static int64_t followed;

/* Runs that a session asks for. */
static int64_t runs;
static enum nb_status (*real_run)(struct nbi_megakernel *t, const struct nbi_megakernel_step *step);

static enum nb_status counted_run(struct nbi_megakernel *t, const struct nbi_megakernel_step *step)
{
    runs++;
    return real_run(t, step);
}

static enum nb_status stand_in_new(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                                   struct nbi_megakernel **out)
{
    struct nbi_megakernel *t = zeros(1, sizeof *t);
    t->w = stood_in;
    t->s = s;
    t->kv = m->kv;
    assert_ok(
        nbi_acts_init(&t->acts, t->w->be, t->w->config, &(struct nbi_acts_opts){.N = 1, .M = 1}));
    *out = t;
    return NB_OK;
}

static enum nb_status stand_in_run(struct nbi_megakernel *t, const struct nbi_megakernel_step *step)
{
    static const int32_t first_row = 0;
    const struct nbi_pass pass = {.N = 1,
                                  .ids = &step->id,
                                  .positions = &step->position,
                                  .kv_rows = &step->kv_row,
                                  .first = &step->first,
                                  .last = &step->last,
                                  .M = 1,
                                  .rows = &first_row,
                                  .kv = t->kv,
                                  .one_row_per_sequence = true};
    NBI_TRY(nbi_execute(t->w, &t->acts, t->s, &pass));
    return t->w->be->copy(t->s, step->logits, t->acts.logits,
                          t->w->config->vocab_size * (int64_t)sizeof(float));
}

/* Which of the best is drawn, step by step. */
static int64_t draw_by_hand(const struct nbi_draw *d, const struct nb_candidate *best, int64_t J)
{
    int64_t w[NBI_TOPK_MAX], all = 0, likely = 0, top_p = 0, i = 0;
    for (int64_t j = 0; j < J; j++) {
        double x = ((double)best[j].logit - (double)best[0].logit) * d->inv_temperature;
        w[j] = x < -50 ? 0 : (int64_t)(expf((float)x) * d->unit);
        all += w[j];
        likely += x >= d->log_min_p ? w[j] : 0;
    }
    while (top_p < all && (double)top_p < d->top_p * (double)all)
        top_p += w[i++];
    int64_t left = likely < top_p ? likely : top_p,
            at = (int64_t)((unsigned __int128)d->uniform * (uint64_t)left >> 64);
    for (i = 0; at >= w[i]; i++)
        at -= w[i];
    return i;
}

static enum nb_status stand_in_follow(struct nbi_megakernel *t,
                                      const struct nbi_megakernel_step *step,
                                      struct nbi_run_ahead *f)
{
    struct nbi_megakernel_step next = *step;
    int32_t top[1 + 2 * NBI_TOPK_MAX];
    NBI_TRY(nbi_execute_topk(t->w, &t->acts, t->s, 1, f->k));
    NBI_TRY(t->w->be->download(t->s, top, t->acts.topk, nbi_topk_bytes(1, f->k)));
    NBI_TRY(t->w->be->sync(t->s));
    f->nonfinite = !nbi_topk_row(f->candidates, top, 0, 1, f->k);
    next.id = f->id = f->candidates[f->k > 1 ? draw_by_hand(&f->draw, f->candidates, f->k) : 0].id;
    followed++;
    return stand_in_run(t, &next);
}

static void stand_in_free(struct nbi_megakernel *t)
{
    nbi_acts_release(&t->acts);
    free(t);
}

/* Two sessions with the same tokens: one asks for the best to follow, the other for logits, which
 * nobody computes ahead. */
struct two {
    struct nb_session *asks, *plain;
    float *logits, *others;
    int64_t V;
    struct nbi_logits_spec next;
};

/* The best of the plain one's logits. */
static void check_next(const struct two *t)
{
    int32_t best = 0;
    for (int32_t i = 1; i < t->V; i++)
        best = t->logits[i] > t->logits[best] ? i : best;
    assert_int_equal(t->next.candidates[0].id, best);
    assert_true(t->next.candidates[0].logit == t->logits[best]);
}

static void append_to_two(struct two *t, const int32_t *ids, int64_t count)
{
    assert_ok(nbi_session_append_next(t->asks, ids, count, &t->next));
    assert_ok(nbi_session_append(t->plain, ids, count, t->logits, 1));
    check_next(t);
}

/* One of the things that may come behind the best being known. */
static void next_of_two(struct two *t, struct nbi_snapshot **kept)
{
    int32_t best = t->next.candidates[0].id, other = (int32_t)(bits32() % t->V);
    int64_t length = nb_session_length(t->asks), to = bits32() % (uint32_t)length + 1;
    switch (bits32() % 12) {
    case 0: /* another one */
        append_to_two(t, &other, 1);
        break;
    case 1: /* another history, and perhaps the token that was expected behind the old one */
        nb_session_truncate(t->asks, to - 1);
        nb_session_truncate(t->plain, to - 1);
        append_to_two(t, &other, 1);
        break;
    case 2:
        append_to_two(t, (int32_t[]){best, other, best}, 3);
        break;
    case 3: /* all logits */
        assert_ok(nbi_session_append(t->asks, &best, 1, t->others, 1));
        assert_ok(nbi_session_append(t->plain, &best, 1, t->logits, 1));
        assert_memory_equal(t->others, t->logits, (size_t)t->V * sizeof(float));
        append_to_two(t, &other, 1);
        break;
    case 4: /* nobody asks what follows */
        assert_ok(nbi_session_append(t->asks, &best, 1, NULL, 0));
        assert_ok(nbi_session_append(t->plain, &best, 1, NULL, 0));
        append_to_two(t, &other, 1);
        break;
    case 5: /* back to a copy, and on from there with what was expected elsewhere */
        if (*kept) {
            assert_ok(nbi_session_restore(t->asks, *kept));
            assert_ok(nbi_session_restore(t->plain, *kept));
            append_to_two(t, &best, 1);
        }
        break;
    case 6:
        nbi_snapshot_free(*kept);
        assert_ok(nbi_session_save(t->asks, kept));
        /* fall through */
    default:
        append_to_two(t, &best, 1);
    }
}

static void check_ahead(struct nbi_backend *be, struct model *m, const struct nbi_weights *w,
                        int64_t context)
{
    struct nb_engine e;
    struct two t = {.V = m->c.vocab_size, .next.k = 1};
    struct nbi_snapshot *kept = NULL;
    const struct nbi_session_opts opts = {.context = context, .kv = NBI_F16};
    assert_ok(nbi_engine_borrow(
        &e, &(struct nbi_engine_parts){.be = be, .config = &m->c, .weights = w, .threads = 1}));
    assert_ok(nbi_session_new(&t.asks, &e, &opts));
    assert_ok(nbi_session_new(&t.plain, &e, &opts));
    t.logits = zeros(t.V, sizeof(float));
    t.others = zeros(t.V, sizeof(float));
    append_to_two(&t, (int32_t[]){1, 2, 3}, 3);
    for (int i = 0; i < 200; i++) {
        if (nb_session_length(t.asks) > opts.context - 4) {
            nb_session_truncate(t.asks, 2);
            nb_session_truncate(t.plain, 2);
        }
        next_of_two(&t, &kept);
    }
    while (nb_session_length(t.asks) < opts.context) { /* to the very end */
        int32_t best = t.next.candidates[0].id;
        append_to_two(&t, &best, 1);
    }
    assert_int_equal(nbi_session_append_next(t.asks, &t.next.candidates[0].id, 1, &t.next),
                     NB_EVALUE);
    nbi_snapshot_free(kept);
    nb_session_close(t.asks);
    nb_session_close(t.plain);
    free(t.logits);
    free(t.others);
}

#define DRAWN 50

/* Tokens of a session that is asked for the best, or for all logits; there is no other. */
static void draw_tokens(const struct nb_engine *e, const struct nb_sampling *how, bool all,
                        int32_t ids[DRAWN])
{
    struct nb_session *session;
    struct nbi_sampler sampler;
    struct nbi_logits_spec next = {0};
    int64_t V = e->config.vocab_size;
    float *logits = zeros(V, sizeof *logits);
    int32_t id = 5;
    assert_ok(
        nbi_session_new(&session, e, &(struct nbi_session_opts){.context = DRAWN, .kv = NBI_F16}));
    assert_ok(nbi_sampler_init(&sampler, how, V));
    next.k = nbi_sampler_topk(&sampler);
    assert_int_equal(next.k, how->top_k);
    for (int i = 0; i < DRAWN; i++) {
        next.draw = nbi_sampler_draw(&sampler);
        if (all) {
            assert_ok(nbi_session_append(session, &id, 1, logits, 1));
            assert_ok(nbi_sampler_pick(&sampler, logits, &id));
        } else {
            assert_ok(nbi_session_append_next(session, &id, 1, &next));
            id = nbi_sampler_from_topk(&sampler, next.candidates);
        }
        ids[i] = id;
    }
    nbi_sampler_release(&sampler);
    nb_session_close(session);
    free(logits);
}

/* Tokens that are drawn: those that the same seed gives without any ahead, and nearly all of them
 * have been computed when they are asked for. */
static void check_drawn(struct nbi_backend *be, struct model *m, const struct nbi_weights *w)
{
    static const struct nb_sampling all[] = {
        {.temperature = 1, .top_k = 20, .top_p = 0.95, .repeat_penalty = 1, .seed = 1},
        {.temperature = 0.3, .top_k = 2, .top_p = 1, .repeat_penalty = 1, .seed = 2},
        {.temperature = 2, .top_k = 64, .top_p = 1, .repeat_penalty = 1, .seed = 3},
        {.temperature = 1.5, .top_k = 33, .top_p = 1, .min_p = 0.3, .repeat_penalty = 1, .seed = 4},
        {.temperature = 9, .top_k = 40, .top_p = 0.1, .min_p = 0.1, .repeat_penalty = 1, .seed = 5},
    };
    struct nb_engine e;
    assert_ok(nbi_engine_borrow(
        &e, &(struct nbi_engine_parts){.be = be, .config = &m->c, .weights = w, .threads = 1}));
    real_run = be->megakernel_run;
    be->megakernel_run = counted_run;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int32_t ahead[DRAWN], plain[DRAWN];
        int64_t different = 0;
        runs = 0;
        draw_tokens(&e, &all[i], false, ahead);
        assert_in_range(runs, 1, 2);
        draw_tokens(&e, &all[i], true, plain);
        assert_memory_equal(ahead, plain, sizeof plain);
        for (int j = 1; j < DRAWN; j++)
            different += plain[j] != plain[j - 1];
        assert_true(different > DRAWN / 2);
    }
    be->megakernel_run = real_run;
}

static const struct shape ahead_shape = {256, 528, 2, 8, 2, 128, 1000, false, true, true};

static void test_ahead__is_what_would_have_come(void **state)
{
    struct model m;
    struct nbi_weights w;
    struct nbi_backend *be = cpu(nbi_simd_level(), 1);
    (void)state;
    drawn = 5;
    model_new(&m, &ahead_shape);
    assert_ok(
        nbi_weights_load(&w, be, &m.c, &(struct nbi_weight_provider){take_host, &m}, NULL, NULL));
    be->megakernel_new = stand_in_new;
    be->megakernel_run = stand_in_run;
    be->megakernel_run_ahead = stand_in_follow;
    be->megakernel_free = stand_in_free;
    stood_in = &w;
    followed = 0;
    check_ahead(be, &m, &w, 60);
    assert_true(followed > 100);
    check_drawn(be, &m, &w);
    nbi_weights_release(&w);
    model_free(&m);
    be->close(be);
}

static void scale_weight(struct model *m, int64_t layer, const char *name, float by)
{
    ((struct host_weight *)find(m, layer, name))->tensor_scale *= by;
}

/* The embedding on the device and on the host. The second model has other numbers of sums in a
 * token, sums that are as small as those of a trained one, and more rows than go with one block. */
static void test_ahead__on_a_gpu(void **state)
{
    (void)state;
    need_gpu();
    for (int i = 0; i < 2; i++) {
        struct model m;
        struct nbi_weights w;
        struct nbi_backend *be = cuda();
        struct shape shape = ahead_shape;
        drawn = 6;
        shape.L += i;
        model_new(&m, &shape);
        m.no_lookup = i == 0;
        for (int64_t layer = 0; layer < shape.L && i == 1; layer++) {
            scale_weight(&m, layer, "self_attn.o_proj.weight", 0x1p-10f);
            scale_weight(&m, layer, "mlp.down_proj.weight", 0x1p-10f);
        }
        assert_ok(nbi_weights_load(&w, be, &m.c, &(struct nbi_weight_provider){take_host, &m}, NULL,
                                   NULL));
        check_ahead(be, &m, &w, i == 0 ? 60 : 230);
        check_drawn(be, &m, &w);
        nbi_weights_release(&w);
        model_free(&m);
        be->close(be);
    }
}

/* What one of several threads does with an engine, and what it hears. */
struct user {
    const struct nb_engine *e;
    enum nb_status rc;
    bool differs; /* from what it heard before */
    int32_t said[24];
};

/* Sessions one behind the other; each ends while it is ahead. */
static void *use_sessions(void *ctx)
{
    struct user *u = ctx;
    for (int i = 0; i < 40 && u->rc == NB_OK; i++) {
        struct nb_session *session;
        struct nbi_logits_spec next = {.k = 1};
        int32_t id = 5;
        u->rc = nbi_session_new(&session, u->e,
                                &(struct nbi_session_opts){.context = 64, .kv = NBI_F16});
        for (size_t j = 0; j < sizeof u->said / sizeof *u->said && u->rc == NB_OK; j++) {
            u->rc = nbi_session_append_next(session, &id, 1, &next);
            id = next.candidates[0].id;
            u->differs = u->differs || (i > 0 && u->said[j] != id);
            u->said[j] = id;
        }
        nb_session_close(session);
    }
    return NULL;
}

/* Kernels whose blocks wait for each other, of several sessions at a time. */
static void test_ahead__in_threads_on_a_gpu(void **state)
{
    struct model m;
    struct nbi_weights w;
    struct nb_engine e;
    struct user users[4] = {0};
    pthread_t threads[4];
    (void)state;
    need_gpu();
    struct nbi_backend *be = cuda();
    drawn = 8;
    model_new(&m, &ahead_shape);
    assert_ok(
        nbi_weights_load(&w, be, &m.c, &(struct nbi_weight_provider){take_host, &m}, NULL, NULL));
    assert_ok(nbi_engine_borrow(
        &e, &(struct nbi_engine_parts){.be = be, .config = &m.c, .weights = &w, .threads = 1}));
    for (int i = 0; i < 4; i++) {
        users[i].e = &e;
        assert_int_equal(pthread_create(&threads[i], NULL, use_sessions, &users[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(users[i].rc, NB_OK);
        assert_false(users[i].differs);
        assert_memory_equal(users[i].said, users[0].said, sizeof users[0].said);
    }
    nbi_weights_release(&w);
    model_free(&m);
    be->close(be);
}

/* One kernel a token adds up what is below 2^19, in each layer; more is not to pass for a number,
 * there or in what comes behind it. */
static void test_ahead__reports_values_too_large_on_a_gpu(void **state)
{
    (void)state;
    need_gpu();
    for (int64_t layer = 0; layer < 2; layer++)
        for (int o = 0; o < 2; o++) {
            struct model m;
            struct nbi_weights w;
            struct nb_engine e;
            struct nb_session *session;
            struct nbi_logits_spec next = {.k = 1};
            struct nbi_backend *be = cuda();
            drawn = 7;
            model_new(&m, &ahead_shape);
            scale_weight(&m, layer, o ? "self_attn.o_proj.weight" : "mlp.down_proj.weight",
                         0x1p30f);
            assert_ok(nbi_weights_load(&w, be, &m.c, &(struct nbi_weight_provider){take_host, &m},
                                       NULL, NULL));
            assert_ok(nbi_engine_borrow(
                &e,
                &(struct nbi_engine_parts){.be = be, .config = &m.c, .weights = &w, .threads = 1}));
            assert_ok(nbi_session_new(&session, &e,
                                      &(struct nbi_session_opts){.context = 8, .kv = NBI_F16}));
            assert_int_equal(nbi_session_append_next(session, &(int32_t){5}, 1, &next), NB_EVALUE);
            assert_int_equal(nbi_session_append_next(session, &(int32_t){6}, 1, &next), NB_EVALUE);
            next = (struct nbi_logits_spec){
                .k = 20, .draw = {.inv_temperature = 1, .unit = 0x1p40, .top_p = 1}};
            assert_int_equal(nbi_session_append_next(session, &(int32_t){7}, 1, &next), NB_EVALUE);
            nb_session_close(session);
            nbi_weights_release(&w);
            model_free(&m);
            be->close(be);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ahead__is_what_would_have_come),
        cmocka_unit_test(test_ahead__on_a_gpu),
        cmocka_unit_test(test_ahead__in_threads_on_a_gpu),
        cmocka_unit_test(test_ahead__reports_values_too_large_on_a_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
