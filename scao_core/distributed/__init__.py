"""What ranks must agree on."""

from .agreement import any_rank, any_ranks, is_alone

__all__ = ["any_rank", "any_ranks", "is_alone"]
