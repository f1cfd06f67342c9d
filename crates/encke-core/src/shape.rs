//! The sizes of one attention call.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, product};

/// Sizes of q `[batch, tokens, heads, dim]` and of k and v `[batch, tokens, kv_heads, dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Tokens of the whole sequence, over all ranks.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads key head `h * kv_heads / heads`.
    pub kv_heads: usize,
    /// Elements per head and token.
    pub dim: usize,
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
        Ok(Shape {
            batch,
            tokens,
            heads,
            kv_heads,
            dim,
        })
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
