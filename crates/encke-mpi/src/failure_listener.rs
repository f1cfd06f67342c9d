//! Failure notices between ranks.
//!
//! Every rank keeps one small receive posted for a notice from any rank. With ULFM the same receive
//! reports the death of any process, including one that this rank never exchanges messages with.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use crate::sys::{CallFailure, ErrorClass, MpiCommunicator, MpiRequest};
use crate::wire_format::FailureNotice;

/// The tag of notices; messages have larger ones.
pub const TAG: c_int = 0;
/// How long a failing rank waits for its notices to be sent.
const SEND_LIMIT: Duration = Duration::from_millis(300);

/// The posted receive, and the first notice that arrived.
#[derive(Debug)]
pub struct FailureListener {
    comm: MpiCommunicator,
    /// Written by MPI until the request has ended; leaked if MPI does not release it.
    buffer: *mut [u8; FailureNotice::BYTES],
    request: MpiRequest,
    received: Option<FailureNotice>,
}

// SAFETY: the pointer is to memory that only this value and its own request access.
unsafe impl Send for FailureListener {}

impl FailureListener {
    /// Posts the receive.
    pub fn new(comm: MpiCommunicator) -> Result<FailureListener, CallFailure> {
        let buffer = Box::into_raw(Box::new([0; FailureNotice::BYTES]));
        // SAFETY: the buffer is freed only after the request has ended.
        let request = unsafe { comm.receive(buffer.cast(), FailureNotice::BYTES, None, TAG) }?;
        Ok(FailureListener {
            comm,
            buffer,
            request,
            received: None,
        })
    }

    /// The first notice, if one has arrived; an error of class [`ErrorClass::Dead`] if a process
    /// died.
    pub fn poll(&mut self) -> Result<Option<&FailureNotice>, CallFailure> {
        if self.received.is_none() && !self.request.is_done() && self.request.test()? {
            // SAFETY: the request has ended, so MPI does not write to the buffer any more.
            self.received = Some(FailureNotice::from_bytes(unsafe { &*self.buffer }));
        }
        Ok(self.received.as_ref())
    }

    /// Sends a notice to `others`, and waits a moment for the sends to complete.
    pub fn notify(&self, notice: &FailureNotice, others: impl Iterator<Item = usize>) {
        // Never freed: a send to a rank that does not receive may outlive this call.
        let bytes = Box::leak(Box::new(notice.to_bytes()));
        // SAFETY: the bytes are never freed.
        let sent = others.map(|to| unsafe { self.comm.send(bytes, to, TAG) });
        let mut requests: Vec<MpiRequest> = sent.filter_map(Result::ok).collect();
        let start = Instant::now();
        while !requests.is_empty() && start.elapsed() < SEND_LIMIT {
            requests.retain_mut(|request| matches!(request.test(), Ok(false)));
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Cancels the receive.
    pub fn close(&mut self) {
        self.request.cancel();
        let start = Instant::now();
        while start.elapsed() < SEND_LIMIT {
            match self.request.test() {
                Ok(false) => std::thread::sleep(Duration::from_micros(50)),
                // After a death the request never ends, and the buffer stays MPI's.
                Err(failure) if failure.class == ErrorClass::Dead && !self.request.is_done() => {
                    return;
                }
                _ => break,
            }
        }
    }
}

impl Drop for FailureListener {
    fn drop(&mut self) {
        if self.request.is_done() {
            // SAFETY: it came from a box, and the request has ended.
            drop(unsafe { Box::from_raw(self.buffer) });
        }
    }
}
