//! `encke simulate`: predicted times of described machines.

use encke_core::conformance::extent;
use serde_json::Value;

use crate::command::CommandFolder;

const CLUSTER: &str = "--node 8 --gpu h200 --link nvlink,ib400";
const MIX: &str = "--causal --mode mix --segment-lengths 2k,64k,1M --dilation-rates 1,32,512";

fn json(folder: &CommandFolder, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
}

#[test]
fn a_billion_tokens_on_1024_ranks_are_predicted_dilated() {
    let folder = CommandFolder::new();
    let output = folder.succeeds(&format!(
        "simulate --tokens 1e9 --ranks 1024 {CLUSTER} {MIX} --grad --json run.json --record 2"
    ));
    for part in [
        "1,000,000,000 tokens",
        "1024 x h200",
        "nodes of 8",
        "backward",
        "efficiency",
    ] {
        assert!(output.contains(part), "{output}");
    }
    let run = json(&folder, "run.json");
    let plan = folder.succeeds(&format!(
        "plan --tokens 1e9 --heads 8 --dim 128 --dtype bf16 --ranks 1024 {MIX} --json"
    ));
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let links = run["forward"]["links"].as_array().unwrap();
    let bytes: u64 = links
        .iter()
        .map(|link| link["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(bytes, plan["sent_bytes"].as_u64().unwrap());
    assert_eq!(run["forward"]["ranks"].as_array().unwrap().len(), 1024);
    let shown = |event: &Value| event["rank"].as_u64().unwrap() < 2;
    let events = run["backward"]["trace"]["events"].as_array().unwrap();
    assert!(!events.is_empty() && events.iter().all(shown));
}

#[test]
fn a_billion_tokens_are_predicted_dense() {
    let folder = CommandFolder::new();
    let ranks = extent(256, 1024);
    folder.succeeds(&format!(
        "simulate --tokens 1e9 --ranks {ranks} {CLUSTER} --causal --sharding zigzag \
         --json run.json --record 0"
    ));
    let run = json(&folder, "run.json");
    let forward = &run["forward"];
    // No ring is faster than its arithmetic, and with zigzag little else is left at this length.
    let ideal = forward["one_device_s"].as_f64().unwrap() / f64::from(ranks);
    let seconds = forward["seconds"].as_f64().unwrap();
    assert!(
        seconds >= ideal && seconds < 1.2 * ideal,
        "{seconds} for {ideal}"
    );
    assert!(forward["hidden"].as_f64().unwrap() > 0.9);
}

#[test]
fn a_machine_can_be_printed_edited_and_used_from_a_file() {
    let folder = CommandFolder::new();
    let sizes = "simulate --tokens 64k --ranks 8 --causal";
    let machine = folder.succeeds("simulate --gpu h100 --node 4 --nics 1 --describe");
    std::fs::write(folder.join("m.json"), &machine).unwrap();
    let by_file = folder.succeeds(&format!("{sizes} --machine m.json"));
    let by_name = folder.succeeds(&format!("{sizes} --gpu h100 --node 4 --nics 1"));
    assert_eq!(by_file, by_name);
    std::fs::write(
        folder.join("bad.json"),
        machine.replace("latency_s", "latency"),
    )
    .unwrap();
    let refused = ["bad.json is not a description of a machine", "latency"];
    folder.refuses(&format!("{sizes} --machine bad.json"), &refused);
    folder.refuses(
        &format!("{sizes} --machine m.json --gpu h200"),
        &["cannot be used"],
    );
    folder.refuses(
        &format!("{sizes} --machine none.json"),
        &["cannot read none.json"],
    );
}

#[test]
fn stragglers_cards_and_speeds_change_the_prediction() {
    let folder = CommandFolder::new();
    let seconds = |options: &str| {
        let sizes = "simulate --tokens 256k --ranks 16 --node 4 --json t.json";
        folder.succeeds(&format!("{sizes} {options}"));
        json(&folder, "t.json")["forward"]["seconds"]
            .as_f64()
            .unwrap()
    };
    let base = seconds("");
    assert!(seconds("--straggler 3:2") > 1.5 * base);
    assert!(seconds("--flops 1e13") > 10.0 * base);
    assert!(seconds("--link nvlink,eth100") > base);
    assert_eq!(
        seconds("--nics 1"),
        base,
        "one hop leaves each node of a ring"
    );
    assert!(seconds("--flops 1e13 --dtype f64") > 10.0 * base);
}

#[test]
fn a_trace_has_ranks_and_hops() {
    let folder = CommandFolder::new();
    folder.succeeds("simulate --tokens 64k --ranks 4 --node 2 --grad --trace t.json");
    let trace = json(&folder, "t.json");
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    assert_eq!(named("process_name"), 2);
    assert_eq!(named("thread_name"), 8);
    assert!(named("compute") > 0 && named("hop") > 0 && named("hop between nodes") > 0);
    let passes = |pass: &str| events.iter().any(|event| event["cat"] == pass);
    assert!(passes("forward") && passes("backward"));
}

#[test]
fn predictions_are_compared_with_threads() {
    // The accuracy depends on an idle machine; a test only checks that the comparison runs.
    let folder = CommandFolder::new();
    let arguments = "simulate --against threads --tokens 256 --repeats 1 --json a.json";
    let output = folder.succeeds(arguments);
    for part in [
        "predicted",
        "measured",
        "median error",
        "backward dilated, 4 contiguous",
    ] {
        assert!(output.contains(part), "{output}");
    }
    let rings = json(&folder, "a.json")["rings"].as_array().unwrap().clone();
    assert!(rings.len() >= 8);
    for ring in rings {
        for pick in ["median", "fastest"] {
            let time = |name: &str| ring[pick][name].as_f64().unwrap();
            assert!(
                time("predicted_s") > 0.0 && time("measured_s") > 0.0,
                "{ring}"
            );
        }
    }
}

#[test]
fn wrong_names_and_values_are_refused() {
    let folder = CommandFolder::new();
    let refusals = [
        ("", "--tokens is missing"),
        ("--tokens 8 --gpu h900", "h200, h100"),
        ("--tokens 8 --link nvlink,string", "ib400"),
        ("--tokens 8 --link a,b,c", "two names"),
        ("--tokens 8 --dtype f64", "bf16, f16"),
        ("--tokens 8 --ranks 2 --straggler 2:3", "there are 2 ranks"),
        ("--tokens 8 --straggler 2:-3", "17:1.5"),
        ("--tokens 8 --flops 0", "not a speed"),
        ("--tokens 8 --flops 1,2,3", "forward and backward"),
        ("--tokens 8 --node 0", "node is 0"),
        ("--tokens 8 --ranks 5000", "at most 4096"),
        ("--against threads --repeats 0", "--repeats 0"),
        ("--tokens 8 --json a --trace a", "is also the JSON"),
    ];
    for (options, words) in refusals {
        folder.refuses(&format!("simulate {options}"), &[words]);
    }
    let list = folder.succeeds("simulate --list");
    for part in ["h200", "ib400", "data sheet", "measured"] {
        assert!(list.contains(part), "{list}");
    }
}

#[test]
fn schedules_are_compared_where_ranks_lie_in_several_nodes() {
    let folder = CommandFolder::new();
    let sizes = "simulate --tokens 256k --heads 32 --kv-heads 32 --ranks 32 --node 8 \
                 --link nvlink,ib400 --causal --sharding zigzag";
    let output = folder.succeeds(&format!("{sizes} --grad --json run.json"));
    for part in [
        "Schedules",
        "between nodes",
        "buffers of a rank",
        "fastest: ",
    ] {
        assert!(output.contains(part), "{output}");
    }
    let run = json(&folder, "run.json");
    let schedules = run["schedules"].as_array().unwrap();
    let names: Vec<&str> = schedules
        .iter()
        .map(|of| of["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["ring", "two-level", "heads x sequence"]);
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    let [ring, two, heads] = [0, 1, 2].map(|index| &schedules[index]);
    // Every rank's card carries an eighth of what the busiest one does in a ring.
    assert!(number(two, "busiest_port_s") < number(ring, "busiest_port_s") / 3.0);
    assert!(number(heads, "busiest_port_s") < number(ring, "busiest_port_s") / 3.0);
    assert!(number(two, "forward_s") < number(ring, "forward_s"));
    // The ring of the run is the ring of the table.
    assert_eq!(
        number(ring, "forward_s"),
        number(&run["forward"], "seconds")
    );
    // Each schedule alone has the time of its row.
    for (of, name) in [(two, "two-level"), (heads, "heads")] {
        folder.succeeds(&format!("{sizes} --schedule {name} --json alone.json"));
        let alone = json(&folder, "alone.json");
        assert_eq!(
            number(of, "forward_s"),
            number(&alone["forward"], "seconds")
        );
        assert!(alone["schedules"].as_array().unwrap().is_empty());
    }
    let one_node = folder.succeeds("simulate --tokens 64k --ranks 8 --causal");
    assert!(!one_node.contains("Schedules"), "{one_node}");
}

#[test]
fn auto_takes_the_schedule_that_suits_the_nodes() {
    let folder = CommandFolder::new();
    let explained = folder.succeeds(
        "plan --tokens 128k --heads 32 --dim 128 --dtype bf16 --causal --explain --ranks 32 \
         --sharding zigzag --rotate keys --node 8 --link nvlink,ib200",
    );
    let chosen = explained.lines().find(|line| line.starts_with("Chosen:"));
    let chosen = chosen.unwrap_or_else(|| panic!("{explained}"));
    let suits = chosen.contains("two levels (nodes of 8)") || chosen.contains("heads among 8");
    assert!(suits, "{explained}");
}

#[test]
fn predicted_scale_is_written_as_a_page_or_a_table() {
    let folder = CommandFolder::new();
    folder.succeeds("simulate --scale scale.md --scale-ranks 8");
    let text = std::fs::read_to_string(folder.join("scale.md")).unwrap();
    for part in [
        "# Predicted scale",
        "Predicted, not measured",
        "| 128k | 8 |",
    ] {
        assert!(text.contains(part), "{text}");
    }
    folder.refuses("simulate --scale scale.txt", &["ends with .html or .md"]);
    folder.refuses("simulate --scale s.md --scale-ranks 4", &["smallest has 8"]);
}
