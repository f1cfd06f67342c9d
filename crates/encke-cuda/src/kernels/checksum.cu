// Checksums of an output that is not stored: per row, the sum of its elements with pseudorandom
// signs and the sum of their squares, as integers in units of 2^-32. The same definition as
// `encke_ring::out_of_core::Checksum`: elements of a row are summed in f64 in a fixed order, rows
// as integers, so the order of rows does not matter. Macros: T_* (storage type), DIM (elements of a
// row).

// 64 random bits for an element: the state, and the signs of the next 64 elements.
DEV u64 mix_in(u64 state, u64 x) {
  state = (state ^ x) * 0xbf58476d1ce4e5b9ull;
  return state ^ (state >> 29);
}

struct Sums { i64 signed_sum, squares; };

// Rounds as the host does; NaN counts as 0.
DEV i64 units(const double* sums) {
  double sum = 0;
  #pragma unroll
  for (int lane = 0; lane < 8; lane++) sum = __dadd_rn(sum, sums[lane]);
  return sum == sum ? llround(sum * 4294967296.0) : 0;
}

DEV Sums sum_row(const T* row, u64 state) {
  double sums[8], squares[8];
  #pragma unroll
  for (int lane = 0; lane < 8; lane++) sums[lane] = squares[lane] = 0;
  u64 signs = 0;
  #pragma unroll 8
  for (int c = 0; c < DIM; c += 8) {
    if (c % 64 == 0) {
      state = (state ^ (state >> 32)) * 0x94d049bb133111ebull;
      signs = state ^ (state >> 31);
    }
#if DIM % 8 == 0
    Vector8 vector = *(const Vector8*)(row + c);
#else
    Vector8 vector;
    for (int lane = 0; lane < 8 && c + lane < DIM; lane++) vector.x[lane] = row[c + lane];
#endif
    #pragma unroll
    for (int lane = 0; lane < 8; lane++) {
      if (c + lane >= DIM) continue;
      double x = (double)widen(vector.x[lane]);
      sums[lane] = __dadd_rn(sums[lane], signs >> (c % 64 + lane) & 1 ? -x : x);
      squares[lane] = __dadd_rn(squares[lane], __dmul_rn(x, x));
    }
  }
  Sums s; s.signed_sum = units(sums); s.squares = units(squares); return s;
}

// Rows [tokens, heads, DIM] of tokens first, first + stride, ... blockIdx.y is the head; `heads`
// holds the head numbers. `sums` has one result per block; the host adds them in integers that
// cannot overflow.
extern "C" __global__ void checksum(
    const T* from, const u64* heads, u64 batch, i64 first, i64 stride, i64 tokens, Sums* sums) {
  __shared__ i64 shared[2 * 32];
  Sums own; own.signed_sum = own.squares = 0;
  u64 start = mix_in(0x9e3779b97f4a7c15ull, batch);
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < tokens;
      i += (i64)gridDim.x * blockDim.x) {
    u64 state = mix_in(mix_in(start, (u64)(first + i * stride)), heads[blockIdx.y]);
    Sums row = sum_row(from + (i * gridDim.y + blockIdx.y) * DIM, state);
    own.signed_sum += row.signed_sum; own.squares += row.squares;
  }
  #pragma unroll
  for (int w = 16; w > 0; w >>= 1) {
    own.signed_sum += __shfl_xor_sync(~0u, own.signed_sum, w);
    own.squares += __shfl_xor_sync(~0u, own.squares, w);
  }
  int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) {
    shared[2 * warp] = own.signed_sum;
    shared[2 * warp + 1] = own.squares;
  }
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < warps; w++) {
    own.signed_sum += shared[2 * w];
    own.squares += shared[2 * w + 1];
  }
  sums[blockIdx.y * gridDim.x + blockIdx.x] = own;
}
