//! The tensors that `encke attend` reads: which there must be, and that they fit together.

use anyhow::{Context, Result, bail};
use encke::{Attention, DType, Mode, Pass, Shape};

use crate::finite;
use crate::input::{Numbers, Tensors};

/// The tensors of a call, and the sizes they agree on.
pub struct Inputs<'a> {
    pub q: Numbers<'a>,
    pub k: Numbers<'a>,
    pub v: Numbers<'a>,
    pub dout: Option<Numbers<'a>>,
    pub dlse: Option<Numbers<'a>>,
    pub shape: Shape,
}

impl<'a> Inputs<'a> {
    /// The tensors the command needs, of shapes that fit together and to the pattern.
    pub fn read(file: &Tensors<'a>, grad: bool, attention: &Attention) -> Result<Inputs<'a>> {
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
    fn check_plans(&self, attention: &Attention) -> Result<()> {
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
    pub fn check_finite(&self, compute: DType) -> Result<()> {
        let wide = [
            Some(&self.q),
            Some(&self.k),
            Some(&self.v),
            self.dout.as_ref(),
        ];
        for tensor in wide.into_iter().flatten() {
            finite::check(tensor.name(), tensor.slice(), tensor.dims()?, compute)?;
        }
        if let Some(dlse) = &self.dlse {
            finite::check(dlse.name(), dlse.slice(), dlse.row_dims()?, compute.sum())?;
        }
        Ok(())
    }
}

fn expect(tensor: &Numbers<'_>, got: [usize; 4], expected: [usize; 4]) -> Result<()> {
    if got != expected {
        bail!(
            "{} has shape {got:?}, expected {expected:?} to fit q",
            tensor.name()
        );
    }
    Ok(())
}
