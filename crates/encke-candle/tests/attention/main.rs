//! The operation and the module against candle's own arithmetic and other implementations.

mod golden;
mod gradients;
mod layers;
mod plain;
mod shards;
mod strided;
