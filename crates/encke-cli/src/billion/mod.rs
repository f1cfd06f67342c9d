//! `encke billion`: options and output of a run over a generated sequence. The run itself is
//! [`encke_lab::billion`]'s.

mod text;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use encke::{DType, Documents, Window};
use encke_lab::Verdict;
use encke_lab::billion::{self, BillionRun, BillionSettings};
use encke_lab::device::ComputeDevice;
use encke_lab::longnet;
use encke_lab::number::count;
use encke_lab::output::OutputFile;
use encke_lab::terminal::say;
use encke_lab::wire_choice::WireChoice;

use crate::device_option::DeviceOption;
use crate::pattern_options::window;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke billion --tokens 16M
      A sixty-fourth of it: seconds to minutes.
  encke billion --record billion.json
      2^30 tokens in 1024 ranks, one after another, and a record of the run.
  encke billion --record billion.json
      The same command again after Ctrl-C or a crash: it continues after the last finished rank.
  encke billion --device cuda --record billion.json
      On a GPU: 8 heads, bf16, in as few ranks as fit into its memory; rows are generated and summed
      on the GPU.
  encke billion --tokens 16M --ranks 7
      Other ranks, other shards: the same checksum within its tolerance.
  encke billion --tokens 64M --segment 64M --window 4095,0 --prefix 4
      One branch of every token: a sliding window of 4096 tokens, and four that stay visible.
  mpirun -n 4 encke billion --tokens 64M
      Ranks are distributed over the processes; each continues from a state file of its own.

The pattern is LongNet's in mix mode: segments of 1024 tokens with every token, of 4096 with every
fourth, and so on, up to the whole sequence; all of them under one softmax, causal. Every pair of it
is computed. A generator makes any input row on demand. The output is reduced to a checksum; the
sampled rows are computed again in f64 from the generator.

Exit codes: 0 success, 1 a sampled row was wrong, 2 bad input or any other error.";

/// Computes attention over a generated sequence of any length, one rank after another.
#[derive(Debug, Args)]
pub struct Options {
    /// Tokens of the sequence.
    #[arg(long, value_name = "N", value_parser = count, default_value = "1G")]
    tokens: usize,

    #[command(flatten)]
    device: DeviceOption,

    /// Number of ranks; one is in memory at a time [default: one for each 1M tokens; on a GPU the
    /// first power of two with which a rank fits into seven eighths of its memory].
    #[arg(long, value_name = "P", value_parser = count)]
    ranks: Option<usize>,

    /// Type of the tensors: f64, f32, bf16 or f16 [default: f32; bf16 on a GPU].
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,

    /// Heads [default: 1; 8 on a GPU].
    #[arg(long, value_name = "H", value_parser = count)]
    heads: Option<usize>,

    /// Head dimension.
    #[arg(long, value_name = "D", value_parser = count, default_value = "64")]
    dim: usize,

    /// Segment length of the first branch, whose dilation rate is 1.
    #[arg(long, value_name = "W", value_parser = count, default_value = "1024")]
    segment: usize,

    /// Factor by which segment length and dilation rate grow from branch to branch.
    #[arg(long, value_name = "G", value_parser = count, default_value = "4")]
    growth: usize,

    /// Window: a query attends to at most so many tokens before its own in each branch (everything
    /// is causal); `all` for no limit. A sliding window of W tokens is W-1,0; with a --segment as
    /// long as the sequence it is the only mask.
    #[arg(long, value_name = "LEFT,RIGHT", value_parser = window)]
    window: Option<Window>,

    /// Tokens at the start (of each document) that are visible outside the window, too.
    #[arg(long, value_name = "TOKENS", value_parser = count, requires = "window")]
    prefix: Option<usize>,

    /// Lengths of the documents that the sequence is packed from, which add up to --tokens: no
    /// query attends to another document.
    #[arg(long, value_name = "N1,N2,...", value_delimiter = ',', value_parser = count)]
    documents: Vec<usize>,

    /// Random rows to compute again in f64 and compare, in addition to 64 of each branch.
    #[arg(long, value_name = "ROWS", value_parser = count, default_value = "4096")]
    samples: usize,

    /// Seed of the sequence.
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,

    /// State file to continue from after an interruption; removed at the end.
    #[arg(long, value_name = "FILE", default_value = "encke-billion.state.json")]
    state: PathBuf,

    /// Begin at the first rank even if there is a state file.
    #[arg(long)]
    fresh: bool,

    /// Write the results, with the machine and the command, as JSON.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

impl Options {
    fn check_wire(&self) -> Result<()> {
        match self.device.wire {
            WireChoice::Auto => Ok(()),
            wire => bail!("--wire {wire}: no parcels travel in this command; leave it out"),
        }
    }

    fn run(&self) -> Result<BillionRun> {
        if self.growth < 2 {
            bail!(
                "--growth {} never reaches the whole sequence; use 2 or more",
                self.growth
            );
        }
        let (segment_lengths, dilation_rates) =
            longnet::branches(self.tokens, self.segment, self.growth);
        let device = self.device.device;
        let window = self.window.unwrap_or(Window::ALL);
        if self.prefix.is_some() && window.left.is_none() {
            bail!("--prefix has no effect: --window hides no token before a query");
        }
        let documents = match &self.documents[..] {
            [] => None,
            lengths => Some(Documents::new(lengths)?),
        };
        let (dtype, heads) = match device {
            ComputeDevice::Cpu => (DType::F32, 1),
            ComputeDevice::Cuda(_) => (DType::Bf16, 8),
        };
        Ok(BillionRun {
            settings: BillionSettings {
                device,
                tokens: self.tokens,
                ranks: self.ranks.unwrap_or(1),
                dtype: self.dtype.unwrap_or(dtype),
                heads: self.heads.unwrap_or(heads),
                dim: self.dim,
                segment_lengths,
                dilation_rates,
                window,
                prefix: self.prefix.unwrap_or(0),
                documents,
                samples: self.samples,
                seed: self.seed,
            },
            choose_ranks: self.ranks.is_none(),
            state: self.state.clone(),
            fresh: self.fresh,
        })
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    options.check_wire()?;
    let run = options.run()?;
    let state = ("the state", options.state.as_path());
    let file = OutputFile::create_optional(options.record.as_deref(), &[state])?;
    let record = billion::run(&run)?;
    OutputFile::write_json(file, &record)?;
    billion::remove_state(&options.state)?;
    say(&text::record(&record))?;
    Ok(Verdict::of(record.is_right()))
}

/// Runs the command as one rank of an MPI job.
#[cfg(feature = "mpi")]
pub fn run_as_rank(
    cluster: &mut encke_lab::cluster::Cluster,
    options: &Options,
) -> Result<Verdict> {
    let ready = (|| {
        options.check_wire()?;
        let path = options.record.as_deref().filter(|_| cluster.is_root());
        Ok((OutputFile::create_optional(path, &[])?, options.run()?))
    })();
    let (file, run) = cluster.agree(ready)?;
    let kernel = billion::processes::ShareKernel::open(cluster, options.device.device)?;
    let share = billion::processes::prepare(cluster, &run, kernel);
    let mut share = cluster.agree(share)?;
    // GPUs of different sizes choose different numbers.
    cluster.check_equal("the number of ranks", share.ranks() as u64)?;
    let job = share.run(cluster)?;
    let shown = job.map_or(Ok(true), |job| {
        OutputFile::write_json(file, &job.record)?;
        say(&text::record(&job.record))?;
        say(&text::processes(&job.resident_bytes))?;
        Ok(job.record.is_right())
    });
    let right = cluster.agree(shown)?;
    share.remove_state()?;
    let right = cluster.broadcast(cluster.is_root().then_some(right))?;
    Ok(Verdict::of(right))
}
