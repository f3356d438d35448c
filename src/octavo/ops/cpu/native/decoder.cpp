// The forward pass of a decoder-only transformer, layer by layer, from weights and a step that the caller describes.
#include <cstring>

#include "engine.h"

namespace {

Reading reads(const OctavoDecoder& d, const OctavoLinear& linear) { return reading_of(linear, d.activations); }

void norm_or_copy(const OctavoDecoder& d, const float* residual, const float* norm, float* out) {
    if (norm) kernels().rms_norm(residual, norm, d.norm_eps, d.hidden, out);
    else memcpy(out, residual, (size_t)d.hidden * 4);
}

// Add a block's output to the residual stream, and make what the next block reads, in `hidden` if that is not null.
void join(OctavoEngine& e, const OctavoDecoder& d, int64_t tokens, const float* post_norm, const float* next_norm, Reading next, float* hidden) {
    float* residual = e.residual.get(tokens * d.hidden);
    float* block = e.joined.get(tokens * d.hidden);
    e.hidden.resize(tokens, d.hidden, next);
    e.pool.run(tokens, token_chunk(e, tokens), [&](int64_t t) {
        float *x = block + t * d.hidden, *stream = residual + t * d.hidden;
        if (post_norm) kernels().rms_norm(x, post_norm, d.norm_eps, d.hidden, x);
        kernels().add(x, d.residual_multiplier, d.hidden, stream);
        norm_or_copy(d, stream, next_norm, hidden ? hidden + t * d.hidden : e.hidden.row(t));
        if (!hidden) e.hidden.finish(t);
    });
}

// Norm of the heads and rotation of one token's q and k, in place.
void rotate(const OctavoDecoder& d, const OctavoLayer& l, int64_t position, float* qkv) {
    for (int h = 0; h < d.heads + d.kv_heads; h++) {
        float* head = qkv + (int64_t)h * d.head_dim;
        if (const float* norm = h < d.heads ? l.q_norm : l.k_norm) kernels().rms_norm(head, norm, d.norm_eps, d.head_dim, head);
        kernels().rope(head, l.cos_sin + position * d.rotary_dim, d.rotary_dim);
    }
}

int64_t qkv_width(const OctavoDecoder& d) { return (int64_t)(d.heads + 2 * d.kv_heads) * d.head_dim; }

// What follows attention. attended: [tokens, heads * head_dim], whose row of token t is `rows[t]`, or t where `rows` is null.
void rest(OctavoEngine& e, const OctavoDecoder& d, int64_t tokens, int32_t layer, const float* attended, const int32_t* rows, float* hidden) {
    const OctavoLayer& l = d.layers[layer];
    const int64_t width = (int64_t)d.heads * d.head_dim;
    e.attended.resize(tokens, width, reads(d, l.out));
    e.pool.run(tokens, token_chunk(e, tokens), [&](int64_t t) { e.attended.finish(t, attended + (rows ? rows[t] : t) * width); });
    float* block = e.joined.get(tokens * d.hidden);
    multiply(e, l.out, e.attended.view(), block, d.hidden);
    join(e, d, tokens, l.attention_post_norm, l.mlp_norm, reads(d, l.gate_up), nullptr);

    float* gate_up = e.gate_up.get(tokens * 2 * d.inner);
    multiply(e, l.gate_up, e.hidden.view(), gate_up, 2 * d.inner);
    e.inner.resize(tokens, d.inner, reads(d, l.down));
    e.pool.run(tokens, token_chunk(e, tokens), [&](int64_t t) {
        const float* gate = gate_up + t * 2 * d.inner;
        kernels().gated_mul(gate, gate + d.inner, d.inner, d.activation, e.inner.row(t));
        e.inner.finish(t);
    });
    multiply(e, l.down, e.inner.view(), block, d.hidden);
    const bool last = layer + 1 == d.num_layers;
    const OctavoLayer& next = d.layers[last ? layer : layer + 1];
    join(e, d, tokens, l.mlp_post_norm, last ? d.final_norm : next.attention_norm, reads(d, next.qkv), last ? hidden : nullptr);
}

void begin(OctavoEngine& e, const OctavoDecoder& d, const OctavoStep& step) {
    const int64_t tokens = step.num_tokens;
    float* residual = e.residual.get(tokens * d.hidden);
    e.hidden.resize(tokens, d.hidden, reads(d, d.layers[0].qkv));
    e.pool.run(tokens, token_chunk(e, tokens), [&](int64_t t) {
        embed(d.embed, step.token_ids[t], d.embedding_scale, residual + t * d.hidden);
        norm_or_copy(d, residual + t * d.hidden, d.layers[0].attention_norm, e.hidden.row(t));
        e.hidden.finish(t);
    });
}

// From here on only the residual streams of these tokens go on: they move to the front.
void keep_rows(OctavoEngine& e, const OctavoDecoder& d, const int32_t* rows, int64_t count) {
    float* residual = e.residual.get(0);
    for (int64_t i = 0; i < count; i++)
        if (rows[i] != i) memcpy(residual + i * d.hidden, residual + rows[i] * d.hidden, (size_t)d.hidden * 4);
}

}  // namespace

void forward(OctavoEngine& e, const OctavoDecoder& d, const OctavoCache* caches, const OctavoStep& step, float* hidden) {
    const int64_t tokens = step.num_tokens, width = qkv_width(d);
    begin(e, d, step);
    plan_attention(e, caches[0], step);
    float* attended = e.attention.get(tokens * d.heads * d.head_dim);
    for (int32_t layer = 0; layer < d.num_layers; layer++) {
        const OctavoLayer& l = d.layers[layer];
        const OctavoCache& cache = caches[layer];
        const int64_t* places = cache.sliding ? step.sliding_slots : step.cache_slots;
        float* qkv = e.qkv.get(tokens * width);
        multiply(e, l.qkv, e.hidden.view(), qkv, width);
        e.pool.run(tokens, token_chunk(e, tokens), [&](int64_t t) {
            float* row = qkv + t * width;
            rotate(d, l, step.positions[t], row);
            const float* keys = row + (int64_t)d.heads * d.head_dim;
            for (int h = 0; h < d.kv_heads; h++)
                kernels().store_key_value(cache, places[t], h, keys + h * d.head_dim, keys + (d.kv_heads + h) * d.head_dim);
        });
        const bool choose = step.wanted && layer + 1 == d.num_layers;
        attend_tiles(e, choose ? e.last_tiles : e.tiles, cache, step, qkv, width, attended);
        if (choose) keep_rows(e, d, step.wanted, step.num_wanted);
        rest(e, d, choose ? step.num_wanted : tokens, layer, attended, choose ? step.wanted : nullptr, hidden);
    }
}

void make_logits(OctavoEngine& e, const OctavoDecoder& d, const float* hidden, int64_t rows, float* logits) {
    linear(e, d.head, hidden, d.hidden, rows, logits, d.vocab, d.activations);
    if (d.logit_scale == 1.0f && d.logit_soft_cap <= 0) return;
    e.pool.run(rows, 1, [&](int64_t r) { kernels().finish_logits(logits + r * d.vocab, d.vocab, d.logit_scale, d.logit_soft_cap); });
}

int32_t octavo_forward(OctavoEngine* engine, const OctavoDecoder* decoder, const OctavoCache* caches, const OctavoStep* step, float* hidden) {
    return unless_out_of_memory([&] { forward(*engine, *decoder, caches, *step, hidden); });
}

int32_t octavo_begin(OctavoEngine* engine, const OctavoDecoder* decoder, const OctavoStep* step) {
    return unless_out_of_memory([&] { begin(*engine, *decoder, *step); });
}

int32_t octavo_layer_qkv(OctavoEngine* engine, const OctavoDecoder* decoder, const OctavoStep* step, int32_t layer, float* qkv) {
    OctavoEngine& e = *engine;
    const OctavoDecoder& d = *decoder;
    const int64_t tokens = step->num_tokens, width = qkv_width(d);
    return unless_out_of_memory([&] {
        multiply(e, d.layers[layer].qkv, e.hidden.view(), qkv, width);
        e.pool.run(tokens, token_chunk(e, tokens), [&](int64_t t) { rotate(d, d.layers[layer], step->positions[t], qkv + t * width); });
    });
}

int32_t octavo_layer_rest(OctavoEngine* engine, const OctavoDecoder* decoder, const OctavoStep* step, int32_t layer, const float* attended,
                          float* hidden) {
    return unless_out_of_memory([&] { rest(*engine, *decoder, step->num_tokens, layer, attended, nullptr, hidden); });
}

int32_t octavo_logits(OctavoEngine* engine, const OctavoDecoder* decoder, const float* hidden, int64_t rows, float* logits) {
    return unless_out_of_memory([&] { make_logits(*engine, *decoder, hidden, rows, logits); });
}
