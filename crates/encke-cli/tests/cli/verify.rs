//! `encke verify`: output and exit codes.

use crate::command::CommandFolder;

#[test]
fn twenty_configurations_agree_with_the_reference() {
    let folder = CommandFolder::new();
    let said = folder.succeeds("verify --count 20 --seed 7");
    assert_eq!(said.lines().next(), Some("seed 7"));
    assert!(said.contains("20 configurations in"), "{said}");
    assert!(said.contains("all agree with the reference"), "{said}");
}

#[test]
fn the_time_limit_ends_a_run_cleanly() {
    let folder = CommandFolder::new();
    let said = folder.succeeds("verify --count 1000000 --minutes 0.005");
    assert!(said.starts_with("seed "), "{said}");
    assert!(
        said.contains("of 1000000 configurations (stopped at the limit"),
        "{said}"
    );
}

#[test]
fn calls_with_faults_end_right_or_with_an_error_and_repeat_by_seed() {
    let folder = CommandFolder::new();
    let said = folder.succeeds("verify --faults --count 48 --seed 3");
    assert!(said.contains("each ended right, or with an error on every rank"));
    let table = |said: &str| -> Vec<Vec<String>> {
        let lines = said.lines().skip_while(|line| !line.contains("injected"));
        let cells = |line: &str| line.split_whitespace().map(str::to_string).collect();
        lines.map(cells).collect()
    };
    let rows = table(&said);
    assert_eq!(rows.len(), 9, "{said}");
    for row in &rows[1..] {
        let counts: Vec<usize> = row[1..].iter().map(|x| x.parse().unwrap()).collect();
        let [calls, _, ends @ .., wrong] = &counts[..] else {
            panic!("{row:?}");
        };
        assert_eq!((*calls, *wrong), (6, 0), "{row:?}");
        assert_eq!(ends.iter().sum::<usize>(), 6, "{row:?}");
    }
    let again = folder.succeeds("verify --faults --count 48 --seed 3");
    assert_eq!(table(&again), rows);
}

#[test]
fn with_redundancy_deaths_are_survived() {
    let folder = CommandFolder::new();
    let said = folder.succeeds("verify --faults --redundancy 1 --count 160 --seed 5");
    let row = said
        .lines()
        .find(|line| line.trim_start().starts_with("death"));
    let cells: Vec<&str> = row.unwrap_or_default().split_whitespace().collect();
    // fault calls injected right survived deadline corrupt died lost wrong
    let survived: usize = cells[4].parse().unwrap();
    assert!(survived > 5, "{said}");
    assert_eq!((cells[1], cells[9]), ("20", "0"), "{said}");
}

#[test]
fn wrong_counts_and_limits_are_refused() {
    let folder = CommandFolder::new();
    folder.refuses("verify --redundancy 1", &["--faults"]);
    folder.refuses("verify --faults --redundancy 99", &["at most 31"]);
    folder.refuses("verify --count 0", &["--count is 0"]);
    folder.refuses("verify --minutes 0", &["--minutes 0"]);
    folder.refuses("verify --minutes nan", &["--minutes NaN"]);
    folder.refuses("verify --seed x", &["--seed"]);
}

#[test]
fn a_missing_instruction_set_is_an_error_not_a_failed_check() {
    let mut command = assert_cmd::Command::cargo_bin("encke").unwrap();
    let output = command
        .env("ENCKE_CPU", "sse9")
        .args(["verify", "--count", "1"]);
    let output = output.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.starts_with("encke: ") && said.contains("sse9"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
}
