// Runs `mma_forward` on the CPU model over random jobs: values, carry, and hidden NaNs bit by bit.
#include "mma.h"
#include "../src/kernels/common.cuh"
#include "mma_case.h"
#include "../src/kernels/mma_tile.cuh"
#include "../src/kernels/mma_forward.cu"

struct State { std::vector<float> acc, m, l, lse; std::vector<u16> out; };
static State empty_state(const Case& c) {
  size_t n = c.cells.size, d = c.job.dim;
  return {std::vector<float>(n * d, 0.f), std::vector<float>(n, -INFINITY),
      std::vector<float>(n, 0.f), std::vector<float>(n, 7.f), std::vector<u16>(n * d, 7)};
}
static void run(const Case& c, State& s, bool starts, bool finishes) {
  int tiles = (c.job.queries + TILE - 1) / TILE * c.job.heads * c.job.segments * c.job.batch;
  emu::launch(tiles, 1, THREADS, [&] {
    mma_forward(c.job, c.Q.data(), c.K.data(), c.V.data(), s.acc.data(), s.m.data(), s.l.data(),
        s.out.data(), s.lse.data(), starts, finishes);
  });
}
// The softmax of one row in f64, continuing a carry.
static void reference(const Case& c, const State& before, int b, int s, int h, int i, Values& acc,
    double& m, double& l) {
  const JobParams& j = c.job;
  i64 cell = at(j.cells, b, s, i, h);
  m = before.m[cell];
  l = before.l[cell];
  acc.assign(j.dim, 0);
  int seen = visible(j, i); Values score(seen); double top = m;
  for (int t = 0; t < seen; t++) { score[t] = c.score(b, s, h, i, t); top = fmax(top, score[t]); }
  double shrink = l == 0 ? 0 : exp(m - top); l *= shrink;
  for (int x = 0; x < j.dim; x++) acc[x] = before.acc[cell * j.dim + x] * shrink;
  for (int t = 0; t < seen; t++) {
    double p = exp(score[t] - top);
    l += p;
    i64 y = at(j.k, b, s, t, h);
    for (int x = 0; x < j.dim; x++) acc[x] += p * emu::widen(c.V[y + x]);
  }
  m = top;
}
static void check(
    const Case& c, const State& before, const State& after, bool finishes, const char* what) {
  Values got, want; double worst = 0; const JobParams& j = c.job;
  c.each_sequence([&](int b, int s, int h) { for (int i = 0; i < j.queries; i++) {
      Values acc;
      double m, l;
      reference(c, before, b, s, h, i, acc, m, l);
      i64 cell = at(j.cells, b, s, i, h);
      double lse = l == 0 ? -INFINITY : m + log(l), mine = finishes ? after.lse[cell]
                                                           : after.l[cell] == 0
                                                               ? -INFINITY
                                                               : after.m[cell] + log(after.l[cell]);
      if (lse != mine) worst = fmax(worst, fabs(lse - mine));
      if (std::isnan(mine)) worst = INFINITY;
      if (!finishes && m == (double)before.m[cell])
        expect(after.m[cell] == before.m[cell], c, "a maximum that nothing exceeded changed", i);
      for (int x = 0; x < j.dim; x++) {
        want.push_back(l == 0 ? 0 : acc[x] / l * (finishes ? j.gain : 1));
        got.push_back(finishes ? emu::widen(after.out[cell * j.dim + x])
                      : l == 0 ? after.acc[cell * j.dim + x]
                               : after.acc[cell * j.dim + x] / after.l[cell]);
      }
  } });
  double off = distance(got, want);
  expect(off < TOLERANCE, c, what, off); expect(worst < 2e-4, c, "lse", worst);
}
template <class T>
static bool same(const std::vector<T>& x, const std::vector<T>& y, size_t at, size_t n) {
  return memcmp(&x[at], &y[at], n * sizeof(T)) == 0;
}

// A key full of NaN or infinities must change no bit of a row that does not see it, and must show
// in one that does.
static void check_hidden(
    Case c, Random& random, bool key_too, const State& before, const State& clean) {
  const JobParams& j = c.job; int t = random.below(j.keys), column = random.below(j.dim + 1);
  float value = random.coin() ? NAN : INFINITY;
  c.each_sequence([&](int b, int s, int h) {
    i64 y = at(j.k, b, s, t, h);
    for (int x = 0; x < j.dim; x++)
      if (column == j.dim || x == column) {
        c.V[y + x] = emu::narrow(value);
        if (key_too) c.K[y + x] = emu::narrow(value);
      }
  });
  State after = before; run(c, after, false, false);
  c.each_sequence([&](int b, int s, int h) { for (int i = 0; i < j.queries; i++) {
    i64 cell = at(j.cells, b, s, i, h);
    if (t >= visible(j, i))
      expect(same(after.m, clean.m, cell, 1) && same(after.l, clean.l, cell, 1) &&
                 same(after.acc, clean.acc, cell * j.dim, j.dim),
          c, "a hidden key changed a row", i);
    else
      expect(!std::isfinite(after.acc[cell * j.dim + (column == j.dim ? 0 : column)]), c,
          "a visible NaN is lost", i);
  } });
}
int main(int count, char** arguments) {
  Random random(count > 1 ? strtoull(arguments[1], nullptr, 10) : 1);
  int cases = count > 2 ? atoi(arguments[2]) : 4;
  for (int n = 0; n < cases; n++) {
    Case c; int dim = ALIGNED ? HD - 8 * random.below(2) : HD - random.below(16);
    draw_case(c, random, n, dim, ALIGNED, n == 0 ? 2 * TILE + 5 : TILE + 9, 2 * BLOCK + 20);
    State fresh = empty_state(c), ended = fresh;
    run(c, ended, true, true);
    check(c, fresh, ended, true, "out");
    State before = fresh;
    for (size_t i = 0; i < before.m.size(); i++)
      if (random.below(4)) {
        before.m[i] = (float)random.unit();
        before.l[i] = 2 + (float)random.unit();
        for (int x = 0; x < dim; x++) before.acc[i * dim + x] = (float)random.unit();
      }
    State after = before; run(c, after, false, false); check(c, before, after, false, "acc");
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
  printf("mma_forward HD=%d WARPS=%d MT=%d BLOCK=%d ALIGNED=%d: %d cases, %d failures\n", HD, WARPS,
      MT, BLOCK, ALIGNED, cases, failures);
  return failures != 0;
}
