"""Plan files: what loads, and that everything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from replayssm_tuning import plan

BASE = """
name = "small"
batches = [4, 1]
[problem]
heads = 16
head_dim = 64
d_state = 128
groups = 2
window = 16
[acceptance.published]
mean = 2.5
[[workload]]
label = "verify"
tokens = 4
acceptance = "published"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return str(path)


def test_a_small_plan_has_defaults_and_sorted_batches(tmp_path: Path) -> None:
    loaded = plan.load(written(tmp_path, BASE))
    assert loaded.batches == (1, 4)
    assert loaded.targets == ("sm_100a", "sm_90a")
    (workload,) = loaded.workloads
    assert (workload.problem.heads, workload.problem.tokens, workload.problem.state_dtype) == (16, 4, "f32")
    assert sum(k * s for k, s in enumerate(workload.lengths, 1)) == pytest.approx(2.5)


def test_the_shipped_plan_is_the_models_geometry() -> None:
    loaded = plan.load("nemotron3-super")
    facts = {(w.problem.heads, w.problem.head_dim, w.problem.d_state, w.problem.groups) for w in loaded.workloads}
    assert facts == {(128, 64, 128, 8)}
    assert [w.problem.tokens for w in loaded.workloads] == [4, 1]
    assert len(loaded.batches) == 10
    assert loaded.workloads[0].mix.mean_length == pytest.approx(3.5)
    assert all(w.acceptance.source for w in loaded.workloads)


def test_every_shipped_plan_loads() -> None:
    for path in plan.SHIPPED.glob("*.toml"):
        assert plan.load(path.stem).name == path.stem


def test_another_distribution_and_tensor_parallel_sizes(tmp_path: Path) -> None:
    loaded = plan.load(written(tmp_path, BASE), acceptance="uniform", tp=(1, 2))
    assert [(w.problem.heads, w.problem.groups) for w in loaded.workloads] == [(16, 2), (8, 1)]
    assert loaded.workloads[0].lengths == (0.25,) * 4
    assert loaded.workloads[1].label == "verify, TP 2"


def test_a_single_group_is_replicated_over_ranks(tmp_path: Path) -> None:
    loaded = plan.load(written(tmp_path, BASE.replace("groups = 2", "groups = 1")), tp=(4,))
    assert (loaded.workloads[0].problem.heads, loaded.workloads[0].problem.groups) == (4, 1)


def test_a_histogram_file_stands_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("length,share\n1,10\n2,20\n3,30\n4,20\n5,20\n")
    loaded = plan.load(written(tmp_path, BASE.replace("mean = 2.5", 'histogram_file = "h.csv"')))
    assert loaded.workloads[0].lengths == pytest.approx((0.1, 0.2, 0.3, 0.4))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("name =", "nmae =", ["nmae", "unknown"]),
        ("heads = 16", "heads = 15", ["groups", "15"]),
        ("heads = 16\n", "", ["heads", "missing"]),
        ("head_dim = 64", "head_dim = 65", ["head_dim", "65"]),
        ("tokens = 4", "tokens = 17", ["window", "17"]),
        ("tokens = 4", 'tokens = "4"', ["tokens"]),
        ("mean = 2.5", "mean = 5.0", ["published", "5.0", "1..4"]),
        ("mean = 2.5", 'mean = "2.5"', ["plan.toml"]),
        ("mean = 2.5", "mean = 2.5\nuniform = true", ["published", "exactly one"]),
        ("mean = 2.5", "histogram = [0.5, 0.5]", ["published", "1..2", "T is 4"]),
        ("mean = 2.5", "histogram = [0.5, 0.1, 0.1, 0.1]", ["published", "0.8"]),
        ("mean = 2.5", 'histogram_file = "none.csv"', ["histogram_file", "none.csv"]),
        ('acceptance = "published"', 'acceptance = "x"', ["'x'", "published", "uniform"]),
        ("batches = [4, 1]", "batches = [4, 4]", ["batches", "distinct"]),
        ("batches = [4, 1]", "batches = []", ["batches"]),
        ("batches = [4, 1]\n", "", ["batches", "None"]),
        ("batches = [4, 1]", 'batches = [1]\nbudget = "soon"', ["budget", "soon"]),
        ("batches = [4, 1]", 'batches = [1]\ntargets = ["sm_42"]', ["sm_42"]),
        ("batches = [4, 1]", "batches = [1]\ntp = [3]", ["tp", "3"]),
        ("[[workload]]", "[workload]", ["[[workload]]"]),
        ("[problem]", "[problem", ["TOML"]),
    ],
)
def test_a_wrong_plan_is_refused_by_name(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in BASE
    with pytest.raises(plan.PlanError) as caught:
        plan.load(written(tmp_path, BASE.replace(old, new, 1)))
    for word in [*words, "plan.toml"]:
        assert word in str(caught.value)


def test_the_same_problem_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(plan.PlanError, match="twice"):
        plan.load(written(tmp_path, BASE + '[[workload]]\ntokens = 4\nacceptance = "uniform"\n'))


def test_an_unknown_plan_names_the_shipped_ones() -> None:
    with pytest.raises(plan.PlanError, match="nemotron3-super"):
        plan.load("nemotron9")


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("3m", 180), ("1.5h", 5400), (45, 45), ("2.5", 2.5)])
def test_durations(text: str | int, expected: float) -> None:
    assert plan.seconds(text) == expected


@pytest.mark.parametrize("text", ["", "0s", "-3s", "5d", "m", "3 m s"])
def test_wrong_durations(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        plan.seconds(text)
