//! A transport with nobody at the other end.
//!
//! What a rank would receive of k and v is read from the source, row by row as the plan names them.
//! What it would receive of gradients is an empty sum; what it would send of them is delivered, and
//! added to the rows it belongs to. What it would send of k and v goes nowhere: whoever needs it
//! reads it for himself. Bytes are counted as if all of it had travelled, since that is
//! what the plan says and a rank holds it against.

use encke_core::kernel::Kernel;
use encke_core::plan::Request;
use encke_core::plan::program::{Message, Origin, RankPlan, Role};
use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError, WireBuffer};

use super::row_io::{BufferSlot, RowIo};
use super::{RowRange, StreamError};

/// What each message of a round holds.
struct Hops {
    sends: Vec<Option<Origin>>,
    receives: Vec<Option<Origin>>,
}

/// The transport of one rank.
pub struct Streamed<'s, K: Kernel> {
    kernel: &'s K,
    request: &'s Request,
    dock: &'s mut dyn RowIo<K>,
    rank: usize,
    rounds: Vec<Hops>,
    failure: Option<StreamError>,
}

impl<'s, K: Kernel> Streamed<'s, K> {
    pub(super) fn new(
        kernel: &'s K,
        request: &'s Request,
        plan: &RankPlan,
        dock: &'s mut dyn RowIo<K>,
    ) -> Streamed<'s, K> {
        let origins = |messages: &[Message]| {
            let each = messages.iter().map(|message| message.origin.clone());
            each.collect()
        };
        let rounds = plan.rounds.iter().map(|round| Hops {
            sends: origins(&round.sends),
            receives: origins(&round.receives),
        });
        Streamed {
            kernel,
            request,
            dock,
            rank: plan.rank,
            rounds: rounds.collect(),
            failure: None,
        }
    }

    /// What really went wrong, where an exchange had no words for it.
    pub(super) fn failure(&mut self) -> Option<StreamError> {
        self.failure.take()
    }

    /// The stretches of a message, each with where it begins.
    fn stretches(&self, origin: &Origin) -> Vec<(usize, usize, usize)> {
        let mut at = 0;
        let mut list = Vec::new();
        for (index, rows) in origin.rows.iter().enumerate() {
            for batch in 0..self.request.shape.batch {
                list.push((index, batch, at));
                at += rows.count() * rows.heads.len() * self.request.shape.dim;
            }
        }
        list
    }

    fn receive(&mut self, origin: &Origin, to: &mut K::Buffer) -> Result<(), StreamError> {
        let (dim, dtype) = (self.request.shape.dim, self.request.dtype);
        if matches!(origin.role, Role::Dk | Role::Dv) {
            let filled = self.kernel.fill(to, 0.0);
            return filled.map_err(|source| StreamError::Rank {
                rank: self.rank,
                source: crate::RankError::Kernel { round: 0, source },
            });
        }
        for (index, batch, mut at) in self.stretches(origin) {
            let rows = &origin.rows[index];
            for tokens in rows.runs() {
                let stretch = RowRange {
                    role: origin.role,
                    batch,
                    tokens,
                    heads: &rows.heads,
                };
                let to = BufferSlot {
                    buffer: &mut *to,
                    dtype,
                    at,
                };
                self.dock.fetch(&stretch, dim, to)?;
                at += tokens.count * rows.heads.len() * dim;
            }
        }
        Ok(())
    }

    fn send(&mut self, origin: &Origin, from: &K::Buffer) -> Result<(), StreamError> {
        let (dim, sum) = (self.request.shape.dim, self.request.dtype.sum());
        if !matches!(origin.role, Role::Dk | Role::Dv) {
            return Ok(());
        }
        for (index, batch, mut at) in self.stretches(origin) {
            let rows = &origin.rows[index];
            for tokens in rows.runs() {
                let stretch = RowRange {
                    role: origin.role,
                    batch,
                    tokens,
                    heads: &rows.heads,
                };
                let from = BufferSlot {
                    buffer: from,
                    dtype: sum,
                    at,
                };
                self.dock.add(from, &stretch, dim)?;
                at += tokens.count * rows.heads.len() * dim;
            }
        }
        Ok(())
    }

    fn hops(
        &mut self,
        hops: &Hops,
        outgoing: &[Outgoing<'_, K::Buffer>],
        incoming: &mut [Incoming<'_, K::Buffer>],
    ) -> Result<Moved, StreamError> {
        let unknown = StreamError::Unsupported {
            what: "a message that holds no rows of the call",
            hint: "shard the queries",
        };
        let mut moved = Moved::default();
        for (parcel, origin) in outgoing.iter().zip(&hops.sends) {
            let Some(origin) = origin else {
                return Err(unknown);
            };
            self.send(origin, parcel.parcel)?;
            moved.sent_bytes += parcel.to.elements * parcel.parcel.element_bytes();
        }
        for (parcel, origin) in incoming.iter_mut().zip(&hops.receives) {
            let Some(origin) = origin else {
                return Err(unknown);
            };
            self.receive(origin, parcel.parcel)?;
            moved.received_bytes += parcel.from.elements * parcel.parcel.element_bytes();
        }
        Ok(moved)
    }
}

impl<K: Kernel> Transport<K::Buffer> for Streamed<'_, K> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, K::Buffer>],
        incoming: &mut [Incoming<'_, K::Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let hops = std::mem::replace(
            &mut self.rounds[round],
            Hops {
                sends: Vec::new(),
                receives: Vec::new(),
            },
        );
        let moved = self.hops(&hops, outgoing, incoming);
        meanwhile();
        moved.map_err(|error| {
            let rank = self.rank;
            let reason = error.to_string();
            self.failure = Some(error);
            // The others are files here; the words of the file go with it.
            TransportError::PeerFailed {
                rank,
                peer: rank,
                round,
                reason,
            }
        })
    }
}
