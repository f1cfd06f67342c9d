//! The options for the sizes of the tensors, shared by all commands that need a shape.
//!
//! The decision here: names, help and order are the same for every command, and a command sets its
//! defaults with [`default`], so that its help shows them.

use anyhow::{Result, anyhow};
use clap::{Arg, Args};
use encke::{DType, Shape};
use encke_lab::number::count;

/// Sizes of the tensors.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sizes")]
pub struct ShapeOptions {
    /// Tokens of the sequence, over all ranks.
    #[arg(long, value_name = "N", value_parser = count, required = true)]
    pub tokens: Option<usize>,

    /// Query heads.
    #[arg(long, value_name = "H", value_parser = count)]
    pub heads: usize,

    /// Key and value heads; a divisor of the query heads [default: as many as query heads].
    #[arg(long, value_name = "HKV", value_parser = count)]
    kv_heads: Option<usize>,

    /// Head dimension.
    #[arg(long, value_name = "D", value_parser = count)]
    pub dim: usize,

    /// Head dimension of v and out [default: that of q and k].
    #[arg(long, value_name = "DV", value_parser = count)]
    value_dim: Option<usize>,

    /// Queries, if they are fewer than tokens: those of the last tokens, or from --query-offset on
    /// [default: as many as tokens].
    #[arg(long, value_name = "NQ", value_parser = count)]
    query_tokens: Option<usize>,

    /// Independent sequences.
    #[arg(long, value_name = "B", value_parser = count, default_value = "1")]
    batch: usize,

    /// Type of the tensors: f64, f32, bf16 or f16 [default: f32].
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<DType>,
}

/// For `mut_arg`: makes an option optional, with this default.
pub fn default(value: &'static str) -> impl FnOnce(Arg) -> Arg {
    move |option| option.required(false).default_value(value)
}

impl ShapeOptions {
    /// The shape, or what is wrong with it.
    pub fn shape(&self) -> Result<Shape> {
        let tokens = self.tokens.ok_or_else(|| {
            anyhow!("--tokens is missing: give the length of the sequence, as in --tokens 1e9")
        })?;
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        let shape = Shape::new(self.batch, tokens, self.heads, kv_heads, self.dim)?;
        let shape = shape.with_queries(self.query_tokens.unwrap_or(tokens))?;
        Ok(shape.with_value_dim(self.value_dim.unwrap_or(self.dim))?)
    }

    /// The type of the tensors.
    pub fn dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }
}
