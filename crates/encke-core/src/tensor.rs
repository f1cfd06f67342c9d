//! Host tensors: borrowed inputs ([`View`]) and owned results ([`Tensor`]).
//!
//! All are `[b, n, h, d]`. A view may have any strides as long as its last dimension is contiguous:
//! kernels read whole rows, and a strided row would need a hidden copy. Other views are refused
//! with an error.

use std::sync::{Arc, Weak};

use crate::dtype::{DType, Data, Element, Slice};
use crate::error::{Error, Result, product};

/// A borrowed strided tensor `[b, n, h, d]`.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: Slice<'a>,
    dims: [usize; 4],
    strides: [usize; 4],
}

impl<'a> View<'a> {
    /// A view with explicit strides, in elements. The last stride must be 1 (any value if `d` is
    /// 1).
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
        let mut needed: usize = 0;
        if dims.iter().all(|&size| size > 0) {
            needed = 1;
            for (size, stride) in dims.iter().zip(strides) {
                let reach = product("the extent of a view", &[size - 1, stride])?;
                needed = needed.saturating_add(reach);
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

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The underlying elements; index them with [`View::row`].
    pub fn data(&self) -> Slice<'a> {
        self.data
    }

    /// Index of the first element of one row.
    pub fn row(&self, batch: usize, token: usize, head: usize) -> usize {
        batch * self.strides[0] + token * self.strides[1] + head * self.strides[2]
    }

    /// All elements in row-major order, widened to f64: for the reference and for tests.
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

/// Receives the storage of a dropped [`Tensor`] for reuse.
pub trait StorageSink: Send + Sync {
    /// Takes the storage. If `mark` is set, the data has not been modified since the tensor was
    /// attached with that mark.
    fn recycle(&self, data: Data, mark: Option<u64>);
}

/// An owned row-major tensor `[b, n, h, d]`; an lse has d = 1.
#[derive(Debug)]
pub struct Tensor {
    data: Data,
    dims: [usize; 4],
    recycling: Option<Recycling>,
}

/// Where the storage goes when the tensor is dropped, and under which mark.
#[derive(Debug)]
struct Recycling {
    sink: Weak<dyn StorageSink>,
    mark: Option<u64>,
}

impl Clone for Tensor {
    /// A copy in storage of its own, which is not recycled.
    fn clone(&self) -> Tensor {
        Tensor {
            data: self.data.clone(),
            dims: self.dims,
            recycling: None,
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
        if let Some(Recycling { sink, mark }) = self.recycling.take()
            && let Some(sink) = sink.upgrade()
        {
            sink.recycle(std::mem::take(&mut self.data), mark);
        }
    }
}

impl Tensor {
    /// All zeros, for sizes that are known to be small.
    ///
    /// # Panics
    /// Where [`Tensor::try_zeros`] has an error.
    pub fn zeros(dtype: DType, dims: [usize; 4]) -> Tensor {
        Tensor::try_zeros(dtype, dims).unwrap_or_else(|error| panic!("{error}"))
    }

    /// All zeros; an error if the size overflows, or if there is not enough memory, which names
    /// the bytes.
    pub fn try_zeros(dtype: DType, dims: [usize; 4]) -> Result<Tensor> {
        let elements = product("the size of a tensor", &dims)?;
        Ok(Tensor {
            data: Data::try_zeros(dtype, elements)?,
            dims,
            recycling: None,
        })
    }

    /// Values rounded to `dtype`; an error if their count does not match `dims`.
    pub fn from_f64(dtype: DType, dims: [usize; 4], values: &[f64]) -> Result<Tensor> {
        Tensor::from_data(Data::from_f64(dtype, values), dims)
    }

    /// A tensor over existing storage; an error if its length does not match `dims`.
    pub fn from_data(data: Data, dims: [usize; 4]) -> Result<Tensor> {
        let needed = product("the size of a tensor", &dims)?;
        let got = data.as_slice().len();
        if needed != got {
            return Err(Error::ShortData {
                dims,
                strides: row_major(dims),
                needed,
                got,
            });
        }
        Ok(Tensor {
            data,
            dims,
            recycling: None,
        })
    }

    /// Attaches the tensor to a sink that receives its storage on drop. The sink is held weakly. It
    /// gets `mark` back as long as the data was not borrowed mutably in between.
    #[must_use]
    pub fn recycle_into<S: StorageSink + 'static>(
        mut self,
        sink: &Arc<S>,
        mark: Option<u64>,
    ) -> Tensor {
        let sink: Weak<S> = Arc::downgrade(sink);
        self.recycling = Some(Recycling { sink, mark });
        self
    }

    /// The dimensions `[b, n, h, d]`.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.data.as_slice().dtype()
    }

    /// The elements.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The storage; it is no longer recycled.
    pub fn into_data(mut self) -> Data {
        self.recycling = None;
        std::mem::take(&mut self.data)
    }

    /// The elements for writing. Clears the mark of [`Tensor::recycle_into`].
    pub fn data_mut(&mut self) -> &mut Data {
        if let Some(recycling) = &mut self.recycling {
            recycling.mark = None;
        }
        &mut self.data
    }

    /// The elements, widened to f64.
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
