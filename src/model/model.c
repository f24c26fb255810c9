/* model.c - opens weights, finds their config and checks that the two agree. */
#include "model/model.h"

#include <string.h>

#include "base/str.h"

/* Fails if the quantisation that config.json names is not the layout of the tensors. */
static enum nb_status check_quantization(const struct nbi_model *m)
{
    const json_t *q = json_object_get(m->config_json, "quantization_config");
    const char *method = NULL;
    if (!q || json_is_null(q))
        return NB_OK;
    NBI_TRY(nbi_json_string(q, "quant_method", true, &method));
    enum nbi_layout wanted = strcmp(method, "modelopt") == 0 ? NBI_LAYOUT_MODELOPT
                             : strcmp(method, "compressed-tensors") == 0
                                 ? NBI_LAYOUT_COMPRESSED_TENSORS
                                 : NBI_LAYOUT_NONE;
    if (wanted == NBI_LAYOUT_NONE)
        return nbi_fail(NB_EUNSUPPORTED,
                        "quant_method '%s' is not supported; 'modelopt' and 'compressed-tensors' "
                        "with NVFP4 are",
                        method);
    enum nbi_layout found = m->store ? m->store->layout : NBI_LAYOUT_NONE;
    if (m->store && m->store->format == NBI_FORMAT_SAFETENSORS && found != NBI_LAYOUT_NONE &&
        found != wanted)
        return nbi_fail(NB_EFORMAT, "quant_method is '%s' but the tensors are laid out as %s",
                        method, found == NBI_LAYOUT_MODELOPT ? "modelopt" : "compressed-tensors");
    return NB_OK;
}

static enum nb_status read_config(struct nbi_model *m, const char *path)
{
    NBI_TRY(nbi_json_read_file(&m->config_json, path, NBI_CONFIG_FILE_MAX));
    enum nb_status rc = nbi_config_parse(&m->config, m->config_json);
    if (rc == NB_OK)
        rc = check_quantization(m);
    return nbi_context(rc, "reading '%s'", path);
}

static enum nb_status find_config(struct nbi_model *m, const char *path, const char *model_dir)
{
    if (!model_dir && m->store->format == NBI_FORMAT_GGUF)
        return nbi_context(nbi_config_from_gguf(&m->config, m->store), "metadata of '%s'", path);
    m->dir = model_dir               ? strdup(model_dir)
             : nbi_path_is_dir(path) ? strdup(path)
                                     : nbi_path_dir(path);
    char *file = m->dir ? nbi_path_join(m->dir, "config.json") : NULL;
    if (!file)
        return nbi_fail_memory("path", strlen(path));
    enum nb_status rc = NB_OK;
    if (!model_dir && !nbi_path_is_file(file)) {
        rc = nbi_fail(NB_ENOTFOUND, "no config.json beside '%s'; --model-dir DIR says where it is",
                      path);
        free(m->dir);
        m->dir = NULL;
    } else {
        rc = read_config(m, file);
    }
    free(file);
    return rc;
}

enum nb_status nbi_model_translate(struct nbi_store *store)
{
    bool known = false;
    if (store->format == NBI_FORMAT_GGUF)
        NBI_TRY(nbi_config_knows_gguf(store, &known));
    return known ? nbi_store_rename(store, nbi_param_from_gguf) : NB_OK;
}

enum nb_status nbi_model_open_store(struct nbi_store **out, const char *path)
{
    NBI_TRY(nbi_store_open(out, path));
    enum nb_status rc = nbi_context(nbi_model_translate(*out), "cannot read '%s'", path);
    if (rc != NB_OK) {
        nbi_store_close(*out);
        *out = NULL;
    }
    return rc;
}

enum nb_status nbi_model_open(struct nbi_model *m, const char *path, const char *model_dir)
{
    memset(m, 0, sizeof *m);
    enum nb_status rc = nbi_model_open_store(&m->store, path);
    if (rc != NB_OK)
        return rc;
    rc = find_config(m, path, model_dir);
    m->has_config = rc == NB_OK;
    /* A config.json in the model's own directory that cannot be parsed is damage, not absence. */
    bool damaged = rc == NB_EFORMAT && nbi_path_is_dir(path);
    bool unread = rc == NB_ENOMEM || rc == NB_EIO || rc == NB_EINTERRUPTED;
    if (rc != NB_OK && (model_dir || damaged || unread)) {
        nbi_model_close(m);
        return rc;
    }
    snprintf(m->config_error, sizeof m->config_error, "%.*s", (int)sizeof m->config_error - 1,
             m->has_config ? "" : nb_last_error());
    return NB_OK;
}

enum nb_status nbi_model_open_config(struct nbi_model *m, const char *dir)
{
    memset(m, 0, sizeof *m);
    m->dir = strdup(dir);
    char *file = nbi_path_join(dir, "config.json");
    enum nb_status rc =
        m->dir && file ? read_config(m, file) : nbi_fail_memory("path", strlen(dir));
    free(file);
    m->has_config = rc == NB_OK;
    if (rc != NB_OK)
        nbi_model_close(m);
    return rc;
}

void nbi_model_close(struct nbi_model *m)
{
    nbi_store_close(m->store);
    json_decref(m->config_json);
    free(m->dir);
    memset(m, 0, sizeof *m);
}

enum nb_status nbi_model_need_config(const struct nbi_model *m)
{
    return m->has_config ? NB_OK : nbi_fail(NB_ENOTFOUND, "%s", m->config_error);
}
