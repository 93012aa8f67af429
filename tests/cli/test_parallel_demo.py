"""``graphcore demo --parallel``: over ranks, held to one rank alone."""

import os
import subprocess
import sys

import pytest
from helpers import rank_demo
from helpers.ranks import run_ranks

from graphcore.cli import main


def test_the_demo_over_ranks_decodes_what_one_rank_alone_does():
    for kind in ("tensor", "expert"):
        arguments = ("--parallel", kind, "--max-new-tokens", "6")
        answers = run_ranks(2, rank_demo.demo, *arguments, seconds=200)
        assert [each.result[0] for each in answers] == [0, 0], answers
        told = answers[0].result[1]
        assert f"{kind}-parallel on 2 ranks, gloo" in answers[0].result[2]
        assert "rank 1:     equal to one rank alone" in told
        assert "1 capture" in told
        assert "us a round" in told
        assert not answers[1].result[1]  # rank 0 speaks for all


def test_tokens_that_differ_on_one_rank_are_exit_status_1_on_all():
    answers = run_ranks(2, rank_demo.differ_on_one, seconds=200)
    assert [each.result[0] for each in answers] == [1, 1]
    assert "rank 1:     DIFFERENT from one rank alone" in answers[0].result[1]


def test_a_number_of_ranks_that_divides_neither_heads_nor_experts_is_exit_status_2():
    for answer in run_ranks(3, rank_demo.divide_by_three, seconds=200):
        (tensor, _, heads), (expert, _, experts) = answer.result
        assert tensor == expert == 2
        assert "divides num_attention_heads (8), got 3" in heads
        assert "divides the 16 experts" in experts


def test_without_torchrun_the_demo_says_how_to_start_it():
    status, _, told = run_ranks(1, rank_demo.without_torchrun)[0].result
    assert status == 2
    assert "torchrun --nproc-per-node N" in told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "x.gguf"], "--model: expected none with --parallel"),
        (["--html", "x.html"], "--html: expected none with --parallel"),
        (["--max-new-tokens", "5000"], "max_new_tokens: expected at most"),
    ],
    ids=["model", "page", "tokens"],
)
def test_what_does_not_go_with_ranks_is_refused(arguments, text, capsys):
    assert main(["demo", "--parallel", "tensor", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_torchrun_starts_the_demo_and_every_process_exits():
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m",
        "graphcore.cli", "demo", "--parallel", "tensor", "--max-new-tokens", "4",
    ]  # fmt: skip
    environment = {**os.environ, "GRAPHCORE_DRIVER": "emulated", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1:     equal to one rank alone" in done.stdout
