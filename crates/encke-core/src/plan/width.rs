//! Row widths: how many elements a row has in each kind of buffer, and where its heads are.

use std::sync::Arc;

use crate::pattern::Lane;

/// What a row of a buffer consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// A key or value: `dim` elements for each key head.
    Kv,
    /// A query or its gradient: `dim` elements for each head.
    Query,
    /// One element for each slot.
    Cell,
    /// `dim` elements for each slot.
    WideCell,
}

impl Width {
    /// All of them, in the order of their declaration.
    const ALL: [Width; 4] = [Width::Kv, Width::Query, Width::Cell, Width::WideCell];
}

/// The offset of each head of a lane within a row, for every width. Computed once per lane; all
/// jobs of the lane share the lists.
#[derive(Debug, Clone)]
pub(super) struct HeadAddresses {
    resident: [Arc<[usize]>; 4],
    packed: [Arc<[usize]>; 4],
}

impl HeadAddresses {
    pub fn new(lane: &Lane, dim: usize) -> HeadAddresses {
        let resident = |width: Width| {
            let heads = lane.heads.iter().map(|head| match width {
                Width::Kv => head.kv_head * dim,
                Width::Query => head.head * dim,
                Width::Cell => head.slot,
                Width::WideCell => head.slot * dim,
            });
            heads.collect()
        };
        let packed = |width: Width| {
            let heads = lane.heads.iter().enumerate().map(|(i, head)| match width {
                Width::Kv => {
                    let kv = lane.kv_heads.binary_search(&head.kv_head);
                    kv.expect("a lane lists every key head its heads read") * dim
                }
                Width::Query | Width::WideCell => i * dim,
                Width::Cell => i,
            });
            heads.collect()
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
