"""Ranks for tests: processes over gloo, forked from one server that has imported everything.

The store they meet at lives in the test's own process, so that any of them may be killed.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_PRELOADED = (
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "graphcore.decode.runner",
    "graphcore.moe.models.accelerating",
    "helpers.ranks",
)


@dataclass(frozen=True)
class Answer:
    """What one rank came to: its result, or its error as (type, text); neither where it died."""

    result: Any = None
    error: tuple[str, str] | None = None
    seconds: float = 0.0
    exit_code: int | None = 0


@functools.cache
def _processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def run_ranks(
    count: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 90.0,
    patience: float = 60.0,
    may_fail: bool = False,
    dead: Collection[int] = (),
) -> list[Answer]:
    """Runs ``function(*args)`` on ``count`` ranks with a gloo process group.

    Args:
        count: The world's size.
        function: Of a module that can be imported.
        args: For it.
        patience: Seconds that gloo waits in a collective.
        seconds: After which a rank that has not answered fails the test: nothing may hang.
        may_fail: Whether an error is an answer; else it fails the test.
        dead: Ranks that are to die before they answer.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = _processes()
    ranks = []
    for rank in range(count):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_be_a_rank,
            args=(rank, count, store.port, patience, writer, function, args),
            daemon=True,
        )
        process.start()
        writer.close()
        ranks.append((process, reader))
    answers = _answers(ranks, time.monotonic() + seconds)
    for rank, answer in enumerate(answers):
        assert (answer.exit_code != 0) == (rank in dead), f"rank {rank}: {answer}"
        if not may_fail and rank not in dead:
            assert answer.error is None, f"rank {rank}: {answer.error[1]}"
    return answers


def _answers(ranks: list[Any], deadline: float) -> list[Answer]:
    answers = []
    try:
        for number, (process, reader) in enumerate(ranks):
            answer = None
            if not reader.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {number} hangs")
            try:
                answer = reader.recv()
            except EOFError:
                answer = Answer()
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {number} does not exit: {answer}"
            answers.append(Answer(**{**vars(answer), "exit_code": process.exitcode}))
        return answers
    finally:
        for process, reader in ranks:
            process.kill()
            process.join()
            reader.close()


def _be_a_rank(
    rank: int,
    count: int,
    port: int,
    patience: float,
    writer: Any,
    function: Callable[..., Any],
    args: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(count),
        GRAPHCORE_DRIVER="emulated",
    )
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    limit = timedelta(seconds=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
    begun = time.monotonic()
    try:
        answer = Answer(function(*args), None, time.monotonic() - begun)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        answer = Answer(None, (type(error).__name__, text), time.monotonic() - begun)
    writer.send(answer)
    writer.close()
    # multiprocessing ends its children without them
    atexit._run_exitfuncs()


def die() -> None:
    """Ends this process at once, as a crash or the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)
