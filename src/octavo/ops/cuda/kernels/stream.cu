// x @ W.T for a few rows of x, as fast as W comes from memory. A block stays on its SM and goes through strips of 16 rows of W:
//  * one thread has stages of W copied into a ring in shared memory, far ahead, and does not wait for x;
//  * scales and zeros of groups are copied some strips ahead too: what is loaded waits behind the copies that are under way;
//  * WARPS warps multiply: each has a chunk of the inner dimension of every stage, and its part of x in registers from first to last;
//  * one warp adds up what they have for a strip, in a fixed order, and stores it, while they are at the next.

#define STAGE_BYTES (WARPS * 16 * WIDTH)
#define SUMS_STRIDE 20             // of 16 sums of a row of x: no bank conflicts, and whole vectors
#define SUMS (TILES * 8 * SUMS_STRIDE)

#define ALONG (GROUPED && KIND != FLOAT8)  // scales of neighbouring rows lie together
// Of a group's scales and zeros for a strip, 16 bytes each: a lane copies one.
#define SCALE_PIECES SCALE_BYTES
#define PIECES (SCALE_PIECES + ZEROS * ZERO_BYTES)

struct Layout {
  u32 full, empty, ready, taken, sums, scales, ring;
};

INLINE Layout layout_of(u32 shared) {
  Layout l;
  l.full = shared;
  l.empty = l.full + 8 * STAGES;
  l.ready = l.empty + 8 * STAGES;
  l.taken = l.ready + 16;
  l.sums = shared + 256;
  l.scales = l.sums + 2 * WARPS * SUMS * 4;
  l.ring = (l.scales + ALONG * STRIPS_AHEAD * WARPS * PER_WARP * SCALES_A_CHUNK * PIECES * 16 + 127) / 128 * 128;
  return l;
}

// Which chunks this block has, of every strip.
struct Range {
  int begin, end, stages;
};

INLINE Range range_of(const Args& p) {
  const int chunks = p.inner / CHUNK, per_block = PER_WARP * WARPS;
  Range r;
  r.begin = block_y() * per_block;
  r.end = r.begin + per_block < chunks ? r.begin + per_block : chunks;
  r.stages = (r.end - r.begin + WARPS - 1) / WARPS;
  return r;
}

INLINE void copy_strips(const Args& p, const Map& map, const Layout& l, const Range& range) {
  int slot = 0, round = 0;
  for (int strip = block_x(); strip < p.columns / 16; strip += blocks_x()) {
    for (int s = 0; s < range.stages; s++) {
      wait_at(l.empty + 8 * slot, (round & 1) ^ 1);
      expect_bytes(l.full + 8 * slot, STAGE_BYTES);
      copy_box_once(l.ring + slot * STAGE_BYTES, map, strip * 16, range.begin + s * WARPS, l.full + 8 * slot);
      if (++slot == STAGES) slot = 0, round++;
    }
  }
}

#if INTEGERS
// What a warp has of x as integers of 16 bits, a scale a row: the products are then exact, and codes need no conversion. Of a vector of
// eight, the upper bytes come first, then the lower ones.
struct Fixed {
  float scale[TILES][2];  // of the rows that this lane has sums of
#if ZEROS
  int sum[PER_WARP][TILES][2][HALVES ? 2 : 1];  // of a chunk's inputs, the same rows
#endif
};

INLINE Fixed to_integers(U4 (&x)[PER_WARP][TILES][VECTORS], int lane) {
  Fixed fixed;
UNROLL
  for (int i = 0; i < TILES; i++) {
    u32 top = 0;  // as bits, so that NaN is the largest
UNROLL
    for (int s = 0; s < PER_WARP; s++)
UNROLL
      for (int v = 0; v < VECTORS; v++)
UNROLL
        for (int e = 0; e < 4; e++) {
          top = largest(top, as_bits(widen(x[s][i][v].v[e])) & 0x7fffffffu);
          top = largest(top, as_bits(widen(x[s][i][v].v[e] >> 16)) & 0x7fffffffu);
        }
    top = largest(top, of_lane(top, lane ^ 1));
    top = largest(top, of_lane(top, lane ^ 2));
    const float scale = as_float(top) / 32767.0f, inverse = as_float(top) > 1e-30f ? 32767.0f / as_float(top) : 0.0f;
UNROLL
    for (int c = 0; c < 2; c++) fixed.scale[i][c] = as_float(of_lane(as_bits(scale), (lane & 3) * 8 + c * 4));
UNROLL
    for (int s = 0; s < PER_WARP; s++) {
      int sums[2] = {0, 0};
      U4 given[VECTORS];
UNROLL
      for (int v = 0; v < VECTORS; v++) given[v] = x[s][i][v];
UNROLL
      for (int v = 0; v < VECTORS; v++) {
        u32 high[2], low[2];
UNROLL
        for (int four = 0; four < 2; four++) {
#if ORDERED
          // The lower halves of the bytes of a word of codes, or the upper ones: pairs that lie 16 elements apart, of each one in turn.
          const int word = v % 2 * 2 + four;
          const u32 pairs[2] = {given[v / 2].v[word], given[v / 2 + 2].v[word]};
#endif
          // Added to 1.5 * 2^23, a number is rounded to an integer, whose two bytes are the lowest of the sum's bits.
          u32 n[4];
UNROLL
          for (int e = 0; e < 4; e++) {
#if ORDERED
            const u32 number = pairs[e % 2] >> e / 2 * 16;
#else
            const u32 number = given[v].v[2 * four + e / 2] >> e % 2 * 16;
#endif
            n[e] = as_bits(widen(number) * inverse + 12582912.0f);
            sums[HALVES ? v / (VECTORS / 2) : 0] += (int)(n[e] - 0x4b400000u);
          }
          const u32 first = permute(n[0], n[1], 0x5140), second = permute(n[2], n[3], 0x5140);  // lower bytes, then upper
          low[four] = permute(first, second, 0x5410);
          high[four] = permute(first, second, 0x7632);
        }
        x[s][i][v] = U4{{high[0], high[1], low[0], low[1]}};
      }
#if ZEROS
UNROLL
      for (int h = 0; h < (HALVES ? 2 : 1); h++) {
        sums[h] += of_lane(sums[h], lane ^ 1);
        sums[h] += of_lane(sums[h], lane ^ 2);
UNROLL
        for (int c = 0; c < 2; c++) fixed.sum[s][i][c][h] = of_lane(sums[h], (lane & 3) * 8 + c * 4);
      }
#endif
    }
  }
  return fixed;
}
#endif

#if ALONG
// A warp has the scales and zeros of its chunks of a strip copied to slot `strips % STRIPS_AHEAD`.
INLINE u32 scales_at(const Layout& l, int strips, int warp) {
  return l.scales + (strips % STRIPS_AHEAD * WARPS + warp) * (PER_WARP * SCALES_A_CHUNK * PIECES * 16);
}
INLINE void copy_scales(const Args& p, const Layout& l, const Range& range, int strips, int warp, int lane) {
  const int strip = block_x() + strips * blocks_x();
  if (strip < p.columns / 16)
    for (int i = lane; i < PER_WARP * SCALES_A_CHUNK * PIECES; i += 32) {
      const int piece = i % PIECES, half = i / PIECES % SCALES_A_CHUNK, chunk = range.begin + i / PIECES / SCALES_A_CHUNK * WARPS + warp;
      const long long at = (long long)(chunk < range.end ? group_of(chunk, half) : 0) * p.columns + strip * 16;
      const u8* from = piece < SCALE_PIECES ? p.scales + at * SCALE_BYTES + piece * 16 : p.zeros + at * ZERO_BYTES + (piece - SCALE_PIECES) * 16;
      begin_copy16(scales_at(l, strips, warp) + i * 16, from);
    }
  close_copies();
}
#endif

// What goes with a lane's rows of a strip and is not copied: what a row of float8 or of a table has, and a zero point that is a whole row's.
INLINE void fetch_rows(Held (&held)[PER_WARP][2], Row (&row)[2], const Args& p, const Range& range, int strip, int warp, int lane) {
#if ZEROS && !ALONG
UNROLL
  for (int h = 0; h < 2; h++) {
    const u32 zero = load_zero<true>(p.zeros, strip * 16 + 8 * h + (lane >> 2));
UNROLL
    for (int s = 0; s < PER_WARP; s++) held[s][h].zero[0] = zero;
  }
#endif
#if KIND == TABLE || KIND == FLOAT8
UNROLL
  for (int h = 0; h < 2; h++) {
    row[h] = row_of(p, strip * 16 + 8 * h + (lane >> 2));
#if GROUPED && !ALONG
UNROLL
    for (int s = 0; s < PER_WARP; s++)
UNROLL
      for (int i = 0; i < SCALES_A_CHUNK; i++) {
        const int chunk = range.begin + s * WARPS + warp;
        if (chunk < range.end) held[s][h].scale[i] = load_scale(row[h].scales, (u32)(group_of(chunk, i) * p.scale_group_stride));
      }
#endif
  }
#endif
}

INLINE void multiply_strips(const Args& p, const Layout& l, const Range& range, int warp, int lane) {
  const u32 mask = opaque(code_bits());
  U4 x[PER_WARP][TILES][VECTORS];
UNROLL
  for (int s = 0; s < PER_WARP; s++)
UNROLL
    for (int i = 0; i < TILES; i++) {
      const int m = i * 8 + (lane >> 2), chunk = range.begin + s * WARPS + warp;
      const bool there = m < p.rows && chunk < range.end;
#if ORDERED
      const u8* at = p.x + (long long)m * p.x_stride + (long long)chunk * (2 * CHUNK) + (lane & 3) * 64;
UNROLL
      for (int v = 0; v < VECTORS; v++) {
        x[s][i][v] = U4{{0, 0, 0, 0}};
        if (there) x[s][i][v] = load16(at + v * 16);
      }
#else
      const u8* at = p.x + (long long)m * p.x_stride + 2 * inner_of(lane & 3) + (long long)chunk * (2 * CHUNK);
UNROLL
      for (int v = 0; v < VECTORS; v++) {
        // Eight elements: two steps of 4; of 4-bit codes first the lower halves of the bytes, then the upper ones.
        const int step = FOUR_BITS ? v % (WORDS / 2) * 4 + v / (WORDS / 2) : v * 2;
        x[s][i][v] = U4{{0, 0, 0, 0}};
        if (there) x[s][i][v] = load16(at + 2 * inner_offset(step));
      }
#endif
    }

#if INTEGERS
  const Fixed fixed = to_integers(x, lane);
#endif
  int slot = 0, round = 0, strips = 0;
  Held next[PER_WARP][2];
  Row next_row[2];
  fetch_rows(next, next_row, p, range, block_x(), warp, lane);
  for (int strip = block_x(); strip < p.columns / 16; strip += blocks_x(), strips++) {
    Held held[PER_WARP][2];
    Row row[2];
UNROLL
    for (int h = 0; h < 2; h++) {
      row[h] = next_row[h];
UNROLL
      for (int s = 0; s < PER_WARP; s++) held[s][h] = next[s][h];
    }
    if (strip + blocks_x() < p.columns / 16) fetch_rows(next, next_row, p, range, strip + blocks_x(), warp, lane);
#if ALONG
    wait_for_copies_but<STRIPS_AHEAD - 1>();
    warp_barrier();
UNROLL
    for (int s = 0; s < PER_WARP; s++)
UNROLL
      for (int h = 0; h < 2; h++)
UNROLL
        for (int i = 0; i < SCALES_A_CHUNK; i++) {
          const u32 at = scales_at(l, strips, warp) + (s * SCALES_A_CHUNK + i) * (PIECES * 16);
          const int n = 8 * h + (lane >> 2);
          held[s][h].scale[i] = shared_scale(at + n * SCALE_BYTES);
#if ZEROS
          held[s][h].zero[i] = shared_zero<true>(at + SCALE_PIECES * 16 + n * ZERO_BYTES);
#endif
        }
#endif
    float acc[TILES][4];
UNROLL
    for (int i = 0; i < TILES; i++)
UNROLL
      for (int e = 0; e < 4; e++) acc[i][e] = 0.0f;
UNROLL
    for (int s = 0; s < PER_WARP; s++) {
      if (s >= range.stages) break;
      const u32 at = l.ring + slot * STAGE_BYTES + (warp * 16 + (lane >> 2)) * WIDTH + (lane & 3) * LOAD;
      wait_at(l.full + 8 * slot, round & 1);
      read_codes(held[s][0], at);
      read_codes(held[s][1], at + 8 * WIDTH);
      wait_for_loads(held[s][0].w.v[0], held[s][1].w.v[0]);  // or what is copied next could overtake them
      if (lane == 0) arrive_at(l.empty + 8 * slot);
      if (++slot == STAGES) slot = 0, round++;
      if (range.begin + s * WARPS + warp >= range.end) break;
#if INTEGERS
      u32 a[VECTORS][4];
UNROLL
      for (int v = 0; v < VECTORS; v++) {
        bytes_of(a[v][0], a[v][2], held[s][0], mask, v);
        bytes_of(a[v][1], a[v][3], held[s][1], mask, v);
      }
UNROLL
      for (int i = 0; i < TILES; i++)
UNROLL
        for (int k = 0; k < (HALVES ? 2 : 1); k++) {
          int high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};
UNROLL
          for (int v = k * (VECTORS / 2); v < (HALVES && k == 0 ? VECTORS / 2 : VECTORS); v++) {
            warp_mma_bytes<false>(high, a[v], x[s][i][v].v[0], x[s][i][v].v[1]);
            warp_mma_bytes<true>(low, a[v], x[s][i][v].v[2], x[s][i][v].v[3]);
          }
UNROLL
          for (int e = 0; e < 4; e++) {
            int sum = high[e] * 256 + low[e];
#if ZEROS
            sum -= (int)held[s][e >> 1].zero[k] * fixed.sum[s][i][e & 1][k];
#endif
#if GROUPED
            acc[i][e] += (float)sum * held[s][e >> 1].scale[k];
#else
            acc[i][e] += (float)sum;
#endif
          }
        }
#else
#if GROUPED
      float sums[SCALES_A_CHUNK][TILES][4];
UNROLL
      for (int k = 0; k < SCALES_A_CHUNK; k++)
UNROLL
        for (int i = 0; i < TILES; i++)
UNROLL
          for (int e = 0; e < 4; e++) sums[k][i][e] = 0.0f;
#endif
UNROLL
      for (int step = 0; step < STEPS; step++) {
        u32 a[4];
        decode(a[0], a[2], held[s][0], row[0], mask, step);
        decode(a[1], a[3], held[s][1], row[1], mask, step);
        const int v = FOUR_BITS ? (step & 1) * (WORDS / 2) + (step >> 2) : step >> 1;
        const int e = (FOUR_BITS ? step >> 1 & 1 : step & 1) * 2;
UNROLL
        for (int i = 0; i < TILES; i++) {
#if GROUPED
          warp_mma(sums[HALVES ? step & 1 : 0][i], a, x[s][i][v].v[e], x[s][i][v].v[e + 1]);
#else
          warp_mma(acc[i], a, x[s][i][v].v[e], x[s][i][v].v[e + 1]);
#endif
        }
      }
#if GROUPED
UNROLL
      for (int k = 0; k < SCALES_A_CHUNK; k++)
UNROLL
        for (int i = 0; i < TILES; i++)
UNROLL
          for (int e = 0; e < 4; e++) acc[i][e] += sums[k][i][e] * held[s][e >> 1].scale[k];
#endif
#endif
    }
    const int buffer = strips & 1;
    const u32 sums_at = l.sums + (buffer * WARPS + warp) * SUMS * 4;
    wait_at(l.taken + 8 * buffer, (strips >> 1 & 1) ^ 1);
UNROLL
    for (int i = 0; i < TILES; i++)
UNROLL
      for (int e = 0; e < 4; e++) {
        const int n = (e >> 1) * 8 + (lane >> 2), m = 8 * i + (lane & 3) * 2 + (e & 1);
#if INTEGERS
        put_shared(sums_at + (m * SUMS_STRIDE + n) * 4, acc[i][e] * (fixed.scale[i][e & 1] * (KIND == INT4 ? 0.0625f : 1.0f)));
#else
        put_shared(sums_at + (m * SUMS_STRIDE + n) * 4, acc[i][e]);
#endif
      }
    warp_barrier();
    if (lane == 0) arrive_at(l.ready + 8 * buffer);
#if ALONG
    copy_scales(p, l, range, strips + STRIPS_AHEAD, warp, lane);  // where this strip's were, which have been used
#endif
  }
}

INLINE void store4(const Args& p, int m, int n, const float (&value)[4]) {
UNROLL
  for (int i = 0; i < 4; i++) {
    float total = value[i];
#if SCALES && !GROUPED
    total *= load_scale(p.scales, (long long)((n + i) / ROW_BLOCK) * p.scale_row_stride);
#endif
    store_out(p, m, n + i, total);
  }
}

INLINE void finish_strips(const Args& p, const Layout& l, int lane) {
  int strips = 0;
  for (int strip = block_x(); strip < p.columns / 16; strip += blocks_x(), strips++) {
    const int buffer = strips & 1;
    float* parts = p.parts + (long long)strip * SPLIT * (TILES * 8 * 16);
    wait_at(l.ready + 8 * buffer, strips >> 1 & 1);
    for (int i = lane; i < p.rows * 4; i += 32) {
      const int m = i / 4, n = i % 4 * 4;
      float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
UNROLL
      for (int w = 0; w < WARPS; w++) {
        const U4 part = shared16(l.sums + ((buffer * WARPS + w) * SUMS + m * SUMS_STRIDE + n) * 4);
UNROLL
        for (int k = 0; k < 4; k++) total[k] += as_float(part.v[k]);
      }
#if SPLIT > 1
      store_floats(parts + (block_y() * TILES * 8 + m) * 16 + n, total);
#else
      store4(p, m, strip * 16 + n, total);
#endif
    }
    warp_barrier();
    if (lane == 0) arrive_at(l.taken + 8 * buffer);
  }
#if SPLIT > 1
  // Counting takes a while, so all strips are counted at once, a lane each.
  const int values = p.rows * 4;  // fours of a strip
  for (int first = 0; first < strips; first += 32) {
    const int here = smaller(strips - first, 32);
    bool last = false;
    if (lane < here) last = counted_last(p.counters + block_x() + (first + lane) * blocks_x(), SPLIT);
    for (int i0 = 0; i0 < here * values; i0 += 32) {
      const int i = i0 + lane, mine = smaller(i / values, here - 1);
      if (!of_lane(last, mine) || i >= here * values) continue;
      const int strip = block_x() + (first + mine) * blocks_x(), m = i % values / 4, n = i % 4 * 4;
      const float* parts = p.parts + ((long long)strip * SPLIT * (TILES * 8) + m) * 16 + n;
      float part[SPLIT][4], total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
UNROLL
      for (int s = 0; s < SPLIT; s++) load_fresh(part[s], parts + s * (TILES * 8 * 16), true);
UNROLL
      for (int s = 0; s < SPLIT; s++)
UNROLL
        for (int k = 0; k < 4; k++) total[k] += part[s][k];
      store4(p, m, strip * 16 + n, total);
    }
  }
#endif
}

KERNEL(low_bit_stream, 32 * (WARPS + 2))(Args p, CONSTANT_MAP map) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5;
  const Layout l = layout_of(shared_address(shared));
  const Range range = range_of(p);
  if (thread_id() == 0) {
    for (int i = 0; i < STAGES; i++) {
      set_barrier(l.full + 8 * i, 1);
      set_barrier(l.empty + 8 * i, WARPS);
    }
    for (int i = 0; i < 2; i++) {
      set_barrier(l.ready + 8 * i, WARPS);
      set_barrier(l.taken + 8 * i, 1);
    }
    publish_barriers();
  }
  block_barrier();
  if (warp == WARPS) {
    if (lane == 0) copy_strips(p, map, l, range);
    return;
  }
#if ALONG
  if (warp < WARPS)
    for (int strips = 0; strips < STRIPS_AHEAD; strips++) copy_scales(p, l, range, strips, warp, lane);
#endif
  wait_for_inputs();
  release_dependents();
  if (warp < WARPS) multiply_strips(p, l, range, warp, lane);
  else finish_strips(p, l, lane);
}
