//! The last uses of an allocation, and the events its next use has to wait for.
//!
//! Operations of one stream run in order; events order operations of different streams. The
//! decision here: an allocation records its last write and the last read *on every stream* since
//! then. One read is not enough: while keys are sent, a copy and an attention read them at the same
//! time, and the next write has to wait for both.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

/// An event and the stream it was recorded on.
pub(crate) struct StreamEvent<S = CudaStream, E = CudaEvent> {
    stream: Arc<S>,
    event: Arc<E>,
}

/// The last uses of an allocation.
pub(crate) struct LastUses<S = CudaStream, E = CudaEvent> {
    last_write: Option<StreamEvent<S, E>>,
    /// At most one per stream, since the last write.
    reads: Vec<StreamEvent<S, E>>,
}

impl<S, E> Default for LastUses<S, E> {
    fn default() -> LastUses<S, E> {
        LastUses {
            last_write: None,
            reads: Vec::new(),
        }
    }
}

impl<S, E> LastUses<S, E> {
    /// Events that `stream` waits for before it reads. Its own operations are in order already.
    pub fn events_before_read<'a>(
        &'a self,
        stream: &'a Arc<S>,
    ) -> impl Iterator<Item = &'a Arc<E>> {
        on_other_streams(stream, self.last_write.iter())
    }

    /// Events that `stream` waits for before it writes or frees.
    pub fn events_before_write<'a>(
        &'a self,
        stream: &'a Arc<S>,
    ) -> impl Iterator<Item = &'a Arc<E>> {
        on_other_streams(stream, self.last_write.iter().chain(&self.reads))
    }

    /// All events: a foreign stream waits for them before it writes.
    pub fn all(&self) -> impl Iterator<Item = &Arc<E>> {
        let uses = self.last_write.iter().chain(&self.reads);
        uses.map(|use_| &use_.event)
    }

    /// Whether this event completes the last write.
    pub fn last_write_is(&self, event: &Arc<E>) -> bool {
        let last_write = self.last_write.as_ref();
        last_write.is_some_and(|use_| Arc::ptr_eq(&use_.event, event))
    }

    /// Records a read that completes with `event`. Events of one stream arrive in stream order.
    pub fn record_read(&mut self, stream: &Arc<S>, event: &Arc<E>) {
        self.reads.retain(|use_| !Arc::ptr_eq(&use_.stream, stream));
        self.reads.push(stream_event(stream, event));
    }

    /// Records a write that completes with `event` and that waited for all earlier uses.
    pub fn record_write(&mut self, stream: &Arc<S>, event: &Arc<E>) {
        self.last_write = Some(stream_event(stream, event));
        self.reads.clear();
    }
}

fn stream_event<S, E>(stream: &Arc<S>, event: &Arc<E>) -> StreamEvent<S, E> {
    StreamEvent {
        stream: Arc::clone(stream),
        event: Arc::clone(event),
    }
}

fn on_other_streams<'a, S, E: 'a>(
    stream: &'a Arc<S>,
    uses: impl Iterator<Item = &'a StreamEvent<S, E>>,
) -> impl Iterator<Item = &'a Arc<E>> {
    let other = |use_: &&StreamEvent<S, E>| !Arc::ptr_eq(&use_.stream, stream);
    uses.filter(other).map(|use_| &use_.event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::conformance::Random;

    /// A vector clock: for each stream, the operations known to be complete.
    type VectorClock = Vec<usize>;

    /// Streams with their vector clocks.
    struct StreamModel {
        streams: Vec<Arc<usize>>,
        clocks: Vec<VectorClock>,
    }

    impl StreamModel {
        /// Enqueues one operation on a stream, after `waits`; returns the clock at its end.
        fn enqueue(&mut self, stream: usize, waits: &[Arc<VectorClock>]) -> Arc<VectorClock> {
            let clock = &mut self.clocks[stream];
            for event in waits {
                for (own, known) in clock.iter_mut().zip(event.iter()) {
                    *own = (*own).max(*known);
                }
            }
            clock[stream] += 1;
            Arc::new(clock.clone())
        }
    }

    /// A use of memory: its stream, its position there, whether it wrote, its clock.
    struct Use {
        stream: usize,
        position: usize,
        wrote: bool,
        clock: Arc<VectorClock>,
    }

    #[test]
    fn conflicting_uses_of_an_allocation_are_ordered() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let (streams, allocations) = (2 + random.below(3), 1 + random.below(3));
            let mut model = StreamModel {
                streams: (0..streams).map(Arc::new).collect(),
                clocks: vec![vec![0; streams]; streams],
            };
            let mut last_uses: Vec<LastUses<usize, VectorClock>> =
                (0..allocations).map(|_| LastUses::default()).collect();
            let mut uses: Vec<Vec<Use>> = (0..allocations).map(|_| Vec::new()).collect();
            for _ in 0..60 {
                let (at, index) = (random.below(streams), random.below(allocations));
                let wrote = random.once_in(3);
                let stream = Arc::clone(&model.streams[at]);
                let waits: Vec<_> = match wrote {
                    true => last_uses[index]
                        .events_before_write(&stream)
                        .cloned()
                        .collect(),
                    false => last_uses[index]
                        .events_before_read(&stream)
                        .cloned()
                        .collect(),
                };
                let clock = model.enqueue(at, &waits);
                match wrote {
                    true => last_uses[index].record_write(&stream, &clock),
                    false => last_uses[index].record_read(&stream, &clock),
                }
                let position = clock[at];
                for before in uses[index].iter().filter(|use_| use_.wrote || wrote) {
                    let known = clock[before.stream] >= before.position;
                    assert!(
                        known,
                        "seed {seed}: a use is not ordered after a conflicting one"
                    );
                }
                uses[index].push(Use {
                    stream: at,
                    position,
                    wrote,
                    clock,
                });
            }
            assert!(
                uses.iter()
                    .flatten()
                    .all(|x| x.clock[x.stream] == x.position)
            );
        }
    }

    #[test]
    fn a_writer_waits_for_the_readers_of_every_stream() {
        let streams: Vec<Arc<u8>> = (0..3).map(Arc::new).collect();
        let events: Vec<Arc<u8>> = (0..4).map(Arc::new).collect();
        let mut last_uses = LastUses::default();
        last_uses.record_write(&streams[0], &events[0]);
        last_uses.record_read(&streams[1], &events[1]);
        last_uses.record_read(&streams[0], &events[2]);
        last_uses.record_read(&streams[1], &events[3]);
        let waits =
            |stream| -> Vec<u8> { last_uses.events_before_write(stream).map(|x| **x).collect() };
        assert_eq!(
            waits(&streams[0]),
            [3],
            "only the last event of the other stream"
        );
        assert_eq!(waits(&streams[1]), [0, 2]);
        assert_eq!(waits(&streams[2]), [0, 2, 3]);
    }
}
