//! The operation and the module against candle's own arithmetic and the peers' numbers.

mod golden;
mod gradients;
mod layers;
mod plain;
mod shards;
mod strided;
