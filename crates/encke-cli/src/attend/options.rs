//! The options of `encke attend`, and the attention they define.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use encke::{
    Attention, Builder, CheckpointPolicy, DType, Documents, Fault, FaultPhase, KeyLengths, Pattern,
    Precision,
};
use encke_lab::number::{bytes, count};

use crate::device_option::DeviceOption;
use crate::input::InputFile;
use crate::pattern_options::PatternOptions;
use crate::ring_options::{Open, RingOptions, open};

/// Each rank is a thread, and its plan lists the route of every parcel.
const MOST_RANKS: usize = 1024;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke attend qkv.safetensors -o out.safetensors --causal --ranks 8
      Dense causal attention on a ring of 8 threads.
  encke attend qkv.safetensors -o out.safetensors --grad --mode mix \\
      --segment-lengths 2048,4096,8192 --dilation-rates 1,2,4 --causal --ranks 4
      A LongNet pattern, forward and backward; the file also holds do.
  encke attend qkv.safetensors -o out.safetensors --causal --window 4095,0 --prefix 4 \\
      --documents 5k,20k,1k --sinks --ranks 4
      A packed sequence of three documents with a sliding window of 4096 tokens, four tokens at the
      start of each document that stay visible, and the sinks of the file.
  encke attend qkv.safetensors -o out.safetensors --ranks 4 --memory --trace ring.json
      The memory of each rank, and a timeline for https://ui.perfetto.dev.
  encke attend qkv.safetensors -o out.safetensors --ranks 4 --redundancy 1 --drill 2@1
      Rank 2 dies in round 1, and the call survives with the same result.
  encke attend huge.safetensors -o out.safetensors --memory-limit 2GiB --causal --mode mix \\
      --segment-lengths 2048,8192,32768 --dilation-rates 1,4,16
      A file larger than memory: one rank at a time, with the number of ranks that fits 2 GiB.
  encke attend qkv.safetensors -o out.safetensors --causal --device cuda
      The same on the first NVIDIA GPU; with --ranks, several ranks share it.
  mpirun -n 4 encke attend qkv.safetensors -o out.safetensors --causal
      Processes instead of threads, on any hosts that share the folder: each reads and writes its
      own rows. Needs an encke built with --features mpi; see docs/cluster.md.

The input file is memory-mapped, so it must not be changed meanwhile. A NaN or an infinity in it is
an error that names the tensor and the index, unless --allow-non-finite is given; then it affects
the rows that attend to it and no other. A query without keys has out 0 and lse -inf.

Exit codes: 0 success, 2 bad input or any other error (one line on standard error).";

/// Computes attention and its gradients of tensors in a file.
#[derive(Debug, Args)]
pub struct Options {
    /// A safetensors file with q [b,nq,h,d], k [b,n,hkv,d] and v [b,n,hkv,dv], where hkv divides h
    /// and nq is at most n; for --grad also do [b,nq,h,dv] and, if the loss uses the lse, dlse
    /// [b,nq,h].
    #[arg(value_name = "IN.safetensors")]
    pub input: PathBuf,

    /// Where to write out [b,nq,h,dv] in the compute type, lse [b,nq,h] in f32 (f64 for f64), and
    /// with --grad dq, dk, dv. An existing file is replaced, atomically, at the end.
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub output: PathBuf,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    ring: RingOptions,

    /// The device that computes.
    #[command(flatten)]
    pub device: DeviceOption,

    /// Lengths of the entries of a right-padded batch: rows at or after them are neither read nor
    /// written; out and gradients are 0 there, lse is -inf. Without lengths: from the tensor
    /// key_lengths of the file.
    #[arg(
        long,
        help_heading = HEADING,
        value_name = "N1,N2,...",
        num_args = 0..=1,
        default_missing_value = "",
        value_parser = key_lengths
    )]
    key_lengths: Option<LengthSource>,

    /// Softmax scale [default: 1/sqrt(d)].
    #[arg(long, help_heading = HEADING, value_name = "X")]
    scale: Option<f64>,

    /// Type to compute in and to write: f64, f32, bf16 or f16, or auto: for f32 inputs the type
    /// that this hardware multiplies fastest; sums are f64 or f32 in any case [default: the type of
    /// q].
    #[arg(long, help_heading = HEADING, value_name = "TYPE", value_parser = open(dtype))]
    compute: Option<Open<DType>>,

    /// Add a sink to each softmax: a score without a value, from the tensor sinks [h] of the file.
    /// With --grad, dsinks [h] is written.
    #[arg(long, help_heading = HEADING)]
    pub sinks: bool,

    /// Also compute dq, dk and dv, from do (and dlse, if the file has it).
    #[arg(long, help_heading = HEADING)]
    pub grad: bool,

    /// What the forward pass keeps for the backward pass [default: keep-output].
    #[arg(long, help_heading = HEADING, value_enum, value_name = "POLICY")]
    checkpoint: Option<CheckpointName>,

    /// How long a rank waits for another one before the command fails [default: 600; 60 for the
    /// start of several processes, which has at least 10].
    #[arg(long, help_heading = HEADING, value_name = "SECONDS", value_parser = seconds)]
    pub deadline: Option<Duration>,

    /// Fault injection: rank A dies at the beginning of round B; of several, each in the plan that
    /// continues after the death before it.
    #[arg(
        long,
        help_heading = HEADING,
        value_name = "A@B,...",
        value_delimiter = ',',
        value_parser = death,
        requires = "redundancy"
    )]
    drill: Vec<(usize, usize)>,

    /// Limit of the resident memory, for a file of any size: 2GiB, 512MiB, 4e9. The number of ranks
    /// is the smallest that fits; they run one after another, and rows are read and written as they
    /// are needed. Needs disk space for the output and, with --grad, for sums of dk and dv.
    #[arg(long, help_heading = HEADING, value_name = "BYTES", value_parser = bytes)]
    pub memory_limit: Option<usize>,

    /// Accept NaN and infinity instead of refusing the file.
    #[arg(long, help_heading = HEADING)]
    pub allow_non_finite: bool,

    /// Write a timeline of all ranks as trace-event JSON, for Perfetto or chrome://tracing.
    #[arg(long, help_heading = HEADING, value_name = "T.json")]
    pub trace: Option<PathBuf>,

    /// Print the memory of each rank, planned by component and allocated.
    #[arg(long, help_heading = HEADING)]
    pub memory: bool,
}

const HEADING: &str = "Computation and output";

fn dtype(text: &str) -> Result<DType, String> {
    let parsed = text.parse::<DType>();
    parsed.map_err(|error| error.to_string())
}

/// Where the lengths of batch entries come from.
#[derive(Debug, Clone)]
enum LengthSource {
    Given(Vec<usize>),
    /// The tensor `key_lengths` of the input.
    File,
}

/// Parses the lengths of batch entries.
fn key_lengths(text: &str) -> Result<LengthSource, String> {
    if text.is_empty() {
        return Ok(LengthSource::File);
    }
    let lengths: Result<Vec<usize>, String> = text.split(',').map(count).collect();
    Ok(LengthSource::Given(lengths?))
}

/// Parses a length of time in seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.filter(|time| !time.is_zero());
    time.ok_or_else(|| "it is not a length of time; give seconds, more than 0".to_string())
}

/// Parses a rank and the round in which it dies.
fn death(text: &str) -> Result<(usize, usize), String> {
    let (rank, round) = text
        .split_once('@')
        .ok_or("write the rank and the round, as in 2@1")?;
    Ok((count(rank)?, count(round)?))
}

/// The beginning of a list.
fn some(list: &[usize]) -> String {
    let shown = list.iter().take(8).map(usize::to_string);
    let text = shown.collect::<Vec<_>>().join(", ");
    match list.len() > 8 {
        true => format!("[{text}, ...]"),
        false => format!("[{text}]"),
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CheckpointName {
    /// out and lse: nothing is computed or sent twice
    KeepOutput,
    /// Nothing: the backward pass recomputes the forward pass
    Recompute,
    /// out and lse, in a temporary file
    Offload,
}

impl Options {
    /// Refuses options that do not apply to ranks that run one after another.
    pub fn check_with_memory_limit(&self) -> Result<()> {
        let given = [
            (
                self.ring.replicates(),
                "--queries replicated: the memory of a rank does not decrease with their number",
            ),
            (
                self.ring.survives(),
                "--redundancy: ranks that run one after another do not survive each other",
            ),
            (
                self.ring.gives_first_tokens(),
                "--sharding with first tokens: the limit determines the number of ranks",
            ),
            (
                self.ring.gives_ranks() || self.ring.any_auto(),
                "--ranks or auto: the limit determines the number of ranks",
            ),
            (
                self.ring.balances(),
                "--sharding balanced or documents: no rank waits for one that has more work",
            ),
            (
                self.ring.gives_schedule(),
                "--schedule: a rank reads what others would send",
            ),
            (
                self.grad && self.ring.rotates_queries() && !self.ring.has_invariant_bits(),
                "--rotate queries: what ranks make of dout on the way is in no file",
            ),
            (
                self.grad && self.ring.has_invariant_bits() && !self.ring.rotates_queries(),
                "--bits invariant with --grad, whose sums of dk and dv travel from rank to rank \
                 where keys rotate with invariant bits: let queries rotate (--rotate queries)",
            ),
            (
                self.key_lengths.is_some(),
                "--key-lengths: it packs the rows in memory",
            ),
            (
                self.trace.is_some(),
                "--trace: ranks do not run side by side",
            ),
            (
                self.deadline.is_some(),
                "--deadline: no rank waits for another",
            ),
            (
                self.checkpoint.is_some(),
                "--checkpoint: out and lse are read back from the output file",
            ),
        ];
        match given.iter().find(|(given, _)| *given) {
            Some((_, why)) => bail!("--memory-limit excludes {why}; leave one of them out"),
            None => Ok(()),
        }
    }

    /// The attention, still without a device.
    pub fn builder(&self) -> Result<Builder> {
        let most = (MOST_RANKS, "each is a thread of this process");
        let builder = self.ring.apply(Attention::builder(), most.0, most.1)?;
        self.complete(builder)
    }

    /// Refuses patterns whose rows are combined after the last rank.
    pub fn check_slots_with_memory_limit(&self, pattern: &Pattern) -> Result<()> {
        if pattern.splits_slots() {
            bail!(
                "--memory-limit excludes fkodom mode and detached mixing gradients: branches that \
                 are combined after the last rank cannot be streamed; use group mode, or mix mode \
                 with exact gradients"
            );
        }
        Ok(())
    }

    /// Whether the call survives deaths of ranks.
    #[cfg(feature = "mpi")]
    pub fn survives(&self) -> bool {
        self.ring.survives()
    }

    /// The same on as many ranks as there are processes.
    #[cfg(feature = "mpi")]
    pub fn builder_of(&self, processes: usize) -> Result<Builder> {
        if self.key_lengths.is_some() {
            bail!(
                "--key-lengths and ranks that are processes do not go together: it packs the rows \
                 in the memory of one process; write packed sequences, and use --documents"
            );
        }
        if self.checkpoint.is_some() {
            bail!(
                "--checkpoint and ranks that are processes do not go together: out and lse are \
                 read back from the output file; leave it out"
            );
        }
        let builder = self.ring.apply_to(Attention::builder(), processes)?;
        self.complete(builder)
    }

    /// Applies the options that do not concern the ring.
    fn complete(&self, builder: Builder) -> Result<Builder> {
        let mut builder = self.pattern.apply(builder, self.documents()?)?;
        if let Some(lengths) = self.key_lengths()? {
            builder = builder.key_lengths(&lengths)?;
        }
        if let Some(slopes) = self.slopes()? {
            builder = builder.slopes(Some(slopes));
        }
        if let Some(scale) = self.scale {
            builder = builder.scale(scale);
        }
        builder = match self.compute {
            None => builder,
            Some(Open::Given(dtype)) => builder.precision(Precision::Compute(dtype)),
            Some(Open::Auto) => builder.precision(Precision::Fastest),
        };
        match self.checkpoint {
            Some(_) if !self.grad => {
                bail!("--checkpoint applies only with --grad; leave it out or add --grad");
            }
            Some(CheckpointName::Recompute) => {
                builder = builder.checkpoint(CheckpointPolicy::Recompute);
            }
            Some(CheckpointName::Offload) => {
                builder = builder.checkpoint(CheckpointPolicy::Offload);
            }
            Some(CheckpointName::KeepOutput) | None => {}
        }
        if let Some(deadline) = self.deadline {
            builder = builder.deadline(deadline);
        }
        if !self.drill.is_empty() && self.ring.leaves_ranks_open() {
            bail!(
                "--drill names ranks, and --ranks auto decides how many there are; give a number \
                 of ranks"
            );
        }
        let faults = self.drill.iter().enumerate();
        let faults = faults.map(|(epoch, &(rank, round))| Fault {
            rank,
            epoch,
            round,
            phase: FaultPhase::Begin,
        });
        Ok(builder.drill(faults.collect()))
    }

    /// The documents that the input gives, if the options ask for them.
    fn documents(&self) -> Result<Option<Documents>> {
        if !self.pattern.reads_documents() {
            return Ok(None);
        }
        let file = InputFile::open(&self.input)?;
        let ends = file.tensors()?.integers("cu_seqlens")?;
        if ends.first() != Some(&0) || ends.windows(2).any(|pair| pair[0] > pair[1]) {
            bail!(
                "cu_seqlens must begin with 0 and never fall; it is {}",
                some(&ends)
            );
        }
        let lengths: Vec<usize> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
        Ok(Some(Documents::new(&lengths)?))
    }

    /// The lengths of the batch entries, if they are given.
    pub fn key_lengths(&self) -> Result<Option<KeyLengths>> {
        let Some(source) = &self.key_lengths else {
            return Ok(None);
        };
        let file = InputFile::open(&self.input)?;
        let tensors = file.tensors()?;
        let [_, tokens, _, _] = tensors.get("k")?.dims()?;
        let lengths = match source {
            LengthSource::Given(lengths) => lengths.clone(),
            LengthSource::File => tensors.integers("key_lengths")?,
        };
        Ok(Some(KeyLengths::new(tokens, &lengths)?))
    }

    /// The slopes that the input gives, if the options ask for them.
    fn slopes(&self) -> Result<Option<Arc<[f64]>>> {
        if !self.pattern.has_slopes() {
            return Ok(None);
        }
        let file = InputFile::open(&self.input)?;
        let tensors = file.tensors()?;
        match tensors.has("alibi_slopes") {
            true => Ok(Some(tensors.vector("alibi_slopes")?.into())),
            false => Ok(None),
        }
    }

    /// Whether faults are injected.
    #[cfg(feature = "mpi")]
    pub fn injects_faults(&self) -> bool {
        !self.drill.is_empty()
    }
}
