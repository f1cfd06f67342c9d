//! The options of a ring: ranks, sharding, schedule. They change results only by rounding.

use anyhow::{Result, bail};
use clap::Args;
use encke::cost::Machine;
use encke::tune::MachineSource;
use encke::{Auto, Balance, Bits, Builder, Cut, Queries, Rotating, Schedule};
use encke_lab::number::{bytes, count};

/// Ranks, sharding and schedule.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Ring (results differ by rounding only)")]
pub struct RingOptions {
    /// Number of ranks: threads for `attend`, any devices for `plan`; auto takes the number that is
    /// predicted to be fastest [default: 1].
    #[arg(long, value_name = "P", value_parser = open(count))]
    ranks: Option<Open<usize>>,

    /// How tokens are cut into shards: contiguous, zigzag (equal work under a causal mask), striped
    /// (rank a owns every p-th token from a on), balanced (contiguous, with equal work under any
    /// mask), documents (long documents in zigzag, short ones whole), each rank's first token, as
    /// in 0,100,250, or auto [default: contiguous].
    #[arg(long, value_name = "CUT", value_parser = open(cut_name))]
    sharding: Option<Open<CutName>>,

    /// Whether queries are sharded (each rank holds those of its own tokens; keys and values
    /// rotate), replicated (every rank holds all of them, and all of the output; keys and values
    /// stay), or auto [default: sharded].
    #[arg(long, value_name = "HOW", value_parser = open(queries))]
    queries: Option<Open<Queries>>,

    /// How parcels rotate: ring (one at a time), N at a time (side by side, as one job; needs more
    /// memory), gather (all at once), two-level:G (inside nodes of G ranks, and from node to node
    /// once a turn, in pieces), heads:G (G ranks divide the heads, and rings pass between such
    /// groups), both with G from --node unless given, or auto [default: ring].
    #[arg(long, value_name = "HOW", value_parser = open(schedule_name))]
    schedule: Option<Open<ScheduleName>>,

    /// What rotates in the backward pass: keys (k and v, with dk and dv), queries (q and dout, with
    /// dq: fewer bytes unless heads share keys), or auto [default: keys]. It has no effect on a
    /// forward pass alone.
    #[arg(long, value_name = "WHAT", value_parser = open(rotate))]
    rotate: Option<Open<Rotating>>,

    /// What the bits of results may depend on: planned (the ring, the fastest), invariant (the call
    /// alone: the same bits on every contiguous ring), or invariant:TILE, on tiles of 32, 64, 128
    /// or 256 rows instead of 512 [default: planned].
    #[arg(long, value_name = "WHAT", value_parser = bits)]
    bits: Option<Bits>,

    /// Number of other ranks that keep each rank's inputs, so that the call survives when a rank
    /// dies [default: 0].
    #[arg(long, value_name = "R", value_parser = count)]
    redundancy: Option<usize>,

    /// With auto, the largest ring to consider [default: 8, or the number of cores if larger].
    #[arg(long, value_name = "P", value_parser = count)]
    most_ranks: Option<usize>,

    /// With auto, the memory limit of a rank: 2GiB, 512MiB, 4e9 [default: no limit].
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory_per_rank: Option<usize>,

    /// With auto, use one device for sequences below so many tokens [default: as predicted].
    #[arg(long, value_name = "N", value_parser = count)]
    one_device_below: Option<usize>,
}

/// An option that is given, or `auto`.
#[derive(Debug, Clone)]
pub enum Open<T> {
    /// Chosen by the cost model.
    Auto,
    /// This value.
    Given(T),
}

impl<T: Clone> Open<T> {
    /// The given value; `None` for `auto` and for an absent option.
    fn given(of: &Option<Open<T>>) -> Option<T> {
        match of {
            Some(Open::Given(value)) => Some(value.clone()),
            Some(Open::Auto) | None => None,
        }
    }

    fn is_auto(of: &Option<Open<T>>) -> bool {
        matches!(of, Some(Open::Auto))
    }
}

/// A parser of `auto`, or of what `parse` accepts.
pub fn open<T>(
    parse: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<Open<T>, String> + Clone + Send + Sync + 'static
where
    T: 'static,
{
    move |text| match text {
        "auto" => Ok(Open::Auto),
        text => match parse(text) {
            Ok(value) => Ok(Open::Given(value)),
            Err(error) => Err(format!("{error}; or auto")),
        },
    }
}

/// Parses how queries are held.
pub fn queries(text: &str) -> Result<Queries, String> {
    match text {
        "sharded" => Ok(Queries::Sharded),
        "replicated" => Ok(Queries::Replicated),
        _ => Err("write sharded or replicated".to_string()),
    }
}

/// How parcels rotate.
#[derive(Debug, Clone, Copy)]
enum ScheduleName {
    /// So many at a time.
    Width(usize),
    /// In two levels, with the ranks of a node; `None`: those of the described machine.
    TwoLevel(Option<usize>),
    /// With heads divided among the ranks of a group; `None`: a node of the described machine.
    Heads(Option<usize>),
}

/// Parses the name of a schedule, or a number.
fn schedule_name(text: &str) -> Result<ScheduleName, String> {
    let error = || {
        "write ring, gather, two-level:G or heads:G with the ranks of a node, or the number of \
         parcels at a time, from 1"
            .to_string()
    };
    let positive = |text: &str| count(text).ok().filter(|number| *number > 0);
    match (text, text.split_once(':')) {
        ("ring", _) => Ok(ScheduleName::Width(Schedule::RING.width)),
        ("gather", _) => Ok(ScheduleName::Width(Schedule::GATHER.width)),
        ("two-level", _) => Ok(ScheduleName::TwoLevel(None)),
        ("heads", _) => Ok(ScheduleName::Heads(None)),
        (_, Some((name @ ("two-level" | "heads"), node))) => {
            let node = Some(positive(node).ok_or_else(error)?);
            Ok(match name {
                "heads" => ScheduleName::Heads(node),
                _ => ScheduleName::TwoLevel(node),
            })
        }
        (number, _) => {
            let width = positive(number).ok_or_else(error)?;
            Ok(ScheduleName::Width(width))
        }
    }
}

/// The ranks of a node, or what to write.
fn in_node(name: &str, ranks: Option<usize>) -> Result<usize> {
    match ranks {
        Some(ranks) => Ok(ranks),
        None => {
            bail!("--schedule {name} needs the ranks of a node here; write {name}:8 for nodes of 8")
        }
    }
}

/// Parses what bits may depend on.
pub fn bits(text: &str) -> Result<Bits, String> {
    text.parse::<Bits>().map_err(|error| error.to_string())
}

fn rotate(text: &str) -> Result<Rotating, String> {
    match text {
        "keys" => Ok(Rotating::Keys),
        "queries" => Ok(Rotating::Queries),
        _ => Err("write keys or queries".to_string()),
    }
}

/// How tokens are cut.
#[derive(Debug, Clone)]
enum CutName {
    Cut(Cut),
    /// The cut follows from the pattern.
    Balanced(Balance),
}

impl CutName {
    /// The cut; a balanced one is contiguous until the pattern is known.
    fn cut(of: &Option<Open<CutName>>) -> Cut {
        match of {
            Some(Open::Given(CutName::Cut(cut))) => cut.clone(),
            _ => Cut::Contiguous,
        }
    }
}

fn cut_name(text: &str) -> Result<CutName, String> {
    match text {
        "balanced" => Ok(CutName::Balanced(Balance::Contiguous)),
        "documents" => Ok(CutName::Balanced(Balance::Documents)),
        text => cut(text).map(CutName::Cut),
    }
}

/// Parses the name of a cut, or the first tokens of the ranks.
pub fn cut(text: &str) -> Result<Cut, String> {
    Ok(match text {
        "contiguous" => Cut::Contiguous,
        "zigzag" => Cut::Zigzag,
        "striped" => Cut::Striped,
        firsts => {
            let firsts: Result<Vec<usize>, String> = firsts.split(',').map(count).collect();
            Cut::Firsts(firsts.map_err(
                |_| "write contiguous, zigzag, striped, or each rank's first token: 0,100,250",
            )?)
        }
    })
}

impl RingOptions {
    /// The number of ranks, if one was given.
    pub fn ranks(&self) -> Option<usize> {
        Open::given(&self.ranks)
    }

    /// Whether any option is `auto`.
    pub fn any_auto(&self) -> bool {
        let ring = Open::is_auto(&self.ranks) || Open::is_auto(&self.sharding);
        let schedule = Open::is_auto(&self.schedule) || Open::is_auto(&self.rotate);
        ring || schedule || Open::is_auto(&self.queries)
    }

    /// Sets options that were not given to `auto`.
    pub fn default_to_auto(&mut self) {
        self.ranks.get_or_insert(Open::Auto);
        self.sharding.get_or_insert(Open::Auto);
        self.schedule.get_or_insert(Open::Auto);
        self.rotate.get_or_insert(Open::Auto);
    }

    /// Whether the cut lists first tokens, which determines the number of ranks.
    pub fn gives_first_tokens(&self) -> bool {
        matches!(CutName::cut(&self.sharding), Cut::Firsts(_))
    }

    /// Whether the options determine the number of ranks.
    pub fn gives_ranks(&self) -> bool {
        self.ranks.is_some() || self.gives_first_tokens()
    }

    /// Whether the number of ranks is left to `auto`.
    pub fn leaves_ranks_open(&self) -> bool {
        Open::is_auto(&self.ranks)
    }

    /// Whether the cut follows from the work of the pattern.
    pub fn balances(&self) -> bool {
        matches!(self.sharding, Some(Open::Given(CutName::Balanced(_))))
    }

    /// Whether queries rotate in the backward pass.
    pub fn rotates_queries(&self) -> bool {
        matches!(self.rotate, Some(Open::Given(Rotating::Queries)))
    }

    /// Whether bits do not depend on the ring.
    pub fn has_invariant_bits(&self) -> bool {
        self.bits.is_some_and(|bits| !bits.is_planned())
    }

    /// Whether every rank holds all queries.
    pub fn replicates(&self) -> bool {
        matches!(self.queries, Some(Open::Given(Queries::Replicated)))
    }

    /// Whether the call survives deaths of ranks.
    pub fn survives(&self) -> bool {
        self.redundancy.is_some_and(|redundancy| redundancy > 0)
    }

    /// Applies the options to a builder, with `auto` decided for this machine. `most` is the
    /// largest ring that the command supports, and `reason` is why.
    pub fn apply(&self, builder: Builder, most: usize, reason: &str) -> Result<Builder> {
        let builder = self.apply_given(builder, most, reason, None)?;
        match self.any_auto() {
            true => Ok(builder.auto(self.auto(Auto::here()?, most))),
            false => Ok(builder),
        }
    }

    /// Applies the options to a builder, with `auto` decided for a given machine.
    pub fn apply_on(
        &self,
        builder: Builder,
        most: usize,
        reason: &str,
        (machine, source): (Machine, MachineSource),
    ) -> Result<Builder> {
        let node = Some(machine.ranks_per_node);
        let builder = self.apply_given(builder, most, reason, node)?;
        if !self.any_auto() {
            return Ok(builder);
        }
        let auto = Auto::on(machine, source);
        Ok(builder.auto(self.auto(auto, most)))
    }

    /// Which decisions are left to `auto`, and their limits.
    fn auto(&self, auto: Auto, most: usize) -> Auto {
        Auto {
            ranks: Open::is_auto(&self.ranks),
            cut: Open::is_auto(&self.sharding),
            queries: Open::is_auto(&self.queries),
            width: Open::is_auto(&self.schedule),
            rotate: Open::is_auto(&self.rotate),
            most_ranks: self.most_ranks.unwrap_or(auto.most_ranks.min(most)).max(1),
            memory_limit: self.memory_per_rank,
            one_device_below: self.one_device_below,
            ..auto
        }
    }

    /// Whether a schedule was given, or left to `auto`.
    pub fn gives_schedule(&self) -> bool {
        self.schedule.is_some()
    }

    /// Applies the given options alone, with `node` ranks in a node of a described machine.
    fn apply_given(
        &self,
        builder: Builder,
        most: usize,
        reason: &str,
        node: Option<usize>,
    ) -> Result<Builder> {
        let cut = CutName::cut(&self.sharding);
        let given = self.most_ranks.is_some()
            || self.memory_per_rank.is_some()
            || self.one_device_below.is_some();
        if given && !self.any_auto() {
            bail!(
                "--most-ranks, --memory-per-rank and --one-device-below limit auto; add \
                 --ranks auto"
            );
        }
        let of_ranks = self.most_ranks.is_some() || self.one_device_below.is_some();
        if of_ranks && !self.leaves_ranks_open() {
            bail!(
                "--most-ranks and --one-device-below limit the choice of --ranks auto, but the \
                 number of ranks is given; leave it open, or leave them out"
            );
        }
        let ranks = match (&cut, self.ranks()) {
            (_, Some(ranks)) => ranks,
            (Cut::Firsts(firsts), None) => firsts.len(),
            (_, None) => 1,
        };
        if ranks > most {
            bail!("{ranks} ranks are too many: {reason}; use at most {most}");
        }
        self.set(builder, ranks, cut, node)
    }

    /// Applies the options to a builder whose ranks are the processes of an MPI job.
    #[cfg(feature = "mpi")]
    pub fn apply_to(&self, builder: Builder, processes: usize) -> Result<Builder> {
        if self.any_auto() {
            bail!(
                "auto decides for threads, but {processes} processes were started, each one rank; \
                 leave --ranks out and name the cut (encke plan --explain proposes one)"
            );
        }
        if let Some(ranks) = self.ranks().filter(|ranks| *ranks != processes) {
            bail!(
                "--ranks {ranks}, but {processes} processes were started, and each is one rank; \
                 leave --ranks out or start as many processes"
            );
        }
        let cut = CutName::cut(&self.sharding);
        if let Cut::Firsts(firsts) = &cut
            && firsts.len() != processes
        {
            bail!(
                "--sharding names the first tokens of {} ranks, but {processes} processes were \
                 started; name as many",
                firsts.len()
            );
        }
        self.set(builder, processes, cut, None)
    }

    fn set(
        &self,
        builder: Builder,
        ranks: usize,
        cut: Cut,
        node: Option<usize>,
    ) -> Result<Builder> {
        let queries = Open::given(&self.queries).unwrap_or(Queries::Sharded);
        let redundancy = self.redundancy.unwrap_or(0);
        let schedule = match Open::given(&self.schedule) {
            None => Schedule::RING,
            Some(ScheduleName::Width(width)) => Schedule::RING.with_width(width),
            Some(ScheduleName::TwoLevel(given)) => {
                let node = in_node("two-level", given.or(node))?;
                Schedule::RING.with_node(node)
            }
            Some(ScheduleName::Heads(given)) => {
                let group = in_node("heads", given.or(node))?;
                Schedule::RING.with_heads(group)
            }
        };
        let backward = Open::given(&self.rotate).unwrap_or(Schedule::RING.backward);
        let schedule = schedule.with_backward(backward);
        let balance = match &self.sharding {
            Some(Open::Given(CutName::Balanced(balance))) => Some(*balance),
            _ => None,
        };
        let builder = builder.ranks(ranks).sharding(cut).balanced(balance);
        let builder = builder.queries(queries).schedule(schedule);
        let bits = self.bits.unwrap_or_default();
        Ok(builder.redundancy(redundancy).bits(bits))
    }
}
