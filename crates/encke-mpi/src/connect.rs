//! A first message between every two ranks, while all is well.
//!
//! MPI looks a process up when it is first sent something, by asking the launcher, and waits for the
//! answer inside the call. When a link is cut nobody answers. So everyone is asked for at the
//! beginning, because news of a failure must reach whoever is left without asking anyone.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use crate::sys::{Communicator, CallFailure, MpiRequest};

/// The tag of these messages: the largest that every MPI has.
const TAG: c_int = 32767;

/// Who has not answered, if anyone, when all have, or when the time is up.
pub fn meet_all(
    comm: Communicator,
    rank: usize,
    ranks: usize,
    limit: Duration,
) -> Result<Option<usize>, CallFailure> {
    // Never freed: where somebody does not answer, MPI keeps them.
    let papers: &'static mut [u8] = Box::leak(vec![0; ranks].into_boxed_slice());
    let others = (1..ranks).map(|step| (rank + step) % ranks);
    let mut requests: Vec<(usize, MpiRequest)> = Vec::new();
    for from in others.clone() {
        // SAFETY: a byte of its own, which stays for ever.
        let request = unsafe { comm.receive(papers.as_mut_ptr().add(from), 1, Some(from), TAG) }?;
        requests.push((from, request));
    }
    for to in others {
        // SAFETY: the byte stays for ever.
        requests.push((to, unsafe { comm.send(&[1], to, TAG) }?));
    }
    let since = Instant::now();
    while !requests.is_empty() {
        let mut fault = None;
        requests.retain_mut(|(_, request)| match request.test() {
            Ok(over) => !over,
            Err(error) => {
                fault = Some(error);
                false
            }
        });
        if let Some(fault) = fault {
            return Err(fault);
        }
        if since.elapsed() > limit {
            break;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(requests.first().map(|(peer, _)| *peer))
}
