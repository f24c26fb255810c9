/* page_file.h - one generated file. */
#pragma once

#include <stdio.h>

#include "nibble/core.h"

/* Writes what `print` prints to dir/name. */
enum nb_status cli_write_page(const char *dir, const char *name,
                              void (*print)(FILE *out, const void *ctx), const void *ctx);
