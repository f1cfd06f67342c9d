//! The pending messages of one exchange.
//!
//! Each message is two MPI messages: its contents, sent from buffer to buffer without a copy, and
//! its envelope, sent afterwards because its checksum is computed while the contents are in flight.
//! Contents longer than [`LONGEST`] are sent in pieces with one tag, which MPI keeps in order.
//!
//! The decision here: buffers are raw pointers while MPI uses them. The caller of an exchange
//! borrows them for the lifetime of the [`Exchange`], and does not return before MPI has released
//! them or they were leaked.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use encke_core::host::checksum;
use encke_core::transport::{Address, Moved, TransportError};
use encke_ring::envelope::{Envelope, EnvelopeMatch, PostedReceive};

use crate::sys::{CallFailure, ErrorClass, MpiCommunicator, MpiRequest};
use crate::wire_format::pieces;

/// Bytes of the longest piece: MPI's counts are C ints.
pub const LONGEST: usize = 1 << 30;

/// Why an exchange ends early.
#[derive(Debug)]
pub enum ExchangeError {
    /// An MPI call failed on a message from or to this peer.
    Call(usize, CallFailure),
    /// A message does not match its posted receive, or its peer is dead.
    Message(TransportError),
}

/// The messages of one exchange.
pub struct Exchange<'a> {
    comm: MpiCommunicator,
    receives: Vec<PendingReceive>,
    sends: Vec<PendingSend>,
    /// Borrows the buffers for the lifetime of this value.
    buffers: PhantomData<&'a mut [u8]>,
}

// SAFETY: the pointers are to buffers that are borrowed for `'a` and may be sent between threads;
// only the thread that owns this value dereferences them.
unsafe impl Send for Exchange<'_> {}

/// A message to receive.
struct PendingReceive {
    posted: PostedReceive,
    envelope_bytes: Box<[u8; Envelope::BYTES]>,
    envelope_request: MpiRequest,
    envelope: Option<Envelope>,
    contents: (*mut u8, usize),
    pieces: Vec<MpiRequest>,
    too_long: bool,
    verified: bool,
}

/// A message to send.
struct PendingSend {
    to: Address,
    comm_rank: usize,
    envelope_tag: c_int,
    envelope_bytes: Box<[u8; Envelope::BYTES]>,
    envelope_request: Option<MpiRequest>,
    contents: (*const u8, usize),
    pieces: Vec<MpiRequest>,
}

/// The tags of the `index`th message between two ranks: of its envelope and of its contents.
fn tags(index: usize) -> (c_int, c_int) {
    let first = c_int::try_from(1 + 2 * index).expect("few messages between two ranks in a round");
    (first, first + 1)
}

impl<'a> Exchange<'a> {
    pub fn new(comm: MpiCommunicator) -> Exchange<'a> {
        Exchange {
            comm,
            receives: Vec::new(),
            sends: Vec::new(),
            buffers: PhantomData,
        }
    }

    /// Posts the receive of the `index`th message from a process.
    pub fn receive(
        &mut self,
        posted: PostedReceive,
        (comm_rank, index): (usize, usize),
        contents: &'a mut [u8],
        longest: usize,
    ) -> Result<(), ExchangeError> {
        let peer = posted.from.peer;
        let failed = |failure| ExchangeError::Call(peer, failure);
        let (envelope_tag, tag) = tags(index);
        self.receives.push(PendingReceive {
            posted,
            envelope_bytes: Box::new([0; Envelope::BYTES]),
            envelope_request: MpiRequest::none(),
            envelope: None,
            contents: (contents.as_mut_ptr(), contents.len()),
            pieces: Vec::new(),
            too_long: false,
            verified: false,
        });
        let receive = self.receives.last_mut().expect("it was just pushed");
        for (start, count) in pieces(receive.contents.1, longest) {
            // SAFETY: inside the buffer, which is borrowed for the lifetime of the exchange.
            let piece = unsafe {
                let start = receive.contents.0.add(start);
                self.comm.receive(start, count, Some(comm_rank), tag)
            };
            receive.pieces.push(piece.map_err(failed)?);
        }
        let bytes = receive.envelope_bytes.as_mut_ptr();
        // SAFETY: the bytes are boxed, and the box lives until the request has ended.
        let request = unsafe {
            self.comm
                .receive(bytes, Envelope::BYTES, Some(comm_rank), envelope_tag)
        };
        receive.envelope_request = request.map_err(failed)?;
        Ok(())
    }

    /// Starts to send the contents of the `index`th message to a process.
    pub fn send(
        &mut self,
        to: Address,
        (comm_rank, index): (usize, usize),
        contents: &'a [u8],
        longest: usize,
    ) -> Result<(), ExchangeError> {
        let (envelope_tag, tag) = tags(index);
        self.sends.push(PendingSend {
            to,
            comm_rank,
            envelope_tag,
            envelope_bytes: Box::new([0; Envelope::BYTES]),
            envelope_request: None,
            contents: (contents.as_ptr(), contents.len()),
            pieces: Vec::new(),
        });
        let send = self.sends.last_mut().expect("it was just pushed");
        for (start, count) in pieces(contents.len(), longest) {
            let piece = &contents[start..start + count];
            // SAFETY: the buffer is borrowed for the lifetime of the exchange.
            let request = unsafe { self.comm.send(piece, comm_rank, tag) };
            let request = request.map_err(|failure| ExchangeError::Call(to.peer, failure))?;
            send.pieces.push(request);
        }
        Ok(())
    }

    /// Computes the checksums of what is sent, and sends the envelopes.
    pub fn send_envelopes(
        &mut self,
        rank: usize,
        call: u64,
        round: usize,
    ) -> Result<(), ExchangeError> {
        for at in 0..self.sends.len() {
            let send = &mut self.sends[at];
            let (start, count) = send.contents;
            // SAFETY: MPI only reads it, as this does; it is borrowed for the lifetime of the
            // exchange.
            let contents = checksum(unsafe { std::slice::from_raw_parts(start, count) });
            let envelope = Envelope::of(rank, call, round, send.to, contents);
            *send.envelope_bytes = envelope.to_bytes();
            // SAFETY: the bytes are boxed, and the box lives until the request has ended.
            let request = unsafe {
                self.comm
                    .send(&*send.envelope_bytes, send.comm_rank, send.envelope_tag)
            };
            let peer = send.to.peer;
            let request = request.map_err(|failure| ExchangeError::Call(peer, failure))?;
            send.envelope_request = Some(request);
            self.poll()?;
        }
        Ok(())
    }

    /// Lets MPI make progress; true when every message is complete and verified.
    pub fn poll(&mut self) -> Result<bool, ExchangeError> {
        let mut all = true;
        for receive in &mut self.receives {
            all &= receive.poll()?;
        }
        for send in &mut self.sends {
            all &= send.poll()?;
        }
        Ok(all)
    }

    /// A peer that the exchange waits for: of a receive if one is pending, otherwise of a send.
    pub fn pending_peer(&self) -> Option<usize> {
        let receive = self.receives.iter().find(|receive| !receive.verified);
        let send = self.sends.iter().find(|send| !send.is_done());
        receive
            .map(|receive| receive.posted.from.peer)
            .or(send.map(|send| send.to.peer))
    }

    /// The bytes of all contents.
    pub fn bytes(&self) -> usize {
        let moved = self.moved();
        moved.sent_bytes + moved.received_bytes
    }

    /// Bytes moved, once all messages are complete.
    pub fn moved(&self) -> Moved {
        Moved {
            sent_bytes: self.sends.iter().map(|send| send.contents.1).sum(),
            received_bytes: self.receives.iter().map(|of| of.contents.1).sum(),
        }
    }

    /// Cancels all pending operations, and waits at most `limit` for them to end. Returns the
    /// indices of receives, in the order posted, whose buffers MPI may still write to, and whether
    /// it may still read a buffer that is sent.
    pub fn cancel(&mut self, limit: Duration) -> (Vec<usize>, bool) {
        let start = Instant::now();
        let for_all = |of: &mut Exchange<'a>, work: &mut dyn FnMut(&mut MpiRequest)| {
            for receive in &mut of.receives {
                receive.pieces.iter_mut().for_each(&mut *work);
                work(&mut receive.envelope_request);
            }
            for send in &mut of.sends {
                send.pieces.iter_mut().for_each(&mut *work);
                send.envelope_request.iter_mut().for_each(&mut *work);
            }
        };
        for_all(self, &mut MpiRequest::cancel);
        loop {
            let mut left = 0;
            for_all(self, &mut |request| {
                // An error ends a request as success does.
                left += usize::from(matches!(request.test(), Ok(false)));
            });
            if left == 0 || start.elapsed() > limit {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        let written = |of: &PendingReceive| !of.pieces.iter().all(MpiRequest::is_done);
        let stuck = self.receives.iter().enumerate();
        let stuck = stuck.filter(|(_, receive)| written(receive));
        let stuck: Vec<usize> = stuck.map(|(at, _)| at).collect();
        let read = !self.sends.iter().all(PendingSend::is_done);
        // Envelopes that MPI still uses are leaked.
        let envelope_pending = |of: &PendingReceive| !of.envelope_request.is_done();
        for receive in self.receives.drain(..).filter(envelope_pending) {
            std::mem::forget(receive);
        }
        for send in self.sends.drain(..).filter(|send| !send.is_done()) {
            std::mem::forget(send);
        }
        (stuck, read)
    }
}

impl Drop for Exchange<'_> {
    /// A panic may drop an exchange with pending messages: the buffers that MPI uses must not be
    /// freed.
    fn drop(&mut self) {
        let (stuck, read) = self.cancel(Duration::from_millis(100));
        if !stuck.is_empty() || read {
            std::process::abort();
        }
    }
}

impl PendingReceive {
    fn poll(&mut self) -> Result<bool, ExchangeError> {
        if self.verified {
            return Ok(true);
        }
        let peer = self.posted.from.peer;
        for piece in &mut self.pieces {
            match piece.test() {
                Ok(_) => {}
                // The envelope has the length, and gives the error.
                Err(failure) if failure.class == ErrorClass::TooLong => self.too_long = true,
                Err(failure) => return Err(ExchangeError::Call(peer, failure)),
            }
        }
        let arrived = self.envelope_request.test();
        if !arrived.map_err(|failure| ExchangeError::Call(peer, failure))? {
            return Ok(false);
        }
        let envelope = match self.envelope {
            Some(envelope) => envelope,
            None => self.check_envelope()?,
        };
        if self.too_long || !self.pieces.iter().all(MpiRequest::is_done) {
            return Ok(false);
        }
        let (start, count) = self.contents;
        // SAFETY: every piece has arrived, so MPI does not use the buffer any more.
        let got = checksum(unsafe { std::slice::from_raw_parts(start, count) });
        let matched = self.posted.verify_checksum(&envelope, got);
        matched.map_err(ExchangeError::Message)?;
        self.verified = true;
        Ok(true)
    }

    /// Checks the envelope against the posted receive.
    fn check_envelope(&mut self) -> Result<Envelope, ExchangeError> {
        let envelope = Envelope::from_bytes(*self.envelope_bytes);
        let PostedReceive {
            rank, round, from, ..
        } = self.posted;
        match self
            .posted
            .admit(&envelope)
            .map_err(ExchangeError::Message)?
        {
            EnvelopeMatch::Take => {
                self.envelope = Some(envelope);
                Ok(envelope)
            }
            // MPI keeps messages in order, so the two ranks execute different programs.
            EnvelopeMatch::Stale | EnvelopeMatch::Early => {
                Err(ExchangeError::Message(TransportError::PeerFailed {
                    rank,
                    peer: from.peer,
                    round,
                    reason: format!(
                        "it sent a message of call {}, round {}, tag {} to a rank in call {}, \
                         round {round}, tag {}; start all ranks with the same options",
                        envelope.call, envelope.round, envelope.tag, self.posted.call, from.tag
                    ),
                }))
            }
        }
    }
}

impl PendingSend {
    fn is_done(&self) -> bool {
        let envelope = self.envelope_request.as_ref();
        envelope.is_some_and(MpiRequest::is_done) && self.pieces.iter().all(MpiRequest::is_done)
    }

    fn poll(&mut self) -> Result<bool, ExchangeError> {
        for request in self.pieces.iter_mut().chain(self.envelope_request.as_mut()) {
            let tested = request.test();
            tested.map_err(|failure| ExchangeError::Call(self.to.peer, failure))?;
        }
        Ok(self.is_done())
    }
}
