/* graph.cu - recurring lists of operations as CUDA graphs.
 *
 * A kernel launch takes the host about 7 us, more than most kernels of a decode step take the
 * device; launched in a graph about 1 us. A list goes through three states:
 *
 *   first time    queued as it is, so that everything loaded or chosen on first use is in place;
 *                 a list that comes once costs nothing extra
 *   second time   captured, then launched
 *   after that    launched; or queued as it is if it could not be captured
 *
 * Capturing allocates memory, which nothing else does once a stream exists. A stream keeps
 * NBI_GRAPHS_MAX lists and replaces the least recently used one. */
#include <string.h>

#include "backend/cuda/internal.cuh"

/* The entry of that key, or else the one to replace. */
static struct cached_graph *find(struct nbi_stream *s, const struct nbi_graph *r)
{
    struct cached_graph *oldest = s->graphs;
    for (int i = 0; i < NBI_GRAPHS_MAX; i++) {
        struct cached_graph *g = &s->graphs[i];
        if (g->used > 0 && memcmp(g->key, r->key, sizeof g->key) == 0)
            return g;
        if (g->used < oldest->used)
            oldest = g;
    }
    return oldest;
}

/* The driver keeps a graph that is still running until it ends. */
static void evict(struct cached_graph *g)
{
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    *g = {};
}

/* Captures the list. Fails if the list fails; *out stays NULL if only the capture does. */
static enum nb_status capture(struct nbi_stream *s, const struct nbi_graph *r, cudaGraphExec_t *out)
{
    cudaGraph_t graph = NULL;
    if (cudaStreamBeginCapture(s->queue, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        cudaGetLastError();
        return NB_OK;
    }
    enum nb_status rc = r->queue(r->ctx);
    cudaError_t ended = cudaStreamEndCapture(s->queue, &graph); /* also after an error */
    if (rc == NB_OK && ended == cudaSuccess &&
        cudaGraphInstantiateWithFlags(out, graph, 0) != cudaSuccess)
        *out = NULL;
    if (graph)
        cudaGraphDestroy(graph);
    cudaGetLastError(); /* or the next launch would report it */
    return rc;
}

enum nb_status nbi_cuda_graph_run(struct nbi_stream *s, const struct nbi_graph *r)
{
    CU_HERE(s);
    struct cached_graph *g = find(s, r);
    bool known = g->used > 0 && memcmp(g->key, r->key, sizeof g->key) == 0;
    if (!known) {
        evict(g);
        memcpy(g->key, r->key, sizeof g->key);
    }
    g->used = ++s->graph_clock;
    if (known && !g->exec && !g->tried) {
        g->tried = true;
        enum nb_status rc = capture(s, r, &g->exec);
        if (rc != NB_OK) {
            evict(g);
            return rc;
        }
    }
    if (known && g->exec) {
        CU_TRY(cudaGraphLaunch(g->exec, s->queue));
        return NB_OK;
    }
    enum nb_status rc = r->queue(r->ctx);
    if (rc != NB_OK && !known)
        evict(g); /* something was missing: the next time is a first time again */
    return rc;
}

void nbi_cuda_graphs_release(struct nbi_stream *s)
{
    for (int i = 0; i < NBI_GRAPHS_MAX; i++)
        evict(&s->graphs[i]);
}
