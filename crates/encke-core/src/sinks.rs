//! Sinks: one more term in each softmax, without a key and without a value (spec section 10).
//!
//! They are added to finished rows (see `denominator`); here are their check and their gradient.

use crate::error::{Error, Result};
use crate::tensor::View;

/// An error unless there is one sink for each of `heads` heads.
pub fn check(sinks: &[f64], heads: usize) -> Result<()> {
    match sinks.len() == heads {
        true => Ok(()),
        false => Err(Error::ShapeMismatch {
            tensor: "sinks",
            got: vec![sinks.len()],
            expected: vec![heads],
        }),
    }
}

/// The gradient of the sinks, from out and lse with them: −Σ exp(sink − lse)·(dout·out − dlse).
pub fn gradient(
    sinks: &[f64],
    [out, lse, dout]: [&View<'_>; 3],
    dlse: Option<&View<'_>>,
) -> Result<Vec<f64>> {
    let [batch, tokens, heads, dim] = out.dims();
    check(sinks, heads)?;
    let mut gradient = vec![0.0; heads];
    for (b, t) in (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t))) {
        for (head, sum) in gradient.iter_mut().enumerate() {
            let at = |of: &View<'_>, c: usize| of.data().get(of.row(b, t, head) + c);
            let products = (0..dim).map(|c| at(out, c) * at(dout, c));
            let delta = products.sum::<f64>() - dlse.map_or(0.0, |of| at(of, 0));
            if sinks[head] > f64::NEG_INFINITY {
                *sum -= (sinks[head] - at(lse, 0)).exp() * delta;
            }
        }
    }
    Ok(gradient)
}
