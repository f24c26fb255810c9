/* fuzz_checkpoint.c - opens arbitrary bytes as a checkpoint: unchanged, and with the checksums of
 * header and trailer corrected so that the code after those checks is reached. Everything in an
 * accepted checkpoint is read. */
#include "train/checkpoint.h"

#include <string.h>

#include "base/crc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static enum nb_status sum_up(void *ctx, uint64_t offset, const void *src, size_t len)
{
    uint64_t *sum = ctx;
    if (offset != *sum || !src)
        abort();
    *sum += len;
    return NB_OK;
}

static void try_bytes(const uint8_t *data, size_t size)
{
    struct nbi_checkpoint *c;
    int64_t whole;
    if (nbi_checkpoint_open_memory(&c, data, size) != NB_OK) {
        if (nb_last_error()[0] == 0)
            abort(); /* failed without a message */
        return;
    }
    uint64_t total = 0;
    for (size_t i = 0; i < nbi_checkpoint_blob_count(c); i++) {
        struct nbi_ckpt_blob b = nbi_checkpoint_blob(c, i);
        uint64_t sum = 0;
        enum nb_status rc = nbi_checkpoint_stream(c, b.name, b.bytes, sum_up, &sum);
        if (sum != b.bytes || (rc != NB_OK && rc != NB_EFORMAT) || strlen(b.name) == 0)
            abort();
        total += b.bytes;
    }
    if (total >= size || strlen(nbi_checkpoint_settings(c)) == 0)
        abort();
    if (nbi_checkpoint_int(c, "cursor", &whole) != NB_OK && nb_last_error()[0] == 0)
        abort();
    nbi_checkpoint_close(c);
}

static void put_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy)
        return 0;
    try_bytes(data, size);
    memcpy(copy, data, size);
    uint32_t header = 0;
    if (size >= 44) {
        memcpy(&header, copy + 12, 4);
        put_u32(copy + 16, (uint32_t)size);
        put_u32(copy + 20, 0);
        uint32_t blobs, crc;
        memcpy(&blobs, copy + 40, 4);
        if (header >= 48 && header <= size && blobs < 1000 && 4 * blobs + 12 <= size) {
            crc = nbi_crc32c(0, copy, header - 4);
            put_u32(copy + header - 4, crc);
            uint8_t *trailer = copy + size - (4 * blobs + 12);
            put_u32(copy + size - 4, nbi_crc32c(crc, trailer, 4 * blobs + 8));
        }
        try_bytes(copy, size);
    }
    free(copy);
    return 0;
}
