//! The retrieval task over short distances: long enough to tell the patterns apart.

use crate::command::{Folder, text};

#[test]
fn dilation_finds_what_local_segments_cannot() {
    let folder = Folder::new();
    let output = folder.runs("retrieval --tokens 256 --questions 128 --record retrieval.json");
    let said = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let record: serde_json::Value = serde_json::from_str(&folder.read("retrieval.json")).unwrap();
    let models = record["retrieval"]["models"].as_array().unwrap();
    let share =
        |at: usize| models[at]["right"].as_f64().unwrap() / models[at]["asked"].as_f64().unwrap();
    assert!(share(0) > 0.95, "{said}");
    assert!(share(1) < 0.125, "{said}");
}
