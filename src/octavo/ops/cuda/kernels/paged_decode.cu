// Attention of one query token a row over the paged cache, as fast as the cache comes from memory. A block stays on its SM and goes
// through items of a plan (`decode_plan`), each with one KV head:
//  * one warp has pages of keys and values copied into a ring in shared memory, far ahead, across items; it waits for the kernel before
//    only where that kernel writes: at the last page of a row;
//  * WARPS warps attend: each takes every WARPSth tile of 16 keys of an item. Keys are the rows of the tensor cores' first operand, the
//    heads that share them the columns of the second: eight, not sixteen, are the least;
//  * what the warps have of an item is added up in shared memory, in a fixed order, and what blocks have of a row by the last of them
//    (as in `split_softmax`). The ring fills meanwhile.

#define THREADS (32 * (WARPS + 1))
#define TILE_BYTES (16 * DIM * 2)  // of keys; as many of values
#define STAGE_BYTES (2 * TILE_BYTES)
#define STEPS (DIM / 16)
#define COLUMNS (BUNDLES ? 16 : GROUP_PAD)  // that are kept: GROUP_PAD of each row
#define OWN_TILES (GROUP_PAD > 8 ? 2 : 1)   // of eight columns, for a row alone
#define LINE (DIM + 4)                      // of sums: no bank conflicts, and whole vectors
#define ITEM_SLOTS 2
#define PARTS_AT_ONCE 16

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
  int table_stride, num_items, window;
  float scale;  // for scores in base 2
};

struct Layout {
  u32 ring, sums, stats, items, last, full, empty, item_full, item_empty;
};

INLINE Layout layout_of(u32 shared) {
  Layout l;
  l.ring = shared;
  l.sums = l.ring + STAGES * STAGE_BYTES;
  l.stats = l.sums + WARPS * COLUMNS * LINE * 4;
  l.items = l.stats + WARPS * COLUMNS * 8;
  l.last = l.items + ITEM_SLOTS * 64;
  l.full = l.last + 16;
  l.empty = l.full + 8 * STAGES;
  l.item_full = l.empty + 8 * STAGES;
  l.item_empty = l.item_full + 8 * ITEM_SLOTS;
  return l;
}

// Fields of an item as in `decode_plan`, and the KV head.
struct Item {
  int row, lo, hi, context, part, first_part, num_parts, members, head;
};

INLINE void copy_items(const Args& p, const Map& keys, const Map& values, const Layout& l, int lane) {
  int slot = 0, round = 0, n = 0;
  bool waited = false;
  if (lane == 0) prefetch_map(keys), prefetch_map(values);
  for (int work = block_x();; work += blocks_x(), n++) {
    const int item = work / KV_HEADS, head = work % KV_HEADS, item_slot = n % ITEM_SLOTS;
    int row = 0, lo = 0, hi = 0, context = 0;
    wait_at(l.item_empty + 8 * item_slot, (n / ITEM_SLOTS & 1) ^ 1);
    if (item < p.num_items) {
      const U4 first = load16(p.items + item * 8), second = load16(p.items + item * 8 + 4);
      row = first.v[0], lo = first.v[1], hi = first.v[2], context = first.v[3];
      if (lane == 0) {
        put_vector(l.items + item_slot * 64, first);
        put_vector(l.items + item_slot * 64 + 16, second);
        put_word(l.items + item_slot * 64 + 32, head);
      }
    } else if (lane == 0) {
      put_word(l.items + item_slot * 64 + 8, 0);
    }
    if (lane == 0) arrive_at(l.item_full + 8 * item_slot);
    if (hi <= 0) return;  // empty ones are the last
    const int tiles = (hi - lo + 15) / 16;
    const int* table = p.table + (long long)row * p.table_stride;
    for (int begin = 0; begin < tiles; begin += 32) {
      const int mine = lo + 16 * (begin + lane);
      const u32 entry = mine < hi ? load_number(table + mine / BLOCK) : 0;
      for (int i = 0; i < 32 && begin + i < tiles; i++) {
        const int block = of_lane(entry, i), at = lo + 16 * (begin + i);
        if (lane == 0) {
          wait_at(l.empty + 8 * slot, (round & 1) ^ 1);
          if (at + 16 >= context && !waited) wait_for_inputs(), waited = true;
          const u32 to = l.ring + slot * STAGE_BYTES, bar = l.full + 8 * slot;
          expect_bytes(bar, STAGE_BYTES);
          copy_page(to, keys, at % BLOCK, head, block, bar);
          copy_page(to + TILE_BYTES, values, at % BLOCK, head, block, bar);
        }
        if (++slot == STAGES) slot = 0, round++;
      }
    }
  }
}

// Where a warp is in the ring.
struct Place {
  int slot, round;
  int next;  // its next tile, counted from the item's first
};

// What a lane has of a warp's part of an item: of sums, in column tile i and rows of 16 of the head's elements, those of its quad's
// columns 2 * (lane % 4) and the next.
template <int TILES>
struct Sums {
  float acc[TILES][STEPS][4];
  float most[TILES][2], sum[TILES][2];
};

// Columns are the heads of one row, GROUP_PAD each; in a bundle, then those of the next.
INLINE bool in_use(const Item& item, int column) {
  return column % GROUP_PAD < GROUP && column / GROUP_PAD < (item.members > 0 ? item.members : 1);
}

template <int TILES>
INLINE void load_queries(u32 (&q)[TILES][STEPS][2], const Args& p, const Item& item, int lane) {
UNROLL
  for (int i = 0; i < TILES; i++) {
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
INLINE void attend_tiles(Sums<TILES>& sums, const Args& p, const Layout& l, const Item& item, Place& place, int lane) {
  u32 q[TILES][STEPS][2];
  load_queries<TILES>(q, p, item, lane);
UNROLL
  for (int i = 0; i < TILES; i++) {
UNROLL
    for (int s = 0; s < STEPS; s++)
UNROLL
      for (int e = 0; e < 4; e++) sums.acc[i][s][e] = 0.0f;
UNROLL
    for (int c = 0; c < 2; c++) sums.most[i][c] = -1.0e30f, sums.sum[i][c] = 0.0f;
  }
  const int tiles = (item.hi - item.lo + 15) / 16;
  const int seen_from = p.window > 0 ? item.context - p.window : 0;
  // Rows of 128 bytes, their 16-byte pieces exchanged by the row's number modulo 8. Lane 8 * i + j names row j of matrix i.
  const int j = lane & 7, key_of_k = j + (lane & 8), key_of_v = j + (lane >> 4) * 8;
  const u32 k_row = key_of_k * 128, v_row = TILE_BYTES + key_of_v * 128;
  for (; place.next < tiles; place.next += WARPS) {
    const int at = item.lo + 16 * place.next;
    const u32 stage = l.ring + place.slot * STAGE_BYTES;
    wait_at(l.full + 8 * place.slot, place.round & 1);
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
    if (lane == 0) arrive_at(l.empty + 8 * place.slot);
UNROLL
    for (int s = 0; s < STEPS; s++)
UNROLL
      for (int i = 0; i < TILES; i++) warp_mma(sums.acc[i][s], v[s], weights[i][0], weights[i][1]);
    place.slot += WARPS;
    if (place.slot >= STAGES) place.slot -= STAGES, place.round++;
  }
  place.next -= tiles;
}

template <int TILES>
INLINE void leave_in_shared(Sums<TILES>& sums, const Layout& l, int warp, int lane) {
UNROLL
  for (int i = 0; i < TILES; i++)
UNROLL
    for (int c = 0; c < 2; c++) {
      const int column = 8 * i + (lane & 3) * 2 + c;
      float sum = sums.sum[i][c];
UNROLL
      for (int by = 4; by < 32; by *= 2) sum += as_float(of_lane(as_bits(sum), lane ^ by));
      if (column >= COLUMNS) continue;
      const u32 to = l.sums + ((warp * COLUMNS + column) * LINE + (lane >> 2)) * 4, stats = l.stats + (warp * COLUMNS + column) * 8;
UNROLL
      for (int s = 0; s < STEPS; s++)
UNROLL
        for (int h = 0; h < 2; h++) put_shared(to + (16 * s + 8 * h) * 4, sums.acc[i][s][c + 2 * h]);
      if (lane < 4) put_shared(stats, sums.most[i][c]), put_shared(stats + 4, sum);
    }
}

INLINE void store_out(const Args& p, int row, int head, int g, int d, const float (&x)[4], float divisor) {
  if (g >= GROUP) return;
  const float factor = 1.0f / divisor;
  store8(p.out + row * p.out_stride + ((head * GROUP + g) * DIM + d) * 2, narrow2(x[0] * factor, x[1] * factor), narrow2(x[2] * factor, x[3] * factor));
}

// All parts of a row, in their order; a thread has four elements of a head.
INLINE void add_parts(const Args& p, int row, int head, int first_part, int num_parts) {
  for (int i = thread_id(); i < GROUP_PAD * DIM / 4; i += 32 * WARPS) {
    const int g = i / (DIM / 4), d = i % (DIM / 4) * 4;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f}, most = -1.0e30f, sum = 0.0f;
    for (int begin = 0; begin < num_parts; begin += PARTS_AT_ONCE) {
      float part[PARTS_AT_ONCE][4], stats[PARTS_AT_ONCE][2];
UNROLL
      for (int n = 0; n < PARTS_AT_ONCE; n++) {
        const int which = begin + n < num_parts ? begin + n : num_parts - 1;
        const long long place = ((long long)(first_part + which) * KV_HEADS + head) * GROUP_PAD + g;
        load_fresh(stats[n], p.stats + place * 2);
        load_fresh(part[n], p.sums + place * DIM + d);
      }
UNROLL
      for (int n = 0; n < PARTS_AT_ONCE; n++) {
        if (begin + n >= num_parts) break;
        const float higher = larger(most, stats[n][0]), fade = power_of_2(most - higher), weight = power_of_2(stats[n][0] - higher);
        most = higher;
        sum = sum * fade + stats[n][1] * weight;
UNROLL
        for (int e = 0; e < 4; e++) total[e] = total[e] * fade + part[n][e] * weight;
      }
    }
    store_out(p, row, head, g, d, total, sum);
  }
}

// What the warps have of an item, together: the output, or a part of it.
INLINE void finish_item(const Args& p, const Layout& l, const Item& item) {
  const int rows = item.members > 0 ? item.members : 1;
  some_barrier(32 * WARPS);
  for (int i = thread_id(); i < rows * GROUP_PAD * DIM / 4; i += 32 * WARPS) {
    const int column = i / (DIM / 4), d = i % (DIM / 4) * 4, g = column % GROUP_PAD;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f}, most = -1.0e30f, sum = 0.0f;
UNROLL
    for (int w = 0; w < WARPS; w++) most = larger(most, as_float(shared4(l.stats + (w * COLUMNS + column) * 8)));
UNROLL
    for (int w = 0; w < WARPS; w++) {
      const U4 stats = shared8(l.stats + (w * COLUMNS + column) * 8), part = shared16(l.sums + ((w * COLUMNS + column) * LINE + d) * 4);
      const float weight = power_of_2(as_float(stats.v[0]) - most);
      sum += as_float(stats.v[1]) * weight;
UNROLL
      for (int e = 0; e < 4; e++) total[e] += as_float(part.v[e]) * weight;
    }
    if (item.part < 0) {
      store_out(p, item.row, item.head, g, d, total, sum);
    } else {
      int part = item.part;
#if BUNDLES
      if (item.members > 0) part = load_number(p.members + (item.part + column / GROUP_PAD) * 4 + 1);
#endif
      const long long place = ((long long)part * KV_HEADS + item.head) * GROUP_PAD + g;
      store_floats(p.sums + place * DIM + d, total);
      if (d == 0) store_pair(p.stats + place * 2, most, sum);
    }
  }
  some_barrier(32 * WARPS);
  if (item.part < 0) return;
  for (int member = 0; member < rows; member++) {
    int row = item.row, first_part = item.first_part, num_parts = item.num_parts;
#if BUNDLES
    if (item.members > 0) {
      const U4 entry = load16(p.members + (item.part + member) * 4);
      row = entry.v[0], first_part = entry.v[2], num_parts = entry.v[3];
    }
#endif
    if (thread_id() == 0) put_word(l.last, counted_last(p.counters + (long long)first_part * KV_HEADS + item.head, num_parts));
    some_barrier(32 * WARPS);
    const bool last = shared4(l.last);
    if (last) add_parts(p, row, item.head, first_part, num_parts);
    some_barrier(32 * WARPS);
  }
}

template <int TILES>
INLINE void attend(const Args& p, const Layout& l, const Item& item, Place& place, int warp, int lane) {
  Sums<TILES> sums;
  attend_tiles<TILES>(sums, p, l, item, place, lane);
  leave_in_shared<TILES>(sums, l, warp, lane);
}

KERNEL(paged_decode, THREADS)(Args p, CONSTANT_MAP keys, CONSTANT_MAP values) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  const Layout l = layout_of(shared_address(shared));
  if (thread_id() == 0) {
    for (int i = 0; i < STAGES; i++) {
      set_barrier(l.full + 8 * i, 1);
      set_barrier(l.empty + 8 * i, 1);
    }
    for (int i = 0; i < ITEM_SLOTS; i++) {
      set_barrier(l.item_full + 8 * i, 1);
      set_barrier(l.item_empty + 8 * i, WARPS);
    }
    publish_barriers();
  }
  block_barrier();
  if (warp == WARPS) {
    copy_items(p, keys, values, l, lane);
    return;
  }
  wait_for_inputs();
  release_dependents();
  Place place = {warp, 0, warp};
  for (int n = 0;; n++) {
    const int slot = n % ITEM_SLOTS;
    const u32 at = l.items + slot * 64;
    wait_at(l.item_full + 8 * slot, n / ITEM_SLOTS & 1);
    const U4 first = shared16(at), second = shared16(at + 16);
    const Item item = {(int)first.v[0], (int)first.v[1], (int)first.v[2], (int)first.v[3], (int)second.v[0],
                       (int)second.v[1], (int)second.v[2], (int)second.v[3], (int)shared4(at + 32)};
    if (item.hi <= 0) return;
    warp_barrier();
    if (lane == 0) arrive_at(l.item_empty + 8 * slot);
#if BUNDLES && OWN_TILES == 1
    if (item.members * GROUP_PAD > 8) attend<2>(p, l, item, place, warp, lane);
    else attend<1>(p, l, item, place, warp, lane);
#else
    attend<OWN_TILES>(p, l, item, place, warp, lane);
#endif
    finish_item(p, l, item);
  }
}
