//! The interface against the f64 reference: every mode, type, ring size and sharding.

mod choose;
mod dropout;
mod elastic;
mod invariance;
mod modes;
mod option_pairs;
mod precision;
mod queries;
mod reused_memory;
mod support;
mod views;
