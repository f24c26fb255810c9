/* test_run_ahead.c - sessions that start the next step before the caller appends a token.
 *
 * Whatever the caller appends, the results must be those of a session that does not run ahead. */
#include <pthread.h>

#include "by_hand.h"
#include "host_model.h"

/* ---- a megakernel on the CPU ---- */

/* Stands in for a backend's megakernel: runs the forward pass of one row. */
struct nbi_megakernel {
    const struct nbi_weights *w;
    struct nbi_acts acts;
    struct nbi_stream *s;
    const struct nbi_kv_view *kv;
};

static const struct nbi_weights *fake_weights; /* of the model under test */
static int64_t runs_ahead;                     /* calls of megakernel_run_ahead */
static int64_t runs;                           /* calls of megakernel_run */
static enum nb_status (*real_run)(struct nbi_megakernel *t, const struct nbi_megakernel_step *step);

static enum nb_status counting_run(struct nbi_megakernel *t, const struct nbi_megakernel_step *step)
{
    runs++;
    return real_run(t, step);
}

static enum nb_status fake_new(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                               struct nbi_megakernel **out)
{
    struct nbi_megakernel *t = zeros(1, sizeof *t);
    t->w = fake_weights;
    t->s = s;
    t->kv = m->kv;
    assert_ok(
        nbi_acts_init(&t->acts, t->w->be, t->w->config, &(struct nbi_acts_opts){.N = 1, .M = 1}));
    *out = t;
    return NB_OK;
}

static enum nb_status fake_run(struct nbi_megakernel *t, const struct nbi_megakernel_step *step)
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

/* The index of the candidate that is sampled, computed the simple way. */
static int64_t sample_by_hand(const struct nbi_draw *d, const struct nb_candidate *best, int64_t k)
{
    int64_t w[NBI_TOPK_MAX], all = 0, likely = 0, top_p = 0, i = 0;
    for (int64_t j = 0; j < k; j++) {
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

static enum nb_status fake_run_ahead(struct nbi_megakernel *t,
                                     const struct nbi_megakernel_step *step,
                                     struct nbi_run_ahead *f)
{
    struct nbi_megakernel_step next = *step;
    int32_t topk[1 + 2 * NBI_TOPK_MAX];
    NBI_TRY(nbi_execute_topk(t->w, &t->acts, t->s, 1, f->k));
    NBI_TRY(t->w->be->download(t->s, topk, t->acts.topk, nbi_topk_bytes(1, f->k)));
    NBI_TRY(t->w->be->sync(t->s));
    f->nonfinite = !nbi_topk_row(f->candidates, topk, 0, 1, f->k);
    next.id = f->id =
        f->candidates[f->k > 1 ? sample_by_hand(&f->draw, f->candidates, f->k) : 0].id;
    runs_ahead++;
    return fake_run(t, &next);
}

static void fake_free(struct nbi_megakernel *t)
{
    nbi_acts_release(&t->acts);
    free(t);
}

/* Two sessions with the same tokens: one asks for the most likely next token, and so runs ahead;
 * the plain one asks for logits. */
struct two {
    struct nb_session *ahead, *plain;
    float *logits, *others;
    int64_t V;
    struct nbi_logits_spec next;
};

/* The candidate is the argmax of the plain session's logits. */
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
    assert_ok(nbi_session_append_next(t->ahead, ids, count, &t->next));
    assert_ok(nbi_session_append(t->plain, ids, count, t->logits, 1));
    check_next(t);
}

/* A random action of the caller after the next token is known. */
static void next_of_two(struct two *t, struct nbi_snapshot **kept)
{
    int32_t best = t->next.candidates[0].id, other = (int32_t)(bits32() % t->V);
    int64_t length = nbi_session_length(t->ahead), to = bits32() % (uint32_t)length + 1;
    switch (bits32() % 12) {
    case 0: /* another token */
        append_to_two(t, &other, 1);
        break;
    case 1: /* another history, perhaps with the token that was expected after the old one */
        nb_session_truncate(t->ahead, to - 1);
        nb_session_truncate(t->plain, to - 1);
        append_to_two(t, &other, 1);
        break;
    case 2:
        append_to_two(t, (int32_t[]){best, other, best}, 3);
        break;
    case 3: /* asks for logits */
        assert_ok(nbi_session_append(t->ahead, &best, 1, t->others, 1));
        assert_ok(nbi_session_append(t->plain, &best, 1, t->logits, 1));
        assert_memory_equal(t->others, t->logits, (size_t)t->V * sizeof(float));
        append_to_two(t, &other, 1);
        break;
    case 4: /* asks for nothing */
        assert_ok(nbi_session_append(t->ahead, &best, 1, NULL, 0));
        assert_ok(nbi_session_append(t->plain, &best, 1, NULL, 0));
        append_to_two(t, &other, 1);
        break;
    case 5: /* restores a snapshot and appends what was expected elsewhere */
        if (*kept) {
            assert_ok(nbi_session_restore(t->ahead, *kept));
            assert_ok(nbi_session_restore(t->plain, *kept));
            append_to_two(t, &best, 1);
        }
        break;
    case 6:
        nbi_snapshot_free(*kept);
        assert_ok(nbi_session_save(t->ahead, kept));
        /* fall through */
    default:
        append_to_two(t, &best, 1);
    }
}

/* 200 random actions, then up to the end of the context. */
static void check_actions(struct nbi_backend *be, struct model *m, const struct nbi_weights *w,
                          int64_t context)
{
    struct nb_engine e;
    struct two t = {.V = m->c.vocab_size, .next.k = 1};
    struct nbi_snapshot *kept = NULL;
    const struct nbi_session_opts opts = {.context = context, .kv = NBI_F16};
    assert_ok(nbi_engine_borrow(
        &e, &(struct nbi_engine_parts){.be = be, .config = &m->c, .weights = w, .threads = 1}));
    assert_ok(nbi_session_new(&t.ahead, &e, &opts));
    assert_ok(nbi_session_new(&t.plain, &e, &opts));
    t.logits = zeros(t.V, sizeof(float));
    t.others = zeros(t.V, sizeof(float));
    append_to_two(&t, (int32_t[]){1, 2, 3}, 3);
    for (int i = 0; i < 200; i++) {
        if (nbi_session_length(t.ahead) > opts.context - 4) {
            nb_session_truncate(t.ahead, 2);
            nb_session_truncate(t.plain, 2);
        }
        next_of_two(&t, &kept);
    }
    while (nbi_session_length(t.ahead) < opts.context) { /* fills the context */
        int32_t best = t.next.candidates[0].id;
        append_to_two(&t, &best, 1);
    }
    assert_int_equal(nbi_session_append_next(t.ahead, &t.next.candidates[0].id, 1, &t.next),
                     NB_EVALUE);
    nbi_snapshot_free(kept);
    nb_session_close(t.ahead);
    nb_session_close(t.plain);
    free(t.logits);
    free(t.others);
}

#define SAMPLED 50

/* Samples tokens from the top k, which runs ahead, or from all logits, which does not. */
static void sample_tokens(const struct nb_engine *e, const struct nb_sampling *how,
                          bool from_logits, int32_t ids[SAMPLED])
{
    struct nb_session *session;
    struct nbi_sampler sampler;
    struct nbi_logits_spec next = {0};
    int64_t V = e->config.vocab_size;
    float *logits = zeros(V, sizeof *logits);
    int32_t id = 5;
    assert_ok(nbi_session_new(&session, e,
                              &(struct nbi_session_opts){.context = SAMPLED, .kv = NBI_F16}));
    assert_ok(nbi_sampler_init(&sampler, how, V));
    next.k = nbi_sampler_topk(&sampler);
    assert_int_equal(next.k, how->top_k);
    for (int i = 0; i < SAMPLED; i++) {
        next.draw = nbi_sampler_draw(&sampler);
        if (from_logits) {
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

/* Sampled tokens are those that the same seed gives without running ahead, and nearly every step
 * has been started when it is asked for: megakernel_run is called once or twice. */
static void check_sampled(struct nbi_backend *be, struct model *m, const struct nbi_weights *w)
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
    be->megakernel_run = counting_run;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int32_t ahead[SAMPLED], plain[SAMPLED];
        int64_t different = 0;
        runs = 0;
        sample_tokens(&e, &all[i], false, ahead);
        assert_in_range(runs, 1, 2);
        sample_tokens(&e, &all[i], true, plain);
        assert_memory_equal(ahead, plain, sizeof plain);
        for (int j = 1; j < SAMPLED; j++)
            different += plain[j] != plain[j - 1];
        assert_true(different > SAMPLED / 2);
    }
    be->megakernel_run = real_run;
}

/* nb_generate gives the answer of a plain loop, and keeps up running ahead. */
static void check_generated(struct nbi_backend *be, struct model *m, const struct nbi_weights *w)
{
    static const int64_t top_k[] = {1, 20};
    static const int32_t prompt[] = {5, 6, 7};
    static struct by_hand wanted;
    struct nb_engine e;
    assert_ok(nbi_engine_borrow(
        &e, &(struct nbi_engine_parts){.be = be, .config = &m->c, .weights = w, .threads = 1}));
    for (int i = 0; i < 2; i++) {
        const struct nb_generate_opts o = {.sampling = {.temperature = 1,
                                                        .top_k = top_k[i],
                                                        .top_p = 0.9,
                                                        .repeat_penalty = 1,
                                                        .seed = 3},
                                           .max_tokens = SAMPLED};
        struct nb_generate_result r;
        struct nb_session *session;
        assert_ok(nb_session_open(
            &session, &e, &(struct nb_session_opts){.context = 2 * SAMPLED, .kv = NB_KV_F16}));
        real_run = be->megakernel_run;
        be->megakernel_run = counting_run;
        runs = 0;
        assert_ok(nb_generate(session, prompt, 3, &o, &r));
        be->megakernel_run = real_run;
        assert_in_range(runs, 1, 2);
        answer_by_hand(&e, 2 * SAMPLED, prompt, 3, &o, &wanted);
        assert_int_equal(r.count, SAMPLED);
        assert_memory_equal(r.ids, wanted.ids, sizeof(int32_t) * SAMPLED);
        nb_generate_result_release(&r);
        nb_session_close(session);
    }
}

static const struct shape run_ahead_shape = {256, 528, 2, 8, 2, 128, 1000, false, true, true};

static void test_run_ahead__gives_the_tokens_of_a_plain_session(void **state)
{
    struct model m;
    struct nbi_weights w;
    struct nbi_backend *be = cpu(nbi_simd_level(), 1);
    (void)state;
    drawn = 5;
    model_new(&m, &run_ahead_shape);
    assert_ok(
        nbi_weights_load(&w, be, &m.c, &(struct nbi_weight_provider){take_host, &m}, NULL, NULL));
    be->caps |= NBI_CAP_MEGAKERNEL | NBI_CAP_RUN_AHEAD;
    be->megakernel_new = fake_new;
    be->megakernel_run = fake_run;
    be->megakernel_run_ahead = fake_run_ahead;
    be->megakernel_free = fake_free;
    fake_weights = &w;
    runs_ahead = 0;
    check_actions(be, &m, &w, 60);
    assert_true(runs_ahead > 100);
    check_sampled(be, &m, &w);
    check_generated(be, &m, &w);
    nbi_weights_release(&w);
    model_free(&m);
    be->close(be);
}

static void scale_weight(struct model *m, int64_t layer, const char *name, float by)
{
    ((struct host_weight *)find(m, layer, name))->tensor_scale *= by;
}

/* The embedding on the device, then on the host. The second model has one more layer, and so other
 * rounds of sums in a token; residual updates as small as those of a trained model; and a context
 * so long that attention is split over CTAs. */
static void test_run_ahead__gives_the_tokens_of_a_plain_session_on_a_gpu(void **state)
{
    (void)state;
    need_gpu();
    for (int i = 0; i < 2; i++) {
        struct model m;
        struct nbi_weights w;
        struct nbi_backend *be = cuda();
        struct shape shape = run_ahead_shape;
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
        check_actions(be, &m, &w, i == 0 ? 60 : 230);
        check_sampled(be, &m, &w);
        check_generated(be, &m, &w);
        nbi_weights_release(&w);
        model_free(&m);
        be->close(be);
    }
}

/* A thread that uses the engine. */
struct user {
    const struct nb_engine *e;
    enum nb_status rc;
    bool differs; /* a session gave other tokens than the one before */
    int32_t ids[24];
};

/* Opens 40 sessions in turn; each is closed while a step is running ahead. */
static void *use_sessions(void *ctx)
{
    struct user *u = ctx;
    for (int i = 0; i < 40 && u->rc == NB_OK; i++) {
        struct nb_session *session;
        struct nbi_logits_spec next = {.k = 1};
        int32_t id = 5;
        u->rc = nbi_session_new(&session, u->e,
                                &(struct nbi_session_opts){.context = 64, .kv = NBI_F16});
        for (size_t j = 0; j < sizeof u->ids / sizeof *u->ids && u->rc == NB_OK; j++) {
            u->rc = nbi_session_append_next(session, &id, 1, &next);
            id = next.candidates[0].id;
            u->differs = u->differs || (i > 0 && u->ids[j] != id);
            u->ids[j] = id;
        }
        nb_session_close(session);
    }
    return NULL;
}

/* CTAs of a megakernel wait for each other. With several sessions at a time none must be starved.
 */
static void test_run_ahead__several_threads_get_the_same_tokens_on_a_gpu(void **state)
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
    model_new(&m, &run_ahead_shape);
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
        assert_memory_equal(users[i].ids, users[0].ids, sizeof users[0].ids);
    }
    nbi_weights_release(&w);
    model_free(&m);
    be->close(be);
}

/* The megakernel sums updates of the residual stream in fixed point, up to 2^19 in magnitude. A
 * larger one in any layer must give NB_EVALUE, in this step and in those that attend to its keys.
 */
static void test_run_ahead__reports_values_too_large_on_a_gpu(void **state)
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
            model_new(&m, &run_ahead_shape);
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
        cmocka_unit_test(test_run_ahead__gives_the_tokens_of_a_plain_session),
        cmocka_unit_test(test_run_ahead__gives_the_tokens_of_a_plain_session_on_a_gpu),
        cmocka_unit_test(test_run_ahead__several_threads_get_the_same_tokens_on_a_gpu),
        cmocka_unit_test(test_run_ahead__reports_values_too_large_on_a_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
