//! The policy on NaN and infinity: inputs are looked through, and such numbers are refused by name
//! and place, unless the caller lets them in.
//!
//! The library does not look: it lets them go where IEEE arithmetic takes them, to the rows that
//! see them and to no other. A command is run on files of unknown origin, and a NaN in one is
//! nearly always an accident upstream. A number that is finite as stored but too large for the
//! compute type would become an infinity, so it is treated as one.

use anyhow::{Result, bail};
use encke::{DType, Element, Slice};

/// What was found in a tensor that should not be there.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    nan: usize,
    infinite: usize,
    too_large: usize,
    first: usize,
}

/// Refuses a tensor that holds NaN, infinity, or what becomes infinity in type `compute`.
pub fn check(name: &str, numbers: Slice<'_>, dims: [usize; 4], compute: DType) -> Result<()> {
    check_some(name, numbers, compute, |at| place(at, dims))
}

/// The same for some numbers of a tensor; `place` says where in it one of them is.
pub fn check_some(
    name: &str,
    numbers: Slice<'_>,
    compute: DType,
    place: impl Fn(usize) -> Vec<usize>,
) -> Result<()> {
    let found = match numbers {
        Slice::F64(x) => scan(x, compute),
        Slice::F32(x) => scan(x, compute),
        Slice::Bf16(x) => scan(x, compute),
        Slice::F16(x) => scan(x, compute),
    };
    let Some(found) = found else { return Ok(()) };
    let kinds = [
        (found.nan, "NaN".to_string()),
        (found.infinite, "infinite".to_string()),
        (found.too_large, format!("too large for {compute}")),
    ];
    let kinds = kinds.iter().filter(|(count, _)| *count > 0);
    let kinds: Vec<String> = kinds.map(|(n, what)| format!("{n} {what}")).collect();
    bail!(
        "{name} holds numbers that are not finite: {}, the first at {:?}; mend the file, or let \
         them through with --allow-non-finite",
        kinds.join(", "),
        place(found.first),
    );
}

fn scan<T: Element>(numbers: &[T], compute: DType) -> Option<Found> {
    let widening = compute.bytes() > T::DTYPE.bytes() || compute == T::DTYPE;
    let bad = |x: f64| !x.is_finite() || (!widening && !compute.round(x).is_finite());
    let first = numbers.iter().position(|&x| bad(x.to_f64()))?;
    let mut found = Found {
        nan: 0,
        infinite: 0,
        too_large: 0,
        first,
    };
    for x in numbers[first..].iter().map(|&x| x.to_f64()) {
        found.nan += usize::from(x.is_nan());
        found.infinite += usize::from(x.is_infinite());
        found.too_large += usize::from(x.is_finite() && bad(x));
    }
    Some(found)
}

/// The index of a number, without the last dimension where the tensor was stored without it.
pub fn place(at: usize, [_, n, h, d]: [usize; 4]) -> Vec<usize> {
    let index = [at / (n * h * d), at / (h * d) % n, at / d % h, at % d];
    let shown = if d == 1 { 3 } else { 4 };
    index[..shown].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_tensor_the_count_and_the_place() {
        let mut numbers = vec![0.5f32; 2 * 3 * 2 * 4];
        numbers[30] = f32::NAN;
        numbers[47] = f32::INFINITY;
        let error = check("k", Slice::F32(&numbers), [2, 3, 2, 4], DType::F32);
        let said = error.unwrap_err().to_string();
        assert!(said.starts_with("k holds"), "{said}");
        assert!(
            said.contains("1 NaN, 1 infinite, the first at [1, 0, 1, 2]"),
            "{said}"
        );
    }

    #[test]
    fn what_would_become_infinite_counts_as_infinite() {
        let numbers = [1.0f32, 70_000.0];
        assert!(check("q", Slice::F32(&numbers), [1, 1, 1, 2], DType::Bf16).is_ok());
        let said = check("q", Slice::F32(&numbers), [1, 1, 1, 2], DType::F16).unwrap_err();
        assert!(said.to_string().contains("1 too large for f16"), "{said}");
    }
}
