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

/// Where two lists of arguments differ first: the argument there in each, with the option before it
/// if it is a value.
pub fn first_difference(one: &[String], other: &[String]) -> Option<(String, String)> {
    let at = (0..one.len().max(other.len())).find(|&at| one.get(at) != other.get(at))?;
    let shown = |arguments: &[String]| {
        let Some(argument) = arguments.get(at) else {
            return "no further argument".to_string();
        };
        let is_option = |text: &&String| text.starts_with('-') && text.parse::<f64>().is_err();
        let option = at.checked_sub(1).and_then(|before| arguments.get(before));
        let option = option.filter(|before| is_option(before) && !is_option(&argument));
        shell_line(option.into_iter().chain([argument]).cloned())
    };
    Some((shown(one), shown(other)))
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
    use super::{first_difference, shell_line};

    #[test]
    fn a_shell_line_quotes_spaces_quotes_and_empty_arguments() {
        let arguments = ["mpirun", "-n", "4", "--ranks=8", "a b", "it's", ""];
        let line = shell_line(arguments.into_iter().map(String::from));
        assert_eq!(line, r"mpirun -n 4 --ranks=8 'a b' 'it'\''s' ''");
    }

    #[test]
    fn the_first_different_argument_is_shown_with_its_option() {
        let difference = |one: &str, other: &str| {
            let list = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
            first_difference(&list(one), &list(other))
        };
        let shown = |one: &str, other: &str| Some((one.to_string(), other.to_string()));
        assert_eq!(difference("attend in --causal", "attend in --causal"), None);
        let scale = difference("attend --scale -1 -o out", "attend --scale 2 -o out");
        assert_eq!(scale, shown("--scale -1", "--scale 2"));
        let more = difference("attend in", "attend in --causal");
        assert_eq!(more, shown("no further argument", "--causal"));
        let other = difference("attend --grad in", "attend --causal in");
        assert_eq!(other, shown("--grad", "--causal"));
        assert_eq!(difference("attend a", "bench a"), shown("attend", "bench"));
    }
}
