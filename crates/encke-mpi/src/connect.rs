//! Connects every pair of ranks at the start.
//!
//! MPI looks a process up through the launcher when it is first sent a message, and blocks inside
//! the call until the launcher answers; across a cut link there is no answer. So all pairs exchange
//! a byte at the start, because a failure notice must reach the remaining ranks without a lookup.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use crate::sys::{CallFailure, MpiCommunicator, MpiRequest};

/// The tag of these messages: the largest that every MPI supports.
const TAG: c_int = 32767;

/// Exchanges a byte with every rank. Returns a rank that has not answered within `limit`, if any.
pub fn connect_all(
    comm: MpiCommunicator,
    rank: usize,
    ranks: usize,
    limit: Duration,
) -> Result<Option<usize>, CallFailure> {
    // Never freed: MPI keeps the bytes of receives that do not complete.
    let received: &'static mut [u8] = Box::leak(vec![0; ranks].into_boxed_slice());
    let others = (1..ranks).map(|step| (rank + step) % ranks);
    let mut requests: Vec<(usize, MpiRequest)> = Vec::new();
    for from in others.clone() {
        // SAFETY: one byte for each receive, which is never freed.
        let request = unsafe { comm.receive(received.as_mut_ptr().add(from), 1, Some(from), TAG) }?;
        requests.push((from, request));
    }
    for to in others {
        // SAFETY: the byte is a constant.
        requests.push((to, unsafe { comm.send(&[1], to, TAG) }?));
    }
    let start = Instant::now();
    while !requests.is_empty() {
        let mut failure = None;
        requests.retain_mut(|(_, request)| match request.test() {
            Ok(done) => !done,
            Err(error) => {
                failure = Some(error);
                false
            }
        });
        if let Some(failure) = failure {
            return Err(failure);
        }
        if start.elapsed() > limit {
            break;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(requests.first().map(|(peer, _)| *peer))
}
