//! Processes that are killed or stopped during a call: an error on every other process, within the
//! deadline, and no output.
//!
//! `ENCKE_KILLS` is the number of kills during a call; a few by default. A call that had finished
//! before the kill does not count and is repeated, up to as many times.

use std::time::{Duration, Instant};

use crate::command::CommandFolder;
use crate::files;
use crate::launch::{RunningJob, own_lines, signal, ulfm};

const RANKS: usize = 4;
/// Deadline of every exchange, in seconds.
const DEADLINE: u64 = 20;
const CALL: &str = "attend in.safetensors -o out.safetensors --grad";

/// A folder with a call of a second or more.
fn long_call() -> CommandFolder {
    let folder = CommandFolder::new();
    folder.succeeds("generate in.safetensors --tokens 4k --heads 2 --dim 64 --grad");
    folder
}

/// The time of the call without a kill, from when all processes are at work.
fn undisturbed(folder: &CommandFolder, options: &str) -> Duration {
    let running = RunningJob::start(folder, RANKS, &format!("{CALL} {options}"));
    at_work(folder);
    let since = Instant::now();
    let (status, lines) = running.end(Duration::from_secs(300));
    assert!(status.success(), "{lines:?}");
    clean(folder);
    since.elapsed()
}

fn kills(default: usize) -> usize {
    let set = std::env::var("ENCKE_KILLS").ok();
    set.and_then(|kills| kills.parse().ok()).unwrap_or(default)
}

/// A pseudo-random number from a seed.
fn random(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Waits until all processes are at work: the temporary output file exists.
fn at_work(folder: &CommandFolder) {
    let since = Instant::now();
    while !folder.names().iter().any(|name| name.ends_with(".tmp")) {
        assert!(
            since.elapsed() < Duration::from_secs(120),
            "it does not start"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A call during which a rank was killed.
struct KilledCall {
    victim: usize,
    killed: Instant,
    lines: Vec<(Instant, String)>,
}

impl KilledCall {
    /// Runs the call, whose duration is about `time`; the seed determines which rank dies and when.
    fn run(folder: &CommandFolder, options: &str, time: Duration, seed: u64) -> KilledCall {
        let victim = (random(seed) % RANKS as u64) as usize;
        let after = time.mul_f64((random(!seed) % 1000) as f64 / 1000.0);
        let arguments = format!("{CALL} --deadline {DEADLINE} {options}");
        let running = RunningJob::start(folder, RANKS, &arguments);
        let process = running.process(folder, victim);
        at_work(folder);
        std::thread::sleep(after);
        signal(process, "-KILL");
        let killed = Instant::now();
        let (_, lines) = running.end(Duration::from_secs(2 * DEADLINE + 60));
        KilledCall {
            victim,
            killed,
            lines,
        }
    }

    fn stderr(&self) -> String {
        let lines: Vec<&str> = self.lines.iter().map(|(_, line)| line.as_str()).collect();
        lines.join("\n")
    }

    /// Time from the kill to the last line with this prefix.
    fn last(&self, prefix: &str) -> Option<Duration> {
        let lines = self
            .lines
            .iter()
            .filter(|(_, line)| line.starts_with(prefix));
        let last = lines.map(|(at, _)| *at).max()?;
        Some(last.saturating_duration_since(self.killed))
    }
}

fn seed() -> u64 {
    let seed = u64::from(std::process::id()) << 20;
    println!("seed {seed}");
    seed
}

fn print_times(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    if let (Some(middle), Some(last)) = (times.get(times.len() / 2), times.last()) {
        println!(
            "{} kills, {name}: {middle:?} (median), {last:?} (most)",
            times.len()
        );
    }
}

/// Removes the files of a run.
fn clean(folder: &CommandFolder) {
    let left = folder.names().into_iter();
    for name in left.filter(|name| name != "in.safetensors" && name != "threads.safetensors") {
        std::fs::remove_file(folder.join(&name)).unwrap();
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    if !ulfm("a_killed_rank_is_named_by_all_others") {
        return;
    }
    let folder = long_call();
    let (seed, time) = (seed(), undisturbed(&folder, ""));
    let (mut times, wanted) = (Vec::new(), kills(3));
    for run in 0..2 * wanted as u64 {
        if times.len() == wanted {
            break;
        }
        let killed = KilledCall::run(&folder, "", time, seed + run);
        let (said, victim) = (killed.stderr(), killed.victim);
        let finished = folder.names().contains(&"out.safetensors".to_string());
        clean(&folder);
        if finished {
            println!("run {run}: it had finished before");
            continue;
        }
        let own = own_lines(&said);
        for rank in (0..RANKS).filter(|rank| *rank != victim) {
            let mark = format!("encke: rank {rank} of {RANKS}: ");
            let line = own.iter().find(|line| line.starts_with(&mark));
            let line =
                line.unwrap_or_else(|| panic!("run {run}: rank {rank} printed nothing: {said}"));
            assert!(
                line.contains(&format!("rank {victim}")),
                "run {run}: {line}"
            );
        }
        let took = killed.last("encke: rank").unwrap();
        assert!(
            took < Duration::from_secs(DEADLINE + 10),
            "run {run}: {took:?}"
        );
        times.push(took);
        if times.len().is_multiple_of(20) {
            println!("{} kills, all reported", times.len());
        }
    }
    print_times("until all survivors had reported it", times);
}

#[test]
fn with_redundancy_a_call_survives_a_killed_rank() {
    if !ulfm("with_redundancy_a_call_survives_a_killed_rank") {
        return;
    }
    let folder = long_call();
    folder.succeeds(&format!(
        "attend in.safetensors -o threads.safetensors --grad --ranks {RANKS}"
    ));
    let expected = files::read(&folder.join("threads.safetensors"));
    let (seed, time) = (seed(), undisturbed(&folder, "--redundancy 1"));
    let (mut times, wanted) = (Vec::new(), kills(3));
    for run in 0..2 * wanted as u64 {
        if times.len() == wanted {
            break;
        }
        let killed = KilledCall::run(&folder, "--redundancy 1", time, seed + run);
        let said = killed.stderr();
        let there = folder.names().contains(&"out.safetensors".to_string());
        assert!(there, "run {run}, rank {}: {said}", killed.victim);
        let got = files::read(&folder.join("out.safetensors"));
        for (name, tensor) in &expected {
            let (off, most) = (tensor.difference(&got[name]), tensor.largest());
            assert!(
                off <= 2e-5 * most,
                "run {run}: {name} is off by {off:e}: {said}"
            );
        }
        clean(&folder);
        let Some(took) = killed.last("survived") else {
            println!("run {run}: it had finished before");
            continue;
        };
        times.push(took);
        if times.len().is_multiple_of(20) {
            println!("{} kills, all survived", times.len());
        }
    }
    print_times("from the death to the result", times);
}

#[test]
fn a_stopped_rank_exceeds_the_deadline_of_the_others() {
    let folder = long_call();
    let running = RunningJob::start(&folder, RANKS, &format!("{CALL} --deadline 3"));
    let victim = 1;
    let process = running.process(&folder, victim);
    at_work(&folder);
    assert!(signal(process, "-STOP"));
    // The others fail at their deadline; then the launcher waits only for the stopped process,
    // unless it has killed that one itself.
    std::thread::sleep(Duration::from_secs(9));
    signal(process, "-KILL");
    let (status, lines) = running.end(Duration::from_secs(60));
    assert!(!status.success());
    let said: Vec<&str> = lines.iter().map(|(_, line)| line.as_str()).collect();
    let said = said.join("\n");
    let own = own_lines(&said);
    assert!(
        own.iter().any(|line| line.contains("deadline of 3s")),
        "{said}"
    );
    for rank in (0..RANKS).filter(|rank| *rank != victim) {
        let mark = format!("encke: rank {rank} of {RANKS}: ");
        assert!(
            own.iter().any(|line| line.starts_with(&mark)),
            "rank {rank}: {said}"
        );
    }
    assert!(!folder.names().contains(&"out.safetensors".to_string()));
}
