//! A memory profile as an MPI job: what each rank of one ring holds, and how much of the message
//! time is hidden behind computation.
//!
//! The decision here is the definition of hidden. The messages of the plan are also timed alone,
//! round by round, with no computation and all ranks ready. The time a rank waits in the run after
//! its jobs of a round are done is exposed, up to the time that the messages of the round take
//! alone: a longer wait is for a rank that computes longer. On a GPU jobs are only requested, and a
//! thread that waits says nothing about the GPU; there the jobs are timed alone as well, all ranks
//! together and without messages, on the parcels that came last, and what a pass takes longer than
//! that is exposed.

use std::time::{Duration, Instant};

use anyhow::Result;
use encke::plan::program::{Message, RankPlan, Role};
use encke::{Activity, DType, Data, Pass, Plan, RankMemory, Request};
use encke_core::transport::{
    Address, Incoming, Moved, Outgoing, Transport, TransportError, WireBuffer,
};
use encke_ring::ShardCall;
use encke_ring::out_of_core::{FromSource, Generator, RowRange, StreamError, TensorSource};
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::process::resident_bytes;
use crate::rank_kernel::RankKernel;
use crate::terminal::spinner;

/// How often messages are timed alone; the median is taken.
const REPEATS: usize = 5;
/// Rows of each rank in the warm-up call: enough for messages of every kind.
const WARM_ROWS: usize = 64;

/// Generated rows of every tensor.
struct GeneratedRows {
    wide: Generator,
    narrow: Generator,
}

impl TensorSource for GeneratedRows {
    fn dtype(&self, role: Role) -> DType {
        self.wide.dtype(role)
    }

    fn read(&self, rows: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        match rows.role {
            Role::Lse | Role::Dlse => self.narrow.read(rows, to),
            _ => self.wide.read(rows, to),
        }
    }
}

/// What one rank did and held in one pass.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankPassProfile {
    /// Its memory, planned and allocated.
    pub memory: RankMemory,
    /// Resident memory with all buffers in use, minus that before the first was allocated.
    pub resident_growth_bytes: Option<usize>,
    /// Time of the pass.
    pub seconds: f64,
    /// Time it computed.
    pub compute_seconds: f64,
    /// Time its messages take alone, with no computation to overlap them.
    pub hop_seconds: f64,
    /// Time it waited in the run, for messages or for the ranks that send them.
    pub wait_seconds: f64,
    /// The part of the waiting that messages can explain: in no round more than they take alone.
    pub exposed_seconds: f64,
    /// Bytes it sent.
    pub sent_bytes: usize,
}

impl RankPassProfile {
    /// Whether the rank held no more than planned.
    pub fn is_within_plan(&self) -> bool {
        self.memory.ledger.total().peak_bytes <= self.memory.planned_bytes()
    }
}

/// One pass of all ranks.
#[derive(Debug, Serialize)]
pub struct JobPass {
    /// Forward or backward.
    pub pass: &'static str,
    /// Time that messages take alone, over all ranks.
    pub hop_seconds: f64,
    /// Time that ranks waited.
    pub wait_seconds: f64,
    /// The part of it that messages can explain.
    pub exposed_seconds: f64,
    /// The fraction of `hop_seconds` that computation hides; `None` without messages.
    pub hidden: Option<f64>,
    /// Each rank.
    pub ranks: Vec<RankPassProfile>,
}

impl JobPass {
    fn new(pass: &'static str, ranks: Vec<RankPassProfile>) -> JobPass {
        let sum = |of: fn(&RankPassProfile) -> f64| ranks.iter().map(of).sum::<f64>();
        let (hops, exposed) = (sum(|r| r.hop_seconds), sum(|r| r.exposed_seconds));
        JobPass {
            pass,
            hop_seconds: hops,
            wait_seconds: sum(|r| r.wait_seconds),
            exposed_seconds: exposed,
            hidden: (hops > 0.0).then(|| 1.0 - exposed / hops),
            ranks,
        }
    }
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct JobProfile {
    /// The MPI library.
    pub library: String,
    /// Number of processes.
    pub processes: usize,
    /// The forward pass.
    pub request: Request,
    /// Each pass.
    pub passes: Vec<JobPass>,
}

impl JobProfile {
    /// Whether no rank held more than planned.
    pub fn is_within_plan(&self) -> bool {
        let mut ranks = self.passes.iter().flat_map(|pass| &pass.ranks);
        ranks.all(RankPassProfile::is_within_plan)
    }
}

/// Measures each pass on the ring of all processes; the record on the root, `None` on other ranks.
/// `request` is the forward pass on as many ranks as the job has. Of the two kernels, which may be
/// the same, the first is warmed up and the second is measured.
pub fn measure<K: RankKernel>(
    cluster: &mut Cluster,
    [warm, kernel]: [&K; 2],
    request: &Request,
    grad: bool,
    seed: u64,
) -> Result<Option<JobProfile>> {
    warm_up(cluster, warm, request, grad, seed)?;
    let mut measured = Vec::new();
    for (name, pass) in passes(grad) {
        let progress = cluster.is_root().then(|| spinner(name));
        let request = Request {
            pass,
            ..request.clone()
        };
        let own = measure_pass(cluster, kernel, request, seed)?;
        drop(progress);
        if let Some(ranks) = cluster.gather(&own)? {
            measured.push(JobPass::new(name, ranks));
        }
    }
    Ok(cluster.is_root().then(|| JobProfile {
        library: cluster.library.clone(),
        processes: cluster.ranks(),
        request: request.clone(),
        passes: measured,
    }))
}

/// Runs the passes once on a few tokens, so that memory which MPI, threads and the kernel allocate
/// once, whatever the size of a call, is not counted.
fn warm_up<K: RankKernel>(
    cluster: &mut Cluster,
    kernel: &K,
    request: &Request,
    grad: bool,
    seed: u64,
) -> Result<()> {
    let mut few = request.clone();
    let tokens = few.shape.tokens.min(WARM_ROWS * cluster.ranks());
    few.shape = few.shape.with_tokens(tokens);
    // If so few tokens do not fit the pattern, which all ranks find alike, there is no warm-up.
    if Plan::new(few.clone()).is_err() {
        return Ok(());
    }
    for (_, pass) in passes(grad) {
        let request = Request {
            pass,
            ..few.clone()
        };
        measure_pass(cluster, kernel, request, seed)?;
    }
    Ok(())
}

/// The passes that are measured, with their names.
fn passes(grad: bool) -> Vec<(&'static str, Pass)> {
    let mut passes = vec![("forward", Pass::Forward)];
    if grad {
        passes.push(("backward", Pass::Backward { dlse: false }));
    }
    passes
}

/// One pass of this process's rank.
fn measure_pass<K: RankKernel>(
    cluster: &mut Cluster,
    kernel: &K,
    request: Request,
    seed: u64,
) -> Result<RankPassProfile> {
    let rows = GeneratedRows {
        wide: Generator::new(seed, request.shape.dim),
        narrow: Generator::new(seed, 1),
    };
    let plan = cluster.agree(Plan::new(request).map_err(anyhow::Error::from))?;
    if K::ASYNCHRONOUS {
        // Once before, so that no memory is allocated in the call that is timed.
        let mut shard = cluster.agree(loaded(kernel, &plan, cluster.rank(), &rows))?;
        cluster.wire.begin();
        shard.run(&mut *K::wire(cluster))?;
    }
    kernel.release_scratch();
    let before = resident_bytes();
    let mut shard = cluster.agree(loaded(kernel, &plan, cluster.rank(), &rows))?;
    kernel.synchronize()?;
    cluster.wire.begin();
    let begin = Instant::now();
    shard.restart_clock();
    shard.run(&mut *K::wire(cluster))?;
    kernel.synchronize()?;
    let seconds = begin.elapsed().as_secs_f64();
    let after = resident_bytes();
    let program = shard.rank().plan().clone();
    let (rank, done) = shard.into_parts();
    let total = |of: Activity| -> f64 {
        let events = done.events.iter().filter(|event| event.activity == of);
        events.map(|event| event.duration.as_secs_f64()).sum()
    };
    let alone = time_messages_alone(cluster, kernel, &program)?;
    let hop_seconds = alone.iter().sum::<Duration>().as_secs_f64();
    let [compute_seconds, wait_seconds, exposed_seconds] = match K::ASYNCHRONOUS {
        true => {
            let again = ShardCall::on_rank(kernel, &plan, rank);
            let jobs = time_jobs_alone(cluster, kernel, again)?;
            let beyond = (seconds - jobs).max(0.0);
            [jobs, beyond, beyond.min(hop_seconds)]
        }
        false => {
            let waited = |round: usize| -> Duration {
                let events = done.events.iter();
                let waits = events.filter(|e| e.activity == Activity::Wait && e.round == round);
                waits.map(|event| event.duration).sum()
            };
            let exposed = alone.iter().enumerate();
            let exposed = exposed.map(|(round, alone)| waited(round).min(*alone));
            let exposed = exposed.sum::<Duration>().as_secs_f64();
            [total(Activity::Compute), total(Activity::Wait), exposed]
        }
    };
    Ok(RankPassProfile {
        resident_growth_bytes: before.zip(after).map(|(b, a)| a.saturating_sub(b)),
        seconds,
        compute_seconds,
        hop_seconds,
        wait_seconds,
        exposed_seconds,
        sent_bytes: done.events.iter().map(|event| event.sent_bytes).sum(),
        memory: done.memory,
    })
}

/// A rank with its inputs.
fn loaded<'a, K: RankKernel>(
    kernel: &'a K,
    plan: &'a Plan,
    rank: usize,
    rows: &GeneratedRows,
) -> Result<ShardCall<'a, K>> {
    let mut shard = ShardCall::new(kernel, plan, rank)?;
    shard.load(&mut FromSource(rows))?;
    Ok(shard)
}

/// The time that the jobs of a pass take without messages, with all ranks at work.
fn time_jobs_alone<K: RankKernel>(
    cluster: &mut Cluster,
    kernel: &K,
    mut shard: ShardCall<'_, K>,
) -> Result<f64> {
    let mut took = Vec::new();
    for _ in 0..REPEATS {
        cluster.agree(Ok(()))?;
        let begin = Instant::now();
        shard.run(&mut NoMessages)?;
        kernel.synchronize()?;
        took.push(begin.elapsed());
    }
    took.sort_unstable();
    Ok(took[took.len() / 2].as_secs_f64())
}

/// Delivers nothing and reports that it did: only for timing what is computed meanwhile.
struct NoMessages;

impl<B: WireBuffer> Transport<B> for NoMessages {
    fn exchange(
        &mut self,
        _: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        meanwhile();
        let bytes = |address: Address, parcel: &B| address.elements * parcel.element_bytes();
        Ok(Moved {
            sent_bytes: outgoing.iter().map(|x| bytes(x.to, x.parcel)).sum(),
            received_bytes: incoming.iter().map(|x| bytes(x.from, x.parcel)).sum(),
        })
    }
}

/// The time that the messages of each round take without computation, with all ranks ready.
fn time_messages_alone<K: RankKernel>(
    cluster: &mut Cluster,
    kernel: &K,
    program: &RankPlan,
) -> Result<Vec<Duration>> {
    let parcel = |message: &Message| -> Result<(Address, K::Buffer)> {
        let dtype = program.buffers[message.buffer.0].dtype;
        let mut parcel = kernel.allocate(dtype, message.address.elements)?;
        kernel.fill(&mut parcel, 1.0)?;
        Ok((message.address, parcel))
    };
    let parcels = |of: &[Message]| of.iter().map(parcel).collect::<Result<Vec<_>>>();
    let mut took = vec![Vec::new(); program.rounds.len()];
    for _ in 0..REPEATS {
        for (round, steps) in program.rounds.iter().enumerate() {
            let made = parcels(&steps.sends).and_then(|sends| {
                let receives = parcels(&steps.receives)?;
                kernel.synchronize()?;
                Ok((sends, receives))
            });
            let (sends, mut receives) = cluster.agree(made)?;
            cluster.wire.begin();
            let outgoing = sends
                .iter()
                .map(|(to, parcel)| Outgoing { to: *to, parcel });
            let outgoing: Vec<Outgoing<'_, K::Buffer>> = outgoing.collect();
            let incoming = receives.iter_mut().map(|(from, parcel)| Incoming {
                from: *from,
                parcel,
            });
            let mut incoming: Vec<Incoming<'_, K::Buffer>> = incoming.collect();
            let begin = Instant::now();
            let mut wire = K::wire(cluster);
            wire.exchange(round, &outgoing, &mut incoming, &mut || {})?;
            kernel.synchronize()?;
            took[round].push(begin.elapsed());
        }
    }
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    Ok(took.into_iter().map(median).collect())
}
