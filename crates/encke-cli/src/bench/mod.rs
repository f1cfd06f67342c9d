//! `encke bench`: options and output of benchmarks. What is checked and timed is
//! [`encke_lab::bench`]'s.

mod text;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use encke_lab::Verdict;
use encke_lab::bench::{self, BenchRecord, BenchSettings};
use encke_lab::number::repeats;
use encke_lab::output::OutputFile;
use encke_lab::terminal::say;

use crate::device_option::DeviceOption;
use crate::pattern_options::PatternOptions;
use crate::ring_sizes_options::RingSizesOptions;
use crate::shape_options::{ShapeOptions, default};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke bench
      Dense attention, 4096 tokens, on rings of 1, 2, 4 and 8 threads.
  encke bench --tokens 16k --heads 8 --causal --sharding zigzag --grad --repeats 9
      Both passes under a causal mask, with equal work for every rank.
  encke bench --tokens 64k --mode mix --segment-lengths 2k,16k,64k --dilation-rates 1,8,32
      A LongNet pattern.
  encke bench --tokens 64k --heads 16 --dim 128 --dtype bf16 --grad --device cuda
      The ranks of a ring on the first NVIDIA GPU. A call starts and ends with tensors on the host,
      so copies are included in its time; bench/gpu_device.py times the GPU alone.
  mpirun -n 4 encke bench --tokens 32k --grad --json four.json
      Every rank a process: one ring, timed by its slowest rank.

Ranks of one process share its cores: a ring of any size does the same work with the same cores, and
the ratio of its time to that of the smallest ring (against) is the overhead of the ring. Each ring
runs --repeats times, in turn with the others; medians are shown, and against is the median of the
ratios of each turn. Speed counts the pairs of the pattern alone: 4 d operations for a pair forward,
10 d backward.

Before anything is timed, rows of every ring's output are compared with the f64 reference, and its
gradients with those of the smallest ring (of processes: the output alone; encke verify compares
all bits).

Exit codes: 0 the results are right, 1 they are not, 2 any other error.
Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G are powers of 1024.";

/// Times rings of several sizes.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", default("4k")),
    mut_arg("heads", default("4")),
    mut_arg("dim", default("64")),
    mut_arg("ranks", default("1,2,4,8"))
)]
pub struct Options {
    #[command(flatten)]
    sizes: ShapeOptions,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    rings: RingSizesOptions,

    #[command(flatten)]
    device: DeviceOption,

    /// Also time the backward pass.
    #[arg(long, help_heading = HEADING)]
    grad: bool,

    /// How often each ring is timed.
    #[arg(
        long,
        value_name = "N",
        value_parser = repeats,
        default_value = "5",
        help_heading = HEADING
    )]
    repeats: usize,

    /// Seed of the tensors.
    #[arg(long, value_name = "S", default_value = "1", help_heading = HEADING)]
    seed: u64,

    /// Write all times, and the checks, as JSON.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    json: Option<PathBuf>,
}

const HEADING: &str = "Measurement and output";

impl Options {
    fn settings(&self, sizes: &[usize]) -> Result<BenchSettings> {
        if self.repeats == 0 {
            bail!("--repeats 0 times nothing; give 1 or more");
        }
        BenchSettings::check_pattern(&self.pattern.pattern()?)?;
        let shape = self.sizes.shape()?;
        if shape.queries != shape.tokens || shape.value_dim != shape.dim {
            bail!(
                "bench generates q, k and v of one size; leave --query-tokens and --value-dim \
                 out, or see `encke simulate`"
            );
        }
        let rings = sizes
            .iter()
            .map(|&ranks| self.rings.builder(&self.pattern, ranks));
        Ok(BenchSettings {
            shape,
            dtype: self.sizes.dtype(),
            rings: rings.collect::<Result<_>>()?,
            device: self.device.device,
            grad: self.grad,
            repeats: self.repeats,
            seed: self.seed,
        })
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    options.device.check_wire(1)?;
    let settings = options.settings(&options.rings.sizes()?)?;
    let json = OutputFile::create_optional(options.json.as_deref(), &[])?;
    let record = bench::run(&settings)?;
    show(&record, json)?;
    Ok(Verdict::of(record.is_right()))
}

/// Runs the command as one rank of an MPI job.
#[cfg(feature = "mpi")]
pub fn run_as_rank(
    cluster: &mut encke_lab::cluster::Cluster,
    options: &Options,
) -> Result<Verdict> {
    use encke::CpuKernel;
    use encke_lab::device::ComputeDevice;

    let ready = (|| {
        options.device.check_wire(cluster.ranks())?;
        let settings = options.settings(&[cluster.ranks()])?;
        let json = options.json.as_deref().filter(|_| cluster.is_root());
        Ok((settings, OutputFile::create_optional(json, &[])?))
    })();
    let (settings, json) = cluster.agree(ready)?;
    let (record, right) = match settings.device {
        ComputeDevice::Cpu => {
            let kernel = CpuKernel::new().map_err(anyhow::Error::from);
            bench_on(cluster, &settings, kernel)?
        }
        ComputeDevice::Cuda(index) => {
            let kernel = cluster.open_gpu(index, options.device.wire, false)?;
            bench_on(cluster, &settings, Ok(kernel))?
        }
    };
    let shown = record.map_or(Ok(()), |record| show(&record, json));
    cluster.agree(shown)?;
    Ok(Verdict::of(right))
}

#[cfg(feature = "mpi")]
fn bench_on<K: encke_lab::rank_kernel::RankKernel>(
    cluster: &mut encke_lab::cluster::Cluster,
    settings: &BenchSettings,
    kernel: Result<K>,
) -> Result<(Option<BenchRecord>, bool)> {
    let shard = kernel.and_then(|kernel| bench::processes::prepare(cluster, settings, kernel));
    let shard = cluster.agree(shard)?;
    bench::processes::run(cluster, settings, shard)
}

/// Prints and writes the record.
fn show(record: &BenchRecord, json: Option<OutputFile>) -> Result<()> {
    OutputFile::write_json(json, record)?;
    Ok(say(&text::record(record))?)
}
