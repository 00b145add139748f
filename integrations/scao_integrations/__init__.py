"""Doors into the frameworks people already use: one module per framework, each importing ``scao_core`` and that framework.

Frameworks that take an optimizer class need none: give them ``scao.SCAO``.
"""
