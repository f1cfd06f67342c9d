//! Attention with fixed settings, as Python calls it.
//!
//! The caller's numbers are read where they are and Python's lock is given up meanwhile. The decision
//! here: what the backward pass wants is returned as tensors, so that torch keeps them, frees them,
//! and notices where somebody has written to them since.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use encke::{
    Attention as Library, Backward, Checkpoint, DType, Forward, SavedOutput, Pass, Report, Shape, View,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error;
use crate::owned::{alone, give};
use crate::settings::{PatternOptions, RingOptions, dtype};
use crate::tensor::{Lent, Place};

/// Attention with fixed settings; plans and buffers are kept between calls.
#[pyclass(frozen, module = "encke._encke")]
pub(crate) struct Attention {
    library: Library,
    splits: bool,
    ring: RingOptions,
    /// Nanoseconds that forward passes have spent in the library.
    spent: AtomicU64,
}

/// The process that has begun to compute: threads do not come along when it is forked.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// q, k, v of one kind in one place.
pub(crate) struct Inputs {
    pub q: Lent,
    k: Lent,
    v: Lent,
}

impl Inputs {
    pub fn read(
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<Inputs> {
        let q = Lent::rows("q", q)?;
        let k = Lent::rows("k", k)?.beside(&q)?;
        let v = Lent::rows("v", v)?.beside(&q)?;
        on_host(&q)?;
        same_process()?;
        Ok(Inputs { q, k, v })
    }

    /// # Safety
    /// As for [`Lent::view`].
    pub unsafe fn views<'a>(&self) -> PyResult<[View<'a>; 3]> {
        // SAFETY: passed on to the caller; all are on the host, which was checked.
        unsafe { Ok([self.q.view()?, self.k.view()?, self.v.view()?]) }
    }
}

/// A tensor as Python gives it.
pub(crate) type Given<'a, 'py> = &'a Bound<'py, PyAny>;

/// What a backward pass reads beside q, k and v.
pub(crate) struct Upstream {
    kept: Option<[Lent; 3]>,
    dout: Lent,
    dlse: Option<Lent>,
}

impl Upstream {
    /// Of (out, lse) by head and by slot, those are kept that the pattern `splits` into or not.
    pub fn read(
        q: &Lent,
        splits: bool,
        (out, lse): (Option<Given<'_, '_>>, Option<Given<'_, '_>>),
        (slot_out, slot_lse): (Option<Given<'_, '_>>, Option<Given<'_, '_>>),
        (dout, dlse): (Given<'_, '_>, Option<Given<'_, '_>>),
    ) -> PyResult<Upstream> {
        let rows = |name, tensor: Given<'_, '_>| Lent::rows(name, tensor)?.beside(q);
        let cells = |name, tensor: Given<'_, '_>| Lent::cells(name, tensor)?.beside(q);
        let lse = lse.map(|lse| cells("lse", lse)).transpose()?;
        let (slot_out, slot_lse) = match splits {
            true => (
                slot_out.map(|x| rows("out by slot", x)).transpose()?,
                slot_lse.map(|x| cells("lse by slot", x)).transpose()?,
            ),
            false => (out.map(|x| rows("out", x)).transpose()?, lse),
        };
        let kept = slot_out.zip(slot_lse).zip(lse);
        Ok(Upstream {
            kept: kept.map(|((slot_out, slot_lse), lse)| [slot_out, slot_lse, lse]),
            dout: rows("dout", dout)?,
            dlse: dlse.map(|dlse| cells("dlse", dlse)).transpose()?,
        })
    }

    /// What the forward pass left, if that was kept; dout; dlse.
    ///
    /// # Safety
    /// As for [`Lent::view`].
    pub unsafe fn views<'a>(&self) -> PyResult<(Option<SavedOutput<'a>>, View<'a>, Option<View<'a>>)> {
        // SAFETY: passed on to the caller.
        let view = |lent: &Lent| unsafe { lent.view() };
        let kept = self.kept.as_ref().map(|[slot_out, slot_lse, lse]| {
            Ok::<_, PyErr>(SavedOutput {
                slot_out: view(slot_out)?,
                slot_lse: view(slot_lse)?,
                lse: view(lse)?,
            })
        });
        let dlse = self.dlse.as_ref().map(view);
        Ok((kept.transpose()?, view(&self.dout)?, dlse.transpose()?))
    }
}

/// What a forward pass returns to Python: out, lse, and both by slot where branches keep slots.
pub(crate) type Attended = (Py<PyAny>, Py<PyAny>, Option<Py<PyAny>>, Option<Py<PyAny>>);

fn on_host(q: &Lent) -> PyResult<()> {
    match q.place {
        Place::Host => Ok(()),
        Place::Gpu(_) => Err(PyValueError::new_err(
            "the tensors are on a GPU, but this attention was made for the cpu",
        )),
    }
}

fn same_process() -> PyResult<()> {
    let here = std::process::id();
    let begun = PROCESS.compare_exchange(0, here, Ordering::Relaxed, Ordering::Relaxed);
    match begun {
        Err(there) if there != here => Err(PyRuntimeError::new_err(format!(
            "process {here} was forked from {there}, which had computed with Encke before: its \
             threads did not come along; start processes with \"spawn\" or \"forkserver\", or fork \
             before the first call"
        ))),
        _ => Ok(()),
    }
}

#[pymethods]
impl Attention {
    /// One dictionary holds every option; see `encke.attention`.
    #[new]
    fn new(options: &Bound<'_, PyDict>) -> PyResult<Attention> {
        let pattern: PatternOptions = options.extract()?;
        let ring: RingOptions = options.extract()?;
        let pattern = pattern.pattern()?;
        let splits = pattern.splits_slots();
        let library = ring.builder(pattern)?.build();
        Ok(Attention {
            library: library.map_err(|error| error::call(&error))?,
            splits,
            ring,
            spent: AtomicU64::new(0),
        })
    }

    /// Whether branches keep slots of their own until the end.
    #[getter]
    pub fn splits_slots(&self) -> bool {
        self.splits
    }

    /// Whether nothing is to be kept for the backward pass.
    #[getter]
    fn recomputes(&self) -> bool {
        self.ring.recomputes()
    }

    /// The type that is computed in, where it is not that of the inputs.
    #[getter]
    fn precision(&self) -> PyResult<Option<String>> {
        Ok(self.ring.computed()?.map(|dtype| dtype.to_string()))
    }

    /// How many slots so many heads have.
    fn slots(&self, heads: usize) -> usize {
        self.library.pattern().slots(heads).len()
    }

    /// (out, lse, slot_out, slot_lse); the last two are None unless branches keep slots of their
    /// own.
    fn forward(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<Attended> {
        let inputs = Inputs::read(q, k, v)?;
        let kind = inputs.q.kind;
        let (out, lse, slots) = self.attend(py, &inputs, |forward| {
            let slots = self.splits.then(|| forward.checkpoint.into_slots());
            (forward.out, forward.lse, slots.flatten())
        })?;
        let (slot_out, slot_lse) = slots.unzip();
        let given = |tensor, cells| give(py, kind, alone(tensor), cells);
        Ok((
            given(out, false)?,
            given(lse, true)?,
            slot_out.map(|x| given(x, false)).transpose()?,
            slot_lse.map(|x| given(x, true)).transpose()?,
        ))
    }

    /// (dq, dk, dv), from what `forward` returned; without it, the forward pass is run again.
    #[pyo3(signature = (q, k, v, out, lse, slot_out, slot_lse, dout, dlse))]
    #[expect(clippy::too_many_arguments, reason = "all that a backward pass reads")]
    fn backward(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        lse: Option<&Bound<'_, PyAny>>,
        slot_out: Option<&Bound<'_, PyAny>>,
        slot_lse: Option<&Bound<'_, PyAny>>,
        dout: &Bound<'_, PyAny>,
        dlse: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Py<PyAny>, Py<PyAny>, Py<PyAny>)> {
        let inputs = Inputs::read(q, k, v)?;
        let upstream = Upstream::read(
            &inputs.q,
            self.splits,
            (out, lse),
            (slot_out, slot_lse),
            (dout, dlse),
        )?;
        // SAFETY: the caller's references keep the tensors alive until this function returns, and
        // whoever writes to a tensor while a function reads it has a race in torch and NumPy too.
        let backward = unsafe {
            let [q, k, v] = inputs.views()?;
            let (kept, dout, dlse) = upstream.views()?;
            py.detach(|| match &kept {
                Some(kept) => self
                    .library
                    .backward_from(&q, &k, &v, kept, &dout, dlse.as_ref()),
                None => {
                    let nothing = Checkpoint::nothing();
                    self.library
                        .backward(&q, &k, &v, &nothing, &dout, dlse.as_ref())
                }
            })
        };
        let Backward { dq, dk, dv, .. } = backward.map_err(|error| error::call(&error))?;
        let given = |tensor| give(py, inputs.q.kind, tensor, false);
        Ok((given(dq)?, given(dk)?, given(dv)?))
    }

    /// What a forward pass did, as a dictionary, with out and lse in it.
    fn report<'py>(
        &self,
        py: Python<'py>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let inputs = Inputs::read(q, k, v)?;
        let forward = self.attend(py, &inputs, |forward| forward)?;
        let said = described(py, &forward.report)?;
        let addresses = PyDict::new(py);
        for lent in [inputs.q, inputs.k, inputs.v] {
            addresses.set_item(lent.name, lent.address)?;
        }
        addresses.set_item("out", forward.out.data().bytes().as_ptr() as usize)?;
        addresses.set_item("lse", forward.lse.data().bytes().as_ptr() as usize)?;
        said.set_item("addresses", addresses)?;
        let Forward {
            out,
            lse,
            checkpoint,
            ..
        } = forward;
        drop(checkpoint);
        said.set_item("out", give(py, inputs.q.kind, alone(out), false)?)?;
        said.set_item("lse", give(py, inputs.q.kind, alone(lse), true)?)?;
        Ok(said)
    }

    /// The plan for a shape, in words.
    fn explain(
        &self,
        py: Python<'_>,
        shape: (usize, usize, usize, usize, usize),
        dtype_name: &str,
        backward: bool,
    ) -> PyResult<String> {
        let (batch, tokens, heads, kv_heads, dim) = shape;
        let shape = Shape::new(batch, tokens, heads, kv_heads, dim);
        let shape = shape.map_err(|error| error::request(&error))?;
        let dtype: DType = dtype(dtype_name)?;
        let pass = match backward {
            true => Pass::Backward { dlse: false },
            false => Pass::Forward,
        };
        py.detach(|| {
            let plan = self.library.plan(shape, dtype, pass);
            let plan = plan.map_err(|error| error::call(&error))?;
            let explanation = plan.explain().map_err(|error| error::request(&error))?;
            Ok(explanation.to_string())
        })
    }

    /// Seconds that forward passes have spent in the library so far: what is not Python's.
    #[getter]
    fn library_seconds(&self) -> f64 {
        self.spent.load(Ordering::Relaxed) as f64 * 1e-9
    }
}

impl Attention {
    /// The attention of the library: for the cpu, and for plans, which know no device.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// How it is computed.
    pub fn ring(&self) -> &RingOptions {
        &self.ring
    }

    /// Runs a forward pass without Python's lock, and returns what `keep` keeps of it.
    fn attend<T: Send>(
        &self,
        py: Python<'_>,
        inputs: &Inputs,
        keep: impl FnOnce(Forward) -> T + Send,
    ) -> PyResult<T> {
        // SAFETY: as in `backward`.
        let [q, k, v] = unsafe { inputs.views()? };
        py.detach(|| {
            let begin = Instant::now();
            let kept = self.library.forward(&q, &k, &v).map(keep);
            let spent = begin.elapsed().as_nanos() as u64;
            self.spent.fetch_add(spent, Ordering::Relaxed);
            kept.map_err(|error| error::call(&error))
        })
    }
}

/// What a call did, in a dictionary.
fn described<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let said = PyDict::new(py);
    let explanation = report
        .plan
        .explain()
        .map_err(|error| error::request(&error))?;
    said.set_item("plan", explanation.to_string())?;
    said.set_item("sent_bytes", explanation.sent_bytes)?;
    let ranks = report.memory.iter().map(|rank| {
        let memory = PyDict::new(py);
        memory.set_item("rank", rank.rank)?;
        memory.set_item("planned_bytes", rank.planned_bytes())?;
        memory.set_item("borrowed_bytes", rank.borrowed_bytes)?;
        memory.set_item("allocated_bytes", rank.allocated_bytes)?;
        Ok(memory)
    });
    said.set_item("ranks", ranks.collect::<PyResult<Vec<_>>>()?)?;
    let died: Vec<usize> = report.deaths.iter().map(|(rank, _)| *rank).collect();
    said.set_item("died", died)?;
    Ok(said)
}
