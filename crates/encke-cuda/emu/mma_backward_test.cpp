// Runs one half of the mma.sync backward pass (OWNS_KEYS or OWNS_QUERIES) on the CPU model over
// random jobs: values, accumulation, hidden NaNs bit by bit, and queries that saw no key.
#include "mma.h"
#include "../src/kernels/common.cuh"
#include "mma_case.h"
#include "../src/kernels/mma_tile.cuh"
#ifdef OWNS_KEYS
#include "../src/kernels/mma_backward_keys.cu"
#else
#include "../src/kernels/mma_backward_queries.cu"
#endif

struct GradientBuffers { std::vector<float> dq, dk, dv; };
static GradientBuffers run(const Case& c, const GradientBuffers& before) {
  GradientBuffers g = before;
  const JobParams& j = c.job;
  int others = j.heads * j.segments * j.batch;
#ifdef OWNS_KEYS
  emu::launch((j.keys + TILE - 1) / TILE * others, 1, THREADS, [&] {
    mma_backward_keys(j, c.Q.data(), c.K.data(), c.V.data(), c.dO.data(), c.lse.data(),
        c.delta.data(), g.dk.data(), g.dv.data());
  });
#else
  emu::launch((j.queries + TILE - 1) / TILE * others, 1, THREADS, [&] {
    mma_backward_queries(j, c.Q.data(), c.K.data(), c.V.data(), c.dO.data(), c.lse.data(),
        c.delta.data(), g.dq.data());
  });
#endif
  return g;
}
// lse and delta as if other jobs were part of the softmax; some rows saw no key at all, and their
// dout is NaN.
static void give_upstream(Case& c, Random& random) {
  const JobParams& j = c.job; c.lse.assign(c.cells.size, NAN); c.delta.assign(c.cells.size, NAN);
  c.each_sequence([&](int b, int s, int h) { for (int i = 0; i < j.queries; i++) {
    i64 cell = at(j.cells, b, s, i, h); double top = -INFINITY, sum = 0;
    for (int t = 0; t < visible(j, i); t++) {
      double x = c.score(b, s, h, i, t);
      if (x > top) {
        sum *= exp(top - x);
        top = x;
      }
      sum += exp(x - top);
    }
    c.lse[cell] = sum == 0 ? (random.coin() ? 0.3f : -INFINITY)
                           : (float)(top + log(sum) + random.unit() * 0.5);
    c.delta[cell] = (float)random.unit();
    if (random.below(12) == 0) c.lse[cell] = -INFINITY;
    if (c.lse[cell] == -INFINITY) {
      c.delta[cell] = NAN;
      for (int x = 0; x < j.dim; x++) c.dO[cell * j.dim + x] = emu::narrow(NAN);
    }
  } });
}
template <class F> static void pairs(const Case& c, F f) {
  const JobParams& j = c.job;
  c.each_sequence([&](int b, int s, int h) {
    for (int i = 0; i < j.queries; i++) {
      if (c.lse[at(j.cells, b, s, i, h)] == -INFINITY) continue;
      for (int t = 0; t < visible(j, i); t++) f(b, s, h, i, t);
    }
  });
}
static void check(const Case& c, const GradientBuffers& before, const GradientBuffers& after) {
  const JobParams& j = c.job;
  Values dq(before.dq.begin(), before.dq.end()), dk(before.dk.begin(), before.dk.end()),
      dv(before.dv.begin(), before.dv.end());
  pairs(c, [&](int b, int s, int h, int i, int t) {
    i64 cell = at(j.cells, b, s, i, h), x = at(j.q, b, s, i, h), y = at(j.k, b, s, t, h),
        z = at(j.dq, b, s, i, h);
    double dp = 0;
    for (int n = 0; n < j.dim; n++)
      dp += (double)emu::widen(c.dO[cell * j.dim + n]) * emu::widen(c.V[y + n]);
    double p = exp(c.score(b, s, h, i, t) - c.lse[cell]), ds = p * (j.gain * dp - c.delta[cell]);
    for (int n = 0; n < j.dim; n++) {
      dv[y + n] += p * j.gain * emu::widen(c.dO[cell * j.dim + n]);
      dk[y + n] += j.scale * ds * emu::widen(c.Q[x + n]);
      dq[z + n] += j.scale * ds * emu::widen(c.K[y + n]);
    }
  });
  auto judge = [&](const std::vector<float>& x, const Values& y, const char* what) {
    double off = distance(Values(x.begin(), x.end()), y);
    expect(off < TOLERANCE, c, what, off);
  };
#ifdef OWNS_KEYS
  if (PARTS & 2) judge(after.dk, dk, "dk");
  if (PARTS & 1) judge(after.dv, dv, "dv");
#else
  judge(after.dq, dq, "dq");
#endif
}
static bool same(const std::vector<float>& x, const std::vector<float>& y, i64 at) {
  return memcmp(&x[at], &y[at], 4) == 0;
}
// Only marked elements may differ: 1 may, 2 must not be finite if it is computed here.
static void check_marked(const Case& c, const GradientBuffers& clean, const GradientBuffers& after,
    const GradientBuffers& marks, const char* what) {
  auto judge = [&](const std::vector<float>& x, const std::vector<float>& y,
                   const std::vector<float>& mark, bool here) {
    for (size_t i = 0; i < x.size(); i++) {
      if (mark[i] == 0) expect(same(x, y, i), c, what, (double)i);
      if (mark[i] == 2 && here) expect(!std::isfinite(x[i]), c, "a visible NaN is lost", (double)i);
    }
  };
#ifdef OWNS_KEYS
  bool dq = false, dk = PARTS & 2, dv = PARTS & 1;
#else
  bool dq = true, dk = false, dv = false;
#endif
  judge(after.dq, clean.dq, marks.dq, dq);
  judge(after.dk, clean.dk, marks.dk, dk);
  judge(after.dv, clean.dv, marks.dv, dv);
}
// Puts NaN or infinities into a key, then into a query: in all columns, or in one column (of k, of
// dout), whose effect alone must show.
static void check_hidden(const Case& clean_case, Random& random, bool all,
    const GradientBuffers& before, const GradientBuffers& clean) {
  const JobParams& j = clean_case.job;
  u16 value = emu::narrow(all && random.coin() ? NAN : INFINITY);
  int t = random.below(j.keys), i = random.below(j.queries), column = random.below(j.dim);
  auto no_marks = [&] {
    return GradientBuffers{std::vector<float>(before.dq.size(), 0),
        std::vector<float>(before.dk.size(), 0), std::vector<float>(before.dk.size(), 0)};
  };
  auto mark = [&](std::vector<float>& marks, i64 at, bool one) {
    for (int n = 0; n < j.dim; n++) marks[at + n] = all || (one && n == column) ? 2.f : 1.f;
  };
  Case c = clean_case; GradientBuffers marks = no_marks();
  c.each_sequence([&](int b, int s, int h) {
    i64 y = at(j.k, b, s, t, h);
    for (int n = 0; n < j.dim; n++) {
      if (all || n == column) c.K[y + n] = value;
      if (all) c.V[y + n] = value;
    }
  });
  pairs(c, [&](int b, int s, int h, int row, int key) {
    if (key == t) {
      i64 y = at(j.k, b, s, t, h);
      mark(marks.dq, at(j.dq, b, s, row, h), true);
      mark(marks.dk, y, false);
      mark(marks.dv, y, false);
    }
  });
  check_marked(c, clean, run(c, before), marks, "a hidden key changed something");

  c = clean_case; marks = no_marks();
  c.each_sequence([&](int b, int s, int h) {
    i64 x = at(j.q, b, s, i, h), cell = at(j.cells, b, s, i, h);
    for (int n = 0; n < j.dim; n++) {
      if (all) c.Q[x + n] = value;
      if (all || n == column) c.dO[cell * j.dim + n] = value;
    }
  });
  pairs(c, [&](int b, int s, int h, int row, int key) {
    if (row == i) {
      i64 y = at(j.k, b, s, key, h);
      mark(marks.dq, at(j.dq, b, s, i, h), false);
      mark(marks.dk, y, false);
      mark(marks.dv, y, true);
    }
  });
  check_marked(c, clean, run(c, before), marks, "a query changed keys it does not see");
}
int main(int count, char** arguments) {
  Random random(count > 1 ? strtoull(arguments[1], nullptr, 10) : 1);
  int cases = count > 2 ? atoi(arguments[2]) : 3;
  for (int n = 0; n < cases; n++) {
    Case c; int dim = ALIGNED ? HD - 8 * random.below(2) : HD - random.below(16);
#ifdef OWNS_KEYS
    draw_case(c, random, n, dim, ALIGNED, 2 * BLOCK + 20, n == 0 ? 2 * TILE + 5 : TILE + 9);
#else
    draw_case(c, random, n, dim, ALIGNED, n == 0 ? 2 * TILE + 5 : TILE + 9, 2 * BLOCK + 20);
#endif
    give_upstream(c, random);
    auto some = [&](i64 size) {
      std::vector<float> x(size);
      for (auto& y : x) y = (float)random.unit();
      return x;
    };
    GradientBuffers before = {some(c.dq.size), some(c.k.size), some(c.k.size)},
                    after = run(c, before);
    check(c, before, after);
    for (bool all : {true, false}) check_hidden(c, random, all, before, after);
    if (n == 0) {
      GradientBuffers again = run(c, before);
      expect(again.dq == after.dq && again.dk == after.dk && again.dv == after.dv, c,
          "not repeatable", 0);
    }
  }
#ifdef OWNS_KEYS
  printf("mma_backward_keys PARTS=%d", PARTS);
#else
  printf("mma_backward_queries");
#endif
  printf(" HD=%d WARPS=%d MT=%d BLOCK=%d ALIGNED=%d: %d cases, %d failures\n", HD, WARPS, MT, BLOCK,
      ALIGNED, cases, failures);
  return failures != 0;
}
