// Runs a forward kernel (PLAIN, mma.sync, or with STAGES the one that splits keys) on the CPU model
// over random jobs: values, carry, and hidden NaNs bit by bit. With MASKED, jobs have masks, score
// transforms, dropout and values of another width.
#ifdef PLAIN
#include "plain.h"
#else
#include "mma.h"
#endif
#include "../src/kernels/common.cuh"
#include "../src/kernels/masks.cuh"
#include "attention_case.h"
#ifdef PLAIN
#include "../src/kernels/plain.cu"
#define BLOCK TILE
#define ALIGNED 0
#else
#include "../src/kernels/mma_tile.cuh"
#include "../src/kernels/mma_softmax.cuh"
#ifdef STAGES
#define __shared__ static   // one block runs at a time
#include "../src/kernels/split_forward.cu"
#include "../src/kernels/split_merge.cu"
#else
#include "../src/kernels/mma_forward.cu"
#endif
#endif

struct State { std::vector<Sum> acc, m, l, lse; std::vector<Element> out; };
static State empty_state(const Case& c) {
  size_t n = c.cells.size, d = value_dim(c.job);
  return {std::vector<Sum>(n * d, 0.f), std::vector<Sum>(n, -INFINITY),
      std::vector<Sum>(n, 0.f), std::vector<Sum>(n, 7.f), std::vector<Element>(n * d)};
}
#ifdef STAGES
static void run(Case c, State& s, bool starts, bool finishes) {
  const Job& j = c.job;
  // The heads of each group, by the keys they read.
  std::vector<std::vector<i64>> all;
  for (int h = 0; h < j.heads; h++) {
    auto shares = [&](auto& g) { return c.k.heads[g[0]] == c.k.heads[h]; };
    auto found = std::find_if(all.begin(), all.end(), shares);
    if (found == all.end()) all.push_back({h}); else found->push_back(h);
  }
  size_t most = 0;
  for (auto& g : all) most = std::max(most, g.size());
  std::vector<i64> members;
  for (auto& g : all) {
    g.resize(most, -1);
    members.insert(members.end(), g.begin(), g.end());
  }
  // A number of splits that depends on the job alone.
  const int splits = 1 + (j.keys + j.queries) % 5, groups = (int)all.size(), dim = value_dim(j);
  SplitParams params{members.data(), groups, (int)most, splits, 0};
  const int blocks = c.blocks(true, TILE / (int)most) / j.heads * groups * splits;
  const size_t cells = (size_t)j.batch * j.segments * j.queries * j.heads;
  std::vector<float> acc(cells * splits * dim, NAN), m(cells * splits, NAN), l(cells * splits, NAN);
  emu::launch(blocks, 1, THREADS, [&] {
    split_forward(c.job, params, c.Q.data(), c.K.data(), c.V.data(), acc.data(), m.data(),
        l.data());
  });
  emu::launch((int)cells, 1, MERGE_THREADS, [&] {
    split_merge(c.job, acc.data(), m.data(), l.data(), s.acc.data(), s.m.data(), s.l.data(),
        s.out.data(), s.lse.data(), dim, splits, starts, finishes);
  });
}
#else
static void run(Case c, State& s, bool starts, bool finishes) {
  int blocks = c.blocks(true, TILE);
#ifdef PLAIN
  emu::launch(blocks / 2 + 1, 1, TILE * TILE, [&] {
    plain_forward(c.Q.data(), c.K.data(), c.V.data(), c.job, s.acc.data(), s.m.data(), s.l.data(),
        s.out.data(), s.lse.data(), starts, finishes);
  });
#else
  emu::launch(blocks, 1, THREADS, [&] {
    mma_forward(c.job, c.Q.data(), c.K.data(), c.V.data(), s.acc.data(), s.m.data(), s.l.data(),
        s.out.data(), s.lse.data(), starts, finishes);
  });
#endif
}
#endif
// The softmax of one row in f64, continuing a carry.
static void reference(const Case& c, const State& before, int b, int s, int h, int i, Values& acc,
    double& m, double& l) {
  const Job& j = c.job; const int dim = value_dim(j);
  i64 cell = at(j.cells, b, s, i, h);
  m = before.m[cell];
  l = before.l[cell];
  acc.assign(dim, 0);
  Values score(j.keys); double top = m;
  for (int t = 0; t < j.keys; t++) if (c.sees(i, t)) {
    score[t] = c.score(b, s, h, i, t);
    top = fmax(top, score[t]);
  }
  double shrink = l == 0 ? 0 : exp(m - top); l *= shrink;
  for (int x = 0; x < dim; x++) acc[x] = before.acc[cell * dim + x] * shrink;
  for (int t = 0; t < j.keys; t++) if (c.sees(i, t)) {
    double p = exp(score[t] - top), factor = c.factor(b, s, h, i, t);
    l += p;
    i64 y = c.value(b, s, h, t);
    if (factor) for (int x = 0; x < dim; x++) acc[x] += p * factor * value_of(c.V[y + x]);
  }
  m = top;
}
template <class T>
static bool same(const std::vector<T>& x, const std::vector<T>& y, size_t at, size_t n) {
  return memcmp(&x[at], &y[at], n * sizeof(T)) == 0;
}
static void check(
    const Case& c, const State& before, const State& after, bool finishes, const char* what) {
  Values got, want; double worst = 0; const Job& j = c.job; const int dim = value_dim(j);
  c.each_sequence([&](int b, int s, int h) { for (int i = 0; i < j.queries; i++) {
      Values acc;
      double m, l;
      reference(c, before, b, s, h, i, acc, m, l);
      i64 cell = at(j.cells, b, s, i, h);
      double lse = l == 0 ? -INFINITY : m + log(l), mine = finishes ? after.lse[cell]
                                                           : after.l[cell] == 0
                                                               ? -INFINITY
                                                               : after.m[cell] + log(after.l[cell]);
      if (lse != mine) worst = fmax(worst, fabs(lse - mine) / (c.large ? 1 + fabs(lse) : 1));
      if (std::isnan(mine)) worst = INFINITY;
      if (!finishes && m == (double)before.m[cell])
        expect(after.m[cell] == before.m[cell], c, "a maximum that nothing exceeded changed", i);
      bool empty = !finishes;
      for (int t = 0; t < j.keys; t++) empty &= !c.sees(i, t);
      if (empty)
        expect(same(after.m, before.m, cell, 1) && same(after.l, before.l, cell, 1) &&
                   same(after.acc, before.acc, cell * dim, dim),
            c, "a row without keys changed", i);
      for (int x = 0; x < dim; x++) {
        want.push_back(l == 0 ? 0 : acc[x] / l * (finishes ? j.gain : 1));
        got.push_back(finishes ? value_of(after.out[cell * dim + x])
                      : l == 0 ? after.acc[cell * dim + x]
                               : after.acc[cell * dim + x] / after.l[cell]);
      }
  } });
  double off = distance(got, want);
  expect(off < TOLERANCE, c, what, off); expect(worst < 2e-4, c, "lse", worst);
}

// A key full of NaN or infinities must change no bit of a row that does not see it, and must show
// in one that does.
static void check_hidden(
    Case c, Random& random, bool key_too, const State& before, const State& clean) {
  const Job& j = c.job; const int dim = value_dim(j);
  int t = random.below(j.keys), column = random.below(dim + 1);
  double value = random.coin() ? NAN : INFINITY;
  c.each_sequence([&](int b, int s, int h) {
    i64 y = c.value(b, s, h, t), z = at(j.k, b, s, t, h);
    for (int x = 0; x < dim; x++)
      if (column == dim || x == column) c.V[y + x] = element_of(value);
    for (int x = 0; x < j.dim; x++)
      if (key_too && (column >= j.dim || x == column)) c.K[z + x] = element_of(value);
  });
  State after = before; run(c, after, false, false);
  c.each_sequence([&](int b, int s, int h) { for (int i = 0; i < j.queries; i++) {
    i64 cell = at(j.cells, b, s, i, h);
    if (!c.sees(i, t))
      expect(same(after.m, clean.m, cell, 1) && same(after.l, clean.l, cell, 1) &&
                 same(after.acc, clean.acc, cell * dim, dim),
          c, "a hidden key changed a row", i);
    else if (c.factor(b, s, h, i, t))
      expect(!std::isfinite(after.acc[cell * dim + (column == dim ? 0 : column)]), c,
          "a visible NaN is lost", i);
  } });
}
#if MASKED && !defined(STAGES)
// A row has the same bits among fewer queries, and without the other segments and batch entries:
// what makes a step of a job on a grid independent of the ring.
static void check_alone(const Case& c, Random& random, const State& before, const State& after) {
  if (c.pieces.size() > 1) return;
  Case one = c;
  Job& j = one.job;
  const int first = random.below(j.queries), count = 1 + random.below(j.queries - first),
            dim = value_dim(j);
  j.queries = count; j.batch = j.segments = 1;
  j.q.offset += first * j.q.row; j.cells.offset += first * j.cells.row;
  one.pieces[0].query += first * one.pieces[0].query_step;
  one.pieces[0].end_query = count;
  State alone = before; run(one, alone, false, false);
  for (int h = 0; h < j.heads; h++)
    for (int i = 0; i < count; i++) {
      const i64 cell = at(j.cells, 0, 0, i, h);
      expect(same(alone.m, after.m, cell, 1) && same(alone.l, after.l, cell, 1) &&
                 same(alone.acc, after.acc, cell * dim, dim),
          c, "a row has other bits among fewer rows", first + i);
    }
}
#endif
#if MASKED
// A known answer of Philox4x32-10 from its authors' library.
static void check_coins(const Case& c) {
  Coins coins = philox(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0);
  const u32 known[] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  for (int i = 0; i < 4; i++) expect(coins.word[i] == known[i], c, "a coin", i);
}
#endif
int main(int count, char** arguments) {
  Random random(count > 1 ? strtoull(arguments[1], nullptr, 10) : 1);
  int cases = count > 2 ? atoi(arguments[2]) : 4;
  // The last jobs have large scores.
  for (int n = 0; n < cases + 4; n++) {
    Case c; auto width = [&](int most) {
      return ALIGNED ? most - 8 * random.below(2) : most - random.below(16);
    };
#if MASKED
    const int own = width(HD), dim = width(VD);
#else
    const int own = width(HD), dim = own;
#endif
#ifdef STAGES
    // Few queries, and more blocks of keys than are in flight.
    const int most_queries = TILE / 2 + 3, most_keys = 8 * BLOCK;
#else
    const int most_queries = n == 0 ? 2 * TILE + 5 : TILE + 9, most_keys = 2 * BLOCK + 20;
#endif
    draw_case(c, random, n, own, dim, ALIGNED, most_queries, most_keys);
    if (n >= cases && !enlarge(c, random)) continue;
#if MASKED
    check_coins(c);
#endif
    State fresh = empty_state(c), ended = fresh;
    run(c, ended, true, true);
    check(c, fresh, ended, true, "out");
    State before = fresh;
    for (size_t i = 0; i < before.m.size(); i++)
      if (random.below(4)) {
        before.m[i] = (Sum)random.unit();
        before.l[i] = 2 + (Sum)random.unit();
        for (int x = 0; x < dim; x++) before.acc[i * dim + x] = x ? (Sum)random.unit() : -0.f;
      }
    State after = before; run(c, after, false, false); check(c, before, after, false, "acc");
#if MASKED && !defined(STAGES)
    check_alone(c, random, before, after);
#endif
    State last = before; run(c, last, false, true); check(c, before, last, true, "out of a carry");
    State first = fresh;
    first.acc.assign(first.acc.size(), NAN);
    first.m.assign(first.m.size(), NAN);
    first.l.assign(first.l.size(), NAN);
    run(c, first, true, false);
    check(c, fresh, first, false, "acc that starts");
    for (bool key_too : {false, true}) check_hidden(c, random, key_too, before, after);
    if (n == 0) {
      Case twice = c;
      State again = before;
      run(twice, again, false, false);
      expect(again.acc == after.acc && again.m == after.m && again.l == after.l, c,
          "not repeatable", 0);
    }
  }
#ifdef PLAIN
  printf("plain_forward COLUMNS=%d MASKED=%d", COLUMNS, MASKED);
#elif defined(STAGES)
  printf("split_forward HD=%d WARPS=%d KEY_WARPS=%d MT=%d BLOCK=%d STAGES=%d ALIGNED=%d MASKED=%d",
      HD, WARPS, KEY_WARPS, MT, BLOCK, STAGES, ALIGNED, MASKED);
#else
  printf("mma_forward HD=%d WARPS=%d MT=%d BLOCK=%d ALIGNED=%d MASKED=%d", HD, WARPS, MT, BLOCK,
      ALIGNED, MASKED);
#endif
  printf(": %d cases, %d failures\n", cases + 4, failures);
  return failures != 0;
}
