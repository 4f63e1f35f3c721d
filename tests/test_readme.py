"""The README's example runs as it stands there, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.timeout(300)
def test_the_example_trains_on_two_ranks(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 25
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(text) for text in re.findall(r"rank \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert all(loss < 0.7 for loss in losses), losses
