//! Predicted runs as text.

use encke::explain::{bytes, grouped};
use encke::{Cut, Request};
use encke_cost::{Machine, RankTime, SimulatedRun, devices, links};
use encke_lab::format::{self, flops, seconds};
use encke_lab::table::TextTable;
use encke_lab::terminal::Paint;

/// Request, machine, times and traffic.
pub fn runs(
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
    text += &format!("\n{}\n", paint.bold("Where the time of the ranks is spent"));
    text += &shares(&runs).to_string();
    text += &format!("\n{}\n", paint.bold("Traffic"));
    text += &traffic(&runs).to_string();
    text
}

fn heading(request: &Request, machine: &Machine) -> String {
    let shape = &request.shape;
    let ranks = request.sharding.ranks();
    let cut = match request.sharding.cut() {
        Cut::Contiguous if ranks == 1 => "",
        cut => format::cut(cut),
    };
    let mut text = format!(
        "{}, batch {}, {}; {}\n",
        format::shape(shape),
        shape.batch,
        request.dtype,
        format::pattern(&request.pattern),
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
            1 => "one card per node".to_string(),
            cards => format!("{cards} cards per node"),
        };
        text += &format!(", {} between, {cards}", machine.inter_node.name);
    }
    for (rank, factor) in &machine.stragglers {
        text += &format!("; rank {rank} is slower by {factor}");
    }
    text + "\n"
}

fn totals(runs: &[(&str, &SimulatedRun)]) -> TextTable {
    let mut table = TextTable::new(
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
            None => "no hops".to_string(),
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

fn shares(runs: &[(&str, &SimulatedRun)]) -> TextTable {
    let headings = [
        "",
        "compute",
        "prepare",
        "exposed hops",
        "waiting for others",
        "done after",
    ];
    let mut table = TextTable::new(2, headings);
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

fn traffic(runs: &[(&str, &SimulatedRun)]) -> TextTable {
    let headings = ["", "bytes", "hops", "busiest port, at full speed"];
    let mut table = TextTable::new(2, headings);
    for (name, run) in runs {
        for link in &run.links {
            let location = match link.between_nodes {
                true => "between nodes",
                false => "inside nodes",
            };
            table.row([
                format!("{name}, {location} ({})", link.name),
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
                "      {}, head dimension {}: {} forward, {} backward\n        {}\n",
                rate.dtype,
                rate.dim,
                flops(rate.forward.flops),
                flops(rate.backward.flops),
                rate.source,
            );
        }
    }
    text += "  here: the CPU kernel of this machine, measured on each call\n";
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
