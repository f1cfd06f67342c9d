//! Machines fitted to measurements of a kernel.
//!
//! Jobs of several shapes are timed, and the terms of a [`Speed`](crate::Speed) (rate, overhead,
//! diagonal, rows) are fitted to them. [`HostProfile`] measures this host with threads as ranks,
//! jobs alone and concurrently, and runs two small rings
//! ([`RingCalibration`](crate::RingCalibration)) for what single jobs cannot show.
//! [`DeviceProfile`] measures a device that a rank has to itself. Nothing is fitted to any other
//! ring: those are what [`compare`](crate::compare()) checks predictions with.

mod buffers;
mod copies;
mod device;
mod fit;
mod host;
mod probes;
mod readings;
mod timing;

pub use device::DeviceProfile;
pub use host::{HostProfile, JobFit};
pub use timing::TimedWork;
