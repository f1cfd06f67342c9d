//! Right-padded batches: rows at or after an entry's length are neither read nor written (spec
//! section 9, key lengths).
//!
//! The decision here: an entry of a batch and a document of a packed sequence are the same thing,
//! so the rows that count are packed into one sequence of documents and results are put back.
//! Padding then costs no computation and no bytes between ranks, and no kernel, plan or ring knows
//! it. Packing copies rows, so a caller does it where it sees the copies.

use crate::documents::Documents;
use crate::dtype::Data;
use crate::error::{Error, Result, product};
use crate::host;
use crate::job::Block;
use crate::pattern::Pattern;
use crate::shape::Shape;
use crate::sharding::Run;
use crate::tensor::{Tensor, View};

/// How many tokens of each entry of a padded batch count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyLengths {
    tokens: usize,
    lengths: Vec<usize>,
}

impl KeyLengths {
    /// Lengths of the entries of batches that are padded to `tokens` tokens.
    pub fn new(tokens: usize, lengths: &[usize]) -> Result<KeyLengths> {
        for (entry, &length) in lengths.iter().enumerate() {
            if length > tokens {
                return Err(Error::KeyLength {
                    entry,
                    length,
                    tokens,
                });
            }
        }
        product("the rows of a padded batch", &[lengths.len(), tokens])?;
        Ok(KeyLengths {
            tokens,
            lengths: lengths.to_vec(),
        })
    }

    /// The pattern of the packed rows: each entry is a document, or those of `pattern` that begin
    /// before its end.
    pub fn pattern(&self, pattern: &Pattern) -> Result<Pattern> {
        let within = match pattern.document_list() {
            Some(documents) if documents.tokens() != self.tokens => {
                return Err(Error::DocumentTokens {
                    got: documents.tokens(),
                    tokens: self.tokens,
                });
            }
            Some(documents) => documents.lengths().collect(),
            None => vec![self.tokens],
        };
        let mut packed = Vec::with_capacity(self.lengths.len());
        for &length in &self.lengths {
            let mut left = length;
            let own = within.iter().map(|document: &usize| {
                let part = left.min(*document);
                left -= part;
                part
            });
            packed.push(own.collect());
        }
        if self.rows() == 0 {
            packed = vec![vec![1]];
        }
        let documents = Documents::of_entries(&packed)?;
        Ok(pattern.clone().documents(Some(documents)))
    }

    /// The shape of the packed rows of tensors of this shape.
    pub fn shape(&self, shape: &Shape) -> Result<Shape> {
        if shape.queries != shape.tokens {
            return Err(Error::Excludes {
                one: "key lengths",
                other: "fewer queries than keys",
                reason: "rows that do not count are left out of q and k alike; pass a query for \
                         every key",
            });
        }
        self.check([shape.batch, shape.tokens])?;
        let tokens = self.packed_tokens();
        Ok(Shape {
            batch: 1,
            tokens,
            queries: tokens,
            ..*shape
        })
    }

    /// The rows that count, as one sequence; one row of zeros if there are none.
    pub fn pack(&self, padded: &View<'_>) -> Result<Tensor> {
        let ([b, n, h, d], strides) = (padded.dims(), padded.strides());
        self.check([b, n])?;
        let mut packed = Tensor::try_zeros(padded.dtype(), [1, self.packed_tokens(), h, d])?;
        let mut at = 0;
        for (entry, &length) in self.lengths.iter().enumerate().filter(|(_, n)| **n > 0) {
            let rows = View::from_slice(
                padded.data().skip(entry * strides[0]),
                [1, n, h, d],
                strides,
            )?;
            let mut own = Data::try_zeros(padded.dtype(), length * h * d)?;
            host::upload(&rows, &[Run::leading(length)], &mut own);
            let block = Block::contiguous(length * h * d, 0, at);
            host::copy(&block, false, own.as_slice(), packed.data_mut());
            at += length * h * d;
        }
        Ok(packed)
    }

    /// The packed rows at their places in a batch; the others get the value `missing`.
    pub fn unpack(&self, packed: &Tensor, missing: f64) -> Result<Tensor> {
        let [_, _, h, d] = packed.dims();
        let (b, n) = (self.lengths.len(), self.tokens);
        if packed.dims() != [1, self.packed_tokens(), h, d] {
            return Err(Error::ShapeMismatch {
                tensor: "a packed tensor",
                got: packed.dims().to_vec(),
                expected: vec![1, self.packed_tokens(), h, d],
            });
        }
        let mut rows = Tensor::try_zeros(packed.dtype(), [1, b * n, h, d])?;
        if missing != 0.0 {
            host::fill(rows.data_mut(), missing);
        }
        let entries = self.lengths.iter().enumerate().filter(|(_, n)| **n > 0);
        let runs: Vec<Run> = entries
            .map(|(entry, &count)| Run {
                first: entry * n,
                stride: 1,
                count,
            })
            .collect();
        if !runs.is_empty() {
            host::download(packed.data(), &runs, &mut rows);
        }
        Tensor::from_data(std::mem::take(rows.data_mut()), [b, n, h, d])
    }

    /// Entry and token of a packed row.
    pub fn place(&self, mut row: usize) -> (usize, usize) {
        for (entry, &length) in self.lengths.iter().enumerate() {
            match row.checked_sub(length) {
                Some(later) => row = later,
                None => return (entry, row),
            }
        }
        (self.lengths.len(), row)
    }

    fn rows(&self) -> usize {
        self.lengths.iter().sum()
    }

    fn packed_tokens(&self) -> usize {
        self.rows().max(1)
    }

    fn check(&self, [batch, tokens]: [usize; 2]) -> Result<()> {
        if batch != self.lengths.len() {
            return Err(Error::KeyLengthCount {
                lengths: self.lengths.len(),
                batch,
            });
        }
        if tokens != self.tokens {
            return Err(Error::ShapeMismatch {
                tensor: "a padded batch",
                got: vec![batch, tokens],
                expected: vec![batch, self.tokens],
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// Elements that name their batch entry, token, head and channel.
    fn batch() -> Tensor {
        let name =
            |at: usize| (at / 24 * 1000 + at / 6 % 4 * 100 + at / 3 % 2 * 10 + at % 3) as f64;
        let values: Vec<f64> = (0..72).map(name).collect();
        Tensor::from_f64(DType::F64, [3, 4, 2, 3], &values).unwrap()
    }

    #[test]
    fn packed_rows_are_those_that_count_and_go_back_to_their_places() {
        let lengths = KeyLengths::new(4, &[2, 0, 3]).unwrap();
        let packed = lengths.pack(&batch().view()).unwrap();
        assert_eq!(packed.dims(), [1, 5, 2, 3]);
        let first = |row: usize| packed.data().as_slice().get(row * 6);
        assert_eq!(
            [0, 1, 2, 3, 4].map(first),
            [0.0, 100.0, 2000.0, 2100.0, 2200.0]
        );
        assert_eq!(lengths.place(1), (0, 1));
        assert_eq!(lengths.place(4), (2, 2));
        let back = lengths.unpack(&packed, -7.0).unwrap();
        let (back, all) = (back.data().to_f64(), batch().data().to_f64());
        for at in 0..72 {
            let counts = at / 6 % 4 < [2, 0, 3][at / 24];
            assert_eq!(
                back[at],
                if counts { all[at] } else { -7.0 },
                "element {at}"
            );
        }
    }

    #[test]
    fn rows_of_strided_batches_are_packed_too() {
        // Heads before tokens, as some callers lay them out: [3, 2, 4, 3] seen as [3, 4, 2, 3].
        let values: Vec<f64> = (0..72).map(|at| at as f64).collect();
        let view = View::strided(&values, [3, 4, 2, 3], [24, 3, 12, 1]).unwrap();
        let lengths = KeyLengths::new(4, &[1, 4, 2]).unwrap();
        let packed = lengths.pack(&view).unwrap().data().to_f64();
        let row = |entry: usize, token: usize| 24 * entry + 3 * token;
        let places = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)];
        for (index, (entry, token)) in places.into_iter().enumerate() {
            assert_eq!(packed[index * 6], row(entry, token) as f64);
            assert_eq!(packed[index * 6 + 3], (row(entry, token) + 12) as f64);
        }
    }

    #[test]
    fn entries_are_documents_and_documents_end_with_their_entry() {
        let of = |pattern: &Pattern, lengths: &[usize]| -> Vec<usize> {
            let packed = KeyLengths::new(6, lengths).unwrap().pattern(pattern);
            packed.unwrap().document_list().unwrap().lengths().collect()
        };
        assert_eq!(of(&Pattern::dense(), &[6, 0, 2]), [6, 2]);
        let packed = Pattern::dense().documents(Some(Documents::new(&[2, 4]).unwrap()));
        assert_eq!(of(&packed, &[6, 1, 3]), [2, 4, 1, 2, 1]);
        assert_eq!(of(&Pattern::dense(), &[0, 0]), [1]);
        let other = Pattern::dense().documents(Some(Documents::new(&[2, 5]).unwrap()));
        let error = KeyLengths::new(6, &[1]).unwrap().pattern(&other);
        assert!(matches!(
            error,
            Err(Error::DocumentTokens { got: 7, tokens: 6 })
        ));
    }

    #[test]
    fn lengths_that_do_not_fit_name_their_numbers() {
        let error = KeyLengths::new(4, &[4, 5]).unwrap_err().to_string();
        assert!(
            error.contains("entry 1") && error.contains('5') && error.contains('4'),
            "{error}"
        );
        let lengths = KeyLengths::new(4, &[4, 1]).unwrap();
        let error = lengths.pack(&batch().view()).unwrap_err().to_string();
        assert!(
            error.contains("2 key lengths") && error.contains("batch of 3"),
            "{error}"
        );
        let shape = Shape::new(2, 4, 1, 1, 1).unwrap();
        let packed = lengths.shape(&shape).unwrap();
        assert_eq!((packed.batch, packed.tokens, packed.queries), (1, 5, 5));
        let fewer = lengths.shape(&shape.with_queries(2).unwrap());
        assert!(matches!(fewer, Err(Error::Excludes { .. })));
    }
}
