//! Where types are defined, read from the text line by line.

use std::collections::BTreeMap;

use crate::files::Source;

/// Every type name with the places that define it.
pub fn definitions(sources: &[Source]) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Source { path, text } in sources.iter().filter(|s| s.path.ends_with(".rs")) {
        for (number, line) in text.lines().enumerate() {
            if let Some(name) = defined(line) {
                let place = format!("{path}:{}", number + 1);
                found.entry(name.to_string()).or_default().push(place);
            }
        }
    }
    found
}

/// The type that a line defines. An indented `type` is an associated type: it names what the trait
/// already named.
fn defined(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().peekable();
    while let Some(word) = words.peek() {
        let visibility = word.starts_with("pub");
        if !visibility && *word != "unsafe" && !word.ends_with(')') {
            break;
        }
        words.next();
    }
    let kind = words.next()?;
    let associated = kind == "type" && line.starts_with(' ');
    if associated || !["struct", "enum", "trait", "type", "union"].contains(&kind) {
        return None;
    }
    let name = words.next()?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
    let name = &name[..end.unwrap_or(name.len())];
    let upper = name.starts_with(|c: char| c.is_ascii_uppercase());
    upper.then_some(name)
}

#[test]
fn definitions_are_read_from_lines() {
    for (line, name) in [
        ("pub struct Plan {", Some("Plan")),
        ("pub(crate) enum Quoted<'a> {", Some("Quoted")),
        ("pub(in crate::plan) struct Inner;", Some("Inner")),
        ("    struct Local(u8);", Some("Local")),
        ("unsafe trait Zeroed {}", Some("Zeroed")),
        ("type Grid = [usize; 2];", Some("Grid")),
        ("    type Buffer = Data;", None),
        ("// struct Comment {", None),
        ("let type_name = 1;", None),
    ] {
        assert_eq!(defined(line), name, "{line}");
    }
}
