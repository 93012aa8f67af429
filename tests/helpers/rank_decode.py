"""What ranks do in the tests of tensor-parallel decoding."""

from __future__ import annotations

import functools
import logging

import torch
from helpers.rank_steps import told
from helpers.ranks import die

from graphcore.decode import CUDAGraphAR, Sampling, StaticKVCache
from graphcore.errors import CaptureError
from graphcore.parallel import Ranks, TensorParallelAR, load_sharded

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
    found["sharded"] = told(
        lambda: TensorParallelAR(torch.nn.Linear(2, 2) if odd else model, ranks=ranks)
    )[:2]
    with TensorParallelAR(model, ranks=ranks, max_seq_len=16) as runner:
        found["before"] = told(runner.replay)[:2]
        found["prompt"] = told(lambda: runner.generate(prompt + odd, NEW))[:2]
        found["room"] = told(lambda: runner.generate(prompt, 4 + 30 * odd))[:2]
        found["one launch"] = told(lambda: runner.generate_in_one_launch(prompt, 4))[:2]
        found["stream one launch"] = told(lambda: runner.stream_in_one_launch(prompt, 4))[:2]
        runner.capture(prompt)
        if odd:  # a captured buffer is replaced on one rank alone
            runner.cache.position = runner.cache.position.clone()
        found["stale"] = told(runner.replay)[:2]
        if odd:
            runner.cache.reset()
        else:
            runner.cache.reset()
        after = runner.generate(prompt, NEW).tolist()
    ranks.close()
    return found, after


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
