"""NCCL inside captured graphs, by the acceptance script: on one GPU, and on all there are."""

import json
import os
import subprocess
import sys

import pytest
from helpers.repository import ROOT

SCRIPT = "benchmarks/several_gpus"
CASES = ("one", "tensor", "expert", "mixture", "buckets", "heads")


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """Where the script writes its figures."""
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


def run_script(ranks, *arguments, seconds=280):
    """What the script printed; every process of it has exited by then."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), SCRIPT,
        *arguments,
    ]  # fmt: skip
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment, check=False,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.gpu
def test_one_rank_replays_nccl_and_its_process_exits_with_the_graphs_open():
    assert "1 rank, nccl, cuda:0: replays equal eager" in run_script(1, "one")


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.parametrize("what", CASES)
def test_all_gpus_of_a_machine_do_what_one_does(what):
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    assert f"{count} rank" in run_script(count, what, "--small")


@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_the_script_runs_without_a_gpu_too(what, results, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "2 rank" in run_script(2, what, "--small", "--timeout", "60")
    written = json.loads((results / f"several_gpus_{what}_2.json").read_text())
    assert written["figures"]
    assert written["problems_by_rank"] == [[], []]
    assert written["meaningless"]
    assert (what == "one") or written["notes"]


RECORDED = ROOT / "benchmarks/results/h200-x2"


def recorded(what):
    """The figures of two GPUs, kept with the code; nothing was wrong on either rank."""
    written = json.loads((RECORDED / f"several_gpus_{what}_2.json").read_text())
    assert (written["driver"], written["backend"], written["ranks"]) == ("cuda", "nccl", 2)
    assert "meaningless" not in written
    assert written["problems_by_rank"] == [[], []]
    assert len(written["commit"]) == 40
    return written["figures"]


def test_two_gpus_decoded_the_tokens_of_one():
    figures = recorded("tensor")
    in_float32 = {name: each["equal"] for name, each in figures.items() if "float32" in name}
    assert len(in_float32) == 5
    assert all(in_float32.values())
    ways = {name.partition(": ")[2] for name in figures}
    assert {
        "one GPU, captured",
        "ranks, captured, agreed every 1",
        "ranks, torch's own capture",
    } <= ways
    assert all(each["tokens_per_second"] > 0 for each in figures.values())


def test_two_gpus_did_the_steps_of_one_with_boundary_updates_on_both():
    figures = recorded("expert")
    assert figures["steps"] == 2000
    assert max(figures["difference_by_rank"]) < 1e-5
    first, second = figures["kinds_by_rank"]
    assert first == second
    assert first["update"] >= 100
    assert first["replay"] > 1500
