#include "emulator/counters.h"

#include <algorithm>

#include "emulator/lanes.h"

namespace emulator {

/// The passes of a group of lanes that the hardware serves together: as many as the fullest bank has different words.
static unsigned bank_passes(const uint64_t* addresses, uint32_t lanes, unsigned bytes) {
    uint64_t begin = UINT64_MAX, end = 0;
    for_each_lane(lanes, [&](int lane) {
        begin = std::min(begin, addresses[lane]);
        end = std::max(end, addresses[lane] + bytes);
    });
    if (end - begin / 4 * 4 <= 128) return 1;  // 32 words in a row are in 32 banks: as most accesses are

    uint64_t words[32][32];  // [pass][bank]
    unsigned count[32] = {}, passes = 0;
    for (int lane : each(lanes)) {
        for (unsigned offset = 0; offset < bytes; offset += 4) {
            const uint64_t word = (addresses[lane] + offset) / 4, bank = word % 32;
            unsigned pass = 0;
            while (pass < count[bank] && words[pass][bank] != word) ++pass;
            if (pass < count[bank]) continue;
            words[count[bank]++][bank] = word;
            passes = std::max(passes, count[bank]);
        }
    }
    return passes;
}

/// Whether every lane's partner is inactive or has the same address.
static bool partners_agree(const uint64_t* addresses, uint32_t lanes, int partner) {
    for (int lane : each(lanes)) {
        const int other = lane ^ partner;
        if ((lanes & bit(other)) && addresses[other] != addresses[lane]) return false;
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
        const uint32_t members = lanes & (kAllLanes >> (32 - group) << first);
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
    if (!std::is_sorted(values, values + count)) std::sort(values, values + count);  // most often they are
    return static_cast<unsigned>(std::unique(values, values + count) - values);
}

unsigned sectors(const uint64_t* addresses, uint32_t lanes, unsigned bytes, uint64_t origin) {
    uint64_t touched[64];
    int count = 0;
    for (int lane : each(lanes)) {
        const uint64_t address = addresses[lane] - origin;
        const uint64_t first = address / 32, last = (address + bytes - 1) / 32;
        if (count == 0 || touched[count - 1] != first) touched[count++] = first;
        if (last != first) touched[count++] = last;
    }
    return count_distinct(touched, count);
}

unsigned bypassing_sectors(const uint64_t* shared, const uint64_t* global, uint32_t lanes, uint64_t origin) {
    uint64_t pairs[32];
    int count = 0;
    for (int lane : each(lanes)) pairs[count++] = (global[lane] - origin) / 128 << 16 | (shared[lane] / 32 & 0xffff);
    return count_distinct(pairs, count);
}

}  // namespace emulator
