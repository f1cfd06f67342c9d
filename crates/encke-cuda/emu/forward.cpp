// Hopper's forward kernel on the CPU model, against loops in f64. One program per variant, with the
// kernel's macros. Prints one line per case; exits with 1 if one fails.
#include "emu.h"
struct int4 { int x, y, z, w; };
#include "common.cuh"
#include "hopper.cuh"
#include "hopper_tiles.cuh"
#include "hopper_forward.cuh"
#include "hopper_forward.cu"
#include <numeric>
#include <string>

struct Case {
  int batch, segments, queries, keys, heads, kv_heads, dim, dilation,
      blocks;   // blocks: of the grid
  i64 query, query_step, key, key_step;   // positions, if the variant is causal
  double scale, gain, size;   // size: magnitude of q and k
  int rest = 0;   // chunks after the job's own keys
  // With WINDOWED: how far queries see, and documents of so many queries (0: one).
  i64 left = 1 << 28, right = 1 << 28;
  int document = 0;
};

// Elements of a row of values.
static int value_dim(const Case& c) { return OWN_VALUES ? c.dim - HD + VD : c.dim; }
// Rows of `heads` heads, `dilation` apart; head h has phase h % dilation. Cells are rows of
// dimension 1.
struct Layout {
  std::vector<i64> shares; OperandParams operand; i64 elements, unit, span;
  Layout(const Case& c, int rows, int heads, int dim) {
    i64 token = (i64)heads * dim, segment = (i64)rows * c.dilation * token;
    for (int h = 0; h < c.heads; h++) {
      int own = h * heads / c.heads;
      shares.push_back(own * dim + own % c.dilation * token);
    }
    unit = 0; for (i64 x : shares) unit = std::gcd(unit, x);
    if (!unit) unit = dim;
    span = *std::max_element(shares.begin(), shares.end()) / unit + 1;
    elements = c.batch * c.segments * segment;
    operand = {0, c.segments * segment, segment, c.dilation * token, unit, shares.data()};
  }
  Layout(const Layout&) = delete;
};
static const double CAP = 1.5;   // with SOFTCAP
static double uniform() { return emu::draw() % 65536 / 32768.0 - 1; }
static std::vector<u16> random_elements(i64 count, double size) {
  std::vector<u16> v(count);
  for (auto& x : v) x = emu::narrow((float)(uniform() * size));
  return v;
}
static TensorMap map_of(const Case& c, const std::vector<u16>& data, const Layout& l, int dim,
    int rows, u32 box) {
  return tensor_map(data.data(), dim, rows, l.span, c.segments, c.batch, l.operand.row, l.unit,
      l.operand.segment, l.operand.batch, box);
}
static void odd_inverse(i64 unit, u32& shift, u32& inverse) {
  shift = __builtin_ctzll(unit);
  u32 odd = (u32)(unit >> shift);
  inverse = odd;
  for (int i = 0; i < 5; i++) inverse *= 2 - odd * inverse;
}

struct Result { std::vector<float> acc, m, l, lse; std::vector<u16> out; };
static const float MARK = 7.5f;

// Keys and values of a chunk after the first: whole blocks that every row sees.
struct RestChunk {
  int keys; Layout at, v_at; std::vector<u16> k, v;
  RestChunk(const Case& c, int keys)
      : keys(keys),
        at(c, keys, c.kv_heads, c.dim),
        v_at(c, keys, c.kv_heads, value_dim(c)),
        k(random_elements(at.elements, c.size)),
        v(random_elements(v_at.elements, 1)) {}
};

struct Problem {
  Case c;
  Layout q_at, k_at, v_at, cells;
  std::vector<u16> q, k, v;
  std::vector<std::unique_ptr<RestChunk>> rest;
  JobParams job;
  TileParams tiles;
  std::vector<int4> list;
  std::vector<double> slopes;
  std::vector<uint2> slope_words;   // in base 2, as the kernel reads them
  // The score of a pair from scale * product, by definition.
  double score(double x, int h, int i, int j) const {
    if (SOFTCAP) x = CAP * tanh(x / CAP);
#if SLOPES
    const int document = c.document ? c.document : c.queries, piece = i / document,
              keys = c.document ? c.document + 3 : c.keys;
    const i64 ahead = c.query + (i - piece * document) * c.query_step - c.key -
                      (j - piece * keys) * c.key_step;
    x -= slopes[h] * (double)(ahead < 0 ? -ahead : ahead);
#endif
    return x;
  }
  // By definition: the keys of a query's document whose positions are inside its window.
  bool sees(int i, int j) const {
#if WINDOWED
    const int document = c.document ? c.document : c.queries, piece = i / document,
              keys = c.document ? c.document + 3 : c.keys;
    const int x = i - piece * document, y = j - piece * keys;
    if (y < 0 || y >= keys) return false;
    const i64 ahead = c.query + x * c.query_step - c.key - y * c.key_step;
    return ahead <= c.left && -ahead <= c.right;
#else
    return j < visible(job, i);
#endif
  }
#if WINDOWED
  // As launch/hopper_ranges.rs makes it. `lead`: the position of the piece's first query after that
  // of its first key.
  void add_piece(int q0, int q1, int k0, int all, i64 lead) {
    auto down = [](i64 x, i64 by) { return x >= 0 ? x / by : -((-x + by - 1) / by); };
    const i64 step = c.query_step / c.key_step, E = down(lead + c.right, c.key_step) + 1,
              S = -down(-(lead - c.left), c.key_step);
    for (int row = q0; row < q1; row += ROWS) {
      const int last = std::min(row + ROWS, q1) - 1;
      const i64 end0 = E + (row - q0) * step, start0 = S + (row - q0) * step;
      auto clamp = [&](i64 x) { return (int)std::max<i64>(0, std::min<i64>(x, all)); };
      const int keys = clamp(end0 + (last - row) * step), start = clamp(start0),
                last_start = clamp(start0 + (last - row) * step);
      int blocks = (keys + KEYS - 1) / KEYS, begin = start / KEYS;
      if (keys <= start) blocks = begin = 0;
      const int masked = blocks - std::min(clamp(end0) / KEYS, blocks),
                low = std::min((last_start + KEYS - 1) / KEYS, blocks);
      list.push_back({keys, blocks, masked, begin});
      list.push_back({low, q1, row, (int)(lead + (row - q0) * c.query_step)});
      list.push_back({k0, all, (int)end0, (int)start0});
    }
  }
  void make_list() {
    const int document = c.document ? c.document : c.queries,
              wide = c.document ? c.document + 3 : c.keys;
    for (int q0 = 0, k0 = 0; q0 < c.queries; q0 += document, k0 += wide)
      add_piece(q0, std::min(q0 + document, c.queries), k0,
          std::max(0, std::min(wide, c.keys - k0)), c.query - c.key);
    count_list();
  }
  void count_list() {
    tiles.row_tiles = (int)list.size() / 3;
    tiles.count = tiles.row_tiles * tiles.sequences;
    tiles.list = list.data();
  }
#endif
  Problem(const Case& c)
      : c(c),
        q_at(c, c.queries, c.heads, c.dim),
        k_at(c, c.keys, c.kv_heads, c.dim),
        v_at(c, c.keys, c.kv_heads, value_dim(c)),
        cells(c, c.queries, c.heads, 1) {
    q = random_elements(q_at.elements, c.size);
    k = random_elements(k_at.elements, c.size);
    v = random_elements(v_at.elements, 1);
    job = {q_at.operand, k_at.operand, cells.operand, cells.operand, q_at.operand, c.query,
        c.query_step, c.key, c.key_step, c.batch, c.segments, c.queries, c.keys, c.heads, c.dim,
        CAUSAL, value_dim(c), c.scale, c.gain};
    i64 lead = c.query - c.key;
    const int row_tiles = (c.queries + ROWS - 1) / ROWS, sequences = c.batch * c.segments * c.heads;
    tiles = {(u32)(row_tiles * sequences), row_tiles, c.batch * c.segments * c.heads, 2, (int)lead,
        (int)c.query_step, (int)c.key_step, 0, 0, 0, 0, {}};
    for (int i = 0; i < c.rest; i++) {
      rest.emplace_back(new RestChunk(c, (1 + i % 2) * KEYS));
      for (int chunk = 0; chunk <= i; chunk++) tiles.chunk_starts[chunk] += rest[i]->keys;
    }
    if (c.query_step % c.key_step == 0) {
      tiles.lead = (int)(lead >= 0 ? lead / c.key_step : -((-lead + c.key_step - 1) / c.key_step));
      tiles.query_step /= (int)c.key_step;
      tiles.key_step = 1;
    }
#if WINDOWED
    make_list();
    for (int h = 0; h < c.heads; h++) {
      slopes.push_back(0.01 + 0.02 * h);
      slope_words.push_back({__float_as_uint((float)(slopes[h] * M_LOG2E)), 0});
    }
    tiles.slopes = slope_words.data();
    tiles.query_position_step = (int)c.query_step;
    tiles.key_position_step = (int)c.key_step;
    tiles.score_scale = (float)(fabs(c.scale) * M_LOG2E);
    tiles.softcap = (float)(CAP * M_LOG2E);
    tiles.inverse_cap = (float)(2 * fabs(c.scale) * M_LOG2E / CAP);
#endif
    odd_inverse(q_at.unit, tiles.q_shift, tiles.q_inverse);
    odd_inverse(k_at.unit, tiles.k_shift, tiles.k_inverse);
  }
  Result start() const {
    i64 n = cells.elements, dim = value_dim(c);
    Result r{std::vector<float>(n * dim, MARK), std::vector<float>(n, MARK),
        std::vector<float>(n, MARK), std::vector<float>(n, MARK),
        std::vector<u16>(n * dim, emu::narrow(MARK))};
    each([&](int b, int s, int i, int h) {
      i64 x = at(job.cells, b, s, i, h);
      r.m[x] = -INFINITY;
      r.l[x] = 0;
      for (int d = 0; d < dim; d++) r.acc[x * dim + d] = 0;
    });
    return r;
  }
  void run(Result& r) const {
    const int wide = value_dim(c);
    TensorMap qm = map_of(c, q, q_at, c.dim, c.queries, ROWS);
    KvChunkMaps kv_maps{{map_of(c, k, k_at, c.dim, c.keys, KEYS)},
        {map_of(c, v, v_at, wide, c.keys, KEYS)}};
    for (int i = 0; i < c.rest; i++) {
      const RestChunk& f = *rest[i];
      kv_maps.k[i + 1] = map_of(c, f.k, f.at, c.dim, f.keys, KEYS);
      kv_maps.v[i + 1] = map_of(c, f.v, f.v_at, wide, f.keys, KEYS);
    }
    static u32 counter[2] = {0, 0};   // every launch resets it to 0
    emu::launch(
        c.blocks, 1, THREADS,
        [&] {
          hopper_forward(qm, kv_maps, job, tiles, v.data(), r.acc.data(), r.m.data(), r.l.data(),
              r.out.data(), r.lse.data(), counter);
        },
        COUNTED ? 0 : 1);
  }
  template <class F> void each(F f) const {
    for (int b = 0; b < c.batch; b++)
      for (int s = 0; s < c.segments; s++)
        for (int i = 0; i < c.queries; i++)
          for (int h = 0; h < c.heads; h++) f(b, s, i, h);
  }
};

struct Reference { double m = -INFINITY, l = 0; std::vector<double> acc; };
static void absorb(const Problem& p, Reference& r, int b, int s, int i, int h) {
  const int dim = p.c.dim, wide = value_dim(p.c);
  r.acc.resize(wide);
  auto keys = [&](int count, const OperandParams& of, const OperandParams& values,
                  const std::vector<u16>& ks, const std::vector<u16>& vs, bool own) {
    for (int j = 0; j < count; j++) {
      if (own && !p.sees(i, j)) continue;
      i64 q = at(p.job.q, b, s, i, h), k = at(of, b, s, j, h), v = at(values, b, s, j, h);
      double score = 0;
      for (int d = 0; d < dim; d++) score += (double)emu::widen(p.q[q + d]) * emu::widen(ks[k + d]);
      score = p.score(score * p.c.scale, h, i, j);
      if (score > r.m) {
        double shrink = r.l == 0 ? 0 : exp(r.m - score);
        r.l *= shrink;
        for (auto& x : r.acc) x *= shrink;
        r.m = score;
      }
      double w = exp(score - r.m);
      r.l += w;
      for (int d = 0; d < wide; d++) r.acc[d] += w * emu::widen(vs[v + d]);
    }
  };
  keys(p.c.keys, p.job.k, p.v_at.operand, p.k, p.v, true);
  for (auto& f : p.rest) keys(f->keys, f->at.operand, f->v_at.operand, f->k, f->v, false);
}

static int bad = 0;
static void report(const char* what, const Case& c, bool fine, double out, double lse) {
  printf(
      "%s %s HD=%d VD=%d rows=%d keys=%d causal=%d load_carry=%d store_carry=%d | b%d s%d q%d k%d "
      "h%d/%d d%d r%d "
      "+%d scale %g: out %.1e lse %.1e\n",
      fine ? "ok  " : "FAIL", what, HD, VD, ROWS, KEYS, CAUSAL, LOAD_CARRY, STORE_CARRY, c.batch,
      c.segments, c.queries, c.keys, c.heads, c.kv_heads, c.dim, c.dilation, c.rest, c.scale, out,
      lse);
  fflush(stdout); bad += !fine;
}
// The carry after a job, computed by the loops.
static void carry(const Problem& p, Result& r) {
  p.each([&](int b, int s, int i, int h) {
    Reference seen;
    absorb(p, seen, b, s, i, h);
    i64 x = at(p.job.cells, b, s, i, h);
    r.m[x] = seen.m;
    r.l[x] = seen.l;
    const int dim = value_dim(p.c);
    for (int d = 0; d < dim; d++) r.acc[x * dim + d] = seen.acc[d];
  });
}
// Runs, by variant: two jobs into one carry; one job that finishes the carry of another; one that
// starts on a carry full of NaN; or one that starts and finishes. Compares every cell with the
// loops and checks that no other cell is touched.
static void values(const Case& first) {
  Problem p(first); Result r = p.start();
  const int dim = value_dim(first);
  if (!LOAD_CARRY)
    p.each([&](int b, int s, int i, int h) {
      i64 x = at(p.job.cells, b, s, i, h);
      r.m[x] = r.l[x] = NAN;
      for (int d = 0; d < dim; d++) r.acc[x * dim + d] = NAN;
    });
  if (LOAD_CARRY && !STORE_CARRY) carry(p, r); else p.run(r);
  std::unique_ptr<Problem> more;
  if (LOAD_CARRY) {
    Case c = first;
    c.key += 40;
    c.keys = c.keys / 2 + 1;
    more.reset(new Problem(c));
    more->q = p.q;
    more->run(r);
  }
  double worst = 0, worst_lse = 0;
  std::vector<bool> touched(p.cells.elements);
  const Case& c = first;
  p.each([&](int b, int s, int i, int h) {
    Reference want; absorb(p, want, b, s, i, h); if (more) absorb(*more, want, b, s, i, h);
    i64 x = at(p.job.cells, b, s, i, h); touched[x] = true;
    double lse = STORE_CARRY ? (r.l[x] == 0 ? -INFINITY : r.m[x] + log((double)r.l[x])) : r.lse[x],
           expected = want.l == 0 ? -INFINITY : want.m + log(want.l);
    worst_lse = std::max(worst_lse, lse == expected ? 0.0
                                    : std::isfinite(lse - expected)
                                        ? fabs(lse - expected) / (1 + fabs(expected))
                                        : 1e9);
    for (int d = 0; d < dim; d++) {
      double got =
          STORE_CARRY ? (r.l[x] == 0 ? (double)r.acc[x * dim + d] : r.acc[x * dim + d] / r.l[x])
                      : emu::widen(r.out[x * dim + d]);
      double exact = want.l == 0 ? 0 : want.acc[d] / want.l * (STORE_CARRY ? 1 : c.gain);
      worst = std::max(worst, std::isfinite(got) ? fabs(got - exact) : 1e9);
    }
  });
  for (i64 x = 0; x < p.cells.elements; x++) if (!touched[x]) {
    bool same = r.lse[x] == MARK && r.m[x] == MARK && r.l[x] == MARK;
    for (int d = 0; d < dim; d++)
      same &= r.acc[x * dim + d] == MARK && r.out[x * dim + d] == emu::narrow(MARK);
    if (!same) worst = 1e8;
  }
  // Twice the rounding error of a weight and of a result; that of a large score is seen in weights.
  double room = 2.5 * (sizeof(u16) && emu::narrow(1.0f) == 0x3c00 ? 1.0 / 2048 : 1.0 / 256);
  if (c.size > 100) room = std::max(room, 5e-3);
  report("values", c, worst < room && worst_lse < 4e-6, worst, worst_lse);
}
// A NaN or infinity in keys and values must reach the rows that see it and change no bit of the
// others.
static void hidden(const Case& c, int key, float what) {
  Problem p(c); Result before = p.start(); p.run(before);
  const int dim = value_dim(c);
  for (int b = 0; b < c.batch; b++)
    for (int s = 0; s < c.segments; s++)
      for (int h = 0; h < c.heads; h++)
        for (int d = 0; d < std::max(c.dim, dim); d++) {
          if (d < dim) p.v[at(p.v_at.operand, b, s, key, h) + d] = emu::narrow(what);
          if (d < c.dim && d % 3 == 0) p.k[at(p.job.k, b, s, key, h) + d] = emu::narrow(what);
        }
  Result after = p.start(); p.run(after); double wrong = 0;
  p.each([&](int b, int s, int i, int h) {
    i64 x = at(p.job.cells, b, s, i, h); bool sees = p.sees(i, key);
    const void *o1 = STORE_CARRY ? (void*)&before.acc[x * dim] : (void*)&before.out[x * dim],
               *o2 = STORE_CARRY ? (void*)&after.acc[x * dim] : (void*)&after.out[x * dim];
    float got = STORE_CARRY ? after.acc[x * dim] : emu::widen(after.out[x * dim]);
    if (sees) wrong += std::isfinite(got);
    else
      wrong += memcmp(o1, o2, dim * (STORE_CARRY ? 4 : 2)) != 0 ||
               memcmp(STORE_CARRY ? &before.m[x] : &before.lse[x],
                   STORE_CARRY ? &after.m[x] : &after.lse[x], 4) != 0 ||
               memcmp(&before.l[x], &after.l[x], 4) != 0;
  });
  report("hidden", c, wrong == 0, wrong, 0);
}

// Scores of about the square of a size; one in almost every row is clearly the largest.
static void large_scores(Case c) {
  if (TRANSFORMED) return;
#ifdef T_F16
  const double sizes[] = {300, 6e4};
#else
  const double sizes[] = {300, 1e6, 2e14};
#endif
  // One for each program.
  c.size = sizes[(HD / 8 + LOAD_CARRY + 2 * STORE_CARRY) % (sizeof sizes / sizeof *sizes)];
  values(c);
}

#if TILED
#include "forward_tiles.h"
#endif

int main() {
#if TILED
  return check_rings();
#endif
  const double scale = (NEGATIVE ? -1 : 1) / sqrt((double)HD);
  const int d = HD, short_d = HD % 16 == 0 && HD > 16 ? HD - 8 : HD;
#if WINDOWED
  const i64 far = 1 << 28;
  values({1, 1, 3 * ROWS + 37, 3 * ROWS + 37, 2, 1, d, 1, 2, 0, 1, 0, 1, scale, 0.5, 1, 0, 150, 0});
  values({1, 2, 170, 190, 4, 2, short_d, 3, 3, 30, 2, 7, 2, scale, 1, 3, 0, 40, 31});
  values({1, 1, ROWS + 9, 2 * KEYS + 50, 1, 1, d, 1, 1, 0, 2, 9, 1, scale * 8, 1, 3, 0, far, 20});
  values({1, 1, 400, 430, 2, 2, d, 2, 2, 0, 1, 0, 1, scale, 1, 1, 0, far, 0, 37});
  values({2, 1, 2 * ROWS + 70, 500, 1, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1, 0, far, far, 150});
  values({1, 1, ROWS + 70, 300, 1, 1, d, 1, 3, 0, 1, 0, 1, scale, 1, 1, 0, 5, 3, 20});
  large_scores({1, 2, ROWS + 11, 300, 2, 1, d, 1, 2, 0, 1, 0, 1, scale, 1, 0, 0, 150, 30});
  hidden({1, 1, ROWS + 90, ROWS + 90, 1, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1, 0, 60, 0}, 70, NAN);
  hidden({1, 1, ROWS + 90, 400, 2, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1, 0, far, far, 100}, 99,
      INFINITY);
  hidden({1, 1, 300, 340, 1, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1, 0, 33, 9, 140}, 200, NAN);
  return bad != 0;
#endif
  // Partial tiles and blocks, grouped heads with phases, several segments and batch entries, fewer
  // blocks than tiles.
  values({1, 1, ROWS + 37, 2 * KEYS + 19, 3, 1, d, 1, 2, 5, 1, 0, 1, scale, 0.5, 1});
  values({1, 2, 70, 90, 4, 2, short_d, 3, 3, 30, 3, 7, 2, scale, 1,
      3});   // rows that see few keys or none
  values({2, 1, 33, KEYS + 1, 2, 2, d, 2, 1, 0, 2, 20, 1, scale * 8, 0.3,
      3});   // large scores: the maximum rises
  // Many tiles and many blocks of keys for one block of the grid: all barrier phases wrap around.
  if (HD <= 128) values({1, 1, 4 * ROWS + 5, 4 * ROWS + 5, 1, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1});
  // Chains: after keys with a partial block or a mask, after keys that some rows do not see, and of
  // the largest length.
  values({1, 1, ROWS + 20, KEYS + 19, 2, 1, d, 1, 1, 5, 1, 0, 1, scale, 0.5, 1, 1});
  values({1, 2, 70, 90, 4, 2, short_d, 3, 3, 30, 3, 200, 2, scale, 1, 3, 2});
  if (HD <= 128) values({2, 1, 50, 2 * KEYS, 1, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1, CHUNKS - 1});
  if (!NEGATIVE) values({1, 1, 20, 50, 1, 1, d, 1, 1, 10, 1, 0, 1, 0.0, 1, 1});
  large_scores({2, 2, ROWS + 11, 2 * KEYS + 30, 2, 1, d, 1, 2, KEYS, 1, 0, 1, scale, 1, 0, 1});
  if (CAUSAL) {
    hidden({1, 1, ROWS + 20, ROWS + 20, 1, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1}, ROWS - 40, NAN);
    hidden({1, 1, ROWS, 2 * KEYS, 2, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1}, 70, INFINITY);
    hidden({1, 1, ROWS, 2 * KEYS, 2, 1, d, 1, 1, 0, 1, 0, 1, scale, 1, 1, 2}, 70, NAN);
  }
  return bad != 0;
}
