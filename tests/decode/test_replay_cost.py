"""What a replay of a captured step costs the host: calls are counted, not timed."""

from __future__ import annotations

import pytest
from helpers.isolated import run_script

# in a process of its own: coverage and debuggers trace every line of this one
_COUNT = """
import sys, tracemalloc
import torch
from helpers.decode_functions import LAYERS, HEADS, POSITIONS, VOCABULARY, WIDTH, TinyModel
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.driver.emulated import EmulatedDriver

driver = EmulatedDriver()
model = TinyModel().eval()
cache = StaticKVCache(LAYERS, 1, HEADS, POSITIONS, WIDTH // HEADS, torch.float32, "cpu")

def step(tokens, position_ids, attention_mask, cache):
    return model(tokens, position_ids, attention_mask, cache)

runner = CUDAGraphAR(step, cache, vocabulary=VOCABULARY, driver=driver)
runner.capture(torch.tensor([[1, 2, 3]]))

def bound():
    return None

driver.bind_launch = lambda executable, stream: bound
runner.executable._unbind()
token = TOKEN
launches = runner.replay
launches()
tracemalloc.start()
launches(token)
before = tracemalloc.get_traced_memory()[0]
tracemalloc.reset_peak()
launches(token)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()

calls = []
def note(frame, event, argument):
    if event == "call":
        calls.append(frame.f_code.co_name)

sys.setprofile(note)
launches(token)
sys.setprofile(None)
print(peak - before, *calls)
"""


@pytest.mark.parametrize("token", ["None", "5"])
def test_a_replay_is_one_launch_and_a_look_at_the_current_stream(token: str) -> None:
    done = run_script(_COUNT.replace("TOKEN\n", f"{token}\n"))
    assert done.returncode == 0, done.stderr
    allocated, *calls = done.stdout.split()
    assert calls.count("bound") == 1
    if token == "None":
        assert calls[:4] == ["replay", "launch", "launch_there", "current_stream"]
        assert calls[-1] == "bound"
        assert len(calls) <= 8, calls
        assert int(allocated) <= 200, "the number of held tokens, and no more that lasts"
    else:  # a token that is given is checked and written first: the count sees what is more
        assert "_replay_forced" in calls
        assert len(calls) > 20
