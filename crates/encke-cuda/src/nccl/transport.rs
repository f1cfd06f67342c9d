//! NCCL as a wire for a GPU's buffers.
//!
//! One exchange is one group of sends and receives on a stream of its own, between events of the
//! compute stream. The host waits until the group is through, because a deadline needs somebody who
//! looks at the clock; the GPU computes meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};
use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError};

use super::bindings::{Nccl, UniqueId};
use super::communicator::Communicator;
use crate::buffer::Buffer;
use crate::device::{Device, Reason};
use crate::error::{Error, Result};
use crate::host_memory::wait;
use crate::messages::Messages;

/// A transport of a GPU's buffers over NCCL.
pub struct NcclTransport {
    communicator: Communicator,
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    rank: usize,
    deadline: Duration,
}

impl NcclTransport {
    /// Meets the other ranks at `id`, which one of them made ([`Nccl::unique_id`]) and the caller
    /// brought to all. No wait, here or in an exchange, is longer than `deadline`.
    pub fn new(
        nccl: &Arc<Nccl>,
        device: &Arc<Device>,
        id: &UniqueId,
        rank: usize,
        ranks: usize,
        deadline: Duration,
    ) -> Result<NcclTransport> {
        let bound = device.context().bind_to_thread();
        bound.map_err(|error| Error::driver("joining the ranks", error))?;
        Ok(NcclTransport {
            communicator: Communicator::join(nccl, id, rank, ranks, deadline)?,
            device: Arc::clone(device),
            stream: device.stream()?,
            rank,
            deadline,
        })
    }

    /// Enqueues the group and then `meanwhile`, and returns the events before and after the group.
    fn begin(
        &mut self,
        messages: &Messages,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<[Arc<CudaEvent>; 2]> {
        let what = "an exchange";
        let ([reads, writes], [sends, receives]) = (messages.memory(), messages.pieces());
        let (device, own) = (Arc::clone(&self.device), Arc::clone(&self.stream));
        let mut ready = None;
        let done = device.place(&own, what, &reads, &writes, |stream| {
            let event = stream.record_event(None);
            ready = Some(Arc::new(event.map_err(|error| Error::driver(what, error))?));
            let stream = stream.cu_stream().cast();
            self.communicator.begin(&sends, &receives, stream)?;
            // Jobs are enqueued while NCCL connects; the event of the group's end comes after both.
            meanwhile();
            device.catch_up(Reason::Leaving)?;
            self.communicator
                .finish("the ranks to connect", Instant::now())
        })?;
        Ok([ready.unwrap_or_else(|| Arc::clone(&done)), done])
    }

    /// Waits until the group is through, here and at the other ranks as far as this one can see.
    fn finish(&mut self, done: &CudaEvent) -> Result<()> {
        let since = Instant::now();
        loop {
            let complete = done.try_is_complete();
            if complete.map_err(|error| Error::driver("an exchange", error))? {
                return Ok(());
            }
            self.communicator.is_ready("an exchange")?;
            let waited = since.elapsed();
            if waited > self.deadline {
                self.communicator.abort();
                return Err(Error::Deadline {
                    what: "the other ranks".into(),
                    waited,
                    limit: self.deadline,
                });
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl Transport<Buffer> for NcclTransport {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> std::result::Result<Moved, TransportError> {
        let rank = self.rank;
        let local = |error: Error| TransportError::Local {
            rank,
            round,
            reason: error.to_string(),
        };
        let messages = Messages::of(outgoing, incoming).map_err(local)?;
        if messages.is_empty() {
            meanwhile();
            return Ok(Moved::default());
        }
        let mut either = messages.receives.iter().chain(&messages.sends);
        let peer = either.next().map_or(rank, |x| x.address.peer);
        // Which of several peers kept a group waiting NCCL does not say; the first is named.
        let failed = |error: Error| match error {
            Error::Deadline { waited, limit, .. } => TransportError::Deadline {
                rank,
                peer,
                round,
                waited,
                limit,
            },
            other => local(other),
        };
        let [ready, done] = self.begin(&messages, meanwhile).map_err(failed)?;
        // How long this GPU takes until it can send is not the other ranks' fault.
        let came = wait(&ready, "the GPU to come to an exchange", self.deadline);
        if let Err(error) = came {
            self.communicator.forsake();
            return Err(local(error));
        }
        self.finish(&done).map_err(failed)?;
        Ok(messages.moved())
    }
}
