"""The cases of test_context_parallel.py, run by every process of a launch. Not a test by itself.

Every rank computes the whole batch by itself with attn_implementation="encke", and compares.
"""

from __future__ import annotations

import copy
import ctypes
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import encke.distributed
import encke.transformers  # noqa: F401
from transformers import DynamicCache
from transformers_models import causal_pair

torch.set_num_threads(1)
TOKENS = 22
SHARDINGS = ["zigzag", "contiguous", "striped"]


def batches():
    """Whole batches: plain, packed alike and differently, padded left and right."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 61, (3, TOKENS), generator=generator)
    yield "plain", dict(input_ids=ids, labels=ids)
    for name, packing in (("packed", [(9, 1, 12)] * 3), ("mixed", [(22,), (3, 19), (9, 1, 12)])):
        positions = torch.stack([torch.cat([torch.arange(n) for n in of]) for of in packing])
        labels = ids.masked_fill(positions == 0, -100)
        yield name, dict(input_ids=ids, labels=labels, position_ids=positions)
    at, lengths = torch.arange(TOKENS), torch.tensor([[22], [13], [4]])
    for name, mask in (("right", at < lengths), ("left", at >= TOKENS - lengths)):
        # A padded row would predict the token after it.
        after_padding = torch.nn.functional.pad(~mask, (1, 0))[:, :-1]
        labels = ids.masked_fill(~mask | after_padding, -100)
        yield name, dict(input_ids=ids, labels=labels, attention_mask=mask.long())


def of_one_process(model, batch):
    """The loss and the gradients of the whole batch."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    found = {name: of.grad.clone() for name, of in model.named_parameters() if of.grad is not None}
    return loss.detach(), found


def compare(model, wanted, loss, summed=True, tolerance=1e-9):
    expected, gradients = wanted
    torch.testing.assert_close(loss.detach(), expected, rtol=tolerance, atol=tolerance)
    for name, parameter in model.named_parameters():
        if name not in gradients:
            continue
        found = parameter.grad.clone()
        if summed:
            dist.all_reduce(found)
        torch.testing.assert_close(found, gradients[name], rtol=tolerance, atol=tolerance)


def losses_and_gradients():
    """Every kind of batch and model, with gradients added up."""
    for name in ("llama", "gemma3", "gpt-oss", "deepseek-v3", "llama4"):
        _, whole = causal_pair(name)
        model = copy.deepcopy(whole)
        # Losses of transformers are computed in float32, whose sums depend on the shards.
        for sharding, (kind, batch) in zip(SHARDINGS * 2, batches()):
            wanted = of_one_process(whole, batch)
            model.zero_grad()
            with encke.distributed.context_parallel(
                sharding=sharding, model=model, gradients="sum"
            ):
                loss = model(**batch).loss
                loss.backward()
            compare(model, wanted, loss, tolerance=2e-6)
            assert loss.item() > 1.0, (name, kind)


def without_a_model():
    """Batches and losses by hand; logits are those of the rows."""
    _, whole = causal_pair("mistral")
    model = copy.deepcopy(whole)
    model.set_attn_implementation("encke_ring")
    batch = dict(batches())["mixed"]
    expected = whole(**batch, use_cache=False)
    with encke.distributed.context_parallel() as context:
        found = model(**context.shard(batch))
        torch.testing.assert_close(
            found.logits, context.rows(expected.logits), rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(context.loss(found.loss), expected.loss, rtol=1e-6, atol=1e-6)
    try:
        model(**batch)
    except RuntimeError as error:
        assert "context_parallel" in str(error)
    else:
        raise AssertionError("attn_implementation='encke_ring' ran without a ring")


def wrapped():
    """Averaged gradients of DistributedDataParallel, with checkpointing and accumulation."""
    _, whole = causal_pair("gemma3")
    first, second = (dict(batches())[kind] for kind in ("packed", "left"))
    of_first, of_second = of_one_process(whole, first), of_one_process(whole, second)
    both = {name: of_first[1][name] + of_second[1][name] for name in of_first[1]}
    model = copy.deepcopy(whole)
    model.train()
    model.activation_checkpointing_enable()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    with encke.distributed.context_parallel(model=parallel):
        with parallel.no_sync():
            parallel(**first).loss.backward()
        loss = parallel(**second).loss
        loss.backward()
    compare(model, (of_second[0], both), loss, summed=False, tolerance=2e-6)


def fully_sharded():
    """FSDP2 on a mesh of data and context: each data rank has a batch of its own."""
    if dist.get_world_size() != 4:
        return "skipped: with 4 processes"
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    _, whole = causal_pair("llama")
    given = [dict(batches())[kind] for kind in ("plain", "packed")]
    wanted = [of_one_process(whole, batch) for batch in given]
    model = copy.deepcopy(whole)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh._flatten("all"))
    fully_shard(model, mesh=mesh["all"])
    mine = mesh.get_local_rank("data")
    with encke.distributed.context_parallel(mesh["context"].get_group(), model=model):
        loss = model(**given[mine]).loss
        loss.backward()
    torch.testing.assert_close(loss.detach(), wanted[mine][0], rtol=2e-6, atol=2e-6)
    for name, parameter in model.named_parameters():
        mean = (wanted[0][1][name] + wanted[1][1][name]) / 2
        torch.testing.assert_close(parameter.grad.full_tensor(), mean, rtol=2e-6, atol=2e-6)


def mixed_precision():
    """Autocast: the ring computes in bfloat16."""
    _, whole = causal_pair("llama", torch.float32)
    model = copy.deepcopy(whole)
    batch = dict(batches())["packed"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(**batch, use_cache=False).loss
        with encke.distributed.context_parallel(model=model):
            found = model(**batch).loss
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def compiled():
    """torch.compile breaks no graph: of the cuts, of the model with its ring, and of the loss; the
    same graphs serve all packings of a shape. On all ranks, and on a ring of one."""
    if dist.get_world_size() != 2:
        return "skipped: with 2 processes"
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    long = "ENCKE_LONG" in os.environ
    backend = "inductor" if long else "aot_eager"
    # Windows and sinks in both kinds of layers; chunks.
    cases = [("gpt-oss", ("mixed", "packed"), None), ("llama4", ("mixed",), alone)]
    cases += [("gemma3", ("left",), None), ("llama4", ("packed",), None)] if long else []
    for name, kinds, group in cases:
        _, whole = causal_pair(name)
        model = copy.deepcopy(whole)
        # The default loops over experts that tokens have chosen, which no graph can.
        model.config._experts_implementation = "batched_mm"
        counter = CompileCounterWithBackend(backend)
        ring = encke.distributed.context_parallel(group, model=model, gradients="sum")
        with ring as context:
            graph = torch.compile(model, backend=counter, fullgraph=True)
            made = []
            for kind in kinds:
                batch = dict(batches())[kind]
                wanted = of_one_process(whole, batch)
                model.zero_grad()
                loss = graph(**batch).loss
                loss.backward()
                compare(model, wanted, loss, summed=context.size > 1, tolerance=2e-6)
                made.append(counter.frame_count)
        assert made[0] == made[-1], (name, made)
        torch._dynamo.reset()
    return backend


def peak_memory():
    """The most memory of a training step of transformers' Trainer falls with the number of
    processes that share a sequence: a ring of one, of two and of all, by each process's resident
    size."""
    if dist.get_world_size() != 4:
        return "skipped: with 4 processes"
    try:
        import accelerate  # noqa: F401
    except ImportError:
        return "skipped: accelerate is not installed"
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return "skipped: the peak of a process cannot be reset here"
    # Memory of this size is returned as soon as it is freed: sizes are those of living tensors.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    rank = dist.get_rank()
    alone = [dist.new_group([of]) for of in range(4)][rank]
    two = [dist.new_group([of, of + 1]) for of in (0, 2)][rank // 2]
    peaks = [peak_of_a_step(group) for group in (alone, two, dist.group.WORLD)]
    every = [None] * 4
    dist.all_gather_object(every, peaks)
    one, half, quarter = (max(of) / 2**20 for of in zip(*every))
    figures = f"at most {one:.0f}, {half:.0f} and {quarter:.0f} MiB on 1, 2 and 4 processes"
    # Of half and a quarter, as the activations are; the parameters are small here.
    assert one > 20 and half < 0.7 * one and quarter < 0.7 * half, figures
    return figures


def peak_of_a_step(group):
    """The bytes that the second training step takes above those before it."""
    import tempfile

    import transformers

    tokens, document = 8192, 512
    torch.manual_seed(2)
    model, _ = causal_pair("mistral", torch.float32)
    positions = torch.arange(document).repeat(tokens // document)
    ids = torch.randint(3, 61, (tokens,))
    example = dict(input_ids=ids, labels=ids, position_ids=positions)
    steps = Peaks()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=1, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo", logging_steps=100,
            ddp_find_unused_parameters=True,
        )
        trainer = transformers.Trainer(
            copy.deepcopy(model), arguments, train_dataset=[example] * 8, callbacks=[steps.callback]
        )
        with encke.distributed.context_parallel(group, model=trainer.model):
            trainer.train()
    return steps.taken[-1]


class Peaks:
    """The most memory of each training step, above that at its beginning."""

    def __init__(self):
        import transformers

        self.taken, peaks = [], self

        class Callback(transformers.TrainerCallback):
            def on_step_begin(self, *_, **__):
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")
                peaks.before = resident("VmRSS")

            def on_step_end(self, *_, **__):
                peaks.taken.append(resident("VmHWM") - peaks.before)

        self.callback = Callback()


def resident(name):
    """A size of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def refusals():
    _, whole = causal_pair("llama")
    model = copy.deepcopy(whole)
    ids = torch.full((1, dist.get_world_size() - 1), 5)
    for batch, words in (
        (dict(input_ids=ids), "every rank needs some"),
        (dict(input_ids=ids, decoder_input_ids=ids), "one sequence"),
        (dict(input_ids=torch.full((1, 22), 5), output_attentions=True), "output_attentions"),
        (dict(input_ids=ids, past_key_values=DynamicCache()), "caches are not sharded"),
    ):
        with encke.distributed.context_parallel(model=model):
            try:
                model(**batch)
            except ValueError as error:
                assert words in str(error), error
            else:
                raise AssertionError(words)
    with encke.distributed.context_parallel(model=model):
        try:
            model.generate(torch.full((1, 22), 5), max_new_tokens=2)
        except ValueError as error:
            assert "caches are not sharded" in str(error), error
        else:
            raise AssertionError("generate ran on shards")


def mixers():
    """Models whose tokens also meet outside of attention: a state space, and convolutions."""
    import transformers

    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    config = transformers.Lfm2Config(
        **sizes, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    config._attn_implementation = "encke_ring"
    batch = dict(input_ids=torch.full((1, 22), 5))
    try:
        with encke.distributed.context_parallel(model=mamba):
            mamba(**batch)
    except ValueError as error:
        assert "Mamba" in str(error) and "mixes tokens" in str(error), error
    else:
        raise AssertionError("a state space ran on shards")
    model = transformers.Lfm2ForCausalLM(config)
    with encke.distributed.context_parallel() as context:
        try:
            model(**context.shard(batch))
        except ValueError as error:
            assert "layer 0 (conv) mixes tokens" in str(error), error
        else:
            raise AssertionError("convolutions ran on shards")


CASES = [losses_and_gradients, without_a_model, wrapped, fully_sharded, mixed_precision]
CASES += [compiled, peak_memory, refusals, mixers]

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    for case in CASES:
        if len(sys.argv) > 1 and case.__name__ not in sys.argv:
            continue
        begin = time.monotonic()
        message = case()
        if dist.get_rank() == 0:
            print(f"{case.__name__} {time.monotonic() - begin:.1f} s {message or ''}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
