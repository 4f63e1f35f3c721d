"""What is added to a model after wrapping would train apart on every rank: it is found, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from simplefsdp import census, full_state_dict, no_sync, simple_fsdp
from tests.helpers.worlds import fake_process_group
from tests.simplefsdp.models import batch, loss_of, make_net


@pytest.fixture(autouse=True)
def world_of_two() -> Iterator[None]:
    with fake_process_group(0, 2):
        yield


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _register(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))


def _add_adapter(model: nn.Module) -> None:
    model.head.adapter = nn.Sequential(nn.Linear(3, 3, bias=False))


ADDITIONS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "attribute": (lambda m: setattr(m, "new", nn.Linear(3, 3)), r"^'new\.weight', 'new\.bias': added to the model"),
    "parameter": (_register, r"^'scale': added to the model after simple_fsdp"),
    "below a wrapped leaf": (_add_adapter, r"^'head\.adapter\.0\.weight': added"),
    "in a container": (lambda m: m.layers.append(nn.Linear(3, 3)), r"^'layers\.2\.weight', 'layers\.2\.bias': "),
    "in place of a layer": (lambda m: m.layers.__setitem__(0, nn.Linear(3, 3)), r"^'layers\.0\.weight', "),
    "many": (
        lambda m: m.add_module("new", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))),
        r"'new\.1\.weight' and 1 more: .*wrap the new module by a call of its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDITIONS)
@pytest.mark.parametrize("first_step", ["before", "after"])
def test_an_addition_is_found_at_the_optimizers_next_step(name, first_step):
    add, message = ADDITIONS[name]
    model = simple_fsdp(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first_step == "before":
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    known = {id(p) for p in model.parameters()}
    add(model)
    optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in known]})
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize("name", ["attribute", "parameter", "below a wrapped leaf", "many"])
def test_an_addition_to_a_wrapped_module_is_found_at_the_next_forward(name):
    """Even by an optimizer of its own, which knows no sharded parameter."""
    add, message = ADDITIONS[name]
    model = simple_fsdp(Model())
    model(torch.ones(1, 3))
    add(model)
    with torch.no_grad():
        model(torch.ones(1, 3))  # nothing trains here
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(1, 3))


def test_an_addition_is_found_when_the_model_is_compiled():
    model = simple_fsdp(Model())
    model.layers.append(nn.Linear(3, 3))
    with pytest.raises(Exception, match=r"'layers\.2\.weight', 'layers\.2\.bias': added to the model"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(1, 3))
    torch._dynamo.reset()


def test_what_may_be_added():
    model = simple_fsdp(Model())
    model.frozen = nn.Linear(3, 3).requires_grad_(False)
    model.table = nn.Buffer(torch.ones(3))
    model.layers.append(simple_fsdp(nn.Linear(3, 3)))
    del model.layers[0]
    model.head.bias = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_sharded_parameter_can_be_removed_and_registered_again_only_as_shards():
    model = simple_fsdp(Model())
    model.head.register_parameter("weight", nn.Parameter(torch.full((3, 3), 2.0)))
    assert torch.equal(model.head.weight.to_local(), torch.full((2, 3), 2.0))
    del model.head.weight
    assert "head.weight" not in full_state_dict(model)
    with no_sync(model):
        pass
    with pytest.raises(ValueError, match=r"cannot assign 'head\.weight': .* was removed.*weight_norm"):
        model.head.weight = torch.ones(3, 3)


def test_computed_weights_after_wrapping_are_refused_with_the_order():
    model = simple_fsdp(Model())
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="come before simple_fsdp"):
        torch.nn.utils.weight_norm(model.head)


def test_ignored_parameters_are_known_wherever_they_go():
    model = Model()
    simple_fsdp(model.layers[0], ignored_params=[model.layers[0].bias])
    simple_fsdp(model, ignored_params=[model.layers[0].bias, *model.head.parameters()])
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(model.state_dict(), assign=True)  # other parameters under the same names
    moved = copy.deepcopy(model).double().float()
    moved.tail = nn.Sequential(moved.layers[0])  # the same parameters under other names
    del moved.layers[0]
    for run in (model, loaded, moved):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        run(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def test_the_model_is_searched_once_and_not_at_every_step(monkeypatch):
    searches = []
    search = census._strangers
    monkeypatch.setattr(census, "_strangers", lambda root: searches.append(root) or search(root))
    model = simple_fsdp(make_net(layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
    assert searches == [model, model]  # the first forward, the first step
