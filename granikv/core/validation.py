"""explain: what pydantic found wrong with a user's file, as part of one sentence."""

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem, unknown keys before all others, with the nearest known key."""
    problems = error.errors(include_url=False)
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    first = (unknown or problems)[0]
    where = ".".join(str(part) for part in first["loc"])
    if not unknown:
        return f"{where}: {first['msg']}" if where else first["msg"]
    near = difflib.get_close_matches(str(first["loc"][-1]), sorted(_field_names(model)), n=1)
    return f"unknown key {where}" + (f", did you mean {near[0]}?" if near else "")


def _field_names(model: type[BaseModel]) -> set[str]:
    """Fields of the model and of every model inside it."""
    schema: dict[str, Any] = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return {name for part in parts for name in part.get("properties", {})}
