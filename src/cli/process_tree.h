/* process_tree.h - the descendants of a process and their memory, from /proc. */
#pragma once

#include "base/status.h"

struct cli_process {
    int pid, parent;
    uint64_t bytes; /* resident, huge pages included; pages that processes share count for each */
    char name[32];
};

/* The living descendants of root, without root; the caller frees *out. A process that ends
 * meanwhile may or may not be among them. */
enum nb_status cli_process_descendants(int root, struct cli_process **out, size_t *count);

/* Their memory in all. exactly: a page shared by n processes counts 1/n for each, where the kernel
 * reports that, which takes it longer. */
uint64_t cli_process_bytes(const struct cli_process *list, size_t count, bool exactly);
