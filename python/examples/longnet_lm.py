"""A byte-level LongNet language model, on one process or on several, with the same loss curve. Each
process holds its shard of every sequence; only the attention communicates.

    python longnet_lm.py ../../ARCHITECTURE.md
    torchrun --standalone --nproc-per-node=2 longnet_lm.py ../../ARCHITECTURE.md
"""
import argparse, csv, glob, os
import torch, torch.distributed as dist, torch.nn as nn
from encke.distributed import RingDilatedAttention, shard
from encke.nn import LongNetEncoder

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("text", help="any file: its bytes are the tokens")
parser.add_argument("--tokens", type=int, default=2048, help="length of a sequence")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--sharding", default="zigzag", help="contiguous, zigzag (balanced) or striped")
parser.add_argument("--folder", default=".", help="where loss-P.csv and loss.svg go")
options = parser.parse_args()

dist.init_process_group("gloo") if "RANK" in os.environ else dist.init_process_group(
    "gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks, rank = dist.get_world_size(), dist.get_rank()

class LanguageModel(nn.Module):
    def __init__(self, width=128, heads=4, layers=2):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(options.tokens, width)
        pattern = dict(segment_lengths=[256, 2048], dilation_rates=[1, 4], mode="mix")
        attention = RingDilatedAttention(**pattern, sharding=options.sharding)
        self.body = LongNetEncoder(layers, width, heads, dim_feedforward=4 * width, dropout=0.0,
                                   attention=attention)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens, positions):
        x = self.token(tokens) + self.position(positions)
        return self.head(self.body(x, is_causal=True))

torch.manual_seed(0)  # Every process makes the same model and draws the same sequences.
model = nn.parallel.DistributedDataParallel(LanguageModel())
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.frombuffer(bytearray(open(options.text, "rb").read()), dtype=torch.uint8).long()
positions = shard(torch.arange(options.tokens), dim=0, sharding=options.sharding)
losses = []
for step in range(options.steps):
    start = torch.randint(len(text) - options.tokens, ()).item()
    tokens, targets = text[start + positions][None], text[start + 1 + positions][None]
    logits = model(tokens, positions)
    # The mean over all tokens of all ranks; the wrapper averages gradients over ranks.
    loss = nn.functional.cross_entropy(logits[0], targets[0], reduction="sum") / options.tokens
    optimiser.zero_grad()
    (loss * ranks).backward()
    optimiser.step()
    dist.all_reduce(loss := loss.detach())
    losses.append(loss.item())
    if rank == 0 and step % 10 == 0:
        print(f"step {step:4d}   loss {losses[-1]:.4f}", flush=True)

def draw(path, curves):  # An SVG with the loss over steps, one line per number of processes.
    top = max(max(curve) for curve in curves.values())
    x = lambda i, curve: 40 + 540 * i / (len(curve) - 1 or 1)
    y = lambda loss: 280 - 260 * loss / top
    lines = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="'
        + " ".join(f"{x(i, curve):.1f},{y(loss):.1f}" for i, loss in enumerate(curve))
        + f'"/><text x="460" y="{30 + 20 * at}" fill="{colour}">{name}: {curve[-1]:.4f}</text>'
        for at, ((name, curve), colour, width) in enumerate(
            zip(curves.items(), ["#d62728", "#1f77b4", "#2ca02c", "#9467bd"], [5, 1.5, 1.5, 1.5])))
    axis = (f'<path d="M40 20V280H580" fill="none" stroke="black"/>'
            f'<text x="4" y="24">{top:.2f}</text>')
    open(path, "w").write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 300" '
                          f'font-family="sans-serif" font-size="12">{axis}{lines}</svg>\n')

if rank == 0:
    with open(f"{options.folder}/loss-{ranks}.csv", "w", newline="") as file:
        csv.writer(file).writerows(enumerate(losses))
    paths = sorted(glob.glob(f"{options.folder}/loss-*.csv"))
    runs = {path: list(csv.reader(open(path))) for path in paths}
    draw(f"{options.folder}/loss.svg", {
        f"{path.split('-')[-1][:-4]} processes": [float(loss) for _, loss in rows]
        for path, rows in runs.items()})
dist.destroy_process_group()
