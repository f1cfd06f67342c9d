//! What the clock said, in words.

use encke::explain::{bytes, grouped};
use encke::{Cut, Request};
use encke_cost::{Machine, RankTime, SimulatedRun, devices, links};

use crate::pattern_options;
use crate::ring_options;
use crate::table::Table;
use crate::terminal::Paint;

/// A length of time as people read it.
pub fn seconds(time: f64) -> String {
    const DAY: f64 = 86400.0;
    match time {
        0.0 => "0 s".to_string(),
        t if t < 1e-3 => format!("{:.1} us", t * 1e6),
        t if t < 1.0 => format!("{:.2} ms", t * 1e3),
        t if t < 120.0 => format!("{t:.2} s"),
        t if t < 7200.0 => format!("{:.1} min", t / 60.0),
        t if t < 2.0 * DAY => format!("{:.1} h", t / 3600.0),
        t => format!("{:.1} days", t / DAY),
    }
}

/// Operations per second as people read them.
pub fn flops(rate: f64) -> String {
    let units = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut unit) = (rate, 0);
    while value >= 1000.0 && unit + 1 < units.len() {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    format!("{value:.1} {}FLOP/s", units[unit])
}

/// Everything that `simulate` prints.
pub fn words(
    request: &Request,
    machine: &Machine,
    forward: &SimulatedRun,
    backward: Option<&SimulatedRun>,
) -> String {
    let paint = Paint::stdout();
    let mut runs = vec![("forward", forward)];
    runs.extend(backward.map(|run| ("backward", run)));
    let mut text = heading(request, machine);
    text += &format!("\n{}\n", paint.bold("Time to solution"));
    text += &totals(&runs).to_string();
    text += &format!("\n{}\n", paint.bold("Where the time of the ranks goes"));
    text += &shares(&runs).to_string();
    text += &format!("\n{}\n", paint.bold("What travels"));
    text += &traffic(&runs).to_string();
    text
}

fn heading(request: &Request, machine: &Machine) -> String {
    let shape = &request.shape;
    let ranks = request.sharding.ranks();
    let cut = match request.sharding.cut() {
        Cut::Contiguous if ranks == 1 => "",
        cut => ring_options::words(cut),
    };
    let mut text = format!(
        "{} tokens x {} heads ({} key heads) x {} numbers, batch {}, {}; {}\n",
        grouped(shape.tokens as u128),
        shape.heads,
        shape.kv_heads,
        shape.dim,
        shape.batch,
        request.dtype,
        pattern_options::words(&request.pattern),
    );
    let comma = if cut.is_empty() { "" } else { ", " };
    text += &format!("{ranks} x {}{comma}{cut}", machine.device.name);
    if ranks > 1 {
        text += &format!(
            "; nodes of {}, {} inside",
            machine.ranks_per_node, machine.intra_node.name
        );
    }
    if ranks > machine.ranks_per_node {
        let cards = match machine.nics {
            1 => "one card a node".to_string(),
            cards => format!("{cards} cards a node"),
        };
        text += &format!(", {} between, {cards}", machine.inter_node.name);
    }
    for (rank, factor) in &machine.stragglers {
        text += &format!("; rank {rank} takes {factor} times as long");
    }
    text + "\n"
}

fn totals(runs: &[(&str, &SimulatedRun)]) -> Table {
    let mut table = Table::new(
        2,
        ["", "time", "one device", "efficiency", "hidden", "speed"],
    );
    let mut row = |name: &str, time: f64, one: f64, efficiency: f64, hidden: String, rate: f64| {
        table.row([
            name.to_string(),
            seconds(time),
            seconds(one),
            format!("{:.1} %", 100.0 * efficiency),
            hidden,
            flops(rate),
        ]);
    };
    for (name, run) in runs {
        let hidden = match run.hidden {
            Some(part) => format!("{:.1} %", 100.0 * part),
            None => "nothing travels".to_string(),
        };
        let rate = run.flops / run.seconds;
        row(
            name,
            run.seconds,
            run.one_device_s,
            run.efficiency,
            hidden,
            rate,
        );
    }
    if runs.len() > 1 {
        let sum = |of: fn(&SimulatedRun) -> f64| runs.iter().map(|(_, run)| of(run)).sum::<f64>();
        let (time, one) = (sum(|run| run.seconds), sum(|run| run.one_device_s));
        let devices = runs[0].1.devices as f64;
        let rate = sum(|run| run.flops) / time;
        row(
            "together",
            time,
            one,
            one / (devices * time),
            String::new(),
            rate,
        );
    }
    table
}

fn shares(runs: &[(&str, &SimulatedRun)]) -> Table {
    let headings = [
        "",
        "compute",
        "prepare",
        "exposed hops",
        "waiting for others",
        "done after",
    ];
    let mut table = Table::new(2, headings);
    for (name, run) in runs {
        let mut row = |who: String, time: &RankTime| {
            table.row([
                format!("{name}, {who}"),
                seconds(time.compute_s),
                seconds(time.prepare_s + time.load_s),
                seconds(time.exposed_s),
                seconds(time.idle_s),
                seconds(time.end_s),
            ]);
        };
        if run.ranks.len() > 1 {
            row("mean".to_string(), &mean(&run.ranks));
        }
        row(
            format!("slowest rank {}", run.slowest),
            &run.ranks[run.slowest],
        );
        let last = run.ranks.iter().position(|rank| rank.end_s == run.seconds);
        if let Some(last) = last.filter(|last| *last != run.slowest) {
            row(format!("last rank {last}"), &run.ranks[last]);
        }
    }
    table
}

fn mean(ranks: &[RankTime]) -> RankTime {
    let of = |time: fn(&RankTime) -> f64| ranks.iter().map(time).sum::<f64>() / ranks.len() as f64;
    RankTime {
        load_s: of(|rank| rank.load_s),
        prepare_s: of(|rank| rank.prepare_s),
        compute_s: of(|rank| rank.compute_s),
        exposed_s: of(|rank| rank.exposed_s),
        idle_s: of(|rank| rank.idle_s),
        end_s: of(|rank| rank.end_s),
        ..RankTime::default()
    }
}

fn traffic(runs: &[(&str, &SimulatedRun)]) -> Table {
    let headings = ["", "bytes", "hops", "fullest port, at full speed"];
    let mut table = Table::new(2, headings);
    for (name, run) in runs {
        for link in &run.links {
            let place = match link.between_nodes {
                true => "between nodes",
                false => "inside nodes",
            };
            table.row([
                format!("{name}, {place} ({})", link.name),
                bytes(link.bytes as usize),
                grouped(link.transfers as u128),
                seconds(link.busiest_port_s),
            ]);
        }
    }
    table
}

/// Devices and links by name, with the source of every figure.
pub fn catalogue() -> String {
    let paint = Paint::stdout();
    let mut text = format!("{}\n", paint.bold("Devices (--gpu)"));
    for device in devices() {
        text += &format!("  {}: {}\n", device.name, device.source);
        for rate in &device.rates {
            text += &format!(
                "      {}, {} numbers a head: {} forward, {} backward\n        {}\n",
                rate.dtype,
                rate.dim,
                flops(rate.forward.flops),
                flops(rate.backward.flops),
                rate.source,
            );
        }
    }
    text += "  here: the CPU kernel of this machine, measured when asked for\n";
    text += &format!("{}\n", paint.bold("Links (--link)"));
    for link in links() {
        let speed = link.bytes_per_s / 1e9;
        let latency = seconds(link.latency_s);
        text += &format!(
            "  {}: {speed} GB/s each way, {latency}\n      {}\n",
            link.name, link.source
        );
    }
    text
}
