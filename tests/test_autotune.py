"""``autotune``: the fastest is chosen once, and only for what it was measured for."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fp4_inductor.autotune import CandidateFailedError, Choices, Key, tune

KEY: Key = {"device": "NVIDIA H200", "triton": "3.6.0", "source": "ab12", "shape": "E8 k2 H64 I64", "tokens": 16}


class Clock:
    """A timer with known answers, which counts how often it is asked."""

    def __init__(self, **times: float | None) -> None:
        self.times = times
        self.asked: list[str] = []

    def __call__(self, candidate: str) -> float:
        self.asked.append(candidate)
        time = self.times[candidate]
        if time is None:
            raise CandidateFailedError("out of shared memory")
        return time


def test_the_fastest_is_chosen(tmp_path: Path) -> None:
    clock = Clock(a=3.0, b=1.0, c=2.0)
    assert tune(KEY, "abc", clock, Choices(tmp_path)) == "b"
    assert clock.asked == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ({"a": 1.0, "b": 1.0}, "a"),  # a tie
        ({"a": 1.0, "b": 0.99}, "a"),  # noise
        ({"a": 1.0, "b": 0.9, "c": 0.9}, "b"),
        ({"a": None, "b": 5.0, "c": 4.0}, "c"),
        ({"a": 2.0, "b": None}, "a"),
        ({"a": math.inf, "b": 3.0}, "b"),
    ],
)
def test_ties_and_candidates_that_do_not_run(tmp_path: Path, times: dict[str, float | None], choice: str) -> None:
    assert tune(KEY, list(times), Clock(**times), Choices(tmp_path)) == choice


def test_where_none_runs_the_first_stays_and_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert tune(KEY, "ab", Clock(a=None, b=None), Choices(tmp_path)) == "a"
    assert "no candidate that runs" in caplog.text
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_timer_is_not_a_bad_candidate(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        tune(KEY, "ab", Clock(a=1.0), Choices(tmp_path))


@pytest.mark.parametrize("fresh", [False, True], ids=["in memory", "on disk"])
def test_a_choice_is_made_once(tmp_path: Path, fresh: bool) -> None:
    choices = Choices(tmp_path / "new" / "folder")
    assert tune(KEY, "ab", Clock(a=2.0, b=1.0), choices) == "b"
    clock = Clock(a=0.1, b=1.0)
    later = Choices(choices.directory) if fresh else choices
    assert tune(dict(reversed(KEY.items())), "ab", clock, later) == "b"
    assert not clock.asked


@pytest.mark.parametrize("name", KEY)
def test_a_choice_holds_for_its_key_alone(tmp_path: Path, name: str) -> None:
    choices = Choices(tmp_path)
    tune(KEY, "ab", Clock(a=2.0, b=1.0), choices)
    clock = Clock(a=1.0, b=2.0)
    assert tune({**KEY, name: "another"}, "ab", clock, choices) == "a"
    assert clock.asked == ["a", "b"]


def test_a_choice_that_is_no_candidate_any_more_is_made_anew(tmp_path: Path) -> None:
    choices = Choices(tmp_path)
    tune(KEY, "ab", Clock(a=2.0, b=1.0), choices)
    assert tune(KEY, "ac", Clock(a=2.0, c=1.0), Choices(tmp_path)) == "c"


def break_text(path: Path) -> None:
    path.write_text("{")


def break_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def change_key(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": {**KEY, "device": "NVIDIA B200"}}))


def change_choice(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "choice": ["b"]}))


def replace_by_list(path: Path) -> None:
    path.write_text("[1]")


@pytest.mark.parametrize("spoil", [break_text, break_bytes, change_key, change_choice, replace_by_list])
def test_a_bad_or_foreign_file_is_ignored_with_a_warning(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    tune(KEY, "ab", Clock(a=2.0, b=1.0), Choices(tmp_path))
    (path,) = tmp_path.iterdir()
    spoil(path)
    clock = Clock(a=1.0, b=2.0)
    assert tune(KEY, "ab", clock, Choices(tmp_path)) == "a"
    assert clock.asked == ["a", "b"]
    (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert str(path) in warning.getMessage()
    assert tune(KEY, "ab", Clock(), Choices(tmp_path)) == "a"  # written anew


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    choices = Choices(blocked)
    assert tune(KEY, "ab", Clock(a=2.0, b=1.0), choices) == "b"
    assert "not kept" in caplog.text
    assert tune(KEY, "ab", Clock(), choices) == "b"


def test_files_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader sees until the end of the write is the old file."""
    choices = Choices(tmp_path)
    tune(KEY, "ab", Clock(a=2.0, b=1.0), choices)
    (path,) = tmp_path.iterdir()
    before = path.read_text()
    seen: list[str] = []
    monkeypatch.setattr("os.replace", lambda *_: seen.append(path.read_text()))
    choices.put(KEY, "a")
    assert seen == [before]
