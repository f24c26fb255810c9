/* inject.c - an LD_PRELOAD library that makes one chosen call of a program fail.
 *
 *   NB_INJECT=CLASS:N[+]:ERROR  the Nth call of CLASS fails (N+: so do all later ones) with errno
 *                               ERROR, a number. ERROR "short" transfers one byte instead.
 *   NB_INJECT_TRACE=FILE        nothing fails; every call is recorded in FILE as two 64-bit words,
 *                               its class and a hash of the call stack.
 *   NB_INJECT_PROGRAM=NAME      applies both to the program of this name only, not to its children.
 *
 * The classes are listed in the table below. Counting begins when main is called, so neither the
 * dynamic loader nor constructors are affected (those of the CUDA runtime crash without memory). */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unwind.h>

#define CLASSES(X)                                                                                 \
    X(ALLOC, "alloc")                                                                              \
    X(OPEN, "open")                                                                                \
    X(READ, "read")                                                                                \
    X(WRITE, "write")                                                                              \
    X(SYNC, "sync")                                                                                \
    X(RENAME, "rename")                                                                            \
    X(STAT, "stat")                                                                                \
    X(CLOSE, "close")                                                                              \
    X(THREAD, "thread")

enum class {
#define X(id, name) id,
    CLASSES(X)
#undef X
};

static const char *const class_names[] = {
#define X(id, name) name,
    CLASSES(X)
#undef X
};

/* ---- which call fails ---- */

static struct {
    bool active, persistent, one_byte;
    int class, error;
    long at;
    int trace; /* file descriptor, or -1 */
} plan = {.trace = -1};

static atomic_long counts[sizeof class_names / sizeof *class_names];

/* Set inside this library, whose own calls do not count. */
static _Thread_local __attribute__((tls_model("initial-exec"))) volatile bool inside;

struct stack {
    int depth;
    uint64_t hash;
};

static _Unwind_Reason_Code add_frame(struct _Unwind_Context *context, void *arg)
{
    struct stack *s = arg;
    if (s->depth++ > 1) /* skip chosen() and the wrapper */
        s->hash = (s->hash ^ (uint64_t)_Unwind_GetIP(context)) * 0x9E3779B97F4A7C15u;
    return s->depth < 10 ? _URC_NO_REASON : _URC_END_OF_STACK;
}

static void record(enum class class)
{
    struct stack s = {0};
    _Unwind_Backtrace(add_frame, &s);
    const uint64_t entry[2] = {class, s.hash};
    ssize_t n = write(plan.trace, entry, sizeof entry);
    (void)n;
}

/* Whether this call must fail; sets errno then. Only transfers can be short. */
static __attribute__((noinline)) bool chosen(enum class class, bool transfer)
{
    if (!plan.active || inside || (plan.one_byte && !transfer))
        return false;
    int before = errno;
    bool hit = false;
    inside = true;
    if (plan.trace >= 0) {
        record(class);
    } else if ((int)class == plan.class) {
        long n = atomic_fetch_add(&counts[class], 1) + 1;
        hit = n == plan.at || (plan.persistent && n > plan.at);
    }
    inside = false;
    errno = hit ? plan.error : before;
    return hit;
}

#define fails(class) chosen(class, false)

static int class_of(const char *name, size_t len)
{
    for (size_t i = 0; i < sizeof class_names / sizeof *class_names; i++)
        if (strlen(class_names[i]) == len && memcmp(class_names[i], name, len) == 0)
            return (int)i;
    return -1;
}

static void read_plan(const char *text)
{
    const char *colon = strchr(text, ':');
    char *end;
    if (!colon || (plan.class = class_of(text, (size_t)(colon - text))) < 0)
        return;
    plan.at = strtol(colon + 1, &end, 10);
    plan.persistent = *end == '+';
    end += plan.persistent;
    plan.one_byte = strcmp(end, ":short") == 0;
    plan.error = *end == ':' ? (int)strtol(end + 1, NULL, 10) : ENOMEM;
    plan.active = plan.at > 0;
}

static void begin(void)
{
    const char *text = getenv("NB_INJECT"), *trace = getenv("NB_INJECT_TRACE");
    const char *program = getenv("NB_INJECT_PROGRAM");
    if (program && strcmp(program, program_invocation_short_name) != 0)
        return;
    if (trace) {
        plan.trace = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (plan.trace >= 0 && plan.trace < 100) { /* leave low descriptors to the program */
            int high = fcntl(plan.trace, F_DUPFD_CLOEXEC, 900);
            close(plan.trace);
            plan.trace = high;
        }
        plan.active = plan.trace >= 0;
    } else if (text) {
        read_plan(text);
    }
}

typedef int main_fn(int argc, char **argv, char **env);

static main_fn *real_main;

static int counted_main(int argc, char **argv, char **env)
{
    begin();
    return real_main(argc, argv, env);
}

/* glibc calls main through this function. */
int __libc_start_main(main_fn *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end)
{
    int (*next)(main_fn *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return next(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}

/* ---- the wrappers ---- */

/* Looks up the real function. The loader may allocate meanwhile. */
#define REAL(type, name, ...)                                                                      \
    static type (*real)(__VA_ARGS__);                                                              \
    if (!real)                                                                                     \
    find_real((void *)&real, name)

static char early[16384]; /* serves allocations during a lookup */
static size_t early_used;
/* volatile: dlsym is declared not to call back into this file, but it does, through free. */
static _Thread_local __attribute__((tls_model("initial-exec"))) volatile bool finding;

static void find_real(void *slot, const char *name)
{
    finding = true;
    void *p = dlsym(RTLD_NEXT, name);
    finding = false;
    if (!p)
        abort();
    memcpy(slot, &p, sizeof p); /* ISO C cannot cast an object pointer to a function pointer */
}

static bool is_early(const void *p)
{
    return (const char *)p >= early && (const char *)p < early + sizeof early;
}

static void *early_alloc(size_t size)
{
    void *p = early + early_used;
    early_used += (size + 15) & ~(size_t)15;
    if (early_used > sizeof early)
        abort();
    return p;
}

void *malloc(size_t size)
{
    if (finding)
        return early_alloc(size);
    REAL(void *, "malloc", size_t);
    return fails(ALLOC) ? NULL : real(size);
}

void *calloc(size_t count, size_t size)
{
    if (finding)
        return early_alloc(count * size);
    REAL(void *, "calloc", size_t, size_t);
    return fails(ALLOC) ? NULL : real(count, size);
}

void *realloc(void *p, size_t size)
{
    if (finding)
        return NULL;
    REAL(void *, "realloc", void *, size_t);
    return fails(ALLOC) ? NULL : real(p, size);
}

void *reallocarray(void *p, size_t count, size_t size)
{
    REAL(void *, "reallocarray", void *, size_t, size_t);
    if (fails(ALLOC))
        return NULL;
    bool before = inside;
    inside = true; /* it calls realloc, and counts as one allocation */
    void *q = real(p, count, size);
    inside = before;
    return q;
}

void *aligned_alloc(size_t alignment, size_t size)
{
    REAL(void *, "aligned_alloc", size_t, size_t);
    return fails(ALLOC) ? NULL : real(alignment, size);
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
    REAL(int, "posix_memalign", void **, size_t, size_t);
    return fails(ALLOC) ? ENOMEM : real(out, alignment, size);
}

void free(void *p)
{
    if (finding || is_early(p)) /* memory that the loader frees during a lookup leaks */
        return;
    REAL(void, "free", void *);
    real(p);
}

void *mmap64(void *at, size_t len, int prot, int flags, int fd, off_t offset)
{
    REAL(void *, "mmap64", void *, size_t, int, int, int, off_t);
    return fails(ALLOC) ? MAP_FAILED : real(at, len, prot, flags, fd, offset);
}

/* Reads the mode argument of open, if there is one. */
#define MODE_OF(flags)                                                                             \
    mode_t mode = 0;                                                                               \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                         \
        va_list args;                                                                              \
        va_start(args, flags);                                                                     \
        mode = va_arg(args, mode_t);                                                               \
        va_end(args);                                                                              \
    }

int open64(const char *path, int flags, ...)
{
    REAL(int, "open64", const char *, int, ...);
    MODE_OF(flags)
    return fails(OPEN) ? -1 : real(path, flags, mode);
}

DIR *opendir(const char *path)
{
    REAL(DIR *, "opendir", const char *);
    return fails(OPEN) ? NULL : real(path);
}

FILE *fopen64(const char *path, const char *mode)
{
    REAL(FILE *, "fopen64", const char *, const char *);
    return fails(OPEN) && plan.error != EINTR /* used for /proc, which does not return EINTR */
               ? NULL
               : real(path, mode);
}

/* Fails, or transfers one byte if the plan says "short". */
#define TRANSFER(class, call_short, call)                                                          \
    (len > 0 && chosen(class, true) ? (plan.one_byte ? (call_short) : -1) : (call))

ssize_t read(int fd, void *p, size_t len)
{
    REAL(ssize_t, "read", int, void *, size_t);
    return TRANSFER(READ, real(fd, p, 1), real(fd, p, len));
}

ssize_t pread64(int fd, void *p, size_t len, off_t offset)
{
    REAL(ssize_t, "pread64", int, void *, size_t, off_t);
    return TRANSFER(READ, real(fd, p, 1, offset), real(fd, p, len, offset));
}

struct dirent64 *readdir64(DIR *dir)
{
    REAL(struct dirent64 *, "readdir64", DIR *);
    return fails(READ) && plan.error != EINTR /* readdir does not return EINTR */ ? NULL
                                                                                  : real(dir);
}

ssize_t write(int fd, const void *p, size_t len)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    return TRANSFER(WRITE, real(fd, p, 1), real(fd, p, len));
}

ssize_t pwrite64(int fd, const void *p, size_t len, off_t offset)
{
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    return TRANSFER(WRITE, real(fd, p, 1, offset), real(fd, p, len, offset));
}

int fallocate64(int fd, int mode, off_t offset, off_t len)
{
    REAL(int, "fallocate64", int, int, off_t, off_t);
    return fails(WRITE) ? -1 : real(fd, mode, offset, len);
}

int posix_fallocate64(int fd, off_t offset, off_t len)
{
    REAL(int, "posix_fallocate64", int, off_t, off_t);
    return fails(WRITE) ? plan.error : real(fd, offset, len);
}

int ftruncate64(int fd, off_t len)
{
    REAL(int, "ftruncate64", int, off_t);
    return fails(WRITE) ? -1 : real(fd, len);
}

int fsync(int fd)
{
    REAL(int, "fsync", int);
    return fails(SYNC) ? -1 : real(fd);
}

int rename(const char *from, const char *to)
{
    REAL(int, "rename", const char *, const char *);
    return fails(RENAME) ? -1 : real(from, to);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags)
{
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
    return fails(RENAME) ? -1 : real(from_dir, from, to_dir, to, flags);
}

int link(const char *from, const char *to)
{
    REAL(int, "link", const char *, const char *);
    return fails(RENAME) ? -1 : real(from, to);
}

int unlink(const char *path)
{
    REAL(int, "unlink", const char *);
    return fails(RENAME) ? -1 : real(path);
}

int mkdir(const char *path, mode_t mode)
{
    REAL(int, "mkdir", const char *, mode_t);
    return fails(RENAME) ? -1 : real(path, mode);
}

int rmdir(const char *path)
{
    REAL(int, "rmdir", const char *);
    return fails(RENAME) ? -1 : real(path);
}

int flock(int fd, int operation)
{
    REAL(int, "flock", int, int);
    return fails(RENAME) ? -1 : real(fd, operation);
}

int fchmod(int fd, mode_t mode)
{
    REAL(int, "fchmod", int, mode_t);
    return fails(RENAME) ? -1 : real(fd, mode);
}

int stat64(const char *path, struct stat64 *st)
{
    REAL(int, "stat64", const char *, struct stat64 *);
    return fails(STAT) ? -1 : real(path, st);
}

int lstat64(const char *path, struct stat64 *st)
{
    REAL(int, "lstat64", const char *, struct stat64 *);
    return fails(STAT) ? -1 : real(path, st);
}

int fstat64(int fd, struct stat64 *st)
{
    REAL(int, "fstat64", int, struct stat64 *);
    return fails(STAT) ? -1 : real(fd, st);
}

int access(const char *path, int mode)
{
    REAL(int, "access", const char *, int);
    return fails(STAT) ? -1 : real(path, mode);
}

char *realpath(const char *path, char *out)
{
    REAL(char *, "realpath", const char *, char *);
    return fails(STAT) ? NULL : real(path, out);
}

int close(int fd)
{
    REAL(int, "close", int);
    bool fail = fails(CLOSE); /* the descriptor is closed even so */
    int error = errno;
    int rc = real(fd);
    if (fail)
        errno = error;
    return fail ? -1 : rc;
}

int pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*start)(void *), void *arg)
{
    REAL(int, "pthread_create", pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    return fails(THREAD) ? EAGAIN : real(id, attr, start, arg);
}
