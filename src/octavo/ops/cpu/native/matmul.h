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

#include "kernels.h"
#include "vec.h"

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
                memcpy(&bytes[v], g + 32 * quad, sizeof bytes[v]);
                bytes[v] = (v ? bytes[v] >> 4 : bytes[v]) & splat(0x0f0f0f0f);
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

template <int T>
INLINE void float_tile(const float* weights, int64_t count, const float* x, int64_t ld, float* sums) {
    vf acc[T][VECTORS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++) acc[t][v] = load(sums + t * PANEL + v * W);
    for (int64_t k = 0; k < count; k++) {
        vf w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = load(weights + k * PANEL + v * W);
        for (int t = 0; t < T; t++) {
            vf b = splat(x[t * ld + k]);
            for (int v = 0; v < VECTORS; v++) acc[t][v] = fma(b, w[v], acc[t][v]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++) store(sums + t * PANEL + v * W, acc[t][v]);
}

// A single token, straight from the packed weights: the same arithmetic as float_tile<1>, without the detour.
template <bool Q4>
INLINE void float_row(const uint8_t* panel, int64_t groups, const float* x, float* sums) {
    vf acc[VECTORS];
    for (int v = 0; v < VECTORS; v++) acc[v] = splat(0.0f);
    for (int64_t g = 0; g < groups; g++, panel += Q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES, x += GROUP)
        each_weight<Q4>(panel, [&](int k, int v, vf w) { acc[v] = fma(splat(x[k]), w, acc[v]); });
    for (int v = 0; v < VECTORS; v++) store(sums + v * W, acc[v]);
}

static void write_panel(const float* sums, int64_t tokens, float* out, int64_t ldo, const float* bias, int lanes) {
    for (int64_t t = 0; t < tokens; t++) {
        float row[PANEL];
        for (int i = 0; i < PANEL; i += W) {
            vf v = load(sums + t * PANEL + i);
            store(row + i, v);
        }
        if (bias) for (int i = 0; i < lanes; i++) row[i] += bias[i];
        if (lanes == PANEL) memcpy(out + t * ldo, row, sizeof row);
        else memcpy(out + t * ldo, row, (size_t)lanes * 4);
    }
}

constexpr int64_t TOKEN_BLOCK = 64;  // tokens whose sums of a panel stay in the first-level cache

static void panel_float(int32_t kind, const uint8_t* panel, const Activations& a, int64_t begin, int64_t end, float* out, int64_t ldo,
                        const float* bias, int lanes) {
    alignas(64) float buffer[GROUP * PANEL];
    alignas(64) float sums[TOKEN_BLOCK * PANEL];
    if (end - begin == 1 && (kind == KIND_Q4 || kind == KIND_Q8)) {  // whose columns are whole groups
        const float* x = a.values + begin * a.ld;
        if (kind == KIND_Q4) float_row<true>(panel, a.groups, x, sums);
        else float_row<false>(panel, a.groups, x, sums);
        write_panel(sums, 1, out + begin * ldo, ldo, bias, lanes);
        return;
    }
    for (int64_t first = begin; first < end; first += TOKEN_BLOCK) {
        int64_t tokens = end - first < TOKEN_BLOCK ? end - first : TOKEN_BLOCK;
        memset(sums, 0, (size_t)tokens * PANEL * 4);
        for (int64_t g = 0; g * GROUP < a.columns; g++) {
            int64_t count = a.columns - g * GROUP < GROUP ? a.columns - g * GROUP : GROUP;
            const float* weights = unpack_group(kind, panel, g, a.columns, buffer);
            const float* x = a.values + first * a.ld + g * GROUP;
            int64_t t = 0;
            for (; t + 6 <= tokens; t += 6) float_tile<6>(weights, count, x + t * a.ld, a.ld, sums + t * PANEL);
            switch (tokens - t) {
                case 5: float_tile<5>(weights, count, x + t * a.ld, a.ld, sums + t * PANEL); break;
                case 4: float_tile<4>(weights, count, x + t * a.ld, a.ld, sums + t * PANEL); break;
                case 3: float_tile<3>(weights, count, x + t * a.ld, a.ld, sums + t * PANEL); break;
                case 2: float_tile<2>(weights, count, x + t * a.ld, a.ld, sums + t * PANEL); break;
                case 1: float_tile<1>(weights, count, x + t * a.ld, a.ld, sums + t * PANEL); break;
                default: break;
            }
        }
        write_panel(sums, tokens, out + first * ldo, ldo, bias, lanes);
    }
}

// ---- int8 activations

INLINE int32_t four(const int8_t* x) { int32_t v; memcpy(&v, x, 4); return v; }

#if defined(__AVX512VNNI__)

constexpr int TILE = 8;
constexpr bool ROUNDS_Q8 = true;

INLINE __m512i q4_quad(const uint8_t* p) {
    __m256i both = _mm256_loadu_si256((const __m256i*)p);
    __m512i wide = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    return _mm512_and_si512(wide, _mm512_set1_epi8(15));
}

template <int T, bool Q4>
INLINE void int8_tile(const uint8_t* panel, const Activations& a, int64_t token, float* out) {
    __m512 acc[T];
    for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
    const int8_t* x = a.rounded + token * a.groups * GROUP;
    for (int64_t g = 0; g < a.groups; g++, panel += Q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES) {
        __m512i dot[T];
        for (int t = 0; t < T; t++)
            dot[t] = Q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * a.counts[(token + t) * a.groups + g]);
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++) {
            __m512i w = Q4 ? q4_quad(panel + 32 * quad) : _mm512_loadu_si512(panel + 64 * quad);
            for (int t = 0; t < T; t++)
                dot[t] = _mm512_dpbusd_epi32(dot[t], w, _mm512_set1_epi32(four(x + (t * a.groups + g) * GROUP + 4 * quad)));
        }
        const uint16_t* narrow = (const uint16_t*)(panel + (Q4 ? 256 : 512));
        __m512 scale = (__m512)load(narrow);
        for (int t = 0; t < T; t++) {
            int64_t at = (token + t) * a.groups + g;
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), _mm512_mul_ps(scale, _mm512_set1_ps(a.scales[at])), acc[t]);
            if (Q4) acc[t] = _mm512_fmadd_ps((__m512)load(narrow + PANEL), _mm512_set1_ps(a.sums[at]), acc[t]);
        }
    }
    for (int t = 0; t < T; t++) _mm512_storeu_ps(out + t * PANEL, acc[t]);
}

#elif defined(__AVX2__)

constexpr int TILE = 4;
constexpr bool ROUNDS_Q8 = false;

// Products of a half byte (0..15) and an int8 (-127..127): eight pairs sum to at most 30,480, which 16 bits hold.
// Q8 weights times int8 would take twice as many instructions as this, no fewer than float32 does: they take float rows.
template <int T, bool Q4>
INLINE void int8_tile(const uint8_t* panel, const Activations& a, int64_t token, float* out) {
    static_assert(Q4, "see ROUNDS_Q8");
    const __m256i low_half = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    const int64_t stride = a.groups * GROUP;
    const int8_t* x = a.rounded + token * stride;
    alignas(32) __m256 acc[T][2];
    for (int t = 0; t < T; t++) acc[t][0] = acc[t][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < a.groups; g++, panel += Q4_GROUP_BYTES, x += GROUP) {
        __m256i dot[T][2];
        for (int t = 0; t < T; t++) dot[t][0] = dot[t][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++) {
            __m256i both = _mm256_loadu_si256((const __m256i*)(panel + 32 * quad));
            __m256i low = _mm256_and_si256(both, low_half), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
            for (int t = 0; t < T; t++) {
                __m256i b = _mm256_set1_epi32(four(x + t * stride + 4 * quad));
                dot[t][0] = _mm256_add_epi16(dot[t][0], _mm256_maddubs_epi16(low, b));
                dot[t][1] = _mm256_add_epi16(dot[t][1], _mm256_maddubs_epi16(high, b));
            }
        }
        const uint16_t* narrow = (const uint16_t*)(panel + 256);
        for (int h = 0; h < 2; h++) {
            __m256 scale = (__m256)load(narrow + 8 * h), minimum = (__m256)load(narrow + PANEL + 8 * h);
            for (int t = 0; t < T; t++) {
                int64_t at = (token + t) * a.groups + g;
                __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(dot[t][h], ones));
                acc[t][h] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scale, _mm256_set1_ps(a.scales[at])), acc[t][h]);
                acc[t][h] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(a.sums[at]), acc[t][h]);
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(out + t * PANEL + 8 * h, acc[t][h]);
}

#else

constexpr int TILE = 4;
constexpr bool ROUNDS_Q8 = true;

#if defined(__ARM_FEATURE_DOTPROD)
}
#include <arm_neon.h>
namespace LEVEL {
#endif

// Integer sums of one group, 16 rows, one token.
template <bool Q4>
INLINE void dot_group(const uint8_t* g, const int8_t* x, int32_t count, int32_t* whole) {
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t dot[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int quad = 0; quad < 8; quad++) {
        int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four(x + 4 * quad)));
        for (int h = 0; h < 2; h++) {
            if (Q4) {
                uint8x16_t both = vld1q_u8(g + 32 * quad + 16 * h);
                dot[h] = vdotq_s32(dot[h], vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), b);
                dot[2 + h] = vdotq_s32(dot[2 + h], vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), b);
            } else {
                for (int i = 0; i < 2; i++) {
                    uint8x16_t bytes = veorq_u8(vld1q_u8(g + 64 * quad + 32 * h + 16 * i), vdupq_n_u8(128));
                    dot[2 * h + i] = vdotq_s32(dot[2 * h + i], vreinterpretq_s8_u8(bytes), b);
                }
            }
        }
    }
    for (int i = 0; i < 4; i++) vst1q_s32(whole + 4 * i, dot[i]);
    (void)count;
#else
    for (int r = 0; r < PANEL; r++) whole[r] = Q4 ? 0 : -128 * count;
    for (int quad = 0; quad < 8; quad++)
        for (int r = 0; r < PANEL; r++)
            for (int c = 0; c < 4; c++) {
                int w = Q4 ? (r < 8 ? g[32 * quad + 4 * r + c] & 15 : g[32 * quad + 4 * (r - 8) + c] >> 4) : g[64 * quad + 4 * r + c];
                whole[r] += w * x[4 * quad + c];
            }
#endif
}

template <int T, bool Q4>
INLINE void int8_tile(const uint8_t* panel, const Activations& a, int64_t token, float* out) {
    memset(out, 0, T * PANEL * 4);
    for (int64_t g = 0; g < a.groups; g++, panel += Q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES) {
        const uint16_t* narrow = (const uint16_t*)(panel + (Q4 ? 256 : 512));
        for (int t = 0; t < T; t++) {
            int64_t at = (token + t) * a.groups + g;
            alignas(64) int32_t whole[PANEL];
            dot_group<Q4>(panel, a.rounded + at * GROUP, a.counts[at], whole);
            for (int i = 0; i < PANEL; i += W) {
                vi sums;
                memcpy(&sums, whole + i, sizeof sums);
                vf acc = fma(__builtin_convertvector(sums, vf), load(narrow + i) * splat(a.scales[at]), load(out + t * PANEL + i));
                if (Q4) acc = fma(load(narrow + PANEL + i), splat(a.sums[at]), acc);
                store(out + t * PANEL + i, acc);
            }
        }
    }
}

#endif

template <bool Q4>
static void panel_rounded(const uint8_t* panel, const Activations& a, int64_t begin, int64_t end, float* out, int64_t ldo,
                          const float* bias, int lanes) {
    alignas(64) float sums[TILE * PANEL];
    int64_t t = begin;
    for (; t + TILE <= end; t += TILE) {
        int8_tile<TILE, Q4>(panel, a, t, sums);
        write_panel(sums, TILE, out + t * ldo, ldo, bias, lanes);
    }
    if (TILE > 4 && end - t >= 4) {
        int8_tile<4, Q4>(panel, a, t, sums);
        write_panel(sums, 4, out + t * ldo, ldo, bias, lanes);
        t += 4;
    }
    switch (end - t) {
        case 3: int8_tile<3, Q4>(panel, a, t, sums); break;
        case 2: int8_tile<2, Q4>(panel, a, t, sums); break;
        case 1: int8_tile<1, Q4>(panel, a, t, sums); break;
        default: return;
    }
    write_panel(sums, end - t, out + t * ldo, ldo, bias, lanes);
}

static void panel_int8(int32_t kind, const uint8_t* panel, const Activations& a, int64_t begin, int64_t end, float* out, int64_t ldo,
                       const float* bias, int lanes) {
    if (kind == KIND_Q4) panel_rounded<true>(panel, a, begin, end, out, ldo, bias, lanes);
    else if constexpr (ROUNDS_Q8) panel_rounded<false>(panel, a, begin, end, out, ldo, bias, lanes);
}

}  // namespace LEVEL
