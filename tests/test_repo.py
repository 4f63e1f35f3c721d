"""What holds for the repository as a whole: documented names, short files, text that belongs to the project alone."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("simplefsdp", "inductor_passes")
# A file with more lines than this holds more than one idea.
MAX_LINES = 500
# Home directories of somebody's machine; unfinished merges.
FORBIDDEN_TEXT = re.compile(r"/(home|root|Users)/[a-z]|^(<{7}|>{7}) ", re.MULTILINE)


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [REPOSITORY / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def package_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))


def methods(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    """Yield the public methods of a module's public classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                    yield node, item


def undocumented(trees: list[ast.Module]) -> list[list[str]]:
    """Return, by module, the public names without a docstring, methods as `Class.method`.

    A method needs none where it implements what a protocol or base class describes: when its class has a base, or
    some other class documents a method of that name.
    """
    described = {item.name for tree in trees for _, item in methods(tree) if ast.get_docstring(item)}
    return [list(undocumented_in(tree, described)) for tree in trees]


def undocumented_in(tree: ast.Module, described: set[str]) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "the module"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.name
    for owner, item in methods(tree):
        if not ast.get_docstring(item) and not owner.bases and item.name not in described:
            yield f"{owner.name}.{item.name}"


def test_public_names_are_documented():
    paths = package_files()
    by_module = undocumented([ast.parse(path.read_text()) for path in paths])
    found = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path, names in zip(paths, by_module, strict=True)
        for name in names
    ]
    assert not found, "\n".join(found)


def test_files_hold_one_idea_each():
    lengths = {path.relative_to(REPOSITORY): path.read_text().count("\n") for path in package_files()}
    too_long = {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not too_long


def test_tracked_text_belongs_to_the_project_alone():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(REPOSITORY)}: {match.group()!r}" for match in FORBIDDEN_TEXT.finditer(text)
        ]
    assert not found, "\n".join(found)


def test_the_checks_see_what_they_look_for():
    bare = (
        "def f(): ...\nclass A:\n    'x'\n    def g(self): ...\n    def h(self): ...\n    def _i(self): ...\n"
    )
    protocol = "'m'\nclass P:\n    'x'\n    def h(self):\n        'what h does'\n"
    assert undocumented([ast.parse(bare), ast.parse(protocol)]) == [["the module", "f", "A.g"], []]
    assert FORBIDDEN_TEXT.search("see /ro" + "ot/thing")
    assert FORBIDDEN_TEXT.search("a\n" + "<" * 7 + " ours\n")
    assert not FORBIDDEN_TEXT.search("/usr/share, the root/branch, a << 7")
