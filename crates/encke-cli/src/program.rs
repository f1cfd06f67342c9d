//! A rank's program in words: its buffers, then what it does, round by round.
//!
//! Buffers are named with their number, since several can have one name. Nothing is left out: this
//! is what the rank will do, in this order. Addresses are for `--json`.

use encke::explain::{bytes, grouped};
use encke::plan::program::{BufferId, Fill, Message, Port, RankPlan, Round, Task};

use crate::table::Table;

/// The program of a rank.
pub fn words(program: &RankPlan, ranks: usize) -> String {
    let mut text = format!(
        "Rank {} of {ranks} owns {} tokens and computes {} (query, key) pairs.\n\nIt allocates\n",
        program.rank,
        grouped(program.rows as u128),
        grouped(program.pairs()),
    );
    let mut table = Table::new(2, ["buffer", "for", "type", "numbers", "bytes"]);
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
    text += "\nIt is given\n";
    text += &ports(program, &program.inputs);
    for (number, round) in program.rounds.iter().enumerate() {
        text += &format!("\nRound {number}\n");
        text += &round_words(program, round);
    }
    text += "\nIt returns\n";
    text += &ports(program, &program.outputs);
    text
}

/// A buffer's name and number.
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

fn round_words(program: &RankPlan, round: &Round) -> String {
    let mut text = String::new();
    text += &tasks(program, "  ", &round.before);
    let message = |message: &Message, verb: &str, way: &str| {
        let size = bytes(program.message_bytes(message));
        let buffer = name(program, message.buffer);
        format!(
            "  {verb} {buffer} {way} rank {}: {size}\n",
            message.address.peer
        )
    };
    for sent in &round.sends {
        text += &message(sent, "send", "to");
    }
    for received in &round.receives {
        text += &message(received, "receive", "from");
    }
    let flying = !(round.sends.is_empty() && round.receives.is_empty());
    let lead = if flying { "  meanwhile " } else { "  " };
    text += &tasks(program, lead, &round.meanwhile);
    if text.is_empty() {
        text += "  nothing\n";
    }
    text
}

/// A line for each task; tasks that read alike, one after the other, share one.
fn tasks(program: &RankPlan, lead: &str, tasks: &[Task]) -> String {
    let mut lines: Vec<(String, usize)> = Vec::new();
    for task in tasks {
        let line = task_words(program, task);
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

fn task_words(program: &RankPlan, task: &Task) -> String {
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
            let (verb, place) = match task {
                Task::Copy { add: true, .. } => ("add", "to"),
                Task::Copy { .. } => ("copy", "to"),
                _ => ("pack", "as"),
            };
            let count: usize = blocks.iter().map(|block| block.elements()).sum();
            let count = grouped(count as u128);
            format!(
                "{verb} {count} numbers of {} {place} {}",
                name(from),
                name(to)
            )
        }
        Task::Forward {
            q,
            k,
            begins,
            carry,
            ..
        } => {
            let work = job_words(task);
            let first = if *begins { " for the first time" } else { "" };
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
            let work = job_words(task);
            format!(
                "attend {work} for the last time: {} to {}, from {} into {}",
                name(q),
                name(k),
                name(&carry.acc),
                name(out)
            )
        }
        Task::Attend { q, k, out, .. } => {
            let work = job_words(task);
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
            format!("end the softmax: {} and {}", name(out), name(lse))
        }
        Task::Delta { delta, dlse, .. } => {
            let dlse = if dlse.is_some() { " and dlse" } else { "" };
            format!("make {} from dout, out{dlse}", name(delta))
        }
        Task::Backward {
            q, k, dq, dk, dv, ..
        } => format!(
            "differentiate {}: {} against {}, into {}, {}, {}",
            job_words(task),
            name(q),
            name(k),
            name(dq),
            name(dk),
            name(dv)
        ),
    }
}

/// The sizes of the attention in a task.
fn job_words(task: &Task) -> String {
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
        if job.causal.is_some() { ", causal" } else { "" },
    )
}
