//! Tests of the ring against its plans and against the f64 reference.

mod bits;
mod branch_deltas;
mod cache;
mod calls;
mod chunked_prefill;
mod divided_heads;
mod instrumented;
mod masks;
mod misplanned;
mod plan;
mod posting_order;
mod reference;
mod resize;
mod schedule;
mod shard;
mod support;
mod survival;
mod transport;
mod two_level;
