//! One rank's membership in a group of ranks.
//!
//! However a wait ends, the communicator ends in a state one can go on from: alive and idle, or
//! aborted and never asked again.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bindings::{BYTES, Code, Config, Handle, IN_PROGRESS, Nccl, RawId, SUCCESS, UniqueId};
use crate::error::{Error, Result};
use crate::messages::Piece;

const SLEEP: Duration = Duration::from_micros(50);

/// A member of a group of ranks.
pub(super) struct Communicator {
    nccl: Arc<Nccl>,
    /// Null once it is aborted.
    handle: Handle,
    deadline: Duration,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time; every use takes `&mut self`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Meets the others at `id`. The context of the rank's GPU is bound to this thread.
    pub fn join(
        nccl: &Arc<Nccl>,
        id: &UniqueId,
        rank: usize,
        ranks: usize,
        deadline: Duration,
    ) -> Result<Communicator> {
        let small = |number: usize| {
            c_int::try_from(number).map_err(|_| Error::Unsupported {
                what: format!("{number} ranks"),
            })
        };
        let (rank, ranks) = (small(rank)?, small(ranks)?);
        let (id, mut config) = (RawId { bytes: *id }, Config::nonblocking());
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: the configuration lies as its version says, and is read before the call returns.
        let code = unsafe { (nccl.init)(&mut handle, ranks, id, rank, &mut config) };
        let mut communicator = Communicator {
            nccl: Arc::clone(nccl),
            handle,
            deadline,
        };
        communicator.accept("joining the ranks", code)?;
        communicator.finish("the ranks to meet", Instant::now())?;
        Ok(communicator)
    }

    /// Enqueues sends and receives as one group. Unfinished until [`Communicator::finish`].
    pub fn begin(
        &mut self,
        sends: &[Piece],
        receives: &[Piece],
        stream: *mut std::ffi::c_void,
    ) -> Result<()> {
        let handle = self.live()?;
        // SAFETY: the caller keeps the memory alive, of these sizes, until the stream has passed.
        let (posted, ended) = unsafe {
            let mut code = (self.nccl.group_start)();
            let mut post = |post: &mut dyn FnMut() -> Code| {
                if begun(code) {
                    code = post();
                }
            };
            for &Piece {
                peer,
                pointer,
                bytes,
                ..
            } in sends
            {
                let (from, peer) = (pointer as *const _, peer as c_int);
                post(&mut || (self.nccl.send)(from, bytes, BYTES, peer, handle, stream));
            }
            for &Piece {
                peer,
                pointer,
                bytes,
                ..
            } in receives
            {
                let (to, peer) = (pointer as *mut _, peer as c_int);
                post(&mut || (self.nccl.receive)(to, bytes, BYTES, peer, handle, stream));
            }
            // The group is ended in any case, or the thread would stay in it.
            (code, (self.nccl.group_end)())
        };
        self.accept("posting an exchange", posted)?;
        self.accept("starting an exchange", ended)
    }

    /// Waits until what was asked for is under way on the GPU.
    pub fn finish(&mut self, what: &str, since: Instant) -> Result<()> {
        while !self.is_ready(what)? {
            let waited = since.elapsed();
            if waited > self.deadline {
                self.abort();
                return Err(Error::Deadline {
                    what: what.into(),
                    waited,
                    limit: self.deadline,
                });
            }
            std::thread::sleep(SLEEP);
        }
        Ok(())
    }

    /// Whether it has nothing left to start; an error if something went wrong since, here or at
    /// another rank.
    pub fn is_ready(&mut self, what: &str) -> Result<bool> {
        let handle = self.live()?;
        let mut state = SUCCESS;
        // SAFETY: the handle is alive, and there is a place for the answer.
        let code = unsafe { (self.nccl.async_error)(handle, &mut state) };
        self.accept(what, code)?;
        self.accept(what, state)?;
        Ok(state == SUCCESS)
    }

    /// Ends everything that is under way, here and on the GPU.
    pub fn abort(&mut self) {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        if !handle.is_null() {
            // SAFETY: the handle is alive and used no more.
            unsafe { (self.nccl.abort)(handle) };
        }
    }

    /// Leaves it as it is, for a GPU that hangs and would hang the abort too.
    pub fn forsake(&mut self) {
        self.handle = ptr::null_mut();
    }

    fn live(&self) -> Result<Handle> {
        match self.handle.is_null() {
            false => Ok(self.handle),
            true => Err(Error::Nccl {
                what: "an exchange".into(),
                reason: "the ranks were separated by an earlier failure; make a new transport"
                    .into(),
            }),
        }
    }

    /// An error for a number that is one; the communicator is aborted then.
    fn accept(&mut self, what: &str, code: Code) -> Result<()> {
        if begun(code) {
            return Ok(());
        }
        let error = self.nccl.error(what, code, self.handle);
        self.abort();
        Err(error)
    }
}

fn begun(code: Code) -> bool {
    code == SUCCESS || code == IN_PROGRESS
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        // Others may still be taking what was sent, so leaving is announced; but not for ever.
        // SAFETY: the handle is alive.
        let code = unsafe { (self.nccl.finalize)(self.handle) };
        let left = self.accept("leaving the ranks", code);
        if left
            .and_then(|()| self.finish("the ranks to part", Instant::now()))
            .is_ok()
        {
            // SAFETY: the handle is alive, idle and used no more.
            unsafe { (self.nccl.destroy)(self.handle) };
        }
    }
}
