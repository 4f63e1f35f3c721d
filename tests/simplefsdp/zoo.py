"""Modules whose parameters are awkward to shard, one for each way of being awkward.

Owns: the cases that `test_parameters` trains against the reference. Must not know: sharding. Sizes divide by neither 2
nor 4 wherever the kind of parameter allows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.simplefsdp.reference import Case


def features(*shape: int) -> Any:
    """Arguments: one normal tensor."""
    return lambda generator: (torch.randn(*shape, generator=generator),)


def tokens(vocabulary: int, *shape: int) -> Any:
    """Arguments: one tensor of token numbers."""
    return lambda generator: (torch.randint(vocabulary, shape, generator=generator),)


class Uneven(nn.Sequential):
    """5 -> 7 -> 3 features: shards of unlike sizes, on four ranks some without rows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Tied(nn.Module):
    """One parameter in an embedding and in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x).tanh())


class SharedModule(nn.Module):
    """One module instance under two parents."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(5, 5)
        self.first, self.second = nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class LowRankAdapter(nn.Module):
    """A frozen weight and two trainable factors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Odd(nn.Module):
    """0-dim, one element, no elements, fewer rows than ranks, integers, booleans: all read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.few = nn.Parameter(torch.randn(3, 2, 1))
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, False]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, self.order] * self.mask * self.scale + self.shift
        return (x * self.few.sum()).sum() + self.nothing.sum() + self.few.std()


class ManyDtypes(nn.Module):
    """Floating parameters of several dtypes, each used in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.f16, self.bf16, self.f32, self.f64 = (
            nn.Parameter(torch.randn(3).to(dtype))
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(p.dtype) * p for p in (self.f16, self.bf16, self.f32, self.f64)]


class Complex(nn.Module):
    """Complex weights, one read through a lazy conjugate, which is a view of the gathered tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.conjugated = nn.Parameter(torch.randn(7, 3, dtype=torch.complex128).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.plain.conj()).tanh()
        return hidden @ self.conjugated.conj().t() + self.conjugated.mH.sum(0).imag.sum()


class NonContiguous(nn.Module):
    """Weights that are stored transposed, channels last, and as a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.linear.weight = nn.Parameter(torch.randn(3, 4).t())
        self.conv = nn.Conv2d(4, 6, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.slice = nn.Parameter(torch.randn(13, 10)[1:7, ::2])
        assert not any(p.is_contiguous() for p in (self.linear.weight, self.conv.weight, self.slice))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.linear(x).unsqueeze(-1).unsqueeze(-1)).flatten(1) @ self.slice


class ThreeOfOneModule(nn.Module):
    """Three parameters of one module, equal in shape, in three roles; the last one is read three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(5)) for _ in range(3))
        self.unread = nn.Parameter(torch.randn(5))
        self.register_buffer("unread_buffer", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a + self.b).tanh() * self.c + self.c * self.c


class TwoNames(nn.Module):
    """One parameter under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first).tanh() @ self.second.t()


class Unlike(nn.Module):
    """Runs its layers in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(3, 5), nn.Linear(7, 3), nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Lists(nn.Module):
    """ParameterList and ParameterDict, nested and indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(5, 5), nn.Parameter(torch.randn(5))])
        self.dict = nn.ParameterDict(
            {"scale": torch.randn(5), "nested": nn.ParameterList([torch.randn(5, 3)])}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.list:
            x = (x @ parameter if parameter.dim() == 2 else x + parameter).tanh()
        assert len(self.list) == 2
        return x * self.dict["scale"] @ self.dict["nested"][-1]


class Recurrent(nn.Module):
    """LSTM, GRU and a cell: torch keeps a second list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, bidirectional=True, proj_size=3)
        self.gru, self.cell = nn.GRU(6, 5, bias=False), nn.LSTMCell(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(self.gru(self.lstm(x)[0])[0][-1])[0]


class Attention(nn.Module):
    """MultiheadAttention, which reads its weights beside the submodule that owns one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(6, 2, kdim=3, vdim=5, add_bias_kv=True)
        self.equal = nn.MultiheadAttention(6, 3)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = self.mixed(query, key, value)[0]
        return self.equal(x, x, x, need_weights=False)[0]


class BatchNormed(nn.Sequential):
    """Running statistics are buffers that each rank updates from its own data."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


class Parametrized(nn.Module):
    """torch.nn.utils.parametrize: a weight that is computed from other parameters at each read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = parametrizations.weight_norm(nn.Linear(5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).tanh()


class MoreParametrized(nn.Module):
    """Parametrizations with state of their own: buffers that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = parametrizations.orthogonal(nn.Linear(7, 5), orthogonal_map="cayley")
        self.spectral = parametrizations.spectral_norm(nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spectral(self.orthogonal(x).tanh())


class SparseGradient(nn.Module):
    """An embedding whose gradient autograd hands over as a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(6, 3, sparse=True), nn.EmbeddingBag(7, 3, sparse=True, mode="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).sum(1) + self.bag(x)


class GradientPenalty(nn.Module):
    """A loss on the gradient of the output with respect to the input: weights take part in a double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


def oldstyle_weight_norm() -> nn.Module:
    """torch.nn.utils.weight_norm: a forward pre-hook sets a plain attribute."""
    return nn.Sequential(
        nn.utils.weight_norm(nn.Linear(5, 7)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(7, 3))
    )


def attention_inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(4, 2, width, generator=generator) for width in (6, 3, 5))


def complex_inputs(generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(2, 5, dtype=torch.complex128, generator=generator),)


class ManyOutputs(nn.Module):
    """An alias of the input, two outputs of one layer with bias (one not contiguous), a gradient that is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(5, 7), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        y = self.linear(x)
        return x, {"y": y, "transposed": y.tanh().t()}, self.gain.sum()


CASES = {
    "many_outputs": Case(ManyOutputs, features(4, 5)),
    "uneven": Case(Uneven, features(4, 5)),
    "tied": Case(Tied, tokens(5, 6)),
    "shared_module": Case(SharedModule, features(4, 5)),
    "frozen_base": Case(LowRankAdapter, features(4, 5)),
    "odd": Case(Odd, features(4, 5)),
    "many_dtypes": Case(ManyDtypes, features(3), rtol=1e-2),  # as bfloat16 asks for
    "complex": Case(Complex, complex_inputs),
    "non_contiguous": Case(NonContiguous, features(2, 3)),
    "three_of_one_module": Case(ThreeOfOneModule, features(4, 5)),
    "two_names": Case(TwoNames, features(4, 5)),
    "unlike_order": Case(Unlike, features(4, 5)),
    "lists": Case(Lists, features(4, 5)),
    "recurrent": Case(Recurrent, features(4, 2, 3)),
    "attention": Case(Attention, attention_inputs),
    "batch_norm": Case(BatchNormed, features(4, 5)),
    "parametrized": Case(Parametrized, features(4, 5)),
    "more_parametrized": Case(MoreParametrized, features(4, 7)),
    "weight_norm": Case(oldstyle_weight_norm, features(4, 5)),
    "sparse_gradient": Case(SparseGradient, tokens(6, 4, 2)),
    "gradient_penalty": Case(GradientPenalty, features(4, 5)),
}
