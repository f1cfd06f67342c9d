//! The messages of one exchange while they are on their way.
//!
//! A message is two: its contents, from buffer to buffer with no copy of ours, and its envelope,
//! which is sent after them because its checksum is made while they fly. Contents longer than
//! [`LONGEST`] travel in several pieces under one tag, which MPI keeps in order.
//!
//! The decision here: buffers are pointers while MPI has them. The exchange that made a flight
//! borrows them for its whole life, and does not return before MPI has let go of them, or they were
//! leaked.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use encke_core::host::checksum;
use encke_core::transport::{Address, Moved, TransportError};
use encke_ring::envelope::{Envelope, EnvelopeMatch, PostedReceive};

use crate::sys::{Class, Comm, Fault, Request};
use crate::words::pieces;

/// Bytes of the longest piece: MPI counts in C ints.
pub const LONGEST: usize = 1 << 30;

/// What ends a flight early.
#[derive(Debug)]
pub enum Trouble {
    /// A call of MPI failed on a message of this rank.
    Fault(usize, Fault),
    /// A message was not what was posted.
    Message(TransportError),
}

/// The messages of one exchange.
pub struct Flight<'a> {
    comm: Comm,
    arrivals: Vec<Arrival>,
    departures: Vec<Departure>,
    moved: Moved,
    /// The buffers are borrowed for as long as this lives.
    buffers: PhantomData<&'a mut [u8]>,
}

// SAFETY: pointers go to buffers that the exchange borrows and that may be sent between threads;
// only the thread that has the flight follows them.
unsafe impl Send for Flight<'_> {}

/// A message that is awaited.
struct Arrival {
    posted: PostedReceive,
    paper: Box<[u8; Envelope::BYTES]>,
    letter: Request,
    envelope: Option<Envelope>,
    contents: (*mut u8, usize),
    pieces: Vec<Request>,
    too_long: bool,
    verified: bool,
}

/// A message that is sent.
struct Departure {
    to: Address,
    place: usize,
    tag: c_int,
    paper: Box<[u8; Envelope::BYTES]>,
    letter: Option<Request>,
    contents: (*const u8, usize),
    pieces: Vec<Request>,
}

/// The two tags of the `index`th message between two ranks: its envelope's and its contents'.
fn tags(index: usize) -> (c_int, c_int) {
    let first = c_int::try_from(1 + 2 * index).expect("few messages between two ranks in a round");
    (first, first + 1)
}

impl<'a> Flight<'a> {
    pub fn new(comm: Comm) -> Flight<'a> {
        Flight {
            comm,
            arrivals: Vec::new(),
            departures: Vec::new(),
            moved: Moved::default(),
            buffers: PhantomData,
        }
    }

    /// Posts a receive of the `index`th message from the process at `place`.
    pub fn await_from(
        &mut self,
        posted: PostedReceive,
        (place, index): (usize, usize),
        contents: &'a mut [u8],
        longest: usize,
    ) -> Result<(), Trouble> {
        let peer = posted.from.peer;
        let failed = |fault| Trouble::Fault(peer, fault);
        let (letter_tag, tag) = tags(index);
        self.arrivals.push(Arrival {
            posted,
            paper: Box::new([0; Envelope::BYTES]),
            letter: Request::none(),
            envelope: None,
            contents: (contents.as_mut_ptr(), contents.len()),
            pieces: Vec::new(),
            too_long: false,
            verified: false,
        });
        let arrival = self.arrivals.last_mut().expect("it was just pushed");
        for (start, count) in pieces(arrival.contents.1, longest) {
            // SAFETY: inside the buffer, which is borrowed for the life of the flight.
            let piece = unsafe {
                let start = arrival.contents.0.add(start);
                self.comm.receive(start, count, Some(place), tag)
            };
            arrival.pieces.push(piece.map_err(failed)?);
        }
        let paper = arrival.paper.as_mut_ptr();
        // SAFETY: the paper is in a box of its own, which lives until the request has ended.
        let letter = unsafe {
            self.comm
                .receive(paper, Envelope::BYTES, Some(place), letter_tag)
        };
        arrival.letter = letter.map_err(failed)?;
        Ok(())
    }

    /// Sends the contents of the `index`th message to the process at `place`.
    pub fn send_to(
        &mut self,
        to: Address,
        (place, index): (usize, usize),
        contents: &'a [u8],
        longest: usize,
    ) -> Result<(), Trouble> {
        let (letter_tag, tag) = tags(index);
        self.departures.push(Departure {
            to,
            place,
            tag: letter_tag,
            paper: Box::new([0; Envelope::BYTES]),
            letter: None,
            contents: (contents.as_ptr(), contents.len()),
            pieces: Vec::new(),
        });
        let departure = self.departures.last_mut().expect("it was just pushed");
        for (start, count) in pieces(contents.len(), longest) {
            let piece = &contents[start..start + count];
            // SAFETY: the buffer is borrowed for the life of the flight.
            let sent = unsafe { self.comm.send(piece, place, tag) };
            let sent = sent.map_err(|fault| Trouble::Fault(to.peer, fault))?;
            departure.pieces.push(sent);
        }
        self.moved.sent_bytes += contents.len();
        Ok(())
    }

    /// Makes the checksums of what is sent, and sends the envelopes.
    pub fn send_letters(&mut self, rank: usize, call: u64, round: usize) -> Result<(), Trouble> {
        for at in 0..self.departures.len() {
            let departure = &mut self.departures[at];
            let (start, count) = departure.contents;
            // SAFETY: only read, as MPI does; the buffer is borrowed for the life of the flight.
            let contents = checksum(unsafe { std::slice::from_raw_parts(start, count) });
            let envelope = Envelope::of(rank, call, round, departure.to, contents);
            *departure.paper = envelope.to_bytes();
            // SAFETY: the paper is in a box of its own, which lives until the request has ended.
            let letter = unsafe {
                self.comm
                    .send(&*departure.paper, departure.place, departure.tag)
            };
            let peer = departure.to.peer;
            departure.letter = Some(letter.map_err(|fault| Trouble::Fault(peer, fault))?);
            self.poll()?;
        }
        Ok(())
    }

    /// Lets MPI work; true when every message is complete and verified.
    pub fn poll(&mut self) -> Result<bool, Trouble> {
        let mut all = true;
        for arrival in &mut self.arrivals {
            all &= arrival.poll()?;
        }
        for departure in &mut self.departures {
            all &= departure.poll()?;
        }
        Ok(all)
    }

    /// Whom we are waiting for: rather somebody who owes us something.
    pub fn awaited(&self) -> Option<usize> {
        let owing = self.arrivals.iter().find(|arrival| !arrival.verified);
        let owed = self
            .departures
            .iter()
            .find(|departure| !departure.is_over());
        owing
            .map(|arrival| arrival.posted.from.peer)
            .or(owed.map(|departure| departure.to.peer))
    }

    /// Bytes moved, once everything is complete.
    pub fn moved(&self) -> Moved {
        let received = self.arrivals.iter().map(|arrival| arrival.contents.1);
        Moved {
            received_bytes: received.sum(),
            ..self.moved
        }
    }

    /// Calls back whatever is under way, for at most `limit`. Says which of the arrivals, in the
    /// order they were posted, MPI may still write to, and whether it may still read what is sent.
    pub fn call_back(&mut self, limit: Duration) -> (Vec<usize>, bool) {
        let since = Instant::now();
        let requests = |flight: &mut Flight<'a>, work: &mut dyn FnMut(&mut Request)| {
            for arrival in &mut flight.arrivals {
                arrival.pieces.iter_mut().for_each(&mut *work);
                work(&mut arrival.letter);
            }
            for departure in &mut flight.departures {
                departure.pieces.iter_mut().for_each(&mut *work);
                departure.letter.iter_mut().for_each(&mut *work);
            }
        };
        requests(self, &mut Request::cancel);
        loop {
            let mut left = 0;
            requests(self, &mut |request| {
                // An error ends a request as well as success does.
                left += usize::from(matches!(request.test(), Ok(false)));
            });
            if left == 0 || since.elapsed() > limit {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        let written = |arrival: &Arrival| !arrival.pieces.iter().all(Request::is_over);
        let stuck = self.arrivals.iter().enumerate();
        let stuck = stuck.filter(|(_, arrival)| written(arrival));
        let stuck: Vec<usize> = stuck.map(|(at, _)| at).collect();
        let read = !self.departures.iter().all(Departure::is_over);
        // Papers that MPI still has are leaked with the rest.
        for arrival in self.arrivals.drain(..).filter(|a| !a.letter.is_over()) {
            std::mem::forget(arrival);
        }
        for departure in self.departures.drain(..).filter(|d| !d.is_over()) {
            std::mem::forget(departure);
        }
        (stuck, read)
    }
}

impl Drop for Flight<'_> {
    /// Whoever drops a flight in the air, by a panic of ours, must not free what MPI writes to.
    fn drop(&mut self) {
        let (stuck, read) = self.call_back(Duration::from_millis(100));
        if !stuck.is_empty() || read {
            std::process::abort();
        }
    }
}

impl Arrival {
    fn poll(&mut self) -> Result<bool, Trouble> {
        if self.verified {
            return Ok(true);
        }
        let peer = self.posted.from.peer;
        for piece in &mut self.pieces {
            match piece.test() {
                Ok(_) => {}
                // The envelope will say how long it is.
                Err(fault) if fault.class == Class::TooLong => self.too_long = true,
                Err(fault) => return Err(Trouble::Fault(peer, fault)),
            }
        }
        let lettered = self.letter.test();
        if !lettered.map_err(|fault| Trouble::Fault(peer, fault))? {
            return Ok(false);
        }
        let envelope = match self.envelope {
            Some(envelope) => envelope,
            None => self.open()?,
        };
        if self.too_long || !self.pieces.iter().all(Request::is_over) {
            return Ok(false);
        }
        let (start, count) = self.contents;
        // SAFETY: every piece has arrived, so MPI has let go of the buffer.
        let got = checksum(unsafe { std::slice::from_raw_parts(start, count) });
        let held = self.posted.verify_checksum(&envelope, got);
        held.map_err(Trouble::Message)?;
        self.verified = true;
        Ok(true)
    }

    /// Reads the envelope, once it is there.
    fn open(&mut self) -> Result<Envelope, Trouble> {
        let envelope = Envelope::from_bytes(*self.paper);
        let PostedReceive {
            rank, round, from, ..
        } = self.posted;
        match self.posted.admit(&envelope).map_err(Trouble::Message)? {
            EnvelopeMatch::Take => {
                self.envelope = Some(envelope);
                Ok(envelope)
            }
            // MPI keeps messages in order, so these are two ranks that do not do the same thing.
            EnvelopeMatch::Stale | EnvelopeMatch::Early => {
                Err(Trouble::Message(TransportError::PeerFailed {
                    rank,
                    peer: from.peer,
                    round,
                    reason: format!(
                        "it sent a message of call {}, round {}, tag {} to a rank in call {}, round \
                     {round}, tag {}; start all ranks with the same options",
                        envelope.call, envelope.round, envelope.tag, self.posted.call, from.tag
                    ),
                }))
            }
        }
    }
}

impl Departure {
    fn is_over(&self) -> bool {
        let sent = self.letter.as_ref().is_some_and(Request::is_over);
        sent && self.pieces.iter().all(Request::is_over)
    }

    fn poll(&mut self) -> Result<bool, Trouble> {
        for request in self.pieces.iter_mut().chain(self.letter.as_mut()) {
            let tested = request.test();
            tested.map_err(|fault| Trouble::Fault(self.to.peer, fault))?;
        }
        Ok(self.is_over())
    }
}
