//! The operations on cells: merge, finish and delta, each on random inputs of its own.
//!
//! The decision here: inputs include every state of a carry (empty on either side or both, scores
//! of ±1e4), and buffers are longer than the requested cells, to detect writes past the end.

use super::bench::KernelBench;
use super::failure::Failure;
use super::random::Random;
use super::tolerances::{base, floor};
use crate::dtype::{DType, Data};
use crate::job::{Block, Operand};
use crate::kernel::{Carry, Kernel};
use crate::naive::NaiveKernel;

/// One random case of each operation.
pub(super) fn check<K: Kernel>(bench: &KernelBench<'_, K>) -> Result<(), Failure> {
    let random = &mut Random::new(bench.seed ^ 0xce11);
    merge(bench, random)?;
    finish(bench, random)?;
    delta(bench, random)
}

/// A carry of `cells` cells, some of them empty.
fn carry(random: &mut Random, sum: DType, cells: usize, dim: usize) -> Carry<Data> {
    let (mut acc, mut m, mut l) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..cells {
        let seen = !random.once_in(3);
        let weight = 1.0 + 20.0 * random.unit().abs();
        let height = random.pick(&[1.0, 5.0, 1e4]) * random.unit();
        m.push(if seen { height } else { f64::NEG_INFINITY });
        l.push(if seen { weight } else { 0.0 });
        acc.extend((0..dim).map(|_| if seen { weight * random.unit() } else { 0.0 }));
    }
    Carry {
        acc: Data::from_f64(sum, &acc),
        m: Data::from_f64(sum, &m),
        l: Data::from_f64(sum, &l),
    }
}

fn widened(carry: &Carry<Data>) -> Carry<Data> {
    Carry {
        acc: Data::F64(carry.acc.to_f64()),
        m: Data::F64(carry.m.to_f64()),
        l: Data::F64(carry.l.to_f64()),
    }
}

impl<K: Kernel> KernelBench<'_, K> {
    fn put_carry(&self, carry: &Carry<Data>) -> Result<Carry<K::Buffer>, Failure> {
        Ok(Carry {
            acc: self.put_data(&carry.acc)?,
            m: self.put_data(&carry.m)?,
            l: self.put_data(&carry.l)?,
        })
    }
}

/// Scattered cells: every second one of a segment, heads in reverse.
fn scattered(random: &mut Random, segments: usize, rows: usize, heads: usize) -> (Operand, usize) {
    let slots = heads + random.below(2);
    let stride = slots * (1 + random.below(2));
    let segment = stride * rows + random.below(3);
    let operand = Operand {
        offset: random.below(4),
        batch: segment * segments,
        segment,
        row: stride,
        heads: (0..heads).rev().collect(),
    };
    let cells = operand.offset + 2 * segment * segments + random.below(3);
    (operand, cells)
}

fn merge<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let sum = bench.dtype.sum();
    let (segments, rows, heads) = (random.size(3), random.size(20), random.size(4));
    let dim = random.pick(&[1, 3, 16, 64]);
    let (from, from_cells) = scattered(random, segments, rows, heads);
    let (to, to_cells) = scattered(random, segments, rows, heads);
    let block = Block {
        batch: 2,
        segments,
        rows,
        heads,
        width: dim,
        from,
        to,
    };
    let source = carry(random, sum, from_cells, dim);
    let before = carry(random, sum, to_cells, dim);
    let mut expected = widened(&before);
    bench.done(NaiveKernel.merge(&block, &widened(&source), &mut expected))?;

    let source = bench.put_carry(&source)?;
    let mut target = bench.put_carry(&before)?;
    bench.done(bench.kernel.merge(&block, &source, &mut target))?;
    let after = bench.get_carry(to_cells, dim, &target)?;

    let mut touched = vec![false; to_cells];
    block.addresses().for_each(|(_, cell)| touched[cell] = true);
    bench.unchanged("merge", &before.m, &after.m, |i| touched[i])?;
    bench.unchanged("merge", &before.l, &after.l, |i| touched[i])?;
    bench.unchanged("merge", &before.acc, &after.acc, |i| touched[i / dim])?;
    let got = ends(&after, dim);
    let expected = ends(&expected, dim);
    // A difference of maxima up to 2e4 is rounded before it is exponentiated.
    let noise = base(bench.dtype) + 4e4 * sum.epsilon();
    let pairs = got.0.into_iter().zip(expected.0);
    bench.close("the output after merge", pairs, noise)?;
    let pairs = got.1.into_iter().zip(expected.1);
    bench.close("the lse after merge", pairs, noise)
}

/// Output and lse, computed from the definition.
fn ends(carry: &Carry<Data>, dim: usize) -> (Vec<f64>, Vec<f64>) {
    let (acc, m, l) = (carry.acc.to_f64(), carry.m.to_f64(), carry.l.to_f64());
    let seen = |cell: usize| l[cell] != 0.0;
    let out = |i: usize| {
        if seen(i / dim) {
            acc[i] / l[i / dim]
        } else {
            acc[i]
        }
    };
    let lse = |cell: usize| {
        if seen(cell) {
            m[cell] + l[cell].ln()
        } else {
            m[cell]
        }
    };
    (
        (0..acc.len()).map(out).collect(),
        (0..m.len()).map(lse).collect(),
    )
}

fn finish<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let (dtype, sum) = (bench.dtype, bench.dtype.sum());
    let (cells, dim) = (random.size(80), random.pick(&[1, 2, 3, 16, 40, 128]));
    let (beyond, gain) = (1 + random.below(3), random.pick(&[1.0, 0.5, 0.3]));
    let all = cells + beyond;
    let carry = carry(random, sum, all, dim);
    let (mut out, mut lse) = (
        Data::zeros(DType::F64, all * dim),
        Data::zeros(DType::F64, all),
    );
    bench.done(NaiveKernel.finish(cells, dim, gain, &widened(&carry), &mut out, &mut lse))?;

    // Outputs are tested in the input type and in the accumulation type.
    let narrow = random.pick(&[dtype, dtype, sum]);
    let marks = vec![7.5; all * dim];
    let mut got_out = bench.put(narrow, &marks)?;
    let mut got_lse = bench.put(sum, &marks[..all])?;
    let carry = bench.put_carry(&carry)?;
    let kernel = bench.kernel;
    bench.done(kernel.finish(cells, dim, gain, &carry, &mut got_out, &mut got_lse))?;
    let got_out = bench.get(narrow, all * dim, &got_out)?;
    let got_lse = bench.get(sum, all, &got_lse)?;
    let marked = Data::from_f64(narrow, &marks);
    bench.unchanged("finish", &marked, &got_out, |i| i < cells * dim)?;
    let marked = Data::from_f64(sum, &marks[..all]);
    bench.unchanged("finish", &marked, &got_lse, |i| i < cells)?;
    let pairs = got_out.to_f64().into_iter().zip(out.to_f64());
    let noise = base(dtype) + floor(narrow);
    bench.close("the output", pairs.take(cells * dim), noise)?;
    let noise = 1e4 * sum.epsilon() + base(dtype);
    let pairs = got_lse.to_f64().into_iter().zip(lse.to_f64());
    bench.close("the lse", pairs.take(cells), noise)
}

fn delta<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let (dtype, sum) = (bench.dtype, bench.dtype.sum());
    let (cells, dim) = (random.size(80), random.pick(&[1, 2, 3, 16, 40, 128]));
    let all = cells + 1 + random.below(3);
    let mut values = |dtype: DType, count: usize| {
        let value = |_| dtype.round(random.unit());
        (0..count).map(value).collect::<Vec<f64>>()
    };
    let (out, dout) = (values(dtype, all * dim), values(dtype, all * dim));
    let dlse = values(sum, all);
    let dlse = random.once_in(2).then_some(dlse);
    let mut expected = Data::zeros(DType::F64, all);
    let wide = |values: &[f64]| Data::F64(values.to_vec());
    let wide_dlse = dlse.as_deref().map(wide);
    let (o, g) = (wide(&out), wide(&dout));
    let (o, g) = (o.as_slice(), g.as_slice());
    let wide_dlse = wide_dlse.as_ref().map(Data::as_slice);
    bench.done(NaiveKernel.delta(cells, dim, o, g, wide_dlse, &mut expected))?;

    let (out, dout) = (bench.put(dtype, &out)?, bench.put(dtype, &dout)?);
    let dlse = dlse.map(|values| bench.put(sum, &values)).transpose()?;
    let marks = vec![7.5; all];
    let mut got = bench.put(sum, &marks)?;
    let kernel = bench.kernel;
    let dlse = dlse.as_ref().map(|dlse| kernel.input(dlse));
    let (out, dout) = (kernel.input(&out), kernel.input(&dout));
    bench.done(kernel.delta(cells, dim, out, dout, dlse, &mut got))?;
    let got = bench.get(sum, all, &got)?;
    bench.unchanged("delta", &Data::from_f64(sum, &marks), &got, |i| i < cells)?;
    let pairs = got.to_f64().into_iter().zip(expected.to_f64());
    let size = (dim as f64).sqrt();
    bench.close("delta", pairs.take(cells), base(dtype) * size)
}
