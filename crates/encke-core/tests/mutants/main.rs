//! Tests of the conformance suites: correct implementations pass and every known wrong one fails.
//!
//! The mutants have the mistakes of spec section 2, which exist in published code, and similar
//! ones. Each is a thin wrapper that changes one thing, so only that can make it fail.

mod dropped;
mod fault;
mod masks;
mod misread;

use std::sync::Mutex;

use encke_core::conformance::{self, KernelSuite};
use encke_core::dtype::Slice;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, Result, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::naive::NaiveKernel;
use encke_core::partial::Partial;
use encke_core::plan::Pass;
use encke_core::sharding::Run;
use encke_core::{DType, Data, Tensor, View};

use dropped::{leave_out_dropped, poison_dropped, values_where_keys_are};
use fault::{FAULTS, KernelFault};
use misread::misread;

/// The oracle with one fault.
struct KernelMutant(KernelFault);

/// Every cell of a job, with `more` additional rows.
fn cells(job: &Job, more: usize) -> Vec<usize> {
    let mut cells = Vec::new();
    for b in 0..job.batch {
        for s in 0..job.segments {
            for i in 0..job.queries + more {
                cells.extend((0..job.heads).map(|h| job.cells.at(b, s, i, h)));
            }
        }
    }
    cells
}

fn clone(Carry { acc, m, l }: &Carry<Data>) -> Carry<Data> {
    let [acc, m, l] = [acc, m, l].map(Data::clone);
    Carry { acc, m, l }
}

fn reset(carry: &mut Carry<Data>, cells: &[usize], dim: usize) {
    for &cell in cells {
        (0..dim).for_each(|c| carry.acc.set(cell * dim + c, 0.0));
        carry.m.set(cell, f64::NEG_INFINITY);
        carry.l.set(cell, 0.0);
    }
}

/// Adds one carry to another as if both had the same row max.
fn add_unscaled(old: &Carry<Data>, new: &mut Carry<Data>, cells: &[usize], dim: usize) {
    let add = |old: &Data, new: &mut Data, i: usize| {
        let sum = old.as_slice().get(i) + new.as_slice().get(i);
        new.set(i, sum);
    };
    for &cell in cells {
        let m = old.m.as_slice().get(cell).max(new.m.as_slice().get(cell));
        (0..dim).for_each(|c| add(&old.acc, &mut new.acc, cell * dim + c));
        add(&old.l, &mut new.l, cell);
        new.m.set(cell, m);
    }
}

/// Makes weights relative to a row max that is half a unit in the last place smaller.
fn shift_max(carry: &mut Carry<Data>, cells: &[usize], dim: usize) {
    let unit = carry.m.as_slice().dtype().epsilon();
    for &cell in cells {
        let m = carry.m.as_slice().get(cell);
        let factor = if m.is_finite() {
            (m * unit / 2.0).exp()
        } else {
            1.0
        };
        let shift = |data: &mut Data, i: usize| data.set(i, factor * data.as_slice().get(i));
        (0..dim).for_each(|c| shift(&mut carry.acc, cell * dim + c));
        shift(&mut carry.l, cell);
    }
}

/// Calls `each` with batch entry, segment, head, query and key of every masked pair.
fn hidden_pairs(job: &Job, mut each: impl FnMut(usize, usize, usize, usize, usize)) {
    for b in 0..job.batch {
        for (s, h) in (0..job.segments).flat_map(|s| (0..job.heads).map(move |h| (s, h))) {
            for i in 0..job.queries {
                let hidden = |j: &usize| !job.visible(i).contains(j);
                (0..job.keys)
                    .filter(hidden)
                    .for_each(|j| each(b, s, h, i, j));
            }
        }
    }
}

/// Adds 0 times the values of masked keys to the rows that do not see them.
fn poison(job: &Job, v: Slice<'_>, carry: &mut Carry<Data>) {
    hidden_pairs(job, |b, s, h, i, j| {
        let cell = job.cells.at(b, s, i, h) * job.value_dim;
        let value = v.get(job.value(job.k.at(b, s, j, h)));
        let x = carry.acc.as_slice().get(cell) + 0.0 * value;
        carry.acc.set(cell, x);
    });
}

/// Adds 0 times queries and their output gradients to the gradients of keys they do not see.
fn poison_keys(
    job: &Job,
    q: Slice<'_>,
    upstream: Upstream<Slice<'_>>,
    dk: &mut Data,
    dv: &mut Data,
) {
    let dout = upstream.dout;
    hidden_pairs(job, |b, s, h, i, j| {
        let (query, cell) = (job.q.at(b, s, i, h), job.cells.at(b, s, i, h));
        let key = job.k.at(b, s, j, h);
        if upstream.lse.get(cell) == f64::NEG_INFINITY {
            return; // that would be a different fault
        }
        for c in 0..job.dim {
            let x = dk.as_slice().get(key + c) + 0.0 * q.get(query + c);
            dk.set(key + c, x);
        }
        for c in 0..job.value_dim {
            let at = job.value(key) + c;
            let x = dv.as_slice().get(at) + 0.0 * dout.get(cell * job.value_dim + c);
            dv.set(at, x);
        }
    });
}

impl KernelMutant {
    fn accumulate(
        &self,
        job: &Job,
        [q, k, v]: [Slice<'_>; 3],
        starts: bool,
        carry: &mut Carry<Data>,
    ) -> Result<()> {
        let job = misread(self.0, job, Pass::Forward);
        let misplaced = match self.0 {
            KernelFault::ValuesWhereKeysAre => Some(values_where_keys_are(&job, v)),
            _ => None,
        };
        let v = misplaced.as_ref().map_or(v, Data::as_slice);
        let inside = cells(&job, 0);
        let old = clone(carry);
        if matches!(
            self.0,
            KernelFault::CarryReset | KernelFault::OldPartNotRescaled
        ) {
            reset(carry, &inside, job.value_dim);
        }
        let reads = self.0 == KernelFault::BeginReadsCarry;
        let state = SoftmaxState::Accumulate {
            starts: starts && !reads,
            carry: &mut *carry,
        };
        NaiveKernel.attend(&job, q, k, v, state)?;
        match self.0 {
            KernelFault::BeginLeavesEmptyCells if starts => {
                let saw_nothing = |&&cell: &&usize| carry.l.as_slice().get(cell) == 0.0;
                let empty: Vec<usize> = inside.iter().filter(saw_nothing).copied().collect();
                for cell in empty {
                    carry.l.set(cell, old.l.as_slice().get(cell));
                }
            }
            KernelFault::OldPartNotRescaled => add_unscaled(&old, carry, &inside, job.value_dim),
            KernelFault::MaxNotRounded => shift_max(carry, &inside, job.value_dim),
            KernelFault::MaskedKeysPoison => poison(&job, v, carry),
            KernelFault::DroppedValuesPoison => poison_dropped(&job, v, carry),
            KernelFault::DroppedLeavesDenominator => leave_out_dropped(&job, [q, k], carry),
            KernelFault::OneRowPast => {
                let past = cells(&job, 1).into_iter().filter(|x| !inside.contains(x));
                let limit = carry.m.as_slice().len();
                past.filter(|&x| x < limit)
                    .for_each(|x| carry.m.set(x, 0.0));
            }
            _ => {}
        }
        Ok(())
    }

    fn conclude(
        &self,
        job: &Job,
        [q, k, v]: [Slice<'_>; 3],
        carry: &Carry<Data>,
        out: &mut Data,
        lse: &mut Data,
    ) -> Result<()> {
        let mut job = misread(self.0, job, Pass::Forward);
        let (old_out, old_lse) = (out.clone(), lse.clone());
        let mut carry = clone(carry);
        match self.0 {
            KernelFault::ConcludeForgetsCarry => reset(&mut carry, &cells(&job, 0), job.value_dim),
            KernelFault::ConcludeIgnoresGain => job.gain = 1.0,
            _ => {}
        }
        let state = SoftmaxState::Finish {
            carry: Some(&carry),
            out: &mut *out,
            lse: &mut *lse,
        };
        NaiveKernel.attend(&job, q, k, v, state)?;
        if self.0 == KernelFault::ConcludeLeavesUnseen {
            for i in (0..job.queries).filter(|&i| job.visible(i).is_empty()) {
                let row = Job {
                    queries: 1,
                    cells: encke_core::job::Operand {
                        offset: job.cells.offset + i * job.cells.row,
                        ..job.cells.clone()
                    },
                    ..job.clone()
                };
                for cell in cells(&row, 0) {
                    lse.set(cell, old_lse.as_slice().get(cell));
                    for c in cell * job.value_dim..(cell + 1) * job.value_dim {
                        out.set(c, old_out.as_slice().get(c));
                    }
                }
            }
        }
        Ok(())
    }

    fn attend_alone(
        &self,
        job: &Job,
        [q, k, v]: [Slice<'_>; 3],
        out: &mut Data,
        lse: &mut Data,
    ) -> Result<()> {
        let mut job = misread(self.0, job, Pass::Forward);
        if self.0 == KernelFault::AttendIgnoresGain {
            job.gain = 1.0;
        }
        let state = SoftmaxState::Finish {
            carry: None,
            out: &mut *out,
            lse: &mut *lse,
        };
        NaiveKernel.attend(&job, q, k, v, state)?;
        if self.0 == KernelFault::AttendLeavesEmptyCells {
            let seen = |&cell: &usize| lse.as_slice().get(cell) == f64::NEG_INFINITY;
            let empty: Vec<usize> = cells(&job, 0).into_iter().filter(seen).collect();
            empty.into_iter().for_each(|cell| lse.set(cell, 7.5));
        }
        Ok(())
    }
}

impl Memory for KernelMutant {
    type Buffer = Data;
    type Input<'a> = Slice<'a>;

    fn name(&self) -> &'static str {
        "mutant"
    }

    fn input<'a>(&self, buffer: &'a Data) -> Slice<'a> {
        buffer.as_slice()
    }

    fn borrow<'a>(&self, elements: Slice<'a>) -> Option<Slice<'a>> {
        Some(elements)
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Result<Data> {
        NaiveKernel.allocate(dtype, elements)
    }

    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Data) -> Result<()> {
        let unit = |run: &Run| Run { stride: 1, ..*run };
        if self.0 == KernelFault::UploadIgnoresStride {
            return NaiveKernel.upload(from, &runs.iter().map(unit).collect::<Vec<_>>(), to);
        }
        NaiveKernel.upload(from, runs, to)
    }

    fn download(&self, from: &Data, runs: &[Run], to: &mut Tensor) -> Result<()> {
        NaiveKernel.download(from, runs, to)
    }

    fn move_to_host(&self, buffer: Data) -> Result<Data> {
        Ok(buffer)
    }

    fn fill(&self, buffer: &mut Data, value: f64) -> Result<()> {
        NaiveKernel.fill(buffer, value)
    }

    fn copy(&self, block: &Block, add: bool, from: Slice<'_>, to: &mut Data) -> Result<()> {
        NaiveKernel.copy(
            block,
            add && self.0 != KernelFault::CopyIgnoresAdd,
            from,
            to,
        )
    }
}

impl Kernel for KernelMutant {
    fn attend(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        state: SoftmaxState<'_, Data>,
    ) -> Result<()> {
        match state {
            SoftmaxState::Accumulate { carry, starts } => {
                self.accumulate(job, [q, k, v], starts, carry)
            }
            SoftmaxState::Finish {
                carry: Some(carry),
                out,
                lse,
            } => self.conclude(job, [q, k, v], carry, out, lse),
            SoftmaxState::Finish {
                carry: None,
                out,
                lse,
            } => self.attend_alone(job, [q, k, v], out, lse),
        }
    }

    fn merge(&self, block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) -> Result<()> {
        let old = to.m.clone();
        NaiveKernel.merge(block, from, to)?;
        if self.0 == KernelFault::MergeKeepsMaximum {
            to.m = old;
        }
        Ok(())
    }

    fn finish(
        &self,
        cells: usize,
        dim: usize,
        gain: f64,
        carry: &Carry<Data>,
        out: &mut Data,
        lse: &mut Data,
    ) -> Result<()> {
        let mut carry = clone(carry);
        let gain = if self.0 == KernelFault::FinishIgnoresGain {
            1.0
        } else {
            gain
        };
        if self.0 == KernelFault::FinishEpsilon {
            let l = carry.l.to_f64();
            let seen = |&l: &f64| if l == 0.0 { l } else { l + 1e-8 };
            carry.l = Data::from_f64(DType::F64, &l.iter().map(seen).collect::<Vec<_>>());
        }
        NaiveKernel.finish(cells, dim, gain, &carry, out, lse)?;
        if self.0 == KernelFault::EmptyLseZero {
            let empty = |cell: &usize| lse.as_slice().get(*cell) == f64::NEG_INFINITY;
            let empty: Vec<usize> = (0..cells).filter(empty).collect();
            empty.into_iter().for_each(|cell| lse.set(cell, 0.0));
        }
        Ok(())
    }

    fn delta(
        &self,
        cells: usize,
        dim: usize,
        out: Slice<'_>,
        dout: Slice<'_>,
        dlse: Option<Slice<'_>>,
        delta: &mut Data,
    ) -> Result<()> {
        let dlse = dlse.filter(|_| self.0 != KernelFault::DeltaIgnoresDlse);
        NaiveKernel.delta(cells, dim, out, dout, dlse, delta)
    }

    fn backward(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        upstream: Upstream<Slice<'_>>,
        gradients: Gradients<'_, Data>,
    ) -> Result<()> {
        let job = misread(self.0, job, Pass::Backward { dlse: false });
        let Gradients { dq, dk, dv } = gradients;
        let old = (dq.clone(), dk.clone(), dv.clone());
        if self.0 == KernelFault::DqWhereQIs {
            // The gradient buffer is extended to q's addresses, or the fault would be a crash.
            let mut values = dq.to_f64();
            values.resize(values.len().max(q.len()), 0.0);
            *dq = Data::from_f64(dq.as_slice().dtype(), &values);
        }
        let mut lse = upstream.lse.to_f64();
        if self.0 == KernelFault::EmptyRowsContribute {
            lse.iter_mut().for_each(|x| *x = x.max(-1e3));
        }
        let mut delta = upstream.delta.to_f64();
        if self.0 == KernelFault::DeltaWhereCellsAre {
            // As above, for the addresses of cells.
            delta.resize(delta.len().max(lse.len()), 0.0);
        }
        let [lse, delta] = [lse, delta].map(|of| Data::from_f64(upstream.lse.dtype(), &of));
        let upstream = Upstream {
            lse: lse.as_slice(),
            delta: delta.as_slice(),
            ..upstream
        };
        let grown = Gradients {
            dq: &mut *dq,
            dk: &mut *dk,
            dv: &mut *dv,
        };
        NaiveKernel.backward(&job, q, k, v, upstream, grown)?;
        let change = |new: &mut Data, old: &Data, rule: &dyn Fn(f64, f64) -> f64| {
            let pairs = new.to_f64().into_iter().zip(old.to_f64());
            let keep = |(new, old)| if new == old { old } else { rule(new, old) };
            let values: Vec<f64> = pairs.map(keep).collect();
            *new = Data::from_f64(old.as_slice().dtype(), &values);
        };
        match self.0 {
            KernelFault::DqOverwritten => change(dq, &old.0, &|new, old| new - old),
            KernelFault::DkOverwritten => change(dk, &old.1, &|new, old| new - old),
            KernelFault::DkUnscaled => {
                change(dk, &old.1, &|new, old| old + (new - old) / job.scale)
            }
            KernelFault::DqWhereQIs => change(dq, &old.0, &|new, _| new),
            KernelFault::MaskedQueriesPoison => poison_keys(&job, q, upstream, dk, dv),
            _ => {}
        }
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        NaiveKernel.workspace_bytes(job, pass, dtype)
    }
}

#[test]
fn the_oracle_passes_in_every_type() {
    let suite = KernelSuite::of_this_run();
    suite.run(&NaiveKernel, &DType::ALL).unwrap();
}

#[test]
fn the_oracle_passes_with_negative_and_zero_scales() {
    let suite = KernelSuite {
        signs: true,
        ..KernelSuite::of_this_run()
    };
    suite.run(&NaiveKernel, &[DType::F64, DType::Bf16]).unwrap();
}

#[test]
fn the_oracle_passes_with_few_queries_and_many_keys() {
    let suite = KernelSuite {
        dims: &[8, 16],
        long_keys: true,
        share: (0, 20),
        ..KernelSuite::default()
    };
    suite.run(&NaiveKernel, &[DType::F64, DType::Bf16]).unwrap();
}

#[test]
fn mutants_fail_without_bitwise_repeatability_too() {
    let suite = KernelSuite {
        repeatable: false,
        ..KernelSuite::of_this_run()
    };
    suite.run(&NaiveKernel, &[DType::F32]).unwrap();
    let unsteady = |fault: &KernelFault| *fault != KernelFault::FinishEpsilon;
    on_all_cores(FAULTS.into_iter().filter(unsteady), |fault| {
        let result = suite.run(&KernelMutant(fault), &[DType::F32]);
        assert!(result.is_err(), "{fault:?} passed");
    });
}

/// Runs a check for each fault, on as many threads as there are cores.
fn on_all_cores(
    faults: impl Iterator<Item = KernelFault> + Send,
    check: impl Fn(KernelFault) + Sync,
) {
    let faults = Mutex::new(faults);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let next = faults.lock().expect("no check holds the lock").next();
                    let Some(fault) = next else {
                        return;
                    };
                    check(fault);
                }
            });
        }
    });
}

#[test]
fn the_wrapper_without_a_fault_passes() {
    let suite = KernelSuite::of_this_run();
    suite
        .run(&KernelMutant(KernelFault::None), &[DType::F64])
        .unwrap();
}

#[test]
fn every_kernel_mutant_fails() {
    on_all_cores(FAULTS.into_iter(), |fault| {
        let suite = KernelSuite::of_this_run();
        let result = suite.run(&KernelMutant(fault), &[DType::F64]);
        let failure = result.expect_err(&format!("{fault:?} passed"));
        println!("{fault:?} failed: {failure}");
    });
}

#[test]
fn large_faults_fail_in_narrow_types_too() {
    let large = |fault: &KernelFault| *fault != KernelFault::FinishEpsilon;
    on_all_cores(FAULTS.into_iter().filter(large), |fault| {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let suite = KernelSuite::of_this_run();
            let result = suite.run(&KernelMutant(fault), &[dtype]);
            assert!(result.is_err(), "{fault:?} passed in {dtype}");
        }
    });
}

#[test]
fn the_correct_merge_passes() {
    conformance::merge(|a, b| a.merge(b)).unwrap();
}

/// The merge of spec section 2 with a given combination of outputs: `combine` gets the weights
/// relative to the larger lse, the outputs of one channel and the merged lse.
fn merged(a: &Partial, b: &Partial, combine: impl Fn([f64; 2], [f64; 2], f64) -> f64) -> Partial {
    let largest = a.lse.max(b.lse);
    if largest == f64::NEG_INFINITY {
        return Partial::empty(a.out.len());
    }
    let weights = [(a.lse - largest).exp(), (b.lse - largest).exp()];
    let lse = largest + (weights[0] + weights[1]).ln();
    let pairs = a.out.iter().zip(&b.out);
    let out = pairs
        .map(|(x, y)| combine(weights, [*x, *y], lse))
        .collect();
    Partial { out, lse }
}

#[test]
fn every_wrong_merge_fails() {
    type Combine = fn([f64; 2], [f64; 2], f64) -> f64;
    let truth: Combine = |[e1, e2], [o1, o2], _| (e1 * o1 + e2 * o2) / (e1 + e2);
    conformance::merge(|a, b| merged(a, b, truth)).unwrap();
    let wrong: [(&str, Combine); 6] = [
        ("plain sum", |_, [o1, o2], _| o1 + o2),
        ("mean", |_, [o1, o2], _| (o1 + o2) / 2.0),
        ("not divided", |[e1, e2], [o1, o2], _| e1 * o1 + e2 * o2),
        ("only the old part weighted", |[e1, e2], [o1, o2], _| {
            (e1 * o1 + o2) / (e1 + e2)
        }),
        ("divided by the lse", |[e1, e2], [o1, o2], lse| {
            (e1 * o1 + e2 * o2) / lse
        }),
        ("epsilon", |[e1, e2], [o1, o2], _| {
            (e1 * o1 + e2 * o2) / (e1 + e2 + 1e-8)
        }),
    ];
    for (name, combine) in wrong {
        let result = conformance::merge(|a, b| merged(a, b, combine));
        assert!(result.is_err(), "{name} survived");
    }
}

#[test]
fn a_difference_of_infinities_dies() {
    let unguarded = |a: &Partial, b: &Partial| {
        let largest = a.lse.max(b.lse);
        let (e1, e2) = ((a.lse - largest).exp(), (b.lse - largest).exp());
        let mean = |(x, y): (&f64, &f64)| (e1 * x + e2 * y) / (e1 + e2);
        Partial {
            out: a.out.iter().zip(&b.out).map(mean).collect(),
            lse: largest + (e1 + e2).ln(),
        }
    };
    assert!(conformance::merge(unguarded).is_err());
}
