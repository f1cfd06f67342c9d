//! Host memory as a wire buffer and as a kernel's buffer: copies, conversions and checksums.
//!
//! All kernels that compute in host memory share these functions. There is no arithmetic here
//! beyond rounding and one addition.
//!
//! The decision here: types are matched once per call and rows are slices, so a copy between equal
//! types is a `memcpy` and a conversion is one loop over typed elements.

use crate::dtype::{DType, Data, Element, Slice};
use crate::job::Block;
use crate::kernel_error::KernelError;
use crate::sharding::Run;
use crate::tensor::{Tensor, View};
use crate::transport::{HostWireBuffer, WireBuffer};
use crate::with_typed;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

impl Default for Data {
    /// Empty: the state of a buffer after `take`.
    fn default() -> Data {
        Data::F64(Vec::new())
    }
}

impl WireBuffer for Data {
    fn elements(&self) -> usize {
        self.as_slice().len()
    }

    fn element_bytes(&self) -> usize {
        self.as_slice().dtype().bytes()
    }

    fn copy_from(&mut self, source: &Data, elements: usize) {
        let dtype = self.as_slice().dtype();
        assert_eq!(dtype, source.as_slice().dtype(), "a buffer of another type");
        let bytes = elements * dtype.bytes();
        self.bytes_mut()[..bytes].copy_from_slice(&source.bytes()[..bytes]);
    }

    fn allocated_bytes(&self) -> usize {
        self.capacity_bytes()
    }

    fn take(&mut self) -> Data {
        let empty = Data::zeros(self.as_slice().dtype(), 0);
        std::mem::replace(self, empty)
    }

    fn checksum(&self, elements: usize) -> u64 {
        checksum(self.host_bytes(elements))
    }
}

impl HostWireBuffer for Data {
    fn host_bytes(&self, elements: usize) -> &[u8] {
        &self.bytes()[..elements * self.as_slice().dtype().bytes()]
    }

    fn host_bytes_mut(&mut self, elements: usize) -> &mut [u8] {
        let bytes = elements * self.as_slice().dtype().bytes();
        &mut self.bytes_mut()[..bytes]
    }
}

impl WireBuffer for Vec<u8> {
    fn elements(&self) -> usize {
        self.len()
    }

    fn element_bytes(&self) -> usize {
        1
    }

    fn copy_from(&mut self, source: &Vec<u8>, elements: usize) {
        self[..elements].copy_from_slice(&source[..elements]);
    }

    fn allocated_bytes(&self) -> usize {
        self.capacity()
    }

    fn take(&mut self) -> Vec<u8> {
        std::mem::take(self)
    }

    fn checksum(&self, elements: usize) -> u64 {
        checksum(&self[..elements])
    }
}

impl HostWireBuffer for Vec<u8> {
    fn host_bytes(&self, elements: usize) -> &[u8] {
        &self[..elements]
    }

    fn host_bytes_mut(&mut self, elements: usize) -> &mut [u8] {
        &mut self[..elements]
    }
}

/// FNV-1a over words of eight bytes, with an added rotation: without it two flipped top bits, which
/// are two flipped signs, would cancel. Eight hashes take the words in turn, because a step waits
/// for the one before it. Detects accidental corruption; not cryptographic.
pub fn checksum(bytes: &[u8]) -> u64 {
    let step = |hash: u64, word: u64| {
        (hash ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(29)
    };
    let start = 0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64;
    let mut hashes: [u64; 8] = std::array::from_fn(|lane| step(start, lane as u64));
    let (words, rest) = bytes.as_chunks::<8>();
    let (blocks, last) = words.as_chunks::<8>();
    for block in blocks {
        for (hash, word) in hashes.iter_mut().zip(block) {
            *hash = step(*hash, u64::from_le_bytes(*word));
        }
    }
    let hash = hashes.into_iter().fold(start, step);
    let hash = last
        .iter()
        .fold(hash, |hash, word| step(hash, u64::from_le_bytes(*word)));
    rest.iter()
        .fold(hash, |hash, &byte| step(hash, byte.into()))
}

/// Allocates `elements` zeros; an error if there is not enough memory.
pub fn allocate(kernel: &'static str, dtype: DType, elements: usize) -> Result<Data, KernelError> {
    Data::try_zeros(dtype, elements).map_err(|_| KernelError::Memory {
        kernel,
        bytes: elements.saturating_mul(dtype.bytes()),
    })
}

/// Copies the rows of `runs`, in that order, into a `[b, rows, h, d]` buffer.
pub fn upload(from: &View<'_>, runs: &[Run], to: &mut Data) {
    let [_, _, h, d] = from.dims();
    let strides = from.strides();
    // Adjacent heads are copied together, and so are adjacent tokens.
    let heads = if strides[2] == d || h == 1 { h } else { 1 };
    let whole = heads == h && strides[1] == h * d;
    with_typed!(Slice, from.data(), source => with_typed!(Data, to, target => {
        for piece in pieces(from.dims(), runs, heads, whole) {
            let start = from.row(piece.batch, piece.token, piece.head);
            let (there, here) = (start..start + piece.len, piece.at..piece.at + piece.len);
            convert(&source[there], &mut target[here]);
        }
    }));
}

/// The rows of `runs` in place, if they are laid out exactly as in a buffer of type `dtype`.
pub fn in_place<'a>(from: &View<'a>, runs: &[Run], dtype: DType) -> Option<Slice<'a>> {
    let [b, n, h, d] = from.dims();
    let strides = from.strides();
    let (first, count) = whole_run(runs)?;
    let dense = strides[1] == h * d && (strides[2] == d || h == 1);
    let batches = b == 1 || (count == n && strides[0] == n * h * d);
    if from.dtype() != dtype || !dense || !batches {
        return None;
    }
    let start = from.row(0, first, 0);
    let range = start..start + b * count * h * d;
    Some(with_typed!(Slice, from.data(), x => Element::wrap(x.get(range)?)))
}

/// First token and token count of runs that follow one another without a gap.
pub fn whole_run(runs: &[Run]) -> Option<(usize, usize)> {
    let first = runs.first()?.first;
    let mut next = first;
    for run in runs {
        if run.first != next || (run.stride != 1 && run.count > 1) {
            return None;
        }
        next += run.count;
    }
    Some((first, next - first))
}

/// Copies the rows of a `[b, rows, h, d]` buffer, in the order of `runs`, to their tokens.
pub fn download(from: &Data, runs: &[Run], to: &mut Tensor) {
    let dims = to.dims();
    let [_, n, h, d] = dims;
    with_typed!(Data, from, source => with_typed!(Data, to.data_mut(), target => {
        for piece in pieces(dims, runs, h, true) {
            let start = ((piece.batch * n + piece.token) * h + piece.head) * d;
            let (there, here) = (start..start + piece.len, piece.at..piece.at + piece.len);
            convert(&source[here], &mut target[there]);
        }
    }));
}

/// Sets every element.
pub fn fill(buffer: &mut Data, value: f64) {
    with_typed!(Data, buffer, x => x.fill(Element::from_f64(value)));
}

/// Copies, or adds, the rows of a block from one buffer into another.
pub fn copy(block: &Block, add: bool, from: Slice<'_>, to: &mut Data) {
    let block = block.coalesced();
    let width = block.width;
    with_typed!(Slice, from, source => with_typed!(Data, to, target => {
        for (from, to) in block.addresses() {
            let (source, target) = (&source[from..from + width], &mut target[to..to + width]);
            if add {
                accumulate(source, target);
            } else {
                convert(source, target);
            }
        }
    }));
}

/// Elements that are contiguous both in a tensor and in a buffer.
struct ContiguousPiece {
    batch: usize,
    token: usize,
    head: usize,
    /// Its first element in the buffer.
    at: usize,
    /// Its number of elements.
    len: usize,
}

/// The contiguous pieces of `runs` in buffer order: `heads` heads (1 or all of them) of one token
/// or, if `whole` tokens are adjacent, all tokens of a run of stride 1.
fn pieces(
    [b, n, h, d]: [usize; 4],
    runs: &[Run],
    heads: usize,
    whole: bool,
) -> impl Iterator<Item = ContiguousPiece> {
    let mut at = 0;
    let starts = (0..b).flat_map(move |batch| {
        runs.iter().flat_map(move |run| {
            assert!(run.end() <= n, "token {} of a tensor of {n}", run.end() - 1);
            let together = if whole && run.stride == 1 {
                run.count
            } else {
                1
            };
            let tokens = run.tokens().step_by(together);
            tokens.flat_map(move |token| {
                let len = together * heads * d;
                (0..h)
                    .step_by(heads)
                    .map(move |head| (batch, token, head, len))
            })
        })
    });
    starts.map(move |(batch, token, head, len)| {
        at += len;
        ContiguousPiece {
            batch,
            token,
            head,
            at: at - len,
            len,
        }
    })
}

/// Copies elements, rounding if the types differ.
pub fn convert<S: Element, T: Element>(source: &[S], target: &mut [T]) {
    match (S::DTYPE, T::DTYPE) {
        (from, to) if from == to => target.copy_from_slice(bytemuck::cast_slice(source)),
        // Conversions of the `half` crate, which use hardware instructions.
        (DType::F32, DType::Bf16) => {
            let target: &mut [bf16] = bytemuck::cast_slice_mut(target);
            target.convert_from_f32_slice(bytemuck::cast_slice(source));
        }
        (DType::F32, DType::F16) => {
            let target: &mut [f16] = bytemuck::cast_slice_mut(target);
            target.convert_from_f32_slice(bytemuck::cast_slice(source));
        }
        (DType::Bf16, DType::F32) => {
            let source: &[bf16] = bytemuck::cast_slice(source);
            source.convert_to_f32_slice(bytemuck::cast_slice_mut(target));
        }
        (DType::F16, DType::F32) => {
            let source: &[f16] = bytemuck::cast_slice(source);
            source.convert_to_f32_slice(bytemuck::cast_slice_mut(target));
        }
        _ => {
            for (x, &value) in target.iter_mut().zip(source) {
                *x = T::from_f64(value.to_f64());
            }
        }
    }
}

/// Adds elements with one rounding: an f64 holds the sum of two f32 exactly enough for that.
fn accumulate<S: Element, T: Element>(source: &[S], target: &mut [T]) {
    for (x, &value) in target.iter_mut().zip(source) {
        *x = T::from_f64(x.to_f64() + value.to_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_bytes_are_those_of_the_first_elements() {
        let mut parcel = Data::F32(vec![1.0, 2.0, 3.0]);
        parcel
            .host_bytes_mut(1)
            .copy_from_slice(&4.0f32.to_le_bytes());
        let bytes: Vec<u8> = [4.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(parcel.host_bytes(2), bytes);
        assert_eq!(parcel.checksum(2), bytes.checksum(8));
        assert_eq!(bytes.host_bytes(3), &bytes[..3]);
    }

    #[test]
    fn a_checksum_detects_every_flipped_bit_and_every_pair_of_signs() {
        let base: Vec<u8> = (0..43).collect();
        let sum = base.checksum(43);
        for bit in 0..43 * 8 {
            let mut one = base.clone();
            one[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(one.checksum(43), sum);
        }
        let signs = |x: f64, y: f64| Data::F64(vec![1.0, x, 2.0, y]).checksum(4);
        assert_ne!(signs(3.0, 4.0), signs(-3.0, -4.0));
        assert_ne!(base.checksum(42), sum);
    }

    #[test]
    fn take_leaves_an_empty_buffer_of_the_same_type() {
        let mut data = Data::F32(vec![1.0, 2.0]);
        assert_eq!(data.take(), Data::F32(vec![1.0, 2.0]));
        assert_eq!(data, Data::F32(vec![]));
        let mut prefix = Data::zeros(DType::F32, 3);
        prefix.copy_from(&Data::F32(vec![5.0, 6.0, 7.0]), 2);
        assert_eq!(prefix, Data::F32(vec![5.0, 6.0, 0.0]));
    }

    #[test]
    fn a_failed_allocation_is_a_typed_error() {
        let refused = allocate("test", DType::F64, usize::MAX / 16);
        assert!(matches!(refused, Err(KernelError::Memory { .. })));
    }
}
