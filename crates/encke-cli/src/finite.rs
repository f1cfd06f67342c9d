//! The check for NaN and infinity: such elements of the inputs are refused by tensor and index,
//! unless the caller accepts them.
//!
//! The library does not check: such elements propagate by IEEE arithmetic, to the rows that attend
//! to them and to no other. A command runs on files of unknown origin, where a NaN is nearly always
//! an error of the program that wrote them. An element that is finite as stored but too large for
//! the compute type would become an infinity, so it is refused as well.

use anyhow::{Result, bail};
use encke::{DType, Element, Slice};

/// The elements of a tensor that are not finite.
#[derive(Debug, PartialEq, Eq)]
struct NonFinite {
    nan: usize,
    infinite: usize,
    too_large: usize,
    first: usize,
}

/// Refuses a tensor with elements that are NaN, infinite, or too large for type `compute`.
pub fn check(name: &str, elements: Slice<'_>, dims: [usize; 4], compute: DType) -> Result<()> {
    check_some(name, elements, compute, |at| index(at, dims))
}

/// Refuses some elements of a tensor; `index` gives the index of one of them.
pub fn check_some(
    name: &str,
    elements: Slice<'_>,
    compute: DType,
    index: impl Fn(usize) -> Vec<usize>,
) -> Result<()> {
    let found = match elements {
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
        "{name} has elements that are not finite: {}, the first at {:?}; correct the file, or \
         accept them with --allow-non-finite",
        kinds.join(", "),
        index(found.first),
    );
}

fn scan<T: Element>(elements: &[T], compute: DType) -> Option<NonFinite> {
    let widening = compute.bytes() > T::DTYPE.bytes() || compute == T::DTYPE;
    let bad = |x: f64| !x.is_finite() || (!widening && !compute.round(x).is_finite());
    let first = elements.iter().position(|&x| bad(x.to_f64()))?;
    let mut found = NonFinite {
        nan: 0,
        infinite: 0,
        too_large: 0,
        first,
    };
    for x in elements[first..].iter().map(|&x| x.to_f64()) {
        found.nan += usize::from(x.is_nan());
        found.infinite += usize::from(x.is_infinite());
        found.too_large += usize::from(x.is_finite() && bad(x));
    }
    Some(found)
}

/// The index of an element, without the last dimension if the tensor was stored without it.
fn index(at: usize, [_, n, h, d]: [usize; 4]) -> Vec<usize> {
    let index = [at / (n * h * d), at / (h * d) % n, at / d % h, at % d];
    let shown = if d == 1 { 3 } else { 4 };
    index[..shown].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_names_the_tensor_the_counts_and_the_first_index() {
        let mut elements = vec![0.5f32; 2 * 3 * 2 * 4];
        elements[30] = f32::NAN;
        elements[47] = f32::INFINITY;
        let error = check("k", Slice::F32(&elements), [2, 3, 2, 4], DType::F32);
        let message = error.unwrap_err().to_string();
        assert!(message.starts_with("k has"), "{message}");
        assert!(
            message.contains("1 NaN, 1 infinite, the first at [1, 0, 1, 2]"),
            "{message}"
        );
    }

    #[test]
    fn an_element_too_large_for_the_compute_type_is_refused() {
        let elements = [1.0f32, 70_000.0];
        assert!(check("q", Slice::F32(&elements), [1, 1, 1, 2], DType::Bf16).is_ok());
        let error = check("q", Slice::F32(&elements), [1, 1, 1, 2], DType::F16).unwrap_err();
        assert!(error.to_string().contains("1 too large for f16"), "{error}");
    }
}
