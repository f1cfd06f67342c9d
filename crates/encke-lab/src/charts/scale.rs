//! From numbers to places: one scale for all charts, and the round numbers along it.
//!
//! The decision here: a scale knows the unit of its numbers, because what is round depends on it.
//! Bytes are round in KiB and MiB, ring sizes in powers of two, times in 1, 2 and 5.

use super::markup::ShortNumber;

/// What the numbers of a scale are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, read in B, KiB, MiB and so on.
    Bytes,
    /// Seconds, read in µs, ms or s.
    Seconds,
    /// Whole things, such as ranks and tokens.
    Count,
    /// Numbers without a unit, such as a loss.
    Number,
}

/// How numbers are spread along a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spread {
    Even,
    Doubling,
}

/// From numbers to places on a line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AxisScale {
    unit: Unit,
    spread: Spread,
    domain: (f64, f64),
    range: (f64, f64),
}

impl AxisScale {
    /// Equal steps are equally far apart.
    pub fn even(unit: Unit, domain: (f64, f64), range: (f64, f64)) -> AxisScale {
        AxisScale {
            unit,
            spread: Spread::Even,
            domain: (domain.0, wider(domain)),
            range,
        }
    }

    /// Equal ratios are equally far apart. The domain must be above 0.
    pub fn doubling(unit: Unit, domain: (f64, f64), range: (f64, f64)) -> AxisScale {
        assert!(domain.0 > 0.0, "a ratio scale begins above 0");
        AxisScale {
            unit,
            spread: Spread::Doubling,
            domain: (domain.0, wider(domain)),
            range,
        }
    }

    /// Where a number is.
    pub fn at(&self, value: f64) -> f64 {
        let (low, high) = self.domain;
        let share = match self.spread {
            Spread::Even => (value - low) / (high - low),
            Spread::Doubling => (value / low).ln() / (high / low).ln(),
        };
        self.range.0 + share * (self.range.1 - self.range.0)
    }

    /// Round numbers along the scale, at most `most` of them (but never fewer than one).
    pub fn ticks(&self, most: usize) -> Vec<f64> {
        match self.spread {
            Spread::Even => self.even_ticks(most.max(1)),
            Spread::Doubling => self.doubling_ticks(most.max(1)),
        }
    }

    /// What is written beside a tick.
    pub fn label(&self, tick: f64) -> String {
        match self.unit {
            Unit::Count => grouped(tick),
            Unit::Number => ShortNumber(tick).to_string(),
            unit => {
                let (size, name) = unit.measure(match self.spread {
                    // One unit along the whole axis: 0, 500, 1000 KiB, never 1 MiB among them.
                    Spread::Even => self.domain.1,
                    Spread::Doubling => tick,
                });
                match tick {
                    0.0 => "0".to_string(),
                    tick => format!("{} {name}", ShortNumber(tick / size)),
                }
            }
        }
    }

    fn even_ticks(&self, most: usize) -> Vec<f64> {
        let (low, high) = self.domain;
        let (size, _) = self.unit.measure(high);
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

    fn doubling_ticks(&self, most: usize) -> Vec<f64> {
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
    /// The size and name of the unit in which numbers up to `largest` are read.
    fn measure(self, largest: f64) -> (f64, &'static str) {
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

    /// A number as people read it, for words and tables.
    pub fn words(self, value: f64) -> String {
        let (size, name) = self.measure(value);
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

/// A number of things.
fn grouped(value: f64) -> String {
    encke::explain::grouped(value.round().max(0.0) as u128)
}

/// The end of a domain, moved where it would be no more than the beginning.
fn wider((low, high): (f64, f64)) -> f64 {
    match high > low {
        true => high,
        false => low + low.abs().max(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::{AxisScale, Unit};

    #[test]
    fn ends_of_the_domain_are_at_the_ends_of_the_range() {
        for scale in [
            AxisScale::even(Unit::Count, (2.0, 10.0), (100.0, 0.0)),
            AxisScale::doubling(Unit::Count, (2.0, 10.0), (100.0, 0.0)),
        ] {
            assert!((scale.at(2.0) - 100.0).abs() < 1e-9);
            assert!(scale.at(10.0).abs() < 1e-9);
        }
        let doubling = AxisScale::doubling(Unit::Count, (1.0, 32.0), (0.0, 50.0));
        let steps = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0].map(|ranks| doubling.at(ranks));
        for (step, place) in steps.iter().zip([0.0, 10.0, 20.0, 30.0, 40.0, 50.0]) {
            assert!((step - place).abs() < 1e-9);
        }
    }

    #[test]
    fn ticks_are_round_and_few_and_inside() {
        let labels = |scale: AxisScale, most: usize| -> Vec<String> {
            scale
                .ticks(most)
                .iter()
                .map(|tick| scale.label(*tick))
                .collect()
        };
        let range = (0.0, 100.0);
        let bytes = AxisScale::even(Unit::Bytes, (0.0, 4.5 * 1024.0 * 1024.0), range);
        assert_eq!(labels(bytes, 5), ["0", "1 MiB", "2 MiB", "3 MiB", "4 MiB"]);
        let small = AxisScale::even(Unit::Bytes, (0.0, 700.0), range);
        assert_eq!(labels(small, 4), ["0", "200 B", "400 B", "600 B"]);
        let time = AxisScale::even(Unit::Seconds, (0.0, 0.0123), range);
        assert_eq!(labels(time, 4), ["0", "5 ms", "10 ms"]);
        let ranks = AxisScale::doubling(Unit::Count, (1.0, 32.0), range);
        assert_eq!(labels(ranks, 6), ["1", "2", "4", "8", "16", "32"]);
        let held = AxisScale::doubling(Unit::Bytes, (3000.0, 5e6), range);
        assert_eq!(
            labels(held, 6),
            ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB"]
        );
        let few = AxisScale::even(Unit::Count, (0.0, 3.0), range);
        assert_eq!(labels(few, 10), ["0", "1", "2", "3"]);
        let loss = AxisScale::even(Unit::Number, (0.0, 1.2), range);
        assert_eq!(labels(loss, 4), ["0", "0.5", "1"]);
    }

    #[test]
    fn every_scale_has_ticks_inside_its_domain_and_no_more_than_asked() {
        let mut random = encke::conformance::Random::new(7);
        for _ in 0..2000 {
            let low = 10f64.powf(random.unit() * 6.0);
            let high = low * (1.0 + 10f64.powf(random.unit() * 6.0));
            let most = 1 + random.below(12);
            for unit in [Unit::Bytes, Unit::Seconds, Unit::Count, Unit::Number] {
                for scale in [
                    AxisScale::even(unit, (0.0, high), (0.0, 1.0)),
                    AxisScale::doubling(unit, (low, high), (0.0, 1.0)),
                ] {
                    let ticks = scale.ticks(most);
                    assert!(!ticks.is_empty() && ticks.len() <= most.max(1), "{scale:?}");
                    for tick in ticks {
                        let place = scale.at(tick);
                        assert!((-1e-6..=1.0 + 1e-6).contains(&place), "{scale:?} {tick}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_domain_of_one_number_is_no_division_by_zero() {
        for scale in [
            AxisScale::even(Unit::Bytes, (0.0, 0.0), (0.0, 10.0)),
            AxisScale::doubling(Unit::Count, (1.0, 1.0), (0.0, 10.0)),
        ] {
            assert!(scale.at(1.0).is_finite());
            assert!(!scale.ticks(4).is_empty());
        }
    }

    #[test]
    fn numbers_are_read_in_the_unit_that_fits() {
        assert_eq!(Unit::Bytes.words(1536.0), "1.50 KiB");
        assert_eq!(Unit::Bytes.words(0.0), "0 B");
        assert_eq!(Unit::Seconds.words(0.0123), "12.3 ms");
        assert_eq!(Unit::Count.words(65536.0), "65,536");
    }
}
