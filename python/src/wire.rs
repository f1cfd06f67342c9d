//! A transport whose hops are done by Python (torch.distributed).
//!
//! Rust passes the addresses of each parcel to Python, computes without the GIL while the hops are
//! in flight, and asks Python to wait. The decision here: a wire in Python is two calls per round,
//! `post(round, sends, receives)` (or `post_on_gpu`, with a stream, for hops between GPUs) and
//! `wait()` on what that returned, so that this side does not depend on torch. An exception in
//! Python is raised again unchanged at the end of the call.

use std::sync::{Mutex, PoisonError};

use encke::{HostWireBuffer, Incoming, Moved, Outgoing, Transport, TransportError};
use encke_cuda::{DeviceMessage, ExternalWire};
use pyo3::prelude::*;

use crate::error;

/// A message of a round as Python sees it: peer, tag, address, bytes.
type PyMessage = (usize, u64, usize, usize);

/// The wire of one call.
pub(crate) struct PythonWire<'a> {
    python: &'a Py<PyAny>,
    rank: usize,
    raised: &'a PyErrorSlot,
    /// What was posted on a GPU and not waited for.
    posted: Option<Py<PyAny>>,
}

/// The exception that a wire raised, until the call has ended.
pub(crate) type PyErrorSlot = Mutex<Option<PyErr>>;

impl<'a> PythonWire<'a> {
    /// The wire of `rank` over a Python object.
    pub fn new(python: &'a Py<PyAny>, rank: usize, raised: &'a PyErrorSlot) -> PythonWire<'a> {
        PythonWire {
            python,
            rank,
            raised,
            posted: None,
        }
    }

    fn wait_for(&mut self, round: usize, posted: Py<PyAny>) -> Result<(), TransportError> {
        let waited = Python::attach(|py| {
            let waited = posted.call_method0(py, "wait").map(drop);
            drop(posted);
            waited
        });
        waited.map_err(|raised| self.fail(round, raised))
    }

    fn fail(&mut self, round: usize, raised: PyErr) -> TransportError {
        let reason = raised.to_string();
        let mut slot = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = Some(raised);
        TransportError::Local {
            rank: self.rank,
            round,
            reason,
        }
    }
}

impl<B: HostWireBuffer> Transport<B> for PythonWire<'_> {
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
        let sends: Vec<PyMessage> = sends.collect();
        let receives = incoming.iter_mut().map(|Incoming { from, parcel }| {
            let bytes = parcel.host_bytes_mut(from.elements);
            let address = bytes.as_mut_ptr() as usize;
            (from.peer, from.tag, address, bytes.len())
        });
        let receives: Vec<PyMessage> = receives.collect();
        let sum = |of: &[PyMessage]| of.iter().map(|(.., bytes)| bytes).sum();
        let moved = Moved {
            sent_bytes: sum(&sends),
            received_bytes: sum(&receives),
        };
        // Python writes through these addresses until `wait` has returned. This function borrows
        // the parcels until then, and a ring whose wire failed never frees them.
        let posted = Python::attach(|py| {
            let arguments = (round, sends, receives);
            self.python.call_method1(py, "post", arguments)
        });
        let posted = posted.map_err(|raised| self.fail(round, raised))?;
        meanwhile();
        self.wait_for(round, posted)?;
        Ok(moved)
    }
}

impl ExternalWire for PythonWire<'_> {
    fn post(
        &mut self,
        round: usize,
        sends: &[DeviceMessage],
        receives: &[DeviceMessage],
        stream: u64,
    ) -> Result<(), TransportError> {
        let messages = |pieces: &[DeviceMessage]| -> Vec<PyMessage> {
            let pieces = pieces.iter();
            pieces
                .map(|x| (x.peer, x.tag, x.pointer as usize, x.bytes))
                .collect()
        };
        // The exchange under way owns the memory, and returns it to the GPU in the order of this
        // stream, that is after the hops, also if they fail.
        let posted = Python::attach(|py| {
            let arguments = (round, messages(sends), messages(receives), stream);
            self.python.call_method1(py, "post_on_gpu", arguments)
        });
        self.posted = Some(posted.map_err(|raised| self.fail(round, raised))?);
        Ok(())
    }

    fn wait(&mut self, round: usize) -> Result<(), TransportError> {
        match self.posted.take() {
            Some(posted) => self.wait_for(round, posted),
            None => Ok(()),
        }
    }
}

/// A call's result; its error is the exception that the wire raised, if any.
pub(crate) fn raise<T>(raised: &PyErrorSlot, result: Result<T, encke::Error>) -> PyResult<T> {
    result.map_err(|error| {
        let raised = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
        raised.unwrap_or_else(|| error::call(&error))
    })
}
