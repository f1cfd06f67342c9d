// Random jobs for the mma.sync kernels on the CPU model, and their results by plain loops in f64.
//
// Included after the kernel's macros and `mma.h`, before the kernel; defines no kernel function.
#pragma once
#include <random>
#include <string>

struct Random {
  std::mt19937_64 source;
  explicit Random(u64 seed) : source(seed) {}
  int below(int n) { return (int)(source() % (u64)n); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool coin() { return source() & 1; }
  double unit() { return (double)(source() >> 11) * 0x1p-53 * 2 - 1; }
};
typedef std::vector<double> Values;

struct Layout { i64 offset, batch, segment, row; std::vector<i64> heads; i64 size; };
// Rows `step` apart, each head with its own phase; `groups` query heads share one key head.
static Layout layout(int batch, int segments, int rows, int heads, int dim, int step, int groups,
    int pad, bool phases) {
  Layout o; int own = heads / groups; i64 width = (i64)own * (dim + pad);
  o.offset = pad;
  o.row = step * width;
  o.segment = (rows * step + 1) * width;
  o.batch = segments * o.segment + pad;
  for (int h = 0; h < heads; h++)
    o.heads.push_back(h / groups * (dim + pad) + (phases ? h / groups % step * width : 0));
  o.size = o.offset + batch * o.batch + step * width;
  return o;
}
static OperandParams operand(const Layout& l) {
  return {l.offset, l.batch, l.segment, l.row, 1, l.heads.data()};
}

struct Case {
  JobParams job{}; Layout q, k, cells, dq; std::string name;
  std::vector<u16> Q, K, V, dO;
  std::vector<float> lse, delta;
  double score(int b, int s, int h, int i, int j) const {
    double sum = 0; i64 x = ::at(job.q, b, s, i, h), y = ::at(job.k, b, s, j, h);
    for (int c = 0; c < job.dim; c++) sum += (double)emu::widen(Q[x + c]) * emu::widen(K[y + c]);
    return job.scale * sum;
  }
  template <class F> void each_sequence(F f) const {
    for (int b = 0; b < job.batch; b++)
      for (int s = 0; s < job.segments; s++)
        for (int h = 0; h < job.heads; h++) f(b, s, h);
  }
};
static std::vector<u16> random_elements(Random& random, i64 n) {
  std::vector<u16> x(n);
  for (auto& y : x) y = emu::narrow((float)random.unit());
  return x;
}

// `dim` elements per head, padded so that rows begin at multiples of 16 bytes if `aligned`. Every
// other job has one key head for all query heads; the first is causal.
static void draw_case(
    Case& c, Random& random, int number, int dim, bool aligned, int most_queries, int most_keys) {
  JobParams& j = c.job; int pad = aligned ? 8 * random.below(2) : random.below(4);
  j.batch = random.between(1, 2);
  j.segments = random.between(1, 2);
  j.heads = random.between(1, 2) + (number + 1) % 2;
  j.dim = dim;
  j.queries = random.between(1, most_queries); j.keys = random.between(1, most_keys);
  int groups = number % 2 ? 1 : j.heads;
  c.q = layout(j.batch, j.segments, j.queries, j.heads, dim, random.between(1, 3), 1, pad, true);
  c.k = layout(
      j.batch, j.segments, j.keys, j.heads, dim, random.between(1, 3), groups, pad, random.coin());
  c.dq = layout(j.batch, j.segments, j.queries, j.heads, dim, 1, 1, aligned ? 8 : 1, false);
  c.cells = layout(j.batch, j.segments, j.queries, j.heads, 1, 1, 1, 0, false);
  j.q = operand(c.q); j.k = operand(c.k); j.dq = operand(c.dq); j.cells = operand(c.cells);
  j.causal = number == 0 || random.coin();
  j.query = random.below(20);
  j.query_step = random.between(1, 3);
  j.key = random.below(40);
  j.key_step = random.between(1, 3);
  double scales[] = {0.3, 0.3, 0.3, -0.4, 0.0};
  j.scale = scales[random.below(5)];
  j.gain = random.coin() ? 1 : 0.5;
  c.Q = random_elements(random, c.q.size);
  c.K = random_elements(random, c.k.size);
  c.V = random_elements(random, c.k.size);
  c.dO = random_elements(random, c.cells.size * dim);
  char name[200];
  snprintf(name, sizeof name,
      "b%d s%d h%d/%d q%d k%d d%d causal %d (%lld+%lldi, %lld+%lldj) scale %g", j.batch, j.segments,
      j.heads, groups, j.queries, j.keys, dim, j.causal, j.query, j.query_step, j.key, j.key_step,
      j.scale);
  c.name = name;
}

// |x - y| / |y| of two vectors; infinite if only one of them has a NaN.
static double distance(const Values& x, const Values& y) {
  double off = 0, size = 1e-12;
  for (size_t i = 0; i < x.size(); i++) {
    if (std::isnan(x[i]) && std::isnan(y[i])) continue;
    off += (x[i] - y[i]) * (x[i] - y[i]);
    size += y[i] * y[i];
  }
  double r = std::sqrt(off / size); return std::isnan(r) ? INFINITY : r;
}
inline int failures = 0;
static void expect(bool right, const Case& c, const char* what, double figure) {
  if (!right) { failures++; printf("FAIL %s: %s (%g)\n", c.name.c_str(), what, figure); }
}
#ifdef T_F16
static const double TOLERANCE = 1.5e-3;
#else
static const double TOLERANCE = 1e-2;
#endif
