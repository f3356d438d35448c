// One weight panel (16 rows side by side) times a range of tokens.
//
// Layouts of a panel, group of 32 columns after group of 32:
//   float kinds  [column][row], so that a column of 16 rows is one or two vectors
//   Q4           8 vectors of 32 bytes, one for each 4 columns: byte 4 r + c has row r (low half) and row r + 8 (high half) of
//                column c; then 16 scales and 16 minima, float16
//   Q8           8 times 64 bytes, one for each 4 columns: byte 4 r + c has row r, column c, plus 128; then 16 scales, float16, and
//                16 minima behind them, or the 16 scales of columns 16 to 31, in the kinds that have these
// Four columns of a row lie together because that is what a multiply-and-add of bytes sums: the 32-bit lanes of the result are
// rows, and no horizontal sum is ever needed.
#pragma once

#include <type_traits>

#include "int_dot.h"

namespace LEVEL {

constexpr int VECTORS = PANEL / W;  // vectors a panel's column takes

// ---- float activations: any kind, unpacked a group at a time

// Calls use(column, vector, weights) for all columns of a packed group, in order.
template <int32_t KIND, class Use>
INLINE void each_weight(const uint8_t* g, const Use& use) {
    using L = Layout<KIND>;
    constexpr bool Q4 = L::Q4;
    constexpr bool BARE = !L::MINIMA;  // the 128 is taken off in the same sum
    const uint16_t* narrow = (const uint16_t*)(g + L::SCALES);
    vf scale[VECTORS], minimum[VECTORS];
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
        for (int v = 0; v < VECTORS && quad % (8 / L::PARTS) == 0; v++) {
            scale[v] = load(narrow + quad / (8 / L::PARTS) * PANEL + v * W);
            minimum[v] = BARE ? scale[v] * splat(-128.0f) : load(narrow + PANEL + v * W);
        }
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
                if (!Q4 && !BARE) q = q - splat(128);
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
    const uint8_t* g = panel + group * group_bytes(kind);
    const auto keep = [&](int k, int v, vf w) { store(buffer + k * PANEL + v * W, w); };
    if (kind == KIND_Q4) each_weight<KIND_Q4>(g, keep);
    else if (kind == KIND_Q8) each_weight<KIND_Q8>(g, keep);
    else if (kind == KIND_Q8_MINIMUM) each_weight<KIND_Q8_MINIMUM>(g, keep);
    else each_weight<KIND_Q8_HALVES>(g, keep);
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
template <int32_t KIND>
INLINE void float_row(const uint8_t* g, const float* x, float* sums) {
    vf acc[VECTORS];
    for (int v = 0; v < VECTORS; v++) acc[v] = load(sums + v * W);
    each_weight<KIND>(g, [&](int k, int v, vf w) { acc[v] = fma(splat(x[k]), w, acc[v]); });
    for (int v = 0; v < VECTORS; v++) store(sums + v * W, acc[v]);
}

static void float_group(int32_t kind, const uint8_t* panel, int64_t group, const Activations& a, int64_t begin, int64_t tokens, float* sums) {
    alignas(64) float buffer[GROUP * PANEL];
    const float* x = a.floats + (group * a.stride + begin) * GROUP;
    const uint8_t* g = panel + group * group_bytes(kind);
    if (tokens == 1 && kind == KIND_Q4) return float_row<KIND_Q4>(g, x, sums);
    if (tokens == 1 && kind == KIND_Q8) return float_row<KIND_Q8>(g, x, sums);
    if (tokens == 1 && kind == KIND_Q8_MINIMUM) return float_row<KIND_Q8_MINIMUM>(g, x, sums);
    if (tokens == 1 && kind == KIND_Q8_HALVES) return float_row<KIND_Q8_HALVES>(g, x, sums);
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

// What a packed group has behind its codes, for its rows: scales, and minima or the scales of the second part.
struct Scaling {
    alignas(64) float first[PANEL], second[PANEL];
};

// Where a panel's results go.
struct Target {
    float* out;
    int64_t ldo;
    const float* bias;
    int lanes;  // of the panel's rows that there are
    INLINE_MEMBER void write(int64_t token, int v, vf sum) const {
        if (__builtin_expect(lanes != PANEL, 0)) return write_part(token, v, sum);
        store(out + token * ldo + v * W, bias ? sum + load(bias + v * W) : sum);
    }
    // A function of its own: in the loops over tokens it would keep them from being unrolled, and sums out of registers.
    __attribute__((noinline, cold)) void write_part(int64_t token, int v, vf sum) const {
        const int count = lanes - v * W < W ? lanes - v * W : W;
        if (count > 0) store_part(out + token * ldo + v * W, bias ? sum + load_part(bias + v * W, count) : sum, count);
    }
};

// Weights come from memory, once, and no hardware prefetcher sees far enough: the next panel is asked for beside the arithmetic of
// this one, a share of its lines in each tile, as many at once would stand in each other's way.
struct Ahead {
    const uint8_t* panel;  // whose groups lie `bytes` apart
    int64_t bytes, from, to;
    INLINE_MEMBER void ask(int64_t group) const {
        for (int64_t i = from; i < to; i += 64) __builtin_prefetch(panel + group * bytes + i, 0, 3);
    }
};

// Groups as they are packed.
template <int32_t KIND>
struct PackedGroups {
    using L = Layout<KIND>;
    const uint8_t* panel;
    INLINE_MEMBER const uint8_t* at(int64_t group) const { return panel + group * L::BYTES; }
    INLINE_MEMBER Packed<L::Q4> weights(int64_t group) const { return {at(group)}; }
    INLINE_MEMBER vf first(int64_t group, int v) const { return load((const uint16_t*)(at(group) + L::SCALES) + v * W); }
    INLINE_MEMBER vf second(int64_t group, int v) const { return load((const uint16_t*)(at(group) + L::SCALES) + PANEL + v * W); }
};

// Groups unpacked to a buffer, from group `from` on.
template <bool WIDE>
struct UnpackedGroups {
    const uint8_t* buffer;
    const Scaling* scaling;
    int64_t from;
    INLINE_MEMBER Unpacked weights(int64_t group) const { return {buffer + (group - from) * (GROUP * PANEL << WIDE)}; }
    INLINE_MEMBER vf first(int64_t group, int v) const { return load(scaling[group - from].first + v * W); }
    INLINE_MEMBER vf second(int64_t group, int v) const { return load(scaling[group - from].second + v * W); }
};

// The fours of columns in which one of T tokens has a high part: what the others have there is zero.
template <int T>
INLINE uint32_t large_of(const uint8_t* large) {
    uint32_t fours = 0;
    if constexpr (T == 8 || T == 4) {
        std::conditional_t<T == 8, uint64_t, uint32_t> all;
        memcpy(&all, large, T);
        if (__builtin_expect(!all, 1)) return 0;
        for (int half = 4 * T; half >= 8; half /= 2) all |= all >> half;
        return (uint32_t)all & 255;
    }
    for (int t = 0; t < T; t++) fours |= large[t];
    return fours;
}

// Groups [first, last) of T tokens. Sums wait in `sums` for groups that come later. A function of its own each: inlined into one,
// their registers spill.
template <int T, int32_t KIND, bool WIDE, class Groups>
__attribute__((noinline)) static void rounded_tile(const Groups groups, const Ahead ahead, const Activations& a, int64_t first, int64_t last,
                                                   int64_t token, const Target& target, float* sums) {
    using L = Layout<KIND>;
    constexpr bool BARE = L::Q4 || (!WIDE && SIGNED_BYTES);  // no 128 is in the sums
    constexpr bool HELD = 2 * T * VECTORS <= HELD_REGISTERS;  // sums stay in registers
    const float *scales = a.scales + token, *offsets = a.sums + token;
    const int32_t *excess = a.excess + token, *first_excess = a.first_excess + token;
    const uint8_t *rounded = (const uint8_t*)a.rounded + (token * GROUP << WIDE), *large = a.large + token;
    const int8_t* high = a.high + token * GROUP;
    vf acc[T][VECTORS];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++) {
            if constexpr (HELD) acc[t][v] = first ? load(sums + t * PANEL + v * W) : splat(0.0f);
            else if (!first) store(sums + t * PANEL + v * W, splat(0.0f));
        }
    for (int64_t g = first; g < last; g++) {
        const int64_t at = g * a.stride;
        ahead.ask(g);
        const uint32_t fours = WIDE ? 0 : large_of<T>(large + at);
        const auto add_part = [&](auto which) __attribute__((always_inline)) {
            constexpr int PART = decltype(which)::value, FROM = PART * 8 / L::PARTS, TO = FROM + 8 / L::PARTS;
            Dots<T> dots;
            const auto beginning = [&](int t) __attribute__((always_inline)) {
                return BARE ? 0 : L::PARTS == 1 ? excess[at + t] : PART ? excess[at + t] - first_excess[at + t] : first_excess[at + t];
            };
            uint32_t left = fours & ((1u << TO) - (1u << FROM));
            if (__builtin_expect(!left, 1)) {
                for (int t = 0; t < T; t++) dots.start(t, beginning(t));
            } else if constexpr (!WIDE) {
                for (int t = 0; t < T; t++) dots.start(t, 0);
                for (; left; left &= left - 1) {
                    const int four = __builtin_ctz(left);
                    const int8_t* x = high + at * GROUP + 4 * four;
                    asm volatile("" : "+r"(x));  // one address: the compiler would keep one for each token
                    add_four<T, L::Q4>(groups.weights(g), four, x, dots);
                }
                for (int t = 0; t < T; t++) dots.raise(t, beginning(t));
            }
            if constexpr (WIDE) add_16<T, FROM, TO>(groups.weights(g), (const int16_t*)rounded + at * GROUP, dots);
            else add_8<T, L::Q4, FROM, TO>(groups.weights(g), (const int8_t*)rounded + at * GROUP, dots);
            // Scales are read only after the dot products, which need the registers.
            Groups now = groups;
            if constexpr (!HELD) asm volatile("" : "+m"(now));
            for (int v = 0; v < VECTORS; v++) {
                const vf scale = PART ? now.second(g, v) : now.first(g, v), minimum = L::MINIMA ? now.second(g, v) : scale;
                for (int t = 0; t < T; t++) {
                    float* sum = sums + t * PANEL + v * W;
                    vf total = HELD ? acc[t][v] : load(sum);
                    total = fma(dots.whole(t, v), scale * splat(scales[at + t]), total);
                    if (L::MINIMA) total = fma(minimum, splat(offsets[at + t]), total);
                    if constexpr (HELD) acc[t][v] = total;
                    else store(sum, total);
                }
            }
        };
        add_part(std::integral_constant<int, 0>());
        if constexpr (L::PARTS == 2) add_part(std::integral_constant<int, 1>());
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++) {
            const vf sum = HELD ? acc[t][v] : load(sums + t * PANEL + v * W);
            if (last == a.groups) target.write(token + t, v, sum);
            else if (HELD) store(sums + t * PANEL + v * W, sum);
        }
}

template <int32_t KIND, bool WIDE, class Groups>
INLINE void rounded_tiles(const Groups& groups, Ahead ahead, const Activations& a, int64_t first, int64_t last, int64_t token, int64_t tokens,
                          const Target& target, float* sums) {
    const int64_t share = ceil_div(ceil_div(ahead.bytes, 64), ceil_div(tokens, TILE)) * 64;
    const auto tile = [&](auto width) {
        constexpr int T = decltype(width)::value;
        ahead.to = ahead.from + share < ahead.bytes ? ahead.from + share : ahead.bytes;
        rounded_tile<T, KIND, WIDE>(groups, ahead, a, first, last, token, target, sums);
        ahead.from = ahead.to;
        tokens -= T, token += T, sums += T * PANEL;
    };
    while (tokens >= TILE) tile(std::integral_constant<int, TILE>());
    if (TILE > 4 && tokens >= 4) tile(std::integral_constant<int, 4>());
    switch (tokens) {
        case 3: return tile(std::integral_constant<int, 3>());
        case 2: return tile(std::integral_constant<int, 2>());
        case 1: return tile(std::integral_constant<int, 1>());
        default: return;
    }
}

constexpr int64_t UNPACK_FROM = TILE + 1;  // tokens that a detour through memory pays for

template <int32_t KIND, bool WIDE>
static void rounded_panel(const uint8_t* panel, const Activations& a, int64_t begin, int64_t tokens, const Target& target) {
    using L = Layout<KIND>;
    alignas(64) float sums[TOKEN_BLOCK * PANEL];
    const PackedGroups<KIND> packed = {panel};
    constexpr int64_t BYTES = L::BYTES;
    // A panel of few tokens is over in a microsecond: farther ahead than the next one, where that is short.
    if (tokens < UNPACK_FROM) return rounded_tiles<KIND, WIDE>(packed, {panel + 8192, BYTES, 0, 0}, a, 0, a.groups, begin, tokens, target, sums);
    constexpr int64_t MOST = WIDE ? 24 : 32;  // groups that the first-level cache holds unpacked
    alignas(64) uint8_t buffer[MOST * (GROUP * PANEL << WIDE)];
    Scaling scaling[MOST];
    const int64_t parts = ceil_div(a.groups, MOST), part = parts ? ceil_div(a.groups, parts) : 0;
    const Ahead ahead = {packed.at(a.groups), BYTES, 0, 0};
    for (int64_t first = 0; first < a.groups; first += part) {
        const int64_t last = first + part < a.groups ? first + part : a.groups;
        for (int64_t g = first; g < last; g++) {
            unpack<L::Q4, WIDE>(packed.at(g), buffer + (g - first) * (GROUP * PANEL << WIDE));
            for (int v = 0; v < VECTORS; v++) {
                store(scaling[g - first].first + v * W, packed.first(g, v));
                if (L::MINIMA || L::PARTS == 2) store(scaling[g - first].second + v * W, packed.second(g, v));
            }
        }
        rounded_tiles<KIND, WIDE>(UnpackedGroups<WIDE>{buffer, scaling, first}, ahead, a, first, last, begin, tokens, target, sums);
    }
}

// ---- a panel

static void float_panel(int32_t kind, const uint8_t* panel, const Activations& a, int64_t begin, int64_t tokens, const Target& target) {
    alignas(64) float sums[TOKEN_BLOCK * PANEL];
    memset(sums, 0, (size_t)tokens * PANEL * 4);
    for (int64_t g = 0; g < a.groups; g++) float_group(kind, panel, g, a, begin, tokens, sums);
    for (int64_t t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) target.write(begin + t, v, load(sums + t * PANEL + v * W));
}

static void panel(int32_t kind, const uint8_t* panel, const Activations& a, int64_t begin, int64_t end, float* out, int64_t ldo,
                  const float* bias, int lanes) {
    const bool rounded = a.rounding != ROUND_NOT, wide = a.rounding == ROUND_16;
    const Target target = {out, ldo, bias, lanes};
    const auto packed = [&](auto which) {
        constexpr int32_t KIND = decltype(which)::value;
        if (wide) rounded_panel<KIND, true>(panel, a, begin, end - begin, target);
        else rounded_panel<KIND, false>(panel, a, begin, end - begin, target);
    };
    if (!rounded || !is_packed(kind)) float_panel(kind, panel, a, begin, end - begin, target);
    else if (kind == KIND_Q4) packed(std::integral_constant<int32_t, KIND_Q4>());
    else if (kind == KIND_Q8) packed(std::integral_constant<int32_t, KIND_Q8>());
    else if (kind == KIND_Q8_MINIMUM) packed(std::integral_constant<int32_t, KIND_Q8_MINIMUM>());
    else packed(std::integral_constant<int32_t, KIND_Q8_HALVES>());
}

}  // namespace LEVEL
