"""`marlaas model …`: base models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.output import Cell, JsonFlag, print_json, say, show
from app.settings import get_settings

app = typer.Typer(no_args_is_help=True, help="Base models: fetching and listing them.")

CELLS: dict[str, Cell] = {
    "MODEL": lambda m: m["name"],
    "TYPE": lambda m: m["model_type"],
    "LAYERS": lambda m: m["layers"],
    "HIDDEN": lambda m: m["hidden_size"],
    "CONTEXT": lambda m: m["context_length"],
    "WEIGHTS": lambda m: m["dtype"],
    "FOLDER": lambda m: m["folder"],
}


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="smollm2-135m-instruct, a local folder, or a Hugging Face id.")],
    register: Annotated[bool, typer.Option("--register", help="Also make it known to the service.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetches a model, unless it is here; `marlaas up` registers all models that are."""
    from app import base_models

    folder = base_models.pull(name, get_settings().models_path)
    if register:
        from app.up import register_pulled

        register_pulled(get_settings().models_path, first=base_models.model_name(folder))
    if as_json:
        print_json({"name": base_models.model_name(folder), "folder": str(folder), **base_models.describe(folder)})
    else:
        say(f"{base_models.model_name(folder)} is in {folder}")


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """Shows the models on this machine."""
    from app import base_models

    rows = [
        {"name": base_models.model_name(folder), "folder": str(folder), **base_models.describe(folder)}
        for folder in base_models.pulled(get_settings().models_path)
    ]
    show(rows, CELLS, as_json, empty="no models here; marlaas model pull smollm2-135m-instruct")
