// Programs with TILED: rings of several sizes, chunks of queries, and batch entries among others
// have the bits of one rank; a ring that meets its keys in another order has not. Prints a hash of
// the bits of each call: programs for other masks and tilings, and those that start the softmax,
// have the same.
#pragma once

static const int TILE_ROWS = TILED * KEYS;
enum class Part { ALL, UP_TO_OWN, AFTER_OWN, OWN_FIRST };

// Queries and keys of one sequence, and its softmax.
struct Sequence {
  Case c; int n; std::vector<u16> q, k, v, out; std::vector<float> acc, m, l, lse;
  Sequence(const Case& c, u64 seed) : c(c), n(c.queries) {
    // Not the model's generator: programs that run differently get the same elements.
    auto fill = [&](int heads, double size) {
      std::vector<u16> x((size_t)c.batch * n * heads * c.dim);
      for (auto& y : x) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        y = emu::narrow((float)(((double)(seed >> 40) / (1 << 23) - 1) * size));
      }
      return x;
    };
    q = fill(c.heads, c.size);
    k = fill(c.kv_heads, c.size);
    v = fill(c.kv_heads, 1);
    clear();
  }
  void clear() {
    const size_t cells = (size_t)c.batch * n * c.heads;
    acc.assign(cells * c.dim, 0.f);
    m.assign(cells, -INFINITY);
    l.assign(cells, 0.f);
    lse.assign(cells, 0.f);
    out.assign(cells * c.dim, 0);
  }
  // As `finish_cells` does it.
  void finish() {
    for (size_t x = 0; x < l.size(); x++) {
      lse[x] = l[x] == 0 ? -INFINITY : m[x] + logf(l[x]);
      for (int d = 0; d < c.dim; d++)
        out[x * c.dim + d] =
            emu::narrow(l[x] == 0 ? 0.f : acc[x * c.dim + d] * ((float)c.gain / l[x]));
    }
  }
  u64 hash_of_output() const {
    u64 h = 14695981039346656037ull;
    for (float x : lse) h = (h ^ __float_as_uint(x)) * 1099511628211ull;
    for (u16 x : out) h = (h ^ x) * 1099511628211ull;
    return h;
  }
  u64 hash() const {
    u64 h = 14695981039346656037ull;
    for (auto* all : {&acc, &m, &l})
      for (float x : *all) h = (h ^ __float_as_uint(x)) * 1099511628211ull;
    return h;
  }
};
// Rows from `first` on of every batch entry; `back` copies them into the sequence.
template <class T>
static void rows(std::vector<T>& whole, std::vector<T>& part, const Case& c, int n, int first,
    int count, int width, bool back) {
  for (int b = 0; b < c.batch; b++) {
    T *x = &whole[((size_t)b * n + first) * width], *y = &part[(size_t)b * count * width];
    if (back) std::copy(y, y + (size_t)count * width, x);
    else std::copy(x, x + (size_t)count * width, y);
  }
}

// The queries q0..q1 with the keys k0..k1.
static void attend(Sequence& s, int q0, int q1, int k0, int k1, Part part) {
  if (q0 == q1 || k0 == k1) return;
  Case c = s.c;
  c.queries = q1 - q0; c.keys = k1 - k0; c.query = q0; c.key = k0;
  Problem p(c);
#if WINDOWED
  p.list.clear();
  if (part == Part::ALL) p.add_piece(0, c.queries, 0, c.keys, q0 - k0);
  else
    for (int q = q0, next; q < q1; q = next) {
      next = std::min((q / TILE_ROWS + 1) * TILE_ROWS, q1);
      const int own = std::max(0, std::min((q / TILE_ROWS + 1) * TILE_ROWS - k0, c.keys));
      if (part == Part::UP_TO_OWN) p.add_piece(q - q0, next - q0, 0, own, q - k0);
      else p.add_piece(q - q0, next - q0, own, c.keys - own, q - k0 - own);
    }
  p.count_list();
#elif !CAUSAL
  const int before = q0 % TILE_ROWS,
            sign = part == Part::ALL ? 0 : part == Part::AFTER_OWN ? -1 : 1;
  p.tiles.lead = before; p.tiles.query_step = q0 - before - k0;
  p.tiles.key_step = sign * TILE_ROWS | (part == Part::OWN_FIRST ? 1 : 0);
#endif
  rows(s.q, p.q, c, s.n, q0, c.queries, c.heads * c.dim, false);
  rows(s.k, p.k, c, s.n, k0, c.keys, c.kv_heads * c.dim, false);
  rows(s.v, p.v, c, s.n, k0, c.keys, c.kv_heads * c.dim, false);
  Result r = p.start();
  rows(s.acc, r.acc, c, s.n, q0, c.queries, c.heads * c.dim, false);
  rows(s.m, r.m, c, s.n, q0, c.queries, c.heads, false);
  rows(s.l, r.l, c, s.n, q0, c.queries, c.heads, false);
  if (!LOAD_CARRY) for (auto* all : {&r.acc, &r.m, &r.l}) all->assign(all->size(), NAN);
  p.run(r);
  rows(s.acc, r.acc, c, s.n, q0, c.queries, c.heads * c.dim, true);
  rows(s.m, r.m, c, s.n, q0, c.queries, c.heads, true);
  rows(s.l, r.l, c, s.n, q0, c.queries, c.heads, true);
  rows(s.lse, r.lse, c, s.n, q0, c.queries, c.heads, true);
  rows(s.out, r.out, c, s.n, q0, c.queries, c.heads * c.dim, true);
}

// The call on a ring that cuts the sequence at `cuts`. `swapped`: the keys of other ranks come in
// the opposite order.
static void ring(Sequence& s, const std::vector<int>& cuts, bool swapped = false) {
  const int ranks = (int)cuts.size() - 1;
  const bool later = s.c.right > 0;
  s.clear();
  for (int rank = 0; rank < ranks; rank++) {
    attend(s, cuts[rank], cuts[rank + 1], cuts[rank], cuts[rank + 1], Part::UP_TO_OWN);
    if (!LOAD_CARRY) continue;   // it can only start
    for (int distance = 1; distance < ranks; distance++) {
      const int away = swapped ? ranks - distance : distance, of = (rank + ranks - away) % ranks;
      if (of < rank || later)
        attend(s, cuts[rank], cuts[rank + 1], cuts[of], cuts[of + 1], Part::ALL);
    }
    if (later) attend(s, cuts[rank], cuts[rank + 1], cuts[rank], cuts[rank + 1], Part::AFTER_OWN);
  }
}

static void expect(bool right, const char* call, const char* what) {
  printf("%s %s: %s\n", right ? "ok  " : "FAIL", call, what);
  bad += !right;
}
static void check_values(Sequence& s, const char* call) {
  Case c = s.c;
  c.keys = c.queries;
  Problem p(c);
  p.q = s.q; p.k = s.k; p.v = s.v;
  double worst = 0, worst_lse = 0;
  p.each([&](int b, int g, int i, int h) {
    Reference want;
    absorb(p, want, b, g, i, h);
    const i64 x = at(p.job.cells, b, g, i, h);
    auto most = [](double& worst, double off) {
      worst = std::isfinite(off) ? std::max(worst, off) : 1e9;
    };
    most(worst_lse, fabs(s.m[x] + log((double)s.l[x]) - want.m - log(want.l)) / (1 + fabs(want.m)));
    for (int d = 0; d < c.dim; d++)
      most(worst, fabs(s.acc[x * c.dim + d] / s.l[x] - want.acc[d] / want.l));
  });
  printf("     %s: out %.1e lse %.1e\n", call, worst, worst_lse);
  expect(worst < 1e-2 && worst_lse < 2e-6, call, "the values of the reference");
}

static void check_call(const char* call, const Case& c) {
  const int n = c.queries, tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
  auto cut = [&](int tile) { return std::min(tile * TILE_ROWS, n); };
  auto print_hash = [&](u64 hash, const char* part) {
    printf("bits HD=%d KEYS=%d TILED=%d NEGATIVE=%d half=%d %s%s %016llx\n", HD, KEYS, TILED,
        NEGATIVE, emu::narrow(1.0f) == 0x3c00, call, part, hash);
  };
  auto print = [&](const Sequence& s, const char* part) { print_hash(s.hash(), part); };
  Sequence one(c, 1);
  attend(one, 0, n, 0, n, Part::UP_TO_OWN);
  if (STORE_CARRY) one.finish();
  print_hash(one.hash_of_output(), ", up to the own tile, finished:");
  if (STORE_CARRY) print(one, ", up to the own tile:");
  if (STORE_CARRY) ring(one, {0, n});
  if (LOAD_CARRY && STORE_CARRY) {
    print(one, ":");
    check_values(one, call);
  }
  // All keys at once. Kernels without a mask do that.
  if (!CAUSAL && STORE_CARRY) {
    Sequence whole(c, 1);
    attend(whole, 0, n, 0, n, Part::OWN_FIRST);
    print(whole, ":");
    whole.finish();
    print_hash(whole.hash_of_output(), ", finished:");
  } else if (!CAUSAL) {
    Sequence whole(c, 1);
    attend(whole, 0, n, 0, n, Part::OWN_FIRST);
    print_hash(whole.hash_of_output(), ", finished:");
  }
  if (!STORE_CARRY) return;
  for (int ranks = 2; ranks <= std::min(tiles, 4); ranks++) {
    std::vector<int> cuts = {0};
    for (int rank = 1; rank < ranks; rank++) cuts.push_back(cut(tiles * rank / ranks));
    cuts.push_back(n);
    Sequence other(c, 1);
    ring(other, cuts);
    if (LOAD_CARRY) expect(other.hash() == one.hash(), call, "a ring has the bits of one rank");
    // In a window no query meets more than one other rank, and of large scores one decides.
    if (!LOAD_CARRY || ranks != 3 || c.left < n || c.size > 100) continue;
    ring(other, cuts, true);
    expect(other.hash() != one.hash(), call, "a ring in another order has other bits");
  }
  // Chunks of queries that begin and end anywhere. Without a mask, kernels get chunks that end with
  // a tile of the grid.
  Sequence chunks(c, 1);
  for (int q = 0, next; q < n; q = next) {
    next = std::min(q + 1 + (q * 7 + 91) % 170, n);
    if (!CAUSAL) next = std::min(next, (q / TILE_ROWS + 1) * TILE_ROWS);
    attend(chunks, q, next, 0, n, Part::UP_TO_OWN);
    if (LOAD_CARRY && c.right > 0) attend(chunks, q, next, 0, n, Part::AFTER_OWN);
  }
  expect(chunks.hash() == one.hash(), call, "chunks of queries have the bits of all");
  // Batch entries beside it.
  Case more = c;
  more.batch = 2;
  Sequence two(more, 1);
  Sequence first(c, 1);
  auto part = [](auto& whole, auto& to) {
    std::copy(whole.begin(), whole.begin() + to.size(), to.begin());
  };
  part(two.q, first.q); part(two.k, first.k); part(two.v, first.v);
  ring(two, {0, n});
  ring(first, {0, n});
  expect(std::equal(first.acc.begin(), first.acc.end(), two.acc.begin()) &&
             std::equal(first.m.begin(), first.m.end(), two.m.begin()) &&
             std::equal(first.l.begin(), first.l.end(), two.l.begin()),
      call, "a batch entry has its bits among others");
}

static int check_rings() {
  const double scale = (NEGATIVE ? -1 : 1) / sqrt((double)HD);
  const i64 far = 1 << 28;
  const int n = 4 * TILE_ROWS + 37 > 600 ? 2 * TILE_ROWS + 37 : 4 * TILE_ROWS + 37,
            d = HD % 16 == 0 && HD > 16 ? HD - 8 * (TILED % 2) : HD;
  // The maximum rises often, also inside a tile.
  auto call = [&](const char* name, i64 left, i64 right, double size = 2) {
    Case c{1, 1, n, n, 2, 1, d, 1, 3, 0, 1, 0, 1, scale * 2, 0.7, size};
    c.left = left; c.right = right;
    check_call(name, c);
  };
#ifdef T_F16
  const double large = 300;
#else
  const double large = 1e6;
#endif
#if WINDOWED || !CAUSAL
  call("full", far, far);
  call("full, large scores", far, far, large);
#endif
#if CAUSAL
  call("causal", far, 0);
  call("causal, large scores", far, 0, large);
#endif
#if WINDOWED
  call("window", 200, 0);
  call("both sides", 150, 90);
#endif
  return bad != 0;
}
