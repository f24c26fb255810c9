/* resume.c - saves a run as a checkpoint, and restores it.
 *
 * A resumed run computes the same bits as one that was never interrupted. So the checkpoint's
 * settings hold everything that affects the computation, and resuming with others is refused; the
 * algorithms that a GPU chose are a blob. On another device, or with another library, a run goes on
 * all the same, and says that its bits are not those of an uninterrupted one. */
#include <math.h>
#include <string.h>

#include "base/log.h"
#include "convert/manifest.h"
#include "train/checkpoint.h"
#include "train/run.h"

/* The arrays of a parameter, each a blob. */
enum { MASTER, M, M_SCALES, V, V_SCALES, ARRAYS };

static const char *const array_names[ARRAYS] = {"master", "m", "m.scales", "v", "v.scales"};

struct array {
    char name[128];
    struct nbi_ptr at;
    int64_t bytes;
};

#define TUNING "tuning" /* the name of its blob */

/* Scalars of a parameter: m_scale, v_scale, m_max, v_max, tensor_scale, divisor. The first four are
 * those of a record, and the slices of embedding and head follow the parameters. */
#define SCALES 6

struct arrays {
    struct nbi_run *r;
    struct array *p;
    size_t count;
    float (*scales)[SCALES]; /* of all records */
    struct nbi_update_record *records;
    uint8_t *tuning; /* what the backend has measured */
    int64_t tuning_bytes;
};

static uint64_t scale_bytes(const struct nbi_run *r)
{
    return (uint64_t)r->optimizer.record_count * SCALES * sizeof(float);
}

static int arrays_of(const struct nbi_train_param *x, struct array out[ARRAYS])
{
    int64_t m_scales, v_scales;
    int64_t m = nbi_moment_bytes(x->m.kind, x->count, &m_scales);
    int64_t v = nbi_moment_bytes(x->v.kind, x->count, &v_scales);
    const struct nbi_ptr at[ARRAYS] = {x->master, x->m.values, x->m.scales, x->v.values,
                                       x->v.scales};
    const int64_t bytes[ARRAYS] = {(int64_t)nbi_dtype_bytes(x->dtype, x->count), m, m_scales, v,
                                   v_scales};
    int n = 0;
    for (int i = 0; i < ARRAYS; i++) {
        if (bytes[i] == 0)
            continue;
        out[n] = (struct array){.at = at[i], .bytes = bytes[i]};
        snprintf(out[n].name, sizeof out[n].name, "%s.%s", x->param.name, array_names[i]);
        n++;
    }
    return n;
}

static enum nb_status list_arrays(struct arrays *l, struct nbi_run *r)
{
    size_t n = (size_t)r->params.count, records = (size_t)r->optimizer.record_count;
    *l = (struct arrays){.r = r};
    l->p = malloc(n * ARRAYS * sizeof *l->p);
    l->scales = calloc(records, sizeof *l->scales);
    l->records = calloc(records, sizeof *l->records);
    if (!l->p || !l->scales || !l->records)
        return nbi_fail_memory("checkpoint", n * ARRAYS * sizeof *l->p);
    NBI_TRY(nbi_optimizer_read(&r->optimizer, l->records));
    for (size_t i = 0; i < records; i++) {
        const struct nbi_update_record *record = &l->records[i];
        const float scales[SCALES] = {record->m_scale[1], record->v_scale[1], record->m_max,
                                      record->v_max, 1};
        memcpy(l->scales[i], scales, sizeof scales);
    }
    for (size_t i = 0; i < n; i++) {
        const struct nbi_train_param *x = &r->params.tensors[i];
        l->scales[i][4] = x->has_tensor_scale ? x->weight->tensor_scale : 1;
        l->scales[i][5] = x->divisor;
        if (x->trained && !x->tied_to)
            l->count += (size_t)arrays_of(x, l->p + l->count);
    }
    return NB_OK;
}

static void release_arrays(struct arrays *l)
{
    free(l->p);
    free(l->scales);
    free(l->records);
    free(l->tuning);
}

/* ---- settings ---- */

/* Bits depend on this, or on more, which the backend knows (tuning_load). */
static const char *device_of(const struct nbi_run *r)
{
    return nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY) ? "cuda" : "cpu";
}

static void add_loss_settings(const struct nbi_run *r, json_t *j, bool *ok)
{
    double share = r->replay_data ? r->opts->replay_share : 0;
    bool f32_norms = r->opts->precision == NB_PRECISION_F32 ||
                     nbi_float_dtype_for(nbi_run_format(r->opts), 1, NBI_BF16) == NBI_F32;
    nbi_json_set(j, "device", json_string(device_of(r)), ok);
    nbi_json_set(j, "f32_norms", json_boolean(f32_norms), ok);
    nbi_json_set(j, "loss", json_integer(r->opts->loss), ok);
    nbi_json_set(j, "compute_dtype", json_string(nbi_run_computes_in_bf16(r) ? "bf16" : "f32"), ok);
    nbi_json_set(j, "bf16_gradients", json_boolean(r->opts->bf16_gradients), ok);
    nbi_json_set(j, "head_slices", json_integer(r->opts->head_slices ? NBI_SLICE_ROWS : 0), ok);
    nbi_json_set(j, "kl_base", json_real(r->opts->kl_base), ok);
    nbi_json_set(j, "replay_share", json_real(share), ok);
}

/* by_epochs: with a limit of epochs, rows do not continue into the next epoch. */
static void add_data_settings(const struct nbi_run *r, json_t *j, bool *ok)
{
    const struct nbi_dataset_stats none = {0}, *data = r->data ? nbi_dataset_stats(r->data) : &none,
                                   *replay =
                                       r->replay_data ? nbi_dataset_stats(r->replay_data) : &none;
    nbi_json_set(j, "data", json_integer(data->crc), ok);
    nbi_json_set(j, "replay_data", json_integer(replay->crc), ok);
    nbi_json_set(j, "eval_data", json_integer(r->fingerprint.eval), ok);
    nbi_json_set(j, "model", json_integer(r->fingerprint.model), ok);
    nbi_json_set(j, "frozen", json_integer(r->fingerprint.frozen), ok);
    nbi_json_set(j, "by_epochs", json_boolean(r->data && r->opts->epochs > 0), ok);
}

/* Evaluations affect the run only if they may end it. */
static void add_stop_settings(const struct nbi_run *r, json_t *j, bool *ok)
{
    double limit = r->opts->stop_if_ppl_rises;
    nbi_json_set(j, "stop_if_ppl_rises", json_real(limit), ok);
    nbi_json_set(j, "eval_every", json_integer(limit > 0 ? r->opts->eval_every : 0), ok);
}

/* Everything that affects the computation, as JSON. Threads do not. The number of steps does if the
 * learning rate depends on it, but it may be changed on purpose (may_differ). */
static enum nb_status settings_of(const struct nbi_run *r, char **text)
{
    const struct nb_train_opts *o = r->opts;
    bool decays = o->schedule != NB_SCHEDULE_CONSTANT;
    json_t *j = json_pack(
        "{s:s,s:i,s:b,s:i,s:I,s:I,s:I,s:f,s:f,s:i,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:b,s:I,s:b,s:b,s:I}",
        "version", nb_version(), "precision", (int)o->precision, "bf16_master", o->bf16_master,
        "state", (int)o->moment_type, "seq_len", (json_int_t)o->seq_len, "batch_size",
        (json_int_t)o->batch_size, "grad_accum", (json_int_t)o->grad_accum, "lr", o->lr,
        "final_lr_frac", o->final_lr_frac, "schedule", (int)o->schedule, "warmup",
        (json_int_t)r->lr_schedule.warmup, "steps", (json_int_t)(decays ? r->steps : 0), "beta1",
        o->beta1, "beta2", o->beta2, "eps", o->eps, "weight_decay", o->weight_decay, "grad_clip",
        o->grad_clip, "clip_by_layer", o->clip_by_layer || o->fused_step, "train_last_layers",
        (json_int_t)o->train_last_layers, "fused_step", o->fused_step, "sequential", o->sequential,
        "seed", (json_int_t)o->seed);
    bool ok = true;
    add_loss_settings(r, j, &ok);
    add_data_settings(r, j, &ok);
    add_stop_settings(r, j, &ok);
    enum nb_status rc = nbi_json_dump(ok ? j : NULL, JSON_SORT_KEYS, text);
    json_decref(j);
    return nbi_context(rc, "the run's settings");
}

/* Settings that are checksums or flags, with the message if they differ. */
static const char *const checksums[][2] = {
    {"model", "the model is not the one that the run began with"},
    {"frozen", "the model is not the one that the run began with: parameters that "
               "--train-last-layers leaves alone differ"},
    {"data", "--data is not what the run began with"},
    {"replay_data", "--replay is not what the run began with"},
    {"eval_data", "--eval-data is not what the run began with, and --stop-if-ppl-rises goes by it"},
    {"by_epochs", "with --epochs rows are others than with --steps alone, and the run began with "
                  "the other"}};

static const char *checksum_message(const char *key)
{
    for (size_t i = 0; i < sizeof checksums / sizeof *checksums; i++)
        if (strcmp(key, checksums[i][0]) == 0)
            return checksums[i][1];
    return NULL;
}

static enum nb_status differs(const char *key, const json_t *was, const json_t *is)
{
    const size_t flags = JSON_REAL_PRECISION(15);
    if (checksum_message(key))
        return nbi_fail(NB_EINVAL, "%s", checksum_message(key));
    char *a = NULL, *b = NULL;
    enum nb_status rc = was ? nbi_json_dump(was, flags, &a) : NB_OK;
    if (rc == NB_OK)
        rc = nbi_json_dump(is, flags, &b);
    if (rc == NB_OK)
        rc = nbi_fail(NB_EINVAL, "the run was begun with %s %s, not %s", key, a ? a : "(none)", b);
    free(a);
    free(b);
    return rc;
}

/* Adds what every run did before it was a setting. */
static enum nb_status add_defaults(json_t *settings)
{
    bool ok = true;
    if (!json_object_get(settings, "device"))
        nbi_json_set(settings, "device", json_string("cpu"), &ok);
    if (!json_object_get(settings, "compute_dtype"))
        nbi_json_set(settings, "compute_dtype", json_string("f32"), &ok);
    if (!json_object_get(settings, "bf16_gradients"))
        nbi_json_set(settings, "bf16_gradients", json_false(), &ok);
    if (!json_object_get(settings, "head_slices"))
        nbi_json_set(settings, "head_slices", json_integer(0), &ok);
    return ok ? NB_OK : nbi_fail_memory("settings", 0);
}

/* The version may change, and so may the length, with the rest of the schedule; and the device,
 * which may have its own types of activations and their gradients. */
static bool may_differ(const char *key, bool moved)
{
    return strcmp(key, "version") == 0 || strcmp(key, "steps") == 0 || strcmp(key, "device") == 0 ||
           (moved && (strcmp(key, "compute_dtype") == 0 || strcmp(key, "bf16_gradients") == 0));
}

/* Fails at the first setting that differs. Checksums come last because other settings change them,
 * and the message should name the cause. */
static enum nb_status compare_settings(const char *old_text, const char *new_text)
{
    json_t *was = NULL, *is = NULL, *v;
    const char *key;
    enum nb_status rc = nbi_json_parse(&was, old_text, strlen(old_text));
    if (rc == NB_OK)
        rc = nbi_json_parse(&is, new_text, strlen(new_text));
    if (rc == NB_OK)
        rc = add_defaults(was);
    rc = nbi_context(rc, "the run's settings");
    bool moved =
        rc == NB_OK && !json_equal(json_object_get(was, "device"), json_object_get(is, "device"));
    for (int pass = 0; pass < 2; pass++)
        json_object_foreach (is, key, v) {
            json_t *before = json_object_get(was, key);
            bool compared =
                (checksum_message(key) != NULL) == (pass == 1) && !may_differ(key, moved);
            if (rc == NB_OK && compared && !json_equal(before, v))
                rc = differs(key, before, v);
        }
    json_decref(was);
    json_decref(is);
    return rc;
}

/* ---- saving ---- */

static enum nb_status get(void *ctx, size_t index, uint64_t offset, void *dst, size_t len)
{
    const struct arrays *l = ctx;
    struct nbi_run *r = l->r;
    struct nbi_ptr from = nbi_ptr_add(l->p[index].at, (int64_t)offset);
    NBI_TRY(r->be->download(r->stream, dst, from, (int64_t)len));
    return r->be->sync(r->stream);
}

static enum nb_status write_arrays(struct nbi_run *r, struct arrays *l, const char *settings,
                                   bool accepted)
{
    const struct nbi_run_state *s = &r->state;
    const struct nbi_ckpt_value values[] = {nbi_ckpt_int("updates", s->updates),
                                            nbi_ckpt_int("skipped", s->skipped),
                                            nbi_ckpt_int("skipped_in_row", s->skipped_in_row),
                                            nbi_ckpt_int("tokens", s->tokens),
                                            nbi_ckpt_real("seconds", s->seconds),
                                            nbi_ckpt_real("best_loss", s->best_loss),
                                            nbi_ckpt_int("epoch", s->loader.epoch),
                                            nbi_ckpt_int("next", s->loader.next),
                                            nbi_ckpt_int("token", s->loader.token),
                                            nbi_ckpt_int("replay_epoch", s->replay_loader.epoch),
                                            nbi_ckpt_int("replay_next", s->replay_loader.next),
                                            nbi_ckpt_int("replay_token", s->replay_loader.token),
                                            nbi_ckpt_real("base_mark", r->kl_anchor.mean_top_logp),
                                            nbi_ckpt_int("evaluated", s->evaluated),
                                            nbi_ckpt_int("good", s->accepted),
                                            nbi_ckpt_int("stopped", s->stopped)};
    size_t count = l->count;
    struct nbi_ckpt_blob *blobs = calloc(l->count + 2, sizeof *blobs);
    if (!blobs)
        return nbi_fail_memory("checkpoint", (l->count + 2) * sizeof *blobs);
    for (size_t i = 0; i < l->count; i++)
        blobs[i] = (struct nbi_ckpt_blob){.name = l->p[i].name, .bytes = (uint64_t)l->p[i].bytes};
    blobs[count++] = (struct nbi_ckpt_blob){"scales", scale_bytes(r), l->scales};
    if (l->tuning)
        blobs[count++] = (struct nbi_ckpt_blob){TUNING, (uint64_t)l->tuning_bytes, l->tuning};
    const struct nbi_ckpt_content content = {.step = (uint64_t)s->step,
                                             .settings = settings,
                                             .values = values,
                                             .value_count = sizeof values / sizeof *values,
                                             .blobs = blobs,
                                             .blob_count = count,
                                             .get = get,
                                             .ctx = l,
                                             .overlap = nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY)};
    const char *dir = r->opts->checkpoint_dir;
    int keep = r->opts->keep > 0 ? r->opts->keep : 2;
    enum nb_status rc = accepted ? nbi_checkpoint_save_accepted(dir, &content)
                                 : nbi_checkpoint_save(dir, keep, &content);
    free(blobs);
    return rc;
}

static enum nb_status save_tuning(struct arrays *l, struct nbi_backend *be)
{
    if (!nbi_backend_has(be, NBI_CAP_TUNING))
        return NB_OK;
    l->tuning = malloc(NBI_TUNING_MAX);
    if (!l->tuning)
        return nbi_fail_memory("checkpoint", NBI_TUNING_MAX);
    l->tuning_bytes = be->tuning_save(be, l->tuning);
    return NB_OK;
}

static enum nb_status save(struct nbi_run *r, bool accepted)
{
    struct arrays l;
    char *settings = NULL;
    enum nb_status rc = list_arrays(&l, r);
    if (rc == NB_OK)
        rc = save_tuning(&l, r->be);
    if (rc == NB_OK)
        rc = settings_of(r, &settings);
    if (rc == NB_OK)
        rc = write_arrays(r, &l, settings, accepted);
    release_arrays(&l);
    free(settings);
    return nbi_context(rc, "saving a checkpoint in '%s'", r->opts->checkpoint_dir);
}

enum nb_status nbi_run_save(struct nbi_run *r)
{
    return save(r, false);
}

enum nb_status nbi_run_save_accepted(struct nbi_run *r)
{
    return save(r, true);
}

/* ---- resuming ---- */

struct target {
    struct nbi_run *r;
    struct nbi_ptr at;
};

static enum nb_status put(void *ctx, uint64_t offset, const void *src, size_t len)
{
    const struct target *t = ctx;
    return t->r->be->upload(t->r->stream, nbi_ptr_add(t->at, (int64_t)offset), src, (int64_t)len);
}

/* Checks that a loader's state is a place in its data. */
static enum nb_status check_loader_state(const struct nbi_loader_state *c,
                                         const struct nbi_dataset *d)
{
    int64_t examples = d ? nbi_dataset_stats(d)->examples : 1;
    if (c->epoch < 0 || c->next < 0 || c->next >= examples || c->token < 0)
        return nbi_fail(NB_EFORMAT, "its position in the data is invalid");
    return NB_OK;
}

/* The reference was computed again, perhaps on another CPU, so it is equal up to rounding; on a GPU
 * that is the rounding of activations to bf16. */
static enum nb_status check_reference(const struct nbi_checkpoint *c, const struct nbi_run *r)
{
    double mean, limit = r->other_bits[0] ? 1e-2 : 1e-4;
    NBI_TRY(nbi_checkpoint_real(c, "base_mark", &mean));
    if (!(fabs(mean - r->kl_anchor.mean_top_logp) <= limit * (fabs(mean) + 1)))
        return nbi_fail(NB_EINVAL, "--kl-base: the model is not the one that the run began with");
    return NB_OK;
}

static enum nb_status read_values(const struct nbi_checkpoint *c, struct nbi_run_state *s)
{
    int64_t stopped;
    s->step = (int64_t)nbi_checkpoint_step(c);
    NBI_TRY(nbi_checkpoint_int(c, "updates", &s->updates));
    NBI_TRY(nbi_checkpoint_int(c, "skipped", &s->skipped));
    if (nbi_checkpoint_int(c, "skipped_in_row", &s->skipped_in_row) != NB_OK)
        s->skipped_in_row = 0; /* older checkpoints have none */
    NBI_TRY(nbi_checkpoint_int(c, "tokens", &s->tokens));
    NBI_TRY(nbi_checkpoint_real(c, "seconds", &s->seconds));
    NBI_TRY(nbi_checkpoint_real(c, "best_loss", &s->best_loss));
    NBI_TRY(nbi_checkpoint_int(c, "epoch", &s->loader.epoch));
    NBI_TRY(nbi_checkpoint_int(c, "next", &s->loader.next));
    NBI_TRY(nbi_checkpoint_int(c, "token", &s->loader.token));
    NBI_TRY(nbi_checkpoint_int(c, "evaluated", &s->evaluated));
    NBI_TRY(nbi_checkpoint_int(c, "good", &s->accepted));
    NBI_TRY(nbi_checkpoint_int(c, "stopped", &stopped));
    NBI_TRY(nbi_checkpoint_int(c, "replay_epoch", &s->replay_loader.epoch));
    NBI_TRY(nbi_checkpoint_int(c, "replay_next", &s->replay_loader.next));
    NBI_TRY(nbi_checkpoint_int(c, "replay_token", &s->replay_loader.token));
    s->stopped = stopped != 0;
    if (s->updates < 0)
        return nbi_fail(NB_EFORMAT, "its numbers are invalid");
    return NB_OK;
}

static enum nb_status read_arrays(struct nbi_run *r, struct arrays *l,
                                  const struct nbi_checkpoint *c)
{
    NBI_TRY(nbi_checkpoint_read(c, "scales", l->scales, scale_bytes(r)));
    for (size_t i = 0; i < l->count; i++) {
        struct target to = {r, l->p[i].at};
        NBI_TRY(nbi_checkpoint_stream(c, l->p[i].name, (uint64_t)l->p[i].bytes, put, &to));
    }
    for (int64_t i = 0; i < r->optimizer.record_count; i++)
        l->records[i] = (struct nbi_update_record){.m_max = l->scales[i][2],
                                                   .v_max = l->scales[i][3],
                                                   .m_scale = {0, l->scales[i][0]},
                                                   .v_scale = {0, l->scales[i][1]}};
    for (int64_t i = 0; i < r->params.count; i++) {
        struct nbi_train_param *x = &r->params.tensors[i];
        if (x->trained && x->has_tensor_scale)
            x->weight->tensor_scale = l->scales[i][4];
        if (x->trained && x->has_tensor_scale)
            x->divisor = l->scales[i][5];
    }
    NBI_TRY(nbi_optimizer_write(&r->optimizer, l->records));
    return nbi_train_params_requantize(&r->params, NBI_ALL_LAYERS);
}

static enum nb_status check_settings(const struct nbi_run *r, const struct nbi_checkpoint *c)
{
    char *settings;
    NBI_TRY(settings_of(r, &settings));
    enum nb_status rc = compare_settings(nbi_checkpoint_settings(c), settings);
    free(settings);
    return rc;
}

/* Warns if the number of steps has changed and the learning rate depends on it. */
static enum nb_status check_length(const struct nbi_run *r, const struct nbi_checkpoint *c)
{
    json_t *was = NULL;
    const char *settings = nbi_checkpoint_settings(c);
    NBI_TRY(nbi_json_parse(&was, settings, strlen(settings)));
    long long steps = json_integer_value(json_object_get(was, "steps"));
    json_decref(was);
    if (steps <= 0 || steps == r->steps)
        return NB_OK;
    if (r->state.step > r->steps)
        return nbi_fail(NB_EINVAL, "the run has gone past %lld steps", (long long)r->steps);
    nbi_log(NB_LOG_WARN,
            "%lld steps in all, not %lld: the learning rate now follows the new length",
            (long long)r->steps, steps);
    return NB_OK;
}

static enum nb_status load_arrays(struct nbi_run *r, const struct nbi_checkpoint *c)
{
    struct arrays l;
    enum nb_status rc = list_arrays(&l, r);
    if (rc == NB_OK)
        rc = read_arrays(r, &l, c);
    release_arrays(&l);
    return rc;
}

/* A run whose warm-up is chosen by us keeps the one that it began with, also if it gets longer. */
static enum nb_status keep_warmup(struct nbi_run *r, const struct nbi_checkpoint *c)
{
    json_t *was = NULL;
    const char *settings = nbi_checkpoint_settings(c);
    if (r->opts->warmup != NB_TRAIN_WARMUP)
        return NB_OK;
    NBI_TRY(nbi_context(nbi_json_parse(&was, settings, strlen(settings)), "the run's settings"));
    json_int_t warmup = json_integer_value(json_object_get(was, "warmup"));
    json_decref(was);
    if (warmup < 0)
        return nbi_fail(NB_EFORMAT, "its warm-up makes no sense");
    r->lr_schedule.warmup = warmup;
    return NB_OK;
}

static enum nb_status load(struct nbi_run *r, const struct nbi_checkpoint *c)
{
    NBI_TRY(keep_warmup(r, c));
    NBI_TRY(check_settings(r, c));
    NBI_TRY(read_values(c, &r->state));
    NBI_TRY(check_length(r, c));
    NBI_TRY(check_reference(c, r));
    NBI_TRY(check_loader_state(&r->state.loader, r->data));
    NBI_TRY(check_loader_state(&r->state.replay_loader, r->replay_data));
    if (r->data)
        r->loader.state = r->state.loader;
    if (r->replay_data)
        r->replay_loader.state = r->state.replay_loader;
    return load_arrays(r, c);
}

enum nb_status nbi_run_load_accepted(struct nbi_run *r)
{
    struct nbi_checkpoint *c = NULL;
    NBI_TRY(nbi_checkpoint_accepted(&c, r->opts->checkpoint_dir, (uint64_t)r->state.accepted));
    enum nb_status rc = check_settings(r, c);
    if (rc == NB_OK)
        rc = load_arrays(r, c);
    rc = nbi_context(rc, "'%s'", nbi_checkpoint_path(c));
    nbi_checkpoint_close(c);
    return rc;
}

/* ---- the device ---- */

/* Whether the last steps ran on the same kind of device. */
static enum nb_status is_on_same_device(const struct nbi_run *r, const struct nbi_checkpoint *c,
                                        bool *same)
{
    json_t *was = NULL;
    const char *settings = nbi_checkpoint_settings(c);
    enum nb_status rc = nbi_json_parse(&was, settings, strlen(settings));
    if (rc == NB_OK)
        rc = add_defaults(was);
    const char *device = json_string_value(json_object_get(was, "device"));
    *same = device && strcmp(device, device_of(r)) == 0;
    json_decref(was);
    return nbi_context(rc, "the run's settings");
}

/* The bytes of the blob; -1: there is none. */
static int64_t tuning_bytes(const struct nbi_checkpoint *c)
{
    for (size_t i = 0; i < nbi_checkpoint_blob_count(c); i++) {
        const struct nbi_ckpt_blob b = nbi_checkpoint_blob(c, i);
        if (strcmp(b.name, TUNING) == 0)
            return b.bytes <= NBI_TUNING_MAX ? (int64_t)b.bytes : NBI_TUNING_MAX + 1;
    }
    return -1;
}

static enum nb_status load_tuning(struct nbi_run *r, const struct nbi_checkpoint *c)
{
    int64_t bytes = tuning_bytes(c);
    if (bytes < 0) {
        snprintf(r->other_bits, sizeof r->other_bits,
                 "the checkpoint does not say which algorithms the GPU had chosen");
        return NB_OK;
    }
    if (bytes > NBI_TUNING_MAX)
        return nbi_fail(NB_EFORMAT, "tuning of a GPU takes over %lld bytes",
                        (long long)NBI_TUNING_MAX);
    void *tuning = malloc((size_t)bytes + 1);
    if (!tuning)
        return nbi_fail_memory("checkpoint", (size_t)bytes);
    enum nb_status rc = nbi_checkpoint_read(c, TUNING, tuning, (uint64_t)bytes);
    if (rc == NB_OK)
        rc = r->be->tuning_load(r->be, tuning, bytes, r->other_bits);
    free(tuning);
    return rc;
}

static enum nb_status prepare_device(struct nbi_run *r, const struct nbi_checkpoint *c)
{
    bool same;
    NBI_TRY(is_on_same_device(r, c, &same));
    if (same)
        return nbi_backend_has(r->be, NBI_CAP_TUNING) ? load_tuning(r, c) : NB_OK;
    bool gpu = nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY);
    snprintf(r->other_bits, sizeof r->other_bits, "it was on %s before, and is on %s now",
             gpu ? "the CPU" : "a GPU", gpu ? r->be->name : "the CPU");
    return NB_OK;
}

enum nb_status nbi_run_open_checkpoint(struct nbi_run *r)
{
    enum nb_status rc = nbi_checkpoint_latest(&r->resumed_from, r->opts->checkpoint_dir);
    if (rc == NB_ENOTFOUND) {
        nbi_log(NB_LOG_INFO, "no checkpoint in '%s': starting from the beginning",
                r->opts->checkpoint_dir);
        return NB_OK;
    }
    NBI_TRY(rc);
    return nbi_context(prepare_device(r, r->resumed_from), "'%s'",
                       nbi_checkpoint_path(r->resumed_from));
}

enum nb_status nbi_run_resume(struct nbi_run *r)
{
    struct nbi_checkpoint *c = r->resumed_from;
    if (!c)
        return NB_OK;
    NBI_TRY(nbi_context(load(r, c), "'%s'", nbi_checkpoint_path(c)));
    nbi_checkpoint_close(c);
    r->resumed_from = NULL;
    nbi_log(NB_LOG_INFO, "resumed from step %lld of '%s'%s%s", (long long)r->state.step,
            r->opts->checkpoint_dir, r->other_bits[0] ? ", not bit for bit: " : "", r->other_bits);
    return NB_OK;
}
