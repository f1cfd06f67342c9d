//! The buffers that attention reads and writes, checked once for all kernels.

use std::sync::Arc;

use encke_core::DType;
use encke_core::kernel::{Carry, Gradients, SoftmaxState, Upstream};

use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::error::Result;

/// q, k and v of one type.
#[derive(Clone, Copy)]
pub(crate) struct DeviceInputs<'a> {
    q: &'a Buffer,
    k: &'a Buffer,
    v: &'a Buffer,
}

impl<'a> DeviceInputs<'a> {
    pub fn new(q: &'a Buffer, k: &'a Buffer, v: &'a Buffer) -> Result<DeviceInputs<'a>> {
        k.check_dtype("k", q.dtype())?;
        v.check_dtype("v", q.dtype())?;
        Ok(DeviceInputs { q, k, v })
    }

    pub fn dtype(&self) -> DType {
        self.q.dtype()
    }

    /// q, k, v.
    pub fn memory(&self) -> Result<[&'a Arc<DeviceAllocation>; 3]> {
        Ok([self.q.memory()?, self.k.memory()?, self.v.memory()?])
    }
}

/// The memory of a softmax state.
#[derive(Clone)]
pub(crate) struct SoftmaxMemory {
    /// Whether the softmax starts here: the carry's contents are not read.
    pub starts: bool,
    /// Whether the softmax finishes here, in out and lse.
    pub finishes: bool,
    carry: Vec<Arc<DeviceAllocation>>,
    outputs: Vec<Arc<DeviceAllocation>>,
}

impl SoftmaxMemory {
    /// Checks the types that jobs of `dtype` write, and makes the written buffers writable.
    pub fn new(state: SoftmaxState<'_, Buffer>, dtype: DType) -> Result<SoftmaxMemory> {
        let check = |carry: &Carry<Buffer>| {
            let Carry { acc, m, l } = carry;
            let mut all = [("acc", acc), ("m", m), ("l", l)].into_iter();
            all.try_for_each(|(what, buffer)| buffer.check_dtype(what, dtype.sum()))
        };
        Ok(match state {
            SoftmaxState::Accumulate { carry, starts } => {
                check(carry)?;
                let Carry { acc, m, l } = carry;
                let carry = [acc.writable(), m.writable(), l.writable()];
                SoftmaxMemory {
                    starts,
                    finishes: false,
                    carry: cloned(carry)?,
                    outputs: Vec::new(),
                }
            }
            SoftmaxState::Finish { carry, out, lse } => {
                out.check_dtype("out", dtype)?;
                lse.check_dtype("lse", dtype.sum())?;
                let read = match carry {
                    Some(carry) => {
                        check(carry)?;
                        let Carry { acc, m, l } = carry;
                        cloned([acc.memory(), m.memory(), l.memory()])?
                    }
                    None => Vec::new(),
                };
                SoftmaxMemory {
                    starts: carry.is_none(),
                    finishes: true,
                    carry: read,
                    outputs: cloned([out.writable(), lse.writable()])?,
                }
            }
        })
    }

    /// A carry that is read and left in the same memory.
    pub fn continuing(carry: Vec<Arc<DeviceAllocation>>) -> SoftmaxMemory {
        SoftmaxMemory {
            starts: false,
            finishes: false,
            carry,
            outputs: Vec::new(),
        }
    }

    /// The same with `starts` replaced.
    pub fn starting(&self, starts: bool) -> SoftmaxMemory {
        let mut memory = self.clone();
        memory.starts = starts;
        if memory.starts && memory.finishes {
            memory.carry.clear();
        }
        memory
    }

    /// acc, m and l of the carry, if there is one.
    pub fn carry(&self) -> &[Arc<DeviceAllocation>] {
        &self.carry
    }

    /// The memory that is read and not written.
    pub fn reads(&self) -> impl Iterator<Item = &DeviceAllocation> {
        let carry = self.carry.iter().filter(|_| self.finishes);
        carry.map(|memory| &**memory)
    }

    /// The memory that is written.
    pub fn writes(&self) -> Vec<&DeviceAllocation> {
        let written = match self.finishes {
            true => &self.outputs,
            false => &self.carry,
        };
        written.iter().map(|memory| &**memory).collect()
    }

    /// acc of the carry.
    pub fn acc(&self) -> Option<&DeviceAllocation> {
        self.carry.first().map(|memory| &**memory)
    }

    /// The addresses of acc, m, l, out and lse; 0 for those that do not exist.
    pub fn pointers(&self) -> [u64; 5] {
        let mut pointers = [0; 5];
        let (carry, outputs) = pointers.split_at_mut(3);
        for (pointers, all) in [(carry, &self.carry), (outputs, &self.outputs)] {
            for (pointer, memory) in pointers.iter_mut().zip(all) {
                *pointer = memory.pointer();
            }
        }
        pointers
    }
}

fn cloned<const COUNT: usize>(
    memory: [Result<&Arc<DeviceAllocation>>; COUNT],
) -> Result<Vec<Arc<DeviceAllocation>>> {
    memory.into_iter().map(|memory| memory.cloned()).collect()
}

/// The buffers that a backward pass reads beside q, k and v, and those it adds to.
pub(crate) struct BackwardOperands<'a> {
    pub upstream: Upstream<&'a Buffer>,
    pub gradients: Gradients<'a, Buffer>,
}

/// The same with writable memory for the gradients.
pub(crate) struct BackwardMemory<'a> {
    upstream: Upstream<&'a Buffer>,
    pub dq: Arc<DeviceAllocation>,
    pub dk: Arc<DeviceAllocation>,
    pub dv: Arc<DeviceAllocation>,
    /// The type of dk and dv.
    pub key_gradients: DType,
}

/// Whether a kernel can round dk and dv to the type of the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounds {
    /// It can, if one job writes all of them.
    Allowed,
    /// It adds sums.
    Never,
}

impl<'a> BackwardOperands<'a> {
    /// Checks the types for jobs of `dtype`, and makes the gradients writable.
    pub fn into_memory(self, dtype: DType, rounds: Rounds) -> Result<BackwardMemory<'a>> {
        let Gradients { dq, dk, dv } = self.gradients;
        let Upstream { dout, lse, delta } = self.upstream;
        dout.check_dtype("dout", dtype)?;
        let rounded = rounds == Rounds::Allowed && dk.dtype() == dtype;
        let key_gradients = if rounded { dtype } else { dtype.sum() };
        dk.check_dtype("dk", key_gradients)?;
        dv.check_dtype("dv", key_gradients)?;
        for (what, buffer) in ["dq", "lse", "delta"].iter().zip([&*dq, lse, delta]) {
            buffer.check_dtype(what, dtype.sum())?;
        }
        Ok(BackwardMemory {
            upstream: self.upstream,
            dq: dq.writable()?.clone(),
            dk: dk.writable()?.clone(),
            dv: dv.writable()?.clone(),
            key_gradients,
        })
    }
}

impl<'a> BackwardMemory<'a> {
    /// dout, lse, delta.
    pub fn upstream(&self) -> Result<[&'a DeviceAllocation; 3]> {
        let Upstream { dout, lse, delta } = self.upstream;
        Ok([dout.memory()?, lse.memory()?, delta.memory()?])
    }
}
