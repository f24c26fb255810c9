/* slabs.h - memory for weights, in large pages.
 *
 * A token reads every weight once, and with pages of 4 KiB the processor spends a tenth of that
 * time finding them. Weights are too small for large pages of their own, so they share slabs, one
 * after the other as they are loaded. A slab goes when the last of its weights goes. One thread at
 * a time. */
#pragma once

#include <stddef.h>

struct nbi_slab;

/* Whole pages of 4 KiB; NULL if there is no memory. *slab is the one that is being filled, at first
 * NULL. */
void *nbi_slab_alloc(struct nbi_slab **slab, size_t bytes);
void nbi_slab_free(struct nbi_slab **slab, void *p); /* NULL is fine */

/* The slab that was being filled goes too, unless something in it is still in use. */
void nbi_slabs_close(struct nbi_slab **slab);
