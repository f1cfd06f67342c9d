//! What depends on who is looking: colour, progress bars, and a reader who has gone away.
//!
//! The decision here: results are written with [`say`], which returns an error where `println!`
//! would panic, so that `encke plan … | head` ends quietly.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Writes to standard output.
pub fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes a line to standard error. Nobody can be told if that fails.
pub fn note(line: &str) {
    // In one piece: what several processes write to one pipe is mixed between pieces.
    let _ = io::stderr()
        .lock()
        .write_all(format!("{line}\n").as_bytes());
}

/// Colours, or none.
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

    /// Headings.
    pub fn bold(self, text: &str) -> String {
        self.code("1", text)
    }

    /// Good news.
    pub fn green(self, text: &str) -> String {
        self.code("32", text)
    }

    /// Bad news.
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

/// A bar of `steps` steps on standard error; invisible where that is no terminal.
pub fn bar(steps: usize) -> ProgressBar {
    styled(steps, "{bar:30} {pos}/{len} {msg} ({elapsed})")
}

/// The same for work so long that one asks how long it will take.
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

/// A sign of life on standard error for work of unknown length; invisible where no terminal is.
pub fn spinner(message: impl Into<String>) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message.into());
    spinner.enable_steady_tick(Duration::from_millis(120));
    spinner
}
