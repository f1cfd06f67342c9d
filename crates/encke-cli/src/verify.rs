//! `encke verify`: options and output of verification. What is compared is [`encke_lab::verify`]'s.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use encke_lab::Verdict;
use encke_lab::device::ComputeDevice;
use encke_lab::number::count;
use encke_lab::terminal::{Paint, say};
use encke_lab::verify::{VerifyCounts, VerifySettings, VerifySuite, clock_seed};

use crate::device_option::DeviceOption;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke verify
      300 configurations, at most 5 minutes.
  encke verify --seed 7 --count 5000 --minutes 60
      A longer run that can be repeated.
  encke verify --device cuda
      The same on the first NVIDIA GPU: every kernel a ring can launch, against the reference.
  encke verify --faults --seed 7 --count 2000
      2000 calls with injected faults: their outcomes, by the kind of fault.
  encke verify --faults --redundancy 1 --count 10000 --minutes 30
      Calls that survive: when ranks die, the others adopt their tokens and continue.
  encke verify --bits --count 3000 --minutes 60
      Calls with --bits invariant: rings of 2, 3, 4, 8 and 16 have the bits of one rank.
  mpirun -n 4 encke verify --count 50
      As several processes: whether messages arrive as they were sent, and whether every rank has
      the bits of threads and of the simulator.

Drawn at random: batch, tokens, heads, key heads, head dimension; dense, group, mix and fkodom
patterns with their options, causal or not; every sharding, empty chunks included, on 1 to 32
ranks; queries sharded or replicated; f64, f32, bf16, f16; a gradient of the lse; both checkpoint
policies. Each configuration runs forward and backward. Compared with the reference: out, lse, dq,
dk, dv. Compared with the plan: bytes sent and bytes allocated. In fkodom mode, which divides by
sums of values and is ill-conditioned where they are near 0, values are positive and f64 is used.

With --faults, such calls run in a simulator that delays, reorders, drops, corrupts or repeats
messages, and kills ranks or slows them down, as the seed determines. Each call must end with the
bits of an undisturbed run, or with an error on every rank that names the rank, its peer and the
round, within its deadline: never with a wrong value, and never without end.

With --redundancy as well, so many other ranks keep each rank's inputs, up to three ranks die in a
call, and the others continue: with the same results up to rounding, or, if every rank that had some
tokens is dead, with an error on every rank that names the lost tokens.

Exit codes: 0 all agree, 1 one does not, 2 any other error.";

/// The largest random ring has 32 ranks.
const MOST_REDUNDANCY: usize = 31;

/// Compares random configurations with the reference.
#[derive(Debug, Args)]
pub struct Options {
    /// Seed of the first configuration; each next one has the next seed [default: from the clock].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// Number of configurations.
    #[arg(long, value_name = "N", value_parser = count, default_value = "300")]
    count: usize,

    /// Stop after this many minutes, finished or not.
    #[arg(long, value_name = "M", default_value = "5")]
    minutes: f64,

    /// Run calls with injected faults (delay, reordering, loss, corruption, repetition, death,
    /// slowness) instead of comparing with the reference.
    #[arg(long)]
    faults: bool,

    /// Compare rings of several sizes with one rank, bit for bit, instead of with the reference.
    #[arg(long, conflicts_with = "faults")]
    bits: bool,

    /// With --faults: number of other ranks that keep each rank's inputs, so that deaths are
    /// survived.
    #[arg(long, value_name = "R", value_parser = count, default_value = "0")]
    redundancy: usize,

    /// Where the configurations run; the reference always runs on the CPU.
    #[command(flatten)]
    device: DeviceOption,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    options.device.check_wire(1)?;
    let limit = options.limit()?;
    let mut suite = match (options.faults, options.device.device) {
        (_, device) if options.bits => VerifySuite::bits(device)?,
        (true, ComputeDevice::Cpu) => VerifySuite::faults(options.redundancy)?,
        (true, device) => bail!(
            "--faults tests messages and runs in the simulator, on the CPU; leave --device \
             {device} out"
        ),
        (false, device) => VerifySuite::reference(device)?,
    };
    let settings = options.settings(limit, options.seed.unwrap_or_else(clock_seed));
    let paint = Paint::stdout();
    say(&format!("seed {}\n", settings.seed))?;
    let counts = suite.run(&settings, |seed, error| {
        let failed = paint.red("failed:");
        let arguments = options.arguments_to_repeat();
        Ok(say(&format!(
            "{failed} {error}\n  reproduce: encke verify {arguments}--seed {seed} --count 1\n"
        ))?)
    })?;
    say(&options.summary(paint, &counts, &suite))?;
    Ok(Verdict::of(counts.failed == 0))
}

/// Runs the command as one rank of an MPI job.
#[cfg(feature = "mpi")]
pub fn run_as_rank(
    cluster: &mut encke_lab::cluster::Cluster,
    options: &Options,
) -> Result<Verdict> {
    use encke::CpuKernel;

    let ready = (|| {
        if options.faults {
            bail!("--faults runs in the simulator, in one process; start it without a launcher");
        }
        if options.bits {
            bail!("--bits compares rings of threads, in one process; start it without a launcher");
        }
        options.device.check_wire(cluster.ranks())?;
        options.limit()
    })();
    let limit = cluster.agree(ready)?;
    match options.device.device {
        ComputeDevice::Cpu => {
            let kernel = CpuKernel::new().map_err(anyhow::Error::from);
            let kernel = cluster.agree(kernel)?;
            verify_on(cluster, options, limit, &kernel)
        }
        ComputeDevice::Cuda(index) => {
            let kernel = cluster.open_gpu(index, options.device.wire, false)?;
            verify_on(cluster, options, limit, &kernel)
        }
    }
}

/// Verifies the processes of a job that compute with this kernel.
#[cfg(feature = "mpi")]
fn verify_on<K: encke_lab::rank_kernel::RankKernel>(
    cluster: &mut encke_lab::cluster::Cluster,
    options: &Options,
    limit: Duration,
    kernel: &K,
) -> Result<Verdict> {
    use encke_lab::verify::processes;

    let suite = VerifySuite::reference(options.device.device);
    let mut suite = cluster.agree(suite)?;
    let is_root = cluster.is_root();
    let own = is_root.then(|| options.seed.unwrap_or_else(clock_seed));
    let settings = options.settings(limit, cluster.broadcast(own)?);
    let paint = Paint::stdout();
    let say_once = |text: &str| match is_root {
        true => say(text),
        false => Ok(()),
    };
    say_once(&format!(
        "seed {}, {} processes, {}\n",
        settings.seed,
        cluster.ranks(),
        cluster.library
    ))?;
    if let Err(error) = processes::check_transport(cluster, kernel)? {
        let failed = paint.red("failed:");
        say_once(&format!("{failed} the transport: {error}\n"))?;
        return Ok(Verdict::CheckFailed);
    }
    say_once("messages: the transport passes its conformance suite, whole and in pieces\n")?;
    let counts = processes::run(cluster, kernel, &mut suite, &settings, |seed, error| {
        let failed = paint.red("failed:");
        Ok(say_once(&format!(
            "{failed} {error}\n  reproduce: encke verify --seed {seed} --count 1, as many \
             processes\n"
        ))?)
    })?;
    say_once(&options.summary(paint, &counts, &suite))?;
    if counts.failed == 0 {
        let also = match options.device.device {
            ComputeDevice::Cpu => " and of the simulator",
            ComputeDevice::Cuda(_) => "",
        };
        say_once(&format!(
            "every rank has the bits of threads{also}, forward and backward\n"
        ))?;
    }
    Ok(Verdict::of(counts.failed == 0))
}

impl Options {
    fn settings(&self, limit: Duration, seed: u64) -> VerifySettings {
        VerifySettings {
            seed,
            count: self.count,
            limit,
        }
    }

    /// The time limit, or which option is wrong.
    fn limit(&self) -> Result<Duration> {
        if self.count == 0 {
            bail!("--count is 0; give at least 1 configuration to verify");
        }
        // Not clap's `requires`, which --bits switches off, because it excludes --faults.
        if self.redundancy > 0 && !self.faults {
            bail!(
                "--redundancy is for --faults, in which ranks die; add --faults, or leave it out"
            );
        }
        if self.redundancy > MOST_REDUNDANCY {
            bail!(
                "--redundancy {} exceeds the other ranks of rings of up to 32; use at most \
                 {MOST_REDUNDANCY}",
                self.redundancy
            );
        }
        let limit = Duration::try_from_secs_f64(self.minutes * 60.0);
        let limit = limit.ok().filter(|limit| !limit.is_zero());
        limit.ok_or_else(|| {
            anyhow!(
                "--minutes {} is not a length of time; give a number above 0",
                self.minutes
            )
        })
    }

    /// The options that select the suite, for a command that repeats one configuration.
    fn arguments_to_repeat(&self) -> String {
        match (self.faults, self.redundancy, self.device.device) {
            (_, _, ComputeDevice::Cpu) if self.bits => "--bits ".to_string(),
            (_, _, device) if self.bits => format!("--bits --device {device} "),
            (true, 0, _) => "--faults ".to_string(),
            (true, redundancy, _) => format!("--faults --redundancy {redundancy} "),
            (false, _, ComputeDevice::Cpu) => String::new(),
            (false, _, device) => format!("--device {device} "),
        }
    }

    fn summary(&self, paint: Paint, counts: &VerifyCounts, suite: &VerifySuite) -> String {
        let ran = counts.ran;
        let configurations = match ran == self.count {
            true if ran == 1 => "1 configuration".to_string(),
            true => format!("{ran} configurations"),
            false => format!(
                "{ran} of {} configurations (stopped at the limit of {} minutes)",
                self.count, self.minutes
            ),
        };
        let passed = match suite {
            VerifySuite::Reference(_) => "all agree with the reference",
            VerifySuite::Bits(_) => "all rings have the bits of one rank",
            VerifySuite::Faults(_) => {
                "each ended right, or with an error on every rank within its deadline"
            }
        };
        let verdict = match counts.failed {
            0 => paint.green(passed),
            failed => paint.red(&format!("{failed} failed")),
        };
        format!(
            "{configurations} in {:.1} s: {verdict}\n{}",
            counts.elapsed.as_secs_f64(),
            suite.details(),
        )
    }
}
