//! How processes encode failure notices and progress as bytes, and split contents into pieces. It
//! needs no MPI.

use encke_core::plan::membership::RankProgress;

/// A notice that a rank has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureNotice {
    /// The rank that failed, which need not be the sender.
    pub failed: usize,
    /// The reason.
    pub reason: String,
}

impl FailureNotice {
    /// Bytes of a notice: few enough that MPI sends it eagerly, before the receiver looks.
    pub const BYTES: usize = 512;

    /// Encodes the notice. A reason that does not fit is cut at a character boundary.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&(self.failed as u64).to_le_bytes());
        let room = Self::BYTES - 8;
        let fits = (0..=room.min(self.reason.len()))
            .rev()
            .find(|&end| self.reason.is_char_boundary(end));
        let text = &self.reason.as_bytes()[..fits.unwrap_or(0)];
        bytes[8..][..text.len()].copy_from_slice(text);
        bytes
    }

    /// Decodes a notice.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> FailureNotice {
        let mut failed = [0; 8];
        failed.copy_from_slice(&bytes[..8]);
        let text = String::from_utf8_lossy(&bytes[8..]);
        FailureNotice {
            failed: u64::from_le_bytes(failed) as usize,
            reason: text.trim_end_matches('\0').to_string(),
        }
    }
}

/// Bytes of an encoded progress.
pub const PROGRESS_BYTES: usize = 9;

/// Encodes a rank's progress.
pub fn encode_progress(progress: RankProgress) -> [u8; PROGRESS_BYTES] {
    let mut bytes = [0; PROGRESS_BYTES];
    bytes[..8].copy_from_slice(&(progress.done as u64).to_le_bytes());
    bytes[8] = u8::from(progress.finished);
    bytes
}

/// Decodes a rank's progress; `None` if bytes are missing.
pub fn decode_progress(bytes: &[u8]) -> Option<RankProgress> {
    let (done, finished) = bytes.split_at_checked(8)?;
    let done = u64::from_le_bytes(done.try_into().ok()?);
    Some(RankProgress {
        done: usize::try_from(done).ok()?,
        finished: *finished.first()? != 0,
    })
}

/// The start and the length of each piece of at most `longest` bytes.
pub fn pieces(bytes: usize, longest: usize) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..bytes).step_by(longest);
    starts.map(move |start| (start, longest.min(bytes - start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_keeps_as_much_of_its_reason_as_fits() {
        for reason in [
            "",
            "short",
            &"ä".repeat(400),
            &"x".repeat(504),
            &"y".repeat(505),
        ] {
            let notice = FailureNotice {
                failed: 7,
                reason: reason.to_string(),
            };
            let decoded = FailureNotice::from_bytes(&notice.to_bytes());
            assert_eq!(decoded.failed, 7);
            assert!(reason.starts_with(&decoded.reason));
            assert!(decoded.reason.len() + 2 > reason.len().min(FailureNotice::BYTES - 8));
        }
    }

    #[test]
    fn progress_is_decoded_as_it_was_encoded() {
        for (done, finished) in [(0, false), (7, true), (1 << 40, false)] {
            let progress = RankProgress { done, finished };
            assert_eq!(decode_progress(&encode_progress(progress)), Some(progress));
        }
        assert_eq!(decode_progress(&[1; 8]), None);
        assert_eq!(decode_progress(&[]), None);
    }

    #[test]
    fn pieces_cover_all_bytes_once() {
        let of = |bytes, longest| pieces(bytes, longest).collect::<Vec<_>>();
        assert_eq!(of(0, 4), []);
        assert_eq!(of(4, 4), [(0, 4)]);
        assert_eq!(of(9, 4), [(0, 4), (4, 4), (8, 1)]);
    }
}
