"""Low-rank adapters as TRL's arguments say them, for Hugging Face's PEFT.

Sources: TRL 1.16 (``trainer/model_config.py``, ``get_peft_config`` of ``trainer/utils.py``) and accelerate 1.15
(``utils/fsdp_utils.py``: FSDP2 keeps trained parameters in fp32, and frozen ones as they were loaded).
"""

from __future__ import annotations

import re
from typing import Any

from memo_sim.contract.adapters import GROUPS, NONE, TARGETS, adapters_of, parse_adapters
from memo_sim.contract.errors import UsageError
from memo_sim.contract.huggingface import model_type
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.settings import Settings

MODULES = {target: "o_proj" if target == "proj" else f"{target}_proj" for target in TARGETS}
"""The module of each target, in models that store every product by itself."""
PACKED = ("gpt2", "phi3")
"""Model types with Q, K and V in one module, which has one adapter in PEFT and three here."""
KEYS = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora")
OTHERS = ("use_dora", "lora_target_parameters", "lora_modules_to_save")
"""Arguments of more than low-rank adapters of products."""
ALL_LINEAR = "all-linear"


def check_adapters(decisions: Decisions) -> None:
    """Refuse adapters that TRL's arguments cannot say.

    Raises:
        UsageError: naming what they cannot say.
    """
    if (lora := decisions.lora) is None:
        return
    if lora.alpha != int(lora.alpha):
        raise UsageError("TRL's alpha of adapters is a whole number", where="decisions.adapters", got=f"{lora.alpha:g}")
    if (kind := model_type(decisions.model)) in PACKED:
        raise UsageError(
            f"adapters of {kind} are of the packed Q, K and V there",
            where="decisions.adapters",
            got=decisions.adapters,
            wanted="a model that stores Q, K and V by themselves",
            hint="memo-exec run trains these adapters",
        )


def arguments_of_adapters(adapters: str) -> dict[str, Any]:
    """Return TRL's arguments of a plan's adapters; none without adapters."""
    lora = adapters_of(adapters)
    if lora is None:
        return {}
    return {
        "use_peft": True,
        "lora_r": lora.rank,
        "lora_alpha": int(lora.alpha),
        "lora_dropout": 0.0,
        "lora_target_modules": [MODULES[target] for target in lora.targets],
        "use_rslora": lora.rslora,
    }


def read_adapters(arguments: Settings, model: Model, assumed: list[str]) -> str:
    """Return the adapters that TRL's arguments say, as a plan writes them; ``none`` where all weights are trained.

    What memo has no words for is listed as ignored.
    """
    if not arguments.flag("use_peft"):
        arguments.says("use_peft", "all weights are trained")
        return NONE
    rank, alpha = arguments.whole("lora_r") or 16, arguments.whole("lora_alpha") or 32
    targets = _targets(arguments, model, assumed)
    if targets is None:
        return NONE
    rslora = ",rslora" if arguments.flag("use_rslora") else ""
    found = parse_adapters(f"r={rank},alpha={alpha},targets={'+'.join(targets)}{rslora}", option="lora_r")
    for key in KEYS:
        arguments.says(key, f"adapters {found}")
    if arguments.text("lora_dropout") not in ("0", "0.0"):
        arguments.ignore("lora_dropout", "memo's adapters have no dropout, which is short")
        if not arguments.has("lora_dropout"):
            assumed.append("adapters without dropout; TRL's default is 0.05, which is short")
    on = [key for key in OTHERS if arguments.has(key) and arguments.text(key) not in ("false", "False")]
    arguments.ignore(on, "memo has low-rank adapters of linear products alone")
    return found


def _targets(arguments: Settings, model: Model, assumed: list[str]) -> list[str] | None:
    """Return the targets of adapters; None where one is no product that memo has adapters of."""
    raw = arguments.raw("lora_target_modules")
    if raw is None:
        assumed.append("lora_target_modules q_proj, v_proj: PEFT's default")
        return ["q", "v"]
    names = [str(name) for name in raw] if isinstance(raw, list | tuple) else re.split(r"[\s,]+", str(raw).strip("[] "))
    ours = {module: target for target, module in MODULES.items()}
    if names == [ALL_LINEAR]:
        return ["qkv", "proj"] if model.mixture else [*GROUPS, "proj"]
    found = [ours.get(name.strip("'\" ")) for name in names]
    known = [target for target in found if target is not None]
    if len(known) == len(found):
        return known
    on = [key for key in KEYS if arguments.has(key)]
    why = f"memo has adapters of {', '.join(ours)} alone: priced as training of all parameters"
    arguments.ignore(on, why)
    return None
