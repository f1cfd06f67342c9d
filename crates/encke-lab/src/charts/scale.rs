//! Scales of axes: values to positions, ticks at round values, and their labels.
//!
//! The decision here: a scale has a unit, because what is round depends on it. Bytes are round in
//! KiB and MiB, ring sizes in powers of two, times in 1, 2 and 5.

use super::markup::ShortNumber;

/// The unit of a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, in B, KiB, MiB and so on.
    Bytes,
    /// Seconds, in µs, ms or s.
    Seconds,
    /// Counts, such as ranks and tokens.
    Count,
    /// Values without a unit, such as a loss.
    Number,
}

/// Linear or logarithmic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spacing {
    Linear,
    Logarithmic,
}

/// Maps values to positions on an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AxisScale {
    unit: Unit,
    spacing: Spacing,
    domain: (f64, f64),
    range: (f64, f64),
}

impl AxisScale {
    /// A linear scale.
    pub fn linear(unit: Unit, domain: (f64, f64), range: (f64, f64)) -> AxisScale {
        AxisScale {
            unit,
            spacing: Spacing::Linear,
            domain: (domain.0, end_above(domain)),
            range,
        }
    }

    /// A logarithmic scale, with ticks at powers of two. The domain must be above 0.
    pub fn logarithmic(unit: Unit, domain: (f64, f64), range: (f64, f64)) -> AxisScale {
        assert!(domain.0 > 0.0, "a logarithmic scale starts above 0");
        AxisScale {
            unit,
            spacing: Spacing::Logarithmic,
            domain: (domain.0, end_above(domain)),
            range,
        }
    }

    /// The position of a value.
    pub fn at(&self, value: f64) -> f64 {
        let (low, high) = self.domain;
        let share = match self.spacing {
            Spacing::Linear => (value - low) / (high - low),
            Spacing::Logarithmic => (value / low).ln() / (high / low).ln(),
        };
        self.range.0 + share * (self.range.1 - self.range.0)
    }

    /// Round values along the scale, at most `most` of them, and at least one.
    pub fn ticks(&self, most: usize) -> Vec<f64> {
        match self.spacing {
            Spacing::Linear => self.linear_ticks(most.max(1)),
            Spacing::Logarithmic => self.logarithmic_ticks(most.max(1)),
        }
    }

    /// The label of a tick.
    pub fn label(&self, tick: f64) -> String {
        match self.unit {
            Unit::Count => grouped(tick),
            Unit::Number => ShortNumber(tick).to_string(),
            unit => {
                let (size, name) = unit.size(match self.spacing {
                    // One unit along the whole axis: 0, 500 and 1000 KiB, not 1 MiB.
                    Spacing::Linear => self.domain.1,
                    Spacing::Logarithmic => tick,
                });
                match tick {
                    0.0 => "0".to_string(),
                    tick => format!("{} {name}", ShortNumber(tick / size)),
                }
            }
        }
    }

    fn linear_ticks(&self, most: usize) -> Vec<f64> {
        let (low, high) = self.domain;
        let (size, _) = self.unit.size(high);
        let span = (high - low) / size;
        let rough = 10f64.powf((span / most as f64).log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0].map(|step| step * rough * size);
        let whole = |step: &f64| self.unit != Unit::Count || *step >= 1.0;
        let mut candidates = steps.into_iter().filter(whole).map(|step| {
            let (first, last) = (
                (low / step).ceil() as i64,
                (high / step + 1e-9).floor() as i64,
            );
            (first..=last)
                .map(|i| i as f64 * step)
                .collect::<Vec<f64>>()
        });
        let few = candidates.find(|ticks| ticks.len() <= most);
        few.unwrap_or_else(|| vec![low])
    }

    fn logarithmic_ticks(&self, most: usize) -> Vec<f64> {
        let (low, high) = self.domain;
        let (first, last) = (low.log2(), high.log2());
        let powers = |step: i32| {
            let first = (first / step as f64 - 1e-9).ceil() as i32;
            let last = (last / step as f64 + 1e-9).floor() as i32;
            (first..=last)
                .map(|i| 2f64.powi(i * step))
                .collect::<Vec<f64>>()
        };
        let few = (1..64).map(powers).find(|ticks| ticks.len() <= most);
        match few {
            Some(ticks) if !ticks.is_empty() => ticks,
            _ => vec![low],
        }
    }
}

impl Unit {
    /// The size and name of the unit for values up to `largest`.
    fn size(self, largest: f64) -> (f64, &'static str) {
        let of = |units: &[(f64, &'static str)]| {
            let fits = units.iter().rev().find(|(size, _)| largest >= *size);
            *fits.unwrap_or(&units[0])
        };
        let binary = |power: i32| 1024f64.powi(power);
        match self {
            Unit::Bytes => of(&[
                (1.0, "B"),
                (binary(1), "KiB"),
                (binary(2), "MiB"),
                (binary(3), "GiB"),
                (binary(4), "TiB"),
            ]),
            Unit::Seconds => of(&[(1e-6, "µs"), (1e-3, "ms"), (1.0, "s")]),
            Unit::Count | Unit::Number => (1.0, ""),
        }
    }

    /// A value with its unit, for text and tables.
    pub fn format(self, value: f64) -> String {
        let (size, name) = self.size(value);
        match (self, value / size) {
            (Unit::Count, _) => grouped(value),
            (Unit::Number, read) => format!("{read:.4}"),
            (_, 0.0) => format!("0 {name}"),
            (_, read) if read.fract() == 0.0 => format!("{read:.0} {name}"),
            (_, read) if read < 10.0 => format!("{read:.2} {name}"),
            (_, read) => format!("{read:.1} {name}"),
        }
    }
}

/// A count with thousands separators.
fn grouped(value: f64) -> String {
    encke::explain::grouped(value.round().max(0.0) as u128)
}

/// The end of a domain, moved if it is not above the beginning.
fn end_above((low, high): (f64, f64)) -> f64 {
    match high > low {
        true => high,
        false => low + low.abs().max(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::{AxisScale, Unit};

    #[test]
    fn the_domain_is_mapped_to_the_range() {
        for scale in [
            AxisScale::linear(Unit::Count, (2.0, 10.0), (100.0, 0.0)),
            AxisScale::logarithmic(Unit::Count, (2.0, 10.0), (100.0, 0.0)),
        ] {
            assert!((scale.at(2.0) - 100.0).abs() < 1e-9);
            assert!(scale.at(10.0).abs() < 1e-9);
        }
        let logarithmic = AxisScale::logarithmic(Unit::Count, (1.0, 32.0), (0.0, 50.0));
        let steps = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0].map(|ranks| logarithmic.at(ranks));
        for (step, position) in steps.iter().zip([0.0, 10.0, 20.0, 30.0, 40.0, 50.0]) {
            assert!((step - position).abs() < 1e-9);
        }
    }

    #[test]
    fn ticks_are_round_values_within_the_domain() {
        let labels = |scale: AxisScale, most: usize| -> Vec<String> {
            scale
                .ticks(most)
                .iter()
                .map(|tick| scale.label(*tick))
                .collect()
        };
        let range = (0.0, 100.0);
        let bytes = AxisScale::linear(Unit::Bytes, (0.0, 4.5 * 1024.0 * 1024.0), range);
        assert_eq!(labels(bytes, 5), ["0", "1 MiB", "2 MiB", "3 MiB", "4 MiB"]);
        let small = AxisScale::linear(Unit::Bytes, (0.0, 700.0), range);
        assert_eq!(labels(small, 4), ["0", "200 B", "400 B", "600 B"]);
        let time = AxisScale::linear(Unit::Seconds, (0.0, 0.0123), range);
        assert_eq!(labels(time, 4), ["0", "5 ms", "10 ms"]);
        let ranks = AxisScale::logarithmic(Unit::Count, (1.0, 32.0), range);
        assert_eq!(labels(ranks, 6), ["1", "2", "4", "8", "16", "32"]);
        let held = AxisScale::logarithmic(Unit::Bytes, (3000.0, 5e6), range);
        assert_eq!(
            labels(held, 6),
            ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB"]
        );
        let few = AxisScale::linear(Unit::Count, (0.0, 3.0), range);
        assert_eq!(labels(few, 10), ["0", "1", "2", "3"]);
        let loss = AxisScale::linear(Unit::Number, (0.0, 1.2), range);
        assert_eq!(labels(loss, 4), ["0", "0.5", "1"]);
    }

    #[test]
    fn every_scale_has_between_one_and_most_ticks_within_its_domain() {
        let mut random = encke::conformance::Random::new(7);
        for _ in 0..2000 {
            let low = 10f64.powf(random.unit() * 6.0);
            let high = low * (1.0 + 10f64.powf(random.unit() * 6.0));
            let most = 1 + random.below(12);
            for unit in [Unit::Bytes, Unit::Seconds, Unit::Count, Unit::Number] {
                for scale in [
                    AxisScale::linear(unit, (0.0, high), (0.0, 1.0)),
                    AxisScale::logarithmic(unit, (low, high), (0.0, 1.0)),
                ] {
                    let ticks = scale.ticks(most);
                    assert!(!ticks.is_empty() && ticks.len() <= most.max(1), "{scale:?}");
                    for tick in ticks {
                        let position = scale.at(tick);
                        assert!((-1e-6..=1.0 + 1e-6).contains(&position), "{scale:?} {tick}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_domain_of_one_value_does_not_divide_by_zero() {
        for scale in [
            AxisScale::linear(Unit::Bytes, (0.0, 0.0), (0.0, 10.0)),
            AxisScale::logarithmic(Unit::Count, (1.0, 1.0), (0.0, 10.0)),
        ] {
            assert!(scale.at(1.0).is_finite());
            assert!(!scale.ticks(4).is_empty());
        }
    }

    #[test]
    fn values_are_formatted_in_a_suitable_unit() {
        assert_eq!(Unit::Bytes.format(1536.0), "1.50 KiB");
        assert_eq!(Unit::Bytes.format(0.0), "0 B");
        assert_eq!(Unit::Seconds.format(0.0123), "12.3 ms");
        assert_eq!(Unit::Count.format(65536.0), "65,536");
    }
}
