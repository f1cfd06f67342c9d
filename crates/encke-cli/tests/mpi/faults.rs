//! Processes that are killed or stopped: the right result, or an error on every other process
//! within the deadline; and nothing is left behind.
//!
//! `ENCKE_KILLS` is the number of kills of each test; a few by default. Their instants are spread
//! evenly over the call, from the start of the killed process to the end.

use std::time::{Duration, Instant};

use crate::command::CommandFolder;
use crate::files;
use crate::launch::{RunningJob, all_ended, encke_job, own_lines, said, signal, ulfm};

const RANKS: usize = 4;
/// Deadline of every exchange, and of MPI's start, in seconds.
const DEADLINE: u64 = 12;
const CALL: &str = "attend in.safetensors -o out.safetensors --grad";
const OUTPUT: &str = "out.safetensors";

/// A folder with a call of a second or more, and its result. The file has sinks for the options
/// that ask for them.
fn long_call(options: &str) -> CommandFolder {
    let folder = CommandFolder::new();
    folder.succeeds("generate in.safetensors --tokens 4k --heads 2 --dim 64 --grad");
    let input = folder.join("in.safetensors");
    let mut tensors = files::read(&input);
    let sinks = files::StoredTensor::wave(safetensors::Dtype::F32, &[2], 0.5);
    tensors.insert("sinks".to_string(), sinks);
    files::write(&input, &tensors);
    folder.succeeds(&format!(
        "attend in.safetensors -o threads.safetensors --grad --ranks {RANKS} {options}"
    ));
    folder
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

/// Whether all processes are at work: the temporary output file exists.
fn is_at_work(folder: &CommandFolder) -> bool {
    folder.names().iter().any(|name| name.ends_with(".tmp"))
}

/// Waits until all processes are at work.
pub fn at_work(folder: &CommandFolder) {
    let since = Instant::now();
    while !is_at_work(folder) {
        assert!(
            since.elapsed() < Duration::from_secs(120),
            "it does not start"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The files that a call has left beside its input, apart from its output.
fn leftovers(folder: &CommandFolder) -> Vec<String> {
    let known = ["in.safetensors", "threads.safetensors", OUTPUT];
    let names = folder.names().into_iter();
    names
        .filter(|name| !known.contains(&name.as_str()))
        .collect()
}

/// A call of which a rank was killed.
struct KilledCall {
    victim: usize,
    /// Whether all ranks were at work.
    at_work: bool,
    /// Whether the process had not ended before.
    lived: bool,
    killed: Instant,
    succeeded: bool,
    lines: Vec<(Instant, String)>,
}

impl KilledCall {
    /// Runs the call, and kills `victim` when `wait`, which gets its process, returns.
    fn run(
        folder: &CommandFolder,
        options: &str,
        victim: usize,
        wait: impl FnOnce(u32),
    ) -> KilledCall {
        let arguments = format!("{CALL} --deadline {DEADLINE} {options}");
        let job = || encke_job(folder, RANKS, &arguments);
        let (running, process) = RunningJob::start(folder, victim, job);
        wait(process);
        let at_work = is_at_work(folder);
        let lived = signal(process, "-KILL");
        let killed = Instant::now();
        let (status, lines) = running.end(Duration::from_secs(3 * DEADLINE + 30));
        all_ended(folder);
        KilledCall {
            victim,
            at_work,
            lived,
            killed,
            succeeded: status.success(),
            lines,
        }
    }

    /// Checks the output against that of threads, if there is one. Without one, every survivor has
    /// printed one line; before the work one of them is enough, because the launcher ends the
    /// others when the first has failed. Returns whether there is an output, and removes it.
    fn check(&self, folder: &CommandFolder, tolerance: f64) -> bool {
        let said = said(&self.lines);
        assert_eq!(leftovers(folder), [""; 0], "left behind: {said}");
        let output = folder.join(OUTPUT);
        if output.exists() {
            let got = files::read(&output);
            for (name, tensor) in &files::read(&folder.join("threads.safetensors")) {
                let (off, most) = (tensor.difference(&got[name]), tensor.largest());
                assert!(off <= tolerance * most, "{name} is off by {off:e}: {said}");
            }
            std::fs::remove_file(output).unwrap();
            return true;
        }
        assert!(!self.succeeded, "success without an output: {said}");
        let mut reported = 0;
        for rank in (0..RANKS).filter(|rank| *rank != self.victim) {
            let mark = format!("encke: rank {rank} of {RANKS}: ");
            let own = own_lines(&said).into_iter();
            let lines: Vec<&str> = own.filter(|line| line.starts_with(&mark)).collect();
            let named = |line: &&str| line.contains(&format!("rank {}", self.victim));
            let enough = lines.len() == 1 && lines.iter().all(named);
            assert!(
                enough || !self.at_work && lines.len() <= 1,
                "rank {rank}: {said}"
            );
            reported += lines.len();
        }
        assert!(reported > 0, "{said}");
        false
    }

    /// Time from the kill to the last line of a rank.
    fn reported_after(&self) -> Option<Duration> {
        let lines = self.lines.iter();
        let lines = lines.filter(|(_, line)| line.starts_with("encke: rank"));
        let last = lines.map(|(at, _)| *at).max()?;
        Some(last.saturating_duration_since(self.killed))
    }
}

/// Kills ranks at instants spread over the call, checks what follows, and prints how it ended.
/// `passes` decides about a call that was killed, and whether there was an output.
fn kill_at_all_times(options: &str, tolerance: f64, passes: impl Fn(&KilledCall, bool) -> bool) {
    let folder = long_call(options);
    let job = || encke_job(&folder, RANKS, &format!("{CALL} {options}"));
    let (running, _) = RunningJob::start(&folder, 0, job);
    let since = Instant::now();
    let (status, lines) = running.end(Duration::from_secs(300));
    assert!(status.success(), "{lines:?}");
    std::fs::remove_file(folder.join(OUTPUT)).unwrap();
    let (time, wanted) = (since.elapsed(), kills(4));
    let seed = u64::from(std::process::id()) << 20;
    println!("{wanted} kills within {time:?}, seed {seed}");
    let (mut working, mut late, mut results, mut times) = (0, 0, 0, Vec::new());
    for run in 0..wanted {
        let chance = random(seed + run as u64);
        let victim = (chance % RANKS as u64) as usize;
        let place = run as f64 + (chance >> 32) as f64 / 2f64.powi(32);
        let after = time.mul_f64(place / wanted as f64);
        let wait = |_| std::thread::sleep(after);
        let killed = KilledCall::run(&folder, options, victim, wait);
        let at = format!("run {run}: rank {victim} after {after:?}");
        let when = match (killed.lived, killed.at_work) {
            (false, _) => "after its end",
            (true, true) => "at work",
            (true, false) => "before or after the work",
        };
        println!("{at}, {when}");
        let finished = killed.check(&folder, tolerance);
        assert!(passes(&killed, finished), "{at}: {}", said(&killed.lines));
        working += usize::from(killed.at_work);
        late += usize::from(!killed.lived);
        results += usize::from(finished);
        times.extend(killed.reported_after());
    }
    times.sort_unstable();
    println!(
        "{wanted} kills, {working} of them during the work, {late} after the end: {results} right \
         results, otherwise errors; {:?} (median) and {:?} (most) until all had reported",
        times.get(times.len() / 2),
        times.last()
    );
}

#[test]
fn a_killed_rank_is_an_error_on_all_others() {
    if ulfm("a_killed_rank_is_an_error_on_all_others") {
        kill_at_all_times("", 0.0, |_, _| true);
    }
}

#[test]
fn with_redundancy_a_call_survives_a_killed_rank() {
    if ulfm("with_redundancy_a_call_survives_a_killed_rank") {
        // From when all ranks are at work on, there must be a result.
        let passes = |killed: &KilledCall, finished| finished || !killed.at_work;
        kill_at_all_times("--redundancy 1", 2e-5, passes);
    }
}

/// Open MPI crashes when it learns of a death before a communicator is complete, which is in
/// `MPI_Init` and `MPI_Comm_dup`: the crash, too, is one line and an error.
#[test]
fn a_death_while_mpi_starts_is_an_error() {
    if !ulfm("a_death_while_mpi_starts_is_an_error") {
        return;
    }
    let folder = long_call("");
    for run in 0..kills(8) {
        let chance = random(run as u64);
        let victim = (chance % RANKS as u64) as usize;
        let within = [10, 50, 200][run % 3];
        let after = Duration::from_millis((chance >> 32) % within);
        let wait = |process| {
            while maps(process, "/dev/shm/sm_segment") == Some(false) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(after);
        };
        let killed = KilledCall::run(&folder, "", victim, wait);
        println!("run {run}: rank {victim} {after:?} after the start of MPI");
        killed.check(&folder, 0.0);
    }
}

/// Whether a process has mapped a file whose path begins so; `None` if there is no such process.
fn maps(process: u32, path: &str) -> Option<bool> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    (!maps.is_empty()).then(|| maps.contains(path))
}

#[test]
fn with_redundancy_a_call_with_sinks_survives_a_killed_rank() {
    if ulfm("with_redundancy_a_call_with_sinks_survives_a_killed_rank") {
        let passes = |killed: &KilledCall, finished| finished || !killed.at_work;
        kill_at_all_times("--sinks --causal --redundancy 1", 2e-5, passes);
    }
}

#[test]
fn a_process_that_does_not_start_mpi_is_an_error() {
    if !ulfm("a_process_that_does_not_start_mpi_is_an_error") {
        return;
    }
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let start = |program: &[&str]| {
        let mut job = encke_job(&folder, 1, "attend in.safetensors -o out --deadline 1");
        job.args([":", "-n", "1"]).args(program);
        RunningJob::of(job)
    };
    for running in [&["true"][..], &["sleep", "15"]].map(start) {
        let (status, lines) = running.end(Duration::from_secs(60));
        let said = said(&lines);
        assert_eq!(status.code(), Some(2), "{said}");
        let own = own_lines(&said);
        assert_eq!(own.len(), 1, "{said}");
        assert!(
            own[0].contains("MPI_Init") && own[0].contains("10s"),
            "{said}"
        );
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn a_stopped_rank_exceeds_the_deadline_of_the_others() {
    let folder = long_call("");
    let victim = 1;
    let arguments = format!("{CALL} --deadline 3");
    let job = || encke_job(&folder, RANKS, &arguments);
    let (running, process) = RunningJob::start(&folder, victim, job);
    at_work(&folder);
    assert!(signal(process, "-STOP"));
    // The others fail at their deadline; then the launcher waits only for the stopped process,
    // unless it has killed that one itself.
    std::thread::sleep(Duration::from_secs(9));
    signal(process, "-KILL");
    let (status, lines) = running.end(Duration::from_secs(60));
    assert!(!status.success());
    let said = said(&lines);
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
    assert!(!folder.names().contains(&OUTPUT.to_string()));
}
