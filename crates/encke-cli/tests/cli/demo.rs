//! `encke` without a command: it ends well, and in time.

use std::time::{Duration, Instant};

use crate::command::Folder;

#[test]
fn the_demonstration_answers_its_questions() {
    let folder = Folder::new();
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
        "3. What travels",
        "What to try next",
    ] {
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(said.matches("? yes.").count(), 2, "{said}");
    assert_eq!(folder.names(), Vec::<String>::new());
}
