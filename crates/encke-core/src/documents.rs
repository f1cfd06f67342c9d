//! Documents of a packed sequence (spec section 9).

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The documents that a sequence is packed from, in order. Empty ones are left out.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Vec<usize>", into = "Vec<usize>")]
pub struct Documents {
    /// One past the last token of each document.
    ends: Arc<[usize]>,
    /// One past the last token of each entry of a padded batch, if documents are packed from one:
    /// the coins of dropout are those of the entry.
    entries: Option<Arc<[usize]>>,
}

impl Documents {
    /// Documents of these lengths; an error if all of them are empty, or if they overflow.
    pub fn new(lengths: &[usize]) -> Result<Documents> {
        let mut end = 0usize;
        let mut ends = Vec::with_capacity(lengths.len());
        for &length in lengths.iter().filter(|length| **length > 0) {
            end = end.checked_add(length).ok_or_else(|| Error::Overflow {
                what: "the sum of the document lengths",
                factors: vec![end, length],
            })?;
            ends.push(end);
        }
        match ends.is_empty() {
            true => Err(Error::Zero {
                what: "the sum of the document lengths",
            }),
            false => Ok(Documents {
                ends: ends.into(),
                entries: None,
            }),
        }
    }

    /// The documents of each entry of a batch, one entry after the other.
    pub fn of_entries(entries: &[Vec<usize>]) -> Result<Documents> {
        let documents = Documents::new(&entries.concat())?;
        let lengths = entries.iter().map(|lengths| lengths.iter().sum::<usize>());
        let ends = lengths.scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        Ok(Documents {
            entries: Some(ends.collect()),
            ..documents
        })
    }

    /// The batch entry of `token`, and the first token of that entry.
    pub fn entry_of(&self, token: usize) -> (usize, usize) {
        let Some(ends) = &self.entries else {
            return (0, 0);
        };
        let entry = ends.partition_point(|&end| end <= token);
        (entry, entry.checked_sub(1).map_or(0, |before| ends[before]))
    }

    /// Tokens of all documents.
    pub fn tokens(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// The lengths, without those of empty documents.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.ranges().map(|tokens| tokens.len())
    }

    /// The tokens of each document.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        (0..self.ends.len()).map(|index| self.range(index))
    }

    /// The tokens of the document with this index.
    pub fn range(&self, index: usize) -> Range<usize> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[index]
    }

    /// The tokens of the document of `token`.
    pub fn of(&self, token: usize) -> Range<usize> {
        self.range(self.ends.partition_point(|&end| end <= token))
    }
}

impl From<Vec<usize>> for Documents {
    fn from(lengths: Vec<usize>) -> Documents {
        let ends = lengths.into_iter().scan(0usize, |end, length| {
            *end = end.saturating_add(length);
            Some(*end)
        });
        Documents {
            ends: ends.collect(),
            entries: None,
        }
    }
}

impl From<Documents> for Vec<usize> {
    fn from(documents: Documents) -> Vec<usize> {
        documents.lengths().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_in_the_document_that_contains_it() {
        let documents = Documents::new(&[3, 0, 1, 4]).unwrap();
        assert_eq!((documents.count(), documents.tokens()), (3, 8));
        let of = [0..3, 0..3, 0..3, 3..4, 4..8, 4..8, 4..8, 4..8];
        for (token, expected) in of.into_iter().enumerate() {
            assert_eq!(documents.of(token), expected, "token {token}");
        }
        let text = serde_json::to_string(&documents).unwrap();
        assert_eq!(text, "[3,1,4]");
        assert_eq!(serde_json::from_str::<Documents>(&text).unwrap(), documents);
    }

    #[test]
    fn a_token_is_in_the_batch_entry_that_contains_it() {
        let entries = Documents::of_entries(&[vec![2, 1], vec![0, 0], vec![4]]).unwrap();
        assert_eq!(entries.lengths().collect::<Vec<_>>(), [2, 1, 4]);
        let of = [(0, 0), (0, 0), (0, 0), (2, 3), (2, 3), (2, 3), (2, 3)];
        for (token, expected) in of.into_iter().enumerate() {
            assert_eq!(entries.entry_of(token), expected, "token {token}");
        }
        let one = Documents::new(&[2, 1, 4]).unwrap();
        assert_eq!(one.entry_of(5), (0, 0));
        // Plans of both differ in the coins of their jobs.
        assert_ne!(one, entries);
        assert!(Documents::of_entries(&[vec![0]]).is_err());
    }

    #[test]
    fn lengths_that_are_no_documents_are_refused() {
        assert!(Documents::new(&[]).is_err());
        assert!(Documents::new(&[0, 0]).is_err());
        assert!(Documents::new(&[usize::MAX, 2]).is_err());
    }
}
