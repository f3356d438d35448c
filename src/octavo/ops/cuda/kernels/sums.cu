// The sums of x over groups of 32 inner elements, as `ordered` multiplies them with the groups' offsets: the second operand of a product of
// 16 inner elements for each 128 of x and ROWS rows. Elements 2 * g and 2 * g + 1 of a row are the upper part of group g's sum in x's
// dtype, those 8 further what that leaves out. Eight rows of 16 bytes lie together, and 128 bytes further their other halves.

#define THREADS 256

KERNEL(low_bit_sums, THREADS)(Inputs p) {
  const int k = (block_x() * THREADS + thread_id()) * 8, row = block_y(), local = row % ROWS;
  release_dependents();  // `ordered` asks for weights meanwhile, and reads nothing else before it has waited
  wait_for_inputs();
  float sum = 0.0f;
  if (k < p.inner) {
    const U4 v = load16(p.x + (long long)row * p.x_stride + 2 * k);
UNROLL
    for (int e = 0; e < 4; e++) sum += widen(v.v[e]) + widen(v.v[e] >> 16);
  }
  sum += of_neighbour<1>(sum);
  sum += of_neighbour<2>(sum);
  if (k >= p.inner || (thread_id() & 3) > 0) return;
  sum *= SUM_FACTOR;
  const u16 upper = narrow(sum), lower = narrow(sum - widen(upper));
  u8* to = p.image + ((long long)(row / ROWS) * p.stages + k / 128) * (ROWS * 32) + local / 8 * 256 + local % 8 * 16 + k / 32 % 4 * 4;
  store4(to, both(upper));
  store4(to + 128, both(lower));
}
