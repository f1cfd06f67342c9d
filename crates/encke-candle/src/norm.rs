//! RMS norm in one pass over the rows, with a gradient.
//!
//! candle's fast RMS norm has no gradient, and its slow one passes over the rows a dozen times.
//! Sums over rows are taken in blocks of a fixed size, so the number of threads changes no bit.

use candle_core::{CpuStorage, CustomOp2, D, DType, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use crate::storage::on_host;

/// Added to the mean square.
const EPSILON: f32 = 1e-6;
/// Rows of a block.
const ROWS: usize = 256;

/// `x` `[.., width]` divided row by row by its root mean square, times `gains` `[width]`.
pub fn rms_norm(x: &Tensor, gains: &Tensor) -> Result<Tensor> {
    if x.dtype() == DType::F32 && gains.dtype() == DType::F32 && x.device().is_cpu() {
        return x.contiguous()?.apply_op2(&gains.contiguous()?, RmsNormOp);
    }
    let stored = x.dtype();
    let x = match stored {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
        _ => x.clone(),
    };
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    let x = x.broadcast_div(&(mean + f64::from(EPSILON))?.sqrt()?)?;
    x.to_dtype(stored)?.broadcast_mul(gains)
}

struct RmsNormOp;

/// One over the root of a row's mean square.
fn scale(row: &[f32]) -> f32 {
    let square: f32 = row.iter().map(|x| x * x).sum();
    1.0 / (square / row.len() as f32 + EPSILON).sqrt()
}

fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let (from, to) = layout.contiguous_offsets().ok_or_else(|| {
        candle_core::Error::msg("a norm reads contiguous rows: a bug in encke-candle")
    })?;
    Ok(&storage.as_slice::<f32>()?[from..to])
}

impl CustomOp2 for RmsNormOp {
    fn name(&self) -> &'static str {
        "encke-rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gains: &CpuStorage,
        gains_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, gains) = (elements(x, x_layout)?, elements(gains, gains_layout)?);
        let width = gains.len();
        if width == 0 || x_layout.dims().last() != Some(&width) {
            return Err(candle_core::Error::msg(format!(
                "rows of {:?} cannot have {width} gains",
                x_layout.dims()
            )));
        }
        let mut normal = vec![0.0; x.len()];
        let block = ROWS * width;
        let blocks = normal.par_chunks_mut(block).zip(x.par_chunks(block));
        blocks.for_each(|(normal, x)| {
            for (normal, x) in normal.chunks_mut(width).zip(x.chunks(width)) {
                let scale = scale(x);
                for ((normal, x), gain) in normal.iter_mut().zip(x).zip(gains) {
                    *normal = x * scale * gain;
                }
            }
        });
        Ok((CpuStorage::F32(normal), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gains: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let (dx, dgains) = {
            let [x, gains, gradient] = [x, gains, &gradient].map(Tensor::storage_and_layout);
            backward(
                elements(on_host("x", &x.0)?, x.1)?,
                elements(on_host("gains", &gains.0)?, gains.1)?,
                elements(on_host("a gradient", &gradient.0)?, gradient.1)?,
            )
        };
        Ok((
            Some(Tensor::from_vec(dx, x.dims(), x.device())?),
            Some(Tensor::from_vec(dgains, gains.dims(), gains.device())?),
        ))
    }
}

/// Gradients of the rows and of the gains.
fn backward(x: &[f32], gains: &[f32], gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let width = gains.len();
    let block = ROWS * width;
    let mut dx = vec![0.0; x.len()];
    let blocks = dx.par_chunks_mut(block).zip(x.par_chunks(block));
    let parts: Vec<Vec<f32>> = blocks
        .zip(gradient.par_chunks(block))
        .map(|((dx, x), gradient)| {
            let mut dgains = vec![0.0; width];
            let rows = dx.chunks_mut(width).zip(x.chunks(width));
            for ((dx, x), gradient) in rows.zip(gradient.chunks(width)) {
                let scale = scale(x);
                let mut dot = 0.0;
                for (((x, gradient), gain), dgain) in
                    x.iter().zip(gradient).zip(gains).zip(&mut dgains)
                {
                    dot += x * gradient * gain;
                    *dgain += x * gradient * scale;
                }
                let projection = dot * scale * scale * scale / width as f32;
                for (((dx, x), gradient), gain) in dx.iter_mut().zip(x).zip(gradient).zip(gains) {
                    *dx = gradient * gain * scale - x * projection;
                }
            }
            dgains
        })
        .collect();
    let mut dgains = vec![0.0; width];
    for part in parts {
        dgains
            .iter_mut()
            .zip(part)
            .for_each(|(sum, part)| *sum += part);
    }
    (dx, dgains)
}
