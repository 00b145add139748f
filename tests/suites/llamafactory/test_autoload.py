"""The entry point that torch calls: nothing without the variable, never an exception, never silence on failure."""

import os
import subprocess
import sys

import pytest

FAKE = (
    "import sys; sys.path.insert(0, {place!r}); import torch; import llamafactory.hparams.parser as p; print(p.VALUE)"
)


def python(code, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SCAO_AUTOLOAD")} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_importing_torch_imports_no_framework(value):
    code = (
        "import sys, torch\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'transformers', 'llamafactory', 'scao_core'}))\n"
        "print([type(finder).__module__ for finder in sys.meta_path].count('scao_integrations.autoload'))"
    )
    done = python(code, SCAO_AUTOLOAD=value)
    assert done.stdout.split("\n")[:2] == ["[]", "1" if value == "1" else "0"]
    assert done.stderr == ""


def test_a_value_that_means_nothing_is_one_line(tmp_path):
    done = python("import torch; print('imported')", SCAO_AUTOLOAD="perhaps")
    assert done.stdout == "imported\n"
    assert done.stderr == "scao: SCAO is not registered: SCAO_AUTOLOAD='perhaps' is neither 1 nor 0\n"


def test_a_failing_registration_is_one_line_and_the_import_goes_on(tmp_path):
    """A LLaMA-Factory that is too old stands for whatever may go wrong."""
    (tmp_path / "llamafactory" / "hparams").mkdir(parents=True)
    (tmp_path / "llamafactory" / "__init__.py").write_text("__version__ = '0.9.3'\n")
    (tmp_path / "llamafactory" / "hparams" / "__init__.py").touch()
    (tmp_path / "llamafactory" / "hparams" / "parser.py").write_text("VALUE = 'theirs'\n")
    done = python(FAKE.format(place=str(tmp_path)), SCAO_AUTOLOAD="1")
    assert done.stdout == "theirs\n"
    assert done.stderr.count("\n") == 1
    assert (
        "scao: SCAO is not registered: FrameworkError: SCAO's LLaMA-Factory door needs llamafactory >= 0.9.5"
        in done.stderr
    )
    quiet = python(FAKE.format(place=str(tmp_path)))
    assert (quiet.stdout, quiet.stderr) == ("theirs\n", "")
