// Causal attention of prompt chunks over the paged cache, as fast as the tensor cores go. A block stays on its SM and goes through the
// items of a plan (`chunk_plan`): ROWS rows, which are tokens x the query heads of one KV head.
//  * COPIERS warps, one thread each, have the copy engine bring queries, and pages of keys and values into a ring, across items: a
//    thread issues a copy only every 90 ns. Keys lie as the tensor cores read a matrix of lines, values as they read a transposed one;
//  * warpgroups attend, 64 rows each: while the tensor cores multiply a tile's weights with its values, the warps turn the next tile's
//    scores into weights. Warpgroups ask for products in turns, so that one's softmax falls into the other's products.
// Tiles begin at multiples of KEYS, and sums follow their order: a query's bits do not depend on how its prompt was chunked, unless an
// item's keys are cut into parts, which is done where items are too few for the SMs. Each warp leaves what its rows have of a part in
// memory, and the last one to do so adds up all parts in their order: warps wait for nobody.

#define ROWS (64 * WARPGROUPS)
#define CONSUMERS (128 * WARPGROUPS)
#define TOKENS (ROWS / GROUP)  // of an item, at most
#define HALVES (DIM / 64)      // of a head, in lines of 128 bytes
#define PAGES (KEYS / 16)      // of a tile
#define Q_BYTES (HALVES * ROWS * 128)
#define TILE_BYTES (HALVES * KEYS * 128)
#define COPIERS 4
#define SHARE ((PAGES + COPIERS - 1) / COPIERS)  // pages of a tile that a copying warp has
#define LANES (SHARE > 2 ? 4 : SHARE)            // of it that hold a tile's block numbers
#define AHEAD (32 / LANES)                       // tiles whose block numbers a warp holds
#define STEPS (DIM / 16)
#define SLACK 8.0f          // that scores may be above the maximum that they are measured by, in base 2
#define BEFORE (PAGES / 2)  // pages of a tile that are weighed by the maximum so far, before the products are waited for

struct Args {
  const int* items;
  const int* table;
  u8* out;
  float* sums;    // of a warp's rows of a part: [parts, KV_HEADS, CONSUMERS / 32, DIM / 8, 32 lanes, 4]
  float* stats;   // [parts, KV_HEADS, CONSUMERS / 32, 32 lanes, 4]: maxima and denominators of a lane's two rows
  int* counters;  // [parts, KV_HEADS, CONSUMERS / 32], zero between launches
  long long out_stride;  // bytes
  int table_stride, num_items;
  float scale;  // for scores in base 2
};

struct Layout {
  u32 queries, ring, queries_full, queries_empty, full, empty;
};

INLINE Layout layout_of(u32 shared) {
  Layout l;
  l.queries = shared;
  l.ring = l.queries + Q_BYTES;
  l.queries_full = l.ring + SLOTS * TILE_BYTES;
  l.queries_empty = l.queries_full + 8;
  l.full = l.queries_empty + 8;
  l.empty = l.full + 8 * SLOTS;
  return l;
}

// `count` queries from batch token `token` on, the first at `position` of the context of `row`, and tiles of keys from `begin` to `end`;
// no queries: there is no item. See `chunk_plan`. In its first tile, each query sees a key.
struct Item {
  int row, token, position, count, context, begin, end, part, first_part, num_parts, head;
};

// A block's item of a turn. Every second turn goes backwards, so that long and short items even out.
INLINE Item item_of(const Args& p, int turn) {
  const int blocks = blocks_x(), n = turn * blocks + (turn & 1 ? blocks - 1 - block_x() : block_x());
  if (n >= p.num_items * KV_HEADS) return Item{};
  const int* at = p.items + n / KV_HEADS * 12;
  const U4 a = load16(at), b = load16(at + 4), c = load16(at + 8);
  return Item{(int)a.v[0], (int)a.v[1], (int)a.v[2], (int)a.v[3], (int)b.v[0], (int)b.v[1],
              (int)b.v[2], (int)b.v[3], (int)c.v[0], (int)c.v[1], n % KV_HEADS};
}

// Tiles are counted from the item's first, and here the position of one's first key.
INLINE int keys_at(const Item& item, int tile) { return (item.begin + tile) * KEYS; }

// Where a warp is in the ring.
struct Place {
  int slot, round;
};

INLINE void move_on(Place& place) {
  if (++place.slot == SLOTS) place.slot = 0, place.round ^= 1;
}

// Copying

// From tile `tile` on, the blocks of the pages that a copying warp has: LANES lanes a tile.
INLINE int load_blocks(const Args& p, const Item& item, int tile, int copier, int lane) {
  const int page = copier + lane % LANES * COPIERS, at = keys_at(item, tile + lane / LANES) + page * 16;
  return page < PAGES && at < item.context ? load_number(p.table + (long long)item.row * p.table_stride + at / BLOCK) : 0;
}

// A warp's pages of a tile's keys: by halves of heads, in each the tile's lines in a row; of its values: page by page.
template <bool values>
INLINE void copy_tile(const Map& map, const Layout& l, const Item& item, int tile, int blocks, Place& place, int copier, int lane) {
  const u32 to = l.ring + place.slot * TILE_BYTES, full = l.full + 8 * place.slot;
  int pages = 0;
UNROLL
  for (int i = 0; i < SHARE; i++) pages += copier + i * COPIERS < PAGES && keys_at(item, tile) + (copier + i * COPIERS) * 16 < item.context;
  if (lane == 0) {
    sleep_at(l.empty + 8 * place.slot, place.round ^ 1);
    expect_bytes(full, pages * (HALVES * 2048));
  }
UNROLL
  for (int i = 0; i < SHARE; i++) {
    const int page = copier + i * COPIERS, at = keys_at(item, tile) + page * 16, block = of_lane(blocks, tile % AHEAD * LANES + i);
    if (lane != 0 || i >= pages) continue;
    if (values) {
      copy_lines(to + page * (HALVES * 2048), map, at % BLOCK, 0, item.head, block, full);
    } else {
UNROLL
      for (int half = 0; half < HALVES; half++) copy_lines(to + half * (KEYS * 128) + page * 2048, map, at % BLOCK, half, item.head, block, full);
    }
  }
  move_on(place);
}

INLINE void copy_queries(const Map& queries, const Layout& l, const Item& item, int turn) {
  sleep_at(l.queries_empty, (turn & 1) ^ 1);
  expect_bytes(l.queries_full, HALVES * TOKENS * GROUP * 128);
UNROLL
  for (int half = 0; half < HALVES; half++)
    copy_lines(l.queries + half * (ROWS * 128), queries, item.head * GROUP, half, item.token, 0, l.queries_full);
}

INLINE void copy_items(const Args& p, const Map& queries, const Map& keys, const Map& values, const Layout& l, int copier, int lane) {
  Place place = {0, 0};
  if (lane == 0) prefetch_map(queries), prefetch_map(keys), prefetch_map(values);
  // The plan and the block tables are older than what the kernel before writes.
  Item item = item_of(p, 0);
  int blocks = load_blocks(p, item, 0, copier, lane);
  wait_for_inputs();
  release_dependents();
  for (int turn = 0; item.count > 0; turn++) {
    const Item following = item_of(p, turn + 1);
    const int tiles = item.end - item.begin;
    int next_blocks = 0, earlier_blocks = 0;
    // Keys are a tile ahead of values.
    for (int tile = 0; tile <= tiles; tile++) {
      if (tile < tiles) {
        if (tile % AHEAD == 0) {
          if (tile > 0) earlier_blocks = blocks, blocks = next_blocks;
          next_blocks = tile + AHEAD < tiles ? load_blocks(p, item, tile + AHEAD, copier, lane) : load_blocks(p, following, 0, copier, lane);
        }
        copy_tile<false>(keys, l, item, tile, blocks, place, copier, lane);
        if (tile == 0 && copier == 0 && lane == 0) copy_queries(queries, l, item, turn);
      }
      if (tile > 0) copy_tile<true>(values, l, item, tile - 1, tile < tiles && tile % AHEAD == 0 ? earlier_blocks : blocks, place, copier, lane);
    }
    item = following, blocks = next_blocks;
  }
}

// Attending

// A lane has two rows of a warp's 16, eight apart, and of each columns 2 * (lane % 4) and the next of every eight.
typedef float Scores[KEYS / 2];
typedef float Sums[DIM / 2];

struct Rows {
  float most[2], sum[2];
};

INLINE void multiply_keys(Scores& scores, const Layout& l, const Place& place, int group) {
UNROLL
  for (int step = 0; step < STEPS; step++)
    score_mma(scores, l.queries + step / 4 * (ROWS * 128) + group * 8192, l.ring + place.slot * TILE_BYTES + step / 4 * (KEYS * 128), step % 4 * 32, step > 0);
  close_products();
}

INLINE void multiply_values(Sums& sums, const u32 (&weights)[PAGES][4], const Layout& l, const Place& place) {
UNROLL
  for (int page = 0; page < PAGES; page++) value_mma(sums, weights[page], l.ring + place.slot * TILE_BYTES, page * (HALVES * 2048));
  close_products();
}

// Keys behind a row's own position count for nothing. `seen`: of a tile's keys, those up to this one are seen, by row.
INLINE void hide(Scores& scores, const int (&seen)[2], int lane) {
UNROLL
  for (int h = 0; h < 2; h++) {
    const int last = seen[h] - (lane & 3) * 2;
UNROLL
    for (int i = 0; i < KEYS / 8; i++)
UNROLL
      for (int c = 0; c < 2; c++)
        if (8 * i + c > last) scores[4 * i + 2 * h + c] = -INFINITE;
  }
}

// The highest score of each row.
INLINE void highest(float (&most)[2], const Scores& scores) {
UNROLL
  for (int h = 0; h < 2; h++) {
    float two[2] = {scores[2 * h], scores[2 * h + 1]};
UNROLL
    for (int i = 1; i < KEYS / 8; i++)
UNROLL
      for (int c = 0; c < 2; c++) two[c] = larger(two[c], scores[4 * i + 2 * h + c]);
    most[h] = larger(two[0], two[1]);
    most[h] = larger(most[h], of_neighbour<1>(most[h]));
    most[h] = larger(most[h], of_neighbour<2>(most[h]));
  }
}

INLINE bool rises(const float (&most)[2], const Rows& rows, int h, float scale) { return (most[h] - rows.most[h]) * scale > SLACK; }

// The scores of pages `from` to `to` become weights.
template <int from, int to>
INLINE void weigh(Scores& scores, Rows& rows, float scale) {
UNROLL
  for (int h = 0; h < 2; h++) {
    const float less = rows.most[h] * scale;
    float sum[2] = {0.0f, 0.0f};
UNROLL
    for (int i = 2 * from; i < 2 * to; i++)
UNROLL
      for (int c = 0; c < 2; c++) {
        float& x = scores[4 * i + 2 * h + c];
        x = power_of_2(x * scale - less);
        sum[c] += x;
      }
    rows.sum[h] += sum[0] + sum[1];
  }
}

// The scores of a warp's rows with the first pages of a tile.
INLINE void multiply_first(float (&scores)[8 * BEFORE], const Layout& l, const Place& place, int warp, int lane) {
  const int j = lane & 7;
UNROLL
  for (int i = 0; i < 8 * BEFORE; i++) scores[i] = 0.0f;
NO_UNROLL
  for (int step = 0; step < STEPS; step++) {
    // Lane 8 * i + j names row j of matrix i.
    u32 q[4];
    load_matrices(q, l.queries + step / 4 * (ROWS * 128) + (warp * 16 + (lane & 8) + j) * 128 + ((step % 4 * 2 + (lane >> 4)) ^ j) * 16);
UNROLL
    for (int page = 0; page < BEFORE; page++) {
      u32 k[4];
      const int key = page * 16 + (lane >> 4) * 8 + j;
      load_matrices(k, l.ring + place.slot * TILE_BYTES + step / 4 * (KEYS * 128) + key * 128 + ((step % 4 * 2 + (lane >> 3 & 1)) ^ j) * 16);
UNROLL
      for (int i = 0; i < 2; i++) warp_mma((float(&)[4])scores[8 * page + 4 * i], q, k[2 * i], k[2 * i + 1]);
    }
  }
}

// Rows whose scores rise are measured by their new maximum from here on. Their weights of the first pages may be infinite by now, and
// are found anew; others stay as they are.
INLINE void follow(Scores& scores, Sums& sums, Rows& rows, const float (&most)[2], const float (&sum_before)[2], const int (&seen)[2],
                   const Layout& l, const Place& at_keys, float scale, int warp, int lane) {
  float first[8 * BEFORE];
  multiply_first(first, l, at_keys, warp, lane);
UNROLL
  for (int h = 0; h < 2; h++) {
    if (!rises(most, rows, h, scale)) continue;
    const float fade = power_of_2((rows.most[h] - most[h]) * scale), less = most[h] * scale;
    const int last = seen[h] - (lane & 3) * 2;
    rows.most[h] = most[h];
    rows.sum[h] = sum_before[h] * fade;
UNROLL
    for (int i = 0; i < 2 * BEFORE; i++)
UNROLL
      for (int c = 0; c < 2; c++) {
        const float x = 8 * i + c > last ? 0.0f : power_of_2(first[4 * i + 2 * h + c] * scale - less);
        scores[4 * i + 2 * h + c] = x;
        rows.sum[h] += x;
      }
UNROLL
    for (int i = 0; i < DIM / 4; i++) sums[i >> 1 << 2 | 2 * h | (i & 1)] *= fade;
  }
  wait_for_loads(as_bits(rows.sum[0]), as_bits(rows.sum[1]));  // or what is copied next could overtake them
}

INLINE void pack(u32 (&weights)[PAGES][4], const Scores& scores) {
UNROLL
  for (int page = 0; page < PAGES; page++)
UNROLL
    for (int i = 0; i < 4; i++) weights[page][i] = narrow2(scores[8 * page + 2 * i], scores[8 * page + 2 * i + 1]);
}

// Anything may lie behind the context, NaN included, which a weight of zero does not undo. All warpgroups write the same zeros.
INLINE void clear_values(const Layout& l, const Place& place, int from, int group, int thread) {
  const U4 zero = {{0, 0, 0, 0}};
  for (int i = thread; i < (KEYS - from) * (8 * HALVES); i += 128) {
    const int key = from + i / (8 * HALVES), piece = i % (8 * HALVES);
    put_vector(l.ring + place.slot * TILE_BYTES + key / 16 * (HALVES * 2048) + piece / 8 * 2048 + key % 16 * 128 + piece % 8 * 16, zero);
  }
  show_to_products();
  wait_turn(8 + group, 128);
}

INLINE void store(const Args& p, const Item& item, const Sums& sums, const Rows& rows, int row, int lane) {
UNROLL
  for (int h = 0; h < 2; h++) {
    float sum = rows.sum[h];
    sum += of_neighbour<1>(sum);
    sum += of_neighbour<2>(sum);
    const float factor = 1.0f / sum;
    const int token = (row + 8 * h) / GROUP, head = item.head * GROUP + (row + 8 * h) % GROUP;
    if (token >= item.count) continue;
    u8* to = p.out + (item.token + token) * p.out_stride + (head * DIM + (lane & 3) * 2) * 2;
UNROLL
    for (int i = 0; i < DIM / 8; i++) store4(to + 16 * i, narrow2(sums[4 * i + 2 * h] * factor, sums[4 * i + 2 * h + 1] * factor));
  }
}

INLINE long long place_of(const Item& item, int part, int warp) { return ((long long)part * KV_HEADS + item.head) * (CONSUMERS / 32) + warp; }

// True for the last warp to leave its part of these rows.
INLINE bool leave_part(const Args& p, const Item& item, const Sums& sums, const Rows& rows, int warp, int lane) {
  const long long place = place_of(item, item.part, warp);
UNROLL
  for (int i = 0; i < DIM / 8; i++) {
    const float four[4] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
    store_floats(p.sums + ((place * (DIM / 8) + i) * 32 + lane) * 4, four);
  }
  const float stats[4] = {rows.most[0], rows.most[1], rows.sum[0], rows.sum[1]};
  store_floats(p.stats + (place * 32 + lane) * 4, stats);
  warp_barrier();
  const bool last = lane == 0 && counted_last(p.counters + place_of(item, item.first_part, warp), item.num_parts);
  const bool all = any_lane(last);
  warp_barrier();
  return all;
}

INLINE void add_parts(const Args& p, const Item& item, Sums& sums, Rows& rows, int warp, int lane) {
  Rows all = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
NO_UNROLL
  for (int part = item.first_part; part < item.first_part + item.num_parts; part++) {
    const U4 stats = load_fresh16(p.stats + (place_of(item, part, warp) * 32 + lane) * 4);
UNROLL
    for (int h = 0; h < 2; h++) all.most[h] = larger(all.most[h], as_float(stats.v[h]));
  }
UNROLL
  for (int i = 0; i < DIM / 2; i++) sums[i] = 0.0f;
NO_UNROLL
  for (int part = item.first_part; part < item.first_part + item.num_parts; part++) {
    const long long place = place_of(item, part, warp);
    const U4 stats = load_fresh16(p.stats + (place * 32 + lane) * 4);
    U4 theirs[DIM / 8];  // on their way together
UNROLL
    for (int i = 0; i < DIM / 8; i++) theirs[i] = load_fresh16(p.sums + ((place * (DIM / 8) + i) * 32 + lane) * 4);
    float weight[2];
UNROLL
    for (int h = 0; h < 2; h++) {
      weight[h] = power_of_2((as_float(stats.v[h]) - all.most[h]) * p.scale);
      all.sum[h] += as_float(stats.v[2 + h]) * weight[h];
    }
UNROLL
    for (int i = 0; i < DIM / 8; i++)
UNROLL
      for (int e = 0; e < 4; e++) sums[4 * i + e] += as_float(theirs[i].v[e]) * weight[e >> 1];
  }
  rows = all;
}

INLINE void attend_items(const Args& p, const Layout& l, int warp, int lane) {
  const int group = warp >> 2, row = warp * 16 + (lane >> 2);
  Place place = {0, 0};
  if (group == WARPGROUPS - 1) give_turn(2, 256);
  Item item = item_of(p, 0);
  wait_for_inputs();
  release_dependents();
  for (int turn = 0; item.count > 0; turn++) {
    const Item following = item_of(p, turn + 1);
    const int tiles = item.end - item.begin, masked = (item.position + 1) / KEYS - item.begin;
    int seen[2];
UNROLL
    for (int h = 0; h < 2; h++) seen[h] = item.position + smaller((row + 8 * h) / GROUP, item.count - 1) - keys_at(item, 0);
    Scores scores;
    Sums sums;
    u32 weights[PAGES][4];
    Rows rows = {{0.0f, 0.0f}, {0.0f, 0.0f}};
UNROLL
    for (int i = 0; i < DIM / 2; i++) sums[i] = 0.0f;

    wait_at(l.queries_full, turn & 1);
    wait_at(l.full + 8 * place.slot, place.round);
    begin_products();
    multiply_keys(scores, l, place, group);
    wait_for_products();
    settle(scores);
    if (lane == 0) arrive_at(l.empty + 8 * place.slot);
    move_on(place);
    if (masked == 0) hide(scores, seen, lane);
    highest(rows.most, scores);
    weigh<0, PAGES>(scores, rows, p.scale);
    pack(weights, scores);
    for (int tile = 1; tile < tiles; tile++) {
      const Place at_keys = place;
      move_on(place);
      wait_at(l.full + 8 * at_keys.slot, at_keys.round);
      wait_turn(2 + group, 256);
      begin_products();
      multiply_keys(scores, l, at_keys, group);
      wait_at(l.full + 8 * place.slot, place.round);
      multiply_values(sums, weights, l, place);
      give_turn(2 + (group + 1) % WARPGROUPS, 256);
      wait_for_products_but_one();
      settle(scores);
      const int left[2] = {seen[0] - tile * KEYS, seen[1] - tile * KEYS};
      if (tile >= masked) hide(scores, left, lane);
      // The first weights are measured by the maximum so far, while that of this tile is looked for.
      float most[2];
      highest(most, scores);
      const float sum_before[2] = {rows.sum[0], rows.sum[1]};
      weigh<0, BEFORE>(scores, rows, p.scale);
      const bool rise = any_lane(rises(most, rows, 0, p.scale) || rises(most, rows, 1, p.scale));
      // A branch on what went into them: without one, the compiler waits for the products before it weighs.
      wait_for_loads(as_bits(rows.sum[0]), as_bits(rows.sum[1]));
      wait_for_products();
      settle(sums);
      if (lane == 0) arrive_at(l.empty + 8 * place.slot);
      move_on(place);
      if (rise) follow(scores, sums, rows, most, sum_before, left, l, at_keys, p.scale, warp, lane);
      if (lane == 0) arrive_at(l.empty + 8 * at_keys.slot);
      weigh<BEFORE, PAGES>(scores, rows, p.scale);
      pack(weights, scores);
    }
    if (lane == 0) arrive_at(l.queries_empty);
    wait_at(l.full + 8 * place.slot, place.round);
    if (item.end * KEYS > item.context) clear_values(l, place, item.context - (item.end - 1) * KEYS, group, warp % 4 * 32 + lane);
    begin_products();
    multiply_values(sums, weights, l, place);
    wait_for_products();
    settle(sums);
    if (lane == 0) arrive_at(l.empty + 8 * place.slot);
    move_on(place);
    if (item.part < 0)
      store(p, item, sums, rows, row, lane);
    else if (warp * 16 < item.count * GROUP && leave_part(p, item, sums, rows, warp, lane)) {
      add_parts(p, item, sums, rows, warp, lane);
      store(p, item, sums, rows, row, lane);
    }
    item = following;
  }
}

KERNEL_TOGETHER(paged_prefill, CONSUMERS + 32 * COPIERS, 1)(Args p, CONSTANT_MAP queries, CONSTANT_MAP keys, CONSTANT_MAP values) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = opaque(thread_id() >> 5);  // alike in a warp, as the compiler now knows
  const Layout l = layout_of(shared_address(shared));
  if (thread_id() == 0) {
    set_barrier(l.queries_full, 1);
    set_barrier(l.queries_empty, CONSUMERS / 32);
    for (int i = 0; i < SLOTS; i++) {
      set_barrier(l.full + 8 * i, COPIERS);
      set_barrier(l.empty + 8 * i, CONSUMERS / 32);
    }
    publish_barriers();
  }
  block_barrier();
  if (warp >= CONSUMERS / 32) {
    leave_registers<40>();
    copy_items(p, queries, keys, values, l, warp - CONSUMERS / 32, lane);
  } else {
    take_registers<232>();
    attend_items(p, l, warp, lane);
  }
}
