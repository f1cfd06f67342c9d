//! The pieces that a job's mask divides its rows into.
//!
//! The decision here: kernels see every mask as a list of pieces, each with query rows, key rows
//! and one band. Tiles, panels and tasks begin anew with each piece, so a packed job computes the
//! bits of each document that a job of its own would.

use encke_core::job::{Job, Mask, Piece};

/// The pieces of a job, in order. Each query row is in exactly one of them; pieces of rows that no
/// document has are without keys.
pub(crate) fn pieces(job: &Job) -> Vec<Piece> {
    let whole = |band| Piece {
        queries: 0..job.queries,
        keys: 0..job.keys,
        band,
    };
    match &job.mask {
        None => vec![whole(None)],
        Some(Mask::Band(band)) => vec![whole(Some(*band))],
        Some(Mask::Documents(documents)) => {
            let without_keys = |queries| Piece {
                queries,
                keys: 0..0,
                band: None,
            };
            let mut pieces = Vec::with_capacity(2 * documents.len() + 1);
            let mut next = 0;
            for piece in documents.iter() {
                pieces.push(without_keys(next..piece.queries.start));
                pieces.push(piece.clone());
                next = piece.queries.end;
            }
            pieces.push(without_keys(next..job.queries));
            pieces.retain(|piece| !piece.queries.is_empty());
            pieces
        }
    }
}

/// Whether a piece's queries stop seeing keys that are far before them. Queries far apart then have
/// no keys in common.
pub(crate) fn forgets(piece: &Piece) -> bool {
    piece.band.is_some_and(|band| band.window.left.is_some())
}
