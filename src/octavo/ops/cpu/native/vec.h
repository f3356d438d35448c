// Vectors of W floats at the level this file is compiled for: the compiler's vector types, with intrinsics where they pay.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace LEVEL {

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__ARM_NEON)
constexpr int W = 4;
#else
constexpr int W = 8;
#endif
typedef float vf __attribute__((vector_size(W * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2), may_alias));

INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
// The first `count` lanes; the others are zero, or not written.
INLINE vf load_part(const float* p, int count) {
    float lanes[W] = {};
    memcpy(lanes, p, (size_t)count * 4);
    return load(lanes);
}
INLINE void store_part(float* p, vf v, int count) {
    float lanes[W];
    store(lanes, v);
    memcpy(p, lanes, (size_t)count * 4);
}
INLINE vi bits(vf v) { return (vi)v; }
INLINE vf floats(vi v) { return (vf)v; }
INLINE vf select(vi mask, vf yes, vf no) { return floats((mask & bits(yes)) | (~mask & bits(no))); }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// max(a, b), and b where either is NaN: pass the value that may be NaN as b.
INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}
INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
INLINE vf abs(vf a) { return floats(bits(a) & splat(0x7fffffff)); }

// Within each four lanes: 0, 2, 1, 3.
INLINE vi swap_middle(vi v) {
#if defined(__AVX512F__)
    return (vi)_mm512_shuffle_epi32((__m512i)v, _MM_PERM_DBCA);
#elif defined(__AVX2__)
    return (vi)_mm256_shuffle_epi32((__m256i)v, 0xd8);
#else
    vi out;
    for (int i = 0; i < W; i++) out[i] = v[(i & ~3) | ((i & 1) << 1) | ((i >> 1) & 1)];
    return out;
#endif
}

// The largest of each four lanes, in all of them. Of lanes none of which is NaN.
INLINE vf largest_of_four(vf v) {
#if defined(__AVX512F__)
    v = max(v, (vf)_mm512_permute_ps((__m512)v, 0xb1));
    return max(v, (vf)_mm512_permute_ps((__m512)v, 0x4e));
#elif defined(__AVX2__)
    v = max(v, (vf)_mm256_permute_ps((__m256)v, 0xb1));
    return max(v, (vf)_mm256_permute_ps((__m256)v, 0x4e));
#else
    vf out;
    for (int i = 0; i < W; i += 4) {
        const float a = v[i] > v[i + 1] ? v[i] : v[i + 1], b = v[i + 2] > v[i + 3] ? v[i + 2] : v[i + 3];
        out[i] = out[i + 1] = out[i + 2] = out[i + 3] = a > b ? a : b;
    }
    return out;
#endif
}

INLINE float reduce_add(vf v) {  // halves upon halves, at every level
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    const __m256 half = (__m256)v;
#endif
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
    float lanes[W];
    store(lanes, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

// Of lanes none of which is NaN.
INLINE float largest_lane(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
    __m128 x = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
#elif defined(__ARM_NEON)
    return vmaxvq_f32((float32x4_t)v);
#else
    float most = v[0];
    for (int i = 1; i < W; i++) most = most > v[i] ? most : v[i];
    return most;
#endif
}
INLINE int32_t reduce_add(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
#elif defined(__ARM_NEON)
    return vaddvq_s32((int32x4_t)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < W; i++) sum += v[i];
    return sum;
#endif
}
INLINE bool any_nan(vf v) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q));
#else
    return reduce_add(v != v) != 0;
#endif
}
INLINE float reduce_max(vf v) { return any_nan(v) ? __builtin_nanf("") : largest_lane(v); }  // NaN if any lane is

// float16 <-> float32. The general way: shift into place and rescale, which also normalises subnormals.
INLINE vf load(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__ARM_NEON)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vh h;
    memcpy(&h, p, sizeof h);
    vi wide = __builtin_convertvector(h, vi);
    vi sign = (wide & splat(0x8000)) << 16, rest = (wide & splat(0x7fff)) << 13;
    vf value = floats(rest) * splat(5.192296858534828e33f);  // 2^112
    vi special = rest >= splat(0x7c00 << 13);
    return floats(((special & (rest | splat(0x7f800000))) | (~special & bits(value))) | sign);
#endif
}

INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(x, 0);
#elif defined(__ARM_NEON)
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
#else
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) {  // subnormal: let the addition round at the right bit
        float f, shifter = 0.5f;
        memcpy(&f, &a, 4);
        f += shifter;
        uint32_t r;
        memcpy(&r, &f, 4);
        return (uint16_t)(sign | (r - 0x3f000000));
    }
    a += 0xfff + ((a >> 13) & 1);
    return (uint16_t)(sign | ((a - 0x38000000) >> 13));
#endif
}

INLINE void store(uint16_t* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#elif defined(__ARM_NEON)
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
    for (int i = 0; i < W; i++) p[i] = to_half(v[i]);
#endif
}

INLINE vf load_bf16(const uint16_t* p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return floats(__builtin_convertvector(h, vi) << 16);
}

// e^x to about one unit in the last place (Cephes' polynomial); 0 below -87.3, NaN stays NaN.
INLINE vf exp(vf x) {
    vi tiny = x < splat(-87.33654f);
    x = min(splat(88.72283f), x);
    x = max(splat(-87.33654f), x);
    vf shifted = fma(x, splat(1.44269504f), splat(12582912.0f));
    vf n = shifted - splat(12582912.0f);
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    // 2^n in two halves: n = 128 is beyond one exponent.
    vi whole = bits(shifted) - splat(0x4b400000);
    vi half = whole >> 1;
    vf a = floats((half + splat(127)) << 23), b = floats((whole - half + splat(127)) << 23);
    return floats(~tiny & bits(p * a * b));
}

INLINE vf tanh(vf x) {  // 1 - 2 / (e^2|x| + 1), with the sign of x; a short series where that cancels
    vf a = abs(x);
    vf t = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
    vf square = x * x;
    vf series = x * fma(square, fma(square, fma(square, splat(-17.0f / 315), splat(2.0f / 15)), splat(-1.0f / 3)), splat(1.0f));
    vf big = floats(bits(t) | (bits(x) & splat((int32_t)0x80000000)));
    return select(a < splat(0.2f), series, big);
}

}  // namespace LEVEL
