//! The simulator against rings of threads, the plan, and injected faults.

mod bits;
mod faults;
mod lockstep;
mod memory;
mod resize;
mod support;
mod survival;
