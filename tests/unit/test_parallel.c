/* test_parallel.c - the team of threads where its members lose their cores to other programs. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "base/parallel.h"
#include "support.h"

#define HOGS   6
#define PIECES 8
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

/* The first two cores this process may use. */
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

static void piece(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)ctx, (void)thread, (void)first, (void)count;
    volatile double x = 1;
    for (int i = 0; i < 20000; i++)
        x = x * 1.0000001;
}

/* Calls over a range in SLICE seconds. */
static int64_t calls_with(int threads)
{
    int64_t calls = 0;
    for (double end = nbi_now() + SLICE; nbi_now() < end; calls++)
        nbi_for_range(PIECES, 1, threads, piece, NULL);
    return calls;
}

/* A worker on a core with six others that never sleep gets a seventh of it, and each time it loses
 * the core in the middle of a piece the caller would wait for all of them in turn. The caller by
 * itself is the measure: both take turns, so that other programs slow them alike. */
static void a_worker_without_a_core_does_not_hold_the_caller_up(void **state)
{
    (void)state;
    int cores[2];
    pthread_t hogs[HOGS];
    if (!two_cores(cores) || !pin(cores[1]))
        skip("there is one core");
    nbi_for_range(PIECES, 1, 2, piece, NULL); /* the worker inherits the core */
    assert_true(pin(cores[0]));
    for (int i = 0; i < HOGS; i++)
        assert_int_equal(pthread_create(&hogs[i], NULL, hog, &cores[1]), 0);
    int64_t alone = 0, team = 0;
    for (int i = 0; i < ROUNDS; i++) {
        alone += calls_with(1);
        team += calls_with(2);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < HOGS; i++)
        pthread_join(hogs[i], NULL);
    print_message("%lld calls by itself, %lld with the team\n", (long long)alone, (long long)team);
    assert_true((double)team > 0.6 * (double)alone);
}

static void add(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    for (int64_t i = first; i < first + count; i++)
        atomic_fetch_add((atomic_llong *)ctx, i);
}

static void every_piece_is_done_once(void **state)
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
        cmocka_unit_test(a_worker_without_a_core_does_not_hold_the_caller_up),
        cmocka_unit_test(every_piece_is_done_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
