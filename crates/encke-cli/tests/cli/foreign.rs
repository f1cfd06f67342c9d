//! Files and texts from outside: pipes and devices where files are expected, damaged and foreign
//! files, names that a terminal would obey.
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use crate::command::{CommandFolder, text};
use crate::files;

/// Far longer than any of these commands takes.
const HANGS: Duration = Duration::from_secs(60);

/// The output of a command that must end by itself.
fn ended(mut child: Child, command: &str) -> Output {
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > HANGS {
            child.kill().unwrap();
            panic!("encke {command} hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn pipes_and_devices_are_refused_wherever_a_file_is_read_or_written() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in"), &files::small());
    let made = std::process::Command::new("mkfifo")
        .arg(folder.join("fifo"))
        .status();
    assert!(made.unwrap().success());
    let simulate = "simulate --tokens 64 --heads 1 --dim 8";
    let commands = [
        "attend FILE -o out".to_string(),
        "attend FILE -o out --memory-limit 200MiB".to_string(),
        "attend in -o FILE".to_string(),
        "attend in -o FILE --memory-limit 200MiB".to_string(),
        "attend in -o out --trace FILE".to_string(),
        "bench --tokens 64 --heads 1 --dim 8 --json FILE".to_string(),
        "billion --tokens 1k --state FILE".to_string(),
        "billion --tokens 1k --state FILE --fresh".to_string(),
        "billion --tokens 1k --record FILE".to_string(),
        "generate FILE --tokens 64 --heads 1 --dim 8".to_string(),
        "launch -n 1 --mpirun FILE plan".to_string(),
        "profile --tokens 64 --heads 1 --dim 8 --csv FILE".to_string(),
        "profile --tokens 64 --heads 1 --dim 8 --json FILE".to_string(),
        "report FILE --tokens 64 --heads 1 --dim 8".to_string(),
        "report out --tokens 64 --heads 1 --dim 8 --trace FILE".to_string(),
        "tune --check --record FILE".to_string(),
        format!("{simulate} --machine FILE"),
        format!("{simulate} --json FILE"),
        format!("{simulate} --trace FILE"),
    ];
    let before = folder.names();
    for file in [
        "fifo",
        "/dev/zero",
        "/dev/full",
        "/dev/tty",
        ".",
        "/proc/self/fd/0",
    ] {
        for command in &commands {
            let command = command.replace("FILE", file);
            let mut child = folder.command(&command);
            child
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let output = ended(child.spawn().unwrap(), &command);
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{command}: {stderr}");
            assert_eq!(stderr.lines().count(), 1, "{command}: {stderr}");
            assert!(stderr.contains(file), "{command}: {stderr}");
            assert_eq!(folder.names(), before, "{command}");
        }
    }
}

#[test]
fn a_profile_that_is_not_this_users_is_refused() {
    let folder = CommandFolder::new();
    let run = |arguments: &str| {
        let mut command = folder.command(arguments);
        command.env("XDG_CONFIG_HOME", folder.join("config"));
        command.output().unwrap()
    };
    let shown = text(&run("tune --show").stdout);
    let path = shown.split_whitespace().last().unwrap().to_string();
    let plan = "plan --tokens 64 --heads 1 --dim 8 --ranks auto --explain";
    let refused = |words: &[&str]| {
        let output = run(plan);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        for word in words.iter().chain([&"encke tune"]) {
            assert!(stderr.contains(word), "no {word} in {stderr}");
        }
    };
    fs::create_dir_all(folder.join("config/encke")).unwrap();
    fs::write(&path, "{}").unwrap();
    refused(&["not a machine profile"]);
    for mode in [0o664, 0o646] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        refused(&["cannot read", "other users may write it"]);
    }
    // Only root can give a file away.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    if std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
        refused(&["it belongs to user 12345"]);
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    refused(&["cannot read", "not a regular file"]);
}

#[test]
fn no_name_from_outside_reaches_the_terminal_unescaped() {
    let folder = CommandFolder::new();
    let evil = "e\u{1b}[2J\u{1b}]0;t\u{7}\u{202e}x\r\u{9b}31m\u{2066}\ny";
    let mut tensors = files::small();
    let q = tensors.remove("q").unwrap();
    tensors.insert(evil.to_string(), q);
    files::write(&folder.join(evil), &tensors);
    files::write(&folder.join("in"), &files::small());
    let machine = folder.succeeds("simulate --describe");
    let mut machine: serde_json::Value = serde_json::from_str(&machine).unwrap();
    machine["device"]["name"] = evil.into();
    fs::write(folder.join("machine"), machine.to_string()).unwrap();
    machine[evil] = 1.into();
    fs::write(folder.join("wrong"), machine.to_string()).unwrap();
    let sizes = ["--tokens", "64", "--heads", "1", "--dim", "8"];
    for arguments in [
        &["attend", evil, "-o", "out"][..],
        &["attend", "nowhere", "-o", evil],
        &["attend", "in", "-o", &format!("{evil}/out")],
        &[
            "attend",
            "in",
            "-o",
            &format!("{evil}-out"),
            "--trace",
            evil,
        ],
        &["attend", "in", "-o", &format!("{evil}-out")],
        &[evil],
        &["plan", &format!("--{evil}")],
        &["plan", "--tokens", evil],
        &["simulate", "--gpu", evil],
        &["simulate", "--machine", evil],
        &[&["simulate", "--machine", "machine"][..], &sizes[..]].concat(),
        &["simulate", "--machine", "machine", "--describe"],
        &["simulate", "--machine", "wrong"],
        &["billion", "--tokens", "1k", "--state", evil],
        &["launch", "-n", "1", "--mpirun", evil, evil],
        &["bench", "--json", &format!("{evil}/x")],
    ] {
        let output = folder.command("").args(arguments).output().unwrap();
        for shown in [text(&output.stdout), text(&output.stderr)] {
            let obeyed = |c: char| c != '\n' && c.is_control() || "\u{202e}\u{2066}".contains(c);
            assert!(!shown.contains(obeyed), "{arguments:?}: {shown:?}");
        }
        let lines = text(&output.stderr).lines().count();
        let is_summary = output.status.success() && arguments[0] == "attend";
        assert!(
            lines <= 1 || is_summary,
            "{arguments:?}: {}",
            text(&output.stderr)
        );
    }
    let described = folder.succeeds("simulate --machine machine --describe");
    let described: serde_json::Value = serde_json::from_str(&described).unwrap();
    assert_eq!(described["device"]["name"], evil);
}

#[test]
fn a_machine_with_a_key_twice_or_an_impossible_value_is_refused() {
    let folder = CommandFolder::new();
    let right = folder.succeeds("simulate --describe");
    let command = "simulate --tokens 64 --heads 1 --dim 8 --ranks auto --machine m";
    let refused = |text: String, words: &[&str]| {
        assert_ne!(text, right);
        fs::write(folder.join("m"), text).unwrap();
        folder.refuses(command, words);
        folder.refuses("simulate --describe --machine m", words);
    };
    refused(
        right.replacen('{', "{\"nics\": 8, ", 1),
        &["\"nics\" is there twice"],
    );
    let changed = |from: &str, to: &str| right.replacen(from, to, 1);
    let cores = [
        ("18446744073709551615", "shared_cores"),
        ("0", "shared_cores"),
    ];
    for (value, word) in cores {
        let to = format!("\"shared_cores\": {value}");
        refused(
            changed("\"shared_cores\": null", &to),
            &[word, "1 to 1048576"],
        );
    }
    let nics = changed("\"nics\": 8", "\"nics\": 99999999999999999999");
    refused(nics, &["m is not a description"]);
    refused(
        changed("\"nics\": 8", "\"nics\": -1"),
        &["m is not a description"],
    );
    refused(
        right[..right.len() / 2].to_string(),
        &["m is not a description"],
    );
    refused(" ".repeat(2 << 20), &["2097152 bytes", "at most 1048576"]);
    // The most that is allowed is answered.
    let most = changed("\"shared_cores\": null", "\"shared_cores\": 1048576");
    fs::write(folder.join("m"), most).unwrap();
    let mut child = folder.command(command);
    child.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = ended(child.spawn().unwrap(), command);
    assert!(output.status.success(), "{}", text(&output.stderr));
}
