/* array.c - growable arrays. */
#include "base/array.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_CAPACITY 16

enum nb_status nbi_array_reserve(void *array, size_t *capacity, size_t need, size_t size,
                                 const char *what)
{
    if (need <= *capacity)
        return NB_OK;
    size_t grown = *capacity > SIZE_MAX / 2 ? need : 2 * *capacity;
    if (grown < FIRST_CAPACITY)
        grown = FIRST_CAPACITY;
    if (grown < need)
        grown = need;
    if (grown > SIZE_MAX / size)
        return nbi_fail_memory(what, SIZE_MAX);
    void *p;
    memcpy(&p, array, sizeof p); /* a pointer of any type */
    p = realloc(p, grown * size);
    if (!p)
        return nbi_fail_memory(what, grown * size);
    memcpy(array, &p, sizeof p);
    *capacity = grown;
    return NB_OK;
}
