//! NCCL as a transport of a GPU's buffers.
//!
//! One exchange is one group of sends and receives on a stream of its own, ordered by events with
//! the streams that use the memory. The host thread waits until the group is complete, because a
//! deadline needs a thread that checks the clock; the GPU computes meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};
use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError};

use super::bindings::{Nccl, UniqueId};
use super::communicator::Communicator;
use crate::buffer::Buffer;
use crate::device::{Device, FlushReason};
use crate::error::{Error, Result};
use crate::host_memory::{poll, wait};
use crate::messages::{RoundMessages, local_error};

/// Pause between two looks at a group's completion.
const SLEEP: Duration = Duration::from_micros(20);

/// A transport of a GPU's buffers over NCCL.
pub struct NcclTransport {
    communicator: Communicator,
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    rank: usize,
    deadline: Duration,
}

impl NcclTransport {
    /// Joins the other ranks under `id`, which one rank creates ([`Nccl::unique_id`]) and the
    /// caller distributes. No wait, here or in an exchange, is longer than `deadline`.
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

    /// Enqueues the group and then `meanwhile`; returns the events before and after the group.
    fn begin(
        &mut self,
        messages: &RoundMessages,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<[Arc<CudaEvent>; 2]> {
        let what = "an exchange";
        let ([reads, writes], [sends, receives]) = (messages.memory(), messages.posted());
        let (device, own) = (Arc::clone(&self.device), Arc::clone(&self.stream));
        let mut ready = None;
        let done = device.enqueue_recorded(&own, what, &reads, &writes, |stream| {
            let event = stream.record_event(None);
            ready = Some(Arc::new(event.map_err(|error| Error::driver(what, error))?));
            let stream = stream.cu_stream().cast();
            self.communicator.begin(&sends, &receives, stream)?;
            // Jobs are enqueued while NCCL connects; the event after the group comes after both.
            meanwhile();
            device.flush(FlushReason::BeforeWait)?;
            self.communicator
                .finish("the ranks to connect", Instant::now())
        })?;
        Ok([ready.unwrap_or_else(|| Arc::clone(&done)), done])
    }

    /// Waits until the group is complete, here and, as far as NCCL reports it, at the other ranks.
    fn finish(&mut self, done: &CudaEvent) -> Result<()> {
        let communicator = &mut self.communicator;
        let pause = |_| std::thread::sleep(SLEEP);
        let ended = poll(
            "the other ranks",
            Instant::now(),
            self.deadline,
            pause,
            || {
                let complete = done.try_is_complete();
                let complete = complete.map_err(|error| Error::driver("an exchange", error))?;
                if !complete {
                    communicator.is_ready("an exchange")?;
                }
                Ok(complete)
            },
        );
        if matches!(ended, Err(Error::Deadline { .. })) {
            communicator.abort();
        }
        ended
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
        let local = local_error(rank, round);
        let messages = RoundMessages::new(outgoing, incoming).map_err(&local)?;
        if messages.is_empty() {
            meanwhile();
            return Ok(Moved::default());
        }
        let mut either = messages.receives.iter().chain(&messages.sends);
        let peer = either.next().map_or(rank, |x| x.address.peer);
        // NCCL does not report which of several peers delayed a group; the error names the first.
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
        // The time until this GPU reaches the group does not count against the other ranks.
        let reached = wait(&ready, "the GPU to reach an exchange", self.deadline);
        if let Err(error) = reached {
            self.communicator.leak();
            return Err(local(error));
        }
        self.finish(&done).map_err(failed)?;
        Ok(messages.moved())
    }
}
