//! Which file of a crate imports from which, read from its `use` statements, and the circles of it.
//!
//! An import through a `pub use` of a `mod.rs` or `lib.rs` counts as one from the file that defines
//! the item. Unit tests do not count.

use std::collections::{BTreeMap, BTreeSet};

use crate::files::Source;

/// A module of a crate: the names that lead to it from the root.
type Module = Vec<String>;

/// The circles of imports with more than two files, each as the paths of its files.
pub fn circles(sources: &[Source]) -> Vec<Vec<String>> {
    let mut crates: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for source in sources.iter().filter(|source| source.path.ends_with(".rs")) {
        if let Some(end) = source.path.find("/src/") {
            let files = crates.entry(&source.path[..end + 5]).or_default();
            files.push(source);
        }
    }
    let of_crate = |(root, files): (&&str, &Vec<&Source>)| Imports::of(root, files).circles();
    crates.iter().flat_map(of_crate).collect()
}

struct Imports {
    paths: BTreeMap<Module, String>,
    /// What `pub use` calls by another path, and its own.
    exports: BTreeMap<Module, Module>,
    from: BTreeMap<Module, BTreeSet<Module>>,
}

impl Imports {
    fn of(root: &str, files: &[&Source]) -> Imports {
        let names = |path: &str| -> Module {
            let inner = &path[root.len()..path.len() - 3];
            let mut names: Module = inner.split('/').map(str::to_string).collect();
            names.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
            names
        };
        let named = files
            .iter()
            .map(|file| (names(&file.path), file.path.clone()));
        let mut imports = Imports {
            paths: named.collect(),
            exports: BTreeMap::new(),
            from: BTreeMap::new(),
        };
        let mut used = Vec::new();
        for file in files {
            let module = names(&file.path);
            let is_root = imports.paths[&module].ends_with("/mod.rs") || module.is_empty();
            for (public, path) in uses(&file.text) {
                let Some(item) = imports.absolute(&module, &path) else {
                    continue;
                };
                if let (true, Some(name)) = (public, item.last()) {
                    let alias = [&module[..], std::slice::from_ref(name)].concat();
                    imports.exports.insert(alias, item.clone());
                }
                if !(public && is_root) {
                    used.push((module.clone(), item));
                }
            }
        }
        for (module, item) in used {
            if let Some(target) = imports.file_of(item).filter(|target| *target != module) {
                imports.from.entry(module).or_default().insert(target);
            }
        }
        imports
    }

    /// A path of a `use` statement from the root of the crate; None if it leads out of it.
    fn absolute(&self, module: &Module, path: &str) -> Option<Module> {
        let mut names = path.split("::").map(str::to_string).collect::<Module>();
        let mut base = match names[0].as_str() {
            "crate" => return Some(names.split_off(1)),
            "self" | "super" => module.clone(),
            first => {
                let child = [&module[..], &[first.to_string()]].concat();
                return (self.paths.contains_key(&child)).then(|| [&module[..], &names].concat());
            }
        };
        while names.first().is_some_and(|name| name == "super") {
            base.pop();
            names.remove(0);
        }
        names.retain(|name| name != "self");
        base.append(&mut names);
        Some(base)
    }

    /// The file that defines an item.
    fn file_of(&self, mut item: Module) -> Option<Module> {
        // As many re-exports as lead to any item; a circle of them would not compile.
        for _ in 0..8 {
            let length = (0..=item.len()).rev();
            let length = length
                .clone()
                .find(|&n| self.paths.contains_key(&item[..n]))?;
            let export = item
                .get(..length + 1)
                .and_then(|name| self.exports.get(name));
            match export.filter(|original| **original != item) {
                Some(original) => item = [original, &item[length + 1..]].concat(),
                None => return Some(item[..length].to_vec()),
            }
        }
        None
    }

    fn reachable(&self, start: &Module) -> BTreeSet<&Module> {
        let (mut seen, mut next) = (BTreeSet::new(), vec![start]);
        while let Some(module) = next.pop() {
            for target in self.from.get(module).into_iter().flatten() {
                if seen.insert(target) {
                    next.push(target);
                }
            }
        }
        seen
    }

    fn circles(&self) -> Vec<Vec<String>> {
        let reachable: BTreeMap<&Module, _> = (self.from.keys())
            .map(|module| (module, self.reachable(module)))
            .collect();
        let mut circles = BTreeSet::new();
        for (module, reached) in &reachable {
            let back =
                |other: &&&Module| reachable.get(**other).is_some_and(|r| r.contains(module));
            let circle: Vec<String> = reached
                .iter()
                .filter(back)
                .map(|other| self.paths[*other].clone())
                .collect();
            if circle.len() > 2 {
                circles.insert(circle);
            }
        }
        circles.into_iter().collect()
    }
}

/// The paths of a text's `use` statements, each with whether it is public. `a::{b, c::d}` is two.
fn uses(text: &str) -> Vec<(bool, String)> {
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for statement in code.split(';') {
        // What stands before it ended in a brace, an attribute or nothing.
        let Some(line) = statement.lines().position(|line| {
            let line = line.trim_start();
            line.starts_with("use ") || line.starts_with("pub") && line.contains(" use ")
        }) else {
            continue;
        };
        let statement = statement.lines().skip(line).collect::<String>();
        let (before, path) = statement.split_once("use ").expect("it was found");
        let path: String = path.replace(" as ", " ").chars().collect();
        found.extend(
            expand(&path)
                .into_iter()
                .map(|path| (!before.trim().is_empty(), path)),
        );
    }
    found
}

fn expand(path: &str) -> Vec<String> {
    let Some((head, body)) = path.split_once('{') else {
        let first = path.split_whitespace().next().unwrap_or_default();
        return vec![first.to_string()];
    };
    let body = body.trim_end().strip_suffix('}').unwrap_or(body);
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for character in body.chars() {
        depth += i32::from(character == '{') - i32::from(character == '}');
        match (character, depth) {
            (',', 0) => parts.push(String::new()),
            _ => parts.last_mut().expect("there is one").push(character),
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts
        .flat_map(|part| expand(&format!("{}{}", head.trim(), part.trim())))
        .collect()
}

#[test]
fn a_circle_of_three_is_found_through_a_re_export() {
    let file = |path: &str, text: &str| Source {
        path: format!("crates/x/src/{path}"),
        text: text.to_string(),
    };
    let mut sources = vec![
        file("lib.rs", "mod a;\nmod b;\nmod c;\npub use a::A;\n"),
        file("a.rs", "use std::fmt;\nuse crate::b::{self, B};\n"),
        file(
            "b.rs",
            "// use crate::a::A;\nuse super::c::{\n    C, D as E,\n};\n",
        ),
        file(
            "c.rs",
            "pub struct C;\n#[cfg(test)]\nmod tests {\n    use crate::A;\n}\n",
        ),
    ];
    assert_eq!(circles(&sources), Vec::<Vec<String>>::new());
    sources[3].text.insert_str(0, "use crate::A;\n");
    let paths = ["a.rs", "b.rs", "c.rs"].map(|path| format!("crates/x/src/{path}"));
    assert_eq!(circles(&sources), [paths]);
}
