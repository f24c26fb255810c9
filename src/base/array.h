/* array.h - growable arrays: a pointer, a count and a capacity in the caller's struct. */
#pragma once

#include <stddef.h>

#include "base/status.h"

/* Ensures capacity >= need elements. `array` is a pointer that realloc() may move, NULL while
 * capacity is 0; capacity is a size_t. The capacity doubles, so appending one element at a time
 * takes amortised constant time. On failure (NB_ENOMEM) both are unchanged; `what` names the array
 * in the message. The caller frees the array. */
#define NBI_ARRAY_RESERVE(array, capacity, need, what)                                             \
    nbi_array_reserve(&(array), &(capacity), (need), sizeof *(array), (what))

/* The function behind the macro; array is the address of the pointer. */
enum nb_status nbi_array_reserve(void *array, size_t *capacity, size_t need, size_t size,
                                 const char *what);
