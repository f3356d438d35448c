// x @ W.T for more rows of x. Some warps have codes and x copied ahead into a ring in shared memory; the warpgroups turn 64 rows of W each
// into operands in registers, which the tensor cores multiply with x, as `inputs` has laid it out. Codes that are integers are multiplied
// as such, with the upper and the lower bytes of x at once, as columns of one product.
// Every block has an equal share of all tiles' stages, one tile after the other; where a tile has several blocks, the last one adds up.

#define CONSUMERS (128 * WARPGROUPS)
#define COLUMNS (64 * WARPGROUPS)
#define PASSES (ROWS / PASS)
#define PARTS (128 / CHUNK)  // chunks of a stage
#define W_BYTES (COLUMNS * WIDTH * PARTS)
#define SHARED_SCALES (GROUPED && KIND != FLOAT8)  // those of neighbouring rows lie together
#define SCALES_BYTES (SHARED_SCALES ? COLUMNS * SCALE_BYTES * GROUPS_A_STAGE : 0)
#define ZEROS_BYTES (ZEROS ? COLUMNS * ZERO_BYTES * GROUPS_A_STAGE : 0)
#define W_AT ((X_BYTES + 127) / 128 * 128)
#define SCALES_AT (W_AT + W_BYTES)
#define ZEROS_AT (SCALES_AT + SCALES_BYTES)
#define STAGE_BYTES ((ZEROS_AT + ZEROS_BYTES + 1023) / 1024 * 1024)
#define BATCH (ROWS < 64 ? 128 / ROWS : 1)  // parts of a tile that are asked for at once
#define OPERANDS (INTEGERS ? 4 : 8)     // of a stage
// Registers of a thread: at the launch, and of one that multiplies once the copying warps have given theirs back.
#define AT_LAUNCH (512 / BLOCKS / (WARPGROUPS + 1) / 8 * 8)
#define SPARED ((AT_LAUNCH * (WARPGROUPS + 1) - 24) / WARPGROUPS / 8 * 8)
#define REGISTERS (SPARED < 256 ? SPARED : 256)
#define SUMS (INTEGERS ? PASS : PASS / 2)  // that a lane has of a pass
#if INTEGERS
typedef int Sum;
#else
typedef float Sum;
#endif

struct Share {
  int stages;      // of a tile
  int all;         // of all tiles
  int begin, end;  // this block's
  int down;        // tiles of the same columns
};

INLINE Share share_of(const Args& p) {
  Share s;
  s.stages = (p.inner + 127) / 128;
  s.down = (p.rows + ROWS - 1) / ROWS;
  s.all = (p.columns + COLUMNS - 1) / COLUMNS * s.down * s.stages;
  s.begin = (u32)(block_x() * s.all) / (u32)blocks_x();
  s.end = (u32)((block_x() + 1) * s.all) / (u32)blocks_x();
  return s;
}

// Behind the last group there are no inputs, and nothing counts.
INLINE int group_at(const Args& p, int stage, int i) {
#if GROUPED
  const int group = (stage * 128) / GROUP + i, groups = p.inner / GROUP;
  return group < groups ? group : groups - 1;
#else
  return 0;
#endif
}

#define COPIERS (2 + (SHARED_SCALES || ZEROS))

// What the copying warps do, one thread each, since a copy takes the one that asks for it 80 cycles: weights, which do not wait for whoever
// computes x; x; what goes with the weights' groups.
template <int copier>
INLINE void copy_stages(const Args& p, const Map& map, const Share& s, u32 ring, u32 full, u32 empty) {
  if (copier == 1) wait_for_inputs();
  int tile = s.begin / s.stages, stage = s.begin % s.stages, slot = 0, round = 1;
  int n0 = tile / s.down * COLUMNS, m = tile % s.down;
  for (int at = s.begin; at < s.end; at++) {
    const u32 to = ring + slot * STAGE_BYTES, bar = full + 8 * slot;
    wait_at(empty + 8 * slot, round);
    if (copier == 0) {
      expect_bytes(bar, W_BYTES);
      copy_box(to + W_AT, map, n0, stage * PARTS, bar);
    } else if (copier == 1) {
      expect_bytes(bar, X_BYTES);
      copy_bytes(to, p.x + (long long)(m * s.stages + stage) * X_BYTES, X_BYTES, bar);
    } else {
      const int columns = p.columns - n0 < COLUMNS ? p.columns - n0 : COLUMNS;
      expect_bytes(bar, columns * ((SHARED_SCALES ? SCALE_BYTES : 0) + (ZEROS ? ZERO_BYTES : 0)) * GROUPS_A_STAGE);
UNROLL
      for (int i = 0; i < GROUPS_A_STAGE; i++) {
        const long long group = (long long)group_at(p, stage, i) * p.columns + n0;
        if (SHARED_SCALES) copy_bytes(to + SCALES_AT + i * (COLUMNS * SCALE_BYTES), p.scales + group * SCALE_BYTES, columns * SCALE_BYTES, bar);
        if (ZEROS) copy_bytes(to + ZEROS_AT + i * (COLUMNS * ZERO_BYTES), p.zeros + group * ZERO_BYTES, columns * ZERO_BYTES, bar);
      }
    }
    if (++slot == STAGES) slot = 0, round ^= 1;
    if (++stage == s.stages) {
      stage = 0;
      if (++m == s.down) m = 0, n0 += COLUMNS;
    }
  }
}

// A stage of 16 rows of W as operands.
struct Ready {
  u32 a[OPERANDS][4];
#if GROUPED
  float scale[2][GROUPS_A_STAGE];
#endif
#if INTEGERS && ZEROS
  float more[2][GROUPS_A_STAGE];  // what the inputs' sum counts for
#endif
};

INLINE void prepare(Ready& ready, const Args& p, const Row (&row)[2], u32 mask, u32 stage_at, int stage, int warp, int lane) {
  const int n = warp * 16 + (lane >> 2);
UNROLL
  for (int h = 0; h < 2; h++)
UNROLL
    for (int i = 0; i < GROUPS_A_STAGE; i++) {
#if SHARED_SCALES
      ready.scale[h][i] = shared_scale(stage_at + SCALES_AT + (i * COLUMNS + n + 8 * h) * SCALE_BYTES);
#elif GROUPED
      ready.scale[h][i] = load_scale(row[h].scales, (u32)(group_at(p, stage, i) * p.scale_group_stride));
#endif
#if INTEGERS && ZEROS
      const u32 zero = shared_zero<true>(stage_at + ZEROS_AT + (i * COLUMNS + n + 8 * h) * ZERO_BYTES);
#if OFFSETS
      ready.more[h][i] = as_float(zero);
#elif GROUPED
      ready.more[h][i] = -(float)(int)zero * ready.scale[h][i];
#else
      ready.more[h][i] = -(float)(int)zero;
#endif
#endif
    }
UNROLL
  for (int part = 0; part < PARTS; part++) {
    Held held[2];
UNROLL
    for (int h = 0; h < 2; h++) {
      read_codes(held[h], stage_at + W_AT + (part * COLUMNS + n + 8 * h) * WIDTH, lane & 3, lane >> 3 & 1);
#if ZEROS && !INTEGERS
UNROLL
      for (int i = 0; i < GROUPS_A_CHUNK; i++) {
        const int group = part * GROUPS_A_STAGE / PARTS + i;
        held[h].zero[i] = shared_zero<false>(stage_at + ZEROS_AT + (group * COLUMNS + n + 8 * h) * ZERO_BYTES);
      }
#endif
    }
#if INTEGERS
UNROLL
    for (int v = 0; v < VECTORS; v++) {
      u32(&a)[4] = ready.a[part * VECTORS + v];
      bytes_of(a[0], a[2], held[0], mask, v);
      bytes_of(a[1], a[3], held[1], mask, v);
    }
#else
UNROLL
    for (int step = 0; step < STEPS; step++) {
      u32(&a)[4] = ready.a[part * STEPS + step];
      decode(a[0], a[2], held[0], row[0], mask, step);
      decode(a[1], a[3], held[1], row[1], mask, step);
    }
#endif
  }
}

// The group, within a stage, of an operand.
INLINE int group_of_operand(int i) {
#if SHORT_GROUPS && INTEGERS
  return i / VECTORS * GROUPS_A_CHUNK + GROUP_OF_VECTOR(i % VECTORS);
#elif SHORT_GROUPS
  return i / STEPS * GROUPS_A_CHUNK + GROUP_OF_STEP(i % STEPS);
#else
  return i * GROUPS_A_STAGE / OPERANDS;
#endif
}

// Blocks that have parts of a tile. This one has parts of two tiles at most: of its first one, and of another that it does not finish.
struct Parts {
  int first, last;
  bool whole, second;  // the first of them has another part, of an earlier tile
};

INLINE Parts parts_of(const Share& s, int tile) {
  const u32 begin = tile * s.stages, end = begin + s.stages, blocks = blocks_x(), all = s.all;
  Parts parts;
  parts.first = ((begin + 1) * blocks - 1) / all, parts.last = (end * blocks - 1) / all;
  parts.whole = s.begin <= (int)begin && (int)end <= s.end;
  parts.second = parts.first * all / blocks < begin;
  return parts;
}

// What of a sum is still to be done for row m of x and a row of W whose scale is `factor`.
INLINE float scaled(const Args& p, int m, float sum, float factor) {
#if INTEGERS
  sum *= p.x_scales[m];
#endif
  return SCALES && !GROUPED ? sum * factor : sum;
}
INLINE float factor_of(const Args& p, int n) {
#if SCALES && !GROUPED
  return load_scale(p.scales, (long long)(n / ROW_BLOCK) * p.scale_row_stride);
#else
  return 1.0f;
#endif
}

// What a warp has of a tile: stored, or put beside what other blocks have of it, of which the last one adds all up. This code runs once
// or twice a block: it is slow unless it is short.
INLINE void finish(const float (&acc)[ROWS / 2], const Args& p, const Share& s, const Parts& parts, int tile, int warp, int lane) {
  const int n0 = tile / s.down * COLUMNS + warp * 16, m0 = tile % s.down * ROWS;
  const int row = (lane & 3) * 2, column = lane >> 2;
  if (parts.whole) {
    if (n0 >= p.columns) return;
    const float factor[2] = {factor_of(p, n0 + column), factor_of(p, n0 + column + 8)};
UNROLL
    for (int i = 0; i < ROWS / 2; i++) {
      const int m = m0 + (i >> 2) * 8 + row + (i & 1), h = i >> 1 & 1;
      if (m < p.rows) store_out(p, m, n0 + column + 8 * h, scaled(p, m, acc[i], factor[h]));
    }
    return;
  }
  float* all = p.parts + warp * (ROWS * 16);
  float* part = all + (long long)(block_x() * 2 + (block_x() == parts.first && parts.second)) * (ROWS * COLUMNS) + row * 16 + column;
UNROLL
  for (int i = 0; i < ROWS / 2; i++) part[((i >> 2) * 8 + (i & 1)) * 16 + (i >> 1 & 1) * 8] = acc[i];
  warp_barrier();
  bool complete = false;
  if (lane == 0) complete = counted_last(p.counters + tile * (CONSUMERS / 32) + warp, parts.last - parts.first + 1);
  if (!any_lane(complete) || n0 >= p.columns) return;
  // Four columns of every eighth row.
  const int n = n0 + lane % 4 * 4;
  float sums[ROWS / 8][4];
UNROLL
  for (int i = 0; i < ROWS / 8; i++)
UNROLL
    for (int e = 0; e < 4; e++) sums[i][e] = 0.0f;
NO_UNROLL
  for (int b0 = parts.first; b0 <= parts.last; b0 += BATCH) {
    U4 four[BATCH][ROWS / 8];
UNROLL
    for (int b = 0; b < BATCH; b++) {
      const float* other = all + (long long)((b0 + b) * 2 + (b0 + b == parts.first && parts.second)) * (ROWS * COLUMNS) + lane * 4;
UNROLL
      for (int i = 0; i < ROWS / 8; i++) {
        four[b][i] = U4{{0, 0, 0, 0}};
        if (b0 + b <= parts.last) four[b][i] = load_fresh16(other + i * 128);
      }
    }
UNROLL
    for (int b = 0; b < BATCH; b++)
UNROLL
      for (int i = 0; i < ROWS / 8; i++)
UNROLL
        for (int e = 0; e < 4; e++) sums[i][e] += as_float(four[b][i].v[e]);
  }
UNROLL
  for (int i = 0; i < ROWS / 8; i++) {
    const int m = m0 + i * 8 + lane / 4;
    if (m >= p.rows) break;
UNROLL
    for (int e = 0; e < 4; e++) store_out(p, m, n + e, scaled(p, m, sums[i][e], factor_of(p, n + e)));
  }
}

KERNEL_TOGETHER(low_bit_tiles, CONSUMERS + 128, BLOCKS)(Args p, CONSTANT_MAP map) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  const u32 ring = shared_address(shared), full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
  const Share s = share_of(p);
  open_ring(full, empty, STAGES, COPIERS, CONSUMERS / 32);
  if (warp >= CONSUMERS / 32) {
    leave_registers<24>();
    if (lane > 0) return;
    if (warp == CONSUMERS / 32) copy_stages<0>(p, map, s, ring, full, empty);
    if (warp == CONSUMERS / 32 + 1) copy_stages<1>(p, map, s, ring, full, empty);
    if (COPIERS == 3 && warp == CONSUMERS / 32 + 2) copy_stages<2>(p, map, s, ring, full, empty);
    return;
  }
  take_registers<REGISTERS>();
  const u32 mask = p.rows > 0 ? code_bits() : 0;  // unknown to the compiler, so that it stays in a register
  int slot = 0, round = 0;
  for (int at = s.begin, count; at < s.end; at += count) {
    const int tile = at / s.stages, stage = at % s.stages;
    const Parts parts = parts_of(s, tile);
    if (at == s.begin) {
      wait_for_inputs();
      release_dependents();
    }
    count = s.stages - stage < s.end - at ? s.stages - stage : s.end - at;
    Row row[2];
UNROLL
    for (int h = 0; h < 2; h++) row[h] = row_of(p, tile / s.down * COLUMNS + warp * 16 + 8 * h + (lane >> 2));
    float acc[ROWS / 2];
UNROLL
    for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.0f;
#if INTEGERS && !GROUPED
    int sums[PASSES][SUMS];  // they hold whatever a tile has
UNROLL
    for (int pass = 0; pass < PASSES; pass++)
UNROLL
      for (int i = 0; i < SUMS; i++) sums[pass][i] = 0;
#endif
    Ready ready[2];
    wait_at(full + 8 * slot, round);
    prepare(ready[0], p, row, mask, ring + slot * STAGE_BYTES, stage, warp, lane);
    for (int i = 0; i < count; i += 2) {
UNROLL
      for (int d = 0; d < 2; d++) {
        if (i + d >= count) break;
        const u32 stage_at = ring + slot * STAGE_BYTES;
        const int next_slot = slot + 1 == STAGES ? 0 : slot + 1, next_round = slot + 1 == STAGES ? round ^ 1 : round;
UNROLL
        for (int pass = 0; pass < PASSES; pass++)
UNROLL
          for (int group = 0; group < GROUPS_A_STAGE; group++) {
            const u32 x_at = stage_at + pass * PASS_BYTES;
#if GROUPED
            Sum sums[SUMS];
#endif
            begin_products();
            bool fresh = true;
UNROLL
            for (int k = 0; k < OPERANDS; k++) {
              if (group_of_operand(k) != group) continue;
#if INTEGERS && GROUPED
              if (fresh) warpgroup_mma_fresh(sums, ready[d].a[k], x_at, k * 32);
              else warpgroup_mma(sums, ready[d].a[k], x_at, k * 32);
#elif INTEGERS
              warpgroup_mma(sums[pass], ready[d].a[k], x_at, k * 32);
#elif GROUPED
              if (fresh) warpgroup_mma_fresh(sums, ready[d].a[k], x_at + k / 4 * (PASS * 128), k % 4 * 32);
              else warpgroup_mma(sums, ready[d].a[k], x_at + k / 4 * (PASS * 128), k % 4 * 32);
#else
              warpgroup_mma((float(&)[PASS / 2])acc[pass * (PASS / 2)], ready[d].a[k], x_at + k / 4 * (PASS * 128), k % 4 * 32);
#endif
              fresh = false;
            }
            close_products();
            if (pass == 0 && group == 0 && i + d + 1 < count) {
              // The next stage is made ready meanwhile.
              wait_at(full + 8 * next_slot, next_round);
              prepare(ready[1 - d], p, row, mask, ring + next_slot * STAGE_BYTES, stage + i + d + 1, warp, lane);
            }
            wait_for_products();
#if GROUPED || (INTEGERS && ZEROS)
UNROLL
            for (int j = 0; j < PASS / 8; j++) {
#if INTEGERS && ZEROS
              const U4 x_sums = shared8(stage_at + 256 * ROWS + (group * ROWS + pass * PASS + 8 * j + (lane & 3) * 2) * 4);
              if (j == PASS / 8 - 1) wait_for_loads(x_sums.v[0], x_sums.v[1]);
#endif
UNROLL
              for (int e = 0; e < 4; e++) {
                float& sum = acc[pass * (PASS / 2) + 4 * j + e];
#if GROUPED && INTEGERS
                sum += (float)(sums[4 * j + e] * 256 + sums[PASS / 2 + 4 * j + e]) * ready[d].scale[e >> 1][group];
#elif GROUPED
                sum += sums[4 * j + e] * ready[d].scale[e >> 1][group];
#endif
#if INTEGERS && ZEROS
                sum += as_float(x_sums.v[e & 1]) * ready[d].more[e >> 1][group];
#endif
              }
            }
#endif
          }
        if (lane == 0) arrive_at(empty + 8 * slot);
        slot = next_slot, round = next_round;
      }
    }
#if INTEGERS && !GROUPED
    // Exact, unless a row has more than 2^17 elements.
UNROLL
    for (int pass = 0; pass < PASSES; pass++)
UNROLL
      for (int i = 0; i < PASS / 2; i++) acc[pass * (PASS / 2) + i] += (float)sums[pass][i] * 256.0f + (float)sums[pass][PASS / 2 + i];
#endif
    finish(acc, p, s, parts, tile, warp, lane);
  }
}
