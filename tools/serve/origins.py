"""Which pages of other sites a visitor's browser may bring answers: none, unless the command line names them (CORS)."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from graphrt.tools.serve.errors import ApiError

#: Seconds for which a browser may remember that it may ask.
_REMEMBERED = "600"
_METHODS = "GET, POST, OPTIONS"


#: Names of the machine that a browser runs on.
_LOCAL = ("localhost", "127.0.0.1", "::1")


def _place(origin: str) -> tuple[str, str | None]:
    """Where a page is from: name and port, and the name alone. Of what is no address nothing."""
    try:
        parts = urlsplit(origin)
        return parts.netloc, parts.hostname
    except ValueError:  # of brackets that are not closed
        return "", None


class Origins:
    """allowed: origins as browsers name them, https://chat.example; "*" for all of them; "localhost" for pages of the
    visitor's own machine, at whatever port."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = {each.rstrip("/").lower() for each in allowed}

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def of(self, request: Request) -> str | None:
        """The allowed origin that a request is from, None for the server's own page and for what is no browser. Raises
        ApiError for another site's."""
        origin = request.headers.get("origin")
        if origin is None:
            return None
        place, name = _place(origin)
        local = "localhost" in self._allowed and name in _LOCAL
        if local or "*" in self._allowed or origin.lower() in self._allowed:
            return origin
        if place and place == request.headers.get("host"):
            return None
        raise ApiError("pages of other sites may not use this server; start it with --cors-origins to let them",
                       status=403)  # fmt: skip

    def asked_before(self, request: Request) -> Response:
        """What a browser asks before it sends a page's request. Raises ApiError."""
        response = Response(headers={"allow": _METHODS})
        origin = self.of(request)
        if origin is not None:
            wanted = request.headers.get("access-control-request-headers", "*")
            response.headers["access-control-allow-methods"] = _METHODS
            response.headers["access-control-allow-headers"] = wanted
            response.headers["access-control-max-age"] = _REMEMBERED
        return response

    @staticmethod
    def let(origin: str | None, response: Response) -> None:
        """Lets a page of that origin read the answer."""
        if origin is not None:
            response.headers["access-control-allow-origin"] = origin
            response.headers["vary"] = "Origin"
            response.headers["access-control-expose-headers"] = "x-request-id, retry-after"
