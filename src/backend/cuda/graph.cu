/* graph.cu - lists of operations that come back, as CUDA graphs.
 *
 * A launch by itself takes the host about 7 us, more than most kernels of a step of decoding take
 * the device; in a graph about 1 us. The first time a list is queued as it is: whatever is loaded
 * or chosen when it is first needed is there afterwards, and lists that come once cost nothing.
 * The second time it is recorded, and then launched whenever it comes. Recording allocates, which
 * nothing else does once a stream is there; of the lists the one that was not used for longest
 * makes room. */
#include <string.h>

#include "backend/cuda/internal.cuh"

/* The list of that key, or else the one that makes room for it. */
static struct graph *find(struct nbi_stream *s, const struct nbi_routine *r)
{
    struct graph *oldest = s->graphs;
    for (int i = 0; i < NBI_GRAPHS_MAX; i++) {
        struct graph *g = &s->graphs[i];
        if (g->used > 0 && memcmp(g->key, r->key, sizeof g->key) == 0)
            return g;
        if (g->used < oldest->used)
            oldest = g;
    }
    return oldest;
}

/* A graph that is still at work is freed behind it. */
static void forget(struct graph *g)
{
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    *g = {};
}

static enum nb_status record(struct nbi_stream *s, const struct nbi_routine *r,
                             cudaGraphExec_t *out)
{
    cudaGraph_t graph = NULL;
    CU_TRY(cudaStreamBeginCapture(s->queue, cudaStreamCaptureModeThreadLocal));
    enum nb_status rc = r->queue(r->ctx);
    cudaError_t ended = cudaStreamEndCapture(s->queue, &graph); /* whatever rc is */
    if (rc == NB_OK && ended != cudaSuccess)
        rc = nbi_cuda_fail(ended, "recording a graph");
    if (rc == NB_OK) {
        cudaError_t made = cudaGraphInstantiateWithFlags(out, graph, 0);
        if (made != cudaSuccess) {
            *out = NULL;
            rc = nbi_cuda_fail(made, "making a graph");
        }
    }
    if (graph)
        cudaGraphDestroy(graph);
    if (rc != NB_OK)
        cudaGetLastError(); /* it was reported; the next launch is not to find it */
    return rc;
}

enum nb_status nbi_cuda_repeat(struct nbi_stream *s, const struct nbi_routine *r)
{
    CU_HERE(s);
    struct graph *g = find(s, r);
    bool known = g->used > 0 && memcmp(g->key, r->key, sizeof g->key) == 0;
    if (!known) {
        forget(g);
        memcpy(g->key, r->key, sizeof g->key);
    }
    g->used = ++s->repeats;
    if (!known)
        return r->queue(r->ctx);
    if (!g->exec)
        NBI_TRY(record(s, r, &g->exec));
    CU_TRY(cudaGraphLaunch(g->exec, s->queue));
    return NB_OK;
}

void nbi_cuda_graphs_end(struct nbi_stream *s)
{
    for (int i = 0; i < NBI_GRAPHS_MAX; i++)
        forget(&s->graphs[i]);
}
