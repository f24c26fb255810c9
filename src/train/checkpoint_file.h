/* checkpoint_file.h - one file of a checkpoint, for those who manage the directory. */
#pragma once

#include "train/checkpoint.h"

/* Appears whole or not at all, whatever its name. */
enum nb_status nbi_checkpoint_write(const char *path, const struct nbi_ckpt_content *content);
