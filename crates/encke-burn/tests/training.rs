//! A small model with the layer learns a task that needs attention.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use encke::{MixingGradient, Mode, OffsetRule, Pattern};
use encke_burn::{Attention, Error, RingDilatedAttention, RingDilatedAttentionConfig};

const TOKENS: usize = 48;
const SYMBOLS: usize = 8;
const WIDTH: usize = 32;

#[derive(Module, Debug)]
struct TinyModel {
    symbols: Embedding,
    positions: Embedding,
    attention: RingDilatedAttention,
    readout: Linear,
}

impl TinyModel {
    fn new(attention: &Attention, device: &Device) -> TinyModel {
        let layer = RingDilatedAttentionConfig::new(WIDTH, 4).with_kv_heads(Some(2));
        TinyModel {
            symbols: EmbeddingConfig::new(SYMBOLS, WIDTH).init(device),
            positions: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            attention: layer.init(attention, device).unwrap(),
            readout: LinearConfig::new(WIDTH, SYMBOLS).init(device),
        }
    }

    /// Logits of `[b, n]` symbols, `[b * n, symbols]`.
    fn forward(&self, text: Tensor<2, Int>) -> Tensor<2> {
        let [batch, tokens] = text.dims();
        let places = Tensor::<1, Int>::arange(0..tokens as i64, &text.device());
        let places = places.reshape([1, tokens]).repeat_dim(0, batch);
        let x = self.symbols.forward(text) + self.positions.forward(places);
        let x = x.clone() + self.attention.forward(x).unwrap();
        self.readout.forward(x).reshape([batch * tokens, SYMBOLS])
    }
}

/// Random texts, and as targets the symbol three places before (the first three: their own).
fn texts(random: &mut encke::conformance::Random, device: &Device) -> [Tensor<2, Int>; 2] {
    let batch = 8;
    let text: Vec<i64> = (0..batch * TOKENS)
        .map(|_| (random.unit().abs() * SYMBOLS as f64) as i64 % SYMBOLS as i64)
        .collect();
    let target = (0..text.len()).map(|at| match at % TOKENS {
        0..3 => text[at],
        _ => text[at - 3],
    });
    let target = target.collect::<Vec<_>>();
    [text, target].map(|ids| Tensor::from_data(TensorData::new(ids, [batch, TOKENS]), device))
}

#[test]
fn a_model_learns_to_look_back() {
    let device = Device::flex().autodiff();
    device.seed(7);
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[24, 48], &[1, 3], mode).unwrap();
    let pattern = pattern.causal(true);
    let ring = encke::Attention::builder().pattern(pattern).ranks(2);
    let mut model = TinyModel::new(&Attention::new(ring).unwrap(), &device);
    let mut optimizer = AdamConfig::new().init();
    let mut random = encke::conformance::Random::new(5);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut losses = Vec::new();
    for _ in 0..300 {
        let [text, target] = texts(&mut random, &device);
        let logits = model.forward(text);
        let loss = loss.forward(logits, target.reshape([-1]));
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(
        first > 1.8,
        "near the logarithm of 8 symbols at first: {first}"
    );
    assert!(last < 0.5, "from {first} to {last}");
}

#[test]
fn heads_that_do_not_fit_are_refused_in_words() {
    let device = Device::flex();
    let dense = Attention::new(encke::Attention::builder()).unwrap();
    let config = RingDilatedAttentionConfig::new(WIDTH, 4).with_kv_heads(Some(3));
    let refused = config.init(&dense, &device).unwrap_err();
    assert!(matches!(refused, Error::Heads { kv_heads: 3, .. }));
    assert!(refused.to_string().contains("3 key heads"), "{refused}");
}
