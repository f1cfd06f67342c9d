//! Non-negative least squares on relative errors.
//!
//! Costs add up: a negative coefficient would be an artefact of noise, and a machine with one could
//! finish a job before it began. Errors are relative to the measured time, so short jobs weigh as
//! much as long ones.

/// Coefficients `c >= 0` that minimise the relative error of `features · c` against the seconds of
/// each sample.
pub(crate) fn nonnegative_least_squares<const N: usize>(samples: &[([f64; N], f64)]) -> [f64; N] {
    // Columns are normalised first: they count operations, bytes and jobs.
    let mut scale = [0.0f64; N];
    for (features, seconds) in samples.iter().filter(|(_, seconds)| *seconds > 0.0) {
        for (scale, feature) in scale.iter_mut().zip(features) {
            *scale = scale.max(feature / seconds);
        }
    }
    let mut matrix = [[0.0f64; N]; N];
    let mut target = [0.0f64; N];
    for (features, seconds) in samples.iter().filter(|(_, seconds)| *seconds > 0.0) {
        let row: [f64; N] = std::array::from_fn(|i| match scale[i] > 0.0 {
            true => features[i] / seconds / scale[i],
            false => 0.0,
        });
        for i in 0..N {
            target[i] += row[i];
            for j in 0..N {
                matrix[i][j] += row[i] * row[j];
            }
        }
    }
    // Coordinate descent; it converges because the problem is convex.
    let mut found = [0.0f64; N];
    for _ in 0..20_000 {
        for i in 0..N {
            if matrix[i][i] > 0.0 {
                let others: f64 = (0..N)
                    .filter(|&j| j != i)
                    .map(|j| matrix[i][j] * found[j])
                    .sum();
                found[i] = ((target[i] - others) / matrix[i][i]).max(0.0);
            }
        }
    }
    std::array::from_fn(|i| {
        if scale[i] > 0.0 {
            found[i] / scale[i]
        } else {
            0.0
        }
    })
}

#[cfg(test)]
mod tests {
    use super::nonnegative_least_squares;

    #[test]
    fn predicts_the_exact_samples_it_was_fitted_to() {
        let features = [
            [1e9, 0.0, 1e6, 1.0],
            [5e8, 1e6, 1e6, 1.0],
            [1e7, 1e4, 1e5, 1.0],
            [2e8, 0.0, 4e6, 1.0],
            [3e7, 5e5, 2e5, 1.0],
        ];
        let coefficients = [1e-11, 3e-10, 2e-10, 1e-5];
        let dot = |features: &[f64; 4], by: [f64; 4]| -> f64 {
            features.iter().zip(by).map(|(a, b)| a * b).sum()
        };
        let samples = features.map(|features| (features, dot(&features, coefficients)));
        for (features, seconds) in samples {
            let found = nonnegative_least_squares(&samples);
            let predicted = dot(&features, found);
            assert!(
                (predicted / seconds - 1.0).abs() < 1e-3,
                "{predicted} for {seconds}"
            );
        }
    }

    #[test]
    fn coefficients_are_never_negative() {
        // The second sample takes less time than the first though each feature is larger.
        let samples = [([1.0, 1.0], 2.0), ([2.0, 3.0], 1.0), ([1.0, 0.0], 1.0)];
        let found = nonnegative_least_squares(&samples);
        assert!(found.iter().all(|&c| c >= 0.0), "{found:?}");
        assert_eq!(nonnegative_least_squares::<2>(&[]), [0.0, 0.0]);
    }
}
