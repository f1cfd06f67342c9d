"""transformers' Trainer on sequences that several processes share, with the same losses on any
number of them: packed documents, windows, sinks, accumulated gradients. It needs accelerate.

    torchrun --standalone --nproc-per-node=1 trainer.py --model gpt-oss
    torchrun --standalone --nproc-per-node=4 trainer.py --model gpt-oss
"""
import argparse, tempfile
import torch, torch.distributed as dist, transformers
import encke.distributed
from tiny_models import MODELS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", choices=MODELS, default="llama")
parser.add_argument("--tokens", type=int, default=96)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()


class SameBatches(transformers.Trainer):
    """All ranks of a ring get the same batches; the usual loader would give each its own."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset, self.args.per_device_train_batch_size,
            collate_fn=self.data_collator)


def example(generator):
    """Two counting sequences, one after the other."""
    first = torch.randint(1, options.tokens, (), generator=generator).item()
    starts = torch.randint(61, (2,), generator=generator)
    lengths = (first, options.tokens - first)
    ids = torch.cat([3 + (s + torch.arange(n)) % 61 for s, n in zip(starts, lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return dict(input_ids=ids, position_ids=positions, labels=ids.masked_fill(positions == 0, -100))


torch.manual_seed(0)  # Every process makes the same model and the same examples.
model = transformers.AutoModelForCausalLM.from_config(MODELS[options.model]())
generator = torch.Generator().manual_seed(1)
arguments = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=options.steps, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant",
    logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    ddp_backend="gloo", ddp_find_unused_parameters=True)
trainer = SameBatches(model, arguments, train_dataset=[example(generator) for _ in range(80)])
if not dist.is_initialized():  # One process alone.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with encke.distributed.context_parallel(model=model):
    trainer.train()
if dist.get_rank() == 0:
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"{entry['step']},{entry['loss']:.7f}")
dist.destroy_process_group()
