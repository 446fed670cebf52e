"""Plan files: what loads, and that everything else is refused by name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from replayssm_tuning import acceptance, cli, plan, space

from replayssm_cute import target as targets
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem

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


def test_lengths_that_a_plan_does_not_name_are_the_published_ones(tmp_path: Path) -> None:
    """P(length >= 2..6) = 82.88, 72.44, 61.77, 46.04, 31.95 %: for a smaller T the longer lengths count as T."""
    text = BASE.replace('acceptance = "published"', "")
    at_least = (1.0, 0.8288, 0.7244, 0.6177, 0.4604, 0.3195)
    for tokens in (2, 4, 6):
        (workload,) = plan.load(written(tmp_path, text.replace("tokens = 4", f"tokens = {tokens}"))).workloads
        assert workload.acceptance.name == "mixed-batch"
        assert "3,152,228 steps" in workload.acceptance.source
        found = [sum(workload.lengths[k:]) for k in range(tokens)]
        assert found == pytest.approx(at_least[:tokens], abs=2e-4)
    (longer,) = plan.load(written(tmp_path, text.replace("tokens = 4", "tokens = 7"))).workloads  # not covered
    assert longer.acceptance.uniform
    named = BASE.replace("mean = 2.5", "mean = 2.5\n[acceptance.mixed-batch]\nmean = 3.0")
    (own,) = plan.load(written(tmp_path, named.replace('"published"', '"mixed-batch"'))).workloads
    assert own.mix.mean_length == pytest.approx(3.0)  # a plan's own of that name counts


SHIPPED = sorted(p.stem for p in plan.SHIPPED.glob("*.toml"))
GPUS = ("h200", "b200", "gb200", "b300", "gb300", "rtx-pro-6000")
# What the models are, written down apart from the plans: Mamba2 layers; heads, head_dim, d_state, groups of one layer.
MODELS = {
    "Nemotron-3 Nano 4B": (21, 96, 80, 128, 8),
    "Nemotron-3 Nano 30B-A3B": (23, 64, 64, 128, 8),
    "Nemotron-3 Super 120B-A12B": (40, 128, 64, 128, 8),
    "Nemotron-3 Ultra 550B-A55B": (48, 256, 64, 128, 8),
    "Nemotron-3.5 Lightning 30B-A3B": (23, 64, 64, 128, 8),
    "Nemotron-H 4B": (24, 112, 64, 128, 8),
    "Nemotron-H 8B": (24, 128, 64, 128, 8),
    "Nemotron-H 47B": (45, 256, 64, 256, 8),
    "Nemotron-H 56B": (54, 256, 64, 256, 8),
    "Nemotron Nano v2 9B": (27, 128, 80, 128, 8),
    "Nemotron Nano v2 12B": (28, 128, 80, 128, 8),
    "Mamba2 130M": (24, 24, 64, 128, 1),
    "Mamba2 370M": (48, 32, 64, 128, 1),
    "Mamba2 780M": (48, 48, 64, 128, 1),
    "Mamba2 1.3B": (48, 64, 64, 128, 1),
    "Mamba2 2.7B": (64, 80, 64, 128, 1),
    "Codestral Mamba 7B": (64, 128, 64, 128, 8),
    "Bamba 9B v1": (29, 128, 64, 128, 1),
    "Granite 4.0-H micro": (36, 64, 64, 128, 1),
    "Granite 4.0-H tiny": (36, 48, 64, 128, 1),
    "Granite 4.0-H small": (36, 128, 64, 128, 1),
    "Falcon-H1 0.5B": (36, 24, 64, 128, 1),
    "Falcon-H1 1.5B": (24, 48, 64, 256, 1),
    "Falcon-H1 3B": (32, 32, 128, 256, 1),
    "Falcon-H1 7B": (44, 24, 128, 256, 1),
    "Falcon-H1 34B": (72, 32, 128, 256, 2),
    "Zamba2 1.2B": (38, 64, 64, 128, 1),
    "Zamba2 2.7B": (54, 80, 64, 64, 1),
    "Zamba2 7B": (81, 112, 64, 64, 2),
}
# Tokens a step beyond 1, by documented drafts; one set for each plan that serves the model with them.
DRAFTED = {
    "nemotron3-super": {4},
    "nemotron3-super-ragged": {4},
    "nemotron3-ultra": {4, 5, 6},
    "nemotron3-ultra-7-drafts": {8},
    "nemotron3-nano-30b": {2, 3, 4, 5, 6},
}


def models_of(loaded: plan.TuningPlan) -> list[str]:
    """The models that a shipped plan's title names."""
    return [name.split(" with ")[0] for name in loaded.title.split(", ")]


def test_every_model_has_a_plan_and_no_plan_names_another() -> None:
    named = {model for name in SHIPPED for model in models_of(plan.load(name))}
    assert named == set(MODELS)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_is_its_models_geometry_at_every_size(name: str) -> None:
    loaded = plan.load(name)
    assert loaded.name == name
    assert loaded.batches == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    for model in models_of(loaded):
        layers, heads, head_dim, d_state, groups = MODELS[model]
        sizes = [1, 2] if groups == 2 else [1, 2, 4, 8]
        expected = {(heads // n, head_dim, d_state, max(1, groups // n)) for n in sizes}
        found = {(w.problem.heads, w.problem.head_dim, w.problem.d_state, w.problem.groups) for w in loaded.workloads}
        assert found == expected
        assert re.search(rf"\b{layers} (Mamba2 )?layers\b", loaded.source)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_has_its_tokens_and_state_dtypes(name: str) -> None:
    loaded = plan.load(name)
    pairs = {(w.problem.state_dtype, w.problem.tokens) for w in loaded.workloads}
    dtypes = ("f32", "f16") if name in DRAFTED else ("f32",)
    one = set() if name in ("nemotron3-ultra-7-drafts", "nemotron3-super-ragged") else {1}
    assert {w.problem.ragged for w in loaded.workloads} == {name.endswith("-ragged")}
    assert pairs == {(d, t) for d in dtypes for t in DRAFTED.get(name, {4}) | one}
    assert ("stochastic rounding" in loaded.source) == ("f16" in dtypes)
    assert {w.problem.window for w in loaded.workloads} == {16}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_has_sources_and_says_what_is_assumed(name: str) -> None:
    loaded = plan.load(name)
    assert "config" in loaded.source or "documentation" in loaded.source
    assert all(w.acceptance.source for w in loaded.workloads)
    for w in loaded.workloads:
        if w.problem.tokens > 1 and name not in DRAFTED:
            assert w.acceptance.name == "mixed-batch"
            assert w.mix.mean_length == pytest.approx(1 + 0.8288 + 0.7244 + 0.6177, abs=2e-4)
            assert "model not stated" in w.acceptance.source
            assert "acceptance lengths of the mixed-batch benchmark are assumptions" in loaded.source
            assert "assumed" in w.label
            assert "assumption" in loaded.source


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", SHIPPED)
def test_the_default_config_runs_every_shipped_cell(name: str, gpu: str) -> None:
    loaded, target = plan.load(name), targets.named(gpu)
    for w in loaded.workloads:
        for batch in loaded.batches:
            config = default_config(w.problem, target, batch)
            assert config.invalid_reason(w.problem, target) is None
            assert config.ctas(w.problem, batch) > 0


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_leaves_a_choice_of_configs(name: str) -> None:
    for w in plan.load(name).workloads:
        assert len(space.configs(w.problem, targets.named("h200"))) > 1


@pytest.mark.parametrize("name", SHIPPED)
def test_every_distribution_of_a_shipped_plan_can_be_chosen(name: str) -> None:
    named = tomllib.loads(plan.find(name).read_text())["acceptance"]
    for choice in [*named, "uniform"]:
        for w in plan.load(name, acceptance=choice).workloads:
            assert w.acceptance.name == (choice if w.problem.tokens > 1 else "one-token")
            assert w.acceptance.source
            assert sum(w.lengths) == pytest.approx(1.0)


RAGGED = """
[rows.short]
histogram = [60, 40, 0, 0]
[[workload]]
label = "packed"
tokens = 4
ragged = true
acceptance = "published"
"""


def test_ragged_rows_have_tokens_by_a_distribution(tmp_path: Path) -> None:
    dense, assumed = plan.load(written(tmp_path, BASE + RAGGED)).workloads
    assert (dense.rows, dense.tokens, set(dense.load)) == (None, None, {"lengths"})
    assert assumed.problem.ragged and assumed.tokens == (0.25,) * 4
    assert assumed.rows is not None and "Assumed" in assumed.rows.source
    _, named = plan.load(written(tmp_path, BASE + RAGGED + 'rows = "short"\n')).workloads
    assert named.tokens == pytest.approx((0.6, 0.4, 0, 0))
    assert named.load == {"lengths": pytest.approx(dense.lengths), "tokens": pytest.approx([0.6, 0.4, 0, 0])}
    assert named.mix.mean_tokens == pytest.approx(1.4)
    assert named.mix.mean_length < named.mix.mean_tokens < dense.mix.mean_length < 4
    assert named.mix.flush < dense.mix.flush


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('rows = "short"', 'rows = "long"'), "rows 'long' is unknown; known: short, uniform"),
        (("ragged = true", "ragged = false"), "got 'short' with ragged = false, expected ragged = true, or no rows"),
        (("[60, 40, 0, 0]", "[60, 40]"), "covers lengths 1..2, T is 4"),
        (("histogram = [60, 40, 0, 0]", "shares = [1]"), r"rows.short: unknown keys ['shares']"),
        (("[rows.short]\nhistogram = [60, 40, 0, 0]", "[rows]\nshort = 1"), "rows: expected sections"),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    text = RAGGED + 'rows = "short"\n'
    assert change[0] in text
    with pytest.raises(plan.PlanError, match=re.escape(words)):
        plan.load(written(tmp_path, BASE + text.replace(*change)))


def test_published_means_are_the_plans() -> None:
    def mean(name: str, choice: str | None = None) -> float:
        return plan.load(name, acceptance=choice, tp=(1,)).workloads[0].mix.mean_length

    assert 3.47 <= mean("nemotron3-super") <= 3.54
    assert mean("nemotron3-super", "speed-bench") == pytest.approx(3.45)
    found = [mean("nemotron3-ultra-7-drafts", c) for c in (None, "temperature-1", "roleplay", "retrieval")]
    assert found == pytest.approx([4.39, 4.17, 2.80, 5.21])


def test_the_published_histogram_and_its_truncations() -> None:
    shares = acceptance.read_histogram(plan.SHIPPED / "mixed-batch.csv")
    assert shares == (17.12, 10.44, 10.67, 15.73, 14.10, 31.95)
    of = {w.problem.tokens: w for w in plan.load("nemotron3-nano-30b", tp=(1,)).workloads}
    assert of[6].mix.mean_length == pytest.approx(3.95, abs=0.005)
    beyond = [of[t].lengths[-1] for t in (2, 3, 4, 5, 6)]  # P(length >= T)
    assert beyond == pytest.approx([0.8288, 0.7244, 0.6177, 0.4604, 0.3195], abs=2e-4)
    assert "3,152,228 steps" in of[6].acceptance.source
    assert of[6].acceptance.name == "mixed-batch"


def test_listing_names_every_plan_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in (*SHIPPED, *MODELS):
        assert word in shown


def test_the_list_is_a_line_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["plan", *SHIPPED]
    nano = next(line for line in lines if line.startswith("nemotron3-nano-30b"))
    assert re.fullmatch(r"\S+ +12 +1 2 4 8 +1 2 3 4 5 6 +f32 f16 +Nemotron-3 Nano 30B-A3B, .*", nano)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain-plan", "--plan", name]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    loaded = plan.load(name)
    assert loaded.source in shown
    for w in loaded.workloads:
        assert f"{w.label} {w.problem.label()}" in shown
        assert w.acceptance.source in shown


def test_another_distribution_and_tensor_parallel_sizes(tmp_path: Path) -> None:
    loaded = plan.load(written(tmp_path, BASE), acceptance="uniform", tp=(1, 2))
    assert [(w.problem.heads, w.problem.groups) for w in loaded.workloads] == [(16, 2), (8, 1)]
    assert loaded.workloads[0].lengths == (0.25,) * 4
    assert loaded.workloads[1].label == "verify, TP 2"


def test_a_single_group_is_replicated_over_ranks(tmp_path: Path) -> None:
    loaded = plan.load(written(tmp_path, BASE.replace("groups = 2", "groups = 1")), tp=(4,))
    assert (loaded.workloads[0].problem.heads, loaded.workloads[0].problem.groups) == (4, 1)


def test_one_token_needs_no_distribution(tmp_path: Path) -> None:
    text = BASE + "[[workload]]\ntokens = 1\n"
    for choice in (None, "uniform", "published"):
        verify, one = plan.load(written(tmp_path, text), acceptance=choice).workloads
        assert (one.acceptance.name, one.lengths, one.mix.flush) == ("one-token", (1.0,), pytest.approx(1 / 16))
        assert verify.acceptance.name == (choice or "published")


def test_a_part_of_a_plan_keeps_its_share_of_the_budget(tmp_path: Path) -> None:
    text = BASE.replace("batches", 'budget_per_workload = "1m"\nbatches')
    for state, tokens in (("f16", 4), ("f32", 1), ("f16", 1)):
        text += f'[[workload]]\nlabel = "{state} {tokens}"\ntokens = {tokens}\nstate_dtype = "{state}"\n'
    path = written(tmp_path, text)

    def kept(**choice: tuple[str, ...] | tuple[int, ...]) -> tuple[list[str], float]:
        loaded = plan.load(path, **choice)  # type: ignore[arg-type]
        return [w.label for w in loaded.workloads], loaded.budget_s

    assert kept() == (["verify", "f16 4", "f32 1", "f16 1"], 240)
    assert kept(states=("f16",)) == (["f16 4", "f16 1"], 120)
    assert kept(tokens=(1,), states=("f32", "bf16")) == (["f32 1"], 60)
    assert kept(tokens=(4,), tp=(1, 2)) == (["verify", "verify, TP 2", "f16 4", "f16 4, TP 2"], 240)
    with pytest.raises(plan.PlanError, match=r"no workload is left.* states f16, f32 and T 1, 4"):
        plan.load(path, states=("bf16",))


def test_a_budget_for_each_workload_follows_the_sizes(tmp_path: Path) -> None:
    path = written(tmp_path, BASE.replace("batches", 'budget_per_workload = "1m"\nbatches'))
    assert plan.load(path).budget_s == 60
    assert plan.load(path, tp=(1, 2)).budget_s == 120
    assert plan.load(written(tmp_path, BASE), tp=(1, 2)).budget_s == 240


@pytest.mark.parametrize(
    ("heads", "groups", "size", "expected"),
    [(128, 8, 1, (128, 8)), (128, 8, 8, (16, 1)), (112, 2, 2, (56, 1)), (24, 1, 8, (3, 1)), (32, 1, 32, (1, 1))],
)
def test_a_rank_has_its_share_of_heads_and_groups(
    heads: int, groups: int, size: int, expected: tuple[int, int]
) -> None:
    rank = plan.tensor_parallel(Problem(heads, 64, 128, groups, 4, 16, state_dtype="f16"), size)
    assert (rank.heads, rank.groups) == expected
    assert (rank.head_dim, rank.d_state, rank.tokens, rank.window, rank.state_dtype) == (64, 128, 4, 16, "f16")


@pytest.mark.parametrize(
    ("heads", "groups", "size", "words"),
    [
        (128, 8, 16, ["16", "128 heads", "8 groups", "1, 2, 4, 8"]),  # more ranks than groups
        (112, 8, 3, ["3", "112 heads", "1, 2, 4, 8"]),
        (32, 2, 4, ["4", "2 groups", "1, 2"]),
        (24, 1, 16, ["16", "24 heads", "replicated", "1, 2, 3, 4, 6, 8, 12, 24"]),
        (6, 2, 3, ["3", "2 groups", "1, 2"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused(heads: int, groups: int, size: int, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^tp: got ") as caught:
        plan.tensor_parallel(Problem(heads, 64, 128, groups, 4, 16), size)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).endswith(f"expected one of {words[-1]}")


def test_a_histogram_files_comments_are_its_source(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("length,share\n# Counted on\n# a Monday.\n1,1\n2,1\n3,1\n4,1\n")
    text = BASE.replace("mean = 2.5", 'histogram_file = "h.csv"')
    assert plan.load(written(tmp_path, text)).workloads[0].acceptance.source == "Counted on a Monday."
    text = BASE.replace("mean = 2.5", 'histogram_file = "h.csv"\nsource = "the plan\'s own"')
    assert plan.load(written(tmp_path, text)).workloads[0].acceptance.source == "the plan's own"


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
        (
            "mean = 2.5",
            'histogram = [1, 1, 1, 1]\nhistogram_file = "plan.toml"',
            ["published", "histogram and histogram_file"],
        ),
        ('acceptance = "published"', 'acceptance = "x"', ["'x'", "published", "uniform"]),
        ("batches = [4, 1]", "batches = [4, 4]", ["batches", "distinct"]),
        ("batches = [4, 1]", "batches = []", ["batches"]),
        ("batches = [4, 1]\n", "", ["batches", "None"]),
        ("batches = [4, 1]", 'batches = [1]\nbudget = "soon"', ["budget", "soon"]),
        ("batches = [4, 1]", 'batches = [1]\nbudget_per_workload = "soon"', ["budget_per_workload", "soon"]),
        ("batches = [4, 1]", 'batches = [1]\nbudget = "9s"\nbudget_per_workload = "9s"', ["one of them"]),
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
