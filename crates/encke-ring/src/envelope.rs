//! The header of a message, and the checks that a receiver makes of it.
//!
//! For transports that can lose, delay, reorder, duplicate or corrupt messages. A receiver reads
//! the envelope first, matches it against its posted receive ([`PostedReceive::admit`]), reads the
//! contents into the posted buffer and checks them ([`PostedReceive::verify`]). There is no
//! retransmission: a message that is lost or corrupted ends in a typed error. A wrong element goes
//! undetected only if two errors cancel in a 64-bit checksum.
//!
//! The decision here: sender and receiver are known from the link and are not in the envelope. Both
//! are part of the seal, so a message that was delivered to the wrong rank is rejected.

use encke_core::host::checksum;
use encke_core::transport::{Address, TransportError, WireBuffer};

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope {
    /// The number of the call: rounds start from 0 in each call.
    pub call: u64,
    /// The round of the message.
    pub round: u64,
    /// Its tag.
    pub tag: u64,
    /// The number of elements that follow.
    pub elements: u64,
    /// Checksum of the elements.
    pub contents: u64,
    /// Checksum of all of the above and of the two ranks.
    pub seal: u64,
}

/// How a message with a valid envelope matches a posted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnvelopeMatch {
    /// It matches: read its contents into the posted buffer.
    Take,
    /// It is a duplicate or belongs to an earlier round: skip its contents.
    Stale,
    /// It belongs to another receive, of this round or a later one: leave it for that one.
    Early,
}

/// A receive that a rank has posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostedReceive {
    /// The receiver.
    pub rank: usize,
    /// The call.
    pub call: u64,
    /// The round.
    pub round: usize,
    /// The sender, the tag and the number of elements.
    pub from: Address,
}

impl Envelope {
    /// Bytes of an envelope on the wire.
    pub const BYTES: usize = 48;

    /// The envelope of a parcel that `rank` sends.
    pub fn new<B: WireBuffer>(
        rank: usize,
        call: u64,
        round: usize,
        to: Address,
        parcel: &B,
    ) -> Envelope {
        Envelope::of(rank, call, round, to, parcel.checksum(to.elements))
    }

    /// The same from a checksum that is already known.
    pub fn of(rank: usize, call: u64, round: usize, to: Address, contents: u64) -> Envelope {
        let mut envelope = Envelope {
            call,
            round: round as u64,
            tag: to.tag,
            elements: to.elements as u64,
            contents,
            seal: 0,
        };
        envelope.seal = envelope.sealed(rank, to.peer);
        envelope
    }

    /// The seal of a valid envelope between these two ranks.
    pub fn sealed(&self, from: usize, to: usize) -> u64 {
        let mut bytes = [0; Envelope::BYTES + 8];
        let words = [
            self.call,
            self.round,
            self.tag,
            self.elements,
            self.contents,
            from as u64,
            to as u64,
        ];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        checksum(&bytes)
    }

    /// Encodes it for the wire.
    pub fn to_bytes(self) -> [u8; Envelope::BYTES] {
        let Envelope {
            call,
            round,
            tag,
            elements,
            contents,
            seal,
        } = self;
        let mut bytes = [0; Envelope::BYTES];
        let words = [call, round, tag, elements, contents, seal];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes it from the wire, unchecked: [`PostedReceive::admit`] checks it.
    pub fn from_bytes(bytes: [u8; Envelope::BYTES]) -> Envelope {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at * 8..][..8]);
            u64::from_le_bytes(word)
        };
        Envelope {
            call: word(0),
            round: word(1),
            tag: word(2),
            elements: word(3),
            contents: word(4),
            seal: word(5),
        }
    }
}

impl PostedReceive {
    /// Matches a message from this receive's sender. Fails if the envelope is corrupt, or if the
    /// message has another size than planned.
    pub fn admit(&self, envelope: &Envelope) -> Result<EnvelopeMatch, TransportError> {
        let got = envelope.sealed(self.from.peer, self.rank);
        if got != envelope.seal {
            return Err(self.corrupt("envelope", got, envelope.seal));
        }
        let (now, then) = (
            (self.call, self.round as u64),
            (envelope.call, envelope.round),
        );
        if then < now {
            return Ok(EnvelopeMatch::Stale);
        }
        if then > now || envelope.tag != self.from.tag {
            return Ok(EnvelopeMatch::Early);
        }
        if envelope.elements != self.from.elements as u64 {
            return Err(TransportError::Size {
                rank: self.rank,
                peer: self.from.peer,
                round: self.round,
                got: usize::try_from(envelope.elements).unwrap_or(usize::MAX),
                expected: self.from.elements,
            });
        }
        Ok(EnvelopeMatch::Take)
    }

    /// Checks the contents, once they are in the posted buffer.
    pub fn verify<B: WireBuffer>(
        &self,
        envelope: &Envelope,
        parcel: &B,
    ) -> Result<(), TransportError> {
        self.verify_checksum(envelope, parcel.checksum(self.from.elements))
    }

    /// The same from a checksum of the contents that is already known.
    pub fn verify_checksum(&self, envelope: &Envelope, got: u64) -> Result<(), TransportError> {
        match got == envelope.contents {
            true => Ok(()),
            false => Err(self.corrupt("contents", got, envelope.contents)),
        }
    }

    fn corrupt(&self, part: &'static str, got: u64, expected: u64) -> TransportError {
        TransportError::Corrupt {
            rank: self.rank,
            peer: self.from.peer,
            round: self.round,
            part,
            got,
            expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::conformance::Random;

    const TO: Address = Address {
        peer: 4,
        tag: 17,
        elements: 5,
    };

    fn posted(call: u64, round: usize) -> PostedReceive {
        let from = Address { peer: 3, ..TO };
        PostedReceive {
            rank: 4,
            call,
            round,
            from,
        }
    }

    fn envelope(call: u64, round: usize) -> (Envelope, Vec<u8>) {
        let parcel = vec![1, 2, 3, 4, 5, 99];
        (Envelope::new(3, call, round, TO, &parcel), parcel)
    }

    #[test]
    fn the_right_message_is_taken_and_verified() {
        let (envelope, parcel) = envelope(2, 7);
        let sent = Envelope::from_bytes(envelope.to_bytes());
        assert_eq!(sent, envelope);
        assert_eq!(posted(2, 7).admit(&sent), Ok(EnvelopeMatch::Take));
        assert_eq!(posted(2, 7).verify(&sent, &parcel), Ok(()));
    }

    #[test]
    fn messages_of_other_rounds_and_calls_are_not_taken() {
        let (envelope, _) = envelope(2, 7);
        assert_eq!(posted(2, 8).admit(&envelope), Ok(EnvelopeMatch::Stale));
        assert_eq!(posted(3, 0).admit(&envelope), Ok(EnvelopeMatch::Stale));
        assert_eq!(posted(2, 6).admit(&envelope), Ok(EnvelopeMatch::Early));
        assert_eq!(posted(1, 9).admit(&envelope), Ok(EnvelopeMatch::Early));
        let mut other = posted(2, 7);
        other.from.tag = 18;
        assert_eq!(other.admit(&envelope), Ok(EnvelopeMatch::Early));
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let (envelope, parcel) = envelope(2, 7);
        for bit in 0..Envelope::BYTES * 8 {
            let mut bytes = envelope.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let refused = posted(2, 7).admit(&Envelope::from_bytes(bytes));
            let found = matches!(
                refused,
                Err(TransportError::Corrupt {
                    rank: 4,
                    peer: 3,
                    round: 7,
                    part: "envelope",
                    ..
                })
            );
            assert!(found, "bit {bit}: {refused:?}");
        }
        for bit in 0..5 * 8 {
            let mut parcel = parcel.clone();
            parcel[bit / 8] ^= 1 << (bit % 8);
            assert!(posted(2, 7).verify(&envelope, &parcel).is_err());
        }
    }

    /// Seeded mutations; `ENCKE_MUTATIONS` sets how many.
    #[test]
    fn no_mutated_envelope_is_taken() {
        let count = std::env::var("ENCKE_MUTATIONS").ok();
        let count = count.map_or(20_000, |text| text.parse().expect("a number"));
        let (sent, parcel) = envelope(2, 7);
        for seed in 0..count {
            let mut random = Random::new(seed);
            let mut below = |bound: usize| random.below(bound);
            let mut bytes = sent.to_bytes();
            for _ in 0..1 + below(4) {
                let (at, other) = (8 * below(6), 8 * below(6));
                match below(5) {
                    0 => bytes[below(Envelope::BYTES)] ^= 1 << below(8),
                    1 => bytes[below(Envelope::BYTES)..].fill(0),
                    2 => bytes.copy_within(at..at + 8, other),
                    3 => bytes.rotate_left(below(Envelope::BYTES)),
                    _ => bytes[at..at + 8].fill(0xff),
                }
            }
            let got = Envelope::from_bytes(bytes);
            match posted(2, 7).admit(&got) {
                Ok(_) => assert_eq!(got, sent, "seed {seed}"),
                Err(error) => assert!(error.to_string().lines().count() == 1, "seed {seed}"),
            }
            let mut contents = parcel.clone();
            contents[below(5)] ^= 1 << below(8);
            assert!(
                posted(2, 7).verify(&sent, &contents).is_err(),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn the_wrong_rank_and_the_wrong_size_are_refused() {
        let (envelope, _) = envelope(2, 7);
        let mut stranger = posted(2, 7);
        stranger.rank = 5;
        assert!(stranger.admit(&envelope).is_err());
        stranger = posted(2, 7);
        stranger.from.peer = 2;
        assert!(stranger.admit(&envelope).is_err());
        let mut longer = posted(2, 7);
        longer.from.elements = 6;
        let size = TransportError::Size {
            rank: 4,
            peer: 3,
            round: 7,
            got: 5,
            expected: 6,
        };
        assert_eq!(longer.admit(&envelope), Err(size));
    }
}
