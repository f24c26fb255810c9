/* cpu.h - the CPU as a backend. */
#pragma once

#include "backend/backend.h"

enum nb_status nbi_cpu_open(struct nbi_backend **out, const struct nbi_backend_opts *opts);
