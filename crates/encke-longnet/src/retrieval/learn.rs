//! Trains a small model on the task by a curriculum: one fact in a short sequence, then more facts,
//! then longer and longer sequences.
//!
//! The decision here: a stage ends when the model solves it or its steps are used up, and the next
//! stage starts in both cases. The second model gets the steps that the first one took in each
//! stage: the same sequences, the same learning rates.

use anyhow::{Context, Result};
use candle_core::{D, Device, Tensor};
use encke::conformance::Random;
use encke::{MixingGradient, Mode, OffsetRule, Pattern};
use encke_candle::Attention;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use super::task::{NOISE, RetrievalTask, SYMBOLS, Sequence};
use crate::adamw::{AdamW, rate};
use crate::cross_entropy::cross_entropy;

use crate::model::{LongNet, ModelConfig};
use crate::weights::Weights;

/// The attention pattern of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RetrievalPattern {
    /// Local segments, and a dilated branch over the whole sequence.
    Dilated,
    /// Local segments only.
    Local,
}

/// Model, task and training settings.
#[derive(Debug, Clone, Copy)]
pub struct Curriculum {
    /// Tokens of the longest sequences.
    pub tokens: usize,
    /// Tokens of a local segment.
    pub local: usize,
    /// Dilation of the branch that spans the sequence; also the number of heads.
    pub dilation: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Features of a row.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Facts of a sequence.
    pub facts: usize,
    /// Most steps of a stage.
    pub steps: usize,
    /// Tokens of a step, at least; a step has several sequences where they are short.
    pub batch_tokens: usize,
    /// The peak learning rate.
    pub rate: f64,
    /// Seed of weights and sequences.
    pub seed: u64,
    /// Ranks of the ring.
    pub ranks: usize,
    /// Questions of the test, at least.
    pub examined: usize,
}

/// One stage of the curriculum.
#[derive(Debug, Clone, Copy)]
pub struct CurriculumStage {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Facts of a sequence.
    pub facts: usize,
    /// Number of different noise symbols.
    pub kinds: usize,
}

/// A model's result.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RetrievalResult {
    /// The model's pattern.
    pub reach: RetrievalPattern,
    /// Steps of each stage.
    pub steps: Vec<usize>,
    /// Questions of the test.
    pub asked: usize,
    /// Right answers.
    pub right: usize,
    /// Smallest distance in tokens between a question and its fact.
    pub shortest: usize,
    /// Tokens of a sequence, step, loss and accuracy, sampled during training.
    #[serde(rename = "course")]
    pub history: Vec<(usize, usize, f64, f64)>,
}

impl RetrievalResult {
    /// The accuracy.
    pub fn share(&self) -> f64 {
        self.right as f64 / self.asked.max(1) as f64
    }
}

/// Accuracy at which a stage counts as solved.
const SOLVED_SHARE: f64 = 0.97;
/// Most questions of a sequence with one fact.
const MAX_QUESTIONS: usize = 16;
/// Questions about each fact in the test.
const TESTED_PER_FACT: usize = 4;
/// The accuracy is an exponential average over about this many steps.
const AVERAGED_STEPS: f64 = 10.0;

impl Curriculum {
    /// The task of a stage.
    fn task(
        &self,
        CurriculumStage {
            tokens,
            facts,
            kinds,
        }: CurriculumStage,
    ) -> RetrievalTask {
        RetrievalTask {
            tokens,
            local: self.local,
            kinds,
            facts,
            // As many questions as fit into the last eighth: each gives a gradient.
            questions: (tokens / self.local / 8).clamp(facts, MAX_QUESTIONS.max(facts)),
            times: self.dilation,
        }
    }

    /// Tokens of a fact with its repetitions.
    pub fn passage(&self) -> usize {
        let stages = self.stages();
        self.task(stages[0]).passage()
    }

    /// The stages: one fact with a single noise symbol around it; the same with more noise; then
    /// more facts, so that keys must be matched; then longer and longer sequences.
    pub fn stages(&self) -> Vec<CurriculumStage> {
        let least = |facts: usize| 2 * facts * self.local;
        let noisy = |tokens: usize, facts: usize| CurriculumStage {
            tokens,
            facts,
            kinds: NOISE,
        };
        let silent = CurriculumStage {
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
    pub fn pattern(&self, reach: RetrievalPattern, tokens: usize) -> Result<Pattern> {
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        let pattern = match reach {
            RetrievalPattern::Dilated => {
                Pattern::dilated(&[self.local, tokens], &[1, self.dilation], mode)
            }
            RetrievalPattern::Local => Pattern::dilated(&[self.local], &[1], mode),
        };
        Ok(pattern.map_err(encke::Error::from)?.causal(true))
    }

    fn model(&self, reach: RetrievalPattern, tokens: usize, weights: &Weights) -> Result<LongNet> {
        // Scalable softmax: the scale grows with the logarithm of the number of keys. Otherwise the
        // attention learned on short sequences is diluted on long ones.
        let growth = (tokens as f64).ln() / (self.local as f64).ln();
        let settings = encke::Attention::builder()
            .pattern(self.pattern(reach, tokens)?)
            .scale(growth / (self.head_dim as f64).sqrt());
        let attention = Attention::new(settings.ranks(self.ranks))?;
        let sizes = ModelConfig {
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

    /// Trains a model and tests it. With `fixed_steps` every stage has exactly that many steps.
    pub fn train(
        &self,
        reach: RetrievalPattern,
        fixed_steps: Option<&[usize]>,
        bar: &ProgressBar,
    ) -> Result<RetrievalResult> {
        let weights = Weights::new(self.seed);
        // Creates the weights.
        drop(self.model(reach, self.tokens, &weights)?);
        let mut optimiser = AdamW::new(&weights, 0.01)?;
        let mut random = Random::new(self.seed + 1);
        let mut history = Vec::new();
        let mut steps = Vec::new();
        let mut taken = 0;
        for (at, stage) in self.stages().into_iter().enumerate() {
            let tokens = stage.tokens;
            let model = self.model(reach, tokens, &weights)?;
            let task = self.task(stage);
            let (mut share, mut trust) = (0.0, 0.0);
            let most = fixed_steps.map_or(self.steps, |steps| steps[at]);
            let before = taken;
            for step in 0..most {
                let count = (self.batch_tokens / tokens).max(1);
                let sequences: Vec<Sequence> =
                    (0..count).map(|_| task.sequence(&mut random)).collect();
                let (loss, right) = answers(&model, &sequences)?;
                let gradients = optimiser.gradients(&loss)?;
                optimiser.step(&gradients, rate(self.rate, step, 2 * self.steps))?;
                let loss = f64::from(loss.to_scalar::<f32>()?);
                let asked: usize = sequences
                    .iter()
                    .map(|sequence| sequence.answers.len())
                    .sum();
                trust += (1.0 - trust) / AVERAGED_STEPS;
                share += (right as f64 / asked as f64 - share) / AVERAGED_STEPS;
                taken += 1;
                bar.inc(1);
                bar.set_message(format!(
                    "{tokens} tokens, {} facts: loss {loss:.3}, {:.0} % right",
                    stage.facts,
                    100.0 * share / trust
                ));
                let ends = fixed_steps.is_none() && step >= 10 && share / trust > SOLVED_SHARE;
                if step % 10 == 0 || ends || step + 1 == most {
                    history.push((tokens, taken, loss, share / trust));
                }
                if ends {
                    break;
                }
            }
            steps.push(taken - before);
        }
        self.test(reach, &weights, steps, history)
    }

    /// The accuracy on new sequences.
    fn test(
        &self,
        reach: RetrievalPattern,
        weights: &Weights,
        steps: Vec<usize>,
        history: Vec<(usize, usize, f64, f64)>,
    ) -> Result<RetrievalResult> {
        let model = self.model(reach, self.tokens, weights)?;
        let mut task = self.task(CurriculumStage {
            tokens: self.tokens,
            facts: self.facts,
            kinds: NOISE,
        });
        // All questions about one fact have the same answer, so a guess is right for all or for
        // none of them. Few questions per sequence mean many sequences.
        task.questions = task.questions.min(TESTED_PER_FACT * self.facts);
        let mut random = Random::new(self.seed + 2);
        let (mut asked, mut right, mut shortest) = (0, 0, usize::MAX);
        while asked < self.examined {
            let sequence = task.sequence(&mut random);
            asked += sequence.answers.len();
            shortest = shortest.min(sequence.shortest);
            right += answers(&model, &[sequence])?.1;
        }
        Ok(RetrievalResult {
            reach,
            steps,
            asked,
            right,
            shortest,
            history,
        })
    }
}

/// The mean loss over the answers of some sequences, and the number of right ones.
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
    let mut positions = Vec::new();
    let mut answers = Vec::new();
    for (at, sequence) in sequences.iter().enumerate() {
        for &(position, answer) in &sequence.answers {
            positions.push((at * tokens + position) as u32);
            answers.push(answer);
        }
    }
    let count = positions.len();
    let positions = Tensor::from_vec(positions, count, &Device::Cpu)?;
    let logits = model.logits(&rows.index_select(&positions, 0)?)?;
    let guesses: Vec<u32> = logits.argmax(D::Minus1)?.to_vec1()?;
    let right = guesses
        .iter()
        .zip(&answers)
        .filter(|(guess, answer)| guess == answer);
    let right = right.count();
    Ok((cross_entropy(&logits, answers)?, right))
}
