//! The options of `encke attend`, and the attention they ask for.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use encke::{Attention, Builder, CheckpointPolicy, DType, Fault, Phase, Precision};

use crate::device_option::DeviceOption;
use crate::number::{bytes as byte_count, count};
use crate::pattern_options::PatternOptions;
use crate::ring_options::{Open, RingOptions, open};

/// A rank is a thread here, and every rank knows the way of every parcel.
const MOST_RANKS: usize = 1024;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke attend qkv.safetensors -o out.safetensors --causal --ranks 8
      Dense causal attention on a ring of 8 threads.
  encke attend qkv.safetensors -o out.safetensors --grad --mode mix \\
      --segment-lengths 2048,4096,8192 --dilation-rates 1,2,4 --causal --ranks 4
      A LongNet pattern, forward and backward; the file also holds do.
  encke attend qkv.safetensors -o out.safetensors --ranks 4 --memory --trace ring.json
      What each rank held, and a timeline for https://ui.perfetto.dev.
  encke attend qkv.safetensors -o out.safetensors --ranks 4 --redundancy 1 --drill 2@1
      A ring that survives, and a rank that dies on purpose in round 1: the same result.
  encke attend huge.safetensors -o out.safetensors --memory-limit 2GiB --causal --mode mix \\
      --segment-lengths 2048,8192,32768 --dilation-rates 1,4,16
      A file larger than memory: one rank at a time, as many as it takes to stay below 2 GiB.
  encke attend qkv.safetensors -o out.safetensors --causal --device cuda
      The same on the first NVIDIA GPU; with --ranks, several ranks share it.
  mpirun -n 4 encke attend qkv.safetensors -o out.safetensors --causal
      Processes instead of threads, on any hosts that share the folder: each reads its own rows and
      writes its own rows. Needs an encke built with --features mpi; see docs/cluster.md.

Inputs are read in place, so the file must not be changed meanwhile. A NaN or an infinity in
them is an error that names the tensor and the index, unless --allow-non-finite is given; then it
reaches the rows that see it and no other. A query that sees no key has out 0 and lse -inf.

Exit codes: 0 success, 2 bad input or any other error (one line on standard error).";

/// Attention, and its gradients, of tensors in a file.
#[derive(Debug, Args)]
pub struct Options {
    /// A safetensors file with q [b,n,h,d] and k, v [b,n,hkv,d], where hkv divides h; for --grad
    /// also do [b,n,h,d] and, if the loss uses the lse, dlse [b,n,h].
    #[arg(value_name = "IN.safetensors")]
    pub input: PathBuf,

    /// Where to write out [b,n,h,d] in the compute type, lse [b,n,h] in f32 (f64 for f64), and with
    /// --grad dq, dk, dv. A file that is there is replaced, in one step, at the end.
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub output: PathBuf,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    ring: RingOptions,

    /// Where it is computed.
    #[command(flatten)]
    pub device: DeviceOption,

    /// What is computed beside the pattern, and what is reported.
    #[command(flatten)]
    pub work: WorkOptions,
}

/// What is computed beside the pattern, and what is reported.
#[derive(Debug, Args)]
#[command(next_help_heading = "Computation and reports")]
pub struct WorkOptions {
    /// Softmax scale [default: 1/sqrt(d)].
    #[arg(long, value_name = "X")]
    scale: Option<f64>,

    /// Type to compute in and to write: f64, f32, bf16 or f16, or auto: for inputs in f32 what this
    /// hardware multiplies fastest; sums are f64 or f32 in any case [default: the type q is stored
    /// in].
    #[arg(long, value_name = "TYPE", value_parser = open(dtype))]
    compute: Option<Open<DType>>,

    /// Also compute dq, dk and dv, from do (and dlse, if the file has it).
    #[arg(long)]
    pub grad: bool,

    /// What the forward pass keeps for the backward pass [default: keep-output].
    #[arg(long, value_enum, value_name = "POLICY")]
    checkpoint: Option<CheckpointName>,

    /// How long a rank may wait for another one before the command gives up [default: 600].
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<f64>,

    /// A drill: rank A dies when it should begin round B; of several, each in what goes on after the
    /// one before.
    #[arg(
        long,
        value_name = "A@B,...",
        value_delimiter = ',',
        value_parser = death,
        requires = "redundancy"
    )]
    drill: Vec<(usize, usize)>,

    /// Stay under so much resident memory, however large the file: 2GiB, 512MiB, 4e9. The number
    /// of ranks is the smallest that fits; they run one after another, and rows are read and
    /// written as they are needed. Needs room for the output and, with --grad, for sums of dk and
    /// dv beside it.
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    pub memory_limit: Option<usize>,

    /// Let NaN and infinity through instead of refusing the file.
    #[arg(long)]
    pub allow_non_finite: bool,

    /// Write a timeline of all ranks as trace-event JSON, for Perfetto or chrome://tracing.
    #[arg(long, value_name = "T.json")]
    pub trace: Option<PathBuf>,

    /// Print what each rank held, planned by component and allocated.
    #[arg(long)]
    pub memory: bool,
}

fn dtype(text: &str) -> Result<DType, String> {
    let parsed = text.parse::<DType>();
    parsed.map_err(|error| error.to_string())
}

/// A rank and the round it does not begin.
fn death(text: &str) -> Result<(usize, usize), String> {
    let (rank, round) = text
        .split_once('@')
        .ok_or("write the rank and the round, as in 2@1")?;
    Ok((count(rank)?, count(round)?))
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CheckpointName {
    /// out and lse: nothing is computed or sent twice
    KeepOutput,
    /// Nothing: the backward pass runs the forward pass again first
    Recompute,
    /// out and lse, in a temporary file instead of in memory
    Offload,
}

impl Options {
    /// Refuses options that have no meaning where ranks run one after another.
    pub fn refuse_beside_limit(&self) -> Result<()> {
        let given = [
            (
                self.ring.replicates(),
                "--queries replicated: what every rank holds does not shrink with their number",
            ),
            (
                self.ring.survives(),
                "--redundancy: ranks that run one after another do not survive each other",
            ),
            (
                self.ring.gives_ranks() || self.ring.leaves_open(),
                "--ranks or auto: the limit decides how many there are",
            ),
            (
                self.work.trace.is_some(),
                "--trace: ranks do not run side by side",
            ),
            (
                self.work.deadline.is_some(),
                "--deadline: nobody waits for anybody",
            ),
            (
                self.work.checkpoint.is_some(),
                "--checkpoint: out and lse are read back from the output file",
            ),
        ];
        match given.iter().find(|(given, _)| *given) {
            Some((_, why)) => bail!("--memory-limit does not go with {why}; leave one of them out"),
            None => Ok(()),
        }
    }

    /// The attention that the options ask for, still without a device.
    pub fn builder(&self) -> Result<Builder> {
        let most = (MOST_RANKS, "each is a thread of this process");
        let builder = self.ring.apply(Attention::builder(), most.0, most.1)?;
        self.completed(builder)
    }

    /// The same on as many ranks as there are processes.
    #[cfg(feature = "mpi")]
    pub fn attention_of(&self, processes: usize) -> Result<Attention> {
        self.device.refuse_in_processes()?;
        let builder = self.ring.apply_to(Attention::builder(), processes)?;
        Ok(self.completed(builder)?.build()?)
    }

    fn completed(&self, builder: Builder) -> Result<Builder> {
        let work = &self.work;
        let mut builder = builder.pattern(self.pattern.pattern()?);
        if let Some(scale) = work.scale {
            builder = builder.scale(scale);
        }
        builder = match work.compute {
            None => builder,
            Some(Open::Given(dtype)) => builder.precision(Precision::Compute(dtype)),
            Some(Open::Auto) => builder.precision(Precision::Fastest),
        };
        match work.checkpoint {
            Some(_) if !work.grad => {
                bail!("--checkpoint has a meaning only with --grad; leave it out or add --grad");
            }
            Some(CheckpointName::Recompute) => {
                builder = builder.checkpoint(CheckpointPolicy::Recompute);
            }
            Some(CheckpointName::Offload) => {
                builder = builder.checkpoint(CheckpointPolicy::Offload);
            }
            Some(CheckpointName::KeepOutput) | None => {}
        }
        if let Some(deadline) = self.deadline()? {
            builder = builder.deadline(deadline);
        }
        let faults = work.drill.iter().enumerate();
        let faults = faults.map(|(epoch, &(rank, round))| Fault {
            rank,
            epoch,
            round,
            phase: Phase::Begin,
        });
        Ok(builder.drill(faults.collect()))
    }

    /// Whether ranks are to die on purpose.
    #[cfg(feature = "mpi")]
    pub fn drills(&self) -> bool {
        !self.work.drill.is_empty()
    }

    /// How long a rank may wait for another one, if that was said.
    pub fn deadline(&self) -> Result<Option<Duration>> {
        let Some(seconds) = self.work.deadline else {
            return Ok(None);
        };
        let deadline = Duration::try_from_secs_f64(seconds);
        let deadline = deadline.ok().filter(|deadline| !deadline.is_zero());
        let deadline = deadline.ok_or_else(|| {
            anyhow!("--deadline {seconds} is no length of time; give seconds, more than 0")
        })?;
        Ok(Some(deadline))
    }
}
