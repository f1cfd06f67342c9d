//! The model: a decoder of LongNet layers over bytes, or over the symbols of a task.
//!
//! The decision here: everything but the attention works on single rows. There is no positional
//! encoding; each row starts as the sum of the embeddings of its token and the few tokens before
//! it, and attention is causal. So a process that has only its rows of a sequence, and all tokens,
//! can compute its rows of everything.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, linear_no_bias};
use encke_candle::{Attention, LayerConfig, RingDilatedAttention, attention, rms_norm};
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
        let mut blocks = LongNet::rows_of_blocks(&[self], sequences, &[rows])?;
        Ok(blocks.remove(0))
    }

    /// The same of several blocks of rows, each with a copy of the model of its own, so that each
    /// has its own gradients: only the attention takes all rows together.
    pub fn rows_of_blocks(
        copies: &[&LongNet],
        sequences: &[Vec<u32>],
        blocks: &[&[usize]],
    ) -> Result<Vec<Tensor>> {
        let of = copies.iter().zip(blocks);
        let embedded = of.map(|(copy, rows)| copy.embedded(sequences, rows));
        let mut x: Vec<Tensor> = embedded.collect::<Result<_>>()?;
        for layer in 0..copies.first().map_or(0, |copy| copy.layers.len()) {
            let layers: Vec<&Layer> = copies.iter().map(|copy| &copy.layers[layer]).collect();
            x = Layer::forward(&layers, x)?;
        }
        let normed = copies.iter().zip(x);
        normed.map(|(copy, x)| rms_norm(&x, &copy.norm)).collect()
    }

    /// The sums of embeddings that rows start with.
    fn embedded(&self, sequences: &[Vec<u32>], rows: &[usize]) -> Result<Tensor> {
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
        match x {
            Some(x) => Ok(x),
            None => Tensor::zeros(
                (sequences.len(), rows.len(), self.sizes.width),
                DType::F32,
                &Device::Cpu,
            ),
        }
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

impl Layer {
    /// A layer on blocks of rows, each with its copy of the layer.
    fn forward(copies: &[&Layer], x: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let mut qkv = [const { Vec::new() }; 3];
        for (copy, x) in copies.iter().zip(&x) {
            let normed = rms_norm(x, &copy.attention_norm)?;
            for (all, own) in qkv.iter_mut().zip(copy.attention.project(&normed)?) {
                all.push(own);
            }
        }
        let Some(first) = copies.first() else {
            return Ok(x);
        };
        let [q, k, v] = qkv.map(|blocks| Tensor::cat(&blocks, 1));
        let out = attention(&q?, &k?, &v?, first.attention.attention())?;
        let mut at = 0;
        let block = |(copy, x): (&&Layer, Tensor)| {
            let rows = x.dim(1)?;
            let own = out.narrow(1, at, rows)?.to_dtype(x.dtype())?;
            at += rows;
            copy.finish(&x, &own)
        };
        copies.iter().zip(x).map(block).collect()
    }

    /// What follows the attention of some rows, which work on single rows.
    fn finish(&self, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.merge_heads(attended)?)?;
        let wide = self.widen.forward(&rms_norm(&x, &self.norm)?)?;
        // Squared ReLU.
        x + self.narrow.forward(&wide.relu()?.sqr()?)?
    }
}

fn gains(width: usize, name: &str, weights: &VarBuilder<'_>) -> Result<Tensor> {
    weights.get_with_hints(width, name, candle_nn::Init::Const(1.0))
}
