#!/usr/bin/env python3
"""Writes the tables and figures of the documents from the records in bench/record.

    bench/tables.py            rewrites every stale table and figure
    bench/tables.py --check    changes nothing; exits 1 and names what is stale

A document marks what this script writes with HTML comments, which a page does not show:

    <!-- table: NAME from bench/record/FILE [bench/record/FILE ...] -->   (to) <!-- /table -->
    <!-- figure: FILE KEY as FORMAT -->0.97<!-- /figure -->

NAME is a function below that is registered with @table; it gets the rows of the files. KEY of a
figure is a path of keys with dots (.json), `ROW NAME / FIELD` (.jsonl), or `START / NUMBER` (.txt:
the NUMBER-th number, from 0, of the first line that starts with START, after START). FORMAT is a
format of Python (`.2f`, `.1%`, `,d`), `GiB`, or `seconds`.

A figure therefore stands in one place, a record. Only the standard library is used.
"""

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "record"
TABLE = re.compile(
    r"(?P<open><!-- table: (?P<name>[\w-]+) from (?P<files>[^>]*?) -->\n)(?P<body>.*?)"
    r"(?P<close><!-- /table -->)",
    re.DOTALL,
)
FIGURE = re.compile(
    r"(?P<open><!-- figure: (?P<file>\S+) (?P<key>[^>]*?) as (?P<format>\S+) -->)(?P<body>[^<]*)"
    r"(?P<close><!-- /figure -->)"
)
# `forward d64 n4096 full   ours  508.8 TFLOP/s |  1.09 x cuDNN ( 468.8) | ... | host 21 us a call`
GPU_LINE = re.compile(r"^(?P<name>.+?)\s+ours\s+(?P<ours>[\d.]+) TFLOP/s \|(?P<rest>.*)\| host")
GPU_RIVAL = re.compile(r"([\d.]+) x (.+?) \(\s*([\d.]+)\)")
TABLES = {}


class DocumentError(Exception):
    """A document or a record that this script cannot work with, in one sentence."""


def table(name):
    """Registers a function from records to the lines of a table."""

    def register(function):
        TABLES[name] = function
        return function

    return register


# --- Records ----------------------------------------------------------------------------------


def load(path):
    """The content of a record: JSON, rows by name (.jsonl and the GPU's .txt), or lines (.txt)."""
    if not path.is_file():
        raise DocumentError(f"there is no record {path.relative_to(ROOT)}")
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return {" ".join(filter(None, (row.get("run"), row["name"]))): row for row in rows}
    rows = {}
    for match in map(GPU_LINE.match, text.splitlines()):
        if match and match["name"] not in rows:  # The first run of a record is its newest.
            row = {"name": match["name"], "tflops": {"ours": float(match["ours"])}}
            for ratio, rival, tflops in GPU_RIVAL.findall(match["rest"]):
                row["tflops"][rival] = float(tflops)
                row[f"ratio_{rival}"] = float(ratio)
            rows[match["name"]] = row
    return rows or text.splitlines()


def merged(records):
    """Rows of several records; of rows with one name the last record's count."""
    rows = {}
    for record in records:
        rows.update(record)
    return rows


# --- Tables -----------------------------------------------------------------------------------


def markdown(head, rows):
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def tokens(n):
    return f"{n // 1024}k"


def cpu_cell(row):
    if row is None:
        return ""
    return f"{row['gflops']:.0f} / {row['torch_gflops']:.0f} ({row['ratio']:.2f})"


def cpu_name(dtype, both, d, n, causal):
    passes = "both" if both else "forward"
    return f"{dtype} {passes} d{d} n{n} {'causal' if causal else 'full'}"


CPU_SHAPES = [(d, n) for d in (64, 128) for n in (1024, 4096, 16384)]


@table("cpu-dense")
def cpu_dense(_paths, records):
    rows = merged(records)
    head = ["GFLOP/s, Encke / PyTorch (median of ratios)"]
    head += [f"d {d}, {tokens(n)}" for d, n in CPU_SHAPES]
    lines = []
    for dtype in ("f32", "bf16"):
        for both in (False, True):
            for causal in (False, True):
                title = "forward + backward" if both else "forward"
                line = [f"{dtype} {title}, {'causal' if causal else 'full'}"]
                for d, n in CPU_SHAPES:
                    line.append(cpu_cell(rows.get(cpu_name(dtype, both, d, n, causal))))
                lines.append(line)
    return markdown(head, lines)


@table("cpu-dilated")
def cpu_dilated(_paths, records):
    rows = merged(records)
    dilations = (1, 4, 16)
    head = ["GFLOP/s, Encke / gather + PyTorch (median of ratios)"]
    head += [f"r = {r}, {size}" for size in ("same", "longer") for r in dilations]
    lines = []
    for dtype in ("f32", "bf16"):
        for passes, title in (("forward", "forward"), ("both", "forward + backward")):
            line = [f"{dtype} {title}"]
            for size in ("same tensors", "longer sequence"):
                for r in dilations:
                    line.append(cpu_cell(rows[f"{dtype} {passes} dilated r{r} {size}"]))
            lines.append(line)
    return markdown(head, lines)


@table("cpu-rings")
def cpu_rings(_paths, records):
    rows = merged(records)
    rings = [rows[f"ring of {p}, f32 d64 n16384 causal zigzag"] for p in (2, 4, 8)]
    head = ["f32, d 64, 16k tokens, causal, zigzag"]
    head += [f"ring of {row['ranks']}" for row in rings]
    cpu = ["CPU time, in units of one rank's"] + [f"{row['cpu_ratio']:.2f}" for row in rings]
    wall = ["wall time, in units of one rank's"] + [f"{row['wall_ratio']:.2f}" for row in rings]
    return markdown(head, [cpu, wall])


@table("cpu-memory")
def cpu_memory(_paths, records):
    rows = merged(records)
    lines = []
    for name, row in rows.items():
        if name.startswith("memory of "):
            name = name.removeprefix("memory of ").replace("both", "forward + backward")
            name = re.sub(r"n(\d+)", lambda n: tokens(int(n[1])), name)
            name = re.sub(r"\b([dr])(\d+)", r"\1 \2", name)
            mib = (row["ours_mib"], row["torch_mib"], row["outputs_mib"])
            lines.append([name] + [f"{x:.1f}" for x in mib])
    return markdown(["MiB beyond the inputs", "Encke", "PyTorch", "outputs alone"], lines)


@table("slides")
def slides(_paths, records):
    head = ["tiles", "forward, ms", "theirs", "forward + backward, ms", "exact gradient"]
    lines = []
    for row in merged(records).values():
        line = [f"{row['tiles']:,}", row["encke_forward_ms"], row["theirs_forward_ms"]]
        line += [row["encke_both_ms"], row.get("exact_both_ms", "–"), row["theirs_both_ms"]]
        lines.append([str(cell) for cell in (*line, row["encke_mib"], row["theirs_mib"])])
    return markdown([*head, "theirs", "MiB", "theirs"], lines)


@table("conformance")
def conformance(_paths, records):
    rows = list(merged(records).values())
    head = ["promise", *(row["name"].replace("_", " ") for row in rows)]
    lines = []
    for promises in zip(*(row["outcomes"] for row in rows)):
        lines.append([promises[0]["promise"], *(of["verdict"] for of in promises)])
    return markdown(head, lines)


CALL_RIVALS = ("cuDNN", "FlashAttention-4")


@table("gpu-calls")
def gpu_calls(_paths, records):
    head = ["call of the Python package", "Encke"]
    head += [f"{rival} (Encke / {rival})" for rival in CALL_RIVALS]
    lines = []
    for name, row in merged(records).items():
        measured, unit = (row["tflops"], "") if "tflops" in row else (row["host_us"], " µs")
        line = [name, f"{measured['Encke']:.0f}{unit}"]
        for rival in CALL_RIVALS:
            if rival in measured:
                line.append(f"{measured[rival]:.0f}{unit} ({row['ratios'][rival]:.2f})")
            else:
                line.append("–")
        lines.append(line)
    return markdown(head, lines)


@table("gpu-masks")
def gpu_masks(_paths, records):
    head = ["TFLOP/s of visible pairs", "forward", "FA4", "backward", "FA4"]
    lines = []
    for name, row in merged(records).items():
        cells = [row.get(f"{of} {way} tflops") for way in ("forward", "backward")
                 for of in ("encke", "fa4")]
        if cells == [None] * 4:
            continue  # of few queries: in TB/s
        lines.append([name, *("–" if cell is None else f"{cell:.0f}" for cell in cells)])
    return markdown(head, lines)


@table("cpu-busy")
def cpu_busy(_paths, records):
    rows = merged(records)
    head = ["ratio to PyTorch, full / causal"] + [f"d {d}, {tokens(n)}" for d, n in CPU_SHAPES]
    lines = []
    for dtype in ("f32", "bf16"):
        for both in (False, True):
            for run in ("quiet", "busy"):
                line = [f"{dtype} {'forward + backward' if both else 'forward'}, {run}"]
                for d, n in CPU_SHAPES:
                    pair = [rows.get(f"{run} {cpu_name(dtype, both, d, n, c)}") for c in (0, 1)]
                    line.append(" / ".join(f"{row['ratio']:.2f}" for row in pair if row))
                lines.append(line)
    return markdown(head, lines)


@table("cpu-busy-rings")
def cpu_busy_rings(_paths, records):
    rows = merged(records)
    rings, dilations = (2, 4, 8), (1, 4, 16)
    head = [f"ring of {p}, CPU time of one rank" for p in rings]
    head += [f"{dtype} dilated, r = {r}" for dtype in ("f32", "bf16") for r in dilations]
    lines = []
    for run in ("quiet", "busy"):
        ring = [rows[f"{run} ring of {p}, f32 d64 n16384 causal zigzag"] for p in rings]
        line = [run] + [f"{row['cpu_ratio']:.2f} x" for row in ring]
        for dtype in ("f32", "bf16"):
            for r in dilations:
                row = rows[f"{run} {dtype} dilated r{r}, 2048 rows a segment"]
                line.append(f"{row['ratio']:.2f}")
        lines.append(line)
    return markdown(["host", *head], lines)


def gpu_cell(row, rivals):
    cell = f"{row['tflops']['ours']:.0f}"
    for rival in rivals:
        cell += f" / {row['tflops'][rival]:.0f} ({row[f'ratio_{rival}']:.2f})"
    return cell


GPU_RIVALS = ("cuDNN", "FlashAttention-2")
GPU_PASSES = ("forward", "backward fast", "backward deterministic")
GPU_DENSE = re.compile(rf"({'|'.join(GPU_PASSES)}) d(\d+) n(\d+) (full|causal)$")


@table("gpu-dense")
def gpu_dense(_paths, records):
    rows = merged(records)
    lines = {}
    for name, row in rows.items():
        match = GPU_DENSE.match(name)
        if match:
            passes, d, n, mask = match[1], int(match[2]), int(match[3]), match[4]
            order = (n, GPU_PASSES.index(passes))
            title = f"{passes}, {tokens(n)}, {mask}"
            lines.setdefault((*order, mask != "full"), (title, {}))[1][d] = row
    head = ["TFLOP/s, Encke / cuDNN (ratio) / FlashAttention-2 (ratio)", "d 64", "d 128", "turns"]
    return markdown(
        head,
        [
            [title]
            + [gpu_cell(cells[d], GPU_RIVALS) for d in (64, 128)]
            + [" and ".join(sorted({str(cells[d]["turns"]) for d in (64, 128)}))]
            for _, (title, cells) in sorted(lines.items())
        ],
    )


@table("gpu-dilated")
def gpu_dilated(_paths, records):
    rows = merged(records)
    rivals = ("cuDNN on views", "gather + cuDNN")
    head = ["TFLOP/s, Encke / cuDNN on views (ratio) / gather + cuDNN (ratio)", "d 64", "d 128"]
    name = "dilated d{} r{}, 2048 keys a segment, n262144"
    lines = [
        [f"r = {r}"] + [gpu_cell(rows[name.format(d, r)], rivals) for d in (64, 128)]
        for r in (1, 4, 16)
    ]
    return markdown(head, lines)


def ring_ratio(rows, ranks, hops):
    row = rows.get(f"ring of {ranks}, {hops}, d128 n65536 causal zigzag")
    return f"{row['ratio_one fused call']:.2f}" if row else ""


@table("gpu-rings")
def gpu_rings(paths, records):
    sizes = (2, 4, 8, 16)
    names = {"pointer hops": "by pointer, 16 key heads"}
    for rounds in ("", ", 2 parcels a round"):
        for heads in ("2 key heads", "4 key heads", "8 key heads of 64"):
            names[f"pinned hops, {heads}{rounds}"] = f"through the host, {heads}{rounds}"
    names["pinned hops"] = "through the host, 16 key heads"
    lines, seen = [], set()
    for path, rows in zip(paths, records):
        for hops, title in names.items():
            cells = [ring_ratio(rows, ranks, hops) for ranks in sizes]
            if any(cells) and hops not in seen:
                seen.add(hops)
                lines.append([title, *cells, f"[{path.stem}](bench/record/{path.stem}.txt)"])
    head = ["throughput, in units of one fused call's"] + [f"{p} ranks" for p in sizes] + ["record"]
    return markdown(head, lines)


@table("gpu-rings-wide")
def gpu_rings_wide(_paths, records):
    rows = merged(records)
    lines = []
    for ranks, widths in ((4, (3,)), (8, (2, 4, 7)), (16, (4, 15))):
        for width in (1, *widths):
            hops = "pointer hops" if width == 1 else f"pointer hops, {width} parcels a round"
            lines.append([f"{ranks} ranks", str(width), ring_ratio(rows, ranks, hops)])
    return markdown(["ring", "parcels a round", "throughput, in units of one fused call's"], lines)


@table("billion")
def billion(paths, records):
    head = ["command", "machine", "heads", "seconds", "pairs", "recomputed in f64"]
    lines = []
    for path, run in zip(paths, records):
        settings, machine = run["settings"], run["machine"]
        gpu = "device" in settings and settings["device"] != "cpu"
        name = run["kernel"].split(" (")[0] if gpu else "Intel Xeon"
        where = f"{name}; {settings['dtype']}, {settings['ranks']} ranks"
        if not gpu:
            gb = machine["memory_bytes"] / 1e9
            where = f"{name}, {machine['threads']} threads, {gb:.0f} GB; "
            where += f"{settings['dtype']}, {settings['ranks']} ranks"
        checked = run["checked"]
        link = f"[record](bench/record/{path.name})"
        lines.append(
            [
                f"`{run['command']}` ({link})",
                where,
                f"{settings['heads']} × {settings['dim']}",
                seconds(run["seconds"]),
                power(run["pairs"]),
                f"{checked['rows']:,d} rows, {checked['wrong']} wrong",
            ]
        )
    return markdown(head, lines)


def seconds(x):
    return f"{x:.1f}" if x < 100 else f"{x:,.0f}"


def power(x):
    exponent = len(str(int(x))) - 1
    digits = str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{x / 10**exponent:.2f} · 10{digits}"


PYTHON_RING = re.compile(
    r"^(\S+)\s+(f32|bf16)\s+(True|False)\s+(\d+) ms\s+(\d+) ms\s+([\d.]+)\s+(\d+) MiB\s+(\d+) MiB"
    r"\s+(\S+)\s*(wrong)?$"
)


@table("python-rings")
def python_rings(_paths, records):
    lines = []
    for match in filter(None, map(PYTHON_RING.match, records[0])):
        package, dtype, causal, one, two, _, _, memory, error, wrong = match.groups()
        mask = "causal" if causal == "True" else "full"
        error = f"{error} (wrong)" if wrong else error
        lines.append([package, dtype, mask, one, two, memory, error])
    head = ["package", "type", "mask", "ms a step, 1 process", "2 processes", "MiB, 2 processes"]
    return markdown([*head, "largest error of out and dq"], lines)


@table("longnet")
def longnet(_paths, records):
    head = ["ranks", "loss after 300 steps", "relative difference from one rank"]
    head += ["seconds a step (median)", "attention memory of a rank"]
    runs = [record["training"] for record in records]
    first = runs[0]["losses"][-1]
    lines = []
    for run in runs:
        loss = run["losses"][-1]
        apart = f"{abs(loss - first) / first:.1e}".replace("e-0", "e-") if loss != first else ""
        median = f"{statistics.median(run['seconds']):.2f}"
        mib = f"{run['rank_bytes'] / 2**20:.1f} MiB"
        lines.append([str(run["ranks"]), f"{loss:.6f}", apart, median, mib])
    return markdown(head, lines)


@table("longnet-dense")
def longnet_dense(_paths, records):
    lines = []
    for run in (record["training"] for record in records):
        pattern = "dilated" if run["settings"]["dilation_rates"] else "dense"
        median = f"{statistics.median(run['seconds']):.2f}"
        lines.append([pattern, f"{run['losses'][-1]:.3f}", median])
    return markdown(["attention", "loss after 300 steps", "seconds a step (median)"], lines)


@table("retrieval")
def retrieval(_paths, records):
    run = records[0]["retrieval"]
    lines = [
        [
            model["reach"],
            f"{model['right']} of {model['asked']}",
            f"{100 * model['right'] / model['asked']:.1f} %",
        ]
        for model in run["models"]
    ]
    lines.append(["guessing", "", f"{100 * run['chance']:.1f} %"])
    return markdown(["model", "right answers", "share"], lines)


@table("headline")
def headline(paths, records):
    by_stem = {(path.stem, path.suffix): record for path, record in zip(paths, records)}
    cpu = by_stem["cpu-sapphire-rapids-2-threads", ".jsonl"]
    gpu = by_stem["gpu-h200-chains", ".jsonl"]
    calls = by_stem["gpu-calls-h200", ".jsonl"]
    dilated = by_stem["gpu-h200-chains", ".txt"]
    run = by_stem["billion-h200", ".json"]
    cores, card = "2 Xeon cores", "H200"
    lines = []

    def on_cpu(title, name):
        row = cpu[name]
        rate = f"{row['gflops']:,.0f} GFLOP/s"
        lines.append([title, cores, rate, f"{row['ratio']:.2f} x PyTorch"])

    def on_gpu(title, row, rival, shown=None):
        rate = f"{row['tflops']['ours']:.0f} TFLOP/s"
        lines.append([title, card, rate, f"{row[f'ratio_{rival}']:.2f} x {shown or rival}"])

    on_cpu("f32 forward, d 64, 16k, causal", "f32 forward d64 n16384 causal")
    on_cpu("bf16 forward + backward, d 64, 4k, causal", "bf16 both d64 n4096 causal")
    dense = [row for name, row in cpu.items() if re.search(r" d\d+ n\d+ (full|causal)$", name)]
    ratios = [row["ratio"] for row in dense]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} x PyTorch"
    lines.append([f"all {len(ratios)} dense rows, 1k to 16k", cores, "", spread])
    def call_on_gpu(title, name):
        row = calls[name]
        compared = ", ".join(f"{row['ratios'][rival]:.2f} x {rival}" for rival in CALL_RIVALS)
        lines.append([title, card, f"{row['tflops']['Encke']:.0f} TFLOP/s", compared])

    call_on_gpu("bf16 forward, d 128, 16k, causal", "forward 16k d128 16 heads causal")
    call_on_gpu("bf16 backward, d 128, 16k, causal", "backward 16k d128 16 heads causal")
    fixed = "backward 16k d128 16 heads causal, fixed order"
    call_on_gpu("the same, bitwise repeatable", fixed)
    ratios = [row["ratios"] for row in calls.values() if "tflops" in row]
    spread = (
        f"{min(of[rival] for of in ratios):.2f} to {max(of[rival] for of in ratios):.2f} x {rival}"
        for rival in CALL_RIVALS
    )
    lines.append([f"all {len(ratios)} rows of the Python call", card, "", ", ".join(spread)])
    name = "dilated d128 r16, 2048 keys a segment, n262144"
    on_gpu("bf16 forward, d 128, 256k, dilation 16", dilated[name], "gather + cuDNN")
    name = "ring of 8, pointer hops, d128 n65536 causal zigzag"
    on_gpu("ring of 8 on one GPU, 64k, causal", gpu[name], "one fused call", "one rank")
    ring = cpu["ring of 8, f32 d64 n16384 causal zigzag"]
    cost = f"{ring['cpu_ratio']:.2f} x the CPU time of one rank"
    lines.append(["ring of 8 threads, f32, 16k, causal", cores, "", cost])
    checked, settings = run["checked"], run["settings"]
    planned = run["device_memory"]["planned_bytes"] / 2**30
    lines.append(
        [
            f"2³⁰ tokens, {settings['heads']} heads of {settings['dim']}, 11 branches",
            card,
            f"{run['seconds']:.1f} s",
            f"{planned:.1f} GiB planned; {checked['rows']:,d} rows recomputed in f64, "
            f"{checked['wrong']} wrong",
        ]
    )
    return markdown(["attention", "machine", "Encke", "compared with"], lines)


# --- Figures ----------------------------------------------------------------------------------


def figure(path, key, form):
    """One figure of a record, as text."""
    record = load(path)
    try:
        if path.suffix == ".json":
            value = record
            for part in key.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
        elif isinstance(record, dict):
            row, field = key.rsplit(" / ", 1)
            value = record[row]
            for part in field.split("."):
                value = value[part]
        else:
            start, index = key.rsplit(" / ", 1)
            line = next(line.strip() for line in record if line.strip().startswith(start))
            value = float(re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", line[len(start) :])[int(index)])
    except (KeyError, IndexError, StopIteration, ValueError) as error:
        raise DocumentError(f"{path.name} has no figure `{key}` ({error!r})") from None
    if form == "GiB":
        return f"{value / 2**30:.1f} GiB"
    if form == "seconds":
        return f"{seconds(value)} s"
    if form.endswith("d"):
        value = int(value)
    text = format(value, form)
    return text[:-1] + " %" if text.endswith("%") else text


# --- Documents --------------------------------------------------------------------------------


def documents():
    """Every page of the repository that people read."""
    patterns = ("*.md", "docs/**/*.md", "crates/*/README.md", "python/*.md")
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def rendered(page, text, stale):
    """The text of a page with its tables and figures as the records have them."""

    def write_table(match):
        if match["name"] not in TABLES:
            raise DocumentError(f"{page}: there is no table `{match['name']}` in bench/tables.py")
        paths = [ROOT / file for file in match["files"].split()]
        try:
            lines = TABLES[match["name"]](paths, [load(path) for path in paths])
        except KeyError as error:
            raise DocumentError(f"{page}: table {match['name']}: no record has {error}") from None
        depth = len(Path(page).parent.parts)  # Links are written for a page at the root.
        body = "\n".join(lines).replace("](bench/", "](" + "../" * depth + "bench/") + "\n"
        if body != match["body"]:
            stale.append(f"{page}: table {match['name']}")
        return match["open"] + body + match["close"]

    def write_figure(match):
        value = figure(RECORDS / match["file"], match["key"], match["format"])
        if value != match["body"]:
            stale.append(f"{page}: {match['body']} is {value} in {match['file']}, {match['key']}")
        return match["open"] + value + match["close"]

    for kind, pattern in (("table", TABLE), ("figure", FIGURE)):
        if text.count(f"<!-- {kind}: ") != len(pattern.findall(text)):
            raise DocumentError(f"{page}: a marker `<!-- {kind}:` is not closed or has no record")
    if re.search(r"^\s*<!-- figure: ", text, re.MULTILINE):
        raise DocumentError(f"{page}: a line starts with a figure, which would end its paragraph")
    return FIGURE.sub(write_figure, TABLE.sub(write_table, text))


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    stale = []
    try:
        for path in documents():
            page, text = path.relative_to(ROOT).as_posix(), path.read_text()
            new = rendered(page, text, stale)
            if new != text and not check:
                path.write_text(new)
    except DocumentError as error:
        sys.exit(f"bench/tables.py: {error}")
    for line in stale:
        print(line + (" is stale" if check else " written"))
    if check and stale:
        sys.exit("bench/tables.py: documents differ from the records; run bench/tables.py")


if __name__ == "__main__":
    main()
