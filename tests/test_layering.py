"""Each package is a stack: a file imports only files above it. Imports are read from the source, wherever they stand.

A new file needs a place in `ORDER`; everything it may import comes before it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# Top to bottom, `/` for sub-packages; an `__init__` stands below what it re-exports. Files may be missing, not extra.
STACKS = {
    "simplefsdp": """
        exits garbage _compat policy mesh placement ranks alike trail unshard regather slots census parametrize
        state initialize optimizer accumulate api
        explainer/facts explainer/schedule explainer/runs explainer/read explainer/eager
        explainer/lines explainer/capture explainer/world
        explainer/table explainer/verdict explainer/trace_events explainer/draw explainer/page explainer/report
        explainer/api explainer/__init__ __init__
        llama/config llama/model llama/checkpointing llama/flops llama/shards
        llama/sources llama/hf_config llama/hf llama/tokenizer llama/corpus llama/packing llama/data
        llama/agreement llama/options llama/rundir llama/launch llama/world llama/shutdown llama/peer_link llama/watch
        llama/state_markers llama/train_state llama/checkpoint_files llama/checkpoint
        llama/clock llama/schedule llama/metrics llama/display llama/plot llama/reporter
        llama/build llama/trainer llama/train llama/__init__
        explainer/hardware explainer/options explainer/trace_errors explainer/target explainer/wrapping
        explainer/command
        planner/request
        planner/emit/gpus planner/emit/guard planner/emit/_compat planner/emit/code planner/emit/attention
        planner/emit/ptx planner/emit/worker planner/emit/command planner/emit/__init__
        planner/options planner/extend planner/stack planner/allocator planner/predict
        planner/peers/units planner/peers/compiled_blocks planner/peers/fsdp2 planner/peers/ddp
        planner/peers/stock_manual planner/peers/stock_memory planner/peers/stock_order planner/peers/stock_merge
        planner/peers/stock_overlap planner/peers/__init__ planner/compare
        planner/text planner/published planner/build planner/rescale planner/validation
        planner/step planner/tracing planner/scale planner/picture planner/search planner/found
        planner/command
        planner/__init__
        cli __main__
    """,
    "inductor_passes": """
        _compat config plan graph labels chains
        costs/topology costs/profiles costs/collective costs/compute costs/model
        costs/fit costs/measure costs/calibrate costs/kernel_file costs/agree costs/__init__
        timeline
        planners/build planners/keylists planners/instance planners/schedule planners/check planners/order
        planners/segment planners/bound planners/place planners/simple planners/exact planners/moves
        planners/search planners/hedge planners/auto
        planners/explain planners/tasks planners/hold planners/motion planners/__init__
        windows work report verify emission program reshard bucket_ops bucket motion motion_kernels
        lowered inorder reorder readback
        setups graph_plan agreement hooks install debug __init__
    """,
}
ORDER = {package: tuple(stack.split()) for package, stack in STACKS.items()}
# What a package may import of its neighbours.
NEIGHBOURS = {"simplefsdp": {"inductor_passes"}, "inductor_passes": set()}
# The one file of each package, and of a sub-package of its own purpose, that may touch private torch symbols.
COMPATIBILITY_FILE = "_compat"


@dataclass(frozen=True)
class Reference:
    """One dotted name that a file imports or reads: `a.b.c` of `from a.b import c` or of `a.b.c` in an expression."""

    name: str
    line: int


def module_name(package: str, file: str) -> str:
    return ".".join([package, *file.split("/")]).removesuffix(".__init__")


def files_of(root: Path, package: str) -> list[str]:
    folder = root / package
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py"))


def syntax_of(root: Path, package: str, file: str) -> ast.Module:
    return ast.parse((root / package / f"{file}.py").read_text())


def imports_of(root: Path, package: str, file: str) -> Iterator[Reference]:
    """Yield every name that import statements of a file bind, as an absolute dotted name."""
    folders = [package, *file.split("/")[:-1]]
    for node in ast.walk(syntax_of(root, package, file)):
        if isinstance(node, ast.Import):
            yield from (Reference(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = folders[: len(folders) - node.level + 1] if node.level else []
            base = [*parents, *([node.module] if node.module else [])]
            yield from (Reference(".".join([*base, alias.name]), node.lineno) for alias in node.names)


def attribute_reads_of(root: Path, package: str, file: str) -> Iterator[Reference]:
    """Yield every attribute chain that starts at an imported name, with that name spelled out."""
    tree = syntax_of(root, package, file)
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                meaning[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        chain: list[str] = []
        base: ast.AST = node
        while isinstance(base, ast.Attribute):
            chain.append(base.attr)
            base = base.value
        if chain and isinstance(base, ast.Name) and base.id in meaning:
            yield Reference(".".join([meaning[base.id], *reversed(chain)]), base.lineno)


def longest_prefix(name: str, modules: set[str]) -> str | None:
    """Return the module that the dotted name `a.b.c` lies in: the longest of a.b.c, a.b and a that is a module."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in modules), None)


def is_private_torch(name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == [
        "ops"
    ]:  # operators keep the dispatcher's names, underscores included
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def breaches_of_order(root: Path, package: str, order: Sequence[str]) -> list[str]:
    """Return one line for each import of a file that does not stand above the importing one."""
    position = {module_name(package, file): index for index, file in enumerate(order)}
    files = files_of(root, package)
    modules = {module_name(package, file) for file in files}
    found = []
    for file in files:
        module = module_name(package, file)
        for reference in imports_of(root, package, file) if module in position else ():
            target = longest_prefix(reference.name, modules)
            if target in position and position[target] > position[module]:
                found.append(f"{package}/{file}.py:{reference.line} imports {target}, which stands below it")
    return found


def private_torch_names(root: Path, package: str) -> list[str]:
    """Return one line for each private torch name that a file other than the compatibility file uses."""
    found = []
    for file in files_of(root, package):
        if file.split("/")[-1] == COMPATIBILITY_FILE:
            continue
        by_line: dict[int, str] = {}
        for reference in (*imports_of(root, package, file), *attribute_reads_of(root, package, file)):
            if is_private_torch(reference.name):
                by_line.setdefault(reference.line, reference.name)
        found += [f"{package}/{file}.py:{line} uses {by_line[line]}" for line in sorted(by_line)]
    return found


def foreign_imports(root: Path, package: str, forbidden: set[str]) -> list[str]:
    """Return one line for each import of a forbidden top-level package."""
    return [
        f"{package}/{file}.py:{reference.line} imports {reference.name}"
        for file in files_of(root, package)
        for reference in imports_of(root, package, file)
        if reference.name.split(".")[0] in forbidden
    ]


@pytest.mark.parametrize("package", ORDER)
def test_every_file_has_a_place_in_the_order(package):
    extra = sorted(set(files_of(REPOSITORY, package)) - set(ORDER[package]))
    assert not extra, f"add to ORDER in {Path(__file__).name}, below all they import: {extra}"
    assert len(set(ORDER[package])) == len(ORDER[package]), "a file stands twice in ORDER"


@pytest.mark.parametrize("package", ORDER)
def test_files_import_only_what_stands_above_them(package):
    assert not breaches_of_order(REPOSITORY, package, ORDER[package])


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_permitted_neighbours(package):
    forbidden = {"tests", "benchmarks", *ORDER} - {package} - NEIGHBOURS[package]
    assert not foreign_imports(REPOSITORY, package, forbidden)


@pytest.mark.parametrize("package", ORDER)
def test_private_torch_names_stay_in_the_compatibility_file(package):
    found = private_torch_names(REPOSITORY, package)
    assert not found, "move these behind a function in _compat.py:\n" + "\n".join(found)


def test_the_checks_see_breaches(tmp_path):
    folder = tmp_path / "stack"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .low import f\n")
    (folder / "_compat.py").write_text("from torch._C import _x\n")
    (folder / "high.py").write_text("def f():\n    from stack import low\n    from stack.sub.leaf import g\n")
    (folder / "low.py").write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch.fx import Graph\n"
        "from .high import f\nfrom simplefsdp.api import simple_fsdp\n"
        "a = torch._C\nb = dist._thing.other\nc = Graph._insert\nd = torch.__version__, torch.ops._c10d_functional\n"
    )
    (folder / "sub" / "__init__.py").write_text("")
    (folder / "sub" / "leaf.py").write_text(
        "from torch.utils._pytree import tree_map\nfrom ..high import f\n"
    )
    order = ["_compat", "high", "sub/__init__", "sub/leaf", "low", "__init__"]
    assert files_of(tmp_path, "stack") == sorted(order)
    assert breaches_of_order(tmp_path, "stack", order) == [
        "stack/high.py:2 imports stack.low, which stands below it",
        "stack/high.py:3 imports stack.sub.leaf, which stands below it",
    ]
    assert private_torch_names(tmp_path, "stack") == [
        "stack/low.py:6 uses torch._C",
        "stack/low.py:7 uses torch.distributed._thing.other",
        "stack/low.py:8 uses torch.fx.Graph._insert",
        "stack/sub/leaf.py:1 uses torch.utils._pytree.tree_map",
    ]
    assert foreign_imports(tmp_path, "stack", {"simplefsdp"}) == [
        "stack/low.py:5 imports simplefsdp.api.simple_fsdp"
    ]


IMPORT_PROBE = """
import sys
import torch
import torch._dynamo.config, torch._functorch.config, torch._inductor.config
import torch.distributed as dist

configs = torch._dynamo.config, torch._functorch.config, torch._inductor.config
before = [config.get_config_copy() for config in configs], torch.get_default_dtype(), torch.get_num_threads()
import simplefsdp, inductor_passes

after = [config.get_config_copy() for config in configs], torch.get_default_dtype(), torch.get_num_threads()
assert before == after, "importing changed a setting"
assert not dist.is_initialized(), "importing made a process group"
optional = {"rich", "tyro", "matplotlib", "tensorboard", "pyarrow", "tokenizers", "safetensors", "transformers"}
print(*sorted(optional & set(sys.modules)))
"""


def test_importing_has_no_side_effects():
    probe = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_PROBE],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.split() == [], "these optional libraries were imported"
