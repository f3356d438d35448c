// Paged attention: online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) over the blocks of one sequence.
//
// Keys are columns ([head_dim][tokens of the block]), so a vector of scores needs no horizontal sum; values are rows, so the
// weighted sum needs none either. Rescaling happens at absolute multiples of KEY_CHUNK: what a query gets is the same bits
// whether it is decoded alone or computed in a prompt chunk.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vec.h"

namespace LEVEL {

constexpr float MINUS_INFINITY = -__builtin_inff();

INLINE void narrow(float* p, float x) { *p = x; }
INLINE void narrow(uint16_t* p, float x) { *p = to_half(x); }

template <class T>
INLINE void store_token(const OctavoCache& c, int64_t slot, int kv_head, const float* key, const float* value) {
    const int64_t block = slot / c.block_size * c.block_stride, offset = slot % c.block_size;
    T* k = (T*)c.keys + block + (int64_t)kv_head * c.head_dim * c.padded_block + offset;
    T* v = (T*)c.values + block + ((int64_t)kv_head * c.block_size + offset) * c.padded_dim;
    int d = 0;
    for (; d + W <= c.head_dim; d += W) {
        T lanes[W];
        store(lanes, load(key + d));
        for (int i = 0; i < W; i++) k[(d + i) * c.padded_block] = lanes[i];
    }
    for (; d < c.head_dim; d++) narrow(k + d * c.padded_block, key[d]);
    d = 0;
    for (; d + W <= c.head_dim; d += W) store(v + d, load(value + d));
    for (; d < c.head_dim; d++) narrow(v + d, value[d]);
    for (; d < c.padded_dim; d++) narrow(v + d, 0.0f);
}

static void store_key_value(const OctavoCache& c, int64_t slot, int kv_head, const float* key, const float* value) {
    if (c.half) store_token<uint16_t>(c, slot, kv_head, key, value);
    else store_token<float>(c, slot, kv_head, key, value);
}

// Vectors that are summed side by side: as many as keep the multiply-and-add units busy (a sum alone waits for its last addition)
// and registers hold beside the queries.
constexpr int SUMS = W == 16 || W == 4 ? 24 : 12;
template <int NQ>
constexpr int side_by_side() { return SUMS / NQ >= 4 ? 4 : SUMS / NQ >= 2 ? 2 : 1; }

// What is read soon. Blocks lie anywhere in memory, where no hardware prefetcher finds them, and asking for a whole one at once
// fills the queue of misses and stands still: a line or two are asked for beside each step of arithmetic.
template <class T, int V>
struct Soon {
    const T *keys[V], *values[V];  // of the next vectors; of these
    int64_t value_step;            // numbers
    INLINE_MEMBER void ask(int d, int64_t stride) const {
        for (int v = 0; v < V; v++) {
            if (sizeof(T) == 4 || d % 2 == 0) __builtin_prefetch(keys[v] + d * stride, 0, 2);
            if (sizeof(T) == 4 || d % 2 == 1) __builtin_prefetch(values[v] + d * value_step, 0, 2);
        }
    }
};

// Scores of V vectors of keys, each from its place.
template <class T, int NQ, int V>
INLINE void scores_of(const T* const* keys, const Soon<T, V>& soon, int64_t stride, int dim, const float* const* q, float scale, float* scores) {
    vf acc[NQ][V];
    for (int i = 0; i < NQ; i++)
        for (int v = 0; v < V; v++) acc[i][v] = splat(0.0f);
    for (int d = 0; d < dim; d++) {
        soon.ask(d, stride);
        vf k[V];
        for (int v = 0; v < V; v++) k[v] = load(keys[v] + d * stride);
        for (int i = 0; i < NQ; i++) {
            vf b = splat(q[i][d]);
            for (int v = 0; v < V; v++) acc[i][v] = fma(b, k[v], acc[i][v]);
        }
    }
    for (int i = 0; i < NQ; i++)
        for (int v = 0; v < V; v++) store(scores + i * KEY_CHUNK + v * W, acc[i][v] * splat(scale));
}

// Where a head's keys and values are.
template <class T>
struct Blocks {
    const OctavoCache& c;
    const int32_t* table;
    int64_t key_size, value_size;
    const T *first_keys, *first_values;
    explicit INLINE_MEMBER Blocks(const AttentionTile& tile)
        : c(*tile.cache), table(tile.table), key_size((int64_t)c.head_dim * c.padded_block), value_size((int64_t)c.block_size * c.padded_dim),
          first_keys((const T*)c.keys + tile.kv_head * key_size), first_values((const T*)c.values + tile.kv_head * value_size) {}
    INLINE_MEMBER const T* keys(int32_t block) const { return first_keys + table[block] * c.block_stride; }
    INLINE_MEMBER const T* values(int32_t block) const { return first_values + table[block] * c.block_stride; }
};

// The keys that the next tile begins with, asked for line by line beside the last sums of this one.
template <class T>
struct Next {
    static constexpr int64_t LINE = 64 / sizeof(T);
    const T *keys[4], *at = nullptr;
    int64_t lines = 0;          // of a block
    int left = 0, blocks = 0;   // lines of this block, blocks after it
    INLINE_MEMBER Next(const AttentionTile& tile, bool now) {
        const OctavoCache& c = *tile.cache;
        if (!now || !tile.next_table) return;
        const int64_t size = (int64_t)c.head_dim * c.padded_block;
        lines = size / LINE;
        for (int64_t p = tile.next_first; blocks < 4 && p < tile.next_last; p += c.block_size)
            keys[blocks++] = (const T*)c.keys + tile.next_table[p / c.block_size] * c.block_stride + tile.next_kv_head * size;
    }
    INLINE_MEMBER void ask() {
        if (!left) {
            if (!blocks) return;
            at = keys[--blocks];
            left = (int)lines;
        }
        __builtin_prefetch(at, 0, 2);
        at += LINE;
        left--;
    }
};

// Scores of positions [begin, end) of a chunk, of which position p goes to p - chunk. `last`: where the row ends.
template <class T, int NQ>
INLINE void score(const AttentionTile& tile, const Blocks<T>& blocks, int32_t chunk, int32_t begin, int32_t end, int32_t last, float* scores) {
    constexpr int V = side_by_side<NQ>();
    const OctavoCache& c = blocks.c;
    const int block = c.block_size;
    const bool in_place = block % W == 0;
    alignas(64) float spare[NQ * KEY_CHUNK];
    for (int32_t p = begin; p < end;) {
        // Whole vectors from where the first key's vector starts: what is scored beside the keys asked for is dropped, or overwritten
        // by the next block. Where vectors never cross blocks, scores go straight to their place.
        const T *keys[V], *values[V];
        int32_t skip[V], at[V], count[V], n = 0;
        for (; n < V && p < end; n++) {
            const int offset = p % block, from = offset / W * W, left = block - offset < end - p ? block - offset : end - p;
            keys[n] = blocks.keys(p / block) + from;
            values[n] = blocks.values(p / block) + from * c.padded_dim;
            skip[n] = offset - from;
            at[n] = p - chunk;
            count[n] = W - skip[n] < left ? W - skip[n] : left;
            p += count[n];
        }
        float* target = in_place ? scores + at[0] - skip[0] : spare;
        const auto some = [&](auto width, int v) {
            constexpr int N = decltype(width)::value;
            Soon<T, N> soon;
            soon.value_step = (int64_t)(W < block ? W : block) * c.padded_dim / c.head_dim;
            for (int i = 0; i < N; i++) {
                const int32_t ahead = p + (v + i) * W;
                soon.keys[i] = ahead < last ? blocks.keys(ahead / block) + ahead % block / W * W : keys[v + i];
                soon.values[i] = values[v + i];
            }
            scores_of<T, NQ, N>(keys + v, soon, c.padded_block, c.head_dim, tile.queries, c.scale, target + v * W);
        };
        for (int v = 0; v < n;) {
            if (V >= 4 && n - v >= 4) some(std::integral_constant<int, V >= 4 ? 4 : 1>(), v), v += 4;
            else if (V >= 2 && n - v >= 2) some(std::integral_constant<int, V >= 2 ? 2 : 1>(), v), v += 2;
            else some(std::integral_constant<int, 1>(), v), v += 1;
        }
        for (int v = 0; v < n && !in_place; v++)
            for (int i = 0; i < NQ; i++) memcpy(scores + i * KEY_CHUNK + at[v], spare + i * KEY_CHUNK + v * W + skip[v], (size_t)count[v] * 4);
    }
}

// One query's scores of a chunk become weights, of [low, high) in whole vectors. Returns what earlier sums are to be multiplied with.
INLINE float weigh(const OctavoCache& c, float* s, int low, int high, int32_t see_from, int32_t see_to, float& most, float& total) {
    vi place;
    for (int lane = 0; lane < W; lane++) place[lane] = lane;
    vf largest = splat(MINUS_INFINITY);
    for (int at = low; at < high; at += W) {
        vi here = place + splat(at);
        vi seen = (here >= splat(see_from)) & (here < splat(see_to));
        vf v = load(s + at);
        if (c.soft_cap > 0) v = splat(c.soft_cap) * tanh(v / splat(c.soft_cap));
        v = select(seen, v, splat(MINUS_INFINITY));
        store(s + at, v);
        largest = max(largest, v);
    }
    const float chunk_most = reduce_max(largest);
    const float now = most > chunk_most ? most : chunk_most;  // a NaN stays
    if (now == MINUS_INFINITY) {
        for (int at = low; at < high; at += W) store(s + at, splat(0.0f));
        return 1.0f;
    }
    const float factor = exp(splat(most - now))[0];
    vf sum = splat(0.0f);
    for (int at = low; at < high; at += W) {
        vf v = exp(load(s + at) - splat(now));
        store(s + at, v);
        sum += v;
    }
    total = total * factor + reduce_add(sum);
    most = now;
    return factor;
}

// V vectors of the weighted sum of values, of which `dims` are numbers of a head. What they are multiplied with before, and divided
// by in the end, is by query; null: nothing.
template <class T, int NQ, int V>
INLINE void add_values(const Blocks<T>& blocks, int32_t chunk, int32_t begin, int32_t end, const float* scores, const float* factors,
                       const float* divisors, int64_t d, int dims, float* const* outputs, Next<T>& next) {
    const OctavoCache& c = blocks.c;
    const int block = c.block_size;
    vf acc[NQ][V];
    for (int i = 0; i < NQ; i++)
        for (int v = 0; v < V; v++) {
            const float* o = outputs[i] + d + v * W;
            acc[i][v] = factors ? (dims - v * W >= W ? load(o) : load_part(o, dims - v * W)) * splat(factors[i]) : splat(0.0f);
        }
    for (int32_t p = begin; p < end;) {
        const int offset = p % block;
        const int count = block - offset < end - p ? block - offset : end - p;
        const T* values = blocks.values(p / block) + (int64_t)offset * c.padded_dim + d;
        const float* s = scores + p - chunk;
        for (int t = 0; t < count; t++, values += c.padded_dim) {
            next.ask();
            vf x[V];
            for (int v = 0; v < V; v++) x[v] = load(values + v * W);
            for (int i = 0; i < NQ; i++) {
                vf weight = splat(s[i * KEY_CHUNK + t]);
                for (int v = 0; v < V; v++) acc[i][v] = fma(weight, x[v], acc[i][v]);
            }
        }
        p += count;
    }
    for (int i = 0; i < NQ; i++)
        for (int v = 0; v < V; v++) {
            float* o = outputs[i] + d + v * W;
            const vf sum = divisors ? acc[i][v] / splat(divisors[i]) : acc[i][v];
            if (dims - v * W >= W) store(o, sum);
            else store_part(o, sum, dims - v * W);
        }
}

template <class T, int NQ>
static void attend_tile(const AttentionTile& tile) {
    const Blocks<T> blocks(tile);
    const OctavoCache& c = blocks.c;
    int32_t first = tile.first[0], last = tile.last[0];
    for (int i = 1; i < NQ; i++) {
        first = first < tile.first[i] ? first : tile.first[i];
        last = last > tile.last[i] ? last : tile.last[i];
    }
    alignas(64) float scores[NQ * KEY_CHUNK];
    float most[NQ], total[NQ], factor[NQ];
    for (int i = 0; i < NQ; i++) {
        most[i] = MINUS_INFINITY;
        total[i] = 0;
    }
    for (int32_t chunk = first / KEY_CHUNK * KEY_CHUNK; chunk < last; chunk += KEY_CHUNK) {
        const int32_t begin = chunk > first ? chunk : first, end = chunk + KEY_CHUNK < last ? chunk + KEY_CHUNK : last;
        score<T, NQ>(tile, blocks, chunk, begin, end, last, scores);
        const int low = (begin - chunk) / W * W, high = (int)ceil_div(end - chunk, W) * W;
        for (int i = 0; i < NQ; i++)
            factor[i] = weigh(c, scores + i * KEY_CHUNK, low, high, tile.first[i] - chunk, tile.last[i] - chunk, most[i], total[i]);
        Next<T> next(tile, end == last);
        const float *factors = begin == first ? nullptr : factor, *divisors = end == last ? total : nullptr;
        constexpr int V = side_by_side<NQ>();
        for (int64_t d = 0; d < c.head_dim;) {
            const int dims = c.head_dim - (int)d;
            if (V >= 4 && dims > 3 * W) add_values<T, NQ, 4>(blocks, chunk, begin, end, scores, factors, divisors, d, dims, tile.outputs, next), d += 4 * W;
            else if (V >= 2 && dims > W) add_values<T, NQ, 2>(blocks, chunk, begin, end, scores, factors, divisors, d, dims, tile.outputs, next), d += 2 * W;
            else add_values<T, NQ, 1>(blocks, chunk, begin, end, scores, factors, divisors, d, dims, tile.outputs, next), d += W;
        }
    }
}

template <class T>
INLINE void attend_any(const AttentionTile& tile) {
    switch (tile.num_queries) {
        case 1: return attend_tile<T, 1>(tile);
        case 2: return attend_tile<T, 2>(tile);
        case 3: return attend_tile<T, 3>(tile);
        case 4: return attend_tile<T, 4>(tile);
        case 5: return attend_tile<T, 5>(tile);
        default: return attend_tile<T, 6>(tile);
    }
}

static void attend(const AttentionTile& tile) {
    if (tile.cache->half) attend_any<uint16_t>(tile);
    else attend_any<float>(tile);
}

}  // namespace LEVEL
