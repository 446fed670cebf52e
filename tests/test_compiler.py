"""The compile cache: keys, memory, disk, damage, races, read-only directories, captures, the command line."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import H200, RESOURCES, SMALL, FakeCompiled, FakeKernel

from replayssm_cute import compile_cli, compiler, fingerprint, kernel_files, resources
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import named

fake_compiler = fakes.fake_compiler

CONFIG = TileConfig()


def run_python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- fingerprints and keys -------------------------------------------------------------------------


def test_source_fingerprint_ignores_newlines_order_and_comments_and_nothing_else() -> None:
    one = fingerprint.of_sources({"a.py": b"x\ny\n", "b.py": b"z"})
    assert one == fingerprint.of_sources({"b.py": b"z", "a.py": b"x\r\ny\r\n"})
    assert one == fingerprint.of_sources({"a.py": b"# why\nx  # because\n\n\ny\n", "b.py": b"z # f'#{1}'"})
    others = ({"a.py": b"x\ny\n"}, {"a.py": b"x\ny\nz", "b.py": b""}, {"c.py": b"x\ny\n", "b.py": b"z"})
    assert len({one, *(fingerprint.of_sources(o) for o in others)}) == 4


def test_what_looks_like_a_comment_in_a_string_counts() -> None:
    sources = (b"x = 'a # b'\n", b"x = 'a # c'\n", b"x = f'{a}# b'  # c\n", b'"""\n# doc\n"""\n', b'"""\n# dot\n"""\n')
    assert len({fingerprint.of_sources({"a.py": s}) for s in sources}) == len(sources)
    assert fingerprint.without_comments(b"x = f'{a}# b'  # c\n") == b"x = f'{a}# b'"


def test_kernel_sources_are_relative_and_cover_what_shapes_code() -> None:
    names = set(fingerprint.kernel_sources())
    assert {"ring.py", "config.py", "problem.py", "dtypes.py", "kernels/step.py"} <= names
    assert not [n for n in names if n.startswith("/") or "\\" in n or ".." in n]


@pytest.mark.fault(28)
def test_key_is_equal_in_another_process(tmp_path: Path) -> None:
    code = f"""
        from replayssm_cute import compiler
        from replayssm_cute.config import TileConfig
        from replayssm_cute.problem import Problem
        print(compiler.key(Problem.from_json({SMALL.to_json()!r}), TileConfig(), "sm_90a"))
    """
    other = run_python(code, PYTHONHASHSEED="1234", REPLAYSSM_CACHE_DIR=str(tmp_path))
    assert other == compiler.key(SMALL, CONFIG, "sm_90a")


@pytest.mark.fault(29)
def test_key_changes_with_every_problem_field() -> None:
    other: dict[str, Any] = {
        "heads": 8, "head_dim": 128, "d_state": 128, "groups": 4, "tokens": 3, "window": 5, "state_dtype": "bf16",
        "io_dtype": "f16", "dt_dtype": "f32", "a_dtype": "bf16", "d_dtype": None, "dt_bias_dtype": "f32",
        "has_z": True, "dt_softplus": False, "index_dtype": "i64", "pdl": True, "compact": False,
        "ragged": True, "copy_dtype": "i8", "philox_rounds": 7, "precision": "highest",
    }  # fmt: skip
    base = dataclasses.replace(SMALL, dt_dtype="f32")  # so that io_dtype may change alone
    other["dt_dtype"] = "bf16"
    assert set(other) == {f.name for f in dataclasses.fields(Problem)}, "a new field needs a value here"
    rounds = other.pop("philox_rounds")  # an f32 state is not rounded
    problems = [base] + [dataclasses.replace(base, **{name: value}) for name, value in other.items()]
    problems.append(dataclasses.replace(base, state_dtype="bf16", philox_rounds=rounds))
    assert len({compiler.key(p, CONFIG, "sm_90a") for p in problems}) == len(other) + 2


def test_key_changes_with_config_arch_toolchain_sources_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [compiler.key(SMALL, CONFIG, "sm_90a"), compiler.key(SMALL, CONFIG, "sm_100a")]
    other: dict[str, Any] = {
        "heads_per_cta": 2,
        "stages": 2,
        "head_split": 2,
        "ring": "whole",
        "ctas_per_sm": 2,
        "tail_rows": 1,
        "parallel_heads": 2,
        "tiles_per_warp": 2,
        "keep_b": False,
        "opt_level": 2,
    }
    assert set(other) == {f.name for f in dataclasses.fields(TileConfig)}, "a new field needs a value here"
    for name, value in other.items():
        keys.append(compiler.key(SMALL, dataclasses.replace(CONFIG, **{name: value}), "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_COMPILER_OPT", "remarks")
        keys.append(compiler.key(SMALL, CONFIG, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "kernels", lambda: "0" * 64)
        keys.append(compiler.key(SMALL, CONFIG, "sm_90a"))
    toolchain = fingerprint.toolchain()
    for name in ("dsl", "dsl_wheels", "tvm_ffi"):
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "toolchain", lambda n=name: {**toolchain, n: "9"})
            keys.append(compiler.key(SMALL, CONFIG, "sm_90a"))
    assert len(set(keys)) == len(keys)


def test_key_ignores_where_the_dsl_writes_and_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiler.key(SMALL, CONFIG, "sm_90a")
    for name in ("CUTE_DSL_DUMP_DIR", "CUTE_DSL_KEEP", "CUTE_DSL_LOG_LEVEL", "CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    assert compiler.key(SMALL, CONFIG, "sm_90a") == before


def test_toolchain_is_found() -> None:
    assert fingerprint.toolchain()["dsl"].startswith("4.8.")
    assert len(fingerprint.toolchain()["dsl_wheels"]) == 16


# ---- memory and disk -------------------------------------------------------------------------------


def test_compiled_once_then_from_memory_then_from_disk(fake_compiler: Path) -> None:
    first = compiler.get(SMALL, CONFIG, H200)
    assert compiler.counters() == compiler.Counters(compiled=1)
    assert compiler.get(SMALL, CONFIG, H200) is first
    assert compiler.counters() == compiler.Counters(compiled=1, memory=1)
    compiler.clear_memory()
    again = compiler.get(SMALL, CONFIG, H200)
    assert isinstance(again, FakeKernel)
    assert (again.problem, again.config) == (SMALL, CONFIG)
    assert compiler.counters() == compiler.Counters(compiled=1, disk=1, memory=1)
    assert not list(fake_compiler.rglob("*.tmp*"))


def test_resources_of_a_stored_kernel_need_no_compilation(fake_compiler: Path) -> None:
    compiler.get(SMALL, CONFIG, H200)
    assert resources.inspect(SMALL, CONFIG, H200) == RESOURCES
    assert compiler.counters() == compiler.Counters(compiled=1, disk=1)


def test_invalid_config_is_refused_before_anything_is_compiled(fake_compiler: Path) -> None:
    with pytest.raises(ValueError, match=r"config: h3 .* cannot run .*: heads_per_cta 3 does not divide"):
        compiler.get(SMALL, TileConfig(heads_per_cta=3), H200)
    assert compiler.counters() == compiler.Counters()


def _damage_truncate(o: Path, meta: Path) -> None:
    o.write_bytes(o.read_bytes()[:-7])


def _damage_flip(o: Path, meta: Path) -> None:
    data = bytearray(o.read_bytes())
    data[10] ^= 1
    o.write_bytes(data)


def _damage_missing_object(o: Path, meta: Path) -> None:
    o.unlink()


def _damage_meta_truncated(o: Path, meta: Path) -> None:
    meta.write_text(meta.read_text()[:40])


def _damage_meta_is_a_list(o: Path, meta: Path) -> None:
    meta.write_text("[]")


def _damage_meta_misses_a_field(o: Path, meta: Path) -> None:
    data = json.loads(meta.read_text())
    del data["resources"]["registers"]
    meta.write_text(json.dumps(data))


def _damage_meta_nested(o: Path, meta: Path) -> None:
    meta.write_text("[" * 100_000)


def _damage_meta_binary(o: Path, meta: Path) -> None:
    meta.write_bytes(b"\xff\xfe\x00")


def _damage_entry_of_another_kernel(o: Path, meta: Path) -> None:
    other = compiler.entry(dataclasses.replace(SMALL, dt_softplus=False), CONFIG, H200)
    compiler.reset_counters()
    compiler._counts["compiled"] = 1
    o.write_bytes(other.object_bytes())
    meta.write_bytes(other.path.with_suffix(".json").read_bytes())


@pytest.mark.parametrize("damage", [v for k, v in sorted(globals().items()) if k.startswith("_damage_")])
def test_damaged_entry_is_a_miss_that_says_so_once(
    damage: Any,
    fake_compiler: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = compiler.entry(SMALL, CONFIG, H200)
    damage(found.path, found.path.with_suffix(".json"))
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        kernel = compiler.get(SMALL, CONFIG, H200)
    assert isinstance(kernel, FakeKernel)
    assert compiler.counters().compiled == 2
    assert [r.message for r in caplog.records if "is damaged" in r.message and str(found.path.parent) in r.message]
    assert len(caplog.records) == 1
    compiler.clear_memory()
    compiler.get(SMALL, CONFIG, H200)
    assert compiler.counters().disk == 1, "the entry was not repaired"


def test_entry_that_does_not_load_is_compiled_anew(
    fake_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler.entry(SMALL, CONFIG, H200)
    attempts: list[Path] = []

    def load(path: Path) -> FakeKernel:
        attempts.append(path)
        if len(attempts) == 1:
            raise RuntimeError("symbols not found")
        return FakeKernel(path)

    monkeypatch.setattr(compiler, "_load", load)
    compiler.get(SMALL, CONFIG, H200)
    assert len(attempts) == 2
    assert compiler.counters().compiled == 2
    assert "does not load (symbols not found)" in caplog.text


def test_failing_export_leaves_nothing_behind(fake_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(compiled: FakeCompiled, path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_export", half)
        with pytest.raises(RuntimeError, match="killed"):
            compiler.get(SMALL, CONFIG, H200)
    assert [p for p in fake_compiler.rglob("*") if p.is_file() and p.suffix != ".lock"] == []
    compiler.get(SMALL, CONFIG, H200)
    assert compiler.counters().compiled == 2


def test_what_a_killed_writer_left_is_removed(fake_compiler: Path) -> None:
    directory = fake_compiler / compiler.key(SMALL, CONFIG, H200.arch)
    directory.mkdir(parents=True)
    for name in ("1.tmp.o", "2.tmp.json.tmp"):
        (directory / f"{kernel_files.host()}.{name}").write_text("half")
    (directory / "another-host.3.tmp.o").write_text("half")
    compiler.get(SMALL, CONFIG, H200)
    assert sorted(p.name for p in directory.iterdir()) == sorted(
        ("another-host.3.tmp.o", f"{kernel_files.host()}.o", f"{kernel_files.host()}.json")
    )


@pytest.mark.parametrize("where", ["file", "devnull", "name too long", "no such user"])
def test_unwritable_directory_keeps_kernels_in_memory_and_says_so_once(
    where: str,
    fake_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    directory = {
        "file": tmp_path / "file" / "cache",
        "devnull": Path(os.devnull) / "cache",
        "name too long": tmp_path / ("x" * 300),  # the system refuses even to say whether it exists
        "no such user": Path("~no-such-user/cache"),
    }[where]
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(directory))
    first = compiler.get(SMALL, CONFIG, H200)
    compiler.get(SMALL, TileConfig(heads_per_cta=2), H200)
    assert compiler.get(SMALL, CONFIG, H200) is first
    assert compiler.counters() == compiler.Counters(compiled=2, memory=1)
    assert resources.inspect(SMALL, CONFIG, H200) == RESOURCES
    assert compiler.counters().compiled == 2
    messages = [r.message for r in caplog.records]
    assert len(messages) == 1
    assert str(directory) in messages[0]
    assert "REPLAYSSM_CACHE_DIR" in messages[0]


def test_no_home_ends_in_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("REPLAYSSM_CACHE_DIR")
    monkeypatch.setattr(Path, "home", no_home)
    assert compiler.cache_dir() == Path(os.devnull) / "replayssm_cute"


def test_entry_of_a_richer_cpu_is_not_loaded_and_stays(
    fake_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "host_isa", lambda: frozenset({"x86_64", "avx2", "avx512f"}))
        rich = compiler.entry(SMALL, CONFIG, H200)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "host_isa", lambda: frozenset({"x86_64", "avx2"}))
        poor = compiler.entry(SMALL, CONFIG, H200)
        assert compiler.counters().compiled == 2
    assert rich.path != poor.path
    assert rich.path.exists()
    with monkeypatch.context() as patch:  # a third CPU that can run the second entry only
        patch.setattr(fingerprint, "host_isa", lambda: frozenset({"x86_64", "avx2", "sse4a"}))
        assert compiler.entry(SMALL, CONFIG, H200).path == poor.path
    assert compiler.counters().compiled == 2


def test_capture_refuses_to_compile_and_names_the_fix(
    fake_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler.get(SMALL, CONFIG, H200)
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    compiler.get(SMALL, CONFIG, H200)
    with pytest.raises(RuntimeError) as caught:
        compiler.get(SMALL, TileConfig(heads_per_cta=2), H200, batch=7)
    for part in (SMALL.label(), TileConfig(heads_per_cta=2).label(), "batch 7", "replayssm_cute.warmup"):
        assert part in str(caught.value)
    assert compiler.counters().compiled == 1


def test_racing_processes_compile_once(tmp_path: Path) -> None:
    code = f"""
        import time
        from pathlib import Path
        from replayssm_cute import compiler, resources
        from fakes import RESOURCES, SMALL, H200, FakeCompiled, FakeKernel
        from replayssm_cute.config import TileConfig
        def build(*what):
            with open({str(tmp_path / "builds")!r}, "a") as file:
                file.write("x")
            time.sleep(2.0)
            return FakeCompiled(*what)
        compiler._build, compiler._load = build, FakeKernel
        resources.cubin, resources.read_cubin = (lambda d: d), (lambda d, s: RESOURCES)
        Path({str(tmp_path)!r}, f"ready{{time.time_ns()}}").write_text("")
        while len(list(Path({str(tmp_path)!r}).glob("ready*"))) < 3:
            time.sleep(0.01)
        compiler.get(SMALL, TileConfig(), H200)
        print(compiler.counters().compiled, compiler.counters().disk)
    """
    root = str(Path(__file__).parent)
    environment = {**os.environ, "REPLAYSSM_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = sorted(p.communicate(timeout=120)[0].strip() for p in racers)
    assert outputs == ["0 1", "0 1", "1 0"]
    assert (tmp_path / "builds").read_text() == "x"


# ---- the real compiler -----------------------------------------------------------------------------


class Crash(TileConfig):
    """A config whose arrival kills the worker process."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache that the command line filled with one real kernel, and what it printed."""
    directory = tmp_path_factory.mktemp("real")
    done = subprocess.run(
        [
            sys.executable, "-W", "error", "-m", "replayssm_cute.compiler", "--target", "sm_90a",
            "--problem", json.dumps(SMALL.to_json()), "--config", "{}",
        ],
        env={**os.environ, "REPLAYSSM_CACHE_DIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory, done.stdout


def test_command_line_fills_the_cache(real_cache: tuple[Path, str]) -> None:
    directory, output = real_cache
    assert f"[1/1] sm_90a {SMALL.label()} {CONFIG.label()}: compiled" in output
    assert f"1 of 1 kernels are in {directory}" in output
    assert len(list(directory.rglob("*.o"))) == 1


@pytest.mark.fault(27)
def test_second_process_compiles_nothing(real_cache: tuple[Path, str]) -> None:
    code = f"""
        import time
        import torch
        start = time.process_time()  # of the processor: other work on the machine does not count
        import replayssm_cute
        from replayssm_cute import compiler
        from replayssm_cute.target import named
        problem = replayssm_cute.Problem.from_json({SMALL.to_json()!r})
        kernel = compiler.get(problem, replayssm_cute.TileConfig(), named("h200"))
        try:
            kernel()
        except TypeError as error:
            assert "Expects 18 parameters" in str(error), error
        c = compiler.counters()
        print(c.compiled, c.disk, time.process_time() - start)
    """
    compiled, disk, seconds = run_python(code, REPLAYSSM_CACHE_DIR=str(real_cache[0])).split()
    assert (compiled, disk) == ("0", "1")
    assert float(seconds) < 3.0


def test_compile_many_reports_disk_hits_failures_and_crashes(
    real_cache: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(real_cache[0]))
    seen: list[tuple[int, int]] = []
    items = [
        (SMALL, Crash(heads_per_cta=2), H200),
        (SMALL, CONFIG, H200),
        (SMALL, TileConfig(heads_per_cta=3), H200),
        (SMALL, TileConfig(head_split=2), H200),
    ]
    done = compiler.compile_many(items, workers=1, progress=lambda d, n, total: seen.append((n, total)))
    assert [d.item for d in done] == items
    assert done[0].error == "the compiler process died" and not done[0].lasting
    assert (done[1].source, done[1].error) == ("disk", None)
    assert done[2].error is not None and "does not divide" in done[2].error and done[2].lasting
    assert (done[3].source, done[3].error) == ("compiled", None)
    assert done[3].resources is not None and done[3].resources.registers > 0
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sweep keeps of a failure depends on it: the next run, with a better cache, must try again."""
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(blocked / "cache"))
    (done,) = compiler.compile_many([(SMALL, CONFIG, H200)], workers=1)
    assert done.error is not None and "cannot be written" in done.error and not done.lasting


def test_what_progress_raises_ends_compile_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    started: list[compiler.Item] = []

    class Pool:
        """Stands in for a worker process."""

        def submit(self, work: Any, item: compiler.Item) -> Any:
            started.append(item)
            future: Any = compiler.concurrent.futures.Future()
            future.set_result(compiler.Done(item, "compiled", 0.0))
            return future

        def shutdown(self) -> None:
            started.append(None)  # type: ignore[arg-type]

    def stop(done: compiler.Done, count: int, total: int) -> None:
        if count == 2:
            raise TimeoutError("budget spent")

    monkeypatch.setattr(compiler.concurrent.futures, "ProcessPoolExecutor", lambda *_, **__: Pool())
    items = [(dataclasses.replace(SMALL, heads=2 * k), CONFIG, H200) for k in range(1, 6)]
    with pytest.raises(TimeoutError, match="budget spent"):
        compiler.compile_many(items, workers=1, progress=stop)
    assert started == [*items[:2], None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_90a"], "nothing to compile"),
        (["--target", "sm_12", "--problem", "{}"], "missing"),
        (["--target", "sm_12", "--problem", json.dumps(SMALL.to_json())], "unknown target 'sm_12'"),
        (["--target", "sm_90a", "--problem", "{"], "Expecting property name"),
        (["--target", "sm_90a", "--problem", '{"headz": 1}'], "unknown fields"),
        (["--target", "sm_90a", "--plan", "/nonexistent"], "No such file"),
    ],
)
def test_command_line_names_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compile_cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_command_line_reads_plan_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps([{"problem": SMALL.to_json(), "configs": [{"head_split": 2}]}]))
    wanted: list[Any] = []

    def compile_many(items: Any, workers: Any, progress: Any) -> list[compiler.Done]:
        wanted.extend(items)
        return []

    monkeypatch.setattr(compiler, "compile_many", compile_many)
    assert compile_cli.main(["--target", "b300", "--target", "sm_90a", "--plan", str(file)]) == 0
    assert wanted == [(SMALL, TileConfig(head_split=2), named(t)) for t in ("b300", "h200")]
