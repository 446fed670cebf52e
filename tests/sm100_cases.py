"""Problems and configs that the Blackwell step kernel is simulated on."""

from __future__ import annotations

import dataclasses
from typing import Any

from simulated_cases import BASE

from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import Sm100Config


def case(fields: dict[str, Any], **shape: Any) -> tuple[Problem, Sm100Config]:
    problem = dataclasses.replace(BASE, **({"heads": 2, "groups": 1} | fields))
    return problem, Sm100Config.of(problem, **shape)


F16 = {"state_dtype": "f16", "io_dtype": "f16", "dt_dtype": "f16", "dt_bias_dtype": "f16"}
BARE = {
    **dict.fromkeys(("d_dtype", "dt_bias_dtype", "index_dtype")),
    **dict.fromkeys(("has_z", "dt_softplus"), False),
    "dt_dtype": "f32",
}
CASES: dict[str, tuple[Problem, Sm100Config]] = {
    "plain": case({"heads": 4, "groups": 2, "d_state": 128}),
    "whole": case({"d_state": 128}, ring="whole"),
    "two turns, one stage": case({"heads": 4}, turns=2),
    "two turns, two stages, a tail": case({"heads": 4, "d_state": 128}, turns=2, stages=2, tail_rows=2),
    "four turns, two stages, whole": case({"heads": 8}, turns=4, stages=2, ring="whole"),
    "six turns, two stages: more heads than warps": case({"heads": 12}, turns=6, stages=2),
    "three turns, three stages": case({"heads": 6}, turns=3, stages=3),
    "heads of 128 rows": case({"head_dim": 128, "groups": 2}),
    "heads of 128 rows, d_state 256, two turns": case({"head_dim": 128, "d_state": 256}, turns=2),
    "T = W = 16": case({"tokens": 16}),
    "T = W = 16, two turns, whole": case({"heads": 4, "tokens": 16}, turns=2, ring="whole"),
    "T 9, W 11": case({"tokens": 9, "window": 11}),
    "T = W = 1": case({"tokens": 1, "window": 1}),
    "bf16, two turns": case({"heads": 4, "state_dtype": "bf16", "d_state": 128}, turns=2),
    "bf16, heads of 128 rows, d_state 256": case({"head_dim": 128, "d_state": 256, "state_dtype": "bf16"}),
    "f16": case({**F16, "d_state": 128}),
    "f32 state, f16 inputs": case({**F16, "state_dtype": "f32"}),
    "gaps everywhere": case({"heads": 4, "groups": 2, "compact": False}),
    "gaps everywhere, two turns": case({"heads": 4, "compact": False}, turns=2),
    "nothing optional": case({**BARE}),
    "nothing optional, two turns": case({**BARE, "heads": 4}, turns=2),
    "W 32, two turns": case({"heads": 4, "window": 32}, turns=2),
    "T 17, W 24: columns for 32 tokens": case({"tokens": 17, "window": 24, "heads": 4}, turns=2),
    "T 32, W 64, bf16": case({"tokens": 32, "window": 64, "state_dtype": "bf16"}),
    "behind another kernel": case({"pdl": True, "d_state": 128}),
    "behind another kernel, three turns, two stages": case({"heads": 6, "pdl": True}, turns=3, stages=2),
    "heads of 80 rows": case({"head_dim": 80, "d_state": 128}),
    "heads of 80 rows, f16, T 9, three turns, two stages, whole": case(
        {**F16, "head_dim": 80, "heads": 3, "tokens": 9}, turns=3, stages=2, ring="whole"
    ),
    "heads of 80 rows, bf16, gaps, behind another kernel": case(
        {"head_dim": 80, "state_dtype": "bf16", "compact": False, "pdl": True}, turns=2
    ),
    "heads of 80 rows, nothing optional, T 17, W 24": case({**BARE, "head_dim": 80, "tokens": 17, "window": 24}),
    "launch control": case({"heads": 4, "groups": 2}, launch_control=True),
    "launch control, three turns, two stages, a tail, behind another kernel": case(
        {"heads": 6, "pdl": True}, turns=3, stages=2, tail_rows=2, launch_control=True
    ),
    "launch control, two turns, whole, heads of 128 rows, bf16": case(
        {"head_dim": 128, "state_dtype": "bf16"}, turns=2, ring="whole", launch_control=True
    ),
    "launch control, two turns, T 17, W 24": case(
        {"heads": 4, "tokens": 17, "window": 24}, turns=2, launch_control=True
    ),
    "launch control, heads of 80 rows, two turns, two stages, a tail": case(
        {"head_dim": 80}, turns=2, stages=2, tail_rows=3, launch_control=True
    ),
}

# Rows with lengths of their own; see `ragged_call`.
RAGGED: dict[str, tuple[Problem, Sm100Config]] = {
    "ragged": case({"heads": 4, "groups": 2, "ragged": True}),
    "ragged, three turns, two stages, a tail": case({"heads": 6, "ragged": True}, turns=3, stages=2, tail_rows=2),
    "ragged, whole, heads of 128 rows": case({"head_dim": 128, "ragged": True}, ring="whole"),
    "ragged, behind another kernel, bf16, T 9, W 40": case(
        {"ragged": True, "pdl": True, "state_dtype": "bf16", "tokens": 9, "window": 40}
    ),
    "ragged, heads of 80 rows, two turns": case({"head_dim": 80, "ragged": True}, turns=2),
    "ragged, launch control, three turns, one stage, a tail": case(
        {"heads": 6, "ragged": True}, turns=3, tail_rows=2, launch_control=True
    ),
}
