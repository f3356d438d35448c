// An engine: the threads and the scratch memory of one worker.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

const Kernels& kernels();  // of the level in use

// Memory that only grows, so that a step allocates nothing once the largest has been seen.
template <class T>
class Buffer {
  public:
    T* get(int64_t count) {
        if (count > capacity_) {
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, (size_t)ceil_div(count * (int64_t)sizeof(T), 64) * 64)));
            capacity_ = memory_ ? count : 0;
            if (!memory_) std::abort();
        }
        return memory_.get();
    }

  private:
    struct Free { void operator()(T* p) const { std::free(p); } };
    std::unique_ptr<T[], Free> memory_;
    int64_t capacity_ = 0;
};

// The inputs of one linear layer for all tokens of a step; rows are filled one by one.
class Inputs {
  public:
    void resize(int64_t tokens, int64_t columns, bool rounded) {
        columns_ = columns;
        groups_ = ceil_div(columns, GROUP);
        is_rounded_ = rounded;
        values_ = value_buffer_.get(tokens * columns);
        if (!rounded) return;
        rounded_ = rounded_buffer_.get(tokens * groups_ * GROUP);
        scales_ = scale_buffer_.get(tokens * groups_);
        sums_ = sum_buffer_.get(tokens * groups_);
        counts_ = count_buffer_.get(tokens * groups_);
    }
    float* row(int64_t token) { return values_ + token * columns_; }
    void round(int64_t token) { round(token, row(token)); }
    void round(int64_t token, const float* x) {
        if (!is_rounded_) return;
        int64_t at = token * groups_;
        kernels().quantise(x, columns_, rounded_ + at * GROUP, scales_ + at, sums_ + at, counts_ + at);
    }
    Activations view() const { return view(values_, columns_); }
    Activations view(const float* values, int64_t ld) const { return {values, ld, rounded_, scales_, sums_, counts_, columns_, groups_}; }

  private:
    Buffer<float> value_buffer_, scale_buffer_, sum_buffer_;
    Buffer<int8_t> rounded_buffer_;
    Buffer<int32_t> count_buffer_;
    float *values_ = nullptr, *scales_ = nullptr, *sums_ = nullptr;
    int8_t* rounded_ = nullptr;
    int32_t* counts_ = nullptr;
    int64_t columns_ = 0, groups_ = 0;
    bool is_rounded_ = false;
};

struct TileTask {  // queries of one row and one key/value head
    int32_t row, kv_head, first_query, num_queries;  // query q is token q / group of the row, head q % group of the kv head
    int32_t first_token;  // of the row, in the step
};

struct OctavoEngine {
    explicit OctavoEngine(int threads) : pool(threads) {}
    Pool pool;
    Inputs hidden, attended, inner, other;
    Buffer<float> residual, qkv, gate_up, joined;
    std::vector<TileTask> tiles;
};

// Whether any part of a linear layer reads 8-bit activations, if they are wanted.
bool reads_rounded(const OctavoLinear& linear, bool wanted);
// x @ weight.T + bias for all tokens.
void multiply(OctavoEngine& engine, const OctavoLinear& linear, const Activations& x, int64_t tokens, float* out, int64_t ldo, bool rounded);
void embed(const OctavoLinear& table, int64_t id, float scale, float* out);
// Tokens that a thread takes at a time in loops over tokens.
inline int64_t token_chunk(const OctavoEngine& engine, int64_t tokens) {
    int64_t chunk = tokens / (4 * engine.pool.threads());
    return chunk > 1 ? chunk : 1;
}

void plan_attention(OctavoEngine& engine, const OctavoCache& cache, const OctavoStep& step);
void attend_all(OctavoEngine& engine, const OctavoCache& cache, const OctavoStep& step, const float* q, int64_t ldq, float* out);
