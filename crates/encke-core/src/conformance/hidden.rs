//! Masked elements must not affect any bit of a result.
//!
//! A mask that multiplies by 0 passes every test with finite values. So masked keys, and queries
//! without keys, are filled with NaN and infinities here.

use super::bench::KernelBench;
use super::case::{Case, PairAddresses};
use super::failure::Failure;
use super::random::Random;
use super::results::{CaseGradients, ForwardResults};
use crate::dtype::Data;
use crate::kernel::{Carry, Kernel};

/// A masked key must not change any bit of a row, whatever the key contains.
pub(super) fn keys<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    results: &ForwardResults,
    carry: &Carry<Data>,
    grown: &CaseGradients,
) -> Result<(), Failure> {
    let mut random = Random::new(bench.seed ^ 0x5eed);
    let changed = random.below(case.parts.len());
    let t = random.below(case.parts[changed].job.keys);
    let value = random.pick(&[0.25, f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
    let mut other = case.clone();
    let part = &mut other.parts[changed];
    let mut keys = vec![false; part.k.len()];
    for at in part.key_addresses(t) {
        part.k[at..at + case.dim].fill(value);
        let of_value = part.job.value(at);
        part.v[of_value..of_value + case.value_dim].fill(value);
        keys[at..at + case.dim].fill(true);
    }
    let mut cells = vec![false; case.cells];
    let mut queries = vec![false; case.dq.len()];
    case.pairs(|pair| {
        if pair.part == changed && pair.key_row == t {
            cells[pair.cell] = true;
            queries[pair.dq..pair.dq + case.dim].fill(true);
        }
    });
    let what = format!("making key {t} of job {changed} {value}, which is masked,");
    same_carry(bench, &what, carry, &bench.forward(&other)?, |cell| {
        cells[cell]
    })?;
    let after = bench.backward(&other, results)?;
    let free_keys = |part: usize, i: usize| part == changed && keys[i];
    same_gradients(bench, &what, grown, &after, |i| queries[i], free_keys)
}

/// A query whose lse is minus infinity must not change any bit of a gradient, whatever its upstream
/// gradient is.
pub(super) fn queries<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    results: &ForwardResults,
    grown: &CaseGradients,
) -> Result<(), Failure> {
    let (mut other, mut silent) = (case.clone(), results.clone());
    for cell in (0..case.cells).filter(|&cell| results.lse[cell] == f64::NEG_INFINITY) {
        other.dout[cell * case.value_dim..(cell + 1) * case.value_dim].fill(f64::NAN);
        silent.delta[cell] = f64::NAN;
    }
    let after = bench.backward(&other, &silent)?;
    let what = "a NaN in the upstream gradient of queries without keys";
    same_gradients(bench, what, grown, &after, |_| false, |_, _| false)
}

/// A non-finite element in a query row, or in its output gradient, must not change any bit of the
/// gradients of keys that the query does not see.
pub(super) fn broken<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    results: &ForwardResults,
    grown: &CaseGradients,
) -> Result<(), Failure> {
    let mut random = Random::new(bench.seed ^ 0xbad);
    let mut rows = Vec::new();
    case.pairs(|pair| {
        if results.lse[pair.cell] != f64::NEG_INFINITY {
            rows.push((pair.q, pair.cell));
        }
    });
    rows.sort_unstable();
    rows.dedup();
    if rows.is_empty() {
        return Ok(());
    }
    let (q, cell) = rows[random.below(rows.len())];
    let channel = random.below(case.dim);
    let value = random.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
    let (mut other, mut after) = (case.clone(), results.clone());
    // What forward and delta compute for such a row: no finite score, and so no finite lse.
    let whose = match random.once_in(2) {
        true => {
            other.q[q + channel] = value;
            for &(_, cell) in rows.iter().filter(|row| row.0 == q) {
                after.lse[cell] = random.pick(&[f64::NAN, f64::INFINITY]);
                after.delta[cell] = f64::NAN;
            }
            "query"
        }
        false => {
            other.dout[cell * case.value_dim + channel % case.value_dim] = value;
            after.delta[cell] = f64::NAN;
            "output gradient"
        }
    };
    let mut queries = vec![false; case.dq.len()];
    let keys = case.parts.iter().map(|part| vec![false; part.k.len()]);
    let mut keys: Vec<Vec<bool>> = keys.collect();
    case.pairs(|pair| {
        if pair.cell == cell || pair.q == q {
            queries[pair.dq..pair.dq + case.dim].fill(true);
            keys[pair.part][pair.key..pair.key + case.dim].fill(true);
        }
    });
    let what = format!("{value} in the {whose} of cell {cell}, masked for other keys,");
    let grown_then = bench.backward(&other, &after)?;
    let seen = |part: usize, i: usize| keys[part][i];
    same_gradients(bench, &what, grown, &grown_then, |i| queries[i], seen)
}

/// A value, or an output gradient, that is not finite must not change any bit of what its dropped
/// pairs add to.
pub(super) fn dropped<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    results: &ForwardResults,
    carry: &Carry<Data>,
    grown: &CaseGradients,
) -> Result<(), Failure> {
    let is_dropped = |pair: &PairAddresses| {
        let job = &case.parts[pair.part].job;
        job.dropout_factor(pair.at, pair.query_row, pair.key_row) == 0.0
    };
    let mut pairs = Vec::new();
    case.pairs(|pair| {
        if results.lse[pair.cell] != f64::NEG_INFINITY && is_dropped(&pair) {
            pairs.push((pair.part, pair.value, pair.cell));
        }
    });
    if pairs.is_empty() || !bench.suite.dropped_values {
        return Ok(());
    }
    let mut random = Random::new(bench.seed ^ 0xd20b);
    let (part, value, cell) = pairs[random.below(pairs.len())];
    let channel = random.below(case.value_dim);
    let element = random.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);

    let mut other = case.clone();
    other.parts[part].v[value + channel] = element;
    let mut seen = SeenPairs::new(case);
    case.pairs(|pair| {
        if (pair.part, pair.value) == (part, value) && !is_dropped(&pair) {
            seen.add(case, &pair);
        }
    });
    let what = format!("{element} in the value at {value} of job {part}, where it is dropped,");
    let after = bench.forward(&other)?;
    bench.unchanged(&what, &carry.m, &after.m, |_| false)?;
    bench.unchanged(&what, &carry.l, &after.l, |_| false)?;
    let free = |i: usize| seen.cells[i / case.value_dim];
    bench.unchanged(&what, &carry.acc, &after.acc, free)?;
    seen.check(
        bench,
        &what,
        grown,
        &bench.backward(&other, results)?,
        |_, _| false,
    )?;

    let mut other = case.clone();
    other.dout[cell * case.value_dim + channel] = element;
    let (mut seen, values) = (SeenPairs::new(case), case.parts.iter());
    let mut values: Vec<Vec<bool>> = values.map(|part| vec![false; part.v.len()]).collect();
    case.pairs(|pair| {
        if pair.cell == cell && !is_dropped(&pair) {
            seen.add(case, &pair);
            values[pair.part][pair.value..pair.value + case.value_dim].fill(true);
        }
    });
    let what = format!("{element} in the output gradient of cell {cell}, for dropped keys,");
    let after = bench.backward(&other, results)?;
    seen.check(bench, &what, grown, &after, |part, i| values[part][i])
}

/// What some pairs add to: cells, and elements of dq and of dk.
struct SeenPairs {
    cells: Vec<bool>,
    queries: Vec<bool>,
    keys: Vec<Vec<bool>>,
}

impl SeenPairs {
    fn new(case: &Case) -> SeenPairs {
        let keys = case.parts.iter().map(|part| vec![false; part.k.len()]);
        SeenPairs {
            cells: vec![false; case.cells],
            queries: vec![false; case.dq.len()],
            keys: keys.collect(),
        }
    }

    fn add(&mut self, case: &Case, pair: &PairAddresses) {
        self.cells[pair.cell] = true;
        self.queries[pair.dq..pair.dq + case.dim].fill(true);
        self.keys[pair.part][pair.key..pair.key + case.dim].fill(true);
    }

    /// Fails if gradients differ elsewhere; those of values, where `free_value` is false.
    fn check<K: Kernel>(
        &self,
        bench: &KernelBench<'_, K>,
        what: &str,
        before: &CaseGradients,
        after: &CaseGradients,
        free_value: impl Fn(usize, usize) -> bool,
    ) -> Result<(), Failure> {
        bench.same_gradient(what, &before.dq, &after.dq, |i| self.queries[i])?;
        for (part, (x, y)) in before.keys.iter().zip(&after.keys).enumerate() {
            bench.same_gradient(what, &x.0, &y.0, |i| self.keys[part][i])?;
            bench.same_gradient(what, &x.1, &y.1, |i| free_value(part, i))?;
        }
        Ok(())
    }
}

/// Fails if any bit of a carry differs in a cell for which `free` is false.
pub(super) fn same_carry<K: Kernel>(
    bench: &KernelBench<'_, K>,
    what: &str,
    before: &Carry<Data>,
    after: &Carry<Data>,
    free: impl Fn(usize) -> bool,
) -> Result<(), Failure> {
    let dim = before.acc.as_slice().len() / before.m.as_slice().len();
    bench.unchanged(what, &before.m, &after.m, &free)?;
    bench.unchanged(what, &before.l, &after.l, &free)?;
    bench.unchanged(what, &before.acc, &after.acc, |i| free(i / dim))
}

/// Fails if gradients differ in an element for which `free_query` or `free_key` is false. Elements
/// of dv are free if those of dk in the same row are.
pub(super) fn same_gradients<K: Kernel>(
    bench: &KernelBench<'_, K>,
    what: &str,
    before: &CaseGradients,
    after: &CaseGradients,
    free_query: impl Fn(usize) -> bool,
    free_key: impl Fn(usize, usize) -> bool,
) -> Result<(), Failure> {
    bench.same_gradient(what, &before.dq, &after.dq, free_query)?;
    for (part, (x, y)) in before.keys.iter().zip(&after.keys).enumerate() {
        bench.same_gradient(what, &x.0, &y.0, |i| free_key(part, i))?;
        let [keys, values] = [&x.0, &x.1].map(|data| data.as_slice().len());
        bench.same_gradient(what, &x.1, &y.1, |i| free_key(part, i * keys / values))?;
    }
    Ok(())
}
