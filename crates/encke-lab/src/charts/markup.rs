//! Elements of a page, with escaped text and attributes.
//!
//! The decision here: text and attributes can only be added through functions that escape them, so
//! input cannot become markup. The output is well-formed XML as well as HTML, so that tests can
//! parse it.

use std::fmt::{self, Display, Write};

/// An HTML or SVG element with its attributes and contents.
#[derive(Debug, Clone)]
pub struct Markup {
    name: &'static str,
    attributes: String,
    contents: String,
}

impl Markup {
    /// An empty element.
    pub fn new(name: &'static str) -> Markup {
        Markup {
            name,
            attributes: String::new(),
            contents: String::new(),
        }
    }

    /// With an attribute.
    pub fn set(mut self, name: &str, value: impl Display) -> Markup {
        let value = escaped(&value.to_string());
        let _ = write!(self.attributes, " {name}=\"{value}\"");
        self
    }

    /// With a class.
    pub fn class(self, name: impl Display) -> Markup {
        self.set("class", name)
    }

    /// With lengths or positions, rounded to a hundredth.
    pub fn place<const N: usize>(mut self, lengths: [(&str, f64); N]) -> Markup {
        for (name, length) in lengths {
            self = self.set(name, ShortNumber(length));
        }
        self
    }

    /// With more text.
    pub fn text(mut self, text: impl Display) -> Markup {
        self.contents += &escaped(&text.to_string());
        self
    }

    /// With one more element in it.
    pub fn with(mut self, child: Markup) -> Markup {
        let _ = write!(self.contents, "{child}");
        self
    }

    /// With more elements in it.
    pub fn with_all(mut self, children: impl IntoIterator<Item = Markup>) -> Markup {
        for child in children {
            self = self.with(child);
        }
        self
    }

    /// With a style sheet or script of this crate, which browsers read unescaped.
    pub fn with_source(mut self, source: &'static str) -> Markup {
        self.contents += source;
        self
    }

    /// With embedded JSON, escaped so that it cannot end the element.
    pub fn with_json(mut self, json: &str) -> Markup {
        for letter in json.chars() {
            match letter {
                '<' | '>' | '&' => {
                    let _ = write!(self.contents, "\\u{:04x}", letter as u32);
                }
                letter => self.contents.push(letter),
            }
        }
        self
    }
}

impl Display for Markup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Markup {
            name,
            attributes,
            contents,
        } = self;
        match *name {
            "meta" => write!(f, "<{name}{attributes} />"),
            _ => write!(f, "<{name}{attributes}>{contents}</{name}>"),
        }
    }
}

/// A number rounded to a hundredth, without trailing zeros.
#[derive(Debug, Clone, Copy)]
pub struct ShortNumber(pub f64);

impl Display for ShortNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.2}", self.0);
        let text = text.trim_end_matches('0').trim_end_matches('.');
        f.write_str(if text == "-0" { "0" } else { text })
    }
}

/// Escapes text; characters that are invalid in documents are replaced.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            '\n' | '\t' => safe.push(letter),
            control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => {
                safe.push('\u{fffd}');
            }
            letter => safe.push(letter),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::{Markup, ShortNumber};

    #[test]
    fn text_attributes_and_json_are_escaped() {
        let element = Markup::new("p")
            .set("title", "\"><script>")
            .text("a < b & 'c' \u{0}");
        assert_eq!(
            element.to_string(),
            "<p title=\"&quot;&gt;&lt;script&gt;\">a &lt; b &amp; &#39;c&#39; \u{fffd}</p>"
        );
        let json = Markup::new("script").with_json("{\"a\":\"</script>&\"}");
        assert_eq!(
            json.to_string(),
            "<script>{\"a\":\"\\u003c/script\\u003e\\u0026\"}</script>"
        );
    }

    #[test]
    fn numbers_have_no_trailing_zeros() {
        let written = [
            (1.0, "1"),
            (-0.001, "0"),
            (2.5, "2.5"),
            (100.0, "100"),
            (1.239, "1.24"),
        ];
        for (number, text) in written {
            assert_eq!(ShortNumber(number).to_string(), text);
        }
    }
}
