//! A kernel under test: moves values in and out, and reports failures with the case.
//!
//! The decision here: buffers are accessed only through the port (allocate, upload, download), so
//! the suite runs on memory that the host cannot address.

use std::fmt::Display;

use super::failure::Failure;
use super::suite::KernelSuite;
use crate::dtype::{DType, Data};
use crate::kernel::{Carry, Kernel, KernelError};
use crate::sharding::Run;
use crate::tensor::{Tensor, View};

/// A kernel, the type it is tested with and the seed of the case.
pub(super) struct KernelBench<'a, K> {
    pub kernel: &'a K,
    pub dtype: DType,
    pub seed: u64,
    pub suite: KernelSuite,
}

impl<K: Kernel> KernelBench<'_, K> {
    /// The failure of one check.
    pub fn failure(&self, what: impl Display) -> Failure {
        let (kernel, dtype, seed) = (self.kernel.name(), self.dtype, self.seed);
        Failure {
            message: format!("{kernel}, {dtype}, seed {seed}: {what}"),
        }
    }

    /// The result of a kernel call as a result of the suite.
    pub fn done<T>(&self, result: Result<T, KernelError>) -> Result<T, Failure> {
        result.map_err(|error| self.failure(error))
    }

    /// A buffer with these values.
    pub fn put(&self, dtype: DType, values: &[f64]) -> Result<K::Buffer, Failure> {
        self.put_data(&Data::from_f64(dtype, values))
    }

    /// A buffer with these bits.
    pub fn put_data(&self, data: &Data) -> Result<K::Buffer, Failure> {
        let slice = data.as_slice();
        let mut buffer = self.done(self.kernel.allocate(slice.dtype(), slice.len()))?;
        let dims = [1, 1, 1, slice.len()];
        let view = View::from_slice(slice, dims, [slice.len(), slice.len(), slice.len(), 1]);
        let view = view.map_err(|error| self.failure(error))?;
        self.done(self.kernel.upload(&view, &[ONE_ROW], &mut buffer))?;
        Ok(buffer)
    }

    /// The contents of a buffer.
    pub fn get(&self, dtype: DType, elements: usize, buffer: &K::Buffer) -> Result<Data, Failure> {
        let mut tensor = Tensor::zeros(dtype, [1, 1, 1, elements]);
        self.done(self.kernel.download(buffer, &[ONE_ROW], &mut tensor))?;
        Ok(tensor.data().clone())
    }

    /// The contents of a carry.
    pub fn get_carry(
        &self,
        cells: usize,
        dim: usize,
        carry: &Carry<K::Buffer>,
    ) -> Result<Carry<Data>, Failure> {
        let sum = self.dtype.sum();
        Ok(Carry {
            acc: self.get(sum, cells * dim, &carry.acc)?,
            m: self.get(sum, cells, &carry.m)?,
            l: self.get(sum, cells, &carry.l)?,
        })
    }

    /// Fails if a value differs from the expected one by more than `tolerance`.
    pub fn close(
        &self,
        what: &str,
        pairs: impl IntoIterator<Item = (f64, f64)>,
        tolerance: f64,
    ) -> Result<(), Failure> {
        let mut worst = (0.0, 0, 0.0, 0.0);
        for (i, (got, expected)) in pairs.into_iter().enumerate() {
            // Equal infinities have no error; a NaN counts as an infinite one.
            let error = if got == expected {
                0.0
            } else if (got - expected).is_nan() {
                f64::INFINITY
            } else {
                (got - expected).abs()
            };
            if error > worst.0 {
                worst = (error, i, got, expected);
            }
        }
        let (error, i, got, expected) = worst;
        if error <= tolerance {
            return Ok(());
        }
        Err(self.failure(format!(
            "{what} has an error of {error:e}, allowed {tolerance:e} (element {i}: {got} instead \
             of {expected})"
        )))
    }

    /// Fails if gradients that must be equal differ: in any bit or, if the kernel is not bitwise
    /// repeatable, by more than the rounding of a reordered sum.
    pub fn same_gradient(
        &self,
        what: &str,
        before: &Data,
        after: &Data,
        free: impl Fn(usize) -> bool,
    ) -> Result<(), Failure> {
        if self.suite.repeatable {
            return self.unchanged(what, before, after, free);
        }
        let (before, after) = (before.to_f64(), after.to_f64());
        let size = before
            .iter()
            .filter(|x| x.is_finite())
            .fold(0.0, |m: f64, x| m.max(x.abs()));
        let pairs = before.into_iter().zip(after).enumerate();
        // Gaps are NaN on both sides and must stay NaN.
        let live = pairs.filter(|(i, (x, y))| !(free(*i) || x.is_nan() && y.is_nan()));
        self.close(
            what,
            live.map(|(_, pair)| pair),
            64.0 * f32::EPSILON as f64 * size,
        )
    }

    /// Fails if any bit differs in an element for which `free` is false.
    pub fn unchanged(
        &self,
        what: &str,
        before: &Data,
        after: &Data,
        free: impl Fn(usize) -> bool,
    ) -> Result<(), Failure> {
        let bytes = before.as_slice().dtype().bytes();
        let pairs = before
            .bytes()
            .chunks(bytes)
            .zip(after.bytes().chunks(bytes));
        match pairs.enumerate().find(|(i, (x, y))| x != y && !free(*i)) {
            None => Ok(()),
            Some((i, _)) => Err(self.failure(format!(
                "{what} changed element {i} from {} to {}",
                before.as_slice().get(i),
                after.as_slice().get(i)
            ))),
        }
    }
}

/// A whole buffer as one row.
const ONE_ROW: Run = Run::leading(1);
