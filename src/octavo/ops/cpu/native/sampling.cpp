// The last stages of the sampler: temperature, min-p, top-k, top-p, and the draw (src/octavo/sampling says what each means).
//
// Filters keep what is at or above one threshold a row. It is found among the few groups whose maxima reach it, so that a
// vocabulary is neither sorted nor copied. The draw is the two-level Gumbel-max of sampling/random.py with its random numbers.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "engine.h"

namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Standard Gumbel number `counter` of a row: sampling.random.gumbels.
double gumbel(const int32_t* key, uint32_t counter) {
    uint32_t x = counter * 0x9E3779B1u + (uint32_t)key[0];
    x ^= x >> 17;
    x *= 0xED5AD4BBu;
    x ^= (uint32_t)key[1];
    x ^= x >> 11;
    x *= 0xAC4C1B51u;
    x ^= x >> 15;
    x *= 0x31848BABu;
    x ^= x >> 14;
    return -std::log(-std::log(((double)x + 0.5) * (1.0 / 4294967296.0)));
}

struct Row {
    const float* x;       // [count] logits, over the temperature where the row is random
    const float* maxima;  // [groups]
    float* spare;         // [count]
    float* group_spare;   // [groups]
    int64_t count, groups;

    int64_t end_of(int64_t group) const { return std::min((group + 1) * DRAW_GROUP, count); }

    // What is at least `bound`, put into `spare`.
    int64_t collect(float bound) const {
        int64_t found = 0;
        for (int64_t g = 0; g < groups; g++) {
            if (!(maxima[g] >= bound)) continue;
            for (int64_t i = g * DRAW_GROUP; i < end_of(g); i++) {
                spare[found] = x[i];
                found += x[i] >= bound;
            }
        }
        return found;
    }
};

// The k-th largest number of a row. The k-th largest group maximum is no larger: only what reaches that need be looked at.
float kth_largest(const Row& row, int64_t k) {
    float bound = MINUS_INFINITY;
    if (k <= row.groups) {
        std::copy(row.maxima, row.maxima + row.groups, row.group_spare);
        std::nth_element(row.group_spare, row.group_spare + k - 1, row.group_spare + row.groups, std::greater<float>());
        bound = row.group_spare[k - 1];
    }
    const int64_t found = row.collect(bound);
    std::nth_element(row.spare, row.spare + k - 1, row.spare + found, std::greater<float>());
    return row.spare[k - 1];
}

// Where the likeliest tokens' mass reaches top_p of the mass of all that is at least `cut`; of exactly the k likeliest, if k.
float nucleus(const Row& row, float top_p, int64_t k, float cut, float most) {
    double total = 0;
    if (!k) {
        kernels().exp_sums(row.x, row.count, cut, most, row.group_spare);
        for (int64_t g = 0; g < row.groups; g++) total += row.group_spare[g];
        // Tokens less likely than (1 - p) / vocabulary have less than 1 - p of the mass together: none of them is needed.
        cut = std::max(cut, most + (float)std::log(total * (1.0 - top_p) / (double)row.count) - 1e-3f);
    }
    int64_t found = row.collect(std::min(cut, most));
    std::sort(row.spare, row.spare + found, std::greater<float>());
    if (k) {
        found = std::min(found, k);
        for (int64_t i = 0; i < found; i++) total += std::exp((double)row.spare[i] - most);
    }
    const double wanted = total * top_p;
    double before = 0;
    int64_t kept = 0;
    for (; kept < found && (kept == 0 || before < wanted); kept++) before += std::exp((double)row.spare[kept] - most);
    return row.spare[kept - 1];
}

float threshold(const Row& row, const float* numbers, float most) {
    const int64_t top_k = (int64_t)numbers[1];
    const float top_p = numbers[2];
    float cut = most + numbers[3];
    const bool limited = top_k > 0 && top_k < row.count;
    if (limited) cut = std::max(cut, kth_largest(row, top_k));
    if (top_p < 1.0f) cut = std::max(cut, nucleus(row, top_p, limited ? top_k : 0, cut, most));
    return cut;
}

// The token with the largest score of those of a group that are at least `cut`.
int64_t best_in_group(const Row& row, int64_t group, const int32_t* key, float cut) {
    int64_t token = group * DRAW_GROUP;
    double best = -std::numeric_limits<double>::infinity();
    for (int64_t i = group * DRAW_GROUP; i < row.end_of(group); i++) {
        if (!(row.x[i] >= cut) || row.x[i] == MINUS_INFINITY) continue;
        const double score = (double)row.x[i] + gumbel(key, 0x80000000u + (uint32_t)(i - group * DRAW_GROUP));
        if (score > best) best = score, token = i;
    }
    return token;
}

int64_t draw(const Row& row, const int32_t* key, float cut, float most) {
    kernels().exp_sums(row.x, row.count, cut, most, row.group_spare);
    int64_t group = 0;
    double best = -std::numeric_limits<double>::infinity();
    for (int64_t g = 0; g < row.groups; g++) {
        if (!(row.group_spare[g] > 0)) continue;
        const double score = std::log((double)row.group_spare[g]) + gumbel(key, (uint32_t)g);
        if (score > best) best = score, group = g;
    }
    return best_in_group(row, group, key, cut);
}

// Beside what float32 sums of a group may be off by, scores of groups this far apart are apart for sure.
constexpr double SURE_GAP = 1e-3;
// Groups whose mass is too small for float32 beside the likeliest token's score less than this, over its logit.
constexpr double LEAST_SCORE = -50.0;

// What `draw` finds in every part of the vocabulary that the token itself is in; -1 where there may be none such.
//
// A part has no more mass in any group than the whole has, so no group's score rises. The token's own group has at least the token's mass: if
// that alone beats all other groups, it is drawn from any part; and inside of it, a largest score stays one wherever it is left.
int64_t sure_draw(const Row& row, const int32_t* key, float most) {
    kernels().exp_sums(row.x, row.count, MINUS_INFINITY, most, row.group_spare);
    int64_t group = 0;
    double best = -std::numeric_limits<double>::infinity(), second = LEAST_SCORE;
    for (int64_t g = 0; g < row.groups; g++) {
        if (!(row.group_spare[g] > 0)) continue;
        const double score = std::log((double)row.group_spare[g]) + gumbel(key, (uint32_t)g);
        second = std::max(second, std::min(score, best));
        if (score > best) best = score, group = g;
    }
    const int64_t token = best_in_group(row, group, key, MINUS_INFINITY);
    const double own = (double)row.x[token] - most + gumbel(key, (uint32_t)group);
    return own > second + SURE_GAP ? token : -1;
}

// Whether the filters keep a token in every part of the vocabulary that it is in: a part has no more tokens before it, and a nucleus of a part
// reaches as far, or farther, where the token's own mass is all that is left beside those before it.
bool surely_kept(const Row& row, const float* numbers, int64_t token, float most) {
    const float own = row.x[token];
    if (own == most) return true;
    if (!(own >= most + numbers[3])) return false;
    const int64_t found = row.collect(own);
    const int64_t top_k = (int64_t)numbers[1];
    int64_t before = 0;
    double mass = 0;
    for (int64_t i = 0; i < found; i++) {
        if (!(row.spare[i] > own)) continue;
        before++;
        mass += std::exp((double)row.spare[i] - most);
    }
    if (top_k > 0 && before >= top_k) return false;
    const double top_p = numbers[2];
    return top_p >= 1.0 || mass * (1.0 - top_p) < (1.0 - SURE_GAP) * top_p * std::exp((double)own - most);
}

// Forbid what has no bit.
void apply_mask(float* x, int64_t count, const uint32_t* words, int64_t num_words) {
    for (int64_t begin = 0, w = 0; begin < count; begin += 32, w++) {
        const uint32_t bits = w < num_words ? words[w] : 0;
        const int64_t end = std::min(begin + 32, count);
        if (bits == 0xFFFFFFFFu) continue;
        if (!bits) {
            std::fill(x + begin, x + end, MINUS_INFINITY);
            continue;
        }
        for (int64_t i = begin; i < end; i++) x[i] = (bits >> (i - begin)) & 1 ? x[i] : MINUS_INFINITY;
    }
}

}  // namespace

void draw_rows(OctavoEngine& engine, const OctavoDraw& d, int32_t* tokens) {
    const int64_t groups = ceil_div(d.vocab, DRAW_GROUP);
    const bool any_random = std::any_of(d.modes, d.modes + d.rows, [](int32_t mode) { return mode & 1; });
    const int64_t numbers_needed = any_random ? d.rows * d.vocab : 0;
    float* scaled = engine.scaled.get(numbers_needed);
    float* chosen = engine.chosen.get(numbers_needed);
    float* numbers = engine.group_numbers.get(2 * d.rows * groups);
    engine.pool.run(d.rows, 1, [&](int64_t r) {
        float* logits = d.logits + (d.places ? d.places[r] : r) * d.stride;
        const float* settings = d.numbers + d.slots[r] * d.numbers_stride;
        if (d.mask_rows && d.mask_rows[r] >= 0) apply_mask(logits, d.vocab, d.masks + (int64_t)d.mask_rows[r] * d.mask_words, d.mask_words);
        const bool random = d.modes[r] & 1;
        Row row = {random ? scaled + r * d.vocab : logits, numbers + 2 * r * groups, chosen + r * d.vocab, numbers + (2 * r + 1) * groups,
                   d.vocab, groups};
        const bool usable = kernels().scale_logits(logits, d.vocab, settings[0], random ? scaled + r * d.vocab : nullptr, (float*)row.maxima);
        const float* largest = std::max_element(row.maxima, row.maxima + groups);  // the first of them
        tokens[r] = -1;
        if (!usable || *largest == MINUS_INFINITY) return;
        if (random && d.modes[r] & 8) {
            const int64_t token = sure_draw(row, d.keys + 2 * r, *largest);
            tokens[r] = token >= 0 && (!(d.modes[r] & 2) || surely_kept(row, settings, token, *largest)) ? (int32_t)token : -1;
        } else if (random) {
            const float cut = d.modes[r] & 2 ? threshold(row, settings, *largest) : MINUS_INFINITY;
            tokens[r] = (int32_t)draw(row, d.keys + 2 * r, cut, *largest);
            if (d.modes[r] & 4)
                for (int64_t i = 0; i < d.vocab; i++) logits[i] = row.x[i] >= cut ? row.x[i] : MINUS_INFINITY;
        } else {
            const int64_t group = largest - row.maxima;
            tokens[r] = (int32_t)(std::find(row.x + group * DRAW_GROUP, row.x + row.end_of(group), *largest) - row.x);
        }
    });
}

int32_t octavo_draw(OctavoEngine* engine, const OctavoDraw* draw, int32_t* tokens) {
    return unless_out_of_memory([&] { draw_rows(*engine, *draw, tokens); });
}
