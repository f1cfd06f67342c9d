//! A transport whose peers are not running.
//!
//! What a rank would receive of inputs is read from the source, the rows that the plan names for
//! the message. What it would receive of gradients is zero; what it would send of gradients is
//! added to the rows it belongs to. What it would send of inputs is dropped: the other ranks read
//! it themselves. Bytes are counted as if all of it had been sent, because a rank asserts that the
//! bytes moved are those planned.

use encke_core::kernel::Kernel;
use encke_core::plan::Request;
use encke_core::plan::program::{Message, Origin, RankPlan, Role};
use encke_core::sharding::Run;
use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError, WireBuffer};

use crate::error::{RankError, RingError};

use super::error::StreamError;
use super::row_io::{BufferSlot, RowIo};
use super::rows::row_width;
use super::source::RowRange;

/// Which rows the messages of a round hold.
#[derive(Default)]
struct RoundOrigins {
    sends: Vec<Option<Origin>>,
    receives: Vec<Option<Origin>>,
}

/// The transport of one rank.
pub(super) struct SourceTransport<'s, K: Kernel> {
    kernel: &'s K,
    request: &'s Request,
    io: &'s mut dyn RowIo<K>,
    rank: usize,
    rounds: Vec<RoundOrigins>,
    failure: Option<StreamError>,
}

impl<'s, K: Kernel> SourceTransport<'s, K> {
    pub fn new(
        kernel: &'s K,
        request: &'s Request,
        plan: &RankPlan,
        io: &'s mut dyn RowIo<K>,
    ) -> SourceTransport<'s, K> {
        let origins = |messages: &[Message]| {
            let each = messages.iter().map(|message| message.origin.clone());
            each.collect()
        };
        let rounds = plan.rounds.iter().map(|round| RoundOrigins {
            sends: origins(&round.sends),
            receives: origins(&round.receives),
        });
        SourceTransport {
            kernel,
            request,
            io,
            rank: plan.rank,
            rounds: rounds.collect(),
            failure: None,
        }
    }

    /// The error behind a failed exchange, which a [`TransportError`] cannot carry.
    pub fn failure(&mut self) -> Option<StreamError> {
        self.failure.take()
    }

    /// The rows of a message: (batch entry, tokens, heads, first element in the message).
    fn ranges<'o>(&self, origin: &'o Origin) -> Vec<(usize, Run, &'o [usize], usize)> {
        let width = row_width(origin.role, &self.request.shape);
        let mut at = 0;
        let mut list = Vec::new();
        for rows in origin.rows.iter() {
            for batch in 0..self.request.shape.batch {
                for tokens in rows.runs() {
                    list.push((batch, tokens, &rows.heads[..], at));
                    at += tokens.count * rows.heads.len() * width;
                }
            }
        }
        list
    }

    fn receive(&mut self, origin: &Origin, to: &mut K::Buffer) -> Result<(), StreamError> {
        let role = origin.role;
        let dtype = match role {
            Role::Lse | Role::Dlse => self.request.dtype.sum(),
            Role::Out => self.request.out_dtype(),
            _ => self.request.dtype,
        };
        let width = row_width(role, &self.request.shape);
        if matches!(role, Role::Dk | Role::Dv) {
            let failed = |source| RingError::of_rank(self.rank, RankError::before_start(source));
            return Ok(self.kernel.fill(to, 0.0).map_err(failed)?);
        }
        for (batch, tokens, heads, at) in self.ranges(origin) {
            let range = RowRange {
                role,
                batch,
                tokens,
                heads,
            };
            let buffer = &mut *to;
            let to = BufferSlot { buffer, dtype, at };
            self.io.fetch(&range, width, to)?;
        }
        Ok(())
    }

    fn send(&mut self, origin: &Origin, buffer: &K::Buffer) -> Result<(), StreamError> {
        let (dtype, role) = (self.request.dtype.sum(), origin.role);
        let width = row_width(role, &self.request.shape);
        if !matches!(role, Role::Dk | Role::Dv) {
            return Ok(());
        }
        for (batch, tokens, heads, at) in self.ranges(origin) {
            let range = RowRange {
                role,
                batch,
                tokens,
                heads,
            };
            let from = BufferSlot { buffer, dtype, at };
            self.io.add(from, &range, width)?;
        }
        Ok(())
    }

    fn transfer(
        &mut self,
        origins: &RoundOrigins,
        outgoing: &[Outgoing<'_, K::Buffer>],
        incoming: &mut [Incoming<'_, K::Buffer>],
    ) -> Result<Moved, StreamError> {
        let unknown = || StreamError::Unsupported {
            what: "a message that holds no rows of the call",
            hint: "shard the queries",
        };
        let mut moved = Moved::default();
        for (message, origin) in outgoing.iter().zip(&origins.sends) {
            self.send(origin.as_ref().ok_or_else(unknown)?, message.parcel)?;
            moved.sent_bytes += message.to.elements * message.parcel.element_bytes();
        }
        for (message, origin) in incoming.iter_mut().zip(&origins.receives) {
            self.receive(origin.as_ref().ok_or_else(unknown)?, message.parcel)?;
            moved.received_bytes += message.from.elements * message.parcel.element_bytes();
        }
        Ok(moved)
    }
}

impl<K: Kernel> Transport<K::Buffer> for SourceTransport<'_, K> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, K::Buffer>],
        incoming: &mut [Incoming<'_, K::Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let origins = std::mem::take(&mut self.rounds[round]);
        let moved = self.transfer(&origins, outgoing, incoming);
        meanwhile();
        moved.map_err(|error| {
            let rank = self.rank;
            let reason = error.to_string();
            self.failure = Some(error);
            TransportError::PeerFailed {
                rank,
                peer: rank,
                round,
                reason,
            }
        })
    }
}
