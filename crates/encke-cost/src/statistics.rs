//! Which value stands for several measurements of the same thing.

/// How several measurements are reduced to one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// The median: the machine under its present load.
    Median,
    /// The minimum: the machine without other load.
    Fastest,
}

impl Statistic {
    /// The statistic of some values; 0 if there are none.
    pub fn of(self, values: &[f64]) -> f64 {
        match self {
            Statistic::Median => median(values),
            Statistic::Fastest => values.iter().copied().reduce(f64::min).unwrap_or(0.0),
        }
    }
}

/// The median of some values, the mean of the middle two of an even count; 0 if there are none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}
