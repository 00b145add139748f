"""TRL's own ``sft`` script, with ``optim: scao`` for a name that it knows and with unknown keys refused.

    python sft.py --config smollm2-135m_lora_scao.yaml                  # one process
    torchrun --nproc_per_node 2 sft.py --config qwen2.5-3b_qlora_scao.yaml   # two GPUs, DistributedDataParallel

``trl sft`` starts a fresh interpreter, where nothing registers SCAO; this file is what it would start, plus one line.
"""

from scao_integrations.hf_trainer import register

if __name__ == "__main__":
    register()
    from trl.scripts.sft import main, make_parser

    main(*make_parser().parse_args_and_config())
