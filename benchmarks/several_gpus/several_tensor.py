"""Tensor-parallel decode of a Llama of 1B's shape: tokens of one GPU, and tokens per second."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from several_outcome import Outcome
from transformers import LlamaConfig, LlamaForCausalLM

from graphcore.decode import CUDAGraphAR
from graphcore.parallel import TensorParallelAR, load_sharded

_ROOM = 32


def run(ranks: Any, *, small: bool, steps: int) -> Outcome:
    """Float32 tokens equal one GPU's and eager ones; lines of a table of bfloat16 and float32."""
    count = steps or (8 if small else 128)
    outcome = Outcome()
    for dtype in (torch.float32, torch.bfloat16):
        _of_dtype(ranks, dtype, count, outcome, small=small)
    return outcome


def _config(small: bool) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 32768, "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
    }  # fmt: skip
    if small:
        sizes |= {
            "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
        }  # fmt: skip
    return LlamaConfig(
        **sizes, max_position_embeddings=4096, eos_token_id=None,
        initializer_range=0.2 if small else 0.05,
    )  # fmt: skip


def _of_dtype(ranks: Any, dtype: Any, count: int, outcome: Outcome, *, small: bool) -> None:
    whole = _whole(ranks, dtype, small=small)
    model = parts_of(ranks, whole, dtype)
    prompt = torch.tensor([[1, 17, 42, 5, 9, 60, 33, 2]], device=ranks.device)
    found: dict[str, tuple[list[int], float]] = {}
    with CUDAGraphAR(whole, max_seq_len=count + _ROOM) as runner:
        found["one GPU, captured"] = _timed(ranks, runner, prompt, count)
    del whole
    with TensorParallelAR(model, ranks=ranks, max_seq_len=count + _ROOM, capture=False) as runner:
        found["ranks, eager"] = _timed(ranks, runner, prompt, count)
    for every in (1, 16):
        with TensorParallelAR(
            model, ranks=ranks, max_seq_len=count + _ROOM, agree_every=every
        ) as runner:
            name = f"ranks, captured, agreed every {every}"
            found[name] = _timed(ranks, runner, prompt, count)
    if ranks.device.type == "cuda":
        found["ranks, torch's own capture"] = _torch_capture(ranks, model, prompt, count)
    first = found["one GPU, captured"][0]
    kind = str(dtype).removeprefix("torch.")
    outcome.lines.append(f"Llama, {kind}, {count} tokens, {ranks.size} ranks")
    for name, (ids, seconds) in found.items():
        is_equal = ids == first
        if dtype is torch.float32:
            outcome.expect(is_equal, f"{name}: expected the tokens of one GPU {first}, got {ids}")
        rate, words = count / seconds, "equal" if is_equal else "other"
        outcome.lines.append(f"  {name}: {rate:.1f} tokens/s, {words} tokens")
        outcome.figures[f"{kind}: {name}"] = {
            "tokens_per_second": round(rate, 2), "equal": is_equal
        }  # fmt: skip


def _whole(ranks: Any, dtype: Any, *, small: bool) -> Any:
    torch.manual_seed(4321)
    with ranks.device:
        model = LlamaForCausalLM(_config(small)).eval()
    return model.to(dtype)


def parts_of(ranks: Any, whole: Any, dtype: Any, **options: Any) -> Any:
    """Each rank's part, by way of files that rank 0 writes for all of one machine."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        if ranks.rank == 0:
            path = Path(folder) / "model"
            whole.config.architectures = [type(whole).__name__]
            whole.config.save_pretrained(path)
            tensors = {name: each.cpu() for name, each in whole.state_dict().items()}
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
        path = Path(ranks.agree("saved", value=f"{folder}/model").values[0])
        model = load_sharded(path, ranks, dtype=dtype, **options)
    return model.to(ranks.device)


def _timed(ranks: Any, runner: Any, prompt: Any, count: int) -> tuple[list[int], float]:
    for _ in range(2):  # the second prompt of a runner still costs 70 ms more, once
        runner.generate(prompt, 4)
    runner.driver.synchronize()
    ranks.agree("timing")
    begun = time.perf_counter()
    ids = runner.generate(prompt, count)[0, prompt.shape[1] :].tolist()
    return ids, time.perf_counter() - begun


def _torch_capture(ranks: Any, model: Any, prompt: Any, count: int) -> tuple[list[int], float]:
    """The same step in ``torch.cuda.CUDAGraph``, replayed without asking anybody."""
    with TensorParallelAR(model, ranks=ranks, max_seq_len=count + _ROOM, capture=False) as runner:
        runner.capture(prompt)
        step, cache = runner._step, runner.cache
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                step.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            step.run()
        cache.reset()
        runner.capture(prompt)
        ids = []
        torch.cuda.synchronize()
        ranks.agree("timing torch")
        begun = time.perf_counter()
        for _ in range(count):
            graph.replay()
            ids.append(step.token.clone())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        graph.reset()  # before the communicator that it captured
    return [int(each) for each in ids], seconds
