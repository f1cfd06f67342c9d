//! The reference against the text of the specification: its examples, its theorem, its guarantees.
//!
//! Results of other packages are in `golden.rs`; here nothing comes from another program. The
//! decision here: every property that holds for all patterns is tested on random patterns from
//! fixed seeds, including ragged lengths, grouped key heads and tokens that no branch selects.

use encke_core::reference::{ReferenceForward, ReferenceGradients, backward, forward};
use encke_core::{Error, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape};

const GROUP: Mode = Mode::Group {
    scale: GroupScale::One,
};
const GROUP_SCALED: Mode = Mode::Group {
    scale: GroupScale::Groups,
};
const OFFSET_RULES: [OffsetRule; 2] = [OffsetRule::HeadMod, OffsetRule::HeadBlock];

fn mix(offsets: OffsetRule, gradient: MixingGradient) -> Mode {
    Mode::Mix { offsets, gradient }
}

/// All modes whose output is one softmax: everything but fkodom.
fn softmax_modes() -> Vec<Mode> {
    let gradients = [MixingGradient::Exact, MixingGradient::Detached];
    let mixes = OFFSET_RULES.map(|rule| gradients.map(|gradient| mix(rule, gradient)));
    [GROUP, GROUP_SCALED]
        .into_iter()
        .chain(mixes.concat())
        .collect()
}

/// splitmix64: seeded and portable. Separate from the conformance suite's generator, so that this
/// file depends on the reference only.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A value from -1 to 1.
    fn value(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// An integer from 1 to `most`.
    fn size(&mut self, most: usize) -> usize {
        1 + (self.next() % most as u64) as usize
    }

    fn values(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.value()).collect()
    }
}

/// Selects one operand of a call.
type OperandOf = fn(&mut ReferenceCase) -> &mut Vec<f64>;

/// One call: a pattern, a shape and values for every operand.
#[derive(Clone)]
struct ReferenceCase {
    shape: Shape,
    pattern: Pattern,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dout: Vec<f64>,
    dlse: Vec<f64>,
}

impl ReferenceCase {
    fn new(shape: Shape, pattern: Pattern, seed: u64) -> ReferenceCase {
        let mut random = SplitMix(seed);
        let rows = shape.batch * shape.tokens;
        let of_heads = rows * shape.heads * shape.dim;
        let of_kv_heads = rows * shape.kv_heads * shape.dim;
        ReferenceCase {
            shape,
            pattern,
            q: random.values(of_heads).iter().map(|x| 2.0 * x).collect(),
            k: random.values(of_kv_heads).iter().map(|x| 2.0 * x).collect(),
            v: random.values(of_kv_heads),
            dout: random.values(of_heads),
            dlse: random.values(rows * shape.heads),
        }
    }

    /// A random pattern of `mode`: any lengths, any rates, any grouping of key heads.
    fn random(mode: Mode, seed: u64) -> ReferenceCase {
        let mut random = SplitMix(seed ^ 0x5eed);
        let kv_heads = random.size(3);
        let heads = kv_heads * random.size(3);
        let branches = match mode {
            Mode::Mix { .. } => random.size(3),
            _ => random.size(heads.min(3)),
        };
        let segments: Vec<usize> = (0..branches).map(|_| random.size(24)).collect();
        let dilations: Vec<usize> = (0..branches).map(|_| random.size(5)).collect();
        let shape = Shape::new(
            random.size(2),
            random.size(20),
            heads,
            kv_heads,
            random.size(4),
        );
        let pattern = Pattern::dilated(&segments, &dilations, mode).unwrap();
        ReferenceCase::new(shape.unwrap(), pattern.causal(random.size(2) == 1), seed)
    }

    fn forward(&self) -> ReferenceForward {
        let scale = self.shape.default_scale();
        forward(&self.shape, &self.pattern, scale, &self.q, &self.k, &self.v).unwrap()
    }

    fn backward(&self, dlse: Option<&[f64]>) -> ReferenceGradients {
        let ReferenceCase {
            shape,
            pattern,
            q,
            k,
            v,
            dout,
            ..
        } = self;
        backward(shape, pattern, shape.default_scale(), q, k, v, dout, dlse).unwrap()
    }

    /// All (batch, query, head) in the order of the lse.
    fn rows(&self) -> Vec<(usize, usize, usize)> {
        let Shape {
            batch,
            tokens,
            heads,
            ..
        } = self.shape;
        (0..batch * tokens * heads)
            .map(|row| (row / heads / tokens, row / heads % tokens, row % heads))
            .collect()
    }

    /// The same call with another key and value of one token.
    fn with_token_changed(&self, token: usize) -> ReferenceCase {
        let mut changed = self.clone();
        let width = self.shape.kv_heads * self.shape.dim;
        for batch in 0..self.shape.batch {
            let start = (batch * self.shape.tokens + token) * width;
            changed.k[start..start + width]
                .iter_mut()
                .for_each(|x| *x -= 0.5);
            changed.v[start..start + width]
                .iter_mut()
                .for_each(|x| *x += 1.5);
        }
        changed
    }

    /// The scalar whose gradients are tested. Queries that see no key have no finite lse and are
    /// left out.
    fn objective(&self, dlse: Option<&[f64]>) -> f64 {
        let ReferenceForward { out, lse } = self.forward();
        let of_out: f64 = out.iter().zip(&self.dout).map(|(x, g)| x * g).sum();
        let visible = lse
            .iter()
            .zip(dlse.unwrap_or(&[]))
            .filter(|(x, _)| x.is_finite());
        of_out + visible.map(|(x, g)| x * g).sum::<f64>()
    }

    /// Compares every gradient with a central difference of two forward passes.
    fn check_differences(&self, dlse: Option<&[f64]>) {
        const STEP: f64 = 1e-5;
        let ReferenceGradients { dq, dk, dv, .. } = self.backward(dlse);
        let operands: [(&str, &[f64], OperandOf); 3] = [
            ("dq", &dq, |case| &mut case.q),
            ("dk", &dk, |case| &mut case.k),
            ("dv", &dv, |case| &mut case.v),
        ];
        for (name, gradient, operand) in operands {
            let largest = gradient.iter().fold(1.0, |a: f64, x| a.max(x.abs()));
            for (i, got) in gradient.iter().enumerate() {
                let mut moved = self.clone();
                operand(&mut moved)[i] += STEP;
                let above = moved.objective(dlse);
                operand(&mut moved)[i] -= 2.0 * STEP;
                let expected = (above - moved.objective(dlse)) / (2.0 * STEP);
                let apart = (got - expected).abs();
                assert!(
                    apart <= 1e-8 * largest,
                    "{name}[{i}] of {:?} is {got}, the difference {expected}",
                    self.pattern
                );
            }
        }
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (x, y)) in got.iter().zip(expected).enumerate() {
        assert!(
            x == y || (x - y).abs() <= tolerance,
            "{what}[{i}] is {x}, not {y}"
        );
    }
}

/// The output and lse of each head for zero scores and values equal to the token index.
fn mean_of_positions(tokens: usize, heads: usize, pattern: &Pattern) -> Vec<(Vec<f64>, Vec<f64>)> {
    let shape = Shape::new(1, tokens, heads, heads, 1).unwrap();
    let zeros = vec![0.0; tokens * heads];
    let v: Vec<f64> = (0..tokens * heads).map(|i| (i / heads) as f64).collect();
    let ReferenceForward { out, lse } = forward(&shape, pattern, 1.0, &zeros, &zeros, &v).unwrap();
    let of_head = |x: &[f64], h: usize| x.iter().skip(h).step_by(heads).copied().collect();
    (0..heads)
        .map(|h| (of_head(&out, h), of_head(&lse, h)))
        .collect()
}

#[test]
fn worked_examples() {
    type Example<'a> = (usize, &'a [usize], &'a [usize], Mode, bool, &'a [&'a [f64]]);
    let check = |(tokens, segments, dilations, mode, causal, expected): Example<'_>| {
        let pattern = Pattern::dilated(segments, dilations, mode)
            .unwrap()
            .causal(causal);
        let heads = mean_of_positions(tokens, expected.len(), &pattern);
        for (head, ((out, _), expected)) in heads.iter().zip(expected).enumerate() {
            assert_close(&format!("{pattern:?} head {head}"), out, expected, 5e-7);
        }
    };
    let one: &[f64] = &[1., 0., 1., 0., 5., 0., 5., 0.];
    let one_causal: &[f64] = &[0., 0., 1., 0., 4., 0., 5., 0.];
    check((8, &[4], &[2], GROUP, false, &[one]));
    check((8, &[4], &[2], GROUP, true, &[one_causal]));
    let quarters: &[f64] = &[0.75, 0.75, 0.75, 0.75, 2.75, 2.75, 2.75, 2.75];
    let twos: &[f64] = &[0., 2., 0., 2., 0., 2., 0., 2.];
    check((8, &[4, 8], &[1, 2], GROUP_SCALED, false, &[quarters, twos]));
    check((
        6,
        &[4],
        &[1],
        GROUP,
        false,
        &[&[1.5, 1.5, 1.5, 1.5, 4.5, 4.5]],
    ));
    let fours: &[f64] = &[2., 0., 0., 0., 2., 0., 8., 0., 0., 0., 8., 0.];
    check((12, &[6], &[4], GROUP, false, &[fours]));
    for mode in softmax_modes()
        .into_iter()
        .filter(|mode| mode.name() == "mix")
    {
        let other: &[f64] = &[0., 2., 0., 2., 0., 6., 0., 6.];
        let other_causal: &[f64] = &[0., 1., 0., 2., 0., 5., 0., 6.];
        check((8, &[4], &[2], mode, false, &[one, other]));
        check((8, &[4], &[2], mode, true, &[one_causal, other_causal]));
        let mixed: [&[f64]; 2] = [
            &[2.25, 1.5, 2.25, 1.5, 4.25, 5.5, 4.25, 5.5],
            &[1.5, 2.75, 1.5, 2.75, 5.5, 4.75, 5.5, 4.75],
        ];
        check((8, &[4, 8], &[1, 2], mode, false, &mixed));
        let mixed_causal: [&[f64]; 2] = [
            &[0., 0.5, 1., 1.5, 2.5, 4.5, 3.857143, 5.5],
            &[0., 0.666667, 1., 1.666667, 4., 3.6, 5., 4.75],
        ];
        check((8, &[4, 8], &[1, 2], mode, true, &mixed_causal));
    }
}

#[test]
fn lse_counts_the_keys_where_all_scores_are_zero() {
    let never = f64::NEG_INFINITY;
    let two = 2f64.ln();
    for rule in OFFSET_RULES {
        let mode = mix(rule, MixingGradient::Exact);
        let pattern = Pattern::dilated(&[4], &[2], mode).unwrap();
        let heads = mean_of_positions(8, 2, &pattern);
        assert_eq!(heads[0].1, [two, never, two, never, two, never, two, never]);
        assert_eq!(heads[1].1, [never, two, never, two, never, two, never, two]);
    }
}

/// The theorem of spec section 5: every mode but fkodom is one dense softmax in which each key is
/// weighted by its multiplicity.
#[test]
fn every_softmax_mode_is_a_dense_softmax_weighted_by_multiplicity() {
    for seed in 0..60 {
        for mode in softmax_modes() {
            let case = ReferenceCase::random(mode, seed);
            let ReferenceCase {
                shape,
                pattern,
                q,
                k,
                v,
                ..
            } = &case;
            let Shape {
                tokens,
                heads,
                kv_heads,
                dim,
                ..
            } = *shape;
            let got = case.forward();
            for (row, (b, t, h)) in case.rows().into_iter().enumerate() {
                let kv_head = h * kv_heads / heads;
                let key = |j: usize| ((b * tokens + j) * kv_heads + kv_head) * dim;
                let score = |j: usize| {
                    let products = (0..dim).map(|c| q[row * dim + c] * k[key(j) + c]);
                    products.sum::<f64>() / (dim as f64).sqrt()
                };
                let weight = |j: usize| pattern.multiplicity(shape, h, t, j) as f64;
                // Scores are at most 8 here, so the sum does not overflow without a maximum.
                let total: f64 = (0..tokens).map(|j| weight(j) * score(j).exp()).sum();
                let mean = |c: usize| {
                    let values = (0..tokens).map(|j| weight(j) * score(j).exp() * v[key(j) + c]);
                    if total == 0.0 {
                        0.0
                    } else {
                        values.sum::<f64>() / total
                    }
                };
                let expected: Vec<f64> = (0..dim).map(|c| pattern.gain() * mean(c)).collect();
                let what = format!("seed {seed} {pattern:?} row {row}");
                assert_close(
                    &what,
                    &got.out[row * dim..(row + 1) * dim],
                    &expected,
                    1e-13,
                );
                assert_close(&what, &got.lse[row..row + 1], &[total.ln()], 1e-13);
            }
        }
    }
}

/// A key changes the result of a query exactly if the pattern contains the pair. Causality is the
/// special case of later tokens.
#[test]
fn a_query_depends_on_its_own_keys_and_no_others() {
    let mut later = 0;
    for seed in 100..120 {
        for mode in softmax_modes() {
            let case = ReferenceCase::random(mode, seed);
            let dim = case.shape.dim;
            let before = case.forward();
            for token in 0..case.shape.tokens {
                let after = case.with_token_changed(token).forward();
                for (row, (_, t, h)) in case.rows().into_iter().enumerate() {
                    let at = row * dim..(row + 1) * dim;
                    let same = bits(&before.out[at.clone()]) == bits(&after.out[at])
                        && before.lse[row].to_bits() == after.lse[row].to_bits();
                    let sees = case.pattern.multiplicity(&case.shape, h, t, token) > 0;
                    assert_eq!(same, !sees, "{:?} query {t} key {token}", case.pattern);
                    if case.pattern.is_causal() && t < token {
                        assert!(same);
                        later += 1;
                    }
                }
            }
        }
    }
    assert!(later > 10_000, "too few causal cases among the random ones");
}

#[test]
fn dense_causal_attention_is_causal() {
    let shape = Shape::new(2, 9, 4, 2, 3).unwrap();
    let case = ReferenceCase::new(shape, Pattern::dense().causal(true), 7);
    let before = case.forward();
    for token in 0..9 {
        let after = case.with_token_changed(token).forward();
        for (row, (_, t, _)) in case.rows().into_iter().enumerate() {
            let at = row * 3..(row + 1) * 3;
            let same = bits(&before.out[at.clone()]) == bits(&after.out[at]);
            assert_eq!(same, t < token);
        }
    }
}

/// The fkodom package's causal mode is not causal: its normalisation sums over the whole sequence.
#[test]
fn fkodom_is_not_causal_even_with_a_causal_mask() {
    let shape = Shape::new(1, 8, 2, 2, 3).unwrap();
    let pattern = Pattern::dilated(&[4, 8], &[1, 2], Mode::Fkodom).unwrap();
    let case = ReferenceCase::new(shape, pattern.causal(true), 8);
    let (before, after) = (case.forward(), case.with_token_changed(7).forward());
    assert_ne!(before.out[0].to_bits(), after.out[0].to_bits());
    assert_eq!(before.lse[0].to_bits(), after.lse[0].to_bits());
}

#[test]
fn gradients_match_finite_differences_in_dense_attention() {
    for (heads, kv_heads) in [(2, 2), (4, 2), (3, 1)] {
        let shape = Shape::new(2, 7, heads, kv_heads, 3).unwrap();
        for causal in [false, true] {
            let case = ReferenceCase::new(shape, Pattern::dense().causal(causal), 11);
            case.check_differences(None);
            case.check_differences(Some(&case.dlse));
        }
    }
}

#[test]
fn gradients_match_finite_differences_in_group_and_mix_mode() {
    let mixes = OFFSET_RULES.map(|rule| mix(rule, MixingGradient::Exact));
    for mode in [GROUP, GROUP_SCALED].into_iter().chain(mixes) {
        for (heads, kv_heads) in [(3, 3), (4, 2)] {
            // A length that no segment divides, a rate that divides no segment, unselected tokens.
            let shape = Shape::new(1, 11, heads, kv_heads, 2).unwrap();
            let pattern = Pattern::dilated(&[4, 7, 64], &[2, 3, 2], mode).unwrap();
            for causal in [false, true] {
                let case = ReferenceCase::new(shape, pattern.clone().causal(causal), 12);
                assert!(case.forward().lse.contains(&f64::NEG_INFINITY));
                case.check_differences(None);
                case.check_differences(Some(&case.dlse));
            }
        }
    }
}

#[test]
fn gradients_match_finite_differences_in_random_patterns() {
    let mixes = OFFSET_RULES.map(|rule| mix(rule, MixingGradient::Exact));
    for mode in [GROUP, GROUP_SCALED].into_iter().chain(mixes) {
        for seed in 200..206 {
            let case = ReferenceCase::random(mode, seed);
            case.check_differences(Some(&case.dlse));
        }
    }
}

#[test]
fn gradients_match_finite_differences_in_fkodom_mode() {
    // Five heads over two branches: one head is in both, one in none.
    for (heads, kv_heads) in [(5, 5), (4, 2)] {
        let shape = Shape::new(2, 12, heads, kv_heads, 2).unwrap();
        let pattern = Pattern::dilated(&[4, 12], &[1, 5], Mode::Fkodom).unwrap();
        for causal in [false, true] {
            let mut case = ReferenceCase::new(shape, pattern.clone().causal(causal), 13);
            // The mode divides by sums of values; keep them away from zero.
            case.v.iter_mut().for_each(|x| *x += 2.0);
            case.check_differences(None);
        }
    }
}

/// torchscale's gradient differs from the exact derivative in dq and dk only, and only if branches
/// are mixed.
#[test]
fn detached_mixing_changes_only_dq_and_dk() {
    for rule in OFFSET_RULES {
        let shape = Shape::new(2, 11, 4, 2, 3).unwrap();
        let both = |segments: &[usize], dilations: &[usize]| {
            [MixingGradient::Exact, MixingGradient::Detached].map(|gradient| {
                let pattern = Pattern::dilated(segments, dilations, mix(rule, gradient)).unwrap();
                let case = ReferenceCase::new(shape, pattern, 14);
                (case.forward(), case.backward(Some(&case.dlse)))
            })
        };
        let [(forward, exact), (same_forward, detached)] = both(&[4, 8], &[1, 2]);
        assert_eq!(forward, same_forward);
        assert_eq!(bits(&exact.dv), bits(&detached.dv));
        let apart = |a: &[f64], b: &[f64]| {
            let pairs = a.iter().zip(b);
            pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
        };
        assert!(apart(&exact.dq, &detached.dq) > 1e-3);
        assert!(apart(&exact.dk, &detached.dk) > 1e-3);

        // A single branch has no mixing weights.
        let [(_, exact), (_, detached)] = both(&[8], &[2]);
        assert_eq!(exact, detached);
    }
}

#[test]
fn unselected_tokens_have_zero_output_and_zero_gradients() {
    for mode in softmax_modes() {
        let shape = Shape::new(1, 9, 2, 2, 2).unwrap();
        let case = ReferenceCase::new(shape, Pattern::dilated(&[4], &[3], mode).unwrap(), 15);
        let ReferenceForward { out, lse } = case.forward();
        let back = case.backward(Some(&case.dlse));
        let mut unselected = 0;
        for (row, (_, t, h)) in case.rows().into_iter().enumerate() {
            // With one branch, a token that sees no key is not a key either.
            if case.pattern.multiplicity(&shape, h, t, t) == 0 {
                assert_eq!(lse[row], f64::NEG_INFINITY);
                for x in [&out, &back.dq, &back.dk, &back.dv] {
                    assert_eq!(x[row * 2..row * 2 + 2], [0.0, 0.0]);
                }
                unselected += 1;
            }
        }
        assert!(unselected > 0);
    }
}

#[test]
fn invalid_operands_and_patterns_are_refused() {
    let shape = Shape::new(1, 8, 2, 1, 2).unwrap();
    let pattern = Pattern::dilated(&[4, 8], &[1, 2], Mode::Fkodom).unwrap();
    let case = ReferenceCase::new(shape, pattern, 16);
    let ReferenceCase {
        pattern,
        q,
        k,
        v,
        dout,
        dlse,
        ..
    } = &case;
    let back = |pattern, dout, dlse| backward(&shape, pattern, 1.0, q, k, v, dout, dlse);
    let refused = back(pattern, dout, Some(dlse.as_slice()));
    assert!(matches!(
        refused,
        Err(Error::NotInMode { mode: "fkodom", .. })
    ));
    assert!(back(pattern, dout, None).is_ok());
    let refused = back(pattern, &dout[1..], None);
    assert!(matches!(
        refused,
        Err(Error::ShapeMismatch { tensor: "dout", .. })
    ));
    let refused = back(&Pattern::dense(), dout, Some(&dlse[1..]));
    assert!(matches!(
        refused,
        Err(Error::ShapeMismatch { tensor: "dlse", .. })
    ));

    // Key heads and query heads differ, so operands of the wrong kind have the wrong length.
    for (tensor, [q, k, v]) in [("q", [k, k, v]), ("k", [q, q, v]), ("v", [q, k, q])] {
        let refused = forward(&shape, pattern, 1.0, q, k, v);
        assert!(matches!(refused, Err(Error::ShapeMismatch { tensor: t, .. }) if t == tensor));
    }
    let three = Pattern::dilated(&[4, 4, 4], &[1, 1, 1], GROUP).unwrap();
    let refused = forward(&shape, &three, 1.0, q, k, v);
    assert!(matches!(
        refused,
        Err(Error::MoreBranchesThanHeads {
            branches: 3,
            heads: 2
        })
    ));
    let ragged = Pattern::dilated(&[3], &[1], Mode::Fkodom).unwrap();
    let refused = forward(&shape, &ragged, 1.0, q, k, v);
    assert!(matches!(
        refused,
        Err(Error::FkodomLength {
            tokens: 8,
            segment: 3
        })
    ));
}
