// Runs backward kernels (PLAIN, or one half of the mma.sync ones: OWNS_KEYS or not) on the CPU
// model over random jobs: values, accumulation, hidden NaNs bit by bit, and queries that saw no
// key. With MASKED, jobs have masks, score transforms, dropout and values of another width.
#ifdef PLAIN
#include "plain.h"
#else
#include "mma.h"
#endif
#include "../src/kernels/common.cuh"
#include "../src/kernels/masks.cuh"
#include "attention_case.h"
#if defined(PLAIN)
#include "../src/kernels/plain.cu"
#define BLOCK TILE
#define ALIGNED 0
#define PARTS 7
#elif defined(OWNS_KEYS)
#include "../src/kernels/mma_tile.cuh"
#include "../src/kernels/mma_backward_keys.cu"
#else
#include "../src/kernels/mma_tile.cuh"
#include "../src/kernels/mma_backward_queries.cu"
#define PARTS 4
#endif
// PARTS: 1 dv, 2 dk, 4 dq.

struct GradientBuffers { std::vector<Sum> dq, dk, dv; };
static GradientBuffers run(Case c, const GradientBuffers& before) {
  GradientBuffers g = before;
#if defined(PLAIN)
  // Groups of heads that read the same keys: the start of each, the end, then the heads.
  std::vector<i64> starts, list;
  const auto& heads = c.k.heads;
  for (size_t h = 0; h < heads.size(); h++) {
    if (std::find(heads.begin(), heads.begin() + h, heads[h]) != heads.begin() + h) continue;
    starts.push_back((i64)list.size());
    for (size_t other = h; other < heads.size(); other++)
      if (heads[other] == heads[h]) list.push_back((i64)other);
  }
  int count = (int)starts.size(); starts.push_back((i64)list.size());
  starts.insert(starts.end(), list.begin(), list.end());
  int blocks = c.blocks(false, TILE);
  emu::launch(blocks / 2 + 1, 1, TILE * TILE, [&] {
    plain_dkv(c.Q.data(), c.K.data(), c.V.data(), c.dO.data(), c.lse.data(), c.delta.data(),
        g.dk.data(), g.dv.data(), starts.data(), count, c.job);
  });
  blocks = c.blocks(true, TILE);
  emu::launch(blocks / 2 + 1, 1, TILE * TILE, [&] {
    plain_dq(c.Q.data(), c.K.data(), c.V.data(), c.dO.data(), c.lse.data(), c.delta.data(),
        g.dq.data(), c.job);
  });
#elif defined(OWNS_KEYS)
  int blocks = c.blocks(false, TILE);
  emu::launch(blocks, 1, THREADS, [&] {
    mma_backward_keys(c.job, c.Q.data(), c.K.data(), c.V.data(), c.dO.data(), c.lse.data(),
        c.delta.data(), g.dk.data(), g.dv.data());
  });
#else
  int blocks = c.blocks(true, TILE);
  emu::launch(blocks, 1, THREADS, [&] {
    mma_backward_queries(c.job, c.Q.data(), c.K.data(), c.V.data(), c.dO.data(), c.lse.data(),
        c.delta.data(), g.dq.data());
  });
#endif
  return g;
}
// lse and delta as if other jobs were part of the softmax; some rows saw no key at all, and their
// dout is NaN.
static void give_upstream(Case& c, Random& random) {
  const Job& j = c.job; const int dim = value_dim(j);
  c.exact_lse.assign(c.cells.size, 0.3);
  c.lse.assign(c.cells.size, NAN); c.delta.assign(c.delta_at.size, NAN);
  c.each_sequence([&](int b, int s, int h) { for (int i = 0; i < j.queries; i++) {
    i64 cell = at(j.cells, b, s, i, h); double top = -INFINITY, sum = 0; Sum largest = 0;
    for (int t = 0; t < j.keys; t++) {
      if (!c.sees(i, t)) continue;
      double x = c.score(b, s, h, i, t);
      if (x > top) {
        sum *= exp(top - x);
        top = x;
        largest = c.rounded_product(b, s, h, i, t);
      }
      sum += exp(x - top);
    }
    c.lse[cell] = sum == 0 ? (random.coin() ? (Sum)0.3 : (Sum)-INFINITY)
                           : (Sum)(top + log(sum) + random.unit() * 0.5);
    if (c.large && sum > 0) {
      c.exact_lse[cell] = top + log(sum);
      // As the forward kernel rounds it.
      c.lse[cell] = j.scale == 0 ? (Sum)c.exact_lse[cell] : largest * (Sum)j.scale;
    }
    Sum& delta = c.delta[at(j.delta, b, s, i, h)];
    delta = (Sum)random.unit();
    if (random.below(12) == 0) c.lse[cell] = -INFINITY;
    if (c.lse[cell] == -INFINITY) {
      delta = NAN;
      for (int x = 0; x < dim; x++) c.dO[cell * dim + x] = element_of(NAN);
    }
  } });
}
template <class F> static void pairs(const Case& c, F f) {
  const Job& j = c.job;
  c.each_sequence([&](int b, int s, int h) {
    for (int i = 0; i < j.queries; i++) {
      if (c.lse[at(j.cells, b, s, i, h)] == -INFINITY) continue;
      for (int t = 0; t < j.keys; t++) if (c.sees(i, t)) f(b, s, h, i, t);
    }
  });
}
static void check(const Case& c, const GradientBuffers& before, const GradientBuffers& after) {
  const Job& j = c.job; const int dim = value_dim(j);
  Values dq(before.dq.begin(), before.dq.end()), dk(before.dk.begin(), before.dk.end()),
      dv(before.dv.begin(), before.dv.end());
  pairs(c, [&](int b, int s, int h, int i, int t) {
    i64 cell = at(j.cells, b, s, i, h), x = at(j.q, b, s, i, h), y = at(j.k, b, s, t, h),
        z = at(j.dq, b, s, i, h), v = c.value(b, s, h, t);
    double dp = 0, derivative, factor = c.factor(b, s, h, i, t) * j.gain;
    for (int n = 0; n < dim; n++) dp += value_of(c.dO[cell * dim + n]) * value_of(c.V[v + n]);
    double lse = c.large ? c.exact_lse[cell] : c.lse[cell],
           p = exp(c.score(b, s, h, i, t, &derivative) - lse),
           ds = p * (factor * dp - c.delta[at(j.delta, b, s, i, h)]) * derivative;
    for (int n = 0; n < dim; n++) dv[v + n] += p * factor * value_of(c.dO[cell * dim + n]);
    for (int n = 0; n < j.dim; n++) {
      dk[y + n] += j.scale * ds * value_of(c.Q[x + n]);
      dq[z + n] += j.scale * ds * value_of(c.K[y + n]);
    }
  });
  auto judge = [&](const std::vector<Sum>& x, const Values& y, const char* what) {
    double off = distance(Values(x.begin(), x.end()), y);
    expect(off < TOLERANCE, c, what, off);
  };
  if (PARTS & 4) judge(after.dq, dq, "dq");
  if (PARTS & 2) judge(after.dk, dk, "dk");
  if (PARTS & 1) judge(after.dv, dv, "dv");
}
static bool same(const std::vector<Sum>& x, const std::vector<Sum>& y, i64 at) {
  return memcmp(&x[at], &y[at], sizeof(Sum)) == 0;
}
// Only marked elements may differ: 1 may, 2 must not be finite if it is computed here.
static void check_marked(const Case& c, const GradientBuffers& clean, const GradientBuffers& after,
    const GradientBuffers& marks, const char* what) {
#if MASKED
  // A capped score has a derivative of 0 at infinity, and a dropped pair hides its value.
  const bool shows = c.job.mask.softcap == 0 && c.job.mask.kept == 0;
#else
  const bool shows = true;
#endif
  auto judge = [&](const std::vector<Sum>& x, const std::vector<Sum>& y,
                   const std::vector<Sum>& mark, bool here) {
    for (size_t i = 0; i < x.size(); i++) {
      if (mark[i] == 0) expect(same(x, y, i), c, what, (double)i);
      if (mark[i] == 2 && here && shows)
        expect(!std::isfinite(x[i]), c, "a visible NaN is lost", (double)i);
    }
  };
  judge(after.dq, clean.dq, marks.dq, PARTS & 4);
  judge(after.dk, clean.dk, marks.dk, PARTS & 2);
  judge(after.dv, clean.dv, marks.dv, PARTS & 1);
}
// Puts NaN or infinities into a key, then into a query: in all columns, or in one column (of k, of
// dout), whose effect alone must show.
static void check_hidden(const Case& clean_case, Random& random, bool all,
    const GradientBuffers& before, const GradientBuffers& clean) {
  const Job& j = clean_case.job; const int dim = value_dim(j);
  Element value = element_of(all && random.coin() ? NAN : INFINITY);
  int t = random.below(j.keys), i = random.below(j.queries), column = random.below(min(j.dim, dim));
  auto no_marks = [&] {
    return GradientBuffers{std::vector<Sum>(before.dq.size(), 0),
        std::vector<Sum>(before.dk.size(), 0), std::vector<Sum>(before.dv.size(), 0)};
  };
  auto mark = [&](std::vector<Sum>& marks, i64 at, int count, bool one) {
    for (int n = 0; n < count; n++) marks[at + n] = all || (one && n == column) ? 2.f : 1.f;
  };
  Case c = clean_case; GradientBuffers marks = no_marks();
  c.each_sequence([&](int b, int s, int h) {
    i64 y = at(j.k, b, s, t, h), v = c.value(b, s, h, t);
    for (int n = 0; n < j.dim; n++) if (all || n == column) c.K[y + n] = value;
    for (int n = 0; n < dim; n++) if (all) c.V[v + n] = value;
  });
  pairs(c, [&](int b, int s, int h, int row, int key) {
    if (key == t) {
      mark(marks.dq, at(j.dq, b, s, row, h), j.dim, true);
      mark(marks.dk, at(j.k, b, s, t, h), j.dim, false);
      mark(marks.dv, c.value(b, s, h, t), dim, false);
    }
  });
  check_marked(c, clean, run(c, before), marks, "a hidden key changed something");

  c = clean_case; marks = no_marks();
  c.each_sequence([&](int b, int s, int h) {
    i64 x = at(j.q, b, s, i, h), cell = at(j.cells, b, s, i, h);
    for (int n = 0; n < j.dim; n++) if (all) c.Q[x + n] = value;
    for (int n = 0; n < dim; n++) if (all || n == column) c.dO[cell * dim + n] = value;
  });
  pairs(c, [&](int b, int s, int h, int row, int key) {
    if (row == i) {
      mark(marks.dq, at(j.dq, b, s, i, h), j.dim, false);
      mark(marks.dk, at(j.k, b, s, key, h), j.dim, false);
      mark(marks.dv, c.value(b, s, h, key), dim, true);
    }
  });
  check_marked(c, clean, run(c, before), marks, "a query changed keys it does not see");
}
int main(int count, char** arguments) {
  Random random(count > 1 ? strtoull(arguments[1], nullptr, 10) : 1);
  int cases = count > 2 ? atoi(arguments[2]) : 3;
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
#ifdef OWNS_KEYS
    draw_case(c, random, n, own, dim, ALIGNED, 2 * BLOCK + 20, n == 0 ? 2 * TILE + 5 : TILE + 9);
#else
    draw_case(c, random, n, own, dim, ALIGNED, n == 0 ? 2 * TILE + 5 : TILE + 9, 2 * BLOCK + 20);
#endif
    if (n >= cases && !enlarge(c, random)) continue;
    give_upstream(c, random);
    auto some = [&](i64 size) {
      std::vector<Sum> x(size);
      for (auto& y : x) y = (Sum)random.unit();
      return x;
    };
    GradientBuffers before = {some(c.dq.size), some(c.k.size), some(c.v.size)},
                    after = run(c, before);
    check(c, before, after);
    for (bool all : {true, false}) check_hidden(c, random, all, before, after);
    if (n == 0) {
      GradientBuffers again = run(c, before);
      expect(again.dq == after.dq && again.dk == after.dk && again.dv == after.dv, c,
          "not repeatable", 0);
    }
  }
#ifdef PLAIN
  printf("plain backward COLUMNS=%d MASKED=%d", COLUMNS, MASKED);
#else
  printf("mma backward PARTS=%d HD=%d WARPS=%d MT=%d BLOCK=%d ALIGNED=%d MASKED=%d", PARTS, HD,
      WARPS, MT, BLOCK, ALIGNED, MASKED);
#endif
  printf(": %d cases, %d failures\n", cases + 4, failures);
  return failures != 0;
}
