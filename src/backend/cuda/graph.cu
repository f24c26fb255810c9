/* graph.cu - lists of operations that come back, as CUDA graphs.
 *
 * A launch by itself takes the host about 7 us, more than most kernels of a step of decoding take
 * the device; in a graph about 1 us. The first time a list is queued as it is: whatever is loaded
 * or chosen when it is first needed is there afterwards, and lists that come once cost nothing.
 * The second time it is recorded, and then launched whenever it comes. Recording allocates, which
 * nothing else does once a stream is there; a list that cannot be recorded is queued as it is from
 * then on. Of the lists the one that was not used for longest makes room. */
#include <string.h>

#include "backend/cuda/internal.cuh"

/* The list of that key, or else the one that makes room for it. */
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

/* A graph that is still at work is freed behind it. */
static void forget(struct cached_graph *g)
{
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    *g = {};
}

/* Fails as the list itself does; *out stays NULL where only a graph could not be made of it. */
static enum nb_status record(struct nbi_stream *s, const struct nbi_graph *r, cudaGraphExec_t *out)
{
    cudaGraph_t graph = NULL;
    if (cudaStreamBeginCapture(s->queue, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        cudaGetLastError();
        return NB_OK;
    }
    enum nb_status rc = r->queue(r->ctx);
    if (rc == NB_OK)
        rc = nbi_cuda_finish_pending(s); /* what is pending belongs to the list */
    s->pending = {};
    clear_handoff(s);
    s->rope = {};
    cudaError_t ended = cudaStreamEndCapture(s->queue, &graph); /* whatever rc is */
    if (rc == NB_OK && ended == cudaSuccess &&
        cudaGraphInstantiateWithFlags(out, graph, 0) != cudaSuccess)
        *out = NULL;
    if (graph)
        cudaGraphDestroy(graph);
    cudaGetLastError(); /* the next launch is not to find it */
    return rc;
}

enum nb_status nbi_cuda_graph_run(struct nbi_stream *s, const struct nbi_graph *r)
{
    CU_HERE(s);
    struct cached_graph *g = find(s, r);
    bool known = g->used > 0 && memcmp(g->key, r->key, sizeof g->key) == 0;
    if (!known) {
        forget(g);
        memcpy(g->key, r->key, sizeof g->key);
    }
    g->used = ++s->graph_clock;
    if (known && !g->exec && !g->tried) {
        g->tried = true;
        enum nb_status rc = record(s, r, &g->exec);
        if (rc != NB_OK) {
            forget(g);
            return rc;
        }
    }
    if (known && g->exec) {
        CU_TRY(cudaGraphLaunch(g->exec, s->queue));
        return NB_OK;
    }
    enum nb_status rc = r->queue(r->ctx);
    if (rc != NB_OK && !known)
        forget(g); /* not everything was there the first time */
    return rc;
}

void nbi_cuda_graphs_release(struct nbi_stream *s)
{
    for (int i = 0; i < NBI_GRAPHS_MAX; i++)
        forget(&s->graphs[i]);
}
