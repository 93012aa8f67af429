"""What ranks do in the tests of models whose heads and experts are spread."""

from __future__ import annotations

import torch
from helpers.rank_decode import MASK, NEGATIVE, NEW, PROMPT, RAGGED, quiet
from helpers.rank_steps import told
from helpers.ranks import die

from graphcore.decode import CUDAGraphAR, Guidance, Sampling
from graphcore.parallel import (
    ExpertParallelAR,
    ExpertParallelBuckets,
    Ranks,
    TensorParallelAR,
    TensorParallelBuckets,
    load_sharded,
    spread_experts,
)

EXPERTS, SCALE, LIMIT = 8, 2.0, 2.0
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "num_experts_per_tok": 2, "initializer_range": 0.2,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LIKE_QWEN = {"intermediate_size": 48, "moe_intermediate_size": 32}


def model_of(kind, **changed):
    """A tiny mixture of random weights."""
    import transformers

    configs = {
        "Qwen3Moe": {"num_experts": EXPERTS, "norm_topk_prob": True, **LIKE_QWEN},
        "Mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 32},
        "Qwen2Moe": {
            "num_experts": EXPERTS, "shared_expert_intermediate_size": 32, **LIKE_QWEN,
        },
        "Glm4Moe": {
            "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, **LIKE_QWEN,
        },
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **configs[kind], **changed})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.set_experts_implementation("batched_mm")
    return model


def save_mixture(path, kind="Qwen3Moe", **changed):
    """Saved, and what one process gives: in float32 by replays, in float64 eagerly."""
    quiet()
    model = model_of(kind, **changed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("gate.weight"):  # far from ties
                each.mul_(3)
    model.save_pretrained(path)
    prompt, found = torch.tensor(PROMPT), {}
    with CUDAGraphAR(model, max_seq_len=32) as runner:
        found["greedy"] = runner.generate(prompt, NEW).tolist()
    drawn = {"sampling": Sampling(temperature=1.5)}
    with CUDAGraphAR(model, max_seq_len=32, **drawn) as runner:
        found["drawn"] = runner.generate(prompt, NEW, seed=7).tolist()
    with CUDAGraphAR(model, max_seq_len=32, batch_size=2) as runner:
        found["ragged"] = ragged(runner)
    with CUDAGraphAR(model, max_seq_len=32, guidance=Guidance(SCALE)) as runner:
        found["guided"] = guided(runner)
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found["exactly"] = model.double().generate(prompt, **greedy).tolist()
    return found


def ragged(runner):
    mask = torch.tensor(MASK)
    return runner.generate(torch.tensor(RAGGED), NEW, attention_mask=mask).tolist()


def guided(runner):
    negative = torch.tensor(NEGATIVE)
    return runner.generate(torch.tensor(PROMPT), NEW, negative_input_ids=negative).tolist()


def begin(path, slots=3, seconds=30.0, **options):
    """Ranks, and a model whose heads and experts are spread over them."""
    quiet()
    ranks = Ranks.join(timeout_seconds=seconds)
    model = load_sharded(path, ranks, dtype=torch.float32, whole_experts=True)
    return ranks, spread_experts(model, ranks, slots, **options)


def decode(path, slots):
    """All ranks decode one conversation; each computes its heads and its experts."""
    ranks, handle = begin(path, slots)
    model, prompt, found = handle.model, torch.tensor(PROMPT), {}
    with handle:
        found["experts"] = handle.experts_here, handle.shares_rows
        with TensorParallelAR(model, ranks=ranks, max_seq_len=32) as runner:
            found["greedy"] = runner.generate(prompt, NEW).tolist()
            found["again"] = runner.generate(prompt, NEW).tolist()
            found["streamed"] = [int(each) for each in runner.stream(prompt, NEW)]
            found["heads"] = runner.cache.layers[0].keys.shape[1]
            nodes = [str(each) for each in runner.graph.snapshot().nodes]
            found["exchanges"] = sum("alltoall" in each for each in nodes)
            found["sums"] = sum("allreduce" in each for each in nodes)
            found["captures"] = runner.captures
            found["without"] = without(ranks, handle, runner)
            found["after"] = runner.generate(prompt, NEW).tolist()
        with TensorParallelAR(model, ranks=ranks, max_seq_len=32, capture=False) as runner:
            found["eager"] = runner.generate(prompt, NEW).tolist()
        drawn = {"sampling": Sampling(temperature=1.5), "agree_every": 4}
        with TensorParallelAR(model, ranks=ranks, max_seq_len=32, **drawn) as runner:
            found["drawn"] = runner.generate(prompt, NEW, seed=7).tolist()
        totals = handle.totals().values()
        found["totals"] = [(each.routes, each.faults) for each in totals]
        found["hits"] = 0 < handle.hit_rate <= 1
        found["faults"] = handle.faults()
    ranks.close()
    return found


def without(ranks, handle, runner):
    """A control: what is decoded where the experts of the last rank contribute nothing."""
    ones = [each for layer in handle.layers.values() for each in layer._ones.values()]
    for each in ones:
        each.fill_(ranks.rank != ranks.size - 1)
    found = runner.generate(torch.tensor(PROMPT), NEW).tolist()
    for each in ones:
        each.fill_(1)
    return found


def decode_batches(path):
    """Ragged rows, guidance and buckets; then the model put back and spread once more."""
    ranks, handle = begin(path, slots=EXPERTS // 2)
    model, prompt, found = handle.model, torch.tensor(PROMPT), {}
    with handle:
        with TensorParallelAR(model, ranks=ranks, max_seq_len=32, batch_size=2) as runner:
            found["ragged"] = ragged(runner)
        with TensorParallelAR(
            model, ranks=ranks, max_seq_len=32, guidance=Guidance(SCALE)
        ) as runner:
            found["guided"] = guided(runner)
        with TensorParallelBuckets(model, (8, 16), ranks=ranks, progress=False) as buckets:
            grown = buckets.generate(prompt, NEW, grow=True)
            found["grown"] = grown.ids.tolist(), [str(each) for each in grown.path]
        found["faults"] = handle.faults()
        layers = list(handle.layers)
    experts = model.get_submodule(layers[-1])
    found["put back"] = tuple(experts.down_proj.shape), experts.num_experts
    found["part"] = tuple(experts.down_proj.to_local().shape)
    with (
        spread_experts(model, ranks, 2) as handle,
        TensorParallelAR(model, ranks=ranks, max_seq_len=32) as runner,
    ):
        found["again"] = runner.generate(prompt, NEW).tolist()
    ranks.close()
    return found


def decode_kind(path, slots):
    """The tokens of one more kind of mixture, and how its shared experts lie."""
    ranks, handle = begin(path, slots)
    shared = {
        str(tuple(each.to_local().shape) if hasattr(each, "to_local") else "whole")
        for name, each in handle.model.named_parameters()
        if "shared_expert" in name and name.endswith("up_proj.weight")
    }
    with handle, TensorParallelAR(handle.model, ranks=ranks, max_seq_len=32) as runner:
        found = runner.generate(torch.tensor(PROMPT), NEW).tolist()
        faults = handle.faults()
    ranks.close()
    return found, sorted(shared), faults


def step_by_reuse(path):
    """Layers as a step of GraphReuse over rows that all ranks have; held to one process alone."""
    ranks, handle = begin(path, slots=EXPERTS // 2)
    alone = model_from(path)
    x, kinds = torch.zeros(1, 2, SIZES["hidden_size"]), []
    out = torch.zeros_like(x)

    @torch.no_grad()
    def of(model):
        return model.model(inputs_embeds=x, use_cache=False).last_hidden_state

    with handle, handle.reuse() as reuse:
        step = handle.step(
            "layers",
            lambda: out.copy_(of(handle.model)),
            tensors={"x": x, "out": out},
            rows=2,
        )
        for number in range(4):
            draw = torch.Generator().manual_seed(number)
            x.copy_(torch.randn(x.shape, generator=draw))
            out.fill_(float("nan"))
            kinds.append(reuse.run(step).kind.value)
            assert torch.allclose(out, of(alone), rtol=1e-4, atol=1e-5), number
        rows = step.rows
        group = handle.manifest().groups[0]
    ranks.close()
    return kinds, rows, (group.first_expert, group.experts, group.router_size)


def model_from(path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).eval()
    model.set_experts_implementation("batched_mm")
    return model


def decode_with_parts_of_each(path):
    """A mixture as its plan has it: a part of every expert on each rank, and no slots."""
    quiet()
    ranks = Ranks.join(timeout_seconds=30)
    model = load_sharded(path, ranks, dtype=torch.float32)
    with TensorParallelAR(model, ranks=ranks, max_seq_len=32) as runner:
        found = runner.generate(torch.tensor(PROMPT), NEW).tolist()
    refused = told(lambda: spread_experts(model, ranks, 2))[:2]
    ranks.close()
    return found, refused


def refuse(path, dense):
    """What is refused on all ranks, and that they go on afterwards."""
    quiet()
    ranks = Ranks.join(timeout_seconds=30)
    odd, prompt, found = ranks.rank == 1, torch.tensor(PROMPT), {}
    found["dense"] = told(lambda: load_sharded(dense, ranks, whole_experts=True))
    model = load_sharded(path, ranks, dtype=torch.float32, whole_experts=True)

    def runner_of(given=model, **options):
        return TensorParallelAR(given, ranks=ranks, max_seq_len=16, **options)

    rule = {"model.layers.*.mlp.experts.down_proj": "rowwise"}
    found["plan"] = told(lambda: load_sharded(path, ranks, whole_experts=True, tp_plan=rule))
    found["not spread"] = told(runner_of)
    found["buckets not spread"] = told(lambda: TensorParallelBuckets(model, (8,), ranks=ranks))
    found["capacity"] = told(lambda: spread_experts(model, ranks, 2, capacity=0.5 + 0.5 * odd))
    found["device"] = told(lambda: spread_experts(model, ranks, 2, device="cpu"))
    found["slots"] = told(lambda: spread_experts(model, ranks, 2 + odd))
    found["too many slots"] = told(lambda: spread_experts(model, ranks, EXPERTS))
    whole = model_from(path)
    with spread_experts(whole, ranks, 2):
        found["own rows"] = told(lambda: runner_of(whole))
    with spread_experts(model, ranks, 2) as handle:
        found["twice"] = told(lambda: spread_experts(model, ranks, 2))
        found["own prompts"] = told(lambda: ExpertParallelAR(handle, max_seq_len=16))
        found["own buckets"] = told(lambda: ExpertParallelBuckets(handle, (8,)))
        found["compile"] = told(lambda: runner_of(compile=odd))
        with runner_of() as runner:
            found["prompt"] = told(lambda: runner.generate(prompt + odd, 4))
            found["one launch"] = told(lambda: runner.generate_in_one_launch(prompt, 4))
            after = runner.generate(prompt, NEW).tolist()
            if odd:
                handle.restore()
            found["restored on one"] = told(lambda: runner.generate(prompt, 4))
    ranks.close()
    return {name: each[:2] for name, each in found.items()}, after


def not_divided(path):
    quiet()
    ranks = Ranks.join(timeout_seconds=30)
    found = told(lambda: load_sharded(path, ranks, whole_experts=True))[:2]
    ranks.close()
    return found


def fail_while_decoding(path):
    """A launch on rank 1 raises; the others are told, within gloo's patience."""
    ranks, handle = begin(path)
    prompt = torch.tensor(PROMPT)
    with handle, TensorParallelAR(handle.model, ranks=ranks, max_seq_len=32) as runner:
        runner.capture(prompt)
        runner.replay()
        if ranks.rank == 1:

            def broken():
                raise RuntimeError("broken on purpose")

            runner._launch = broken
        found = told(runner.replay)
    ranks.close()
    return found


def die_while_decoding(path):
    ranks, handle = begin(path, seconds=LIMIT)
    prompt = torch.tensor(PROMPT)
    runner = TensorParallelAR(handle.model, ranks=ranks, max_seq_len=32)
    runner.capture(prompt)
    runner.replay()
    if ranks.rank == 1:
        die()
    found = told(runner.replay)
    runner.close()
    ranks.close()
    return found


def add_up(bad):
    """Rows times their experts' numbers, weighted, of rows that all ranks have."""
    from graphcore.parallel.expert_sum import ExpertSum

    ranks = Ranks.join(timeout_seconds=30)
    made = ExpertSum(ranks.group, 8, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, generator=draw)
    ids = torch.rand(3, 8, generator=draw).topk(2).indices.to(torch.int32)
    if bad:
        ids[1, 0] = bad
    weights = torch.rand(3, 2, generator=draw)
    received, kept = made.dispatch(x, ids)
    expert = received.ids + ranks.rank * made.local_experts
    is_zero = not received.rows[~kept.is_here].any().item()
    results = received.rows * (expert + 1)
    results[~kept.is_here] = float("nan")  # of an expert that a row did not choose
    out = made.combine(results, kept, weights)
    factor = ((ids + 1) * weights).sum(1, keepdim=True)
    totals = made.totals()
    ranks.close()
    return (
        torch.allclose(out, x * factor), not out.any().item(), is_zero, totals.faults,
        totals.routes, int(kept.is_here.sum()),
    )  # fmt: skip
