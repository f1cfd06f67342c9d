//! Parsers for whole numbers in options: `65536`, `65_536`, `64k`, `1M`, `1e9`.
//!
//! The decision here: k, M and G are powers of 1024, because sequence lengths and segments are,
//! while an exponent is decimal. A number that is not whole is refused, never rounded.

/// Every whole number up to this one is exact in f64.
const EXACT: f64 = (1u64 << 53) as f64;

/// Parses a count; the error completes a sentence that names the option.
pub fn count(text: &str) -> Result<usize, String> {
    let digits: String = text.trim().chars().filter(|&c| c != '_').collect();
    let (digits, unit) = match digits.chars().last() {
        Some('k' | 'K') => (&digits[..digits.len() - 1], 1 << 10),
        Some('M') => (&digits[..digits.len() - 1], 1 << 20),
        Some('G') => (&digits[..digits.len() - 1], 1 << 30),
        _ => (&digits[..], 1usize),
    };
    let refused = || "write a whole number, such as 65536, 64k (= 65536), 1M or 1e9".to_string();
    if let Ok(whole) = digits.parse::<usize>() {
        let scaled = whole.checked_mul(unit);
        return scaled.ok_or_else(|| "the number is too large for this machine".to_string());
    }
    let value = digits.parse::<f64>().map_err(|_| refused())? * unit as f64;
    if value.fract() != 0.0 || value < 0.0 || !value.is_finite() {
        return Err(refused());
    }
    if value > EXACT {
        return Err("the number is too large for this machine".to_string());
    }
    Ok(value as usize)
}

/// Parses how often something is measured; every time is kept.
pub fn repeats(text: &str) -> Result<usize, String> {
    match count(text)? {
        repeats if repeats > 100_000 => Err("measure at most 100000 times".to_string()),
        repeats => Ok(repeats),
    }
}

/// Parses a number of bytes: a count, or one with a unit, `2GiB` (1024 x 1024 x 1024) or `2GB`
/// (1000 x 1000 x 1000).
pub fn bytes(text: &str) -> Result<usize, String> {
    let text: String = text.split_whitespace().collect();
    let (number, unit) = match text.strip_suffix('B') {
        None => (text.clone(), 1),
        // KiB, MiB and GiB are the k, M and G of a count.
        Some(number) if number.ends_with('i') => (number[..number.len() - 1].to_string(), 1),
        Some(number) => {
            let units = [
                ('k', 1_000),
                ('K', 1_000),
                ('M', 1_000_000),
                ('G', 1_000_000_000),
            ];
            let found = units.iter().find(|(unit, _)| number.ends_with(*unit));
            let unit = found.map_or(1, |(_, unit)| *unit);
            let digits = number.len() - usize::from(found.is_some());
            (number[..digits].to_string(), unit)
        }
    };
    let refused = || "write bytes, such as 2GiB, 512MiB, 2GB or 4e9".to_string();
    let number = count(number.trim()).map_err(|_| refused())?;
    number.checked_mul(unit).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::{bytes, count};

    #[test]
    fn byte_counts_parse_with_binary_and_decimal_units() {
        let written = [
            ("2GiB", 2 << 30),
            ("64 MiB", 64 << 20),
            ("1.5KiB", 1536),
            ("2GB", 2_000_000_000),
            ("100B", 100),
            ("2G", 2 << 30),
            ("4e9", 4_000_000_000),
        ];
        for (text, number) in written {
            assert_eq!(bytes(text), Ok(number), "{text}");
        }
        for text in ["", "B", "iB", "GiB", "-1GiB", "2XB", "0.1B"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn counts_parse_with_separators_suffixes_and_exponents() {
        let written = [
            ("0", 0),
            ("65536", 65536),
            ("65_536", 65536),
            ("64k", 65536),
            ("64K", 65536),
            ("1M", 1 << 20),
            ("2G", 2 << 30),
            ("1.5k", 1536),
            ("1e9", 1_000_000_000),
            ("2.5e3", 2500),
        ];
        for (text, number) in written {
            assert_eq!(count(text), Ok(number), "{text}");
        }
    }

    #[test]
    fn text_that_is_not_a_whole_number_is_refused() {
        for text in [
            "",
            "k",
            "-1",
            "1.5",
            "1e-3",
            "nan",
            "inf",
            "12q",
            "1e30",
            "99999999999999G",
        ] {
            assert!(count(text).is_err(), "{text}");
        }
    }
}
