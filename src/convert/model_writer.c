/* model_writer.c - targets, and everything that accompanies the weights. */
#include "convert/model_writer.h"

#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "base/str.h"
#include "base/utf8.h"
#include "tokenizer/vocab.h"

#define SHARD_BYTES 5000000000ull /* Hugging Face's default */
#define COPY_MAX    ((size_t)256 << 20)

enum nb_status nbi_output_of(const char *path, struct nbi_output *target)
{
    static const char *const others[] = {".bin",  ".pt",   ".pth",       ".onnx",
                                         ".ggml", ".json", ".safetensor"};
    *target = (struct nbi_output){.format = NBI_FORMAT_SAFETENSORS};
    if (!*path)
        return nbi_fail(NB_EINVAL, "the target has no name");
    target->directory = !nbi_format_of_path(path, &target->format);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (nbi_has_extension(path, others[i]))
            return nbi_fail(
                NB_EINVAL,
                "cannot write '%s': a target ends in .dat, .safetensors or .gguf, or is "
                "a directory",
                path);
    if (!target->directory && nbi_path_is_dir(path))
        return nbi_fail(NB_EINVAL, "cannot write '%s': a directory has that name", path);
    return NB_OK;
}

/* ---- properties of the items ---- */

static bool holds_nvfp4(const struct nbi_manifest_entry *items, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (items[i].out.dtype == NBI_NVFP4)
            return true;
    return false;
}

/* The type of most unquantised values: bf16, f16 or f32. */
static enum nbi_dtype main_dtype(const struct nbi_manifest_entry *items, int64_t count)
{
    int64_t values[NBI_DTYPES] = {0};
    for (int64_t i = 0; i < count; i++) {
        int64_t n = 0;
        if (nbi_count(items[i].out.shape, items[i].out.ndim, &n) == NB_OK)
            values[items[i].out.dtype] += n;
    }
    if (values[NBI_BF16] >= values[NBI_F16] && values[NBI_BF16] >= values[NBI_F32])
        return NBI_BF16;
    return values[NBI_F16] >= values[NBI_F32] ? NBI_F16 : NBI_F32;
}

static const struct nbi_manifest_entry *find_item(const struct nbi_manifest_entry *items,
                                                  int64_t count, const char *name)
{
    for (int64_t i = 0; i < count; i++)
        if (strcmp(items[i].out.name, name) == 0)
            return &items[i];
    return NULL;
}

/* ---- GGUF metadata ---- */

/* GGUF's code for the prevailing type. */
static uint32_t file_type(const struct nbi_manifest_entry *items, int64_t count)
{
    if (holds_nvfp4(items, count))
        return 39;
    enum nbi_dtype type = main_dtype(items, count);
    return type == NBI_BF16 ? 32 : type == NBI_F16 ? 1 : 0;
}

/* Lists the entries that were converted to f32 from a type, if any. */
static void put_original_types(struct nbi_gguf_meta *meta, const char *key, enum nbi_dtype from,
                               const struct nbi_manifest_entry *items, int64_t count)
{
    uint64_t n = 0;
    for (int64_t i = 0; i < count; i++)
        n += items[i].out.dtype == NBI_F32 && items[i].original_type == from;
    if (n == 0)
        return;
    nbi_gguf_meta_strings(meta, key, n);
    for (int64_t i = 0; i < count; i++)
        if (items[i].out.dtype == NBI_F32 && items[i].original_type == from) {
            char name[128] = "";
            nbi_param_to_gguf(items[i].out.name, name, sizeof name);
            nbi_gguf_meta_next_string(meta, name, strlen(name));
        }
}

/* Reads the tokenizer from the directory or the GGUF; NB_ENOTFOUND and an empty one if there is
 * none. */
static enum nb_status read_vocab(struct nbi_vocab *vocab, const struct nbi_model *m)
{
    nbi_vocab_init(vocab);
    enum nb_status rc = m->dir ? nbi_vocab_read_dir(vocab, m->dir) : NB_ENOTFOUND;
    if (rc == NB_ENOTFOUND && m->store)
        rc = nbi_vocab_read_gguf(vocab, m->store);
    if (rc == NB_OK && vocab->count > m->config.vocab_size) {
        rc = nbi_fail(NB_EFORMAT, "it has ids up to %lld, the model has %lld rows",
                      (long long)vocab->count - 1, (long long)m->config.vocab_size);
        nbi_vocab_release(vocab);
    }
    return rc == NB_ENOTFOUND ? rc : nbi_context(rc, "cannot carry the tokenizer over");
}

static enum nb_status put_tokenizer(struct nbi_gguf_meta *meta, const struct nbi_model *m,
                                    bool *found)
{
    struct nbi_vocab vocab;
    const struct nbi_config *c = &m->config;
    enum nb_status rc = read_vocab(&vocab, m);
    *found = rc == NB_OK;
    if (rc != NB_OK && rc != NB_ENOTFOUND)
        return rc;
    if (vocab.bos < 0)
        vocab.bos = c->bos;
    if (vocab.eos < 0 && c->eos_count)
        vocab.eos = c->eos[0];
    if (vocab.pad < 0)
        vocab.pad = c->pad;
    if (*found) {
        rc = nbi_vocab_write_gguf(&vocab, meta, c->vocab_size);
    } else { /* llama.cpp requires the key */
        rc = NB_OK;
        nbi_gguf_meta_string(meta, "tokenizer.ggml.model", "none");
        nbi_gguf_meta_u32(meta, NBI_GGUF_VOCAB_SIZE, (uint32_t)c->vocab_size);
    }
    nbi_vocab_write_ids(&vocab, meta);
    nbi_vocab_release(&vocab);
    return rc;
}

/* The last component of the source's path, without a format's ending. */
static void model_name(char *name, size_t size, const char *src)
{
    char *real = realpath(src, NULL); /* resolves "." and trailing slashes */
    const char *base = nbi_path_base(real ? real : src);
    nbi_printable_copy(name, size, base, strlen(base));
    free(real);
    for (int i = 0; i < NBI_FORMATS; i++)
        if (nbi_has_extension(name, nbi_formats[i].ending))
            name[strlen(name) - strlen(nbi_formats[i].ending)] = 0;
}

static enum nb_status gguf_meta(struct nbi_gguf_meta **out, const struct nb_convert_opts *opts,
                                const struct nbi_model *m, const struct nbi_manifest_entry *items,
                                int64_t count, bool *tokenizer)
{
    NBI_TRY(nbi_gguf_meta_new(out));
    struct nbi_gguf_meta *meta = *out;
    char name[128];
    model_name(name, sizeof name, opts->src);
    uint32_t type = file_type(items, count);
    nbi_gguf_meta_string(meta, NBI_GGUF_ARCHITECTURE_KEY, NBI_GGUF_ARCHITECTURE);
    nbi_gguf_meta_string(meta, "general.type", "model");
    nbi_gguf_meta_string(meta, "general.name", name);
    nbi_gguf_meta_u32(meta, "general.file_type", type);
    nbi_gguf_meta_u32(meta, "general.quantization_version", 2);
    nbi_config_to_gguf(&m->config, meta);
    if (opts->dtype == NB_OUT_KEEP) {
        put_original_types(meta, NBI_KEY_FROM_BF16, NBI_BF16, items, count);
        put_original_types(meta, NBI_KEY_FROM_F16, NBI_F16, items, count);
    }
    return put_tokenizer(meta, m, tokenizer);
}

/* ---- directories ---- */

/* A parameter's name without ".weight". */
static json_t *module_name(const char *name)
{
    return json_stringn(name, nbi_stem_length(name));
}

/* Unquantised modules, for the readers' ignore lists. A tied head is one of them. */
static json_t *ignored_modules(const struct nbi_manifest_entry *items, int64_t count, bool *ok)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++) {
        const struct nbi_tensor_spec *o = &items[i].out;
        if (o->dtype != NBI_NVFP4 && nbi_param_is_projection(o->name, o->ndim))
            nbi_json_append(list, module_name(o->name), ok);
    }
    if (!find_item(items, count, nbi_head_name()))
        nbi_json_append(list, module_name(nbi_head_name()), ok);
    return list;
}

/* Readers require the producer name "modelopt"; the version says who wrote it. */
static json_t *modelopt_config(json_t *ignore)
{
    return json_pack("{s:{s:{s:{s:b,s:i,s:s,s:i},s:[s]}},s:O,s:s,s:{s:s,s:s},s:s}", "config_groups",
                     "group_0", "weights", "dynamic", 0, "num_bits", 4, "type", "float",
                     "group_size", 16, "targets", "Linear", "ignore", ignore, "quant_algo",
                     "W4A16_NVFP4", "producer", "name", "modelopt", "version", "nibble",
                     "quant_method", "modelopt");
}

static json_t *modelopt_sidecar(json_t *ignore)
{
    return json_pack("{s:{s:s,s:s},s:{s:s,s:n,s:i,s:O}}", "producer", "name", "modelopt", "version",
                     "nibble", "quantization", "quant_algo", "W4A16_NVFP4", "kv_cache_quant_algo",
                     "group_size", 16, "exclude_modules", ignore);
}

static json_t *compressed_config(json_t *ignore)
{
    return json_pack("{s:s,s:s,s:s,s:n,s:O,s:n,s:{s:{s:[s],s:{s:i,s:s,s:b,s:s,s:i,s:b},s:n,s:n}}}",
                     "quant_method", "compressed-tensors", "format", "nvfp4-pack-quantized",
                     "quantization_status", "compressed", "global_compression_ratio", "ignore",
                     ignore, "kv_cache_scheme", "config_groups", "group_0", "targets", "Linear",
                     "weights", "num_bits", 4, "type", "float", "symmetric", 1, "strategy",
                     "tensor_group", "group_size", 16, "dynamic", 0, "input_activations",
                     "output_activations");
}

static enum nb_status write_json_in(const char *dir, const char *name, const json_t *json)
{
    char *path = nbi_path_join(dir, name);
    enum nb_status rc = path && json ? nbi_json_write_file(json, path) : nbi_fail_memory(name, 0);
    free(path);
    return rc;
}

static enum nb_status add_quantization(json_t *config, const char *dir, enum nbi_layout layout,
                                       const struct nbi_manifest_entry *items, int64_t count)
{
    bool ok = true, compressed = layout == NBI_LAYOUT_COMPRESSED_TENSORS;
    json_t *ignore = ignored_modules(items, count, &ok);
    json_t *block = compressed ? compressed_config(ignore) : modelopt_config(ignore);
    nbi_json_set(config, "quantization_config", block, &ok);
    enum nb_status rc = ok ? NB_OK : nbi_fail_memory("config", 0);
    if (rc == NB_OK && !compressed) {
        json_t *sidecar = modelopt_sidecar(ignore);
        rc = write_json_in(dir, "hf_quant_config.json", sidecar);
        json_decref(sidecar);
    }
    json_decref(ignore);
    return rc;
}

/* Whether the head of a model whose config says "tied" has its own values: NVFP4 (even if
 * dequantised here), or other bytes than the embedding. */
static enum nb_status head_differs(const struct nbi_model *m,
                                   const struct nbi_manifest_entry *items, int64_t count,
                                   bool *differs)
{
    const struct nbi_manifest_entry *head = find_item(items, count, nbi_head_name());
    const struct nbi_manifest_entry *embed = find_item(items, count, nbi_embedding_name());
    *differs =
        head && (head->out.dtype == NBI_NVFP4 || (head->src && head->src->dtype == NBI_NVFP4));
    if (!head || !embed || *differs || !head->src || !embed->src || head->src == embed->src)
        return NB_OK;
    *differs = head->src->dtype != embed->src->dtype || head->src->count != embed->src->count;
    enum { STEP = 1 << 16 };
    uint8_t *a = malloc((size_t)STEP * 16), *b = a ? a + STEP * 8 : NULL;
    enum nb_status rc = a ? NB_OK : nbi_fail_memory("buffer", (size_t)STEP * 16);
    size_t size = (size_t)nbi_dtypes[head->src->dtype].bytes;
    for (int64_t i = 0; rc == NB_OK && !*differs && i < head->src->count; i += STEP) {
        int64_t n = head->src->count - i < STEP ? head->src->count - i : STEP;
        rc = nbi_store_read(m->store, head->src, i, n, a);
        if (rc == NB_OK)
            rc = nbi_store_read(m->store, embed->src, i, n, b);
        *differs = rc == NB_OK && memcmp(a, b, (size_t)n * size) != 0;
    }
    free(a);
    return rc;
}

/* Adapts config.json to the new weights. */
static enum nb_status update_config(json_t *config, const struct nbi_model *m, const char *dir,
                                    enum nbi_layout layout, const struct nbi_manifest_entry *items,
                                    int64_t count)
{
    bool ok = true, untie = false;
    enum nbi_dtype type = main_dtype(items, count);
    const char *dtype = type == NBI_BF16 ? "bfloat16" : type == NBI_F16 ? "float16" : "float32";
    json_object_del(config, "quantization_config");
    json_object_del(config, "auto_map"); /* names code to run, here or in another repository */
    bool newer = json_object_get(config, "dtype") != NULL;
    if (newer)
        nbi_json_set(config, "dtype", json_string(dtype), &ok);
    if (!newer || json_object_get(config, "torch_dtype"))
        nbi_json_set(config, "torch_dtype", json_string(dtype), &ok);
    if (m->config.tied)
        NBI_TRY(head_differs(m, items, count, &untie));
    if (untie) {
        nbi_json_set(config, "tie_word_embeddings", json_false(), &ok);
        nbi_log(NB_LOG_INFO, "config.json gets tie_word_embeddings: false, since the head has "
                             "values of its own");
    }
    if (!ok)
        return nbi_fail_memory("config", 0);
    return holds_nvfp4(items, count) ? add_quantization(config, dir, layout, items, count) : NB_OK;
}

static enum nb_status write_config(const struct nbi_model *m, const char *dir,
                                   enum nbi_layout layout, const struct nbi_manifest_entry *items,
                                   int64_t count)
{
    json_t *config = NULL;
    enum nb_status rc = m->config_json ? nbi_json_copy(&config, m->config_json)
                                       : nbi_config_to_json(&m->config, &config);
    if (rc == NB_OK)
        rc = update_config(config, m, dir, layout, items, count);
    if (rc == NB_OK)
        rc = write_json_in(dir, "config.json", config);
    json_decref(config);
    return rc;
}

static enum nb_status copy_file(const char *from, const char *to, const char *name)
{
    char *src = nbi_path_join(from, name), *dst = nbi_path_join(to, name), *bytes = NULL;
    size_t len;
    enum nb_status rc = src && dst ? NB_OK : NB_ENOMEM;
    if (rc == NB_OK)
        rc = nbi_file_read(src, COPY_MAX, &bytes, &len);
    if (rc == NB_OK)
        rc = nbi_file_write(dst, bytes, len);
    free(bytes);
    free(src);
    free(dst);
    return rc;
}

/* Copies tokenizer files and generation settings unchanged. */
static enum nb_status copy_sidecars(const struct nbi_model *m, const char *dir)
{
    for (const char *const *name = nbi_model_sidecars; m->dir && *name; name++)
        NBI_TRY(nbi_unless_absent(copy_file(m->dir, dir, *name)));
    char *tokenizer = nbi_path_join(dir, "tokenizer.json");
    bool there = tokenizer && nbi_path_is_file(tokenizer);
    free(tokenizer);
    if (there || !m->store || m->store->format != NBI_FORMAT_GGUF)
        return NB_OK;
    struct nbi_vocab vocab;
    enum nb_status rc = read_vocab(&vocab, m);
    if (rc != NB_OK)
        return rc == NB_ENOTFOUND ? NB_OK : rc;
    rc = nbi_vocab_write_dir(&vocab, dir);
    nbi_vocab_release(&vocab);
    return rc;
}

/* ---- begin and end ---- */

static enum nb_status begin_writer(struct nbi_model_writer *w, const struct nbi_writer_opts *opts,
                                   const struct nbi_manifest_entry *items, int64_t count)
{
    struct nbi_tensor_spec *outs = calloc((size_t)count + 1, sizeof *outs);
    if (!outs)
        return nbi_fail_memory("tensor list", (size_t)count * sizeof *outs);
    for (int64_t i = 0; i < count; i++)
        outs[i] = items[i].out;
    enum nb_status rc = nbi_writer_begin(&w->writer, opts, outs, count);
    free(outs);
    return rc;
}

static enum nb_status begin_directory(struct nbi_model_writer *w,
                                      const struct nb_convert_opts *opts, const struct nbi_model *m,
                                      struct nbi_writer_opts *wo,
                                      const struct nbi_manifest_entry *items, int64_t count)
{
    NBI_TRY(nbi_model_need_config(m));
    NBI_TRY(nbi_staging_dir_begin(&w->staging, opts->dst));
    wo->path = w->staging.temp;
    wo->shard_bytes = opts->shard_bytes ? opts->shard_bytes : SHARD_BYTES;
    NBI_TRY(begin_writer(w, wo, items, count));
    NBI_TRY(write_config(m, w->staging.temp, wo->layout, items, count));
    return copy_sidecars(m, w->staging.temp);
}

/* Programs that read GGUF look for a tensor scale only next to matrices that are multiplied. */
static enum nb_status check_gguf_scale(const struct nbi_tensor_spec *out)
{
    if (!out->two_level || strcmp(out->name, nbi_embedding_name()) != 0)
        return NB_OK;
    return nbi_fail(NB_EUNSUPPORTED,
                    "GGUF has no tensor scale for the token embedding; convert with --dtype bf16, "
                    "or to .dat or .safetensors");
}

static enum nb_status begin_gguf(struct nbi_model_writer *w, const struct nb_convert_opts *opts,
                                 const struct nbi_model *m, struct nbi_writer_opts *wo,
                                 const struct nbi_manifest_entry *items, int64_t count)
{
    struct nbi_gguf_meta *meta = NULL;
    bool tokenizer = false;
    NBI_TRY(nbi_context(nbi_model_need_config(m), "GGUF needs the model's config"));
    for (int64_t i = 0; i < count; i++)
        NBI_TRY(nbi_context(check_gguf_scale(&items[i].out), "cannot write tensor '%s' to '%s'",
                            items[i].out.name, opts->dst));
    enum nb_status rc = gguf_meta(&meta, opts, m, items, count, &tokenizer);
    wo->meta = meta;
    wo->gguf_name = nbi_param_to_gguf;
    if (rc == NB_OK)
        rc = begin_writer(w, wo, items, count);
    if (rc == NB_OK && !tokenizer)
        nbi_log(NB_LOG_WARN, "the model has no tokenizer; the GGUF file will hold none");
    nbi_gguf_meta_free(meta);
    return rc;
}

static enum nbi_layout choose_layout(const struct nb_convert_opts *opts, const struct nbi_model *m)
{
    bool kept = opts->layout == NB_LAYOUT_KEEP && m->store &&
                m->store->layout == NBI_LAYOUT_COMPRESSED_TENSORS;
    return kept || opts->layout == NB_LAYOUT_COMPRESSED_TENSORS ? NBI_LAYOUT_COMPRESSED_TENSORS
                                                                : NBI_LAYOUT_MODELOPT;
}

enum nb_status nbi_model_writer_begin(struct nbi_model_writer *w,
                                      const struct nb_convert_opts *opts, const struct nbi_model *m,
                                      const struct nbi_manifest_entry *items, int64_t count)
{
    memset(w, 0, sizeof *w);
    w->staging.lock_fd = -1;
    NBI_TRY(nbi_output_of(opts->dst, &w->target));
    struct nbi_writer_opts wo = {
        .format = w->target.format, .layout = choose_layout(opts, m), .path = opts->dst};
    enum nb_status rc = w->target.directory ? begin_directory(w, opts, m, &wo, items, count)
                        : w->target.format == NBI_FORMAT_GGUF
                            ? begin_gguf(w, opts, m, &wo, items, count)
                            : begin_writer(w, &wo, items, count);
    if (rc != NB_OK)
        nbi_model_writer_abort(w);
    return rc;
}

/* Commits the writer. For a directory this renames files within the staging directory. */
static enum nb_status end_writer(struct nbi_model_writer *w)
{
    enum nb_status rc = w->writer ? nbi_writer_commit(w->writer) : NB_OK;
    w->writer = NULL;
    return rc;
}

enum nb_status nbi_model_writer_reopen(struct nbi_model_writer *w, struct nbi_store **out)
{
    *out = NULL;
    if (!w->target.directory)
        return nbi_writer_reopen(w->writer, out, nbi_param_from_gguf);
    NBI_TRY(end_writer(w));
    return nbi_model_open_store(out, w->staging.temp);
}

enum nb_status nbi_model_writer_commit(struct nbi_model_writer *w)
{
    enum nb_status rc = end_writer(w);
    if (rc == NB_OK && w->target.directory)
        rc = nbi_staging_dir_commit(&w->staging);
    nbi_model_writer_abort(w);
    return rc;
}

void nbi_model_writer_abort(struct nbi_model_writer *w)
{
    nbi_writer_abort(w->writer);
    w->writer = NULL;
    nbi_staging_dir_abort(&w->staging);
}
