//! The ring, held against its plan and against the f64 reference.

mod enqueued;
mod kept;
mod life;
mod plan;
mod reference;
mod resize;
mod schedule;
mod shard;
mod support;
mod survive;
mod transport;
mod watch;
