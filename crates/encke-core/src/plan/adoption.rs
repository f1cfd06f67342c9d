//! Several shards on one rank: their programs side by side, in the same rounds, as one program.
//!
//! Who wrote them still calls ranks by the shards they had. Here peers become the hosts of their
//! shards, tags tell apart what goes between the same two hosts for different shards, and what a
//! host would send to itself becomes a copy.

use super::Plan;
use super::builder::Builder;
use super::layout::flat;
use super::program::{BufferId, Message, Port, RankPlan, Round, Task};

/// The program of `rank`, which carries out those of the shards it hosts and keeps the inputs of
/// others.
pub(super) fn together(
    plan: &Plan,
    rank: usize,
    hosts: &[Option<usize>],
    programs: impl Iterator<Item = RankPlan>,
    kept: impl Iterator<Item = usize>,
) -> RankPlan {
    let mut builder = Builder::new(plan, rank);
    builder.replicas(kept);
    let empty = builder.finish();
    let mut whole = RankPlan { rows: 0, ..empty };
    let naming = Naming { plan, rank, hosts };
    // What a host has for itself is copied when all of its shards have come to the round after.
    let mut copies: Vec<Vec<Task>> = Vec::new();
    let mut taken: Vec<(usize, u64, usize, BufferId)> = Vec::new();
    let mut given = Vec::new();
    for program in programs {
        let base = whole.buffers.len();
        let rename = |id: BufferId| BufferId(id.0 + base);
        let shard = program.rank;
        whole.rows += program.rows;
        whole.buffers.extend(program.buffers);
        let port = |port: Port| Port {
            buffer: rename(port.buffer),
            ..port
        };
        whole.inputs.extend(program.inputs.into_iter().map(port));
        whole.outputs.extend(program.outputs.into_iter().map(port));
        for (number, round) in program.rounds.into_iter().enumerate() {
            if whole.rounds.len() <= number {
                whole.rounds.resize_with(number + 1, Round::default);
            }
            let into = &mut whole.rounds[number];
            for (tasks, into) in [
                (round.before, &mut into.before),
                (round.meanwhile, &mut into.meanwhile),
            ] {
                into.extend(tasks.into_iter().map(|mut task| {
                    task.rename(rename);
                    task
                }));
            }
            for mut message in round.sends {
                message.buffer = rename(message.buffer);
                match naming.between(shard, message.address.peer, message.address.tag) {
                    Ends::Apart { peer, tag } => {
                        message.address.peer = peer;
                        message.address.tag = tag;
                        into.sends.push(message);
                    }
                    Ends::Same { tag } => given.push((number, tag, message)),
                }
            }
            for mut message in round.receives {
                message.buffer = rename(message.buffer);
                match naming.between(message.address.peer, shard, message.address.tag) {
                    Ends::Apart { peer, tag } => {
                        message.address.peer = peer;
                        message.address.tag = tag;
                        into.receives.push(message);
                    }
                    Ends::Same { tag } => {
                        taken.push((number, tag, message.address.elements, message.buffer));
                    }
                }
            }
        }
    }
    copies.resize_with(whole.rounds.len() + 1, Vec::new);
    for (number, tag, message) in given {
        copies[number + 1].push(handed_over(number, tag, &message, &taken));
    }
    for (number, mut first) in copies.into_iter().enumerate() {
        if first.is_empty() {
            continue;
        }
        if whole.rounds.len() <= number {
            whole.rounds.resize_with(number + 1, Round::default);
        }
        let before = &mut whole.rounds[number].before;
        first.append(before);
        *before = first;
    }
    whole
}

/// The copy that a message to oneself is.
fn handed_over(
    round: usize,
    tag: u64,
    message: &Message,
    taken: &[(usize, u64, usize, BufferId)],
) -> Task {
    let elements = message.address.elements;
    let other = taken.iter().find(|(at, t, ..)| (*at, *t) == (round, tag));
    let &(_, _, expected, to) = other.expect("a message has two ends in the same round");
    assert_eq!(elements, expected, "both ends of a message have one size");
    Task::Copy {
        blocks: vec![flat(1, elements, 0, 0)],
        add: false,
        from: message.buffer,
        to,
    }
}

/// Where the two ends of a message are.
enum Ends {
    /// On different ranks: the other one, and the tag.
    Apart { peer: usize, tag: u64 },
    /// On this rank.
    Same { tag: u64 },
}

/// Who is who for a host.
struct Naming<'a> {
    plan: &'a Plan,
    rank: usize,
    hosts: &'a [Option<usize>],
}

impl Naming<'_> {
    /// How far a shard is from home: which of its host's shards it is.
    fn away(&self, shard: usize) -> usize {
        let ranks = self.plan.ranks();
        let host = self.hosts[shard].expect("who sends or receives has a host");
        (host + ranks - shard) % ranks
    }

    /// A message from one shard to another, one of which is hosted here.
    fn between(&self, from: usize, to: usize, tag: u64) -> Ends {
        let most = self.plan.request.redundancy + 1;
        let apart = self.away(from) * most + self.away(to);
        let tag = tag * (most * most) as u64 + apart as u64;
        let ends = [from, to].map(|shard| self.hosts[shard]);
        match ends.into_iter().flatten().find(|host| *host != self.rank) {
            Some(peer) => Ends::Apart { peer, tag },
            None => Ends::Same { tag },
        }
    }
}
