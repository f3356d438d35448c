// Low-bit weights as operands of the tensor cores. A warp multiplies 16 rows of the weight (lane: rows `lane / 4` and 8 below it) with
// rows of x. Sums do not care in which order the inner elements come, so a lane takes those that lie together in its rows: a vector of
// LOAD bytes a chunk, of which each word becomes the two (4 bits: four) registers that a lane has of an operand; x is read in that order.

#define INT4 0
#define TABLE 1
#define INT8 2
#define FLOAT8 3

#define FOUR_BITS (KIND == INT4 || KIND == TABLE)
#define LOAD (WIDE ? 16 : 8)
#define WORDS (LOAD / 4)
// Inner elements of a chunk: what the four lanes of a row load.
#define CHUNK (LOAD * (FOUR_BITS ? 8 : 4))
#define WIDTH (LOAD * 4)  // bytes of a row in a chunk
#define STEPS (CHUNK / 16)
#define VECTORS (FOUR_BITS ? WORDS : WORDS / 2)  // eights of inner elements that a lane has of a chunk
// GROUP 0: one scale a row, at the end; else inner elements of a group: no less than a chunk, or half of one.
#define GROUPED (GROUP > 0)
// Groups of 32 inner elements, several a chunk. Of a chunk of 64 bytes a lane's vector is then 8 bytes of each half instead of 16 in a row,
// so that all of an operand is of one group.
#define SHORT_GROUPS (GROUP == 32 && (FOUR_BITS || (KIND == INT8 && WIDE)))
#define SPLIT_LOAD (SHORT_GROUPS && WIDE)
#define GROUPS_A_CHUNK (SHORT_GROUPS ? CHUNK / 32 : 1)
#define GROUP_OF_VECTOR(v) (!SHORT_GROUPS ? 0 : FOUR_BITS ? (v) % (WORDS / 2) * 2 + (v) / (WORDS / 2) : (v))
#define GROUP_OF_STEP(step) (!SHORT_GROUPS ? 0 : FOUR_BITS ? (step) / 4 * 2 + (step) % 2 : (step) / 2)
#define SCALE_BYTES (SCALE_TYPE == 0 ? 4 : 2)
// Of a group's zero point; OFFSETS: of what its weights are above their scaled codes, in its place.
#define ZERO_BYTES (OFFSETS ? 4 : KIND == INT4 ? 1 : 2)
#define CODE_SIZE (KIND == INT4 ? 16 : 1)  // of codes that are integers, as `bytes_of` has them

#if WARPGROUP
// Of `tiles`, for 128 inner elements, a stage. PASS: rows of x that are multiplied at once, of a block's ROWS.
#define PASS_BYTES (PASS * 256)
#define GROUPS_A_STAGE (GROUPED && GROUP < 128 ? 128 / GROUP : 1)
// x, and where zero points need them, the sums of its groups.
#define X_BYTES (ROWS * 256 + (INTEGERS && ZEROS ? ROWS * 4 * GROUPS_A_STAGE : 0))
#endif

struct Args {
  const u8* x;  // `tiles`: the images that `inputs` makes; `ordered`: those of `sums`
  const u8* scales;
  const u8* zeros;
  const u8* table;
  const u8* bias;
  u8* out;
  float* parts;
  int* counters;
  const float* x_scales;  // `tiles`, integers: of rows
  int rows, columns, inner;
  int x_stride, out_stride;  // bytes
  int scale_group_stride, scale_row_stride, table_stride;  // elements
};

// Of the kernels that write x anew for others: `inputs` for `tiles`, `sums` for `ordered`.
struct Inputs {
  const u8* x;
  u8* image;
  float* scales;  // of rows
  int rows, inner, x_stride, stages;
};
// Of a sum of 32 inputs, so that it is a number of x's dtype.
#define SUM_FACTOR (HALF ? 0.03125f : 1.0f)

#if HALF
#define POWER 0x6400u  // 1024: a code below 1024 in the bits below it makes 1024 + code
#define MINUS_ONE 0xbc00bc00u
#define FLOAT8_SHIFT 1
#define FLOAT8_BITS 0x3f803f80u
#define FLOAT8_FACTOR 0x5c005c00u  // 2^8: what the smaller exponent bias of float8 makes of it
#else
#define POWER 0x4300u  // 128
#define MINUS_ONE 0xbf80bf80u
#define FLOAT8_SHIFT 4
#define FLOAT8_BITS 0x07f007f0u
#define FLOAT8_FACTOR 0x7b807b80u  // 2^120
#endif

INLINE u32 minus2(u32 a, u32 b) { return multiply_add2(b, MINUS_ONE, a); }
INLINE u32 both(u16 x) { return x * 0x10001u; }

INLINE float load_scale(const u8* scales, long long at) {
#if SCALE_TYPE == 0
  return ((const float*)scales)[at];
#elif SCALE_TYPE == 1
  return from_float16(((const u16*)scales)[at]);
#else
  return from_bfloat16(((const u16*)scales)[at]);
#endif
}

INLINE float shared_scale(u32 at) {
#if SCALE_TYPE == 0
  return as_float(shared4(at));
#elif SCALE_TYPE == 1
  return from_float16(shared2(at));
#else
  return from_bfloat16(shared2(at));
#endif
}

// What a lane knows of one of its rows, whatever the chunk.
struct Row {
  const u8 *scales, *zeros;  // of the first group
#if KIND == TABLE
  u32 low[4], high[4];  // bytes of the 16 entries
#endif
};

INLINE u16 load_entry(const Args& p, long long at) {
#if SCALE_TYPE_TABLE == 0
  return narrow(((const float*)p.table)[at]);
#elif SCALE_TYPE_TABLE == 1
  return narrow(from_float16(((const u16*)p.table)[at]));
#else
  return narrow(from_bfloat16(((const u16*)p.table)[at]));
#endif
}

INLINE Row row_of(const Args& p, int n) {
  Row row;
  const int number = n < p.columns ? n : p.columns - 1;
  row.scales = p.scales + (long long)(number / ROW_BLOCK) * p.scale_row_stride * SCALE_BYTES;
  row.zeros = p.zeros + number * ZERO_BYTES;
#if KIND == TABLE
UNROLL
  for (int i = 0; i < 4; i++) {
    u32 a = load_entry(p, (long long)number * p.table_stride + 4 * i) | (u32)load_entry(p, (long long)number * p.table_stride + 4 * i + 1) << 16;
    u32 b = load_entry(p, (long long)number * p.table_stride + 4 * i + 2) | (u32)load_entry(p, (long long)number * p.table_stride + 4 * i + 3) << 16;
    row.low[i] = permute(a, b, 0x6420);
    row.high[i] = permute(a, b, 0x7531);
  }
#endif
  return row;
}

// A chunk of a row.
struct Held {
  U4 w;
#if GROUPED
  float scale[GROUPS_A_CHUNK];
#endif
#if ZEROS
  u32 zero[GROUPS_A_CHUNK];  // see `load_zero`; OFFSETS: a float's bits
#endif
};

// A zero point: ready to be subtracted from pairs of codes, or (`whole`) from integers as `bytes_of` has them.
template <bool whole>
INLINE u32 zero_point(int zero) {
#if KIND == INT4
  return whole ? (zero - 8) * CODE_SIZE : both(POWER | zero);
#else
  return whole ? zero : both(narrow((float)zero));
#endif
}
template <bool whole>
INLINE u32 load_zero(const u8* zeros, long long at) {
#if KIND == INT4
  return zero_point<whole>(zeros[at]);
#else
  return zero_point<whole>(((const short*)zeros)[at]);
#endif
}
template <bool whole>
INLINE u32 shared_zero(u32 at) {
#if OFFSETS
  return as_bits(as_float(shared4(at)) * CODE_SIZE);
#elif KIND == INT4
  return zero_point<whole>(shared1(at));
#else
  return zero_point<whole>((short)shared2(at));
#endif
}

INLINE int group_of(int chunk, int i) {
#if GROUPED
  return (chunk * CHUNK + i * 32) / GROUP;
#else
  return 0;
#endif
}

// What goes with the codes, from global memory: ask for it a while before.
INLINE void fetch_scales(Held& held, const Args& p, const Row& row, int chunk) {
#if GROUPED
UNROLL
  for (int i = 0; i < GROUPS_A_CHUNK; i++) held.scale[i] = load_scale(row.scales, (u32)(group_of(chunk, i) * p.scale_group_stride));
#endif
#if ZEROS
UNROLL
  for (int i = 0; i < GROUPS_A_CHUNK; i++) held.zero[i] = load_zero<false>(row.zeros, (u32)(group_of(chunk, i) * p.columns));
#endif
}

// What a lane has of a row that begins at `row_at`, of which it is lane `quarter`. `swapped`: of lanes in which the second half is read
// first, so that all of a warp's do not ask for the same banks.
INLINE void read_codes(Held& held, u32 row_at, int quarter, bool swapped) {
#if SPLIT_LOAD
  const u32 at = row_at + quarter * 8;
  const U4 a = shared8(swapped ? at + 32 : at), b = shared8(swapped ? at : at + 32);
  held.w = U4{{swapped ? b.v[0] : a.v[0], swapped ? b.v[1] : a.v[1], swapped ? a.v[0] : b.v[0], swapped ? a.v[1] : b.v[1]}};
#else
  held.w = WIDE ? shared16(row_at + quarter * LOAD) : shared8(row_at + quarter * LOAD);
#endif
}

// The bits of a pair's codes. Two constants in one instruction need a register for one of them: this one stays in it.
INLINE u32 code_bits() { return INTEGERS ? 0xf0f0f0f0u : KIND == INT8 ? 0x007f007fu : KIND == FLOAT8 ? FLOAT8_BITS : 0x000f000fu; }

// Of one step, the two registers that a lane has of one of its rows: inner elements k to k + 3 of `inner_of`.
INLINE void decode(u32& first, u32& second, const Held& held, const Row& row, u32 mask, int step) {
#if KIND == INT4
  u32 v = permute(held.w.v[step >> 1], 0, 0x3120) >> ((step & 1) * 4);
  u32 zero = both(POWER + 8);
#if ZEROS
  zero = held.zero[GROUP_OF_STEP(step)];
#endif
  first = minus2((v & mask) | both(POWER), zero);
  second = minus2((v >> 8 & mask) | both(POWER), zero);
#elif KIND == TABLE
  // A selector has room for four nibbles and uses three bits of each: the fourth chooses between two halves of the table.
  u32 w = held.w.v[step >> 1], three = w & 0x77777777u, fourth = (w >> 1 & 0x44444444u) | 0x32103210u;
UNROLL
  for (int half = 0; half < 2; half++) {
    u32 l = permute(permute(row.low[0], row.low[1], three), permute(row.low[2], row.low[3], three), fourth);
    u32 h = permute(permute(row.high[0], row.high[1], three), permute(row.high[2], row.high[3], three), fourth);
    u32 pair = permute(l, h, step & 1 ? 0x7351 : 0x6240);
    if (half == 0) first = pair; else second = pair;
    three >>= 16, fourth >>= 16;
  }
#elif KIND == INT8
  u32 v = permute(held.w.v[step], 0, 0x3120);
  first = minus2((v & mask) | both(POWER), (v & 0x00800080u) | both(POWER));
  second = minus2((v >> 8 & mask) | both(POWER), (v >> 8 & 0x00800080u) | both(POWER));
#if ZEROS
  first = minus2(first, held.zero[GROUP_OF_STEP(step)]);
  second = minus2(second, held.zero[GROUP_OF_STEP(step)]);
#endif
#else
  u32 v = permute(held.w.v[step], 0, 0x1302);
  first = (v >> FLOAT8_SHIFT & mask) | (v & 0x80008000u);
  second = (v << (8 - FLOAT8_SHIFT) & mask) | (v << 8 & 0x80008000u);
  first = multiply_add2(first, FLOAT8_FACTOR, 0x80008000u);
  second = multiply_add2(second, FLOAT8_FACTOR, 0x80008000u);
#endif
}

#if INTEGERS
// Of vector `v` of a chunk, the two registers that a lane has of one of its rows; 4-bit codes less 8, times 16.
INLINE void bytes_of(u32& first, u32& second, const Held& held, u32 mask, int v) {
#if KIND == INT4
  const int word = v % (WORDS / 2) * 2, shift = v / (WORDS / 2) ? 0 : 4;
  first = (held.w.v[word] << shift & mask) ^ 0x80808080u;
  second = (held.w.v[word + 1] << shift & mask) ^ 0x80808080u;
#else
  first = held.w.v[2 * v], second = held.w.v[2 * v + 1];
#endif
}
#endif

// The first inner element, within a chunk, of those that lanes `lane % 4 == quarter` multiply, and how far from it the four of a step begin.
INLINE int inner_of(int quarter) {
  const int byte = quarter * (SPLIT_LOAD ? 8 : LOAD);
  return FOUR_BITS ? byte / 32 * 64 + byte % 32 : byte;
}
INLINE int inner_offset(int step) {
  if (SPLIT_LOAD) return FOUR_BITS ? step / 4 * 64 + step / 2 % 2 * 4 + step % 2 * 32 : step / 2 * 32 + step % 2 * 4;
  return FOUR_BITS ? (step >> 1) * 4 + (step & 1) * 32 : step * 4;
}

// By all threads: barriers of a ring of stages, which `copiers` threads have filled and `readers` warps read.
INLINE void open_ring(u32 full, u32 empty, int stages, int copiers, int readers) {
  if (thread_id() == 0) {
    for (int i = 0; i < stages; i++) {
      set_barrier(full + 8 * i, copiers);
      set_barrier(empty + 8 * i, readers);
    }
    publish_barriers();
  }
  block_barrier();
}

INLINE void store_out(const Args& p, int m, int n, float value) {
#if BIAS
  u16 bias = ((const u16*)p.bias)[n];
  value += widen(bias);
#endif
  *(u16*)(p.out + (long long)m * p.out_stride + 2ll * n) = narrow(value);
}
