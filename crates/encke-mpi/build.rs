//! Compiles the shim with `MPICC`, or `mpicc` if that is not set.

fn main() {
    println!("cargo:rerun-if-env-changed=MPICC");
    println!("cargo:rerun-if-changed=src/shim.c");
    #[cfg(feature = "mpi")]
    {
        let mpicc = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".to_string());
        cc::Build::new()
            .compiler(mpicc)
            .file("src/shim.c")
            .warnings(true)
            .compile("encke_mpi_shim");
    }
}
