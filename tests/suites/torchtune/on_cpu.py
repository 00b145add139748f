"""torchtune's distributed LoRA recipe where there is no GPU: gloo in place of NCCL, and no GPU memory to log or to free."""

import importlib.util
import sys

import torch
from torchtune import config, training

from suites.torchtune.tuning import STOCK

spec = importlib.util.spec_from_file_location("distributed", STOCK.parent / "lora_finetune_distributed.py")
distributed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(distributed)


@config.parse
def main(cfg):
    """Set up and train, as the recipe's own main does."""
    torch.distributed.init_process_group("gloo")
    training.get_memory_stats = lambda **_: {}
    training.log_memory_stats = training.cleanup_before_training = lambda *_: None
    recipe = distributed.LoRAFinetuneRecipeDistributed(cfg=cfg)
    recipe.setup(cfg=cfg)
    print("set up", flush=True)
    recipe.train()
    print("trained", flush=True)
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(main())
