//! The options that say where the work is done, shared by all commands that have a ring.
//!
//! What they cannot do is change a result by more than rounding.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use encke::cost::Machine;
use encke::tune::MachineSource;
use encke::{Auto, Builder, Cut, Queries, Rotating, Schedule};

use crate::number::{bytes, count};

/// Who owns which tokens.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Ring (results differ by rounding only)")]
pub struct RingOptions {
    /// How many ranks share the tokens: threads for `attend`, any devices for `plan`; auto takes
    /// what is predicted to be fastest [default: 1].
    #[arg(long, value_name = "P", value_parser = open(count))]
    ranks: Option<Open<usize>>,

    /// How tokens are cut: contiguous, zigzag (even work under a causal mask), striped (rank a
    /// owns every p-th token from a on), each rank's first token, as in 0,100,250, or auto
    /// [default: contiguous].
    #[arg(long, value_name = "CUT", value_parser = open(cut))]
    sharding: Option<Open<Cut>>,

    /// Who holds the queries: sharded (each rank those of its own tokens; keys and values travel),
    /// replicated (every rank all of them, and all of the output; keys and values stay), or auto
    /// [default: sharded].
    #[arg(long, value_name = "WHO", value_parser = open(queries))]
    queries: Option<Open<QueriesName>>,

    /// How parcels go round: ring (one at a time), so many at a time (for more memory: they lie side
    /// by side and are one job), gather (all at once), or auto [default: ring].
    #[arg(long, value_name = "HOW", value_parser = open(width))]
    schedule: Option<Open<usize>>,

    /// Who visits whom in the backward pass: keys (k and v travel, and dk and dv follow), queries
    /// (q and dout travel, and dq follows: fewer bytes unless heads share keys), or auto
    /// [default: keys].
    #[arg(long, value_name = "WHO", value_parser = open(rotate))]
    rotate: Option<Open<Rotating>>,

    /// How many other ranks keep each rank's inputs, so that the call survives when a rank dies
    /// [default: 0].
    #[arg(long, value_name = "R", value_parser = count)]
    redundancy: Option<usize>,

    /// With auto, the largest ring there can be [default: 8, or as many as there are cores].
    #[arg(long, value_name = "P", value_parser = count)]
    most_ranks: Option<usize>,

    /// With auto, what a rank may hold: 2GiB, 512MiB, 4e9 [default: no limit].
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory_per_rank: Option<usize>,

    /// With auto, consider only one device below so many tokens [default: as predicted].
    #[arg(long, value_name = "N", value_parser = count)]
    one_device_below: Option<usize>,
}

/// Something that is given, or left to be decided.
#[derive(Debug, Clone)]
pub enum Open<T> {
    /// To be decided.
    Auto,
    /// This.
    Given(T),
}

impl<T: Clone> Open<T> {
    /// What was given, if something was.
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

/// Reads `auto`, or what `parse` reads.
pub fn open<T>(
    parse: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<Open<T>, String> + Clone + Send + Sync + 'static
where
    T: 'static,
{
    move |text| match text {
        "auto" => Ok(Open::Auto),
        text => parse(text).map(Open::Given),
    }
}

fn queries(text: &str) -> Result<QueriesName, String> {
    QueriesName::from_str(text, false).map_err(|_| "write sharded, replicated or auto".to_string())
}

/// The words for a width, or a number.
fn width(text: &str) -> Result<usize, String> {
    match text {
        "ring" => Ok(Schedule::RING.width),
        "gather" => Ok(Schedule::GATHER.width),
        number => match count(number) {
            Ok(width) if width > 0 => Ok(width),
            _ => Err("write ring, gather, auto, or how many parcels at a time, from 1".to_string()),
        },
    }
}

fn rotate(text: &str) -> Result<Rotating, String> {
    match text {
        "keys" => Ok(Rotating::Keys),
        "queries" => Ok(Rotating::Queries),
        _ => Err("write keys, queries or auto".to_string()),
    }
}

/// Who holds the queries, by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum QueriesName {
    /// Each rank holds those of its own tokens; keys and values travel
    Sharded,
    /// Every rank holds all queries and ends with all of the output; keys and values stay
    Replicated,
}

impl QueriesName {
    /// What the name means.
    pub fn queries(self) -> Queries {
        match self {
            QueriesName::Sharded => Queries::Sharded,
            QueriesName::Replicated => Queries::Replicated,
        }
    }
}

/// The words for a cut, or the first tokens of the ranks.
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
    /// How many ranks were asked for, if any number was.
    pub fn ranks(&self) -> Option<usize> {
        Open::given(&self.ranks)
    }

    /// Whether anything is left to be decided.
    pub fn leaves_open(&self) -> bool {
        let ring = Open::is_auto(&self.ranks) || Open::is_auto(&self.sharding);
        let schedule = Open::is_auto(&self.schedule) || Open::is_auto(&self.rotate);
        ring || schedule || Open::is_auto(&self.queries)
    }

    /// Leaves everything open that was not given.
    pub fn open_all(&mut self) {
        self.ranks.get_or_insert(Open::Auto);
        self.sharding.get_or_insert(Open::Auto);
        self.schedule.get_or_insert(Open::Auto);
        self.rotate.get_or_insert(Open::Auto);
    }

    /// Whether the cut names first tokens, which fixes the number of ranks.
    pub fn gives_first_tokens(&self) -> bool {
        matches!(self.sharding, Some(Open::Given(Cut::Firsts(_))))
    }

    /// Whether the options say how many ranks there are.
    pub fn gives_ranks(&self) -> bool {
        self.ranks.is_some() || self.gives_first_tokens()
    }

    /// Whether every rank is to hold all queries.
    pub fn replicates(&self) -> bool {
        matches!(self.queries, Some(Open::Given(QueriesName::Replicated)))
    }

    /// Whether deaths are to be survived.
    pub fn survives(&self) -> bool {
        self.redundancy.is_some_and(|redundancy| redundancy > 0)
    }

    /// Puts the options into a builder. `most` is the largest ring the command can do, and
    /// `reason` says why.
    pub fn apply(&self, builder: Builder, most: usize, reason: &str) -> Result<Builder> {
        let builder = self.given(builder, most, reason)?;
        match self.leaves_open() {
            true => Ok(builder.auto(self.auto(Auto::here()?, most))),
            false => Ok(builder),
        }
    }

    /// The same, with what is left open decided for a machine.
    pub fn apply_on(
        &self,
        builder: Builder,
        most: usize,
        reason: &str,
        (machine, source): (Machine, MachineSource),
    ) -> Result<Builder> {
        let builder = self.given(builder, most, reason)?;
        if !self.leaves_open() {
            return Ok(builder);
        }
        let auto = Auto::on(machine, source);
        Ok(builder.auto(self.auto(auto, most)))
    }

    /// What is left open, as the options have it.
    fn auto(&self, auto: Auto, most: usize) -> Auto {
        Auto {
            ranks: Open::is_auto(&self.ranks),
            cut: Open::is_auto(&self.sharding),
            queries: Open::is_auto(&self.queries),
            width: Open::is_auto(&self.schedule),
            rotate: Open::is_auto(&self.rotate),
            most_ranks: self.most_ranks.unwrap_or(auto.most_ranks).clamp(1, most),
            memory_limit: self.memory_per_rank,
            one_device_below: self.one_device_below,
            ..auto
        }
    }

    fn given(&self, builder: Builder, most: usize, reason: &str) -> Result<Builder> {
        let cut = Open::given(&self.sharding).unwrap_or(Cut::Contiguous);
        let given = self.most_ranks.is_some()
            || self.memory_per_rank.is_some()
            || self.one_device_below.is_some();
        if given && !self.leaves_open() {
            bail!(
                "--most-ranks, --memory-per-rank and --one-device-below are for what is decided \
                 here; add --ranks auto"
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
        self.put(builder, ranks, cut)
    }

    /// The same where processes are the ranks, so that it is known how many there are.
    #[cfg(feature = "mpi")]
    pub fn apply_to(&self, builder: Builder, processes: usize) -> Result<Builder> {
        if self.leaves_open() {
            bail!(
                "auto decides for threads, and {processes} processes were started, each one rank; \
                 leave --ranks out and name the cut (encke plan --explain proposes one)"
            );
        }
        if let Some(ranks) = self.ranks().filter(|ranks| *ranks != processes) {
            bail!(
                "--ranks {ranks}, but {processes} processes were started, and each is one rank; \
                 leave --ranks out or start as many processes"
            );
        }
        let cut = Open::given(&self.sharding).unwrap_or(Cut::Contiguous);
        if let Cut::Firsts(firsts) = &cut
            && firsts.len() != processes
        {
            bail!(
                "--sharding names the first tokens of {} ranks, but {processes} processes were \
                 started; name as many",
                firsts.len()
            );
        }
        self.put(builder, processes, cut)
    }

    fn put(&self, builder: Builder, ranks: usize, cut: Cut) -> Result<Builder> {
        let queries = Open::given(&self.queries).unwrap_or(QueriesName::Sharded);
        let queries = queries.queries();
        let redundancy = self.redundancy.unwrap_or(0);
        let schedule = Schedule {
            width: Open::given(&self.schedule).unwrap_or(Schedule::RING.width),
            backward: Open::given(&self.rotate).unwrap_or(Schedule::RING.backward),
        };
        let builder = builder.ranks(ranks).sharding(cut).queries(queries);
        let builder = builder.schedule(schedule);
        Ok(builder.redundancy(redundancy))
    }
}

/// A cut in one word.
pub fn words(cut: &Cut) -> &'static str {
    match cut {
        Cut::Contiguous => "contiguous",
        Cut::Firsts(_) => "contiguous, cut as given",
        Cut::Zigzag => "zigzag",
        Cut::Striped => "striped",
    }
}
