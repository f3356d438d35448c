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

// 32 numbers to the nearest of 2 * `most` + 1 steps of their largest. A NaN or an infinity makes the scale NaN, so that it shows
// in the product.
template <class T>
INLINE void round_to(const float* x, float most, T* rounded, float* scale, float* sum, int32_t* excess, int32_t* first_excess) {
    vf largest = splat(0.0f), poison = splat(0.0f);
    for (int i = 0; i < GROUP; i += W) {
        vf v = load(x + i);
        largest = max(largest, abs(v));
        poison += v * splat(0.0f);
    }
    if (any_nan(poison)) {
        memset(rounded, 0, GROUP * sizeof(T));
        *scale = *sum = __builtin_nanf("");
        *excess = *first_excess = 0;
        return;
    }
    const float peak = largest_lane(largest);
    // Below 1e-34 the quotient would overflow; such a group is zero for all purposes.
    const float inverse = peak > 1e-34f ? most / peak : 0.0f, step = peak > 1e-34f ? peak / most : 0.0f;
    vi total[2] = {splat(0), splat(0)};  // of the first 16 columns, and of the others
    for (int i = 0; i < GROUP; i += W) {
        // Nearest, ties to even: the sum's last bit is worth one.
        vi whole = bits(load(x + i) * splat(inverse) + splat(12582912.0f)) - splat(0x4b400000);
        total[i / 16] += whole;
        if constexpr (sizeof(T) == 2 && PAIRED) whole = swap_middle(whole);
        typedef T narrow __attribute__((vector_size(W * sizeof(T)), may_alias));
        narrow v = __builtin_convertvector(whole, narrow);
        memcpy(rounded + i, &v, sizeof v);
    }
    const int32_t first = reduce_add(total[0]), count = first + reduce_add(total[1]);
    *excess = -128 * count;
    *first_excess = -128 * first;
    *scale = step;
    *sum = step * (float)count;
}

static void round_row(Rounding rounding, const float* x, int64_t columns, int64_t stride, const RowTarget& to) {
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
        const auto round = [&](float most, auto* rounded) {
            round_to(group, most, rounded + at * GROUP, to.scales + at, to.sums + at, to.excess + at, to.first_excess + at);
        };
        if (rounding == ROUND_16) round(32767.0f, (int16_t*)to.rounded);
        else if (rounding == ROUND_8) round(127.0f, (int8_t*)to.rounded);
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
