"""The ``scao`` command and the pieces it is made of: data sets, model loading, training, checkpoints, reports.

Importing this package loads nothing heavy; each module imports torch or a Hugging Face library where it uses it.
"""

__all__: list[str] = []
