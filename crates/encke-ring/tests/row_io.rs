//! A dock beside the device: rows made and picked without the host's desk are the rows it brings.

use encke_core::job::Block;
use encke_core::memory::Memory;
use encke_core::plan::program::{Component, Role};
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Run, Sharding};
use encke_core::{DType, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor};
use encke_cpu::CpuKernel;
use encke_ring::RankMemory;
use encke_ring::ledger::LedgerEntry;
use encke_ring::out_of_core::{
    BufferSlot, GatheredSamples, Generator, RowIo, RowRange, Samples, Stream, StreamError,
};

const DIM: usize = 8;

type Buffer = <CpuKernel as Memory>::Buffer;

/// Makes rows one by one, and keeps what it picked until it is asked.
struct Near<'a> {
    kernel: &'a CpuKernel,
    generator: Generator,
    samples: &'a Samples,
    gathered: Vec<GatheredSamples<Buffer>>,
    fetched: usize,
}

impl RowIo<CpuKernel> for Near<'_> {
    fn fetch(
        &mut self,
        stretch: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut Buffer>,
    ) -> Result<(), StreamError> {
        let RowRange { role, batch, .. } = *stretch;
        let mut numbers = Vec::new();
        for token in stretch.tokens.tokens() {
            for &head in stretch.heads {
                let row = self.generator.row(role, batch, token, head, to.dtype);
                numbers.extend(&row[..width]);
            }
        }
        let made = Tensor::from_f64(to.dtype, [1, 1, 1, numbers.len()], &numbers).unwrap();
        let one = Run {
            first: 0,
            stride: 1,
            count: 1,
        };
        let mut staged = self.kernel.allocate(to.dtype, numbers.len()).unwrap();
        self.kernel
            .upload(&made.view(), &[one], &mut staged)
            .unwrap();
        let block = Block::contiguous(numbers.len(), 0, to.at);
        let from = self.kernel.input(&staged);
        self.kernel.copy(&block, false, from, to.buffer).unwrap();
        self.fetched += numbers.len();
        Ok(())
    }

    fn deliver(
        &mut self,
        from: BufferSlot<&Buffer>,
        stretch: &RowRange<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError> {
        assert_eq!(from.dtype, rounded, "a forward pass keeps what it returns");
        let gathered = self.samples.gather(self.kernel, &from, stretch, width);
        self.gathered.extend(gathered.unwrap());
        Ok(())
    }
}

/// What was booked for buffers. Scratch memory is of as many threads as happened to help.
fn booked(memory: &RankMemory) -> Vec<&LedgerEntry> {
    let entries = memory.ledger.entries().iter();
    let buffers = entries.filter(|entry| entry.component != Component::Workspace);
    buffers.collect()
}

fn request(cut: Cut, dtype: DType) -> Request {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[32, 128, 512], &[1, 4, 16], mode).unwrap();
    let shape = Shape::new(2, 300, 4, 2, DIM).unwrap();
    let sharding = Sharding::new(3, cut).unwrap();
    Request::new(shape, pattern.causal(true), sharding, dtype)
}

#[test]
fn rows_picked_beside_the_device_are_those_the_host_is_brought() {
    let kernel = CpuKernel::new().unwrap();
    let generator = Generator::new(5, DIM);
    let wanted = || (0..300).flat_map(|token| [(token, token % 4), (token, 3)]);
    for (cut, dtype) in [
        (Cut::Contiguous, DType::F32),
        (Cut::Striped, DType::Bf16),
        (Cut::Zigzag, DType::F64),
    ] {
        let plan = Plan::new(request(cut, dtype)).unwrap();
        let mut brought = Samples::new(wanted());
        let mut host = Stream::new(&kernel, &plan).unwrap();
        let mut picked = Samples::new(wanted());
        let mut near = Stream::new(&kernel, &plan).unwrap();
        for rank in 0..3 {
            let by_host = host.rank(rank, &generator, &mut brought, None).unwrap();
            let mut dock = Near {
                kernel: &kernel,
                generator,
                samples: &picked,
                gathered: Vec::new(),
                fetched: 0,
            };
            let done = near.rank_at(rank, &mut dock).unwrap();
            assert_eq!(done.pairs, by_host.pairs);
            assert_eq!(done.memory.planned, by_host.memory.planned);
            assert_eq!(booked(&done.memory), booked(&by_host.memory));
            assert!(dock.fetched >= 2 * 100 * (4 + 2 + 2) * DIM);
            for gathered in dock.gathered {
                picked.accept(&kernel, gathered).unwrap();
            }
        }
        let rows = picked.take();
        assert_eq!(rows.len(), picked.wanted());
        assert_eq!(rows, brought.take());
    }
}

#[test]
fn a_dock_that_cannot_add_refuses_a_backward_pass() {
    let kernel = CpuKernel::new().unwrap();
    let request = Request {
        pass: Pass::Backward { dlse: false },
        ..request(Cut::Contiguous, DType::F32)
    };
    let plan = Plan::new(request).unwrap();
    let samples = Samples::default();
    let mut dock = Near {
        kernel: &kernel,
        generator: Generator::new(5, DIM),
        samples: &samples,
        gathered: Vec::new(),
        fetched: 0,
    };
    let mut stream = Stream::new(&kernel, &plan).unwrap();
    let refused = (0..3).find_map(|rank| stream.rank_at(rank, &mut dock).err());
    let expected = |role| matches!(role, Role::Dk | Role::Dv);
    assert!(
        matches!(refused, Some(StreamError::Missing { verb: "write", role }) if expected(role)),
        "{refused:?}"
    );
}
