"""Exit codes of the command line. Owns the numbers; does not import torch."""

from __future__ import annotations

__all__ = ["EXIT_FAILURE", "EXIT_USAGE"]

EXIT_FAILURE, EXIT_USAGE = 1, 2
