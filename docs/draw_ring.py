#!/usr/bin/env python3
"""Draws docs/ring.svg: a ring of eight ranks with the dilated pattern of one head.

    python3 docs/draw_ring.py            writes docs/ring.svg
    python3 docs/draw_ring.py --check    exits 1 if the file differs from what would be written

Everything in the picture follows from the six constants below and the definition of a branch
(docs/spec.md, section 0); nothing is placed by hand. The same plan in words:

    encke plan --tokens 64 --heads 8 --dim 8 --ranks 8 --mode mix \\
        --segment-lengths 8,32,64 --dilation-rates 1,4,8

Only the standard library is used.
"""

import math
import sys
from pathlib import Path

TOKENS = 64
RANKS = 8
BRANCHES = [(8, 1), (32, 4), (64, 8)]  # (segment length, dilation)
HEAD = 1  # Its offset in a branch is HEAD mod dilation.
QUERY = 41  # The query whose keys are drawn as chords.
WIDTH, HEIGHT = 1200, 660

CHUNK = TOKENS // RANKS
CENTRE = (372, 318)
TRACKS = [166, 186, 206]  # Radius of each branch's dots.
INNER, OUTER = 152, 220  # The band of a rank.
ROUTES = [None, 246, 271]  # Radius on which each branch's parcels travel.
GAP = math.radians(2.6)  # Between the bands of two ranks.

STYLE = """
  .card { fill: #ffffff; stroke: #d8dee6 }
  .band { fill: #f1f4f8; stroke: #c9d1dc }
  .home { fill: #e3e9f2; stroke: #8896a8 }
  .grid { stroke: #d3dae3; fill: none }
  .frame { stroke: #a9b4c2; fill: none }
  .idle { fill: #c4ccd7 }
  .text { fill: #1c2430 }
  .soft { fill: #566273 }
  .f0 { fill: #0f8f83 } .s0 { stroke: #0f8f83 }
  .f1 { fill: #d9700d } .s1 { stroke: #d9700d }
  .f2 { fill: #7a4fd0 } .s2 { stroke: #7a4fd0 }
  .query { fill: #1c2430; stroke: #ffffff }
  .row { fill: none; stroke: #1c2430 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #12161c; stroke: #2c343f }
    .band { fill: #1b2129; stroke: #343e4b }
    .home { fill: #25303d; stroke: #6d7c8f }
    .grid { stroke: #2a323d }
    .frame { stroke: #4a5666 }
    .idle { fill: #46515f }
    .text { fill: #e8edf3 }
    .soft { fill: #9aa7b7 }
    .f0 { fill: #35c7b8 } .s0 { stroke: #35c7b8 }
    .f1 { fill: #ffa14d } .s1 { stroke: #ffa14d }
    .f2 { fill: #b397ff } .s2 { stroke: #b397ff }
    .query { fill: #ffffff; stroke: #12161c }
    .row { stroke: #ffffff }
  }
  text { font-family: -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif }
"""


def index_set(token, branch):
    """The tokens that share an index set with `token` in a branch; none if it is not touched."""
    segment, dilation = BRANCHES[branch]
    start = token // segment * segment
    offset = HEAD % dilation
    if (token - start) % dilation != offset:
        return []
    return list(range(start + offset, min(start + segment, TOKENS), dilation))


def rings():
    """(branch, first rank, last rank) of every ring: segments that more than one rank shares."""
    found = []
    for branch, (segment, _) in enumerate(BRANCHES):
        for start in range(0, TOKENS, segment):
            first, last = start // CHUNK, (min(start + segment, TOKENS) - 1) // CHUNK
            if last > first:
                found.append((branch, first, last))
    return found


def rows_sent(rank, branch):
    """How many of a rank's tokens a branch selects, and so how many of its rows travel."""
    return sum(bool(index_set(t, branch)) for t in range(rank * CHUNK, (rank + 1) * CHUNK))


def angle(token):
    """The angle of a token's middle; rank 0 starts at the top, ranks follow clockwise."""
    rank, place = divmod(token, CHUNK)
    span = 2 * math.pi / RANKS
    return -math.pi / 2 + rank * span + GAP / 2 + (place + 0.5) * (span - GAP) / CHUNK


def edge(rank, end):
    """The angle at which a rank's band starts (end = 0) or ends (end = 1)."""
    span = 2 * math.pi / RANKS
    return -math.pi / 2 + (rank + end) * span + (GAP / 2 if end == 0 else -GAP / 2)


def at(radius, theta):
    return CENTRE[0] + radius * math.cos(theta), CENTRE[1] + radius * math.sin(theta)


def point(radius, theta):
    return "{:.1f},{:.1f}".format(*at(radius, theta))


def arc(radius, start, end):
    large = int(end - start > math.pi)
    return f"M{point(radius, start)} A{radius},{radius} 0 {large} 1 {point(radius, end)}"


def text(x, y, words, size=13, kind="text", anchor="start", weight=400):
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'


def band(rank):
    start, end = edge(rank, 0), edge(rank, 1)
    kind = "home" if rank == QUERY // CHUNK else "band"
    path = f"{arc(OUTER, start, end)} L{point(INNER, end)} "
    path += f"A{INNER},{INNER} 0 0 0 {point(INNER, start)} Z"
    return f'<path class="{kind}" d="{path}"/>'


def dots():
    for token in range(TOKENS):
        for branch, radius in enumerate(TRACKS):
            x, y = at(radius, angle(token))
            if index_set(token, branch):
                yield f'<circle class="f{branch}" cx="{x:.1f}" cy="{y:.1f}" r="4.6"/>'
            else:
                yield f'<circle class="idle" cx="{x:.1f}" cy="{y:.1f}" r="1.7"/>'


def chords():
    """Curves from the query to every key it sees, one colour a branch."""
    for branch in reversed(range(len(BRANCHES))):
        for key in index_set(QUERY, branch):
            if key == QUERY:
                continue
            apart = abs(math.remainder(angle(key) - angle(QUERY), 2 * math.pi))
            middle = angle(QUERY) + math.remainder(angle(key) - angle(QUERY), 2 * math.pi) / 2
            pull = (INNER - 6) * (1 - apart / math.pi) ** 0.8 * 0.86
            path = f"M{point(INNER - 4, angle(QUERY))} Q{point(pull, middle)} "
            path += point(INNER - 4, angle(key))
            yield (
                f'<path class="s{branch}" d="{path}" fill="none" stroke-width="1.7" opacity="0.8"/>'
            )


def parcel(branch, theta, radius, rows):
    """Rows on their way: one square a row, along the arc."""
    for row in range(rows):
        turn = (row - (rows - 1) / 2) * 0.052
        x, y = at(radius, theta + turn)
        degrees = math.degrees(theta + turn)
        yield (
            f'<rect class="f{branch}" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" '
            f'rx="2" transform="rotate({degrees:.1f} {x:.1f} {y:.1f})"/>'
        )


def arrow(branch, radius, theta, clockwise=True):
    """An arrow head along the circle."""
    x, y = at(radius, theta)
    degrees = math.degrees(theta) + (90 if clockwise else -90)
    return (
        f'<path class="f{branch}" d="M7,0 L-5,-5.2 L-5,5.2 Z" '
        f'transform="translate({x:.1f} {y:.1f}) rotate({degrees:.1f})"/>'
    )


def way_back(branch, start, end, theta, rows):
    """The hop from the last rank of a ring to its first: a dashed line inside the others."""
    radius, turn = ROUTES[branch], 0.15
    inner = radius - 14
    path = f"M{point(radius, end)} C{point(radius, end + turn)} {point(inner, end + turn)} "
    path += f"{point(inner, end)} A{inner},{inner} 0 0 0 {point(inner, start)} "
    path += f"C{point(inner, start - turn)} {point(radius, start - turn)} {point(radius, start)}"
    yield (
        f'<path class="s{branch}" d="{path}" fill="none" stroke-width="1.4" '
        'stroke-dasharray="3 3"/>'
    )
    yield from parcel(branch, theta, inner, rows)
    yield arrow(branch, inner, theta - 0.052 * (rows - 1) / 2 - 0.078, clockwise=False)


def travels():
    """Each ring as a line over its ranks, with the parcel of each hop between two neighbours."""
    for branch, first, last in rings():
        radius = ROUTES[branch]
        whole = last - first + 1 == RANKS
        start = angle(first * CHUNK + CHUNK // 2) - (angle(1) - angle(0)) / 2
        span = 2 * math.pi / RANKS
        if whole:
            line = f'<circle class="s{branch}" cx="{CENTRE[0]}" cy="{CENTRE[1]}" r="{radius}" '
            yield line + 'fill="none" stroke-width="1.6"/>'
        else:
            end = start + (last - first) * span
            yield (
                f'<path class="s{branch}" d="{arc(radius, start, end)}" fill="none" '
                'stroke-width="1.6"/>'
            )
            yield from way_back(branch, start, end, start + span, rows_sent(last, branch))
        for rank in range(first, last + (1 if whole else 0)):
            theta = start + (rank - first + 0.5) * span
            rows = rows_sent(rank, branch)
            yield from parcel(branch, theta, radius, rows)
            yield arrow(branch, radius, theta + 0.052 * (rows - 1) / 2 + 0.075)


def labels():
    for rank in range(RANKS):
        theta = (edge(rank, 0) + edge(rank, 1)) / 2
        x, y = at(300, theta)
        first, last = rank * CHUNK, (rank + 1) * CHUNK - 1
        side = math.cos(theta)
        anchor = "start" if side > 0.2 else "end" if side < -0.2 else "middle"
        weight = 700 if rank == QUERY // CHUNK else 600
        yield text(x, y - 2, f"rank {rank}", 13, "text", anchor, weight)
        yield text(x, y + 13, f"tokens {first}–{last}", 11, "soft", anchor)


def matrix(x0, y0, cell):
    """The pattern of the head: a row a query, a column a key, coloured by branch."""
    side = TOKENS * cell
    for query in range(TOKENS):
        for branch in range(len(BRANCHES)):
            for key in index_set(query, branch):
                x, y = x0 + key * cell, y0 + query * cell
                yield (
                    f'<rect class="f{branch}" x="{x:.2f}" y="{y:.2f}" width="{cell - 0.6:.2f}" '
                    f'height="{cell - 0.6:.2f}"/>'
                )
    for rank in range(1, RANKS):
        line = rank * CHUNK * cell
        path = f"M{x0 + line:.1f},{y0} v{side:.1f} M{x0},{y0 + line:.1f} h{side:.1f}"
        yield f'<path class="grid" d="{path}"/>'
    yield f'<rect class="frame" x="{x0}" y="{y0}" width="{side:.1f}" height="{side:.1f}"/>'
    y = y0 + QUERY * cell
    yield (
        f'<rect class="row" x="{x0 - 2}" y="{y - 1.2:.2f}" width="{side + 4:.1f}" '
        f'height="{cell + 1.8:.2f}"/>'
    )
    yield text(x0 - 8, y + cell - 0.5, f"query {QUERY}", 11, "text", "end", 700)
    for rank in range(RANKS):
        middle = (rank + 0.5) * CHUNK * cell
        yield text(x0 + middle, y0 - 7, f"{rank}", 11, "soft", "middle")
        if abs(middle - (QUERY + 0.5) * cell) > 9:
            yield text(x0 - 8, y0 + middle + 4, f"{rank}", 11, "soft", "end")


def legend(x, y):
    for branch, (segment, dilation) in enumerate(BRANCHES):
        line = y + branch * 42
        ranks = segment // CHUNK
        rows = rows_sent(0, branch)
        where = f"rings of {ranks} ranks" if ranks < RANKS else f"one ring of {ranks} ranks"
        sent = f"{where}: {rows} of {CHUNK} rows of each rank {'travel' if rows > 1 else 'travels'}"
        if ranks == 1:
            sent = "every segment lies inside one rank: nothing travels"
        yield f'<circle class="f{branch}" cx="{x + 6}" cy="{line - 5}" r="6"/>'
        words = f"segments of {segment} tokens, dilation {dilation}"
        yield text(x + 22, line, words, 14, "text", "start", 600)
        yield text(x + 22, line + 17, sent, 12.5, "soft")


def picture():
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title">'
    )
    yield (
        f'<title id="title">A ring of {RANKS} ranks with {TOKENS} tokens. Head {HEAD} mixes '
        "three branches; only the key and value rows that a branch selects travel, and only "
        "between ranks that share one of its segments.</title>"
    )
    yield f"<style>{STYLE}</style>"
    yield (
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="14"/>'
    )
    yield from (band(rank) for rank in range(RANKS))
    yield from chords()
    yield from dots()
    x, y = at(INNER - 4, angle(QUERY))
    yield f'<circle class="query" cx="{x:.1f}" cy="{y:.1f}" r="6" stroke-width="2"/>'
    yield from travels()
    yield from labels()
    x, y = CENTRE
    yield text(x + 90, y - 13, f"query {QUERY}", 13, "text", "middle", 700)
    yield text(x + 90, y + 3, "and the keys it sees", 11, "soft", "middle")
    words = "dots: tokens that a branch selects"
    words += " · squares: their key and value rows on the way to the next rank"
    yield text(x, HEIGHT - 20, words, 11.5, "soft", "middle")
    x0, y0, cell = 784, 104, 6.1
    yield text(x0, 46, f"The pattern of head {HEAD}", 18, "text", "start", 700)
    words = "a row for each query, a column for each key, cut at the ranks"
    yield text(x0, 68, words, 12.5, "soft")
    yield from matrix(x0, y0, cell)
    yield from legend(x0, y0 + TOKENS * cell + 38)
    yield "</svg>"


def main():
    path = Path(__file__).with_name("ring.svg")
    drawn = "\n".join(picture()) + "\n"
    if sys.argv[1:] == ["--check"]:
        if not path.is_file() or path.read_text() != drawn:
            sys.exit("docs/ring.svg is stale; run python3 docs/draw_ring.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        path.write_text(drawn)


if __name__ == "__main__":
    main()
