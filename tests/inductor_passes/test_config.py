"""PassConfig: accepted values, refusals by name, identity in caches."""

import dataclasses
import pathlib
import pickle
import subprocess
import sys

import pytest

from inductor_passes.config import DEFAULT_MEMORY_BUDGET_GB, PLANNERS, PassConfig


class Block:
    """Stands for a module class."""


CHANGED = {
    "planner": "greedy",
    "blocks": ("layers.*",),
    "memory_budget_gb": 1.5,
    "reshard": False,
    "bucketing": False,
    "reorder": False,
    "move_compute": False,
    "profile": "h100_sxm",
    "kernel_costs": "kernels.json",
}


def test_defaults():
    config = PassConfig()
    assert config.planner == "auto"
    assert config.memory_budget_bytes == int(DEFAULT_MEMORY_BUDGET_GB * 10**9)
    assert config.reshard is None
    assert config.bucketing
    assert config.reorder
    assert config.move_compute


def test_every_option_changes_the_cache_key_and_the_hash():
    assert CHANGED.keys() == {field.name for field in dataclasses.fields(PassConfig)}
    keys = [PassConfig().cache_key()] + [
        PassConfig(**{name: value}).cache_key() for name, value in CHANGED.items()
    ]
    assert len(dict.fromkeys(keys)) == len(CHANGED) + 1
    assert hash(PassConfig(planner="none")) == hash(PassConfig(planner="none"))
    assert PassConfig(planner="none") != PassConfig()


def test_cache_key_is_equal_in_another_process_under_another_hash_seed():
    code = "from inductor_passes.config import PassConfig; print(PassConfig(blocks=('a', 'b')).cache_key())"
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == PassConfig(blocks=("a", "b")).cache_key()


def test_pickle_round_trip():
    config = PassConfig(planner="block", blocks=[Block], memory_budget_gb=None)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.memory_budget_bytes is None


def test_values_are_normalised():
    config = PassConfig(blocks=["layers.*", Block], memory_budget_gb=2, profile=pathlib.Path("a/b.json"))
    assert config.blocks == ("layers.*", f"{__name__}.Block")
    assert (
        config.cache_key()
        == PassConfig(
            blocks=("layers.*", f"{__name__}.Block"), memory_budget_gb=2.0, profile="a/b.json"
        ).cache_key()
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"planner": "best"},
            ValueError,
            r"planner must be one of 'auto', 'greedy', 'block', 'none', got 'best'",
        ),
        ({"planner": "block"}, ValueError, r"needs blocks="),
        ({"blocks": "layers.*"}, TypeError, r"blocks must be a tuple .* write \('layers.\*',\)"),
        ({"blocks": (3,)}, TypeError, r"blocks must hold non-empty names"),
        ({"blocks": 3}, TypeError, r"blocks must be a tuple"),
        ({"memory_budget_gb": -1}, ValueError, r"memory_budget_gb must be finite and >= 0, or None"),
        ({"memory_budget_gb": float("nan")}, ValueError, r"memory_budget_gb must be finite"),
        ({"memory_budget_gb": "4"}, TypeError, r"memory_budget_gb must be a number of 10\*\*9 bytes"),
        ({"memory_budget_gb": True}, TypeError, r"memory_budget_gb must be a number"),
        ({"reshard": 1}, TypeError, r"reshard must be True, False or None"),
        ({"bucketing": None}, TypeError, r"bucketing must be True or False"),
        ({"reorder": "yes"}, TypeError, r"reorder must be True or False"),
        ({"move_compute": 0}, TypeError, r"move_compute must be True or False"),
        ({"profile": ""}, TypeError, r"profile must be non-empty text"),
        ({"kernel_costs": "kernels.txt"}, ValueError, r"kernel_costs must be a path that ends in \.json"),
    ],
)
def test_refusals_name_the_option(options, error, text):
    with pytest.raises(error, match=text):
        PassConfig(**options)


def test_each_planner_is_accepted():
    for planner in PLANNERS:
        assert PassConfig(planner=planner, blocks=("layers.*",)).planner == planner
