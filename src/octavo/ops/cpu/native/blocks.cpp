// Layouts: ggml-common.h of the ggml project; `weights/gguf_coded.py` reads the same ones for all devices.
//
// Codes stay what they are. A scale that is a product of two numbers is rounded to float16, as are numbers where no simpler block
// can say them; what does not fit there becomes an infinity, which `octavo_pack` tells.
#include "blocks.h"

#include <cstring>

namespace {

uint16_t to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (bits < 0x38800000) {  // becomes subnormal: the addition rounds it to a multiple of 2^-24
        float shifted;
        memcpy(&shifted, &bits, 4);
        shifted += 0.5f;
        memcpy(&bits, &shifted, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);  // to the nearest, of two the even one
    return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

float from_half(const uint8_t* at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
    if (exponent == 0) {
        const float size = (float)mantissa * (1.0f / 16777216.0f);
        return sign ? -size : size;
    }
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

void put_half(uint8_t* to, float x) {
    const uint16_t half = to_half(x);
    memcpy(to, &half, 2);
}

// Eight scales and minima of 6 bits, in the 12 bytes behind the two float16 of Q4_K and Q5_K.
void k_scales(const uint8_t* packed, int* scales, int* minima) {
    for (int i = 0; i < 4; i++) {
        const int low = packed[i], high = packed[4 + i], rest = packed[8 + i];
        scales[i] = low & 63;
        minima[i] = high & 63;
        scales[4 + i] = (rest & 15) | (low >> 6) << 4;
        minima[4 + i] = rest >> 4 | (high >> 6) << 4;
    }
}

void q4_k(const uint8_t* block, uint8_t* to) {
    int scales[8], minima[8];
    k_scales(block + 4, scales, minima);
    const float d = from_half(block), dmin = from_half(block + 2);
    for (int run = 0; run < 8; run++, to += 20) {
        put_half(to, d * scales[run]);
        put_half(to + 2, -(dmin * minima[run]));
        const uint8_t* codes = block + 16 + run / 2 * 32;  // of two runs: the low halves, then the high ones
        const int shift = run % 2 * 4;
        for (int i = 0; i < 16; i++) to[4 + i] = (uint8_t)((codes[i] >> shift & 15) | (codes[16 + i] >> shift & 15) << 4);
    }
}

int fifth_bit(const uint8_t* bits, int i) { return (bits[i / 8] >> i % 8 & 1) << 4; }

void q5_0(const uint8_t* block, uint8_t* to) {
    memcpy(to, block, 2);
    for (int i = 0; i < 32; i++) {
        const int code = (block[6 + i % 16] >> i / 16 * 4 & 15) | fifth_bit(block + 2, i);
        to[2 + i] = (uint8_t)(code - 16);
    }
}

// A code times its run's 6-bit scale is a number of 8 bits, if its sign is turned: -32 * -4 is the one that would not fit.
void q3_k(const uint8_t* block, uint8_t* to) {
    const float d = from_half(block + 108);
    for (int i = 0; i < 256; i++) {
        if (i % 32 == 0) put_half(to + i / 32 * 34, -d);
        const int run = i / 16, low = block[96 + run % 8], high = block[104 + run % 4];
        const int scale = (run < 8 ? low & 15 : low >> 4) | (high >> run / 4 * 2 & 3) << 4;
        const int code = (block[32 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3) - ((block[i % 32] >> i / 32 & 1) ? 0 : 4);
        to[i / 32 * 34 + 2 + i % 32] = (uint8_t)(code * (32 - scale));
    }
}

const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void by_table(const int8_t* table, const uint8_t* codes, uint8_t* to) {
    for (int i = 0; i < 32; i++) to[i] = (uint8_t)table[codes[i % 16] >> i / 16 * 4 & 15];
}

void iq4_nl(const uint8_t* block, uint8_t* to) {
    memcpy(to, block, 2);
    by_table(IQ4, block + 2, to + 2);
}

void iq4_xs(const uint8_t* block, uint8_t* to) {
    const float d = from_half(block);
    for (int run = 0; run < 8; run++, to += 34) {
        const int low = block[4 + run / 2] >> run % 2 * 4 & 15, high = block[2 + run / 4] >> run % 4 * 2 & 3;
        put_half(to, d * ((low | high << 4) - 32));
        by_table(IQ4, block + 8 + 16 * run, to + 2);
    }
}

void mxfp4(const uint8_t* block, uint8_t* to) {
    const uint32_t exponent = block[0];  // of two: less 127, and one less as the table has doubles
    const uint32_t bits = exponent > 1 ? (exponent - 1) << 23 : exponent ? 0x00400000 : 0x00200000;
    float scale;
    memcpy(&scale, &bits, 4);
    put_half(to, scale);
    by_table(FP4, block + 1, to + 2);
}

void q5_1(const uint8_t* block, uint8_t* to) {
    memcpy(to, block, 4);
    for (int i = 0; i < 32; i++) to[4 + i] = (uint8_t)((block[8 + i % 16] >> i / 16 * 4 & 15) | fifth_bit(block + 4, i));
}

void q5_k(const uint8_t* block, uint8_t* to) {
    int scales[8], minima[8];
    k_scales(block + 4, scales, minima);
    const float d = from_half(block), dmin = from_half(block + 2);
    for (int run = 0; run < 8; run++, to += 36) {
        put_half(to, d * scales[run]);
        put_half(to + 2, -(dmin * minima[run]));
        for (int i = 0; i < 32; i++)
            to[4 + i] = (uint8_t)((block[48 + run / 2 * 32 + i] >> run % 2 * 4 & 15) | (block[16 + i] >> run & 1) << 4);
    }
}

void q6_k(const uint8_t* block, uint8_t* to) {
    const float d = from_half(block + 208);
    for (int run = 0; run < 8; run++, to += 36) {
        const uint8_t *low = block + run / 4 * 64 + run % 2 * 32, *high = block + 128 + run / 4 * 32;
        for (int half = 0; half < 2; half++) put_half(to + 2 * half, d * (int8_t)block[192 + 2 * run + half]);
        for (int i = 0; i < 32; i++)
            to[4 + i] = (uint8_t)(((low[i] >> run % 4 / 2 * 4 & 15) | (high[i] >> run % 4 * 2 & 3) << 4) - 32);
    }
}

void q2_k(const uint8_t* block, uint8_t* to) {
    const float d = from_half(block + 80), dmin = from_half(block + 82);
    for (int i = 0; i < 256; i++) {
        const int scale = block[i / 16], code = block[16 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
        put_half(to + 2 * i, d * (scale & 15) * code - dmin * (scale >> 4));
    }
}

}  // namespace

const Conversion* conversion_of(int32_t source) {
    static const Conversion q4_k_ = {SOURCE_Q4_1, 256, 144, 160, q4_k}, q5_0_ = {SOURCE_Q8_0, 32, 22, 34, q5_0},
                            q3_k_ = {SOURCE_Q8_0, 256, 110, 272, q3_k}, iq4_nl_ = {SOURCE_Q8_0, 32, 18, 34, iq4_nl},
                            iq4_xs_ = {SOURCE_Q8_0, 256, 136, 272, iq4_xs}, mxfp4_ = {SOURCE_Q8_0, 32, 17, 34, mxfp4},
                            q5_1_ = {BLOCK_MINIMUM, 32, 24, 36, q5_1}, q5_k_ = {BLOCK_MINIMUM, 256, 176, 288, q5_k},
                            q6_k_ = {BLOCK_HALVES, 256, 210, 288, q6_k}, q2_k_ = {SOURCE_F16, 256, 84, 512, q2_k};
    switch (source) {
        case SOURCE_Q4_K: return &q4_k_;
        case SOURCE_Q5_0: return &q5_0_;
        case SOURCE_Q3_K: return &q3_k_;
        case SOURCE_IQ4_NL: return &iq4_nl_;
        case SOURCE_IQ4_XS: return &iq4_xs_;
        case SOURCE_MXFP4: return &mxfp4_;
        case SOURCE_Q5_1: return &q5_1_;
        case SOURCE_Q5_K: return &q5_k_;
        case SOURCE_Q6_K: return &q6_k_;
        case SOURCE_Q2_K: return &q2_k_;
        default: return nullptr;
    }
}
