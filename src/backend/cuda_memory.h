/* cuda_memory.h - the memory that the CUDA backend takes, in plain C: a plan for a GPU needs
 * neither the GPU nor a build with CUDA. The backend itself allocates by the same functions. */
#pragma once

#include "backend/backend.h"

/* Up to this many rows the decode kernels compute NVFP4 products; above it cuBLASLt does. */
#define NBI_DECODE_LINEAR_ROWS 64

/* Up to this many rows attention uses the decode kernels. */
#define NBI_DECODE_ATTENTION_ROWS 64

#define NBI_SPLITS_MAX       256 /* of the keys of a row of attention */
#define NBI_INVARIANT_SPLITS 32  /* at least as many, for batch-invariant rows */
#define NBI_BWD_TILE         64  /* rows of lse and delta of attention_bwd: a multiple of this */

#define NBI_SLAB_BYTES         ((int64_t)64 << 20) /* struct slab */
#define NBI_STAGE_BYTES        ((int64_t)4 << 20)  /* cuda.host_stage, device_stage */
#define NBI_WEIGHTS_BF16_BYTES ((int64_t)32 << 20) /* nbi_stream.weights_bf16, for prefill */
#define NBI_WORKSPACE_BYTES    ((int64_t)8 << 20)  /* nbi_stream.workspace */
#define NBI_PINNED_BYTES       ((int64_t)1 << 20)  /* nbi_stream.pinned */

/* nbi_stream.workspace in training; fewer exclude some of cuBLASLt's faster algorithms. */
#define NBI_TRAIN_WORKSPACE_BYTES ((int64_t)32 << 20)

/* Tiles of NVFP4 matrices (cuda/nvfp4_tile.cuh), in rows, columns and bytes. */
#define CUDA_TILE_ROWS  16
#define CUDA_TILE_COLS  128
#define CUDA_TILE_BYTES 1152

/* What the process takes of an H200 besides its blocks: the CUDA context, the kernels, cuBLASLt.
 * Estimated from generating text with a 4B model and 4,096 tokens of context, which took 3,823 MiB
 * by nvidia-smi (tests/gpu/run.sh limits). Of these 2,514 MiB were weights in 37 slabs, 576 MiB the
 * KV cache, 98 MiB activations, 94 MiB scratch and 8 MiB stages. Training loads other kernels. */
#define NBI_CONTEXT_BYTES ((int64_t)533 << 20)

/* ---- streams ---- */

/* Bytes of the pieces of a stream's block, in their order; see struct nbi_stream. */
struct nbi_cuda_scratch {
    int64_t x_f16, x_scale, act_f16, act_scale, attention, counters, stats, weights_bf16, workspace;
    int64_t total;
};

struct nbi_cuda_scratch nbi_cuda_scratch_for(const struct nbi_stream_limits *limits);

/* Whether products of f32 activations go through cuBLASLt or FP4 tensor cores. */
bool nbi_cuda_has_prefill(const struct nbi_stream_limits *limits);

/* Bytes of nbi_stream.weights_bf16 of streams with activations in bf16. */
int64_t nbi_cuda_train_weights_bytes(const struct nbi_stream_limits *limits);

/* Bytes of nbi_stream.attention_partials. */
int64_t nbi_cuda_attention_bytes(const struct nbi_stream_limits *limits);

/* Rows of nbi_stream.attention_stats for N rows. */
int64_t nbi_cuda_bwd_rows(int64_t N);

/* ---- the backend ---- */

/* Sets what is the same for all GPUs: capabilities, sizes of passes, and how much memory is taken.
 */
void nbi_cuda_describe(struct nbi_backend *be);
