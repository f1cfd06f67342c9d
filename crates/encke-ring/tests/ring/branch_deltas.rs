//! Backward passes that are given the delta of each branch: the gradient with constant mixing
//! weights.

use encke_core::conformance::{CallTensors, Random, random_mask};
use encke_core::kernel::Kernel;
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::Role;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::reference;
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor};
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;

use crate::support::{DEADLINE, difference};

/// A random pattern of several branches, with a mask.
struct Branches {
    lengths: Vec<usize>,
    rates: Vec<usize>,
    offsets: OffsetRule,
    shape: Shape,
    seed: u64,
}

impl Branches {
    fn random(seed: u64) -> Branches {
        let mut random = Random::new(seed);
        let kv_heads = random.pick(&[1, 2, 3]);
        let heads = kv_heads * random.pick(&[1, 2, 4]);
        let tokens = 1 + random.below(90);
        let shape = Shape::new(1 + random.below(2), tokens, heads, kv_heads, 4);
        let count = 1 + random.below(4);
        Branches {
            lengths: (0..count).map(|_| 1 + random.below(100)).collect(),
            rates: (0..count).map(|_| random.pick(&[1, 2, 3, 4, 8])).collect(),
            offsets: random.pick(&[OffsetRule::HeadMod, OffsetRule::HeadBlock]),
            shape: shape.expect("a shape").with_value_dim(3).expect("a width"),
            seed,
        }
    }

    fn pattern(&self, of: std::ops::Range<usize>, gradient: MixingGradient) -> Pattern {
        let mode = Mode::Mix {
            offsets: self.offsets,
            gradient,
        };
        let pattern = Pattern::dilated(&self.lengths[of.clone()], &self.rates[of], mode);
        let mut random = Random::new(self.seed ^ 0x3a5c);
        random_mask(&mut random, pattern.expect("a pattern"), self.shape.tokens)
    }

    fn all(&self, gradient: MixingGradient) -> Pattern {
        self.pattern(0..self.lengths.len(), gradient)
    }

    /// dout·out − dlse of each branch with its own out, in the slots of `plan`.
    fn deltas(&self, plan: &Plan, tensors: &CallTensors, [q, k, v]: &[Vec<f64>; 3]) -> Tensor {
        let Shape {
            batch,
            tokens,
            heads,
            value_dim,
            ..
        } = self.shape;
        let slots = plan.delta_slots();
        let (dout, dlse) = (tensors.dout.to_f64(), tensors.dlse.to_f64());
        // Cells of no branch are not read.
        let mut deltas = vec![f64::NAN; batch * tokens * slots];
        let of_branches = plan.request().pattern.delta_slots(heads);
        for (branch, of_heads) in of_branches.into_iter().enumerate() {
            let pattern = self.pattern(branch..branch + 1, MixingGradient::Exact);
            let scores = plan.request().scores();
            let own = reference::forward(&self.shape, &pattern, scores, q, k, v);
            let own = own.expect("a legal call");
            for (row, (head, slot)) in (0..batch * tokens).flat_map(|row| {
                let of_heads = of_heads.iter();
                of_heads.map(move |of| (row, *of))
            }) {
                let cell = row * heads + head;
                if own.lse[cell] == f64::NEG_INFINITY {
                    continue;
                }
                let at = |c: usize| cell * value_dim + c;
                let product: f64 = (0..value_dim).map(|c| dout[at(c)] * own.out[at(c)]).sum();
                let delta = &mut deltas[row * slots + slot];
                assert!(delta.is_nan(), "two heads of a branch have one slot");
                *delta = product - dlse[cell];
            }
        }
        Tensor::from_f64(DType::F64, [batch, tokens, slots, 1], &deltas).expect("sizes agree")
    }

    fn check<K: Kernel>(&self, ring: &ThreadRing<K>, ranks: usize, cut: Cut) {
        let shape = &self.shape;
        let sharding = Sharding::new(ranks, cut).expect("a sharding");
        let pattern = self.all(MixingGradient::Exact);
        let request = Request {
            pass: Pass::BackwardByBranch,
            ..Request::new(*shape, pattern.clone(), sharding, DType::F64)
        };
        let plan = Plan::new(request.clone()).expect("a plan");
        let tensors = CallTensors::random(shape, self.seed);
        let qkv = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
        let [q, k, v] = &qkv;
        let scores = request.scores();
        let forward = reference::forward(shape, &pattern, scores.clone(), q, k, v);
        let lse = forward.expect("a legal call").lse;
        let dims = [shape.batch, shape.tokens, shape.heads, 1];
        let lse = Tensor::from_f64(DType::F64, dims, &lse).expect("sizes agree");
        let deltas = self.deltas(&plan, &tensors, &qkv);
        let inputs = [
            (Role::Q, tensors.q.view()),
            (Role::K, tensors.k.view()),
            (Role::V, tensors.v.view()),
            (Role::Lse, lse.view()),
            (Role::Dout, tensors.dout.view()),
            (Role::Delta, deltas.view()),
        ];
        let mut got = ring.run(&request, &inputs).expect("a right call");
        let detached = self.all(MixingGradient::Detached);
        let (dout, dlse) = (tensors.dout.to_f64(), tensors.dlse.to_f64());
        let expected = reference::backward(shape, &detached, scores, q, k, v, &dout, Some(&dlse));
        let expected = expected.expect("a legal call");
        for (role, expected) in [
            (Role::Dq, &expected.dq),
            (Role::Dk, &expected.dk),
            (Role::Dv, &expected.dv),
        ] {
            let got = got.take(role).expect("a backward pass returns gradients");
            let error = difference(&got, expected);
            let of = (self.seed, ranks, &self.lengths, &self.rates);
            assert!(error < 1e-12, "{role:?} is off by {error:e} in {of:?}");
        }
    }
}

#[test]
fn gradients_with_constant_weights_are_those_of_the_reference_on_any_ring() {
    let naive = ThreadRing::new(NaiveKernel, DEADLINE);
    let fast = ThreadRing::new(CpuKernel::new().expect("a kernel"), DEADLINE);
    for seed in 0..120 {
        let case = Branches::random(seed);
        let ranks = 1 + (seed as usize % 5).min(case.shape.tokens - 1);
        let cut = match seed % 3 {
            0 => Cut::Zigzag,
            1 => Cut::Striped,
            _ => Cut::Contiguous,
        };
        case.check(&naive, ranks, cut.clone());
        case.check(&fast, ranks, cut);
    }
}

#[test]
fn heads_that_select_different_tokens_share_a_slot() {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadBlock,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[16, 32, 64], &[1, 2, 4], mode).expect("a pattern");
    let of_branch = |slots: [usize; 4]| slots.into_iter().enumerate().collect::<Vec<_>>();
    let expected = [[0, 1, 2, 3], [4, 5, 4, 5], [6, 6, 6, 6]].map(of_branch);
    assert_eq!(pattern.delta_slots(4), expected);
}

#[test]
fn deltas_of_branches_are_refused_where_they_would_have_to_travel() {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[16, 32], &[1, 2], mode).expect("a pattern");
    let shape = Shape::new(1, 64, 4, 4, 8).expect("a shape");
    let sharding = Sharding::contiguous(4).expect("ranks");
    let request = Request {
        pass: Pass::BackwardByBranch,
        ..Request::new(shape, pattern, sharding, DType::F32)
    };
    let refusal = |request: Request| Plan::new(request).err().map(|error| error.to_string());
    assert_eq!(refusal(request.clone()), None);
    let changed = [
        Request {
            queries: Queries::Replicated,
            ..request.clone()
        },
        Request {
            redundancy: 1,
            ..request.clone()
        },
        Request {
            schedule: Schedule::RING.with_backward(Rotating::Queries),
            ..request.clone()
        },
    ];
    for (request, what) in
        changed
            .into_iter()
            .zip(["replicated queries", "redundancy", "rotating queries"])
    {
        let refusal = refusal(request).expect("a refusal");
        assert!(refusal.contains(what), "{refusal}");
        assert!(refusal.contains("a delta for each branch"), "{refusal}");
    }
}
