//! Vectors: the operations that attention needs, in both precisions, on every instruction set.
//!
//! Instruction sets come from the `pulp` crate, which makes calling them safe; this layer gives f32
//! and f64 the same interface. Everything here is inlined into code that is compiled for the
//! instruction set; a call that is not inlined is slow, but correct.

use std::marker::PhantomData;

use bytemuck::Pod;
use pulp::Simd;

use crate::philox::{self, Words};
use crate::real::Real;
#[cfg(target_arch = "x86_64")]
use crate::transpose;

/// Code that is compiled once for each instruction set. Its `run` must be inlined, and so must all
/// functions and closures with vectors in it: the conformance tests look for calls that remain.
pub(crate) trait SimdTask {
    fn run(self);
}

struct Vectorized<T>(T);

impl<T: SimdTask> pulp::NullaryFnOnce for Vectorized<T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.0.run();
    }
}

/// Vectors of `Self::A` on one instruction set.
pub(crate) trait Vector: Copy + Send + Sync {
    /// The element type.
    type A: Real;
    /// A vector of elements.
    type V: Copy + Pod + Send + Sync;
    /// Elements in a vector.
    const WIDTH: usize;

    fn splat(self, x: Self::A) -> Self::V;
    fn add(self, x: Self::V, y: Self::V) -> Self::V;
    fn sub(self, x: Self::V, y: Self::V) -> Self::V;
    fn mul(self, x: Self::V, y: Self::V) -> Self::V;
    fn div(self, x: Self::V, y: Self::V) -> Self::V;
    /// x·y + z, fused if the hardware has the instruction.
    fn mul_add(self, x: Self::V, y: Self::V, z: Self::V) -> Self::V;
    /// The larger of both; `y` if `y` is NaN, and either if `x` is NaN.
    fn max(self, x: Self::V, y: Self::V) -> Self::V;
    /// `yes` where x < y, `no` elsewhere.
    fn select_less(self, x: Self::V, y: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// e^x for exponents of softmax weights: at most 0, up to rounding.
    fn exp(self, x: Self::V) -> Self::V;
    /// The hyperbolic tangent.
    fn tanh(self, x: Self::V) -> Self::V;
    /// The coins of counters ([`philox`]).
    fn philox(self, words: Words, seed: [u32; 2]) -> Words;
    /// `yes` where the coin is above `limit`, `no` elsewhere. There are [`Vector::WIDTH`] coins.
    fn select_above(self, coins: &[u32], limit: u32, yes: Self::V, no: Self::V) -> Self::V;

    /// Transposes a square of [`Vector::WIDTH`] rows, `from_step` and `to_step` elements apart.
    #[inline(always)]
    fn transpose(self, from: &[Self::A], from_step: usize, to: &mut [Self::A], to_step: usize) {
        for j in 0..Self::WIDTH {
            for i in 0..Self::WIDTH {
                to[j * to_step + i] = from[i * from_step + j];
            }
        }
    }

    /// Runs a task that is compiled for the instruction set.
    fn run(self, task: impl SimdTask);

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(Self::A::ZERO)
    }
    /// Elements as vectors.
    #[inline(always)]
    fn of(elements: &[Self::A]) -> &[Self::V] {
        bytemuck::cast_slice(elements)
    }
    /// Elements as mutable vectors.
    #[inline(always)]
    fn of_mut(elements: &mut [Self::A]) -> &mut [Self::V] {
        bytemuck::cast_slice_mut(elements)
    }
}

/// Four elements at a time in plain Rust, for machines without the other instruction sets. Products
/// are not fused, since without the instruction a fused product is a slow library call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PortableVector<A>(PhantomData<A>);

impl<A> PortableVector<A> {
    pub fn new() -> PortableVector<A> {
        PortableVector(PhantomData)
    }
}

/// Elements in a portable vector: one f32 register of the x86-64 baseline.
pub(crate) const PORTABLE_WIDTH: usize = 4;

#[inline(always)]
fn lanes<A: Real>(f: impl Fn(usize) -> A) -> [A; PORTABLE_WIDTH] {
    std::array::from_fn(f)
}

impl<A: Real> Vector for PortableVector<A> {
    type A = A;
    type V = [A; PORTABLE_WIDTH];
    const WIDTH: usize = PORTABLE_WIDTH;

    #[inline(always)]
    fn run(self, task: impl SimdTask) {
        task.run();
    }
    #[inline(always)]
    fn splat(self, x: A) -> [A; PORTABLE_WIDTH] {
        [x; PORTABLE_WIDTH]
    }
    #[inline(always)]
    fn add(self, x: [A; PORTABLE_WIDTH], y: [A; PORTABLE_WIDTH]) -> [A; PORTABLE_WIDTH] {
        lanes(|i| x[i] + y[i])
    }
    #[inline(always)]
    fn sub(self, x: [A; PORTABLE_WIDTH], y: [A; PORTABLE_WIDTH]) -> [A; PORTABLE_WIDTH] {
        lanes(|i| x[i] - y[i])
    }
    #[inline(always)]
    fn mul(self, x: [A; PORTABLE_WIDTH], y: [A; PORTABLE_WIDTH]) -> [A; PORTABLE_WIDTH] {
        lanes(|i| x[i] * y[i])
    }
    #[inline(always)]
    fn div(self, x: [A; PORTABLE_WIDTH], y: [A; PORTABLE_WIDTH]) -> [A; PORTABLE_WIDTH] {
        lanes(|i| x[i] / y[i])
    }
    #[inline(always)]
    fn mul_add(
        self,
        x: [A; PORTABLE_WIDTH],
        y: [A; PORTABLE_WIDTH],
        z: [A; PORTABLE_WIDTH],
    ) -> [A; PORTABLE_WIDTH] {
        lanes(|i| x[i] * y[i] + z[i])
    }
    #[inline(always)]
    fn max(self, x: [A; PORTABLE_WIDTH], y: [A; PORTABLE_WIDTH]) -> [A; PORTABLE_WIDTH] {
        lanes(|i| if y[i] < x[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn select_less(
        self,
        x: [A; PORTABLE_WIDTH],
        y: [A; PORTABLE_WIDTH],
        yes: [A; PORTABLE_WIDTH],
        no: [A; PORTABLE_WIDTH],
    ) -> [A; PORTABLE_WIDTH] {
        lanes(|i| if x[i] < y[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn exp(self, power: [A; PORTABLE_WIDTH]) -> [A; PORTABLE_WIDTH] {
        A::exp_portable(power)
    }
    #[inline(always)]
    fn tanh(self, x: [A; PORTABLE_WIDTH]) -> [A; PORTABLE_WIDTH] {
        A::tanh_portable(x)
    }
    #[inline(always)]
    fn philox(self, words: Words, seed: [u32; 2]) -> Words {
        philox::philox_portable(words, seed)
    }
    #[inline(always)]
    fn select_above(
        self,
        coins: &[u32],
        limit: u32,
        yes: [A; PORTABLE_WIDTH],
        no: [A; PORTABLE_WIDTH],
    ) -> [A; PORTABLE_WIDTH] {
        lanes(|i| if coins[i] > limit { yes[i] } else { no[i] })
    }
}

/// f32 on an instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct F32<S>(pub S);
/// f64 on an instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct F64<S>(pub S);

macro_rules! arithmetic {
    ($a:ty, $v:ident, $splat:ident, $add:ident, $sub:ident, $mul:ident, $div:ident,
     $mul_add:ident, $max:ident, $less:ident) => {
        type A = $a;
        type V = S::$v;
        const WIDTH: usize = size_of::<S::$v>() / size_of::<$a>();

        #[inline(always)]
        fn run(self, task: impl SimdTask) {
            self.0.vectorize(Vectorized(task));
        }

        #[inline(always)]
        fn splat(self, x: $a) -> S::$v {
            self.0.$splat(x)
        }
        #[inline(always)]
        fn add(self, x: S::$v, y: S::$v) -> S::$v {
            self.0.$add(x, y)
        }
        #[inline(always)]
        fn sub(self, x: S::$v, y: S::$v) -> S::$v {
            self.0.$sub(x, y)
        }
        #[inline(always)]
        fn mul(self, x: S::$v, y: S::$v) -> S::$v {
            self.0.$mul(x, y)
        }
        #[inline(always)]
        fn div(self, x: S::$v, y: S::$v) -> S::$v {
            self.0.$div(x, y)
        }
        #[inline(always)]
        fn mul_add(self, x: S::$v, y: S::$v, z: S::$v) -> S::$v {
            self.0.$mul_add(x, y, z)
        }
        #[inline(always)]
        fn max(self, x: S::$v, y: S::$v) -> S::$v {
            self.0.$max(x, y)
        }
        #[inline(always)]
        fn select_less(self, x: S::$v, y: S::$v, yes: S::$v, no: S::$v) -> S::$v {
            self.select(self.0.$less(x, y), yes, no)
        }
        #[inline(always)]
        fn philox(self, words: Words, seed: [u32; 2]) -> Words {
            philox::philox(self.0, words, seed)
        }
    };
}

// Pulp's selects of floats need not be inlined, those of integers always are.
impl<S: Simd> F32<S> {
    #[inline(always)]
    fn select(self, mask: S::m32s, yes: S::f32s, no: S::f32s) -> S::f32s {
        let s = self.0;
        let [yes, no] = [s.transmute_u32s_f32s(yes), s.transmute_u32s_f32s(no)];
        s.transmute_f32s_u32s(s.select_u32s(mask, yes, no))
    }
}

impl<S: Simd> F64<S> {
    #[inline(always)]
    fn select(self, mask: S::m64s, yes: S::f64s, no: S::f64s) -> S::f64s {
        let s = self.0;
        let [yes, no] = [s.transmute_u64s_f64s(yes), s.transmute_u64s_f64s(no)];
        s.transmute_f64s_u64s(s.select_u64s(mask, yes, no))
    }
}

impl<S: Simd> Vector for F32<S> {
    arithmetic!(
        f32,
        f32s,
        splat_f32s,
        add_f32s,
        sub_f32s,
        mul_f32s,
        div_f32s,
        mul_add_e_f32s,
        max_f32s,
        less_than_f32s
    );

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn transpose(self, from: &[f32], from_step: usize, to: &mut [f32], to_step: usize) {
        let last = Self::WIDTH - 1;
        let (from, to) = (
            &from[..last * from_step + Self::WIDTH],
            &mut to[..last * to_step + Self::WIDTH],
        );
        let (from, to) = (from.as_ptr(), to.as_mut_ptr());
        // SAFETY: the slices above are long enough; on this architecture vectors of 16 are AVX-512
        // and vectors of 8 are AVX, and a value of `S` proves that the processor has them.
        unsafe {
            match Self::WIDTH {
                16 => transpose::sixteen(from, from_step, to, to_step),
                8 => transpose::eight(from, from_step, to, to_step),
                width => {
                    for at in 0..width * width {
                        let (i, j) = (at / width, at % width);
                        *to.add(j * to_step + i) = *from.add(i * from_step + j);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn exp(self, power: S::f32s) -> S::f32s {
        let s = self.0;
        exp(
            self,
            power,
            #[inline(always)]
            |shifted| {
                let bits = s.transmute_u32s_f32s(shifted);
                s.transmute_f32s_u32s(s.wrapping_dyn_shl_u32s(bits, s.splat_u32s(23)))
            },
        )
    }

    #[inline(always)]
    fn tanh(self, x: S::f32s) -> S::f32s {
        tanh(self, x)
    }

    #[inline(always)]
    fn select_above(self, coins: &[u32], limit: u32, yes: S::f32s, no: S::f32s) -> S::f32s {
        let s = self.0;
        let coins: S::u32s = bytemuck::cast_slice(coins)[0];
        let above = s.less_than_u32s(s.splat_u32s(limit), coins);
        self.select(above, yes, no)
    }
}

/// e^x in f32: 2^n · e^r with |r| at most half of ln 2, and for e^r a polynomial of degree six with
/// an error of 1e-8. `shift_left_23` shifts the bits of each lane.
///
/// It is meant for exponents of softmax weights, which are at most 0 up to rounding: subnormal
/// results become exactly 0, and results for exponents above 88 are meaningless. A NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<X: Vector<A = f32>>(
    x: X,
    power: X::V,
    shift_left_23: impl Fn(X::V) -> X::V,
) -> X::V {
    // Smaller exponents are raised to this one, whose n of −127 makes 2^n zero.
    const LOW: f32 = -88.03;
    // Adding 1.5·2^23 rounds to the nearest integer and leaves it in the low bits; the additional
    // 127 turns those into the exponent bits of 2^n.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    // ln 2 in two parts: the first has so few bits that its products with integers are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 5] = [0.0013926184, 0.008363179, 0.041666556, 0.16666576, 0.5];
    let clamped = x.max(x.splat(LOW), power);
    let shifted = x.mul_add(clamped, x.splat(std::f32::consts::LOG2_E), x.splat(ROUND));
    let n = x.sub(shifted, x.splat(ROUND));
    let r = x.mul_add(n, x.splat(-LN_2_HIGH), clamped);
    let r = x.mul_add(n, x.splat(-LN_2_LOW), r);
    let mut y = x.splat(POLYNOMIAL[0]);
    for c in &POLYNOMIAL[1..] {
        y = x.mul_add(y, r, x.splat(*c));
    }
    let y = x.mul_add(y, x.mul(r, r), x.add(r, x.splat(1.0)));
    x.mul(y, shift_left_23(shifted))
}

/// tanh in f32 to a few units in the last place: an odd polynomial of degree eleven near 0, and
/// (1 − e) / (1 + e) with e = exp(−2·|x|) elsewhere. A NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<X: Vector<A = f32>>(x: X, argument: X::V) -> X::V {
    // Where both are as accurate.
    const NEAR: f32 = 0.625;
    const POLYNOMIAL: [f32; 5] = [
        -5.704_988_7e-3,
        2.063_909e-2,
        -5.373_971_6e-2,
        1.333_144_2e-1,
        -3.333_328e-1,
    ];
    let (zero, one) = (x.zero(), x.splat(1.0));
    let square = x.mul(argument, argument);
    let mut near = x.splat(POLYNOMIAL[0]);
    for c in &POLYNOMIAL[1..] {
        near = x.mul_add(near, square, x.splat(*c));
    }
    let near = x.mul_add(x.mul(near, square), argument, argument);
    let size = x.max(argument, x.sub(zero, argument));
    let e = x.exp(x.mul(size, x.splat(-2.0)));
    let far = x.div(x.sub(one, e), x.add(one, e));
    let far = x.select_less(argument, zero, x.sub(zero, far), far);
    x.select_less(size, x.splat(NEAR), near, far)
}

impl<S: Simd> Vector for F64<S> {
    arithmetic!(
        f64,
        f64s,
        splat_f64s,
        add_f64s,
        sub_f64s,
        mul_f64s,
        div_f64s,
        mul_add_e_f64s,
        max_f64s,
        less_than_f64s
    );

    /// The standard library's exp for each lane: f64 favours accuracy over speed.
    #[inline(always)]
    fn exp(self, mut power: S::f64s) -> S::f64s {
        let lanes: &mut [f64] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut power));
        for x in lanes {
            *x = x.exp();
        }
        power
    }

    #[inline(always)]
    fn select_above(self, coins: &[u32], limit: u32, yes: S::f64s, mut no: S::f64s) -> S::f64s {
        let yes: &[f64] = bytemuck::cast_slice(std::slice::from_ref(&yes));
        let lanes: &mut [f64] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut no));
        for ((no, yes), coin) in lanes.iter_mut().zip(yes).zip(coins) {
            *no = if *coin > limit { *yes } else { *no };
        }
        no
    }

    /// The standard library's, as [`exp`](Vector::exp).
    #[inline(always)]
    fn tanh(self, mut x: S::f64s) -> S::f64s {
        let lanes: &mut [f64] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut x));
        for x in lanes {
            *x = x.tanh();
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exp_of(power: f32) -> f32 {
        PortableVector::<f32>::new().exp([power; PORTABLE_WIDTH])[0]
    }

    #[test]
    fn exp_is_right_to_two_units_in_the_last_place() {
        let mut worst: f64 = 0.0;
        for i in 0..2_000_000 {
            let x = -87.3 + i as f32 * (90.0 / 2_000_000.0);
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp_of(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
    }

    #[test]
    fn exp_of_special_values() {
        assert_eq!(exp_of(0.0), 1.0);
        assert_eq!(exp_of(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_of(-1e4), 0.0);
        assert!(exp_of(f32::NAN).is_nan());
        assert_eq!(exp_of(-87.9), 0.0);
        assert!(exp_of(-87.3) > 0.0);
    }

    fn tanh_of(x: f32) -> f32 {
        PortableVector::<f32>::new().tanh([x; PORTABLE_WIDTH])[0]
    }

    #[test]
    fn tanh_is_right_to_four_units_in_the_last_place() {
        let mut worst: f64 = 0.0;
        for i in 1..1_000_000 {
            let x = i as f32 * (12.0 / 1_000_000.0);
            let exact = f64::from(x).tanh();
            assert_eq!(tanh_of(-x), -tanh_of(x));
            worst = worst.max((f64::from(tanh_of(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
    }

    #[test]
    fn tanh_of_special_values() {
        assert_eq!(tanh_of(0.0), 0.0);
        assert_eq!(tanh_of(f32::INFINITY), 1.0);
        assert_eq!(tanh_of(f32::NEG_INFINITY), -1.0);
        assert_eq!(tanh_of(1e30), 1.0);
        assert_eq!(tanh_of(1e-30), 1e-30);
        assert!(tanh_of(f32::NAN).is_nan());
    }
}
