//! A rank's program as text: its buffers, then its tasks and messages, round by round.
//!
//! Buffers are shown with their index, because several can have one name. All tasks and messages
//! are listed, in the order in which the rank executes them; addresses are only in `--json`.

use encke::explain::{bytes, grouped};
use encke::plan::program::{BufferId, Fill, Message, Port, RankPlan, Round, Task};
use encke_lab::table::TextTable;

/// The program of a rank.
pub fn to_text(program: &RankPlan, ranks: usize) -> String {
    let mut text = format!(
        "Rank {} of {ranks} owns {} tokens and computes {} (query, key) pairs.\n\nIt allocates\n",
        program.rank,
        grouped(program.rows as u128),
        grouped(program.pairs()),
    );
    let mut table = TextTable::new(2, ["buffer", "for", "type", "elements", "bytes"]);
    for (id, buffer) in program.buffers.iter().enumerate() {
        table.row([
            name(program, BufferId(id)),
            buffer.component.name().to_string(),
            buffer.dtype.to_string(),
            grouped(buffer.elements as u128),
            bytes(buffer.bytes()),
        ]);
    }
    text += &table.to_string();
    text += "\nInputs\n";
    text += &ports(program, &program.inputs);
    for (number, round) in program.rounds.iter().enumerate() {
        text += &format!("\nRound {number}\n");
        text += &round_text(program, round);
    }
    text += "\nOutputs\n";
    text += &ports(program, &program.outputs);
    text
}

/// A buffer's name and index.
fn name(program: &RankPlan, id: BufferId) -> String {
    match program.buffers.get(id.0) {
        Some(buffer) => format!("{}#{}", buffer.name, id.0),
        None => format!("#{}", id.0),
    }
}

fn ports(program: &RankPlan, ports: &[Port]) -> String {
    let mut text = String::new();
    for port in ports {
        let runs = port.runs.iter().map(|run| {
            let (first, last) = (run.first as u128, run.end() as u128 - 1);
            let every = match run.stride {
                1 => String::new(),
                stride => format!(", one in {stride}"),
            };
            format!("{}-{}{every}", grouped(first), grouped(last))
        });
        let tokens = match runs.collect::<Vec<_>>() {
            runs if runs.is_empty() => "no tokens".to_string(),
            runs => format!("tokens {}", runs.join(" and ")),
        };
        let role = format!("{:?}", port.role).to_lowercase();
        text += &format!("  {role}: {tokens}, in {}\n", name(program, port.buffer));
    }
    text
}

fn round_text(program: &RankPlan, round: &Round) -> String {
    let mut text = String::new();
    text += &tasks(program, "  ", &round.before);
    let message = |message: &Message, verb: &str, preposition: &str| {
        let size = bytes(program.message_bytes(message));
        let buffer = name(program, message.buffer);
        format!(
            "  {verb} {buffer} {preposition} rank {}: {size}\n",
            message.address.peer
        )
    };
    for sent in &round.sends {
        text += &message(sent, "send", "to");
    }
    for received in &round.receives {
        text += &message(received, "receive", "from");
    }
    let overlapped = !(round.sends.is_empty() && round.receives.is_empty());
    let lead = if overlapped { "  meanwhile " } else { "  " };
    text += &tasks(program, lead, &round.meanwhile);
    if text.is_empty() {
        text += "  nothing\n";
    }
    text
}

/// A line for each task; consecutive tasks with equal lines share one.
fn tasks(program: &RankPlan, lead: &str, tasks: &[Task]) -> String {
    let mut lines: Vec<(String, usize)> = Vec::new();
    for task in tasks {
        let line = task_text(program, task);
        match lines.last_mut() {
            Some((last, times)) if *last == line => *times += 1,
            _ => lines.push((line, 1)),
        }
    }
    let line = |(line, times): &(String, usize)| match times {
        1 => format!("{lead}{line}\n"),
        times => format!("{lead}{line} ({times} times)\n"),
    };
    lines.iter().map(line).collect()
}

fn task_text(program: &RankPlan, task: &Task) -> String {
    let name = |id: &BufferId| name(program, *id);
    match task {
        Task::Fill { buffer, value } => {
            let value = match value {
                Fill::Zero => "0",
                Fill::MinusInfinity => "-inf",
            };
            format!("set {} to {value}", name(buffer))
        }
        Task::Copy {
            blocks, from, to, ..
        }
        | Task::Pack { blocks, from, to } => {
            let (verb, preposition) = match task {
                Task::Copy { add: true, .. } => ("add", "to"),
                Task::Copy { .. } => ("copy", "to"),
                _ => ("pack", "as"),
            };
            let count: usize = blocks.iter().map(|block| block.elements()).sum();
            let count = grouped(count as u128);
            format!(
                "{verb} {count} elements of {} {preposition} {}",
                name(from),
                name(to)
            )
        }
        Task::Forward {
            q,
            k,
            starts,
            carry,
            ..
        } => {
            let work = job_text(task);
            let first = if *starts { " for the first time" } else { "" };
            format!(
                "attend {work}{first}: {} to {}, into {}",
                name(q),
                name(k),
                name(&carry.acc)
            )
        }
        Task::Conclude {
            q, k, carry, out, ..
        } => {
            let work = job_text(task);
            format!(
                "attend {work} for the last time: {} to {}, from {} into {}",
                name(q),
                name(k),
                name(&carry.acc),
                name(out)
            )
        }
        Task::Attend { q, k, out, .. } => {
            let work = job_text(task);
            format!(
                "attend {work} to the end: {} to {}, into {}",
                name(q),
                name(k),
                name(out)
            )
        }
        Task::Merge { from, to, .. } => {
            format!("merge {} into {}", name(&from.acc), name(&to.acc))
        }
        Task::Finish { out, lse, .. } => {
            format!("finish the softmax: {} and {}", name(out), name(lse))
        }
        Task::Delta { delta, dlse, .. } => {
            let dlse = if dlse.is_some() { " and dlse" } else { "" };
            format!("compute {} from dout, out{dlse}", name(delta))
        }
        Task::Backward {
            q, k, dq, dk, dv, ..
        } => format!(
            "differentiate {}: {} against {}, into {}, {}, {}",
            job_text(task),
            name(q),
            name(k),
            name(dq),
            name(dk),
            name(dv)
        ),
    }
}

/// The sizes of the attention in a task.
fn job_text(task: &Task) -> String {
    let Some(job) = task.job() else {
        return String::new();
    };
    let times = |count: usize, what: &str| match count {
        1 => String::new(),
        count => format!(" x {} {what}", grouped(count as u128)),
    };
    format!(
        "{} queries x {} keys{}{}{}{}",
        grouped(job.queries as u128),
        grouped(job.keys as u128),
        times(job.segments, "segments"),
        times(job.heads, "heads"),
        times(job.batch, "sequences"),
        if job.mask.is_some() { ", masked" } else { "" },
    )
}
