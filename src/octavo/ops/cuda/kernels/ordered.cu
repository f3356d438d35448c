// x @ W.T for W in 4 or 8 bits whose codes lie as the tensor cores take them (`ORDERED`), so that x is multiplied as it is: no kernel puts
// it in order before. Three threads have codes, x and what goes with groups copied into a ring in shared memory, far ahead, and all but
// x before x is there. Warpgroups turn 64 rows of W each into operands in registers: see `decode_half` and
// `decode_group`.
// A block has tiles of 64 * TILES rows of W; SPLIT warpgroups share the inner dimension of each, chunk by chunk, and so do the CLUSTER
// blocks of a cluster, which add up their parts from each other's shared memory: nothing goes through memory, nobody counts. A cluster
// has one tile at most: its copying threads have ended before its blocks meet, and need not take part.

#define CONSUMERS (128 * WARPGROUPS)
#define COLUMNS (64 * TILES)
#define SPLIT (WARPGROUPS / TILES)
#define STAGE_X (SPLIT * 2 * ROWS * 128)  // two lines of 128 bytes a chunk and row
// Groups of 32 inner elements have sums of their own; others are no shorter than a chunk.
#define SHORT (GROUP == 32)
#define GROUPS (SHORT ? 4 : 1)  // of a chunk
#define LINE_BYTES (KIND == INT8 ? 128 : 64)  // of a row's codes, a chunk
#define W_AT STAGE_X
#define SCALES_AT (W_AT + SPLIT * COLUMNS * LINE_BYTES)
#define ZEROS_AT (SCALES_AT + (GROUPED ? SPLIT * GROUPS * COLUMNS * SCALE_BYTES : 0))
#define SUMS_AT (ZEROS_AT + (GROUPED && ZEROS ? SPLIT * GROUPS * COLUMNS * ZERO_BYTES : 0))
#define STAGE_SUMS (OFFSETS ? SPLIT * ROWS * 32 : 0)
#define STAGE_BYTES ((SUMS_AT + STAGE_SUMS + 1023) / 1024 * 1024)
#define PARTS (SPLIT * CLUSTER)  // of a tile's sums
#define AT_ONCE (ROWS < 64 ? ROWS : PARTS > 1 ? 64 : 32)  // rows whose sums are in shared memory at a time
#define LINE (COLUMNS + 4)       // numbers of a row of them, so that there are no bank conflicts
#define COPIERS (2 + GROUPED)
// Registers of a thread: at the launch, and of one that multiplies once the copying warps have given theirs back.
#define AT_LAUNCH (512 / (WARPGROUPS + 1) / 8 * 8)
#define COPYING (SHORT ? 40 : 24)
#define SPARED ((AT_LAUNCH * (WARPGROUPS + 1) - COPYING) / WARPGROUPS / 8 * 8)
#define REGISTERS (SPARED < 240 ? SPARED : 240)

// A code, less its zero point, counts so much as an operand: what its bits are worth as a number without exponent, times the largest
// power of two.
#if HALF
#define UNIT_BITS 0x98009800u  // -2^-9
#define UNITS 512.0f
#define LOWER_FACTOR 0x78007800u  // 2^15, of codes in bits 0 to 3
#define UPPER_FACTOR 0x68006800u  // 2^11, of codes in bits 4 to 7
#else
#define UNIT_BITS 0xbc80bc80u  // -2^-6
#define UNITS 64.0f
#define LOWER_FACTOR 0x7f007f00u  // 2^127
#define UPPER_FACTOR 0x7d007d00u  // 2^123
#endif

struct Share {
  int begin, end;         // chunks of this block
  int down, items;        // tiles of the same columns; of all
  int first, step;        // this block's
};

INLINE Share share_of(const Args& p) {
  const int chunks = p.inner / 128, rank = block_x() % CLUSTER;
  Share s;
  s.begin = chunks * rank / CLUSTER, s.end = chunks * (rank + 1) / CLUSTER;
  s.down = (p.rows + ROWS - 1) / ROWS;
  s.items = (p.columns + COLUMNS - 1) / COLUMNS * s.down;
  s.first = block_x() / CLUSTER, s.step = blocks_x() / CLUSTER;
  return s;
}

// What the copying warps do, one thread each, since a copy takes the one that asks for it 80 cycles.
template <int copier>
INLINE void copy_stages(const Args& p, const Map& x, const Map& w, const Map& scales, const Map& zeros, u32 ring, u32 full, u32 empty) {
  const Share s = share_of(p);
  if (copier == 1) wait_for_inputs();
  int slot = 0, round = 1;
  for (int item = s.first; item < s.items; item += s.step) {
    const int n0 = item / s.down * COLUMNS, m0 = item % s.down * ROWS;
    for (int chunk = s.begin; chunk < s.end; chunk += SPLIT) {
      const u32 to = ring + slot * STAGE_BYTES, bar = full + 8 * slot;
      wait_at(empty + 8 * slot, round);
      if (copier == 0) {
        expect_bytes(bar, SPLIT * COLUMNS * LINE_BYTES);
        copy_box(to + W_AT, w, n0, chunk, bar);
      } else if (copier == 1) {
        expect_bytes(bar, STAGE_X + STAGE_SUMS);
        copy_box(to, x, m0, 2 * chunk, bar);
        if (OFFSETS) copy_bytes(to + SUMS_AT, p.x + ((long long)(m0 / ROWS) * (p.inner / 128) + chunk) * (ROWS * 32), STAGE_SUMS, bar);
      } else if (SHORT) {
        expect_bytes(bar, SPLIT * GROUPS * COLUMNS * (SCALE_BYTES + ZEROS * ZERO_BYTES));
        copy_box_at(to + SCALES_AT, scales, n0 * SCALE_BYTES / 4, chunk * GROUPS, bar);
        if (ZEROS) copy_box_at(to + ZEROS_AT, zeros, n0 * ZERO_BYTES / 4, chunk * GROUPS, bar);
      } else {
        const int columns = smaller(p.columns - n0, COLUMNS);
        expect_bytes(bar, SPLIT * columns * (SCALE_BYTES + ZEROS));
UNROLL
        for (int i = 0; i < SPLIT; i++) {
          const long long group = (long long)group_of(chunk + i, 0) * p.columns + n0;
          copy_bytes(to + SCALES_AT + i * (COLUMNS * SCALE_BYTES), p.scales + group * SCALE_BYTES, columns * SCALE_BYTES, bar);
          if (ZEROS) copy_bytes(to + ZEROS_AT + i * COLUMNS, p.zeros + group, columns, bar);
        }
      }
      if (++slot == STAGES) slot = 0, round ^= 1;
    }
  }
}

INLINE u32 less_zero(u32 zero) {
  return multiply_add2(zero * 0x10001u | both(POWER), UNIT_BITS, HALF ? 0x40004000u : 0x40004000u);  // POWER units are 2
}

#if !SHORT
// What a lane has of a chunk: codes of its row of W and of the one 8 below.
struct Codes {
  U4 w[2];
  u32 less[2];  // the zero point, as what is added to a pair of codes
  float scale[2];
};

INLINE void read_stage(Codes& c, u32 stage, int split, int column, int lane) {
UNROLL
  for (int h = 0; h < 2; h++) {
#if GROUPED
    const int at = split * COLUMNS + column + 8 * h;
    c.scale[h] = shared_scale(stage + SCALES_AT + at * SCALE_BYTES);
#if ZEROS
    c.less[h] = less_zero(shared1(stage + ZEROS_AT + at));
#endif
#endif
  }
UNROLL
  for (int h = 0; h < 2; h++) {
    // Lane 8 * i + j asks for piece i of row j, and gets word `lane % 4` of all pieces of row `lane / 4`.
    const int row = split * COLUMNS + column - (lane >> 2) + 8 * h + (lane & 7);
    load_matrices(c.w[h].v, stage + W_AT + row * WIDTH + ((lane >> 3) ^ (lane >> 1 & 3)) * 16);
  }
}

// Operands of 64 inner elements. A word has the codes of two products of 16 elements, a pair of them in bits 0 to 3 and 16 to 19, the next
// 4 bits above, then 8, then 12. As a number without exponent (bits 0 to 6) or with the smallest (bit 7), a pair is worth its codes times
// a power of two: one instruction takes it out, another makes it a number and subtracts the zero point, exactly.
INLINE void decode_half(u32 (&a)[4][4], const Codes& c, int half) {
UNROLL
  for (int j = 0; j < 2; j++)
UNROLL
    for (int h = 0; h < 2; h++) {
      u32 w = c.w[h].v[2 * half + j];
UNROLL
      for (int step = 0; step < 2; step++, w >>= 8) {
        a[2 * j + step][h] = multiply_add2(w & 0x000f000fu, LOWER_FACTOR, c.less[h]);
        a[2 * j + step][h + 2] = multiply_add2(w & 0x00f000f0u, UPPER_FACTOR, c.less[h]);
      }
    }
}

#endif

// Four columns of a row, of which all parts are added up.
INLINE void store_sums(const Args& p, int m, int n, float (&sums)[4]) {
  if (m >= p.rows || n >= p.columns) return;
#if SCALES && !GROUPED
UNROLL
  for (int e = 0; e < 4; e++) sums[e] *= load_scale(p.scales, n + e);
#endif
#if BIAS
UNROLL
  for (int e = 0; e < 4; e++) sums[e] += widen(((const u16*)p.bias)[n + e]);
#endif
  store8(p.out + (long long)m * p.out_stride + 2ll * n, narrow2(sums[0], sums[1]), narrow2(sums[2], sums[3]));
}

// All that multiply, of a cluster's blocks; those that copy do so for the next tile, or have ended.
INLINE void meet_others() {
#if CLUSTER > 1
  cluster_arrive();
  cluster_wait();
#else
  some_barrier(CONSUMERS);
#endif
}

// What a warp has of a tile goes through shared memory, so that whole pieces of rows are stored, and parts are added up.
INLINE void finish(const float (&acc)[ROWS / 2], const Args& p, u8* shared, const Share& s, int item, int warp, int lane) {
  const u32 parts = shared_address(shared) + STAGES * STAGE_BYTES;
  const int n0 = item / s.down * COLUMNS, m0 = item % s.down * ROWS;
  const int split = warp / (4 * TILES), column = warp % (4 * TILES) * 16;
UNROLL
  for (int first = 0; first < ROWS; first += AT_ONCE) {
#if PARTS > 1
    const u32 mine = parts + (split * AT_ONCE * LINE + column) * 4;
    const int line = LINE;
#else
    const u32 mine = parts + warp * (AT_ONCE * 20 * 4);
    const int line = 20;
#endif
UNROLL
    for (int i = 0; i < AT_ONCE / 2; i++) {
      const int m = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), n = (lane >> 2) + (i >> 1 & 1) * 8;
      put_shared(mine + (m * line + n) * 4, acc[first / 2 + i] * UNITS);
    }
#if PARTS > 1
    meet_others();
    const int rank = block_x() % CLUSTER, pieces = AT_ONCE * COLUMNS / 4;
    for (int i = pieces * rank / CLUSTER + warp * 32 + lane; i < pieces * (rank + 1) / CLUSTER; i += CONSUMERS) {
      const int m = i / (COLUMNS / 4), n = i % (COLUMNS / 4) * 4;
      U4 part[PARTS];
UNROLL
      for (int k = 0; k < PARTS; k++) part[k] = shared16_of(parts + ((k % SPLIT * AT_ONCE + m) * LINE + n) * 4, k / SPLIT);
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
UNROLL
      for (int k = 0; k < PARTS; k++)
UNROLL
        for (int e = 0; e < 4; e++) sums[e] += as_float(part[k].v[e]);
      store_sums(p, m0 + first + m, n0 + n, sums);
    }
    meet_others();
#else
    warp_barrier();
UNROLL
    for (int i = 0; i < AT_ONCE / 8; i++) {
      const int m = i * 8 + (lane >> 2), n = (lane & 3) * 4;
      const U4 part = shared16(mine + (m * line + n) * 4);
      float sums[4];
UNROLL
      for (int e = 0; e < 4; e++) sums[e] = as_float(part.v[e]);
      store_sums(p, m0 + first + m, n0 + column + n, sums);
    }
    warp_barrier();
#endif
  }
}

#if SHORT
// Offsets are multiplied with the inputs' sums (see `sums`) as one more product of 16 inner elements a chunk, in two parts as these are.
#define OFFSET_FACTOR (1.0f / (UNITS * SUM_FACTOR))

// Of group `g`, of a lane's row of W and of the one 8 below.
INLINE void read_scales(float (&scale)[2], u32 stage, int split, int column, int g) {
UNROLL
  for (int h = 0; h < 2; h++) scale[h] = shared_scale(stage + SCALES_AT + ((split * GROUPS + g) * COLUMNS + column + 8 * h) * SCALE_BYTES);
}

#if OFFSETS
// As an operand: a lane has those of group `lane % 4`.
INLINE void read_offsets(u32 (&a)[4], u32 stage, int split, int column, int lane) {
UNROLL
  for (int h = 0; h < 2; h++) {
    const float offset = as_float(shared4(stage + ZEROS_AT + ((split * GROUPS + (lane & 3)) * COLUMNS + column + 8 * h) * 4)) * OFFSET_FACTOR;
    const u16 upper = narrow(offset), lower = narrow(offset - widen(upper));
    a[h] = a[h + 2] = upper | (u32)lower << 16;
  }
}
#endif

// The operands of group `g`, a step each 16 inner elements; `codes`: of 32 bytes of both rows, read where a group is the first in them.
INLINE void decode_group(u32 (&a)[2][4], u32 (&codes)[4], u32 stage, int split, int column, int lane, int g) {
  const int first = split * COLUMNS + column - (lane >> 2);  // of the warp's rows
  const int unit = KIND == INT8 ? g : g / 2;                 // of 32 bytes
  if (KIND == INT8 || g % 2 == 0) {
    const int row = first + (lane & 7) + (lane >> 4) * 8, exchange = KIND == INT8 ? lane & 7 : lane >> 1 & 3;
    load_matrices(codes, stage + W_AT + row * LINE_BYTES + ((2 * unit + (lane >> 3 & 1)) ^ exchange) * 16);
  }
UNROLL
  for (int h = 0; h < 2; h++) {
#if KIND == INT8
    const u32 less = HALF ? 0xb400b400u : 0xc000c000u;  // 128
#elif ZEROS && !OFFSETS
    const u32 less = less_zero(shared1(stage + ZEROS_AT + (split * GROUPS + g) * COLUMNS + column + 8 * h));
#else
    const u32 less = less_zero(8);
#endif
UNROLL
    for (int step = 0; step < 2; step++) {
#if KIND == INT8
      const u32 w = codes[2 * h + step] ^ 0x80808080u;
      a[step][h] = multiply_add2(permute(w, 0, 0x4140), LOWER_FACTOR, less);
      a[step][h + 2] = multiply_add2(permute(w, 0, 0x4342), LOWER_FACTOR, less);
#else
      const u32 w = codes[2 * h + g % 2] >> 8 * step;
      a[step][h] = multiply_add2(w & 0x000f000fu, LOWER_FACTOR, less);
      a[step][h + 2] = multiply_add2(w & 0x00f000f0u, UPPER_FACTOR, less);
#endif
    }
  }
}

// Two products of 16 inner elements: those of group `g`.
INLINE void multiply_group(float (&sums)[ROWS / 2], const u32 (&a)[2][4], u32 x_at, int g) {
  const u32 line = x_at + g / 2 * (ROWS * 128);
  warpgroup_mma_fresh(sums, a[0], line, g % 2 * 64);
  warpgroup_mma(sums, a[1], line, g % 2 * 64 + 32);
}

INLINE void add_scaled(float (&acc)[ROWS / 2], float (&sums)[ROWS / 2], const float (&scale)[2]) {
  settle(sums);
UNROLL
  for (int i = 0; i < ROWS / 2; i++) acc[i] += sums[i] * scale[i >> 1 & 1];
}

// All chunks of a tile: a group's products run while the group before it is scaled and the next one is decoded.
INLINE void multiply_groups(float (&acc)[ROWS / 2], const Share& s, u32 ring, u32 full, u32 empty, int& slot, int& round, int split, int column, int lane) {
  u32 a[2][2][4], codes[4];
  wait_at(full + 8 * slot, round);
  decode_group(a[0], codes, ring + slot * STAGE_BYTES, split, column, lane, 0);
  for (int chunk = s.begin; chunk < s.end; chunk += SPLIT) {
    const u32 stage = ring + slot * STAGE_BYTES, used = empty + 8 * slot, x_at = stage + split * (2 * ROWS * 128);
    float sums[SETS][ROWS / 2], scale[2][2];
UNROLL
    for (int g = 0; g < GROUPS; g++) {
#if OFFSETS
      u32 offsets[4];
      if (g == 0) read_offsets(offsets, stage, split, column, lane);
#endif
      read_scales(scale[g % 2], stage, split, column, g);
      begin_products();
#if OFFSETS
      if (g == 0) warpgroup_mma_plain(acc, offsets, stage + SUMS_AT + split * (ROWS * 32));
#endif
      multiply_group(sums[g % SETS], a[g % 2], x_at, g);
      close_products();
      if (SETS > 1 && g > 0) {
        wait_for_products_but_one();
        if (OFFSETS && g == 1) settle(acc);
        add_scaled(acc, sums[(g + 1) % SETS], scale[1 - g % 2]);
      }
      if (g + 1 < GROUPS) {
        decode_group(a[1 - g % 2], codes, stage, split, column, lane, g + 1);
      } else {
        if (++slot == STAGES) slot = 0, round ^= 1;
        if (chunk + SPLIT < s.end) {
          wait_at(full + 8 * slot, round);
          decode_group(a[0], codes, ring + slot * STAGE_BYTES, split, column, lane, 0);
        }
      }
      if (SETS == 1 || g + 1 == GROUPS) {
        wait_for_products();
        if (OFFSETS && g == 0) settle(acc);
        add_scaled(acc, sums[g % SETS], scale[g % 2]);
      }
    }
    settle(acc);  // nothing that was read of this stage is still awaited
    if (lane == 0) arrive_at(used);
  }
}
#else

// The same in the order of larger groups, or of none.
INLINE void multiply_chunks(float (&acc)[ROWS / 2], const Args& p, const Share& s, u32 ring, u32 full, u32 empty, int& slot, int& round, int item, int split,
                            int column, int lane) {
  Codes codes;
UNROLL
  for (int h = 0; h < 2; h++) {
    codes.scale[h] = 1.0f;
    codes.less[h] = less_zero(8);
#if ZEROS && !GROUPED
    codes.less[h] = less_zero(p.zeros[smaller(item / s.down * COLUMNS + column + 8 * h, p.columns - 1)]);
#endif
  }
  u32 a[2][4][4];
  wait_at(full + 8 * slot, round);
  read_stage(codes, ring + slot * STAGE_BYTES, split, column, lane);
  decode_half(a[0], codes, 0);
  for (int chunk = s.begin; chunk < s.end; chunk += SPLIT) {
    const u32 x_at = ring + slot * STAGE_BYTES + split * (2 * ROWS * 128), used = empty + 8 * slot;
    if (++slot == STAGES) slot = 0, round ^= 1;
#if GROUPED
    float sums[ROWS / 2];
    const float scale[2] = {codes.scale[0], codes.scale[1]};
#else
    float(&sums)[ROWS / 2] = acc;
#endif
    begin_products();
UNROLL
    for (int i = 0; i < 4; i++) {
      if (GROUPED && i == 0) warpgroup_mma_fresh(sums, a[0][i], x_at, i * 32);
      else warpgroup_mma(sums, a[0][i], x_at, i * 32);
    }
    close_products();
    decode_half(a[1], codes, 1);
    begin_products();
UNROLL
    for (int i = 0; i < 4; i++) warpgroup_mma(sums, a[1][i], x_at, ROWS * 128 + i * 32);
    close_products();
    const bool more = chunk + SPLIT < s.end;
    if (more) {
      wait_at(full + 8 * slot, round);
      read_stage(codes, ring + slot * STAGE_BYTES, split, column, lane);
    }
    wait_for_products_but_one();
    if (more) decode_half(a[0], codes, 0);
    wait_for_products();
    settle(sums);
    if (lane == 0) arrive_at(used);
#if GROUPED
UNROLL
    for (int i = 0; i < ROWS / 2; i++) acc[i] += sums[i] * scale[i >> 1 & 1];
#endif
  }
}
#endif

KERNEL_TOGETHER(low_bit_ordered, CONSUMERS + 128, 1)(Args p, CONSTANT_MAP x, CONSTANT_MAP w, CONSTANT_MAP scales, CONSTANT_MAP zeros) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  const u32 ring = shared_address(shared), full = ring + STAGES * STAGE_BYTES + PARTS_BYTES, empty = full + 8 * STAGES;
  open_ring(full, empty, STAGES, COPIERS, CONSUMERS / 32);
  if (warp >= CONSUMERS / 32) {
    leave_registers<COPYING>();
    if (lane > 0) return;
    if (warp == CONSUMERS / 32) copy_stages<0>(p, x, w, scales, zeros, ring, full, empty);
    if (warp == CONSUMERS / 32 + 1) copy_stages<1>(p, x, w, scales, zeros, ring, full, empty);
    if (GROUPED && warp == CONSUMERS / 32 + 2) copy_stages<2>(p, x, w, scales, zeros, ring, full, empty);
    return;
  }
  take_registers<REGISTERS>();
  const Share s = share_of(p);
  const int split = opaque(warp / (4 * TILES)) % SPLIT, column = warp % (4 * TILES) * 16 + (lane >> 2);
  wait_for_inputs();
  release_dependents();
  int slot = 0, round = 0;
  for (int item = s.first; item < s.items; item += s.step) {
    float acc[ROWS / 2];
UNROLL
    for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.0f;
#if SHORT
    multiply_groups(acc, s, ring, full, empty, slot, round, split, column, lane);
#else
    multiply_chunks(acc, p, s, ring, full, empty, slot, round, item, split, column, lane);
#endif
    finish(acc, p, shared, s, item, warp, lane);
  }
}
