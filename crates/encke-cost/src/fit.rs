//! Least squares with coefficients that are never negative.
//!
//! Costs add up; a negative one would be an artefact of noise, and a machine made of it would give
//! time back. Errors count relative to what was measured, so short jobs weigh as much as long ones.

/// Coefficients `c >= 0` for which `costs · c` is nearest to the seconds of each line, relatively.
pub(super) fn fit<const N: usize>(lines: &[([f64; N], f64)]) -> [f64; N] {
    // Columns are brought to one scale first: they count operations, bytes and jobs.
    let mut scale = [0.0f64; N];
    for (costs, seconds) in lines.iter().filter(|(_, seconds)| *seconds > 0.0) {
        for (scale, cost) in scale.iter_mut().zip(costs) {
            *scale = scale.max(cost / seconds);
        }
    }
    let mut matrix = [[0.0f64; N]; N];
    let mut target = [0.0f64; N];
    for (costs, seconds) in lines.iter().filter(|(_, seconds)| *seconds > 0.0) {
        let row: [f64; N] = std::array::from_fn(|i| match scale[i] > 0.0 {
            true => costs[i] / seconds / scale[i],
            false => 0.0,
        });
        for i in 0..N {
            target[i] += row[i];
            for j in 0..N {
                matrix[i][j] += row[i] * row[j];
            }
        }
    }
    // One coefficient at a time, each to its best value: converges, the problem being convex.
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
    use super::fit;

    #[test]
    fn finds_what_the_readings_were_made_of() {
        let costs = [
            [1e9, 0.0, 1e6, 1.0],
            [5e8, 1e6, 1e6, 1.0],
            [1e7, 1e4, 1e5, 1.0],
            [2e8, 0.0, 4e6, 1.0],
            [3e7, 5e5, 2e5, 1.0],
        ];
        let made_of = [1e-11, 3e-10, 2e-10, 1e-5];
        let seconds = |costs: &[f64; 4]| costs.iter().zip(made_of).map(|(a, b)| a * b).sum::<f64>();
        let lines = costs.map(|costs| (costs, seconds(&costs)));
        for (costs, seconds) in lines {
            let found = fit(&lines);
            let told: f64 = costs.iter().zip(found).map(|(a, b)| a * b).sum();
            assert!((told / seconds - 1.0).abs() < 1e-3, "{told} for {seconds}");
        }
    }

    #[test]
    fn costs_are_never_negative() {
        // The second line takes less than the first though it has more of everything.
        let found = fit(&[([1.0, 1.0], 2.0), ([2.0, 3.0], 1.0), ([1.0, 0.0], 1.0)]);
        assert!(found.iter().all(|&one| one >= 0.0), "{found:?}");
        assert_eq!(fit::<2>(&[]), [0.0, 0.0]);
    }
}
