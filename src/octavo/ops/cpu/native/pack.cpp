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

static void pack_q4(const uint8_t* block, bool has_minimum, int lane, uint8_t* group) {
    uint16_t scale, minimum;
    memcpy(&scale, block, 2);
    if (has_minimum) memcpy(&minimum, block + 2, 2);
    else minimum = minus_eight_times(scale);
    memcpy(group + 256 + 2 * lane, &scale, 2);
    memcpy(group + 288 + 2 * lane, &minimum, 2);
    const uint8_t* nibbles = block + (has_minimum ? 4 : 2);
    const int shift = lane < 8 ? 0 : 4;
    for (int k = 0; k < GROUP; k++) {
        int q = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
        group[k / 4 * 32 + lane % 8 * 4 + k % 4] |= (uint8_t)(q << shift);
    }
}

static void pack_q8(const uint8_t* block, int lane, uint8_t* group) {
    memcpy(group + 512 + 2 * lane, block, 2);
    for (int k = 0; k < GROUP; k++) group[k / 4 * 64 + lane * 4 + k % 4] = (uint8_t)(block[2 + k] ^ 0x80);
}

void octavo_pack(int32_t source, const void* rows_data, int64_t row_bytes, const int64_t* order, int64_t rows, int64_t columns, void* packed) {
    const int32_t kind = kind_of(source);
    const int64_t bytes = panel_bytes(kind, columns), groups = ceil_div(columns, GROUP);
    const uint8_t* data = (const uint8_t*)rows_data;
    memset(packed, 0, (size_t)octavo_packed_bytes(kind, rows, columns));
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t* row = data + (order ? order[r] : r) * row_bytes;
        uint8_t* panel = (uint8_t*)packed + r / PANEL * bytes;
        const int lane = (int)(r % PANEL);
        if (kind == KIND_Q4) {
            const bool has_minimum = source == SOURCE_Q4_1;
            for (int64_t g = 0; g < groups; g++) pack_q4(row + g * (has_minimum ? 20 : 18), has_minimum, lane, panel + g * Q4_GROUP_BYTES);
        } else if (kind == KIND_Q8) {
            for (int64_t g = 0; g < groups; g++) pack_q8(row + g * 34, lane, panel + g * Q8_GROUP_BYTES);
        } else {
            const int width = kind == KIND_F32 ? 4 : 2;
            for (int64_t k = 0; k < columns; k++) memcpy(panel + (k * PANEL + lane) * width, row + k * width, (size_t)width);
        }
    }
}
