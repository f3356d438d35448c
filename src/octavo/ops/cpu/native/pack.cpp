// Checkpoint rows -> panels (layouts: matmul.h). Runs once at load.
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "blocks.h"
#include "kernels.h"

static int32_t kind_of(int32_t source) {
    if (const Conversion* by = conversion_of(source)) source = by->to;
    switch (source) {
        case SOURCE_F32: return KIND_F32;
        case SOURCE_F16: return KIND_F16;
        case SOURCE_BF16: return KIND_BF16;
        case SOURCE_Q8_0: return KIND_Q8;
        case BLOCK_MINIMUM: return KIND_Q8_MINIMUM;
        case BLOCK_HALVES: return KIND_Q8_HALVES;
        default: return KIND_Q4;
    }
}

static int64_t panel_bytes(int32_t kind, int64_t columns) {
    int64_t groups = ceil_div(columns, GROUP);
    switch (kind) {
        case KIND_F32: return groups * GROUP * PANEL * 4;
        case KIND_F16: case KIND_BF16: return groups * GROUP * PANEL * 2;
        default: return groups * group_bytes(kind);
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
            memcpy(panel + g * Layout<KIND_Q4>::BYTES + 256 + 2 * lane, &scale, 2);
            memcpy(panel + g * Layout<KIND_Q4>::BYTES + 288 + 2 * lane, &minimum, 2);
        }
    }
    for (int lane = 0; lane < PANEL / 2; lane++) {
        const uint8_t *low = rows.at(first + lane), *high = rows.at(first + lane + PANEL / 2);
        for (int64_t g = 0; g < groups; g++)
            pack_q4_pair(low ? low + g * block + nibbles : nullptr, high ? high + g * block + nibbles : nullptr, panel + g * Layout<KIND_Q4>::BYTES + 4 * lane);
    }
    return finite;
}

// Blocks with one float16 in front, or two.
template <int32_t KIND>
static bool pack_q8(const Rows& rows, int64_t first, int64_t groups, uint8_t* panel) {
    constexpr int HEADS = (Layout<KIND>::BYTES - Layout<KIND>::SCALES) / (2 * PANEL), BLOCK = 2 * HEADS + GROUP;
    bool finite = true;
    for (int lane = 0; lane < PANEL; lane++) {
        const uint8_t* row = rows.at(first + lane);
        for (int64_t g = 0; row && g < groups; g++) {
            uint8_t* group = panel + g * Layout<KIND>::BYTES;
            for (int head = 0; head < HEADS; head++) {
                uint16_t half;
                memcpy(&half, row + g * BLOCK + 2 * head, 2);
                finite &= finite16(half);
                memcpy(group + Layout<KIND>::SCALES + 2 * PANEL * head + 2 * lane, &half, 2);
            }
            for (int quad = 0; quad < 8; quad++) {
                const uint32_t four = word(row + g * BLOCK + 2 * HEADS + 4 * quad) ^ 0x80808080;
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

// Numbers that were rounded to float16. Small ones lose digits, which matters where the largest are no larger.
struct Rounded {
    uint16_t largest = 0;
    bool small = false;
    void see(const uint8_t* at) {
        uint16_t half;
        memcpy(&half, at, 2);
        half &= 0x7fff;
        if (half > largest) largest = half;
        small |= half && half < 0x400;
    }
    bool good() const { return !small || largest >= 0x800; }
};

// A panel's rows by way of other blocks.
class Converted {
  public:
    Converted(const Conversion& by, int64_t columns) : by_(by), blocks_(columns / by.values), data_((size_t)(PANEL * blocks_ * by.to_bytes)) {}

    Rows rows(const Rows& from, int64_t first) {
        const int64_t count = from.count - first < PANEL ? from.count - first : PANEL;
        for (int64_t lane = 0; lane < count; lane++) {
            const uint8_t* block = from.at(first + lane);
            uint8_t* to = data_.data() + lane * blocks_ * by_.to_bytes;
            for (int64_t b = 0; b < blocks_; b++) by_.convert(block + b * by_.bytes, to + b * by_.to_bytes);
            if (by_.to == SOURCE_F16) continue;
            const int64_t size = by_.to == SOURCE_Q4_1 ? 20 : by_.to == SOURCE_Q8_0 ? 34 : 36;
            for (int64_t at = 0; at < blocks_ * by_.to_bytes; at += size) {
                scales_.see(to + at);
                if (by_.to != SOURCE_Q8_0) (by_.to == BLOCK_HALVES ? scales_ : minima_).see(to + at + 2);
            }
        }
        return {data_.data(), blocks_ * by_.to_bytes, nullptr, count};
    }
    bool good() const { return scales_.good() && minima_.good(); }

  private:
    const Conversion& by_;
    int64_t blocks_;
    std::vector<uint8_t> data_;
    Rounded scales_, minima_;
};

static bool pack_panel(int32_t source, const Rows& rows, int64_t first, int64_t columns, uint8_t* panel) {
    const int64_t groups = ceil_div(columns, GROUP);
    switch (source) {
        case SOURCE_Q4_0: case SOURCE_Q4_1: return pack_q4(rows, first, groups, source == SOURCE_Q4_1, panel);
        case SOURCE_Q8_0: return pack_q8<KIND_Q8>(rows, first, groups, panel);
        case BLOCK_MINIMUM: return pack_q8<KIND_Q8_MINIMUM>(rows, first, groups, panel);
        case BLOCK_HALVES: return pack_q8<KIND_Q8_HALVES>(rows, first, groups, panel);
        case SOURCE_F32: return pack_floats<uint32_t>(rows, first, columns, 0x7f800000, panel);
        default: return pack_floats<uint16_t>(rows, first, columns, source == SOURCE_F16 ? 0x7c00 : 0x7f80, panel);
    }
}

int32_t octavo_pack(int32_t source, const void* rows_data, int64_t row_bytes, const int64_t* order, int64_t rows, int64_t columns, void* packed) {
    const int64_t bytes = panel_bytes(kind_of(source), columns);
    const Rows from = {(const uint8_t*)rows_data, row_bytes, order, rows};
    const Conversion* by = conversion_of(source);
    bool finite = true, good = true;
    try {
        std::unique_ptr<Converted> converted;
        if (by) converted.reset(new Converted(*by, columns));
        for (int64_t first = 0; first < rows; first += PANEL) {
            uint8_t* panel = (uint8_t*)packed + first / PANEL * bytes;
            const bool whole = first + PANEL <= rows && columns % GROUP == 0;
            if (!whole) memset(panel, 0, (size_t)bytes);
            if (by) finite &= pack_panel(by->to, converted->rows(from, first), 0, columns, panel);
            else finite &= pack_panel(source, from, first, columns, panel);
        }
        if (by) good = converted->good();
    } catch (const std::bad_alloc&) {
        return 0;
    }
    return finite && good;
}
