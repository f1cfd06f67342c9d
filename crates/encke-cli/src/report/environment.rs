//! Where and how a report was made: machine, version, command, day.
//!
//! Nothing here decides anything: what a machine does not say is left out.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::cli;

/// What is known about this run: (what, value).
pub fn facts(arm: &str, seed: u64) -> Vec<(String, String)> {
    let cores = std::thread::available_parallelism().map(|cores| cores.to_string());
    let build = match cfg!(debug_assertions) {
        true => "built for debugging: slower than a release build",
        false => "release build",
    };
    let facts = [
        ("command", Some(command(cli::words()))),
        (
            "version",
            Some(format!("encke {}, {build}", env!("CARGO_PKG_VERSION"))),
        ),
        (
            "date",
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .ok()
                .map(|since| date(since.as_secs())),
        ),
        ("processor", processor()),
        ("cores", cores.ok()),
        ("instructions", Some(arm.to_string())),
        (
            "system",
            Some(format!(
                "{}, {}",
                std::env::consts::OS,
                std::env::consts::ARCH
            )),
        ),
        (
            "ranks",
            Some("threads of one process; the kernel's threads are shared".to_string()),
        ),
        (
            "seed",
            Some(format!("{seed}; tensors are uniform in −1 … 1")),
        ),
    ];
    let known = facts
        .into_iter()
        .filter_map(|(what, value)| Some((what.to_string(), value?)));
    known.collect()
}

/// The processor's own name, where the system tells it.
fn processor() -> Option<String> {
    let told = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = told.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// A command line that can be typed again.
fn command(arguments: impl Iterator<Item = String>) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_=.,/:+".contains(letter);
    let words = arguments.enumerate().map(|(index, word)| match index {
        // How the command was found says nothing about what it did.
        0 => "encke".to_string(),
        _ if !word.is_empty() && word.chars().all(plain) => word,
        _ => format!("'{}'", word.replace('\'', r"'\''")),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Seconds since 1970 as a day and a time, in UTC.
fn date(seconds: u64) -> String {
    let (mut days, of_day) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute) = (of_day / 3600, of_day / 60 % 60);
    format!(
        "{year}-{month:02}-{:02} {hour:02}:{minute:02} UTC",
        days + 1
    )
}

#[cfg(test)]
mod tests {
    use super::{command, date};

    #[test]
    fn days_are_those_of_the_calendar() {
        let days = [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ];
        for (seconds, words) in days {
            assert_eq!(date(seconds), words);
        }
    }

    #[test]
    fn a_command_can_be_typed_again() {
        let words = [
            "/somewhere/encke",
            "report",
            "it's a page.html",
            "--ranks=8",
            "",
        ];
        let typed = command(words.into_iter().map(String::from));
        assert_eq!(typed, r"encke report 'it'\''s a page.html' --ranks=8 ''");
    }
}
