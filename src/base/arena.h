/* arena.h - memory with one lifetime: many allocations, one release.
 *
 * Blocks are zeroed, aligned to 16 bytes and never move. Each allocation is accounted under a name
 * for memory reports. Under AddressSanitizer a red zone follows every block. An arena is not
 * thread-safe. */
#pragma once

#include <stddef.h>

#include "base/status.h"

struct nbi_arena_chunk;

struct nbi_arena_use {
    const char *name;
    size_t bytes, blocks;
};

#define NBI_ARENA_NAMES 32

struct nbi_arena {
    struct nbi_arena_chunk *chunks;
    size_t bytes;                              /* sum over all names */
    struct nbi_arena_use use[NBI_ARENA_NAMES]; /* in order of first use */
    int names;
};

/* A zeroed struct is a valid empty arena. */
void nbi_arena_release(struct nbi_arena *arena);

/* name must be a string constant: the arena keeps the pointer. */
enum nb_status nbi_arena_alloc(struct nbi_arena *arena, const char *name, size_t bytes, void **out);

/* Allocates count * size bytes; fails if the product overflows. */
enum nb_status nbi_arena_array(struct nbi_arena *arena, const char *name, size_t count, size_t size,
                               void **out);

/* Copies len bytes of text and adds a NUL. */
enum nb_status nbi_arena_string(struct nbi_arena *arena, const char *name, const char *text,
                                size_t len, char **out);
