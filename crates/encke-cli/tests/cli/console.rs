//! `console` blocks of a page: lines that begin with `$ ` are commands, the lines below them what the
//! command answers, where `...` stands for any lines.

/// A command and what the page says of its answer.
pub struct Step {
    pub line: usize,
    pub command: String,
    pub answer: Vec<String>,
}

/// The commands of a page, in order.
pub fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    for (number, line) in page.lines().enumerate() {
        match (inside, line) {
            (false, "```console") => inside = true,
            (true, "```") => inside = false,
            (true, line) => match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => steps.push(Step {
                    line: number + 1,
                    command: command.into(),
                    answer: Vec::new(),
                }),
                (None, Some(step)) if step.command.ends_with('\\') => {
                    step.command.pop();
                    step.command += line.trim_start();
                }
                (None, Some(step)) => step.answer.push(line.trim_end().into()),
                (None, None) => panic!("line {}: an answer without a command", number + 1),
            },
            _ => {}
        }
    }
    steps
}

/// Whether lines are those of the page, where `...` stands for any.
pub fn agrees(page: &[String], said: &[&str]) -> bool {
    match page.split_first() {
        None => said.is_empty(),
        Some((first, rest)) if first == "..." => {
            (0..=said.len()).any(|skipped| agrees(rest, &said[skipped..]))
        }
        Some((first, rest)) => said
            .split_first()
            .is_some_and(|(line, said)| line.trim_end() == first && agrees(rest, said)),
    }
}

#[test]
fn dots_stand_for_any_lines() {
    let page = |lines: &[&str]| lines.iter().map(|x| x.to_string()).collect::<Vec<_>>();
    assert!(agrees(&page(&["a", "...", "d"]), &["a", "b", "c", "d"]));
    assert!(agrees(&page(&["..."]), &[]));
    assert!(!agrees(&page(&["a", "...", "d"]), &["a", "b"]));
    assert!(!agrees(&page(&["a"]), &["a", "b"]));
}
