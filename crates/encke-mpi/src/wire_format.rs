//! What processes say to one another as bytes, and in how many messages. It needs no MPI.

use encke_core::plan::membership::RankProgress;

/// Who failed, and what was said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureNotice {
    /// The rank that failed, which need not be the one that says so.
    pub about: usize,
    /// How.
    pub reason: String,
}

impl FailureNotice {
    /// Bytes of a notice: small enough to be sent whether or not anyone is looking.
    pub const BYTES: usize = 512;

    /// As it is sent.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&(self.about as u64).to_le_bytes());
        let room = Self::BYTES - 8;
        let most = (0..=room.min(self.reason.len())).rev();
        let fits = most
            .into_iter()
            .find(|&end| self.reason.is_char_boundary(end));
        let text = &self.reason.as_bytes()[..fits.unwrap_or(0)];
        bytes[8..][..text.len()].copy_from_slice(text);
        bytes
    }

    /// As it was received.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> FailureNotice {
        let mut about = [0; 8];
        about.copy_from_slice(&bytes[..8]);
        let text = String::from_utf8_lossy(&bytes[8..]);
        FailureNotice {
            about: u64::from_le_bytes(about) as usize,
            reason: text.trim_end_matches('\0').to_string(),
        }
    }
}

/// Bytes of a standing on the wire.
pub const STANDING_BYTES: usize = 9;

/// How far a rank has come, as it is sent.
pub fn standing_bytes(standing: RankProgress) -> [u8; STANDING_BYTES] {
    let mut bytes = [0; STANDING_BYTES];
    bytes[..8].copy_from_slice(&(standing.done as u64).to_le_bytes());
    bytes[8] = u8::from(standing.finished);
    bytes
}

/// The same, as it was received.
pub fn standing(bytes: &[u8]) -> Option<RankProgress> {
    let (done, finished) = bytes.split_at_checked(8)?;
    let done = u64::from_le_bytes(done.try_into().ok()?);
    Some(RankProgress {
        done: usize::try_from(done).ok()?,
        finished: *finished.first()? != 0,
    })
}

/// Where pieces of at most `longest` bytes begin, and how long they are.
pub fn pieces(bytes: usize, longest: usize) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..bytes).step_by(longest);
    starts.map(move |start| (start, longest.min(bytes - start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_says_what_fits() {
        for reason in [
            "",
            "short",
            &"ä".repeat(400),
            &"x".repeat(504),
            &"y".repeat(505),
        ] {
            let notice = FailureNotice {
                about: 7,
                reason: reason.to_string(),
            };
            let read = FailureNotice::from_bytes(&notice.to_bytes());
            assert_eq!(read.about, 7);
            assert!(reason.starts_with(&read.reason));
            assert!(read.reason.len() + 2 > reason.len().min(FailureNotice::BYTES - 8));
        }
    }

    #[test]
    fn a_standing_comes_back() {
        for (done, finished) in [(0, false), (7, true), (1 << 40, false)] {
            let standing = RankProgress { done, finished };
            assert_eq!(super::standing(&standing_bytes(standing)), Some(standing));
        }
        assert_eq!(super::standing(&[1; 8]), None);
        assert_eq!(super::standing(&[]), None);
    }

    #[test]
    fn pieces_are_whole() {
        let of = |bytes, longest| pieces(bytes, longest).collect::<Vec<_>>();
        assert_eq!(of(0, 4), []);
        assert_eq!(of(4, 4), [(0, 4)]);
        assert_eq!(of(9, 4), [(0, 4), (4, 4), (8, 1)]);
    }
}
