//! A layer: projections into heads, attention, and the projection back.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use crate::attention::{Attention, attention};
use crate::error::Error;

/// The sizes of a [`RingDilatedAttention`].
#[derive(Config, Debug)]
pub struct RingDilatedAttentionConfig {
    /// Features of a row.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, which query heads share; as many as heads, if not given.
    #[config(default = "None")]
    pub kv_heads: Option<usize>,
    /// Head dimension; the width divided by the heads, if not given.
    #[config(default = "None")]
    pub head_dim: Option<usize>,
}

/// Multi-head attention with the pattern and the ring of an [`Attention`].
#[derive(Module, Debug)]
pub struct RingDilatedAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    #[module(skip)]
    attention: Attention,
}

impl RingDilatedAttentionConfig {
    /// The layer with random weights on a device.
    pub fn init(
        &self,
        attention: &Attention,
        device: &Device,
    ) -> Result<RingDilatedAttention, Error> {
        let (width, heads) = (self.width, self.heads);
        let kv_heads = self.kv_heads.unwrap_or(heads);
        let head_dim = self.head_dim.unwrap_or(width / heads.max(1));
        if heads == 0 || kv_heads == 0 || head_dim == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::Heads {
                heads,
                kv_heads,
                dim: head_dim,
            });
        }
        let linear = |from: usize, to: usize| {
            let config = LinearConfig::new(from, to).with_bias(false);
            config.init(device)
        };
        Ok(RingDilatedAttention {
            q: linear(width, heads * head_dim),
            k: linear(width, kv_heads * head_dim),
            v: linear(width, kv_heads * head_dim),
            out: linear(heads * head_dim, width),
            heads,
            kv_heads,
            head_dim,
            attention: attention.clone(),
        })
    }
}

impl RingDilatedAttention {
    /// `[b, n, width]` to `[b, n, width]`.
    pub fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>, Error> {
        let [batch, tokens, _] = x.dims();
        let split = |x: Tensor<3>, heads: usize| x.reshape([batch, tokens, heads, self.head_dim]);
        let q = split(self.q.forward(x.clone()), self.heads);
        let k = split(self.k.forward(x.clone()), self.kv_heads);
        let v = split(self.v.forward(x), self.kv_heads);
        let out = attention(q, k, v, &self.attention)?;
        let out = out.reshape([batch, tokens, self.heads * self.head_dim]);
        Ok(self.out.forward(out))
    }
}
