// Kernels over single rows: norms, rounding to int8, rotation, activations, embedding.
#pragma once

#include "int_dot.h"

namespace LEVEL {

INLINE float square_root(float x) { return __builtin_sqrtf(x); }

static void rms_norm(const float* x, const float* weight, float eps, int64_t dim, float* out) {
    vf sum = splat(0.0f);
    int64_t i = 0;
    for (; i + W <= dim; i += W) { vf v = load(x + i); sum = fma(v, v, sum); }
    float squares = reduce_add(sum);
    for (; i < dim; i++) squares += x[i] * x[i];
    float factor = 1.0f / square_root(squares / (float)dim + eps);
    for (i = 0; i + W <= dim; i += W) store(out + i, load(x + i) * splat(factor) * load(weight + i));
    for (; i < dim; i++) out[i] = x[i] * factor * weight[i];
}

static void add(const float* x, float factor, int64_t dim, float* residual) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(residual + i, fma(load(x + i), splat(factor), load(residual + i)));
    for (; i < dim; i++) residual[i] += factor * x[i];
}

static void rope(float* head, const float* cos_sin, int64_t rotary_dim) {
    int64_t half = rotary_dim / 2, i = 0;
    const float *cosine = cos_sin, *sine = cos_sin + half;
    for (; i + W <= half; i += W) {
        vf a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

INLINE vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }

INLINE vf gelu_tanh(vf x) {
    vf inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

INLINE vf gelu(vf x) {  // erf by Abramowitz & Stegun 7.1.26, absolute error 1.5e-7
    vf z = abs(x) * splat(0.7071067812f);
    vf t = splat(1.0f) / fma(splat(0.3275911f), z, splat(1.0f));
    vf p = fma(t, splat(1.061405429f), splat(-1.453152027f));
    p = fma(t, p, splat(1.421413741f));
    p = fma(t, p, splat(-0.284496736f));
    p = fma(t, p, splat(0.254829592f));
    vf upper = splat(0.5f) * p * t * exp(-z * z);  // half of 1 - erf(z)
    return x * select(x < splat(0.0f), upper, splat(1.0f) - upper);
}

template <vf (*F)(vf)>
INLINE void gated(const float* gate, const float* up, int64_t dim, float* out) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(out + i, F(load(gate + i)) * load(up + i));
    if (i < dim) {
        float g[W] = {}, u[W] = {};
        memcpy(g, gate + i, (size_t)(dim - i) * 4);
        memcpy(u, up + i, (size_t)(dim - i) * 4);
        store(g, F(load(g)) * load(u));
        memcpy(out + i, g, (size_t)(dim - i) * 4);
    }
}
static vf silu_f(vf x) { return silu(x); }
static vf gelu_f(vf x) { return gelu(x); }
static vf gelu_tanh_f(vf x) { return gelu_tanh(x); }

static void gated_mul(const float* gate, const float* up, int64_t dim, int32_t activation, float* out) {
    if (activation == ACT_SILU) gated<silu_f>(gate, up, dim, out);
    else if (activation == ACT_GELU) gated<gelu_f>(gate, up, dim, out);
    else gated<gelu_tanh_f>(gate, up, dim, out);
}

static bool scale_logits(const float* logits, int64_t count, float temperature, float* scaled, float* maxima) {
    vi usable = splat(-1);
    for (int64_t g = 0; g * DRAW_GROUP < count; g++) {
        const int64_t end = (g + 1) * DRAW_GROUP < count ? (g + 1) * DRAW_GROUP : count;
        vf most = splat(-__builtin_inff());
        for (int64_t i = g * DRAW_GROUP; i < end; i += W) {
            vf v;
            if (i + W <= end) {
                v = load(logits + i);
            } else {
                float lanes[W];
                for (int lane = 0; lane < W; lane++) lanes[lane] = i + lane < end ? logits[i + lane] : -__builtin_inff();
                v = load(lanes);
            }
            usable &= v < splat(__builtin_inff());
            if (scaled) {
                v = v / splat(temperature);
                if (i + W <= end) {
                    store(scaled + i, v);
                } else {
                    float lanes[W];
                    store(lanes, v);
                    memcpy(scaled + i, lanes, (size_t)(end - i) * 4);
                }
            }
            most = max(v, most);
        }
        maxima[g] = reduce_max(most);
    }
    int32_t lanes[W], all = -1;
    memcpy(lanes, &usable, sizeof usable);
    for (int lane = 0; lane < W; lane++) all &= lanes[lane];
    return all != 0;
}

static void exp_sums(const float* x, int64_t count, float cut, float most, float* sums) {
    for (int64_t g = 0; g * DRAW_GROUP < count; g++) {
        const int64_t end = (g + 1) * DRAW_GROUP < count ? (g + 1) * DRAW_GROUP : count;
        vf sum = splat(0.0f);
        for (int64_t i = g * DRAW_GROUP; i < end; i += W) {
            float lanes[W];
            for (int lane = 0; lane < W && i + W > end; lane++) lanes[lane] = i + lane < end ? x[i + lane] : -__builtin_inff();
            vf v = i + W <= end ? load(x + i) : load(lanes);
            vf e = exp(v - splat(most));
            sum += select(v >= splat(cut), e, splat(0.0f));
        }
        sums[g] = reduce_add(sum);
    }
}

static void finish_logits(float* logits, int64_t count, float scale, float cap) {
    int64_t i = 0;
    for (; i < count; i += W) {
        float lanes[W] = {};
        int64_t n = count - i < W ? count - i : W;
        memcpy(lanes, logits + i, (size_t)n * 4);
        vf v = load(lanes) * splat(scale);
        if (cap > 0) v = splat(cap) * tanh(v / splat(cap));
        store(lanes, v);
        memcpy(logits + i, lanes, (size_t)n * 4);
    }
}

// What a group of a row becomes, see Activations.
struct RoundedGroup {
    float *scale, *sum;
    int32_t *excess, *first_excess;
    // A NaN or an infinity makes the scale NaN, so that it shows in the product.
    INLINE_MEMBER void poison() const {
        *scale = *sum = __builtin_nanf("");
        *excess = *first_excess = 0;
    }
    // Sums of whole numbers: of the first 16 columns, and of the others.
    INLINE_MEMBER void put(float step, int32_t first, int32_t second) const {
        const int32_t count = first + second;
        *excess = -128 * count;
        *first_excess = -128 * first;
        *scale = step;
        *sum = step * (float)count;
    }
};

// The largest size among 32 numbers, NaN where one is NaN or infinite.
INLINE float peak_of(const float* x) {
    vf largest = splat(0.0f), poison = splat(0.0f);
    for (int i = 0; i < GROUP; i += W) {
        vf v = load(x + i);
        largest = max(largest, abs(v));
        poison += v * splat(0.0f);
    }
    return any_nan(poison) ? __builtin_nanf("") : largest_lane(largest);
}

constexpr float TINY = 1e-34f;  // below it the quotient would overflow; such a group is zero for all purposes

// Nearest, ties to even: the sum's last bit is worth one.
INLINE vi nearest(vf x, float inverse) { return bits(x * splat(inverse) + splat(12582912.0f)) - splat(0x4b400000); }

template <class T>
INLINE void store_narrow(T* to, vi whole) {
    typedef T narrow __attribute__((vector_size(W * sizeof(T)), may_alias));
    narrow v = __builtin_convertvector(whole, narrow);
    memcpy(to, &v, sizeof v);
}

// Stores 32 whole numbers from -127 to 127 and sums the first and the last 16.
INLINE void store_codes(int8_t* to, const vi* whole, int32_t* sums) {
#if defined(__AVX512F__)
    // Sums of eight bytes at once are those of bytes without a sign.
    const __m128i halves[2] = {_mm512_cvtepi32_epi8((__m512i)whole[0]), _mm512_cvtepi32_epi8((__m512i)whole[1])};
    const __m256i codes = _mm256_set_m128i(halves[1], halves[0]);
    _mm256_storeu_si256((__m256i*)to, codes);
    const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m128i first = _mm256_castsi256_si128(eights), second = _mm256_extracti128_si256(eights, 1);
    sums[0] = _mm_cvtsi128_si32(_mm_add_epi32(first, _mm_unpackhi_epi64(first, first))) - 128 * 16;
    sums[1] = _mm_cvtsi128_si32(_mm_add_epi32(second, _mm_unpackhi_epi64(second, second))) - 128 * 16;
#else
    vi total[2] = {splat(0), splat(0)};
    for (int i = 0; i < GROUP; i += W) {
        total[i / 16] += whole[i / W];
        store_narrow(to + i, whole[i / W]);
    }
    for (int half = 0; half < 2; half++) sums[half] = reduce_add(total[half]);
#endif
}

// 32 numbers to the nearest of 2 * 32767 + 1 steps of their largest, or of 2 * 127 + 1.
INLINE void round_16(const float* x, float peak, int16_t* rounded, const RoundedGroup& to) {
    const float inverse = peak > TINY ? 32767.0f / peak : 0.0f, step = peak > TINY ? peak / 32767.0f : 0.0f;
    vi total[2] = {splat(0), splat(0)};
    for (int i = 0; i < GROUP; i += W) {
        const vi whole = nearest(load(x + i), inverse);
        total[i / 16] += whole;
        store_narrow(rounded + i, PAIRED ? swap_middle(whole) : whole);
    }
    to.put(step, reduce_add(total[0]), reduce_add(total[1]));
}

INLINE void round_8(const float* x, float peak, int8_t* rounded, const RoundedGroup& to) {
    const float inverse = peak > TINY ? 127.0f / peak : 0.0f, step = peak > TINY ? peak / 127.0f : 0.0f;
    vi whole[GROUP / W];
    for (int i = 0; i < GROUP; i += W) whole[i / W] = nearest(load(x + i), inverse);
    int32_t sums[2];
    store_codes(rounded, whole, sums);
    to.put(step, sums[0], sums[1]);
}

// 32 numbers of which some fours go beyond `bound` and have a high part. Returns which.
INLINE uint8_t round_large(const float* x, float peak, float bound, int8_t* low, int8_t* high, const RoundedGroup& to) {
    vf others = splat(0.0f);
    int32_t flags[GROUP];
    for (int i = 0; i < GROUP; i += W) {
        const vf size = abs(load(x + i));
        const vi large = largest_of_four(size) > splat(bound);
        memcpy(flags + i, &large, sizeof large);
        others = max(others, floats(~large & bits(size)));
    }
    const float rest = largest_lane(others), least = peak * (1.0f / (1 << HIGH_BITS));  // the high part has 8 bits too
    const float base = rest > least ? rest : least, inverse = base > TINY ? 127.0f / base : 0.0f, step = base > TINY ? base / 127.0f : 0.0f;
    vi below[GROUP / W], above[GROUP / W];
    for (int i = 0; i < GROUP; i += W) {
        vi large;
        memcpy(&large, flags + i, sizeof large);
        const vi whole = nearest(load(x + i), inverse);
        above[i / W] = ((whole + splat(1 << (HIGH_BITS - 1))) >> HIGH_BITS) & large;
        below[i / W] = whole - (above[i / W] << HIGH_BITS);
    }
    int32_t lows[2], highs[2];
    store_codes(low, below, lows);
    store_codes(high, above, highs);
    to.put(step, lows[0] + highs[0] * (1 << HIGH_BITS), lows[1] + highs[1] * (1 << HIGH_BITS));
    uint32_t fours = 0;
    for (int four = 0; four < GROUP / 4; four++) fours |= (uint32_t)(flags[4 * four] & 1) << four;
    return (uint8_t)fours;
}

INLINE float mean_size(const float* x, int64_t columns) {
    vf sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 4 * W <= columns; i += 4 * W)
        for (int v = 0; v < 4; v++) sums[v] += abs(load(x + i + v * W));
    float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < columns; i++) sum += __builtin_fabsf(x[i]);
    return sum / (float)columns;
}

static void round_row(Rounding rounding, const float* x, int64_t columns, int64_t stride, const RowTarget& to) {
    const float bound = rounding == ROUND_8 ? LARGE * mean_size(x, columns) : 0.0f;
    for (int64_t g = 0; g * GROUP < columns; g++, x += GROUP) {
        const int64_t at = g * stride, left = columns - g * GROUP;
        alignas(64) float filled[GROUP];
        const float* group = x;
        if (left < GROUP) {
            memset(filled, 0, sizeof filled);
            memcpy(filled, x, (size_t)left * 4);
            group = filled;
        }
        if (to.floats) memcpy(to.floats + at * GROUP, group, GROUP * 4);
        if (rounding == ROUND_NOT) continue;
        const RoundedGroup result = {to.scales + at, to.sums + at, to.excess + at, to.first_excess + at};
        const float peak = peak_of(group);
        const bool poisoned = peak != peak;
        if (poisoned) result.poison();
        if (rounding == ROUND_16) {
            int16_t* rounded = (int16_t*)to.rounded + at * GROUP;
            if (poisoned) memset(rounded, 0, GROUP * 2);
            else round_16(group, peak, rounded, result);
            continue;
        }
        int8_t *low = (int8_t*)to.rounded + at * GROUP, *high = to.high + at * GROUP;
        if (peak > bound) {
            to.large[at] = round_large(group, peak, bound, low, high, result);
            continue;
        }
        to.large[at] = 0;
        memset(high, 0, GROUP);
        if (poisoned) memset(low, 0, GROUP);
        else round_8(group, peak, low, result);
    }
}

static void embed_row(int32_t kind, const uint8_t* panel, int lane, int64_t columns, float scale, float* out) {
    for (int64_t i = 0; i < columns; i++) {
        int64_t group = i / GROUP, k = i % GROUP;
        float value;
        if (kind == KIND_F32) {
            memcpy(&value, panel + 4 * (i * PANEL + lane), 4);
        } else if (kind == KIND_F16 || kind == KIND_BF16) {
            uint16_t narrow[W] = {};
            memcpy(narrow, panel + 2 * (i * PANEL + lane), 2);
            value = kind == KIND_F16 ? load(narrow)[0] : load_bf16(narrow)[0];
        } else {
            const uint8_t* g = panel + group * group_bytes(kind);
            uint16_t d[W] = {}, m[W] = {};
            if (kind == KIND_Q4) {
                uint8_t both = g[k / 4 * 32 + lane % 8 * 4 + k % 4];
                memcpy(d, g + 256 + 2 * lane, 2);
                memcpy(m, g + 288 + 2 * lane, 2);
                value = load(d)[0] * (float)(lane < 8 ? both & 15 : both >> 4) + load(m)[0];
            } else {
                memcpy(d, g + 512 + (kind == KIND_Q8_HALVES ? k / 16 * 32 : 0) + 2 * lane, 2);
                if (kind == KIND_Q8_MINIMUM) memcpy(m, g + 544 + 2 * lane, 2);
                value = load(d)[0] * (float)((int)g[k / 4 * 64 + lane * 4 + k % 4] - 128) + load(m)[0];
            }
        }
        out[i] = value * scale;
    }
}

}  // namespace LEVEL
