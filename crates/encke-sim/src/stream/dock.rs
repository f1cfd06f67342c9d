//! Where a rank's rows come from and where they go, as near to its device as they can be.
//!
//! The decision here: a rank's buffers are the device's, so whoever can make rows on the device, or
//! needs no more of them than a sum, never brings them to the host. The host's own dock, for
//! sources and sinks of any kind, goes by way of the [`Desk`].

use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::{DType, Data, Tensor};

use super::desk::Desk;
use super::{Sink, Source, Spool, StreamError, Stretch};

/// A place in a buffer of a rank.
#[derive(Debug, Clone, Copy)]
pub struct Held<B> {
    /// The buffer.
    pub buffer: B,
    /// The type of its numbers.
    pub dtype: DType,
    /// The number with which the place begins.
    pub at: usize,
}

/// Brings a rank's rows to its buffers and takes them from there.
pub trait Dock<K: Kernel> {
    /// Overwrites a place with the rows of a stretch, `width` numbers each.
    fn fetch(
        &mut self,
        stretch: &Stretch<'_>,
        width: usize,
        to: Held<&mut K::Buffer>,
    ) -> Result<(), StreamError>;

    /// Takes the rows of a stretch of an output, all heads of them, to be rounded to a type.
    fn deliver(
        &mut self,
        from: Held<&K::Buffer>,
        stretch: &Stretch<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError>;

    /// Takes a rank's share of the gradients of rows that are another's. A forward pass has none.
    fn add(
        &mut self,
        from: Held<&K::Buffer>,
        stretch: &Stretch<'_>,
        width: usize,
    ) -> Result<(), StreamError> {
        let _ = (from, width);
        Err(StreamError::Missing {
            verb: "write",
            role: stretch.role,
        })
    }
}

/// The other side of a dock at which rows only come or only go.
pub(super) struct Nowhere;

impl Source for Nowhere {
    fn dtype(&self, _: Role) -> DType {
        DType::F32
    }

    fn read(&self, stretch: &Stretch<'_>, _: &mut Data) -> Result<(), StreamError> {
        let (verb, role) = ("read", stretch.role);
        Err(StreamError::Missing { verb, role })
    }
}

impl Sink for Nowhere {
    fn write(&mut self, stretch: &Stretch<'_>, _: &Data) -> Result<(), StreamError> {
        let (verb, role) = ("write", stretch.role);
        Err(StreamError::Missing { verb, role })
    }
}

/// The dock of sources and sinks on the host.
pub(super) struct HostDock<'s, 'k, K: Kernel> {
    pub desk: &'s mut Desk<'k, K>,
    pub source: &'s dyn Source,
    pub sink: &'s mut dyn Sink,
    pub spool: Option<&'s mut Spool>,
}

impl<K: Kernel> Dock<K> for HostDock<'_, '_, K> {
    fn fetch(
        &mut self,
        stretch: &Stretch<'_>,
        width: usize,
        to: Held<&mut K::Buffer>,
    ) -> Result<(), StreamError> {
        self.desk.fetch(self.source, stretch, width, to)
    }

    fn deliver(
        &mut self,
        from: Held<&K::Buffer>,
        stretch: &Stretch<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError> {
        if matches!(stretch.role, Role::Dk | Role::Dv) && self.spool.is_some() {
            return self.add(from, stretch, width);
        }
        let sink = &mut *self.sink;
        let mut take =
            |stretch: &Stretch<'_>, numbers: &Tensor| sink.write(stretch, numbers.data());
        self.desk.deliver(from, stretch, width, rounded, &mut take)
    }

    fn add(
        &mut self,
        from: Held<&K::Buffer>,
        stretch: &Stretch<'_>,
        width: usize,
    ) -> Result<(), StreamError> {
        let (verb, role) = ("write", stretch.role);
        let spool = self.spool.as_deref_mut();
        let spool = spool.ok_or(StreamError::Missing { verb, role })?;
        let dtype = from.dtype;
        let mut take = |stretch: &Stretch<'_>, numbers: &Tensor| spool.add(stretch, numbers.data());
        self.desk.deliver(from, stretch, width, dtype, &mut take)
    }
}
