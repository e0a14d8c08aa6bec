"""Where each buffer of a program lies in its arena (``memo.placement/1``)."""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import Bytes


class TemplateSlots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Offsets of one template's own buffers, relative to the base of each of its instances."""

    template: str
    offsets_bytes: dict[str, Bytes]


class Placement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.placement/1"
):
    """Offsets per template buffer, one base per instance, and the offsets of the buffers that outlive instances."""

    program_sha256: str
    arena_bytes: Bytes
    templates: list[TemplateSlots]
    instance_bases_bytes: list[Bytes]
    buffers: dict[str, Bytes] = {}
    technique: str = ""
