//! Processes that are killed or stopped in the middle of a call: an error on every other one, inside
//! the deadline, and no output.
//!
//! `ENCKE_KILLS` says how many deaths there are to be in the middle of a call; a few by default. A call
//! that had finished before does not count, and is made again, up to as many times.

use std::time::{Duration, Instant};

use crate::command::Folder;
use crate::files;
use crate::launch::{Running, own_lines, signal, ulfm};

const RANKS: usize = 4;
/// Of every exchange, in seconds.
const DEADLINE: u64 = 20;
const CALL: &str = "attend in.safetensors -o out.safetensors --grad";

/// A folder with a call of a second or more.
fn long_call() -> Folder {
    let folder = Folder::new();
    folder.succeeds("generate in.safetensors --tokens 4k --heads 2 --dim 64 --grad");
    folder
}

/// How long the call takes from when all processes are at work, undisturbed.
fn undisturbed(folder: &Folder, options: &str) -> Duration {
    let running = Running::start(folder, RANKS, &format!("{CALL} {options}"));
    at_work(folder);
    let since = Instant::now();
    let (status, lines) = running.end(Duration::from_secs(300));
    assert!(status.success(), "{lines:?}");
    tidy(folder);
    since.elapsed()
}

fn kills(default: usize) -> usize {
    let set = std::env::var("ENCKE_KILLS").ok();
    set.and_then(|kills| kills.parse().ok()).unwrap_or(default)
}

/// Numbers that look random, from a seed.
fn random(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Waits until all processes are at work: the output file is there, under its first name.
fn at_work(folder: &Folder) {
    let since = Instant::now();
    while !folder.names().iter().any(|name| name.ends_with(".tmp")) {
        assert!(
            since.elapsed() < Duration::from_secs(120),
            "it never begins"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A call with a rank that was killed in the middle of it.
struct Disturbed {
    victim: usize,
    killed: Instant,
    lines: Vec<(Instant, String)>,
}

impl Disturbed {
    /// Runs the call, which takes so `long`; which rank dies, and when, follows from the seed.
    fn run(folder: &Folder, options: &str, long: Duration, seed: u64) -> Disturbed {
        let victim = (random(seed) % RANKS as u64) as usize;
        let after = long.mul_f64((random(!seed) % 1000) as f64 / 1000.0);
        let arguments = format!("{CALL} --deadline {DEADLINE} {options}");
        let running = Running::start(folder, RANKS, &arguments);
        let process = running.process(folder, victim);
        at_work(folder);
        std::thread::sleep(after);
        signal(process, "-KILL");
        let killed = Instant::now();
        let (_, lines) = running.end(Duration::from_secs(2 * DEADLINE + 60));
        Disturbed {
            victim,
            killed,
            lines,
        }
    }

    fn said(&self) -> String {
        let lines: Vec<&str> = self.lines.iter().map(|(_, line)| line.as_str()).collect();
        lines.join("\n")
    }

    /// When the last line that begins so was said, after the death.
    fn last(&self, begins: &str) -> Option<Duration> {
        let lines = self
            .lines
            .iter()
            .filter(|(_, line)| line.starts_with(begins));
        let last = lines.map(|(at, _)| *at).max()?;
        Some(last.saturating_duration_since(self.killed))
    }
}

fn seed() -> u64 {
    let seed = u64::from(std::process::id()) << 20;
    println!("seed {seed}");
    seed
}

fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    if let (Some(middle), Some(last)) = (times.get(times.len() / 2), times.last()) {
        println!(
            "{} deaths, {what}: {middle:?} (median), {last:?} (most)",
            times.len()
        );
    }
}

/// Removes what a run left.
fn tidy(folder: &Folder) {
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
    let (seed, long) = (seed(), undisturbed(&folder, ""));
    let (mut times, wanted) = (Vec::new(), kills(3));
    for run in 0..2 * wanted as u64 {
        if times.len() == wanted {
            break;
        }
        let disturbed = Disturbed::run(&folder, "", long, seed + run);
        let (said, victim) = (disturbed.said(), disturbed.victim);
        let finished = folder.names().contains(&"out.safetensors".to_string());
        tidy(&folder);
        if finished {
            println!("run {run}: it had finished before");
            continue;
        }
        let own = own_lines(&said);
        for rank in (0..RANKS).filter(|rank| *rank != victim) {
            let mark = format!("encke: rank {rank} of {RANKS}: ");
            let line = own.iter().find(|line| line.starts_with(&mark));
            let line = line.unwrap_or_else(|| panic!("run {run}: rank {rank} is silent: {said}"));
            assert!(
                line.contains(&format!("rank {victim}")),
                "run {run}: {line}"
            );
        }
        let took = disturbed.last("encke: rank").unwrap();
        assert!(
            took < Duration::from_secs(DEADLINE + 10),
            "run {run}: {took:?}"
        );
        times.push(took);
        if times.len().is_multiple_of(20) {
            println!("{} deaths, all said so", times.len());
        }
    }
    print_times("until all survivors had said so", times);
}

#[test]
fn with_redundancy_a_killed_rank_costs_no_result() {
    if !ulfm("with_redundancy_a_killed_rank_costs_no_result") {
        return;
    }
    let folder = long_call();
    folder.succeeds(&format!(
        "attend in.safetensors -o threads.safetensors --grad --ranks {RANKS}"
    ));
    let expected = files::read(&folder.join("threads.safetensors"));
    let (seed, long) = (seed(), undisturbed(&folder, "--redundancy 1"));
    let (mut times, wanted) = (Vec::new(), kills(3));
    for run in 0..2 * wanted as u64 {
        if times.len() == wanted {
            break;
        }
        let disturbed = Disturbed::run(&folder, "--redundancy 1", long, seed + run);
        let said = disturbed.said();
        let there = folder.names().contains(&"out.safetensors".to_string());
        assert!(there, "run {run}, rank {}: {said}", disturbed.victim);
        let got = files::read(&folder.join("out.safetensors"));
        for (name, tensor) in &expected {
            let (off, most) = (tensor.difference(&got[name]), tensor.largest());
            assert!(
                off <= 2e-5 * most,
                "run {run}: {name} is off by {off:e}: {said}"
            );
        }
        tidy(&folder);
        let Some(took) = disturbed.last("survived") else {
            println!("run {run}: it had finished before");
            continue;
        };
        times.push(took);
        if times.len().is_multiple_of(20) {
            println!("{} deaths, all right", times.len());
        }
    }
    print_times("from the death to the result", times);
}

#[test]
fn a_stopped_rank_ends_in_the_deadline_of_the_others() {
    let folder = long_call();
    let running = Running::start(&folder, RANKS, &format!("{CALL} --deadline 3"));
    let victim = 1;
    let process = running.process(&folder, victim);
    at_work(&folder);
    assert!(signal(process, "-STOP"));
    // The others give up; then nothing holds the launcher but the one that is stopped, if it has
    // not ended that one itself.
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
