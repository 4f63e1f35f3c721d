"""See what the compiler did with a model: bucket tables, schedules, graphs before and after each pass."""

from simplefsdp.explainer.api import explain
from simplefsdp.explainer.report import Report
from simplefsdp.explainer.schedule import Timeline

__all__ = ["Report", "Timeline", "explain"]
