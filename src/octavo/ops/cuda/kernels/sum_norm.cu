// What each of several GPUs has of a row, added up, added to the residual stream and normed (RMSNorm), in one kernel: GPUs write into each
// other's memory what is theirs, and wait in their own for what is the others'. A block has one row at a time, and all blocks are on the
// GPU at once, so that nobody waits for a block that cannot start.
//
// Each row has an epoch, counted up by every sum it is part of, in memory of this GPU: the same on all, also when a graph is replayed.
// Slots take turns by its lowest bit: whoever is at epoch e has got something of e - 1 that depends on everybody, so everybody has begun
// e - 1, and has ended the kernel of e - 2 that read the slot.
//
// WORDS: every four bytes travel with the epoch in one word of eight, so that whoever sees the word knows that they are there: one way over
// the link, twice the bytes. Otherwise plain bytes, then the epoch in a flag a row, which is seen after them: two ways, for many rows.
// TWO_SHOTS: a row goes to one GPU (`row % RANKS`), which adds it up and gives everybody the new row of the residual stream.
// Sums are float32, in the order of the ranks, rounded once, with the residual: the same bits on all GPUs, however many rows there are.

struct Args {
  const u8* x;
  u8* residual;
  const u8* weight;
  u8* out;            // may be x
  u8* slots[RANKS];   // each GPU's, as this one sees them
  u8* own;            // this one's among them
  u32* epochs;        // of rows; before the first: whether a rank has been given up, by a kernel or by the host
  u32* missing;       // on the host: 1 + the rank that has been given up
  u64 flags_at;       // in slots
  u64 patience;       // nanoseconds
  float eps;
  int rank, rows, capacity, early;  // capacity: rows that slots have room for
  int x_stride, residual_stride, out_stride;
};

#if FLOAT32
#define PER 4  // numbers in a piece of 16 bytes
INLINE float number_of(const U4& v, int e) { return as_float(v.v[e]); }
INLINE void round_to(U4& v, int e, float even, float odd) { v.v[e] = as_bits(even), v.v[e + 1] = as_bits(odd); }
INLINE float rounded(float x) { return x; }
#else
#define PER 8
INLINE float number_of(const U4& v, int e) { return widen((u16)(v.v[e / 2] >> e % 2 * 16)); }
INLINE void round_to(U4& v, int e, float even, float odd) { v.v[e / 2] = narrow2(even, odd); }
INLINE float rounded(float x) { return widen(narrow(x)); }
#endif
#define PIECES (DIM / PER)
#define SLOT_BYTES ((WORDS ? 2 : 1) * PIECES * 16)
#define SPINS 256
// A thread's pieces of a row: number i is `piece`.
#define EACH_PIECE(i)                   \
  UNROLL for (int i = 0; i < VECTORS; i++) \
    if (const int piece = i * THREADS + thread_id(); piece < PIECES)
#define EACH_RANK(r) UNROLL for (int r = 0; r < RANKS; r++)

typedef U4 Row[VECTORS];

INLINE u32 epoch_of(const Args& p, int row) { return (u32)load_number((const int*)p.epochs + row) + 1; }
INLINE long long place_of(const Args& p, u32 epoch, int sender, int row) { return (long long)((epoch & 1) * RANKS + sender) * p.capacity + row; }
INLINE u8* slot_of(const Args& p, u8* slots, u32 epoch, int sender, int row) { return slots + place_of(p, epoch, sender, row) * SLOT_BYTES; }
INLINE u32* flag_of(const Args& p, u8* slots, u32 epoch, int sender, int row) { return (u32*)(slots + p.flags_at) + place_of(p, epoch, sender, row); }
INLINE u64 word_of(u32 data, u32 epoch) { return (u64)epoch << 32 | data; }

INLINE void load_row(Row& v, const u8* rows, int row, int stride) {
  EACH_PIECE(i) v[i] = load16(rows + (long long)row * stride + piece * 16);
}

// Gives a row to the ranks in `to`'s bits, none of which is this one.
INLINE void give(const Args& p, const Row& v, u32 to, u32 epoch, int row) {
  EACH_RANK(r) if (to >> r & 1) {
    u8* slot = slot_of(p, p.slots[r], epoch, p.rank, row);
    EACH_PIECE(i) {
#if WORDS
      put_words(slot + piece * 16, word_of(v[i].v[0], epoch), word_of(v[i].v[1], epoch));
      put_words(slot + (PIECES + piece) * 16, word_of(v[i].v[2], epoch), word_of(v[i].v[3], epoch));
#else
      store16(slot + piece * 16, v[i]);
#endif
    }
  }
}

// Waits no longer than it has patience, and then says for whom.
struct Patience {
  u32 *given_up, *missing;
  u64 length, until;
  int over, spins;
};
INLINE bool ends(Patience& patience, int rank) {
  if (patience.over) return true;
  if (++patience.spins % SPINS) return false;
  const u64 now = nanoseconds();
  if (patience.until == 0) patience.until = now + patience.length;
  if (announced(patience.given_up)) return patience.over = 1;
  if (now < patience.until) return false;
  put_number(patience.given_up, 1), tell_host(patience.missing, 1 + rank);
  return patience.over = 1;
}

// Without WORDS: until the ranks in `from`'s bits have announced a row. For all threads of a block.
INLINE void await(const Args& p, Patience& patience, u32 from, u32 epoch, int row) {
  if (thread_id() < RANKS && (from >> thread_id() & 1))
    while (announced(flag_of(p, p.own, epoch, thread_id(), row)) != epoch)
      if (ends(patience, thread_id())) break;
  block_barrier();
}

// A piece of what the ranks in `from` have given of a row; with WORDS, when they have.
INLINE void take(U4 (&got)[RANKS], const Args& p, Patience& patience, u32 from, u32 epoch, int row, int piece) {
#if WORDS
  u32 absent;
  do {
    absent = 0;
    EACH_RANK(r) if (from >> r & 1) {
      const u8* slot = slot_of(p, p.own, epoch, r, row);
      u64 a, b, c, d;
      get_words(a, b, slot + piece * 16), get_words(c, d, slot + (PIECES + piece) * 16);
      got[r] = U4{{(u32)a, (u32)b, (u32)c, (u32)d}};
      const bool there = (u32)(a >> 32) == epoch && (u32)(b >> 32) == epoch && (u32)(c >> 32) == epoch && (u32)(d >> 32) == epoch;
      if (!there) absent |= 1u << r;
    }
  } while (absent && !ends(patience, lowest_bit(absent)));
#else
  EACH_RANK(r) if (from >> r & 1) got[r] = load_fresh16((const float*)(slot_of(p, p.own, epoch, r, row) + piece * 16));
#endif
}

// Adds what all have of a row to `stream`, the residual's, and rounds it.
INLINE void add_up(Row& stream, const Args& p, Patience& patience, const Row& mine, u32 others, u32 epoch, int row) {
  EACH_PIECE(i) {
    U4 got[RANKS] = {};
    take(got, p, patience, others, epoch, row, piece);
    EACH_RANK(r) if (r == p.rank) got[r] = mine[i];
UNROLL
    for (int e = 0; e < PER; e += 2) {
      float even = number_of(got[0], e), odd = number_of(got[0], e + 1);
UNROLL
      for (int r = 1; r < RANKS; r++) even += number_of(got[r], e), odd += number_of(got[r], e + 1);
      round_to(stream[i], e, even + number_of(stream[i], e), odd + number_of(stream[i], e + 1));
    }
  }
}

// The row that its owner has added up.
INLINE void receive(Row& stream, const Args& p, Patience& patience, int owner, u32 epoch, int row) {
  EACH_PIECE(i) {
    U4 got[RANKS] = {};
    take(got, p, patience, 1u << owner, epoch, row, piece);
    EACH_RANK(r) if (r == owner) stream[i] = got[r];
  }
}

// Over the threads of a block, in an order that depends on nothing but their number.
INLINE float total_of(float x, u32 room) {
UNROLL
  for (int i = 1; i < 32; i *= 2) x += as_float(of_lane(as_bits(x), (thread_id() & 31) ^ i));
  if ((thread_id() & 31) == 0) put_shared(room + thread_id() / 32 * 4, x);
  block_barrier();
  x = 0.0f;
UNROLL
  for (int i = 0; i < THREADS / 32; i++) x += as_float(shared4(room + i * 4));
  return x;
}

// Stores a row of the residual stream, and its norm. `turn` changes from row to row: threads may still read the sums of the one before.
INLINE void finish(const Args& p, const Row& stream, const Row& weight, int row, u32 shared, int turn) {
  float squares = 0.0f;
  EACH_PIECE(i) {
    store16(p.residual + (long long)row * p.residual_stride + piece * 16, stream[i]);
UNROLL
    for (int e = 0; e < PER; e++) squares += number_of(stream[i], e) * number_of(stream[i], e);
  }
  const float scale = inverse_root(total_of(squares, shared + turn % 2 * 128) * (1.0f / DIM) + p.eps);
  EACH_PIECE(i) {
    U4 out;
UNROLL
    for (int e = 0; e < PER; e += 2)
      round_to(out, e, rounded(number_of(stream[i], e) * scale) * number_of(weight[i], e),
               rounded(number_of(stream[i], e + 1) * scale) * number_of(weight[i], e + 1));
    store16(p.out + (long long)row * p.out_stride + piece * 16, out);
  }
}

// Without WORDS: what this block's threads have given of its rows is there, for those of the ranks that `to` says.
template <class To>
INLINE void announce_rows(const Args& p, To to) {
  block_barrier();
  for (int row = block_x() + thread_id() * blocks_x(); row < p.rows; row += THREADS * blocks_x())
    EACH_RANK(r) if (to(row) >> r & 1) announce(flag_of(p, p.slots[r], epoch_of(p, row), p.rank, row), epoch_of(p, row));
}

KERNEL_TOGETHER(sum_norm, THREADS, BLOCKS_A_SM)(Args p) {
  SHARED_BYTES(memory);
  const u32 shared = shared_address(memory), all = (1u << RANKS) - 1, others = all & ~(1u << p.rank);
  Row weight, mine, stream;
  load_row(weight, p.weight, 0, 0);
  if (p.early) release_dependents();
  wait_for_inputs();
  if (!p.early) release_dependents();
  Patience patience = {p.epochs - 1, p.missing, p.patience, 0, 0, 0};
  int turn = 0;
#if WORDS
  for (int row = block_x(); row < p.rows; row += blocks_x()) {
    const bool ours = !TWO_SHOTS || row % RANKS == p.rank;
    load_row(mine, p.x, row, p.x_stride);
    const u32 epoch = epoch_of(p, row);
    patience.over |= load_number((const int*)p.epochs - 1);
    if (ours) load_row(stream, p.residual, row, p.residual_stride);
    if (!TWO_SHOTS || !ours) give(p, mine, TWO_SHOTS ? 1u << row % RANKS : others, epoch, row);
    if (ours) add_up(stream, p, patience, mine, others, epoch, row);
    else receive(stream, p, patience, row % RANKS, epoch, row);
    if (TWO_SHOTS && ours) give(p, stream, others, epoch, row);
    finish(p, stream, weight, row, shared, turn++);
    if (thread_id() == 0) put_number(p.epochs + row, epoch);
  }
#else
  patience.over = load_number((const int*)p.epochs - 1);
  const auto owner = [](int row) { return 1u << row % RANKS; };
  for (int row = block_x(); row < p.rows; row += blocks_x()) {
    const u32 to = TWO_SHOTS ? owner(row) & others : others, epoch = epoch_of(p, row);
    load_row(mine, p.x, row, p.x_stride);
    give(p, mine, to, epoch, row);
  }
  announce_rows(p, [=](int row) { return TWO_SHOTS ? owner(row) & others : others; });
  for (int row = block_x(); row < p.rows; row += blocks_x()) {
    if (TWO_SHOTS && row % RANKS != p.rank) continue;
    const u32 epoch = epoch_of(p, row);
    load_row(mine, p.x, row, p.x_stride);
    load_row(stream, p.residual, row, p.residual_stride);
    await(p, patience, others, epoch, row);
    add_up(stream, p, patience, mine, others, epoch, row);
    if (TWO_SHOTS) give(p, stream, others, epoch, row);
    finish(p, stream, weight, row, shared, turn++);
  }
#if TWO_SHOTS
  announce_rows(p, [=](int row) { return row % RANKS == p.rank ? others : 0; });
  for (int row = block_x(); row < p.rows; row += blocks_x()) {
    if (row % RANKS == p.rank) continue;
    const u32 epoch = epoch_of(p, row);
    await(p, patience, owner(row), epoch, row);
    receive(stream, p, patience, row % RANKS, epoch, row);
    finish(p, stream, weight, row, shared, turn++);
  }
#endif
  block_barrier();
  for (int row = block_x() + thread_id() * blocks_x(); row < p.rows; row += THREADS * blocks_x()) put_number(p.epochs + row, epoch_of(p, row));
#endif
}
