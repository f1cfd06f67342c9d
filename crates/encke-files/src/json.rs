//! JSON from outside: an object that has a key twice is refused.
//!
//! Readers disagree about which of the two counts, so a file that has one means two things.

use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Parses a value; no object of it may have a key twice.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    check_keys(bytes)?;
    serde_json::from_slice(bytes)
}

/// Whether this is JSON, and no object of it has a key twice.
pub fn check_keys(bytes: &[u8]) -> serde_json::Result<()> {
    serde_json::from_slice::<UniqueKeys>(bytes).map(|_| ())
}

/// Any value, of which nothing is kept.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<UniqueKeys, D::Error> {
        from.deserialize_any(UniqueKeys)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = UniqueKeys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<UniqueKeys>()?;
            if let Some(twice) = keys.replace(key) {
                return Err(A::Error::custom(format_args!(
                    "the key {twice:?} is there twice"
                )));
            }
        }
        Ok(UniqueKeys)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<UniqueKeys, A::Error> {
        while seq.next_element::<UniqueKeys>()?.is_some() {}
        Ok(UniqueKeys)
    }

    fn visit_unit<E>(self) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_bool<E>(self, _: bool) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_i64<E>(self, _: i64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_u64<E>(self, _: u64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_f64<E>(self, _: f64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_str<E>(self, _: &str) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_there_twice_is_refused_at_any_depth() {
        let right = r#"{"a": [1, -2, 3.5, null, true, {"a": "x"}], "b": {"a": {}}}"#;
        assert!(check_keys(right.as_bytes()).is_ok());
        for wrong in [
            r#"{"a": 1, "a": 1}"#,
            r#"{"a": 1, "\u0061": 2}"#,
            r#"[{"x": {"a": 1, "b": 2, "a": 3}}]"#,
        ] {
            let error = check_keys(wrong.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("\"a\" is there twice"), "{error}");
        }
        assert!(check_keys(b"{}x").is_err());
        assert!(check_keys("[".repeat(100_000).as_bytes()).is_err());
        assert_eq!(from_slice::<Vec<u8>>(b"[1, 2]").unwrap(), [1, 2]);
    }
}
