//! The ring, held against its plan and against the f64 reference.

mod life;
mod plan;
mod reference;
mod shard;
mod support;
mod survive;
mod transport;
mod watch;
