"""What can be wrong with a question to the planner."""

from __future__ import annotations


class PlanError(ValueError):
    """The question cannot be answered as asked; the message names the option, its value and what is allowed."""
