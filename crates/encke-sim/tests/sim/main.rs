//! The simulator held against the thread ring, the plan and hardship.

mod faults;
mod lockstep;
mod memory;
mod resize;
mod support;
mod survival;
