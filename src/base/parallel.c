/* parallel.c - one team of threads for the whole process.
 *
 * `state` is the number of the last call, how many threads it wants, and whether it can do without
 * them, in one word: a worker decides by it alone whether the call concerns it. Those that take
 * part read fn and ctx, which stay as they are until the last of them is done.
 *
 * A call over a range can do without: whoever is free takes the next piece, and when there are no
 * more the caller shuts the gate. A worker that comes too late, since the machine has others to
 * serve, finds it shut and is not waited for. */
#include "base/parallel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/clock.h"

#define TEAM_MAX     1024
#define AWAKE_SECS   100e-6 /* how long to wait before sleeping */
#define COUNT_BITS   12
#define COUNT_MASK   ((1ull << COUNT_BITS) - 1)
#define OPTIONAL     (1ull << (COUNT_BITS - 1))
#define COUNT_OF(st) ((int)((st) & (COUNT_MASK ^ OPTIONAL)))

static struct {
    pthread_mutex_t busy; /* held during a call */
    pthread_mutex_t lock; /* for those who sleep */
    pthread_cond_t work, done;
    atomic_ullong state;
    atomic_int sleepers, caller_sleeps;
    atomic_ullong gate; /* the number of the call that may be entered, and how many are in it */
    int workers;
    nbi_team_fn fn;
    void *ctx;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static _Thread_local bool in_team;

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits a little for a change of state. */
static unsigned long long wait_awake(unsigned long long seen)
{
    double end = nbi_now() + AWAKE_SECS;
    unsigned long long now = atomic_load(&team.state);
    while (now == seen && nbi_now() < end)
        for (int i = 0; i < 32 && now == seen; i++) {
            pause_cpu();
            now = atomic_load(&team.state);
        }
    return now;
}

static unsigned long long wait_for_work(unsigned long long seen)
{
    unsigned long long now = wait_awake(seen);
    if (now != seen)
        return now;
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.sleepers, 1);
    while ((now = atomic_load(&team.state)) == seen)
        pthread_cond_wait(&team.work, &team.lock);
    atomic_fetch_sub(&team.sleepers, 1);
    pthread_mutex_unlock(&team.lock);
    return now;
}

static unsigned long long inside(unsigned long long gate)
{
    return gate & COUNT_MASK;
}

/* False: the call is over. */
static bool enter(unsigned long long call)
{
    unsigned long long gate = atomic_load(&team.gate);
    do
        if (gate >> COUNT_BITS != call >> COUNT_BITS)
            return false;
    while (!atomic_compare_exchange_weak(&team.gate, &gate, gate + 1));
    return true;
}

static void *worker(void *arg)
{
    int me = (int)(intptr_t)arg;
    unsigned long long seen =
        0; /* no call has this number: a first one is found even if it came before */
    in_team = true;
    for (;;) {
        seen = wait_for_work(seen);
        if (me >= COUNT_OF(seen) || (seen & OPTIONAL && !enter(seen)))
            continue;
        team.fn(team.ctx, me, COUNT_OF(seen));
        if (inside(atomic_fetch_sub(&team.gate, 1)) == 1 && atomic_load(&team.caller_sleeps)) {
            pthread_mutex_lock(&team.lock);
            pthread_cond_signal(&team.done);
            pthread_mutex_unlock(&team.lock);
        }
    }
    return NULL;
}

/* After a fork the child has no workers. */
static void forget_workers(void)
{
    team.workers = 0;
    atomic_store(&team.state, 0);
    atomic_store(&team.sleepers, 0);
    pthread_mutex_init(&team.busy, NULL);
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.work, NULL);
    pthread_cond_init(&team.done, NULL);
}

/* How many threads there are, `threads` if they can be had. Signals stay with the caller. */
static int gather(int threads)
{
    static bool first = true;
    sigset_t all, before;
    if (team.workers >= threads - 1)
        return threads;
    if (first)
        pthread_atfork(NULL, NULL, forget_workers);
    first = false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team.workers < threads - 1) {
        pthread_t id;
        if (pthread_create(&id, NULL, worker, (void *)(intptr_t)(team.workers + 1)) != 0)
            break;
        pthread_detach(id);
        team.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team.workers + 1;
}

static void wait_for_workers(void)
{
    double end = nbi_now() + AWAKE_SECS;
    while (inside(atomic_load(&team.gate)) > 0 && nbi_now() < end)
        for (int i = 0; i < 32 && inside(atomic_load(&team.gate)) > 0; i++)
            pause_cpu();
    if (inside(atomic_load(&team.gate)) == 0)
        return;
    pthread_mutex_lock(&team.lock);
    atomic_store(&team.caller_sleeps, 1);
    while (inside(atomic_load(&team.gate)) > 0)
        pthread_cond_wait(&team.done, &team.lock);
    atomic_store(&team.caller_sleeps, 0);
    pthread_mutex_unlock(&team.lock);
}

static void run(int threads, nbi_team_fn fn, void *ctx, bool optional)
{
    threads = threads > TEAM_MAX ? TEAM_MAX : threads;
    if (threads <= 1 || in_team || pthread_mutex_trylock(&team.busy) != 0) {
        fn(ctx, 0, 1);
        return;
    }
    threads = gather(threads);
    team.fn = fn;
    team.ctx = ctx;
    unsigned long long number = (atomic_load(&team.state) >> COUNT_BITS) + 1;
    unsigned long long call = number << COUNT_BITS;
    atomic_store(&team.gate, optional ? call : call | (unsigned long long)(threads - 1));
    atomic_store(&team.state, call | (unsigned long long)threads | (optional ? OPTIONAL : 0));
    if (atomic_load(&team.sleepers) > 0) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.work);
        pthread_mutex_unlock(&team.lock);
    }
    in_team = true;
    fn(ctx, 0, threads);
    in_team = false;
    atomic_fetch_and(&team.gate, COUNT_MASK); /* no call has the number 0 */
    wait_for_workers();
    pthread_mutex_unlock(&team.busy);
}

void nbi_team_run(int threads, nbi_team_fn fn, void *ctx)
{
    run(threads, fn, ctx, false);
}

/* ---- ranges ---- */

struct range {
    int64_t total, chunk;
    atomic_llong next;
    nbi_range_fn fn;
    void *ctx;
};

static void take_pieces(void *ctx, int thread, int threads)
{
    struct range *r = ctx;
    int64_t first;
    (void)threads;
    while ((first = atomic_fetch_add(&r->next, r->chunk)) < r->total)
        r->fn(r->ctx, thread, first, r->total - first < r->chunk ? r->total - first : r->chunk);
}

void nbi_for_range(int64_t total, int64_t chunk, int threads, nbi_range_fn fn, void *ctx)
{
    struct range r = {.total = total, .chunk = chunk, .fn = fn, .ctx = ctx};
    int64_t chunks = total / chunk + (total % chunk != 0);
    run(chunks < threads ? (int)chunks : threads, take_pieces, &r, true);
}

/* ---- work that can fail ---- */

struct chunks {
    nbi_chunk_fn fn;
    void *ctx;
    atomic_int failed;
    pthread_mutex_t lock;
    char message[1024]; /* a thread's own message is lost with it */
};

static void one_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct chunks *c = ctx;
    if (atomic_load(&c->failed) != NB_OK)
        return;
    enum nb_status rc = nbi_check_interrupt();
    if (rc == NB_OK)
        rc = c->fn(c->ctx, thread, first, count);
    if (rc == NB_OK)
        return;
    pthread_mutex_lock(&c->lock);
    if (atomic_load(&c->failed) == NB_OK) {
        snprintf(c->message, sizeof c->message, "%s", nb_last_error());
        atomic_store(&c->failed, (int)rc);
    }
    pthread_mutex_unlock(&c->lock);
}

enum nb_status nbi_for_chunks(int64_t total, int64_t chunk, int threads, nbi_chunk_fn fn, void *ctx)
{
    struct chunks c = {.fn = fn, .ctx = ctx, .lock = PTHREAD_MUTEX_INITIALIZER};
    nbi_for_range(total, chunk, threads, one_chunk, &c);
    pthread_mutex_destroy(&c.lock);
    enum nb_status rc = (enum nb_status)atomic_load(&c.failed);
    return rc == NB_OK ? NB_OK : nbi_fail(rc, "%s", c.message);
}
