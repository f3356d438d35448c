// Kernels over single rows: norms, rounding to int8, rotation, activations, embedding.
#pragma once

#include "kernels.h"
#include "vec.h"

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

// Round a row to 8 bits: scale = max|x| / 127 a group. A NaN or an infinity makes the scale of its group NaN, so that it
// shows in the product.
static void quantise(const float* x, int64_t columns, int8_t* rounded, float* scales, float* sums, int32_t* counts) {
    int64_t groups = ceil_div(columns, GROUP);
    float padded[GROUP];
    for (int64_t g = 0; g < groups; g++, x += GROUP, rounded += GROUP) {
        const float* source = x;
        if ((g + 1) * GROUP > columns) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, x, (size_t)(columns - g * GROUP) * 4);
            source = padded;
        }
        vf most = splat(0.0f), poison = splat(0.0f);
        for (int i = 0; i < GROUP; i += W) {
            vf v = load(source + i);
            most = max(most, abs(v));
            poison += v * splat(0.0f);
        }
        float largest = reduce_max(most);
        // Below 1e-36 the quotient would overflow; such a group is zero for all purposes.
        float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
        uint32_t sum = 0;  // unsigned: what a NaN converts to may wrap before it is thrown away
#if defined(__AVX2__)
        __m256i v[4];
        for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(source + 8 * i), _mm256_set1_ps(inverse)));
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i*)rounded, bytes);
        __m256i all = _mm256_add_epi32(_mm256_add_epi32(v[0], v[1]), _mm256_add_epi32(v[2], v[3]));
        uint32_t lanes[8];
        _mm256_storeu_si256((__m256i*)lanes, all);
        for (int i = 0; i < 8; i++) sum += lanes[i];
#else
        for (int i = 0; i < GROUP; i += W) {
            vf v = load(source + i) * splat(inverse);
            vi whole = bits(v + splat(12582912.0f)) - splat(0x4b400000);  // nearest, ties to even
            for (int lane = 0; lane < W; lane++) {
                rounded[i + lane] = (int8_t)whole[lane];
                sum += (uint32_t)(int8_t)whole[lane];
            }
        }
#endif
        int32_t count = (int32_t)sum;
        float nothing = reduce_add(poison);
        float scale = inverse == 0 ? nothing : largest / 127.0f;
        if (nothing != nothing) {
            memset(rounded, 0, GROUP);
            count = 0;
            scale = nothing;
        }
        scales[g] = scale;
        sums[g] = scale * (float)count;
        counts[g] = count;
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
            const uint8_t* g = panel + group * (kind == KIND_Q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES);
            uint16_t d[W] = {}, m[W] = {};
            if (kind == KIND_Q4) {
                uint8_t both = g[k / 4 * 32 + lane % 8 * 4 + k % 4];
                memcpy(d, g + 256 + 2 * lane, 2);
                memcpy(m, g + 288 + 2 * lane, 2);
                value = load(d)[0] * (float)(lane < 8 ? both & 15 : both >> 4) + load(m)[0];
            } else {
                memcpy(d, g + 512 + 2 * lane, 2);
                value = load(d)[0] * (float)((int)g[k / 4 * 64 + lane * 4 + k % 4] - 128);
            }
        }
        out[i] = value * scale;
    }
}

}  // namespace LEVEL
