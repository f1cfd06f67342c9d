//! `encke generate`: writes a file of generated tensors of any size.
//!
//! The elements are those of `encke billion`'s generator: each depends on its index alone. The file
//! is written piece by piece, so it may be larger than memory.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use encke::plan::program::Role;
use encke_lab::Verdict;
use encke_lab::output::{OutputFile, TensorEntry};
use encke_lab::terminal::long_bar;
use encke_ring::out_of_core::{Files, Generator, copy_tensor};

use crate::shape_options::ShapeOptions;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke generate qkv.safetensors --tokens 64k --heads 8 --kv-heads 2 --dim 64 --grad
      q, k, v and do, for `encke attend --grad`.
  encke generate huge.safetensors --tokens 52e6 --heads 1 --dim 64 --dtype bf16
      20 GB; then: encke attend huge.safetensors -o out.safetensors --memory-limit 2GiB ...

Elements are uniform with mean 0 and variance 1. The same options give the same file.";

/// Writes a file of generated tensors.
#[derive(Debug, Args)]
#[command(mut_arg("tokens", |tokens| tokens.help("Tokens of the sequence")))]
pub struct Options {
    /// Where to write q [b,nq,h,d], k [b,n,hkv,d], v [b,n,hkv,dv], and with --grad do [b,nq,h,dv].
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,

    #[command(flatten)]
    sizes: ShapeOptions,

    /// Also write do, which `encke attend --grad` needs.
    #[arg(long)]
    grad: bool,

    /// Seed of the elements.
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let (shape, dtype) = (options.sizes.shape()?, options.sizes.dtype());
    let keys = |width: usize| [shape.batch, shape.tokens, shape.kv_heads, width];
    let queries = |width: usize| [shape.batch, shape.queries, shape.heads, width];
    let mut tensors = vec![
        (Role::Q, "q", queries(shape.dim)),
        (Role::K, "k", keys(shape.dim)),
        (Role::V, "v", keys(shape.value_dim)),
    ];
    let dout = (Role::Dout, "do", queries(shape.value_dim));
    tensors.extend(options.grad.then_some(dout));
    let output = OutputFile::create(&options.output, &[])?;
    let entry = |&(_, name, dims): &(Role, &'static str, [usize; 4])| TensorEntry {
        name,
        shape: dims.to_vec(),
        dtype,
    };
    let entries: Vec<TensorEntry> = tensors.iter().map(entry).collect();
    let mut files = Files::new();
    for ((role, ..), tensor) in tensors.iter().zip(output.prepare(&entries)?) {
        files.add(*role, tensor);
    }
    let progress = long_bar(tensors.len());
    for &(role, name, dims) in &tensors {
        progress.set_message(name);
        let generator = Generator::new(options.seed, dims[3]);
        copy_tensor(&generator, &mut files, role, dims, dtype)?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    output.keep()?;
    Ok(Verdict::Fine)
}
