//! `encke` without a command: it succeeds, and in time.

use std::time::{Duration, Instant};

use crate::command::CommandFolder;

#[test]
fn the_demonstration_passes_its_checks_within_two_minutes() {
    let folder = CommandFolder::new();
    let begin = Instant::now();
    let said = folder.succeeds("");
    assert!(
        begin.elapsed() < Duration::from_secs(120),
        "it took {:?}",
        begin.elapsed()
    );
    for words in [
        "1. Does a ring",
        "2. What does",
        "3. What is sent",
        "What to try next",
    ] {
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(said.matches("? yes.").count(), 2, "{said}");
    assert_eq!(folder.names(), Vec::<String>::new());
}
