// An engine: the threads and the scratch memory of one worker.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "pool.h"

const Kernels& kernels();  // of the level in use

// Memory that only grows, so that a step allocates nothing once the largest has been seen. Throws where the system gives no more: only
// ever in the thread that called the library, see unless_out_of_memory.
template <class T>
class Buffer {
  public:
    T* get(int64_t count) {
        if (count > capacity_) {
            capacity_ = 0;
            memory_.reset();
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, (size_t)ceil_div(count * (int64_t)sizeof(T), 64) * 64)));
            if (!memory_) throw std::bad_alloc();
            capacity_ = count;
        }
        return memory_.get();
    }

  private:
    struct Free { void operator()(T* p) const { std::free(p); } };
    std::unique_ptr<T[], Free> memory_;
    int64_t capacity_ = 0;
};

// Runs a call of the C interface: 1, or 0 where there was no memory for it, and the next one may have enough.
template <class Body>
int32_t unless_out_of_memory(const Body& body) {
    try {
        body();
        return 1;
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

// How a linear layer wants its inputs.
struct Reading {
    Rounding rounding;
    bool floats;
};

// The inputs of one linear layer for all tokens of a step. Rows are filled one by one, in any order, each followed by finish().
class Inputs {
  public:
    void resize(int64_t tokens, int64_t columns, Reading reading) {
        reading_ = reading;
        tokens_ = tokens;
        columns_ = columns;
        groups_ = ceil_div(columns, GROUP);
        // A block of tokens has its groups in different sets of a cache: with a stride of 2048 tokens they would all fall on one.
        stride_ = tokens <= TOKEN_BLOCK ? tokens : ceil_div(tokens - TOKEN_BLOCK, 256) * 256 + TOKEN_BLOCK;
        values_ = value_buffer_.get(tokens * columns);
        if (reading.floats) floats_ = float_buffer_.get(groups_ * stride_ * GROUP);
        if (reading.rounding == ROUND_NOT) return;
        rounded_ = rounded_buffer_.get(groups_ * stride_ * GROUP);  // room for 16 bits, or for 8 and the high parts
        high_ = (int8_t*)rounded_ + groups_ * stride_ * GROUP;
        large_ = large_buffer_.get(groups_ * stride_);
        scales_ = scale_buffer_.get(groups_ * stride_);
        sums_ = sum_buffer_.get(groups_ * stride_);
        excess_ = excess_buffer_.get(2 * groups_ * stride_);
        first_excess_ = excess_ + groups_ * stride_;
    }
    float* row(int64_t token) { return values_ + token * columns_; }
    void finish(int64_t token) { finish(token, row(token)); }
    void finish(int64_t token, const float* x) {
        const bool wide = reading_.rounding == ROUND_16;
        void* rounded = wide ? (void*)(rounded_ + token * GROUP) : (void*)((int8_t*)rounded_ + token * GROUP);
        kernels().round_row(reading_.rounding, x, columns_, stride_,
                            {reading_.floats ? floats_ + token * GROUP : nullptr, rounded, high_ + token * GROUP, large_ + token, scales_ + token,
                             sums_ + token, excess_ + token, first_excess_ + token});
    }
    Activations view() const {
        return {reading_.rounding, reading_.floats ? floats_ : nullptr, rounded_, high_,    large_,  scales_, sums_,
                excess_,           first_excess_,                       tokens_,  columns_, groups_, stride_};
    }

  private:
    Buffer<float> value_buffer_, float_buffer_, scale_buffer_, sum_buffer_;
    Buffer<int16_t> rounded_buffer_;
    Buffer<int32_t> excess_buffer_;
    Buffer<uint8_t> large_buffer_;
    float *values_ = nullptr, *floats_ = nullptr, *scales_ = nullptr, *sums_ = nullptr;
    int16_t* rounded_ = nullptr;
    int8_t* high_ = nullptr;
    uint8_t* large_ = nullptr;
    int32_t *excess_ = nullptr, *first_excess_ = nullptr;
    int64_t tokens_ = 0, columns_ = 0, groups_ = 0, stride_ = 0;
    Reading reading_ = {ROUND_NOT, false};
};

struct TileTask {  // queries of one row and one key/value head
    int32_t row, kv_head, first_query, num_queries;  // query q is token q / group of the row, head q % group of the kv head
    int32_t first_token;  // of the row, in the step
};

struct Scratch {
    Inputs hidden, attended, inner, other;
    Buffer<float> residual, qkv, attention, gate_up, joined, final, logits, scaled, group_numbers, chosen;
    Buffer<int64_t> token_ids, positions, cache_slots;
    Buffer<int32_t> wanted;
    std::vector<TileTask> tiles;  // of all tokens
    std::vector<TileTask> last_tiles;  // of those that the last layer computes
};

struct OctavoEngine : Scratch {
    explicit OctavoEngine(int threads) : pool(threads) {}
    Pool pool;
};

// How a linear layer reads its inputs if `wanted` (ACTIVATIONS_*) is how the user wants them read.
Reading reading_of(const OctavoLinear& linear, int32_t wanted);
// x @ weight.T + bias for all tokens.
void multiply(OctavoEngine& engine, const OctavoLinear& linear, const Activations& x, float* out, int64_t ldo);
// The same for inputs that lie `ldx` apart.
void linear(OctavoEngine& engine, const OctavoLinear& weight, const float* x, int64_t ldx, int64_t tokens, float* out, int64_t ldo, int32_t activations);
void embed(const OctavoLinear& table, int64_t id, float scale, float* out);
// Tokens that a thread takes at a time in loops over tokens.
inline int64_t token_chunk(const OctavoEngine& engine, int64_t tokens) {
    int64_t chunk = tokens / (4 * engine.pool.threads());
    return chunk > 1 ? chunk : 1;
}

// The engine's tiles for a step; the same for every layer, as all have the same heads.
void plan_attention(OctavoEngine& engine, const OctavoCache& cache, const OctavoStep& step);
// out [tokens, heads * head_dim]: the rows of the tiles' tokens are filled.
void attend_tiles(OctavoEngine& engine, const std::vector<TileTask>& tiles, const OctavoCache& cache, const OctavoStep& step, const float* q,
                  int64_t ldq, float* out);
// As in the C interface, but they throw.
void forward(OctavoEngine&, const OctavoDecoder&, const OctavoCache* caches, const OctavoStep&, float* hidden);
void make_logits(OctavoEngine&, const OctavoDecoder&, const float* hidden, int64_t rows, float* logits);
void draw_rows(OctavoEngine& engine, const OctavoDraw& draw, int32_t* tokens);
