"""Layers of experts in slots whose routers are scripted, with guesses for the layers behind them.

What a router chooses, and what is guessed, is copied on the device within the step, as a router
would write it: an order that is missing shows as a wrong result.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from typing import Any

import numpy
from graphcore_kernels import RouteStatus, moe_grouped_gemm
from helpers.slot_pools import EXPERTS, ROWS, TOP_K, Model

from graphcore.driver import Driver
from graphcore.driver.records import CopyOperand, MemcpyParams
from graphcore.moe import SiblingPrefetch, SlotOracle
from graphcore.resources.buffer import Buffer

LAYERS = ("layers.0", "layers.1", "layers.2")
AHEAD = 2
"""Each layer guesses for so many behind it."""
_WORDS = ROWS * TOP_K


class GuessingModel(Model):
    """A model whose steps may prefetch; :meth:`step` launches one, :meth:`check` judges it.

    ``without`` of a run names waits that are left out, for tests that must then fail.
    """

    def __init__(self, driver: Driver, slots: int = 6, *, prefetches: bool = True) -> None:
        super().__init__(driver, LAYERS, slots)
        self.draw = numpy.random.default_rng(3)
        shape = (ROWS, TOP_K)
        self.script = {name: Buffer.allocate(shape, "int32", driver=driver) for name in LAYERS}
        self.guessed = {
            name: [Buffer.allocate(shape, "int32", driver=driver) for _ in range(min(at, AHEAD))]
            for at, name in enumerate(LAYERS) if at
        }  # fmt: skip
        self.guess_script = {
            name: [Buffer.allocate(shape, "int32", driver=driver) for _ in guesses]
            for name, guesses in self.guessed.items()
        }
        for ids in (*self.ids.values(), *itertools.chain(*self.guessed.values())):
            ids.write(0)
        self.x = Buffer.allocate((ROWS, 4), "float32", driver=driver)
        self.x_values = self.draw.standard_normal((ROWS, 4)).astype(numpy.float32)
        self.x.write(self.x_values)
        self.error = Buffer.allocate(1, "int32", driver=driver)
        self.error.write(0)
        self.outs = {
            name: Buffer.allocate((_WORDS, 8), "float32", driver=driver) for name in LAYERS
        }
        self.products = {name: self._product(name) for name in LAYERS}
        self.prefetch = SiblingPrefetch(self.pool, self.guessed) if prefetches else None
        self.oracles = {name: SlotOracle(EXPERTS, slots) for name in LAYERS}
        self.prefetched = dict.fromkeys(LAYERS, 0)

    def _product(self, name: str) -> Any:
        given = self.admissions[name].outputs
        return moe_grouped_gemm.plan(
            self.x, self.pool[name].rows["gate_up"], given["offsets"], given["slots"],
            self.outs[name], gather=given["gather"], error=self.error, driver=self.driver,
        )  # fmt: skip

    # ---- a step --------------------------------------------------------------------------------

    def script_step(self, draw: random.Random, accuracy: float = 0.7) -> dict[str, list[int]]:
        """Writes what the routers of the next step will choose, and their guesses."""
        self.chosen, self.guesses = {}, {}
        for name in LAYERS:
            self.chosen[name] = [draw.randrange(EXPERTS) for _ in range(_WORDS)]
            self.script[name].write(numpy.reshape(self.chosen[name], (ROWS, TOP_K)))
            self.guesses[name] = []
            for to in self.guess_script.get(name, []):
                guess = [expert if draw.random() < accuracy else draw.randrange(EXPERTS)
                         for expert in self.chosen[name]]  # fmt: skip
                self.guesses[name].append(guess)
                to.write(numpy.reshape(guess, (ROWS, TOP_K)))
            self.outs[name].write(float("nan"))
        return self.chosen

    def run(self, stream: Any, without: Collection[str] = ()) -> None:
        """One step on ``stream``: eagerly, or into its capture."""
        if self.prefetch is None:
            for name in LAYERS:
                self._layer(name, stream)
            return
        with self.prefetch.step(stream) as step:
            for at, name in enumerate(LAYERS):
                self._router(name, stream)
                for ahead, later in enumerate(LAYERS[at + 1 : at + 1 + AHEAD]):
                    index = min(LAYERS.index(later), AHEAD) - 1 - ahead
                    self._copy(self.guess_script[later][index], self.guessed[later][index], stream)
                    step.hand_off(later, stream, index=index)
                if "await_stage" not in without:
                    step.await_stage(name, stream)
                self.admissions[name].launch(stream)
                self.products[name].launch(stream)
                step.computed(name, stream)

    def _layer(self, name: str, stream: Any) -> None:
        self._router(name, stream)
        self.admissions[name].launch(stream)
        self.products[name].launch(stream)

    def _router(self, name: str, stream: Any) -> None:
        self._copy(self.script[name], self.ids[name], stream)

    def _copy(self, source: Buffer, to: Buffer, stream: Any) -> None:
        params = MemcpyParams(CopyOperand(to.address), CopyOperand(source.address), source.nbytes)
        self.driver.copy(params, stream.handle)

    # ---- what must have come of it -------------------------------------------------------------

    def check_step(self) -> None:
        """Residents and totals are the oracle's, and every product is that of its own expert."""
        for at, name in enumerate(LAYERS):
            oracle = self.oracles[name]
            if self.prefetch is not None:
                # the earliest layer's guess comes first
                for index in range(min(at, AHEAD)):
                    planned = oracle.plan(self.guesses[name][index], TOP_K)
                    self.prefetched[name] += len(planned.misses)
            expected = oracle.plan(self.chosen[name], TOP_K)
            assert expected.status is RouteStatus.OK
            outcome = self.admissions[name].outcome()
            assert (outcome.status, outcome.misses) == (expected.status, len(expected.misses))
            assert self.pool.residents()[name] == oracle.residents()
            self._check_products(name)
        self.check_rows()
        assert self.error.read() == [0]

    def _check_products(self, name: str) -> None:
        chosen, weights = self.chosen[name], self.experts[name]["gate_up"]
        order = numpy.argsort(chosen, kind="stable")
        expected = [weights[chosen[route]] @ self.x_values[route // TOP_K] for route in order]
        numpy.testing.assert_allclose(self.outs[name].read(), expected, rtol=1e-5, atol=1e-6)

    def check_totals(self, steps: int) -> None:
        for at, name in enumerate(LAYERS):
            oracle, totals = self.oracles[name], self.pool.totals(name)
            guesses = steps * min(at, AHEAD) if self.prefetch is not None else 0
            assert totals.steps == steps
            assert totals.misses == oracle.misses - self.prefetched[name]
            if guesses and self.prefetch is not None:
                ahead = self.prefetch.totals(name)
                assert (ahead.guesses, ahead.routes) == (guesses, guesses * _WORDS)
                assert ahead.copied == self.prefetched[name]
                assert ahead.nbytes == ahead.copied * self.pool[name].expert_nbytes
                assert totals.hits + ahead.resident == oracle.hits
