"""The short dtype names that problems, tables and file names use, and their torch counterparts."""

from __future__ import annotations

import torch

TORCH: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
}
NAME: dict[torch.dtype, str] = {v: k for k, v in TORCH.items()}
BYTES: dict[str, int] = {k: v.itemsize for k, v in TORCH.items()}

IO = ("bf16", "f16")
WEIGHT = ("f32", "bf16", "f16")
INDEX = ("i32", "i64")
EIGHT_BIT = ("f8e4m3", "i8")  # these carry a scale a row
STATE = ("f32", "bf16", "f16", *EIGHT_BIT)
COPY = ("bf16", *EIGHT_BIT)  # of a read copy beside an f32 checkpoint
