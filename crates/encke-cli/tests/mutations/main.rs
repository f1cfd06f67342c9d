//! Command lines with mutated values and added options: each is a right result, or one line and
//! exit code 2, within bounded time and memory.
//!
//! Options are those that the help of each command lists, so a new one is tried without a change
//! here.
//!
//! The command runs inside child processes of this program, many lines in each: a child that is
//! killed, or takes too long, names the line it died of. `ENCKE_MUTATIONS` sets how many lines are
//! tried (1000 unless it is given), `ENCKE_MUTATION_SEED` where they begin.
#![cfg(target_os = "linux")]

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use encke_core::conformance::Random;

/// Lines of a child.
const BATCH: u64 = 100;
/// Seconds of a child, which takes two or three.
const SECONDS: u32 = 120;
/// Bytes of address space of a child.
const ADDRESS_SPACE: u64 = 8 << 30;

/// Lines that take milliseconds. The word after an option that takes a value is what is mutated.
const LINES: [&str; 18] = [
    "plan --tokens 64 --heads 4 --kv-heads 2 --dim 8 --batch 1 --ranks 2 --causal",
    "plan --tokens 64 --heads 4 --dim 8 --ranks 3 --sharding striped --mode mix \
     --segment-lengths 8,64 --dilation-rates 1,4 --rank 1 --backward",
    "plan --tokens 64 --heads 4 --dim 8 --ranks 4 --schedule 2 --redundancy 1 --json --dtype bf16",
    "plan --tokens 64 --heads 4 --dim 8 --explain --most-ranks 4 --memory-per-rank 1GiB",
    "plan --tokens 32 --heads 4 --dim 8 --segment-lengths 8 --dilation-rates 2 --draw 1",
    "simulate --tokens 64 --heads 4 --dim 8 --ranks 2 --node 2 --gpu h200 --link nvlink,ib400",
    "simulate --tokens 64 --ranks 4 --sharding zigzag --grad --nics 1 --straggler 1:2.0",
    "bench --tokens 16 --heads 2 --dim 4 --ranks 1,2 --repeats 1 --seed 1",
    "profile --tokens 16 --heads 2 --dim 4 --ranks 1,2 --plan-ranks 4 --seed 1",
    "report page.html --tokens 1e12 --heads 2 --dim 4 --ranks 2 --show 2 --seed 1",
    "billion --tokens 64 --ranks 2 --samples 4 --segment 16 --growth 2 --dim 4 --heads 1 --fresh",
    "attend in.safetensors -o out.safetensors --ranks 2 --scale 0.5 --deadline 30 --schedule 1",
    "attend in.safetensors -o out.safetensors --ranks 3 --redundancy 1 --drill 2@1",
    "attend in.safetensors -o out.safetensors --memory-limit 1GiB --grad --compute f32",
    "verify --count 1 --seed 3",
    "verify --count 1 --seed 3 --faults --redundancy 1 --minutes 1",
    "generate made.safetensors --tokens 16 --heads 2 --dim 4 --seed 1",
    "tune --show --seconds 1",
];

/// Options that are not added: they ask for more work, or for hours.
const LONG: [&str; 4] = ["--check", "--count", "--against", "--policies"];

/// Numbers that are small, or beyond every machine. Those between are legal and may take hours.
const NUMBERS: [&str; 12] = [
    "0",
    "1",
    "3",
    "1e12",
    "1e15",
    "9007199254740992",
    "1000000000000000000",
    "9223372036854775807",
    "18446744073709551615",
    "17179869183G",
    "1_000_000_000_000",
    "64,1e12",
];

/// Text that is no number of an option.
const WORDS: [&str; 17] = [
    "-1",
    "1e30",
    "18446744073709551616",
    "NaN",
    "-inf",
    "1e-3",
    "0.5",
    "",
    " ",
    ",",
    "1,,2",
    "auto",
    "٣",
    "🦀",
    "\u{202e}64",
    "--ranks",
    "18446744073709551615@18446744073709551615",
];

/// The options of a command, and whether each takes a value.
fn options(command: &str) -> Vec<(String, bool)> {
    static ALL: OnceLock<HashMap<String, Vec<(String, bool)>>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let commands = LINES.map(|line| line.split(' ').next().expect("a command"));
        let listed = commands.map(|command| (command.to_string(), listed_options(command)));
        listed.into_iter().collect()
    });
    all[command].clone()
}

/// The same, from the command's help: an option begins a line, and its value follows.
fn listed_options(command: &str) -> Vec<(String, bool)> {
    let help = Command::new(env!("CARGO_BIN_EXE_encke"))
        .args([command, "--help"])
        .output()
        .expect("the command runs");
    let help = String::from_utf8(help.stdout).expect("text");
    let listed = help.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let first = words.iter().position(|word| word.starts_with("--"))?;
        let alone = words[..first].iter().all(|word| word.starts_with('-'));
        let value = words
            .get(first + 1)
            .is_some_and(|word| word.starts_with('<'));
        let name = words[first];
        let fits = alone && name != "--help" && !LONG.contains(&name);
        fits.then(|| (name.to_string(), value))
    });
    listed.collect()
}

/// A line with one to three values replaced, and, for every second seed, one or two options added
/// before.
fn mutated(seed: u64) -> Vec<String> {
    let mut random = Random::new(seed);
    let mut below = |bound: usize| random.below(bound);
    let line = LINES[below(LINES.len())];
    let mut words: Vec<String> = line.split_whitespace().map(str::to_string).collect();
    if seed % 2 == 1 {
        let options = options(&words[0]);
        for _ in 0..1 + below(2) {
            let (name, value) = &options[below(options.len())];
            words.push(name.clone());
            if *value {
                let all = [&NUMBERS[..], &WORDS].concat();
                words.push(all[below(all.len())].to_string());
            }
        }
    }
    let values: Vec<usize> = (1..words.len())
        .filter(|&at| words[at - 1].starts_with("--") && !words[at].starts_with("--"))
        .collect();
    for _ in 0..1 + below(3) {
        let at = values[below(values.len())];
        // How often something is done may be any number.
        if words[at - 1] == "--count" {
            continue;
        }
        words[at] = match below(10) {
            0 => vec!["7"; 10_000].join(","),
            1 => {
                let own: Vec<char> = words[at].chars().collect();
                let cut = below(own.len() + 1);
                let rest = &own[own.len().min(cut + 1)..];
                own[..cut].iter().chain(rest).collect()
            }
            2 => WORDS[below(WORDS.len())].to_string(),
            _ => NUMBERS[below(NUMBERS.len())].to_string(),
        };
    }
    words
}

/// The text before a line's own output, and after it.
const BEGIN: &str = "\u{1}begin ";
const END: &str = "\u{1}end ";

/// Not a test of its own: what a child process runs.
#[test]
fn child() {
    let Ok(first) = std::env::var("ENCKE_MUTATIONS_FROM") else {
        return;
    };
    let first: u64 = first.parse().expect("a number");
    let memory = libc::rlimit {
        rlim_cur: ADDRESS_SPACE,
        rlim_max: ADDRESS_SPACE,
    };
    // SAFETY: the limits are those of this process alone, and `memory` outlives the call.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &memory), 0);
        libc::alarm(SECONDS);
    }
    for seed in first..first + BATCH {
        let words = mutated(seed);
        eprintln!("{BEGIN}{seed}");
        let words = ["encke".to_string()].into_iter().chain(words);
        let code = encke_cli::command(words.map(OsString::from));
        eprintln!("{END}{code}");
    }
}

/// What is wrong with the text that a line printed on standard error, and with its exit code.
fn wrong(said: &str, code: &str) -> Option<&'static str> {
    match code {
        _ if said.contains("this is a bug") => Some("panicked"),
        "0" => None,
        "2" if said.lines().count() == 1 && said.starts_with("encke: ") => None,
        "2" => Some("is refused in other than one line"),
        _ => Some("has a wrong result"),
    }
}

#[test]
fn mutated_values_are_refused_in_one_line_or_computed() {
    let number = |name: &str, default: u64| {
        let given = std::env::var(name).ok();
        given.map_or(default, |text| text.parse().expect("a number"))
    };
    let from = number("ENCKE_MUTATION_SEED", 0);
    let lines = number("ENCKE_MUTATIONS", 1000);
    let folder = tempfile::tempdir().expect("a folder");
    let generate = "generate in.safetensors --tokens 24 --heads 2 --dim 4 --grad";
    let generated = Command::new(env!("CARGO_BIN_EXE_encke"))
        .args(generate.split(' '))
        .current_dir(folder.path())
        .status();
    assert!(generated.is_ok_and(|status| status.success()));
    for first in (from..from + lines).step_by(BATCH as usize) {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "child", "--nocapture"])
            .env("ENCKE_MUTATIONS_FROM", first.to_string())
            .env("ENCKE_LIBCUDA", "no-driver-for-tests.so")
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut said = Vec::new();
        let mut stderr = child.stderr.take().expect("it is piped");
        stderr.read_to_end(&mut said).expect("standard error");
        let status = child.wait().expect("the child ends");
        let said = String::from_utf8_lossy(&said);
        for line in said.split(BEGIN).skip(1) {
            let (seed, rest) = line.split_once('\n').expect("a seed");
            let words = mutated(seed.parse().expect("a seed"));
            let words: String = format!("{words:?}").chars().take(2000).collect();
            let Some((text, code)) = rest.split_once(END) else {
                panic!("seed {seed}: encke {words} ends the process ({status}): {rest}");
            };
            let code = code.lines().next().unwrap_or_default();
            if let Some(wrong) = wrong(text, code) {
                panic!("seed {seed}: encke {words} {wrong}, exit code {code}: {text}");
            }
        }
        assert!(status.success(), "the child ended with {status}: {said}");
    }
}

/// `launch` becomes the launcher that it starts, so each line has a process of its own.
#[test]
fn absurd_values_of_launch_are_refused_in_one_line_or_passed_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |number: &str, mpirun: &str, option: &str| {
        let words = ["launch", "--number", number, "--mpirun", mpirun];
        let option = format!("--option={option}");
        let output = Command::new(env!("CARGO_BIN_EXE_encke"))
            .args(words)
            .args([&option, "plan", "--tokens", "64"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .output()
            .expect("the command runs");
        let said = String::from_utf8_lossy(&output.stderr);
        // The launcher's command line is printed before it runs.
        let code = output.status.code().expect("no signal").to_string();
        if let Some(wrong) = wrong(&said, &code) {
            panic!("launch {number:?} {mpirun:?} {option:?} {wrong}, exit code {code}: {said}");
        }
    };
    for value in NUMBERS.iter().chain(&WORDS) {
        run(value, "/bin/true", "-x");
        run("1", value, "-x");
        run("1", "/bin/true", value);
    }
}
