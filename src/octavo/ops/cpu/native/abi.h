// The C interface of the library: plain structs and functions, called through ctypes. Keep in step with abi.py
// (and the number below with config/device.py).
//
// Conventions: row-major float32 unless said otherwise; a leading dimension is in elements; a null pointer means "not there".
// Nothing here throws, and nothing keeps a pointer after the call except an Engine, which keeps its scratch memory. What takes an
// engine and returns a number returns 0 where there was no memory for the call, and 1 where it has done its work.
#pragma once

#include <cstdint>

#define OCTAVO_ABI 7

enum OctavoKind : int32_t {
    KIND_F32 = 0,
    KIND_F16 = 1,
    KIND_BF16 = 2,
    KIND_Q4 = 3,  // groups of 32: w = scale * q + minimum, q in 0..15
    KIND_Q8 = 4,  // groups of 32: w = scale * (q - 128), q in 0..255
    KIND_Q8_MINIMUM = 5,  // the same, and a minimum for each group: w = scale * (q - 128) + minimum
    KIND_Q8_HALVES = 6,   // the same with two scales a group: 16 columns share one
};

enum OctavoSource : int32_t {  // how a checkpoint stores the rows that are packed
    SOURCE_F32 = 0,
    SOURCE_F16 = 1,
    SOURCE_BF16 = 2,
    SOURCE_Q4_0 = 3,
    SOURCE_Q4_1 = 4,
    SOURCE_Q8_0 = 5,
    SOURCE_Q4_K = 6,  // from here on turned into one of the others first (blocks.cpp)
    SOURCE_Q5_0 = 7,
    SOURCE_Q5_1 = 8,
    SOURCE_Q5_K = 9,
    SOURCE_Q6_K = 10,
    SOURCE_Q3_K = 11,
    SOURCE_Q2_K = 12,
    SOURCE_IQ4_NL = 13,
    SOURCE_IQ4_XS = 14,
    SOURCE_MXFP4 = 15,
};

enum OctavoActivations : int32_t {  // what packed weights are multiplied with
    ACTIVATIONS_FLOAT32 = 0,
    ACTIVATIONS_INT16 = 1,  // rounded in groups of 32 columns
    ACTIVATIONS_INT8 = 2,
};

enum OctavoActivation : int32_t { ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2 };

struct OctavoSegment {  // consecutive rows of one kind
    int32_t kind;
    int32_t rows;
    const void* data;
};

struct OctavoLinear {
    const OctavoSegment* segments;
    const float* bias;  // [out_features]
    int32_t num_segments;
    int32_t out_features;
    int32_t in_features;
    int32_t padding;
};

struct OctavoLayer {
    OctavoLinear qkv, out, gate_up, down;
    const float* attention_norm;  // all [hidden]
    const float* attention_post_norm;
    const float* mlp_norm;
    const float* mlp_post_norm;
    const float* q_norm;  // [head_dim]
    const float* k_norm;
    const float* cos_sin;  // [positions, rotary_dim]
};

struct OctavoDecoder {
    const OctavoLayer* layers;
    OctavoLinear embed, head;
    const float* final_norm;  // [hidden]
    int32_t num_layers, hidden, heads, kv_heads, head_dim, rotary_dim, inner, vocab;
    int32_t activation;
    int32_t activations;
    float norm_eps, embedding_scale, residual_multiplier, logit_scale, logit_soft_cap;
    int32_t padding;
};

struct OctavoCache {  // one layer's attention and where its keys and values are
    void* keys;       // of a block: [kv_heads, head_dim, padded_block]: a key is a column
    void* values;     // of a block: [kv_heads, block_size, padded_dim]: a value is a row
    int64_t block_stride;  // numbers from a block to the next, of keys as of values
    int32_t heads, kv_heads, head_dim, padded_dim, block_size, padded_block;
    int32_t half;     // float16 cache
    int32_t window;   // 0: none
    float scale, soft_cap;
    int32_t sliding;  // 1: of the second kind of cache, with block tables of its own
    int32_t padding;
};

struct OctavoStep {
    const int64_t* token_ids;     // [tokens]
    const int64_t* positions;     // [tokens]
    const int64_t* cache_slots;   // [tokens]
    const int64_t* sliding_slots; // [tokens] in the second kind of cache; null: there is none
    const int32_t* row_start;     // [rows] first position computed
    const int32_t* row_count;     // [rows] tokens computed
    const int32_t* block_tables;  // [rows, table_stride], or [slots, table_stride]
    const int32_t* sliding_tables;  // of the second kind, with the same stride
    const int32_t* row_slots;     // [rows] which block table is whose; null: they come by row
    const int32_t* wanted;        // [num_wanted] ascending: the tokens whose hidden states are wanted; null: all
    int64_t table_stride;
    int32_t num_tokens, num_rows, num_wanted;
    int32_t padding;
};

struct OctavoSlots {  // what is kept of each request between steps, by slot
    int32_t* tokens;       // [slots, tokens_stride] its tokens so far
    int32_t* blocks;       // [slots, blocks_stride] its block table
    const float* numbers;  // [slots, numbers_stride] temperature, top_k, top_p, log(min_p); 1, 0, 1 and -inf are off
    int64_t tokens_stride, blocks_stride, numbers_stride;
    int32_t block_size;
    int32_t sliding_column;  // where the block table of a second kind of cache begins in a row of blocks; 0: there is none
};

struct OctavoPlan {  // a step, as the core plans it
    const int32_t *slots, *start, *count;  // [rows]
    const uint8_t* sample;                 // [rows]
    const int32_t *table_slots, *table_index, *table_blocks;  // [diffs] new entries of block tables
    const int32_t* modes;  // [sampled rows] bits: 1 draws at random (else the likeliest token), 2 has filters
    const int32_t* keys;   // [sampled rows, 2] of the random numbers; null where no row draws
    const uint32_t* masks;     // [masks, mask_words] a bit a token, lowest first: what may come next
    const int32_t* mask_rows;  // [sampled rows] which mask holds for a row, -1 for none; null: no row has one
    int32_t num_rows, num_tokens, num_diffs;
    int32_t mask_words;
};

struct OctavoDraw {  // rows to draw tokens for
    float* logits;  // [rows, stride]; written only where a row has a mask, or its mode says so
    int64_t stride, vocab;
    const int32_t *slots, *modes, *keys;  // as in OctavoPlan; a mode's 4: leave in logits what a random row was drawn from; 8: see octavo_draw
    const float* numbers;  // as in OctavoSlots
    int64_t numbers_stride;
    const uint32_t* masks;  // as in OctavoPlan
    const int32_t* mask_rows;
    const int32_t* places;  // [rows] which row of logits each is; null: in order
    int32_t rows;
    int32_t mask_words;
};

struct OctavoEngine;  // threads and scratch memory; one call at a time

#define EXPORT __attribute__((visibility("default")))

extern "C" {
EXPORT int32_t octavo_abi();
EXPORT int32_t octavo_level();                // the kernels in use: 0 portable, 1 AVX2, 2 AVX-512 VNNI, 3 NEON dot product
EXPORT int32_t octavo_set_level(int32_t);     // 0 if this machine cannot run it
EXPORT OctavoEngine* octavo_engine_new(int32_t threads);  // null if the system does not start so many
EXPORT void octavo_engine_free(OctavoEngine*);
EXPORT void octavo_engine_trim(OctavoEngine*);  // gives its scratch memory back to the system

EXPORT int64_t octavo_packed_bytes(int32_t kind, int64_t rows, int64_t columns);
// Rows as a checkpoint has them -> panels. `order` [rows]: which source row each row comes from.
// Returns 1; 0 where a number, or a scale of numbers, is NaN or infinite, or is that in float16, or loses digits there.
EXPORT int32_t octavo_pack(int32_t source, const void* rows_data, int64_t row_bytes, const int64_t* order, int64_t rows, int64_t columns, void* packed);

EXPORT int32_t octavo_linear(OctavoEngine*, const OctavoLinear*, const float* x, int64_t ldx, int64_t tokens, float* out, int64_t ldo, int32_t activations);
EXPORT void octavo_embedding(const OctavoLinear*, const int64_t* ids, int64_t tokens, float* out);
EXPORT void octavo_rms_norm(const float* x, int64_t ldx, int64_t rows, int64_t dim, const float* weight, float eps, float* out, int64_t ldo);
EXPORT void octavo_rope(float* x, int64_t ldx, int64_t tokens, int64_t heads, int64_t head_dim, const float* cos_sin, int64_t rotary_dim);
EXPORT void octavo_gated_mul(const float* gate_up, int64_t rows, int64_t dim, int32_t activation, float* out);

// Write the step's keys and values into the cache, then attend. q [tokens, heads, head_dim] with row strides, out contiguous.
EXPORT int32_t octavo_attention(OctavoEngine*, const OctavoCache*, const OctavoStep*, const float* q, int64_t ldq, const float* k, int64_t ldk,
                      const float* v, int64_t ldv, float* out);

// The whole forward pass: hidden [wanted, hidden], after the final norm. One OctavoCache a layer.
EXPORT int32_t octavo_forward(OctavoEngine*, const OctavoDecoder*, const OctavoCache*, const OctavoStep*, float* hidden);
// The same in pieces, for attention that is not ours: begin, then for each layer qkv (rotated) and rest; the last rest fills hidden.
EXPORT int32_t octavo_begin(OctavoEngine*, const OctavoDecoder*, const OctavoStep*);
EXPORT int32_t octavo_layer_qkv(OctavoEngine*, const OctavoDecoder*, const OctavoStep*, int32_t layer, float* qkv);
EXPORT int32_t octavo_layer_rest(OctavoEngine*, const OctavoDecoder*, const OctavoStep*, int32_t layer, const float* attended, float* hidden);
// The whole step: block tables, forward pass, logits, tokens. tokens [sampled rows]: also written to their places in the token
// table; -1 (and 0 in the table) where logits were not usable.
EXPORT int32_t octavo_step(OctavoEngine*, const OctavoDecoder*, const OctavoCache*, const OctavoSlots*, const OctavoPlan*, int32_t* tokens);
// A step as far as the logits, [sampled rows, vocab] in the engine's memory until its next call. hidden [tokens, hidden]: where the
// hidden states of all tokens go; null: only those of the sampled rows are wanted.
EXPORT int32_t octavo_step_logits(OctavoEngine*, const OctavoDecoder*, const OctavoCache*, const OctavoSlots*, const OctavoPlan*, float* hidden,
                                  float** logits);
// Temperature, min-p, top-k, top-p and a draw, or the likeliest token. tokens [rows]: -1 where logits were not usable. Rows whose mode has 8:
// the token that would be found too if some others were forbidden, whichever; -1 where that is not certain.
EXPORT int32_t octavo_draw(OctavoEngine*, const OctavoDraw*, int32_t* tokens);
EXPORT int32_t octavo_logits(OctavoEngine*, const OctavoDecoder*, const float* hidden, int64_t rows, float* logits);
}
