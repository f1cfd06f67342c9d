//! Results of the operations on a case.

use crate::dtype::Data;
use crate::kernel::Carry;

/// Gradients of a case: dq, and dk and dv of each part.
pub(super) struct CaseGradients {
    pub dq: Data,
    pub keys: Vec<(Data, Data)>,
}

/// What the backward pass reads of the forward pass, exact in the accumulation type.
#[derive(Clone)]
pub(super) struct ForwardResults {
    pub lse: Vec<f64>,
    pub delta: Vec<f64>,
}

/// Output and lse of every cell of a carry, computed from the definition instead of by the kernel.
pub(super) fn finished(carry: &Carry<Data>) -> (Vec<f64>, Vec<f64>) {
    let (acc, m, l) = (carry.acc.to_f64(), carry.m.to_f64(), carry.l.to_f64());
    let dim = acc.len() / l.len();
    let mean = |(i, x): (usize, &f64)| {
        if l[i / dim] == 0.0 {
            0.0
        } else {
            x / l[i / dim]
        }
    };
    let out = acc.iter().enumerate().map(mean).collect();
    let lse = m.iter().zip(&l).map(|(m, l)| {
        if *l == 0.0 {
            f64::NEG_INFINITY
        } else {
            m + l.ln()
        }
    });
    (out, lse.collect())
}
