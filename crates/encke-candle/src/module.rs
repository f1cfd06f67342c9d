//! A layer: projections into heads, attention, and the projection back.
//!
//! Outside the attention every row is independent of the others, so a process that has only its
//! rows of a sequence applies the same module.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear_no_bias};

use crate::attention::Attention;
use crate::error::Error;
use crate::norm::rms_norm;
use crate::operation::attention;

/// The sizes of a [`RingDilatedAttention`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Features of a row.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query heads share them.
    pub kv_heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Whether queries and keys are RMS-normalised (QK norm).
    pub qk_norm: bool,
}

impl LayerConfig {
    /// Multi-head attention with head dimension `width / heads` and as many key heads as heads.
    pub fn new(width: usize, heads: usize) -> LayerConfig {
        LayerConfig {
            width,
            heads,
            kv_heads: heads,
            head_dim: width / heads.max(1),
            qk_norm: false,
        }
    }
}

/// Multi-head attention with the pattern and the ring of an [`Attention`].
#[derive(Debug, Clone)]
pub struct RingDilatedAttention {
    config: LayerConfig,
    attention: Attention,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    norms: Option<(Tensor, Tensor)>,
}

impl RingDilatedAttention {
    /// The layer, with the weights `q`, `k`, `v`, `out` (and `q_norm`, `k_norm`) of `weights`.
    pub fn new(
        config: LayerConfig,
        attention: &Attention,
        weights: VarBuilder<'_>,
    ) -> Result<Self> {
        let LayerConfig {
            width,
            heads,
            kv_heads,
            head_dim,
            qk_norm,
        } = config;
        if heads == 0 || kv_heads == 0 || head_dim == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::Heads {
                heads,
                kv_heads,
                dim: head_dim,
            }
            .into());
        }
        let project =
            |name: &str, heads: usize| linear_no_bias(width, heads * head_dim, weights.pp(name));
        let norm = |name: &str| {
            let one = candle_nn::Init::Const(1.0);
            weights.get_with_hints(head_dim, name, one)
        };
        let norms =
            qk_norm.then(|| Ok::<_, candle_core::Error>((norm("q_norm")?, norm("k_norm")?)));
        Ok(RingDilatedAttention {
            config,
            attention: attention.clone(),
            q: project("q", heads)?,
            k: project("k", kv_heads)?,
            v: project("v", kv_heads)?,
            out: linear_no_bias(heads * head_dim, width, weights.pp("out"))?,
            norms: norms.transpose()?,
        })
    }

    /// Queries, keys and values of rows `[b, n, width]`, each `[b, n, heads, head_dim]`.
    pub fn project(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let LayerConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        let (batch, tokens, _) = x.dims3()?;
        let split = |x: Tensor, heads: usize| x.reshape((batch, tokens, heads, head_dim));
        let mut q = split(self.q.forward(x)?, heads)?;
        let mut k = split(self.k.forward(x)?, kv_heads)?;
        let v = split(self.v.forward(x)?, kv_heads)?;
        if let Some((q_norm, k_norm)) = &self.norms {
            q = rms_norm(&q, q_norm)?;
            k = rms_norm(&k, k_norm)?;
        }
        Ok([q, k, v])
    }

    /// Rows `[b, n, width]` of an output of the attention, `[b, n, heads, head_dim]`.
    pub fn merge_heads(&self, out: &Tensor) -> Result<Tensor> {
        let (batch, tokens, heads, dim) = out.dims4()?;
        self.out
            .forward(&out.reshape((batch, tokens, heads * dim))?)
    }

    /// The attention of the layer.
    pub fn attention(&self) -> &Attention {
        &self.attention
    }
}

impl Module for RingDilatedAttention {
    /// `[b, n, width]` to `[b, n, width]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [q, k, v] = self.project(x)?;
        let out = attention(&q, &k, &v, &self.attention)?;
        self.merge_heads(&out.to_dtype(x.dtype())?)
    }
}
