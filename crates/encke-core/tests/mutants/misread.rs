//! Jobs as mutants misread them.

use std::sync::Arc;

use encke_core::job::{Band, Job, Mask, Piece, Window};
use encke_core::plan::Pass;

use crate::fault::KernelFault;

/// The job as a mutant interprets it in a pass.
pub fn misread(fault: KernelFault, job: &Job, pass: Pass) -> Job {
    let mut job = job.clone();
    let causal = job.causal();
    match (fault, causal) {
        (KernelFault::CausalSignFlipped, Some(band)) => {
            job.mask = Some(Mask::Band(Band {
                query: band.key,
                key: band.query,
                ..band
            }));
        }
        (KernelFault::CausalOnIndices, Some(_)) => {
            job.mask = Some(Mask::Band(Band::causal((0, 1), (0, 1))));
        }
        (KernelFault::CausalIgnored, Some(band)) => {
            let window = Window::ALL;
            job.mask = Some(Mask::Band(Band { window, ..band }));
        }
        (KernelFault::BackwardIgnoresGain, _) => job.gain = 1.0,
        (KernelFault::WrongKvHead, _) => {
            job.k.heads = job.k.heads.iter().rev().copied().collect();
        }
        (KernelFault::DqWhereQIs, _) => job.dq = None,
        (KernelFault::DeltaWhereCellsAre, _) => job.delta = None,
        (KernelFault::WindowLongerOnTheLeft, None) => change_windows(&mut job, |window| Window {
            left: window.left.map(|left| left + 1),
            ..window
        }),
        (KernelFault::WindowLongerOnTheRight, None) => change_windows(&mut job, |window| Window {
            right: window.right.map(|right| right + 1),
            ..window
        }),
        (KernelFault::WindowIgnored, None) => change_windows(&mut job, |window| Window {
            left: None,
            ..window
        }),
        (KernelFault::DocumentEndsLate, _) => {
            if let Some(Mask::Documents(pieces)) = &job.mask {
                job.mask = Some(Mask::Documents(late_borders(pieces).into()));
            }
        }
        (KernelFault::SlopesByRow, _) => slopes_by_row(&mut job),
        (KernelFault::SlopesAdded, _) => {
            let slopes = job.transform.as_mut().and_then(|of| of.slopes.as_mut());
            if let Some(slopes) = slopes {
                *slopes = slopes.iter().map(|slope| -slope).collect();
            }
        }
        (KernelFault::BackwardIgnoresSoftcap, _) => {
            if let (Some(transform), Pass::Backward { .. }) = (&mut job.transform, pass) {
                transform.softcap = None;
            }
        }
        (KernelFault::BackwardIgnoresCoin, _) => {
            if let Pass::Backward { .. } = pass {
                job.dropout = None;
            }
        }
        _ => misread_coins(fault, &mut job),
    }
    job
}

/// Draws other coins.
fn misread_coins(fault: KernelFault, job: &mut Job) {
    let Some(dropout) = &mut job.dropout else {
        return;
    };
    match fault {
        KernelFault::CoinByIndex => {
            // Where all pairs are visible, only coins and slopes depend on positions.
            let all = matches!(&job.mask, Some(Mask::Band(band)) if band.window == Window::ALL);
            let transform = job.transform.as_ref();
            if all && transform.is_none_or(|transform| transform.slopes.is_none()) {
                job.mask = Some(Mask::Band(Band {
                    window: Window::ALL,
                    ..Band::causal((0, 1), (0, 1))
                }));
            }
        }
        KernelFault::CoinIgnoresSegment => dropout.segment_step = 0,
        KernelFault::CoinIgnoresBatch => dropout.all_heads = 0,
        KernelFault::CoinIgnoresDocument => dropout.document = 0,
        KernelFault::CoinOfLocalHead => dropout.heads = (0..job.heads).collect(),
        _ => {}
    }
}

/// Changes the windows of all bands.
fn change_windows(job: &mut Job, change: impl Fn(Window) -> Window) {
    let changed = |band: &Band| Band {
        window: change(band.window),
        ..*band
    };
    job.mask = job.mask.as_ref().map(|mask| match mask {
        Mask::Band(band) => Mask::Band(changed(band)),
        Mask::Documents(pieces) => {
            let changed = |piece: &Piece| Piece {
                band: piece.band.as_ref().map(changed),
                ..piece.clone()
            };
            Mask::Documents(pieces.iter().map(changed).collect())
        }
    });
}

/// Each document has the first query row of the one after it.
fn late_borders(pieces: &[Piece]) -> Vec<Piece> {
    let mut late = pieces.to_vec();
    for i in 1..late.len() {
        if late[i - 1].queries.end == late[i].queries.start {
            late[i - 1].queries.end += 1;
            late[i].queries.start += 1;
            if let Some(band) = &mut late[i].band {
                band.query += band.query_step;
            }
        }
    }
    late
}

/// The same keys for each query, at positions that are row indices.
fn slopes_by_row(job: &mut Job) {
    let transform = job.transform.as_ref();
    if job.dropout.is_some() || transform.is_none_or(|transform| transform.slopes.is_none()) {
        return;
    }
    // Key rows of pieces ascend and are disjoint, which one piece for each query would break: each
    // query is a piece of the same keys here, and the oracle takes it.
    let row = |i: usize| {
        let keys = job.visible(i);
        let band = Band {
            query: i,
            query_step: 1,
            key: keys.start,
            key_step: 1,
            window: Window::ALL,
        };
        Piece {
            queries: i..i + 1,
            keys,
            band: Some(band),
        }
    };
    let rows: Arc<[Piece]> = (0..job.queries).map(row).collect();
    job.mask = Some(Mask::Documents(rows));
}
