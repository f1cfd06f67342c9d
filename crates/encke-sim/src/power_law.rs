//! The exponent of a power law fitted to points.

/// The exponent `e` of `y = c·x^e` by least squares on logarithms. Points with x or y of 0 have
/// no logarithm and are left out; `None` if fewer than two different x are left.
pub fn exponent(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> = points
        .iter()
        .filter(|(x, y)| *x > 0.0 && *y > 0.0)
        .map(|(x, y)| (x.ln(), y.ln()))
        .collect();
    let count = logs.len() as f64;
    let mean =
        |coordinate: fn(&(f64, f64)) -> f64| logs.iter().map(coordinate).sum::<f64>() / count;
    let (x_mean, y_mean) = (mean(|p| p.0), mean(|p| p.1));
    let variance: f64 = logs.iter().map(|(x, _)| (x - x_mean).powi(2)).sum();
    let covariance: f64 = logs.iter().map(|(x, y)| (x - x_mean) * (y - y_mean)).sum();
    (variance > 1e-12).then(|| covariance / variance)
}

#[cfg(test)]
mod tests {
    use super::exponent;

    #[test]
    fn the_exponent_of_an_exact_power_law_is_found() {
        for e in [-1.0, -0.5, 0.0, 2.0] {
            let points = [1.0f64, 2.0, 4.0, 8.0].map(|x| (x, 7.0 * x.powf(e)));
            let found = exponent(&points).expect("four points");
            assert!((found - e).abs() < 1e-12, "{found} for {e}");
        }
    }

    #[test]
    fn zeros_are_left_out_and_one_point_is_not_enough() {
        let law = [(1.0, 0.0), (2.0, 8.0), (4.0, 4.0)];
        assert!((exponent(&law).expect("two points") + 1.0).abs() < 1e-12);
        assert_eq!(exponent(&law[..2]), None);
        assert_eq!(exponent(&[(1.0, 0.0), (2.0, 0.0), (4.0, 10.0)]), None);
        assert_eq!(exponent(&[]), None);
    }
}
