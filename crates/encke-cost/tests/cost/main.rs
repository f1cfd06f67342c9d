//! The cost model: small cases by hand, laws for all cases, and invalid machines.

mod by_hand;
mod by_speed;
mod invalid_machines;
mod laws;
mod support;
