//! `encke generate`: a file of generated tensors of any size, to try things with.
//!
//! The numbers are those of `encke billion`'s generator: each depends on its place alone. The file
//! is written piece by piece, so it may be larger than memory.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use encke::plan::program::Role;
use encke::{DType, Shape};
use encke_sim::stream::{Files, Generator, transfer};

use crate::Verdict;
use crate::number::count;
use crate::output::{Entry, OutputFile};
use crate::terminal::long_bar;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke generate qkv.safetensors --tokens 64k --heads 8 --kv-heads 2 --dim 64 --grad
      q, k, v and do, to run `encke attend --grad` on.
  encke generate huge.safetensors --tokens 52e6 --heads 1 --dim 64 --dtype bf16
      20 GB; then: encke attend huge.safetensors -o out.safetensors --memory-limit 2GiB ...

Numbers are spread evenly with mean 0 and variance 1. The same options give the same file.";

/// A file of generated tensors.
#[derive(Debug, Args)]
pub struct Options {
    /// Where to write q [b,n,h,d], k, v [b,n,hkv,d], and with --grad do [b,n,h,d].
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,

    /// Tokens of the sequence.
    #[arg(long, value_name = "N", value_parser = count)]
    tokens: usize,

    /// Query heads.
    #[arg(long, value_name = "H", value_parser = count)]
    heads: usize,

    /// Key and value heads; they divide the query heads [default: as many as query heads].
    #[arg(long, value_name = "HKV", value_parser = count)]
    kv_heads: Option<usize>,

    /// Numbers per head and token.
    #[arg(long, value_name = "D", value_parser = count)]
    dim: usize,

    /// Independent sequences.
    #[arg(long, value_name = "B", value_parser = count, default_value = "1")]
    batch: usize,

    /// Type of the tensors: f64, f32, bf16 or f16.
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: DType,

    /// Also write do, which `encke attend --grad` needs.
    #[arg(long)]
    grad: bool,

    /// Another seed makes other numbers.
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let &Options {
        batch,
        tokens,
        heads,
        dim,
        dtype,
        ..
    } = options;
    let kv_heads = options.kv_heads.unwrap_or(heads);
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim)?;
    let of = |heads: usize| [shape.batch, shape.tokens, heads, shape.dim];
    let mut tensors = vec![
        (Role::Q, "q", of(heads)),
        (Role::K, "k", of(kv_heads)),
        (Role::V, "v", of(kv_heads)),
    ];
    tensors.extend(options.grad.then_some((Role::Dout, "do", of(heads))));
    let output = OutputFile::create(&options.output, &[])?;
    let entry = |&(_, name, dims): &(Role, &'static str, [usize; 4])| Entry {
        name,
        shape: dims.to_vec(),
        dtype,
    };
    let entries: Vec<Entry> = tensors.iter().map(entry).collect();
    let mut files = Files::new();
    for ((role, ..), tensor) in tensors.iter().zip(output.prepare(&entries)?) {
        files.add(*role, tensor);
    }
    let generator = Generator::new(options.seed, dim);
    let progress = long_bar(tensors.len());
    for &(role, name, dims) in &tensors {
        progress.set_message(name);
        transfer(&generator, &mut files, role, dims, dtype)?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    output.keep()?;
    Ok(Verdict::Fine)
}
