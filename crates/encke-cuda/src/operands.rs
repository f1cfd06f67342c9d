//! What attention reads and writes, checked once for all kernels.

use std::sync::Arc;

use encke_core::DType;
use encke_core::kernel::{Carry, Gradients, Upstream};

use crate::buffer::Buffer;
use crate::error::Result;
use crate::launch::cells::expect;
use crate::memory::Memory;

/// q, k and v of one type.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    q: &'a Buffer,
    k: &'a Buffer,
    v: &'a Buffer,
}

impl<'a> Operands<'a> {
    pub fn new(q: &'a Buffer, k: &'a Buffer, v: &'a Buffer) -> Result<Operands<'a>> {
        expect("k", k, q.dtype())?;
        expect("v", v, q.dtype())?;
        Ok(Operands { q, k, v })
    }

    pub fn dtype(&self) -> DType {
        self.q.dtype()
    }

    /// q, k, v.
    pub fn memory(&self) -> Result<[&'a Memory; 3]> {
        Ok([self.q.memory()?, self.k.memory()?, self.v.memory()?])
    }
}

/// Where a forward pass writes.
pub(crate) enum Ends<'a> {
    /// It continues this carry.
    Carry(&'a mut Carry<Buffer>),
    /// It ends here: out and lse.
    End(&'a mut Buffer, &'a mut Buffer),
}

/// The same with memory that may be written.
pub(crate) struct Targets {
    /// Whether it ends here.
    pub end: bool,
    memory: Vec<Arc<Memory>>,
}

impl Ends<'_> {
    pub fn own(self) -> Result<Targets> {
        let (end, memory) = match self {
            Ends::Carry(carry) => {
                let sum = carry.acc.dtype();
                expect("m", &carry.m, sum)?;
                expect("l", &carry.l, sum)?;
                let Carry { acc, m, l } = carry;
                (
                    false,
                    vec![acc.own()?.clone(), m.own()?.clone(), l.own()?.clone()],
                )
            }
            Ends::End(out, lse) => {
                expect("lse", lse, out.dtype().sum())?;
                (true, vec![out.own()?.clone(), lse.own()?.clone()])
            }
        };
        Ok(Targets { end, memory })
    }
}

impl Targets {
    pub fn memory(&self) -> Vec<&Memory> {
        self.memory.iter().map(|x| &**x).collect()
    }

    /// acc, m, l, out, lse: zero where there is none.
    pub fn pointers(&self) -> [u64; 5] {
        let mut pointers = [0; 5];
        let first = if self.end { 3 } else { 0 };
        for (place, memory) in pointers[first..].iter_mut().zip(&self.memory) {
            *place = memory.pointer();
        }
        pointers
    }
}

/// What a backward pass reads beside q, k and v, and what it adds to.
pub(crate) struct Gradient<'a> {
    pub upstream: Upstream<&'a Buffer>,
    pub gradients: Gradients<'a, Buffer>,
}

/// The same with memory that may be written.
pub(crate) struct GradientTargets<'a> {
    upstream: Upstream<&'a Buffer>,
    pub dq: Arc<Memory>,
    pub dk: Arc<Memory>,
    pub dv: Arc<Memory>,
}

impl<'a> Gradient<'a> {
    pub fn own(self, dtype: DType) -> Result<GradientTargets<'a>> {
        let Gradients { dq, dk, dv } = self.gradients;
        expect("dout", self.upstream.dout, dtype)?;
        let summed = [&*dq, &*dk, &*dv, self.upstream.lse, self.upstream.delta];
        for (what, buffer) in ["dq", "dk", "dv", "lse", "delta"].iter().zip(summed) {
            expect(what, buffer, dtype.sum())?;
        }
        Ok(GradientTargets {
            upstream: self.upstream,
            dq: dq.own()?.clone(),
            dk: dk.own()?.clone(),
            dv: dv.own()?.clone(),
        })
    }
}

impl<'a> GradientTargets<'a> {
    /// dout, lse, delta.
    pub fn upstream(&self) -> Result<[&'a Memory; 3]> {
        let Upstream { dout, lse, delta } = self.upstream;
        Ok([dout.memory()?, lse.memory()?, delta.memory()?])
    }
}
