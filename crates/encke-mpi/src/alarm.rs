//! How a rank that fails tells all others, and how they hear of it.
//!
//! Every rank keeps one small receive open for a notice from anyone. With ULFM the same receive
//! reports the death of any process, also of one that this rank never talks to.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use crate::sys::{Class, Comm, Fault, Request};

/// The tag of notices; messages have those above it.
pub const TAG: c_int = 0;
/// Bytes of a notice: small enough to be sent whether or not anyone is looking.
const BYTES: usize = 512;
/// How long a failing rank stays to see its notices off.
const FAREWELL: Duration = Duration::from_millis(300);

/// Who failed, and what was said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The rank that failed, which need not be the one that says so.
    pub about: usize,
    /// How.
    pub reason: String,
}

impl Notice {
    fn to_bytes(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&(self.about as u64).to_le_bytes());
        let room = BYTES - 8;
        let most = (0..=room.min(self.reason.len())).rev();
        let fits = most
            .into_iter()
            .find(|&end| self.reason.is_char_boundary(end));
        let text = &self.reason.as_bytes()[..fits.unwrap_or(0)];
        bytes[8..][..text.len()].copy_from_slice(text);
        bytes
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> Notice {
        let mut about = [0; 8];
        about.copy_from_slice(&bytes[..8]);
        let text = String::from_utf8_lossy(&bytes[8..]);
        Notice {
            about: u64::from_le_bytes(about) as usize,
            reason: text.trim_end_matches('\0').to_string(),
        }
    }
}

/// The open receive, and what came in by it.
#[derive(Debug)]
pub struct Alarm {
    comm: Comm,
    /// Written by MPI until the bell has rung; leaked where MPI does not let go of it.
    paper: *mut [u8; BYTES],
    bell: Request,
    heard: Option<Notice>,
}

// SAFETY: the pointer is to memory that only this value and its own request know of.
unsafe impl Send for Alarm {}

impl Alarm {
    /// Begins to listen.
    pub fn new(comm: Comm) -> Result<Alarm, Fault> {
        let paper = Box::into_raw(Box::new([0; BYTES]));
        // SAFETY: the paper is freed only after the request has ended.
        let bell = unsafe { comm.receive(paper.cast(), BYTES, None, TAG) }?;
        Ok(Alarm {
            comm,
            paper,
            bell,
            heard: None,
        })
    }

    /// The first notice, if one has come; an error of class [`Class::Dead`] where a process ended.
    pub fn heard(&mut self) -> Result<Option<&Notice>, Fault> {
        if self.heard.is_none() && !self.bell.is_over() && self.bell.test()? {
            // SAFETY: the request has ended, so the paper is ours again.
            self.heard = Some(Notice::from_bytes(unsafe { &*self.paper }));
        }
        Ok(self.heard.as_ref())
    }

    /// Tells `others`, and stays a moment so that they are told.
    pub fn raise(&self, notice: &Notice, others: impl Iterator<Item = usize>) {
        // Never freed: a notice to a rank that is stuck may be read when we are gone.
        let bytes = Box::leak(Box::new(notice.to_bytes()));
        // SAFETY: the bytes stay for ever.
        let sent = others.map(|to| unsafe { self.comm.send(bytes, to, TAG) });
        let mut requests: Vec<Request> = sent.filter_map(Result::ok).collect();
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
                Err(fault) if fault.class == Class::Dead && !self.bell.is_over() => return,
                _ => break,
            }
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if self.bell.is_over() {
            // SAFETY: it came from a box, and MPI has let go of it.
            drop(unsafe { Box::from_raw(self.paper) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_says_what_fits() {
        for reason in [
            "",
            "short",
            &"ä".repeat(400),
            &"x".repeat(504),
            &"y".repeat(505),
        ] {
            let notice = Notice {
                about: 7,
                reason: reason.to_string(),
            };
            let read = Notice::from_bytes(&notice.to_bytes());
            assert_eq!(read.about, 7);
            assert!(reason.starts_with(&read.reason));
            assert!(read.reason.len() + 2 > reason.len().min(BYTES - 8));
        }
    }
}
