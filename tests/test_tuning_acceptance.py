"""The stationary mix against a simulation of the cursors themselves, and quotas that are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replayssm_tuning.acceptance import Acceptance, deal, quotas, read_histogram, stationary
from replayssm_tuning.plan import SHIPPED

from replayssm_cute import ring


def simulated(lengths: tuple[float, ...], window: int, *, rows: int, steps: int) -> torch.Tensor:
    """Shares of pnat over many rows and steps, by the commit that serving uses."""
    tokens = len(lengths)
    gen = torch.Generator().manual_seed(3)
    start, pnat = torch.zeros(rows, dtype=torch.int32), torch.randint(0, window + 1, (rows,), generator=gen).int()
    slots = torch.arange(rows)
    seen = torch.zeros(window + 1, dtype=torch.float64)
    for step in range(steps):
        if step >= steps // 4:
            seen += torch.bincount(pnat.long(), minlength=window + 1)
        accepted = torch.multinomial(torch.tensor(lengths), rows, replacement=True, generator=gen) + 1
        ring.commit(start, pnat, slots, accepted.int(), tokens=tokens, window=window)
    return seen / seen.sum()


@pytest.mark.parametrize(
    ("lengths", "window"),
    [((0.25,) * 4, 16), ((1.0,), 16), ((0.09, 0.08, 0.07, 0.76), 16), ((0.5, 0.3, 0.2), 7), ((0.0, 1.0), 5)],
)
def test_the_mix_is_what_cursors_do(lengths: tuple[float, ...], window: int) -> None:
    mix = stationary(lengths, window)
    found = simulated(lengths, window, rows=2000, steps=400)
    assert torch.tensor(mix.pnat).double() == pytest.approx(found, abs=4e-3)
    assert sum(mix.pnat) == pytest.approx(1)


def test_known_flush_shares() -> None:
    assert stationary((0.25,) * 4, 16).flush == pytest.approx(0.1785, abs=5e-4)
    assert stationary((1.0,), 16).flush == pytest.approx(1 / 16)
    assert stationary((1 / 6,) * 6, 16).flush == pytest.approx(0.27, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 12))
def test_the_flush_share_is_that_of_a_renewal(raw: list[float], extra: int) -> None:
    """f = 1 / E[N], N the least number of lengths whose sum exceeds W - T: no chain and no linear system."""
    total = sum(raw)
    lengths = [1.0 / len(raw)] * len(raw) if total < 1e-3 else [r / total for r in raw]
    tokens, window = len(lengths), len(lengths) + extra
    # more[s]: how many lengths are still needed on average once their sum is s
    more = [0.0] * (window + 1)
    for reached in range(window - tokens, -1, -1):
        more[reached] = 1.0 + sum(q * more[reached + a] for a, q in enumerate(lengths, 1))
    mix = stationary(lengths, window)
    assert mix.flush == pytest.approx(1 / more[0], abs=1e-9)
    assert mix.mean_length / window - 1e-9 <= mix.flush <= mix.mean_length / (window - tokens + 1) + 1e-9


def test_the_note_has_the_numbers_that_the_code_gives() -> None:
    note = (Path(__file__).parents[1] / "reports" / "notes" / "acceptance_mix.md").read_text()
    published = Acceptance("published", shares=read_histogram(SHIPPED / "mixed-batch.csv"))
    lengths = {
        "the guaranteed token": (1.0,),
        "all drafts rejected": (1.0, 0, 0, 0),
        "uniform": (0.25,) * 4,
        "published lengths, those above 4 counted as 4": published.lengths(4),
        "all drafts accepted": (0, 0, 0, 1.0),
        "published lengths": published.lengths(6),
    }
    for words, shares in lengths.items():
        mix = stationary(shares, 16)
        row = f"| {len(shares)}, 16 | {words} | {round(mix.mean_length, 2):g} | {mix.flush:.2%} | {mix.mean_live:.2f} |"
        assert row in note, row


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=8).map(lambda x: tuple(v / sum(x) for v in x)), st.integers(0, 8)
)
@settings(max_examples=30, deadline=None)
def test_a_stationary_mix_does_not_move(lengths: tuple[float, ...], extra: int) -> None:
    window = len(lengths) + extra
    mix = stationary(lengths, window)
    after = [0.0] * (window + 1)
    for pnat, share in enumerate(mix.pnat):
        base = 0 if pnat + len(lengths) > window else pnat
        for accepted, chance in enumerate(lengths, 1):
            after[base + accepted] += share * chance
    assert after == pytest.approx(mix.pnat, abs=1e-9)
    # each flush makes room for what was accepted since the last one: as many rows come as go
    gone = sum(n * s for n, s in enumerate(mix.pnat) if n + len(lengths) > window)
    assert gone == pytest.approx(mix.mean_length, abs=1e-9)


def test_means_and_histograms_keep_their_numbers() -> None:
    lengths = Acceptance("m", mean=3.5).lengths(4)
    assert sum(k * s for k, s in enumerate(lengths, 1)) == pytest.approx(3.5)
    # one chance for every draft: the survivors' ratios are equal
    beyond = [sum(lengths[k:]) for k in range(4)]
    assert beyond[1] / beyond[0] == pytest.approx(beyond[2] / beyond[1]) == pytest.approx(beyond[3] / beyond[2])
    published = Acceptance("h", shares=(17.12, 10.44, 10.67, 15.73, 14.10, 31.95))
    assert published.lengths(6)[5] == pytest.approx(0.3195, abs=1e-4)
    cut = published.lengths(4)
    assert (1 - cut[0], cut[2] + cut[3], cut[3]) == pytest.approx((0.8288, 0.7244, 0.6177), abs=2e-4)


@pytest.mark.parametrize("mean", [1.0, 4.0])
def test_extreme_means(mean: float) -> None:
    lengths = Acceptance("m", mean=mean).lengths(4)
    assert lengths[int(mean) - 1] == pytest.approx(1, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda x: sum(x) > 0.1), st.integers(0, 700))
def test_quotas_are_exact(raw: list[float], rows: int) -> None:
    shares = [s / sum(raw) for s in raw]
    counts = quotas(shares, rows)
    assert sum(counts) == rows
    for share, count in zip(shares, counts, strict=True):
        assert abs(count - share * rows) < 1 + 1e-6


@pytest.mark.parametrize(("sets", "batch"), [(64, 1), (45, 1), (16, 4), (3, 64), (2, 512), (1, 7)])
def test_rows_are_dealt_by_quota_to_every_set(sets: int, batch: int) -> None:
    mix = stationary((0.25,) * 4, 16)
    dealt, tokens = deal(mix, sets, batch, seed=5)
    assert dealt.shape == tokens.shape == (sets, batch)
    assert bool((tokens == 4).all())
    counts = torch.bincount(dealt.flatten(), minlength=17).tolist()
    assert counts == quotas(mix.pnat, sets * batch)
    for value in range(17):
        per_set = (dealt == value).sum(1)
        assert int(per_set.max() - per_set.min()) <= 1
    flushing = (dealt > 12).sum(1)
    assert int(flushing.max() - flushing.min()) <= 1
    if batch >= 64:
        assert not torch.equal(dealt[0], dealt[0].sort().values)


RAGGED = (0.4, 0.1, 0.2, 0.3)


@pytest.mark.parametrize(("sets", "batch"), [(64, 1), (16, 4), (8, 8), (3, 64), (2, 512)])
@pytest.mark.parametrize("shares", [RAGGED, (0.25,) * 4, (0.5, 0.0, 0.0, 0.5)], ids=str)
def test_ragged_rows_are_dealt_by_quota_too(shares: tuple[float, ...], sets: int, batch: int) -> None:
    mix = stationary((0.1, 0.2, 0.3, 0.4), 16, shares)
    pnat, tokens = deal(mix, sets, batch, seed=3)
    rows = sets * batch
    assert torch.bincount(tokens.flatten() - 1, minlength=4).tolist() == quotas(shares, rows)
    assert torch.bincount(pnat.flatten(), minlength=17).tolist() == quotas(mix.pnat, rows)
    # neither leans on the other, and no set is given all of one kind
    flush = float((pnat + tokens > 16).float().mean())
    assert flush == pytest.approx(mix.flush, abs=max(0.02, 2.5 / rows))
    assert float(tokens.float().mean()) == pytest.approx(mix.mean_tokens, abs=2 / rows)
    if batch >= 8:
        of_sets = tokens.float().mean(1)
        assert float(of_sets.max() - of_sets.min()) < 12 / batch
    if rows >= 128:
        mean_at = [float(tokens[pnat == n].float().mean()) for n in range(17) if int((pnat == n).sum()) >= 8]
        assert len(mean_at) > 5 and max(mean_at) - min(mean_at) < 0.8


def test_the_mix_of_ragged_rows_is_that_of_a_simulation() -> None:
    lengths, window = (0.1, 0.2, 0.3, 0.4), 10
    mix = stationary(lengths, window, RAGGED)
    generator = torch.Generator().manual_seed(0)
    rows, steps = 4000, 60
    pnat = torch.zeros(rows, dtype=torch.long)
    seen, flushed = torch.zeros(window + 1), 0.0
    for step in range(steps):
        new = torch.multinomial(torch.tensor(RAGGED), rows, True, generator=generator) + 1
        kept = torch.minimum(torch.multinomial(torch.tensor(lengths), rows, True, generator=generator) + 1, new)
        flushes = pnat + new > window
        if step >= steps // 2:
            seen += torch.bincount(pnat, minlength=window + 1)
            flushed += float(flushes.float().mean())
        pnat = torch.where(flushes, kept, pnat + kept)
    assert mix.flush == pytest.approx(flushed / (steps // 2), abs=0.005)
    assert mix.pnat == pytest.approx((seen / seen.sum()).tolist(), abs=0.01)
    assert mix.mean_tokens == pytest.approx(2.4)
    pairs = [(i, j, a * b) for i, a in enumerate(lengths, 1) for j, b in enumerate(RAGGED, 1)]
    assert mix.mean_length == pytest.approx(sum(share * min(i, j) for i, j, share in pairs))


def test_rows_that_all_have_t_tokens_are_the_dense_mix() -> None:
    assert stationary((0.25,) * 4, 16, (0.0, 0.0, 0.0, 1.0)) == stationary((0.25,) * 4, 16)
    with pytest.raises(ValueError, match=r"tokens: got shares of 1\.\.3 tokens a row, expected 1\.\.4"):
        stationary((0.25,) * 4, 16, (0.5, 0.25, 0.25))


def test_histogram_files(tmp_path: Path) -> None:
    path = tmp_path / "h.csv"
    path.write_text("# counts\nlength,share\n2,30\n1,70\n")
    with pytest.raises(ValueError, match=r"h\.csv:2"):
        read_histogram(path)  # a header must be the first line
    path.write_text("length,share\n2,30\n\n1,70\n")
    assert read_histogram(path) == (70.0, 30.0)
    for text, words in (("1,70\n3,30\n", "gaps"), ("1,70\n1,30\n", "repeated"), ("", "gaps"), ("1,x\n2,3\n3\n", ":3")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_histogram(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"mean": 2.0, "uniform": True},
        {"shares": (0.5, -0.5)},
        {"shares": (0.0, 0.0)},
        {"shares": (float("nan"), 1.0)},
        {"shares": (0.3, 0.3)},
    ],
)
def test_wrong_distributions(wrong: dict) -> None:
    with pytest.raises(ValueError, match="'d'"):
        Acceptance("d", **wrong)
