//! How a rank that fails tells all others, and how they hear of it.
//!
//! Every rank keeps one small receive open for a notice from anyone. With ULFM the same receive
//! reports the death of any process, also of one that this rank never talks to.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use crate::sys::{ErrorClass, Communicator, CallFailure, MpiRequest};
use crate::words::FailureNotice;

/// The tag of notices; messages have those above it.
pub const TAG: c_int = 0;
/// How long a failing rank stays to see its notices off.
const FAREWELL: Duration = Duration::from_millis(300);

/// The open receive, and what came in by it.
#[derive(Debug)]
pub struct FailureListener {
    comm: Communicator,
    /// Written by MPI until the bell has rung; leaked where MPI does not let go of it.
    paper: *mut [u8; FailureNotice::BYTES],
    bell: MpiRequest,
    heard: Option<FailureNotice>,
}

// SAFETY: the pointer is to memory that only this value and its own request know of.
unsafe impl Send for FailureListener {}

impl FailureListener {
    /// Begins to listen.
    pub fn new(comm: Communicator) -> Result<FailureListener, CallFailure> {
        let paper = Box::into_raw(Box::new([0; FailureNotice::BYTES]));
        // SAFETY: the paper is freed only after the request has ended.
        let bell = unsafe { comm.receive(paper.cast(), FailureNotice::BYTES, None, TAG) }?;
        Ok(FailureListener {
            comm,
            paper,
            bell,
            heard: None,
        })
    }

    /// The first notice, if one has come; an error of class [`ErrorClass::Dead`] where a process ended.
    pub fn heard(&mut self) -> Result<Option<&FailureNotice>, CallFailure> {
        if self.heard.is_none() && !self.bell.is_over() && self.bell.test()? {
            // SAFETY: the request has ended, so the paper is ours again.
            self.heard = Some(FailureNotice::from_bytes(unsafe { &*self.paper }));
        }
        Ok(self.heard.as_ref())
    }

    /// Tells `others`, and stays a moment so that they are told.
    pub fn raise(&self, notice: &FailureNotice, others: impl Iterator<Item = usize>) {
        // Never freed: a notice to a rank that is stuck may be read when we are gone.
        let bytes = Box::leak(Box::new(notice.to_bytes()));
        // SAFETY: the bytes stay for ever.
        let sent = others.map(|to| unsafe { self.comm.send(bytes, to, TAG) });
        let mut requests: Vec<MpiRequest> = sent.filter_map(Result::ok).collect();
        let since = Instant::now();
        while !requests.is_empty() && since.elapsed() < FAREWELL {
            requests.retain_mut(|request| matches!(request.test(), Ok(false)));
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Stops listening.
    pub fn close(&mut self) {
        self.bell.cancel();
        let since = Instant::now();
        while since.elapsed() < FAREWELL {
            match self.bell.test() {
                Ok(false) => std::thread::sleep(Duration::from_micros(50)),
                // A death is pending on it for ever; the paper stays MPI's then.
                Err(fault) if fault.class == ErrorClass::Dead && !self.bell.is_over() => return,
                _ => break,
            }
        }
    }
}

impl Drop for FailureListener {
    fn drop(&mut self) {
        if self.bell.is_over() {
            // SAFETY: it came from a box, and MPI has let go of it.
            drop(unsafe { Box::from_raw(self.paper) });
        }
    }
}
