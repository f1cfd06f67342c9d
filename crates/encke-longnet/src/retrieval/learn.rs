//! A small model learns the task: first one fact in a short sequence, then more, then over longer and
//! longer ones.
//!
//! The decision here: a stage ends when the model has understood it or its steps are used up, whichever
//! comes first, and a model that is stuck goes on to the next one all the same. The second model is given
//! the steps that the first one took, stage by stage: the same sequences, the same rates.

use anyhow::{Context, Result};
use candle_core::{D, Device, Tensor};
use encke::conformance::Random;
use encke::{MixingGradient, Mode, OffsetRule, Pattern};
use encke_candle::Attention;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use super::task::{NOISE, SYMBOLS, Sequence, Task};
use crate::adamw::{AdamW, rate};
use crate::cross_entropy::cross_entropy;
use crate::gradients;
use crate::model::{LongNet, Sizes};
use crate::weights::Weights;

/// What the model sees beyond its segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reach {
    /// Every so many tokens of the whole sequence, beside its segment.
    Dilated,
    /// Nothing.
    Local,
}

/// How a model is taught.
#[derive(Debug, Clone, Copy)]
pub struct Lessons {
    /// Tokens of the longest sequences.
    pub tokens: usize,
    /// Tokens of a local segment.
    pub local: usize,
    /// Dilation of the branch that spans the sequence; as many heads.
    pub dilation: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Numbers of a row.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Facts, and questions, of a sequence.
    pub facts: usize,
    /// Steps of a stage at most.
    pub steps: usize,
    /// Tokens of a step at least, over several sequences where they are short.
    pub batch_tokens: usize,
    /// The highest rate.
    pub rate: f64,
    /// Where randomness begins.
    pub seed: u64,
    /// Ranks that the attention is spread over.
    pub ranks: usize,
    /// Questions of the examination at least.
    pub examined: usize,
}

/// What is learned at a time.
#[derive(Debug, Clone, Copy)]
pub struct Stage {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Facts of a sequence.
    pub facts: usize,
    /// Kinds of noise.
    pub kinds: usize,
}

/// What came of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Learned {
    /// What the model saw.
    pub reach: Reach,
    /// Steps that were taken in each stage.
    pub steps: Vec<usize>,
    /// Questions of new sequences it was asked in the end.
    pub asked: usize,
    /// How many of them it answered.
    pub right: usize,
    /// Tokens between the nearest question and its fact.
    pub shortest: usize,
    /// How it went: tokens of a sequence, step, loss and share of right answers, now and then.
    pub course: Vec<(usize, usize, f64, f64)>,
}

impl Learned {
    /// The share of right answers.
    pub fn share(&self) -> f64 {
        self.right as f64 / self.asked.max(1) as f64
    }
}

/// A share of right answers at which a stage is understood.
const UNDERSTOOD: f64 = 0.97;
/// Questions of a sequence at most, where there is one fact.
const MANY: usize = 16;
/// Questions about each fact in the examination.
const EXAMINED: usize = 4;
/// The share is averaged over about so many steps.
const MEMORY: f64 = 10.0;

impl Lessons {
    /// The task of a stage.
    fn task(
        &self,
        Stage {
            tokens,
            facts,
            kinds,
        }: Stage,
    ) -> Task {
        Task {
            tokens,
            local: self.local,
            kinds,
            facts,
            // The last eighth may have room for more than one for each fact, and each of them teaches.
            questions: (tokens / self.local / 8).clamp(facts, MANY.max(facts)),
            times: self.dilation,
        }
    }

    /// Tokens that a fact takes up.
    pub fn passage(&self) -> usize {
        let stages = self.stages();
        self.task(stages[0]).passage()
    }

    /// The stages: one fact and silence around it, where there is nothing to do but to look; the same
    /// with noise; then more facts, so that keys begin to matter; then longer and longer sequences.
    pub fn stages(&self) -> Vec<Stage> {
        let least = |facts: usize| 2 * facts * self.local;
        let noisy = |tokens: usize, facts: usize| Stage {
            tokens,
            facts,
            kinds: NOISE,
        };
        let silent = Stage {
            kinds: 1,
            ..noisy(least(1), 1)
        };
        let mut stages = vec![silent];
        let mut facts = 1;
        while facts < self.facts {
            stages.push(noisy(least(facts), facts));
            facts *= 2;
        }
        let mut long = vec![noisy(self.tokens, self.facts)];
        let mut tokens = self.tokens;
        while tokens / 4 >= least(self.facts) {
            tokens /= 4;
            long.push(noisy(tokens, self.facts));
        }
        stages.extend(long.into_iter().rev());
        stages
    }

    /// The pattern of sequences of some length.
    pub fn pattern(&self, reach: Reach, tokens: usize) -> Result<Pattern> {
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        let pattern = match reach {
            Reach::Dilated => Pattern::dilated(&[self.local, tokens], &[1, self.dilation], mode),
            Reach::Local => Pattern::dilated(&[self.local], &[1], mode),
        };
        Ok(pattern.map_err(encke::Error::from)?.causal(true))
    }

    fn model(&self, reach: Reach, tokens: usize, weights: &Weights) -> Result<LongNet> {
        // The more keys there are, the further the one that is meant must stand out from the others: by
        // the logarithm of their number (scalable softmax), or what is learned on short sequences is
        // drowned in long ones.
        let growth = (tokens as f64).ln() / (self.local as f64).ln();
        let settings = encke::Attention::builder()
            .pattern(self.pattern(reach, tokens)?)
            .scale(growth / (self.head_dim as f64).sqrt());
        let attention = Attention::new(settings.ranks(self.ranks))?;
        let sizes = Sizes {
            symbols: SYMBOLS,
            width: self.width,
            layers: self.layers,
            heads: self.dilation,
            kv_heads: self.dilation,
            head_dim: self.head_dim,
            recent: 2,
        };
        Ok(LongNet::new(sizes, &attention, &weights.builder())?)
    }

    /// Teaches a model and examines it. Where `given` says how many steps a stage has, all are taken.
    pub fn learn(
        &self,
        reach: Reach,
        given: Option<&[usize]>,
        bar: &ProgressBar,
    ) -> Result<Learned> {
        let weights = Weights::new(self.seed);
        let first = self.model(reach, self.tokens, &weights)?;
        drop(first);
        let mut optimiser = AdamW::new(&weights, 0.01)?;
        let mut random = Random::new(self.seed + 1);
        let mut course = Vec::new();
        let mut steps = Vec::new();
        let mut taken = 0;
        for (at, stage) in self.stages().into_iter().enumerate() {
            let tokens = stage.tokens;
            let model = self.model(reach, tokens, &weights)?;
            let task = self.task(stage);
            let (mut share, mut trust) = (0.0, 0.0);
            let most = given.map_or(self.steps, |given| given[at]);
            let before = taken;
            for step in 0..most {
                let count = (self.batch_tokens / tokens).max(1);
                let sequences: Vec<Sequence> =
                    (0..count).map(|_| task.sequence(&mut random)).collect();
                let (loss, right) = answers(&model, &sequences)?;
                let found = gradients::of(&loss, &optimiser)?;
                optimiser.step(&found, rate(self.rate, step, 2 * self.steps))?;
                let loss = f64::from(loss.to_scalar::<f32>()?);
                let asked: usize = sequences
                    .iter()
                    .map(|sequence| sequence.answers.len())
                    .sum();
                trust += (1.0 - trust) / MEMORY;
                share += (right as f64 / asked as f64 - share) / MEMORY;
                taken += 1;
                bar.inc(1);
                bar.set_message(format!(
                    "{tokens} tokens, {} facts: loss {loss:.3}, {:.0} % right",
                    stage.facts,
                    100.0 * share / trust
                ));
                let ends = given.is_none() && step >= 10 && share / trust > UNDERSTOOD;
                if step % 10 == 0 || ends || step + 1 == most {
                    course.push((tokens, taken, loss, share / trust));
                }
                if ends {
                    break;
                }
            }
            steps.push(taken - before);
        }
        self.examine(reach, &weights, steps, course)
    }

    /// Asks questions about sequences that the model has not seen.
    fn examine(
        &self,
        reach: Reach,
        weights: &Weights,
        steps: Vec<usize>,
        course: Vec<(usize, usize, f64, f64)>,
    ) -> Result<Learned> {
        let model = self.model(reach, self.tokens, weights)?;
        let mut task = self.task(Stage {
            tokens: self.tokens,
            facts: self.facts,
            kinds: NOISE,
        });
        // Questions about one fact have one answer: a guess is right for all of them, or for none. So
        // the examination is of many sequences.
        task.questions = task.questions.min(EXAMINED * self.facts);
        let mut random = Random::new(self.seed + 2);
        let (mut asked, mut right, mut shortest) = (0, 0, usize::MAX);
        while asked < self.examined {
            let sequence = task.sequence(&mut random);
            asked += sequence.answers.len();
            shortest = shortest.min(sequence.shortest);
            right += answers(&model, &[sequence])?.1;
        }
        Ok(Learned {
            reach,
            steps,
            asked,
            right,
            shortest,
            course,
        })
    }
}

/// The loss over all answers of some sequences, and how many are right.
fn answers(model: &LongNet, sequences: &[Sequence]) -> Result<(Tensor, usize)> {
    let tokens = sequences
        .first()
        .context("a step has sequences")?
        .tokens
        .len();
    let whole: Vec<Vec<u32>> = sequences
        .iter()
        .map(|sequence| sequence.tokens.clone())
        .collect();
    let rows: Vec<usize> = (0..tokens).collect();
    let rows = model.rows(&whole, &rows)?.flatten(0, 1)?;
    let mut places = Vec::new();
    let mut answers = Vec::new();
    for (at, sequence) in sequences.iter().enumerate() {
        for &(place, answer) in &sequence.answers {
            places.push((at * tokens + place) as u32);
            answers.push(answer);
        }
    }
    let count = places.len();
    let places = Tensor::from_vec(places, count, &Device::Cpu)?;
    let logits = model.logits(&rows.index_select(&places, 0)?)?;
    let guesses: Vec<u32> = logits.argmax(D::Minus1)?.to_vec1()?;
    let right = guesses
        .iter()
        .zip(&answers)
        .filter(|(guess, answer)| guess == answer);
    let right = right.count();
    Ok((cross_entropy(&logits, answers)?, right))
}
