// Checkpoint rows -> panels (layouts: matmul.h). Runs once at load.
#include <cstring>

#include "kernels.h"

static int32_t kind_of(int32_t source) {
    switch (source) {
        case SOURCE_F32: return KIND_F32;
        case SOURCE_F16: return KIND_F16;
        case SOURCE_BF16: return KIND_BF16;
        case SOURCE_Q8_0: return KIND_Q8;
        default: return KIND_Q4;
    }
}

static int64_t panel_bytes(int32_t kind, int64_t columns) {
    int64_t groups = ceil_div(columns, GROUP);
    switch (kind) {
        case KIND_F32: return groups * GROUP * PANEL * 4;
        case KIND_F16: case KIND_BF16: return groups * GROUP * PANEL * 2;
        case KIND_Q4: return groups * Q4_GROUP_BYTES;
        default: return groups * Q8_GROUP_BYTES;
    }
}

int64_t octavo_packed_bytes(int32_t kind, int64_t rows, int64_t columns) {
    return ceil_div(rows, PANEL) * panel_bytes(kind, columns);
}

// The minimum of Q4_0, whose weights are scale * (q - 8): -8 * scale, exact but for scales beyond 8188.
static uint16_t minus_eight_times(uint16_t half) {
    uint16_t exponent = half >> 10 & 31, mantissa = half & 0x3ff, sign = (uint16_t)((half & 0x8000) ^ 0x8000);
    if (exponent == 31) return (uint16_t)(half ^ 0x8000);
    if (exponent == 0) {  // subnormal: shift up, and into the exponent where it overflows
        if (mantissa == 0) return sign;
        int shift = 3;
        while (shift && !(mantissa & 0x400)) { mantissa = (uint16_t)(mantissa << 1); shift--; }
        if (!(mantissa & 0x400)) return (uint16_t)(sign | mantissa);
        return (uint16_t)(sign | (shift + 1) << 10 | (mantissa & 0x3ff));
    }
    if (exponent + 3 >= 31) return (uint16_t)(sign | 0x7bff);
    return (uint16_t)(sign | (exponent + 3) << 10 | mantissa);
}

// Rows of a checkpoint, in the order asked for; rows past the last are null.
struct Rows {
    const uint8_t* data;
    int64_t row_bytes;
    const int64_t* order;
    int64_t count;
    const uint8_t* at(int64_t row) const { return row < count ? data + (order ? order[row] : row) * row_bytes : nullptr; }
};

static uint32_t word(const uint8_t* p) { uint32_t w; memcpy(&w, p, 4); return w; }

// Rows r and r + 8 of a panel share bytes; four columns are moved at once.
static void pack_q4_pair(const uint8_t* low, const uint8_t* high, uint8_t* group) {
    constexpr uint32_t HALF = 0x0f0f0f0f;
    for (int quad = 0; quad < 4; quad++) {
        const uint32_t a = low ? word(low + 4 * quad) : 0, b = high ? word(high + 4 * quad) : 0;
        const uint32_t first = (a & HALF) | (b & HALF) << 4, second = (a >> 4 & HALF) | (b & ~HALF);
        memcpy(group + 32 * quad, &first, 4);  // columns 0-15 are the low halves of a block's bytes
        memcpy(group + 32 * (quad + 4), &second, 4);
    }
}

static bool finite16(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

static bool pack_q4(const Rows& rows, int64_t first, int64_t groups, bool has_minimum, uint8_t* panel) {
    bool finite = true;
    const int64_t block = has_minimum ? 20 : 18, nibbles = has_minimum ? 4 : 2;
    for (int lane = 0; lane < PANEL; lane++) {
        const uint8_t* row = rows.at(first + lane);
        for (int64_t g = 0; row && g < groups; g++) {
            uint16_t scale, minimum;
            memcpy(&scale, row + g * block, 2);
            if (has_minimum) memcpy(&minimum, row + g * block + 2, 2);
            else minimum = minus_eight_times(scale);
            finite &= finite16(scale) & finite16(minimum);
            memcpy(panel + g * Q4_GROUP_BYTES + 256 + 2 * lane, &scale, 2);
            memcpy(panel + g * Q4_GROUP_BYTES + 288 + 2 * lane, &minimum, 2);
        }
    }
    for (int lane = 0; lane < PANEL / 2; lane++) {
        const uint8_t *low = rows.at(first + lane), *high = rows.at(first + lane + PANEL / 2);
        for (int64_t g = 0; g < groups; g++)
            pack_q4_pair(low ? low + g * block + nibbles : nullptr, high ? high + g * block + nibbles : nullptr, panel + g * Q4_GROUP_BYTES + 4 * lane);
    }
    return finite;
}

static bool pack_q8(const Rows& rows, int64_t first, int64_t groups, uint8_t* panel) {
    bool finite = true;
    for (int lane = 0; lane < PANEL; lane++) {
        const uint8_t* row = rows.at(first + lane);
        for (int64_t g = 0; row && g < groups; g++) {
            uint8_t* group = panel + g * Q8_GROUP_BYTES;
            uint16_t scale;
            memcpy(&scale, row + g * 34, 2);
            finite &= finite16(scale);
            memcpy(group + 512 + 2 * lane, &scale, 2);
            for (int quad = 0; quad < 8; quad++) {
                const uint32_t four = word(row + g * 34 + 2 + 4 * quad) ^ 0x80808080;
                memcpy(group + 64 * quad + 4 * lane, &four, 4);
            }
        }
    }
    return finite;
}

// `exponent`: the bits that are all set in a NaN or an infinity.
template <class T>
static bool pack_floats(const Rows& rows, int64_t first, int64_t columns, T exponent, uint8_t* panel) {
    bool finite = true;
    for (int lane = 0; lane < PANEL; lane++) {
        const uint8_t* row = rows.at(first + lane);
        for (int64_t k = 0; row && k < columns; k++) {
            T number;
            memcpy(&number, row + k * sizeof(T), sizeof(T));
            finite &= (number & exponent) != exponent;
            memcpy(panel + (k * PANEL + lane) * sizeof(T), &number, sizeof(T));
        }
    }
    return finite;
}

int32_t octavo_pack(int32_t source, const void* rows_data, int64_t row_bytes, const int64_t* order, int64_t rows, int64_t columns, void* packed) {
    const int32_t kind = kind_of(source);
    const int64_t bytes = panel_bytes(kind, columns), groups = ceil_div(columns, GROUP);
    const Rows from = {(const uint8_t*)rows_data, row_bytes, order, rows};
    bool finite = true;
    for (int64_t first = 0; first < rows; first += PANEL) {
        uint8_t* panel = (uint8_t*)packed + first / PANEL * bytes;
        const bool whole = first + PANEL <= rows && columns % GROUP == 0;
        if (!whole) memset(panel, 0, (size_t)bytes);
        if (kind == KIND_Q4) finite &= pack_q4(from, first, groups, source == SOURCE_Q4_1, panel);
        else if (kind == KIND_Q8) finite &= pack_q8(from, first, groups, panel);
        else if (kind == KIND_F32) finite &= pack_floats<uint32_t>(from, first, columns, 0x7f800000, panel);
        else finite &= pack_floats<uint16_t>(from, first, columns, kind == KIND_F16 ? 0x7c00 : 0x7f80, panel);
    }
    return finite;
}
