// Level choice, linear layers over threads, attention over threads, and the single operations of the C interface.
#include "engine.h"

#include <atomic>

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

std::atomic<const Kernels*> chosen{nullptr};

#if defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int32_t found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found;
#else
    return false;
#endif
}
#endif

const Kernels* of_level(int32_t level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return kernels_avx2();
    if (level == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return kernels_avx512();
#elif defined(__aarch64__)
    if (level == 3 && has_dot_product()) return kernels_neon();
#endif
    return level == 0 ? kernels_portable() : nullptr;
}

const Kernels* best() {
    for (int32_t level : {3, 2, 1})
        if (const Kernels* found = of_level(level)) return found;
    return kernels_portable();
}

const uint8_t* panel_of(const OctavoSegment& segment, int64_t panel, int64_t columns) {
    return (const uint8_t*)segment.data + panel * octavo_packed_bytes(segment.kind, 1, columns);
}

}  // namespace

const Kernels& kernels() {
    const Kernels* k = chosen.load(std::memory_order_relaxed);
    if (!k) chosen = k = best();
    return *k;
}

Reading reading_of(const OctavoLinear& linear, int32_t wanted) {
    bool packed = false, floats = false;
    for (int i = 0; i < linear.num_segments; i++) {
        const int32_t kind = linear.segments[i].kind;
        (is_packed(kind) ? packed : floats) = true;
    }
    if (!packed || wanted == ACTIVATIONS_FLOAT32) return {ROUND_NOT, true};
    return {wanted == ACTIVATIONS_INT8 ? ROUND_8 : ROUND_16, floats};
}

// A task is some panels times a block of tokens. A block's inputs stay in the second-level cache, and the tasks that share
// panels are neighbours, so that weights come from memory once.
void multiply(OctavoEngine& engine, const OctavoLinear& linear, const Activations& x, float* out, int64_t ldo) {
    const int64_t tokens = x.tokens, columns = linear.in_features;
    const int64_t blocks = ceil_div(tokens, TOKEN_BLOCK), block = blocks ? ceil_div(ceil_div(tokens, blocks), 8) * 8 : 0;  // of one size
    int64_t panels = 0;
    for (int i = 0; i < linear.num_segments; i++) panels += ceil_div(linear.segments[i].rows, PANEL);
    if (!panels || !tokens) return;
    int64_t chunk = panels * blocks / (8 * engine.pool.threads());
    chunk = chunk < 1 ? 1 : chunk > 32 ? 32 : chunk;
    const Kernels& k = kernels();
    engine.pool.run(ceil_div(panels, chunk) * blocks, 1, [&](int64_t task) {
        const int64_t begin = task % blocks * block, end = begin + block < tokens ? begin + block : tokens;
        const int64_t first = task / blocks * chunk, last = first + chunk < panels ? first + chunk : panels;
        int64_t segment_panel = 0, row = 0;  // first panel and first output row of the segment
        for (int i = 0; i < linear.num_segments; i++) {
            const OctavoSegment& segment = linear.segments[i];
            const int64_t size = ceil_div(segment.rows, PANEL);
            const int64_t from = first > segment_panel ? first : segment_panel, to = last < segment_panel + size ? last : segment_panel + size;
            for (int64_t p = from; p < to; p++) {
                const int64_t at = (p - segment_panel) * PANEL, left = segment.rows - at;
                k.panel(segment.kind, panel_of(segment, p - segment_panel, columns), x, begin, end, out + row + at, ldo,
                        linear.bias ? linear.bias + row + at : nullptr, (int)(left < PANEL ? left : PANEL));
            }
            segment_panel += size;
            row += segment.rows;
        }
    });
}

void linear(OctavoEngine& e, const OctavoLinear& weight, const float* x, int64_t ldx, int64_t tokens, float* out, int64_t ldo, int32_t activations) {
    e.other.resize(tokens, weight.in_features, reading_of(weight, activations));
    e.pool.run(tokens, token_chunk(e, tokens), [&](int64_t t) { e.other.finish(t, x + t * ldx); });
    multiply(e, weight, e.other.view(), out, ldo);
}

void embed(const OctavoLinear& table, int64_t id, float scale, float* out) {
    for (int i = 0; i < table.num_segments; i++) {
        const OctavoSegment& segment = table.segments[i];
        if (id < segment.rows) {
            kernels().embed_row(segment.kind, panel_of(segment, id / PANEL, table.in_features), (int)(id % PANEL), table.in_features, scale, out);
            return;
        }
        id -= segment.rows;
    }
}

void plan_attention(OctavoEngine& engine, const OctavoCache& cache, const OctavoStep& step) {
    const int32_t group = cache.heads / cache.kv_heads;
    // Whole groups where they fit, as all their queries share the keys; for a step too small to fill the threads, smaller tiles.
    int32_t size = group <= MAX_QUERIES ? MAX_QUERIES / group * group : (group + 1) / 2 <= MAX_QUERIES ? (group + 1) / 2 : 4;
    if (step.num_tokens * cache.kv_heads < 2 * engine.pool.threads()) size = 1;
    const auto add = [&](std::vector<TileTask>& tiles, int32_t row, int32_t first_token, int32_t begin, int32_t end) {
        for (int32_t kv_head = 0; kv_head < cache.kv_heads; kv_head++)
            for (int32_t q = begin * group; q < end * group; q += size)
                tiles.push_back({row, kv_head, q, end * group - q < size ? end * group - q : size, first_token});
    };
    engine.tiles.clear();
    engine.last_tiles.clear();
    int32_t token = 0, w = 0;
    for (int32_t row = 0; row < step.num_rows; row++) {
        const int32_t count = step.row_count[row];
        add(engine.tiles, row, token, 0, count);
        for (; step.wanted && w < step.num_wanted && step.wanted[w] < token + count; w++)
            add(engine.last_tiles, row, token, step.wanted[w] - token, step.wanted[w] - token + 1);
        token += count;
    }
}

void attend_tiles(OctavoEngine& engine, const std::vector<TileTask>& tiles, const OctavoCache& cache, const OctavoStep& step, const float* q,
                  int64_t ldq, float* out) {
    const int64_t group = cache.heads / cache.kv_heads, width = (int64_t)cache.heads * cache.head_dim;
    const int32_t* tables = cache.sliding ? step.sliding_tables : step.block_tables;
    const auto table = [&](int32_t row) { return tables + (step.row_slots ? step.row_slots[row] : row) * step.table_stride; };
    const auto first_of = [&](int32_t end) { return cache.window && end > cache.window ? end - cache.window : 0; };
    // The heads of a row lie side by side, so that one thread does well to take them all.
    const int64_t count = (int64_t)tiles.size(), threads = engine.pool.threads(), chunk = count < 4 * threads * cache.kv_heads ? 1 : cache.kv_heads;
    engine.pool.run(count, chunk, [&](int64_t i) {
        const TileTask& task = tiles[(size_t)i];
        AttentionTile tile;
        tile.cache = &cache;
        tile.table = table(task.row);
        tile.kv_head = task.kv_head;
        tile.num_queries = task.num_queries;
        tile.next_table = nullptr;
        if (const int64_t n = (i + 1) % chunk ? i + 1 : i + 1 + (threads - 1) * chunk; n < count) {
            const TileTask& next = tiles[(size_t)n];
            tile.next_table = table(next.row);
            tile.next_last = step.row_start[next.row] + (int32_t)(next.first_query / group) + 1;
            tile.next_first = first_of(tile.next_last);
            tile.next_kv_head = next.kv_head;
        }
        for (int n = 0; n < task.num_queries; n++) {
            const int64_t token = (task.first_query + n) / group, head = task.kv_head * group + (task.first_query + n) % group;
            tile.queries[n] = q + (task.first_token + token) * ldq + head * cache.head_dim;
            tile.outputs[n] = out + (task.first_token + token) * width + head * cache.head_dim;
            tile.last[n] = step.row_start[task.row] + (int32_t)token + 1;
            tile.first[n] = first_of(tile.last[n]);
        }
        kernels().attend(tile);
    });
}

int32_t octavo_abi() { return OCTAVO_ABI; }

int32_t octavo_level() {
    for (int32_t level = 3; level > 0; level--)
        if (of_level(level) == &kernels()) return level;
    return 0;
}

int32_t octavo_set_level(int32_t level) {
    const Kernels* k = of_level(level);
    if (k) chosen = k;
    return k != nullptr;
}

OctavoEngine* octavo_engine_new(int32_t threads) {
    try {
        return new OctavoEngine(threads);
    } catch (...) {
        return nullptr;
    }
}

void octavo_engine_free(OctavoEngine* engine) { delete engine; }

void octavo_engine_trim(OctavoEngine* engine) {
    static_cast<Scratch&>(*engine) = Scratch();
#if defined(__GLIBC__)
    malloc_trim(0);  // what is freed at the top of the heap would stay ours
#endif
}

int32_t octavo_linear(OctavoEngine* engine, const OctavoLinear* weight, const float* x, int64_t ldx, int64_t tokens, float* out, int64_t ldo,
                      int32_t activations) {
    return unless_out_of_memory([&] { linear(*engine, *weight, x, ldx, tokens, out, ldo, activations); });
}

void octavo_embedding(const OctavoLinear* table, const int64_t* ids, int64_t tokens, float* out) {
    for (int64_t t = 0; t < tokens; t++) embed(*table, ids[t], 1.0f, out + t * table->in_features);
}

void octavo_rms_norm(const float* x, int64_t ldx, int64_t rows, int64_t dim, const float* weight, float eps, float* out, int64_t ldo) {
    for (int64_t r = 0; r < rows; r++) kernels().rms_norm(x + r * ldx, weight, eps, dim, out + r * ldo);
}

void octavo_rope(float* x, int64_t ldx, int64_t tokens, int64_t heads, int64_t head_dim, const float* cos_sin, int64_t rotary_dim) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) kernels().rope(x + t * ldx + h * head_dim, cos_sin + t * rotary_dim, rotary_dim);
}

void octavo_gated_mul(const float* gate_up, int64_t rows, int64_t dim, int32_t activation, float* out) {
    for (int64_t r = 0; r < rows; r++) kernels().gated_mul(gate_up + 2 * r * dim, gate_up + (2 * r + 1) * dim, dim, activation, out + r * dim);
}

int32_t octavo_attention(OctavoEngine* engine, const OctavoCache* cache, const OctavoStep* step, const float* q, int64_t ldq, const float* k,
                         int64_t ldk, const float* v, int64_t ldv, float* out) {
    const int64_t* places = cache->sliding ? step->sliding_slots : step->cache_slots;
    return unless_out_of_memory([&] {
        engine->pool.run(step->num_tokens, token_chunk(*engine, step->num_tokens), [&](int64_t t) {
            for (int h = 0; h < cache->kv_heads; h++)
                kernels().store_key_value(*cache, places[t], h, k + t * ldk + h * cache->head_dim, v + t * ldv + h * cache->head_dim);
        });
        plan_attention(*engine, *cache, *step);
        attend_tiles(*engine, engine->tiles, *cache, *step, q, ldq, out);
    });
}
