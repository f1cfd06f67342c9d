//! One rank's NCCL communicator.
//!
//! After every wait the communicator is either alive and idle, or aborted; an aborted one refuses
//! every later call.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bindings::{
    BYTES, CommHandle, IN_PROGRESS, Nccl, NcclCode, NcclConfig, NcclUniqueId, SUCCESS, UniqueId,
};
use crate::error::{Error, Result};
use crate::host_memory::poll;
use crate::messages::DeviceMessage;

const SLEEP: Duration = Duration::from_micros(50);

/// A rank's communicator.
pub(super) struct Communicator {
    nccl: Arc<Nccl>,
    /// Null after an abort.
    handle: CommHandle,
    deadline: Duration,
}

// SAFETY: any thread may use a communicator, one at a time; every use takes `&mut self`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the other ranks under `id`. The GPU's context must be bound to this thread.
    pub fn join(
        nccl: &Arc<Nccl>,
        id: &UniqueId,
        rank: usize,
        ranks: usize,
        deadline: Duration,
    ) -> Result<Communicator> {
        let to_int = |count: usize| {
            c_int::try_from(count).map_err(|_| Error::Unsupported {
                what: format!("{count} ranks"),
            })
        };
        let (rank, ranks) = (to_int(rank)?, to_int(ranks)?);
        let (id, mut config) = (NcclUniqueId { bytes: *id }, NcclConfig::nonblocking());
        let mut handle: CommHandle = ptr::null_mut();
        // SAFETY: the configuration has the layout of its version, and the call reads it before it
        // returns.
        let code = unsafe { (nccl.init)(&mut handle, ranks, id, rank, &mut config) };
        let mut communicator = Communicator {
            nccl: Arc::clone(nccl),
            handle,
            deadline,
        };
        communicator.check("joining the ranks", code)?;
        communicator.finish("the ranks to join", Instant::now())?;
        Ok(communicator)
    }

    /// Enqueues sends and receives as one group. Call [`Communicator::finish`] afterwards.
    pub fn begin(
        &mut self,
        sends: &[DeviceMessage],
        receives: &[DeviceMessage],
        stream: *mut std::ffi::c_void,
    ) -> Result<()> {
        let handle = self.handle()?;
        // SAFETY: the caller keeps memory of these sizes alive until the stream has passed.
        let (posted, ended) = unsafe {
            let mut code = (self.nccl.group_start)();
            let mut post = |post: &mut dyn FnMut() -> NcclCode| {
                if is_started(code) {
                    code = post();
                }
            };
            for message in sends {
                let (from, peer) = (message.pointer as *const _, message.peer as c_int);
                post(&mut || (self.nccl.send)(from, message.bytes, BYTES, peer, handle, stream));
            }
            for message in receives {
                let (to, peer) = (message.pointer as *mut _, message.peer as c_int);
                post(&mut || (self.nccl.receive)(to, message.bytes, BYTES, peer, handle, stream));
            }
            // The group is ended even after an error, or the thread would stay in it.
            (code, (self.nccl.group_end)())
        };
        self.check("posting an exchange", posted)?;
        self.check("starting an exchange", ended)
    }

    /// Waits until all calls so far are enqueued on the GPU; aborts at the deadline.
    pub fn finish(&mut self, what: &str, start: Instant) -> Result<()> {
        let pause = |_| std::thread::sleep(SLEEP);
        let ended = poll(what, start, self.deadline, pause, || self.is_ready(what));
        if matches!(ended, Err(Error::Deadline { .. })) {
            self.abort();
        }
        ended
    }

    /// Whether no call is in progress; an error if one failed, here or at another rank.
    pub fn is_ready(&mut self, what: &str) -> Result<bool> {
        let handle = self.handle()?;
        let mut state = SUCCESS;
        // SAFETY: the handle is alive, and `state` receives the result.
        let code = unsafe { (self.nccl.async_error)(handle, &mut state) };
        self.check(what, code)?;
        self.check(what, state)?;
        Ok(state == SUCCESS)
    }

    /// Aborts all calls in progress, on the host and on the GPU.
    pub fn abort(&mut self) {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        if !handle.is_null() {
            // SAFETY: the handle is alive and not used again.
            unsafe { (self.nccl.abort)(handle) };
        }
    }

    /// Leaks the communicator: on a GPU that hangs, an abort would hang too.
    pub fn leak(&mut self) {
        self.handle = ptr::null_mut();
    }

    fn handle(&self) -> Result<CommHandle> {
        match self.handle.is_null() {
            false => Ok(self.handle),
            true => Err(Error::Nccl {
                what: "an exchange".into(),
                reason:
                    "the communicator was aborted after an earlier failure; create a new transport"
                        .into(),
            }),
        }
    }

    /// Turns a failed result code into an error and aborts the communicator.
    fn check(&mut self, what: &str, code: NcclCode) -> Result<()> {
        if is_started(code) {
            return Ok(());
        }
        let error = self.nccl.error(what, code, self.handle);
        self.abort();
        Err(error)
    }
}

fn is_started(code: NcclCode) -> bool {
    code == SUCCESS || code == IN_PROGRESS
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        // Other ranks may still be receiving: finalize waits for them, until the deadline.
        // SAFETY: the handle is alive.
        let code = unsafe { (self.nccl.finalize)(self.handle) };
        let left = self.check("leaving the ranks", code);
        if left
            .and_then(|()| self.finish("the ranks to leave", Instant::now()))
            .is_ok()
        {
            // SAFETY: the handle is alive, idle and not used again.
            unsafe { (self.nccl.destroy)(self.handle) };
        }
    }
}
