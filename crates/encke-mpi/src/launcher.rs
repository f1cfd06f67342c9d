//! Whether a launcher started several of us, from what it leaves in the environment.
//!
//! Core reads no environment, and the MPI library must not be started to find out: a process that
//! was started alone needs none.

/// This process among those that were started together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedProcess {
    /// Its number.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Who says so: the variable that holds the number of processes.
    pub variable: &'static str,
}

/// Variables that hold the number of processes and the number of this one.
const LAUNCHERS: [(&str, &str); 4] = [
    // Open MPI's mpirun.
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    // MPICH's, Intel's and Slurm's PMI.
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    // Slurm's srun, whichever PMI it offers.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
];

/// Where this process is, if a launcher started it.
pub fn launched_process() -> Option<LaunchedProcess> {
    launched_process_in(|name| std::env::var(name).ok())
}

/// The same in any environment.
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
        launched_process_in(value).map(|launched_process| (launched_process.rank, launched_process.ranks))
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        assert_eq!(found(&[]), None);
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")];
        assert_eq!(found(&open_mpi), Some((3, 4)));
        assert_eq!(found(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")]), Some((0, 2)));
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "7")];
        assert_eq!(found(&slurm), Some((7, 8)));
    }

    #[test]
    fn what_makes_no_sense_is_no_launcher() {
        assert_eq!(found(&[("PMI_SIZE", "2")]), None);
        assert_eq!(found(&[("PMI_SIZE", "2"), ("PMI_RANK", "2")]), None);
        assert_eq!(found(&[("PMI_SIZE", "many"), ("PMI_RANK", "0")]), None);
    }
}
