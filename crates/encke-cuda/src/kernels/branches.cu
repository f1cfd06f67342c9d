// What patterns of branches need beside attention: extra terms of finished rows, and the delta of
// each branch where mixing weights are constants.
//
// The delta of one branch follows from those of the others: dout times the whole output is the sum
// of the branches' deltas by their weights. `rest` and `weight` begin with that sum and with 1, and
// each branch whose delta is computed takes its share of both away.

// Divisions of 64 bits take several times as long, and are seldom needed.
DEV i64 quotient(i64 x, i64 by) {
  return (u64)(x | by) >> 32 ? x / by : (i64)((u32)x / (u32)by);
}
DEV i64 remainder_of(i64 x, i64 by) { return x - quotient(x, by) * by; }
DEV A minus_inf() { return (A)neg_inf(); }
// log(exp x + exp y), where one of them is not −inf.
DEV A log_sum(A x, A y) { return (x > y ? x : y) + log1p(exp(-fabs(x - y))); }
// What finished rows with this lse are multiplied by when `term` is added; the new lse.
DEV A added(A term, A& lse) {
  if (term == minus_inf()) return 1;
  const A before = lse;
  lse = log_sum(before, term);
  return before == minus_inf() ? (A)0 : exp(before - lse);
}
DEV void scale(InputVector& x, A factor) {
  #pragma unroll
  for (int e = 0; e < 16 / sizeof(T); e++) narrow(widen(x.x[e]) * factor, x.x[e]);
}

// Adds terms to finished rows: their logarithms, of the first `entry` cells and again from there.
extern "C" __global__ void add_terms(
    T* out, A* lse, const A* terms, i64 cells, i64 entry, i64 dim) {
  const WarpRows w = warp_rows(dim * sizeof(T), (u64)out);
  for (i64 warp = first_warp(); warp * w.rows < cells; warp += all_warps()) {
    const i64 cell = w.at(warp);
    const bool real = w.used() && cell < cells;
    A of_cell = real ? lse[cell] : (A)0;
    const A factor = real ? added(terms[remainder_of(cell, entry)], of_cell) : (A)1;
    __syncwarp();   // every lane of the row has read its lse
    if (!real) continue;
    if (w.piece == 0) lse[cell] = of_cell;
    if (!w.pieces)
      for (i64 c = w.piece; c < dim; c += 32) {
        T& x = out[cell * dim + c];
        narrow(widen(x) * factor, x);
      }
    else if (factor != 1) {
      InputVector& x = ((InputVector*)out)[cell * w.pieces + w.piece];
      InputVector y = x;
      scale(y, factor);
      x = y;
    }
  }
}

// Which cells a branch selects, and where it has their deltas.
struct BranchParams {
  i64 count;             // rows of all batch entries, times the branch's slots
  i64 entry;             // cells of a batch entry
  i64 dim;
  const i64* heads;      // of each offset, the heads in its slots; −1 for none
  const i64* documents;  // where documents begin; null if the sequence is one
  int count_documents, count_heads, count_offsets;
  int first_slot, own_slots, slots;   // of the branch, and all
  int tokens, segment, dilation;
};
// The cell of a row in one of the branch's slots; −1 if none of its heads selects the row.
DEV i64 cell_of(const BranchParams& b, i64 index) {
  const i64 row = quotient(index, b.own_slots);
  u32 position = (u32)remainder_of(row, b.tokens);
  if (b.documents) {
    int low = 0, high = b.count_documents;   // of the last document that begins before it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (b.documents[middle] <= position) low = middle;
      else high = middle;
    }
    position -= (u32)b.documents[low];
  }
  const int offset = (int)(position % (u32)b.segment % (u32)b.dilation);
  if (offset >= b.count_offsets) return -1;
  const i64 head = b.heads[offset * b.own_slots + (index - row * b.own_slots)];
  return head < 0 ? -1 : row * b.count_heads + head;
}
// Where the branch has the delta of this index.
DEV i64 delta_at(const BranchParams& b, i64 index) {
  const i64 row = quotient(index, b.own_slots);
  return row * b.slots + b.first_slot + (index - row * b.own_slots);
}

// rest = dout·out − dlse, weight = 1.
extern "C" __global__ void start_rest(
    const T* out, const T* dout, const A* dlse, A* rest, A* weight, i64 cells, i64 dim) {
  each_product(out, dout, dim, cells, [](i64 index) { return index; },
      [=](i64 cell) { return dlse ? dlse[cell] : (A)0; },
      [=](i64, i64 cell, A of_lse, A product) {
        rest[cell] = product - of_lse;
        weight[cell] = 1;
      });
}

struct Finished { A own, term, lse, dlse, rest, weight; };
// The delta of a branch, from its own output and lse without `terms` (null without).
extern "C" __global__ void delta_of_branch(const T* out, const A* own_lse, const A* terms,
    const T* dout, const A* dlse, const A* lse, A* delta, A* rest, A* weight,
    const __grid_constant__ BranchParams b) {
  each_product(out, dout, b.dim, b.count, [&](i64 index) { return cell_of(b, index); },
      [&](i64 cell) {
        const A term = terms ? terms[remainder_of(cell, b.entry)] : minus_inf();
        return Finished{own_lse[cell], term, lse[cell], dlse ? dlse[cell] : (A)0, rest[cell],
            weight[cell]};
      },
      [&](i64 index, i64 cell, Finished of, A product) {
        const A of_cell = added(of.term, of.own) * product - of.dlse;
        delta[delta_at(b, index)] = of_cell;
        const A share = of.own == minus_inf() ? (A)0 : exp(of.own - of.lse);
        rest[cell] = of.rest - share * of_cell;
        weight[cell] = of.weight - share;
      });
}

// The delta of the branch that is left. What has no weight has no gradient either, so that its
// delta, which is not known then, is not missed.
extern "C" __global__ void delta_of_rest(
    const A* rest, const A* weight, A* delta, const __grid_constant__ BranchParams b) {
  const A least = sizeof(A) == 8 ? (A)1e-14 : (A)1e-6;
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 index = blockIdx.x * (i64)blockDim.x + threadIdx.x; index < b.count; index += step) {
    const i64 cell = cell_of(b, index);
    if (cell >= 0)
      delta[delta_at(b, index)] = rest[cell] / (weight[cell] < least ? least : weight[cell]);
  }
}
