/* arena.c - a list of chunks; allocations fill the newest one, and large blocks get their own. */
#include "base/arena.h"

#include <stdint.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_ASAN 1
#endif
#endif

#ifdef HAVE_ASAN
#include <sanitizer/asan_interface.h>
#define RED_ZONE       16
#define POISON(p, n)   ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define RED_ZONE       0
#define POISON(p, n)   ((void)0)
#define UNPOISON(p, n) ((void)0)
#endif

#define ALIGN       16
#define CHUNK_BYTES ((size_t)64 * 1024)

struct nbi_arena_chunk {
    struct nbi_arena_chunk *next;
    size_t used, size;
    _Alignas(ALIGN) unsigned char data[];
};

void nbi_arena_release(struct nbi_arena *arena)
{
    if (!arena)
        return;
    struct nbi_arena_chunk *chunk = arena->chunks;
    while (chunk) {
        struct nbi_arena_chunk *next = chunk->next;
        UNPOISON(chunk->data, chunk->size);
        free(chunk);
        chunk = next;
    }
    memset(arena, 0, sizeof *arena);
}

static void account(struct nbi_arena *arena, const char *name, size_t bytes)
{
    int i = 0;
    while (i < arena->names && strcmp(arena->use[i].name, name) != 0)
        i++;
    if (i == arena->names) {
        NBI_BUG_IF(arena->names == NBI_ARENA_NAMES);
        arena->use[arena->names++].name = name;
    }
    arena->use[i].bytes += bytes;
    arena->use[i].blocks++;
    arena->bytes += bytes;
}

enum nb_status nbi_arena_alloc(struct nbi_arena *arena, const char *name, size_t bytes, void **out)
{
    *out = NULL;
    if (bytes > SIZE_MAX / 2)
        return nbi_fail_memory(name, bytes);
    size_t need = (bytes + ALIGN - 1) / ALIGN * ALIGN + RED_ZONE;
    struct nbi_arena_chunk *chunk = arena->chunks;
    if (!chunk || need > chunk->size - chunk->used) {
        size_t size = need > CHUNK_BYTES ? need : CHUNK_BYTES;
        chunk = calloc(1, sizeof *chunk + size);
        if (!chunk)
            return nbi_fail_memory(name, bytes);
        chunk->size = size;
        chunk->next = arena->chunks;
        arena->chunks = chunk;
        POISON(chunk->data, size);
    }
    unsigned char *p = chunk->data + chunk->used;
    chunk->used += need;
    UNPOISON(p, bytes);
    account(arena, name, bytes);
    *out = p;
    return NB_OK;
}

enum nb_status nbi_arena_array(struct nbi_arena *arena, const char *name, size_t count, size_t size,
                               void **out)
{
    size_t bytes;
    *out = NULL;
    if (__builtin_mul_overflow(count, size, &bytes))
        return nbi_fail(NB_ENOMEM, "out of memory: %zu x %zu bytes for %s", count, size, name);
    return nbi_arena_alloc(arena, name, bytes, out);
}

enum nb_status nbi_arena_string(struct nbi_arena *arena, const char *name, const char *text,
                                size_t len, char **out)
{
    void *p = NULL;
    *out = NULL;
    if (len > SIZE_MAX / 4)
        return nbi_fail_memory(name, len);
    NBI_TRY(nbi_arena_alloc(arena, name, len + 1, &p));
    memcpy(p, text, len);
    *out = p;
    return NB_OK;
}
