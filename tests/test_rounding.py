"""Rounding in torch: Philox against known answers, every format against its definition, no bias, scales of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayssm_cute import dtypes, rounding
from replayssm_cute.kernels import ptx

# Known answers of Random123's philox4x32-10 (its kat_vectors): counter, key, words.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
KINDS = tuple(rounding.GROUP)
FLOATS = ("bf16", "f16", "f8e4m3")
BITS = {"bf16": 16, "f16": 13, "f8e4m3": 16, "i8": 16}


def scalars(values: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v) for v in values)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert tuple(rounding.philox(scalars(counter), scalars(key), 10).tolist()) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", [1, 6, 7, 10, 16])
def test_any_number_of_rounds_as_in_plain_integers(rounds: int) -> None:
    """An implementation in Python's integers, which cannot wrap."""
    counter, key = (5, 0xDEADBEEF, 0x80000001, 77), (0xFFFFFFFE, 0x12345678)
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        high0, low0 = divmod(c0 * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    got = rounding.philox(scalars(counter), scalars(key), rounds).tolist()  # type: ignore[arg-type]
    assert got == [c0, c1, c2, c3]


def neighbours(kind: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two values of a format around each one, float64, by search over all of them."""
    codes = torch.arange(1 << 8 * dtypes.BYTES[kind])
    raw = codes.to(torch.uint8) if dtypes.BYTES[kind] == 1 else torch.where(codes > 0x7FFF, codes - 0x10000, codes)
    every = (raw if dtypes.BYTES[kind] == 1 else raw.to(torch.int16)).view(dtypes.TORCH[kind]).double()
    every = torch.unique(every[every.isfinite()] + 0.0)  # sorted, and one zero
    above = torch.searchsorted(every, values.double(), side="left").clamp_max(len(every) - 1)
    high = every[above]
    return torch.where(high == values, high, every[(above - 1).clamp_min(0)]), high


def samples(kind: str) -> torch.Tensor:
    """Values of every size that the format knows, subnormal ones too."""
    gen = torch.Generator().manual_seed(1)
    low, high = {"bf16": (-120, 120), "f16": (-26, 15), "f8e4m3": (-11, 8.7), "i8": (-3, 6.9)}[kind]
    size = 2.0 ** (torch.rand(4096, generator=gen) * (high - low) + low)
    return size * torch.where(torch.rand(4096, generator=gen) < 0.5, -1.0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_only_neighbours_come_out_and_exact_values_stay(kind: str) -> None:
    values = samples(kind)
    low, high = neighbours(kind, values)
    gen = torch.Generator().manual_seed(2)
    for _ in range(8):
        bits = torch.randint(0, 1 << BITS[kind], values.shape, generator=gen)
        got = rounding.stochastic(kind, values, bits).double()
        assert ((got == low) | (got == high)).all()
    most = torch.full(values.shape, (1 << BITS[kind]) - 1)
    exact = rounding.nearest(kind, values).float()
    assert torch.equal(rounding.stochastic(kind, exact, most).float(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_over_4096_draws(kind: str) -> None:
    """The mean of the draws of a value is the value, within four standard errors; to nearest it would not be."""
    values = samples(kind)[:64]
    low, high = neighbours(kind, values)
    slots = torch.arange(64)  # 64 slots x 64 elements of Philox bits: 4,096 draws for each value
    bits = rounding.random_bits(kind, torch.tensor([1234]), slots, 1, 64, 10).reshape(-1)
    draws = rounding.stochastic(kind, values[:, None].expand(64, 4096), bits.expand(64, 4096)).double()
    step = high - low
    share = torch.where(step > 0, (values.double() - low) / step.clamp_min(1e-300), 0.0)
    error = (draws.mean(1) - values.double()) / step.clamp_min(1e-300)
    limit = 4 * (share * (1 - share) / 4096).sqrt() + 2.0 ** -BITS[kind]
    assert (error.abs() <= limit).all()
    assert ((rounding.nearest(kind, values).double() - values) / step.clamp_min(1e-300)).abs().mean() > 0.1


def test_bits_are_uniform_and_every_element_has_its_own() -> None:
    for kind in KINDS:
        bits = rounding.random_bits(kind, torch.tensor([7]), torch.arange(4), 8, 512, 10)
        assert bits.shape == (4, 8, 512) and int(bits.min()) >= 0 and int(bits.max()) < 1 << BITS[kind]
        ones = torch.stack([bits >> k & 1 for k in range(BITS[kind])]).double().mean((1, 2, 3))
        assert ((ones - 0.5).abs() < 4 * 0.5 / 16384**0.5).all()
        # pairs in e4m3x4 have the same bits in two orders; beside that nothing repeats more than chance has it
        assert len(bits.unique()) > {"f16": 6500}.get(kind, 11000)


def test_bits_depend_on_seed_slot_head_and_element_alone() -> None:
    seed = torch.tensor([-5])
    bits = rounding.random_bits("bf16", seed, torch.tensor([9, 3]), 4, 64, 10)
    alone = rounding.random_bits("bf16", seed, torch.tensor([3]), 2, 64, 10)
    assert torch.equal(bits[1, :2], alone[0])
    for other in (
        rounding.random_bits("bf16", seed + 1, torch.tensor([9, 3]), 4, 64, 10),
        rounding.random_bits("bf16", seed + (1 << 32), torch.tensor([9, 3]), 4, 64, 10),
        rounding.random_bits("bf16", seed, torch.tensor([8, 4]), 4, 64, 10),
        rounding.random_bits("bf16", seed, torch.tensor([9, 3]), 4, 64, 9),
    ):
        assert (other == bits).double().mean() < 0.01
    assert (bits[:, 0] == bits[:, 1]).double().mean() < 0.1


@pytest.mark.parametrize("kind", FLOATS)
def test_values_without_neighbours(kind: str) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30])
    got = rounding.stochastic(kind, values, torch.full((7,), (1 << BITS[kind]) - 1)).float()
    end = {"f8e4m3": 448.0, "f16": float("inf"), "bf16": float("inf")}[kind]
    assert got[0].isnan() and got[1] == end and got[2] == -end
    assert got[3] == 0 and got[4] == 0 and torch.signbit(got[4])
    assert kind == "bf16" or (got[5] == end and got[6] == -end)


@pytest.mark.parametrize("kind", dtypes.EIGHT_BIT)
def test_rows_have_scales_of_their_own(kind: str) -> None:
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 1e-20, 1e20, 0.0, 1e-35]
    ).unsqueeze(1)
    codes, scale = rounding.encode(kind, values)
    assert scale is not None
    torch.testing.assert_close(scale[:3], values[:3].abs().amax(1) / rounding.LIMIT[kind])
    assert scale[3] == scale[4] == 1 and not codes.float()[3:].any(), "rows that are zero, or as good as"
    back = rounding.decode(codes, scale)
    for row in range(3):
        step = {"i8": scale[row], "f8e4m3": scale[row] * 32}[kind]
        assert (back[row] - values[row]).abs().max() <= step / 2 * 1.0001
        assert codes.float()[row].abs().max() == rounding.LIMIT[kind]


@pytest.mark.parametrize("kind", dtypes.EIGHT_BIT)
def test_rows_that_count_as_zero_have_zero_codes_whatever_the_bits(kind: str) -> None:
    values = torch.full((1, 64), -1e-35)
    for bits in (0, 0xFFFF):
        codes, scale = rounding.encode(kind, values, torch.full((1, 64), bits))
        assert scale == 1 and not codes.float().any()


@pytest.mark.parametrize("kind", dtypes.EIGHT_BIT)
def test_nan_stays_nan_in_its_row_alone(kind: str) -> None:
    values = torch.ones(2, 64)
    values[1, 5] = float("nan")
    back = rounding.decode(*rounding.encode(kind, values))
    assert back[1].isnan().all() and (back[0] == 1).all()


class TestPtx:
    """The text that kernels run, executed on numbers, is what torch says."""

    @staticmethod
    def words(values: torch.Tensor) -> np.ndarray:
        return np.ascontiguousarray(values.numpy().astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)

    def run(self, text: str, outputs: int, *operands: torch.Tensor) -> list[np.ndarray]:
        from simulator import ptx as machine

        arrays = [np.ascontiguousarray(t.numpy()) if t.is_floating_point() else self.words(t) for t in operands]
        return machine.run(text, outputs, arrays)

    @pytest.mark.parametrize("rounds", [1, 10])
    def test_philox(self, rounds: int) -> None:
        gen = torch.Generator().manual_seed(0)
        six = [torch.randint(0, 1 << 32, (32,), generator=gen) for _ in range(6)]
        got = np.stack(self.run(ptx.philox(rounds), 4, *six), -1)
        assert (got == rounding.philox(tuple(six[:4]), (six[4], six[5]), rounds).numpy()).all()

    @pytest.mark.parametrize("kind", dtypes.EIGHT_BIT)
    @pytest.mark.parametrize("io", dtypes.IO)
    def test_every_code_becomes_its_value(self, kind: str, io: str) -> None:
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(1)
        codes = codes[(codes & 0x7F) != 0x7F] if kind == "f8e4m3" else codes  # a row with NaN says so by its scale
        codes = torch.cat((codes, codes[: -len(codes) % 128]))
        gain = ptx.DECODE_GAIN.get((kind, io), 1.0)
        for block in codes.reshape(-1, 32, 4):
            word = sum(block[:, k].long() << 8 * k for k in range(4))
            low, high = self.run(ptx.decode_bytes(kind, io), 2, word)
            halves = np.stack((low, high), -1).view(np.int16).copy()
            got = torch.from_numpy(halves).view(dtypes.TORCH[io]).double() * gain
            assert torch.equal(got, block.contiguous().view(dtypes.TORCH[kind]).double())

    @pytest.mark.parametrize("kind", dtypes.EIGHT_BIT)
    @pytest.mark.parametrize("stochastic", [False, True])
    def test_four_values_become_a_word(self, kind: str, stochastic: bool) -> None:
        gen = torch.Generator().manual_seed(3)
        values = samples(kind).reshape(-1, 32, 4)
        for block in values[:16]:
            block[0] = torch.tensor([float("nan"), 500.0, -500.0, 0.0])
            random = [torch.randint(0, 1 << 32, (32,), generator=gen) for _ in range(2)]
            halves = torch.stack([h for w in random for h in (w & 0xFFFF, w >> 16)], -1)
            if kind == "f8e4m3":
                random = random[:1]
                halves = torch.stack((halves[:, 0], rounding._reversed(halves[:, 0]), halves[:, 1],
                                      rounding._reversed(halves[:, 1])), -1)  # fmt: skip
            text = ptx.encode_stochastic(kind) if stochastic else ptx.encode_nearest(kind)
            columns = [block[:, k].contiguous() for k in range(4)]
            (got,) = self.run(text, 1, *columns, *(random if stochastic else []))
            want = rounding.stochastic(kind, block, halves) if stochastic else rounding.nearest(kind, block)
            assert (got.view(np.uint8).reshape(32, 4) == want.view(torch.uint8).numpy()).all()

    @pytest.mark.parametrize("kind", ["bf16", "f16"])
    def test_a_pair_becomes_a_word(self, kind: str) -> None:
        gen = torch.Generator().manual_seed(4)
        for block in samples(kind).reshape(-1, 32, 2)[:32]:
            block[0] = torch.tensor([float("nan"), float("inf")])
            word = torch.randint(0, 1 << 32, (32,), generator=gen)
            mask = (1 << BITS[kind]) - 1
            bits = torch.stack((word & mask, word >> 16 & mask), -1)
            (got,) = self.run(ptx.pair_stochastic(kind), 1, block[:, 0].contiguous(), block[:, 1].contiguous(), word)
            want = rounding.stochastic(kind, block, bits).view(torch.int16).numpy()
            assert (got.view(np.int16).reshape(32, 2) == want).all()

    def test_the_largest_magnitude(self) -> None:
        a, b = torch.tensor([1.0, 2.0, float("nan"), 1.0] * 8), torch.tensor([-3.0, 1.0, 1.0, float("nan")] * 8)
        (got,) = self.run(ptx.MAX_ABS, 1, a, b)
        np.testing.assert_array_equal(got, np.array([3.0, 2.0, np.nan, np.nan] * 8, np.float32))
