//! Virtual time: small cases by hand, laws for all cases, and machines that make no sense.

mod by_hand;
mod laws;
mod refusals;
mod support;
