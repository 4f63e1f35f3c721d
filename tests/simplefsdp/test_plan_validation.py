"""How far predictions are off for published runs, and that every plan says so."""

from __future__ import annotations

import pytest

from simplefsdp.cli import main
from simplefsdp.planner.published import ROWS, recorded, trust_text
from simplefsdp.planner.validation import predict_rows

# Of predictions: as far as they may be off. Tokens per second are fitted to the first row alone.
MOST_OFF_TOKENS, MOST_OFF_MEMORY = 0.15, 0.10


def test_predictions_are_as_recorded_and_near_what_was_published():
    found = dict(predict_rows())
    assert list(found) == list(ROWS)
    for row, item in found.items():
        assert recorded()[row].tokens_per_s == pytest.approx(item.tokens_per_s, abs=0.51)
        assert recorded()[row].memory_gib == pytest.approx(item.memory_gib, abs=0.0051)
        assert item.tokens_per_s == pytest.approx(row.tokens_per_s, rel=MOST_OFF_TOKENS)
        assert item.memory_gib == pytest.approx(row.memory_gib, rel=MOST_OFF_MEMORY)
    assert [row for row in ROWS if row.calibrated] == [ROWS[0]]


def test_every_plan_carries_the_table(capsys):
    assert not main(
        ["plan", "--model", "tests.simplefsdp.test_plan:build", "--gpus", "8", "--hardware", "h100"]
    )
    text = capsys.readouterr().out
    assert text.endswith(f"{trust_text()}\n")
    for row in ROWS:
        (line,) = [line for line in text.splitlines() if line.startswith(row.name)]
        assert f"{row.tokens_per_s:,}" in line
        assert f"{row.memory_gib:.1f}" in line
