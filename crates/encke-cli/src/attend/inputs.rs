//! The tensors that `encke attend` reads: which there must be, and that they fit together.

use anyhow::{Context, Result, bail};
use encke::{Attention, DType, Kernel, Mode, Pass, Shape};

use crate::finite;
use crate::input::{Header, Tensors};

/// The tensors of a call, and the sizes they agree on.
pub struct Inputs {
    pub q: Header,
    pub k: Header,
    pub v: Header,
    pub dout: Option<Header>,
    pub dlse: Option<Header>,
    pub shape: Shape,
}

impl Inputs {
    /// The tensors the command needs, of shapes that fit together and to the pattern.
    pub fn read<K: Kernel>(
        file: &Tensors<'_>,
        grad: bool,
        attention: &Attention<K>,
    ) -> Result<Inputs> {
        let (q, k, v) = (file.get("q")?, file.get("k")?, file.get("v")?);
        let dout = match grad {
            true => Some(file.get("do").context("--grad needs the gradient of out")?),
            false => None,
        };
        let dlse = match grad && file.has("dlse") {
            true => Some(file.get("dlse")?),
            false => None,
        };
        let [b, n, h, d] = q.dims()?;
        let kv_heads = k.dims()?[2];
        expect(&k, k.dims()?, [b, n, kv_heads, d])?;
        expect(&v, v.dims()?, [b, n, kv_heads, d])?;
        if let Some(dout) = &dout {
            expect(dout, dout.dims()?, [b, n, h, d])?;
        }
        if let Some(dlse) = &dlse {
            expect(dlse, dlse.row_dims()?, [b, n, h, 1])?;
            if attention.pattern().mode() == Mode::Fkodom {
                bail!(
                    "the file has dlse, but fkodom mode has no gradient of the lse; remove the \
                     tensor or use another mode"
                );
            }
        }
        for tensor in [Some(&k), Some(&v), dout.as_ref()].into_iter().flatten() {
            let (name, got, expected) = (tensor.name(), tensor.dtype(), q.dtype());
            if got != expected {
                bail!("{name} is {got} but q is {expected}; convert one of them");
            }
        }
        let inputs = Inputs {
            shape: Shape::new(b, n, h, kv_heads, d)?,
            q,
            k,
            v,
            dout,
            dlse,
        };
        inputs.check_plans(attention)?;
        Ok(inputs)
    }

    /// Makes the plans, which is where a pattern or a partition that does not fit is refused.
    fn check_plans<K: Kernel>(&self, attention: &Attention<K>) -> Result<()> {
        let backward = Pass::Backward {
            dlse: self.dlse.is_some(),
        };
        attention.plan(self.shape, self.q.dtype(), Pass::Forward)?;
        if self.dout.is_some() {
            attention.plan(self.shape, self.q.dtype(), backward)?;
        }
        Ok(())
    }

    /// Refuses NaN and infinity.
    pub fn check_finite(&self, file: &Tensors<'_>, compute: DType) -> Result<()> {
        let wide = [
            Some(&self.q),
            Some(&self.k),
            Some(&self.v),
            self.dout.as_ref(),
        ];
        for tensor in wide.into_iter().flatten() {
            let numbers = file.numbers(tensor);
            finite::check(tensor.name(), numbers.slice(), tensor.dims()?, compute)?;
        }
        if let Some(dlse) = &self.dlse {
            let (numbers, dims) = (file.numbers(dlse), dlse.row_dims()?);
            finite::check(dlse.name(), numbers.slice(), dims, compute.sum())?;
        }
        Ok(())
    }
}

fn expect(tensor: &Header, got: [usize; 4], expected: [usize; 4]) -> Result<()> {
    if got != expected {
        bail!(
            "{} has shape {got:?}, expected {expected:?} to fit q",
            tensor.name()
        );
    }
    Ok(())
}
