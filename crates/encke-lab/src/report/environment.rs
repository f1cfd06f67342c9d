//! Where and how a report was made: command, version, date, machine. Facts that the system does not
//! provide are left out.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::arguments;
use crate::process::processor_name;

/// The facts about this run: (name, value).
pub fn facts(arm: &str, seed: u64) -> Vec<(String, String)> {
    let cores = std::thread::available_parallelism().map(|cores| cores.to_string());
    let build = match cfg!(debug_assertions) {
        true => "debug build: slower than a release build",
        false => "release build",
    };
    let facts = [
        ("command", Some(arguments::command_line("encke"))),
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
        ("processor", processor_name()),
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
            Some("threads of one process, which share the kernel's threads".to_string()),
        ),
        (
            "seed",
            Some(format!("{seed}; elements are uniform in −1 … 1")),
        ),
    ];
    let available = facts
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_string(), value?)));
    available.collect()
}

/// Seconds since 1970 as a date and a time, in UTC.
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
    use super::date;

    #[test]
    fn dates_follow_the_calendar_with_leap_years() {
        let days = [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ];
        for (seconds, text) in days {
            assert_eq!(date(seconds), text);
        }
    }
}
