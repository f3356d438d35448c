// Attention of one query token a row over the paged cache, as fast as the cache comes from memory. A block stays on its SM and goes
// through the items that a plan has for it (`even_plan`), each with one KV head:
//  * WARPS warps have pages of keys and values copied into rings in shared memory, far ahead, across items: each for one of the others,
//    since a thread issues a copy only every 90 ns. They wait for the kernel before only where that kernel writes: at the last page of
//    a row;
//  * WARPS warps attend: each takes every WARPSth tile of 16 keys of an item. Keys are the rows of the tensor cores' first operand, the
//    heads that share them the columns of the second: eight, not sixteen, are the least;
//  * WARPS warps finish: they add up what those have of an item, in a fixed order, and where blocks share a row, the last of them adds up
//    what all have. What they do they do once for nothing at the start: its instructions take a microsecond to come, which is then not
//    at the end, where all wait for it.
// What is read in the ordinary way waits behind the copies that are under way, for up to 6 microseconds: so items and queries are read
// ahead too, and who attends waits for nothing else.

#define WARPS 4
#define THREADS (96 * WARPS)
#define TILE_BYTES (16 * DIM * 2)  // of keys; as many of values
#define STAGE_BYTES (2 * TILE_BYTES)
#define STEPS (DIM / 16)
#define COLUMNS (BUNDLES ? 16 : GROUP_PAD)  // that are kept: GROUP_PAD of each row
#define OWN_TILES (GROUP_PAD > 8 ? 2 : 1)   // of eight columns, for a row alone
#define LINE (DIM + 4)                      // of sums: no bank conflicts, and whole vectors
#define PARTS_AT_ONCE 16
#define QUERY_TILES (BUNDLES ? 2 : OWN_TILES)
#define SUMS_BYTES (WARPS * COLUMNS * LINE * 4)
#define STATS_BYTES (WARPS * COLUMNS * 8)

struct Args {
  const u8* q;
  const int* table;
  const int* items;
  const int* members;
  u8* out;
  float* sums;
  float* stats;
  int* counters;
  long long q_stride, out_stride;  // bytes
  int table_stride, window;
  float scale;  // for scores in base 2
  int early;    // the next kernel may start at once
};

struct Layout {
  u32 ring, sums, stats, last, full, empty, ready, taken;
};

INLINE Layout layout_of(u32 shared) {
  Layout l;
  l.ring = shared;
  l.sums = l.ring + WARPS * STAGES * STAGE_BYTES;
  l.stats = l.sums + BUFFERS * SUMS_BYTES;
  l.last = l.stats + BUFFERS * STATS_BYTES;
  l.full = l.last + 16;
  l.empty = l.full + 8 * WARPS * STAGES;
  l.ready = l.empty + 8 * WARPS * STAGES;
  l.taken = l.ready + 8 * BUFFERS;
  return l;
}

// See `even_plan`. For NOBODY, nothing is read or written.
#define NOBODY -1
struct Item {
  int row, lo, hi, context, part, first_part, num_parts, members, head, next;
};

INLINE Item load_item(const Args& p, int place) {
  const int* at = p.items + place * 12;
  const U4 a = load16(at), b = load16(at + 4), c = load16(at + 8);
  return Item{(int)a.v[0], (int)a.v[1], (int)a.v[2], (int)a.v[3], (int)b.v[0], (int)b.v[1], (int)b.v[2], (int)b.v[3], (int)c.v[0], (int)c.v[1]};
}

INLINE int tiles_of(const Item& item) { return (item.hi - item.lo + 15) / 16; }

// Where a warp is in its ring.
struct Place {
  int slot, round;
  int next;  // its next tile, counted from the item's first
};

INLINE void move_on(Place& place) {
  place.next += WARPS;
  if (++place.slot == STAGES) place.slot = 0, place.round++;
}

// Of the tiles that a warp has from `next` on, every WARPSth: the block that holds this lane's.
INLINE int load_block(const Args& p, const Item& item, int next, int lane) {
  const int at = item.lo + 16 * (next + WARPS * lane);
  return at < item.hi ? load_number(p.table + (long long)item.row * p.table_stride + at / BLOCK) : 0;
}

INLINE void copy_items(const Args& p, const Map& keys, const Map& values, const Layout& l, int warp, int lane) {
  if (lane == 0) prefetch_map(keys), prefetch_map(values);
  Place place = {0, 0, warp};
  bool waited = false;
  Item item = load_item(p, block_x()), following = {};
  if (item.next > 0) following = load_item(p, item.next);
  int blocks = load_block(p, item, place.next, lane);
  while (item.hi > 0) {
    const int tiles = tiles_of(item), after = place.next + 32 * WARPS;
    const bool ends = after >= tiles;
    const int left = tiles > place.next ? (tiles - place.next + WARPS - 1) / WARPS : 0;
    const int next_blocks = ends ? load_block(p, following, place.next + left * WARPS - tiles, lane) : load_block(p, item, after, lane);
    Item second = {};
    if (ends && following.next > 0) second = load_item(p, following.next);
    for (int i = 0; i < 32 && i < left; i++, move_on(place)) {
      const int block = of_lane(blocks, i), at = item.lo + 16 * place.next, slot = warp * STAGES + place.slot;
      if (lane != 0) continue;
      const u32 to = l.ring + slot * STAGE_BYTES, bar = l.full + 8 * slot;
      wait_at(l.empty + 8 * slot, (place.round & 1) ^ 1);
      if (at + 16 >= item.context && !waited) wait_for_inputs(), waited = true;
      expect_bytes(bar, STAGE_BYTES);
      copy_page(to, keys, at % BLOCK, item.head, block, bar);
      copy_page(to + TILE_BYTES, values, at % BLOCK, item.head, block, bar);
    }
    blocks = next_blocks;
    if (ends) place.next -= tiles, item = following, following = second;
  }
}

// What a lane has of a warp's part of an item: of sums, in column tile i and rows of 16 of the head's elements, those of its quad's
// columns 2 * (lane % 4) and the next.
template <int TILES>
struct Sums {
  float acc[TILES][STEPS][4];
  float most[TILES][2], sum[TILES][2];
};

// Columns are the heads of one row, GROUP_PAD each; in a bundle, then those of the next.
INLINE bool in_use(const Item& item, int column) {
  return item.hi > 0 && column % GROUP_PAD < GROUP && column / GROUP_PAD < (item.members > 0 ? item.members : 1);
}

typedef u32 Queries[QUERY_TILES][STEPS][2];

INLINE void load_queries(Queries& q, const Args& p, const Item& item, int lane) {
UNROLL
  for (int i = 0; i < QUERY_TILES; i++) {
    const int column = 8 * i + (lane >> 2);
    const bool used = in_use(item, column);
    int row = item.row;
#if BUNDLES
    if (used && item.members > 0) row = load_number(p.members + (item.part + column / GROUP_PAD) * 4);
#endif
    const u8* at = p.q + row * p.q_stride + ((item.head * GROUP + column % GROUP_PAD) * DIM + (lane & 3) * 2) * 2;
UNROLL
    for (int s = 0; s < STEPS; s++)
UNROLL
      for (int h = 0; h < 2; h++) q[i][s][h] = used ? load_number((const int*)(at + (16 * s + 8 * h) * 2)) : 0;
  }
}

template <int TILES>
INLINE void attend_tiles(Sums<TILES>& sums, const Queries& q, const Args& p, const Layout& l, const Item& item, Place& place, int warp, int lane) {
UNROLL
  for (int i = 0; i < TILES; i++) {
UNROLL
    for (int s = 0; s < STEPS; s++)
UNROLL
      for (int e = 0; e < 4; e++) sums.acc[i][s][e] = 0.0f;
UNROLL
    for (int c = 0; c < 2; c++) sums.most[i][c] = -1.0e30f, sums.sum[i][c] = 0.0f;
  }
  const int tiles = tiles_of(item);
  const int seen_from = p.window > 0 ? item.context - p.window : 0;
  // Rows of 128 bytes, their 16-byte pieces exchanged by the row's number modulo 8. Lane 8 * i + j names row j of matrix i.
  const int j = lane & 7, key_of_k = j + (lane & 8), key_of_v = j + (lane >> 4) * 8;
  const u32 k_row = key_of_k * 128, v_row = TILE_BYTES + key_of_v * 128;
  for (; place.next < tiles; move_on(place)) {
    const int at = item.lo + 16 * place.next, slot = warp * STAGES + place.slot;
    const u32 stage = l.ring + slot * STAGE_BYTES;
    wait_at(l.full + 8 * slot, place.round & 1);
    float scores[TILES][2][4];
UNROLL
    for (int i = 0; i < TILES; i++)
UNROLL
      for (int e = 0; e < 4; e++) scores[i][0][e] = scores[i][1][e] = 0.0f;
UNROLL
    for (int s = 0; s < STEPS; s++) {
      const int piece = 2 * s + (lane >> 4);
      u32 k[4];
      load_matrices(k, stage + piece / 8 * 2048 + k_row + ((piece ^ j) & 7) * 16);
UNROLL
      for (int i = 0; i < TILES; i++) warp_mma(scores[i][s & 1], k, q[i][s][0], q[i][s][1]);  // two chains: half the latency
    }
    u32 v[STEPS][4], check = 0;
UNROLL
    for (int s = 0; s < STEPS; s++) {
      const int piece = 2 * s + (lane >> 3 & 1);
      load_transposed(v[s], stage + piece / 8 * 2048 + v_row + ((piece ^ j) & 7) * 16);
      check ^= v[s][0];
    }
    float x[TILES][4];
    bool rises = false;
    const bool edge = at + 16 > item.hi || at < seen_from;
UNROLL
    for (int i = 0; i < TILES; i++)
UNROLL
      for (int e = 0; e < 4; e++) {
        x[i][e] = (scores[i][0][e] + scores[i][1][e]) * p.scale;
        // Anything may lie past the context, NaN included: such keys count for nothing, and so do their values.
        const int key = at + (lane >> 2) + 8 * (e >> 1);
        if (edge && (key >= item.hi || key < seen_from)) x[i][e] = -INFINITE;
        // What all is measured by may be up to 2^8 too small: it follows only now and then.
        rises |= x[i][e] > sums.most[i][e & 1] + 8.0f;
      }
    if (any_lane(rises)) {
UNROLL
      for (int i = 0; i < TILES; i++)
UNROLL
        for (int c = 0; c < 2; c++) {
          float most = larger(larger(x[i][c], x[i][c + 2]), sums.most[i][c]);
UNROLL
          for (int by = 4; by < 32; by *= 2) most = larger(most, as_float(of_lane(as_bits(most), lane ^ by)));
          const float fade = power_of_2(sums.most[i][c] - most);
          sums.most[i][c] = most;
          sums.sum[i][c] *= fade;
UNROLL
          for (int s = 0; s < STEPS; s++) sums.acc[i][s][c] *= fade, sums.acc[i][s][c + 2] *= fade;
        }
    }
    u32 weights[TILES][2];
UNROLL
    for (int i = 0; i < TILES; i++) {
UNROLL
      for (int e = 0; e < 4; e++) {
        x[i][e] = power_of_2(x[i][e] - sums.most[i][e & 1]);
        sums.sum[i][e & 1] += x[i][e];
      }
UNROLL
      for (int h = 0; h < 2; h++) weights[i][h] = transpose(narrow2(x[i][2 * h], x[i][2 * h + 1]));
    }
    if (edge) {
UNROLL
      for (int h = 0; h < 2; h++) {
        const int left = item.hi - at - 8 * h - (lane & 3) * 2;
        const u32 kept = (left > 0 ? 0xffffu : 0) | (left > 1 ? 0xffff0000u : 0);
UNROLL
        for (int s = 0; s < STEPS; s++) v[s][2 * h] &= kept, v[s][2 * h + 1] &= kept;
      }
    }
    wait_for_loads(check, weights[0][0]);  // or what is copied next could overtake them
    if (lane == 0) arrive_at(l.empty + 8 * slot);
UNROLL
    for (int s = 0; s < STEPS; s++)
UNROLL
      for (int i = 0; i < TILES; i++) warp_mma(sums.acc[i][s], v[s], weights[i][0], weights[i][1]);
  }
  place.next -= tiles;
}

template <int TILES>
INLINE void leave_in_shared(Sums<TILES>& sums, const Layout& l, int buffer, int warp, int lane) {
UNROLL
  for (int i = 0; i < TILES; i++)
UNROLL
    for (int c = 0; c < 2; c++) {
      const int column = 8 * i + (lane & 3) * 2 + c;
      float sum = sums.sum[i][c];
UNROLL
      for (int by = 4; by < 32; by *= 2) sum += as_float(of_lane(as_bits(sum), lane ^ by));
      if (column >= COLUMNS) continue;
      const u32 to = l.sums + buffer * SUMS_BYTES + ((warp * COLUMNS + column) * LINE + (lane >> 2)) * 4;
      const u32 stats = l.stats + buffer * STATS_BYTES + (warp * COLUMNS + column) * 8;
UNROLL
      for (int s = 0; s < STEPS; s++)
UNROLL
        for (int h = 0; h < 2; h++) put_shared(to + (16 * s + 8 * h) * 4, sums.acc[i][s][c + 2 * h]);
      if (lane < 4) put_shared(stats, sums.most[i][c]), put_shared(stats + 4, sum);
    }
}

INLINE void store_out(const Args& p, int row, int head, int g, int d, const float (&x)[4], float divisor) {
  if (g >= GROUP || row == NOBODY) return;
  const float factor = 1.0f / divisor;
  store8(p.out + row * p.out_stride + ((head * GROUP + g) * DIM + d) * 2, narrow2(x[0] * factor, x[1] * factor), narrow2(x[2] * factor, x[3] * factor));
}

// All parts of a row, in their order; a thread has four elements of a head.
INLINE void add_parts(const Args& p, int row, int head, int first_part, int num_parts, int thread) {
  for (int i = thread; i < GROUP_PAD * DIM / 4; i += 32 * WARPS) {
    const int g = i / (DIM / 4), d = i % (DIM / 4) * 4;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f}, most = -1.0e30f, sum = 0.0f;
    for (int begin = 0; begin < num_parts; begin += PARTS_AT_ONCE) {
      // No branch between these loads: they are to be on their way together.
      float part[PARTS_AT_ONCE][4], stats[PARTS_AT_ONCE][2];
UNROLL
      for (int n = 0; n < PARTS_AT_ONCE; n++) {
        const long long place = (long long)(first_part + smaller(begin + n, num_parts - 1)) * GROUP_PAD + g;
        load_fresh(stats[n], p.stats + place * 2, row != NOBODY);
        load_fresh(part[n], p.sums + place * DIM + d, row != NOBODY);
      }
      float higher = most;
UNROLL
      for (int n = 0; n < PARTS_AT_ONCE; n++) higher = larger(higher, stats[n][0]);
      const float fade = power_of_2(most - higher);
      most = higher;
      sum *= fade;
UNROLL
      for (int e = 0; e < 4; e++) total[e] *= fade;
UNROLL
      for (int n = 0; n < PARTS_AT_ONCE; n++) {
        const float weight = begin + n < num_parts ? power_of_2(stats[n][0] - higher) : 0.0f;
        sum += stats[n][1] * weight;
UNROLL
        for (int e = 0; e < 4; e++) total[e] += part[n][e] * weight;
      }
    }
    store_out(p, row, head, g, d, total, sum);
  }
}

// What the warps have of an item, together: the output, or a part of it.
INLINE void finish_item(const Args& p, const Layout& l, const Item& item, int buffer, int thread) {
  const int rows = item.members > 0 ? item.members : 1;
  const u32 sums_at = l.sums + buffer * SUMS_BYTES, stats_at = l.stats + buffer * STATS_BYTES;
  for (int i = thread; i < rows * GROUP_PAD * DIM / 4; i += 32 * WARPS) {
    const int column = i / (DIM / 4), d = i % (DIM / 4) * 4, g = column % GROUP_PAD;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f}, most = -1.0e30f, sum = 0.0f;
UNROLL
    for (int w = 0; w < WARPS; w++) most = larger(most, as_float(shared4(stats_at + (w * COLUMNS + column) * 8)));
UNROLL
    for (int w = 0; w < WARPS; w++) {
      const U4 stats = shared8(stats_at + (w * COLUMNS + column) * 8), part = shared16(sums_at + ((w * COLUMNS + column) * LINE + d) * 4);
      const float weight = power_of_2(as_float(stats.v[0]) - most);
      sum += as_float(stats.v[1]) * weight;
UNROLL
      for (int e = 0; e < 4; e++) total[e] += as_float(part.v[e]) * weight;
    }
    if (item.part < 0) {
      store_out(p, item.row, item.head, g, d, total, sum);
    } else if (item.row != NOBODY) {
      int part = item.part;
#if BUNDLES
      if (item.members > 0) part = load_number(p.members + (item.part + column / GROUP_PAD) * 4 + 1);
#endif
      const long long place = (long long)part * GROUP_PAD + g;
      store_floats(p.sums + place * DIM + d, total);
      if (d == 0) store_pair(p.stats + place * 2, most, sum);
    }
  }
  some_barrier(32 * WARPS);
  if (thread == 0 && item.row != NOBODY) arrive_at(l.taken + 8 * buffer);
  if (item.part < 0) return;
  for (int member = 0; member < rows; member++) {
    int row = item.row, first_part = item.first_part, num_parts = item.num_parts;
#if BUNDLES
    if (item.members > 0) {
      const U4 entry = load16(p.members + (item.part + member) * 4);
      row = entry.v[0], first_part = entry.v[2], num_parts = entry.v[3];
    }
#endif
    if (thread == 0) put_word(l.last, row == NOBODY || counted_last(p.counters + first_part, num_parts));
    some_barrier(32 * WARPS);
    const bool last = shared4(l.last);
    if (last) add_parts(p, row, item.head, first_part, num_parts, thread);
    some_barrier(32 * WARPS);
  }
}

INLINE void finish_items(const Args& p, const Layout& l, int thread) {
  const Item first = load_item(p, block_x());
  Item item = {NOBODY, 0, 0, 0, 0, 0, 1, 0, 0, 0};
  for (int n = -1;; n++) {
    const int buffer = n < 0 ? 0 : n % BUFFERS;
    Item following = first;
    if (n >= 0) {
      following = Item{};
      if (item.next > 0) following = load_item(p, item.next);
      wait_at(l.ready + 8 * buffer, n / BUFFERS & 1);
    }
    finish_item(p, l, item, buffer, thread);
    if (n < 0) wait_for_inputs();
    item = following;
    if (item.hi <= 0) return;
  }
}

template <int TILES>
INLINE void attend(const Queries& q, const Args& p, const Layout& l, const Item& item, Place& place, int n, int warp, int lane) {
  Sums<TILES> sums;
  attend_tiles<TILES>(sums, q, p, l, item, place, warp, lane);
  wait_at(l.taken + 8 * (n % BUFFERS), (n / BUFFERS & 1) ^ 1);
  leave_in_shared<TILES>(sums, l, n % BUFFERS, warp, lane);
  warp_barrier();
  if (lane == 0) arrive_at(l.ready + 8 * (n % BUFFERS));
}

INLINE void attend_items(const Args& p, const Layout& l, int warp, int lane) {
  Item item = load_item(p, block_x()), following = {};
  if (p.early) release_dependents();
  wait_for_inputs();
  if (!p.early) release_dependents();
  Place place = {0, 0, warp};
  Queries q, next_q;
  load_queries(q, p, item, lane);
  if (item.next > 0) following = load_item(p, item.next);
  for (int n = 0; item.hi > 0; n++) {
    Item second = {};
    load_queries(next_q, p, following, lane);
    if (following.next > 0) second = load_item(p, following.next);
#if BUNDLES && OWN_TILES == 1
    if (item.members * GROUP_PAD > 8) attend<2>(q, p, l, item, place, n, warp, lane);
    else attend<1>(q, p, l, item, place, n, warp, lane);
#else
    attend<OWN_TILES>(q, p, l, item, place, n, warp, lane);
#endif
    item = following, following = second;
UNROLL
    for (int i = 0; i < QUERY_TILES; i++)
UNROLL
      for (int s = 0; s < STEPS; s++)
UNROLL
        for (int h = 0; h < 2; h++) q[i][s][h] = next_q[i][s][h];
  }
}

KERNEL_TOGETHER(paged_decode, THREADS, 1)(Args p, CONSTANT_MAP keys, CONSTANT_MAP values) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  const Layout l = layout_of(shared_address(shared));
  if (thread_id() == 0) {
    for (int i = 0; i < WARPS * STAGES; i++) {
      set_barrier(l.full + 8 * i, 1);
      set_barrier(l.empty + 8 * i, 1);
    }
    for (int i = 0; i < BUFFERS; i++) {
      set_barrier(l.ready + 8 * i, WARPS);
      set_barrier(l.taken + 8 * i, 1);
    }
    publish_barriers();
  }
  block_barrier();
  // A warp group each, which exchange registers: 168 are each thread's share.
  if (warp < WARPS) {
    take_registers<240>();
    attend_items(p, l, warp, lane);
  } else if (warp < 2 * WARPS) {
    leave_registers<56>();
    copy_items(p, keys, values, l, warp - WARPS, lane);
  } else {
    take_registers<208>();
    finish_items(p, l, thread_id() - 64 * WARPS);
  }
}
