/* process_tree.h - processes below one, and the memory they hold, from /proc. */
#pragma once

#include "base/status.h"

struct cli_process {
    int pid, parent;
    uint64_t bytes; /* resident, huge pages included; pages that processes share count for each */
    char name[32];
};

/* The living children of root, their children and so on, without root; the caller frees *out. A
 * process that ends meanwhile may be in it or not. */
enum nb_status cli_process_descendants(int root, struct cli_process **out, size_t *count);

/* Their memory together; exactly: a page that n processes share counts a part in n for each, where
 * the kernel tells, which takes it longer. */
uint64_t cli_process_bytes(const struct cli_process *list, size_t count, bool exactly);
