//! The sizes of one attention call.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, product};

/// Sizes of q `[batch, queries, heads, dim]`, k `[batch, tokens, kv_heads, dim]` and v `[batch,
/// tokens, kv_heads, value_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Tokens of the whole sequence, over all ranks.
    pub tokens: usize,
    /// Queries: all tokens, or fewer.
    pub queries: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads key head `h * kv_heads / heads`.
    pub kv_heads: usize,
    /// Elements per head and token of q and k.
    pub dim: usize,
    /// Elements per head and token of v and the output.
    pub value_dim: usize,
}

/// The largest head dimension: kernels hold blocks of such rows for each thread.
const MOST_DIM: usize = 1 << 20;

fn check_dim(what: &'static str, got: usize) -> Result<()> {
    match got <= MOST_DIM {
        true => Ok(()),
        false => Err(Error::LargeDim {
            what,
            got,
            most: MOST_DIM,
        }),
    }
}

impl Shape {
    /// A checked shape: no size is zero, the key heads divide the query heads, nothing overflows.
    pub fn new(
        batch: usize,
        tokens: usize,
        heads: usize,
        kv_heads: usize,
        dim: usize,
    ) -> Result<Self> {
        let sizes = [
            ("the batch", batch),
            ("the number of tokens", tokens),
            ("the number of heads", heads),
            ("the number of key/value heads", kv_heads),
            ("the head dimension", dim),
        ];
        for (what, size) in sizes {
            if size == 0 {
                return Err(Error::Zero { what });
            }
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadGroups { heads, kv_heads });
        }
        // 8 bytes per element, and a factor of 64 for the buffers a rank may hold in addition.
        product(
            "the size of the tensors",
            &[batch, tokens, heads, dim, 8 * 64],
        )?;
        check_dim("the head dimension", dim)?;
        Ok(Shape {
            batch,
            tokens,
            queries: tokens,
            heads,
            kv_heads,
            dim,
            value_dim: dim,
        })
    }

    /// The same with another number of tokens, and as many queries if there is one for each token.
    pub fn with_tokens(self, tokens: usize) -> Shape {
        let queries = match self.queries == self.tokens {
            true => tokens,
            false => self.queries.min(tokens),
        };
        Shape {
            tokens,
            queries,
            ..self
        }
    }

    /// The same with fewer queries than tokens.
    pub fn with_queries(self, queries: usize) -> Result<Shape> {
        if queries == 0 {
            let what = "the number of queries";
            return Err(Error::Zero { what });
        }
        if queries > self.tokens {
            let tokens = self.tokens;
            return Err(Error::MoreQueries { queries, tokens });
        }
        Ok(Shape { queries, ..self })
    }

    /// The same with another head dimension of values and outputs.
    pub fn with_value_dim(self, value_dim: usize) -> Result<Shape> {
        if value_dim == 0 {
            let what = "the head dimension of the values";
            return Err(Error::Zero { what });
        }
        let factors = [self.batch, self.tokens, self.heads, value_dim, 8 * 64];
        product("the size of the tensors", &factors)?;
        check_dim("the head dimension of the values", value_dim)?;
        Ok(Shape { value_dim, ..self })
    }

    /// The key head that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head * self.kv_heads / self.heads
    }

    /// The default softmax scale, 1/sqrt(dim).
    pub fn default_scale(&self) -> f64 {
        1.0 / (self.dim as f64).sqrt()
    }
}
