"""Trains a tiny model of transformers on sequences that several processes share, with the same loss
curve on any number of them. Documents are packed; windows, sinks and grouped heads are those of the
model.

    python context_parallel.py --model gpt-oss
    torchrun --standalone --nproc-per-node=4 context_parallel.py --model gpt-oss
"""
import argparse, os, resource
import torch, torch.distributed as dist, transformers
import encke.distributed
from tiny_models import MODELS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", choices=MODELS, default="llama")
parser.add_argument("--tokens", type=int, default=200)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sharding", default="zigzag")
parser.add_argument("--checkpointing", action="store_true", help="recompute layers in backward")
options = parser.parse_args()

dist.init_process_group("gloo") if "RANK" in os.environ else dist.init_process_group(
    "gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)  # Every process makes the same model and draws the same batches.
model = transformers.AutoModelForCausalLM.from_config(MODELS[options.model]())
if options.checkpointing:
    model.activation_checkpointing_enable()
model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)

with encke.distributed.context_parallel(sharding=options.sharding, model=model):
    for step in range(options.steps):
        # Counting sequences, of other lengths in every step, one after the other.
        lengths = torch.randint(1, options.tokens // 3, (3,)).tolist()
        lengths.append(options.tokens - sum(lengths))
        ids = torch.cat([3 + (torch.randint(61, ()) + torch.arange(n)) % 61 for n in lengths])
        labels = ids.clone()
        labels[[0, *torch.tensor(lengths).cumsum(0)[:-1].tolist()]] = -100
        positions = torch.cat([torch.arange(n) for n in lengths])
        loss = model(input_ids=ids[None], labels=labels[None], position_ids=positions[None]).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if dist.get_rank() == 0:
            print(f"{step},{loss.item():.7f}", flush=True)
if dist.get_rank() == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"# {dist.get_world_size()} processes, at most {peak / 1024:.0f} MiB each")
dist.destroy_process_group()
