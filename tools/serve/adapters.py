"""A served model's adapters: which a request asks for, and how many of each others get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.errors import SessionError
from graphrt.models.adapters import check_scales
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.schemas import AdapterScale, Generating


@dataclass
class ServedAdapters:
    """model: the model's names; names: the adapters', in the order of their ids; usual: their scales in texts whose
    request says nothing of them."""

    model: Sequence[str]
    names: Sequence[str]
    usual: tuple[float, ...]

    @property
    def as_models(self) -> dict[str, int]:
        """What requests may call the model with one adapter -> which one. As vLLM has it an adapter's name will do,
        where it isn't the model's."""
        found = {name: i for i, name in enumerate(self.names) if name not in self.model}
        return found | {f"{model}:{name}": i for model in self.model for i, name in enumerate(self.names)}

    @property
    def listed(self) -> list[str]:
        """The same, each adapter once."""
        return [f"{self.model[0]}:{name}" if name in self.model else name for name in self.names]

    def of(self, request: Generating) -> tuple[float, ...]:
        """The scales that a request asks for. Raises ApiError."""
        named = self.as_models.get(request.model or "")
        if request.lora is None:
            return self.usual if named is None else tuple(float(i == named) for i in range(len(self.names)))
        if named is not None:
            raise ApiError("an adapter is named in one way, got a model with one and lora; leave one out", param="lora")
        return self.scales(request.lora)

    def scales(self, given: Sequence[AdapterScale]) -> tuple[float, ...]:
        """Those of a list by ids, 0 of adapters that it leaves out. Raises ApiError."""
        found = [0.0] * len(self.names)
        ids = [each.id for each in given]
        bad = next((i for i in ids if not 0 <= i < len(found) or ids.count(i) > 1), None)
        if bad is not None:
            raise ApiError(f"the id of an adapter must be one of 0 to {len(found) - 1}, each at most once, got {bad}; "
                           f"see /lora-adapters", param="lora")  # fmt: skip
        for each in given:
            found[each.id] = each.scale
        try:
            return check_scales(found, len(found))
        except SessionError as error:
            raise ApiError(str(error), param="lora") from error

    def told(self) -> list[dict[str, Any]]:
        """As /lora-adapters tells them. !! Their names alone: where files lie is the host's."""
        rows = zip(self.names, self.usual)
        return [{"id": i, "path": name, "name": name, "scale": scale} for i, (name, scale) in enumerate(rows)]
