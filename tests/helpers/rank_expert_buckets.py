"""What ranks do in the tests of buckets of a mixture whose experts are spread."""

from __future__ import annotations

import torch
from helpers import rank_experts
from helpers.rank_steps import told
from helpers.ranks import die

from graphcore.decode import CUDAGraphAR, Guidance, Sampling
from graphcore.errors import CaptureError
from graphcore.parallel import ExpertParallelBuckets, Ranks, spread_experts

LENGTHS, ROWS, NEW = (8, 12, 16), (1, 2), 9
SCALE = 2.0
PROMPTS = (
    ([[1, 17, 42, 5]], None),
    ([[7, 8], [50, 4]], None),
    ([[11, 20, 31], [0, 5, 6]], [[1, 1, 1], [0, 1, 1]]),
    ([[13]], None),
)
NEGATIVE = ([[3, 60]], [[9]], [[4]], [[2, 2]])


def make_mixtral(window=None):
    """A tiny Mixtral of random weights, whose layers slide over ``window`` tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, intermediate_size=32, num_local_experts=8,
        num_experts_per_tok=2, initializer_range=0.2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation("batched_mm")
    return model


def prompt_of(rank):
    ids, mask = PROMPTS[rank]
    return torch.tensor(ids), None if mask is None else torch.tensor(mask)


def decode_alone(rank):
    """What one process gives for a rank's prompt: in float32 by replays, in float64 eagerly."""
    ids, mask = prompt_of(rank)
    rows, found = ids.shape[0], {}
    model = rank_experts.make_model()
    with CUDAGraphAR(model, max_seq_len=32, batch_size=rows) as runner:
        found["greedy"] = runner.generate(ids, NEW, attention_mask=mask).tolist()
    drawn = {"sampling": Sampling(temperature=1.0 + rank)}
    with CUDAGraphAR(model, max_seq_len=32, batch_size=rows, **drawn) as runner:
        found["drawn"] = runner.generate(ids, NEW, attention_mask=mask, seed=rank).tolist()
    with CUDAGraphAR(model, max_seq_len=32, guidance=Guidance(SCALE)) as runner:
        negative = torch.tensor(NEGATIVE[rank])
        guided = runner.generate(ids[:1], NEW, negative_input_ids=negative)
        found["guided"] = guided.tolist() if mask is None else None
    with CUDAGraphAR(make_mixtral(window=5), max_seq_len=32) as runner:
        found["sliding"] = runner.generate(ids[:1], NEW).tolist()
    exact = rank_experts.make_model().double()
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found["exactly"] = exact.generate(ids, attention_mask=mask, **greedy).tolist()
    return found


def told_of(result):
    return result.ids.tolist(), [str(each) for each in result.path]


def decode(slots, endings, early, later):
    """Each rank its own prompts, of other rows and lengths; all of them in one bucket."""
    ranks, handle = rank_experts.begin(slots=slots)
    ids, mask = prompt_of(ranks.rank)
    given = {"attention_mask": mask}
    ends = {**given, "pad_token_id": 0}
    found = {}
    with handle:
        before = handle.pool.nbytes
        with ExpertParallelBuckets(handle, LENGTHS, ROWS, progress=False) as buckets:
            found["captures"] = buckets.captures
            found["slots"] = handle.pool.nbytes == before
            found["fits"] = told_of(buckets.generate(ids, NEW, **given))
            found["grown"] = told_of(buckets.generate(ids, NEW, grow=True, **given))
            for every, some_end in endings.items():
                given_ends = {**ends, "eos_token_id": some_end, "poll_every": every}
                ended = buckets.generate(ids, NEW, grow=True, **given_ends)
                found[f"ended {every}"] = told_of(ended)
            for name, all_end in (("early", early), ("later", later)):
                given_ends = {**ends, "eos_token_id": all_end}
                found[name] = told_of(
                    buckets.generate(ids, NEW, grow=True, poll_every=1, **given_ends)
                )
            looped = buckets.generate(ids, NEW, one_launch=True, grow=True, **given)
            found["looped"], found["why"] = told_of(looped), looped.reason
            found["streamed"] = torch.stack(list(buckets.stream(ids, NEW, **given)), 1).tolist()
            found["nodes"] = exchanges_of(buckets)
            # a control: owners of experts send zeros
            ones = [each for layer in handle.layers.values() for each in layer._ones.values()]
            for each in ones:
                each.zero_()
            found["dropped"] = told_of(buckets.generate(ids, NEW, grow=True, **given))
            for each in ones:
                each.fill_(1)
            found["after"] = told_of(buckets.generate(ids, NEW, **given))
            found["captures after"] = buckets.captures
            memory = buckets.memory_report()
            found["memory"] = len(memory.buckets), memory.kv_bytes
        found["closed"] = told(lambda: buckets.generate(ids, NEW))[:2]
        sampling = Sampling(temperature=1.0 + ranks.rank)
        with ExpertParallelBuckets(
            handle, LENGTHS, (2,), progress=False, sampling=sampling, agree_every=3
        ) as buckets:
            drawn = buckets.generate(ids, NEW, seed=ranks.rank, grow=True, **given)
            found["drawn"] = told_of(drawn)
        with ExpertParallelBuckets(handle, LENGTHS, ROWS, progress=False, capture=False) as buckets:
            found["eager"] = told_of(buckets.generate(ids, NEW, grow=True, **given))
        found["faults"] = handle.faults()
    ranks.close()
    return found


def exchanges_of(buckets):
    """All-to-alls of every bucket's captured step."""
    graphs = [buckets.runner(each).graph for each in buckets.buckets]
    return [sum("alltoall" in str(node) for node in graph.snapshot().nodes) for graph in graphs]


def decode_guided():
    ranks, handle = rank_experts.begin(slots=8)
    ids, _ = prompt_of(ranks.rank)
    negative = torch.tensor(NEGATIVE[ranks.rank])
    with handle, ExpertParallelBuckets(
        handle, LENGTHS, progress=False, guidance=Guidance(SCALE)
    ) as buckets:  # fmt: skip
        found = told_of(buckets.generate(ids[:1], NEW, negative_input_ids=negative, grow=True))
    ranks.close()
    return found


def decode_sliding(endings):
    """Layers that slide: a rank that has ended cannot drop what it decoded past its end."""
    ranks = Ranks.join(timeout_seconds=30)
    ids = prompt_of(ranks.rank)[0][:1]
    ends = {"eos_token_id": endings, "pad_token_id": 0}
    with (
        spread_experts(make_mixtral(window=5), ranks, 4) as handle,
        ExpertParallelBuckets(handle, LENGTHS, progress=False) as buckets,
    ):
        whole = told_of(buckets.generate(ids, NEW, grow=True))
        ended = [
            told_of(buckets.generate(ids, NEW, grow=True, poll_every=every, **ends))
            for every in (1, 16)
        ]
        after = told_of(buckets.generate(ids, NEW))
    ranks.close()
    return whole, ended, after


def refuse():
    """What is refused on all ranks, and that they go on afterwards."""
    ranks, handle = rank_experts.begin(slots=8)
    odd, found = ranks.rank == 1, {}
    ids = torch.tensor([[1, 17, 42, 5]])

    def made(lengths=(8,), rows=(1,), **options):
        return told(lambda: ExpertParallelBuckets(handle, lengths, rows, **options))

    found["handle"] = told(lambda: ExpertParallelBuckets(handle.model, (8,)))
    found["lengths"] = made((8 + odd,))
    found["rows"] = made(rows=(1 + odd,))
    found["sizes of one"] = made((8, 8) if odd else (8,))
    found["compile"] = made(compile=odd)
    found["agree_every"] = made(agree_every=0 if odd else 1)
    found["capture on one"] = made(capture=not odd)
    with ExpertParallelBuckets(handle, (8, 16), (1, 2), progress=False) as buckets:

        def tried(given=ids, count=4, **options):
            return told(lambda: buckets.generate(given, count, **options))

        found["tokens"] = tried(ids.repeat(1, 1 + 3 * odd))
        found["batch"] = tried(ids.expand(1 + 2 * odd, 4))
        found["new tokens"] = tried(count=4 + odd)
        found["grow"] = tried(grow=bool(odd))
        found["ids"] = tried(ids.float() if odd else ids)
        found["looks"] = tried(poll_every=1 + odd)
        found["ends"] = tried(eos_token_id=[5 + odd])
        found["cache"] = tried(**({"keep_cache": True} if odd else {}))
        after = told_of(buckets.generate(ids, NEW))
        if odd:
            buckets.close()
        found["closed"] = tried()
    with ExpertParallelBuckets(handle, (8,), progress=False) as buckets:
        if odd:
            handle.restore()
        found["restored"] = told(lambda: buckets.generate(ids, 4))
    found["made of restored"] = made()
    handle.restore()
    ranks.close()
    return {name: each[:2] for name, each in found.items()}, after


def fail_to_capture():
    """One rank cannot capture the second bucket: none has any."""
    ranks, handle = rank_experts.begin(slots=8)

    class Broken(ExpertParallelBuckets):
        def _make_runner(self, model, cache, **options):
            runner = super()._make_runner(model, cache, **options)
            if ranks.rank == 1 and cache.max_seq_len == 8:

                def broken():
                    raise CaptureError("broken on purpose")

                runner._lane.capture = broken
            return runner

    with handle:
        found = told(lambda: Broken(handle, (8, 16), progress=False))
    ranks.close()
    return found


def die_between_buckets():
    """Rank 1 is gone where all would move to the next bucket."""
    ranks, handle = rank_experts.begin(slots=8, seconds=rank_experts.LIMIT)
    ids = torch.tensor([[1, 17, 42, 5]])
    buckets = ExpertParallelBuckets(handle, (8, 16), progress=False)
    if ranks.rank == 1:
        buckets._held_where_it_goes_on = lambda *_, **__: die()
    found = told(lambda: buckets.generate(ids, NEW, grow=True))
    buckets.close()
    ranks.close()
    return found
