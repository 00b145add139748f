"""``scao bench``: optimizers × learning rates × seeds × batch sizes on one workload, and the report on what came out."""
