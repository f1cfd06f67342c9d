//! From one ring to another: which rows go where, in as few bytes as there can be, as programs.
//!
//! Not a pass: nothing is computed. Tensors that lie in the shards of one [`Sharding`] come to lie in
//! those of another, whatever its size and cut.
//!
//! The decision here: a resize is a program like any other, so a rank interprets it, a transport
//! carries it, its bytes are asserted where they move and a simulator times it, without a line of
//! theirs. A row moves only if its owner is at another place afterwards, and who takes whose place
//! is chosen so that the fewest do ([`Resize::new`]), or given ([`Resize::in_place`]).

use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::assignment::assign;
use super::program::{BufferId, BufferPlan, Component, Message, Port, RankPlan, Role, Round, Task};
use crate::dtype::DType;
use crate::error::Result;
use crate::job::{Block, Operand};
use crate::rows::Shards;
use crate::sharding::{Run, Sharding};
use crate::transport::Address;

/// A tensor that moves: the sizes of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Moving {
    /// Batch entries, each with all tokens.
    pub batch: usize,
    /// Numbers of a row: heads x numbers a head.
    pub width: usize,
    /// The type they are stored in.
    pub dtype: DType,
}

impl Moving {
    fn elements(&self, rows: usize) -> usize {
        self.batch * rows * self.width
    }
}

/// Tokens that go from a rank of the old ring to one of the new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TokenMove {
    /// The rank of the old ring that has them.
    pub from: usize,
    /// The rank of the new ring that will.
    pub to: usize,
    /// The tokens.
    pub tokens: Run,
    /// The first one's row in the old shard, and how many rows on the next one is.
    pub from_row: (usize, usize),
    /// The same in the new shard.
    pub to_row: (usize, usize),
}

/// What it takes to bring shards from one sharding to another. Old rank a is at place a; a place is
/// whatever a rank is: a thread, a process, a device.
#[derive(Debug, Clone)]
pub struct Resize {
    from: Sharding,
    to: Sharding,
    old: Shards,
    new: Shards,
    places: Vec<usize>,
    stretches: Vec<TokenMove>,
}

impl Resize {
    /// The way that moves the fewest bytes: each new rank takes the place of the old rank whose rows
    /// it shares most of, all in all. Where the ring grows, newcomers have the places after the old
    /// ones.
    pub fn new(from: &Sharding, to: &Sharding, tokens: usize) -> Result<Resize> {
        let mut resize = Resize::in_place(from, to, tokens)?;
        let mut shared: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for stretch in &resize.stretches {
            *shared.entry((stretch.to, stretch.from)).or_default() += stretch.tokens.count;
        }
        let kept = |rank, place| shared.get(&(rank, place)).copied().unwrap_or(0);
        resize.places = assign(to.ranks(), resize.places_in_all(), kept);
        Ok(resize)
    }

    /// The way in which new rank b is at place b: for shards that were cut for who is there.
    pub fn in_place(from: &Sharding, to: &Sharding, tokens: usize) -> Result<Resize> {
        from.check(tokens)?;
        to.check(tokens)?;
        let (old, new) = (Shards::new(from, tokens), Shards::new(to, tokens));
        let pairs = (0..from.ranks()).flat_map(|a| (0..to.ranks()).map(move |b| (a, b)));
        let stretches = pairs
            .flat_map(|(a, b)| stretches(&old, a, &new, b))
            .collect();
        Ok(Resize {
            from: from.clone(),
            to: to.clone(),
            old,
            new,
            places: (0..to.ranks()).collect(),
            stretches,
        })
    }

    /// The sharding before.
    pub fn from(&self) -> &Sharding {
        &self.from
    }

    /// The sharding afterwards.
    pub fn to(&self) -> &Sharding {
        &self.to
    }

    /// Tokens of the sequence.
    pub fn tokens(&self) -> usize {
        self.old.tokens()
    }

    /// The place of each new rank.
    pub fn places(&self) -> &[usize] {
        &self.places
    }

    /// How many places take part: those of the old ring and of newcomers.
    pub fn places_in_all(&self) -> usize {
        self.from.ranks().max(self.to.ranks())
    }

    /// The new rank at a place, if there is one.
    pub fn new_rank(&self, place: usize) -> Option<usize> {
        self.places.iter().position(|of| *of == place)
    }

    /// Every token once: who had it and who will.
    pub fn stretches(&self) -> &[TokenMove] {
        &self.stretches
    }

    /// Tokens whose owner is at another place afterwards.
    pub fn moved_tokens(&self) -> usize {
        let moved = self.stretches.iter().filter(|of| self.moves(of));
        moved.map(|of| of.tokens.count).sum()
    }

    /// Bytes that travel for tensors.
    pub fn sent_bytes(&self, tensors: &[Moving]) -> usize {
        let row = |of: &Moving| of.elements(1) * of.dtype.bytes();
        self.moved_tokens() * tensors.iter().map(row).sum::<usize>()
    }

    fn moves(&self, stretch: &TokenMove) -> bool {
        stretch.from != self.places[stretch.to]
    }

    /// What whoever is at a place does: packs what goes elsewhere, sends it, copies what stays while
    /// that flies, and unpacks what has come. Ports are in the order of the tensors.
    pub fn program(&self, place: usize, tensors: &[Moving]) -> RankPlan {
        let mut program = Program {
            resize: self,
            place,
            plan: RankPlan {
                rank: place,
                rows: 0,
                buffers: Vec::new(),
                inputs: Vec::new(),
                rounds: vec![Round::default(), Round::default()],
                outputs: Vec::new(),
            },
        };
        for (tag, tensor) in tensors.iter().enumerate() {
            program.tensor(tag as u64, tensor);
        }
        program.plan
    }
}

/// The tokens that old rank `a` and new rank `b` both have: one stretch for each two runs that meet.
fn stretches(old: &Shards, a: usize, new: &Shards, b: usize) -> Vec<TokenMove> {
    let row = |(run, base): (Run, usize), met: &Run| {
        let first = base + (met.first - run.first) / run.stride;
        (first, met.stride / run.stride)
    };
    let mut found = Vec::new();
    for &had in old.runs(a) {
        for &will in new.runs(b) {
            found.extend(had.0.meet(&will.0).map(|tokens| TokenMove {
                from: a,
                to: b,
                tokens,
                from_row: row(had, &tokens),
                to_row: row(will, &tokens),
            }));
        }
    }
    found
}

/// A program under way.
struct Program<'a> {
    resize: &'a Resize,
    place: usize,
    plan: RankPlan,
}

impl Program<'_> {
    fn buffer(&mut self, name: &'static str, tensor: &Moving, rows: usize) -> BufferId {
        self.plan.buffers.push(BufferPlan {
            name,
            component: Component::Rows,
            shard: self.place,
            dtype: tensor.dtype,
            elements: tensor.elements(rows),
        });
        BufferId(self.plan.buffers.len() - 1)
    }

    /// All that one tensor asks for; its messages have a tag of their own.
    fn tensor(&mut self, tag: u64, tensor: &Moving) {
        let Resize { from, old, new, .. } = self.resize;
        let place = self.place;
        let (a, b) = (place, self.resize.new_rank(place));
        let (mut had, mut will) = (None, None);
        if a < from.ranks() {
            let id = self.buffer("old rows", tensor, old.rows(a));
            self.plan.inputs.push(port(id, old.runs(a)));
            had = Some(id);
        }
        if let Some(b) = b {
            self.plan.rows = new.rows(b);
            let id = self.buffer("new rows", tensor, new.rows(b));
            self.plan.outputs.push(port(id, new.runs(b)));
            will = Some(id);
        }
        let resize = self.resize;
        let (mut out, mut incoming) = (BTreeMap::new(), BTreeMap::new());
        let (mut kept, mut old_rows, mut new_rows) = (Vec::new(), 0, 0);
        for stretch in &resize.stretches {
            let (from, to) = (stretch.from, resize.places[stretch.to]);
            if from == place {
                old_rows = old.rows(stretch.from);
            }
            if to == place {
                new_rows = new.rows(stretch.to);
            }
            match (from == place, to == place) {
                (true, true) => kept.push(*stretch),
                (true, false) => push(&mut out, to, *stretch),
                (false, true) => push(&mut incoming, from, *stretch),
                (false, false) => {}
            }
        }
        let shard = |rows: usize| Side::Shard { rows };
        for (peer, stretches) in &out {
            let rows = count(stretches);
            let parcel = self.buffer("leaving rows", tensor, rows);
            let blocks = blocks(tensor, stretches, shard(old_rows), Side::Parcel);
            let had = had.expect("who sends had rows");
            self.plan.rounds[0].before.push(copy(blocks, had, parcel));
            let message = message(*peer, tag, tensor.elements(rows), parcel);
            self.plan.rounds[0].sends.push(message);
        }
        for (peer, stretches) in &incoming {
            let rows = count(stretches);
            let parcel = self.buffer("arriving rows", tensor, rows);
            let message = message(*peer, tag, tensor.elements(rows), parcel);
            self.plan.rounds[0].receives.push(message);
            let blocks = blocks(tensor, stretches, Side::Parcel, shard(new_rows));
            let will = will.expect("who receives will have rows");
            self.plan.rounds[1].before.push(copy(blocks, parcel, will));
        }
        if let (Some(had), Some(will), false) = (had, will, kept.is_empty()) {
            let blocks = blocks(tensor, &kept, shard(old_rows), shard(new_rows));
            self.plan.rounds[0].meanwhile.push(copy(blocks, had, will));
        }
    }
}

fn push(to: &mut BTreeMap<usize, Vec<TokenMove>>, peer: usize, stretch: TokenMove) {
    to.entry(peer).or_default().push(stretch);
}

fn count(stretches: &[TokenMove]) -> usize {
    stretches.iter().map(|stretch| stretch.tokens.count).sum()
}

fn port(buffer: BufferId, runs: &[(Run, usize)]) -> Port {
    Port {
        role: Role::Rows,
        buffer,
        runs: runs.iter().map(|(run, _)| *run).collect(),
    }
}

fn message(peer: usize, tag: u64, elements: usize, buffer: BufferId) -> Message {
    let address = Address {
        peer,
        tag,
        elements,
    };
    Message {
        address,
        buffer,
        origin: None,
    }
}

fn copy(blocks: Vec<Block>, from: BufferId, to: BufferId) -> Task {
    Task::Copy {
        blocks,
        add: false,
        from,
        to,
    }
}

/// One end of a copy: rows in a shard of so many, or packed in a parcel.
#[derive(Debug, Clone, Copy)]
enum Side {
    Shard { rows: usize },
    Parcel,
}

/// Copies of stretches. A parcel has one after the other, in each of them batch entry after batch
/// entry; both ends have the stretches in one order, that of [`Resize::stretches`].
fn blocks(tensor: &Moving, stretches: &[TokenMove], from: Side, to: Side) -> Vec<Block> {
    let mut packed = 0;
    let block = |stretch: &TokenMove| {
        let rows = stretch.tokens.count;
        let at = |side: Side, (first, step): (usize, usize)| match side {
            Side::Shard { rows } => Operand {
                offset: first * tensor.width,
                batch: rows * tensor.width,
                segment: 0,
                row: step * tensor.width,
                heads: Arc::new([0]),
            },
            Side::Parcel => Operand {
                offset: packed,
                batch: rows * tensor.width,
                segment: 0,
                row: tensor.width,
                heads: Arc::new([0]),
            },
        };
        let block = Block {
            batch: tensor.batch,
            segments: 1,
            rows,
            heads: 1,
            width: tensor.width,
            from: at(from, stretch.from_row),
            to: at(to, stretch.to_row),
        };
        packed += tensor.elements(rows);
        block
    };
    stretches.iter().map(block).collect()
}
