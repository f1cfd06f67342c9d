//! Attention with fixed settings, as Python calls it. The GIL is released while a pass runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use encke::plan::Plan;
use encke::sharding::Run;
use encke::{
    Attention as Library, Checkpoint, DType, Error, Forward, Pass, Pattern, Report, SavedOutput,
    Shape,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error;
use crate::host_passes::{
    PyBackwardInputs, PyForwardOutput, PyGradients, PySaved, PySizes, PyTensor, QkvInputs,
    export_forward, export_gradients, mixes, pass, phantoms, shape, with_dsinks,
};
use crate::owned::{export, unshare};
use crate::settings::{PyPatternOptions, PyRingOptions, dtype};

/// A position, and the keys of each head as (first, stride, count).
type PyVisible = (usize, Vec<Vec<(usize, usize, usize)>>);

/// Attention with fixed settings; plans and buffers are cached between calls.
#[pyclass(frozen, module = "encke._encke")]
pub(crate) struct Attention {
    library: Library,
    splits: bool,
    ring: PyRingOptions,
    options: Py<PyDict>,
    /// Nanoseconds that forward passes have spent in the library.
    spent: AtomicU64,
    /// The plans of the latest calls on a GPU.
    plans: Mutex<Vec<(PlanKey, Arc<Plan>)>>,
}

/// What a plan depends on beside the settings.
type PlanKey = (Shape, DType, Pass);

/// A forward and a backward pass of a few shapes.
const MOST_PLANS: usize = 8;

#[pymethods]
impl Attention {
    /// One dictionary holds every option; see `encke.attention`.
    #[new]
    fn new(options: &Bound<'_, PyDict>) -> PyResult<Attention> {
        let pattern: PyPatternOptions = options.extract()?;
        let ring: PyRingOptions = options.extract()?;
        let pattern = pattern.pattern()?;
        let splits = pattern.splits_slots();
        let library = ring.builder(pattern)?.build();
        Ok(Attention {
            library: library.map_err(|error| error::call(&error))?,
            splits,
            ring,
            options: options.clone().unbind(),
            spent: AtomicU64::new(0),
            plans: Mutex::default(),
        })
    }

    /// The same attention with another seed of its dropout; both share their plans and buffers.
    fn with_seed(&self, py: Python<'_>, seed: u64) -> PyResult<Attention> {
        let options = self.options.bind(py).copy()?;
        options.set_item("seed", seed)?;
        Ok(Attention {
            library: self.library.with_seed(seed),
            splits: self.splits,
            ring: options.extract()?,
            options: options.unbind(),
            spent: AtomicU64::new(0),
            plans: Mutex::default(),
        })
    }

    /// Calls whose plan was made, and calls whose plan was cached.
    #[getter]
    fn planned(&self) -> (usize, usize) {
        let stats = self.library.stats();
        (stats.plan_misses, stats.plan_hits)
    }

    /// Whether branches keep slots of their own, which are combined after attention.
    #[getter]
    pub fn splits_slots(&self) -> bool {
        self.splits
    }

    /// How many deltas a row has in a backward pass that is given those of each branch.
    fn delta_slots(&self, heads: usize) -> usize {
        let slots = self.pattern().delta_slots(heads);
        let slots = slots.iter().flatten().map(|(_, slot)| slot + 1);
        slots.max().unwrap_or(0)
    }

    /// Whether a call on a GPU needs more than its kernels: phantom keys, or branches whose mixing
    /// weights have no gradient.
    #[getter]
    fn mixes(&self) -> bool {
        mixes(self.library.pattern())
    }

    /// The options it was made with.
    #[getter]
    fn options(&self, py: Python<'_>) -> Py<PyDict> {
        self.options.clone_ref(py)
    }

    /// Whether the backward pass recomputes the forward pass.
    #[getter]
    fn recomputes(&self) -> bool {
        self.ring.recomputes()
    }

    /// The compute type, if it is not that of the inputs.
    #[getter]
    fn precision(&self) -> PyResult<Option<String>> {
        Ok(self.ring.computed()?.map(|dtype| dtype.to_string()))
    }

    /// The number of slots of `heads` heads.
    fn slots(&self, heads: usize) -> usize {
        self.library.pattern().slots(heads).len()
    }

    /// (out, lse, slot_out, slot_lse); the last two are None unless branches keep slots of their
    /// own. `sinks` has one element for each query head.
    #[pyo3(signature = (q, k, v, sinks=None))]
    fn forward(
        &self,
        py: Python<'_>,
        q: &PyTensor<'_>,
        k: &PyTensor<'_>,
        v: &PyTensor<'_>,
        sinks: Option<Vec<f64>>,
    ) -> PyResult<PyForwardOutput> {
        let inputs = QkvInputs::read([q, k, v])?;
        let (results, slots) = self.attend(py, &inputs, sinks.as_deref(), |forward| {
            let slots = self.splits.then(|| forward.checkpoint.into_slots());
            ((forward.out, forward.lse), slots.flatten())
        })?;
        export_forward(py, inputs.q.library, results, slots)
    }

    /// (dq, dk, dv, dsinks), from the saved results of `forward`; without them the forward pass is
    /// recomputed. The last is None without sinks.
    #[pyo3(signature = (q, k, v, saved, dout, dlse, sinks=None))]
    #[expect(clippy::too_many_arguments, reason = "the inputs of a backward pass")]
    fn backward(
        &self,
        py: Python<'_>,
        q: &PyTensor<'_>,
        k: &PyTensor<'_>,
        v: &PyTensor<'_>,
        saved: PySaved<'_>,
        dout: &PyTensor<'_>,
        dlse: Option<&PyTensor<'_>>,
        sinks: Option<Vec<f64>>,
    ) -> PyResult<PyGradients> {
        let inputs = QkvInputs::read([q, k, v])?;
        let upstream = PyBackwardInputs::read(&inputs.q, self.splits, &saved, dout, dlse)?;
        // SAFETY: the caller's references keep the tensors alive until this function returns. A
        // concurrent write to a tensor that a function reads is a race in torch and NumPy too.
        let backward = unsafe {
            let [q, k, v] = inputs.views()?;
            let (saved, dout, dlse) = upstream.views()?;
            let (library, dlse) = (&self.library, dlse.as_ref());
            let sinks = sinks.as_deref();
            let from = |saved: &SavedOutput<'_>| {
                let backward = library.backward_from(&q, &k, &v, saved, &dout, dlse)?;
                with_dsinks(backward, sinks, saved, (&dout, dlse))
            };
            py.detach(|| match (&saved, sinks) {
                (Some(saved), _) => from(saved),
                (None, None) => library.backward(&q, &k, &v, &Checkpoint::nothing(), &dout, dlse),
                (None, Some(sinks)) => {
                    let Forward { out, lse, .. } = library.forward_with_sinks(&q, &k, &v, sinks)?;
                    // With sinks every slot is a head.
                    from(&SavedOutput {
                        slot_out: out.view(),
                        slot_lse: lse.view(),
                        lse: lse.view(),
                    })
                }
            })
        };
        let backward = backward.map_err(|error| error::call(&error))?;
        export_gradients(py, inputs.q.library, backward)
    }

    /// Runs a forward pass; its report as a dictionary, with out and lse in it.
    fn report<'py>(
        &self,
        py: Python<'py>,
        q: &PyTensor<'_>,
        k: &PyTensor<'_>,
        v: &PyTensor<'_>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let inputs = QkvInputs::read([q, k, v])?;
        let library = inputs.q.library;
        let forward = self.attend(py, &inputs, None, |forward| forward)?;
        let report = report_dict(py, &forward.report)?;
        let addresses = PyDict::new(py);
        for tensor in [inputs.q, inputs.k, inputs.v] {
            addresses.set_item(tensor.name, tensor.address)?;
        }
        addresses.set_item("out", forward.out.data().bytes().as_ptr() as usize)?;
        addresses.set_item("lse", forward.lse.data().bytes().as_ptr() as usize)?;
        report.set_item("addresses", addresses)?;
        let Forward {
            out,
            lse,
            checkpoint,
            ..
        } = forward;
        drop(checkpoint);
        report.set_item("out", export(py, library, unshare(out), false)?)?;
        report.set_item("lse", export(py, library, unshare(lse), true)?)?;
        Ok(report)
    }

    /// The plan for a shape, as text.
    fn explain(
        &self,
        py: Python<'_>,
        sizes: PySizes,
        dtype_name: &str,
        backward: bool,
    ) -> PyResult<String> {
        let (shape, dtype) = (shape(&sizes)?, dtype(dtype_name)?);
        py.detach(|| {
            let plan = self.library.plan(shape, dtype, pass(backward));
            let plan = plan.map_err(|error| error::call(&error))?;
            let explanation = plan.explain().map_err(|error| error::request(&error))?;
            Ok(explanation.to_string())
        })
    }

    /// The position of query `row`, and the keys that it sees: for each head a list of (first,
    /// stride, count).
    fn visible(&self, sizes: PySizes, row: usize) -> PyResult<PyVisible> {
        let (shape, pattern) = (shape(&sizes)?, self.library.pattern());
        pattern
            .check(&shape)
            .map_err(|error| error::request(&error))?;
        let position = pattern.first_query(&shape) + row;
        let runs = (0..shape.heads).map(|head| {
            let runs = pattern.visible(&shape, head, position);
            let runs = runs.iter().map(|run| (run.first, run.stride, run.count));
            runs.collect()
        });
        Ok((position, runs.collect()))
    }

    /// The logarithms of the phantom keys of each query and slot, as float64 `[queries, slots]`;
    /// None if there are none.
    fn phantoms<'py>(
        &self,
        py: Python<'py>,
        sizes: PySizes,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let shape = shape(&sizes)?;
        let queries = [Run::leading(shape.queries)];
        phantoms(py, self.library.pattern(), &shape, &queries)
    }

    /// Seconds that forward passes have spent in the library so far, without Python's share.
    #[getter]
    fn library_seconds(&self) -> f64 {
        self.spent.load(Ordering::Relaxed) as f64 * 1e-9
    }
}

impl Attention {
    /// The plan of a pass on a GPU, found faster than by the whole request.
    pub fn gpu_plan(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Arc<Plan>, Error> {
        let key = (shape, dtype, pass);
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = plans.iter().find(|(of, _)| *of == key) {
            return Ok(Arc::clone(plan));
        }
        let plan = self.library.plan(shape, dtype, pass)?;
        if plans.len() >= MOST_PLANS {
            plans.remove(0);
        }
        plans.push((key, Arc::clone(&plan)));
        Ok(plan)
    }

    /// Which query attends to which key.
    pub fn pattern(&self) -> &Pattern {
        self.library.pattern()
    }

    /// Options of the ring.
    pub fn ring(&self) -> &PyRingOptions {
        &self.ring
    }

    /// Runs a forward pass without the GIL, and returns what `keep` takes of it.
    fn attend<T: Send>(
        &self,
        py: Python<'_>,
        inputs: &QkvInputs,
        sinks: Option<&[f64]>,
        keep: impl FnOnce(Forward) -> T + Send,
    ) -> PyResult<T> {
        // SAFETY: as in `backward`.
        let [q, k, v] = unsafe { inputs.views()? };
        py.detach(|| {
            let begin = Instant::now();
            let result = match sinks {
                None => self.library.forward(&q, &k, &v),
                Some(sinks) => self.library.forward_with_sinks(&q, &k, &v, sinks),
            };
            let result = result.map(keep);
            let spent = begin.elapsed().as_nanos() as u64;
            self.spent.fetch_add(spent, Ordering::Relaxed);
            result.map_err(|error| error::call(&error))
        })
    }
}

/// A report as a dictionary.
fn report_dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let explanation = report
        .plan
        .explain()
        .map_err(|error| error::request(&error))?;
    dict.set_item("plan", explanation.to_string())?;
    dict.set_item("sent_bytes", explanation.sent_bytes)?;
    let ranks = report.memory.iter().map(|rank| {
        let memory = PyDict::new(py);
        memory.set_item("rank", rank.rank)?;
        memory.set_item("planned_bytes", rank.planned_bytes())?;
        memory.set_item("borrowed_bytes", rank.borrowed_bytes)?;
        memory.set_item("allocated_bytes", rank.allocated_bytes)?;
        Ok(memory)
    });
    dict.set_item("ranks", ranks.collect::<PyResult<Vec<_>>>()?)?;
    let died: Vec<usize> = report.deaths.iter().map(|(rank, _)| *rank).collect();
    dict.set_item("died", died)?;
    Ok(dict)
}
