//! What attention reads and writes, checked once for all kernels.

use std::sync::Arc;

use encke_core::DType;
use encke_core::kernel::{Carry, Gradients, SoftmaxState, Upstream};

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
    pub fn memory(&self) -> Result<[&'a Arc<Memory>; 3]> {
        Ok([self.q.memory()?, self.k.memory()?, self.v.memory()?])
    }
}

/// The memory of a softmax state.
#[derive(Clone)]
pub(crate) struct Targets {
    /// Whether what the carry holds is not read.
    pub begins: bool,
    /// Whether it ends here.
    pub ends: bool,
    carry: Vec<Arc<Memory>>,
    outputs: Vec<Arc<Memory>>,
}

impl Targets {
    /// Memory of its own for what is written, of the types that jobs of `dtype` write.
    pub fn new(state: SoftmaxState<'_, Buffer>, dtype: DType) -> Result<Targets> {
        let checked = |carry: &Carry<Buffer>| {
            let Carry { acc, m, l } = carry;
            let mut all = [("acc", acc), ("m", m), ("l", l)].into_iter();
            all.try_for_each(|(what, of)| expect(what, of, dtype.sum()))
        };
        Ok(match state {
            SoftmaxState::Accumulate { carry, starts } => {
                checked(carry)?;
                let Carry { acc, m, l } = carry;
                Targets {
                    begins: starts,
                    ends: false,
                    carry: vec![acc.own()?.clone(), m.own()?.clone(), l.own()?.clone()],
                    outputs: Vec::new(),
                }
            }
            SoftmaxState::Finish { carry, out, lse } => {
                expect("out", out, dtype)?;
                expect("lse", lse, dtype.sum())?;
                let read = match carry {
                    Some(carry) => {
                        checked(carry)?;
                        let Carry { acc, m, l } = carry;
                        vec![
                            acc.memory()?.clone(),
                            m.memory()?.clone(),
                            l.memory()?.clone(),
                        ]
                    }
                    None => Vec::new(),
                };
                Targets {
                    begins: carry.is_none(),
                    ends: true,
                    carry: read,
                    outputs: vec![out.own()?.clone(), lse.own()?.clone()],
                }
            }
        })
    }

    /// A carry that is gone on from, and left where it was.
    pub fn going_on(carry: Vec<Arc<Memory>>) -> Targets {
        Targets {
            begins: false,
            ends: false,
            carry,
            outputs: Vec::new(),
        }
    }

    /// The same where the softmax begins, or does not.
    pub fn beginning(&self, begins: bool) -> Targets {
        let mut targets = self.clone();
        targets.begins = begins;
        if targets.begins && targets.ends {
            targets.carry.clear();
        }
        targets
    }

    /// acc, m and l of the carry, if there is one.
    pub fn carry(&self) -> &[Arc<Memory>] {
        &self.carry
    }

    /// What is read and not written.
    pub fn reads(&self) -> impl Iterator<Item = &Memory> {
        let carry = self.carry.iter().filter(|_| self.ends);
        carry.map(|memory| &**memory)
    }

    /// What is written.
    pub fn writes(&self) -> Vec<&Memory> {
        let written = if self.ends {
            &self.outputs
        } else {
            &self.carry
        };
        written.iter().map(|memory| &**memory).collect()
    }

    /// The sums of the carry.
    pub fn sums(&self) -> Option<&Memory> {
        self.carry.first().map(|memory| &**memory)
    }

    /// acc, m, l, out, lse: zero where there is none.
    pub fn pointers(&self) -> [u64; 5] {
        let mut pointers = [0; 5];
        let (carry, outputs) = pointers.split_at_mut(3);
        for (places, memory) in [(carry, &self.carry), (outputs, &self.outputs)] {
            for (place, memory) in places.iter_mut().zip(memory) {
                *place = memory.pointer();
            }
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
