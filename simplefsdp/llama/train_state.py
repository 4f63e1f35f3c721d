"""What a training run has to remember, as nested dicts, and putting it back.

Owns: names of parameters and of optimizer state, random generators. Must not know: files, checkpoints, how
a state travels.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from simplefsdp.llama.state_markers import StateMismatchError, check_same_names
from simplefsdp.state import unwrapped_name


def train_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Collect the tensors and settings of a model and its optimizer under parameter names.

    The tensors alias the live ones: writing to them changes the model. No collective is issued.

    Args:
        model: plain, sharded (parameters are DTensors) or compiled module.
        optimizer: its parameters must be parameters of `model`; None leaves it out.

    Returns:
        {"model": {name: tensor}, "optimizer": {"state": {name: {key: value}}, "param_groups": [...]}}, where
        each group lists names under "params". Tied parameters have one entry per name in "model" and one,
        under the first name, in "optimizer".

    Raises:
        StateMismatchError: the optimizer holds a parameter that is not in the model.
    """
    state: dict[str, Any] = {
        "model": {unwrapped_name(key): value for key, value in model.state_dict().items()}
    }
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(model, optimizer)
    return state


def restore(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Put a state made by `train_state`, and perhaps loaded since, into a model and its optimizer.

    Args:
        model: same names and shapes as the one the state was collected from; its sharding may differ.
        optimizer: parameters grouped as they were; None leaves state["optimizer"] unused.
        state: as from `train_state`; other entries are ignored.

    Raises:
        StateMismatchError: names or groups differ; nothing has changed then.
    """
    raw_keys = {unwrapped_name(key): key for key in model.state_dict()}
    check_same_names("model", state["model"].keys(), raw_keys.keys())
    packed = None if optimizer is None else _packed_optimizer_state(model, optimizer, state["optimizer"])
    model.load_state_dict({raw_keys[name]: value for name, value in state["model"].items()})
    if optimizer is not None and packed is not None:
        optimizer.load_state_dict(packed)


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random generators: torch (CPU, current GPU), Python, NumPy."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any] | None, *, seed: int, step: int) -> None:
    """Continue the random generators of this process.

    Args:
        state: from `rng_state` on the same rank of as many ranks; None if there is none, because the number
            of ranks changed. The generators are then seeded from (seed, step, rank): ranks differ, and a
            resumed run does not repeat the numbers it began with.
        seed: the run's seed.
        step: the step training continues after.
    """
    if state is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        derived = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "big")
        torch.manual_seed(derived)  # every device
        random.seed(derived)
        np.random.seed(derived % 2**32)  # NumPy's limit on seeds
        return
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the optimizer's parameters, group by group in its own order."""
    name_of = {id(parameter): unwrapped_name(name) for name, parameter in model.named_parameters()}
    names = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in name_of:
                raise StateMismatchError(
                    f"optimizer group {index} holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not in the model: build the optimizer after sharding the model"
                )
        names.append([name_of[id(parameter)] for parameter in group["params"]])
    return names


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = _names(model, optimizer)
    state, groups = {}, []
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        groups.append({**group, "params": group_names})
        for parameter, name in zip(group["params"], group_names, strict=True):
            if parameter in optimizer.state:
                state[name] = dict(optimizer.state[parameter])
    return {"state": state, "param_groups": groups}


def _packed_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> dict[str, Any]:
    """Turn names into the positions that `Optimizer.load_state_dict` expects, in this optimizer's order."""
    names = _names(model, optimizer)
    if len(saved["param_groups"]) != len(names):
        raise StateMismatchError(
            f"optimizer: {len(names)} parameter groups, the saved state has {len(saved['param_groups'])}"
        )
    groups, state, position = [], {}, 0
    for index, (group_names, saved_group) in enumerate(zip(names, saved["param_groups"], strict=True)):
        check_same_names(f"optimizer group {index}", saved_group["params"], group_names)
        positions = range(position, position + len(group_names))
        groups.append({**saved_group, "params": list(positions)})
        for at, name in zip(positions, group_names, strict=True):
            if name in saved["state"]:
                state[at] = saved["state"][name]
        position += len(group_names)
    return {"state": state, "param_groups": groups}
