//! Which query of one head sees which key, drawn with letters.
//!
//! Nothing is sampled or scaled: a letter is one pair, and what it says is the pattern's own
//! multiplicity. So only the beginning of a long sequence is drawn.

use anyhow::{Result, ensure};
use encke::{Pattern, Shape};

/// Tokens that are drawn at most: a line of a terminal.
const MOST: usize = 64;

/// The first tokens as one head sees them: a line a query, a letter a key.
pub fn draw(pattern: &Pattern, shape: &Shape, head: usize) -> Result<String> {
    let heads = shape.heads;
    ensure!(
        head < heads,
        "there is no head {head}: the pattern is drawn for one of {heads} heads, numbered from 0"
    );
    let tokens = shape.tokens.min(MOST);
    let mut text = format!("Head {head}: a line for each query, a letter for each key\n");
    for query in 0..tokens {
        text += "  ";
        text.extend((0..tokens).map(|key| letter(pattern.multiplicity(shape, head, query, key))));
        text += "\n";
    }
    if tokens < shape.tokens {
        text += &format!("The first {tokens} of {} tokens.\n", shape.tokens);
    }
    text += ". not seen   # seen   2, 3 ... seen in so many branches\n";
    Ok(text)
}

fn letter(multiplicity: usize) -> char {
    match multiplicity {
        0 => '.',
        1 => '#',
        more => char::from_digit(more as u32, 36).unwrap_or('*'),
    }
}
