//! The model: a decoder of LongNet layers over bytes, or over the symbols of a task.
//!
//! The decision here: everything but the attention works on single rows. Where a row stands is not told;
//! instead each row begins as the sum of what its token and the few tokens before it mean, and attention
//! is causal. So a process that has only its rows of a sequence, and knows the tokens, computes its rows
//! of everything.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, linear_no_bias};
use encke_candle::{Attention, LayerConfig as Heads, RingDilatedAttention, rms_norm};
use serde::{Deserialize, Serialize};

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Kinds of tokens.
    pub symbols: usize,
    /// Numbers of a row.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Tokens that a row begins with: its own, and those before it.
    pub recent: usize,
}

/// A LongNet.
pub struct LongNet {
    sizes: Sizes,
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
    /// The model, with the weights it finds.
    pub fn new(sizes: Sizes, attention: &Attention, weights: &VarBuilder<'_>) -> Result<LongNet> {
        let Sizes { symbols, width, .. } = sizes;
        let embedding = |at: usize| -> Result<Embedding> {
            // One more than there are symbols: what stands before the first token.
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

    /// What rows become: `[batch, rows, width]`. `sequences` are whole, `rows` are the places of those
    /// to compute, in the order in which the attention has them.
    pub fn rows(&self, sequences: &[Vec<u32>], rows: &[usize]) -> Result<Tensor> {
        let nothing = self.sizes.symbols as u32;
        let mut x: Option<Tensor> = None;
        for (before, table) in self.recent.iter().enumerate() {
            let token = |sequence: &Vec<u32>, row: usize| match row.checked_sub(before) {
                Some(place) => sequence[place],
                None => nothing,
            };
            let tokens: Vec<u32> = sequences
                .iter()
                .flat_map(|sequence| rows.iter().map(move |&row| token(sequence, row)))
                .collect();
            let tokens = Tensor::from_vec(tokens, (sequences.len(), rows.len()), &Device::Cpu)?;
            let meant = table.forward(&tokens)?;
            x = Some(match x {
                None => meant,
                Some(x) => (x + meant)?,
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

    /// How likely each symbol is to follow, as logits, for rows `[.., width]`.
    pub fn logits(&self, rows: &Tensor) -> Result<Tensor> {
        self.head.forward(rows)
    }
}

impl Layer {
    fn new(sizes: Sizes, attention: &Attention, weights: &VarBuilder<'_>) -> Result<Layer> {
        let Sizes {
            width,
            heads,
            kv_heads,
            head_dim,
            ..
        } = sizes;
        let heads = Heads {
            width,
            heads,
            kv_heads,
            head_dim,
            qk_norm: false,
        };
        Ok(Layer {
            attention: RingDilatedAttention::new(heads, attention, weights.pp("attention"))?,
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
        // Squared, a kink is cheap and smooth enough.
        x + self.narrow.forward(&wide.relu()?.sqr()?)?
    }
}

fn gains(width: usize, name: &str, weights: &VarBuilder<'_>) -> Result<Tensor> {
    weights.get_with_hints(width, name, candle_nn::Init::Const(1.0))
}
