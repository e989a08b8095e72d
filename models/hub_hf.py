"""Fetches hf:REPO/FILE from the Hugging Face Hub. Kept apart from hub.py: it needs huggingface_hub."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrt import private_files
from graphrt.errors import HubError
from graphrt.models import checksums
from graphrt.models.hub_cache import check_sha256, install, partial_folder

log = logging.getLogger(__name__)

_NAME = re.compile(r"hf:(?P<repo>[^/]+/[^/]+)/(?P<file>.+)")
SPLIT = re.compile(r"(?P<prefix>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


class Unreachable(HubError):
    """The Hub gives no answer, or none that can be used."""


@dataclass(frozen=True)
class Metadata:
    """Of a file on the Hub. revision: the commit that it is of; etag: a large file's SHA-256, else another hash."""

    revision: str | None
    etag: str


def pull(name: str, root: Path, show: bool) -> Path:
    """Fetches the file (of a split model, all its files) to root/hf/REPO/FILE and returns it. Raises HubError."""
    repo, files = _parse(name)
    folder = place(name, root).parent
    for file in files:
        target = folder / Path(file).name
        if not (target.is_file() and _is_as_fetched(repo, file, root, target)):
            _fetch(repo, file, root, target, show)
    return folder / Path(files[0]).name


def place(name: str, root: Path) -> Path:
    """Where hf:REPO/FILE lies in the cache, or would. Raises HubError for a name of another form."""
    repo, files = _parse(name)
    return root / "hf" / Path(*repo.split("/"), *files[0].split("/"))


def _is_as_fetched(repo: str, file: str, root: Path, target: Path) -> bool:
    """False for a file in the cache that must be fetched again, which a sentence tells."""
    same = checksums.matches(target, root)
    if same is None:  # of a graphrt that kept none, or put there by hand
        same = _is_as_published(repo, file, root, target)
    if not same:
        checksums.say_changed(target)
    return same


def _is_as_published(repo: str, file: str, root: Path, target: Path) -> bool:
    """Asks the Hub. What it can't tell of is believed as it is from now on, with a sentence."""
    try:
        with said_as_hub_errors(f"hf:{repo}/{file}"):
            etag = _metadata(repo, file).etag
        if checksums.SHA256.fullmatch(etag):
            return bool(checksums.matches(target, root, etag))
        why = "the Hub tells none either"
    except HubError as error:
        why = str(error)
    log.warning("%s: no checksum of it was kept, so it is used as it is: %s", target, why)
    checksums.keep(target, root, checksums.sha256_of(target))
    return True


def _parse(name: str) -> tuple[str, list[str]]:
    match = _NAME.fullmatch(name)
    # ".." would leave the cache folder, and so would Windows' other ways of writing a path
    odd = any(part in ("", ".", "..") for part in name.removeprefix("hf:").split("/"))
    if match is None or odd or re.search(r"[\x00-\x1f\x7f\\:]", name.removeprefix("hf:")):
        raise HubError(
            f"a model on Hugging Face is hf:OWNER/REPO[:QUANT] or hf:OWNER/REPO/FILE, got {name[:200]!r}. Give its "
            f"full name."
        )
    split = SPLIT.fullmatch(match["file"])
    if split is None:
        return match["repo"], [match["file"]]
    count = int(split["count"])
    if int(split["no"]) != 1:
        first = f"hf:{match['repo']}/{split['prefix']}-00001-of-{count:05d}.gguf"
        raise HubError(f"{name}: this is one part of a split model. Give its first part: {first}")
    return match["repo"], [f"{split['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def library() -> Any:
    if not {"HF_HOME", "XDG_CACHE_HOME"} & os.environ.keys() and "huggingface_hub" not in sys.modules:
        try:
            private_files.check_home()
        except OSError:  # the library would take ./~ for the home folder, and a token that lies there for ours
            os.environ["HF_HOME"] = str(private_files.private_folder(private_files.temporary_cache() / "huggingface"))
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError as err:
        if err.name != "huggingface_hub":
            raise
        raise HubError("hf: names need the package huggingface_hub. Run: pip install huggingface_hub") from None
    return huggingface_hub


def _metadata(repo: str, file: str) -> Metadata:
    """What the Hub says of the file. The caller turns errors into HubErrors."""
    hf = library()
    found = hf.get_hf_file_metadata(hf.hf_hub_url(repo, file))
    revision, etag = found.commit_hash, str(found.etag or "")
    if revision is not None and not re.fullmatch("[0-9a-f]{1,64}", str(revision)):
        raise HubError(f"hf:{repo}/{file}: the Hub must name a revision, got {str(revision)[:40]!r}. Try later.")
    return Metadata(revision, etag)


def _fetch(repo: str, file: str, root: Path, target: Path, show: bool) -> None:
    hf = library()
    label = f"hf:{repo}/{file}"
    with partial_folder(root, "hf") as folder:
        with said_as_hub_errors(label):
            metadata = _metadata(repo, file)
            bar = None if show else _quiet_bar()
            got = Path(hf.hf_hub_download(repo, file, revision=metadata.revision, local_dir=folder, tqdm_class=bar))
        if got.is_symlink() or not got.is_file() or not got.resolve().is_relative_to(folder.resolve()):
            raise HubError(f"{label}: the download must be a file in {folder}, it is not. Update huggingface_hub.")
        sha256 = checksums.sha256_of(got)
        if checksums.SHA256.fullmatch(metadata.etag):  # few small files have another hash, and their size was checked
            check_sha256(label, sha256, metadata.etag)
        install(got, target, root, sha256)


@contextlib.contextmanager
def said_as_hub_errors(label: str) -> Iterator[None]:
    """The library's errors as HubErrors. label: of the file that was asked for."""
    errors = library().errors
    network = _network_errors(errors)
    try:
        yield
    except errors.GatedRepoError:
        raise HubError(f"{label}: access needs consent. Accept its terms, then run `hf auth login`.") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"{label}: there is no such repository, or it is private. Check OWNER/REPO.") from None
    except errors.LocalEntryNotFoundError:
        raise Unreachable(f"{label}: the Hub can't be reached. Check the network and HF_HUB_OFFLINE.") from None
    except errors.EntryNotFoundError:
        raise HubError(f"{label}: the repository has no such file. Look at its list of files.") from None
    except errors.HFValidationError:
        raise HubError(f"{label}: that is no valid repository name. Give hf:OWNER/REPO[:QUANT].") from None
    except network as err:
        status = getattr(getattr(err, "response", None), "status_code", None)
        reason = f"the Hub answered {status}" if status else "the Hub can't be reached"
        raise Unreachable(f"{label}: {reason}. Check the network and HF_HUB_OFFLINE, or try later.") from None


def _network_errors(errors: Any) -> tuple[type[BaseException], ...]:
    """What the library raises when the network or the server fails."""
    # It lets the errors of its HTTP client through, whichever that is: their base is among its own error's bases.
    transport = [base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    own = [getattr(errors, name) for name in ("XetDownloadError", "FileMetadataError") if hasattr(errors, name)]
    return (errors.HfHubHTTPError, ConnectionError, TimeoutError, *transport, *own)


def _quiet_bar() -> Any:
    """The library's progress bar, switched off."""
    from huggingface_hub.utils.tqdm import tqdm

    class Quiet(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call, unused-ignore]

    return Quiet
