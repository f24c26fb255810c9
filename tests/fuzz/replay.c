/* replay.c - runs a fuzz target over the files of its corpus without libFuzzer, so that `make test`
 * repeats all kept inputs, under whatever sanitizer is enabled. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv)
{
    DIR *dir = argc == 2 ? opendir(argv[1]) : NULL;
    if (!dir) {
        fprintf(stderr, "usage: %s CORPUS\n", argv[0]);
        return 2;
    }
    int files = 0;
    struct dirent *e;
    while ((e = readdir(dir))) {
        char *path = nbi_path_join(argv[1], e->d_name), *bytes = NULL;
        size_t len;
        if (e->d_name[0] != '.' && nbi_file_read(path, (size_t)1 << 24, &bytes, &len) == NB_OK) {
            LLVMFuzzerTestOneInput((const uint8_t *)bytes, len);
            files++;
        }
        free(bytes);
        free(path);
    }
    closedir(dir);
    printf("%d inputs replayed\n", files);
    return files > 0 ? 0 : 1;
}
