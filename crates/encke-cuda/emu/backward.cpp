// The Hopper backward kernels on the CPU model, against their definition in f64. Built once per
// variant (macros HD, BQ, STAGES, DQ_STAGES and the storage type); runs every case that fits it.
#ifdef T_F16
#define SCALES_DQ 1
#else
#define SCALES_DQ 0
#endif
#include "backward.h"
#include "../src/kernels/common.cuh"
#include "../src/kernels/hopper.cuh"
#include "../src/kernels/hopper_add.cuh"
#include "../src/kernels/masks.cuh"
#include "../src/kernels/backward.cuh"
#include "../src/kernels/backward_rows.cu"
#include "../src/kernels/hopper_backward.cuh"
#include "../src/kernels/hopper_backward_tile.cuh"
#if WIDE
#include "../src/kernels/hopper_backward_wide.cu"
#else
#include "../src/kernels/hopper_backward.cu"
#endif
#include <numeric>

using std::vector;

struct Case {
  const char* name;
  // `shared` query heads read one key head.
  int batch, segments, queries, keys, heads, shared, dim, dilation;
  bool causal; i64 query, query_step, key, key_step;
  double scale, gain;
  // With WINDOWED: how far queries see, and documents of so many queries (0: one).
  i64 left = 1 << 30, right = 1 << 30; int document = 0;
  double size = 1;   // of the elements of q and k, about
};
struct View { OperandParams o; vector<i64> heads; u64 size; };

// Elements of a row of values.
static int value_dim(const Case& c) { return OWN_VALUES ? c.dim - HD + VD : c.dim; }
// Contiguous rows of `heads` heads; every `dilation`-th row is used, each head with its own phase.
static View view(
    const Case& c, int rows, int width, int per_head, int dilation, int dim, i64 offset) {
  View v; const i64 wide = (i64)width * dim;
  for (int h = 0; h < c.heads; h++)
    v.heads.push_back((i64)(h / per_head) * dim + (h / per_head % dilation) * wide);
  v.o = OperandParams{offset, (i64)c.segments * rows * dilation * wide, rows * dilation * wide,
      dilation * wide, 0, nullptr};
  i64 unit = 0; for (i64 x : v.heads) unit = std::gcd(unit, x);
  v.o.unit = unit ? unit : dim;
  v.size = offset + (u64)c.batch * v.o.batch;
  return v;
}
template <class F> static TensorMap map_of(
    const View& v, F* base, const Case& c, int rows, int columns, u32 box, bool add, i64 per) {
  u64 last = 0; for (i64 x : v.heads) last = std::max(last, (u64)(x / v.o.unit));
  auto make = [&](auto&& f) {
    return f(base + v.o.offset * per, columns, rows, last + 1, c.segments, c.batch, v.o.row * per,
        v.o.unit * per, v.o.segment * per, v.o.batch * per, box);
  };
  return add ? make([](auto b, auto... x) { return addition_map((void*)b, x...); })
             : make([](auto b, auto... x) { return tensor_map(b, x...); });
}

struct Inputs {
  vector<u16> q, k, v, dout; vector<float> lse, delta, dq, dk, dv;
  vector<double> exact_lse;   // without the rounding of `lse`, if scores are large
};
static const double CAP = 1.5;   // with SOFTCAP
struct Setting {
  View q, k, v, cells, delta, dq;
  JobParams job;
  vector<PieceParams> pieces;
  // By definition: the same document, and positions inside the window.
  bool sees(int i, int t) const {
#if WINDOWED
    for (const PieceParams& p : pieces)
      if (i >= p.first_query && i < p.end_query && t >= p.first_key && t < p.end_key) {
        const i64 ahead = p.query + (i - p.first_query) * p.query_step - p.key -
                          (t - p.first_key) * p.key_step;
        return ahead <= p.left && -ahead <= p.right;
      }
    return false;
#else
    return t < visible(job, i);
#endif
  }
  // The score of a pair from scale * product, by definition, and its derivative.
  double score(double x, int h, int i, int t, double& derivative) const {
    derivative = 1;
#if SOFTCAP
    const double share = tanh(x / CAP);
    x = CAP * share;
    derivative = 1 - share * share;
#endif
#if SLOPES
    for (const PieceParams& p : pieces)
      if (i >= p.first_query && i < p.end_query && t >= p.first_key && t < p.end_key)
        x -= slope_of(h) * fabs((double)(query_position(p, i) - key_position(p, t)));
#endif
    return x;
  }
  static double slope_of(int h) { return 0.01 + 0.02 * h; }
};

static float random_element() { return (emu::draw() & 0xffff) / 32768.0f - 1.0f; }
static vector<u16> random_elements(u64 n) {
  vector<u16> x(n);
  for (auto& y : x) y = emu::narrow(random_element());
  return x;
}
static vector<float> random_floats(u64 n) {
  vector<float> x(n);
  for (auto& y : x) y = random_element();
  return x;
}

static Setting setting(const Case& c) {
  Setting s; const int kv = c.heads / c.shared;
  s.q = view(c, c.queries, c.heads, 1, c.dilation, c.dim, 0);
  const int wide = value_dim(c);
  s.k = view(c, c.keys, kv, c.shared, c.dilation, c.dim, 2 * c.dim);
  s.v = view(c, c.keys, kv, c.shared, c.dilation, wide, 2 * wide);
  s.cells = view(c, c.queries, c.heads, 1, 1, 1, 0);
  s.delta = view(c, c.queries, c.heads, 1, 2, 1, 3);
  s.dq = view(c, c.queries, c.heads, 1, c.dilation, c.dim, 32);
  for (View* v : {&s.q, &s.k, &s.v, &s.cells, &s.delta, &s.dq}) v->o.heads = v->heads.data();
  s.job = JobParams{s.q.o, s.k.o, s.cells.o, s.delta.o, s.dq.o, c.query, c.query_step, c.key,
      c.key_step, c.batch, c.segments, c.queries, c.keys, c.heads, c.dim, c.causal, wide, c.scale,
      c.gain};
#if WINDOWED
  const int step = c.document ? c.document : c.queries;
  for (int i = 0, t = 0; i < c.queries && t < c.keys; i += step) {
    const int end = std::min(i + step, c.queries),
              end_key = c.document ? std::min(t + c.document + 3, c.keys) : c.keys;
    s.pieces.push_back(
        {c.query, c.query_step, c.key, c.key_step, c.left, c.right, i, end, t, end_key});
    t = end_key + (c.document ? 2 : 0);   // two keys in no document
  }
#endif
  return s;
}
template <class F> static void pairs(const Setting& s, F f) {
  const JobParams& j = s.job;
  for (int b = 0; b < j.batch; b++)
    for (int g = 0; g < j.segments; g++)
      for (int h = 0; h < j.heads; h++)
        for (int i = 0; i < j.queries; i++)
          for (int t = 0; t < j.keys; t++) if (s.sees(i, t)) f(b, g, h, i, t);
}
static double dot(const u16* a, const u16* b, int n) {
  double x = 0;
  for (int i = 0; i < n; i++) x += (double)emu::widen(a[i]) * emu::widen(b[i]);
  return x;
}

// As tensor cores add: 16 products at a time.
static float rounded_dot(const u16* a, const u16* b, int n) {
  float sum = 0, part = 0;
  for (int i = 0; i < n; i++) {
    part += emu::widen(a[i]) * emu::widen(b[i]);
    if (i % 16 == 15 || i == n - 1) { sum += part; part = 0; }
  }
  return sum;
}

static Inputs inputs(const Case& c, const Setting& s) {
  Inputs x; const JobParams& j = s.job;
  x.q = random_elements(s.q.size);
  x.k = random_elements(s.k.size);
  x.v = random_elements(s.v.size);
  x.dout = random_elements(s.cells.size * value_dim(c));
  for (auto& y : x.q) y = emu::narrow((float)(3 * c.size) * emu::widen(y));
  for (auto& y : x.k) y = emu::narrow((float)c.size * emu::widen(y));
  x.dq = random_floats(s.dq.size); x.dk = random_floats(s.k.size); x.dv = random_floats(s.v.size);
  x.exact_lse.assign(s.cells.size, -INFINITY);
  x.lse.assign(s.cells.size, -INFINITY); x.delta = random_floats(s.delta.size);
  for (int b = 0; b < j.batch; b++)
    for (int g = 0; g < j.segments; g++)
      for (int h = 0; h < j.heads; h++)
        for (int i = 0; i < j.queries; i++) {
          double sum = 0, top = -INFINITY, unused; float largest = 0;
          const u16* q = &x.q[at(j.q, b, g, i, h)];
          for (int t = 0; t < j.keys; t++) if (s.sees(i, t)) {
            const u16* k = &x.k[at(j.k, b, g, t, h)];
            const double score = s.score(c.scale * dot(q, k, c.dim), h, i, t, unused);
            if (score > top) {
              sum *= exp(top - score);
              top = score;
              largest = rounded_dot(q, k, c.dim);
            }
            sum += exp(score - top);
          }
          if (sum == 0) continue;
          const i64 cell = at(j.cells, b, g, i, h);
          x.lse[cell] = (float)(top + log(sum));
          x.exact_lse[cell] = x.lse[cell];
          if (c.size > 1) {
            x.exact_lse[cell] = top + log(sum);
            x.lse[cell] = largest * (float)c.scale;   // as the forward kernel rounds it
          }
        }
  return x;
}
struct Exact { vector<double> dq, dk, dv; };
static Exact exact(const Case& c, const Setting& s, const Inputs& x) {
  Exact e{{x.dq.begin(), x.dq.end()}, {x.dk.begin(), x.dk.end()}, {x.dv.begin(), x.dv.end()}};
  const JobParams& j = s.job;
  pairs(s, [&](int b, int g, int h, int i, int t) {
    const i64 cell = at(j.cells, b, g, i, h), q = at(j.q, b, g, i, h), k = at(j.k, b, g, t, h),
              dq = at(j.dq, b, g, i, h), v = at(s.v.o, b, g, t, h);
    const int wide = value_dim(c);
    if (x.lse[cell] == -INFINITY) return;
    double derivative;
    const double score = s.score(c.scale * dot(&x.q[q], &x.k[k], c.dim), h, i, t, derivative),
                 p = exp(score - x.exact_lse[cell]),
                 delta = x.delta[at(j.delta, b, g, i, h)],
                 ds = p * derivative *
                      (c.gain * dot(&x.dout[cell * wide], &x.v[v], wide) - delta);
    for (int y = 0; y < wide; y++)
      e.dv[v + y] += p * c.gain * emu::widen(x.dout[cell * wide + y]);
    for (int y = 0; y < c.dim; y++) {
      e.dq[dq + y] += c.scale * ds * emu::widen(x.k[k + y]);
      e.dk[k + y] += c.scale * ds * emu::widen(x.q[q + y]);
    }
  });
  return e;
}

struct Result { vector<float> dq, dk, dv; };
// Where a job's rows are on the grid, as `BackwardRows` has it.
struct GridPlace { int tile, key_lead, shift; };
static Result run(const Case& c, const Setting& s, const Inputs& x, bool fixed_order, int resident,
    Stores stores = ADDED, GridPlace place = {0, 0, 0}) {
  Result r{x.dq, x.dk, x.dv}; const JobParams& j = s.job;
  const int padded = (c.queries + BQ - 1) / BQ * BQ, blocks = padded / BQ,
            tiles = (c.keys + BK - 1) / BK;
  const u64 rows = (u64)c.batch * c.segments * c.heads * padded;
  float* dense = (float*)aligned_alloc(16, 2 * rows * 4);
  for (u64 i = 0; i < 2 * rows; i++) dense[i] = NAN;
  vector<u32> control(SEMAPHORES + (u64)c.batch * c.segments * c.heads * blocks, 0);
  vector<int> first_blocks(tiles + 1, -7), end_blocks(tiles, -7);
  vector<Range> key_rows(tiles * BK, Range{-7, -7});
  vector<int> distances(tiles * BK, 1 << 20);
  vector<uint2> slopes;
  for (int h = 0; h < c.heads; h++)
    slopes.push_back({__float_as_uint((float)(Setting::slope_of(h) * M_LOG2E)), 0});
  vector<int2> key_heads; vector<int4> query_heads;
  for (int h = 0; h < c.heads; h++) {
    if (h % c.shared == 0)
      key_heads.push_back({(int)query_heads.size(), (int)(s.k.heads[h] / s.k.o.unit)});
    query_heads.push_back({h, (int)(s.q.heads[h] / s.q.o.unit),
        (int)(s.cells.heads[h] / s.cells.o.unit), (int)(s.dq.heads[h] / s.dq.o.unit)});
  }
  const int count = (int)key_heads.size(); key_heads.push_back({(int)query_heads.size(), 0});
  int exponent = 0;
  const double fraction = frexp(c.scale, &exponent);
  const float fold = (P_SHIFT > 0) ? (TILED ? (float)fraction : 1.f) : (float)c.scale,
              down = (float)exp2(-P_SHIFT),
              rest = TILED ? (P_SHIFT > 0 ? (float)exp2(exponent) : 1.f) : (float)(c.scale / fold);
  BackwardRows pre{j, x.q.data(), x.dout.data(), x.lse.data(), x.delta.data(), dense, dense + rows,
      control.data(), padded, fold * down, first_blocks.data(), tiles, BK, s.pieces.data(),
      key_rows.data(), end_blocks.data(), (int)s.pieces.size(), place.tile, place.key_lead,
      place.shift, distances.data()};
  emu::launch((int)((rows + 255) / 256), 1, 256, [&] { backward_rows(pre); });
  HopperBackward w{j, r.dk.data(), r.dv.data(), dense, dense + rows, key_heads.data(),
      query_heads.data(), control.data(), count, tiles, padded, fixed_order,
      (float)(c.scale * 1.4426950408889634), (float)c.gain * fold * down, rest,
      rest, (float)c.gain * down, tiles * count * c.segments * c.batch,
      first_blocks.data(), stores, !TILED && !c.causal && tiles <= 2 ? blocks / tiles : 0,
      key_rows.data(), end_blocks.data(), blocks,
      (float)(CAP * M_LOG2E), (float)(2 * c.scale * M_LOG2E / CAP), (int)c.query_step,
      slopes.data(), distances.data()};
  if (fold == 0.f) w.dq_gain = w.dk_gain = 0.f;
  TensorMap tq = map_of(s.q, x.q.data(), c, c.queries, c.dim, BQ, false, 1),
            to = map_of(
                s.cells, x.dout.data(), c, c.queries, value_dim(c), BQ, false, value_dim(c));
  TensorMap tk = map_of(s.k, x.k.data(), c, c.keys, c.dim, BK, false, 1),
            tv = map_of(s.v, x.v.data(), c, c.keys, value_dim(c), BK, false, 1);
  TensorMap tdq = map_of(s.dq, r.dq.data(), c, c.queries, c.dim, BQ, true, 1);
  emu::launch(
      std::min(resident, w.tiles), 1, 384, [&] { hopper_backward(tq, to, tk, tv, tdq, w); },
      resident);
  free(dense);
  return r;
}

static double error(
    const vector<float>& got, const vector<double>& want, const vector<float>& start, bool& same) {
  double off = 0, size = 1e-30;
  for (u64 i = 0; i < got.size(); i++) {
    if (want[i] == start[i] && got[i] != start[i]) same = false;   // no pair adds here
    const double d = got[i] - want[i], moved = want[i] - start[i];
    off += d * d;
    size += moved * moved;
  }
  return sqrt(off / size);
}
static int failures = 0;
static void judge(
    bool fine, const Case& c, const char* what, double a = 0, double b = 0, double d = 0) {
  printf("%s HD=%d VD=%d BQ=%d %-12s %s %.1e %.1e %.1e\n", fine ? "ok  " : "FAIL", HD, VD, BQ,
      c.name, what, a, b, d);
  failures += !fine;
}
template <class F> static bool equal(const vector<float>& a, const vector<float>& b, F free) {
  for (u64 i = 0; i < a.size(); i++) if (memcmp(&a[i], &b[i], 4) && !free(i)) return false;
  return true;
}

static void check(const Case& c) {
  const Setting s = setting(c);
  Inputs x = inputs(c, s);
  const Exact e = exact(c, s, x);
  const JobParams& j = s.job;
  const Result r = run(c, s, x, true, 3);
  bool same = true;
  const double q = error(r.dq, e.dq, x.dq, same), k = error(r.dk, e.dk, x.dk, same),
               v = error(r.dv, e.dv, x.dv, same), bound = (P_SHIFT > 0) ? 2e-3 : 6e-3;
  judge(q < bound && k < bound && v < bound && same, c,
      same ? "gradients" : "wrote outside its rows", q, k, v);
  const Result again = run(c, s, x, true, 2), fast = run(c, s, x, false, 1);
  auto none = [](u64) { return false; };
  judge(equal(r.dq, again.dq, none) && equal(r.dk, again.dk, none) && equal(r.dv, again.dv, none),
      c, "bits with another schedule");
  bool own = true; const double f = error(fast.dq, e.dq, x.dq, own);
  judge(f < bound && own && equal(r.dk, fast.dk, none), c, "any order", f);
  // Stored sums are those of adding to zeros, and only the job's rows are touched; rounded ones are
  // these, in memory of the keys' type.
  Inputs zeros = x;
  const int wide = value_dim(c);
  for (int b = 0; b < j.batch; b++)
    for (int g = 0; g < j.segments; g++)
      for (int h = 0; h < j.heads; h++)
        for (int t = 0; t < j.keys; t++) {
          for (int d = 0; d < c.dim; d++) zeros.dk[at(j.k, b, g, t, h) + d] = 0.f;
          for (int d = 0; d < wide; d++) zeros.dv[at(s.v.o, b, g, t, h) + d] = 0.f;
        }
  const Result added = run(c, s, zeros, true, 2), written = run(c, s, x, true, 2, STORED);
  judge(equal(added.dk, written.dk, none) && equal(added.dv, written.dv, none), c,
      "stored, not added");
  const Result rounded = run(c, s, x, true, 2, ROUNDED);
  Result narrow{x.dq, x.dk, x.dv};
  for (int b = 0; b < j.batch; b++)
    for (int g = 0; g < j.segments; g++)
      for (int h = 0; h < j.heads; h++)
        for (int t = 0; t < j.keys; t++) {
          const i64 key = at(j.k, b, g, t, h), value = at(s.v.o, b, g, t, h);
          for (int d = 0; d < c.dim; d++)
            ((u16*)narrow.dk.data())[key + d] = emu::narrow(written.dk[key + d]);
          for (int d = 0; d < wide; d++)
            ((u16*)narrow.dv.data())[value + d] = emu::narrow(written.dv[value + d]);
        }
  judge(equal(narrow.dk, rounded.dk, none) && equal(narrow.dv, rounded.dv, none), c, "rounded");

  // Hidden rows have no effect: a key that is not finite on rows that do not see it, a query that
  // is not finite on keys it does not see.
  for (int round = 0; round < 4; round++) {
    Inputs y = x; vector<bool> free_q(x.dq.size()), free_k(x.dk.size()), free_v(x.dv.size()),
        must_q(x.dq.size());
    const int key = c.keys - 1 - (round & 1) * (c.keys / 3), query = (round & 1) * (c.queries / 3),
              of = 0;
    const u16 bad = emu::narrow(round < 2 ? NAN : INFINITY);
    for (int b = 0; b < j.batch; b++)
      for (int g = 0; g < j.segments; g++)
        for (int h = 0; h < j.heads; h++) {
          const i64 k0 = at(j.k, b, g, key, h), v0 = at(s.v.o, b, g, key, h),
                    q0 = at(j.q, b, g, query, h), cell = at(j.cells, b, g, query, h);
          for (int i = 0; i < c.dim; i++) {
            y.k[k0 + i] = bad;
            free_k[k0 + i] = true;
          }
          for (int i = 0; i < wide; i++) {
            y.v[v0 + i] = bad;
            free_v[v0 + i] = true;
          }
          if (h == of) {
            for (int i = 0; i < c.dim; i++) {
              y.q[q0 + i] = bad;
              free_q[at(j.dq, b, g, query, h) + i] = true;
            }
            for (int i = 0; i < wide; i++) y.dout[cell * wide + i] = bad;
          }
          // Such a row has no finite score, and so no finite lse or delta.
          if (h == of && y.lse[cell] != -INFINITY)
            y.lse[cell] = y.delta[at(j.delta, b, g, query, h)] = NAN;
        }
    pairs(s, [&](int b, int g, int h, int i, int t) {
      for (int d = 0; d < c.dim; d++) {
        if (t == key) {
          free_q[at(j.dq, b, g, i, h) + d] = true;
          must_q[at(j.dq, b, g, i, h) + d] = true;
        }
        if (i == query && h == of) free_k[at(j.k, b, g, t, h) + d] = true;
      }
      for (int d = 0; d < wide; d++)
        if (i == query && h == of) free_v[at(s.v.o, b, g, t, h) + d] = true;
    });
    const Result z = run(c, s, y, true, 2);
    bool spread = true;
    for (u64 i = 0; i < must_q.size(); i++)
      if (must_q[i] && z.dq[i] == z.dq[i]) spread = false;
    const bool quiet = equal(r.dq, z.dq, [&](u64 i) { return free_q[i]; }) &&
                       equal(r.dk, z.dk, [&](u64 i) { return free_k[i]; }) &&
                       equal(r.dv, z.dv, [&](u64 i) { return free_v[i]; });
    judge(quiet && spread, c, quiet ? "NaN where it is seen" : "hidden rows had an effect");
  }
  // Rows that saw no key contribute nothing, whatever their dout.
  Inputs y = x; bool any = false;
  for (int b = 0; b < j.batch; b++)
    for (int g = 0; g < j.segments; g++)
      for (int h = 0; h < j.heads; h++)
        for (int i = 0; i < j.queries; i++) {
          const i64 cell = at(j.cells, b, g, i, h);
          if (y.lse[cell] != -INFINITY) continue;
          any = true;
          y.delta[at(j.delta, b, g, i, h)] = NAN;
          for (int d = 0; d < wide; d++) y.dout[cell * wide + d] = 0x7fff;
        }
  if (any) {
    const Result z = run(c, s, y, true, 2);
    judge(equal(r.dq, z.dq, none) && equal(r.dk, z.dk, none) && equal(r.dv, z.dv, none), c,
        "rows that saw no key");
  }
}

#if TILED
#include "backward_tiles.h"
#endif

int main(int argc, char** argv) {
#if TILED
  return check_rings();
#endif
  const int d = HD, odd = HD - 8;
#if WINDOWED
  const i64 all = 1 << 30;
  const Case cases[] = {
    // name       batch seg  q    k   heads shared dim dil causal query step key step scale gain
    {"window",      1,  2, 300, 300, 2, 1, d,   1, true,  0, 1, 0, 1, 1 / sqrt(d), 1.0, 40, 0},
    {"both sides",  1,  1, 260, 330, 2, 2, d,   2, true,  30, 1, 0, 1, 1 / sqrt(d), 1.0, 70, 25},
    {"after",       1,  1, 150, 290, 2, 1, odd, 1, true,  0, 2, 7, 1, 0.2, 0.5, all, 9},
    {"steps",       1,  1, 170, 190, 2, 1, d,   1, true,  5, 3, 17, 2, -0.1, 1.5, 90, all},
    {"documents",   2,  1, 290, 310, 2, 2, d,   1, true,  0, 1, 0, 1, 1 / sqrt(d), 1.0, all, 0, 37},
    {"packed",      1,  1, 400, 390, 2, 1, d,   1, true,  0, 1, 0, 1, 1 / sqrt(d), 1.0, all, all,
        150},
    {"short",       1,  1, 90,  300, 1, 1, d,   1, true,  0, 1, 0, 1, 0.3, 1.0, 5, 3, 20},
  };
#else
  const Case cases[] = {
    // name       batch seg  q    k   heads shared dim dil causal query step key step scale gain
    {"full",        1,  1, 128, 128, 2, 1, d,   1, false, 0, 1, 0, 1, 1 / sqrt(d), 1.0},
    {"tails",       1,  1, 141, 163, 2, 2, d,   1, false, 0, 1, 0, 1, 1 / sqrt(d), 1.0},
    {"causal",      1,  2, 200, 200, 2, 1, d,   2, true,  0, 1, 0, 1, 1 / sqrt(d), 1.0},
    {"grouped",     2,  1, 130, 150, 4, 2, odd, 1, true,  40, 1, 3, 1, 0.2, 0.5},
    {"steps",       1,  1, 100, 190, 2, 1, d,   1, true,  5, 3, 17, 2, -0.1, 1.5},
    // More tiles than resident CTAs, and each waits for another of its head.
    {"round",       1,  1, 200, 200, 3, 1, d,   1, false, 0, 1, 0, 1, 1 / sqrt(d), 1.0},
    {"few",         1,  1, 3,   5,   1, 1, d,   1, true,  0, 1, 2, 1, 0.3, 1.0},
  };
#endif
  for (const Case& c : cases) if (argc < 2 || !strcmp(argv[1], c.name)) check(c);
#if !(SOFTCAP || SLOPES)
  // Large scores, up to about the square of the size; one in every row is clearly the largest.
#ifdef T_F16
  const double sizes[] = {300, 2e4};
#else
  const double sizes[] = {300, 1e6, 2e14};
#endif
  for (double size : sizes) {
    Case c = cases[2];
    c.name = "large";
    c.size = size;
    if (argc < 2 || !strcmp(argv[1], c.name)) check(c);
  }
#endif
  if (failures) printf("%d failed\n", failures);
  return failures != 0;
}
