//! Virtual time: small cases by hand, laws for all cases, and machines that make no sense.

mod by_hand;
mod by_speed;
mod laws;
mod refusals;
mod support;
