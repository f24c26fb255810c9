/* arena.h - memory with one lifetime: many allocations, one release.
 *
 * Blocks are zeroed, aligned to 16 bytes and never move. Each allocation is booked under a name, so
 * that a report can say what the memory is for. Under AddressSanitizer a red zone follows every
 * block. An arena belongs to one thread at a time. */
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
    size_t bytes;                              /* handed out, all names together */
    struct nbi_arena_use use[NBI_ARENA_NAMES]; /* by name, in order of first use */
    int names;
};

/* A zeroed struct is a valid empty arena. */
void nbi_arena_release(struct nbi_arena *arena);

/* name is a string constant. */
enum nb_status nbi_arena_alloc(struct nbi_arena *arena, const char *name, size_t bytes, void **out);

/* count * size with the product checked. */
enum nb_status nbi_arena_array(struct nbi_arena *arena, const char *name, size_t count, size_t size,
                               void **out);

/* A NUL-terminated copy of len bytes. */
enum nb_status nbi_arena_string(struct nbi_arena *arena, const char *name, const char *text,
                                size_t len, char **out);
