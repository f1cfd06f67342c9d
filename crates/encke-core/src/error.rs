//! The one error of this crate: a request that cannot be met, said before any work starts.
//!
//! Every variant carries the numbers that were wrong, and its message says what to do about them.

use crate::dtype::DType;

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A size that must be at least one was zero.
    #[error("{what} is 0; it must be at least 1")]
    Zero {
        /// The name of the size.
        what: &'static str,
    },
    /// Query heads cannot be shared out evenly over key heads.
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
    /// Segment lengths and dilation rates come in pairs.
    #[error(
        "{segments} segment lengths but {dilations} dilation rates; give one rate for each length"
    )]
    BranchCount {
        /// How many segment lengths were given.
        segments: usize,
        /// How many dilation rates were given.
        dilations: usize,
    },
    /// Group mode hands each branch at least one head.
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
    /// The fkodom compatibility mode exists only for lengths its peer accepts.
    #[error(
        "fkodom mode needs a sequence length that is a multiple of every segment length, as its \
         peer does; {tokens} is no multiple of {segment} (use group mode, which takes any length)"
    )]
    FkodomLength {
        /// Tokens of the sequence.
        tokens: usize,
        /// The segment length that does not divide it.
        segment: usize,
    },
    /// An option that has no meaning in the chosen mode.
    #[error("{what} is not defined in {mode} mode; {hint}")]
    NotInMode {
        /// What was asked for.
        what: &'static str,
        /// The mode it was asked in.
        mode: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// First tokens of an explicit partition must rise from 0 to n.
    #[error(
        "rank {rank} would start at token {first}; first tokens must begin with 0, never fall, \
         and not exceed the {tokens} tokens there are"
    )]
    Partition {
        /// The rank whose first token is out of order.
        rank: usize,
        /// That token.
        first: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// The partition was written for another number of ranks.
    #[error("the partition names {firsts} ranks but {ranks} were asked for; make them agree")]
    PartitionRanks {
        /// First tokens given.
        firsts: usize,
        /// Ranks asked for.
        ranks: usize,
    },
    /// A speed that nobody can be given work by.
    #[error("rank {rank} has speed {speed}; speeds must be 0 or more, and not all 0")]
    Speed {
        /// The rank.
        rank: usize,
        /// Its speed.
        speed: f64,
    },
    /// Sizes of shards that are not all tokens.
    #[error("the sizes {sizes:?} are not the {tokens} tokens there are; they must add up to them")]
    Sizes {
        /// Tokens for each rank.
        sizes: Vec<usize>,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// The softmax scale must be a finite number.
    #[error("the softmax scale is {got}; it must be a finite number")]
    Scale {
        /// The scale.
        got: f64,
    },
    /// A tensor of another shape than the others imply.
    #[error("{tensor} has shape {got:?}, expected {expected:?}")]
    ShapeMismatch {
        /// The tensor's name.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape the other tensors imply.
        expected: Vec<usize>,
    },
    /// Tensors of one call share one storage type.
    #[error("{tensor} is {got} but q is {expected}; convert one of them")]
    DTypeMismatch {
        /// The tensor's name.
        tensor: &'static str,
        /// Its type.
        got: DType,
        /// The type of q.
        expected: DType,
    },
    /// The innermost dimension must be contiguous.
    #[error(
        "the last dimension has stride {stride}; Encke reads [b,n,h,d] tensors of any strides \
         whose last dimension is contiguous (stride 1): make a contiguous copy"
    )]
    InnerStride {
        /// The stride found.
        stride: usize,
    },
    /// A view that would read past its data.
    #[error("a view of shape {dims:?} and strides {strides:?} needs {needed} elements, got {got}")]
    ShortData {
        /// The view's dimensions.
        dims: [usize; 4],
        /// Its strides in elements.
        strides: [usize; 4],
        /// Elements it reaches.
        needed: usize,
        /// Elements there are.
        got: usize,
    },
    /// Sizes whose product does not fit the address space.
    #[error("{what} overflows: the sizes are too large for this machine's address space")]
    Overflow {
        /// What was being computed.
        what: &'static str,
    },
    /// A rank that does not exist.
    #[error("there is no rank {rank}: the ring has {ranks} ranks, numbered from 0")]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// Ranks there are.
        ranks: usize,
    },
    /// Nobody keeps a rank's inputs but other ranks.
    #[error(
        "redundancy {redundancy} on {ranks} ranks: each rank's inputs are kept by as many others, \
         of which there are {}; use a redundancy of at most that, or more ranks", ranks - 1
    )]
    Redundancy {
        /// Other ranks that were to keep each rank's inputs.
        redundancy: usize,
        /// Ranks there are.
        ranks: usize,
    },
    /// Deaths are survived where queries are sharded.
    #[error(
        "redundancy {redundancy} with replicated queries is not supported; use sharded queries"
    )]
    RedundantQueries {
        /// Other ranks that were to keep each rank's inputs.
        redundancy: usize,
    },
    /// A round that takes no distance.
    #[error("a schedule of width 0 moves nothing; use 1 for a ring, or more")]
    NoWidth,
    /// Deaths are survived where keys travel.
    #[error(
        "redundancy {redundancy} with queries that travel in the backward pass is not supported: \
         what is found for them on the way dies with whoever carries it; let keys travel"
    )]
    RedundantRotation {
        /// Other ranks that were to keep each rank's inputs.
        redundancy: usize,
    },
    /// Every rank that had a shard is gone.
    #[error(
        "the tokens of rank {shard} are lost: it died, and so did every rank that kept its inputs \
         ({keepers:?}); start the call again, with a higher redundancy"
    )]
    LostShard {
        /// The rank whose tokens they were.
        shard: usize,
        /// The ranks that kept its inputs.
        keepers: Vec<usize>,
    },
    /// A name that is none of the known ones.
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

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
