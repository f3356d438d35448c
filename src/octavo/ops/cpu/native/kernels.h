// What each instruction-set level provides: single-threaded functions over rows, panels and tiles.
//
// Rule for all of them: what a token gets never depends on which tokens are computed beside it. Every kernel does the same
// arithmetic in the same order for one token as for many.
#pragma once

#include <cstdint>

#include "abi.h"

constexpr int PANEL = 16;        // weight rows side by side
constexpr int GROUP = 32;        // columns that share a scale
constexpr int TOKEN_BLOCK = 96;  // most tokens of a panel call: what the caches of a core hold beside a panel
constexpr int MAX_QUERIES = 6;   // queries of one attention tile: what registers hold
constexpr int KEY_CHUNK = 256;   // keys between two rescalings of the online softmax, aligned to multiples of itself
constexpr int DRAW_GROUP = 256;  // vocabulary entries drawn among at once: part of what a seed means

// Groups of the packed kinds.
template <int32_t KIND>
struct Layout {
    static constexpr bool Q4 = KIND == KIND_Q4, MINIMA = KIND == KIND_Q4 || KIND == KIND_Q8_MINIMUM;
    static constexpr int PARTS = KIND == KIND_Q8_HALVES ? 2 : 1;  // runs of columns with a scale each
    static constexpr int SCALES = PANEL * GROUP / (Q4 ? 2 : 1);   // where they begin; behind them are minima, or those of the second part
    static constexpr int BYTES = SCALES + (MINIMA || PARTS == 2 ? 2 : 1) * PANEL * 2;
};

inline bool is_packed(int32_t kind) { return kind >= KIND_Q4; }
inline int group_bytes(int32_t kind) {
    switch (kind) {
        case KIND_Q4: return Layout<KIND_Q4>::BYTES;
        case KIND_Q8: return Layout<KIND_Q8>::BYTES;
        default: return Layout<KIND_Q8_MINIMUM>::BYTES;  // and of halves
    }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a linear layer reads its inputs. Panels of float kinds read floats in any case.
enum Rounding : int32_t { ROUND_NOT = 0, ROUND_16 = 1, ROUND_8 = 2 };

// ROUND_8 by itself would spend its bits on the largest of 32 numbers, and in a transformer a few are 10 to 100 times as large as the
// others. So a four of columns with a number beyond LARGE times the row's mean size is left out where a group's step is chosen, and
// has 15 bits: 128 * high + low, of which products take the high part only where there is one. What is large depends on the row alone.
constexpr float LARGE = 12.0f;
constexpr int HIGH_BITS = 7;

// Inputs of a linear layer, group by group: 32 columns of all tokens lie together, so that tokens computed side by side are read
// from consecutive cache lines. The last group is filled up with zeros.
struct Activations {
    Rounding rounding;
    const float* floats;  // [groups, stride, 32]; null where only rounded ones are read
    const void* rounded;  // [groups, stride, 32] int16 or int8
    const int8_t* high;     // [groups, stride, 32] of ROUND_8: what is above the low 7 bits of large numbers, 0 of others
    const uint8_t* large;   // [groups, stride] which fours of columns have a high part, a bit each, the first one lowest
    const float* scales;    // [groups, stride]
    const float* sums;      // [groups, stride] scale * sum of rounded
    const int32_t* excess;  // [groups, stride] -128 * sum of rounded: what takes the 128 off unsigned weights
    const int32_t* first_excess;  // [groups, stride] the same of a group's first 16 columns
    int64_t tokens, columns, groups;
    int64_t stride;  // at least the tokens
};

// One token's row of Activations, to be filled: where its first group goes. Arrays as there; floats may be null.
struct RowTarget {
    float* floats;
    void* rounded;
    int8_t* high;
    uint8_t* large;
    float *scales, *sums;
    int32_t *excess, *first_excess;
};

struct AttentionTile {
    const OctavoCache* cache;
    const int32_t* table;  // the row's blocks
    int kv_head;
    int num_queries;
    const float* queries[MAX_QUERIES];
    float* outputs[MAX_QUERIES];
    int32_t first[MAX_QUERIES];  // visible positions [first, last)
    int32_t last[MAX_QUERIES];
    const int32_t* next_table;  // what this thread attends to next, likely: its keys are asked for early; null: nothing
    int32_t next_first, next_last;
    int next_kv_head;
};

struct Kernels {
    // One panel times tokens [begin, end), at most TOKEN_BLOCK: out[token * ldo + lane] for `lanes` rows.
    void (*panel)(int32_t kind, const uint8_t* panel, const Activations&, int64_t begin, int64_t end, float* out, int64_t ldo,
                  const float* bias, int lanes);
    void (*embed_row)(int32_t kind, const uint8_t* panel, int lane, int64_t columns, float scale, float* out);
    void (*round_row)(Rounding, const float* x, int64_t columns, int64_t stride, const RowTarget&);  // groups are `stride` groups apart
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t dim, float* out);
    void (*add)(const float* x, float factor, int64_t dim, float* residual);  // residual += factor * x
    void (*rope)(float* head, const float* cos_sin, int64_t rotary_dim);
    void (*gated_mul)(const float* gate, const float* up, int64_t dim, int32_t activation, float* out);
    void (*store_key_value)(const OctavoCache&, int64_t slot, int kv_head, const float* key, const float* value);
    void (*attend)(const AttentionTile&);
    // Logits over a temperature (`scaled` may be null), the maximum of each 256 of them; false if one is NaN or +inf.
    bool (*scale_logits)(const float* logits, int64_t count, float temperature, float* scaled, float* maxima);
    // Sum of exp(x - most) over what is at least `cut`, for each 256.
    void (*exp_sums)(const float* x, int64_t count, float cut, float most, float* sums);
    void (*finish_logits)(float* logits, int64_t count, float scale, float soft_cap);
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();     // null where not compiled for this architecture
const Kernels* kernels_avx512();
const Kernels* kernels_neon();
