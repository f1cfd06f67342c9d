//! One rank of a ring over processes, as Python calls it. Python does the hops (see `wire`).

use std::sync::atomic::{AtomicUsize, Ordering};

use encke::plan::balance;
use encke::{
    CallRows, Checkpoint, Cut, Documents, Forward, Pass, Pattern, SavedOutput, ShardAttention,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error;
use crate::host_passes::{
    PyBackwardInputs, PyForwardOutput, PyGradients, PySaved, PySizes, PyTensor, QkvInputs,
    export_forward, export_gradients, pass, phantoms, shape, with_dsinks,
};
use crate::settings::{PyPatternOptions, PyRingOptions, ShardingOption, dtype};
use crate::wire::{PyErrorSlot, PythonWire, raise};

/// One rank with fixed settings; plans and buffers are cached between calls.
#[pyclass(frozen, name = "Shard", module = "encke._encke")]
pub(crate) struct PyShard {
    library: ShardAttention,
    splits: bool,
    recomputes: bool,
    deterministic: bool,
    borrowed_bytes: AtomicUsize,
}

#[pymethods]
impl PyShard {
    /// One dictionary holds every option; see `encke.attention`. `ranks` is the size of the group.
    #[new]
    fn new(options: &Bound<'_, PyDict>, rank: usize) -> PyResult<PyShard> {
        let pattern: PyPatternOptions = options.extract()?;
        let ring: PyRingOptions = options.extract()?;
        let pattern = pattern.pattern()?;
        let splits = pattern.splits_slots();
        let library = ring.builder(pattern)?.build_shard(rank);
        Ok(PyShard {
            library: library.map_err(|error| error::call(&error))?,
            splits,
            recomputes: ring.recomputes(),
            deterministic: ring.deterministic,
            borrowed_bytes: AtomicUsize::new(0),
        })
    }

    /// The same rank with another seed of its dropout; both share their plans and buffers.
    fn with_seed(&self, seed: u64) -> PyShard {
        PyShard {
            library: self.library.with_seed(seed),
            borrowed_bytes: AtomicUsize::new(0),
            ..*self
        }
    }

    /// Bytes of q, k and v that the last forward pass on the CPU read in place.
    #[getter]
    fn borrowed_bytes(&self) -> usize {
        self.borrowed_bytes.load(Ordering::Relaxed)
    }

    /// Whether branches keep slots of their own, which are combined after attention.
    #[getter]
    fn splits_slots(&self) -> bool {
        self.splits
    }

    /// Whether the backward pass recomputes the forward pass.
    #[getter]
    fn recomputes(&self) -> bool {
        self.recomputes
    }

    /// Plans a pass on the whole sequence, so that an invalid request fails before any rank waits.
    fn check(&self, py: Python<'_>, sizes: PySizes, dtype_name: &str) -> PyResult<()> {
        let (shape, dtype) = (shape(&sizes)?, dtype(dtype_name)?);
        let planned = py.detach(|| self.library.plan(shape, dtype, Pass::Forward));
        planned.map(drop).map_err(|error| error::call(&error))
    }

    /// The logarithms of the phantom keys of each of this rank's queries and each slot, as float64;
    /// None if there are none.
    fn phantoms<'py>(
        &self,
        py: Python<'py>,
        sizes: PySizes,
        dtype_name: &str,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (shape, dtype) = (shape(&sizes)?, dtype(dtype_name)?);
        let plan = self.library.plan(shape, dtype, Pass::Forward);
        let plan = plan.map_err(|error| error::call(&error))?;
        let request = plan.request();
        let queries = request.query_runs(self.library.rank());
        phantoms(py, &request.pattern, &shape, &queries)
    }

    /// (out, lse, slot_out, slot_lse) of this rank's rows; `rows` are (queries, keys) of the whole
    /// sequence. The last two are None unless branches
    /// keep slots of their own. Every rank passes the same sinks.
    #[pyo3(signature = (rows, q, k, v, wire, sinks=None))]
    #[expect(clippy::too_many_arguments, reason = "the inputs of a forward pass")]
    fn forward(
        &self,
        py: Python<'_>,
        rows: (usize, usize),
        q: &PyTensor<'_>,
        k: &PyTensor<'_>,
        v: &PyTensor<'_>,
        wire: Py<PyAny>,
        sinks: Option<Vec<f64>>,
    ) -> PyResult<PyForwardOutput> {
        let (inputs, rows) = (QkvInputs::read([q, k, v])?, call_rows(rows));
        let raised = PyErrorSlot::default();
        let mut wire = PythonWire::new(&wire, self.library.rank(), &raised);
        // SAFETY: the caller's references keep the tensors alive until this function returns. A
        // concurrent write to a tensor that a function reads is a race in torch too.
        let [q, k, v] = unsafe { inputs.views()? };
        let (library, qkv) = (&self.library, [&q, &k, &v]);
        let forward = py.detach(|| match &sinks {
            None => library.forward(rows, qkv, &mut wire),
            Some(sinks) => library.forward_with_sinks(rows, qkv, sinks, &mut wire),
        });
        let Forward {
            out,
            lse,
            checkpoint,
            report,
        } = raise(&raised, forward)?;
        let borrowed = report.memory.iter().map(|rank| rank.borrowed_bytes).sum();
        self.borrowed_bytes.store(borrowed, Ordering::Relaxed);
        let slots = self.splits.then(|| checkpoint.into_slots()).flatten();
        export_forward(py, inputs.q.library, (out, lse), slots)
    }

    /// (dq, dk, dv, dsinks) of this rank's rows, from the saved results of `forward`; without them
    /// every rank recomputes the forward pass. The last is None without sinks.
    #[pyo3(signature = (rows, q, k, v, saved, dout, dlse, wire, sinks=None))]
    #[expect(clippy::too_many_arguments, reason = "the inputs of a backward pass")]
    fn backward(
        &self,
        py: Python<'_>,
        rows: (usize, usize),
        q: &PyTensor<'_>,
        k: &PyTensor<'_>,
        v: &PyTensor<'_>,
        saved: PySaved<'_>,
        dout: &PyTensor<'_>,
        dlse: Option<&PyTensor<'_>>,
        wire: Py<PyAny>,
        sinks: Option<Vec<f64>>,
    ) -> PyResult<PyGradients> {
        let (inputs, rows) = (QkvInputs::read([q, k, v])?, call_rows(rows));
        let upstream = PyBackwardInputs::read(&inputs.q, self.splits, &saved, dout, dlse)?;
        let raised = PyErrorSlot::default();
        let mut wire = PythonWire::new(&wire, self.library.rank(), &raised);
        // SAFETY: as in `forward`.
        let backward = unsafe {
            let [q, k, v] = inputs.views()?;
            let (saved, dout, dlse) = upstream.views()?;
            let (library, qkv, gradients) = (&self.library, [&q, &k, &v], (&dout, dlse.as_ref()));
            let sinks = sinks.as_deref();
            let from = |saved: &SavedOutput<'_>, wire: &mut PythonWire<'_>| {
                let backward = library.backward_from(rows, qkv, saved, gradients, wire)?;
                with_dsinks(backward, sinks, saved, gradients)
            };
            py.detach(|| match (&saved, sinks) {
                (Some(saved), _) => from(saved, &mut wire),
                (None, None) => {
                    let nothing = Checkpoint::nothing();
                    library.backward(rows, qkv, &nothing, gradients, &mut wire)
                }
                (None, Some(sinks)) => {
                    let forward = library.forward_with_sinks(rows, qkv, sinks, &mut wire)?;
                    // With sinks every slot is a head.
                    let saved = SavedOutput {
                        slot_out: forward.out.view(),
                        slot_lse: forward.lse.view(),
                        lse: forward.lse.view(),
                    };
                    from(&saved, &mut wire)
                }
            })
        };
        export_gradients(py, inputs.q.library, raise(&raised, backward)?)
    }

    /// Planned bytes of a pass on this rank: (held, sent).
    fn planned(
        &self,
        py: Python<'_>,
        sizes: PySizes,
        dtype_name: &str,
        backward: bool,
    ) -> PyResult<(usize, usize)> {
        let (shape, dtype) = (shape(&sizes)?, dtype(dtype_name)?);
        py.detach(|| {
            let plan = self.library.plan(shape, dtype, pass(backward));
            let plan = plan.map_err(|error| error::call(&error))?;
            let rank = plan.rank(self.library.rank());
            let rank = rank.map_err(|error| error::request(&error))?;
            let held = rank.memory().values().sum();
            Ok((held, rank.sent_bytes().values().sum()))
        })
    }
}

impl PyShard {
    /// The library's rank.
    pub fn library(&self) -> &ShardAttention {
        &self.library
    }

    /// Whether a GPU sums gradients in a fixed order.
    pub fn deterministic(&self) -> bool {
        self.deterministic
    }
}

fn call_rows((queries, keys): (usize, usize)) -> CallRows {
    CallRows { queries, keys }
}

/// Tokens of a rank: (first, stride, count) of each run, in the order of its rows.
#[pyfunction]
pub(crate) fn runs(
    sharding: ShardingOption,
    ranks: usize,
    tokens: usize,
    rank: usize,
) -> PyResult<Vec<(usize, usize, usize)>> {
    query_runs(sharding, ranks, tokens, rank, 0, tokens)
}

/// Queries of a rank, by index in q, where the tokens from `first` on have `queries` queries.
#[pyfunction]
pub(crate) fn query_runs(
    sharding: ShardingOption,
    ranks: usize,
    tokens: usize,
    rank: usize,
    first: usize,
    queries: usize,
) -> PyResult<Vec<(usize, usize, usize)>> {
    let sharding = encke::Sharding::new(ranks, sharding.cut()?);
    let sharding = sharding.map_err(|error| error::request(&error))?;
    let checked = sharding.check(tokens);
    checked.map_err(|error| error::request(&error))?;
    if rank >= ranks {
        return Err(PyValueError::new_err(format!(
            "there is no rank {rank}: the ring has {ranks} ranks, numbered from 0"
        )));
    }
    let runs = sharding.query_runs(tokens, rank, &(first..first.saturating_add(queries)));
    let runs = runs.into_iter();
    Ok(runs.map(|run| (run.first, run.stride, run.count)).collect())
}

/// The first token of each rank if all ranks get equal work of the pattern of these options.
#[pyfunction]
pub(crate) fn balanced(
    options: &Bound<'_, PyDict>,
    ranks: usize,
    tokens: usize,
    heads: usize,
) -> PyResult<Vec<usize>> {
    let options: PyPatternOptions = options.extract()?;
    let pattern = options.pattern()?;
    // The work of a token is a number of pairs, which the head dimension does not change.
    let shape = shape(&PySizes::Plain(1, tokens, heads, heads, 1))?;
    let checked = pattern.check(&shape);
    checked.map_err(|error| error::request(&error))?;
    encke::Sharding::contiguous(ranks).map_err(|error| error::request(&error))?;
    match balance::even(&pattern, &shape, ranks).map_err(|error| error::request(&error))? {
        Cut::Firsts(firsts) => Ok(firsts),
        _ => Err(PyValueError::new_err(
            "a balanced cut is a first token for each rank",
        )),
    }
}

/// First and one past the last token of each range of each rank, if long documents are cut in
/// zigzag and short ones stay whole. The work of a document is that of a causal mask, so that the
/// cut depends on nothing that ranks do not share.
#[pyfunction]
pub(crate) fn by_document(
    documents: Option<Vec<usize>>,
    ranks: usize,
    tokens: usize,
) -> PyResult<Vec<Vec<(usize, usize)>>> {
    let shape = shape(&PySizes::Plain(1, tokens, 1, 1, 1))?;
    let documents = documents.as_deref().map(Documents::new).transpose();
    let documents = documents.map_err(|error| error::request(&error))?;
    let pattern = Pattern::dense().causal(true).documents(documents);
    let checked = pattern.check(&shape);
    checked.map_err(|error| error::request(&error))?;
    encke::Sharding::contiguous(ranks).map_err(|error| error::request(&error))?;
    let cut = balance::by_document(&pattern, &shape, ranks);
    let sharding = cut.and_then(|cut| encke::Sharding::new(ranks, cut));
    let sharding = sharding.map_err(|error| error::request(&error))?;
    let ranges = |rank: usize| sharding.runs(tokens, rank).into_iter();
    Ok((0..ranks)
        .map(|rank| ranges(rank).map(|run| (run.first, run.end())).collect())
        .collect())
}

/// Sets the number of threads; false if computing has already begun with another number.
#[pyfunction]
pub(crate) fn use_threads(threads: usize) -> bool {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global().is_ok() || rayon::current_num_threads() == threads
}
