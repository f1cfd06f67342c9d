//! Processes that are killed or stopped in the middle of a call: an error on every other one, inside
//! the deadline, and no output.
//!
//! `ENCKE_KILLS` says how many runs are disturbed; a few by default.

use std::time::{Duration, Instant};

use crate::command::Folder;
use crate::launch::{Running, own_lines, signal, ulfm};

const RANKS: usize = 4;
/// Of every exchange, in seconds.
const DEADLINE: u64 = 20;

/// A folder with a call of a few seconds.
fn long_call() -> Folder {
    let folder = Folder::new();
    folder.succeeds("generate in.safetensors --tokens 6k --heads 4 --dim 64 --grad");
    folder
}

fn runs(default: usize) -> usize {
    let set = std::env::var("ENCKE_KILLS").ok();
    set.and_then(|runs| runs.parse().ok()).unwrap_or(default)
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

#[test]
fn a_killed_rank_is_named_by_all_others() {
    if !ulfm("a_killed_rank_is_named_by_all_others") {
        return;
    }
    let folder = long_call();
    let mut detected = Vec::new();
    let mut finished = 0;
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    for run in 0..runs(3) as u64 {
        let victim = (random(seed + run) % RANKS as u64) as usize;
        let after = Duration::from_millis(random(seed ^ run.rotate_left(32)) % 1500);
        let arguments =
            format!("attend in.safetensors -o out.safetensors --grad --deadline {DEADLINE}");
        let running = Running::start(&folder, RANKS, &arguments);
        let process = running.process(&folder, victim);
        at_work(&folder);
        std::thread::sleep(after);
        signal(process, "-KILL");
        let killed = Instant::now();
        let (_, lines) = running.end(Duration::from_secs(DEADLINE + 30));
        let said: Vec<String> = lines.iter().map(|(_, line)| line.clone()).collect();
        let said = said.join("\n");
        if folder.names().contains(&"out.safetensors".to_string()) {
            // It had done its part.
            std::fs::remove_file(folder.join("out.safetensors")).unwrap();
            finished += 1;
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
        let told = lines
            .iter()
            .filter(|(_, line)| line.starts_with("encke: rank"));
        let last = told.map(|(at, _)| *at).max().unwrap();
        let took = last.saturating_duration_since(killed);
        assert!(
            took < Duration::from_secs(DEADLINE + 10),
            "run {run}: {took:?}"
        );
        detected.push(took);
        for name in folder.names().iter().filter(|name| name.ends_with(".tmp")) {
            std::fs::remove_file(folder.join(name)).unwrap();
        }
    }
    detected.sort_unstable();
    if let (Some(middle), Some(last)) = (detected.get(detected.len() / 2), detected.last()) {
        println!(
            "{} runs: all survivors had said so after {middle:?} (median), {last:?} (most); {} had \
             finished before",
            detected.len(),
            finished
        );
    }
}

#[test]
fn a_stopped_rank_ends_in_the_deadline_of_the_others() {
    let folder = long_call();
    let arguments = "attend in.safetensors -o out.safetensors --grad --deadline 3";
    let running = Running::start(&folder, RANKS, arguments);
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
