"""What all recipes have in common, whatever their framework: a header that says how to run them, and a twin."""

import re


def names(paths):
    """Ids of tests."""
    return [path.stem for path in paths]


def twin(path):
    """The recipe with the other optimizer."""
    ours, theirs = ("_scao", "_adamw") if path.stem.endswith("_scao") else ("_adamw", "_scao")
    return path.with_name(path.name.replace(ours, theirs))


def assert_header(path, first_key, command):
    """The comment above the first key says the command, the memory, what was run, and which file is the twin."""
    header = path.read_text().split(f"\n{first_key}")[0]
    assert command in header
    assert re.search(r"^# Memory: .", header, re.MULTILINE)
    assert re.search(r"^# Run: .{10}", header, re.MULTILINE)
    assert f"# Twin: {twin(path).name}" in header
