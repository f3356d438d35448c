// The functions of octavo/ops/cuda/kernels/simt.h on a CPU: the threads of a block, or of the blocks of a cluster, are contexts that take
// turns at barriers.

#include <sched.h>
#include <time.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define UNROLL
#define NO_UNROLL
#define INLINE static inline
#define KERNEL(name, count) constexpr int BLOCK_THREADS = count; static void name
#define KERNEL_TOGETHER(name, count, blocks) KERNEL(name, count)
#define SHARED_BYTES(name) u8* name = shared_memory

struct U4 {
  u32 v[4];
};
// `Boxes` of octavo/ops/cuda/launch.py; dimensions that are not there are 1.
struct Map {
  const u8* data;
  int64_t shape[5], strides[5], box[5];
  int32_t exchanged;
};
#define CONSTANT_MAP const Map&

#ifndef CLUSTER
#define CLUSTER 1
#endif

struct Lane {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  u32 a[4], b[2];
  struct Copy {
    int group;
    u32 to;
    const u8* from;
  };
  std::deque<Copy> copies;  // that have begun
  int closed = 0;           // groups of them
};
static std::vector<Lane> lanes;
static ucontext_t scheduler;
static int current, block[3], grid_x, block_threads;  // `current` counts the threads of a cluster
alignas(1024) static u8 memories[CLUSTER][232448];
#if CLUSTER > 1
#define OF_CLUSTER (current / block_threads)
#else
#define OF_CLUSTER 0
#endif
#define shared_memory memories[OF_CLUSTER]

INLINE int thread_id() { return current - OF_CLUSTER * block_threads; }
INLINE int block_x() { return block[0] + OF_CLUSTER; }
INLINE int block_y() { return block[1]; }
INLINE int block_z() { return block[2]; }
INLINE int blocks_x() { return grid_x; }

// Every context runs to its next barrier in turn: all kinds of barrier are the same, as long as all threads meet the same ones. Warps
// that meet fewer in a loop pad with `others_turn`, which nothing here needs: loops with uneven counts use warp barriers only.
static void others_turn() { swapcontext(&lanes[current].context, &scheduler); }
struct Counter { int waiting = 0, generation = 0; };
static std::vector<Counter> warp_counters;
static Counter block_counters[CLUSTER], cluster_counter;
static void meet(Counter& counter, int all) {
  int generation = counter.generation;
  if (++counter.waiting == all) {
    counter.waiting = 0;
    counter.generation++;
  }
  while (counter.generation == generation) others_turn();
}
template <int>
INLINE void take_registers() {}
template <int>
INLINE void leave_registers() {}
INLINE void block_barrier() { meet(block_counters[OF_CLUSTER], block_threads); }
// Threads that have ended are not waited for.
INLINE void cluster_arrive() {}
INLINE void cluster_wait() {
  const int generation = cluster_counter.generation;
  cluster_counter.waiting++;
  while (cluster_counter.generation == generation) {
    int running = 0;
    for (const Lane& lane : lanes) running += !lane.done;
    if (cluster_counter.waiting == running) cluster_counter.waiting = 0, cluster_counter.generation++;
    else others_turn();
  }
}
static Counter some_counter;
INLINE void some_barrier(int threads) { meet(some_counter, threads); }
static Counter turns[16];
INLINE void wait_turn(int barrier, int threads) { meet(turns[barrier], threads); }
INLINE void give_turn(int barrier, int threads) {
  Counter& counter = turns[barrier];
  if (++counter.waiting == threads) counter.waiting = 0, counter.generation++;
}
INLINE void warp_barrier() { meet(warp_counters[current / 32], 32); }

INLINE void wait_for_inputs() {}
INLINE void release_dependents() {}

template <class T>
static T checked(const void* p) {
  if ((uintptr_t)p % sizeof(T)) {
    fprintf(stderr, "misaligned access\n");
    abort();
  }
  T r;
  memcpy(&r, p, sizeof(T));
  return r;
}
struct alignas(16) V16 { u32 v[4]; };
INLINE U4 stream16(const void* p) {
  V16 r = checked<V16>(p);
  return U4{{r.v[0], r.v[1], r.v[2], r.v[3]}};
}
INLINE U4 stream8(const void* p) {
  u64 r = checked<u64>(p);
  return U4{{(u32)r, (u32)(r >> 32), 0, 0}};
}
INLINE U4 load16(const void* p) { return stream16(p); }

INLINE int load_number(const int* p) { return checked<int>(p); }

INLINE u32 opaque(u32 x) { return x; }

INLINE u32 permute(u32 a, u32 b, u32 selector) {
  u64 all = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 s = selector >> 4 * i & 15;
    u32 byte = (u32)(all >> 8 * (s & 7)) & 255;
    r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}

static float bits(u32 x) { float r; memcpy(&r, &x, 4); return r; }
static u32 bits(float x) { u32 r; memcpy(&r, &x, 4); return r; }
INLINE float from_bfloat16(u16 x) { return bits((u32)x << 16); }
INLINE float from_float16(u16 x) {
  int e = x >> 10 & 31, m = x & 1023;
  float r = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.0f + m, e - 25) : std::ldexp((float)m, -24);
  return x & 0x8000 ? -r : r;
}
static u16 to_float16(float x) {
  _Float16 r = (_Float16)x;
  u16 raw;
  memcpy(&raw, &r, 2);
  return raw;
}
static u16 to_bfloat16(float x) {
  u32 raw = bits(x);
  return std::isnan(x) ? 0x7fff : (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
}
#if HALF
INLINE u16 narrow(float x) { return to_float16(x); }
static float widened(u16 x) { return from_float16(x); }
#else
INLINE u16 narrow(float x) { return to_bfloat16(x); }
static float widened(u16 x) { return from_bfloat16(x); }
#endif
INLINE float widen(u16 x) { return widened(x); }
INLINE u32 narrow2(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
INLINE u32 narrow2_half(float low, float high) { return to_float16(low) | (u32)to_float16(high) << 16; }
static float of_float8(u8 x) {
  int e = x >> 3 & 15, m = x & 7;
  float r = e == 15 && m == 7 ? NAN : e ? std::ldexp(8.0f + m, e - 10) : std::ldexp((float)m, -9);
  return x & 0x80 ? -r : r;
}
INLINE void widen_float8(u32& first, u32& second, u32 x) {
  first = narrow2_half(of_float8(x), of_float8(x >> 8)), second = narrow2_half(of_float8(x >> 16), of_float8(x >> 24));
}
INLINE u32 multiply_add2(u32 a, u32 b, u32 c) {
  u32 r = 0;
  // In double, rounded to float and then to 16 bits: exact for what the kernels ask, integers and powers of two.
  for (int i = 0; i < 32; i += 16) r |= (u32)narrow((float)((double)widened(a >> i) * widened(b >> i) + widened(c >> i))) << i;
  return r;
}

// What lane `lane` of the warp holds of a: rows lane / 4 and 8 below, columns 2 * (lane % 4) and 8 right of it.
static float operand_a(int row, int k, float (*number)(u16) = widened) {
  Lane& l = lanes[current / 32 * 32 + (row & 7) * 4 + (k & 7) / 2];
  return number(l.a[(row >> 3) + (k >> 3) * 2] >> (k & 1) * 16);
}

// All lanes of the warp show their registers; a second barrier, when all have looked, is the caller's.
static void show(const u32 (&a)[4], u32 b0, u32 b1) {
  memcpy(lanes[current].a, a, 16);
  lanes[current].b[0] = b0, lanes[current].b[1] = b1;
  warp_barrier();
}

static void warp_mma_of(float (*number)(u16), float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  int lane = current & 31;
  show(a, b0, b1);
  for (int e = 0; e < 4; e++) {
    int row = lane / 4 + (e >> 1) * 8, column = lane % 4 * 2 + (e & 1);
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      Lane& l = lanes[current / 32 * 32 + column * 4 + (k & 7) / 2];
      sum += operand_a(row, k, number) * number(l.b[k >> 3] >> (k & 1) * 16);
    }
    d[e] += sum;
  }
  warp_barrier();
}
INLINE void warp_mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { warp_mma_of(widened, d, a, b0, b1); }
INLINE void warp_mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { warp_mma_of(from_float16, d, a, b0, b1); }

INLINE u32 shared_address(const void* p) { return (const u8*)p - &shared_memory[0]; }
template <bool unsigned_b>
INLINE void warp_mma_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  int lane = current & 31;
  show(a, b0, b1);
  for (int e = 0; e < 4; e++) {
    int row = lane / 4 + (e >> 1) * 8, column = lane % 4 * 2 + (e & 1);
    for (int k = 0; k < 32; k++) {
      Lane& left = lanes[current / 32 * 32 + (row & 7) * 4 + k % 16 / 4];
      Lane& right = lanes[current / 32 * 32 + column * 4 + k % 16 / 4];
      u8 w = left.a[(row >> 3) + (k >> 4) * 2] >> k % 4 * 8, x = right.b[k >> 4] >> k % 4 * 8;
      d[e] += (int8_t)w * (unsigned_b ? (int)x : (int)(int8_t)x);
    }
  }
  warp_barrier();
}
static u32 shuffled[1024 * CLUSTER];
INLINE u32 of_lane(u32 x, int lane) {
  shuffled[current] = x;
  warp_barrier();
  u32 r = shuffled[current / 32 * 32 + lane];
  warp_barrier();
  return r;
}
template <int bit>
INLINE float of_neighbour(float x) {
  return bits(of_lane(bits(x), current % 32 ^ bit));
}
INLINE void load_matrices(u32 (&r)[4], u32 at) {
  shuffled[current] = at;
  warp_barrier();
  const int lane = current & 31;
  for (int i = 0; i < 4; i++) {
    const u32 row = shuffled[current / 32 * 32 + 8 * i + lane / 4];
    if (row % 16) abort();
    r[i] = checked<u32>(shared_memory + row + lane % 4 * 4);
  }
  warp_barrier();
}
INLINE void load_transposed(u32 (&r)[4], u32 at) {
  shuffled[current] = at;
  warp_barrier();
  const int lane = current & 31;
  for (int i = 0; i < 4; i++) {
    r[i] = 0;
    for (int k = 0; k < 2; k++) {
      const u32 row = shuffled[current / 32 * 32 + 8 * i + lane % 4 * 2 + k];
      if (row % 16) abort();
      r[i] |= (u32)checked<u16>(shared_memory + row + lane / 4 * 2) << 16 * k;
    }
  }
  warp_barrier();
}
INLINE u32 transpose(u32 x) {
  shuffled[current] = x;
  warp_barrier();
  const int lane = current & 31;
  u32 r = 0;
  for (int k = 0; k < 2; k++) r |= (shuffled[current / 32 * 32 + (lane % 4 * 2 + k) * 4 + lane / 8] >> lane / 4 % 2 * 16 & 0xffff) << 16 * k;
  warp_barrier();
  return r;
}
INLINE void wait_for_loads(u32, u32) { warp_barrier(); }
INLINE u32 largest(u32 a, u32 b) { return a > b ? a : b; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }
INLINE u32 as_bits(float x) { return bits(x); }

#if WARPGROUP
INLINE void begin_products() {}
INLINE void close_products() {}
INLINE void wait_for_products() {}
INLINE void wait_for_products_but_one() {}
template <int count>
INLINE void settle(float (&)[count]) {}
INLINE void show_to_products() {}
template <class T>
static T swizzled(u32 tile, int row, int byte) {
  T r;
  memcpy(&r, shared_memory + tile + row * 128 + (byte ^ (row % 8 * 16)), sizeof(T));
  return r;
}
#ifdef KEYS
INLINE void score_mma(float (&d)[KEYS / 2], u32 q, u32 k, int byte, bool add) {
  int lane = current & 31, warp = current / 32 % 4;
  if (q % 1024 || k % 1024) abort();
  for (int i = 0; i < KEYS / 2; i++) {
    int row = warp * 16 + lane / 4 + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + lane % 4 * 2 + (i & 1);
    float sum = add ? d[i] : 0;
    for (int e = 0; e < 16; e++) sum += widened(swizzled<u16>(q, row, byte + 2 * e)) * widened(swizzled<u16>(k, column, byte + 2 * e));
    d[i] = sum;
  }
}
// The second operand: 16 rows, 64 elements of each, then the next 64.
INLINE void value_mma(float (&d)[DIM / 2], const u32 (&a)[4], u32 v, int byte) {
  int lane = current & 31;
  v += byte;
  if (v % 1024) abort();
  show(a, 0, 0);
  for (int i = 0; i < DIM / 2; i++) {
    int row = lane / 4 + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + lane % 4 * 2 + (i & 1);
    for (int k = 0; k < 16; k++) d[i] += operand_a(row, k) * widened(swizzled<u16>(v + column / 64 * 2048, k, column % 64 * 2));
  }
  warp_barrier();
}
#endif
#ifdef FLOAT8
// Number `k` of a row of a tile in shared memory.
static float number(u32 tile, int row, int byte, int k) {
  if (FLOAT8) return of_float8(shared_memory[tile + row * 128 + ((byte + k) ^ (row % 8 * 16))]);
  return widened(swizzled<u16>(tile, row, byte + 2 * k));
}
INLINE void dense_mma(float (&d)[COLUMNS / 2], u32 x, u32 w, int byte) {
  int lane = current & 31, warp = current / 32 % 4;
  if (x % 1024 || w % 1024 || x + 8192 > sizeof(shared_memory)) abort();
  for (int i = 0; i < COLUMNS / 2; i++) {
    int row = warp * 16 + lane / 4 + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + lane % 4 * 2 + (i & 1);
    float sum = 0;
    for (int k = 0; k < (FLOAT8 ? 32 : 16); k++) sum += number(x, row, byte, k) * number(w, column, byte, k);
    d[i] += sum;
  }
}
#else
// number(column, k): of the other operand.
template <int count, typename Number>
INLINE void warpgroup_mma_with(float (&d)[count], const u32 (&a)[4], Number number) {
  int lane = current & 31;
  show(a, 0, 0);
  for (int i = 0; i < count; i++) {
    int row = lane / 4 + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + lane % 4 * 2 + (i & 1);
    float sum = 0;
    for (int k = 0; k < 16; k++) sum += operand_a(row, k) * widened(number(column, k));
    d[i] += sum;
  }
  warp_barrier();
}
template <int count>
INLINE void warpgroup_mma(float (&d)[count], const u32 (&a)[4], u32 tile, int byte) {
  if (tile % 1024) abort();
  warpgroup_mma_with(d, a, [&](int column, int k) { return swizzled<u16>(tile, column, byte + 2 * k); });
}
// The same with 16 numbers of each row that lie eight rows by eight numbers together.
template <int count>
INLINE void warpgroup_mma_plain(float (&d)[count], const u32 (&a)[4], u32 tile) {
  if (tile % 16) abort();
  warpgroup_mma_with(d, a, [&](int column, int k) {
    return checked<u16>(shared_memory + tile + column / 8 * 256 + k / 8 * 128 + column % 8 * 16 + k % 8 * 2);
  });
}
// The same with bytes: rows of x have their upper and lower ones in two columns.
template <int count>
INLINE void warpgroup_mma(int (&d)[count], const u32 (&a)[4], u32 tile, int byte) {
  int lane = current & 31;
  if (tile % 1024) abort();
  show(a, 0, 0);
  for (int i = 0; i < count; i++) {
    int row = lane / 4 + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + lane % 4 * 2 + (i & 1);
    for (int k = 0; k < 32; k++) {
      Lane& left = lanes[current / 32 * 32 + (row & 7) * 4 + k % 16 / 4];
      d[i] += (int8_t)(left.a[(row >> 3) + (k >> 4) * 2] >> k % 4 * 8) * (int)swizzled<int8_t>(tile, column, byte + k);
    }
  }
  warp_barrier();
}
template <class T, int count>
INLINE void warpgroup_mma_fresh(T (&d)[count], const u32 (&a)[4], u32 tile, int byte) {
  for (T& x : d) x = 0;
  warpgroup_mma(d, a, tile, byte);
}
#endif
#endif

INLINE U4 shared16(u32 at) { return stream16(shared_memory + at); }
INLINE U4 shared16_of(u32 at, int rank) { return stream16(memories[rank] + at); }
INLINE U4 shared8(u32 at) { return stream8(shared_memory + at); }
INLINE u32 shared4(u32 at) { return checked<u32>(shared_memory + at); }
INLINE u16 shared2(u32 at) { return checked<u16>(shared_memory + at); }
INLINE u32 shared1(u32 at) { return shared_memory[at]; }
INLINE void put_word(u32 at, u32 x) {
  if (at % 4 || at + 4 > sizeof(shared_memory)) abort();
  memcpy(shared_memory + at, &x, 4);
}
INLINE void put_vector(u32 at, const U4& x) {
  if (at % 16 || at + 16 > sizeof(shared_memory)) abort();
  memcpy(shared_memory + at, x.v, 16);
}
INLINE void put_shared(u32 at, float x) { memcpy(shared_memory + at, &x, 4); }
INLINE float as_float(u32 x) { return bits(x); }
INLINE void store_floats(float* p, const float (&x)[4]) { memcpy(p, x, 16); }

INLINE void store_pair(float* p, float x, float y) { p[0] = x, p[1] = y; }
INLINE void store4(u8* p, u32 x) {
  if ((uintptr_t)p % 4) abort();
  memcpy(p, &x, 4);
}
INLINE void store8(u8* p, u32 x, u32 y) {
  if ((uintptr_t)p % 8) abort();
  memcpy(p, &x, 4), memcpy(p + 4, &y, 4);
}
#define INFINITE INFINITY
INLINE float larger(float a, float b) { return std::fmax(a, b); }
INLINE float power_of_2(float x) { return std::exp2(x); }

// Barriers in shared memory, by their address.
struct Phase {
  int all, arrived = 0, bytes = 0, completed = 0;
};
static std::map<u32, Phase> all_phases[CLUSTER];
#define phases all_phases[OF_CLUSTER]
static void end_phase(Phase& p) {
  if (p.arrived == p.all && p.bytes == 0) p.arrived = 0, p.completed++;
}
INLINE void set_barrier(u32 bar, int arrivals) { phases[bar] = Phase{arrivals}; }
INLINE void publish_barriers() {}
INLINE void expect_bytes(u32 bar, int bytes) {
  phases.at(bar).bytes += bytes, phases.at(bar).arrived++;
  end_phase(phases.at(bar));
}
INLINE void arrive_at(u32 bar) {
  phases.at(bar).arrived++;
  end_phase(phases.at(bar));
}
INLINE void wait_at(u32 bar, int parity) {
  while ((phases.at(bar).completed & 1) == parity) others_turn();
}
INLINE void sleep_at(u32 bar, int parity) { wait_at(bar, parity); }
static void copy_tensor(u32 to, const Map& map, const int64_t (&from)[5], u32 bar) {
  if (to % (map.exchanged ? 1024 : 128)) abort();
  const int64_t bytes = 4 * map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.box[4];
  if (to + bytes > sizeof(shared_memory)) abort();
  for (int64_t i = 0; i < bytes / 4; i++) {
    int64_t rest = i, offset = 0;
    bool inside = true;
    for (int d = 0; d < 5; d++) {
      const int64_t x = from[d] + rest % map.box[d];
      rest /= map.box[d];
      inside &= x >= 0 && x < map.shape[d];
      offset += x * map.strides[d];
    }
    u32 at = to + 4 * i;
    if (map.exchanged) at ^= (at >> 7 & (map.exchanged == 1 ? 7 : 3)) << 4;  // lines of 128 bytes, or of 64
    if (inside) memcpy(shared_memory + at, map.data + offset, 4);
    else memset(shared_memory + at, 0, 4);
  }
  phases.at(bar).bytes -= bytes;
  end_phase(phases.at(bar));
}
INLINE void copy_box(u32 to, const Map& map, int row, int chunk, u32 bar) { copy_tensor(to, map, {0, row, chunk, 0, 0}, bar); }
INLINE void copy_box_at(u32 to, const Map& map, int word, int row, u32 bar) { copy_tensor(to, map, {word, row, 0, 0, 0}, bar); }
INLINE void copy_box_once(u32 to, const Map& map, int row, int chunk, u32 bar) { copy_box(to, map, row, chunk, bar); }
INLINE void copy_page(u32 to, const Map& map, int row, int head, int block, u32 bar) { copy_tensor(to, map, {0, row, 0, head, block}, bar); }
INLINE void copy_lines(u32 to, const Map& map, int row, int line, int head, int block, u32 bar) { copy_tensor(to, map, {0, row, line, head, block}, bar); }
// They are there as late as may be, and what is read before is wrong.
INLINE void begin_copy16(u32 to, const u8* from) {
  if (to % 16 || (uintptr_t)from % 16 || to + 16 > sizeof(shared_memory)) abort();
  lanes[current].copies.push_back({lanes[current].closed, to, from});
}
INLINE void close_copies() { lanes[current].closed++; }
template <int count>
INLINE void wait_for_copies_but() {
  auto& copies = lanes[current].copies;
  for (; !copies.empty() && copies.front().group < lanes[current].closed - count; copies.pop_front())
    memcpy(shared_memory + copies.front().to, copies.front().from, 16);
}
INLINE void prefetch_map(const Map&) {}
INLINE void copy_bytes(u32 to, const u8* from, int bytes, u32 bar) {
  if (to % 16 || (uintptr_t)from % 16 || bytes % 16 || to + bytes > sizeof(shared_memory)) abort();
  memcpy(shared_memory + to, from, bytes);
  phases.at(bar).bytes -= bytes;
  end_phase(phases.at(bar));
}

static bool votes[32 * CLUSTER];
INLINE bool any_lane(bool x) {
  votes[current / 32] = false;
  warp_barrier();
  if (x) votes[current / 32] = true;
  warp_barrier();
  bool r = votes[current / 32];
  warp_barrier();
  return r;
}

INLINE bool counted_last(int* counter, int all) {
  bool last = (*counter)++ == all - 1;
  if (last) *counter = 0;
  return last;
}
INLINE float load_fresh(const float* p) { return *p; }
template <int N>
INLINE void load_fresh(float (&r)[N], const float* p, bool there) {
  memset(r, 0, sizeof(r));
  if (!there) return;
  if ((uintptr_t)p % (4 * N)) abort();
  memcpy(r, p, 4 * N);
}
INLINE U4 load_fresh16(const float* p) { return stream16(p); }

INLINE void store16(void* p, const U4& x) {
  if ((uintptr_t)p % 16) abort();
  memcpy(p, x.v, 16);
}
INLINE void put_number(u32* p, u32 x) { *p = x; }
INLINE float inverse_root(float x) { return 1.0f / std::sqrt(x); }
INLINE int lowest_bit(u32 x) { return __builtin_ctz(x); }

// Between the threads that play GPUs.
INLINE void put_words(void* p, u64 a, u64 b) {
  if ((uintptr_t)p % 16) abort();
  __atomic_store_n((u64*)p, a, __ATOMIC_RELAXED);
  __atomic_store_n((u64*)p + 1, b, __ATOMIC_RELAXED);
}
INLINE void get_words(u64& a, u64& b, const void* p) {
  if ((uintptr_t)p % 16) abort();
  b = __atomic_load_n((const u64*)p + 1, __ATOMIC_RELAXED);
  a = __atomic_load_n((const u64*)p, __ATOMIC_RELAXED);
}
INLINE void announce(u32* p, u32 x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
INLINE u32 announced(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
INLINE void tell_host(u32* p, u32 x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
INLINE u64 nanoseconds() {
  sched_yield();  // who asks waits for another thread
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (u64)now.tv_sec * 1000000000 + now.tv_nsec;
}

static std::function<void()> body;
static void enter() {
  body();
  lanes[current].done = true;
  others_turn();
}
static void run_blocks(int threads, int x, int y, int z, std::function<void()> kernel) {
  body = kernel;
  grid_x = x, block_threads = threads;
  if (x % CLUSTER) abort();
  for (block[2] = 0; block[2] < z; block[2]++)
    for (block[1] = 0; block[1] < y; block[1]++)
      for (block[0] = 0; block[0] < x; block[0] += CLUSTER) {
        lanes.assign(threads * CLUSTER, Lane());
        warp_counters.assign(threads * CLUSTER / 32, Counter());
        for (Counter& counter : block_counters) counter = Counter();
        cluster_counter = some_counter = Counter();
        for (Counter& turn : turns) turn = Counter();
        for (auto& of_block : all_phases) of_block.clear();
        memset(memories, 0xff, sizeof(memories));
        for (auto& lane : lanes) {
          lane.stack.resize(128 << 10);
          getcontext(&lane.context);
          lane.context.uc_stack.ss_sp = lane.stack.data();
          lane.context.uc_stack.ss_size = lane.stack.size();
          lane.context.uc_link = &scheduler;
          makecontext(&lane.context, enter, 0);
        }
        for (int left = threads; left;) {
          left = 0;
          for (current = 0; current < threads * CLUSTER; current++)
            if (!lanes[current].done) swapcontext(&scheduler, &lanes[current].context), left += !lanes[current].done;
        }
      }
}
