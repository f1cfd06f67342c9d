//! Cross-entropy of logits, in one pass forward and one backward.

use anyhow::Context;
use candle_core::{CpuStorage, CustomOp1, Error, Layout, Result, Shape, Storage, Tensor};
use rayon::prelude::*;

/// The mean loss of rows of logits `[rows, symbols]`, in nats.
pub fn cross_entropy(logits: &Tensor, targets: Vec<u32>) -> anyhow::Result<Tensor> {
    let (rows, symbols) = logits.dims2()?;
    anyhow::ensure!(
        rows == targets.len(),
        "{rows} rows of logits have {} targets",
        targets.len()
    );
    let most = targets.iter().max().context("a loss has rows")?;
    anyhow::ensure!(
        (*most as usize) < symbols,
        "target {most} is not below {symbols} symbols"
    );
    Ok(logits.contiguous()?.apply_op1(CrossEntropy { targets })?)
}

struct CrossEntropy {
    targets: Vec<u32>,
}

/// The maximum of a row, and the sum of `exp(x - maximum)`.
fn maximum_and_sum(row: &[f32]) -> (f32, f32) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (most, row.iter().map(|x| (x - most).exp()).sum())
}

fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let (from, to) = layout
        .contiguous_offsets()
        .ok_or_else(|| Error::msg("logits are not contiguous: a bug in longnet"))?;
    Ok(&storage.as_slice::<f32>()?[from..to])
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = elements(logits, layout)?;
        let rows = self.targets.len();
        let losses: Vec<f64> = logits
            .par_chunks(logits.len() / rows)
            .zip(&self.targets)
            .map(|(row, target)| {
                let (most, sum) = maximum_and_sum(row);
                f64::from(most + sum.ln() - row[*target as usize])
            })
            .collect();
        let mean = losses.iter().sum::<f64>() / rows as f64;
        Ok((CpuStorage::F32(vec![mean as f32]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let rows = self.targets.len();
        let each = gradient.to_scalar::<f32>()? / rows as f32;
        let (storage, layout) = logits.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            return Err(Error::msg("logits are not on the CPU: a bug in longnet"));
        };
        let values = elements(storage, layout)?;
        let symbols = values.len() / rows;
        let mut dlogits = vec![0.0; values.len()];
        let by_row = dlogits
            .par_chunks_mut(symbols)
            .zip(values.par_chunks(symbols));
        by_row
            .zip(&self.targets)
            .for_each(|((dlogits, row), target)| {
                let (most, sum) = maximum_and_sum(row);
                for (dlogit, x) in dlogits.iter_mut().zip(row) {
                    *dlogit = (x - most).exp() / sum * each;
                }
                dlogits[*target as usize] -= each;
            });
        Ok(Some(Tensor::from_vec(
            dlogits,
            logits.dims(),
            logits.device(),
        )?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};

    use super::cross_entropy;

    #[test]
    fn loss_and_gradient_equal_candles_own() {
        let values: Vec<f32> = (0..7 * 5).map(|i| (i as f32 * 1.7).sin() * 4.0).collect();
        let logits =
            Var::from_tensor(&Tensor::from_vec(values, (7, 5), &Device::Cpu).unwrap()).unwrap();
        let targets: Vec<u32> = vec![0, 4, 2, 2, 1, 3, 0];
        let ours = (cross_entropy(&logits, targets.clone()).unwrap() * 3.0).unwrap();
        let targets = Tensor::from_vec(targets, 7, &Device::Cpu).unwrap();
        let theirs = (candle_nn::loss::cross_entropy(&logits, &targets).unwrap() * 3.0).unwrap();
        let number = |x: &Tensor| x.to_scalar::<f32>().unwrap();
        assert!((number(&ours) - number(&theirs)).abs() < 1e-6);
        let gradient = |loss: &Tensor| {
            let gradient = loss.backward().unwrap().get(&logits).unwrap().clone();
            gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        for (ours, theirs) in gradient(&ours).iter().zip(gradient(&theirs)) {
            assert!((ours - theirs).abs() < 1e-6);
        }
        assert!(cross_entropy(&logits, vec![5; 7]).is_err());
        assert!(cross_entropy(&logits, vec![0; 6]).is_err());
    }
}
