"""Another process that has only the folder makes the same error of the call that failed, and of no other call."""

import subprocess
import sys

import torch

PROGRAM = """
import torch
from yobx_flatten import RecordedCalls

calls = RecordedCalls.load("production")
(failed,) = calls.failed
table = torch.nn.Embedding(20, 4)
print(failed.inputs["ids"].tolist(), [call.index for call in calls])
table(failed.inputs["ids"])
"""
done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
assert done.returncode == 1
assert done.stderr.rstrip().endswith("IndexError: index out of range in self")
assert done.stdout.startswith(str(torch.tensor([[4, 25]]).tolist()))
