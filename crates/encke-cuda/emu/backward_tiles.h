// Programs with TILED: gradients on rings of several sizes have the bits of one rank; those of a
// ring whose keys meet queries in another order have not. Prints a hash of the bits of each call,
// which programs with and without ranges of keys share.
#pragma once

static const int TILE_ROWS = TILED * BQ;
static_assert(TILE_ROWS % BK == 0, "tiles of the grid are whole tiles of keys");
enum class Part { ALL, UP_TO_OWN, AFTER_OWN };

// Adds the gradients of the queries q0..q1 with the keys k0..k1 of a sequence.
static void add_gradients(
    const Case& whole, Inputs& x, int q0, int q1, int k0, int k1, Part part, Stores stores) {
  if (q0 == q1 || k0 == k1) return;
  Setting s = setting(whole);
  Case c = whole;
  c.queries = q1 - q0; c.keys = k1 - k0; c.query = q0; c.key = k0;
  for (View* v : {&s.q, &s.cells, &s.delta, &s.dq}) v->o.offset += q0 * v->o.row;
  for (View* v : {&s.k, &s.v}) v->o.offset += k0 * v->o.row;
  for (View* v : {&s.q, &s.k, &s.v, &s.cells, &s.delta, &s.dq}) v->o.heads = v->heads.data();
  JobParams& j = s.job;
  j.q = s.q.o; j.k = s.k.o; j.cells = s.cells.o; j.delta = s.delta.o;
  j.dq = s.dq.o;
  j.query = q0; j.key = k0; j.queries = c.queries; j.keys = c.keys;
#if WINDOWED
  s.pieces = {{q0, 1, k0, 1, c.left, c.right, 0, c.queries, 0, c.keys}};
#endif
  const int sign = part == Part::ALL ? 0 : part == Part::UP_TO_OWN ? 1 : -1, lead = k0 % TILE_ROWS;
  Result r = run(c, s, x, true, 3, stores,
      {sign * TILE_ROWS, lead, k0 - lead - q0});
  x.dq = r.dq; x.dk = r.dk; x.dv = r.dv;
}

// The call on a ring that cuts the sequence at `cuts`: keys travel, and their sums with them.
// `swapped`: in the opposite order.
static Inputs ring(const Case& c, Inputs x, const vector<int>& cuts, bool swapped = false) {
  const int ranks = (int)cuts.size() - 1;
  const bool later = !c.causal || c.right < 1 << 30 && c.right > 0;
  auto add = [&](int rank, int of, Part part) {
    add_gradients(c, x, cuts[rank], cuts[rank + 1], cuts[of], cuts[of + 1], part, CONTINUED);
  };
  for (int rank = 0; rank < ranks; rank++) add(rank, rank, Part::UP_TO_OWN);
  for (int distance = 1; distance < ranks; distance++)
    for (int rank = 0; rank < ranks; rank++) {
      const int away = swapped ? ranks - distance : distance, of = (rank + ranks - away) % ranks;
      if (of < rank || later) add(rank, of, Part::ALL);
    }
  if (later) for (int rank = 0; rank < ranks; rank++) add(rank, rank, Part::AFTER_OWN);
  return x;
}
static u64 hash_of(const Inputs& x) {
  u64 h = 14695981039346656037ull;
  for (auto* all : {&x.dq, &x.dk, &x.dv})
    for (float y : *all) h = (h ^ __float_as_uint(y)) * 1099511628211ull;
  return h;
}

static void check_call(const Case& c) {
  const int n = c.queries, tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
  emu::chance = 1;   // the same elements in every program
  const Setting s = setting(c);
  Inputs x = inputs(c, s);
  const Exact e = exact(c, s, x);
  const Inputs one = ring(c, x, {0, n});
  printf("bits HD=%d BQ=%d TILED=%d half=%d %s: %016llx\n", HD, BQ, TILED, P_SHIFT > 0, c.name,
      hash_of(one));
  bool same = true;
  const double q = error(one.dq, e.dq, x.dq, same), k = error(one.dk, e.dk, x.dk, same),
               v = error(one.dv, e.dv, x.dv, same), bound = P_SHIFT > 0 ? 2e-3 : 6e-3;
  judge(q < bound && k < bound && v < bound && same, c, "gradients of one rank", q, k, v);
  for (int ranks = 2; ranks <= std::min(tiles, 4); ranks++) {
    vector<int> cuts = {0};
    for (int rank = 1; rank < ranks; rank++) cuts.push_back(tiles * rank / ranks * TILE_ROWS);
    cuts.push_back(n);
    judge(hash_of(ring(c, x, cuts)) == hash_of(one), c, "a ring has the bits of one rank");
    if (ranks == 3 && c.left >= n)
      judge(hash_of(ring(c, x, cuts, true)) != hash_of(one), c,
          "a ring in another order has other bits");
  }
  if (c.right > 0 && c.causal || !c.causal) return;
  // One job that finds zeros: stored sums are those that continue them.
  for (auto* all : {&x.dk, &x.dv}) all->assign(all->size(), 0.f);
  Inputs stored = x, continued = x;
  add_gradients(c, stored, 0, n, 0, n, Part::UP_TO_OWN, STORED);
  add_gradients(c, continued, 0, n, 0, n, Part::UP_TO_OWN, CONTINUED);
  judge(hash_of(stored) == hash_of(continued), c, "stored sums continue zeros");
}

static int check_rings() {
  const int n = (TILE_ROWS < 256 ? 3 : 2) * TILE_ROWS + 37;
  const double scale = 1 / sqrt(HD);
  auto call = [&](const char* name, bool causal, i64 left, i64 right) {
    Case c{name, 1, 1, n, n, 2, 2, HD - 8, 1, causal, 0, 1, 0, 1, scale, 0.5};
    c.left = left; c.right = right;
    check_call(c);
  };
#if WINDOWED
  const i64 far = (1 << 30) - 1;
  call("causal", true, far, 0);
  call("full", true, far, far);
  call("window", true, 150, 0);
  call("both sides", true, 90, 60);
#else
  call("causal", true, 1 << 30, 0);
  call("full", false, 1 << 30, 1 << 30);
#endif
  return failures != 0;
}
