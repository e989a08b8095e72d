"""Which backend is picked, and what is said of those that can't be."""

from __future__ import annotations

import pytest
from support.toy import ToyBackend

from graphrt import backend
from graphrt.backend import discover, get_backend
from graphrt.errors import BackendError


class Best(ToyBackend):
    name = "best"

    @classmethod
    def score(cls) -> int:
        return 1000


class BrokenBest(Best):
    name = "broken"

    @classmethod
    def unusable(cls) -> str | None:
        return "its device is on fire"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_REGISTERED", {"broken": BrokenBest})


def test_what_can_not_be_used_is_never_the_best() -> None:
    found = discover()
    assert (found["broken"].score, found["broken"].reason) == (0, "its device is on fire")
    assert get_backend().name != "broken" and next(iter(found)) != "broken"
    with pytest.raises(BackendError, match="'broken' can't be used here: its device is on fire"):
        get_backend("broken")


def test_the_highest_score_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_REGISTERED", {"best": Best})
    assert get_backend().name == "best"
    scores = [info.score for info in discover().values()]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("version", [0, 1, 3, None])
def test_another_version_of_the_interface_is_refused(version: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenBest, "api_version", version)
    assert f"written for backend API version {version}" in str(discover()["broken"].reason)
