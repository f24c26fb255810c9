/* store_target.h - shared by the fuzz targets for weights files. */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "formats/store.h"
#include "model/model.h"
#include "tokenizer/vocab.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Reads an entry in chunks. Opening has checked that its size does not exceed the input's. */
static void read_entry(const struct nbi_store *store, const struct nbi_entry *e)
{
    enum { PIECE = 4096 };
    float f32[PIECE];
    uint8_t codes[PIECE / 2], scales[PIECE / 16], raw[PIECE * 8];
    for (int64_t first = 0; first < e->count; first += PIECE) {
        int64_t n = e->count - first < PIECE ? e->count - first : PIECE;
        enum nb_status rc = nbi_store_read_f32(store, e, first, n, f32);
        if (e->dtype == NBI_NVFP4)
            rc = nbi_store_read_nvfp4(store, e, first, n, codes, scales);
        else
            rc = nbi_store_read(store, e, first, n, raw);
        if (rc != NB_OK)
            break;
    }
}

static int fuzz_store(enum nbi_format format, const uint8_t *data, size_t size)
{
    struct nbi_store *store;
    if (nbi_store_open_memory(&store, format, data, size) != NB_OK) {
        if (nb_last_error()[0] == 0)
            abort(); /* failed without a message */
        return 0;
    }
    for (int64_t i = 0; i < store->count; i++) {
        const struct nbi_entry *e = &store->entries[i];
        if (nbi_store_find(store, e->name) == NULL || nbi_entry_bytes(e) > size)
            abort();
        read_entry(store, e);
    }
    if (nbi_model_translate(store) != NB_OK) {
        nbi_store_close(store); /* two tensors have the same name */
        return 0;
    }
    struct nbi_config config;
    if (nbi_config_infer(&config, store) == NB_OK)
        for (int64_t i = 0; i < nbi_param_count(&config); i++) {
            struct nbi_param p, found;
            nbi_param_at(&config, i, &p);
            if (!nbi_param_find(&config, p.name, &found) || found.index != i)
                abort();
        }
    struct nbi_vocab vocab;
    if (format == NBI_FORMAT_GGUF && nbi_config_from_gguf(&config, store) == NB_OK &&
        nbi_vocab_read_gguf(&vocab, store) == NB_OK)
        nbi_vocab_release(&vocab);
    nbi_store_close(store);
    return 0;
}
