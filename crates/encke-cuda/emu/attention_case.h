// Random jobs for the attention kernels on the CPU model, and their results by plain loops in f64.
//
// Included after the kernel's macros, the model and `masks.cuh`, before the kernel; defines no
// kernel function.
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
  Layout o; int own = (heads + groups - 1) / groups; i64 width = (i64)own * (dim + pad);
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

// Elements and sums of the kernel under test: 16 bits and f32, unless the test says otherwise.
#ifndef OWN_ELEMENTS
typedef u16 Element;
typedef float Sum;
static double value_of(Element x) { return emu::widen(x); }
static Element element_of(double x) { return emu::narrow((float)x); }
#endif

struct Case {
  Job job{}; Layout q, k, v, cells, delta_at, dq; std::string name;
  bool large = false;   // whether scores are
  std::vector<Element> Q, K, V, dO;
  std::vector<Sum> lse, delta;
  Values exact_lse;     // if they are large
#if MASKED
  std::vector<PieceParams> pieces;
  std::vector<double> slopes;
  std::vector<i64> coin_heads, query_tiles, key_tiles;
#endif
  double product(int b, int s, int h, int i, int j) const {
    double sum = 0; i64 x = ::at(job.q, b, s, i, h), y = ::at(job.k, b, s, j, h);
    for (int c = 0; c < job.dim; c++) sum += value_of(Q[x + c]) * value_of(K[y + c]);
    return sum;
  }
  // The same, rounded as the kernels round it: tensor cores add 16 products at a time.
  Sum rounded_product(int b, int s, int h, int i, int j) const {
    Sum sum = 0, part = 0; i64 x = ::at(job.q, b, s, i, h), y = ::at(job.k, b, s, j, h);
#ifdef PLAIN
    const int step = 1;
#else
    const int step = 16;
#endif
    for (int c = 0; c < job.dim; c++) {
      part += (Sum)value_of(Q[x + c]) * (Sum)value_of(K[y + c]);
      if (c % step == step - 1 || c == job.dim - 1) { sum += part; part = 0; }
    }
    return sum;
  }
  // The address in V and dV of a key.
  i64 value(int b, int s, int h, int j) const { return ::at(values(job), b, s, j, h); }
#if MASKED
  // By definition: the piece that holds both, and their positions.
  const PieceParams* piece(int i) const {
    for (auto& p : pieces) if (i >= p.first_query && i < p.end_query) return &p;
    return nullptr;
  }
  bool sees(int i, int j) const {
    const PieceParams* p = piece(i);
    if (!p || j < p->first_key || j >= p->end_key) return false;
    i64 ahead = p->query + (i - p->first_query) * p->query_step - p->key -
                (j - p->first_key) * p->key_step;
    return ahead <= p->left && -ahead <= p->right;
  }
  // The score of a pair and its derivative by scale times product.
  double score(int b, int s, int h, int i, int j, double* derivative = nullptr) const {
    double x = job.scale * product(b, s, h, i, j), slope = 1; const MaskParams& m = job.mask;
    if (m.softcap > 0) {
      double share = std::tanh(x / m.softcap);
      x = m.softcap * share;
      slope = 1 - share * share;
    }
    if (m.slopes) {
      const PieceParams* p = piece(i);
      i64 ahead = p->query + (i - p->first_query) * p->query_step - p->key -
                  (j - p->first_key) * p->key_step;
      x -= m.slopes[h] * (double)(ahead < 0 ? -ahead : ahead);
    }
    if (derivative) *derivative = slope;
    return x;
  }
  // The factor of a pair's weight: 0 if it is dropped.
  double factor(int b, int s, int h, int i, int j) const {
    const MaskParams& m = job.mask;
    if (m.kept == 0) return 1;
    const PieceParams* p = piece(i);
    u64 start = m.first_token + s * m.segment_step;
    u64 query = start + p->query + (i - p->first_query) * p->query_step,
        key = start + p->key + (j - p->first_key) * p->key_step;
    Coins coins = philox((u32)(key / 4), (u32)query, (u32)(m.coin_heads[h] + m.all_heads * b),
        (u32)m.document, m.seed[0], m.seed[1]);
    return coins.word[key % 4] >= m.threshold ? m.kept : 0;
  }
#else
  bool sees(int i, int j) const { return j < visible(job, i); }
  double score(int b, int s, int h, int i, int j, double* derivative = nullptr) const {
    if (derivative) *derivative = 1;
    return job.scale * product(b, s, h, i, j);
  }
  double factor(int, int, int, int, int) const { return 1; }
#endif
  template <class F> void each_sequence(F f) const {
    for (int b = 0; b < job.batch; b++)
      for (int s = 0; s < job.segments; s++)
        for (int h = 0; h < job.heads; h++) f(b, s, h);
  }
  // Blocks for tiles of `rows` queries or keys; the tiles of a masked job are listed then.
  int blocks(bool queries, int rows) {
    int sequences = job.heads * job.segments * job.batch;
#if MASKED
    auto& list = queries ? query_tiles : key_tiles;
    list.clear();
    for (size_t n = 0; n < pieces.size(); n++) {
      auto& p = pieces[n];
      int count = queries ? p.end_query - p.first_query : p.end_key - p.first_key;
      for (int t = 0; t * rows < count; t++) list.push_back((i64)n << 32 | t);
    }
    std::reverse(list.begin(), list.end());
    job.mask.pieces = pieces.data();
    job.mask.tiles = list.data();
    job.mask.count_tiles = (int)list.size();
    return (int)list.size() * sequences;
#else
    return ((queries ? job.queries : job.keys) + rows - 1) / rows * sequences;
#endif
  }
};
static std::vector<Element> random_elements(Random& random, i64 n) {
  std::vector<Element> x(n);
  for (auto& y : x) y = element_of(random.unit());
  return x;
}

#if MASKED
// Which of softcap, slopes and dropout jobs have: mma.sync kernels are compiled for them, others
// look at the job.
#ifdef PLAIN
static bool draws(Random& random, int) { return random.below(3) == 0; }
#else
static bool draws(Random&, int compiled) { return compiled; }
#endif
static std::string draw_mask(Case& c, Random& random) {
  Job& j = c.job; MaskParams& m = j.mask;
  const i64 unbounded = (i64)1 << 62;
  auto limit = [&]() -> i64 {
    return random.below(3) ? random.below(random.coin() ? 12 : 90) : unbounded;
  };
  i64 left = limit(), right = random.below(3) ? 0 : limit();
  auto piece = [&](int first_query, int end_query, int first_key, int end_key) {
    PieceParams p{random.below(20), random.between(1, 3), random.below(40), random.between(1, 3),
        left, right, first_query, end_query, first_key, end_key};
    if (random.coin()) p.query_step = p.key_step = 1;
    c.pieces.push_back(p);
  };
  // A packed job has no coins.
  const bool drops = draws(random, DROPOUT), documents = !drops && random.coin();
  m.kept = 0;
  if (!documents) piece(0, j.queries, 0, j.keys);
  int i = 0, k = 0;
  while (documents && i < j.queries) {
    int queries = std::min(random.between(1, 60), j.queries - i),
        keys = std::min(random.between(0, 60), j.keys - k);
    if (random.below(4) == 0) k = std::min(k + 3, j.keys - keys);   // keys of no document
    piece(i, i + queries, k, k + keys);
    i += queries; k += keys;
  }
  if (draws(random, SOFTCAP)) m.softcap = 0.3 + random.below(3);
  if (draws(random, SLOPES)) {
    for (int h = 0; h < j.heads; h++) c.slopes.push_back(0.01 + 0.02 * random.below(4));
    m.slopes = c.slopes.data();
  }
  if (drops) {
    double probability = 0.1 + 0.2 * random.below(4);
    m.kept = 1 / (1 - probability);
    m.threshold = (u64)std::ceil(probability * 4294967296.0);
    i64 tokens[] = {0, 1, 2, 3, 70, 3000000001};
    m.first_token = tokens[random.below(6)];
    m.segment_step = random.below(70);
    m.document = random.below(3);
    m.all_heads = j.heads + random.below(3);
    for (int h = 0; h < j.heads; h++) c.coin_heads.push_back(random.below((int)m.all_heads));
    m.coin_heads = c.coin_heads.data();
    m.seed[0] = (u32)random.source();
    m.seed[1] = (u32)random.source();
  }
  char name[200];
  snprintf(name, sizeof name,
      " pieces %zu left %lld right %lld softcap %g slopes %d kept %g value dim %d",
      c.pieces.size(), left, right, m.softcap, m.slopes != nullptr, m.kept, m.value_dim);
  return name;
}
#endif

// `dim` elements per head, padded so that rows begin at multiples of 16 bytes if `aligned`, and
// values of `width` elements if the job is masked. Every other job has one key head for all query
// heads; the first is causal.
static void draw_case(Case& c, Random& random, int number, int dim, int width, bool aligned,
    int most_queries, int most_keys) {
  Job& j = c.job; int pad = aligned ? 8 * random.below(2) : random.below(4);
  j.batch = random.between(1, 2);
  j.segments = random.between(1, 2);
  j.heads = random.between(1, 2) + (number + 1) % 2;
  j.dim = dim;
  j.queries = random.between(1, most_queries); j.keys = random.between(1, most_keys);
  int groups = number % 2 ? 1 : j.heads;
#ifdef STAGES
  // Heads that share keys are packed: of any number, and not always as many.
  j.heads = random.between(1, 6);
  groups = random.between(1, j.heads);
#endif
  c.q = layout(j.batch, j.segments, j.queries, j.heads, dim, random.between(1, 3), 1, pad, true);
  int step = random.between(1, 3); bool phases = random.coin();
  c.k = layout(j.batch, j.segments, j.keys, j.heads, dim, step, groups, pad, phases);
  c.v = layout(j.batch, j.segments, j.keys, j.heads, width, step, groups, pad, phases);
  c.dq = layout(j.batch, j.segments, j.queries, j.heads, dim, 1, 1, aligned ? 8 : 1, false);
  c.cells = layout(j.batch, j.segments, j.queries, j.heads, 1, 1, 1, 0, false);
  c.delta_at = layout(j.batch, j.segments, j.queries, j.heads, 1, 2, 1, 3, false);
  j.q = operand(c.q); j.k = operand(c.k); j.dq = operand(c.dq); j.cells = operand(c.cells);
  j.delta = operand(c.delta_at);
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
  c.V = random_elements(random, c.v.size);
  c.dO = random_elements(random, c.cells.size * width);
  char name[200];
  snprintf(name, sizeof name,
      "b%d s%d h%d/%d q%d k%d d%d causal %d (%lld+%lldi, %lld+%lldj) scale %g", j.batch, j.segments,
      j.heads, groups, j.queries, j.keys, dim, j.causal, j.query, j.query_step, j.key, j.key_step,
      j.scale);
  c.name = name;
#if MASKED
  j.mask.v = operand(c.v);
  j.mask.value_dim = width;
  c.name += draw_mask(c, random);
#endif
}

// Gives a job large scores, up to about the square of a size; false if it has score transforms. In
// almost every row one score is clearly the largest.
static bool enlarge(Case& c, Random& random) {
#if MASKED
  if (c.job.mask.softcap > 0 || c.job.mask.slopes) return false;
#endif
#ifdef T_F16
  const double sizes[] = {300, 6e4};
#else
  const double sizes[] = {300, 1e6, 2e14};
#endif
  const double size = sizes[random.below(sizeof sizes / sizeof *sizes)];
  for (auto* all : {&c.Q, &c.K}) for (auto& x : *all) x = element_of(value_of(x) * size);
  c.large = true;
  char name[40];
  snprintf(name, sizeof name, " size %g", size);
  c.name += name;
  return true;
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
#if defined(T_F64)
static const double TOLERANCE = 1e-12;
#elif defined(T_F32)
static const double TOLERANCE = 2e-6;
#elif defined(T_F16)
static const double TOLERANCE = 1.5e-3;
#else
static const double TOLERANCE = 1e-2;
#endif
