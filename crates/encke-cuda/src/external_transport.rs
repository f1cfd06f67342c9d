//! Another library's wire for a GPU's memory.
//!
//! torch.distributed moves bytes of a GPU over NCCL on streams of its own. The decision here: such a
//! wire is told a stream, where the bytes are ready when it comes to the sends, and on which whatever
//! comes later finds them received. What it does in between is its own affair; nothing is staged, and
//! jobs run beside it.

use std::sync::Arc;

use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError};

use crate::buffer::Buffer;
use crate::device::{Device, Reason};
use crate::error::Error;
use crate::messages::{Messages, Piece};

/// A wire that enqueues its hops on a GPU.
pub trait ExternalWire {
    /// Enqueues the hops of a round: after what `stream` (a `CUstream`) has now, and before what is
    /// enqueued there next. The memory is left alone by everybody else until [`ExternalWire::wait`] has
    /// returned and `stream` has come so far.
    fn post(
        &mut self,
        round: usize,
        sends: &[Piece],
        receives: &[Piece],
        stream: u64,
    ) -> std::result::Result<(), TransportError>;

    /// Waits until the hops that were posted last are through.
    fn wait(&mut self, round: usize) -> std::result::Result<(), TransportError>;
}

/// A transport of a GPU's buffers over such a wire.
pub struct ExternalTransport<W> {
    wire: W,
    device: Arc<Device>,
    rank: usize,
}

impl<W: ExternalWire> ExternalTransport<W> {
    /// The wire of `rank` on a GPU.
    pub fn new(wire: W, device: &Arc<Device>, rank: usize) -> ExternalTransport<W> {
        ExternalTransport {
            wire,
            device: Arc::clone(device),
            rank,
        }
    }

    /// Posts the round's messages between events of whoever uses their memory.
    fn post(
        &mut self,
        round: usize,
        messages: &Messages,
    ) -> std::result::Result<(), TransportError> {
        let [reads, writes] = messages.memory();
        let [sends, receives] = messages.pieces();
        let device = Arc::clone(&self.device);
        let mut posted = Ok(());
        // The stream for copies to the host has nothing to do where no hop goes there.
        let placed = device.place(device.outward(), "a hop", &reads, &writes, |stream| {
            let stream = stream.cu_stream() as usize as u64;
            posted = self.wire.post(round, &sends, &receives, stream);
            Ok(())
        });
        posted?;
        placed.map(drop).map_err(|error| self.local(round, &error))
    }

    fn local(&self, round: usize, error: &Error) -> TransportError {
        TransportError::Local {
            rank: self.rank,
            round,
            reason: error.to_string(),
        }
    }
}

impl<W: ExternalWire> Transport<Buffer> for ExternalTransport<W> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> std::result::Result<Moved, TransportError> {
        let messages = Messages::of(outgoing, incoming);
        let messages = messages.map_err(|error| self.local(round, &error))?;
        if messages.is_empty() {
            meanwhile();
            return Ok(Moved::default());
        }
        self.post(round, &messages)?;
        meanwhile();
        let asked = self.device.catch_up(Reason::Leaving);
        asked.map_err(|error| self.local(round, &error))?;
        self.wire.wait(round)?;
        Ok(messages.moved())
    }
}
