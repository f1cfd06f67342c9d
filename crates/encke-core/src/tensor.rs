//! Host tensors: what a caller lends ([`View`]) and what a call returns ([`Tensor`]).
//!
//! All are `[b, n, h, d]`. A view may have any strides as long as its last dimension is contiguous:
//! rows are what kernels read, and a row that is not contiguous would have to be copied behind the
//! caller's back. Such a view is refused with an error that says so.

use std::sync::{Arc, Weak};

use crate::dtype::{DType, Data, Element, Slice};
use crate::error::{Error, Result};
use crate::spare::{Kept, TensorPool};

/// A borrowed strided tensor `[b, n, h, d]`.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: Slice<'a>,
    dims: [usize; 4],
    strides: [usize; 4],
}

impl<'a> View<'a> {
    /// A view with explicit strides, in elements. The last stride must be 1 (any value where `d` is 1).
    pub fn strided<T: Element>(
        data: &'a [T],
        dims: [usize; 4],
        strides: [usize; 4],
    ) -> Result<View<'a>> {
        View::from_slice(T::wrap(data), dims, strides)
    }

    /// A view of contiguous data.
    pub fn contiguous<T: Element>(data: &'a [T], dims: [usize; 4]) -> Result<View<'a>> {
        View::from_slice(T::wrap(data), dims, row_major(dims))
    }

    /// A view of data whose type is known at run time.
    pub fn from_slice(data: Slice<'a>, dims: [usize; 4], strides: [usize; 4]) -> Result<View<'a>> {
        if dims[3] > 1 && strides[3] != 1 {
            return Err(Error::InnerStride { stride: strides[3] });
        }
        let overflow = || Error::Overflow {
            what: "the extent of a view",
        };
        let mut needed: usize = 0;
        if dims.iter().all(|&size| size > 0) {
            needed = 1;
            for (size, stride) in dims.iter().zip(strides) {
                let reach = (size - 1).checked_mul(stride).ok_or_else(overflow)?;
                needed = needed.checked_add(reach).ok_or_else(overflow)?;
            }
        }
        if needed > data.len() {
            return Err(Error::ShortData {
                dims,
                strides,
                needed,
                got: data.len(),
            });
        }
        Ok(View {
            data,
            dims,
            strides,
        })
    }

    /// The dimensions `[b, n, h, d]`.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The strides in elements.
    pub fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// The type of the numbers.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The underlying numbers; index them with [`View::row`].
    pub fn data(&self) -> Slice<'a> {
        self.data
    }

    /// Index of the first number of one row.
    pub fn row(&self, batch: usize, token: usize, head: usize) -> usize {
        batch * self.strides[0] + token * self.strides[1] + head * self.strides[2]
    }

    /// The numbers in row-major order, widened: for the reference and for tests.
    pub fn to_f64(&self) -> Vec<f64> {
        let [b, n, h, d] = self.dims;
        let mut values = Vec::with_capacity(b * n * h * d);
        for (batch, token, head) in rows(self.dims) {
            let start = self.row(batch, token, head);
            values.extend((start..start + d).map(|i| self.data.get(i)));
        }
        values
    }
}

/// An owned row-major tensor `[b, n, h, d]`; an lse has d = 1.
#[derive(Debug)]
pub struct Tensor {
    data: Data,
    dims: [usize; 4],
    home: Option<Home>,
}

/// Where memory goes when it is not needed any more, and its mark there ([`Kept`]).
#[derive(Debug)]
struct Home {
    spare: Weak<TensorPool>,
    mark: Option<u64>,
}

impl Clone for Tensor {
    /// The same numbers in memory of their own, which has no home.
    fn clone(&self) -> Tensor {
        Tensor {
            data: self.data.clone(),
            dims: self.dims,
            home: None,
        }
    }
}

impl PartialEq for Tensor {
    fn eq(&self, other: &Tensor) -> bool {
        self.dims == other.dims && self.data == other.data
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        let home = self.home.take();
        if let Some((spare, mark)) = home.and_then(|home| Some((home.spare.upgrade()?, home.mark)))
        {
            let data = std::mem::take(&mut self.data);
            spare.keep(Kept { data, mark });
        }
    }
}

impl Tensor {
    /// All zeros.
    pub fn zeros(dtype: DType, dims: [usize; 4]) -> Tensor {
        Tensor {
            data: Data::zeros(dtype, dims.iter().product()),
            dims,
            home: None,
        }
    }

    /// Numbers rounded to `dtype`; refused where their count is not that of `dims`.
    pub fn from_f64(dtype: DType, dims: [usize; 4], values: &[f64]) -> Result<Tensor> {
        Tensor::from_data(Data::from_f64(dtype, values), dims)
    }

    /// Numbers as they are; refused where their count is not that of `dims`.
    pub fn from_data(data: Data, dims: [usize; 4]) -> Result<Tensor> {
        let needed: usize = dims.iter().product();
        let got = data.as_slice().len();
        if needed != got {
            return Err(Error::ShortData {
                dims,
                strides: row_major(dims),
                needed,
                got,
            });
        }
        let home = None;
        Ok(Tensor { data, dims, home })
    }

    /// The same tensor, which leaves its memory to others when it is dropped. With a mark, whoever
    /// has it may take all numbers for zeros that he does not write, as long as nobody has changed
    /// them here.
    #[must_use]
    pub fn returning_to(mut self, spare: &Arc<TensorPool>, mark: Option<u64>) -> Tensor {
        let spare = Arc::downgrade(spare);
        self.home = Some(Home { spare, mark });
        self
    }

    /// The dimensions `[b, n, h, d]`.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The type of the numbers.
    pub fn dtype(&self) -> DType {
        self.data.as_slice().dtype()
    }

    /// The numbers.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The numbers alone.
    pub fn into_data(mut self) -> Data {
        self.home = None;
        std::mem::take(&mut self.data)
    }

    /// The numbers, to be written.
    pub fn data_mut(&mut self) -> &mut Data {
        if let Some(home) = &mut self.home {
            home.mark = None;
        }
        &mut self.data
    }

    /// The numbers, widened.
    pub fn to_f64(&self) -> Vec<f64> {
        self.data.to_f64()
    }

    /// This tensor as a view.
    pub fn view(&self) -> View<'_> {
        View {
            data: self.data.as_slice(),
            dims: self.dims,
            strides: row_major(self.dims),
        }
    }
}

/// Strides of a contiguous tensor.
pub fn row_major(dims: [usize; 4]) -> [usize; 4] {
    let [_, n, h, d] = dims;
    [n * h * d, h * d, d, 1]
}

/// All (batch, token, head) of a tensor in row-major order.
fn rows(dims: [usize; 4]) -> impl Iterator<Item = (usize, usize, usize)> {
    let [b, n, h, _] = dims;
    (0..b).flat_map(move |batch| {
        (0..n).flat_map(move |token| (0..h).map(move |head| (batch, token, head)))
    })
}
