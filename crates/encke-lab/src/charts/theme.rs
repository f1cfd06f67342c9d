//! Colours, type and the one script: how the page looks, in the light and in the dark.
//!
//! The decision here: a colour means one thing. Components keep theirs in every chart (families
//! share a hue: what is a rank's own is dark, what travels is light); activities and shades have
//! hues that no component has. The components' colours are those of Okabe and Ito, which people
//! with any of the usual colour blindnesses tell apart.

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

/// The style sheet. It names no file and no address: the page is all there is.
pub const STYLE: &str = include_str!("page.css");

/// What shows the words of the mark under the pointer.
pub const SCRIPT: &str = include_str!("page.js");
