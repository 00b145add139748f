"""``scao demo``: fine-tune a small chat model with several optimizers and compare them."""

__all__: list[str] = []
