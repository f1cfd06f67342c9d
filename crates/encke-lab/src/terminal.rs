//! Standard output and standard error: colour, progress bars, and closed pipes.
//!
//! The decision here: results are written with [`say`], which returns an error where `println!`
//! would panic, so that `encke plan … | head` exits without an error message.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Writes to standard output and flushes it.
pub fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes a line to standard error; a failure to write has no consequence.
pub fn note(line: &str) {
    // One write: writes of several processes to one pipe are interleaved.
    let _ = io::stderr()
        .lock()
        .write_all(format!("{line}\n").as_bytes());
}

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
        self.code("1", text)
    }

    /// For checks that passed.
    pub fn green(self, text: &str) -> String {
        self.code("32", text)
    }

    /// For checks that failed.
    pub fn red(self, text: &str) -> String {
        self.code("31", text)
    }

    fn code(self, code: &str, text: &str) -> String {
        match self.on {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_string(),
        }
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
