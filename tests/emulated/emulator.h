/* emulator.h - what the parts of the emulator share. README.md explains the model. */
#pragma once

#include <cuda_runtime_api.h>
#include <functional>
#include <stdint.h>
#include <unordered_map>
#include <vector>

#ifdef NB_EMULATED_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace emulated
{

/* ---- the device ---- */

#ifndef NB_EMULATED_ARCH
#define NB_EMULATED_ARCH 80
#endif

constexpr int SM_COUNT = 4;
constexpr int SMEM_MAX = NB_EMULATED_ARCH >= 90 ? 227 << 10 : 163 << 10; /* of a CTA */
constexpr int SMEM_DEFAULT = 48 << 10; /* more needs cudaFuncSetAttribute */

/* ---- ThreadSanitizer ----
 *
 * To it each thread of a CTA is a thread of its own, and what orders them is told by hand: what a
 * thread did before it leaves a mark at an object happens before what another one does after it has
 * taken the marks there. Elsewhere the functions do nothing. */

#ifdef NB_EMULATED_TSAN
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line);

/* While there is one, accesses do not count: threads share what the emulator allocates. */
struct unwatched {
    unwatched()
    {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    }
    ~unwatched()
    {
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};

static inline void leave_mark(void *object)
{
    __tsan_release(object);
}

static inline void take_marks(void *object)
{
    __tsan_acquire(object);
}
#else
struct unwatched {
    unwatched()
    {
    }
};

static inline void leave_mark(void *)
{
}

static inline void take_marks(void *)
{
}
#endif

/* ---- grids: scheduler.cpp ---- */

struct shared_range {
    char *begin, *end;
};

struct grid {
    dim3 ctas, threads;
    size_t smem;                  /* dynamic shared memory of a CTA */
    unsigned cluster;             /* CTAs of a cluster, along x */
    bool cooperative;             /* all CTAs are resident at the same time */
    const void *kernel;           /* its address */
    shared_range statics;         /* shared variables of the source file that has the kernel */
    std::function<void()> thread; /* what each thread runs */
};

/* Runs all threads of a grid to their end. */
void run_grid(const grid &g);

/* Where a thread waits, for reports. */
struct place {
    const char *what, *file;
    int line;
};

/* Prints the message and aborts. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A warp instruction: each lane of the mask leaves a pointer, and the last one to arrive calls
 * finish(pointers of all 32 lanes, lanes that arrived). Lanes that have ended are not waited for.
 */
typedef void (*finish_fn)(void *const *lanes, uint32_t arrived);
void meet(uint32_t mask, void *mine, finish_fn finish, place at);

/* __syncthreads; returns for how many threads `value` was true. */
int cta_barrier(bool value, place at);
void cluster_barrier(place at);

/* A thread found that what it waits for has not happened: others run first. */
void poll(place at);

/* Something has changed that a polling thread may wait for. */
void progress(void);

bool coin(void); /* false unless the order is random */
int lane_index(void);
int cluster_rank(void);

/* ---- shared memory ---- */

extern char dynamic_smem[];

/* Addresses in shared memory as PTX has them: the distance from dynamic_smem in the low 24 bits,
 * and in the high bits 0, or r + 1 for an address in CTA r of the cluster. */
uint32_t shared_address(const void *p);
void *shared_pointer(uint32_t address);

/* ---- asynchronous copies: async.cpp ----
 *
 * They are done as late as they may be: those of cp.async when their thread waits for them, others
 * when a thread polls the mbarrier that counts them. In a random order some are done at once. */

struct copy {
    void *to;
    const void *from; /* NULL: zeros */
    int bytes;
    unsigned group; /* of cp.async */
    float value;    /* from a CTA of the cluster, if is_value */
    bool is_value;
};

/* What an mbarrier waits for: a copy and the count of its bytes, or an arrival. */
struct pending {
    copy what;
    bool arrival;
};

struct lane_copies {
    std::vector<copy> started; /* by cp.async, in order */
    unsigned group = 0;        /* number of commits */
};

typedef std::unordered_map<void *, std::vector<pending>> cta_copies;

lane_copies &copies_of_lane(void);
cta_copies &copies_of_cta(int rank); /* in the cluster; -1: of this CTA */

void cp_async(uint32_t to, const void *from, int bytes);
void cp_async_commit(void);
void cp_async_wait(unsigned groups_left);
void cp_async_wait_all(void);
void cp_async_arrive(uint32_t bar);

void mbarrier_init(uint32_t bar, int count);
void mbarrier_inval(uint32_t bar);
void mbarrier_arrive(uint32_t bar, int bytes); /* and announces bytes */
bool mbarrier_test(uint32_t bar, uint32_t parity);
void bulk_copy(uint32_t to, const void *from, int bytes, uint32_t bar);
void remote_store(uint32_t to, float v, uint32_t bar);

} // namespace emulated

/* What kernels see as their position. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
