//! Calls from inside rayon pools of the caller, and from forked processes: they end.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use encke::conformance::Random;
use encke::{Attention, Cut, DType, Error, Kernel, Pattern, PoolError, Tensor};
use rayon::prelude::*;

/// How long a test may take that does not hang.
const LIMIT: Duration = Duration::from_secs(60);

fn tensor(seed: u64) -> Tensor {
    let mut random = Random::new(seed);
    let values: Vec<f64> = (0..512 * 4 * 16).map(|_| random.unit()).collect();
    Tensor::from_f64(DType::F32, [1, 512, 4, 16], &values).expect("sizes agree")
}

fn attention(ranks: usize) -> Attention {
    let pattern = Pattern::dense().causal(true);
    let builder = Attention::builder()
        .pattern(pattern)
        .ranks(ranks)
        .sharding(Cut::Zigzag);
    let builder = builder.deadline(Duration::from_secs(5));
    builder.build().expect("the settings are legal")
}

/// The sum of out and dq of one call.
fn compute<K: Kernel>(attention: &Attention<K>, x: &Tensor) -> Result<Vec<f64>, Error> {
    let x = x.view();
    let forward = attention.forward(&x, &x, &x)?;
    let dout = forward.out.view();
    let backward = attention.backward(&x, &x, &x, &forward.checkpoint, &dout, None)?;
    let mut values = forward.out.data().to_f64();
    values.extend(backward.dq.data().to_f64());
    Ok(values)
}

/// Runs `test` on a thread of its own, and fails if it does not end.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    ended
        .recv_timeout(LIMIT)
        .expect("the calls end, and no test panics");
}

#[test]
fn tasks_of_rayon_may_call_rings() {
    ends(|| {
        let x = tensor(1);
        let custom = rayon::ThreadPoolBuilder::new().num_threads(3).build();
        let custom = custom.expect("threads start");
        for ranks in [1, 2, 4] {
            let attention = attention(ranks);
            let expected = compute(&attention, &x).expect("the call is legal");
            let call = |_| {
                let got = compute(&attention, &x).expect("the call is legal");
                assert!(got == expected, "{ranks} ranks");
            };
            (0..8).into_par_iter().for_each(call);
            custom.install(|| (0..8).into_par_iter().for_each(call));
            // A pool that waits for another pool, whose threads wait for the ranks.
            (0..4)
                .into_par_iter()
                .for_each(|i| custom.install(|| call(i)));
        }
    });
}

#[test]
fn a_task_of_rayon_may_hold_a_lock_while_it_calls() {
    // rayon lets a thread that waits run another task, which would wait for this thread's lock.
    ends(|| {
        let x = tensor(2);
        for ranks in [1, 2] {
            let attention = Mutex::new(attention(ranks));
            (0..16).into_par_iter().for_each(|_| {
                let attention = attention.lock().expect("no call panics");
                compute(&attention, &x).expect("the call is legal");
            });
        }
    });
}

#[cfg(unix)]
#[test]
fn a_forked_process_gets_an_error() {
    let (attention, x) = (Arc::new(attention(2)), tensor(3));
    compute(&attention, &x).expect("the call is legal");
    // SAFETY: the child calls functions that must refuse before they wait for a thread or a lock,
    // and ends without returning; the alarm ends it where they do not.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |error| matches!(error, Error::Pool(PoolError::Forked { .. }));
        // SAFETY: as above.
        unsafe {
            libc::alarm(LIMIT.as_secs() as u32 / 2);
            let refused = compute(&attention, &x).is_err_and(forked);
            libc::_exit(if refused { 0 } else { 1 });
        }
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child was refused, and did not hang");
}
