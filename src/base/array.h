/* array.h - arrays that grow: a pointer, a count and a capacity in the caller's struct. */
#pragma once

#include <stddef.h>

#include "base/status.h"

/* Makes room for at least `need` elements in all. `array` is a pointer that realloc() may move,
 * NULL while capacity is 0; capacity is a size_t. It doubles, so that appending one element at a
 * time takes amortised constant time. After a failure, NB_ENOMEM, both are what they were; `what`
 * names the array in the message. The caller frees the array. */
#define NBI_ARRAY_RESERVE(array, capacity, need, what)                                             \
    nbi_array_reserve(&(array), &(capacity), (need), sizeof *(array), (what))

/* What the macro calls; array is the address of the pointer. */
enum nb_status nbi_array_reserve(void *array, size_t *capacity, size_t need, size_t size,
                                 const char *what);
