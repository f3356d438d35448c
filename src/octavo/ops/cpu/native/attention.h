// Paged attention: online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) over the blocks of one sequence.
//
// Keys are columns ([head_dim][tokens of the block]), so a vector of scores needs no horizontal sum; values are rows, so the
// weighted sum needs none either. Rescaling happens at absolute multiples of KEY_CHUNK: what a query gets is the same bits
// whether it is decoded alone or computed in a prompt chunk.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace LEVEL {

constexpr float MINUS_INFINITY = -__builtin_inff();

INLINE void narrow(float* p, float x) { *p = x; }
INLINE void narrow(uint16_t* p, float x) { *p = to_half(x); }

template <class T>
INLINE void store_token(const OctavoCache& c, int64_t slot, int kv_head, const float* key, const float* value) {
    int64_t head = slot / c.block_size * c.kv_heads + kv_head, offset = slot % c.block_size;
    T* k = (T*)c.keys + head * c.head_dim * c.padded_block + offset;
    T* v = (T*)c.values + (head * c.block_size + offset) * c.padded_dim;
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

// Scores of V vectors of keys, which lie side by side.
template <class T, int NQ, int V>
INLINE void scores_of(const T* keys, int64_t stride, int dim, const float* const* q, float scale, float* scores) {
    vf acc[NQ][V];
    for (int i = 0; i < NQ; i++)
        for (int v = 0; v < V; v++) acc[i][v] = splat(0.0f);
    for (int d = 0; d < dim; d++) {
        vf k[V];
        for (int v = 0; v < V; v++) k[v] = load(keys + d * stride + v * W);
        for (int i = 0; i < NQ; i++) {
            vf b = splat(q[i][d]);
            for (int v = 0; v < V; v++) acc[i][v] = fma(b, k[v], acc[i][v]);
        }
    }
    for (int i = 0; i < NQ; i++)
        for (int v = 0; v < V; v++) store(scores + i * KEY_CHUNK + v * W, acc[i][v] * splat(scale));
}

// Blocks lie anywhere in memory, where no hardware prefetcher finds them.
INLINE void prefetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

template <class T, int NQ>
static void attend_tile(const AttentionTile& tile) {
    const OctavoCache& c = *tile.cache;
    const int block = c.block_size;
    const int64_t key_bytes = (int64_t)c.head_dim * c.padded_block, value_bytes = (int64_t)block * c.padded_dim;
    int32_t first = tile.first[0], last = tile.last[0];
    for (int i = 1; i < NQ; i++) {
        first = first < tile.first[i] ? first : tile.first[i];
        last = last > tile.last[i] ? last : tile.last[i];
    }
    alignas(64) float scores[NQ * KEY_CHUNK];
    alignas(64) float spare[NQ * KEY_CHUNK];  // scores of a block before they are put in place
    float most[NQ], total[NQ];
    for (int i = 0; i < NQ; i++) {
        most[i] = MINUS_INFINITY;
        total[i] = 0;
        memset(tile.outputs[i], 0, (size_t)c.head_dim * 4);
    }
    for (int32_t chunk = first / KEY_CHUNK * KEY_CHUNK; chunk < last; chunk += KEY_CHUNK) {
        const int32_t begin = chunk > first ? chunk : first, end = chunk + KEY_CHUNK < last ? chunk + KEY_CHUNK : last;
        for (int32_t p = begin; p < end;) {
            const int offset = p % block;
            const int count = block - offset < end - p ? block - offset : end - p;
            const T* keys = (const T*)c.keys + ((int64_t)tile.table[p / block] * c.kv_heads + tile.kv_head) * key_bytes;
            const T* values = (const T*)c.values + ((int64_t)tile.table[p / block] * c.kv_heads + tile.kv_head) * value_bytes;
            prefetch(values, value_bytes * (int64_t)sizeof(T));
            if (p + count < last)
                prefetch((const T*)c.keys + ((int64_t)tile.table[p / block + 1] * c.kv_heads + tile.kv_head) * key_bytes, key_bytes * (int64_t)sizeof(T));
            // Whole vectors from where the first key's vector starts: what is scored beside the keys asked for is dropped or
            // overwritten by the next block. Where lanes line up, scores go straight to their place.
            const int from = offset / W * W;
            const bool aligned = offset == from && (p - chunk) % W == 0;
            float* target = aligned ? scores + (p - chunk) : spare;
            for (int lane = from; lane < offset + count; lane += 2 * W) {
                if (lane + W < offset + count)
                    scores_of<T, NQ, 2>(keys + lane, c.padded_block, c.head_dim, tile.queries, c.scale, target + lane - from);
                else
                    scores_of<T, NQ, 1>(keys + lane, c.padded_block, c.head_dim, tile.queries, c.scale, target + lane - from);
            }
            for (int i = 0; i < NQ && !aligned; i++)
                memcpy(scores + i * KEY_CHUNK + p - chunk, spare + i * KEY_CHUNK + offset - from, (size_t)count * 4);
            p += count;
        }
        const int low = (begin - chunk) / W * W, high = (int)ceil_div(end - chunk, W) * W;
        float factor[NQ];
        for (int i = 0; i < NQ; i++) {
            float* s = scores + i * KEY_CHUNK;
            const int32_t see_from = tile.first[i] - chunk, see_to = tile.last[i] - chunk;
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
            const float now = most[i] > chunk_most ? most[i] : chunk_most;  // a NaN stays
            if (now == MINUS_INFINITY) {
                for (int at = low; at < high; at += W) store(s + at, splat(0.0f));
                factor[i] = 1.0f;
                continue;
            }
            alignas(64) float scaled[W];
            store(scaled, exp(splat(most[i] - now)));
            factor[i] = scaled[0];
            vf sum = splat(0.0f);
            for (int at = low; at < high; at += W) {
                vf v = exp(load(s + at) - splat(now));
                store(s + at, v);
                sum += v;
            }
            total[i] = total[i] * factor[i] + reduce_add(sum);
            most[i] = now;
        }
        for (int d = 0; d < c.head_dim; d += 2 * W) {
            const bool wide = d + W < c.head_dim;
            vf acc[NQ][2];
            for (int i = 0; i < NQ; i++) {
                float* o = tile.outputs[i] + d;
                if (d + 2 * W <= c.head_dim) {
                    acc[i][0] = load(o) * splat(factor[i]);
                    acc[i][1] = load(o + W) * splat(factor[i]);
                } else {
                    float lanes[2 * W] = {};
                    memcpy(lanes, o, (size_t)(c.head_dim - d) * 4);
                    acc[i][0] = load(lanes) * splat(factor[i]);
                    acc[i][1] = load(lanes + W) * splat(factor[i]);
                }
            }
            for (int32_t p = begin; p < end;) {
                const int offset = p % block;
                const int count = block - offset < end - p ? block - offset : end - p;
                const T* values = (const T*)c.values + ((int64_t)tile.table[p / block] * c.kv_heads + tile.kv_head) * value_bytes
                                  + (int64_t)offset * c.padded_dim + d;
                const float* s = scores + p - chunk;
                if (wide) {
                    for (int t = 0; t < count; t++, values += c.padded_dim) {
                        vf a = load(values), b = load(values + W);
                        for (int i = 0; i < NQ; i++) {
                            vf weight = splat(s[i * KEY_CHUNK + t]);
                            acc[i][0] = fma(weight, a, acc[i][0]);
                            acc[i][1] = fma(weight, b, acc[i][1]);
                        }
                    }
                } else {
                    for (int t = 0; t < count; t++, values += c.padded_dim) {
                        vf a = load(values);
                        for (int i = 0; i < NQ; i++) acc[i][0] = fma(splat(s[i * KEY_CHUNK + t]), a, acc[i][0]);
                    }
                }
                p += count;
            }
            for (int i = 0; i < NQ; i++) {
                float* o = tile.outputs[i] + d;
                if (d + 2 * W <= c.head_dim) {
                    store(o, acc[i][0]);
                    store(o + W, acc[i][1]);
                } else {
                    float lanes[2 * W];
                    store(lanes, acc[i][0]);
                    store(lanes + W, acc[i][1]);
                    memcpy(o, lanes, (size_t)(c.head_dim - d) * 4);
                }
            }
        }
    }
    for (int i = 0; i < NQ; i++)
        for (int d = 0; d < c.head_dim; d++) tile.outputs[i][d] /= total[i];
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
