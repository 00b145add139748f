"""TRL's own ``dpo`` script, with ``optim: scao`` for a name that it knows and with unknown keys refused.

    python dpo.py --config smollm2-135m_dpo_scao.yaml

``DPOTrainer`` takes no optimizer class, so the name is the way here.
"""

from scao_integrations.hf_trainer import register

if __name__ == "__main__":
    register()
    from trl.scripts.dpo import main, make_parser

    main(*make_parser().parse_args_and_config())
