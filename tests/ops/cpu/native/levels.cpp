// Every level that the machine runs against double precision, through the C interface and without Python: for machines that are
// emulated, and for sanitizers alone. Prints a line a level; the exit status is the number of checks that failed.
//
//   levels [name of the level that must be the one in use]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "abi.h"

namespace {

const char* const NAMES[] = {"portable", "avx2", "avx512", "neon"};
std::mt19937 source(1);
int failures = 0;
const char* level_name = "";

float normal() { return std::normal_distribution<float>()(source); }
int below(int n) { return (int)(source() % (unsigned)n); }

std::vector<float> normals(size_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = normal();
    return x;
}

void expect(bool good, const std::string& what) {
    if (good) return;
    failures++;
    std::fprintf(stderr, "%s: %s\n", level_name, what.c_str());
}

// IEEE half precision, spelled out: the kernels' own conversions are what is tested.
float from_half(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return (float)(h & 0x8000 ? -magnitude : magnitude);
}
uint16_t random_half() { return (uint16_t)((below(2) << 15) | (8 + below(6)) << 10 | below(1024)); }  // up to 0.25
float from_bf16(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; std::memcpy(&f, &u, 4); return f; }

struct Matrix {  // rows as a checkpoint has them, and what they mean
    int32_t source, kind;
    int64_t rows, columns, row_bytes;
    std::vector<uint8_t> data;
    std::vector<float> values;
};

Matrix random_matrix(int32_t from, int64_t rows, int64_t columns) {
    static const int32_t kinds[] = {KIND_F32, KIND_F16, KIND_BF16, KIND_Q4, KIND_Q4, KIND_Q8};
    static const int64_t block[] = {128, 64, 64, 18, 20, 34};  // bytes of 32 columns
    Matrix m = {from, kinds[from], rows, columns, columns / 32 * block[from], {}, std::vector<float>((size_t)(rows * columns))};
    m.data.resize((size_t)(rows * m.row_bytes));
    for (uint8_t& byte : m.data) byte = (uint8_t)below(256);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < columns / 32; g++) {
            uint8_t* b = m.data.data() + r * m.row_bytes + g * block[from];
            float* out = m.values.data() + r * columns + g * 32;
            const uint16_t scale = random_half(), minimum = random_half();
            for (int k = 0; k < 32; k++) {
                const uint16_t half = random_half(), narrow = (uint16_t)((below(2) << 15) | 0x3e00 | below(512));
                if (from == SOURCE_F32) out[k] = normal(), std::memcpy(b + 4 * k, out + k, 4);
                else if (from == SOURCE_F16) out[k] = from_half(half), std::memcpy(b + 2 * k, &half, 2);
                else if (from == SOURCE_BF16) out[k] = from_bf16(narrow), std::memcpy(b + 2 * k, &narrow, 2);
            }
            if (from < SOURCE_Q4_0) continue;
            std::memcpy(b, &scale, 2);
            if (from == SOURCE_Q4_1) std::memcpy(b + 2, &minimum, 2);
            const uint8_t* q = b + (from == SOURCE_Q4_1 ? 4 : 2);
            for (int k = 0; k < 32; k++) {
                const int nibble = k < 16 ? q[k] & 15 : q[k - 16] >> 4;
                if (from == SOURCE_Q8_0) out[k] = from_half(scale) * (float)(int8_t)q[k];
                else out[k] = from_half(scale) * (float)(from == SOURCE_Q4_0 ? nibble - 8 : nibble) + (from == SOURCE_Q4_1 ? from_half(minimum) : 0);
            }
        }
    return m;
}

// 5-bit codes with a minimum: blocks of 32 columns that become groups of 8 bits with a minimum.
Matrix random_q5_1(int64_t rows, int64_t columns) {
    Matrix m = {SOURCE_Q5_1, KIND_Q8_MINIMUM, rows, columns, columns / 32 * 24, {}, std::vector<float>((size_t)(rows * columns))};
    m.data.resize((size_t)(rows * m.row_bytes));
    for (uint8_t& byte : m.data) byte = (uint8_t)below(256);
    for (int64_t g = 0; g < rows * columns / 32; g++) {
        uint8_t* b = m.data.data() + g * 24;
        const uint16_t scale = random_half(), minimum = random_half();
        std::memcpy(b, &scale, 2), std::memcpy(b + 2, &minimum, 2);
        for (int k = 0; k < 32; k++) {
            const int code = (k < 16 ? b[8 + k] & 15 : b[8 + k - 16] >> 4) | (b[4 + k / 8] >> k % 8 & 1) << 4;
            m.values[(size_t)(32 * g + k)] = from_half(scale) * (float)code + from_half(minimum);
        }
    }
    return m;
}

// 6-bit codes whose runs of 16 have a scale each: blocks of 256 columns that become groups of 8 bits in halves.
Matrix random_q6_k(int64_t rows, int64_t columns) {
    Matrix m = {SOURCE_Q6_K, KIND_Q8_HALVES, rows, columns, columns / 256 * 210, {}, std::vector<float>((size_t)(rows * columns))};
    m.data.resize((size_t)(rows * m.row_bytes));
    for (uint8_t& byte : m.data) byte = (uint8_t)below(256);
    for (int64_t block = 0; block < rows * columns / 256; block++) {
        uint8_t* b = m.data.data() + block * 210;
        const uint16_t scale = 0x1000;  // 2^-11: its products are not rounded
        std::memcpy(b + 208, &scale, 2);
        for (int k = 0; k < 256; k++) {
            const int part = k / 128, run = k / 32 % 4, at = k % 32;
            const int low = b[part * 64 + run % 2 * 32 + at] >> (run < 2 ? 0 : 4) & 15, high = b[128 + part * 32 + at] >> 2 * run & 3;
            m.values[(size_t)(256 * block + k)] = from_half(scale) * (float)(int8_t)b[192 + k / 16] * (float)((low | high << 4) - 32);
        }
    }
    return m;
}

std::vector<uint8_t> packed(const Matrix& m) {
    std::vector<uint8_t> panels((size_t)octavo_packed_bytes(m.kind, m.rows, m.columns));
    octavo_pack(m.source, m.data.data(), m.row_bytes, nullptr, m.rows, m.columns, panels.data());
    return panels;
}

// What rounded activations stand for: the nearest steps of each 32 numbers, of which the largest is 32767 steps in 16 bits. In 8 bits it
// is 127, but for fours beyond 12 times the row's mean size, which have up to 128 times as many.
std::vector<double> rounded(const std::vector<float>& x, int64_t columns, int32_t activations) {
    std::vector<double> out(x.begin(), x.end());
    const bool narrow = activations == ACTIVATIONS_INT8;
    const float most = narrow ? 127 : 32767;
    for (size_t row = 0; row < x.size(); row += (size_t)columns) {
        double size = 0;
        for (size_t i = row; i < row + (size_t)columns; i++) size += std::fabs(x[i]);
        for (size_t g = row; g < row + (size_t)columns; g += 32) {
            float base = 0, peak = 0;
            for (size_t four = g; four < g + 32; four += 4) {
                float largest = 0;
                for (size_t i = four; i < four + 4; i++) largest = std::max(largest, std::fabs(x[i]));
                peak = std::max(peak, largest);
                if (!narrow || largest <= 12 * size / (double)columns) base = std::max(base, largest);
            }
            if (narrow) base = std::max(base, peak / 128);
            for (size_t i = g; i < g + 32; i++) out[i] = base ? std::nearbyint(x[i] * (most / base)) * (base / most) : 0;
        }
    }
    return out;
}

void check_linear(OctavoEngine* engine, int round) {
    const int32_t from = round % 8, activations = round / 8 % 3;
    static const int64_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33, 100};
    const int64_t rows = 1 + below(70), columns = from == 7 ? 256 : 32 * (1 + below(6)), tokens = counts[below(12)];
    const Matrix m = from == 6 ? random_q5_1(rows, columns) : from == 7 ? random_q6_k(rows, columns) : random_matrix(from, rows, columns);
    const std::vector<uint8_t> panels = packed(m);
    const OctavoSegment segment = {m.kind, (int32_t)rows, panels.data()};
    const std::vector<float> bias = normals((size_t)rows);
    std::vector<float> x = normals((size_t)(tokens * columns));
    for (int i = below(3) * below(20); i > 0; i--) x[(size_t)below((int)x.size())] *= std::exp(6.0f * (float)below(100) / 100);
    const OctavoLinear linear = {&segment, below(2) ? bias.data() : nullptr, 1, (int32_t)rows, (int32_t)columns, 0};
    std::vector<float> out((size_t)(tokens * rows)), alone(out);
    octavo_linear(engine, &linear, x.data(), columns, tokens, out.data(), rows, activations);
    for (int64_t t = 0; t < tokens; t++) octavo_linear(engine, &linear, x.data() + t * columns, columns, 1, alone.data() + t * rows, rows, activations);
    const std::string name = "linear of source " + std::to_string(from) + ", activations " + std::to_string(activations) + ", " +
                             std::to_string(rows) + " x " + std::to_string(columns) + ", " + std::to_string(tokens) + " tokens";
    expect(!std::memcmp(out.data(), alone.data(), out.size() * 4), name + ": other bits in a batch");
    const bool blocks = from >= SOURCE_Q4_0;
    const std::vector<double> seen = blocks && activations ? rounded(x, columns, activations) : std::vector<double>(x.begin(), x.end());
    double worst = 0;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            double sum = linear.bias ? bias[(size_t)r] : 0;
            for (int64_t k = 0; k < columns; k++) sum += seen[(size_t)(t * columns + k)] * m.values[(size_t)(r * columns + k)];
            worst = std::max(worst, std::fabs(sum - out[(size_t)(t * rows + r)]));
        }
    float largest = 1;
    for (float v : x) largest = std::max(largest, std::fabs(v) / 4);
    expect(worst < 1e-4 * largest * std::sqrt((double)columns), name + ": off by " + std::to_string(worst));

    const int64_t id = below((int)rows);
    std::vector<float> row((size_t)columns);
    octavo_embedding(&linear, &id, 1, row.data());
    for (int64_t k = 0; k < columns; k++) expect(std::fabs(row[(size_t)k] - m.values[(size_t)(id * columns + k)]) < 1e-5f, name + ": embedding");
}

void check_rows() {
    const int64_t dim = 2 * (1 + below(60));
    const std::vector<float> x = normals((size_t)dim), weight = normals((size_t)dim), gate_up = normals((size_t)(2 * dim));
    std::vector<float> out((size_t)dim), turned = x;
    octavo_rms_norm(x.data(), dim, 1, dim, weight.data(), 1e-5f, out.data(), dim);
    double squares = 0;
    for (float v : x) squares += (double)v * v;
    for (int64_t i = 0; i < dim; i++)
        expect(std::fabs(out[(size_t)i] - x[(size_t)i] / std::sqrt(squares / (double)dim + 1e-5) * weight[(size_t)i]) < 1e-5, "norm");
    octavo_rope(turned.data(), dim, 1, 1, dim, weight.data(), dim);
    for (int64_t i = 0; i < dim / 2; i++) {
        const double a = x[(size_t)i], b = x[(size_t)(i + dim / 2)], c = weight[(size_t)i], s = weight[(size_t)(i + dim / 2)];
        expect(std::fabs(turned[(size_t)i] - (a * c - b * s)) < 1e-5 && std::fabs(turned[(size_t)(i + dim / 2)] - (b * c + a * s)) < 1e-5, "rotation");
    }
    for (int32_t activation = 0; activation < 3; activation++) {
        octavo_gated_mul(gate_up.data(), 1, dim, activation, out.data());
        for (int64_t i = 0; i < dim; i++) {
            const double g = gate_up[(size_t)i], up = gate_up[(size_t)(dim + i)];
            const double value = activation == ACT_SILU   ? g / (1 + std::exp(-g))
                                 : activation == ACT_GELU ? 0.5 * g * (1 + std::erf(g / std::sqrt(2.0)))
                                                          : 0.5 * g * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)));
            expect(std::fabs(out[(size_t)i] - value * up) < 5e-6, "gated activation " + std::to_string(activation));
        }
    }
}

// One row whose context is computed in one step and in single tokens: the same bits, and near the sum in double precision.
void check_attention(OctavoEngine* engine) {
    static const int dims[] = {3, 8, 16, 40, 64}, block_sizes[] = {1, 4, 16, 17, 32};
    OctavoCache cache = {};
    cache.kv_heads = 1 + below(3);
    const int group = 1 + below(7), dim = dims[below(5)], tokens = 1 + below(90), block = block_sizes[below(5)];
    cache.heads = cache.kv_heads * group;
    cache.head_dim = dim;
    cache.block_size = block;
    cache.padded_dim = (dim + 15) / 16 * 16;
    cache.padded_block = (block + 15) / 16 * 16;
    cache.half = below(2);
    cache.window = below(2) ? 0 : 1 + below(40);
    cache.sliding = below(2);  // which of the step's tables are its
    cache.scale = 1 / std::sqrt((float)dim);
    cache.soft_cap = below(3) ? 0.0f : 2.0f;
    const int blocks = (tokens + block - 1) / block;
    const size_t size = cache.half ? 2 : 4, keys = (size_t)(cache.kv_heads * dim * cache.padded_block);
    cache.block_stride = (int64_t)keys + cache.kv_heads * block * cache.padded_dim;
    std::vector<uint8_t> memory((size_t)(blocks + 1) * (size_t)cache.block_stride * size, 0xff);  // NaN
    cache.keys = memory.data();
    cache.values = memory.data() + keys * size;
    std::vector<int32_t> table((size_t)blocks);
    for (int b = 0; b < blocks; b++) table[(size_t)b] = b + 1;
    std::shuffle(table.begin(), table.end(), source);
    std::vector<int64_t> places((size_t)tokens);
    for (int t = 0; t < tokens; t++) places[(size_t)t] = (int64_t)table[(size_t)(t / block)] * block + t % block;
    const int64_t width = (int64_t)cache.heads * dim, kv_width = (int64_t)cache.kv_heads * dim;
    const std::vector<float> q = normals((size_t)(tokens * width)), k = normals((size_t)(tokens * kv_width)), v = normals((size_t)(tokens * kv_width));
    std::vector<float> alone((size_t)(tokens * width)), together(alone);
    const auto attend = [&](int32_t start, int32_t count, std::vector<float>& out) {
        OctavoStep step = {};
        (cache.sliding ? step.sliding_slots : step.cache_slots) = places.data() + start;
        step.row_start = &start;
        step.row_count = &count;
        (cache.sliding ? step.sliding_tables : step.block_tables) = table.data();
        step.table_stride = blocks;
        step.num_tokens = count;
        step.num_rows = 1;
        octavo_attention(engine, &cache, &step, q.data() + start * width, width, k.data() + start * kv_width, kv_width, v.data() + start * kv_width,
                         kv_width, out.data() + start * width);
    };
    for (int t = 0; t < tokens; t++) attend(t, 1, alone);
    attend(0, tokens, together);
    expect(!std::memcmp(alone.data(), together.data(), alone.size() * 4), "attention: other bits in a chunk");
    double worst = 0;
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < cache.heads; h++) {
            const float* query = q.data() + t * width + h * dim;
            const int from = cache.window && t + 1 > cache.window ? t + 1 - cache.window : 0;
            std::vector<double> weights, sum((size_t)dim);
            double total = 0;
            for (int s = from; s <= t; s++) {
                double score = 0;
                for (int d = 0; d < dim; d++) score += (double)query[d] * k[(size_t)(s * kv_width + h / group * dim + d)];
                score *= cache.scale;
                if (cache.soft_cap > 0) score = cache.soft_cap * std::tanh(score / cache.soft_cap);
                total += std::exp(score);
                for (int d = 0; d < dim; d++) sum[(size_t)d] += std::exp(score) * v[(size_t)(s * kv_width + h / group * dim + d)];
            }
            for (int d = 0; d < dim; d++) worst = std::max(worst, std::fabs(sum[(size_t)d] / total - together[(size_t)(t * width + h * dim + d)]));
        }
    expect(worst < (cache.half ? 6e-3 : 2e-5), "attention off by " + std::to_string(worst));
}

void check_draw(OctavoEngine* engine) {
    const int64_t vocab = 1 + below(3000);
    std::vector<float> logits = normals((size_t)vocab);
    const float numbers[] = {1.0f, 1.0f, 1.0f, -HUGE_VALF};  // top-k of one: the likeliest, whatever is drawn
    const int32_t slots[] = {0, 0}, modes[] = {0, 3}, keys[] = {0, 0, below(1 << 30), below(1 << 30)};
    for (int row = 0; row < 2; row++) {
        int32_t token = -2;
        const OctavoDraw draw = {logits.data(), vocab, vocab, slots + row, modes + row, keys + 2 * row, numbers, 4, nullptr, nullptr, nullptr, 1, 0};
        octavo_draw(engine, &draw, &token);
        expect(token == std::max_element(logits.begin(), logits.end()) - logits.begin(), "draw " + std::to_string(row));
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string used = NAMES[octavo_level()];
    std::printf("in use: %s\n", used.c_str());
    if (argc > 1) expect(used == argv[1], used + " is in use instead of " + argv[1]);
    for (int32_t level = 0; level < 4; level++) {
        if (!octavo_set_level(level)) continue;
        level_name = NAMES[level];
        OctavoEngine* engine = octavo_engine_new(3);
        const int before = failures;
        for (int round = 0; round < 180; round++) check_linear(engine, round);
        for (int round = 0; round < 60; round++) check_rows();
        for (int round = 0; round < 60; round++) check_attention(engine);
        for (int round = 0; round < 40; round++) check_draw(engine);
        octavo_engine_free(engine);
        std::printf("%s: %s\n", level_name, failures == before ? "good" : "FAILED");
    }
    return failures > 100 ? 100 : failures;
}
