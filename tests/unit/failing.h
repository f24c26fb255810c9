/* failing.h - allocations that fail on demand. The test is linked with --wrap for each of the
 * functions (tests/CMakeLists.txt), so that calls from the library arrive here. */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_reallocarray(void *p, size_t count, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_reallocarray(void *p, size_t count, size_t size);

/* That many allocations of this thread succeed, then one fails. Negative: none fails. */
static _Thread_local long allocations_left = -1;

static bool allocation_fails(void)
{
    if (allocations_left < 0 || allocations_left-- > 0)
        return false;
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t size)
{
    return allocation_fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return allocation_fails() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *p, size_t size)
{
    return allocation_fails() ? NULL : __real_realloc(p, size);
}

void *__wrap_reallocarray(void *p, size_t count, size_t size)
{
    return allocation_fails() ? NULL : __real_reallocarray(p, count, size);
}
