/* allocations.h - counts allocations by replacing the C library's functions. Not with sanitizers,
 * which have their own. Include it first, in one file of a program. */
#pragma once

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/sanitized.h"

static volatile long allocations;

#if !SANITIZED
static inline void find_real(void *slot, const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);
    memcpy(slot, &p, sizeof p); /* ISO C cannot cast an object pointer to a function pointer */
}

void *malloc(size_t size)
{
    static void *(*real)(size_t);
    if (!real)
        find_real((void *)&real, "malloc");
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    return real(size);
}

void *calloc(size_t count, size_t size)
{
    static void *(*real)(size_t, size_t);
    if (!real)
        find_real((void *)&real, "calloc");
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    return real(count, size);
}

void *realloc(void *p, size_t size)
{
    static void *(*real)(void *, size_t);
    if (!real)
        find_real((void *)&real, "realloc");
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    return real(p, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    static void *(*real)(size_t, size_t);
    if (!real)
        find_real((void *)&real, "aligned_alloc");
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    return real(alignment, size);
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
    static int (*real)(void **, size_t, size_t);
    if (!real)
        find_real((void *)&real, "posix_memalign");
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    return real(out, alignment, size);
}

void *mmap(void *at, size_t len, int prot, int flags, int fd, off_t offset)
{
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    return (void *)syscall(SYS_mmap, at, len, prot, flags, fd, offset); /* NOLINT */
}
#endif
