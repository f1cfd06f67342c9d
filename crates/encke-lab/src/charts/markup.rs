//! Elements of a page, written with everything escaped.
//!
//! The decision here: text and attributes can only be added through functions that escape them, so
//! nothing that came from outside can become markup. What is written is well-formed XML as well as
//! HTML, which is how the tests can read it back.

use std::fmt::{self, Display, Write};

/// An element with its attributes and contents.
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

    /// With lengths or positions, to a hundredth: finer than any screen.
    pub fn place<const N: usize>(mut self, numbers: [(&str, f64); N]) -> Markup {
        for (name, number) in numbers {
            self = self.set(name, ShortNumber(number));
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

    /// With our own style sheet or script, which browsers read unescaped.
    pub fn with_source(mut self, source: &'static str) -> Markup {
        self.contents += source;
        self
    }

    /// With a value for machines to read, as JSON. No character of it can end the element.
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

/// A number to a hundredth, without zeros that say nothing.
#[derive(Debug, Clone, Copy)]
pub struct ShortNumber(pub f64);

impl Display for ShortNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.2}", self.0);
        let text = text.trim_end_matches('0').trim_end_matches('.');
        f.write_str(if text == "-0" { "0" } else { text })
    }
}

/// Text as it must be written to be read as text. Letters that no document may hold are replaced.
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
    fn what_comes_from_outside_stays_text() {
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
    fn numbers_are_as_short_as_they_can_be() {
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
