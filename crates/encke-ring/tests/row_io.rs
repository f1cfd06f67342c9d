//! A `RowIo` on the device moves the same rows as the one through host staging.

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

type CpuBuffer = <CpuKernel as Memory>::Buffer;

/// Generates rows one by one, and keeps the sampled rows on the device.
struct DeviceRows<'a> {
    kernel: &'a CpuKernel,
    generator: Generator,
    samples: &'a Samples,
    gathered: Vec<GatheredSamples<CpuBuffer>>,
    fetched: usize,
}

impl RowIo<CpuKernel> for DeviceRows<'_> {
    fn fetch(
        &mut self,
        range: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut CpuBuffer>,
    ) -> Result<(), StreamError> {
        let RowRange { role, batch, .. } = *range;
        let mut elements = Vec::new();
        for token in range.tokens.tokens() {
            for &head in range.heads {
                let row = self.generator.row(role, batch, token, head, to.dtype);
                elements.extend(&row[..width]);
            }
        }
        let made = Tensor::from_f64(to.dtype, [1, 1, 1, elements.len()], &elements).unwrap();
        let one = Run::leading(1);
        let mut staged = self.kernel.allocate(to.dtype, elements.len()).unwrap();
        self.kernel
            .upload(&made.view(), &[one], &mut staged)
            .unwrap();
        let block = Block::contiguous(elements.len(), 0, to.at);
        let from = self.kernel.input(&staged);
        self.kernel.copy(&block, false, from, to.buffer).unwrap();
        self.fetched += elements.len();
        Ok(())
    }

    fn deliver(
        &mut self,
        from: BufferSlot<&CpuBuffer>,
        range: &RowRange<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError> {
        assert_eq!(from.dtype, rounded, "a forward pass keeps what it returns");
        let gathered = self.samples.gather(self.kernel, &from, range, width);
        self.gathered.extend(gathered.unwrap());
        Ok(())
    }
}

/// The ledger entries of buffers. Workspace is left out: it depends on the number of threads that
/// ran.
fn buffer_entries(memory: &RankMemory) -> Vec<&LedgerEntry> {
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
fn samples_gathered_on_the_device_equal_those_taken_on_the_host() {
    let kernel = CpuKernel::new().unwrap();
    let generator = Generator::new(5, DIM);
    let selected = || (0..300).flat_map(|token| [(token, token % 4), (token, 3)]);
    for (cut, dtype) in [
        (Cut::Contiguous, DType::F32),
        (Cut::Striped, DType::Bf16),
        (Cut::Zigzag, DType::F64),
    ] {
        let plan = Plan::new(request(cut, dtype)).unwrap();
        let mut on_host = Samples::new(selected());
        let mut host = Stream::new(&kernel, &plan).unwrap();
        let mut on_device = Samples::new(selected());
        let mut device = Stream::new(&kernel, &plan).unwrap();
        for rank in 0..3 {
            let by_host = host.rank(rank, &generator, &mut on_host, None).unwrap();
            let mut io = DeviceRows {
                kernel: &kernel,
                generator,
                samples: &on_device,
                gathered: Vec::new(),
                fetched: 0,
            };
            let done = device.rank_at(rank, &mut io).unwrap();
            assert_eq!(done.pairs, by_host.pairs);
            assert_eq!(done.memory.planned, by_host.memory.planned);
            assert_eq!(
                buffer_entries(&done.memory),
                buffer_entries(&by_host.memory)
            );
            assert!(io.fetched >= 2 * 100 * (4 + 2 + 2) * DIM);
            for gathered in io.gathered {
                on_device.accept(&kernel, gathered).unwrap();
            }
        }
        let rows = on_device.take();
        assert_eq!(rows.len(), on_device.selected());
        assert_eq!(rows, on_host.take());
    }
}

#[test]
fn row_io_without_add_refuses_a_backward_pass() {
    let kernel = CpuKernel::new().unwrap();
    let request = Request {
        pass: Pass::Backward { dlse: false },
        ..request(Cut::Contiguous, DType::F32)
    };
    let plan = Plan::new(request).unwrap();
    let samples = Samples::default();
    let mut io = DeviceRows {
        kernel: &kernel,
        generator: Generator::new(5, DIM),
        samples: &samples,
        gathered: Vec::new(),
        fetched: 0,
    };
    let mut stream = Stream::new(&kernel, &plan).unwrap();
    let refused = (0..3).find_map(|rank| stream.rank_at(rank, &mut io).err());
    let expected = |role| matches!(role, Role::Dk | Role::Dv);
    assert!(
        matches!(refused, Some(StreamError::Missing { verb: "write", role }) if expected(role)),
        "{refused:?}"
    );
}
