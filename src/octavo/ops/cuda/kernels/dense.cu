// x @ W.T for few rows of x, as fast as W comes from memory, both as the tensor cores read them: the copy engine brings rows of 128
// bytes in the order that has no bank conflicts. A block stays on its SM and goes through its share of tiles of W:
//  * one thread has W copied far ahead, and does not wait for x before the ring is full of it: so W comes in while the kernel
//    before, which makes x, still runs;
//  * warpgroups multiply: 64 rows of x each with the same COLUMNS rows of W. Rows that x does not have are whatever lies behind it in
//    shared memory: products of rows are independent of each other, and those are not stored.
// SPLIT blocks share the inner dimension of a tile; the last one to arrive adds up the parts in their order.

#define CONSUMERS (128 * WARPGROUPS)
#define X_BYTES (DEPTH * ROWS * 128)
#define STAGE_BYTES (X_BYTES + DEPTH * COLUMNS * 128)
#define RING_BYTES (STAGES * STAGE_BYTES)
#define USED_WARPS ((ROWS + 15) / 16)  // that have rows of x
#define VECTORS (COLUMNS / 8)          // of four sums a lane has

struct Args {
  const float* x_scale;
  const float* w_scale;
  const u8* bias;
  u8* out;
  float* parts;
  int* counters;
  int rows, columns, chunks;
  int out_stride;  // bytes
  int x_scale_stride;
};

// A block's share: tiles of W and ranges of the inner dimension, in stages of DEPTH chunks.
struct Place {
  int item, stage, end;
};

INLINE void enter_item(Place& at, const Args& p) {
  const int stages = (p.chunks + DEPTH - 1) / DEPTH, share = (stages + SPLIT - 1) / SPLIT;
  at.stage = at.item % SPLIT * share;
  at.end = at.stage + share < stages ? at.stage + share : stages;
}
INLINE int items_of(const Args& p) { return (p.columns + COLUMNS - 1) / COLUMNS * SPLIT; }
// The next stage; false behind the last.
INLINE bool advance(Place& at, const Args& p) {
  if (++at.stage < at.end) return true;
  at.item += blocks_x();
  if (at.item >= items_of(p)) return false;
  enter_item(at, p);
  return true;
}

INLINE void copy_w(u32 stage, u32 full, const Place& at, const Map& w) {
  expect_bytes(full, STAGE_BYTES);
  copy_box_once(stage + X_BYTES, w, at.item / SPLIT * COLUMNS, at.stage * DEPTH, full);
}

INLINE void copy_all(u32 ring, u32 full, u32 empty, const Args& p, const Map& x, const Map& w) {
  Place first{block_x(), 0, 0}, at;
  enter_item(first, p);
  at = first;
  int ahead = 0;
  bool more = true;
  for (; more && ahead < STAGES; ahead++, more = advance(at, p)) copy_w(ring + ahead * STAGE_BYTES, full + 8 * ahead, at, w);
  wait_for_inputs();
  release_dependents();
  for (int slot = 0; slot < ahead; slot++, advance(first, p)) copy_box(ring + slot * STAGE_BYTES, x, 0, first.stage * DEPTH, full + 8 * slot);
  for (int slot = 0, round = 0; more; more = advance(at, p)) {
    wait_at(empty + 8 * slot, round);
    copy_w(ring + slot * STAGE_BYTES, full + 8 * slot, at, w);
    copy_box(ring + slot * STAGE_BYTES, x, 0, at.stage * DEPTH, full + 8 * slot);
    if (++slot == STAGES) slot = 0, round ^= 1;
  }
}

// What goes with two columns: asked for a while before, since it does not depend on x.
struct Columns {
#if SCALED
  float scale[2];
#endif
#if BIAS
  u32 bias;
#endif
};

INLINE Columns columns_of(const Args& p, int tile, int vector, int lane) {
  Columns c;
  const int n = tile * COLUMNS + vector * 8 + (lane & 3) * 2;
#if SCALED
  c.scale[0] = n < p.columns ? p.w_scale[n / W_SCALE_ROWS] : 0.0f;
  c.scale[1] = n < p.columns ? p.w_scale[(n + 1) / W_SCALE_ROWS] : 0.0f;
#endif
#if BIAS
  c.bias = n < p.columns ? *(const u32*)(p.bias + 2 * n) : 0;
#endif
  return c;
}

// The scales of a lane's two rows of x.
struct Scales {
  float row[2];
};

INLINE Scales scales_of(const Args& p, int warp, int lane) {
  Scales s{{1.0f, 1.0f}};
#if SCALED
UNROLL
  for (int h = 0; h < 2; h++) {
    const int m = warp * 16 + h * 8 + (lane >> 2);
    s.row[h] = p.x_scale[m < p.rows ? m * p.x_scale_stride : 0];
  }
#endif
  return s;
}

// Of a lane's vector: two rows 8 apart, two columns.
INLINE void store_vector(const Args& p, int tile, int warp, int vector, int lane, const Scales& scales, const Columns& c, const float (&sums)[4]) {
  const int n = tile * COLUMNS + vector * 8 + (lane & 3) * 2;
UNROLL
  for (int h = 0; h < 2; h++) {
    const int m = warp * 16 + h * 8 + (lane >> 2);
    float a = sums[2 * h], b = sums[2 * h + 1];
#if SCALED
    a *= scales.row[h] * c.scale[0], b *= scales.row[h] * c.scale[1];
#endif
#if BIAS
    a += widen(c.bias), b += widen(c.bias >> 16);
#endif
    // Both columns or none: there are an even number of them.
    if (m < p.rows && n < p.columns) *(u32*)(p.out + (long long)m * p.out_stride + 2ll * n) = narrow(a) | (u32)narrow(b) << 16;
  }
}

KERNEL(dense_rows, CONSUMERS + 32)(Args p, CONSTANT_MAP x, CONSTANT_MAP w) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  // Behind the ring there is room for rows that x does not have.
  const u32 ring = shared_address(shared), full = ring + RING_BYTES + PADDING, empty = full + 8 * STAGES;
#if SPLIT > 1
  int* last = (int*)(shared + RING_BYTES + PADDING + 16 * STAGES);
#endif
  if (thread_id() == 0) {
    for (int s = 0; s < STAGES; s++) {
      set_barrier(full + 8 * s, 1);
      set_barrier(empty + 8 * s, 4 * WARPGROUPS);
    }
    publish_barriers();
  }
  block_barrier();
  if (warp == 4 * WARPGROUPS) {
    if (lane == 0) copy_all(ring, full, empty, p, x, w);
    return;
  }
  int slot = 0, round = 0;
  bool first = true;
  for (Place at{block_x(), 0, 0}; at.item < items_of(p); at.item += blocks_x()) {
    enter_item(at, p);
    const int tile = at.item / SPLIT;
#if SPLIT == 1
    Columns columns[VECTORS];
    if (warp < USED_WARPS) {
UNROLL
      for (int v = 0; v < VECTORS; v++) columns[v] = columns_of(p, tile, v, lane);
    }
#endif
    if (first) wait_for_inputs();
    first = false;
    float acc[COLUMNS / 2];
UNROLL
    for (int i = 0; i < COLUMNS / 2; i++) acc[i] = 0.0f;
    u32 done = 0;
    for (; at.stage < at.end; at.stage++) {
      wait_at(full + 8 * slot, round);
      const u32 stage = ring + slot * STAGE_BYTES;
      begin_products();
UNROLL
      for (int d = 0; d < DEPTH; d++)
UNROLL
        for (int step = 0; step < 4; step++)
          dense_mma(acc, stage + d * (ROWS * 128) + (warp >> 2) * 8192, stage + X_BYTES + d * (COLUMNS * 128), step * 32);
      close_products();
      wait_for_products_but_one();
      if (done && lane == 0) arrive_at(done);
      done = empty + 8 * slot;
      if (++slot == STAGES) slot = 0, round ^= 1;
    }
    wait_for_products();
    if (done && lane == 0) arrive_at(done);

#if SPLIT == 1
    if (warp < USED_WARPS) {
      const Scales scales = scales_of(p, warp, lane);
UNROLL
      for (int v = 0; v < VECTORS; v++) store_vector(p, tile, warp, v, lane, scales, columns[v], {acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]});
    }
#else
    float* parts = p.parts + (long long)tile * (SPLIT * USED_WARPS * VECTORS * 128);
    if (warp < USED_WARPS) {
      float* part = parts + (at.item % SPLIT * USED_WARPS + warp) * (VECTORS * 128) + lane * 4;
UNROLL
      for (int v = 0; v < VECTORS; v++) store_floats(part + v * 128, {acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]});
    }
    some_barrier(CONSUMERS);
    if (thread_id() == 0) *last = counted_last(p.counters + tile, SPLIT);
    some_barrier(CONSUMERS);
    if (*last) {
      for (int i = warp; i < USED_WARPS * VECTORS; i += 4 * WARPGROUPS) {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
UNROLL
        for (int s = 0; s < SPLIT; s++) {
          float part[4];
          load_fresh(part, parts + (s * USED_WARPS * VECTORS + i) * 128 + lane * 4, true);
UNROLL
          for (int k = 0; k < 4; k++) sums[k] += part[k];
        }
        store_vector(p, tile, i / VECTORS, i % VECTORS, lane, scales_of(p, i / VECTORS, lane), columns_of(p, tile, i % VECTORS, lane), sums);
      }
    }
#endif
  }
}
