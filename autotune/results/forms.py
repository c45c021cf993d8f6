"""Name the forms in which a winner is exported."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["json", "yaml", "cli", "python", "env"]
FORMATS: tuple[Format, ...] = get_args(Format)
LaunchFormat = Literal["torchrun", "accelerate"]
"""How to start several ranks: a command line, and the configuration file of ``accelerate launch``."""
LAUNCH_FORMATS: tuple[LaunchFormat, ...] = get_args(LaunchFormat)
Recipe = Literal["trl", "axolotl", "llama-factory", "model-card"]
"""Forms for other trainers' configuration files, and for a model card."""
AnyForm = Format | LaunchFormat | Recipe
ALL_FORMS: tuple[AnyForm, ...] = (*FORMATS, *LAUNCH_FORMATS, *get_args(Recipe))
