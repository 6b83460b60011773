// Atomics and fences. Lanes of a warp that come to one atomic together are one instruction, whoever they are.
#include <cstring>

#include "emulator/machine.h"
#include "emulator/runtime.h"
#include "emulator/trace.h"

namespace emulator {

struct Atomic {
    EmulatorAtomic kind;
    void* address;
    uint64_t value, expected;
    Place place;  // only known in instrumented launches
    uint64_t result;
};

/// The new value, from bits to bits. Integer is the unsigned type of the operand's width, Float the float of that
/// width.
template <class Integer, class Float>
static Integer combine(EmulatorAtomic kind, Integer old, Integer value, Integer expected) {
    using Signed = std::make_signed_t<Integer>;
    const auto as_signed = [](Integer bits) { return static_cast<Signed>(bits); };
    switch (kind) {
        case EMULATOR_ATOMIC_ADD: return old + value;
        case EMULATOR_ATOMIC_ADD_FLOAT: {
            Float a, b;
            memcpy(&a, &old, sizeof a);
            memcpy(&b, &value, sizeof b);
            a += b;
            memcpy(&old, &a, sizeof a);
            return old;
        }
        case EMULATOR_ATOMIC_MIN_SIGNED: return as_signed(value) < as_signed(old) ? value : old;
        case EMULATOR_ATOMIC_MAX_SIGNED: return as_signed(old) < as_signed(value) ? value : old;
        case EMULATOR_ATOMIC_MIN_UNSIGNED: return value < old ? value : old;
        case EMULATOR_ATOMIC_MAX_UNSIGNED: return old < value ? value : old;
        case EMULATOR_ATOMIC_AND: return old & value;
        case EMULATOR_ATOMIC_OR: return old | value;
        case EMULATOR_ATOMIC_XOR: return old ^ value;
        case EMULATOR_ATOMIC_EXCHANGE: return value;
        case EMULATOR_ATOMIC_COMPARE_AND_SWAP: break;
    }
    return old == expected ? value : old;
}

template <class Integer, class Float>
static void update(Atomic& atomic) {
    Integer* address = static_cast<Integer*>(atomic.address);
    Integer old = __atomic_load_n(address, __ATOMIC_SEQ_CST), wanted;
    do {
        wanted = combine<Integer, Float>(atomic.kind, old, static_cast<Integer>(atomic.value),
                                         static_cast<Integer>(atomic.expected));
    } while (!__atomic_compare_exchange_n(address, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    atomic.result = old;
}

static void perform_atomic(Warp& warp, const Collective& collective) {
    Trace* trace = current_worker->trace();
    uint64_t addresses[kWarpSize];
    uint32_t in_shared = 0, in_global = 0;
    for (uint32_t lanes = collective.arrived; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        Atomic& atomic = *static_cast<Atomic*>(warp.operands[lane]);
        const bool between_blocks = trace != nullptr && atomic.place == Place::global;
        addresses[lane] = reinterpret_cast<uintptr_t>(atomic.address);
        in_shared |= uint32_t(atomic.place == Place::shared) << lane;
        in_global |= uint32_t(atomic.place == Place::global) << lane;
        // What this block publishes must be there before another block can see the new value; what others published
        // must be learned after the old one has been seen.
        if (between_blocks) trace->races.global_atomic(addresses[lane]);
        if (collective.bytes == 4)
            update<uint32_t, float>(atomic);
        else
            update<uint64_t, double>(atomic);
        if (between_blocks) trace->races.global_atomic(addresses[lane]);
    }
    if (trace == nullptr) return;
    if (in_shared != 0)
        trace->races.shared_atomic({warp.number, in_shared, collective.bytes, collective.pc, addresses});
    if (in_global != 0)
        trace->site(collective.pc, Op::atomic).sectors +=
            trace->global_sectors({warp.number, in_global, collective.bytes, collective.pc, addresses});
}

static void perform_fence(Warp& warp, const Collective& collective) {
    current_worker->trace()->races.fence(warp.number, collective.arrived);
}

}  // namespace emulator

using namespace emulator;

uint64_t emulator_atomic(EmulatorAtomic kind, void* address, unsigned bytes, uint64_t value, uint64_t expected) {
    Worker& worker = *current_worker;
    const uint32_t pc = worker.enter(__builtin_return_address(0));
    Atomic mine{kind, address, value, expected, Place::uncounted, 0};
    if (Trace* trace = worker.trace())
        mine.place = trace->check_atomic(reinterpret_cast<uintptr_t>(address), bytes, pc);
    Collective collective{Op::atomic, kWhoeverIsThere, pc, perform_atomic};
    collective.bytes = bytes;
    worker.collective(collective, &mine);
    return mine.result;
}

void emulator_fence() {
    Worker& worker = *current_worker;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (worker.trace() == nullptr) return;
    Collective collective{Op::fence, kWhoeverIsThere, worker.enter(__builtin_return_address(0)), perform_fence};
    worker.collective(collective, nullptr);
}
