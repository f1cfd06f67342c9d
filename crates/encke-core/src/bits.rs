//! Bits that do not depend on the ring (spec section 12).
//!
//! A sum of floating-point numbers depends on its order. Here the order is that of one grid: the
//! rows that a lane selects in a segment are cut into tiles, and what a query sums over the keys
//! of a tile, and a key over the queries of a tile, is one step. A query of tile t meets key tiles
//! t, t − 1, …, 0 and then the last one, …, t + 1; a key of tile t meets query tiles t, t + 1, …,
//! and then 0, …, t − 1. Pairs of tiles on one diagonal have no row in common, so both orders are
//! one: diagonal after diagonal.
//!
//! The decision here: the grid belongs to the pattern and not to the ring, so a ring may cut it
//! only between tiles. Then every ring computes the same steps in the same order.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::pattern::{Lane, Pattern};
use crate::shape::Shape;
use crate::sharding::{Cut, Sharding};

/// What the bits of a result may depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bits {
    /// The plan: its order of sums is the fastest, and another ring has another one.
    #[default]
    Planned,
    /// The call alone: the same bits on every ring whose cuts are on the grid, on tiles of
    /// [`Bits::TILE`] rows.
    Invariant,
    /// The same on smaller tiles: the bits belong to this size, cuts may be closer, steps are
    /// slower.
    InvariantTiles(usize),
}

impl Bits {
    /// Rows of a tile, if no other size is given. Larger ones are cut in the kernels, at places
    /// that depend on the size of a call.
    pub const TILE: usize = 512;
    /// Rows of the smallest tile: kernels compute that many at once.
    pub const SMALLEST_TILE: usize = 32;

    /// Rows of a tile; None if the plan decides the order.
    pub fn tile(self) -> Option<usize> {
        match self {
            Bits::Planned => None,
            Bits::Invariant => Some(Bits::TILE),
            Bits::InvariantTiles(tile) => Some(tile),
        }
    }

    /// Whether the plan decides the order of sums.
    pub fn is_planned(&self) -> bool {
        *self == Bits::Planned
    }

    /// Refuses tiles that kernels cannot compute in one step.
    pub fn check(self) -> Result<()> {
        let (least, most) = (Bits::SMALLEST_TILE, Bits::TILE);
        match self.tile() {
            Some(got) if !got.is_power_of_two() || !(least..=most).contains(&got) => {
                Err(Error::BitsTile { got, least, most })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bits::Planned => f.write_str("planned"),
            Bits::Invariant => f.write_str("invariant"),
            Bits::InvariantTiles(tile) => write!(f, "invariant:{tile}"),
        }
    }
}

impl FromStr for Bits {
    type Err = Error;

    /// `planned`, `invariant`, or `invariant:TILE`.
    fn from_str(text: &str) -> Result<Bits> {
        let unknown = || Error::BitsName { got: text.into() };
        let bits = match text.split_once(':') {
            None if text == "planned" => Bits::Planned,
            None if text == "invariant" => Bits::Invariant,
            Some(("invariant", tile)) => Bits::InvariantTiles(tile.parse().map_err(|_| unknown())?),
            _ => return Err(unknown()),
        };
        bits.check().map(|()| bits)
    }
}

/// Lanes that a search for all cuts of a ring looks at: a second or so.
const CUT_STEPS: usize = 1 << 25;

/// The tiles of a pattern: where a ring may cut the tokens.
#[derive(Debug)]
pub struct TileGrid<'a> {
    pattern: &'a Pattern,
    lanes: Vec<Lane>,
    tokens: usize,
    tile: usize,
}

impl<'a> TileGrid<'a> {
    /// The grid of a pattern on tiles of `tile` rows.
    pub fn new(pattern: &'a Pattern, shape: &Shape, tile: usize) -> Result<TileGrid<'a>> {
        // Before the lanes, which are as many as the heads.
        pattern.check(shape)?;
        Ok(TileGrid {
            pattern,
            lanes: pattern.lanes(shape),
            tokens: shape.tokens,
            tile,
        })
    }

    /// A lane's segment that a cut before `token` divides: its first token, and how many rows of
    /// the lane are before the cut. None if the cut divides no tile.
    fn divided(&self, lane: &Lane, token: usize) -> Option<(usize, usize)> {
        if token == 0 || token >= self.tokens {
            return None;
        }
        let document = self.pattern.document_of(token, self.tokens);
        let segment = (token - document.start) / lane.segment * lane.segment;
        let start = document.start + segment;
        let length = lane.segment.min(document.end - start);
        let rows = |tokens: usize| tokens.saturating_sub(lane.offset).div_ceil(lane.dilation);
        let before = rows(token - start);
        let whole = before.is_multiple_of(self.tile) || before == rows(length);
        (!whole).then_some((start, before))
    }

    /// The last token at or before `token` where no tile is divided. Branches that share no tile
    /// for long make the search long: `steps` are those that are left, and are counted down.
    fn cut_before(&self, mut token: usize, steps: &mut usize) -> Result<usize> {
        let from = token;
        loop {
            *steps = steps.checked_sub(self.lanes.len()).ok_or_else(|| {
                let tile = self.tile;
                Error::NoSharedCut { from, token, tile }
            })?;
            let divided = self.lanes.iter().find_map(|lane| {
                let (start, before) = self.divided(lane, token)?;
                Some(start + before / self.tile * self.tile * lane.dilation)
            });
            match divided {
                Some(lower) => token = lower,
                None => return Ok(token),
            }
        }
    }

    /// One contiguous shard per rank, about equally many tokens each, that divides no tile.
    pub fn contiguous(&self, ranks: usize) -> Result<Sharding> {
        let even = Sharding::contiguous(ranks)?;
        let (mut first, mut last, mut steps) = (0, 0, CUT_STEPS);
        let mut firsts = Vec::with_capacity(ranks);
        for rank in 0..ranks {
            // The nearest cut of a dense pattern.
            let half = if first == 0 { 0 } else { self.tile / 2 };
            let cut = self.cut_before((first + half).min(self.tokens), &mut steps)?;
            first += even.rows(self.tokens, rank);
            last = cut.max(last);
            firsts.push(last);
        }
        Sharding::new(ranks, Cut::Firsts(firsts))
    }

    /// Refuses a sharding that divides a tile, and one whose ranks do not follow one another.
    pub fn check(&self, sharding: &Sharding) -> Result<()> {
        let mut end = 0;
        for rank in 0..sharding.ranks() {
            for (piece, run) in sharding.runs(self.tokens, rank).into_iter().enumerate() {
                if run.first != end || (run.stride != 1 && run.count > 1) {
                    return Err(Error::BitsSharding { rank });
                }
                end = run.first + run.count;
                for lane in &self.lanes {
                    if let Some((start, before)) = self.divided(lane, run.first) {
                        // Pieces of one shard, as in a zigzag of one rank.
                        if piece > 0 {
                            return Err(Error::BitsSharding { rank });
                        }
                        let (tile, dilation) = (self.tile, lane.dilation);
                        let lower = start + before / tile * tile * dilation;
                        return Err(Error::BitsCut {
                            cut: run.first,
                            start,
                            tile,
                            dilation,
                            lower,
                            upper: lower + tile * dilation,
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Documents, MixingGradient, Mode, OffsetRule};

    fn grid_cuts(pattern: &Pattern, tokens: usize, tile: usize) -> Vec<usize> {
        let shape = Shape::new(1, tokens, 4, 2, 8).unwrap();
        let grid = TileGrid::new(pattern, &shape, tile).unwrap();
        let on_grid = |cut: &usize| grid.cut_before(*cut, &mut { CUT_STEPS }) == Ok(*cut);
        (0..=tokens).filter(on_grid).collect()
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for bits in [Bits::Planned, Bits::Invariant, Bits::InvariantTiles(64)] {
            assert_eq!(bits.to_string().parse(), Ok(bits));
        }
        for wrong in ["", "same", "invariant:", "invariant:48", "invariant:1024"] {
            assert!(wrong.parse::<Bits>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn cuts_lie_between_tiles_of_every_segment() {
        let cuts = grid_cuts(&Pattern::dense(), 200, 32);
        assert_eq!(cuts, [0, 32, 64, 96, 128, 160, 192, 200]);
        let rule = OffsetRule::HeadMod;
        let mode = Mode::Mix {
            offsets: rule,
            gradient: MixingGradient::Exact,
        };
        let mixed = Pattern::dilated(&[64, 256], &[1, 2], mode).unwrap();
        assert_eq!(grid_cuts(&mixed, 256, 32), [0, 64, 128, 192, 256]);
        let documents = Documents::new(&[50, 100, 50]).unwrap();
        let packed = Pattern::dense().documents(Some(documents));
        assert_eq!(
            grid_cuts(&packed, 200, 32),
            [0, 32, 50, 82, 114, 146, 150, 182, 200]
        );
    }

    #[test]
    fn a_contiguous_sharding_on_the_grid_is_accepted_and_others_are_not() {
        let shape = Shape::new(1, 1000, 1, 1, 8).unwrap();
        let pattern = Pattern::dense();
        let grid = TileGrid::new(&pattern, &shape, 64).unwrap();
        for ranks in 1..40 {
            let sharding = grid.contiguous(ranks).unwrap();
            assert_eq!(grid.check(&sharding), Ok(()), "{ranks} ranks");
            let rows = (0..ranks).map(|rank| sharding.rows(1000, rank));
            assert_eq!(rows.sum::<usize>(), 1000);
        }
        let refused = grid.check(&Sharding::contiguous(2).unwrap()).unwrap_err();
        let text = refused.to_string();
        assert!(
            text.contains("token 500") && text.contains("448 or 512"),
            "{text}"
        );
        let zigzag = Sharding::new(2, Cut::Zigzag).unwrap();
        assert_eq!(grid.check(&zigzag), Err(Error::BitsSharding { rank: 0 }));
        let alone = Sharding::new(1, Cut::Zigzag).unwrap();
        assert_eq!(grid.check(&alone), Err(Error::BitsSharding { rank: 0 }));
    }

    #[test]
    fn a_search_for_cuts_has_an_end() {
        let huge = 1_000_000_000_000;
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        // Their tiles begin one token apart, in all of a segment.
        let apart = Pattern::dilated(&[huge, huge + 1], &[1, 1], mode).unwrap();
        let shape = Shape::new(1, 10 * huge, 1, 1, 8).unwrap();
        let grid = TileGrid::new(&apart, &shape, 32).unwrap();
        let refused = grid.contiguous(2).unwrap_err();
        assert!(matches!(refused, Error::NoSharedCut { .. }), "{refused}");
        let heads = Shape::new(1, 64, 1 << 40, 1, 1).unwrap();
        let refused = TileGrid::new(&apart, &heads, 32).unwrap_err();
        assert!(matches!(refused, Error::PlanCost { .. }), "{refused}");
    }
}
