//! Several shards on one rank: their programs run side by side, in the same rounds, as one program.
//!
//! Each shard's program addresses other shards. Here a peer shard becomes the rank that hosts it,
//! tags separate messages between the same two hosts that belong to different shards, and a message
//! between two shards of the same host becomes a copy.

use super::builder::ProgramBuilder;
use super::layout::flat;
use super::program::{BufferId, Message, Port, RankPlan, Round, Task};
use super::topology::Plan;

/// The program of `rank`, which runs `programs`, those of the shards it hosts, and holds replicas
/// of the shards `kept`.
pub(super) fn combine(
    plan: &Plan,
    rank: usize,
    hosts: &[Option<usize>],
    programs: impl Iterator<Item = RankPlan>,
    kept: impl Iterator<Item = usize>,
) -> RankPlan {
    let mut builder = ProgramBuilder::new(plan, rank);
    builder.replicas(kept);
    let empty = builder.finish();
    let mut whole = RankPlan { rows: 0, ..empty };
    let routes = ShardRoutes { plan, rank, hosts };
    // Messages between two hosted shards: (round, tag, message) of both ends.
    let (mut sent, mut received) = (Vec::new(), Vec::new());
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
            let into = whole.round(number);
            for (tasks, into) in [
                (round.before, &mut into.before),
                (round.meanwhile, &mut into.meanwhile),
            ] {
                into.extend(tasks.into_iter().map(|mut task| {
                    task.rename(rename);
                    task
                }));
            }
            for (messages, sends) in [(round.sends, true), (round.receives, false)] {
                for mut message in messages {
                    message.buffer = rename(message.buffer);
                    let peer = message.address.peer;
                    let (from, to) = if sends { (shard, peer) } else { (peer, shard) };
                    let tag = routes.tag(from, to, message.address.tag);
                    match routes.remote_host(from, to) {
                        Some(peer) => {
                            (message.address.peer, message.address.tag) = (peer, tag);
                            match sends {
                                true => into.sends.push(message),
                                false => into.receives.push(message),
                            }
                        }
                        None if sends => sent.push((number, tag, message)),
                        None => received.push((number, tag, message)),
                    }
                }
            }
        }
    }
    // A local message arrives at the start of the next round, before any of that round's tasks.
    let mut copies: Vec<Vec<Task>> = Vec::new();
    copies.resize_with(whole.rounds.len() + 1, Vec::new);
    for (number, tag, message) in sent {
        copies[number + 1].push(local_copy(number, tag, &message, &received));
    }
    for (number, mut first) in copies.into_iter().enumerate() {
        if first.is_empty() {
            continue;
        }
        let before = &mut whole.round(number).before;
        first.append(before);
        *before = first;
    }
    whole
}

impl RankPlan {
    /// The round with this number; creates it and all earlier rounds as needed.
    fn round(&mut self, number: usize) -> &mut Round {
        if self.rounds.len() <= number {
            self.rounds.resize_with(number + 1, Round::default);
        }
        &mut self.rounds[number]
    }
}

/// The copy that replaces a message between two shards of the same host.
fn local_copy(
    round: usize,
    tag: u64,
    message: &Message,
    received: &[(usize, u64, Message)],
) -> Task {
    let elements = message.address.elements;
    let other = received.iter().find(|(r, t, _)| (*r, *t) == (round, tag));
    let (_, _, other) = other.expect("a message has two ends in the same round");
    let expected = other.address.elements;
    assert_eq!(elements, expected, "both ends of a message have one size");
    Task::Copy {
        blocks: vec![flat(1, elements)],
        add: false,
        from: message.buffer,
        to: other.buffer,
    }
}

/// Translates between shards and the ranks that host them.
struct ShardRoutes<'a> {
    plan: &'a Plan,
    rank: usize,
    hosts: &'a [Option<usize>],
}

impl ShardRoutes<'_> {
    /// How many ranks a shard is from its original rank: distinct for all shards of one host.
    fn away(&self, shard: usize) -> usize {
        let ranks = self.plan.ranks();
        let host = self.hosts[shard].expect("a shard that sends or receives has a host");
        (host + ranks - shard) % ranks
    }

    /// The tag of a message from one shard to another.
    fn tag(&self, from: usize, to: usize, tag: u64) -> u64 {
        let most = self.plan.request.redundancy + 1;
        let pair = self.away(from) * most + self.away(to);
        tag * (most * most) as u64 + pair as u64
    }

    /// The other rank of a message between two shards, one of which is hosted here; None if this
    /// rank hosts both.
    fn remote_host(&self, from: usize, to: usize) -> Option<usize> {
        let hosts = [from, to].map(|shard| self.hosts[shard]);
        hosts.into_iter().flatten().find(|host| *host != self.rank)
    }
}
