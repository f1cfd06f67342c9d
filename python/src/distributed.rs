//! One rank of a ring over processes that somebody else has started, as Python calls it.
//!
//! The hops are Python's: this file tells it where the bytes of each parcel are, computes without
//! Python's lock while they fly, and asks it to wait. What goes wrong there stays the exception it
//! was. The decision here: a wire in Python is two calls a round, `post(round, sends, receives)` (or
//! `post_on_gpu`, with a stream, where hops never come to the host) and `wait()` of what that
//! returned, so that nothing of torch is known on this side.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use encke::{
    Backward, Checkpoint, Forward, HostWireBuffer, Incoming, Moved, Outgoing, Pass, Shape,
    ShardAttention, Transport, TransportError,
};
use encke_cuda::{DeviceMessage, ExternalWire};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::attention::{Attended, Inputs, Upstream};
use crate::error;
use crate::owned::{alone, give};
use crate::settings::{PatternOptions, RingOptions, dtype};

/// One rank with fixed settings; plans and buffers are kept between calls.
#[pyclass(frozen, module = "encke._encke")]
pub(crate) struct Shard {
    library: ShardAttention,
    splits: bool,
    recomputes: bool,
    deterministic: bool,
    /// Bytes of the inputs that the last forward pass read in place.
    borrowed_bytes: AtomicUsize,
}

/// A message of a round as Python sees it: the other rank, the tag, where the bytes are, how many.
type Bytes = (usize, u64, usize, usize);

/// The wire of one call.
pub(crate) struct Wire<'a> {
    python: &'a Py<PyAny>,
    rank: usize,
    /// What Python raised, to be raised again.
    raised: &'a Raised,
    /// What was posted on a GPU and not waited for.
    posted: Option<Py<PyAny>>,
}

/// Where what a wire raised is kept until the call has ended.
pub(crate) type Raised = Mutex<Option<PyErr>>;

impl<'a> Wire<'a> {
    /// The wire of `rank` over what Python gave, with a place for what that raises.
    pub fn new(python: &'a Py<PyAny>, rank: usize, raised: &'a Raised) -> Wire<'a> {
        Wire {
            python,
            rank,
            raised,
            posted: None,
        }
    }

    /// Has Python wait for what it posted.
    fn land(&mut self, round: usize, posted: Py<PyAny>) -> Result<(), TransportError> {
        let waited = Python::attach(|py| {
            let waited = posted.call_method0(py, "wait").map(drop);
            drop(posted);
            waited
        });
        waited.map_err(|raised| self.broken(round, raised))
    }

    fn broken(&mut self, round: usize, raised: PyErr) -> TransportError {
        let reason = raised.to_string();
        let mut kept = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = Some(raised);
        TransportError::Local {
            rank: self.rank,
            round,
            reason,
        }
    }
}

impl<B: HostWireBuffer> Transport<B> for Wire<'_> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        if outgoing.is_empty() && incoming.is_empty() {
            meanwhile();
            return Ok(Moved::default());
        }
        let sends = outgoing.iter().map(|Outgoing { to, parcel }| {
            let bytes = parcel.host_bytes(to.elements);
            (to.peer, to.tag, bytes.as_ptr() as usize, bytes.len())
        });
        let sends: Vec<Bytes> = sends.collect();
        let receives = incoming.iter_mut().map(|Incoming { from, parcel }| {
            let bytes = parcel.host_bytes_mut(from.elements);
            (
                from.peer,
                from.tag,
                bytes.as_mut_ptr() as usize,
                bytes.len(),
            )
        });
        let receives: Vec<Bytes> = receives.collect();
        let sum = |of: &[Bytes]| of.iter().map(|(.., bytes)| bytes).sum();
        let moved = Moved {
            sent_bytes: sum(&sends),
            received_bytes: sum(&receives),
        };
        // Python writes through these addresses until `wait` has returned. The parcels are borrowed
        // by this function so long, and a ring whose wire failed never frees them.
        let posted = Python::attach(|py| {
            let arguments = (round, sends, receives);
            self.python.call_method1(py, "post", arguments)
        });
        let posted = posted.map_err(|raised| self.broken(round, raised))?;
        meanwhile();
        self.land(round, posted)?;
        Ok(moved)
    }
}

impl ExternalWire for Wire<'_> {
    fn post(
        &mut self,
        round: usize,
        sends: &[DeviceMessage],
        receives: &[DeviceMessage],
        stream: u64,
    ) -> Result<(), TransportError> {
        let told = |pieces: &[DeviceMessage]| -> Vec<Bytes> {
            let told = pieces.iter();
            told.map(|x| (x.peer, x.tag, x.pointer as usize, x.bytes))
                .collect()
        };
        // The memory is held by the exchange that is under way, and given back to the GPU in the
        // order of this stream, which comes after the hops whatever becomes of them.
        let posted = Python::attach(|py| {
            let arguments = (round, told(sends), told(receives), stream);
            self.python.call_method1(py, "post_on_gpu", arguments)
        });
        self.posted = Some(posted.map_err(|raised| self.broken(round, raised))?);
        Ok(())
    }

    fn wait(&mut self, round: usize) -> Result<(), TransportError> {
        match self.posted.take() {
            Some(posted) => self.land(round, posted),
            None => Ok(()),
        }
    }
}

#[pymethods]
impl Shard {
    /// One dictionary holds every option; see `encke.attention`. `ranks` is the size of the group.
    #[new]
    fn new(options: &Bound<'_, PyDict>, rank: usize) -> PyResult<Shard> {
        let pattern: PatternOptions = options.extract()?;
        let ring: RingOptions = options.extract()?;
        let pattern = pattern.pattern()?;
        let splits = pattern.splits_slots();
        let library = ring.builder(pattern)?.build_shard(rank);
        Ok(Shard {
            library: library.map_err(|error| error::call(&error))?,
            splits,
            recomputes: ring.recomputes(),
            deterministic: ring.deterministic,
            borrowed_bytes: AtomicUsize::new(0),
        })
    }

    /// Bytes of q, k and v that the last forward pass on the cpu read where they are.
    #[getter]
    fn borrowed_bytes(&self) -> usize {
        self.borrowed_bytes.load(Ordering::Relaxed)
    }

    /// Whether branches keep slots of their own until the end.
    #[getter]
    fn splits_slots(&self) -> bool {
        self.splits
    }

    /// Whether nothing is to be kept for the backward pass.
    #[getter]
    fn recomputes(&self) -> bool {
        self.recomputes
    }

    /// Refuses what cannot be computed of a sequence of so many tokens, before anyone waits for
    /// anyone: makes the plan.
    fn check(
        &self,
        py: Python<'_>,
        shape: (usize, usize, usize, usize, usize),
        dtype_name: &str,
    ) -> PyResult<()> {
        let (batch, tokens, heads, kv_heads, dim) = shape;
        let shape = Shape::new(batch, tokens, heads, kv_heads, dim);
        let shape = shape.map_err(|error| error::request(&error))?;
        let dtype = dtype(dtype_name)?;
        let planned = py.detach(|| self.library.plan(shape, dtype, Pass::Forward));
        planned.map(drop).map_err(|error| error::call(&error))
    }

    /// (out, lse, slot_out, slot_lse) of this rank's rows; the last two are None unless branches
    /// keep slots of their own.
    fn forward(
        &self,
        py: Python<'_>,
        tokens: usize,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        wire: Py<PyAny>,
    ) -> PyResult<Attended> {
        let inputs = Inputs::read(q, k, v)?;
        let raised = Raised::default();
        let mut wire = Wire::new(&wire, self.library.rank(), &raised);
        // SAFETY: the caller's references keep the tensors alive until this function returns, and
        // whoever writes to a tensor while a function reads it has a race in torch too.
        let [q, k, v] = unsafe { inputs.views()? };
        let forward = py.detach(|| self.library.forward(tokens, [&q, &k, &v], &mut wire));
        let Forward {
            out,
            lse,
            checkpoint,
            report,
        } = told(&raised, forward)?;
        let lent = report.memory.iter().map(|rank| rank.borrowed_bytes).sum();
        self.borrowed_bytes.store(lent, Ordering::Relaxed);
        let slots = self.splits.then(|| checkpoint.into_slots()).flatten();
        let (slot_out, slot_lse) = slots.unzip();
        let given = |tensor, cells| give(py, inputs.q.kind, alone(tensor), cells);
        Ok((
            given(out, false)?,
            given(lse, true)?,
            slot_out.map(|x| given(x, false)).transpose()?,
            slot_lse.map(|x| given(x, true)).transpose()?,
        ))
    }

    /// (dq, dk, dv) of this rank's rows, from what `forward` returned; without it, the forward pass
    /// is run again, on every rank.
    #[pyo3(signature = (tokens, q, k, v, out, lse, slot_out, slot_lse, dout, dlse, wire))]
    #[expect(clippy::too_many_arguments, reason = "all that a backward pass reads")]
    fn backward(
        &self,
        py: Python<'_>,
        tokens: usize,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        lse: Option<&Bound<'_, PyAny>>,
        slot_out: Option<&Bound<'_, PyAny>>,
        slot_lse: Option<&Bound<'_, PyAny>>,
        dout: &Bound<'_, PyAny>,
        dlse: Option<&Bound<'_, PyAny>>,
        wire: Py<PyAny>,
    ) -> PyResult<(Py<PyAny>, Py<PyAny>, Py<PyAny>)> {
        let inputs = Inputs::read(q, k, v)?;
        let upstream = Upstream::read(
            &inputs.q,
            self.splits,
            (out, lse),
            (slot_out, slot_lse),
            (dout, dlse),
        )?;
        let raised = Raised::default();
        let mut wire = Wire::new(&wire, self.library.rank(), &raised);
        // SAFETY: as in `forward`.
        let backward = unsafe {
            let [q, k, v] = inputs.views()?;
            let (kept, dout, dlse) = upstream.views()?;
            let (qkv, gradients) = ([&q, &k, &v], (&dout, dlse.as_ref()));
            py.detach(|| match &kept {
                Some(kept) => {
                    let library = &self.library;
                    library.backward_from(tokens, qkv, kept, gradients, &mut wire)
                }
                None => {
                    let nothing = Checkpoint::nothing();
                    let library = &self.library;
                    library.backward(tokens, qkv, &nothing, gradients, &mut wire)
                }
            })
        };
        let Backward { dq, dk, dv, .. } = told(&raised, backward)?;
        let given = |tensor| give(py, inputs.q.kind, tensor, false);
        Ok((given(dq)?, given(dk)?, given(dv)?))
    }

    /// Bytes that this rank holds and sends in a pass: (buffers by what they are for, sent).
    fn planned(
        &self,
        py: Python<'_>,
        shape: (usize, usize, usize, usize, usize),
        dtype_name: &str,
        backward: bool,
    ) -> PyResult<(usize, usize)> {
        let (batch, tokens, heads, kv_heads, dim) = shape;
        let shape = Shape::new(batch, tokens, heads, kv_heads, dim);
        let shape = shape.map_err(|error| error::request(&error))?;
        let dtype = dtype(dtype_name)?;
        let pass = match backward {
            true => Pass::Backward { dlse: false },
            false => Pass::Forward,
        };
        py.detach(|| {
            let plan = self.library.plan(shape, dtype, pass);
            let plan = plan.map_err(|error| error::call(&error))?;
            let rank = plan.rank(self.library.rank());
            let rank = rank.map_err(|error| error::request(&error))?;
            let held = rank.memory().values().sum();
            Ok((held, rank.sent_bytes().values().sum()))
        })
    }
}

impl Shard {
    /// The rank behind it.
    pub fn library(&self) -> &ShardAttention {
        &self.library
    }

    /// Whether a GPU sums gradients in one order.
    pub fn deterministic(&self) -> bool {
        self.deterministic
    }
}

/// What a call returned, or what the wire raised, or why the call failed.
pub(crate) fn told<T>(raised: &Raised, result: Result<T, encke::Error>) -> PyResult<T> {
    result.map_err(|error| {
        let raised = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
        raised.unwrap_or_else(|| error::call(&error))
    })
}

/// Tokens of a rank: (first, stride, count) of each run, in the order of its rows.
#[pyfunction]
pub(crate) fn runs(
    sharding: crate::settings::Sharding,
    ranks: usize,
    tokens: usize,
    rank: usize,
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
    let runs = sharding.runs(tokens, rank).into_iter();
    Ok(runs.map(|run| (run.first, run.stride, run.count)).collect())
}

/// Computes on so many threads from now on; false where it has begun with another number.
#[pyfunction]
pub(crate) fn use_threads(threads: usize) -> bool {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global().is_ok() || rayon::current_num_threads() == threads
}
