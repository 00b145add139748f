"""What the command line can refuse, and with which exit status.

ToolError
├── OptionError          an option has a value that cannot work
├── MissingPackageError  an optional dependency is not installed
├── DataError            the training data cannot be read or holds nothing usable
├── ModelError           the model cannot be found or cannot be fine-tuned with LoRA
├── OutputError          the output directory cannot be used
├── ResumeError          an interrupted run cannot be continued
└── ResultsError         a file of benchmark results cannot be used

Each message is one sentence that says what was wrong, what was given, what is allowed, and what to do next.
"""


class ToolError(Exception):
    """A problem that the user can fix; printed as one sentence, without a traceback."""

    exit_code = 2


class OptionError(ToolError):
    """An option has a value that cannot work."""


class MissingPackageError(ToolError):
    """An optional dependency is not installed."""


class DataError(ToolError):
    """The training data cannot be read or holds nothing usable."""


class ModelError(ToolError):
    """The model cannot be found or cannot be fine-tuned with LoRA."""


class OutputError(ToolError):
    """The output directory cannot be used."""


class ResumeError(ToolError):
    """An interrupted run cannot be continued."""


class ResultsError(ToolError):
    """A file of benchmark results cannot be used."""
