//! Random masks and transforms of scores.
//!
//! The decision here: positions of queries and keys, windows and pieces are drawn independently of
//! each other, so most masks fit no plan; some hide everything, some nothing, and many hide all
//! keys from some queries.

use super::random::Random;
use crate::job::{Band, Job, Mask, Piece, ScoreTransform, Window};

/// A distance between queries and keys that is far longer than any case.
const FAR: usize = 1_000_000;

/// A softcap, slopes, both or neither.
pub(super) fn transform(random: &mut Random, heads: usize) -> Option<ScoreTransform> {
    let softcap = random.pick(&[None, None, Some(0.5), Some(4.0), Some(30.0)]);
    let slopes = random.once_in(3).then(|| {
        let heads = 0..heads;
        heads
            .map(|_| random.pick(&[0.5, 0.125, 0.01, 0.0]))
            .collect()
    });
    (softcap.is_some() || slopes.is_some()).then_some(ScoreTransform { softcap, slopes })
}

/// A mask for a job: its own one, a window or documents. It has positions if slopes need them.
pub(super) fn mask(random: &mut Random, job: &Job) -> Option<Mask> {
    let transform = job.transform.as_ref();
    let needs_positions = transform.is_some_and(|transform| transform.slopes.is_some());
    let size = [job.queries, job.keys];
    match random.below(5) {
        0 if job.mask.is_some() || !needs_positions => job.mask.clone(),
        0..3 => Some(Mask::Band(band(random, size, needs_positions))),
        _ => Some(Mask::Documents(
            pieces(random, size, needs_positions).into(),
        )),
    }
}

/// A window over random positions, which are close to each other if slopes need that.
pub(super) fn band(random: &mut Random, [queries, keys]: [usize; 2], close: bool) -> Band {
    let mut band = Band {
        query: random.below(60),
        query_step: random.pick(&[1, 1, 1, 2, 3]),
        key: random.below(60),
        key_step: random.pick(&[1, 1, 1, 2, 3]),
        window: Window::ALL,
    };
    let span = (queries * band.query_step).max(keys * band.key_step);
    let mut limit = || match random.below(5) {
        0 => None,
        1 => Some(0),
        2 => Some(random.below(8)),
        _ => Some(random.below(span + 60)),
    };
    band.window = Window {
        left: limit(),
        right: limit(),
    };
    if !close && random.once_in(4) {
        let (position, limit) = match random.once_in(2) {
            true => (&mut band.query, &mut band.window.left),
            false => (&mut band.key, &mut band.window.right),
        };
        *position += FAR;
        *limit = limit.map(|limit| limit + FAR);
    }
    band
}

/// Documents of random lengths. Some have no keys, some rows are in none of them.
fn pieces(random: &mut Random, [queries, keys]: [usize; 2], needs_positions: bool) -> Vec<Piece> {
    let (mut query, mut key) = (0, 0);
    let mut pieces = Vec::new();
    let most = random.pick(&[3, 20, 60, 200]);
    let most_keys = most * keys.div_ceil(200).max(1);
    while query < queries {
        let rows = query..(query + 1 + random.below(most)).min(queries);
        let count = match random.once_in(6) {
            true => 0,
            false => 1 + random.below(most_keys),
        };
        let of_keys = key..(key + count).min(keys);
        (query, key) = (rows.end, of_keys.end);
        if random.once_in(5) {
            key = (key + random.below(4)).min(keys);
        }
        let size = [rows.len(), of_keys.len()];
        let banded = needs_positions || random.below(3) > 0;
        let band = banded.then(|| match random.below(3) {
            0 => Band::causal((0, 1), (0, 1)),
            _ => band(random, size, needs_positions),
        });
        if !random.once_in(8) {
            pieces.push(Piece {
                queries: rows,
                keys: of_keys,
                band,
            });
        }
    }
    pieces
}
