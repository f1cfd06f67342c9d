//! `console` blocks of a document: lines that begin with `$ ` are commands, the lines below them
//! the expected output, in which `...` stands for any lines. Columns are as wide as their widest
//! number, which kernels decide, so that any number of blanks equals any other.

/// A command and its expected output.
pub struct ConsoleStep {
    /// The line of the document.
    pub line: usize,
    /// The command.
    pub command: String,
    /// The expected output.
    pub output: Vec<String>,
}

/// The commands of a document, in order.
pub fn steps(document: &str) -> Vec<ConsoleStep> {
    let mut steps: Vec<ConsoleStep> = Vec::new();
    let mut inside = false;
    for (number, line) in document.lines().enumerate() {
        match (inside, line) {
            (false, "```console") => inside = true,
            (true, "```") => inside = false,
            (true, line) => match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => steps.push(ConsoleStep {
                    line: number + 1,
                    command: command.into(),
                    output: Vec::new(),
                }),
                (None, Some(step)) if step.command.ends_with('\\') => {
                    step.command.pop();
                    step.command += line.trim_start();
                }
                (None, Some(step)) => step.output.push(line.trim_end().into()),
                (None, None) => panic!("line {}: output without a command", number + 1),
            },
            _ => {}
        }
    }
    steps
}

/// Whether lines equal the expected ones, in which `...` stands for any lines.
pub fn agrees(expected: &[String], lines: &[&str]) -> bool {
    match expected.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first == "..." => {
            (0..=lines.len()).any(|skipped| agrees(rest, &lines[skipped..]))
        }
        Some((first, rest)) => lines.split_first().is_some_and(|(line, lines)| {
            line.split_whitespace().eq(first.split_whitespace()) && agrees(rest, lines)
        }),
    }
}

#[test]
fn dots_stand_for_any_lines() {
    let page = |lines: &[&str]| lines.iter().map(|x| x.to_string()).collect::<Vec<_>>();
    assert!(agrees(&page(&["a", "...", "d"]), &["a", "b", "c", "d"]));
    assert!(agrees(&page(&["..."]), &[]));
    assert!(!agrees(&page(&["a", "...", "d"]), &["a", "b"]));
    assert!(!agrees(&page(&["a"]), &["a", "b"]));
    assert!(agrees(&page(&["  a b"]), &["   a  b"]));
    assert!(!agrees(&page(&["a b"]), &["ab"]));
}
