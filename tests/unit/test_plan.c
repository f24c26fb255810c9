/* test_plan.c - plans of memory: on a GPU, what is allocated is what was planned, to the byte, and
 * nothing is allocated after the first step; without one, the parts add up and sizes follow from
 * the shapes. */
#include "backend/backend.h"
#include "on_devices.h"

#define STEPS 3

static const char model_json[] =
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"head_dim\": 64,"
    "\"hidden_act\": \"silu\", \"hidden_size\": 64, \"intermediate_size\": 160,"
    "\"max_position_embeddings\": 256, \"num_attention_heads\": 2, \"num_hidden_layers\": 3,"
    "\"num_key_value_heads\": 1, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0,"
    "\"tie_word_embeddings\": %s, \"torch_dtype\": \"bfloat16\", \"vocab_size\": 672}";

struct setting {
    enum nb_precision precision;
    enum nb_compute compute;
    enum nb_moment_type moments;
    enum nb_weight_store store;
    bool f32_master, recompute, fused_step, slices, bf16_gradients, untied;
    int64_t batch, accum, last_layers;
};

static const struct setting settings[] = {
    {.precision = NB_PRECISION_NVFP4, .moments = NB_MOMENT_INT8, .batch = 2, .accum = 1},
    {.precision = NB_PRECISION_NVFP4,
     .moments = NB_MOMENT_NVFP4,
     .store = NB_WEIGHT_STORE_SCALES,
     .recompute = true,
     .fused_step = true,
     .slices = true,
     .bf16_gradients = true,
     .batch = 1,
     .accum = 1},
    {.precision = NB_PRECISION_NVFP4,
     .store = NB_WEIGHT_STORE_BF16,
     .f32_master = true,
     .batch = 1,
     .accum = 3},
    {.precision = NB_PRECISION_BF16, .moments = NB_MOMENT_BF16, .batch = 5, .accum = 1},
    {.precision = NB_PRECISION_BF16,
     .compute = NB_COMPUTE_F32,
     .f32_master = true,
     .recompute = true,
     .batch = 2,
     .accum = 1},
    {.precision = NB_PRECISION_F32, .f32_master = true, .batch = 2, .accum = 2},
    {.precision = NB_PRECISION_F32,
     .moments = NB_MOMENT_INT8,
     .f32_master = true,
     .fused_step = true,
     .slices = true,
     .untied = true,
     .batch = 3,
     .accum = 1},
    {.precision = NB_PRECISION_NVFP4, .untied = true, .batch = 2, .accum = 1, .last_layers = 1},
    {.precision = NB_PRECISION_BF16, .batch = 1, .accum = 2, .last_layers = 2},
    {.precision = NB_PRECISION_NVFP4,
     .compute = NB_COMPUTE_F32,
     .moments = NB_MOMENT_NVFP4,
     .fused_step = true,
     .untied = true,
     .batch = 4,
     .accum = 1}};

#define SETTINGS ((int)(sizeof settings / sizeof *settings))

/* Writes a config, and a model of it where layers are kept as they are stored. */
static struct nb_train_opts options(const struct setting *s)
{
    char text[1024];
    struct nb_train_opts o;
    snprintf(text, sizeof text, model_json, s->untied ? "false" : "true");
    put("config.json", text);
    nb_train_defaults(&o);
    o.steps = STEPS;
    o.seq_len = 16;
    o.batch_size = s->batch;
    o.grad_accum = s->accum;
    o.precision = s->precision;
    o.compute = s->compute;
    o.moment_type = s->moments;
    o.weight_store = s->store;
    o.bf16_master = !s->f32_master;
    o.recompute = s->recompute;
    o.fused_step = s->fused_step;
    o.head_slices = s->slices;
    o.bf16_gradients = s->bf16_gradients;
    o.train_last_layers = s->last_layers;
    o.lr = 1e-3;
    o.device = "cuda";
    o.config = test_path("config.json");
    if (s->last_layers > 0) {
        const struct nb_synth_opts synth = {.config = o.config, .dst = test_path("model")};
        nbi_remove_tree(synth.dst);
        assert_ok(nb_synth(&synth));
        o.model = synth.dst;
        o.config = NULL;
        o.random_tokens = true;
    }
    return o;
}

static struct nb_train_opts of_4b(void)
{
    struct nb_train_opts o;
    nb_train_defaults(&o);
    o.synthetic = "4b";
    o.device = "cuda";
    o.seq_len = 2048;
    o.batch_size = 8;
    o.grad_accum = 1;
    o.precision = NB_PRECISION_NVFP4;
    o.moment_type = NB_MOMENT_INT8;
    o.bf16_master = true;
    return o;
}

/* ---- on a GPU ---- */

struct watch {
    struct nbi_backend *be;
    int64_t before, started; /* bytes that were free */
    int64_t planned, rounding;
    int steps, answers;
};

static int64_t unused(struct nbi_backend *be)
{
    struct nbi_memory memory;
    assert_ok(be->memory(be, &memory));
    return memory.unused;
}

static void at_start(void *ctx, const struct nb_train_result *r)
{
    struct watch *w = ctx;
    w->started = unused(w->be);
    w->rounding = r->plan.rounding;
    w->planned = r->plan.total - r->plan.rounding - r->plan.context;
}

/* The emulated GPU counts bytes as they are asked for; a real one in blocks, and it loads kernels
 * when they are first launched. */
static void compare_memory(const struct watch *w)
{
    int64_t taken = w->before - unused(w->be);
#ifdef NB_TEST_EMULATED
    if (taken != w->planned || w->before - w->started != w->planned)
        fail_msg("step %d: %lld bytes, %lld at the start, %lld planned", w->steps, (long long)taken,
                 (long long)(w->before - w->started), (long long)w->planned);
#else
    assert_true(taken >= w->planned);
    assert_true(taken <= w->planned + w->rounding + ((int64_t)256 << 20));
#endif
}

static void after_step(void *ctx, const struct nb_train_progress *p)
{
    struct watch *w = ctx;
    w->steps++;
    assert_int_equal(p->step, w->steps);
    compare_memory(w);
}

/* The last call of a run. */
static void at_end(void *ctx, const struct nb_train_answer *a)
{
    struct watch *w = ctx;
    assert_true(a->before && a->after);
    w->answers++;
    compare_memory(w);
}

/* Trains and compares what is taken with the plan; returns how many answers there were. */
static int train_watched(struct nb_train_opts *o)
{
    struct nb_train_result r;
    struct watch w = {0};
    assert_ok(nbi_backend_open(&w.be, &(struct nbi_backend_opts){.device = "cuda"}));
    w.before = unused(w.be);
    o->started = at_start;
    o->progress = after_step;
    o->answered = at_end;
    o->ctx = &w;
    assert_ok(nb_train(o, &r));
    assert_int_equal(w.steps, STEPS);
    assert_true(w.planned > 0);
    w.be->close(w.be);
    return w.answers;
}

static void test_plan__is_exact_on_cuda(void **state)
{
    (void)state;
    need_gpu();
    for (int i = 0; i < SETTINGS; i++) {
        struct nb_train_opts o = options(&settings[i]);
        assert_int_equal(train_watched(&o), 0);
    }
}

/* Evaluations, checkpoints, the result and answers to test prompts take nothing that was not
 * planned either. */
static void test_plan__is_exact_to_the_end_on_cuda(void **state)
{
    (void)state;
    char *tokenizer;
    size_t len;
    const char *const data[] = {test_path("a.txt"), NULL};
    const struct setting s = {
        .precision = NB_PRECISION_NVFP4, .moments = NB_MOMENT_INT8, .batch = 2, .accum = 1};
    need_gpu();
    struct nb_train_opts o = options(&s);
    const struct nb_synth_opts synth = {.config = o.config, .dst = test_path("whole")};
    assert_ok(nb_synth(&synth));
    assert_ok(nbi_file_read(NB_TEST_SOURCE "/golden/tokenizer/qwen/tokenizer.json", 1 << 20,
                            &tokenizer, &len));
    assert_ok(nbi_file_write(test_path("whole/tokenizer.json"), tokenizer, len));
    free(tokenizer);
    put("a.txt", "the cat runs over the hill\nand the dog sees a blue sky after the rain\n");
    put("prompts.txt", "the cat\n");
    o.model = synth.dst;
    o.config = NULL;
    o.data = o.eval_data = data;
    o.eval_every = 1;
    o.save_every = 2;
    o.checkpoint_dir = test_path("checkpoints");
    o.test_prompts = test_path("prompts.txt");
    o.out = test_path("tuned");
    assert_int_equal(train_watched(&o), 1);
}

#ifdef NB_TEST_EMULATED
extern int64_t nb_emulated_products, nb_emulated_waits, nb_emulated_downloads, nb_emulated_pageable;

/* Until the end of each step. */
struct counts {
    int64_t products[STEPS], waits[STEPS], downloads[STEPS], pageable[STEPS];
    int steps;
};

static void count_work(void *ctx, const struct nb_train_progress *p)
{
    struct counts *c = ctx;
    (void)p;
    c->products[c->steps] = nb_emulated_products;
    c->waits[c->steps] = nb_emulated_waits;
    c->downloads[c->steps] = nb_emulated_downloads;
    c->pageable[c->steps++] = nb_emulated_pageable;
}

static struct counts counts_of(const struct setting *s)
{
    struct nb_train_opts o = options(s);
    struct nb_train_result r;
    struct counts c = {0};
    o.progress = count_work;
    o.ctx = &c;
    assert_ok(nb_train(&o, &r));
    assert_int_equal(c.steps, STEPS);
    return c;
}

/* The host queues a whole step and waits once: for the losses of each micro-batch and for the
 * norms. No copy makes it wait in between. */
static void test_plan__one_wait_a_step_on_cuda(void **state)
{
    (void)state;
    struct setting ways[] = {settings[0], settings[1], settings[5], settings[7]};
    ways[0].accum = 7;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct counts c = counts_of(&ways[i]);
        for (int k = 1; k < STEPS; k++) {
            assert_int_equal(c.waits[k] - c.waits[k - 1], 1);
            assert_int_equal(c.downloads[k] - c.downloads[k - 1], ways[i].accum + 1);
            assert_int_equal(c.pageable[k] - c.pageable[k - 1], 0);
        }
    }
}

/* q, k and v are one product, and so are gate and up: forward, in the gradient of their input, and
 * in that of their weights, which are one block. With o and down that is four of each in a layer,
 * and three of the head. The first step also compares algorithms. */
static void test_plan__products_of_a_step_on_cuda(void **state)
{
    (void)state;
    const int64_t layers = 3, want = layers * 3 * 4 + 3;
    const struct setting ways[] = {
        {.precision = NB_PRECISION_NVFP4, .batch = 2, .accum = 1},
        {.precision = NB_PRECISION_NVFP4, .store = NB_WEIGHT_STORE_BF16, .batch = 2, .accum = 1},
        {.precision = NB_PRECISION_NVFP4, .store = NB_WEIGHT_STORE_SCALES, .batch = 2, .accum = 1},
        {.precision = NB_PRECISION_NVFP4, .bf16_gradients = true, .batch = 2, .accum = 1},
        {.precision = NB_PRECISION_NVFP4, .fused_step = true, .batch = 2, .accum = 1},
        {.precision = NB_PRECISION_BF16, .batch = 2, .accum = 1},
        {.precision = NB_PRECISION_BF16, .f32_master = true, .batch = 2, .accum = 1},
        {.precision = NB_PRECISION_NVFP4, .untied = true, .batch = 2, .accum = 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct counts c = counts_of(&ways[i]);
        int64_t got = c.products[2] - c.products[1];
        if (got != want)
            fail_msg("way %d: %lld products, %lld expected", (int)i, (long long)got,
                     (long long)want);
    }
}
#endif

/* The emulated GPU has 16 GiB, none of which the context takes. */
static void test_plan__more_than_there_is_on_cuda(void **state)
{
    (void)state;
    struct nb_train_opts o = of_4b();
    struct nb_train_result r;
    o.steps = 1;
    need_gpu();
#ifdef NB_TEST_EMULATED
    assert_fails(nb_train(&o, &r), NB_ENOMEM, "of GPU memory, but only 16.52 GiB is free");
    assert_fails(nb_train(&o, &r), NB_ENOMEM, "--device cuda and --fit 17.0 lists settings");
#else
    o.batch_size = 64;
    o.seq_len = 32768;
    assert_fails(nb_train(&o, &r), NB_ENOMEM, "of GPU memory, but only");
#endif
}

/* ---- without one ---- */

static int64_t parts_of(const struct nb_train_plan *p)
{
    return p->masters + p->moments + p->gradients + p->weights + p->activations + p->scratch +
           p->prompts + p->tables + p->rounding + p->context;
}

static void test_plan__needs_no_device(void **state)
{
    (void)state;
    for (int i = 0; i < SETTINGS; i++) {
        struct nb_train_opts o = options(&settings[i]);
        struct nb_train_plan gpu, cpu;
        assert_ok(nb_train_plan(&o, &gpu));
        assert_true(gpu.gpu && gpu.context > 0 && gpu.tables > 0 && gpu.rounding > 0);
        assert_int_equal(gpu.total, parts_of(&gpu));
        o.device = "cpu";
        o.compute = gpu.compute;
        assert_ok(nb_train_plan(&o, &cpu));
        assert_false(cpu.gpu);
        assert_int_equal(cpu.total, parts_of(&cpu) + cpu.host);
        assert_int_equal(cpu.tables + cpu.rounding + cpu.context, 0);
        assert_int_equal(cpu.masters, gpu.masters);
        assert_int_equal(cpu.moments, gpu.moments);
        assert_int_equal(cpu.gradients, gpu.gradients);
        assert_int_equal(cpu.parameters, gpu.parameters);
    }
}

/* A 4B model: 4,022,468,096 parameters, of which 3,633,315,840 are in matrices of layers, whose
 * vectors have 36 (2 * 2560 + 2 * 128) values, and 2560 are the final norm's. */
static void test_plan__a_4b_model(void **state)
{
    (void)state;
    const int64_t matrices = 3633315840, embedding = (int64_t)151936 * 2560;
    const int64_t vectors = 36 * (2 * 2560 + 2 * 128) + 2560;
    struct nb_train_opts o;
    struct nb_train_plan p;
    nb_train_defaults(&o);
    o.synthetic = "4b";
    o.device = "cuda";
    o.seq_len = 2048;
    o.batch_size = o.grad_accum = 1;
    o.precision = NB_PRECISION_NVFP4;
    o.bf16_master = o.fused_step = o.recompute = o.bf16_gradients = true;
    o.moment_type = NB_MOMENT_NVFP4;
    o.weight_store = NB_WEIGHT_STORE_SCALES;
    assert_ok(nb_train_plan(&o, &p));
    assert_int_equal(p.parameters, matrices + embedding + vectors);
    assert_int_equal(p.masters, 2 * (matrices + embedding) + 4 * vectors);
    assert_int_equal(p.moments, 2 * ((matrices + embedding) / 16 * 9 + 4 * vectors));
    assert_int_equal(p.weights, (matrices + embedding) / 16 + 4 * vectors);
    assert_int_equal(p.gradients, 4 * (embedding + 2560 + 2 * 2560 + 2 * 128) + 2 * matrices / 36);
    assert_int_equal(p.compute, NB_COMPUTE_BF16);
}

/* What is found takes what its plan says, and leaves half a GiB of the card. The smallest card
 * takes all that saves memory, the largest is fast and precise. */
static void test_plan__fits_a_card(void **state)
{
    (void)state;
    const double cards[] = {16, 24, 32, 48, 80, 141};
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
        struct nb_train_opts o = of_4b(), found;
        struct nb_train_fit fits[10], smallest;
        struct nb_train_plan p;
        int count = 10;
        assert_ok(nb_train_fit(&o, cards[i], 0, fits, &count, &smallest));
        assert_true(count > 0);
        for (int k = 0; k < count; k++) {
            found = o;
            nb_train_fit_use(&found, &fits[k]);
            assert_ok(nb_train_plan(&found, &p));
            assert_int_equal(p.total, fits[k].total);
            assert_true((double)p.total <= (cards[i] - 0.5) * 0x1p30);
            assert_true(smallest.total <= p.total);
        }
        const struct nb_train_fit *f = &fits[0];
        if (cards[i] == 16)
            assert_true(f->recompute && f->fused_step && f->moment_type == NB_MOMENT_NVFP4 &&
                        f->weight_store == NB_WEIGHT_STORE_SCALES);
        if (cards[i] == 141)
            assert_true(!f->recompute && !f->fused_step && f->batch_size == 8 &&
                        f->moment_type == NB_MOMENT_F32 && !f->bf16_master &&
                        f->weight_store == NB_WEIGHT_STORE_BF16);
    }
}

static void test_plan__fit_keeps_what_is_given(void **state)
{
    (void)state;
    const unsigned all = (1u << NB_FIT_BATCH << 1) - 1;
    struct nb_train_opts o = of_4b();
    struct nb_train_fit fits[10], smallest;
    int count = 10;
    assert_ok(nb_train_fit(&o, 1000, all, fits, &count, &smallest));
    assert_int_equal(count, 1);
    assert_int_equal(fits[0].batch_size, 8);
    assert_int_equal(fits[0].moment_type, NB_MOMENT_INT8);
    assert_true(fits[0].bf16_master && !fits[0].recompute && !fits[0].fused_step);
    assert_int_equal(fits[0].weight_store, NB_WEIGHT_STORE_AUTO);
    count = 10;
    o.moment_type = NB_MOMENT_F32;
    assert_ok(nb_train_fit(&o, 16, 1u << NB_FIT_MOMENTS, fits, &count, &smallest));
    assert_int_equal(count, 0);
    assert_int_equal(smallest.moment_type, NB_MOMENT_F32);
    assert_true(smallest.recompute && smallest.fused_step && smallest.batch_size == 1);
    assert_int_equal(smallest.weight_store, NB_WEIGHT_STORE_SCALES);
}

static void test_plan__blocks_as_the_driver_rounds_them(void **state)
{
    (void)state;
    const int64_t mib = 1 << 20;
    struct nbi_backend *be;
    assert_ok(nbi_backend_describe(&be, &(struct nbi_backend_opts){.device = "cuda:7"}));
    const int64_t blocks[] = {1, 513, mib, mib + 1, 2 * mib, 5 * mib};
    assert_int_equal(be->reserved_bytes(blocks, 2), 2 * mib);
    assert_int_equal(be->reserved_bytes(blocks, 3), 2 * mib);
    assert_int_equal(be->reserved_bytes(blocks + 3, 3), (2 + 2 + 6) * mib);
    assert_int_equal(be->reserved_bytes(blocks, 6), (2 + 10) * mib);
    assert_true(nbi_backend_has(be, NBI_CAP_TRAIN | NBI_CAP_OWN_MEMORY));
    be->close(be);
    assert_fails(nbi_backend_describe(&be, &(struct nbi_backend_opts){.device = "tpu"}),
                 NB_EUNSUPPORTED, "unknown device 'tpu'");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan__is_exact_on_cuda),
        cmocka_unit_test(test_plan__is_exact_to_the_end_on_cuda),
        cmocka_unit_test(test_plan__more_than_there_is_on_cuda),
#ifdef NB_TEST_EMULATED
        cmocka_unit_test(test_plan__one_wait_a_step_on_cuda),
        cmocka_unit_test(test_plan__products_of_a_step_on_cuda),
#endif
        cmocka_unit_test(test_plan__needs_no_device),
        cmocka_unit_test(test_plan__a_4b_model),
        cmocka_unit_test(test_plan__fits_a_card),
        cmocka_unit_test(test_plan__fit_keeps_what_is_given),
        cmocka_unit_test(test_plan__blocks_as_the_driver_rounds_them),
    };
    return cmocka_run_group_tests(tests, make_test_dir, remove_test_dir);
}
