/* parallel.c - one team of threads for the whole process.
 *
 * `state` packs the number of the last call, its thread count and whether it is optional into one
 * word, so that a worker decides by this word alone whether to take part. Those that do read fn and
 * ctx, which do not change until the last of them has finished.
 *
 * A call over a range is optional: idle threads take the next chunk, and when none are left the
 * caller closes the gate. A worker that comes too late, because the CPU runs other processes, finds
 * the gate closed and is not waited for. A worker that is preempted in the middle of a chunk must
 * be waited for. Where that costs more than the workers contribute, calls over ranges use fewer
 * threads for a while (`throttle`), so that two programs on the same cores share them instead of
 * waiting for each other. */
#include "base/parallel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/clock.h"

#define TEAM_MAX     1024
#define SPIN_SECS    100e-6 /* spin time before sleeping */
#define WINDOW_SECS  0.02   /* interval over which waiting time is summed */
#define WAIT_SHARE   0.2    /* waiting share of an interval that shrinks the team */
#define HOLD_MIN     0.05   /* seconds that the team stays smaller; twice as long each time, */
#define HOLD_MAX     2.0    /* up to this */
#define COUNT_BITS   12
#define COUNT_MASK   ((1ull << COUNT_BITS) - 1)
#define OPTIONAL     (1ull << (COUNT_BITS - 1))
#define COUNT_OF(st) ((int)((st) & (COUNT_MASK ^ OPTIONAL)))

static struct {
    pthread_mutex_t busy; /* held during a call */
    pthread_mutex_t lock; /* protects sleeping and waking */
    pthread_cond_t work, done;
    atomic_ullong state;
    atomic_int sleepers, caller_sleeps;
    atomic_ullong gate; /* number of the open call, and how many workers are in it */
    int workers;
    nbi_team_fn fn;
    void *ctx;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

/* Limits the threads of calls over ranges. Protected by team.busy. */
static struct {
    int limit; /* 0: no limit */
    double window, lost, hold, retry;
} throttle;

static _Thread_local bool in_team;

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Spins for a change of state, for a limited time. */
static unsigned long long spin_for_work(unsigned long long seen)
{
    double end = nbi_now() + SPIN_SECS;
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
    unsigned long long now = spin_for_work(seen);
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

/* Returns false if the call is over. */
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
    /* No call has number 0, so a worker also sees a call made before it started. */
    unsigned long long seen = 0;
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

/* Starts missing workers; returns how many threads there are, at most `threads`. Workers block all
 * signals, so the caller handles them. */
static int start_workers(int threads)
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
    double end = nbi_now() + SPIN_SECS;
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

/* ---- throttle ---- */

static int throttled(int threads, double now)
{
    if (throttle.limit == 0 || throttle.limit >= threads)
        return threads;
    if (now >= throttle.retry) {
        throttle.limit += (throttle.limit + 2) / 3;
        throttle.retry = now + throttle.hold;
        throttle.window = now;
        throttle.lost = 0;
    }
    return throttle.limit < threads ? throttle.limit : threads;
}

/* Records that a call with this many threads has ended. lost: seconds that the caller waited for
 * chunks which should have been finished by then. */
static void update_throttle(int threads, double lost, double now)
{
    throttle.lost += lost;
    double length = now - throttle.window;
    if (length < WINDOW_SECS)
        return;
    if (throttle.lost > WAIT_SHARE * length) {
        throttle.hold = throttle.hold * 2 > HOLD_MAX ? HOLD_MAX : throttle.hold * 2;
        throttle.limit = threads - (threads + 3) / 4;
        throttle.retry = now + throttle.hold;
    } else if (throttle.hold > HOLD_MIN && threads >= throttle.limit) {
        throttle.hold /= 2;
    }
    throttle.hold = throttle.hold < HOLD_MIN ? HOLD_MIN : throttle.hold;
    throttle.window = now;
    throttle.lost = 0;
}

/* A range is an optional call: late workers are not waited for. */
struct range {
    int64_t total, chunk, caller_chunks; /* chunks that the caller itself did */
    atomic_llong next;
    nbi_range_fn fn;
    void *ctx;
};

static void call_team(int threads, nbi_team_fn fn, void *ctx, bool optional)
{
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
    atomic_fetch_and(&team.gate, COUNT_MASK); /* no call has number 0 */
}

/* On success the caller owns the team, up to *threads of them; otherwise it runs alone. */
static bool take_team(int *threads)
{
    *threads = *threads > TEAM_MAX ? TEAM_MAX : *threads;
    if (*threads <= 1 || in_team || pthread_mutex_trylock(&team.busy) != 0)
        return false;
    *threads = start_workers(*threads);
    return true;
}

void nbi_team_run(int threads, nbi_team_fn fn, void *ctx)
{
    if (!take_team(&threads)) {
        fn(ctx, 0, 1);
        return;
    }
    call_team(threads, fn, ctx, false);
    wait_for_workers();
    pthread_mutex_unlock(&team.busy);
}

/* ---- ranges ---- */

static void take_chunks(void *ctx, int thread, int threads)
{
    struct range *r = ctx;
    int64_t first, count = 0;
    (void)threads;
    for (; (first = atomic_fetch_add(&r->next, r->chunk)) < r->total; count++)
        r->fn(r->ctx, thread, first, r->total - first < r->chunk ? r->total - first : r->chunk);
    if (thread == 0)
        r->caller_chunks = count;
}

/* The workers' last chunks should take no longer than two of the caller's own. */
static void run_range(struct range *r, int threads)
{
    double began = nbi_now();
    threads = throttled(threads, began);
    if (threads <= 1) {
        take_chunks(r, 0, 1);
        return;
    }
    call_team(threads, take_chunks, r, true);
    double worked = nbi_now();
    wait_for_workers();
    double now = nbi_now();
    double chunk_seconds = (worked - began) / (double)(r->caller_chunks + !r->caller_chunks);
    double lost = now - worked - 2 * chunk_seconds;
    update_throttle(threads, lost > 0 ? lost : 0, now);
}

void nbi_for_range(int64_t total, int64_t chunk, int threads, nbi_range_fn fn, void *ctx)
{
    struct range r = {.total = total, .chunk = chunk, .fn = fn, .ctx = ctx};
    int64_t chunks = total / chunk + (total % chunk != 0);
    threads = chunks < threads ? (int)chunks : threads;
    if (!take_team(&threads)) {
        take_chunks(&r, 0, 1);
        return;
    }
    run_range(&r, threads);
    pthread_mutex_unlock(&team.busy);
}

/* ---- work that can fail ---- */

struct chunks {
    nbi_chunk_fn fn;
    void *ctx;
    struct nb_cancel *cancel; /* the caller's */
    atomic_int failed;
    pthread_mutex_t lock;
    char message[1024]; /* copied from the worker: messages are per thread */
};

static void one_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct chunks *c = ctx;
    if (atomic_load(&c->failed) != NB_OK)
        return;
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(c->cancel);
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
    struct chunks c = {
        .fn = fn, .ctx = ctx, .cancel = nbi_cancel_current(), .lock = PTHREAD_MUTEX_INITIALIZER};
    nbi_for_range(total, chunk, threads, one_chunk, &c);
    pthread_mutex_destroy(&c.lock);
    enum nb_status rc = (enum nb_status)atomic_load(&c.failed);
    return rc == NB_OK ? NB_OK : nbi_fail(rc, "%s", c.message);
}
