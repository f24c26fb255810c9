/* test_parallel.c - the team of threads on cores that other programs use too. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "base/parallel.h"
#include "support.h"

#define HOGS   6
#define CHUNKS 8
#define SLICE  0.1 /* seconds */
#define ROUNDS 15

static atomic_bool stop;

static bool pin(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return sched_setaffinity(0, sizeof set, &set) == 0;
}

/* The first two cores that this process may use. */
static bool two_cores(int *cores)
{
    cpu_set_t set;
    int found = 0;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return false;
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++)
        if (CPU_ISSET(i, &set))
            cores[found++] = i;
    return found == 2;
}

static void *hog(void *core)
{
    pin(*(int *)core);
    while (!atomic_load(&stop))
        ;
    return NULL;
}

static void burn_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)ctx, (void)thread, (void)first, (void)count;
    volatile double x = 1;
    for (int i = 0; i < 20000; i++)
        x = x * 1.0000001;
}

/* Number of calls over a range in SLICE seconds. */
static int64_t calls_with(int threads)
{
    int64_t calls = 0;
    for (double end = nbi_now() + SLICE; nbi_now() < end; calls++)
        nbi_for_range(CHUNKS, 1, threads, burn_chunk, NULL);
    return calls;
}

/* A worker that shares its core with six busy threads gets a seventh of it. Whenever it is
 * preempted in the middle of a chunk, the caller would wait for all of them in turn. The reference
 * is the caller alone; the two are measured alternately, so that other programs slow both down. */
static void a_preempted_worker_does_not_delay_the_caller(void **state)
{
    (void)state;
    int cores[2];
    pthread_t hogs[HOGS];
    if (!two_cores(cores) || !pin(cores[1]))
        skip("there is one core");
    nbi_for_range(CHUNKS, 1, 2, burn_chunk, NULL); /* the worker inherits the affinity */
    assert_true(pin(cores[0]));
    for (int i = 0; i < HOGS; i++)
        assert_int_equal(pthread_create(&hogs[i], NULL, hog, &cores[1]), 0);
    int64_t single = 0, team = 0;
    for (int i = 0; i < ROUNDS; i++) {
        single += calls_with(1);
        team += calls_with(2);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < HOGS; i++)
        pthread_join(hogs[i], NULL);
    print_message("%lld calls by itself, %lld with the team\n", (long long)single, (long long)team);
    assert_true((double)team > 0.6 * (double)single);
}

static void add(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    for (int64_t i = first; i < first + count; i++)
        atomic_fetch_add((atomic_llong *)ctx, i);
}

static void every_chunk_runs_once(void **state)
{
    (void)state;
    for (int64_t total = 0; total < 40; total++)
        for (int threads = 1; threads < 6; threads++) {
            atomic_llong sum = 0;
            nbi_for_range(total, 3, threads, add, &sum);
            assert_int_equal(sum, total * (total - 1) / 2);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_preempted_worker_does_not_delay_the_caller),
        cmocka_unit_test(every_chunk_runs_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
