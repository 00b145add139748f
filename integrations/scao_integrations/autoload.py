"""SCAO in processes that others start: with ``SCAO_AUTOLOAD=1``, ``import torch`` prepares the registration in LLaMA-Factory.

torchrun and LLaMA-Factory's WebUI start fresh interpreters, where a registration of the process before is lost, and the
variable is inherited. torch (>= 2.5) calls `start` at the end of its own import, because it is an entry point of the group
``torch.backends``, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. Without the variable that reads one environment variable and
nothing else. With it, nothing is imported either: a finder waits until LLaMA-Factory's argument parser has been imported,
and then registers.

An exception would make ``import torch`` fail, so none gets out; what went wrong is a line on stderr.
"""

import os
import sys
from typing import Any

VARIABLE = "SCAO_AUTOLOAD"
# What defines the arguments, old and new; each imports torch before, so `start` comes first.
AWAITED = ("llamafactory.hparams.parser", "llamafactory.v1.config.training_args")
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def start() -> None:
    """Register as soon as LLaMA-Factory is there, if the environment asks for it. Never raises."""
    try:
        wanted = os.environ.get(VARIABLE, "").strip().lower()
        if wanted in _ON:
            wait(f"{VARIABLE}={wanted}")
        elif wanted not in _OFF:
            _complain(f"{VARIABLE}={wanted!r} is neither 1 nor 0")
    except Exception as error:
        _complain(error)


def wait(origin: str) -> None:
    """Register when one of the modules `AWAITED` has been imported, or now; ``origin`` is who asked, for the log."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(origin))
    for name in AWAITED:
        if name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False):
            _register(origin)


class _Finder:
    """Finds what the other finders find; what is awaited is followed by the registration."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in AWAITED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _register(self.origin)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010  (a method is replaced, of this one loader)
        return spec


def _register(origin: str) -> None:
    try:
        from scao_integrations import llamafactory_hook  # not relative: this file may be the script

        llamafactory_hook.register(origin)
    except Exception as error:
        _complain(error)


def _complain(what: object) -> None:
    kind = f"{type(what).__name__}: " if isinstance(what, Exception) else ""
    print(f"scao: SCAO is not registered: {kind}{what}", file=sys.stderr, flush=True)


def _run() -> None:
    """What torchrun starts in the place of LLaMA-Factory's launcher where torch does not call `start`."""
    sys.path.pop(0)  # this file's folder, whose modules have names of their own
    from scao_integrations import autoload

    autoload.wait("scao-llamafactory")
    if os.environ.get("USE_V1", "0").lower() in ("true", "y", "1"):
        from llamafactory.v1.launcher import main as run_v1

        run_v1()
    else:
        from llamafactory.train.tuner import run_exp

        run_exp()


if __name__ == "__main__":
    _run()
