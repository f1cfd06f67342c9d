//! Absurd sizes are refused with their numbers, before anything is computed or allocated.

use encke_core::plan::{Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Error, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor};

const MIX: Mode = Mode::Mix {
    offsets: OffsetRule::HeadMod,
    gradient: MixingGradient::Exact,
};

/// The plan of a causal mix of one branch, or why there is none.
fn plan(
    [tokens, heads, dim]: [usize; 3],
    [segment, dilation]: [usize; 2],
    (ranks, cut): (usize, Cut),
) -> Result<Plan, Error> {
    let shape = Shape::new(1, tokens, heads, heads, dim)?;
    let pattern = Pattern::dilated(&[segment], &[dilation], MIX)?.causal(true);
    let sharding = Sharding::new(ranks, cut)?;
    Plan::new(Request::new(shape, pattern, sharding, DType::F32))
}

#[test]
fn products_that_overflow_name_their_factors() {
    let large = 1 << 40;
    let error = Shape::new(3, large, 5, 5, large).expect_err("it overflows");
    assert!(matches!(error, Error::Overflow { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("3 x 1099511627776 x 5 x 1099511627776"),
        "{text}"
    );
    let values = Tensor::from_f64(DType::F32, [usize::MAX, 2, 1, 1], &[]);
    assert!(matches!(values, Err(Error::Overflow { .. })));
    // One tensor fits the address space; what all ranks send does not.
    let sent = plan([1 << 44, 1, 1], [64, 1], (100_000, Cut::Contiguous));
    assert!(matches!(sent, Err(Error::Overflow { .. })), "{sent:?}");
}

#[test]
fn head_dimensions_that_no_kernel_has_room_for_are_refused() {
    let most = 1 << 20;
    let shape = Shape::new(1, 1, 1, 1, most).expect("it is the largest");
    for over in [most + 1, 1 << 53] {
        let dim = Shape::new(1, 1, 1, 1, over);
        assert!(matches!(dim, Err(Error::LargeDim { got, .. }) if got == over));
        let values = shape.with_value_dim(over);
        assert!(matches!(values, Err(Error::LargeDim { got, .. }) if got == over));
    }
}

#[test]
fn tensors_that_there_is_no_memory_for_name_their_bytes() {
    // 2^47 bytes are as large as the address space of a process.
    let bytes = 1 << 47;
    let zeros = Tensor::try_zeros(DType::F64, [1 << 20, 1 << 20, 4, 4]);
    assert_eq!(
        zeros.expect_err("no machine has it"),
        Error::Memory { bytes }
    );
    let overflow = Tensor::try_zeros(DType::F32, [usize::MAX, 2, 1, 1]);
    assert!(matches!(overflow, Err(Error::Overflow { .. })));
    let text = Error::Memory { bytes }.to_string();
    assert!(text.contains("140737488355328 bytes"), "{text}");
    let small = Tensor::try_zeros(DType::F16, [1, 2, 0, 3]).expect("it is empty");
    assert_eq!(small.dims(), [1, 2, 0, 3]);
}

#[test]
fn too_many_ranks_are_refused() {
    for ranks in [(1 << 20) + 1, 1 << 40, usize::MAX] {
        for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
            let error = Sharding::new(ranks, cut).expect_err("it is too large");
            assert!(error.to_string().contains(&ranks.to_string()), "{error}");
        }
    }
}

#[test]
fn plans_that_would_take_too_long_are_refused_with_an_estimate() {
    let million = 1_000_000;
    let slow = [
        plan(
            [1 << 20, 1000 * million, 1],
            [1 << 20, 1000 * million],
            (1, Cut::Contiguous),
        ),
        plan(
            [million, million, 1],
            [million, million],
            (1, Cut::Contiguous),
        ),
        plan([1 << 30, 1, 1], [4097, 1], (4096, Cut::Striped)),
        plan([1 << 30, 1, 1], [1 << 30, 1], (100_000, Cut::Contiguous)),
        plan([1 << 20, 64, 1], [64, 64], (1 << 20, Cut::Contiguous)),
    ];
    for slow in slow {
        let Err(Error::PlanCost {
            steps,
            factors,
            limit,
        }) = slow
        else {
            panic!("{slow:?}");
        };
        assert!(steps > limit && factors.contains(" x "), "{factors}");
    }
}

#[test]
fn usual_plans_are_made() {
    // A thousand ranks, LongNet's striding heads, and segments that every rank shares.
    let ring = plan([1 << 30, 32, 128], [1 << 30, 1], (1024, Cut::Zigzag));
    assert_eq!(ring.expect("it is small").ranks(), 1024);
    let heads = plan([1 << 20, 64, 64], [1 << 20, 64], (64, Cut::Striped));
    assert_eq!(heads.expect("it is small").lanes().len(), 64);
    let many = plan([1 << 16, 4096, 1], [1 << 16, 4096], (1, Cut::Contiguous));
    assert_eq!(many.expect("it is small").lanes().len(), 4096);
}
