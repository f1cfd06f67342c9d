//! The model: a decoder of LongNet layers over bytes, or over the symbols of a task.
//!
//! The decision here: everything but the attention works on single rows. There is no positional
//! encoding; each row starts as the sum of the embeddings of its token and the few tokens before
//! it, and attention is causal. So a process that has only its rows of a sequence, and all tokens,
//! can compute its rows of everything.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, linear_no_bias};
use encke_candle::{Attention, LayerConfig, RingDilatedAttention, rms_norm};
use serde::{Deserialize, Serialize};

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Size of the vocabulary.
    pub symbols: usize,
    /// Features of a row.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Tokens whose embeddings a row starts with: its own, and those before it.
    pub recent: usize,
}

/// A LongNet.
pub struct LongNet {
    sizes: ModelConfig,
    recent: Vec<Embedding>,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Linear,
}

struct Layer {
    attention: RingDilatedAttention,
    attention_norm: Tensor,
    widen: Linear,
    narrow: Linear,
    norm: Tensor,
}

impl LongNet {
    /// The model with these weights.
    pub fn new(
        sizes: ModelConfig,
        attention: &Attention,
        weights: &VarBuilder<'_>,
    ) -> Result<LongNet> {
        let ModelConfig { symbols, width, .. } = sizes;
        let embedding = |at: usize| -> Result<Embedding> {
            // One more than there are symbols, for the positions before the first token.
            let name = format!("recent.{at}");
            let small = candle_nn::Init::Randn {
                mean: 0.0,
                stdev: 0.5,
            };
            let table = weights.get_with_hints((symbols + 1, width), &name, small)?;
            Ok(Embedding::new(table, width))
        };
        let layer = |at: usize| Layer::new(sizes, attention, &weights.pp(format!("layers.{at}")));
        Ok(LongNet {
            sizes,
            recent: (0..sizes.recent).map(embedding).collect::<Result<_>>()?,
            layers: (0..sizes.layers).map(layer).collect::<Result<_>>()?,
            norm: gains(width, "norm", weights)?,
            head: linear_no_bias(width, symbols, weights.pp("head"))?,
        })
    }

    /// The hidden states `[batch, rows, width]` of some rows. `sequences` are complete, `rows` are
    /// the positions to compute, in the order in which the attention has them.
    pub fn rows(&self, sequences: &[Vec<u32>], rows: &[usize]) -> Result<Tensor> {
        let before_first = self.sizes.symbols as u32;
        let mut x: Option<Tensor> = None;
        for (before, table) in self.recent.iter().enumerate() {
            let token = |sequence: &Vec<u32>, row: usize| match row.checked_sub(before) {
                Some(position) => sequence[position],
                None => before_first,
            };
            let tokens: Vec<u32> = sequences
                .iter()
                .flat_map(|sequence| rows.iter().map(move |&row| token(sequence, row)))
                .collect();
            let tokens = Tensor::from_vec(tokens, (sequences.len(), rows.len()), &Device::Cpu)?;
            let embedded = table.forward(&tokens)?;
            x = Some(match x {
                None => embedded,
                Some(x) => (x + embedded)?,
            });
        }
        let mut x = match x {
            Some(x) => x,
            None => Tensor::zeros(
                (sequences.len(), rows.len(), self.sizes.width),
                DType::F32,
                &Device::Cpu,
            )?,
        };
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        rms_norm(&x, &self.norm)
    }

    /// Logits of the next token for rows `[.., width]`.
    pub fn logits(&self, rows: &Tensor) -> Result<Tensor> {
        self.head.forward(rows)
    }
}

impl Layer {
    fn new(sizes: ModelConfig, attention: &Attention, weights: &VarBuilder<'_>) -> Result<Layer> {
        let ModelConfig {
            width,
            heads,
            kv_heads,
            head_dim,
            ..
        } = sizes;
        let config = LayerConfig {
            width,
            heads,
            kv_heads,
            head_dim,
            qk_norm: false,
        };
        Ok(Layer {
            attention: RingDilatedAttention::new(config, attention, weights.pp("attention"))?,
            attention_norm: gains(width, "attention_norm", weights)?,
            widen: linear_no_bias(width, 4 * width, weights.pp("widen"))?,
            narrow: linear_no_bias(4 * width, width, weights.pp("narrow"))?,
            norm: gains(width, "norm", weights)?,
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let attended = self
            .attention
            .forward(&rms_norm(x, &self.attention_norm)?)?;
        let x = (x + attended)?;
        let wide = self.widen.forward(&rms_norm(&x, &self.norm)?)?;
        // Squared ReLU.
        x + self.narrow.forward(&wide.relu()?.sqr()?)?
    }
}

fn gains(width: usize, name: &str, weights: &VarBuilder<'_>) -> Result<Tensor> {
    weights.get_with_hints(width, name, candle_nn::Init::Const(1.0))
}
