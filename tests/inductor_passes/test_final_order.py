"""The order that TorchInductor's own code has: what starts and ends where in the wrapper, on CPU and GPU.

One model is traced once; its code is written for both devices and read. Nothing is built.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from inductor_passes import PassConfig, options
from simplefsdp import simple_fsdp
from tests.helpers.emitted import emitted_code
from tests.inductor_passes.toy import BF16, DIM, Block, world

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),  # importing TorchInductor
    pytest.mark.timeout(500),  # the first test waits for the compilation of all
]

BLOCKS = 4
RANKS = 64
PARAMETERS = 9  # of a block
PRODUCTS = 7  # matrix products of a block's forward; its backward has two for each
LATE_PRODUCTS = 5
EVENT = re.compile(
    r"(?P<start>\w+) = torch\.ops\._c10d_functional\.(?P<kind>all_gather|reduce_scatter)\w*\.default\("
    r"|wait_tensor\.default\((?P<wait>\w+)\)"
    r"|(?P<product>extern_kernels\.(?:mm|addmm)\()"
)


class Blocks(nn.Module):
    """Llama blocks and nothing around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Collective:
    """Where a collective of the emitted code starts, ends and is first read, in matrix products called before.

    The last two count lines of code.
    """

    kind: str
    start: int
    start_line: int
    wait: int = -1
    read: int = -1
    wait_line: int = -1


def read(code: str) -> tuple[list[Collective], int, int]:
    """The collectives of a wrapper in the order of their starts, how many matrix products it calls, and the line of the
    last one."""
    found: dict[str, Collective] = {}
    products = last_product = 0
    for number, line in enumerate(code[code.index("def call(") :].splitlines()):
        event = EVENT.search(line)
        if event and event["start"]:
            found[event["start"]] = Collective(event["kind"], products, number)
            continue
        if event and event["wait"]:
            item = found[event["wait"]]
            item.wait, item.wait_line = products, number
            continue
        if re.search(r"extern_kernels\.|\.run\(|cpp_fused\w+\(|torch\.ops\.(?:aten|simplefsdp)\.", line):
            for name in re.findall(r"\bbuf\d+\b", line):
                item = found.get(name)
                if item is not None and item.wait >= 0 and item.read < 0:
                    item.read = products
        if event:
            last_product = number
            products += 1
    return list(found.values()), products, last_product


@pytest.fixture(scope="module")
def codes():
    with world(RANKS):
        torch.manual_seed(0)
        model = simple_fsdp(Blocks(), mp_policy=BF16)
        config = PassConfig(planner="block", blocks=("layers.*",), profile="h100_sxm", memory_budget_gb=None)
        passes = options(config)
        x = torch.randn(2, 16, DIM, requires_grad=True)
        codes = emitted_code(model, x, options=passes, devices=("cpu", "cuda"))
        (reorder,) = passes["reorder_for_compute_comm_overlap_passes"]
        assert [(record.graph, record.failure) for record in reorder.records] == [
            ("forward", ""),
            ("forward", ""),
            ("backward", ""),
            ("backward", ""),
        ]
        return codes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_forward_starts_each_gather_a_block_ahead_and_awaits_it_at_its_first_use(codes, device):
    gathers, products, _ = read(codes[device]["forward"])
    assert [item.kind for item in gathers] == ["all_gather"] * BLOCKS
    assert products == PRODUCTS * BLOCKS
    for index, item in enumerate(gathers):
        assert item.start <= PRODUCTS * max(0, index - 1)
        # The residual sum before a block may fuse with its norm; a product of another block never comes between.
        assert PRODUCTS * index - 1 <= item.wait <= item.read <= PRODUCTS * index


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_backward_starts_each_gather_a_block_ahead_and_awaits_it_at_its_first_use(codes, device):
    found, products, _ = read(codes[device]["backward"])
    gathers = [item for item in found if item.kind == "all_gather"]
    assert len(gathers) == BLOCKS
    assert products == 2 * PRODUCTS * BLOCKS
    assert gathers[0].start == 0
    for before, item in itertools.pairwise(gathers):
        # The reduction of the block that has just ended starts first: TorchInductor freezes the order of collectives,
        # and a few products of the next block stand before the last weight gradient.
        assert item.start <= before.wait + LATE_PRODUCTS
        assert before.wait + PRODUCTS < item.wait == item.read


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_backward_starts_reductions_when_the_gradient_exists_and_awaits_them_at_the_end(codes, device):
    found, products, last_product = read(codes[device]["backward"])
    reductions = [item for item in found if item.kind == "reduce_scatter"]
    assert len(reductions) == BLOCKS
    for index, item in enumerate(reductions):
        assert 2 * PRODUCTS * (index + 1) <= item.start <= 2 * PRODUCTS * (index + 1) + LATE_PRODUCTS
        assert item.wait == products
        assert item.wait_line > max(reductions[-1].start_line, last_product)


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_gpu_code_packs_into_the_buffer_that_is_sent(codes, graph):
    """One call casts and copies all members to where the collective reads: nothing is staged or copied again."""
    code = codes["cuda"][graph]
    lines = code[code.index("def call(") :].splitlines()
    starts = [
        line
        for line in lines
        if re.search(r" = .*_c10d_functional\.(?:all_gather|reduce_scatter)\w*\.default\(", line)
    ]
    assert len(starts) == (BLOCKS if graph == "forward" else 2 * BLOCKS)
    packs = [line for line in lines if "simplefsdp.pack.default([" in line]
    assert len(packs) == len(starts)
    for start in starts:
        sent = re.findall(r"\bbuf\d+\b", start)[1]
        # Some versions of torch give the result of a call a second name.
        names = {sent, *(match[1] for line in lines if (match := re.match(rf"\s*{sent} = (buf\d+)\b", line)))}
        (pack,) = (line for line in packs if line.split(" = ")[0].strip() in names)
        if "all_gather" in start:  # straight from the shards
            assert re.search(
                rf"\[(?:primals_\d+, ){{{PARAMETERS - 1}}}primals_\d+\], 1, torch\.bfloat16\)", pack
            )
        else:  # straight from matrix products
            assert pack.endswith(f", {RANKS}, torch.float32)")
            parts = re.findall(r"\bbuf\d+\b", pack)[1:]
            products = [part for part in parts if any(f"out={part})" in line for line in lines)]
            assert (len(parts), len(products)) == (PARAMETERS, PRODUCTS)
    assert not any("copy_(" in line for line in lines)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_gathered_parameters_are_freed_one_by_one(codes, device, graph):
    """One call copies all of a bucket, and nothing holds what it returned together."""
    code = codes[device][graph]
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
    found = [number for number, line in enumerate(lines) if "simplefsdp.unpack.default(buf" in line]
    assert len(found) == BLOCKS
    for number in found:
        name = lines[number].split(" = ")[0]
        end = lines.index(f"del {name}")
        assert sum(f"= {name}[" in line for line in lines[number:end]) == PARAMETERS
        assert not any(EVENT.search(line) or ".run(" in line for line in lines[number + 1 : end])
