//! The arguments this program was called with, kept so that records can name the command.
//!
//! They are not `std::env::args`: inside the Python package the process's own arguments are
//! Python's.

use std::ffi::OsString;
use std::sync::{Mutex, PoisonError};

static ARGUMENTS: Mutex<Vec<OsString>> = Mutex::new(Vec::new());

/// Stores the arguments; the first is the program's name.
pub(crate) fn store(arguments: &[OsString]) {
    *ARGUMENTS.lock().unwrap_or_else(PoisonError::into_inner) = arguments.to_vec();
}

/// The stored arguments; the first is the program's name.
pub fn stored() -> impl Iterator<Item = String> {
    let arguments = ARGUMENTS.lock();
    let arguments = arguments.unwrap_or_else(PoisonError::into_inner).clone();
    let text = |argument: OsString| argument.to_string_lossy().into_owned();
    arguments.into_iter().map(text)
}

/// The command line of this program under its plain name, whatever path it was started by.
pub fn command_line(name: &str) -> String {
    shell_line(std::iter::once(name.to_string()).chain(stored().skip(1)))
}

/// A command line for a shell: arguments with other than plain characters are quoted.
pub fn shell_line(arguments: impl Iterator<Item = String>) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=,+@%".contains(letter);
    let quoted =
        arguments.map(
            |argument| match !argument.is_empty() && argument.chars().all(plain) {
                true => argument,
                false => format!("'{}'", argument.replace('\'', r"'\''")),
            },
        );
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::shell_line;

    #[test]
    fn a_shell_line_quotes_spaces_quotes_and_empty_arguments() {
        let arguments = ["mpirun", "-n", "4", "--ranks=8", "a b", "it's", ""];
        let line = shell_line(arguments.into_iter().map(String::from));
        assert_eq!(line, r"mpirun -n 4 --ranks=8 'a b' 'it'\''s' ''");
    }
}
