/* async.cpp - asynchronous copies into shared memory, and the mbarriers that count them. */
#include "emulator.h"

#include <string.h>

namespace emulated
{

static void perform(const copy &c)
{
    if (c.is_value)
        memcpy(c.to, &c.value, sizeof c.value);
    else if (c.from)
        memcpy(c.to, c.from, (size_t)c.bytes);
    else
        memset(c.to, 0, (size_t)c.bytes);
}

/* ---- cp.async ---- */

void cp_async(uint32_t to, const void *from, int bytes)
{
    lane_copies &l = copies_of_lane();
    copy c = {shared_pointer(to), from, bytes, l.group, 0, false};
    if (((uintptr_t)c.to | (uintptr_t)from) % (uintptr_t)bytes != 0)
        fail("cp.async of %d bytes to %p from %p is not aligned", bytes, c.to, from);
    if (coin()) {
        perform(c);
    } else {
        unwatched own;
        l.started.push_back(c);
    }
}

void cp_async_commit(void)
{
    copies_of_lane().group++;
}

void cp_async_wait(unsigned groups_left)
{
    lane_copies &l = copies_of_lane();
    size_t done = 0;
    while (done < l.started.size() && l.started[done].group + groups_left < l.group)
        perform(l.started[done++]);
    unwatched own;
    l.started.erase(l.started.begin(), l.started.begin() + (long)done);
}

void cp_async_wait_all(void)
{
    for (const copy &c : copies_of_lane().started)
        perform(c);
    copies_of_lane().started.clear();
}

/* ---- mbarriers ---- */

/* In the eight bytes of an mbarrier. Memory that was not initialized is not VALID. */
struct mbarrier {
    uint32_t count : 14, left : 14, valid : 4; /* arrivals of a phase */
    int32_t bytes : 31;                        /* announced and not arrived */
    uint32_t phase : 1;
};

static_assert(sizeof(mbarrier) == 8, "an mbarrier is a word of 64 bits");

constexpr uint32_t VALID = 10;

static mbarrier &mbarrier_at(uint32_t bar)
{
    mbarrier &b = *(mbarrier *)shared_pointer(bar);
    if (b.valid != VALID)
        fail("there is no mbarrier at %#x", bar);
    return b;
}

/* Those who arrive leave their mark at a phase, those who waited for it take them all. Who does a
 * copy takes those of the thread that started it. */
static void *marks(mbarrier &b, uint32_t phase)
{
    return (char *)&b + phase;
}

static void end_phase_if_complete(mbarrier &b)
{
    if (b.left > 0 || b.bytes != 0)
        return;
    b.phase ^= 1;
    b.left = b.count;
    progress();
}

static void arrive(mbarrier &b)
{
    if (b.left == 0)
        fail("more threads arrive at an mbarrier than it expects (%u)", b.count);
    leave_mark(marks(b, b.phase));
    b.left--;
    end_phase_if_complete(b);
}

void mbarrier_init(uint32_t bar, int count)
{
    mbarrier &b = *(mbarrier *)shared_pointer(bar);
    if (bar % 8 != 0)
        fail("an mbarrier at %#x is not aligned", bar);
    b = {};
    b.count = b.left = (uint32_t)count & 0x3FFF;
    b.valid = VALID;
    progress();
}

void mbarrier_inval(uint32_t bar)
{
    mbarrier_at(bar).valid = 0;
}

void mbarrier_arrive(uint32_t bar, int bytes)
{
    mbarrier &b = mbarrier_at(bar);
    b.bytes += bytes;
    arrive(b);
}

static void deliver_one(mbarrier &b, const pending &p)
{
    if (p.arrival) {
        arrive(b);
        return;
    }
    take_marks(marks(b, b.phase));
    perform(p.what);
    leave_mark(marks(b, b.phase));
    if (p.what.group == ~0u) { /* not of cp.async: the bytes count */
        b.bytes -= p.what.bytes;
        end_phase_if_complete(b);
    }
}

static std::vector<pending> take_pending(mbarrier &b)
{
    unwatched own;
    std::vector<pending> list;
    auto found = copies_of_cta(-1).find(&b);
    if (found == copies_of_cta(-1).end())
        return list;
    list = std::move(found->second);
    copies_of_cta(-1).erase(found);
    return list;
}

/* Does what is pending for a barrier of this CTA. */
static void deliver(mbarrier &b)
{
    std::vector<pending> list = take_pending(b);
    for (const pending &p : list)
        deliver_one(b, p);
    unwatched own;
    std::vector<pending>().swap(list);
}

static void add_pending(mbarrier &b, const pending &p)
{
    unwatched own;
    leave_mark(marks(b, b.phase));
    copies_of_cta(-1)[&b].push_back(p);
}

bool mbarrier_test(uint32_t bar, uint32_t parity)
{
    mbarrier &b = mbarrier_at(bar);
    deliver(b);
    if (b.phase == (parity & 1))
        return false;
    take_marks(marks(b, parity & 1));
    return true;
}

void cp_async_arrive(uint32_t bar)
{
    lane_copies &l = copies_of_lane();
    mbarrier &b = mbarrier_at(bar);
    for (const copy &c : l.started)
        add_pending(b, {c, false});
    l.started.clear();
    add_pending(b, {{}, true});
    if (coin())
        deliver(b);
}

void bulk_copy(uint32_t to, const void *from, int bytes, uint32_t bar)
{
    mbarrier &b = mbarrier_at(bar);
    if (to % 16 != 0 || (uintptr_t)from % 16 != 0 || bytes % 16 != 0)
        fail("a bulk copy of %d bytes to %#x from %p is not aligned", bytes, to, from);
    add_pending(b, {{shared_pointer(to), from, bytes, ~0u, 0, false}, false});
    if (coin())
        deliver(b);
}

/* To another CTA of the cluster; its shared memory is there when one of its threads polls. */
void remote_store(uint32_t to, float v, uint32_t bar)
{
    int rank = (int)(to >> 24) - 1;
    if (to >> 24 != bar >> 24)
        fail("a remote store and its mbarrier are in different CTAs");
    copies_of_cta(rank)[shared_pointer(bar)].push_back(
        {{shared_pointer(to), nullptr, (int)sizeof v, ~0u, v, true}, false});
    progress();
}

} // namespace emulated
