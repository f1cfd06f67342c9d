//! Another library's transport for a GPU's memory.
//!
//! torch.distributed moves bytes of a GPU over NCCL on streams of its own. The decision here: the
//! library gets one stream. Parcels to send are ready when that stream reaches its operations, and
//! operations enqueued there later find the receives complete. Nothing is staged, and jobs run
//! concurrently.

use std::sync::Arc;

use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError};

use crate::buffer::Buffer;
use crate::device::{Device, FlushReason};
use crate::messages::{DeviceMessage, RoundMessages, local_error};

/// A transport of another library that enqueues its messages on a GPU.
pub trait ExternalWire {
    /// Enqueues the messages of a round: after everything `stream` (a `CUstream`) has now, and
    /// before what is enqueued there next. Nothing else uses the memory until
    /// [`ExternalWire::wait`] has returned and `stream` has reached this point.
    fn post(
        &mut self,
        round: usize,
        sends: &[DeviceMessage],
        receives: &[DeviceMessage],
        stream: u64,
    ) -> std::result::Result<(), TransportError>;

    /// Waits until the messages posted last are complete.
    fn wait(&mut self, round: usize) -> std::result::Result<(), TransportError>;
}

/// A transport of a GPU's buffers over an [`ExternalWire`].
pub struct ExternalTransport<W> {
    wire: W,
    device: Arc<Device>,
    rank: usize,
}

impl<W: ExternalWire> ExternalTransport<W> {
    /// The transport of `rank` on a GPU.
    pub fn new(wire: W, device: &Arc<Device>, rank: usize) -> ExternalTransport<W> {
        ExternalTransport {
            wire,
            device: Arc::clone(device),
            rank,
        }
    }

    /// Posts a round's messages, ordered with all other uses of their memory.
    fn post(
        &mut self,
        round: usize,
        messages: &RoundMessages,
    ) -> std::result::Result<(), TransportError> {
        let [reads, writes] = messages.memory();
        let [sends, receives] = messages.posted();
        let device = Arc::clone(&self.device);
        let mut posted = Ok(());
        // The stream for copies to the host is idle: no message goes through the host here.
        let stream = device.device_to_host();
        let enqueued = device.enqueue_recorded(stream, "a hop", &reads, &writes, |stream| {
            let stream = stream.cu_stream() as usize as u64;
            posted = self.wire.post(round, &sends, &receives, stream);
            Ok(())
        });
        posted?;
        enqueued.map(drop).map_err(local_error(self.rank, round))
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
        let failed = local_error(self.rank, round);
        let messages = RoundMessages::new(outgoing, incoming).map_err(&failed)?;
        if messages.is_empty() {
            meanwhile();
            return Ok(Moved::default());
        }
        self.post(round, &messages)?;
        meanwhile();
        let flushed = self.device.flush(FlushReason::BeforeWait);
        flushed.map_err(&failed)?;
        self.wire.wait(round)?;
        Ok(messages.moved())
    }
}
