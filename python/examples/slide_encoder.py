"""A slide encoder in the shape of prov-gigapath's, with Encke's attention: tiles to one vector.

    python slide_encoder.py --tiles 2000 --heat-map heat.png
    python slide_encoder.py --tiles 45681 --layers 12 --width 768 --device cuda
    torchrun --nproc-per-node 4 slide_encoder.py --tiles 2000

Weights are random. With --code FOLDER the encoder is prov-gigapath's own, unmodified, from a
checkout of it (the folder that contains ``torchscale``); otherwise a small one with the same
layers. Under torchrun the tiles are divided among the processes, and the result is that of one.
"""

import argparse
import os
import resource
import struct
import sys
import time
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import encke.distributed as ring
from encke.compat.torchscale import patch

SEGMENTS, RATES = [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]


class DilatedAttention(nn.Module):
    """The parameters and settings of torchscale's module; Encke's patch computes it."""

    def __init__(self, width, heads):
        super().__init__()
        self.args = SimpleNamespace(segment_length=SEGMENTS, dilated_ratio=RATES)
        self.num_heads, self.dropout, self.xpos = heads, 0.0, None
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.inner_attn_ln = nn.LayerNorm(width)

    def gathering(self):
        raise NotImplementedError("attention is computed by Encke: call patch(model)")

    scattering = forward = gathering


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.self_attn = DilatedAttention(width, heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.LayerNorm(4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(y, y, y)[0]
        return x + self.ffn(self.final_layer_norm(x))


class Encoder(nn.Module):
    def __init__(self, width, layers, heads=16):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, src_tokens=None, token_embeddings=None):
        x = token_embeddings
        for layer in self.layers:
            x = layer(x)
        return dict(encoder_out=self.layer_norm(x))


def their_encoder(folder, width, layers):
    """prov-gigapath's own encoder."""
    sys.path.insert(0, folder)
    from torchscale.model import LongNet, LongNetConfig

    LongNetConfig.LongNet_example = dict(
        LongNetConfig.LongNet_12_layers_768_dim,
        encoder_layers=layers,
        encoder_embed_dim=width,
        encoder_ffn_embed_dim=4 * width,
    )
    return LongNet.make_longnet_from_name(
        "LongNet_example", drop_path_rate=0.0, dropout=0.0, segment_length=str(SEGMENTS)
    )


def draw(path, weights, side):
    """Writes weights of tiles in a square as a PNG: white for none, red for the largest."""
    scaled = (255 * (1 - weights / weights.max().clamp_min(1e-30))).to(torch.uint8).tolist()
    pixel, rows = 4, []
    for y in range(side):
        line = scaled[y * side : (y + 1) * side]
        line += [255] * (side - len(line))
        packed = b"".join(bytes((255, level, level)) * pixel for level in line)
        rows += [b"\0" + packed] * pixel

    def chunk(kind, data):
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    size = struct.pack(">IIBBBBB", side * pixel, side * pixel, 8, 2, 0, 0, 0)
    png = [chunk(b"IHDR", size), chunk(b"IDAT", zlib.compress(b"".join(rows))), chunk(b"IEND", b"")]
    with open(path + ".part", "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + b"".join(png))
    os.replace(path + ".part", path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 16, the heads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--half", action="store_true", help="float16 under autocast (cuda)")
    parser.add_argument("--code", help="the folder of prov-gigapath that contains torchscale")
    parser.add_argument("--heat-map", help="a PNG of the CLS token's attention in the last layer")
    given = parser.parse_args()

    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    make = Encoder if given.code is None else lambda *sizes: their_encoder(given.code, *sizes)
    model = make(given.width, given.layers).to(given.device).eval()
    patched = patch(model, sharding="contiguous" if several else None)
    # Tiles are random here; a CLS token comes first.
    tokens = torch.randn(1, given.tiles + 1, given.width)
    mine = (ring.shard(tokens) if several else tokens).to(given.device)

    inputs = {}
    last, attention = list(patched.modules.items())[-1]
    attention.register_forward_pre_hook(lambda _, called: inputs.update({last: called[0]}))
    begin = time.perf_counter()
    cast = torch.autocast("cuda", torch.float16, enabled=given.half)
    with torch.no_grad(), cast:
        out = model(src_tokens=None, token_embeddings=mine)["encoder_out"].float()
    if given.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    out = ring.unshard(out) if several else out
    if not several or dist.get_rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if given.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{given.tiles} tiles, {given.layers} layers of width {given.width}: "
              f"{seconds:.2f} s, {peak:.2f} GiB at most")
        print("embedding", " ".join(f"{x:+.5f}" for x in out[0, 0, :6].tolist()))
    if given.heat_map is not None:
        if several:
            parser.error("--heat-map is for one process")
        rows = patched.attention_rows(last, inputs[last], [0])
        side = int(given.tiles**0.5 + 0.999)
        draw(given.heat_map, rows[0, 0, :, 1:].mean(0), side)
        print("wrote", given.heat_map)
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
