//! Detects a launcher such as `mpirun` or `srun` from its environment variables.
//!
//! The decision here: MPI is not started to find out, because a process that runs alone needs no
//! MPI. The core crate reads no environment variables, so this is here.

/// This process among the processes of its launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedProcess {
    /// Its rank.
    pub rank: usize,
    /// The number of processes.
    pub ranks: usize,
    /// The environment variable with the number of processes.
    pub variable: &'static str,
}

/// The variables with the number of processes and with the rank of this one.
const LAUNCHERS: [(&str, &str); 4] = [
    // Open MPI's mpirun.
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    // The PMI of MPICH, Intel MPI and Slurm.
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    // Slurm's srun with any PMI.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
];

/// This process's place in its launch, if a launcher started it.
pub fn launched_process() -> Option<LaunchedProcess> {
    launched_process_in(|name| std::env::var(name).ok())
}

/// The same with `value` in place of the environment.
pub fn launched_process_in(value: impl Fn(&str) -> Option<String>) -> Option<LaunchedProcess> {
    LAUNCHERS.into_iter().find_map(|(size, rank)| {
        let number = |name: &str| value(name)?.trim().parse::<usize>().ok();
        let (ranks, rank) = (number(size)?, number(rank)?);
        (rank < ranks).then_some(LaunchedProcess {
            rank,
            ranks,
            variable: size,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Option<(usize, usize)> {
        let value = |name: &str| {
            let of = variables.iter().find(|(key, _)| *key == name);
            of.map(|(_, value)| (*value).to_string())
        };
        launched_process_in(value)
            .map(|launched_process| (launched_process.rank, launched_process.ranks))
    }

    #[test]
    fn launchers_are_detected_by_their_variables() {
        assert_eq!(found(&[]), None);
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")];
        assert_eq!(found(&open_mpi), Some((3, 4)));
        assert_eq!(found(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")]), Some((0, 2)));
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "7")];
        assert_eq!(found(&slurm), Some((7, 8)));
    }

    #[test]
    fn incomplete_or_invalid_variables_are_ignored() {
        assert_eq!(found(&[("PMI_SIZE", "2")]), None);
        assert_eq!(found(&[("PMI_SIZE", "2"), ("PMI_RANK", "2")]), None);
        assert_eq!(found(&[("PMI_SIZE", "many"), ("PMI_RANK", "0")]), None);
    }
}
