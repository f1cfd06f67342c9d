//! The simulator held against the thread ring, the plan and hardship.

mod hardship;
mod lockstep;
mod memory;
mod resize;
mod support;
mod survival;
