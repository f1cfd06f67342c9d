//! The error of this crate: an invalid request, reported before any work starts.
//!
//! Every variant carries the offending values, and its message says how to correct them.

use crate::dtype::DType;

/// Why a request is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A head dimension that no kernel has room for.
    #[error("{what} is {got}; it must be at most {most}")]
    LargeDim {
        /// Which one.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The largest.
        most: usize,
    },
    /// A size that must be at least one was zero.
    #[error("{what} is 0; it must be at least 1")]
    Zero {
        /// The name of the size.
        what: &'static str,
    },
    /// The key heads do not divide the query heads.
    #[error(
        "{heads} query heads cannot be grouped over {kv_heads} key/value heads; \
         the key/value heads must divide the query heads"
    )]
    HeadGroups {
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
    },
    /// Different numbers of segment lengths and dilation rates.
    #[error(
        "{segments} segment lengths but {dilations} dilation rates; give one rate for each length"
    )]
    BranchCount {
        /// The number of segment lengths.
        segments: usize,
        /// The number of dilation rates.
        dilations: usize,
    },
    /// Group mode with fewer heads than branches.
    #[error(
        "{branches} branches but only {heads} heads; group mode gives each branch at least one \
         head (use fewer branches, or mix mode, where every head has all branches)"
    )]
    MoreBranchesThanHeads {
        /// Branches of the pattern.
        branches: usize,
        /// Query heads.
        heads: usize,
    },
    /// A length that the fkodom package does not accept.
    #[error(
        "fkodom mode needs a sequence length that is a multiple of every segment length, as the \
         fkodom package does; {tokens} is not a multiple of {segment} (use group mode, which takes \
         any length)"
    )]
    FkodomLength {
        /// Tokens of the sequence.
        tokens: usize,
        /// The segment length that does not divide it.
        segment: usize,
    },
    /// An option that the chosen mode does not define.
    #[error("{what} is not defined in {mode} mode; {hint}")]
    NotInMode {
        /// The option.
        what: &'static str,
        /// The mode.
        mode: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// More queries than tokens.
    #[error("{queries} queries but only {tokens} keys; queries are some of the tokens")]
    MoreQueries {
        /// Queries given.
        queries: usize,
        /// Keys given.
        tokens: usize,
    },
    /// A resize of a tensor of fewer queries than keys.
    #[error(
        "{queries} queries for {tokens} keys: a resize moves tensors with a row for every token; \
         gather the others, and shard them again after it"
    )]
    FewerQueries {
        /// Queries given.
        queries: usize,
        /// Keys given.
        tokens: usize,
    },
    /// Queries that stand after the last token.
    #[error(
        "{queries} queries from position {offset} on end after the last of {tokens} tokens; use \
         an offset of at most {}", tokens - queries
    )]
    QueryOffset {
        /// Position of the first query.
        offset: usize,
        /// Queries given.
        queries: usize,
        /// Keys given.
        tokens: usize,
    },
    /// Torchscale's padding where torchscale writes rows to places that are not theirs.
    #[error(
        "torchscale misplaces the rows of a branch with segments of {segment} tokens and rate \
         {dilation} in a sequence of {tokens}: {dilation} does not divide {segment}, and there are \
         several segments; use a segment length that {dilation} divides, or leave torchscale's \
         padding out, which puts every row in its place"
    )]
    MisplacedRows {
        /// The segment length.
        segment: usize,
        /// The dilation rate.
        dilation: usize,
        /// Tokens of the sequence, or of the document.
        tokens: usize,
    },
    /// Two options that exclude each other.
    #[error("{one} and {other} do not go together: {reason}")]
    Excludes {
        /// The first option.
        one: &'static str,
        /// The other option.
        other: &'static str,
        /// Why, and what to do.
        reason: &'static str,
    },
    /// An entry of a padded batch that is longer than the batch.
    #[error(
        "the key length of batch entry {entry} is {length}, but there are {tokens} tokens; give \
         at most that"
    )]
    KeyLength {
        /// The batch entry.
        entry: usize,
        /// Its length.
        length: usize,
        /// Tokens of the batch.
        tokens: usize,
    },
    /// Another number of key lengths than of batch entries.
    #[error("{lengths} key lengths for a batch of {batch}; give one length for each entry")]
    KeyLengthCount {
        /// Lengths given.
        lengths: usize,
        /// Entries of the batch.
        batch: usize,
    },
    /// Documents that do not add up to the sequence.
    #[error(
        "the documents have {got} tokens together, but the sequence has {tokens}; give lengths \
         that add up to it"
    )]
    DocumentTokens {
        /// The sum of the lengths.
        got: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// First tokens of an explicit partition that do not ascend from 0 to n.
    #[error(
        "rank {rank} starts at token {first}; first tokens must begin with 0, must not decrease, \
         and must not exceed the length of {tokens} tokens"
    )]
    Partition {
        /// The rank whose first token is out of order.
        rank: usize,
        /// That token.
        first: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// A partition for another number of ranks.
    #[error(
        "the partition is for {firsts} ranks, but the ring has {ranks}; make the two numbers equal"
    )]
    PartitionRanks {
        /// First tokens given.
        firsts: usize,
        /// Ranks of the ring.
        ranks: usize,
    },
    /// A negative or non-finite speed, or no positive speed at all.
    #[error("rank {rank} has speed {speed}; speeds must be 0 or more, and not all 0")]
    Speed {
        /// The rank.
        rank: usize,
        /// Its speed.
        speed: f64,
    },
    /// Shard sizes that do not add up to the number of tokens.
    #[error(
        "the shard sizes {sizes:?} do not add up to the {tokens} tokens of the sequence; \
         correct them"
    )]
    Sizes {
        /// Tokens of each rank.
        sizes: Vec<usize>,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// A softmax scale that the sums of the type computed in cannot hold.
    #[error(
        "the softmax scale is {got:e}; computing in {dtype} it must be 0, or from {least:.1e} to \
         {most:.1e} in size"
    )]
    Scale {
        /// The scale.
        got: f64,
        /// The type computed in.
        dtype: DType,
        /// The smallest size.
        least: f64,
        /// The largest size.
        most: f64,
    },
    /// A softcap that is not a positive number.
    #[error("the softcap is {got:e}; it must be a positive, finite number")]
    Softcap {
        /// The softcap.
        got: f64,
    },
    /// A probability of dropout outside 0 to 1.
    #[error("the dropout probability is {got}; it must be at least 0 and below 1")]
    Dropout {
        /// The probability.
        got: f64,
    },
    /// Another number of slopes than heads.
    #[error("{got} ALiBi slopes for {heads} query heads; give one slope for each head")]
    SlopeCount {
        /// Slopes given.
        got: usize,
        /// Query heads.
        heads: usize,
    },
    /// A slope that is not finite.
    #[error("the ALiBi slope of head {head} is {got}; slopes must be finite")]
    Slope {
        /// The head.
        head: usize,
        /// Its slope.
        got: f64,
    },
    /// A tensor whose shape does not match the others.
    #[error("{tensor} has shape {got:?}, expected {expected:?}")]
    ShapeMismatch {
        /// The tensor's name.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape the other tensors imply.
        expected: Vec<usize>,
    },
    /// Tensors of one call with different storage types.
    #[error("{tensor} is {got} but q is {expected}; convert one of them")]
    DTypeMismatch {
        /// The tensor's name.
        tensor: &'static str,
        /// Its type.
        got: DType,
        /// The type of q.
        expected: DType,
    },
    /// A view whose innermost dimension is not contiguous.
    #[error(
        "the last dimension has stride {stride}; Encke reads [b,n,h,d] tensors of any strides \
         whose last dimension is contiguous (stride 1): make a contiguous copy"
    )]
    InnerStride {
        /// The stride found.
        stride: usize,
    },
    /// A view that extends past its data.
    #[error("a view of shape {dims:?} and strides {strides:?} needs {needed} elements, got {got}")]
    ShortData {
        /// The view's dimensions.
        dims: [usize; 4],
        /// Its strides in elements.
        strides: [usize; 4],
        /// Elements it needs.
        needed: usize,
        /// Elements of the data.
        got: usize,
    },
    /// Sizes whose product does not fit the address space.
    #[error(
        "{what} overflows: {} is too large for this machine's address space; make one of these \
         sizes smaller",
        factors_text(factors)
    )]
    Overflow {
        /// What was being computed.
        what: &'static str,
        /// The factors of the product.
        factors: Vec<usize>,
    },
    /// A tensor that there is no memory for.
    #[error("there is no memory for a tensor of {bytes} bytes; use a smaller or narrower one")]
    Memory {
        /// The size of the tensor.
        bytes: usize,
    },
    /// More ranks than a ring may have.
    #[error("{ranks} ranks are too many: a ring has at most {most}")]
    TooManyRanks {
        /// Ranks asked for.
        ranks: usize,
        /// Ranks of the largest ring.
        most: usize,
    },
    /// A plan that would take too long to make.
    #[error(
        "the plan would take about {steps} steps to make, {factors}, and the limit is {limit}; \
         make one of these numbers smaller"
    )]
    PlanCost {
        /// Estimated steps.
        steps: u64,
        /// The sizes that they are the product of.
        factors: String,
        /// The largest number of steps.
        limit: u64,
    },
    /// Branches with no cut that all of their tiles allow, for longer than is searched.
    #[error(
        "between tokens {token} and {from} every cut would divide a tile of {tile} rows of some \
         branch, and further ones were not tried; use segment lengths that are multiples of \
         {tile} x their dilation rates, or planned bits"
    )]
    NoSharedCut {
        /// The token from which on cuts were tried, backwards.
        from: usize,
        /// The last one that was tried.
        token: usize,
        /// Rows of a tile.
        tile: usize,
    },
    /// A rank that does not exist.
    #[error("there is no rank {rank}: the ring has {ranks} ranks, numbered from 0")]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// Ranks of the ring.
        ranks: usize,
    },
    /// More replicas than there are other ranks.
    #[error(
        "redundancy {redundancy} on {ranks} ranks: each rank's inputs are replicated on that many \
         other ranks, of which there are {}; use at most that redundancy, or more ranks", ranks - 1
    )]
    Redundancy {
        /// Replicas of each rank's inputs.
        redundancy: usize,
        /// Ranks of the ring.
        ranks: usize,
    },
    /// Redundancy with replicated queries.
    #[error(
        "redundancy {redundancy} with replicated queries is not supported; use sharded queries"
    )]
    RedundantQueries {
        /// Replicas of each rank's inputs.
        redundancy: usize,
    },
    /// A schedule of width 0.
    #[error("a schedule of width 0 moves nothing; use 1 for a ring, or more")]
    NoWidth,
    /// Heads divided among ranks, with something that does not go together.
    #[error("a schedule that divides heads among {group} ranks has no {what}; {hint}")]
    HeadsOption {
        /// Ranks that divide the heads.
        group: usize,
        /// The option.
        what: &'static str,
        /// What to use instead.
        hint: &'static str,
    },
    /// A schedule of two levels with something it does not do.
    #[error("a schedule of two levels (nodes of {node} ranks) has no {what}; {hint}")]
    NodeOption {
        /// Ranks in a node.
        node: usize,
        /// The option.
        what: &'static str,
        /// What to use instead.
        hint: &'static str,
    },
    /// Redundancy with queries that rotate in the backward pass.
    #[error(
        "redundancy {redundancy} with queries that rotate in the backward pass is not supported: \
         a rank that dies takes partial dq of other ranks with it; rotate keys instead"
    )]
    RedundantRotation {
        /// Replicas of each rank's inputs.
        redundancy: usize,
    },
    /// A name of [`Bits`](crate::Bits) that does not exist.
    #[error("bits = {got} is unknown; use planned, invariant, or invariant:TILE")]
    BitsName {
        /// The name.
        got: String,
    },
    /// Tiles that kernels do not compute in one step.
    #[error(
        "bits = invariant on tiles of {got} rows is not supported; \
         use a power of two from {least} to {most}"
    )]
    BitsTile {
        /// Rows of a tile.
        got: usize,
        /// The fewest.
        least: usize,
        /// The most.
        most: usize,
    },
    /// A sharding that divides a tile.
    #[error(
        "bits = invariant cannot cut the sequence before token {cut}: the segment that begins at \
         token {start} has tiles of {tile} rows with dilation {dilation}, so cut at token \
         {lower} or {upper}, or use smaller tiles"
    )]
    BitsCut {
        /// The first token of a rank.
        cut: usize,
        /// The first token of the segment.
        start: usize,
        /// Rows of a tile.
        tile: usize,
        /// Tokens from one row to the next.
        dilation: usize,
        /// The nearest cut of the segment before it.
        lower: usize,
        /// The nearest one after it.
        upper: usize,
    },
    /// A sharding whose ranks do not follow one another.
    #[error(
        "bits = invariant needs one contiguous shard per rank, in the order of the ranks; the \
         tokens of rank {rank} are not (use a contiguous sharding)"
    )]
    BitsSharding {
        /// The rank.
        rank: usize,
    },
    /// An option that has an order of sums of its own.
    #[error("bits = invariant is not available with {what}; {hint}")]
    BitsOption {
        /// The option.
        what: &'static str,
        /// What to use instead.
        hint: &'static str,
    },
    /// Every rank that held a shard is gone.
    #[error(
        "the tokens of rank {shard} are lost: it died, and so did every rank with a replica of its \
         inputs ({keepers:?}); start the call again, with a higher redundancy"
    )]
    LostShard {
        /// The rank that owned the tokens.
        shard: usize,
        /// The ranks that held replicas.
        keepers: Vec<usize>,
    },
    /// An unknown name.
    #[error("unknown {what} {got:?}; known: {known}")]
    Unknown {
        /// What kind of name.
        what: &'static str,
        /// The name.
        got: String,
        /// The known names.
        known: &'static str,
    },
}

fn factors_text(factors: &[usize]) -> String {
    let factors: Vec<String> = factors.iter().map(usize::to_string).collect();
    factors.join(" x ")
}

/// The product of some sizes, at most `isize::MAX`; `what` names it in the error.
pub fn product(what: &'static str, factors: &[usize]) -> Result<usize> {
    let mut each = factors.iter();
    each.try_fold(1usize, |product, &size| product.checked_mul(size))
        .filter(|&product| product <= isize::MAX as usize)
        .ok_or_else(|| Error::Overflow {
            what,
            factors: factors.to_vec(),
        })
}

/// The largest estimate of the steps of a plan: seconds, and at most a few GiB.
pub const PLAN_STEPS: u64 = 1 << 28;

/// Refuses a plan of too many steps, the product of some sizes with their names.
pub(crate) fn check_steps(factors: &[(usize, &str)]) -> Result<()> {
    let product = |steps: u64, &(size, _): &(usize, &str)| steps.saturating_mul(size as u64);
    let steps = factors.iter().fold(1, product);
    if steps <= PLAN_STEPS {
        return Ok(());
    }
    let named = factors.iter().map(|(size, name)| format!("{size} {name}"));
    Err(Error::PlanCost {
        steps,
        factors: named.collect::<Vec<_>>().join(" x "),
        limit: PLAN_STEPS,
    })
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
