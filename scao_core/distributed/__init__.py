"""What ranks must agree on."""

from .agreement import any_rank

__all__ = ["any_rank"]
