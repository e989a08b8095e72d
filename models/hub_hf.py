"""Fetches hf:REPO/FILE from the Hugging Face Hub. Kept apart from hub.py: it needs huggingface_hub."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from graphrt.errors import HubError
from graphrt.models.hub import check_sha256, install, partial_folder

_NAME = re.compile(r"hf:(?P<repo>[^/]+/[^/]+)/(?P<file>.+)")
_SPLIT = re.compile(r"(?P<prefix>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def pull(name: str, root: Path, show: bool) -> Path:
    """Fetches the file (of a split model, all its files) to root/hf/REPO/FILE and returns it. Raises HubError."""
    repo, files = _parse(name)
    folder = root / "hf" / Path(*repo.split("/"))
    for file in files:
        if not (folder / file).is_file():
            _fetch(repo, file, root, folder / file, show)
    return folder / files[0]


def _parse(name: str) -> tuple[str, list[str]]:
    match = _NAME.fullmatch(name)
    # ".." would leave the cache folder
    if match is None or any(part in ("", ".", "..") for part in name.removeprefix("hf:").split("/")) or "\\" in name:
        raise HubError(f"a model on Hugging Face is hf:OWNER/REPO/FILE, got {name[:200]!r}. Give its full name.")
    split = _SPLIT.fullmatch(match["file"])
    if split is None:
        return match["repo"], [match["file"]]
    count = int(split["count"])
    if int(split["no"]) != 1:
        first = f"hf:{match['repo']}/{split['prefix']}-00001-of-{count:05d}.gguf"
        raise HubError(f"{name}: this is one part of a split model. Give its first part: {first}")
    return match["repo"], [f"{split['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError as err:
        if err.name != "huggingface_hub":
            raise
        raise HubError("hf: names need the package huggingface_hub. Run: pip install huggingface_hub") from None
    return huggingface_hub


def _fetch(repo: str, file: str, root: Path, target: Path, show: bool) -> None:
    hf = _library()
    errors = hf.errors
    label = f"hf:{repo}/{file}"
    network = _network_errors(errors)
    with partial_folder(root, "hf") as folder:
        try:
            metadata = hf.get_hf_file_metadata(hf.hf_hub_url(repo, file))
            got = hf.hf_hub_download(
                repo, file, revision=metadata.commit_hash, local_dir=folder, tqdm_class=None if show else _quiet_bar()
            )
        except errors.GatedRepoError:
            raise HubError(f"{label}: access needs consent. Accept its terms, then run `hf auth login`.") from None
        except errors.RepositoryNotFoundError:
            raise HubError(f"{label}: there is no such repository, or it is private. Check OWNER/REPO.") from None
        except errors.LocalEntryNotFoundError:
            raise HubError(f"{label}: the Hub can't be reached. Check the network and HF_HUB_OFFLINE.") from None
        except errors.EntryNotFoundError:
            raise HubError(f"{label}: the repository has no such file. Look at its list of files.") from None
        except errors.HFValidationError:
            raise HubError(f"{label}: {repo!r} is no valid repository name. Give hf:OWNER/REPO/FILE.") from None
        except network as err:
            status = getattr(getattr(err, "response", None), "status_code", None)
            reason = f"the Hub answered {status}" if status else "the Hub can't be reached"
            raise HubError(f"{label}: {reason}. Check the network and HF_HUB_OFFLINE, or try later.") from None
        _check(label, Path(got), str(metadata.etag or ""))
        install(Path(got), target)


def _network_errors(errors: Any) -> tuple[type[BaseException], ...]:
    """What the library raises when the network or the server fails."""
    # It lets the errors of its HTTP client through, whichever that is: their base is among its own error's bases.
    transport = [base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    own = [getattr(errors, name) for name in ("XetDownloadError", "FileMetadataError") if hasattr(errors, name)]
    return (errors.HfHubHTTPError, ConnectionError, TimeoutError, *transport, *own)


def _check(label: str, file: Path, etag: str) -> None:
    """Large files have their SHA-256 as ETag. The few small ones have another hash, and their size was checked."""
    if not _SHA256.fullmatch(etag):
        return
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
    check_sha256(label, digest.hexdigest(), etag)


def _quiet_bar() -> Any:
    """The library's progress bar, switched off."""
    from huggingface_hub.utils.tqdm import tqdm

    class Quiet(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call, unused-ignore]

    return Quiet
