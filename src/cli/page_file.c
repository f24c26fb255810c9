/* page_file.c - prints to memory first, so that a page is written whole or not at all. */
#include "cli/page_file.h"

#include <stdlib.h>

#include "base/file.h"
#include "base/status.h"

enum nb_status cli_write_page(const char *dir, const char *name,
                              void (*print)(FILE *out, const void *ctx), const void *ctx)
{
    char *text = NULL;
    size_t len = 0;
    FILE *page = open_memstream(&text, &len);
    if (!page)
        return nbi_fail_memory(name, 0);
    print(page, ctx);
    bool complete = !ferror(page);
    complete = fclose(page) == 0 && text && complete;
    char *path = nbi_path_join(dir, name);
    enum nb_status rc = !complete ? nbi_fail_memory(name, len)
                        : path    ? nbi_file_write(path, text, len)
                                  : NB_ENOMEM;
    free(path);
    free(text);
    return rc;
}
