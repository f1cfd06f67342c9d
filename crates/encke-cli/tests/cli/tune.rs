//! `encke tune`, `--ranks auto` and `plan --explain`, with a profile in a folder of their own.

use assert_cmd::Command;

use crate::command::{CommandFolder, text};

/// Runs `encke` with its configuration in the folder; standard output, or the error.
fn encke(folder: &CommandFolder, arguments: &str) -> Result<String, String> {
    let mut command = Command::cargo_bin("encke").unwrap();
    command.current_dir(folder.path());
    command.env("ENCKE_LIBCUDA", "no-driver-for-tests.so");
    command.env("XDG_CONFIG_HOME", folder.join("config"));
    command.args(arguments.split_whitespace());
    let output = command.output().unwrap();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

#[test]
fn a_profile_is_measured_stored_shown_and_used() {
    let folder = CommandFolder::new();
    let explain = "plan --tokens 4k --heads 4 --dim 64 --causal --explain";
    let before = encke(&folder, "tune --show").unwrap();
    assert!(before.contains("built-in figures"), "{before}");
    let plan = encke(&folder, explain).unwrap();
    assert!(plan.contains("this machine was not measured"), "{plan}");

    // The shortest measurement: everything once.
    let tuned = encke(&folder, "tune --seconds 0.01").unwrap();
    for words in ["bf16", "FLOP/s", "a hop between threads", "stored in"] {
        assert!(tuned.contains(words), "no {words:?} in {tuned}");
    }
    let kept: Vec<_> = std::fs::read_dir(folder.join("config/encke"))
        .unwrap()
        .collect();
    assert_eq!(kept.len(), 1, "one profile, and no other file");
    let path = kept.into_iter().next().unwrap().unwrap().path();
    #[cfg(unix)]
    for (path, expected) in [(path.as_path(), 0o600), (path.parent().unwrap(), 0o700)] {
        use std::os::unix::fs::MetadataExt;
        assert_eq!(path.metadata().unwrap().mode() & 0o777, expected);
    }
    let profile: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(profile["format"], 1);
    assert_eq!(profile["here"]["version"], env!("CARGO_PKG_VERSION"));
    let types = profile["machine"]["device"]["rates"].as_array().unwrap();
    assert_eq!(types.len(), 6);

    let shown = encke(&folder, "tune --show").unwrap();
    assert_eq!(shown, tuned);
    let plan = encke(&folder, explain).unwrap();
    assert!(plan.contains("measured here"), "{plan}");

    // A damaged profile is refused by name, and one of another machine is not used.
    std::fs::write(&path, "{}").unwrap();
    let refused = encke(&folder, explain).unwrap_err();
    assert!(refused.contains("not a machine profile"), "{refused}");
    assert_eq!(refused.lines().count(), 1, "{refused}");
    let mut other = profile;
    other["here"]["cores"] = 4096.into();
    std::fs::write(&path, other.to_string()).unwrap();
    let refused = encke(&folder, "tune --show").unwrap_err();
    assert!(refused.contains("another machine"), "{refused}");
}

#[test]
fn explanations_list_alternatives_the_choice_and_its_reason() {
    let folder = CommandFolder::new();
    let sizes = "plan --tokens 64k --heads 16 --dim 128 --dtype bf16 --causal";
    let gpus = format!("{sizes} --gpu h200 --node 8 --explain");
    let plan = encke(&folder, &gpus).unwrap();
    for words in [
        "one device",
        "8 ranks, zigzag",
        "chosen",
        "Chosen:",
        "faster up to about",
    ] {
        assert!(plan.contains(words), "no {words:?} in {plan}");
    }
    let json = encke(&folder, &format!("{gpus} --json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let chosen = json["choice"]["chosen"].as_u64().unwrap() as usize;
    let winner = &json["choice"]["alternatives"][chosen];
    assert_eq!(winner["ranks"], 8, "{json}");

    // The plan itself is that of the winner.
    let auto = format!("{sizes} --gpu h200 --node 8 --ranks auto --sharding auto --json");
    let plan: serde_json::Value = serde_json::from_str(&encke(&folder, &auto).unwrap()).unwrap();
    assert_eq!(plan["request"]["sharding"]["ranks"], winner["ranks"]);
    assert_eq!(plan["request"]["sharding"]["cut"], winner["cut"]);

    let limited = format!("{sizes} --gpu h200 --explain --memory-per-rank 1MiB");
    let refused = encke(&folder, &limited).unwrap_err();
    assert!(refused.contains("nothing fits 1048576 bytes"), "{refused}");
    let closed = format!("{sizes} --memory-per-rank 1GiB");
    assert!(
        encke(&folder, &closed)
            .unwrap_err()
            .contains("add --ranks auto")
    );
}

#[test]
fn attend_accepts_auto_options() {
    let folder = CommandFolder::new();
    folder.succeeds("generate in.safetensors --tokens 256 --heads 2 --dim 16");
    encke(
        &folder,
        "attend in.safetensors -o auto.safetensors --ranks auto --sharding auto",
    )
    .unwrap();
    folder.succeeds("attend in.safetensors -o one.safetensors");
    // Threads share their cores, so auto chooses one rank, with the same result.
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert_eq!(bytes("auto.safetensors"), bytes("one.safetensors"));
    let output = folder.encke("attend in.safetensors -o fast.safetensors --compute auto");
    assert!(output.status.success(), "{}", text(&output.stderr));
    folder.refuses(
        "attend in.safetensors -o x.safetensors --compute f8",
        &["f64, f32, bf16, f16"],
    );
    folder.refuses(
        "attend in.safetensors -o x.safetensors --memory-limit 1GiB --sharding auto",
        &["the limit determines"],
    );
    folder.refuses("report out.html --sharding auto", &["plan --explain"]);
    folder.refuses("tune --seconds 0", &["not a length of time"]);
}
