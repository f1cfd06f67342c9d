//! When memory was last used, and what its next use has to wait for.
//!
//! One stream keeps its own order; between streams, order is made by events. The decision here:
//! a piece of memory remembers its last writer and the last reader *on every stream* since then. One
//! reader is not enough: keys that are sent are read by a copy and by attention at the same time,
//! and whoever overwrites them has to wait for both.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

/// A point on a stream.
pub(crate) struct Mark<S = CudaStream, E = CudaEvent> {
    stream: Arc<S>,
    event: Arc<E>,
}

/// When memory was last used.
pub(crate) struct Marks<S = CudaStream, E = CudaEvent> {
    written: Option<Mark<S, E>>,
    /// One a stream, since the last writing.
    reads: Vec<Mark<S, E>>,
}

impl<S, E> Default for Marks<S, E> {
    fn default() -> Marks<S, E> {
        Marks {
            written: None,
            reads: Vec::new(),
        }
    }
}

impl<S, E> Marks<S, E> {
    /// What a stream waits for before it reads. Its own work it need not wait for.
    pub fn before_reading<'a>(&'a self, stream: &'a Arc<S>) -> impl Iterator<Item = &'a Arc<E>> {
        elsewhere(stream, self.written.iter())
    }

    /// What a stream waits for before it writes, or frees.
    pub fn before_writing<'a>(&'a self, stream: &'a Arc<S>) -> impl Iterator<Item = &'a Arc<E>> {
        elsewhere(stream, self.written.iter().chain(&self.reads))
    }

    /// What somebody else's stream waits for before it writes.
    pub fn all(&self) -> impl Iterator<Item = &Arc<E>> {
        let marks = self.written.iter().chain(&self.reads);
        marks.map(|mark| &mark.event)
    }

    /// Whether this event is the end of its last writing.
    pub fn ends_with(&self, event: &Arc<E>) -> bool {
        let written = self.written.as_ref();
        written.is_some_and(|mark| Arc::ptr_eq(&mark.event, event))
    }

    /// It is read until this event. Events of one stream come in the order of the stream.
    pub fn read(&mut self, stream: &Arc<S>, event: &Arc<E>) {
        self.reads.retain(|mark| !Arc::ptr_eq(&mark.stream, stream));
        self.reads.push(mark(stream, event));
    }

    /// It is written until this event, by work that waited for everything before.
    pub fn written(&mut self, stream: &Arc<S>, event: &Arc<E>) {
        self.written = Some(mark(stream, event));
        self.reads.clear();
    }
}

fn mark<S, E>(stream: &Arc<S>, event: &Arc<E>) -> Mark<S, E> {
    Mark {
        stream: Arc::clone(stream),
        event: Arc::clone(event),
    }
}

fn elsewhere<'a, S, E: 'a>(
    stream: &'a Arc<S>,
    marks: impl Iterator<Item = &'a Mark<S, E>>,
) -> impl Iterator<Item = &'a Arc<E>> {
    let other = |mark: &&Mark<S, E>| !Arc::ptr_eq(&mark.stream, stream);
    marks.filter(other).map(|mark| &mark.event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::conformance::Random;

    /// How far each stream has come, as one use of memory can know it.
    type Clock = Vec<usize>;

    /// A stream that keeps what it has waited for, and its own length.
    struct Model {
        streams: Vec<Arc<usize>>,
        clocks: Vec<Clock>,
    }

    impl Model {
        /// Puts one use on a stream, after `waits`; returns the clock of its end.
        fn enqueue(&mut self, stream: usize, waits: &[Arc<Clock>]) -> Arc<Clock> {
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

    /// A use of memory: its stream, its place there, whether it wrote, what it knew.
    struct Use {
        stream: usize,
        place: usize,
        wrote: bool,
        clock: Arc<Clock>,
    }

    #[test]
    fn whatever_conflicts_is_in_order() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let (streams, pieces) = (2 + random.below(3), 1 + random.below(3));
            let mut model = Model {
                streams: (0..streams).map(Arc::new).collect(),
                clocks: vec![vec![0; streams]; streams],
            };
            let mut marks: Vec<Marks<usize, Clock>> =
                (0..pieces).map(|_| Marks::default()).collect();
            let mut uses: Vec<Vec<Use>> = (0..pieces).map(|_| Vec::new()).collect();
            for _ in 0..60 {
                let (at, piece) = (random.below(streams), random.below(pieces));
                let wrote = random.once_in(3);
                let stream = Arc::clone(&model.streams[at]);
                let waits: Vec<_> = match wrote {
                    true => marks[piece].before_writing(&stream).cloned().collect(),
                    false => marks[piece].before_reading(&stream).cloned().collect(),
                };
                let clock = model.enqueue(at, &waits);
                match wrote {
                    true => marks[piece].written(&stream, &clock),
                    false => marks[piece].read(&stream, &clock),
                }
                let place = clock[at];
                for before in uses[piece].iter().filter(|use_| use_.wrote || wrote) {
                    let known = clock[before.stream] >= before.place;
                    assert!(known, "seed {seed}: a use overtook one it conflicts with");
                }
                uses[piece].push(Use {
                    stream: at,
                    place,
                    wrote,
                    clock,
                });
            }
            assert!(uses.iter().flatten().all(|x| x.clock[x.stream] == x.place));
        }
    }

    #[test]
    fn a_writer_waits_for_the_readers_of_every_stream() {
        let streams: Vec<Arc<u8>> = (0..3).map(Arc::new).collect();
        let events: Vec<Arc<u8>> = (0..4).map(Arc::new).collect();
        let mut marks = Marks::default();
        marks.written(&streams[0], &events[0]);
        marks.read(&streams[1], &events[1]);
        marks.read(&streams[0], &events[2]);
        marks.read(&streams[1], &events[3]);
        let waits = |stream| -> Vec<u8> { marks.before_writing(stream).map(|x| **x).collect() };
        assert_eq!(waits(&streams[0]), [3], "the copy, by its last event");
        assert_eq!(waits(&streams[1]), [0, 2]);
        assert_eq!(waits(&streams[2]), [0, 2, 3]);
    }
}
