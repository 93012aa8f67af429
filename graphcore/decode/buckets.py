"""DecodeBuckets: captured steps for several batches and capacities over one storage and one pool.

Guarantees: K and V are stored once, as large as the largest bucket; the captures share one memory
pool; the smallest bucket that fits runs. Rows that pad a batch are finished from the beginning and
write into rows of their own, which nothing reads. Not locked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from types import TracebackType
from typing import Any

import torch

from graphcore.decode import checks, prompt
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.bucket import Bucket, BucketGeneration, checked_sizes
from graphcore.decode.bucket_memory import BucketsMemory
from graphcore.decode.bucket_rows import cut, decode_on, ended_rows, padded, padded_options, sparing
from graphcore.decode.compiled_step import Compile
from graphcore.decode.ending import EosIds, cut_after_end, end_ids
from graphcore.decode.guidance import Guidance, check_guidance
from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.sampling import Sampling
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.whole_generation import decode_whole
from graphcore.driver import Driver
from graphcore.errors import CapacityError, ConfigurationError, LifecycleError
from graphcore.executable.capture_options import LegacyWork
from graphcore.executable.handles import NotCopied
from graphcore.executable.memory_report import in_words
from graphcore.interop import choose_driver
from graphcore.interop.torch import MemoryPool
from graphcore.reuse.bulk import shown

_log = logging.getLogger("graphcore")


class DecodeBuckets(NotCopied):
    """Decoding for prompts of many sizes, each by the smallest captured step that fits.

    All steps are captured at construction, the largest first, with progress shown. A prompt of 3
    rows runs in a bucket of 4: the rows that are left over repeat the last one's prompt, take pads,
    and are cut from the result; what they hold reaches no other row. One generation at a time.

    Args:
        model: A decoder-only transformers model.
        max_seq_lens: Capacities in tokens.
        batch_sizes: Rows; every batch is captured with every capacity.
        sampling: How a token is chosen; None: greedy.
        dtype: Of K and V; None: the model's.
        driver: None: the one for the model's device.
        capture: False decodes eagerly, in the same buckets.
        compile: As of :class:`CUDAGraphAR`.
        on_legacy_work: As of :class:`CUDAGraphAR`.
        prefill_chunk_size: As of :class:`CUDAGraphAR`.
        guidance: As of :class:`CUDAGraphAR`; the storage has two rows for every one of a batch.
        share_pool: Captures share one torch memory pool; False: one for each, which takes more.
        progress: A bar (tqdm's, where it is installed, else lines in the log).

    Raises:
        ConfigurationError: No sizes, one that is not a positive int or comes twice; or as of
            :class:`CUDAGraphAR`.
        CaptureError: A step cannot be captured; nothing is left.
    """

    def __init__(  # noqa: PLR0913  (each is a choice of its own)
        self,
        model: Any,
        max_seq_lens: Sequence[int],
        batch_sizes: Sequence[int] = (1,),
        *,
        sampling: Sampling | None = None,
        dtype: torch.dtype | None = None,
        driver: Driver | None = None,
        capture: bool = True,
        compile: Compile = False,  # noqa: A002  (as published)
        on_legacy_work: LegacyWork = "error",
        prefill_chunk_size: int | None = None,
        guidance: Guidance | None = None,
        share_pool: bool = True,
        progress: bool = True,
    ) -> None:
        lengths = checked_sizes("max_seq_lens", max_seq_lens)
        batches = checked_sizes("batch_sizes", batch_sizes)
        checks.check_model(model)
        if families.is_encoder_decoder(model):
            raise ConfigurationError(
                f"model: expected a decoder-only model, got {type(model).__name__}: buckets share "
                "decoder K/V only; make a runner for each encoder length, or one whose cross half "
                "has room for the longest"
            )
        checks.check_capacity(model, lengths[-1])
        check_guidance(guidance)
        branches = 1 if guidance is None else 2
        self.cache = StaticKVCache.for_model(
            model, lengths[-1], batch_size=branches * batches[-1], dtype=dtype
        )
        self.driver = choose_driver(self.cache.position) if driver is None else driver
        checks.check_driver(self.driver, self.cache.device)
        self.buckets = tuple(Bucket(*sizes) for sizes in product(batches, lengths))
        """The sizes, by batch and then by capacity."""
        self._pool = MemoryPool(self.driver.device) if share_pool else None
        self._runners: dict[Bucket, CUDAGraphAR] = {}
        self._newest: CUDAGraphAR | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            for bucket in self.buckets:
                runner = self._make_runner(
                    model,
                    self.cache.view(
                        batch_size=branches * bucket.batch_size, max_seq_len=bucket.max_seq_len
                    ),
                    sampling=sampling,
                    driver=self.driver,
                    capture=capture,
                    compile=compile,
                    on_legacy_work=on_legacy_work,
                    pool=self._pool,
                    prefill_chunk_size=prefill_chunk_size,
                    guidance=guidance,
                )
                for first in list(self._runners.values())[:1]:  # they never run at the same time
                    runner._lane.follow(first._lane)
                self._runners[bucket] = runner
            self._capture_all(progress=progress)
            undo.pop_all()

    # ---- decoding -------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        eos_token_id: EosIds = None,
        pad_token_id: int | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        poll_every: int = 16,
        grow: bool = False,
        one_launch: bool = False,
        **options: Any,
    ) -> BucketGeneration:
        """Decodes up to ``max_new_tokens`` in the smallest bucket that fits.

        Args:
            input_ids: int64 ``[rows, tokens]`` on the model's device.
            max_new_tokens: At least 1; prompt and new tokens must fit the largest bucket.
            eos_token_id: As of :meth:`CUDAGraphAR.generate`.
            pad_token_id: As of :meth:`CUDAGraphAR.generate`.
            attention_mask: As of :meth:`CUDAGraphAR.capture`.
            poll_every: As of :meth:`CUDAGraphAR.generate`.
            grow: Begin in the smallest bucket that holds the prompt and one token, and move on to
                the next larger one whenever it is full, in place: attention reads fewer slots, and
                a generation that ends early never pays for the large bucket.
            one_launch: One launch for each bucket of the way, as
                :meth:`CUDAGraphAR.generate_in_one_launch`, which the host waits for; where a step
                cannot be its body, a replay for each token, and the result says why.
            options: What else :meth:`CUDAGraphAR.generate` takes, but ``cache`` and ``keep_cache``.
                Negative prompts have one row, or as many as ``input_ids``.

        Raises:
            CapacityError: No bucket fits; names the largest. Nothing was launched.
            ConfigurationError, CaptureError, LifecycleError: As of :meth:`CUDAGraphAR.generate`.
        """
        _refuse_options(options)
        options = {**options, "attention_mask": attention_mask}
        bucket, last, room = self._choose(input_ids, max_new_tokens, options, grow=grow)
        rows, length = input_ids.shape
        spare = bucket.batch_size - rows
        runner = self._ready(bucket)
        asked = min(max_new_tokens, room)
        with sparing(runner, spare):
            whole = decode_whole(
                runner,
                padded(input_ids, spare),
                asked,
                eos_token_id,
                pad_token_id,
                one_launch=one_launch,
                poll_every=poll_every,
                **padded_options(options, rows, spare),
            )
        decoded, one_launch = whole.ids, whole.execution == "one launch"
        eos, pad = end_ids(runner._step.forward, eos_token_id, pad_token_id)
        path = [bucket]
        for larger in self._between(bucket, last):
            done = ended_rows(decoded[:, length:], eos, spare)
            has_ended = bool(done.all()) or decoded.shape[1] - length < asked
            held = self._held_where_it_goes_on(runner.cache.seen_tokens, has_ended=has_ended)
            if held is None:
                break
            runner = self._moved(runner, larger)
            path.append(larger)
            left = min(max_new_tokens - asked, larger.max_seq_len - held)
            poll = None if one_launch else poll_every
            more = decode_on(runner, left, eos, pad, done, poll)
            asked += left
            decoded = torch.cat((decoded, more), dim=1)
        _log.info("decoded %d rows in bucket %s", rows, " -> ".join(map(str, path)))
        return BucketGeneration(
            cut_after_end(decoded[:rows], length, eos),
            length,
            path[-1],
            tuple(path),
            whole.execution,
            whole.reason,
            runner.seed,
        )

    def stream(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        **options: Any,
    ) -> Iterator[torch.Tensor]:
        """As :meth:`CUDAGraphAR.stream`, int64 ``[rows]``, in the smallest bucket that fits."""
        _refuse_options(options)
        bucket, *_ = self._choose(input_ids, max_new_tokens, options, grow=False)
        rows = input_ids.shape[0]
        spare = bucket.batch_size - rows
        runner = self._ready(bucket)
        with sparing(runner, spare):
            tokens = runner.stream(
                padded(input_ids, spare), max_new_tokens, **padded_options(options, rows, spare)
            )
        return cut(tokens, rows)

    def bucket_for(self, rows: int, tokens: int) -> Bucket:
        """The smallest bucket with room for ``tokens`` (prompt and new ones) in each of ``rows``.

        Raises:
            CapacityError: There is none; names the largest.
        """
        for bucket in self.buckets:
            if bucket.batch_size >= rows and bucket.max_seq_len >= tokens:
                return bucket
        raise CapacityError(
            f"buckets: {rows} rows of {tokens} tokens fit none of them; the largest is "
            f"{self.buckets[-1]} (batch_size x max_seq_len)"
        )

    # ---- what there is --------------------------------------------------------------------------

    @property
    def captures(self) -> int:
        """Graphs that were captured."""
        return sum(runner.captures for runner in self._runners.values())

    def runner(self, bucket: Bucket) -> CUDAGraphAR:
        """The runner of a bucket; one at a time may decode."""
        self._refuse_closed("runner()")
        if bucket not in self._runners:
            raise ConfigurationError(
                f"bucket: expected one of {', '.join(map(str, self.buckets))}, got {bucket}"
            )
        return self._runners[bucket]

    def memory_report(self) -> BucketsMemory:
        """Bytes of every bucket and of what they share, measured."""
        self._refuse_closed("memory_report()")
        runners = {str(bucket): runner for bucket, runner in self._runners.items()}
        pool = None if self._pool is None else self._pool.bytes()
        return BucketsMemory.of(runners, self.cache, pool)

    def close(self) -> None:
        """Gives graphs, storage and pool back; final."""
        for runner in self._runners.values():
            runner.close()
        self._runners = {}
        self._newest = self._pool = None
        self.__dict__.pop("cache", None)

    def __enter__(self) -> DecodeBuckets:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DecodeBuckets {', '.join(map(str, self.buckets))}>"

    # ---- inside ---------------------------------------------------------------------------------

    def _make_runner(self, model: Any, cache: StaticKVCache, **options: Any) -> CUDAGraphAR:
        """The runner of one bucket, over a part of the storage."""
        return CUDAGraphAR(model, cache, **options)

    def _capture_all(self, *, progress: bool) -> None:
        """Forwards one token in each bucket, the largest first, which captures its step."""
        ordered = sorted(self._runners, key=lambda each: each.batch_size * each.max_seq_len)
        largest = self._runners[self.buckets[-1]]
        with shown(progress, len(ordered)) as bar:
            for bucket in reversed(ordered):
                runner = self._runners[bucket]
                if runner is not largest:
                    runner._step.share_logits(largest._step)
                token = torch.zeros(
                    (bucket.batch_size, 1), dtype=torch.int64, device=self.cache.device
                )
                try:
                    runner.capture(token)
                except BaseException as error:
                    error.add_note(f"while capturing the bucket {bucket}")
                    raise
                runner.cache.reset()
                if self._pool is not None:
                    bar.set_postfix_str(in_words(self._pool.bytes()))
                bar.update()

    def _choose(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        options: Mapping[str, Any],
        *,
        grow: bool,
    ) -> tuple[Bucket, Bucket, int]:
        """(the bucket to begin in, the one that holds all of it, new tokens the first holds)."""
        self._refuse_closed("generate()")
        rows, tokens = self._needed(input_ids, options)
        last = self.bucket_for(rows, tokens + prompt.check_count(max_new_tokens))
        first = self.bucket_for(rows, tokens + 1) if grow else last
        return first, last, first.max_seq_len - tokens

    def _needed(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> tuple[int, int]:
        """(rows, tokens) of a prompt; where ranks have their own: the most that any needs."""
        rows, tokens = prompt.check_ids(input_ids).shape
        negative = options.get("negative_input_ids")
        if negative is not None:  # both branches are as long as the longer of the two
            tokens = max(tokens, prompt.check_ids(negative).shape[1])
        return rows, tokens

    def _held_where_it_goes_on(self, held: int, *, has_ended: bool) -> int | None:
        """Tokens in the cache that a larger bucket goes on behind; None: the generation ends."""
        return None if has_ended else held

    def _ready(self, bucket: Bucket) -> CUDAGraphAR:
        """The bucket's runner, once the others' launches have run."""
        runner = self._runners[bucket]
        self._wait_for_newest(runner)
        return runner

    def _between(self, bucket: Bucket, last: Bucket) -> list[Bucket]:
        """The buckets a generation goes through after ``bucket``, up to ``last``."""
        return [
            each
            for each in self.buckets
            if each.batch_size == bucket.batch_size and bucket < each <= last
        ]

    def _moved(self, full: CUDAGraphAR, larger: Bucket) -> CUDAGraphAR:
        """The runner of ``larger``, which goes on where ``full`` stopped."""
        runner = self._ready(larger)
        runner._continue(full)
        return runner

    def _wait_for_newest(self, runner: CUDAGraphAR) -> None:
        """Waits for another runner's launches: graphs of one pool must not run side by side."""
        newest, self._newest = self._newest, runner
        if newest is not None and newest is not runner and newest.executable is not None:
            fence = newest.executable.fence()
            if fence is not None:
                fence.wait()

    def _refuse_closed(self, caller: str) -> None:
        if not self._runners:
            raise LifecycleError(f"{caller}: expected open buckets, they are closed")


def _refuse_options(options: dict[str, Any]) -> None:
    for name in ("cache", "keep_cache"):
        if name in options:
            raise ConfigurationError(
                f"{name}: expected none, the buckets share one cache, got {options[name]!r}"
            )
