// A whole step from the slot tables to the sampled tokens in their places, in one call; or as far as the logits.
#include <cstring>

#include "engine.h"

namespace {

// The rows that are sampled, and where their tokens go.
struct Sampled {
    const int32_t *slots, *ends;
    int32_t rows;
    float* logits;  // [rows, vocab]
};

// all_hidden: [tokens, hidden] where the hidden states of all tokens go; null: only the sampled rows' are computed to the end.
Sampled run_to_logits(OctavoEngine& e, const OctavoDecoder* decoder, const OctavoCache* caches, const OctavoSlots* slots, const OctavoPlan* plan,
                      float* all_hidden) {
    for (int32_t i = 0; i < plan->num_diffs; i++)
        slots->blocks[plan->table_slots[i] * slots->blocks_stride + plan->table_index[i]] = plan->table_blocks[i];

    int64_t* ids = e.token_ids.get(plan->num_tokens);
    int64_t* positions = e.positions.get(plan->num_tokens);
    const int32_t second = slots->sliding_column;
    int64_t* places = e.cache_slots.get((int64_t)plan->num_tokens * (second ? 2 : 1));
    int64_t* sliding_places = second ? places + plan->num_tokens : nullptr;
    int32_t* wanted = e.wanted.get(3 * plan->num_rows + 1);
    int32_t *wanted_slots = wanted + plan->num_rows, *ends = wanted_slots + plan->num_rows;
    int32_t token = 0, sampled = 0;
    for (int32_t row = 0; row < plan->num_rows; row++) {
        const int64_t slot = plan->slots[row];
        const int32_t *text = slots->tokens + slot * slots->tokens_stride, *blocks = slots->blocks + slot * slots->blocks_stride;
        const int32_t end = plan->start[row] + plan->count[row];
        for (int32_t p = plan->start[row]; p < end; p++, token++) {
            ids[token] = text[p];
            positions[token] = p;
            places[token] = (int64_t)blocks[p / slots->block_size] * slots->block_size + p % slots->block_size;
            if (second) sliding_places[token] = (int64_t)blocks[second + p / slots->block_size] * slots->block_size + p % slots->block_size;
        }
        if (!plan->sample[row]) continue;
        wanted[sampled] = token - 1;
        wanted_slots[sampled] = (int32_t)slot;
        ends[sampled++] = end;
    }
    OctavoStep step = {};
    step.token_ids = ids;
    step.positions = positions;
    step.cache_slots = places;
    step.sliding_slots = sliding_places;
    step.row_start = plan->start;
    step.row_count = plan->count;
    step.block_tables = slots->blocks;
    step.sliding_tables = second ? slots->blocks + second : nullptr;
    step.row_slots = plan->slots;
    step.table_stride = slots->blocks_stride;
    step.wanted = all_hidden ? nullptr : wanted;
    step.num_tokens = plan->num_tokens;
    step.num_rows = plan->num_rows;
    step.num_wanted = sampled;
    float* hidden = e.final.get((int64_t)sampled * decoder->hidden);
    forward(e, *decoder, caches, step, all_hidden ? all_hidden : hidden);
    for (int32_t i = 0; all_hidden && i < sampled; i++)
        memcpy(hidden + (int64_t)i * decoder->hidden, all_hidden + (int64_t)wanted[i] * decoder->hidden, (size_t)decoder->hidden * 4);
    float* logits = e.logits.get((int64_t)sampled * decoder->vocab);
    if (sampled) make_logits(e, *decoder, hidden, sampled, logits);
    return {wanted_slots, ends, sampled, logits};
}

}  // namespace

int32_t octavo_step(OctavoEngine* engine, const OctavoDecoder* decoder, const OctavoCache* caches, const OctavoSlots* slots, const OctavoPlan* plan,
                    int32_t* tokens) {
    return unless_out_of_memory([&] {
        const Sampled s = run_to_logits(*engine, decoder, caches, slots, plan, nullptr);
        if (!s.rows) return;
        const OctavoDraw draw = {s.logits, decoder->vocab, decoder->vocab, s.slots, plan->modes, plan->keys, slots->numbers, slots->numbers_stride,
                                 plan->masks, plan->mask_rows, nullptr, s.rows, plan->mask_words};
        draw_rows(*engine, draw, tokens);
        for (int32_t i = 0; i < s.rows; i++) slots->tokens[s.slots[i] * slots->tokens_stride + s.ends[i]] = tokens[i] < 0 ? 0 : tokens[i];
    });
}

int32_t octavo_step_logits(OctavoEngine* engine, const OctavoDecoder* decoder, const OctavoCache* caches, const OctavoSlots* slots,
                           const OctavoPlan* plan, float* hidden, float** logits) {
    return unless_out_of_memory([&] { *logits = run_to_logits(*engine, decoder, caches, slots, plan, hidden).logits; });
}
