// x as `tiles` multiplies it: for each 128 inner elements and each ROWS rows an image of what lies in shared memory, so that one copy
// brings it there: in the order that the lanes' inner elements have, in rows of 128 bytes with their pieces exchanged. For codes that are
// integers, x becomes integers of 16 bits, a scale a row, whose upper and lower bytes are rows of their own. A block has one row of x.

#define THREADS 512
#define SPREAD (THREADS / 16)  // stages that all threads have at once, 8 elements a thread, of HELD

// Where the elements from `k` on, a multiple of 4, lie in a row of an image; the rest of the address is the row's.
INLINE int place_of(int k) {
  const int part = k / CHUNK, within = k % CHUNK;
  const int byte = FOUR_BITS ? within / 64 * 32 + within % 32 : within, upper = FOUR_BITS ? within % 64 / 32 : 0;
  const int quarter = SPLIT_LOAD ? byte % 32 / 8 : byte / LOAD, word = SPLIT_LOAD ? byte / 32 * 2 + byte % 8 / 4 : byte % LOAD / 4;
#if INTEGERS
  const int step = part * VECTORS + word / 2 + upper * (WORDS / 2);
  return step * 32 + word % 2 * 16 + quarter * 4;
#else
  const int step = part * STEPS + (FOUR_BITS ? word * 2 + upper : word);
  return step / 4 * (PASS * 128) + step % 4 * 32 + quarter * 4;
#endif
}

KERNEL(low_bit_inputs, THREADS)(Inputs p) {
  SHARED_BYTES(shared);
  const int lane = thread_id() & 31, warp = thread_id() >> 5, row = block_x(), local = row % ROWS;
  const int k_of_lane = (lane & 15) * 8;
  int place[2];
UNROLL
  for (int four = 0; four < 2; four++) {
    // Rows begin at multiples of 128 and tiles at multiples of 1024, so that these bits are the exchange's alone.
    place[four] = place_of(k_of_lane + 4 * four) ^ (local % 8 * 16);
    place[four] += local / PASS * PASS_BYTES + local % PASS * 128;
  }
  u8* image = p.image + (long long)(row / ROWS) * p.stages * X_BYTES;
  const u8* x = p.x + (long long)row * p.x_stride;
  release_dependents();  // `tiles` asks for weights meanwhile, and reads nothing else before it has waited
  wait_for_inputs();
  U4 held[HELD];
UNROLL
  for (int i = 0; i < HELD; i++) {
    const int k = (i * SPREAD + warp * 2 + (lane >> 4)) * 128 + k_of_lane;
    held[i] = U4{{0, 0, 0, 0}};
    if (k < p.inner) held[i] = load16(x + 2 * k);
  }
#if INTEGERS
  u32 top = 0;  // as bits, so that NaN is the largest
UNROLL
  for (int i = 0; i < HELD; i++)
UNROLL
    for (int e = 0; e < 4; e++) {
      top = largest(top, as_bits(widen(held[i].v[e])) & 0x7fffffffu);
      top = largest(top, as_bits(widen(held[i].v[e] >> 16)) & 0x7fffffffu);
    }
UNROLL
  for (int i = 1; i < 32; i *= 2) top = largest(top, of_lane(top, lane ^ i));
  const u32 tops = shared_address(shared);
  if (lane == 0) put_word(tops + warp * 4, top);
  block_barrier();
  top = shared4(tops + lane % (THREADS / 32) * 4);
UNROLL
  for (int i = 1; i < THREADS / 32; i *= 2) top = largest(top, of_lane(top, lane ^ i));
  // Both bytes are signed: the largest upper one is of 127 * 256 + 127.
  const float inverse = as_float(top) > 1e-30f ? 32639.0f / as_float(top) : 0.0f;
  if (thread_id() == 0) p.scales[row] = as_float(top) * ((KIND == INT4 ? 0.0625f : 1.0f) / 32639.0f);
#endif
UNROLL
  for (int i = 0; i < HELD; i++) {
    const int stage = i * SPREAD + warp * 2 + (lane >> 4);
    const U4 v = held[i];
    u8* to = image + (long long)stage * X_BYTES;
#if INTEGERS
    int sum = 0;
UNROLL
    for (int four = 0; four < 2; four++) {
      // Added to 1.5 * 2^23, a number is rounded to an integer, whose two bytes are the lowest of the sum's bits.
      u32 n[4];
UNROLL
      for (int e = 0; e < 4; e++) {
        n[e] = as_bits(widen(v.v[2 * four + e / 2] >> e % 2 * 16) * inverse + 12582912.0f);
        sum += (int)(n[e] - 0x4b400000u);
      }
      const u32 low = permute(permute(n[0], n[1], 0x40), permute(n[2], n[3], 0x40), 0x5410);
UNROLL
      for (int e = 0; e < 4; e++) n[e] += 128;  // the lower byte is signed
      const u32 high = permute(permute(n[0], n[1], 0x51), permute(n[2], n[3], 0x51), 0x5410);
      if (stage < p.stages) {
        *(u32*)(to + place[four]) = high;
        *(u32*)(to + place[four] + PASS * 128) = low;
      }
    }
#if ZEROS
UNROLL
    for (int i = 1; i < 16 / GROUPS_A_STAGE; i *= 2) sum += (int)of_lane((u32)sum, lane ^ i);
    const int group = k_of_lane / (128 / GROUPS_A_STAGE);
    if (stage < p.stages && k_of_lane % (128 / GROUPS_A_STAGE) == 0) *(float*)(to + 256 * ROWS + (group * ROWS + local) * 4) = (float)sum;
#endif
#else
    if (stage < p.stages) {
UNROLL
      for (int four = 0; four < 2; four++) {
        *(u32*)(to + place[four]) = v.v[2 * four];
        *(u32*)(to + (place[four] ^ 16)) = v.v[2 * four + 1];
      }
    }
#endif
  }
}
