/* slabs.h - memory for weights, in huge pages.
 *
 * A decode step reads every weight once, and with pages of 4 KiB a CPU spends a tenth of that time
 * on page walks. Weights are too small for huge pages of their own, so they share slabs in the
 * order in which they are loaded. A slab is unmapped when the last of its weights is freed. Not
 * thread-safe. */
#pragma once

#include <stddef.h>

struct nbi_slab;

/* Returns page-aligned memory, or NULL. *slab is the slab being filled; it is NULL at first. */
void *nbi_slab_alloc(struct nbi_slab **slab, size_t bytes);
void nbi_slab_free(struct nbi_slab **slab, void *p); /* NULL is fine */

/* Unmaps the slab being filled, unless a weight in it is still in use. */
void nbi_slabs_close(struct nbi_slab **slab);
