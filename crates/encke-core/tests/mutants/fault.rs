//! The faults that mutants have.

/// The fault of a mutant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KernelFault {
    /// None: the wrapper itself must pass.
    None,
    /// Keys and queries are exchanged in the causal test.
    CausalSignFlipped,
    /// The causal test compares rows instead of positions.
    CausalOnIndices,
    /// There is no causal test.
    CausalIgnored,
    /// Weights are relative to the row max before the scale is multiplied into it and rounded.
    MaxNotRounded,
    /// The accumulator is not rescaled when the row max increases.
    OldPartNotRescaled,
    /// Every job starts with an empty carry.
    CarryReset,
    /// The denominator gets an epsilon.
    FinishEpsilon,
    /// A row without keys gets an lse of 0.
    EmptyLseZero,
    /// The gain is applied after the softmax but not to its gradient.
    FinishIgnoresGain,
    /// A row without keys contributes to gradients.
    EmptyRowsContribute,
    /// The gradient ignores the gain.
    BackwardIgnoresGain,
    /// delta ignores the gradient of the lse.
    DeltaIgnoresDlse,
    /// Heads read the keys of other heads.
    WrongKvHead,
    /// The softmax scale is missing in dk.
    DkUnscaled,
    /// dq is overwritten.
    DqOverwritten,
    /// dk and dv are overwritten.
    DkOverwritten,
    /// dq is written at the addresses of q, even if the job has others.
    DqWhereQIs,
    /// delta is read at the addresses of the other cells, even if the job has others.
    DeltaWhereCellsAre,
    /// One row too many is written.
    OneRowPast,
    /// Masked keys contribute with a weight of 0, and 0 times infinity is NaN.
    MaskedKeysPoison,
    /// Queries that do not see a key contribute to its gradient with a weight of 0.
    MaskedQueriesPoison,
    /// The merge of two carries keeps the row max of the target.
    MergeKeepsMaximum,
    /// A job that starts and finishes ignores the gain.
    AttendIgnoresGain,
    /// A job that starts and finishes does not write rows without keys.
    AttendLeavesEmptyCells,
    /// A starting job reads the carry.
    BeginReadsCarry,
    /// A starting job does not write rows without keys.
    BeginLeavesEmptyCells,
    /// A finishing job ignores the carry.
    ConcludeForgetsCarry,
    /// A finishing job ignores the gain.
    ConcludeIgnoresGain,
    /// A finishing job does not write rows that see none of its own keys.
    ConcludeLeavesUnseen,
    /// Rows are copied instead of added.
    CopyIgnoresAdd,
    /// Runs are read without their stride.
    UploadIgnoresStride,
    /// Windows reach one position too far before the query.
    WindowLongerOnTheLeft,
    /// Windows reach one position too far after the query.
    WindowLongerOnTheRight,
    /// Windows have no limit before the query.
    WindowIgnored,
    /// The first query row of a document belongs to the document before it.
    DocumentEndsLate,
    /// Slopes are multiplied by the distance of rows instead of positions.
    SlopesByRow,
    /// Slopes are added.
    SlopesAdded,
    /// The backward pass ignores the softcap.
    BackwardIgnoresSoftcap,
    /// Coins are drawn by row instead of position.
    CoinByIndex,
    /// Coins are the same in every segment.
    CoinIgnoresSegment,
    /// Coins are the same in every batch entry.
    CoinIgnoresBatch,
    /// Coins are the same in every document.
    CoinIgnoresDocument,
    /// Coins are drawn by the head of the job instead of the head of the call.
    CoinOfLocalHead,
    /// Dropped pairs are left out of the denominator.
    DroppedLeavesDenominator,
    /// Dropped pairs contribute with a weight of 0, and 0 times infinity is NaN.
    DroppedValuesPoison,
    /// The backward pass ignores dropout.
    BackwardIgnoresCoin,
    /// Values are read at the addresses of keys, whatever their width is.
    ValuesWhereKeysAre,
}

/// All faults but `None`.
pub const FAULTS: [KernelFault; 47] = [
    KernelFault::CausalSignFlipped,
    KernelFault::CausalOnIndices,
    KernelFault::CausalIgnored,
    KernelFault::MaxNotRounded,
    KernelFault::OldPartNotRescaled,
    KernelFault::CarryReset,
    KernelFault::FinishEpsilon,
    KernelFault::EmptyLseZero,
    KernelFault::FinishIgnoresGain,
    KernelFault::EmptyRowsContribute,
    KernelFault::BackwardIgnoresGain,
    KernelFault::DeltaIgnoresDlse,
    KernelFault::WrongKvHead,
    KernelFault::DkUnscaled,
    KernelFault::DqOverwritten,
    KernelFault::DkOverwritten,
    KernelFault::DqWhereQIs,
    KernelFault::DeltaWhereCellsAre,
    KernelFault::OneRowPast,
    KernelFault::MaskedKeysPoison,
    KernelFault::MaskedQueriesPoison,
    KernelFault::MergeKeepsMaximum,
    KernelFault::AttendIgnoresGain,
    KernelFault::AttendLeavesEmptyCells,
    KernelFault::BeginReadsCarry,
    KernelFault::BeginLeavesEmptyCells,
    KernelFault::ConcludeForgetsCarry,
    KernelFault::ConcludeIgnoresGain,
    KernelFault::ConcludeLeavesUnseen,
    KernelFault::CopyIgnoresAdd,
    KernelFault::UploadIgnoresStride,
    KernelFault::WindowLongerOnTheLeft,
    KernelFault::WindowLongerOnTheRight,
    KernelFault::WindowIgnored,
    KernelFault::DocumentEndsLate,
    KernelFault::SlopesByRow,
    KernelFault::SlopesAdded,
    KernelFault::BackwardIgnoresSoftcap,
    KernelFault::CoinByIndex,
    KernelFault::CoinIgnoresSegment,
    KernelFault::CoinIgnoresBatch,
    KernelFault::CoinIgnoresDocument,
    KernelFault::CoinOfLocalHead,
    KernelFault::DroppedLeavesDenominator,
    KernelFault::DroppedValuesPoison,
    KernelFault::BackwardIgnoresCoin,
    KernelFault::ValuesWhereKeysAre,
];
