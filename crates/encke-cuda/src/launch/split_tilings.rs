//! Few queries, many keys: when their keys are split over the GPU, into how many splits, and the
//! tiles of the program that does it.
//!
//! Nothing is launched here, so that all of it is tested without a GPU. The decision: everything
//! follows from the job's shape and the GPU alone, so that the same call has the same bits.

use encke_core::DType;
use encke_core::job::Job;

use super::mma_tiles::{self, RESERVED};
use crate::arguments;
use crate::masked_job::{JobFeatures, query_tiles};
use crate::program::Program;

/// Splits at most, as in split_merge.cu.
const MOST_SPLITS: usize = 256;
/// Keys of a split at least, and of a split for each row of a tile: below, writing and merging the
/// state of a split takes as long as its keys.
const LEAST_KEYS: usize = 256;
const LEAST_KEYS_PER_ROW: usize = 4;
/// Keys for each query at least: calls with more queries fill tiles of their own.
const KEYS_PER_QUERY: usize = 8;
/// Blocks of keys that starting and ending a thread block is worth.
const OVERHEAD: usize = 2;
/// Rows of the tiles of other kernels.
const OTHER_ROWS: usize = 128;
/// How many times as much work as this kernel does others may do in the same time, where one takes
/// the job that has wgmma, and where none has.
const HOPPER_ADVANTAGE: usize = 3;
const MMA_ADVANTAGE: usize = 2;

/// The warps of a block for head dimensions up to `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SplitShape {
    dim: usize,
    warps: usize,
    /// Warps that have the same rows: a power of two.
    key_warps: usize,
    /// Groups of 16 rows per warp.
    groups: usize,
}

const fn shape(dim: usize, [warps, key_warps, groups]: [usize; 3]) -> SplitShape {
    SplitShape {
        dim,
        warps,
        key_warps,
        groups,
    }
}

/// All shapes; for equal dimension those with fewer rows first.
const SHAPES: &[SplitShape] = &[
    shape(128, [4, 4, 1]),
    shape(128, [4, 4, 2]),
    shape(128, [8, 4, 2]),
    shape(128, [8, 2, 2]),
    shape(256, [4, 4, 1]),
    shape(256, [8, 2, 1]),
    shape(256, [8, 1, 1]),
];

/// Keys of a block and blocks in shared memory, best first.
const STREAMS: &[[usize; 2]] = &[[128, 3], [64, 3], [64, 2], [32, 3], [32, 2]];

/// A program: a shape for certain head dimensions and features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SplitVariant {
    pub shape: SplitShape,
    /// Keys streamed at a time, and such blocks in shared memory.
    pub block: usize,
    pub stages: usize,
    /// Elements of a key and of a value, padded in shared memory to multiples of 16.
    dims: [usize; 2],
    features: JobFeatures,
}

impl SplitShape {
    /// Rows of a tile.
    fn rows(&self) -> usize {
        self.warps / self.key_warps * self.groups * 16
    }

    /// Blocks that fill a multiprocessor: at 255 registers per thread it holds eight warps.
    fn resident(&self) -> usize {
        8 / self.warps
    }

    /// Whether warps can have their shares of a block: whole matrix operands, in registers. Slopes
    /// need some of these.
    fn takes(&self, block: usize, features: JobFeatures) -> bool {
        let (share, most) = (
            block / self.key_warps,
            if features.slopes { 32 } else { 64 },
        );
        share >= 16 && self.groups * share <= most
    }
}

impl SplitVariant {
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.shape.warps as u32 * 32
    }

    /// Shared memory of a block, as the kernel lays it out: the tiles, and then the states of half
    /// of the warps in their place.
    pub fn shared_bytes(&self) -> usize {
        let [key, value] = self.dims.map(|dim| (dim + 8) * 2);
        let ends = 4 * (1 + usize::from(self.features.masked));
        let tiles = self.rows() * (key + ends) + self.stages * self.block * (key + value);
        let words = self.shape.groups * (self.dims[1] / 2 + 4);
        tiles.max(self.shape.warps / 2 * words * 128)
    }

    /// The program for a storage type, with or without 16-byte copies.
    pub fn program(&self, dtype: DType, aligned: bool) -> Program {
        let [key, value] = self.dims;
        let mut program = Program::new("split_forward", FORWARD)
            .stored(dtype)
            .define("HD", key)
            .define("WARPS", self.shape.warps)
            .define("KEY_WARPS", self.shape.key_warps)
            .define("MT", self.shape.groups)
            .define("BLOCK", self.block)
            .define("STAGES", self.stages)
            .define("ALIGNED", u32::from(aligned));
        if value != key {
            program = program.define("VD", value);
        }
        self.features.define(program)
    }
}

const FORWARD: &[fn() -> String] =
    &mma_tiles::forward_texts(|| include_str!("../kernels/split_forward.cu").into());
const MERGE: &[fn() -> String] = &[
    || include_str!("../kernels/arithmetic.cuh").into(),
    || include_str!("../kernels/split_merge.cu").into(),
];

/// The program that merges splits.
pub(crate) fn merge_program(dtype: DType) -> Program {
    Program::new("split_merge", MERGE).stored(dtype)
}

/// The variant for tiles of `rows` rows, or of the most there are, on a GPU whose blocks have
/// `shared_bytes` of shared memory: the first stream that fills a multiprocessor with warps, else
/// the first that fits.
fn choose(
    dims: [usize; 2],
    rows: usize,
    features: JobFeatures,
    shared_bytes: usize,
) -> Option<SplitVariant> {
    let widest = dims[0].max(dims[1]);
    let dim = SHAPES.iter().map(|x| x.dim).find(|dim| widest <= *dim)?;
    let of_dim = || SHAPES.iter().filter(|shape| shape.dim == dim);
    let fits = of_dim().find(|shape| rows <= shape.rows());
    let shape = *fits.or(of_dim().next_back())?;
    let first = |resident: usize| {
        let streams = STREAMS
            .iter()
            .filter(|[block, _]| shape.takes(*block, features));
        let mut all = streams.map(|&[block, stages]| SplitVariant {
            shape,
            block,
            stages,
            dims: dims.map(|dim| dim.next_multiple_of(16)),
            features,
        });
        all.find(|variant| {
            resident * (variant.shared_bytes() + RESERVED) <= shared_bytes + RESERVED
        })
    };
    first(shape.resident()).or_else(|| first(1))
}

/// What a GPU has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuSize {
    pub multiprocessors: usize,
    /// Shared memory of a block.
    pub shared_bytes: usize,
}

/// How the keys of a job are split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitPlan {
    pub variant: SplitVariant,
    /// The heads of each group that shares keys, `group` for each; -1 where it has fewer.
    pub members: Vec<i64>,
    /// Heads of the largest group.
    pub group: usize,
    /// Queries of a tile.
    pub queries: usize,
    pub splits: usize,
    /// Thread blocks.
    pub blocks: usize,
    /// Queries times heads, over all segments and batch entries.
    pub cells: usize,
}

impl SplitPlan {
    /// The plan of a job in bf16 or f16, whose features the mma.sync kernels have; None if other
    /// kernels compute it as fast. `hopper`: whether one of them has wgmma.
    pub fn new(job: &Job, gpu: GpuSize, hopper: bool) -> Option<SplitPlan> {
        let few = job.queries > 0 && job.queries * KEYS_PER_QUERY <= job.keys;
        if !few || job.keys < 2 * LEAST_KEYS || job.dropout.is_some() || job.tiles.is_some() {
            return None;
        }
        let (members, group) = members(job);
        let groups = members.len() / group;
        let (dims, features) = ([job.dim, job.value_dim], JobFeatures::of(job));
        let variant = choose(dims, job.queries * group, features, gpu.shared_bytes)?;
        let queries = variant
            .rows()
            .checked_div(group)
            .filter(|&count| count > 0)?;
        let (tiles, longest) = query_tiles(job, queries);
        let sequences = job.batch * job.segments;
        let units = tiles * groups * sequences;
        let (others, _) = query_tiles(job, OTHER_ROWS);
        let waves = (others * job.heads * sequences).div_ceil(gpu.multiprocessors);
        let advantage = if hopper {
            HOPPER_ADVANTAGE
        } else {
            MMA_ADVANTAGE
        };
        let worth = units * variant.rows() * advantage <= waves * gpu.multiprocessors * OTHER_ROWS;
        if !worth || longest < 2 * LEAST_KEYS {
            return None;
        }
        let splits = splits(&variant, units, longest, gpu.multiprocessors);
        if splits == 1 && group == 1 {
            return None; // nothing is read less often
        }
        let blocks = units * splits;
        let cells = sequences * job.queries * job.heads;
        i32::try_from(blocks.max(cells)).ok()?;
        Some(SplitPlan {
            variant,
            members,
            group,
            queries,
            splits,
            blocks,
            cells,
        })
    }

    /// Groups of heads that share keys.
    pub fn groups(&self) -> usize {
        self.members.len() / self.group
    }

    /// The bytes of the sums of all splits, and of their maxima: denominators take as many.
    pub fn state_bytes(&self, value_dim: usize) -> [usize; 2] {
        [value_dim, 1].map(|width| self.splits * self.cells * width * DType::F32.bytes())
    }

    /// The bytes of the states of all splits.
    pub fn workspace_bytes(&self, value_dim: usize) -> usize {
        let [acc, one] = self.state_bytes(value_dim);
        acc + 2 * one
    }
}

/// The heads of each group that shares keys, padded with -1 to the largest, and its size.
fn members(job: &Job) -> (Vec<i64>, usize) {
    let (table, count) = arguments::groups(&job.k);
    let (starts, heads) = table.split_at(count + 1);
    let of = |group: usize| &heads[starts[group] as usize..starts[group + 1] as usize];
    let most = (0..count).map(|group| of(group).len()).max().unwrap_or(0);
    let padded = |group: usize| {
        let missing = most - of(group).len();
        of(group)
            .iter()
            .copied()
            .chain(std::iter::repeat_n(-1, missing))
    };
    ((0..count).flat_map(padded).collect(), most)
}

/// The number of splits of `units` tiles, of which the longest streams `keys` keys: the one with
/// which the last thread block ends first, if each takes as long as its keys.
fn splits(variant: &SplitVariant, units: usize, keys: usize, multiprocessors: usize) -> usize {
    let slots = multiprocessors * variant.shape.resident();
    let least = LEAST_KEYS.max(LEAST_KEYS_PER_ROW * variant.rows());
    let most = (keys / least).clamp(1, MOST_SPLITS);
    let blocks = keys.div_ceil(variant.block);
    let time =
        |splits: &usize| (units * splits).div_ceil(slots) * (blocks.div_ceil(*splits) + OVERHEAD);
    (1..=most).min_by_key(time).unwrap_or(1)
}

/// Programs that tests compile ahead of time: every shape on every kind of GPU, with types and
/// alignments alternating, plain and masked, and head dimensions that differ.
pub(crate) fn programs() -> Vec<(Program, (i32, i32))> {
    let gpus = [(232_448, (9, 0)), (166_912, (8, 0)), (101_376, (8, 9))];
    let masked = JobFeatures {
        masked: true,
        ..JobFeatures::default()
    };
    let transformed = JobFeatures {
        softcap: true,
        slopes: true,
        ..masked
    };
    let mut all = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        all.push((merge_program(dtype), (9, 0)));
    }
    for (index, shape) in SHAPES.iter().enumerate() {
        let dtype = [DType::Bf16, DType::F16][index % 2];
        for (shared, capability) in gpus {
            let mut push = |dims, features, aligned| {
                if let Some(variant) = choose(dims, shape.rows(), features, shared) {
                    all.push((variant.program(dtype, aligned), capability));
                }
            };
            let dims = [shape.dim; 2];
            push(dims, JobFeatures::default(), true);
            push(dims, transformed, index % 3 != 2);
            if capability == (9, 0) {
                push(dims, masked, true);
                push([shape.dim / 2; 2], JobFeatures::default(), index % 2 == 0);
                push([shape.dim, shape.dim / 2], masked, true);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use encke_core::job::{Band, Mask, Operand, Piece, Window};
    use encke_core::plan::{Plan, Request};
    use encke_core::sharding::Sharding;
    use encke_core::{Pattern, Shape};

    use super::*;

    const H200: GpuSize = GpuSize {
        multiprocessors: 132,
        shared_bytes: 232_448,
    };
    const K: usize = 1024;

    fn rows(row: usize, heads: impl Iterator<Item = usize>) -> Operand {
        Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row,
            heads: heads.collect(),
        }
    }

    /// A job of 128 elements per head, with `heads` heads over `kv_heads`.
    fn job(batch: usize, queries: usize, keys: usize, heads: usize, kv_heads: usize) -> Job {
        let shared = move |head: usize| head * kv_heads / heads * 128;
        Job {
            batch,
            segments: 1,
            queries,
            keys,
            heads,
            dim: 128,
            value_dim: 128,
            q: rows(heads * 128, (0..heads).map(|head| head * 128)),
            k: rows(kv_heads * 128, (0..heads).map(shared)),
            cells: rows(heads, 0..heads),
            delta: None,
            dq: None,
            mask: None,
            transform: None,
            dropout: None,
            scale: 1.0,
            gain: 1.0,
            tiles: None,
        }
    }

    fn plan(job: &Job) -> Option<SplitPlan> {
        SplitPlan::new(job, H200, true)
    }

    #[test]
    fn few_queries_fill_the_gpu_once() {
        for (queries, rows, splits) in [(1, 16, 33), (4, 16, 33), (8, 32, 33), (16, 64, 16)] {
            let plan = plan(&job(1, queries, 128 * K, 32, 8)).expect("few queries");
            assert_eq!((plan.group, plan.groups(), plan.queries), (4, 8, rows / 4));
            assert_eq!(
                (plan.variant.rows(), plan.splits),
                (rows, splits),
                "{queries}"
            );
            let slots = H200.multiprocessors * plan.variant.shape.resident();
            assert!((slots * 9 / 10..=slots).contains(&plan.blocks), "{plan:?}");
            // Less than one part in fifty of the keys, and of a share of the caller's memory.
            let read = 2 * 2 * 128 * 128 * K * 8;
            assert!(plan.workspace_bytes(128) * 50 < read, "{queries}");
        }
        // A chunk of a prefill: two tiles of keys for every head of keys.
        let chunk = plan(&job(1, 64, 128 * K, 32, 8)).expect("a chunk");
        assert_eq!(
            (chunk.variant.rows(), chunk.queries, chunk.splits),
            (128, 32, 8)
        );
    }

    #[test]
    fn calls_that_fill_the_gpu_are_left_to_other_kernels() {
        assert_eq!(plan(&job(1, 16 * K, 16 * K, 16, 16)), None);
        assert_eq!(plan(&job(1, 512, 128 * K, 32, 8)), None);
        assert_eq!(plan(&job(1, 1, 256, 32, 8)), None);
        assert_eq!(plan(&job(1, 100, 600, 2, 2)), None);
        // Nothing to split and no heads to pack.
        assert_eq!(plan(&job(64, 1, 600, 64, 64)), None);
        // Heads that share keys are worth packing where there is nothing to split.
        let batch = plan(&job(64, 1, 4 * K, 32, 8)).expect("packed heads");
        assert_eq!((batch.group, batch.splits), (4, 1));
    }

    #[test]
    fn a_window_is_split_as_far_as_it_reaches() {
        let band = Band {
            window: Window {
                left: Some(2 * K - 1),
                right: Some(0),
            },
            ..Band::causal((128 * K - 1, 1), (0, 1))
        };
        let windowed = Job {
            mask: Some(Mask::Band(band)),
            ..job(1, 1, 128 * K, 32, 8)
        };
        assert_eq!(plan(&windowed).map(|plan| plan.splits), Some(8));
        let piece = |query: usize, first: usize, end: usize| Piece {
            queries: query..query + 1,
            keys: first..end,
            band: None,
        };
        let packed = Job {
            mask: Some(Mask::Documents(
                [piece(0, 0, 1000), piece(1, 1000, 100 * K)].into(),
            )),
            ..job(1, 2, 128 * K, 32, 8)
        };
        let packed = plan(&packed).expect("two documents");
        assert_eq!(packed.blocks, 2 * 8 * packed.splits);
        let narrow = Band {
            window: Window {
                left: Some(127),
                right: Some(0),
            },
            ..band
        };
        let narrow = Job {
            mask: Some(Mask::Band(narrow)),
            ..windowed
        };
        assert_eq!(plan(&narrow), None);
    }

    /// The jobs that a call of one rank consists of, in the order of the plan.
    fn jobs_of_call(pattern: Pattern, batch: usize, queries: usize) -> Vec<Job> {
        let shape = Shape::new(batch, 128 * K, 32, 8, 128).expect("a shape");
        let shape = shape.with_queries(queries).expect("fewer queries");
        let sharding = Sharding::contiguous(1).expect("one rank");
        let request = Request::new(shape, pattern, sharding, DType::Bf16);
        let plan = Plan::new(request).expect("a plan");
        plan.rank(0).expect("its rank").jobs().cloned().collect()
    }

    #[test]
    fn a_call_with_few_queries_is_one_job_whose_keys_are_split() {
        let causal = || Pattern::dense().causal(true);
        for (batch, queries) in [(1, 1), (1, 4), (1, 16), (8, 1), (8, 16)] {
            for pattern in [Pattern::dense(), causal()] {
                let jobs = jobs_of_call(pattern, batch, queries);
                assert_eq!(jobs.len(), 1);
                assert_eq!((jobs[0].queries, jobs[0].keys), (queries, 128 * K));
                let plan = plan(&jobs[0]).expect("few queries");
                assert_eq!((plan.group, plan.groups()), (4, 8));
            }
        }
        let window = Window {
            left: Some(16 * K - 1),
            right: None,
        };
        let streaming = causal().window(window).prefix(4);
        let jobs = jobs_of_call(streaming, 1, 4);
        assert!(jobs.iter().any(|job| plan(job).is_some()), "{jobs:?}");
    }

    #[test]
    fn heads_of_any_group_are_packed() {
        let plan = plan(&job(1, 3, 8 * K, 7, 3)).expect("few queries");
        assert_eq!(plan.group, 3);
        assert_eq!(plan.members, [0, 1, 2, 3, 4, -1, 5, 6, -1]);
        assert_eq!(plan.queries, 5);
        let many = job(1, 1, 8 * K, 200, 1);
        assert_eq!(
            SplitPlan::new(&many, H200, true),
            None,
            "a tile has fewer rows"
        );
    }

    #[test]
    fn every_gpu_has_a_variant_for_dimensions_up_to_128() {
        for (shared, most) in [(232_448, 256), (166_912, 256), (101_376, 128)] {
            for rows in [1, 16, 17, 64, 65, 1000] {
                for (dim, slopes) in (1..=most).flat_map(|dim| [(dim, false), (dim, true)]) {
                    let features = JobFeatures {
                        masked: true,
                        slopes,
                        ..JobFeatures::default()
                    };
                    let variant = choose([dim; 2], rows, features, shared);
                    let variant = variant.unwrap_or_else(|| panic!("{shared} {rows} {dim}"));
                    assert!(variant.shared_bytes() <= shared, "{variant:?}");
                    assert!(rows.min(128) <= variant.rows(), "{variant:?}");
                }
            }
        }
        assert_eq!(choose([257, 8], 1, JobFeatures::default(), 232_448), None);
    }

    #[test]
    fn no_shape_and_no_stream_is_left_unused() {
        let mut found = (HashSet::new(), HashSet::new());
        for (shared, rows) in [232_448, 166_912, 101_376]
            .into_iter()
            .flat_map(|shared| [16, 32, 64, 128].map(|rows| (shared, rows)))
        {
            for dim in 1..=256 {
                if let Some(x) = choose([dim; 2], rows, JobFeatures::default(), shared) {
                    found.0.insert((x.shape.dim, x.rows()));
                    found.1.insert([x.block, x.stages]);
                }
            }
        }
        assert_eq!(found.0.len(), SHAPES.len());
        assert_eq!(found.1.len(), STREAMS.len());
    }
}
