// One weight panel (16 rows side by side) times a range of tokens.
//
// Layouts of a panel, group of 32 columns after group of 32:
//   float kinds  [column][row], so that a column of 16 rows is one or two vectors
//   Q4           8 vectors of 32 bytes, one for each 4 columns: byte 4 r + c has row r (low half) and row r + 8 (high half) of
//                column c; then 16 scales and 16 minima, float16
//   Q8           8 times 64 bytes, one for each 4 columns: byte 4 r + c has row r, column c, plus 128; then 16 scales, float16
// Four columns of a row lie together because that is what a multiply-and-add of bytes sums: the 32-bit lanes of the result are
// rows, and no horizontal sum is ever needed.
#pragma once

#include "int_dot.h"

namespace LEVEL {

constexpr int VECTORS = PANEL / W;  // vectors a panel's column takes

// ---- float activations: any kind, unpacked a group at a time

// Calls use(column, vector, weights) for all columns of a packed group, in order.
template <bool Q4, class Use>
INLINE void each_weight(const uint8_t* g, const Use& use) {
    const uint16_t* narrow = (const uint16_t*)(g + (Q4 ? 256 : 512));
    vf scale[VECTORS], minimum[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = load(narrow + v * W);
        minimum[v] = Q4 ? load(narrow + PANEL + v * W) : scale[v] * splat(-128.0f);
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
        vi bytes[VECTORS];  // four columns of each row
        for (int v = 0; v < VECTORS; v++) {
            if (!Q4) {
                memcpy(&bytes[v], g + 64 * quad + 4 * v * W, sizeof bytes[v]);
            } else if (VECTORS == 1) {
                vi both, shift;
                memcpy(&both, g + 32 * quad, 32);
                memcpy((uint8_t*)&both + 32, g + 32 * quad, sizeof both - 32);
                for (int lane = 0; lane < W; lane++) shift[lane] = lane < W / 2 ? 0 : 4;
                bytes[v] = (both >> shift) & splat(0x0f0f0f0f);
            } else {
                constexpr int HALF = VECTORS > 1 ? VECTORS / 2 : 1;
                memcpy(&bytes[v], g + 32 * quad + 4 * (v % HALF) * W, sizeof bytes[v]);
                bytes[v] = (v < HALF ? bytes[v] : bytes[v] >> 4) & splat(0x0f0f0f0f);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            for (int v = 0; v < VECTORS; v++) {
                vi q = c == 3 ? (bytes[v] >> 24) & splat(255) : (bytes[v] >> (8 * c)) & splat(255);
                use(4 * quad + c, v, fma(__builtin_convertvector(q, vf), scale[v], minimum[v]));
            }
    }
}

INLINE const float* unpack_group(int32_t kind, const uint8_t* panel, int64_t group, int64_t columns, float* buffer) {
    int64_t first = group * GROUP;
    if (kind == KIND_F32) return (const float*)(panel + 4 * first * PANEL);
    if (kind == KIND_F16 || kind == KIND_BF16) {
        const uint16_t* source = (const uint16_t*)(panel + 2 * first * PANEL);
        int64_t count = (columns - first < GROUP ? columns - first : GROUP) * PANEL;
        if (kind == KIND_F16)
            for (int64_t i = 0; i < count; i += W) store(buffer + i, load(source + i));
        else
            for (int64_t i = 0; i < count; i += W) store(buffer + i, load_bf16(source + i));
        return buffer;
    }
    const uint8_t* g = panel + group * (kind == KIND_Q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES);
    if (kind == KIND_Q4) each_weight<true>(g, [&](int k, int v, vf w) { store(buffer + k * PANEL + v * W, w); });
    else each_weight<false>(g, [&](int k, int v, vf w) { store(buffer + k * PANEL + v * W, w); });
    return buffer;
}

// Sums of a token are [16] floats, side by side. x: [T][32].
template <int T>
INLINE void float_tile(const float* weights, int64_t count, const float* x, float* sums) {
    vf acc[T][VECTORS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++) acc[t][v] = load(sums + t * PANEL + v * W);
    for (int64_t k = 0; k < count; k++) {
        vf w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = load(weights + k * PANEL + v * W);
        for (int t = 0; t < T; t++) {
            vf b = splat(x[t * GROUP + k]);
            for (int v = 0; v < VECTORS; v++) acc[t][v] = fma(b, w[v], acc[t][v]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++) store(sums + t * PANEL + v * W, acc[t][v]);
}

// A single token, straight from the packed weights: the same arithmetic as float_tile<1>, without the detour.
template <bool Q4>
INLINE void float_row(const uint8_t* g, const float* x, float* sums) {
    vf acc[VECTORS];
    for (int v = 0; v < VECTORS; v++) acc[v] = load(sums + v * W);
    each_weight<Q4>(g, [&](int k, int v, vf w) { acc[v] = fma(splat(x[k]), w, acc[v]); });
    for (int v = 0; v < VECTORS; v++) store(sums + v * W, acc[v]);
}

static void float_group(int32_t kind, const uint8_t* panel, int64_t group, const Activations& a, int64_t begin, int64_t tokens, float* sums) {
    alignas(64) float buffer[GROUP * PANEL];
    const float* x = a.floats + (group * a.tokens + begin) * GROUP;
    if (tokens == 1 && kind == KIND_Q4) return float_row<true>(panel + group * Q4_GROUP_BYTES, x, sums);
    if (tokens == 1 && kind == KIND_Q8) return float_row<false>(panel + group * Q8_GROUP_BYTES, x, sums);
    const int64_t count = a.columns - group * GROUP < GROUP ? a.columns - group * GROUP : GROUP;
    const float* weights = unpack_group(kind, panel, group, a.columns, buffer);
    int64_t t = 0;
    for (; t + 6 <= tokens; t += 6) float_tile<6>(weights, count, x + t * GROUP, sums + t * PANEL);
    x += t * GROUP;
    sums += t * PANEL;
    switch (tokens - t) {
        case 5: return float_tile<5>(weights, count, x, sums);
        case 4: return float_tile<4>(weights, count, x, sums);
        case 3: return float_tile<3>(weights, count, x, sums);
        case 2: return float_tile<2>(weights, count, x, sums);
        case 1: return float_tile<1>(weights, count, x, sums);
        default: return;
    }
}

// ---- rounded activations: whole-number products within a group, scaled and summed as floats over the groups

// Scales and minima of a group's rows. In memory, and read only after the dot products: these need all registers.
struct Scaling {
    alignas(64) float scale[PANEL], minimum[PANEL];
};

template <int T, bool Q4, bool WIDE, class Weights>
INLINE void rounded_tile(const Weights& weights, const Scaling& s, const Activations& a, int64_t at, float* sums) {
    Dots<T> dots;
    for (int t = 0; t < T; t++) dots.start(t, Q4 ? 0 : -128 * a.counts[at + t]);
    if constexpr (WIDE) add_16<T>(weights, (const int16_t*)a.rounded + at * GROUP, dots);
    else add_8<T>(weights, (const int8_t*)a.rounded + at * GROUP, dots);
    const Scaling* now = &s;
    asm volatile("" : "+r"(now));
    for (int v = 0; v < VECTORS; v++) {
        const vf scale = load(now->scale + v * W), minimum = load(now->minimum + v * W);
        for (int t = 0; t < T; t++) {
            float* sum = sums + t * PANEL + v * W;
            vf acc = fma(dots.whole(t, v), scale * splat(a.scales[at + t]), load(sum));
            if (Q4) acc = fma(minimum, splat(a.sums[at + t]), acc);
            store(sum, acc);
        }
    }
}

template <bool Q4, bool WIDE, class Weights>
INLINE void rounded_tiles(const Weights& weights, const Scaling& s, const Activations& a, int64_t at, int64_t tokens, float* sums) {
    for (; tokens >= TILE; tokens -= TILE, at += TILE, sums += TILE * PANEL) rounded_tile<TILE, Q4, WIDE>(weights, s, a, at, sums);
    if (TILE > 4 && tokens >= 4) {
        rounded_tile<4, Q4, WIDE>(weights, s, a, at, sums);
        tokens -= 4, at += 4, sums += 4 * PANEL;
    }
    switch (tokens) {
        case 3: return rounded_tile<3, Q4, WIDE>(weights, s, a, at, sums);
        case 2: return rounded_tile<2, Q4, WIDE>(weights, s, a, at, sums);
        case 1: return rounded_tile<1, Q4, WIDE>(weights, s, a, at, sums);
        default: return;
    }
}

constexpr int64_t UNPACK_FROM = 9;  // tokens that a detour through memory pays for

template <bool Q4, bool WIDE>
INLINE void rounded_group(const uint8_t* panel, int64_t group, const Activations& a, int64_t begin, int64_t tokens, float* sums) {
    if constexpr (Q4 || WIDE) {
        const uint8_t* g = panel + group * (Q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES);
        const uint16_t* narrow = (const uint16_t*)(g + (Q4 ? 256 : 512));
        Scaling s;
        for (int v = 0; v < VECTORS; v++) {
            store(s.scale + v * W, load(narrow + v * W));
            if (Q4) store(s.minimum + v * W, load(narrow + PANEL + v * W));
        }
        const int64_t at = group * a.tokens + begin;
        if (tokens < UNPACK_FROM) return rounded_tiles<Q4, WIDE>(Packed<Q4>{g}, s, a, at, tokens, sums);
        alignas(64) uint8_t buffer[2 * PANEL * GROUP];
        unpack<Q4, WIDE>(g, buffer);
        rounded_tiles<Q4, WIDE>(Unpacked{buffer}, s, a, at, tokens, sums);
    }
}

template <bool Q4>
INLINE void rounded_group(const uint8_t* panel, int64_t group, const Activations& a, int64_t begin, int64_t tokens, float* sums) {
    if (a.rounding == ROUND_16) rounded_group<Q4, true>(panel, group, a, begin, tokens, sums);
    else rounded_group<Q4, false>(panel, group, a, begin, tokens, sums);
}

// ---- a panel

static void write_panel(const float* sums, int64_t tokens, float* out, int64_t ldo, const float* bias, int lanes) {
    for (int64_t t = 0; t < tokens; t++, sums += PANEL, out += ldo) {
        if (bias) {
            for (int i = 0; i < lanes; i++) out[i] = sums[i] + bias[i];
        } else if (lanes == PANEL) {
            memcpy(out, sums, PANEL * 4);
        } else {
            memcpy(out, sums, (size_t)lanes * 4);
        }
    }
}

static void panel(int32_t kind, const uint8_t* panel, const Activations& a, int64_t begin, int64_t end, float* out, int64_t ldo,
                  const float* bias, int lanes) {
    alignas(64) float sums[TOKEN_BLOCK * PANEL];
    const bool rounded = a.rounding != ROUND_NOT && (kind == KIND_Q4 || kind == KIND_Q8);
    const int64_t tokens = end - begin;
    memset(sums, 0, (size_t)tokens * PANEL * 4);
    for (int64_t g = 0; g < a.groups; g++) {
        if (!rounded) float_group(kind, panel, g, a, begin, tokens, sums);
        else if (kind == KIND_Q4) rounded_group<true>(panel, g, a, begin, tokens, sums);
        else rounded_group<false>(panel, g, a, begin, tokens, sums);
    }
    write_panel(sums, tokens, out + begin * ldo, ldo, bias, lanes);
}

}  // namespace LEVEL
