#include "emulator/counters.h"

#include <algorithm>

namespace emulator {

/// The passes of a group of lanes that the hardware serves together: as many as the fullest bank has different words.
static unsigned bank_passes(const uint64_t* addresses, uint32_t lanes, unsigned bytes) {
    const unsigned words = std::max(1u, bytes / 4);
    const uint64_t first = addresses[__builtin_ctz(lanes)];
    // Two patterns are most of all accesses and free of conflicts: one address for all, and neighbours in a row.
    bool same = true, consecutive = bytes >= 4;
    uint64_t expected = first;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const uint64_t address = addresses[__builtin_ctz(rest)];
        same &= address == first;
        consecutive &= address == expected;
        expected += bytes;
    }
    if (same || (consecutive && expected - first <= 128)) return 1;

    uint64_t words_in_bank[32][32];
    unsigned count[32] = {}, passes = 0;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        for (unsigned i = 0; i < words; ++i) {
            const uint64_t word = addresses[__builtin_ctz(rest)] / 4 + i;
            uint64_t* bank = words_in_bank[word % 32];
            unsigned& size = count[word % 32];
            if (std::find(bank, bank + size, word) != bank + size) continue;
            bank[size++] = word;
            passes = std::max(passes, size);
        }
    }
    return passes;
}

/// Whether every lane's partner is inactive or has the same address.
static bool partners_agree(const uint64_t* addresses, uint32_t lanes, int partner) {
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest), other = lane ^ partner;
        if ((lanes >> other & 1) && addresses[other] != addresses[lane]) return false;
    }
    return true;
}

Wavefronts shared_wavefronts(const uint64_t* addresses, uint32_t lanes, unsigned bytes, bool load) {
    // 32 lanes of 4 bytes fill a wavefront's 128 bytes; wider accesses are served in groups of 16 or 8 lanes. Loads
    // pair these groups up when neighbours share their addresses, over the whole warp: measured, not documented.
    int group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    if (load && bytes > 4 && (partners_agree(addresses, lanes, 1) || partners_agree(addresses, lanes, 2))) group *= 2;
    Wavefronts wavefronts;
    for (int first = 0; first < 32; first += group) {
        const uint32_t members = group == 32 ? lanes : lanes & (((uint32_t(1) << group) - 1) << first);
        if (members == 0) continue;
        wavefronts.taken += bank_passes(addresses, members, bytes);
        ++wavefronts.ideal;
    }
    return wavefronts;
}

Wavefronts matrix_wavefronts(const uint64_t* addresses, int matrices) {
    Wavefronts wavefronts;
    wavefronts.ideal = static_cast<unsigned>(matrices);
    for (int matrix = 0; matrix < matrices; ++matrix)
        wavefronts.taken += bank_passes(addresses, uint32_t(0xff) << 8 * matrix, 16);
    return wavefronts;
}

static unsigned count_distinct(uint64_t* values, int count) {
    if (std::is_sorted(values, values + count) && std::adjacent_find(values, values + count) == values + count)
        return static_cast<unsigned>(count);
    std::sort(values, values + count);
    return static_cast<unsigned>(std::unique(values, values + count) - values);
}

unsigned sectors(const uint64_t* addresses, uint32_t lanes, unsigned bytes, uint64_t origin) {
    uint64_t touched[64];
    int count = 0;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const uint64_t address = addresses[__builtin_ctz(rest)] - origin;
        const uint64_t first = address / 32, last = (address + bytes - 1) / 32;
        if (count == 0 || touched[count - 1] != first) touched[count++] = first;
        if (last != first) touched[count++] = last;
    }
    return count_distinct(touched, count);
}

unsigned copy_sectors(const uint64_t* shared, const uint64_t* global, uint32_t lanes, unsigned bytes, uint64_t origin,
                      bool bypass_l1) {
    if (!bypass_l1) return sectors(global, lanes, bytes, origin);
    uint64_t pairs[32];
    int count = 0;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        pairs[count++] = (global[lane] - origin) / 128 << 16 | (shared[lane] / 32 & 0xffff);
    }
    return count_distinct(pairs, count);
}

}  // namespace emulator
