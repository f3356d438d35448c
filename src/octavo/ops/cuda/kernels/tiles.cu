// x @ W.T for more rows of x, ROWS a block: each warp of a warpgroup turns 16 rows of W into operands in registers, which the tensor
// cores multiply with x, which lies in shared memory in the order that the lanes' inner elements have. Several blocks share an SM, so
// that one multiplies while another turns: a block that did both at once would need twice the registers.

#define THREADS (128 * WARPGROUPS)
#define TILE_BYTES (ROWS * 128)  // 64 inner elements of x
#define X_BYTES (TILE_BYTES * (CHUNK < 64 ? 1 : CHUNK / 64))
#define W_BYTES (64 * WARPGROUPS * WIDTH)
#define VECTORS_A_ROW (CHUNK / 8)
#define VECTORS ((ROWS * VECTORS_A_ROW + THREADS - 1) / THREADS)  // that a thread moves
#define TOGETHER (THREADS / VECTORS_A_ROW)                        // rows that all threads move at once

// Which vectors of 8 inner elements of x a thread moves: the same ones of every TOGETHERth row.
struct Mover {
  const u8* from;
  int row;
  u32 to[2];  // of each four: the first pair; the second lies 16 bytes on, before the exchange of pieces
};

INLINE Mover mover_of(const Args& p, int m0) {
  Mover mover;
  const int k0 = thread_id() % VECTORS_A_ROW * 8, row = thread_id() / VECTORS_A_ROW;
  mover.from = p.x + (long long)(m0 + row) * p.x_stride + 2 * k0;
  mover.row = row;
UNROLL
  for (int i = 0; i < 2; i++) {
    const int k = k0 + 4 * i, byte = FOUR_BITS ? k / 64 * 32 + k % 32 : k;
    const int quarter = byte / LOAD, step = FOUR_BITS ? byte % LOAD / 4 * 2 + k % 64 / 32 : byte % LOAD / 4;
    mover.to[i] = step / 4 * TILE_BYTES + row * 128 + ((step % 4 * 32 + quarter * 4) ^ (row % 8 * 16));
  }
  return mover;
}

INLINE void fetch_x(U4 (&x)[VECTORS], const Args& p, const Mover& mover, int m0, int chunk) {
  const u8* from = mover.from + (long long)chunk * (2 * CHUNK);
UNROLL
  for (int i = 0; i < VECTORS; i++) {
    const int row = mover.row + i * TOGETHER;
    x[i] = U4{{0, 0, 0, 0}};
    if (m0 + row < p.rows && row < ROWS) x[i] = load16(from + (long long)(i * TOGETHER) * p.x_stride);
  }
}

INLINE void put_x(u32 stage, const U4 (&x)[VECTORS], const Mover& mover) {
UNROLL
  for (int i = 0; i < VECTORS; i++) {
    if (ROWS % TOGETHER && mover.row + i * TOGETHER >= ROWS) break;
UNROLL
    for (int four = 0; four < 2; four++) {
      // Stages begin at multiples of 1024, and TOGETHER divides 8 or is a multiple: these bits are the exchange's alone.
      const u32 to = stage + (mover.to[four] ^ (i * TOGETHER % 8 * 16));
      put_word(to + i * TOGETHER * 128, x[i].v[2 * four]);
      put_word((to ^ 16) + i * TOGETHER * 128, x[i].v[2 * four + 1]);
    }
  }
}

// A chunk of 16 rows of W as operands.
struct Ready {
  u32 a[STEPS][4];
#if GROUPED
  float scale[2][SCALES_A_CHUNK];
#endif
};

INLINE void prepare(Ready& ready, Held (&held)[2], const Row (&row)[2], u32 mask, u32 codes) {
  read_codes(held[0], codes);
  read_codes(held[1], codes + 8 * WIDTH);
UNROLL
  for (int step = 0; step < STEPS; step++) {
    decode(ready.a[step][0], ready.a[step][2], held[0], row[0], mask, step);
    decode(ready.a[step][1], ready.a[step][3], held[1], row[1], mask, step);
  }
#if GROUPED
UNROLL
  for (int i = 0; i < SCALES_A_CHUNK; i++) ready.scale[0][i] = held[0].scale[i], ready.scale[1][i] = held[1].scale[i];
#endif
}

KERNEL_TOGETHER(low_bit_tiles, THREADS, BLOCKS)(Args p, CONSTANT_MAP map) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  const int n0 = block_x() * 64 * WARPGROUPS, m0 = block_z() * ROWS;
  const int chunks = p.inner / CHUNK, share = (chunks + SPLIT - 1) / SPLIT;
  const int begin = block_y() * share, end = begin + share < chunks ? begin + share : chunks;
  const u32 x_at = shared_address(shared), w_at = x_at + 2 * X_BYTES, full = w_at + STAGES * W_BYTES;
  const u32 codes = w_at + (warp * 16 + (lane >> 2)) * WIDTH + (lane & 3) * LOAD;

  if (thread_id() == 0) {
    for (int s = 0; s < STAGES; s++) set_barrier(full + 8 * s, 1);
    publish_barriers();
  }
  block_barrier();
  if (thread_id() == 0) {
    for (int s = 0; s < STAGES && begin + s < end; s++) {
      expect_bytes(full + 8 * s, W_BYTES);
      copy_box(w_at + s * W_BYTES, map, n0, begin + s, full + 8 * s);
    }
  }
  Row row[2];
  Held held[2];
UNROLL
  for (int h = 0; h < 2; h++) {
    row[h] = row_of(p, n0 + 16 * warp + 8 * h + (lane >> 2));
    fetch_scales(held[h], p, row[h], begin);
  }
  const Mover mover = mover_of(p, m0);
  const u32 mask = opaque(code_bits());
  wait_for_inputs();
  release_dependents();

  float acc[ROWS / 2];
UNROLL
  for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.0f;
  U4 x[VECTORS];
  fetch_x(x, p, mover, m0, begin);
  put_x(x_at, x, mover);
  if (begin + 1 < end) fetch_x(x, p, mover, m0, begin + 1);
  Ready ready;
  int slot = 0, round = 0;
  for (int c0 = begin; c0 < end; c0 += 2) {
UNROLL
    for (int d = 0; d < 2; d++) {
      const int c = c0 + d;
      if (c >= end) break;
      wait_at(full + 8 * slot, round);
      prepare(ready, held, row, mask, codes + slot * W_BYTES);
      if (c + 1 < end) {
        fetch_scales(held[0], p, row[0], c + 1);
        fetch_scales(held[1], p, row[1], c + 1);
      }
      publish_to_tensor_cores();
      block_barrier();  // x of chunk c is there for all, and all are done with chunk c - 1 and the codes of chunk c
      if (thread_id() == 0 && c + STAGES < end) {
        expect_bytes(full + 8 * slot, W_BYTES);
        copy_box(w_at + slot * W_BYTES, map, n0, c + STAGES, full + 8 * slot);
      }
      if (++slot == STAGES) slot = 0, round ^= 1;
#if GROUPED
      float sums[SCALES_A_CHUNK][ROWS / 2];
UNROLL
      for (int k = 0; k < SCALES_A_CHUNK; k++)
UNROLL
        for (int i = 0; i < ROWS / 2; i++) sums[k][i] = 0.0f;
#endif
      begin_products();
UNROLL
      for (int step = 0; step < STEPS; step++) {
        const u32 tile = x_at + d * X_BYTES + step / 4 * TILE_BYTES;
#if GROUPED
        warpgroup_mma(sums[HALVES ? step & 1 : 0], ready.a[step], tile, step % 4 * 32);
#else
        warpgroup_mma(acc, ready.a[step], tile, step % 4 * 32);
#endif
      }
      close_products();
      if (c + 1 < end) {
        put_x(x_at + (1 - d) * X_BYTES, x, mover);
        if (c + 2 < end) fetch_x(x, p, mover, m0, c + 2);
      }
      wait_for_products();
#if GROUPED
UNROLL
      for (int k = 0; k < SCALES_A_CHUNK; k++)
UNROLL
        for (int i = 0; i < ROWS / 2; i++) acc[i] += sums[k][i] * ready.scale[i >> 1 & 1][k];
#endif
    }
  }

#if SCALES && !GROUPED
  const float factor[2] = {load_scale(row[0].scales, 0), load_scale(row[1].scales, 0)};
UNROLL
  for (int i = 0; i < ROWS / 2; i++) acc[i] *= factor[i >> 1 & 1];
#endif
  const int tile = block_x() + block_z() * blocks_x();
  float* part = p.parts + ((long long)tile * SPLIT + block_y()) * (ROWS * 64 * WARPGROUPS);
UNROLL
  for (int i = 0; i < ROWS / 2; i++) {
    const int n = 16 * warp + (i >> 1 & 1) * 8 + (lane >> 2), m = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
    if (SPLIT > 1) part[m * 64 * WARPGROUPS + n] = acc[i];
    else if (m0 + m < p.rows && n0 + n < p.columns) store_out(p, m0 + m, n0 + n, acc[i]);
  }
#if SPLIT > 1
  // x is no longer needed: its first bytes tell all threads who was last.
  block_barrier();
  if (thread_id() == 0) *(int*)shared = counted_last(p.counters + tile, SPLIT);
  block_barrier();
  if (!*(int*)shared) return;
  part = p.parts + (long long)tile * SPLIT * (ROWS * 64 * WARPGROUPS);
  for (int i = thread_id(); i < ROWS * 64 * WARPGROUPS; i += THREADS) {
    const int n = i % (64 * WARPGROUPS), m = i / (64 * WARPGROUPS);
    if (m0 + m >= p.rows || n0 + n >= p.columns) continue;
    float total = 0.0f;
UNROLL
    for (int s = 0; s < SPLIT; s++) total += load_fresh(part + s * (ROWS * 64 * WARPGROUPS) + i);
    store_out(p, m0 + m, n0 + n, total);
  }
#endif
}
