/* scheduler.cpp - runs a grid on one host thread, with a fiber for each CUDA thread.
 *
 * A thread runs until it meets others: at a warp instruction, a barrier, or in a loop that polls.
 * Then the next one that is ready runs, of the same warp if possible. CTAs run one after the other,
 * except those of a cluster or of a cooperative grid, which take turns: each then has its own copy
 * of shared memory, swapped in while one of its threads runs.
 *
 * NB_EMULATED_ORDER chooses the order of threads and CTAs: "forward" (the default), "reverse", or
 * a number, the seed of a random order. */
#include "emulator.h"

#include <map>
#include <memory>
#include <mutex>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>

#ifdef NB_EMULATED_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated
{

/* ---- state ---- */

constexpr size_t STACK_BYTES = 256 << 10;
constexpr int WARPS_MAX = 32, MEETINGS_MAX = 8, CANARY_BYTES = 1024;
constexpr int MARKS = 64;              /* pairs of a warp */
constexpr long IDLE_ROUNDS_MAX = 1000; /* of polling without progress */

struct cta;

struct lane {
    void *sp = nullptr;
    struct cta *cta = nullptr;
    struct warp *in = nullptr;
    uint3 index;
    int number, warp;
    place at;
    char *stack = nullptr;
    void *fake_stack = nullptr; /* ASan's */
    void *fiber = nullptr;      /* TSan's */
    lane_copies copies;
};

/* Lanes that have arrived at a warp instruction which others of its mask have not reached. */
struct meeting {
    uint32_t mask, arrived;
    finish_fn finish;
    char *marks;
};

/* For ThreadSanitizer, where those leave marks who meet again and again. Two places take turns:
 * with one, a thread that is late to leave a barrier would take marks of the next one too. */
struct mark_pair {
    char places[2];
    unsigned turn;
};

struct warp {
    lane lanes[32];
    mark_pair marks[MARKS]; /* by mask */
    void *slots[32];
    uint32_t live, ready, polling; /* masks of lanes */
    meeting meetings[MEETINGS_MAX];
    int meeting_count;
};

struct cta {
    uint3 index;
    warp warps[WARPS_MAX];
    int number; /* in the resident group */
    int warp_count, live;
    uint32_t ready;             /* mask of warps */
    int arrived, votes, result; /* of the barrier */
    place barrier;
    mark_pair marks;         /* of the barrier */
    std::vector<char> saved; /* shared memory while others run */
    cta_copies copies;
};

static std::vector<std::unique_ptr<cta>> resident; /* reused; the first group_size are in use */
static size_t group_size;
static const grid *running;
static lane host_lane, *current; /* host_lane: the caller of run_grid */
static int cluster_arrived;
static char first_marks, last_marks; /* of a CTA's threads: when they start, when they end */
static long idle_rounds;
static std::mutex one_grid;

alignas(1024) char dynamic_smem[SMEM_MAX + CANARY_BYTES];

/* ---- the order ---- */

static struct {
    bool reverse, random;
    uint64_t state;
} order;

static unsigned random_number(void)
{
    order.state ^= order.state << 13;
    order.state ^= order.state >> 7;
    order.state ^= order.state << 17;
    return (unsigned)(order.state >> 32);
}

__attribute__((constructor)) static void read_order(void)
{
    const char *text = getenv("NB_EMULATED_ORDER");
    if (!text || strcmp(text, "forward") == 0)
        return;
    order.reverse = strcmp(text, "reverse") == 0;
    order.random = !order.reverse;
    order.state = strtoull(text, nullptr, 10) * 0x9E3779B97F4A7C15u + 1;
    if (order.random && (text[0] < '0' || text[0] > '9'))
        fail("NB_EMULATED_ORDER is forward, reverse or a number, not '%s'", text);
}

/* NB_EMULATED_MUTANT=FILE:LINE takes out the __syncthreads there. The tests must notice. */
static struct {
    const char *file;
    size_t length;
    int line;
} mutant;

__attribute__((constructor)) static void read_mutant(void)
{
    const char *text = getenv("NB_EMULATED_MUTANT"), *colon = text ? strrchr(text, ':') : nullptr;
    if (colon)
        mutant = {text, (size_t)(colon - text), (int)strtol(colon + 1, nullptr, 10)};
}

static bool is_mutant(const place &at)
{
    size_t length = strlen(at.file);
    return length >= mutant.length &&
           memcmp(at.file + length - mutant.length, mutant.file, mutant.length) == 0;
}

bool coin(void)
{
    return order.random && random_number() % 2;
}

/* A bit of a mask that is not 0: the next one after `last`, with wrapping. */
static int choose(uint32_t mask, int last)
{
    uint32_t beyond =
        order.reverse ? mask & ((1u << last) - 1) : mask & ~(uint32_t)((2ull << last) - 1);
    if (order.random) {
        unsigned by = random_number() % 32;
        uint32_t turned = by ? mask >> by | mask << (32 - by) : mask;
        return (__builtin_ctz(turned) + (int)by) % 32;
    }
    if (beyond)
        mask = beyond;
    return order.reverse ? 31 - __builtin_clz(mask) : __builtin_ctz(mask);
}

/* ---- reports ---- */

void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "emulated GPU: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    if (current && current != &host_lane)
        fprintf(stderr, "  in thread %u %u %u of CTA %u %u %u\n", threadIdx.x, threadIdx.y,
                threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    abort();
}

/* All threads wait, and nothing that they wait for can happen. */
[[noreturn]] static void report_deadlock(void)
{
    std::map<std::string, int> places;
    for (size_t c = 0; c < group_size; c++)
        for (int w = 0; w < resident[c]->warp_count; w++)
            for (lane &l : resident[c]->warps[w].lanes)
                if (resident[c]->warps[w].live >> l.number & 1)
                    places[std::string(l.at.what) + " at " + l.at.file + ":" +
                           std::to_string(l.at.line)]++;
    for (auto &p : places)
        fprintf(stderr, "emulated GPU: %d threads wait in %s\n", p.second, p.first.c_str());
    fail("deadlock");
}

/* ---- fibers ---- */

extern "C" void nb_switch_stack(void **save, void *to);
asm(".text\n"
    ".type nb_switch_stack, @function\n"
    "nb_switch_stack:\n"
    "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
    "    mov %rsp, (%rdi)\n"
    "    mov %rsi, %rsp\n"
    "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
    "    ret\n"
    ".size nb_switch_stack, .-nb_switch_stack\n");

/* Exchanges shared memory when a CTA of the group gives way to another. */
__attribute__((noinline)) static void swap_shared(cta &from, cta &to)
{
    const shared_range &s = running->statics;
    size_t bytes = (size_t)(s.end - s.begin);
    from.saved.resize(bytes + running->smem);
    memcpy(from.saved.data(), s.begin, bytes);
    memcpy(from.saved.data() + bytes, dynamic_smem, running->smem);
    memcpy(s.begin, to.saved.data(), bytes);
    memcpy(dynamic_smem, to.saved.data() + bytes, running->smem);
}

static cta *swapped_in;

#ifdef NB_EMULATED_ASAN
static struct {
    const void *bottom;
    size_t bytes;
} host_stack;
#endif

static void switch_to(lane *to, bool ended)
{
    lane *from = current;
    if (to == from)
        return;
    current = to;
    threadIdx = to->index;
    if (to->cta != from->cta && to->cta) {
        blockIdx = to->cta->index;
        if (to->cta != swapped_in) {
            swap_shared(*swapped_in, *to->cta);
            swapped_in = to->cta;
        }
    }
#ifdef NB_EMULATED_ASAN
    __sanitizer_start_switch_fiber(ended ? nullptr : &from->fake_stack,
                                   to->cta ? to->stack : host_stack.bottom,
                                   to->cta ? STACK_BYTES : host_stack.bytes);
#endif
#ifdef NB_EMULATED_TSAN
    __tsan_switch_to_fiber(to->fiber, __tsan_switch_to_fiber_no_sync);
#endif
    (void)ended;
    nb_switch_stack(&from->sp, to->sp);
#ifdef NB_EMULATED_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

/* ---- choosing the next thread ---- */

static void make_ready(cta &c, int w, uint32_t lanes)
{
    c.warps[w].ready |= lanes;
    if (c.warps[w].ready)
        c.ready |= 1u << w;
}

/* A thread that is ready, or NULL. */
static lane *next_ready(void)
{
    cta *c = current->cta;
    int w = current->warp, l = current->number;
    bool stay = c && c->warps[w].ready && !(order.random && random_number() % 8 == 0);
    if (!c) { /* the first thread of a group */
        c = resident[0].get();
        w = order.reverse ? 0 : 31;
    }
    for (size_t i = 0; !stay && i < group_size; i++) {
        cta *candidate = resident[((size_t)c->number + i) % group_size].get();
        if (!candidate->ready)
            continue;
        w = choose(candidate->ready, w);
        l = candidate == c && w == current->warp ? l : order.reverse ? 0 : 31;
        c = candidate;
        stay = true;
    }
    return stay ? &c->warps[w].lanes[choose(c->warps[w].ready, l)] : nullptr;
}

/* Lets all threads that poll look again. Returns whether there are any. */
static bool wake_polling(void)
{
    bool any = false;
    for (size_t i = 0; i < group_size; i++)
        for (int w = 0; w < resident[i]->warp_count; w++) {
            warp &v = resident[i]->warps[w];
            any = any || v.polling;
            make_ready(*resident[i], w, v.polling);
            v.polling = 0;
        }
    return any;
}

/* The thread to run now; the caller of run_grid, when all have ended. */
__attribute__((noinline)) static lane *next_anywhere(void)
{
    lane *next = next_ready();
    if (!next) {
        if (wake_polling() && idle_rounds++ < IDLE_ROUNDS_MAX)
            next = next_ready();
        for (size_t i = 0; !next && i < group_size; i++)
            if (resident[i]->live > 0)
                report_deadlock();
    }
    return next ? next : &host_lane;
}

static void run_others(bool ended)
{
    const warp *w = current->in;
    if (!order.random && w && w->ready) /* the usual case, fast */
        switch_to(&current->in->lanes[choose(w->ready, current->number)], ended);
    else
        switch_to(next_anywhere(), ended);
}

/* The current thread stops until somebody makes it ready. */
static void wait(place at)
{
    lane &l = *current;
    warp &w = *l.in;
    l.at = at;
    w.ready &= ~(1u << l.number);
    if (!w.ready)
        l.cta->ready &= ~(1u << l.warp);
    run_others(false);
}

void progress(void)
{
    idle_rounds = 0;
}

void poll(place at)
{
    current->in->polling |= 1u << current->number;
    wait(at);
}

/* In a random order, others may run first. */
static void maybe_yield(void)
{
    if (order.random && random_number() % 4 == 0)
        run_others(false);
}

/* ---- meetings ---- */

/* Ends a meeting if all lanes of its mask that still live have arrived. */
static bool try_finish(cta &c, int number, int i)
{
    warp &w = c.warps[number];
    meeting m = w.meetings[i];
    if (m.mask & w.live & ~m.arrived)
        return false;
    w.meetings[i] = w.meetings[--w.meeting_count];
    take_marks(m.marks);
    m.finish(w.slots, m.arrived);
    leave_mark(m.marks);
    make_ready(c, number, m.arrived & w.live);
    progress();
    return true;
}

static char *next_marks(mark_pair &p)
{
    return &p.places[p.turn++ % 2];
}

/* Masks that share a pair of marks are ordered where they need not be. */
static mark_pair &marks_of_mask(warp &w, uint32_t mask)
{
    return w.marks[mask * 0x9E3779B9u >> 26];
}

/* Flat, since what it leaves on each thread's stack is what the cache must hold. */
#define FLAT __attribute__((flatten))

FLAT void meet(uint32_t mask, void *mine, finish_fn finish, place at)
{
    lane &l = *current;
    warp &w = *l.in;
    int i = 0;
    if (!(mask >> l.number & 1))
        fail("%s at %s:%d: lane %d is not in its own mask %08x", at.what, at.file, at.line,
             l.number, mask);
    while (i < w.meeting_count && w.meetings[i].mask != mask)
        i++;
    if (i == w.meeting_count) {
        if (w.meeting_count == MEETINGS_MAX)
            fail("too many masks at once");
        w.meetings[w.meeting_count++] = {mask, 0, finish, next_marks(marks_of_mask(w, mask))};
    }
    if (w.meetings[i].finish != finish)
        fail("lanes of a warp meet in different instructions, one in %s at %s:%d", at.what, at.file,
             at.line);
    char *marks = w.meetings[i].marks;
    leave_mark(marks);
    w.slots[l.number] = mine;
    w.meetings[i].arrived |= 1u << l.number;
    if (try_finish(*l.cta, l.warp, i))
        maybe_yield();
    else
        wait(at);
    take_marks(marks);
}

static bool try_finish_barrier(cta &c)
{
    if (c.arrived == 0 || c.arrived < c.live)
        return false;
    c.result = c.votes;
    c.arrived = c.votes = 0;
    c.marks.turn++;
    for (int w = 0; w < c.warp_count; w++)
        make_ready(c, w, c.warps[w].live);
    progress();
    return true;
}

FLAT int cta_barrier(bool value, place at)
{
    cta &c = *current->cta;
    if (at.line == mutant.line && is_mutant(at))
        return 0;
    if (c.arrived > 0 && (c.barrier.line != at.line ||
                          (c.barrier.file != at.file && strcmp(c.barrier.file, at.file) != 0)))
        fail("threads of a CTA wait at different barriers: %s:%d and %s:%d", c.barrier.file,
             c.barrier.line, at.file, at.line);
    char *marks = &c.marks.places[c.marks.turn % 2];
    leave_mark(marks);
    c.barrier = at;
    c.arrived++;
    c.votes += value;
    if (try_finish_barrier(c))
        maybe_yield();
    else
        wait(at);
    take_marks(marks);
    return c.result;
}

static bool try_finish_cluster_barrier(void)
{
    int live = 0;
    for (size_t i = 0; i < group_size; i++)
        live += resident[i]->live;
    if (cluster_arrived == 0 || cluster_arrived < live)
        return false;
    cluster_arrived = 0;
    for (size_t i = 0; i < group_size; i++)
        for (int w = 0; w < resident[i]->warp_count; w++)
            make_ready(*resident[i], w, resident[i]->warps[w].live);
    progress();
    return true;
}

void cluster_barrier(place at)
{
    cluster_arrived++;
    if (!try_finish_cluster_barrier())
        wait(at);
}

/* ---- the life of a thread ---- */

/* The thread has ended: those that waited for it alone go on. */
[[noreturn]] static void end_thread(void)
{
    lane &l = *current;
    warp &w = *l.in;
    uint32_t bit = 1u << l.number;
    w.live &= ~bit;
    w.ready &= ~bit;
    if (!w.ready)
        l.cta->ready &= ~(1u << l.warp);
    l.cta->live--;
    l.copies.started.clear();
    progress();
    for (int i = 0; i < w.meeting_count;)
        i += !try_finish(*l.cta, l.warp, i);
    try_finish_barrier(*l.cta);
    try_finish_cluster_barrier();
    leave_mark(&last_marks);
    run_others(true);
    abort(); /* nobody switches to a thread that has ended */
}

static void thread_main(void)
{
#ifdef NB_EMULATED_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!host_stack.bottom)
        host_stack = {bottom, bytes};
#endif
    take_marks(&first_marks);
    running->thread();
    end_thread();
}

/* Tops of stacks are staggered, since equal ones would compete for the same lines of the cache. */
static void start_thread(lane &l, int stagger)
{
    if (!l.stack) {
        void *p = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            fail("no memory for stacks");
        l.stack = (char *)p;
    }
#ifdef NB_EMULATED_TSAN
    if (!l.fiber)
        l.fiber = __tsan_create_fiber(0);
#endif
    void **top = (void **)(l.stack + STACK_BYTES - 256 - stagger % 61 * 64);
    *--top = nullptr; /* thread_main returns nowhere, and expects rsp % 16 == 8 */
    *--top = (void *)thread_main;
    l.sp = top - 6;
}

static void start_cta(cta &c, uint3 index, int number)
{
    int threads = (int)(blockDim.x * blockDim.y * blockDim.z);
    c.index = index;
    c.number = number;
    c.live = threads;
    c.warp_count = (threads + 31) / 32;
    c.ready = c.arrived = c.votes = 0;
    c.copies.clear();
    for (int i = 0; i < threads; i++) {
        lane &l = c.warps[i / 32].lanes[i % 32];
        l.index = {(unsigned)i % blockDim.x, (unsigned)i / blockDim.x % blockDim.y,
                   (unsigned)i / (blockDim.x * blockDim.y)};
        l.number = i % 32;
        l.warp = i / 32;
        l.cta = &c;
        l.in = &c.warps[l.warp];
        l.at = {"its first instruction", "", 0};
        start_thread(l, i + 7 * number);
    }
    for (int w = 0; w < c.warp_count; w++) {
        int left = threads - 32 * w;
        c.warps[w].live = left >= 32 ? ~0u : (1u << left) - 1;
        c.warps[w].ready = c.warps[w].polling = 0;
        c.warps[w].meeting_count = 0;
        make_ready(c, w, c.warps[w].live);
    }
    const shared_range &s = running->statics;
    c.saved.assign((size_t)(s.end - s.begin) + running->smem, (char)0xFF);
}

/* Runs CTAs [first, first + count) of the order together. */
static void run_group(const std::vector<unsigned> &ids, size_t first, size_t count)
{
    const shared_range &s = running->statics;
    group_size = count;
    cluster_arrived = 0;
    idle_rounds = 0;
    while (resident.size() < count)
        resident.push_back(std::make_unique<cta>());
    for (size_t i = 0; i < count; i++) {
        unsigned id = ids[first + i];
        start_cta(*resident[i],
                  {id % gridDim.x, id / gridDim.x % gridDim.y, id / (gridDim.x * gridDim.y)},
                  (int)i);
    }
    swapped_in = resident[0].get();
#ifdef NB_EMULATED_TSAN
    if (count > 1)
        fail("CTAs of a cluster have their variables at the same addresses, not for "
             "ThreadSanitizer");
    host_lane.fiber = __tsan_get_current_fiber();
#endif
    memset(s.begin, 0xFF, (size_t)(s.end - s.begin));
#ifdef NB_EMULATED_ASAN
    host_stack = {};
    __asan_unpoison_memory_region(dynamic_smem, running->smem);
    __asan_poison_memory_region(dynamic_smem + running->smem, sizeof dynamic_smem - running->smem);
    memset(dynamic_smem, 0xFF, running->smem);
    run_others(false);
#else
    memset(dynamic_smem, 0xFF, running->smem + CANARY_BYTES);
    leave_mark(&first_marks);
    run_others(false);
    take_marks(&last_marks);
    for (int i = 0; i < CANARY_BYTES; i++)
        if ((uint8_t)dynamic_smem[running->smem + (size_t)i] != 0xFF)
            fail("a CTA wrote byte %d after its dynamic shared memory", i);
#endif
}

void run_grid(const grid &g)
{
    std::lock_guard<std::mutex> lock(one_grid);
    size_t total = (size_t)g.ctas.x * g.ctas.y * g.ctas.z;
    size_t each = g.cooperative ? total : g.cluster > 1 ? g.cluster : 1;
    std::vector<unsigned> ids(total);
    running = &g;
    current = &host_lane;
    blockDim = g.threads;
    gridDim = g.ctas;
    for (size_t i = 0; i < total; i++)
        ids[i] = (unsigned)i;
    if (order.random) /* groups in a random order */
        for (size_t i = total / each; i > 1; i--) {
            size_t j = random_number() % i;
            for (size_t k = 0; k < each; k++)
                std::swap(ids[(i - 1) * each + k], ids[j * each + k]);
        }
    for (size_t i = 0; i < total; i += each)
        run_group(ids, order.reverse ? total - each - i : i, each);
    current = nullptr;
}

/* ---- questions of threads ---- */

int lane_index(void)
{
    return current->number;
}

int cluster_rank(void)
{
    return current->cta->number;
}

lane_copies &copies_of_lane(void)
{
    return current->copies;
}

cta_copies &copies_of_cta(int rank)
{
    return rank < 0 ? current->cta->copies : resident[(size_t)rank]->copies;
}

uint32_t shared_address(const void *p)
{
    return (uint32_t)((const char *)p - dynamic_smem) & 0xFFFFFF;
}

void *shared_pointer(uint32_t address)
{
    return dynamic_smem + ((int32_t)(address << 8) >> 8);
}

} // namespace emulated
