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
  int x_scale_stride, w_scale_rows;
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
  copy_box(stage + X_BYTES, w, at.item / SPLIT * COLUMNS, at.stage * DEPTH, full);
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

INLINE void store_pair(const Args& p, int m, int n, float a, float b) {
  if (m >= p.rows || n >= p.columns) return;  // both or none: columns are even
#if SCALED
  const float scale = p.x_scale[m * p.x_scale_stride];
  a *= scale * p.w_scale[n / p.w_scale_rows];
  b *= scale * p.w_scale[(n + 1) / p.w_scale_rows];
#endif
#if BIAS
  const u32 bias = *(const u32*)(p.bias + 2 * n);
  a += widen(bias), b += widen(bias >> 16);
#endif
  *(u32*)(p.out + (long long)m * p.out_stride + 2ll * n) = narrow(a) | (u32)narrow(b) << 16;
}

// Of a lane's vector: two rows 8 apart, two columns.
INLINE void store_vector(const Args& p, int tile, int warp, int vector, int lane, const float (&sums)[4]) {
  const int m = warp * 16 + (lane >> 2), n = tile * COLUMNS + vector * 8 + (lane & 3) * 2;
  store_pair(p, m, n, sums[0], sums[1]);
  store_pair(p, m + 8, n, sums[2], sums[3]);
}

KERNEL(dense_rows, CONSUMERS + 32)(Args p, CONSTANT_MAP x, CONSTANT_MAP w) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  // Behind the ring there is room for rows that x does not have.
  const u32 ring = shared_address(shared), full = ring + RING_BYTES + PADDING, empty = full + 8 * STAGES;
  int* last = (int*)(shared + RING_BYTES + PADDING + 16 * STAGES);
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
  wait_for_inputs();
  int slot = 0, round = 0;
  for (Place at{block_x(), 0, 0}; at.item < items_of(p); at.item += blocks_x()) {
    enter_item(at, p);
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

    const int tile = at.item / SPLIT;
#if SPLIT == 1
    if (warp < USED_WARPS) {
UNROLL
      for (int v = 0; v < VECTORS; v++) store_vector(p, tile, warp, v, lane, {acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]});
    }
#else
    float* parts = p.parts + (long long)tile * (SPLIT * USED_WARPS * VECTORS * 128);
    if (warp < USED_WARPS) {
      float* part = parts + (at.item % SPLIT * USED_WARPS + warp) * (VECTORS * 128) + lane * 4;
UNROLL
      for (int v = 0; v < VECTORS; v++) store_floats(part + v * 128, {acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]});
    }
    barrier_of(CONSUMERS);
    if (thread_id() == 0) *last = counted_last(p.counters + tile, SPLIT);
    barrier_of(CONSUMERS);
    if (*last) {
      for (int i = warp; i < USED_WARPS * VECTORS; i += 4 * WARPGROUPS) {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
UNROLL
        for (int s = 0; s < SPLIT; s++) {
          const U4 part = load_fresh16(parts + (s * USED_WARPS * VECTORS + i) * 128 + lane * 4);
UNROLL
          for (int k = 0; k < 4; k++) sums[k] += as_float(part.v[k]);
        }
        store_vector(p, tile, i / VECTORS, i % VECTORS, lane, sums);
      }
    }
#endif
  }
}
