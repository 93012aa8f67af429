"""What the demo tells: a table for the terminal, and one HTML page with the graph as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphcore.driver import Driver
from graphcore.resources.attribution import attribute, notes

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Facts:
    """One run of the demo. Times in seconds or microseconds as named, sizes in bytes."""

    prompt: str
    text: str
    model: str
    driver: Driver
    equal: bool
    eager_tokens_per_second: float
    replay_tokens_per_second: float
    host_us_per_token: float
    tokens: int
    capture_seconds: float
    cache_bytes: int
    device_bytes: int

    @property
    def verdict(self) -> str:
        if self.equal:
            return f"equal: all {self.tokens} replayed tokens are the eager ones"
        return "DIFFERENT: the replayed tokens are not the eager ones"


def figures(facts: Facts, runner: Any) -> dict[str, str]:
    """Name -> value of everything measured or read, in the order it is shown."""
    graph = runner.graph
    summary = graph.snapshot().summary()
    device = facts.driver.device_info()
    unsure = " (means nothing: emulated)" if facts.driver.is_emulated else ""
    pool = sum(size for _, size in graph.private_memory())
    memory = f"K/V cache {_mib(facts.cache_bytes)}, pool of the graph {_mib(pool)}"
    if not facts.driver.is_emulated:
        memory += f", device memory taken by cache, graph and executable {_mib(facts.device_bytes)}"
    return {
        "tokens": facts.verdict,
        "model": facts.model,
        "driver": f"{facts.driver.name}, {device.name}",
        "graph": f"{sum(summary.values())} nodes: "
        + ", ".join(f"{count} {kind}" for kind, count in summary.items()),
        "captures": f"{runner.captures}, in {facts.capture_seconds:.2f} s",
        "memory": memory,
        "fingerprint": graph.fingerprint(runner.named_tensors()).digest,
        "eager": f"{facts.eager_tokens_per_second:.1f} tokens/s{unsure}",
        "replay": f"{facts.replay_tokens_per_second:.1f} tokens/s{unsure}",
        "host time": f"{facts.host_us_per_token:.1f} us a token{unsure}",
    }


def table(facts: Facts, runner: Any) -> str:
    """The figures as aligned lines."""
    rows = figures(facts, runner)
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def page(facts: Facts, runner: Any) -> str:
    """One self-contained HTML page: figures, the answer, and the graph folded by layer."""
    snapshot = runner.graph.snapshot()
    places = notes(attribute(snapshot, runner.named_tensors()))
    sections = [
        ("Decoded through this graph", f"{facts.prompt}\n\n{facts.text}"),
        ("Figures", figures(facts, runner)),
    ]
    title = f"One decode step of {facts.model.split(',')[0]}, captured"
    html: str = snapshot.drawing(places).to_html_page(title, sections)
    return html


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
