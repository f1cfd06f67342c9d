// Merges the softmax states that `split_forward.cu` writes, in the order of the splits, into what a
// forward kernel leaves: the carry, or out and lse. One thread block per cell, one thread per
// column.
//
// Maxima of splits are in base 2; the carry in memory is in natural units.

#define MERGE_THREADS 128
// Splits at most, as in launch/split_tilings.rs.
#define MOST_SPLITS 256
#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f

// Rows start empty if `starts`, else from (acc, m, l); they finish in (out, lse) if `finishes`,
// else in (acc, m, l). A row that continues and saw no key keeps every bit of its carry.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    split_merge(const JobParams job, const float* split_acc, const float* split_m,
        const float* split_l, float* acc, float* m, float* l, u16* out, float* lse, int dim,
        int splits, int starts, int finishes) {
  __shared__ float weight[MOST_SPLITS], mass[MOST_SPLITS];
  const i64 cells = (i64)job.batch * job.segments * job.queries * job.heads, own = blockIdx.x;
  const int h = (int)(own % job.heads), i = (int)(own / job.heads % job.queries),
            sequence = (int)(own / job.heads / job.queries);
  const i64 cell = at(job.cells, sequence / job.segments, sequence % job.segments, i, h);
  // The carry's m and l are read before the barrier, and written after it.
  // A product that is not fused with the difference from the maximum: it may be that maximum.
  const float before = starts ? neg_inf() : m[cell],
              carried = __fmul_rn(before, (float)LOG2_E),
              denominator = starts ? 0.f : l[cell];
  float largest = carried;
  // Every warp finds the maximum; its order does not matter.
  for (int p = threadIdx.x % 32; p < splits; p += 32)
    largest = fmaxf(largest, split_m[p * cells + own]);
  #pragma unroll
  for (int x = 16; x > 0; x /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, x));
  const float origin = largest == neg_inf() ? 0.f : largest;
  for (int p = threadIdx.x; p < splits; p += MERGE_THREADS) {
    weight[p] = exp2_fast(split_m[p * cells + own] - origin);
    mass[p] = split_l[p * cells + own];
  }
  __syncthreads();
  const float kept = exp2_fast(carried - origin);
  float sum = denominator * kept;
  bool saw = false;
  for (int p = 0; p < splits; p++) {
    saw |= mass[p] != 0.f;
    sum = fmaf(weight[p], mass[p], sum);
  }
  const bool keeps = !saw && !starts && !finishes;
  const float factor = sum == 0.f ? 0.f : (float)job.gain / sum;
  for (int column = threadIdx.x; column < dim; column += MERGE_THREADS) {
    const float* from = split_acc + own * dim + column;
    float x = 0.f;
    #pragma unroll 8
    for (int p = 0; p < splits; p++) x = fmaf(weight[p], from[p * cells * dim], x);
    // Keys of weight 0 may have values that are not finite.
    if (keeps && x == 0.f) continue;
    if (!starts) x = fmaf(acc[cell * dim + column], kept, x);
    if (finishes) out[cell * dim + column] = (u16)pack(x * factor, 0.f);
    else acc[cell * dim + column] = x;
  }
  if (threadIdx.x || keeps) return;
  // An unchanged maximum is stored as it was loaded, not after two roundings.
  const float natural = !starts && carried == largest ? before : largest * LN_2;
  if (finishes) lse[cell] = sum == 0.f ? neg_inf() : natural + log2_fast(sum) * LN_2;
  else { m[cell] = natural; l[cell] = sum; }
}
