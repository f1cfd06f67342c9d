//! The attention mask of one head, drawn with characters.
//!
//! A character is one (query, key) pair and shows its multiplicity in the pattern; nothing is
//! sampled or scaled, so only the beginning of a long sequence is drawn.

use anyhow::{Result, ensure};
use encke::{Pattern, Shape};

/// The most tokens that are drawn: the width of a terminal.
const MOST: usize = 64;

/// The mask of one head for the first tokens: a line for each query, a character for each key.
pub fn draw(pattern: &Pattern, shape: &Shape, head: usize) -> Result<String> {
    let heads = shape.heads;
    ensure!(
        head < heads,
        "there is no head {head}: the pattern is drawn for one of {heads} heads, numbered from 0"
    );
    let tokens = shape.tokens.min(MOST);
    let mut text = format!("Head {head}: a line for each query, a character for each key\n");
    let first = pattern.first_query(shape);
    for query in (first..first + shape.queries).take_while(|query| *query < tokens) {
        text += "  ";
        text.extend(
            (0..tokens).map(|key| character(pattern.multiplicity(shape, head, query, key))),
        );
        text += "\n";
    }
    if tokens < shape.tokens {
        text += &format!("The first {tokens} of {} tokens.\n", shape.tokens);
    }
    text += ". masked   # attended   2, 3 ... attended in so many branches\n";
    Ok(text)
}

fn character(multiplicity: usize) -> char {
    match multiplicity {
        0 => '.',
        1 => '#',
        more => char::from_digit(more as u32, 36).unwrap_or('*'),
    }
}
