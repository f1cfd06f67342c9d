//! The tensors that `encke attend` reads: their names, shapes and types are checked here.

use anyhow::{Context, Result, bail};
use encke::{Attention, DType, Kernel, KeyLengths, Mode, Pass, Shape, Tensor, View};

use crate::finite;
use crate::input::{InputTensors, TensorHeader};

/// The tensors of a call, and their common sizes.
pub struct AttendInputs {
    pub q: TensorHeader,
    pub k: TensorHeader,
    pub v: TensorHeader,
    pub dout: Option<TensorHeader>,
    pub dlse: Option<TensorHeader>,
    pub sinks: Option<Vec<f64>>,
    pub shape: Shape,
    /// Lengths of the entries of a padded batch.
    pub lengths: Option<KeyLengths>,
}

impl AttendInputs {
    /// Reads the headers, and refuses shapes and types that do not fit each other or the pattern.
    pub fn read<K: Kernel>(
        file: &InputTensors<'_>,
        (grad, with_sinks): (bool, bool),
        lengths: Option<KeyLengths>,
        attention: &Attention<K>,
    ) -> Result<AttendInputs> {
        let sinks = with_sinks.then(|| file.vector("sinks")).transpose()?;
        let (q, k, v) = (file.get("q")?, file.get("k")?, file.get("v")?);
        let dout = match grad {
            true => Some(file.get("do").context("--grad needs the gradient of out")?),
            false => None,
        };
        let dlse = match grad && file.has("dlse") {
            true => Some(file.get("dlse")?),
            false => None,
        };
        let [b, queries, h, d] = q.dims()?;
        let [_, n, kv_heads, _] = k.dims()?;
        let value_dim = v.dims()?[3];
        check_shape(&k, k.dims()?, [b, n, kv_heads, d], "q")?;
        check_shape(&v, v.dims()?, [b, n, kv_heads, value_dim], "k")?;
        if let Some(dout) = &dout {
            check_shape(dout, dout.dims()?, [b, queries, h, value_dim], "q and v")?;
        }
        if let Some(dlse) = &dlse {
            check_shape(dlse, dlse.row_dims()?, [b, queries, h, 1], "q")?;
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
        let shape = Shape::new(b, n, h, kv_heads, d)?.with_queries(queries)?;
        let inputs = AttendInputs {
            shape: shape.with_value_dim(value_dim)?,
            q,
            k,
            v,
            dout,
            dlse,
            sinks,
            lengths,
        };
        inputs.check_sinks(attention)?;
        inputs.check_plans(attention)?;
        Ok(inputs)
    }

    /// Makes the plans, which refuse a pattern or a sharding that does not fit.
    fn check_plans<K: Kernel>(&self, attention: &Attention<K>) -> Result<()> {
        let backward = Pass::Backward {
            dlse: self.dlse.is_some(),
        };
        let shape = match &self.lengths {
            None => self.shape,
            Some(lengths) => lengths.shape(&self.shape)?,
        };
        attention.plan(shape, self.q.dtype(), Pass::Forward)?;
        if self.dout.is_some() {
            attention.plan(shape, self.q.dtype(), backward)?;
        }
        Ok(())
    }

    /// The rows of a tensor that count, if the batch is padded.
    pub fn pack(&self, tensor: &View<'_>) -> Result<Option<Tensor>> {
        let lengths = self.lengths.as_ref();
        Ok(lengths.map(|lengths| lengths.pack(tensor)).transpose()?)
    }

    /// Refuses sinks that do not fit the heads or the pattern.
    fn check_sinks<K: Kernel>(&self, attention: &Attention<K>) -> Result<()> {
        if let Some(sinks) = &self.sinks {
            attention.pattern().check_sinks()?;
            encke::sinks::check(sinks, self.shape.heads)?;
        }
        Ok(())
    }

    /// Refuses NaN and infinite elements.
    pub fn check_finite(&self, file: &InputTensors<'_>, compute: DType) -> Result<()> {
        let tensors = [
            Some(&self.q),
            Some(&self.k),
            Some(&self.v),
            self.dout.as_ref(),
        ];
        for tensor in tensors.into_iter().flatten() {
            let elements = file.elements(tensor);
            self.check_rows(tensor.name(), &elements.view(tensor.dims()?)?, compute)?;
        }
        if let Some(dlse) = &self.dlse {
            let elements = file.elements(dlse);
            let rows = elements.view(dlse.row_dims()?)?;
            self.check_rows(dlse.name(), &rows, compute.sum())?;
        }
        Ok(())
    }

    /// Refuses NaN and infinite elements of the rows that count.
    fn check_rows(&self, name: &str, rows: &View<'_>, compute: DType) -> Result<()> {
        let Some(lengths) = &self.lengths else {
            return finite::check(name, rows.data(), rows.dims(), compute);
        };
        let packed = lengths.pack(rows)?;
        let [_, _, h, d] = rows.dims();
        let index = |at: usize| {
            let (entry, token) = lengths.place(at / (h * d));
            let index = [entry, token, at / d % h, at % d];
            index[..if d == 1 { 3 } else { 4 }].to_vec()
        };
        finite::check_some(name, packed.data().as_slice(), compute, index)
    }
}

fn check_shape(
    tensor: &TensorHeader,
    got: [usize; 4],
    expected: [usize; 4],
    others: &str,
) -> Result<()> {
    if got != expected {
        bail!(
            "{} has shape {got:?}, expected {expected:?} to fit {others}",
            tensor.name()
        );
    }
    Ok(())
}
