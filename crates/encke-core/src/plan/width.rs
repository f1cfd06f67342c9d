//! Row widths: how many elements a row has in each kind of buffer, and where its heads are.

use std::sync::Arc;

use crate::pattern::{Lane, LaneHead};
use crate::shape::Shape;

/// What a row of a buffer consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// A key or its gradient: `dim` elements for each key head.
    Key,
    /// A value or its gradient: `value_dim` elements for each key head.
    Value,
    /// A query or its gradient: `dim` elements for each head.
    Query,
    /// One element for each slot.
    Cell,
    /// `value_dim` elements for each slot.
    WideCell,
    /// One element for each slot of the deltas of branches.
    Delta,
}

impl Width {
    /// All of them, in the order of their declaration.
    const ALL: [Width; 6] = [
        Width::Key,
        Width::Value,
        Width::Query,
        Width::Cell,
        Width::WideCell,
        Width::Delta,
    ];

    /// Whether its rows are those of keys; otherwise those of queries.
    pub fn is_of_keys(self) -> bool {
        matches!(self, Width::Key | Width::Value)
    }

    /// Elements of one head.
    pub fn of_head(self, shape: &Shape) -> usize {
        match self {
            Width::Key | Width::Query => shape.dim,
            Width::Value | Width::WideCell => shape.value_dim,
            Width::Cell | Width::Delta => 1,
        }
    }
}

/// The offset of each head of a lane within a row, for every width. Computed once per lane; all
/// jobs of the lane share the lists.
#[derive(Debug, Clone)]
pub(super) struct HeadAddresses {
    resident: [Arc<[usize]>; 6],
    packed: [Arc<[usize]>; 6],
}

impl HeadAddresses {
    pub fn new(lane: &Lane, shape: &Shape) -> HeadAddresses {
        let resident = |width: Width| {
            let index = |head: &LaneHead| match width {
                Width::Key | Width::Value => head.kv_head,
                Width::Query => head.head,
                Width::Cell | Width::WideCell => head.slot,
                Width::Delta => head.delta_slot,
            };
            let heads = lane.heads.iter();
            heads
                .map(|head| index(head) * width.of_head(shape))
                .collect()
        };
        let packed = |width: Width| {
            let index = |i: usize, head: &LaneHead| match width.is_of_keys() {
                true => {
                    let kv = lane.kv_heads.binary_search(&head.kv_head);
                    kv.expect("a lane lists every key head its heads read")
                }
                false => i,
            };
            let heads = lane.heads.iter().enumerate();
            heads
                .map(|(i, head)| index(i, head) * width.of_head(shape))
                .collect()
        };
        HeadAddresses {
            resident: Width::ALL.map(resident),
            packed: Width::ALL.map(packed),
        }
    }

    /// In a buffer that holds all heads.
    pub fn resident(&self, width: Width) -> Arc<[usize]> {
        Arc::clone(&self.resident[width as usize])
    }

    /// In a parcel, which holds the heads of the lane only.
    pub fn packed(&self, width: Width) -> Arc<[usize]> {
        Arc::clone(&self.packed[width as usize])
    }
}
