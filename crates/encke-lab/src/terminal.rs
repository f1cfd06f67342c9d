//! Standard output and standard error: foreign text, colour, progress bars, and closed pipes.
//!
//! Two decisions here. Every line passes `printable` on its way out, so that no name of a file or
//! a tensor, wherever it was put into a message, can move the cursor or reverse the text. And where
//! standard output was closed, as after `encke plan … | head`, the work goes on: its files are
//! still written, and the exit code says what came of it.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Writes to standard output and flushes it; a pipe that was closed is not an error.
pub fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let text = printable(text, Paint::stdout());
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Writes a line to standard error; a failure to write has no consequence.
pub fn note(line: &str) {
    let line = printable(line, Paint::stderr()).replace('\n', "\\n");
    // One write: writes of several processes to one pipe are interleaved.
    let _ = io::stderr()
        .lock()
        .write_all(format!("{line}\n").as_bytes());
}

/// The text with every character that a terminal would obey instead of showing it, control
/// characters and those of direction and format, written as JSON escapes it. Line breaks and the
/// codes of `paint` stay.
fn printable(text: &str, paint: Paint) -> Cow<'_, str> {
    let obeyed = |c: char| {
        c != '\n' && c.is_control()
            || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}')
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
            || matches!(c, '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}')
            || matches!(c, '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}')
    };
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(obeyed) {
        shown += &rest[..at];
        rest = &rest[at..];
        let code = paint.code_at(rest);
        shown += code;
        rest = &rest[code.len()..];
        if let (true, Some(c)) = (code.is_empty(), rest.chars().next()) {
            let units = c.encode_utf16(&mut [0; 2]).to_vec();
            shown.extend(units.iter().map(|unit| format!("\\u{unit:04x}")));
            rest = &rest[c.len_utf8()..];
        }
    }
    Cow::Owned(shown + rest)
}

const BOLD: &str = "\x1b[1m";
const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const PLAIN: &str = "\x1b[0m";

/// Terminal colours, or plain text where they are switched off.
#[derive(Debug, Clone, Copy)]
pub struct Paint {
    on: bool,
}

impl Paint {
    /// For text that goes to standard output.
    pub fn stdout() -> Paint {
        Paint::on(io::stdout().is_terminal())
    }

    /// For text that goes to standard error.
    pub fn stderr() -> Paint {
        Paint::on(io::stderr().is_terminal())
    }

    fn on(terminal: bool) -> Paint {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let dumb = set("TERM").is_some_and(|term| term == "dumb");
        Paint {
            on: terminal && !dumb && set("NO_COLOR").is_none(),
        }
    }

    /// For headings.
    pub fn bold(self, text: &str) -> String {
        self.code(BOLD, text)
    }

    /// For checks that passed.
    pub fn green(self, text: &str) -> String {
        self.code(GREEN, text)
    }

    /// For checks that failed.
    pub fn red(self, text: &str) -> String {
        self.code(RED, text)
    }

    fn code(self, code: &str, text: &str) -> String {
        match self.on {
            true => format!("{code}{text}{PLAIN}"),
            false => text.to_string(),
        }
    }

    /// The code that a text begins with, if it is painted.
    fn code_at(self, text: &str) -> &'static str {
        let codes = [BOLD, GREEN, RED, PLAIN].into_iter();
        let mut codes = codes.filter(|code| self.on && text.starts_with(code));
        codes.next().unwrap_or_default()
    }
}

/// A progress bar of `steps` steps on standard error; hidden where that is not a terminal.
pub fn bar(steps: usize) -> ProgressBar {
    styled(steps, "{bar:30} {pos}/{len} {msg} ({elapsed})")
}

/// A progress bar that also shows the remaining time.
pub fn long_bar(steps: usize) -> ProgressBar {
    styled(steps, "{bar:30} {pos}/{len} {msg} ({elapsed}, {eta} left)")
}

fn styled(steps: usize, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A spinner on standard error for work of unknown length; hidden where that is not a terminal.
pub fn spinner(message: impl Into<String>) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message.into());
    spinner.enable_steady_tick(Duration::from_millis(120));
    spinner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_a_terminal_obeys_are_escaped() {
        let (on, off) = (Paint { on: true }, Paint { on: false });
        let foreign = "a\u{1b}[2Jb\r\u{7f}\u{9b}c\u{202e}d\u{2066}\u{feff}\u{e0041}";
        let shown = r"a\u001b[2Jb\u000d\u007f\u009bc\u202ed\u2066\ufeff\udb40\udc41";
        assert_eq!(printable(foreign, on), shown);
        assert_eq!(printable(foreign, off), shown);
        assert_eq!(printable("one\ntwo — Ünï 漢字", off), "one\ntwo — Ünï 漢字");
        let painted = on.bold("x") + &on.red("y");
        assert_eq!(printable(&painted, on), painted);
        assert_eq!(printable(&painted, off).matches(r"\u001b[").count(), 4);
        // JSON stays JSON, of the same value.
        let value = serde_json::json!({ "name": foreign });
        let shown = printable(&value.to_string(), off).into_owned();
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&shown).unwrap(),
            value
        );
        assert!(shown.is_ascii());
    }
}
