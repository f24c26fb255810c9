/* process_tree.c - walks /proc; a process that cannot be read counts as ended. */
#include "cli/process_tree.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <string.h>

#include "base/array.h"
#include "base/dirs.h"
#include "base/str.h"
#include "base/syscall.h"
#include "base/utf8.h"

/* The value of "KEY: N kB" in a file of a process, in bytes; 0: not found. */
static uint64_t read_kib(int pid, const char *file, const char *const keys[], size_t key_count)
{
    char path[64], line[256];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        for (size_t i = 0; i < key_count; i++)
            if (nbi_starts_with(line, keys[i]))
                sum += strtoull(line + strlen(keys[i]), NULL, 10) * 1024;
    if (f)
        fclose(f);
    return sum;
}

static uint64_t resident(int pid)
{
    static const char *const keys[] = {"VmRSS:", "HugetlbPages:"};
    return read_kib(pid, "status", keys, 2);
}

static uint64_t proportional(int pid)
{
    static const char *const keys[] = {"Pss:", "Private_Hugetlb:", "Shared_Hugetlb:"};
    return read_kib(pid, "smaps_rollup", keys, 3);
}

/* Parses "PID (NAME) STATE PARENT ..."; the name may contain anything. False if it has ended. */
static bool read_stat(int pid, struct cli_process *p)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(line, 1, sizeof line - 1, f) : 0;
    if (f)
        fclose(f);
    line[n] = 0;
    char *open = strchr(line, '('), *close = strrchr(line, ')');
    if (!open || !close || close < open || strlen(close) < 5)
        return false;
    p->pid = pid;
    p->parent = (int)strtol(close + 4, NULL, 10);
    nbi_printable_copy(p->name, sizeof p->name, open + 1, (size_t)(close - open - 1));
    return close[2] != 'Z' && close[2] != 'X';
}

struct list {
    struct cli_process *v;
    size_t count, cap;
};

static enum nb_status add(struct list *l, const struct cli_process *p)
{
    NBI_TRY(NBI_ARRAY_RESERVE(l->v, l->cap, l->count + 1, "list of processes"));
    l->v[l->count++] = *p;
    return NB_OK;
}

static enum nb_status list_all(struct list *l)
{
    DIR *dir = nbi_sys_opendir("/proc");
    if (!dir)
        return nbi_fail(NB_EIO, "cannot read '/proc': %s", strerror(errno));
    enum nb_status rc = NB_OK;
    const char *name;
    while (rc == NB_OK && (name = nbi_dir_next(dir))) {
        struct cli_process p = {0};
        if (isdigit((unsigned char)name[0]) && read_stat((int)strtol(name, NULL, 10), &p))
            rc = add(l, &p);
    }
    closedir(dir);
    return rc;
}

/* Moves the descendants of root to the front; each pass finds the children of those found. */
static size_t select_below(struct cli_process *v, size_t count, int root)
{
    size_t found = 0, before;
    do {
        before = found;
        for (size_t i = found; i < count; i++) {
            bool below = v[i].parent == root;
            for (size_t k = 0; k < found && !below; k++)
                below = v[i].parent == v[k].pid;
            if (below) {
                struct cli_process p = v[i];
                v[i] = v[found];
                v[found++] = p;
            }
        }
    } while (found > before);
    return found;
}

enum nb_status cli_process_descendants(int root, struct cli_process **out, size_t *count)
{
    struct list l = {0};
    *out = NULL;
    *count = 0;
    enum nb_status rc = list_all(&l);
    if (rc != NB_OK) {
        free(l.v);
        return rc;
    }
    if (l.count > 0)
        *count = select_below(l.v, l.count, root);
    for (size_t i = 0; l.v && i < *count; i++)
        l.v[i].bytes = resident(l.v[i].pid);
    *out = l.v;
    return NB_OK;
}

uint64_t cli_process_bytes(const struct cli_process *list, size_t count, bool exactly)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t part = exactly ? proportional(list[i].pid) : list[i].bytes;
        sum += part ? part : resident(list[i].pid); /* which is 0 of one that has ended */
    }
    return sum;
}
