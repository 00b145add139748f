"""LLaMA-Factory imports torchaudio, for speech only; its libraries fit one build of torch, so leave only its Python part."""

from importlib.metadata import files
from pathlib import Path

for file in files("torchaudio") or []:
    if file.suffix == ".so":
        Path(str(file.locate())).unlink()
