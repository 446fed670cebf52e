"""The decode step against the torch path of transformers' own Mamba2 mixers, on random weights.

It needs transformers, which no extra of this project brings: `pip install transformers`.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from fused_calls import copied, layer, random_layer_call
from test_fused_reference import WIDE

import replayssm_cute
from replayssm_cute.fused import conv_ring
from replayssm_cute.fused.problem import LayerCall
from replayssm_cute.fused.reference import decode_step_reference
from replayssm_cute.problem import Problem

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEP = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=4, window=8, index_dtype=None)


def nemotron() -> Any:
    """A mixer whose norm has B's groups."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMamba2Mixer

    config = NemotronHConfig(
        mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=64, n_groups=2, hidden_size=32, conv_kernel=4,
        time_step_min=0.0, use_conv_bias=True,
    )  # fmt: skip
    return NemotronHMamba2Mixer(config, layer_idx=0)


def mamba2() -> Any:
    """A mixer whose conv has no bias."""
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

    config = Mamba2Config(
        num_heads=4, head_dim=64, state_size=64, n_groups=2, hidden_size=128, expand=2, conv_kernel=4,
        time_step_limit=(0.0, float("inf")), use_conv_bias=False,
    )  # fmt: skip
    return Mamba2Mixer(config, layer_idx=0)


def bamba() -> Any:
    """A mixer whose norm is of one group."""
    from transformers.models.bamba.modeling_bamba import BambaConfig, BambaMixer

    config = BambaConfig(
        mamba_n_heads=4, mamba_d_head=64, mamba_d_state=64, mamba_n_groups=2, hidden_size=128, mamba_expand=2,
        mamba_d_conv=4, mamba_conv_bias=True,
    )  # fmt: skip
    return BambaMixer(config, layer_idx=0)


def call_of(mixer: Any) -> LayerCall:
    """A decode step with the mixer's weights and three slots as after a reset."""
    norm = mixer.norm
    groups = mixer.intermediate_size // getattr(norm, "group_size", mixer.intermediate_size)
    call = copied(random_layer_call(layer(STEP, norm_groups=groups), 2, dead=None), **WIDE)
    call.state.zero_()
    call.ring_start.zero_()
    call.prev_num_accepted_tokens.zero_()
    conv_ring.set_history(call.conv_cache, call.ring_start, call.prev_num_accepted_tokens, torch.arange(5))
    return dataclasses.replace(
        call,
        conv_cache=call.conv_cache.double(),
        conv_weight=mixer.conv1d.weight[:, 0].detach(),
        conv_bias=None if mixer.conv1d.bias is None else mixer.conv1d.bias.detach(),
        A=-torch.exp(mixer.A_log.detach().float()),
        D=mixer.D.detach(),
        dt_bias=mixer.dt_bias.detach(),
        norm_weight=norm.weight.detach(),
        eps=norm.variance_epsilon,
        norm_groups=groups,
    )


@pytest.mark.parametrize("make", [nemotron, mamba2, bamba])
def test_a_hundred_speculative_steps_are_the_mixers_sequence(make: Any) -> None:
    """Outputs of accepted tokens are those of the mixer on the accepted tokens alone."""
    torch.manual_seed(0)
    mixer = make().eval()
    with torch.no_grad():
        for name, weight in mixer.named_parameters():
            if name == "norm.weight":
                weight.uniform_(0.5, 1.5)
            elif name not in ("A_log", "in_proj.weight", "out_proj.weight"):
                weight.normal_(std=0.5)
        base, rng = call_of(mixer), random.Random(5)
        width = mixer.in_proj.in_features
        kept: list[list[torch.Tensor]] = [[], []]
        got: list[list[torch.Tensor]] = [[], []]
        for _ in range(100):
            hidden = torch.randn(2, 4, width)
            projected = mixer.in_proj(hidden).double()
            call = dataclasses.replace(base, projected=projected, out=torch.empty(2, 4, 256, dtype=torch.float64))
            groups = call.norm_groups
            assert groups is not None
            decode_step_reference(call, groups, compute_dtype=torch.float64, between=torch.float64)
            accepted = [rng.randint(0, 4) for _ in range(2)]
            for row, count in enumerate(accepted):
                kept[row] += list(hidden[row, :count])
                got[row] += list(mixer.out_proj(call.out[row, :count].float()))
            replayssm_cute.commit(
                base.ring_start, base.prev_num_accepted_tokens, torch.arange(2), torch.tensor(accepted), tokens=4,
                window=8,
            )  # fmt: skip
        for row in range(2):
            expected = mixer(torch.stack(kept[row])[None])[0]
            found = torch.stack(got[row])
            assert (found - expected).norm() < 2e-5 * expected.norm()
