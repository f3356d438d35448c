// Integer dot products of one weight group (16 rows, 32 columns) with rounded activations, as each level does them best.
//
// A level brings `Dots<T>`: the 16 rows' whole-number sums of T tokens, in registers; two sources of weights, read from the packed
// group or from a buffer that it was unpacked to once for many tokens; `add_16`/`add_8`, which run over the fours of columns from
// FROM to TO of a group; and `add_four`, which takes a single four, whose activations of the first token begin at x. Whole numbers are
// exact, so the two sources, and any T, give the same bits.
//
// 16-bit activations: |q| <= 32767, weights 0..255: 32 products are below 2^28. 8-bit ones (|q| <= 127) where a level sums pairs in
// 16 bits: with 4-bit weights a pair is at most 3,810, and eight of them 30,480. With 8-bit weights less 128 a pair is at most 32,512,
// so that each is widened at once. High parts (LARGE, kernels.h) come first and are shifted: 128 * 32 products of 255 and 127 are below 2^28
// too. `SIGNED_BYTES`: such a level takes the 128 off weights itself, the others off the sums.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace LEVEL {

INLINE int32_t four_bytes(const void* x) { int32_t v; memcpy(&v, x, 4); return v; }

// GCC rearranges long sums of integers into trees, and then runs out of registers.
#if defined(__x86_64__)
#define IN_ORDER(v) asm volatile("" : "+x"(v))
#else
#define IN_ORDER(v) (void)0
#endif

#if defined(__AVX512VNNI__)

constexpr int TILE = 8, HELD_REGISTERS = 24;
constexpr bool PAIRED = true;  // four 16-bit activations lie in the order 0, 2, 1, 3
constexpr bool SIGNED_BYTES = false;

template <int T>
struct Dots {
    __m512i sum[T];
    INLINE_MEMBER void start(int t, int32_t value) { sum[t] = _mm512_set1_epi32(value); }
    INLINE_MEMBER void raise(int t, int32_t value) { sum[t] = _mm512_add_epi32(_mm512_slli_epi32(sum[t], HIGH_BITS), _mm512_set1_epi32(value)); }
    INLINE_MEMBER vf whole(int t, int) const { return (vf)_mm512_cvtepi32_ps(sum[t]); }
};

template <bool Q4>
INLINE __m512i quad_bytes(const uint8_t* g, int quad) {  // byte 4 r + c: row r, column c of four
    if (!Q4) return _mm512_loadu_si512(g + 64 * quad);
    const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(g + 32 * quad)));
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    return _mm512_and_si512(_mm512_srlv_epi16(both, shift), _mm512_set1_epi8(15));
}

template <bool Q4>
struct Packed {
    const uint8_t* g;
    INLINE_MEMBER void bytes(int quad, __m512i* w) const { w[0] = quad_bytes<Q4>(g, quad); }
    INLINE_MEMBER void pairs(int quad, __m512i* w) const {
        __m512i v = quad_bytes<Q4>(g, quad);
        w[0] = _mm512_and_si512(v, _mm512_set1_epi16(255));
        w[1] = _mm512_srli_epi16(v, 8);
    }
};

struct Unpacked {
    const uint8_t* buffer;
    INLINE_MEMBER void bytes(int quad, __m512i* w) const { w[0] = _mm512_load_si512(buffer + 64 * quad); }
    INLINE_MEMBER void pairs(int quad, __m512i* w) const {
        for (int i = 0; i < 2; i++) w[i] = _mm512_load_si512(buffer + 128 * quad + 64 * i);
    }
};

template <bool Q4, bool WIDE>
INLINE void unpack(const uint8_t* g, uint8_t* buffer) {
    for (int quad = 0; quad < 8; quad++) {
        __m512i w[2];
        if (WIDE) Packed<Q4>{g}.pairs(quad, w);
        else Packed<Q4>{g}.bytes(quad, w);
        for (int i = 0; i < 1 + WIDE; i++) _mm512_store_si512(buffer + (64 << WIDE) * quad + 64 * i, w[i]);
    }
}

template <int T, int FROM, int TO, class Weights>
INLINE void add_16(const Weights& weights, const int16_t* x, Dots<T>& d) {
#pragma GCC unroll 8
    for (int quad = FROM; quad < TO; quad++) {
        __m512i w[2];
        weights.pairs(quad, w);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < 2; i++)
                d.sum[t] = _mm512_dpwssd_epi32(d.sum[t], w[i], _mm512_set1_epi32(four_bytes(x + t * GROUP + 4 * quad + 2 * i)));
    }
}

template <int T, bool Q4, class Weights>
INLINE void add_four(const Weights& weights, int quad, const int8_t* x, Dots<T>& d) {
    __m512i w[1];
    weights.bytes(quad, w);
    for (int t = 0; t < T; t++) d.sum[t] = _mm512_dpbusd_epi32(d.sum[t], w[0], _mm512_set1_epi32(four_bytes(x + t * GROUP)));
}

template <int T, bool Q4, int FROM, int TO, class Weights>
INLINE void add_8(const Weights& weights, const int8_t* x, Dots<T>& d) {
#pragma GCC unroll 8
    for (int quad = FROM; quad < TO; quad++) add_four<T, Q4>(weights, quad, x + 4 * quad, d);
}

#elif defined(__AVX2__)

constexpr int TILE = 4, HELD_REGISTERS = 8;
constexpr bool PAIRED = true;
constexpr bool SIGNED_BYTES = true;

template <int T>
struct Dots {
    __m256i sum[T][2];  // rows 0-7 and 8-15
    INLINE_MEMBER void start(int t, int32_t value) { sum[t][0] = sum[t][1] = _mm256_set1_epi32(value); }
    INLINE_MEMBER void raise(int t, int32_t value) {
        for (int h = 0; h < 2; h++) sum[t][h] = _mm256_add_epi32(_mm256_slli_epi32(sum[t][h], HIGH_BITS), _mm256_set1_epi32(value));
    }
    INLINE_MEMBER vf whole(int t, int half) const { return (vf)_mm256_cvtepi32_ps(sum[t][half]); }
};

template <bool Q4>
struct Packed {
    const uint8_t* g;
    INLINE_MEMBER void bytes(int quad, __m256i* w) const {
        if (Q4) {
            __m256i both = _mm256_loadu_si256((const __m256i*)(g + 32 * quad));
            w[0] = _mm256_and_si256(both, _mm256_set1_epi8(15));
            w[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
        } else {
            for (int h = 0; h < 2; h++)
                w[h] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(g + 64 * quad + 32 * h)), _mm256_set1_epi8(-128));
        }
    }
    // Columns 0 and 2 of rows 0-7, columns 1 and 3 of them, then the same of rows 8-15.
    INLINE_MEMBER void pairs(int quad, __m256i* w) const {
        if (Q4) {
            const __m256i low = _mm256_set1_epi16(15);
            __m256i v = _mm256_loadu_si256((const __m256i*)(g + 32 * quad));
            w[0] = _mm256_and_si256(v, low);
            w[1] = _mm256_and_si256(_mm256_srli_epi16(v, 8), low);
            w[2] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
            w[3] = _mm256_srli_epi16(v, 12);
        } else {
            for (int h = 0; h < 2; h++) {
                __m256i v = _mm256_loadu_si256((const __m256i*)(g + 64 * quad + 32 * h));
                w[2 * h] = _mm256_and_si256(v, _mm256_set1_epi16(255));
                w[2 * h + 1] = _mm256_srli_epi16(v, 8);
            }
        }
    }
};

struct Unpacked {
    const uint8_t* buffer;
    INLINE_MEMBER void bytes(int quad, __m256i* w) const {
        for (int i = 0; i < 2; i++) w[i] = _mm256_load_si256((const __m256i*)(buffer + 64 * quad + 32 * i));
    }
    INLINE_MEMBER void pairs(int quad, __m256i* w) const {
        for (int i = 0; i < 4; i++) w[i] = _mm256_load_si256((const __m256i*)(buffer + 128 * quad + 32 * i));
    }
};

template <bool Q4, bool WIDE>
INLINE void unpack(const uint8_t* g, uint8_t* buffer) {
    for (int quad = 0; quad < 8; quad++) {
        __m256i w[4];
        if (WIDE) Packed<Q4>{g}.pairs(quad, w);
        else Packed<Q4>{g}.bytes(quad, w);
        for (int i = 0; i < (WIDE ? 4 : 2); i++) _mm256_store_si256((__m256i*)(buffer + (64 << WIDE) * quad + 32 * i), w[i]);
    }
}

template <int T, int FROM, int TO, class Weights>
INLINE void add_16(const Weights& weights, const int16_t* x, Dots<T>& d) {
#pragma GCC unroll 8
    for (int quad = FROM; quad < TO; quad++) {
        __m256i w[4];
        weights.pairs(quad, w);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < 2; i++) {
                __m256i b = _mm256_set1_epi32(four_bytes(x + t * GROUP + 4 * quad + 2 * i));
                for (int h = 0; h < 2; h++) {
                    d.sum[t][h] = _mm256_add_epi32(d.sum[t][h], _mm256_madd_epi16(w[2 * h + i], b));
                    IN_ORDER(d.sum[t][h]);
                }
            }
    }
}

template <int T, bool Q4, int FROM, int TO, class Weights>
INLINE void add_8(const Weights& weights, const int8_t* x, Dots<T>& d) {
    if constexpr (!Q4) {
#pragma GCC unroll 8
        for (int quad = FROM; quad < TO; quad++) {
            __m256i w[2], size[2];
            weights.bytes(quad, w);
            for (int h = 0; h < 2; h++) size[h] = _mm256_abs_epi8(w[h]);  // -128 becomes 128, which is read without a sign
            for (int t = 0; t < T; t++) {
                const __m256i b = _mm256_set1_epi32(four_bytes(x + t * GROUP + 4 * quad));
                for (int h = 0; h < 2; h++) {
                    const __m256i pairs = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(b, w[h]));
                    d.sum[t][h] = _mm256_add_epi32(d.sum[t][h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                    IN_ORDER(d.sum[t][h]);
                }
            }
        }
        return;
    }
    __m256i narrow[T][2];
#pragma GCC unroll 8
    for (int quad = FROM; quad < TO; quad++) {
        __m256i w[2];
        weights.bytes(quad, w);
        for (int t = 0; t < T; t++) {
            __m256i b = _mm256_set1_epi32(four_bytes(x + t * GROUP + 4 * quad));
            for (int h = 0; h < 2; h++) {
                __m256i products = _mm256_maddubs_epi16(w[h], b);
                narrow[t][h] = quad > FROM ? _mm256_add_epi16(narrow[t][h], products) : products;
                IN_ORDER(narrow[t][h]);
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int h = 0; h < 2; h++) d.sum[t][h] = _mm256_add_epi32(d.sum[t][h], _mm256_madd_epi16(narrow[t][h], _mm256_set1_epi16(1)));
}

template <int T, bool Q4, class Weights>
INLINE void add_four(const Weights& weights, int quad, const int8_t* x, Dots<T>& d) {
    __m256i w[2];
    weights.bytes(quad, w);
    for (int t = 0; t < T; t++) {
        const __m256i b = _mm256_set1_epi32(four_bytes(x + t * GROUP));
        for (int h = 0; h < 2; h++) {
            const __m256i pairs = Q4 ? _mm256_maddubs_epi16(w[h], b) : _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(b, w[h]));
            d.sum[t][h] = _mm256_add_epi32(d.sum[t][h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
}

#elif defined(__ARM_NEON)

constexpr int TILE = 4, HELD_REGISTERS = 16;
constexpr bool PAIRED = false;
constexpr bool SIGNED_BYTES = true;

template <int T>
struct Dots {
    int32x4_t sum[T][4];  // four rows each
    INLINE_MEMBER void start(int t, int32_t value) {
        for (int i = 0; i < 4; i++) sum[t][i] = vdupq_n_s32(value);
    }
    INLINE_MEMBER void raise(int t, int32_t value) {
        for (int i = 0; i < 4; i++) sum[t][i] = vaddq_s32(vshlq_n_s32(sum[t][i], HIGH_BITS), vdupq_n_s32(value));
    }
    INLINE_MEMBER vf whole(int t, int v) const { return (vf)vcvtq_f32_s32(sum[t][v]); }
};

template <bool Q4>
struct Packed {
    const uint8_t* g;
    INLINE_MEMBER void bytes(int quad, int8x16_t* w) const {
        for (int i = 0; i < 4; i++) {
            if (!Q4) {
                w[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(g + 64 * quad + 16 * i), vdupq_n_u8(128)));
            } else {
                const uint8x16_t both = vld1q_u8(g + 32 * quad + 16 * (i % 2));
                w[i] = vreinterpretq_s8_u8(i < 2 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4));
            }
        }
    }
    // By column: rows 0-7, rows 8-15.
    INLINE_MEMBER void columns(int quad, int16x8_t* w) const {
        if (Q4) {
            const uint8x8x4_t both = vld4_u8(g + 32 * quad);
            for (int c = 0; c < 4; c++) {
                w[2 * c] = vreinterpretq_s16_u16(vmovl_u8(vand_u8(both.val[c], vdup_n_u8(15))));
                w[2 * c + 1] = vreinterpretq_s16_u16(vmovl_u8(vshr_n_u8(both.val[c], 4)));
            }
        } else {
            const uint8x16x4_t all = vld4q_u8(g + 64 * quad);
            for (int c = 0; c < 4; c++) {
                w[2 * c] = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(all.val[c])));
                w[2 * c + 1] = vreinterpretq_s16_u16(vmovl_high_u8(all.val[c]));
            }
        }
    }
};

struct Unpacked {
    const uint8_t* buffer;
    INLINE_MEMBER void bytes(int quad, int8x16_t* w) const {
        for (int i = 0; i < 4; i++) w[i] = vld1q_s8((const int8_t*)buffer + 64 * quad + 16 * i);
    }
    INLINE_MEMBER void columns(int quad, int16x8_t* w) const {
        for (int i = 0; i < 8; i++) w[i] = vld1q_s16((const int16_t*)buffer + 64 * quad + 8 * i);
    }
};

template <bool Q4, bool WIDE>
INLINE void unpack(const uint8_t* g, uint8_t* buffer) {
    for (int quad = 0; quad < 8; quad++) {
        if (WIDE) {
            int16x8_t w[8];
            Packed<Q4>{g}.columns(quad, w);
            for (int i = 0; i < 8; i++) vst1q_s16((int16_t*)buffer + 64 * quad + 8 * i, w[i]);
        } else {
            int8x16_t w[4];
            Packed<Q4>{g}.bytes(quad, w);
            for (int i = 0; i < 4; i++) vst1q_s8((int8_t*)buffer + 64 * quad + 16 * i, w[i]);
        }
    }
}

template <int C>
INLINE void add_column(int32x4_t* sum, const int16x8_t* w, int16x4_t x) {
    for (int h = 0; h < 2; h++) {
        sum[2 * h] = vmlal_lane_s16(sum[2 * h], vget_low_s16(w[2 * C + h]), x, C);
        sum[2 * h + 1] = vmlal_high_lane_s16(sum[2 * h + 1], w[2 * C + h], x, C);
    }
}

template <int T, int FROM, int TO, class Weights>
INLINE void add_16(const Weights& weights, const int16_t* x, Dots<T>& d) {
#pragma GCC unroll 8
    for (int quad = FROM; quad < TO; quad++) {
        int16x8_t w[8];
        weights.columns(quad, w);
        for (int t = 0; t < T; t++) {
            const int16x4_t four = vld1_s16(x + t * GROUP + 4 * quad);
            add_column<0>(d.sum[t], w, four);
            add_column<1>(d.sum[t], w, four);
            add_column<2>(d.sum[t], w, four);
            add_column<3>(d.sum[t], w, four);
        }
    }
}

#if defined(__ARM_FEATURE_DOTPROD)

template <int T, bool Q4, class Weights>
INLINE void add_four(const Weights& weights, int quad, const int8_t* x, Dots<T>& d) {
    int8x16_t w[4];
    weights.bytes(quad, w);
    for (int t = 0; t < T; t++) {
        const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x + t * GROUP)));
        for (int i = 0; i < 4; i++) d.sum[t][i] = vdotq_s32(d.sum[t][i], w[i], b);
    }
}

template <int T, bool Q4, int FROM, int TO, class Weights>
INLINE void add_8(const Weights& weights, const int8_t* x, Dots<T>& d) {
#pragma GCC unroll 8
    for (int quad = FROM; quad < TO; quad++) add_four<T, Q4>(weights, quad, x + 4 * quad, d);
}

#else

template <int T, bool Q4, int FROM, int TO, class Weights>
INLINE void add_8(const Weights& weights, const int8_t* x, Dots<T>& d) {
    int16x8_t narrow[T][4];  // pairs of columns
#pragma GCC unroll 8
    for (int quad = FROM; quad < TO; quad++) {
        int8x16_t w[4];
        weights.bytes(quad, w);
        for (int t = 0; t < T; t++) {
            const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x + t * GROUP + 4 * quad)));
            for (int i = 0; i < 4; i++) {
                const int16x8_t products = vpaddq_s16(vmull_s8(vget_low_s8(w[i]), vget_low_s8(b)), vmull_high_s8(w[i], b));
                if (!Q4) d.sum[t][i] = vpadalq_s16(d.sum[t][i], products);
                else narrow[t][i] = quad > FROM ? vaddq_s16(narrow[t][i], products) : products;
            }
        }
    }
    for (int t = 0; t < T && Q4; t++)
        for (int i = 0; i < 4; i++) d.sum[t][i] = vpadalq_s16(d.sum[t][i], narrow[t][i]);
}

template <int T, bool Q4, class Weights>
INLINE void add_four(const Weights& weights, int quad, const int8_t* x, Dots<T>& d) {
    int8x16_t w[4];
    weights.bytes(quad, w);
    for (int t = 0; t < T; t++) {
        const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x + t * GROUP)));
        for (int i = 0; i < 4; i++)
            d.sum[t][i] = vpadalq_s16(d.sum[t][i], vpaddq_s16(vmull_s8(vget_low_s8(w[i]), vget_low_s8(b)), vmull_high_s8(w[i], b)));
    }
}

#endif

#else

constexpr int TILE = 4, HELD_REGISTERS = 0;
constexpr bool PAIRED = false;
constexpr bool SIGNED_BYTES = false;

template <int T>
struct Dots {
    alignas(32) int32_t sum[T][PANEL];
    INLINE_MEMBER void start(int t, int32_t value) { for (int r = 0; r < PANEL; r++) sum[t][r] = value; }
    INLINE_MEMBER void raise(int t, int32_t value) { for (int r = 0; r < PANEL; r++) sum[t][r] = sum[t][r] * (1 << HIGH_BITS) + value; }
    INLINE_MEMBER vf whole(int t, int v) const {
        vi lanes;
        memcpy(&lanes, sum[t] + v * W, sizeof lanes);
        return __builtin_convertvector(lanes, vf);
    }
};

template <bool Q4>
INLINE uint8_t weight_at(const uint8_t* g, int row, int column) {
    if (!Q4) return g[column / 4 * 64 + row * 4 + column % 4];
    uint8_t both = g[column / 4 * 32 + row % 8 * 4 + column % 4];
    return row < 8 ? both & 15 : both >> 4;
}

// [column][row] for 16-bit activations; for 8-bit ones a byte each, four columns of a row side by side.
template <bool Q4, bool WIDE>
INLINE void unpack(const uint8_t* g, uint8_t* buffer) {
    for (int k = 0; k < GROUP; k++)
        for (int r = 0; r < PANEL; r++) {
            const uint8_t w = weight_at<Q4>(g, r, k);
            if (WIDE) ((int16_t*)buffer)[k * PANEL + r] = w;
            else buffer[k / 4 * 64 + r * 4 + k % 4] = w;
        }
}

struct Unpacked {
    const uint8_t* buffer;
};

template <bool Q4>
struct Packed {  // here everything goes by the buffer
    const uint8_t* g;
};

template <int T, int FROM, int TO>
INLINE void add_16(const Unpacked& weights, const int16_t* x, Dots<T>& d) {
    const int16_t* w = (const int16_t*)weights.buffer;
    for (int t = 0; t < T; t++)
        for (int k = 4 * FROM; k < 4 * TO; k++)
            for (int r = 0; r < PANEL; r++) d.sum[t][r] += (int32_t)w[k * PANEL + r] * x[t * GROUP + k];
}
template <int T, int FROM, int TO, bool Q4>
INLINE void add_16(const Packed<Q4>& weights, const int16_t* x, Dots<T>& d) {
    alignas(64) uint8_t buffer[2 * PANEL * GROUP];
    unpack<Q4, true>(weights.g, buffer);
    add_16<T, FROM, TO>(Unpacked{buffer}, x, d);
}

template <int T, bool Q4, int FROM, int TO>
INLINE void add_8(const Unpacked& weights, const int8_t* x, Dots<T>& d) {
    for (int t = 0; t < T; t++)
        for (int k = 4 * FROM; k < 4 * TO; k++)
            for (int r = 0; r < PANEL; r++) d.sum[t][r] += weights.buffer[k / 4 * 64 + r * 4 + k % 4] * x[t * GROUP + k];
}

template <int T, bool Q4, int FROM, int TO>
INLINE void add_8(const Packed<Q4>& weights, const int8_t* x, Dots<T>& d) {
    alignas(64) uint8_t buffer[PANEL * GROUP];
    unpack<Q4, false>(weights.g, buffer);
    add_8<T, Q4, FROM, TO>(Unpacked{buffer}, x, d);
}

INLINE int32_t weight_of(const Unpacked& weights, int row, int column) { return weights.buffer[column / 4 * 64 + row * 4 + column % 4]; }
template <bool Q4>
INLINE int32_t weight_of(const Packed<Q4>& weights, int row, int column) { return weight_at<Q4>(weights.g, row, column); }

template <int T, bool Q4, class Weights>
INLINE void add_four(const Weights& weights, int quad, const int8_t* x, Dots<T>& d) {
    for (int t = 0; t < T; t++)
        for (int k = 0; k < 4; k++)
            for (int r = 0; r < PANEL; r++) d.sum[t][r] += weight_of(weights, r, 4 * quad + k) * x[t * GROUP + k];
}

#endif

}  // namespace LEVEL
