"""Finds the file that hf:OWNER/REPO[:QUANT] means: the repository's files are listed, and one model is chosen."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from graphrt.errors import HubError
from graphrt.models.hub_hf import SPLIT, Unreachable, library, said_as_hub_errors
from graphrt.printing import printable

log = logging.getLogger(__name__)

#: The type that is fetched where nobody asks for one and there are several.
USUAL = "Q4_K_M"
_NAME = re.compile(r"hf:(?P<repo>[^/:\s\\]+/[^/:\s\\]+)(:(?P<quant>[A-Za-z0-9_.-]+))?")
#: GGUF files that are no model of their own: a model's eyes and ears, and importance matrices.
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_MOST_LISTED = 30


def is_repository(name: str) -> bool:
    """Whether the name has the form hf:OWNER/REPO or hf:OWNER/REPO:QUANT."""
    found = _NAME.fullmatch(name)
    return found is not None and not {".", ".."} & set(found["repo"].split("/"))


def with_file(name: str, root: Path) -> str:
    """hf:OWNER/REPO/FILE for a name of that form; of a split model FILE is the first part.

    Where the Hub can't be reached, what the cache `root` holds of the repository is chosen from. Raises HubError.
    """
    found = _NAME.fullmatch(name)
    assert found is not None
    repo, quant = found["repo"], found["quant"]
    try:
        with said_as_hub_errors(f"hf:{repo}"):
            files = library().HfApi().list_repo_files(repo)
    except Unreachable as error:
        folder = root / "hf" / Path(*repo.split("/"))
        files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.gguf"))]
        if not models_of(files):
            raise
        log.warning("%s What is in the cache is used.", error)
    return f"hf:{repo}/{choose(repo, models_of(files), quant)}"


def models_of(files: Iterable[str]) -> list[str]:
    """Of a repository's files those that models are opened by: GGUF files, of split ones the first part."""
    found = []
    for file in sorted(files):
        split = SPLIT.fullmatch(file)
        first = split is None or int(split["no"]) == 1
        if file.lower().endswith(".gguf") and first and not _BESIDE.search(file.rpartition("/")[2]):
            found.append(file)
    return found


def choose(repo: str, models: list[str], quant: str | None) -> str:
    """The model of the type that is asked for; without one that of USUAL, or the only one. Raises HubError."""
    if not models:
        raise HubError(f"hf:{repo}: the repository has no GGUF file. Look for one whose name has GGUF.")
    named = [file for file in models if _is_of(file, quant or USUAL)]
    if len(named) == 1:
        return named[0]
    if quant is None and not named and len(models) == 1:
        return models[0]
    wanted = f"one file of {printable(quant or USUAL)}"
    listed = ", ".join(printable(file) for file in (named or models)[:_MOST_LISTED])
    more = f" and {len(models) - _MOST_LISTED} more" if len(named or models) > _MOST_LISTED else ""
    raise HubError(
        f"hf:{repo} must have {wanted} to be chosen by that, it has {len(named) or 'none'}: {listed}{more}.\n"
        f"Give hf:OWNER/REPO:QUANT, or a file's name: hf:{repo}/FILE"
    )


def _is_of(file: str, quant: str) -> bool:
    """Whether a file's name has the type as a word: "Q4_K" is not in "m-Q4_K_M.gguf"."""
    split = SPLIT.fullmatch(file)
    stem = split["prefix"] if split else file[: -len(".gguf")]
    return re.search(rf"(?:^|[-._/]){re.escape(quant)}(?:[-./]|$)", stem, re.IGNORECASE) is not None
