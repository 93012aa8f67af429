"""What ranks do in the tests of tensor-parallel decoding."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
from helpers.rank_steps import told
from helpers.ranks import die

from graphcore.decode import CUDAGraphAR, Guidance, Sampling, StaticKVCache
from graphcore.errors import CaptureError, ConfigurationError
from graphcore.parallel import Ranks, TensorParallelAR, TensorParallelBuckets, load_sharded

PROMPT = [[1, 17, 42, 5]]
NEW = 8


def save_llama(path, kv_heads=4, heads=4, layers=2):
    """A tiny Llama of random weights, saved; its greedy tokens behind the prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, head_dim=16, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=96,
        eos_token_id=None, initializer_range=0.2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    with CUDAGraphAR(model, max_seq_len=32) as runner:
        greedy = runner.generate(torch.tensor(PROMPT), NEW).tolist()
    with CUDAGraphAR(model, max_seq_len=32, sampling=Sampling(temperature=1.5)) as runner:
        drawn = runner.generate(torch.tensor(PROMPT), NEW, seed=7).tolist()
    return greedy, drawn


@functools.cache
def quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def begin(path, seconds=30.0):
    quiet()
    ranks = Ranks.join(timeout_seconds=seconds)
    return ranks, load_sharded(path, ranks, dtype=torch.float32)


def decode(path):
    ranks, model = begin(path)
    prompt = torch.tensor(PROMPT)
    with TensorParallelAR(model, ranks=ranks, max_seq_len=32) as runner:
        greedy = runner.generate(prompt, NEW).tolist()
        again = runner.generate(prompt, NEW).tolist()
        streamed = [int(each) for each in runner.stream(prompt, NEW)]
        forced = runner.replay(5).tolist()
        heads = runner.cache.layers[0].keys.shape[1]
        captures = runner.captures
        kept = [each for each in runner.graph.owners.labels() if "communicator" in each]
    with TensorParallelAR(
        model, ranks=ranks, max_seq_len=32, sampling=Sampling(temperature=1.5), agree_every=4
    ) as runner:
        drawn = runner.generate(prompt, NEW, seed=7).tolist()
        own = runner.generate(prompt, NEW).tolist()
    with TensorParallelAR(model, ranks=ranks, max_seq_len=32, capture=False) as runner:
        eager = runner.generate(prompt, NEW).tolist()
    ranks.close()
    return {
        "greedy": greedy, "again": again, "streamed": streamed, "heads": heads, "forced": forced,
        "captures": captures, "kept": len(kept), "drawn": drawn, "own": own, "eager": eager,
    }  # fmt: skip


def recapture(path):
    """Rank 1's weights move between two prompts: both capture anew."""
    ranks, model = begin(path)
    prompt = torch.tensor(PROMPT)
    with TensorParallelAR(model, ranks=ranks, max_seq_len=32) as runner:
        first = runner.generate(prompt, NEW).tolist()
        if ranks.rank == 1:
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
        second = runner.generate(prompt, NEW).tolist()
        third = runner.generate(prompt, NEW).tolist()
        captures = runner.captures
    ranks.close()
    return first, second, third, captures


def refuse(path):
    """Bad calls, each an error on all ranks, and decoding afterwards is as before."""
    ranks, model = begin(path)
    prompt = torch.tensor(PROMPT)
    found = {}
    odd = ranks.rank == ranks.size - 1
    found["options"] = told(lambda: TensorParallelAR(model, ranks=ranks, max_seq_len=32 + 8 * odd))[
        :2
    ]
    found["compile on one"] = told(
        lambda: TensorParallelAR(model, ranks=ranks, compile=odd, max_seq_len=16)
    )[:2]
    found["agree_every on one"] = told(
        lambda: TensorParallelAR(model, ranks=ranks, agree_every=0 if odd else 1, max_seq_len=16)
    )[:2]
    found["guidance"] = told(
        lambda: TensorParallelAR(
            model, ranks=ranks, guidance=Guidance(2.0) if odd else None, max_seq_len=16
        )
    )[:2]
    found["sampling"] = told(
        lambda: TensorParallelAR(
            model, ranks=ranks, sampling=Sampling(temperature=1.0 + odd), max_seq_len=16
        )
    )[:2]
    found |= other_models(ranks, model, odd)
    found["sharded"] = told(
        lambda: TensorParallelAR(torch.nn.Linear(2, 2) if odd else model, ranks=ranks)
    )[:2]
    with TensorParallelAR(model, ranks=ranks, max_seq_len=16) as runner:
        found["before"] = told(runner.replay)[:2]
        found["prompt"] = told(lambda: runner.generate(prompt + odd, NEW))[:2]
        found["room"] = told(lambda: runner.generate(prompt, 4 + 30 * odd))[:2]
        found["one launch"] = told(lambda: runner.generate_in_one_launch(prompt, 4))[:2]
        found["stream one launch"] = told(lambda: runner.stream_in_one_launch(prompt, 4))[:2]
        found["one launch on one"] = told(
            lambda: (runner.generate_in_one_launch if odd else runner.generate)(prompt, 4)
        )[:2]
        found["new tokens"] = told(lambda: runner.generate(prompt, 4 + odd))[:2]
        found["end"] = told(lambda: runner.generate(prompt, 4, eos_token_id=[5 + odd]))[:2]
        found["looks"] = told(lambda: runner.generate(prompt, 4, poll_every=1 + odd))[:2]
        found["seed"] = told(lambda: runner.generate(prompt, 4, seed=7 + odd))[:2]
        with pytest.MonkeyPatch.context() as patch:
            if odd:
                patch.setenv("GRAPHCORE_DISABLE", "1")
            found["eager on one"] = told(lambda: runner.generate(prompt, 4))[:2]
        runner.capture(prompt)
        found["forced"] = told(lambda: runner.replay(5 + odd))[:2]
        held = runner.cache.seen_tokens
        if odd:  # a captured buffer is replaced on one rank alone
            runner.cache.position = runner.cache.position.clone()
        found["stale"] = told(runner.replay)[:2]
        if odd:
            runner.cache.reset()
        else:
            runner.cache.reset()
        after = runner.generate(prompt, NEW).tolist()
    ranks.close()
    return found, after, held


def other_models(ranks, model, odd):
    """A checkpoint of the same sizes, and a configuration with another number, on one rank."""

    def refused():
        return told(lambda: TensorParallelAR(model, ranks=ranks, max_seq_len=16))[:2]

    found = {}
    weight, epsilon = model.model.norm.weight, model.config.rms_norm_eps
    with torch.no_grad():
        weight[3] += 0.5 * odd
        found["values"] = refused()
        weight[3] -= 0.5 * odd
    model.config.rms_norm_eps += 0.5 * odd
    found["config"] = refused()
    model.config.rms_norm_eps = epsilon
    return found


# ---- what a batch can be -------------------------------------------------------------------------

RAGGED = [[0, 0, 1, 17], [5, 9, 8, 2]]
MASK = [[0, 0, 1, 1], [1, 1, 1, 1]]
NEGATIVE = [[3, 60]]
SCALE = 2.0
CHOICE = Sampling(temperature=1.5, top_k=20, repetition_penalty=1.3)


def ragged_rows(runner, poll_every=16, **options):
    return runner.generate(
        torch.tensor(RAGGED), NEW, attention_mask=torch.tensor(MASK), poll_every=poll_every,
        **options,
    ).tolist()  # fmt: skip


def guided(runner):
    return runner.generate(torch.tensor(PROMPT), NEW, negative_input_ids=torch.tensor(NEGATIVE))


def batches_alone(path):
    """What one process gives, in float32 by replays; and transformers itself in float64."""
    from transformers import LlamaForCausalLM

    quiet()
    model = LlamaForCausalLM.from_pretrained(path).eval()
    found = {}
    with CUDAGraphAR(model, max_seq_len=32, batch_size=2) as runner:
        found["ragged"] = ragged_rows(runner)
    with CUDAGraphAR(model, max_seq_len=32, batch_size=2, sampling=CHOICE) as runner:
        found["drawn"] = ragged_rows(runner, seed=11)
    with CUDAGraphAR(model, max_seq_len=32, guidance=Guidance(SCALE)) as runner:
        found["guided"] = guided(runner).tolist()
        runner.guidance.scale = 1.0
        found["not guided"] = guided(runner).tolist()
    exact = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found["ragged exactly"] = exact.generate(
        torch.tensor(RAGGED), attention_mask=torch.tensor(MASK), **greedy
    ).tolist()
    found["guided exactly"] = exact.generate(
        torch.tensor(PROMPT), negative_prompt_ids=torch.tensor(NEGATIVE), guidance_scale=SCALE,
        **greedy,
    ).tolist()  # fmt: skip
    return found


def decode_batches(path):
    """Ragged rows, drawn ones and guidance over ranks."""
    ranks, model = begin(path)
    found = {}
    with TensorParallelAR(model, ranks=ranks, max_seq_len=32, batch_size=2) as runner:
        found["ragged"] = ragged_rows(runner)
    with TensorParallelAR(
        model, ranks=ranks, max_seq_len=32, batch_size=2, sampling=CHOICE, agree_every=4
    ) as runner:
        found["drawn"] = ragged_rows(runner, seed=11)
        own = [ragged_rows(runner) for _ in range(2)]
    with TensorParallelAR(model, ranks=ranks, max_seq_len=32, guidance=Guidance(SCALE)) as runner:
        found["guided"] = guided(runner).tolist()
        found["captures"] = runner.captures
        odd = ranks.rank == 1
        runner.guidance.scale = 1.0 + odd
        found["scale"] = told(lambda: guided(runner))[:2]
        runner.guidance.scale = SCALE
        other = torch.tensor([[3, 60 + odd]])
        found["negative"] = told(
            lambda: runner.generate(torch.tensor(PROMPT), 4, negative_input_ids=other)
        )[:2]
        found["after"] = guided(runner).tolist()
    ranks.close()
    return found, own


def decode_in_buckets(path):
    """Buckets over ranks; what the plain runners make of a loop; captured pieces of prompts."""
    ranks, model = begin(path)
    odd, prompt = ranks.rank == 1, torch.tensor(PROMPT)
    found = {}
    with TensorParallelBuckets(model, (8, 16), (1, 2), ranks=ranks, progress=False) as buckets:
        found["captures"] = buckets.captures
        found["fits"] = tuple_of(buckets.generate(prompt, NEW))
        found["grown"] = tuple_of(buckets.generate(prompt, NEW, grow=True))
        looped = buckets.generate(prompt, NEW, one_launch=True)
        found["looped"], found["why"] = tuple_of(looped), looped.reason
        found["streamed"] = [int(each) for each in buckets.stream(prompt, NEW)]
        with pytest.raises(ConfigurationError, match="shape of input_ids: expected the same"):
            buckets.generate(prompt.expand(1 + odd, 4), NEW)
        with pytest.raises(ConfigurationError, match="grow: expected the same on all ranks"):
            buckets.generate(prompt, NEW, grow=odd)
        found["too long"] = told(lambda: buckets.generate(prompt, 90))[:2]
        found["after"] = tuple_of(buckets.generate(prompt, NEW))
    found["sizes"] = told(lambda: TensorParallelBuckets(model, (8, 16 + odd), ranks=ranks))[:2]
    found["compile"] = told(lambda: TensorParallelBuckets(model, (8,), ranks=ranks, compile=odd))[
        :2
    ]
    with CUDAGraphAR(model, max_seq_len=16) as runner:  # each rank by itself: nobody asks anybody
        found["loop"] = told(lambda: runner.generate_in_one_launch(prompt, NEW))[:2]
        found["no loop"] = runner.generate(prompt, NEW).tolist()
    pieces = {"prefill_chunk_size": 2, "capture_prefill": True}
    with TensorParallelAR(model, ranks=ranks, max_seq_len=16, **pieces) as runner:
        first = runner.generate(prompt, NEW).tolist(), runner.captures
        if odd:
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
        found["pieces"] = first, (runner.generate(prompt, NEW).tolist(), runner.captures)
    ranks.close()
    return found


def tuple_of(result):
    return result.ids.tolist(), [str(each) for each in result.path]


def refuse_options(path):
    ranks, model = begin(path)
    bad = {
        "ranks": {"ranks": 2},
        "agree_every": {"ranks": ranks, "agree_every": 0},
        "compile": {"ranks": ranks, "compile": True},
        "cache": {"ranks": ranks, "cache": 3},
    }
    found = {
        name: told(lambda given=given: TensorParallelAR(model, **given))[:2]
        for name, given in bad.items()
    }
    whisper = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    found["encoder-decoder"] = told(lambda: TensorParallelAR(whisper, ranks=ranks))[:2]
    wrong = StaticKVCache(2, 1, 4, 32, 16, torch.float32, "cpu")
    found["heads"] = told(lambda: TensorParallelAR(model, ranks=ranks, cache=wrong))[:2]
    ranks.close()
    return found


def not_divided(path):
    quiet()
    ranks = Ranks.join(timeout_seconds=30)
    found = told(lambda: load_sharded(path, ranks))[:2]
    ranks.close()
    return found


def fail_to_capture(path):
    """One rank cannot capture: none decodes, and all say why."""
    ranks, model = begin(path)
    prompt = torch.tensor(PROMPT)
    with TensorParallelAR(model, ranks=ranks, max_seq_len=32) as runner:
        if ranks.rank == 1:

            def broken():
                raise CaptureError("broken on purpose")

            runner._lane.capture = broken
        found = told(lambda: runner.generate(prompt, NEW))[:2]
        held = runner.cache.seen_tokens
    ranks.close()
    return found, held


def die_while_decoding(path):
    ranks, model = begin(path, seconds=2.0)
    prompt = torch.tensor(PROMPT)
    runner = TensorParallelAR(model, ranks=ranks, max_seq_len=32)
    runner.generate(prompt, 2)
    runner.capture(prompt)
    runner.replay()
    if ranks.rank == 1:
        die()
    found = told(runner.replay)
    runner.close()
    ranks.close()
    return found
