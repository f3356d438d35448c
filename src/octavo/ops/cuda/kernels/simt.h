// What the kernels use of the machine, one function an instruction. The tests have the same functions for a CPU, where the threads
// of a block take turns: nothing else in the kernels depends on where they run.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define INLINE __device__ __forceinline__
#define KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads) name
#define KERNEL_TOGETHER(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
#define SHARED_BYTES(name) extern __shared__ __align__(1024) u8 name[]

struct U4 {
  u32 v[4];
};
// The driver's CUtensorMap; a kernel's parameter, never a copy of it.
struct __align__(64) Map {
  u64 opaque[16];
};
#define CONSTANT_MAP const __grid_constant__ Map

INLINE int thread_id() { return threadIdx.x; }
INLINE int block_x() { return blockIdx.x; }
INLINE int block_y() { return blockIdx.y; }
INLINE int block_z() { return blockIdx.z; }
INLINE int blocks_x() { return gridDim.x; }

// So many registers a thread from here on; for all warps of a warp group. More are waited for until others have left as many.
template <int count>
INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
INLINE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
INLINE void block_barrier() { __syncthreads(); }
// Of the first so many threads of a block.
INLINE void some_barrier(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// So many threads meet at a barrier of this number; who gives the turn does not wait.
INLINE void wait_turn(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
INLINE void give_turn(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// Programmatic dependent launch: wait for what the kernel before wrote; let the next one be set up.
INLINE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void release_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Activations: read by many.
INLINE U4 load16(const void* p) {
  U4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p));
  return r;
}

INLINE int load_number(const int* p) {
  int r;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}

// A value that the compiler does not know, so that it keeps it.
INLINE u32 opaque(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// Bytes of (a, b) by the four low nibbles of `selector`.
INLINE u32 permute(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// Pairs of 16-bit numbers: float16 where HALF, else bfloat16.
INLINE u32 multiply_add2(u32 a, u32 b, u32 c) {
  u32 r;
#if HALF
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#endif
  return r;
}
INLINE u16 narrow(float x) {
  u16 r;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
  return r;
}
INLINE u32 narrow2(float low, float high) {
  u32 r;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}
// The same for float16, whatever HALF is.
INLINE u32 narrow2_half(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Four numbers of float8 (e4m3) as float16, exactly: the first two and the others.
INLINE void widen_float8(u32& first, u32& second, u32 x) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(x));
}
INLINE float from_bfloat16(u16 x) { return __uint_as_float((u32)x << 16); }
INLINE float from_float16(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
INLINE float widen(u16 x) {
#if HALF
  return from_float16(x);
#else
  return from_bfloat16(x);
#endif
}

// d [16, 8] += a [16, 16] @ b [16, 8], spread over the lanes of a warp as the instruction has it.
INLINE void warp_mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE void warp_mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
  warp_mma_half(d, a, b0, b1);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four matrices of [8, 8] numbers of 16 bits from shared memory, lane 8 * i + j giving the address of row j of matrix i: of each, a lane
// gets columns 2 * (lane % 4) and the next of row lane / 4; transposed, rows 2 * (lane % 4) and the next of column lane / 4.
INLINE void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
INLINE void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// One such matrix, held as rows, as columns.
INLINE u32 transpose(u32 x) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

INLINE U4 shared16(u32 at) {
  U4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "r"(at) : "memory");
  return r;
}
INLINE U4 shared8(u32 at) {
  U4 r;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "r"(at) : "memory");
  r.v[2] = r.v[3] = 0;
  return r;
}
INLINE u32 shared4(u32 at) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
  return r;
}
INLINE u16 shared2(u32 at) {
  u16 r;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(at) : "memory");
  return r;
}
INLINE u32 shared1(u32 at) {
  u32 r;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
  return r;
}
INLINE void put_word(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
INLINE void put_vector(u32 at, const U4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x.v[0]), "r"(x.v[1]), "r"(x.v[2]), "r"(x.v[3]) : "memory");
}
INLINE void put_shared(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
INLINE float as_float(u32 x) { return __uint_as_float(x); }
INLINE u32 as_bits(float x) { return __float_as_uint(x); }
INLINE void store_floats(float* p, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
INLINE void store_pair(float* p, float x, float y) { asm volatile("st.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(x), "f"(y) : "memory"); }
INLINE void store4(u8* p, u32 x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
INLINE void store8(u8* p, u32 x, u32 y) { asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(x), "r"(y) : "memory"); }
#define INFINITE __int_as_float(0x7f800000)
INLINE float larger(float a, float b) { return fmaxf(a, b); }
INLINE float power_of_2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
INLINE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
// Passes when the loads of all lanes of the warp that gave these values are done. What is written elsewhere by the copy engine is not
// ordered behind a load that is merely on its way; a branch on what was loaded is.
INLINE void wait_for_loads(u32 a, u32 b) {
  if (__any_sync(0xffffffffu, (a ^ b) == 0x5bd1e995u)) asm volatile("nanosleep.u32 1;" ::: "memory");
}
INLINE void warp_barrier() { __syncwarp(); }

// Blocks of a cluster are there at the same time. What a thread wrote before it arrived is seen by all that have waited; all of the
// cluster's threads take part, but those that have ended.
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// From the same place in the shared memory of another block of the cluster.
INLINE U4 shared16_of(u32 at, int rank) {
  U4 r;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [there];\n}"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
               : "r"(at), "r"(rank)
               : "memory");
  return r;
}

// Barriers in shared memory: a phase ends when all have arrived, and all bytes that were announced.
INLINE void set_barrier(u32 bar, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory"); }
INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void expect_bytes(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
INLINE void arrive_at(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
INLINE void wait_at(u32 bar, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// The same, asleep meanwhile: who asks again and again takes turns and power from those that compute.
INLINE void sleep_at(u32 bar, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n@done bra over;\nbra again;\nover:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// A box of the tensor that `map` describes, by the copy engine: WIDTH bytes of so many rows from `row` on, so many chunks from `chunk` on;
// in shared memory chunk by chunk, row by row. Zeros outside. Its bytes count at the barrier when they are there.
INLINE void copy_box(u32 to, const Map& map, int row, int chunk, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(&map), "r"(0),
               "r"(row), "r"(chunk), "r"(bar)
               : "memory");
}
// The same from word `word` of each row on, and of chunk 0.
INLINE void copy_box_at(u32 to, const Map& map, int word, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(&map), "r"(word),
               "r"(row), "r"(0), "r"(bar)
               : "memory");
}
// The same as `copy_box` for what is read once: it leaves the L2 cache before anything else.
INLINE void copy_box_once(u32 to, const Map& map, int row, int chunk, u32 bar) {
  asm volatile(
      "{\n.reg .b64 first;\ncreatepolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], first;\n}" ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(chunk), "r"(bar)
      : "memory");
}
// Sixteen rows of one head in block `block` of a cache, from `row` of the block on: in shared memory 128 bytes of each row, then the
// next 128; the 16-byte pieces of each 128 exchanged by the row's number modulo 8, so that no matrix of 8 rows has bank conflicts.
INLINE void copy_page(u32 to, const Map& map, int row, int head, int block, u32 bar) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to), "l"(&map),
               "r"(0), "r"(row), "r"(0), "r"(head), "r"(block), "r"(bar)
               : "memory");
}
// The same for a box of the map's own size, from line `line` of 128 bytes of each row on.
INLINE void copy_lines(u32 to, const Map& map, int row, int line, int head, int block, u32 bar) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to), "l"(&map),
               "r"(0), "r"(row), "r"(line), "r"(head), "r"(block), "r"(bar)
               : "memory");
}
// 16 bytes into shared memory, without waiting for them: what a thread has asked for up to `close_copies` is there, for itself, when
// `wait_for_copies_but` so many later ones has passed.
INLINE void begin_copy16(u32 to, const u8* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
INLINE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int count>
INLINE void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(count) : "memory");
}
INLINE void prefetch_map(const Map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// The same for bytes that lie in a row: a multiple of 16, from a multiple of 16 to another.
INLINE void copy_bytes(u32 to, const u8* from, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}

// As `warp_mma`, for [16, 32] int8 and [32, 8] int8 or, `unsigned_b`, uint8: exact sums.
template <bool unsigned_b>
INLINE void warp_mma_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (unsigned_b)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE u32 of_lane(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
// Of the lane whose number differs in this bit.
template <int bit>
INLINE float of_neighbour(float x) {
  return __shfl_xor_sync(0xffffffffu, x, bit);
}
INLINE u32 largest(u32 a, u32 b) { return a > b ? a : b; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#if WARPGROUP
INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
INLINE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
INLINE void wait_for_products_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
// What products have written is read behind the wait for them, not earlier.
template <int count>
INLINE void settle(float (&d)[count]) {
UNROLL
  for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Earlier stores to shared memory are seen by the tensor cores and the copy engine.
INLINE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Rows of 128 bytes, their 16-byte pieces exchanged by the row's number modulo 8: so the tensor cores read without bank conflicts.
INLINE u64 swizzled_operand(u32 tile, int byte) {
  const u32 low = ((tile & 0x3ffff) >> 4 | 1u << 16) + (byte >> 4);
  return (u64)(64u | 1u << 30) << 32 | low;
}
// The same, for several bytes of one tile: what they have in common is made once.
INLINE u64 swizzled_operand_of(u32 tile, int byte) { return swizzled_operand(tile, 0) + (u64)(byte >> 4); }
// Sixteen numbers of each row: the first eight of eight rows lie together, the others 128 bytes further; the next eight rows 256 further.
INLINE u64 plain_operand(u32 tile) { return (u64)16 << 32 | ((tile & 0x3ffff) >> 4 | 8u << 16); }
// The same for a matrix whose columns are the rows: 16 of them, 64 elements of each, and `lines` bytes further the next 64.
INLINE u64 transposed_operand(u32 tile, int byte, int lines) {
  const u32 low = ((tile & 0x3ffff) >> 4 | (u32)lines >> 4 << 16) + (byte >> 4);
  return (u64)(64u | 1u << 30) << 32 | low;
}
#endif

// This thread's earlier stores, and those of others before a barrier, are seen by whoever sees the count; true for the one that completes
// `all`.
INLINE bool counted_last(int* counter, int all) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  if (before == all - 1) *counter = 0;
  return before == all - 1;
}
INLINE float load_fresh(const float* p) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p));
  return r;
}
// Zeros, and nothing is read, unless `there`: no branch.
INLINE void load_fresh(float (&r)[2], const float* p, bool there) {
  r[0] = r[1] = 0.0f;
  asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %3, 0;\n@there ld.global.cg.v2.f32 {%0,%1}, [%2];\n}" : "+f"(r[0]), "+f"(r[1]) : "l"(p), "r"((int)there));
}
INLINE void load_fresh(float (&r)[4], const float* p, bool there) {
  r[0] = r[1] = r[2] = r[3] = 0.0f;
  asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %5, 0;\n@there ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];\n}"
               : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3])
               : "l"(p), "r"((int)there));
}
INLINE U4 load_fresh16(const float* p) {
  U4 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p));
  return r;
}

INLINE void store16(void* p, const U4& x) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.v[0]), "r"(x.v[1]), "r"(x.v[2]), "r"(x.v[3]) : "memory");
}
INLINE void put_number(u32* p, u32 x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
INLINE float inverse_root(float x) { return rsqrtf(x); }
INLINE int lowest_bit(u32 x) { return __ffs(x) - 1; }

// Between GPUs, and with the host. Words of 8 bytes are seen whole, one before the other or after it.
INLINE void put_words(void* p, u64 a, u64 b) { asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(a), "l"(b) : "memory"); }
INLINE void get_words(u64& a, u64& b, const void* p) { asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory"); }
// Whoever sees this number sees all that the block wrote before its last barrier.
INLINE void announce(u32* p, u32 x) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
INLINE u32 announced(const u32* p) {
  u32 r;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
INLINE void tell_host(u32* p, u32 x) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
INLINE u64 nanoseconds() {
  u64 r;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(r));
  return r;
}
