"""What ranks do in the tests of experts that are spread over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from helpers.rank_steps import told
from helpers.ranks import die

from graphcore.decode import CUDAGraphAR, Sampling
from graphcore.errors import CaptureError
from graphcore.moe import Way
from graphcore.parallel import ExpertParallelAR, Ranks, spread_experts
from graphcore.parallel.expert_exchange import ExpertExchange
from graphcore.parallel.rank_manifests import RankManifests

EXPERTS, HIDDEN, SLOTS = 16, 64, 4
LIMIT = 2.0


def make_model(experts=EXPERTS):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=HIDDEN, head_dim=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=experts, num_experts_per_tok=2, norm_topk_prob=True,
        moe_intermediate_size=32, intermediate_size=48, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation("batched_mm")
    return model


class Rows:
    """The layers of a model over static rows of this rank; the output has two places."""

    def __init__(self, handle, rows):
        self.handle, self.rows = handle, rows
        self.x = torch.zeros(1, rows, HIDDEN)
        self.places = [torch.zeros_like(self.x) for _ in range(2)]
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        lowest = torch.finfo(torch.float32).min
        self.mask = torch.zeros(1, 1, rows, rows).masked_fill(hidden, lowest)
        tensors = {"x": self.x, "out": self.places[0]}
        self.step = handle.step("layers", self.run, tensors=tensors, rows=rows)

    def run(self):
        self.places[0].copy_(self.of(self.handle.model))

    @torch.no_grad()
    def of(self, model):
        out = model.model(inputs_embeds=self.x, attention_mask=self.mask, use_cache=False)
        return out.last_hidden_state

    def move(self):
        self.places.reverse()
        self.step.set("out", self.places[0])

    def fill(self, seed):
        draw = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self.x.copy_(torch.randn(self.x.shape, generator=draw))
        for each in self.places:
            each.fill_(float("nan"))

    def is_right(self, alone):
        return torch.allclose(self.places[0], self.of(alone), rtol=1e-4, atol=1e-5)


def begin(slots=SLOTS, seconds=30.0, **options):
    ranks = Ranks.join(timeout_seconds=seconds)
    return ranks, spread_experts(make_model(), ranks, slots, **options)


def take_turns(steps, overlap):
    """Decode with prompts in between and boundaries; each step is held to one process alone."""
    ranks, handle = begin()
    alone = make_model()
    found: dict[str, Any] = {"kinds": [], "wrong": []}
    with handle, handle.reuse(decode_boundary_overlap=overlap) as reuse:
        decode, prompt = Rows(handle, 1), Rows(handle, 5)
        for number in range(steps):
            if number % 5 == 4:
                decode.move()
            decode.fill(number)
            result = reuse.run(decode.step)
            found["kinds"].append(result.kind.value)
            if not decode.is_right(alone):
                found["wrong"].append(number)
            if number % 4 == 3:
                prompt.fill(number)
                beside = reuse.run(prompt.step, prompt_rows=prompt.step.rows)
                found["staged"] = beside.way is Way.STAGED
                if not prompt.is_right(alone):
                    found["wrong"].append(f"prompt {number}")
        found["key"] = (result.key.rank, result.key.ranks)
        found["report"] = str(reuse.report())
        manifest = reuse.manifests.current.manifest
        group = manifest.groups[0]
        found["manifest"] = (
            manifest.rank, manifest.ranks, group.first_expert, group.experts, group.router_size,
        )  # fmt: skip
        found["faults"] = handle.faults()
        totals = next(iter(handle.totals().values()))
        found["sent"] = len(totals.routes), sum(totals.routes), totals.faults
        found["hits"] = 0 < handle.hit_rate <= 1
        found["shown"] = repr(handle), repr(next(iter(handle.layers.values())))
        decode.fill(1)
    found["restored"] = torch.equal(decode.of(handle.model), decode.of(alone))
    handle.restore()
    found["after"] = repr(handle)
    ranks.close()
    return found


def change_on_one(overlap):
    """The output of rank 1 alone moves: all ranks do the same."""
    ranks, handle = begin(slots=8)
    alone, kinds, reasons = make_model(), [], []
    with handle, handle.reuse(decode_boundary_overlap=overlap) as reuse:
        decode = Rows(handle, 1)
        for number in range(7):
            if number == 3 and ranks.rank == 1:
                decode.move()
            decode.fill(number)
            result = reuse.run(decode.step)
            kinds.append(result.kind.value)
            reasons.append(f"{result.reason.value}: {result.detail}")
            assert decode.is_right(alone), number
    ranks.close()
    return kinds, reasons[3]


def not_captured_on_one():
    ranks, handle = begin(slots=8)
    alone, kinds, details = make_model(), [], []
    with handle, handle.reuse() as reuse:
        decode = Rows(handle, 1)
        capture = decode.step.capture

        def broken(*args, **options):
            raise CaptureError("broken on purpose")

        for number in range(6):
            if ranks.rank == 1:
                decode.step.capture = broken if number == 1 else capture
            if number == 3:  # what kept it is over, and said to be
                decode.step.changed()
            decode.fill(number)
            result = reuse.run(decode.step)
            kinds.append(result.kind.value)
            details.append(result.detail)
            assert decode.is_right(alone), number
    ranks.close()
    return kinds, details[1]


def fail_on_one():
    ranks, handle = begin(slots=8)
    with handle, handle.reuse() as reuse:
        decode = Rows(handle, 1)
        decode.fill(0)
        if ranks.rank == 1:
            first = told(lambda: reuse.run(decode.step, prompt_rows=99))
        else:
            first = told(lambda: reuse.run(decode.step))
        kinds = [reuse.run(decode.step).kind.value for _ in range(3)]
    ranks.close()
    return first[:2], kinds


def die_between_steps():
    ranks, handle = begin(slots=8, seconds=LIMIT)
    reuse = handle.reuse()
    decode = Rows(handle, 1)
    for number in range(3):
        decode.fill(number)
        reuse.run(decode.step)
    if ranks.rank == 1:
        die()
    found = told(lambda: reuse.run(decode.step))
    reuse.close()
    ranks.close()
    return found


def refuse():
    ranks = Ranks.join(timeout_seconds=30)
    model, odd = make_model(), ranks.rank == 1
    found = {
        "capacity": told(lambda: spread_experts(model, ranks, 4, capacity=1.5)),
        "slots": told(lambda: spread_experts(model, ranks, 4 + odd)),
        "too many slots": told(lambda: spread_experts(model, ranks, 9)),
        "experts": told(lambda: spread_experts(make_model(7), ranks, 2)),
        "kind": told(lambda: spread_experts(torch.nn.Linear(2, 2) if odd else model, ranks, 4)),
    }
    with spread_experts(model, ranks, 4) as handle:
        found["rows"] = told(lambda: Rows(handle, 1 + odd))
        found["options"] = told(lambda: handle.reuse(decode_boundary_overlap=int(odd)))
        layer = next(iter(handle.layers.values()))
        block = handle._found[0].block
        block.experts = torch.nn.Identity()
        found["restore"] = told(handle.restore)
        block.experts = layer
        found["copy"] = told(lambda: __import__("copy").copy(layer))
        found["saved"] = told(model.state_dict)
        found["loaded"] = told(lambda: model.load_state_dict({}))
    ranks.close()
    return {name: each[:2] for name, each in found.items()}


# ---- the exchange -------------------------------------------------------------------------------


def exchange(capacity, bad):
    """Rows times their experts' numbers, weighted: what any placement must give."""
    ranks = Ranks.join(timeout_seconds=30)
    made = ExpertExchange(ranks.group, 8, capacity, torch.device("cpu"))
    draw = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(3, 4, generator=draw)
    ids = torch.rand(3, 8, generator=draw).topk(2).indices.to(torch.int32)
    if bad and ranks.rank == 0:
        ids[1, 0] = -1
    weights = torch.rand(3, 2, generator=draw)
    received, sent = made.dispatch(x, ids)
    expert = received.ids + ranks.rank * made.local_experts
    out = made.combine(received.rows * (expert + 1), sent, weights)
    factor = ((ids + 1) * weights).sum(1, keepdim=True)
    totals = made.totals()
    ranks.close()
    return (
        torch.allclose(out, x * factor), not out.any().item(), totals.faults, sum(totals.routes),
        tuple(received.rows.shape),
    )  # fmt: skip


# ---- manifests ----------------------------------------------------------------------------------


def manifests():
    ranks, handle = begin()
    registry = RankManifests(ranks)
    good = handle.manifest()
    odd = ranks.rank == 1
    groups = good.groups
    found = {"good": registry.replace(good)}
    worse = replace(groups[0], slots=99 if odd else groups[0].slots)
    found["rejected"] = registry.replace(replace(good, groups=(worse, *groups[1:])))
    twice = replace(groups[0], first_expert=0)
    found["twice"] = registry.replace(replace(good, groups=(twice, *groups[1:])))

    def allocate(_):
        if odd:
            raise MemoryError("no room")

    found["no room"] = registry.replace(good, allocate=allocate)

    def breaks(_):
        if odd:
            raise KeyError("broken")

    found["broken"] = told(lambda: registry.replace(good, allocate=breaks))[:2]
    found["not one"] = told(lambda: registry.replace(3 if odd else good))[:2]
    found["again"] = registry.replace(good)
    held = registry.current.manifest == good, registry.current.generation
    handle.restore()
    ranks.close()
    return {name: str(each) for name, each in found.items()}, held


def busy_manifest():
    import threading

    ranks, handle = begin()
    registry = RankManifests(ranks)
    registry.replace(handle.manifest())
    names = (handle.manifest().groups[0].name,)
    entered, leave = threading.Event(), threading.Event()

    def use():
        entered_group = registry.ownership.enter("other", names, registry.current.generation)
        entered.set()
        leave.wait(30)
        registry.ownership.leave(entered_group)

    thread = threading.Thread(target=use)
    if ranks.rank == 1:
        thread.start()
        entered.wait(30)
    first = str(registry.replace(handle.manifest(), timeout=0.2))
    leave.set()
    if ranks.rank == 1:
        thread.join()
    second = str(registry.replace(handle.manifest(), timeout=5))
    handle.restore()
    ranks.close()
    return first, second


# ---- a whole model decoded through CUDAGraphAR ---------------------------------------------------

PROMPTS = (
    ([[1, 17, 42, 5], [3, 60, 9, 2]], None),
    ([[7, 8], [50, 4]], None),
    ([[11, 20, 31, 40, 50, 60], [0, 0, 0, 5, 6, 7]], [[1] * 6, [0, 0, 0, 1, 1, 1]]),
    ([[13], [90]], None),
)
NEW = 6


def prompt_of(rank):
    ids, mask = PROMPTS[rank]
    return torch.tensor(ids), None if mask is None else torch.tensor(mask)


def decode_alone(rank):
    """What one process gives for a rank's prompt: in float32 by replays, in float64 eagerly."""
    ids, mask = prompt_of(rank)
    found = {}
    model = make_model()
    with CUDAGraphAR(model, max_seq_len=32, batch_size=2) as runner:
        found["greedy"] = runner.generate(ids, NEW, attention_mask=mask).tolist()
    drawn = {"sampling": Sampling(temperature=1.0 + rank)}
    with CUDAGraphAR(model, max_seq_len=32, batch_size=2, **drawn) as runner:
        found["drawn"] = runner.generate(ids, NEW, attention_mask=mask, seed=rank).tolist()
    exact = make_model().double()
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found["exactly"] = exact.generate(ids, attention_mask=mask, **greedy).tolist()
    return found


def cut(ids, given, endings):
    """``ids`` as a generation that ends with these gives them: pads behind, cut where all end."""
    rows = []
    for row in ids:
        new = row[given:]
        ends = [place for place, token in enumerate(new) if token in endings]
        stop = ends[0] + 1 if ends else len(new)
        rows.append(row[: given + stop])
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows]


def decode_with(runner, rank, **options):
    ids, mask = prompt_of(rank)
    return runner.generate(ids, NEW, attention_mask=mask, **options).tolist()


def decode_mixture(slots, endings):
    """A conversation on each rank, of another length; through the experts of all."""
    ranks, handle = begin(slots=slots)
    rank, found = ranks.rank, {}
    ids, mask = prompt_of(rank)
    with handle:
        with ExpertParallelAR(handle, max_seq_len=32, batch_size=2) as runner:
            found["greedy"] = decode_with(runner, rank)
            found["length"] = runner.cache.seen_tokens
            found["again"] = decode_with(runner, rank)
            found["captures"] = runner.captures
            nodes = [str(each) for each in runner.graph.snapshot().nodes]
            found["exchanges"] = sum("alltoall" in each for each in nodes)
            found["kept"] = [each for each in runner.graph.owners.labels() if "commun" in each]
            stream = runner.stream(ids, NEW, attention_mask=mask)
            found["streamed"] = torch.stack(list(stream), dim=1).tolist()
            ended = decode_with(runner, rank, eos_token_id=endings, pad_token_id=0, poll_every=1)
            found["ended"], found["held"] = ended, runner.cache.seen_tokens
            found["late"] = decode_with(
                runner, rank, eos_token_id=endings, pad_token_id=0, poll_every=4
            )
            found["held late"] = runner.cache.seen_tokens
            runner.capture(ids, attention_mask=mask)
            forced = runner.replay(torch.tensor([rank, 5]))
            found["forced"] = forced.tolist()
            # a control: replays to which the owners of experts send zeros give other tokens
            ones = [each for layer in handle.layers.values() for each in layer._ones.values()]
            for each in ones:
                each.zero_()
            found["dropped"] = decode_with(runner, rank)
            for each in ones:
                each.fill_(1)
        with ExpertParallelAR(
            handle, max_seq_len=32, batch_size=2, sampling=Sampling(temperature=1.0 + rank),
            agree_every=3, prefill_chunk_size=2,
        ) as runner:  # fmt: skip
            found["drawn"] = decode_with(runner, rank, seed=rank)
        with ExpertParallelAR(handle, max_seq_len=32, batch_size=2, capture=False) as runner:
            found["eager"] = decode_with(runner, rank)
        found["faults"] = handle.faults()
    ranks.close()
    return found


def refuse_mixture():
    """What ranks cannot decode together, and that they go on afterwards."""
    ranks, handle = begin(slots=8)
    odd, found = ranks.rank == 1, {}
    ids = torch.tensor([[1, 17, 42, 5]])

    def made(**options):
        return told(lambda: ExpertParallelAR(handle, max_seq_len=16, **options))

    found["handle"] = told(lambda: ExpertParallelAR(handle.model))
    found["pieces"] = made(prefill_chunk_size=2, capture_prefill=odd)
    found["rows"] = made(batch_size=1 + odd)
    found["compile"] = made(compile=odd)
    with ExpertParallelAR(handle, max_seq_len=16) as runner:
        found["room"] = told(lambda: runner.generate(ids.repeat(1, 1 + 2 * odd), 6))
        found["too long for one"] = told(lambda: runner.generate(ids, 6 + 30 * odd))
        found["new tokens"] = told(lambda: runner.generate(ids, 5 + odd))
        found["batch"] = told(lambda: runner.generate(ids.expand(1 + odd, 4), 4))
        found["one launch"] = told(lambda: runner.generate_in_one_launch(ids, 4))
        after = runner.generate(ids, NEW).tolist()
        if odd:
            norm = handle.model.model.norm
            norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
        again = runner.generate(ids, NEW).tolist()
        captures = runner.captures
        if odd:
            handle.restore()
        found["restored"] = told(lambda: runner.generate(ids, 4))
    handle.restore()
    ranks.close()
    return {name: each[:2] for name, each in found.items()}, after, again, captures


def die_while_decoding():
    ranks, handle = begin(slots=8, seconds=LIMIT)
    ids = torch.tensor([[1, 17, 42, 5]])
    runner = ExpertParallelAR(handle, max_seq_len=16)
    runner.generate(ids, 2)
    runner.capture(ids)
    runner.replay()
    if ranks.rank == 1:
        die()
    found = told(runner.replay)
    runner.close()
    ranks.close()
    return found
