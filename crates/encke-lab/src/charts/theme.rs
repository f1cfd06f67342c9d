//! Style sheet and script of the pages, for light and dark colour schemes.
//!
//! The decision here: a colour means one thing. Components have the same colour in every chart
//! (related ones share a hue: a rank's own rows are dark, travelling rows are light); activities
//! and shades have other hues. The colours of components are those of Okabe and Ito, which people
//! with the common forms of colour blindness can distinguish.

use encke::plan::program::Component;

/// The class of a component in the style sheet.
pub fn class(component: Component) -> &'static str {
    match component {
        Component::Queries => "c-queries",
        Component::OwnKv => "c-own-kv",
        Component::TravellingKv => "c-travelling-kv",
        Component::TravellingQueries => "c-travelling-queries",
        Component::Carry => "c-carry",
        Component::TravellingCarry => "c-travelling-carry",
        Component::Output => "c-output",
        Component::Upstream => "c-upstream",
        Component::Gradients => "c-gradients",
        Component::TravellingGradients => "c-travelling-gradients",
        Component::Sharing => "c-sharing",
        Component::Replica => "c-replica",
        Component::Rows => "c-rows",
        Component::Workspace => "c-workspace",
    }
}

/// The style sheet. It refers to no file and no address.
pub const STYLE: &str = include_str!("page.css");

/// The script that shows the tooltip of the mark under the pointer.
pub const SCRIPT: &str = include_str!("page.js");
