//! How long work takes, alone and concurrently with its like.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use encke_core::Data;
use encke_core::kernel::{Kernel, KernelError};

use super::buffers::ProbeBuffers;
use super::probes::Probe;

/// The length of a reading. All are of the same length so that other load on the machine disturbs
/// short jobs as much as long ones.
const READING: Duration = Duration::from_millis(30);

/// Work that is timed; the argument is the number of its previous calls.
pub type TimedWork<'a> = dyn FnMut(usize) -> Result<(), KernelError> + 'a;

/// Mean seconds of work that is repeated for the length of a reading. `work` is called with the
/// number of its previous calls.
pub(super) fn seconds(
    mut work: impl FnMut(usize) -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    let begin = Instant::now();
    let mut times = 0;
    loop {
        work(times)?;
        times += 1;
        let passed = begin.elapsed();
        if passed >= READING {
            return Ok(passed.as_secs_f64() / times as f64);
        }
    }
}

/// Mean seconds of a job that has the device to itself, on different rows each time.
pub(super) fn alone<K: Kernel<Buffer = Data>>(
    kernel: &K,
    probe: &Probe,
    sets: &mut [ProbeBuffers],
    backward: bool,
) -> Result<f64, KernelError> {
    let count = sets.len();
    seconds(|times| {
        let job = &probe.jobs[times / count % probe.jobs.len()];
        sets[times % count].run(kernel, job, backward)
    })
}

/// Mean seconds from the end of one job to the end of the next while one thread for each set of
/// buffers keeps running jobs, as ranks do.
pub(super) fn concurrent<K: Kernel<Buffer = Data>>(
    kernel: &K,
    probe: &Probe,
    sets: &mut [ProbeBuffers],
    backward: bool,
) -> Result<f64, KernelError> {
    let barrier = Barrier::new(sets.len());
    let done: Vec<Result<(usize, Instant, Instant), KernelError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = sets
            .iter_mut()
            .map(|set| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let begin = Instant::now();
                    let mut times = 0;
                    while times == 0 || begin.elapsed() < READING {
                        set.run(kernel, &probe.jobs[times % probe.jobs.len()], backward)?;
                        times += 1;
                    }
                    Ok((times, begin, Instant::now()))
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).collect()
    });
    let done = done.into_iter().collect::<Result<Vec<_>, _>>()?;
    let jobs: usize = done.iter().map(|(times, ..)| times).sum();
    let begin = done.iter().map(|(_, begin, _)| *begin).min();
    let end = done.iter().map(|(.., end)| *end).max();
    let passed = begin.zip(end).map(|(begin, end)| end - begin);
    Ok(passed.unwrap_or_default().as_secs_f64() / jobs.max(1) as f64)
}
