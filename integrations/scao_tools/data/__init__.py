"""Instruction data: where rows come from, how they are split, and how they become token batches."""

from scao_tools.data.encoding import Encoded, encode_rows
from scao_tools.data.rows import Message, Row, read_jsonl, row_from_mapping
from scao_tools.data.sources import DataSet, load_data, split_rows

__all__ = [
    "DataSet",
    "Encoded",
    "Message",
    "Row",
    "encode_rows",
    "load_data",
    "read_jsonl",
    "row_from_mapping",
    "split_rows",
]
